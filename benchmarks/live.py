"""Twelve jobs of mixed size on a cluster of two CPU workers, beside first come, first served alone, and both foretold.

    python -m benchmarks.live [--seconds 8]

Makes a small base, measures its ticks in two processes at once, as the workers will be, then starts Ray on this machine
and gives the same jobs to the scheduler as it is, and to one with `order: submitted` and one job a worker. The
simulator plays both with that profile. A job takes about so many seconds alone, on average. Rows go to
results/scheduling/live.json: how many times sooner the jobs end, as seen and as foretold, and the percent between them.
Needs two cores that nothing else uses.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks import results
from benchmarks.cluster import until
from benchmarks.cluster_load import write_base
from benchmarks.fidelity import TOY
from tlora.actors.names import NAMESPACE
from tlora.actors.scheduler import connect
from tlora.capacity import BaseModel, Capacity, Load
from tlora.client import Client
from tlora.cluster import ClusterSpec
from tlora.scheduling import Costs, Rules
from tlora.simulate import Simulator
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.traces import BATCHES, RANKS, TraceJob

WORKERS, JOBS, GOAL = 2, 12, 15.0
LENGTHS = (32, 64, 128, 256)
WAYS: dict[str, tuple[Rules, dict[str, Any]]] = {
    "tlora": (Rules(), {}),
    "fcfs": (Rules(shares=False, urgency="submitted", preempts=False), {"order": "submitted", "jobs_per_worker": 1}),
}
"""Rules of the simulator, and the settings of a cluster that do the same."""


def measured(base: str, lengths: Sequence[int]) -> dict[str, Any]:
    """A profile, taken in a process of its own, which gives way to others as Ray has its workers do."""
    from tlora.profiling import profile
    from tlora.supermodel import SuperModel

    os.nice(15)
    torch.set_num_threads(1)
    return profile(SuperModel.load(BaseSpec(model=base), device="cpu"), lengths=lengths)


def profiled(base: str, lengths: Sequence[int] = LENGTHS) -> dict[str, Any]:
    """On all workers at once; the mean."""
    with multiprocessing.get_context("spawn").Pool(WORKERS) as pool:
        profiles = pool.starmap(measured, [(base, lengths)] * WORKERS, chunksize=1)
    ticks = [
        {**rows[0], "tick_ms": statistics.mean(row["tick_ms"] for row in rows)}
        for rows in zip(*(one["ticks"] for one in profiles), strict=True)
    ]
    return {**profiles[0], "ticks": ticks}


def draw(base: str, model: BaseModel, seconds: float) -> list[TraceJob]:
    """All there at once; some far longer than others."""
    random = np.random.default_rng(0)
    shares = random.lognormal(0.0, 1.0, JOBS)
    jobs = []
    for at, share in enumerate(shares / shares.mean()):
        rank, batch, length = (int(random.choice(choices)) for choices in (RANKS, BATCHES, LENGTHS[1:]))
        load = Load(rank, batch, length)
        steps = max(2, round(seconds * share / model.alone_s(load)))
        jobs.append(TraceJob(f"j{at:02d}", 0.0, 1, steps * model.alone_s(load), base, load, 1.0))
    return jobs


def foretold(capacity: Capacity, jobs: Sequence[TraceJob], rules: Rules) -> dict[str, float]:
    """Completion times, on workers that have their base and do not split jobs."""
    simulator = Simulator(capacity, jobs, WORKERS, rules=rules, costs=Costs(load_s=0.0), can_split=False)
    return {outcome.name: outcome.completion_s for outcome in simulator.run().outcomes}


def spec_of(folder: Path, name: str, load: Load, steps: int, **changes: Any) -> JobSpec:
    rows = folder / f"rows{load.length}.jsonl"
    if not rows.exists():
        draws = np.random.default_rng(load.length).integers(1, 256, (16, load.length))
        rows.write_text("".join(json.dumps({"input_ids": list(map(int, row))}) + "\n" for row in draws))
    return parse_job(
        {
            "name": name, "base": {"model": str(folder / "base")}, "adapter": {"rank": load.rank},
            "data": {"path": str(rows), "max_length": load.length}, "batch_size": load.batch, "steps": steps,
            "output": f"out/{name}", **changes,
        }
    )  # fmt: skip


def seen(folder: Path, profile: Path, model: BaseModel, jobs: Sequence[TraceJob], way: str) -> dict[str, float]:
    """Completion times on a cluster whose workers have loaded their base before."""
    storage = folder / way
    settings = {"gpus_per_worker": 0, "max_workers": WORKERS, "profile": str(profile), **WAYS[way][1]}
    connect(ClusterSpec(storage=str(storage), state=str(storage / "state"), **settings))
    client = Client()
    large = Load(2, 8, LENGTHS[-1])
    warm = [spec_of(folder, f"warm{at}", large, 10_000, max_slowdown=1.0) for at in range(WORKERS)]
    client.submit(warm, check=False)
    until(lambda: [worker["base_loads"] for worker in client.workers()] == [1] * WORKERS)
    client.cancel([spec.name for spec in warm])
    client.wait([spec.name for spec in warm])
    client.submit(
        [spec_of(folder, job.name, job.load, round(job.duration_s / model.alone_s(job.load))) for job in jobs],
        check=False,
    )
    rows = client.wait([job.name for job in jobs])
    if failed := [row for row in rows if row["state"] != "finished"]:
        raise RuntimeError(f"job {failed[0]['name']}: {failed[0]['reason']}")
    client.down()
    return {row["name"]: row["changed_s"] - row["submitted_s"] for row in rows}


def rows_of(real: Mapping[str, Mapping[str, float]], told: Mapping[str, Mapping[str, float]]) -> list[results.Row]:
    rows = []
    for what, measure in (("makespan", max), ("completion", statistics.mean)):
        ours, theirs = (measure(times["fcfs"].values()) / measure(times["tlora"].values()) for times in (real, told))
        row = results.row(
            f"live/{what}", f"{JOBS} jobs, {WORKERS} workers", ours, "foretold; ratio: error in %", theirs, GOAL,
            unit="× sooner", gpu="CPU",
        )  # fmt: skip
        rows.append(replace(row, ratio=100.0 * abs(ours / theirs - 1.0)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    arguments = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory(prefix="tl") as text:
        folder = Path(text)
        write_base(folder, TOY)
        content = profiled(str(folder / "base"))
        (folder / "profile.json").write_text(json.dumps(content))
        capacity = Capacity.of(content)
        ((base, model),) = capacity.models.items()
        print(f"profile: fitted within {100 * model.error:.1f} %", flush=True)
        jobs = draw(base, model, arguments.seconds)
        told = {way: foretold(capacity, jobs, rules) for way, (rules, _) in WAYS.items()}
        environment = {"PYTHONPATH": os.environ.get("PYTHONPATH") or os.getcwd(), "OMP_NUM_THREADS": "1",
                       "RAY_AUTH_MODE": "disabled"}  # fmt: skip
        ray.init(address="local", num_cpus=2 * WORKERS, include_dashboard=False, namespace=NAMESPACE,
                 log_to_driver=False, _temp_dir=text, runtime_env={"env_vars": environment})  # fmt: skip
        try:
            real = {way: seen(folder, folder / "profile.json", model, jobs, way) for way in WAYS}
        finally:
            ray.shutdown()
    for way in WAYS:
        print(way, {name: (round(told[way][name], 1), round(real[way][name], 1)) for name in sorted(told[way])})
    results.write("live", rows_of(real, told), "scheduling")


if __name__ == "__main__":
    main()

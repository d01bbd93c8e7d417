"""Two sweeps and four plain jobs at once on two workers, beside the simulator, and beside the sweeps in turn.

    python -m benchmarks.sweep_cluster BASE [--configurations 12] [--epochs 4]

On a Ray of this machine with CPU workers; BASE: a model's folder, as small as can be. Both workers are warm, and the
base's ticks known, before anything is timed. The simulator replays the run's own curves, with a profile that is taken
right after it, in two processes at once, on the same cores beside the same scheduler and Ray: wants a machine that
nothing else uses. Rows go to results/sweeps/cluster.json.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import private_ray, results
from benchmarks.live import profiled
from tlora.actors.scheduler import connect
from tlora.base import Outline
from tlora.capacity import Capacity, Load
from tlora.client import Client
from tlora.cluster import ClusterSpec
from tlora.data import load_tokenizer
from tlora.job import State
from tlora.local import read_data
from tlora.scheduling import Costs
from tlora.spec import JobSpec, parse_job
from tlora.sweep import Curve, samples_at
from tlora.sweep_simulate import KnownSweep, SweepSimulator
from tlora.sweep_spec import SweepSpec, parse_sweep
from tlora.sweep_state import SweepState
from tlora.traces import TraceJob
from tlora.tracking import read_metrics

WORKERS, SEATS, PLAIN = 2, 16, 4
WARM = Costs(load_s=0.0)
SPACE = {"optim.lr": {"log_uniform": [1e-4, 1e-1]}, "adapter.rank": [2, 8, 16], "batch_size": [4, 8]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--configurations", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--rows", type=int, default=240)
    arguments = parser.parse_args()
    with private_ray.started(num_cpus=8) as folder:
        measured = Bench(folder, arguments).run()
    report(arguments, *measured)


class Bench:
    """One cluster, and what is sent to it."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        self.folder, self.arguments, self.base = folder, arguments, str(arguments.base.absolute())
        rng = random.Random(0)
        for name, count in (("rows", arguments.rows), ("held_out", 24)):
            numbers = [rng.randrange(1000, 9999) for _ in range(count)]
            rows = [json.dumps({"prompt": f"next of {n}", "completion": f" {n + 1}"}) + "\n" for n in numbers]
            (folder / f"{name}.jsonl").write_text("".join(rows))
        self.data = {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl"), "max_length": 64}

    def sweep(self, name: str, seed: int, epochs: int) -> SweepSpec:
        job = {"base": {"model": self.base}, "data": self.data, "adapter": {"targets": "all-linear"}, "epochs": epochs}
        count = {"configurations": self.arguments.configurations}
        rules = {"evaluations": 16, "halving": {"warmup": 1 / 8}}
        values = {"name": name, "job": job, "space": SPACE, "sampler": {"seed": seed}, "budget": count}
        return parse_sweep({**values, "early_exit": rules, "output": str(self.folder / "out" / name)})

    def job(self, name: str, **changes: Any) -> JobSpec:
        values = {"name": name, "base": {"model": self.base}, "data": {**self.data, "eval_path": None}, "batch_size": 4}
        adapter = {"targets": "all-linear"}
        return parse_job({**values, "adapter": adapter, "output": str(self.folder / "out" / name), **changes})

    def run(self) -> tuple[float, float, float]:
        """Seconds: all at once, as the simulator has it, and the sweeps in turn, the jobs beside the first."""
        settings = {"gpus_per_worker": 0, "max_workers": WORKERS, "jobs_per_worker": SEATS, "idle_s": 600.0}
        connect(ClusterSpec(storage=str(self.folder), state=str(self.folder / "state"), **settings))
        client, epochs = Client(), self.arguments.epochs
        self.warm(client)
        sweeps = [self.sweep("s", 1, epochs), self.sweep("t", 2, 2 * epochs)]
        jobs = [self.job(f"plain{n}", epochs=epochs) for n in range(PLAIN)]
        together = self.time(client, sweeps, jobs)
        in_turn = 0.0
        for sweep, beside in zip(sweeps, (jobs, []), strict=True):
            again = sweep.model_copy(update={"name": f"{sweep.name}2", "output": f"{sweep.output}2"})
            anew = [self.job(f"{job.name}2", epochs=epochs) for job in beside]
            in_turn += self.time(client, [again], anew)
        capacity = Capacity.of(profiled(self.base, lengths=[8, 16, 32, 64, 128, 256, 512]))
        client.down()
        return together, self.foretell(capacity, sweeps, jobs), in_turn

    def warm(self, client: Client) -> None:
        """Both workers, with ticks of many sizes (what is not measured yet fills the seats of one first), and whoever
        drives sweeps."""
        jobs = [self.job(f"warm{n}", batch_size=2 ** (n % 5), steps=16 + 4 * n) for n in range(SEATS + 2)]
        client.submit(jobs, check=False)
        client.sweep(self.sweep("warm", 3, 1))
        rows = client.wait(["warm", *(job.name for job in jobs)])
        assert all(row["state"] == State.FINISHED for row in rows), rows
        assert len(client.workers()) == WORKERS, client.workers()
        print("both workers are warm", flush=True)

    def time(self, client: Client, sweeps: Sequence[SweepSpec], jobs: Sequence[JobSpec]) -> float:
        began_s = time.monotonic()
        client.submit(jobs, check=False)
        for sweep in sweeps:
            client.sweep(sweep, check=False)  # its base and data were checked as both workers were warmed
        rows = client.wait([spec.name for spec in (*sweeps, *jobs)])
        assert all(row["state"] == State.FINISHED for row in rows), rows
        seconds = time.monotonic() - began_s
        print(f"{', '.join(row['name'] for row in rows)}: {seconds:.1f} s", flush=True)
        return seconds

    def foretell(self, capacity: Capacity, sweeps: Sequence[SweepSpec], jobs: Sequence[JobSpec]) -> float:
        """Makespan, by the simulator."""
        outline, tokenizer = Outline.load(sweeps[0].first.base), load_tokenizer(sweeps[0].first.base)
        data = read_data(sweeps[0].first, outline, tokenizer)
        length = round(sum(map(len, data.train)) / len(data.train))
        known = []
        for spec in sweeps:
            state = SweepState.load(spec.folder)
            assert state is not None
            curves, loads = {}, {}
            for one in state.candidates:
                job = spec.candidate(one.number, one.values)
                rows = read_metrics(job.folder)
                curves[one.name] = Curve.of(rows, len(data.train), job.batch_size, len(data.eval), "eval_loss")
                loads[one.name] = Load(job.adapter.rank, job.batch_size, length)
            totals = {one.name: one.total for one in state.candidates}
            known.append(KnownSweep(spec.name, self.base, curves, loads, state.every, spec.early_exit, totals=totals))
        plain = []
        for job in jobs:
            load = Load(job.adapter.rank, job.batch_size, length)
            steps = -(-len(data.train) // job.batch_size) * job.epochs
            assert samples_at(int(steps), len(data.train), job.batch_size) == len(data.train) * job.epochs
            seconds = steps * capacity.models[self.base].alone_s(load)
            plain.append(TraceJob(job.name, 0.0, 1, seconds, self.base, load, 1.0))
        replay = SweepSimulator(capacity, plain, WORKERS, costs=WARM, sweeps=known, is_backlog=True).run()
        return replay.makespan_s


def report(arguments: argparse.Namespace, together: float, foretold: float, in_turn: float) -> None:
    shape = f"2 sweeps of {arguments.configurations}, {PLAIN} jobs"
    error = results.row(
        "cluster/makespan", shape, together, "the simulator; ratio: error in %", foretold, 10.0, unit="s", gpu="CPU"
    )
    rows = [
        replace(error, ratio=100.0 * abs(foretold / together - 1.0)),
        results.row(
            "cluster/together",
            shape,
            together,
            "the sweeps in turn, the jobs beside the first",
            in_turn,
            1.0,
            unit="s",
            gpu="CPU",
        ),
    ]
    results.write("cluster", rows, "sweeps")


if __name__ == "__main__":
    main()

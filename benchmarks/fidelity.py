"""What the simulator foretells beside what the trainer does: six mixes of jobs on one worker, each by the same plans.

    python -m benchmarks.fidelity [--base BASE] [--seconds 40]

BASE: a key of `benchmarks.step.BASES` (GPU), or `toy`, a small one for a CPU (default without a GPU). The profile is
taken on the spot, and so are a job's start and end: on a CPU before each mix. Each mix is sized to take about so many
seconds. Rows go to results/scheduling/fidelity.json: error of the makespan, and the mean error of the jobs' completion
times, in percent. On a CPU all times are those of this process, which others beside it hardly change.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import results
from tlora.capacity import Capacity, Load
from tlora.placement import Job, Worker
from tlora.profiling import gpu_name, profile, random_data, random_job
from tlora.scheduling import ClusterState, Costs, schedule
from tlora.simulate import Simulator
from tlora.spec import BaseSpec
from tlora.supermodel import SuperModel
from tlora.traces import TraceJob
from tlora.trainer import Trainer, TrainerOptions

TOY = LlamaConfig(
    vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=4096,
)  # fmt: skip
Mix = Sequence[tuple[int, int, int, float, float]]
"""Rank, batch, length over the longest, share of the mix's work, and when it comes as a share of the mix's time."""
MIXES: dict[str, Mix] = {
    "one": [(16, 4, 0.5, 1.0, 0.0)],
    "two-alike": [(16, 2, 0.5, 0.5, 0.0), (16, 2, 0.5, 0.5, 0.0)],
    "small-and-large": [(16, 8, 1.0, 0.7, 0.0), (8, 1, 0.25, 0.3, 0.0)],
    "four-small": [
        (2, 1, 0.25, 0.18, 0.0), (4, 1, 0.25, 0.22, 0.0), (8, 2, 0.25, 0.27, 0.0), (16, 1, 0.5, 0.33, 0.0),
    ],
    "arrivals": [(16, 4, 0.5, 0.5, 0.0), (4, 1, 0.25, 0.1, 0.15), (8, 2, 0.5, 0.15, 0.2), (2, 1, 0.5, 0.25, 0.3)],
    "eight-mixed": [
        (2, 1, 0.25, 0.06, 0.0), (4, 2, 0.25, 0.08, 0.0), (8, 4, 0.25, 0.1, 0.0), (16, 8, 0.25, 0.12, 0.0),
        (2, 1, 1.0, 0.14, 0.0), (4, 2, 1.0, 0.18, 0.0), (8, 1, 0.5, 0.15, 0.0), (16, 4, 0.5, 0.17, 0.0),
    ],
}  # fmt: skip
"""Whose turn it is hangs nowhere on some percent: who of two equal jobs goes first is anybody's guess."""
GOAL = 10.0


class Bench:
    """One base on this device, and its profile."""

    def __init__(self, base: str):
        self.base = base
        self.longest = 256 if base == "toy" else 2048
        if not torch.cuda.is_available():
            torch.set_num_threads(1)  # threads that wait for each other take the process's time too
        lengths = [self.longest >> by for by in range(5, -1, -1)]
        self.model = SuperModel(_fresh(base), BaseSpec(model=base))
        self.clock = time.perf_counter if self.model.device.type == "cuda" else time.process_time
        self.lengths = lengths

    def measure(self) -> None:
        """Its ticks, as they are now: a machine that others use does not stay the same."""
        self.capacity = Capacity.of(profile(self.model, lengths=self.lengths, clock=self.clock))
        self.model_of = self.capacity.models[self.base]
        self.costs = self.start_and_end()
        print(f"profile of {self.base}: fitted within {100 * self.model_of.error:.1f} %, {self.costs}", flush=True)

    def start_and_end(self) -> Costs:
        """Of one job, beside its ticks."""
        with tempfile.TemporaryDirectory(prefix="tlora-fidelity") as folder:
            trainer = trainer_of(self.model)
            data = random_data(self.longest, self.model.outline.vocab_size, seed=0)
            began_s = self.clock()
            trainer.attach(random_job(Path(folder), "job", self.base, steps=1), data)
            attached_s = self.clock()
            trainer.tick()
            last_s = self.clock()
            while trainer.leaving:
                time.sleep(0.001)
                trainer.take_ended()
            return Costs(attach_s=attached_s - began_s, end_s=self.clock() - last_s, move_s=0.0, load_s=0.0)

    def jobs(self, mix: Mix, seconds: float) -> list[TraceJob]:
        jobs = []
        for at, (rank, batch, length, work, when) in enumerate(mix):
            load = Load(rank, batch, round(self.longest * length))
            steps = max(4, round(seconds * work / self.model_of.alone_s(load)))
            jobs.append(
                TraceJob(f"j{at}", seconds * when, 1, steps * self.model_of.alone_s(load), self.base, load, 1.0)
            )
        return jobs

    def foretell(self, jobs: Sequence[TraceJob]) -> dict[str, float]:
        """Completion times by the simulator."""
        replay = Simulator(self.capacity, jobs, 1, costs=self.costs).run()
        return {outcome.name: outcome.completion_s for outcome in replay.outcomes}

    def train(self, jobs: Sequence[TraceJob]) -> dict[str, float]:
        """Completion times of a trainer that does what the same plans say."""
        with tempfile.TemporaryDirectory(prefix="tlora-fidelity") as folder:
            return Live(self, Path(folder), jobs).run()


class Live:
    """A trainer, led by plans."""

    def __init__(self, bench: Bench, folder: Path, jobs: Sequence[TraceJob]):
        self.bench, self.folder, self.trainer = bench, folder, trainer_of(bench.model)
        self.state = ClusterState(bench.capacity.models, costs=bench.costs)
        self.state.come(Worker("w", "n", bench.base))
        self.coming = sorted(jobs, key=lambda job: job.submitted_s)
        self.jobs = {job.name: job for job in jobs}
        vocab_size = bench.model.outline.vocab_size
        self.data = {job.name: random_data(job.load.length, vocab_size, seed=at) for at, job in enumerate(jobs)}
        self.ended: dict[str, float] = {}
        self.began_s = bench.clock()

    def run(self) -> dict[str, float]:
        while len(self.ended) < len(self.jobs):
            now_s = self.bench.clock() - self.began_s
            if self.coming and self.coming[0].submitted_s <= now_s:
                while self.coming and self.coming[0].submitted_s <= now_s:
                    self.submit(self.coming.pop(0), now_s)
                self.plan(now_s)
            elif self.trainer.jobs:
                for job in self.trainer.tick().ended:
                    self.end(job.name)
            elif self.trainer.leaving:
                time.sleep(0.001)
                for job in self.trainer.take_ended():
                    self.end(job.name)
        return {name: ended_s - self.jobs[name].submitted_s for name, ended_s in self.ended.items()}

    def submit(self, job: TraceJob, now_s: float) -> None:
        steps = float(self.steps(job))
        self.state.submit(Job(job.name, job.base, now_s, job.load, remaining=steps))

    def steps(self, job: TraceJob) -> int:
        return round(job.duration_s / self.bench.model_of.alone_s(job.load))

    def end(self, name: str) -> None:
        self.ended[name] = now_s = self.bench.clock() - self.began_s
        self.state.end(name, now_s)
        self.plan(now_s)

    def plan(self, now_s: float) -> None:
        plan = schedule(self.state, now_s)
        for name in plan.moves:
            self.trainer.detach(name)
        for name in plan.places.keys() - self.trainer.jobs.keys():
            job = self.jobs[name]
            self.trainer.token_budget = max(self.trainer.token_budget, job.load.length)
            spec = random_job(
                self.folder, name, job.base, adapter={"rank": job.load.rank}, batch_size=job.load.batch,
                steps=self.steps(job),
            )  # fmt: skip
            self.trainer.attach(spec, self.data[name], resume=True)
        for name, job in self.trainer.jobs.items():
            job.share = plan.shares.get(name, job.share)
        if "w" in plan.budgets:
            longest = max(self.jobs[name].load.length for name in self.trainer.jobs)
            self.trainer.token_budget = max(plan.budgets["w"], longest)


def trainer_of(model: SuperModel) -> Trainer:
    """As a cluster's worker has it."""
    return Trainer(model, TrainerOptions(token_budget=16384, writes_beside=True))


def _fresh(base: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if base == "toy":
        return AutoModelForCausalLM.from_config(TOY, dtype=torch.float32)
    from benchmarks.step import BASES, fresh

    return fresh(BASES[base])


def compared(
    foretold: Mapping[str, float], seen: Mapping[str, float], jobs: Sequence[TraceJob]
) -> dict[str, tuple[float, float, float]]:
    """Foretold and seen makespan, mean and worst job's completion time, each with its error in percent; of the mean,
    the mean of the jobs' own errors."""
    ends = [
        max(job.submitted_s + times[job.name] for job in jobs) - min(job.submitted_s for job in jobs)
        for times in (foretold, seen)
    ]
    off = {name: 100.0 * abs(foretold[name] / seen[name] - 1.0) for name in seen}
    worst = max(off, key=lambda name: off[name])
    means = statistics.mean(foretold.values()), statistics.mean(seen.values())
    return {
        "makespan": (ends[0], ends[1], 100.0 * abs(ends[0] / ends[1] - 1.0)),
        "completion": (*means, statistics.mean(off.values())),
        "worst-job": (foretold[worst], seen[worst], off[worst]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="llama-8b" if torch.cuda.is_available() else "toy")
    parser.add_argument("--seconds", type=float, default=40.0)
    arguments = parser.parse_args()
    bench = Bench(arguments.base)
    name = gpu_name(bench.model.device)
    for mix, parts in MIXES.items():
        if bench.model.device.type == "cpu" or mix == next(iter(MIXES)):
            bench.measure()
        rows, jobs = [], bench.jobs(parts, arguments.seconds)
        foretold, seen = bench.foretell(jobs), bench.train(jobs)
        for what, (ours, theirs, error) in compared(foretold, seen, jobs).items():
            row = results.row(
                f"fidelity/{name}/{mix}/{what}", f"{bench.base}; {len(jobs)} jobs on one trainer", ours,
                "the trainer; ratio: error in %", theirs, GOAL if what != "worst-job" else None, unit="s", gpu=name,
            )  # fmt: skip
            rows.append(replace(row, ratio=error))
        print(mix, {job: (round(foretold[job], 1), round(seen[job], 1)) for job in seen}, flush=True)
        results.write("fidelity", rows, "scheduling")


if __name__ == "__main__":
    main()

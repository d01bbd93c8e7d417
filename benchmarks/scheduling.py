"""Scheduling beside its baselines, replayed on real traces: completion times, throughput, utilisation, planning time.

    python -m benchmarks.scheduling TRACES [--parts PART ...] [--only CELL ...] [--seeds SEED ...] [--profile FILE]

TRACES is a folder with philly_week.csv and acme_cdf.json. PARTs are the keys of `PARTS` below. Rows are named
trace/load/measure/baseline and go to results/scheduling/; every one is a mean over the seeds, which are named in its
shape. A CELL is what rows of one kind begin with, such as acme/backlog/peft. Speeds are a profile's of one GPU; what
several GPUs do for one job is modelled.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import results
from tlora import replays, traces
from tlora.capacity import Capacity, Load
from tlora.placement import Job, Worker
from tlora.scheduling import ClusterState, schedule
from tlora.simulate import Replay
from tlora.traces import TraceJob

BASES = ("llama-8b", "qwen3-8b")
GPUS = {"philly": {0.7: 376, 1.0: 264, 1.5: 176}, "acme": dict.fromkeys((0.7, 1.0, 1.5), 128)}
DAYS, BOUND = 7.0, 3.0
SEEDS = (0, 1, 2)
GOALS: dict[tuple[str, float, str], float] = {
    **{(trace, load, way): goal for trace, load in (("acme", 1.0), ("acme", 1.5), ("philly", 1.5))
       for way, goal in (("fcfs", 5.4), ("easy", 2.3), ("fifo-grouping", 2.0), ("fifo-spread", 2.0))},
    **{("philly", 1.0, way): goal
       for way, goal in (("fcfs", 4.0), ("easy", 1.7), ("fifo-grouping", 1.5), ("fifo-spread", 1.5))},
    **{(trace, 0.7, way): 1.0 for trace in GPUS for way in ("fcfs", "easy", "fifo-grouping", "fifo-spread")},
}  # fmt: skip
"""How many times shorter the mean completion time is to be."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Jobs on a cluster, and how their lone speed is measured."""

    trace: str
    load: float
    measure: str
    is_backlog: bool = False

    @property
    def gpus(self) -> int:
        return GPUS[self.trace][self.load]

    @property
    def name(self) -> str:
        return f"{self.trace}/{'backlog' if self.is_backlog else self.load}/{self.measure}"


class Bench:
    """A profile, traces, and where rows go."""

    def __init__(self, folder: Path, profile: Path, seeds: Sequence[int], only: Sequence[str] = ()):
        self.folder, self.seeds, self.only = folder, seeds, only
        self.capacity = Capacity.load(profile)
        steps = json.loads((profile.parent / "step.json").read_text())
        (row,) = (row for row in steps if row["name"] == "step/8x1024")
        self.peak_flops = self.capacity.models[BASES[0]].flops(8 * 1024) / (row["against_ms"] / 1e3)
        """A second, of plain products."""
        known = next(base for base in BASES if base in self.capacity.models)
        for base in BASES:  # of the same size: until it is measured itself
            if base not in self.capacity.models:
                print(f"{base} is not in {profile}: the ticks of {known} stand for it")
                self.capacity.models[base] = self.capacity.models[known]
                self.capacity.peft[base] = self.capacity.peft[known]
        self._jobs: dict[tuple[str, float, int], list[TraceJob]] = {}

    def jobs(self, cell: Cell, seed: int) -> list[TraceJob]:
        key = (cell.trace, cell.load, seed)
        if key not in self._jobs:
            if cell.trace == "philly":
                arrivals = traces.read_trace(self.folder / "philly_week.csv")
            else:
                path = self.folder / "acme_cdf.json"
                arrivals = traces.acme_arrivals(path, load=cell.load, gpus=cell.gpus, days=DAYS, seed=seed)
            self._jobs[key] = traces.draw_jobs(arrivals, BASES, seed)
        return self._jobs[key]

    def play(self, cell: Cell, way: str, seed: int) -> Replay:
        jobs = self.jobs(cell, seed)
        return replays.play(
            way, self.capacity, jobs, cell.gpus, measure=cell.measure, is_backlog=cell.is_backlog, bound=BOUND
        )

    def utilisation(self, replay: Replay, jobs: Sequence[TraceJob]) -> float:
        bases = {job.name: job.base for job in jobs}
        models = self.capacity.models
        flops = sum(models[bases[outcome.name]].flops(outcome.tokens) for outcome in replay.outcomes)
        return flops / (replay.gpus * self.peak_flops * replay.makespan_s)

    def shortest_s(self, cell: Cell, seed: int) -> float:
        """Mean completion time if every job had at once as many GPUs as make it fastest: no schedule is below it."""
        times = []
        for job in self.jobs(cell, seed):
            model = self.capacity.models[job.base]
            alone_s = traces.lone_step_s(self.capacity, job, cell.measure)
            fastest_s = min(model.fastest_s(job.load, count) for count in range(1, job.load.batch + 1))
            times.append(job.duration_s * fastest_s / alone_s)
        return statistics.mean(times)

    def row(self, name: str, shape: str, ours: float, against: str, theirs: float, target: float | None, unit: str,
            better: str = "higher") -> results.Row:  # fmt: skip
        return results.row(
            name, shape, ours, against, theirs, target, "higher" if better == "higher" else "lower", unit=unit,
            gpu=f"modelled, {self.capacity.gpu}",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    completion_s: float
    makespan_s: float
    utilisation: float
    num_beyond: int
    played_s: float
    slowest_plan_s: float


def summary(bench: Bench, cell: Cell, way: str, seed: int) -> Summary:
    began_s = time.perf_counter()
    replay = bench.play(cell, way, seed)
    return Summary(
        replay.mean_completion_s, replay.makespan_s, bench.utilisation(replay, bench.jobs(cell, seed)),
        replay.num_beyond_bound, time.perf_counter() - began_s, max(replay.planning_s, default=0.0),
    )  # fmt: skip


def seeds_text(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def replay_all(bench: Bench, measures: Sequence[str], *, is_backlog: bool) -> None:
    """All ways of scheduling, on all traces and loads."""
    for trace, sizes in GPUS.items():
        for load in (1.0,) if is_backlog else sizes:
            for measure in measures:
                cell = Cell(trace, load, measure, is_backlog)
                if not bench.only or cell.name in bench.only:
                    replay_cell(bench, cell)


def replay_cell(bench: Bench, cell: Cell) -> None:
    has_ablations = cell.is_backlog or cell.load == 1.5
    ways = replays.WAYS if has_ablations else ("tlora", *replays.BASELINES)
    played = {way: [summary(bench, cell, way, seed) for seed in bench.seeds] for way in ways}
    ours = played["tlora"]
    rows = list(backlog_rows(bench, cell, played) if cell.is_backlog else completion_rows(bench, cell, played))
    beyond = sum(one.num_beyond for one in ours)
    theirs = sum(one.num_beyond for one in played["fifo-grouping"])
    beyond_row = bench.row(
        f"{cell.name}/beyond-bound", f"{cell.gpus} GPUs, bound {BOUND:g}", beyond, "fifo-grouping", max(theirs, 1), 0.0,
        "jobs", "lower",
    )  # fmt: skip
    rows.append(replace(beyond_row, against_ms=theirs, ratio=float(beyond)))
    played_s, slowest_s = max(one.played_s for one in ours), max(one.slowest_plan_s for one in ours)
    rows.append(
        results.row(f"{cell.name}/played-in", f"slowest plan {1e3 * slowest_s:.1f} ms", played_s, "two minutes", 120.0,
                    1.0, unit="s", gpu="CPU")
    )  # fmt: skip
    results.write("replay", rows, "scheduling")


def completion_rows(bench: Bench, cell: Cell, played: dict[str, list[Summary]]) -> Iterator[results.Row]:
    ours = [one.completion_s for one in played["tlora"]]
    shortest = [bench.shortest_s(cell, seed) for seed in bench.seeds]
    for way, summaries in played.items():
        if way == "tlora":
            continue
        theirs = [one.completion_s for one in summaries]
        each = [their / our for their, our in zip(theirs, ours, strict=False)]
        bound = statistics.mean(theirs) / statistics.mean(shortest[: len(theirs)])
        shape = f"{cell.gpus} GPUs; seeds {seeds_text(each)}; bound {bound:.2f}"
        yield bench.row(
            f"{cell.name}/{way}", shape, statistics.mean(ours[: len(theirs)]), f"{way}, mean completion",
            statistics.mean(theirs), GOALS.get((cell.trace, cell.load, way)), "s",
        )  # fmt: skip


def backlog_rows(bench: Bench, cell: Cell, played: dict[str, list[Summary]]) -> Iterator[results.Row]:
    """Throughput as the makespan of the same work, and utilisation."""
    goal = {"own": 1.2, "peft": 1.8}[cell.measure]
    goals = {"fcfs": goal, "easy": goal, "fifo-grouping": 1.1, "fifo-spread": 1.1}
    ours = [one.makespan_s for one in played["tlora"]]
    for way, summaries in played.items():
        if way == "tlora":
            continue
        theirs = [one.makespan_s for one in summaries]
        each = [their / our for their, our in zip(theirs, ours, strict=False)]
        yield bench.row(
            f"{cell.name}/{way}", f"{cell.gpus} GPUs; seeds {seeds_text(each)}", statistics.mean(ours[: len(theirs)]),
            f"{way}, makespan", statistics.mean(theirs), goals.get(way), "s",
        )  # fmt: skip
    for way in ("fcfs", "fifo-grouping", "fifo-spread"):
        mine, other = ([100 * one.utilisation for one in played[key]] for key in ("tlora", way))
        gains = [left - right for left, right in zip(mine, other, strict=True)]
        target = 37.0 if (way, cell.measure) == ("fcfs", "peft") else None
        row = bench.row(
            f"{cell.name}/utilisation/{way}", f"points gained; seeds {seeds_text(gains)}", statistics.mean(mine), way,
            statistics.mean(other), target, "%",
        )  # fmt: skip
        yield replace(row, ratio=statistics.mean(gains))


def planning(bench: Bench) -> None:
    """Time of a plan after one event, over the number of live jobs: each is on a worker or waits for one."""
    rows = []
    for num_jobs in (100, 300, 1000, 3000, 10000, 30000):
        times = plan_times(bench, num_jobs, events=200)
        target = {1000: 5.0, 10000: 50.0}.get(num_jobs)
        row = bench.row(
            f"planning/{num_jobs}", f"{max(num_jobs // 4, 1)} GPUs, median {1e3 * statistics.median(times):.3f} ms",
            1e3 * max(times), "goal" if target else "-", target or 1.0, target and 1.0, "ms", "lower",
        )  # fmt: skip
        rows.append(row)
    results.write("planning", rows, "scheduling")


def plan_times(bench: Bench, num_jobs: int, events: int) -> list[float]:
    """Seconds of the plans after so many ends and arrivals in turn, of a cluster that holds about so many jobs."""
    random = np.random.default_rng(num_jobs)
    state = ClusterState(bench.capacity.models)
    for at in range(max(num_jobs // 4, 1)):
        state.come(Worker(f"w{at:05d}", f"n{at // 8:04d}"))

    def arrive(at: int, now_s: float) -> None:
        load = Load(
            int(random.choice(traces.RANKS)), int(random.choice(traces.BATCHES)), int(random.choice(traces.LENGTHS))
        )
        remaining = float(random.lognormal(8.0, 2.0))
        state.submit(Job(f"j{at}", BASES[at % len(BASES)], now_s, load, remaining=remaining))

    for at in range(num_jobs):
        arrive(at, 0.0)
    schedule(state, 0.0)
    times = []
    for event in range(events):
        now_s = 60.0 + event
        if event % 2:
            state.end(str(random.choice([job.name for job in state.jobs.values() if job.workers])), now_s)
        else:
            arrive(num_jobs + event, now_s)
        began_s = time.perf_counter()
        schedule(state, now_s)
        times.append(time.perf_counter() - began_s)
    return times


PARTS: dict[str, Callable[[Bench], None]] = {
    "planning": planning,
    "completion": partial(replay_all, measures=("own", "peft"), is_backlog=False),
    "backlog": partial(replay_all, measures=("own", "peft"), is_backlog=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--profile", type=Path, default=results.ROOT / "benchmarks/results/h200/profile.json")
    arguments = parser.parse_args()
    bench = Bench(arguments.traces, arguments.profile, arguments.seeds, arguments.only)
    for part in arguments.parts:
        PARTS[part](bench)


if __name__ == "__main__":
    main()

"""The ways of scheduling that can be played through a trace, by name. Called by `tlora simulate` and the benchmarks."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tlora import baselines, report, traces
from tlora.capacity import Capacity
from tlora.errors import SpecError
from tlora.scheduling import Rules
from tlora.simulate import GPUS_PER_NODE, NO_FAULTS, Faults, Replay, Simulator
from tlora.traces import TraceJob

OURS: dict[str, Rules] = {
    "tlora": Rules(),
    "no-sharing": Rules(shares=False),
    "sharing-fcfs": Rules(urgency="submitted", preempts=False),
    "no-elasticity": Rules(is_elastic=False),
    "no-preemption": Rules(preempts=False),
}
"""Our scheduler, and what is left of it without one of its parts."""
BASELINES = (*baselines.ALONE, "fifo-grouping", "fifo-spread")
WAYS = (*OURS, *BASELINES)
DEFAULT_WAYS = ("tlora", "fcfs", "easy", "fifo-grouping")


def play(
    way: str,
    capacity: Capacity,
    jobs: Sequence[TraceJob],
    gpus: int,
    *,
    measure: str = "own",
    is_backlog: bool = False,
    bound: float = 3.0,
    faults: Faults = NO_FAULTS,
    per_node: int = GPUS_PER_NODE,
) -> Replay:
    """One replay. `faults` befall our scheduler only. Raises SpecError if there is no such way, or a job asks for more
    GPUs than there are."""
    _check_way(way)
    if too_large := [job for job in jobs if job.gpus > gpus]:
        job = too_large[0]
        raise SpecError(f"job {job.name} of the trace asks for {job.gpus} GPUs; want at most the cluster's {gpus}.")
    if way in OURS:
        simulator = Simulator(
            capacity, jobs, gpus, measure=measure, rules=OURS[way], faults=faults, bound=bound, way=way,
            is_backlog=is_backlog, per_node=per_node,
        )  # fmt: skip
        return simulator.run()
    if way in baselines.ALONE:
        return baselines.alone(way, capacity, jobs, gpus, measure=measure, is_backlog=is_backlog, bound=bound)
    if way in BASELINES:
        spreads = way == "fifo-spread"
        return baselines.FifoGrouping(
            capacity, jobs, gpus, measure=measure, is_backlog=is_backlog, bound=bound, spreads=spreads
        ).run()
    raise AssertionError(way)


def _check_way(way: str) -> None:
    if way not in WAYS:
        raise SpecError(f"{way}: no such way of scheduling; want one of {', '.join(WAYS)}.")


LOADS = (0.5, 0.7, 0.85, 1.0, 1.25, 1.5)


@dataclass(frozen=True, slots=True)
class Scene:
    """What `tlora simulate` is asked for."""

    trace: Path
    profile: Path
    gpus: int
    per_node: int
    load: float
    days: float
    bases: tuple[str, ...]
    measure: str
    seed: int
    bound: float
    is_backlog: bool
    faults: Faults

    def capacity(self) -> Capacity:
        """Raises SpecError if the profile lacks a base."""
        known = Capacity.load(self.profile)
        if missing := [base for base in self.bases if base not in known.models]:
            raise SpecError(f"{self.profile}: no base {missing[0]}; want one of {', '.join(known.models)}.")
        if self.measure not in ("own", "peft"):
            raise SpecError(f"--measure {self.measure}: want own or peft.")
        return known

    def jobs(self, capacity: Capacity) -> list[TraceJob]:
        if self.trace.suffix == ".json":
            arrivals = traces.acme_arrivals(
                self.trace, load=self.load, gpus=self.gpus, days=self.days, seed=self.seed, most_gpus=min(self.gpus, 8)
            )
        else:
            arrivals = traces.read_trace(self.trace)
        return traces.draw_jobs(arrivals, self.bases or tuple(capacity.models), self.seed)

    def at_load(self, load: float, offered: float, window_s: float) -> "Scene":
        """Another load: of a drawn trace, other jobs; of a recorded one, other GPUs."""
        if self.trace.suffix == ".json":
            return replace(self, load=load)
        return replace(self, gpus=round(offered / window_s / load))


def present(console: Any, scene: Scene, ways: Sequence[str], folder: Path, *, sweep: bool) -> None:
    """Play the ways, print the table, and write the report. `console` is rich's."""
    from rich.table import Column, Table

    for way in ways:
        _check_way(way)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(f"--output {folder}: no folder can be made there: {error.strerror}.") from None
    capacity = scene.capacity()
    jobs = scene.jobs(capacity)
    full_tokens_per_s = 1.0 / min(capacity.models[job.base].token_s for job in jobs)
    replays = [_play(scene, capacity, jobs, way) for way in ways]
    rows = [report.numbers(replay, full_tokens_per_s) for replay in replays]
    table = Table(*(Column(text, overflow="fold") for text in report.COLUMNS.values()))
    for row in rows:
        table.add_row(*report.cells(row))
    console.print(table)
    console.print(
        f"{len(jobs)} jobs, {scene.gpus} GPUs; speeds of {capacity.gpu}; what several GPUs do for one job is modelled",
        highlight=False,
    )
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in asdict(scene).items()}
    swept = _sweep(scene, capacity, jobs, ways) if sweep else None
    report.write(folder, settings, replays, rows, swept, full_tokens_per_s)
    console.print(f"written to {folder / 'report.html'}", highlight=False)


def _play(scene: Scene, capacity: Capacity, jobs: Sequence[TraceJob], way: str) -> Replay:
    return play(
        way, capacity, jobs, scene.gpus, measure=scene.measure, is_backlog=scene.is_backlog, bound=scene.bound,
        faults=scene.faults, per_node=scene.per_node,
    )  # fmt: skip


def _sweep(scene: Scene, capacity: Capacity, jobs: Sequence[TraceJob], ways: Sequence[str]) -> report.Sweep:
    offered = sum(job.gpus * job.duration_s for job in jobs)
    window_s = max(max(job.submitted_s for job in jobs), 1.0)
    loads, times = list[float](), {way: list[float]() for way in ways}
    for load in LOADS:
        other = scene.at_load(load, offered, window_s)
        if other.gpus < max(job.gpus for job in jobs):
            continue
        loads.append(load)
        others = other.jobs(capacity)
        for way in ways:
            times[way].append(_play(other, capacity, others, way).mean_completion_s)
    return report.Sweep(loads, times)

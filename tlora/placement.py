"""Which job is on which worker, how much of each tick it gets, and how fast it goes by that: the state of scheduling.

Owned by whoever calls `scheduling.schedule`, which decides; here are the facts, kept in indexes so that one event costs
what it touches. No torch, no Ray, no clock.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tlora.capacity import Load


class Model(Protocol):
    """What is asked of a base's capacity; `capacity.BaseModel` is one."""

    budget: int
    memory_bytes: float

    def tick_s(self, tokens: float, jobs: int = 1, rank_sum: int = 16) -> float: ...
    def alone_s(self, load: Load, gpus: int = 1) -> float: ...
    def best_alone_s(self, load: Load, gpus: int) -> float: ...
    def reduce_s(self, rank: int, gpus: int, nodes: int = 1) -> float: ...
    def peak_bytes(self, tokens: float, rank_sum: int) -> float: ...


class Unmeasured:
    """Of a base of which nothing is known yet: a tick takes what it takes, and holds so many jobs."""

    memory_bytes = math.inf

    def __init__(self, jobs_per_worker: int):
        self.budget = jobs_per_worker

    def tick_s(self, tokens: float, jobs: int = 1, rank_sum: int = 16) -> float:
        return 1.0

    def alone_s(self, load: Load, gpus: int = 1) -> float:
        return 1.0

    def best_alone_s(self, load: Load, gpus: int) -> float:
        return 1.0

    def reduce_s(self, rank: int, gpus: int, nodes: int = 1) -> float:
        return 0.0

    def peak_bytes(self, tokens: float, rank_sum: int) -> float:
        return 0.0


UNIT = Load(rank=1, batch=1, length=1)
"""Of a job about which nothing is known."""


@dataclass(slots=True, eq=False)
class Job:
    """A job that has not ended, as scheduling sees it."""

    name: str
    base: str
    """Jobs of one base may share a super-model."""
    submitted_s: float
    load: Load = UNIT
    gpus: int = 1
    """Asked for: its speed alone is that on so many."""
    bound: float = 3.0
    """Most times its lone step time that a step may take."""
    priority: int = 0
    user: str = ""
    remaining: float = 1.0
    """Steps to go, as declared and predicted."""
    can_split: bool = True
    can_move: bool = True
    """Its state can be saved, or need not be."""
    alone_s: float = 1.0
    """Predicted step time alone, on the GPUs that it asks for."""
    fewest: int = 1
    """GPUs with which it can stay within its bound."""
    workers: tuple["Worker", ...] = ()
    rate: float = 0.0
    """Steps a second."""
    since_s: float = 0.0
    """From when on it goes at that rate."""
    is_overdue: bool = False
    """Has waited as long as it may: goes before all others, and is not taken off again."""

    def done_by(self, now_s: float) -> None:
        """Count the steps taken until now."""
        if self.rate and now_s > self.since_s:
            self.remaining = max(self.remaining - self.rate * (now_s - self.since_s), 0.0)
        self.since_s = max(self.since_s, now_s)

    @property
    def slowdown(self) -> float:
        return 1.0 / (self.rate * self.alone_s) if self.rate else math.inf


@dataclass(slots=True, eq=False)
class Worker:
    """One GPU process, or a GPU that could have one."""

    name: str
    node: str
    base: str = ""
    """Empty: none is loaded."""
    jobs: dict[str, Job] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    """Of each tick, by job."""
    wanted: float = 0.0
    """Tokens that would be a step of every job here."""
    floor: float = 0.0
    """Tokens of a full tick that its jobs need to stay within their bounds."""
    tick_s: float = 0.0
    ready_s: float = 0.0
    """When its base is loaded."""
    is_leaving: bool = False
    """It gets no job, and gives up those it has."""


class Order:
    """Items by a number, lowest first."""

    __slots__ = ("items", "keys")

    def __init__(self) -> None:
        self.items: list[tuple[float, str]] = []
        self.keys: dict[str, float] = {}

    def put(self, name: str, key: float) -> None:
        before = self.keys.get(name)
        if before == key:
            return
        if before is not None:
            del self.items[bisect_left(self.items, (before, name))]
        self.keys[name] = key
        insort(self.items, (key, name))

    def drop(self, name: str) -> None:
        before = self.keys.pop(name, None)
        if before is not None:
            del self.items[bisect_left(self.items, (before, name))]

    def from_key(self, key: float) -> Iterator[str]:
        """Names of at least this key."""
        for at in range(bisect_left(self.items, (key, "")), len(self.items)):
            yield self.items[at][1]

    def lowest(self, count: int) -> list[str]:
        return [name for _, name in self.items[:count]]

    def highest(self, count: int) -> list[str]:
        return [name for _, name in self.items[: -count - 1 : -1]]

    def __len__(self) -> int:
        return len(self.items)


class Pool:
    """The workers and jobs of one base."""

    def __init__(self, model: Model):
        self.model = model
        self.full_s = model.tick_s(model.budget, 2, 32)
        self.room = Order()
        """Busy workers by the tokens that nobody would miss."""
        self.slack = Order()
        """Busy workers by the tokens that nobody needs to stay within a bound."""
        self.pressure = Order()
        """Busy workers by what their jobs would take in one step."""
        self.waiting = Order()
        """Jobs by urgency, the most urgent first."""
        self.running = Order()
        """Jobs by the urgency that they had when they were placed."""
        self.stretched = Order()
        """Jobs on more workers than they need, by the GPUs that they would give up."""


class Placements:
    """Jobs, workers, and their indexes. Every change goes through the methods here."""

    def __init__(self, models: Mapping[str, Model], jobs_per_worker: int):
        self._models, self.jobs_per_worker = dict(models), jobs_per_worker
        self.jobs: dict[str, Job] = {}
        self.workers: dict[str, Worker] = {}
        self.pools: dict[str, Pool] = {}
        self.idle: dict[str, dict[str, set[str]]] = {}
        """Workers without jobs, by base (empty: none loaded) and node."""
        self.num_idle = 0
        self.changed: dict[str, None] = {}
        """Jobs whose rate has changed since it was last asked."""
        self.used: dict[str, int] = {}
        """Placements on workers, by user."""

    def pool(self, base: str) -> Pool:
        if base not in self.pools:
            self.pools[base] = Pool(self._models.get(base) or Unmeasured(self.jobs_per_worker))
        return self.pools[base]

    # --- workers

    def put_worker(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        self._index(worker)

    def drop_worker(self, name: str, now_s: float) -> list[Job]:
        """A worker is gone; returns the jobs that it takes along, on whatever workers they were."""
        worker = self.workers[name]
        lost = list(worker.jobs.values())
        for job in lost:
            self.take(job, now_s)
        self._unindex(worker)
        del self.workers[name]
        return lost

    def load_base(self, worker: Worker, base: str, ready_s: float) -> None:
        assert not worker.jobs
        self._unindex(worker)
        worker.base, worker.ready_s = base, ready_s
        self._index(worker)

    def _unindex(self, worker: Worker) -> None:
        nodes = self.idle.get(worker.base, {})
        if worker.name in nodes.get(worker.node, ()):
            nodes[worker.node].discard(worker.name)
            if not nodes[worker.node]:
                del nodes[worker.node]
            self.num_idle -= 1
        if worker.base:
            pool = self.pool(worker.base)
            for order in (pool.room, pool.slack, pool.pressure):
                order.drop(worker.name)

    def _index(self, worker: Worker) -> None:
        if worker.is_leaving:
            self._unindex(worker)
            return
        if not worker.jobs:
            self._unindex(worker)
            self.idle.setdefault(worker.base, {}).setdefault(worker.node, set()).add(worker.name)
            self.num_idle += 1
            return
        nodes = self.idle.get(worker.base, {})
        if worker.name in nodes.get(worker.node, ()):
            self._unindex(worker)
        pool = self.pool(worker.base)
        budget = pool.model.budget
        is_full = len(worker.jobs) >= self.jobs_per_worker
        pool.room.put(worker.name, 0.0 if is_full else max(budget - worker.wanted, 0.0))
        pool.slack.put(worker.name, 0.0 if is_full else max(budget - worker.floor, 0.0))
        pool.pressure.put(worker.name, worker.wanted)

    # --- jobs on workers

    def place(self, job: Job, workers: Iterable[Worker], begin_s: float, now_s: float) -> None:
        """On these instead of those that it is on; it makes no progress before `begin_s`."""
        job.done_by(now_s)
        before, job.workers = job.workers, tuple(workers)
        touched = dict.fromkeys((*before, *job.workers))
        for worker in before:
            del worker.jobs[job.name]
        for worker in job.workers:
            worker.jobs[job.name] = job
        self.used[job.user] = self.used.get(job.user, 0) + len(job.workers) - len(before)
        job.since_s = max(now_s, begin_s)
        self.changed[job.name] = None
        for worker in touched:
            self._share_out(worker, now_s)
        if not job.workers:
            job.rate = 0.0

    def take(self, job: Job, now_s: float) -> None:
        """Off its workers."""
        self.place(job, (), now_s, now_s)

    def _share_out(self, worker: Worker, now_s: float) -> None:
        """Tokens of each tick, and what follows for the rates of the jobs here."""
        self.fill(worker)
        self._index(worker)
        for job in worker.jobs.values():
            rate = self.rate_of(job)
            if rate != job.rate:
                begin_s = job.since_s
                job.done_by(now_s)
                job.rate, job.since_s = rate, max(begin_s, now_s)
                self.changed[job.name] = None

    def fill(self, worker: Worker) -> None:
        """Deal a worker's tick to its jobs."""
        if worker.jobs:
            pool = self.pool(worker.base)
            dealt = deal(pool.model, [(job, len(job.workers)) for job in worker.jobs.values()], pool.running.keys)
            worker.tokens, worker.wanted, worker.floor, worker.tick_s, _ = dealt
        else:
            worker.tokens, worker.wanted, worker.floor, worker.tick_s = {}, 0.0, 0.0, 0.0

    def rate_of(self, job: Job) -> float:
        """Steps a second: the slowest of its workers, and the sum of its gradient. More than one worker: modelled."""
        model = self.pool(job.base).model
        if not job.workers:
            return 0.0
        if len(job.workers) == 1:
            worker = job.workers[0]
            return worker.tokens[job.name] / (part_of(model, job, 1) * worker.tick_s)
        part = part_of(model, job, len(job.workers))
        slowest = max(part * worker.tick_s / worker.tokens.get(job.name, 1e-9) for worker in job.workers)
        nodes = len({worker.node for worker in job.workers})
        return 1.0 / (slowest + model.reduce_s(job.load.rank, len(job.workers), nodes))


def part_of(model: Model, job: Job, workers: int) -> float:
    """Tokens of a step on each of so many workers; of a base that is not measured, one job is one."""
    return 1.0 if isinstance(model, Unmeasured) else float(job.load.part(workers))


def floor_of(model: Model, job: Job, workers: int, part: float, tick_s: float) -> float:
    """Tokens of each tick that it needs to stay within its bound; more than its part: it cannot."""
    allowed_s = job.bound * job.alone_s
    if workers > 1:
        allowed_s -= model.reduce_s(job.load.rank, workers, 2)
    return part * tick_s / allowed_s if allowed_s > 0.0 else math.inf


def deal(
    model: Model, jobs: Sequence[tuple[Job, int]], keys: Mapping[str, float]
) -> tuple[dict[str, float], float, float, float, bool]:
    """A worker's tick among jobs (each with the number of workers that it is on): everybody what its bound needs, the
    rest to the most urgent by `keys`, none more than a step.

    Returns tokens of each, those that would be a step of all, those that bounds need of a full tick, the tick's time,
    and whether everybody is within its bound.
    """
    parts = {job.name: part_of(model, job, workers) for job, workers in jobs}
    wanted, budget = sum(parts.values()), model.budget
    ranks = sum(job.load.rank for job, _ in jobs)
    tick_s = model.tick_s(min(wanted, budget), len(jobs), ranks)
    full_s = tick_s if wanted >= budget else model.tick_s(budget, len(jobs), ranks)
    floors = {job.name: floor_of(model, job, workers, parts[job.name], full_s) for job, workers in jobs}
    floor = sum(floors.values())
    if wanted <= budget:
        within = full_s == tick_s or all(
            floors[name] * tick_s <= parts[name] * full_s * (1.0 + 1e-9) for name in parts
        )
        return parts, wanted, floor, tick_s, within
    within = floor <= budget * (1.0 + 1e-9) and all(floors[name] <= parts[name] * (1.0 + 1e-9) for name in parts)
    if len(jobs) == 1:
        return {name: float(budget) for name in parts}, wanted, floor, tick_s, within
    left, tokens = budget - floor, {}
    for name in sorted(parts, key=lambda name: (keys.get(name, math.inf), name)):
        more = max(min(parts[name] - floors[name], left), 0.0)
        tokens[name] = floors[name] + more
        left -= more
    return tokens, wanted, floor, tick_s, within

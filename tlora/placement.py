"""Which job is on which worker, how much of each tick it gets, and how fast it goes by that: the state of scheduling.

Owned by whoever calls `scheduling.schedule`, which decides; here are the facts, kept in indexes so that one event costs
what it touches. No torch, no Ray, no clock.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tlora.capacity import Load


class Model(Protocol):
    """What is asked of a base's capacity; `capacity.BaseModel` is one."""

    budgets: tuple[int, ...]
    token_s: float

    def tick_s(self, tokens: float, jobs: int = 1, rank_sum: int = 16, length: float = 0.0) -> float: ...
    def cut(self, tokens: float, rank: int, length: float) -> tuple[float, float]: ...
    def fastest_s(self, load: Load, gpus: int = 1) -> float: ...
    def best_alone_s(self, load: Load, gpus: int) -> float: ...
    def reduce_s(self, rank: int, gpus: int, nodes: int = 1) -> float: ...
    def most_tokens(self, rank_sum: int) -> float: ...


class Unmeasured:
    """Of a base of which nothing is known yet: a tick takes what it takes, and holds so many jobs of a token each."""

    token_s = 0.0

    def __init__(self, jobs_per_worker: int):
        self.budgets: tuple[int, ...] = (jobs_per_worker,)

    def tick_s(self, tokens: float, jobs: int = 1, rank_sum: int = 16, length: float = 0.0) -> float:
        return 1.0

    def cut(self, tokens: float, rank: int, length: float) -> tuple[float, float]:
        return tokens, 1.0

    def fastest_s(self, load: Load, gpus: int = 1) -> float:
        return 1.0

    def best_alone_s(self, load: Load, gpus: int) -> float:
        return 1.0

    def reduce_s(self, rank: int, gpus: int, nodes: int = 1) -> float:
        return 0.0

    def most_tokens(self, rank_sum: int) -> float:
        return math.inf


class Claim(NamedTuple):
    """What a job asks of one worker's ticks."""

    key: float
    """Of urgency: the lower, the more urgent."""
    name: str
    part: float
    """Tokens of a step."""
    allowed_s: float
    """The longest that its step may take there."""
    rank: int
    length: float
    """Tokens of a sequence, which is not cut."""
    weight: float
    """What its speed counts for: its step time alone. On several workers, each may be the one that it waits for."""


NOTHING = Claim(0.0, "", 0.0, 0.0, 0, 0.0, 0.0)
UNIT = Load(rank=1, batch=1, length=1)
"""Of a job about which nothing is known."""
_ROUNDING = 1.0 + 1e-9


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
    sweep: str = ""
    """Of which it is a candidate."""
    rested_s: float = 0.0
    """Since it was submitted, in which it did not wait: its user, or its own end, held it back."""
    way: float = 1.0
    """Of a candidate: steps to its end if none of its exits comes; `remaining` counts what is expected of them."""
    rank: float | None = None
    """Of a candidate: its urgency, as `sweep_order.keys` has it."""
    can_split: bool = True
    can_move: bool = True
    """Its state can be saved, or need not be."""
    alone_s: float = 1.0
    """Predicted step time alone, on the GPUs that it asks for."""
    fewest: int = 1
    """GPUs with which it can stay within its bound."""
    need: float = 0.0
    """Tokens of each full tick of a worker with which it can."""
    workers: tuple["Worker", ...] = ()
    claim: Claim = NOTHING
    """On each of its workers."""
    rate: float = 0.0
    """Steps a second."""
    since_s: float = 0.0
    """From when on it goes at that rate."""
    late_s: float = math.inf
    """When it had waited as long as it may: then it goes before all others, the first of them first, and is not taken
    off again for any that came after it."""

    def done_by(self, now_s: float) -> None:
        """Count the steps taken until now."""
        if self.rate and now_s > self.since_s:
            self.remaining = max(self.remaining - self.rate * (now_s - self.since_s), 0.0)
        self.since_s = max(self.since_s, now_s)

    @property
    def is_overdue(self) -> bool:
        return self.late_s < math.inf

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
    speed: float = 0.0
    """Sum over its jobs of the speed here over the speed alone."""
    wanted: float = 0.0
    """Tokens that would be a step of every job here."""
    tick_s: float = 0.0
    ready_s: float = 0.0
    """When its base is loaded."""
    is_leaving: bool = False
    """Its node is drained, or a base without a worker gets its place: it gets no job, and gives up those it has."""
    group: str = ""
    idle_since_s: float | None = None
    """When its last job left; None while it has one."""


class Order:
    """Items by a number, lowest first."""

    __slots__ = ("items", "keys", "total")

    def __init__(self) -> None:
        self.items: list[tuple[float, str]] = []
        self.keys: dict[str, float] = {}
        self.total = 0.0
        """Of the numbers."""

    def put(self, name: str, key: float) -> None:
        before = self.keys.get(name)
        if before == key:
            return
        self.drop(name)
        self.keys[name] = key
        self.total += key
        insort(self.items, (key, name))

    def drop(self, name: str) -> None:
        before = self.keys.pop(name, None)
        if before is not None:
            del self.items[bisect_left(self.items, (before, name))]
            self.total = self.total - before if self.items else 0.0

    def from_key(self, key: float) -> Iterator[str]:
        """Names of at least this key."""
        for at in range(bisect_left(self.items, (key, "")), len(self.items)):
            yield self.items[at][1]

    def below(self, key: float) -> Iterator[str]:
        """Names of at most this key, the highest first."""
        for at in range(bisect_left(self.items, (key, chr(0x10FFFF))) - 1, -1, -1):
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
        self.pressure = Order()
        """Busy workers by the tokens that a step of all their jobs takes: the residual capacity, backwards."""
        self.waiting = Order()
        """Jobs by urgency, the most urgent first. `wait` and `unwait` change it."""
        self.longest = Order()
        """The same by seconds that they will take, on as many workers as they are given at least."""
        self.running = Order()
        """Jobs by the urgency that they had when they were placed."""
        self.stretched = Order()
        """Jobs on more workers than they need, by the GPUs that they would give up."""

    def wait(self, job: Job, key: float) -> None:
        """A job waits from now on, as urgent as that."""
        self.waiting.put(job.name, key)
        self.longest.put(job.name, job.remaining * self.model.fastest_s(job.load, job.fewest))

    def unwait(self, name: str) -> None:
        """It waits no longer, if it did."""
        self.waiting.drop(name)
        self.longest.drop(name)


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
        self.refilled: dict[str, None] = {}
        """Workers whose ticks are dealt anew since that was last asked."""
        self._seated: dict[str, None] = {}
        """Workers of jobs that were there before, and are not dealt yet."""
        self.used: dict[str, int] = {}
        """Placements on workers, by user."""

    def pool(self, base: str) -> Pool:
        if base not in self.pools:
            self.pools[base] = Pool(self._models.get(base, Unmeasured(self.jobs_per_worker)))
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
            pool.pressure.drop(worker.name)

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
        if job.workers:
            job.claim = self.claim_of(job, len(job.workers))
        self.changed[job.name] = None
        for worker in touched:
            self._share_out(worker, now_s)
        if not job.workers:
            job.rate = 0.0

    def seat(self, job: Job, worker: Worker) -> None:
        """On a worker that has it already; `settle` counts them all."""
        job.workers = (worker,)
        worker.jobs[job.name] = job
        self._seated[worker.name] = None
        job.claim = self.claim_of(job, 1)
        self.used[job.user] = self.used.get(job.user, 0) + 1

    def settle(self, now_s: float) -> None:
        """After all that was there before has been put in."""
        for worker in (self.workers.get(name) for name in self._seated):
            if worker is not None:
                self._share_out(worker, now_s)
        self._seated.clear()

    def claim_of(self, job: Job, count: int) -> Claim:
        """Of a job on so many workers."""
        pool = self.pool(job.base)
        allowed_s = job.bound * job.alone_s
        if count > 1:
            allowed_s -= pool.model.reduce_s(job.load.rank, count, 2)
        key = pool.running.keys.get(job.name, math.inf)
        part, length = part_of(pool.model, job, count), part_of(pool.model, job, job.load.batch)
        return Claim(key, job.name, part, allowed_s, job.load.rank, length, job.alone_s)

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
        self.refilled[worker.name] = None
        dealt = deal(self.pool(worker.base).model, [job.claim for job in worker.jobs.values()]) if worker.jobs else FREE
        worker.tokens, worker.wanted, worker.tick_s, worker.speed, _ = dealt

    def rate_of(self, job: Job) -> float:
        """Steps a second: the slowest of its workers, and the sum of its gradient. More than one worker: modelled."""
        model = self.pool(job.base).model
        if not job.workers:
            return 0.0
        if len(job.workers) == 1:
            worker = job.workers[0]
            return worker.tokens[job.name] / (job.claim.part * worker.tick_s)
        part = job.claim.part
        slowest = max(part * worker.tick_s / worker.tokens.get(job.name, 1e-9) for worker in job.workers)
        nodes = len({worker.node for worker in job.workers})
        return 1.0 / (slowest + model.reduce_s(job.load.rank, len(job.workers), nodes))


def part_of(model: Model, job: Job, workers: int) -> float:
    """Tokens of a step on each of so many workers; of a base that is not measured, one job is one."""
    return 1.0 if isinstance(model, Unmeasured) else float(job.load.part(workers))


class Dealt(NamedTuple):
    """How a worker's ticks are dealt."""

    tokens: dict[str, float]
    """Of a tick, by job."""
    wanted: float
    """That would be a step of all."""
    tick_s: float
    speed: float
    """Sum of the jobs' speeds over those alone."""
    is_within: bool
    """Everybody is within its bound."""


FREE = Dealt({}, 0.0, 0.0, 0.0, True)


def deal(model: Model, claims: Sequence[Claim]) -> Dealt:
    """The best way to deal a worker's ticks: of the budgets of a tick that keep everybody within its bound, the one of
    the highest joint speed."""
    wanted, ranks, longest, squares = 0.0, 0, 0.0, 0.0
    for claim in claims:
        wanted += claim.part
        ranks += claim.rank
        longest = max(longest, claim.length)
        squares += claim.part * claim.length
    if len(claims) == 1:
        return _deal_alone(model, claims[0])
    fitting, best = model.most_tokens(ranks), None
    for budget in (*(budget for budget in model.budgets[:-1] if budget >= longest), max(model.budgets[-1], longest)):
        tokens = min(wanted, budget)
        dealt = _deal_at(claims, tokens, wanted, model.tick_s(tokens, len(claims), ranks, squares / wanted))
        if tokens > fitting:
            dealt = dealt._replace(is_within=False)
        if best is None or (dealt.is_within, dealt.speed) > (best.is_within, best.speed):
            best = dealt
        if wanted <= budget:
            break
    assert best is not None
    return best


def _deal_alone(model: Model, claim: Claim) -> Dealt:
    tokens, step_s = model.cut(claim.part, claim.rank, claim.length)
    is_within = step_s <= claim.allowed_s * _ROUNDING
    return Dealt({claim.name: tokens}, claim.part, step_s * tokens / claim.part, claim.weight / step_s, is_within)


def _deal_at(claims: Sequence[Claim], budget: float, wanted: float, tick_s: float) -> Dealt:
    """Ticks of a budget: each job has what its bound needs, the rest goes to the most urgent, none has more than a
    step."""
    if wanted <= budget:
        speed = sum(claim.weight for claim in claims) / tick_s
        is_within = all(tick_s <= claim.allowed_s * _ROUNDING for claim in claims)
        return Dealt({claim.name: claim.part for claim in claims}, wanted, tick_s, speed, is_within)
    left, is_within, needs = budget, True, []
    for claim in claims:
        need = claim.part * tick_s / claim.allowed_s if claim.allowed_s > 0.0 else budget
        is_within = is_within and need <= claim.part * _ROUNDING
        left -= need
        needs.append(need)
    is_within = is_within and left >= -1e-6 * budget
    tokens, speed = {}, 0.0
    for claim, need in sorted(zip(claims, needs, strict=True)):
        more = max(min(claim.part - need, left), 0.0)
        left -= more
        tokens[claim.name] = need + more
        speed += claim.weight * (need + more) / (claim.part * tick_s)
    return Dealt(tokens, wanted, tick_s, speed, is_within)

"""What we are measured against, played through the same trace: jobs alone on their GPUs, and grouping by memory.

Jobs alone pay nothing for a start, and GPUs are counted, not placed on nodes: both flatter these baselines. Called by
`simulate`'s users; each returns a `Replay`.
"""

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tlora.capacity import BaseModel, Capacity
from tlora.scheduling import COSTS, Costs
from tlora.simulate import Outcome, Replay
from tlora.traces import TraceJob, lone_step_s

_DEPTH = 1000
"""Jobs of the queue that a backfill looks at."""


@dataclass(slots=True)
class _Alone:
    """GPUs that are counted; jobs that hold what they ask for until their end."""

    gpus: int
    now_s: float = 0.0
    free: int = 0
    running: list[tuple[float, int, TraceJob]] = field(default_factory=list)
    """End, GPUs, job, in the order of their ends."""
    started: list[tuple[TraceJob, float]] = field(default_factory=list)
    num_sorted: int = 0
    """Jobs of the queue when it was last in order: none has come since, if there are as many."""

    def start(self, job: TraceJob) -> None:
        self.free -= job.gpus
        insort(self.running, (self.now_s + job.duration_s, job.gpus, job), key=lambda run: (run[0], run[2].name))
        self.started.append((job, self.now_s))

    def end_due(self) -> None:
        while self.running and self.running[0][0] <= self.now_s:
            self.free += self.running.pop(0)[1]


def first_come(cluster: _Alone, queue: list[TraceJob]) -> None:
    """In the order of submission; the first that does not fit holds up the rest."""
    count = 0
    while count < len(queue) and queue[count].gpus <= cluster.free:
        cluster.start(queue[count])
        count += 1
    del queue[:count]


def easy_backfill(cluster: _Alone, queue: list[TraceJob]) -> None:
    """The same, but jobs that do not put off the first one's start go before it (Lifka 1995). It knows durations."""
    first_come(cluster, queue)
    if not queue or not cluster.free:
        return
    free, at_s, spare = cluster.free, cluster.now_s, 0
    for end_s, gpus, _ in cluster.running:
        free += gpus
        if free >= queue[0].gpus:
            at_s, spare = end_s, free - queue[0].gpus
            break
    started = []
    for at, job in enumerate(queue[1 : 1 + _DEPTH], 1):
        if not cluster.free:
            break
        ends_before = cluster.now_s + job.duration_s <= at_s
        if job.gpus <= cluster.free and (ends_before or job.gpus <= spare):
            spare -= 0 if ends_before else job.gpus
            cluster.start(job)
            started.append(at)
    for at in reversed(started):
        del queue[at]


def shortest_first(cluster: _Alone, queue: list[TraceJob]) -> None:
    """The shortest that fits, by its true duration."""
    if len(queue) != cluster.num_sorted:
        queue.sort(key=lambda job: (job.duration_s, job.name))
    at = 0
    while cluster.free and at < min(len(queue), _DEPTH):
        if queue[at].gpus <= cluster.free:
            cluster.start(queue.pop(at))
        else:
            at += 1
    cluster.num_sorted = len(queue)


ALONE: dict[str, Callable[[_Alone, list[TraceJob]], None]] = {
    "fcfs": first_come,
    "easy": easy_backfill,
    "sjf-oracle": shortest_first,
}


def alone(
    way: str, capacity: Capacity, jobs: Sequence[TraceJob], gpus: int, *, measure: str, is_backlog: bool, bound: float
) -> Replay:
    """Jobs on GPUs of their own, in the order of `way`."""
    cluster, queue, policy = _Alone(gpus, free=gpus), list[TraceJob](), ALONE[way]
    replay = Replay(way, gpus)
    coming = deque(sorted((0.0 if is_backlog else job.submitted_s, job.name, job) for job in jobs))
    step_s = max(coming[-1][0], 1.0) / 400
    while coming or queue or cluster.running:
        ends_s = cluster.running[0][0] if cluster.running else float("inf")
        cluster.now_s = min(ends_s, coming[0][0] if coming else float("inf"))
        cluster.end_due()
        while coming and coming[0][0] <= cluster.now_s:
            queue.append(coming.popleft()[2])
        policy(cluster, queue)
        if not replay.samples or cluster.now_s >= replay.samples[-1][0] + step_s:
            rates = sum(_tokens_per_s(capacity, job, measure) for _, _, job in cluster.running)
            replay.samples.append((cluster.now_s, len(queue), gpus - cluster.free, rates))
    for job, start_s in cluster.started:
        lone_s = lone_step_s(capacity, job, measure)
        replay.outcomes.append(
            Outcome(
                job.name,
                0.0 if is_backlog else job.submitted_s,
                start_s,
                start_s + job.duration_s,
                job.duration_s,
                job.duration_s * job.gpus,
                job.duration_s,
                job.duration_s / lone_s * job.load.tokens,
                bound,
            )
        )
    return replay


def _tokens_per_s(capacity: Capacity, job: TraceJob, measure: str) -> float:
    return job.load.tokens / lone_step_s(capacity, job, measure)


@dataclass(slots=True, eq=False)
class _Member:
    job: TraceJob
    lone_s: float
    steps: float
    left: float
    started_s: float
    begins_s: float


@dataclass(slots=True, eq=False)
class _Group:
    """Jobs whose batches are one batch, on a number of GPUs: a tick is a step of each."""

    gpus: int
    base: str
    model: BaseModel
    members: dict[str, _Member] = field(default_factory=dict)
    tokens: int = 0
    ranks: int = 0
    largest: int = 0
    """Most tokens of one member on a GPU."""
    tick_s: float = 0.0
    now_s: float = 0.0
    version: int = 0

    def rows(self, joining: TraceJob) -> float:
        """Tokens on the fullest GPU, were that one to join."""
        return max((self.tokens + joining.load.tokens) / self.gpus, self.largest, joining.load.part(self.gpus))

    def has_memory(self, joining: TraceJob) -> bool:
        return self.rows(joining) <= self.model.most_tokens(self.ranks + joining.load.rank)

    def advance(self, now_s: float) -> None:
        for member in self.members.values():
            run_s = now_s - max(self.now_s, member.begins_s)
            if run_s > 0.0 and self.tick_s:
                member.left -= run_s / self.tick_s
        self.now_s = now_s

    def retime(self) -> None:
        """After its members have changed."""
        jobs = [member.job for member in self.members.values()]
        self.tokens, self.ranks = sum(job.load.tokens for job in jobs), sum(job.load.rank for job in jobs)
        self.largest = max((job.load.part(self.gpus) for job in jobs), default=0)
        rows = max(self.tokens / self.gpus, self.largest)
        self.tick_s = (
            self.model.tick_s(rows, len(jobs), self.ranks) + self.model.reduce_s(self.ranks, self.gpus) if jobs else 0.0
        )
        self.version += 1

    def next_end_s(self) -> float:
        return min(max(self.now_s, member.begins_s) + member.left * self.tick_s for member in self.members.values())


class FifoGrouping:
    """mLoRA's way: in the order of submission, into the first group of its base that has the memory, else onto free
    GPUs; the first that fits nowhere holds up the rest. Groups keep their GPUs until their last job has ended.

    With `spreads`, free GPUs come first, then the least full group: kinder to completion times than mLoRA is."""

    def __init__(
        self, capacity: Capacity, jobs: Sequence[TraceJob], gpus: int, *, measure: str, is_backlog: bool, bound: float,
        costs: Costs = COSTS, spreads: bool = False,
    ):  # fmt: skip
        self.capacity, self.measure, self.costs, self.bound = capacity, measure, costs, bound
        self.replay, self.free = Replay("fifo-spread" if spreads else "fifo-grouping", gpus), gpus
        self._spreads = spreads
        self._is_backlog = is_backlog
        self._queue: deque[TraceJob] = deque()
        self._groups: dict[int, _Group] = {}
        self._events: list[tuple[float, int, int, TraceJob | None]] = [
            (0.0 if is_backlog else job.submitted_s, -1, at, job) for at, job in enumerate(jobs)
        ]
        heapq.heapify(self._events)
        self._num_groups = 0
        self._step_s = max((event[0] for event in self._events), default=1.0) / 400
        self._submitted_s = {job.name: 0.0 if is_backlog else job.submitted_s for job in jobs}

    def run(self) -> Replay:
        while self._events:
            now_s, key, version, job = heapq.heappop(self._events)
            if job is not None:
                self._queue.append(job)
                if self._events and self._events[0][0] == now_s and self._events[0][1] == -1:
                    continue
            elif key not in self._groups or self._groups[key].version != version:
                continue
            else:
                self._end(key, now_s)
            while self._queue and self._place(self._queue[0], now_s):
                self._queue.popleft()
            self._sample(now_s)
        return self.replay

    def _place(self, job: TraceJob, now_s: float) -> bool:
        if self._spreads:
            return self._open(job, now_s) or self._enter(job, now_s)
        return self._enter(job, now_s) or self._open(job, now_s)

    def _open(self, job: TraceJob, now_s: float) -> bool:
        """A group of its own."""
        if job.gpus > self.free:
            return False
        self._num_groups += 1
        group = _Group(job.gpus, job.base, self.capacity.models[job.base], now_s=now_s)
        self._groups[self._num_groups] = group
        self.free -= job.gpus
        self._join(self._num_groups, group, job, now_s, now_s + self.costs.load_s)
        return True

    def _enter(self, job: TraceJob, now_s: float) -> bool:
        """The first group that can take it, or the least full."""
        fitting = (
            (group.rows(job) if self._spreads else 0.0, key)
            for key, group in self._groups.items()
            if group.base == job.base and group.gpus >= job.gpus and group.has_memory(job)
        )
        found = min(fitting, default=None) if self._spreads else next(fitting, None)
        if found is None:
            return False
        self._join(found[1], self._groups[found[1]], job, now_s, now_s + self.costs.attach_s)
        return True

    def _join(self, key: int, group: _Group, job: TraceJob, now_s: float, begins_s: float) -> None:
        group.advance(now_s)
        lone_s = lone_step_s(self.capacity, job, self.measure)
        steps = job.duration_s / lone_s
        group.members[job.name] = _Member(job, lone_s, steps, steps, begins_s, begins_s)
        group.retime()
        heapq.heappush(self._events, (group.next_end_s(), key, group.version, None))

    def _end(self, key: int, now_s: float) -> None:
        group = self._groups[key]
        group.advance(now_s)
        for member in [member for member in group.members.values() if member.left * group.tick_s < 1e-6]:
            job, alone_s = member.job, member.steps * member.lone_s
            del group.members[job.name]
            self.replay.outcomes.append(
                Outcome(
                    job.name,
                    self._submitted_s[job.name],
                    member.started_s,
                    now_s,
                    now_s - member.started_s,
                    alone_s * job.gpus,
                    alone_s,
                    member.steps * job.load.tokens,
                    self.bound,
                )
            )
        if group.members:
            group.retime()
            heapq.heappush(self._events, (max(group.next_end_s(), now_s), key, group.version, None))
        else:
            del self._groups[key]
            self.free += group.gpus

    def _sample(self, now_s: float) -> None:
        samples = self.replay.samples
        if not samples or now_s >= samples[-1][0] + self._step_s:
            rates = sum(
                member.job.load.tokens / group.tick_s
                for group in self._groups.values()
                for member in group.members.values()
            )
            samples.append((now_s, len(self._queue), self.replay.gpus - self.free, rates))

"""Who trains where: a pure function from what is known to what is to be done. No torch, no Ray, no clock.

Called by the scheduler actor. This is the simple policy: jobs in the order of their submission, each on the least
loaded worker of its base that has room.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """A job that has no place."""

    name: str
    base: str
    """Jobs of one base may share a super-model."""
    submitted_s: float


@dataclass(frozen=True, slots=True)
class Worker:
    """One GPU process of a group."""

    name: str
    jobs: frozenset[str]
    is_leaving: bool = False
    """Its node is drained: it gets no job, and gives up those it has."""
    idle_since_s: float | None = None
    """When its last job left; None while it has one."""


@dataclass(frozen=True, slots=True)
class Group:
    """The workers on one base. Its size is what was asked for: some may not have come yet, and not be in `workers`."""

    name: str
    base: str
    size: int
    workers: tuple[Worker, ...]
    idle_since_s: float | None
    """When its last job left; None while it has one."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """All that a decision may depend on."""

    waiting: tuple[WaitingJob, ...]
    groups: tuple[Group, ...]
    max_workers: int
    """Of all groups together."""
    jobs_per_worker: int
    idle_s: float
    """A group, or a worker that the rest could do without, goes after being idle for so long."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The difference to be made, each part with its reason."""

    places: dict[str, str] = field(default_factory=dict)
    """Worker by job."""
    moves: frozenset[str] = frozenset()
    """Jobs that must leave the worker they are on."""
    sizes: dict[str, int] = field(default_factory=dict)
    """New size by group."""
    leaves: dict[str, frozenset[str]] = field(default_factory=dict)
    """Workers to let go, by group: none has a job."""
    starts: dict[str, int] = field(default_factory=dict)
    """Size of a new group by base."""
    stops: frozenset[str] = frozenset()
    reasons: dict[str, str] = field(default_factory=dict)
    """Why, by job or group; for a job without a place, what it waits for."""


def schedule(state: ClusterState, now_s: float) -> Plan:
    """The plan for this moment. The same state and time give the same plan."""
    plan = Plan()
    load = {worker.name: len(worker.jobs) for group in state.groups for worker in group.workers}
    homes = {group.base: group for group in state.groups}
    room = state.max_workers - sum(group.size for group in state.groups)
    unplaced: dict[str, int] = {}
    for job in sorted(state.waiting, key=lambda job: (job.submitted_s, job.name)):
        home = homes.get(job.base)
        open_to_it = [
            worker.name
            for worker in (home.workers if home else ())
            if not worker.is_leaving and load[worker.name] < state.jobs_per_worker
        ]
        if open_to_it:
            worker = min(open_to_it, key=lambda name: (load[name], name))
            plan.places[job.name] = worker
            plan.reasons[job.name] = f"least loaded of {len(open_to_it)} with room: {load[worker]} job(s)"
            load[worker] += 1
        else:
            unplaced[job.base] = unplaced.get(job.base, 0) + 1
            coming = home.size - len(home.workers) if home else 0
            plan.reasons[job.name] = _wait(home is not None, coming, room, state)
    for base, count in unplaced.items():
        room -= _ask_for_workers(plan, state, homes.get(base), base, count, room)
    freed = frozenset(
        job for group in state.groups for worker in group.workers if worker.is_leaving for job in worker.jobs
    )
    wanted = {job.base for job in state.waiting}
    leaves = dict(_spare_workers(state, wanted, now_s))
    emptied = {group.name for group in state.groups if group.workers and _remaining(group, leaves) == 0}
    idle = frozenset({*_idle_groups(state, wanted, now_s), *emptied})
    leaves = {name: workers for name, workers in leaves.items() if name not in idle}
    smaller = {group.name: _remaining(group, leaves) for group in state.groups if group.name in leaves}
    sizes = {**plan.sizes, **smaller}
    return Plan(plan.places, freed, sizes, leaves, plan.starts, idle, plan.reasons)


def _wait(has_group: bool, coming: int, room: int, state: ClusterState) -> str:
    if coming:
        return f"waits for {coming} worker(s) that are starting"
    if room > 0:
        return "waits for a worker, asked for now"
    what = "every worker of its base is full" if has_group else "no worker has its base"
    return f"{what}, and all {state.max_workers} workers of the cluster are taken"


def _ask_for_workers(plan: Plan, state: ClusterState, home: Group | None, base: str, count: int, room: int) -> int:
    """Enough workers for so many jobs without a place, as far as there is room; returns how many were asked for."""
    coming = home.size - len(home.workers) if home else 0
    wanted = -(-count // state.jobs_per_worker) - coming
    asked = max(0, min(wanted, room))
    if not asked:
        return 0
    if home is None:
        plan.starts[base] = asked
    else:
        plan.sizes[home.name] = home.size + asked
        plan.reasons[home.name] = f"{count} job(s) without a place: {asked} more worker(s)"
    return asked


def _idle_groups(state: ClusterState, wanted: set[str], now_s: float) -> Iterator[str]:
    for group in state.groups:
        if group.base not in wanted and group.idle_since_s is not None and now_s - group.idle_since_s >= state.idle_s:
            yield group.name


def _spare_workers(state: ClusterState, wanted: set[str], now_s: float) -> Iterator[tuple[str, frozenset[str]]]:
    """Workers without jobs that are leaving, or have been idle for long while others of their group are not."""
    for group in state.groups:
        gone = {worker.name for worker in group.workers if worker.is_leaving and not worker.jobs}
        if group.base not in wanted and group.idle_since_s is None:
            gone |= {
                worker.name
                for worker in group.workers
                if worker.idle_since_s is not None and now_s - worker.idle_since_s >= state.idle_s
            }
        if gone:
            yield group.name, frozenset(gone)


def _remaining(group: Group, leaves: dict[str, frozenset[str]]) -> int:
    """A group's size once these have left: those that stay, and those that are still to come."""
    gone = len(leaves.get(group.name, ()))
    return max(group.size, len(group.workers)) - gone

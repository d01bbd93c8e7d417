"""How many workers each group is to have: more when jobs lack a place, fewer when some idle. No torch, Ray or clock.

Called by `scheduling.schedule`, after jobs have been placed, where workers are not a given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from tlora.placement import Unmeasured, Worker

if TYPE_CHECKING:
    from tlora.scheduling import ClusterState, Plan


@dataclass(frozen=True, slots=True)
class Group:
    """The workers, or units, on one base. Its size is what was asked for: some may not have come yet, and not be in
    `workers`."""

    name: str
    base: str
    size: int
    workers: tuple[Worker, ...]
    idle_since_s: float | None
    """When its last job left; None while it has one."""


def size_groups(state: "ClusterState", groups: Mapping[str, Group], plan: "Plan", now_s: float) -> None:
    """Complete a plan by what is to become of groups and workers."""
    homes = {group.base: group for group in groups.values()}
    wanted = {base for base, pool in state.pools.items() if pool.waiting.keys}
    room = state.max_workers - sum(group.size * state.width_of(group.base) for group in groups.values())
    unplaced = {base: len(pool.waiting) for base, pool in state.pools.items()}
    idle_s = state.idle_s
    for base, count in unplaced.items():
        home = homes.get(base)
        coming = home.size - len(home.workers) if home else 0
        text = _wait(home is not None, coming, room // state.width_of(base), state.max_workers)
        if home and coming > 0 and home.size > (most := state.most_of(base)):
            width = state.width_of(base)
            what = "worker(s)" if width == 1 else f"unit(s) of {width} workers"
            text = f"waits for machines: {home.size} {what} of its base are asked for, those here have room for {most}"
        plan.reasons.update({name: text for name in state.pools[base].waiting.keys if name not in plan.moves})
        plan.demand[base] = _demand(state, base)
        width = state.width_of(base)
        asked = _ask_for_workers(plan, state, home, base, count, room // width)
        room -= width * asked
        if count and not asked and coming <= 0:
            idle_s = 0.0  # what idles is in the way
    for group in groups.values():
        for worker in group.workers:
            if worker.is_leaving:
                plan.moves.update(worker.jobs)
                plan.reasons.update(dict.fromkeys(worker.jobs, f"its worker {worker.name[:8]} leaves"))
    busy = {worker for names in plan.places.values() for worker in names}
    leaves = dict(_spare_workers(groups, wanted, busy, now_s - idle_s))
    emptied = {group.name for group in groups.values() if group.workers and _remaining(group, leaves) == 0}
    plan.stops.update(emptied)
    plan.stops.update(_idle_groups(groups, wanted, busy, now_s - idle_s))
    for name in plan.stops:
        idle = f"no job for {idle_s:g} s" if idle_s else "no job, and another base waits"
        plan.reasons[name] = "all its workers leave" if name in emptied else idle
    for name, workers in leaves.items():
        if name not in plan.stops:
            plan.leaves[name] = workers
            plan.sizes[name] = _remaining(groups[name], leaves)
            named = ", ".join(sorted(worker[:8] for worker in workers))
            plan.reasons[name] = f"{len(workers)} worker(s) without a job leave: {named}"


def _demand(state: "ClusterState", base: str) -> int:
    """Workers on which every job of a base, waiting or not, would have what its bound needs."""
    pool = state.pools[base]
    names = (*pool.waiting.keys, *pool.running.keys)
    needs = sum(state.jobs[name].need for name in names)
    return max(ceil(needs / pool.model.budgets[-1]), ceil(len(names) / state.jobs_per_worker))


def _wait(has_group: bool, coming: int, room: int, max_workers: int) -> str:
    if coming > 0:
        return f"waits for {coming} worker(s) that are starting"
    if room > 0:
        return "waits for a worker, asked for now"
    what = "every worker of its base is full" if has_group else "no worker has its base"
    return f"{what}, and all {max_workers} workers of the cluster are taken"


def _ask_for_workers(plan: "Plan", state: "ClusterState", home: Group | None, base: str, count: int, room: int) -> int:
    """Enough workers for so many jobs without a place, as far as there is room; returns how many were asked for."""
    if not count:
        return 0
    coming = home.size - len(home.workers) if home else 0
    measured = not isinstance(state.pools[base].model, Unmeasured)
    lacking = (
        plan.demand[base] - (len(home.workers) if home else 0) if measured else ceil(count / state.jobs_per_worker)
    )
    asked = max(0, min(max(lacking, 1) - coming, room))
    if not asked:
        return 0
    if home is None:
        plan.starts[base] = asked
        plan.reasons[f"base {base}"] = f"{count} job(s) without a place: a group of {asked} worker(s)"
    else:
        plan.sizes[home.name] = home.size + asked
        plan.reasons[home.name] = f"{count} job(s) without a place: {asked} more worker(s)"
    return asked


def _idle_groups(groups: Mapping[str, Group], wanted: set[str], busy: set[str], before_s: float) -> Iterator[str]:
    """Those without jobs since `before_s`."""
    for group in groups.values():
        is_idle = group.idle_since_s is not None and group.idle_since_s <= before_s
        if is_idle and group.base not in wanted and not any(worker.name in busy for worker in group.workers):
            yield group.name


def _spare_workers(
    groups: Mapping[str, Group], wanted: set[str], busy: set[str], before_s: float
) -> Iterator[tuple[str, frozenset[str]]]:
    """Workers without jobs that are leaving, or have been idle since `before_s` while others of their group are not."""
    for group in groups.values():
        gone = {worker.name for worker in group.workers if worker.is_leaving and not worker.jobs}
        if group.base not in wanted and group.idle_since_s is None:
            gone |= {
                worker.name
                for worker in group.workers
                if worker.idle_since_s is not None and worker.idle_since_s <= before_s and worker.name not in busy
            }
        if gone:
            yield group.name, frozenset(gone)


def _remaining(group: Group, leaves: Mapping[str, frozenset[str]]) -> int:
    """A group's size once these have left: those that stay, and those that are still to come."""
    gone = len(leaves.get(group.name, ()))
    return max(group.size, len(group.workers)) - gone

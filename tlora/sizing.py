"""How many workers each group is to have: more when jobs lack a place, fewer when some idle. No torch, Ray or clock.

Called by `scheduling.schedule`, after jobs have been placed, where workers are not a given. Where there are not enough
for all bases, the next worker goes to the base whose waiting jobs would gain the most joint speed by it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from tlora.placement import Claim, Unmeasured, Worker, deal

if TYPE_CHECKING:
    from tlora.scheduling import ClusterState, Plan

_YIELDS_S = 600.0
"""In which a worker that yields has left, and one of another base has come in its place; no other yields meanwhile."""


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
    room = state.max_workers - _taken(state)
    plan.demand.update({base: _demand(state, base) for base in state.pools})
    lacking = {base: _lacking(state, homes.get(base), base, count) for base, count in plan.demand.items()}
    idle_s = state.idle_s
    for base, asked in _allot(state, lacking, room).items():
        home, count, width = homes.get(base), len(state.pools[base].waiting), state.width_of(base)
        coming = home.size - len(home.workers) if home else 0
        text = _wait(home is not None, coming, asked, width, state.max_workers)
        if home and coming > 0 and home.size > (most := state.most_of(base)):
            what = "worker(s)" if width == 1 else f"unit(s) of {width} workers"
            text = f"waits for machines: {home.size} {what} of its base are asked for, those here have room for {most}"
        plan.reasons.update({name: text for name in state.pools[base].waiting.keys if name not in plan.moves})
        if asked:
            _ask(plan, home, base, asked, f"{count} job(s) without a place")
        elif count and coming <= 0 and width <= state.max_workers:
            idle_s = 0.0  # what idles is in the way
    for group in groups.values():
        for worker in group.workers:
            if worker.is_leaving:
                plan.moves.update(worker.jobs)
                why = ": another base has none, and a job that has waited as long as it may"
                text = f"its worker {worker.name[:8]} leaves{why if worker.name in state.yielding else ''}"
                plan.reasons.update(dict.fromkeys(worker.jobs, text))
    busy = {worker for names in plan.places.values() for worker in names}
    leaves = dict(_spare_workers(groups, wanted, busy, now_s - idle_s))
    emptied = {group.name for group in groups.values() if group.workers and _remaining(group, leaves, plan) == 0}
    plan.stops.update(emptied)
    plan.stops.update(_idle_groups(groups, wanted, busy, now_s - idle_s))
    for name in plan.stops:
        idle = f"no job for {idle_s:g} s" if idle_s else "no job, and another base waits"
        plan.reasons[name] = "all its workers leave" if name in emptied else idle
    for name, workers in leaves.items():
        if name not in plan.stops:
            plan.leaves[name] = workers
            plan.sizes[name] = _remaining(groups[name], leaves, plan)
            named = ", ".join(sorted(worker[:8] for worker in workers))
            plan.reasons[name] = f"{len(workers)} worker(s) without a job leave: {named}"


def comes_to(state: "ClusterState", base: str) -> bool:
    """Whether a worker of this base may come without another one's leaving."""
    groups = state.groups or {}
    coming = any(group.size > len(group.workers) for group in groups.values() if group.base == base)
    return coming or _taken(state) + state.width_of(base) <= state.max_workers


def needs_anothers(state: "ClusterState", base: str, now_s: float) -> bool:
    """Whether nothing will bring this base a worker, unless another base's leave: also where there are fewer machines
    than the cluster may have. One that has been let go for its sake is waited for a while."""
    if state.groups is None:
        return True
    width, room = state.width_of(base), state.most_of(base)
    if now_s < state.yields_until_s or width > state.max_workers or room < 1:
        return False
    return _taken(state) > room * width or not comes_to(state, base)


def let_yield(state: "ClusterState", giving: Iterable[Worker], base: str, now_s: float) -> None:
    """As many of these workers as one of this base takes the place of are to leave; none, if they are too few."""
    chosen, freed = [], 0
    for worker in giving:
        if freed < state.width_of(base):
            chosen.append(worker)
            freed += state.width_of(worker.base)
    if freed >= state.width_of(base):
        state.yields_until_s = now_s + _YIELDS_S
        for worker in chosen:
            state.drain(worker, is_leaving=True)
            state.yielding[worker.name] = base


def keep_what_nobody_needs(state: "ClusterState") -> None:
    """Workers that were to leave for a base of which no job has waited too long any more."""
    late = {state.jobs[name].base for name in state.overdue.keys} if state.yielding else set()
    for name, base in list(state.yielding.items()):
        if base not in late:
            del state.yielding[name]
            state.drain(state.workers[name], is_leaving=False)


def _taken(state: "ClusterState") -> int:
    return sum(group.size * state.width_of(group.base) for group in (state.groups or {}).values())


def _demand(state: "ClusterState", base: str) -> int:
    """Workers on which every job of a base, waiting or not, would have what its bound needs."""
    pool = state.pools[base]
    names = (*pool.waiting.keys, *pool.running.keys)
    needs = sum(state.jobs[name].need for name in names)
    return max(ceil(needs / pool.model.budgets[-1]), ceil(len(names) / state.jobs_per_worker))


def _wait(has_group: bool, coming: int, asked: int, width: int, max_workers: int) -> str:
    if coming > 0:
        return f"waits for {coming} worker(s) that are starting"
    if asked > 0:
        return "waits for a worker, asked for now"
    if width > max_workers:
        return f"its base takes {width} workers: more than the {max_workers} that the cluster may have"
    what = "every worker of its base is full" if has_group else "no worker has its base"
    return f"{what}, and all {max_workers} workers of the cluster are taken"


def _lacking(state: "ClusterState", home: Group | None, base: str, demand: int) -> int:
    """Workers to ask for, so that no job of a base is without a place."""
    pool = state.pools[base]
    if not pool.waiting:
        return 0
    coming, here = (home.size - len(home.workers), len(home.workers)) if home else (0, 0)
    if isinstance(pool.model, Unmeasured):
        return max(ceil(len(pool.waiting) / state.jobs_per_worker) - coming, 0)
    return max(demand - here, 1) - coming


def _allot(state: "ClusterState", lacking: Mapping[str, int], room: int) -> dict[str, int]:
    """What each base gets of the workers that it lacks, one after the other: where jobs have waited as long as they
    may, then by priority, then by the most joint speed for a GPU. What is kept for a unit of several that is first in
    this order nobody else gets."""
    asks = dict.fromkeys(lacking, 0)
    fitting = [base for base, count in lacking.items() if count > 0 and state.width_of(base) <= state.max_workers]
    gains = {base: _gains(state, base) for base in fitting if room > 0}
    ranks = {base: next(gain) for base, gain in gains.items()}
    while ranks and room > 0:
        best = max(ranks, key=ranks.__getitem__)
        if room < state.width_of(best):
            own = sum(group.size for group in (state.groups or {}).values() if group.base == best)
            if ranks[best][0] > -math.inf and (own + 1) * state.width_of(best) <= state.max_workers:
                break
            del ranks[best]
            continue
        asks[best] += 1
        room -= state.width_of(best)
        ranks[best] = next(gains[best], (-math.inf, -math.inf, 0.0))
        if asks[best] == lacking[best]:
            del ranks[best]
    return asks


def _gains(state: "ClusterState", base: str) -> Iterator[tuple[float, float, float]]:
    """Of one more worker, then of another, with the waiting jobs that it would take: how early the first had waited as
    long as it may, the higher the earlier; their highest priority, and their joint speed for each of its GPUs. Of a
    base that nobody has measured the first worker goes before those of others, for it tells; then each counts for one
    job alone."""
    pool, width = state.pools[base], state.width_of(base)
    late = [name for _, name in state.overdue.items if name in pool.waiting.keys]
    names = [*late, *(name for _, name in pool.waiting.items if name not in state.overdue.keys)]
    at, is_first = 0, all(group.base != base for group in (state.groups or {}).values())
    while at < len(names):
        claims: list[Claim] = []
        filled, priority, earliness = 0.0, -math.inf, -state.jobs[names[at]].late_s
        while at < len(names) and len(claims) < state.jobs_per_worker:
            job = state.jobs[names[at]]
            if claims and filled + job.need > pool.model.budgets[-1]:
                break
            claims.append(state.claim_of(job, job.fewest))
            filled, priority, at = filled + job.need, max(priority, job.priority), at + 1
        if isinstance(pool.model, Unmeasured):
            speed = math.inf if is_first else 1.0
        else:
            speed = deal(pool.model, claims).speed
        yield earliness, priority, speed / width
        is_first = False


def _ask(plan: "Plan", home: Group | None, base: str, asked: int, why: str) -> None:
    if home is None:
        plan.starts[base] = asked
        plan.reasons[f"base {base}"] = f"{why}: a group of {asked} worker(s)"
    else:
        plan.sizes[home.name] = home.size + asked
        plan.reasons[home.name] = f"{why}: {asked} more worker(s)"


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
        gone = {
            worker.name
            for worker in group.workers
            if worker.is_leaving and not worker.jobs and worker.idle_since_s is not None  # else one is on its way yet
        }
        if group.base not in wanted and group.idle_since_s is None:
            gone |= {
                worker.name
                for worker in group.workers
                if worker.idle_since_s is not None and worker.idle_since_s <= before_s and worker.name not in busy
            }
        if gone:
            yield group.name, frozenset(gone)


def _remaining(group: Group, leaves: Mapping[str, frozenset[str]], plan: "Plan") -> int:
    """A group's size once these have left: those that stay, and those that are still to come."""
    return plan.sizes.get(group.name, max(group.size, len(group.workers))) - len(leaves.get(group.name, ()))

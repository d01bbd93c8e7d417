"""How many workers each group is to have: more when jobs lack a place or crowd, fewer when some idle. No torch, Ray or
clock.

Called by `scheduling.schedule`, after jobs have been placed, where workers are not a given. Where there are not enough
for all bases, the next worker goes to the base whose waiting jobs would gain the most joint speed by it.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from tlora.placement import Claim, Unmeasured, Worker, deal

if TYPE_CHECKING:
    from tlora.scheduling import ClusterState, Plan

_CROWDED = 16
"""Workers whose jobs are asked whether they would gain by more room, of each base the fullest."""


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
    taken = sum(group.size * state.width_of(group.base) for group in groups.values())
    plan.demand.update({base: _demand(state, base) for base in state.pools})
    asks = _deal(
        state, {base: _lacking(state, homes.get(base), base, count) for base, count in plan.demand.items()}, taken
    )
    idle_s = state.idle_s
    for base, asked in asks.items():
        home, count = homes.get(base), len(state.pools[base].waiting)
        coming = home.size - len(home.workers) if home else 0
        text = _wait(home is not None, coming, asked, state.max_workers)
        if home and coming > 0 and home.size > (most := state.most_of(base)):
            width = state.width_of(base)
            what = "worker(s)" if width == 1 else f"unit(s) of {width} workers"
            text = f"waits for machines: {home.size} {what} of its base are asked for, those here have room for {most}"
        plan.reasons.update({name: text for name in state.pools[base].waiting.keys if name not in plan.moves})
        if asked:
            _ask(plan, home, base, asked, f"{count} job(s) without a place")
            taken += asked * state.width_of(base)
        elif count and coming <= 0:
            idle_s = 0.0  # what idles is in the way
    if state.rules.is_elastic and not wanted and not state.num_idle:
        _relieve(state, homes, plan, taken)
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


def _wait(has_group: bool, coming: int, asked: int, max_workers: int) -> str:
    if coming > 0:
        return f"waits for {coming} worker(s) that are starting"
    if asked > 0:
        return "waits for a worker, asked for now"
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


def _deal(state: "ClusterState", lacking: Mapping[str, int], taken: int) -> dict[str, int]:
    """What each base gets of what it lacks, one worker after the other: to jobs that have waited as long as they may,
    then by priority, then to the most joint speed for a GPU."""
    asks = dict.fromkeys(lacking, 0)
    room, late = state.max_workers - taken, {state.jobs[name].base for name in state.overdue}
    gains = {base: _gains(state, base) for base, count in lacking.items() if count > 0}
    ranks = {base: (base in late, *next(gain)) for base, gain in gains.items()}
    while open_ones := [
        base for base in ranks if asks[base] < lacking[base] and room >= state.width_of(base)
    ]:  # fmt: skip
        best = max(open_ones, key=ranks.__getitem__)
        asks[best] += 1
        room -= state.width_of(best)
        ranks[best] = (best in late, *next(gains[best], (0, 0.0)))
    return asks


def _gains(state: "ClusterState", base: str) -> Iterator[tuple[int, float]]:
    """Of one more worker, then of another: the highest priority of the waiting jobs that it would take, the most urgent
    first, and their joint speed for each of its GPUs."""
    pool, width = state.pools[base], state.width_of(base)
    claims: list[Claim] = []
    filled, priority = 0.0, -math.inf
    for _, name in pool.waiting.items:
        job = state.jobs[name]
        claims.append(state.claim_of(job, job.fewest))
        filled, priority = filled + job.need, max(priority, job.priority)
        if filled >= pool.model.budgets[-1] or len(claims) == state.jobs_per_worker:
            yield int(priority), deal(pool.model, claims).speed / width
            claims, filled, priority = [], 0.0, -math.inf
    if claims:
        yield int(priority), deal(pool.model, claims).speed / width


def _relieve(state: "ClusterState", homes: Mapping[str, Group], plan: "Plan", taken: int) -> None:
    """More workers where jobs crowd, those first that would save the most time: on machines that are here already, or
    as many as it takes to keep everybody within its bound."""
    crowds = {base: _crowd(state, base) for base, home in homes.items() if home.size <= len(home.workers)}
    for base in sorted(crowds, key=lambda base: (-sum(crowds[base]), base)):
        home, width, most = homes[base], state.width_of(base), state.most_of(base)
        free = most - ceil(taken / width) if state.rules.fills and most < math.inf else 0
        wanted = max(free, plan.demand[base] - len(home.workers))
        # Half of them: with these gone, the others have more room, too.
        asked = min(ceil(len(crowds[base]) / 2), int(wanted), (state.max_workers - taken) // width)
        if asked > 0:
            _ask(plan, home, base, asked, f"{len(crowds[base])} job(s) would end sooner on workers of their own")
            taken += asked * width


def _crowd(state: "ClusterState", base: str) -> list[float]:
    """Seconds saved of jobs for which a worker of their own would repay itself."""
    pool, costs, saved = state.pools[base], state.costs, []
    if isinstance(pool.model, Unmeasured):
        return []
    for name in pool.pressure.highest(_CROWDED):
        jobs = [job for job in state.workers[name].jobs.values() if job.can_move and job.rate]
        seconds = sorted((job.saves_s(pool.model.fastest_s(job.load)) for job in jobs), reverse=True)
        repaid = [each for each in seconds if each >= state.rules.repay * (costs.load_s + costs.move_s)]
        saved += repaid[: len(state.workers[name].jobs) - 1]
    return saved


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

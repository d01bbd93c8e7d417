"""How a plan is made: who joins whom, who gives way, who gets more. No torch, no Ray, no clock.

Called by `scheduling.schedule` alone, on a state that it leaves as it will be once the plan is carried out.
"""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from tlora import sizing
from tlora.placement import Job, Model, Pool, Unmeasured, Worker, deal

if TYPE_CHECKING:
    from tlora.scheduling import ClusterState, Plan

_TRIES = 3
"""Candidates that are looked at before the next way is tried."""
_WORTH = 1.01
"""Joint over apart, from where on a merge counts as a gain."""
_GATHERS_S = 60.0
"""In which the jobs of a worker that is freed have left it; no other is freed meanwhile."""
_FASTER = 0.9
"""Step time on more workers over that before, below which a job gets them."""


class Planner:
    """One plan in the making."""

    def __init__(self, state: "ClusterState", now_s: float, made: "Plan"):
        self.state, self.now_s, self.rules, self.costs, self.made = state, now_s, state.rules, state.costs, made
        self._gathered: set[str] = set()
        """Bases for which a worker of another one was looked for: once a plan."""

    def plan(self) -> None:
        """Fill in the plan."""
        state = self.state
        self._age()
        sizing.keep_what_nobody_needs(self.state)
        blocked = self._admit_overdue()
        arrived = sorted(state.arrived, key=lambda name: (state.key(state.jobs[name]), name))
        for name in arrived:
            job = state.jobs.get(name)
            if job is not None and not job.workers and job.base not in blocked:
                self._admit(job, can_preempt=True)
        state.arrived.clear()
        if state.freed:
            self._fill_up(blocked)
            state.freed.clear()
        if self.rules.is_elastic and state.num_idle and not self._someone_waits():
            self._spread()
        for name in state.changed:
            if name in state.jobs:
                self.made.rates[name] = state.jobs[name].rate
        state.changed.clear()
        self._tell_shares()

    def _tell_shares(self) -> None:
        """Of workers whose jobs have changed, how their ticks are dealt."""
        state = self.state
        for worker in (state.workers.get(name) for name in state.refilled):
            if worker is not None and worker.jobs and not isinstance(state.pool(worker.base).model, Unmeasured):
                self.made.budgets[worker.name] = math.ceil(sum(worker.tokens.values()))
                self.made.shares.update(worker.tokens)
        state.refilled.clear()

    def _age(self) -> None:
        """Jobs that have waited as long as they may go before all others, in the order of their deadlines."""
        state = self.state
        for name in list(state.deadlines.below(self.now_s))[::-1]:
            state.jobs[name].late_s = state.deadlines.keys[name]
            state.deadlines.drop(name)
            if not state.jobs[name].workers:
                state.overdue.put(name, state.jobs[name].late_s)

    def _someone_waits(self) -> bool:
        return any(pool.waiting.items for pool in self.state.pools.values())

    def _admit_overdue(self) -> set[str]:
        """Jobs that have waited as long as they may, in order. Returns the bases where one still waits: there nobody
        else is let in, so that what becomes free is its."""
        blocked: set[str] = set()
        for _, name in list(self.state.overdue.items):
            job = self.state.jobs[name]
            is_out = job.base not in blocked and not self._admit(job, can_preempt=True)
            if is_out and job.name in self.state.pool(job.base).waiting.keys:  # else its user's quota holds it back
                blocked.add(job.base)
            if len(blocked) == len(self.state.pools):
                break
        return blocked

    def _fill_up(self, blocked: set[str]) -> None:
        """Let waiting jobs in where something has become free, the most urgent first."""
        state = self.state
        for user in list(state.by_quota):
            for name in list(state.by_quota[user]):
                self._admit(state.jobs[name], can_preempt=False)
        bases = state.pools if "" in state.freed else sorted(state.freed & state.pools.keys())
        for base in bases:
            pool, failed = state.pools[base], set[str]()
            while base not in blocked and len(failed) < _TRIES:
                head = next((name for name in self._heads(pool) if name not in failed), None)
                if head is None:
                    break
                if not self._admit(state.jobs[head], can_preempt=False) and head in pool.waiting.keys:
                    failed.add(head)  # else its user's quota holds it back: it is no head any more

    def _heads(self, pool: Pool) -> list[str]:
        """Whom to let in next, the most urgent first. But where nobody has come for half as long as all that is left
        will take, the queue runs dry, and a job that will outlast the rest goes first: or else it would end alone."""
        state, heads = self.state, pool.waiting.lowest(_TRIES)
        if not heads or self.rules.urgency != "shortest" or isinstance(pool.model, Unmeasured):
            return heads
        known = [each for each in state.pools.values() if not isinstance(each.model, Unmeasured)]
        work_s = sum(each.waiting.total + each.running.total / 2 for each in known)  # of those that run, about half
        left_s = work_s / max(len(state.workers), 1)
        longest_s, longest = pool.longest.items[-1]
        runs_dry = self.now_s - state.last_come_s >= left_s / 2
        return [longest, *heads] if runs_dry and longest_s >= left_s else heads

    # --- one job

    def _admit(self, job: Job, *, can_preempt: bool) -> bool:
        """Find it a place; whether there was one."""
        state = self.state
        pool, held = state.pool(job.base), state.by_quota.setdefault(job.user, {})
        if self._allowance(job) < job.fewest:
            pool.unwait(job.name)
            held[job.name] = None
            self.made.reasons[job.name] = (
                f"waits for the quota of user {job.user!r}: {self.rules.quotas[job.user]} worker(s)"
            )
            return False
        if held.pop(job.name, 0) is None:
            pool.wait(job, state.key(job))
        if self._find(job, can_preempt):
            return True
        if job.name not in self.made.moves:
            self.made.reasons[job.name] = (
                "waits: every worker that could take it is full, and none of its jobs gives way"
            )
        return False

    def _allowance(self, job: Job) -> float:
        """Workers that it may be on."""
        return self.rules.quotas.get(job.user, math.inf) - self.state.used.get(job.user, 0) + len(job.workers)

    def _find(self, job: Job, can_preempt: bool) -> bool:
        pool = self.state.pool(job.base)
        others_wait = len(pool.waiting) > 1
        most = job.fewest if others_wait and self.rules.is_elastic else self._useful(job, pool.model)
        if self._take_idle(job, most, [job.base]):
            return True
        joined = self._partners(job, pool) if self.rules.shares else []
        others = self._loadable(job.base)
        if others and (not joined or self._repays_load(job)) and self._take_idle(job, most, others):
            return True
        if joined:
            self._join(job, joined)
            return True
        if self.rules.shares and self._gather(job):
            return bool(job.workers)
        if job.is_overdue and self._take_over(job):
            return True
        if isinstance(pool.model, Unmeasured):
            return False
        if self.rules.is_elastic and self._reclaim(job, pool):
            return True
        return self.rules.preempts and can_preempt and self._preempt(job, pool)

    def _useful(self, job: Job, model: Model) -> int:
        """GPUs that it goes fastest on, of those that it asks for."""
        if not job.can_split:
            return 1
        counts = range(1, int(min(job.gpus, job.load.batch, self._allowance(job))) + 1)
        return max(job.fewest, min(counts, key=lambda count: (round(model.fastest_s(job.load, count), 6), count)))

    def _take_idle(self, job: Job, most: int, bases: Sequence[str]) -> bool:
        """Workers without jobs that have, or will have to load, its base: as many as it can use and there are."""
        if self.state.num_idle < job.fewest:
            return False
        for count in sorted({max(most >> by, job.fewest) for by in range(most.bit_length())}, reverse=True):
            for base in bases:
                if workers := self._idle(base, count):
                    self._load(workers, job.base)
                    self._put(job, workers, f"{count} idle worker(s)" + ("" if base == job.base else ", base loaded"))
                    return True
        return False

    def _load(self, workers: list[Worker], base: str) -> None:
        for worker in workers:
            if worker.base != base:
                self.state.load_base(worker, base, self.now_s + self.costs.load_s)
                self.made.loads[worker.name] = base
                self.made.reasons[worker.name] = f"a job waits for {base}"

    def _loadable(self, base: str) -> list[str]:
        """Bases whose idle workers may load another. Those of a group keep theirs: it ends, and another starts."""
        return sorted(self.state.idle.keys() - {base}) if self.state.groups is None else []

    def _repays_load(self, job: Job) -> bool:
        return job.remaining * job.alone_s > self.rules.repay * self.costs.load_s

    def _idle(self, base: str, count: int) -> list[Worker]:
        """So many on one node, the one with the fewest that suffices; else on as few nodes as it takes."""
        nodes = self.state.idle.get(base, {})
        if sum(map(len, nodes.values())) < count:
            return []
        fitting = [(len(names), node) for node, names in nodes.items() if len(names) >= count]
        chosen: list[str] = []
        if fitting:
            chosen = sorted(nodes[min(fitting)[1]])[:count]
        else:
            for _, node in sorted(((-len(names), node) for node, names in nodes.items())):
                chosen += sorted(nodes[node])[: count - len(chosen)]
        return [self.state.workers[name] for name in chosen]

    def _partners(self, job: Job, pool: Pool) -> list[tuple[Worker, float]]:
        """The paper's search: a binary cut, in the order of residual capacity, at what the job asks for; of the workers
        beside it, those with the most left and the full ones, where the joint speed is the most above that apart.
        Returned with that joint speed; none if there are not enough."""
        model, count = pool.model, job.fewest
        claim = self.state.claim_of(job, count)
        if claim.weight < _WORTH * claim.part * pool.model.token_s:
            return []  # its tokens are as dear among others as alone
        most = model.budgets[-1]
        full = count if claim.weight > (1.0 + self.rules.gain) * claim.part * pool.model.token_s else 0
        names = dict.fromkeys(
            (
                *pool.pressure.lowest(count + 1),
                *islice(pool.pressure.below(most - claim.part), count + 1),
                *islice(pool.pressure.from_key(most), full),
            )
        )
        gains: list[tuple[float, float, Worker]] = []
        for name in names:
            worker = self.state.workers[name]
            joint = self._joint(job, worker, pool, count)
            if joint > worker.speed + self.rules.gain:
                gains.append((joint - worker.speed, joint, worker))
        gains.sort(key=lambda gain: -gain[0])
        if count > 1:  # on one node, if there are enough on any
            nodes = Counter(worker.node for _, _, worker in gains)
            gains = next(
                ([gain for gain in gains if gain[2].node == node] for node in nodes if nodes[node] >= count), gains
            )
        return [(worker, joint) for _, joint, worker in gains[:count]] if len(gains) >= count else []

    def _joint(self, job: Job, worker: Worker, pool: Pool, count: int) -> float:
        """Joint speed if it joins, here and on others, `count` in all; 0: somebody would be beyond its bound, or memory
        would not do."""
        others = [other.claim for other in worker.jobs.values() if other is not job]
        if len(others) >= self.state.jobs_per_worker:
            return 0.0
        claim = self.state.claim_of(job, count)._replace(key=self.state.key(job), weight=job.alone_s / count)
        dealt = deal(pool.model, [*others, claim])
        return dealt.speed if dealt.is_within else 0.0

    def _join(self, job: Job, partners: list[tuple[Worker, float]]) -> None:
        worker, joint = partners[0]
        text = f"joins {len(worker.jobs)} job(s): joint speed {joint:.2f} beats {worker.speed:.2f} apart"
        self._put(job, [worker for worker, _ in partners], text)

    def _gather(self, job: Job) -> bool:
        """Free a worker of another base, whose jobs go to its other workers, if they lose less than that brings;
        whether one is, or is about to be. In a cluster of groups it leaves first, and the job waits on."""
        state = self.state
        is_known = not isinstance(state.pool(job.base).model, Unmeasured)
        if state.gathers_until_s > self.now_s:
            return state.gathers_for == job.base
        if job.base in self._gathered or state.yielding:
            return False
        self._gathered.add(job.base)
        if job.fewest > 1 or (state.groups is not None and (state.num_idle or sizing.comes_to(state, job.base))):
            return False
        for base, pool in state.pools.items():
            if base == job.base or pool.waiting.items or state.width_of(base) < state.width_of(job.base):
                continue
            emptiest = next(iter(pool.pressure.lowest(1)), None)
            if emptiest is None:
                continue
            worker = state.workers[emptiest]
            homes, lost = self._homes(worker, pool)
            cost_s = self.costs.load_s + len(homes) * self.costs.move_s
            repays = not is_known or job.remaining * job.alone_s > self.rules.repay * cost_s
            if not homes or 1.0 - lost <= self.rules.gain or not repays:
                continue
            for other, home in homes:
                self._resize(other, (home,), f"makes room for {job.name}: {lost:.2f} of a lone job's speed lost")
            if state.groups is None:
                self._load([worker], job.base)
                self._put(job, [worker], f"worker freed by {len(homes)} job(s) of {base}, base loaded")
            else:
                state.gathers_for, state.gathers_until_s = job.base, self.now_s + _GATHERS_S
            return True
        return False

    def _homes(self, worker: Worker, pool: Pool) -> tuple[list[tuple[Job, Worker]], float]:
        """Other workers for all jobs of one, and what joint speed that costs; none if one of them has to stay."""
        if isinstance(pool.model, Unmeasured):
            return [], 0.0
        others = [self.state.workers[name] for name in pool.pressure.lowest(_TRIES + 1) if name != worker.name]
        claims = {other.name: [job.claim for job in other.jobs.values()] for other in others}
        speeds, homes, lost = {other.name: other.speed for other in others}, [], worker.speed
        for job in sorted(worker.jobs.values(), key=lambda job: (-job.claim.part, job.name)):
            found: list[tuple[float, float, Worker]] = []
            for other in others if job.can_move and len(job.workers) == 1 else ():
                dealt = deal(pool.model, [*claims[other.name], job.claim])
                if dealt.is_within and len(claims[other.name]) < self.state.jobs_per_worker:
                    found.append((dealt.speed - speeds[other.name], dealt.speed, other))
            if not found:
                return [], 0.0
            gain, speed, home = max(found, key=lambda one: one[0])
            speeds[home.name] = speed
            claims[home.name].append(job.claim)
            homes.append((job, home))
            lost -= gain
        return homes, lost

    def _reclaim(self, job: Job, pool: Pool) -> bool:
        """Take back from a job on more workers than it needs: the half that it does not keep."""
        for name in pool.stretched.highest(_TRIES):
            other = self.state.jobs[name]
            kept = max(other.fewest, len(other.workers) // 2)
            freed = len(other.workers) - kept
            if freed < job.fewest or other is job:
                continue
            keep = other.workers[:kept]
            if not all(self._joint(other, worker, pool, kept) for worker in keep):
                continue
            self._resize(other, keep, f"gives {freed} worker(s) to {job.name}")
            if self._take_idle(job, job.fewest, [job.base]):
                return True
            if self.rules.shares and (joined := self._partners(job, pool)):
                self._join(job, joined)
                return True
        return False

    def _preempt(self, job: Job, pool: Pool) -> bool:
        """Take the place of a job that has far longer to go."""
        mine = self.state.key(job)
        for name in pool.running.highest(_TRIES):
            other = self.state.jobs[name]
            if other.is_overdue or not other.can_move or len(other.workers) < job.fewest:
                continue
            if any(worker.is_leaving for worker in other.workers):
                continue
            other.done_by(self.now_s)
            theirs = self.state.key(other)
            pays = theirs - mine > self.rules.repay * (self.costs.move_s + self.costs.attach_s)
            if not job.is_overdue and not (theirs > self.rules.preempt_factor * mine and pays):
                continue
            freed = other.workers
            self._send_away(other, job, "which has less to go")
            if self._take_idle(job, job.fewest, [job.base]):
                return True
            chosen = [worker for worker in freed if self._joint(job, worker, pool, job.fewest)][: job.fewest]
            if len(chosen) == job.fewest:
                self._put(job, chosen, f"takes the place of {name}, which has longer to go")
                return True
        return False

    def _take_over(self, job: Job) -> bool:
        """For a job that has waited as long as it may, and whose base has no worker: those of other bases that lose the
        least, and where nobody had waited so long before it. In a cluster of groups they leave first, and it waits."""
        state = self.state
        own = [worker for worker in state.workers.values() if worker.base == job.base]
        if len(own) >= job.fewest or not sizing.needs_anothers(state, job.base, self.now_s):
            return False
        giving = [
            worker
            for worker in state.workers.values()
            if worker.base != job.base
            and not worker.is_leaving
            and all(other.late_s > job.late_s for other in worker.jobs.values())
            and (state.groups is not None or all(other.can_move for other in worker.jobs.values()))
        ]
        giving.sort(key=lambda worker: (state.width_of(worker.base), worker.speed, worker.name))
        if state.groups is not None:
            sizing.let_yield(state, giving, job.base, self.now_s)
            return False
        chosen = [*(worker for worker in own if not worker.jobs and not worker.is_leaving), *giving][: job.fewest]
        if len(chosen) < job.fewest:
            return False
        for other in {other.name: other for worker in chosen for other in worker.jobs.values()}.values():
            other.done_by(self.now_s)
            self._send_away(other, job, "which has waited as long as it may")
        begin_s = max(worker.ready_s for worker in chosen)
        self._load(chosen, job.base)
        for worker in chosen:
            worker.ready_s = max(worker.ready_s, begin_s + self.costs.load_s)
        self._put(job, chosen, "has waited as long as it may: worker(s) of another base, base loaded")
        return True

    def _send_away(self, job: Job, other: Job, why: str) -> None:
        """It makes room for another, and waits, saved."""
        state, pool, key = self.state, self.state.pool(job.base), self.state.key(job)
        for worker in job.workers:  # until it is saved
            worker.ready_s = max(worker.ready_s, self.now_s + self.costs.move_s)
        self.made.moves.add(job.name)
        self.made.places.pop(job.name, None)
        pool.running.drop(job.name)
        pool.stretched.drop(job.name)
        state.free(job, self.now_s)
        pool.wait(job, key)
        if job.is_overdue:
            state.overdue.put(job.name, job.late_s)
        self.made.reasons[job.name] = f"makes room for {other.name}, {why}; waits, saved"

    def _put(self, job: Job, workers: list[Worker], reason: str) -> None:
        state, pool = self.state, self.state.pool(job.base)
        pool.unwait(job.name)
        state.by_quota.get(job.user, {}).pop(job.name, None)
        state.overdue.drop(job.name)
        pool.running.put(job.name, state.key(job))
        begin_s = max(self.now_s, *(worker.ready_s for worker in workers)) + self.costs.attach_s
        state.place(job, workers, begin_s, self.now_s)
        self._note(job, reason)

    def _resize(self, job: Job, workers: tuple[Worker, ...], reason: str) -> None:
        """Other workers for one that has some."""
        state = self.state
        job.done_by(self.now_s)
        state.pool(job.base).running.put(job.name, state.key(job))
        is_split = max(len(workers), len(job.workers)) > 1
        begin_s = max(job.since_s, self.now_s, *(worker.ready_s for worker in workers))
        state.place(job, workers, begin_s + (self.costs.split_s if is_split else self.costs.move_s), self.now_s)
        state.freed.add(job.base)
        self._note(job, reason)

    def _note(self, job: Job, reason: str) -> None:
        pool = self.state.pool(job.base)
        spare = len(job.workers) - job.fewest
        if spare > 0:
            pool.stretched.put(job.name, float(spare))
        else:
            pool.stretched.drop(job.name)
        self.made.places[job.name] = tuple(worker.name for worker in job.workers)
        self.made.moves.discard(job.name)
        self.made.reasons[job.name] = reason

    # --- when nobody waits

    def _spread(self) -> None:
        """Use idle workers: jobs of crowded workers move there, large ones are split over more."""
        state = self.state
        for pool in state.pools.values():
            if isinstance(pool.model, Unmeasured):
                continue
            refused: set[str] = set()
            while state.num_idle and len(refused) < _TRIES:
                name = next((name for name in pool.pressure.highest(_TRIES) if name not in refused), None)
                if name is None:
                    break
                if not self._relieve(state.workers[name], pool):
                    refused.add(name)

    def _relieve(self, worker: Worker, pool: Pool) -> bool:
        """Give the jobs of a worker more room, if that repays itself."""
        model = pool.model
        movable = [job for job in worker.jobs.values() if job.can_move]
        for job in sorted(movable, key=lambda job: (-job.claim.part, job.name))[:2]:
            count = len(job.workers)
            keep: tuple[Worker, ...] = ()
            if count == 1 and len(worker.jobs) > 1:
                more, cost_s = 1, self.costs.move_s
            elif job.can_split and 2 * count <= min(job.load.batch, self._allowance(job)):
                keep, more, cost_s = job.workers, count, self.costs.split_s
            else:
                continue
            base = next((base for base in (job.base, *self._loadable(job.base)) if self._idle(base, more)), None)
            if base is None:
                continue
            cost_s += self.costs.load_s if base != job.base else 0.0
            job.done_by(self.now_s)
            before_s, after_s = 1.0 / job.rate, model.fastest_s(job.load, len(keep) + more)
            if job.remaining * (before_s - after_s) < self.rules.repay * cost_s or after_s > _FASTER * before_s:
                continue
            new = self._idle(base, more)
            self._load(new, job.base)
            self._resize(job, (*keep, *new), f"{more} idle worker(s): {before_s / after_s:.2f} × as fast")
            return True
        return False

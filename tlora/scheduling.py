"""Who trains where, and how fast: a function of a state and a time. No torch, no Ray, no clock.

Called by the scheduler actor and by the simulator, which differ in nothing but who carries the plan out. The rule is
tLoRA's (arXiv 2602.07263): jobs of one base share; the most urgent is placed first (in seconds, which hardly tie: the
paper's second key, the residual, is left out there); its partner is found by a binary cut in the order of residual
capacity; it joins if the joint throughput beats that apart and everybody stays within its
bound. What the paper leaves open is ours: urgency is shortness (in GPU-seconds, of jobs that share), aged so that
nobody starves; idle GPUs first, else what nobody misses, else what stretched jobs give back, else a merge, else the
place of a job that has far longer to go; and where one has waited as long as it may, a worker of another base.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tlora import sizing
from tlora.placement import Job, Model, Order, Placements, Unmeasured, Worker, part_of
from tlora.policy import Planner
from tlora.sizing import Group
from tlora.sweep_order import keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds in which a job, or a worker, makes no progress."""

    attach_s: float = 0.3
    """Taking a job in on a warm worker: 0.26 s from submission to the first step on a toy base."""
    end_s: float = 0.0
    """From a job's last step until its files are written, beside the ticks of others."""
    move_s: float = 1.0
    """Saving it first, then the same elsewhere. Modelled."""
    split_s: float = 2.0
    """Another number of workers: a process group is made anew. Modelled."""
    load_s: float = 30.0
    """A base of 8B parameters, and a worker's start. Modelled: 16 GB at about a GB a second, 11 s for the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a plan keeps to; the parts that can be left out, to see what each gains."""

    shares: bool = True
    """Jobs join others."""
    urgency: Literal["shortest", "submitted"] = "shortest"
    is_elastic: bool = True
    """Jobs get more GPUs than they ask for when some idle, and fewer when others wait."""
    preempts: bool = True
    """Jobs make room for far shorter ones, and wait on."""
    patience_s: float = 24 * 3600.0
    patience_lone: float = 10.0
    """A job has waited as long as it may after `patience_s` and so many times its predicted time alone."""
    preempt_factor: float = 2.0
    """How much longer a job must have to go than the one that takes its place."""
    gain: float = 0.3
    """How many lone jobs' speed a merge must add: the joint speed less that apart."""
    repay: float = 10.0
    """A change must gain so many times what it costs."""
    ranks_sweeps: bool = True
    """The longest sweep's longest candidate goes first, rather than each candidate for itself."""
    priority_factor: float = 4.0
    """How much shorter one step of priority makes a job look."""
    quotas: Mapping[str, int] = field(default_factory=dict)
    """Most workers that a user's jobs may be on at once, by user."""


RULES, COSTS = Rules(), Costs()


@dataclass(frozen=True, slots=True)
class Plan:
    """The difference to be made, each part with its reason."""

    places: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Workers by job. A job that is elsewhere goes there once its state is saved."""
    moves: set[str] = field(default_factory=set)
    """Jobs that are to leave their workers, saved, and wait."""
    rates: dict[str, float] = field(default_factory=dict)
    """Predicted steps a second of jobs for which they have changed."""
    shares: dict[str, float] = field(default_factory=dict)
    """Tokens of each tick of its worker, by job, where some have changed."""
    budgets: dict[str, int] = field(default_factory=dict)
    """Most tokens of a tick, by worker, where some have changed."""
    loads: dict[str, str] = field(default_factory=dict)
    """Base to be loaded, by worker."""
    sizes: dict[str, int] = field(default_factory=dict)
    """New size by group."""
    leaves: dict[str, frozenset[str]] = field(default_factory=dict)
    """Workers to let go, by group: none has a job."""
    starts: dict[str, int] = field(default_factory=dict)
    """Size of a new group by base."""
    stops: set[str] = field(default_factory=set)
    """Groups that are to end."""
    demand: dict[str, int] = field(default_factory=dict)
    """Workers that would let every job run within its bound now, by base: for whoever adds machines."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why, by job, group or worker, or `base` and its name for a group to start; for a job without a place, what it
    waits for."""


class ClusterState(Placements):
    """All that a decision may depend on. `schedule` leaves it as it will be once the plan is carried out."""

    def __init__(
        self,
        models: Mapping[str, Model],
        *,
        rules: Rules = RULES,
        costs: Costs = COSTS,
        jobs_per_worker: int = 64,
        groups: Mapping[str, Group] | None = None,
        max_workers: int = 0,
        idle_s: float = 300.0,
        width_of: Callable[[str], int] = lambda base: 1,
        most_of: Callable[[str], float] = lambda base: math.inf,
    ):
        """`groups`: None where workers are a given, as in a trace's cluster: none is asked for or let go. `width_of`:
        how many of `max_workers` a worker of a base counts for, if several hold it together; `most_of`: how many such
        the machines have room for."""
        super().__init__(models, jobs_per_worker)
        self.width_of, self.most_of = width_of, most_of
        self.groups, self.max_workers, self.idle_s = groups, max_workers, idle_s
        self.rules, self.costs = rules, costs
        self.arrived: dict[str, None] = {}
        """Jobs that no plan has seen yet."""
        self.freed: set[str] = set()
        """Bases on whose workers something has become free since the last plan; an empty one: a worker has."""
        self.last_come_s = -math.inf
        """When a job was submitted last."""
        self.gathers_for, self.gathers_until_s = "", -math.inf
        """The base for which a worker of another one is being freed, and until when that is waited for."""
        self.yielding: dict[str, str] = {}
        """Workers that leave, each so that a base without one can have it: kept from state to state."""
        self.yields_until_s = -math.inf
        """No other does before."""
        self.deadlines = Order()
        """Jobs by when they have waited as long as they may."""
        self.overdue = Order()
        """Jobs that wait and have waited as long as they may, by since when."""
        self.by_quota: dict[str, dict[str, None]] = {}
        """Jobs that wait for their user's quota, by user."""

    # --- events

    def submit(self, job: Job, *, is_new: bool = True) -> None:
        """It waits from now on. Of one that is not new a plan has been made before: it did not find a place."""
        self._measure(job)
        self._wait(job)
        self.last_come_s = max(self.last_come_s, job.submitted_s)
        if not is_new:
            self.arrived.pop(job.name)
            self.freed.add(job.base)

    def keep(self, job: Job, worker: Worker) -> None:
        """It has been there, before this state was made."""
        self._measure(job)
        self.pool(job.base).running.put(job.name, self.key(job))
        self.seat(job, worker)

    def _measure(self, job: Job) -> None:
        """What is predicted of it."""
        model = self.pool(job.base).model
        job.alone_s = model.best_alone_s(job.load, job.gpus)
        job.fewest = self._fewest(job) if job.can_split else 1
        full_s, part = model.tick_s(model.budgets[-1]), part_of(model, job, 1)
        job.need = min(part * full_s / max(job.bound * job.alone_s, full_s), model.budgets[-1])
        self.jobs[job.name] = job
        patience_s = self.rules.patience_s + self.rules.patience_lone * job.remaining * job.alone_s
        self.deadlines.put(job.name, job.submitted_s + job.rested_s + patience_s)

    def _fewest(self, job: Job) -> int:
        """Workers with which it stays within its bound, else those with which it is fastest."""
        counts, allowed_s = range(1, job.load.batch + 1), job.bound * job.alone_s * (1.0 + 1e-9)
        within = next((count for count in counts if self._split_s(job, count) <= allowed_s), None)
        return within or min(counts, key=lambda count: self._split_s(job, count))

    def _split_s(self, job: Job, count: int) -> float:
        """Step time of a job on so many workers, wherever they are."""
        model, rank = self.pool(job.base).model, job.load.rank
        return model.fastest_s(job.load, count) - model.reduce_s(rank, count) + model.reduce_s(rank, count, 2)

    def _wait(self, job: Job) -> None:
        self.pool(job.base).wait(job, self.key(job))
        self.arrived[job.name] = None

    def end(self, name: str, now_s: float) -> None:
        """A job is gone, for whatever reason."""
        job = self.jobs.pop(name)
        self._forget(job)
        self.deadlines.drop(name)
        if job.workers:
            self.free(job, now_s)
        self.changed.pop(name, None)

    def lose(self, worker: str, now_s: float) -> list[Job]:
        """A worker is gone; its jobs wait again. The caller sets what they have lost."""
        lost = self.drop_worker(worker, now_s)
        for job in lost:
            self._forget(job)
            self._wait(job)
            if job.is_overdue:
                self.overdue.put(job.name, job.late_s)
        self.freed.update(job.base for job in lost)
        return lost

    def come(self, worker: Worker) -> None:
        """A worker is there."""
        self.put_worker(worker)
        self.freed.add("")

    def drain(self, worker: Worker, *, is_leaving: bool) -> None:
        """A worker gets no job from now on, or does again."""
        worker.is_leaving = is_leaving
        self._index(worker)
        self.freed.add("")

    def free(self, job: Job, now_s: float) -> None:
        """Take a job off its workers, for others to use."""
        workers = job.workers
        self.take(job, now_s)
        self.freed.add(job.base)
        if not all(worker.jobs for worker in workers):
            self.freed.add("")

    def _forget(self, job: Job) -> None:
        pool = self.pool(job.base)
        pool.unwait(job.name)
        pool.running.drop(job.name)
        pool.stretched.drop(job.name)
        self.arrived.pop(job.name, None)
        self.overdue.drop(job.name)
        self.by_quota.get(job.user, {}).pop(job.name, None)

    def key(self, job: Job) -> float:
        """Of urgency, the lower the more urgent: GPU-seconds that it will take where it shares."""
        pool = self.pool(job.base)
        if self.rules.urgency == "submitted" or isinstance(pool.model, Unmeasured):
            return job.submitted_s - job.priority * 1e9
        if job.rank is not None:
            return job.rank
        return job.remaining * self._step_s(job) / self.rules.priority_factor**job.priority

    def _step_s(self, job: Job) -> float:
        """GPU-seconds of a step where it shares."""
        model = self.pool(job.base).model
        return part_of(model, job, 1) * model.token_s

    def rank(self, jobs: Iterable[Job]) -> None:
        """Set the urgency of candidates by what is expected of all of them now; of those that are here, anew."""
        jobs = list(jobs)
        if not self.rules.ranks_sweeps:
            return
        ranks = keys(jobs, self._step_s, self.rules.priority_factor)
        for job in jobs:
            job.rank = ranks.get(job.name)
            pool = self.pool(job.base)
            for order in (pool.waiting, pool.running):
                if job.name in order.keys:
                    order.put(job.name, self.key(job))

    @property
    def num_waiting(self) -> int:
        return sum(len(pool.waiting) for pool in self.pools.values())


def schedule(state: ClusterState, now_s: float) -> Plan:
    """The plan for this moment. The same state and time give the same plan."""
    plan = Plan()
    Planner(state, now_s, plan).plan()
    if state.groups is not None:
        sizing.size_groups(state, state.groups, plan, now_s)
    return plan

"""A cluster played through: the live scheduler's own plans, carried out on a clock of events. No torch, no Ray.

Called by `tlora simulate` and the benchmarks. A job's speed is the capacity model's; its length is the trace's, of
which the scheduler sees a noisy estimate only. Times on several GPUs are modelled.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from tlora.capacity import Capacity
from tlora.placement import Job, Worker
from tlora.scheduling import COSTS, RULES, ClusterState, Costs, Plan, Rules, schedule
from tlora.traces import TraceJob, lone_step_s

GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one job."""

    name: str
    submitted_s: float
    started_s: float
    ended_s: float
    running_s: float
    """In which it made progress."""
    work_s: float
    """GPU-seconds: its time alone on the GPUs that it asks for, times these."""
    alone_s: float
    tokens: float
    bound: float

    @property
    def completion_s(self) -> float:
        return self.ended_s - self.submitted_s

    @property
    def slowdown(self) -> float:
        """While running, against alone."""
        return self.running_s / self.alone_s


@dataclass(slots=True)
class Replay:
    """One way of scheduling, played through one trace."""

    way: str
    gpus: int
    outcomes: list[Outcome] = field(default_factory=list)
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)
    """At some moments: time, jobs waiting, GPUs with a job, useful tokens a second."""
    planning_s: list[float] = field(default_factory=list)
    lost_s: float = 0.0
    """GPU-seconds of training that node losses undid."""

    @property
    def makespan_s(self) -> float:
        first = min(outcome.submitted_s for outcome in self.outcomes)
        return max(outcome.ended_s for outcome in self.outcomes) - first

    @property
    def mean_completion_s(self) -> float:
        return float(np.mean([outcome.completion_s for outcome in self.outcomes]))

    @property
    def throughput(self) -> float:
        """Work done a second: GPUs' worth of jobs that run alone."""
        return sum(outcome.work_s for outcome in self.outcomes) / self.makespan_s

    @property
    def num_beyond_bound(self) -> int:
        return sum(outcome.slowdown > outcome.bound * (1.0 + 1e-6) for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What may befall the cluster."""

    loss_every_s: float = 0.0
    """Mean time between losses of a node, evenly spread; 0: none."""
    repair_s: float = 1800.0
    save_every_s: float = 300.0
    """What a loss costs at most."""
    spot_nodes: int = 0
    """Nodes beyond the cluster's own, each there and away in turn for `spot_s` on average."""
    spot_s: float = 4 * 3600.0
    seed: int = 0


NO_FAULTS = Faults()


@dataclass(slots=True)
class _Run:
    """The truth of one job."""

    job: TraceJob
    lone_s: float
    steps: float
    left: float
    rate: float = 0.0
    since_s: float = 0.0
    running_s: float = 0.0
    started_s: float = -1.0
    version: int = 0

    def advance(self, now_s: float) -> None:
        if self.rate and now_s > self.since_s:
            self.left -= self.rate * (now_s - self.since_s)
            self.running_s += now_s - self.since_s
        self.since_s = max(self.since_s, now_s)


class Simulator:
    """One replay of our scheduler."""

    def __init__(
        self,
        capacity: Capacity,
        jobs: Sequence[TraceJob],
        gpus: int,
        *,
        measure: str = "own",
        rules: Rules = RULES,
        costs: Costs = COSTS,
        faults: Faults = NO_FAULTS,
        bound: float = 3.0,
        way: str = "tlora",
        is_backlog: bool = False,
        can_split: bool = True,
        num_samples: int = 400,
        per_node: int = GPUS_PER_NODE,
    ):
        """`can_split`: jobs may be on several workers at once; those of a live cluster are not yet."""
        self.capacity, self.bound, self.faults = capacity, bound, faults
        self.state = ClusterState(capacity.models, rules=rules, costs=costs)
        self._nodes: dict[str, list[str]] = {}
        """Workers by node, there or not."""
        for at in range(gpus):
            self._nodes.setdefault(f"n{at // per_node:04d}", []).append(f"w{at:05d}")
        for node in self._nodes:
            self._come(node)
        self.replay = Replay(way, gpus)
        self.runs: dict[str, _Run] = {}
        self._is_backlog, self._can_split, self._per_node = is_backlog, can_split, per_node
        self._events: list[tuple[float, int, str, int]] = []
        self._num_open = 0
        for job in jobs:
            lone_s = lone_step_s(capacity, job, measure)
            self._add(job, lone_s, job.duration_s / lone_s, 0.0 if is_backlog else job.submitted_s)
        self._last_s = max((job.submitted_s for job in jobs), default=0.0)
        self._sample_s = max(self._last_s, 1.0) / num_samples
        self._next_sample_s = 0.0
        self._random = np.random.default_rng([faults.seed, 3])
        self._lay_faults()
        heapq.heapify(self._events)

    def _add(self, job: TraceJob, lone_s: float, steps: float, submitted_s: float) -> None:
        self.runs[job.name] = _Run(job, lone_s, steps, steps)
        heapq.heappush(self._events, (submitted_s, 1, job.name, 0))
        self._num_open += 1

    def run(self) -> Replay:
        """To the end of the last job."""
        while self._num_open:
            now_s, kind, name, version = heapq.heappop(self._events)
            if kind == 0 and not self._finish(name, version, now_s):
                continue
            if kind == 1:
                self._submit(name, now_s)
            elif kind == 2:
                self._lose(name, now_s)
            elif kind == 3:
                self._come(name)
            if not (self._events and self._events[0][0] == now_s and self._events[0][1] == kind == 1):
                self._plan(now_s)
            if now_s >= self._next_sample_s:
                self._sample(now_s)
        return self.replay

    def _submit(self, name: str, now_s: float) -> None:
        run = self.runs[name]
        job = run.job
        remaining = run.steps * job.noise
        self.state.submit(
            Job(name, job.base, now_s, job.load, job.gpus, self.bound, remaining=remaining, can_split=self._can_split)
        )

    def _finish(self, name: str, version: int, now_s: float) -> bool:
        run = self.runs[name]
        if run.version != version:
            return False
        run.advance(now_s)
        job = run.job
        self.state.end(name, now_s)
        self._num_open -= 1
        alone_s = run.steps * run.lone_s
        self.replay.outcomes.append(
            Outcome(
                name,
                0.0 if self._is_backlog else job.submitted_s,
                run.started_s,
                now_s + self.state.costs.end_s,
                run.running_s,
                alone_s * job.gpus,
                alone_s,
                run.steps * job.load.tokens,
                self.bound,
            )
        )
        return True

    def _plan(self, now_s: float) -> None:
        began_s = perf_counter()
        plan = schedule(self.state, now_s)
        self.replay.planning_s.append(perf_counter() - began_s)
        self._carry_out(plan, now_s)

    def _carry_out(self, plan: Plan, now_s: float) -> None:
        for name, rate in plan.rates.items():
            run, job = self.runs[name], self.state.jobs[name]
            run.advance(now_s)
            run.rate, run.since_s = rate, job.since_s
            run.version += 1
            if rate:
                if run.started_s < 0.0:
                    run.started_s = job.since_s
                heapq.heappush(self._events, (job.since_s + max(run.left, 0.0) / rate, 0, name, run.version))

    def _sample(self, now_s: float) -> None:
        self._next_sample_s = now_s + self._sample_s
        running = [run for name, run in self.runs.items() if run.rate and name in self.state.jobs]
        tokens_per_s = sum(run.rate * run.job.load.tokens for run in running)
        busy = len(self.state.workers) - self.state.num_idle
        self.replay.samples.append((now_s, self.state.num_waiting, busy, tokens_per_s))

    # --- faults

    def _lay_faults(self) -> None:
        nodes = list(self._nodes)
        faults, end_s = self.faults, 3 * self._last_s
        now_s = 0.0
        while faults.loss_every_s and (now_s := now_s + self._random.exponential(faults.loss_every_s)) < end_s:
            node = str(self._random.choice(nodes))
            self._events += [(now_s, 2, node, 0), (now_s + faults.repair_s, 3, node, 0)]
        for at in range(faults.spot_nodes):
            self._nodes[f"spot{at:04d}"] = [f"spot{at:04d}.{gpu}" for gpu in range(self._per_node)]
            now_s, is_there = 0.0, False
            while (now_s := now_s + self._random.exponential(faults.spot_s)) < end_s:
                is_there = not is_there
                self._events.append((now_s, 3 if is_there else 2, f"spot{at:04d}", 0))

    def _lose(self, node: str, now_s: float) -> None:
        for name in [name for name in self._nodes[node] if name in self.state.workers]:
            for job in self.state.lose(name, now_s):
                run = self.runs[job.name]
                attached_s = max(now_s - run.since_s, 0.0)
                run.advance(now_s)
                undone = min(attached_s, attached_s % self.faults.save_every_s) * run.rate
                run.left += undone
                job.remaining += undone
                self.replay.lost_s += undone * run.lone_s * run.job.gpus
                run.rate = 0.0
                run.version += 1

    def _come(self, node: str) -> None:
        for name in self._nodes[node]:
            if name not in self.state.workers:
                self.state.come(Worker(name, node))

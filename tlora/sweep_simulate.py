"""Sweeps beside plain jobs in the simulator: candidates with known curves halt, wait, end and go on as they would live.

Their jobs are placed by the scheduler's own plans, which are made anew at each exit. No torch, no Ray.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlora.capacity import Capacity, Load
from tlora.placement import Job
from tlora.simulate import Outcome, Simulator
from tlora.sweep import Curve, EarlyExit, Halt
from tlora.sweep_order import ahead
from tlora.sweep_replay import begin
from tlora.sweep_state import Candidate, Status, SweepState
from tlora.traces import TraceJob

_FORWARD = 0.4
"""Of a token's tick: what an evaluation of it takes. Modelled: a forward pass is one product of three, and the head."""


@dataclass(frozen=True, slots=True)
class KnownSweep:
    """A sweep whose candidates' whole curves are known, by name."""

    name: str
    base: str
    curves: Mapping[str, Curve]
    loads: Mapping[str, Load]
    every: int
    """Samples between evaluations."""
    rules: EarlyExit
    submitted_s: float = 0.0
    priority: int = 0
    totals: Mapping[str, int] | None = None
    """Samples of each whole training; None: where its curve ends."""


class SweepSimulator(Simulator):
    """One replay of plain jobs and sweeps."""

    def __init__(
        self, capacity: Capacity, jobs: Sequence[TraceJob], gpus: int, *, sweeps: Sequence[KnownSweep], **options: Any
    ):
        super().__init__(capacity, jobs, gpus, **options)
        self.sweeps = {sweep.name: sweep for sweep in sweeps}
        self.states = {sweep.name: _begin(sweep) for sweep in sweeps}
        self._sweep_of: dict[str, str] = {}
        self._halts: dict[str, int] = {}
        """Samples at which each candidate halts next."""
        self._here: set[str] = set()
        """Candidates that wait for a worker, or train."""
        for sweep in sweeps:
            for one in self.states[sweep.name].candidates:
                load = sweep.loads[one.name]
                lone_s = capacity.models[sweep.base].alone_s(load)
                steps = math.ceil(one.total / load.batch) * self._weight(sweep, one)
                trace = TraceJob(one.name, sweep.submitted_s, 1, steps * lone_s, sweep.base, load, 1.0)
                self._add(trace, lone_s, steps, sweep.submitted_s)
                self._sweep_of[one.name] = sweep.name
                self._here.add(one.name)

    def ended_s(self, sweep: str) -> float:
        """When a sweep's last candidate ended."""
        return max(one.ended_s for one in self.replay.outcomes if self._sweep_of.get(one.name) == sweep)

    def _weight(self, sweep: KnownSweep, one: Candidate) -> float:
        """Steps as long as training alone takes, over those of training and the evaluations between."""
        return 1.0 + _FORWARD * sweep.curves[one.name].num_validation / sweep.every

    def _submit(self, name: str, now_s: float) -> None:
        if name not in self._sweep_of:
            super()._submit(name, now_s)
            self._rank(now_s)
            return
        sweep, one = self._one(name)
        self._halts[name] = _next_halt(sweep, self.states[sweep.name], one)
        run, load = self.runs[name], sweep.loads[name]
        run.left = max(self._halts[name] - one.samples, 0) / load.batch * self._weight(sweep, one)
        job = Job(name, sweep.base, now_s, load, 1, self.bound, sweep.priority, sweep=sweep.name, can_split=False)
        self.state.jobs[name] = job  # so that it is ranked before it waits
        self._rank(now_s)
        self.state.submit(job)

    def _finish(self, name: str, version: int, now_s: float) -> bool:
        run = self.runs[name]
        if name not in self._sweep_of or run.version != version:
            return super()._finish(name, version, now_s)
        run.advance(now_s)
        run.rate, run.version = 0.0, run.version + 1
        self.state.end(name, now_s)
        self._here.discard(name)
        self._settle(name, now_s)
        self._rank(now_s)
        return True

    def _settle(self, name: str, now_s: float) -> None:
        """What its sweep makes of a candidate that halts or has finished, and of those that waited for it."""
        sweep, one = self._one(name)
        state, open_before = self.states[sweep.name], {one.name for one in self._open(sweep.name)}
        at = self._halts[name]
        curve = sweep.curves[name].until(at)
        state.measure(one, curve, at)
        if at >= one.total:
            one.status = Status.FINISHED
        elif found := sweep.rules.judge_alone(curve):
            one.end(found)
        state.judge(sweep.rules.halving)
        if one.is_due:
            one.status = Status.WAITING
        still = self._open(sweep.name)
        for ended in open_before - {one.name for one in still}:
            self._close(ended, now_s)
        for other in still:
            if other.status is Status.QUEUED and other.name not in self._here:
                self._here.add(other.name)
                heapq.heappush(self._events, (now_s, 1, other.name, 0))

    def _open(self, sweep: str) -> list[Candidate]:
        return [one for one in self.states[sweep].candidates if one.status.is_open]

    def _close(self, name: str, now_s: float) -> None:
        run = self.runs[name]
        self._num_open -= 1
        alone_s = run.running_s
        self.replay.outcomes.append(
            Outcome(name, run.job.submitted_s, run.started_s, now_s, alone_s, alone_s, alone_s, 0.0, self.bound)
        )

    def _rank(self, now_s: float) -> None:
        """Tell the scheduler what is expected of every candidate now."""
        jobs = []
        for name, state in self.states.items():
            sweep = self.sweeps[name]
            for candidate, before in ahead(state, sweep.rules.halving).items():
                load, weight = sweep.loads[candidate], self._weight(sweep, state[candidate])
                job = self.state.jobs.get(candidate)
                if job is None:  # it waits for its siblings, and counts for its sweep all the same
                    job = Job(candidate, sweep.base, now_s, load, sweep=name, priority=sweep.priority)
                job.remaining, job.way = (
                    max(part * weight / load.batch, 1.0) for part in (before.expected, before.way)
                )
                jobs.append(job)
        self.state.rank(jobs)

    def _one(self, name: str) -> tuple[KnownSweep, Candidate]:
        sweep = self.sweeps[self._sweep_of[name]]
        return sweep, self.states[sweep.name][name]


def _begin(sweep: KnownSweep) -> SweepState:
    totals = sweep.totals or {name: curve.train[-1][0] for name, curve in sweep.curves.items()}
    return begin(totals, sweep.rules, sweep.every)


def _next_halt(sweep: KnownSweep, state: SweepState, one: Candidate) -> int:
    """Samples at which it halts, or ends."""
    until = state.rungs[one.passed] if one.passed < len(state.rungs) else 0
    halt, curve = Halt(until=until, rules=sweep.rules), sweep.curves[one.name]
    for at, _ in curve.evaluated:
        if one.samples < at < one.total and halt.judge(curve.until(at), at):
            return at
    return one.total

"""What scheduling sees of a roster, kept from plan to plan: what an event touched is put right. No Ray, no torch.

Owned by the roster, which says what has changed. A plan leaves the state as it will be once it is carried out, which
takes a while: a job that goes from one worker to another is there for the next plans, one that is to leave for none is
still where it was. Else, where the roster says otherwise, the roster is right.
"""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from tlora.actors.entries import Change, Entry
from tlora.actors.messages import JobReport
from tlora.capacity import BaseModel, Load
from tlora.job import State
from tlora.placement import Job, Worker
from tlora.scheduling import ClusterState, Rules
from tlora.sizing import Group

if TYPE_CHECKING:
    from tlora.actors.roster import Roster

_UNKNOWN_STEPS = 1000
"""Of a job that is given in epochs, until its worker has counted them."""
_NEAR = 0.1
"""How far the length of a job's sequences may be off before it is planned anew."""


class View:
    """One cluster, as plans are made by it."""

    def __init__(self, roster: "Roster"):
        self._roster = roster
        self._state: ClusterState | None = None
        self._models: dict[str, BaseModel] = {}
        self._is_new = False
        """No plan has been made by this state yet."""
        self._touched: dict[str, None] = {}
        self._bound: dict[str, str] = {}
        """Jobs that leave a worker for another, and that one: for plans they are there already."""
        self._yielding: dict[str, str] = {}
        """Workers that leave for another base's sake, and that base, by whatever state that was planned."""
        self._ranked: set[str] = set()
        """Candidates of sweeps, as of the last plan."""

    def touch(self, name: str) -> None:
        """A job has changed."""
        self._touched[name] = None

    def forget(self) -> None:
        """The next state is made anew."""
        self._state = None

    def send(self, places: Mapping[str, str]) -> None:
        """Jobs are to leave their workers, each for another; or for none, if that is empty."""
        self._bound |= places

    def arrivals(self, draining: Collection[str]) -> list[Change]:
        """Jobs that have left, saved, and now have their places. Whatever has changed meanwhile (its user wants
        something else, the other worker is lost or leaves) goes before that."""
        roster, changes = self._roster, []
        for name, place in list(self._bound.items()):
            entry, seen = roster.jobs[name], roster.workers.get(place)
            processes = seen.report.processes if seen else []
            is_there = bool(processes) and place not in self._yielding and not any(n in draining for n, _ in processes)
            if is_there and entry.wish == "moved":
                continue
            del self._bound[name]
            self.touch(name)
            if is_there and entry.state is State.QUEUED and len(roster.jobs_at(place)) < roster.spec.jobs_per_worker:
                changes.append(Change(name, state=State.ATTACHING, place=place, attempt=entry.attempt + 1, reason=""))
        return changes

    def progress(self, entry: Entry, told: JobReport, now_s: float) -> None:
        """What a worker says of a job that runs there."""
        job = self._state.jobs.get(entry.name) if self._state else None
        if job is None or not told.step:
            return
        _, job.remaining, job.way = self._ahead(entry)
        job.since_s = max(job.since_s, now_s)
        if not _are_near(job.load, _load(entry, told)):
            self.touch(entry.name)

    def state(self, now_s: float, draining: Collection[str] = ()) -> ClusterState:
        """What `schedule` decides by; `draining`: nodes that are about to go."""
        roster, models = self._roster, self._known()
        if self._state is None or models != self._models:
            self._models, self._state, self._is_new = models, self._fresh(models), True
            self._touched = self._open()
        if self._is_new:
            self._is_new = False
            roster.forget_shares()
        state = self._state
        state.groups = self._groups(state, now_s, draining)
        for name in self._touched:
            self._put_right(state, name, now_s)
        self._touched.clear()
        self._rank(state)
        state.settle(now_s)
        return state

    def renew(self, lock: AbstractContextManager[object], now_s: float, draining: Collection[str] = ()) -> None:
        """Make the state anew, if more is known of ticks by now: of thousands of jobs that takes long, so `lock` is not
        held meanwhile. What others change in that time is touched, and put right by the next plan."""
        with lock:
            models = self._known()
            if self._state is None or models == self._models:
                return
            state = self._fresh(models)
            state.groups = self._groups(state, now_s, draining)
            names, self._touched = self._open(), {}
            self._state = None  # if this fails, the plan makes one
        for name in names:
            self._put_right(state, name, now_s)
        with lock:
            self._models, self._state, self._is_new = models, state, True

    def _known(self) -> dict[str, BaseModel]:
        """What there is to plan by."""
        return {base: one.model for base, one in self._roster.learners.items() if one.is_sure and one.model}

    def _open(self) -> dict[str, None]:
        return dict.fromkeys(name for name, entry in self._roster.jobs.items() if not entry.state.is_terminal)

    def _rank(self, state: ClusterState) -> None:
        """Candidates of sweeps by what is expected of them now; also of those that wait at rungs."""
        roster, candidates = self._roster, []
        for name in roster.foretold.keys() & roster.jobs.keys():
            entry = roster.jobs[name]
            job = state.jobs.get(name) or self._job(entry)
            job.sweep, job.remaining, job.way = self._ahead(entry)
            candidates.append(job)
        for left in [state.jobs[name] for name in self._ranked - roster.foretold.keys() if name in state.jobs]:
            left.sweep, left.remaining, left.way = self._ahead(roster.jobs[left.name])
            candidates.append(left)
        self._ranked = set(roster.foretold)
        state.rank(candidates)

    def _ahead(self, entry: Entry) -> tuple[str, float, float]:
        """Its sweep, steps that are expected of it yet, and to its end."""
        told, foretold = self._roster.progress.get(entry.name), self._roster.foretold.get(entry.name)
        if foretold is None:
            return "", _remaining(entry, told), _remaining(entry, told)
        return foretold.sweep, *foretold.steps(told.step if told else 0, entry.spec["batch_size"])

    def _fresh(self, models: dict[str, BaseModel]) -> ClusterState:
        spec, before = self._roster.spec, self._state
        state = ClusterState(
            models,
            rules=Rules(urgency=spec.order, preempts=spec.order == "shortest", quotas=spec.quotas),
            jobs_per_worker=spec.jobs_per_worker,
            max_workers=spec.max_workers,
            idle_s=spec.idle_s,
            width_of=lambda base: self._roster.plan_of(base).ranks,
            most_of=self._roster.most_units,
        )
        state.yielding = self._yielding
        if before is not None:
            state.gathers_for, state.gathers_until_s = before.gathers_for, before.gathers_until_s
            state.yields_until_s = before.yields_until_s
        return state

    def _groups(self, state: ClusterState, now_s: float, draining: Collection[str]) -> dict[str, Group]:
        """With their workers: those that have come or gone, or changed, are put right in the state."""
        roster = self._roster
        for name in self._yielding.keys() - roster.workers.keys():
            del self._yielding[name]
        for name in state.workers.keys() - roster.workers.keys():
            self._lose(state, name, now_s)
        mine: dict[str, list[Worker]] = {name: [] for name in roster.groups}
        for name, seen in roster.workers.items():
            report, group = seen.report, roster.groups.get(seen.report.group)
            worker, base = state.workers.get(name), group.base if group else ""
            if worker is not None and worker.base != base:
                self._lose(state, name, now_s)
                worker = None
            if worker is None:
                worker = Worker(name, report.node, base, group=report.group)
                state.come(worker)
                self._touched.update(dict.fromkeys(roster.jobs_at(name)))
            is_leaving = name in self._yielding or any(node in draining for node, _ in report.processes)
            if worker.is_leaving != is_leaving:
                state.drain(worker, is_leaving=is_leaving)
            seen.idle_since_s = None if roster.jobs_at(name) else (seen.idle_since_s or now_s)
            worker.idle_since_s = seen.idle_since_s
            if group is not None:
                mine[group.name].append(worker)
        for group in roster.groups.values():
            group.idle_since_s = None if roster.is_busy(group.base) else (group.idle_since_s or now_s)
        return {
            group.name: Group(group.name, group.base, group.size, tuple(mine[group.name]), group.idle_since_s)
            for group in roster.groups.values()
        }

    def _lose(self, state: ClusterState, worker: str, now_s: float) -> None:
        for job in state.lose(worker, now_s):
            self.touch(job.name)

    def _put_right(self, state: ClusterState, name: str, now_s: float) -> None:
        entry, job = self._roster.jobs[name], state.jobs.get(name)
        worker = state.workers.get(self._bound.get(name, "") or entry.place)
        is_open = worker is not None or entry.state is State.QUEUED
        new = self._job(entry) if is_open else None
        if job is not None:
            if new is not None and job.workers == ((worker,) if worker else ()) and _are_near(job.load, new.load):
                job.can_move = new.can_move
                return
            state.end(name, now_s)
        if new is not None and worker is not None:
            state.keep(new, worker)
        elif new is not None:
            state.submit(new, is_new=name not in self._roster.waits)

    def _job(self, entry: Entry) -> Job:
        """As scheduling sees it."""
        spec, told = entry.spec, self._roster.progress.get(entry.name)
        sweep, remaining, way = self._ahead(entry)
        return Job(
            entry.name,
            self._roster.base_of(entry),
            entry.submitted_s,
            _load(entry, told),
            rested_s=entry.rested_s,
            bound=spec.get("max_slowdown", 3.0),
            priority=spec.get("priority", 0),
            user=spec.get("user", ""),
            remaining=remaining,
            sweep=sweep,
            way=way,
            can_split=False,
            can_move=entry.state is State.RUNNING and not entry.wish,
        )


def _load(entry: Entry, told: JobReport | None) -> Load:
    """Sequences are as long as they may be, until some were trained on."""
    spec = entry.spec
    length = spec["data"]["max_length"]
    if told and told.step and told.tokens:
        length = min(length, max(round(told.tokens / told.step / spec["batch_size"]), 1))
    return Load(spec["adapter"]["rank"], spec["batch_size"], length)


def _are_near(one: Load, other: Load) -> bool:
    return abs(one.length - other.length) <= _NEAR * max(one.length, other.length)


def _remaining(entry: Entry, told: JobReport | None) -> float:
    """Steps to go."""
    steps = entry.spec["steps"] or _UNKNOWN_STEPS
    return float(max((told.num_steps or steps) - told.step, 1) if told else steps)

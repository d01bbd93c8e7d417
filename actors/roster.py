"""Who is where, and who is to be where: all jobs, workers and groups, and what follows from a report. No Ray, no torch.

Owned by the scheduler actor, which feeds it calls, reports and the time, and carries out what its plans ask of groups.
Every transition is in the journal before anyone acts on it.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tlora.actors.journal import Change, Entry, Journal
from tlora.actors.messages import JobReport, Order, Orders, Report
from tlora.capacity import Learner, Load, Tick
from tlora.cluster import ClusterSpec
from tlora.errors import StateError
from tlora.job import State
from tlora.placement import Job, Worker
from tlora.plan import Plan as BasePlan
from tlora.scheduling import ClusterState, Plan, Rules
from tlora.sizing import Group
from tlora.spec import JobSpec, differences, parse_job

log = logging.getLogger("tlora")
_PAUSE_S = 3.0
_WARM_TICKS = 8
_UNKNOWN_STEPS = 1000
"""Of a job that is given in epochs, until its worker has counted them."""


@dataclass(slots=True)
class _Seen:
    """A worker, as it last said."""

    report: Report
    last_s: float
    orders: Orders | None = None
    """The newest that it was given by this scheduler."""
    idle_since_s: float | None = None
    budget: int = 0
    """Most rows of a tick, as planned; 0: not planned."""


@dataclass(slots=True)
class GroupRecord:
    """A trainer group, as it was asked for."""

    name: str
    base: str
    """Of the base's spec, in JSON."""
    size: int
    idle_since_s: float | None
    plan: BasePlan = field(default_factory=BasePlan)
    """How each of its units holds the base."""
    most_rows: int = 0
    """Of a lane's tick, since one of its units ran out of memory."""


class Roster:
    """The truth of one cluster."""

    def __init__(self, spec: ClusterSpec, journal: Journal, now_s: float):
        self.spec, self.journal = spec, journal
        self.jobs: dict[str, Entry] = {entry.name: entry for entry in journal.entries()}
        self.progress: dict[str, JobReport] = {}
        self.waits: dict[str, str] = {}
        """Why a job has no place."""
        self.groups: dict[str, GroupRecord] = {}
        self.workers: dict[str, _Seen] = {}
        self.learners: dict[str, Learner] = {}
        """What is known of each base's ticks."""
        self.plans: dict[str, BasePlan] = {}
        """Of bases for which a worker has found that it has no room by itself."""
        self._shares: dict[str, float] = {}
        """Of each tick, by job, as planned."""
        self._dismissed: set[str] = set()
        """Workers that are to end: what they say does not count."""
        self._began_s = self._looked_s = now_s
        self.losses: Counter[str] = Counter()
        """Workers that were lost, by group."""

    # --- what users ask for

    def submit(self, specs: Sequence[JobSpec], now_s: float) -> list[str]:
        """Take jobs in, all or none; returns the names of those that are new. The same job again is the same job; other
        content under its name raises StateError, which names the fields that differ."""
        new, faults = [], []
        taken = {entry.spec["output"]: entry.name for entry in self.jobs.values()}
        for spec in map(self._placed, specs):
            if other := _nested(spec, taken):
                faults.append(f"job {spec.name}: output {spec.output} lies in that of job {other}, or holds it.")
            taken[spec.output] = spec.name
            if not self._is_ours(spec.folder):
                where = f"the folder of this cluster's outputs, {self.spec.output_root}"
                faults.append(f"job {spec.name}: output {spec.output} lies outside of {where}.")
            known = self.jobs.get(spec.name)
            if known is None:
                new.append((spec.name, spec.model_dump(mode="json")))
            elif changed := differences(parse_job(known.spec), spec):
                faults.append(
                    f"job {spec.name} was submitted with other content: {'; '.join(changed)}. Choose another name."
                )
        if faults:
            raise StateError("\n".join(faults))
        for entry in self.journal.add(new, now_s) if new else ():
            self.jobs[entry.name] = entry
        return [name for name, _ in new]

    def _placed(self, spec: JobSpec) -> JobSpec:
        """With its output below the cluster's folder of outputs, if it does not say where."""
        if spec.folder.is_absolute():
            return spec
        return spec.model_copy(update={"output": str(self.spec.output_root / spec.output)})

    def _is_ours(self, folder: Path) -> bool:
        """Whether a job may write there."""
        root, path = (Path(os.path.realpath(each.expanduser())) for each in (self.spec.output_root, folder))
        return path != root and root in path.parents and root / "_tlora" not in (path, *path.parents)

    def pause(self, names: Sequence[str], now_s: float) -> None:
        """Save jobs and take them off their workers. Those that have ended raise StateError, and nothing is changed."""
        self._wish(names, State.PAUSED, now_s, "paused by its user")

    def cancel(self, names: Sequence[str], now_s: float, *, keep: bool = False) -> None:
        """End jobs; with `keep`, their exact state is saved first. Cancelled ones stay so."""
        open_ones = [name for name in names if self.entry(name).state is not State.CANCELLED]
        self._wish(open_ones, State.CANCELLED, now_s, "cancelled by its user", keep=keep)

    def resume(self, names: Sequence[str], now_s: float) -> None:
        """Queue paused jobs again; one that was to be paused goes on. Others that have not ended stay as they are."""
        changes = []
        for name in names:
            entry = self.entry(name)
            if entry.state.is_terminal:
                raise StateError(f"job {name} is {entry.state}: it cannot be resumed.")
            if entry.state is State.PAUSED:
                changes.append(Change(name, state=State.QUEUED, reason="", place="", wish=""))
            elif entry.wish == State.PAUSED:
                changes.append(Change(name, wish="", reason=""))
        self._change(changes, now_s)

    def _wish(self, names: Sequence[str], state: State, now_s: float, reason: str, *, keep: bool = True) -> None:
        changes = []
        for name in names:
            entry = self.entry(name)
            if entry.state.is_terminal:
                raise StateError(f"job {name} is {entry.state}: it cannot become {state}.")
            if state is State.PAUSED and entry.wish in (State.CANCELLED, "dropped"):
                raise StateError(f"job {name} is being cancelled: it cannot become {state}.")
            if entry.place:
                changes.append(Change(name, wish=state.value if keep else "dropped", reason=reason))
            elif entry.state is not state:
                changes.append(Change(name, state=state, reason=reason))
        self._change(changes, now_s)

    def entry(self, name: str) -> Entry:
        """What is known of a job. Raises StateError if nothing is."""
        if name not in self.jobs:
            raise StateError(f"job {name} is not known here. `tlora status` lists those that are.")
        return self.jobs[name]

    def _change(self, changes: Sequence[Change], now_s: float) -> None:
        for entry in self.journal.change(changes, now_s) if changes else ():
            self.jobs[entry.name] = entry

    # --- what workers say

    def exchange(self, report: Report, now_s: float) -> Orders:
        """Take a worker's report; returns what it is to have."""
        if report.worker in self._dismissed:
            return Orders(1 + report.heard, stop=True)
        for name, other in list(self.workers.items()):
            replaced = (other.report.group, other.report.rank) == (report.group, report.rank)
            if name != report.worker and replaced:
                self._lose(name, "its worker was replaced", now_s)
        seen = self.workers.setdefault(report.worker, _Seen(report, now_s))
        self._learn(seen.report, report)
        if (group := self.groups.get(report.group)) is not None:
            group.most_rows = min(filter(None, (group.most_rows, report.most_rows)), default=0)
            if report.plan is not None:
                self.plans[group.base] = report.plan
        seen.report, seen.last_s = report, now_s
        self._take(report, now_s)
        return self._orders(seen)

    def _learn(self, before: Report, report: Report) -> None:
        """Refine what is known of the base's ticks. A worker's first ticks, which compile and warm up, do not count."""
        group = self.groups.get(report.group)
        if group is None or report.ticks <= max(before.ticks, _WARM_TICKS) or not report.tick_tokens:
            return
        learner = self.learners.setdefault(group.base, Learner())
        learner.learn(Tick(report.tick_tokens, report.tick_jobs, report.tick_ranks, report.tick_s, report.peak_bytes))

    def _take(self, report: Report, now_s: float) -> None:
        """What a report says of jobs, and what has been let go of."""
        changes = []
        seen = self.workers[report.worker]
        for name, entry in self.jobs.items():
            if entry.place != report.worker:
                continue
            told = report.jobs.get(name)
            if told is not None and told.attempt == entry.attempt:
                self.progress[name] = told
                if told.state.is_terminal:
                    changes.append(Change(name, state=told.state, reason=told.reason, place="", wish=""))
                elif told.state is State.RUNNING and entry.state is State.ATTACHING:
                    changes.append(Change(name, state=State.RUNNING))
            elif entry.wish and seen.orders and name not in seen.orders.jobs and report.applied >= seen.orders.number:
                changes.append(self._let_go(entry))
        self._change(changes, now_s)

    @staticmethod
    def _let_go(entry: Entry) -> Change:
        """A job that its worker no longer has, as was wished."""
        state = {"paused": State.PAUSED, "moved": State.QUEUED}.get(entry.wish, State.CANCELLED)
        return Change(entry.name, state=state, place="", wish="")

    def _orders(self, seen: _Seen) -> Orders:
        mine = [entry for entry in self.jobs.values() if entry.place == seen.report.worker]
        jobs = {entry.name: Order(entry.spec, entry.attempt) for entry in mine if not entry.wish}
        drop = frozenset(entry.name for entry in mine if entry.wish == "dropped")
        shares = {name: self._shares[name] for name in jobs if name in self._shares}
        group, before = self.groups.get(seen.report.group), seen.orders
        most_rows = group.most_rows if group else 0
        orders = Orders(0, jobs, drop, shares=shares, token_budget=seen.budget, most_rows=most_rows)
        if before is None or orders != replace(before, number=0):
            seen.orders = replace(orders, number=1 + max(seen.report.heard, before.number if before else 0))
        assert seen.orders is not None
        return seen.orders

    def lose_silent(self, now_s: float) -> None:
        """Workers that have said nothing for too long are lost; so are the places of those that never came back. Time
        in which nobody could have been heard, since this was not called, does not count."""
        pause_s, self._looked_s = now_s - self._looked_s, now_s
        if pause_s > _PAUSE_S:
            self._began_s += pause_s
            for seen in self.workers.values():
                seen.last_s += pause_s
        for name, seen in list(self.workers.items()):
            if now_s - seen.last_s > self.spec.lost_after_s:
                self._lose(name, f"its worker said nothing for {self.spec.lost_after_s:g} s", now_s)
        if now_s - self._began_s > self.spec.lost_after_s:
            places = {entry.place for entry in self.jobs.values() if entry.place} - self.workers.keys()
            for place in places:
                self._lose(place, "its worker did not come back", now_s)

    def _lose(self, worker: str, reason: str, now_s: float) -> None:
        if seen := self.workers.pop(worker, None):
            self.losses[seen.report.group] += 1
        changes = []
        for entry in self.jobs.values():
            if entry.place == worker:
                change = (
                    self._let_go(entry)
                    if entry.wish
                    else Change(
                        entry.name, state=State.QUEUED, place="", reason=f"{reason}: goes on from its last save"
                    )
                )
                log.warning("job=%s %s: %s", entry.name, change.state, reason)
                changes.append(change)
        self._change(changes, now_s)

    # --- what the plan says

    def cluster_state(self, now_s: float, draining: Collection[str] = ()) -> ClusterState:
        """What `schedule` decides by; `draining`: nodes that are about to go."""
        spec = self.spec
        busy = {base_key(entry.spec["base"]) for entry in self.jobs.values() if entry.place}
        workers = {name: self._worker(name, seen, now_s, draining) for name, seen in self.workers.items()}
        groups = {}
        for group in self.groups.values():
            group.idle_since_s = None if group.base in busy else (group.idle_since_s or now_s)
            mine = tuple(worker for worker in workers.values() if worker.group == group.name)
            groups[group.name] = Group(group.name, group.base, group.size, mine, group.idle_since_s)
        state = ClusterState(
            {base: learner.model for base, learner in self.learners.items() if learner.is_sure and learner.model},
            rules=Rules(quotas=spec.quotas),
            jobs_per_worker=spec.jobs_per_worker,
            groups=groups,
            max_workers=spec.max_workers,
            idle_s=spec.idle_s,
            width_of=lambda base: self.plan_of(base).ranks,
        )
        for worker in workers.values():
            state.come(worker)
        for entry in self.jobs.values():
            if entry.place in workers:
                state.keep(self._job(entry), workers[entry.place])
        state.settle(now_s)
        for entry in self.jobs.values():
            if entry.state is State.QUEUED:
                state.submit(self._job(entry), is_new=entry.name not in self.waits)
        return state

    def plan_of(self, base: str) -> BasePlan:
        """How a new group's units are to hold a base."""
        return self.plans.get(base, BasePlan()) if self.spec.plan == "auto" else self.spec.plan.plan

    def misfits(self) -> dict[str, str]:
        """Groups whose plan is not their base's any more, each with the reason."""
        return {
            name: f"its base takes {plan.ranks} workers: {plan}"
            for name, group in self.groups.items()
            if (plan := self.plan_of(group.base)) != group.plan
        }

    def _job(self, entry: Entry) -> Job:
        """As scheduling sees it. Sequences are as long as they may be, until some were trained on."""
        spec, told = entry.spec, self.progress.get(entry.name)
        length, steps = spec["data"]["max_length"], spec["steps"] or _UNKNOWN_STEPS
        if told and told.step and told.tokens:
            length = min(length, max(round(told.tokens / told.step / spec["batch_size"]), 1))
        return Job(
            entry.name,
            base_key(spec["base"]),
            entry.submitted_s,
            Load(spec["adapter"]["rank"], spec["batch_size"], length),
            bound=spec.get("max_slowdown", 3.0),
            priority=spec.get("priority", 0),
            user=spec.get("user", ""),
            remaining=float(max((told.num_steps or steps) - told.step, 1) if told else steps),
            can_split=False,
            can_move=entry.state is State.RUNNING and not entry.wish,
        )

    def _worker(self, name: str, seen: _Seen, now_s: float, draining: Collection[str]) -> Worker:
        has_jobs = any(entry.place == name for entry in self.jobs.values())
        seen.idle_since_s = None if has_jobs else (seen.idle_since_s or now_s)
        group = self.groups.get(seen.report.group)
        return Worker(
            name,
            seen.report.node,
            group.base if group else "",
            is_leaving=any(node in draining for node, _ in _processes(seen.report)),
            group=seen.report.group,
            idle_since_s=seen.idle_since_s,
        )

    def take_places(self, plan: Plan, now_s: float) -> None:
        """Write down a plan's places and moves; workers learn of them when they next ask. A job that is to be elsewhere
        leaves first, saved, and is placed once it waits."""
        places = {name: worker for name, (worker, *_) in plan.places.items() if not self.jobs[name].place}
        changes = [
            Change(name, state=State.ATTACHING, place=worker, attempt=self.jobs[name].attempt + 1, reason="")
            for name, worker in places.items()
        ]
        leaving = [*plan.moves, *(name for name in plan.places if name not in places)]
        changes += [
            Change(name, wish="moved") for name in leaving if self.jobs[name].place and not self.jobs[name].wish
        ]
        self._change(changes, now_s)
        self._shares = {name: round(share) or 1 for name, share in plan.shares.items()}
        for name, seen in self.workers.items():
            seen.budget = plan.budgets.get(name, 0)
        waits = {**self.waits, **plan.reasons}
        self.waits = {
            name: reason
            for name, reason in waits.items()
            if name in self.jobs and name not in places and self.jobs[name].state is State.QUEUED
        }
        for name, worker in places.items():
            log.info("job=%s placed on worker %s: %s", name, worker[:8], plan.reasons[name])
        for name in leaving:
            log.info("job=%s leaves its worker: %s", name, plan.reasons.get(name, "its node is drained"))

    def dismiss(self, worker: str) -> Report:
        """A worker without jobs is to end; returns its last report."""
        self._dismissed.add(worker)
        return self.workers.pop(worker).report

    def let_go_of_all(self, now_s: float) -> None:
        """Every job is to leave its worker, and to wait for another."""
        self._change(
            [Change(entry.name, wish="moved") for entry in self.jobs.values() if entry.place and not entry.wish], now_s
        )

    def forget_group(self, name: str, now_s: float) -> None:
        """Its workers are gone with it, and jobs that they still had wait again."""
        self.groups.pop(name, None)
        busy = {entry.place for entry in self.jobs.values()}
        for worker in [worker for worker, seen in self.workers.items() if seen.report.group == name]:
            if worker in busy:
                self._lose(worker, "its group has ended", now_s)
            else:
                del self.workers[worker]

    # --- what users see

    def status(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """One mapping a job, in order of submission: ready for JSON."""
        wanted = None if names is None else [self.entry(name).name for name in names]
        return [self._row(self.jobs[name]) for name in (self.jobs if wanted is None else wanted)]

    def describe_workers(self) -> list[dict[str, Any]]:
        """One mapping a worker that has been heard of."""
        return [
            {
                "group": seen.report.group,
                "worker": name[:8],
                "rank": seen.report.rank,
                "node": seen.report.node,
                "pid": seen.report.pid,
                "pids": [pid for _, pid in _processes(seen.report)],
                "base_loads": seen.report.base_loads,
                "jobs": sorted(seen.report.jobs),
                "ticks": seen.report.ticks,
                "tick_s": seen.report.tick_s,
                "busy_s": seen.report.busy_s,
                "lost": self.losses[seen.report.group],
            }
            for name, seen in self.workers.items()
        ]

    def _row(self, entry: Entry) -> dict[str, Any]:
        told = self.progress.get(entry.name)
        seen = self.workers.get(entry.place)
        return {
            "name": entry.name,
            "state": entry.state.value,
            "reason": (self.waits.get(entry.name) if entry.state is State.QUEUED else None) or entry.reason,
            "group": seen.report.group if seen else "",
            "worker": entry.place[:8],
            "attempt": entry.attempt,
            "share": entry.spec["share"],
            "step": told.step if told else 0,
            "num_steps": told.num_steps if told else 0,
            "lanes": list(told.lanes) if told and entry.place else [],
            "loss": told.loss if told else None,
            "eval_loss": told.eval_loss if told else None,
            "tokens": told.tokens if told else 0,
            "tokens_per_s": told.tokens_per_s if told and entry.place else 0.0,
            "output": entry.spec["output"],
            "submitted_s": entry.submitted_s,
            "changed_s": entry.changed_s,
        }


def _processes(report: Report) -> list[tuple[str, int]]:
    """Nodes and process ids of a worker, or of all of its unit."""
    return [(report.node, report.pid), *report.others]


def _nested(spec: JobSpec, taken: Mapping[str, str]) -> str | None:
    """The job whose output is, holds or lies in this one's."""
    mine = Path(os.path.normpath(spec.output))
    for output, name in taken.items():
        other = Path(os.path.normpath(output))
        if name != spec.name and (mine == other or mine in other.parents or other in mine.parents):
            return name
    return None


def base_key(base: Mapping[str, Any]) -> str:
    """One text for bases that may share a super-model."""
    return json.dumps(base, sort_keys=True)

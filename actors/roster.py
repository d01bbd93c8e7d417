"""Who is where, and who is to be where: all jobs, workers and groups, and what follows from a report. No Ray, no torch.

Owned by the scheduler actor, which feeds it calls, reports and the time, and carries out what its plans ask of groups.
Every transition is in the journal before anyone acts on it.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora.actors import rows
from tlora.actors.entries import Change, Entry
from tlora.actors.folders import Folders, outside
from tlora.actors.journal import EMPTY, Journal
from tlora.actors.messages import JobReport, Order, Orders, Report
from tlora.actors.records import GroupRecord, Seen
from tlora.actors.register import Foretold
from tlora.actors.view import View
from tlora.capacity import Capacity, Learner, Tick
from tlora.cluster import ClusterSpec
from tlora.errors import StateError
from tlora.job import State
from tlora.plan import Plan as BasePlan
from tlora.scheduling import Plan, schedule
from tlora.spec import JobSpec, differences, parse_job

log = logging.getLogger("tlora")
BY_USER = "paused by its user"
_PAUSE_S = 3.0
_WARM_TICKS = 8
_CRASHES = 3
"""Workers that a job may have died with it as it was taken in, one after the other; the last one by itself."""


class Roster:
    """The truth of one cluster."""

    def __init__(self, spec: ClusterSpec, journal: Journal, now_s: float):
        self.spec, self.journal = spec, journal
        self.jobs: dict[str, Entry] = {}
        self.progress: dict[str, JobReport] = {}
        self.waits: dict[str, str] = {}
        """Why a job has no place."""
        self.groups: dict[str, GroupRecord] = {}
        self.troubles: dict[str, str] = {}
        """Why a base's group did not start, the last time."""
        self.workers: dict[str, Seen] = {}
        self.learners: dict[str, Learner] = {}
        """What is known of each base's ticks."""
        self.plans: dict[str, BasePlan] = {}
        """Of bases for which a worker has found that it has no room by itself."""
        self.foretold: Mapping[str, Foretold] = {}
        """Of candidates of sweeps."""
        self.room: Sequence[int] | None = None
        """Workers for which each machine has room, if all are there for them; None: not known."""
        self._profiled = Capacity.load(Path(spec.profile).expanduser()).models if spec.profile else {}
        self._shares: dict[str, float] = {}
        """Of each tick, by job, as planned."""
        self._weights: dict[str, float] = {}
        """Of all jobs that stay on a worker, summed, by worker; only where nothing has changed since it was asked."""
        self.counts: Counter[State] = Counter()
        """Jobs by state."""
        self._at: dict[str, dict[str, None]] = {}
        """Jobs by the worker that they are on."""
        self._busy: Counter[str] = Counter()
        """Jobs that are on a worker, by base."""
        self._bases: dict[str, str] = {}
        """Base by job."""
        self._seats: dict[tuple[str, int], str] = {}
        """Worker by group and rank."""
        self._folders = Folders()
        self._view = View(self)
        self._dismissed: set[str] = set()
        """Workers that are to end: what they say does not count."""
        self._began_s = self._looked_s = now_s
        self._most: Counter[tuple[str, str]] = Counter()
        """Steps and tokens that each job has ever reached."""
        self.lost_workers: Counter[str] = Counter()
        """Workers that were lost, by group."""
        self.gains: Counter[tuple[str, ...]] = Counter()
        """What metrics are still to count: what, group, job. Steps and tokens that were repeated count once."""
        for entry in journal.entries():
            self._put(entry)
            self.gains["restarts", "", entry.name] += entry.restarts
            if entry.numbers:
                self._count(entry.name, JobReport(entry.attempt, entry.state, **entry.numbers), "")

    # --- what users ask for

    def submit(self, specs: Sequence[JobSpec], now_s: float, halts: Mapping[str, dict[str, Any]] = EMPTY) -> list[str]:
        """Take jobs in, all or none, those in `halts` as far as it says; returns the names of those that are new. The
        same job again is the same job; other content under its name raises StateError, which names what differs."""
        new, faults = [], []
        together = Folders()
        for spec in map(self._placed, specs):
            if other := self._folders.clash(spec.name, spec.output) or together.clash(spec.name, spec.output):
                faults.append(f"job {spec.name}: output {spec.output} lies in that of job {other}, or holds it.")
            together.add(spec.name, spec.output)
            if why := outside(self.spec.output_root, spec.folder):
                faults.append(f"job {spec.name}: {why}")
            known = self.jobs.get(spec.name)
            if known is None:
                new.append((spec.name, spec.model_dump(mode="json")))
            elif changed := differences(parse_job(known.spec), spec):
                faults.append(
                    f"job {spec.name} was submitted with other content: {'; '.join(changed)}. Choose another name."
                )
        if faults:
            raise StateError("\n".join(faults))
        for entry in self.journal.add(new, now_s, halts) if new else ():
            self._put(entry)
            log.info("job=%s submitted: %d job(s) are queued", entry.name, self.counts[State.QUEUED])
        return [name for name, _ in new]

    def refuse_sweep(self, name: str, folder: Path) -> None:
        """Raise StateError if a sweep cannot have this name, or write there."""
        if name in self.jobs:
            raise StateError(f"sweep {name}: a job has this name. Choose another.")
        if why := outside(self.spec.output_root, folder):
            raise StateError(f"sweep {name}: {why}")

    def _placed(self, spec: JobSpec) -> JobSpec:
        """With its output below the cluster's folder of outputs, if it does not say where."""
        if spec.folder.is_absolute():
            return spec
        return spec.model_copy(update={"output": str(self.spec.output_root / spec.output)})

    def pause(self, names: Sequence[str], now_s: float, reason: str = BY_USER) -> None:
        """Save jobs and take them off their workers. Those that have ended raise StateError, and nothing is changed."""
        self._wish(names, State.PAUSED, now_s, reason)

    def cancel(self, names: Sequence[str], now_s: float, *, keep: bool = False) -> None:
        """End jobs; with `keep`, their exact state is saved first. Cancelled ones stay so."""
        open_ones = [name for name in names if self.entry(name).state is not State.CANCELLED]
        self._wish(open_ones, State.CANCELLED, now_s, "cancelled by its user", keep=keep)

    def resume(self, names: Sequence[str], now_s: float, halts: Mapping[str, dict[str, Any]] = EMPTY) -> None:
        """Queue again, from their last saves, jobs that are paused, cancelled or failed, those in `halts` as far as it
        says; one that was to be paused, or by its user to be cancelled, goes on. Others that have not ended stay as
        they are."""
        changes = []
        for name in names:
            entry = self.entry(name)
            if entry.state is State.FINISHED:
                raise StateError(f"job {name} is finished: nothing of it is left to do.")
            halt = halts.get(name)
            if halt is None and entry.state.is_terminal:  # its sweep has counted it out
                halt = {}
            if entry.state is State.PAUSED or entry.state.is_terminal:
                rested_s = now_s - entry.changed_s if name not in halts or entry.halt else 0.0  # else it was at a rung
                again = Change(name, state=State.QUEUED, reason="", place="", wish="", halt=halt)
                changes.append(replace(again, rested_s=entry.rested_s + rested_s))
            elif entry.wish == State.PAUSED or (name not in halts and entry.wish in (State.CANCELLED, "dropped")):
                changes.append(Change(name, wish="", reason="", halt=halt))
            elif halt:
                changes.append(Change(name, halt=halt))
        why = "its sweep lets it go on" if halts else "resumed by its user"
        self._change(changes, now_s, dict.fromkeys(names, why))

    def train(self, spec: JobSpec, halt: dict[str, Any], now_s: float) -> None:
        """A sweep's candidate is to go on as far as `halt` says, from wherever it is; one that has ended stays so, and
        one that its user has paused until that user lets it go on."""
        self.submit([spec], now_s, {spec.name: halt})
        entry = self.entry(spec.name)
        if entry.reason == BY_USER:
            self._change([Change(spec.name, halt=halt)], now_s)
        elif not entry.state.is_terminal:
            self.resume([spec.name], now_s, {spec.name: halt})

    def explain(self, name: str, reason: str, now_s: float) -> None:
        """Why a job that is paused stays so."""
        if self.entry(name).state is State.PAUSED:
            self._change([Change(name, reason=reason)], now_s)

    def _wish(self, names: Sequence[str], state: State, now_s: float, reason: str, *, keep: bool = True) -> None:
        changes = []
        for name in names:
            entry = self.entry(name)
            if entry.state.is_terminal:
                raise StateError(f"job {name} is {entry.state}: it cannot become {state}.")
            if state is State.PAUSED and entry.wish in (State.CANCELLED, "dropped"):
                raise StateError(f"job {name} is being cancelled: it cannot become {state}.")
            is_users = State.PAUSED in (entry.state, entry.wish) and entry.reason == BY_USER
            if state is State.PAUSED and is_users:
                continue  # until that user says otherwise
            if entry.place:
                changes.append(Change(name, wish=state.value if keep else "dropped", reason=reason))
            elif entry.state is not state or reason == BY_USER:
                changes.append(Change(name, state=None if entry.state is state else state, reason=reason))
        self._change(changes, now_s)

    def entry(self, name: str) -> Entry:
        """What is known of a job. Raises StateError if nothing is."""
        if name not in self.jobs:
            raise StateError(f"job {name} is not known here. `tlora status` lists those that are.")
        return self.jobs[name]

    def _change(self, changes: Sequence[Change], now_s: float, reasons: Mapping[str, str] | None = None) -> None:
        """Write changes down, with the numbers of jobs that leave their places; `reasons`: where the journal's own do
        not say why."""
        told = [
            replace(change, numbers=self.progress[change.name].numbers)
            if change.place == "" and change.name in self.progress
            else change
            for change in changes
        ]
        for entry in self.journal.change(told, now_s) if told else ():
            before = self.jobs[entry.name]
            self._put(entry)
            if (entry.state, entry.wish) != (before.state, before.wish):
                self._log(entry, before.place, (reasons or {}).get(entry.name, entry.reason))

    def _log(self, entry: Entry, place: str, reason: str) -> None:
        """What has become of a job, or is to: where, why, and how far it has come."""
        seen, told = self.workers.get(entry.place or place), self.progress.get(entry.name)
        log.info(
            "job=%s group=%s %s%s%s: worker=%s attempt=%d step=%d/%d", entry.name, seen.report.group if seen else "-",
            entry.state, f", is to be {entry.wish}" * bool(entry.wish), f", {reason}" * bool(reason),
            (entry.place or place)[:8] or "-", entry.attempt, told.step if told else 0, told.num_steps if told else 0,
        )  # fmt: skip

    def _put(self, entry: Entry) -> None:
        """A job as it now is, in every index."""
        name, before = entry.name, self.jobs.get(entry.name)
        self.jobs[name] = entry
        self._view.touch(name)
        if before is None:
            self._folders.add(name, entry.spec["output"])
            self._bases[name] = base = base_key(entry.spec["base"])
            if base not in self.learners:
                self.learners[base] = Learner(self._profiled.get(entry.spec["base"]["model"]))
        if before is not None:
            self.counts[before.state] -= 1
        self.counts[entry.state] += 1
        old = before.place if before else ""
        for place in (old, entry.place):
            self._weights.pop(place, None)
        if old == entry.place:
            return
        self._busy[self._bases[name]] += bool(entry.place) - bool(old)
        if old:
            del self._at[old][name]
            if not self._at[old]:
                del self._at[old]
        if entry.place:
            self._at.setdefault(entry.place, {})[name] = None
        else:
            self._shares.pop(name, None)

    def jobs_at(self, worker: str) -> Collection[str]:
        """Those that are on a worker, or are to be."""
        return self._at.get(worker, ())

    def placed(self) -> list[str]:
        """Jobs that are on workers, or are to be."""
        return [name for names in self._at.values() for name in names]

    def is_busy(self, base: str) -> bool:
        """Whether a job of that base is on a worker."""
        return self._busy[base] > 0

    def base_of(self, entry: Entry) -> str:
        """One text for bases that may share a super-model."""
        return self._bases[entry.name]

    # --- what workers say

    def exchange(self, report: Report, now_s: float) -> Orders:
        """Take a worker's report; returns what it is to have."""
        if report.worker in self._dismissed:
            return Orders(1 + report.heard, stop=True)
        before = self._seats.get((report.group, report.rank), report.worker)
        if before != report.worker and before in self.workers:
            self._lose(before, "its worker was replaced", now_s)
        self._seats[report.group, report.rank] = report.worker
        seen = self.workers.setdefault(report.worker, Seen(report, now_s))
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
        learner = self.learners.get(group.base) if group else None
        if learner is None or report.ticks <= max(before.ticks, _WARM_TICKS) or not report.tick_tokens:
            return
        learner.learn(Tick(report.tick_tokens, report.tick_jobs, report.tick_ranks, report.tick_s, report.peak_bytes))

    def _take(self, report: Report, now_s: float) -> None:
        """What a report says of jobs, and what has been let go of."""
        changes = []
        seen = self.workers[report.worker]
        for name in self.jobs_at(report.worker):
            entry, told = self.jobs[name], report.jobs.get(name)
            if told is not None and told.attempt == entry.attempt:
                self._count(name, told, report.group)
                self._view.progress(entry, told, now_s)
                if told.state.is_terminal:
                    changes.append(Change(name, state=told.state, reason=told.reason, place="", wish=""))
                elif told.state is State.PAUSED:  # it halts, as its sweep wished; a wish of its user's goes before that
                    halts = Change(name, state=State.PAUSED, reason=told.reason, place="", wish="", halt={})
                    changes.append(halts if entry.wish in ("", "moved") else self._let_go(entry))
                elif told.state is State.RUNNING and entry.state is State.ATTACHING:
                    changes.append(Change(name, state=State.RUNNING, crashes=0))
            elif entry.wish and seen.orders and name not in seen.orders.jobs and report.applied >= seen.orders.number:
                changes.append(self._let_go(entry))
        self._change(changes, now_s)

    def _count(self, name: str, told: JobReport, group: str) -> None:
        self.progress[name] = told
        for what, reached in (("steps", told.step), ("tokens", told.tokens)):
            if (gain := reached - self._most[what, name]) > 0:
                self._most[what, name] = reached
                self.gains[what, group, name] += gain

    @staticmethod
    def _let_go(entry: Entry) -> Change:
        """A job that its worker no longer has, as was wished."""
        state = {"paused": State.PAUSED, "moved": State.QUEUED}.get(entry.wish, State.CANCELLED)
        return Change(entry.name, state=state, place="", wish="")

    def _orders(self, seen: Seen) -> Orders:
        mine = [self.jobs[name] for name in self.jobs_at(seen.report.worker)]
        jobs = {entry.name: Order(entry.spec, entry.attempt, entry.halt) for entry in mine if not entry.wish}
        suspects = [entry.name for entry in mine if entry.crashes >= _CRASHES - 1 and entry.state is State.ATTACHING]
        for name in suspects[1:]:  # each once it is seen that the one before is not the cause
            jobs.pop(name, None)
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
            for place in self._at.keys() - self.workers.keys():
                self._lose(place, "its worker did not come back", now_s)

    def _lose(self, worker: str, reason: str, now_s: float, *, has_died: bool = True) -> None:
        seen = self.workers.get(worker)
        group = seen.report.group if seen else ""
        told = seen.orders.jobs if seen and seen.orders and seen.report.base_loads and has_died else {}
        changes = [self._lost(self.jobs[name], reason, is_suspect=name in told) for name in self.jobs_at(worker)]
        log.warning("group=%s worker=%s is lost with %d job(s): %s", group or "-", worker[:8], len(changes), reason)
        self._change(changes, now_s)
        self.gains.update(("restarts", group, change.name) for change in changes if change.restarts)
        if self.workers.pop(worker, None):
            self.lost_workers[group] += 1
            self.gains["lost_workers", group] += 1

    def _lost(self, entry: Entry, reason: str, *, is_suspect: bool) -> Change:
        """What becomes of a job whose worker is lost; `is_suspect`: it may be the cause, if it was being taken in."""
        if entry.wish not in ("", "moved"):
            return self._let_go(entry)
        crashes = entry.crashes + (is_suspect and entry.state is State.ATTACHING)
        if crashes == _CRASHES:  # which stays one less: when it is resumed, it has one more try
            why = f"its worker died {crashes} times as it was taken in; `tlora resume {entry.name}` tries again"
            return Change(entry.name, state=State.FAILED, place="", wish="", reason=why)
        again, restarts = f"{reason}: goes on from its last save", entry.restarts + 1
        return Change(entry.name, State.QUEUED, again, place="", wish="", restarts=restarts, crashes=crashes)

    # --- what the plan says

    def plan_of(self, base: str) -> BasePlan:
        """How a new group's units are to hold a base."""
        return self.plans.get(base, BasePlan()) if self.spec.plan == "auto" else self.spec.plan.plan

    def most_units(self, base: str) -> float:
        """Of a base, on the machines that are here."""
        plan = self.plan_of(base)
        return math.inf if self.room is None else sum(each // plan.tensor for each in self.room) // plan.lanes

    def misfits(self) -> dict[str, str]:
        """Groups whose plan is not their base's any more, each with the reason."""
        return {
            name: f"its base takes {plan.ranks} workers: {plan}"
            for name, group in self.groups.items()
            if (plan := self.plan_of(group.base)) != group.plan
        }

    def plan(self, now_s: float, draining: Collection[str] = ()) -> Plan:
        """What is to change now, places and moves taken down; `draining`: nodes that are about to go."""
        try:
            arrivals = self._view.arrivals(draining)
            self._change(arrivals, now_s, dict.fromkeys([each.name for each in arrivals], "comes as planned"))
            plan = schedule(self._view.state(now_s, draining), now_s)
            self.take_places(plan, now_s)
        except Exception:
            self._view.forget()
            raise
        return plan

    def renew(self, lock: AbstractContextManager[object], now_s: float, draining: Collection[str] = ()) -> None:
        """Before a plan, without the lock: what one would do with it where ticks have become known."""
        self._view.renew(lock, now_s, draining)

    def forget_shares(self) -> None:
        """Workers deal their ticks evenly, until they are told otherwise."""
        self._shares.clear()
        self._weights.clear()
        for seen in self.workers.values():
            seen.budget = 0

    def take_places(self, plan: Plan, now_s: float) -> None:
        """Write down a plan's places and moves; workers learn of them when they next ask. A job that is to be elsewhere
        leaves first, saved, and is placed once it waits."""
        places = {name: worker for name, (worker, *_) in plan.places.items() if not self.jobs[name].place}
        changes = [
            Change(name, state=State.ATTACHING, place=worker, attempt=self.jobs[name].attempt + 1, reason="")
            for name, worker in places.items()
        ]
        leaving = [*plan.moves, *(name for name in plan.places if name not in places)]
        self._view.send({name: plan.places.get(name, ("",))[0] for name in leaving})
        changes += [
            Change(name, wish="moved") for name in leaving if self.jobs[name].place and not self.jobs[name].wish
        ]
        self._change(changes, now_s, plan.reasons)
        self._shares.update((name, round(share) or 1) for name, share in plan.shares.items())
        self._weights.clear()
        for name, budget in plan.budgets.items():
            self.workers[name].budget = budget
        waits = {**self.waits, **plan.reasons}
        self.waits = {
            name: reason
            for name, reason in waits.items()
            if name in self.jobs and name not in places and self.jobs[name].state is State.QUEUED
        }

    def dismiss(self, worker: str) -> Report:
        """A worker without jobs is to end; returns its last report."""
        self._dismissed.add(worker)
        return self.workers.pop(worker).report

    def let_go_of_all(self, now_s: float) -> None:
        """Every job is to leave its worker, and to wait for another."""
        self._change([Change(name, wish="moved") for name in self.placed() if not self.jobs[name].wish], now_s)

    def forget_group(self, name: str, now_s: float, reason: str = "its group has ended") -> None:
        """Its workers are gone with it, and jobs that they still had wait again."""
        self.groups.pop(name, None)
        for worker in [worker for worker, seen in self.workers.items() if seen.report.group == name]:
            if self.jobs_at(worker):
                self._lose(worker, reason, now_s, has_died=False)
            else:
                del self.workers[worker]

    # --- what users see

    def share(self, name: str) -> float:
        """Part of its worker's ticks that is planned for a job; 0: it is on none, or to leave it."""
        entry = self.jobs[name]
        if entry.wish or not entry.place:
            return 0.0
        if entry.place not in self._weights:
            mates = (each for each in self.jobs_at(entry.place) if not self.jobs[each].wish)
            self._weights[entry.place] = sum(map(self._weight, mates))
        return self._weight(name) / self._weights[entry.place]

    def _weight(self, name: str) -> float:
        return float(self.jobs[name].spec["share"] * self._shares.get(name, 1.0))

    def status(self, names: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """One mapping a job, in order of submission: ready for JSON."""
        wanted = None if names is None else [self.entry(name).name for name in names]
        return [rows.of_job(self, self.jobs[name]) for name in (list(self.jobs) if wanted is None else wanted)]

    def describe_workers(self) -> list[dict[str, Any]]:
        """One mapping a worker that has been heard of."""
        return rows.of_workers(self)


def base_key(base: Mapping[str, Any]) -> str:
    """One text for bases that may share a super-model."""
    return json.dumps(base, sort_keys=True)

"""What plans are made by, over arbitrary events: the state that is kept is the one that would be made anew."""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import made_up
import numpy as np
import pytest
from desk import FakeWorker, RosterDesk, spec_of

from tlora.actors.messages import JobReport
from tlora.actors.records import GroupRecord
from tlora.actors.roster import base_key
from tlora.actors.view import View
from tlora.capacity import Capacity, Learner
from tlora.errors import StateError
from tlora.job import State
from tlora.plan import Plan
from tlora.scheduling import ClusterState

MODEL = Capacity.of(made_up.content()).models["left"]
BASE = base_key(spec_of("x").model_dump(mode="json")["base"])
WEIGHTS = {
    "submit": 4, "plan": 6, "say": 12, "end": 2, "tell": 2, "come": 1, "pass": 1, "pause": 1, "resume": 2, "cancel": 1,
    "replace": 1, "drain": 0.5, "forget-group": 1,
}  # fmt: skip
"""How likely each event is."""


class Play:
    """Events on a roster."""

    def __init__(self, folder: Path, *, is_measured: bool):
        self.desk, self.num_jobs, self.drained = RosterDesk(folder), 0, set[str]()
        self.desk.submit()
        self.workers: list[FakeWorker] = []
        self.is_measured = is_measured
        if is_measured:
            self.desk.roster.learners[BASE] = Learner(MODEL)
        self.event("come", 0)

    def event(self, kind: str, value: int) -> None:
        desk, roster = self.desk, self.desk.roster
        names = list(roster.jobs)
        name = names[value % len(names)] if names else ""
        if kind == "submit":
            self.num_jobs += 1
            lengths = {"max_length": (512, 2048)[value % 2]}
            spec = spec_of(f"j{self.num_jobs}", batch_size=1 + value % 8, data={"path": "d", **lengths})
            roster.submit([spec], desk.now_s)
        elif kind == "plan":
            roster.plan(desk.now_s, self.drained)
        elif kind == "come":
            self.workers.append(FakeWorker(desk, f"w{len(self.workers)}", rank=len(self.workers)))
            self.workers[-1].say()
        elif kind == "pass":
            desk.wait(value / 10.0)
        elif kind == "drain":
            self.drained ^= {"node"}
        elif kind == "replace":
            rank = value % len(self.workers)
            self.workers[rank] = FakeWorker(desk, f"again{desk.now_s}-{value}", rank)
            self.workers[rank].say()
        elif kind == "forget-group":
            roster.forget_group("g", desk.now_s)
            roster.groups["g"] = GroupRecord("g", BASE, 2, None)
        elif kind in ("pause", "resume", "cancel") and name:
            with suppress(StateError):  # it has ended
                getattr(roster, kind)([name], desk.now_s)
        elif kind in ("say", "end", "tell"):
            self.say(kind, self.workers[value % len(self.workers)])

    def say(self, kind: str, worker: FakeWorker) -> None:
        told: dict[str, Any] = {}
        for name, order in list(worker.orders.jobs.items())[:1]:
            state = State.FINISHED if kind == "end" else State.RUNNING
            tokens = 300 if kind == "tell" else 0
            told[name] = JobReport(order.attempt, state, step=3, num_steps=1000, tokens=tokens)
        orders = worker.say(**told)
        assert orders.shares.keys() == (orders.jobs.keys() if self.is_measured else set())  # all of a worker's, or none


def facts(state: ClusterState) -> list[object]:
    jobs = {
        name: (job.base, [worker.name for worker in job.workers], job.can_move, job.load.rank, job.load.batch)
        for name, job in state.jobs.items()
    }
    waiting = {name for pool in state.pools.values() for name in pool.waiting.keys}
    waiting |= {name for held in state.by_quota.values() for name in held}
    workers = {
        name: (worker.base, worker.is_leaving, worker.group, worker.idle_since_s, sorted(worker.jobs), worker.wanted)
        for name, worker in state.workers.items()
    }
    running = {name for pool in state.pools.values() for name in pool.running.keys}
    used = {user: count for user, count in state.used.items() if count}
    return [dict(sorted(jobs.items())), waiting, running, dict(sorted(workers.items())), state.num_idle, used]


def play(events: Sequence[tuple[str, int]], *, is_measured: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        play = Play(Path(folder), is_measured=is_measured)
        for kind, value in events:
            play.event(kind, value)
        desk, view = play.desk, play.desk.roster._view
        kept = facts(view.state(desk.now_s, play.drained))
        view.forget()
        assert kept == facts(view.state(desk.now_s, play.drained))
        desk.journal.close()


@pytest.mark.parametrize("seed", range(30))
def test_the_state_that_is_kept_is_the_one_that_would_be_made_anew(seed: int) -> None:
    random = np.random.default_rng(seed)
    chances = np.array(list(WEIGHTS.values())) / sum(WEIGHTS.values())
    kinds = random.choice(list(WEIGHTS), 60, p=chances)
    play([(str(kind), int(random.integers(100))) for kind in kinds], is_measured=seed % 3 > 0)


class Busy:
    """A lock; whenever it is free, and before each job is looked at, something happens to the roster."""

    def __init__(self, play: Play, events: Sequence[tuple[str, int]]):
        self.play, self.events, self.num_happened = play, list(events), 0

    def happen(self) -> None:
        if self.events:
            self.play.event(*self.events.pop(0))
            self.num_happened += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.happen()


@pytest.mark.parametrize("seed", range(20))
def test_a_state_made_anew_beside_changes_is_the_one_that_would_be_made_at_once(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    kinds = [kind for kind in WEIGHTS if kind != "plan"]  # by the thread that makes it
    chances = np.array([WEIGHTS[kind] for kind in kinds]) / sum(WEIGHTS[kind] for kind in kinds)
    events = [(str(kind), int(random.integers(100))) for kind in random.choice(kinds, 60, p=chances)]
    play = Play(tmp_path, is_measured=False)
    for event in [*events[:30], ("plan", 0)]:
        play.event(*event)
    desk, view, busy = play.desk, play.desk.roster._view, Busy(play, events[30:])
    before = view.state(desk.now_s, play.drained)
    desk.roster.learners[BASE] = Learner(MODEL)
    put_right = View._put_right
    with monkeypatch.context() as patch:
        patch.setattr(View, "_put_right", lambda self, *rest: (busy.happen(), put_right(self, *rest)))
        desk.roster.renew(busy, desk.now_s, play.drained)
    assert busy.num_happened > 2, "not only where the lock is free"
    kept = view.state(desk.now_s, play.drained)
    assert kept is not before
    kept_facts = facts(kept)
    view.forget()
    assert kept_facts == facts(view.state(desk.now_s, play.drained))
    desk.journal.close()


def test_nothing_is_made_anew_without_need(tmp_path: Path) -> None:
    play = Play(tmp_path, is_measured=True)
    play.event("plan", 0)
    before = play.desk.roster._view.state(play.desk.now_s)
    play.desk.roster.renew(Busy(play, []), play.desk.now_s)
    assert play.desk.roster._view.state(play.desk.now_s) is before
    play.desk.journal.close()


@pytest.mark.parametrize("part", ["touch", "_lose"])
def test_a_change_that_is_not_told_is_found(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    monkeypatch.setattr(View, part, lambda self, *rest: None)
    events = [("submit", 0), ("plan", 0), ("say", 0), ("say", 0), ("plan", 0), ("replace", 0), ("submit", 1)]
    with pytest.raises((AssertionError, KeyError)):
        play(events, is_measured=True)


LONG = {"steps": 100_000, "batch_size": 8, "data": {"path": "d", "max_length": 2048}}
SMALL = {"steps": 100_000, "batch_size": 1, "data": {"path": "d", "max_length": 64}}


class Pair:
    """Two jobs of a base that turns out to be known, and two workers of its group."""

    def __init__(self, folder: Path, *, are_together: bool, **changes: Any):
        self.desk = desk = RosterDesk(folder)
        desk.roster.spec = desk.spec.model_copy(update={"max_workers": 2})
        desk.submit()
        desk.roster.submit([spec_of(name, **changes) for name in "ab"], desk.now_s)
        self.one, self.other = FakeWorker(desk, "w"), FakeWorker(desk, "v", rank=1)
        if not are_together:
            self.other.say()
        self.one.say()
        desk.plan()
        self.other.say()
        self.say()
        desk.roster.learners[BASE] = Learner(MODEL)

    def say(self) -> None:
        """What they have; then that they have done what they were told."""
        for worker in (self.one, self.other) * 2:
            worker.say()

    def places(self) -> dict[str, str]:
        return {name: entry.place for name, entry in self.desk.roster.jobs.items()}

    def leaving(self) -> list[str]:
        return [name for name, entry in self.desk.roster.jobs.items() if entry.wish == "moved"]


def test_one_job_leaves_a_crowded_worker_and_goes_where_it_was_to(tmp_path: Path) -> None:
    """For the plans that are made meanwhile it is there."""
    pair = Pair(tmp_path, are_together=True, **LONG)
    assert set(pair.places().values()) == {"w"}
    for _ in range(3):
        pair.desk.plan()
        (name,) = pair.leaving()
        assert [worker.name for worker in pair.desk.roster._view.state(pair.desk.now_s).jobs[name].workers] == ["v"]
    pair.say()
    assert pair.places()[name] == ""
    pair.desk.plan()
    assert pair.places()[name] == "v"
    pair.say()
    assert pair.desk.states() == {"a": "running", "b": "running"}
    pair.desk.journal.close()


@pytest.mark.parametrize("meanwhile", ["its user pauses it", "the other worker is lost", "the other worker leaves"])
def test_what_happens_on_the_way_goes_before_where_a_job_was_to(tmp_path: Path, meanwhile: str) -> None:
    pair = Pair(tmp_path, are_together=True, **LONG)
    pair.desk.plan()
    (name,) = pair.leaving()
    draining: set[str] = set()
    if meanwhile == "its user pauses it":
        pair.desk.roster.pause([name], pair.desk.now_s)
    elif meanwhile == "the other worker is lost":
        pair.desk.roster._lose("v", "gone", pair.desk.now_s)
    else:
        pair.other.report = replace(pair.other.report, node="elsewhere")
        pair.other.say()
        draining = {"elsewhere"}
    for _ in range(2):
        pair.one.say()
    pair.desk.roster.plan(pair.desk.now_s, draining)
    assert pair.places()[name] != "v"
    assert pair.desk.states()[name] == ("paused" if meanwhile == "its user pauses it" else "queued")
    pair.desk.journal.close()


def test_a_worker_goes_to_a_base_without_one_whose_job_has_waited_as_long_as_it_may(tmp_path: Path) -> None:
    """One, while jobs of its own base wait for it, and whatever is planned meanwhile, by a state made anew too."""
    pair = Pair(tmp_path, are_together=False, **LONG)
    desk, roster = pair.desk, pair.desk.roster
    roster.submit([spec_of("late", base={"model": "other"}, **SMALL)], desk.now_s - 30 * 86400.0)
    roster.submit([spec_of(f"more{at}", **LONG) for at in range(4)], desk.now_s)
    roster.plan(desk.now_s)
    (gone,) = pair.leaving()
    (left,), places = {"a", "b"} - {gone}, pair.places()
    roster.cancel([left], desk.now_s)
    for _ in range(2):
        (pair.one if places[left] == "w" else pair.other).say()
    started: dict[str, int] = {}
    for _ in range(8):
        roster._view._models = {}  # as if more were known now
        plan = roster.plan(desk.now_s)
        started |= plan.starts
        for base, size in plan.starts.items():
            roster.groups["h"] = GroupRecord("h", base, size, desk.now_s)
        for group, workers in plan.leaves.items():
            roster.groups[group].size = plan.sizes[group]
            for worker in workers:
                assert not roster.jobs_at(worker)
                roster.dismiss(worker)
        pair.say()
    assert started == {base_key(roster.jobs["late"].spec["base"]): 1}
    assert list(roster.workers) == [places[left]]
    assert roster.groups["g"].size == 1
    assert sum(map(bool, pair.places().values())) == 1, "one of those that wait has the worker that stays"
    desk.journal.close()


def late_job(tmp_path: Path) -> tuple[Pair, dict[str, Any]]:
    """Of a base without a worker, submitted long ago, and its spec."""
    pair = Pair(tmp_path, are_together=False, **LONG)
    spec = spec_of("late", base={"model": "other"}, **SMALL)
    pair.desk.roster.submit([spec], pair.desk.now_s - 30 * 86400.0)
    return pair, spec.model_dump(mode="json")["base"]


def test_a_worker_that_leaves_for_the_earliest_is_not_given_back_to_those_that_it_had(tmp_path: Path) -> None:
    """Though they be late themselves, urgent, and faster."""
    pair, base = late_job(tmp_path)
    roster, now_s = pair.desk.roster, pair.desk.now_s
    roster.submit([spec_of(f"m{at}", priority=9, **LONG) for at in range(4)], now_s - 20 * 86400.0)
    starts: list[str] = []
    for _ in range(12):
        plan = roster.plan(now_s)
        starts += plan.starts
        for name, size in plan.sizes.items():
            roster.groups[name].size = size
        for worker in plan.leaves.get("g", ()):
            roster.dismiss(worker)
        for started, size in plan.starts.items():
            roster.groups[f"h{len(starts)}"] = GroupRecord(f"h{len(starts)}", started, size, now_s)
        pair.say()
    assert starts == [base_key(base)]
    assert len(roster.workers) == 1
    pair.desk.journal.close()


def test_no_worker_leaves_for_a_base_that_the_cluster_is_too_small_for(tmp_path: Path) -> None:
    pair, base = late_job(tmp_path)
    pair.desk.roster.plans[base_key(base)] = Plan(shards=4)
    pair.desk.roster.plan(pair.desk.now_s)
    assert not pair.leaving()
    pair.desk.journal.close()


def test_a_worker_leaves_where_there_are_fewer_machines_than_workers_may_be(tmp_path: Path) -> None:
    """The base's own group is started, and waits for a machine for ever. One leaves, and time is given."""
    pair, _ = late_job(tmp_path)
    roster = pair.desk.roster
    roster.spec = roster.spec.model_copy(update={"max_workers": 8})
    roster.room = [2]
    roster._view.forget()
    ((base, size),) = roster.plan(pair.desk.now_s).starts.items()
    roster.groups["h"] = GroupRecord("h", base, size, pair.desk.now_s)
    for _ in range(4):
        plan = roster.plan(pair.desk.now_s)
        assert len(pair.leaving()) <= 1
        for worker in plan.leaves.get("g", ()):
            roster.dismiss(worker)
        roster.groups["g"].size = plan.sizes.get("g", roster.groups["g"].size)
        pair.say()
    assert len(roster.workers) == 1
    pair.desk.journal.close()


def test_a_worker_stays_if_the_job_that_it_was_to_leave_for_is_gone(tmp_path: Path) -> None:
    pair, _ = late_job(tmp_path)
    roster = pair.desk.roster
    roster.plan(pair.desk.now_s)
    assert len(pair.leaving()) == 1
    roster.cancel(["late"], pair.desk.now_s)
    for _ in range(4):
        plan = roster.plan(pair.desk.now_s)
        assert not plan.leaves
        pair.say()
    assert sorted(pair.places()[name] for name in "ab") == ["v", "w"]
    pair.desk.journal.close()


def test_jobs_that_are_being_taken_in_do_not_keep_their_worker(tmp_path: Path) -> None:
    """Where short ones come and go, there is always one."""
    pair, _ = late_job(tmp_path)
    roster = pair.desk.roster
    for name in "ab":
        roster.jobs[name] = replace(roster.jobs[name], state=State.ATTACHING)
        roster._view.touch(name)
    roster.plan(pair.desk.now_s)
    assert len(roster._view._yielding) == 1
    pair.desk.journal.close()


def test_jobs_that_gather_leave_their_worker_to_the_base_that_waits(tmp_path: Path) -> None:
    """It would be theirs again, if they did not go where they were to."""
    pair = Pair(tmp_path, are_together=False, **SMALL)
    assert sorted(pair.places().values()) == ["v", "w"]
    pair.desk.roster.submit([spec_of("r", base={"model": "other"}, **SMALL)], pair.desk.now_s)
    started: dict[str, int] = {}
    for _ in range(10):
        plan = pair.desk.roster.plan(pair.desk.now_s)
        started |= plan.starts
        for group, workers in plan.leaves.items():
            pair.desk.roster.groups[group].size = plan.sizes[group]
            for worker in workers:
                assert not pair.desk.roster.jobs_at(worker)
                pair.desk.roster.dismiss(worker)
        pair.say()
    assert list(started.values()) == [1]
    assert len({place for name, place in pair.places().items() if name != "r"}) == 1
    pair.desk.journal.close()

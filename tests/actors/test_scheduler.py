"""What the scheduler's actor does of itself; what it does with others is in `test_cluster.py`."""

import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from desk import FakeWorker, RosterDesk

from tlora.actors import group, scheduler
from tlora.actors.journal import Journal
from tlora.actors.messages import JobReport
from tlora.actors.records import GroupRecord
from tlora.actors.register import Register
from tlora.actors.roster import Roster
from tlora.actors.scheduler import Scheduler, go_first, mark_outputs
from tlora.job import State


def test_the_scheduler_goes_before_what_trains_on_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[int, int] = {}

    def refuse(which: int, thread: int, niceness: int) -> None:
        assert which == os.PRIO_PROCESS
        told[thread] = niceness
        raise PermissionError

    monkeypatch.setattr(os, "setpriority", refuse)
    started, ended = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (started.set(), ended.wait(10)))
    other.start()
    started.wait(10)
    go_first()
    ended.set()
    other.join()
    assert told.items() >= {threading.get_native_id(): 0, other.native_id: 0}.items()


def test_the_outputs_are_marked_once_and_not_where_their_mount_is_away(tmp_path: Path) -> None:
    """Also by a new scheduler: jobs would begin anew there, and write over their saves once the mount is back."""
    outputs, other = tmp_path / "out", tmp_path / "other"

    def mark(head: str, outputs: Path) -> bool:
        journal = Journal(tmp_path / head / "journal.db", str(tmp_path / "storage"))
        try:
            return mark_outputs(outputs, journal).exists()
        finally:
            journal.close()

    assert mark("head", outputs)
    shutil.rmtree(outputs)
    outputs.mkdir()
    assert not mark("head", outputs)
    assert not mark("next", outputs), "nor by a new head"
    assert mark("next", other), "but where they are to be from now on"
    shutil.rmtree(other)
    assert not mark("next", other)


def test_status_is_asked_for_while_workers_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that leaves its worker, or comes, while the shares there are summed."""
    desk = RosterDesk(tmp_path)
    desk.submit("a", "b")
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.plan()
    worker.say()
    worker.say()
    one = Scheduler.__new__(Scheduler)
    one._lock, one._roster, one._sweeps = threading.RLock(), desk.roster, Register(tmp_path)
    weight, ends = Roster._weight, list[threading.Thread]()

    def end(name: str) -> None:
        with one._lock:
            if desk.roster.entry(name).place:
                worker.say(**{name: JobReport(1, State.FAILED)})

    def slowly(self: Roster, name: str) -> float:
        if not ends:
            ends.append(threading.Thread(target=end, args=("b",)))
            ends[0].start()
            ends[0].join(0.2)
        return weight(self, name)

    monkeypatch.setattr(Roster, "_weight", slowly)
    assert [row["state"] for row in one.status(["a"])] == ["running"]
    ends[0].join()
    assert [row["state"] for row in one.status()] == ["running", "failed"]
    desk.journal.close()


class _Round(Scheduler):
    """One that has adopted what was there, without an actor; its groups' controllers are the test's."""

    def __init__(self, desk: RosterDesk, monkeypatch: pytest.MonkeyPatch):
        self._spec, self._roster, self._lock = desk.spec, desk.roster, threading.RLock()
        self._sweeps: Any = SimpleNamespace(ahead=dict, names=list, is_open=bool)
        self._starting, self._not_before_s, self._untold = set(), {}, {}
        self._unadopted, self._is_closed = set(), False
        self._metrics: Any = SimpleNamespace(publish=lambda *given: None)
        self._published_s = self._flushed_s = self._asked_s = self._foretold_s = 0.0
        self._swept_s = self._submitted_s = time.monotonic()
        monkeypatch.setattr(group, "draining_nodes", frozenset)
        monkeypatch.setattr(scheduler.ray, "nodes", list)


def test_a_lost_worker_is_noticed_while_rounds_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that wait for machines answer late; on the scale of this test, each round takes longer than what counts
    as a scheduler that slept."""
    desk = RosterDesk(tmp_path)
    desk.spec = desk.roster.spec = desk.spec.model_copy(update={"lost_after_s": 1.0})
    desk.now_s = desk.roster._looked_s = desk.roster._began_s = time.time()
    desk.submit("a")
    worker = FakeWorker(desk, "w")
    worker.say()
    monkeypatch.setattr("tlora.actors.roster._PAUSE_S", 0.3)
    one = _Round(desk, monkeypatch)
    monkeypatch.setattr(one, "_start", lambda *given: None)
    monkeypatch.setattr(group, "draining_nodes", lambda: time.sleep(0.5) or frozenset())
    one._begin()
    deadline_s = time.monotonic() + 6
    while desk.roster.workers and time.monotonic() < deadline_s:
        time.sleep(0.1)
    one._is_closed = True
    assert not desk.roster.workers


class _Silent:
    """A controller that is busy: what it is asked is not answered."""

    def __init__(self) -> None:
        self.asked, self.killed = Counter[str](), False

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *given: self.asked.update([method]) or f"{method} of {id(self)}")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> dict[str, _Silent]:
    """Three such groups."""
    controllers = {name: _Silent() for name in ("a", "b", "c")}

    def get(ref: Any, timeout: float) -> Any:
        waited.append(timeout)
        raise ray.exceptions.GetTimeoutError

    def wait(refs: list[Any], *, num_returns: int, timeout: float) -> Any:
        waited.append(timeout)
        return [], refs

    waited: list[float] = []
    monkeypatch.setattr(group, "_controller", controllers.__getitem__)
    fake = SimpleNamespace(get=get, wait=wait, exceptions=ray.exceptions, waited=waited)
    fake.kill = lambda controller: setattr(controller, "killed", True)
    monkeypatch.setattr(group, "ray", fake)
    return controllers


def test_busy_groups_are_waited_for_together(silent: dict[str, _Silent]) -> None:
    assert not group.ended(list(silent))
    assert not group.resize({name: (2, []) for name in silent})
    assert sum(group.ray.waited) <= 4  # type: ignore[attr-defined]
    assert all(each.asked == {"describe": 1, "resize": 1} for each in silent.values())


def test_a_busy_group_is_ended_at_once(silent: dict[str, _Silent]) -> None:
    group.end("a")
    assert silent["a"].killed
    assert sum(group.ray.waited) <= 2  # type: ignore[attr-defined]


def test_a_group_is_not_stopped_before_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its controller comes after the look that did not find it, and nobody would end it."""
    desk = RosterDesk(tmp_path)
    desk.submit("a")
    desk.roster.groups["g"] = GroupRecord("g", desk.roster.groups["g"].base, 1, time.time())
    one = _Round(desk, monkeypatch)
    ended: list[str] = []
    monkeypatch.setattr(group, "end", ended.append)
    changes = desk.roster.plan(time.time())
    stops = type(changes)(stops={"g"}, reasons={"g": "nothing to do"})
    monkeypatch.setattr(desk.roster, "plan", lambda *given: stops)
    one._starting.add("g")
    one._round()
    assert "g" in desk.roster.groups
    assert not ended
    one._starting.clear()
    one._round()
    assert ended == ["g"]
    assert "g" not in desk.roster.groups

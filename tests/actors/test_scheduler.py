"""What the scheduler's actor does of itself; what it does with others is in `test_cluster.py`."""

import os
import shutil
import threading
from pathlib import Path

import pytest
from desk import FakeWorker, RosterDesk

from tlora.actors.journal import Journal
from tlora.actors.messages import JobReport
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
    scheduler = Scheduler.__new__(Scheduler)
    scheduler._lock, scheduler._roster, scheduler._sweeps = threading.RLock(), desk.roster, Register(tmp_path)
    weight, ends = Roster._weight, list[threading.Thread]()

    def end(name: str) -> None:
        with scheduler._lock:
            if desk.roster.entry(name).place:
                worker.say(**{name: JobReport(1, State.FAILED)})

    def slowly(self: Roster, name: str) -> float:
        if not ends:
            ends.append(threading.Thread(target=end, args=("b",)))
            ends[0].start()
            ends[0].join(0.2)
        return weight(self, name)

    monkeypatch.setattr(Roster, "_weight", slowly)
    assert [row["state"] for row in scheduler.status(["a"])] == ["running"]
    ends[0].join()
    assert [row["state"] for row in scheduler.status()] == ["running", "failed"]
    desk.journal.close()

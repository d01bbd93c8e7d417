"""What the scheduler's actor does of itself; what it does with others is in `test_cluster.py`."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from tlora.actors.journal import Journal
from tlora.actors.scheduler import go_first, mark_outputs


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

"""What the scheduler's actor does of itself; what it does with others is in `test_cluster.py`."""

import os
import threading

import pytest

from tlora.actors.scheduler import go_first


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

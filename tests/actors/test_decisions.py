"""Every decision of a roster is one line of the log: of which job, in which group, why, and how far it had come."""

import logging
from pathlib import Path

import pytest
from desk import FakeWorker, RosterDesk


def test_decisions_are_logged_with_their_reasons_and_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    desk = RosterDesk(tmp_path)

    def said() -> list[str]:
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    with caplog.at_level(logging.INFO, "tlora"):
        desk.submit("a", "b")
        assert said() == ["job=a submitted: 1 job(s) are queued", "job=b submitted: 2 job(s) are queued"]
        worker = FakeWorker(desk, "worker-1")
        worker.say()
        desk.plan()
        first, second = said()
        assert first == "job=a group=g attaching, 1 idle worker(s): worker=worker-1 attempt=1 step=0/0"
        assert "job=b group=g attaching, joins" in second
        worker.say()
        worker.say()
        assert "job=a group=g running: worker=worker-1 attempt=1 step=3/0" in said()
        desk.roster.pause(["a"], desk.now_s)
        worker.say()
        worker.say()
        desk.roster.resume(["a"], desk.now_s)
        assert said() == [
            "job=a group=g running, is to be paused, paused by its user: worker=worker-1 attempt=1 step=3/0",
            "job=a group=g paused, paused by its user: worker=worker-1 attempt=1 step=3/0",
            "job=a group=- queued, resumed by its user: worker=- attempt=1 step=3/0",
        ]
        desk.roster.cancel(["b"], desk.now_s)
        assert "job=b group=g running, is to be dropped, cancelled by its user: " in said()[0]
        worker.say()
        worker.say()
        desk.plan()
        worker.say()
        worker.say()
        said()
        desk.roster.plan(desk.now_s, {"node"})
        assert said() == [
            "job=a group=g running, is to be moved, its worker worker-1 leaves: worker=worker-1 attempt=2 step=3/0"
        ]
        desk.wait(20.0)
        assert said() == [
            "group=g worker=worker-1 is lost with 1 job(s): its worker said nothing for 10 s",
            "job=a group=g queued, its worker said nothing for 10 s: goes on from its last save: worker=worker-1 "
            "attempt=2 step=3/0",
        ]
    desk.journal.close()


def test_a_job_says_why_the_group_that_it_waits_for_did_not_start(tmp_path: Path) -> None:
    desk = RosterDesk(tmp_path)
    desk.submit("a")
    desk.roster.groups.clear()
    desk.plan()
    (base,) = desk.roster.learners
    assert desk.roster.status()[0]["reason"] == "waits for a worker, asked for now"
    desk.roster.troubles[base] = "Bucket not found"
    assert desk.roster.status()[0]["reason"] == (
        "waits for a worker, asked for now; its group did not start: Bucket not found"
    )
    desk.journal.close()

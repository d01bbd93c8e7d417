"""What a user's pause means: to a candidate of a sweep, and to how long a job has waited."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import FakeWorker, RosterDesk, spec_of

from tlora.actors.messages import JobReport
from tlora.actors.roster import BY_USER
from tlora.job import State

DAY_S = 24 * 3600.0


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[RosterDesk]:
    desk = RosterDesk(tmp_path)
    desk.submit()
    yield desk
    desk.journal.close()


@pytest.fixture
def at_a_rung(desk: RosterDesk) -> FakeWorker:
    """Candidate a waits at its first rung; its worker."""
    worker = FakeWorker(desk, "w")
    desk.roster.train(spec_of("a"), {"until": 8}, desk.now_s)
    worker.say()
    desk.plan()
    worker.say()
    worker.say(a=JobReport(worker.orders.jobs["a"].attempt, State.PAUSED, "waits", step=4))
    assert (desk.states()["a"], desk.roster.status()[0]["halts"]) == ("paused", False)
    return worker


def test_a_candidate_that_is_paused_at_a_rung_stays_so(desk: RosterDesk, at_a_rung: FakeWorker) -> None:
    """Its siblings have come, so its sweep lets it go on: to where it halts next, once its user does, too."""
    desk.roster.pause(["a"], desk.now_s)
    desk.roster.train(spec_of("a"), {"until": 24}, desk.now_s)
    for is_head_lost in (False, True):
        (row,) = desk.roster.status()
        assert (row["state"], row["reason"], row["halts"]) == ("paused", BY_USER, not is_head_lost)
        desk.journal.close()
        if not is_head_lost:
            (desk.folder / "journal.db").unlink()
        desk.open()
    desk.roster.train(spec_of("a"), {"until": 24}, desk.now_s)
    desk.roster.resume(["a"], desk.now_s)
    assert (desk.states()["a"], desk.roster.entry("a").halt) == ("queued", {"until": 24})


def test_a_sweep_that_stops_leaves_its_users_pause(desk: RosterDesk) -> None:
    """One that is still being carried out."""
    worker = FakeWorker(desk, "w")
    desk.roster.train(spec_of("a"), {"until": 8}, desk.now_s)
    worker.say()
    desk.plan()
    worker.say()
    worker.say()
    desk.roster.pause(["a"], desk.now_s)
    desk.roster.pause(["a"], desk.now_s, "its sweep has stopped")
    desk.roster.train(spec_of("a"), {"until": 24}, desk.now_s)
    worker.say()
    worker.say()
    (row,) = desk.roster.status()
    assert (row["state"], row["reason"], desk.roster.entry("a").halt) == ("paused", BY_USER, {"until": 24})


@pytest.mark.parametrize("ends", ["paused", "cancelled", "stopped with its sweep"])
def test_a_job_that_rested_has_not_waited(desk: RosterDesk, ends: str) -> None:
    """Else it would go before all others as soon as it is resumed, and take over another base's worker."""
    halts = {"a": {"until": 8}} if "sweep" in ends else {}
    desk.roster.submit([spec_of("a", steps=10)], desk.now_s, halts)
    desk.now_s += 60.0
    if ends == "cancelled":
        desk.roster.cancel(["a"], desk.now_s)
    else:
        desk.roster.pause(["a"], desk.now_s, "its sweep has stopped" if halts else BY_USER)
    desk.now_s += 5 * DAY_S
    desk.roster.resume(["a"], desk.now_s, halts)
    for is_overdue in (False, True):
        desk.plan()
        assert desk.roster._view.state(desk.now_s).jobs["a"].is_overdue == is_overdue
        desk.now_s += 2 * DAY_S
    assert desk.roster.entry("a").rested_s == 5 * DAY_S


def test_a_candidate_that_waits_at_a_rung_waits(desk: RosterDesk, at_a_rung: FakeWorker) -> None:
    desk.now_s += DAY_S
    desk.roster.train(spec_of("a"), {"until": 24}, desk.now_s)
    assert desk.roster.entry("a").rested_s == 0.0

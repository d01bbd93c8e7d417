"""A job that kills whatever takes it in, and what else a roster makes of workers that are lost again and again."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import FakeWorker, RosterDesk

from tlora.actors.messages import JobReport
from tlora.job import State


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[RosterDesk]:
    desk = RosterDesk(tmp_path)
    desk.spec = desk.spec.model_copy(update={"jobs_per_worker": 8})
    desk.journal.close()
    desk.open()
    yield desk
    desk.journal.close()


def live(desk: RosterDesk, name: str, killers: str, *, base_loads: int = 1) -> None:
    """A worker takes in what it is told, in turn, until it comes to one that kills it."""
    worker = FakeWorker(desk, name)
    worker.report = worker.report.__class__(name, "g", 0, "node", 1, base_loads=base_loads)
    worker.say()
    desk.plan()
    worker.say()
    attaching = State.ATTACHING
    for _ in range(8):
        here = {job: order.attempt for job, order in worker.orders.jobs.items()}
        waits = {job: JobReport(attempt, attaching) for job, attempt in here.items() if job in killers}
        rows = {row["name"]: row["state"] for row in desk.roster.status()}
        killer = next(iter(waits), None)
        worker.say(**waits)
        if killer and all(rows[job] == "running" for job in here if job not in waits):
            break
    desk.wait(12.0)


def test_a_job_that_kills_whatever_takes_it_in_ends(desk: RosterDesk) -> None:
    """Not those beside it, though they come with it each time; nor those that ran when a worker was lost."""
    desk.submit(*"abcdef")
    for number in range(10):
        live(desk, f"w{number}", "c")
    rows = {row["name"]: row for row in desk.roster.status()}
    assert rows["c"]["reason"] == "its worker died 3 times as it was taken in; `tlora resume c` tries again"
    assert {name: row["state"] for name, row in rows.items()} == {**dict.fromkeys("abdef", "queued"), "c": "failed"}
    desk.journal.close()
    desk.open()
    desk.submit()
    desk.roster.resume(["c"], desk.now_s)
    live(desk, "again", "c")
    assert desk.states()["c"] == "failed", "once more is enough"
    desk.roster.resume(["c"], desk.now_s)
    for number in range(2):
        live(desk, f"good{number}", "")
        assert desk.states()["c"] == "queued"
    assert desk.roster.entry("c").crashes == 0


def test_suspects_are_taken_in_one_at_a_time(desk: RosterDesk) -> None:
    """All that came when two workers died, until it is seen which of them it was."""
    desk.submit(*"abc")
    for number in range(2):
        live(desk, f"w{number}", "abc")
    worker = FakeWorker(desk, "alone")
    worker.say()
    desk.plan()
    seen = []
    for _ in range(8):
        worker.say()
        seen.append("".join(worker.orders.jobs))
    assert sorted(set(seen), key=seen.index) == ["a", "ab", "abc"]
    assert set(desk.states().values()) == {"running"}


def test_a_base_that_kills_its_workers_blames_no_job(desk: RosterDesk) -> None:
    """Nor does a machine that does: the jobs wait for a better one."""
    desk.submit(*"ab")
    for number in range(6):
        live(desk, f"w{number}", "ab", base_loads=0)
    assert desk.states() == {"a": "queued", "b": "queued"}
    assert desk.roster.entry("a").crashes == 0

"""The gauges and counters: what is published of jobs and workers, and of those that have gone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from desk import FakeWorker, RosterDesk, spec_of

from tlora.actors import metrics
from tlora.actors.messages import JobReport
from tlora.actors.metrics import Metrics
from tlora.job import State
from tlora.scheduling import Plan


class FakeGauge:
    """Keeps what was set last, by name and tags."""

    seen: dict[tuple[str, ...], float]
    totals: dict[tuple[str, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]):
        assert description.isascii(), "Ray takes no other"
        assert description
        self.name, self.keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.keys)
        self.seen[self.name, *(tags[key] for key in self.keys)] = value

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.keys)
        assert value > 0, "Ray refuses it"
        key = self.name, *(tags[key] for key in self.keys)
        self.totals[key] = self.totals.get(key, 0) + value


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    monkeypatch.setattr(FakeGauge, "seen", {}, raising=False)
    monkeypatch.setattr(FakeGauge, "totals", {}, raising=False)
    for kind in ("Gauge", "Counter"):
        monkeypatch.setattr(metrics, kind, FakeGauge)
    return FakeGauge.seen


def job(name: str, **values: Any) -> dict[str, Any]:
    row = {"name": name, "state": "running", "group": "g", "step": 3, "tokens": 30, "tokens_per_s": 9.0, "loss": None}
    return {**row, "share": 0.25, "attempt": 1, **values}


def worker(name: str, busy_s: float) -> dict[str, Any]:
    counts = {"ticks": 5, "tick_s": 0.5, "busy_s": busy_s, "jobs": ["a"], "tick_error": 0.25}
    return {"group": "g", "worker": name, "rank": 0, **counts}


def test_jobs_and_workers_are_published_and_those_that_have_gone_read_zero(
    seen: dict[tuple[str, ...], float],
) -> None:
    gauges = Metrics()
    counts, jobs = {State.QUEUED: 1, State.RUNNING: 1}, [job("a"), job("b", state="queued", group="")]
    gauges.publish(counts, jobs, [worker("w", 2.0)], {}, 100.0)
    gauges.publish(counts, jobs, [worker("w", 3.0)], {}, 102.0)
    assert seen["tlora_job_tokens_per_s", "g", "a"] == 9.0
    assert seen["tlora_job_share", "g", "a"] == 0.25
    assert ("tlora_job_loss", "g", "a") not in seen
    assert (seen["tlora_jobs", "queued"], seen["tlora_jobs", "running"]) == (1, 1)
    assert seen["tlora_worker_busy_fraction", "g", "0"] == 0.5
    assert seen["tlora_group_tick_error", "g"] == 0.25
    assert not [key for key in seen if "b" in key]
    gauges.publish({State.FINISHED: 1}, [], [], {}, 104.0)
    assert seen["tlora_job_tokens_per_s", "g", "a"] == 0.0
    assert seen["tlora_job_step", "g", "a"] == 3
    assert seen["tlora_worker_jobs", "g", "0"] == 0
    assert seen["tlora_group_tick_error", "g"] == 0.0
    assert (seen["tlora_jobs", "running"], seen["tlora_jobs", "finished"]) == (0, 1)


def test_another_worker_of_the_same_rank_begins_anew(seen: dict[tuple[str, ...], float]) -> None:
    gauges = Metrics()
    gauges.publish({}, [], [worker("w", 90.0)], {}, 100.0)
    gauges.publish({}, [], [worker("v", 1.0)], {}, 102.0)
    assert seen["tlora_worker_busy_fraction", "g", "0"] == 0.0
    gauges.publish({}, [], [worker("v", 2.0)], {}, 104.0)
    assert seen["tlora_worker_busy_fraction", "g", "0"] == 0.5


def test_counters_grow_by_what_is_gained(seen: dict[tuple[str, ...], float]) -> None:
    gauges = Metrics()
    gauges.publish({}, [], [], {("steps", "g", "a"): 3, ("restarts", "", "a"): 0, ("lost_workers", "g"): 1}, 100.0)
    gauges.publish({}, [], [], {("steps", "g", "a"): 2, ("restarts", "h", "a"): 2}, 102.0)
    assert FakeGauge.totals == {
        ("tlora_steps", "g", "a"): 5, ("tlora_restarts", "h", "a"): 2, ("tlora_lost_workers", "g"): 1
    }  # fmt: skip


def test_what_is_counted_outlives_the_scheduler(tmp_path: Path) -> None:
    """Restarts, and what a job had reached when it left its worker; what is repeated counts once."""
    desk = RosterDesk(tmp_path)
    desk.submit("a")
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.plan()
    worker.say()
    worker.say(a=JobReport(1, State.RUNNING, step=5, tokens=50))
    desk.wait(20.0)  # it is lost
    other = FakeWorker(desk, "v", rank=1)
    other.say()
    desk.plan()
    other.say()
    other.say(a=JobReport(2, State.RUNNING, step=4, tokens=40))
    wanted = {("steps", "g", "a"): 5, ("tokens", "g", "a"): 50, ("restarts", "g", "a"): 1}
    assert +desk.roster.gains == {**wanted, ("lost_workers", "g"): 1}
    desk.journal.close()
    desk.open()
    assert +desk.roster.gains == {(what, "", name): count for (what, _, name), count in wanted.items()}
    assert desk.roster.status()[0]["restarts"] == 1
    desk.journal.close()


def test_the_share_is_the_planned_part_of_the_tick(tmp_path: Path) -> None:
    desk = RosterDesk(tmp_path)
    desk.roster.submit([spec_of("a", share=3.0), spec_of("b"), spec_of("c")], desk.now_s)
    desk.submit()
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.plan()

    def shares() -> list[float]:
        return [row["share"] for row in desk.roster.status()]

    assert shares() == [0.75, 0.25, 0.0]
    desk.roster.take_places(Plan(shares={"a": 100, "b": 900}), desk.now_s)
    assert shares() == [0.25, 0.75, 0.0]
    desk.roster.pause(["b"], desk.now_s)
    assert shares() == [1.0, 0.0, 0.0]
    desk.journal.close()


def test_how_far_ticks_are_off_what_was_foretold_is_published(
    seen: dict[tuple[str, ...], float], tmp_path: Path
) -> None:
    desk = RosterDesk(tmp_path)
    desk.submit("a")
    worker = FakeWorker(desk, "w")
    for ticks, (rows, tick_s) in enumerate([(256, 1.0), (256, 1.0), (512, 2.0), (256, 2.0)], 9):
        worker.report = replace(worker.report, ticks=ticks, tick_tokens=rows, tick_jobs=1, tick_ranks=16, tick_s=tick_s)
        worker.say()
        Metrics().publish({}, [], desk.roster.describe_workers(), {}, desk.now_s)
        assert (("tlora_group_tick_error", "g") in seen) == (ticks == 12), "two sizes make a model"
    assert seen["tlora_group_tick_error", "g"] == 0.5
    desk.journal.close()

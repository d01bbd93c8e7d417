"""The gauges: what is published of jobs and workers, and of those that have gone."""

from typing import Any

import pytest

from tlora.actors import metrics
from tlora.actors.metrics import Metrics
from tlora.job import State


class FakeGauge:
    """Keeps what was set last, by name and tags."""

    seen: dict[tuple[str, ...], float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]):
        assert description
        self.name, self.keys = name, tag_keys

    def set(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.keys)
        self.seen[self.name, *(tags[key] for key in self.keys)] = value


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    monkeypatch.setattr(FakeGauge, "seen", {}, raising=False)
    monkeypatch.setattr(metrics, "Gauge", FakeGauge)
    return FakeGauge.seen


def job(name: str, **values: Any) -> dict[str, Any]:
    row = {"name": name, "state": "running", "group": "g", "step": 3, "tokens": 30, "tokens_per_s": 9.0, "loss": None}
    return {**row, "share": 2.0, "attempt": 1, **values}


def worker(name: str, busy_s: float) -> dict[str, Any]:
    counts = {"ticks": 5, "tick_s": 0.5, "busy_s": busy_s, "lost": 1, "jobs": ["a"]}
    return {"group": "g", "worker": name, "rank": 0, **counts}


def test_jobs_and_workers_are_published_and_those_that_have_gone_read_zero(
    seen: dict[tuple[str, ...], float],
) -> None:
    gauges = Metrics()
    counts, jobs = {State.QUEUED: 1, State.RUNNING: 1}, [job("a"), job("b", state="queued", group="")]
    gauges.publish(counts, jobs, [worker("w", 2.0)], 100.0)
    gauges.publish(counts, jobs, [worker("w", 3.0)], 102.0)
    assert seen["tlora_job_tokens_per_s", "g", "a"] == 9.0
    assert seen["tlora_job_share", "g", "a"] == 2.0
    assert ("tlora_job_loss", "g", "a") not in seen
    assert (seen["tlora_jobs", "queued"], seen["tlora_jobs", "running"]) == (1, 1)
    assert seen["tlora_worker_busy_fraction", "g", "0"] == 0.5
    assert seen["tlora_group_lost_workers", "g", "0"] == 1
    assert not [key for key in seen if "b" in key]
    gauges.publish({State.FINISHED: 1}, [], [], 104.0)
    assert seen["tlora_job_tokens_per_s", "g", "a"] == 0.0
    assert seen["tlora_job_step", "g", "a"] == 3
    assert seen["tlora_worker_jobs", "g", "0"] == 0
    assert (seen["tlora_jobs", "running"], seen["tlora_jobs", "finished"]) == (0, 1)


def test_another_worker_of_the_same_rank_begins_anew(seen: dict[tuple[str, ...], float]) -> None:
    gauges = Metrics()
    gauges.publish({}, [], [worker("w", 90.0)], 100.0)
    gauges.publish({}, [], [worker("v", 1.0)], 102.0)
    assert seen["tlora_worker_busy_fraction", "g", "0"] == 0.0
    gauges.publish({}, [], [worker("v", 2.0)], 104.0)
    assert seen["tlora_worker_busy_fraction", "g", "0"] == 0.5

"""What Prometheus scrapes from Ray, by group and job: set by the scheduler from what its workers report."""

from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge

from tlora.job import State

Tags = tuple[str, str]
_JOB, _WORKER = ("group", "job"), ("group", "rank")


class Metrics:
    """All that one scheduler publishes; made in its process."""

    def __init__(self) -> None:
        self._of_jobs = {
            "step": Gauge("tlora_job_step", "Optimizer steps taken", _JOB),
            "tokens": Gauge("tlora_job_tokens", "Tokens trained on", _JOB),
            "tokens_per_s": Gauge("tlora_job_tokens_per_s", "Tokens per second of the last step", _JOB),
            "loss": Gauge("tlora_job_loss", "Loss of the last step", _JOB),
            "share": Gauge("tlora_job_share", "Planned part of its worker's ticks; 0: it is on none", _JOB),
            "attempt": Gauge("tlora_job_attempts", "Times that it was placed", _JOB),
        }
        self._of_workers = {
            "ticks": Gauge("tlora_worker_ticks", "Ticks since its start", _WORKER),
            "tick_s": Gauge("tlora_worker_tick_seconds", "Seconds of the last tick", _WORKER),
            "residents": Gauge("tlora_worker_jobs", "Jobs on a worker", _WORKER),
            "busy": Gauge("tlora_worker_busy_fraction", "Share of the time that was spent in ticks", _WORKER),
        }
        self._counters = {
            "steps": Counter("tlora_steps", "Optimizer steps taken; repeated ones count once", _JOB),
            "tokens": Counter("tlora_tokens", "Tokens trained on; repeated ones count once", _JOB),
            "restarts": Counter("tlora_restarts", "Times that a job lost its worker", _JOB),
            "lost_workers": Counter("tlora_lost_workers", "Workers that were lost", ("group",)),
        }
        self._errors = Gauge("tlora_group_tick_error", "Mean error of foretold ticks, relative", ("group",))
        self._states = Gauge("tlora_jobs", "Jobs by state; queued: the queue's length", ("state",))
        self._jobs: set[Tags] = set()
        self._workers: set[Tags] = set()
        self._busy: dict[str, tuple[float, float]] = {}
        """Seconds in ticks by worker, and when that was."""

    def publish(
        self, counts: Mapping[State, int], jobs: Iterable[Mapping[str, Any]], workers: Iterable[Mapping[str, Any]],
        gains: Mapping[tuple[str, ...], int], now_s: float,
    ) -> None:  # fmt: skip
        """Set all: from how many jobs are in each state, and the rows that the roster shows to users of those that are
        on workers, and of workers; of what has gone, rates and shares become 0. `gains`: by counter and tags, what
        has come since the last time."""
        placed: set[Tags] = set()
        for job in jobs:
            if job["group"]:
                placed.add((job["group"], job["name"]))
                _set(self._of_jobs, job, _JOB, (job["group"], job["name"]))
        for tags in self._jobs - placed:
            _set(self._of_jobs, {"tokens_per_s": 0.0, "share": 0.0}, _JOB, tags)
        self._jobs = placed
        here, before, self._busy = set[Tags](), self._busy, {}
        for worker in workers:
            tags = worker["group"], str(worker["rank"])
            here.add(tags)
            values = {**worker, "residents": len(worker["jobs"]), "busy": self._fraction(worker, before, now_s)}
            _set(self._of_workers, values, _WORKER, tags)
            if worker["tick_error"] is not None:
                self._errors.set(worker["tick_error"], {"group": worker["group"]})
        for group in {group for group, _ in self._workers} - {group for group, _ in here}:
            self._errors.set(0.0, {"group": group})
        for tags in self._workers - here:
            _set(self._of_workers, {"residents": 0, "busy": 0.0, "tick_s": 0.0}, _WORKER, tags)
        self._workers = here
        for state in State:
            self._states.set(counts.get(state, 0), {"state": state.value})
        for key, gain in gains.items():
            if gain:
                self._counters[key[0]].inc(gain, dict(zip(_JOB, key[1:], strict=False)))

    def _fraction(self, worker: Mapping[str, Any], before: Mapping[str, tuple[float, float]], now_s: float) -> float:
        """Of the time since it was last seen."""
        busy_s, at_s = before.get(worker["worker"], (worker["busy_s"], now_s))
        self._busy[worker["worker"]] = worker["busy_s"], now_s
        return min(1.0, (worker["busy_s"] - busy_s) / (now_s - at_s)) if now_s > at_s else 0.0


def _set(gauges: Mapping[str, Gauge], values: Mapping[str, Any], names: Tags, tags: Tags) -> None:
    for key, gauge in gauges.items():
        if values.get(key) is not None:
            gauge.set(values[key], dict(zip(names, tags, strict=True)))

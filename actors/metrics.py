"""What Prometheus scrapes from Ray: gauges by group and job, set by the scheduler from what its workers report."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from ray.util.metrics import Gauge

from tlora.job import State

_JOB, _WORKER = ("group", "job"), ("group", "rank")


class Metrics:
    """The gauges of one scheduler; made in its process."""

    def __init__(self) -> None:
        self._of_jobs = {
            "step": Gauge("tlora_job_step", "Optimizer steps taken", _JOB),
            "tokens": Gauge("tlora_job_tokens", "Tokens trained on", _JOB),
            "tokens_per_s": Gauge("tlora_job_tokens_per_s", "Tokens per second of the last step", _JOB),
            "loss": Gauge("tlora_job_loss", "Loss of the last step", _JOB),
            "attempt": Gauge("tlora_job_attempts", "Times that it was placed", _JOB),
        }
        self._of_workers = {
            "ticks": Gauge("tlora_worker_ticks", "Ticks since its start", _WORKER),
            "tick_s": Gauge("tlora_worker_tick_seconds", "Seconds of the last tick", _WORKER),
        }
        self._jobs = Gauge("tlora_jobs", "Jobs by state", ("state",))
        self._residents = Gauge("tlora_worker_jobs", "Jobs on a worker", _WORKER)

    def publish(self, jobs: Iterable[Mapping[str, Any]], workers: Iterable[Mapping[str, Any]]) -> None:
        """Set all from the rows that the roster shows to users."""
        counts = Counter[str]()
        for job in jobs:
            counts[job["state"]] += 1
            if job["group"]:
                tags = {"group": job["group"], "job": job["name"]}
                for key, gauge in self._of_jobs.items():
                    if job[key] is not None:
                        gauge.set(job[key], tags)
        for worker in workers:
            tags = {"group": worker["group"], "rank": str(worker["rank"])}
            for key, gauge in self._of_workers.items():
                gauge.set(worker[key], tags)
            self._residents.set(len(worker["jobs"]), tags)
        for state in State:
            self._jobs.set(counts[state], {"state": state.value})

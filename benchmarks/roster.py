"""What a round of the scheduler actor takes, its own part and the plan's, and what calls take: by live jobs.

    python -m benchmarks.roster [--jobs 1000 10000]

A roster on a real journal, as many workers as a quarter of the jobs, which say at once what they were told; speeds of
results/h200/profile.json. An event is a job that ends, or one that is submitted. Times are those of this process,
which others beside it hardly change, so without the waits for the disk. Rows go to results/scheduling/roster.json: the
slowest of each kind.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import results
from tlora.actors.journal import Journal
from tlora.actors.messages import JobReport, Orders, Report
from tlora.actors.records import GroupRecord
from tlora.actors.roster import Roster, base_key
from tlora.capacity import Capacity, Learner
from tlora.cluster import ClusterSpec
from tlora.job import State
from tlora.spec import JobSpec, parse_job
from tlora.traces import BATCHES, LENGTHS, RANKS

BASE = "llama-8b"
GOALS_MS = {1_000: 5.0, 10_000: 50.0}
BOUND = ("round after an event", "status")
EVENTS = 60


class Bench:
    """A cluster of so many live jobs."""

    def __init__(self, folder: Path, num_jobs: int, capacity: Capacity):
        self.random, self.folder, self.now_s = np.random.default_rng(num_jobs), folder, 100.0
        self.num_workers, self.num_jobs = num_jobs // 4, 0
        spec = ClusterSpec(storage=str(folder), max_workers=self.num_workers)
        self.roster = Roster(spec, Journal(folder / "journal.db", str(folder)), self.now_s)
        base = base_key(self.job().model_dump(mode="json")["base"])
        self.roster.groups["g"] = GroupRecord("g", base, self.num_workers, None)
        self.roster.learners[base] = Learner(capacity.models[BASE])
        self.reports = {
            f"w{at:05d}": Report(f"w{at:05d}", "g", at, f"n{at // 8}", at, base_loads=1)
            for at in range(self.num_workers)
        }
        self.orders: dict[str, Orders] = {}
        self.submit(num_jobs)
        for name in self.reports:
            self.exchange(name)
        self.round()
        for name in self.reports:
            self.exchange(name)
        self.times: dict[str, list[float]] = {}

    def job(self) -> JobSpec:
        self.num_jobs += 1
        rank, batch, length = (int(self.random.choice(choices)) for choices in (RANKS, BATCHES, LENGTHS))
        return parse_job(
            {
                "name": f"j{self.num_jobs}", "base": {"model": BASE}, "steps": int(1 + self.random.lognormal(8.0, 2.0)),
                "data": {"path": "rows.jsonl", "max_length": length}, "adapter": {"rank": rank}, "batch_size": batch,
                "output": str(self.folder / f"j{self.num_jobs}"),
            }
        )  # fmt: skip

    def submit(self, count: int) -> None:
        self.roster.submit([self.job() for _ in range(count)], self.now_s)

    def exchange(self, worker: str, **ended: JobReport) -> None:
        """A worker's report: it has what it was told to have."""
        orders = self.orders.get(worker, Orders(0))
        jobs = {name: JobReport(order.attempt, State.RUNNING, step=1) for name, order in orders.jobs.items()}
        report = replace(self.reports[worker], jobs={**jobs, **ended}, heard=orders.number, applied=orders.number)
        self.orders[worker] = self.roster.exchange(report, self.now_s)

    def round(self) -> None:
        """As the actor's."""
        self.roster.plan(self.now_s)

    def measure(self) -> None:
        for event in range(EVENTS):
            self.now_s += 1.0
            if event % 2:
                self.timed("admission", lambda: self.submit(1))
            else:
                worker = str(self.random.choice([name for name, orders in self.orders.items() if orders.jobs]))
                name, order = next(iter(self.orders[worker].jobs.items()))
                ended = {name: JobReport(order.attempt, State.FINISHED)}
                self.timed("report of an end", partial(self.exchange, worker, **ended))
            self.timed("round after an event", self.round)
            self.timed("round without one", self.round)
            for worker in self.random.choice(list(self.reports), 3):
                self.timed("report", partial(self.exchange, str(worker)))
            self.timed("looking for silent workers", lambda: self.roster.lose_silent(self.now_s))
            if event % 10 == 0:
                self.timed("status", self.roster.status)
                for name in self.reports:
                    self.exchange(name)

    def timed(self, what: str, run: Callable[[], Any]) -> None:
        began_s = time.process_time()
        run()
        self.times.setdefault(what, []).append(1e3 * (time.process_time() - began_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", type=int, default=list(GOALS_MS))
    arguments = parser.parse_args()
    capacity = Capacity.load(results.ROOT / "benchmarks/results/h200/profile.json")
    rows = []
    for num_jobs in arguments.jobs:
        with tempfile.TemporaryDirectory(prefix="tlora-roster") as folder:
            bench = Bench(Path(folder), num_jobs, capacity)
            bench.measure()
        for what, times in bench.times.items():
            goal = GOALS_MS.get(num_jobs) if what in BOUND else None
            shape = f"{bench.num_workers} workers, median {np.median(times):.2f} ms"
            row = results.row(
                f"roster/{num_jobs}/{what}", shape, max(times), "goal" if goal else "-", goal or 1.0, goal and 1.0,
                unit="ms", gpu=f"modelled, {capacity.gpu}",
            )  # fmt: skip
            rows.append(row)
    results.write("roster", rows, "scheduling")


if __name__ == "__main__":
    main()

"""A roster on a real journal, with a clock and workers that do at once what they are told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tlora.actors.journal import Journal
from tlora.actors.messages import JobReport, Orders, Report
from tlora.actors.records import GroupRecord
from tlora.actors.roster import Roster, base_key
from tlora.cluster import ClusterSpec
from tlora.job import State
from tlora.spec import JobSpec, parse_job

STORAGE = "/storage"


def spec_of(name: str, **changes: Any) -> JobSpec:
    output = f"{STORAGE}/out/{name}"
    return parse_job({"name": name, "base": {"model": "m"}, "data": {"path": "d"}, "output": output, **changes})


class RosterDesk:
    """A roster and a clock."""

    def __init__(self, folder: Path):
        self.folder, self.now_s = folder, 100.0
        self.spec = ClusterSpec(storage=STORAGE, lost_after_s=10.0, jobs_per_worker=2)
        self.open()

    def open(self) -> None:
        """As a scheduler that has just been started."""
        self.journal = Journal(self.folder / "journal.db", str(self.folder / "store"))
        self.roster = Roster(self.spec, self.journal, self.now_s)

    def submit(self, *names: str) -> None:
        self.roster.submit([spec_of(name) for name in names], self.now_s)
        self.roster.groups["g"] = GroupRecord("g", base_key(spec_of("x").model_dump(mode="json")["base"]), 2, None)

    def plan(self) -> None:
        self.roster.plan(self.now_s)

    def wait(self, seconds: float) -> None:
        """As a scheduler waits, looking every half second."""
        for _ in range(int(2 * seconds)):
            self.now_s += 0.5
            self.roster.lose_silent(self.now_s)

    def states(self) -> dict[str, str]:
        return {row["name"]: row["state"] for row in self.roster.status()}


class FakeWorker:
    """Does at once what it is told."""

    def __init__(self, desk: RosterDesk, name: str, rank: int = 0):
        self.desk, self.report, self.orders = desk, Report(name, "g", rank, "node", 1), Orders(0)

    def say(self, **jobs: JobReport) -> Orders:
        """These, and what it was told to have before."""
        residents = {name: JobReport(order.attempt, State.RUNNING, step=3) for name, order in self.orders.jobs.items()}
        self.report = replace(
            self.report, jobs={**residents, **jobs}, heard=self.orders.number, applied=self.orders.number
        )
        self.orders = self.desk.roster.exchange(self.report, self.desk.now_s)
        return self.orders

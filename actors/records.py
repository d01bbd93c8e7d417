"""What a roster keeps of each worker and group. No Ray, no torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from tlora.actors.entries import Entry
from tlora.actors.messages import Orders, Report
from tlora.job import State
from tlora.plan import Plan


@dataclass(slots=True)
class Seen:
    """A worker, as it last said."""

    report: Report
    last_s: float
    orders: Orders | None = None
    """The newest that it was given by this scheduler."""
    idle_since_s: float | None = None
    budget: int = 0
    """Most rows of a tick, as planned; 0: not planned."""

    def is_to_take_in(self, entry: Entry) -> bool:
        """Whether it takes this job in, or is about to, and does not have it wait for room or files."""
        told = self.report.jobs.get(entry.name)
        waits = told and told.attempt == entry.attempt and told.state is State.ATTACHING and told.reason
        return entry.state is State.ATTACHING and not waits

    def coming(self, jobs: Mapping[str, Entry]) -> Collection[str]:
        """The jobs that it may have died of: it has its base, and was told to take them in."""
        told = self.orders.jobs if self.orders and self.report.base_loads else {}
        return [name for name in told if self.is_to_take_in(jobs[name])]


@dataclass(slots=True)
class GroupRecord:
    """A trainer group, as it was asked for."""

    name: str
    base: str
    """Of the base's spec, in JSON."""
    size: int
    idle_since_s: float | None
    plan: Plan = field(default_factory=Plan)
    """How each of its units holds the base."""
    most_rows: int = 0
    """Of a lane's tick, since one of its units ran out of memory."""

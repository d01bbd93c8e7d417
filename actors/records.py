"""What a roster keeps of each worker and group. No Ray, no torch."""

from dataclasses import dataclass, field

from tlora.actors.messages import Orders, Report
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

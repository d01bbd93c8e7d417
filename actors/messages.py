"""What the scheduler and the workers tell one another, in plain values.

A worker says what it has (`Report`), and is told what it is to have (`Orders`). Neither is a command: what is lost is
said again, and what is said twice changes nothing. A unit of several workers is one worker here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tlora.job import State
from tlora.plan import Plan


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job on one worker."""

    attempt: int
    state: State
    reason: str = ""
    step: int = 0
    num_steps: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    loss: float | None = None
    eval_loss: float | None = None
    lanes: tuple[int, ...] = ()
    """Of its unit, on which it lies."""
    save_s: float = 0.0
    """That its last save took."""

    @property
    def numbers(self) -> dict[str, Any]:
        """What is kept of it when it leaves."""
        return {key: getattr(self, key) for key in ("step", "num_steps", "tokens", "loss", "eval_loss")}


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker, or a unit by its first one, has."""

    worker: str
    """Unlike any other process's, ever."""
    group: str
    rank: int
    """Place in its group: a process of the same place takes it over from the one before."""
    node: str
    pid: int
    others: tuple[tuple[str, int], ...] = ()
    """Nodes and process ids of the rest of its unit."""
    most_rows: int = 0
    """Of a lane's tick, since this unit ran out of memory; 0: it has not."""
    plan: Plan | None = None
    """That its base needs, for which it has no room by itself."""
    base_loads: int = 0
    """0: its base is not loaded yet."""
    heard: int = 0
    """Number of the newest orders that it has got: a scheduler that has lost its memory counts on from there."""
    applied: int = 0
    """Number of the newest orders of which nothing is left to be done."""
    jobs: dict[str, JobReport] = field(default_factory=dict)
    """Residents, and those that have ended here until the orders leave them out."""
    ticks: int = 0
    tick_s: float = 0.0
    """Of the last tick."""
    busy_s: float = 0.0
    """Of all ticks."""
    tick_tokens: int = 0
    """Of the last training tick; 0: the last one was of another kind."""
    tick_jobs: int = 0
    tick_ranks: int = 0
    """Sum over those jobs."""
    peak_bytes: int = 0
    """Of the GPU's memory since the base was loaded."""

    @property
    def processes(self) -> list[tuple[str, int]]:
        """Nodes and process ids of a worker, or of all of its unit."""
        return [(self.node, self.pid), *self.others]


@dataclass(frozen=True, slots=True)
class Order:
    """A job that a worker is to have. `attempt` tells one placement from the next."""

    spec: dict[str, Any]
    attempt: int
    halt: dict[str, Any] = field(default_factory=dict)
    """Where it is to stop, as `tlora.sweep.Halt` has it; empty: at its end."""


@dataclass(frozen=True, slots=True)
class Orders:
    """All that a worker is to have. Residents that are left out are saved and let go; those in `drop` are not saved."""

    number: int
    jobs: dict[str, Order] = field(default_factory=dict)
    drop: frozenset[str] = frozenset()
    stop: bool = False
    """The worker's end, once it has let go of everything."""
    shares: dict[str, float] = field(default_factory=dict)
    """Of each tick, by job, besides the share that its user gave it; 1 if not named."""
    token_budget: int = 0
    """Most rows in a tick, where settings leave it open; 0: as it is."""
    most_rows: int = 0
    """Of a lane's tick, whatever settings say, since a unit of this group ran out of memory; 0: it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What every worker of a group is given."""

    group: str
    base: dict[str, Any]
    plan: Plan = field(default_factory=Plan)
    """How a unit of this group holds the base; of one rank, each worker is by itself."""
    most_workers: int = 0
    """0: that plan is settled; else a worker without room for the base says which of up to so many it needs."""
    per_node: int = 8
    """Workers for which a node has room."""
    memory_bytes: int = 0
    """That its base and jobs may take, by the estimate; 0: its GPU's, and a CPU's is not looked at."""
    token_budget: int = 0
    deterministic: bool = False
    checkpointing: bool = False
    save_every_s: float = 300.0
    stuck_after_s: float = 1800.0
    patience_s: float = 300.0
    """How long files that cannot be read or written are tried again, before their job fails."""
    mark: str | None = None
    """File that is there unless the storage is away."""
    device: str | None = None

    def next_save_s(self, took_s: Iterable[float]) -> float:
        """From the beginning of a save to that of the next, so that this is there before more than `save_every_s` of
        work could be lost, if it takes as long as the longest of the last ones; half of that where files take longer,
        or nothing was saved yet."""
        longest_s = max(took_s, default=0.0)
        return max(self.save_every_s - longest_s, self.save_every_s / 2.0) if longest_s else self.save_every_s / 2.0

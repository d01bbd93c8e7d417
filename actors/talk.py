"""What the ranks of a unit say to each other: behind a tick, and after one that was broken off. Plain values.

Called by `tlora.actors.unit`. All ranks have the same words, so what follows from them alone is the same on each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlora.actors.messages import JobReport, Orders
from tlora.group_trainer import ELSEWHERE
from tlora.job import State

Lanes = tuple[int, ...]
Key = tuple[str, int, Lanes]
"""A job on its way in: name, attempt, lanes."""


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the first rank wants of all."""

    orders: Orders = field(default_factory=lambda: Orders(0))
    lanes: dict[str, Lanes] = field(default_factory=dict)
    """Of each job that has not ended."""
    heard: Mapping[str, JobReport] = field(default_factory=dict)
    """What the scheduler has heard of each job last."""
    saves: frozenset[str] = frozenset()
    """Jobs that are to be saved now."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank brings to a talk."""

    jobs: dict[str, JobReport] = field(default_factory=dict)
    """Those that it leads, and those that failed here."""
    ready: frozenset[Key] = frozenset()
    """Jobs that it could take in now."""
    leaving: frozenset[str] = frozenset()
    """Jobs whose last files are being written: what became of them will be known here."""
    applied: int = 0
    lost: frozenset[int] = frozenset()
    halts: dict[str, str] = field(default_factory=dict)
    """Of those that it leads, candidates that are to halt, with why."""
    wishes: Wishes | None = None


@dataclass(frozen=True, slots=True)
class Shortage:
    """A job for which a rank has no room, or that it cannot take in."""

    name: str
    told: JobReport
    """How far it has come."""
    beside: frozenset[str]
    """What else lies on that rank."""
    text: str
    alone: str
    """Why it fails, if that is nothing."""
    fault: str = ""
    """Why it fails, whatever lies there."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What a rank has left when a tick, or whatever else all were at, was broken off."""

    jobs: Mapping[str, tuple[object, ...]]
    """How far each resident has come; of several ranks, only the same on all of them can go on."""
    has_base: bool
    error: str = ""
    """Why it was broken off, where it was."""
    largest: Shortage | None = None
    """Whose longest sequence had a tick to itself then."""
    ended: frozenset[tuple[str, int]] = frozenset()
    """Jobs, by attempt, that have come to their end here."""


def agreed(ended: Mapping[str, JobReport], leads: Mapping[str, Damage]) -> dict[str, JobReport]:
    """Of a rank's jobs that have ended, those of which their leads say so too, and those that failed: what was broken
    off may have ended on some ranks of a job alone."""
    return {
        name: told
        for name, told in ended.items()
        if name not in leads or told.state is State.FAILED or (name, told.attempt) in leads[name].ended
    }


def joined(words: Sequence[Word]) -> dict[str, JobReport]:
    """Of what several say of a job, its end, and that with its reason."""
    jobs: dict[str, JobReport] = {}
    for word in words:
        for name, told in word.jobs.items():
            if name not in jobs or _weight(told) > _weight(jobs[name]):
                jobs[name] = told
    return jobs


def _weight(told: JobReport) -> tuple[int, bool, bool, bool]:
    return told.attempt, told.state.is_terminal, told.reason != ELSEWHERE, told.state is State.RUNNING

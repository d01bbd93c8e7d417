"""What ranks of a group know of each other: who holds a job, and what is said before a tick.

Every message is as many numbers as any other, so that one exchange of one length serves a circle of any size. Called by
the group's trainer.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from tlora.resident import Phase

MOST_SHARED = 64
"""Most jobs on several ranks that one rank may hold: an exchange has one length."""
PHASES = (Phase.TRAINING, Phase.EVALUATING)


@dataclass(frozen=True, slots=True)
class Holding:
    """Where a job lives."""

    lanes: tuple[int, ...]
    ranks: tuple[int, ...]
    summed: tuple[int, ...]
    """Ranks that have the same part of the job's vector as this one, by lane."""

    @property
    def lead(self) -> int:
        return self.ranks[0]

    @property
    def is_split(self) -> bool:
        return len(self.lanes) > 1


@dataclass(frozen=True, slots=True)
class Message:
    """What a rank says before a tick; numbers, so that all messages have one length."""

    last: int
    """The kind of its last tick."""
    kinds: int
    """A bit for each kind of which it has rows to send."""
    talk: int
    """The newest talk for which it has asked."""
    micros: int
    """What its last tick took."""
    rows: int
    """Rows of that tick."""
    mix: int
    """Tells one set of residents from another."""
    through: frozenset[int] = frozenset()
    """Split jobs of which nothing will be left here after a tick of their kind."""
    lost: frozenset[int] = frozenset()
    """Jobs of several ranks that failed here since the last tick."""

    def numbers(self) -> list[int]:
        """Of more that are lost than one message holds, the others are said in the next."""
        parts = [sorted(part)[:MOST_SHARED] for part in (self.through, self.lost)]
        lists = [part + [0] * (MOST_SHARED - len(part)) for part in parts]
        return [self.last, self.kinds, self.talk, self.micros, self.rows, self.mix, *lists[0], *lists[1]]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> "Message":
        last, kinds, talk, micros, rows, mix, *lists = numbers
        through, lost = (frozenset(part) - {0} for part in (lists[:MOST_SHARED], lists[MOST_SHARED:]))
        return cls(last, kinds, talk, micros, rows, mix, through, lost)


def number_of(name: str) -> int:
    """A job's number in messages, never 0."""
    return zlib.crc32(name.encode()) + 1

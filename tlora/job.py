"""A job's record: its state, and which transitions are legal. No torch, no Ray, no clock.

The trainer and `tlora.local` change it as a job goes on; what a state means for memory and files is theirs.
"""

from dataclasses import dataclass
from enum import StrEnum

from tlora.errors import StateError


class State(StrEnum):
    QUEUED = "queued"
    ATTACHING = "attaching"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing more happens to it, unless its user lets it go on."""
        return self in (State.FINISHED, State.CANCELLED, State.FAILED)


_LEGAL: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.ATTACHING, State.PAUSED, State.CANCELLED, State.FAILED}),
    State.ATTACHING: frozenset(
        {State.RUNNING, State.QUEUED, State.PAUSED, State.FINISHED, State.CANCELLED, State.FAILED}
    ),
    State.RUNNING: frozenset({State.PAUSED, State.QUEUED, State.FINISHED, State.CANCELLED, State.FAILED}),
    State.PAUSED: frozenset({State.QUEUED, State.ATTACHING, State.CANCELLED, State.FAILED}),
    State.FINISHED: frozenset(),
    State.CANCELLED: frozenset({State.QUEUED}),
    State.FAILED: frozenset({State.QUEUED}),
}


@dataclass(slots=True)
class JobRecord:
    """Where one job stands. Every end carries its reason."""

    name: str
    state: State = State.QUEUED
    reason: str = ""

    def to(self, state: State, reason: str = "") -> None:
        """Change state. The same state again changes nothing; an illegal transition raises StateError."""
        if state is self.state:
            return
        if state not in _LEGAL[self.state]:
            legal = ", ".join(sorted(_LEGAL[self.state])) or "nothing: it has ended"
            raise StateError(f"job {self.name} is {self.state}: it cannot become {state}; want {legal}.")
        self.state, self.reason = state, reason

"""What a journal holds: jobs as they last were, what changed them, and how both are written. No Ray, no torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tlora.job import JobRecord, State


@dataclass(frozen=True, slots=True)
class Entry:
    """A job as it last was. `attempt` is raised at each placement: what is said of an earlier one is stale. `place` is
    empty for nowhere. `wish`: what its worker is still to do. `numbers`: its steps, tokens and losses, when it last
    left a place. `halt`: where a sweep's candidate stops next, until it has. `restarts`: times that it lost its worker;
    `crashes`: in a row, as it was being taken in. `rested_s`: in which its user, or its own end, held it back.
    """

    name: str
    spec: dict[str, Any]
    state: State = State.QUEUED
    reason: str = ""
    attempt: int = 0
    place: str = ""
    submitted_s: float = 0.0
    changed_s: float = 0.0
    wish: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    halt: dict[str, Any] = field(default_factory=dict)
    restarts: int = 0
    crashes: int = 0
    rested_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a job; None: it stays. The same state again leaves the reason, too."""

    name: str
    state: State | None = None
    reason: str | None = None
    attempt: int | None = None
    place: str | None = None
    spec: dict[str, Any] | None = None
    wish: str | None = None
    numbers: dict[str, Any] | None = None
    halt: dict[str, Any] | None = None
    restarts: int | None = None
    crashes: int | None = None
    rested_s: float | None = None


@dataclass(frozen=True, slots=True)
class Event:
    """A job as one change left it. Numbers grow, with gaps, and go on growing under the next head."""

    number: int
    name: str
    state: State
    reason: str
    place: str
    time_s: float


def plain(spec: dict[str, Any]) -> Any:
    """A copy, as it will be read back."""
    return json.loads(json.dumps(spec))


def entry_of(row: dict[str, Any]) -> Entry:
    """What only a newer version knows is left out."""
    known = {key: row[key] for key in Entry.__dataclass_fields__ if key in row}
    return Entry(**known | {"state": State(row["state"])})


def changed(old: Entry, change: Change, now_s: float) -> Entry:
    """Raises StateError if the transition is illegal. `old` if nothing differs: a change may come twice."""
    told = {key: value for key, value in asdict(change).items() if value is not None and key != "state"}
    new = replace(old, **told)
    if change.state is not None:
        record = JobRecord(old.name, old.state, old.reason)
        record.to(change.state, new.reason)
        new = replace(new, state=record.state, reason=record.reason)
    new = replace(new, spec=plain(new.spec))
    return old if new == old else replace(new, changed_s=now_s)


def batch_of(entries: Sequence[tuple[int, Entry]], withdrawn: Sequence[int] = (), **more: str) -> str:
    """An object: entries with the numbers of their events, or numbers of objects whose jobs were not added after all
    (or names of such jobs)."""
    rows = [{"event": number, **asdict(entry)} for number, entry in entries]
    return json.dumps({"entries": rows, "withdrawn": withdrawn, **more})

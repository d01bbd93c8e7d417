"""The sweeps of a cluster, in its folder of outputs: what their users want of each, and how far it has come. No Ray.

The scheduler writes wishes, the actor that drives sweeps writes what becomes of them; each has a file of its own a
sweep, replaced whole. So neither waits for the other, and what is killed reads on where it was.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tlora.errors import StateError
from tlora.files import atomic_path
from tlora.job import State
from tlora.sweep import Halving
from tlora.sweep_order import ahead
from tlora.sweep_spec import SweepSpec, forked, parse_sweep
from tlora.sweep_state import SweepState, refuse_changes, statuses

_WISH, _ROW = ".wish.json", ".row.json"


@dataclass(frozen=True, slots=True)
class Wish:
    """What is wanted of a sweep. `number` tells one wish from the next."""

    spec: dict[str, Any]
    state: State = State.RUNNING
    """PAUSED and CANCELLED are the others."""
    number: int = 1
    submitted_s: float = 0.0
    forks: Sequence[Mapping[str, Any]] = ()
    """Of its leaders: `of`, with `changes` (`dotted.key=value`), asked for by `key`. Those that were taken up stay."""


@dataclass(frozen=True, slots=True)
class Row:
    """How far a sweep has come. `number`: of the wish that this answers."""

    number: int
    state: State
    reason: str = ""
    num_ended: int = 0
    num_candidates: int = 0
    best_loss: float | None = None
    changed_s: float = 0.0
    ahead: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Of each candidate that has not ended, samples: those that it is expected to take yet, those to its end without an
    exit, and those after which this was said."""


class Foretold(NamedTuple):
    """What a sweep expects of a candidate, in samples, after so many."""

    sweep: str
    expected: float
    way: float
    samples: int

    def steps(self, step: int, batch: int) -> tuple[float, float]:
        """Expected yet, and to its end, now that it has taken `step` steps of `batch` sequences."""
        done = max(step * batch - self.samples, 0)
        return max((self.expected - done) / batch, 1.0), max((self.way - done) / batch, 1.0)


class Register:
    """The files below a cluster's folder of outputs."""

    def __init__(self, outputs: Path):
        self._root, self._folder = outputs, outputs / "_tlora" / "sweeps"
        self._read: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
        """What each file holds, and by what it would be seen that it was replaced."""

    def names(self) -> list[str]:
        return sorted(path.name.removesuffix(_WISH) for path in self._folder.glob(f"*{_WISH}"))

    def wish(self, name: str) -> Wish:
        return Wish(**self._values(f"{name}{_WISH}"))

    def row(self, name: str) -> Row | None:
        """None: nothing is known of it yet."""
        try:
            return Row(**self._values(f"{name}{_ROW}"))
        except FileNotFoundError:
            return None

    def _values(self, file: str) -> dict[str, Any]:
        """Of a file, which is read once, until it is replaced: most sweeps have ended, and all are looked at often."""
        path = self._folder / file
        found = path.stat()
        mark = found.st_mtime_ns, found.st_size, found.st_ino
        if file not in self._read or self._read[file][0] != mark:
            values = json.loads(path.read_text(encoding="utf-8"))
            self._read[file] = mark, values | {"state": State(values["state"])}
        return self._read[file][1]

    def is_open(self, name: str) -> bool:
        """Whether there is something to be done for it."""
        row, wish = self.row(name), self.wish(name)
        return row is None or row.number < wish.number or row.state is State.RUNNING

    def tell(self, name: str, row: Row) -> None:
        self._write(name, _ROW, asdict(row))

    def ahead(self) -> dict[str, "Foretold"]:
        """What is expected of the candidates of all open sweeps, by name."""
        rows = {name: row for name in self.names() if (row := self.row(name)) and row.state is State.RUNNING}
        return {
            candidate: Foretold(name, *numbers)
            for name, row in rows.items()
            for candidate, numbers in row.ahead.items()
        }

    def placed(self, spec: SweepSpec) -> SweepSpec:
        """With its output below the cluster's folder of outputs, if it does not say where."""
        return spec.model_copy(update={"output": str(self._root / spec.output)})

    def submit(self, spec: SweepSpec, now_s: float) -> bool:
        """Take a sweep in, or go on with it by another budget; whether there was anything to do. Raises SpecError if it
        is known with other settings, StateError if it is cancelled."""
        spec = self.placed(spec)
        values = spec.model_dump(mode="json")
        if spec.name not in self.names():
            self._wish(spec.name, Wish(values, submitted_s=now_s))
            return True
        known = self.wish(spec.name)
        refuse_changes(known.spec, spec)
        if known.spec == values:
            return False
        if known.state is State.CANCELLED:
            raise StateError(f"sweep {spec.name} is cancelled: it cannot be extended. Submit it under another name.")
        self._wish(spec.name, replace(known, spec=values, state=State.RUNNING, number=known.number + 1))
        return True

    def fork(self, name: str, key: str, changes: Sequence[str]) -> str:
        """Have one more candidate, the leader with changes, from its best adapter; the leader's name. Asked again by
        the same key, nothing more. Raises StateError if none leads, SpecError if that would be no candidate."""
        known = self.wish(name)
        if asked := [fork for fork in known.forks if fork["key"] == key]:
            return str(asked[0]["of"])
        spec = parse_sweep(known.spec)
        state = SweepState.load(spec.folder)
        if known.state is State.CANCELLED:
            raise StateError(f"sweep {name} is cancelled: its leader cannot be forked. Submit it under another name.")
        if state is None or state.leader is None:
            raise StateError(f"sweep {name}: no candidate leads yet, so there is none to fork. Wait for an evaluation.")
        forked(spec, state.leader.values, changes)  # or it is refused
        fork = {"key": key, "of": state.leader.name, "changes": list(changes)}
        self._wish(name, replace(known, number=known.number + 1, forks=(*known.forks, fork)))
        return state.leader.name

    def want(self, name: str, state: State) -> None:
        """What a user asks of a known sweep. Raises StateError."""
        known, row = self.wish(name), self.row(name)
        if State.CANCELLED in (known.state, row.state if row else None) and state is not State.CANCELLED:
            raise StateError(f"sweep {name} is cancelled: it cannot become {state}. Submit it under another name.")
        if state is State.PAUSED and row is not None and row.state.is_terminal:
            raise StateError(f"sweep {name} is {row.state}: it cannot become {state}.")
        if state is not known.state or (state is State.RUNNING and not self.is_open(name)):
            self._wish(name, replace(known, state=state, number=known.number + 1))

    def status(self, name: str) -> dict[str, Any]:
        """Ready for JSON, in the columns of a job."""
        wish, row = self.wish(name), self.row(name)
        state = row.state if row else State.QUEUED
        if row and row.number < wish.number and wish.state is State.RUNNING:
            state = State.QUEUED
        return {
            "name": name,
            "state": state.value,
            "reason": row.reason if row else "",
            "step": row.num_ended if row else 0,
            "num_steps": row.num_candidates if row else 0,
            "loss": None,
            "eval_loss": row.best_loss if row else None,
            "tokens": 0,
            "tokens_per_s": 0.0,
            "worker": "",
            "output": wish.spec["output"],
            "submitted_s": wish.submitted_s,
            "changed_s": row.changed_s if row else wish.submitted_s,
        }

    def _wish(self, name: str, wish: Wish) -> None:
        self._write(name, _WISH, asdict(wish))

    def _write(self, name: str, suffix: str, values: Mapping[str, Any]) -> None:
        """Raises OSError where the outputs are away: beneath their mount nobody would find it again."""
        try:
            self._folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            text = f"sweep {name} cannot be written down: there is no {self._folder.parent}."
            raise FileNotFoundError(f"{text} See that the folder of outputs is there.") from None
        with atomic_path(self._folder / f"{name}{suffix}") as path:
            path.write_text(json.dumps(values), encoding="utf-8")


def row_of(state: SweepState, halving: Halving | None, number: int, now: State, reason: str, now_s: float) -> Row:
    """What a sweep's record says of it in one line."""
    leader = state.leader
    best = f"; best {leader.name} with {leader.best_loss:.4f}" if leader else ""
    text = "; ".join(filter(None, (reason, f"{statuses(state.candidates)}{best}" if state.candidates else "")))
    coming = {
        name: (before.expected, before.way, state[name].samples) for name, before in ahead(state, halving).items()
    }
    if coming and now is State.RUNNING:
        text += f"; about {sum(expected for expected, _, _ in coming.values()):,.0f} samples to go"
    ended = sum(not one.status.is_open for one in state.candidates)
    loss = leader.best_loss if leader else None
    return Row(number, now, text, ended, len(state.candidates), loss, now_s, coming)

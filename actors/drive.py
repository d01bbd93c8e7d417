"""One sweep of a cluster, driven by its newest wish: its candidates are jobs of the scheduler, beside all others.

Run by the actor of `tlora.actors.sweeps`, a thread a sweep. What happens to candidates is `tlora.sweep_run`'s to say.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import ray

from tlora.actors.names import NAMESPACE, SCHEDULER
from tlora.actors.register import Register, Wish, row_of
from tlora.checkpoint import JobFolder
from tlora.data import JobData
from tlora.errors import StateError, TloraError
from tlora.job import State
from tlora.spec import JobSpec
from tlora.sweep import EarlyExit, Halt, samples_at
from tlora.sweep_run import News, SweepRun
from tlora.sweep_spec import SweepSpec, parse_sweep
from tlora.sweep_state import Status, SweepState
from tlora.tracking import METRICS, read_metrics

log = logging.getLogger("tlora")
_LOOK_S = 0.2
_TELL_S = 1.0
_EVERYBODY = 10**6
_OUT = (Status.EXITED, Status.WAITING, Status.FAILED)
_TO_ITS_END = Halt(rules=EarlyExit(divergence=None, overfitting=None, halving=None))
"""A halt that never comes: so that one which rests has been paused by its user."""
Call = Callable[..., Any]
"""A method of the scheduler by name, and its arguments."""


class Drive:
    """One sweep, by its newest wish."""

    def __init__(
        self,
        register: Register,
        name: str,
        call: Call,
        library: AbstractContextManager[Any],
        *,
        counts_gpus: bool,
        mark: str | None = None,
    ):
        """`mark`: a file that is there unless the folder of outputs is away."""
        self._register, self._name, self._call, self._counts_gpus = register, name, call, counts_gpus
        self._mark = mark
        self._library = library
        self._told_s = 0.0
        self._refused = ""
        """Which fork could not be taken in, and why."""

    def run(self) -> None:
        """Until its wish is fulfilled, or there is another."""
        wish = self._register.wish(self._name)
        spec = parse_sweep(wish.spec)
        folder, state = JobFolder(spec.folder), SweepState(spec=wish.spec)
        try:
            folder.open(self._mark)
            state = SweepState.load(spec.folder) or state
            state.take(spec)
            self._tell(state, wish, State.RUNNING)
            places = ClusterPlaces(self._call, state, counts_gpus=self._counts_gpus)
            sweep = SweepRun(spec, state, places, lambda: self._is_to_stop(state, wish), self._library)
            self._fork(sweep, wish)
            sweep.run()
            newest = self._register.wish(self._name)
            if newest.state is State.CANCELLED:
                open_ones = [one.name for one in state.candidates if one.status.is_open]
                cancel(self._call, open_ones)
        except TloraError as error:
            log.error("sweep=%s failed: %s", self._name, error)
            self._tell(state, wish, State.FAILED, str(error))
            return
        finally:
            folder.close()
        if newest.number > wish.number and newest.state is State.RUNNING:
            return  # its settings have changed: it goes on by them
        stopped = State.CANCELLED if newest.state is State.CANCELLED else State.PAUSED
        self._tell(state, newest, stopped if state.stopped else State.FINISHED, state.stopped)

    def _fork(self, sweep: SweepRun, wish: Wish) -> None:
        """Take in what this sweep has not taken in yet. One that cannot be is let alone, and the sweep goes on."""
        state = sweep.state
        for fork in wish.forks[state.num_wished :]:
            state.num_wished += 1
            try:
                sweep.change((), fork["changes"], of=fork["of"])
            except (TloraError, OSError, ValueError, KeyError, RuntimeError) as error:
                self._refused = f"{fork['of']} is not forked with {' '.join(fork['changes'])}: {error}"
                log.error("sweep=%s %s", self._name, self._refused)
                state.save(sweep.spec.folder)

    def _is_to_stop(self, state: SweepState, wish: Wish) -> str | None:
        if time.monotonic() - self._told_s > _TELL_S:
            self._tell(state, wish, State.RUNNING)
        newest = self._register.wish(self._name)
        if newest.state is not State.RUNNING:
            return f"{newest.state} by its user"
        return "its settings have changed" if newest.number > wish.number else None

    def _tell(self, state: SweepState, wish: Wish, now: State, reason: str = "") -> None:
        self._told_s = time.monotonic()
        halving = SweepSpec.model_validate(wish.spec).early_exit.halving
        text = "; ".join(filter(None, (reason, self._refused)))
        self._register.tell(self._name, row_of(state, halving, wish.number, now, text, time.time()))


class ClusterPlaces:
    """Jobs of the scheduler. Who of them trains, and where, is its own to decide."""

    def __init__(self, call: Call, state: SweepState, *, counts_gpus: bool = False):
        self._call, self._state, self._counts_gpus = call, state, counts_gpus
        self._here: dict[str, tuple[JobSpec, int]] = {}
        """Candidates that train or are to, with the number of their training sequences."""
        self._halting: set[str] = set()
        self._samples = 0
        self._gpu_s, self._looked_s = 0.0, time.monotonic()

    def names(self) -> Sequence[str]:
        return list(self._here)

    def room(self) -> int:
        return _EVERYBODY

    def join(self, spec: JobSpec, data: JobData, halt: Halt | None) -> bool:
        self._call("train", spec.model_dump(mode="json"), (halt or _TO_ITS_END).model_dump(mode="json"))
        self._here[spec.name] = spec, len(data.train)
        self._halting.discard(spec.name)
        return True

    def leave(self, name: str, reason: str) -> News:
        self._call("explain", name, reason)
        self._here.pop(name, None)
        self._halting.discard(name)
        return News(name, State.PAUSED, 0, reason)

    def step(self) -> list[News]:
        time.sleep(_LOOK_S)
        out = [one.name for one in self._state.candidates if one.status in _OUT and one.name not in self._here]
        rows = self._rows([*self._here, *out])
        self._count(rows)
        return [news for row in rows if (news := self._news(row))]

    def _rows(self, names: list[str]) -> list[dict[str, Any]]:
        try:
            return list(self._call("status", names))
        except StateError:  # some never came to this scheduler: they could not, or were trained without it
            return known_rows(self._call, names)

    def _news(self, row: dict[str, Any]) -> News | None:
        name, state = row["name"], State(row["state"])
        if name not in self._here:  # it is out: its user alone can let it go on
            rests = state in (State.PAUSED, State.CANCELLED, State.FAILED) or not self._is_mine(row)
            return None if rests else News(name, State.RUNNING, _step_of(row))
        if state.is_terminal:
            del self._here[name]
            reason = row["reason"] or ("cancelled by its user" if state is State.CANCELLED else "")
            return News(name, state, _step_of(row), reason)
        if state is State.PAUSED and not row["halts"] and name not in self._halting:
            self._halting.add(name)
            return News(name, State.PAUSED, _step_of(row), row["reason"])
        return None

    def _is_mine(self, row: dict[str, Any]) -> bool:
        """A candidate has failed too if its name was another job's."""
        return bool(Path(row["output"]) == Path(self._state.spec["output"]) / "candidates" / row["name"])

    def _count(self, rows: Sequence[dict[str, Any]]) -> None:
        self._samples = 0
        for row in rows:
            if row["name"] in self._here:
                spec, num_sequences = self._here[row["name"]]
                self._samples += samples_at(row["step"], num_sequences, spec.batch_size)
        now_s = time.monotonic()
        if self._counts_gpus and now_s - self._looked_s > _TELL_S:
            for worker in self._call("workers"):
                mine = sum(name in self._here for name in worker["jobs"])
                gpus = max(len(worker["pids"]), 1)  # a row is a unit, with a GPU a process
                self._gpu_s += (now_s - self._looked_s) * gpus * mine / max(len(worker["jobs"]), 1)
            self._looked_s = now_s

    def samples(self) -> int:
        return self._samples

    def gpu_s(self) -> float:
        seconds, self._gpu_s = self._gpu_s, 0.0
        return seconds

    def lone(self) -> tuple[float, int]:
        return 0.0, 0  # it is the scheduler that knows who trains beside whom

    def close(self) -> list[News]:
        rows = known_rows(self._call, list(self._here))
        for row in rows:
            if not State(row["state"]).is_terminal:
                with suppress(StateError):  # it has ended meanwhile
                    self._call("pause", [row["name"]], "its sweep has stopped")
        while any(State(row["state"]) in (State.ATTACHING, State.RUNNING, State.QUEUED) for row in rows):
            time.sleep(_LOOK_S)
            rows = self._call("status", [row["name"] for row in rows])
        self._here.clear()
        return [News(row["name"], State(row["state"]), _step_of(row), row["reason"]) for row in rows]


def cancel(call: Call, names: Sequence[str]) -> None:
    """Of those that the scheduler has heard of, all that have not ended; their exact states are kept."""
    for row in known_rows(call, names):
        if not State(row["state"]).is_terminal:
            with suppress(StateError):  # it has ended meanwhile
                call("cancel", [row["name"]], True)


def known_rows(call: Call, names: Sequence[str]) -> list[dict[str, Any]]:
    """Of those that the scheduler has heard of."""
    wanted = set(names)
    return [row for row in call("status") if row["name"] in wanted]


def _step_of(row: dict[str, Any]) -> int:
    """Of a job that rests: what it has measured last, for the scheduler may have been started anew since."""
    folder = Path(row["output"])
    rows = read_metrics(folder) if (folder / METRICS).exists() else []
    return int(rows[-1]["step"]) if rows else 0


def call(method: str, *arguments: Any) -> Any:
    """The scheduler's answer, once it and its storage are there. Raises TloraError."""
    while True:
        try:
            scheduler = ray.get_actor(SCHEDULER, namespace=NAMESPACE)
            return ray.get(getattr(scheduler, method).remote(*arguments))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TloraError):
                raise error.cause from None
            if not isinstance(error.cause, OSError):
                raise
            log.warning("the scheduler's storage does not answer: %s", error.cause)
            time.sleep(_TELL_S)
        except (ray.exceptions.RayError, ValueError) as error:
            log.debug("the scheduler does not answer: %s", error)
            time.sleep(_TELL_S)

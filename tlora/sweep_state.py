"""Where a sweep stands: its candidates, what they read at each rung, who leads. One file, replaced whole.

A record, with the verdicts that follow from it: no torch, no clock. Kept by `tlora.sweep_run`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tlora.errors import CheckpointError, SpecError
from tlora.files import atomic_path
from tlora.paths import by_name
from tlora.sweep import Curve, Exit, Halving, Reading, Verdict
from tlora.sweep_spec import Result, SweepSpec, Values, parse_sweep

_FILE, _FORMAT = "sweep.json", 1
_FREE = ("budget", "places", "save_every_evaluations", "output")  # may change between a stop and its resume


class Status(StrEnum):
    QUEUED = "queued"
    """To be trained, or in training."""
    WAITING = "waiting"
    """Paused at a rung, until its siblings' losses there decide."""
    EXITED = "exited"
    """Paused for good by a rule, unless it is revived."""
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_open(self) -> bool:
        return self in (Status.QUEUED, Status.WAITING)


@dataclass(slots=True, kw_only=True)
class Candidate:
    """One job of a sweep."""

    number: int
    name: str
    values: Values
    num_siblings: int
    """Candidates with lower numbers are those it is judged among, itself included: its own wave and all before."""
    total: int
    """Samples of its whole training."""
    eval_every: int
    status: Status = Status.QUEUED
    reason: str = ""
    is_fork: bool = False
    """Starts from a leader's adapter: its samples are not its siblings'."""
    is_exempt: bool = False
    """Revived: no rule ends it again."""
    passed: int = 0
    """Rungs at which it was let go on."""
    readings: list[Reading] = field(default_factory=list)
    """Its validation loss at each rung it has reached."""
    exited_at: int | None = None
    """The rung at which its siblings ended it."""
    ended_by: str = ""
    """The rule that ended it, if one did."""
    start: float | None = None
    """Of a fork: the loss that its leader's first batch had, which the base alone answered."""
    step: int = 0
    samples: int = 0
    num_evaluations: int = 0
    best_loss: float | None = None
    best_samples: int | None = None
    has_best: bool = True
    """Whether its `best/` is the adapter of `best_loss`: of one that failed it may be an older one, or absent."""
    best_tie: float = 0.0
    """Of two equal shares, the better one is that of the lower loss, which is this."""

    def end(self, found: Exit) -> None:
        """By its own curve."""
        self.status, self.ended_by, self.reason = Status.EXITED, *found

    def revive(self) -> None:
        """Reverse its exit, or its failure."""
        self.status, self.reason, self.is_exempt, self.has_best = Status.QUEUED, "", True, True
        self.exited_at, self.ended_by = None, ""

    @property
    def is_ranked(self) -> bool:
        """Whether it is compared with siblings from here on."""
        return not (self.is_fork or self.is_exempt)

    @property
    def is_due(self) -> bool:
        """Whether it has reached a rung at which nothing is decided yet."""
        return self.is_ranked and self.status.is_open and len(self.readings) > self.passed


@dataclass(slots=True, kw_only=True)
class SweepState:
    """All that a sweep has to know again after a crash; the candidates' own states are in their folders."""

    spec: dict[str, Any]
    every: int = 0
    """Samples between evaluations."""
    longest: int = 0
    """Samples of the longest candidate of the first wave."""
    num_validation: int = 0
    rungs: list[int] = field(default_factory=list)
    spent_s: float = 0.0
    """Seconds in training, restarts included."""
    gpu_s: float = 0.0
    """Seconds of GPUs."""
    lone_s: float = 0.0
    """Seconds in which one candidate trained alone, its evaluations included, as far as that was seen."""
    lone_samples: int = 0
    """What it trained on in these."""
    stopped: str = ""
    """Why it ended before its candidates had."""
    candidates: list[Candidate] = field(default_factory=list)
    num_wished: int = 0
    """Forks of the leader that a cluster's user has asked for, as far as they were taken up."""

    @classmethod
    def load(cls, folder: Path) -> "SweepState | None":
        """None if there is none yet. Raises CheckpointError if it is damaged."""
        path = folder / _FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if (got := values.pop("format")) != _FORMAT:
                raise CheckpointError(f"{path}: has format {got}; want {_FORMAT}. Use the tLoRA that wrote it.")
            for row in values["candidates"]:
                row["status"] = Status(row["status"])
                row["readings"] = [Reading(**reading) for reading in row["readings"]]
            values["candidates"] = [Candidate(**row) for row in values["candidates"]]
            return cls(**values)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: is damaged ({error}). Choose another output to begin anew.") from error

    def save(self, folder: Path) -> None:
        with atomic_path(folder / _FILE) as path:
            path.write_text(json.dumps({"format": _FORMAT, **asdict(self)}, indent=1), encoding="utf-8")

    def take(self, spec: SweepSpec) -> None:
        """Go on by this spec. Raises SpecError if it is not the sweep that was saved; its budget may be another."""
        refuse_changes(self.spec, spec)
        drawn = sum(not one.is_fork for one in self.candidates)
        if drawn > spec.num_configurations:
            raise SpecError(
                f"budget.configurations = {spec.num_configurations}: {drawn} are drawn already; want as many or more."
            )
        self.spec, self.stopped = spec.model_dump(mode="json"), ""

    def __getitem__(self, name: str) -> Candidate:
        for one in self.candidates:
            if one.name == name:
                return one
        names = ", ".join(one.name for one in self.candidates) or "none"
        raise SpecError(f"the sweep has no candidate {name}; want one of {names}.")

    @property
    def drawn(self) -> list[Candidate]:
        return [one for one in self.candidates if not one.is_fork]

    @property
    def results(self) -> list[Result]:
        """Of those drawn, for the sampler. Who has over-fitted has shown its best, as who has finished."""
        return [
            Result(
                samples=one.samples,
                loss=one.best_loss,
                finished=one.status is Status.FINISHED or one.ended_by == "overfitting",
            )
            for one in self.drawn
        ]

    @property
    def samples(self) -> int:
        """Trained on by all candidates."""
        return sum(one.samples for one in self.candidates)

    def ranking(self) -> list[Candidate]:
        """By the lowest validation loss reached, equal shares by the loss there, equals by number; those without one
        last."""
        return sorted(
            self.candidates, key=lambda one: (one.best_loss is None, one.best_loss or 0.0, one.best_tie, one.number)
        )

    @property
    def leader(self) -> Candidate | None:
        """The first in the ranking whose best adapter is there."""
        return next((one for one in self.ranking() if one.best_loss is not None and one.has_best), None)

    def verdict(self, one: Candidate, halving: Halving, rung: int | None = None) -> Verdict | None:
        """At a rung that a candidate has reached, by default the one that is due; None: siblings could change it."""
        rung = one.passed if rung is None else rung
        siblings = [other for other in self.drawn if other.number < one.num_siblings]
        readings = {other.name: other.readings[rung] for other in siblings if len(other.readings) > rung}
        num_open = sum(
            other.status.is_open and other.is_ranked and len(other.readings) <= rung and other.total >= self.rungs[rung]
            for other in siblings
        )
        return halving.judge(rung, one.name, readings, len(siblings), num_open)

    def measure(self, one: Candidate, curve: Curve, samples: int) -> None:
        """Bring a candidate's record up to what it has measured, its loss at the rungs that it has reached included."""
        one.samples, one.num_evaluations = samples, len(curve.evaluated)
        if curve.best is not None:
            (one.best_samples, one.best_loss), one.best_tie = curve.best, curve.best_tie
        while one.is_ranked and len(one.readings) < len(self.rungs):
            reading = curve.read(self.rungs[len(one.readings)])
            if reading is None:
                return
            one.readings.append(reading)

    def judge(self, halving: Halving | None) -> list[Candidate]:
        """Give all verdicts that can be given at rungs; returns the candidates that got one. Those that are let go on
        and were waiting are queued again."""
        judged: list[Candidate] = []
        while halving is not None:
            before = len(judged)
            for one in self.candidates:
                verdict = self.verdict(one, halving) if one.is_due else None
                if verdict is None:
                    continue
                judged.append(one)
                if verdict.goes_on:
                    one.passed += 1
                    if one.status is Status.WAITING and not one.is_due:
                        one.status, one.reason = Status.QUEUED, ""
                else:
                    one.status, one.exited_at, one.ended_by = Status.EXITED, one.passed, "halving"
                    one.reason = self.beaten(one.passed, verdict)
            if len(judged) == before:
                break
        return judged

    def explain_exits(self, halving: Halving | None) -> None:
        """Put the numbers of all siblings into the reasons of those that siblings ended, now that all have arrived."""
        for one in self.candidates:
            if halving is None or one.exited_at is None or one.status is not Status.EXITED:
                continue
            verdict = self.verdict(one, halving, one.exited_at)
            if verdict is not None and not verdict.goes_on:
                one.reason = self.beaten(one.exited_at, verdict)

    def beaten(self, rung: int, verdict: Verdict) -> str:
        return f"under-performs at {self.rungs[rung]} samples: {verdict.reason}"


def refuse_changes(old: Mapping[str, Any], spec: SweepSpec) -> None:
    """Raise SpecError if a sweep is to go on with other settings than its budget and the like."""
    old, new = (by_name(each).model_dump(mode="json") for each in (parse_sweep(old), spec))
    if changed := [key for key in new if key not in _FREE and new[key] != old.get(key)]:
        lines = [f"{key}: {old.get(key)!r} was, {new[key]!r} is asked" for key in changed]
        raise SpecError(f"{spec.folder} holds a sweep with other settings: {'; '.join(lines)}. Put them back.")


def statuses(candidates: Sequence[Candidate]) -> str:
    """How many are where, as in `3 finished, 13 exited`."""
    counts = {status: sum(one.status is status for one in candidates) for status in Status}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)

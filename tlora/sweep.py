"""When a candidate of a sweep ends early: rules over its losses and its siblings'. No torch, no Ray, no clock.

A *candidate* is a job of a sweep; its position is counted in *samples*, the sequences that it has trained on. Rules
compare like with like: losses over the same validation rows, at the same number of samples. What they decide depends on
the candidates' own curves alone, never on when these arrive: a sweep that is killed and resumed decides the same.
Called by whoever trains a candidate (`tlora.halting`) and by `tlora.sweep_run`; each exit can be reversed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from tlora.spec import Fraction, NotNegative, Spec

Point = tuple[int, float]
"""Samples trained on, and a loss there."""
_FEW = 4
"""Second differences, fewer of which tell no scatter."""
_NORMAL = 0.6744897501960817
"""The median of the absolute value of a standard normal variable."""


def samples_at(step: int, num_sequences: int, batch_size: int) -> int:
    """Samples that `step` optimizer steps have seen: the last batch of each epoch may be short."""
    epochs, steps = divmod(step, math.ceil(num_sequences / batch_size))
    return epochs * num_sequences + min(steps * batch_size, num_sequences)


def scatter(values: Sequence[float]) -> float:
    """Standard deviation of values around a trend, infinite if there are too few to know: the median of the absolute
    second differences, which neither a slope nor some outliers move (for independent normal noise, × 1 / 0.6745√6)."""
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return median(bends) / (_NORMAL * math.sqrt(6)) if len(bends) >= _FEW else math.inf


@dataclass(frozen=True, slots=True)
class Reading:
    """A candidate's validation loss at a number of samples, and the standard error of that loss."""

    loss: float
    error: float
    tie: float = 0.0
    """Who is better of two equal shares: the mean loss over the same rows."""
    is_later: bool = False
    """Measured after more samples, for there was no evaluation before: it compares with nobody's."""


@dataclass(frozen=True, slots=True)
class Curve:
    """What one candidate has measured so far."""

    train: Sequence[Point]
    """After each optimizer step: the mean loss of its batch."""
    evaluated: Sequence[Point]
    """The mean loss over the validation rows, or what else is to be low."""
    batch_size: int
    num_validation: int
    """Validation rows."""
    is_share: bool = False
    """Evaluations are shares of the validation rows that were not answered exactly, rather than losses."""
    losses: Sequence[Point] = ()
    """The mean loss over the validation rows, where evaluations are shares."""

    @classmethod
    def of(
        cls, rows: Iterable[Mapping[str, Any]], num_sequences: int, batch_size: int, num_validation: int, objective: str
    ) -> "Curve":
        """From the rows of a job's metrics.jsonl."""
        train: list[Point] = []
        evaluated: list[Point] = []
        losses: list[Point] = []
        is_share = objective == "exact_match"
        for row in rows:
            at = samples_at(row["step"], num_sequences, batch_size)
            if row.get("loss") is not None:
                train.append((at, row["loss"]))
            if row.get(objective) is not None:
                evaluated.append((at, 1.0 - row[objective] if is_share else row[objective]))
                if is_share:
                    losses.append((at, row["eval_loss"]))
        return cls(train, evaluated, batch_size, num_validation, is_share, losses)

    @property
    def best(self) -> Point | None:
        """The lowest evaluation; of equal shares that of the lowest loss, of equals the first."""
        ties = dict(self.losses)
        return min(self.evaluated, key=lambda point: (point[1], ties.get(point[0], 0.0)), default=None)

    @property
    def best_tie(self) -> float:
        """The loss at the best share; 0 where evaluations are losses themselves."""
        return dict(self.losses).get(self.best[0], 0.0) if self.best else 0.0

    def until(self, samples: int) -> "Curve":
        """The curve as it was after that many samples."""
        kept = (self.train, self.evaluated, self.losses)
        train, evaluated, losses = ([point for point in points if point[0] <= samples] for points in kept)
        return replace(self, train=train, evaluated=evaluated, losses=losses)

    def mean_loss(self, after: float, until: float) -> float:
        """Mean training loss of the steps after `after` samples, those at `until` included; nan if there are none."""
        losses = [loss for at, loss in self.train if after < at <= until]
        return fmean(losses) if losses else math.nan

    def read(self, samples: int) -> Reading | None:
        """The validation loss at exactly so many samples: measured there, or on the line between the evaluations around
        it; None before the first evaluation that is as far. Of large batches that may be the first of all: what it
        tells is of more samples, and is marked so.

        Its standard error is what the mean over the validation rows has if these scatter as training sequences do:
        the scatter of the batches' losses so far × √(batch size / validation rows). Siblings are judged on the same
        rows, so part of that error is common to them, and the error of a difference is less than this says. That of a
        share is a binomial one's, with one success and one failure added.
        """
        value = _value_at(self.evaluated, samples)
        if value is None:
            return None
        tie = _value_at(self.losses, samples) or 0.0
        return Reading(value, self._error(value, samples), tie, is_later=self.evaluated[0][0] > samples)

    def share_error(self, share: float) -> float:
        smoothed = (share * self.num_validation + 1) / (self.num_validation + 2)
        return math.sqrt(smoothed * (1 - smoothed) / self.num_validation)

    def _error(self, value: float, samples: int) -> float:
        if self.is_share:
            return self.share_error(value)
        spread = scatter([loss for step, loss in self.train if step <= samples])
        return spread * math.sqrt(self.batch_size / self.num_validation)


def _value_at(points: Sequence[Point], samples: int) -> float | None:
    """On the line between the points around; of the first point, if that is farther."""
    before: Point | None = None
    for at, value in points:
        if at >= samples:
            if before is None or at == samples:
                return value
            return before[1] + (value - before[1]) * (samples - before[0]) / (at - before[0])
        before = at, value
    return None


class Divergence(Spec):
    """Ends a candidate whose loss has risen above its start.

    Statistic: the mean of the logarithms of the training losses since the evaluation before the last, over that of the
    first batch, which the base alone answers; `margin` scatters of the logarithm of one batch are allowed, for the
    start is one batch. Logarithms, since the scatter of an exploding loss grows with it. 4: of candidates that learn
    nothing, 1 % or fewer are taken for diverging ones at an evaluation. (A loss that is no longer finite ends a job
    anyway.)

    A candidate that starts from an adapter knows its rows, and a fresh rate lifts its loss for a while: a fork of a
    leader is measured by the leader's own start (that of the base), and where all start from an adapter of their
    user's, for which none is known, the rule is not applied.
    """

    margin: NotNegative = 4.0

    def judge(self, curve: Curve, start: float | None = None) -> str | None:
        """At an evaluation: why the candidate is to end, or None. `start`: the loss to be above of, by default that of
        its first batch."""
        if not curve.evaluated or not curve.train:
            return None
        after = curve.evaluated[-2][0] if len(curve.evaluated) > 1 else 0
        logs = [(at, math.log(max(loss, 1e-12))) for at, loss in curve.train]
        start = curve.train[0][1] if start is None else start
        recent = fmean([value for at, value in logs if at > after] or [logs[-1][1]])
        bound = math.log(max(start, 1e-12)) + self.margin * scatter([value for _, value in logs])
        if recent <= bound:
            return None
        return (
            f"diverged: training loss {math.exp(recent):.4g} (mean of samples {after} to {curve.train[-1][0]}) is above"
            f" its start, {start:.4g}, by more than its noise allows ({math.exp(bound):.4g})"
        )


class Overfitting(Spec):
    """Ends a candidate whose validation loss rises while its training loss falls; its best checkpoint stays.

    Statistic: the lowest of the last `patience` validation losses, over the lowest of all; it must lie above that by
    `margin` scatters of the validation loss: with 5, white noise on a plateau passes at 0.3 % of them at most. And
    the mean training loss since the best must be below that of as many samples before it. The rows are the same at
    each evaluation, so their choice adds no noise to a loss. A share moves by whole rows, and where it mostly stands
    still the scatter is nothing: it must also lie above the best by `rows` binomial standard errors of the best share.
    """

    patience: Annotated[int, Field(strict=True, ge=1, le=1000)] = 6
    """Evaluations. 6 of 36: a sixth of the longest run. Training loss falls at each new epoch, whatever validation
    does, and the minimum often comes only as the rate decays: with 3 a bump after an epoch's end takes out a finalist.
    Each exit comes 3 evaluations of one candidate later for it (0.35 % of the samples of 24)."""
    rows: NotNegative = 2.0
    """Of shares alone, in standard errors. 2: three rows of 200, where nearly all or nearly none are answered."""
    margin: NotNegative = 5.0

    def judge(self, curve: Curve) -> str | None:
        """At an evaluation: why the candidate is to end, or None."""
        best = curve.best
        if best is None or len([at for at, _ in curve.evaluated if at > best[0]]) < self.patience:
            return None
        losses = [loss for _, loss in curve.evaluated]
        lowest, now = min(losses[-self.patience :]), curve.evaluated[-1][0]
        noise = self.margin * scatter(losses)
        if curve.is_share:
            noise = max(noise, self.rows * curve.share_error(best[1]))
        if not lowest > best[1] + noise:
            return None
        earlier = curve.mean_loss(2 * best[0] - now, best[0])
        later = curve.mean_loss(best[0], now)
        if not later < earlier:
            return None
        return (
            f"over-fitted: the last {self.patience} validation losses are {lowest:.4f} or more, the best was "
            f"{best[1]:.4f} at {best[0]} samples; training loss fell from {earlier:.4f} to {later:.4f} meanwhile"
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a candidate goes on past a rung, and why."""

    goes_on: bool
    reason: str


class Halving(Spec):
    """Ends a candidate that siblings out-perform at equal samples: asynchronous successive halving (Li et al., MLSys
    2020) with a margin.

    *Rungs* lie at `warmup` of the longest candidate's samples and `eta` times further each. Of n candidates the best
    n / eta, n / eta², … (rounded up) go on past them, and so does who is not clearly worse: a sibling is *clearly
    better* if the losses differ by more than `margin` standard errors of their difference. A late bloomer that noise
    has put just behind is kept so. At most `most` times as many go on, or `finalists`, which bounds the price: with the
    defaults 24 candidates of equal length take at most 27.55 % of their samples, however noisy; without noise 16 %.
    Equal shares are ranked by the loss over the same rows, equals by number. A candidate of batches so large that its
    first evaluation lies past a rung is compared with nobody there, and goes on to the next.

    A verdict is given as soon as no sibling that is still on its way can change it, so its time depends on who arrives
    first, and what it is does not.
    """

    warmup: Annotated[Fraction, Field(gt=0.0)] = 1 / 18
    """First rung, as a share of the longest candidate's samples, rounded down to evaluations. 1/18: two of 36 lie
    before it or at it, all candidates together pay 5.6 % for it at most, and the last rung lies at half of the way."""
    eta: Annotated[int, Field(strict=True, ge=2, le=100)] = 3
    margin: NotNegative = 1.5
    """In standard errors: with 1.5 a planted late bloomer, of rank 10 where 8 go on, behind by a third of the noise, is
    kept in 19 of 20 draws; with 1 in 17, with 0 in 12."""
    most: Annotated[NotNegative, Field(ge=1.0)] = 2.0
    finalists: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 3
    """So many may go on past any rung, if they are within the margin. 3: at the last rung the rate has half decayed,
    ranks still change, and those who are left are close; `most` alone would leave two."""

    def rungs(self, longest: int, every: int) -> list[int]:
        """In samples, each a multiple of `every`, which lies between evaluations; all before the end."""
        first = max(1, int(self.warmup * longest / every + 1e-9)) * every
        rungs: list[int] = []
        while (at := first * self.eta ** len(rungs)) < longest:
            rungs.append(at)
        return rungs

    def keep(self, rung: int, num: int) -> int:
        """How many of `num` candidates go on past a rung, counted from 0."""
        return max(1, math.ceil(num / float(self.eta) ** (rung + 1)))

    def most_of(self, rung: int, num: int) -> int:
        """How many go on past it at most, those within the margin included."""
        return max(math.floor(self.most * self.keep(rung, num)), self.finalists)

    def judge(self, rung: int, name: str, readings: Mapping[str, Reading], num: int, num_open: int) -> Verdict | None:
        """Of a candidate among the `readings` of a rung, in the sweep's order. `num` candidates set out, and `num_open`
        may still arrive. None: they could change it."""
        if readings[name].is_later:
            return Verdict(True, "is not compared: its first evaluation lies past the rung")
        keep, most = self.keep(rung, num), self.most_of(rung, num)
        better, clearly = self._better(name, readings)
        if len(clearly) < keep and len(better) < most:
            if len(clearly) + num_open < keep and len(better) + num_open < most:
                return Verdict(True, self._explain(rung, name, readings, num))
            return None
        return Verdict(False, self._explain(rung, name, readings, num))

    def _better(self, name: str, readings: Mapping[str, Reading]) -> tuple[list[str], list[str]]:
        """Siblings that are better at equal samples (the earlier one of equals), and those of them that clearly are."""
        place = {
            other: (reading.loss, reading.tie, at)
            for at, (other, reading) in enumerate(readings.items())
            if not reading.is_later
        }
        mine = readings[name]
        better = [other for other in place if place[other] < place[name]]
        clearly = [
            other
            for other in better
            if mine.loss - readings[other].loss > self.margin * math.hypot(mine.error, readings[other].error)
        ]
        return better, clearly

    def _explain(self, rung: int, name: str, readings: Mapping[str, Reading], num: int) -> str:
        mine, keep = readings[name], self.keep(rung, num)
        better, clearly = self._better(name, readings)
        compared = [reading for reading in readings.values() if not reading.is_later]
        ranked = sorted(compared, key=lambda reading: (reading.loss, reading.tie))
        last = ranked[min(keep, len(ranked)) - 1]
        return (
            f"{len(better)} of {len(ranked) - 1} siblings are better at equal samples, {len(clearly)} clearly: "
            f"validation loss {mine.loss:.4f} ± {mine.error:.4f}, the best {ranked[0].loss:.4f}, of rank {keep} "
            f"{last.loss:.4f} ± {last.error:.4f}; {keep} of {num} go on, at most {self.most_of(rung, num)} with "
            f"those within {self.margin:g} standard errors"
        )


class Exit(NamedTuple):
    """What a candidate's own curve says against it."""

    rule: str
    """Its name among the fields of EarlyExit."""
    reason: str


class EarlyExit(Spec):
    """The rules of a sweep; one that is null is not applied."""

    evaluations: Annotated[int, Field(strict=True, ge=2, le=10_000)] = 36
    """Of the longest candidate, evenly spread over its samples; the others are evaluated after as many samples."""
    divergence: Divergence | None = Divergence()
    overfitting: Overfitting | None = Overfitting()
    halving: Halving | None = Halving()

    def judge_alone(self, curve: Curve, start: float | None = None) -> Exit | None:
        """What a candidate's own curve says at an evaluation: why it is to end, or None. `start`: as in Divergence."""
        if self.divergence is not None and (reason := self.divergence.judge(curve, start)):
            return Exit("divergence", reason)
        if self.overfitting is not None and (reason := self.overfitting.judge(curve)):
            return Exit("overfitting", reason)
        return None


class Halt(Spec):
    """Where a candidate's training stops until its sweep lets it go on: at an evaluation, for whoever trains it."""

    until: Annotated[int, Field(strict=True, ge=0)] = 0
    """Samples of the rung ahead; 0: there is none."""
    rules: EarlyExit = EarlyExit()
    start: float | None = None
    """What its loss is to rise above to have diverged, if that is not the loss of its own first batch."""

    def judge(self, curve: Curve, samples: int) -> str | None:
        """At an evaluation after so many samples: why it halts there, or None."""
        if found := self.rules.judge_alone(curve, self.start):
            return found.reason
        return f"waits for its siblings at {samples} samples" if self.until and samples >= self.until else None


def interval(longest: int, evaluations: int, batch_sizes: Iterable[int]) -> int:
    """Samples between evaluations: a multiple of every batch size if that is not coarser than asked for, so that
    candidates are evaluated after equally many."""
    every = max(1, longest // evaluations)
    common = math.lcm(*batch_sizes)
    return max(1, every // common) * common if common <= 2 * every else every

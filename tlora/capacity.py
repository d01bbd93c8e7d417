"""How long a tick takes and what memory it needs: what a GPU still has to give. No torch, no Ray, no clock.

Fitted to a profile (`benchmarks/results/<gpu>/profile.json`, or one taken on the spot) and refined by the ticks that
workers report. Asked by `scheduling` and `simulate`. Times on several GPUs are modelled, not measured: `MODELLED`.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from tlora.errors import SpecError


@dataclass(frozen=True, slots=True)
class Modelled:
    """What no profile of one GPU tells. Every figure that depends on these is printed as modelled."""

    node_bytes_per_s: float = 84 * 2**20 / 0.32e-3
    """All-reduce between the GPUs of a node: two H200s over NVLink, 84 MiB in 0.32 ms by hand."""
    cluster_bytes_per_s: float = 20e9
    """The same between nodes: 400 Gb/s a GPU's network card, at two fifths of it."""
    checkpointing_time: float = 1.5
    """Of a tick whose layers run twice forward: three products for every two, since the base has no gradient."""
    rank_parameters: float = 5.1
    """Parameters of an adapter on every linear, for each rank: this times √(parameters × layers) of the base. Within
    3 % of Llama-3.1-8B (2.62 M) and Qwen3-8B (2.73 M)."""
    state_bytes: int = 18
    """A trained parameter's: float32 weight, gradient and two moments, and a copy in half precision."""


MODELLED = Modelled()
_FLOPS_PER_PARAMETER = 4
"""Of one token, forward and backward over a frozen base: there is no product for its weights' gradient."""
_STEP = 1.25
_NEAR_BEST, _CHEAPEST, _DEAREST = 1.03, 1.01, 2.0
_ENOUGH, _SURE, _BETTER = 64, 0.25, 0.02
_TOO_NEAR = 1e-9
_LEAST_MS, _MOST = 1e-6, 1e15
_NUMBERS = {
    "parameters": (0, True), "layers": (0, True), "jobs": (1, True), "rank_sum": (0, True), "tokens": (1, True),
    "longest": (0, True), "tick_ms": (_LEAST_MS, False), "peak_bytes": (0, True),
}  # fmt: skip
"""Of a measured tick: the least that can be, and whether it is whole."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one job asks of whatever GPU it is on."""

    rank: int
    batch: int
    """Sequences of an optimizer step."""
    length: int
    """Tokens of a sequence, at most."""

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.batch * self.length

    def part(self, gpus: int) -> int:
        """Tokens of a step on the fullest of so many GPUs: sequences are not cut."""
        return -(-self.batch // gpus) * self.length


@dataclass(frozen=True, slots=True)
class Tick:
    """One measured tick."""

    tokens: int
    jobs: int
    rank_sum: int
    tick_s: float
    peak_bytes: int = 0
    """0: not measured."""
    longest: int = 0
    """Tokens of a sequence; 0: as many as each job has."""

    @property
    def length(self) -> float:
        return self.longest or self.tokens / self.jobs


class Curve:
    """Seconds over tokens: linear between knots, never falling, beyond the last one as steep as it was on the whole.

    Where they rise faster than the tokens do, there is a step (ticks up to some size are replayed as CUDA graphs), and
    it is taken to be right after the lower knot.
    """

    def __init__(self, knots: Sequence[float], seconds: Sequence[float]):
        self.knots, self.seconds = list(map(float, knots)), list(map(float, seconds))
        self.slope = self._last_slope()

    def _last_slope(self) -> float:
        """From the knot at a quarter of the last one on: the last two are too near to tell."""
        start = bisect_right(self.knots, self.knots[-1] / 4) - 1
        run = self.knots[-1] - self.knots[max(start, 0)]
        return (self.seconds[-1] - self.seconds[max(start, 0)]) / run if run else self.seconds[-1] / self.knots[-1]

    def __call__(self, tokens: float) -> float:
        knots, seconds = self.knots, self.seconds
        at = bisect_right(knots, tokens)
        if at == 0:
            return seconds[0]
        if at == len(knots):
            return seconds[-1] + (tokens - knots[-1]) * self.slope
        if tokens > knots[at - 1] and seconds[at] * knots[at - 1] > _STEP * seconds[at - 1] * knots[at]:
            return seconds[at]
        part = (tokens - knots[at - 1]) / (knots[at] - knots[at - 1])
        return seconds[at - 1] + part * (seconds[at] - seconds[at - 1])


class BaseModel:
    """One base on one kind of GPU: tick time, memory, and what follows for jobs."""

    def __init__(
        self, ticks: Sequence[Tick], *, parameters: int, layers: int, memory_bytes: float = math.inf, budget: int = 0
    ):
        """`budget`: most tokens of a tick; 0: the fewest at which a token is about as cheap as it gets."""
        self.parameters, self.layers, self.memory_bytes, self.ticks = parameters, layers, memory_bytes, tuple(ticks)
        self.curve, self.per_rank_token, self.per_job, self.per_length_token = _fit_time(ticks)
        self._fixed_bytes, self._token_bytes = _fit_memory(ticks, self._adapter_bytes)
        self.error = _error(self, ticks)
        """Mean relative error over the ticks it was fitted to."""
        self.budget = budget or self._knee()
        """Tokens of a full tick of a job alone."""
        self.budgets = self._budgets()
        """Tokens that a full tick may be set to: small ones are fast, large ones cheap a token."""
        self.token_s = min(self.tick_s(size, length=min(size, 512.0)) / size for size in self.budgets)
        """Of a token, at its cheapest."""
        self._alone: dict[tuple[Load, int], float] = {}
        self._fastest: dict[tuple[Load, int], float] = {}

    def tick_s(
        self, tokens: float, jobs: int = 1, rank_sum: int = 16, length: float = 0.0, *, checkpointing: bool = False
    ) -> float:
        """Of a tick of so many tokens from so many jobs, whose ranks sum to `rank_sum` and share the tokens evenly, in
        sequences of `length` (0: of what each job has, up to 2048)."""
        length = length or min(tokens / jobs, 2048.0)
        seconds = self.curve(tokens) + self.per_job * (jobs - 1)
        seconds += tokens * (self.per_rank_token * rank_sum / jobs + self.per_length_token * length)
        return seconds * (MODELLED.checkpointing_time if checkpointing else 1.0)

    def alone_s(self, load: Load, gpus: int = 1) -> float:
        """Of an optimizer step of one job that has so many GPUs to itself, in a trainer as it is by default: a step is
        one tick, as far as it fits into memory. More than one GPU: modelled."""
        part = load.part(gpus)
        ticks = max(1, ceil(part / max(self.most_tokens(load.rank), load.length)))
        return ticks * self.tick_s(part / ticks, 1, load.rank, load.length) + self.reduce_s(load.rank, gpus)

    def best_alone_s(self, load: Load, gpus: int) -> float:
        """The same, with as many of the GPUs as help."""
        known = self._alone.get((load, gpus))
        if known is None:
            known = min(self.alone_s(load, used) for used in range(1, min(gpus, load.batch) + 1))
            self._alone[load, gpus] = known
        return known

    def fastest_s(self, load: Load, gpus: int = 1) -> float:
        """The same on just so many, with its ticks set to the budget that is best for it."""
        known = self._fastest.get((load, gpus))
        if known is None:
            known = self.cut(load.part(gpus), load.rank, load.length)[1] + self.reduce_s(load.rank, gpus)
            self._fastest[load, gpus] = known
        return known

    def cut(self, tokens: float, rank: int, length: float) -> tuple[float, float]:
        """Of one job alone on a GPU: tokens of each of its ticks, and seconds of a step of so many. One tick, or full
        ones of a budget that holds a sequence of `length`, whichever is fastest and fits."""
        most = min(max(self.most_tokens(rank), length), tokens)
        options = []
        for budget in (tokens, most, *self.budgets):
            size = min(max(budget // length, 1.0) * length, tokens)  # sequences are not cut
            if size <= most:
                options.append((size, tokens / size * self.tick_s(size, 1, rank, length)))
        return min(options, key=lambda option: option[1])

    def reduce_s(self, rank: int, gpus: int, nodes: int = 1) -> float:
        """Of summing a job's gradient over the GPUs that it is split over. Modelled."""
        if gpus == 1:
            return 0.0
        rate = MODELLED.node_bytes_per_s if nodes == 1 else MODELLED.cluster_bytes_per_s
        return 4 * self.adapter_parameters(rank) / rate

    def adapter_parameters(self, rank: int) -> float:
        return MODELLED.rank_parameters * math.sqrt(self.parameters * self.layers) * rank

    def _adapter_bytes(self, rank_sum: int) -> float:
        return MODELLED.state_bytes * self.adapter_parameters(rank_sum)

    def peak_bytes(self, tokens: float, rank_sum: int, *, checkpointing: bool = False) -> float:
        """Base, adapters of these ranks, and a tick of so many tokens. Checkpointed layers keep one input each and one
        layer's activations; modelled."""
        per_token = self._token_bytes
        if checkpointing:
            inputs = 2 * math.sqrt(self.parameters / 12 / self.layers) * self.layers
            per_token = min(per_token, per_token / self.layers + inputs)
        return self._fixed_bytes + self._adapter_bytes(rank_sum) + per_token * tokens

    def most_tokens(self, rank_sum: int) -> float:
        """Of a tick that fits into the GPU's memory beside adapters of these ranks."""
        if not self._token_bytes:
            return math.inf
        return max(0.0, (self.memory_bytes - self.peak_bytes(0, rank_sum)) / self._token_bytes)

    def flops(self, tokens: float) -> float:
        """Modelled, of useful tokens."""
        return _FLOPS_PER_PARAMETER * self.parameters * tokens

    def _budgets(self) -> tuple[int, ...]:
        costs = {size: self.tick_s(size, length=min(size, 512.0)) / size for size in self._sizes()}
        best = min(costs.values())
        useful = [size for size in costs if costs[size] <= _DEAREST * best]
        cheap = min((size for size in useful if costs[size] <= _CHEAPEST * best), default=useful[-1])
        return tuple(size for size in useful if size <= max(cheap, self.budget))

    def _sizes(self) -> list[int]:
        last = self.curve.knots[-1]
        return [64 * 2**at for at in range(20) if 64 * 2**at <= last] or [int(last)]

    def _knee(self) -> int:
        costs = {size: self.tick_s(size, length=min(size, 512.0)) / size for size in self._sizes()}
        best = min(costs.values())
        return int(min(size for size in costs if costs[size] <= _NEAR_BEST * best))


@dataclass(slots=True)
class Capacity:
    """What is known of one kind of GPU: its bases, and what PEFT takes there."""

    gpu: str
    models: dict[str, BaseModel] = field(default_factory=dict)
    peft: dict[str, "PeftModel"] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "Capacity":
        """From a profile's file. Raises SpecError if it is none."""
        try:
            content = json.loads(path.read_text())
            return cls.of(content)
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
        except (ValueError, KeyError, TypeError) as error:
            cause = str(error) if isinstance(error, SpecError) else repr(error)
            raise SpecError(f"{path}: want a profile, as `tlora profile` writes: {cause}") from None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Capacity":
        if not content["ticks"]:
            raise SpecError("no tick was measured: want at least one tick.")
        for at, row in enumerate(content["ticks"], 1):
            _check_row(f"tick {at}", row, _NUMBERS)
        for at, row in enumerate(content.get("peft", ()), 1):
            _check_row(f"PEFT step {at}", row, {"tokens": (1, True), "step_ms": (_LEAST_MS, False)})
        known = cls(str(content["gpu"]))
        memory = _memory_of(known.gpu)
        for base in dict.fromkeys(row["base"] for row in content["ticks"]):
            rows = [row for row in content["ticks"] if row["base"] == base]
            ticks = [
                Tick(
                    row["tokens"],
                    row["jobs"],
                    row["rank_sum"],
                    row["tick_ms"] / 1e3,
                    row.get("peak_bytes", 0),
                    row["longest"],
                )
                for row in rows
            ]
            known.models[base] = BaseModel(
                ticks, parameters=rows[0]["parameters"], layers=rows[0]["layers"], memory_bytes=memory
            )
            steps = [row for row in content.get("peft", ()) if row["base"] == base]
            if steps:
                known.peft[base] = PeftModel.of(steps)
        return known


@dataclass(frozen=True, slots=True)
class PeftModel:
    """One optimizer step of one eager PEFT job: the other measure of a lone job's speed."""

    curve: Curve
    most_tokens: int
    """Of one forward and backward that was measured: a larger batch is accumulated."""

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> "PeftModel":
        by_tokens: dict[int, list[float]] = {}
        for row in rows:
            by_tokens.setdefault(int(row["tokens"]), []).append(row["step_ms"] / 1e3)
        sizes = sorted(by_tokens)
        seconds = np.maximum.accumulate([sum(by_tokens[size]) / len(by_tokens[size]) for size in sizes])
        return cls(Curve(sizes, list(seconds)), sizes[-1])

    def alone_s(self, load: Load, gpus: int = 1) -> float:
        """Of an optimizer step. Several GPUs: its batch dealt to them, as far as it goes; modelled, communication
        left out, which flatters PEFT."""
        part = load.part(min(gpus, load.batch))
        passes = -(-part // self.most_tokens)
        return passes * self.curve(part / passes)


class Learner:
    """A model of one base that is refined by measured ticks: what a profile said, replaced where ticks say more.

    Ticks are kept by their size, to a half power of two, their number of jobs and mean rank, each as a running
    mean. What only the profile knows is taken to be as much slower or faster as the measured ticks are.
    """

    def __init__(self, prior: BaseModel | None = None):
        self._prior, self._kept = prior, dict[tuple[int, int, int], Tick]()
        self.model = prior
        """Another one only when that foretells the ticks clearly better: what is planned by it need not change else."""
        self.is_sure = prior is not None
        """Whether to plan by it: where there was a profile, it is at least right about what is dear beside what; else
        as long as it foretells ticks well enough, once there are enough."""
        self.error = math.nan
        """Running mean of |predicted / measured − 1|, before each tick was learnt from."""
        self._pace = 0.0
        """Running mean of the logarithm of measured over the profile's."""
        self._num_new, self._next_fit, self._wait = 0, 2, _ENOUGH

    def learn(self, tick: Tick) -> None:
        """Take in a measured tick. The model is fitted anew at the 2nd, 4th, 8th, … tick, then after 64 more, and after
        twice as many each time that nothing comes of it."""
        if self.model is not None:
            off = abs(_foretold(self.model, tick) / tick.tick_s - 1.0)
            self.error = off if math.isnan(self.error) else 0.95 * self.error + 0.05 * off
        if self._prior is not None:
            pace = math.log(tick.tick_s / _foretold(self._prior, tick))
            self._pace += (pace - self._pace) * max(0.05, 1.0 / (1 + self._num_new))
        cell, before = _cell(tick), self._kept.get(_cell(tick))
        mean = tick.tick_s if before is None else 0.8 * before.tick_s + 0.2 * tick.tick_s
        self._kept[cell] = replace(tick, tick_s=mean)
        self._num_new += 1
        if self._num_new >= self._next_fit:
            self._wait = _ENOUGH if self._fit() else 2 * self._wait
            self._next_fit += self._num_new if self._num_new < _ENOUGH else self._wait
        if self._prior is None and self._num_new >= _ENOUGH:
            self.is_sure = self.error < (2.0 * _SURE if self.is_sure else _SURE)

    def _fit(self) -> bool:
        """Whether another model is better."""
        measured, prior = list(self._kept.values()), self._prior
        pace = math.exp(self._pace)
        known = {_cell(tick): replace(tick, tick_s=pace * tick.tick_s) for tick in prior.ticks} if prior else {}
        ticks = list((known | self._kept).values())
        if len({tick.tokens for tick in ticks}) < 2:
            return False
        if prior is None:
            model = BaseModel(ticks, parameters=0, layers=0)
        else:
            model = BaseModel(
                ticks, parameters=prior.parameters, layers=prior.layers, memory_bytes=prior.memory_bytes,
                budget=prior.budget,
            )  # fmt: skip
        if self.model is not None and _error(self.model, measured) - _error(model, measured) < _BETTER:
            return False
        self.model = model
        return True


def _cell(tick: Tick) -> tuple[int, int, int]:
    rank = round(math.log2(max(tick.rank_sum / max(tick.jobs, 1), 1)))
    return round(2 * math.log2(max(tick.tokens, 1))), tick.jobs, rank


def _check_row(where: str, row: Mapping[str, Any], numbers: Mapping[str, tuple[float, bool]]) -> None:
    """Raise SpecError where a measured row says what cannot be."""
    if not isinstance(row["base"], str):
        raise SpecError(f"{where}: base: got {row['base']!r}; want a name.")
    for key, (least, is_whole) in numbers.items():
        value = row.get(key, 0) if key == "peak_bytes" else row[key]
        is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= _MOST:
            what = "a whole number" if is_whole else "a number"
            raise SpecError(f"{where}: {key}: got {value!r}; want {what} from {least:g} to {_MOST:g}.")


def _memory_of(gpu: str) -> float:
    """Bytes that a tick may use of a GPU whose memory is known by name, a tenth left to fragments and the driver."""
    sizes = {"H200": 141e9, "H100": 80e9, "A100": 80e9, "B200": 180e9}
    return next((0.9 * size for name, size in sizes.items() if name in gpu), math.inf)


def _fit_time(ticks: Sequence[Tick]) -> tuple[Curve, float, float, float]:
    """A curve over tokens, seconds for each token × mean rank, for each job, and for each token × length of its
    sequence: least squares of relative errors, no term negative, so that nothing gets faster by more work."""
    if not ticks:
        raise SpecError("no tick was measured: want at least one.")
    knots = sorted({tick.tokens for tick in ticks})
    columns = [np.ones(len(ticks))]
    tokens = np.array([tick.tokens for tick in ticks], float)
    for low, high in pairwise(knots):
        columns.append(np.clip((tokens - low) / (high - low), 0.0, 1.0))
    ranks = np.array([tick.rank_sum / tick.jobs for tick in ticks])
    columns.append(tokens * ranks if np.ptp(ranks) else np.zeros(len(ticks)))  # of one rank, the curve has it all
    columns.append(np.array([tick.jobs - 1.0 for tick in ticks]))
    columns.append(np.array([tick.tokens * tick.length for tick in ticks]))
    seconds = np.array([tick.tick_s for tick in ticks])
    found = _non_negative(np.stack(columns, 1) / seconds[:, None], np.ones(len(ticks)))
    *rises, per_rank_token, per_job, per_length_token = found
    return Curve(knots, list(np.cumsum(rises))), float(per_rank_token), float(per_job), float(per_length_token)


def _fit_memory(ticks: Sequence[Tick], adapter_bytes: Any) -> tuple[float, float]:
    """Bytes that are always there, and for each token, the adapters' own taken off."""
    known = [tick for tick in ticks if tick.peak_bytes]
    if len({tick.tokens for tick in known}) < 2:
        return (float(known[0].peak_bytes) if known else 0.0), 0.0
    peaks = np.array([tick.peak_bytes - adapter_bytes(tick.rank_sum) for tick in known])
    table = np.stack([np.ones(len(known)), np.array([tick.tokens for tick in known], float)], 1)
    fixed, per_token = _non_negative(table / peaks[:, None], np.ones(len(known)))
    return float(fixed), float(per_token)


def _error(model: BaseModel, ticks: Sequence[Tick]) -> float:
    return sum(abs(_foretold(model, tick) / tick.tick_s - 1.0) for tick in ticks) / len(ticks)


def _foretold(model: BaseModel, tick: Tick) -> float:
    return model.tick_s(tick.tokens, tick.jobs, tick.rank_sum, tick.length)


def _non_negative(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with every unknown at least 0 (Lawson & Hanson 1974: the set of positive ones grows by one, and
    those that would turn negative leave it)."""
    scale = np.maximum(np.sqrt((table**2).sum(0)), _TOO_NEAR)
    table = table / scale
    found, positive = np.zeros(table.shape[1]), np.zeros(table.shape[1], bool)
    for _ in range(3 * table.shape[1]):
        pull = table.T @ (wanted - table @ found)
        pull[positive] = -np.inf
        if pull.max(initial=-np.inf) <= _TOO_NEAR:
            break
        positive[int(pull.argmax())] = True
        while True:
            trial = np.zeros_like(found)
            trial[positive] = np.linalg.lstsq(table[:, positive], wanted, rcond=None)[0]
            if (trial[positive] > 0).all():
                break
            falling = positive & (trial <= 0)
            step = (found[falling] / np.maximum(found[falling] - trial[falling], _TOO_NEAR)).min()
            found = found + step * (trial - found)
            positive &= found > _TOO_NEAR
        found = trial
    result: np.ndarray = found / scale
    return result

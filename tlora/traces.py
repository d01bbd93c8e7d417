"""Jobs of a cluster, read from a trace or drawn: who asks for how many GPUs, when, for how long, and of what shape.

No public trace records rank, batch or length: those are drawn by a seed, as the tLoRA paper does.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlora.capacity import Capacity, Load
from tlora.errors import SpecError

RANKS, BATCHES, LENGTHS = (2, 4, 8, 16), (1, 2, 4, 8), (512, 1024, 2048)
NOISE = 0.3
"""The scheduler's estimate of a job's length is off by at most so much, evenly drawn."""
DAY_S = 86400.0
_IN_VAIN = 10_000
_MOST = 1e12
"""Seconds or GPUs beyond which a trace is not one: clocks would not tell steps apart."""


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job, as a trace and the draws have it."""

    name: str
    submitted_s: float
    gpus: int
    duration_s: float
    """Alone on the GPUs that it asks for. Nothing that schedules sees it."""
    base: str
    load: Load
    noise: float
    """Estimated over true steps."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Submissions, GPU counts and durations, before shapes are drawn."""

    submitted_s: Sequence[float]
    gpus: Sequence[int]
    duration_s: Sequence[float]

    def offered(self) -> float:
        """GPU-seconds."""
        return float(np.dot(np.asarray(self.gpus, float), np.asarray(self.duration_s, float)))


def read_trace(path: Path, *, most_s: float = DAY_S) -> Arrivals:
    """From a CSV with columns submit_s, duration_s and num_gpus; durations are capped. Raises SpecError."""
    import pandas  # type: ignore[import-untyped]

    try:
        table = pandas.read_csv(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SpecError(f"{path}: cannot be read as CSV: {error}.") from None
    if missing := [name for name in ("submit_s", "duration_s", "num_gpus") if name not in table]:
        raise SpecError(f"{path}: got columns {', '.join(table)}; want {', '.join(missing)} too.")
    columns = table[["submit_s", "duration_s", "num_gpus"]]
    numbers = columns.apply(pandas.to_numeric, errors="coerce")
    bad = numbers.isna().any(axis=1) | (numbers["duration_s"] <= 0) | (numbers["num_gpus"] < 1)
    bad |= (numbers["submit_s"] < 0) | (numbers["num_gpus"] % 1 != 0) | (numbers.abs() > _MOST).any(axis=1)
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        got = ", ".join(f"{name} {value}" for name, value in columns.iloc[row].items())
        raise SpecError(f"{path}: row {row + 2}: got {got}; want numbers above 0 (submit_s: or 0), and whole GPUs.")
    if table.empty:
        raise SpecError(f"{path}: no job; want at least one.")
    numbers = numbers.sort_values("submit_s", kind="stable")
    return Arrivals(
        list(map(float, numbers["submit_s"])),
        list(map(int, numbers["num_gpus"])),
        list(map(float, numbers["duration_s"].clip(upper=most_s))),
    )


def acme_arrivals(
    path: Path, *, load: float, gpus: int, days: float, seed: int, cluster: str = "Seren", most_gpus: int = 8
) -> Arrivals:
    """Poisson arrivals whose durations and GPU counts are drawn from a file of distributions (percent of jobs at or
    below each value), at a load: offered GPU-seconds over GPUs × window. Jobs with more GPUs or a longer duration
    (24 h) than allowed are drawn again."""
    try:
        table: dict[str, Any] = json.loads(path.read_text())
        counts, durations = _points(table["gpu_num"][cluster]), _points(table["duration_s"][cluster])
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise SpecError(f"{path}: want JSON with gpu_num and duration_s of {cluster}: {error!r}.") from None
    random = np.random.default_rng([seed, 1])
    window_s = days * DAY_S
    wanted, offered = load * gpus * window_s, 0.0
    drawn: list[tuple[int, float]] = []
    in_vain = 0
    while offered < wanted:
        count, duration_s = _draw_count(counts, random), _draw_duration(durations, random)
        if 1 <= count <= most_gpus and duration_s <= DAY_S:
            drawn.append((count, duration_s))
            offered += count * duration_s
            in_vain = 0
        elif (in_vain := in_vain + 1) > _IN_VAIN:
            raise SpecError(
                f"{path}: want jobs of {cluster} of 1 to {most_gpus} GPUs and at most 24 h: there are none."
            )
    times = np.sort(random.uniform(0.0, window_s, len(drawn)))  # of a Poisson process, given how many there are
    return Arrivals(list(map(float, times)), [count for count, _ in drawn], [seconds for _, seconds in drawn])


def _points(cdf: Any) -> list[tuple[float, float]]:
    """Values and the percent of jobs at or below each. Raises ValueError if they are none."""
    points = [(float(value), float(share)) for value, share in cdf]
    values, shares = zip(*points, strict=True)  # raises ValueError if there is none
    rise = values == tuple(sorted(values)) and shares == tuple(sorted(shares))
    if not (rise and values[0] > 0 and values[-1] <= _MOST and shares[0] >= 0 and 0 < shares[-1] <= 100.1):
        raise ValueError("want values above 0 and percents, both rising")
    return points


def _draw_count(cdf: Sequence[Sequence[float]], random: np.random.Generator) -> int:
    """Counts are on steps: between two listed ones lies nothing."""
    at = int(np.searchsorted([share for _, share in cdf], random.uniform(0.0, cdf[-1][1])))
    return int(cdf[at][0])


def _draw_duration(cdf: Sequence[Sequence[float]], random: np.random.Generator) -> float:
    """Even in the logarithm between listed ones."""
    shares = [0.0, *(share for _, share in cdf)]
    logs = [np.log(max(cdf[0][0] / 2, 0.5)), *(np.log(value) for value, _ in cdf)]
    return float(np.exp(np.interp(random.uniform(0.0, cdf[-1][1]), shares, logs)))


def draw_jobs(arrivals: Arrivals, bases: Sequence[str], seed: int) -> list[TraceJob]:
    """Shapes and bases for the jobs of a trace, all choices alike likely."""
    random = np.random.default_rng([seed, 2])
    size = len(arrivals.gpus)
    drawn = zip(
        arrivals.submitted_s, arrivals.gpus, arrivals.duration_s,
        random.choice(bases, size), random.choice(RANKS, size), random.choice(BATCHES, size),
        random.choice(LENGTHS, size), random.uniform(1.0 - NOISE, 1.0 + NOISE, size), strict=True,
    )  # fmt: skip
    return [
        TraceJob(
            f"j{at:06d}",
            submitted_s,
            gpus,
            duration_s,
            str(base),
            Load(int(rank), int(batch), int(length)),
            float(noise),
        )
        for at, (submitted_s, gpus, duration_s, base, rank, batch, length, noise) in enumerate(drawn)
    ]


def lone_step_s(capacity: Capacity, job: TraceJob, measure: str) -> float:
    """Of a job alone on the GPUs that it asks for: `own`, our trainer with one job; `peft`, eager PEFT. More than one
    GPU: modelled."""
    if measure == "peft":
        if job.base not in capacity.peft:
            raise SpecError(f"the profile of {capacity.gpu} has no PEFT step times of {job.base}. Measure them first.")
        return capacity.peft[job.base].alone_s(job.load, job.gpus)
    return capacity.models[job.base].best_alone_s(job.load, job.gpus)

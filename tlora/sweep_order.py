"""Two levels of order: which sweep's candidates go first, and which of a sweep. No torch, no Ray, no clock.

A sweep is over when its last candidate is, and it lasts as long as its longest chain: somebody's way to the end, and
before that the waiting at rungs. So the candidate with the longest way goes first, which is longest processing time
first (Graham, SIAM J. Appl. Math. 1969) between sweeps and within each: the sweep with the longest chain leads, and a
candidate at a low rung has the longest way of its sweep, so nobody waits for it for long. To order sweeps by their
whole work instead made no difference in the simulator (LOG.md).
Plain jobs stand beside sweeps by shortness: all candidates together as the mean of what they are expected to take yet,
which counts exits to come, by the rule and by those of their sweeps so far. Called by `tlora.scheduling` (at
each plan, so after each exit), and by whoever tells it what is expected: `tlora.actors.drive` and `sweep_simulate`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tlora.sweep_state import SweepState

if TYPE_CHECKING:
    from tlora.placement import Job
    from tlora.sweep import Halving

_NEXT = 1e-6
"""Of a key: what lies between two candidates, so that plain jobs do not come between them."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What a candidate has before it, in samples."""

    expected: float
    """With the exits that may come."""
    way: float
    """Without any."""


def chances(state: SweepState, halving: "Halving | None") -> list[float]:
    """Of being let go on past each rung: that of the rule, as if it had been seen in as many candidates as the rule
    keeps, and of those judged there so far."""
    found = []
    num = len(state.drawn)
    for rung in range(len(state.rungs) if halving else 0):
        assert halving is not None
        here = halving.keep(rung, num)
        before = halving.keep(rung - 1, num) if rung else num
        passed = sum(one.passed > rung for one in state.drawn)
        ended = sum(one.exited_at == rung for one in state.drawn)
        found.append((here / before * here + passed) / (here + passed + ended))
    return found


def ahead(state: SweepState, halving: "Halving | None") -> dict[str, Ahead]:
    """Of every candidate that has not ended."""
    passing = chances(state, halving)
    found = {}
    for one in state.candidates:
        if not one.status.is_open:
            continue
        way = float(max(one.total - one.samples, 0))
        expected, at, alive = 0.0, one.samples, 1.0
        rungs = state.rungs[one.passed :] if one.is_ranked else []
        for chance, rung in zip(passing[one.passed :], rungs, strict=False):
            if rung > one.total:
                break
            expected, at = expected + alive * max(rung - at, 0), max(rung, at)
            alive *= chance
        found[one.name] = Ahead(expected + alive * max(one.total - at, 0), way)
    return found


def keys(jobs: Iterable["Job"], step_s: Callable[["Job"], float], factor: float) -> dict[str, float]:
    """Urgency of the candidates among these jobs, the lower the more urgent, in seconds as that of plain jobs is.

    `step_s`: GPU-seconds of a step. `factor`: how much shorter a step of priority makes a job look."""
    candidates = [job for job in jobs if job.sweep]
    if not candidates:
        return {}
    mean = sum(job.remaining * step_s(job) for job in candidates) / len(candidates)
    order = sorted(candidates, key=lambda job: (-job.way * step_s(job), job.name))
    return {job.name: mean * (1.0 + _NEXT * place) / factor**job.priority for place, job in enumerate(order)}

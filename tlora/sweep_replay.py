"""What a sweep's rules do with candidates whose whole curves are known: as it would happen live, without training.

A candidate's curve is that of the job alone, so a replay decides as the sweep itself. For measurements, tests and
simulation. No torch, no clock.
"""

from collections.abc import Callable, Mapping, Sequence

from tlora.sweep import Curve, EarlyExit
from tlora.sweep_state import Candidate, Status, SweepState


def begin(totals: Mapping[str, int], rules: EarlyExit, every: int) -> SweepState:
    """A sweep of candidates of these names and samples, none of which has begun."""
    state = SweepState(spec={}, every=every, longest=max(totals.values()))
    state.rungs = rules.halving.rungs(state.longest, every) if rules.halving else []
    for number, (name, total) in enumerate(totals.items()):
        state.candidates.append(
            Candidate(number=number, name=name, values={}, num_siblings=len(totals), total=total, eval_every=0)
        )
    return state


def replay(
    curves: Mapping[str, Curve],
    rules: EarlyExit,
    every: int,
    pick: Callable[[Sequence[Candidate]], Candidate] = lambda ready: min(ready, key=lambda one: one.samples),
) -> SweepState:
    """Where a sweep of these candidates ends; `every` samples lie between evaluations, and the candidate that `pick`
    names goes on to its next one. The last point of each curve is the end of its training."""
    state = begin({name: curve.train[-1][0] for name, curve in curves.items()}, rules, every)
    while ready := [one for one in state.candidates if one.status is Status.QUEUED]:
        one = pick(ready)
        later = [at for at, _ in curves[one.name].evaluated if at > one.samples]
        at = later[0] if later else one.total
        curve = curves[one.name].until(at)
        state.measure(one, curve, at)
        if at >= one.total:
            one.status = Status.FINISHED
        elif found := rules.judge_alone(curve):
            one.end(found)
        state.judge(rules.halving)
        if one.is_due:
            one.status = Status.WAITING
    state.explain_exits(rules.halving)
    return state

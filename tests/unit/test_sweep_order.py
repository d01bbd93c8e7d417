"""What is expected of candidates, who goes first, and what that does to sweeps beside jobs in the simulator."""

import random
import statistics
from dataclasses import replace

import made_up
import pytest
from planted import BATCH, END, EVERY, curve, falling

from tlora.capacity import Capacity, Load
from tlora.placement import Job
from tlora.scheduling import Rules
from tlora.simulate import Simulator
from tlora.sweep import EarlyExit, Halving
from tlora.sweep_order import ahead, chances, keys
from tlora.sweep_replay import begin, replay
from tlora.sweep_simulate import KnownSweep, SweepSimulator
from tlora.sweep_state import Status
from tlora.traces import TraceJob

CAPACITY = Capacity.of(made_up.content())
RULES = EarlyExit()
LOAD = Load(8, BATCH, 512)


def test_what_is_expected_follows_the_rule_then_the_exits() -> None:
    state = begin(dict.fromkeys("abcdefghi", 900), RULES, 10)
    assert state.rungs == [50, 150, 450]
    assert chances(state, Halving()) == pytest.approx([1 / 3, 1 / 3, 1.0])
    first = ahead(state, Halving())["a"]
    assert first.way == 900
    assert first.expected == pytest.approx(50 + 100 / 3 + 300 / 9 + 450 / 9)
    for one in state.candidates[:6]:
        one.status, one.exited_at, one.samples = Status.EXITED, 0, 50
    state.candidates[8].passed, state.candidates[8].samples = 1, 50
    found = ahead(state, Halving())
    assert found.keys() == {"g", "h", "i"}
    assert chances(state, Halving())[0] == pytest.approx((1 + 1) / (3 + 1 + 6))  # fewer go on than the rule keeps
    assert found["i"].expected == pytest.approx(100 + 300 / 3 + 450 / 3)
    assert ahead(state, None)["i"].expected == 850


def test_the_longest_sweep_s_longest_candidate_goes_first() -> None:
    def job(name: str, sweep: str, remaining: float, way: float, **changes: int) -> Job:
        return Job(name, "b", 0.0, remaining=remaining, sweep=sweep, way=way, **changes)

    jobs = [
        job("s0", "s", 10.0, 100.0),
        job("s1", "s", 10.0, 80.0),
        job("l0", "l", 30.0, 200.0),
        job("l1", "l", 30.0, 300.0),
    ]
    found = keys([*jobs, Job("plain", "b", 0.0)], lambda job: 1.0, 4.0)
    assert sorted(found, key=lambda name: found[name]) == ["l1", "l0", "s0", "s1"]
    assert all(key == pytest.approx(20.0, rel=1e-4) for key in found.values())  # among plain jobs, as their mean
    hurried = keys([replace(one, priority=one.sweep == "s") for one in jobs], lambda job: 1.0, 4.0)
    assert sorted(hurried, key=lambda name: hurried[name])[:2] == ["s0", "s1"]


def known(name: str, seed: int, count: int, end: int) -> KnownSweep:
    """Candidates of `end` samples, a third of them of twice as many."""
    rng = random.Random(seed)
    curves = {
        f"{name}-{n}": curve(
            falling(rng.uniform(0.2, 2.0)), noise=0.05, seed=seed * 100 + n, end=end * rng.choice([1, 1, 2])
        )
        for n in range(count)
    }
    return KnownSweep(name, "left", curves, dict.fromkeys(curves, LOAD), EVERY, RULES)


def plain(count: int = 4) -> list[TraceJob]:
    seconds = 150 * CAPACITY.models["left"].alone_s(LOAD)
    return [TraceJob(f"plain{n}", 0.0, 1, seconds, "left", LOAD, 1.0) for n in range(count)]


def simulated(sweeps: list[KnownSweep], jobs: list[TraceJob], **rules: bool) -> SweepSimulator:
    played = SweepSimulator(CAPACITY, jobs, 2, sweeps=sweeps, rules=Rules(**rules))
    played.run()
    return played


@pytest.mark.parametrize("seed", range(3))
def test_together_they_end_as_alone_and_sooner_than_one_after_the_other(seed: int) -> None:
    sweeps, jobs = [known("s", seed, 8, END // 2), known("t", seed + 50, 12, END)], plain()
    both = simulated(sweeps, jobs)
    assert len(both.replay.outcomes) == 8 + 12 + 4
    for sweep in sweeps:
        alone, here = replay(sweep.curves, RULES, EVERY), both.states[sweep.name]
        assert [(one.status, one.samples) for one in here.candidates] == [
            (one.status, one.samples) for one in alone.candidates
        ]
        assert any(one.status is Status.EXITED for one in here.candidates)
    in_turn = sum(simulated([sweep], []).replay.makespan_s for sweep in sweeps)
    in_turn += Simulator(CAPACITY, jobs, 2).run().makespan_s
    assert both.replay.makespan_s < in_turn


def test_the_order_shortens_the_makespan() -> None:
    """On the mean of planted draws, against each candidate by its own shortness."""
    ratios = []
    for seed in range(8):
        sweeps = [known("s", seed, 16, END // 2), known("t", seed + 50, 16, END // 4), known("u", seed + 70, 24, END)]
        first, second = (simulated(sweeps, plain(8), ranks_sweeps=ranks).replay.makespan_s for ranks in (True, False))
        ratios.append(first / second)
    print(f"makespan by the order over that without: {ratios}")
    assert statistics.fmean(ratios) < 1.0

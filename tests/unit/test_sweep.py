"""The rules that end candidates, on planted curves: what diverges, over-fits, lags or merely looks so by noise."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import END, EVERY, curve, falling

from tlora.sweep import Curve, Divergence, EarlyExit, Halt, Halving, Overfitting, Reading, interval, samples_at, scatter
from tlora.sweep_replay import replay
from tlora.sweep_state import Status


def test_samples_count_the_short_batch_at_the_end_of_each_epoch() -> None:
    seen = [samples_at(step, 10, 4) for step in range(8)]
    assert seen == [0, 4, 8, 10, 14, 18, 20, 24]


def test_scatter_is_that_of_the_noise_under_a_trend_and_outliers() -> None:
    rng = random.Random(1)
    values = [5.0 - 0.01 * at + rng.gauss(0.0, 0.3) for at in range(2000)]
    values[::100] = [50.0] * 20
    assert scatter(values) == pytest.approx(0.3, rel=0.1)
    assert scatter(values[:4]) == math.inf


def test_evaluations_fall_on_equal_samples_where_batches_allow() -> None:
    assert interval(1200, 36, [4, 8, 16]) == 32
    assert interval(1200, 36, [7, 64]) == 33  # 448 would be too coarse


def test_a_loss_is_read_at_equal_samples() -> None:
    one = Curve([(at, 1.0 + (at // 4) % 2) for at in range(4, 101, 4)], [(40, 2.0), (80, 1.0)], 4, 16)
    assert one.read(20).loss == 2.0  # no evaluation is nearer
    assert one.read(60).loss == 1.5
    assert one.read(80).loss == 1.0
    assert one.read(81) is None
    assert one.read(60).error == pytest.approx(2.0 / 0.6745 / math.sqrt(6) * math.sqrt(4 / 16), rel=1e-4)


def test_an_exploding_loss_diverges_and_others_do_not() -> None:
    rule = Divergence()
    for factor in (1.3, 3.0, 30.0):
        rising = curve(lambda share, factor=factor: 2.0 * factor if share > 0.02 else 2.0, noise=0.2)
        assert "diverged: training loss" in str(rule.judge(rising.until(80)))
    assert rule.judge(curve(falling(1.0), noise=0.5)) is None
    assert rule.judge(curve(lambda share: 2.0, noise=0.3).until(0)) is None
    flat = [
        rule.judge(curve(lambda share: 2.0, noise=0.3, seed=seed).until(at)) for seed in range(100) for at in (40, 80)
    ]
    assert sum(reason is not None for reason in flat) <= 4


def test_an_over_fitted_candidate_ends_and_its_best_stays() -> None:
    worse = curve(falling(0.5), validation=lambda share: 1.0 + 8.0 * (share - 0.3) ** 2)
    (one,) = replay({"a": worse}, EarlyExit(), EVERY).candidates
    assert one.status is Status.EXITED
    assert "over-fitted: the last 6 validation losses" in one.reason
    assert abs(one.best_samples - 0.3 * END) <= EVERY
    assert one.best_samples < one.samples < 0.6 * END


def test_neither_a_plateau_nor_training_that_stalls_is_over_fitting() -> None:
    rule = Overfitting()
    seen = [
        rule.judge(curve(falling(0.5, 1.0), validation=lambda share: 1.0, noise=0.4, seed=seed).until(at))
        for seed in range(60)
        for at in range(10 * EVERY, END + 1, EVERY)
    ]
    assert sum(reason is not None for reason in seen) <= len(seen) / 100
    both_up = curve(lambda share: 1.0 + share, validation=lambda share: 1.0 + 8.0 * (share - 0.3) ** 2)
    assert rule.judge(both_up) is None


def shares(evaluated: list[float], losses: list[float] | None = None) -> Curve:
    """Of 200 rows not answered exactly, training loss falling."""
    ats = range(40, 40 * len(evaluated) + 1, 40)
    train = [(at, 3.0 - 0.001 * at) for at in range(8, ats[-1] + 1, 8)]
    return Curve(train, list(zip(ats, evaluated, strict=True)), 8, 200, is_share=True,
                 losses=list(zip(ats, losses or evaluated, strict=True)))  # fmt: skip


def test_shares_that_stand_still_but_for_one_row_are_not_over_fitting() -> None:
    """Their median second difference is nothing: what one row tells is that of a share of so many."""
    assert Overfitting().judge(shares([1.0] * 6 + [0.995] + [1.0] * 9)) is None
    assert Overfitting().judge(shares([1.0, 0.5, 0.4, 0.3, 0.2, 0.1] + [0.4] * 8)) is not None


def test_equal_shares_are_ranked_by_their_loss() -> None:
    """The usual start of exact match: nobody has answered a row yet."""
    readings = {f"c{at}": shares([1.0, 1.0], [3.0, 2.0 - at / 100]).read(80) for at in range(24)}
    assert Halving().judge(0, "c23", readings, 24, 0).goes_on
    assert not Halving().judge(0, "c0", readings, 24, 0).goes_on
    rows = [{"step": 1, "eval_loss": 2.0, "exact_match": 0.25}, {"step": 2, "eval_loss": 1.5, "exact_match": 0.25}]
    one = Curve.of(rows, 100, 8, 4, "exact_match")
    assert (one.read(8).loss, one.read(8).tie, one.best) == (0.75, 2.0, (16, 0.75))


def test_a_loss_that_was_measured_later_compares_with_nobody() -> None:
    """Batches of 256 are evaluated first when others have long been judged."""
    small = curve(falling(0.5), batch=4)
    large = Curve([(256, 3.0), (512, 2.5)], [point for point in small.evaluated if point[0] in (320, 640)], 256, 64)
    readings = {"small": small.read(80), "large": large.read(80), "other": small.read(80)}
    for name in readings:
        assert Halving(margin=0.0, most=1.0, finalists=1).judge(0, name, readings, 3, 0).goes_on == (name != "other")
    assert "is not compared" in Halving().judge(0, "large", readings, 3, 9).reason


def test_a_fork_is_measured_against_the_start_of_the_base() -> None:
    """The leader knows its rows; a fresh rate lifts its loss for a while."""
    fork = Curve([(at, 0.05 if at == 8 else 0.3 if at <= 80 else 0.04) for at in range(8, 161, 8)],
                 [(40, 0.3), (80, 0.3)], 8, 64)  # fmt: skip
    rules = EarlyExit()
    assert rules.judge_alone(fork.until(80)).rule == "divergence"
    assert rules.judge_alone(fork.until(80), start=2.5) is None
    assert rules.judge_alone(fork.until(80), start=0.1).rule == "divergence"
    assert Halt(start=2.5).judge(fork.until(80), 80) is None


@pytest.mark.parametrize("longest", [*range(900, 2500, 50), 1536])
@pytest.mark.parametrize("sizes", [(4, 8, 16), (8,), (1,)])
def test_the_most_that_candidates_take_is_bounded_whatever_their_length(longest: int, sizes: tuple[int, ...]) -> None:
    rules = EarlyExit()
    halving = rules.halving
    rungs = halving.rungs(longest, interval(longest, rules.evaluations, sizes))
    assert rungs[0] <= longest / 18
    most, alive, at = 0.0, 24, 0
    for rung, samples in enumerate(rungs):
        most, at, alive = most + alive * (samples - at), samples, min(alive, halving.most_of(rung, 24))
    assert most + alive * (longest - at) <= 0.2755 * 24 * longest


def test_finalists_within_the_margin_go_on() -> None:
    halving = Halving()
    assert [halving.most_of(rung, 24) for rung in range(3)] == [16, 6, 3]
    near = {f"c{at}": Reading(1.0 + at / 1000, 0.1) for at in range(6)}
    assert [halving.judge(2, name, near, 24, 0).goes_on for name in near] == [True] * 3 + [False] * 3


def test_rungs_and_places() -> None:
    halving = Halving()
    assert halving.rungs(END, EVERY) == [80, 240, 720]
    assert [halving.keep(rung, 24) for rung in range(3)] == [8, 3, 1]


def field(num: int, noise: float, seed: int) -> dict[str, Curve]:
    """Candidates whose floors differ by more than noise."""
    floors = [0.5 + 0.1 * at for at in range(num)]
    random.Random(seed).shuffle(floors)
    return {f"c{at}": curve(falling(floor), noise=noise, seed=seed * 100 + at) for at, floor in enumerate(floors)}


def test_the_best_wins_for_a_fraction_of_the_samples() -> None:
    curves = field(24, 0.0, 1)
    state = replay(curves, EarlyExit(), EVERY)
    assert state.leader.name == min(curves, key=lambda name: curves[name].best[1])
    assert state.samples / (24 * END) == pytest.approx(0.155, abs=0.01)


def test_noise_however_great_has_a_bounded_price() -> None:
    """Candidates that are all the same but for noise: nobody is clearly worse."""
    same = {f"c{at}": curve(falling(0.5), noise=3.0, seed=at) for at in range(24)}
    rules = EarlyExit(divergence=None, overfitting=None)
    assert replay(same, rules, EVERY).samples <= 0.2755 * 24 * END
    without = EarlyExit(divergence=None, overfitting=None, halving=Halving(margin=0.0))
    assert replay(same, without, EVERY).samples < replay(same, rules, EVERY).samples


@pytest.mark.parametrize("margin", [0.0, 1.5])
@pytest.mark.parametrize(
    ("num_early", "before", "until"), [(12, 1.085, 0.08), (4, 1.035, 0.2)], ids=["first", "second"]
)
def test_a_late_bloomer_within_noise_is_kept_by_the_margin(
    num_early: int, before: float, until: float, margin: float
) -> None:
    """Planted: the best of 24 in the end, and behind by less than the noise of the losses until then: at the first rung
    of rank 10; or among the first eight there, and at the second of rank 5 where 3 go on."""
    kept = 0
    for seed in range(20):
        early = {f"c{at}": curve(falling(1.0 + 0.01 * at), noise=0.6, seed=100 * seed + at) for at in range(num_early)}
        late = {
            f"d{at}": curve(falling(1.8, 4.0), noise=0.6, seed=100 * seed + 50 + at) for at in range(23 - num_early)
        }
        bloomer = {"bloomer": curve(lambda share: falling(before if share < until else 0.5)(share),
                                    noise=0.6, seed=100 * seed + 99)}  # fmt: skip
        state = replay({**early, **late, **bloomer}, EarlyExit(halving=Halving(margin=margin)), EVERY)
        kept += state.leader.name == "bloomer"
    assert kept >= 19 if margin else kept <= 12


def test_who_is_clearly_worse_exits_with_the_numbers_said() -> None:
    halving = Halving()
    readings = {"a": Reading(1.0, 0.1), "b": Reading(1.05, 0.1), "c": Reading(2.0, 0.1)}
    assert halving.judge(0, "a", readings, 3, 0).goes_on
    assert halving.judge(0, "b", readings, 3, 0).goes_on  # within the noise of a
    verdict = halving.judge(0, "c", readings, 3, 0)
    assert not verdict.goes_on
    assert verdict.reason.startswith("2 of 2 siblings are better at equal samples, 2 clearly: validation loss 2.0000 ±")


def test_a_verdict_waits_for_those_that_could_change_it_and_for_no_others() -> None:
    halving = Halving(margin=0.0, most=1.0)
    readings = {"a": Reading(1.0, 0.0), "b": Reading(2.0, 0.0)}
    assert halving.judge(0, "b", readings, 3, 1).goes_on is False  # one goes on, and a is better
    assert halving.judge(0, "a", readings, 3, 1) is None
    assert halving.judge(0, "a", readings, 3, 0).goes_on
    assert halving.judge(0, "a", readings, 6, 0).goes_on
    assert halving.judge(0, "b", readings, 6, 1) is None


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.sampled_from([0.0, 0.3, 2.0]), num=st.integers(1, 12))
def test_verdicts_do_not_depend_on_who_arrives_first(seed: int, noise: float, num: int) -> None:
    curves = field(num, noise, seed % 97)
    curves["explodes"] = curve(lambda share: 3.0 if share < 0.05 else 9.0, noise=noise, seed=seed)
    curves["short"] = curve(falling(0.2), noise=noise, end=400)
    pick = random.Random(seed).choice
    assert replay(curves, EarlyExit(), EVERY, pick).candidates == replay(curves, EarlyExit(), EVERY).candidates

"""Cutting a tick: every sequence once, in order, in about equal parts; and into how many."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from tlora.nanobatch import Controller, cut


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8))
def test_cut(lengths: list[int], count: int) -> None:
    items = list(enumerate(lengths))
    slices = cut(items, count, work=lambda item: float(item[1]))  # type: ignore[arg-type]
    assert [item for part in slices for item in part] == items
    assert len(slices) <= count
    assert all(slices)
    heaviest = max((sum(length for _, length in part) for part in slices), default=0)
    assert heaviest <= sum(lengths) / count + max(lengths, default=0)


@pytest.mark.parametrize(
    ("work", "want"),
    [([1, 1, 1, 1], [2, 2]), ([9, 1, 1, 1], [1, 3]), ([1, 1, 1, 9], [3, 1]), ([1], [1]), ([5, 5, 5], [2, 1])],
)
def test_even(work: list[int], want: list[int]) -> None:
    assert [len(part) for part in cut(work, 2, work=float)] == want  # type: ignore[arg-type]


MOST = 32
Curve = Callable[[int], float]
CURVES: dict[str, Curve] = {
    "one slice": lambda n: 1.0 + 0.05 * n,
    "flat": lambda n: 1.0,
    "few": lambda n: 1.0 + 0.3 / n + 0.03 * n,
    "half of the exchange hidden": lambda n: 51.6 + 14.0 / n + 0.4 * n,
    "many": lambda n: 1.0 + 1.0 / n + 0.002 * n,
    "as many as there are": lambda n: 1.0 + 1.0 / n,
    "a cliff": lambda n: 1.0 + 0.5 / n if n < 7 else 3.0,
    "steep": lambda n: 1.0 + 3.0 / n + 0.1 * n,
}


def ticks(controller: Controller, curve: Curve, count: int, *, mix: object = "mix", noise: float = 0.0) -> None:
    draw = random.Random(0)
    for _ in range(count):
        controller.note(curve(controller.count) * (1.0 + draw.uniform(-noise, noise)), mix)


def regret(controller: Controller, curve: Curve) -> float:
    return curve(controller.count) / min(curve(count) for count in range(1, MOST + 1)) - 1.0


@pytest.mark.parametrize("noise", [0.0, 0.005])
@pytest.mark.parametrize("name", CURVES)
def test_the_count_settles_within_twelve_ticks(name: str, noise: float) -> None:
    controller = Controller(most=MOST)
    ticks(controller, CURVES[name], 12, noise=noise)
    assert controller.is_settled
    assert regret(controller, CURVES[name]) <= 0.03
    before = controller.count
    ticks(controller, CURVES[name], 200, noise=noise)
    assert controller.count == before


@pytest.mark.parametrize("after", CURVES)
@pytest.mark.parametrize("before", CURVES)
def test_another_mix_starts_it_anew(before: str, after: str) -> None:
    controller = Controller(most=MOST)
    ticks(controller, CURVES[before], 20)
    ticks(controller, CURVES[after], 12, mix="another")
    assert controller.is_settled
    assert regret(controller, CURVES[after]) <= 0.03


@pytest.mark.parametrize("before", ["one slice", "few", "half of the exchange hidden"])
def test_a_cost_that_drifts_starts_it_anew(before: str) -> None:
    """Without a word of it, where the count that it had costs another amount than it did."""
    controller = Controller(most=MOST)
    ticks(controller, CURVES[before], 20)
    ticks(controller, CURVES["many"], 3 + 12)
    assert controller.is_settled
    assert regret(controller, CURVES["many"]) <= 0.03


def test_the_first_steps_are_the_papers() -> None:
    """+4 while it pays, then half."""
    controller, seen = Controller(most=MOST), []
    for _ in range(6):
        ticks(controller, CURVES["steep"], 1)
        seen.append(controller.count)
    assert seen[:4] == [1, 5, 9, 4]


def test_what_it_chose_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "tlora"):
        ticks(Controller(most=MOST), CURVES["few"], 12)
    assert "nano-batches: 3 (cost by count:" in caplog.text


def test_slices_weigh_a_sequence_by_its_jobs_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two jobs with as many tokens, more of the one of the lower rank is in a slice."""
    cuts: list[list[int]] = []
    trainer = toy.Recorder(toy.super_model(), nano_batches=2, token_budget=999)
    for name, rank in (("low", 1), ("high", 64)):
        adapter = {"rank": rank, "alpha": 8, "targets": "all-linear"}
        spec = toy.job(tmp_path, name, adapter=adapter, batch_size=8, steps=1)
        trainer.attach(spec, toy.data(8, low=10, high=10))
    monkeypatch.setattr(trainer, "_send", lambda items, phase: cuts.append([item.slot for item in items]))
    high = trainer.jobs["high"].slot
    trainer.tick()
    first, second = cuts
    assert first.count(high) >= 1
    assert len(second) < len(first)
    assert set(second) == {high}

"""The promise, over random jobs, arrivals, cancels, cuts and budgets: every job ends as it would have alone."""

from dataclasses import dataclass, field
from functools import cache, partial

import pytest
import torch
import toy
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tlora.job import State
from tlora.supermodel import SuperModel

TARGETS = ["all-linear", ["q_proj", "v_proj"], ["down_proj"], ".*layers.1.*_proj", ["k_proj", "o_proj", "lm_head"]]

REGROUPINGS = [{"round_to": 96}, {"token_budget": 32}, {"token_budget": 64, "nano_batches": 3}]


@dataclass
class Visit:
    """A job, when it comes (ticks), and when it is cancelled, if it is."""

    changes: dict[str, object]
    count: int
    held_out: int
    low: int
    high: int
    data_seed: int
    arrives: int
    cancelled: int | None = field(default=None)


def mixes(*, shortest: int) -> st.SearchStrategy[list[Visit]]:
    changes = st.fixed_dictionaries(
        {
            "adapter": st.fixed_dictionaries(
                {
                    "rank": st.integers(1, 64),
                    "alpha": st.sampled_from([1, 8, 32]),
                    "dropout": st.sampled_from([0.0, 0.1, 0.5]),
                    "targets": st.sampled_from(TARGETS),
                    "rslora": st.booleans(),
                }
            ),
            "optim": st.fixed_dictionaries(
                {"lr": st.sampled_from([1e-3, 1e-2]), "weight_decay": st.sampled_from([0.0, 0.1])}
            ),
            "schedule": st.fixed_dictionaries(
                {"name": st.sampled_from(["constant", "linear", "cosine"]), "warmup_steps": st.integers(0, 2)}
            ),
            "batch_size": st.integers(1, 6),
            "steps": st.integers(1, 6),
            "eval_every": st.integers(0, 3),
            "seed": st.integers(0, 2**63 - 1),
            "share": st.sampled_from([0.2, 1.0, 3.0]),
        }
    )
    visit = st.builds(
        Visit,
        changes=changes,
        count=st.integers(1, 9),
        held_out=st.integers(0, 3),
        low=st.just(shortest),
        high=st.integers(shortest, 30),
        data_seed=st.integers(0, 1000),
        arrives=st.integers(0, 6),
        cancelled=st.none() | st.integers(1, 8),
    )
    return st.lists(visit, min_size=2, max_size=4)


@cache
def model(dtype: torch.dtype, deterministic: bool) -> SuperModel:
    return toy.super_model(dtype, deterministic=deterministic)


@pytest.fixture
def run(tmp_path_factory):  # type: ignore[no-untyped-def]
    """Train a mix together; gives each finished job's result, and a way to train it alone."""

    def together(supermodel: SuperModel, mix: list[Visit], budget: int, nano_batches: int):  # type: ignore[no-untyped-def]
        folder = tmp_path_factory.mktemp("mix")
        trainer = toy.Recorder(supermodel, token_budget=budget, nano_batches=nano_batches)
        residents, rows = {}, {}
        for tick in range(10_000):
            for number, visit in enumerate(mix):
                name = f"job{number}"
                if visit.arrives == tick:
                    rows[name] = toy.data(
                        visit.count, visit.data_seed, held_out=visit.held_out, low=visit.low, high=visit.high
                    )
                    residents[name] = trainer.attach(toy.job(folder, name, **visit.changes), rows[name])
                if visit.cancelled == tick and name in trainer.jobs:
                    trainer.detach(name, state=State.CANCELLED, keep=False)
            if tick > 6 and not trainer.jobs:
                break
            trainer.tick()
        finished = [resident for resident in residents.values() if resident.record.state is State.FINISHED]
        assert all(resident.record.state in (State.FINISHED, State.CANCELLED) for resident in residents.values())
        for resident in finished:
            yield toy.Result.of(trainer, resident), partial(toy.alone, supermodel, resident.spec, rows[resident.name])

    return together


def example_settings(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],  # a mix takes a second: shrinking one would take many minutes
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


@example_settings(25)
@given(mix=mixes(shortest=2), budget=st.integers(32, 160), nano_batches=st.integers(1, 4))
def test_alone_to_the_bit_in_deterministic_mode(run, mix, budget, nano_batches) -> None:  # type: ignore[no-untyped-def]
    for mine, alone in run(model(torch.float32, True), mix, budget, nano_batches):
        solo = alone()
        assert (mine.losses, mine.rates, mine.evaluations) == (solo.losses, solo.rates, solo.evaluations)
        assert torch.equal(mine.gradient, solo.gradient)
        assert torch.equal(mine.master, solo.master)


@example_settings(25)
@given(mix=mixes(shortest=2), budget=st.integers(30, 160), nano_batches=st.integers(1, 4))
def test_alone_in_the_algebra(run, mix, budget, nano_batches) -> None:  # type: ignore[no-untyped-def]
    for mine, alone in run(model(torch.float64, False), mix, budget, nano_batches):
        solo = alone()
        assert mine.rates == solo.rates
        assert mine.losses == pytest.approx(solo.losses, rel=1e-8)
        assert mine.evaluations == pytest.approx(solo.evaluations, rel=1e-8)
        assert toy.off(mine.gradient, solo.gradient) < 1e-8
        assert toy.off(mine.master, solo.master) < 1e-8


@example_settings(15)
@given(mix=mixes(shortest=8), budget=st.integers(30, 160), nano_batches=st.integers(1, 4))
def test_alone_to_rounding_in_float32(run, mix, budget, nano_batches) -> None:  # type: ignore[no-untyped-def]
    for mine, alone in run(model(torch.float32, False), mix, budget, nano_batches):
        solo = alone()
        drift = max(toy.off(alone(f"regrouped{n}", **cut).master, solo.master) for n, cut in enumerate(REGROUPINGS))
        assert mine.rates == solo.rates
        assert mine.losses == pytest.approx(solo.losses, rel=1e-5)
        assert toy.off(mine.gradient, solo.gradient) < 1e-5
        assert toy.off(mine.master, solo.master) < 3 * max(drift, 1e-6)

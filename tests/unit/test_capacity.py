"""The capacity model against made-up measurements whose law is known."""

import json
import math
from pathlib import Path

import made_up
import numpy as np
import pytest

from tlora.capacity import BaseModel, Capacity, Learner, Load, Tick
from tlora.errors import SpecError


@pytest.fixture
def model() -> BaseModel:
    return Capacity.of(made_up.content()).models["left"]


def test_fit_finds_the_law(model: BaseModel) -> None:
    assert model.error < 0.01
    for tokens, jobs, ranks in ((100, 1, 16), (3000, 1, 64), (5000, 4, 40), (40000, 8, 128)):
        assert model.tick_s(tokens, jobs, ranks) == pytest.approx(made_up.tick_ms(tokens, jobs, ranks) / 1e3, rel=0.03)


def test_fit_error_is_told_where_the_law_is_broken() -> None:
    ticks = [Tick(tokens, 1, 16, seconds) for tokens, seconds in ((512, 0.1), (512, 0.2), (1024, 0.3))]
    assert BaseModel(ticks, parameters=1, layers=1).error > 0.1


def test_more_work_never_takes_less_time() -> None:
    random = np.random.default_rng(0)
    ticks = [
        Tick(tokens, jobs, 16 * jobs, float(made_up.tick_ms(tokens, jobs) * random.uniform(0.7, 1.3)))
        for tokens in (64, 128, 512, 2048, 8192)
        for jobs in (1, 8)
    ]
    model = BaseModel(ticks, parameters=1, layers=1)
    times = [model.tick_s(tokens) for tokens in range(64, 20000, 64)]
    assert times == sorted(times)
    assert model.tick_s(1000, 8, 128) >= model.tick_s(1000, 1, 16)


def test_memory_grows_by_tokens_and_ranks(model: BaseModel) -> None:
    assert model.peak_bytes(4096, 128) == pytest.approx(18e9 + 128 * 47e6 + 3e6 * 4096, rel=0.02)
    fits = model.most_tokens(128)
    assert model.peak_bytes(fits, 128) == pytest.approx(model.memory_bytes)
    assert model.peak_bytes(fits, 128, checkpointing=True) < model.memory_bytes


def test_a_lone_step_is_cut_only_where_that_is_faster_and_must_be_where_it_does_not_fit() -> None:
    content = made_up.content(floor_ms=0.0)
    for tick in content["ticks"]:
        tick["tick_ms"] *= 1.5 if tick["tokens"] > 8192 else 1.0
    slow = Capacity.of(content).models["left"]
    tokens, seconds = slow.cut(16384, 16, 2048)
    assert tokens < 16384
    assert seconds < slow.tick_s(16384)
    assert slow.alone_s(Load(16, 8, 2048)) == slow.tick_s(16384)  # as a trainer does that nobody tells
    assert slow.fastest_s(Load(16, 8, 2048)) == seconds
    assert slow.cut(16384, 16, 16384)[0] == 16384
    small = BaseModel(
        [Tick(size, 1, 16, 0.1 + 5e-5 * size, round(1e9 + 1e6 * size)) for size in (512, 4096)],
        parameters=1, layers=1, memory_bytes=4e9, budget=2048,
    )  # fmt: skip
    assert small.cut(4096, 16, 512)[0] < small.most_tokens(16) < 4096
    assert small.alone_s(Load(16, 8, 512)) == 2 * small.tick_s(2048)


def test_several_gpus_take_a_batch_apart_and_pay_for_the_sum(model: BaseModel) -> None:
    load = Load(16, 8, 2048)
    assert model.alone_s(load, 8) == pytest.approx(model.tick_s(2048, 1, 16) + model.reduce_s(16, 8))
    assert model.alone_s(load, 3) == pytest.approx(model.tick_s(3 * 2048) + model.reduce_s(16, 3))
    assert model.reduce_s(16, 8, nodes=2) > model.reduce_s(16, 8) > 0.0 == model.reduce_s(16, 1)
    assert model.best_alone_s(Load(16, 1, 2048), 8) == model.alone_s(Load(16, 1, 2048), 1)


def test_peft_is_interpolated_and_accumulates_beyond_what_was_measured() -> None:
    content = made_up.content()
    content["peft"] = [row for row in content["peft"] if row["tokens"] <= 8192]
    peft = Capacity.of(content).peft["left"]
    assert peft.alone_s(Load(16, 1, 512)) == pytest.approx(0.22)
    assert peft.alone_s(Load(16, 8, 2048)) == pytest.approx(2 * peft.alone_s(Load(16, 4, 2048)))


def test_ticks_refine_the_model_and_its_error_is_told() -> None:
    prior = Capacity.of(made_up.content()).models["left"]
    learner = Learner(prior)
    assert learner.is_sure
    for turn in range(200):
        tokens = (256, 512, 1024, 2048, 4096)[turn % 5]
        learner.learn(Tick(tokens, 1, 16, 2.0 * made_up.tick_ms(tokens) / 1e3))
        if turn == 0:
            assert learner.error == pytest.approx(0.5, abs=0.02)
    assert learner.model is not None
    assert learner.model.tick_s(1500) == pytest.approx(2.0 * made_up.tick_ms(1500) / 1e3, rel=0.05)
    assert learner.model.tick_s(8192, 8, 128, 1024) == pytest.approx(2.0 * made_up.tick_ms(8192, 8, 128) / 1e3, rel=0.1)
    assert learner.error < 0.05
    assert learner.is_sure


def test_a_model_that_foretells_well_is_kept_until_it_does_not() -> None:
    """Or else every tick would change every share on the cluster."""
    random, learner = np.random.default_rng(0), Learner()

    def learn(count: int, slower: float) -> int:
        """Ticks with noise; how many models were in use."""
        models = []
        for _ in range(count):
            tokens = int(random.choice((40, 80, 160)))
            learner.learn(Tick(tokens, 1, 8, slower * (0.01 + 1e-4 * tokens) * float(random.lognormal(0.0, 0.05))))
            models += [learner.model] if learner.model not in models else []
        return len(models)

    assert learn(5000, 1.0) <= 6
    assert learn(10_000, 2.0) > 1
    assert learner.error < 0.1
    assert learner.is_sure


def test_a_base_without_a_profile_is_learnt_from_ticks_alone() -> None:
    learner = Learner()
    assert learner.model is None
    for turn in range(200):
        tokens = (40, 80, 160)[turn % 3]
        learner.learn(Tick(tokens, 1, 8, 0.01 + 1e-4 * tokens))
    assert learner.model is not None
    assert learner.model.tick_s(120) == pytest.approx(0.022, rel=0.05)
    assert learner.is_sure


def test_ticks_that_follow_no_law_are_not_planned_by() -> None:
    random, learner = np.random.default_rng(0), Learner()
    for turn in range(200):
        learner.learn(Tick((40, 80, 160)[turn % 3], 1, 8, float(random.lognormal(0.0, 2.0))))
    assert not learner.is_sure


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(SpecError, match=r"profile\.json: cannot be read"):
        Capacity.load(path)
    for text in ("{", "[]", json.dumps({"gpu": "x", "ticks": [{"base": "b"}]})):
        path.write_text(text)
        with pytest.raises(SpecError, match="want a profile"):
            Capacity.load(path)
    for key, value in [
        ("base", 5), ("tick_ms", -1.0), ("tick_ms", 0), ("tick_ms", math.nan), ("tick_ms", math.inf), ("tick_ms", "1"),
        ("tick_ms", 1e300), ("tokens", 0), ("tokens", 1.5), ("jobs", 0), ("longest", -1), ("parameters", -1),
        ("peak_bytes", -1),
    ]:  # fmt: skip
        content = made_up.content()
        content["ticks"][1][key] = value
        path.write_text(json.dumps(content))
        with pytest.raises(SpecError, match=rf"tick 2: {key}: got .*; want"):
            Capacity.load(path)
    path.write_text(json.dumps(made_up.content() | {"ticks": []}))
    with pytest.raises(SpecError, match="want at least one tick"):
        Capacity.load(path)
    content = made_up.content()
    content["peft"][0]["step_ms"] = math.nan
    path.write_text(json.dumps(content))
    with pytest.raises(SpecError, match="PEFT step 1: step_ms: got nan"):
        Capacity.load(path)
    assert math.isinf(Capacity.of(made_up.content() | {"gpu": "another"}).models["left"].memory_bytes)


def test_ranks_that_a_profile_has_measured_are_not_forgotten() -> None:
    """Ticks of one size but of other ranks are kept apart."""
    ticks = [Tick(tokens, 1, rank, tokens * (1.0 + rank / 64) / 1e5) for tokens in (128, 512) for rank in (2, 16, 64)]
    learner = Learner(BaseModel(ticks, parameters=10**6, layers=2))
    for _ in range(4):
        for tokens in (128, 512):
            learner.learn(Tick(tokens, 1, 16, 3.0 * tokens * 1.25 / 1e5))
    assert learner.model is not None
    low, high = (learner.model.tick_s(512, 1, rank, 512) for rank in (2, 64))
    assert high / low == pytest.approx(2.0 / (1.0 + 2 / 64), rel=0.05)

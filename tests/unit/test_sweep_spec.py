"""A sweep as YAML: what is drawn, and what is refused at the edge, with the field named."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from tlora.errors import CheckpointError, SpecError
from tlora.sweep import Exit, Reading
from tlora.sweep_spec import Result, draw, is_sweep, load_sweep, parse_sweep
from tlora.sweep_state import Candidate, SweepState

JOB = {"base": {"model": "m"}, "data": {"path": "rows", "eval_path": "held-out"}}
SPACE = {
    "optim.lr": {"log_uniform": [1e-5, 1e-2]},
    "adapter.rank": [2, 4, 8],
    "adapter.alpha": {"times": [1, 2], "of": "adapter.rank"},
    "adapter.dropout": {"uniform": [0.0, 0.1]},
    "batch_size": {"integers": [4, 16]},
}


def sweep(**changes: object) -> object:
    return parse_sweep({"name": "s", "job": JOB, "space": SPACE, **changes}, "s.yaml")


def test_draws_lie_in_their_domains_and_are_spread() -> None:
    drawn = draw(sweep(budget={"configurations": 400}), [], [])
    assert all(1e-5 <= one["optim.lr"] <= 1e-2 and one["adapter.dropout"] <= 0.1 for one in drawn)
    assert all(one["adapter.alpha"] in (one["adapter.rank"], 2 * one["adapter.rank"]) for one in drawn)
    assert {one["batch_size"] for one in drawn} == set(range(4, 17))
    assert min(Counter(one["adapter.rank"] for one in drawn).values()) > 100
    assert 80 < sum(one["optim.lr"] < 1e-4 for one in drawn) < 190  # a third


def test_a_sweep_that_is_extended_keeps_its_draws() -> None:
    few, many = (draw(sweep(budget={"configurations": num}), [], []) for num in (5, 9))
    assert many[:5] == few
    assert draw(sweep(budget={"configurations": 9}), few, []) == many[5:]
    assert draw(sweep(sampler={"seed": 1}), [], []) != draw(sweep(), [], [])


def test_a_grid_is_every_combination() -> None:
    spec = sweep(space={"adapter.rank": [2, 4], "seed": {"integers": [1, 3]}}, sampler={"name": "grid"})
    assert [tuple(one.values()) for one in draw(spec, [], [])] == [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3)]
    assert spec.num_configurations == 6


def test_tpe_draws_near_what_was_good_and_the_same_again() -> None:
    spec = sweep(sampler={"name": "tpe", "startup": 30, "wave": 8}, budget={"configurations": 60})
    known = draw(spec, [], [])
    assert len(known) == 30
    results = [Result(samples=9, loss=abs(one["adapter.rank"] - 8.0) + one["optim.lr"], finished=True) for one in known]
    results[3] = Result(samples=2, loss=None, finished=False)
    wave = draw(spec, known, results)
    assert wave == draw(spec, known, results)
    assert len(wave) == 8
    assert sum(one["adapter.rank"] == 8 for one in wave) > 4


def test_tpe_without_optuna_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    spec = sweep(sampler={"name": "tpe", "startup": 1})
    with pytest.raises(SpecError, match=r"needs the package optuna. Run `pip install 'tlora\[sweep\]'`"):
        draw(spec, draw(spec, [], []), [Result(samples=1, loss=1.0, finished=True)])


def test_a_candidate_is_a_job_of_its_own() -> None:
    job = sweep().candidate(7, {"optim.lr": 8.4e-05, "adapter.rank": 4}, eval_every=5)
    assert (job.name, job.output, job.tracking.group) == ("s-007", "outputs/s/candidates/s-007", "s")
    assert (job.optim.lr, job.adapter.rank, job.eval_every) == (8.4e-05, 4, 5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"space": {"optim.learning_rate": [1e-3]}}, "s.yaml: space: unknown key 'optim.learning_rate'. Did you mean "),
        ({"space": {"adapter.rank": [2, 300]}}, "s.yaml: space: adapter.rank = 300: want an integer from 1 to 256."),
        ({"space": {"adapter.rank": {"integers": [0, 4]}}}, "s.yaml: space: adapter.rank = 0: want an integer"),
        ({"space": {"adapter": [1]}}, "s.yaml: space.adapter: is a section; want one of its fields"),
        ({"space": {"optim.lr": {"uniform": [1, 0]}}}, "s.yaml: space.optim.lr = .*want the lower end first"),
        ({"space": {"optim.lr": {"uniform": [0, 1], "choice": [1]}}}, "got choice and uniform; want one of"),
        ({"space": {"base.model": ["a"]}}, "space.base.model: losses of two bases do not compare"),
        ({"space": {"output": ["a"]}}, "space.output: is the sweep's to set"),
        ({"space": {"adapter.alpha": {"times": [1], "of": "adapter.rank"}}}, "space.adapter.alpha.of = adapter.rank"),
        ({"sampler": {"name": "grid"}}, "space.optim.lr: a grid needs a list of values"),
        ({"sampler": {"name": "grit"}}, "sampler.name = 'grit': want one of 'grid', 'random' or 'tpe'"),
        ({"budget": {"config": 3}}, "unknown key 'budget.config'. Did you mean 'budget.configurations'?"),
        ({"early_exit": {"halving": {"eta": 1}}}, "early_exit.halving.eta = 1: want at least 2"),
        ({"early_exit": {"evaluations": 8}}, "early_exit.halving.warmup: ends before the first evaluation"),
        ({"job": {**JOB, "data": {"path": "rows"}}}, "job: data names no evaluation rows"),
        ({"job": {**JOB, "optim": "adamw"}}, "job.optim = 'adamw': want its fields"),
        ({"job": {**JOB, "tracking": "online"}}, "job.tracking = 'online': want its fields"),
        ({"job": {**JOB, "data": "rows.jsonl"}, "space": {"seed": [1, 2]}}, "job.data = 'rows.jsonl': want its fields"),
        (
            {"space": {"schedule.name": ["cosine"], "optim.lr": {"times": [2], "of": "schedule.name"}}},
            r"space.optim.lr.of = schedule.name: got \['cosine'\]; want numbers",
        ),
        ({"job": {**JOB, "epoch": 3}}, "s.yaml: job: unknown key 'epoch'. Did you mean 'epochs'?"),
        ({"job": {**JOB, "name": "x"}}, "job.name: is the sweep's to set"),
        (
            {"job": {**JOB, "data": {"path": "rows", "eval_fraction": 0.1}}, "space": {"seed": [1, 2]}},
            "space.seed: data.eval_fraction holds out other rows for each seed",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_named(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        sweep(**changes)


def test_a_space_that_is_too_small_is_refused() -> None:
    with pytest.raises(SpecError, match=r"budget.configurations = 4: the space holds 3 that differ"):
        draw(sweep(space={"adapter.rank": [2, 4, 8]}, budget={"configurations": 4}), [], [])


def test_who_has_over_fitted_counts_as_finished_for_the_sampler() -> None:
    """Good rates over-fit: the sampler must not learn to keep away from them."""
    one, other = (Candidate(number=n, name=f"c{n}", values={}, num_siblings=2, total=9, eval_every=1) for n in (0, 1))
    one.best_loss, other.best_loss = 0.5, 0.9
    one.end(Exit("overfitting", "over-fitted"))
    other.end(Exit("divergence", "diverged"))
    state = SweepState(spec={}, candidates=[one, other])
    assert [result.finished for result in state.results] == [True, False]
    one.revive()
    assert not state.results[0].finished


def test_a_file_is_named_after_itself(tmp_path: Path) -> None:
    file = tmp_path / "rates.yaml"
    file.write_text("job: {base: {model: m}, data: {path: p, eval_path: q}}\nspace: {optim.lr: [1e-4, 1.0e-3]}\n")
    job = tmp_path / "job.yaml"
    job.write_text("base: {model: m}\n")
    assert (is_sweep(file), is_sweep(job), is_sweep(tmp_path / "none.yaml")) == (True, False, False)
    spec = load_sweep(file, ["budget.configurations=2"])
    assert (spec.name, spec.output, spec.num_configurations) == ("rates", "outputs/rates", 2)
    assert {one["optim.lr"] for one in draw(spec, [], [])} == {1e-4, 1e-3}  # YAML takes 1e-4 for a text


def test_a_state_is_read_as_it_was_written_and_damage_is_seen(tmp_path: Path) -> None:
    one = Candidate(number=0, name="a", values={"optim.lr": 1e-3}, num_siblings=1, total=9, eval_every=1)
    one.readings.append(Reading(1.5, float("inf")))
    state = SweepState(spec=sweep().model_dump(mode="json"), candidates=[one], rungs=[3])
    state.save(tmp_path)
    assert SweepState.load(tmp_path) == state
    assert SweepState.load(tmp_path / "other") is None
    with pytest.raises(SpecError, match=r"space: .* was, .* is asked"):
        state.take(sweep(space={"optim.lr": [1e-3]}))
    state.take(sweep(budget={"configurations": 99}, places=3))
    (tmp_path / "sweep.json").write_text((tmp_path / "sweep.json").read_text()[:-40])
    with pytest.raises(CheckpointError, match="is damaged"):
        SweepState.load(tmp_path)

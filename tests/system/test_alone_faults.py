"""Faults that users of other trainers met (each named by what goes wrong there), on the toy model in float64."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from tlora.data import TokenSequence
from tlora.errors import StateError
from tlora.job import State
from tlora.resident import ResidentJob
from tlora.tracking import read_metrics
from tlora.trainer import Trainer, TrainerOptions


def with_targets(num_targets: int, seed: int) -> TokenSequence:
    ids = np.random.default_rng(seed).integers(0, toy.VOCAB, num_targets + 1).astype(np.int32)
    return TokenSequence(ids, np.arange(num_targets + 1) > 0)


def test_alone_loss_is_weighed_by_tokens_in_every_layout(tmp_path: Path) -> None:
    """1: means of micro-batches were averaged."""
    model = toy.super_model(torch.float64)
    rows = toy.data_of([with_targets(1, 1), with_targets(99, 2)])
    results = [
        toy.alone(
            model,
            toy.job(tmp_path, batch_size=2, steps=1),
            rows,
            f"cut{n}-{budget}",
            token_budget=budget,
            nano_batches=n,
        )
        for n, budget in ((1, 200), (2, 200), (1, 100))
    ]
    totals = [
        toy.alone(model, toy.job(tmp_path, f"one{n}", batch_size=1, steps=1), toy.data_of([row]))
        for n, row in enumerate(rows.train)
    ]
    want = (totals[0].gradient + 99 * totals[1].gradient) / 100
    for result in results:
        assert toy.off(result.gradient, want) < 1e-12
        assert result.losses[0] == pytest.approx((totals[0].losses[0] + 99 * totals[1].losses[0]) / 100, rel=1e-12)


@pytest.mark.parametrize(("rows", "batch", "epochs", "sizes"), [(7, 4, 2, [4, 3, 4, 3]), (3, 4, 2, [3, 3])])
def test_alone_last_batch_of_an_epoch_is_kept_and_weighed_by_itself(
    rows: int, batch: int, epochs: int, sizes: list[int], tmp_path: Path
) -> None:
    """3: it was dropped, leaked into the next epoch, or divided by the full size."""
    spec = toy.job(
        tmp_path, batch_size=batch, steps=None, epochs=epochs, schedule={"name": "linear"}, optim={"lr": 0.5}
    )
    trainer = toy.Recorder(toy.super_model(torch.float64))
    job = trainer.attach(spec, toy.data(rows, seed=3))
    seen = [job.step_sequences(step) for step in range(job.num_steps)]
    assert [len(step) for step in seen] == sizes
    for epoch in range(epochs):
        ids = [
            id(row) for step in seen[epoch * len(sizes) // epochs : (epoch + 1) * len(sizes) // epochs] for row in step
        ]
        assert len(set(ids)) == rows
    toy.finish(trainer)
    rates = toy.Result.of(trainer, job).rates
    assert rates == pytest.approx([0.5 * (1 - step / len(sizes)) for step in range(len(sizes))])


def test_alone_rows_that_belong_to_nobody_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6: garbage in the rows that round a batch up spread as 0 × NaN."""
    model, rows = toy.super_model(torch.float64), toy.data(6, seed=8, high=30)
    plain = toy.alone(model, toy.job(tmp_path), rows)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kwargs: empty(*size, **kwargs).fill_(float("nan")))
    padded = toy.alone(model, toy.job(tmp_path), rows, "padded", round_to=128)
    assert torch.isfinite(padded.master).all()
    assert toy.off(padded.master, plain.master) < 1e-8


def test_alone_job_without_rows_in_a_tick_takes_no_step(tmp_path: Path) -> None:
    """7: it got garbage, or its momentum moved it."""
    trainer = toy.Recorder(toy.super_model(torch.float64), token_budget=60)
    jobs = [trainer.attach(toy.job(tmp_path, f"j{n}", steps=8), toy.data(12, seed=n, low=12)) for n in range(3)]
    idle_ticks = 0
    for _ in range(12):
        before = [
            (job.step, job.state.master.clone(), job.state.exp_avg.clone(), job.state.grad.clone()) for job in jobs
        ]
        waiting = [len(job.pending_rows) for job in jobs]
        trainer.tick()
        for job, (step, master, moment, grad), pending in zip(jobs, before, waiting, strict=True):
            if job.step == step:
                assert torch.equal(job.state.master, master)
                assert torch.equal(job.state.exp_avg, moment)
                if len(job.pending_rows) == pending:
                    idle_ticks += 1
                    assert torch.equal(job.state.grad, grad)
    assert idle_ticks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_alone_checkpointed_layers_draw_the_same_masks(dtype: torch.dtype, tmp_path: Path) -> None:
    """9: recomputation drew another dropout mask."""
    results = []
    for on in (False, True):
        model = toy.super_model(dtype, checkpointing=on)
        spec = toy.job(tmp_path, f"checkpointing-{on}", adapter={"rank": 6, "dropout": 0.3, "targets": "all-linear"})
        trainer = toy.Recorder(model)
        job = trainer.attach(spec, toy.data(8, seed=2))
        trainer.attach(toy.job(tmp_path, f"beside-{on}"), toy.data(8, seed=3))
        toy.finish(trainer)
        results.append(toy.Result.of(trainer, job))
    assert torch.equal(results[0].gradient, results[1].gradient)
    assert torch.equal(results[0].master, results[1].master)


def test_alone_neighbours_that_alternate_keep_to_themselves(tmp_path: Path) -> None:
    """11: adding a second adapter changed which one trained."""
    model = toy.super_model(torch.float32, deterministic=True)
    specs = [toy.job(tmp_path, name, steps=6, seed=n, batch_size=2) for n, name in enumerate("ab")]
    rows = [toy.data(8, seed=n, low=24, high=24) for n in range(2)]
    trainer = toy.Recorder(model, token_budget=64)  # one step of one job fills a tick: they take turns while resident
    jobs = [trainer.attach(spec, data) for spec, data in zip(specs, rows, strict=True)]
    order = []
    while trainer.jobs:
        before = [job.step for job in jobs]
        trainer.tick()
        order += [job.name for job, step in zip(jobs, before, strict=True) if job.step > step]
    assert [sorted(order[at : at + 2]) for at in range(0, 12, 2)] == [["a", "b"]] * 6
    for job, spec, data in zip(jobs, specs, rows, strict=True):
        solo = toy.alone(model, spec, data)
        assert torch.equal(job.state.master, solo.master)
        assert [row["loss"] for row in read_metrics(spec.folder)] == solo.losses


def test_alone_names_and_folders_are_not_taken_twice(tmp_path: Path) -> None:
    """12: a second submit under the same name started the weights anew."""
    trainer = Trainer(toy.super_model())
    job = trainer.attach(toy.job(tmp_path), toy.data())
    trainer.tick()
    before = job.state.master.clone()
    with pytest.raises(StateError, match="resident already"):
        trainer.attach(toy.job(tmp_path), toy.data())
    with pytest.raises(StateError, match="another process is training into this folder"):
        trainer.attach(toy.job(tmp_path, "b", output=str(tmp_path / "a")), toy.data())
    assert torch.equal(job.state.master, before)
    assert list(trainer.jobs) == ["a"]
    assert len(trainer.supermodel.residents) == 1
    trainer.detach("a")
    with pytest.raises(StateError, match="saved state already"):
        trainer.attach(toy.job(tmp_path), toy.data())


def test_alone_a_reused_place_holds_nothing_of_its_last_job(tmp_path: Path) -> None:
    """13: moments or pending gradients reached the next job."""
    model = toy.super_model(torch.float32, deterministic=True)
    specs = {
        name: toy.job(tmp_path, name, steps=steps, seed=n)
        for n, (name, steps) in enumerate(zip("abc", (9, 12, 6), strict=True))
    }
    rows = {name: toy.data(10, seed=n) for n, name in enumerate("abc")}
    trainer = toy.Recorder(model, token_budget=128)
    residents: dict[str, ResidentJob] = {name: trainer.attach(specs[name], rows[name]) for name in "ab"}
    while residents["a"].step < 5:
        trainer.tick()
    slot = residents["a"].slot
    trainer.detach("a", state=State.CANCELLED, keep=False)
    residents["c"] = trainer.attach(specs["c"], rows["c"])
    assert residents["c"].slot == slot
    toy.finish(trainer)
    for name in "bc":
        assert torch.equal(
            toy.Result.of(trainer, residents[name]).master, toy.alone(model, specs[name], rows[name]).master
        )


def test_alone_shares_change_when_and_not_what(tmp_path: Path) -> None:
    model = toy.super_model(torch.float32, deterministic=True)
    rows = [toy.data(16, seed=n, low=20) for n in range(2)]
    finals = []
    for shares in ((1.0, 1.0), (8.0, 1.0)):
        trainer = Trainer(model, TrainerOptions(token_budget=64))
        jobs = [
            trainer.attach(toy.job(tmp_path / str(shares), f"j{n}", share=share, steps=4), rows[n])
            for n, share in enumerate(shares)
        ]
        first = None
        while trainer.jobs:
            tick = trainer.tick()
            first = first or (tick.ended[0].name if tick.ended else None)
        finals.append([job.state.master for job in jobs])
    assert first == "j0"
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_alone_options_are_bounded(tmp_path: Path) -> None:
    """A sequence longer than a tick is refused when it comes, and nothing of the job stays."""
    trainer = Trainer(toy.super_model(), replace(TrainerOptions(), token_budget=10))
    with pytest.raises(Exception, match="want at most the token budget, 10"):
        trainer.attach(toy.job(tmp_path), toy.data(low=20))
    assert not trainer.jobs
    assert not trainer.supermodel.residents
    assert not (tmp_path / "a").exists()


def test_alone_in_bfloat16_with_float32_masters(tmp_path: Path) -> None:
    """The base in half precision; what is learnt stays in float32, close to what a float32 base gives."""
    rows, changes = toy.data(16, seed=2), {"steps": 12, "schedule": {"name": "constant"}}
    wide = toy.alone(toy.super_model(torch.float32), toy.job(tmp_path, "wide", **changes), rows)
    trainer = toy.Recorder(toy.super_model(torch.bfloat16), token_budget=96)
    job = trainer.attach(toy.job(tmp_path, "half", **changes), rows)
    trainer.attach(toy.job(tmp_path, "beside", adapter={"rank": 16, "targets": ["o_proj"]}), toy.data(9))
    assert job.state.compute.dtype is torch.bfloat16
    assert {vector.dtype for vector in job.state.tensors().values()} == {torch.float32}
    toy.finish(trainer)
    half = toy.Result.of(trainer, job)
    assert half.losses == pytest.approx(wide.losses, rel=3e-2)
    assert half.losses[-1] < 0.8 * half.losses[0]
    assert toy.off(half.gradient, wide.gradient) < 5e-2

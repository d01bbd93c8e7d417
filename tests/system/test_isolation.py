"""What goes wrong for one job ends or skips that job alone, with its reason; the others go on, bit for bit."""

import errno
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from tlora import checkpoint, trainer
from tlora.adapter import AdapterState
from tlora.checkpoint import STATE, load_state
from tlora.errors import CheckpointError
from tlora.kernels.tiles import Adapters, Update, stride_of
from tlora.packing import Batch
from tlora.resident import ResidentJob
from tlora.supermodel import fingerprint
from tlora.tracking import METRICS, read_metrics


def poison_weight(job: ResidentJob) -> None:
    job.state.master[3] = float("nan")


def poison_gradient(job: ResidentJob) -> None:
    job.state.grad[0] = float("inf")


@pytest.mark.parametrize(("poison", "kept"), [(poison_weight, 2), (poison_gradient, 3)])
def test_a_job_that_is_no_longer_finite_ends_alone(
    poison: Callable[[ResidentJob], None], kept: int, tmp_path: Path
) -> None:
    """Good weights are saved where it stopped; weights that are bad themselves never replace a good save."""
    model = toy.super_model(torch.float32, deterministic=True)
    work = toy.Recorder(model, token_budget=128)
    bad = work.attach(toy.job(tmp_path, "bad", steps=9, save_every=2), toy.data(10, seed=1))
    good = work.attach(toy.job(tmp_path, "good", steps=9), toy.data(10, seed=2))
    while bad.step < 3:
        work.tick()
    poison(bad)
    toy.finish(work)
    assert bad.record.state == "failed"
    assert f"at step 4; stopped at its last good checkpoint, step {kept}" in bad.record.reason
    tensors, meta = load_state(bad.spec.folder)
    assert meta["step"] == kept
    assert all(vector.isfinite().all() for vector in tensors.values())
    solo = toy.alone(model, good.spec, toy.data(10, seed=2))
    assert torch.equal(toy.Result.of(work, good).master, solo.master)
    assert toy.Result.of(work, good).losses == solo.losses
    assert len(model.residents) == 0


def test_a_job_for_which_there_is_no_memory_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = toy.super_model(deterministic=True)
    work, spec = toy.Recorder(model), toy.job(tmp_path, adapter={"rank": 200, "targets": "all-linear"})
    calls, place = count(), Adapters.place

    def full(adapters: Adapters, *site: Any) -> None:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        place(adapters, *site)

    monkeypatch.setattr(Adapters, "place", full)
    with pytest.raises(torch.OutOfMemoryError):
        work.attach(spec, toy.data())
    assert not model.residents
    assert {module.bundle.adapters.low for module in model._mixed.values()} == {stride_of(1)}
    again = work.attach(spec, toy.data())
    toy.finish(work)
    assert again.record.state == "finished"


def test_a_job_with_a_damaged_state_fails_before_it_joins(tmp_path: Path) -> None:
    """14: one bad adapter brought the batch down."""
    model = toy.super_model(torch.float32, deterministic=True)
    work = toy.Recorder(model)
    broken = toy.job(tmp_path, "broken")
    work.attach(broken, toy.data())
    work.tick()
    work.detach("broken")
    path = broken.folder / STATE
    path.write_bytes(path.read_bytes()[:-100])
    others = [work.attach(toy.job(tmp_path, f"j{n}"), toy.data(seed=n)) for n in range(3)]
    work.tick()
    with pytest.raises(CheckpointError, match="is damaged"):
        work.attach(broken, toy.data(), resume=True)
    toy.finish(work)
    for number, job in enumerate(others):
        assert torch.equal(toy.Result.of(work, job).master, toy.alone(model, job.spec, toy.data(seed=number)).master)
        assert [row["step"] for row in read_metrics(job.spec.folder)] == [1, 2, 3, 4, 5]


def test_a_full_disk_ends_the_job_that_met_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.super_model(torch.float32, deterministic=True)
    work = toy.Recorder(model)
    full = work.attach(toy.job(tmp_path, "full", save_every=2), toy.data(seed=1))
    good = work.attach(toy.job(tmp_path, "good", save_every=2), toy.data(seed=2))
    save = checkpoint.save_file

    def no_space(tensors: object, path: Path, **options: object) -> None:
        save(tensors, path, **options)
        if path.is_relative_to(full.spec.folder) and full.step == 4:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", no_space)
    toy.finish(work)
    assert full.record.state == "failed"
    assert "No space left" in full.record.reason
    tensors, meta = load_state(full.spec.folder)
    assert meta["step"] == 2
    assert torch.isfinite(tensors["master"]).all()
    assert not list(full.spec.folder.rglob("*.incomplete-*"))
    assert torch.equal(toy.Result.of(work, good).master, toy.alone(model, good.spec, toy.data(seed=2)).master)


def test_a_failing_tracker_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work = toy.Recorder(toy.super_model())
    job = work.attach(toy.job(tmp_path), toy.data())
    work.tick()
    work.jobs["a"].tracker._sinks[0]._file.close()  # type: ignore[attr-defined]
    toy.finish(work)
    assert job.record.state == "finished"
    assert "put aside" in caplog.text
    assert len((job.spec.folder / METRICS).read_text().splitlines()) == 1


def test_an_adapter_that_learnt_nothing_is_not_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16: an adapter that loads as a no-op."""
    monkeypatch.setattr(trainer, "adamw", lambda updates: torch.stack([update.grad.norm() for update in updates]))
    work = toy.Recorder(toy.super_model())
    job = work.attach(toy.job(tmp_path), toy.data())
    toy.finish(work)
    assert job.record.state == "failed"
    assert "every B is zero" in job.record.reason


def test_a_pause_that_cannot_be_saved_fails_that_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = toy.Recorder(toy.super_model())
    job = work.attach(toy.job(tmp_path), toy.data())
    other = work.attach(toy.job(tmp_path, "other"), toy.data())
    work.tick()
    with monkeypatch.context() as patch:
        patch.setattr(
            trainer, "save_state", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left"))
        )
        assert work.detach("a") is job
    assert job.record.state == "failed"
    assert "No space left" in job.record.reason
    toy.finish(work)
    assert other.record.state == "finished"


def test_an_evaluation_that_is_not_finite_ends_that_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.super_model()
    work = toy.Recorder(model)
    bad = work.attach(toy.job(tmp_path, "bad", eval_every=2), toy.data(held_out=2))
    good = work.attach(toy.job(tmp_path, "good", eval_every=2), toy.data(held_out=2))
    evaluate = model.evaluate

    def with_nan(batch: Batch, **options: bool) -> torch.Tensor:
        losses = evaluate(batch, **options)
        losses[[item.slot == bad.slot for item in batch.items]] = float("nan")
        return losses

    monkeypatch.setattr(model, "evaluate", with_nan)
    toy.finish(work)
    assert (bad.record.state, good.record.state) == ("failed", "finished")
    assert "evaluation loss became nan at step 2" in bad.record.reason
    assert load_state(bad.spec.folder)[1]["step"] == 2


@pytest.mark.parametrize("crash", [KeyboardInterrupt, MemoryError])
def test_a_tick_broken_off_amid_an_optimizer_step_saves_no_half_step(
    crash: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights had moved and the step was not counted yet: the save labelled them with the step before."""
    model = toy.super_model(torch.float32, deterministic=True)
    spec, rows = toy.job(tmp_path, save_every=2), toy.data(seed=1)
    work = toy.Recorder(model)
    job = work.attach(spec, rows)
    step = trainer.adamw

    def breaks(updates: Sequence[Update]) -> torch.Tensor:
        norms = step(updates)
        if job.step == 3:
            raise crash
        return norms

    monkeypatch.setattr(trainer, "adamw", breaks)
    with pytest.raises(crash):
        toy.finish(work)
    work.detach("a")
    assert load_state(spec.folder)[1]["step"] == 2
    monkeypatch.setattr(trainer, "adamw", step)
    again = toy.Recorder(model)
    job = again.attach(spec, rows, resume=True)
    toy.finish(again)
    assert torch.equal(job.state.master, toy.alone(model, spec, rows).master)


def test_arithmetic_that_fails_for_one_job_ends_that_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = toy.Recorder(toy.super_model())
    jobs = [work.attach(toy.job(tmp_path, name), toy.data()) for name in ("bad", "good")]
    prepare = trainer.update_of

    def overflows(state: AdapterState, *args: object, **options: object) -> Update:
        if state is jobs[0].state:
            raise OverflowError("math range error")
        return prepare(state, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer, "update_of", overflows)
    toy.finish(work)
    assert [job.record.state for job in jobs] == ["failed", "finished"]


class _Tokenizer:
    """Writes one file and then meets a full disk, as the Rust library says it."""

    full = True

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{}")
        if self.full:
            raise Exception("No space left on device (os error 28)")
        (Path(folder) / "tokenizer_config.json").write_text("{}")


def test_a_tokenizer_that_cannot_be_saved_ends_that_job_and_is_whole_after_resume(tmp_path: Path) -> None:
    work, tokenizer = toy.Recorder(toy.super_model()), _Tokenizer()
    bad = work.attach(toy.job(tmp_path, "bad"), toy.data(), tokenizer=tokenizer)
    good = work.attach(toy.job(tmp_path, "good"), toy.data())
    toy.finish(work)
    assert (bad.record.state, good.record.state) == ("failed", "finished")
    assert "the tokenizer cannot be written: No space left" in bad.record.reason
    assert not (bad.spec.folder / "tokenizer.json").exists()
    assert not checkpoint.has_finished(bad.spec)
    tokenizer.full = False
    work.attach(bad.spec, toy.data(), tokenizer=tokenizer, resume=True)
    assert (bad.spec.folder / "tokenizer.json").exists()
    assert checkpoint.has_finished(bad.spec)
    weights = bad.spec.folder / "adapter_model.safetensors"
    weights.write_bytes(b"")
    assert not checkpoint.has_finished(bad.spec)


@pytest.mark.parametrize("change", [{"spec": None}, {"data": 3}, {"step": "x"}, {"step": -1}, {"step": 100}])
def test_a_state_that_describes_nonsense_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    work = toy.Recorder(toy.super_model())
    spec = work.attach(toy.job(tmp_path), toy.data()).spec
    work.tick()
    work.detach("a")
    tensors, meta = load_state(spec.folder)
    checkpoint.save_state(spec.folder, tensors, {**meta, **change})
    with pytest.raises(CheckpointError, match="makes no sense"):
        work.attach(spec, toy.data(), resume=True)


def test_another_base_under_the_same_name_is_refused(tmp_path: Path) -> None:
    work = toy.Recorder(toy.super_model())
    spec = work.attach(toy.job(tmp_path), toy.data()).spec
    work.tick()
    work.detach("a")
    other = toy.super_model()
    with torch.no_grad():
        other.model.model.layers[1].mlp.up_proj.weight.add_(0.1)
    other.fingerprint = fingerprint(other.model)
    with pytest.raises(CheckpointError, match="its base changed"):
        toy.Recorder(other).attach(spec, toy.data(), resume=True)

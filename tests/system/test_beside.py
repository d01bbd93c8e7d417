"""Files are written beside the ticks: as they were when handed over, in order, and nothing ends before its last one."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import toy

from tlora import trainer
from tlora.checkpoint import load_state, read_meta, save_state
from tlora.errors import StateError


class Gate:
    """Holds what is saved of some jobs back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str):
        self.names, self.open = names, threading.Event()
        monkeypatch.setattr(trainer, "save_state", self.save)

    def save(self, folder: Path, tensors: Any, meta: Any) -> None:
        if folder.name in self.names:
            assert self.open.wait(60)
        save_state(folder, tensors, meta)


def worker(**options: Any) -> toy.Recorder:
    return toy.Recorder(toy.super_model(deterministic=True), writes_beside=True, **options)


def until(work: toy.Recorder, seen: Callable[[], bool]) -> None:
    for _ in range(2000):
        if seen():
            return
        work.tick()
        if not work.jobs:
            time.sleep(0.01)  # for files
    raise AssertionError("never seen")


def test_what_is_saved_is_the_job_as_it_was_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, work = Gate(monkeypatch, "a"), worker()
    spec = toy.job(tmp_path, steps=50, save_every=50)
    job = work.attach(spec, toy.data())
    until(work, lambda: job.step == 2)
    work.save("a")
    until(work, lambda: job.step == 4)
    gate.open.set()
    until(work, lambda: not job.files)
    tensors, meta = load_state(spec.folder)
    assert meta["step"] == 2
    work.close()
    alone = toy.Recorder(toy.super_model(deterministic=True))
    other = alone.attach(toy.job(tmp_path, "alone", steps=50, save_every=50), toy.data())
    until(alone, lambda: other.step == 2)
    assert torch.equal(tensors["master"], other.state.master)
    assert torch.equal(tensors["exp_avg_sq"], other.state.exp_avg_sq)


def test_a_job_that_leaves_holds_nobody_up_and_has_left_once_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, work = Gate(monkeypatch, "a"), worker()
    job, other = (work.attach(toy.job(tmp_path, name, steps=50), toy.data()) for name in "ab")
    until(work, lambda: job.step == 2)
    work.release("a")
    until(work, lambda: other.step == 6)
    assert list(work.jobs) == ["b"]
    assert list(work.leaving) == ["a"]
    assert job.record.state == "running"
    with pytest.raises(StateError, match="resident already"):
        work.attach(job.spec, toy.data())
    with pytest.raises(StateError, match="another process"):
        toy.Recorder(work.supermodel).attach(job.spec, toy.data(), resume=True)
    gate.open.set()
    until(work, lambda: job.record.state == "paused")
    assert not work.leaving
    assert read_meta(job.spec.folder)["step"] == job.step
    work.close()
    assert other.record.state == "paused"
    assert read_meta(other.spec.folder)["step"] == other.step


@pytest.mark.parametrize("leaves", [False, True])
def test_a_save_that_fails_later_ends_that_job_with_its_reason(
    leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, tensors: Any, meta: Any) -> None:
        if folder.name == "a":
            raise OSError("No space left on device")
        save_state(folder, tensors, meta)

    work = worker()
    job, other = (work.attach(toy.job(tmp_path, name, steps=8), toy.data(), resume=True) for name in "ab")
    until(work, lambda: job.step == 2)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "save_state", full)
        work.release("a") if leaves else work.save("a")
        until(work, lambda: job.record.state == "failed")
    assert "No space left" in job.record.reason
    toy.finish(work)
    work.close()
    assert other.record.state == "finished"
    work.attach(job.spec, toy.data(), resume=True)
    assert "a" in work.jobs


def test_a_save_by_the_clock_that_finds_an_earlier_one_failed_ends_that_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_handed_over = threading.Event()

    def full(*_: Any) -> None:
        assert is_handed_over.wait(60)
        raise OSError("No space left on device")

    monkeypatch.setattr(trainer, "save_state", full)
    work = worker()
    job = work.attach(toy.job(tmp_path, "a", steps=8), toy.data())
    work.save("a")
    is_handed_over.set()
    wait(job.files)
    work.save("a")
    until(work, lambda: job.record.state == "failed")
    assert "No space left" in job.record.reason
    work.close()


def test_files_that_cannot_be_written_for_a_while_hold_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tlora.beside._AGAIN_S", 0.01)
    back = threading.Event()

    def full(folder: Path, tensors: Any, meta: Any) -> None:
        if folder.name == "a" and not back.is_set():
            raise OSError("No space left on device")
        save_state(folder, tensors, meta)

    monkeypatch.setattr(trainer, "save_state", full)
    work = worker(patience_s=60.0)
    job, other = (work.attach(toy.job(tmp_path, name, steps=9, save_every=1), toy.data()) for name in "ab")
    until(work, lambda: other.record.state == "finished")
    assert job.record.state == "running"
    assert "no save at step 3" in caplog.text
    assert "No space left on device. It is tried again" in caplog.text
    assert not (job.spec.folder / "adapter_model.safetensors").exists()  # in order
    back.set()
    until(work, lambda: job.record.state == "finished")
    work.close()
    assert read_meta(job.spec.folder)["step"] == 9


def test_a_finished_job_is_finished_once_its_adapter_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, work = Gate(monkeypatch, "a"), worker()
    job = work.attach(toy.job(tmp_path, steps=2), toy.data())
    toy.finish(work)
    assert job.record.state == "running"
    assert not (job.spec.folder / "adapter_model.safetensors").exists()
    gate.open.set()
    work.close()
    assert job.record.state == "finished"
    assert (job.spec.folder / "adapter_model.safetensors").exists()
    assert work.take_ended() == (job,)


def test_without_room_for_a_copy_a_save_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(state: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    work = worker()
    job = work.attach(toy.job(tmp_path, steps=9), toy.data())
    until(work, lambda: job.step == 2)
    monkeypatch.setattr(type(job.state), "frozen", no_room)
    work.save("a")
    assert read_meta(job.spec.folder)["step"] == 2
    work.close()


def test_a_save_says_how_long_it_took_with_all_that_it_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "held")
    work = worker()
    jobs = [work.attach(toy.job(tmp_path, name, steps=100), toy.data(seed=at)) for at, name in enumerate(["held", "b"])]
    until(work, lambda: all(job.step and job.is_settled for job in jobs))
    for job in jobs:
        work.save(job.name)
    began_s = time.monotonic()
    time.sleep(0.2)
    assert not any(job.save_s for job in jobs)
    gate.open.set()
    wait([file for job in jobs for file in job.files])
    assert all(0.2 <= job.save_s < time.monotonic() - began_s + 0.2 for job in jobs)


def test_an_adapter_is_written_though_its_unit_has_no_base_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units that mend themselves let go of it before they load it again."""
    gate, work = Gate(monkeypatch, "a"), worker()
    job = work.attach(toy.job(tmp_path, steps=2), toy.data())
    until(work, lambda: not work.jobs)
    base = work.supermodel
    del work.supermodel
    gate.open.set()
    wait(work._closings.values())
    work.supermodel = base
    work.close()
    assert job.record.state == "finished", job.record.reason


def test_memory_that_runs_out_at_a_save_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(values: torch.Tensor) -> torch.Tensor:
        if values.numel() > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return asked(values)

    asked, work = torch.isfinite, worker()
    job = work.attach(toy.job(tmp_path, steps=4), toy.data())
    monkeypatch.setattr(torch, "isfinite", full)
    work.save("a")
    assert job.record.state == "running", job.record.reason
    job.state.master[-1] = torch.nan
    work.save("a")
    until(work, lambda: job.record.state == "failed")
    assert "no longer finite" in job.record.reason
    work.close()

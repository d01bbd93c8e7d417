"""A job's saved state is the last one that was whole, whatever happens while it is written."""

import multiprocessing
import os
import random
import time
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tlora.checkpoint import LAST, STATE, JobFolder, load_state, read_meta, save_state
from tlora.errors import CheckpointError, StateError

FORK = multiprocessing.get_context("fork")


def vectors(step: int, size: int = 16) -> dict[str, torch.Tensor]:
    return {"master": torch.full((size,), step / 7), "exp_avg": torch.full((size,), -step, dtype=torch.float64)}


def meta(step: int) -> dict[str, object]:
    return {"step": step, "best_loss": float("inf"), "spec": {"seed": 2**63 - 1, "betas": (0.9, 0.999)}}


def holds(folder: Path, step: int) -> bool:
    tensors, described = load_state(folder)
    return described["step"] == step and all(
        torch.equal(tensors[name], part) for name, part in vectors(step, tensors["master"].numel()).items()
    )


def test_reads_back_as_written(tmp_path: Path) -> None:
    for step in (3, 4):
        save_state(tmp_path, vectors(step), meta(step))
        assert holds(tmp_path, step)
    assert os.listdir(tmp_path / LAST) == ["state.safetensors"]
    described = read_meta(tmp_path)
    assert described["spec"] == {"seed": 2**63 - 1, "betas": [0.9, 0.999]}
    assert described["best_loss"] == float("inf")


def test_no_state(tmp_path: Path) -> None:
    assert not JobFolder(tmp_path).has_state
    with pytest.raises(CheckpointError, match="there is no saved state to resume from"):
        load_state(tmp_path)


def test_any_truncation_is_noticed(tmp_path: Path) -> None:
    save_state(tmp_path, vectors(3), meta(3))
    whole = (tmp_path / STATE).read_bytes()
    for count in [*range(0, len(whole), 7), len(whole) - 1]:
        (tmp_path / STATE).write_bytes(whole[:count])
        with pytest.raises(CheckpointError, match="is damaged"):
            load_state(tmp_path)


def test_any_changed_byte_is_noticed(tmp_path: Path) -> None:
    """Every byte in turn. A few in the header say the same when changed (blank for blank); nothing else may pass."""
    save_state(tmp_path, vectors(3), meta(3))
    whole, draw, passed = (tmp_path / STATE).read_bytes(), random.Random(0), 0
    for at in range(len(whole)):
        changed = bytes([whole[at] ^ 1 << draw.randrange(8)])
        (tmp_path / STATE).write_bytes(whole[:at] + changed + whole[at + 1 :])
        try:
            assert holds(tmp_path, 3)
            passed += 1
        except CheckpointError:
            continue
    assert passed <= 8


def test_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.checkpoint._FORMAT", 7)
    save_state(tmp_path, vectors(3), meta(3))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 7; want 1"):
        load_state(tmp_path)


@pytest.mark.parametrize("where", ["full while writing", "OSError while writing", "replace", "fsync"])
def test_a_failed_save_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    save_state(tmp_path, vectors(3), meta(3))

    def full(tensors: object, path: object = None, **_: object) -> None:
        if where.endswith("writing"):
            Path(str(path)).write_bytes(b"half")
        raise SafetensorError("I/O error: No space left") if where.startswith("full") else OSError(28, "No space left")

    broken = "tlora.checkpoint.save_file" if where.endswith("writing") else f"os.{where}"
    monkeypatch.setattr(broken, full)
    with pytest.raises(OSError, match="No space left"):
        save_state(tmp_path, vectors(4), meta(4))
    monkeypatch.undo()
    assert holds(tmp_path, 3)
    assert os.listdir(tmp_path / LAST) == ["state.safetensors"]


def save_without_end(folder: Path, done: Synchronized, large: int) -> None:
    torch.set_num_threads(1)
    while True:
        step = done.value + 1
        save_state(folder, vectors(step, large), meta(step))
        done.value = step


def test_killed_while_saving(tmp_path: Path) -> None:
    draw, done, removed = random.Random(1), FORK.Value("q", 0), 0
    for _ in range(20):
        before = done.value
        child = FORK.Process(target=save_without_end, args=(tmp_path, done, 200_000))
        child.start()
        while done.value == before:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        child.kill()
        child.join()
        assert holds(tmp_path, done.value) or holds(tmp_path, done.value + 1)
        folder = JobFolder(tmp_path)
        removed += len(folder.open())
        folder.close()
        assert os.listdir(tmp_path / LAST) == ["state.safetensors"]
    assert removed > 3, "hardly any kill fell into a save: this test tested nothing"


def hold(path: Path, held: Synchronized) -> None:
    folder = JobFolder(path)
    folder.open()
    held.value = 1
    time.sleep(60)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    held = FORK.Value("q", 0)
    child = FORK.Process(target=hold, args=(tmp_path / "new" / "job", held))
    child.start()
    while not held.value:
        time.sleep(0.001)
    folder = JobFolder(tmp_path / "new" / "job")
    with pytest.raises(StateError, match=r"new/job: another process is training into this folder\. Choose another"):
        folder.open()
    child.kill()
    child.join()
    assert folder.open() == []
    with pytest.raises(StateError, match="another process"):
        JobFolder(folder.path).open()
    folder.close()
    assert JobFolder(folder.path).open() == []


def test_half_written_files_of_every_part_are_reported(tmp_path: Path) -> None:
    left = [tmp_path / part / name for part, name in (("", "job.yaml"), ("last", "state.safetensors"), ("best", "a"))]
    left = [path.with_name(path.name + ".incomplete-123") for path in left]
    for path in left:
        path.mkdir(parents=True)
        (path / "half").write_text("half")
    assert JobFolder(tmp_path).open() == left
    assert not any(path.exists() for path in left)

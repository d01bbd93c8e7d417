"""Files are whole or absent."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tlora.files import atomic_path, remove_incomplete


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_replaces_in_one_go(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def write(path: Path, text: str | None, then: Callable[[], None] = lambda: None) -> None:
    with atomic_path(path) as temporary:
        if text is not None:
            temporary.write_text(text)
        then()


@pytest.mark.parametrize("where", ["body", "nothing written", "fsync", "replace"])
def test_an_error_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    if where in ("fsync", "replace"):
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError, match="No "):
        write(path, None if where == "nothing written" else "new", fail if where == "body" else lambda: None)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_readable_by_whoever_may_read_here(tmp_path: Path) -> None:
    """Some writers make files that only their owner can read."""
    (tmp_path / "plain.txt").touch()
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.touch(mode=0o600)
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "plain.txt").stat().st_mode


def test_synced_before_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Renamed first, a loss of power leaves an empty file under the final name."""
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args)))
    with atomic_path(tmp_path / "a.txt") as temporary:
        temporary.write_text("new")
    assert calls == ["fsync", "replace", "fsync"]


def test_half_written_files_are_removed_and_named(tmp_path: Path) -> None:
    """With what the writer's own library had put beside them."""
    writer = atomic_path(tmp_path / "a.txt")
    half = writer.__enter__()
    half.write_text("half")
    (half.parent / ".tmp1234").write_text("half")
    (tmp_path / "whole.txt").write_text("whole")
    assert remove_incomplete(tmp_path) == [half.parent]
    assert os.listdir(tmp_path) == ["whole.txt"]
    assert remove_incomplete(tmp_path / "nowhere") == []

"""Files are whole or absent."""

import os
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


@pytest.mark.parametrize("where", ["body", "nothing written", "fsync", "replace"])
def test_an_error_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    if where in ("fsync", "replace"):
        monkeypatch.setattr(os, where, fail)
    with pytest.raises(OSError), atomic_path(path) as temporary:  # noqa: PT011
        if where != "nothing written":
            temporary.write_text("new")
        if where == "body":
            fail()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


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
    writer = atomic_path(tmp_path / "a.txt")
    left = writer.__enter__()
    left.write_text("half")
    (tmp_path / "whole.txt").write_text("whole")
    assert remove_incomplete(tmp_path) == [left]
    assert os.listdir(tmp_path) == ["whole.txt"]
    assert remove_incomplete(tmp_path / "nowhere") == []

"""Files that are whole or absent: written under another name, synced, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".incomplete-"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on leaving, sync it and rename it over `path`. On any error it is removed
    and `path` stays what it was."""
    temporary = path.with_name(f"{path.name}{_MARK}{os.getpid()}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # some writers make files that only their owner can read
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_incomplete(folder: Path) -> list[Path]:
    """Remove what a killed process left half-written under `folder`; returns what it was."""
    left = sorted(path for path in folder.glob(f"*{_MARK}*") if path.is_file())
    for path in left:
        path.unlink()
    return left

"""Files and folders that are whole or absent: written under another name, synced, then renamed.

Called by all that writes what must outlive a crash: checkpoints, adapters, exports. What is in them is theirs.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MARK = ".incomplete-"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on leaving, sync that file and rename it over `path`. On any error it is removed and
    `path` stays what it was. It lies in a folder of its own, for some writers put temporary files beside theirs."""
    folder = path.with_name(f"{path.name}{_MARK}{os.getpid()}")
    folder.mkdir(exist_ok=True)
    temporary = folder / path.name
    try:
        yield temporary
        temporary.chmod(folder.stat().st_mode & 0o666)  # and some make files that only their owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder to write to; on leaving, sync its files and rename it to `path`, which must be absent or an
    empty folder. On any error it is removed."""
    folder = path.with_name(f"{path.name}{_MARK}{os.getpid()}")
    folder.mkdir(parents=True)
    try:
        yield folder
        for file in (part for part in folder.rglob("*") if part.is_file()):
            file.chmod(folder.stat().st_mode & 0o666)
            with file.open("rb+") as written:
                os.fsync(written.fileno())
        os.replace(folder, path)
        sync_folder(path.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(source: Path, target: Path) -> None:
    """A copy of a folder, whole, in place of one that was there; asked again, it mends a crash in between."""
    made = target.with_name(f"{target.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    with atomic_folder(made) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(f"*{_MARK}*"))
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_incomplete(folder: Path) -> list[Path]:
    """Remove what a killed process left half-written under `folder`; returns the folders it lay in."""
    left = sorted(path for path in folder.glob(f"*{_MARK}*") if path.is_dir())
    for path in left:
        shutil.rmtree(path)
    return left

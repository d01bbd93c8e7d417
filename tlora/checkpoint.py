"""A job's folder: the exact resume state in `last/`, the best adapter in `best/`, the final one at the top.

The state is one file, replaced in one rename, so the previous one loads until then; it carries a checksum, because a
truncated or damaged file must be noticed before it joins its neighbours. Called by the trainer.
"""

import errno
import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tlora.beside import to_host
from tlora.errors import CheckpointError, SpecError, StateError
from tlora.files import atomic_path, remove_incomplete
from tlora.spec import JobSpec, differences, parse_job

LAST, BEST = "last", "best"
STATE = f"{LAST}/state.safetensors"
_FORMAT = 1
_TOKENIZER = "tokenizer_config.json"
_KINDS: dict[str, type] = {
    "spec": dict, "step": int, "num_steps": int, "tokens": int, "evaluating": bool, "best_loss": float, "data": str,
    "dtype": str, "base": str, "run_id": str,
}  # fmt: skip


def save_state(folder: Path, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Replace the job's resume state. On any error the previous one stays. The job's folder is not made again: where a
    mount is away, that would be beneath it."""
    path = folder / STATE
    path.parent.mkdir(exist_ok=True)
    on_cpu = {name: to_host(tensor.detach()) for name, tensor in tensors.items()}
    header = json.loads(json.dumps({**meta, "format": _FORMAT}))
    header["checksum"] = _checksum(on_cpu, header)
    with atomic_path(path) as temporary:
        try:
            save_file(on_cpu, temporary, metadata={"tlora": json.dumps(header)})
        except SafetensorError as error:  # how a full disk shows itself
            raise OSError(str(error)) from error


def load_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The job's saved vectors and what describes them. Raises CheckpointError if there is none, or it is damaged."""
    path = folder / STATE
    if not path.exists():
        raise CheckpointError(f"{path}: there is no saved state to resume from.")
    try:
        meta = read_meta(folder)
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}). Start the job anew in another output folder.") from error
    got = meta.get("format") if isinstance(meta, dict) else None
    if got != _FORMAT:
        raise CheckpointError(f"{path}: has format {got}; want {_FORMAT}. Resume it with the tLoRA that wrote it.")
    if _checksum(tensors, meta) != meta.get("checksum"):
        raise CheckpointError(
            f"{path}: is damaged (its checksum differs). Start the job anew in another output folder."
        )
    return tensors, meta


def load_job_state(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """`load_state` of what the trainer saves, its description checked too."""
    tensors, meta = load_state(folder)
    makes_sense = all(isinstance(meta.get(key), kind) for key, kind in _KINDS.items())
    if not (makes_sense and 0 <= meta["step"] <= meta["num_steps"]):
        raise CheckpointError(f"{folder / STATE}: is damaged (what describes it makes no sense). Start the job anew.")
    return tensors, meta


def has_finished(spec: JobSpec) -> bool:
    """Whether a job's folder holds the end of this very job, whole; what is unsound there is for resuming to find."""
    folder = spec.folder
    try:
        meta = read_meta(folder)
        with safe_open(folder / "adapter_model.safetensors", framework="pt"):
            same = not differences(parse_job(meta["spec"]), spec)
        return same and meta["step"] == meta["num_steps"] and not meta["evaluating"] and (folder / _TOKENIZER).exists()
    except (SpecError, SafetensorError, OSError, ValueError, KeyError, TypeError):
        return False


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer and its chat template beside an adapter, unless they are there: each file whole, the one that is
    looked for last. Raises OSError, also where the tokenizer's own library raises something else."""
    if (folder / _TOKENIZER).exists():
        return
    with atomic_path(folder / _TOKENIZER) as last:
        try:
            tokenizer.save_pretrained(str(last.parent))
        except Exception as error:  # the Rust side raises bare ones
            raise OSError(f"{folder}: the tokenizer cannot be written: {error}") from error
        for file in sorted(last.parent.iterdir()):
            if file != last:
                os.replace(file, folder / file.name)


def read_meta(folder: Path) -> dict[str, Any]:
    """What describes the saved state, without its vectors."""
    with safe_open(folder / STATE, framework="pt") as file:
        meta: dict[str, Any] = json.loads(file.metadata()["tlora"])
    return meta


def has_written_best(folder: Path, loss: float | None) -> bool:
    """Whether `best/` holds the adapter of a job's lowest loss: files are written in turn, so it does if a state that
    was saved later knows that loss."""
    try:
        return (folder / BEST / "adapter_config.json").exists() and read_meta(folder)["best_loss"] == loss
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return False


def _checksum(tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> int:
    """Of every value, what describes it included: a flipped digit of the step number is damage too."""
    total = zlib.crc32(json.dumps({**meta, "checksum": 0}, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        total = zlib.crc32(tensor.view(torch.uint8).numpy().data, total)
    return total


class JobFolder:
    """The output folder of one job, held by one process at a time."""

    def __init__(self, path: Path):
        self.path = path
        self._lock: IO[str] | None = None

    @property
    def has_state(self) -> bool:
        return (self.path / STATE).exists()

    def open(self, mark: str | None = None) -> list[Path]:
        """Make the folder and hold it; returns the half-written files that a killed process had left and that are gone
        now. Raises StateError if another process holds it, OSError if it cannot be written or if `mark`, a file of the
        same storage, is not there: a job whose saves are away must not begin anew."""
        if mark and not os.path.exists(mark):
            raise FileNotFoundError(errno.ENOENT, f"{os.strerror(errno.ENOENT)}: is the storage away?", mark)
        self.path.mkdir(parents=True, exist_ok=True)
        lock = (self.path / ".lock").open("a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            if isinstance(error, BlockingIOError):
                text = f"{self.path}: another process is training into this folder. Choose another output."
                raise StateError(text) from None
            raise
        self._lock = lock
        return [left for part in (".", LAST, BEST) for left in remove_incomplete(self.path / part)]

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

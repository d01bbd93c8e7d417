"""Adapters out of saved states, and merged models.

Called by `tlora export`. What it writes is one new folder, whole or absent. The layout of an adapter is left to
`tlora.adapter`, merging to PEFT.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tlora.adapter import CONFIG, FROZEN, WEIGHTS, AdapterState, export_peft
from tlora.base import DTYPES, Outline, load_model
from tlora.checkpoint import STATE, load_job_state
from tlora.data import load_tokenizer
from tlora.errors import CheckpointError
from tlora.files import atomic_folder
from tlora.spec import BaseSpec, parse_job


def export_last(folder: Path, output: Path) -> None:
    """Write a job's adapter as of its last save, in PEFT's layout. Raises CheckpointError if there is no sound save, or
    `output` holds files or cannot be written."""
    tensors, meta = load_job_state(folder)
    spec = parse_job(meta["spec"])
    outline, tokenizer = Outline.load(spec.base), load_tokenizer(spec.base)
    dtype = DTYPES.get(meta["dtype"].removeprefix("torch."))
    if dtype is None:
        raise CheckpointError(f"{folder}: its state has dtype {meta['dtype']!r}; want one of {', '.join(DTYPES)}.")
    state = AdapterState(
        outline.lay_out(spec.adapter), spec.adapter, seed=spec.seed, device=torch.device("cpu"), dtype=dtype
    )
    state.load(tensors)
    trained = meta["step"] > 1 and spec.optim.lr > 0.0
    with _new_folder(output) as written:
        export_peft(state, written, spec.base, outline.linears, trained=trained)
        tokenizer.save_pretrained(written)


def copy_adapter(folder: Path, output: Path) -> None:
    """An adapter, without what else its folder holds. Raises CheckpointError as `export_last` does."""
    with _new_folder(output) as written:
        for name in (WEIGHTS, CONFIG):
            shutil.copyfile(folder / name, written / name)


def merge_adapter(folder: Path, output: Path) -> None:
    """Write the base model with an adapter merged into its weights, in the base's own precision, and name that base.

    Raises CheckpointError if the adapter is broken or of another base, or `output` holds files or cannot be written.
    """
    from peft import PeftModel, get_peft_model_state_dict

    if not (folder / WEIGHTS).exists():
        hint = (
            f" It has a saved state: write its adapter first, with `tlora export {folder} <folder>`."
            if (folder / STATE).exists()
            else ""
        )
        raise CheckpointError(f"{folder}: there is no adapter ({WEIGHTS}) to merge.{hint}")
    base = _base_of(folder)
    tokenizer = load_tokenizer(base)
    with _new_folder(output) as written:
        model = load_model(base, "auto")
        try:
            adapted = PeftModel.from_pretrained(model, folder)
            found, wanted = load_file(folder / WEIGHTS).keys(), get_peft_model_state_dict(adapted).keys()
            if lacking := {key for key in wanted - found if FROZEN not in key}:
                raise ValueError(f"{WEIGHTS} lacks {len(lacking)} weights (first: {min(lacking)})")
            merged = adapted.merge_and_unload(safe_merge=True)
        except Exception as error:  # PEFT lets through whatever a configuration makes it meet
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(
                f"{folder}: cannot be merged into {base.model}: {type(error).__name__}: {reason}"
            ) from error
        merged.save_pretrained(written)
        tokenizer.save_pretrained(written)
        origin = {"base_model": base.model, "revision": base.revision, "adapter": str(folder)}
        (written / "tlora.json").write_text(json.dumps(origin, indent=2) + "\n")


def _base_of(folder: Path) -> BaseSpec:
    """The base that an adapter names."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}.") from error
    named = config if isinstance(config, dict) else {}
    model, revision = named.get("base_model_name_or_path"), named.get("revision")
    if not isinstance(model, str) or not model:
        raise CheckpointError(
            f"{path}: base_model_name_or_path = {model!r}: want the base's hub name or folder. Write it there."
        )
    if not isinstance(revision, str | None):
        raise CheckpointError(f"{path}: revision = {revision!r}: want a branch, tag or commit, or null.")
    return BaseSpec(model=model, revision=revision)


@contextmanager
def _new_folder(output: Path) -> Iterator[Path]:
    """A folder to write to that becomes `output`, which may exist but must be empty."""
    try:
        if output.is_file() or (output.is_dir() and any(output.iterdir())):
            raise CheckpointError(f"{output}: holds files already. Name a new folder.")
        with atomic_folder(output.resolve()) as folder:
            yield folder
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{output}: cannot be written: {error}.") from error

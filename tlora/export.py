"""Adapters out of saved states, and merged models. Called by `tlora export`."""

import json
from pathlib import Path

import torch

from tlora.adapter import CONFIG, WEIGHTS, AdapterState, export_peft
from tlora.base import DTYPES, Outline, unreachable
from tlora.checkpoint import STATE, load_state
from tlora.data import load_tokenizer
from tlora.errors import CheckpointError
from tlora.spec import BaseSpec, parse_job


def export_last(folder: Path, output: Path) -> None:
    """Write a job's adapter as of its last save, in PEFT's layout. Raises CheckpointError if there is no sound save."""
    tensors, meta = load_state(folder)
    spec = parse_job(meta["spec"])
    outline = Outline.load(spec.base)
    dtype = DTYPES[str(meta["dtype"]).removeprefix("torch.")]
    state = AdapterState(
        outline.lay_out(spec.adapter), spec.adapter, seed=spec.seed, device=torch.device("cpu"), dtype=dtype
    )
    state.load(tensors)
    export_peft(state, output, spec.base, outline.linears, trained=False)
    load_tokenizer(spec.base).save_pretrained(output)


def merge_adapter(folder: Path, output: Path) -> None:
    """Write the base model with an adapter merged into its weights, in the base's own precision, and name that base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    if not (folder / WEIGHTS).exists():
        hint = (
            f" It has a saved state: write its adapter first, with `tlora export {folder} <folder>`."
            if (folder / STATE).exists()
            else ""
        )
        raise CheckpointError(f"{folder}: there is no adapter ({WEIGHTS}) to merge.{hint}")
    config = json.loads((folder / CONFIG).read_text())
    base = BaseSpec(model=config["base_model_name_or_path"], revision=config.get("revision"))
    try:
        model = AutoModelForCausalLM.from_pretrained(base.model, revision=base.revision, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        raise unreachable(base, error) from error
    merged = PeftModel.from_pretrained(model, folder).merge_and_unload(safe_merge=True)
    merged.save_pretrained(output)
    load_tokenizer(base).save_pretrained(output)
    origin = {"base_model": base.model, "revision": base.revision, "adapter": str(folder)}
    (output / "tlora.json").write_text(json.dumps(origin, indent=2) + "\n")

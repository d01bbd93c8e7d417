"""What a base model is, without its weights: shapes, limits, precision, and the reasons to refuse it.

`tlora check` and export need no more than this; the super-model asks it about the model that it has loaded.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from os.path import abspath, isdir
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tlora.adapter import AdapterLayout, lay_out, match_targets
from tlora.errors import ModelError, TargetError
from tlora.spec import AdapterSpec, BaseSpec

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Outline:
    """A base's linear modules and limits."""

    linears: Mapping[str, torch.Size]
    """Weight shape [N, K] of every module that can be a target."""
    head: str
    """Name of the output head."""
    is_tied: bool
    """Whether the head's weight is the input embedding's."""
    model_type: str
    vocab_size: int
    """Rows of the embedding, or of a head that has fewer: token ids must lie below it."""
    max_positions: int | None
    """Longest sequence whose result does not depend on what is packed with it."""
    num_parameters: int
    """A tied head counted once."""
    num_layers: int
    hidden_size: int
    divisor: int = 1
    """Tensor-parallel ranks must divide this; 1: transformers has no plan for it that can be taken."""

    @classmethod
    def of(cls, model: PreTrainedModel, name: str) -> "Outline":
        """Read a model, on any device. Raises ModelError if it has nothing to adapt, or cannot carry adapters yet."""
        linears = {path: module.weight.shape for path, module in model.named_modules() if type(module) is nn.Linear}
        head, embedding = model.get_output_embeddings(), cast(nn.Embedding, model.get_input_embeddings())
        if type(head) is not nn.Linear or len(linears) < 2:
            raise ModelError(f"base.model = {name!r}: a {type(model).__name__} has no plain linear layers to adapt.")
        config = model.config.get_text_config()
        _refuse(model.config, config, name)
        return cls(
            linears=linears,
            head=next(path for path, module in model.named_modules() if module is head),
            is_tied=head.weight is embedding.weight,
            model_type=config.model_type,
            vocab_size=min(len(embedding.weight), len(head.weight)),
            max_positions=_max_positions(config),
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            divisor=_divisor(config, linears, next(path for path, module in model.named_modules() if module is head)),
        )

    @classmethod
    def load(cls, base: BaseSpec) -> "Outline":
        """Read a base's configuration alone, from a folder or the hub. Raises ModelError if it cannot be reached."""
        _refuse_folder(base)
        try:
            config = AutoConfig.from_pretrained(base.model, revision=base.revision)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            model.tie_weights()
        except Exception as error:  # hub, network, JSON and each configuration class raise their own
            raise unreachable(base, error) from error
        return cls.of(model, base.model)

    def lay_out(self, spec: AdapterSpec) -> AdapterLayout:
        """Resolve an adapter's targets. Raises TargetError."""
        layout = lay_out(spec, self.linears, self.model_type, self.head)
        if self.is_tied and any(site.name == self.head for site in layout.sites):
            raise TargetError(
                f"adapter.targets: '{self.head}' shares its weight with the input embedding, so an adapter on it could "
                "not be merged. Leave it out."
            )
        return layout

    def match(self, spec: AdapterSpec) -> dict[str, int]:
        """Modules matched by each target pattern."""
        return match_targets(spec, self.linears, self.model_type, self.head)


def dtype_of(base: BaseSpec, device: torch.device) -> torch.dtype:
    """The base's precision on a device."""
    if base.dtype != "auto":
        return DTYPES[base.dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def unreachable(base: BaseSpec, error: Exception) -> ModelError:
    """One line of why a base cannot be had."""
    if not isdir(base.model) and (base.model.count("/") != 1 or base.model[0] in "./~"):
        why = f"there is no such folder; looked for {abspath(base.model)}"
        return ModelError(f"base.model = {base.model!r}: cannot be loaded: {why}")
    why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ModelError(f"base.model = {base.model!r}: cannot be loaded: {why}")


def load_model(base: BaseSpec, dtype: torch.dtype | str) -> PreTrainedModel:
    """The base with all its weights. Raises ModelError if it cannot be had, or its files lack some of them."""
    _refuse_folder(base)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base.model, revision=base.revision, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # hub, network, files and each model class raise their own
        raise unreachable(base, error) from error
    model, info = loaded
    if lacking := sorted(info["missing_keys"]):
        raise ModelError(
            f"base.model = {base.model!r}: its files lack {len(lacking)} weights (first: {lacking[0]}), which would be "
            "drawn at random. Complete the download or save the model anew."
        )
    return cast(PreTrainedModel, model)


def _refuse_folder(base: BaseSpec) -> None:
    folder = Path(base.model)
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"base.model = {base.model!r}: is the folder of an adapter. Name the model below it, and the adapter in "
            "adapter.init_from."
        )
    if any(folder.glob("*.bin")) and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"base.model = {base.model!r}: its weights are pickled (.bin), which may run code when they are loaded; "
            "want safetensors. Save the model anew with save_pretrained."
        )


def refuse_without_weights(base: BaseSpec) -> None:
    """Raise ModelError for a base's folder that lacks files of weights; the hub's are not asked for."""
    folder = Path(base.model)
    there, index = {path.name for path in folder.glob("*.safetensors")}, folder / "model.safetensors.index.json"
    is_cut = index.exists() and "model.safetensors" not in there  # the whole is taken, if it is there
    try:
        wanted = set(json.loads(index.read_text())["weight_map"].values()) if is_cut else set()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise unreachable(base, error) from error
    if folder.is_dir() and (not there or wanted - there):
        lacking = min(wanted - there, default="*.safetensors")
        raise ModelError(f"base.model = {base.model!r}: {lacking} is not there. Complete the download.")


def _refuse(config: Any, text_config: Any, name: str) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = (quantization if isinstance(quantization, dict) else vars(quantization)).get("quant_method")
        raise ModelError(
            f"base.model = {name!r}: it is quantised{f' ({method})' if method else ''}. Quantised bases are not "
            "supported yet: name the model that it was made from."
        )
    if chunk := getattr(text_config, "attention_chunk_size", None):
        raise ModelError(
            f"base.model = {name!r}: its attention is cut into chunks of {chunk} tokens, which would not begin where "
            "packed sequences do. Such models are not supported yet."
        )


def cut_style(config: Any, name: str) -> str:
    """What transformers' own tensor-parallel plan says of a linear: colwise, rowwise, something else, or nothing."""
    plan: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return next((style for pattern, style in plan.items() if fnmatchcase(name, "*" + pattern)), "")


def _divisor(config: Any, linears: Mapping[str, torch.Size], head: str) -> int:
    heads = (getattr(config, field, None) or 0 for field in ("num_attention_heads", "num_key_value_heads"))
    styles = {name: cut_style(config, name) for name in linears if name != head}
    if not styles or set(styles.values()) - {"colwise", "rowwise"}:
        return 1
    return math.gcd(*heads, *(linears[name][style == "rowwise"] for name, style in styles.items()))


def _max_positions(config: Any) -> int | None:
    """Positions that the model has; where its rotary frequencies change with the longest sequence in the batch, those
    for which they do not."""
    most: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            inner = getattr(config, "original_max_position_embeddings", None)
            original = part.get("original_max_position_embeddings") or inner or most
            most = min(most, original) if most and original else original
    return most

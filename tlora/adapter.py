"""A job as one vector: all its A and B, its gradient and its Adam moments, each one contiguous tensor.

The super-model places an `AdapterState` and reads its sites; the optimizer, checkpoints and export see flat vectors.
Matching of targets and ranks, and the files written, are PEFT's.
"""

import copy
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import expanduser
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tlora import randomness
from tlora.beside import copy_in_pieces, to_host
from tlora.errors import CheckpointError, TargetError
from tlora.files import atomic_path
from tlora.kernels.tiles import Site
from tlora.spec import AdapterSpec, BaseSpec

ALIGN = 32  # elements; keeps every A and B on a vector and bulk-copy boundary
_PREFIX = "base_model.model."
FROZEN = ".base_layer."  # PEFT saves a copy of the head's own weight with an adapter on it
_Number = TypeVar("_Number", int, float)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True, slots=True)
class SiteLayout:
    """Where one module's A [rank, inputs] and B [outputs, rank] lie in the job's vectors; B rank by rank, so that the
    kernels read both along their long side whatever the rank."""

    name: str
    outputs: int
    inputs: int
    rank: int
    scale: float
    a_at: int
    b_at: int

    def views(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = vector[self.a_at : self.a_at + self.rank * self.inputs].view(self.rank, self.inputs)
        b = vector[self.b_at : self.b_at + self.rank * self.outputs].view(self.rank, self.outputs)
        return a, b.T


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """Every site of a job: all A first, then all B, so that each half is one slice (LoRA+ gives them two rates)."""

    sites: tuple[SiteLayout, ...]
    b_start: int
    size: int

    @property
    def num_parameters(self) -> int:
        return sum(site.rank * (site.inputs + site.outputs) for site in self.sites)


def match_targets(spec: AdapterSpec, linears: Mapping[str, torch.Size], model_type: str, head: str) -> dict[str, int]:
    """How many modules each target pattern matches, in PEFT's sense: a name matches whole dotted segments at the end,
    a regular expression the full name, `all-linear` every linear but the output head."""
    return {pattern: len(names) for pattern, names in _matches(spec, linears, model_type, head)}


def lay_out(spec: AdapterSpec, linears: Mapping[str, torch.Size], model_type: str, head: str) -> AdapterLayout:
    """Place A and B of every targeted module. `linears` maps names to weight shapes [N, K].

    Raises TargetError if a pattern matches no module, or a rank or alpha pattern none of the targeted ones.
    """
    matches = list(_matches(spec, linears, model_type, head))
    for pattern, names in matches:
        if not names:
            raise TargetError(
                f"adapter.targets: '{pattern}' matches none of the {len(linears)} linear modules; "
                f"want one of {', '.join(leaves(linears))}, or a regular expression for the full name."
            )
    wanted = {name for _, names in matches for name in names}
    targets = [name for name in linears if name in wanted]
    for field, patterns in (("rank_pattern", list(spec.rank_pattern)), ("alpha_pattern", list(spec.alpha_pattern))):
        used = {get_pattern_key(patterns, name) for name in targets}
        for unused in [pattern for pattern in patterns if pattern not in used]:
            raise TargetError(f"adapter.{field}: '{unused}' decides no targeted module; remove it or mend the name.")
    shapes = []
    for name in targets:
        rank = by_pattern(spec.rank_pattern, name, spec.rank)
        alpha = by_pattern(spec.alpha_pattern, name, spec.alpha)
        shapes.append((name, rank, alpha / rank**0.5 if spec.rslora else alpha / rank))
    ends, at = [], 0
    for side in (1, 0):
        for name, rank, _ in shapes:
            ends.append(at)
            at += -(-rank * linears[name][side] // ALIGN) * ALIGN
    a_at, b_at = ends[: len(shapes)], ends[len(shapes) :]
    sites = tuple(
        SiteLayout(name, linears[name][0], linears[name][1], rank, scale, a, b)
        for (name, rank, scale), a, b in zip(shapes, a_at, b_at, strict=True)
    )
    return AdapterLayout(sites, b_start=b_at[0], size=at)


def by_pattern(patterns: Mapping[str, _Number], name: str, default: _Number) -> _Number:
    """What a rank or alpha pattern says of a module, in PEFT's sense: the first that fits, else the default."""
    return patterns.get(get_pattern_key(list(patterns), name), default)


def leaves(names: Mapping[str, torch.Size]) -> list[str]:
    """The distinct last segments of dotted names, in order."""
    return list(dict.fromkeys(name.rpartition(".")[2] for name in names))


def _matches(
    spec: AdapterSpec, linears: Mapping[str, torch.Size], model_type: str, head: str
) -> Iterator[tuple[str, list[str]]]:
    targets: Sequence[str] | None = spec.targets
    if targets is None:
        targets = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(model_type)
        if targets is None:
            raise TargetError(
                f"adapter.targets: PEFT names no default for model type '{model_type}'; want a list such as "
                f"[{', '.join(name for name in leaves(linears) if name != head)}], or all-linear."
            )
    if targets == "all-linear":
        yield targets, [name for name in linears if name != head]
    elif isinstance(targets, str):
        yield targets, [name for name in linears if re.fullmatch(targets, name)]
    else:
        for target in targets:
            yield target, [name for name in linears if name == target or name.endswith("." + target)]


class AdapterState:
    """The vectors of one job, on one device: `master`, `grad`, `exp_avg`, `exp_avg_sq` in the optimizer's precision,
    and `compute`, the copy that the kernels read, in the base's (the master itself where they agree)."""

    def __init__(
        self,
        layout: AdapterLayout,
        spec: AdapterSpec,
        *,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
        is_drawn: bool = True,
    ):
        self.layout, self.spec, self.seed = layout, spec, seed
        wide = torch.promote_types(dtype, torch.float32)
        self.master, self.grad, self.exp_avg, self.exp_avg_sq = (
            torch.zeros(layout.size, dtype=wide, device=device) for _ in range(4)
        )
        self.compute = self.master if dtype == wide else torch.zeros(layout.size, dtype=dtype, device=device)
        if is_drawn:
            self._initialise()

    def _initialise(self) -> None:
        """PEFT's default: A uniform in ±1/√inputs (Kaiming, a = √5), B zero; drawn by seed and module name."""
        for site in self.layout.sites:
            a, _ = site.views(self.master)
            draw = torch.from_numpy(randomness.uniform(self.seed, "init:" + site.name, a.numel()))
            a.copy_(((2 * draw - 1) / site.inputs**0.5).view_as(a))
        self.publish()

    def park(self) -> None:
        """Leave the device for good: what is learnt goes to host memory, what the kernels need goes away."""
        self.master, self.exp_avg, self.exp_avg_sq = (
            to_host(vector) for vector in (self.master, self.exp_avg, self.exp_avg_sq)
        )
        self.compute = self.grad = torch.empty(0)

    def frozen(self) -> "AdapterState":
        """What is learnt, as it is now: later steps leave the copy alone. It has nothing for the kernels."""
        state = copy.copy(self)
        state.master, state.exp_avg, state.exp_avg_sq = (
            vector.clone() for vector in (self.master, self.exp_avg, self.exp_avg_sq)
        )
        state.compute = state.grad = torch.empty(0)
        return state

    @property
    def is_finite(self) -> bool:
        """Found without a copy of it, for a device's memory may be full."""
        return bool(torch.isfinite(torch.stack(torch.aminmax(self.master))).all())

    def publish(self) -> None:
        """Bring the kernels' copy up to date with the master."""
        if self.compute is not self.master:
            self.compute.copy_(self.master)

    def sites(self) -> Iterator[tuple[str, Site]]:
        for site in self.layout.sites:
            number = zlib.crc32(site.name.encode())
            yield (
                site.name,
                Site(
                    *site.views(self.compute), *site.views(self.grad), site.scale, self.spec.dropout, self.seed, number
                ),
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of it."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take over saved vectors. Raises CheckpointError if they are not this layout's."""
        for name, mine in self.tensors().items():
            saved = tensors.get(name)
            if saved is None or saved.shape != mine.shape or saved.dtype != mine.dtype:
                got = "nothing" if saved is None else f"{tuple(saved.shape)} {saved.dtype}"
                raise CheckpointError(f"saved vector '{name}': got {got}; want {tuple(mine.shape)} {mine.dtype}.")
            copy_in_pieces(mine, saved)
        self.grad.zero_()
        self.publish()

    def weights(self) -> dict[str, torch.Tensor]:
        """A and B under the names that PEFT gives them in a file."""
        named = {}
        for site in self.layout.sites:
            a, b = site.views(self.master)
            named[f"{_PREFIX}{site.name}.lora_A.weight"] = a
            named[f"{_PREFIX}{site.name}.lora_B.weight"] = b
        return named

    def load_peft(self, folder: str | Path) -> None:
        """Start from a PEFT adapter. Raises CheckpointError if its settings, keys or shapes are not this job's."""
        folder = Path(expanduser(folder))
        try:
            config = json.loads((folder / CONFIG).read_text())
            if not isinstance(config, dict) or not {"r", "lora_alpha"} <= config.keys():
                raise ValueError(f"{CONFIG} is no LoRA configuration")
            saved = {key: weight for key, weight in load_file(folder / WEIGHTS).items() if FROZEN not in key}
            if not all(weight.is_floating_point() and weight.isfinite().all() for weight in saved.values()):
                raise ValueError(f"{WEIGHTS} has weights that are no finite numbers")
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"adapter.init_from = {str(folder)!r}: no PEFT adapter can be read: {error}."
            ) from None
        for key, wanted in (("use_rslora", self.spec.rslora), ("use_dora", False)):
            if bool(config.get(key)) != wanted:
                raise CheckpointError(f"adapter.init_from: {key} is {config.get(key)} there; want {wanted}.")
        mine = self.weights()
        lacking, beyond = mine.keys() - saved.keys(), saved.keys() - mine.keys()
        for what, keys in (("lacks", lacking), ("has, and this job does not target,", beyond)):
            if keys:
                raise CheckpointError(f"adapter.init_from: {folder} {what} {len(keys)} weights (first: {min(keys)}).")
        for site in self.layout.sites:
            try:
                theirs = _scale_in(config, site.name)
            except (TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
                raise CheckpointError(
                    f"adapter.init_from: {folder / CONFIG} has no usable rank and alpha: {error}."
                ) from None
            if abs(theirs - site.scale) > 1e-9 * site.scale:
                raise CheckpointError(
                    f"adapter.init_from: {site.name} has scale {theirs:g} there; got {site.scale:g} from this "
                    "job's alpha and rank. Set them as they are there."
                )
        for key, weight in mine.items():
            if saved[key].shape != weight.shape:
                raise CheckpointError(
                    f"adapter.init_from: {key} is {tuple(saved[key].shape)} there; want {tuple(weight.shape)}. "
                    "Set adapter.rank as it is there."
                )
            weight.copy_(saved[key])
        self.publish()


def _scale_in(config: Mapping[str, Any], name: str) -> float:
    rank = float(by_pattern(config.get("rank_pattern") or {}, name, config["r"]))
    alpha = float(by_pattern(config.get("alpha_pattern") or {}, name, config["lora_alpha"]))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def export_peft(
    state: AdapterState, folder: Path, base: BaseSpec, linears: Mapping[str, torch.Size], *, trained: bool
) -> None:
    """Write the adapter in PEFT's layout, config and weights each replaced in one rename; nothing asks the network.

    `trained` says that B must not be all zero any more. Raises CheckpointError if a weight is not finite, or PEFT would
    not find in the files, read back, just what this adapter has.
    """
    folder.mkdir(exist_ok=True)
    weights = {key: weight.detach().cpu().contiguous().clone() for key, weight in state.weights().items()}
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise CheckpointError(f"{folder}: the adapter has weights that are not finite.")
    if trained and not any(weight.any() for key, weight in weights.items() if key.endswith("lora_B.weight")):
        raise CheckpointError(f"{folder}: every B is zero after training: the adapter would change nothing.")
    with atomic_path(folder / CONFIG) as path:
        _peft_config(state, base, linears).save_pretrained(str(path.parent))
        expected = _peft_shapes(LoraConfig.from_pretrained(str(path.parent)), linears)
    with atomic_path(folder / WEIGHTS) as path:
        save_file(weights, path, metadata={"format": "pt"})
        written = load_file(path)
        if {key: weight.shape for key, weight in written.items()} != expected:
            raise CheckpointError(f"{folder}: PEFT would look for other weights than the adapter has.")
        if not all(torch.equal(written[key], weights[key]) for key in weights):
            raise CheckpointError(f"{folder / WEIGHTS}: does not read back as written; is the disk sound?")


def _peft_shapes(config: LoraConfig, linears: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Names and shapes of the weights that PEFT, given `config`, would make on a base with these linears."""
    shapes = {}
    for name, (outputs, inputs) in linears.items():
        if check_target_module_exists(config, name):
            rank = by_pattern(config.rank_pattern or {}, name, config.r)
            shapes[f"{_PREFIX}{name}.lora_A.weight"] = torch.Size((rank, inputs))
            shapes[f"{_PREFIX}{name}.lora_B.weight"] = torch.Size((outputs, rank))
    return shapes


def _peft_config(state: AdapterState, base: BaseSpec, linears: Mapping[str, torch.Size]) -> LoraConfig:
    spec, targeted = state.spec, [site.name for site in state.layout.sites]
    short = set(leaves(dict.fromkeys(targeted, torch.Size())))
    covered = [name for name in linears if name.rpartition(".")[2] in short]
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=base.model,
        revision=base.revision,
        inference_mode=True,
        r=spec.rank,
        lora_alpha=int(spec.alpha) if spec.alpha.is_integer() else spec.alpha,  # type: ignore[arg-type]
        lora_dropout=spec.dropout,
        use_rslora=spec.rslora,
        target_modules=sorted(short) if covered == targeted else targeted,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=dict(spec.alpha_pattern),
    )

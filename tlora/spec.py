"""What a user asks for: a job as YAML, checked once, at the edge.

Called by the command line and by Python users, who build the same classes. Knows field rules only: whether a model
can be reached, targets match or data can be read is for `tlora.local`. Defaults and meanings are those of PEFT and
transformers.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import expanduser, isdir, realpath
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tlora.errors import SpecError


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"want a regular expression; this is none ({error})") from None
    return pattern


def _targets(value: Any) -> Any:
    """Checked by hand, so that a fault has one line and not one for each form it could have had."""
    if isinstance(value, str) and value:
        return _regex(value)
    if value is None or (isinstance(value, (list, tuple)) and value and all(isinstance(v, str) and v for v in value)):
        return value
    raise ValueError("want a list of module names, a regular expression for the full name, or all-linear")


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("want a number")
    return value


def _path(text: str) -> str:
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("want a path that a file can have")
    return expanduser(text)


# Beyond these, sums and products of what users set leave the range of float32 or of exact integers.
_MOST, _MOST_COUNT = 1e9, 10**9
Count = Annotated[int, Field(strict=True, ge=1, le=_MOST_COUNT)]
Cadence = Annotated[int, Field(strict=True, ge=0, le=_MOST_COUNT)]
Number = Annotated[float, BeforeValidator(_no_boolean)]
Fraction = Annotated[Number, Field(ge=0.0, lt=1.0)]
NotNegative = Annotated[Number, Field(ge=0.0, le=_MOST, allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0.0, le=_MOST, allow_inf_nan=False)]
Rank = Annotated[int, Field(strict=True, ge=1, le=256)]
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(min_length=1), AfterValidator(_path)]
Pattern = Annotated[str, Field(min_length=1), AfterValidator(_regex)]


class Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, values: Any) -> Any:
        """A section with nothing below its name is null in YAML."""
        return {} if values is None else values


class BaseSpec(Spec):
    """The frozen base. Jobs that agree on every field share one super-model."""

    model: PathText
    """Hub name or local folder."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """`auto`: bfloat16 on a GPU, float32 on a CPU."""


class DataSpec(Spec):
    """Where a job's sequences come from and which of their tokens are targets."""

    path: PathText
    """A .jsonl, .json, .csv or .parquet file, a folder of one such kind, or a hub dataset's name."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: Text = "train"
    """Split to train on, in the syntax of `datasets` (`train[:90%]`)."""
    eval_path: PathText | None = None
    """File of evaluation rows, in the same format."""
    eval_split: str | None = None
    """Split of the same dataset to evaluate on."""
    eval_fraction: Fraction = 0.0
    """Share of the training rows held out for evaluation, drawn by the job's seed."""
    format: Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokens"] = "auto"
    """Schema of a row; `auto` finds it from the columns."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Targets: every assistant turn (or completion), the last one only, or every token."""
    max_length: Annotated[int, Field(strict=True, ge=2, le=_MOST_COUNT)] = 2048
    """Longest sequence, in tokens."""
    on_too_long: Literal["drop", "truncate", "error"] = "drop"
    """What to do with a longer one."""
    max_bad_rows: Annotated[Number, Field(ge=0.0, le=1.0)] = 0.05
    """Share of malformed, empty or wholly masked rows that is dropped and counted; more refuses the job."""

    @model_validator(mode="after")
    def _one_evaluation(self) -> "DataSpec":
        named = [name for name in ("eval_path", "eval_split", "eval_fraction") if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"got {' and '.join(named)}; want one of them")
        return self

    @property
    def has_evaluation(self) -> bool:
        return bool(self.eval_path or self.eval_split or self.eval_fraction)


class AdapterSpec(Spec):
    """A LoRA adapter, with the meaning that PEFT's `LoraConfig` gives these words."""

    rank: Rank = 8
    alpha: Positive = 8.0
    """The low-rank product is scaled by alpha / rank (alpha / √rank with `rslora`)."""
    dropout: Fraction = 0.0
    targets: Annotated[list[str] | str | None, BeforeValidator(_targets)] = None
    """Module names (whole dotted segments), one regular expression for the full name, `all-linear`,
    or nothing: PEFT's own choice for the model's type."""
    rslora: bool = False
    rank_pattern: dict[Pattern, Rank] = {}
    """Rank by module name or regular expression, over `rank`."""
    alpha_pattern: dict[Pattern, Positive] = {}
    """Alpha by module name or regular expression, over `alpha`."""
    init_from: PathText | None = None
    """Folder of a PEFT adapter to start from."""


class OptimSpec(Spec):
    """AdamW with float32 states, and clipping by the job's own gradient norm."""

    lr: NotNegative = 5e-5
    weight_decay: NotNegative = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    eps: Annotated[Number, Field(ge=1e-30, allow_inf_nan=False)] = 1e-8
    """Near float32's smallest numbers it could round to 0, and a weight without a gradient become 0 / 0."""
    max_grad_norm: NotNegative = 1.0
    """0 leaves gradients unclipped."""
    loraplus_ratio: Positive = 1.0
    """Learning rate of B over that of A (LoRA+, arXiv 2402.12354)."""


class ScheduleSpec(Spec):
    """Learning rate over a job's steps, as `transformers.get_scheduler` has it."""

    name: Literal["constant", "linear", "cosine"] = "linear"
    warmup_steps: Cadence = 0
    warmup_ratio: Fraction = 0.0
    """Warm-up as a share of all steps, rounded up; used when `warmup_steps` is 0."""


class TrackingSpec(Spec):
    """One Weights & Biases run per adapter. `metrics.jsonl` is written whatever is set here."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    project: Text = "tlora"
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()


class JobSpec(Spec):
    """One adapter to train."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    base: BaseSpec
    data: DataSpec
    adapter: AdapterSpec = AdapterSpec()
    optim: OptimSpec = OptimSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    batch_size: Count = 8
    """Sequences per optimizer step."""
    epochs: Positive = 3.0
    """Passes over the data; may be a fraction."""
    steps: Count | None = None
    """Optimizer steps; set, it overrides `epochs`."""
    objective: Literal["eval_loss", "exact_match"] = "eval_loss"
    """The evaluation that `best/` is of. `exact_match`: the share of evaluation rows whose targets greedy decoding
    gives token by token, logged beside the loss."""
    eval_every: Cadence = 0
    """Steps between evaluations; 0 evaluates at the end of each epoch and of the job."""
    save_every: Cadence = 0
    """Steps between saves; 0 saves at the end of each epoch and of the job."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 42
    share: Positive = 1.0
    """Weight in the deal of each tick's tokens among the jobs of a super-model."""
    max_slowdown: Annotated[Number, Field(ge=1.0, allow_inf_nan=False)] = 3.0
    """How many times its lone step time a step may take beside others, as predicted when it is placed."""
    priority: Annotated[int, Field(strict=True, ge=-10, le=10)] = 0
    """Each step makes the job look four times as short to the cluster's scheduler, which prefers short ones."""
    user: str = ""
    """Whose quota of workers it counts against, if the cluster has one."""
    output: PathText = ""
    """Folder for the adapter; `outputs/<name>` if not given."""
    tracking: TrackingSpec = TrackingSpec()

    @model_validator(mode="before")
    @classmethod
    def _default_output(cls, values: Any) -> Any:
        return with_output(values)

    @property
    def folder(self) -> Path:
        return Path(self.output)


def with_output(values: Any) -> Any:
    """Fields with `outputs/<name>` as the output, if none is given."""
    if isinstance(values, dict) and not values.get("output") and isinstance(values.get("name"), str):
        return {**values, "output": f"outputs/{values['name']}"}
    return values


_FREE = (
    "output",
    "save_every",
    "share",
    "max_slowdown",
    "priority",
    "user",
)  # may change between a save and its resume
# What people type who come from PEFT, transformers or TRL.
_SPOKEN_ELSEWHERE = {
    "r": "adapter.rank", "lora_r": "adapter.rank", "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha", "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets", "lora_target_modules": "adapter.targets", "use_rslora": "adapter.rslora",
    "lora": "adapter", "peft": "adapter", "optimizer": "optim",
    "model": "base.model", "model_name": "base.model", "model_name_or_path": "base.model", "base_model": "base.model",
    "torch_dtype": "base.dtype", "dataset": "data.path", "dataset_name": "data.path", "datasets": "data.path",
    "data_files": "data.path", "file": "data.path", "type": "data.format", "max_seq_length": "data.max_length",
    "sequence_len": "data.max_length", "max_len": "data.max_length", "val_set_size": "data.eval_fraction",
    "learning_rate": "optim.lr", "lr": "optim.lr", "weight_decay": "optim.weight_decay",
    "adam_epsilon": "optim.eps", "max_grad_norm": "optim.max_grad_norm", "clip": "optim.max_grad_norm",
    "grad_clip": "optim.max_grad_norm", "gradient_clipping": "optim.max_grad_norm",
    "lr_scheduler_type": "schedule.name", "lr_scheduler": "schedule.name", "scheduler": "schedule",
    "warmup_steps": "schedule.warmup_steps", "warmup_ratio": "schedule.warmup_ratio",
    "num_train_epochs": "epochs", "num_epochs": "epochs", "max_steps": "steps",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size", "micro_batch_size": "batch_size",
    "gradient_accumulation_steps": "batch_size", "eval_steps": "eval_every", "save_steps": "save_every",
    "output_dir": "output", "wandb": "tracking.wandb", "wandb_project": "tracking.project",
    "report_to": "tracking.wandb", "weight": "share", "slowdown": "max_slowdown",
}  # fmt: skip
_NOT_YET = {
    "use_dora": "DoRA is not supported yet: tLoRA trains plain LoRA and rsLoRA",
    "dora": "DoRA is not supported yet: tLoRA trains plain LoRA and rsLoRA",
    "modules_to_save": "training whole modules beside the adapter is not supported yet",
    "bias": "training biases is not supported yet: they stay frozen",
    "use_qalora": "QA-LoRA is not supported yet",
    "init_lora_weights": "only PEFT's default initialisation is supported yet (A uniform, B zero)",
    "layers_to_transform": "not supported yet: write the layers as a regular expression in adapter.targets",
    "load_in_4bit": "quantised bases are not supported yet",
    "load_in_8bit": "quantised bases are not supported yet",
    "quantization": "quantised bases are not supported yet",
    "packing": "packing is always on: sequences never see each other, so there is nothing to choose",
    "fp16": "not a switch here: set base.dtype",
    "bf16": "not a switch here: set base.dtype",
}


def load_job(path: str | Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read one job from YAML. `overrides` are `dotted.key=value` texts, values in YAML.

    Raises SpecError, one line per fault, each with the file, the dotted path, what was got and what is wanted.
    """
    path = Path(path)
    values = read_yaml(path, overrides, "a mapping with at least 'base' and 'data'")
    values.setdefault("name", path.stem)
    spec = parse_job(values, where=str(path))
    for key, value in (("eval_every", spec.eval_every), ("objective", spec.objective)):
        if value not in (0, "eval_loss") and not spec.data.has_evaluation:
            raise SpecError(
                f"{path}: {key} = {value}: the job names no evaluation rows. Set data.eval_fraction, "
                f"data.eval_split or data.eval_path, or remove {key}."
            )
    return spec


def read_yaml(path: Path, overrides: Sequence[str], want: str) -> dict[str, Any]:
    """A file's mapping, with overrides. Raises SpecError."""
    if path.is_dir():
        raise SpecError(f"{path}: is a folder; want a job file, as in {path}/*.yaml.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None
    try:
        values = _parse_yaml(text)
    except ValueError as error:
        raise SpecError(f"{path}: is no YAML: {error}.") from None
    if not isinstance(values, dict):
        got = "nothing" if values is None else _show(values)
        raise SpecError(f"{path}: got {got}; want {want}.")
    for text in overrides:
        override(values, text)
    return values


def parse_job(values: Mapping[str, Any], where: str = "job") -> JobSpec:
    """Check a mapping as YAML gives it; `where` begins each line of the SpecError raised."""
    try:
        return JobSpec.model_validate(dict(values))
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}: {line}" for line in explain(error))) from None


FILES = ("base.model", "data.path", "data.eval_path", "adapter.init_from")
"""Fields that name files, or what a hub has."""


def differences(old: JobSpec, new: JobSpec, but: Sequence[str] = ()) -> list[str]:
    """The dotted fields in which two jobs differ, with both values, of those that decide what is computed, but some."""
    a, b = dict(_flat(old.model_dump())), dict(_flat(new.model_dump()))
    kept = [key for key in sorted(a.keys() | b.keys()) if key not in (*_FREE, *but) and not key.startswith("tracking.")]
    return [f"{key}: {a.get(key)!r} was, {b.get(key)!r} is asked" for key in kept if a.get(key) != b.get(key)]


def refuse_clashes(specs: Sequence[JobSpec]) -> None:
    """Raise SpecError if two jobs have one name, or an output folder lies in another job's or in a base's."""
    names: dict[str, JobSpec] = {}
    for spec in specs:
        if names.setdefault(spec.name, spec) is not spec:
            raise SpecError(f"two jobs have one name, {spec.name}: want one each. Change 'name' in one of them.")
        mine = Path(realpath(spec.folder))
        for other in specs:
            taken = {} if other is spec else {f"the output folder of job {other.name}": other.output}
            if isdir(other.base.model):
                taken["the folder of a base model"] = other.base.model
            for what, place in taken.items():
                if mine.is_relative_to(realpath(place)):
                    raise SpecError(
                        f"job {spec.name}: output = {spec.output!r} is, or lies in, {what} ({place}); want a folder of "
                        "its own. Change 'output'."
                    )


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML whose keys are given once (PyYAML keeps the last), and whose dates are text, as in a job's name."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in forms if tag != "tag:yaml.org,2002:timestamp"]
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if (key.tag, key.value) in seen:
                raise ValueError(f"key '{key.value}' is given twice, line {key.start_mark.line + 1}")
            seen.add((key.tag, key.value))
        return node


def _parse_yaml(text: str) -> Any:
    """What a text means in YAML. Raises ValueError of one line; so does PyYAML, for a number or date that is none."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def override(values: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    if not sign or not key.strip():
        raise SpecError(f"--set {text}: want key=value, such as optim.lr=1e-4.")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise SpecError(f"--set {text}: '{parent}' has no fields.")
    try:
        values[last] = _parse_yaml(value)
    except ValueError:
        values[last] = value


_UNNAMED = ("[key]", "[auto]", "[plan]")
"""Of the places that pydantic names, those that users do not write."""


def explain(error: ValidationError, model: type[BaseModel] = JobSpec) -> Iterator[str]:
    """One line per fault of what was to be a `model`: the dotted path, what was got and what is wanted."""
    for fault in error.errors():
        path = ".".join(str(part) for part in fault["loc"] if part not in _UNNAMED)
        got = fault.get("input")
        if fault["type"] == "extra_forbidden":
            yield unknown_key(path, model)
        elif fault["type"] == "missing":
            yield f"'{path}' is missing. {_describe(path)}".rstrip()
        elif fault["type"] == "value_error" and len(fault["loc"]) <= 1 and isinstance(got, dict):  # a section's
            yield f"{path}: {_want(fault)}.".removeprefix(": ")
        elif fault["type"] == "invalid_key":
            yield f"key {got!r}: want a string. Put it in quotes."
        else:
            yield f"{path} = {_show(got)}: {_want(fault)}."


def unknown_key(path: str, model: type[BaseModel] = JobSpec) -> str:
    """What to say of a key that a `model` has not, with the one that may be meant."""
    key = path.rpartition(".")[2]
    if key in _NOT_YET:
        return f"'{path}': {_NOT_YET[key]}."
    known = list(fields(model))
    if key in _SPOKEN_ELSEWHERE:
        return f"unknown key '{path}'. Did you mean '{_SPOKEN_ELSEWHERE[key]}'?"
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.7)
    by_last = [name for name in known if name.rpartition(".")[2] == key] or [
        name for name in known if difflib.get_close_matches(key, [name.rpartition(".")[2]], n=1, cutoff=0.75)
    ]
    guesses = near or by_last
    return f"unknown key '{path}'." + (f" Did you mean '{guesses[0]}'?" if guesses else "")


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted names of a specification's fields."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}.")


def _describe(path: str) -> str:
    return {
        "base": "Name the model: base: {model: <hub name or folder>}.",
        "base.model": "Name the model: a hub name or a folder.",
        "data": "Name the data: data: {path: <file or hub name>}.",
        "data.path": "Name the data: a file or a hub dataset.",
    }.get(path, "")


_KINDS = {
    "int": "an integer", "float": "a number", "finite": "a finite number", "string": "a string",
    "bool": "true or false", "list": "a list", "tuple": "a list", "dict": "a mapping", "model": "a mapping",
}  # fmt: skip
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"), "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"), "less_than": ("lt", "less than"),
}  # fmt: skip


def _want(fault: Mapping[str, Any]) -> str:
    kind, context = fault["type"], fault.get("ctx", {})
    if fault["loc"][-1:] == ("rank",) or (
        "rank_pattern" in fault["loc"] and kind.startswith(("int_", "greater", "less"))
    ):
        return "want an integer from 1 to 256"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"want {words} {'2**63' if context[key] == 2**63 else format(context[key], 'g')}"
    if kind == "literal_error":
        return f"want one of {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "string_too_short":
        return "want a string that is not empty"
    if kind == "string_pattern_mismatch":
        return "want letters, digits, '.', '_' and '-', at most 128, a letter or digit first"
    known = _KINDS.get(kind.partition("_")[0])
    return f"want {known}" if known else str(fault["msg"])


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict) and not key.endswith("_pattern"):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value

"""What a user asks for of a sweep: one job, the fields of it that vary, how they are drawn, when to stop.

Read from YAML and checked once, at the edge, as a job is. Draws are functions of the sweep's seed and a candidate's
number, so that a sweep which is extended keeps those it had. Called by `tlora.sweep_run`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from tlora.errors import SpecError
from tlora.randomness import uniform
from tlora.spec import (
    Cadence,
    Count,
    JobSpec,
    Number,
    PathText,
    Positive,
    Spec,
    explain,
    fields,
    override,
    parse_job,
    read_yaml,
    unknown_key,
    with_output,
)
from tlora.sweep import EarlyExit

Values = dict[str, Any]
"""A candidate's drawn fields, by dotted name."""
_OWNED = ("name", "output", "share", "eval_every", "objective", "tracking")
_NUM_RANDOM = 16
"""Configurations of a budget that names none."""


def _objective(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _domain(value: Any) -> Any:
    return {"choice": [as_number(one) for one in value]} if isinstance(value, list) else value


def as_number(value: Any) -> Any:
    """YAML 1.1 takes 1e-4 for a text; here it is a number."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value) else value


def changes_of(texts: Sequence[str]) -> Values:
    """Overrides by dotted name. Raises SpecError."""
    changes: Values = {}
    for text in texts:
        nested: Values = {}
        override(nested, text)
        key = text.partition("=")[0].strip()
        value: Any = nested
        for part in key.split("."):
            value = value[part]
        changes[key] = as_number(value)
    return changes


class Domain(Spec):
    """Where a field's values come from: exactly one of these, or a plain list for `choice`."""

    choice: Annotated[list[Any], Field(min_length=1)] | None = None
    uniform: tuple[Number, Number] | None = None
    log_uniform: tuple[Positive, Positive] | None = None
    integers: tuple[int, int] | None = None
    """Both ends included."""
    times: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Factors, one of which is multiplied with the value drawn for the field `of`."""
    of: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> "Domain":
        named = [name for name in ("choice", "uniform", "log_uniform", "integers", "times") if getattr(self, name)]
        if len(named) != 1:
            raise ValueError(
                f"got {' and '.join(named) or 'no values'}; want one of choice, uniform, log_uniform, integers, times"
            )
        if (self.of is None) != (self.times is None):
            raise ValueError("want times and of together, as in {times: [1, 2], of: adapter.rank}")
        ends = self.uniform or self.log_uniform or self.integers
        if ends and not ends[0] < ends[1]:
            raise ValueError(f"got {ends[0]} to {ends[1]}; want the lower end first")
        return self

    @property
    def listed(self) -> list[Any] | None:
        """The values or factors, if they can be listed."""
        return self.choice or self.times

    @property
    def size(self) -> float:
        if self.integers:
            return self.integers[1] - self.integers[0] + 1
        return len(self.listed) if self.listed else math.inf

    @property
    def edges(self) -> list[Any]:
        """Values that are wrong if any is: all that are listed, or both ends."""
        return list(self.choice or self.integers or self.uniform or self.log_uniform or [])

    def at(self, u: float) -> Any:
        """The value, or factor, at u in [0, 1)."""
        if self.listed:
            return self.listed[int(u * len(self.listed))]
        if self.integers:
            low, high = self.integers
            return low + int(u * (high - low + 1))
        if self.log_uniform:
            lower, upper = self.log_uniform
            value = lower * (upper / lower) ** u
        else:
            assert self.uniform is not None
            lower, upper = self.uniform
            value = lower + u * (upper - lower)
        return min(max(float(f"{value:.6g}"), lower), upper)


class SamplerSpec(Spec):
    """How configurations are drawn."""

    name: Literal["grid", "random", "tpe"] = "random"
    """`grid`: every combination, in order; `tpe`: waves that learn from those before (needs the package optuna)."""
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 0
    startup: Count = 10
    """TPE: random configurations to begin with."""
    wave: Count = 5
    """TPE: configurations drawn at once, when the wave before has ended."""

    @property
    def learns(self) -> bool:
        """Whether what it draws depends on what came out so far."""
        return self.name == "tpe"


class Objective(Spec):
    """What is to be low."""

    name: Literal["eval_loss", "exact_match"] = "eval_loss"
    """The lowest validation loss that a candidate has reached, or the lowest share of validation rows that it does not
    answer exactly; the adapter of that evaluation is its `best/`. Called its loss in tables, either way."""


class BudgetSpec(Spec):
    """What ends a sweep; what is null does not. Running candidates are paused then, and --resume with a larger budget
    goes on with them."""

    configurations: Count | None = None
    """Candidates; by default the whole grid, or 16."""
    samples: Count | None = None
    """Sequences trained on by all candidates together."""
    wall_s: Positive | None = None
    gpu_hours: Positive | None = None
    """Hours of the GPU it runs on."""


class SweepSpec(Spec):
    """Many configurations of one job, of which the best is wanted."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")]
    job: dict[str, Any]
    """A job without name and output, its evaluation rows named."""
    space: Annotated[dict[str, Annotated[Domain, BeforeValidator(_domain)]], Field(min_length=1)]
    """What varies: domains by the dotted name of the job's field."""
    sampler: SamplerSpec = SamplerSpec()
    objective: Annotated[Objective, BeforeValidator(_objective)] = Objective()
    budget: BudgetSpec = BudgetSpec()
    early_exit: EarlyExit = EarlyExit()
    places: Count = 8
    """Candidates that train at once."""
    save_every_evaluations: Cadence = 1
    """Evaluations between saves of a running candidate: what a crash costs. 0: saves at exits and pauses only."""
    output: PathText = ""
    """Folder for the result; `outputs/<name>` if not given. Candidates are in its `candidates/`."""

    @model_validator(mode="before")
    @classmethod
    def _default_output(cls, values: Any) -> Any:
        return with_output(values)

    @property
    def folder(self) -> Path:
        return Path(self.output)

    @property
    def num_configurations(self) -> int:
        """Candidates that are drawn in all."""
        if self.sampler.name == "grid":
            return math.prod(int(domain.size) for domain in self.space.values())
        return self.budget.configurations or _NUM_RANDOM

    @property
    def first(self) -> JobSpec:
        """A candidate at the lowest values: what can be checked of all before any is drawn. Raises SpecError."""
        return self.candidate(0, configure(self.space, dict.fromkeys(self.space, 0.0)))

    def candidate(self, number: int, values: Values, *, where: str | None = None, **cadences: int) -> JobSpec:
        """The job of a candidate, `eval_every` and `save_every` among the `cadences`. Raises SpecError."""
        job = deepcopy(self.job)
        for key, value in values.items():
            *sections, last = key.split(".")
            within = job
            for section in sections:
                within[section] = within.get(section) or {}
                within = within[section]
            within[last] = value
        tracking = job.get("tracking") or {}
        name = f"{self.name}-{number:03d}"
        job |= {
            "name": name,
            "output": f"{self.output}/candidates/{name}",
            "objective": self.objective.name,
            "tracking": {**tracking, "group": tracking.get("group") or self.name},
            **cadences,
        }
        shown = ", ".join(f"{key} = {value}" for key, value in values.items())
        return parse_job(job, where=f"sweep {self.name}, candidate {number} ({shown})" if where is None else where)


def is_sweep(path: Path) -> bool:
    """Whether a file holds a sweep rather than a job; what is wrong with it is for its loading to say."""
    try:
        return "space" in read_yaml(path, (), "a job or a sweep")
    except SpecError:
        return False


def load_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepSpec:
    """Read a sweep from YAML, `overrides` as in `load_job`. Raises SpecError, one line per fault."""
    path = Path(path)
    values = read_yaml(path, overrides, "a mapping with at least 'job' and 'space'")
    values.setdefault("name", path.stem)
    return parse_sweep(values, where=str(path))


def parse_sweep(values: Mapping[str, Any], where: str = "sweep") -> SweepSpec:
    """Check a mapping as YAML gives it, every edge of its space included; `where` begins each line of a SpecError."""
    try:
        spec = SweepSpec.model_validate(dict(values))
    except ValidationError as error:
        raise SpecError("\n".join(f"{where}: {line}" for line in explain(error, SweepSpec))) from None
    if faults := list(_faults(spec)) or list(_edge_faults(spec)):
        raise SpecError("\n".join(f"{where}: {line}" for line in faults))
    return spec


def _faults(spec: SweepSpec) -> Iterator[str]:
    known = set(fields(JobSpec))
    sections = {name.partition(".")[0] for name in known if "." in name}
    if flat := [key for key in sections & spec.job.keys() if not isinstance(spec.job[key], Mapping | None)]:
        yield from (f"job.{key} = {spec.job[key]!r}: want its fields, as in a job's file." for key in sorted(flat))
        return
    instead = {"eval_every": " or set early_exit.evaluations", "objective": " or set the sweep's own"}
    for key in ("name", "output", "eval_every", "objective"):
        if key in spec.job:
            yield f"job.{key}: is the sweep's to set. Remove it{instead.get(key, '')}."
    for key, domain in spec.space.items():
        if any(name.startswith(f"{key}.") for name in known):
            yield f"space.{key}: is a section; want one of its fields, such as {key}.{_first_field(key, known)}."
        elif key not in known:
            yield f"space: {unknown_key(key)}"
        elif why := _why_owned(key):
            yield f"space.{key}: {why}"
        elif key == "seed" and (spec.job.get("data") or {}).get("eval_fraction"):
            yield "space.seed: data.eval_fraction holds out other rows for each seed. Set data.eval_path instead."
        elif spec.sampler.name == "grid" and domain.size == math.inf:
            yield f"space.{key}: a grid needs a list of values. Give one, or set sampler.name to random."
        if domain.of is not None and (domain.of not in spec.space or spec.space[domain.of].of is not None):
            yield f"space.{key}.of = {domain.of}: want another field of the space, with values of its own."
        elif domain.of and not all(isinstance(value, int | float) for value in spec.space[domain.of].listed or ()):
            yield f"space.{key}.of = {domain.of}: got {spec.space[domain.of].listed}; want numbers, to be multiplied."
    if spec.sampler.name == "grid" and spec.budget.configurations is not None:
        yield "budget.configurations: a grid is trained whole. Remove it, or set sampler.name to random."
    if spec.early_exit.halving and spec.early_exit.halving.warmup * spec.early_exit.evaluations < 1:
        yield "early_exit.halving.warmup: ends before the first evaluation. Raise it, or early_exit.evaluations."


def _why_owned(key: str) -> str:
    """Why a field may not differ between candidates; empty if it may."""
    if key.split(".")[0] in _OWNED:
        return "is the sweep's to set; want another field."
    return "losses of two bases do not compare; want one sweep a base." if key.startswith("base.") else ""


def forked(spec: SweepSpec, values: Values, texts: Sequence[str]) -> Values:
    """A candidate's values with changes (`dotted.key=value`). Raises SpecError if these are no candidate."""
    changes = changes_of(texts)
    if not changes:
        raise SpecError(f"sweep {spec.name}: a fork wants changes, such as --set optim.lr=1e-4.")
    for key in changes:
        if why := _why_owned(key):
            raise SpecError(f"{key}: {why}")
    values = {**values, **changes}
    spec.candidate(0, values)
    return values


def _edge_faults(spec: SweepSpec) -> Iterator[str]:
    """What the job's own rules say of the job, and of the ends of each domain."""
    first = configure(spec.space, dict.fromkeys(spec.space, 0.0))
    for line in _lines(spec, first):
        if not any(_is_of(line, key) for key in spec.space):
            yield f"job: {line}"
    for key, domain in spec.space.items():
        lines = [line for edge in domain.edges for line in _lines(spec, {**first, key: edge}) if _is_of(line, key)]
        yield from (f"space: {line}" for line in dict.fromkeys(lines))


def _lines(spec: SweepSpec, values: Values) -> list[str]:
    try:
        job = spec.candidate(0, values, where="")
    except SpecError as error:
        return [line.removeprefix(": ") for line in str(error).splitlines()]
    return [] if job.data.has_evaluation else ["data names no evaluation rows. Set data.eval_path or another of them."]


def _is_of(line: str, key: str) -> bool:
    return line.startswith((f"{key} ", f"{key}.", f"{key}:"))


def _first_field(section: str, known: set[str]) -> str:
    return min(name for name in known if name.startswith(f"{section}.")).removeprefix(f"{section}.")


def configure(space: Mapping[str, Domain], at: Mapping[str, float]) -> Values:
    """Values at a point of the unit cube, those that are multiples of others last."""
    drawn = {key: domain.at(at[key]) for key, domain in space.items()}
    return _multiplied(space, drawn)


def _multiplied(space: Mapping[str, Domain], drawn: Values) -> Values:
    """Factors replaced by the products."""
    return {key: drawn[key] * drawn[domain.of] if domain.of else drawn[key] for key, domain in space.items()}


def draw(spec: SweepSpec, known: Sequence[Values], results: Sequence["Result"]) -> list[Values]:
    """The next wave of configurations, none of which is `known`: all there are but for TPE, which wants the `results`
    of the known ones, in their order. Raises SpecError if the space does not hold as many."""
    wanted = spec.num_configurations - len(known)
    if wanted <= 0:
        return []
    if spec.sampler.name == "grid":
        return list(_grid(spec.space))[len(known) :]
    if spec.sampler.name == "random" or len(known) < spec.sampler.startup:
        if spec.sampler.name == "tpe":
            wanted = min(wanted, spec.sampler.startup - len(known))
        return _random(spec, known, wanted)
    return _tpe(spec, known, results, min(wanted, spec.sampler.wave))


def _grid(space: Mapping[str, Domain]) -> Iterator[Values]:
    lists = [domain.listed or _all_of(domain.integers) for domain in space.values()]
    for values in itertools.product(*lists):
        yield _multiplied(space, dict(zip(space, values, strict=True)))


def _all_of(ends: tuple[int, int] | None) -> range:
    assert ends is not None
    return range(ends[0], ends[1] + 1)


def _random(spec: SweepSpec, known: Sequence[Values], wanted: int) -> list[Values]:
    """The first draws of the seed that are not known."""
    drawn: list[Values] = []
    num = 100 * (wanted + len(known)) + 1000
    cube = {key: uniform(spec.sampler.seed, f"sweep {key}", num) for key in spec.space}
    for index in range(num):
        values = configure(spec.space, {key: float(row[index]) for key, row in cube.items()})
        if values not in known and values not in drawn:
            drawn.append(values)
            if len(drawn) == wanted:
                return drawn
    raise SpecError(
        f"sweep {spec.name}: budget.configurations = {len(known) + wanted}: the space holds {len(known) + len(drawn)} "
        "that differ. Lower it, or widen the space."
    )


class Result(Spec):
    """What TPE learns of a candidate."""

    samples: int
    loss: float | None
    """The lowest validation loss; None if there is none."""
    finished: bool


def _tpe(spec: SweepSpec, known: Sequence[Values], results: Sequence[Result], wanted: int) -> list[Values]:
    """Tree-structured Parzen estimators (Optuna's): candidates that ended early count below those that finished, by
    how far they came."""
    try:
        import optuna
    except ImportError:
        raise SpecError(
            f"sweep {spec.name}: sampler.name = tpe needs the package optuna. Run `pip install 'tlora[sweep]'`, or "
            "set sampler.name to random."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kinds = {key: _distribution(optuna, domain) for key, domain in spec.space.items()}
    sampler = optuna.samplers.TPESampler(seed=spec.sampler.seed + len(known), n_startup_trials=0)
    study = optuna.create_study(sampler=sampler)
    states = optuna.trial.TrialState
    for values, result in zip(known, results, strict=True):
        if result.loss is None:
            continue
        done = {"state": states.COMPLETE, "value": result.loss} if result.finished else {"state": states.PRUNED}
        study.add_trial(
            optuna.trial.create_trial(
                params=_parameters(spec.space, values),
                distributions=kinds,
                intermediate_values={result.samples: result.loss},
                **done,
            )
        )
    drawn: list[Values] = []
    for _ in range(100 * wanted):
        parameters = study.ask(kinds).params
        values = _multiplied(
            spec.space,
            {
                key: domain.listed[parameters[key]] if domain.listed else parameters[key]
                for key, domain in spec.space.items()
            },
        )
        if values not in known and values not in drawn:
            drawn.append(values)
        if len(drawn) == wanted:
            return drawn
    return drawn + _random(spec, [*known, *drawn], wanted - len(drawn))


def _distribution(optuna: Any, domain: Domain) -> Any:
    kinds = optuna.distributions
    if domain.listed:
        return kinds.CategoricalDistribution(range(len(domain.listed)))
    if domain.integers:
        return kinds.IntDistribution(*domain.integers)
    low, high = domain.log_uniform or domain.uniform or (0.0, 1.0)
    return kinds.FloatDistribution(low, high, log=domain.log_uniform is not None)


def _parameters(space: Mapping[str, Domain], values: Values) -> dict[str, Any]:
    """Values as TPE knows them: the place in a list, or the number itself."""
    parameters: dict[str, Any] = {}
    for key, domain in space.items():
        if factors := domain.times:
            away = [abs(factor * values[str(domain.of)] - values[key]) for factor in factors]
            parameters[key] = away.index(min(away))
        else:
            parameters[key] = domain.choice.index(values[key]) if domain.choice else values[key]
    return parameters

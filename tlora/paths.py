"""Specifications with the files that they name as they are found from here, so that they are found, and known again,
from elsewhere.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path

from tlora.errors import SpecError
from tlora.spec import FILES, JobSpec
from tlora.sweep_spec import SweepSpec

_CARRIED = "working_dir_files"
"""Of Ray, where it puts what `ray job submit --working-dir` sends."""


def absolute(spec: JobSpec) -> JobSpec:
    """A job. A relative output stays: on a cluster it lies below the storage."""
    return spec.model_copy(
        update={
            "base": spec.base.model_copy(update={"model": _found(spec.base.model)}),
            "data": spec.data.model_copy(
                update={"path": _found(spec.data.path), "eval_path": _found(spec.data.eval_path)}
            ),
            "adapter": spec.adapter.model_copy(update={"init_from": _found(spec.adapter.init_from)}),
        }
    )


def absolute_sweep(spec: SweepSpec) -> SweepSpec:
    """The same for a sweep, in its job and in its space."""
    return _mapped(spec, found)


def by_name(spec: SweepSpec) -> SweepSpec:
    """With nothing of each path but its last name: the same wherever its files lie, and however they are named."""
    return _mapped(spec, lambda text: Path(text).name)


def absolute_changes(changes: Sequence[str]) -> list[str]:
    """The same of changes (`dotted.key=value`)."""
    pairs = [text.partition("=") for text in changes]
    return [
        f"{key}={found(value.strip())}" if key.strip() in FILES else f"{key}{sign}{value}" for key, sign, value in pairs
    ]


def found(text: str) -> str:
    """Where a file lies, if there is one; else it may be a hub's. Raises SpecError for one that Ray carried along to
    this machine alone."""
    path = Path(text).expanduser().absolute()
    if not path.exists():
        return text
    if _CARRIED in path.parts:
        raise SpecError(
            f"{text}: this machine alone has it, by `--working-dir`; want the absolute path of a file that every node "
            "reaches."
        )
    return str(path)


def _mapped(spec: SweepSpec, change: Callable[[str], str]) -> SweepSpec:
    job, space = deepcopy(spec.job), dict(spec.space)
    for key in FILES:
        section, field = key.split(".")
        if isinstance(job.get(section), dict) and job[section].get(field):
            job[section][field] = change(job[section][field])
        if key in space and space[key].choice:
            space[key] = space[key].model_copy(update={"choice": [change(text) for text in space[key].choice or ()]})
    return spec.model_copy(update={"job": job, "space": space})


def _found(text: str | None) -> str | None:
    return found(text) if text else text

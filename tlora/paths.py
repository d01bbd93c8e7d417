"""Specifications with the files that they name as they are found from here, so that they are found, and known again,
from elsewhere.
"""

from copy import deepcopy
from pathlib import Path

from tlora.spec import JobSpec
from tlora.sweep_spec import SweepSpec


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
    job, space = deepcopy(spec.job), dict(spec.space)
    for key in ("base.model", "data.path", "data.eval_path", "adapter.init_from"):
        section, field = key.split(".")
        if isinstance(job.get(section), dict) and job[section].get(field):
            job[section][field] = _found(job[section][field])
        if key in space and space[key].choice:
            space[key] = space[key].model_copy(update={"choice": [_found(text) for text in space[key].choice or ()]})
    return spec.model_copy(update={"job": job, "space": space})


def recorded_sweep(spec: SweepSpec) -> SweepSpec:
    """The same with its output, as a sweep's folder holds it."""
    return absolute_sweep(spec).model_copy(update={"output": str(Path(spec.output).absolute())})


def _found(text: str | None) -> str | None:
    return str(Path(text).absolute()) if text and Path(text).exists() else text

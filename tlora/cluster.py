"""How a cluster is used: what `tlora up` is given. Nothing of it changes what a job computes."""

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from tlora.errors import SpecError
from tlora.plan import Plan
from tlora.spec import Count, NotNegative, PathText, Positive, Spec, explain, override, read_yaml

MOST_JOBS = 64
"""Of one unit: as many as its ranks can tell each other of."""
_OF_RAY = {"cluster_name", "available_node_types", "provider"}
_CREDENTIALS = re.compile(r"://[^/@:]*:(?!\d+/)[^@]*@|[?&][^=&]*(key|secret|token|password|signature|sig)=", re.I)


class PlanSpec(Spec):
    """`replicas` of a base, each sharded over `shards` lanes of `tensor` workers: together a unit, which comes and goes
    as a whole, and over whose lanes large jobs are split."""

    replicas: Count = 1
    shards: Count = 1
    tensor: Count = 1

    @property
    def plan(self) -> Plan:
        return Plan(replicas=self.replicas, shards=self.shards, tensor=self.tensor)


class ClusterSpec(Spec):
    """The scheduler's settings."""

    model_config = ConfigDict(hide_input_in_errors=True)

    storage: PathText
    """Folder, s3:// or gs:// address that every node reaches: what must survive the loss of the head."""
    outputs: PathText | None = None
    """Folder that every node reaches, below which jobs' outputs lie; the storage, where that is a folder."""
    state: PathText | None = None
    """Folder on the head's own disk for the journal; without one, one a storage in TLORA_HOME (~/.tlora)."""
    max_workers: Count = 8
    """Of all groups together."""
    jobs_per_worker: Count = 16
    """On one worker, or on the unit that holds a base together."""
    order: Literal["shortest", "submitted"] = "shortest"
    """Who goes first where places lack; `submitted`: first come, first served, and nobody makes room for another."""
    profile: PathText | None = None
    """File that `tlora profile` wrote on such a worker: what is planned by before any tick is measured."""
    quotas: dict[str, Count] = Field(default_factory=dict)
    """Most workers that a user's jobs may be on at once, by user; others are free."""
    gpus_per_worker: Annotated[int, Field(strict=True, ge=0, le=1)] = 1
    """0: workers train on CPUs."""
    cpus_per_worker: Positive = 1.0
    memory_gib: NotNegative = 0.0
    """That a worker's base and jobs may take, by the estimate; 0: its GPU's, and a CPU's is not looked at."""
    token_budget: Annotated[int, Field(strict=True, ge=0)] = 0
    """Most rows in a tick; 0: chosen for the device."""
    deterministic: bool = False
    checkpointing: bool = False
    save_every_s: Positive = 300.0
    """A running job is saved at least so often: what a lost worker costs."""
    idle_s: Positive = 300.0
    """A group without jobs ends after so long."""
    lost_after_s: Positive = 15.0
    """A worker that says nothing for so long is lost, and its jobs go elsewhere."""
    stuck_after_s: Positive = 1800.0
    """A worker whose tick, or base's loading, takes so long ends itself, and is replaced."""
    plan: Annotated[
        Annotated[Literal["auto"], Tag("[auto]")] | Annotated[PlanSpec, Tag("[plan]")],
        Discriminator(lambda given: "[auto]" if isinstance(given, str) else "[plan]"),
    ] = "auto"
    """How workers hold a base. `auto`: each by itself where a worker has room for it, else the plan of fewest GPUs."""
    resize: Literal["in_place", "restart"] = "in_place"
    """`restart`: a group that changes its size is started anew, as Ray Train does it by itself."""

    @model_validator(mode="after")
    def _holds_no_secret(self) -> "ClusterSpec":
        for name in ("storage", "outputs", "state", "profile"):
            if _CREDENTIALS.search(getattr(self, name) or ""):
                raise ValueError(
                    f"{name}: want an address without credentials, for it is shown and logged. Give every node a role, "
                    "or them by its environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, …)"
                )
        return self

    @model_validator(mode="after")
    def _has_room(self) -> "ClusterSpec":
        ranks = 0 if self.plan == "auto" else self.plan.plan.ranks
        if ranks > self.max_workers:
            raise ValueError(f"plan: takes {ranks} workers; want at most max_workers, {self.max_workers}")
        if ranks != 1 and self.jobs_per_worker > MOST_JOBS:
            raise ValueError(
                f"jobs_per_worker: want at most {MOST_JOBS} where several workers may hold a base; got "
                f"{self.jobs_per_worker}. Lower it, or set plan.replicas to 1"
            )
        return self

    @model_validator(mode="after")
    def _has_outputs(self) -> "ClusterSpec":
        if self.outputs is None and "://" in self.storage:
            raise ValueError("outputs: want a folder for the jobs' outputs, for the storage is none")
        if "://" in (self.outputs or ""):
            raise ValueError(f"outputs: want a folder that every node reaches, such as a mount; got {self.outputs}")
        return self

    @property
    def state_folder(self) -> Path:
        if self.state is not None:
            return Path(self.state).expanduser()
        own = hashlib.sha256(self.storage.encode()).hexdigest()[:12]
        return Path(os.environ.get("TLORA_HOME") or Path.home() / ".tlora") / "state" / own

    @property
    def output_root(self) -> Path:
        return Path(self.outputs or self.storage).expanduser()


def load_cluster(path: Path | None, overrides: Sequence[str] = ()) -> ClusterSpec:
    """Read settings from YAML, `overrides` as in `load_job`. Without a file: CPU workers where this machine has no GPU,
    and the folder that the command is given in as the storage. Raises SpecError."""
    values: dict[str, Any] = {"storage": ".", "gpus_per_worker": int(Path("/dev/nvidiactl").exists())}
    if path is not None:
        values = read_yaml(path, overrides, "a mapping with at least 'storage'")
    else:
        for text in overrides:
            override(values, text)
    try:
        spec = ClusterSpec.model_validate(values)
    except ValidationError as error:
        if not _OF_RAY.isdisjoint(values):
            raise SpecError(
                f"{path}: is a file of Ray's own, for `ray up`. Want tLoRA's settings, as in README.md."
            ) from None
        lines = (f"{path or 'the settings'}: {line}" for line in explain(error, ClusterSpec))
        raise SpecError("\n".join(lines)) from None
    paths = {"storage": spec.storage, "outputs": spec.outputs, "profile": spec.profile, "state": spec.state}
    spec = spec.model_copy(
        update={
            name: str(Path(path).expanduser().absolute()) for name, path in paths.items() if path and "://" not in path
        }
    )
    return spec.model_copy(update={"state": str(spec.state_folder.absolute())})

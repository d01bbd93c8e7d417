"""The cluster from outside: what the command line does, for Python too.

    client = tlora.Client()            # the cluster of RAY_ADDRESS, or the local one that `tlora up` has started
    client, _ = tlora.Client.up(tlora.load_cluster(None))   # as `tlora up`
    client.submit([tlora.load_job("jobs/a.yaml")])
    client.wait(["a"])

Jobs run on when their client is gone. Calls are idempotent; one that the scheduler's restart cuts off is sent again.
"""

import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tlora
from tlora import local_cluster
from tlora.cluster import ClusterSpec
from tlora.errors import ClusterError, GoneError, StateError, TloraError
from tlora.job import State
from tlora.local_cluster import address, authenticate
from tlora.paths import absolute, absolute_changes, absolute_sweep
from tlora.spec import JobSpec, override, parse_job
from tlora.sweep_spec import SweepSpec

Row = dict[str, Any]
_POLL_S = 0.5


class Client:
    """A connection to the scheduler of one cluster. Raises ClusterError if there is none, or one of another version."""

    def __init__(self, where: str | None = None, *, any_version: bool = False):
        """`any_version`: to end what another version began."""
        authenticate()

        from tlora.actors.scheduler import connect

        _join(where)
        try:
            self._scheduler = connect()
        except ValueError:
            raise GoneError("this cluster has no tLoRA scheduler. Run `tlora up`.") from None
        if not any_version and (theirs := self._call("version")) != tlora.__version__:
            raise ClusterError(
                f"the cluster runs tLoRA {theirs}, this is {tlora.__version__}. Install the same version on both."
            )

    @classmethod
    def up(cls, spec: ClusterSpec) -> "tuple[Client, str]":
        """Start the scheduler with these settings, or find the one that is there, on the Ray that this process has
        joined, else on the cluster of RAY_ADDRESS, else on a Ray of this machine; returns the address, too."""
        where = _joined() or os.environ.get("RAY_ADDRESS") or local_cluster.start()
        authenticate()
        from tlora.actors.scheduler import connect

        _join(where)
        connect(spec)
        return cls(where), where

    def settings(self) -> dict[str, Any]:
        """The cluster's own, by name."""
        settings: dict[str, Any] = self._call("settings")
        return settings

    def num_gpus(self) -> int:
        """Of all nodes that are there now."""
        import ray

        return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]

    def submit(self, specs: Sequence[JobSpec], *, check: bool = True) -> list[str]:
        """Admit jobs, all or none; returns the names of those that are new. Raises SpecError before any is sent if one
        does not pass `tlora check`, which needs their bases and data here; StateError for a name that has been taken by
        other content."""
        if check:
            _check(specs)
        new: list[str] = self._call("submit", [absolute(spec).model_dump(mode="json") for spec in specs])
        return new

    def sweep(self, spec: SweepSpec, *, check: bool = True) -> bool:
        """Send a sweep, whose candidates become jobs; the same again, with another budget, goes on by it. Returns
        whether there was anything to do. Raises SpecError if its first candidate does not pass `tlora check`, or if it
        is known with other settings."""
        if check:
            _check([spec.first])
        is_new: bool = self._call("sweep", absolute_sweep(spec).model_dump(mode="json"))
        return is_new

    def status(self, names: Sequence[str] | None = None) -> list[Row]:
        """One mapping a job, in order of submission, and before them one a sweep."""
        rows: list[Row] = self._call("status", names)
        return rows

    def workers(self) -> list[Row]:
        """One mapping a worker."""
        rows: list[Row] = self._call("workers")
        return rows

    def events(self, after: int = 0, name: str | None = None) -> list[Row]:
        """What happened since event number `after`, oldest first."""
        rows: list[Row] = self._call("events", after, name)
        return rows

    def pause(self, names: Sequence[str]) -> None:
        """Save jobs and take them off their workers."""
        self._call("pause", names)

    def resume(self, names: Sequence[str]) -> None:
        """Let jobs go on that are paused, cancelled or failed, from their last saves."""
        self._call("resume", names)

    def cancel(self, names: Sequence[str], *, keep: bool = False) -> None:
        """End jobs; `keep` saves their exact state first."""
        self._call("cancel", names, keep)

    def fork(self, name: str, new: str, changes: Sequence[str] = ()) -> str:
        """Submit a job like `name` under a new name, with changes (`dotted.key=value`), from its newest adapter: its
        last, else its best so far, else that of its last save; as it is now, for it is copied into the new output."""
        (row,) = self.status([name])
        values = {**self._call("spec", name), "name": new}
        self._changed(values, changes)  # what cannot be is refused before anything is written
        output = Path(row["output"]).with_name(new)
        start = self._start_from(name, Path(row["output"]), output / "start", new)
        values |= {"output": str(output), "adapter": {**values["adapter"], "init_from": str(start)}}
        self.submit([self._changed(values, changes)])
        return new

    @staticmethod
    def _changed(values: dict[str, Any], changes: Sequence[str]) -> JobSpec:
        values = deepcopy(values)
        for change in changes:
            override(values, change)
        return parse_job(values)

    def _start_from(self, name: str, output: Path, start: Path, new: str) -> Path:
        """A job's newest adapter, at `start`. Of a job `new` that is known it stays what it was; what a fork that was
        refused has left is replaced."""
        from tlora.export import copy_adapter, export_last

        if start.exists() and new not in (row["name"] for row in self.status()):
            if not (start / "adapter_config.json").exists():
                raise StateError(f"job {new}: {start} is there already, and no adapter. Choose another name.")
            shutil.rmtree(start)
        if not start.exists():
            try:
                newest = self._call("newest_adapter", name)
            except StateError:
                export_last(output, start)
            else:
                copy_adapter(Path(newest), start)
        return start

    def fork_leader(self, sweep: str, changes: Sequence[str] = ()) -> str:
        """Have one more candidate in a sweep: its leader with changes (`dotted.key=value`), from the leader's best
        adapter. Returns the leader's name. Raises StateError if none leads yet."""
        return str(self._call("fork_leader", sweep, secrets.token_hex(8), absolute_changes(changes)))

    def wait(
        self, names: Sequence[str], watch: Callable[[list[Row]], None] = lambda rows: None, every_s: float = _POLL_S
    ) -> list[Row]:
        """Until every job has ended or is paused; `watch` sees them meanwhile."""
        while True:
            rows = self.status(names)
            watch(rows)
            if all(State(row["state"]).is_terminal or row["state"] == State.PAUSED for row in rows):
                return rows
            time.sleep(every_s)

    def down(self) -> None:
        """End all groups, their jobs saved, and the scheduler."""
        import ray

        self._call("close")
        ray.kill(self._scheduler)

    def _call(self, method: str, *arguments: Any) -> Any:
        import ray

        for _ in range(20):
            try:
                return ray.get(getattr(self._scheduler, method).remote(*arguments))
            except ray.exceptions.ActorUnavailableError:
                time.sleep(_POLL_S)
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise (cause if isinstance(cause, TloraError) else ClusterError(str(cause))) from None
            except ray.exceptions.RayActorError as error:
                raise GoneError(f"the scheduler is gone: {error}. Run `tlora up`.") from None
        raise ClusterError("the scheduler does not come back. See `ray status`, and run `tlora up`.")


def _check(specs: Sequence[JobSpec]) -> None:
    from tlora.local import prepare  # here, for a client starts sooner without

    prepare(specs)


def _joined() -> str | None:
    """The address of the Ray that this process is part of, if it is of any."""
    ray: Any = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray and ray.is_initialized() else None


def _join(where: str | None) -> None:
    """Connect to a Ray, unless this process is."""
    import ray

    if ray.is_initialized():
        return
    where = where or address()
    try:
        ray.init(address=where, namespace="tlora", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise GoneError(f"no Ray cluster answers at {where}: {str(error).rstrip('.')}. Run `tlora up`.") from None

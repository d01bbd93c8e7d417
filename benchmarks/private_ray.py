"""A Ray of this machine alone, in a folder that goes with it, for benchmarks of CPU workers."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from tlora.actors.names import NAMESPACE


@contextmanager
def started(num_cpus: int) -> Iterator[Path]:
    """Its folder, which benchmarks may write to; workers import what this process does."""
    environment = _environment()
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, namespace=NAMESPACE,
                 log_to_driver=False, _temp_dir=folder, runtime_env={"env_vars": environment})  # fmt: skip
        try:
            yield Path(folder)
        finally:
            ray.shutdown()


@contextmanager
def head() -> Iterator[tuple[Path, Cluster]]:
    """The folder, and a cluster of one node without room for workers, which others may join."""
    environment = _environment()
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        os.environ["RAY_TMPDIR"] = folder
        (Path(folder) / "ray").mkdir()
        given = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=given)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False,
                 runtime_env={"env_vars": environment})  # fmt: skip
        try:
            yield Path(folder), cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def _environment() -> dict[str, str]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    path = os.environ.get("PYTHONPATH") or os.getcwd()
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}

"""A Ray of this machine alone, in a folder that goes with it, for benchmarks of CPU workers."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray

from tlora.actors.names import NAMESPACE


@contextmanager
def started(num_cpus: int) -> Iterator[Path]:
    """Its folder, which benchmarks may write to; workers import what this process does."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    path = os.environ.get("PYTHONPATH") or os.getcwd()
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, namespace=NAMESPACE,
                 log_to_driver=False, _temp_dir=folder, runtime_env={"env_vars": environment})  # fmt: skip
        try:
            yield Path(folder)
        finally:
            ray.shutdown()

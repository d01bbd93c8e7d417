"""A cluster of several nodes: raylets of this machine, in a folder that goes with them."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
import toy
from ray.cluster_utils import Cluster

from tlora.actors.names import NAMESPACE

NODE = {"num_cpus": 2, "object_store_memory": 100_000_000}
"""With room for one worker."""


@contextmanager
def cluster_of(nodes: int) -> Iterator[Cluster]:
    """A head without room for workers, and so many nodes of one worker each."""
    with tempfile.TemporaryDirectory(prefix="tl") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", folder)  # where the newest cluster's address is written
        (Path(folder) / "ray").mkdir()
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder, "object_store_memory": 100_000_000}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(nodes):
            cluster.add_node(**NODE)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, runtime_env={"env_vars": toy.RAY})
        cluster.wait_for_nodes()
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()

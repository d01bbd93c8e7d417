"""Several raylets on one machine: workers, scheduler and nodes are killed, drained and added while jobs keep coming."""

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import toy
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from tlora.actors.names import NAMESPACE, SCHEDULER
from tlora.actors.scheduler import connect
from tlora.client import Client
from tlora.job import State

JOBS, STEPS = 40, 15


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A head without room for workers, and three nodes of one worker each."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)  # where the newest cluster's address is written
        (Path(folder) / "ray").mkdir()
        head = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder, "object_store_memory": 100_000_000}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(3):
            cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
        ray.init(
            address=cluster.address,
            namespace=NAMESPACE,
            log_to_driver=False,
            runtime_env={"env_vars": toy.RAY},
        )
        cluster.wait_for_nodes()
        try:
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def test_nothing_is_lost_whatever_goes(cluster: Cluster, tmp_path: Path) -> None:
    toy.write_base(tmp_path)
    connect(toy.cluster_spec(tmp_path, cpus_per_worker=2.0, max_workers=3, jobs_per_worker=14))
    client, draw = Client(), random.Random(0)
    specs = [toy.named_job(tmp_path, f"job{n}", steps=STEPS, save_every=5, seed=n) for n in range(JOBS)]
    client.submit(specs[:4])
    toy.until(lambda: any(row["step"] > 2 for row in client.status()))
    node = draw.choice(sorted(cluster.worker_nodes, key=lambda node: node.node_id))
    for number, spec in enumerate(specs[4:]):
        client.submit([spec])
        if number in (0, 6, 12, 18, 30):
            os.kill(draw.choice(toy.until(lambda: living(client))), signal.SIGKILL)
        elif number in (3, 21):
            ray.kill(ray.get_actor(SCHEDULER, namespace=NAMESPACE), no_restart=False)
        elif number == 15:
            cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
            drain(cluster, node.node_id)
            left = node.node_id
            toy.until(lambda left=left: left not in {worker["node"] for worker in client.workers()})
            cluster.remove_node(node, allow_graceful=False)
        time.sleep(draw.uniform(0.0, 1.0))
        toy.until(client.workers)
    rows = client.wait([spec.name for spec in specs])
    assert {row["state"] for row in rows} == {State.FINISHED}
    assert all(row["step"] == STEPS for row in rows)
    assert all(toy.equals_alone(spec) for spec in specs)
    client.down()
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]
    toy.until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def living(client: Client) -> list[int]:
    """Process ids of workers that are there: one that was killed is known for some seconds more."""
    return [worker["pid"] for worker in client.workers() if Path(f"/proc/{worker['pid']}").exists()]


def drain(cluster: Cluster, node: str) -> None:
    """As a cloud that takes a spot node back in a while."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 120) * 1000)
    accepted, _ = GcsClient(address=cluster.address).drain_node(node, reason, "spot", deadline_ms)
    assert accepted

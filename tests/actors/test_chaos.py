"""Several raylets on one machine: workers, scheduler and nodes are killed, drained and added while jobs keep coming."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import raylets
import toy
from ray._raylet import GcsClient
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.util import placement_group_table

from tlora.actors.names import NAMESPACE, SCHEDULER
from tlora.actors.scheduler import connect
from tlora.checkpoint import read_meta
from tlora.client import Client
from tlora.job import State
from tlora.spec import JobSpec
from tlora.tracking import read_metrics

JOBS = 40
FALLS, LEAVES = 9, 15
"""Which submission a node is lost at without notice, and which one is drained at."""
COORDINATOR = "_AutoscalingCoordinatorActor"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without room for workers, and three nodes of one worker each."""
    with raylets.cluster_of(3) as cluster:
        yield cluster


def test_nothing_is_lost_whatever_goes(cluster: Cluster, tmp_path: Path) -> None:
    toy.write_base(tmp_path)
    assert not living_actors()
    connect(toy.cluster_spec(tmp_path, cpus_per_worker=2.0, max_workers=3, jobs_per_worker=14))
    client, draw = Client(), random.Random(0)
    changes = [{"steps": 12, "save_every": 5} for _ in range(JOBS)]
    for number in (FALLS, LEAVES):  # long ones are there then
        long = {"steps": 200, "eval_every": 200, "save_every": 20 if number == FALLS else 1000}
        changes[3 + number : 5 + number] = [long] * 2
    specs = [toy.named_job(tmp_path, f"job{n}", seed=n, **change) for n, change in enumerate(changes)]
    client.submit(specs[:4])
    toy.until(lambda: any(row["step"] > 2 for row in client.status()))
    processes: set[int] = set()
    for number, spec in enumerate(specs[4:]):
        client.submit([spec])
        if number in (0, 6, 12, 18, 30):
            os.kill(draw.choice(toy.until(lambda: living(client))), signal.SIGKILL)
        elif number in (3, 21):
            ray.kill(ray.get_actor(SCHEDULER, namespace=NAMESPACE), no_restart=False)
        elif number == FALLS:
            busy = toy.until(lambda at=number: steps_by_node(client, specs[3 + at : 5 + at]))
            remove(cluster, min(busy))
        elif number == LEAVES:
            cluster.add_node(num_cpus=2, object_store_memory=100_000_000)
            busy = toy.until(lambda at=number: steps_by_node(client, specs[3 + at : 5 + at]))
            leave_in_time(cluster, client, min(busy), busy[min(busy)])
            remove(cluster, min(busy))
        time.sleep(draw.uniform(0.0, 0.5))
        processes.update(worker["pid"] for worker in toy.until(client.workers))
        processes.update(actor["Pid"] for actor in living_actors().values())
    rows = client.wait([spec.name for spec in specs])
    assert {row["state"] for row in rows} == {State.FINISHED}
    for spec in specs:
        steps = [row["step"] for row in read_metrics(spec.folder) if "loss" in row]
        assert steps == list(range(1, (spec.steps or 0) + 1)), spec.name
    assert all(toy.equals_alone(spec) for spec in specs)
    client.down()
    nothing_is_left(cluster, processes)


def nothing_is_left(cluster: Cluster, processes: set[int]) -> None:
    """But the actor with which Ray itself coordinates demand: it is the cluster's, asks for nothing, and stays."""
    toy.until(lambda: all(actor["ActorClassName"] == COORDINATOR for actor in living_actors().values()))
    coordinators = {actor["Pid"] for actor in living_actors().values()}
    assert len(coordinators) <= 1
    toy.until(lambda: not [pid for pid in processes - coordinators if Path(f"/proc/{pid}").exists()])
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    demands = get_cluster_status(cluster.address).resource_demands
    assert not demands.placement_group_demand
    assert not [each for demand in demands.cluster_constraint_demand for each in demand.bundles_by_count]
    toy.until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])


def living_actors() -> dict[str, dict[str, Any]]:
    """Of all namespaces, also those without a name."""
    table = ray._private.state.state.actor_table(None)
    return {key: actor for key, actor in table.items() if actor["State"] != "DEAD"}


def steps_by_node(client: Client, specs: list[JobSpec]) -> dict[str, dict[str, int]]:
    """Steps of those of these jobs that are under way, by the node that they train on."""
    steps = {row["name"]: row["step"] for row in client.status([spec.name for spec in specs]) if row["step"] > 2}
    nodes: dict[str, dict[str, int]] = {}
    for worker in client.workers():
        for name in worker["jobs"] if worker["pid"] in living(client) else ():
            if name in steps:
                nodes.setdefault(worker["node"], {})[name] = steps[name]
    return nodes


def leave_in_time(cluster: Cluster, client: Client, node: str, seen: dict[str, int]) -> None:
    """A node is drained while jobs train there: they leave it, saved no earlier than the last step that was seen."""
    drain(cluster, node)
    toy.until(lambda: node not in {worker["node"] for worker in client.workers()})
    folders = {row["name"]: Path(row["output"]) for row in client.status(list(seen))}
    assert not [name for name, step in seen.items() if read_meta(folders[name])["step"] < step]


def remove(cluster: Cluster, node_id: str) -> None:
    """A node is gone, with all that runs there."""
    (node,) = [node for node in cluster.worker_nodes if node.node_id == node_id]
    cluster.remove_node(node, allow_graceful=False)


def living(client: Client) -> list[int]:
    """Process ids of workers that are there: one that was killed is known for some seconds more."""
    return [worker["pid"] for worker in client.workers() if Path(f"/proc/{worker['pid']}").exists()]


def drain(cluster: Cluster, node: str) -> None:
    """As a cloud that takes a spot node back in a while."""
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + 120) * 1000)
    accepted, _ = GcsClient(address=cluster.address).drain_node(node, reason, "spot", deadline_ms)
    assert accepted

"""A cluster that has nothing, gets a node, and has nothing left to do; and where on its nodes workers come to be."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import raylets
import toy
from ray.cluster_utils import Cluster
from ray.util import placement_group_table, remove_placement_group
from ray.util.placement_group import PlacementGroup

from benchmarks import private_ray
from tlora.actors.ray_train import reserve
from tlora.actors.scheduler import connect
from tlora.client import Client
from tlora.job import State
from tlora.plan import Plan


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without room for workers."""
    with raylets.cluster_of(0) as cluster:
        yield cluster


def test_an_autoscaler_brings_a_node_for_a_job_and_takes_it_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's own autoscaler, whose nodes are raylets of this machine: from a head alone back to a head alone."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(toy.ROOT))
    toy.write_base(tmp_path)
    with private_ray.autoscaled():
        connect(toy.cluster_spec(tmp_path, cpus_per_worker=2.0, idle_s=1.0))
        client, spec = Client(), toy.named_job(tmp_path, "a", steps=3)
        assert nodes() == 1
        client.submit([spec])
        toy.until(lambda: "waits for machines: 1 worker(s)" in client.status()[0]["reason"])
        assert not client.workers()
        seen = set[int]()
        assert client.wait(["a"], lambda _: seen.add(nodes()))[0]["state"] == State.FINISHED
        assert max(seen) == 2, "one is enough"
        toy.until(lambda: nodes() == 1)
        assert not client.workers()
        assert toy.equals_alone(spec)
        client.down()


def nodes() -> int:
    """That are there, the head included."""
    return sum(node["Alive"] for node in ray.nodes())


def test_units_are_placed_by_what_their_ranks_share(cluster: Cluster) -> None:
    """On two nodes of two GPUs: a lane never leaves its node, lanes do so only for lack of room, single workers go to
    the node that is named."""
    one, two = (cluster.add_node(num_cpus=4, num_gpus=2, object_store_memory=100_000_000).node_id for _ in range(2))

    def places(plan: Plan, near: str | None = None) -> tuple[PlacementGroup, list[str]]:
        (group,) = reserve(1, {"CPU": 1.0, "GPU": 1.0}, plan, near)
        assert group.wait(30)
        return group, list(placement_group_table(group)["bundles_to_node_id"].values())

    def free(*groups: PlacementGroup, gpus: int) -> None:
        for group in groups:
            remove_placement_group(group)
        toy.until(lambda: ray.available_resources().get("GPU") == gpus)

    first, where = places(Plan(), one)
    assert where == [one]
    unit, where = places(Plan(shards=2))
    assert where == [two, two], "where both lanes have room"
    free(unit, gpus=3)
    second, where = places(Plan(), two)
    assert where == [two]
    (lane,) = reserve(1, {"CPU": 1.0, "GPU": 1.0}, Plan(tensor=2))
    assert not lane.wait(2), "a GPU is free on each node: no room for one lane of two"
    remove_placement_group(lane)
    unit, where = places(Plan(shards=2))
    assert sorted(where) == sorted([one, two])
    free(first, second, unit, gpus=4)
    assert places(Plan(tensor=2))[1] in ([one], [two])


def test_a_growing_group_stays_on_its_node_while_there_is_room(cluster: Cluster, tmp_path: Path) -> None:
    toy.write_base(tmp_path)
    for _ in range(2):
        cluster.add_node(num_cpus=4, object_store_memory=100_000_000)
    connect(toy.cluster_spec(tmp_path, cpus_per_worker=2.0, jobs_per_worker=1))
    client = Client()
    specs = [toy.named_job(tmp_path, f"job{n}", steps=100_000) for n in range(2)]
    for count, spec in enumerate(specs, 1):
        client.submit([spec])
        toy.until(lambda count=count: len([worker for worker in client.workers() if worker["jobs"]]) == count)
    assert len({worker["node"] for worker in client.workers()}) == 1
    client.cancel([spec.name for spec in specs])
    client.down()

"""A unit whose ranks lie on two nodes, one worker each: raylets of this machine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import raylets
import toy
from ray.cluster_utils import Cluster

from tlora.actors.scheduler import connect
from tlora.client import Client
from tlora.job import State
from tlora.spec import JobSpec


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for workers, and two nodes of one worker each."""
    with raylets.cluster_of(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    toy.write_base(folder)
    return folder


@pytest.fixture(scope="module")
def client(cluster: Cluster, folder: Path) -> Iterator[Client]:
    """Of all tests here: starting a unit takes longer than they do."""
    connect(toy.cluster_spec(folder, cpus_per_worker=2.0, plan={"shards": 2}))
    yield Client()
    Client().down()


def job(folder: Path, name: str, steps: int) -> JobSpec:
    base = {"model": str(folder / "base"), "dtype": "float64"}
    return toy.named_job(folder, name, base=base, steps=steps, save_every=4, eval_every=1000)


def unit_at(client: Client, name: str, step: int) -> dict[str, Any]:
    """The only unit, once the job has come so far."""
    toy.until(lambda: client.status([name])[0]["step"] >= step)
    (unit,) = client.workers()
    return unit


def test_ranks_on_two_nodes_train_and_one_that_is_killed_costs_a_restart(client: Client, folder: Path) -> None:
    specs = [job(folder, name, 20) for name in ("one", "other")]
    client.submit(specs)
    unit = unit_at(client, "other", 6)
    assert len({*unit["nodes"]}) == 2
    assert [row["lanes"] for row in client.status(["one", "other"])] == [[0], [1]]
    assert speaks_at(unit["pids"]) == {node["NodeManagerAddress"] for node in ray.nodes()}
    os.kill(unit["pids"][1], signal.SIGKILL)
    rows = client.wait(["one", "other"])
    assert [(row["state"], row["attempt"]) for row in rows] == [(State.FINISHED, 2)] * 2
    assert all(toy.off_alone(spec) < 1e-8 for spec in specs)


def speaks_at(pids: list[int]) -> set[str]:
    """Addresses at which these processes speak to each other."""
    links = [
        (link.laddr, link.raddr, pid)
        for pid in pids
        for link in psutil.Process(pid).net_connections("tcp")
        if link.status == psutil.CONN_ESTABLISHED
    ]
    owners = {here: pid for here, _, pid in links}
    return {here.ip.removeprefix("::ffff:") for here, there, pid in links if owners.get(there, pid) != pid}


def test_a_unit_whose_node_is_lost_waits_for_another(client: Client, cluster: Cluster, folder: Path) -> None:
    """A job that is split over both nodes."""
    spec = job(folder, "split", 20)
    client.submit([spec])
    unit = unit_at(client, "split", 6)
    assert client.status(["split"])[0]["lanes"] == [0, 1]
    (lost,) = (node for node in cluster.worker_nodes if node.node_id == unit["nodes"][1])
    cluster.remove_node(lost, allow_graceful=False)
    text = "waits for machines: 1 unit(s) of 2 workers of its base are asked for, those here have room for 0"
    toy.until(lambda: client.status(["split"])[0]["reason"] == text)
    new = cluster.add_node(**raylets.NODE)
    (row,) = client.wait(["split"])
    assert (row["state"], row["attempt"]) == (State.FINISHED, 2)
    assert new.node_id in client.workers()[0]["nodes"]
    assert toy.off_alone(spec) < 1e-8

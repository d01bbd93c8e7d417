"""The whole cluster on a local Ray with CPU workers: whatever is killed, jobs end as they would have alone."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import toy

from tlora.actors.names import NAMESPACE
from tlora.actors.scheduler import connect
from tlora.client import Client
from tlora.cluster import ClusterSpec
from tlora.errors import ClusterError, StateError
from tlora.job import State

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tl") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            object_store_memory=150_000_000,
            _temp_dir=folder,
            runtime_env={"env_vars": environment},
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def client(_ray: None, tmp_path: Path) -> Iterator[Client]:
    """Of a scheduler with two CPU workers, in deterministic mode."""
    toy.write_base(tmp_path)
    connect(
        ClusterSpec(
            storage=str(tmp_path),
            state=str(tmp_path / "state"),
            gpus_per_worker=0,
            max_workers=2,
            jobs_per_worker=2,
            deterministic=True,
            lost_after_s=8.0,
            idle_s=5.0,
        )
    )
    yield Client()
    Client().down()
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]


def step(client: Client, name: str) -> int:
    return int(client.status([name])[0]["step"])


def test_whatever_is_killed_each_job_ends_as_it_would_have_alone(client: Client, tmp_path: Path) -> None:
    specs = [toy.named_job(tmp_path, f"job{n}", steps=150, save_every=20) for n in range(4)]
    assert client.submit(specs[:3]) == ["job0", "job1", "job2"]
    assert client.submit(specs) == ["job3"]
    with pytest.raises(StateError, match=r"job0 was submitted with other content: optim\.lr"):
        client.submit([specs[0].model_copy(update={"optim": specs[0].optim.model_copy(update={"lr": 1.0})})])
    toy.until(lambda: all(step(client, spec.name) > 25 for spec in specs))

    first, second = client.workers()
    os.kill(first["pid"], signal.SIGKILL)  # its jobs go on elsewhere, or where it was; the other worker stays
    ray.kill(ray.get_actor("tlora-scheduler", namespace=NAMESPACE), no_restart=False)
    client.pause(["job1"])
    toy.until(lambda: client.status(["job1"])[0]["state"] == State.PAUSED)
    toy.until(lambda: len(client.workers()) == 2 and first["pid"] not in {worker["pid"] for worker in client.workers()})
    assert second["pid"] in {worker["pid"] for worker in client.workers()}
    client.resume(["job1"])

    rows = client.wait([spec.name for spec in specs])
    assert [row["state"] for row in rows] == ["finished"] * 4
    assert max(row["attempt"] for row in rows) >= 2
    assert all(toy.equals_alone(spec) for spec in specs)
    states = [event["state"] for event in client.events(0, "job1")]
    assert states[0] == State.QUEUED
    assert states[-1] == State.FINISHED
    assert State.PAUSED in states


def test_a_group_grows_and_shrinks_around_its_workers(client: Client, tmp_path: Path) -> None:
    """The one that was there keeps its process, its base and its jobs."""
    long = [toy.named_job(tmp_path, f"long{n}", steps=400, save_every=1000) for n in range(2)]
    client.submit(long)
    toy.until(lambda: step(client, "long0") > 5)
    (first,) = client.workers()
    short = [toy.named_job(tmp_path, f"short{n}", steps=3) for n in range(6)]
    client.submit(short)
    client.wait([spec.name for spec in short])
    both = {worker["pid"]: worker for worker in client.workers()}
    assert len(both) == 2
    assert both[first["pid"]]["base_loads"] == 1
    toy.until(lambda: [worker["pid"] for worker in client.workers()] == [first["pid"]])
    client.cancel(["long1"], keep=True)
    assert client.wait(["long0"])[0]["state"] == State.FINISHED
    assert client.status(["long1"])[0]["state"] == State.CANCELLED
    assert {row["attempt"] for row in client.status()} == {1}
    assert toy.equals_alone(long[0])


def test_jobs_outlive_their_scheduler_and_its_cluster_state(client: Client, tmp_path: Path) -> None:
    """`down` saves what runs; the next `up` on the same state goes on with it."""
    spec = toy.named_job(tmp_path, "long", steps=120, save_every=1000)
    client.submit([spec])
    toy.until(lambda: step(client, "long") > 5)
    scheduler_spec = ClusterSpec(
        storage=str(tmp_path), state=str(tmp_path / "state"), gpus_per_worker=0, deterministic=True
    )
    client.down()
    with pytest.raises(ClusterError, match="Run `tlora up`"):
        Client()
    connect(scheduler_spec)
    again = Client()
    assert again.wait(["long"])[0]["state"] == State.FINISHED
    assert again.status(["long"])[0]["attempt"] == 2
    assert toy.equals_alone(spec)
    assert again.fork("long", "child", ["steps=1"]) == "child"
    assert again.wait(["child"])[0]["state"] == State.FINISHED

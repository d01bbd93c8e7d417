"""A local Ray with CPU workers, once a file, and a scheduler for each test that asks for a client."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import toy

from tlora import local_cluster
from tlora.actors.names import NAMESPACE
from tlora.actors.scheduler import connect
from tlora.client import Client


@pytest.fixture(scope="module")
def _ray() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="tl") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            namespace=NAMESPACE,
            log_to_driver=False,
            object_store_memory=150_000_000,
            _temp_dir=folder,
            runtime_env={"env_vars": toy.RAY},
        )
        try:
            yield
        finally:
            ray.shutdown()


@pytest.fixture
def client(
    _ray: None, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    """Of a scheduler with two CPU workers, or as the test's parameter says; on this Ray and no other."""
    monkeypatch.setattr(local_cluster, "start", lambda: pytest.fail("a Ray of the user's own was started"))
    toy.write_base(tmp_path)
    settings = {"jobs_per_worker": 2, "idle_s": 5.0, **getattr(request, "param", {})}
    connect(toy.cluster_spec(tmp_path, **settings))
    yield Client()
    Client().down()
    assert not [actor for actor in ray.util.list_named_actors(all_namespaces=True) if actor["namespace"] == NAMESPACE]

"""A trainer group, from the scheduler's side: started, told its size, ended. Its workers ask for their orders."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray

from tlora.actors.messages import WorkerOptions
from tlora.actors.names import GROUP, NAMESPACE
from tlora.cluster import ClusterSpec

log = logging.getLogger("tlora")


def _train(options: dict[str, Any]) -> None:
    """The worker's function, by way of one that a scheduler can name without torch."""
    from tlora.actors.worker import train

    train(options)


def start(spec: ClusterSpec, options: WorkerOptions, size: int) -> None:
    """Start a group; its workers come as the cluster has room."""
    from tlora.actors import ray_train  # here, for a scheduler starts sooner without

    resources = {"CPU": spec.cpus_per_worker, **({"GPU": 1.0} if spec.gpus_per_worker else {})}
    environment = {} if spec.gpus_per_worker else {"OMP_NUM_THREADS": str(max(1, int(spec.cpus_per_worker)))}
    ray_train.start(
        _train,
        asdict(options),
        group=options.group,
        size=size,
        resources=resources,
        storage=f"{spec.storage}/_tlora/ray_train",
        environment=environment,
        in_place=spec.resize == "in_place",
    )


def resize(name: str, size: int, leaving: list[tuple[str, int]]) -> None:
    """Tell a group its size, and which workers (node, process id) it lets go."""
    ray.get(_controller(name).resize.remote(size, leaving), timeout=600.0)


def end(name: str) -> None:
    """End a group whatever it does; one that has ended already is well."""
    with suppress(ValueError):
        controller = _controller(name)
        with suppress(ray.exceptions.RayError):
            ray.get(controller.abort.remote(), timeout=30.0)
        ray.kill(controller)


def running() -> Iterator[tuple[str, dict[str, Any]]]:
    """Groups of this cluster, each with its options and size: what a scheduler adopts."""
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(GROUP):
            name = actor["name"].removeprefix(GROUP)
            try:
                yield name, ray.get(_controller(name).describe.remote(), timeout=120.0)
            except (ray.exceptions.RayError, ValueError) as error:
                log.warning("group=%s does not answer, and is ended: %s", name, error)
                end(name)


def draining_nodes() -> frozenset[str]:
    """Nodes that are about to go: drained by an autoscaler, or on notice of their cloud."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def _controller(name: str) -> Any:
    return ray.get_actor(GROUP + name, namespace=NAMESPACE)

"""A trainer group, from the scheduler's side: started, told its size, ended. Its workers ask for their orders."""

import logging
from contextlib import suppress
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import ray

from tlora.actors.messages import WorkerOptions
from tlora.actors.names import GROUP, NAMESPACE
from tlora.cluster import ClusterSpec

log = logging.getLogger("tlora")


def _train(options: dict[str, Any]) -> None:
    """The worker's function, by way of one that a scheduler can name without torch."""
    from tlora.actors.process import train

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
        storage=below(spec.storage, "_tlora/ray_train"),
        environment=environment,
        in_place=spec.resize == "in_place",
    )


def below(storage: str, part: str) -> str:
    """A folder within the storage; what an address asks for besides stays behind its path."""
    if "://" not in storage:
        return f"{storage}/{part}"
    address = urlsplit(storage)
    return address._replace(path=f"{address.path.rstrip('/')}/{part}").geturl()


def resize(name: str, size: int, leaving: list[tuple[str, int]]) -> bool:
    """Tell a group its size, and which workers (node, process id) it lets go; whether it has heard. One that is busy,
    with a start perhaps, has not."""
    try:
        ray.get(_controller(name).resize.remote(size, leaving), timeout=2.0)
    except (ray.exceptions.RayError, ValueError) as error:
        log.debug("group=%s has not heard its size: %s", name, error)
        return False
    return True


def end(name: str) -> None:
    """End a group whatever it does; one that has ended already is well."""
    with suppress(ValueError):
        controller = _controller(name)
        with suppress(ray.exceptions.RayError):
            ray.get(controller.abort.remote(), timeout=30.0)
        ray.kill(controller)


def names() -> list[str]:
    """Groups of this cluster, by their controllers."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    mine = (actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return [name.removeprefix(GROUP) for name in mine if name.startswith(GROUP)]


def describe(name: str) -> dict[str, Any] | None:
    """A group's options, size, and whether it has ended: what a scheduler adopts. None while it is busy. Raises
    ray.exceptions.RayError or ValueError for one that is gone."""
    controller = _controller(name)
    controller.ensure_run.remote()
    try:
        known: dict[str, Any] = ray.get(controller.describe.remote(), timeout=2.0)
    except ray.exceptions.GetTimeoutError:
        return None
    return known


def has_ended(name: str) -> bool:
    """Whether a group's controller is gone or has given up; one that is busy, with a start perhaps, has not."""
    try:
        return bool(ray.get(_controller(name).describe.remote(), timeout=2.0)["ended"])
    except ray.exceptions.GetTimeoutError:
        return False
    except (ray.exceptions.RayError, ValueError):
        return True


def draining_nodes() -> frozenset[str]:
    """Nodes that are about to go: drained by an autoscaler, or on notice of their cloud."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def _controller(name: str) -> Any:
    return ray.get_actor(GROUP + name, namespace=NAMESPACE)

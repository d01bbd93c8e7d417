"""A trainer group, from the scheduler's side: started, told its size, ended. Its workers ask for their orders."""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray

from tlora.actors.messages import WorkerOptions
from tlora.actors.names import GROUP, NAMESPACE
from tlora.cluster import ClusterSpec

log = logging.getLogger("tlora")
_ANSWER_S = 2.0
"""In which a controller answers that is not busy."""


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
        storage=str(spec.output_root / "_tlora" / "ray_train"),
        environment=environment,
        in_place=spec.resize == "in_place",
    )


def resize(told: Mapping[str, tuple[int, list[tuple[str, int]]]]) -> list[str]:
    """Tell groups their sizes, and which workers (node, process id) they let go; returns those that have heard. One
    that is busy, with a start perhaps, has not."""
    answers = _ask(told, lambda name, controller: controller.resize.remote(*told[name]))
    for name in told.keys() - answers.keys():
        log.debug("group=%s has not heard its size", name)
    return [name for name, answer in answers.items() if not isinstance(answer, Exception)]


def end(name: str) -> None:
    """End a group whatever it does; one that has ended already is well. One that is busy, waiting for machines
    perhaps, would not hear of an end before that."""
    with suppress(ValueError):
        controller = _controller(name)
        with suppress(ray.exceptions.RayError):
            ray.get(controller.describe.remote(), timeout=_ANSWER_S)
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
        known: dict[str, Any] = ray.get(controller.describe.remote(), timeout=_ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        return None
    return known


def ended(names: Iterable[str]) -> list[str]:
    """Groups whose controllers are gone or have given up; one that is busy, with a start perhaps, has not."""
    answers = _ask(names, lambda name, controller: controller.describe.remote())
    return [name for name, answer in answers.items() if isinstance(answer, Exception) or answer["ended"]]


def _ask(names: Iterable[str], call: Callable[[str, Any], Any]) -> dict[str, Any]:
    """What the groups' controllers answer, all asked at once, or the error; nothing of those that are busy."""
    asked, answers = dict[Any, str](), dict[str, Any]()
    for name in names:
        try:
            asked[call(name, _controller(name))] = name
        except ValueError as error:
            answers[name] = error
    ready = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_S)[0] if asked else []
    for ref in ready:
        try:
            answers[asked[ref]] = ray.get(ref, timeout=_ANSWER_S)
        except ray.exceptions.GetTimeoutError:  # its value is on its way
            continue
        except ray.exceptions.RayError as error:
            answers[asked[ref]] = error
    return answers


def draining_nodes() -> frozenset[str]:
    """Nodes that are about to go: drained by an autoscaler, or on notice of their cloud."""
    return frozenset(ray._private.state.state.get_draining_nodes())


def _controller(name: str) -> Any:
    return ray.get_actor(GROUP + name, namespace=NAMESPACE)

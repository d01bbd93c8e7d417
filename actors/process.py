"""A worker's process: what Ray Train runs in it, by way of `tlora.actors.group`, and how it finds the scheduler."""

import os
import time
from typing import Any, cast

import ray
import torch

from tlora.actors.messages import Orders, Report, WorkerOptions
from tlora.actors.names import NAMESPACE, SCHEDULER, STORE
from tlora.actors.worker import Exchange, Worker
from tlora.plan import Plan

_PAUSE_S = 0.2


def train(options: dict[str, Any]) -> None:
    """Ray Train's function of a worker."""
    given = WorkerOptions(**{**options, "plan": Plan(**options["plan"]), "per_node": _per_node()})
    rank, node = ray.train.get_context().get_world_rank(), ray.get_runtime_context().get_node_id()
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "0")) or torch.get_num_threads()))
    if given.plan.ranks == 1:
        Worker(given, rank, node).run(_scheduler_exchange())
        return
    from tlora.actors.meeting import open_mesh
    from tlora.actors.unit import Member  # torch.distributed is none of a lone worker's business

    number, place = divmod(rank, given.plan.ranks)
    mesh = open_mesh(given, place, os.environ[STORE])
    Member(given, number, node, mesh).run(_scheduler_exchange())
    mesh.close()


def _per_node() -> int:
    """Workers like this one for which the largest node has room."""
    mine = cast(Any, ray).get_runtime_context().get_assigned_resources()
    nodes = [node["Resources"] for node in cast(Any, ray).nodes() if node["Alive"]]
    return max(
        min(int(round(has.get(name, 0.0) / amount, 6)) for name, amount in mine.items() if amount)  # 1.0 // 0.1 is 9
        for has in nodes
    )


def _scheduler_exchange() -> Exchange:
    """With the scheduler of this cluster, looked up again whenever it does not answer."""
    known: list[Any] = []

    def exchange(report: Report) -> Orders | None:
        try:
            if not known:
                known.append(ray.get_actor(SCHEDULER, namespace=NAMESPACE))
            orders: Orders = ray.get(known[0].exchange.remote(report), timeout=10.0)
        except (ray.exceptions.RayError, ValueError):  # not there, dead, or too slow
            known.clear()
            time.sleep(_PAUSE_S)
            return None
        return orders

    return exchange

"""All that tLoRA takes from Ray Train's insides: a run whose workers are replaced, added and let go one by one.

Units share no collective: single workers of a replicated base, or as many as a plan has ranks, which do among
themselves. `_Workers` adds and lets go of single units, each in a placement group of its own, while the others go on:
so a group changes its size, and so one that fails is replaced, as a whole. The controller is a named, detached actor,
so that the scheduler's death stops nothing. With `resize: restart` a new size is a new start, by Ray Train's own code;
the controller and its placement groups are from here then too, for Ray Train's own would end with the scheduler.
"""

import copy
import dataclasses
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
from ray.train import BackendConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.v2._internal.constants import (
    DEFAULT_WORKER_GROUP_START_TIMEOUT_S,
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision, ScalingPolicy
from ray.train.v2._internal.execution.worker_group import Worker, WorkerGroup
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.execution.worker_group.state import _shutdown_workers
from ray.train.v2._internal.execution.worker_group.worker_group import ReplicaGroup
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tlora.actors.names import GROUP, NAMESPACE, STORE
from tlora.plan import Plan

if not ray.__version__.startswith("2.60."):
    raise ImportError(
        f"tLoRA's trainer groups are made for Ray 2.60: got {ray.__version__}. Install ray[default,train]==2.60.*."
    )

log = logging.getLogger("tlora")
_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR: "600",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0",
}


class _Alone(Backend):
    """No process group of Ray Train's: what fails is replaced by itself."""

    has_replica_groups = True


class _AloneConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _Alone


class _Seats(PlacementGroupHandle):
    """One placement group a unit, so that each is let go of by itself."""

    def __init__(self, groups: list[PlacementGroup]):
        self.groups = groups

    @property
    def placement_group(self) -> "_Seats":
        return self

    def ready(self) -> list[Any]:
        return [group.ready() for group in self.groups]

    def wait(self, timeout_seconds: float = 30) -> bool:
        return all(group.wait(timeout_seconds) for group in self.groups)

    def shutdown(self) -> None:
        for group in self.groups:
            remove_placement_group(group)


class _Workers(WorkerGroup):
    """Of one group; a worker's bundle index is the place of its unit in `_Seats.groups`."""

    _next_rank = 0

    @property
    def plan(self) -> Plan:
        return Plan(**self._train_run_context.train_loop_config["plan"])

    def _create_placement_group(self, scaling_config: ScalingConfig, worker_group_context: Any) -> _Seats:
        units = worker_group_context.num_workers // self.plan.ranks
        return _Seats(reserve(units, worker_group_context.resources_per_worker, self.plan))

    def _create_workers(
        self,
        num_workers: int,
        placement_group: Any,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int] | None = None,
        starting_world_rank: int = 0,
        world_size: int | None = None,
        replica_group_size: int | None = None,
    ) -> list[Worker]:
        """Units side by side, each in its own placement group."""
        plan = self.plan
        seats = placement_group_bundle_indices or list(range(num_workers // plan.ranks))

        def create(number: int, seat: int) -> list[Worker]:
            workers = super(_Workers, self)._create_workers(
                plan.ranks,
                placement_group.groups[seat],
                resources_per_worker,
                [lane for lane in range(plan.lanes) for _ in range(plan.tensor)],
                starting_world_rank + number * plan.ranks,
                world_size or num_workers,
                plan.ranks,
            )
            for worker in workers:
                worker.placement_group_bundle_index = seat
            if plan.ranks > 1:
                store = ray.get(workers[0].execute_async(_free_address))
                ray.get([worker.execute_async(_note_store, store) for worker in workers])
            return workers

        with ThreadPoolExecutor(max(1, len(seats))) as pool:
            return [worker for unit in pool.map(create, range(len(seats)), seats) for worker in unit]

    def _start_impl(self, builder: Any) -> None:
        """A unit is a replica group, whatever its size."""
        super()._start_impl(builder)
        self._replace(self.get_workers())

    def start_in(self, groups: list[PlacementGroup]) -> "Future[list[Worker]]":
        """Begin to start a unit in each of these placement groups, which are ready, in a thread: that takes long, and
        the others are polled meanwhile. `join` takes them in."""
        state, context = self._worker_group_state, self._worker_group_context
        seats, count = state.placement_group_handle.groups, len(groups) * self.plan.ranks
        ranks = (worker.distributed_context.world_rank for worker in state.workers)
        first_rank = max(self._next_rank, 1 + max(ranks, default=-1))
        self._next_rank = first_rank + count
        indices = list(range(len(seats), len(seats) + len(groups)))
        seats += groups
        pool = ThreadPoolExecutor(1, "tlora-start")
        future = pool.submit(
            self._create_workers, count, state.placement_group_handle, context.resources_per_worker, indices, first_rank
        )
        pool.shutdown(wait=False)
        return future

    def join(self, started: "Future[list[Worker]]", groups: list[PlacementGroup]) -> None:
        """Take in units that have started; those that could not go, and others are asked for."""
        state, context = self._worker_group_state, self._worker_group_context
        try:
            workers = started.result()
            self._init_train_context(workers, state.sync_actor)
            ray.get([worker.actor.run_train_fn.remote(context.train_fn_ref) for worker in workers])
        except Exception as error:  # of the new ones alone
            self.give_up(groups, error)
        else:
            self._replace([*state.workers, *workers])

    def give_up(self, groups: list[PlacementGroup], error: object = "they take too long") -> None:
        """Units that do not start: what has come of them goes with their placement groups."""
        log.warning("group=%s new workers did not start: %s", self._train_run_context.run_config.name, error)
        for group in groups:
            remove_placement_group(group)

    def failed(self) -> list[Worker]:
        """Workers of units in one of which the last poll found an error."""
        status, workers = self.get_latest_poll_status(), self.get_workers()
        wrong = {
            _seat(workers[index]) for index, each in (status.worker_statuses.items() if status else ()) if each.error
        }
        return [worker for worker in workers if _seat(worker) in wrong]

    def let_go(self, leaving: list[Worker]) -> None:
        """End these workers, of whole units, and free what they held."""
        state = self._worker_group_state
        _shutdown_workers(leaving)
        for seat in {_seat(worker) for worker in leaving}:
            remove_placement_group(state.placement_group_handle.groups[seat])
        self._replace([worker for worker in state.workers if worker not in leaving])

    def _replace(self, workers: list[Worker]) -> None:
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._world_rank_to_ongoing_poll.clear()
        resources, seats = self._worker_group_context.resources_per_worker, [_seat(worker) for worker in workers]
        places = {seat: at for at, seat in enumerate(dict.fromkeys(seats))}
        self._replica_groups = [
            ReplicaGroup(
                [worker for worker in workers if _seat(worker) == seat], resources, self._replica_group_callbacks
            )
            for seat in places
        ]
        self._worker_rank_to_replica_group_rank = {index: places[seat] for index, seat in enumerate(seats)}


def _seat(worker: Worker) -> int:
    """The place of its unit's placement group."""
    assert worker.placement_group_bundle_index is not None
    return worker.placement_group_bundle_index


def _free_address() -> str:
    """Host and port for the store of a unit, on its first worker's node."""
    with socket.socket() as found:
        found.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{found.getsockname()[1]}"


def _note_store(address: str) -> None:
    os.environ[STORE] = address


def reserve(count: int, resources: dict[str, float], plan: Plan, near: str | None = None) -> list[PlacementGroup]:
    """A placement group for each of so many units, a bundle a lane, whose ranks are on one node; on node `near`, if it
    has room: there the base is in the cache of files, and GPUs reach one another best. One that is not ready is demand
    that an autoscaler sees."""
    lane = {name: amount * plan.tensor for name, amount in resources.items()}
    strategy = "PACK" if plan.lanes > 1 else "STRICT_PACK"
    return [
        placement_group([lane] * plan.lanes, strategy=strategy, _soft_target_node_id=None if plan.lanes > 1 else near)
        for _ in range(count)
    ]


def _start_timeout_s() -> float:
    return float(os.environ.get(WORKER_GROUP_START_TIMEOUT_S_ENV_VAR, DEFAULT_WORKER_GROUP_START_TIMEOUT_S))


@dataclasses.dataclass(frozen=True)
class _Start:
    """Units whose processes start."""

    groups: list[PlacementGroup]
    until_s: float
    """When it is given up."""


@dataclasses.dataclass
class _InPlace(ResizeDecision):
    """A change of size that leaves the other workers alone."""


class _Told(ScalingPolicy):
    """As many units as the scheduler says."""

    def __init__(self, scaling_config: ScalingConfig, size: int, in_place: bool, plan: Plan):
        self.resources = dict(scaling_config._resources_per_worker_not_none)
        lane = {name: amount * plan.tensor for name, amount in self.resources.items()}
        # What is asked for as one lies on one node.
        super().__init__(dataclasses.replace(scaling_config, resources_per_worker=lane))
        self.size, self.in_place, self.plan = size, in_place, plan
        self.pending: list[PlacementGroup] = []
        """Of units that are to come."""
        self.starting: dict[Future[list[Worker]], _Start] = {}
        self.leaving: set[tuple[str, int]] = set()
        """Nodes and process ids of one worker or more of each unit that is to go."""

    def _get_num_workers_for_resource_request(self) -> int:
        """Lanes."""
        return int(self.size * self.plan.lanes)

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        """A start: of one unit, which the others join as there is room for them."""
        self._maybe_send_resource_request()
        for group in self.pending:
            remove_placement_group(group)
        self.pending, self.leaving = [], set()
        return ResizeDecision((1 if self.in_place else self.size) * self.plan.ranks, self.resources)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        self._maybe_send_resource_request()
        if not self.in_place:
            wanted = self.size * self.plan.ranks
            return (
                NoopDecision() if worker_group_state.num_workers == wanted else ResizeDecision(wanted, self.resources)
            )
        self._retire(worker_group_state.workers, worker_group_status)
        units: dict[int, list[tuple[str, int]]] = {}
        for worker in worker_group_state.workers:
            units.setdefault(_seat(worker), []).append(_key(worker))
        staying = [unit for unit in units.values() if self.leaving.isdisjoint(unit)]
        wanted = max(0, self.size - len(staying) - sum(len(start.groups) for start in self.starting.values()))
        for group in self.pending[wanted:]:
            remove_placement_group(group)
        self.pending = self.pending[:wanted]
        nodes = Counter(unit[0][0] for unit in staying)
        near = max(nodes, key=lambda node: (nodes[node], node), default=None)
        self.pending += reserve(wanted - len(self.pending), self.resources, self.plan, near)
        has_started = any(started.done() for started in self.starting)
        if self.leaving or has_started or self.late() or any(group.wait(0) for group in self.pending):
            return _InPlace(self.size, self.resources)
        return NoopDecision()

    def late(self) -> "list[Future[list[Worker]]]":
        """Starts that hang."""
        now_s = time.monotonic()
        return [started for started, start in self.starting.items() if not started.done() and now_s > start.until_s]

    def _retire(self, workers: Sequence[Worker], status: Any) -> None:
        """Those told to leave that are still here, and those that have ended."""
        ended = {_key(worker) for at, worker in enumerate(workers) if not status.worker_statuses[at].running}
        self.leaving = (self.leaving & {_key(worker) for worker in workers}) | ended


def _key(worker: Worker) -> tuple[str, int]:
    return worker.metadata.node_id, worker.metadata.pid


class GroupController(TrainController):
    """Ray Train's controller of one trainer group."""

    worker_group_cls = _Workers

    def __init__(self, **options: Any):
        # Owned by this actor from now on: the scheduler's copy dies with it.
        options["train_fn_ref"] = ObjectRefWrapper(options["train_fn_ref"].get())
        self._is_run = False
        super().__init__(**options)

    async def ensure_run(self) -> None:
        """Run, unless it does: who started it may have died before saying so."""
        if not self._is_run:
            self._is_run = True
            await self.run()

    def describe(self) -> dict[str, Any]:
        """What a scheduler that has lost its memory must know."""
        ended = self.get_state().is_terminal()
        return {**self._train_run_context.train_loop_config, "size": self._scaling_policy.size, "ended": ended}

    def resize(self, size: int, leaving: list[tuple[str, int]]) -> None:
        """So many units; those of these nodes and process ids go, and are not replaced beyond that."""
        self._scaling_policy.size = size
        self._scaling_policy.leaving |= {(node, pid) for node, pid in leaving}

    def _execute_resize_decision(self, decision: ResizeDecision) -> TrainControllerLoopIterationResult:
        policy, workers = self._scaling_policy, self._worker_group
        if isinstance(decision, _InPlace) and workers:
            ready = [group for group in policy.pending if group.wait(0)]
            policy.pending = [group for group in policy.pending if group not in ready]
            if ready:
                policy.starting[workers.start_in(ready)] = _Start(ready, time.monotonic() + _start_timeout_s())
            for started in [started for started in policy.starting if started.done()]:
                workers.join(started, policy.starting.pop(started).groups)
            if late := policy.late():
                for started in late:
                    workers.give_up(policy.starting.pop(started).groups)
                return self._go_on()  # all others may have ended: the next look says so
            seats = {_seat(worker) for worker in workers.get_workers() if _key(worker) in policy.leaving}
            gone = [worker for worker in workers.get_workers() if _seat(worker) in seats]
            if len(gone) == len(workers.get_workers()) and policy.starting:
                return self._go_on()  # Ray Train wants one at least
            policy.leaving = set()
            if gone:
                workers.let_go(gone)
            return self._go_on()
        if workers and (policy.in_place or policy.plan.ranks > 1):
            failed = workers.failed()
            if failed and len(failed) < len(workers.get_workers()):  # the others go on, and new ones join them
                workers.let_go(failed)
                return self._go_on()
        policy.starting.clear()  # they go with the others' placement groups
        return super()._execute_resize_decision(decision)

    def _is_training_succeeded(self, worker_group_status: Any) -> bool:
        """Not while others start, in whose favour all may have been told to end."""
        return not self._scaling_policy.starting and super()._is_training_succeeded(worker_group_status)

    def _go_on(self) -> TrainControllerLoopIterationResult:
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=self._state, next_state=RunningState()
        )


class GroupTrainer(DataParallelTrainer):
    """Ray Train's run of one trainer group; `fit` only starts it."""

    def __init__(self, function: Any, options: dict[str, Any], *, group: str, size: int, resources: dict[str, float],
                 storage: str, environment: dict[str, str], in_place: bool):  # fmt: skip
        self.group, self.size, self.in_place, self.plan = group, size, in_place, Plan(**options["plan"])
        workers = (1 if in_place else size) * self.plan.ranks
        super().__init__(
            function,
            train_loop_config=options,
            backend_config=_AloneConfig(),
            scaling_config=ScalingConfig(
                num_workers=workers, use_gpu=bool(resources.get("GPU")), resources_per_worker=resources
            ),
            run_config=RunConfig(
                name=group,
                storage_path=storage,
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
                worker_runtime_env={"env_vars": environment},
            ),
        )

    def _initialize_and_run_controller(self, **options: Any) -> Result:
        options["scaling_policy"] = _Told(self.scaling_config, self.size, self.in_place, self.plan)
        controller = (
            ray.remote(GroupController)
            .options(
                num_cpus=0,
                name=GROUP + self.group,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                resources={"node:__internal_head__": 0.001},
                scheduling_strategy="DEFAULT",
                runtime_env={"env_vars": {**get_env_vars_to_propagate(), **_ENVIRONMENT}},
            )
            .remote(**options)
        )
        ray.get(controller.describe.remote())
        controller.ensure_run.remote()
        return Result(metrics=None, checkpoint=None, error=None, path="")


def start(function: Any, options: dict[str, Any], **settings: Any) -> None:
    """Start a group's run, and leave it to itself."""
    GroupTrainer(function, copy.deepcopy(options), **settings).fit()

"""All that tLoRA takes from Ray Train's insides: a run whose workers are replaced, added and let go one by one.

Workers of a replicated base share no collective, so each is a replica group of one. `_Workers` adds and lets go of
single workers, each in a placement group of its own, while the others go on: so a group changes its size, and so one
that fails is replaced. The controller is a named, detached actor, so that the scheduler's death stops nothing. With
`resize: restart` a new size is a new start, by Ray Train's own code.
"""

import copy
import dataclasses
import logging
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.train import BackendConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.v2._internal.constants import get_env_vars_to_propagate
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

from tlora.actors.names import GROUP, NAMESPACE

if not ray.__version__.startswith("2.60."):
    raise ImportError(
        f"tLoRA's trainer groups are made for Ray 2.60: got {ray.__version__}. Install ray[default,train]==2.60.*."
    )

log = logging.getLogger("tlora")
_ENVIRONMENT = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
    "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0",
    "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES": "0",
}


class _Alone(Backend):
    """No process group: a worker that fails is replaced by itself."""

    has_replica_groups = True


class _AloneConfig(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _Alone


class _Seats(PlacementGroupHandle):
    """One placement group a worker, so that each is let go of by itself."""

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
    """Of one group; a worker's bundle index is its place in `_Seats.groups`."""

    def _create_placement_group(self, scaling_config: ScalingConfig, worker_group_context: Any) -> _Seats:
        return _Seats(reserve(worker_group_context.num_workers, worker_group_context.resources_per_worker))

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
        """Side by side, each in its own placement group."""
        seats = placement_group_bundle_indices or list(range(num_workers))

        def create(number: int, seat: int) -> Worker:
            (worker,) = super(_Workers, self)._create_workers(
                1,
                placement_group.groups[seat],
                resources_per_worker,
                [0],
                starting_world_rank + number,
                world_size or num_workers,
                1,
            )
            worker.placement_group_bundle_index = seat
            return worker

        with ThreadPoolExecutor(max(1, num_workers)) as pool:
            return list(pool.map(create, range(num_workers), seats))

    def add(self, groups: list[PlacementGroup]) -> None:
        """Start a worker in each of these placement groups, which are ready; the others go on meanwhile."""
        state, context = self._worker_group_state, self._worker_group_context
        seats = state.placement_group_handle.groups
        first_rank = 1 + max((worker.distributed_context.world_rank for worker in state.workers), default=-1)
        indices = list(range(len(seats), len(seats) + len(groups)))
        seats += groups
        try:
            workers = self._create_workers(
                len(groups), state.placement_group_handle, context.resources_per_worker, indices, first_rank
            )
            self._init_train_context(workers, state.sync_actor)
            ray.get([worker.actor.run_train_fn.remote(context.train_fn_ref) for worker in workers])
        except Exception as error:  # of the new ones alone: they go, and others are asked for
            log.warning("group=%s new workers did not start: %s", self._train_run_context.run_config.name, error)
            for group in groups:
                remove_placement_group(group)
        else:
            self._replace([*state.workers, *workers])

    def failed(self) -> list[Worker]:
        """Workers of which the last poll found an error."""
        status = self.get_latest_poll_status()
        wrong = {index for index, each in status.worker_statuses.items() if each.error} if status else set()
        return [worker for index, worker in enumerate(self.get_workers()) if index in wrong]

    def let_go(self, leaving: list[Worker]) -> None:
        """End these workers, and free what they held."""
        state = self._worker_group_state
        _shutdown_workers(leaving)
        for worker in leaving:
            remove_placement_group(state.placement_group_handle.groups[worker.placement_group_bundle_index])
        self._replace([worker for worker in state.workers if worker not in leaving])

    def _replace(self, workers: list[Worker]) -> None:
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=workers)
        self._world_rank_to_ongoing_poll.clear()
        resources = self._worker_group_context.resources_per_worker
        self._replica_groups = [ReplicaGroup([worker], resources, self._replica_group_callbacks) for worker in workers]
        self._worker_rank_to_replica_group_rank = {index: index for index in range(len(workers))}


def reserve(count: int, resources: dict[str, float], near: str | None = None) -> list[PlacementGroup]:
    """A placement group for each of so many workers; on node `near`, if it has room: there the base is in the cache of
    files, and GPUs reach one another best. One that is not ready is demand that an autoscaler sees."""
    return [placement_group([resources], strategy="STRICT_PACK", _soft_target_node_id=near) for _ in range(count)]


@dataclasses.dataclass
class _InPlace(ResizeDecision):
    """A change of size that leaves the other workers alone."""


class _Told(ScalingPolicy):
    """As many workers as the scheduler says."""

    def __init__(self, scaling_config: ScalingConfig, size: int, in_place: bool):
        super().__init__(scaling_config)
        self.size, self.in_place = size, in_place
        self.pending: list[PlacementGroup] = []
        """Of workers that are to come."""
        self.leaving: set[tuple[str, int]] = set()

    @property
    def resources(self) -> dict[str, float]:
        return dict(self.scaling_config._resources_per_worker_not_none)

    def _get_num_workers_for_resource_request(self) -> int:
        return int(self.size)

    def make_decision_for_non_running_worker_group(self) -> ResizeDecision:
        """A start: of one worker, which the others join as there is room for them."""
        self._maybe_send_resource_request()
        for group in self.pending:
            remove_placement_group(group)
        self.pending, self.leaving = [], set()
        return ResizeDecision(1 if self.in_place else self.size, self.resources)

    def make_decision_for_running_worker_group(self, worker_group_state: Any, worker_group_status: Any) -> Any:
        self._maybe_send_resource_request()
        if not self.in_place:
            same = worker_group_state.num_workers == self.size
            return NoopDecision() if same else ResizeDecision(self.size, self.resources)
        here = {
            (worker.metadata.node_id, worker.metadata.pid): worker_group_status.worker_statuses[index].running
            for index, worker in enumerate(worker_group_state.workers)
        }
        self.leaving = (self.leaving & here.keys()) | {key for key, is_running in here.items() if not is_running}
        wanted = max(0, self.size - len(here) + len(self.leaving))
        for group in self.pending[wanted:]:
            remove_placement_group(group)
        self.pending = self.pending[:wanted]
        nodes = Counter(node for node, pid in here if (node, pid) not in self.leaving)
        near = max(nodes, key=lambda node: (nodes[node], node), default=None)
        self.pending += reserve(wanted - len(self.pending), self.resources, near)
        if self.leaving or any(group.wait(0) for group in self.pending):
            return _InPlace(self.size, self.resources)
        return NoopDecision()


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
        """So many workers; those of these nodes and process ids go, and are not replaced beyond that."""
        self._scaling_policy.size = size
        self._scaling_policy.leaving |= {(node, pid) for node, pid in leaving}

    def _execute_resize_decision(self, decision: ResizeDecision) -> TrainControllerLoopIterationResult:
        policy, workers = self._scaling_policy, self._worker_group
        if isinstance(decision, _InPlace) and workers:
            ready = [group for group in policy.pending if group.wait(0)]
            policy.pending = [group for group in policy.pending if group not in ready]
            leaving, policy.leaving = policy.leaving, set()
            gone = [each for each in workers.get_workers() if (each.metadata.node_id, each.metadata.pid) in leaving]
            if gone:
                workers.let_go(gone)
            if ready:
                workers.add(ready)
            return self._go_on()
        if workers and policy.in_place:
            failed = workers.failed()
            if failed and len(failed) < len(workers.get_workers()):  # the others go on, and new ones join them
                workers.let_go(failed)
                return self._go_on()
        return super()._execute_resize_decision(decision)

    def _go_on(self) -> TrainControllerLoopIterationResult:
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=self._state, next_state=RunningState()
        )


class GroupTrainer(DataParallelTrainer):
    """Ray Train's run of one trainer group; `fit` only starts it."""

    def __init__(self, function: Any, options: dict[str, Any], *, group: str, size: int, resources: dict[str, float],
                 storage: str, environment: dict[str, str], in_place: bool):  # fmt: skip
        super().__init__(
            function,
            train_loop_config=options,
            backend_config=_AloneConfig(),
            scaling_config=ScalingConfig(
                num_workers=1 if in_place else size, use_gpu=bool(resources.get("GPU")), resources_per_worker=resources
            ),
            run_config=RunConfig(
                name=group,
                storage_path=storage,
                failure_config=FailureConfig(max_failures=-1, controller_failure_limit=-1),
                worker_runtime_env={"env_vars": environment},
            ),
        )
        self.group, self.size, self.in_place = group, size, in_place

    def _initialize_and_run_controller(self, **options: Any) -> Result:
        options["scaling_policy"] = _Told(self.scaling_config, self.size, self.in_place)
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

"""What a group's policy decides, one look at a time: who is to come, who goes, when nothing is to be done."""

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision

from tlora.actors import group, ray_train
from tlora.actors.messages import WorkerOptions
from tlora.actors.ray_train import GroupController, _InPlace, _Seats, _Told, _Workers
from tlora.cluster import ClusterSpec
from tlora.plan import Plan

ALONE = Plan()


class FakeGroup:
    """A placement group that is ready when the test says so."""

    def __init__(self, near: str | None = None):
        self.is_ready, self.near = False, near

    def wait(self, timeout_s: float) -> bool:
        return self.is_ready


class Desk:
    """A policy, and the placement groups that it has asked for and given back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, size: int, in_place: bool = True, plan: Plan = ALONE):
        self.removed: list[FakeGroup] = []
        monkeypatch.setattr(
            ray_train, "reserve", lambda count, resources, plan, near: [FakeGroup(near) for _ in range(count)]
        )
        monkeypatch.setattr(ray_train, "remove_placement_group", self.removed.append)
        monkeypatch.setattr(_Told, "_maybe_send_resource_request", lambda policy: None)
        self.policy = _Told(ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1}), size, in_place, plan)

    def look(self, *pids: int, dead: tuple[int, ...] = (), nodes: str = "nnnn") -> Any:
        metadata = [SimpleNamespace(node_id=node, pid=pid) for node, pid in zip(nodes, pids, strict=False)]
        workers = [
            SimpleNamespace(metadata=each, placement_group_bundle_index=at // self.policy.plan.ranks)
            for at, each in enumerate(metadata)
        ]
        statuses = {at: SimpleNamespace(running=pid not in dead) for at, pid in enumerate(pids)}
        return self.policy.make_decision_for_running_worker_group(
            SimpleNamespace(workers=workers, num_workers=len(workers)), SimpleNamespace(worker_statuses=statuses)
        )


def test_as_many_as_wanted_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=2)
    assert isinstance(desk.look(1, 2), NoopDecision)
    assert not desk.policy.pending


def test_a_larger_group_asks_for_room_once_and_grows_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=3)
    for _ in range(3):
        assert isinstance(desk.look(1), NoopDecision)
    assert len(desk.policy.pending) == 2
    desk.policy.pending[0].is_ready = True
    assert isinstance(desk.look(1), _InPlace)
    desk.policy.size = 1
    desk.look(1)
    assert len(desk.removed) == 2, "room that is not wanted any more is given back"
    assert not desk.policy.pending


def test_new_workers_are_wanted_where_most_of_the_group_is(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=4)
    desk.look(1, 2, 3, nodes="aba")
    assert [group.near for group in desk.policy.pending] == ["a"]
    desk.policy.leaving = {("a", 1), ("a", 3)}
    desk.look(1, 2, 3, nodes="aba")
    assert [group.near for group in desk.policy.pending] == ["a", "b", "b"]


@dataclass(frozen=True)
class State:
    """Of Ray Train's worker group, as much as is looked at."""

    workers: list[Any]
    placement_group_handle: Any
    sync_actor: Any = None


class HeldWorkers(_Workers):
    """A group of one worker, in which others start when the test says so."""

    def __init__(self) -> None:
        self.go_on, self.ended = threading.Event(), list[int]()
        self._worker_group_state = State([self.worker(0, 0)], _Seats([]))
        self._worker_group_state.placement_group_handle.groups.append(FakeGroup())
        self._worker_group_context = SimpleNamespace(resources_per_worker={}, train_fn_ref=None)
        self._train_run_context = SimpleNamespace(
            train_loop_config={"plan": asdict(ALONE)}, run_config=SimpleNamespace(name="g")
        )

    def worker(self, rank: int, seat: int) -> Any:
        return SimpleNamespace(
            metadata=SimpleNamespace(node_id="n", pid=rank),
            placement_group_bundle_index=seat,
            distributed_context=SimpleNamespace(world_rank=rank),
            actor=SimpleNamespace(run_train_fn=SimpleNamespace(remote=lambda function: None)),
        )

    def _create_workers(self, count: int, *given: Any) -> Any:  # type: ignore[override]
        _, _, indices, rank = given
        assert self.go_on.wait(20)
        return [self.worker(rank + at, index) for at, index in enumerate(indices)]

    def get_workers(self) -> Any:
        return self._worker_group_state.workers

    def _init_train_context(self, workers: Any, sync_actor: Any) -> None: ...

    def _replace(self, workers: Any) -> None:
        self._worker_group_state = replace(self._worker_group_state, workers=workers)

    def let_go(self, leaving: Any) -> None:
        self.ended += [worker.metadata.pid for worker in leaving]
        self._replace([worker for worker in self.get_workers() if worker not in leaving])


class HeldController(GroupController):
    """Of such a group, one look at a time."""

    def __init__(self, desk: Desk, workers: HeldWorkers):
        self._scaling_policy, self._worker_group = desk.policy, workers

    def look(self, dead: tuple[int, ...] = ()) -> None:
        pids = [worker.metadata.pid for worker in self._worker_group.get_workers()]
        statuses = {at: SimpleNamespace(running=pid not in dead) for at, pid in enumerate(pids)}
        decision = self._scaling_policy.make_decision_for_running_worker_group(
            self._worker_group._worker_group_state, SimpleNamespace(worker_statuses=statuses)
        )
        if isinstance(decision, _InPlace):
            self._execute_resize_decision(decision)

    def _go_on(self) -> Any: ...


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldController]:
    """A group of one worker that is to have two more, whose processes take long to start."""
    monkeypatch.setattr(ray_train.ray, "get", lambda refs: refs)
    controller = HeldController(Desk(monkeypatch, size=3), HeldWorkers())
    controller.look()
    for asked in controller._scaling_policy.pending:
        asked.is_ready = True
    controller.look()
    assert len(controller._worker_group.get_workers()) == 1
    yield controller
    controller._worker_group.go_on.set()


def test_while_workers_start_the_others_are_looked_at(held: HeldController) -> None:
    """A death is seen, a size is heard, and no room is asked for twice; those that started join at a later look."""
    workers, policy = held._worker_group, held._scaling_policy
    assert not policy.pending
    held.resize(5, [])
    held.look()
    assert len(policy.pending) == 2
    held.resize(3, [])
    workers.go_on.set()
    toy.until(lambda: held.look() or len(workers.get_workers()) == 3)
    assert [worker.distributed_context.world_rank for worker in workers.get_workers()] == [0, 1, 2]
    assert not policy.pending
    workers.go_on.clear()
    held.resize(4, [])
    held.look()
    policy.pending[0].is_ready = True
    held.look()
    held.look(dead=(1,))
    assert workers.ended == [1]
    assert len(policy.pending) == 1
    workers.go_on.set()
    toy.until(lambda: held.look() or len(workers.get_workers()) == 3)
    assert [worker.distributed_context.world_rank for worker in workers.get_workers()] == [0, 2, 3]


def test_the_last_one_is_let_go_of_once_another_has_started(held: HeldController) -> None:
    """Else the group would have ended, and begun anew."""
    workers = held._worker_group
    ended = SimpleNamespace(finished=True, errors={})
    held.resize(2, [("n", 0)])
    held.look(dead=(0,))
    assert not workers.ended
    assert not held._is_training_succeeded(ended)
    workers.go_on.set()
    toy.until(lambda: held.look(dead=(0,)) or workers.ended == [0])
    assert len(workers.get_workers()) == 2
    assert held._is_training_succeeded(ended)


def test_workers_that_do_not_start_are_asked_for_again(held: HeldController, monkeypatch: pytest.MonkeyPatch) -> None:
    workers, policy = held._worker_group, held._scaling_policy
    removed: list[FakeGroup] = []
    monkeypatch.setattr(ray_train, "remove_placement_group", removed.append)

    def fail(*given: Any) -> None:
        raise RuntimeError("no process")

    monkeypatch.setattr(workers, "_init_train_context", fail)
    workers.go_on.set()
    toy.until(lambda: held.look() or removed)
    assert len(removed) == 2
    held.look()
    assert len(policy.pending) == 2


@pytest.mark.parametrize("dead", [(), (0,)])
def test_a_start_that_hangs_is_given_up_in_time(
    held: HeldController, monkeypatch: pytest.MonkeyPatch, dead: tuple[int, ...]
) -> None:
    """The group asks for others, or ends if all have."""
    workers, policy, ended = held._worker_group, held._scaling_policy, SimpleNamespace(finished=True, errors={})
    removed: list[FakeGroup] = []
    monkeypatch.setattr(ray_train, "remove_placement_group", removed.append)
    held.look(dead)
    assert not removed
    late_s = time.monotonic() + ray_train._start_timeout_s()
    monkeypatch.setattr(ray_train, "time", SimpleNamespace(monotonic=lambda: late_s))
    held.look(dead)
    assert len(removed) == 2
    assert not workers.ended
    assert held._is_training_succeeded(ended)
    if not dead:
        workers.go_on.set()
        held.look()
        assert len(policy.pending) == 2
        assert len(workers.get_workers()) == 1, "those that come too late are nobody's"


def test_those_told_to_leave_go_and_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=2)
    desk.policy.size = 1
    desk.policy.leaving.add(("n", 2))
    assert isinstance(desk.look(1, 2), _InPlace)
    assert desk.policy.leaving == {("n", 2)}
    assert not desk.policy.pending


def test_a_worker_that_has_ended_goes_and_room_for_another_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=2)
    assert isinstance(desk.look(1, 2, dead=(2,)), _InPlace)
    assert desk.policy.leaving == {("n", 2)}
    assert len(desk.policy.pending) == 1


def test_one_told_to_leave_that_is_gone_already_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=1)
    desk.policy.leaving.add(("n", 9))
    assert isinstance(desk.look(1), NoopDecision)
    assert not desk.policy.leaving


def test_a_start_is_of_one_worker_and_gives_back_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=3)
    desk.look(1)
    decision = desk.policy.make_decision_for_non_running_worker_group()
    assert decision.num_workers == 1
    assert len(desk.removed) == 2


def test_a_unit_comes_and_goes_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch, size=2, plan=Plan(shards=2))
    assert desk.policy.make_decision_for_non_running_worker_group().num_workers == 2
    desk.look(1, 2)
    assert len(desk.policy.pending) == 1
    desk.policy.pending.clear()
    desk.look(1, 2, 3, 4, dead=(4,))
    assert desk.policy.leaving == {("n", 4)}
    assert len(desk.policy.pending) == 1
    desk.policy.size = 1
    assert isinstance(desk.look(1, 2, 3, 4, dead=(4,)), _InPlace)
    assert not desk.policy.pending


def test_ray_train_needs_no_storage_but_the_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that groups start while a bucket is away."""
    told: dict[str, Any] = {}
    monkeypatch.setattr(ray_train, "start", lambda train, options, **given: told.update(given))
    spec = ClusterSpec(storage="s3://bucket?region=x", outputs=str(tmp_path), state=str(tmp_path / "state"))
    group.start(spec, WorkerOptions(group="g", base={}), 1)
    assert told["storage"] == str(tmp_path / "_tlora" / "ray_train")


@pytest.mark.parametrize("size", [1, 3])
def test_with_restarts_a_size_is_changed_by_ray_train_itself(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    desk = Desk(monkeypatch, size=size, in_place=False)
    assert desk.policy.make_decision_for_non_running_worker_group().num_workers == size
    decision = desk.look(1)
    assert isinstance(decision, NoopDecision) is (size == 1)
    if size == 3:
        assert type(decision) is ResizeDecision
        assert decision.num_workers == 3


def test_an_autoscaler_is_asked_for_whole_lanes() -> None:
    """Four nodes of one GPU each would hold none of four ranks."""
    config, asked = ScalingConfig(num_workers=8, resources_per_worker={"CPU": 1.5}), list[Any]()
    policy = _Told(config, 3, True, Plan(shards=2, tensor=4))
    policy._coordinator_client = SimpleNamespace(
        maybe_send_resource_request=lambda config, count: asked.append((config.resources_per_worker, count))
    )
    policy._maybe_send_resource_request()
    assert asked == [({"CPU": 6.0}, 6)]
    assert policy.resources == {"CPU": 1.5}

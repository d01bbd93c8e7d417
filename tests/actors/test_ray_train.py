"""What a group's policy decides, one look at a time: who is to come, who goes, when nothing is to be done."""

from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow.fs import FileSystem
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision

from tlora.actors import group, ray_train
from tlora.actors.ray_train import _InPlace, _Told
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


@pytest.mark.parametrize(
    ("storage", "folder"),
    [
        ("/mnt/all", "/mnt/all/_tlora/x"),
        ("/mnt/what?/a#b", "/mnt/what?/a#b/_tlora/x"),
        ("s3://bucket?region=x", "bucket/_tlora/x"),
        ("s3://bucket/some/where/?region=eu-west-1&scheme=http", "bucket/some/where/_tlora/x"),
        ("gs://anonymous@bucket/where?retry_limit_seconds=10", "bucket/where/_tlora/x"),
    ],
)
def test_ray_train_writes_below_the_storage_whatever_its_address_asks_for(storage: str, folder: str) -> None:
    found = group.below(storage, "_tlora/x")
    if "://" in storage:
        assert found.partition("?")[2] == storage.partition("?")[2]
        found = FileSystem.from_uri(found)[1]
    assert found == folder


@pytest.mark.parametrize("size", [1, 3])
def test_with_restarts_a_size_is_changed_by_ray_train_itself(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    desk = Desk(monkeypatch, size=size, in_place=False)
    assert desk.policy.make_decision_for_non_running_worker_group().num_workers == size
    decision = desk.look(1)
    assert isinstance(decision, NoopDecision) is (size == 1)
    if size == 3:
        assert type(decision) is ResizeDecision
        assert decision.num_workers == 3

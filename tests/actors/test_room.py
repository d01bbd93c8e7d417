"""26: what has no room on a worker waits or goes on in smaller ticks; a job too large alone is the one that fails."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import toy
from worker_desk import Desk, adapter, alone, same

from tlora.actors import process, room
from tlora.actors.messages import Report, WorkerOptions
from tlora.base import Outline
from tlora.job import State
from tlora.memory import estimate
from tlora.plan import Plan
from tlora.planner import SPARE
from tlora.spec import BaseSpec, JobSpec
from tlora.trainer import Trainer


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def neighbour(folder: Path, name: str, **changes: object) -> JobSpec:
    """One that stays until it is ordered away."""
    return toy.named_job(folder, name, **{"steps": 100_000, "save_every": 100_000, **changes})


def waits(name: str, why: str = "waits for room") -> Callable[[Report], bool]:
    """Seen once a job says so."""
    return lambda report: name in report.jobs and why in report.jobs[name].reason


def longer_data(folder: Path) -> dict[str, Any]:
    """Of sequences that take several times as many rows."""
    row = json.dumps({"prompt": "say much", "completion": "much " * 20}) + "\n"
    (folder / "longer.jsonl").write_text(row * 12)
    return {"path": str(folder / "longer.jsonl"), "eval_fraction": 0.2}


def no_room_in(monkeypatch: pytest.MonkeyPatch, trainer: Trainer) -> list[int]:
    """No adapter has a place from now on; the number of neighbours at each try."""
    tries = list[int]()

    def fail(state: object) -> int:
        tries.append(len(trainer.jobs))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(trainer.supermodel, "place", fail)
    return tries


def test_out_of_memory_halves_the_ticks_and_changes_no_bit(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy.named_job(desk.folder, "a", steps=4)
    send, calls = Trainer._send, []

    def fail_once(trainer: Trainer, *arguments: Any) -> None:
        calls.append(trainer.token_budget)
        send(trainer, *arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Trainer, "_send", fail_once)
    desk.order(spec)
    assert desk.ends("a").state is State.FINISHED
    assert calls[2] == calls[1] // 2
    monkeypatch.undo()
    assert same(adapter(spec), alone(spec))


def test_a_job_too_large_alone_fails_with_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, token_budget=64)
    spec = toy.named_job(tmp_path, "a")

    def fail(trainer: Trainer, *arguments: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Trainer, "_send", fail)
    desk.order(spec)
    ended = desk.ends("a")
    assert ended.state is State.FAILED
    assert "out of memory in a tick of 32 rows, the length of its longest sequence" in ended.reason


@pytest.mark.parametrize("where", ["_new_state", "place"])
def test_without_memory_to_attach_it_is_tried_again_once(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """26: be it in the reader's thread or as it is placed; its folder is let go of meanwhile."""
    stays, comes = neighbour(desk.folder, "stays"), toy.named_job(desk.folder, "comes", steps=2)
    desk.order(stays)
    desk.until(lambda report: report.jobs["stays"].step > 1)
    trainer = desk.worker._trainer
    assert trainer is not None
    before, fails, prepare = trainer.token_budget, [where], trainer.prepare
    held: list[object] = []  # so that no folder is let go of by chance
    monkeypatch.setattr(trainer, "prepare", lambda *given, **how: held.append(prepare(*given, **how)) or held[-1])

    def out_of_memory(where: object, name: str) -> None:
        call = getattr(where, name)

        def unless_first(*arguments: Any) -> Any:
            if name in fails:
                fails.remove(name)
                raise torch.OutOfMemoryError("no memory")
            return call(*arguments)

        monkeypatch.setattr(where, name, unless_first)

    out_of_memory(trainer, "_new_state")
    out_of_memory(trainer.supermodel, "place")
    desk.order(stays, comes)
    assert desk.ends("comes").state is State.FINISHED
    assert (fails, trainer.token_budget) == ([], before)
    monkeypatch.undo()
    assert same(adapter(comes), alone(comes))


def test_a_longer_job_that_never_has_room_waits_and_shrinks_nobody(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """26: though its longest sequence would let ticks grow, and the residents' let them shrink, at every try."""
    stays, longer = neighbour(desk.folder, "stays"), toy.named_job(desk.folder, "longer", data=longer_data(desk.folder))
    desk.order(stays)
    desk.until(lambda report: report.jobs["stays"].step > 1)
    trainer = desk.worker._trainer
    assert trainer is not None
    trainer.token_budget = desk.worker._most_rows = 32
    tries = no_room_in(monkeypatch, trainer)
    desk.order(stays, longer)
    report = desk.until(waits("longer", "waits for room beside 1 other job: "))
    desk.until(lambda later: later.jobs["stays"].step > report.jobs["stays"].step + 20)
    assert (tries, trainer.token_budget) == ([1, 1], 32)
    desk.order(longer)
    assert "out of memory, though alone: no memory" in desk.ends("longer").reason
    assert tries == [1, 1, 0]


def test_ticks_halved_beside_others_refuse_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, token_budget=512)
    stays, longer = neighbour(tmp_path, "stays"), toy.named_job(tmp_path, "longer", data=longer_data(tmp_path))
    desk.order(stays)
    desk.until(lambda report: report.jobs["stays"].step > 1)
    trainer = desk.worker._trainer
    assert trainer is not None
    while desk.worker._halve(trainer):
        pass
    assert trainer.token_budget == 32
    desk.order(stays, longer)
    assert desk.ends("longer").state is State.FINISHED
    assert same(adapter(longer), alone(longer))


def test_a_job_that_had_neighbours_when_memory_ran_out_is_read_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26: though they have left by the time that its worker looks."""
    stays, comes = neighbour(desk.folder, "stays"), toy.named_job(desk.folder, "comes", steps=2)
    desk.order(stays)
    desk.until(lambda report: report.jobs["stays"].step > 1)
    new_state, fails = Trainer._new_state, [True]

    def fail_once(trainer: Trainer, spec: JobSpec) -> Any:
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("no memory")
        return new_state(trainer, spec)

    monkeypatch.setattr(Trainer, "_new_state", fail_once)
    desk.order(stays, comes)
    desk.worker._carry_out(desk.worker.mailbox.orders())
    coming = desk.worker._coming["comes"]
    coming.again_s = math.inf
    assert coming.job.exception(timeout=30.0) is not None
    desk.order(comes)
    desk.until(lambda report: "stays" not in report.jobs)
    coming.again_s = 0.0
    assert desk.ends("comes").state is State.FINISHED


def test_a_job_without_room_tries_again_beside_other_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26: as many of them may be smaller."""
    desk = Desk(tmp_path, token_budget=32)
    big, small = neighbour(tmp_path, "big"), neighbour(tmp_path, "small")
    comes, new_state = toy.named_job(tmp_path, "comes", steps=2), Trainer._new_state

    def crowded(trainer: Trainer, spec: JobSpec) -> Any:
        if spec.name == "comes" and "big" in trainer.jobs:
            raise torch.OutOfMemoryError("no memory")
        return new_state(trainer, spec)

    monkeypatch.setattr(Trainer, "_new_state", crowded)
    desk.order(big)
    desk.until(lambda report: report.jobs["big"].step > 0)
    desk.order(big, comes)
    desk.until(waits("comes"))
    desk.order(big, comes, small)
    desk.until(lambda report: "small" in report.jobs and report.jobs["small"].step > 0)
    desk.order(comes, small)
    assert desk.ends("comes").state is State.FINISHED


@pytest.mark.parametrize("is_too_large", [False, True])
def test_a_job_without_room_beside_others_waits_until_they_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_too_large: bool
) -> None:
    """26: ticks cannot be smaller; a job that is too large alone is the only one that fails, and then alone."""
    desk = Desk(tmp_path, token_budget=32)
    specs = [neighbour(tmp_path, "a"), neighbour(tmp_path, "b"), toy.named_job(tmp_path, "large", steps=2)]
    new_state, tries = Trainer._new_state, list[int]()

    def crowded(trainer: Trainer, spec: JobSpec) -> Any:
        if spec.name == "large":
            tries.append(len(trainer.jobs))
            if trainer.jobs or is_too_large:
                raise torch.OutOfMemoryError("no memory")
        return new_state(trainer, spec)

    monkeypatch.setattr(Trainer, "_new_state", crowded)
    desk.order(*specs[:2])
    desk.until(lambda report: len(report.jobs) == 2 and all(job.step for job in report.jobs.values()))
    desk.order(*specs)
    report = desk.until(waits("large"))
    assert report.jobs["large"].state is State.ATTACHING
    assert report.applied == desk.number, "who leaves meanwhile is seen to have left"
    desk.order(*specs[1:])
    desk.until(waits("large", "waits for room beside 1 other job: "))
    desk.order(specs[2])
    ended = desk.ends("large")
    assert ended.state is (State.FAILED if is_too_large else State.FINISHED)
    assert ("out of memory, though alone: no memory" in ended.reason) is is_too_large
    assert tries == [2, 2, 1, 1, 0]


def test_a_resident_without_room_for_its_own_tick_beside_others_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26: where ticks cannot be smaller it leaves, saved, and comes back once a neighbour is gone. Meanwhile
    it tells how far it has come."""
    desk = Desk(tmp_path, token_budget=32)
    leaves, stays = toy.named_job(tmp_path, "leaves", steps=20, save_every=100), neighbour(tmp_path, "stays")
    send, fails = Trainer._send, [True]

    def fail_once(trainer: Trainer, *arguments: Any) -> None:
        send(trainer, *arguments)
        if len(trainer.jobs) == 2 and min(job.step for job in trainer.jobs.values()) > 3 and fails:
            fails.clear()
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Trainer, "_send", fail_once)
    desk.order(leaves, stays)
    report = desk.until(waits("leaves"))
    told = report.jobs["leaves"]
    assert told.reason == "waits for room beside 1 other job: no memory"
    assert (told.state, told.step > 3, told.num_steps) == (State.ATTACHING, True, 20)
    desk.order(leaves)
    seen = list[int]()

    def goes_on(report: Report) -> bool:
        seen.append(report.jobs["leaves"].step)
        return report.jobs["leaves"].state is State.RUNNING

    desk.until(goes_on)
    assert min(seen) == told.step
    assert desk.ends("leaves").state is State.FINISHED
    assert same(adapter(leaves), alone(leaves))


def test_a_job_that_cannot_have_room_by_the_estimate_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """26, before anything is measured: the base with one adapter has room, with two it has not."""
    desk = Desk(tmp_path)
    first, second = neighbour(tmp_path, "first"), toy.named_job(tmp_path, "second", steps=2)
    outline = Outline.load(first.base)
    needs = estimate(outline, outline.lay_out(first.adapter), 32, torch.float32, checkpointing=False)
    most = needs.base_bytes + needs.tick_bytes + 3 * needs.adapter_bytes // 2
    monkeypatch.setattr("tlora.actors.room.memory_bytes", lambda device: int(most / SPARE))
    desk.order(first)
    desk.until(lambda report: report.jobs["first"].step > 0)
    desk.order(first, second)
    report = desk.until(lambda report: bool(report.jobs["second"].reason))
    assert "its adapter beside 1 other job takes about" in report.jobs["second"].reason
    assert report.jobs["second"].state is State.ATTACHING
    desk.order(second)
    assert desk.ends("second").state is State.FINISHED


def test_a_base_without_room_says_what_it_needs_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.actors.room.memory_bytes", lambda device: 1)
    monkeypatch.setattr("tlora.actors.room.fewest", lambda costs, machine, divisor: Plan(shards=machine.gpus))
    desk = Desk(tmp_path, most_workers=4)
    desk.order(toy.named_job(tmp_path, "a"))
    report = desk.until(lambda report: report.plan is not None)
    assert report.plan == Plan(shards=4)
    assert (report.jobs, report.base_loads) == ({}, 0)


def test_a_base_whose_weights_alone_have_room_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.actors.room.memory_bytes", lambda device: 200_000)  # they have about 140 kB
    desk = Desk(tmp_path, most_workers=1)
    desk.order(toy.named_job(tmp_path, "a", steps=1))
    assert desk.ends("a").state is State.FINISHED


def test_a_base_without_room_anywhere_fails_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlora.actors.room.memory_bytes", lambda device: 1000)
    desk = Desk(tmp_path, most_workers=4)
    desk.order(toy.named_job(tmp_path, "a"))
    assert "no plan for 4 workers" in desk.ends("a").reason


@pytest.mark.parametrize(("said", "there", "want"), [(0, 0, 0), (5, 0, 5), (0, 7, 7), (5, 7, 5), (9, 7, 7)])
def test_memory_is_as_said_and_no_more_than_there_is(
    said: int, there: int, want: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "memory_bytes", lambda device: there)
    options = WorkerOptions(group="g", base={"model": "m"}, memory_bytes=said, device="cpu")
    assert room.Room(options, BaseSpec(model="m"))._memory_bytes == want


def test_ten_tenths_of_a_gpu_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ray", ray := Mock())
    ray.get_runtime_context().get_assigned_resources.return_value = {"GPU": 0.1, "CPU": 0.3}
    ray.nodes.return_value = [{"Alive": True, "Resources": {"GPU": 1.0, "CPU": 3.0}}]
    assert process._per_node() == 10

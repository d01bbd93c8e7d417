"""26: what has no room on a worker waits or goes on in smaller ticks; a job too large alone is the one that fails."""

from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from worker_desk import Desk, adapter, alone, same

from tlora.base import Outline
from tlora.job import State
from tlora.memory import estimate
from tlora.plan import Plan
from tlora.planner import SPARE
from tlora.spec import JobSpec
from tlora.trainer import Trainer


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


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


def test_without_memory_to_attach_ticks_shrink_and_it_is_tried_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26: first in the reader's thread, then as it is placed; its folder is let go of meanwhile."""
    stays, comes = (toy.named_job(desk.folder, name, steps=steps) for name, steps in (("stays", 60), ("comes", 2)))
    desk.order(stays)
    desk.until(lambda report: report.jobs["stays"].step > 1)
    trainer = desk.worker._trainer
    assert trainer is not None
    before, fails, prepare = trainer.token_budget, ["_new_state", "place"], trainer.prepare
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
    assert (fails, trainer.token_budget) == ([], before // 4)
    assert desk.ends("stays").state is State.FINISHED
    monkeypatch.undo()
    assert same(adapter(stays), alone(stays))
    assert same(adapter(comes), alone(comes))


@pytest.mark.parametrize("is_too_large", [False, True])
def test_a_job_without_room_beside_others_waits_until_they_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_too_large: bool
) -> None:
    """26: ticks cannot be smaller; a job that is too large alone is the only one that fails, and then alone."""
    desk = Desk(tmp_path, token_budget=32)
    specs = [toy.named_job(tmp_path, name, steps=steps) for name, steps in (("a", 30), ("b", 40), ("large", 2))]
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
    report = desk.until(lambda report: "waits for room" in report.jobs["large"].reason)
    assert report.jobs["large"].state is State.ATTACHING
    assert report.applied == desk.number, "who leaves meanwhile is seen to have left"
    assert desk.ends("b").state is State.FINISHED
    assert desk.worker.mailbox.report().jobs["a"].state is State.FINISHED
    ended = desk.ends("large")
    assert ended.state is (State.FAILED if is_too_large else State.FINISHED)
    assert ("out of memory, though alone: no memory" in ended.reason) is is_too_large
    assert tries == [2, 1, 0]


def test_a_resident_without_room_for_its_own_tick_beside_others_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """26: where ticks cannot be smaller it leaves, saved, and comes back once it has fewer neighbours."""
    desk = Desk(tmp_path, token_budget=32)
    specs = [toy.named_job(tmp_path, name, steps=20, save_every=100) for name in ("a", "b")]
    send, fails = Trainer._send, [True]

    def fail_once(trainer: Trainer, *arguments: Any) -> None:
        send(trainer, *arguments)
        if len(trainer.jobs) == 2 and min(job.step for job in trainer.jobs.values()) > 3 and fails:
            fails.clear()
            raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Trainer, "_send", fail_once)
    desk.order(*specs)
    report = desk.until(lambda report: any("waits for room" in job.reason for job in report.jobs.values()))
    (waits,) = [name for name, job in report.jobs.items() if job.reason]
    (stays,) = {"a", "b"} - {waits}
    assert desk.ends(stays).state is State.FINISHED
    assert desk.ends(waits).state is State.FINISHED
    assert all(same(adapter(spec), alone(spec)) for spec in specs)


def test_a_job_that_cannot_have_room_by_the_estimate_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """26, before anything is measured: the base with one adapter has room, with two it has not."""
    desk = Desk(tmp_path)
    first, second = (toy.named_job(tmp_path, name, steps=30) for name in ("first", "second"))
    outline = Outline.load(first.base)
    needs = estimate(outline, outline.lay_out(first.adapter), 32, torch.float32, checkpointing=False)
    most = needs.base_bytes + needs.tick_bytes + 3 * needs.adapter_bytes // 2
    monkeypatch.setattr("tlora.actors.room.memory_bytes", lambda device: int(most / SPARE))
    desk.order(first)
    desk.until(lambda report: report.jobs["first"].step > 0)
    desk.order(first, second)
    report = desk.until(lambda report: bool(report.jobs["second"].reason))
    assert "its adapter beside 1 others takes about" in report.jobs["second"].reason
    assert report.jobs["second"].state is State.ATTACHING
    assert desk.ends("first").state is State.FINISHED
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

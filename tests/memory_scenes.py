"""What the ranks of a unit do in tests when one of them has no memory left: `unit_scenes`, with a planted error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from unit_scenes import Desk, halts_at_its_rung, play

from tlora.actors import unit
from tlora.actors.messages import JobReport
from tlora.actors.talk import Damage
from tlora.actors.unit import Member
from tlora.actors.worker import longest_of
from tlora.errors import GroupError
from tlora.group_trainer import GroupTrainer
from tlora.job import State
from tlora.parallel import Mesh
from tlora.plan import Plan

Seen = dict[str, JobReport]
Waits = Iterator[Callable[[], Any]]
ONCE = {"one": 12, "other": 12}
"""Steps of the jobs of `runs_short_once`."""


@contextmanager
def short_of_memory(where: str, is_short: Callable[..., bool]) -> Iterator[None]:
    """`where`: a trainer's method, at whose beginning, or (`… end`) at whose end, there is none when that says so."""
    name, _, at_end = where.partition(" ")
    call = getattr(GroupTrainer, name)

    def run(trainer: GroupTrainer, *arguments: Any) -> Any:
        result = call(trainer, *arguments) if at_end else None
        if is_short(trainer, *arguments):
            raise torch.OutOfMemoryError("no memory")
        return result if at_end else call(trainer, *arguments)

    with patch.object(GroupTrainer, name, run):
        yield


def runs_short_once(plan: Plan, folder: Path, where: str, rank: int, at: int = 9) -> tuple[Seen, list[int]]:
    """Two jobs; one rank has no memory in one of its ticks. Beside what became of them, this rank's token budgets."""
    calls, budgets = list[int](), list[int]()

    def is_short(trainer: GroupTrainer, *_: Any) -> bool:
        calls.append(1)
        budgets.append(trainer.token_budget)
        return trainer.mesh.rank == rank and len(calls) == at

    def scene(desk: Desk) -> Waits:
        desk.order(*(desk.job(name, steps=steps, save_every=5) for name, steps in ONCE.items()))
        yield lambda: all(map(desk.has_ended, ONCE))

    with short_of_memory(where, is_short):
        return play(plan, folder, scene), sorted(set(budgets))


def halts_short_of_memory(plan: Plan, folder: Path) -> Seen:
    """A candidate; its lead has no memory when it is first saved, at its rung."""
    calls = list[int]()

    def is_short(*_: Any) -> bool:
        calls.append(1)
        return len(calls) == 1

    with short_of_memory("_save_state", is_short):
        return play(plan, folder, halts_at_its_rung)


def loses_the_store(plan: Plan, folder: Path) -> bool:
    """The second rank is out of memory, and cannot tell; whether this one has nothing left to save with others."""
    members, damage = list[Member](), Member._damage

    def damaged(member: Member, error: str = "") -> Damage:
        if error:
            member._store = Mock(set=Mock(side_effect=RuntimeError("no store")))
        return damage(member, error)

    def step(member: Member) -> bool:
        members.append(member)
        return own_step(member)

    def is_short(trainer: GroupTrainer, *_: Any) -> bool:
        return trainer.mesh.rank == 1 and "one" in trainer.jobs

    def scene(desk: Desk) -> Waits:
        desk.order(desk.job("one", steps=100_000))
        yield lambda: False

    own_step = Member.step
    planted = patch.multiple(Member, _damage=damaged, step=step)
    with short_of_memory("_send_all", is_short), planted, suppress(RuntimeError):
        play(plan, folder, scene)
    saves_nothing = members[0]._trainer is None
    members[0].mesh.leave()  # else the other waits for as long as it may
    return saves_nothing


def has_no_room_beside_another(plan: Plan, folder: Path, is_too_large: bool) -> tuple[Seen, list[int]]:
    """A job for whose vectors the second rank has no memory while others are there, or ever; how many were there at
    each try."""
    tries = list[int]()

    def is_short(trainer: GroupTrainer, spec: Any) -> bool:
        if spec.name != "comes" or trainer.mesh.rank != 1:
            return False
        tries.append(len(trainer.jobs))
        return bool(trainer.jobs) or is_too_large

    def scene(desk: Desk) -> Waits:
        stays, comes = (desk.job(name, steps=steps) for name, steps in (("stays", 100_000), ("comes", 4)))
        desk.order(stays)
        yield lambda: desk.is_at("stays", 2)
        desk.order(stays, comes)
        yield lambda: "comes" in desk.seen and "waits for room beside 1 other job" in desk.seen["comes"].reason
        assert desk.seen["comes"].state is State.ATTACHING
        yield desk.is_done
        before = desk.seen["stays"].step
        yield lambda: desk.is_at("stays", before + 3)
        desk.order(comes)
        yield lambda: desk.has_ended("comes")

    with short_of_memory("_new_state", is_short):
        return play(plan, folder, scene), tries


def matches_nothing(plan: Plan, folder: Path) -> Seen:
    """A job whose targets are none of the base's modules, as one submitted unchecked may be; beside another."""

    def scene(desk: Desk) -> Waits:
        good, bad = desk.job("good", steps=8), desk.job("bad", adapter={"rank": 4, "targets": ["nowhere"]})
        desk.order(good, bad)
        yield lambda: desk.has_ended("good") and desk.has_ended("bad")

    return play(plan, folder, scene)


def waits_on_two_lanes(plan: Plan, folder: Path) -> list[int]:
    """A job of both lanes for which neither rank has room beside the one other job that lies there; how many were there
    at each try. First the one leaves, then the other."""
    tries = list[int]()
    lanes = {"x": (0,), "y": (1,), "both": (0, 1)}

    def is_short(trainer: GroupTrainer, spec: Any) -> bool:
        if spec.name == "both":
            tries.append(len(trainer.jobs))
        return spec.name == "both" and bool(trainer.jobs)

    def scene(desk: Desk) -> Waits:
        x, y = (desk.job(name, steps=100_000) for name in "xy")
        both = desk.job("both", steps=4)
        desk.order(x, y)
        yield lambda: desk.is_at("x", 2) and desk.is_at("y", 2)
        desk.order(x, y, both)
        for others in (("x", "y"), ("y",)):
            desk.order(*(job for job in (x, y) if job.name in others), both)
            yield lambda: "both" in desk.seen and "waits for room" in desk.seen["both"].reason
            yield desk.is_done
            step = desk.seen["y"].step + 20
            yield partial(desk.is_at, "y", step)
            assert desk.seen["both"].state is State.ATTACHING
        desk.order(both)
        yield lambda: desk.has_ended("both")

    def put(loads: dict[str, float], *_: Any, **__: Any) -> dict[str, tuple[int, ...]]:
        return {name: lanes[name] for name in loads}

    with short_of_memory("_new_state", is_short), patch.object(unit, "place", put):
        seen = play(plan, folder, scene)
        assert not seen or seen["both"].state is State.FINISHED
    return tries


def has_no_room_for_its_own_tick(plan: Plan, folder: Path) -> Seen:
    """Ticks hold one sequence at most, and yet one rank has no memory, beside another job: the one that sent it leaves,
    saved, and comes back once the other has left."""
    fails = [True]

    def is_short(trainer: GroupTrainer, *_: Any) -> bool:
        if not fails or len(trainer.jobs) < 2 or min(job.step for job in trainer.jobs.values()) < 4:
            return False
        trainer.token_budget = max(map(longest_of, trainer.jobs.values()))
        fails.clear()
        return trainer.mesh.rank == 1

    def scene(desk: Desk) -> Waits:
        leaves, stays = (desk.job(name, steps=steps, save_every=1000) for name, steps in (("a", 20), ("b", 100_000)))
        desk.order(leaves, stays)
        yield lambda: "a" in desk.seen and "waits for room beside 1 other job: no memory" in desk.seen["a"].reason
        told, before = desk.seen["a"], desk.seen["b"].step
        assert (told.state, told.step >= 4, told.num_steps) == (State.ATTACHING, True, 20)
        yield lambda: desk.is_at("b", before + 3)
        assert desk.seen["a"].state is State.ATTACHING
        desk.order(leaves)
        desk.seen.clear()
        yield lambda: "a" in desk.seen and desk.seen["a"].state is State.RUNNING
        assert desk.seen["a"].step >= told.step
        yield lambda: desk.has_ended("a")

    with short_of_memory("_send_all", is_short):
        return play(plan, folder, scene)


def is_too_large_alone(plan: Plan, folder: Path) -> tuple[Seen, int]:
    """The second rank never has memory for its only job, however small the ticks; the rows of its longest sequence."""
    rows = [0]

    def is_short(trainer: GroupTrainer, *_: Any) -> bool:
        if trainer.mesh.rank != 1 or "large" not in trainer.jobs:
            return False
        rows[0] = trainer.token_budget = longest_of(trainer.jobs["large"])
        return True

    def scene(desk: Desk) -> Waits:
        desk.order(desk.job("good", steps=8), desk.job("large"))
        yield lambda: desk.has_ended("good") and desk.has_ended("large")

    with short_of_memory("_send_all", is_short):
        return play(plan, folder, scene), rows[0]


def do_not_meet_again(plan: Plan, folder: Path) -> int:
    """The second rank is out of memory, and then gone; rows of a tick that the first one has told the scheduler."""
    meet, desks = Mesh.meet_again, list[Desk]()

    def meets_in_vain(mesh: Mesh) -> None:
        if mesh.rank == 1:
            raise GroupError("gone")
        mesh.timeout_s = 2.0
        meet(mesh)

    def scene(desk: Desk) -> Waits:
        desks.append(desk)
        desk.order(desk.job("one", steps=100_000))
        yield lambda: False

    def is_short(trainer: GroupTrainer, *_: Any) -> bool:
        return trainer.mesh.rank == 1 and "one" in trainer.jobs

    with short_of_memory("_send_all", is_short), patch.object(Mesh, "meet_again", meets_in_vain):
        try:
            play(plan, folder, scene)
        except GroupError:
            return desks[0].look().most_rows if desks else 0
    raise AssertionError("it went on")

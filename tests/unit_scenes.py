"""What the ranks of a unit do in tests: the first one is given orders by a scene, the others follow."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import toy

from tlora import local
from tlora.actors import unit
from tlora.actors.messages import JobReport, Order, Orders, Report, WorkerOptions
from tlora.actors.unit import Member
from tlora.checkpoint import STATE, JobFolder, read_meta
from tlora.data import JobData
from tlora.errors import DataError
from tlora.job import State
from tlora.parallel import Mesh
from tlora.plan import Plan
from tlora.spec import JobSpec

Scene = Callable[["Desk"], Iterator[Callable[[], Any]]]
"""Gives orders, and says what it waits for."""


PLANS = {"shards": Plan(shards=2), "parts": Plan(tensor=2), "replicas": Plan(replicas=2)}


def off(folder: Path, name: str, **changes: object) -> float:
    """How far a job's end is from that which it has alone."""
    base = {"model": str(folder / "base"), "dtype": "float64"}
    return toy.off_alone(toy.named_job(folder, name, base=base, **changes))


class Desk:
    """A scheduler's side of a unit, and what its jobs were last."""

    def __init__(self, member: Member, folder: Path):
        self.member, self.folder, self.number = member, folder, 0
        self.seen: dict[str, JobReport] = {}
        self.widths: dict[str, set[int]] = {}
        """On how many lanes each job was, at one time or another."""

    def job(self, name: str, **changes: object) -> JobSpec:
        base = {"model": str(self.folder / "base"), "dtype": "float64"}
        return toy.named_job(self.folder, name, base=base, **changes)

    def order(
        self, *specs: JobSpec, drop: frozenset[str] = frozenset(), stop: bool = False, halt: int = 0, attempt: int = 1
    ) -> None:
        """These are to be there, as candidates if they are to halt after so many samples."""
        self.number += 1
        halts = {"until": halt} if halt else {}
        jobs = {spec.name: Order(spec.model_dump(mode="json"), attempt, halts) for spec in specs}
        self.member.mailbox.put(Orders(self.number, jobs, drop, stop))

    def look(self) -> Report:
        report = self.member.mailbox.report()
        self.member.mailbox.put(Orders(0), report)
        self.seen.update(report.jobs)
        for name, job in report.jobs.items():
            self.widths.setdefault(name, set()).add(len(job.lanes))
        return report

    def is_at(self, name: str, step: int) -> bool:
        return name in self.seen and self.seen[name].step >= step

    def has_ended(self, name: str) -> bool:
        return name in self.seen and self.seen[name].state.is_terminal

    def is_done(self) -> bool:
        return self.look().applied == self.number


def play(plan: Plan, folder: Path, scene: Scene, save_every_s: float = 300.0) -> dict[str, JobReport]:
    """One rank's part, until the scene's end; on the first, what was last said of each job."""
    unit._TALK_S = unit.AGAIN_S = 0.02
    given = WorkerOptions(group="g", base=toy.named_job(folder, "a").base.model_dump(), plan=plan, device="cpu")
    given = replace(given, base={**given.base, "dtype": "float64"}, save_every_s=save_every_s)
    member = Member(given, 0, "node", Mesh(plan, timeout_s=60.0))
    desk = Desk(member, folder)
    waits = scene(desk) if member.mesh.rank == 0 else iter(())
    seen = next(waits, None)
    for _ in range(10_000):
        desk.look()
        if seen is not None and seen():
            seen = next(waits, None)
            if seen is None:
                desk.order(stop=True)
        if member.step():
            return desk.seen
    raise AssertionError(f"never seen: {desk.seen}")


COME_AND_GO = {"first": 60, "second": 30, "third": 14, "dropped": 200}
"""Steps of its jobs; the first and the one that is dropped are there long enough for others to come."""


def come_and_go(desk: Desk) -> Iterator[Callable[[], Any]]:
    """The first alone, then beside others; one is taken off, saved, and comes back; one is dropped."""
    jobs = [desk.job(name, steps=steps) for name, steps in COME_AND_GO.items()]
    first, second, third, dropped = jobs
    desk.order(first)
    yield lambda: desk.is_at("first", 2)
    assert desk.seen["first"].lanes == tuple(range(desk.member.mesh.plan.lanes))
    desk.order(first, second, dropped)
    yield lambda: desk.is_at("second", 2) and desk.is_at("dropped", 1) and 1 in desk.widths["first"]
    assert 2 not in desk.widths["second"] | desk.widths["dropped"]
    desk.order(first, third, drop=frozenset({"dropped"}))
    yield lambda: desk.is_done() and desk.is_at("third", 1)
    assert JobFolder(second.folder).has_state
    assert desk.look().jobs.keys() <= {"first", "third"}
    desk.order(first, second, third)
    yield lambda: all(desk.has_ended(name) for name in ("first", "second", "third"))
    desk.order()
    yield lambda: desk.is_done() and not desk.look().jobs


def halts_at_its_rung(desk: Desk) -> Iterator[Callable[[], Any]]:
    """A candidate, split over all lanes: to its rung, saved there, and then to its end."""
    spec = desk.job("candidate", steps=8, eval_every=2, save_every=100, batch_size=2)
    for attempt in (1, 2):
        desk.order(spec, halt=7, attempt=attempt)
        yield lambda: "candidate" in desk.seen and desk.seen["candidate"].state is State.PAUSED
        assert desk.seen["candidate"].step == read_meta(spec.folder)["step"] == 4
        assert desk.seen["candidate"].reason == "waits for its siblings at 8 samples"
        desk.order()
        yield lambda: desk.is_done() and not desk.look().jobs
        desk.seen.clear()
    desk.order(spec, attempt=3)
    yield lambda: desk.has_ended("candidate")


def one_fails_where_its_data_are_not(desk: Desk) -> Iterator[Callable[[], Any]]:
    good, bad = desk.job("good", steps=6), desk.job("bad", steps=6)
    desk.order(good, bad)
    yield lambda: desk.has_ended("good") and desk.has_ended("bad")


def without_data(plan: Plan, folder: Path, rank: int) -> dict[str, JobReport]:
    """`one_fails_…`, on ranks of which one cannot read the data of the job `bad`, and none those of `good` at first."""
    read, tries = local.read_data, list[int]()

    def refuse(spec: JobSpec, *arguments: Any) -> JobData:
        if spec.name == "bad" and unit.dist.get_rank() == rank:
            raise DataError("job bad: no such file here")
        if spec.name == "good" and not tries:
            tries.append(1)
            raise OSError(5, "Input/output error")
        return read(spec, *arguments)

    local.read_data = refuse
    try:
        return play(plan, folder, one_fails_where_its_data_are_not)
    finally:
        local.read_data = read


def base_is_broken(desk: Desk) -> Iterator[Callable[[], Any]]:
    """Only while the first job asks for it."""
    (weights,) = (desk.folder / "base").glob("*.safetensors")
    aside = weights.with_suffix(".aside")
    weights.rename(aside)
    desk.order(desk.job("early"))
    yield lambda: desk.has_ended("early")
    aside.rename(weights)
    desk.order(desk.job("late"))
    yield lambda: desk.has_ended("late")


def held_elsewhere_and_saved_by_the_clock(desk: Desk) -> Iterator[Callable[[], Any]]:
    spec = desk.job("held", steps=30, save_every=1000)
    folder = JobFolder(spec.folder)
    folder.open()
    desk.order(spec)
    yield lambda: "held" in desk.seen
    assert desk.seen["held"].state is State.ATTACHING
    folder.close()
    yield lambda: (spec.folder / STATE).exists()
    assert not desk.has_ended("held")
    yield lambda: desk.has_ended("held")

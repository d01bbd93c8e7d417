"""Candidates as jobs of a scheduler that is played here: what its rows mean to their sweep."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import ray
import toy

from tlora.actors import drive
from tlora.actors.drive import ClusterPlaces, Drive
from tlora.actors.register import Register
from tlora.errors import StateError
from tlora.job import State
from tlora.spec import JobSpec
from tlora.sweep import EarlyExit, Halt
from tlora.sweep_replay import begin
from tlora.sweep_run import News
from tlora.sweep_state import Status, SweepState


class Played:
    """Rows by name, and what was asked."""

    def __init__(self, folder: Path):
        self.workers: list[dict[str, Any]] = []
        self.folder, self.rows, self.asked = folder, dict[str, dict[str, Any]](), list[tuple[Any, ...]]()

    def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "status":
            if lost := [name for name in (arguments[0] if arguments else ()) if name not in self.rows]:
                raise StateError(f"job {lost[0]} is not known here.")
            return [self.rows[name] for name in (arguments[0] if arguments else self.rows)]
        self.asked.append((method, *arguments))
        if method == "train":
            self.put(arguments[0]["name"], "queued", halts=bool(arguments[1]))
        elif method == "workers":
            return self.workers
        elif method == "cancel":
            if any(self.rows[name]["state"] in ("finished", "failed") for name in arguments[0]):
                raise StateError("it has ended")
            self.put(arguments[0][0], "cancelled", halts=False)
        elif method == "pause":
            self.put(arguments[0][0], "paused", halts=True)
        return []

    def put(self, name: str, state: str, *, halts: bool, step: int = 3) -> None:
        output = self.folder / "candidates" / name
        output.mkdir(exist_ok=True, parents=True)
        (output / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
        self.rows[name] = {"name": name, "state": state, "halts": halts, "reason": "", "step": 0, "output": str(output)}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(drive, "_LOOK_S", 0.0)
    return Played(tmp_path)


def places(played: Played) -> tuple[ClusterPlaces, SweepState, JobSpec]:
    state = begin({"a": 96, "b": 96}, EarlyExit(), 6)
    state.spec = {"output": str(played.folder)}
    return ClusterPlaces(played, state, counts_gpus=True), state, toy.job(played.folder, "a")


def test_one_that_halts_is_told_of_once_and_waits_to_hear(played: Played) -> None:
    there, _, spec = places(played)
    halt = Halt(until=8)
    there.join(spec, toy.data(), halt)
    assert played.asked == [("train", spec.model_dump(mode="json"), halt.model_dump(mode="json"))]
    assert there.step() == []
    played.put("a", "paused", halts=True)  # by its user, not at a rung
    assert there.step() == []
    played.put("a", "paused", halts=False, step=7)
    assert there.step() == [News("a", State.PAUSED, 7)]
    assert there.step() == []
    there.join(spec, toy.data(), None)
    played.put("a", "paused", halts=bool(played.asked[-1][2]))  # to its end: only its user pauses it
    assert there.step() == []
    played.put("a", "finished", halts=False, step=9)
    assert there.step() == [News("a", State.FINISHED, 9)]
    assert there.names() == []


def test_one_that_has_left_comes_back_by_its_user_alone(played: Played) -> None:
    there, state, spec = places(played)
    there.join(spec, toy.data(), Halt())
    played.put("a", "paused", halts=False)
    there.step()
    state["a"].status = Status.EXITED
    assert there.leave("a", "under-performs").state is State.PAUSED
    assert played.asked[-1] == ("explain", "a", "under-performs")
    assert there.step() == []
    played.put("a", "queued", halts=False)
    state["b"].status = Status.FINISHED
    assert there.step() == [News("a", State.RUNNING, 3)]


def test_all_are_taken_out_at_the_end(played: Played) -> None:
    there, _, spec = places(played)
    there.join(spec, toy.data(), Halt(until=8))
    played.put("a", "running", halts=True)
    assert there.close() == [News("a", State.PAUSED, 3)]
    assert played.asked[-1] == ("pause", ["a"], "its sweep has stopped")
    assert there.names() == []


def test_one_that_has_failed_comes_back_by_its_user_too(played: Played) -> None:
    """Not if its name is another job's, which is why it has failed."""
    there, state, spec = places(played)
    there.join(spec, toy.data(), Halt())
    played.put("a", "failed", halts=False)
    assert there.step() == [News("a", State.FAILED, 3)]
    state["a"].status = state["b"].status = Status.FAILED
    played.put("b", "running", halts=False)
    played.rows["b"]["output"] = str(played.folder / "b")
    assert there.step() == []
    played.put("a", "queued", halts=False)
    assert there.step() == [News("a", State.RUNNING, 3)]


def test_those_that_this_scheduler_never_had_are_no_trouble(played: Played) -> None:
    there, state, spec = places(played)
    state["b"].status = Status.EXITED  # on another machine
    there.join(spec, toy.data(), Halt())
    played.put("a", "paused", halts=False)
    assert there.step() == [News("a", State.PAUSED, 3)]


def test_a_unit_counts_with_all_its_gpus(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    there, _, spec = places(played)
    there.join(spec, toy.data(), Halt())
    played.workers = [{"jobs": ["a", "other"], "pids": [1, 2, 3, 4]}]
    now_s = drive.time.monotonic() + 10.0
    there._looked_s = now_s - 10.0
    monkeypatch.setattr(drive.time, "monotonic", lambda: now_s)
    there.step()
    assert there.gpu_s() == pytest.approx(20.0)


def test_all_that_have_not_ended_are_cancelled(played: Played) -> None:
    """One whose user has let it finish meanwhile keeps nobody else from it."""
    for name, state in (("a", "finished"), ("b", "paused"), ("c", "queued")):
        played.put(name, state, halts=False)
    drive.cancel(played, ["a", "b", "c", "never-sent"])
    assert [row["state"] for row in played.rows.values()] == ["finished", "cancelled", "cancelled"]


def test_a_storage_that_is_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ray.exceptions.RayTaskError("train", "", OSError("it is away")).as_instanceof_cause(), "taken"])

    class Scheduler:
        class train:  # noqa: N801
            remote = staticmethod(lambda *arguments: None)

    def get(asked: object) -> Any:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(drive, "_TELL_S", 0.0)
    monkeypatch.setattr(ray, "get_actor", lambda *names, **named: Scheduler)
    monkeypatch.setattr(ray, "get", get)
    assert drive.call("train") == "taken"


def test_a_sweep_whose_folder_is_away_does_not_begin_anew(tmp_path: Path, played: Played) -> None:
    toy.write_sweep(tmp_path)
    (tmp_path / "_tlora").mkdir()
    register = Register(tmp_path)
    register.submit(toy.sweep(tmp_path), 0.0)
    with pytest.raises(FileNotFoundError, match="is the storage away"):
        Drive(register, "s", played, nullcontext(), counts_gpus=False, mark=str(tmp_path / "mark")).run()
    assert not (tmp_path / "out" / "sweep.json").exists()

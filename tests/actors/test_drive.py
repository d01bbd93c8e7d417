"""Candidates as jobs of a scheduler that is played here: what its rows mean to their sweep."""

import json
from pathlib import Path
from typing import Any

import pytest
import toy

from tlora.actors import drive
from tlora.actors.drive import ClusterPlaces
from tlora.job import State
from tlora.spec import JobSpec
from tlora.sweep import EarlyExit, Halt
from tlora.sweep_replay import begin
from tlora.sweep_run import News
from tlora.sweep_state import Status, SweepState


class Played:
    """Rows by name, and what was asked."""

    def __init__(self, folder: Path):
        self.folder, self.rows, self.asked = folder, dict[str, dict[str, Any]](), list[tuple[Any, ...]]()

    def __call__(self, method: str, *arguments: Any) -> Any:
        if method == "status":
            return [self.rows[name] for name in (arguments[0] if arguments else self.rows)]
        self.asked.append((method, *arguments))
        if method == "train":
            self.put(arguments[0]["name"], "queued", halts=bool(arguments[1]))
        elif method == "pause":
            self.put(arguments[0][0], "paused", halts=True)
        return []

    def put(self, name: str, state: str, *, halts: bool, step: int = 3) -> None:
        output = self.folder / name
        output.mkdir(exist_ok=True)
        (output / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
        self.rows[name] = {"name": name, "state": state, "halts": halts, "reason": "", "step": 0, "output": str(output)}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(drive, "_LOOK_S", 0.0)
    return Played(tmp_path)


def places(played: Played) -> tuple[ClusterPlaces, SweepState, JobSpec]:
    state = begin({"a": 96, "b": 96}, EarlyExit(), 6)
    return ClusterPlaces(played, state), state, toy.job(played.folder, "a")


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

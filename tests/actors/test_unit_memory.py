"""26, for ranks: what has no room on one of them waits, or goes on in smaller ticks, on all; no rank hangs."""

from pathlib import Path

import memory_scenes
import pytest
import toy
from ranks import Ranks
from unit_scenes import PLANS, off

from tlora.actors.messages import JobReport
from tlora.actors.talk import Damage, agreed
from tlora.job import State
from tlora.tracking import read_metrics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write_base(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("plan", "where"),
    [("shards", "_send_all"), ("parts", "_send_all end"), ("replicas", "_send_all"), ("shards", "_update end")],
)
def test_out_of_memory_in_a_tick_halves_those_of_all_ranks(plan: str, where: str, ranks: Ranks, folder: Path) -> None:
    """Steps in flight begin anew; amid an optimizer step, that job goes on from its last save."""
    (seen, first), (_, second) = ranks.run(2, memory_scenes.runs_short_once, PLANS[plan], folder, where, 1)
    assert first == second == [1024, 2048]
    for name, steps in memory_scenes.ONCE.items():
        assert (seen[name].state, seen[name].attempt) == (State.FINISHED, 1)
        rows = [row["step"] for row in read_metrics(folder / name) if "loss" in row]
        assert rows == list(range(1, steps + 1))
        assert off(folder, name, steps=steps, save_every=5) < 1e-8


def test_out_of_memory_as_a_job_is_saved_is_no_fault_of_its(ranks: Ranks, folder: Path) -> None:
    (seen, _), _ = ranks.run(2, memory_scenes.runs_short_once, PLANS["parts"], folder, "_save_state", 0, 3)
    for name, steps in memory_scenes.ONCE.items():
        assert (seen[name].state, seen[name].attempt) == (State.FINISHED, 1), seen[name].reason
        assert off(folder, name, steps=steps, save_every=5) < 1e-8


def test_a_halt_whose_save_was_broken_off_is_none(ranks: Ranks, folder: Path) -> None:
    """It comes to its rung again, from its last save, and is saved there."""
    seen, _ = ranks.run(2, memory_scenes.halts_short_of_memory, PLANS["parts"], folder)
    assert seen["candidate"].state is State.FINISHED


def test_a_rank_that_cannot_tell_of_its_want_saves_nothing(ranks: Ranks, folder: Path) -> None:
    """Others would be waited for in vain."""
    assert ranks.run(2, memory_scenes.loses_the_store, PLANS["replicas"], folder) == [True, True]


@pytest.mark.parametrize("is_too_large", [False, True])
def test_a_job_without_room_beside_others_waits_until_they_have_left(
    is_too_large: bool, ranks: Ranks, folder: Path
) -> None:
    (seen, _), (_, tries) = ranks.run(2, memory_scenes.has_no_room_beside_another, PLANS["parts"], folder, is_too_large)
    assert tries == [1, 1, 0, 0], "the last of them again after memory was given back, or as it is taken in"
    if is_too_large:
        assert (seen["comes"].state, seen["comes"].reason) == (
            State.FAILED, "out of memory, though alone: no memory",
        )  # fmt: skip
    else:
        assert seen["comes"].state is State.FINISHED
        assert off(folder, "comes") < 1e-8


def test_a_job_that_cannot_be_taken_in_fails_alone(ranks: Ranks, folder: Path) -> None:
    """Not its unit, with all that is there, and again whenever that is started anew."""
    seen, _ = ranks.run(2, memory_scenes.matches_nothing, PLANS["parts"], folder)
    assert (seen["bad"].state, seen["good"].state) == (State.FAILED, State.FINISHED)
    assert "nowhere" in seen["bad"].reason
    assert off(folder, "good", steps=8) < 1e-8


def test_each_rank_waits_for_a_neighbour_of_its_own(ranks: Ranks, folder: Path) -> None:
    """No try, but that after memory was given back, is worth anything until each that has no room has lost one."""
    tries = ranks.run(2, memory_scenes.waits_on_two_lanes, PLANS["replicas"], folder)
    assert tries == [[1, 1, 0, 0]] * 2, "as it is made, and as it is taken in"


def test_a_resident_without_room_for_its_own_tick_leaves_and_comes_back(ranks: Ranks, folder: Path) -> None:
    seen, _ = ranks.run(2, memory_scenes.has_no_room_for_its_own_tick, PLANS["parts"], folder)
    assert seen["a"].state is State.FINISHED
    assert off(folder, "a", steps=20, save_every=1000) < 1e-8


def test_a_job_too_large_alone_fails_with_the_numbers(ranks: Ranks, folder: Path) -> None:
    (seen, _), (_, rows) = ranks.run(2, memory_scenes.is_too_large_alone, PLANS["shards"], folder)
    assert seen["large"].state is State.FAILED
    assert f"out of memory in a tick of {rows} rows, the length of its longest sequence" in seen["large"].reason
    assert (seen["good"].state, seen["good"].attempt) == (State.FINISHED, 1)
    assert off(folder, "good", steps=8) < 1e-8


def test_ranks_that_do_not_meet_again_have_told_the_scheduler(ranks: Ranks, folder: Path) -> None:
    """The unit that follows is to send half as many rows."""
    assert ranks.run(2, memory_scenes.do_not_meet_again, PLANS["shards"], folder) == [1024, 0]


def test_an_end_of_which_a_jobs_lead_does_not_know_is_none() -> None:
    """26: else that rank would never read it again, and the others wait for it."""
    ended = {name: JobReport(2, State.FINISHED) for name in ("known", "older", "unknown", "nowhere")}
    ended["failed"] = JobReport(2, State.FAILED)
    lead = Damage({}, True, ended=frozenset({("known", 2), ("older", 1)}))
    assert set(agreed(ended, dict.fromkeys(ended.keys() - {"nowhere"}, lead))) == {"known", "nowhere", "failed"}

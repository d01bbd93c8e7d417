"""Sweeps of a toy model: candidates equal to alone, exits that can be reversed, the same end after kills."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import toy
from safetensors.torch import load_file

from tlora import sweep_run
from tlora.errors import ModelError, SpecError
from tlora.job import State
from tlora.local import Progress, RunOptions, prepare, train
from tlora.resident import ResidentJob
from tlora.spec import JobSpec, load_job
from tlora.supermodel import SuperModel
from tlora.sweep_local import LocalPlaces, run_sweep
from tlora.sweep_state import Status, SweepState
from tlora.tracking import read_metrics
from tlora.trainer import Tick, Trainer

OPTIONS = RunOptions(device="cpu", deterministic=True)
RESUME = RunOptions(device="cpu", deterministic=True, resume=True)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    toy.write_sweep(tmp_path)
    return tmp_path


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


def alone(spec: JobSpec) -> Path:
    lone = spec.model_copy(update={"output": f"{spec.output}-alone"})
    train(prepare([lone], OPTIONS), OPTIONS)
    return lone.folder


def test_a_sweep_ends_the_weak_and_its_winner_is_what_it_would_be_alone(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, read, most = toy.sweep(desk), [], []
    read_data = sweep_run.read_data
    monkeypatch.setattr(sweep_run, "read_data", lambda *args: read.append(args) or read_data(*args))

    def watch(progress: list[Progress], tick: object) -> None:
        most.append(sum(one.record.state == "running" for one in progress))

    state = run_sweep(spec, OPTIONS, watch=watch)
    assert len(read) == 1  # rows are read once for all
    assert max(most) == 3
    assert {one.status for one in state.candidates} == {Status.EXITED, Status.FINISHED}
    assert state.samples < 0.6 * sum(one.total for one in state.candidates)
    leader = state.leader
    assert leader.best_loss == min(one.best_loss for one in state.candidates)
    assert equal(weights(spec.folder / "best"), weights(spec.folder / "candidates" / leader.name / "best"))
    rows = json.loads((spec.folder / "leaderboard.json").read_text())
    assert rows[0]["candidate"] == leader.name
    assert all(
        row["reason"].startswith(("under-performs at", "over-", "div")) for row in rows if row["status"] == "exited"
    )
    assert len((spec.folder / "leaderboard.csv").read_text().splitlines()) == 8
    assert "<svg" in (spec.folder / "report.html").read_text()
    cost = json.loads((spec.folder / "cost.json").read_text())
    assert (cost["samples"], cost["samples_of_full_training"]) == (state.samples, 7 * 80)
    assert (cost["gpu_seconds"], state.lone_samples > 0) == (0.0, True)  # on a CPU; the last finalist was alone
    in_turn_s = cost["seconds_one_after_the_other"]
    assert in_turn_s == pytest.approx(7 * 80 * state.lone_s / state.lone_samples, abs=1e-3)
    assert cost["saved_against_one_after_the_other"] == pytest.approx(1 - state.spent_s / in_turn_s, abs=1e-3)
    finished = next(one for one in state.candidates if one.status is Status.FINISHED)
    job = load_job(spec.folder / "candidates" / finished.name / "job.yaml")
    assert equal(weights(job.folder), weights(alone(job)))


def test_where_there_are_several_others_code_is_called_by_one_at_a_time(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads data sets is not made for threads, nor what draws."""
    lock, called = threading.Lock(), []
    for name in ("read_data", "load_tokenizer", "write_results"):
        real = getattr(sweep_run, name)
        monkeypatch.setattr(
            sweep_run, name, lambda *args, name=name, real=real: (called.append((name, lock.locked())), real(*args))[1]
        )
    spec = toy.sweep(desk, budget={"configurations": 1, "samples": 4})
    spec.folder.mkdir()
    run = sweep_run.SweepRun(spec, SweepState(spec=spec.model_dump(mode="json")), LocalPlaces(OPTIONS, 1), library=lock)
    run.run()
    assert set(called) == {("read_data", True), ("load_tokenizer", True), ("write_results", True)}


def test_an_exit_is_reversed_exactly(desk: Path) -> None:
    """Inside the sweep by --revive, and outside it as the ordinary paused job that it is."""
    spec = toy.sweep(desk)
    state = run_sweep(spec, OPTIONS)
    first, second = [one.name for one in state.candidates if one.status is Status.EXITED][:2]
    jobs = {name: load_job(spec.folder / "candidates" / name / "job.yaml") for name in (first, second)}
    train(prepare([jobs[second]], RESUME), RESUME)
    state = run_sweep(spec, RESUME, revive=[first])
    assert state[first].status is Status.FINISHED
    assert state[first].samples == state[first].total
    for job in jobs.values():
        assert equal(weights(job.folder), weights(alone(job)))
    with pytest.raises(SpecError, match=r"is finished; want one that has exited"):
        run_sweep(spec, RESUME, revive=[first])


def test_a_sweep_is_stopped_resumed_extended_and_its_leader_forked(desk: Path) -> None:
    spec = toy.sweep(desk)
    ticks = iter(range(20))
    state = run_sweep(spec, OPTIONS, stopped=lambda: next(ticks, None) is None)
    assert state.stopped
    assert any(one.status.is_open for one in state.candidates)
    with pytest.raises(SpecError, match=r"holds a sweep already. Add --resume"):
        run_sweep(spec, OPTIONS)
    with pytest.raises(SpecError, match="holds a sweep with other settings: sampler"):
        run_sweep(toy.sweep(desk, sampler={"seed": 5}), RESUME)
    small = toy.sweep(desk, budget={"configurations": 7, "samples": state.samples + 20})
    assert "budget.samples" in run_sweep(small, RESUME).stopped
    run_sweep(spec, RESUME)
    more = run_sweep(toy.sweep(desk, budget={"configurations": 9}), RESUME, fork=["optim.lr=1e-4"])
    assert (len(more.candidates), len(more.drawn)) == (10, 9)
    assert not any(one.status.is_open for one in more.candidates)
    fork = next(one for one in more.candidates if one.is_fork)
    assert fork.status is Status.FINISHED
    assert fork.values["optim.lr"] == 1e-4
    assert fork.readings == []  # its samples are not its siblings'


def test_validation_rows_must_be_the_same_for_all(desk: Path) -> None:
    with pytest.raises(SpecError, match="its validation rows are not those of the others"):
        run_sweep(toy.sweep(desk, space={"data.train_on": ["assistant", "all"]}, budget={"configurations": 2}), OPTIONS)


@pytest.mark.parametrize("where", ["attach", "tick", "alone"])
def test_out_of_memory_a_sweep_goes_on(desk: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """With smaller ticks, then with fewer at once; who has no room alone has failed, and its siblings go on."""
    left = {"attach": 1, "tick": 2, "alone": 99}[where]
    full, attach, tick = torch.OutOfMemoryError("planted"), Trainer.attach, Trainer.tick

    def lacks(is_so: bool) -> bool:
        nonlocal left
        left -= is_so
        return is_so and left >= 0

    def attached(self: Trainer, spec: JobSpec, *args: object, **named: object) -> ResidentJob:
        if lacks(where == "attach" and bool(self.jobs)):
            raise full
        return attach(self, spec, *args, **named)

    def ticked(self: Trainer) -> Tick:
        if lacks(where == "tick" or (where == "alone" and "s-001" in self.jobs)):
            raise full
        return tick(self)

    monkeypatch.setattr(Trainer, "attach", attached)
    monkeypatch.setattr(Trainer, "tick", ticked)
    spec = toy.sweep(desk, budget={"configurations": 3}, early_exit={"evaluations": 4, "halving": None})
    state = run_sweep(spec, OPTIONS)
    ended = {one.name: one.status for one in state.candidates}
    wanted = dict.fromkeys(ended, Status.FINISHED)
    if where == "alone":
        wanted["s-001"] = Status.FAILED
        assert "out of memory" in state["s-001"].reason
    assert ended == wanted
    leader = load_job(spec.folder / "candidates" / state.leader.name / "job.yaml")
    assert equal(weights(leader.folder), weights(alone(leader)))


def test_a_base_that_is_away_for_a_moment_costs_no_candidate(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy.sweep(desk, budget={"configurations": 2}, early_exit={"evaluations": 4, "halving": None})

    def away(*args: object, **named: object) -> SuperModel:
        raise ModelError("base.model = x: cannot be loaded")

    with monkeypatch.context() as patched:
        patched.setattr(SuperModel, "load", away)
        with pytest.raises(ModelError):
            run_sweep(spec, OPTIONS)
    assert {one.status for one in run_sweep(spec, RESUME).candidates} == {Status.FINISHED}


def test_one_that_has_failed_is_revived(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = toy.sweep(desk, budget={"configurations": 2}, early_exit={"evaluations": 4, "halving": None})
    attach = Trainer.attach

    def full(self: Trainer, job: JobSpec, *args: object, **named: object) -> ResidentJob:
        if job.name == "s-001":
            raise OSError("the disk is full")
        return attach(self, job, *args, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "attach", full)
        assert run_sweep(spec, OPTIONS)["s-001"].status is Status.FAILED
    assert run_sweep(spec, RESUME, revive=["s-001"])["s-001"].status is Status.FINISHED


def test_what_a_user_asks_is_kept_at_once(desk: Path) -> None:
    """A revival, and the adapter that a fork starts from: whatever happens before the first save."""
    spec = toy.sweep(desk)
    state = run_sweep(spec, OPTIONS)
    exited = next(one.name for one in state.candidates if one.status is Status.EXITED)
    run = sweep_run.SweepRun(spec, state, LocalPlaces(OPTIONS, 1))
    run.change([exited], ["optim.lr=1e-4"])
    known = SweepState.load(spec.folder)
    assert (known[exited].status, known[exited].is_exempt) == (Status.QUEUED, True)
    fork, best = known.candidates[-1], spec.folder / "candidates" / known.leader.name / "best"
    before = weights(best)
    start = Path(fork.values["adapter.init_from"])
    for file in best.glob("*.safetensors"):  # the leader goes on, and improves
        file.unlink()
    assert equal(weights(start), before)
    first = read_metrics(spec.folder / "candidates" / known.leader.name)[0]
    assert fork.start == first["loss"]


def test_who_failed_without_its_best_adapter_does_not_lead(desk: Path) -> None:
    """The disk was full as best/ was to be written: its loss is known, its adapter is not there."""
    spec = toy.sweep(desk)
    state = run_sweep(spec, OPTIONS)
    first, second = state.ranking()[:2]
    folder = spec.folder / "candidates"
    shutil.rmtree(folder / first.name / "best")
    run = sweep_run.SweepRun(spec, state, LocalPlaces(OPTIONS, 1))
    run._note([sweep_run.News(first.name, State.FAILED, first.step, "the disk is full")])
    assert state.leader is second
    run.run()
    assert equal(weights(spec.folder / "best"), weights(folder / second.name / "best"))
    shutil.rmtree(folder / second.name / "best")
    run._note([sweep_run.News(second.name, State.FAILED, second.step, "the disk is full")])
    assert state.leader not in (first, second)


def test_candidates_that_are_added_join_those_in_training(desk: Path) -> None:
    """Random draws and grids learn nothing from those before: an extension waits for nobody."""
    spec = toy.sweep(desk, budget={"configurations": 2}, places=4)
    ticks = iter(range(4))
    run_sweep(spec, OPTIONS, stopped=lambda: next(ticks, None) is None)
    seen: set[frozenset[str]] = set()
    more = toy.sweep(desk, budget={"configurations": 4}, places=4)
    run_sweep(more, RESUME, watch=lambda progress, tick: seen.add(frozenset(
        one.spec.name for one in progress if one.record.state == "running")))  # fmt: skip
    assert any({"s-000", "s-003"} <= names for names in seen)


CHILD = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_sweep import RESUME, run_sweep, toy
print("begun", flush=True)
run_sweep(toy.sweep(Path({folder!r}), output={output!r}, **{changes!r}), RESUME)
"""
LEARNS = {"sampler": {"name": "tpe", "startup": 3, "wave": 2}, "budget": {"configurations": 5}}


@pytest.mark.parametrize(("changes", "most"), [({}, 4), (LEARNS, 2)], ids=["random", "tpe"])
def test_killed_at_any_moment_it_ends_the_same(desk: Path, changes: dict[str, Any], most: int) -> None:
    """kill −9, again and again: the same draws, winner, leaderboard and adapter as without."""
    quiet = toy.sweep(desk, **changes)
    run_sweep(quiet, OPTIONS)
    output = desk / "killed"
    code = CHILD.format(here=str(Path(__file__).parent), folder=str(desk), output=str(output), changes=changes)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    rng, killed = random.Random(os.environ.get("TLORA_TEST_SEED", "8")), 0
    for _ in range(40):
        child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        assert child.stdout
        child.stdout.readline()
        deadline_s = time.monotonic() + rng.uniform(0.3, 2.0)
        while child.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        code_s = child.wait()
        killed += code_s == -signal.SIGKILL
        if code_s != -signal.SIGKILL or killed == most:
            break
    assert killed >= 2
    run_sweep(toy.sweep(desk, output=str(output), **changes), RESUME)
    for name in ("leaderboard.json", "leaderboard.csv"):
        assert (output / name).read_bytes() == (quiet.folder / name).read_bytes()
    assert equal(weights(output / "best"), weights(quiet.folder / "best"))

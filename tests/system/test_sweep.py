"""Sweeps of a toy model: candidates equal to alone, exits that can be reversed, the same end after kills."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file

from tlora import sweep_run
from tlora.errors import SpecError
from tlora.local import Progress, RunOptions, prepare, train
from tlora.spec import JobSpec, load_job
from tlora.sweep_local import LocalPlaces, run_sweep
from tlora.sweep_state import Status, SweepState

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


CHILD = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_sweep import RESUME, run_sweep, toy
print("begun", flush=True)
run_sweep(toy.sweep(Path({folder!r}), output={output!r}), RESUME)
"""


def test_killed_at_any_moment_it_ends_the_same(desk: Path) -> None:
    """kill −9, again and again: the same winner, leaderboard and adapter as without."""
    quiet = toy.sweep(desk)
    run_sweep(quiet, OPTIONS)
    output = desk / "killed"
    code = CHILD.format(here=str(Path(__file__).parent), folder=str(desk), output=str(output))
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
        if code_s != -signal.SIGKILL or killed == 4:
            break
    assert killed >= 2
    run_sweep(toy.sweep(desk, output=str(output)), RESUME)
    for name in ("leaderboard.json", "leaderboard.csv"):
        assert (output / name).read_bytes() == (quiet.folder / name).read_bytes()
    assert equal(weights(output / "best"), weights(quiet.folder / "best"))

"""Killed, paused, moved: a job goes on exactly where it was."""

import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import toy

from tlora.checkpoint import STATE, load_state
from tlora.errors import CheckpointError
from tlora.resident import Phase
from tlora.tracking import read_metrics
from tlora.trainer import Trainer, TrainerOptions

CHANGES = {
    "adapter": {"rank": 6, "dropout": 0.2, "targets": "all-linear"},
    "schedule": {"name": "cosine", "warmup_steps": 3},
    "batch_size": 4,
    "steps": 10,
    "eval_every": 3,
}
ROWS = toy.data(14, seed=5, held_out=3)  # 4 steps an epoch: a pause after 5 is mid-epoch


@pytest.mark.parametrize("half_way", [False, True])
@pytest.mark.parametrize("pause_at", [0, 1, 3, 4, 5, 9])
def test_alone_resumed_beside_other_neighbours(pause_at: int, half_way: bool, tmp_path: Path) -> None:
    """20: resume restarted the schedule, lost moments, repeated or skipped data."""
    model = toy.super_model(torch.float32, deterministic=True)
    spec = toy.job(tmp_path, **CHANGES)
    solo = toy.alone(model, spec, ROWS)

    first = toy.Recorder(model, token_budget=64)
    job = first.attach(spec, ROWS)
    first.attach(toy.job(tmp_path, "x", steps=40), toy.data(8, seed=1))
    while job.step < pause_at or (half_way and len(job.pending_rows) in (0, len(job._items))):
        first.tick()
    at, phase, run_id = job.step, job.phase, first.jobs["a"].tracker.run_id
    assert not half_way or 0 < len(job.pending_rows) < len(job._items)
    assert phase is Phase.EVALUATING or (pause_at, half_way) != (3, True)
    first.detach("a")

    second = toy.Recorder(toy.super_model(torch.float32, deterministic=True), token_budget=160, nano_batches=3)
    second.attach(toy.job(tmp_path, "y", steps=3), toy.data(8, seed=2))
    job = second.attach(spec, ROWS, resume=True)
    assert (job.step, job.phase) == (at, phase)
    toy.finish(second)
    assert load_state(spec.folder)[1]["run_id"] == run_id
    rows = read_metrics(spec.folder)
    assert [row["loss"] for row in rows if "loss" in row] == solo.losses
    assert [row["lr"] for row in rows if "lr" in row] == solo.rates
    assert [row["eval_loss"] for row in rows if "eval_loss" in row] == solo.evaluations
    assert torch.equal(job.state.master, solo.master)


CHILD = """
import sys, torch, toy
from pathlib import Path
sys.path.insert(0, {here!r})
from test_resume import CHANGES, ROWS
trainer = toy.Trainer(toy.super_model(torch.float32, deterministic=True))
trainer.attach(toy.job(Path({folder!r}), save_every=1, **CHANGES), ROWS, resume=True)
while trainer.jobs:
    trainer.tick()
    print("tick", flush=True)
"""


def test_alone_killed_at_any_moment(tmp_path: Path) -> None:
    """kill −9 while it trains and saves, again and again; the job ends as if nothing had happened."""
    code = CHILD.format(here=str(Path(__file__).parent), folder=str(tmp_path))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    killed = 0
    for delay_s in (0.0, 0.013, 0.031):
        child = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)
        assert child.stdout
        for _ in range(2):
            child.stdout.readline()
        time.sleep(delay_s)
        child.send_signal(signal.SIGKILL)
        killed += child.wait() == -signal.SIGKILL
    assert killed
    model = toy.super_model(torch.float32, deterministic=True)
    trainer = toy.Recorder(model)
    spec = toy.job(tmp_path, save_every=1, **CHANGES)
    job = trainer.attach(spec, ROWS, resume=True)
    assert job.step >= 1
    toy.finish(trainer)
    solo = toy.alone(model, toy.job(tmp_path, **CHANGES), ROWS)
    assert torch.equal(job.state.master, solo.master)
    steps = [row["step"] for row in read_metrics(spec.folder) if "loss" in row]
    assert steps == list(range(1, 11))


def test_resume_refuses_what_is_not_the_same_job(tmp_path: Path) -> None:
    trainer = Trainer(toy.super_model())
    trainer.attach(toy.job(tmp_path), toy.data())
    trainer.tick()
    trainer.detach("a")
    with pytest.raises(CheckpointError, match=r"optim.lr: 0.01 was, 0.5 is asked"):
        trainer.attach(toy.job(tmp_path, optim={"lr": 0.5}), toy.data(), resume=True)
    with pytest.raises(CheckpointError, match="its data changed"):
        trainer.attach(toy.job(tmp_path), toy.data(11), resume=True)
    with pytest.raises(CheckpointError, match="base precision"):
        Trainer(toy.super_model(torch.float64)).attach(toy.job(tmp_path), toy.data(), resume=True)
    assert trainer.attach(toy.job(tmp_path, save_every=1, share=2.0), toy.data(), resume=True).step == 1


def test_resume_of_a_finished_job_ends_at_once(tmp_path: Path) -> None:
    model = toy.super_model()
    trainer = Trainer(model)
    first = trainer.attach(toy.job(tmp_path), toy.data())
    toy.finish(trainer)
    again = Trainer(model).attach(toy.job(tmp_path), toy.data(), resume=True)
    assert again.record.state == "finished"
    assert torch.equal(again.state.master, first.state.master)


def test_saved_state_says_what_made_it(tmp_path: Path) -> None:
    trainer = Trainer(toy.super_model(), TrainerOptions())
    trainer.attach(toy.job(tmp_path), toy.data())
    toy.finish(trainer)
    _, meta = load_state(tmp_path / "a")
    assert meta["step"] == 5
    assert meta["spec"]["optim"]["lr"] == 0.01
    assert meta["environment"]["torch"] == version("torch")
    assert (tmp_path / "a" / STATE).stat().st_mode & 0o044  # others may read it

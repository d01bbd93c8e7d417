"""Sweeps of a cluster: candidates are its jobs, exits and their reversal, the same end whatever is killed."""

import os
import signal
from pathlib import Path

import pytest
import ray
import toy
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from tlora.actors.names import NAMESPACE, SWEEPS
from tlora.cli import app
from tlora.client import Client
from tlora.errors import SpecError, StateError
from tlora.job import State
from tlora.local import RunOptions
from tlora.sweep_local import run_sweep
from tlora.sweep_state import Status, SweepState


def state_of(client: Client, name: str) -> str:
    return str(client.status([name])[0]["state"])


@pytest.mark.parametrize("client", [{"jobs_per_worker": 8, "idle_s": 60.0}], indirect=True)
def test_killed_with_its_cluster_a_sweep_ends_as_on_one_machine(client: Client, tmp_path: Path) -> None:
    """kill -9 of its driver and of the scheduler, beside a plain job: the same leaderboard and winner."""
    toy.write_sweep(tmp_path)
    rules = {"evaluations": 16, "halving": {"warmup": 0.125, "margin": 0, "most": 1}}
    few = {"budget": {"configurations": 4}, "early_exit": rules}
    alone = toy.sweep(tmp_path, **few, output=str(tmp_path / "alone"))
    run_sweep(alone, RunOptions(device="cpu", deterministic=True))
    spec = toy.sweep(tmp_path, **few)
    plain = toy.named_job(tmp_path, "plain", steps=20, save_every=20)
    assert client.sweep(spec)
    assert not client.sweep(spec)
    client.submit([plain])
    with pytest.raises(StateError, match="job s: a sweep has this name"):
        client.submit([toy.named_job(tmp_path, "s")])
    with pytest.raises(SpecError, match="holds a sweep with other settings: sampler"):
        client.sweep(toy.sweep(tmp_path, **few, sampler={"seed": 5}))

    def steps() -> int:
        return sum(row["step"] for row in client.status() if row["name"].startswith("s-"))

    toy.until(lambda: steps() > 4)
    driver = ray.get_actor(SWEEPS, namespace=NAMESPACE)
    os.kill(ray.get(driver.process_id.remote()), signal.SIGKILL)
    toy.until(lambda: steps() > 20)
    ray.kill(ray.get_actor("tlora-scheduler", namespace=NAMESPACE), no_restart=False)

    (row, _) = client.wait(["s", "plain"])
    assert row["state"] == State.FINISHED, row["reason"]
    for name in ("leaderboard.json", "leaderboard.csv"):
        assert (spec.folder / name).read_bytes() == (alone.folder / name).read_bytes()
    one, other = (load_file(each.folder / "best" / "adapter_model.safetensors") for each in (spec, alone))
    assert all((one[key] == other[key]).all() for key in other)
    assert toy.equals_alone(plain)
    state = SweepState.load(spec.folder)
    exited = [each.name for each in state.candidates if each.status is Status.EXITED]
    rows = {row["name"]: row for row in client.status()}
    assert {rows[name]["state"] for name in exited} == {State.PAUSED}
    assert all(rows[name]["reason"] for name in exited)

    client.resume(exited[:1])  # reverses its exit, exactly; the sweep takes it in again
    client.resume(["s"])
    assert client.wait(exited[:1])[0]["state"] == State.FINISHED
    toy.until(lambda: SweepState.load(spec.folder)[exited[0]].status is Status.FINISHED)

    sent = CliRunner().invoke(app, ["fork", "s", "--set", "optim.lr=0.002"])
    assert "s takes in one more candidate" in sent.output, sent.output
    toy.until(lambda: [each.is_fork for each in SweepState.load(spec.folder).candidates] == [False] * 4 + [True])
    client.wait(["s"])
    fork = SweepState.load(spec.folder).candidates[-1]
    assert (fork.status, fork.values["optim.lr"]) == (Status.FINISHED, 0.002)
    assert fork.values["adapter.init_from"].endswith("/start")


@pytest.mark.parametrize("client", [{"max_workers": 1, "idle_s": 60.0}], indirect=True)
def test_a_sweep_is_paused_extended_and_cancelled(client: Client, tmp_path: Path) -> None:
    """It goes on with the next `up`, and what it leaves can be resumed as the jobs that they are."""
    toy.write_sweep(tmp_path)
    changes = {"early_exit": {"evaluations": 8, "halving": None}}
    file, plain = tmp_path / "s.yaml", tmp_path / "plain.yaml"
    sweep = toy.sweep(tmp_path, **changes, budget={"configurations": 2})
    for path, spec in ((file, sweep), (plain, toy.named_job(tmp_path, "plain", steps=1))):
        path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    sent = CliRunner().invoke(app, ["submit", str(file), str(plain)])
    assert "2 new, 0 known already" in sent.output, sent.output
    toy.until(lambda: any(row["step"] for row in client.status() if row["name"] == "s-000"))
    client.pause(["s"])
    toy.until(lambda: state_of(client, "s") == State.PAUSED)
    assert {state_of(client, name) for name in ("s-000", "s-001")} <= {State.PAUSED, State.FINISHED}
    client.resume(["s"])
    client.down()
    Client.up(toy.cluster_spec(tmp_path, max_workers=1))
    client = Client()
    more = toy.sweep(tmp_path, **changes, budget={"configurations": 3})
    file.write_text(yaml.safe_dump(more.model_dump(mode="json")))
    sent = CliRunner().invoke(app, ["submit", str(file)])
    assert "0 new, 1 known already\ns goes on by its new budget" in sent.output, sent.output
    toy.until(lambda: any(row["name"] == "s-002" and row["step"] for row in client.status()))
    client.cancel(["s"])
    toy.until(lambda: state_of(client, "s") == State.CANCELLED)
    assert state_of(client, "s-002") in (State.CANCELLED, State.FINISHED)
    with pytest.raises(StateError, match="sweep s is cancelled"):
        client.resume(["s"])

"""The whole cluster on a local Ray with CPU workers: whatever is killed, jobs end as they would have alone."""

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pytest
import ray
import torch
import toy

from tlora.actors import group
from tlora.actors.names import GROUP, MARK, NAMESPACE, SCHEDULER
from tlora.actors.scheduler import connect
from tlora.base import Outline
from tlora.checkpoint import STATE, read_meta
from tlora.client import Client
from tlora.errors import ClusterError, StateError
from tlora.job import State
from tlora.plan import Plan
from tlora.planner import SPARE, EstimatedCosts, Machine
from tlora.spec import JobSpec
from tlora.tracking import read_metrics


def step(client: Client, name: str) -> int:
    return int(client.status([name])[0]["step"])


def test_whatever_is_killed_each_job_ends_as_it_would_have_alone(client: Client, tmp_path: Path) -> None:
    specs = [toy.named_job(tmp_path, f"job{n}", steps=150, save_every=20) for n in range(4)]
    assert client.submit(specs[:3]) == ["job0", "job1", "job2"]
    assert client.submit(specs) == ["job3"]
    with pytest.raises(StateError, match=r"job0 was submitted with other content: optim\.lr"):
        client.submit([specs[0].model_copy(update={"optim": specs[0].optim.model_copy(update={"lr": 1.0})})])
    toy.until(lambda: all(step(client, spec.name) > 25 for spec in specs))

    first, second = client.workers()
    os.kill(first["pid"], signal.SIGKILL)  # its jobs go on elsewhere, or where it was; the other worker stays
    ray.kill(ray.get_actor("tlora-scheduler", namespace=NAMESPACE), no_restart=False)
    client.pause(["job1"])
    toy.until(lambda: client.status(["job1"])[0]["state"] == State.PAUSED)
    toy.until(lambda: len(client.workers()) == 2 and first["pid"] not in {worker["pid"] for worker in client.workers()})
    assert second["pid"] in {worker["pid"] for worker in client.workers()}
    client.resume(["job1"])

    rows = client.wait([spec.name for spec in specs])
    assert [row["state"] for row in rows] == ["finished"] * 4
    assert max(row["attempt"] for row in rows) >= 2
    assert all(toy.equals_alone(spec) for spec in specs)
    states = [event["state"] for event in client.events(0, "job1")]
    assert states[0] == State.QUEUED
    assert states[-1] == State.FINISHED
    assert State.PAUSED in states


def test_a_group_grows_and_shrinks_around_its_workers(client: Client, tmp_path: Path) -> None:
    """The one that was there keeps its process, its base and its jobs."""
    long = [toy.named_job(tmp_path, f"long{n}", steps=400, save_every=1000) for n in range(2)]
    client.submit(long)
    toy.until(lambda: step(client, "long0") > 5)
    (first,) = client.workers()
    short = [toy.named_job(tmp_path, f"short{n}", steps=3) for n in range(6)]
    client.submit(short)
    client.wait([spec.name for spec in short])
    both = {worker["pid"]: worker for worker in client.workers()}
    assert len(both) == 2
    assert both[first["pid"]]["base_loads"] == 1
    toy.until(lambda: [worker["pid"] for worker in client.workers()] == [first["pid"]])
    client.cancel(["long1"], keep=True)
    assert client.wait(["long0"])[0]["state"] == State.FINISHED
    assert client.status(["long1"])[0]["state"] == State.CANCELLED
    assert {row["attempt"] for row in client.status()} == {1}
    assert toy.equals_alone(long[0])


def test_jobs_outlive_their_scheduler_and_its_cluster_state(client: Client, tmp_path: Path) -> None:
    """`down` saves what runs; the next `up` on the same state goes on with it, also where another plan holds the base:
    whole on one worker, then sharded over two, then whole again."""
    spec = in_float64(tmp_path, "long", steps=100, save_every=1000)
    client.submit([spec])
    toy.until(lambda: step(client, "long") > 5)
    client.down()
    with pytest.raises(ClusterError, match="Run `tlora up`"):
        Client()
    connect(toy.cluster_spec(tmp_path, plan={"shards": 2}))
    sharded, saved = Client(), int(read_meta(spec.folder)["step"])
    toy.until(lambda: step(sharded, "long") > saved + 5)
    (unit,) = sharded.workers()
    assert len(unit["pids"]) == 2
    sharded.submit([toy.named_job(tmp_path, "late", steps=2)])
    sharded.down()  # before it had a place
    connect(toy.cluster_spec(tmp_path))
    again = Client()
    assert again.wait(["long"])[0]["state"] == State.FINISHED
    assert again.status(["long"])[0]["attempt"] >= 2
    assert again.wait(["late"])[0]["state"] == State.FINISHED
    assert toy.off_alone(spec) < 1e-8
    assert again.fork("long", "child", ["steps=1"]) == "child"
    assert again.wait(["child"])[0]["state"] == State.FINISHED


def test_a_scheduler_that_is_told_to_end_goes_though_its_client_is_gone(client: Client, tmp_path: Path) -> None:
    """Else the next `tlora up` would find it, and its jobs would never go on."""
    spec = toy.named_job(tmp_path, "long", steps=60, save_every=1000)
    client.submit([spec])
    toy.until(lambda: step(client, "long") > 5)
    for _ in range(2):
        client._scheduler.close.remote()  # what a client leaves that is stopped amid `down`
    with pytest.raises(ClusterError, match="on its way out"):
        toy.until(lambda: connect(toy.cluster_spec(tmp_path)) and None, 5.0)
    toy.until(lambda: "tlora-scheduler" not in ray.util.list_named_actors(all_namespaces=False))
    connect(toy.cluster_spec(tmp_path))
    assert Client().wait(["long"])[0]["state"] == State.FINISHED
    assert toy.equals_alone(spec)


def test_a_scheduler_killed_amid_a_groups_start_comes_back_to_one_group(client: Client, tmp_path: Path) -> None:
    """Once as soon as the group's controller has its name, and once it answers, before its first worker."""
    client.submit([toy.named_job(tmp_path, "a", steps=4)])
    for is_there in (lambda name: True, answers):
        (name,) = toy.until(lambda is_there=is_there: [name for name in group.names() if is_there(name)])
        ray.kill(ray.get_actor(SCHEDULER, namespace=NAMESPACE), no_restart=False)
        assert client.status(["a"])[0]["state"] == State.QUEUED, "no worker was there yet"
    assert client.wait(["a"])[0]["state"] == State.FINISHED
    assert group.names() == [name], "the one that answered was found again, and it alone is there"
    assert toy.equals_alone(toy.named_job(tmp_path, "a", steps=4))
    pools = ray.util.placement_group_table().values()
    assert sum(pool["state"] != "REMOVED" for pool in pools) == len(client.workers())


def answers(name: str) -> bool:
    """Whether a group's controller has been made; asked without a word to run."""
    with suppress(ray.exceptions.RayError, ValueError):
        return bool(ray.get(ray.get_actor(GROUP + name, namespace=NAMESPACE).describe.remote(), timeout=2.0))
    return False


def test_the_mark_of_the_outputs_is_made_once(client: Client, tmp_path: Path) -> None:
    """A scheduler that is started again while the outputs are away makes none where they are not."""
    (tmp_path / MARK).unlink()
    ray.kill(ray.get_actor("tlora-scheduler", namespace=NAMESPACE), no_restart=False)
    client.submit([toy.named_job(tmp_path, "a", steps=2)])
    toy.until(lambda: "is the storage away?" in client.status(["a"])[0]["reason"])
    assert client.status(["a"])[0]["state"] == State.ATTACHING
    (tmp_path / MARK).touch()
    assert client.wait(["a"])[0]["state"] == State.FINISHED


def test_more_jobs_than_seats_and_one_whose_state_is_damaged(client: Client, tmp_path: Path) -> None:
    """14, 27: twelve short jobs take turns on two workers; one resumes from a truncated file, and it alone fails."""
    specs = [toy.named_job(tmp_path, f"job{n}", steps=6, save_every=2) for n in range(12)]
    state = specs[1].folder / STATE
    state.parent.mkdir(parents=True)
    state.write_bytes(b"{" * 100)
    client.submit(specs)
    reasons: set[str] = set()
    rows = client.wait(
        [spec.name for spec in specs],
        lambda rows: reasons.update(row["reason"] for row in rows if row["state"] == State.QUEUED),
    )
    assert "is damaged" in rows[1]["reason"]
    assert [row["state"] for row in rows] == ["finished", "failed", *["finished"] * 10]
    assert {row["attempt"] for row in rows} == {1}
    assert any("all 2 workers of the cluster are taken" in reason for reason in reasons)
    for spec in (specs[0], *specs[2:]):
        steps = [row["step"] for row in read_metrics(spec.folder) if "loss" in row]
        assert steps == [1, 2, 3, 4, 5, 6]
    assert toy.equals_alone(specs[2])


def test_all_workers_killed_at_once_are_replaced(client: Client, tmp_path: Path) -> None:
    """25: bounded time, and each job goes on from its last save."""
    specs = [toy.named_job(tmp_path, f"job{n}", steps=100, save_every=10) for n in range(4)]
    client.submit(specs)
    toy.until(lambda: all(step(client, spec.name) > 12 for spec in specs) and len(client.workers()) == 2)
    for worker in client.workers():
        os.kill(worker["pid"], signal.SIGKILL)
    rows = client.wait([spec.name for spec in specs])
    assert [row["state"] for row in rows] == ["finished"] * 4
    assert all(row["attempt"] >= 2 for row in rows)
    assert toy.equals_alone(specs[3])


@pytest.mark.parametrize("client", [{"resize": "restart", "jobs_per_worker": 1}], indirect=True)
def test_a_group_may_be_started_anew_to_change_its_size(client: Client, tmp_path: Path) -> None:
    """With `resize: restart` Ray Train's own code ends and starts all workers; nothing is lost by it either."""
    first, second = (toy.named_job(tmp_path, name, steps=120, save_every=10) for name in ("first", "second"))
    client.submit([first])
    toy.until(lambda: step(client, "first") > 12)
    (before,) = client.workers()
    client.submit([second])
    toy.until(lambda: step(client, "second") > 0)
    assert before["pid"] not in {worker["pid"] for worker in client.workers()}
    rows = client.wait(["first", "second"])
    assert [row["state"] for row in rows] == ["finished"] * 2
    assert rows[0]["attempt"] >= 2
    assert toy.equals_alone(first)
    assert toy.equals_alone(second)


@pytest.mark.parametrize("client", [{"plan": {"shards": 2}, "max_workers": 4, "idle_s": 60.0}], indirect=True)
def test_a_worker_killed_mid_tick_takes_its_unit_along_and_no_other(client: Client, tmp_path: Path) -> None:
    """Two units of two workers; on the second lies a job that is split over both of its lanes."""
    specs = [in_float64(tmp_path, f"job{n}", steps=100) for n in range(3)]  # the second comes meanwhile
    client.submit(specs)
    toy.until(lambda: step(client, "job2") > 6)
    assert client.status(["job2"])[0]["lanes"] == [0, 1]
    hit, other = sorted(client.workers(), key=lambda unit: unit["jobs"] != ["job2"])
    os.kill(hit["pids"][1], signal.SIGKILL)
    rows = client.wait([spec.name for spec in specs])
    assert [(row["state"], row["attempt"]) for row in rows] == [("finished", 1), ("finished", 1), ("finished", 2)]
    assert other["pids"] in [unit["pids"] for unit in client.workers()]
    assert all(toy.off_alone(spec) < 1e-8 for spec in specs)


@pytest.mark.usefixtures("_ray")
def test_with_auto_a_base_is_held_by_as_many_workers_as_it_takes(tmp_path: Path) -> None:
    """Two bases: for one job a worker has room, for the other's longer sequences only two together."""
    toy.write_base(tmp_path)
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    data = {"path": str(tmp_path / "rows.jsonl")}
    short = in_float64(tmp_path, "short", data={**data, "max_length": 32})
    other = {"model": str(tmp_path / "other"), "dtype": "float64"}
    long = toy.named_job(tmp_path, "long", base=other, data={**data, "max_length": 64})
    outline, both = Outline.load(long.base), Plan(tensor=2)
    layouts, machine = [outline.lay_out(long.adapter)], Machine(gpus=2)
    costs = EstimatedCosts(outline=outline, layouts=layouts, machine=machine, rows=64, dtype=torch.float64)
    memory_bytes = sum(costs.memory(plan).total for plan in (Plan(), both)) / 2 / SPARE
    connect(toy.cluster_spec(tmp_path, memory_gib=memory_bytes / 2**30, max_workers=3))
    client = Client()
    client.submit([short, long])
    assert [row["state"] for row in client.wait(["short", "long"])] == [State.FINISHED] * 2
    plans = [(unit["plan"], len(unit["pids"])) for unit in client.workers()]
    assert sorted(plans, key=str) == [(asdict(Plan()), 1), (asdict(both), 2)]
    reasons = {name: " ".join(event["reason"] for event in client.events(0, name)) for name in ("short", "long")}
    assert f"its base takes 2 workers: {both}" in reasons["long"]
    assert "its base takes" not in reasons["short"]
    assert all(toy.off_alone(spec) < 1e-8 for spec in (short, long))
    client.down()


@pytest.mark.parametrize("client", [{"plan": {"shards": 16}, "max_workers": 16}], indirect=True)
def test_a_plan_that_is_larger_than_the_cluster_says_so(client: Client, tmp_path: Path) -> None:
    client.submit([toy.named_job(tmp_path, "a")])
    text = "waits for machines: 1 unit(s) of 16 workers of its base are asked for, those here have room for 0"
    toy.until(lambda: client.status(["a"])[0]["reason"] == text)


@pytest.mark.parametrize(
    "client", [{"plan": {"tensor": 2}, "stuck_after_s": 30.0, "max_workers": 4, "idle_s": 600.0}], indirect=True
)
def test_a_worker_that_hangs_is_found_out_in_time(client: Client, tmp_path: Path) -> None:
    """Jobs come at different times to the only unit of a group; then one of its workers stands still. Another group,
    of another base, goes on meanwhile."""
    shutil.copytree(tmp_path / "base", tmp_path / "other")
    other = {"base": {"model": str(tmp_path / "other"), "dtype": "float64"}, "steps": 100_000, "save_every": 1000}
    client.submit([toy.named_job(tmp_path, "apart", **other)])
    toy.until(lambda: step(client, "apart") > 0)
    (apart,) = client.workers()
    specs = [in_float64(tmp_path, f"job{n}", steps=40 * (n + 1)) for n in range(2)]
    client.submit(specs[:1])
    toy.until(lambda: step(client, "job0") > 3)
    client.submit(specs[1:])
    toy.until(lambda: step(client, "job1") > 6)
    (unit,) = (worker for worker in client.workers() if worker["pids"] != apart["pids"])
    os.kill(unit["pids"][1], signal.SIGSTOP)
    before = step(client, "apart")
    toy.until(lambda: step(client, "apart") >= before + 3)
    assert unit["pids"] in [worker["pids"] for worker in client.workers()], "it is not found out yet"
    client.pause(["apart"])
    rows = client.wait([spec.name for spec in specs])
    assert [row["state"] for row in rows] == ["finished"] * 2
    assert rows[1]["attempt"] >= 2
    assert apart["pids"] in [worker["pids"] for worker in client.workers()]
    assert (client.status(["apart"])[0]["attempt"], client.status(["apart"])[0]["state"]) == (1, State.PAUSED)
    assert all(toy.off_alone(spec) < 1e-8 for spec in specs)


def in_float64(folder: Path, name: str, **changes: object) -> JobSpec:
    """In which summing in another order makes no difference that could hide a fault."""
    base = {"model": str(folder / "base"), "dtype": "float64"}
    return toy.named_job(folder, name, base=base, **{"save_every": 5, **changes})

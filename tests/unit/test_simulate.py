"""Replays: every way of scheduling conserves work, nothing is lost to faults, baselines are what they are called."""

import json
from pathlib import Path

import made_up
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tlora.baselines import FifoGrouping
from tlora.capacity import Capacity, Load
from tlora.cli import app
from tlora.errors import SpecError
from tlora.placement import Job
from tlora.policy import Planner
from tlora.replays import BASELINES, WAYS, play
from tlora.scheduling import ClusterState
from tlora.simulate import Faults, Replay, Simulator
from tlora.traces import Arrivals, TraceJob, acme_arrivals, draw_jobs, lone_step_s, read_trace

CAPACITY = Capacity.of(made_up.content())
GPUS = 8


def some_jobs(seed: int, count: int = 40, hours: float = 2.0) -> list[TraceJob]:
    random = np.random.default_rng(seed)
    arrivals = Arrivals(
        sorted(random.uniform(0.0, 3600.0 * hours, count)), [int(n) for n in random.choice([1, 1, 2, 8], count)],
        [float(s) for s in random.lognormal(6.0, 1.5, count)],
    )  # fmt: skip
    return draw_jobs(arrivals, made_up.BASES, seed)


def check(replay: Replay, jobs: list[TraceJob], measure: str) -> None:
    by_name = {outcome.name: outcome for outcome in replay.outcomes}
    assert by_name.keys() == {job.name for job in jobs}
    assert len(replay.outcomes) == len(jobs)
    for job in jobs:
        outcome = by_name[job.name]
        assert job.submitted_s <= outcome.started_s < outcome.ended_s
        assert outcome.work_s == pytest.approx(job.gpus * job.duration_s)
        steps = job.duration_s / lone_step_s(CAPACITY, job, measure)
        assert outcome.tokens == pytest.approx(steps * job.load.tokens)
    assert all(busy <= replay.gpus for _, _, busy, _ in replay.samples)


@pytest.mark.parametrize("measure", ["own", "peft"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_does_all_work_once(way: str, measure: str) -> None:
    for seed in range(3):
        jobs = some_jobs(seed)
        replay = play(way, CAPACITY, jobs, GPUS, measure=measure)
        check(replay, jobs, measure)
        if way not in BASELINES:
            assert replay.num_beyond_bound == 0


@pytest.mark.parametrize("faults", [Faults(), Faults(loss_every_s=1200.0, repair_s=600.0)])
def test_steps_are_all_taken_and_none_twice(faults: Faults) -> None:
    """At the rates that were planned, for the time that a job ran."""
    simulator = Simulator(CAPACITY, some_jobs(0), GPUS, faults=faults)
    simulator.run()
    for run in simulator.runs.values():
        assert run.left == pytest.approx(0.0, abs=1e-6 * run.steps)


@pytest.mark.parametrize("spreads", [False, True])
def test_grouping_takes_all_steps_and_gives_no_gpu_or_memory_twice(
    monkeypatch: pytest.MonkeyPatch, spreads: bool
) -> None:
    ends, left = FifoGrouping._end, {}

    def watched(self: FifoGrouping, key: int, now_s: float) -> None:
        members = list(self._groups[key].members.values())
        ends(self, key, now_s)
        gone = {outcome.name for outcome in self.replay.outcomes}
        left.update({member.job.name: member.left / member.steps for member in members if member.job.name in gone})
        assert self.free + sum(group.gpus for group in self._groups.values()) == GPUS
        assert self.free >= 0
        for group in self._groups.values():
            rows = max(group.tokens / group.gpus, group.largest)
            assert len(group.members) == 1 or rows <= group.model.most_tokens(group.ranks)

    monkeypatch.setattr(FifoGrouping, "_end", watched)
    jobs = some_jobs(0)
    play("fifo-spread" if spreads else "fifo-grouping", CAPACITY, jobs, GPUS)
    assert left == {job.name: pytest.approx(0.0, abs=1e-6) for job in jobs}


def test_the_scheduler_sees_an_estimate_within_30_percent_and_never_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, float] = {}
    submit = ClusterState.submit

    def watched(self: ClusterState, job: Job, **rest: bool) -> None:
        seen[job.name] = job.remaining
        submit(self, job, **rest)

    monkeypatch.setattr(ClusterState, "submit", watched)
    jobs = some_jobs(0, count=200)
    play("tlora", CAPACITY, jobs, GPUS)
    over = [seen[job.name] * lone_step_s(CAPACITY, job, "own") / job.duration_s for job in jobs]
    assert 0.7 <= min(over) < 0.75
    assert 1.25 < max(over) <= 1.3
    assert len(set(over)) == len(jobs)


def test_a_queue_that_runs_dry_does_not_end_with_its_longest_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(16, 8, 1024)
    jobs = [TraceJob(f"s{at}", 0.0, 1, 100.0, "left", load, 1.0) for at in range(40)]
    jobs.append(TraceJob("long", 0.0, 1, 1500.0, "left", load, 1.0))
    lasts = [Simulator(CAPACITY, jobs, 2, can_split=False).run().makespan_s]
    monkeypatch.setattr(Planner, "_heads", lambda self, pool: pool.waiting.lowest(3))
    lasts.append(Simulator(CAPACITY, jobs, 2, can_split=False).run().makespan_s)
    assert lasts[0] < 2900.0  # 2750 is all work over all GPUs
    assert lasts[1] > 3400.0


def test_a_node_that_comes_back_has_the_gpus_that_it_had() -> None:
    """The last one of twelve has four."""
    simulator = Simulator(CAPACITY, some_jobs(0), 12, faults=Faults(loss_every_s=600.0, repair_s=60.0))
    simulator.run()
    assert len(simulator.state.workers) <= 12


@given(st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_gpus_are_never_given_twice_and_no_job_that_fits_first_waits(seed: int) -> None:
    jobs = some_jobs(seed)
    for way in ("fcfs", "easy", "sjf-oracle"):
        outcomes = play(way, CAPACITY, jobs, GPUS).outcomes
        gpus = {job.name: job.gpus for job in jobs}
        for at_s in sorted({outcome.started_s for outcome in outcomes} | {outcome.ended_s for outcome in outcomes}):
            used = sum(gpus[one.name] for one in outcomes if one.started_s <= at_s < one.ended_s)
            waiting = [one.name for one in outcomes if one.submitted_s <= at_s < one.started_s]
            assert used <= GPUS
            if way == "sjf-oracle":
                assert all(gpus[name] > GPUS - used for name in waiting)
            elif waiting:
                assert gpus[min(waiting)] > GPUS - used  # names are in the order of submission


def test_first_come_first_served_starts_in_order_and_backfill_does_not_put_off_the_first() -> None:
    jobs = some_jobs(1, count=80)
    started = {way: {one.name: one.started_s for one in play(way, CAPACITY, jobs, GPUS).outcomes} for way in BASELINES}
    order = [started["fcfs"][job.name] for job in jobs]
    assert order == sorted(order)
    assert np.mean(list(started["easy"].values())) < np.mean(order)
    first = next(job.name for job in jobs if started["fcfs"][job.name] > job.submitted_s)
    assert started["easy"][first] <= started["fcfs"][first]


def test_grouping_by_memory_slows_jobs_beyond_their_bound_where_ours_does_not() -> None:
    jobs = [TraceJob(f"j{n}", float(n), 1, 3600.0, "left", Load(16, 1, 512), 1.0) for n in range(30)]
    assert play("fifo-grouping", CAPACITY, jobs, 1).num_beyond_bound > 0
    assert play("tlora", CAPACITY, jobs, 1).num_beyond_bound == 0


@given(st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_nothing_is_lost_when_nodes_go_and_come(seed: int) -> None:
    jobs = some_jobs(seed)
    faults = Faults(loss_every_s=1200.0, repair_s=600.0, spot_nodes=1, spot_s=1800.0, seed=seed)
    replay = play("tlora", CAPACITY, jobs, 16, faults=faults)
    assert {outcome.name for outcome in replay.outcomes} == {job.name for job in jobs}
    for outcome in replay.outcomes:
        assert outcome.running_s > 0.0


def test_losses_cost_what_was_not_saved() -> None:
    jobs = [TraceJob("long", 0.0, 1, 50_000.0, "left", Load(16, 1, 2048), 1.0)]
    late = [TraceJob("last", 60_000.0, 1, 10.0, "left", Load(16, 1, 2048), 1.0)]
    faults = Faults(loss_every_s=2000.0, repair_s=60.0, save_every_s=300.0)
    calm, rough = (play("tlora", CAPACITY, jobs + late, 8, faults=one) for one in (Faults(), faults))
    assert calm.lost_s == 0.0
    assert 0.0 < rough.lost_s < 300.0 * 40
    ends = [{outcome.name: outcome.ended_s for outcome in replay.outcomes}["long"] for replay in (calm, rough)]
    assert ends[1] > ends[0] + rough.lost_s * 0.9


def test_a_replay_can_be_repeated() -> None:
    jobs = some_jobs(3)
    one = play("tlora", CAPACITY, jobs, GPUS)
    two = play("tlora", CAPACITY, jobs, GPUS)
    assert [(o.name, o.ended_s) for o in one.outcomes] == [(o.name, o.ended_s) for o in two.outcomes]


def test_traces_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("submit_s,duration_s,num_gpus\n5,200000,2\n1,10,1\n")
    assert read_trace(path) == Arrivals([1.0, 5.0], [1, 2], [10.0, 86400.0])
    path.write_text("submit_s,num_gpus\n1,1\n")
    with pytest.raises(SpecError, match="want duration_s too"):
        read_trace(path)
    path.write_text("submit_s,duration_s,num_gpus\n1,10,1\n2,-3,1\n")
    with pytest.raises(SpecError, match=r"row 3: .* want numbers above 0"):
        read_trace(path)
    for row in ("inf,10,1", "1,inf,1", "1,10,inf", "1,10,1.5", "-5,10,1", "1e300,10,1"):
        path.write_text(f"submit_s,duration_s,num_gpus\n1,10,1\n{row}\n")
        with pytest.raises(SpecError, match=r"row 3: got submit_s .*; want"):
            read_trace(path)
    path.write_text("submit_s,duration_s,num_gpus\n")
    with pytest.raises(SpecError, match="no job; want at least one"):
        read_trace(path)
    with pytest.raises(SpecError, match=r"job j000000 of the trace asks for 8 GPUs; want at most the cluster's 4"):
        play("fcfs", CAPACITY, [TraceJob("j000000", 0.0, 8, 1.0, "left", Load(2, 1, 512), 1.0)], 4)


def test_drawn_arrivals_have_the_load_and_the_shares_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "cdf.json"
    cdf = {
        "gpu_num": {"Seren": [[1, 50.0], [8, 90.0], [64, 100.0]]},
        "duration_s": {"Seren": [[100, 50.0], [1000, 100.0]]},
    }
    path.write_text(json.dumps(cdf))
    drawn = acme_arrivals(path, load=0.8, gpus=16, days=2.0, seed=1)
    assert drawn.offered() == pytest.approx(0.8 * 16 * 2 * 86400, rel=0.01)
    assert set(drawn.gpus) == {1, 8}
    assert drawn.gpus.count(1) / len(drawn.gpus) == pytest.approx(5 / 9, abs=0.05)  # type: ignore[attr-defined]
    assert drawn == acme_arrivals(path, load=0.8, gpus=16, days=2.0, seed=1)


@pytest.mark.parametrize(
    "content",
    [
        [], {"gpu_num": {"Seren": "x"}}, {"gpu_num": {"Seren": []}}, {"gpu_num": {"Seren": [[0, 100]]}},
        {"gpu_num": {"Seren": [[-1, 100]]}}, {"gpu_num": {"Seren": [[16, 100]]}}, {"gpu_num": {"Seren": [[1, 0]]}},
        {"gpu_num": {"Seren": [[1, 60], [2, 50]]}}, {"duration_s": {"Seren": [[-1, 100]]}},
        {"duration_s": {"Seren": [[1e6, 100], [2e6, 100]]}}, {"duration_s": {"Seren": [[float("nan"), 100]]}},
    ],
)  # fmt: skip
def test_distributions_from_which_no_job_can_be_drawn_are_refused(tmp_path: Path, content: object) -> None:
    cdf = {"gpu_num": {"Seren": [[1, 100]]}, "duration_s": {"Seren": [[100, 50], [1000, 100]]}}
    path = tmp_path / "cdf.json"
    path.write_text(json.dumps(cdf | content if isinstance(content, dict) else content))
    with pytest.raises(SpecError, match=r"cdf\.json: want"):
        acme_arrivals(path, load=0.1, gpus=16, days=0.1, seed=1)


def test_the_command_writes_a_report(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(made_up.content()))
    rows = "".join(f"{60 * n},{500 + 10 * n},{1 + n % 2}\n" for n in range(30))
    (tmp_path / "trace.csv").write_text("submit_s,duration_s,num_gpus\n" + rows)
    arguments = ["simulate", f"{tmp_path}/trace.csv", "--profile", f"{tmp_path}/profile.json", "--gpus", "4", "--sweep"]
    done = CliRunner().invoke(app, [*arguments, "--output", f"{tmp_path}/out"])
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert [row["way"] for row in report["replays"]] == ["tlora", "fcfs", "easy", "fifo-grouping"]
    assert all(row["jobs"] == 30 for row in report["replays"])
    names = {"completion", "throughput", "utilisation", "queue", "slowdown", "sweep"}
    assert {path.stem for path in (tmp_path / "out").glob("*.png")} == names
    assert (tmp_path / "out/report.html").read_text().count("data:image/png") == len(names)
    bad = CliRunner().invoke(app, [*arguments, "--way", "magic"])
    assert isinstance(bad.exception, SpecError)
    assert "magic: no such way of scheduling" in str(bad.exception)
    bad = CliRunner().invoke(app, [*arguments, "--way", "tlora", "--way", "magic"])
    assert not bad.output, "nothing is played before all is known to be right"
    bad = CliRunner().invoke(app, [*arguments, "--output", f"{tmp_path}/trace.csv"])
    assert isinstance(bad.exception, SpecError)
    assert not bad.output

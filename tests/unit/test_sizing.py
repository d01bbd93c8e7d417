"""Workers for whom: where there are not enough for all bases, and where jobs crowd while machines stand idle."""

import math
from dataclasses import replace

import pytest
from made_up import content

from tlora.capacity import BaseModel, Capacity, Load
from tlora.placement import Job, Worker
from tlora.scheduling import ClusterState, Plan, schedule
from tlora.sizing import Group

MODELS = Capacity.of(content()).models
SMALL, LARGE = Load(rank=16, batch=1, length=64), Load(rank=16, batch=8, length=2048)
"""Of jobs whose steps take no longer beside others, and of such as fill a worker."""


def job(name: str, base: str = "left", load: Load = LARGE, **changes: object) -> Job:
    values = {"remaining": 10_000.0, "can_split": False, **changes}
    return Job(name, base, 0.0, load, **values)  # type: ignore[arg-type]


class Cluster:
    """A group on `left`, which does at once what plans say of it."""

    def __init__(self, *jobs: Job, max_workers: int = 8, machines: float = math.inf, workers: int = 1):
        self.state = ClusterState(
            MODELS, jobs_per_worker=8, groups={}, max_workers=max_workers, idle_s=60.0, most_of=lambda base: machines
        )
        self.workers = [Worker(f"w{number}", "node", "left", group="g") for number in range(workers)]
        for worker in self.workers:
            self.state.come(worker)
        self.put(len(self.workers))
        for one in jobs:
            self.state.keep(one, self.workers[0])
        self.state.settle(0.0)

    def put(self, size: int) -> None:
        there = tuple(self.workers)
        self.state.groups = {"g": Group("g", "left", size, there, None)} if there else {}

    def plan(self, now_s: float = 1.0) -> Plan:
        plan = schedule(self.state, now_s)
        self.put(plan.sizes.get("g", len(self.workers)))
        return plan

    def come(self, size: int) -> None:
        while len(self.workers) < size:
            self.workers.append(Worker(f"w{len(self.workers)}", "node", "left", group="g"))
            self.state.come(self.workers[-1])
        self.put(size)


def waiting(*jobs: Job, max_workers: int = 1) -> Plan:
    """On a cluster without workers yet."""
    cluster = Cluster(max_workers=max_workers, workers=0)
    for one in jobs:
        cluster.state.submit(one)
    return cluster.plan()


@pytest.mark.parametrize(("gains", "loses"), [("left", "right"), ("right", "left")])
def test_scarce_workers_go_where_they_add_the_most_joint_speed(gains: str, loses: str) -> None:
    """Eight small jobs on one worker have each nearly the speed alone; of large ones, all together have that of one."""
    small = [job(f"s{number}", gains, SMALL) for number in range(8)]
    large = [job(f"l{number}", loses) for number in range(8)]
    assert waiting(*large, *small).starts == {gains: 1}
    plan = waiting(*large, *small, max_workers=3)
    assert plan.starts == {gains: 1, loses: 2}
    assert plan.reasons["l0"] == "waits for a worker, asked for now"


def test_priority_and_long_waits_go_before_joint_speed() -> None:
    small = [job(f"s{number}", "left", SMALL) for number in range(8)]
    assert waiting(*small, job("l", "right", priority=1)).starts == {"right": 1}
    cluster = Cluster(workers=0, max_workers=1)
    for one in (*small, job("l", "right", remaining=1.0)):
        cluster.state.submit(one)
    for one in small:
        one.submitted_s = 1e6
        cluster.state.deadlines.put(one.name, 2e6)
    assert cluster.plan(1e6).starts == {"right": 1}


def crowd(count: int = 8, **changes: object) -> list[Job]:
    """Within their bounds, however slow."""
    return [job(f"j{number}", bound=100.0, **changes) for number in range(count)]


def test_crowded_jobs_get_the_machines_that_are_here() -> None:
    plan = Cluster(*crowd(), machines=8).plan()
    assert plan.sizes == {"g": 5}
    assert plan.reasons["g"] == "7 job(s) would end sooner on workers of their own: 4 more worker(s)"
    assert Cluster(*crowd(), machines=3).plan().sizes == {"g": 3}
    assert Cluster(*crowd(), machines=8, max_workers=2).plan().sizes == {"g": 2}


@pytest.mark.parametrize(
    ("jobs", "machines"),
    [
        (crowd(), 1),
        (crowd(), math.inf),
        (crowd(remaining=2.0), 8),
        (crowd(load=SMALL), 8),
        (crowd(can_move=False), 8),
        (crowd(1), 8),
    ],
    ids=["no machine is idle", "machines are not known", "nearly done", "not slowed", "cannot be saved", "alone"],
)
def test_others_stay_as_they_are(jobs: list[Job], machines: float) -> None:
    assert not Cluster(*map(replace, jobs), machines=machines).plan().sizes


def test_jobs_beyond_their_bounds_ask_for_machines_that_are_not_here() -> None:
    plan = Cluster(*(job(f"j{number}") for number in range(8)), machines=1).plan()
    assert plan.demand == {"left": 3}
    assert plan.sizes == {"g": 3}


def test_nobody_is_moved_while_others_wait_or_workers_come() -> None:
    cluster = Cluster(*crowd(), machines=8)
    cluster.state.submit(job("waits", "right"))
    plan = cluster.plan()
    assert (plan.sizes, plan.starts) == ({}, {"right": 1})
    cluster = Cluster(*crowd(), machines=8)
    cluster.put(2)
    assert not cluster.plan().sizes


def test_a_crowd_spreads_and_then_rests() -> None:
    cluster, now_s = Cluster(*crowd(), machines=8), 1.0
    sizes = []
    for _ in range(20):
        plan = cluster.plan(now_s)
        cluster.come(plan.sizes.get("g", len(cluster.workers)))
        sizes.append(len(cluster.workers))
        now_s += 30.0
    assert sizes[0] == 5
    assert sizes[-10:] == [8] * 10
    assert all(len(worker.jobs) == 1 for worker in cluster.workers)
    model = MODELS["left"]
    assert isinstance(model, BaseModel)
    for one in cluster.state.jobs.values():
        assert one.rate == pytest.approx(1.0 / model.fastest_s(one.load))

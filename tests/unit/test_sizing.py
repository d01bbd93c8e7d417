"""Workers for whom: where there are not enough for all bases, where jobs are slowed beyond their bounds, and what was
asked for in vain."""

import math
from dataclasses import replace

import pytest
from made_up import content

from tlora.capacity import BaseModel, Capacity, Load
from tlora.placement import Job, Worker
from tlora.scheduling import ClusterState, Plan, Rules, schedule
from tlora.sizing import Group

MODELS = Capacity.of(content()).models
SMALL, LARGE = Load(rank=16, batch=1, length=64), Load(rank=16, batch=8, length=2048)
"""Of jobs whose steps take no longer beside others, and of such as fill a worker."""


def job(name: str, base: str = "left", load: Load = LARGE, **changes: object) -> Job:
    values = {"remaining": 10_000.0, "can_split": False, **changes}
    return Job(name, base, 0.0, load, **values)  # type: ignore[arg-type]


class Cluster:
    """Of machines that come at once, as far as there are any. Jobs given here are on the first worker of `left`."""

    def __init__(self, *jobs: Job, max_workers: int = 8, machines: int = 8, widths: dict[str, int] | None = None,
                 rules: Rules = Rules()):  # noqa: B008  # fmt: skip
        self.machines, self.now_s, self.count = machines, 0.0, 0
        self.groups: dict[str, Group] = {}
        self.state = ClusterState(
            MODELS, jobs_per_worker=8, groups={}, max_workers=max_workers, idle_s=60.0, rules=rules,
            width_of=lambda base: (widths or {}).get(base, 1),
        )  # fmt: skip
        if jobs:
            self.groups["left"] = Group("left", "left", 1, (), None)
            self.come()
            for one in jobs:
                self.state.keep(one, self.groups["left"].workers[0])
            self.state.settle(0.0)

    def submit(self, *jobs: Job) -> None:
        for one in jobs:
            self.state.submit(one)

    def come(self) -> None:
        """Machines for what has been asked for."""
        for name, group in self.groups.items():
            while len(self.groups[name].workers) < group.size and self.num_workers < self.machines:
                self.count += 1
                worker = Worker(f"w{self.count}", "node", group.base, group=name)
                self.state.come(worker)
                self.groups[name] = replace(self.groups[name], workers=(*self.groups[name].workers, worker))

    @property
    def num_workers(self) -> int:
        return sum(len(group.workers) for group in self.groups.values())

    @property
    def sizes(self) -> dict[str, int]:
        return {name: group.size for name, group in self.groups.items()}

    def plan(self, seconds: float = 1.0) -> Plan:
        """After so long; what it says of groups is done."""
        self.now_s += seconds
        for name, group in self.groups.items():
            for worker in group.workers:
                worker.idle_since_s = None if worker.jobs else (worker.idle_since_s or self.now_s)
            busy = any(worker.jobs for worker in group.workers)
            self.groups[name] = replace(group, idle_since_s=None if busy else (group.idle_since_s or self.now_s))
        self.state.groups = dict(self.groups)
        plan = schedule(self.state, self.now_s)
        for name, size in plan.sizes.items():
            leaving = plan.leaves.get(name, frozenset())
            stay = tuple(worker for worker in self.groups[name].workers if worker.name not in leaving)
            for worker in leaving:
                self.state.lose(worker, self.now_s)
            self.groups[name] = replace(self.groups[name], size=size, workers=stay)
        for name in plan.stops:
            for worker in self.groups.pop(name).workers:
                self.state.lose(worker.name, self.now_s)
        self.groups |= {base: Group(base, base, size, (), None) for base, size in plan.starts.items()}
        return plan


def small(base: str = "left", count: int = 8, **changes: object) -> list[Job]:
    return [job(f"s-{base}-{number}", base, SMALL, **changes) for number in range(count)]


def large(base: str = "left", count: int = 8, **changes: object) -> list[Job]:
    return [job(f"l-{base}-{number}", base, **changes) for number in range(count)]


def starts(*jobs: Job, **changes: object) -> dict[str, int]:
    """On a cluster without workers yet."""
    cluster = Cluster(**{"max_workers": 1, **changes})  # type: ignore[arg-type]
    cluster.submit(*jobs)
    return cluster.plan().starts


@pytest.mark.parametrize(("gains", "loses"), [("left", "right"), ("right", "left")])
def test_scarce_workers_go_where_they_add_the_most_joint_speed(gains: str, loses: str) -> None:
    """Eight small jobs on one worker have each nearly the speed alone; of large ones, all together have that of one."""
    jobs = [*large(loses), *small(gains)]
    assert starts(*jobs) == {gains: 1}
    assert starts(*jobs, max_workers=3) == {gains: 1, loses: 2}


def test_what_a_worker_cannot_hold_within_bounds_does_not_count() -> None:
    """Two jobs that bear no slowdown go on two workers: together they are not twice as fast as one."""
    strict = large("left", 8, bound=1.05)
    assert starts(*strict, *small("right", 2)) == {"right": 1}


def test_a_base_that_nobody_has_measured_gets_its_first_worker_first() -> None:
    assert starts(*small("left"), *small("new", 1)) == {"new": 1}
    assert starts(*small("left", 24), *small("new", 24), max_workers=2) == {"left": 1, "new": 1}


def test_priority_and_then_long_waits_go_before_joint_speed() -> None:
    assert starts(*small("left"), *large("right", 1, priority=1)) == {"right": 1}
    cluster = Cluster(max_workers=2)
    (late,) = large("right", 1)
    cluster.submit(*small("left", 40, priority=5), late, *large("right", 8))
    cluster.state.deadlines.put(late.name, 0.5)
    assert cluster.plan().starts == {"left": 1, "right": 1}, "of its base the one that waited too long goes first alone"


def test_what_is_kept_for_a_late_unit_of_several_nobody_else_gets() -> None:
    for is_late, wanted in ((True, {}), (False, {"left": 4})):
        cluster = Cluster(*small("left", 1), max_workers=4, widths={"right": 4})
        (wide,) = large("right", 1, priority=1)
        cluster.submit(wide, *large("left", 8, bound=1.05))
        if is_late:
            cluster.state.deadlines.put(wide.name, 0.5)
        assert cluster.plan().sizes == wanted


def crowd(count: int = 8, **changes: object) -> list[Job]:
    return large("left", count, **changes)


def test_jobs_beyond_their_bounds_get_more_workers_until_they_are_within() -> None:
    cluster = Cluster(*crowd())
    plan = cluster.plan()
    assert plan.sizes == {"left": 2}
    assert plan.reasons["left"] == "1 worker(s) with jobs slowed beyond bounds: 1 more worker(s)"
    sizes = []
    for _ in range(40):
        cluster.come()
        cluster.plan(30.0)
        sizes.append(cluster.sizes["left"])
    assert set(sizes[-20:]) == {sizes[-1]}, "it comes to rest"
    assert sizes[-1] == 4, "three on one take a little more than three times as long"
    model = MODELS["left"]
    assert isinstance(model, BaseModel)
    assert not cluster.state.slowed
    for one in cluster.state.jobs.values():
        assert one.slowdown <= one.bound * (1 + 1e-9)


def test_jobs_of_many_sizes_come_to_rest_too() -> None:
    """Large ones leave first, and head the order of the fullest from then on."""
    batches = (32, 32, 32, 4, 4, 4)
    jobs = [job(f"j{at}", load=Load(16, batch, 1024), bound=1.5) for at, batch in enumerate(batches)]
    cluster = Cluster(*jobs)
    sizes = []
    for _ in range(60):
        cluster.come()
        cluster.plan(30.0)
        sizes.append(cluster.sizes["left"])
    assert set(sizes[-30:]) == {sizes[-1]}
    assert not cluster.state.slowed


@pytest.mark.parametrize(
    ("jobs", "options"),
    [
        (crowd(bound=100.0), {}),
        (crowd(remaining=2.0), {}),
        (crowd(can_move=False), {}),
        (crowd(1, bound=1.0), {}),
        (crowd(), {"max_workers": 1}),
        (crowd(), {"rules": Rules(relieves=False)}),
        (crowd(), {"rules": Rules(is_elastic=False)}),
    ],
    ids=["within bounds", "nearly done", "cannot be saved", "alone", "no room", "by restart", "not elastic"],
)
def test_others_stay_as_they_are(jobs: list[Job], options: dict) -> None:
    assert not Cluster(*map(replace, jobs), **options).plan().sizes


def test_nobody_is_relieved_while_others_wait() -> None:
    cluster = Cluster(*crowd())
    cluster.submit(job("waits", "right"))
    plan = cluster.plan()
    assert (plan.sizes, plan.starts) == ({}, {"right": 1})


def test_workers_that_have_not_come_are_taken_back_once_nobody_needs_them() -> None:
    """What an autoscaler would still bring, and others could not have."""
    cluster = Cluster(*crowd(), machines=1)
    assert cluster.plan().sizes == {"left": 2}
    assert not cluster.plan().sizes, "it is waited for"
    cluster.submit(job("waits", "right"))
    plan = cluster.plan()
    assert plan.sizes == {"left": 1}
    assert plan.reasons["left"] == "1 worker(s) that have not come: nobody waits for them any more"
    cluster.state.end("waits", cluster.now_s)
    assert cluster.plan().sizes == {"left": 2}
    for one in crowd()[1:]:
        cluster.state.end(one.name, cluster.now_s)
    assert cluster.plan().sizes == {"left": 1}


def test_a_job_that_waited_and_is_gone_takes_its_worker_back() -> None:
    cluster = Cluster(*large("left", 8, bound=100.0), machines=1)
    cluster.submit(job("more", bound=1.0))
    assert cluster.plan().sizes == {"left": 2}
    cluster.state.end("more", cluster.now_s)
    assert cluster.plan().sizes == {"left": 1}


def test_gains_are_finite_where_a_model_is() -> None:
    assert math.isfinite(MODELS["left"].token_s)


def test_a_base_whose_unit_is_larger_than_the_cluster_keeps_nothing_from_others() -> None:
    """Even where its jobs have waited as long as they may."""
    cluster = Cluster(max_workers=2, widths={"right": 3}, rules=Rules(patience_s=10.0, patience_lone=0.0))
    cluster.submit(*small("right", 1, priority=1), *small("left", 1))
    plan = cluster.plan(20.0)
    assert plan.starts == {"left": 1}
    assert "3 workers" in plan.reasons["s-right-0"]


def test_a_job_that_has_waited_too_long_gets_a_worker_of_another_base() -> None:
    """Whose jobs wait in its place, saved, and never leave one free by themselves."""
    cluster = Cluster(*crowd(2, bound=100.0), max_workers=1, machines=1)
    (late,) = large("right", 1, remaining=3.0)
    cluster.submit(late)
    seen: list[str] = []
    for round_ in range(12):
        plan = cluster.plan(30.0)
        if round_ == 2:
            assert not seen, "not before its time"
            cluster.state.deadlines.put(late.name, 0.5)
        for name in plan.moves:
            seen.append(name)
            one = cluster.state.jobs[name]
            cluster.state.free(one, cluster.now_s)
            cluster.state.end(name, cluster.now_s)
            cluster.submit(replace(one, workers=(), rate=0.0))
        cluster.come()
        if late.workers:
            break
    assert sorted(seen) == ["l-left-0", "l-left-1"]
    assert late.workers
    assert late.workers[0].base == "right"
    cluster.state.end(late.name, cluster.now_s)
    for _ in range(6):
        cluster.plan(30.0)
        cluster.come()
    assert any(cluster.state.jobs[name].workers for name in seen), "it goes back after that"

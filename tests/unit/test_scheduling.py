"""The simple policy: first come, first served, on the least loaded worker that has room."""

from dataclasses import replace

import pytest

from tlora.scheduling import ClusterState, Group, Plan, WaitingJob, Worker, schedule


def job(name: str, base: str = "b", at_s: float = 0.0) -> WaitingJob:
    return WaitingJob(name, base, at_s)


def worker(name: str, *jobs: str, leaving: bool = False) -> Worker:
    return Worker(name, frozenset(jobs), leaving)


def group(
    *workers: Worker, name: str = "g", base: str = "b", size: int = 0, idle_since_s: float | None = None
) -> Group:
    return Group(name, base, size or len(workers), workers, idle_since_s)


def state(*groups: Group, waiting: tuple[WaitingJob, ...] = (), max_workers: int = 4) -> ClusterState:
    return ClusterState(waiting, groups, max_workers, jobs_per_worker=2, idle_s=60.0)


def test_nothing_to_do() -> None:
    assert schedule(state(), 0.0) == Plan()
    assert schedule(state(group(worker("w", "a"))), 0.0) == Plan()


def test_the_earlier_job_has_the_emptier_worker() -> None:
    waiting = (job("late", at_s=2.0), job("early", at_s=1.0))
    plan = schedule(state(group(worker("u", "a"), worker("v")), waiting=waiting), 3.0)
    assert plan.places == {"early": "v", "late": "u"}
    assert not plan.sizes
    assert not plan.starts


def test_a_full_group_grows_as_far_as_the_cluster_goes() -> None:
    full = group(worker("u", "a", "b"))
    three = tuple(job(f"j{n}") for n in range(3))
    assert schedule(state(full, waiting=three), 0.0).sizes == {"g": 3}
    assert schedule(state(full, waiting=three, max_workers=2), 0.0).sizes == {"g": 2}
    plan = schedule(state(full, waiting=three, max_workers=1), 0.0)
    assert not plan.sizes
    assert "every worker of its base is full, and all 1 workers" in plan.reasons["j0"]


def test_workers_that_are_coming_are_counted() -> None:
    coming = group(worker("u", "a", "b"), size=2)
    plan = schedule(state(coming, waiting=(job("c"), job("d"))), 0.0)
    assert not plan.sizes
    assert plan.reasons["c"] == "waits for 1 worker(s) that are starting"


def test_a_base_has_a_group_of_its_own() -> None:
    plan = schedule(state(group(worker("u")), waiting=(job("a", "other"), job("b", "other"), job("c", "other"))), 0.0)
    assert not plan.places
    assert plan.starts == {"other": 2}
    crowded = state(group(worker("u")), waiting=(job("a", "other"),), max_workers=1)
    assert not schedule(crowded, 0.0).starts
    assert "no worker has its base" in schedule(crowded, 0.0).reasons["a"]


def test_two_new_bases_share_what_is_free() -> None:
    waiting = tuple(job(f"{base}{n}", base) for base in "xy" for n in range(6))
    starts = schedule(state(waiting=waiting), 0.0).starts
    assert sum(starts.values()) == 4


def test_a_leaving_worker_gives_up_its_jobs_and_then_goes() -> None:
    leaving = group(worker("u", "a", leaving=True), worker("v"))
    plan = schedule(state(leaving, waiting=(job("b"),)), 0.0)
    assert plan.places == {"b": "v"}
    assert plan.moves == {"a"}
    assert not plan.leaves
    empty = schedule(state(group(worker("u", leaving=True), worker("v"))), 0.0)
    assert empty.leaves == {"g": {"u"}}
    assert empty.sizes == {"g": 1}


def test_an_idle_worker_goes_while_the_others_work() -> None:
    busy = group(worker("u", "a"), replace(worker("v"), idle_since_s=0.0))
    assert not schedule(state(busy), 59.0).leaves
    plan = schedule(state(busy), 61.0)
    assert plan.leaves == {"g": {"v"}}
    assert plan.sizes == {"g": 1}
    assert not schedule(state(busy, waiting=(job("b"),)), 61.0).leaves


def test_a_group_whose_workers_all_leave_ends() -> None:
    plan = schedule(state(group(worker("u", leaving=True))), 0.0)
    assert plan.stops == {"g"}
    assert not plan.leaves
    assert not plan.sizes


def test_a_worker_too_many_does_not_end_the_others() -> None:
    """One was replaced while it was let go, so that more are there than were asked for."""
    busy = group(worker("u", "a"), worker("v", leaving=True), size=1)
    plan = schedule(state(busy), 0.0)
    assert plan.leaves == {"g": {"v"}}
    assert plan.sizes == {"g": 1}
    assert not plan.stops


@pytest.mark.parametrize(("now_s", "ends"), [(59.0, False), (61.0, True)])
def test_an_idle_group_ends_in_time(now_s: float, ends: bool) -> None:
    idle = state(group(worker("u"), idle_since_s=0.0))
    assert bool(schedule(idle, now_s).stops) is ends
    wanted = replace(idle, waiting=(job("a"),))
    assert not schedule(wanted, now_s).stops


def test_the_same_state_gives_the_same_plan() -> None:
    waiting = tuple(job(name) for name in "fedcba")
    one = state(group(worker("u"), worker("v")), waiting=waiting)
    assert schedule(one, 5.0) == schedule(replace(one, waiting=waiting[::-1]), 5.0)

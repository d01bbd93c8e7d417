"""The live side of a plan: places on workers, workers asked for and let go, on bases of which nothing is measured."""

import math
from collections.abc import Sequence

import made_up
import pytest

from tlora.capacity import Capacity, Load
from tlora.placement import Job, Unmeasured, Worker
from tlora.scheduling import ClusterState, Plan, Rules, schedule
from tlora.sizing import Group


def job(name: str, base: str = "b", at_s: float = 0.0, **changes: object) -> Job:
    return Job(name, base, at_s, can_split=False, **changes)  # type: ignore[arg-type]


def worker(name: str, *jobs: str, leaving: bool = False, idle_since_s: float | None = None) -> tuple[Worker, list[str]]:
    return Worker(name, "node", "b", is_leaving=leaving, group="g", idle_since_s=idle_since_s), list(jobs)


def state(
    *workers: tuple[Worker, list[str]],
    waiting: Sequence[Job] = (),
    size: int = 0,
    max_workers: int = 4,
    idle_since_s: float | None = None,
    rules: Rules = Rules(),  # noqa: B008
    width: int = 1,
    most: float = math.inf,
) -> ClusterState:
    """One group `g` on base `b`, if there are workers."""
    there = tuple(one for one, _ in workers)
    groups = {"g": Group("g", "b", size or len(there), there, idle_since_s)} if there else {}
    made = ClusterState(
        {}, rules=rules, jobs_per_worker=2, groups=groups, max_workers=max_workers, idle_s=60.0,
        width_of=lambda base: width, most_of=lambda base: most,
    )  # fmt: skip
    for one in there:
        made.come(one)
    for one, names in workers:
        for name in names:
            made.keep(job(name), one)
    made.settle(0.0)
    for one_job in waiting:
        made.submit(one_job)
    return made


def test_nothing_to_do() -> None:
    assert schedule(state(), 0.0) == Plan()
    plan = schedule(state(worker("w", "a")), 0.0)
    assert not any((plan.places, plan.moves, plan.sizes, plan.leaves, plan.starts, plan.stops, plan.reasons))


def test_the_earlier_job_has_the_emptier_worker() -> None:
    waiting = (job("late", at_s=2.0), job("early", at_s=1.0))
    plan = schedule(state(worker("u", "a"), worker("v"), waiting=waiting), 3.0)
    assert plan.places == {"early": ("v",), "late": ("u",)}
    assert not plan.sizes
    assert not plan.starts


def test_priority_goes_before_the_earlier_one() -> None:
    waiting = (job("early", at_s=1.0), job("late", at_s=2.0, priority=1))
    plan = schedule(state(worker("u", "a"), waiting=waiting, max_workers=1), 3.0)
    assert plan.places == {"late": ("u",)}


def test_a_quota_holds_only_its_user_back() -> None:
    waiting = (job("a", user="ada"), job("b", user="ada", at_s=1.0), job("c", user="bob", at_s=2.0))
    crowd = state(worker("u"), worker("v"), waiting=waiting, rules=Rules(quotas={"ada": 1}))
    plan = schedule(crowd, 3.0)
    assert set(plan.places) == {"a", "c"}
    assert plan.reasons["b"] == "waits for the quota of user 'ada': 1 worker(s)"
    crowd.end("a", 4.0)
    assert set(schedule(crowd, 4.0).places) == {"b"}


def test_a_full_group_grows_as_far_as_the_cluster_goes() -> None:
    three = tuple(job(f"j{n}") for n in range(3))
    for max_workers, sizes in ((4, {"g": 3}), (2, {"g": 2}), (1, {})):
        full = state(worker("u", "a", "b"), waiting=three, max_workers=max_workers)
        plan = schedule(full, 0.0)
        assert plan.sizes == sizes
    assert "every worker of its base is full, and all 1 workers" in plan.reasons["j0"]
    assert plan.demand == {"b": 3}


def test_units_of_several_workers_grow_as_far_as_the_cluster_goes() -> None:
    waiting = [job(f"j{n}") for n in range(20)]
    assert schedule(state(waiting=waiting, max_workers=7, width=3), 0.0).starts == {"b": 2}
    full = schedule(state(worker("u", "a", "c"), waiting=waiting, max_workers=5, width=3), 0.0)
    assert not full.sizes
    assert "all 5 workers of the cluster are taken" in full.reasons["j0"]
    assert schedule(state(worker("u", "a", "c"), waiting=waiting, max_workers=6, width=3), 0.0).sizes == {"g": 2}


def test_workers_that_are_coming_are_counted() -> None:
    plan = schedule(state(worker("u", "a", "b"), size=2, waiting=(job("c"), job("d"))), 0.0)
    assert not plan.sizes
    assert plan.reasons["c"] == "waits for 1 worker(s) that are starting"
    few = schedule(state(worker("u", "a", "b"), size=2, waiting=(job("c"), job("d")), most=1), 0.0)
    assert few.reasons["c"] == ("waits for machines: 2 worker(s) of its base are asked for, those here have room for 1")


def test_a_base_has_a_group_of_its_own() -> None:
    others = (job("a", "other"), job("b", "other"), job("c", "other"))
    plan = schedule(state(worker("u", "x"), waiting=others), 0.0)
    assert not plan.places
    assert plan.starts == {"other": 2}
    crowded = schedule(state(worker("u", "x"), waiting=(job("a", "other"),), max_workers=1), 0.0)
    assert not crowded.starts
    assert "no worker has its base" in crowded.reasons["a"]


def test_an_idle_worker_of_a_group_keeps_its_base() -> None:
    """What another base needs is a group of its own; where all workers are taken, those that idle make room at once."""
    plan = schedule(state(worker("u", idle_since_s=0.0), idle_since_s=0.0, waiting=(job("a", "other"),)), 1.0)
    assert not plan.places
    assert plan.starts == {"other": 1}
    assert not plan.stops
    full = state(worker("u", idle_since_s=0.0), idle_since_s=0.0, waiting=(job("a", "other"),), max_workers=1)
    plan = schedule(full, 1.0)
    assert not plan.places
    assert plan.stops == {"g"}


def test_two_new_bases_share_what_is_free() -> None:
    waiting = tuple(job(f"{base}{n}", base) for base in "xy" for n in range(6))
    assert sum(schedule(state(waiting=waiting), 0.0).starts.values()) == 4


def test_a_leaving_worker_gives_up_its_jobs_and_then_goes() -> None:
    plan = schedule(state(worker("u", "a", leaving=True), worker("v"), waiting=(job("b"),)), 0.0)
    assert plan.places == {"b": ("v",)}
    assert set(plan.moves) == {"a"}
    assert not plan.leaves
    empty = schedule(state(worker("u", leaving=True, idle_since_s=0.0), worker("v")), 0.0)
    assert empty.leaves == {"g": {"u"}}
    assert empty.sizes == {"g": 1}
    saving = schedule(state(worker("u", leaving=True), worker("v")), 0.0)
    assert not saving.leaves, "a job that goes elsewhere has not left it yet"


def test_an_idle_worker_goes_while_the_others_work() -> None:
    idle = (worker("u", "a"), worker("v", idle_since_s=0.0))
    assert not schedule(state(*idle), 59.0).leaves
    plan = schedule(state(worker("u", "a"), worker("v", idle_since_s=0.0)), 61.0)
    assert plan.leaves == {"g": {"v"}}
    assert plan.sizes == {"g": 1}
    wanted = schedule(state(worker("u", "a"), worker("v", idle_since_s=0.0), waiting=(job("b"),)), 61.0)
    assert not wanted.leaves


def test_a_group_whose_workers_all_leave_ends() -> None:
    plan = schedule(state(worker("u", leaving=True, idle_since_s=0.0)), 0.0)
    assert plan.stops == {"g"}
    assert not plan.leaves
    assert not plan.sizes


def test_a_worker_too_many_does_not_end_the_others() -> None:
    """One was replaced while it was let go, so that more are there than were asked for."""
    plan = schedule(state(worker("u", "a"), worker("v", leaving=True, idle_since_s=0.0), size=1), 0.0)
    assert plan.leaves == {"g": {"v"}}
    assert plan.sizes == {"g": 1}
    assert not plan.stops


@pytest.mark.parametrize(("now_s", "ends"), [(59.0, False), (61.0, True)])
def test_an_idle_group_ends_in_time(now_s: float, ends: bool) -> None:
    assert bool(schedule(state(worker("u"), idle_since_s=0.0), now_s).stops) is ends
    assert not schedule(state(worker("u"), idle_since_s=0.0, waiting=(job("a"),)), now_s).stops


def test_the_same_state_gives_the_same_plan() -> None:
    one, other = (
        schedule(state(worker("u"), worker("v"), waiting=[job(name) for name in names]), 5.0)
        for names in ("fedcba", "abcdef")
    )
    assert one == other


def test_a_huge_batch_holds_nobody_up() -> None:
    """What a job that may not be split would gain by so many workers is not asked."""
    counted = 0

    class Counting(Unmeasured):
        def fastest_s(self, load: Load, gpus: int = 1) -> float:
            nonlocal counted
            counted += 1
            assert counted < 1000
            return super().fastest_s(load, gpus)

    huge = job("huge", load=Load(rank=8, batch=10**9, length=2048))
    made = ClusterState({"b": Counting(2)}, jobs_per_worker=2, groups={}, max_workers=4)
    made.submit(huge)
    made.submit(job("a"))
    assert schedule(made, 0.0).starts == {"b": 1}


def measured(rules: Rules = Rules(), *, workers: int) -> ClusterState:  # noqa: B008
    """Of bases whose ticks are known, on workers that are a given."""
    state = ClusterState(Capacity.of(made_up.content()).models, rules=rules)
    for number in range(workers):
        state.come(Worker(f"w{number}", "n"))
    return state


def test_a_job_that_its_users_quota_holds_back_keeps_nobody_else_waiting() -> None:
    """However long it has waited."""
    state = measured(Rules(quotas={"x": 1}, patience_s=10.0, patience_lone=0.0), workers=1)
    for name in ("first", "held"):
        state.submit(Job(name, "left", 0.0, Load(16, 8, 2048), remaining=1e6, user="x", can_split=False))
        schedule(state, 1.0)
    assert schedule(state, 100.0).reasons["held"].startswith("waits for the quota")
    state.submit(Job("other", "left", 101.0, Load(16, 8, 2048), remaining=1e6, user="y", can_split=False))
    schedule(state, 101.0)
    state.come(Worker("w1", "n"))
    assert schedule(state, 102.0).places == {"other": ("w1",)}


def test_jobs_that_quotas_hold_back_do_not_hide_one_that_could_go() -> None:
    """In a state made anew: all wait there, and none has been looked at."""
    state = measured(Rules(quotas={"x": 1}), workers=2)
    for at in range(9):
        one = Job(f"x{at}", "left", 0.0, Load(16, 8, 2048), remaining=1e3, user="x", can_split=False)
        state.submit(one, is_new=False)
    state.submit(Job("y", "left", 0.0, Load(16, 8, 2048), remaining=1e4, user="y", can_split=False), is_new=False)
    assert set(schedule(state, 1.0).places) == {"x0", "y"}


def test_no_job_takes_the_place_of_one_whose_worker_leaves() -> None:
    state = measured(workers=1)
    state.submit(Job("long", "left", 0.0, Load(16, 8, 2048), remaining=1e6, can_split=False))
    schedule(state, 0.0)
    state.drain(state.workers["w0"], is_leaving=True)
    state.submit(Job("short", "left", 1.0, Load(16, 8, 2048), remaining=2e4, can_split=False))
    assert not schedule(state, 1.0).places

"""Workers for whom, where there are not enough for all bases."""

import pytest
from made_up import content

from tlora.capacity import Capacity, Load
from tlora.placement import Job, Worker
from tlora.scheduling import ClusterState, schedule
from tlora.sizing import Group

MODELS = Capacity.of(content()).models
SMALL, LARGE = Load(rank=16, batch=1, length=64), Load(rank=16, batch=8, length=2048)
"""Of jobs whose steps take no longer beside others, and of such as fill a worker."""


def job(name: str, base: str = "left", load: Load = LARGE, **changes: object) -> Job:
    values = {"remaining": 10_000.0, "can_split": False, **changes}
    return Job(name, base, 0.0, load, **values)  # type: ignore[arg-type]


def small(base: str = "left", count: int = 8, **changes: object) -> list[Job]:
    return [job(f"s-{base}-{number}", base, SMALL, **changes) for number in range(count)]


def large(base: str = "left", count: int = 8, **changes: object) -> list[Job]:
    return [job(f"l-{base}-{number}", base, **changes) for number in range(count)]


def cluster(*jobs: Job, max_workers: int = 1, widths: dict[str, int] | None = None) -> ClusterState:
    """Without workers yet."""
    state = ClusterState(
        MODELS, jobs_per_worker=8, groups={}, max_workers=max_workers, width_of=lambda base: (widths or {}).get(base, 1)
    )
    for one in jobs:
        state.submit(one)
    return state


def starts(*jobs: Job, max_workers: int = 1) -> dict[str, int]:
    return schedule(cluster(*jobs, max_workers=max_workers), 1.0).starts


@pytest.mark.parametrize(("gains", "loses"), [("left", "right"), ("right", "left")])
def test_scarce_workers_go_where_they_add_the_most_joint_speed(gains: str, loses: str) -> None:
    """Eight small jobs on one worker have each nearly the speed alone; of large ones, all together have that of one."""
    jobs = [*large(loses), *small(gains)]
    assert starts(*jobs) == {gains: 1}
    assert starts(*jobs, max_workers=3) == {gains: 1, loses: 2}


def test_what_a_worker_cannot_hold_within_bounds_does_not_count() -> None:
    """Two jobs that bear no slowdown go on two workers: together they are not twice as fast as one."""
    assert starts(*large("left", 8, bound=1.05), *small("right", 2)) == {"right": 1}


def test_a_base_that_nobody_has_measured_gets_its_first_worker_first() -> None:
    assert starts(*small("left"), *small("new", 1)) == {"new": 1}
    jobs = [*small("left", 24), *small("new", 24)]
    assert starts(*jobs, max_workers=2) == {"left": 1, "new": 1}
    state = cluster(*jobs, max_workers=2)
    state.groups = {"new": Group("new", "new", 1, (), None)}
    assert schedule(state, 1.0).starts == {"left": 1}, "it is on its way"


def test_priority_goes_before_joint_speed() -> None:
    assert starts(*small("left"), *large("right", 1, priority=1)) == {"right": 1}
    assert starts(*small("left", priority=-1), *large("right", 1), max_workers=2) == {"left": 1, "right": 1}


def test_a_long_wait_goes_before_priority_for_one_worker() -> None:
    """The other jobs of its base do not go with it."""
    late = job("late", "right")
    state = cluster(*small("left", 40, priority=5), late, *large("right", 8), max_workers=2)
    state.deadlines.put(late.name, 0.5)
    assert schedule(state, 1.0).starts == {"left": 1, "right": 1}


@pytest.mark.parametrize(("is_late", "widths", "wanted"), [
    (False, {"right": 4}, {"left": 2}),
    (True, {"right": 4}, {}),
    (True, {"right": 6}, {"left": 2}),
])  # fmt: skip
def test_what_is_kept_for_a_late_unit_of_several_nobody_else_gets(
    is_late: bool, widths: dict[str, int], wanted: dict[str, int]
) -> None:
    """Unless it could never be: a third base's three workers leave two of five."""
    wide = job("wide", "right", priority=1)
    state = cluster(wide, *large("left", 8), max_workers=5, widths=widths)
    state.groups = {"other": Group("other", "other", 3, (), None)}
    if is_late:
        state.deadlines.put(wide.name, 0.5)
    plan = schedule(state, 1.0)
    assert plan.starts == wanted
    if widths["right"] > 5:
        assert plan.reasons["wide"] == "its base takes 6 workers: more than the 5 that the cluster may have"


def test_room_is_not_kept_for_a_second_unit_that_can_never_come() -> None:
    wide = job("wide", "right")
    state = cluster(wide, *large("left", 8), max_workers=7, widths={"right": 4})
    state.groups = {"right": Group("right", "right", 1, (Worker("u", "node", "right", group="right"),), None)}
    state.come(state.groups["right"].workers[0])
    state.keep(job("here", "right", bound=1.0), state.groups["right"].workers[0])
    state.settle(0.0)
    state.deadlines.put(wide.name, 0.5)
    assert schedule(state, 1.0).starts == {"left": 3}

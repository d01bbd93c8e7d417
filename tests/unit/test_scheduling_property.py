"""What holds of every plan, over arbitrary events: bounds, memory, nothing lost, nobody starves."""

import copy
from collections.abc import Callable, Sequence

import made_up
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tlora import policy
from tlora.capacity import BaseModel, Capacity, Load
from tlora.placement import Claim, Dealt, Job, Model, Worker, deal
from tlora.policy import Planner
from tlora.scheduling import ClusterState, Costs, Plan, Rules, schedule
from tlora.sizing import Group

CAPACITY = Capacity.of(made_up.content())
CAPACITY.models["right"] = Capacity.of(made_up.content(floor_ms=190.0)).models["right"]
"""There, small ticks are dear, so that sharing pays."""
for model in CAPACITY.models.values():
    model.memory_bytes = 30e9  # so that it matters
LOADS = st.builds(Load, st.sampled_from((2, 16, 64)), st.sampled_from((1, 2, 4, 8)), st.sampled_from((512, 1024, 2048)))
JOBS = st.builds(
    dict, load=LOADS, base=st.sampled_from(made_up.BASES), gpus=st.sampled_from((1, 1, 2, 8)),
    bound=st.sampled_from((1.0, 1.5, 3.0, 8.0)), priority=st.integers(-1, 1), user=st.sampled_from("xy"),
    remaining=st.floats(1.0, 1e6), can_split=st.booleans(), can_move=st.booleans(),
)  # fmt: skip
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), JOBS),
        st.tuples(st.sampled_from(("end", "lose", "come")), st.integers(0, 99)),
        st.tuples(st.just("pass"), st.floats(1.0, 1e5)),
    ),
    max_size=40,
)  # fmt: skip
RULES = st.builds(
    Rules, shares=st.booleans(), urgency=st.sampled_from(("shortest", "submitted")), is_elastic=st.booleans(),
    preempts=st.booleans(), quotas=st.sampled_from(({}, {"x": 1})),
)  # fmt: skip


def fresh(rules: Rules = Rules(), workers: int = 5, jobs_per_worker: int = 6) -> ClusterState:  # noqa: B008
    state = ClusterState(CAPACITY.models, rules=rules, jobs_per_worker=jobs_per_worker)
    for at in range(workers):
        state.come(Worker(f"w{at}", f"n{at // 2}"))
    return state


class Play:
    """Events on a state, and the jobs that should be there."""

    def __init__(self, state: ClusterState):
        self.state, self.now_s, self.open = state, 0.0, set[str]()
        self.num_jobs = self.num_workers = 0
        self.plan = Plan()
        self.to_go: dict[str, float] = {}
        """Steps of each job before the last event."""

    def event(self, kind: str, value: object) -> None:
        state = self.state
        self.to_go = {name: job.remaining for name, job in state.jobs.items()}
        if kind == "submit":
            assert isinstance(value, dict)
            name = f"j{self.num_jobs}"
            self.num_jobs += 1
            self.open.add(name)
            state.submit(Job(name, submitted_s=self.now_s, **value))
        elif kind == "pass":
            assert isinstance(value, float)
            self.now_s += value
        elif kind == "come":
            self.num_workers += 1
            state.come(Worker(f"new{self.num_workers}", "n9"))
        elif kind == "end" and self.open:
            assert isinstance(value, int)
            name = sorted(self.open)[value % len(self.open)]
            self.open.remove(name)
            state.end(name, self.now_s)
        elif kind == "lose" and state.workers:
            assert isinstance(value, int)
            state.lose(sorted(state.workers)[value % len(state.workers)], self.now_s)
        self.plan = schedule(state, self.now_s)


def check(play: Play) -> None:
    state = play.state
    assert state.jobs.keys() == play.open
    for name, job in state.jobs.items():
        places = [
            name in state.pool(job.base).waiting.keys, name in state.by_quota.get(job.user, {}), bool(job.workers)
        ]  # fmt: skip
        assert places.count(True) == 1, (name, places)
        assert all(worker.jobs[name] is job for worker in job.workers)
        assert all(state.workers.get(worker.name) is worker for worker in job.workers)
        assert job.remaining <= play.to_go.get(name, job.remaining)  # what was done is not done again
        assert len(set(job.workers)) == len(job.workers) <= job.load.batch
        if job.workers:
            assert job.rate > 0.0
            assert job.slowdown <= job.bound * (1 + 1e-6) or job.alone_s * job.bound < split_s(state, job)
    for name, places in play.plan.places.items():
        assert places == tuple(worker.name for worker in state.jobs[name].workers)
    assert all(state.jobs[name].can_move and not state.jobs[name].workers for name in play.plan.moves)
    plan = play.plan
    assert {*plan.places, *plan.moves, *plan.loads} <= plan.reasons.keys()
    for worker in state.workers.values():
        check_worker(state, worker)
    assert state.num_idle == sum(not worker.jobs for worker in state.workers.values())
    for user, quota in state.rules.quotas.items():
        assert sum(len(job.workers) for job in state.jobs.values() if job.user == user) <= quota


def split_s(state: ClusterState, job: Job) -> float:
    """The least step time that it could have: one of a bound that no number of workers keeps gets that."""
    return min(state._split_s(job, count) for count in range(1, job.load.batch + 1 if job.can_split else 2))


def check_worker(state: ClusterState, worker: Worker) -> None:
    jobs = worker.jobs.values()
    assert len(jobs) <= state.jobs_per_worker
    assert all(worker in job.workers and job.base == worker.base for job in jobs)
    if not jobs:
        return
    model = state.pool(worker.base).model
    assert isinstance(model, BaseModel)
    tokens = sum(worker.tokens.values())
    assert len(jobs) == 1 or tokens <= model.budget * (1 + 1e-9)
    is_one = len(jobs) == 1 and tokens == next(iter(jobs)).load.length  # sequence: nothing smaller can be asked for
    assert is_one or model.peak_bytes(tokens, sum(job.load.rank for job in jobs)) <= model.memory_bytes * (1 + 1e-9)
    if not state.rules.shares:
        assert len(jobs) == 1


@given(RULES, EVENTS)
@settings(max_examples=150, deadline=None)
def test_every_plan_keeps_what_it_promises(rules: Rules, events: list[tuple[str, object]]) -> None:
    play = Play(fresh(rules))
    for kind, value in events:
        play.event(kind, value)
        check(play)


def bound_ignored(model: Model, claims: Sequence[Claim]) -> Dealt:
    return deal(model, claims)._replace(is_within=True)


@pytest.mark.parametrize(
    ("where", "what", "fault"),
    [
        (policy, "deal", bound_ignored),
        (BaseModel, "most_tokens", lambda self, ranks: np.inf),
        (Planner, "_allowance", lambda self, job: np.inf),
        (ClusterState, "lose", lambda self, worker, now_s: self.drop_worker(worker, now_s)),
        (ClusterState, "free", lambda self, job, now_s: None),
        (Job, "done_by", lambda self, now_s: setattr(self, "remaining", self.remaining + 1.0)),
    ],
    ids=("bounds", "memory", "quotas", "jobs of a lost worker", "places that are given up", "steps"),
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, where: object, what: str, fault: object) -> None:
    monkeypatch.setattr(where, what, fault)

    @given(RULES, EVENTS)
    @settings(max_examples=300, deadline=None, database=None, phases=[Phase.generate], derandomize=True)
    def plays(rules: Rules, events: list[tuple[str, object]]) -> None:
        play = Play(fresh(rules))
        for kind, value in events:
            play.event(kind, value)
            check(play)

    with pytest.raises((AssertionError, KeyError)):
        plays()


@given(EVENTS)
@settings(max_examples=40, deadline=None)
def test_the_same_state_gives_the_same_plan(events: list[tuple[str, object]]) -> None:
    play = Play(fresh())
    for kind, value in events:
        play.event(kind, value)
    play.now_s += 1.0
    play.state.submit(Job("last", "left", play.now_s, Load(16, 4, 512)))
    other = copy.deepcopy(play.state)
    assert schedule(other, play.now_s) == schedule(play.state, play.now_s)


def flood(state: ClusterState, *, days: float, name: str, base: str = "left") -> float:
    """Short jobs come half as fast again as they can run; when does the long one begin?"""
    random, now_s, count = np.random.default_rng(0), 0.0, 0
    state.submit(Job(name, base, 0.0, Load(16, 8, 2048), remaining=86400.0))
    while now_s < days * 86400.0:
        if state.jobs[name].workers:
            return now_s
        count += 1
        state.submit(Job(f"s{count}", "left", now_s, Load(16, 8, 1024), remaining=float(random.uniform(400, 800))))
        schedule(state, now_s)
        now_s += 100.0
        for job in [job for job in state.jobs.values() if job.workers and job.name != name]:
            job.done_by(now_s)
            if job.remaining <= 0.0:
                state.end(job.name, now_s)
    return np.inf


def longest_wait_s(state: ClusterState, name: str) -> float:
    """Of the long job of a flood."""
    rules = state.rules
    limit_s = rules.patience_s + rules.patience_lone * 86400.0 * state.jobs[name].alone_s
    num_before = (limit_s - rules.patience_s) / 100.0
    short_s = 600.0 * CAPACITY.models["left"].alone_s(Load(16, 8, 1024)) + 50.0  # until the next plan
    work_s = num_before * short_s / len(state.workers)
    return max(limit_s, work_s)


def test_nobody_starves() -> None:
    """A wait is bounded: by a job's patience, then by the work of those whose patience ended before its own."""
    rules = Rules(patience_s=7200.0, patience_lone=0.1)
    state = fresh(rules, workers=2)
    for at in range(4):
        state.submit(Job(f"first{at}", "left", 0.0, Load(16, 8, 1024), remaining=600.0))
    schedule(state, 0.0)
    waited_s = flood(state, days=3.0, name="long")
    assert 3600.0 < waited_s <= longest_wait_s(state, "long") + 3600.0


@pytest.mark.parametrize("urgency", ["shortest", "submitted"])
def test_nobody_starves_for_want_of_a_worker_of_its_base(urgency: str) -> None:
    """It takes one over, from jobs that are saved, and wait on."""
    rules = Rules(patience_s=7200.0, patience_lone=0.1, urgency=urgency, preempts=urgency == "shortest")
    state = fresh(rules, workers=2)
    for at in range(4):
        state.submit(Job(f"first{at}", "left", 0.0, Load(16, 8, 1024), remaining=600.0))
    schedule(state, 0.0)
    waited_s = flood(state, days=1.0, name="other", base="right")
    assert 3600.0 < waited_s <= longest_wait_s(state, "other") + 3600.0
    (worker,) = state.jobs["other"].workers
    assert worker.base == "right"
    assert sorted({each.base for each in state.workers.values()}) == ["left", "right"]


def test_without_ageing_it_would_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_age", lambda self: None)
    state = fresh(Rules(patience_s=7200.0, patience_lone=0.1), workers=2)
    for at in range(4):
        state.submit(Job(f"first{at}", "left", 0.0, Load(16, 8, 1024), remaining=600.0))
    schedule(state, 0.0)
    assert np.isinf(flood(state, days=3.0, name="long"))


def two_jobs(loads: tuple[Load, Load], rules: Rules, bound: float = 3.0) -> ClusterState:
    """On one worker whose small ticks are dear, the second after the first."""
    state = ClusterState(Capacity.of(made_up.content(floor_ms=190.0)).models, rules=rules)
    state.come(Worker("w", "n"))
    for at, load in enumerate(loads):
        state.submit(Job(f"j{at}", "left", float(at), load, bound=bound, remaining=1e5))
        schedule(state, float(at))
    return state


@pytest.mark.parametrize(
    ("loads", "bound", "together"),
    [
        ((Load(16, 8, 2048), Load(16, 1, 512)), 3.0, True),  # its token is cheaper beside others than alone
        ((Load(16, 8, 2048), Load(16, 8, 2048)), 3.0, False),  # nothing is gained
        ((Load(16, 1, 512), Load(16, 1, 512)), 3.0, True),  # there is room
        ((Load(16, 8, 2048), Load(16, 1, 512)), 1.05, False),  # it would be slowed beyond its bound
    ],
)
def test_jobs_merge_where_that_gains_and_nobody_is_slowed_too_much(
    loads: tuple[Load, Load], bound: float, together: bool
) -> None:
    state = two_jobs(loads, Rules(preempts=False, gain=0.05), bound)
    assert bool(state.jobs["j1"].workers) is together


def test_only_jobs_of_one_base_share() -> None:
    state = fresh(workers=1)
    state.submit(Job("a", "left", 0.0, Load(16, 1, 512), remaining=1e5))
    state.submit(Job("b", "right", 0.0, Load(16, 1, 512), remaining=1e5))
    plan = schedule(state, 0.0)
    assert set(plan.places) == {"a"}
    assert plan.reasons["b"].startswith("waits")


def test_a_far_shorter_job_takes_the_place_of_a_long_one_whose_state_can_be_saved() -> None:
    for can_move, moves in ((True, {"long"}), (False, set())):
        state = fresh(workers=1)
        state.submit(Job("long", "left", 0.0, Load(16, 8, 2048), remaining=1e5, can_move=can_move))
        schedule(state, 0.0)
        state.submit(Job("short", "left", 1.0, Load(16, 8, 2048), remaining=100.0))
        plan = schedule(state, 1.0)
        assert plan.moves == moves
        assert bool(state.jobs["short"].workers) is can_move


def test_idle_workers_go_to_a_large_job_and_come_back_when_another_needs_one() -> None:
    state = fresh(workers=4)
    state.submit(Job("large", "left", 0.0, Load(16, 8, 2048), remaining=1e5))
    schedule(state, 0.0)
    assert len(state.jobs["large"].workers) == 4
    state.submit(Job("other", "left", 10.0, Load(16, 4, 2048), remaining=1e5))
    plan = schedule(state, 10.0)
    assert "gives 2 worker(s) to other" in plan.reasons["large"]
    assert len(state.jobs["other"].workers) >= 1


def test_a_change_must_repay_itself() -> None:
    for remaining, workers in ((10.0, 1), (1e5, 4)):
        state = fresh(workers=4)
        state.submit(Job("large", "left", 0.0, Load(16, 8, 2048), remaining=remaining))
        schedule(state, 0.0)
        assert len(state.jobs["large"].workers) == workers


def test_a_plan_touches_what_the_event_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many workers, the workers looked at after one event are few."""
    state = fresh(workers=400)
    for at in range(1500):
        state.submit(Job(f"j{at}", made_up.BASES[at % 2], 0.0, Load(16, 1, 1024), remaining=1e5))
    schedule(state, 0.0)
    looked_at: set[str] = set()
    fits: Callable[..., float] = Planner._joint

    def spy(self: Planner, job: Job, worker: Worker, *rest: object) -> float:
        looked_at.add(worker.name)
        return fits(self, job, worker, *rest)

    monkeypatch.setattr(Planner, "_joint", spy)
    state.submit(Job("new", "left", 1.0, Load(16, 1, 512), remaining=10.0))
    schedule(state, 1.0)
    assert len(looked_at) <= 30


def test_priority_goes_before_shortness() -> None:
    for priority, first in ((0, "short"), (2, "long")):
        state = fresh(Rules(shares=False), workers=1)
        state.submit(Job("short", "left", 0.0, Load(16, 8, 1024), remaining=1000.0))
        state.submit(Job("long", "left", 0.0, Load(16, 8, 1024), remaining=9000.0, priority=priority))
        assert set(schedule(state, 0.0).places) == {first}  # two steps of priority: 16 times as short


def test_demand_is_the_workers_on_which_everybody_is_within_its_bound() -> None:
    """A full tick of a worker holds 16,384 tokens; a job within its bound needs a share of each."""
    for count in (1, 20, 80):
        state = ClusterState(CAPACITY.models, jobs_per_worker=64, groups={}, max_workers=2)
        for at in range(count):
            state.submit(Job(f"j{at}", "left", 0.0, Load(16, 4, 2048), bound=2.0, can_split=False))
        need = sum(job.need for job in state.jobs.values())
        plan = schedule(state, 0.0)
        assert plan.demand == {"left": -(-need // CAPACITY.models["left"].budgets[-1])}
        assert plan.starts == {"left": min(plan.demand["left"], 2)}
        assert "base left" in plan.reasons
    assert plan.demand["left"] > 2


def loaded(state: ClusterState) -> str:
    state.come(Worker("w0", "n", "left"))
    state.submit(Job("j", "right", 0.0, Load(16, 8, 2048), remaining=1e6))
    schedule(state, 1.0)
    return "j"


def split(state: ClusterState) -> str:
    state.come(Worker("w0", "n", "left"))
    state.submit(Job("j", "left", 0.0, Load(16, 8, 2048), remaining=1e6))
    schedule(state, 0.0)
    state.come(Worker("w1", "n", "left"))
    assert schedule(state, 1.0).places == {"j": ("w0", "w1")}
    return "j"


def moved(state: ClusterState) -> str:
    state.come(Worker("w0", "n", "right"))
    for at in range(2):
        state.submit(Job(f"j{at}", "right", 0.0, Load(16, 1, 512), remaining=1e6, can_split=False))
    assert schedule(state, 0.0).places == {"j0": ("w0",), "j1": ("w0",)}
    state.come(Worker("w1", "n", "right"))
    ((name, workers),) = schedule(state, 1.0).places.items()
    assert workers == ("w1",)
    return name


def preempted(state: ClusterState) -> str:
    state.come(Worker("w0", "n", "left"))
    for name, remaining in (("long", 1e6), ("short", 2e4)):
        state.submit(Job(name, "left", 0.0, Load(16, 8, 2048), remaining=remaining, can_split=False))
        plan = schedule(state, 1.0)
    assert plan.moves == {"long"}
    return "short"


@pytest.mark.parametrize(
    ("cost", "change"), [("load_s", loaded), ("split_s", split), ("move_s", moved), ("move_s", preempted)]
)
def test_a_change_costs_what_it_takes(cost: str, change: Callable[[ClusterState], str]) -> None:
    """So much later begins, or goes on, whom it was made for."""
    begins = []
    for seconds in (1.0, 101.0):
        state = ClusterState(CAPACITY.models, costs=Costs(**{cost: seconds}))
        begins.append(state.jobs[change(state)].since_s)
    assert begins[1] - begins[0] == pytest.approx(100.0)


def test_a_job_of_several_workers_stays_on_one_node_where_it_can() -> None:
    state = fresh(workers=5)  # two, two and one on a node
    planner = Planner(state, 0.0, Plan())
    assert [[worker.name for worker in planner._idle("", count)] for count in (1, 2, 3)] == [
        ["w4"], ["w0", "w1"], ["w0", "w1", "w2"],
    ]  # fmt: skip
    for at, node in enumerate("abab"):
        state.come(Worker(f"busy{at}", node, "right"))
        small = Job(f"small{at}", "right", 0.0, Load(16, 1, 512), remaining=1e5, can_split=False)
        state.submit(small)
        planner._put(small, [state.workers[f"busy{at}"]], "")
    wide = Job("wide", "right", 0.0, Load(16, 2, 512), gpus=2, remaining=1e5)
    state.submit(wide)
    wide.fewest = 2
    partners = planner._partners(wide, state.pool("right"))
    assert len(partners) == 2
    assert len({worker.node for worker, _ in partners}) == 1


def two_half_empty(state: ClusterState, tokens: int) -> None:
    """Two workers of one base, each with a job."""
    for at in range(2):
        state.come(Worker(f"w{at}", "n", "right", group="g"))
        state.submit(Job(f"j{at}", "right", 0.0, Load(16, 1, tokens), remaining=1e6, can_split=False))
        schedule(state, 0.0)
    assert all(len(worker.jobs) == 1 for worker in state.workers.values())


@pytest.mark.parametrize(
    ("tokens", "remaining", "gathers"),
    [(512, 1e6, True), (512, 100.0, False), (32768, 1e6, False)],  # repays itself; does not; they would lose too much
)
def test_jobs_gather_on_fewer_workers_where_another_base_waits(tokens: int, remaining: float, gathers: bool) -> None:
    state = ClusterState(CAPACITY.models, rules=Rules(preempts=False))
    two_half_empty(state, tokens)
    state.submit(Job("k", "left", 1.0, Load(16, 4, 2048), remaining=remaining, can_split=False))
    plan = schedule(state, 1.0)
    assert bool(state.jobs["k"].workers) is gathers
    if gathers:
        assert plan.places["k"] == ("w0",)
        assert plan.places["j0"] == ("w1",)
        assert plan.loads == {"w0": "left"}
        assert state.jobs["j0"].workers == state.jobs["j1"].workers


def test_a_group_gives_up_a_worker_that_it_can_do_without_to_a_base_that_waits() -> None:
    """Its jobs move first; then it idles, and leaves; then there is room."""
    state = ClusterState(CAPACITY.models, groups={}, max_workers=2, rules=Rules(preempts=False))
    two_half_empty(state, 512)
    workers = tuple(state.workers.values())
    state.groups = {"g": Group("g", "right", 2, workers, None)}
    state.submit(Job("k", "left", 1.0, Load(16, 4, 2048), remaining=1e6, can_split=False))
    plan = schedule(state, 1.0)
    assert plan.places == {"j0": ("w1",)}
    assert "makes room for k" in plan.reasons["j0"]
    state.place(state.jobs["j0"], [state.workers["w0"]], 1.0, 1.0)  # it is there until it is saved
    state.submit(Job("l", "left", 1.0, Load(16, 4, 2048), remaining=1e6, can_split=False))
    assert not schedule(state, 1.5).places
    state.place(state.jobs["j0"], [state.workers["w1"]], 1.0, 1.0)
    state.workers["w0"].idle_since_s = 1.0
    plan = schedule(state, 2.0)
    assert not plan.places
    assert plan.leaves == {"g": frozenset({"w0"})}
    state.drop_worker("w0", 2.0)
    state.groups = {"g": Group("g", "right", 1, workers[1:], None)}
    assert schedule(state, 3.0).starts == {"left": 1}


@given(EVENTS)
@settings(max_examples=100, deadline=None)
def test_what_gathering_costs_is_what_is_lost(events: list[tuple[str, object]]) -> None:
    play = Play(fresh(workers=4))
    for kind, value in events:
        play.event(kind, value)
    planner = Planner(play.state, play.now_s, Plan())
    for worker in play.state.workers.values():
        pool = play.state.pool(worker.base)
        homes, lost = planner._homes(worker, pool) if worker.jobs else ([], 0.0)
        touched = {home.name: home for _, home in homes}
        before = worker.speed + sum(home.speed for home in touched.values())
        after = 0.0
        for home in touched.values():
            claims = [job.claim for job in home.jobs.values()]
            after += deal(pool.model, [*claims, *(job.claim for job, to in homes if to is home)]).speed
        assert not homes or lost == pytest.approx(before - after)


def test_a_job_that_makes_room_says_for_whom_in_a_cluster_too() -> None:
    state = ClusterState(CAPACITY.models, groups={}, max_workers=1)
    state.come(Worker("w0", "n", "left", group="g"))
    state.groups = {"g": Group("g", "left", 1, tuple(state.workers.values()), None)}
    for name, remaining in (("long", 1e6), ("short", 2e4)):
        state.submit(Job(name, "left", 0.0, Load(16, 8, 2048), remaining=remaining, can_split=False))
        plan = schedule(state, 1.0)
    assert plan.moves == {"long"}
    assert plan.reasons["long"].startswith("makes room for short")

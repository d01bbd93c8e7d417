"""The roster on a real journal: what users ask for, what workers say, and what survives a scheduler's death."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import made_up
import pytest
from desk import STORAGE, FakeWorker, RosterDesk, spec_of

from tlora.actors.journal import Journal
from tlora.actors.messages import JobReport
from tlora.actors.records import GroupRecord
from tlora.actors.register import Foretold
from tlora.actors.roster import Roster
from tlora.cluster import ClusterSpec
from tlora.errors import StateError
from tlora.job import State
from tlora.plan import Plan as BasePlan
from tlora.scheduling import Plan


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[RosterDesk]:
    desk = RosterDesk(tmp_path)
    yield desk
    desk.journal.close()


@pytest.fixture
def running(desk: RosterDesk) -> FakeWorker:
    """A worker with jobs a and b."""
    desk.submit("a", "b")
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.plan()
    worker.say()
    worker.say()
    assert desk.states() == {"a": "running", "b": "running"}
    return worker


def test_the_same_job_again_is_the_same_job(desk: RosterDesk) -> None:
    desk.submit("a")
    assert desk.roster.submit([spec_of("a"), spec_of("b")], 101.0) == ["b"]
    with pytest.raises(StateError, match=r"job a was submitted with other content: adapter.rank: 8 was, 4 is asked"):
        desk.roster.submit([spec_of("c"), spec_of("a", adapter={"rank": 4})], 102.0)
    assert list(desk.states()) == ["a", "b"]


def test_a_job_goes_to_its_end(desk: RosterDesk, running: FakeWorker) -> None:
    attempt = running.orders.jobs["a"].attempt
    running.say(a=JobReport(attempt, State.FINISHED), b=JobReport(attempt, State.FAILED, "no disk"))
    assert desk.states() == {"a": "finished", "b": "failed"}
    assert desk.roster.status(["b"])[0]["reason"] == "no disk"
    assert not running.orders.jobs


def test_what_is_said_of_an_earlier_placement_is_stale(desk: RosterDesk, running: FakeWorker) -> None:
    running.say(a=JobReport(0, State.FINISHED))
    assert desk.states()["a"] == "running"


def test_pause_and_resume(desk: RosterDesk, running: FakeWorker) -> None:
    desk.roster.pause(["a"], desk.now_s)
    orders = running.say()
    assert list(orders.jobs) == ["b"]
    assert not orders.drop
    assert desk.states()["a"] == "running"  # until its worker has let go of it
    running.say()
    assert desk.states()["a"] == "paused"
    desk.roster.resume(["a"], desk.now_s)
    desk.plan()
    assert running.say().jobs["a"].attempt == 2


def test_a_pause_is_taken_back_before_it_is_carried_out(desk: RosterDesk, running: FakeWorker) -> None:
    desk.roster.pause(["a"], desk.now_s)
    desk.roster.resume(["a"], desk.now_s)
    assert set(running.say().jobs) == {"a", "b"}


@pytest.mark.parametrize(("keep", "dropped"), [(False, {"a"}), (True, set())])
def test_cancel(desk: RosterDesk, running: FakeWorker, keep: bool, dropped: set[str]) -> None:
    desk.roster.cancel(["a"], desk.now_s, keep=keep)
    assert running.say().drop == dropped
    running.say()
    assert desk.states()["a"] == "cancelled"
    desk.roster.cancel(["a"], desk.now_s)
    with pytest.raises(StateError, match="job a is cancelled"):
        desk.roster.pause(["a"], desk.now_s)


def test_jobs_without_a_place_are_paused_and_cancelled_at_once(desk: RosterDesk) -> None:
    desk.submit("a", "b")
    desk.roster.pause(["a"], desk.now_s)
    desk.roster.cancel(["b"], desk.now_s)
    assert desk.states() == {"a": "paused", "b": "cancelled"}


def test_unknown_jobs_are_named(desk: RosterDesk) -> None:
    for ask in (desk.roster.pause, desk.roster.resume, desk.roster.cancel):
        with pytest.raises(StateError, match="job nobody is not known here"):
            ask(["nobody"], desk.now_s)


def test_a_silent_worker_is_lost_and_its_jobs_wait_again(desk: RosterDesk, running: FakeWorker) -> None:
    desk.roster.cancel(["b"], desk.now_s)
    desk.wait(9.0)
    assert desk.states()["a"] == "running"
    desk.wait(2.0)
    assert desk.states() == {"a": "queued", "b": "cancelled"}
    other = FakeWorker(desk, "v", rank=1)
    other.say()
    desk.plan()
    assert other.say().jobs["a"].attempt == 2


def test_a_job_that_loses_its_worker_on_its_way_elsewhere_is_restarted(
    desk: RosterDesk, running: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts once, whatever the journal's troubles."""
    desk.roster.let_go_of_all(desk.now_s)
    with monkeypatch.context() as broken:
        broken.setattr(desk.journal, "change", lambda *given: (_ for _ in ()).throw(OSError("no disk")))
        with pytest.raises(OSError, match="no disk"):
            desk.wait(20.0)
    desk.wait(1.0)
    assert [(row["state"], row["restarts"]) for row in desk.roster.status()] == [("queued", 1)] * 2
    assert [desk.roster.gains["restarts", "g", name] for name in ("a", "b")] == [1, 1]


def test_a_worker_that_comes_back_gives_up_what_has_gone_elsewhere(desk: RosterDesk, running: FakeWorker) -> None:
    desk.wait(20.0)
    other = FakeWorker(desk, "v", rank=1)
    other.say()
    desk.plan()
    assert not running.say().jobs


def test_a_process_that_takes_a_place_over_ends_the_one_before(desk: RosterDesk, running: FakeWorker) -> None:
    FakeWorker(desk, "next", rank=0).say()
    assert desk.states() == {"a": "queued", "b": "queued"}


def test_a_scheduler_that_is_started_again_knows_all(desk: RosterDesk, running: FakeWorker) -> None:
    desk.roster.pause(["b"], desk.now_s)
    desk.journal.close()
    desk.open()
    number = running.orders.number
    assert desk.states() == {"a": "running", "b": "running"}
    assert list(running.say().jobs) == ["a"]
    assert running.orders.number > number
    running.say()
    assert desk.states() == {"a": "running", "b": "paused"}
    assert running.orders.jobs["a"].attempt == 1


def test_jobs_that_were_cancelled_or_failed_go_on_if_their_user_says_so(desk: RosterDesk, running: FakeWorker) -> None:
    attempt = running.orders.jobs["a"].attempt
    desk.roster.cancel(["b"], desk.now_s)
    running.say(a=JobReport(attempt, State.FAILED, "no disk"))
    running.say()
    assert desk.states() == {"a": "failed", "b": "cancelled"}
    desk.roster.resume(["a", "b"], desk.now_s)
    desk.journal.close()
    (desk.folder / "journal.db").unlink()  # also if the head is lost
    desk.open()
    assert [(row["state"], row["reason"]) for row in desk.roster.status()] == [("queued", "")] * 2
    desk.submit()
    worker = FakeWorker(desk, "next")
    worker.say()
    desk.plan()
    worker.say()
    assert worker.orders.jobs["a"].attempt > attempt
    worker.say(a=JobReport(worker.orders.jobs["a"].attempt, State.FINISHED))
    with pytest.raises(StateError, match="job a is finished: nothing of it is left to do"):
        desk.roster.resume(["a"], desk.now_s)


@pytest.mark.parametrize("is_head_lost", [False, True])
def test_what_was_wished_of_placed_jobs_outlives_the_scheduler(
    desk: RosterDesk, running: FakeWorker, is_head_lost: bool
) -> None:
    """Before their worker has heard of it."""
    desk.submit("c", "d")
    other = FakeWorker(desk, "v", rank=1)
    other.say()
    desk.plan()
    other.say()
    assert set(other.say().jobs) == {"c", "d"}
    desk.roster.pause(["a"], desk.now_s)
    desk.roster.cancel(["b"], desk.now_s)
    desk.roster.cancel(["c"], desk.now_s, keep=True)
    desk.roster.pause(["d"], desk.now_s)
    desk.roster.resume(["d"], desk.now_s)
    desk.journal.close()
    if is_head_lost:
        (desk.folder / "journal.db").unlink()
    desk.open()
    wished = {"a": "paused", "b": "cancelled", "c": "cancelled"}
    if is_head_lost:
        assert desk.states() == {**wished, "d": "queued"}
        assert [row["reason"] for row in desk.roster.status("abcd")] == [
            "paused by its user", "cancelled by its user", "cancelled by its user", ""
        ]  # fmt: skip
        desk.roster.resume(["a", "b"], desk.now_s)
        desk.submit()
        running.say()
        desk.plan()
        assert {*running.say().jobs} == {"a", "b"}, "nothing of a wish is left"
        return
    orders = running.say()
    assert (set(orders.jobs), orders.drop) == (set(), {"b"})
    running.say()
    assert set(other.say().jobs) == {"d"}
    other.say()
    assert desk.states() == {**wished, "d": "running"}


def test_what_a_job_had_reached_outlives_the_scheduler(desk: RosterDesk, running: FakeWorker) -> None:
    attempt = running.orders.jobs["a"].attempt
    told = JobReport(
        attempt, State.FINISHED, step=9, num_steps=9, tokens=70, loss=0.5, eval_loss=0.25, tokens_per_s=3.0
    )
    desk.roster.pause(["b"], desk.now_s)
    running.say(a=told)
    running.say()
    rows = desk.roster.status()
    assert [row["step"] for row in rows] == [9, 3]
    desk.journal.close()
    (desk.folder / "journal.db").unlink()  # the head is lost, too
    desk.open()
    assert [row["state"] for row in desk.roster.status()] == ["finished", "paused"]
    for row, before in zip(desk.roster.status(), rows, strict=True):
        for key in ("step", "num_steps", "tokens", "loss", "eval_loss"):
            assert row[key] == before[key]


def test_places_of_workers_that_never_come_back_are_lost(desk: RosterDesk, running: FakeWorker) -> None:
    desk.journal.close()
    desk.now_s += 60.0
    desk.open()
    desk.wait(1.0)
    assert desk.states()["a"] == "running"
    desk.wait(10.0)
    assert desk.states() == {"a": "queued", "b": "queued"}
    assert desk.roster.gains["restarts", "", "a"] == 1, "of no group that is known"


def test_a_drained_node_is_left(desk: RosterDesk, running: FakeWorker) -> None:
    assert desk.roster.plan(desk.now_s, {"node"}).moves == {"a", "b"}
    assert not running.say().jobs
    running.say()
    assert desk.states() == {"a": "queued", "b": "queued"}


def test_why_a_job_waits_is_told(desk: RosterDesk) -> None:
    desk.submit("a")
    desk.plan()
    assert desk.roster.status()[0]["reason"] == "waits for 2 worker(s) that are starting"
    desk.roster.plans[desk.roster.base_of(desk.roster.entry("a"))] = BasePlan(shards=2, tensor=4)
    desk.roster.room = [4, 3, 1]
    desk.plan()
    assert "2 unit(s) of 8 workers of its base are asked for, those here have room for 0" in desk.roster.waits["a"]
    desk.roster.room = [4, 9]
    desk.plan()
    assert "those here have room for 1" in desk.roster.waits["a"]


@pytest.mark.parametrize(
    "output",
    ["/elsewhere/a", "/storage", "/storage/../etc", "/storage/_tlora/journal", "/storage2/a", "/storage/_tlora"],
)
def test_outputs_stay_below_the_storage(desk: RosterDesk, output: str) -> None:
    with pytest.raises(StateError, match="lies outside of the folder of this cluster's outputs, /storage"):
        desk.roster.submit([spec_of("a", output=output)], 1.0)
    assert not desk.states()


def test_outputs_have_a_folder_of_their_own_where_the_storage_is_none(tmp_path: Path) -> None:
    spec = ClusterSpec(storage="s3://bucket/x", outputs=str(tmp_path / "out"))
    roster = Roster(spec, Journal(tmp_path / "state" / "journal.db", str(tmp_path / "storage")), 0.0)
    roster.submit([spec_of("a", output="a")], 1.0)
    assert roster.entry("a").spec["output"] == str(tmp_path / "out" / "a")
    with pytest.raises(StateError, match="lies outside of the folder of this cluster's outputs"):
        roster.submit([spec_of("b", output=str(tmp_path / "b"))], 1.0)


def test_a_dismissed_worker_is_told_to_end_and_counts_no_more(desk: RosterDesk) -> None:
    desk.submit()
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.roster.dismiss("w")
    assert worker.say().stop
    assert not desk.roster.workers


def test_a_scheduler_that_slept_blames_nobody(desk: RosterDesk, running: FakeWorker) -> None:
    desk.wait(1.0)
    desk.now_s += 3600.0
    desk.wait(5.0)
    assert desk.states()["a"] == "running"


def test_outputs_do_not_lie_in_one_another(desk: RosterDesk) -> None:
    desk.submit("a")
    for output in ("out/a", "out/a/best", "out"):
        with pytest.raises(StateError, match=r"lies in that of job a, or holds it"):
            desk.roster.submit([spec_of("b", output=output)], 1.0)
    with pytest.raises(StateError, match=r"job c: .* lies in that of job b"):
        desk.roster.submit([spec_of("b", output="out/b"), spec_of("c", output="out/b/best")], 1.0)
    desk.roster.submit([spec_of("b", output="out/b")], 1.0)
    assert desk.roster.entry("b").spec["output"] == f"{STORAGE}/out/b"


def test_a_job_that_is_being_cancelled_cannot_be_paused(desk: RosterDesk, running: FakeWorker) -> None:
    desk.roster.cancel(["a"], desk.now_s)
    with pytest.raises(StateError, match="job a is being cancelled"):
        desk.roster.pause(["a"], desk.now_s)


@pytest.mark.parametrize("keep", [True, False])
def test_a_job_that_is_being_cancelled_goes_on_if_its_user_says_so(
    desk: RosterDesk, running: FakeWorker, keep: bool
) -> None:
    desk.roster.cancel(["a"], desk.now_s, keep=keep)
    desk.roster.train(spec_of("a"), {"step": 9}, desk.now_s)
    assert desk.roster.entry("a").wish, "its sweep does not say so"
    desk.roster.resume(["a"], desk.now_s)
    running.say()
    running.say()
    assert desk.states()["a"] == "running"
    assert "a" in running.orders.jobs
    assert not desk.roster.status(["a"])[0]["reason"]


def test_a_job_that_its_worker_cannot_take_in_yet_says_why(desk: RosterDesk) -> None:
    desk.submit("a")
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.plan()
    worker.say()
    worker.say(a=JobReport(worker.orders.jobs["a"].attempt, State.ATTACHING, "waits: no disk"))
    assert desk.roster.status(["a"])[0]["reason"] == "waits: no disk"


def test_a_running_job_that_has_to_wait_says_why(desk: RosterDesk, running: FakeWorker) -> None:
    told = JobReport(running.orders.jobs["a"].attempt, State.ATTACHING, "waits for room", 3, 9)
    running.say(a=told)
    (row,) = desk.roster.status(["a"])
    assert (row["reason"], row["step"], row["num_steps"]) == ("waits for room", 3, 9)
    desk.roster.pause(["a"], 200.0)
    running.say(a=told)
    running.say()
    (row,) = desk.roster.status(["a"])
    assert (row["state"], row["reason"]) == ("paused", "paused by its user")


def test_measured_ticks_set_the_shares_and_the_size_of_ticks(desk: RosterDesk, running: FakeWorker) -> None:
    """Ticks of known cost: once they foretell one another, plans are made by them."""
    for turn in range(1, 200):
        tokens = (256, 1024, 4096)[turn % 3]
        running.report = replace(
            running.report, ticks=turn, tick_s=0.05 + 1e-4 * tokens, tick_tokens=tokens, tick_jobs=2, tick_ranks=16
        )
        running.say()
    assert not running.orders.token_budget
    desk.plan()
    orders = running.say()
    assert orders.token_budget >= 2048
    assert set(orders.shares) == {"a", "b"}
    number = orders.number
    desk.plan()
    assert running.say().number == number


@pytest.mark.parametrize(("order", "first"), [("shortest", "short"), ("submitted", "long")])
def test_a_profile_is_planned_by_before_any_tick(desk: RosterDesk, tmp_path: Path, order: str, first: str) -> None:
    content = made_up.content()
    content["ticks"] = [{**row, "base": "m"} for row in content["ticks"]]
    (tmp_path / "profile.json").write_text(json.dumps(content))
    changes = {"profile": str(tmp_path / "profile.json"), "order": order, "jobs_per_worker": 1}
    desk.spec = desk.spec.model_copy(update=changes)
    desk.journal.close()
    desk.open()
    for name, steps in (("long", 9000), ("short", 10)):
        desk.roster.submit([spec_of(name, steps=steps)], desk.now_s)
        desk.now_s += 1.0
    desk.submit()
    worker = FakeWorker(desk, "w")
    worker.say()
    desk.plan()
    orders = worker.say()
    assert set(orders.jobs) == set(orders.shares) == {first}
    assert orders.token_budget


def test_a_job_that_is_to_be_elsewhere_leaves_first(desk: RosterDesk, running: FakeWorker) -> None:
    other = FakeWorker(desk, "v", rank=1)
    other.say()
    desk.roster.take_places(Plan(places={"a": ("v",)}, reasons={"a": "there is more room"}), desk.now_s)
    assert set(running.say().jobs) == {"b"}
    running.say()
    assert desk.states() == {"a": "queued", "b": "running"}
    assert not other.say().jobs


def test_a_base_without_room_on_one_worker_gets_units_of_several(desk: RosterDesk, running: FakeWorker) -> None:
    assert not desk.roster.misfits()
    plan = BasePlan(shards=2)
    running.report = replace(running.report, plan=plan)
    running.say()
    (base,) = desk.roster.plans
    assert desk.roster.plan_of(base) == plan
    assert desk.roster.misfits() == {"g": f"its base takes 2 workers: {plan}"}
    desk.roster.forget_group("g", desk.now_s)
    assert desk.states() == {"a": "queued", "b": "queued"}
    assert desk.roster.plan(desk.now_s).starts == {base: 1}
    desk.roster.groups["h"] = GroupRecord("h", base, 1, None, plan)
    assert not desk.roster.misfits()


def test_a_unit_is_one_worker_that_goes_with_any_of_its_nodes(desk: RosterDesk, running: FakeWorker) -> None:
    running.report = replace(running.report, others=(("other", 7),))
    running.say()
    assert desk.roster.describe_workers()[0]["pids"] == [1, 7]
    plan = desk.roster.plan(desk.now_s, ["other"])
    assert plan.moves == {"a", "b"}


def test_a_unit_without_memory_makes_the_ticks_of_its_group_smaller(desk: RosterDesk, running: FakeWorker) -> None:
    running.report = replace(running.report, most_rows=128)
    assert running.say().most_rows == 128
    running.report = replace(running.report, most_rows=0)
    assert running.say().most_rows == 128
    other = FakeWorker(desk, "v", rank=1)
    assert other.say().most_rows == 128


def test_a_candidate_that_halts_is_paused_until_its_sweep_or_its_user_lets_it_go_on(desk: RosterDesk) -> None:
    desk.submit()
    roster, worker = desk.roster, FakeWorker(desk, "w")
    roster.train(spec_of("a"), {"until": 8}, desk.now_s)
    roster.train(spec_of("a"), {"until": 8}, desk.now_s)  # said twice
    worker.say()
    desk.plan()
    worker.say()
    order = worker.orders.jobs["a"]
    assert order.halt == {"until": 8}
    halts = JobReport(order.attempt, State.PAUSED, "waits", step=4)
    worker.say(a=halts)
    assert "a" not in worker.say(a=halts).jobs
    (row,) = roster.status()
    assert (row["state"], row["reason"], row["halts"]) == ("paused", "waits", False)
    roster.explain("a", "under-performs", desk.now_s)
    desk.journal.close()
    desk.open()
    assert desk.roster.status()[0]["reason"] == "under-performs"
    desk.roster.train(spec_of("a"), {"until": 24}, desk.now_s)
    assert desk.roster.entry("a").halt == {"until": 24}
    desk.roster.pause(["a"], desk.now_s)
    roster = desk.roster
    roster.train(spec_of("a"), {"until": 24}, desk.now_s)  # by a driver that has been started anew
    assert desk.states()["a"] == "paused"
    roster.resume(["a"], desk.now_s)  # by its user, who had paused it: it halts where it was to
    assert roster.entry("a").halt == {"until": 24}
    roster.pause(["a"], desk.now_s, "its sweep has stopped")
    roster.train(spec_of("a"), {"until": 24}, desk.now_s)
    assert desk.states()["a"] == "queued"


def test_what_a_user_wishes_of_a_candidate_goes_before_its_halt(desk: RosterDesk, running: FakeWorker) -> None:
    desk.roster.train(spec_of("b"), {"until": 8}, desk.now_s)
    desk.roster.cancel(["a"], desk.now_s, keep=True)
    desk.roster.pause(["b"], desk.now_s)
    orders = {name: JobReport(1, State.PAUSED, "waits") for name in ("a", "b")}
    running.say(**orders)
    rows = [(row["state"], row["reason"], row["halts"]) for row in desk.roster.status()]
    assert rows == [("cancelled", "cancelled by its user", False), ("paused", "paused by its user", True)]
    desk.roster.cancel(["b"], desk.now_s)
    desk.roster.resume(["b"], desk.now_s)  # without its sweep, which has counted it out
    assert not desk.roster.entry("b").halt


def test_candidates_are_ranked_by_what_is_expected_of_them(desk: RosterDesk) -> None:
    desk.submit("a", "b")
    desk.roster.foretold = {"a": Foretold("s", 80.0, 800.0, 0), "b": Foretold("s", 160.0, 1600.0, 16)}
    jobs = desk.roster._view.state(desk.now_s).jobs
    assert [(job.sweep, job.remaining, job.way) for job in jobs.values()] == [("s", 10.0, 100.0), ("s", 20.0, 200.0)]

"""A worker and its mailbox, in this process: orders are carried out between ticks, and nothing a job learnt is lost."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import toy
from worker_desk import Desk, adapter, alone, same

from tlora import local, trainer
from tlora.actors.messages import Orders, Report, WorkerOptions
from tlora.checkpoint import STATE, JobFolder, read_meta, save_state
from tlora.job import State
from tlora.resident import ResidentJob
from tlora.trainer import Trainer


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_job_of_another_base_is_refused(desk: Desk) -> None:
    spec = toy.named_job(desk.folder, "a")
    desk.order(spec.model_copy(update={"base": spec.base.model_copy(update={"model": "other"})}))
    assert "got a job of base other" in desk.ends("a").reason


def test_jobs_that_come_and_go_are_those_they_would_have_been_alone(desk: Desk) -> None:
    first, second = (toy.named_job(desk.folder, name, steps=6) for name in ("first", "second"))
    desk.order(first)
    desk.until(lambda report: report.jobs["first"].step == 2)
    desk.order(first, second)
    desk.until(lambda report: "second" in report.jobs and report.jobs["second"].step == 1)
    desk.order(second)  # the first is to leave
    desk.until(lambda report: "first" not in report.jobs and report.applied == desk.number)
    step = read_meta(first.folder)["step"]
    assert 2 <= step < 6
    assert desk.ends("second").step == 6
    desk.order(first, attempt=2)
    assert desk.ends("first").attempt == 2
    for spec in (first, second):
        assert same(adapter(spec), alone(spec))
    assert desk.worker.mailbox.report().base_loads == 1


def test_attaching_costs_the_others_no_more_than_one_tick(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the order to the first step of the job that comes, each look at the mailbox is a tick of the one there."""
    never = {"steps": 2000, "save_every": 2000, "eval_every": 2000}
    stays, comes = (toy.named_job(desk.folder, name, **never) for name in ("stays", "comes"))
    desk.order(stays)
    desk.until(lambda report: report.jobs["stays"].step > 1)
    taken, take = list[str](), ResidentJob.take
    monkeypatch.setattr(ResidentJob, "take", lambda job, count: taken.append(job.name) or take(job, count))
    looks, step, prepare = list[bool](), desk.worker.step, Trainer.prepare
    monkeypatch.setattr(desk.worker, "step", lambda: (taken.clear(), step(), looks.append("stays" in taken)))
    monkeypatch.setattr(Trainer, "prepare", lambda *a, **b: toy.until(lambda: len(looks) > 5) and prepare(*a, **b))
    desk.order(stays, comes)
    desk.until(lambda report: "comes" in report.jobs and report.jobs["comes"].step == 2)
    assert looks.count(False) <= 1


def test_ticks_are_dealt_as_the_orders_say(desk: Desk) -> None:
    """Shares, and rows of a tick: never fewer than a sequence takes, nor more than there was memory for."""
    never = {"steps": 2000, "save_every": 2000, "eval_every": 2000}
    more, less = (toy.named_job(desk.folder, name, **never, share=2.0, batch_size=8) for name in ("more", "less"))
    desk.order(more, less, shares={"more": 3.0}, token_budget=96)
    desk.until(lambda report: len(report.jobs) == 2 and all(job.step for job in report.jobs.values()))
    trainer = desk.worker._trainer
    assert trainer is not None
    assert trainer.token_budget == 96
    assert {name: job.share for name, job in trainer.jobs.items()} == {"more": 6.0, "less": 2.0}
    before = desk.worker.mailbox.report().jobs
    after = desk.until(lambda report: report.jobs["less"].step >= before["less"].step + 10).jobs
    more_tokens, less_tokens = (after[name].tokens - before[name].tokens for name in ("more", "less"))
    assert more_tokens > 1.5 * less_tokens
    desk.order(more, less, token_budget=1)
    desk.until(lambda report: report.applied == desk.number)
    assert trainer.token_budget == 32, "as long as the longest sequence"
    assert {job.share for job in trainer.jobs.values()} == {2.0}
    desk.worker._most_rows = 64
    desk.order(more, less, token_budget=96)
    desk.until(lambda report: report.applied == desk.number)
    assert trainer.token_budget == 64


def test_rows_of_a_tick_that_settings_give_are_not_those_of_the_orders(tmp_path: Path) -> None:
    desk = Desk(tmp_path, token_budget=128)
    desk.order(toy.named_job(tmp_path, "a", steps=2000), token_budget=96)
    desk.until(lambda report: report.jobs["a"].step > 0)
    assert desk.worker._trainer is not None
    assert desk.worker._trainer.token_budget == 128


def test_what_has_ended_is_told_until_the_orders_leave_it_out(desk: Desk) -> None:
    spec = toy.named_job(desk.folder, "a", steps=1)
    desk.order(spec)
    assert desk.ends("a").state is State.FINISHED
    desk.order()
    assert not desk.until(lambda report: report.applied == desk.number).jobs


def test_a_job_that_had_finished_is_told_at_once(desk: Desk) -> None:
    """Its worker was lost before it could say so."""
    spec = toy.named_job(desk.folder, "a", steps=2)
    desk.order(spec)
    desk.ends("a")
    before = adapter(spec)
    desk.order(spec, attempt=2)
    report = desk.until(lambda report: report.jobs["a"].attempt == 2 and report.jobs["a"].state.is_terminal)
    assert report.jobs["a"].state is State.FINISHED
    assert same(adapter(spec), before)


@pytest.mark.parametrize("kept", [True, False])
def test_a_cancelled_job_is_saved_only_if_it_is_to_be_kept(desk: Desk, kept: bool) -> None:
    spec = toy.named_job(desk.folder, "a", steps=50, save_every=50)
    desk.order(spec)
    desk.until(lambda report: report.jobs["a"].step == 2)
    desk.order(drop=frozenset() if kept else frozenset({"a"}))
    desk.until(lambda report: report.applied == desk.number and not report.jobs)
    assert (spec.folder / STATE).exists() is kept


def test_a_job_that_cannot_begin_says_why_and_the_others_go_on(desk: Desk) -> None:
    good = toy.named_job(desk.folder, "good")
    lost = toy.named_job(desk.folder, "lost", data={"path": str(desk.folder / "nothing.jsonl")})
    desk.order(good, lost)
    assert "nothing.jsonl" in desk.ends("lost").reason
    assert desk.ends("good").state is State.FINISHED


def test_a_base_that_cannot_be_loaded_fails_its_job(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    spec = toy.named_job(tmp_path, "a")
    for file in (tmp_path / "base").glob("*.safetensors"):
        file.unlink()
    desk.order(spec)
    ended = desk.ends("a")
    assert ended.state is State.FAILED
    assert ended.reason


def test_residents_are_saved_by_the_clock(tmp_path: Path) -> None:
    desk = Desk(tmp_path, save_every_s=1e-3)
    spec = toy.named_job(tmp_path, "a", steps=50, save_every=50)
    desk.order(spec)
    desk.until(lambda report: report.jobs["a"].step == 3)
    assert read_meta(spec.folder)["step"] >= 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_save_by_the_clock_that_fails_ends_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    desk = Desk(tmp_path, save_every_s=1e-3)
    specs = [toy.named_job(tmp_path, f"a{n}", steps=20, save_every=50) for n in range(count)]
    save = Trainer._save

    def fail(trainer: Trainer, job: Any) -> None:
        if job.name == "a0":
            raise OSError("disk full")
        save(trainer, job)

    monkeypatch.setattr(Trainer, "_save", fail)
    desk.order(*specs)
    assert "disk full" in desk.ends("a0").reason
    if count == 2:
        assert desk.ends("a1").state is State.FINISHED


def test_a_folder_that_another_process_holds_is_waited_for(desk: Desk) -> None:
    spec = toy.named_job(desk.folder, "a", steps=1)
    folder = JobFolder(spec.folder)
    folder.open()
    desk.order(spec)
    for _ in range(50):
        desk.worker.step()
    assert desk.worker.mailbox.report().jobs["a"].state is State.ATTACHING
    folder.close()
    assert desk.ends("a").state is State.FINISHED


def test_a_storage_that_is_away_for_a_while_costs_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(tmp_path, save_every_s=1e-3, patience_s=60.0)
    monkeypatch.setattr("tlora.beside._AGAIN_S", 0.01)
    monkeypatch.setattr("tlora.actors.worker.AGAIN_S", 0.01)
    away, back = threading.Event(), threading.Event()

    def unless_away(call: Callable[..., Any]) -> Callable[..., Any]:
        def tried(*arguments: Any, **options: Any) -> Any:
            if not back.is_set():
                away.set()
                raise OSError(5, "Input/output error")
            return call(*arguments, **options)

        return tried

    for name in ("save_state", "export_peft", "restore"):
        monkeypatch.setattr(f"tlora.trainer.{name}", unless_away(getattr(trainer, name)))
    data = {"path": str(tmp_path / "rows.jsonl")}
    first, second = (toy.named_job(tmp_path, name, steps=30, save_every=2, data=data) for name in "ab")
    desk.order(first, second)
    desk.until(lambda report: away.is_set())
    assert all(job.state is State.ATTACHING for job in desk.worker.mailbox.report().jobs.values())
    back.set()
    desk.until(lambda report: report.jobs["a"].step > 2)
    away.clear()
    back.clear()
    report = desk.until(lambda report: report.jobs["a"].step == 30)
    assert away.is_set()
    assert report.jobs["a"].state is State.RUNNING
    desk.order(first)  # the second is to leave, saved
    for _ in range(5):
        desk.worker.step()
    back.set()
    assert desk.ends("a").state is State.FINISHED
    desk.until(lambda report: "b" not in report.jobs)
    assert read_meta(second.folder)["step"] > 2
    assert same(adapter(first), alone(first))


def test_a_job_does_not_begin_anew_while_its_saves_are_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a mount is away there is an empty folder; what a resident saves meanwhile is not written beneath it."""
    desk = Desk(tmp_path, patience_s=60.0, save_every_s=0.05, mark=str(tmp_path / "outs" / "here"))
    for where in ("tlora.beside._AGAIN_S", "tlora.actors.worker.AGAIN_S"):
        monkeypatch.setattr(where, 0.01)
    data = {"path": str(tmp_path / "rows.jsonl")}
    stays, comes = (
        toy.named_job(tmp_path, name, steps=500, save_every=500, data=data, output=str(tmp_path / "outs" / name))
        for name in ("stays", "comes")
    )
    outs, away = tmp_path / "outs", tmp_path / "away"
    outs.mkdir()
    (outs / "here").touch()
    desk.order(stays, comes)
    desk.until(lambda report: all(name in report.jobs and report.jobs[name].step > 2 for name in ("stays", "comes")))
    desk.order(stays)
    saved = desk.until(lambda report: "comes" not in report.jobs).jobs["stays"].step
    outs.rename(away)
    outs.mkdir()
    desk.order(stays, comes, attempt=1)
    told = desk.until(lambda report: bool(report.jobs["comes"].reason) and report.jobs["stays"].step > saved + 20)
    assert told.jobs["comes"].state is State.ATTACHING
    assert "is the storage away?" in told.jobs["comes"].reason
    assert not list(outs.iterdir())
    step = read_meta(away / "comes")["step"]
    outs.rmdir()
    away.rename(outs)
    desk.until(lambda report: report.jobs["comes"].state is State.RUNNING)
    assert desk.worker.mailbox.report().jobs["comes"].step >= step
    desk.order()
    desk.until(lambda report: not report.jobs)
    assert read_meta(stays.folder)["step"] > saved + 20


def test_a_storage_that_stays_away_ends_the_job_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*arguments: Any, **options: Any) -> Any:
        tries.append(1)
        raise OSError(5, "Input/output error")

    tries: list[int] = []
    desk = Desk(tmp_path, patience_s=600.0)
    monkeypatch.setattr("tlora.actors.worker.AGAIN_S", 0.01)
    monkeypatch.setattr("tlora.trainer.restore", gone)
    desk.order(toy.named_job(tmp_path, "a"))
    desk.until(lambda report: len(tries) > 1)
    desk.worker._coming["a"].until_s = 0.0
    assert "Input/output error" in desk.ends("a").reason


def test_told_to_stop_it_saves_and_ends(desk: Desk) -> None:
    spec = toy.named_job(desk.folder, "a", steps=500, save_every=500)
    asked = threading.Event()

    def exchange(report: Report) -> Orders | None:
        if report.jobs and report.jobs["a"].step > 1 and not asked.is_set():
            asked.set()
            desk.order(stop=True)
        return None  # the scheduler is away: what is in the mailbox stays

    desk.order(spec)
    desk.worker.run(exchange)
    assert read_meta(spec.folder)["step"] > 1


def test_reading_and_saving_hold_nobody_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that comes reads its state, and one that goes is saved, while the third ticks on."""
    never = {"steps": 400, "save_every": 400, "eval_every": 400}
    first, second, third = (toy.named_job(desk.folder, name, **never) for name in ("a", "b", "c"))
    desk.order(first, third)
    desk.until(lambda report: all(report.jobs[name].step > 1 for name in ("a", "c")))
    go_on, prepare = threading.Event(), Trainer.prepare

    def slow(*arguments: Any, **options: Any) -> Any:
        assert go_on.wait(60)
        return prepare(*arguments, **options)

    monkeypatch.setattr(Trainer, "prepare", slow)
    monkeypatch.setattr("tlora.trainer.save_state", lambda *saved: (go_on.wait(60), save_state(*saved)))
    desk.order(second, third)
    step = desk.worker.mailbox.report().jobs["c"].step
    report = desk.until(lambda report: report.jobs["c"].step > step + 10)
    assert report.jobs["a"].state is State.RUNNING
    assert report.jobs["b"].state is State.ATTACHING
    go_on.set()
    desk.until(lambda report: "a" not in report.jobs and report.jobs["b"].step > 1)
    assert JobFolder(first.folder).has_state


def test_a_save_that_fails_as_a_job_leaves_is_told_until_it_is_heard(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*saved: Any) -> None:
        raise OSError("No space left on device")

    spec = toy.named_job(desk.folder, "a", steps=400, save_every=400)
    desk.order(spec)
    desk.until(lambda report: report.jobs["a"].step > 1)
    monkeypatch.setattr("tlora.trainer.save_state", full)
    desk.order()
    assert "No space left" in desk.ends("a").reason
    for _ in range(5):
        desk.worker.step()
    report = desk.worker.mailbox.report()
    assert report.jobs["a"].state is State.FAILED
    desk.worker.mailbox.put(Orders(desk.number), report)
    assert not desk.until(lambda report: not report.jobs).jobs


@pytest.mark.parametrize("read", [False, True])
def test_a_job_that_is_called_back_before_it_came_lets_its_folder_go(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, read: bool
) -> None:
    begun, go_on, prepare = threading.Event(), threading.Event(), Trainer.prepare

    def slow(*arguments: Any, **options: Any) -> Any:
        job = prepare(*arguments, **options) if read else None
        begun.set()
        assert go_on.wait(60)
        return job or prepare(*arguments, **options)

    monkeypatch.setattr(Trainer, "prepare", slow)
    spec = toy.named_job(desk.folder, "a", steps=2)
    desk.order(spec)
    desk.worker.step()
    assert begun.wait(60)
    desk.order()
    desk.worker.step()
    go_on.set()
    desk.order(spec, attempt=2)
    assert desk.ends("a").state is State.FINISHED


def test_a_candidate_halts_at_its_rung_and_goes_on_as_if_it_had_not(desk: Desk) -> None:
    """To the step, also in a worker that takes it up from there."""
    spec = toy.named_job(desk.folder, "a", steps=8, eval_every=2, save_every=100, batch_size=2)
    desk.order(spec, halt={"until": 7})
    for attempt in (1, 2):
        report = desk.until(lambda report: report.jobs["a"].state is State.PAUSED).jobs["a"]
        assert (report.step, report.reason) == (4, "waits for its siblings at 8 samples")
        assert read_meta(spec.folder)["step"] == 4
        desk.order()
        desk.until(lambda report: not report.jobs)
        desk.order(spec, attempt=attempt + 1, halt={"until": 7} if attempt == 1 else {})
    assert desk.ends("a").step == 8
    assert same(adapter(spec), alone(spec))


def test_a_job_that_another_worker_takes_up_has_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    ids, init = list[str](), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: ids.append(given["id"]) or init(**given))
    try:
        for attempt in (1, 2):
            desk = Desk(tmp_path)
            spec = toy.named_job(tmp_path, "a", steps=60, save_every=100, tracking={"wandb": "offline"})
            desk.order(spec, attempt=attempt)
            report = desk.until(lambda report: report.jobs["a"].step > 3).jobs["a"]
            desk.order()
            desk.until(lambda report: not report.jobs)
            assert read_meta(spec.folder)["step"] >= report.step
            assert ids == [read_meta(spec.folder)["run_id"]] * attempt
    finally:
        wandb.teardown()
    assert {path.stem for path in spec.folder.rglob("run-*.wandb")} == {f"run-{ids[0]}"}


def test_rows_are_read_once_for_jobs_that_share_them(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_data = [], local.read_data
    monkeypatch.setattr(local, "read_data", lambda spec, *rest: read.append(spec.name) or read_data(spec, *rest))
    data = {"path": str(desk.folder / "rows.jsonl")}
    first, second, third = (toy.named_job(desk.folder, name, data=data, steps=200) for name in ("a", "b", "c"))
    desk.order(first, second)
    desk.until(lambda report: all(report.jobs[name].step for name in ("a", "b") if name in report.jobs))
    assert read == ["a"]
    with (desk.folder / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "say", "completion": "more"}\n')
    desk.order(first, second, third)
    desk.until(lambda report: report.jobs["c"].step > 0)
    assert read == ["a", "c"]  # the file has changed


@pytest.mark.parametrize(
    ("took_s", "after_s"), [([], 5.0), ([0.0], 5.0), ([0.0, 1e-3], 9.999), ([3.0, 1.0], 7.0), ([60.0], 5.0)]
)
def test_a_save_begins_so_early_that_it_is_there_in_time(took_s: list[float], after_s: float) -> None:
    assert WorkerOptions(group="g", base={}, save_every_s=10.0).next_save_s(took_s) == after_s


def test_a_worker_saves_the_earlier_the_longer_the_last_save_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(tmp_path, save_every_s=1e6)
    saved: list[str] = []
    monkeypatch.setattr("tlora.trainer.Trainer.save", lambda trainer, name: saved.append(name))
    # None saves on its own account: that save would say how long it took itself.
    desk.order(*(toy.named_job(tmp_path, name, steps=10_000, save_every=10_000) for name in "ab"))
    desk.until(lambda report: len(report.jobs) == 2 and all(job.step > 1 for job in report.jobs.values()))
    trainer = desk.worker._trainer
    assert trainer is not None
    for name, job in trainer.jobs.items():
        job.save_s = {"a": 0.3e6, "b": 0.1e6}[name]  # the files of both wait for the same storage
        desk.worker._saved_s[name] -= {"a": 0.65e6, "b": 0.75e6}[name]
    desk.until(lambda report: bool(saved))
    assert saved == ["b"]

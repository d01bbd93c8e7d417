"""The scheduler's journal: what was acknowledged is there after a kill, a lost head, and a storage that was away."""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from journal_scenes import Cluster, Files, specs, words
from pyarrow.fs import FileSelector

from tlora.actors import journal as module
from tlora.actors.entries import Change, Entry, Event
from tlora.actors.journal import Journal
from tlora.errors import CheckpointError, StateError
from tlora.job import State

SPEC = {"base": {"model": "toy"}, "seed": 1, "lr": 1e-4, "tags": ["ä", "'; DROP TABLE jobs; --"], "output": None}
Away = Callable[[bool], None]
Log = pytest.LogCaptureFixture
TO_THE_END = (State.ATTACHING, State.RUNNING, State.FINISHED)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    made = Files()
    monkeypatch.setattr(module, "FileSystem", made)
    return made


@pytest.fixture
def journal(cluster: Cluster) -> Journal:
    """With one job; a test that asks for `files` first has it there."""
    made = cluster.open()
    made.add([("a", SPEC)], 1.0)
    return made


def run(journal: Journal, name: str, *states: State, now_s: float = 2.0, reason: str | None = None) -> Entry:
    return journal.change([Change(name, state=state, reason=reason) for state in states], now_s)[-1]


def all_of(cluster: Cluster) -> tuple[Any, ...]:
    return (last := cluster.opened[-1]).entries(), last.events(0), last.is_behind, cluster.stored()


def test_jobs_are_taken_in_and_changed(cluster: Cluster) -> None:
    journal, spec = cluster.open(), {"tags": [1]}
    assert journal._rows("PRAGMA journal_mode") + journal._rows("PRAGMA synchronous") == [("wal",), (2,)]  # power fails
    first, _ = added = journal.add([("b", SPEC), ("a", spec)], 1.0)
    spec["tags"].append(2)  # the caller's own
    assert first == Entry("b", SPEC, submitted_s=1.0, changed_s=1.0)
    assert added == [first, replace(first, name="a", spec={"tags": [1]})]
    (placed,) = journal.change([Change("a", State.ATTACHING, "why", 1, "g/0", {"x": (1,)}, "moved")], 2.0)
    assert placed == Entry("a", {"x": [1]}, State.ATTACHING, "why", 1, "g/0", 1.0, 2.0, "moved")
    running, emptied = journal.change([Change("a", State.RUNNING), Change("a", reason="", place="")], 3.0)
    assert running == Entry("a", {"x": [1]}, State.RUNNING, "why", 1, "g/0", 1.0, 3.0, "moved")
    assert emptied == Entry("a", {"x": [1]}, State.RUNNING, "", 1, "", 1.0, 3.0, "moved")
    assert (journal.get("a"), journal.get("c"), journal.entries()) == (emptied, None, [first, emptied])
    before = all_of(cluster)
    assert (journal.add([], 9.0), journal.change([], 9.0), journal.flush()) == ([], [], True)
    assert journal.change([Change("a", State.RUNNING, "again"), Change("a", spec={"x": [1]})], 9.0) == [emptied] * 2
    assert all_of(cluster) == before
    again = cluster.reopen()
    assert all_of(cluster)[:3] == before[:3]
    *stored, withdrawal = cluster.stored()  # of an object that a kill might have left
    assert stored == before[3]
    assert json.loads((cluster.objects / withdrawal).read_text()) == {"entries": [], "withdrawn": [3]}
    again.add([("c", {})], 4.0)
    assert again.events(0)[-1].number == before[1][-1].number + 1


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ([Change("b", State.RUNNING)], "job b is queued: it cannot become running; want attaching, "),
        ([Change("c", State.CANCELLED)], "job c is finished: it cannot become cancelled; want nothing"),
        ([Change("d", State.CANCELLED)], "job d is not in the journal"),
        ([Change("b", State.ATTACHING), Change("b", State.FAILED), Change("b", State.RUNNING)], "job b is failed"),
    ],
)
def test_illegal_changes_change_nothing(cluster: Cluster, journal: Journal, changes: list[Change], error: str) -> None:
    journal.add([("b", SPEC), ("c", SPEC)], 1.0)
    run(journal, "c", *TO_THE_END)
    before = all_of(cluster)
    with pytest.raises(StateError, match=error):
        journal.change([Change("a", State.CANCELLED, spec={}), *changes], 3.0)
    assert all_of(cluster) == before
    assert cluster.reopen().entries() == before[0]


def test_an_add_waits_for_the_disk_no_more_than_it_must(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """For an object, its folder and one commit: each may take as long as all that others write there."""
    said, syncs, sync = list[str](), list[int](), os.fsync
    journal._db.set_trace_callback(said.append)
    monkeypatch.setattr(os, "fsync", lambda handle: (syncs.append(handle), sync(handle))[1])
    journal.add([("b", SPEC)], 2.0)
    assert (said.count("COMMIT"), len(syncs)) == (1, 2)


@pytest.mark.parametrize("names", [["new", "a"], ["a"], ["new", "new"]])
def test_a_taken_name_adds_nothing_and_withdraws_nothing(cluster: Cluster, journal: Journal, names: list[str]) -> None:
    before = all_of(cluster)
    with pytest.raises(StateError, match=f"job {names[-1]}: got this name a second time"):
        journal.add([(name, {}) for name in names], 2.0)
    assert all_of(cluster) == before
    assert specs(cluster.after_loss()) == [("a", SPEC)]


def test_events_come_in_pages(journal: Journal) -> None:
    journal.add([("b", SPEC)], 1.5)
    journal.change([Change("a", State.ATTACHING, place="g/0"), Change("b", State.FAILED, "nan")], 2.0)
    events = journal.events(0)
    assert events[:2] == [Event(1, "a", State.QUEUED, "", "", 1.0), Event(2, "b", State.QUEUED, "", "", 1.5)]
    assert events[2:] == [Event(3, "a", State.ATTACHING, "", "g/0", 2.0), Event(4, "b", State.FAILED, "nan", "", 2.0)]
    assert [journal.events(0, limit=2), journal.events(2, limit=1), journal.events(4)] == [events[:2], events[2:3], []]
    assert [journal.events(0, "a"), journal.events(1, "a", 1)] == [events[:4:2], events[2:3]]
    journal.add([(f"c{i}", {}) for i in range(1200)], 4.0)
    assert [event.number for event in journal.events(4)] == list(range(5, 1005))


def test_many_threads(cluster: Cluster) -> None:
    journal = cluster.open()

    def work(i: int) -> State:
        journal.add([(f"job-{i}", SPEC)], 1.0)
        return run(journal, f"job-{i}", *TO_THE_END).state

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(work, range(90))) == {State.FINISHED}
    assert [event.number for event in journal.events(0)] == list(range(1, 90 * 4 + 1))
    assert cluster.after_loss().entries() == journal.entries()


def test_another_storage_is_refused(cluster: Cluster, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy would lack all that is stored in the first. The same folder by another path is no other storage."""
    with pytest.raises(StateError, match=r"got storage .*/storage/other; want .*/storage, "):
        cluster.reopen(f"{cluster.storage}/other")
    monkeypatch.chdir(cluster.storage.parent)
    assert specs(cluster.open("storage")) == [("a", SPEC)] == specs(cluster.after_loss(f"file://{cluster.storage}"))


def test_a_damaged_database_is_named_and_can_be_made_again(cluster: Cluster, journal: Journal) -> None:
    journal.close()
    path = cluster.head / "journal.db"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(CheckpointError, match=r"journal\.db: file is not a database; want a journal\. Move it away"):
        cluster.open()
    path.unlink()
    assert specs(cluster.open()) == [("a", SPEC)]


def test_what_survives_the_loss_of_the_head(cluster: Cluster) -> None:
    journal = cluster.open()
    journal.add([(name, SPEC) for name in "qrpfcxs"], 1.0)
    for name in "rpfxs":
        journal.change([Change(name, State.ATTACHING, place="g/0", attempt=1), Change(name, State.RUNNING)], 2.0)
    run(journal, "p", State.PAUSED, reason="by its user", now_s=4.0)
    run(journal, "f", State.FINISHED)
    run(journal, "c", State.CANCELLED, reason="no more")
    run(journal, "x", State.FAILED, reason=(text := "O'Hara -- \n \0, half a pair: \udc80"))
    journal.change([Change("s", spec={"new": 1}, reason="forked")], 8.0)
    former, last = {entry.name: entry for entry in journal.entries()}, journal.events(0)[-1].number
    before_s, rebuilt = time.time(), cluster.after_loss()
    queued, paused = [(name, State.QUEUED, "") for name in "qrs"], ("p", State.PAUSED, "by its user")
    ended = [("f", State.FINISHED, ""), ("c", State.CANCELLED, "no more"), ("x", State.FAILED, text)]
    assert words(rebuilt) == [*queued[:2], paused, *ended, queued[2]]
    entries = {entry.name: entry for entry in rebuilt.entries()}
    assert {name: entries[name] for name in "fcx"} == {name: former[name] for name in "fcx"}
    assert ({entries[name].place for name in "qrps"}, entries["s"].spec) == ({""}, {"new": 1})
    assert (entries["p"].attempt, entries["p"].submitted_s, entries["p"].changed_s) == (1, 1.0, 4.0)
    assert all(before_s <= entries[name].changed_s for name in "qrs")
    assert [(event.state, event.reason) for event in rebuilt.events(0, "x")] == [(State.QUEUED, ""), ended[2][1:]]
    assert {event.name for event in rebuilt.events(last)} == {*"qrs"}
    run(rebuilt, "r", State.ATTACHING, State.RUNNING)
    assert cluster.reopen().entries()[1].state is State.RUNNING  # the former head is read once


def test_numbers_go_on_growing_over_heads(cluster: Cluster, journal: Journal) -> None:
    """A watcher's cursor may be ahead of what was stored."""
    for _ in range(3):
        run(journal, "a", State.ATTACHING, State.RUNNING)
        last = journal.events(0)[-1].number
        journal = cluster.after_loss()
        assert [event.state for event in journal.events(last)] == [State.QUEUED]


def test_a_head_that_is_only_cut_off_is_overruled(cluster: Cluster, journal: Journal) -> None:
    run(cluster.after_loss(), "a", State.CANCELLED)
    run(journal, "a", *TO_THE_END, now_s=3.0)
    (cluster.objects / f"{7 << 32:016d}-{'0' * 16}.json").write_text("half")
    assert words(cluster.after_loss()) == [("a", State.CANCELLED, "")]
    cluster.opened[-1].add([("b", SPEC)], 4.0)
    assert int(cluster.stored()[-1][:16]) > 8 << 32  # a damaged object's number counts


def test_only_what_must_survive_is_stored(cluster: Cluster, journal: Journal) -> None:
    journal.add([("b", SPEC)], 1.0)

    def grows(*changes: Change) -> int:
        before = len(cluster.stored())
        journal.change(changes, 2.0)
        return len(cluster.stored()) - before

    assert grows(Change("a", State.ATTACHING, "why", 1, "g/0", wish="moved")) == 0
    assert grows(Change("a", State.RUNNING), Change("b", place="x")) == 0
    assert grows(Change("a", spec={"x": 1}), Change("b", State.ATTACHING)) == 1
    assert grows(Change("a", State.PAUSED)) == 1
    assert grows(Change("a", State.QUEUED)) == 1
    assert grows(Change("a", State.CANCELLED), Change("b", State.FAILED)) == 1
    rows = json.loads((cluster.objects / cluster.stored()[-1]).read_text())["entries"]
    assert [(row["event"], row["name"], row["state"]) for row in rows] == [(10, "a", "cancelled"), (11, "b", "failed")]


def test_each_of_2000_adds_writes_one_small_object(cluster: Cluster, files: Files, journal: Journal) -> None:
    """And none again, so that the last costs what the first did."""
    for i in range(2000):
        files.calls.clear()
        journal.add([(f"job-{i:04}", SPEC)], 1.0)
        assert [call[0] for call in files.calls] == ["open_output_stream", "move"]
    stored = files.get_file_info(FileSelector("bucket/x/_tlora/journal"))
    assert (len(stored), max(info.size for info in stored) < 500) == (2002, True)
    assert specs(cluster.after_loss())[1:] == [(f"job-{i:04}", SPEC) for i in range(2000)] == specs(journal)[1:]


def rewrite(path: Path, **changes: Any) -> None:
    batch = json.loads(path.read_text())
    batch["entries"][0] |= changes
    path.write_text(json.dumps(batch))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "all but one": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "no text": lambda path: path.write_bytes(b"\xff\xfe" * 50),
    "nothing in it": lambda path: path.write_text("{}"),
    "other entries": lambda path: path.write_text('{"entries": ["a"], "withdrawn": []}'),
    "no such state": lambda path: rewrite(path, state="x"),
    "no number": lambda path: rewrite(path, event=None),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_object_is_left_out(cluster: Cluster, journal: Journal, damage: str, caplog: Log) -> None:
    for name in "bc":
        journal.add([(name, SPEC)], 1.0)
    hurt = cluster.stored()[2]  # the first took the head's numbers
    DAMAGE[damage](cluster.objects / hurt)
    assert [entry.name for entry in cluster.after_loss().entries()] == ["a", "c"]
    assert [(record.levelname, hurt in record.getMessage()) for record in caplog.records] == [("WARNING", True)]


def test_temporary_and_foreign_objects_are_left_out(cluster: Cluster, journal: Journal, caplog: Log) -> None:
    rewrite(cluster.objects / cluster.stored()[1], colour="what only a newer version knows")
    whole = (cluster.objects / cluster.stored()[1]).read_text().replace('"a"', '"ghost"')
    name = f"{9:016d}-{'0' * 16}.json"
    strange = [f"{name}.incomplete", f"{name}.incomplete-77/{name}", "notes.json", f"x{name}", f"{name}~"]
    for path in map(cluster.objects.joinpath, strange):
        path.parent.mkdir(exist_ok=True)
        path.write_text(whole)
    assert specs(cluster.after_loss()) == [("a", SPEC)]
    assert all(path.partition("/")[0] in " ".join(caplog.messages) for path in strange)


@pytest.fixture(params=["vanished", "OSError", "its own"])
def away(request: pytest.FixtureRequest, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Away:
    """Makes the storage go away, or come back."""
    here, aside, files = cluster.storage, cluster.storage.with_name("aside"), Files()
    error = {"OSError": OSError(5, "Input/output error"), "its own": RuntimeError("403")}.get(request.param)
    if error:
        monkeypatch.setattr(module, "FileSystem", files)

    def set_away(is_away: bool) -> None:
        if error:
            files.error = error if is_away else None
        else:
            assert here.exists() == is_away  # made again where a mount is away, it would be on the head's own disk
            (here if is_away else aside).rename(aside if is_away else here)

    return set_away


def test_no_jobs_are_taken_in_while_the_storage_is_away(cluster: Cluster, away: Away, journal: Journal) -> None:
    before = journal.entries(), journal.events(0)
    away(True)
    for _ in range(2):
        with pytest.raises(OSError, match=f"storage {cluster.storage}: the journal's copy there cannot be written: "):
            journal.add([("b", SPEC), ("c", SPEC)], 2.0)
    assert (journal.entries(), journal.events(0)) == before
    journal = cluster.reopen()
    assert (journal.entries(), journal.events(0)) == before
    away(False)
    journal.add([("b", {"other": 1})], 3.0)
    assert journal.flush()
    assert specs(journal) == [("a", SPEC), ("b", {"other": 1})] == specs(cluster.after_loss())


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_gathers_no_halves(cluster: Cluster, journal: Journal, call: str) -> None:
    def full(*about: object) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(cluster.objects.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            journal.add([("b", SPEC)], 2.0)
        assert not journal.flush()
    assert sorted(cluster.objects.iterdir()) == before
    while not journal.flush():
        time.sleep(0.01)
    assert specs(cluster.after_loss()) == [("a", SPEC)] == specs(journal)


def test_an_end_stays_while_the_storage_is_away(cluster: Cluster, away: Away, journal: Journal, caplog: Log) -> None:
    journal.add([(name, SPEC) for name in "bc"], 1.0)
    away(True)
    run(journal, "a", *TO_THE_END)
    run(journal, "b", State.ATTACHING, State.RUNNING, State.PAUSED, reason="early")
    journal.change([Change("c", State.ATTACHING, spec={"x": 1})], 3.0)
    expected = [("a", State.FINISHED, ""), ("b", State.PAUSED, "early"), ("c", State.ATTACHING, "")]
    assert (words(journal), journal.is_behind, journal.flush()) == (expected, True, False)
    assert [record.levelname for record in caplog.records if record.levelno > logging.DEBUG] == ["WARNING"]
    journal = cluster.reopen()
    assert (words(journal), journal.is_behind) == (expected, True)
    away(False)
    assert not cluster.reopen().is_behind
    assert words(cluster.after_loss()) == [*expected[:2], ("c", State.QUEUED, "")]
    assert cluster.opened[-1].entries()[2].spec == {"x": 1}


def test_what_waits_is_stored_in_order_and_the_last_word_wins(cluster: Cluster, files: Files, journal: Journal) -> None:
    files.error = OSError("away")
    for i in range(20):
        journal.change([Change("a", spec={"i": i})], 2.0)
    files.error = None
    files.calls.clear()
    journal.change([Change("a", spec={"i": -1}), Change("a", spec={"i": 20})], 2.0)
    moved = [path.rpartition("/")[2] for _, path in files.asked("move")]
    assert (len(moved), moved) == (21, sorted(moved))
    assert specs(cluster.after_loss()) == [("a", {"i": 20})]


def test_a_new_head_does_not_begin_without_what_is_stored(cluster: Cluster, files: Files, journal: Journal) -> None:
    files.error = RuntimeError("timed out")
    with pytest.raises(OSError, match="the journal's copy there cannot be read: timed out"):
        cluster.after_loss()
    files.error = None
    assert specs(cluster.open()) == [("a", SPEC)]  # the first attempt left nothing that looks like a journal


def test_jobs_that_were_refused_do_not_come_back(cluster: Cluster, files: Files) -> None:
    """Their objects arrived, and then came the error."""
    journal = cluster.open()
    files.error, files.is_late = OSError("timed out"), True
    for name in "ab":
        with pytest.raises(OSError, match="timed out"):
            journal.add([(name, SPEC)], 1.0)
    files.error = None
    journal.add([("b", {"i": 2})], 2.0)
    assert journal.flush()
    assert specs(journal) == [("b", {"i": 2})] == specs(cluster.after_loss())
    assert [event.name for event in cluster.opened[-1].events(0)] == ["b", "b"]


def test_jobs_that_are_withdrawn_by_name_do_not_come_back(cluster: Cluster, journal: Journal) -> None:
    journal.add([("b", SPEC)], 1.0)
    (cluster.objects / f"{3:016d}-{'0' * 16}.json").write_text('{"entries": [], "withdrawn": ["a"]}')
    assert specs(cluster.after_loss()) == [("b", SPEC)]


@pytest.mark.parametrize(("kind", "moves"), [("mock", True), ("hdfs", True), ("s3", False), ("gcs", False)])
def test_written_aside_and_moved_where_that_can_be(cluster: Cluster, files: Files, kind: str, moves: bool) -> None:
    files.type_name = kind
    cluster.open().add([("a", SPEC)], 1.0)
    _, (written,) = files.asked("open_output_stream")
    assert re.fullmatch(r"bucket/x/_tlora/journal/0{15}1-[0-9a-f]{16}\.json(\.incomplete)?", written)
    assert files.asked("move")[1:] == ([(written, written.removesuffix(".incomplete"))] if moves else [])
    assert bool(files.asked("create_dir")) == moves
    assert specs(cluster.after_loss()) == [("a", SPEC)]


@pytest.mark.parametrize("storage", ["gs://b/x", "gs://b/x?a=b", "gs://b?retry_limit_seconds=9", "hdfs://k:secret@b/x"])
def test_no_storage_is_tried_for_long(cluster: Cluster, files: Files, storage: str) -> None:
    """Google's client tries for 15 minutes, in which no job would start or end."""
    cluster.open(storage)
    added = {"gs://b/x": "?retry_limit_seconds=10", "gs://b/x?a=b": "&retry_limit_seconds=10"}.get(storage, "")
    assert files.asked("from_uri") == [(storage + added,)]
    assert b"secret" not in b"".join(path.read_bytes() for path in cluster.head.iterdir())
    cluster.reopen(storage.replace("secret", "changed"))

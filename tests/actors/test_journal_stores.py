"""The scheduler's journal with the real clients of S3 and of Google's storage: on servers that go away, hang, break
off, and come back."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import s3_server
from gcs_server import GcsServer
from s3_server import S3Server

from tlora.actors.entries import Change, Entry
from tlora.actors.journal import Journal
from tlora.cluster import ClusterSpec
from tlora.job import State

TO_THE_END = (State.ATTACHING, State.RUNNING, State.FINISHED)


Server = S3Server | GcsServer


@pytest.fixture(params=[S3Server, GcsServer])
def server(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in {**s3_server.KEYS, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    made: Server = request.param()
    yield made
    made.answers.set()
    made.go_away()


class Heads:
    """One after the other, each with a disk of its own."""

    def __init__(self, folder: Path, server: Server):
        self.folder, self.opened, self.storage = folder, list[Journal](), server.address("bucket/path")

    def open(self) -> Journal:
        self.opened.append(Journal(self.folder / f"head-{len(self.opened)}" / "journal.db", self.storage))
        return self.opened[-1]


@pytest.fixture
def heads(tmp_path: Path, server: Server) -> Iterator[Heads]:
    made = Heads(tmp_path, server)
    yield made
    for journal in made.opened:
        journal.close()


def words(journal: Journal) -> dict[str, State]:
    return {entry.name: entry.state for entry in journal.entries()}


def finish(journal: Journal, name: str) -> Entry:
    return journal.change([Change(name, state) for state in TO_THE_END], 2.0)[-1]


def catch_up(journal: Journal) -> None:
    """Once the client has given up what it began while the storage was away."""
    deadline_s = time.monotonic() + 30
    while not journal.flush():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_a_new_head_knows_all_that_was_acknowledged(server: Server, heads: Heads, tmp_path: Path) -> None:
    """The credentials come by the environment and stay there."""
    ClusterSpec(storage=heads.storage, outputs=str(tmp_path))
    journal, server.page = heads.open(), 7
    spec = {"text": "ä&<>"}
    for n in range(20):
        journal.add([(f"job{n}", spec)], 1.0)
    finish(journal, "job3")
    expected = {f"job{n}": State.QUEUED for n in range(20)} | {"job3": State.FINISHED}
    for _ in range(2):
        again = heads.open()
        assert words(again) == expected
        assert {str(entry.spec) for entry in again.entries()} == {str(spec)}
    written = [*server.objects.values(), *(path.read_bytes() for path in tmp_path.rglob("journal.db*"))]
    assert b"hush" not in b"".join(written)


def test_an_object_is_there_or_not(server: Server, heads: Heads) -> None:
    """Nothing half-done is left in the bucket whatever is killed: Google forgets what was begun."""
    journal = heads.open()
    server.asked.clear()
    journal.add([("a", {})], 1.0)
    assert server.asked == (["PUT"] if isinstance(server, S3Server) else ["POST uploadType", "PUT upload_id"])


def test_a_server_that_is_gone_loses_nothing(server: Server, heads: Heads) -> None:
    journal = heads.open()
    journal.add([("a", {}), ("b", {})], 1.0)
    server.go_away()
    with pytest.raises(OSError, match=r"storage (s3|gs)://bucket/path.*cannot be written: .*[Cc]onnect"):
        journal.add([("c", {})], 2.0)
    with pytest.raises(OSError, match=r"storage (s3|gs)://bucket/path.*cannot be read: .*[Cc]onnect"):
        heads.open()
    expected = {"a": State.FINISHED, "b": State.QUEUED}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tlora.actors.journal._PATIENCE_S", 0.1)
        finish(journal, "a")
    assert (words(journal), journal.is_behind) == (expected, True)
    server.come_back()
    catch_up(journal)
    journal.add([("c", {"other": 1})], 3.0)
    assert words(heads.open()) == {**expected, "c": State.QUEUED} == words(journal)


def test_a_server_that_hangs_loses_nothing(server: Server, heads: Heads) -> None:
    """Nor does it hold anybody up. What it does when nobody waits for it any more is not believed."""
    journal = heads.open()
    journal.add([("a", {}), ("b", {})], 1.0)
    before = set(server.objects)
    server.answers.clear()
    with pytest.MonkeyPatch.context() as patch:
        for patience in ("_PATIENCE_S", "_READ_PATIENCE_S"):
            patch.setattr(f"tlora.actors.journal.{patience}", 0.3)
        for why in ("no answer for 0.3 s", "an earlier object is still being written"):
            with pytest.raises(OSError, match=f"cannot be written: {re.escape(why)}"):
                journal.add([("late", {})], 2.0)
        finish(journal, "a")
        with pytest.raises(OSError, match=r"cannot be read: no answer for 0\.3 s"):
            heads.open()
    server.answers.set()
    catch_up(journal)
    assert any(b'"late"' in server.objects[path] for path in server.objects.keys() - before), "it came all the same"
    expected = {"a": State.FINISHED, "b": State.QUEUED}
    assert words(heads.open()) == expected == words(journal)


@pytest.mark.parametrize(("fault", "size"), [("unheard", 0), ("lost", 12_000_000)])
def test_a_job_that_was_refused_is_not_there(server: Server, heads: Heads, fault: str, size: int) -> None:
    """Its object came and nobody heard so, or lies there in parts that were never put together."""
    journal = heads.open()
    journal.add([("a", {})], 1.0)
    before = set(server.objects)
    setattr(server, fault, "PUT upload_id|POST uploadId" if size else "PUT upload_id|PUT")
    with pytest.raises(OSError, match=r"cannot be written: .*(AWS Error|google::cloud::Status)"):
        journal.add([("b", {"text": "x" * size})], 2.0)
    setattr(server, fault, "")
    assert (set(server.objects) > before, bool(server.uploads)) == (fault == "unheard", size > 0)
    assert words(journal) == {"a": State.QUEUED}
    journal.flush()
    again = heads.open()
    assert words(again) == {"a": State.QUEUED} == words(journal)
    again.add([("b", {"other": 1})], 3.0)
    assert words(heads.open()) == {"a": State.QUEUED, "b": State.QUEUED}

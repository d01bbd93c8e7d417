"""The scheduler's journal on a storage that does not answer: nobody waits long, and what was refused stays so."""

import threading
import time
from pathlib import Path

import pytest

from tlora.actors.entries import Change
from tlora.actors.journal import Journal
from tlora.job import State


def states(journal: Journal) -> dict[str, State]:
    return {entry.name: entry.state for entry in journal.entries()}


def test_a_storage_that_hangs_holds_nobody_up_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = str(tmp_path / "storage")
    journal = Journal(tmp_path / "head" / "journal.db", storage)
    journal.add([(name, {}) for name in "ab"], 1.0)
    answers, write = threading.Event(), Journal._write_object
    monkeypatch.setattr("tlora.actors.journal._PATIENCE_S", 0.05)
    monkeypatch.setattr(Journal, "_write_object", lambda *about: (answers.wait(60), write(*about))[1])
    with pytest.raises(OSError, match=r"cannot be written: no answer for 0\.05 s"):
        journal.add([("late", {})], 2.0)
    journal.change([Change("a", state) for state in (State.ATTACHING, State.RUNNING, State.FINISHED)], 3.0)
    with pytest.raises(OSError, match="an earlier object is still being written"):
        journal.add([("c", {})], 2.0)
    expected = {"a": State.FINISHED, "b": State.QUEUED}
    assert (states(journal), journal.is_behind) == (expected, True)
    answers.set()
    monkeypatch.setattr("tlora.actors.journal._PATIENCE_S", 60.0)
    while not journal.flush():
        time.sleep(0.01)
    after_loss = Journal(tmp_path / "new-head" / "journal.db", storage)
    assert states(after_loss) == expected == states(journal)


def test_a_storage_that_refuses_slowly_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what has come meanwhile, though nobody waited, is not written again."""
    journal = Journal(tmp_path / "head" / "journal.db", str(tmp_path / "storage"))
    journal.add([(name, {}) for name in "ab"], 1.0)
    may_go, is_away, write, written = threading.Event(), True, Journal._write_object, list[int]()

    def slowly(self: Journal, seq: int, batch: str) -> str:
        may_go.wait(60)
        if is_away:
            raise OSError("refused")
        written.append(seq)
        return write(self, seq, batch)

    monkeypatch.setattr("tlora.actors.journal._PATIENCE_S", 0.2)
    monkeypatch.setattr(Journal, "_write_object", slowly)
    ended = [Change("a", state) for state in (State.ATTACHING, State.RUNNING, State.FINISHED)]
    began_s = time.monotonic()
    journal.change(ended, 2.0)
    assert time.monotonic() - began_s > 0.2
    monkeypatch.setattr("tlora.actors.journal._PATIENCE_S", 60.0)
    journal.change([Change("b", State.PAUSED)], 3.0)
    assert not journal.flush()
    may_go.set()
    while not journal._late.done():  # type: ignore[union-attr]
        time.sleep(0.01)
    assert not journal.flush(), "refused, and begun again"
    while not journal._late.done():  # type: ignore[union-attr]
        time.sleep(0.01)
    is_away = False
    may_go.clear()
    assert not journal.flush()
    may_go.set()
    while not written:
        time.sleep(0.01)
    while not journal.flush():
        time.sleep(0.01)
    assert len(written) == len(set(written)) == 2
    after_loss = Journal(tmp_path / "new-head" / "journal.db", str(tmp_path / "storage"))
    assert states(after_loss) == {"a": State.FINISHED, "b": State.PAUSED} == states(journal)


def test_what_waited_is_stored_without_holding_others_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty ends, each of whose objects takes a twentieth of a second, behind a storage that was away."""
    journal, write, is_away = (
        Journal(tmp_path / "head" / "journal.db", str(tmp_path / "storage")),
        Journal._write_object,
        True,
    )
    journal.add([(f"job-{n}", {}) for n in range(45)], 1.0)

    def slowly(self: Journal, seq: int, batch: str) -> str:
        if is_away:
            raise OSError("away")
        time.sleep(0.05)
        return write(self, seq, batch)

    monkeypatch.setattr(Journal, "_write_object", slowly)
    for n in range(40):
        journal.change([Change(f"job-{n}", state=State.CANCELLED)], 2.0)
    is_away, began_s = False, time.monotonic()
    while journal._late is not None and not journal._late.done():
        time.sleep(0.001)
    flushing = threading.Thread(target=journal.flush)
    flushing.start()
    took_s = []
    for n in range(40, 44):
        time.sleep(0.05)
        at_s = time.monotonic()
        journal.change([Change(f"job-{n}", state=State.CANCELLED)], 3.0)
        journal.change([Change("job-44", spec={"n": n})], 3.0)
        took_s.append(time.monotonic() - at_s)
    assert max(took_s) < 0.8, took_s
    flushing.join()
    assert time.monotonic() - began_s < 2.5, "nor does one call take until all is stored"
    assert journal.is_behind
    while not journal.flush():
        assert time.monotonic() - began_s < 30
    after_loss = Journal(tmp_path / "new-head" / "journal.db", str(tmp_path / "storage"))
    assert states(after_loss) == states(journal)
    journal.close()
    after_loss.close()

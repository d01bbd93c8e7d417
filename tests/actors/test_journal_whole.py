"""All jobs in one object of the storage, now and then: a new head begins with the last that is sound."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy
from journal_scenes import Cluster, words

from tlora.actors.entries import Change
from tlora.actors.journal import Journal
from tlora.job import State


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("tlora.actors.journal._MANY", 20)
    with Cluster(tmp_path) as made:
        yield made


def work(journal: Journal, rounds: int, begin: int = 0) -> None:
    for n in range(begin, begin + rounds):
        journal.add([(f"job-{n}", {"n": n})], 1.0)
        journal.change([Change(f"job-{n}", State.ATTACHING, place="w", attempt=1)], 2.0)
        for _ in range(3):
            journal.change([Change(f"job-{n}", spec={"n": n, "more": [n]})], 2.0)
            journal.change([Change(f"job-{n}", spec={"n": n})], 2.0)
        journal.change([Change(f"job-{n}", State.FAILED, "O'Hara \udc80", place="")], 3.0)
        assert journal.flush()


def summaries(cluster: Cluster) -> list[str]:
    return [name for name in cluster.stored() if "summary" in json.loads((cluster.objects / name).read_text())]


def test_a_new_head_has_few_objects_to_read(cluster: Cluster) -> None:
    journal = cluster.open()
    work(journal, 30)
    toy.until(lambda: len(cluster.stored()) <= 2 * 40 + 2)
    assert len(summaries(cluster)) == 2, "the last, and the one before, if that is damaged"
    before = journal.entries()
    number = journal.events(0)[-1].number
    rebuilt = cluster.after_loss()
    assert rebuilt.entries() == before
    assert rebuilt.events(0)[-1].number == number
    work(rebuilt, 5, begin=30)
    assert len(cluster.after_loss().entries()) == 35


def test_a_damaged_one_is_replaced_by_the_one_before(cluster: Cluster) -> None:
    journal = cluster.open()
    work(journal, 30)
    (cluster.objects / summaries(cluster)[-1]).write_text("half")
    assert cluster.after_loss().entries() == journal.entries()


def test_one_that_is_withdrawn_does_not_count_nor_withdraw_jobs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came to the storage, and the head was killed before it knew."""
    journal = cluster.open()
    work(journal, 2)
    put = Journal._put

    def killed(self: Journal, seq: int, batch: str, patience_s: float | None = None) -> str:
        name = put(self, seq, batch, patience_s)
        if "summary" in batch:
            raise KeyboardInterrupt
        return name

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_put", killed)
        with pytest.raises(KeyboardInterrupt):
            work(journal, 9, begin=2)
    entries = journal.entries()
    journal = cluster.reopen()
    journal.change([Change("job-0", State.QUEUED, "")], 5.0)
    expected = [("job-0", State.QUEUED, "")] + [(each.name, each.state, each.reason) for each in entries[1:]]
    assert words(cluster.after_loss()) == expected


def test_what_cannot_be_written_is_not_tried_at_each_change(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    journal, tried, put = cluster.open(), list[int](), Journal._put

    def refuses(self: Journal, seq: int, batch: str, patience_s: float | None = None) -> str:
        if "summary" in batch:
            tried.append(seq)
            raise OSError("too large")
        return put(self, seq, batch, patience_s)

    journal.add([(f"job-{n}", {}) for n in range(3)], 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_put", refuses)
        for n in range(60):
            journal.change([Change("job-0", spec={"n": n})], 2.0)
            journal.flush()
    assert 1 <= len(tried) <= 3
    assert len(cluster.after_loss().entries()) == 3

"""A journal and a storage that do not belong together: one is older than the other, or another's. Neither is spoilt."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from journal_scenes import Cluster, specs, words

from tlora.actors.entries import Change
from tlora.actors.journal import Journal
from tlora.errors import StateError
from tlora.job import State


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


@pytest.fixture
def older(cluster: Cluster) -> list[str]:
    """A head's disk is as it was before three jobs were taken in; what the storage holds."""
    cluster.open().add([("a", {})], 1.0)
    cluster.opened[-1].close()
    before = cluster.head.with_name("before")
    shutil.copytree(cluster.head, before)
    journal = cluster.open()
    for name in "bcd":
        journal.add([(name, {})], 2.0)
    journal.close()
    shutil.rmtree(cluster.head)
    before.rename(cluster.head)
    return cluster.stored()


def test_a_journal_that_is_older_than_its_storage_spoils_nothing(cluster: Cluster, older: list[str]) -> None:
    """However often it is opened, though each time takes two numbers."""
    for _ in range(4):
        with pytest.raises(StateError, match=r"journal\.db: is older than storage .*\. Move the file away"):
            cluster.open()
    assert cluster.stored() == older
    assert [name for name, _ in specs(cluster.after_loss())] == [*"abcd"]


def test_an_older_journal_is_found_out_once_its_storage_is_back(cluster: Cluster, older: list[str]) -> None:
    """It goes on by itself meanwhile, over several of the scheduler's lives: none of what it says then is stored."""
    aside = cluster.storage.with_name("aside")
    cluster.storage.rename(aside)
    for spec in range(6):
        journal = cluster.open()
        journal.change([Change("a", spec={"n": spec})], 3.0)
        journal.close()
    journal = cluster.open()
    aside.rename(cluster.storage)
    journal.change([Change("a", state=State.FAILED)], 4.0)
    while not journal._late.done():  # type: ignore[union-attr]
        time.sleep(0.01)
    with pytest.raises(StateError, match="is older than storage"):
        journal.add([("e", {})], 4.0)
    assert (words(journal), journal.flush()) == ([("a", State.FAILED, "")], False)
    with pytest.raises(StateError, match="is older than storage"):
        cluster.reopen()
    assert cluster.stored() == older


def test_an_old_heads_disk_that_comes_back_is_refused(cluster: Cluster) -> None:
    head = cluster.head
    cluster.open().add([("a", {})], 1.0)
    cluster.opened[-1].close()
    cluster.after_loss().add([("b", {})], 2.0)
    cluster.head = head
    with pytest.raises(StateError, match="is older than storage"):
        cluster.open()


def test_the_storage_is_looked_through_once_by_each_process(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.open().add([("a", {})], 1.0)
    looked, listed = list[bool](), Journal._listed
    monkeypatch.setattr(
        Journal, "_listed", lambda self, *, is_new=False: (looked.append(is_new), listed(self, is_new=is_new))[1]
    )
    journal = cluster.reopen()
    for name in "bc":
        journal.add([(name, {})], 2.0)
    journal.flush()
    assert looked == [False]
    withdrawal = json.loads((cluster.objects / cluster.stored()[2]).read_text())
    assert withdrawal == {"entries": [], "withdrawn": [2]}


def test_a_head_that_began_beneath_a_mount_does_not_write_into_what_is_mounted(cluster: Cluster) -> None:
    """It found an empty folder, so its numbers are those of the first head."""
    cluster.open().add([("a", {})], 1.0)
    cluster.opened[-1].close()
    mounted = cluster.storage.with_name("mounted")
    cluster.storage.rename(mounted)
    journal = cluster.after_loss()
    journal.add([("b", {})], 2.0)
    shutil.rmtree(cluster.storage)
    mounted.rename(cluster.storage)
    before = cluster.stored()
    for _ in range(2):
        with pytest.raises(OSError, match=r"there is no .*\.json, which this journal wrote"):
            journal.add([("c", {})], 3.0)
        journal.change([Change("b", state=State.CANCELLED)], 3.0)
        journal = cluster.reopen()
    assert cluster.stored() == before
    assert words(cluster.after_loss()) == [("a", State.QUEUED, "")]


def test_a_journal_of_before_there_were_snapshots_goes_on(cluster: Cluster) -> None:
    cluster.open().add([("a", {})], 1.0)
    for column in ("known", "outputs", "anchor"):
        cluster.opened[-1]._rows(f"ALTER TABLE home DROP COLUMN {column}")
    cluster.opened[-1]._rows("PRAGMA user_version = 1")
    cluster.reopen().add([("b", {})], 2.0)
    assert cluster.opened[-1].outputs is None
    assert cluster.reopen().flush()
    assert [name for name, _ in specs(cluster.after_loss())] == [*"ab"]


def test_the_outputs_that_are_marked_are_known_to_a_new_head(cluster: Cluster) -> None:
    journal = cluster.open()
    assert journal.outputs is None
    for outputs in ("/out", "/other"):
        journal.keep_outputs(outputs)
        journal.add([("a" + outputs[1:], {})], 1.0)
    assert journal.outputs == cluster.reopen().outputs == cluster.after_loss().outputs == "/other"
    assert cluster.after_loss().outputs == "/other"

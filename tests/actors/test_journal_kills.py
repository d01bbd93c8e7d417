"""The scheduler's journal, killed at any moment: both its places then say the same, and what was acknowledged."""

import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from journal_scenes import Cluster, Files, specs, words

from tlora.actors import journal as module
from tlora.actors.entries import Change
from tlora.job import State


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        yield made


class Kill(BaseException):
    """The head's process ends where this is raised."""


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_or_is_killed_both_places_say_the_same(
    cluster: Cluster, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adds and changes, of which some find the storage away, some their objects arrived all the same, and some end the
    process. What is refused may be submitted again, with other content."""
    files = Files()
    monkeypatch.setattr(module, "FileSystem", files)
    chance, journal, known = random.Random(seed), cluster.open(), dict[str, Any]()
    for number in range(100):
        files.error = chance.choice([None, None, None, OSError("away"), Kill()])
        files.is_late = chance.random() < 0.5
        name, spec = f"job-{chance.randrange(40)}", {"number": number}
        try:
            if name in known:
                journal.change([Change(name, spec=spec)], 2.0)
            else:
                journal.add([(name, spec)], 1.0)
            known[name] = spec
        except OSError:
            assert name not in known
        except Kill:
            files.error = None if chance.random() < 0.5 else OSError("away")
            known |= {name: spec} if name in known else {}
            journal = cluster.reopen()
        assert dict(specs(journal)) == known
    files.error = None
    while not journal.flush():
        time.sleep(0.01)
    assert specs(cluster.after_loss()) == specs(journal)
    assert len(known) > 20


COMMON = """
import os, sys
from pathlib import Path
from tlora.actors.entries import Change
from tlora.actors.journal import Journal
from tlora.job import State
journal = Journal(Path(sys.argv[1]), sys.argv[2])
def finish(name):
    journal.change([Change(name, state) for state in (State.ATTACHING, State.RUNNING, State.FINISHED)], 1.0)
"""
SUBMIT = """
for i in range(100_000):
    name = f"job-{os.getpid()}-{i}"
    journal.add([(name, {"i": i})], 1.0)
    print("added", name, flush=True)
    finish(name)
    print("finished", name, flush=True)
"""
KILLED = """
put, where, act = Journal._put, *sys.argv[3:]
journal.add([("a", {})], 1.0)
def killed(self, *about):
    where == "before" or put(self, *about)
    os.kill(os.getpid(), 9)
if where == "within":
    os.replace = lambda *paths: os.kill(os.getpid(), 9)
Journal._put = killed
journal.add([("b", {})], 1.0) if act == "add" else finish("a")
"""


def start(cluster: Cluster, script: str, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMMON + script, str(cluster.head / "journal.db"), str(cluster.storage), *args]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


def test_what_was_acknowledged_is_there_after_a_kill(cluster: Cluster) -> None:
    """At random moments, six times on one database. A new head, on a copy of its storage, then knows the same jobs."""
    chance, head, added, finished = random.Random(0), cluster.head, set[str](), set[str]()
    for _ in range(6):
        with start(cluster, SUBMIT) as child:
            assert child.stdout is not None
            lines = [child.stdout.readline() for _ in range(chance.randrange(1, 30))]
            time.sleep(chance.random() * 0.01)
            child.send_signal(signal.SIGKILL)
            lines += child.stdout.readlines()
        for verb, name in (line.split() for line in lines if line.endswith("\n")):
            {"added": added, "finished": finished}[verb].add(name)
        states = {entry.name: entry.state for entry in cluster.open().entries()}
        assert added <= states.keys()
        assert {states[name] for name in finished} <= {State.FINISHED}
        cluster.opened[-1].close()
        copy = shutil.copytree(cluster.storage, cluster.storage.with_name(f"copy-{len(added)}"))
        assert {entry.name: entry.state for entry in cluster.after_loss(str(copy)).entries()} == states
        cluster.head = head
    assert len(added) > 30


@pytest.mark.parametrize("act", ["add", "finish"])
@pytest.mark.parametrize("where", ["before", "within", "after"])
def test_killed_beside_the_writing_of_an_object(cluster: Cluster, where: str, act: str) -> None:
    """Both places say the same afterwards: a job that was not acknowledged is in neither, an end is in both."""
    with start(cluster, KILLED, where, act) as child:
        assert child.wait() == -signal.SIGKILL
    expected = [("a", State.QUEUED if act == "add" else State.FINISHED, "")]
    assert len(cluster.stored()) == 2 + (where == "after")
    assert words(cluster.open()) == expected == words(cluster.after_loss())

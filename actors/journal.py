"""The scheduler's journal: every job as it last was, and every change as an event. No Ray, no torch.

All of it is in a database on the head's own disk. What must survive the loss of the head (new jobs, ends, pauses, what
users wish of placed jobs, changed specs) is also in a storage folder that other machines reach: one small object a
batch, never written again, and now and then one of all jobs, with which a new head begins.
One process has it open, any of its threads may call; when a job changes is for the roster to say.
"""

import json
import logging
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from threading import RLock, Thread
from types import MappingProxyType
from typing import Any, TypeVar

from pyarrow.fs import FileSelector, FileSystem, LocalFileSystem

from tlora.actors.entries import Change, Entry, Event, batch_of, changed, entry_of, plain
from tlora.errors import CheckpointError, StateError
from tlora.files import sync_folder
from tlora.job import State

log = logging.getLogger("tlora")
T = TypeVar("T")
EMPTY: Mapping[str, dict[str, Any]] = MappingProxyType({})
_OBJECT = re.compile(r"\d{16}-[0-9a-f]{16}\.json")
_OBJECT_STORES = ("s3", "gcs", "abfs")
"""They show an object only once it is whole, and cannot rename one."""
_HEAD = 1 << 32
"""Numbers that one head may give out. The next one's begin at the next multiple, and it stores an object that takes
them: so they are above any that were lost unseen, and above those of a former head that is only cut off: what it
stores from then on does not count."""
_PATIENCE_S = 10.0
"""What a write may take, so that a storage that hangs holds nobody up for longer."""
_READ_PATIENCE_S = 60.0
"""What a new head waits for a list of the objects, then for each next one, and until it has written all jobs down."""
_MANY = 1000
"""Objects since the last that holds all jobs, or as many as there are jobs if these are more, before there is another:
so a new head has few to read."""
_FLUSH_S, _OWN_S, _LET_IN_S = 1.0, 0.2, 1e-3
"""What storing may take that has waited, at one call, and beside a change; and the pause in which others get in."""
_FOR_CLIENTS = {"gs": "retry_limit_seconds=10", "gcs": "retry_limit_seconds=10", "s3": "allow_delayed_open=true"}
"""What an address asks for unless it says otherwise. Google's client would try for 15 minutes; S3's would write each
object by three requests, and leave a part of it in the bucket for ever if it were killed between them."""
_BY_USERS = {"paused": State.PAUSED, "cancelled": State.CANCELLED, "dropped": State.CANCELLED}
"""What a job becomes by a wish that somebody was told is taken down."""
_SCHEMAS = (
    """
CREATE TABLE home (storage TEXT NOT NULL);
CREATE TABLE jobs (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, entry TEXT NOT NULL);
CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, event TEXT NOT NULL);
CREATE INDEX events_of_job ON events (name, number);
CREATE TABLE outbox (seq INTEGER PRIMARY KEY AUTOINCREMENT, batch TEXT NOT NULL);
PRAGMA user_version = 1
""",
    """
ALTER TABLE home ADD COLUMN known INTEGER;
ALTER TABLE home ADD COLUMN outputs TEXT;
ALTER TABLE home ADD COLUMN anchor TEXT NOT NULL DEFAULT '';
PRAGMA user_version = 2
""",
)
"""Each makes the next version from the one before. In `home`, `known` is the number of the last object that this
journal knew of when it was opened; null: it has seen since that the storage holds no later one. `outputs`: the folder
that is marked. `anchor`: an object that it has written; where that is not, this is not its storage."""


class Journal:
    """Opens the database at `path`, or makes it from what a former head stored. Raises OSError if that cannot be read,
    StateError if the database belongs to another storage or is older than it, CheckpointError if it is damaged."""

    def __init__(self, path: Path, storage: str):
        self._path, self._lock, self._is_away = path.absolute(), RLock(), False
        self._storage = storage if "://" in storage else os.path.abspath(os.path.expanduser(storage))
        self._name = re.sub("://[^/]*@", "://", self._storage)  # without credentials
        self._target: tuple[Any, str] | None = None
        self._pool = ThreadPoolExecutor(1, "tlora-journal")
        self._late: Future[Any] | None = None
        self._late_seq = -1
        """Of the object that was begun last."""
        self._is_in_doubt = False
        """The storage may hold an object of the next number."""
        self._known: int | None = None
        self._outputs: str | None = None
        self._anchor = ""
        """These are as in `home`."""
        self._summed_up = 0
        """Number of the last object when all jobs were last written into one."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(self._path, timeout=30.0, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException as error:
            self.close()
            if type(error) is sqlite3.DatabaseError:  # its subclasses say locked, full or unreachable
                text = f"{self._path}: {error}; want a journal. Move it away: one is made from {self._name}."
                raise CheckpointError(text) from error
            raise

    def close(self) -> None:
        with self._lock:
            self._db.close()
            self._pool.shutdown(wait=False)

    def entries(self) -> list[Entry]:
        """In order of submission."""
        return [entry_of(json.loads(text)) for (text,) in self._rows("SELECT entry FROM jobs ORDER BY number")]

    def get(self, name: str) -> Entry | None:
        rows = self._rows("SELECT entry FROM jobs WHERE name = ?", name)
        return entry_of(json.loads(rows[0][0])) if rows else None

    def events(self, after: int, name: str | None = None, limit: int = 1000) -> list[Event]:
        """The first `limit` events, of one job or of all, whose numbers are above `after`."""
        of_job, names = ("", ()) if name is None else ("AND name = ?", (name,))
        query = f"SELECT number, name, event FROM events WHERE number > ? {of_job} ORDER BY number LIMIT ?"
        found = ((number, job, *json.loads(text)) for number, job, text in self._rows(query, after, *names, limit))
        return [Event(number, job, State(state), *rest) for number, job, state, *rest in found]

    @property
    def outputs(self) -> str | None:
        """The folder of outputs that was kept last, by whichever head."""
        return self._outputs

    def keep_outputs(self, outputs: str) -> None:
        with self._lock:
            with self._transaction():
                self._rows("UPDATE home SET outputs = ?", outputs)
                self._rows("INSERT INTO outbox(batch) VALUES (?)", batch_of([], outputs=outputs))
            self._outputs = outputs
            self.flush()

    @property
    def is_behind(self) -> bool:
        """Whether something is not in the storage yet."""
        return bool(self._rows("SELECT 1 FROM outbox LIMIT 1"))

    def add(
        self, specs: Sequence[tuple[str, dict[str, Any]]], now_s: float, halts: Mapping[str, dict[str, Any]] = EMPTY
    ) -> list[Entry]:
        """Take in new jobs by name and spec, all or none; they are in the storage when this returns. Raises OSError if
        it cannot be written, StateError if a name is taken.

        Their object is written before they are committed here, and has the next number; so if that fails, or is killed,
        there may be one object of that number that nobody knows of, which `_transaction` withdraws."""
        entries = [
            Entry(name, plain(spec), submitted_s=now_s, changed_s=now_s, halt=plain(halts.get(name, {})))
            for name, spec in specs
        ]
        names = {entry.name: entry for entry in entries}
        if not entries:
            return []
        with self._lock:
            if taken := [entry.name for entry in entries if names[entry.name] is not entry or self.get(entry.name)]:
                raise StateError(f"job {taken[0]}: got this name a second time; want it once. Choose another name.")
            self._verify()
            self._withdraw()
            with self._transaction():
                batch = batch_of([(self._write(entry), entry) for entry in entries])
                query = "UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'outbox' RETURNING seq"
                ((seq,),) = self._rows(query)
                self._is_in_doubt = True
                self._put(seq, batch)
        return entries

    def change(self, changes: Sequence[Change], now_s: float) -> list[Entry]:
        """Change jobs in order, all or none; returns each as its change left it. Raises StateError if one is unknown or
        a transition illegal. Ends, pauses, wishes of users and specs are stored before this returns, or else by a
        later `flush`: no finished job becomes unfinished because a storage is away."""
        entries, stored = [], []
        with self._lock, self._transaction():
            for change in changes:
                old = self.get(change.name)
                if old is None:
                    raise StateError(f"job {change.name} is not in the journal; want one that was added.")
                new = changed(old, change, now_s)
                entries.append(new)
                number = 0 if new == old else self._write(new)
                has_left = any(each is State.PAUSED or each.is_terminal for each in (old.state, new.state))
                has_left = has_left and (old.state, old.reason) != (new.state, new.reason)
                is_wished = old.wish != new.wish and not _BY_USERS.keys().isdisjoint((old.wish, new.wish))
                if new.spec != old.spec or is_wished or has_left:
                    stored.append((number, new))
            if stored:
                self._rows("INSERT INTO outbox(batch) VALUES (?)", batch_of(stored))
        if stored:
            self._store(_OWN_S)
        return entries

    def flush(self) -> bool:
        """Store what is not stored, in order, for a second; whether nothing is left. Who waits for the journal gets it
        after each object. A storage that is away is logged, once, and not waited for again: one write is begun at a
        time, and the next call sees what became of it."""
        if is_all := self._store(_FLUSH_S):
            self._sum_up()
        return is_all

    def _store(self, for_s: float) -> bool:
        until_s = time.monotonic() + for_s
        while self._flush_one():
            if not self.is_behind:
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(_LET_IN_S)
        return False

    def _flush_one(self) -> bool:
        """Store what comes next, if anything does; False: it could not be."""
        with self._lock:
            patience_s = 0.0 if self._is_away else _PATIENCE_S
            try:
                self._verify(patience_s)
                self._withdraw()
                for seq, batch in self._rows("SELECT seq, batch FROM outbox ORDER BY seq LIMIT 1"):
                    self._put(seq, batch, patience_s)
                    self._rows("DELETE FROM outbox WHERE seq = ?", seq)
            except OSError as error:
                log.log(logging.DEBUG if self._is_away else logging.WARNING, "%s It is tried again.", error)
                self._is_away = True
                return False
            except StateError as error:
                log.error("nothing is stored: %s", error)
                return False
        return True

    def _sum_up(self) -> None:
        """Write all jobs into one object, if there are many since the last such one, in the way of `add`. Those below
        that last one are removed then; those from there on stay, for the new one may come to be damaged."""
        with self._lock:
            query = "SELECT seq, (SELECT count(*) FROM jobs) FROM sqlite_sequence WHERE name = 'outbox'"
            ((last, num_jobs),) = self._rows(query)
            if last - self._summed_up <= max(_MANY, num_jobs) or self.is_behind or self._is_in_doubt:
                return
            self._summed_up, former = last, int(self._anchor[:16] or 0)  # if this fails, it is not tried again at once
            try:
                with self._transaction():
                    self._is_in_doubt = True
                    self._rows("UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'outbox'")
                    anchor = self._put(last + 1, self._summary())
                    self._rows("UPDATE home SET anchor = ?", anchor)
            except OSError as error:
                log.warning("%s All jobs in one object: that is tried again later.", error)
                return
            self._anchor = anchor
        Thread(target=self._remove_below, args=(former,), daemon=True, name="tlora-journal-remove").start()

    def _summary(self) -> str:
        query = "SELECT (SELECT max(number) FROM events WHERE name = jobs.name), entry FROM jobs ORDER BY jobs.number"
        entries = ", ".join(f'{{"event": {number}, {text[1:]}' for number, text in self._rows(query))
        about = f'"summary": true, "outputs": {json.dumps(self._outputs)}, "withdrawn": []'
        return f'{{{about}, "entries": [{entries}]}}'

    def _remove_below(self, number: int) -> None:
        try:
            with self._storage_errors("tidied"):
                files, folder = self._reach()
                for name in filter(_OBJECT.fullmatch, self._listed()):
                    if int(name[:16]) < number:
                        files.delete_file(f"{folder}/{name}")
        except OSError as error:  # they are removed with the next ones
            log.warning("%s", error)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._db:  # commits, or undoes it all
            self._db.execute("BEGIN IMMEDIATE")
            if self._is_in_doubt:
                ((last,),) = self._rows("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'")
                self._rows("INSERT INTO outbox VALUES (?, ?)", last + 2, batch_of([], [last + 1]))
            yield
        self._is_in_doubt = False

    def _verify(self, patience_s: float | None = None) -> None:
        """Once, before the first object: that the storage holds none which this journal does not know of. Its numbers
        would be given out a second time, and it would withdraw the next one, which may be of jobs that were added."""
        if self._known is None:
            return
        with self._storage_errors("read"):
            stored = filter(_OBJECT.fullmatch, self._ask(-1, patience_s, self._listed))
            newest = max((int(name[:16]) for name in stored), default=-1)
        if newest > self._known + 1:  # that one may be of an `add` that was killed
            text = (
                f"{self._path}: is older than storage {self._name}, of which it knows {self._known} and not {newest}."
            )
            raise StateError(f"{text} Move the file away: one is made from what the storage holds.")
        self._rows("UPDATE home SET known = NULL")
        self._known = None

    def _withdraw(self) -> None:
        """The object of jobs that were not added, if there may be one."""
        if self._is_in_doubt:
            with self._transaction():
                pass

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def _write(self, entry: Entry, number: int | None = None) -> int:
        """Returns the number of its event. One that is known already comes from an object that was stored twice."""
        query = "INSERT INTO jobs(name, entry) VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET entry = excluded.entry"
        self._rows(query, entry.name, json.dumps(asdict(entry)))
        event = json.dumps([entry.state, entry.reason, entry.place, entry.changed_s])
        query = "INSERT OR IGNORE INTO events VALUES (?, ?, ?)"
        return self._db.execute(query, (number, entry.name, event)).lastrowid or 0

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        with self._transaction():  # a head that is killed while it makes the database leaves none
            ((version,),) = self._rows("PRAGMA user_version")
            for statement in ";".join(_SCHEMAS[version:]).split(";"):
                self._db.execute(statement)
            if version == 0:
                self._make()
            else:
                last = "(SELECT seq FROM sqlite_sequence WHERE name = 'outbox')"
                self._rows(f"UPDATE home SET known = {last} WHERE known IS NULL")
            query = "SELECT storage, known, outputs, anchor FROM home"
            ((home, self._known, self._outputs, self._anchor),) = self._rows(query)
        self._summed_up = int(self._anchor[:16] or 0)
        if home != self._name:
            text = f"{self._path}: got storage {self._name}; want {home}, where the rest of it is."
            raise StateError(f"{text} Name that one, or move the file away to begin with what the other holds.")
        self._is_in_doubt = version > 0
        with suppress(OSError):  # of a storage that is away, which is seen to once it is back
            self._verify()
        self.flush()

    def _make(self) -> None:
        histories, held = dict[str, list[tuple[int, Entry]]](), dict[int | str, set[str]]()
        last, former = self._former()
        for number, entries, withdrawn in former:
            for known in withdrawn:
                for job in held.pop(known, {known}):
                    histories.pop(job, None)
            held[number] = {entry.name for _, entry in entries}
            for event, entry in entries:
                histories.setdefault(entry.name, []).append((event, entry))
        start = (last // _HEAD + 1) * _HEAD
        self._rows("INSERT INTO sqlite_sequence VALUES ('outbox', ?), ('events', ?)", start, start)
        for history in histories.values():
            for event, entry in history:
                self._write(entry, event)
            left = replace(entry, place="", wish="")  # its worker has gone with the head
            if entry.state is State.PAUSED:
                self._write(left, event)
            elif wished := None if entry.state.is_terminal else _BY_USERS.get(entry.wish):
                self._write(replace(left, state=wished, changed_s=time.time()))
            elif not entry.state.is_terminal:
                self._write(replace(left, state=State.QUEUED, reason="", changed_s=time.time()))
        anchor = self._put(start, self._summary(), _READ_PATIENCE_S)
        self._rows("INSERT INTO home(storage, outputs, anchor) VALUES (?, ?, ?)", self._name, self._outputs, anchor)

    def _former(self) -> tuple[int, list[tuple[int, list[tuple[int, Entry]], list[Any]]]]:
        """The last number, and what former heads stored since all jobs were last in one object, with it: each object's
        number, entries and withdrawals. Sets `_outputs`."""
        last, found, gone = -1, list[tuple[int, list[tuple[int, Entry]], list[Any]]](), set[Any]()
        for name, content in self._objects():
            last = max(last, number := int(name[:16]))
            try:
                batch = json.loads(content)
                entries = [(int(row["event"]), entry_of(row)) for row in batch["entries"]]
                withdrawn, is_whole = list(batch["withdrawn"]), batch.get("summary", False)
            except (ValueError, LookupError, TypeError) as error:
                log.warning("%s: object %s is damaged and left out: %r", self._name, name, error)
                continue
            self._outputs = self._outputs or batch.get("outputs")
            if is_whole and number in gone:
                continue  # it would withdraw all jobs
            gone.update(withdrawn)
            found.append((number, entries, withdrawn))
            if is_whole:
                break
        return last, found[::-1]

    def _objects(self) -> Iterator[tuple[str, bytes]]:
        """What former heads stored, the last first."""
        readers = ThreadPoolExecutor(16, "tlora-journal-read")
        try:
            with self._storage_errors("read"):
                found = _answer(readers.submit(self._listed, is_new=True), _READ_PATIENCE_S)
                whole = sorted(filter(_OBJECT.fullmatch, found), reverse=True)
                for name in sorted(found.difference(whole)):
                    log.warning("%s: object %s is half-written or not a journal's, and left out.", self._name, name)
                contents = [readers.submit(self._read, name) for name in whole]
                for name, content in zip(whole, contents, strict=True):
                    yield name, _answer(content, _READ_PATIENCE_S)
        finally:
            readers.shutdown(wait=False, cancel_futures=True)

    def _listed(self, *, is_new: bool = False) -> set[str]:
        """Names in the journal's folder, which may not be there yet if `is_new`."""
        files, folder = self._reach()
        if is_new and files.type_name not in _OBJECT_STORES:
            files.create_dir(folder, recursive=True)
        return {info.base_name for info in files.get_file_info(FileSelector(folder, allow_not_found=is_new))}

    def _read(self, name: str) -> bytes:
        files, folder = self._reach()
        content: bytes = files.open_input_stream(f"{folder}/{name}").read()
        return content

    def _put(self, seq: int, batch: str, patience_s: float | None = None) -> str:
        """Write a new object, whole or not at all, within so long (`_PATIENCE_S`). One that takes longer may be there
        later, as may one that failed; until it is over, no other is begun. If it was the last to be begun and has come
        since, it is not written again. Returns its name."""
        with self._storage_errors("written"):
            return self._ask(seq, patience_s, self._write_object, seq, batch)

    def _ask(self, seq: int, patience_s: float | None, work: Callable[..., T], *given: Any) -> T:
        """The answer of the writer's thread; `seq` tells one work from the next."""
        if self._late is not None and not self._late.done():
            raise TimeoutError("an earlier object is still being written")
        if self._late is None or self._late_seq != seq or self._late.exception() is not None:
            self._late_seq, self._late = seq, self._pool.submit(work, *given)
        answer: T = _answer(self._late, _PATIENCE_S if patience_s is None else patience_s)
        self._is_away = False
        return answer

    def _write_object(self, seq: int, batch: str) -> str:
        """Its folder is not made again: where a mount is away, that would be on the head's own disk. Nor is it written
        into another one, which may come back over a folder that was begun while it was away."""
        files, folder = self._reach()
        name = f"{seq:016d}-{secrets.token_hex(8)}.json"
        path = f"{folder}/{name}"
        first = path if files.type_name in _OBJECT_STORES else f"{path}.incomplete"
        if isinstance(files, LocalFileSystem):
            if not os.path.exists(f"{folder}/{self._anchor}"):
                text = (
                    f"there is no {folder}/{self._anchor}, which this journal wrote; if this is the right folder, move"
                )
                raise FileNotFoundError(f"{text} {self._path} away: one is made from what is here")
            try:
                Path(first).write_text(batch)
                os.replace(first, path)  # before both are synced, so that a disk's own journal is written once
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
                sync_folder(Path(folder))
            except OSError:
                for left in (first, path):
                    with suppress(OSError):
                        os.unlink(left)
                raise
            return name
        with files.open_output_stream(first) as stream:
            stream.write(batch.encode())
        if first != path:
            files.move(first, path)
        return name

    def _reach(self) -> tuple[Any, str]:
        """The storage's file system, and the journal's folder in it. At first use: some ask the network for it."""
        if self._target is None:
            storage, added = self._storage, _FOR_CLIENTS.get(self._storage.partition("://")[0])
            if added and added.partition("=")[0] not in storage:
                storage += f"{'&' if '?' in storage else '?'}{added}"
            files, folder = FileSystem.from_uri(storage)
            self._target = files, f"{folder.rstrip('/')}/_tlora/journal"
        return self._target

    @contextmanager
    def _storage_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # each storage's client has errors of its own
            text = f"storage {self._name}: the journal's copy there cannot be {what}: {error}."
            raise OSError(f"{text} See that it is there, and open to this machine.") from error


def _answer(work: "Future[T]", patience_s: float) -> T:
    try:
        return work.result(patience_s)
    except TimeoutError:
        if work.done():  # it is the storage's own
            raise
        raise TimeoutError(f"no answer for {patience_s:g} s") from None

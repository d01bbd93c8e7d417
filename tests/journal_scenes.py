"""A journal's heads and its storage, for tests of what is left when one of them is lost or away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem

from tlora.actors.journal import Journal
from tlora.job import State


class Cluster:
    """A head whose disk may be lost, and a storage folder."""

    def __init__(self, folder: Path):
        self.head, self.storage = folder / "head", folder / "storage"
        self.objects = self.storage / "_tlora" / "journal"
        self.opened: list[Journal] = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        for journal in self.opened:
            journal.close()

    def open(self, storage: str | None = None) -> Journal:
        self.opened.append(Journal(self.head / "journal.db", storage or str(self.storage)))
        return self.opened[-1]

    def reopen(self, storage: str | None = None) -> Journal:
        self.opened[-1].close()
        return self.open(storage)

    def after_loss(self, storage: str | None = None) -> Journal:
        """A new head, on a disk of its own."""
        self.head = self.head.with_name(f"head-{len(self.opened)}")
        return self.open(storage)

    def stored(self) -> list[str]:
        return sorted(path.name for path in self.objects.glob("*.json"))


class Files:
    """A file system in memory. It may be away, notes what is asked of it, and says of which kind it is."""

    def __init__(self) -> None:
        self.real, _ = FileSystem.from_uri("mock:///")
        self.real.create_dir("bucket/x/_tlora/journal", recursive=True)
        self.type_name, self.calls = "mock", list[tuple[Any, ...]]()
        self.error: Exception | None = None
        self.is_late = False  # the error comes when the work is done

    def from_uri(self, uri: str) -> tuple["Files", str]:
        self.calls.append(("from_uri", uri))
        return self, "bucket/x/"

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            self.calls.append((name, *args))
            if self.error and not self.is_late:
                raise self.error
            result = getattr(self.real, name)(*args, **settings)
            if self.error and name == "move":
                raise self.error
            return result

        return call

    def asked(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


def words(journal: Journal) -> list[tuple[str, State, str]]:
    return [(entry.name, entry.state, entry.reason) for entry in journal.entries()]


def specs(journal: Journal) -> list[tuple[str, Any]]:
    return [(entry.name, entry.spec) for entry in journal.entries()]

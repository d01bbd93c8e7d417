"""Ranks of a group as processes of this machine, which talk over gloo: what the tests of parallel plans share."""

import multiprocessing
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "tlora.group_trainer", "tlora.stack", "toy"])
PATIENCE_S = 150.0


class RankError(AssertionError):
    """What went wrong on a rank, with its traceback."""


class Ranks:
    """Processes that stay, each for a rank; every call of `run` has a process group of its own."""

    def __init__(self, count: int):
        self._all = [_CONTEXT.Pipe() for _ in range(count)]
        self.processes = [
            _CONTEXT.Process(target=_serve, args=(theirs, rank), daemon=True)
            for rank, (_, theirs) in enumerate(self._all)
        ]
        for process in self.processes:
            process.start()

    def run(self, count: int, function: Callable[..., Any], *args: Any, asked: int = 0) -> list[Any]:
        """`function(*args)` on the first `count` ranks; what each, or each of the first `asked`, returned. One that
        raised fails the test."""
        if len(self._all) < count:
            raise RankError("the ranks were ended: an earlier call did not come back")
        folder = tempfile.mkdtemp(prefix="tlora-ranks-")
        try:
            for ours, _ in self._all[:count]:
                ours.send((function, args, count, folder))
            answers = [self._answer(rank) for rank in range(asked or count)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if errors := [error for _, error in answers if error]:
            raise RankError("\n".join(errors))
        return [result for result, _ in answers]

    def _answer(self, rank: int) -> tuple[Any, str]:
        ours = self._all[rank][0]
        if not ours.poll(PATIENCE_S):
            self.close()
            raise RankError(f"rank {rank} did not answer within {PATIENCE_S:g} s")
        return ours.recv()  # type: ignore[no-any-return]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        self._all = []


def _serve(pipe: Connection, rank: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    while True:
        function, args, count, folder = pipe.recv()
        result, error = None, ""
        try:
            with _group(rank, count, Path(folder)):
                result = function(*args)
        except BaseException:
            error = f"rank {rank}:\n{traceback.format_exc()}"
        pipe.send((result, error))


@contextmanager
def _group(rank: int, count: int, folder: Path) -> Iterator[None]:
    """A default process group over a file, gone at the end, whatever happened."""
    store, timeout = dist.FileStore(str(folder / "store"), count), timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=timeout)
    try:
        yield
    finally:
        if dist.is_initialized():  # else ranks did not meet again
            dist.destroy_process_group()

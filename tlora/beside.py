"""Work on files and states, beside a trainer's ticks: none of it is waited for by jobs that it does not belong to.

Called by the trainer, checkpoints and adapters. What is to be written is handed over as it is now
(`AdapterState.frozen`), for steps go on.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

T = TypeVar("T")
log = logging.getLogger("tlora")
_PIECE_BYTES = 1 << 24
_AGAIN_S = 1.0
_MOST_WAITING = 64


class Writer:
    """Actions on files, one at a time: in threads of their own if `is_beside`, else where they are asked for. In a
    thread, one that cannot write is tried again for `patience_s`, and others go on: a storage may be away for a while,
    or one job's part of it."""

    def __init__(self, device: torch.device, *, is_beside: bool, patience_s: float = 0.0):
        self.is_beside, self._patience_s = is_beside, patience_s
        self._device = device
        self._pool = ThreadPoolExecutor(_MOST_WAITING, "tlora-files") if is_beside else None
        self._turn = Lock()

    def submit(self, action: Callable[[], T], after: Iterable["Future[Any]"] = ()) -> "Future[T]":
        """The future of an action, which begins once those `after` which it comes are done; without a thread it is
        done."""
        if self._pool is not None:
            return self._pool.submit(self._run, action, tuple(after))
        future: Future[T] = Future()
        try:
            future.set_result(action())
        except Exception as error:  # whoever asked looks at the future
            future.set_exception(error)
        return future

    def _run(self, action: Callable[[], T], after: tuple["Future[Any]", ...]) -> T:
        wait(after)
        until_s, is_told = time.monotonic() + self._patience_s, False
        while True:
            try:
                with self._turn, own_stream(self._device):
                    return action()
            except (OSError, SafetensorError) as error:
                if time.monotonic() >= until_s:
                    raise
                log.log(logging.DEBUG if is_told else logging.WARNING, "%s. It is tried again.", str(error).rstrip("."))
                is_told = True
            time.sleep(min(_AGAIN_S, self._patience_s))

    def close(self) -> None:
        """Once all is done."""
        if self._pool is not None:
            self._pool.shutdown()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """This thread's device work beside the ticks', begun after what was launched before; it is through at the
    end."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, or the tensor itself if it lies there."""
    if not tensor.is_cuda:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype)
    copy_in_pieces(copy, tensor)
    return copy


def copy_in_pieces(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous tensor to or from a GPU through a small pinned buffer: a copy of the whole would hold up every
    other one, the ticks' own among them."""
    if target.is_cuda == source.is_cuda:
        target.copy_(source)
        return
    stream = torch.cuda.current_stream(target.device if target.is_cuda else source.device)
    count = _PIECE_BYTES // source.itemsize
    buffer = torch.empty(min(count, source.numel()), dtype=source.dtype, pin_memory=True)
    for mine, theirs in zip(target.view(-1).split(count), source.view(-1).split(count), strict=True):
        piece = buffer[: mine.numel()]
        piece.copy_(theirs, non_blocking=True)
        if source.is_cuda:
            stream.synchronize()
        mine.copy_(piece, non_blocking=True)
        if target.is_cuda:
            stream.synchronize()

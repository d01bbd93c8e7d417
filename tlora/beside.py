"""Work on files and states, beside a trainer's ticks: none of it is waited for by jobs that it does not belong to.

Called by the trainer. What is to be written is handed over as it is now (`AdapterState.frozen`), for steps go on.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


class Writer:
    """Actions one after the other: in a thread of their own if `is_beside`, else where they are asked for."""

    def __init__(self, device: torch.device, *, is_beside: bool):
        self.is_beside = is_beside
        self._device = device
        self._pool = ThreadPoolExecutor(1, "tlora-files") if is_beside else None

    def submit(self, action: Callable[[], T]) -> "Future[T]":
        """The future of an action; without a thread it is done."""
        if self._pool is not None:
            return self._pool.submit(self._run, action)
        future: Future[T] = Future()
        try:
            future.set_result(action())
        except Exception as error:  # whoever asked looks at the future
            future.set_exception(error)
        return future

    def _run(self, action: Callable[[], T]) -> T:
        with own_stream(self._device):
            return action()

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

"""CUDA graphs of small ticks: a forward and backward pass of many short kernels, captured once for a shape of batch.

Kernels reach adapters and their gradients through tables that are refilled in place, so that a graph outlives the jobs
that it was captured with. Called by the super-model, which says when what was captured no longer holds.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch

from tlora.kernels.tiles import Tables
from tlora.memory import driver_memory
from tlora.packing import Batch

log = logging.getLogger("tlora")
_SIGHTS = 3
"""No shape is captured before it comes for the third time: by then it is compiled, and its products are measured."""
_COST = 1.0
"""Of a capture, in launches of its tick."""
_MOST, _REMEMBERED = 16, 4096
_PART = 4
"""All graphs take one of so many parts of the device's memory at most."""


class Graphs:
    """The shapes of one super-model. `most_rows`: of a tick that takes as long to launch as to compute.

    A tick of fewer rows gains 1 − rows / `most_rows` of its launch by being replayed. It is captured once it has lost
    by being launched what a capture costs. All share one pool of memory, which a larger tick after a smaller one makes
    larger by all that it takes: where it would be too large, all is forgotten and that tick captured first, so that the
    others find room in it; one that takes too much by itself is not captured any more."""

    def __init__(self, most_rows: int):
        self._most_rows = self._too_large = most_rows
        self._sights: Counter[tuple[object, ...]] = Counter()
        self._graphs: dict[tuple[object, ...], _Graph] = {}
        self._pool: Any = None
        self._pool_bytes = 0
        self._bytes_of_row = 0.0

    def clear(self) -> None:
        """Forget all that was captured, and seen."""
        self._sights.clear()
        self._drop()
        self._too_large = self._most_rows

    def find(self, batch: Batch, hidden: Callable[[Batch], torch.Tensor]) -> "_Graph | None":
        """The graph of `hidden` for this batch's shape, captured when it is due; none before. The oldest of too many
        makes room."""
        assert batch.rows.num_rows < self._most_rows
        key = (batch.rows.longest, batch.rows.training, *(tensor.shape for tensor in _tensors(batch)))
        if key not in self._graphs:
            if len(self._sights) == _REMEMBERED:
                self._sights = Counter(dict.fromkeys(self._graphs, _SIGHTS))
            self._sights[key] += 1
            sights = max(_SIGHTS, round(_COST / (1.0 - batch.rows.num_rows / self._most_rows)))
            if self._sights[key] < sights or batch.rows.num_rows >= self._too_large:
                return None
            if len(self._graphs) == _MOST:
                del self._sights[oldest := next(iter(self._graphs))], self._graphs[oldest]
            if (graph := self._capture(batch, hidden)) is None:
                return None
            self._graphs[key] = graph
        return self._graphs[key]

    def _capture(self, batch: Batch, hidden: Callable[[Batch], torch.Tensor]) -> "_Graph | None":
        """Beside the others if they leave room for it, else in their place."""
        with torch.cuda.device(batch.ids_T.device):  # what is captured is a stream of the current device
            graph = self._within(batch, hidden)
            if graph is None and self._graphs:
                self._give_back()
                graph = self._within(batch, hidden)
        if graph is None:
            self._give_back()
            self._too_large = batch.rows.num_rows
            log.warning("ticks of %d rows and more are launched: a graph of them has no room", batch.rows.num_rows)
        return graph

    def _within(self, batch: Batch, hidden: Callable[[Batch], torch.Tensor]) -> "_Graph | None":
        """Captured, unless the device has no memory for it, or all take too much."""
        with suppress(torch.OutOfMemoryError), driver_memory():
            if not self._bytes_of_row:
                self._bytes_of_row = _warm(hidden, batch) / batch.rows.num_rows
            if torch.cuda.mem_get_info()[0] < 2.0 * batch.rows.num_rows * self._bytes_of_row:
                torch.cuda.empty_cache()  # while a graph is captured nothing can be given back
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            before = torch.cuda.memory_reserved()
            graph = _Graph(hidden, batch, self._pool)
            self._pool_bytes += max(torch.cuda.memory_reserved() - before, 0)
            if self._pool_bytes <= torch.cuda.mem_get_info()[1] // _PART:
                return graph
        return None

    def _give_back(self) -> None:
        self._drop()
        torch.cuda.empty_cache()

    def _drop(self) -> None:
        self._graphs.clear()
        self._pool, self._pool_bytes = None, 0  # one whose graphs are gone takes no new ones


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """On which all graphs of this process are captured. Streams come round again after 32: that of the files' thread is
    of another priority, so that it is never this one, which nobody may wait for meanwhile."""
    return torch.cuda.Stream(device, priority=-1)


def _warm(hidden: Callable[[Batch], torch.Tensor], batch: Batch) -> int:
    """What is made at the first run on a stream is made outside a graph. Returns the bytes that a pass holds, about."""
    stream = _stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            before = torch.cuda.memory_allocated()
            output = hidden(batch)
            held = torch.cuda.memory_allocated() - before
            output.backward(torch.zeros_like(output))
    finally:
        torch.cuda.current_stream().wait_stream(stream)
    del output
    torch.cuda.empty_cache()  # what that stream keeps no other one can have
    return max(held, 1)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """`torch.cuda.graph`, which gives all cached memory back first: the next large tick would have to ask for it again.
    Other threads read and write beside."""
    with torch.cuda.stream(_stream(torch.cuda.current_device())):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


class _Graph:
    def __init__(self, hidden: Callable[[Batch], torch.Tensor], batch: Batch, pool: Any):
        self._batch = _copy(batch)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with _recording(self._forward, pool):
            output = hidden(self._batch)
        self._d_output = torch.zeros_like(output)
        with _recording(self._backward, pool):
            output.backward(self._d_output)
        self._output = output.detach()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, H], valid until the next run of any graph."""
        for mine, new in zip(_tensors(self._batch), _tensors(batch), strict=True):
            mine.copy_(new, non_blocking=True)
        self._forward.replay()
        return self._output

    def backward(self, d_output: torch.Tensor) -> None:
        self._d_output.copy_(d_output)
        self._backward.replay()


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """All that the base's layers read of a batch."""
    yield from (batch.ids_T, batch.positions_T, batch.rows.block_ends_S)
    yield from (getattr(batch.rows.tables, field.name) for field in fields(Tables))


def _copy(batch: Batch) -> Batch:
    tables = Tables(**{field.name: getattr(batch.rows.tables, field.name).clone() for field in fields(Tables)})
    rows = replace(batch.rows, tables=tables, block_ends_S=batch.rows.block_ends_S.clone())
    return replace(batch, ids_T=batch.ids_T.clone(), positions_T=batch.positions_T.clone(), rows=rows)

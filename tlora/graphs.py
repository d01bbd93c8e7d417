"""CUDA graphs of small ticks: a forward and backward pass of many short kernels, captured once for a shape of batch.

Kernels reach adapters and their gradients through tables that are refilled in place, so that a graph outlives the jobs
that it was captured with. Called by the super-model, which says when what was captured no longer holds.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch

from tlora.kernels.tiles import Tables
from tlora.packing import Batch

_SIGHTS = 3
"""No shape is captured before it comes for the third time: by then it is compiled, and its products are measured. So
much a capture is taken to cost, too, in ticks that are launched: the tick runs, is recorded, and made ready to run."""
_MOST, _REMEMBERED = 16, 4096


class Graphs:
    """The shapes of one super-model. `most_rows`: of a tick that takes as long to launch as to compute.

    A tick of fewer rows gains 1 − rows / `most_rows` of its launch by being replayed. It is captured once launching it
    has cost as much more as a capture does: at most twice what knowing beforehand how often it comes would cost."""

    def __init__(self, hidden: Callable[[Batch], torch.Tensor], most_rows: int):
        self._hidden, self._most_rows = hidden, most_rows
        self._pool: Any = None
        self._sights: Counter[tuple[object, ...]] = Counter()
        self._graphs: dict[tuple[object, ...], _Graph] = {}

    def clear(self) -> None:
        """Forget all that was captured, and seen."""
        self._graphs.clear()
        self._sights.clear()

    def find(self, batch: Batch) -> "_Graph | None":
        """The graph for this batch's shape, captured when it is due; none before. The oldest of too many makes room."""
        assert batch.rows.num_rows < self._most_rows
        key = (batch.rows.longest, batch.rows.training, *(tensor.shape for tensor in _tensors(batch)))
        if key not in self._graphs:
            if len(self._sights) == _REMEMBERED:
                self._sights = Counter(dict.fromkeys(self._graphs, _SIGHTS))
            self._sights[key] += 1
            if self._sights[key] < round(_SIGHTS / (1.0 - batch.rows.num_rows / self._most_rows)):
                return None
            if len(self._graphs) == _MOST:
                del self._sights[oldest := next(iter(self._graphs))], self._graphs[oldest]
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            self._graphs[key] = _Graph(self._hidden, batch, self._pool)
        return self._graphs[key]


class _Graph:
    def __init__(self, hidden: Callable[[Batch], torch.Tensor], batch: Batch, pool: Any):
        self._batch = _copy(batch)
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once outside a graph: what is made at the first run on a stream is made here
            before = torch.cuda.memory_allocated()
            output = hidden(self._batch)
            held = torch.cuda.memory_allocated() - before
            self._d_output = torch.zeros_like(output)
            output.backward(self._d_output)
        torch.cuda.synchronize()
        if torch.cuda.mem_get_info()[0] < 2 * held:
            torch.cuda.empty_cache()
        with _recording(self._forward, stream, pool):
            output = hidden(self._batch)
        with _recording(self._backward, stream, pool):
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


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> Iterator[None]:
    """`torch.cuda.graph`, which gives all cached memory back first: the next large tick would have to ask for it again.
    Other threads read and write beside."""
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def _tensors(batch: Batch) -> Iterator[torch.Tensor]:
    """All that the base's layers read of a batch."""
    yield from (batch.ids_T, batch.positions_T, batch.rows.block_ends_S)
    yield from (getattr(batch.rows.tables, field.name) for field in fields(Tables))


def _copy(batch: Batch) -> Batch:
    tables = Tables(**{field.name: getattr(batch.rows.tables, field.name).clone() for field in fields(Tables)})
    rows = replace(batch.rows, tables=tables, block_ends_S=batch.rows.block_ends_S.clone())
    return replace(batch, ids_T=batch.ids_T.clone(), positions_T=batch.positions_T.clone(), rows=rows)

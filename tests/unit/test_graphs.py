"""When a shape of ticks is captured as a CUDA graph; that replayed ones train the same: system/test_compiled.py."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import toy
from numeric import Job, batch_of

from tlora import graphs
from tlora.graphs import Graphs
from tlora.memory import driver_memory
from tlora.packing import Batch


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the batches that were captured."""
    rows: list[int] = []
    monkeypatch.setattr(graphs, "_Graph", lambda hidden, batch, pool: rows.append(batch.rows.num_rows) or len(rows))
    monkeypatch.setattr(graphs, "_warm", lambda hidden, batch: 1)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: object())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return rows


def hidden(batch: Batch) -> torch.Tensor:
    return torch.zeros(1)


def ticks(made: Graphs, rows: int, most: int = 1000) -> int:
    """Until it is captured."""
    batch = batch_of({0: Job((rows,), rank=2)})
    return next(count for count in range(1, most) if made.find(batch, hidden) is not None)


@pytest.mark.parametrize(("rows", "sights"), [(1, 3), (100, 3), (500, 3), (750, 4), (900, 10), (990, 100)])
def test_a_shape_is_captured_once_launching_it_has_cost_as_much(rows: int, sights: int, captured: list[int]) -> None:
    """Of 1,000 rows that take as long to launch as to compute."""
    assert ticks(Graphs(1000), rows) == sights
    assert captured == [rows]


def test_the_oldest_of_too_many_makes_room(captured: list[int]) -> None:
    made = Graphs(1 << 30)
    for rows in range(1, 18):
        assert ticks(made, rows) == 3
    assert ticks(made, 2) == 1
    assert ticks(made, 1) == 3, "seen anew"
    made.clear()
    assert ticks(made, 2) == 3


def test_what_was_seen_is_not_remembered_for_ever(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lives for months sees any number of shapes."""
    monkeypatch.setattr(graphs, "_REMEMBERED", 8)
    made = Graphs(1 << 30)
    assert ticks(made, 1) == 3
    for rows in range(2, 40):
        assert made.find(batch_of({0: Job((rows,), rank=2)}), hidden) is None
    assert len(made._sights) <= 8
    assert ticks(made, 1) == 1


class Device:
    """A device's memory of 1,000 bytes, of which each captured row takes one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int = 300):
        self.size = size
        self.reserved, self.given_back, self.pools = 0, 0, set[object]()
        monkeypatch.setattr(graphs, "_Graph", self.capture)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: self.reserved)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty)

    def capture(self, hidden: object, batch: Batch, pool: object) -> object:
        self.pools.add(pool)
        if self.reserved + batch.rows.num_rows > self.size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.reserved += batch.rows.num_rows
        return object()

    def empty(self) -> None:
        self.reserved, self.given_back = 0, self.given_back + 1


@pytest.mark.parametrize(("size", "why"), [(400, "they may not take more"), (300, "the device has no more")])
def test_graphs_that_take_too_much_memory_are_forgotten(
    captured: list[int], monkeypatch: pytest.MonkeyPatch, size: int, why: str
) -> None:
    device, made = Device(monkeypatch, size), Graphs(1 << 30)
    for rows in (80, 81, 82):
        assert ticks(made, rows) == 3
    assert device.reserved == 80 + 81 + 82
    assert ticks(made, 83) == 3, "in their place"
    assert (device.reserved, device.given_back) == (83, 1), why
    assert len(device.pools) == 2, "a pool whose graphs are gone takes no new ones"
    assert ticks(made, 80) == 1


@pytest.mark.parametrize("rows", [251, 301], ids=["more than all may take", "no memory"])
def test_a_tick_that_is_too_large_for_a_graph_is_launched(
    captured: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rows: int
) -> None:
    device, made = Device(monkeypatch), Graphs(1 << 30)
    assert ticks(made, 100) == 3
    device.reserved = 0
    for _ in range(40):
        assert made.find(batch_of({0: Job((rows,), rank=2)}), hidden) is None
        assert made.find(batch_of({0: Job((rows + 9,), rank=2)}), hidden) is None
    assert device.given_back == 2, "the others', and its own"
    assert caplog.text.count(f"ticks of {rows} rows and more are launched") == 1
    assert ticks(made, 100) == 1
    made.clear()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10_000, 10_000))
    device.size = 10_000
    assert ticks(made, rows) == 3, "other adapters, and other memory"


def test_cached_memory_is_given_back_where_a_graph_would_not_find_any(
    captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, made = Device(monkeypatch), Graphs(1 << 30)
    monkeypatch.setattr(graphs, "_warm", lambda hidden, batch: 10 * batch.rows.num_rows)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (400, 1000))
    assert ticks(made, 20) == 3
    assert device.given_back == 0
    assert ticks(made, 21) == 3
    assert device.given_back == 1


def test_a_first_pass_without_memory_is_no_capture(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def warm(hidden: object, batch: Batch) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "_warm", warm)
    made = Graphs(1 << 30)
    for _ in range(9):
        assert made.find(batch_of({0: Job((100,), rank=2)}), hidden) is None
    assert not captured


def test_a_tick_is_captured_on_its_own_device(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which need not be the first: `--device cuda:1`."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    assert ticks(Graphs(1000), 100) == 3
    assert entered == [torch.device("cpu")]


def amid_a_capture(*_: object) -> None:
    try:
        raise torch.OutOfMemoryError("CUDA out of memory")
    finally:
        raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")


def in_the_driver(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: out of memory")


def in_a_library(*_: object) -> None:
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def another_error(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("raises", [amid_a_capture, in_the_driver, in_a_library])
def test_memory_that_the_driver_lacks_is_no_end(
    captured: list[int], monkeypatch: pytest.MonkeyPatch, raises: Callable[..., None]
) -> None:
    monkeypatch.setattr(graphs, "_Graph", raises)
    made = Graphs(1000)
    for _ in range(5):
        assert made.find(batch_of({0: Job((100,), rank=2)}), hidden) is None
    monkeypatch.setattr(graphs, "_Graph", another_error)
    made.clear()
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        ticks(made, 100)


def test_an_error_of_the_driver_s_holds_nothing_of_the_tick() -> None:
    """Else what it had taken could not be given back before the next, smaller one."""
    held: list[weakref.ref[torch.Tensor]] = []

    def tick() -> None:
        taken = torch.zeros(8)
        held.append(weakref.ref(taken))
        in_the_driver()

    with pytest.raises(torch.OutOfMemoryError), driver_memory():
        tick()
    assert held[0]() is None


@pytest.mark.parametrize("raises", [amid_a_capture, in_the_driver, in_a_library])
def test_ticks_say_so_as_of_memory_that_pytorch_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raises: Callable[..., None]
) -> None:
    """For then the same rows are sent in smaller ticks."""
    work = toy.Recorder(toy.super_model())
    work.attach(toy.job(tmp_path), toy.data())
    monkeypatch.setattr(work.supermodel, "train", raises)
    with pytest.raises(torch.OutOfMemoryError):
        work.tick()
    monkeypatch.setattr(work.supermodel, "train", another_error)
    work.replay()
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        work.tick()


def test_layers_that_ask_the_device_for_a_number_are_known() -> None:
    """Rope that is scaled by the longest position so far."""
    dynamic = toy.config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    assert toy.super_model(model=dynamic).asks_device()
    assert not toy.super_model().asks_device()

"""When a shape of ticks is captured as a CUDA graph; that replayed ones train the same: system/test_compiled.py."""

import pytest
import torch
from numeric import Job, batch_of

from tlora import graphs
from tlora.graphs import Graphs


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the batches that were captured."""
    rows: list[int] = []
    monkeypatch.setattr(graphs, "_Graph", lambda hidden, batch, pool: rows.append(batch.rows.num_rows) or len(rows))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    return rows


def ticks(made: Graphs, rows: int, most: int = 1000) -> int:
    """Until it is captured."""
    batch = batch_of({0: Job((rows,), rank=2)})
    return next(count for count in range(1, most) if made.find(batch) is not None)


@pytest.mark.parametrize(("rows", "sights"), [(1, 3), (100, 3), (250, 4), (500, 6), (900, 30), (990, 300)])
def test_a_shape_is_captured_once_launching_it_has_cost_as_much(rows: int, sights: int, captured: list[int]) -> None:
    """Of 1,000 rows that take as long to launch as to compute."""
    assert ticks(Graphs(lambda batch: torch.zeros(1), 1000), rows) == sights
    assert captured == [rows]


def test_the_oldest_of_too_many_makes_room(captured: list[int]) -> None:
    made = Graphs(lambda batch: torch.zeros(1), 1 << 30)
    for rows in range(1, 18):
        assert ticks(made, rows) == 3
    assert ticks(made, 2) == 1
    assert ticks(made, 1) == 3, "seen anew"
    made.clear()
    assert ticks(made, 2) == 3


def test_what_was_seen_is_not_remembered_for_ever(captured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lives for months sees any number of shapes."""
    monkeypatch.setattr(graphs, "_REMEMBERED", 8)
    made = Graphs(lambda batch: torch.zeros(1), 1 << 30)
    assert ticks(made, 1) == 3
    for rows in range(2, 40):
        assert made.find(batch_of({0: Job((rows,), rank=2)})) is None
    assert len(made._sights) <= 8
    assert ticks(made, 1) == 1

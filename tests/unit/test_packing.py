"""Sequences of many jobs in one batch: every row, target and block checked against the items it came from."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from numeric import JOBS, Job, batch_of, items_of, spans

from tlora.data import TokenSequence
from tlora.kernels.tiles import LossTable
from tlora.packing import DETERMINISTIC_ROWS, Batch, Item, pack, rows_of

CPU = torch.device("cpu")
OPTIONS = {
    "whole": {},
    "rounded": {"round_to": 64},
    "per_sequence": {"per_sequence": True},
    "small_head": {"head_rows": 7},
    "all": {"per_sequence": True, "round_to": 128, "head_rows": 7, "training": False},
}


@pytest.fixture(params=OPTIONS)
def options(request: pytest.FixtureRequest) -> dict:
    return OPTIONS[request.param]


@pytest.fixture
def batch(options: dict) -> Batch:
    return batch_of(JOBS, **options)


def sequences_of(loss: LossTable) -> torch.Tensor:
    """The sequence that each target row belongs to."""
    return torch.arange(len(loss.counts_S)).repeat_interleave(loss.counts_S)


def test_rows_hold_their_sequences(batch: Batch) -> None:
    for _, item, span in spans(batch):
        length = len(item.sequence)
        assert batch.ids_T[span].tolist() == item.sequence.ids.tolist()
        assert batch.positions_T[span].tolist() == list(range(length))
        assert batch.rows.tables.counters_T[span].tolist() == list(range(item.counter, item.counter + length))


def test_blocks_sum_to_the_rows(batch: Batch, options: dict) -> None:
    rows = batch.rows
    assert sum(rows.blocks) == rows.num_rows == len(rows.tables.counters_T)
    assert len(batch.ids_T) == len(batch.positions_T) == rows.num_rows
    assert rows.num_rows % options.get("round_to", 1) == 0
    assert rows.block_ends_S.dtype == torch.int32
    ends = np.cumsum([0, *rows.blocks]).tolist()
    assert rows.block_ends_S.tolist() == ends + [rows.num_rows] * (-len(ends) % 16)
    assert rows.longest // 2 < max(rows.blocks) <= rows.longest
    assert len(rows.blocks) - len(batch.items) in ((0, 1) if "round_to" in options else (0,))
    assert (rows.training, rows.per_sequence) == (options.get("training", True), options.get("per_sequence", False))
    assert rows.blocks[: len(batch.items)] == tuple(rows_of(item.sequence, rows.per_sequence) for item in batch.items)


def test_every_row_of_a_job_is_in_one_piece_and_no_other_is(batch: Batch) -> None:
    owner = torch.full((batch.rows.num_rows,), -1)
    for _, item, span in spans(batch):
        owner[span] = item.slot
    claimed = torch.full_like(owner, -1)
    for piece in batch.rows.pieces:
        assert (claimed[piece.span] == -1).all()
        assert piece.step == JOBS[piece.slot].step
        claimed[piece.span] = piece.slot
    assert torch.equal(claimed, owner)
    if batch.rows.per_sequence:
        assert [piece.span for piece in batch.rows.pieces] == [span for _, _, span in spans(batch)]
        assert all(piece.first % DETERMINISTIC_ROWS == 0 for piece in batch.rows.pieces)
    else:
        assert [piece.slot for piece in batch.rows.pieces] == [slot for slot, job in JOBS.items() if job.lengths]


def test_a_target_is_the_next_token_of_its_own_sequence(batch: Batch) -> None:
    want = [
        (span.start + at - 1, int(item.sequence.ids[at]), item.weight, index)
        for index, item, span in spans(batch)
        for at in np.flatnonzero(item.sequence.is_target)
    ]
    loss = batch.loss
    parts = (loss.rows_M, loss.targets_M, loss.weights_M, sequences_of(loss))
    got = zip(*(part.tolist() for part in parts), strict=True)
    assert list(got) == want
    assert len(loss.counts_S) == len(batch.items)


def test_head_blocks_hold_one_job_each(batch: Batch, options: dict) -> None:
    most, items = options.get("head_rows", 512), batch.items
    starts = [block.first for block in batch.loss.blocks]
    ends = [block.span.stop for block in batch.loss.blocks]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == len(batch.loss.rows_M)
    for block in batch.loss.blocks:
        inside = set(sequences_of(batch.loss)[block.span].tolist())
        assert 0 < block.rows <= most
        assert {(items[at].slot, items[at].step) for at in inside} == {(block.slot, block.step)}
        assert len(inside) == 1 or not batch.rows.per_sequence
    if not batch.rows.per_sequence:  # and as few as can be
        for slot in JOBS:
            targets = sum(item.sequence.num_targets for item in items if item.slot == slot)
            assert sum(block.slot == slot for block in batch.loss.blocks) == -(-targets // most)


@pytest.mark.parametrize("cuts", [(), (1,), (2, 4), (1, 2, 3, 4, 5, 6)], ids=str)
def test_weights_of_a_step_sum_to_one_however_it_is_cut(cuts: tuple[int, ...]) -> None:
    items = items_of({slot: job for slot, job in JOBS.items() if slot})
    sums: dict[int, float] = {}
    for start, stop in pairwise((0, *cuts, len(items))):
        if start == stop:
            continue
        batch = pack(items[start:stop], device=CPU)
        for weight, at in zip(batch.loss.weights_M.tolist(), sequences_of(batch.loss).tolist(), strict=True):
            slot = batch.items[at].slot
            sums[slot] = sums.get(slot, 0.0) + weight
    assert sums == pytest.approx({slot: 1.0 for slot, job in JOBS.items() if slot and job.lengths})


def test_deterministic_rows_lie_the_same_beside_any_neighbour() -> None:
    """Same offsets within a vector of elements: what is packed before a sequence moves it by whole vectors only."""
    items = items_of({1: Job((5, 40), rank=1)})
    for before in ((1,), (31,), (32,), (33, 2)):
        beside = pack(items_of({0: Job(before, rank=1)}) + items, device=CPU, per_sequence=True)
        alone = pack(items, device=CPU, per_sequence=True)
        moved = beside.rows.num_rows - alone.rows.num_rows
        assert moved % DETERMINISTIC_ROWS == 0
        assert torch.equal(beside.positions_T[moved:], alone.positions_T)
        assert torch.equal(beside.rows.tables.counters_T[moved:], alone.rows.tables.counters_T)
        assert beside.rows.blocks[-2:] == alone.rows.blocks == (32, 64)


def test_padding_is_known_by_length_not_by_id() -> None:
    """A sequence of padding tokens only keeps every one of them, target or not."""
    zeros = TokenSequence(np.zeros(6, np.int32), np.array([False] + [True] * 5))
    batch = pack([Item(0, 0, 0, 0, 0.2, zeros)], device=CPU, round_to=8)
    assert batch.rows.pieces[0].rows == 6
    assert batch.loss.rows_M.tolist() == [0, 1, 2, 3, 4]


def test_a_sequence_without_targets_takes_rows_and_gives_none() -> None:
    items = items_of({0: Job((9, 9), rank=1)})
    items[0] = replace(items[0], sequence=TokenSequence(items[0].sequence.ids, np.zeros(9, bool)))
    batch = pack(items, device=CPU)
    assert batch.rows.num_rows == 18
    assert set(sequences_of(batch.loss).tolist()) == {1}

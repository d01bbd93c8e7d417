"""Sequences of many jobs → one batch, in job order, with the tables that the kernels read.

Called once a slice by the trainer. Positions restart and attention stops at each sequence; padding is known by length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tlora.data import TokenSequence
from tlora.kernels.tiles import LossBlock, LossTable, Piece, RowTable

DETERMINISTIC_ROWS = 32
"""In deterministic mode each sequence starts at a multiple of this many rows: element-wise ops then meet it at the same
offset within their vectors, whatever lies before it."""
HEAD_ROWS = 512
"""Most target rows that pass through the head at a time."""


@dataclass(frozen=True, slots=True)
class Item:
    """One sequence of one job's step (or evaluation), placed in a tick."""

    slot: int
    step: int
    """The job's optimizer step, from 0."""
    position: int
    """Place of the sequence in the job's step."""
    counter: int
    """Tokens of the step before this sequence."""
    weight: float
    """1 / (target tokens of the step)."""
    sequence: TokenSequence


@dataclass(frozen=True, slots=True)
class Batch:
    """What one forward pass takes. Tensors on the device; `items` in the order of the rows."""

    items: tuple[Item, ...]
    ids_T: torch.Tensor
    positions_T: torch.Tensor
    rows: RowTable
    loss: LossTable


def rows_of(sequence: TokenSequence, per_sequence: bool) -> int:
    """Rows that a sequence takes in a batch."""
    return -(-len(sequence) // DETERMINISTIC_ROWS) * DETERMINISTIC_ROWS if per_sequence else len(sequence)


def pack(
    items: Sequence[Item],
    *,
    device: torch.device,
    per_sequence: bool = False,
    training: bool = True,
    round_to: int = 1,
    head_rows: int = HEAD_ROWS,
) -> Batch:
    """Lay `items` (sorted by slot, then position) row after row.

    The end is filled to a multiple of `round_to` with rows that belong to nobody. At most `head_rows` target rows go
    through the head at a time.
    """
    blocks = [rows_of(item.sequence, per_sequence) for item in items]
    if gap := -sum(blocks) % round_to:
        blocks.append(gap)
    num_rows = sum(blocks)
    ids, positions, counters = (torch.zeros(num_rows, dtype=torch.int64) for _ in range(3))
    pieces: list[Piece] = []
    loss_blocks: list[LossBlock] = []
    rows, targets, weights, counts = [], [], [], []
    first = num_targets = 0
    for item, block in zip(items, blocks, strict=False):
        assert not item.sequence.is_target[0], "a first token has nothing to be predicted from"
        length = len(item.sequence)
        tokens = torch.from_numpy(item.sequence.ids).long()
        ids[first : first + length] = tokens
        positions[first : first + block] = torch.arange(block).clamp_(max=length - 1)
        counters[first : first + length] = torch.arange(item.counter, item.counter + length)
        last = pieces[-1] if pieces else None
        if last and last.slot == item.slot and not per_sequence:
            pieces[-1] = Piece(item.slot, last.first, last.rows + length, item.step)
        else:
            pieces.append(Piece(item.slot, first, length, item.step))
        at = torch.from_numpy(item.sequence.is_target).nonzero().squeeze(1)
        rows.append(first + at - 1)
        targets.append(tokens[at])
        weights.append(torch.full((len(at),), item.weight, dtype=torch.float64))
        counts.append(len(at))
        _extend(loss_blocks, item, num_targets, len(at), head_rows, per_sequence)
        first, num_targets = first + block, num_targets + len(at)
    ends = torch.tensor([0, *blocks]).cumsum(0, dtype=torch.int32)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device, non_blocking=True)

    return Batch(
        tuple(items),
        move(ids),
        move(positions),
        RowTable(num_rows, tuple(pieces), tuple(blocks), move(counters), move(ends), per_sequence, training),
        LossTable(
            rows_M=move(torch.cat(rows)),
            targets_M=move(torch.cat(targets)),
            weights_M=move(torch.cat(weights)),
            counts_S=move(torch.tensor(counts)),
            blocks=tuple(loss_blocks),
        ),
    )


def _extend(blocks: list[LossBlock], item: Item, first: int, rows: int, most: int, per_sequence: bool) -> None:
    """Add `rows` target rows to the job's last block while it has room, and in new ones beyond."""
    last = blocks[-1] if blocks else None
    if last and last.slot == item.slot and not per_sequence and (taken := min(rows, most - last.rows)) > 0:
        blocks[-1] = LossBlock(item.slot, item.step, last.first, last.rows + taken)
        first, rows = first + taken, rows - taken
    while rows > 0:
        taken = min(rows, most)
        blocks.append(LossBlock(item.slot, item.step, first, taken))
        first, rows = first + taken, rows - taken

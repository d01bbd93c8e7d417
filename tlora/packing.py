"""Sequences of many jobs → one batch, in job order, with the tables that the kernels read.

Called once a slice by the trainer. Positions restart and attention stops at each sequence; padding is known by length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from tlora.data import TokenSequence
from tlora.kernels.tiles import LossBlock, LossTable, Piece, RowTable, Tables, tabulate

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
    targeted: list[torch.Tensor] = []
    first = 0
    for item, block in zip(items, blocks, strict=False):
        length = len(item.sequence)
        ids[first : first + length] = torch.from_numpy(item.sequence.ids)
        positions[first : first + block] = torch.arange(block).clamp_(max=length - 1)
        counters[first : first + length] = torch.arange(item.counter, item.counter + length)
        last = pieces[-1] if pieces else None
        if last and last.slot == item.slot and not per_sequence:
            pieces[-1] = Piece(item.slot, last.first, last.rows + length, item.step)
        else:
            pieces.append(Piece(item.slot, first, length, item.step))
        assert not item.sequence.is_target[0], "a first token has nothing to be predicted from"
        targeted.append(first + torch.from_numpy(item.sequence.is_target).nonzero().squeeze(1))
        first += block
    counts, at_M = [len(at) for at in targeted], torch.cat(targeted)
    weights = [
        torch.full((len(at),), item.weight, dtype=torch.float64) for item, at in zip(items, targeted, strict=True)
    ]
    moved = _send(
        {
            "ids_T": ids,
            "positions_T": positions,
            "rows_M": at_M - 1,
            "targets_M": ids[at_M],
            "weights_M": torch.cat(weights),
            "counts_S": torch.tensor(counts),
            "block_ends_S": _ends(blocks),
            **tabulate(pieces, num_rows, counters, per_sequence=per_sequence),
        },
        device,
    )
    tables = Tables(**{field.name: moved[field.name] for field in fields(Tables)})
    ends, longest = moved["block_ends_S"], 1 << (max(blocks) - 1).bit_length()
    rows = RowTable(num_rows, tuple(pieces), tuple(blocks), ends, longest, per_sequence, training, tables)
    loss = {name: moved[name] for name in ("rows_M", "targets_M", "weights_M", "counts_S")}
    blocks_M = _loss_blocks(items, counts, head_rows, per_sequence)
    return Batch(tuple(items), moved["ids_T"], moved["positions_T"], rows, LossTable(**loss, blocks=blocks_M))


def idle(*, device: torch.device, per_sequence: bool, training: bool, num_rows: int) -> Batch:
    """Rows that belong to nobody, and no target: what a rank runs through the base while others have work."""
    nothing = Item(-1, 0, 0, 0, 0.0, TokenSequence(np.zeros(1, np.int32), np.zeros(1, np.bool_)))
    batch = pack([nothing], device=device, per_sequence=per_sequence, training=training, round_to=num_rows)
    return replace(batch, items=())


def _ends(blocks: Sequence[int]) -> torch.Tensor:
    """Where each block ends, from 0; filled up with empty blocks to a multiple of 16."""
    ends = torch.tensor([0, *blocks]).cumsum(0, dtype=torch.int32)
    return torch.cat([ends, ends[-1:].expand(-len(ends) % 16)])


def _send(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """To the device, from one pinned buffer, without waiting. Each starts at its own storage's beginning: of a view
    into a larger one the compiler would not know the alignment, nor of anything that is computed from it."""
    if device.type == "cpu":
        return tensors
    sizes = [-(-tensor.nbytes // 16) * 16 for tensor in tensors.values()]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    moved = {}
    for (name, tensor), part in zip(tensors.items(), packed.split(sizes), strict=True):
        mine = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved[name] = mine.copy_(tensor).to(device, non_blocking=True)
    return moved


def _loss_blocks(items: Sequence[Item], counts: Sequence[int], most: int, per_sequence: bool) -> tuple[LossBlock, ...]:
    """Each job's target rows, `counts` a sequence, in as few blocks of at most `most` rows as hold them in order."""
    blocks: list[LossBlock] = []
    first = 0
    for item, rows in zip(items, counts, strict=True):
        last = blocks[-1] if blocks else None
        if last and last.slot == item.slot and not per_sequence and (taken := min(rows, most - last.rows)) > 0:
            blocks[-1] = LossBlock(item.slot, item.step, last.first, last.rows + taken)
            first, rows = first + taken, rows - taken
        while rows > 0:
            taken = min(rows, most)
            blocks.append(LossBlock(item.slot, item.step, first, taken))
            first, rows = first + taken, rows - taken
    return tuple(blocks)

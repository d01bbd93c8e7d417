"""Tables that say which rows belong to whom: built once when a batch is packed, read by every kernel.

Shape legend, here and in every kernel: T rows (tokens of many jobs, in job order), K inputs and N outputs of a linear,
R rank, S sequences, M target rows, V vocabulary, H hidden size. `tlora.packing` fills the tables of rows,
`tlora.supermodel` those of adapters. The device's copies are what the Triton kernels read.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one job, reduced together: all its rows in production, one sequence in deterministic mode."""

    slot: int
    """The job's place in the super-model."""
    first: int
    rows: int
    step: int
    """The job's own optimizer step, which its dropout masks depend on."""

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.rows)


PART_ROWS = 1024
"""About so many rows of a job are summed by one program; a job of more is cut into parts, whose sums are then added."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Who owns which rows, for the kernels; int32, on the device. Unused entries at the ends have slot −1."""

    segment_T: torch.Tensor
    """[T]: each row's segment."""
    segments: torch.Tensor
    """[segments, 4]: slot (−1: nobody), first row, end, step; consecutive rows of one job."""
    counters_T: torch.Tensor
    """[T]: a row's number within its job's own step."""
    pieces: torch.Tensor
    """[pieces, 2]: first row, rows; gradients are summed piece by piece, each from zero, in this order."""
    parts: torch.Tensor
    """[parts, 4]: slot, first piece, pieces, and the place of its partial sum (−1: it is all of the job)."""
    folds: torch.Tensor
    """[jobs of several parts, 4]: slot, first partial sum, how many, unused."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """The T rows of one batch. Rows in no piece belong to nobody: they are computed, and touch nothing."""

    num_rows: int
    pieces: tuple[Piece, ...]
    blocks: tuple[int, ...]
    """Rows of each sequence with what rounds it up; they sum to T. Attention never crosses a block."""
    block_ends_S: torch.Tensor
    """int32: cumulative block sizes, from 0; T again and again at the end, so that its length is one of few values."""
    longest: int
    """No block is longer; a power of two, so that it is one of few values."""
    per_sequence: bool
    """Deterministic mode: no product's bits depend on what else is packed. Mixed linears have one tile shape; what has
    no kernel of its own runs block by block."""
    training: bool
    """Dropout is drawn only while training."""
    tables: Tables


@dataclass(frozen=True, slots=True)
class LossBlock:
    """Consecutive target rows of one job that pass through the head together."""

    slot: int
    step: int
    first: int
    rows: int

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.rows)


@dataclass(frozen=True, slots=True)
class LossTable:
    """The M rows whose next token is a target. Only these pass through the head."""

    rows_M: torch.Tensor
    """int64 [M]: index into the T rows, ascending."""
    targets_M: torch.Tensor
    """int64 [M]: the next token."""
    weights_M: torch.Tensor
    """[M]: 1 / (target tokens of that job's optimizer step)."""
    counts_S: torch.Tensor
    """int64 [S]: target rows of each sequence; they sum to M."""
    blocks: tuple[LossBlock, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One job's A and B at one linear: views into the job's vectors, where B and its gradient lie as [R, N]."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    grad_a_RK: torch.Tensor
    grad_b_NR: torch.Tensor
    scale: float
    dropout: float
    seed: int
    module: int
    """Number of the module in dropout's counter: a hash of its name."""
    first_column: int = 0
    """Column of the module's whole input that A's first one stands for, where A is cut over several ranks."""


class Adapters:
    """The adapters on linears that read one input (q, k, v; gate, up; or one alone), whose outputs lie side by side."""

    FIELDS = 12

    def __init__(self, widths: Sequence[int], device: torch.device):
        self.columns = tuple(accumulate(widths, initial=0))
        self.sites: tuple[dict[int, Site], ...] = tuple({} for _ in widths)
        self.table = torch.zeros(len(widths), 64, self.FIELDS, dtype=torch.int64, device=device)
        """[modules, slots, fields], fields as in `kernels/mask.py`; a rank of 0 says that there is no adapter."""
        self.low = 64
        """Row stride of S and dS, for the largest rank of the super-model."""
        self.is_empty = True

    def span(self, module: int) -> slice:
        return slice(*self.columns[module : module + 2])

    def reserve(self, slot: int) -> None:
        """Room for a job of this slot, whose rows may pass whether or not it has an adapter here."""
        while slot >= self.table.shape[1]:
            self.table = torch.cat([self.table, torch.zeros_like(self.table)], 1)

    def place(self, module: int, slot: int, site: Site) -> None:
        self.reserve(slot)
        self.sites[module][slot] = site
        self.is_empty = False
        vectors = (site.a_RK, site.b_NR, site.grad_a_RK, site.grad_b_NR)
        first, end = self.columns[module : module + 2]
        assert site.b_NR.shape == (end - first, len(site.a_RK)), "as many outputs as the module has, as many ranks as A"
        assert site.grad_a_RK.shape == site.a_RK.shape
        assert site.grad_b_NR.shape == site.b_NR.shape
        assert all(not vector.data_ptr() % 16 for vector in vectors)  # where kernels read them
        assert all(vector.is_contiguous() for vector in (site.a_RK, site.b_NR.T, site.grad_a_RK, site.grad_b_NR.T))
        bits = (_float_bits(site.scale / (1.0 - site.dropout)), _float_bits(site.scale), int(site.dropout * 2**32))
        key = (site.seed & 0xFFFFFFFF, site.seed >> 32, site.module, site.first_column)
        row = [*(vector.data_ptr() for vector in vectors), site.a_RK.shape[0], *bits, *key]
        self.table[module, slot] = torch.tensor(row, dtype=torch.int64)

    def remove(self, module: int, slot: int) -> None:
        if self.sites[module].pop(slot, None) is not None:
            self.table[module, slot] = 0
            self.is_empty = not any(self.sites)


def stride_of(rank: int) -> int:
    """Row stride of S for ranks up to `rank`: few values, so that compiled code stays valid as jobs come and go."""
    return next(stride for stride in (64, 256) if stride >= rank)


def _float_bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def tabulate(
    pieces: Sequence[Piece], num_rows: int, counters_T: torch.Tensor, *, per_sequence: bool
) -> dict[str, torch.Tensor]:
    """The fields of `Tables`, on the host."""
    segments: list[tuple[int, int, int, int]] = []
    parts: list[tuple[int, int, int, int]] = []
    folds: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int]] = []
    end = partials = 0
    owners = [slot for slot, _ in groupby(piece.slot for piece in pieces)]
    assert len(owners) == len(set(owners)), "a job's rows lie together: programs of two parts would add to it at once"
    for piece in (*pieces, Piece(-1, num_rows, 0, 0)):
        assert piece.first >= end, "pieces lie one after the other, within the rows"
        if piece.first > end:
            segments.append((-1, end, piece.first, 0))
        end = piece.first + piece.rows
        if not piece.rows:
            continue
        segments.append((piece.slot, piece.first, end, piece.step))
        count = 1 if per_sequence else max(1, round(piece.rows / PART_ROWS))
        cuts = [piece.first + piece.rows * cut // count for cut in range(count + 1)]
        if per_sequence and parts and parts[-1][0] == piece.slot:
            slot, first, pieces_before, partial = parts[-1]
            parts[-1] = (slot, first, pieces_before + 1, partial)
        elif count == 1:
            parts.append((piece.slot, len(spans), 1, -1))
        else:
            parts += [(piece.slot, len(spans) + cut, 1, partials + cut) for cut in range(count)]
            folds.append((piece.slot, partials, count, 0))
            partials += count
        spans += [(first, last - first) for first, last in pairwise(cuts)]
    lengths = torch.tensor([last - first for _, first, last, _ in segments], dtype=torch.int64)
    return {
        "segment_T": torch.arange(len(segments), dtype=torch.int32).repeat_interleave(lengths),
        "segments": _filled(segments, 4),
        "counters_T": counters_T.int(),
        "pieces": _filled(spans, 2),
        "parts": _filled(parts, 4),
        "folds": _filled(folds, 4),
    }


def _filled(rows: Sequence[tuple[int, ...]], width: int) -> torch.Tensor:
    """An int32 table whose length is one of few values: as many rows of −1 at the end as that takes."""
    table = torch.full((max(32, 1 << (len(rows) - 1).bit_length()), width), -1, dtype=torch.int32)
    if rows:
        table[: len(rows)] = torch.tensor(rows, dtype=torch.int32)
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One job's optimizer step: flat vectors of one length, changed in place, and the numbers that it takes."""

    master: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    compute: torch.Tensor
    """The copy that the kernels read, in the base's precision; may be the master itself."""
    loss: torch.Tensor
    """Scalar on the device, in the master's precision."""
    step: int
    """Counts from 1."""
    lr: float
    lr_b: float
    """Rate of the elements from `b_start` on (LoRA+)."""
    b_start: int
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """0: no clipping."""

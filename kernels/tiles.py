"""Tables that say which rows belong to whom: built once when a batch is packed, read by every kernel.

Shape legend, here and in every kernel: T rows (tokens of many jobs, in job order), K inputs and N outputs of a linear,
R rank, S sequences, M target rows, V vocabulary, H hidden size. Plain records; what fills them is `tlora.packing`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RowTable:
    """The T rows of one batch. Rows in no piece belong to nobody: they are computed, and touch nothing."""

    num_rows: int
    pieces: tuple[Piece, ...]
    blocks: tuple[int, ...]
    """Rows of each sequence with what rounds it up; they sum to T. Attention never crosses a block."""
    counters_T: torch.Tensor
    """int64 [T]: a row's number within its job's own step."""
    block_ends_S: torch.Tensor
    """int32 [S + 1]: cumulative block sizes, from 0."""
    per_sequence: bool
    """Deterministic mode: every product runs block by block, so its bits do not depend on what else is packed."""
    training: bool
    """Dropout is drawn only while training."""


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
    """One job's A and B at one linear: views into the job's vectors."""

    a_RK: torch.Tensor
    b_NR: torch.Tensor
    grad_a_RK: torch.Tensor
    grad_b_NR: torch.Tensor
    scale: float
    dropout: float
    seed: int
    module: int
    """Number of the module in dropout's counter: a hash of its name."""


Sites = Mapping[int, Site]
"""By slot: the residents that have an adapter on a module."""

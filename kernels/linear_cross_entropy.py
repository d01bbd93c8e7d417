"""The head and its loss, chunk by chunk: a plain product, `cross_entropy` in place, a plain product back.

Rows of all jobs share a chunk, since each carries its own weight; so one backward pass serves every job.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import Tensor

from tlora.kernels import reference, routes
from tlora.kernels.cross_entropy import cross_entropy
from tlora.kernels.tiles import Adapters, LossBlock, LossTable, RowTable

CHUNK_LOGITS = 1 << 28
"""Most logits that exist at a time."""


def linear_cross_entropy(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rows: RowTable,
    loss: LossTable,
    adapters: Adapters,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """`reference.linear_cross_entropy`; on a GPU in large chunks, but job by job where an adapter targets the head,
    and sequence by sequence in deterministic mode. Nothing waits for the device."""
    if not routes.is_fused(hidden_TH):
        return reference.linear_cross_entropy(
            hidden_TH, weight_VH, bias_V, rows, loss, adapters,
            multiplier=multiplier, softcap=softcap, with_gradient=with_gradient,
        )  # fmt: skip
    apart = rows.per_sequence or not adapters.is_empty
    blocks = loss.blocks if apart else chunks(len(loss.rows_M), len(weight_VH))
    rows_loss = partial(cross_entropy, multiplier=multiplier, softcap=softcap, with_gradient=with_gradient)
    return reference.by_blocks(hidden_TH, weight_VH, bias_V, rows, loss, adapters, blocks, rows_loss, with_gradient)


def wrong_tokens(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    rows: RowTable,
    loss: LossTable,
    adapters: Adapters,
) -> Tensor:
    """How many of each sequence's targets are not the head's likeliest token [S]. At none, greedy decoding answers
    all of them: each is then what it would have put there. (What logits are scaled or capped by moves no maximum.)"""
    apart = rows.per_sequence or not adapters.is_empty
    blocks = loss.blocks if apart else chunks(len(loss.rows_M), len(weight_VH))

    def is_wrong(raw_MV: Tensor, targets_M: Tensor, weights_M: Tensor) -> Tensor:
        return (raw_MV.argmax(-1) != targets_M).to(hidden_TH.dtype)

    return reference.by_blocks(hidden_TH, weight_VH, bias_V, rows, loss, adapters, blocks, is_wrong, False)[0]


def chunks(rows: int, vocab: int) -> Sequence[LossBlock]:
    """As few chunks of about equal length as hold at most CHUNK_LOGITS logits each; of no job in particular."""
    count = max(1, -(-rows // max(1, CHUNK_LOGITS // vocab)))
    cuts = [rows * cut // count for cut in range(count + 1)]
    return [LossBlock(-1, 0, first, end - first) for first, end in pairwise(cuts)]

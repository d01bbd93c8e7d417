"""Cross-entropy of the head's raw outputs, one program a row: the row is read twice, and its gradient written over it.

The loss over the head calls it on a block of rows at a time. Nothing passes between rows, so a row's bits do not depend
on its neighbours. The maths in the open: `reference.cross_entropy`.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from tlora.kernels import reference, routes

_LANES = tl.constexpr(8192)
_GROUP = tl.constexpr(8)
"""Columns that share one bit of mask: a mask by the column would split 16-byte loads where V is no multiple of 8."""


@triton.jit
def _logits(p_raw, mask, multiplier, softcap):  # type: ignore[no-untyped-def]
    """Logits in float32, −∞ where masked, and d logits / d raw."""
    logits = tl.load(p_raw, mask=mask, other=0.0).to(tl.float32) * multiplier
    slope = multiplier
    if softcap is not None:
        # tanh and its slope through an exponential that cannot overflow.
        decay = tl.exp(tl.abs(logits) * (-2.0 / softcap))
        tanh = (1.0 - decay) / (1.0 + decay)
        slope *= 4.0 * decay / ((1.0 + decay) * (1.0 + decay))
        logits = softcap * tl.where(logits < 0.0, -tanh, tanh)
    return tl.where(mask, logits, float("-inf")), slope


@triton.jit
def _overwrite(p_row, o_V, mask, target, weight, top, share, multiplier, softcap):  # type: ignore[no-untyped-def]
    """d (weight · loss) / d raw, over the columns it is made from."""
    logits, slope = _logits(p_row + o_V, mask, multiplier, softcap)
    p = tl.exp(logits - top) * share
    gradient = tl.where(o_V == target, p - 1.0, p) * slope * weight
    tl.store(p_row + o_V, tl.where(weight == 0.0, 0.0, gradient).to(p_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["p_targets", "p_weights"])  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    p_raw, p_targets, p_weights, p_losses, stride, V, multiplier, softcap,
    ALIGNED: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    i_M = tl.program_id(0).to(tl.int64)
    target = tl.load(p_targets + i_M).to(tl.int32)
    weight = tl.load(p_weights + i_M).to(tl.float32)
    # Divided and multiplied so that the compiler sees a multiple of ALIGNED and loads 16 bytes at once.
    p_row = p_raw + i_M * (stride // ALIGNED * ALIGNED)
    whole = V // _GROUP * _GROUP
    o_lane = tl.arange(0, _LANES)
    o_rest = whole + tl.arange(0, _GROUP)

    # Each lane keeps its own maximum, finite so that −∞ can be subtracted from it, and Σ exp(logit − maximum).
    b_top = tl.full([_LANES], -3.4e38, tl.float32)
    b_sum = tl.zeros([_LANES], tl.float32)
    for first in range(0, whole, _LANES):
        o_V = first + o_lane
        logits, _ = _logits(p_row + o_V, o_V // _GROUP * _GROUP < whole, multiplier, softcap)
        decay = tl.exp(-tl.abs(logits - b_top))
        b_sum = tl.where(logits > b_top, b_sum * decay + 1.0, b_sum + decay)
        b_top = tl.where(logits > b_top, logits, b_top)
    rest, _ = _logits(p_row + o_rest, o_rest < V, multiplier, softcap)
    top = tl.maximum(tl.max(b_top, 0), tl.max(rest, 0))
    total = tl.sum(b_sum * tl.exp(b_top - top), 0) + tl.sum(tl.exp(rest - top), 0)

    wanted, _ = _logits(p_row + target, weight != 0.0, multiplier, softcap)
    loss = weight * (top - wanted + tl.log(total))
    tl.store(p_losses + i_M, tl.where(weight == 0.0, 0.0, loss))
    if WITH_GRADIENT:
        tl.debug_barrier()  # No thread writes before all have read.
        share = 1.0 / total
        for first in range(0, whole, _LANES):
            o_V = first + o_lane
            m_V = o_V // _GROUP * _GROUP < whole
            _overwrite(p_row, o_V, m_V, target, weight, top, share, multiplier, softcap)
        _overwrite(p_row, o_rest, o_rest < V, target, weight, top, share, multiplier, softcap)


def cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    weights_M: torch.Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> torch.Tensor:
    """Weight · loss of each row, float32 [M]; with gradient, overwrites the raw outputs by d (weight · loss) / d raw.

    Arguments as in `reference.cross_entropy`. Reads 16 bytes at once where rows start on multiples of 16 bytes,
    whatever V is.
    """
    if not routes.is_fused(logits_MV):
        return reference.cross_entropy(
            logits_MV, targets_M, weights_M, multiplier=multiplier, softcap=softcap, with_gradient=with_gradient
        )
    rows, columns = logits_MV.shape
    stride = logits_MV.stride(0)
    assert logits_MV.stride(1) == targets_M.stride(0) == weights_M.stride(0) == 1
    losses_M = torch.empty(rows, dtype=torch.float32, device=logits_MV.device)
    with torch.cuda.device_of(logits_MV):
        _cross_entropy[rows,](
            logits_MV, targets_M, weights_M, losses_M, stride, columns, multiplier, softcap,
            ALIGNED=gcd(stride, 8), WITH_GRADIENT=with_gradient, num_warps=16,
        )  # fmt: skip
    return losses_M

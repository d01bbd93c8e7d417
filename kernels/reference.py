"""Plain-torch twins of the kernels: the test oracle, and the path wherever the fused ones do not run.

The maths of one linear, for row t of job j with rank r, scale s = α/r (α/√r for rsLoRA) and dropout mask D (rate p):

    forward    S = X̂ Aᵀ        Y = X Wᵀ + b + s S Bᵀ              X̂ = D ⊙ X / (1 − p)
    backward   dS = s dY B      dX = dY W + D ⊙ (dS A) / (1 − p)    dB = s dYᵀ S    dA = dSᵀ X̂

W is frozen, so there is no dW; the base path is never dropped. dA and dB go straight into the job's gradient vector.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F

from tlora.kernels.tiles import Adapters, LossBlock, LossTable, Piece, RowTable, Site, Update

_MOST_WIDE = 1 << 26
"""Elements of a product that exist in float32 at a time."""
_MASK = 0xFFFFFFFF


def keep_mask(
    counters_T: torch.Tensor, columns: int, *, seed: int, step: int, module: int, dropout: float, first: int = 0
) -> torch.Tensor:
    """Bool [T, columns]: which inputs dropout keeps, from column `first` on.

    A hash of (job seed, job step, module, row within the job's own step, column) and nothing else: a mask is the same
    whatever is packed beside the job, however its step is cut, and when it is drawn again in the backward pass.
    All arithmetic is modulo 2³²: each word enters the state by addition and is scattered by murmur3's finaliser, which
    gives a row two keys; a column's key is multiplied by the second, which is odd, and added to the first.
    """
    state = torch.zeros(1, dtype=torch.int64, device=counters_T.device)
    for word in (seed & _MASK, seed >> 32, step, module):
        state = _scatter(state + word)
    first_T = _scatter(state + counters_T)
    second_T = _scatter(first_T) | 1
    columns_K = (torch.arange(first, first + columns, device=counters_T.device) * 0x9E3779B9) & _MASK
    columns_K = ((columns_K ^ (columns_K >> 16)) * 0x85EBCA6B) & _MASK
    return (columns_K * second_T[:, None] + first_T[:, None]) & _MASK >= int(dropout * 2**32)


def _scatter(x: torch.Tensor) -> torch.Tensor:
    x = (x + 0x9E3779B9) & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def dropped(x_TK: torch.Tensor, site: Site, step: int, counters_T: torch.Tensor, training: bool) -> torch.Tensor:
    """D ⊙ X / (1 − p) for rows of one job; X itself where nothing is dropped."""
    if site.dropout == 0.0 or not training:
        return x_TK
    key = {"seed": site.seed, "step": step, "module": site.module, "first": site.first_column}
    keep_TK = keep_mask(counters_T, x_TK.shape[1], dropout=site.dropout, **key)
    return torch.where(keep_TK, x_TK / (1.0 - site.dropout), 0.0)


ACTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def gated(y: torch.Tensor, act: str) -> torch.Tensor:
    """act(gate) · up [T, I], of a product Y [T, 2I] that has the gate's columns first."""
    gate, up = y.chunk(2, -1)
    return ACTS[act](gate) * up


def gated_backward(d: torch.Tensor, y: torch.Tensor, act: str) -> torch.Tensor:
    """dY [T, 2I] from the gradient [T, I] of `gated`."""
    gate, up = y.chunk(2, -1)
    slope = torch.ops.aten.silu_backward if act == "silu" else partial(torch.ops.aten.gelu_backward, approximate="tanh")
    return torch.cat([slope(d * up, gate), d * ACTS[act](gate)], -1)


def add_wide(
    y_TN: torch.Tensor, x_TK: torch.Tensor, weight_KN: torch.Tensor, bias_N: torch.Tensor | None = None
) -> None:
    """Y += X W + b, rounded once. A young adapter adds less than half a unit in the last place of a half-precision X W,
    or b: after a rounding of these nearly all of it would be lost, before it hardly any is. CUDA's `addmm_` rounds
    first."""
    if y_TN.itemsize == 2 and (y_TN.is_cuda or bias_N is not None):
        rows = max(1024, _MOST_WIDE // y_TN.shape[1])
        for y, x in zip(y_TN.split(rows), x_TK.split(rows), strict=True):
            total = _wide(x, weight_KN).add_(y)
            y.copy_(total if bias_N is None else total.add_(bias_N))
    else:
        y_TN.addmm_(x_TK, weight_KN)
        if bias_N is not None:
            y_TN += bias_N


def _wide(x_TK: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
    if x_TK.is_cuda:
        return torch.mm(x_TK, weight_KN, out_dtype=torch.float32)
    return x_TK.float() @ weight_KN.float()


def _add_wide(
    y_TN: torch.Tensor, x_TK: torch.Tensor, weight_KN: torch.Tensor, rows: RowTable, bias_N: torch.Tensor | None
) -> None:
    """In deterministic mode block by block: a product's bits depend on how many rows it has."""
    blocks = rows.blocks if rows.per_sequence else [len(x_TK)]
    for y, x in zip(y_TN.split(blocks), x_TK.split(blocks), strict=True):
        add_wide(y, x, weight_KN, bias_N)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TK, weight_NK, bias_N, rows, adapters):  # type: ignore[no-untyped-def]
        y_TN = x_TK.new_zeros(len(x_TK), len(weight_NK))
        lows = []
        for piece, site, span in _adapted(rows, adapters):
            s_TR = _dropped(x_TK[piece.span], piece, site, rows) @ site.a_RK.T
            y_TN[piece.span, span].addmm_(s_TR, site.b_NR.T, alpha=site.scale)
            lows.append(s_TR)
        _add_wide(y_TN, x_TK, weight_NK.T, rows, bias_N)
        ctx.save_for_backward(x_TK, weight_NK, *lows)
        ctx.rows, ctx.adapters = rows, adapters
        return y_TN

    @staticmethod
    def backward(ctx, dy_TN):  # type: ignore[no-untyped-def]
        x_TK, weight_NK, *lows = ctx.saved_tensors
        rows: RowTable = ctx.rows
        dy_TN = dy_TN.contiguous()
        dx_TK = torch.zeros_like(x_TK)
        for (piece, site, span), s_TR in zip(_adapted(rows, ctx.adapters), lows, strict=True):
            dy = dy_TN[piece.span, span]
            ds_TR = (dy @ site.b_NR).mul_(site.scale)
            add_product(site.grad_b_NR, dy, s_TR, site.scale)
            add_product(site.grad_a_RK, ds_TR, _dropped(x_TK[piece.span], piece, site, rows))
            dx_TK[piece.span] += _dropped(ds_TR @ site.a_RK, piece, site, rows)
        _add_wide(dx_TK, dy_TN, weight_NK, rows, None)
        return dx_TK, None, None, None, None


def lora_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, rows: RowTable, adapters: Adapters
) -> torch.Tensor:
    """Mixed-job linear: Y = X Wᵀ + b, plus each job's own low-rank product on its own rows, for each of the linears
    whose weights lie one below the other in `weight_NK`.

    Backward adds dA and dB to the gradient views of the sites, in the order of the pieces, and returns dX.
    """
    if adapters.is_empty and not rows.per_sequence:
        return F.linear(x_TK, weight_NK, bias_N)
    if len(x_TK) != rows.num_rows:
        raise RuntimeError(f"a mixed linear got {len(x_TK)} rows; want the {rows.num_rows} of the batch's tables.")
    return _LoraLinear.apply(x_TK, weight_NK, bias_N, rows, adapters)  # type: ignore[no-any-return, no-untyped-call]


def _adapted(rows: RowTable, adapters: Adapters) -> list[tuple[Piece, Site, slice]]:
    return [
        (piece, sites[piece.slot], adapters.span(module))
        for module, sites in enumerate(adapters.sites)
        for piece in rows.pieces
        if piece.slot in sites
    ]


def _dropped(x: torch.Tensor, piece: Piece, site: Site, rows: RowTable) -> torch.Tensor:
    return dropped(x, site, piece.step, rows.tables.counters_T[piece.span], rows.training)


def add_product(grad_PQ: torch.Tensor, left_TP: torch.Tensor, right_TQ: torch.Tensor, scale: float = 1.0) -> None:
    """grad [P, Q] += scale · leftᵀ right, summed in the gradient's own precision where the inputs have less."""
    if left_TP.dtype == grad_PQ.dtype:
        grad_PQ.addmm_(left_TP.T, right_TQ, alpha=scale)
    elif left_TP.is_cuda:
        grad_PQ.add_(torch.mm(left_TP.T, right_TQ, out_dtype=grad_PQ.dtype), alpha=scale)
    else:
        grad_PQ.addmm_(left_TP.T.to(grad_PQ.dtype), right_TQ.to(grad_PQ.dtype), alpha=scale)


def cross_entropy(
    logits_MV: torch.Tensor,
    targets_M: torch.Tensor,
    weights_M: torch.Tensor,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> torch.Tensor:
    """Weight · loss of each row [M], in float32 or the logits' own float64.

    `logits_MV` has the head's raw outputs: logits = multiplier · raw, then softcap · tanh(logits / softcap) where the
    model has one. With gradient, the raw outputs are overwritten by d (weight · loss) / d raw. A row of weight 0 has
    loss and gradient 0, whatever its outputs (NaN) and its target (−1).
    """
    wide = torch.promote_types(logits_MV.dtype, torch.float32)
    weights_M1, targets_M1 = weights_M[:, None].to(wide), targets_M[:, None].clamp(min=0)
    logits = logits_MV.to(wide) * multiplier
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    log_p = logits.log_softmax(-1)
    losses_M1 = torch.where(weights_M1 == 0.0, 0.0, -log_p.gather(1, targets_M1) * weights_M1)
    if with_gradient:
        d_raw = log_p.exp_()
        d_raw.scatter_add_(1, targets_M1, torch.full_like(weights_M1, -1.0))
        d_raw.mul_(weights_M1 * multiplier)
        if softcap is not None:
            d_raw.mul_(1.0 - (logits / softcap).square_())
        logits_MV.copy_(d_raw.masked_fill_(weights_M1 == 0.0, 0.0))
    return losses_M1.squeeze(1)


def linear_cross_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    rows: RowTable,
    loss: LossTable,
    adapters: Adapters,
    *,
    multiplier: float = 1.0,
    softcap: float | None = None,
    with_gradient: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weighted cross-entropy of the head's logits, block by block: the [rows × V] logits never exist whole.

    logits = multiplier · (H Wᵀ + b), then softcap · tanh(logits / softcap) where the model has one.
    Returns each sequence's Σ weight · loss [S], and dH [T, H] of their sum (zero on rows without a target). Adapters on
    the head get their gradients here. Nothing is reduced across sequences, hence not across jobs.
    """
    rows_loss = partial(cross_entropy, multiplier=multiplier, softcap=softcap, with_gradient=with_gradient)
    return by_blocks(hidden_TH, weight_VH, bias_V, rows, loss, adapters, loss.blocks, rows_loss, with_gradient)


def by_blocks(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    rows: RowTable,
    loss: LossTable,
    adapters: Adapters,
    blocks: Sequence[LossBlock],
    rows_loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `linear_cross_entropy` does, over any blocks; one with an adapter is of one job. `rows_loss` gives losses
    from raw logits, targets and weights, and leaves the gradient in the logits' place."""
    (sites,) = adapters.sites
    wide = torch.promote_types(hidden_TH.dtype, torch.float32)
    losses_M = torch.empty(len(loss.rows_M), dtype=wide, device=hidden_TH.device)
    d_hidden_TH = torch.zeros_like(hidden_TH) if with_gradient else None
    for block in blocks:
        at = loss.rows_M[block.span]
        h = hidden_TH[at]
        site = sites.get(block.slot)
        if site is None:
            raw = F.linear(h, weight_VH, bias_V)
        else:
            x = dropped(h, site, block.step, rows.tables.counters_T[at], rows.training)
            low = x @ site.a_RK.T
            raw = h.new_zeros(len(h), len(weight_VH)).addmm_(low, site.b_NR.T, alpha=site.scale)
            add_wide(raw, h, weight_VH.T, bias_V)
        losses_M[block.span] = rows_loss(raw, loss.targets_M[block.span], loss.weights_M[block.span])
        if d_hidden_TH is not None:
            d_raw = raw  # overwritten by its gradient
            if site is None:
                dh = d_raw @ weight_VH
            else:
                d_low = (d_raw @ site.b_NR).mul_(site.scale)
                add_product(site.grad_b_NR, d_raw, low, site.scale)
                add_product(site.grad_a_RK, d_low, x)
                dh = dropped(d_low @ site.a_RK, site, block.step, rows.tables.counters_T[at], rows.training)
                add_wide(dh, d_raw, weight_VH)
            d_hidden_TH[at] = dh
            del d_raw
        del raw  # or the next block's logits would be made beside these
    return torch.segment_reduce(losses_M, "sum", lengths=loss.counts_S, unsafe=True), d_hidden_TH


def adamw(updates: Sequence[Update]) -> torch.Tensor:
    """Clip, AdamW (arXiv 1711.05101), refresh the compute copy, clear the gradient: each job for itself, in place.

    Returns the gradients' norms [U] before clipping. Where that norm or the loss is not finite, weights and moments
    stay as they are, by selection on the device: the host is not asked.
    """
    norms = []
    for update in updates:
        norm = torch.linalg.vector_norm(update.grad)
        norms.append(norm)
        healthy = torch.isfinite(norm) & torch.isfinite(update.loss)
        if update.max_grad_norm > 0.0:
            update.grad.mul_((update.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        beta1, beta2 = update.betas
        vectors = (update.master, update.grad, update.exp_avg, update.exp_avg_sq)
        for part, lr in ((slice(0, update.b_start), update.lr), (slice(update.b_start, None), update.lr_b)):
            master, grad, exp_avg, exp_avg_sq = (vector[part] for vector in vectors)
            m = torch.lerp(exp_avg, grad, 1.0 - beta1)
            v = (exp_avg_sq * beta2).addcmul_(grad, grad, value=1.0 - beta2)
            scale = (v.sqrt() / (1.0 - beta2**update.step) ** 0.5).add_(update.eps)
            rate = lr / (1.0 - beta1**update.step)
            new = (master * (1.0 - lr * update.weight_decay)).addcdiv_(m, scale, value=-rate)
            for old, value in ((master, new), (exp_avg, m), (exp_avg_sq, v)):
                torch.where(healthy, value, old, out=old)
        update.grad.zero_()
        update.compute.copy_(update.master)
    return torch.stack(norms)

"""The gate of an MLP, act(gate) · up, where one product has made both; and columns put side by side.

Custom operators with fakes, for compiled layers: the compiler would compute each half's gradient for the columns of
both, and then choose. These read and write what they must, once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tlora.kernels import reference, routes

_LANES = 2048


@triton.jit  # type: ignore[untyped-decorator]
def _act(gate, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """act(gate) and its slope."""
    if ACT == "silu":
        share = 1.0 / (1.0 + tl.exp(-gate))
        value, slope = gate * share, share * (1.0 + gate * (1.0 - share))
    else:
        square = gate * gate
        tanh = 1.0 - 2.0 / (1.0 + tl.exp(1.5957691216057308 * gate * (1.0 + 0.044715 * square)))
        inner = 0.7978845608028654 * (1.0 + 0.134145 * square)
        value, slope = 0.5 * gate * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * inner
    return value, slope


@triton.jit  # type: ignore[untyped-decorator]
def _forward(y, out, I, ACT: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: E741
    row, i_i = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    y += row * 2 * I
    value, _ = _act(tl.load(y + i_i, mask=i_i < I, other=0.0).to(tl.float32), ACT)
    up = tl.load(y + I + i_i, mask=i_i < I, other=0.0).to(tl.float32)
    tl.store(out + row * I + i_i, (value * up).to(out.dtype.element_ty), mask=i_i < I)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(d, y, dy, I, ACT: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: E741
    row, i_i = tl.program_id(0).to(tl.int64), tl.program_id(1) * LANES + tl.arange(0, LANES)
    y += row * 2 * I
    dy += row * 2 * I
    value, slope = _act(tl.load(y + i_i, mask=i_i < I, other=0.0).to(tl.float32), ACT)
    up = tl.load(y + I + i_i, mask=i_i < I, other=0.0).to(tl.float32)
    b_d = tl.load(d + row * I + i_i, mask=i_i < I, other=0.0).to(tl.float32)
    tl.store(dy + i_i, (b_d * up * slope).to(dy.dtype.element_ty), mask=i_i < I)
    tl.store(dy + I + i_i, (b_d * value).to(dy.dtype.element_ty), mask=i_i < I)


@torch.library.custom_op("tlora::gated", mutates_args=())
def gated(y: Tensor, act: str) -> Tensor:
    """`reference.gated`: y [T, 2I] → [T, I]."""
    if not routes.is_fused(y):
        return reference.gated(y, act)
    y = y.contiguous()
    T, width = y.shape[0], y.shape[1] // 2
    out = y.new_empty(T, width)
    with torch.cuda.device_of(y):
        _forward[T, -(-width // _LANES)](y, out, width, act, _LANES, num_warps=8)
    return out


@torch.library.custom_op("tlora::gated_backward", mutates_args=())
def gated_backward(d: Tensor, y: Tensor, act: str) -> Tensor:
    """`reference.gated_backward`."""
    if not routes.is_fused(y):
        return reference.gated_backward(d, y, act)
    d, y = d.contiguous(), y.contiguous()
    T, width = d.shape
    dy = torch.empty_like(y)
    with torch.cuda.device_of(y):
        _backward[T, -(-width // _LANES)](d, y, dy, width, act, _LANES, num_warps=8)
    return dy


@torch.library.custom_op("tlora::join", mutates_args=())
def join(parts: list[Tensor]) -> Tensor:
    """Columns [T, n] of each, side by side."""
    return torch.cat(parts, -1)


@gated.register_fake
def _(y, act):  # type: ignore[no-untyped-def]
    return y.new_empty(y.shape[0], y.shape[1] // 2)


@gated_backward.register_fake
def _(d, y, act):  # type: ignore[no-untyped-def]
    return y.new_empty(y.shape)


@join.register_fake
def _(parts):  # type: ignore[no-untyped-def]
    return parts[0].new_empty(*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    y, ctx.act = inputs
    ctx.save_for_backward(y)


def _differentiate(ctx, d):  # type: ignore[no-untyped-def]
    return gated_backward(d, ctx.saved_tensors[0], ctx.act), None


gated.register_autograd(_differentiate, setup_context=_save)

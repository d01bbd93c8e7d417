"""Causal attention over packed sequences that never see each other, in transformers' attention interface.

`varlen_attn` on a GPU in half precision; elsewhere, and in deterministic mode, one product a sequence: the exact
equivalent. Rows arrive through the model's own keyword arguments as `tlora_rows`.
"""

import inspect
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tlora.errors import ModelError
from tlora.kernels.tiles import RowTable

NAME = "tlora_packed"
# Fewer key heads than query heads must be asked for where varlen_attn has a word for it; elsewhere they are just taken.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tlora_rows: RowTable,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Query [1, heads, T, D], key and value [1, KV heads, T, D] → [1, T, heads, D], each block attending to itself.

    The base's own attention dropout is not applied: it would draw from one stream for all jobs.
    """
    asked = [name for name in ("s_aux", "position_bias", "alibi") if others.get(name) is not None]
    if asked or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} asks for {asked or 'a mask of its own'}, which packed rows cannot have."
        )
    if value.is_cuda and value.dtype in (torch.bfloat16, torch.float16) and not (tlora_rows.per_sequence or softcap):
        return _varlen(query, key, value, tlora_rows, scaling, sliding_window), None
    blocks = zip(*(t.split(tlora_rows.blocks, dim=2) for t in (query, key, value)), strict=True)
    # On a GPU only plain products have a backward pass that gives the same bits twice.
    with sdpa_kernel(SDPBackend.MATH) if tlora_rows.per_sequence and value.is_cuda else nullcontext():
        outputs = [_attend(q, k, v, scaling, sliding_window, softcap) for q, k, v in blocks]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> torch.Tensor:
    groups, length = q.shape[1] // k.shape[1], q.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    windowed = window is not None and length > window
    if softcap is None and not windowed:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
    at = torch.arange(length, device=q.device)
    back = at[:, None] - at[None, :]
    seen = (back >= 0) & (back < window) if windowed and window is not None else back >= 0
    if softcap is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling)
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~seen, float("-inf"))
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype) @ v


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: RowTable,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Grouped KV heads as they are: the kernel reads each for its whole group."""
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    longest, ends, left = rows.longest, rows.block_ends_S, -1 if window is None else window - 1
    output = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scaling, window_size=(left, 0), **_GROUPED)
    return cast(torch.Tensor, output).unsqueeze(0)


def register() -> None:
    """Make the function known to transformers; without a mask function of this name it builds no mask."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)

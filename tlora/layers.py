"""How the base's decoder layers run: compiled, recomputed in the backward pass, in which precision.

Called by the super-model once its model is checked; the layers' own code is transformers'.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


class Float64(TorchFunctionMode):
    """transformers sends norms, rotary angles and softmaxes through float32; a float64 model keeps them in float64, so
    that what is left between two groupings of the same sums is the algebra."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def precision(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """What a base of this dtype computes under."""
    return Float64() if dtype is torch.float64 else nullcontext()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def wrap_layers(model: PreTrainedModel, *, compiled: bool, checkpointing: bool) -> None:
    """`compiled`: each layer through torch.compile, once for all of one kind. `checkpointing`: of each layer only the
    input is kept, and the layer runs again in the backward pass.

    torch's own checkpoint would turn the compiler off for what it runs.
    """
    for layer in decoder_layers(model):
        forward = torch.compile(layer.forward) if compiled else layer.forward
        layer.forward = partial(_checkpointed, forward) if checkpointing else forward


def _checkpointed(
    forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    def run(hidden: torch.Tensor) -> torch.Tensor:
        return forward(hidden, *args, **kwargs)

    if not torch.is_grad_enabled():
        return run(hidden)
    return _Recomputed.apply(hidden, run)  # type: ignore[no-any-return, no-untyped-call]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, run):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden)
        ctx.run = run
        return run(hidden)

    @staticmethod
    def backward(ctx, d_output):  # type: ignore[no-untyped-def]
        """Outside the modes of the forward pass, so these are entered anew. Masks come out as they were: they depend on
        counters alone."""
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), precision(hidden.dtype):
            output = ctx.run(hidden)
        output.backward(d_output)
        return hidden.grad, None

"""How the base's decoder layers run: compiled, recomputed in the backward pass, in which precision.

Called by the super-model when it takes a model over; the layers' own code is transformers'.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tlora.errors import ModelError


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
    """What transformers itself would checkpoint."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def wrap_layers(
    model: PreTrainedModel,
    *,
    compiled: bool,
    checkpointing: bool,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> None:
    """`compiled`: each layer through torch.compile, once for all of one kind. `checkpointing`: of each layer only the
    input is kept, and the layer runs again in the backward pass. `around`: what each run of a layer is wrapped in.

    torch's own checkpoint would turn the compiler off for what it runs.
    """
    if compiled:  # with and without gradients, for which linears have adapters, for one shape and for any
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for layer in decoder_layers(model):
        forward = torch.compile(layer.forward) if compiled else layer.forward
        forward = around(forward) if around else forward
        layer.forward = partial(_checkpointed, forward) if checkpointing else forward


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    hidden, rest = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
    if not torch.is_grad_enabled():
        return forward(hidden, *rest, **kwargs)
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in tree_leaves((rest, kwargs))):
        raise ModelError("its layers pass on more than hidden states. Train it without checkpointing.")
    return _Recomputed.apply(hidden, lambda hidden: forward(hidden, *rest, **kwargs))  # type: ignore[no-untyped-call]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, run):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(hidden)
        ctx.run = run
        return run(hidden)

    @staticmethod
    def backward(ctx, *d_outputs):  # type: ignore[no-untyped-def]
        """Outside the modes of the forward pass, so these are entered anew. Masks come out as they were: they depend on
        counters alone."""
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(), precision(hidden.dtype):
            outputs = ctx.run(hidden)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        given = [at for at, d_output in enumerate(d_outputs) if d_output is not None]
        torch.autograd.backward([outputs[at] for at in given], [d_outputs[at] for at in given])
        return hidden.grad, None

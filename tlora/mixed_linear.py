"""The base's linears, each carrying any number of jobs' adapters; those that read one input are computed together.

The super-model makes them and says which rows pass through; the maths is `kernels/lora_linear.py`'s.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from tlora.kernels.gated import gated, join
from tlora.kernels.lora_linear import lora_linear
from tlora.kernels.reference import ACTS
from tlora.kernels.tiles import Adapters, RowTable


class Current:
    """The rows of the batch that is passing through; every mixed linear of one super-model looks here."""

    rows: RowTable | None = None
    channel: int = 0
    """Which of its lane's process groups the batch's exchange goes through."""


class Bundle:
    """Linears that read one input, in the order in which the model calls them: one product serves them all.

    Their weights lie one below the other, so that the input is read once; each module keeps a view of its own."""

    def __init__(self, linears: Sequence[nn.Linear], current: Current):
        self.current = current
        self.widths = [linear.out_features for linear in linears]
        self.adapters = Adapters(self.widths, linears[0].weight.device)
        self.weight: torch.Tensor = linears[0].weight.detach()
        self.bias: torch.Tensor | None = linears[0].bias
        self._outputs: tuple[torch.Tensor, ...] = ()
        if len(linears) > 1:
            self.weight = torch.cat([linear.weight.detach() for linear in linears])
            for linear, part in zip(linears, self.weight.split(self.widths), strict=True):
                linear.weight = nn.Parameter(part, requires_grad=False)
        if len(linears) > 1 and any(linear.bias is not None for linear in linears):
            self.bias = torch.cat(
                [
                    self.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
                    for linear in linears
                ]
            )

    def output(self, index: int, x: torch.Tensor, rows: RowTable) -> torch.Tensor:
        """Of one linear; the first to be called computes all, the others find theirs."""
        if index == 0:
            y = self.product(x.reshape(-1, x.shape[-1]), rows).view(*x.shape[:-1], -1)
            compiling = torch.compiler.is_compiling() and len(self.widths) > 1
            cut = _Cut.apply if compiling else torch.split
            self._outputs = cut(y, self.widths, -1)
        output = self._outputs[index]
        if index == len(self.widths) - 1:
            self._outputs = ()
        return output

    def product(self, x_TK: torch.Tensor, rows: RowTable) -> torch.Tensor:
        """All outputs [T, sum of widths], adapters included."""
        return lora_linear(x_TK, self.weight, self.bias, rows, self.adapters)

    def plain(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """One linear's output, without adapters."""
        first = sum(self.widths[:index])
        part = slice(first, first + self.widths[index])
        return F.linear(x, self.weight[part], None if self.bias is None else self.bias[part])


class _Cut(torch.autograd.Function):
    """One product's columns as its linears' outputs. The gradients are put side by side by an operator of its own, for
    the compiler would compute each for the columns of all."""

    @staticmethod
    def forward(ctx, y, widths, dim):  # type: ignore[no-untyped-def]
        return y.split(widths, dim)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        return join(list(grads)), None, None


class MixedLinear(nn.Linear):
    """A frozen linear on which any number of jobs may have an A and a B."""

    def __init__(self, frozen: nn.Linear, bundle: Bundle, index: int):
        super().__init__(frozen.in_features, frozen.out_features, bias=False, device="meta")
        self.weight, self.bias = frozen.weight, frozen.bias
        self.bundle, self.index = bundle, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.bundle.current.rows
        if rows is None:
            return self.bundle.plain(self.index, x)
        return self.bundle.output(self.index, x, rows)


def replace_linears(
    model: PreTrainedModel,
    head: str,
    current: Current,
    bundle_of: Callable[[Sequence[nn.Linear], Current], Bundle] = Bundle,
) -> dict[str, MixedLinear]:
    """Put a mixed linear in the place of every linear; by name."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    mixed = {}
    for names in _bundles(model, linears, head):
        bundle = bundle_of([linears[name] for name in names], current)
        for index, name in enumerate(names):
            mixed[name] = MixedLinear(linears[name], bundle, index)
            model.set_submodule(name, mixed[name])
    return mixed


@torch.no_grad()
def fuse_gates(model: PreTrainedModel) -> int:
    """Let every MLP that is down(act(gate(x)) · up(x)), with gate and up in one bundle, pass through `gated`; returns
    how many there are. For compiled layers."""
    fused = 0
    for module in list(model.modules()):
        gate, up, down, act = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
        if not (isinstance(gate, MixedLinear) and isinstance(up, MixedLinear) and isinstance(down, MixedLinear)):
            continue
        if gate.bundle is not up.bundle or gate.bundle.widths != [down.in_features] * 2 or act is None:
            continue
        x = torch.linspace(-3.0, 3.0, gate.in_features, device=gate.weight.device, dtype=gate.weight.dtype)[None]
        kind = next((kind for kind, same in ACTS.items() if torch.equal(act(x), same(x))), None)
        if kind is not None and torch.equal(module(x), down(act(gate(x)) * up(x))):
            module.__class__ = _gated_class(type(module))  # type: ignore[arg-type]
            vars(module)["act_kind"] = kind
            fused += 1
    return fused


@cache
def _gated_class(kind: Any) -> Any:
    """One class for all MLPs of a kind, so that code compiled for one serves them all."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        bundle = self.gate_proj.bundle
        if bundle.current.rows is None:
            return kind.forward(self, x)  # type: ignore[no-any-return]
        y = bundle.product(x.reshape(-1, x.shape[-1]), bundle.current.rows)
        out = gated(y, self.act_kind)
        return self.down_proj(out.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]

    return type(f"Gated{kind.__name__}", (kind,), {"forward": forward})


@torch.no_grad()
def _bundles(model: PreTrainedModel, linears: Mapping[str, nn.Linear], head: str) -> list[list[str]]:
    """Names of linears by the input that they read, seen in one pass over a few tokens: neighbours in one module, each
    called once, one after the other. The head, whose rows are others, stays alone, as does what was not called."""
    calls: list[tuple[str, torch.Tensor]] = []

    def note(name: str) -> Any:
        return lambda module, inputs: calls.append((name, inputs[0]))

    hooks = [linear.register_forward_pre_hook(note(name)) for name, linear in linears.items()]
    try:
        model(input_ids=torch.arange(4, device=model.device)[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    called = [name for name, _ in calls]
    once = [(name, x) for name, x in calls if called.count(name) == 1 and name != head]
    bundles = [
        [name for name, _ in group] for _, group in groupby(once, key=lambda call: (id(call[1]), _parent(call[0])))
    ]
    bundled = {name for names in bundles for name in names}
    return bundles + [[name] for name in linears if name not in bundled]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]

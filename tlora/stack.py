"""The decoder layers of a base that several ranks hold together, run over all slices of a tick, layer by layer.

A layer is gathered once for all slices (FSDP2), the next one while it runs; a slice's exchange between ranks runs under
another's compute, each on a stream of its own, neighbours through process groups of their own. Slices go through a
layer last one first, so that autograd, which takes the newest first, comes back in order: a job's gradients are summed
as they are without slices.

The layers' arguments are the model's own: it runs once with layers that only note them, then once more with a last
layer that gives what the real ones gave.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from tlora.layers import decoder_layers
from tlora.mixed_linear import Bundle, MixedLinear
from tlora.parallel import CHANNELS, Mesh
from tlora.tensor_parallel import GroupBundle

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a layer beside the hidden states."""


class _Step(nn.Module):
    """One decoder layer."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.run: Callable[..., Any] = layer.forward
        self.gives_tuple = False

    def forward(self, hidden: list[torch.Tensor], calls: list[Call], streams: "Streams") -> list[torch.Tensor]:
        outputs = list(hidden)
        for at in reversed(range(len(hidden))):
            args, kwargs = calls[at]
            with streams.slice(at):
                output = self.run(hidden[at], *args, **kwargs)
            self.gives_tuple = isinstance(output, tuple)
            outputs[at] = output[0] if self.gives_tuple else output
        return outputs


class _Steps(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]):
        super().__init__()
        self.steps = nn.ModuleList(_Step(layer) for layer in layers)

    def forward(self, hidden: list[torch.Tensor], calls: list[list[Call]], streams: "Streams") -> list[torch.Tensor]:
        for number, step in enumerate(self.steps):
            hidden = step(hidden, [each[number] for each in calls], streams)
        return hidden


class Streams:
    """A stream a slice, where slices run beside each other; else none."""

    def __init__(self, streams: Sequence[torch.cuda.Stream] = ()):
        self._all = streams
        self.held: object = None
        """What the streams may still read, until they have ended."""

    def slice(self, at: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._all[at]) if self._all else nullcontext()

    def begin(self) -> None:
        for stream in self._all:
            stream.wait_stream(torch.cuda.current_stream())

    def end(self) -> None:
        for stream in self._all:
            torch.cuda.current_stream().wait_stream(stream)
        self.held = None


class Stack:
    """The layers of one base, and its embedding and head, as its ranks hold them."""

    def __init__(self, model: PreTrainedModel, mixed: dict[str, MixedLinear], head: str, mesh: Mesh):
        layers = decoder_layers(model)
        self._base, self._mesh = _owner(model, layers[0]), mesh
        embedding = model.get_input_embeddings()
        assert embedding is not None
        self._embedding, self._head = embedding, mixed[head]
        self._noted: list[Call] | None = None
        self._first: torch.Tensor | None = None
        self._last: torch.Tensor | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._steps = _Steps(layers)
        if mesh.shard_group is not None:
            self._shard(mixed, embedding.weight is self._head.weight)
        for number, layer in enumerate(layers):
            layer.forward = self._stand_in(number, len(layers))
        self._forward = self._base.forward
        self._base.forward = self._alone

    def run(self, inputs: Sequence[dict[str, Any]], streams: Streams) -> list[Any]:
        """What the base model gives for each slice, whose arguments `inputs` has."""
        calls: list[list[Call]] = []
        hidden: list[torch.Tensor] = []
        inputs = self._embedded(inputs)
        for at, each in enumerate(inputs):
            self._noted, self._first = [], None
            self._forward(**each, tlora_channel=at % CHANNELS)
            assert self._first is not None
            hidden.append(self._first)
            calls.append(self._noted)
        self._noted = None
        streams.held = inputs, calls, hidden
        streams.begin()
        outputs: list[Any] = self._steps(hidden, calls, streams)
        for at in reversed(range(len(inputs))):
            with streams.slice(at):
                self._last = outputs[at]
                outputs[at] = self._forward(**inputs[at])
        self._last = None
        return outputs

    def streams(self, count: int, *, beside: bool) -> Streams:
        """Beside each other only where no layer has to be gathered: gathered ones live on one stream. The same ones for
        every tick: each has memory of its own."""
        if not beside or count == 1 or self._mesh.shard_group is not None or self._mesh.device.type != "cuda":
            return Streams()
        self._streams += [torch.cuda.Stream(self._mesh.device) for _ in range(count - len(self._streams))]
        return Streams(self._streams[:count])

    @contextmanager
    def head(self) -> Iterator[None]:
        """The head's weight, whole."""
        keeper = self._head.bundle.keeper  # type: ignore[attr-defined]
        if not isinstance(keeper, FSDPModule):
            yield
            return
        keeper.unshard()
        try:
            yield
        finally:
            keeper.reshard()

    def _with_head(self, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        with self.head():
            return forward(hidden)

    def _alone(self, *args: Any, **kwargs: Any) -> Any:
        """What the model's own forward pass calls."""
        if args:
            kwargs["input_ids"], *rest = args
            assert not rest
        return self.run([kwargs], Streams())[0]

    def _embedded(self, inputs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """All slices' embeddings at once: they are gathered for one look-up."""
        ids = [each["input_ids"] for each in inputs]
        embedded = self._embedding(torch.cat(ids, 1)).split([part.shape[1] for part in ids], 1)
        return [{**each, "input_ids": None, "inputs_embeds": part} for each, part in zip(inputs, embedded, strict=True)]

    def _stand_in(self, number: int, count: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden, args = (args[0], args[1:]) if args else (kwargs.pop("hidden_states"), ())
            if self._noted is not None:
                self._first = hidden if number == 0 else self._first
                self._noted.append((args, kwargs))
            elif number == count - 1:
                assert self._last is not None
                hidden = self._last
            return (hidden,) if self._steps.steps[number].gives_tuple else hidden

        return forward

    def _shard(self, mixed: dict[str, MixedLinear], is_tied: bool) -> None:
        """Cut every parameter of the layers, the embedding and the head over the ranks of the shard group."""
        mesh = self._mesh.shards()
        bundles: dict[Bundle, list[MixedLinear]] = {}
        for linear in sorted(mixed.values(), key=lambda linear: linear.index):
            bundles.setdefault(linear.bundle, []).append(linear)
        for bundle, linears in bundles.items():
            assert isinstance(bundle, GroupBundle)
            if linears == [self._head] and is_tied:
                bundle.keeper = self._embedding
                self._embedding.register_parameter("bias", None)
                self._head.register_parameter("weight", None)
                self._head.forward = partial(self._with_head, self._head.forward)  # type: ignore[method-assign]
            else:
                bundle.keep(linears)
        for part in (self._embedding, *([] if is_tied else [self._head])):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        for step in self._steps.steps:
            fully_shard(step, mesh=mesh, reshard_after_forward=True)
        fully_shard(self._steps, mesh=mesh)  # no prefetch beside its own: it would hold more


def _owner(model: nn.Module, layer: nn.Module) -> nn.Module:
    """The module whose forward pass runs the layers."""
    name = next(name for name, module in model.named_modules() if module is layer)
    return model.get_submodule(name.rsplit(".", 2)[0])

"""One frozen base and its resident adapters.

Owns the transformers model, whose linears are replaced by mixed-job ones, and says which module carries whose A and B.
The trainer places adapters and sends batches; when and why is not known here.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tlora import attention
from tlora.adapter import AdapterState
from tlora.base import Outline, default_device, dtype_of, load_model
from tlora.data import TokenSequence
from tlora.errors import ModelError
from tlora.graphs import Graphs
from tlora.kernels.linear_cross_entropy import linear_cross_entropy, wrong_tokens
from tlora.kernels.tiles import RowTable, Tables, stride_of
from tlora.layers import precision, wrap_layers
from tlora.memory import driver_memory
from tlora.mixed_linear import Current, MixedLinear, fuse_gates, replace_linears
from tlora.packing import Batch, Item, pack
from tlora.spec import BaseSpec

if TYPE_CHECKING:  # torch.distributed is none of a lone process's business
    from tlora.parallel import Mesh
    from tlora.stack import Stack, Streams
    from tlora.tensor_parallel import Cut

LAYER_WORK = 2**39
"""Rows × parameters of the base for each of its layers, below which a tick takes longer to launch than to compute: 2190
rows of 8B parameters in 32 layers."""
_COPYING = torch.ops.aten._to_copy.default
_ASKING = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default, _COPYING


class SuperModel:
    """A base model that carries adapters. `deterministic`: a job's bits do not depend on its neighbours. `compiled`:
    whether its layers are compiled; if not said, on a GPU in half precision. `captured`: small ticks of compiled layers
    become CUDA graphs. `mesh`: this rank's place in a plan; the base may then be sharded or split over several."""

    def __init__(
        self,
        model: PreTrainedModel,
        base: BaseSpec,
        *,
        deterministic: bool = False,
        checkpointing: bool = False,
        compiled: bool | None = None,
        captured: bool = True,
        mesh: "Mesh | None" = None,
    ):
        self.model, self.base, self.deterministic, self.checkpointing = model, base, deterministic, checkpointing
        self.outline = Outline.of(model, base.model)
        self.device, self.dtype = model.device if mesh is None else mesh.device, model.dtype
        self.residents: dict[int, AdapterState] = {}
        self._current = Current()
        model.requires_grad_(False)
        self._silence_dropout()
        model.eval()  # so nothing draws from a stream that all jobs would share
        self.cuts: Mapping[str, Cut] = {}
        self._stack: Stack | None = None
        spread = mesh if mesh is not None and mesh.plan.is_spread else None
        name_of_base = fingerprint(model) if spread else ""
        self._mixed = self._spread(spread) if spread else replace_linears(model, self.outline.head, self._current)
        config = model.config.get_text_config()
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        has_experts = any(parameter.dim() > 2 for parameter in model.parameters())
        if deterministic and has_experts:
            raise ModelError(
                f"{base.model}: the experts of a {type(model).__name__} take the rows of all jobs at once, so their "
                "bits depend on the neighbours. Train it without the deterministic mode."
            )
        if compiled is None:
            compiled = self.device.type == "cuda" and self.dtype.itemsize == 2
        # With a softcap attention goes block by block, in Python: each tick would be compiled anew.
        self.compiled = compiled and not deterministic and not getattr(config, "attn_logit_softcapping", None)
        is_plain = self.compiled and not (checkpointing or spread) and self.dtype.itemsize == 2
        self.captured = captured and is_plain and self.device.type == "cuda"
        if self.captured and has_experts:  # before Hopper, grouped products ask for the ends of their groups
            self.captured = torch.cuda.get_device_capability(self.device) >= (9, 0)
        self.small_rows = LAYER_WORK * self.outline.num_layers // self.outline.num_parameters
        """Of a tick, below which it is captured as a CUDA graph if its shape comes often."""
        if self.compiled:
            fuse_gates(model)
        wrap_layers(model, compiled=self.compiled, checkpointing=checkpointing, around=self._around if spread else None)
        if spread:
            self._stack = self._stacked(spread)
        model.enable_input_require_grads()
        self._graphs = Graphs(self.small_rows)
        self._seen_tables: tuple[object, ...] = ()
        with torch.compiler.set_stance("force_eager"):
            self._check()
            self.captured = self.captured and not self.asks_device()
        self.fingerprint = name_of_base or fingerprint(model)

    @classmethod
    def load(cls, base: BaseSpec, *, device: str | torch.device | None = None, **options: Any) -> "SuperModel":
        """Load the base from a folder or the hub. Raises ModelError if it cannot be had or cannot carry adapters."""
        mesh: Mesh | None = options.get("mesh")
        device = mesh.device if mesh else torch.device(device) if device is not None else default_device()
        read = partial(load_model, base, dtype_of(base, device))
        model = mesh.together(read) if mesh else read()
        if mesh is None or not mesh.plan.is_spread:  # else each rank takes its part, layer by layer
            model.to(device)  # type: ignore[arg-type]  # its decorator hides nn.Module's signature
        return cls(model, base, **options)

    def place(self, state: AdapterState) -> int:
        """Make an adapter resident; returns its slot."""
        slot = next(slot for slot in range(len(self.residents) + 1) if slot not in self.residents)
        self.residents[slot] = state
        try:
            for module in self._mixed.values():
                module.bundle.adapters.reserve(slot)
            for name, site in state.sites():
                self._mixed[name].bundle.adapters.place(self._mixed[name].index, slot, site)
        except BaseException:
            self.remove(slot)
            raise
        self._fit_ranks()  # tables may have grown, and captured ticks read the old ones
        return slot

    def remove(self, slot: int) -> AdapterState:
        """Take a resident out; its vectors are untouched."""
        for module in self._mixed.values():
            module.bundle.adapters.remove(module.index, slot)
        state = self.residents.pop(slot)
        self._fit_ranks()
        return state

    def train(self, batch: Batch) -> torch.Tensor:
        """Forward and backward. Adds to the residents' gradients; returns each item's weighted loss [S]."""
        if self._stack is not None:
            return self.train_slices([batch])[0]
        if self.is_small(batch.rows.num_rows) and (graph := self._graphs.find(batch, self._hidden_of)):
            losses_S, d_hidden = self._loss(graph.forward(batch), batch, with_gradient=True)
            assert d_hidden is not None
            graph.backward(d_hidden)
            return losses_S
        with self._passing(batch.rows):
            hidden = self._hidden(batch)
            losses_S, d_hidden = self._loss(hidden.detach(), batch, with_gradient=True)
            hidden.backward(d_hidden)
        return losses_S

    def train_slices(self, batches: Sequence[Batch]) -> list[torch.Tensor]:
        """`train` of several batches at once, layer by layer. A base that is sharded or split goes this way alone; its
        ranks come here together, each with at least one batch, and nobody's rows if it has no others."""
        with self._passing(None):
            hidden, streams = self._hidden_slices(batches)
            results = self._losses(hidden, batches, streams, with_gradient=True)
            torch.autograd.backward(hidden, [d_hidden for _, d_hidden in results])
            streams.end()
        return [losses_S for losses_S, _ in results]

    @torch.no_grad()
    def evaluate_slices(self, batches: Sequence[Batch], *, with_wrong: bool = False) -> list[torch.Tensor]:
        """`evaluate` of several batches at once, as `train_slices`."""
        with self._passing(None):
            hidden, streams = self._hidden_slices(batches)
            results = self._losses(hidden, batches, streams, with_gradient=False, with_wrong=with_wrong)
            streams.end()
        return [losses_S for losses_S, _ in results]

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, with_wrong: bool = False) -> torch.Tensor:
        """Forward alone; returns each item's weighted loss [S], with how many of its tokens are wrong beside it,
        if asked [S, 2]."""
        if self._stack is not None:
            return self.evaluate_slices([batch], with_wrong=with_wrong)[0]
        with self._passing(batch.rows):
            return self._loss(self._hidden(batch), batch, with_gradient=False, with_wrong=with_wrong)[0]

    def is_small(self, num_rows: int) -> bool:
        """Whether a tick of so many rows takes longer to launch than to compute, and may be captured."""
        return self.captured and num_rows < self.small_rows

    def row_multiple(self, num_rows: int) -> int:
        """What a tick's rows are rounded up to, so that shapes are few: 64, or an eighth or less of a small tick."""
        if not self.compiled:
            return 1
        coarse = max(64, 1 << max(0, num_rows.bit_length() - 4))
        return coarse if self.is_small(-(-num_rows // coarse) * coarse) else 64

    def free_memory(self) -> None:
        """Give back what is kept to be fast: captured ticks, of which there are no more, and the allocator's stock."""
        self.captured = False
        self._graphs.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def threads(self) -> Iterator[None]:
        """What a tick runs in: one intra-op thread where bits must not depend on how a product is split; memory that
        the driver lacks is PyTorch's own error."""
        count = torch.get_num_threads()
        if self.deterministic:
            torch.set_num_threads(1)
        try:
            with driver_memory():
                yield
        finally:
            torch.set_num_threads(count)

    def _hidden_of(self, batch: Batch) -> torch.Tensor:
        with self._passing(batch.rows):
            return self._hidden(batch)

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        if self.compiled:  # tables grow with the jobs; rows are seen to vary by the compiler itself
            for table in (
                batch.rows.block_ends_S,
                *(getattr(batch.rows.tables, field.name) for field in fields(Tables)),
            ):
                torch._dynamo.maybe_mark_dynamic(table, 0)
        return {
            "input_ids": batch.ids_T[None],
            "position_ids": batch.positions_T[None],
            "use_cache": False,
            "tlora_rows": batch.rows,
        }

    def _hidden(self, batch: Batch) -> torch.Tensor:
        output = self.model.base_model(**self._inputs(batch))
        return output.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]

    def _hidden_slices(self, batches: Sequence[Batch]) -> tuple[list[torch.Tensor], "Streams"]:
        assert self._stack is not None
        streams = self._stack.streams(len(batches), beside=not self.deterministic)
        inputs = [self._inputs(batch) for batch in batches]
        outputs = self._stack.run(inputs, streams)
        return [output.last_hidden_state.squeeze(0) for output in outputs], streams

    def _losses(
        self,
        hidden: Sequence[torch.Tensor],
        batches: Sequence[Batch],
        streams: "Streams",
        *,
        with_gradient: bool,
        with_wrong: bool = False,
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        assert self._stack is not None
        results = []
        with self._stack.head():
            for at, (hidden_TH, batch) in enumerate(zip(hidden, batches, strict=True)):
                with streams.slice(at):
                    results.append(
                        self._loss(hidden_TH.detach(), batch, with_gradient=with_gradient, with_wrong=with_wrong)
                    )
        return results

    def _loss(
        self, hidden_TH: torch.Tensor, batch: Batch, *, with_gradient: bool, with_wrong: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        head = self._mixed[self.outline.head].bundle
        given = hidden_TH, head.weight, head.bias, batch.rows, batch.loss, head.adapters
        losses_S, d_hidden_TH = linear_cross_entropy(
            *given, multiplier=self._multiplier, softcap=self._softcap, with_gradient=with_gradient
        )
        if with_wrong:
            losses_S = torch.stack([losses_S, wrong_tokens(*given).to(losses_S.dtype)], dim=1)
        return losses_S, d_hidden_TH

    def _spread(self, mesh: "Mesh") -> dict[str, MixedLinear]:
        """Leave this rank its part of every product, before linears become mixed."""
        from tlora.tensor_parallel import GroupBundle, cut_linears, find_cuts

        self.cuts = find_cuts(self.model, self.outline, mesh.plan.tensor)
        cut_linears(self.model, self.cuts, mesh)
        if mesh.shard_group is None:  # before bundles are made of what has its place; else FSDP takes layer by layer
            self.model.to(mesh.device)  # type: ignore[arg-type]  # its decorator hides nn.Module's signature
        cuts = {self.model.get_submodule(name): cut for name, cut in self.cuts.items()}
        bundle_of = partial(GroupBundle, mesh=mesh, cuts=cuts)
        return replace_linears(self.model, self.outline.head, self._current, bundle_of)

    def _stacked(self, mesh: "Mesh") -> "Stack":
        from tlora.stack import Stack

        stack = Stack(self.model, self._mixed, self.outline.head, mesh)
        self.model.to(mesh.device)  # type: ignore[arg-type]  # its decorator hides nn.Module's signature
        return stack

    def _around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer that several slices run through: rows and channel are those that it is given."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._current.rows, self._current.channel = kwargs.get("tlora_rows"), kwargs.pop("tlora_channel", 0)
            try:
                return forward(*args, **kwargs)
            finally:
                self._current.rows, self._current.channel = None, 0

        return run

    @contextmanager
    def _passing(self, rows: RowTable | None) -> Iterator[None]:
        """Held over the backward pass too: checkpointed layers run again there."""
        self._current.rows = rows
        try:
            with precision(self.dtype):
                yield
        finally:
            self._current.rows = None

    def _fit_ranks(self) -> None:
        """One row stride for every module's low-rank products: code that was compiled for a layer serves them all."""
        ranks = [site.rank for state in self.residents.values() for site in state.layout.sites]
        adapters = [module.bundle.adapters for module in self._mixed.values()]
        for part in adapters:
            part.low = stride_of(max(ranks, default=1))
        seen = tuple((part.low, part.is_empty, part.table.data_ptr()) for part in adapters)
        if seen != self._seen_tables:
            self._seen_tables = seen
            self._graphs.clear()

    def _silence_dropout(self) -> None:
        """The base's own dropout would draw from one stream for all jobs, also where layers think that they train."""
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            for name, value in vars(module).items():
                if "dropout" in name and isinstance(value, float):
                    setattr(module, name, 0.0)

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse a model that packed rows would change: a sequence must give here, after any other, the loss that it
        gives alone through the model's own attention and head, and the same bits twice. Its backward pass must run."""
        vocab = self.outline.vocab_size
        x, y, z = (torch.arange(start, start + length) * 7 % vocab for start, length in ((1, 25), (2, 9), (3, 36)))
        attention.register()
        self.model.set_attn_implementation("eager")
        logits = self.model(input_ids=x[None].to(self.device), use_cache=False).logits[0, :-1]
        self.model.set_attn_implementation(attention.NAME)
        alone = F.cross_entropy(logits.double().cpu(), x[1:])
        try:
            with self.threads():
                after_y, again, after_z = (self._loss_of_last(texts) for texts in ([y, x], [y, x], [z, x]))
                with torch.enable_grad():
                    self.train(self._probe([y, x]))
        except torch.OutOfMemoryError:
            raise
        except (TypeError, AttributeError, RuntimeError, ModelError) as error:
            raise ModelError(
                f"{self.base.model}: a {type(self.model).__name__} cannot run on packed rows: {error}"
            ) from error
        leak, off = abs(after_y - after_z) / alone, abs(after_y - alone) / alone
        most_leak, most_off = (1e-2, 5e-2) if self.dtype is torch.bfloat16 else (1e-5, 1e-4)
        if not (after_y == again and leak <= (0.0 if self.deterministic else most_leak) and off < most_off):
            mode = " in deterministic mode" if self.deterministic else ""
            raise ModelError(
                f"{self.base.model}: a {type(self.model).__name__}{mode} gives a sequence loss {alone:.9f} alone, "
                f"{after_y:.9f} and then {again:.9f} packed after one other, {after_z:.9f} after another: its jobs "
                "would disturb each other."
            )

    @torch.no_grad()
    def asks_device(self) -> bool:
        """Whether the layers wait for a number from the device amid a pass, which no captured tick can."""
        probe = self._probe([torch.arange(9)])
        with _Asking(self.device.type) as asking:
            self._hidden_of(probe)
        return bool(asking.has_asked)

    def _loss_of_last(self, texts: list[torch.Tensor]) -> float:
        return float(self.evaluate(self._probe(texts))[-1])

    def _probe(self, texts: list[torch.Tensor]) -> Batch:
        items = [_item(slot, text) for slot, text in enumerate(texts)]
        return pack(items, device=self.device, per_sequence=self.deterministic)


class _Asking(TorchDispatchMode):
    """Whether any operation of a block brings numbers from such a device to the host."""

    def __init__(self, device: str):
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_asked = False
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ASKING and args[0].device.type == self._device:
            self.has_asked |= func is not _COPYING or result.device.type != self._device
        return result


def _item(slot: int, text: torch.Tensor) -> Item:
    targets = torch.ones(len(text), dtype=torch.bool)
    targets[0] = False
    return Item(slot, 0, 0, 0, 1.0 / (len(text) - 1), TokenSequence(text.int().numpy(), targets.numpy()))


@torch.no_grad()
def fingerprint(model: PreTrainedModel) -> str:
    """Tells one base from another by a few numbers of every weight: a resumed job must find its own again."""
    samples = [weight.flatten()[:: max(1, weight.numel() // 64)][:64].float() for weight in model.parameters()]
    return hashlib.sha256(torch.cat(samples).cpu().numpy().tobytes()).hexdigest()[:16]

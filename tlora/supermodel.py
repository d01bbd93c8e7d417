"""One frozen base and its resident adapters.

Owns the transformers model, whose linears are replaced by mixed-job ones, and says which module carries whose A and B.
The trainer places adapters and sends batches; when and why is not known here.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from tlora import attention
from tlora.adapter import AdapterState
from tlora.base import Outline, default_device, dtype_of, unreachable
from tlora.data import TokenSequence
from tlora.errors import ModelError
from tlora.kernels import reference
from tlora.kernels.tiles import RowTable, Site
from tlora.packing import Batch, Item, pack
from tlora.spec import BaseSpec


class _Current:
    """The rows of the batch that is passing through; every mixed linear of one super-model looks here."""

    rows: RowTable | None = None


class Float64(TorchFunctionMode):
    """transformers sends norms, rotary angles and softmaxes through float32; a float64 model keeps them in float64, so
    that what is left between two groupings of the same sums is the algebra."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


class MixedLinear(nn.Linear):
    """A frozen linear on which any number of jobs may have an A and a B."""

    def __init__(self, frozen: nn.Linear, current: _Current):
        super().__init__(frozen.in_features, frozen.out_features, bias=False, device="meta")
        self.weight, self.bias = frozen.weight, frozen.bias
        self.current = current
        self.sites: dict[int, Site] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.current.rows is None:
            return F.linear(x, self.weight, self.bias)
        y = reference.lora_linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias, self.current.rows, self.sites)
        return y.view(*x.shape[:-1], -1)


class SuperModel:
    """A base model that carries adapters. `deterministic`: a job's bits do not depend on its neighbours."""

    def __init__(
        self, model: PreTrainedModel, base: BaseSpec, *, deterministic: bool = False, checkpointing: bool = False
    ):
        self.model, self.base, self.deterministic, self.checkpointing = model, base, deterministic, checkpointing
        self.outline = Outline.of(model, base.model)
        self.device, self.dtype = model.device, model.dtype
        self.residents: dict[int, AdapterState] = {}
        self._current = _Current()
        model.requires_grad_(False)
        self._replace_linears()
        self._silence_dropout()
        if checkpointing:  # layers run again outside the forward pass's modes
            again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), self._precision())}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
        model.enable_input_require_grads()
        config = model.config.get_text_config()
        self._multiplier = float(getattr(config, "logit_scale", None) or 1.0) / float(
            getattr(config, "logits_scaling", None) or 1.0
        )
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._check()
        model.train()  # transformers checkpoints only while training; nothing else depends on it now

    @classmethod
    def load(cls, base: BaseSpec, *, device: str | torch.device | None = None, **options: Any) -> "SuperModel":
        """Load the base from a folder or the hub. Raises ModelError if it cannot be had or cannot carry adapters."""
        device = torch.device(device) if device is not None else default_device()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                base.model, revision=base.revision, dtype=dtype_of(base, device)
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise unreachable(base, error) from error
        model.to(device)  # type: ignore[arg-type]  # its decorator hides nn.Module's signature
        return cls(model, base, **options)

    def place(self, state: AdapterState) -> int:
        """Make an adapter resident; returns its slot."""
        slot = next(slot for slot in range(len(self.residents) + 1) if slot not in self.residents)
        self.residents[slot] = state
        for name, site in state.sites():
            self._mixed[name].sites[slot] = site
        return slot

    def remove(self, slot: int) -> AdapterState:
        """Take a resident out; its vectors are untouched."""
        for module in self._mixed.values():
            module.sites.pop(slot, None)
        return self.residents.pop(slot)

    def train(self, batch: Batch) -> torch.Tensor:
        """Forward and backward. Adds to the residents' gradients; returns each item's weighted loss [S]."""
        with self._passing(batch.rows):
            hidden = self._hidden(batch)
            losses_S, d_hidden = self._loss(hidden.detach(), batch, with_gradient=True)
            hidden.backward(d_hidden)
        return losses_S

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> torch.Tensor:
        """Forward alone; returns each item's weighted loss [S]."""
        with self._passing(batch.rows):
            return self._loss(self._hidden(batch), batch, with_gradient=False)[0]

    def _hidden(self, batch: Batch) -> torch.Tensor:
        output = self.model.base_model(
            input_ids=batch.ids_T[None], position_ids=batch.positions_T[None], use_cache=False, tlora_rows=batch.rows
        )
        return output.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]

    def _loss(
        self, hidden_TH: torch.Tensor, batch: Batch, *, with_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return reference.linear_cross_entropy(
            hidden_TH,
            self._head.weight,
            self._head.bias,
            batch.rows,
            batch.loss,
            self._head.sites,
            multiplier=self._multiplier,
            softcap=self._softcap,
            with_gradient=with_gradient,
        )

    @contextmanager
    def _passing(self, rows: RowTable) -> Iterator[None]:
        """Held over the backward pass too: checkpointed layers run again there."""
        self._current.rows = rows
        try:
            with self._precision():
                yield
        finally:
            self._current.rows = None

    def _precision(self) -> AbstractContextManager[Any]:
        return Float64() if self.dtype is torch.float64 else nullcontext()

    def _replace_linears(self) -> None:
        self._mixed: dict[str, MixedLinear] = {}
        for name, module in list(self.model.named_modules()):
            if type(module) is nn.Linear:
                self._mixed[name] = MixedLinear(module, self._current)
                self.model.set_submodule(name, self._mixed[name])
        self._head = self._mixed[self.outline.head]

    def _silence_dropout(self) -> None:
        """The base's own dropout would draw from one stream for all jobs."""
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse a model that packed rows would change: each sequence alone through the model's own attention and head
        must give the loss that it gives here between two others."""
        texts = [
            torch.arange(start, start + length) * 7 % self.outline.vocab_size
            for start, length in ((1, 5), (2, 9), (3, 6))
        ]
        items = [_probe(slot, text) for slot, text in enumerate(texts)]
        attention.register()
        own = self.model.config._attn_implementation
        self.model.eval().set_attn_implementation("eager")
        alone = [self.model(input_ids=text[None].to(self.device), use_cache=False).logits[0] for text in texts]
        self.model.set_attn_implementation(attention.NAME)
        batch = pack(items, device=self.device, per_sequence=self.deterministic)
        try:
            got = self.evaluate(batch).double().cpu()
        except (TypeError, AttributeError, ModelError) as error:
            raise ModelError(
                f"{self.base.model}: a {type(self.model).__name__} ({own} attention) cannot run on packed rows: {error}"
            ) from error
        want = torch.stack(
            [F.cross_entropy(logits[:-1].double().cpu(), text[1:]) for logits, text in zip(alone, texts, strict=True)]
        )
        bound = 5e-2 if self.dtype in (torch.bfloat16, torch.float16) else 1e-4
        if not bool(torch.isfinite(got).all()) or float(((got - want).abs() / want).max()) > bound:
            raise ModelError(
                f"{self.base.model}: a {type(self.model).__name__} gives a sequence other results when packed "
                f"(losses {got.tolist()}) than alone ({want.tolist()}), so its jobs would disturb each other."
            )


def _probe(slot: int, text: torch.Tensor) -> Item:
    targets = torch.ones(len(text), dtype=torch.bool)
    targets[0] = False
    return Item(slot, 0, 0, 0, 1.0 / (len(text) - 1), TokenSequence(text.int().numpy(), targets.numpy()))

"""One base's products, split over the ranks of a lane, and the adapters on them.

Of a column-split linear each rank has some outputs, of a row-split one some inputs (transformers' own plans say which).
A column-split linear's A is whole on each rank and its B cut by outputs; a row-split one's A is cut by inputs and its B
whole. Low-rank partial products are added up where the base's are, so a tick moves what the base alone would:

    column   Y_p = X W_pᵀ + s (X̂ Aᵀ) B_pᵀ       dX = Σ_p dY_p W_p + D ⊙ (s dY_p B_p A) / (1 − p)
    row      Y = Σ_p X_p W_pᵀ + s (X̂_p A_pᵀ) Bᵀ   dX_p = dY W_p + D_p ⊙ (s dY B A_p) / (1 − p)

What each rank then has of the gradient of a factor that is whole (a column-split linear's A, a row-split one's B) is a
part of a sum. These factors lie together in the job's vector, and are summed once per step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from tlora.adapter import ALIGN, AdapterLayout, AdapterState, SiteLayout
from tlora.base import Outline, cut_style
from tlora.errors import ModelError
from tlora.kernels.lora_linear import lora_linear
from tlora.kernels.tiles import Adapters, RowTable, Site
from tlora.mixed_linear import Bundle, Current
from tlora.parallel import Mesh
from tlora.spec import AdapterSpec

Cut = Literal["column", "row"]
_CUTS: dict[str, Cut] = {"colwise": "column", "rowwise": "row"}


def find_cuts(model: PreTrainedModel, outline: Outline, tensor: int) -> dict[str, Cut]:
    """How each linear is split. Raises ModelError if one cannot be, or its parts would not be equal."""
    if tensor == 1:
        return {}
    config = model.config.get_text_config()
    styles = {name: cut_style(config, name) for name in outline.linears if name != outline.head}
    if wrong := [name for name, style in styles.items() if style not in _CUTS]:
        raise ModelError(
            f"{outline.model_type}: transformers' plan for {wrong[0]} is {styles[wrong[0]] or 'missing'}; a "
            "tensor-parallel base wants colwise or rowwise. Replicate or shard it."
        )
    if outline.divisor % tensor:
        raise ModelError(
            f"{outline.model_type}: heads and widths, all multiples of {outline.divisor} and no more, cannot be split "
            f"over {tensor} ranks. Want a divisor of it."
        )
    return {name: _CUTS[style] for name, style in styles.items()}


@torch.no_grad()
def cut_linears(model: PreTrainedModel, cuts: Mapping[str, Cut], mesh: Mesh) -> None:
    """Leave this rank's part of each weight. A row-split linear's bias is added by the first rank."""
    for name, cut in cuts.items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        part = linear.weight.chunk(mesh.plan.tensor, int(cut == "row"))[mesh.part].contiguous()
        linear.weight = nn.Parameter(part.clone(), requires_grad=False)
        linear.out_features, linear.in_features = part.shape
        if linear.bias is not None and cut == "column":
            bias = linear.bias.chunk(mesh.plan.tensor)[mesh.part].clone()
            linear.bias = nn.Parameter(bias, requires_grad=False)
        elif linear.bias is not None and mesh.part:
            linear.register_parameter("bias", None)


class GroupBundle(Bundle):
    """A bundle of a base that no rank holds whole. `keeper`, once set, is the module whose parameters are its weight
    and bias: FSDP puts others in their place from time to time."""

    def __init__(self, linears: Sequence[nn.Linear], current: Current, mesh: Mesh, cuts: Mapping[nn.Module, Cut]):
        self.keeper: nn.Module | None = None
        super().__init__(linears, current)
        self.adapters = Adapters(self.widths, mesh.device)
        self._groups = tuple(group.group_name if group else "" for group in mesh.tensor_groups)
        (self.cut,) = {cuts.get(linear) for linear in linears}

    @property
    def weight(self) -> torch.Tensor:
        return self._weight if self.keeper is None else self.keeper.weight  # type: ignore[return-value]

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        self._weight = value

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias if self.keeper is None else self.keeper.bias  # type: ignore[return-value]

    @bias.setter
    def bias(self, value: torch.Tensor | None) -> None:
        self._bias = value

    def keep(self, linears: Sequence[nn.Linear]) -> None:
        """Make the common weight the first linear's only one; nothing else holds it then."""
        weight, bias = self._weight, self._bias
        for linear in linears:
            linear.register_parameter("weight", None)
            linear.register_parameter("bias", None)
        self.keeper = linears[0]
        self.keeper.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            self.keeper.bias = nn.Parameter(bias, requires_grad=False)
        del self._weight, self._bias

    def product(self, x_TK: torch.Tensor, rows: RowTable) -> torch.Tensor:
        group = self._groups[self.current.channel]
        if self.cut == "column":
            x_TK = _Enter.apply(x_TK, group)  # type: ignore[no-untyped-call]
        y_TN = lora_linear(x_TK, self.weight, self.bias, rows, self.adapters)
        return _Leave.apply(y_TN, group) if self.cut == "row" else y_TN  # type: ignore[no-untyped-call]

    def plain(self, index: int, x: torch.Tensor) -> torch.Tensor:
        y = super().plain(index, x)
        return _Leave.apply(y, self._groups[0]) if self.cut == "row" else y  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """Into a split region: all ranks have X; each has a part of dX."""

    @staticmethod
    def forward(ctx, x, group):  # type: ignore[no-untyped-def]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[no-untyped-def]
        return _summed(dx, ctx.group), None


class _Leave(torch.autograd.Function):
    """Out of it: each rank has a part of Y; all have dY."""

    @staticmethod
    def forward(ctx, y, group):  # type: ignore[no-untyped-def]
        return _summed(y, group)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return dy, None


@torch.library.custom_op("tlora::sum_over_ranks", mutates_args=())
def _summed(x: torch.Tensor, group: str) -> torch.Tensor:
    """One operator, which a compiler need not look into; `group` by its name, for a compiler knows no others."""
    total = x.clone(memory_format=torch.contiguous_format)
    c10d: Any = dist.distributed_c10d
    dist.all_reduce(total, group=c10d._resolve_process_group(group))
    return total


@_summed.register_fake
def _(x, group):  # type: ignore[no-untyped-def]
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class CutSite:
    """A site's whole layout, and this rank's part of it."""

    whole: SiteLayout
    mine: SiteLayout
    cut: Cut | None
    part: int

    def views(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's A and B, in a vector of the whole layout."""
        a, b = self.whole.views(vector)
        if self.cut == "column":
            return a, b[self.part * self.mine.outputs : (self.part + 1) * self.mine.outputs]
        first = self.first_column
        return a[:, first : first + self.mine.inputs], b

    @property
    def first_column(self) -> int:
        return self.part * self.mine.inputs if self.cut == "row" else 0


class SplitState(AdapterState):
    """One rank's part of a job's vectors: cut A; A of linears that are not split; A and then B of which each rank has a
    part of the gradient; B of linears that are not split; cut B. So what is summed is one slice, and what is common."""

    def __init__(
        self,
        whole: AdapterLayout,
        spec: AdapterSpec,
        cuts: Mapping[str, Cut],
        mesh: Mesh,
        *,
        seed: int,
        dtype: torch.dtype,
    ):
        self.whole_layout, tensor = whole, mesh.plan.tensor
        order: list[Cut | None] = ["row", None, "column"]
        starts, at, ends = dict[tuple[str, str], int](), 0, list[int]()
        for letter, kinds in (("a", order), ("b", order)):
            for kind in kinds:
                for site in whole.sites:
                    if cuts.get(site.name) == kind:
                        outputs, inputs = _part_shape(site, kind, tensor)
                        starts[letter, site.name] = at
                        at += -(-site.rank * (inputs if letter == "a" else outputs) // ALIGN) * ALIGN
                ends.append(at)
        self.cut_sites = []
        for site in whole.sites:
            cut = cuts.get(site.name)
            outputs, inputs = _part_shape(site, cut, tensor)
            mine = replace(
                site, outputs=outputs, inputs=inputs, a_at=starts["a", site.name], b_at=starts["b", site.name]
            )
            self.cut_sites.append(CutSite(site, mine, cut, mesh.part))
        self.partial = slice(ends[1], ends[3])
        """Elements of which the ranks' gradients are still to be summed."""
        self.common = slice(ends[0], ends[4])
        """Elements that every rank has."""
        layout = AdapterLayout(tuple(site.mine for site in self.cut_sites), b_start=ends[2], size=at)
        super().__init__(layout, spec, seed=seed, device=mesh.device, dtype=dtype, is_drawn=False)

    @property
    def partial_grad(self) -> torch.Tensor:
        return self.grad[self.partial]

    @property
    def squares(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the gradient's cut part, and of what every rank has."""
        low, middle, high = (
            torch.linalg.vector_norm(part, dtype=torch.float64).square()
            for part in (
                self.grad[: self.common.start], self.grad[self.common], self.grad[self.common.stop :],
            )
        )  # fmt: skip
        return low + high, middle

    def sites(self) -> Iterator[tuple[str, Site]]:
        for (name, site), cut in zip(super().sites(), self.cut_sites, strict=True):
            yield name, replace(site, first_column=cut.first_column)

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's part of whole vectors."""
        for name, mine in self.tensors().items():
            for site in self.cut_sites:
                for part, whole in zip(site.mine.views(mine), site.views(tensors[name]), strict=True):
                    part.copy_(whole)
        self.grad.zero_()
        self.publish()

    def fill(self, tensors: Mapping[str, torch.Tensor], vectors: Mapping[str, torch.Tensor], part: int) -> None:
        """Write the vectors of rank `part` of the lane into whole ones."""
        for name, vector in vectors.items():
            for site in self.cut_sites:
                theirs = replace(site, part=part)
                for source, whole in zip(site.mine.views(vector), theirs.views(tensors[name]), strict=True):
                    whole.copy_(source)


def _part_shape(site: SiteLayout, cut: Cut | None, tensor: int) -> tuple[int, int]:
    return site.outputs // (tensor if cut == "column" else 1), site.inputs // (tensor if cut == "row" else 1)

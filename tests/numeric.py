"""How close is close enough, and batches with adapters on them: what the numeric tests share.

Every comparison is with float64 from the same rounded inputs, tensor by tensor.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tlora.data import TokenSequence
from tlora.kernels.reference import keep_mask
from tlora.kernels.tiles import Adapters, Site, stride_of
from tlora.packing import Batch, Item, pack

DEVICE = torch.device(os.environ.get("TLORA_TEST_DEVICE", "cpu"))
# Result, gradient (named d…).
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 4e-3), torch.bfloat16: (6e-3, 8e-3)}


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """rms(out − ref) / rms(ref); infinite where `out` is not finite, or not zero where `ref` is."""
    assert out.shape == ref.shape
    difference, size = (out.double() - ref.double()).norm().item(), ref.double().norm().item()
    if not np.isfinite(difference) or (size == 0.0 and difference > 0.0):
        return float("inf")
    return difference / size if size else 0.0


def compare(out: Mapping[str, torch.Tensor], ref: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    assert out.keys() == ref.keys()
    errors = {name: error(out[name], ref[name]) for name in ref}
    wrong = {name: value for name, value in errors.items() if value > BOUNDS[dtype][name.startswith("d")]}
    assert not wrong, f"off by more than {BOUNDS[dtype]}: {wrong}"


@dataclass(frozen=True)
class Job:
    """One job of a numeric case: its adapter on the module, and its sequences in the batch."""

    lengths: tuple[int, ...]
    rank: int | None
    """None: no adapter on this module."""
    scale: float = 1.0
    dropout: float = 0.0
    seed: int = 7
    step: int = 0


JOBS = {
    0: Job((1,), rank=1, scale=4.0, dropout=0.5, seed=2**63 - 1),
    1: Job((63,), rank=None),
    2: Job((40, 60), rank=3, scale=0.5, dropout=0.1, seed=5, step=3),
    3: Job((), rank=8, scale=2.0, dropout=0.1),
    4: Job((1000,), rank=40, scale=0.25, seed=2**33),
    6: Job((2, 31, 30), rank=256, scale=1.5, dropout=0.9, seed=5, step=3),
}
"""Awkward on purpose: one row, a job without rows, one without this module, empty slot 5, one seed twice."""


def items_of(jobs: Mapping[int, Job], vocab: int = 50) -> list[Item]:
    """Random tokens; about half of each sequence is targets, weighted 1 / (targets of the job)."""
    items = []
    for slot, job in jobs.items():
        draw, counter, rows = np.random.default_rng(slot), 0, []
        for length in job.lengths:
            targets = draw.random(length) < 0.5
            targets[0] = False
            rows.append(TokenSequence(draw.integers(0, vocab, length).astype(np.int32), targets))
        weight = 1.0 / max(1, sum(row.num_targets for row in rows))
        for position, row in enumerate(rows):
            items.append(Item(slot, job.step, position, counter, weight, row))
            counter += len(row)
    return items


def batch_of(jobs: Mapping[int, Job], **options: int | bool) -> Batch:
    return pack(items_of(jobs), device=DEVICE, **options)  # type: ignore[arg-type]


def sites_of(
    jobs: Mapping[int, Job], inputs: int, outputs: int, dtype: torch.dtype, module: int = 1234
) -> dict[int, Site]:
    sites = {}
    for slot, job in jobs.items():
        if job.rank is None:
            continue
        draw = torch.Generator().manual_seed(slot + 1000 * (module - 1234))
        a = torch.randn(job.rank, inputs, generator=draw).div(inputs**0.5).to(DEVICE, dtype)
        b = torch.randn(job.rank, outputs, generator=draw).div(job.rank**0.5).to(DEVICE, dtype)
        grad_a, grad_b = (torch.zeros(part.shape, dtype=torch.float32, device=DEVICE) for part in (a, b))
        sites[slot] = Site(a, b.T, grad_a, grad_b.T, job.scale, job.dropout, job.seed, module)
    return sites


def adapters_of(*sites: Mapping[int, Site], widths: Sequence[int], last_slot: int = 0) -> Adapters:
    """The adapters of linears with these outputs, which read one input; residents up to `last_slot`."""
    adapters = Adapters(widths, DEVICE)
    adapters.reserve(last_slot)
    for module, of_module in enumerate(sites):
        for slot, site in of_module.items():
            adapters.place(module, slot, site)
    adapters.low = stride_of(max((site.a_RK.shape[0] for part in sites for site in part.values()), default=1))
    return adapters


def spans(batch: Batch) -> Iterator[tuple[int, Item, slice]]:
    """Each item's rows, found from the blocks alone."""
    first = 0
    for index, (item, block) in enumerate(zip(batch.items, batch.rows.blocks, strict=False)):
        yield index, item, slice(first, first + len(item.sequence))
        first += block


class PeftLike:
    """One job's LoRA module in float64 with autograd: scale · B A dropout(x), as PEFT has it, with our mask."""

    def __init__(self, site: Site):
        self.site = site
        self.a, self.b = (part.double().requires_grad_() for part in (site.a_RK, site.b_NR))

    def __call__(
        self, x: torch.Tensor, item: Item, training: bool, at: slice | torch.Tensor = slice(None)
    ) -> torch.Tensor:
        """`x`: the item's rows, or those of them that `at` selects."""
        site = self.site
        if training and site.dropout:
            counters = item.counter + torch.arange(len(item.sequence), device=DEVICE)[at]
            keep = keep_mask(
                counters, x.shape[1], seed=site.seed, step=item.step, module=site.module, dropout=site.dropout
            )
            x = x * keep / (1.0 - site.dropout)
        return x @ self.a.T @ self.b.T * site.scale

    def grads(self, slot: int) -> dict[str, torch.Tensor]:
        parts = {f"dA{slot}": self.a, f"dB{slot}": self.b}
        return {name: torch.zeros_like(part) if part.grad is None else part.grad for name, part in parts.items()}

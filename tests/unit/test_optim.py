"""Rates, clipping and steps: those of transformers, PyTorch and PEFT."""

from collections.abc import Mapping

import peft
import pytest
import torch
import toy
from numeric import error
from peft.optimizers import create_loraplus_optimizer
from transformers import LlamaForCausalLM, get_scheduler

from tlora.adapter import AdapterState, lay_out
from tlora.kernels.adamw import adamw
from tlora.optim import learning_rate, update_of
from tlora.spec import AdapterSpec, OptimSpec, ScheduleSpec

LINEARS = {"a.q_proj": torch.Size((24, 16)), "a.v_proj": torch.Size((8, 16))}
ADAPTER = AdapterSpec(rank=3, targets=["q_proj", "v_proj"])
FINE = torch.tensor(1.0)


def state_of(dtype: torch.dtype = torch.float64) -> AdapterState:
    state = AdapterState(
        lay_out(ADAPTER, LINEARS, "llama", "lm_head"), ADAPTER, seed=1, device=torch.device("cpu"), dtype=dtype
    )
    for site in state.layout.sites:
        site.views(state.master)[1].normal_(generator=torch.Generator().manual_seed(0))
    state.publish()
    return state


def fill_gradient(state: AdapterState, step: int, size: float = 1.0) -> list[torch.Tensor]:
    """Random gradients, in place; copies of A's and B's, by site."""
    draw, parts = torch.Generator().manual_seed(step), []
    for site in state.layout.sites:
        for part in site.views(state.grad):
            part.normal_(generator=draw).mul_(size)
            parts.append(part.clone())
    return parts


def step_of(state: AdapterState, optim: OptimSpec, *, loss: torch.Tensor, step: int, lr: float) -> torch.Tensor:
    """One job's step; the norm of its gradient."""
    return adamw([update_of(state, optim, loss=loss, step=step, lr=lr)])[0]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 100])
@pytest.mark.parametrize("warmup", [0, 1, 3, 50, 200])
def test_rates_are_those_of_transformers(name: str, num_steps: int, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = get_scheduler("constant_with_warmup" if name == "constant" else name, optimizer, warmup, num_steps)
    optim, schedule = OptimSpec(lr=0.3), ScheduleSpec(name=name, warmup_steps=warmup)
    for step in range(num_steps):
        assert learning_rate(optim, schedule, step, num_steps) == pytest.approx(theirs.get_last_lr()[0], abs=1e-15)
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("num_steps", [1, 7, 100, 101])
@pytest.mark.parametrize("ratio", [0.03, 0.1, 0.5])
def test_warmup_ratio_is_that_of_transformers(num_steps: int, ratio: float) -> None:
    from transformers import TrainingArguments

    warmup = TrainingArguments(warmup_steps=ratio, use_cpu=True).get_warmup_steps(num_steps)
    by_ratio, by_steps = ScheduleSpec(warmup_ratio=ratio), ScheduleSpec(warmup_steps=warmup)
    for step in range(num_steps):
        assert learning_rate(OptimSpec(), by_ratio, step, num_steps) == learning_rate(
            OptimSpec(), by_steps, step, num_steps
        )


@pytest.mark.parametrize("most", [0.0, 0.1, 1.0, 1e9])
def test_clipping_is_that_of_torch(most: float) -> None:
    """Seen in the second moment of the first step, (1 − β₂) g²; Adam's step itself hardly shows a gradient's size."""
    state = state_of()
    parts = [torch.nn.Parameter(torch.zeros_like(part)) for part in fill_gradient(state, 1)]
    for part, gradient in zip(parts, fill_gradient(state, 1), strict=True):
        part.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_(parts, most if most else float("inf"))
    got = step_of(state, OptimSpec(max_grad_norm=most), loss=FINE, step=0, lr=0.0)
    assert got.item() == pytest.approx(norm.item(), rel=1e-12)
    moments = [moment for site in state.layout.sites for moment in site.views(state.exp_avg_sq)]
    assert (
        error(torch.cat([m.flatten() for m in moments]), torch.cat([p.grad.flatten() for p in parts]) ** 2 * 1e-3)
        < 1e-12
    )


def peft_steps(optim: OptimSpec) -> tuple[list[torch.Tensor], AdapterState]:
    """Four steps by PEFT's LoRA+ optimizer and clipping, and by ours, from the same weights and gradients."""
    state = state_of()
    theirs = {}
    for site in state.layout.sites:
        for letter, part in zip("AB", site.views(state.master), strict=True):
            theirs[f"{site.name.replace('.', '_')}_lora_{letter}"] = torch.nn.Parameter(part.clone())
    model = peft.get_peft_model(LlamaForCausalLM(toy.config()), peft.LoraConfig(target_modules=["q_proj"]))
    for weight in model.parameters():
        weight.requires_grad_(False)
    for name, weight in theirs.items():
        model.register_parameter(name, weight)
    optimizer = create_loraplus_optimizer(
        model,
        torch.optim.AdamW,
        lr=optim.lr,
        loraplus_lr_ratio=optim.loraplus_ratio,
        loraplus_weight_decay=optim.weight_decay,
        betas=optim.betas,
        eps=optim.eps,
    )
    for step in range(4):
        for weight, gradient in zip(theirs.values(), fill_gradient(state, step), strict=True):
            weight.grad = gradient
        torch.nn.utils.clip_grad_norm_(theirs.values(), optim.max_grad_norm)
        optimizer.step()
        step_of(state, optim, loss=FINE, step=step, lr=optim.lr)
        assert not state.grad.any()
    return [weight.detach() for weight in theirs.values()], state


@pytest.mark.parametrize("ratio", [1.0, 16.0])
def test_steps_are_those_of_peft(ratio: float) -> None:
    optim = OptimSpec(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), max_grad_norm=3.0, loraplus_ratio=ratio)
    theirs, state = peft_steps(optim)
    ours = [part for site in state.layout.sites for part in site.views(state.master)]
    assert max(error(mine, reference) for mine, reference in zip(ours, theirs, strict=True)) < 1e-12


def test_a_ratio_on_the_wrong_half_is_seen() -> None:
    theirs, _ = peft_steps(OptimSpec(lr=1e-2, loraplus_ratio=16.0))
    _, wrong = peft_steps(OptimSpec(lr=16e-2, loraplus_ratio=1 / 16))
    assert error(wrong.layout.sites[0].views(wrong.master)[0], theirs[0]) > 1e-3


@pytest.mark.parametrize("ratio", [1.0, 16.0])
@pytest.mark.parametrize("what", ["gradient", "overflow", "loss"])
def test_an_unhealthy_step_changes_nothing(what: str, ratio: float) -> None:
    state, optim = state_of(torch.float32), OptimSpec(lr=1e-2, weight_decay=0.1, loraplus_ratio=ratio)
    fill_gradient(state, 0)
    step_of(state, optim, loss=FINE, step=0, lr=optim.lr)
    before: Mapping[str, torch.Tensor] = {name: part.clone() for name, part in state.tensors().items()}
    fill_gradient(state, 1, 1e30 if what == "overflow" else 1.0)
    if what == "gradient":
        state.grad[3] = torch.nan
    loss = torch.tensor(torch.nan if what == "loss" else 1.0)
    norm = step_of(state, optim, loss=loss, step=1, lr=optim.lr)
    assert torch.isfinite(norm) == (what == "loss")
    assert all(torch.equal(part, before[name]) for name, part in state.tensors().items())
    assert not state.grad.any()


def test_the_kernels_copy_follows_the_master() -> None:
    state = state_of(torch.bfloat16)
    fill_gradient(state, 0)
    step_of(state, OptimSpec(lr=1e-1), loss=FINE, step=0, lr=1e-1)
    assert state.master.dtype == torch.float32
    assert torch.equal(state.compute, state.master.bfloat16())

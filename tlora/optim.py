"""One job's learning rate, and its optimizer step as a record, which `kernels.adamw` takes for many jobs at once.

Called by the trainer when a step's sequences are all through.
"""

import math

import torch

from tlora.adapter import AdapterState
from tlora.kernels.tiles import Update
from tlora.spec import OptimSpec, ScheduleSpec


def learning_rate(optim: OptimSpec, schedule: ScheduleSpec, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (from 0) of `num_steps`: `transformers.get_scheduler`'s."""
    warmup = schedule.warmup_steps or math.ceil(num_steps * schedule.warmup_ratio)
    if step < warmup:
        return optim.lr * step / max(1, warmup)
    if schedule.name == "constant":
        return optim.lr
    if schedule.name == "linear":
        return optim.lr * max(0.0, (num_steps - step) / max(1, num_steps - warmup))
    progress = (step - warmup) / max(1, num_steps - warmup)
    return optim.lr * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def update_of(state: AdapterState, optim: OptimSpec, *, loss: torch.Tensor, step: int, lr: float) -> Update:
    """Optimizer step `step` (from 0) of a job at rate `lr`, ready to be taken together with other jobs' steps."""
    return Update(
        master=state.master,
        grad=state.grad,
        exp_avg=state.exp_avg,
        exp_avg_sq=state.exp_avg_sq,
        compute=state.compute,
        loss=loss,
        step=step + 1,
        lr=lr,
        lr_b=lr * optim.loraplus_ratio,
        b_start=state.layout.b_start,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=optim.max_grad_norm,
    )

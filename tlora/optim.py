"""One job's optimizer step over its vectors, and its learning rate. Called when a step's sequences are all through."""

import math

import torch

from tlora.adapter import AdapterState
from tlora.kernels import reference
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


def optimizer_step(state: AdapterState, optim: OptimSpec, *, loss: torch.Tensor, step: int, lr: float) -> torch.Tensor:
    """Clip, AdamW, clear the gradient. Returns the gradient's norm before clipping, a scalar on the device.

    If that norm or `loss` is not finite, weights and moments stay as they are. `step` counts from 0.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(state.grad)
    healthy = torch.isfinite(norm) & torch.isfinite(loss)
    if optim.max_grad_norm > 0.0:
        state.grad.mul_((optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    cut = state.layout.b_start if optim.loraplus_ratio != 1.0 else 0
    for part, rate in ((slice(0, cut), lr), (slice(cut, None), lr * optim.loraplus_ratio)):
        reference.adamw(
            *(vector[part] for vector in (state.master, state.grad, state.exp_avg, state.exp_avg_sq)),
            healthy=healthy,
            step=step + 1,
            lr=rate,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
        )
    state.grad.zero_()
    state.publish()
    return norm

"""AdamW on one vector against torch.optim.AdamW."""

from collections.abc import Callable

import pytest
import torch
from numeric import error

from tlora.kernels.reference import adamw

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def vectors(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Master and moments."""
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(1000, generator=draw, dtype=torch.float64).to(dtype),
        *(torch.zeros(1000, dtype=dtype) for _ in "mv"),
    ]


def gradient(step: int) -> torch.Tensor:
    return torch.randn(1000, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * 10.0 ** (
        step % 4 - 2
    )


def distance(ours: Callable[..., None], dtype: torch.dtype = torch.float64, **options: object) -> float:
    """Largest error in master and moments after ten steps."""
    master, m, v = vectors(dtype)
    theirs = torch.nn.Parameter(vectors()[0])
    optimizer = torch.optim.AdamW([theirs], **OPTIONS)
    for step in range(1, 11):
        theirs.grad = gradient(step)
        optimizer.step()
        healthy = torch.tensor(True)
        ours(master, gradient(step).to(dtype), m, v, healthy=healthy, step=step, **{**OPTIONS, **options})
    state = optimizer.state[theirs]
    want = (theirs.detach(), state["exp_avg"], state["exp_avg_sq"])
    return max(error(mine, reference) for mine, reference in zip((master, m, v), want, strict=True))


def test_equals_torch() -> None:
    assert distance(adamw) < 1e-13
    assert distance(adamw, torch.float32) < 1e-5


@pytest.mark.parametrize(
    "change",
    [{"lr": 1.01e-2}, {"betas": (0.8, 0.951)}, {"betas": (0.81, 0.95)}, {"eps": 1e-3}, {"weight_decay": 0.0}],
    ids=str,
)
def test_planted_errors_are_seen(change: dict) -> None:
    assert distance(adamw, **change) > 1e-5


def test_a_step_counted_from_nought_is_seen() -> None:
    assert distance(lambda *tensors, step, **options: adamw(*tensors, step=step + 1, **options)) > 1e-5


def test_an_unhealthy_vector_is_untouched() -> None:
    master, m, v = vectors()
    adamw(master, gradient(1), m, v, healthy=torch.tensor(True), step=1, **OPTIONS)
    before = [part.clone() for part in (master, m, v)]
    adamw(master, gradient(2).fill_(torch.nan), m, v, healthy=torch.tensor(False), step=2, **OPTIONS)
    assert all(torch.equal(old, new) for old, new in zip(before, (master, m, v), strict=True))

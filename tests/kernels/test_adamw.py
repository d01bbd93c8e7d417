"""AdamW and clipping of many jobs at once, fused and plain, against torch.optim.AdamW in float64."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from numeric import BOUNDS, DEVICE, error

from tlora.kernels import reference, routes
from tlora.kernels.adamw import adamw
from tlora.kernels.tiles import Update

Step = Callable[[Sequence[Update]], torch.Tensor]
LEARNT = ("master", "exp_avg", "exp_avg_sq")
SIZES = (1, 31, 1000, 70000)
NUM_STEPS = 5
OPTIONS = {"lr_b": 4e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1, "max_grad_norm": 2.0}


@pytest.fixture(params=["fused", "plain"])
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Step:
    if request.param == "plain":
        return reference.adamw
    monkeypatch.setattr(routes, "is_fused", lambda tensor: True)
    return adamw


def job(
    size: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    **changes: object,
) -> Update:
    """A job before its first step; its compute copy is the master itself if no precision is given.

    `seed` makes its weights, its rate and, through `b_start`, its gradients."""
    master = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return Update(
        master=master,
        grad=torch.zeros_like(master),
        exp_avg=torch.zeros_like(master),
        exp_avg_sq=torch.zeros_like(master),
        compute=master.to(compute or dtype),
        loss=torch.ones((), dtype=dtype, device=DEVICE),
        step=0,
        b_start=size // 2 + seed,
        lr=1e-2 * (1 + seed),
        **{**OPTIONS, **changes},
    )


def jobs(**options: object) -> list[Update]:
    return [job(size, seed=seed, **options) for seed, size in enumerate(SIZES)]


def gradient(update: Update, step: int) -> torch.Tensor:
    """Of sizes that some steps clip and others do not."""
    draw = torch.Generator().manual_seed(step + 10 * update.b_start)
    return torch.randn(len(update.master), generator=draw) * 10.0 ** (step % 4 - 2)


def with_gradient(update: Update, step: int) -> Update:
    update.grad.copy_(gradient(update, step))
    return replace(update, step=step)


def train(step: Step, updates: Sequence[Update], num_steps: int = 2) -> torch.Tensor:
    """Steps of all jobs, in place; the norms [step, job]."""
    return torch.stack([step([with_gradient(update, n) for update in updates]) for n in range(1, num_steps + 1)])


def oracle(start: Update) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the job has learnt, and its norms, by PyTorch in float64."""
    cut = start.b_start
    master = start.master.to(torch.float64, copy=True)
    halves = [torch.nn.Parameter(half) for half in (master[:cut], master[cut:])]
    groups = [{"params": [half], "lr": lr} for half, lr in zip(halves, (start.lr, start.lr_b), strict=True)]
    optimizer = torch.optim.AdamW(groups, betas=start.betas, eps=start.eps, weight_decay=start.weight_decay)
    norms = []
    for n in range(1, NUM_STEPS + 1):
        whole = gradient(start, n).to(DEVICE, torch.float64)
        halves[0].grad, halves[1].grad = whole[:cut].clone(), whole[cut:].clone()
        norms.append(torch.nn.utils.clip_grad_norm_(halves, start.max_grad_norm or float("inf")))
        optimizer.step()
    moments = [[optimizer.state[half][name] for half in halves] for name in LEARNT[1:]]
    parts = ([half.detach() for half in halves], *moments)
    return {name: torch.cat(part) for name, part in zip(LEARNT, parts, strict=True)}, torch.stack(norms)


def distance(step: Step, updates: Sequence[Update]) -> float:
    """Largest error in what any of the jobs has learnt, and in their norms."""
    wanted = [oracle(update) for update in updates]
    norms = train(step, updates, NUM_STEPS)
    pairs = [(getattr(update, name), w[name]) for update, (w, _) in zip(updates, wanted, strict=True) for name in w]
    pairs += [(norms[:, index], w) for index, (_, w) in enumerate(wanted)]
    return max(error(ours, theirs) for ours, theirs in pairs)


def bits(update: Update) -> list[torch.Tensor]:
    return [getattr(update, name).clone() for name in (*LEARNT, "compute", "grad")]


def same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.0}, {"lr_b": 1e-2}, {"weight_decay": 0.0}], ids=str)
def test_equals_torch(step: Step, changes: dict) -> None:
    assert distance(step, jobs(**changes)) < 1e-6


def test_equals_torch_in_float64() -> None:
    assert distance(adamw, jobs(dtype=torch.float64)) < 1e-13


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16])
def test_the_compute_copy_follows_and_the_gradient_is_cleared(step: Step, compute: torch.dtype) -> None:
    updates = jobs(compute=compute)
    train(step, updates)
    for update in updates:
        assert not update.grad.any()
        if step is adamw and compute is torch.bfloat16 and DEVICE.type == "cpu":
            assert error(update.compute, update.master) < BOUNDS[compute][0]  # the interpreter cuts off, unrounded
        else:
            assert torch.equal(update.compute, update.master.to(compute))


def test_a_compute_copy_that_is_the_master_is_left_alone(step: Step) -> None:
    update, apart = job(1000), job(1000, compute=torch.bfloat16)
    assert update.compute is update.master
    train(step, [update])
    train(step, [apart])
    assert torch.equal(update.master, apart.master)


PLANTED: dict[str, Callable[[Update, Update], Update]] = {
    "step": lambda update, _: replace(update, step=update.step + 1),
    "moments": lambda update, other: replace(update, exp_avg=other.exp_avg),
    "gradient": lambda update, other: replace(update, grad=other.grad),
    "lr": lambda update, _: replace(update, lr=1.01 * update.lr),
    "lr_b": lambda update, _: replace(update, lr_b=1.01 * update.lr_b),
    "b_start": lambda update, _: replace(update, b_start=update.b_start + 1),
    "beta1": lambda update, _: replace(update, betas=(0.81, 0.95)),
    "beta2": lambda update, _: replace(update, betas=(0.8, 0.951)),
    "eps": lambda update, _: replace(update, eps=1e-3),
    "weight_decay": lambda update, _: replace(update, weight_decay=0.101),
    "max_grad_norm": lambda update, _: replace(update, max_grad_norm=2.02),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_errors_are_seen(step: Step, name: str) -> None:
    def wrong(updates: Sequence[Update]) -> torch.Tensor:
        return step([PLANTED[name](update, updates[index - 1]) for index, update in enumerate(updates)])

    assert distance(wrong, [job(1000, seed=seed) for seed in range(2)]) > 1e-5


@pytest.mark.parametrize("part", LEARNT)
def test_a_result_that_is_a_little_off_is_seen(step: Step, part: str) -> None:
    def wrong(updates: Sequence[Update]) -> torch.Tensor:
        norms = step(updates)
        getattr(updates[1], part)[-1].mul_(1.01)
        return norms

    assert distance(wrong, [job(31, seed=seed) for seed in range(2)]) > 1e-5
    assert distance(lambda updates: step(updates) * 1.01, [job(31)]) > 1e-5


def test_each_job_steps_as_alone(step: Step) -> None:
    """To the bit, whatever is beside it and in whatever order."""
    updates = jobs(compute=torch.float16)
    norms = train(step, updates)
    for index, update in enumerate(jobs(compute=torch.float16)):
        assert torch.equal(train(step, [update])[:, 0], norms[:, index])
        assert same(bits(update), bits(updates[index]))
    backwards = jobs(compute=torch.float16)[::-1]
    assert torch.equal(train(step, backwards).flip(1), norms)
    assert all(same(bits(a), bits(b)) for a, b in zip(backwards, updates[::-1], strict=True))


def test_ten_calls_give_the_same_bits(step: Step) -> None:
    outcomes = []
    for _ in range(10):
        update = with_gradient(job(70000), 1)
        outcomes.append([step([update]), *bits(update)])
    assert all(same(outcome, outcomes[0]) for outcome in outcomes)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("where", ["grad", "loss"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_an_unhealthy_job_is_untouched_and_the_others_step(step: Step, where: str, value: float) -> None:
    """1e30 is finite, yet its square is not: as a gradient too large, as a loss good."""
    updates = [job(size, compute=torch.float16) for size in (31, 40000, 1000)]
    train(step, updates)
    before = bits(updates[1])
    updates = [with_gradient(update, 3) for update in updates]
    getattr(updates[1], where).view(-1)[-1] = value
    norms = step(updates)
    assert torch.isfinite(norms).tolist() == [True, where == "loss", True]
    assert same(bits(updates[1]), before) == (where == "grad" or value != 1e30)
    assert not updates[1].grad.any()
    for update in (updates[0], updates[2]):
        alone = job(len(update.master), compute=torch.float16)
        train(step, [alone])
        step([with_gradient(alone, 3)])
        assert same(bits(update), bits(alone))


@pytest.mark.skipif(DEVICE.type != "cuda", reason="a vector beyond 2³¹ elements needs a GPU")
def test_offsets_beyond_32_bits() -> None:
    size, tail = 2**31 + 5, 1000
    names = ("grad", *LEARNT)
    start = replace(job(tail, compute=torch.bfloat16, max_grad_norm=0.0), step=3, b_start=0)
    vectors = {name: torch.rand(size, device=DEVICE) for name in names}
    large = replace(start, compute=torch.empty(size, dtype=torch.bfloat16, device=DEVICE), **vectors)
    small = replace(start, **{name: vector[-tail:].clone() for name, vector in vectors.items()})
    wanted = torch.linalg.vector_norm(large.grad, dtype=torch.float64)
    assert error(adamw([small, large])[1], wanted) < 1e-6
    assert not large.grad.any()
    for name in (*names, "compute"):
        assert torch.equal(getattr(small, name), getattr(large, name)[-tail:]), name

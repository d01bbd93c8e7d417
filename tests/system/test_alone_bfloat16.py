"""Equal to alone, to the bit, in the precision that GPUs train in: deterministic mode on a bfloat16 base."""

from pathlib import Path

import numpy as np
import pytest
import torch
import toy

from tlora.spec import JobSpec
from tlora.supermodel import SuperModel

WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": toy.VOCAB}


def jobs(folder: Path, seed: int) -> list[tuple[JobSpec, object, int]]:
    """Three jobs of drawn ranks, targets, dropout and lengths, and when each joins."""
    draw = np.random.default_rng(seed)
    made = []
    for number in range(3):
        adapter = {
            "rank": int(draw.choice([1, 3, 8, 17, 40, 80])),
            "alpha": 8,
            "targets": ["all-linear", ["q_proj", "v_proj"], ["down_proj", "gate_proj"]][draw.integers(3)],
            "dropout": float(draw.choice([0.0, 0.3])),
        }
        spec = toy.job(
            folder, f"job{number}", adapter=adapter, seed=int(draw.integers(1000)), steps=3,
            batch_size=int(draw.integers(1, 4)), optim={"lr": 1e-2},
        )  # fmt: skip
        rows = toy.data(9, seed=seed * 10 + number, held_out=2, low=2, high=int(draw.choice([20, 90])))
        made.append((spec, rows, int(draw.integers(3))))
    return made


@pytest.fixture(scope="module")
def model() -> SuperModel:
    return toy.super_model(torch.bfloat16, model=toy.config(**WIDE), deterministic=True)


@pytest.mark.parametrize("seed", range(4))
def test_alone_to_the_bit(seed: int, model: SuperModel, tmp_path: Path) -> None:
    """Losses, evaluations, first gradient and final weights, whoever came and went, however ticks were cut."""
    trainer = toy.Recorder(model, token_budget=[128, 256, 4096, 512][seed], nano_batches=1 + seed % 3)
    mixed, waiting, turn = {}, jobs(tmp_path / "mixed", seed), 0
    while waiting or trainer.jobs:
        for spec, rows, _ in [entry for entry in waiting if entry[2] <= turn]:
            mixed[spec.name] = trainer.attach(spec, rows)
        waiting = [entry for entry in waiting if entry[2] > turn]
        if trainer.jobs:
            trainer.tick()
        turn += 1
    for spec, rows, _ in jobs(tmp_path / "solo", seed):
        alone = toy.alone(model, spec, rows)
        among = toy.Result.of(trainer, mixed[spec.name])
        assert among.losses == alone.losses
        assert among.evaluations == alone.evaluations
        assert torch.equal(among.gradient, alone.gradient)
        assert torch.equal(among.master, alone.master)
        assert among.master.isfinite().all()

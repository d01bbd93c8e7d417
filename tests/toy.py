"""A model of two layers, random data and one loop that trains: what the tests share."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from tlora.data import JobData, TokenSequence
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer, TrainerOptions

VOCAB = 96


def config(**changes: object) -> LlamaConfig:
    values = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaConfig(**{**values, **changes})


def super_model(
    dtype: torch.dtype = torch.float32, *, model: PretrainedConfig | None = None, **options: bool
) -> SuperModel:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(model or config(), dtype=torch.float32).to(dtype)
    return SuperModel(base, BaseSpec(model="toy"), **options)


def sequences(count: int, seed: int = 0, *, low: int = 2, high: int = 24) -> list[TokenSequence]:
    """Random tokens, the first part of each sequence not a target."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(draw.integers(low, high + 1))
        targets = np.arange(length) >= draw.integers(1, length)
        made.append(TokenSequence(draw.integers(0, VOCAB, length).astype(np.int32), targets))
    return made


def data(count: int = 12, seed: int = 0, *, held_out: int = 0, **lengths: int) -> JobData:
    return data_of(sequences(count, seed, **lengths), sequences(held_out, seed + 1000, **lengths))


def data_of(train: list[TokenSequence], held_out: list[TokenSequence] | None = None) -> JobData:
    return JobData(train, held_out or [], report=None, eval_report=None)  # type: ignore[arg-type]


def job(folder: Path, name: str = "a", **changes: object) -> JobSpec:
    values: dict[str, object] = {
        "name": name,
        "base": {"model": "toy"},
        "data": {"path": "none"},
        "adapter": {"rank": 4, "alpha": 8, "targets": "all-linear"},
        "optim": {"lr": 1e-2},
        "schedule": {"name": "cosine", "warmup_steps": 2},
        "batch_size": 4,
        "steps": 5,
        "output": str(folder / name),
    }
    return parse_job({**values, **changes})


def finish(trainer: Trainer) -> None:
    for _ in range(10_000):
        if not trainer.jobs:
            return
        trainer.tick()
    raise AssertionError("jobs never ended")


def alone(model: SuperModel, spec: JobSpec, rows: JobData, **options: int) -> dict[str, torch.Tensor]:
    """Train one job with no neighbour; its final vectors."""
    trainer = Trainer(model, TrainerOptions(**options))  # type: ignore[arg-type]
    resident = trainer.attach(spec, rows)
    finish(trainer)
    assert resident.record.state == "finished", resident.record.reason
    return resident.state.tensors()

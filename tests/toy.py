"""A model of two layers, random data and one loop that trains: what the tests share."""

import json
import os
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from toy_tokenizers import CHATML, byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from tlora.checkpoint import load_state
from tlora.cluster import ClusterSpec
from tlora.data import JobData, TokenSequence
from tlora.local import RunOptions, prepare, train
from tlora.resident import ResidentJob
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.sweep_spec import SweepSpec, parse_sweep
from tlora.tracking import read_metrics
from tlora.trainer import Trainer, TrainerOptions

VOCAB = 96
DEVICE = torch.device(os.environ.get("TLORA_TEST_DEVICE", "cpu"))


SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def config(**changes: object) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE, "tie_word_embeddings": False, **changes})


def super_model(
    dtype: torch.dtype = torch.float32,
    *,
    model: PretrainedConfig | None = None,
    rounded_to: torch.dtype = torch.float32,
    **options: bool,
) -> SuperModel:
    """`rounded_to`: a model of that precision has the same weights."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(deepcopy(model) or config(), dtype=torch.float32)
    base = base.to(DEVICE, rounded_to).to(dtype)
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


class Recorder(Trainer):
    """A trainer that keeps each job's gradient of its first step and counts its ticks."""

    def __init__(self, supermodel: SuperModel, **options: int):
        super().__init__(supermodel, TrainerOptions(**options))  # type: ignore[arg-type]
        self.first_gradients: dict[str, torch.Tensor] = {}

    def _step(self, jobs: list[ResidentJob]) -> None:
        for resident in jobs:
            self.first_gradients.setdefault(resident.name, resident.state.grad.clone())
        super()._step(jobs)


@dataclass
class Result:
    """What a job ended with."""

    losses: list[float]
    rates: list[float]
    evaluations: list[float]
    gradient: torch.Tensor
    master: torch.Tensor

    @classmethod
    def of(cls, trainer: Recorder, resident: ResidentJob) -> "Result":
        assert resident.record.state == "finished", f"{resident.name}: {resident.record.reason}"
        rows = read_metrics(resident.spec.folder)
        return cls(
            [row["loss"] for row in rows if "loss" in row],
            [row["lr"] for row in rows if "loss" in row],
            [row["eval_loss"] for row in rows if "eval_loss" in row],
            trainer.first_gradients[resident.name],
            resident.state.master,
        )


def finish(trainer: Trainer) -> None:
    for _ in range(10_000):
        if not trainer.jobs:
            return
        trainer.tick()
    raise AssertionError("jobs never ended")


def alone(model: SuperModel, spec: JobSpec, rows: JobData, part: str = "alone", **options: int) -> Result:
    """Train one job with no neighbour, into a folder of its own."""
    trainer = Recorder(model, **options)
    resident = trainer.attach(spec.model_copy(update={"output": f"{spec.output}-{part}"}), rows)
    finish(trainer)
    return Result.of(trainer, resident)


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of two vectors, on whichever devices."""
    a, b = a.cpu(), b.cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def write_base(folder: Path) -> None:
    """A base and rows that jobs can name, as users have them."""
    tokenizer = byte_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(vocab_size=len(tokenizer), max_position_embeddings=512))
    for saved in (model, tokenizer):
        saved.save_pretrained(folder / "base")
    rows = "".join(json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in range(12))
    (folder / "rows.jsonl").write_text(rows)


def named_job(folder: Path, name: str, **changes: object) -> JobSpec:
    """On the base and the rows of `write_base`."""
    return parse_job(
        {
            "name": name,
            "base": {"model": str(folder / "base")},
            "data": {"path": str(folder / "rows.jsonl"), "eval_fraction": 0.2},
            "adapter": {"rank": 4, "targets": "all-linear", "dropout": 0.1},
            "optim": {"lr": 1e-3},
            "steps": 4,
            "save_every": 1,
            "output": str(folder / name),
            **changes,
        }
    )


def trained_alone(spec: JobSpec) -> JobSpec:
    """The same job, in a folder of its own, where it has been trained alone."""
    lone = spec.model_copy(update={"output": f"{spec.output}-alone"})
    options = RunOptions(deterministic=True, device="cpu")
    train(prepare([lone], options), options)
    return lone


def off_alone(spec: JobSpec) -> float:
    """Relative distance of a job's final weights from those of the same job trained alone."""
    one, other = (load_state(each.folder)[0]["master"] for each in (spec, trained_alone(spec)))
    return off(one, other)


def equals_alone(spec: JobSpec) -> bool:
    """Whether a job's adapter is that of the same job trained alone, to the bit."""
    lone = trained_alone(spec)
    one, other = (load_file(each.folder / "adapter_model.safetensors") for each in (spec, lone))
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())


def write_sweep(folder: Path) -> None:
    """A base and rows for `sweep`."""
    write_base(folder)
    for name, numbers in (("rows", range(100, 140)), ("held_out", range(200, 208))):
        rows = [json.dumps({"prompt": f"say {n}", "completion": f" {n}"}) + "\n" for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(rows))


def sweep(folder: Path, **changes: object) -> SweepSpec:
    """Seven small candidates, three at once."""
    values = {
        "name": "s",
        "job": {
            "base": {"model": str(folder / "base")},
            "data": {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl")},
            "adapter": {"targets": "all-linear", "dropout": 0.1},
            "epochs": 2,
        },
        "space": {"optim.lr": {"log_uniform": [1e-4, 1e-1]}, "adapter.rank": [2, 4], "batch_size": [2, 4]},
        "budget": {"configurations": 7},
        "early_exit": {"evaluations": 16, "halving": {"warmup": 0.125}},
        "places": 3,
        "output": str(folder / "out"),
    }
    return parse_sweep({**values, **changes})


ROOT = Path(__file__).parents[1]
RAY = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
"""Of every process of a test's Ray."""


def cluster_spec(folder: Path, **changes: object) -> ClusterSpec:
    """CPU workers in deterministic mode, that are given up soon."""
    values = {"gpus_per_worker": 0, "deterministic": True, "lost_after_s": 8.0, "max_workers": 2, **changes}
    return ClusterSpec.model_validate({"storage": str(folder), "state": str(folder / "state"), **values})


def until(seen: Callable[[], Any], patience_s: float = 180.0) -> Any:
    """What is seen, once it is true."""
    deadline_s = time.monotonic() + patience_s
    while time.monotonic() < deadline_s:
        if found := seen():
            return found
        time.sleep(0.1)
    raise AssertionError("never seen")

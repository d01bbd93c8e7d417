"""Ticks on this device: tokens/s of jobs together, of one alone, of plain PEFT; peak memory beside the estimate.

    python -m benchmarks.tick BASE [--jobs 8] [--steps 8]

BASE is a model's folder or hub name. Data is random tokens, lengths 64 to 512; speed does not depend on the values.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from tlora import environment
from tlora.base import default_device, dtype_of
from tlora.data import JobData, TokenSequence
from tlora.memory import estimate
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer, TrainerOptions

BATCH, RANK = 8, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    base, steps = BaseSpec(model=arguments.base), arguments.steps
    peft = train_with_peft(base, steps)
    print(f"PEFT, one job: {peft:,.0f} tokens/s", flush=True)
    for deterministic in (False, True):
        for checkpointing in (False, True):
            model = SuperModel.load(base, deterministic=deterministic, checkpointing=checkpointing)
            for count in (1, arguments.jobs):
                rate, peak, guess = train_together(model, count, steps)
                memory = f"peak {peak / 2**30:.2f} GiB, estimated {guess / 2**30:.2f}"
                mode = f"deterministic={deterministic}, checkpointing={checkpointing}"
                print(f"{count} jobs, {mode}: {rate:,.0f} tokens/s, {rate / peft:.2f} × PEFT; {memory}", flush=True)
            del model
    print(environment.describe())


def data(seed: int) -> JobData:
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(4 * BATCH):
        length = int(draw.integers(64, 513))
        rows.append(TokenSequence(draw.integers(0, 8000, length).astype(np.int32), np.arange(length) >= length // 3))
    return JobData(rows, [], report=None, eval_report=None)  # type: ignore[arg-type]


def job(folder: Path, number: int, steps: int) -> JobSpec:
    return parse_job(
        {
            "name": f"job{number}",
            "base": {"model": "base"},
            "data": {"path": "none"},
            "adapter": {"rank": RANK, "alpha": RANK, "targets": "all-linear", "dropout": 0.1 * (number % 2)},
            "batch_size": BATCH,
            "steps": steps,
            "save_every": steps,
            "output": str(folder / f"job{number}"),
        }
    )


def train_together(model: SuperModel, count: int, steps: int) -> tuple[float, float, float]:
    """Tokens/s after the first tick, peak bytes on the device, and the estimate of them."""
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainerOptions())
        for number in range(count):
            trainer.attach(job(Path(folder), number, steps), data(number))
        layout = trainer.jobs["job0"].state.layout
        trainer.tick()
        tokens, began_s = 0, time.perf_counter()
        while trainer.jobs:
            tokens += trainer.tick().num_tokens
        seconds = time.perf_counter() - began_s
    needs = estimate(model.outline, layout, trainer.token_budget, model.dtype, checkpointing=model.checkpointing)
    guess = needs.base_bytes + count * needs.adapter_bytes + needs.tick_bytes
    return tokens / seconds, torch.cuda.max_memory_allocated() if cuda else float("nan"), guess


def train_with_peft(base: BaseSpec, steps: int) -> float:
    device = default_device()
    model = AutoModelForCausalLM.from_pretrained(base.model, dtype=dtype_of(base, device)).to(device)
    model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights)
    rows, tokens, began_s = data(0).train, 0, time.perf_counter()
    for step in range(steps + 1):
        if step == 1:
            tokens, began_s = 0, time.perf_counter()
        batch = [rows[(step * BATCH + at) % len(rows)] for at in range(BATCH)]
        ids = [torch.from_numpy(row.ids).long() for row in batch]
        model(
            input_ids=pad_sequence(ids, batch_first=True).to(device),
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], batch_first=True).to(device),
            labels=pad_sequence(ids, batch_first=True, padding_value=-100).to(device),
        ).loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += sum(len(row) for row in batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return tokens / (time.perf_counter() - began_s)


if __name__ == "__main__":
    main()

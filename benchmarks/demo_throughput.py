"""Throughput of the demo's three jobs: trained together here, over one after the other with PEFT. CPU, float32.

    python -m benchmarks.demo_throughput [--rounds N]

Both sides take the same sequences in the same batches and the same number of optimizer steps, and write each adapter at
its end. PEFT's side is the usual loop: a batch padded to its longest sequence, transformers' own loss. Loading is not
timed.
"""

import argparse
import os
import subprocess
import time
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, get_scheduler
from transformers.utils import logging

from examples.demo import ROOT, SKILLS, prepare_base, write_rows
from tlora import environment
from tlora.data import TokenSequence
from tlora.local import ReadyJob, RunOptions, prepare
from tlora.randomness import permutation
from tlora.spec import load_job
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="measure both sides this often; the best of each counts")
    rounds = parser.parse_args().rounds
    os.chdir(ROOT)
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    prepare_base()
    for name in SKILLS:
        write_rows(name)

    best = {"one after the other, PEFT": 0.0, "together, tLoRA": 0.0}
    for _ in range(rounds):
        for side, train in zip(best, (train_with_peft, train_together), strict=True):
            with TemporaryDirectory() as folder:
                jobs = read_jobs(Path(folder))
                seconds = train(jobs)
            tokens = sum(len(sequence) for job in jobs for batch in batches(job) for sequence in batch)
            best[side] = max(best[side], tokens / seconds)
            print(f"{side}: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s", flush=True)
    peft, tlora = best.values()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"ratio: {tlora / peft:.2f}")
    print(f"commit {commit or 'none'}, {torch.get_num_threads()} threads, {environment.describe()}")


def read_jobs(folder: Path) -> list[ReadyJob]:
    specs = [load_job(f"examples/demo/{name}.yaml", [f"output={folder / name}"]) for name in SKILLS]
    return prepare(specs, RunOptions(device="cpu"))


def batches(job: ReadyJob) -> list[list[TokenSequence]]:
    """The sequences of each optimizer step, as the trainer takes them within the first epoch."""
    order = permutation(job.spec.seed, "order", 0, len(job.data.train))
    size = job.spec.batch_size
    assert job.num_steps * size <= len(order), "the demo's jobs end within their first epoch"
    starts = range(0, job.num_steps * size, size)
    return [[job.data.train[index] for index in order[start : start + size]] for start in starts]


def train_together(jobs: list[ReadyJob]) -> float:
    supermodel = SuperModel.load(jobs[0].spec.base, device="cpu")
    began_s = time.perf_counter()
    trainer = Trainer(supermodel)
    for job in jobs:
        trainer.attach(job.spec, job.data)
    while trainer.jobs:
        trainer.tick()
    return time.perf_counter() - began_s


def train_with_peft(jobs: list[ReadyJob]) -> float:
    base = AutoModelForCausalLM.from_pretrained(jobs[0].spec.base.model, dtype=torch.float32)
    began_s = time.perf_counter()
    for job in jobs:
        base = train_one_with_peft(base, job)
    return time.perf_counter() - began_s


def train_one_with_peft(base: Any, job: ReadyJob) -> Any:
    spec = job.spec
    adapter = LoraConfig(r=spec.adapter.rank, lora_alpha=int(spec.adapter.alpha), target_modules=spec.adapter.targets)
    model = get_peft_model(base, adapter)
    model.train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=spec.optim.lr, weight_decay=spec.optim.weight_decay)
    schedule = get_scheduler(spec.schedule.name, optimizer, spec.schedule.warmup_steps, job.num_steps)
    for batch in batches(job):
        ids = [torch.from_numpy(sequence.ids).long() for sequence in batch]
        labels = [
            row.masked_fill(~torch.from_numpy(sequence.is_target), -100)
            for row, sequence in zip(ids, batch, strict=True)
        ]
        loss = model(
            input_ids=pad_sequence(ids, batch_first=True),
            attention_mask=pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            labels=pad_sequence(labels, batch_first=True, padding_value=-100),
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, spec.optim.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss.item()
    model.save_pretrained(str(spec.folder))
    return model.unload()


if __name__ == "__main__":
    main()

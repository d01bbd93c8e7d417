"""What a sweep's configurations take one after the other with PEFT: a measured prefix of each, extrapolated.

Called by `benchmarks.sweeps`. Eager PEFT over transformers, in the base's own precision on the same device; batches of
the job's own size, padded to their longest; one evaluation an epoch. Loading the base and saving count for nothing, in
PEFT's favour.
"""

import math
import random
import time
from collections.abc import Iterator, Sequence

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tlora.base import dtype_of
from tlora.data import JobData, TokenSequence
from tlora.resident import ResidentJob
from tlora.spec import JobSpec

_WARM = 2


def seconds_in_turn(specs: Sequence[JobSpec], data: JobData, device: torch.device, most_steps: int) -> float:
    """Of all configurations to their ends: the mean of up to `most_steps` steps of each, times its steps."""
    model = AutoModelForCausalLM.from_pretrained(specs[0].base.model, dtype=dtype_of(specs[0].base, device)).to(device)
    model.config.use_cache = False  # of keys and values, as Trainer has it
    total_s = 0.0
    for spec in specs:
        adapter = spec.adapter
        config = LoraConfig(
            r=adapter.rank, lora_alpha=adapter.alpha, lora_dropout=adapter.dropout, target_modules="all-linear",
            task_type="CAUSAL_LM",
        )  # fmt: skip
        adapted = get_peft_model(model, config)
        total_s += _seconds(spec, adapted, data, device, most_steps)
        model = adapted.unload()
    return total_s


def _seconds(spec: JobSpec, model: torch.nn.Module, data: JobData, device: torch.device, most_steps: int) -> float:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=spec.optim.lr, weight_decay=0.0, fused=device.type == "cuda")
    num_steps = ResidentJob.count_steps(spec, len(data.train))
    batches = _batches(data.train, spec.batch_size, spec.seed)
    times_s = []
    for _ in range(min(num_steps, most_steps) + _WARM):
        began_s = time.perf_counter()
        model.train()
        loss = model(**_padded(next(batches), device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # it is logged; and the device has finished
        times_s.append(time.perf_counter() - began_s)
    step_s = sum(times_s[_WARM:]) / len(times_s[_WARM:])
    return num_steps * step_s + math.ceil(spec.epochs) * _evaluate_s(model, data.eval, spec.batch_size, device)


@torch.no_grad()
def _evaluate_s(model: torch.nn.Module, rows: Sequence[TokenSequence], size: int, device: torch.device) -> float:
    began_s = time.perf_counter()
    model.eval()
    for at in range(0, len(rows), size):
        model(**_padded(rows[at : at + size], device)).loss.item()
    return time.perf_counter() - began_s


def _batches(rows: Sequence[TokenSequence], size: int, seed: int) -> Iterator[Sequence[TokenSequence]]:
    rng = random.Random(seed)
    while True:
        order = rng.sample(range(len(rows)), len(rows))
        for at in range(0, len(rows), size):
            yield [rows[index] for index in order[at : at + size]]


def _padded(rows: Sequence[TokenSequence], device: torch.device) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = torch.as_tensor(row.ids.astype("int64"))
        labels[at, : len(row)] = torch.where(torch.as_tensor(row.is_target), ids[at, : len(row)], -100)
        mask[at, : len(row)] = 1
    return {name: part.to(device) for name, part in (("input_ids", ids), ("labels", labels), ("attention_mask", mask))}

"""Tokens/s of eight jobs on one GPU and on all, by every way to spread them, and of PEFT with DDP and FSDP2.

    python -m benchmarks.scaling [--ranks 2] [--shape llama-8b] [--parts PART ...] [--length 512]

PARTs are the keys of `PARTS` below; all by default. `large` is a base of 70B's shapes, of as many layers as fit beside
its jobs. PEFT trains one job after the other, each with its whole batch over all GPUs. Rows go to
results/<gpu>x<ranks>/scaling.json after each part, what they are made of to rates.json beside it: so the parts may be
taken in several calls.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks import group, results
from benchmarks.group import Place
from benchmarks.results import row
from benchmarks.step import DROPOUT, RANKS, Peft
from tlora.group_trainer import GroupTrainer
from tlora.plan import Plan
from tlora.planner import place
from tlora.trainer import TrainerOptions

LARGE = LlamaConfig(
    vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=48, num_attention_heads=64,
    num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
)  # fmt: skip
"""Made whole on each GPU before it is sharded, and beside it four split jobs of rank 64: 48 of its 80 layers."""
BATCH = 8
"""Sequences of a job's step."""
WARM = 4
"""Ticks that compile, and are not counted."""


@dataclass(frozen=True, kw_only=True)
class Ours:
    """How jobs and base are spread over all ranks."""

    shards: int = 1
    tensor: int = 1
    is_split: bool = False
    """Whether each job is on all lanes, else whole on one."""
    alone: bool = False
    """On one GPU."""
    large: bool = False

    def plan(self, ranks: int) -> Plan:
        if self.alone:
            return Plan()
        shards, tensor = (ranks if each > 1 else 1 for each in (self.shards, self.tensor))
        return Plan(replicas=ranks // (shards * tensor), shards=shards, tensor=tensor)


PARTS: dict[str, Ours | str] = {
    "one": Ours(alone=True),
    "replicas": Ours(),
    "ddp": "ddp",
    "replicas-split": Ours(is_split=True),
    "shards": Ours(shards=2),
    "shards-split": Ours(shards=2, is_split=True),
    "tensor": Ours(tensor=2),
    "fsdp": "fsdp",
    "large-split": Ours(shards=2, is_split=True, large=True),
    "large": Ours(shards=2, large=True),
}
COMPARISONS: dict[tuple[str, str], float | None] = {
    ("replicas", "one"): None,  # of two GPUs 1.95, and so on
    ("replicas-split", "one"): None,
    ("shards", "one"): None,
    ("tensor", "one"): None,
    ("shards", "shards-split"): None,
    ("large", "large-split"): 1.0,
    ("replicas", "ddp"): 2.0,
    ("shards", "fsdp"): None,
}
"""How many times as fast as the other one is to be."""
MOST_ROWS = 16384
"""Of a tick."""
Rates = dict[str, dict[str, list[float]]]
"""Microseconds a token, of each round, by what was trained and by part."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=list(group.SHAPES), default="llama-8b")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=LARGE.num_hidden_layers, help="of the large base")
    given = parser.parse_args()
    small = group.SHAPES[given.shape]
    large = copy.deepcopy(LARGE if given.shape != "toy" else small)
    if given.shape != "toy":
        large.num_hidden_layers = given.layers
    rates = read_rates(given.ranks)
    for name in given.parts:
        part, began_s = PARTS[name], time.perf_counter()
        if isinstance(part, Ours):
            plan, config = part.plan(given.ranks), large if part.large else small
            samples = group.run(plan.ranks, train, part, plan, config, given.length, given.rounds)
        else:
            samples = group.run(given.ranks, train_with_peft, part, given.ranks, small, given.length, given.rounds)
        taken_s = time.perf_counter() - began_s
        print(f"{name}: {1e6 / statistics.median(samples):,.0f} tokens/s; {taken_s:.0f} s", flush=True)
        rates.setdefault(f"{given.shape}, {BATCH}x{given.length}", {})[name] = samples
        compare(name, rates, f"{given.shape}, {BATCH}x{given.length}", given.ranks)


def train(
    where: Place, part: Ours, plan: Plan, config: PretrainedConfig, length: int, rounds: int, ticks: int = 4
) -> list[float]:
    """Microseconds a token, of each round: as many ticks on each rank, until the slowest is through."""
    mesh = where.open(plan)
    jobs = (64,) * 4 if part.large else RANKS
    model = group.base(config, mesh, checkpointing=part.large)
    trainer = GroupTrainer(model, mesh, TrainerOptions(token_budget=MOST_ROWS))
    dealt = place({str(number): 1.0 for number in range(len(jobs))}, plan.lanes)
    everywhere = tuple(range(plan.lanes))
    if part.is_split:
        trainer.join(range(plan.ranks))
    lanes = {number: everywhere if part.is_split else dealt[str(number)] for number in range(len(jobs))}
    group.attach(trainer, where.folder, jobs, lanes, batch=BATCH, length=length, vocab=min(30000, config.vocab_size))
    for _ in range(WARM):
        trainer.tick()
    group.settle(trainer)
    samples = []
    for _ in range(rounds):
        tokens = [0]

        def several(tokens: list[int] = tokens) -> None:
            tokens[0] += sum(trainer.tick().num_tokens for _ in range(ticks))

        (taken_ms,) = group.ticks_ms(mesh.device, several, 1)
        total = torch.tensor(tokens[0] / plan.tensor, dtype=torch.float64)
        dist.all_reduce(total)
        samples.append(1e3 * taken_ms / total.item())
    report(where, mesh.device, f"{plan}, {trainer.num_slices} nano-batches")
    return samples


def train_with_peft(
    where: Place, how: str, ranks: int, config: PretrainedConfig, length: int, rounds: int
) -> list[float]:
    """Microseconds a token of jobs of rank 16, one after the other, half of them with dropout; each rank has a part of
    each batch."""
    mesh = where.open(Plan(replicas=ranks))
    peft = Peft(config, device=mesh.device, around=partial(AROUND[how], mesh.device))
    steps: Mapping[float, Callable[[], None]] = {
        rate: partial(peft.step, length, rate, BATCH // ranks) for rate in (0.0, DROPOUT)
    }
    for step in [*steps.values()] * WARM:
        step()
    samples = []
    for _ in range(rounds):
        times = [group.ticks_ms(mesh.device, step, 4) for step in steps.values()]
        samples.append(1e3 * statistics.mean(map(statistics.median, times)) / (BATCH // ranks * ranks * length))
    report(where, mesh.device, f"PEFT with {how}")
    return samples


def with_ddp(device: torch.device, model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)


def with_fsdp(device: torch.device, model: nn.Module) -> nn.Module:
    """Layer by layer; all weights in the base's precision."""
    model = model.to(next(model.parameters()).dtype)
    for layer in [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]:
        fully_shard(layer)
    return fully_shard(model)


AROUND = {"ddp": with_ddp, "fsdp": with_fsdp}


def report(where: Place, device: torch.device, what: str) -> None:
    peak = torch.tensor(torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if where.rank == 0:
        print(f"{what}: peak {peak.item():.1f} GiB", flush=True)


def read_rates(ranks: int) -> Rates:
    """What earlier calls have measured on as many GPUs of this kind."""
    path = rates_path(ranks) if torch.cuda.is_available() else None
    return json.loads(path.read_text()) if path and path.exists() else {}


def rates_path(ranks: int) -> Path:
    return results.folder(f"{results.gpu_folder()}x{ranks}") / "rates.json"


def compare(name: str, rates: Rates, key: str, ranks: int) -> None:
    """Keep what has been measured, and the rows that have become known with part `name`."""
    if torch.cuda.is_available():
        rates_path(ranks).write_text(json.dumps(rates, indent=1) + "\n")
    known, rows = rates[key], []
    for ours, theirs in [pair for pair in COMPARISONS if name in pair and set(pair) <= known.keys()]:
        goal = 0.975 * ranks if (ours, theirs) == ("replicas", "one") else COMPARISONS[ours, theirs]
        mine, other = (statistics.median(known[part]) for part in (ours, theirs))
        rows.append(
            row(f"{ours}/{theirs}", f"{key}, {ranks} ranks", mine, theirs, other, goal, "higher",
                unit="µs/token", spread=group.spread(known[ours]))
        )  # fmt: skip
    group.keep("scaling", ranks, rows)


if __name__ == "__main__":
    main()

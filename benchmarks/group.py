"""Ranks of one group, a process each, and how their ticks are timed: what the benchmarks of several GPUs share.

Over NCCL, a GPU each; without GPUs over gloo, where only the order of things is of interest, and nothing is written.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing
from transformers import LlamaConfig, PretrainedConfig

from benchmarks import results
from benchmarks.step import BASES, DROPOUT, fresh, sequence
from tlora.data import JobData
from tlora.group_trainer import GroupTrainer
from tlora.job import State
from tlora.parallel import Mesh
from tlora.plan import Plan
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.supermodel import SuperModel

TOY = LlamaConfig(
    vocab_size=304, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    max_position_embeddings=16384,
)  # fmt: skip
SHAPES: dict[str, PretrainedConfig] = {"toy": TOY, **BASES}
ENDLESS = 1_000_000
"""Steps of jobs that are taken out before they end."""
MOST_TO_SETTLE, STAYS = 100, 8


@dataclass(frozen=True)
class Place:
    """One rank's process."""

    rank: int
    folder: Path
    """Common to all ranks of this run."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank) if torch.cuda.is_available() else torch.device("cpu")

    def open(self, plan: Plan) -> Mesh:
        store = dist.FileStore(str(self.folder / "store"), plan.ranks)
        return Mesh.open(plan, self.rank, store, self.device, timeout_s=120.0)


def run(ranks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(place, *arguments)` in a process for each rank; what the first returned. What one raises ends all."""
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        multiprocessing.spawn(_enter, (Path(folder), function, arguments), nprocs=ranks)
        return json.loads((Path(folder) / "answer").read_text())


def _enter(rank: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
    answer = function(Place(rank, folder), *arguments)
    if rank == 0:
        (folder / "answer").write_text(json.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


def base(config: PretrainedConfig, mesh: Mesh, **options: bool) -> SuperModel:
    """With random weights, the same on every rank: made whole on each, which then keeps its part."""
    return SuperModel(fresh(config, mesh.device), BaseSpec(model="random"), mesh=mesh, **options)


def job(folder: Path, number: int, rank: int, batch: int) -> JobSpec:
    """Every other one with dropout. Those of another folder have other names, so that they are another mix."""
    name = f"{folder.name}-{number}"
    return parse_job(
        {
            "name": name,
            "base": {"model": "random"},
            "data": {"path": "none"},
            "adapter": {"rank": rank, "alpha": rank, "targets": "all-linear", "dropout": DROPOUT * (number % 2)},
            "optim": {"lr": 1e-5},
            "batch_size": batch,
            "steps": ENDLESS,
            "save_every": ENDLESS,
            "output": str(folder / name),
        }
    )


def attach(
    trainer: GroupTrainer,
    folder: Path,
    ranks: Sequence[int],
    lanes: Mapping[int, tuple[int, ...]],
    *,
    batch: int,
    length: int,
    vocab: int,
) -> None:
    """Jobs of these ranks on their `lanes`; each sends `batch` sequences of `length` tokens a step."""
    for number, rank in enumerate(ranks):
        if trainer.mesh.lane in lanes[number]:
            rows = [sequence(length, 100 * number + at, vocab) for at in range(batch)]
            data = JobData(rows, [], report=None, eval_report=None)  # type: ignore[arg-type]
            trainer.attach(job(folder, number, rank, batch), data, lanes=lanes[number])


def clear(trainer: GroupTrainer) -> None:
    """Take every job out, and nothing of it is kept."""
    for name in list(trainer.jobs):
        trainer.detach(name, state=State.CANCELLED, keep=False)
    free(trainer.mesh.device)


def free(device: torch.device) -> None:
    """The allocator's stock, which each stream has of its own."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def sync(device: torch.device) -> None:
    """Until every rank's device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))


def ticks_ms(device: torch.device, tick: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of so many ticks that all ranks begin together, each as slow as its slowest rank."""
    taken = []
    for _ in range(count):
        sync(device)
        began_s = time.perf_counter()
        tick()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(1e3 * (time.perf_counter() - began_s))
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()  # type: ignore[no-any-return]


def settle(trainer: GroupTrainer) -> int:
    """Tick until the controller has chosen, and stayed with that, if ticks are even enough; how many that took. None
    where there is nothing to choose."""
    stayed, has_settled = 0, False
    for tick in range(MOST_TO_SETTLE):
        # At the second tick of a mix it has heard of it.
        stayed = stayed + 1 if tick > 2 and trainer._controller.is_settled else 0
        has_settled = has_settled or stayed > 0
        if not trainer._is_measured or stayed == STAYS:
            return tick
        trainer.tick()
    if not has_settled:
        raise RuntimeError(f"the controller did not settle within {MOST_TO_SETTLE} ticks")
    return MOST_TO_SETTLE


def spread(samples: Sequence[float]) -> float:
    """Between the quartiles, over the median."""
    low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else [samples[0]] * 3
    return (high - low) / middle


def keep(name: str, ranks: int, rows: Sequence[results.Row]) -> None:
    """Into `results/<gpu>x<ranks>/<name>.json`; without a GPU they are only printed."""
    if torch.cuda.is_available():
        results.write(name, rows, within=f"{results.gpu_folder()}x{ranks}")
    else:
        results.show(rows)

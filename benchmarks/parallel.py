"""One base on several ranks, by every plan: tokens/s, memory, what a change of plan takes; in living processes.

    python -m benchmarks.parallel BASE [--ranks 2] [--jobs 4] [--steps 4]

On GPUs over NCCL, a rank each; without, over gloo, where only the order of things is of interest. BASE is a model's
folder or hub name. Jobs are `benchmarks.tick`'s, dealt to lanes; each plan goes on from the states that the one before
it saved, so that the seconds before its first tick are those of a change of plan.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from benchmarks.tick import data, job
from tlora import environment
from tlora.base import Outline
from tlora.group_trainer import GroupTrainer
from tlora.parallel import Mesh
from tlora.plan import Plan
from tlora.planner import Machine, place, plans
from tlora.spec import BaseSpec
from tlora.supermodel import SuperModel
from tlora.trainer import TrainerOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    base = BaseSpec(model=arguments.base)
    order = plans(Machine(gpus=arguments.ranks), Outline.load(base).divisor)
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.ranks, base, order, arguments.jobs, arguments.steps, Path(folder))
        multiprocessing.spawn(_run, given, nprocs=arguments.ranks)
    print(environment.describe())


def _run(rank: int, ranks: int, base: BaseSpec, order: list[Plan], jobs: int, steps: int, folder: Path) -> None:
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    store = dist.FileStore(str(folder / "store"), ranks)
    specs = [job(folder, number, steps * len(order)) for number in range(jobs)]
    for generation, plan in enumerate(order):
        began_s = time.perf_counter()
        mesh = Mesh.open(plan, rank, dist.PrefixStore(str(generation), store), device, timeout_s=300.0)
        opened_s = time.perf_counter()
        trainer = GroupTrainer(SuperModel.load(base, mesh=mesh), mesh, TrainerOptions(token_budget=4096))
        loaded_s = time.perf_counter()
        for name, lanes in place({spec.name: 1.0 for spec in specs}, plan.lanes).items():
            if mesh.lane in lanes:
                number = int(name.removeprefix("job"))
                trainer.attach(specs[number], data(number), lanes=lanes, resume=True)
        attached_s = time.perf_counter()
        tokens, seconds = _train(trainer, steps * (generation + 1))
        rate = torch.tensor([tokens / seconds / plan.tensor])
        peak = torch.tensor([torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0])
        dist.all_reduce(rate)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(
                f"{plan}: {rate.item():,.0f} tokens/s, {trainer.num_slices} nano-batches, peak {peak.item():.1f} GiB; "
                f"groups {opened_s - began_s:.2f} s, base {loaded_s - opened_s:.1f} s, "
                f"{jobs} jobs {attached_s - loaded_s:.2f} s",
                flush=True,
            )
        dist.barrier()
        mesh.close()


def _train(trainer: GroupTrainer, until: int) -> tuple[int, float]:
    """Train each job to a step, and save it; tokens and seconds after the first tick."""
    tokens, began_s = 0, time.perf_counter()
    for tick in range(10_000):
        for name in [name for name, resident in trainer.jobs.items() if resident.step >= until]:
            trainer.detach(name)
        waiting = torch.tensor(int(bool(trainer.jobs)))
        dist.all_reduce(waiting)
        if not waiting:
            break
        done = trainer.tick()
        if tick == 0:
            began_s = time.perf_counter()
        else:
            tokens += done.num_tokens
    return tokens, max(time.perf_counter() - began_s, 1e-9)


if __name__ == "__main__":
    main()

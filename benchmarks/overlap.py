"""How much of a base's exchange between ranks runs under compute: ticks by nano-batches, and without communication.

    python -m benchmarks.overlap [--ranks 2] [--shape llama-8b] [--plans tensor shards] [--tokens 4096 16384]

Eight mixed jobs, each with the same tokens in a tick; under FSDP2 they are dealt to lanes, and each lane's tick has so
many tokens. Hidden share: (t of one slice − t) / (t of one slice − t without communication). The controller's own
choice is measured once it has settled. Rows go to results/<gpu>x<ranks>/overlap.json, after each number of tokens.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import group
from benchmarks.group import Place
from benchmarks.results import Row, row
from benchmarks.step import RANKS
from tlora.group_trainer import GroupTrainer
from tlora.parallel import Mesh
from tlora.plan import Plan
from tlora.planner import place
from tlora.trainer import TrainerOptions

SLICES = (1, 2, 4, 8)
OWN = 0
"""As the controller has it."""
Span = tuple[float, float]
Samples = dict[str, list[float]]
"""Milliseconds of ticks, by what was measured."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=list(group.SHAPES), default="llama-8b")
    parser.add_argument("--plans", nargs="+", choices=["tensor", "shards"], default=["tensor", "shards"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16384, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=4, help="of each, in a round")
    given = parser.parse_args()
    for name in given.plans:
        plan = Plan(**{name: given.ranks})
        began_s = time.perf_counter()
        group.run(given.ranks, measure, name, plan, given.shape, given.tokens, given.rounds, given.ticks)
        print(f"{name}: {time.perf_counter() - began_s:.0f} s", flush=True)


class Silent(Mesh):
    """Exchanges of the base and of gradients do nothing, with tensors of the real sizes."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        import torch.testing._internal.distributed.fake_pg  # noqa: F401  # makes the backend known

        nothing = dist.new_group(backend="fake")
        self.tensor_groups = tuple(nothing if group else None for group in self.tensor_groups)
        self.shard_group = nothing if self.shard_group else None

    def sum_in_order(self, vector: object, ranks: Sequence[int]) -> None:
        pass


def measure(where: Place, name: str, plan: Plan, shape: str, sizes: Sequence[int], rounds: int, ticks: int) -> None:
    config = group.SHAPES[shape]
    mesh = where.open(plan)
    meshes = {"real": mesh, "silent": Silent(plan, where.device, timeout_s=mesh.timeout_s)}
    trainers = {
        kind: GroupTrainer(group.base(config, each), each, TrainerOptions(token_budget=max(sizes)))
        for kind, each in meshes.items()
    }
    dealt = place({str(number): 1.0 for number in range(len(RANKS))}, plan.lanes)
    lanes = {number: dealt[str(number)] for number in range(len(RANKS))}
    for tokens in sizes:
        for kind, trainer in trainers.items():
            group.attach(
                trainer, where.folder / f"{kind}{tokens}", RANKS, lanes,
                batch=plan.lanes, length=tokens // len(RANKS), vocab=config.vocab_size,
            )  # fmt: skip
        traced: dict[int, str] = {}
        began_s = time.perf_counter()
        settled = group.settle(trainers["real"])
        if where.rank == 0:
            print(f"{name}/{tokens}: settled after {settled} ticks, {time.perf_counter() - began_s:.0f} s", flush=True)
        samples = in_rounds(trainers, rounds, ticks)
        own = trainers["real"].num_slices
        if where.device.type == "cuda":
            traced = {count: trace(trainers["real"], count) for count in (1, OWN)}
        for trainer in trainers.values():
            group.clear(trainer)
        if where.rank == 0:
            print(f"{name}/{tokens}: the controller chose {own}", flush=True)
            for count, text in traced.items():
                print(f"{name}/{tokens}: a tick of {count or own} slices: {text}", flush=True)
            group.keep("overlap", plan.ranks, rows_of(f"{name}/{tokens}", f"{shape}, {plan.ranks} ranks", samples))


def in_rounds(trainers: dict[str, GroupTrainer], rounds: int, ticks: int) -> Samples:
    """In turn, for the clock drifts. After each change one tick is not counted; at the first, three, which compile."""
    real, silent = trainers["real"], trainers["silent"]
    ways = {str(count): (real, count) for count in SLICES} | {"own": (real, OWN), "silent": (silent, 1)}
    samples: Samples = {way: [] for way in ways}
    for turn in range(rounds):
        for way, (trainer, count) in ways.items():
            group.free(trainer.mesh.device)  # a count's streams have memory of their own
            trainer.options = replace(trainer.options, nano_batches=count)
            for _ in range(1 if turn else 3):
                trainer.tick()
            samples[way] += group.ticks_ms(trainer.mesh.device, trainer.tick, ticks)
    real.options = replace(real.options, nano_batches=OWN)
    return samples


def trace(trainer: GroupTrainer, count: int) -> str:
    """Where this rank's exchange ran, by the profiler; an exchange's kernel also lasts while it waits for its peers."""
    group.free(trainer.mesh.device)
    trainer.options = replace(trainer.options, nano_batches=count)
    for _ in range(2):
        trainer.tick()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.tick()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    spans: dict[bool, list[Span]] = {True: [], False: []}
    for event in events:
        spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    exchange, compute = merged(spans[True]), merged(spans[False])
    whole = merged([*exchange, *compute])
    under = length(exchange) + length(compute) - length(whole)
    idle = whole[-1][1] - whole[0][0] - length(whole)
    figures = {"exchange": length(exchange), "of it under compute": under, "compute": length(compute), "idle": idle}
    return ", ".join(f"{what} {taken / 1e3:.1f} ms" for what, taken in figures.items())


def merged(spans: Sequence[Span]) -> list[Span]:
    """Their union, in order."""
    union: list[Span] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(end, union[-1][1])
        else:
            union.append((start, end))
    return union


def length(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)


def rows_of(name: str, shape: str, samples: Samples) -> list[Row]:
    times = {way: statistics.median(each) for way, each in samples.items()}
    rows = [
        row(f"tick/{name}/{way}", shape, times[way], "one slice", times["1"],
            1.02 if way == "own" else None, spread=group.spread(each))
        for way, each in samples.items()
    ]  # fmt: skip
    exposed = times["1"] - times["silent"]
    if exposed <= 0:
        print(f"{name}: communication takes no time that could be seen", flush=True)
        return rows
    for way in [way for way in times if way not in ("1", "silent")]:
        target = 0.30 if way == "own" and name == "tensor/16384" else None
        rows.append(
            row(f"exposed/{name}/{way}", shape, times[way] - times["silent"], "exposed with one slice", exposed, target)
        )
        print(f"{name}: {1 - rows[-1].ratio:.0%} hidden by {way}", flush=True)
    return rows


if __name__ == "__main__":
    main()

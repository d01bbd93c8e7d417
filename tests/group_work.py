"""What ranks do in the tests of parallel plans: functions of modules that other processes can import."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import toy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from tlora.checkpoint import load_state
from tlora.group_trainer import GroupTrainer
from tlora.job import State
from tlora.parallel import Mesh, Plan
from tlora.spec import BaseSpec
from tlora.supermodel import SuperModel
from tlora.trainer import TrainerOptions

TARGETS = ["all-linear", ["q_proj", "v_proj"], ["down_proj"], ".*layers.1.*_proj", ["k_proj", "o_proj", "lm_head"]]
CONFIG = {"num_key_value_heads": 4, "num_attention_heads": 4}


@dataclass(frozen=True)
class Visit:
    """A job: where it is and when it comes, is moved or cancelled (ticks)."""

    name: str
    lanes: tuple[int, ...]
    changes: Mapping[str, object]
    data: Mapping[str, int]
    arrives: int = 0
    moves: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    cancelled: int = -1

    def lanes_at(self, tick: int) -> tuple[int, ...]:
        """Lanes before anything happens at a tick."""
        return [self.lanes, *(lanes for at, lanes in sorted(self.moves.items()) if at < tick)][-1]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How a mix is trained."""

    plan: Plan
    dtype: torch.dtype = torch.float64
    deterministic: bool = False
    checkpointing: bool = False
    beside: bool = False
    budget: int = 64
    nano_batches: int = 1
    together: bool = True
    """Whether all replicas agree on ticks."""
    config: Mapping[str, object] = field(default_factory=lambda: CONFIG)


def super_model(run: Run, mesh: Mesh | None = None) -> SuperModel:
    torch.manual_seed(0)
    config = deepcopy(toy.config(**run.config))
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(run.dtype)
    return SuperModel(
        base,
        BaseSpec(model="toy"),
        mesh=mesh,
        deterministic=run.deterministic,
        checkpointing=run.checkpointing,
    )


def trainer_of(run: Run) -> GroupTrainer:
    mesh = Mesh(run.plan, timeout_s=30.0)
    options = TrainerOptions(token_budget=run.budget, nano_batches=run.nano_batches)
    trainer = GroupTrainer(super_model(run, mesh), mesh, options)
    trainer.beside = run.beside
    if run.together:
        trainer.join(range(run.plan.ranks))
    return trainer


def train(run: Run, folder: Path, mix: Sequence[Visit], most: int = 400) -> list[str]:
    """Train a mix to its end; returns the reasons of jobs that failed here."""
    trainer = trainer_of(run)
    failed: list[str] = []
    last = max(max([visit.arrives, visit.cancelled, *visit.moves]) for visit in mix)
    for tick in range(most):
        for visit in mix:
            act(trainer, visit, folder, tick)
        still = torch.tensor(int(bool(trainer.jobs) or tick <= last))
        dist.all_reduce(still)
        if not still:
            return failed
        failed += [job.record.reason for job in trainer.tick().ended if job.record.state is State.FAILED]
    raise AssertionError("jobs never ended")


def act(trainer: GroupTrainer, visit: Visit, folder: Path, tick: int) -> None:
    lane, before = trainer.mesh.lane, visit.lanes_at(tick)
    if visit.arrives == tick and lane in visit.lanes:
        attach(trainer, visit, folder, visit.lanes)
    if visit.cancelled == tick and visit.name in trainer.jobs:
        trainer.detach(visit.name, state=State.CANCELLED, keep=False)
    if tick in visit.moves:
        had = torch.tensor(int(visit.name in trainer.jobs))
        if had:
            trainer.detach(visit.name)
        dist.all_reduce(had)  # its folder is let go of before another rank takes it
        if had and lane in visit.moves[tick]:
            attach(trainer, visit, folder, visit.moves[tick], resume=True)
    assert visit.name not in trainer.jobs or lane in before or tick in visit.moves


def attach(trainer: GroupTrainer, visit: Visit, folder: Path, lanes: Sequence[int], *, resume: bool = False) -> None:
    spec = toy.job(folder, visit.name, **visit.changes)
    trainer.attach(spec, toy.data(**visit.data), lanes=lanes, resume=resume)


def ended(folder: Path, name: str) -> tuple[torch.Tensor, list[float]]:
    """A job's final vector and all that it has measured, in order."""
    rows = toy.read_metrics(folder / name)
    return load_state(folder / name)[0]["master"], [row.get("loss", row.get("eval_loss")) for row in rows]


def mix_of(lanes: int, seed: int, *, count: int, longest: int = 30) -> list[Visit]:
    """Random jobs, some split, moved, late or cancelled."""
    draw = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[draw.integers(len(values))]

    mix = []
    for number in range(count):
        some = tuple(sorted(draw.choice(lanes, draw.integers(1, lanes + 1), replace=False).tolist()))
        where = pick(some, (int(draw.integers(lanes)),))
        to = pick(some, (int(draw.integers(lanes)),))
        changes = {
            "adapter": {
                "rank": int(pick(1, 3, 8, 40, 256)),
                "alpha": int(pick(1, 8, 32)),
                "dropout": float(pick(0.0, 0.1, 0.5)),
                "targets": pick(*TARGETS),
                "rslora": bool(pick(True, False)),
            },
            "optim": {
                "lr": float(pick(1e-3, 1e-2)),
                "weight_decay": float(pick(0.0, 0.1)),
                "max_grad_norm": float(pick(0.0, 0.05, 1.0)),
                "loraplus_ratio": float(pick(1.0, 4.0)),
            },
            "batch_size": int(pick(1, 4, 6)),
            "steps": int(draw.integers(1, 6)),
            "eval_every": int(pick(0, 2, 3)),
            "seed": int(draw.integers(2**62)),
            "share": float(pick(0.2, 1.0, 3.0)),
        }
        data = {
            "count": int(draw.integers(1, 9)),
            "seed": int(draw.integers(1000)),
            "held_out": int(pick(0, 3)),
            "high": int(draw.integers(8, longest + 1)),
        }
        moves = pick({}, {int(draw.integers(3, 7)): to})
        mix.append(Visit(f"j{number}", where, changes, data, int(pick(0, 0, 2)), moves, int(pick(-1, -1, -1, 4))))
    return mix


class Wire(TorchDispatchMode):
    """Counts what is handed to collectives, whoever calls them: bytes of each one's input, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        if space in ("c10d", "_c10d_functional"):
            given = args[1] if name.startswith(("alltoall", "allgather", "_allgather")) else args[0]
            sizes = [leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.sent.append((name.partition(".")[0], sum(sizes)))
        return func(*args, **(kwargs or {}))


@contextmanager
def wired(trainer: GroupTrainer, name: str, sent: list[tuple[str, int]]) -> Iterator[None]:
    """Keep what a method of the trainer hands to collectives."""
    method: Callable[..., Any] = getattr(trainer, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with Wire() as wire:
            result = method(*args, **kwargs)
        sent.extend(wire.sent)
        return result

    setattr(trainer, name, watched)
    try:
        yield
    finally:
        delattr(trainer, name)

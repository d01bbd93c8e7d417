"""What ranks do in the tests of parallel plans: functions of modules that other processes can import."""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import toy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tlora.adapter import AdapterState
from tlora.checkpoint import load_state
from tlora.errors import CheckpointError, GroupError
from tlora.group_trainer import GroupTrainer
from tlora.job import State
from tlora.layers import decoder_layers
from tlora.packing import idle
from tlora.parallel import Mesh
from tlora.plan import Plan
from tlora.spec import AdapterSpec, BaseSpec
from tlora.supermodel import SuperModel
from tlora.trainer import TrainerOptions

TARGETS = ["all-linear", ["q_proj", "v_proj"], ["down_proj"], ".*layers.1.*_proj", ["k_proj", "o_proj", "lm_head"]]
CONFIG = {"num_key_value_heads": 4, "num_attention_heads": 4}
_SHAPE = {**toy.SHAPE, **toy.IDS}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE, head_dim=8),
    "gemma2": Gemma2Config(**_SHAPE, head_dim=8, sliding_window=6, final_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=6),
    "phi": PhiConfig(**_SHAPE),
    "opt": OPTConfig(
        vocab_size=toy.VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=128, word_embed_proj_dim=32, init_std=0.2,
    ),
}  # fmt: skip


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
    timeout_s: float = 30.0
    config: Mapping[str, object] = field(default_factory=lambda: CONFIG)
    family: str = "llama"
    compiled: bool = False


def super_model(run: Run, mesh: Mesh | None = None) -> SuperModel:
    torch.manual_seed(0)
    config = toy.config(**run.config) if run.family == "llama" else deepcopy(FAMILIES[run.family])
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(run.dtype)
    return SuperModel(
        base,
        BaseSpec(model="toy"),
        mesh=mesh,
        deterministic=run.deterministic,
        checkpointing=run.checkpointing,
        compiled=run.compiled,
    )


def trainer_of(run: Run) -> GroupTrainer:
    mesh = Mesh(run.plan, timeout_s=run.timeout_s)
    options = TrainerOptions(token_budget=run.budget, nano_batches=run.nano_batches)
    trainer = GroupTrainer(super_model(run, mesh), mesh, options)
    trainer.beside = run.beside
    if run.together:
        trainer.join(range(run.plan.ranks))
    return trainer


def train(run: Run, folder: Path, mix: Sequence[Visit], most: int = 400) -> list[str]:
    """Train a mix to its end; returns the reasons of jobs that failed here."""
    return _train(trainer_of(run), folder, mix, most)


def train_with_gates(run: Run, folder: Path, mix: Sequence[Visit]) -> tuple[int, list[str]]:
    """`train`, with the gates that compiled layers have, but none compiled; and how many there are."""
    with torch.compiler.set_stance("force_eager"):
        trainer = trainer_of(replace(run, compiled=True))
        gates = sum("act_kind" in vars(module) for module in trainer.supermodel.model.modules())
        return gates, _train(trainer, folder, mix, 400)


def _train(trainer: GroupTrainer, folder: Path, mix: Sequence[Visit], most: int) -> list[str]:
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
        self.groups: list[str] = []
        """By name, of a tensor-parallel base's reductions."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        if name == "sum_over_ranks":  # one operator, through which this cannot look: a reduction of its input
            self.sent.append(("allreduce_", args[0].nbytes))
            self.groups.append(args[1])
        if space in ("c10d", "_c10d_functional"):
            given = args[1] if name.startswith(("alltoall", "allgather", "_allgather")) else args[0]
            sizes = [leaf.nbytes for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]
            self.sent.append((name.partition(".")[0], sum(sizes)))
        return func(*args, **(kwargs or {}))


def count_bytes(run: Run, folder: Path, mix: Sequence[Visit], ticks: int) -> list[list[tuple[str, int]]]:
    """What each of the first ticks hands to collectives on this rank."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    sent = []
    for _ in range(ticks):
        with Wire() as wire:
            trainer.tick()
        sent.append(wire.sent)
    return sent


def groups_used(run: Run, folder: Path, mix: Sequence[Visit]) -> list[str]:
    """Groups that the reductions of one tick go through, in order."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    with Wire() as wire:
        trainer.tick()
    return wire.groups


def judged(run: Run, folder: Path, mix: Sequence[Visit], ticks: int) -> list[tuple[int, bool]]:
    """The slices of each tick, and whether the controller was told what it cost."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    told = []
    note = trainer._controller.note
    trainer._controller.note = lambda cost, mix: told.append(tick) or note(cost, mix)
    counts = []
    for tick in range(ticks + 1):  # noqa: B007  # the controller's note reads it
        trainer.tick()
        counts.append(trainer.num_slices)
    return [(count, tick + 1 in told) for tick, count in enumerate(counts[:ticks])]


def costs_told(run: Run, folder: Path, mix: Sequence[Visit], ticks: int) -> list[tuple[int, int, bool]]:
    """Rows that each tick says it took, those that it did take, and whether a step ended it; the controller settled,
    and ticks that may end before their device has done all."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    trainer.runs_ahead = trainer._controller.is_settled = True
    trainer._controller.note = lambda cost, mix: trainer._controller.count
    seen = []
    for _ in range(ticks):
        before = sum(job.step for job in trainer.jobs.values())
        rows = trainer.tick().num_tokens
        seen.append((trainer._tick_rows, rows, sum(job.step for job in trainer.jobs.values()) > before))
    return seen


def layout_sizes(run: Run, folder: Path, visit: Visit) -> tuple[int, int]:
    """Elements of a job's vector here, and those of which ranks have parts of sums."""
    trainer = trainer_of(run)
    attach(trainer, visit, folder, visit.lanes)
    state: Any = trainer.jobs[visit.name].state
    partial = getattr(state, "partial", slice(0, 0))
    return state.layout.size, partial.stop - partial.start


def peak_bytes(run: Run, adapters: Sequence[int] = ()) -> tuple[int, int, int]:
    """Most bytes of the base's precision alive while a token passes; what a rank keeps; what one layer has, whole.
    `adapters`: rank of each one, dealt to the group's ranks in turn.

    Every tensor that Python code, and so FSDP, holds; looked at behind products of some layers, both ways."""
    gc.collect()
    gc.freeze()  # what was there before is not looked through
    mesh, seen = Mesh(run.plan), list[int]()
    model = super_model(run, mesh)
    for rank in adapters[mesh.rank :: run.plan.ranks]:
        spec = AdapterSpec(rank=rank, alpha=rank, targets="all-linear")
        model.place(AdapterState(model.outline.lay_out(spec), spec, seed=0, device=mesh.device, dtype=model.dtype))

    def look() -> None:
        storages: dict[int, int] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.dtype is run.dtype:
                local = thing.to_local() if isinstance(thing, DTensor) else thing
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
        # None of a single token's activations has a KiB, every part of a product's weight has.
        seen.append(sum(size for size in storages.values() if size > 1024))

    gc.collect()  # cycles of the making, which wait for Python's own time, are not what a rank holds
    look()
    whole = decoder_layers(AutoModelForCausalLM.from_config(toy.config(**run.config)))[0]
    last = len(decoder_layers(model.model)) - 1
    for linear in [
        linear for name, linear in model._mixed.items() if any(f".{at}." in name for at in (0, 1, last // 2, last))
    ]:
        product = linear.bundle.product
        linear.bundle.product = lambda x, rows, product=product: _Looked.apply(product(x, rows), look)
    model.train(idle(device=mesh.device, per_sequence=False, training=True, num_rows=1))
    gc.unfreeze()
    return max(seen), seen[0], sum(parameter.numel() for parameter in whole.parameters()) * run.dtype.itemsize


class _Looked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, look: Callable[[], None]) -> torch.Tensor:
        look()
        ctx.look = look
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.look()
        return dy, None


def hang(run: Run, rank: int, how: str, folder: Path, mix: Sequence[Visit]) -> tuple[str, str, float]:
    """Train while one rank dies, or falls asleep, before its third tick; what another's raised, and after how long."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    for tick in range(3):
        if tick == 2 and trainer.mesh.rank == rank:
            if how == "dies":
                os._exit(1)
            time.sleep(3 * trainer.mesh.timeout_s)
        began_s = time.monotonic()
        try:
            trainer.tick()
        except GroupError as error:
            return type(error).__name__, str(error), time.monotonic() - began_s
    return "", "", 0.0


def with_full_disk(run: Run, folder: Path, mix: Sequence[Visit], name: str, at: int) -> list[str]:
    """`train`, but that the lead of one job cannot save it any more from a tick on."""

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def fill(trainer: GroupTrainer) -> None:
        save = trainer._save_state
        trainer._save_state = lambda job, state: no_space() if job.name == name else save(job, state)

    return _reasons(run, folder, mix, name, at, fill)


class Late(Future[None]):
    """A file that is still being written until it is waited for, and then could not be."""

    def result(self, timeout: float | None = None) -> None:
        raise OSError(28, "No space left on device")


def with_late_failures(run: Run, folder: Path, mix: Sequence[Visit], name: str, at: int) -> list[str]:
    """`train`, but that the lead of one job finds, amid a step, that earlier files of it could not be written."""
    return _reasons(run, folder, mix, name, at, lambda trainer: trainer.jobs[name].files.extend([Late()] * 3))


def only_on_lead(run: Run, folder: Path, mix: Sequence[Visit], name: str) -> list[str]:
    """`train`, but that one job fails on its lead's side alone, where no other rank could see it."""
    return _reasons(
        run, folder, mix, name, 2, lambda trainer: trainer._leave(trainer.jobs[name], State.FAILED, "of itself")
    )


def _reasons(
    run: Run, folder: Path, mix: Sequence[Visit], name: str, at: int, on_lead: Callable[[GroupTrainer], None]
) -> list[str]:
    """Why jobs failed here, if something happens to the lead of one before tick `at`."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    failed: list[str] = []
    for tick in range(100):
        if tick == at and name in trainer.jobs and trainer._leads(trainer._held[name]):
            on_lead(trainer)
        still = torch.tensor(int(bool(trainer.jobs)))
        dist.all_reduce(still)
        if not still:
            return failed
        failed += [job.record.reason for job in trainer.tick().ended if job.record.state is State.FAILED]
    raise AssertionError("jobs never ended")


def talks(run: Run, asks: Sequence[int]) -> list[int]:
    """What each tick agrees on, where rank r asks for talk `asks[r]` from its own r-th tick on."""
    trainer, seen = trainer_of(run), []
    for tick in range(4):
        trainer.tick(asks[trainer.mesh.rank] if tick >= trainer.mesh.rank else 0)
        seen.append(trainer.talk)
    return seen


def break_off(run: Run, folder: Path, mix: Sequence[Visit]) -> None:
    """Train a mix to its end; one tick ends where its gradients are still apart, and is sent again."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    trainer.tick()
    train_slices = trainer.supermodel.train_slices

    def broken(batches: Any) -> None:
        train_slices(batches)
        raise MemoryError

    trainer.supermodel.train_slices = broken
    with suppress(MemoryError):
        trainer.tick()
    trainer.supermodel.train_slices = train_slices
    trainer.replay()
    while trainer.jobs:
        trainer.tick()


def go_on(run: Run, folder: Path, mix: Sequence[Visit], steps: int) -> list[int]:
    """Resume a mix and train it for so many steps a job at most; returns the steps that those which are left have."""
    trainer, until = trainer_of(run), dict[str, int]()
    for visit in mix:
        if trainer.mesh.lane in visit.lanes:
            attach(trainer, visit, folder, visit.lanes, resume=True)
            until[visit.name] = trainer.jobs[visit.name].step + steps
    left = set[int]()
    for _ in range(100):
        for name in [name for name, job in trainer.jobs.items() if job.step == until[name] and job.is_settled]:
            left.add(trainer.detach(name).step)
        still = torch.tensor(int(bool(trainer.jobs)))
        dist.all_reduce(still)
        if not still:
            return sorted(left)
        trainer.tick()
    raise AssertionError("jobs never came so far")


def resume_damaged(run: Run, folder: Path, mix: Sequence[Visit]) -> tuple[str, str]:
    """Train all but the first job, whose state is damaged; what its arrival raised."""
    trainer = trainer_of(run)
    attach(trainer, mix[1], folder, mix[1].lanes)
    try:
        attach(trainer, mix[0], folder, mix[0].lanes, resume=True)
    except CheckpointError as error:
        said = type(error).__name__, str(error)
    while trainer.jobs:
        trainer.tick()
    return said


ASLEEP_S = 300.0


def fail_on_one(place: Any) -> None:
    """On a benchmark's ranks."""
    if place.rank:
        raise ValueError("rank 1 of the benchmark")
    time.sleep(ASLEEP_S)

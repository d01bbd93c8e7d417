"""A tensor-parallel base on ranks of its own, GPUs where there are two, and what jobs' gradients are by slices."""

from dataclasses import replace
from typing import Any

from transformers import LlamaConfig

from benchmarks import group
from benchmarks.step import RANKS
from tlora.group_trainer import GroupTrainer
from tlora.plan import Plan
from tlora.tensor_parallel import SplitState
from tlora.trainer import TrainerOptions

COUNTS = (1, 2, 3, 5, 8)
WIDE = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip


class Watched(GroupTrainer):
    """Keeps the norm of each job's gradient, and its loss, step by step."""

    seen: list[dict[str, tuple[float, float]]]

    def _measure(self, states: dict[str, SplitState]) -> None:
        super()._measure(states)
        loss = {name: float(self.jobs[name].summed_loss()) for name in states}
        self.seen.append({name.split("-")[1]: (float(self._norms[name]), loss[name]) for name in states})


def by_count(where: group.Place, ticks: int) -> list[Any]:
    """Of each count of slices, what was seen at each step; the same jobs each time, one of two with dropout."""
    on_gpu = where.device.type == "cuda"
    config, length = (WIDE, 1024) if on_gpu else (group.TOY, 16)
    mesh = where.open(Plan(tensor=2))
    trainer = Watched(group.base(config, mesh), mesh, TrainerOptions(token_budget=length * len(RANKS)))
    found = []
    for count in COUNTS:
        trainer.seen = []
        trainer.options = replace(trainer.options, nano_batches=count)
        group.attach(
            trainer, where.folder / f"by{count}", RANKS, dict.fromkeys(range(len(RANKS)), (0,)),
            batch=1, length=length, vocab=config.vocab_size,
        )  # fmt: skip
        for _ in range(ticks):
            trainer.tick()
        found.append(trainer.seen)
        group.clear(trainer)
    return found

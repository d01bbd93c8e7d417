"""How vectors are summed over ranks, and when, seen on each rank of a group."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from group_work import Run, Visit, act, trainer_of

from tlora.parallel import Mesh


def vectors(count: int, size: int) -> list[torch.Tensor]:
    """Of each rank, float32, of magnitudes so mixed that every order of summation rounds in its own way."""
    made = []
    for rank in range(count):
        random = torch.Generator().manual_seed(rank)
        made.append(torch.randn(size, generator=random) * 10 ** torch.randint(-4, 5, (size,), generator=random))
    return made


def summed(run: Run, size: int) -> list[float]:
    """What this rank has of the sum."""
    mesh = Mesh(run.plan, timeout_s=run.timeout_s)
    vector = vectors(run.plan.ranks, size)[mesh.rank]
    mesh.sum_in_order(vector, range(run.plan.ranks))
    return vector.tolist()


def order(run: Run, folder: Path, mix: Sequence[Visit]) -> list[str]:
    """Of one tick: slices that are sent, and vectors that are summed."""
    trainer = trainer_of(run)
    for visit in mix:
        act(trainer, visit, folder, 0)
    seen: list[str] = []
    send, reduce = trainer._send, trainer._reduce_split

    def watched_send(*given: Any) -> None:
        seen.append("slice")
        send(*given)

    def watched_reduce(job: Any, **given: Any) -> None:
        seen.append(f"sum of {job.name}")
        reduce(job, **given)

    trainer._send, trainer._reduce_split = watched_send, watched_reduce  # type: ignore[method-assign]
    trainer.tick()
    return seen

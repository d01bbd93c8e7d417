"""Cutting a tick into nano-batches, rank-aware (tLoRA, arXiv 2602.07263).

A slice keeps every job's sequences in the job's own order, so that cutting never changes a job's sums.
"""

from collections.abc import Callable, Sequence

from tlora.packing import Item


def cut(items: Sequence[Item], count: int, work: Callable[[Item], float]) -> list[list[Item]]:
    """Split `items` (in job order) into at most `count` runs of about equal `work`, each of at least one item."""
    slices: list[list[Item]] = []
    total, done = sum(work(item) for item in items), 0.0
    for item in items:
        cost = work(item)
        if not slices or done + cost / 2 > total * len(slices) / count:
            slices.append([])
        slices[-1].append(item)
        done += cost
    return slices

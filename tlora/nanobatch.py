"""Cutting a tick into nano-batches, rank-aware, and how many of them (tLoRA, arXiv 2602.07263).

A slice keeps every job's sequences in the job's own order, so that cutting never changes a job's sums. Called by the
trainers; the controller sees costs and nothing else.
"""

import logging
import math
from collections.abc import Callable, Hashable, Sequence

from tlora.packing import Item

log = logging.getLogger("tlora")


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


class Controller:
    """How many slices a tick is cut into, from what ticks cost.

    The paper's rule (its Eq. 2) adds 4 while a tick becomes cheaper by more than a margin, and halves where it does
    not; left to itself it never settles. Ours halves on while that costs no more, then tries the middle of the wider
    gap beside the best count so far, and stays with the best when no gap is left or `patience` counts were tried. A
    count that stays is watched through a moving average; if that drifts by more than `drift`, or another mix of jobs
    comes, it starts anew.
    """

    def __init__(self, *, most: int = 32, band: float = 0.01, drift: float = 0.05, patience: int = 11):
        self.most, self.band, self.drift, self.patience = most, band, drift, patience
        self.count = 1
        self.is_settled = False
        self._mix: Hashable = None
        self._begin()

    def note(self, cost: float, mix: Hashable = None) -> int:
        """Take in what a tick with `count` slices cost (seconds per unit of work); returns the next tick's count."""
        if mix != self._mix:
            self._mix = mix
            self._begin()
        elif self.is_settled:
            self._watch(cost)
        else:
            self._search(cost)
        return self.count

    def _begin(self) -> None:
        """From the present count, whose cost is the next one that is noted; a tick that brings a new mix counts for
        nothing: it may have compiled, or grown its memory."""
        self.is_settled = False
        self._costs: dict[int, float] = {}
        self._grows = self._shrinks = True

    def _search(self, cost: float) -> None:
        best = min(self._costs.values(), default=math.inf)
        self._costs[self.count] = cost
        following = 0
        if self._grows:
            self._grows = self.count < self.most and (math.isinf(best) or cost <= best * (1.0 - self.band))
            following = min(self.most, self.count + 4) if self._grows else self._half()
        elif self._shrinks:
            self._shrinks = cost <= best * (1.0 + self.band)
            following = self._half() if self._shrinks else 0
        if following == 0 or following in self._costs:
            self._grows = self._shrinks = False
            following = self._middle()
        if following in self._costs or len(self._costs) >= self.patience:
            self._settle()
        else:
            self.count = following

    def _half(self) -> int:
        """Of the present count, or, where that was tried, of the least that was."""
        half = max(1, self.count // 2)
        return max(1, min(self._costs) // 2) if half in self._costs else half

    @property
    def _best(self) -> int:
        return min(self._costs, key=lambda count: (self._costs[count], count))

    def _middle(self) -> int:
        """The middle of the wider gap beside the best count; that count itself if there is none."""
        best = self._best
        below = max((count for count in self._costs if count < best), default=best)
        above = min((count for count in self._costs if count > best), default=best)
        return (below + best) // 2 if best - below > above - best else (best + above) // 2

    def _settle(self) -> None:
        self.count, self.is_settled = self._best, True
        self._usual = self._average = self._costs[self.count]
        seen = ", ".join(f"{count}: {cost:.3g}" for count, cost in sorted(self._costs.items()))
        log.info("nano-batches: %d (cost by count: %s)", self.count, seen)

    def _watch(self, cost: float) -> None:
        self._average = 0.5 * self._average + 0.5 * cost
        if abs(self._average - self._usual) > self.drift * self._usual:
            log.info("nano-batches: a tick costs %.3g, no longer %.3g: tried anew", self._average, self._usual)
            self._begin()

"""Whose sequences fill the next tick: weighted fair queueing over rows (Demers, Keshav & Shenker, SIGCOMM 1989).

Pure: sees shares and lengths, no tensors. Called by the trainer once a tick.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Claim:
    """One job's wish for rows in a tick."""

    share: float
    lengths: Sequence[int]
    """Rows of each sequence of its step that is still to go, in order."""
    most: int
    """Rows of its whole step: credit and debt are capped there."""
    credit: float = 0.0
    """Rows it is owed by the jobs beside it (below 0: that it owes them); carried from tick to tick."""


def deal(claims: Sequence[Claim], budget: int, first: int = 0) -> list[int]:
    """How many sequences each claim gets, together at most `budget` rows; of equals, `first` gets its turn first.

    The next sequence is always of the claim that is owed most for its share; every row dealt is owed to all that wait,
    by their shares. Nothing is left unused that would fit. Credits are updated in place.
    """
    taken, left = [0] * len(claims), budget
    now = 0.0  # rows per share that every waiting claim should have had by now; `had`: that each has had
    had = [-claim.credit / claim.share for claim in claims]
    waiting = {at for at, claim in enumerate(claims) if claim.lengths}
    total = sum(claims[at].share for at in waiting)
    queue = [(had[at], (at - first) % len(claims), at) for at in waiting]
    heapq.heapify(queue)
    while queue:
        _, turn, at = heapq.heappop(queue)
        claim = claims[at]
        rows = claim.lengths[taken[at]]
        if rows > left:  # nor later in this tick; it goes on being owed
            continue
        taken[at] += 1
        left -= rows
        now += rows / total
        had[at] += rows / claim.share
        if taken[at] < len(claim.lengths):
            heapq.heappush(queue, (had[at], turn, at))
        else:
            claim.credit = claim.share * (now - had[at])
            waiting.remove(at)
            total = sum(claims[other].share for other in waiting)
    for at, claim in enumerate(claims):
        if at in waiting:
            claim.credit = claim.share * (now - had[at])
        claim.credit = min(max(claim.credit, -float(claim.most)), float(claim.most))
    return taken

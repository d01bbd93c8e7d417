"""Planted curves of candidates, with noise by a seed: what tests of sweeps share."""

import math
import random
from collections.abc import Callable

from tlora.sweep import Curve

END, EVERY, BATCH, ROWS = 1440, 40, 8, 64


def curve(
    loss: Callable[[float], float],
    *,
    noise: float = 0.0,
    validation: Callable[[float], float] | None = None,
    seed: int = 0,
    batch: int = BATCH,
    end: int = END,
) -> Curve:
    """A candidate whose losses follow functions of the share trained; `noise`: the scatter of one sequence's loss."""
    rng = random.Random(seed)
    validation = validation or loss

    def drawn(of: Callable[[float], float], at: int, sequences: int) -> float:
        return of(at / END) + rng.gauss(0.0, noise / math.sqrt(sequences))

    train = [(at, drawn(loss, at - batch, batch)) for at in range(batch, end + 1, batch)]
    evaluated = [(at, drawn(validation, at, ROWS)) for at in range(EVERY, end + 1, EVERY)]
    return Curve(train, evaluated, batch, ROWS)


def falling(floor: float, speed: float = 8.0) -> Callable[[float], float]:
    return lambda share: floor + (3.0 - floor) * math.exp(-speed * share)

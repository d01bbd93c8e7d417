"""Counter-based random choices of a job: functions of its own seed and position alone, so neighbours cannot move them.

Used by data (held-out rows), the trainer (order of sequences) and adapters (initial weights). Dropout masks, which
kernels must draw too, are defined in `kernels/reference.py`.
"""

import zlib

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def mix64(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of uint64 that scatters every bit (Steele et al., OOPSLA 2014)."""
    x = x.astype(np.uint64, copy=True)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def bits64(seed: int, stream: str, epoch: int, count: int) -> np.ndarray:
    """`count` uint64 words that depend on (seed, stream, epoch, index) only."""
    with np.errstate(over="ignore"):
        key = np.array([seed], np.uint64)
        for word in (zlib.crc32(stream.encode()), epoch):
            key = mix64(key + _GAMMA + np.uint64(word))
        return mix64(key + _GAMMA * np.arange(1, count + 1, dtype=np.uint64))


def permutation(seed: int, stream: str, epoch: int, count: int) -> np.ndarray:
    """A shuffle of range(count), the same on every machine and version."""
    return np.argsort(bits64(seed, stream, epoch, count), kind="stable")


def uniform(seed: int, stream: str, count: int) -> np.ndarray:
    """float32 [count], uniform in [0, 1), on a grid of 2⁻²⁴."""
    return (bits64(seed, stream, 0, count) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)

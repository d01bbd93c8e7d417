"""A made-up profile: an 8B base on a large GPU, whose ticks have a floor and then grow with their tokens."""

from typing import Any

BASES = ("left", "right")


def content(*, floor_ms: float = 45.0, ms_per_token: float = 0.06) -> dict[str, Any]:
    """As in a profile's file."""
    ticks = [
        {
            "base": base, "parameters": 8_000_000_000, "layers": 32, "jobs": jobs, "rank_sum": ranks,
            "tokens": jobs * length, "longest": length,
            "tick_ms": tick_ms(jobs * length, jobs, ranks, floor_ms, ms_per_token),
            "peak_bytes": round(18e9 + ranks * 47e6 + 3e6 * jobs * length),
        }
        for base in BASES for jobs, ranks in ((1, 16), (8, 128), (8, 206)) for length in (64, 128, 256, 512, 1024, 2048)
    ]  # fmt: skip
    peft = [
        {"base": base, "batch": batch, "length": length, "tokens": batch * length,
         "step_ms": max(220.0, 0.12 * batch * length)}
        for base in BASES for batch in (1, 2, 4, 8) for length in (512, 1024, 2048)
    ]  # fmt: skip
    return {"gpu": "NVIDIA H200", "ticks": ticks, "peft": peft}


def tick_ms(tokens: float, jobs: int = 1, ranks: int = 16, floor_ms: float = 45.0, ms_per_token: float = 0.06) -> float:
    return floor_ms + 0.5 * jobs + (ms_per_token + 2e-5 * ranks / jobs) * tokens

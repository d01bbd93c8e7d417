"""A short profile of a base on this machine: tick times and memory by tokens and jobs, for `tlora.capacity`.

Called by `tlora profile` and the benchmarks. Ticks are a trainer's own, on random tokens; nothing of them is kept.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from tlora.data import JobData, TokenSequence
from tlora.files import atomic_path
from tlora.spec import parse_job
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer, TrainerOptions

LENGTHS, COUNTS, RANK = (64, 128, 256, 512, 1024, 2048), (1, 8), 16
_OTHER_RANKS = (2, 64)
"""Of ticks of one job, which tell what a rank costs."""
_WARM, _TICKS, _ROUNDS = 2, 3, 3
_WARM_SMALL = 8
"""Before small ticks, which are then captured as CUDA graphs, but for those that gain little by it."""


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def cached_profile(
    supermodel: SuperModel, folder: Path, *, lengths: Sequence[int] = LENGTHS, counts: Sequence[int] = COUNTS
) -> Path:
    """The profile of this kind of GPU and base in a folder; taken and put there, if there is none."""
    base, gpu = supermodel.base.model, gpu_name(supermodel.device)
    path = folder / f"{gpu}-{base}-{supermodel.fingerprint}.json".replace("/", "-").replace(" ", "-")
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        content = profile(supermodel, lengths=lengths, counts=counts)
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
    return path


def profile(
    supermodel: SuperModel,
    *,
    lengths: Sequence[int] = LENGTHS,
    counts: Sequence[int] = COUNTS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """As in a profile's file. Seconds to a minute: all sizes in turn, a few times, by `clock`, for machines do not
    stay as fast as they are."""
    sizes = [(length, count, RANK) for count in counts for length in lengths]
    sizes += [(length, 1, rank) for rank in _OTHER_RANKS for length in (lengths[len(lengths) // 2], lengths[-1])]
    sizes = list(dict.fromkeys(sizes))
    measured = [[_seconds(supermodel, *size, clock) for size in sizes] for _ in range(_ROUNDS)]
    ticks = [
        _row(
            supermodel,
            *size,
            statistics.median(chain(*(seconds for seconds, _ in rounds))),
            max(peak for _, peak in rounds),
        )
        for size, rounds in zip(sizes, zip(*measured, strict=True), strict=True)
    ]
    return {"gpu": gpu_name(supermodel.device), "ticks": ticks}


def _seconds(
    supermodel: SuperModel, length: int, count: int, rank: int, clock: Callable[[], float]
) -> tuple[list[float], int]:
    """Of ticks of so many jobs, their optimizer steps included: those look at the device. And the peak, in bytes."""
    cuda = supermodel.device.type == "cuda"
    with TemporaryDirectory(prefix="tlora-profile") as folder:
        trainer = Trainer(supermodel, TrainerOptions(token_budget=length * count))
        for number in range(count):
            data = random_data(length, supermodel.outline.vocab_size, seed=number)
            job = random_job(Path(folder), f"j{number}", supermodel.base.model, adapter={"rank": rank})
            trainer.attach(job, data)
        for _ in range(_WARM_SMALL if supermodel.is_small(length * count) else _WARM):
            trainer.tick()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(_TICKS):
            began_s = clock()
            trainer.tick()
            seconds.append(clock() - began_s)
        for name in list(trainer.jobs):
            trainer.detach(name, keep=False)
    return seconds, torch.cuda.max_memory_allocated() if cuda else 0


def _row(supermodel: SuperModel, length: int, count: int, rank: int, seconds: float, peak: int) -> dict[str, Any]:
    return {
        "base": supermodel.base.model,
        "parameters": supermodel.outline.num_parameters,
        "layers": supermodel.outline.num_layers,
        "jobs": count,
        "rank_sum": rank * count,
        "tokens": length * count,
        "longest": length,
        "tick_ms": round(1e3 * seconds, 3),
        "peak_bytes": peak,
    }


def random_job(folder: Path, name: str, base: str, **changes: Any) -> Any:
    """A job of random data, which no file holds."""
    values = {
        "name": name, "base": {"model": base}, "data": {"path": "random.jsonl"}, "adapter": {"rank": RANK},
        "batch_size": 1, "steps": 1_000_000, "save_every": 1_000_000, "output": str(folder / name),
    }  # fmt: skip
    return parse_job({**values, **changes})


def random_data(length: int, vocab_size: int, *, seed: int, count: int = 16) -> JobData:
    """Sequences of just this length."""
    random = np.random.default_rng(seed)
    rows = [
        TokenSequence(random.integers(0, vocab_size, length).astype(np.int32), np.arange(length) >= 1)
        for _ in range(count)
    ]
    return JobData(rows, [], report=None, eval_report=None)  # type: ignore[arg-type]

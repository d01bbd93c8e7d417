"""Measured rows: how they are timed, printed, and kept in `results/<gpu>/<name>.json`. Called by the benchmarks."""

import json
import os
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import triton

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison, of times from one process that ran both in turn. `ratio` is ours / against, or where higher is
    better against / ours: a speed-up."""

    name: str
    shape: str
    ours_ms: float
    """In `unit`, as is `against_ms`."""
    against: str
    against_ms: float
    ratio: float
    target: float | None
    """None: only printed."""
    better: Literal["lower", "higher"]
    gpu: str
    torch: str
    triton: str
    commit: str
    date: str
    unit: str = "ms"
    spread: float = 0.0
    """Between the quartiles of `ours_ms`, over their median; 0 where it was not kept."""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return "printed"
        lower = self.better == "lower"
        met = self.ratio <= self.target if lower else self.ratio >= self.target
        return f"{'met' if met else 'missed'} ({'≤' if lower else '≥'} {self.target:.2f})"


def row(
    name: str,
    shape: str,
    ours_ms: float,
    against: str,
    against_ms: float,
    target: float | None = None,
    better: Literal["lower", "higher"] = "lower",
    *,
    unit: str = "",
    gpu: str = "",
    spread: float = 0.0,
) -> Row:
    """With what it was measured on; `gpu`: what it was modelled for, without one. Unit: GiB in the rows named memory/…,
    else ms."""
    unit = unit or ("GiB" if name.startswith("memory/") else "ms")
    ratio = ours_ms / against_ms if better == "lower" else against_ms / ours_ms
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made_on = (gpu or device, str(torch.__version__), triton.__version__, commit())
    date = datetime.now(UTC).date().isoformat()
    return Row(name, shape, ours_ms, against, against_ms, ratio, target, better, *made_on, date, unit, spread)


def folder(name: str = "") -> Path:
    """Of results of this name; without one, of this GPU: `h200` for an NVIDIA H200."""
    path = ROOT / "benchmarks" / "results" / (name or gpu_folder())
    path.mkdir(parents=True, exist_ok=True)
    return path


def gpu_folder() -> str:
    return torch.cuda.get_device_name().lower().removeprefix("nvidia ").replace(" ", "-")


def write(name: str, rows: Sequence[Row], within: str = "") -> None:
    """Print the rows, and put them into the file: in the places of rows of their names, else at its end. `within`: the
    folder's name, if it is not the GPU's."""
    path = folder(within) / f"{name}.json"
    kept = {old["name"]: old for old in json.loads(path.read_text())} if path.exists() else {}
    show(rows)
    kept |= {new.name: asdict(new) for new in rows}
    path.write_text(json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n")


def show(rows: Sequence[Row]) -> None:
    for new in rows:
        unit, spread = new.unit, f" ± {new.spread:.1%}" if new.spread else ""
        print(
            f"{new.name:<40} {new.shape:<26} {new.ours_ms:9.3f} {unit}{spread}, {new.against_ms:9.3f} {unit} "
            f"{new.against:<31} {new.ratio:6.3f} {new.verdict}",
            flush=True,
        )


@cache
def commit() -> str:
    """TLORA_COMMIT, if it is set; else of the checkout, with + where files other than results differ from it."""
    if named := os.environ.get("TLORA_COMMIT"):
        return named
    try:
        head = _git("rev-parse", "--short", "HEAD")
        return head + "+" * bool(_git("status", "--porcelain", "--", ".", ":!benchmarks/results"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def medians_ms(
    closures: Mapping[str, Callable[[], object]], *, calls: int, rounds: int = 15, graphed: bool = True
) -> dict[str, float]:
    """Milliseconds a call of each, run in turn: the card's clock drifts, so only times of one such run compare.

    A sample is `calls` calls, one CUDA graph's replay unless `graphed` is false. Nothing waits for the device until all
    have run, so launches are hidden where they take less time than what they launch.
    """
    runs = {name: _graph(run, calls) if graphed else _repeat(run, calls) for name, run in closures.items()}
    samples: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            samples[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs[1:]) / calls
        for name, pairs in samples.items()
    }


def _graph(run: Callable[[], object], calls: int) -> Callable[[], None]:
    for _ in range(2):  # compiles, chooses, and makes the libraries' handles, which no capture may
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def _repeat(run: Callable[[], object], calls: int) -> Callable[[], None]:
    def repeat() -> None:
        for _ in range(calls):
            run()

    return repeat

"""What replays gave: a table, JSON, and one HTML page whose plots are also PNG files. Called by `tlora simulate`."""

import base64
import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tlora.files import atomic_path
from tlora.simulate import Replay

HOUR_S = 3600.0
COLUMNS = {
    "way": "scheduled by",
    "mean_completion_s": "mean completion, h",
    "median_completion_s": "median, h",
    "p95_completion_s": "95 %, h",
    "makespan_s": "makespan, h",
    "throughput": "throughput, lone GPUs",
    "utilisation": "token utilisation",
    "num_beyond_bound": "beyond bound",
    "slowest_plan_ms": "slowest plan, ms",
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Mean completion over load, by way."""

    loads: Sequence[float]
    completion_s: Mapping[str, Sequence[float]]


def numbers(replay: Replay, full_tokens_per_s: float) -> dict[str, Any]:
    """One replay in figures. `full_tokens_per_s`: what a GPU does at its cheapest token, for token utilisation."""
    completion = np.array([outcome.completion_s for outcome in replay.outcomes])
    tokens = sum(outcome.tokens for outcome in replay.outcomes)
    return {
        "way": replay.way,
        "gpus": replay.gpus,
        "jobs": len(replay.outcomes),
        "mean_completion_s": float(completion.mean()),
        "median_completion_s": float(np.median(completion)),
        "p95_completion_s": float(np.quantile(completion, 0.95)),
        "makespan_s": replay.makespan_s,
        "throughput": replay.throughput,
        "utilisation": tokens / (full_tokens_per_s * replay.gpus * replay.makespan_s),
        "num_beyond_bound": replay.num_beyond_bound,
        "lost_gpu_s": replay.lost_s,
        "slowest_plan_ms": 1e3 * max(replay.planning_s, default=0.0),
    }


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    texts = []
    for key in COLUMNS:
        value = row[key]
        if key.endswith("completion_s") or key == "makespan_s":
            texts.append(f"{value / HOUR_S:.2f}")
        elif key == "utilisation":
            texts.append(f"{100 * value:.1f} %")
        else:
            texts.append(f"{value:.1f}" if isinstance(value, float) else str(value))
    return texts


def write(
    folder: Path,
    settings: Mapping[str, Any],
    replays: Sequence[Replay],
    rows: Sequence[Mapping[str, Any]],
    sweep: Sweep | None,
    full_tokens_per_s: float,
) -> None:
    """report.json, report.html and the plots, into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "report.json") as path:
        path.write_text(json.dumps({"settings": settings, "replays": rows}, indent=1) + "\n")
    pictures = {name: _plot(folder / f"{name}.png", draw) for name, draw in _plots(replays, sweep, full_tokens_per_s)}
    with atomic_path(folder / "report.html") as path:
        path.write_text(_page(settings, rows, pictures))


def _plots(
    replays: Sequence[Replay], sweep: Sweep | None, full_tokens_per_s: float
) -> list[tuple[str, Callable[[Any], None]]]:
    def completion(axes: Any) -> None:
        for replay in replays:
            hours = np.sort([outcome.completion_s for outcome in replay.outcomes]) / HOUR_S
            axes.semilogx(hours, np.linspace(0.0, 1.0, len(hours)), label=replay.way)
        axes.set(xlabel="completion time, h", ylabel="share of jobs", title="Completion times")

    def over_time(title: str, label: str, of: Callable[[Replay, tuple[float, int, int, float]], float]) -> Any:
        def draw(axes: Any) -> None:
            for replay in replays:
                times = [sample[0] / HOUR_S for sample in replay.samples]
                axes.plot(times, [of(replay, sample) for sample in replay.samples], label=replay.way, linewidth=1.0)
            axes.set(xlabel="time, h", ylabel=label, title=title)

        return draw

    def slowdown(axes: Any) -> None:
        for replay in replays:
            values = np.sort([outcome.slowdown for outcome in replay.outcomes])
            axes.plot(values, np.linspace(0.0, 1.0, len(values)), label=replay.way)
        bounds = {outcome.bound for replay in replays for outcome in replay.outcomes}
        for bound in bounds:
            axes.axvline(bound, color="black", linestyle=":", label=f"bound {bound:g}")
        axes.set(xlabel="running time over that alone", ylabel="share of jobs", title="Slowdown", xlim=(0.0, 10.0))

    def loads(axes: Any) -> None:
        assert sweep is not None
        for way, times in sweep.completion_s.items():
            axes.semilogy(sweep.loads, np.array(times) / HOUR_S, marker="o", label=way)
        axes.set(xlabel="load", ylabel="mean completion, h", title="Load sweep")

    plots: list[tuple[str, Callable[[Any], None]]] = [
        ("completion", completion),
        ("throughput", over_time("Throughput", "useful tokens / s", lambda _, sample: sample[3])),
        (
            "utilisation",
            over_time(
                "Utilisation",
                "of the tokens that full GPUs do",
                lambda replay, sample: sample[3] / (replay.gpus * full_tokens_per_s),
            ),
        ),
        ("queue", over_time("Queue", "jobs waiting", lambda _, sample: sample[1])),
        ("slowdown", slowdown),
    ]
    return [*plots, ("sweep", loads)] if sweep else plots


def _plot(path: Path, draw: Callable[[Any], None]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return path.read_bytes()


def _page(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], pictures: Mapping[str, bytes]) -> str:
    """One file that needs no other."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in COLUMNS.values())
    body = "".join("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in cells(row)) + "</tr>" for row in rows)
    images = "".join(
        f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
        for name, picture in pictures.items()
    )
    told = ", ".join(f"{html.escape(str(key))} {html.escape(str(value))}" for key, value in settings.items())
    style = (
        "body{font:15px sans-serif;margin:2em;max-width:76em}td,th{padding:.3em .8em;text-align:right}"
        "td:first-child,th:first-child{text-align:left}img{width:49%}"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>tlora simulate</title><style>{style}</style>'
        f"<h1>Replay</h1><p>{told}. Speeds on several GPUs are modelled, not measured.</p>"
        f"<table><tr>{head}</tr>{body}</table>{images}\n"
    )

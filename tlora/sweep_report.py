"""What a sweep gives: the best adapter, a leaderboard, curves and costs, in files that say the same after a crash.

Called by `tlora.sweep_run` at the end of a sweep, also of one that was stopped. matplotlib draws the page.
"""

import csv
import io
import json
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from tlora.checkpoint import BEST
from tlora.files import atomic_path, replace_folder
from tlora.sweep import Curve
from tlora.sweep_spec import SweepSpec
from tlora.sweep_state import Candidate, Status, SweepState, statuses

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLUMNS = "rank candidate status best_loss best_samples samples of_samples".split()
_COLOURS = {Status.FINISHED: "tab:green", Status.EXITED: "tab:orange", Status.FAILED: "tab:red"}


def write_results(spec: SweepSpec, state: SweepState, curves: Mapping[str, Curve]) -> None:
    """Write best/, leaderboard.csv, leaderboard.json, cost.json and report.html into the sweep's folder."""
    rows = leaderboard(state)
    table = io.StringIO()
    writer = csv.DictWriter(table, [*_COLUMNS, *spec.space, "reason"], extrasaction="ignore", restval="")
    writer.writeheader()
    writer.writerows({**row, **row["values"]} for row in rows)
    page = _page(spec, state, curves, rows)
    for name, text in (
        ("leaderboard.csv", table.getvalue()),
        ("leaderboard.json", json.dumps(rows, indent=1) + "\n"),
        ("cost.json", json.dumps(cost(state), indent=1) + "\n"),
        ("report.html", page),
    ):
        with atomic_path(spec.folder / name) as path:
            path.write_text(text, encoding="utf-8")
    if state.leader is not None:
        replace_folder(spec.folder / "candidates" / state.leader.name / BEST, spec.folder / BEST)


def leaderboard(state: SweepState) -> list[dict[str, Any]]:
    """One row a candidate, the best first."""
    return [
        {
            "rank": rank,
            "candidate": one.name,
            "status": str(one.status),
            "best_loss": one.best_loss,
            "best_samples": one.best_samples,
            "samples": one.samples,
            "of_samples": one.total,
            "values": one.values,
            "reason": one.reason,
        }
        for rank, one in enumerate(state.ranking(), 1)
    ]


def cost(state: SweepState) -> dict[str, Any]:
    """Samples and seconds, beside what all candidates would take to their ends: together, at the same pace, and one
    after the other, at the pace of those that were seen alone (None if nobody was; not known on a cluster)."""
    samples, whole = state.samples, sum(one.total for one in state.candidates)
    share = samples / whole if whole else 0.0
    in_turn_s = whole * state.lone_s / state.lone_samples if state.lone_samples else None
    return {
        "samples": samples,
        "samples_of_full_training": whole,
        "saved_samples": 1.0 - share,
        "evaluated_sequences": state.num_validation * sum(one.num_evaluations for one in state.candidates),
        "gpu_seconds": round(state.gpu_s, 3),
        "gpu_seconds_of_full_training_at_this_pace": round(state.gpu_s / share, 3) if share else None,
        "seconds": round(state.spent_s, 3),
        "seconds_of_full_training_at_this_pace": round(state.spent_s / share, 3) if share else None,
        "seconds_one_after_the_other": None if in_turn_s is None else round(in_turn_s, 3),
        "saved_against_one_after_the_other": 1.0 - state.spent_s / in_turn_s if in_turn_s else None,
    }


def _page(spec: SweepSpec, state: SweepState, curves: Mapping[str, Curve], rows: list[dict[str, Any]]) -> str:
    """One HTML page without anything outside it."""
    leader, spent = state.leader, cost(state)
    best = f"Best: {leader.name}, validation loss {leader.best_loss:.4f}." if leader else "No candidate has a loss."
    lines = [
        f"{best} {statuses(state.candidates)}. {state.stopped}",
        f"{spent['samples']:,} samples of {spent['samples_of_full_training']:,}: {spent['saved_samples']:.1%} saved. "
        f"{spent['evaluated_sequences']:,} sequences evaluated. {spent['seconds']:,.0f} s in training, "
        f"{spent['gpu_seconds']:,.0f} s of GPUs.",
    ]
    if in_turn_s := spent["seconds_one_after_the_other"]:
        lines.append(f"All to their ends, one after the other at the pace of one alone: {in_turn_s:,.0f} s.")
    names = [*_COLUMNS, *spec.space, "reason"]
    head = "".join(f"<th>{escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(_cell({**row, **row['values']}.get(name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:2px 8px;text-align:left}svg{max-width:100%}"
    return (
        f"<!doctype html><meta charset='utf-8'><title>{escape(spec.name)}</title><style>{style}</style>"
        f"<h1>{escape(spec.name)}</h1>"
        + "".join(f"<p>{escape(line)}</p>" for line in lines)
        + _svg(_losses(spec, state, curves))
        + _svg(_fields(spec, state))
        + f"<table><tr>{head}</tr>{body}</table>\n"
    )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _axis(spec: SweepSpec, state: SweepState) -> dict[str, str]:
    """Of what is to be low. Nothing can be drawn on a logarithmic one before the first evaluation."""
    if spec.objective.name == "exact_match":
        return {"ylabel": "validation rows not answered exactly", "yscale": "linear"}
    return {"ylabel": "validation loss", "yscale": "log" if state.leader else "linear"}


def _losses(spec: SweepSpec, state: SweepState, curves: Mapping[str, Curve]) -> "Figure":
    """Validation losses by samples; exits are crosses, rungs lines."""
    figure = _figure(9, 4.5)
    axes = figure.subplots()
    for one in reversed(state.ranking()):
        points = curves[one.name].evaluated
        if not points:
            continue
        colour = "black" if one is state.leader else _COLOURS.get(one.status, "tab:blue")
        samples, losses = zip(*points, strict=True)
        axes.plot(samples, losses, color=colour, linewidth=2 if one is state.leader else 0.8)
        if one.status in (Status.EXITED, Status.FAILED):
            axes.plot(samples[-1], losses[-1], "x", color=colour)
    for rung in state.rungs:
        axes.axvline(rung, color="0.8", linewidth=0.8, zorder=0)
    axes.set(xlabel="samples", title="× ended early; the best in black", **_axis(spec, state))
    return figure


def _fields(spec: SweepSpec, state: SweepState) -> "Figure":
    """The lowest validation loss against each field of the space."""
    columns = min(3, len(spec.space))
    lines = -(-len(spec.space) // columns)
    figure = _figure(9, 3 * lines)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes, (key, domain) in zip(grid.flat, spec.space.items(), strict=False):
        for status in Status:
            ones = [one for one in state.candidates if one.status is status and one.best_loss is not None]
            axes.plot(
                [_place(one, key) for one in ones],
                [one.best_loss for one in ones],
                "o" if status is Status.FINISHED else "x",
                color=_COLOURS.get(status, "tab:blue"),
            )
        axes.set(xlabel=key, xscale="log" if domain.log_uniform else "linear", yscale=_axis(spec, state)["yscale"])
    for axes in grid.flat[len(spec.space) :]:
        axes.set_axis_off()
    grid[0][0].set_ylabel(f"best {_axis(spec, state)['ylabel']}")
    return figure


def _place(one: Candidate, key: str) -> Any:
    value = one.values[key]
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def _svg(figure: "Figure") -> str:
    import matplotlib

    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "tlora"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue().partition("<svg")[1] + drawn.getvalue().partition("<svg")[2]

"""What a person sees in the terminal: the live table, the report of a check, a preview of the data.

Called by the command line with what `tlora.local` found out or is doing. Decides nothing, and an output that cannot be
written ends nothing.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tlora.job import State

if TYPE_CHECKING:  # the commands of a cluster do without torch
    from tlora.data import TokenSequence
    from tlora.local import Progress, ReadyJob
    from tlora.planner import Choice
    from tlora.spec import BaseSpec
    from tlora.sweep_state import SweepState
    from tlora.trainer import Tick

_COLOURS = {State.FAILED: "red", State.FINISHED: "green", State.RUNNING: "cyan", State.PAUSED: "yellow"}
_PLAIN_EVERY_S = 10.0
_WIDE = 110


class Screen(Console):
    """A console that falls silent once it cannot be written, as in `tlora train … | head`; rich's ends the process."""

    def _check_buffer(self) -> None:  # where all that rich writes goes through
        try:
            super()._check_buffer()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        with suppress(SystemExit):
            super().on_broken_pipe()


class LiveTable:
    """One row a job while it trains; a plain line now and then where there is no terminal."""

    def __init__(self, console: Console):
        self.console = console
        self._live = Live(console=console, auto_refresh=False) if console.is_interactive else None
        self._printed_s = -math.inf
        self._rate = math.nan

    def __enter__(self) -> "LiveTable":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, progress: "Sequence[Progress]", tick: "Tick | None") -> None:
        """Called after every tick."""
        if tick:
            rate = tick.num_tokens / max(tick.seconds, 1e-9)
            self._rate = rate if math.isnan(self._rate) else 0.8 * self._rate + 0.2 * rate
        ended = bool(tick and tick.ended)
        if self._live:
            self._live.update(self._table(progress), refresh=True)
        elif ended or time.monotonic() - self._printed_s > _PLAIN_EVERY_S:
            self._printed_s = time.monotonic()
            self.console.print("  ".join(_line(one) for one in progress), highlight=False, soft_wrap=True)

    def _table(self, progress: "Sequence[Progress]") -> Table:
        rate = "" if math.isnan(self._rate) else f"{self._rate:,.0f} tokens/s together"
        table = Table(box=None, pad_edge=False, caption=rate, caption_justify="left")
        for name in ("job", "", "step", "loss", "eval loss", "tokens/s", "ETA", "state"):
            table.add_column(
                name, justify="right" if name in ("step", "loss", "eval loss", "tokens/s", "ETA") else "left"
            )
        for one in progress:
            job = one.resident
            state = Text(one.record.state, style=_COLOURS.get(one.record.state, ""))
            if job is None:
                table.add_row(one.spec.name, "", "", "", "", "", "", state)
                continue
            table.add_row(
                one.spec.name,
                ProgressBar(total=job.num_steps, completed=job.step, width=24),
                f"{job.step}/{job.num_steps}",
                _number(job.loss),
                _number(job.eval_loss),
                "" if math.isnan(job.tokens_per_s) else f"{job.tokens_per_s:,.0f}",
                _eta(one),
                state,
            )
        return table


def _line(one: "Progress") -> str:
    job = one.resident
    if job is None or one.record.state is not State.RUNNING:
        return f"{one.spec.name}: {one.record.state}"
    loss = "" if math.isnan(job.loss) else f" loss {_number(job.loss)}"
    return f"{one.spec.name}: step {job.step}/{job.num_steps}{loss}"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _eta(one: "Progress") -> str:
    job = one.resident
    if job is None or one.record.state is not State.RUNNING or math.isnan(job.seconds_per_step):
        return ""
    seconds = round((job.num_steps - job.step) * job.seconds_per_step)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def print_outcome(console: Console, progress: "Sequence[Progress]") -> None:
    """Where each job ended, and why."""
    for one in progress:
        text = Text(f"{one.spec.name}: ")
        text.append(one.record.state, style=_COLOURS.get(one.record.state, ""))
        if one.record.state is State.FINISHED:
            best = one.resident.best_loss if one.resident else math.inf
            text.append(
                f", adapter in {one.spec.folder}" + (f", best eval loss {best:.4f}" if math.isfinite(best) else "")
            )
        elif one.record.state is State.PAUSED and one.resident:
            text.append(f" at step {one.resident.step}/{one.resident.num_steps}; go on with --resume")
        elif one.record.reason:
            text.append(f": {one.record.reason}")
        console.print(text, soft_wrap=True)


def print_leaderboard(console: Console, state: "SweepState", folder: Path) -> None:
    """A sweep's candidates, the best first, and what they took."""
    from tlora.checkpoint import BEST

    table = Table("", "candidate", "best loss", "samples", "state", "fields", "why", box=None, pad_edge=False)
    for rank, one in enumerate(state.ranking(), 1):
        fields = ", ".join(f"{key} {value}" for key, value in one.values.items())
        loss = "" if one.best_loss is None else f"{one.best_loss:.4f}"
        why = one.reason.partition(":")[0]  # the numbers are in the files
        table.add_row(str(rank), one.name, loss, f"{one.samples}/{one.total}", one.status, escape(fields), escape(why))
    console.print(table)
    whole = sum(one.total for one in state.candidates)
    saved = 1 - state.samples / max(whole, 1)
    text = f"{state.samples:,} of {whole:,} samples trained on ({saved:.0%} saved), {state.spent_s:,.0f} s in training."
    if state.stopped:
        text += f" It ended early: {state.stopped}; go on with --resume."
    if state.leader is not None:
        text += f" The best adapter is in {folder / BEST}, the report in {folder / 'report.html'}."
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def print_check(console: Console, jobs: "Sequence[ReadyJob]") -> None:
    """What `tlora check` found out about each job, and what all of them need together."""

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for job in jobs:
        matched = ", ".join(f"{pattern} → {count}" for pattern, count in job.matched.items())
        console.print(Text(job.spec.name, style="bold"))
        say(f"  targets   {matched} modules; {job.layout.num_parameters:,} trainable parameters")
        say(f"  data      {job.data.report}")
        if job.data.eval:
            held_out = f"{len(job.data.eval)} sequences held out of them"
            say(f"  evaluate  {job.data.eval_report or held_out}")
        say(f"  steps     {job.num_steps} of {job.spec.batch_size} sequences")
        say(f"  memory    {size(job.estimate.adapter_bytes)} for its adapter and optimizer")
    for base in dict.fromkeys(job.spec.base for job in jobs):
        needs = [job.estimate for job in jobs if job.spec.base == base]
        frozen, adapters = needs[0].base_bytes, sum(need.adapter_bytes for need in needs)
        tick = max(need.tick_bytes for need in needs)
        say(
            f"{base.model}: {size(frozen)} base + {size(adapters)} for {len(needs)} adapter(s) + {size(tick)} for a "
            f"tick = {size(frozen + adapters + tick)} (estimate)"
        )


def print_losses(console: Console, jobs: "Sequence[ReadyJob]") -> None:
    """Whose rows were left out or cut, and why; nothing where all are there."""
    for job in jobs:
        for report in filter(None, (job.data.report, job.data.eval_report)):
            if not report.is_whole:
                console.print(f"{job.spec.name}: {report}", highlight=False, markup=False, soft_wrap=True)


def print_plans(console: Console, groups: "Mapping[BaseSpec, Sequence[Choice]]") -> None:
    """How several GPUs would hold each base: every plan with its figures, and which is taken."""

    def say(*parts: str) -> None:
        text = "  " + "".join(f"{part:>{width}}" for part, width in zip(parts, (13, *[11] * 5, 15, 14), strict=True))
        console.print(text.rstrip(), highlight=False, markup=False, soft_wrap=True)

    for base, choices in groups.items():
        shown = "replicas × shards × tensor-parallel; estimates, bytes on one GPU"
        title = f"{base.model} on {choices[0].plan.ranks} GPU(s): {shown}"
        console.print(title, highlight=False, markup=False, soft_wrap=True)
        say("plan", "base", "gathered", "adapters", "tick", "together", "tokens/s", "")
        for choice in choices:
            plan, need = choice.plan, choice.memory
            say(
                f"{plan.replicas} × {plan.shards} × {plan.tensor}",
                *(size(part) for part in (need.base, need.gathered, need.adapters, need.tick, need.total)),
                f"{choice.rows_per_s:,.0f}",
                ("  ← taken" if choice is choices[0] else "") if choice.fits else "does not fit",
            )
        if not choices[0].fits:
            console.print(
                "  No plan fits. Want more GPUs, larger ones, --checkpointing or fewer --tokens.", highlight=False
            )


def size(count: int) -> str:
    """Bytes for people."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def print_preview(console: Console, sequences: "Sequence[TokenSequence]", tokenizer: Any) -> None:
    """Sequences as the model sees them: every token, the targets in green (in ⟦ ⟧ without colour)."""
    is_coloured = bool(console.color_system) and not console.no_color
    for number, sequence in enumerate(sequences, 1):
        console.print(
            f"[bold]sequence {number}[/]: {len(sequence)} tokens, {sequence.num_targets} of them targets",
            highlight=False,
        )
        text, start = Text(), 0
        flags = [bool(flag) for flag in sequence.is_target]
        while start < len(flags):
            end = next((at for at in range(start, len(flags)) if flags[at] is not flags[start]), len(flags))
            part = tokenizer.decode(sequence.ids[start:end].tolist(), skip_special_tokens=False)
            if flags[start]:
                text.append(part if is_coloured else f"⟦{part}⟧", style="bold green")
            else:
                text.append(part, style="dim")
            start = end
        console.print(text, soft_wrap=True)
        console.print()


class LiveRows:
    """The cluster's jobs as they change: a table in a terminal; elsewhere a line for each change of state, or of why a
    job waits, and for how far they have come now and then."""

    def __init__(self, console: Console):
        self._console, self._seen = console, dict[str, tuple[str, str]]()
        self._told_s = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_interactive else None

    def __enter__(self) -> "LiveRows":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._live is not None:
            self._live.update(rows_table(rows, self._console.width))
            return
        is_due = time.monotonic() - self._told_s > _PLAIN_EVERY_S
        self._told_s = time.monotonic() if is_due else self._told_s
        for row in rows:
            news = row["state"], row["reason"]
            is_new, self._seen[row["name"]] = self._seen.get(row["name"]) != news, news
            if is_new or (is_due and row["state"] == State.RUNNING):
                text = " ".join(
                    part for part in (f"{row['name']}: {row['state']}", row["reason"], row_line(row)) if part
                )
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def rows_table(rows: Sequence[dict[str, Any]], width: int) -> Table:
    """Jobs of a cluster, as the scheduler describes them; a narrow terminal has room for fewer columns."""
    wide = ("eval loss", "tokens/s", "worker") if width >= _WIDE else ()
    table = Table("job", "state", "step", "loss", *wide, "why", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        more = (_loss(row, "eval_loss"), f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else "", row["worker"])
        table.add_row(
            row["name"], row["state"], _steps(row), _loss(row, "loss"), *(more if wide else ()), escape(row["reason"])
        )
    return table


def row_line(row: dict[str, Any]) -> str:
    """How far a job of a cluster has come; empty before its first step."""
    parts = [f"{name} {text}" for name in ("loss", "eval_loss") if (text := _loss(row, name))]
    return " ".join([f"step {_steps(row)}", *parts]).replace("_", " ") if row["step"] else ""


def _steps(row: dict[str, Any]) -> str:
    return f"{row['step']}/{row['num_steps']}" if row["num_steps"] else ""


def _loss(row: dict[str, Any], key: str) -> str:
    return "" if row[key] is None else f"{row[key]:.4f}"

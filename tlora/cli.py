"""The command line: reads job files, checks what its flags say, turns errors into lines and Ctrl-C into a pause.

Entry point of `tlora` and `python -m tlora`. Training is left to `tlora.local`, what is shown to `tlora.console`. Heavy
imports wait inside the commands, so that `--help` and a bad YAML answer at once.
"""

import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from tlora.cli_cluster import commands
from tlora.cli_tools import Jobs, Set, load_jobs, quiet, stop_on_signal
from tlora.errors import SpecError, TloraError

app = typer.Typer(
    help="Train many LoRA jobs at once over one frozen model, each exactly as it would train alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda or cuda:N. Default: a GPU if there is one.", show_default=False)
]
Tokens = Annotated[int, typer.Option(min=0, help="Most tokens in a tick. 0: chosen for the device.")]
Checkpointing = Annotated[
    bool, typer.Option(help="Keep layer inputs only and compute the rest again: slower, smaller.")
]
Deterministic = Annotated[bool, typer.Option(help="Bits that do not depend on neighbours: slower.")]


@app.command()
def check(
    jobs: Jobs,
    overrides: Set = [],  # noqa: B006
    tokens: Tokens = 0,
    checkpointing: Checkpointing = False,
    device: Device = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Show how so many GPUs would hold each base.")] = None,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    gpu_memory: Annotated[float, typer.Option(min=0, help="GiB of a GPU. 0: this machine's, or an H200's.")] = 0.0,
    profile: Annotated[Path | None, typer.Option(help="Measured ticks, as `tlora profile` has them.")] = None,
) -> None:
    """Validate jobs without training: fields, model, targets, data, memory; and the plan for several GPUs."""
    specs = load_jobs(jobs, overrides)
    with quiet():
        _refuse_device(device)
        from rich.console import Console

        from tlora.capacity import Capacity
        from tlora.console import print_check, print_plans
        from tlora.local import RunOptions, plan_groups, prepare
        from tlora.trainer import TrainerOptions

        trainer = TrainerOptions(token_budget=tokens)
        ready = prepare(specs, RunOptions(trainer=trainer, checkpointing=checkpointing, device=device))
        print_check(Console(), ready)
        if gpus:
            options = RunOptions(trainer=trainer, checkpointing=checkpointing, device=device)
            capacity = Capacity.load(profile) if profile else None
            print_plans(Console(), plan_groups(ready, options, gpus, per_node, gpu_memory, capacity))


@app.command()
def preview(
    job: Annotated[Path, typer.Argument(help="Job file in YAML.", show_default=False)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Sequences to show.")] = 3,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Show sequences as the model sees them, with the tokens that are trained on in green."""
    (spec,) = load_jobs([job], overrides)
    with quiet():
        from rich.console import Console

        from tlora.base import Outline
        from tlora.console import print_preview
        from tlora.data import load_tokenizer
        from tlora.local import read_data

        tokenizer = load_tokenizer(spec.base)
        data = read_data(spec, Outline.load(spec.base), tokenizer)
        console = Console()
        print_preview(console, data.train[:count], tokenizer)
        console.print(str(data.report), highlight=False, markup=False, soft_wrap=True)


@app.command()
def train(
    jobs: Jobs,
    overrides: Set = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on with jobs that have a saved state.")] = False,
    deterministic: Deterministic = False,
    checkpointing: Checkpointing = False,
    tokens: Tokens = 0,
    nano_batches: Annotated[int, typer.Option(min=1, help="Slices of a tick.")] = 1,
    device: Device = None,
) -> None:
    """Train jobs together on this machine. Ctrl-C saves and pauses them; --resume goes on."""
    specs = load_jobs(jobs, overrides)
    with quiet():
        _refuse_device(device)
        from tlora import local
        from tlora.checkpoint import has_finished
        from tlora.console import LiveTable, Screen, print_losses, print_outcome
        from tlora.job import JobRecord, State
        from tlora.trainer import TrainerOptions

        options = local.RunOptions(
            resume=resume,
            deterministic=deterministic,
            checkpointing=checkpointing,
            device=device,
            trainer=TrainerOptions(token_budget=tokens, nano_batches=nano_batches),
        )
        if not resume:
            local.refuse_saved(specs)
        console = Screen()
        ended = [spec for spec in specs if resume and has_finished(spec)]
        waiting = [spec for spec in specs if spec not in ended]
        console.print(f"reading the data of {len(waiting)} job(s) …", highlight=False)
        ready = local.prepare(waiting, options)
        print_losses(console, ready)
        progress = [local.Progress(spec, JobRecord(spec.name, State.FINISHED)) for spec in ended]
        with stop_on_signal() as stopped, LiveTable(console) as table:
            progress += local.train(ready, options, watch=table.show, stopped=lambda: bool(stopped))
        print_outcome(console, progress)
    states = {one.record.state for one in progress}
    raise typer.Exit(1 if State.FAILED in states else 130 if states - {State.FINISHED} else 0)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(metavar="SWEEP", help="Sweep in YAML.", show_default=False)],
    overrides: Set = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a sweep that was stopped or extended.")] = False,
    revive: Annotated[list[str], typer.Option(metavar="NAME", help="Reverse the exit of a candidate.")] = [],  # noqa: B006
    fork: Annotated[
        list[str], typer.Option(metavar="KEY=VALUE", help="Add the leader with changes, from its best adapter.")
    ] = [],  # noqa: B006
    deterministic: Deterministic = False,
    checkpointing: Checkpointing = False,
    tokens: Tokens = 0,
    device: Device = None,
) -> None:
    """Train many configurations of one job, end the weak ones early, keep the best. Ctrl-C pauses; --resume goes on."""
    from tlora.sweep_spec import load_sweep

    spec = load_sweep(file, overrides)
    with quiet():
        _refuse_device(device)
        from tlora.console import LiveTable, Screen, print_leaderboard
        from tlora.local import RunOptions
        from tlora.sweep_local import run_sweep
        from tlora.trainer import TrainerOptions

        options = RunOptions(
            resume=resume or bool(revive or fork),
            deterministic=deterministic,
            checkpointing=checkpointing,
            device=device,
            trainer=TrainerOptions(token_budget=tokens),
        )
        console = Screen()
        with stop_on_signal() as stopped, LiveTable(console) as table:
            state = run_sweep(spec, options, revive=revive, fork=fork, watch=table.show, stopped=lambda: bool(stopped))
        print_leaderboard(console, state, spec.folder)
    raise typer.Exit(130 if stopped else 0 if state.leader else 1)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="A job's output folder, its best/, or any PEFT adapter.")],
    output: Annotated[Path, typer.Argument(help="Folder to write.")],
    merge: Annotated[bool, typer.Option("--merge", help="Write the base with the adapter merged in.")] = False,
) -> None:
    """Write an adapter from a job's last saved state, or merge an adapter into its base."""
    with quiet():
        from tlora.export import export_last, merge_adapter

        (merge_adapter if merge else export_last)(folder, output)
        typer.echo(f"written to {output}")


@app.command()
def profile(
    base: Annotated[str, typer.Argument(help="Hub name or folder of a model.")],
    folder: Annotated[Path, typer.Option(help="Where profiles are kept, one a GPU type and base.")] = Path("profiles"),
    device: Device = None,
) -> None:
    """Measure how long a base's ticks take on this machine, for `tlora simulate` and `tlora up`."""
    with quiet():
        _refuse_device(device)
        from tlora.capacity import Capacity
        from tlora.profiling import cached_profile
        from tlora.spec import BaseSpec
        from tlora.supermodel import SuperModel

        base = str(Path(base).absolute()) if Path(base).exists() else base  # as submitted jobs name it
        path = cached_profile(SuperModel.load(BaseSpec(model=base), device=device), folder)
        (model,) = Capacity.load(path).models.values()
        typer.echo(f"{path}: fitted within {100 * model.error:.1f} %, {model.budget} tokens fill a tick")


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="CSV of jobs, or JSON of distributions to draw them from.")],
    profile: Annotated[Path, typer.Option(help="Measured ticks of a GPU: a profile.json.", show_default=False)],
    gpus: Annotated[int, typer.Option(min=1, help="Of the cluster.")] = 128,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    load: Annotated[
        float, typer.Option(min=0.01, max=1000.0, help="Of a drawn trace: offered over available GPU time.")
    ] = 1.0,
    days: Annotated[float, typer.Option(min=0.01, max=1000.0, help="Of a drawn trace.")] = 7.0,
    ways: Annotated[
        list[str] | None, typer.Option("--way", help="Of scheduling; several times. Default: tlora and three others.")
    ] = None,
    bases: Annotated[list[str] | None, typer.Option("--base", help="Of the profile. Default: all.")] = None,
    measure: Annotated[str, typer.Option(help="Lone speed: own, or peft.")] = "own",
    seed: Annotated[int, typer.Option(min=0, help="Of what a trace does not record.")] = 0,
    bound: Annotated[float, typer.Option(min=1.0, help="Slowdown that jobs bear.")] = 3.0,
    backlog: Annotated[bool, typer.Option("--backlog", help="All jobs are there at time 0.")] = False,
    sweep: Annotated[bool, typer.Option("--sweep", help="Other loads, too.")] = False,
    loss_every: Annotated[float, typer.Option(min=0.0, help="Hours between losses of a node; 0: none.")] = 0.0,
    spot_nodes: Annotated[int, typer.Option(min=0, help="Nodes that come and go.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("simulation"),
) -> None:
    """Replay a trace through the scheduler and its baselines: table, JSON, HTML, PNG."""
    from rich.console import Console

    from tlora.replays import DEFAULT_WAYS, Scene, present
    from tlora.simulate import Faults

    faults = Faults(loss_every_s=3600.0 * loss_every, spot_nodes=spot_nodes, seed=seed)
    scene = Scene(
        trace, profile, gpus, per_node, load, days, tuple(bases or ()), measure, seed, bound, backlog, faults
    )  # fmt: skip
    present(Console(), scene, ways or DEFAULT_WAYS, output, sweep=sweep)


def _refuse_device(asked: str | None) -> None:
    """Raise SpecError if this machine has no such device."""
    if asked is None:
        return
    import torch

    try:
        device = torch.device(asked)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index):
        raise SpecError(f"--device {asked}: want cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        most = f"cuda:N with N below {count}" if count else "cpu, or a torch and a driver that find a GPU"
        raise SpecError(f"--device {asked}: torch finds {count} GPUs here; want {most}.")


for _command in commands:
    app.command()(_command)


def main() -> None:
    """Entry point: an error that a user can cause is one text, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # one that has no dash, arrow or letter of a name shows another
            stream.reconfigure(errors="replace")
    try:
        app()
    except TloraError as error:
        for line in str(error).splitlines():
            typer.secho(line, fg=typer.colors.RED if sys.stderr.isatty() else None, err=True)
        sys.exit(2)
    except OSError as error:  # of the terminal or a pipe: files of users have errors of their own
        with suppress(OSError):
            os.write(2, f"{error}\n".encode())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)

"""The command line: reads job files, checks what its flags say, turns errors into lines and Ctrl-C into a pause.

Entry point of `tlora` and `python -m tlora`. Training is left to `tlora.local`, what is shown to `tlora.console`. Heavy
imports wait inside the commands, so that `--help` and a bad YAML answer at once.
"""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from tlora.errors import SpecError, StateError, TloraError

app = typer.Typer(
    help="Train many LoRA jobs at once over one frozen model, each exactly as it would train alone.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
Jobs = Annotated[list[Path], typer.Argument(help="Job files in YAML.", show_default=False)]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field of every job, as in optim.lr=1e-4.")
]
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
    gpus: Annotated[int, typer.Option(min=0, help="Show how so many GPUs would hold each base.")] = 0,
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    gpu_memory: Annotated[float, typer.Option(min=0, help="GiB of a GPU. 0: this machine's, or an H200's.")] = 0.0,
) -> None:
    """Validate jobs without training: fields, model, targets, data, memory; and the plan for several GPUs."""
    specs = _load(jobs, overrides)
    with _quiet():
        _refuse_device(device)
        from rich.console import Console

        from tlora.console import print_check, print_plans
        from tlora.local import RunOptions, plan_groups, prepare
        from tlora.trainer import TrainerOptions

        trainer = TrainerOptions(token_budget=tokens)
        ready = prepare(specs, RunOptions(trainer=trainer, checkpointing=checkpointing, device=device))
        print_check(Console(), ready)
        if gpus:
            options = RunOptions(trainer=trainer, checkpointing=checkpointing, device=device)
            print_plans(Console(), plan_groups(ready, options, gpus, per_node, gpu_memory))


@app.command()
def preview(
    job: Annotated[Path, typer.Argument(help="Job file in YAML.", show_default=False)],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Sequences to show.")] = 3,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Show sequences as the model sees them, with the tokens that are trained on in green."""
    (spec,) = _load([job], overrides)
    with _quiet():
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
    specs = _load(jobs, overrides)
    with _quiet():
        _refuse_device(device)
        from tlora import local
        from tlora.checkpoint import has_finished
        from tlora.console import LiveTable, Screen, print_outcome
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
        progress = [local.Progress(spec, JobRecord(spec.name, State.FINISHED)) for spec in ended]
        with _stop_on_signal() as stopped, LiveTable(console) as table:
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
    with _quiet():
        _refuse_device(device)
        from tlora.console import LiveTable, Screen, print_leaderboard
        from tlora.local import RunOptions
        from tlora.sweep_run import run_sweep
        from tlora.trainer import TrainerOptions

        options = RunOptions(
            resume=resume or bool(revive or fork),
            deterministic=deterministic,
            checkpointing=checkpointing,
            device=device,
            trainer=TrainerOptions(token_budget=tokens),
        )
        console = Screen()
        with _stop_on_signal() as stopped, LiveTable(console) as table:
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
    with _quiet():
        from tlora.export import export_last, merge_adapter

        (merge_adapter if merge else export_last)(folder, output)
        typer.echo(f"written to {output}")


Names = Annotated[list[str], typer.Argument(help="Names of jobs.", show_default=False)]


@app.command()
def up(
    cluster: Annotated[Path | None, typer.Argument(help="Cluster settings in YAML.", show_default=False)] = None,
    overrides: Set = [],  # noqa: B006
) -> None:
    """Start the scheduler, or find it, on the cluster of RAY_ADDRESS; without one, on this machine."""
    from tlora import local_cluster
    from tlora.cluster import load_cluster

    spec = load_cluster(cluster, overrides)
    with _quiet():
        if "RAY_ADDRESS" not in os.environ:
            local_cluster.start()
        local_cluster.authenticate()
        import ray

        from tlora.actors.scheduler import connect

        ray.init(address=local_cluster.address(), namespace="tlora", log_to_driver=False, logging_level=logging.ERROR)
        theirs, ours = ray.get(connect(spec).settings.remote()), spec.model_dump()
        if other := [f"{key}: {theirs.get(key)!r}" for key in ours if theirs.get(key) != ours[key]]:
            typer.echo(f"it was up already, with {', '.join(other)}. `tlora down` first, for other settings.")
        typer.echo(f"the scheduler is up at {local_cluster.address()}; `tlora submit jobs/*.yaml` sends jobs.")


@app.command()
def submit(
    jobs: Jobs,
    overrides: Set = [],  # noqa: B006
    wait: Annotated[bool, typer.Option("--wait", help="Stay until they have ended.")] = False,
    attached: Annotated[bool, typer.Option("--attached", help="Cancel them if this command is stopped.")] = False,
) -> None:
    """Send jobs to the cluster, checked first. They run on when this command is gone."""
    specs = _load(jobs, overrides)
    with _quiet():
        from tlora.client import Client
        from tlora.console import LiveRows, Screen
        from tlora.local import prepare

        console = Screen()
        console.print(f"checking {len(specs)} job(s) …", highlight=False)
        prepare(specs)
        client = Client()
        new = client.submit(specs)
        names = [spec.name for spec in specs]
        console.print(f"{len(new)} new job(s), {len(names) - len(new)} known already", highlight=False)
        if not (wait or attached):
            return
        leaving = "cancelling the jobs, saved" if attached else "leaving; the jobs run on"
        with _stop_on_signal(leaving) as stopped, LiveRows(console) as table:

            def watch(rows: "list[dict[str, object]]") -> None:
                table.show(rows)
                if stopped:
                    raise KeyboardInterrupt

            try:
                rows = client.wait(names, watch)
            except KeyboardInterrupt:
                for row in client.status(names) if attached else ():
                    with suppress(StateError):  # it has ended meanwhile
                        client.cancel([row["name"]], keep=True)
                raise
    raise typer.Exit(0 if all(row["state"] == "finished" for row in rows) else 1)


@app.command()
def status(
    names: Annotated[list[str] | None, typer.Argument(help="Names of jobs; all if none.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Show the cluster's jobs."""
    with _quiet():
        import json

        from tlora.client import Client
        from tlora.console import Screen, rows_table

        rows = Client().status(names or None)
        if as_json:
            typer.echo(json.dumps(rows, indent=1))
        else:
            Screen().print(rows_table(rows))


@app.command()
def top() -> None:
    """Show the cluster's jobs as they change, until Ctrl-C."""
    with _quiet():
        import time

        from tlora.client import Client
        from tlora.console import LiveRows, Screen

        client = Client()
        with _stop_on_signal("leaving") as stopped, LiveRows(Screen()) as table:
            while not stopped:
                table.show(client.status())
                time.sleep(0.5)


@app.command()
def logs(
    name: Annotated[str, typer.Argument(help="Name of a job.", show_default=False)],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
) -> None:
    """Show what happened to a job."""
    with _quiet():
        import time
        from datetime import datetime

        from tlora.client import Client
        from tlora.job import State

        client, after = Client(), 0
        while True:
            has_ended = State(client.status([name])[0]["state"]).is_terminal
            events = client.events(after, name)
            for event in events:
                when = datetime.fromtimestamp(event["time_s"]).isoformat(" ", "seconds")
                typer.echo(f"{when} {name} {event['state']} {event['reason']}".rstrip())
                after = event["number"]
            if not follow or (not events and has_ended):
                return
            time.sleep(0.5)


@app.command()
def pause(names: Names) -> None:
    """Save jobs and take them off their workers."""
    with _quiet():
        from tlora.client import Client

        Client().pause(names)


@app.command()
def resume(names: Names) -> None:
    """Let paused jobs go on."""
    with _quiet():
        from tlora.client import Client

        Client().resume(names)


@app.command()
def cancel(
    names: Names,
    keep: Annotated[bool, typer.Option("--keep", help="Save their exact state first.")] = False,
) -> None:
    """End jobs."""
    with _quiet():
        from tlora.client import Client

        Client().cancel(names, keep=keep)


@app.command()
def fork(
    name: Annotated[str, typer.Argument(help="Name of a job.", show_default=False)],
    new: Annotated[str, typer.Argument(help="Name of the new one.", show_default=False)],
    overrides: Set = [],  # noqa: B006
) -> None:
    """Submit a job like another, with changes, from its newest adapter."""
    with _quiet():
        from tlora.client import Client

        Client().fork(name, new, overrides)


@app.command()
def down() -> None:
    """End the scheduler and its groups, every job saved; and the local cluster, if `tlora up` started one."""
    with _quiet():
        from tlora import local_cluster
        from tlora.client import Client

        try:
            Client().down()
        finally:
            if "RAY_ADDRESS" not in os.environ:
                local_cluster.stop()


@app.command()
def profile(
    base: Annotated[str, typer.Argument(help="Hub name or folder of a model.")],
    folder: Annotated[Path, typer.Option(help="Where profiles are kept, one a GPU type and base.")] = Path("profiles"),
    device: Device = None,
) -> None:
    """Measure how long a base's ticks take on this machine, for `tlora simulate`."""
    with _quiet():
        _refuse_device(device)
        from tlora.capacity import Capacity
        from tlora.profiling import cached_profile
        from tlora.spec import BaseSpec
        from tlora.supermodel import SuperModel

        path = cached_profile(SuperModel.load(BaseSpec(model=base), device=device), folder)
        (model,) = Capacity.load(path).models.values()
        typer.echo(f"{path}: fitted within {100 * model.error:.1f} %, {model.budget} tokens fill a tick")


@app.command()
def simulate(
    trace: Annotated[Path, typer.Argument(help="CSV of jobs, or JSON of distributions to draw them from.")],
    profile: Annotated[Path, typer.Option(help="Measured ticks of a GPU: a profile.json.", show_default=False)],
    gpus: Annotated[int, typer.Option(min=1, help="Of the cluster, eight a node.")] = 128,
    load: Annotated[float, typer.Option(min=0.01, help="Of a drawn trace: offered over available GPU time.")] = 1.0,
    days: Annotated[float, typer.Option(min=0.01, help="Of a drawn trace.")] = 7.0,
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
    scene = Scene(trace, profile, gpus, load, days, tuple(bases or ()), measure, seed, bound, backlog, faults)
    present(Console(), scene, ways or DEFAULT_WAYS, output, sweep=sweep)


def _load(paths: list[Path], overrides: list[str]) -> "list[JobSpec]":  # type: ignore[name-defined]  # noqa: F821
    from tlora.spec import load_job, refuse_clashes

    specs, faults = [], []
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            faults.append(f"{path}: is given twice. Name each job file once.")
            continue
        seen.add(path.resolve())
        try:
            specs.append(load_job(path, overrides))
        except SpecError as error:
            faults.append(str(error))
    if faults:
        raise SpecError("\n".join(faults))
    refuse_clashes(specs)
    return specs


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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what libraries print to themselves out of the user's terminal; our own warnings stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(format="%(levelname)s %(message)s", level=logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(transformers|peft|torch|huggingface_hub)\b")
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        yield


@contextmanager
def _stop_on_signal(
    text: str = "saving and pausing after this tick; once more to end at once",
) -> Iterator[list[int]]:
    """Collect the first Ctrl-C or SIGTERM in the list that is yielded, and say so; a second one interrupts."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)
        with suppress(OSError):  # by descriptor: the signal may have come amid a write to the stream
            os.write(2, f"\n{text}\n".encode())

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """Entry point: an error that a user can cause is one text, never a traceback."""
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

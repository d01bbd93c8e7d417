"""The commands of a cluster: thin talk between a terminal and `tlora.Client`."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from tlora.cli_tools import Set, load_jobs, quiet, stop_on_signal
from tlora.errors import GoneError, StateError
from tlora.job import State

Settings = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a setting of the cluster, as max_workers=4.")
]
_PROGRESS_S = 5.0
_AT_REST = {*filter(lambda state: state.is_terminal, State), State.PAUSED}
Names = Annotated[list[str], typer.Argument(help="Names of jobs and sweeps.", show_default=False)]


def up(
    cluster: Annotated[Path | None, typer.Argument(help="Cluster settings in YAML.", show_default=False)] = None,
    settings: Settings = [],  # noqa: B006
) -> None:
    """Start the scheduler, or find it, on the cluster of RAY_ADDRESS; without one, on this machine."""
    from tlora.cluster import load_cluster

    spec = load_cluster(cluster, settings)
    with quiet():
        from tlora.client import Client

        client, where = Client.up(spec)
        theirs, ours = client.settings(), spec.model_dump()
        if other := [f"{key}: {theirs.get(key)!r}" for key in ours if theirs.get(key) != ours[key]]:
            typer.echo(f"it was up already, with {', '.join(other)}. `tlora down` first, for other settings.")
        waiting = sum(row["state"] not in _AT_REST for row in client.status())
        typer.echo(f"the scheduler is up at {where}, with {waiting} job(s) to go on with. `tlora submit` sends jobs.")
        if theirs["gpus_per_worker"] and not client.num_gpus():
            typer.echo("no node has a GPU now, so jobs wait until one has; with gpus_per_worker: 0 they train on CPUs.")


def submit(
    jobs: Annotated[list[Path], typer.Argument(help="Files of jobs and sweeps in YAML.", show_default=False)],
    overrides: Set = [],  # noqa: B006
    wait: Annotated[bool, typer.Option("--wait", help="Stay until they have ended.")] = False,
    attached: Annotated[bool, typer.Option("--attached", help="Cancel them if this command is stopped.")] = False,
) -> None:
    """Send jobs and sweeps to the cluster, checked first. They run on when this command is gone."""
    from tlora.sweep_spec import is_sweep, load_sweep

    sweeps = [load_sweep(path, overrides) for path in jobs if is_sweep(path)]
    specs = load_jobs([path for path in jobs if not is_sweep(path)], overrides)
    with quiet():
        from tlora.client import Client
        from tlora.console import LiveRows, Screen, print_losses
        from tlora.local import prepare

        console = Screen()
        console.print(f"checking {len(specs)} job(s) and {len(sweeps)} sweep(s) …", highlight=False)
        print_losses(console, prepare([*specs, *(sweep.first for sweep in sweeps)]))
        client = Client()
        known = {row["name"] for row in client.status()} if sweeps else set()
        new = client.submit(specs, check=False)
        begun = [sweep.name for sweep in sweeps if client.sweep(sweep, check=False)]
        new += [name for name in begun if name not in known]
        names = [spec.name for spec in (*specs, *sweeps)]
        console.print(f"{len(new)} new, {len(names) - len(new)} known already", highlight=False)
        for name in known.intersection(begun):
            console.print(f"{name} goes on by its new budget", highlight=False)
        for row in client.status(names):
            if row["name"] not in new and (State(row["state"]).is_terminal or row["state"] == "paused"):
                is_over = row["state"] == "finished"
                hint = "another name trains it anew" if is_over else "`tlora resume` lets it go on from its last save"
                console.print(f"{row['name']} is {row['state']} already: {hint}", highlight=False)
        if not (wait or attached):
            return
        leaving = "cancelling the jobs, saved" if attached else "leaving; the jobs run on"
        with stop_on_signal(leaving) as stopped, LiveRows(console) as table:

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


def status(
    names: Annotated[list[str] | None, typer.Argument(help="Names of jobs; all if none.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Show the cluster's jobs."""
    with quiet():
        import json

        from tlora.client import Client
        from tlora.console import Screen, rows_table

        rows = Client().status(names or None)
        if as_json:
            typer.echo(json.dumps(rows, indent=1))
        else:
            screen = Screen()
            screen.print(rows_table(rows, screen.width))


def top() -> None:
    """Show the cluster's jobs as they change, until Ctrl-C."""
    with quiet():
        import time

        from tlora.client import Client
        from tlora.console import LiveRows, Screen

        client = Client()
        with stop_on_signal("leaving") as stopped, LiveRows(Screen()) as table:
            while not stopped:
                table.show(client.status())
                time.sleep(0.5)


def logs(
    name: Annotated[str, typer.Argument(help="Name of a job.", show_default=False)],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job has ended.")] = False,
) -> None:
    """Show what happened to a job, and how far it has come."""
    with quiet():
        import time
        from datetime import datetime

        from tlora.client import Client
        from tlora.console import row_line

        client, after, told, told_s = Client(), 0, "", -_PROGRESS_S
        while True:
            (row,) = client.status([name])
            has_ended = State(row["state"]).is_terminal
            while events := client.events(after, name):  # some at a time
                for event in events:
                    when = datetime.fromtimestamp(event["time_s"]).isoformat(" ", "seconds")
                    typer.echo(f"{when} {name} {event['state']} {event['reason']}".rstrip())
                after = events[-1]["number"]
            line, is_due = row_line(row), has_ended or time.monotonic() - told_s >= _PROGRESS_S
            if line and line != told and is_due:
                told, told_s = line, time.monotonic()
                when = datetime.fromtimestamp(row["changed_s"] if has_ended else time.time()).isoformat(" ", "seconds")
                typer.echo(f"{when} {name} {line}")
            if not follow or has_ended:
                return
            time.sleep(0.5)


def pause(names: Names) -> None:
    """Save jobs and take them off their workers."""
    with quiet():
        from tlora.client import Client

        Client().pause(names)
        typer.echo(f"pausing {', '.join(names)}: `tlora status` shows when they are saved")


def resume(names: Names) -> None:
    """Let jobs go on that are paused, cancelled or failed, from their last saves."""
    with quiet():
        from tlora.client import Client

        Client().resume(names)
        typer.echo(f"{', '.join(names)}: to go on, if anything is left to do; `tlora status` shows it")


def cancel(
    names: Names,
    keep: Annotated[bool, typer.Option("--keep", help="Save their exact state first.")] = False,
) -> None:
    """End jobs."""
    with quiet():
        from tlora.client import Client

        Client().cancel(names, keep=keep)
        typer.echo(f"cancelling {', '.join(names)}{', saved' if keep else ''}")


def fork(
    name: Annotated[str, typer.Argument(help="Name of a job, or of a sweep.", show_default=False)],
    new: Annotated[str, typer.Argument(help="Name of the new job; of a sweep, none.", show_default=False)] = "",
    overrides: Set = [],  # noqa: B006
) -> None:
    """Submit a job like another, with changes, from its newest adapter; in a sweep, one like its leader."""
    with quiet():
        from tlora.client import Client

        client = Client()
        if not new:
            leader = client.fork_leader(name, overrides)
            typer.echo(f"{name} takes in one more candidate, like {leader}; `tlora status` shows it")
            return
        (row,) = client.status([client.fork(name, new, overrides)])
        typer.echo(f"{new} is in the queue; it trains into {row['output']}")


def down() -> None:
    """End the scheduler and its groups, every job saved; and the local cluster, if `tlora up` started one."""
    with quiet():
        from tlora import local_cluster
        from tlora.client import Client

        missing = None
        try:
            client = Client(any_version=True)
            typer.echo("saving what runs …")
            client.down()
        except GoneError as error:
            missing = error
        if "RAY_ADDRESS" not in os.environ:  # not after another error: what runs is not saved then
            local_cluster.stop()
        if missing:
            raise missing
        typer.echo("down. The next `tlora up` with the same state and storage goes on with what is left.")


commands = (up, submit, status, top, logs, pause, resume, cancel, fork, down)

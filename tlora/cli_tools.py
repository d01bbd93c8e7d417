"""What the commands share: job files by name, a quiet terminal, signals that let a command end well."""

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from tlora.errors import SpecError

Jobs = Annotated[list[Path], typer.Argument(help="Job files in YAML.", show_default=False)]
Set = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a field of every job, as in optim.lr=1e-4.")
]


def load_jobs(paths: list[Path], overrides: list[str]) -> "list[JobSpec]":  # type: ignore[name-defined]  # noqa: F821
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


@contextmanager
def quiet() -> Iterator[None]:
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
def stop_on_signal(
    text: str = "saving and pausing after this tick; once more to end at once",
) -> Iterator[list[int]]:
    """Collect the first Ctrl-C, SIGTERM or SIGHUP (a connection that is gone, but for `nohup`) in the list that is
    yielded, and say so; a second one interrupts."""
    stopped: list[int] = []

    def stop(number: int, frame: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)
        with suppress(OSError):  # by descriptor: the signal may have come amid a write to the stream
            os.write(2, f"\n{text}\n".encode())

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

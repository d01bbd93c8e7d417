"""What a job reports: `metrics.jsonl` always, and one Weights & Biases run per adapter when asked.

A tracker that fails is put aside with a warning; training goes on. Called by the trainer.
"""

import json
import logging
import math
import secrets
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from tlora.errors import TloraError
from tlora.files import atomic_path
from tlora.spec import JobSpec

log = logging.getLogger("tlora")
METRICS = "metrics.jsonl"
_PATIENCE_S = 60


class _Sink(Protocol):
    def write(self, row: dict[str, Any]) -> None: ...
    def close(self, failed: bool) -> None: ...


class _Jsonl:
    """One line a row; on resume, rows past the saved step are taken back, for they will be measured again, and so is
    that step's evaluation if it was under way."""

    def __init__(self, path: Path, step: int, evaluating: bool):
        if path.exists():
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            kept = [line for line in lines if _is_measured(line, step, evaluating)]
            with atomic_path(path) as temporary:
                temporary.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def write(self, row: dict[str, Any]) -> None:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
        }
        self._file.write(json.dumps(finite) + "\n")

    def close(self, failed: bool) -> None:
        self._file.close()


class _Wandb:
    """A run of its own in this process. Its steps are the job's own: W&B drops what a resumed job measures again."""

    def __init__(self, spec: JobSpec, run_id: str, folder: Path):
        import wandb

        tracking = spec.tracking
        self._run = wandb.init(
            project=tracking.project,
            entity=tracking.entity,
            group=tracking.group,
            tags=list(tracking.tags),
            name=spec.name,
            id=run_id,
            resume="allow",
            reinit="create_new",
            mode=tracking.wandb,
            dir=str(folder),
            config=spec.model_dump(),
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=_PATIENCE_S,
                login_timeout=_PATIENCE_S,
                finish_timeout=_PATIENCE_S,  # else the process waits for the network when it ends
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        self._run.log(row, step=row["step"])

    def close(self, failed: bool) -> None:
        """Upload what is left; a slow network holds the neighbours up for a bounded time."""
        ending = Thread(target=self._run.finish, kwargs={"exit_code": int(failed)}, daemon=True)
        ending.start()
        ending.join(_PATIENCE_S)
        if ending.is_alive():
            raise TimeoutError(f"it could not be finished within {_PATIENCE_S} s")


class Tracker:
    """The sinks of one job. `run_id` names its W&B run, and goes into its checkpoints."""

    def __init__(self, spec: JobSpec, folder: Path, *, step: int, evaluating: bool = False, run_id: str | None):
        self.name, self.run_id = spec.name, run_id or secrets.token_hex(8)
        self._sinks: list[_Sink] = []
        self._open(lambda: _Jsonl(folder / METRICS, step, evaluating))
        if spec.tracking.wandb != "disabled":
            self._open(lambda: _Wandb(spec, self.run_id, folder))

    def write(self, row: dict[str, Any]) -> None:
        """Send one row of numbers; it holds `step`."""
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: sink.write(row))

    def close(self, *, failed: bool = False) -> None:
        for sink in list(self._sinks):
            self._guard(sink, lambda sink=sink: sink.close(failed))
        self._sinks.clear()

    def _open(self, make: Any) -> None:
        try:
            self._sinks.append(make())
        except Exception as error:  # a tracker is never worth a job
            log.warning("job=%s a tracker could not be opened and is left out: %s", self.name, error)

    def _guard(self, sink: _Sink, action: Any) -> None:
        try:
            action()
        except Exception as error:  # a tracker is never worth a job
            self._sinks.remove(sink)
            log.warning("job=%s its %s failed and is put aside: %s", self.name, type(sink).__name__.strip("_"), error)


class Silent(Tracker):
    """Of a job whose rows another rank writes."""

    def __init__(self, run_id: str | None):
        self.name, self.run_id = "", run_id or ""
        self._sinks = []


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of a job's metrics.jsonl. Raises TloraError if a line is no JSON."""
    rows = []
    for number, line in enumerate((folder / METRICS).read_text().splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise TloraError(f"{folder / METRICS}: line {number} is no JSON: {error}.") from None
    return rows


def _is_measured(line: str, step: int, evaluating: bool) -> bool:
    """Whether a line holds what a job saved at `step` will not measure again."""
    try:
        row = json.loads(line)
        at = int(row["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return False
    return at < step or (at == step and not (evaluating and "eval_loss" in row))

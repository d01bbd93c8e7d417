"""`tlora logs`: all that happened to a job, however much, and how far it came, dated when that was."""

from datetime import datetime
from typing import Any

import pytest
from typer.testing import CliRunner

import tlora.client
from tlora.cli import app


class Scheduler:
    """Tells of two events at a time."""

    def status(self, names: list[str]) -> list[dict[str, Any]]:
        row = {"name": "a", "state": "finished", "step": 4, "num_steps": 4, "loss": 2.5, "eval_loss": None}
        return [{**row, "tokens_per_s": 0.0, "reason": "", "changed_s": 86400.0}]

    def events(self, after: int, name: str) -> list[dict[str, Any]]:
        numbers = range(after + 1, min(after + 2, 5) + 1)
        return [{"number": n, "state": "queued", "reason": f"for the {n}.", "time_s": 0.0} for n in numbers]


@pytest.mark.parametrize("options", [[], ["-f"]])
def test_all_events_are_shown(options: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tlora.client, "Client", Scheduler)
    said = CliRunner().invoke(app, ["logs", "a", *options])
    assert said.exit_code == 0, said.output
    lines = said.output.splitlines()
    assert [line.rpartition("for the ")[2] for line in lines[:5]] == ["1.", "2.", "3.", "4.", "5."]
    assert lines[5].startswith(datetime.fromtimestamp(86400.0).isoformat(" ", "seconds"))
    assert len(lines) == 6

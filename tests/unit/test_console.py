"""What people see of a cluster's jobs: in a wide terminal, a narrow one, and a file."""

import io
from typing import Any

import pytest

from tlora.console import LiveRows, Screen, row_line, rows_table

RUNNING: dict[str, Any] = {
    "name": "sum-3", "state": "running", "reason": "", "step": 12, "num_steps": 400, "loss": 1.25, "eval_loss": None,
    "tokens_per_s": 5120.0, "worker": "9f3c21aa",
}  # fmt: skip
WAITING = {
    **RUNNING, "name": "dates-3", "state": "queued", "reason": "waits for 2 worker(s) that are starting",
    "step": 0, "num_steps": 0, "loss": None, "worker": "", "tokens_per_s": 0.0,
}  # fmt: skip


def shown(width: int) -> list[str]:
    file = io.StringIO()
    screen = Screen(file=file, width=width)
    screen.print(rows_table([RUNNING, WAITING], screen.width))
    return file.getvalue().splitlines()


def test_a_row_is_a_line_in_eighty_columns() -> None:
    assert len(shown(80)) == 3
    assert "waits for 2 worker(s) that are starting" in shown(80)[2]
    assert "9f3c21aa" in shown(140)[1]
    assert "5,120" in shown(140)[1]


def test_a_file_gets_a_line_for_what_is_new_and_for_progress_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now_s = io.StringIO(), [100.0]
    monkeypatch.setattr("tlora.console.time.monotonic", lambda: now_s[0])
    with LiveRows(Screen(file=file)) as live:
        for _ in range(3):
            live.show([RUNNING, WAITING])
        live.show([RUNNING, {**WAITING, "reason": "no node has room"}])
        now_s[0] += 60.0
        live.show([{**RUNNING, "step": 99}, {**WAITING, "reason": "no node has room"}])
    assert file.getvalue().splitlines() == [
        "sum-3: running step 12/400 loss 1.2500",
        "dates-3: queued waits for 2 worker(s) that are starting",
        "dates-3: queued no node has room",
        "sum-3: running step 99/400 loss 1.2500",
    ]


def test_how_far_a_job_has_come() -> None:
    assert row_line({**RUNNING, "eval_loss": 0.5}) == "step 12/400 loss 1.2500 eval loss 0.5000"
    assert row_line(WAITING) == ""

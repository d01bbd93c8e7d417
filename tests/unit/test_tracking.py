"""What a job reports: every line whole, nothing measured twice, and no tracker worth a job."""

import json
import logging
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tlora.errors import TloraError
from tlora.spec import JobSpec, parse_job
from tlora.tracking import METRICS, Tracker, read_metrics


def job(name: str = "a", **tracking: object) -> JobSpec:
    values = {"name": name, "base": {"model": "m"}, "data": {"path": "p"}, "tracking": tracking}
    return parse_job(values)


def write(folder: Path, *lines: str) -> None:
    (folder / METRICS).write_text("".join(lines))


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def test_rows_are_there_at_once(tmp_path: Path) -> None:
    """Read while the job runs: a line is whole as soon as it is written."""
    tracker = Tracker(job(), tmp_path, step=0, run_id=None)
    for step in (1, 2):
        tracker.write({"step": step, "loss": 0.5})
        assert steps(tmp_path) == list(range(1, step + 1))
    tracker.close()
    assert read_metrics(tmp_path)[1] == {"step": 2, "loss": 0.5}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_null(tmp_path: Path, value: float) -> None:
    Tracker(job(), tmp_path, step=0, run_id=None).write({"step": 1, "loss": value})
    assert (tmp_path / METRICS).read_text() == '{"step": 1, "loss": null}\n'


def test_rows_past_the_saved_step_are_taken_back(tmp_path: Path) -> None:
    """Killed at step 7, half-way through a line; saved at step 4, with that step's evaluation."""
    rows = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(1, 8)]
    write(tmp_path, *rows[:4], '{"step": 4, "eval_loss": 1.0}\n', "no JSON\n", "[3]\n", *rows[4:], '{"step": 8, "lo')
    tracker = Tracker(job(), tmp_path, step=4, run_id="x")
    assert steps(tmp_path) == [1, 2, 3, 4, 4]
    tracker.write({"step": 5})
    assert steps(tmp_path) == [1, 2, 3, 4, 4, 5]
    tracker.close()


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    write(tmp_path, '{"step": 1}\n', "what\n")
    with pytest.raises(TloraError, match=r"metrics\.jsonl: line 2 is no JSON"):
        read_metrics(tmp_path)


def test_a_tracker_that_fails_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        rows = 0

        def write(self, row: dict) -> None:
            self.rows += 1
            raise ConnectionError("no route to host")

        def close(self, failed: bool) -> None:
            raise AssertionError("closed after it was put aside")

    tracker, failing = Tracker(job("sum-3"), tmp_path, step=0, run_id=None), Failing()
    tracker._sinks.insert(0, failing)
    with caplog.at_level(logging.WARNING, "tlora"):
        for step in (1, 2, 3):
            tracker.write({"step": step})
        tracker.close()
    assert failing.rows == 1
    assert steps(tmp_path) == [1, 2, 3]
    assert caplog.messages == ["job=sum-3 its Failing failed and is put aside: no route to host"]


def test_a_tracker_that_fails_to_end_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(job("sum-3"), tmp_path, step=0, run_id=None)
    sink = tracker._sinks[0]
    sink.close = lambda failed: (_ for _ in ()).throw(OSError("disk gone"))
    with caplog.at_level(logging.WARNING, "tlora"):
        tracker.close()
    assert caplog.messages == ["job=sum-3 its Jsonl failed and is put aside: disk gone"]


def test_a_tracker_that_cannot_be_opened_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.CommError("no key")

    monkeypatch.setattr(wandb, "init", refuse)
    with caplog.at_level(logging.WARNING, "tlora"):
        tracker = Tracker(job("sum-3", wandb="online"), tmp_path, step=0, run_id=None)
    assert caplog.messages == ["job=sum-3 a tracker could not be opened and is left out: no key"]
    tracker.write({"step": 1})
    assert steps(tmp_path) == [1]


def test_no_process_waits_for_the_network_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    asked: dict[str, Any] = {}
    monkeypatch.setattr(wandb, "init", lambda **options: asked.update(options) or MagicMock())
    Tracker(job("sum-3", wandb="online"), tmp_path, step=0, run_id=None)
    assert 0 < asked["settings"].finish_timeout <= 60


def test_a_run_keeps_its_id(tmp_path: Path) -> None:
    ids = {Tracker(job(), tmp_path, step=0, run_id=None).run_id for _ in range(3)}
    assert len(ids) == 3
    assert Tracker(job(), tmp_path, step=0, run_id="given").run_id == "given"


# ---- Weights & Biases, offline: real runs, read back from the files they write


def records_under(folder: Path) -> list:
    """Records of the one run there: a file header of 7 bytes, then a log in LevelDB's format (blocks of 32 KiB; parts
    with checksum, length, and whether they begin, continue or end a record)."""
    from wandb.proto import wandb_internal_pb2 as proto

    (path,) = folder.rglob("run-*.wandb")
    raw, at, whole, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(raw):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack_from("<IHB", raw, at)
        whole += raw[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or last
            found.append(proto.Record.FromString(whole))
            whole = b""
    return found


def rows_in(records: list) -> list[dict]:
    rows = []
    for record in records:
        if record.HasField("history"):
            items = {
                (item.key or ".".join(item.nested_key)): json.loads(item.value_json) for item in record.history.item
            }
            rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


@pytest.fixture
def end_service() -> Iterator[Callable[[], None]]:
    """Its service is a process of its own, which writes the files: they are whole when it has ended."""
    import wandb

    yield wandb.teardown
    wandb.teardown()


def test_two_runs_in_one_process_stay_apart(tmp_path: Path, end_service: Callable[[], None]) -> None:
    folders = {name: tmp_path / name for name in "ab"}
    for folder in folders.values():
        folder.mkdir()
    trackers = {name: Tracker(job(name, wandb="offline", project="toy"), folder, step=0, run_id=f"id-{name}")
                for name, folder in folders.items()}  # fmt: skip
    for step in (1, 2, 3):
        trackers["a"].write({"step": step, "loss": step / 2})
        trackers["b"].write({"step": step + 40, "loss": step / 4})
    trackers["a"].close()
    trackers["b"].write({"step": 44, "loss": 1.0})
    trackers["b"].close(failed=True)
    end_service()
    want = {"a": [(1, 0.5), (2, 1.0), (3, 1.5)], "b": [(41, 0.25), (42, 0.5), (43, 0.75), (44, 1.0)]}
    for name, folder in folders.items():
        records = records_under(folder)
        runs = [record.run for record in records if record.HasField("run")]
        assert {(run.run_id, run.display_name, run.project) for run in runs} == {(f"id-{name}", name, "toy")}
        assert [(row["step"], row["loss"]) for row in rows_in(records)] == want[name]
        metrics = [record.metric for record in records if record.HasField("metric")]
        assert ("*", "step") in {(metric.glob_name, metric.step_metric) for metric in metrics}
        exits = [record.exit.exit_code for record in records if record.HasField("exit")]
        assert exits == [int(name == "b")]
        assert [(row["step"], row["loss"]) for row in read_metrics(folder)] == want[name]

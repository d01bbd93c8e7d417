"""A machine with nothing on it: `tlora up` without RAY_ADDRESS, the example, and a job that outlives a kill of all."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import toy
import yaml

SETTINGS = ("gpus_per_worker=0", "max_workers=1", "deterministic=true", "save_every_s=1", "lost_after_s=4")


class Machine:
    """A user's home, in which Ray starts and nothing of another Ray is seen."""

    def __init__(self, home: Path, short: Path):
        self.home, self.short = home, short
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TLORA_"))}
        self.shell = {**mine, "HOME": str(home), "TLORA_HOME": str(short), "TMPDIR": str(short),
                      "PYTHONPATH": str(toy.ROOT), "OMP_NUM_THREADS": "1"}  # fmt: skip

    def run(self, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=self.shell, cwd=self.home, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def up(self) -> str:
        return self.run("-m", "tlora", "up", *(part for text in SETTINGS for part in ("--set", text)))

    def processes(self) -> list[psutil.Process]:
        """Of its Ray."""
        known = self.short / "local_cluster.json"
        if not known.exists() or not psutil.pid_exists(pid := json.loads(known.read_text())["pid"]):
            return []
        head = psutil.Process(pid)
        return [head, *head.children(recursive=True)]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    toy.write_base(tmp_path)
    with tempfile.TemporaryDirectory(prefix="tl") as short:
        made = Machine(tmp_path, Path(short))
        yield made
        kill(made.processes())


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        if process.is_running():  # nor is it another one of its number
            process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive


def test_from_a_bare_machine_to_a_job_resumed_after_all_was_killed(machine: Machine) -> None:
    spec = toy.named_job(machine.home, "long", steps=150, save_every=10)
    (machine.home / "long.yaml").write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True)))
    assert "with 0 job(s) to go on with" in machine.up()
    machine.run("-m", "tlora", "submit", "long.yaml")
    metrics = spec.folder / "metrics.jsonl"
    toy.until(lambda: metrics.exists() and metrics.read_text().count("\n") > 12)
    before = machine.processes()
    assert len(before) > 5
    kill(before)

    assert "with 1 job(s) to go on with" in machine.up()
    (machine.home / "outputs/demo").mkdir(parents=True)
    (machine.home / "base").rename(machine.home / "outputs/demo/base")
    (machine.home / "base").symlink_to("outputs/demo/base")
    assert "2 new job(s)" in machine.run(str(toy.ROOT / "examples/submit_and_forget.py"))
    assert "long finished" in machine.run("-m", "tlora", "logs", "-f", "long")
    rows = {each["name"]: each for each in json.loads(machine.run("-m", "tlora", "status", "--json"))}
    assert rows["long"]["attempt"] >= 2
    assert toy.equals_alone(spec)
    assert {rows[f"sums-rank{rank}"]["state"] for rank in (4, 16)} <= {"queued", "attaching", "running", "finished"}
    after = machine.processes()
    machine.run("-m", "tlora", "down")
    _, alive = psutil.wait_procs(after, timeout=30)
    assert not alive
    assert not machine.processes()

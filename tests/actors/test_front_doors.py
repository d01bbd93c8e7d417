"""The commands as users give them, on a Ray of their own with its token: from `tlora up` to `tlora down`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import toy
import yaml

from tlora.checkpoint import STATE, read_meta

RAY_MAIN = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
SECRETS = {"WANDB_API_KEY": "hush-wandb-0123456789", "HF_TOKEN": "hush-hub-0123456789"}
Shell = dict[str, str]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """The environment of a user with a Ray head of one machine, dashboard and all, started by hand."""
    toy.write_base(tmp_path)
    with tempfile.TemporaryDirectory(prefix="tl") as short:
        (token := tmp_path / "token").write_text("0123456789abcdef" * 4)
        changes = {"HOME": str(tmp_path), "PYTHONPATH": str(toy.ROOT), "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token",
                   "RAY_AUTH_TOKEN_PATH": str(token), "RAY_TMPDIR": short, **SECRETS,
                   "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # fmt: skip
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            metrics = str(free.getsockname()[1])
        environment = {**{key: os.environ[key] for key in os.environ if not key.startswith("RAY_")}, **changes}
        command = [*RAY_MAIN, "start", "--head", "--block", "--port=0", "--num-cpus=4", "--node-ip-address=127.0.0.1",
                   "--dashboard-port=0", "--dashboard-agent-listen-port=0",  # else that of another Ray here
                   f"--metrics-export-port={metrics}", "--disable-usage-stats",
                   "--object-store-memory=150000000"]  # fmt: skip
        log = tmp_path / "ray.log"
        with log.open("w") as out:
            head = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            toy.until(lambda: "Ray runtime started" in log.read_text() or head.poll() is not None)
            found = re.search(r"--address='([^']+)'", log.read_text())
            assert found, log.read_text()
            yield {**environment, "RAY_ADDRESS": found[1], "METRICS": metrics}
        finally:
            head.terminate()
            head.wait(60)


def tlora(shell: Shell, *arguments: str, wanted: int = 0) -> str:
    command = [sys.executable, "-m", "tlora", *arguments]
    done = subprocess.run(command, env=shell, cwd=shell["HOME"], capture_output=True, text=True, timeout=300)
    assert done.returncode == wanted, done.stdout + done.stderr
    return done.stdout


def through_ray(shell: Shell, *arguments: str) -> str:
    """What Ray's command says; nothing while its head has no agent yet to run a job, as it says itself."""
    done = subprocess.run([*RAY_MAIN, *arguments], env=shell, capture_output=True, text=True, timeout=300)
    return "" if "No available agent" in done.stderr else done.stdout + done.stderr


def rows(shell: Shell) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(tlora(shell, "status", "--json"))}


def write(folder: Path, name: str, **changes: object) -> str:
    """A job's file with relative paths, as users write them."""
    values = toy.named_job(folder, name, **changes).model_dump(mode="json", exclude_unset=True)
    values |= {"base": {"model": "base"}, "data": {**values["data"], "path": "rows.jsonl"}, "output": f"out/{name}"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return f"{name}.yaml"


def test_from_up_to_down(shell: Shell, tmp_path: Path) -> None:
    settings = ["gpus_per_worker=0", "max_workers=1", "deterministic=true", f"state={tmp_path / 'state'}"]
    tlora(shell, "up", *(part for text in settings for part in ("--set", text)))
    bad = write(tmp_path, "bad", data={"path": "nothing.jsonl"})
    (tmp_path / bad).write_text((tmp_path / bad).read_text().replace("rows.jsonl", "nothing.jsonl"))
    tlora(shell, "submit", bad, wanted=2)
    assert not rows(shell), "a bad job is refused before it is sent"
    top, seen = start(shell, "top", said="top.txt"), tmp_path / "top.txt"

    job = write(tmp_path, "through-ray", steps=4)
    entry = ["job", "submit", "--working-dir", str(tmp_path / "jobs"), "--", sys.executable, "-m", "tlora"]
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / job).write_text(
        (tmp_path / job).read_text().replace("model: base", f"model: {tmp_path}/base").replace(
            "path: rows", f"path: {tmp_path}/rows"
        )
    )  # fmt: skip
    said = toy.until(lambda: through_ray(shell, *entry, "submit", job, "--wait"))
    assert "succeeded" in said, said
    toy.until(lambda: "through-ray: finished" in seen.read_text())
    assert (tmp_path / "out" / "through-ray" / "adapter_model.safetensors").exists()

    stays = start(shell, "submit", write(tmp_path, "stays", steps=100_000, save_every=100_000), "--wait")
    goes = start(shell, "submit", write(tmp_path, "goes", steps=100_000), "--attached")
    toy.until(lambda: all(f"{name}: running" in seen.read_text() for name in ("stays", "goes")))
    follow = start(shell, "logs", "-f", "stays", said="logs.txt")
    for driver in (stays, goes):
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(60) == 130
    toy.until(lambda: "goes: cancelled" in seen.read_text())
    assert rows(shell)["stays"]["state"] == "running"
    reached = toy.until(lambda: re.findall(r"stays step (\d+)/100000 loss \d", (tmp_path / "logs.txt").read_text()))

    for _ in range(2):  # each is idempotent
        tlora(shell, "pause", "stays")
        toy.until(lambda: "stays: paused paused by its user" in seen.read_text())
    saved = read_meta(tmp_path / "out" / "stays")["step"]
    assert saved >= int(reached[-1])
    tlora(shell, "fork", "stays", "child", "--set", "steps=100000")
    toy.until(lambda: "child: running" in seen.read_text())
    toy.until(lambda: int(exported(shell, "steps", "stays")) >= saved)
    for _ in range(2):
        tlora(shell, "resume", "stays")
    toy.until(lambda: rows(shell)["stays"]["step"] > saved)
    for _ in range(2):
        tlora(shell, "cancel", "--keep", "stays")
        toy.until(lambda: "stays: cancelled" in seen.read_text())
    tlora(shell, "cancel", "child")
    toy.until(lambda: "child: cancelled" in seen.read_text())
    assert read_meta(tmp_path / "out" / "stays")["step"] > saved, "kept"
    assert not (tmp_path / "out" / "child" / STATE).exists(), "not kept"
    assert follow.wait(60) == 0, "it ends with its job"
    states = re.findall(r"stays (\w+)(?: .*)?$", (tmp_path / "logs.txt").read_text(), re.M)
    told = [state for state, _ in groupby(state for state in states if state != "step")]  # to be paused, it runs on
    assert told == ["queued", "attaching", "running", "paused", "queued", "attaching", "running", "cancelled"]
    top.send_signal(signal.SIGINT)
    assert top.wait(60) == 0
    tlora(shell, "down")
    tlora(shell, "down", wanted=2)
    assert_kept(tmp_path, Path(shell["RAY_TMPDIR"]))


def exported(shell: Shell, what: str, job: str) -> float:
    """What Ray exports of a job's counter, to whoever scrapes its port: some seconds later than it is."""

    def scrape() -> list[str]:
        with urllib.request.urlopen(f"http://127.0.0.1:{shell['METRICS']}/metrics") as page:
            return re.findall(rf'^ray_tlora_{what}_total{{.*job="{job}".*}} (\S+)$', page.read().decode(), re.M)

    return float(toy.until(scrape)[-1])


def assert_kept(*folders: Path) -> None:
    """No file of the journal, the storage or the logs holds a secret of the environment."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"journal.db", "ray.log"} <= names
    assert any("worker" in name and name.endswith(".err") for name in names), "Ray's logs were looked through, too"
    assert any(path.parent.name == "journal" for path in files), "and the storage's objects"
    assert not [path for path in files if b"hush-" in path.read_bytes()]


def start(shell: Shell, *arguments: str, said: str = os.devnull) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tlora", *arguments]
    with Path(shell["HOME"], said).open("w") as out:
        return subprocess.Popen(command, env=shell, cwd=shell["HOME"], stdout=out, stderr=subprocess.DEVNULL)

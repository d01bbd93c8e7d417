"""Settings of a cluster, and the token of a local one."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tlora import cli_cluster, client, local_cluster
from tlora.client import Client
from tlora.cluster import ClusterSpec, load_cluster
from tlora.errors import ClusterError, GoneError, SpecError
from tlora.plan import Plan


def test_without_a_file_it_is_this_machine_and_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = load_cluster(None, ["max_workers=3"])
    assert (spec.storage, spec.max_workers) == (str(tmp_path), 3)
    assert spec.gpus_per_worker == int(Path("/dev/nvidiactl").exists())


def test_a_file_is_read_and_overridden(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("storage: s3://bucket/x\noutputs: /mnt/out\ngpus_per_worker: 0\n")
    spec = load_cluster(path, ["idle_s=5"])
    assert (spec.storage, spec.gpus_per_worker, spec.idle_s) == ("s3://bucket/x", 0, 5.0)
    assert spec.output_root == Path("/mnt/out")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_workers: 2\n", "'storage' is missing."),
        ("storage: x\nworkers: 2\n", "unknown key 'workers'. Did you mean 'max_workers'?"),
        ("storage: x\ngpus_per_worker: 4\n", "gpus_per_worker = 4: want at most 1."),
        ("storage: s3://x\n", "outputs: want a folder for the jobs' outputs, for the storage is none"),
        ("storage: x\noutputs: gs://x\n", "outputs: want a folder that every node reaches"),
        ("storage: x\nresize: sometimes\n", "resize = 'sometimes': want one of 'in_place' or 'restart'."),
        ("storage: x\nplan: {shards: 9}\n", "plan: takes 9 workers; want at most max_workers, 8"),
        ("storage: x\nplan: {shard: 2}\n", "unknown key 'plan.shard'."),
        ("storage: x\nplan: {shards: 2.5}\n", "plan.shards = 2.5: want an integer."),
        ("storage: x\nplan: 2\n", "plan = 2: want a mapping."),
        ("storage: x\nplan: best\n", "plan = 'best': want one of 'auto'."),
        ("storage: x\nidle_s: .nan\n", "idle_s = nan: want a finite number."),
        ("storage: x\njobs_per_worker: 65\n", "jobs_per_worker: want at most 64 where several workers may hold a base"),
    ],
)
def test_faults_are_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as raised:
        load_cluster(path)
    assert str(raised.value).startswith(str(path))
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "storage: s3://AKEY:hush@bucket/x\noutputs: /mnt/out\n",
        "storage: s3://AKEY:hu/hush@bucket\noutputs: /mnt/out\n",
        "storage: abfs://c@a.dfs.core.windows.net/x?client_secret=hush\noutputs: /mnt/out\n",
        "storage: x\noutputs: gs://me:hush@bucket\n",
        "storage: x\nprofile: s3://AKEY:hush@bucket/p\n",
    ],
)
def test_credentials_are_refused_and_not_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="want an address without credentials") as raised:
        load_cluster(path)
    assert "hush" not in str(raised.value)
    with pytest.raises(ValidationError) as invalid:
        ClusterSpec.model_validate(yaml.safe_load(text))
    assert "hush" not in str(invalid.value)


@pytest.mark.parametrize("storage", ["gs://anonymous@b/x", "abfs://c@a.dfs.core.windows.net/x", "hdfs://h:8020/a@b"])
def test_addresses_without_secrets_are_none(storage: str) -> None:
    assert ClusterSpec(storage=storage, outputs="/mnt/out").storage == storage


def test_a_plan_of_several_workers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("storage: x\nplan: {shards: 2, tensor: 4}\n")
    plan = load_cluster(path).plan
    assert plan != "auto"
    assert plan.plan == Plan(shards=2, tensor=4)
    alone = load_cluster(None, ["plan={replicas: 1}", "jobs_per_worker=65"])
    assert alone.jobs_per_worker == 65


def test_a_local_cluster_has_a_token_that_only_its_user_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    local_cluster._use_token()
    token = tmp_path / ".ray" / "auth_token"
    text = token.read_text()
    assert len(text) == 64
    assert token.stat().st_mode & 0o777 == 0o600
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    local_cluster._use_token()
    assert (token.read_text(), os.environ["RAY_AUTH_MODE"]) == (text, "disabled")


@pytest.mark.parametrize(("taken", "starts"), [(1, 2), (2, 2), (0, 1)])
def test_a_port_that_another_takes_meanwhile_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, starts: int
) -> None:
    """Before Ray has it; where none is taken, it does not start for another reason."""
    monkeypatch.setenv("TLORA_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ports, popen, others = list[int](), subprocess.Popen, list[socket.socket]()

    def start(command: list[str], **options: Any) -> Any:
        ports.append(next(int(each.partition("=")[2]) for each in command if each.startswith("--port")))
        if len(ports) <= taken:
            others.append(socket.create_server(("127.0.0.1", ports[-1])))
        says = "print('Ray runtime started')" if 0 < taken < len(ports) else "raise SystemExit(1)"
        return popen([sys.executable, "-c", says], **options)

    monkeypatch.setattr(local_cluster.subprocess, "Popen", start)
    if taken == 1:
        assert local_cluster.start() == f"127.0.0.1:{ports[-1]}"
    else:
        with pytest.raises(ClusterError, match="Ray did not start on this machine"):
            local_cluster.start()
    assert len({*ports}) == len(ports) == starts
    for each in others:
        each.close()


def test_a_process_that_has_gone_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "local_cluster.json").write_text('{"pid": 4194303, "address": "127.0.0.1:1"}')
    with pytest.raises(ClusterError, match="no cluster of yours runs here"):  # though a Ray of others may
        local_cluster.address()
    (tmp_path / "local_cluster.json").write_text(f'{{"pid": {os.getpid()}, "address": "127.0.0.1:1"}}')
    with (tmp_path / "local_cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert local_cluster.address() == "127.0.0.1:1"
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    assert local_cluster.address() == "elsewhere:1"


def test_a_process_that_has_its_number_now_is_no_cluster_and_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the machine, or of a container whose home stays."""
    monkeypatch.setenv("TLORA_HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (tmp_path / "local_cluster.json").write_text(json.dumps({"pid": other.pid, "address": "127.0.0.1:1"}))
        (tmp_path / "local_cluster.lock").touch()
        with pytest.raises(ClusterError, match="no cluster of yours runs here"):
            local_cluster.address()
        local_cluster.stop()
        other.communicate(b"\n")
    assert other.returncode == 0


@pytest.mark.parametrize(
    ("error", "stops"),
    [
        (ClusterError("the cluster runs tLoRA 0, this is 1."), False),
        (KeyboardInterrupt(), False),
        (GoneError("this cluster has no tLoRA scheduler."), True),
    ],
)
def test_the_local_ray_ends_only_once_all_is_saved(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, stops: bool
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    stopped = list[bool]()
    monkeypatch.setattr(local_cluster, "stop", lambda: stopped.append(True))

    def fail() -> None:
        raise error

    monkeypatch.setattr(client, "Client", lambda **_: fail() if isinstance(error, ClusterError) else Busy())
    Busy = type("Busy", (), {"down": lambda self: fail()})
    with suppress(BaseException):
        cli_cluster.down()
    assert bool(stopped) is stops


def test_what_another_version_began_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an upgrade, that is; nothing else is asked of it."""
    monkeypatch.setattr(client, "authenticate", lambda: None)
    monkeypatch.setattr(client, "_join", lambda where: None)
    monkeypatch.setattr("tlora.actors.scheduler.connect", lambda: None)
    monkeypatch.setattr(Client, "_call", lambda self, method: "0.0.0")
    with pytest.raises(ClusterError, match=r"the cluster runs tLoRA 0\.0\.0"):
        Client()
    Client(any_version=True)


def test_a_ray_whose_command_was_killed_at_once_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    popen, started = subprocess.Popen, list[Any]()

    def start(command: list[str], **options: Any) -> Any:
        code = command[2].replace("from ray.scripts.scripts import main; main()", "import time; time.sleep(60)")
        assert code != command[2]
        started.append(popen([*command[:2], code, *command[3:]], **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(local_cluster.subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        local_cluster.start()
    deadline_s = time.monotonic() + 10
    while not local_cluster._read() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    known = local_cluster._read()
    local_cluster.stop() if known else started[0].kill()
    assert known
    assert known["pid"] == started[0].pid
    assert local_cluster._read() is None

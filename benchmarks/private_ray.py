"""A Ray of this machine alone, in a folder that goes with it, for benchmarks of CPU workers."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.cluster_utils import Cluster

from tlora.actors.names import NAMESPACE

_HEAD = "f" * 51 + "00000"
_FAKE = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_enable_autoscaler_v2": "1",
         "RAY_CLOUD_INSTANCE_ID": _HEAD, "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD,
         "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}  # fmt: skip
"""Of a head whose nodes are further raylets of this machine."""


@contextmanager
def started(num_cpus: int) -> Iterator[Path]:
    """Its folder, which benchmarks may write to; workers import what this process does."""
    environment = _environment()
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, namespace=NAMESPACE,
                 log_to_driver=False, _temp_dir=folder, runtime_env={"env_vars": environment})  # fmt: skip
        try:
            yield Path(folder)
        finally:
            ray.shutdown()


@contextmanager
def head() -> Iterator[tuple[Path, Cluster]]:
    """The folder, and a cluster of one node without room for workers, which others may join."""
    environment = _environment()
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        os.environ["RAY_TMPDIR"] = folder
        (Path(folder) / "ray").mkdir()
        given = {"num_cpus": 1, "include_dashboard": False, "temp_dir": folder}
        cluster = Cluster(initialize_head=True, head_node_args=given)
        ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False,
                 runtime_env={"env_vars": environment})  # fmt: skip
        try:
            yield Path(folder), cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def autoscaled(most: int = 2, cpus: int = 2) -> Iterator[Path]:
    """The folder, and a head without CPUs whose autoscaler starts up to so many nodes of this machine as they are asked
    for, and ends each that is idle for three seconds. Ray's own `AutoscalingCluster` would end every Ray here."""
    environment = _environment()
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        given = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | environment
        port, metrics = _free_port(), _free_port()
        (config := Path(folder) / "autoscaler.json").write_text(json.dumps(_scaling(port, most, cpus)))
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
                   f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=0", "--include-dashboard=false",
                   "--dashboard-agent-listen-port=0", f"--metrics-export-port={metrics}", "--disable-usage-stats",
                   "--object-store-memory=100000000", f"--temp-dir={folder}",
                   f"--autoscaling-config={config}"]  # fmt: skip
        with (log := Path(folder) / "head.log").open("w") as out:
            head = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, env=given | _FAKE)
        try:
            while "Ray runtime started" not in log.read_text():
                if head.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            ray.init(address=f"127.0.0.1:{port}", namespace=NAMESPACE, log_to_driver=False,
                     runtime_env={"env_vars": environment})  # fmt: skip
            yield Path(folder)
        finally:
            ray.shutdown()
            _end(head, folder)


def _scaling(port: int, most: int, cpus: int) -> dict[str, Any]:
    node = {"resources": {"CPU": cpus, "object_store_memory": 100_000_000}, "min_workers": 0, "max_workers": most}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        **{f"{what}_commands": [] for what in commands},
        **{what: [] for what in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{what: {} for what in ("auth", "docker", "file_mounts")},
        "file_mounts_sync_continuously": False,
        "cluster_name": "fake",
        "max_workers": most,
        "idle_timeout_minutes": 0.05,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "launch_multiple": True,
            "head_node_id": _HEAD,
            "gcs_address": f"127.0.0.1:{port}",
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {**node, "node_config": {}},
        },
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _end(head: "subprocess.Popen[bytes]", folder: str) -> None:
    """With all that it has started, also if it is gone itself. Raises RuntimeError if something stays."""
    mine = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
    head.terminate()
    psutil.wait_procs([head], timeout=20)
    mine += [
        process for process in psutil.process_iter(["cmdline"]) if folder in " ".join(process.info["cmdline"] or ())
    ]
    for process in mine:
        if process.is_running():  # nor is it another one of its number
            process.kill()
    _, alive = psutil.wait_procs(mine, timeout=20)
    if alive:
        raise RuntimeError(f"processes that do not end: {alive}")


def _environment() -> dict[str, str]:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    path = os.environ.get("PYTHONPATH") or os.getcwd()
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}

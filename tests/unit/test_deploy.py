"""The cluster files: Ray's own validators accept them, and they keep what they promise. No cloud SDK, no network.

KubeRay's CRDs are not part of Ray: set TLORA_KUBERAY_CRDS to a folder with its ray.io_*.yaml to check against them too.
"""

import contextlib
import copy
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "cluster.yaml"
RAYCLUSTER = ROOT / "examples/kuberay/raycluster.yaml"
RAYJOB = ROOT / "examples/kuberay/rayjob.yaml"
FILES = (LAUNCHER, RAYCLUSTER, RAYJOB)
SPOT_NOTICE_S = 120

PIN = re.compile(r'ray\[[\w,]+\]==([\w.]+)|(?:rayproject/ray|/tlora):([\w.]+)-py|rayVersion: "([\w.]+)"')
SECRET = re.compile(
    r"RAY_AUTH_TOKEN\b|kind: Secret\b|-----BEGIN|\bAKIA[0-9A-Z]{16}\b"
    r"|\b(?:hf|gh[a-z]|github_pat)_\w{20,}|\b[0-9a-f]{32,}\b"
)
CRDS = os.environ.get("TLORA_KUBERAY_CRDS")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a check of the cluster files reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    for sdk in ("boto3", "botocore", "googleapiclient", "azure", "kubernetes"):
        monkeypatch.setitem(sys.modules, sdk, None)


def document(path: Path, kind: str) -> dict[str, Any]:
    (found,) = [part for part in yaml.safe_load_all(path.read_text(encoding="utf-8")) if part["kind"] == kind]
    return found


def launcher() -> dict[str, Any]:
    return yaml.safe_load(LAUNCHER.read_text(encoding="utf-8"))


def raycluster() -> dict[str, Any]:
    return document(RAYCLUSTER, "RayCluster")


def by_launcher(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration as `ray up` completes and checks it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(copy.deepcopy(config))
    validate_config(config)
    return config


def by_kuberay(resource: dict[str, Any]) -> dict[str, Any]:
    """What Ray's autoscaler makes of a RayCluster that the API server, which adds the namespace, has accepted."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    resource = copy.deepcopy(resource)
    resource["metadata"]["namespace"] = "default"
    config = _derive_autoscaling_config_from_ray_cr(resource)
    validate_config(config)
    return config


def pod(group: dict[str, Any]) -> dict[str, Any]:
    return group["template"]["spec"]


def container_env(group: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in pod(group)["containers"][0].get("env", [])}


def run_options(config: dict[str, Any], role: str) -> dict[str, str]:
    """Docker's options, as {"--env RAY_AUTH_MODE": "token", "--workdir": "/mnt/tlora", …}."""
    docker = config["docker"]
    pairs = (
        re.split(r"[ =](?=[^ =]*$)", line) for line in docker["run_options"] + docker.get(f"{role}_run_options", [])
    )
    return dict(pairs)


@pytest.fixture(params=["launcher", "kuberay"])
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return by_launcher(launcher()) if request.param == "launcher" else by_kuberay(raycluster())


def test_the_head_takes_no_work_and_gpu_workers_come_from_nothing(config: dict[str, Any]) -> None:
    types = dict(config["available_node_types"])
    head = types.pop(config["head_node_type"])
    assert "GPU" not in head["resources"]
    assert head["resources"]["CPU"] == 0
    assert (head["min_workers"], head["max_workers"]) == (0, 0)
    ((name, worker),) = types.items()
    assert name == "gpu-spot"
    assert worker["resources"]["GPU"] == 1
    assert worker["labels"] == {"ray.io/market-type": "spot"}
    assert worker["min_workers"] == 0 < worker["max_workers"] == config["max_workers"]
    assert config["idle_timeout_minutes"] == 3


def test_launcher_buys_spot_workers_and_an_on_demand_head() -> None:
    types = launcher()["available_node_types"]
    assert types["gpu-spot"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in types["head"]["node_config"]
    assert launcher()["provider"]["cache_stopped_nodes"] is False


def test_nothing_of_rays_default_setup_is_left() -> None:
    """Ray's default installs a nightly wheel of another version on every node."""
    config = by_launcher(launcher())
    for role in ("head", "worker"):
        commands = "\n".join(config[f"{role}_setup_commands"])
        assert "nightly" not in commands
        assert "dev0" not in commands
        assert "tlora @ git+https://YOUR_GIT_HOST/" in commands
        assert config["docker"][f"{role}_image"].startswith("rayproject/ray:")


def test_every_pin_of_ray_is_one_version_that_pyproject_admits() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (ray,) = [need for need in map(Requirement, project["dependencies"]) if need.name == "ray"]
    pins = [
        version
        for path in (LAUNCHER, RAYCLUSTER)
        for found in PIN.findall(path.read_text(encoding="utf-8"))
        for version in filter(None, found)
    ]
    assert len(pins) >= 7, pins
    assert len(set(pins)) == 1, pins
    assert ray.specifier.contains(pins[0])
    for path in (LAUNCHER, RAYCLUSTER):
        for minor in re.findall(r"-py3(\d+)", path.read_text(encoding="utf-8")):
            assert SpecifierSet(project["requires-python"]).contains(f"3.{minor}")


def test_tokens_are_asked_for_everywhere() -> None:
    for role in ("head", "worker"):
        assert run_options(launcher(), role)["--env RAY_AUTH_MODE"] == "token"
    assert launcher()["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert raycluster()["spec"]["authOptions"] == {"mode": "token"}
    job = document(RAYJOB, "RayJob")["spec"]
    assert "rayClusterSpec" not in job
    assert job["clusterSelector"] == {"ray.io/cluster": raycluster()["metadata"]["name"]}
    for path in FILES:
        assert "disabled" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_file_holds_a_secret(path: Path) -> None:
    assert not SECRET.findall(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "planted",
    [
        "- --env RAY_AUTH_TOKEN=x",
        "kind: Secret",
        "-----" + "BEGIN OPENSSH PRIVATE KEY-----",
        "aws_access_key_id: AKIA" + "A" * 16,
        "HF_TOKEN: hf_" + "a" * 34,
        "auth_token: " + "0f" * 32,
    ],
)
def test_a_planted_secret_is_seen(planted: str) -> None:
    assert SECRET.search(LAUNCHER.read_text(encoding="utf-8") + planted)


def test_keys_reach_every_node_by_its_environment_alone(tmp_path: Path) -> None:
    keys = {"WANDB_API_KEY": "one", "HF_TOKEN": "two words"}
    config = by_launcher(launcher())
    assert config["file_mounts"]["~/.tlora.env"] == "~/.tlora.env"
    (tmp_path / ".bashrc").touch()
    (tmp_path / ".tlora.env").write_text("".join(f"{name}='{value}'\n" for name, value in keys.items()))
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for role in ("head", "worker"):
        (command,) = [each for each in config[f"{role}_setup_commands"] if ".bashrc" in each]
        subprocess.run(["bash", "-c", command], env=home, check=True)
    seen = subprocess.run(["bash", "-c", "source ~/.bashrc; env"], env=home, check=True, capture_output=True, text=True)
    assert keys.items() <= dict(line.split("=", 1) for line in seen.stdout.splitlines()).items()
    assert (tmp_path / ".bashrc").read_text().count("tlora.env") == 1
    spec = raycluster()["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert pod(group)["containers"][0]["envFrom"] == [{"secretRef": {"name": "tlora-keys", "optional": True}}]
    for path in (LAUNCHER, RAYCLUSTER):
        assert all(name in path.read_text(encoding="utf-8") for name in keys)


def test_the_dashboard_is_not_open() -> None:
    for path in FILES:
        assert "0.0.0.0" not in path.read_text(encoding="utf-8")
    commands = "\n".join(by_launcher(launcher())["head_start_ray_commands"])
    assert re.findall(r"--dashboard-host[= ](\S+)", commands) == ["127.0.0.1"]
    # KubeRay must reach the dashboard of a pod, which therefore has no address outside the Kubernetes cluster.
    assert raycluster()["spec"]["headGroupSpec"]["serviceType"] == "ClusterIP"


def test_metrics_and_the_object_store_are_set_on_every_node() -> None:
    config, spec = by_launcher(launcher()), raycluster()["spec"]
    for role in ("head", "worker"):
        start = "\n".join(config[f"{role}_start_ray_commands"])
        assert "--metrics-export-port=8080" in start
        assert "--object-store-memory=1000000000" in start
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert group["rayStartParams"]["metrics-export-port"] == "8080"
        assert group["rayStartParams"]["object-store-memory"] == "1000000000"
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_paths_of_jobs_mean_the_shared_storage_on_every_node() -> None:
    for role in ("head", "worker"):
        options = run_options(launcher(), role)
        assert options["--volume"] == f"{options['--workdir']}:{options['--workdir']}"
        assert any(f":/ {options['--workdir']}" in command for command in launcher()["initialization_commands"])
    claim = document(RAYCLUSTER, "PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    spec = raycluster()["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
        container = pod(group)["containers"][0]
        where = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert where[container["workingDir"]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert where["/dev/shm"]["emptyDir"]["medium"] == "Memory"


def test_workers_have_time_to_drain() -> None:
    drain = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
    assert 30 <= float(run_options(launcher(), "worker")[f"--env {drain}"]) <= SPOT_NOTICE_S - 20
    (group,) = raycluster()["spec"]["workerGroupSpecs"]
    assert 30 <= float(container_env(group)[drain]) <= pod(group)["terminationGracePeriodSeconds"] - 5


def test_kuberay_starts_without_workers_and_scales_by_version_2() -> None:
    spec = raycluster()["spec"]
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"]) == (0, 0)
    # The operator refuses any other policy with version 2.
    assert "restartPolicy" not in pod(group).keys() | pod(spec["headGroupSpec"]).keys()


def test_tlora_on_the_head_means_the_cluster() -> None:
    """Without RAY_ADDRESS `tlora up` starts a cluster of its own; KubeRay sets it by itself."""
    (port,) = re.findall(r"--port=(\d+)", "\n".join(launcher()["head_start_ray_commands"]))
    assert run_options(launcher(), "head")["--env RAY_ADDRESS"] == f"127.0.0.1:{port}"
    assert "--env RAY_ADDRESS" not in run_options(launcher(), "worker")


def test_rayjob_submits_to_the_running_cluster_and_waits() -> None:
    job = document(RAYJOB, "RayJob")["spec"]
    assert job["submissionMode"] == "HTTPMode"
    assert job["entrypoint"] == "tlora submit jobs/*.yaml --wait"
    # Not allowed with a clusterSelector.
    assert not {"shutdownAfterJobFinishes", "suspend", "backoffLimit"} & job.keys()


@pytest.mark.parametrize(
    "plant",
    [
        lambda config: config.update(idle_timeout=3),
        lambda config: config["available_node_types"]["gpu-spot"].update(label={}),
        lambda config: config["available_node_types"]["gpu-spot"]["resources"].update(GPU="1"),
        lambda config: config["docker"].update(imagee="x"),
        lambda config: config["auth"].update(user="ubuntu"),
    ],
    ids=["top", "node type", "resource", "docker", "auth"],
)
def test_a_planted_mistake_fails_validation_by_the_launcher(plant: Callable[[dict[str, Any]], None]) -> None:
    config = launcher()
    plant(config)
    with pytest.raises(jsonschema.ValidationError):
        by_launcher(config)


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        (lambda group: group.update(minReplica=group.pop("minReplicas")), KeyError),
        (lambda group: group.update(labels={"ray.io/market type": "spot"}), ValueError),
        (lambda group: pod(group)["containers"][0].update(resource={}, resources={}), ValueError),
        (lambda group: group.update(maxReplicas="8"), TypeError),
    ],
    ids=["key", "label", "resources", "string"],
)
def test_a_planted_mistake_fails_validation_by_kuberay(
    plant: Callable[[dict[str, Any]], None], error: type[Exception]
) -> None:
    resource = raycluster()
    plant(resource["spec"]["workerGroupSpecs"][0])
    with pytest.raises(error):
        by_kuberay(resource)


def test_every_command_is_bash() -> None:
    config = by_launcher(launcher())
    commands = [command for key, value in config.items() if key.endswith("_commands") for command in value]
    assert len(commands) > 10
    for command in commands:
        subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True)


def stand_ins(folder: Path, ray: str) -> dict[str, str]:
    """An environment in which the worker's command finds a `ray`, a metadata service and a fast clock of ours."""
    wget = f"""
        case "$*" in
          *--method=PUT*) echo token ;;
          *"token: token"*spot/instance-action) [ -e {folder}/notice ] || exit 8 ;;
          *) exit 1 ;;
        esac"""
    for name, body in (("ray", ray), ("wget", wget), ("sleep", "exec /bin/sleep 0.1")):
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin", "RAY_HEAD_IP": "10.0.0.1"}


def start_worker(folder: Path, ray: str) -> subprocess.Popen[str]:
    command = launcher()["worker_start_ray_commands"][-1].replace("/tmp/", f"{folder}/")
    return subprocess.Popen(
        ["bash", "-c", command],
        env=stand_ins(folder, ray),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def test_a_spot_notice_lets_ray_drain_its_node(tmp_path: Path) -> None:
    ray = f"""
        trap 'touch {tmp_path}/drained; exit' TERM
        echo "$@"
        while :; do /bin/sleep 0.05; done"""
    worker = start_worker(tmp_path, ray)
    try:
        worker.communicate(timeout=20)
        assert worker.returncode == 0
        time.sleep(0.5)
        assert "start --block --address=10.0.0.1:6379" in (tmp_path / "ray_start.log").read_text(encoding="utf-8")
        assert not (tmp_path / "drained").exists()
        (tmp_path / "notice").touch()
        until = time.monotonic() + 10
        while not (tmp_path / "drained").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert (tmp_path / "drained").exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    worker = start_worker(tmp_path, "echo no head here; exit 1")
    shown, _ = worker.communicate(timeout=20)
    assert worker.returncode == 1
    assert "no head here" in shown


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A CRD's schema as `kubectl apply` applies it: a key that it does not name is an error."""
    schema = dict(schema)
    if "properties" in schema:
        schema["properties"] = {key: strict(value) for key, value in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            schema[key] = strict(schema[key])
    return schema


def test_strict_refuses_a_key_that_a_crd_does_not_name() -> None:
    group = {"type": "object", "properties": {"groupName": {"type": "string"}, "labels": {"type": "object"}}}
    schema = strict({"type": "object", "properties": {"groups": {"type": "array", "items": group}}})
    jsonschema.validate({"groups": [{"groupName": "a", "labels": {"any": "key"}}]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"groups": [{"groupname": "a"}]}, schema)


@pytest.mark.skipif(not CRDS, reason="TLORA_KUBERAY_CRDS does not name a folder with KubeRay's CRDs")
@pytest.mark.parametrize(
    ("path", "kind", "file"),
    [(RAYCLUSTER, "RayCluster", "ray.io_rayclusters.yaml"), (RAYJOB, "RayJob", "ray.io_rayjobs.yaml")],
)
def test_crds_admit_the_resources_and_refuse_a_planted_key(path: Path, kind: str, file: str) -> None:
    crd = yaml.safe_load((Path(str(CRDS)) / file).read_text(encoding="utf-8"))
    (schema,) = [part["schema"]["openAPIV3Schema"] for part in crd["spec"]["versions"] if part["name"] == "v1"]
    resource = document(path, kind)
    jsonschema.validate(resource, strict(schema))
    resource["spec"]["authOption"] = {}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(resource, strict(schema))

"""What is saved where files are named from here is known again where they are named from the root."""

import subprocess
import sys
from pathlib import Path

import pytest
import toy

from tlora.cluster import ClusterSpec, load_cluster
from tlora.errors import SpecError
from tlora.paths import absolute, found
from tlora.sweep_spec import SweepSpec, parse_sweep
from tlora.sweep_state import SweepState, refuse_changes
from tlora.trainer import Trainer, TrainerOptions


def test_a_job_goes_on_by_another_name_of_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    base, data = toy.super_model(), toy.data()
    for name, steps in (("toy", 2), (str(tmp_path / "toy"), 4)):
        trainer = Trainer(base, TrainerOptions())
        spec = toy.job(tmp_path, base={"model": name}, steps=4, save_every=1)
        resident = trainer.attach(spec, data, resume=True)
        while resident.step < steps and trainer.jobs:
            trainer.tick()
        trainer.close()
    assert resident.step == 4


def sweep(**changes: object) -> SweepSpec:
    job = {"base": {"model": "m"}, "data": {"path": "d", "eval_path": "e"}, **changes}
    return parse_sweep({"name": "s", "job": job, "space": {"adapter.rank": [2, 4]}, "output": "out"})


def test_a_sweep_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in "mde":
        (tmp_path / name).touch()
    state = SweepState(spec=sweep().model_dump(mode="json"))
    state.take(sweep())
    monkeypatch.chdir("/")
    whole = sweep(base={"model": f"{tmp_path}/m"}, data={"path": f"{tmp_path}/d", "eval_path": f"{tmp_path}/e"})
    refuse_changes(state.spec, whole.model_copy(update={"output": f"{tmp_path}/out"}))
    refuse_changes(state.spec, whole)  # which a cluster has moved
    with pytest.raises(SpecError, match="holds a sweep with other settings: job"):
        refuse_changes(state.spec, sweep(data={"path": "other", "eval_path": "e"}))


def test_each_storage_has_a_journal_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLORA_HOME", str(tmp_path / "home"))
    one, other = (load_cluster(None, [f"storage={tmp_path / name}"]) for name in ("a", "b"))
    assert one.state != other.state
    assert Path(one.state or "").is_relative_to(tmp_path / "home")
    assert ClusterSpec(storage=one.storage).state_folder == one.state_folder
    assert load_cluster(None, [f"storage={tmp_path}", "state=here"]).state == str(Path("here").absolute())


def test_the_launchers_own_file_is_known_for_what_it_is() -> None:
    with pytest.raises(SpecError, match=r"is a file of Ray's own, for `ray up`"):
        load_cluster(Path(__file__).parents[2] / "cluster.yaml")


def test_a_home_is_the_sender_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").touch()
    assert found("~/rows.jsonl") == str(tmp_path / "rows.jsonl")
    assert found("~/other") == "~/other"


def test_files_that_ray_carried_to_one_machine_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit --working-dir .`: workers on other nodes would not find them."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").touch()
    monkeypatch.chdir(folder)
    with pytest.raises(SpecError, match=r"rows\.jsonl: this machine alone has it"):
        absolute(toy.job(tmp_path, data={"path": "rows.jsonl"}))


def test_commands_of_a_cluster_do_without_torch() -> None:
    code = "import sys, tlora.cli, tlora.cli_cluster, tlora.client, tlora.console; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

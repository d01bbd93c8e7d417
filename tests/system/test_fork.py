"""What a client sends is checked first; a fork of a job without an adapter yet begins with that of its last save."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import toy
from safetensors.torch import load_file

from tlora.adapter import WEIGHTS
from tlora.client import Client
from tlora.errors import CheckpointError, SpecError, StateError
from tlora.export import export_last
from tlora.local import RunOptions, prepare, train
from tlora.spec import JobSpec


class Played(Client):
    """A cluster with one job."""

    def __init__(self, spec: JobSpec):
        self.spec, self.submitted, self.asked = spec, list[JobSpec](), list[str]()
        self.newest: Path | None = None

    def _call(self, method: str, *arguments: Any) -> Any:
        self.asked.append(method)
        if method == "newest_adapter":
            if self.newest:
                return str(self.newest)
            raise StateError("job a has written no adapter yet")
        if method == "submit":
            self.submitted += [JobSpec.model_validate(values) for values in arguments[0]]
        rows = [{"name": spec.name, "output": spec.output} for spec in (self.spec, *self.submitted)]
        return {"spec": self.spec.model_dump(mode="json"), "status": rows[:1] if arguments[0] else rows}.get(method, [])


def test_a_bad_job_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    toy.write_sweep(tmp_path)
    good, bad = (toy.named_job(tmp_path, name) for name in ("good", "bad"))
    bad = bad.model_copy(update={"data": bad.data.model_copy(update={"path": str(tmp_path / "nothing.jsonl")})})
    client, sweep = Played(good), toy.sweep(tmp_path)
    bad_sweep = sweep.model_copy(update={"job": {**sweep.job, "base": {"model": str(tmp_path / "nowhere")}}})
    for send in (lambda: client.submit([good, bad]), lambda: client.sweep(bad_sweep)):
        with pytest.raises(SpecError, match=r"job bad: .*nothing\.jsonl|nowhere.*cannot be loaded"):
            send()
    assert not client.asked
    client.submit([good, bad], check=False)
    assert [spec.name for spec in client.submitted] == ["good", "bad"]


def test_a_fork_begins_with_the_last_save(tmp_path: Path) -> None:
    toy.write_base(tmp_path)
    spec = toy.named_job(tmp_path, "a", steps=4, save_every=2)
    options = RunOptions(device="cpu")
    client = Played(spec)
    with pytest.raises(CheckpointError, match="a"):
        client.fork("a", "b")
    train(prepare([spec], options), options)
    with pytest.raises(SpecError, match=r"job bad: .*nope_proj"):
        client.fork("a", "bad", ["adapter.targets=[nope_proj]"])
    for _ in range(2):  # again is the same
        assert client.fork("a", "b", ["optim.lr=1e-4"]) == "b"
    first, second = client.submitted
    assert first == second
    assert (first.name, first.optim.lr, first.output) == ("b", 1e-4, str(tmp_path / "b"))
    assert first.adapter.init_from
    export_last(spec.folder, tmp_path / "c")
    one, other = (load_file(Path(folder) / WEIGHTS) for folder in (first.adapter.init_from, tmp_path / "c"))
    assert one.keys() == other.keys()
    assert all(part.equal(other[name]) for name, part in one.items())


def test_a_fork_that_was_refused_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    toy.write_base(tmp_path)
    specs = [toy.named_job(tmp_path, name, steps=4, save_every=2, seed=seed) for seed, name in enumerate("ab")]
    options = RunOptions(device="cpu")
    train(prepare(specs, options), options)
    refuses, takes = map(Played, specs)
    for new, change in (("x/y", "seed=1"), ("new", "optim.lr=low")):
        with pytest.raises(SpecError, match=r"name = 'x/y'|optim\.lr = 'low'"):
            refuses.fork("a", new, [change])
    assert not (tmp_path / "new").exists()
    export_last(specs[0].folder, tmp_path / "new" / "start")  # of a client that was killed before it could submit
    takes.fork("b", "new")
    export_last(specs[1].folder, tmp_path / "c")
    one, other = (load_file(tmp_path / folder / WEIGHTS) for folder in ("new/start", "c"))
    assert all(part.equal(other[name]) for name, part in one.items())


def test_a_fork_keeps_the_adapter_that_it_began_with(tmp_path: Path) -> None:
    """Its job goes on meanwhile, has a better one, and ends."""
    toy.write_base(tmp_path)
    spec = toy.named_job(tmp_path, "a", steps=4, save_every=2)
    options = RunOptions(device="cpu")
    train(prepare([spec], options), options)
    client, best = Played(spec), spec.folder / "best"
    best.mkdir(exist_ok=True)
    for file in (WEIGHTS, "adapter_config.json"):
        shutil.copyfile(spec.folder / file, best / file)
    client.newest = best
    assert client.fork("a", "b") == "b"
    (begun,) = client.submitted
    assert begun.adapter.init_from == str(tmp_path / "b" / "start")
    kept = (tmp_path / "b" / "start" / WEIGHTS).read_bytes()
    assert kept == (best / WEIGHTS).read_bytes()
    (best / WEIGHTS).write_bytes(b"another")
    client.newest = spec.folder
    assert client.fork("a", "b") == "b"
    assert client.submitted == [begun, begun]
    assert (tmp_path / "b" / "start" / WEIGHTS).read_bytes() == kept

"""A fork of a job that has written no adapter yet begins with that of its last save."""

from pathlib import Path
from typing import Any

import pytest
import toy
from safetensors.torch import load_file

from tlora.adapter import WEIGHTS
from tlora.client import Client
from tlora.errors import CheckpointError, StateError
from tlora.export import export_last
from tlora.local import RunOptions, prepare, train
from tlora.spec import JobSpec


class Played(Client):
    """A cluster with one job."""

    def __init__(self, spec: JobSpec):
        self.spec, self.submitted = spec, list[JobSpec]()

    def _call(self, method: str, *arguments: Any) -> Any:
        if method == "newest_adapter":
            raise StateError("job a has written no adapter yet")
        if method == "submit":
            self.submitted += [JobSpec.model_validate(values) for values in arguments[0]]
        answers = {"spec": self.spec.model_dump(mode="json"), "status": [{"output": self.spec.output}], "submit": []}
        return answers[method]


def test_a_fork_begins_with_the_last_save(tmp_path: Path) -> None:
    toy.write_base(tmp_path)
    spec = toy.named_job(tmp_path, "a", steps=4, save_every=2)
    options = RunOptions(device="cpu")
    client = Played(spec)
    with pytest.raises(CheckpointError, match="a"):
        client.fork("a", "b")
    train(prepare([spec], options), options)
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

"""Several jobs on one machine: what fails is named, what can go on does, and nothing asks the network."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file

from tlora.adapter import AdapterState
from tlora.base import load_model
from tlora.checkpoint import STATE, load_state
from tlora.errors import ModelError, SpecError
from tlora.local import RunOptions, prepare, train
from tlora.packing import Batch
from tlora.spec import JobSpec
from tlora.supermodel import SuperModel
from tlora.trainer import TrainerOptions


@pytest.fixture
def specs(tmp_path: Path) -> list[JobSpec]:
    toy.write_base(tmp_path)
    return [toy.named_job(tmp_path, name) for name in ("first", "second", "third")]


def test_a_damaged_state_fails_one_job_and_the_others_finish(specs: list[JobSpec]) -> None:
    jobs = prepare(specs)
    ticks = iter(range(2))
    paused = train(jobs, stopped=lambda: next(ticks, None) is None)
    assert {one.record.state for one in paused} == {"paused"}
    state = specs[1].folder / STATE
    state.write_bytes(state.read_bytes()[:-50])
    first, second, third = train(jobs, RunOptions(resume=True))
    assert (first.record.state, second.record.state, third.record.state) == ("finished", "failed", "finished")
    assert "is damaged" in second.record.reason


def test_finished_jobs_are_left_alone(specs: list[JobSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = prepare(specs)
    train(jobs)
    before = {path: path.stat().st_mtime_ns for spec in specs for path in spec.folder.rglob("*")}
    monkeypatch.setattr(SuperModel, "load", lambda *args, **kwargs: pytest.fail("the base was loaded for nothing"))
    assert {one.record.state for one in train(jobs, RunOptions(resume=True))} == {"finished"}
    assert before == {path: path.stat().st_mtime_ns for spec in specs for path in spec.folder.rglob("*")}


def test_a_base_that_cannot_be_loaded_fails_its_own_jobs(specs: list[JobSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    other = specs[2].model_copy(update={"base": specs[2].base.model_copy(update={"dtype": "float64"})})
    load = SuperModel.load

    def refuse(base: object, **options: object) -> SuperModel:
        if base == other.base:
            raise ModelError("no memory for it")
        return load(base, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(SuperModel, "load", refuse)
    first, second, third = train(prepare([other, *specs[:2]]))
    assert (first.record.state, second.record.state, third.record.state) == ("failed", "finished", "finished")
    assert "no memory for it" in first.record.reason


def test_an_error_that_no_job_is_to_blame_for_loses_nothing(specs: list[JobSpec]) -> None:
    def watch(progress: object, tick: object) -> None:
        if tick is not None:
            raise BrokenPipeError

    slow_saves = [spec.model_copy(update={"save_every": 100}) for spec in specs]
    with pytest.raises(BrokenPipeError):
        train(prepare(slow_saves), watch=watch)
    assert [load_state(spec.folder)[1]["step"] for spec in slow_saves] == [1, 1, 1]


def test_nothing_asks_the_network(specs: list[JobSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    """18: saving contacted the hub and crashed offline."""
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail(f"connected to {args[1:]}"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail(f"looked up {args[0]}"))
    assert {one.record.state for one in train(prepare(specs))} == {"finished"}
    assert all((spec.folder / part / "tokenizer_config.json").exists() for spec in specs for part in (".", "best"))


def test_an_adapter_to_start_from_is_checked_before_training(specs: list[JobSpec]) -> None:
    train(prepare(specs[:1]))
    start = {"init_from": str(specs[0].folder)}
    same = specs[1].model_copy(update={"adapter": specs[1].adapter.model_copy(update=start)})
    assert prepare([same])[0].spec is same
    for change, said in (({"rank": 8}, "scale"), ({"init_from": "/nowhere"}, "no PEFT adapter can be read")):
        adapter = same.adapter.model_copy(update=change)
        with pytest.raises(SpecError, match=f"job second: adapter.init_from.*{said}"):
            prepare([same.model_copy(update={"adapter": adapter})])


def test_a_base_that_lacks_weights_or_is_an_adapter_is_refused(specs: list[JobSpec]) -> None:
    path = Path(specs[0].base.model) / "model.safetensors"
    weights = {key: weight for key, weight in load_file(path).items() if "layers.1.mlp" not in key}
    jobs = prepare(specs[:1])
    save_file(weights, path, metadata={"format": "pt"})
    (one,) = train(jobs)
    assert one.record.state == "failed"
    assert "its files lack 3 weights (first: model.layers.1.mlp.down_proj.weight)" in one.record.reason
    (path.parent / "adapter_config.json").write_text("{}")
    with pytest.raises(SpecError, match="is the folder of an adapter"):
        prepare(specs[:1])


def test_a_base_whose_weights_are_pickled_is_refused(specs: list[JobSpec]) -> None:
    """Also where they lie beside a file that only looks like safetensors of the model's."""
    base = Path(specs[0].base.model)
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").rename(base / "other.safetensors")
    with pytest.raises(ModelError, match=r"cannot be loaded: .*no file named model\.safetensors"):
        load_model(specs[0].base, "auto")
    (base / "other.safetensors").unlink()
    for ask in (lambda: prepare(specs[:1]), lambda: load_model(specs[0].base, "auto")):
        with pytest.raises((SpecError, ModelError), match=r"its weights are pickled \(.bin\), .*; want safetensors"):
            ask()


def test_a_paused_job_needs_what_it_started_from_no_more(specs: list[JobSpec]) -> None:
    train(prepare(specs[:1]))
    start = specs[1].adapter.model_copy(update={"init_from": str(specs[0].folder)})
    job = specs[1].model_copy(update={"adapter": start})
    ticks = iter(range(2))
    train(prepare([job]), stopped=lambda: next(ticks, None) is None)
    shutil.rmtree(specs[0].folder)
    (one,) = train(prepare([job], RunOptions(resume=True)), RunOptions(resume=True))
    assert one.record.state == "finished"


def test_a_base_that_was_not_downloaded_whole_is_refused_before_it_is_sent(specs: list[JobSpec]) -> None:
    base = Path(specs[0].base.model)
    index = base / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert prepare(specs[:1]), "left by a base that was saved in parts before it was saved whole"
    (base / "model.safetensors").rename(base / "model-2.safetensors")
    with pytest.raises(SpecError, match=r"model-1\.safetensors is not there\. Complete the download"):
        prepare(specs[:1])
    index.write_text('{"weight_map": {"a": ')
    with pytest.raises(SpecError, match="cannot be loaded: Expecting value"):
        prepare(specs[:1])
    index.unlink()
    (base / "model-2.safetensors").unlink()
    with pytest.raises(SpecError, match=r"\*\.safetensors is not there"):
        prepare(specs[:1])


def test_ticks_that_run_out_of_memory_get_smaller(
    specs: list[JobSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until one holds no more than the longest sequence: then the jobs fail, and say what would help."""
    whole, most = SuperModel.train, [60]

    def full(model: SuperModel, batch: Batch) -> torch.Tensor:
        if model.residents and batch.rows.num_rows > most[0]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(model, batch)

    monkeypatch.setattr(SuperModel, "train", full)
    options = RunOptions(deterministic=True, device="cpu", trainer=TrainerOptions(token_budget=200))
    assert {one.record.state for one in train(prepare(specs, options), options)} == {"finished"}
    assert "out of memory: ticks hold 100 rows now." in caplog.messages
    assert all(toy.equals_alone(spec) for spec in specs)
    most[0] = 3
    again = [spec.model_copy(update={"output": f"{spec.output}-again"}) for spec in specs]
    ended = train(prepare(again, options), options)
    assert {one.record.state for one in ended} == {"failed"}
    assert all("add --checkpointing" in one.record.reason for one in ended)


def test_a_base_or_an_adapter_without_memory_fails_alone(specs: list[JobSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    other = specs[2].model_copy(update={"base": specs[2].base.model_copy(update={"dtype": "float64"})})
    load, place = SuperModel.load, SuperModel.place

    def refuse(base: object, **options: object) -> SuperModel:
        if base == other.base:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(base, **options)  # type: ignore[arg-type]

    def crowded(model: SuperModel, state: AdapterState) -> int:
        if model.residents:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return place(model, state)

    monkeypatch.setattr(SuperModel, "load", refuse)
    monkeypatch.setattr(SuperModel, "place", crowded)
    first, second, third = train(prepare([other, *specs[:2]]))
    assert (first.record.state, second.record.state, third.record.state) == ("failed", "finished", "failed")
    assert "out of memory beside 1 other(s)" in third.record.reason

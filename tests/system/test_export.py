"""Adapters out of saved states and merged models: whole, or refused in one line with nothing left behind."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file, save_file
from toy_tokenizers import CHATML, byte_tokenizer
from transformers import AutoModelForCausalLM

from tlora import checkpoint, export
from tlora.adapter import CONFIG, WEIGHTS
from tlora.errors import CheckpointError, ModelError, TloraError
from tlora.export import export_last, merge_adapter
from tlora.spec import BaseSpec
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer

Spoil = Callable[[Path], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that has ended, over a base in a folder of its own."""
    desk = tmp_path_factory.mktemp("trained")
    tokenizer = byte_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(toy.config(vocab_size=len(tokenizer))).save_pretrained(desk / "base")
    tokenizer.save_pretrained(desk / "base")
    base = BaseSpec(model=str(desk / "base"))
    trainer = Trainer(SuperModel.load(base, device="cpu"))
    trainer.attach(toy.job(desk, "a", base=base.model_dump(), steps=3), toy.data())
    toy.finish(trainer)
    return desk / "a"


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(trained, tmp_path / "a"))


def refusal(export: Callable[[Path, Path], None], folder: Path, output: Path, error: type[TloraError]) -> str:
    """What is said; the folders beside `output` are what they were."""
    before = sorted(os.walk(output.parent))
    with pytest.raises(error) as caught:
        export(folder, output)
    assert type(caught.value) is error
    assert sorted(os.walk(output.parent)) == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_last_state_is_the_final_adapter(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    export_last(folder, tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == (folder / WEIGHTS).read_bytes()
    assert (tmp_path / "out/tokenizer_config.json").exists()
    merge_adapter(tmp_path / "out", tmp_path / "new/merged")
    assert (tmp_path / "new/merged/model.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "new", "out"]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["merged"]
    assert (tmp_path / "out").stat().st_mode == folder.stat().st_mode


@pytest.mark.parametrize("write", [export_last, merge_adapter])
def test_output_that_holds_something_is_refused(
    write: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    said = "holds files already. Name a new folder."
    assert refusal(write, folder, folder, CheckpointError) == f"{folder}: {said}"
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").touch()
    assert refusal(write, folder, other, CheckpointError) == f"{other}: {said}"
    assert refusal(write, folder, other / "mine.txt", CheckpointError) == f"{other / 'mine.txt'}: {said}"
    under = other / "mine.txt" / "out"
    assert refusal(write, folder, under, CheckpointError).startswith(f"{under}: cannot be written: ")


@pytest.mark.parametrize("write", [export_last, merge_adapter])
def test_full_disk_leaves_nothing(
    write: Callable[[Path, Path], None], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "load_tokenizer", lambda base: Tokenizer())
    output = tmp_path / "out"
    said = refusal(write, folder, output, CheckpointError)
    assert said == f"{output}: cannot be written: [Errno 28] No space left on device."


def test_adapter_that_would_change_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors, meta = checkpoint.load_state(folder)
    tensors["master"].zero_()
    checkpoint.save_state(folder, tensors, meta)
    assert "every B is zero" in refusal(export_last, folder, tmp_path / "out", CheckpointError)
    checkpoint.save_state(folder, tensors, {**meta, "step": 1})
    export_last(folder, tmp_path / "out")


def _without_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def _config(text: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / CONFIG).write_text(text)

    return spoil


def _changed(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps({**json.loads((folder / CONFIG).read_text()), **changes}))

    return spoil


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Spoil:
    def spoil(folder: Path) -> None:
        save_file({key: change(weight) for key, weight in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)

    return spoil


def _fewer(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights[min(weights)]
    save_file(weights, folder / WEIGHTS)


def _cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100])


def _half_base(folder: Path) -> None:
    base = Path(json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
    half = shutil.copytree(base, folder.parent / "half")
    (half / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:100])
    _changed(base_model_name_or_path=str(half))(folder)


BROKEN = {
    "no configuration": (_without_config, CheckpointError, f"{CONFIG}: cannot be read: [Errno 2]"),
    "half a configuration": (_config("{"), CheckpointError, f"{CONFIG}: cannot be read: "),
    "a list": (_config("[]"), CheckpointError, f"{CONFIG}: base_model_name_or_path = None: want"),
    "no base": (
        _changed(base_model_name_or_path=None), CheckpointError,
        f"{CONFIG}: base_model_name_or_path = None: want the base's hub name or folder. Write it there.",
    ),
    "a number for the revision": (_changed(revision=3), CheckpointError, f"{CONFIG}: revision = 3: want"),
    "a base that is gone": (
        _changed(base_model_name_or_path="/absent"), ModelError, "base.model = /absent: no such folder",
    ),
    "another kind": (_changed(peft_type="NONE"), CheckpointError, "cannot be merged into"),
    "another rank": (_changed(r=3), CheckpointError, "cannot be merged into"),
    "no such targets": (_changed(target_modules=["nope"]), CheckpointError, "cannot be merged into"),
    "not a number": (_weights(lambda weight: weight * float("nan")), CheckpointError, "cannot be merged into"),
    "half a base": (_half_base, ModelError, "cannot be loaded: "),
    "weights missing": (_fewer, CheckpointError, "lacks 1 weights"),
    "half the weights": (_cut, CheckpointError, "cannot be merged into"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_merge_refuses_what_is_broken(case: str, folder: Path, tmp_path: Path) -> None:
    spoil, error, said = BROKEN[case]
    spoil(folder)
    assert said in refusal(merge_adapter, folder, tmp_path / "out", error)


def test_merge_names_the_way_from_a_saved_state(folder: Path, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    said = refusal(merge_adapter, folder, tmp_path / "out", CheckpointError)
    assert f"write its adapter first, with `tlora export {folder} <folder>`" in said


def test_adapter_on_the_head_merges(folder: Path, tmp_path: Path) -> None:
    base = BaseSpec(model=json.loads((folder / CONFIG).read_text())["base_model_name_or_path"])
    trainer = Trainer(SuperModel.load(base, device="cpu"))
    spec = toy.job(
        tmp_path, "head", base=base.model_dump(), steps=3, adapter={"rank": 2, "targets": ["lm_head", "q_proj"]}
    )
    trainer.attach(spec, toy.data())
    toy.finish(trainer)
    merge_adapter(spec.folder, tmp_path / "merged")
    before, after = (load_file(Path(where) / "model.safetensors") for where in (base.model, tmp_path / "merged"))
    assert {key for key in before if not torch.equal(before[key], after[key])} == {
        "lm_head.weight", *(f"model.layers.{n}.self_attn.q_proj.weight" for n in range(2))
    }  # fmt: skip

"""Compiled layers and captured ticks train the same adapter as plain ones."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import toy
from safetensors.torch import load_file
from transformers import Gemma2Config, PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaMLP

from tlora import graphs
from tlora.adapter import WEIGHTS, AdapterState
from tlora.attention import NAME
from tlora.beside import own_stream, to_host
from tlora.kernels import routes
from tlora.kernels.tiles import RowTable
from tlora.mixed_linear import fuse_gates
from tlora.packing import Item, pack
from tlora.spec import AdapterSpec
from tlora.supermodel import SuperModel

GPU = toy.DEVICE.type == "cuda"


def train(model: SuperModel, folder: Path, *, steps: int, length: int, batches: int = 1) -> list[toy.Result]:
    """Two jobs, the second with dropout, of sequences of one length, so that ticks are of one shape."""
    trainer = toy.Recorder(model)
    residents = []
    for number in range(2):
        adapter = {"rank": 3 + 5 * number, "alpha": 8, "targets": "all-linear", "dropout": 0.2 * number}
        spec = toy.job(folder, f"job{number}", adapter=adapter, steps=steps, batch_size=2, optim={"lr": 3e-3})
        residents.append(trainer.attach(spec, toy.data(2 * batches, seed=number, low=length, high=length)))
    toy.finish(trainer)
    return [toy.Result.of(trainer, resident) for resident in residents]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_compiled_layers_train_the_same_adapter(
    checkpointing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of the first layer too, under the keys that PEFT expects (it loads what it finds, and says nothing)."""
    monkeypatch.setattr(routes, "is_fused", lambda tensor: tensor.dtype is not torch.float64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, ours = (
        train(toy.super_model(checkpointing=checkpointing, compiled=compiled), tmp_path / part, steps=2, length=20)
        for part, compiled in (("plain", False), ("compiled", True))
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    assert not torch._dynamo.utils.counters["graph_break"]
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-6)
        assert toy.off(mine.gradient, theirs.gradient) < 1e-5
        assert toy.off(mine.master, theirs.master) < 1e-4
    for number in range(2):
        saved, expected = (load_file(tmp_path / kind / f"job{number}" / WEIGHTS) for kind in ("compiled", "plain"))
        assert saved.keys() == expected.keys()
        assert all(weight.any() for key, weight in saved.items() if "layers.0" in key)


def test_layers_share_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph serves both layers, all steps and a job more: tables change, code does not."""
    monkeypatch.setattr(routes, "is_fused", lambda tensor: tensor.dtype is not torch.float64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    model = toy.super_model(compiled=True)
    train(model, tmp_path / "a", steps=2, length=20)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled == 1
    train(model, tmp_path / "b", steps=2, length=20)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_ticks_of_any_shape_run_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few graphs serve ticks of many lengths, numbers of sequences and jobs, with and without gradients: beyond torch's
    limit layers would run uncompiled for good, and say nothing."""
    monkeypatch.setattr(routes, "is_fused", lambda tensor: tensor.dtype is not torch.float64)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = toy.super_model(compiled=True, model=toy.config(num_hidden_layers=1))
    # The CPU's attention goes block by block, so that block lengths are compiled in; the GPU's does not.
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, NAME, no_attention)
    for jobs in (1, 35):
        for slot in range(len(model.residents), jobs):
            spec = AdapterSpec(rank=2, targets="all-linear")
            layout = model.outline.lay_out(spec)
            model.place(AdapterState(layout, spec, seed=slot, device=model.device, dtype=model.dtype))
        for length in (3, 9):
            sequences = toy.sequences(jobs, low=length, high=length)
            items = [Item(slot, 0, 0, 0, 0.1, sequence) for slot, sequence in enumerate(sequences)]
            batch = pack(items, device=model.device, round_to=model.row_multiple(jobs * length))
            model.train(batch)
            model.evaluate(batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 6


def test_a_tick_is_never_rounded_up_out_of_those_that_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.super_model()
    monkeypatch.setattr(model, "compiled", True)
    monkeypatch.setattr(model, "captured", True)
    monkeypatch.setattr(model, "small_rows", 2190)
    rounded = {rows: -(-rows // model.row_multiple(rows)) * model.row_multiple(rows) for rows in range(1, 3000)}
    assert all(model.is_small(rounded[rows]) for rows in range(1, 2177))  # 34 times 64
    assert all(new - rows < max(64, rows / 4) for rows, new in rounded.items())
    assert len(set(rounded.values())) < 50


def no_attention(
    module: torch.nn.Module, query: torch.Tensor, *others: object, tlora_rows: RowTable, **settings: object
) -> tuple[torch.Tensor, None]:
    return (query + tlora_rows.longest + tlora_rows.block_ends_S.sum()).transpose(1, 2), None


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU: set TLORA_TEST_DEVICE=cuda")
def test_captured_ticks_train_the_same_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third tick of a shape on a graph is replayed; jobs that come once all have left are captured anew."""
    plain = train(toy.super_model(torch.bfloat16, compiled=False), tmp_path / "plain", steps=8, length=64, batches=8)
    captured, replayed = [], []
    make, replay = graphs._Graph.__init__, graphs._Graph.forward
    monkeypatch.setattr(graphs._Graph, "__init__", lambda *args: captured.append(make(*args)))
    monkeypatch.setattr(graphs._Graph, "forward", lambda *args: replayed.append(1) or replay(*args))
    model = toy.super_model(torch.bfloat16, compiled=True, captured=True)
    ours = train(model, tmp_path / "captured", steps=8, length=64, batches=8)
    assert (len(captured), len(replayed)) == (1, 6)
    again = train(model, tmp_path / "again", steps=8, length=64, batches=8)
    assert (len(captured), len(replayed)) == (2, 12)
    for mine, theirs, other in zip(ours, plain, again, strict=True):
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-2)
        assert other.losses == pytest.approx(theirs.losses, rel=1e-2)
        assert toy.off(mine.gradient, theirs.gradient) < 5e-2
        assert toy.off(mine.master, theirs.master) < 5e-2


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU: set TLORA_TEST_DEVICE=cuda")
def test_files_are_written_while_ticks_are_captured() -> None:
    """More captures than a device has streams of one kind, and a thread that waits for its own all the time."""
    model = toy.super_model(torch.bfloat16, compiled=True, captured=True)
    state, is_over, num_written = resident(model, 8, seed=1), threading.Event(), []
    items = [Item(0, 0, at, 0, 0.1, each) for at, each in enumerate(toy.sequences(4, 0, low=64, high=64))]
    batch = pack(items, device=model.device, round_to=model.row_multiple(256))

    def write() -> None:
        while not is_over.is_set():
            with own_stream(model.device):
                num_written.append(to_host(state.master).numel())

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            for _ in range(70):
                model._graphs.clear()
                for _ in range(3):
                    model.train(batch)
                assert len(model._graphs._graphs) == 1
        finally:
            is_over.set()
        writing.result()
    assert len(num_written) > 70


@pytest.mark.skipif(not GPU, reason="CUDA graphs need a GPU: set TLORA_TEST_DEVICE=cuda")
def test_replayed_gradients_are_those_of_plain_ticks() -> None:
    """The same adapters and rows, tick by tick: other tokens each time, and of the second job another part of rows.
    Beside float32, replayed ticks are no further off than plain ones are."""
    plain, ours = (toy.super_model(torch.bfloat16, compiled=compiled, captured=compiled) for compiled in (False, True))
    exact = toy.super_model(rounded_to=torch.bfloat16)
    models = plain, ours, exact
    states = [[resident(model, rank, seed) for seed, rank in enumerate((3, 20))] for model in models]
    for rounded, whole in zip(states[0], states[2], strict=True):
        whole.master.copy_(rounded.compute)
        whole.publish()
    for tick in range(6):
        slots = (0, 0, 1, 1) if tick % 2 else (0, 1, 1, 1)
        items = [
            Item(slot, tick, at, 0, 0.1, sequence)
            for at, (slot, sequence) in enumerate(zip(slots, toy.sequences(4, tick, low=64, high=64), strict=True))
        ]
        for model in models:
            batch = pack(items, device=model.device, round_to=ours.row_multiple(256))
            losses = model.train(batch)
            assert torch.isfinite(losses).all()
        for theirs, mine, right in zip(*states, strict=True):
            assert right.grad.any()
            off = toy.off(theirs.grad, right.grad)
            assert off < 3e-2
            assert toy.off(mine.grad, right.grad) < min(1.25 * off, 3e-2)
            for state in (theirs, mine, right):
                state.grad.zero_()
    assert ours._graphs._graphs
    assert not plain._graphs._graphs


def resident(model: SuperModel, rank: int, seed: int) -> AdapterState:
    spec = AdapterSpec(rank=rank, targets="all-linear", dropout=0.1 * seed)
    layout = model.outline.lay_out(spec)
    state = AdapterState(layout, spec, seed=seed, device=model.device, dtype=model.dtype)
    generator = torch.Generator().manual_seed(seed)
    state.master[layout.b_start :] = 0.02 * torch.randn(layout.size - layout.b_start, generator=generator)
    state.publish()
    model.place(state)
    return state


@pytest.mark.parametrize(
    ("config", "gates"),
    [
        (toy.config(), 2),
        (Gemma2Config(**toy.config().to_diff_dict() | {"head_dim": 8, "hidden_activation": "gelu_pytorch_tanh"}), 2),
        (toy.config(hidden_act="relu"), 0),
        (toy.config(mlp_bias=True), 2),
    ],
    ids=["silu", "gelu", "relu", "bias"],
)
def test_gates_that_are_known_are_fused(config: PretrainedConfig, gates: int, tmp_path: Path) -> None:
    """Others stay the model's own, and so does one whose MLP does more than its parts say."""
    fused, plain = toy.super_model(model=config), toy.super_model(model=config)
    assert fuse_gates(fused.model) == gates
    results = [train(model, tmp_path / part, steps=2, length=20) for model, part in ((fused, "a"), (plain, "b"))]
    for mine, theirs in zip(*results, strict=True):
        assert toy.off(mine.gradient, theirs.gradient) < 1e-6


def test_an_mlp_that_does_more_than_its_parts_say_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x) * 1.5)
    assert fuse_gates(toy.super_model().model) == 0

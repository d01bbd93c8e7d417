"""An adapter means what PEFT means by it: which modules, rank and scale; its first weights; its files."""

import json
import shutil
import socket
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import toy
from numeric import error
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tlora import beside
from tlora.adapter import CONFIG, WEIGHTS, AdapterState, export_peft, lay_out
from tlora.errors import CheckpointError, TargetError
from tlora.packing import Item, pack
from tlora.spec import AdapterSpec, BaseSpec
from tlora.supermodel import SuperModel

CPU = torch.device("cpu")
CLOSE = 1e-6
"""In float64: transformers' own model sends its norms through float32."""
BASE = BaseSpec(model="someone/some-model", revision="main")
ADAPTERS = {
    "names": AdapterSpec(rank=3, alpha=5, targets=["q_proj", "up_proj"]),
    "partial names": AdapterSpec(rank=3, alpha=5, targets=["layers.1.mlp.down_proj", "self_attn.k_proj"]),
    "one name": AdapterSpec(rank=2, targets=["o_proj"]),
    "regex": AdapterSpec(rank=8, alpha=32, targets=r"model\.layers\.[01]\.mlp\..*_proj"),
    "all": AdapterSpec(rank=4, alpha=4, targets="all-linear", rslora=True),
    "head": AdapterSpec(rank=4, alpha=7, targets=["lm_head", "v_proj"], dropout=0.25),
    "default": AdapterSpec(),
    "patterns": AdapterSpec(
        rank=8, alpha=16, targets="all-linear", rslora=True,
        rank_pattern={"layers.0.self_attn.q_proj": 64, "q_proj": 2, r"layers\.\d\.mlp\..*": 5},
        alpha_pattern={"q_proj": 3, ".*down_proj": 0.5},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def supermodel() -> SuperModel:
    return toy.super_model(torch.float64)


@pytest.fixture(params=ADAPTERS)
def spec(request: pytest.FixtureRequest) -> AdapterSpec:
    return ADAPTERS[request.param]


def base_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(toy.config(), dtype=torch.float32).to(torch.float64)


def state_of(supermodel: SuperModel, spec: AdapterSpec, *, seed: int = 5, trained: bool = True) -> AdapterState:
    state = AdapterState(supermodel.outline.lay_out(spec), spec, seed=seed, device=CPU, dtype=supermodel.dtype)
    if trained:
        for site in state.layout.sites:
            site.views(state.master)[1].normal_(generator=torch.Generator().manual_seed(len(site.name)))
        state.publish()
    return state


def by_peft(spec: AdapterSpec) -> peft.PeftModel:
    config = peft.LoraConfig(
        r=spec.rank, lora_alpha=spec.alpha, target_modules=spec.targets, use_rslora=spec.rslora,
        rank_pattern=spec.rank_pattern, alpha_pattern=spec.alpha_pattern, task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(base_model(), config)


def adapted(model: peft.PeftModel) -> dict[str, tuple[int, float]]:
    """Rank and scale of every module with an adapter."""
    return {
        name: (module.r["default"], module.scaling["default"])
        for name, module in model.base_model.model.named_modules()
        if isinstance(module, peft.tuners.lora.LoraLayer)
    }


def test_modules_ranks_and_scales_are_those_of_peft(supermodel: SuperModel, spec: AdapterSpec) -> None:
    theirs = adapted(by_peft(spec))
    ours = {site.name: (site.rank, site.scale) for site in supermodel.outline.lay_out(spec).sites}
    assert ours.keys() == theirs.keys()
    assert all(ours[name][0] == theirs[name][0] for name in ours)
    assert {name: scale for name, (_, scale) in ours.items()} == pytest.approx(
        {name: scale for name, (_, scale) in theirs.items()}, rel=1e-12
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"targets": ["q_proj", "nope_proj"]}, "targets: 'nope_proj' matches none of the 15 linear modules; want one "
         "of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head, or a regular expression"),
        ({"targets": r"layers\.0\..*"}, r"targets: 'layers\.0\..*' matches none"),
        ({"targets": r"model\.layers\.0\.mlp\.up"}, r"targets: 'model\.layers\.0\.mlp\.up' matches none"),
        ({"targets": ["proj"]}, "targets: 'proj' matches none"),
        ({"rank_pattern": {"k_proj": 4}}, "rank_pattern: 'k_proj' decides no targeted module"),
        ({"rank_pattern": {"q_proj": 4, ".*q_proj": 9}}, "rank_pattern: '.*q_proj' decides no targeted module"),
        ({"alpha_pattern": {"proj": 4}}, "alpha_pattern: 'proj' decides no targeted module"),
    ],
    ids=["a name", "a regex for its end", "a regex for its start", "part of one", "rank", "shadowed rank", "alpha"],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_refused_by_name(supermodel: SuperModel, fields: dict, said: str) -> None:
    with pytest.raises(TargetError) as caught:
        supermodel.outline.lay_out(AdapterSpec(**{"targets": ["q_proj"], **fields}))
    assert str(caught.value).startswith(f"adapter.{said}")


def test_counts_per_pattern(supermodel: SuperModel) -> None:
    assert supermodel.outline.match(AdapterSpec(targets=["q_proj", "layers.1.mlp.up_proj", "nope"])) == {
        "q_proj": 2, "layers.1.mlp.up_proj": 1, "nope": 0,
    }  # fmt: skip
    assert supermodel.outline.match(AdapterSpec(targets="all-linear")) == {"all-linear": 14}


def test_unknown_model_type_asks_for_targets(supermodel: SuperModel) -> None:
    with pytest.raises(
        TargetError, match=r"no default for model type 'none'; want a list such as \[q_proj, .*down_proj\]"
    ):
        lay_out(AdapterSpec(), supermodel.outline.linears, "none", "lm_head")


def test_a_tied_head_cannot_be_adapted() -> None:
    tied = toy.super_model(model=toy.config(tie_word_embeddings=True))
    with pytest.raises(TargetError, match="'lm_head' shares its weight with the input embedding"):
        tied.outline.lay_out(ADAPTERS["head"])


def test_places_are_apart_aligned_and_in_two_halves(supermodel: SuperModel, spec: AdapterSpec) -> None:
    layout = supermodel.outline.lay_out(spec)
    owner = torch.zeros(layout.size)
    for number, site in enumerate(layout.sites, 1):
        a, b = site.views(owner)
        assert a.shape == (site.rank, site.inputs)
        assert b.shape == (site.outputs, site.rank)
        assert not a.any()
        assert not b.any()
        a.fill_(number)
        b.fill_(-number)
        assert site.a_at % 32 == site.b_at % 32 == 0
    assert (owner[: layout.b_start] >= 0).all()
    assert (owner[layout.b_start :] <= 0).all()
    assert owner.count_nonzero() == layout.num_parameters
    assert layout.size < layout.num_parameters + 32 * 2 * len(layout.sites)


def test_first_weights_are_distributed_as_by_peft(supermodel: SuperModel) -> None:
    spec = AdapterSpec(rank=256, targets=["q_proj", "down_proj"])
    ours = state_of(supermodel, spec, trained=False).weights()
    theirs = peft.get_peft_model_state_dict(by_peft(spec))
    assert ours.keys() == theirs.keys()
    for key, mine in ours.items():
        if "lora_B" in key:
            assert not mine.any()
            continue
        bound = mine.shape[1] ** -0.5
        for weight in (mine, theirs[key].double()):
            counts = torch.histc(weight / bound, 16, -1, 1)
            assert counts.sum() == weight.numel()
            assert ((counts - weight.numel() / 16).abs() < 5 * (weight.numel() / 16) ** 0.5).all()


def test_first_weights_depend_on_seed_and_name_alone(supermodel: SuperModel) -> None:
    some = state_of(supermodel, AdapterSpec(rank=4, targets=["q_proj"]), trained=False).weights()
    more = state_of(supermodel, AdapterSpec(rank=4, targets="all-linear"), trained=False).weights()
    other = state_of(supermodel, AdapterSpec(rank=4, targets=["q_proj"]), seed=6, trained=False).weights()
    drawn = [key for key in some if "lora_A" in key]
    assert all(torch.equal(some[key], more[key]) for key in some)
    assert not any(torch.equal(some[key], other[key]) for key in drawn)
    assert not torch.equal(*(some[key] for key in drawn))


def test_sites_are_views_that_train(supermodel: SuperModel) -> None:
    state = state_of(supermodel, ADAPTERS["patterns"])
    sites = dict(state.sites())
    assert len({site.module for site in sites.values()}) == len(sites)
    for site in sites.values():
        site.grad_a_RK.add_(1.0)
        site.grad_b_NR.add_(2.0)
    half = state.layout.b_start
    assert {*state.grad[:half].unique().tolist()} <= {0.0, 1.0}
    assert {*state.grad[half:].unique().tolist()} <= {0.0, 2.0}
    assert state.grad.count_nonzero() == state.layout.num_parameters


# ---- files


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of the network; each question fails besides."""
    asked: list[str] = []

    def refuse(*args: object, **_: object) -> None:
        asked.append(str(args))
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


def losses(supermodel: SuperModel, state: AdapterState | None) -> list[torch.Tensor]:
    rows = toy.sequences(3, seed=3, low=6)
    slot = supermodel.place(state) if state else 0
    batch = pack([Item(slot, 0, at, 0, 1.0, row) for at, row in enumerate(rows)], device=CPU, training=False)
    try:
        return list(supermodel.evaluate(batch))
    finally:
        if state:
            supermodel.remove(slot)


def their_losses(model: torch.nn.Module) -> list[torch.Tensor]:
    out = []
    for row in toy.sequences(3, seed=3, low=6):
        ids = torch.from_numpy(row.ids).long()
        at = torch.from_numpy(row.is_target).nonzero().squeeze(1)
        out.append(F.cross_entropy(model(input_ids=ids[None]).logits[0, at - 1], ids[at], reduction="sum"))
    return out


def reloaded(folder: Path) -> peft.PeftModel:
    return peft.PeftModel.from_pretrained(base_model(), folder).to(torch.float64).eval()


@torch.no_grad()
def test_export_is_the_same_adapter_in_peft(
    supermodel: SuperModel, spec: AdapterSpec, tmp_path: Path, no_network: list[str]
) -> None:
    state = state_of(supermodel, spec)
    export_peft(state, tmp_path, BASE, supermodel.outline.linears, trained=True)
    assert no_network == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG, WEIGHTS]
    theirs = peft.get_peft_model_state_dict(by_peft(spec), save_embedding_layers=False)
    assert load_file(tmp_path / WEIGHTS).keys() == theirs.keys()
    config = json.loads((tmp_path / CONFIG).read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (BASE.model, BASE.revision)
    model = reloaded(tmp_path)
    assert adapted(model).keys() == {site.name for site in state.layout.sites}
    wanted, ours = their_losses(model), losses(supermodel, state)
    assert max(error(mine, want) for mine, want in zip(ours, wanted, strict=True)) < CLOSE
    without = losses(supermodel, None)
    assert min(error(mine, reference) for mine, reference in zip(ours, without, strict=True)) > 10 * CLOSE


@torch.no_grad()
@pytest.mark.parametrize("plant", ["scale", "prefix", "column"])
def test_a_wrong_export_is_seen(supermodel: SuperModel, tmp_path: Path, plant: str) -> None:
    state = state_of(supermodel, ADAPTERS["names"])
    export_peft(state, tmp_path, BASE, supermodel.outline.linears, trained=True)
    weights = load_file(tmp_path / WEIGHTS)
    if plant == "scale":
        config = json.loads((tmp_path / CONFIG).read_text())
        (tmp_path / CONFIG).write_text(json.dumps({**config, "lora_alpha": config["lora_alpha"] * 1.01}))
    elif plant == "prefix":
        weights = {key.replace("layers", "_orig_mod.layers"): weight for key, weight in weights.items()}
    else:
        for key, weight in weights.items():
            weight[:, -1] *= "lora_A" in key
    save_file(weights, tmp_path / WEIGHTS)
    theirs, ours = their_losses(reloaded(tmp_path)), losses(supermodel, state)
    assert max(error(mine, reference) for mine, reference in zip(ours, theirs, strict=True)) > 10 * CLOSE


def test_asking_the_network_would_be_seen(no_network: list[str]) -> None:
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 9))
    assert no_network


def test_export_refuses_an_adapter_that_changes_nothing(supermodel: SuperModel, tmp_path: Path) -> None:
    state = state_of(supermodel, ADAPTERS["names"], trained=False)
    export_peft(state, tmp_path / "new", BASE, supermodel.outline.linears, trained=False)
    with pytest.raises(CheckpointError, match="every B is zero after training"):
        export_peft(state, tmp_path / "trained", BASE, supermodel.outline.linears, trained=True)
    assert list((tmp_path / "trained").iterdir()) == []


def test_a_full_disk_leaves_the_exported_adapter(
    supermodel: SuperModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of(supermodel, ADAPTERS["names"])
    export_peft(state, tmp_path, BASE, supermodel.outline.linears, trained=True)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    state.master.add_(1.0)

    def full(*args: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    for broken in ("tlora.adapter.save_file", "peft.LoraConfig.save_pretrained"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, full)
            with pytest.raises(OSError, match="No space left"):
                export_peft(state, tmp_path, BASE, supermodel.outline.linears, trained=True)
        assert {path.name for path in tmp_path.iterdir()} == before.keys()
        if broken.endswith("save_file"):
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@torch.no_grad()
def test_starts_from_an_adapter_of_peft(supermodel: SuperModel, spec: AdapterSpec, tmp_path: Path) -> None:
    theirs = by_peft(spec)
    for name, weight in theirs.named_parameters():
        if "lora_" in name:
            weight.normal_(generator=torch.Generator().manual_seed(len(name)))
    theirs.to(torch.float64).save_pretrained(tmp_path, save_embedding_layers=False)
    state = state_of(supermodel, spec, trained=False)
    state.load_peft(tmp_path)
    wanted = their_losses(theirs.eval())
    assert max(error(mine, want) for mine, want in zip(losses(supermodel, state), wanted, strict=True)) < CLOSE


NAMES = {"rank": 3, "alpha": 5, "targets": ["q_proj", "up_proj"]}
UNFIT = {
    "another rank": ({"rank": 6, "alpha": 10}, {}, "is (3, 32) there; want (6, 32). Set adapter.rank"),
    "another alpha": ({"alpha": 6}, {}, "has scale 1.66667 there; got 2 from this job's alpha and rank"),
    "rslora": ({"rslora": True}, {}, "use_rslora is False there; want True"),
    "dora": ({}, {"use_dora": True}, "use_dora is True there; want False"),
    "fewer": ({"targets": ["q_proj", "up_proj", "k_proj"]}, {}, "lacks 4 weights (first: base_model.model.model."),
    "more": ({"targets": ["q_proj"]}, {}, "has, and this job does not target, 4 weights (first: base_model."),
    "no rank": ({}, {"r": None}, "no PEFT adapter can be read"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNFIT)
def test_an_unfit_adapter_is_refused_with_the_reason(supermodel: SuperModel, tmp_path: Path, kind: str) -> None:
    changes, settings, said = UNFIT[kind]
    export_peft(state_of(supermodel, AdapterSpec(**NAMES)), tmp_path, BASE, supermodel.outline.linears, trained=True)
    config = {**json.loads((tmp_path / CONFIG).read_text()), **settings}
    (tmp_path / CONFIG).write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(CheckpointError) as caught:
        state_of(supermodel, AdapterSpec(**{**NAMES, **changes})).load_peft(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("damage", ["no folder", "no weights", "no config", "no json", "a list", "truncated"])
def test_an_unreadable_adapter_is_refused(supermodel: SuperModel, tmp_path: Path, damage: str) -> None:
    spec, folder = AdapterSpec(**NAMES), tmp_path / "adapter"
    export_peft(state_of(supermodel, spec), folder, BASE, supermodel.outline.linears, trained=True)
    if damage == "no folder":
        shutil.rmtree(folder)
    elif damage in ("no weights", "no config"):
        (folder / (WEIGHTS if "weights" in damage else CONFIG)).unlink()
    elif damage == "truncated":
        whole = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    else:
        (folder / CONFIG).write_text("[]" if damage == "a list" else "{")
    with pytest.raises(CheckpointError, match=r"adapter\.init_from = .*: no PEFT adapter can be read"):
        state_of(supermodel, spec).load_peft(folder)


@pytest.mark.parametrize("plant", ["missing", "shape", "precision"])
def test_vectors_of_another_layout_are_refused(supermodel: SuperModel, plant: str) -> None:
    state = state_of(supermodel, ADAPTERS["names"])
    saved = {name: part.clone() for name, part in state.tensors().items()}
    if plant == "missing":
        del saved["exp_avg"]
    else:
        saved["exp_avg"] = saved["exp_avg"][:-1] if plant == "shape" else saved["exp_avg"].float()
    with pytest.raises(CheckpointError, match=r"saved vector 'exp_avg': got .*; want"):
        state.load(saved)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="nothing to copy to without a GPU")
@pytest.mark.parametrize("count", [0, 1, 7, 64])
def test_vectors_are_copied_piece_by_piece(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_PIECE_BYTES", 7 * 4)
    source = torch.randn(count)
    there = torch.full((count,), torch.nan, device="cuda")
    beside.copy_in_pieces(there, source)
    assert torch.equal(there.cpu(), source)
    assert torch.equal(beside.to_host(there), source)

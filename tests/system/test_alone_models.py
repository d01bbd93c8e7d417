"""The families of models that jobs are trained on: loss and adapter as PEFT has them, bits as alone."""

from copy import deepcopy
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import toy
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from tlora.errors import ModelError
from tlora.packing import Item, pack
from tlora.spec import BaseSpec
from tlora.supermodel import SuperModel

SHAPE = {
    **toy.SHAPE,
    **toy.IDS,
    "hidden_size": 36,
    "intermediate_size": 10,  # so narrow that the odd end of a vectorised SiLU covers rows that matter
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=8),
    "llama-tied": LlamaConfig(
        **SHAPE, head_dim=8, tie_word_embeddings=True, attention_bias=True, attention_dropout=0.3
    ),
    "qwen2": Qwen2Config(**{**SHAPE, "hidden_size": 40}),
    "qwen3": Qwen3Config(**SHAPE, head_dim=8),
    "mistral-window": MistralConfig(**SHAPE, head_dim=8, sliding_window=6),
    "gemma": GemmaConfig(**SHAPE, head_dim=8),
    "gemma2": Gemma2Config(
        **SHAPE, head_dim=8, sliding_window=6, final_logit_softcapping=5.0, attn_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=6),
    "phi": PhiConfig(**{**SHAPE, "hidden_size": 48}, resid_pdrop=0.2, embd_pdrop=0.1),
    "phi3": Phi3Config(**{**SHAPE, "hidden_size": 40}),
    "opt-dropout": OPTConfig(
        vocab_size=toy.VOCAB,
        hidden_size=40,
        ffn_dim=50,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=40,
        dropout=0.4,
        attention_dropout=0.2,
        init_std=0.2,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_alone_model_is_the_same_to_the_bit(family: str, tmp_path: Path) -> None:
    model = toy.super_model(torch.float32, model=FAMILIES[family], deterministic=True)
    spec = toy.job(tmp_path, "mine", adapter={"rank": 5, "targets": "all-linear", "dropout": 0.2}, steps=3)
    rows = toy.data(9, seed=1, held_out=2)
    solo = toy.alone(model, spec, rows)
    trainer = toy.Recorder(model, token_budget=256, nano_batches=2)
    beside = {"adapter": {"rank": 16, "targets": "all-linear"}, "batch_size": 2}
    trainer.attach(toy.job(tmp_path, "before", **beside), toy.data(11))
    mine = trainer.attach(spec, rows)
    trainer.attach(toy.job(tmp_path, "after", **beside), toy.data(11, seed=5))
    toy.finish(trainer)
    result = toy.Result.of(trainer, mine)
    assert result.losses == solo.losses
    assert result.evaluations == solo.evaluations
    assert torch.equal(result.master, solo.master)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_model_has_the_same_loss_and_gradients(family: str, checkpointing: bool, tmp_path: Path) -> None:
    config = FAMILIES[family]
    model = toy.super_model(torch.float64, model=config, checkpointing=checkpointing)
    trainer = toy.Recorder(model)
    mine = trainer.attach(
        toy.job(tmp_path, "mine", adapter={"rank": 3, "alpha": 9, "targets": "all-linear"}), toy.data(8)
    )
    trainer.attach(toy.job(tmp_path, "beside"), toy.data(5, seed=9))
    with torch.no_grad():
        for site in mine.state.layout.sites:  # B is zero at first, which would hide A's gradient
            site.views(mine.state.master)[1].copy_(torch.randn(site.outputs, site.rank, dtype=torch.float64) * 0.1)
    trainer._export(mine, "before")

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32, attn_implementation="eager").to(
        torch.float64
    )
    theirs = (
        peft.PeftModel.from_pretrained(base, tmp_path / "mine" / "before", is_trainable=True).to(torch.float64).eval()
    )
    rows = mine.step_sequences(0)
    targets = sum(row.num_targets for row in rows)
    losses = []
    for row in rows:
        ids = torch.from_numpy(row.ids).long()
        labels = torch.where(torch.from_numpy(row.is_target), ids, -100)
        loss = (
            F.cross_entropy(theirs(input_ids=ids[None]).logits[0, :-1].double(), labels[1:], reduction="sum") / targets
        )
        loss.backward()
        losses.append(loss.item())
    trainer.tick()

    assert mine.loss == pytest.approx(sum(losses), rel=1e-6)  # their norms and softmaxes go through float32
    gradient = trainer.first_gradients["mine"]
    parameters = dict(theirs.named_parameters())
    for site in mine.state.layout.sites:
        for letter, part in zip("AB", site.views(gradient), strict=True):
            want = parameters[f"base_model.model.{site.name}.lora_{letter}.default.weight"].grad
            assert toy.off(part, want) < 1e-5, (site.name, letter)


def test_alone_model_keeps_only_layer_inputs_when_checkpointing(tmp_path: Path) -> None:
    """What a test of equal gradients could not see: that layers do run again, and only while training."""
    counts = []
    for checkpointing in (False, True):
        model = toy.super_model(checkpointing=checkpointing)
        trainer = toy.Recorder(model)
        trainer.attach(toy.job(tmp_path / str(checkpointing)), toy.data(8, held_out=2))
        forwards: list[object] = []
        model.model.model.layers[1].input_layernorm.register_forward_hook(lambda *args, seen=forwards: seen.append(1))
        trainer.tick()
        counts.append(len(forwards))
    assert counts == [1, 2]


def test_alone_model_with_a_noisy_router_is_quiet_here(tmp_path: Path) -> None:
    """Its experts' products run over the rows of all jobs: equal to rounding, and refused where bits are asked for."""
    shape = {**SHAPE, "hidden_size": 48, "intermediate_size": 64}
    config = MixtralConfig(**shape, num_local_experts=2, router_jitter_noise=0.3)
    model = toy.super_model(model=config)
    spec, rows = toy.job(tmp_path, "mine", steps=3), toy.data(9, seed=1, low=8)
    trainer = toy.Recorder(model)
    mine = trainer.attach(spec, rows)
    trainer.attach(toy.job(tmp_path, "beside"), toy.data(11))
    toy.finish(trainer)
    assert toy.Result.of(trainer, mine).losses == pytest.approx(toy.alone(model, spec, rows).losses, rel=1e-5)
    with pytest.raises(ModelError, match="without the deterministic mode"):
        toy.super_model(model=config, deterministic=True)


def test_alone_model_refuses_what_packing_would_change() -> None:
    class Leaky(type(AutoModelForCausalLM.from_config(toy.config()))):  # type: ignore[misc]
        """Adds the batch's mean to every embedding, as a model whose tokens see their neighbours would."""

        def __init__(self, config: PretrainedConfig):
            super().__init__(config)
            self.model.embed_tokens.register_forward_hook(lambda module, args, output: output + output.mean(1, True))

    with pytest.raises(ModelError, match="would disturb each other"):
        SuperModel(Leaky(toy.config()), BaseSpec(model="leaky"))


def test_alone_model_without_linears_is_refused() -> None:
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(vocab_size=96, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    with pytest.raises(ModelError, match="no plain linear layers"):
        SuperModel(gpt2, BaseSpec(model="gpt2"))


@pytest.mark.parametrize("per_sequence", [False, True])
def test_alone_logits_do_not_see_what_is_packed_beside(per_sequence: bool) -> None:
    """Fault 22: x after y, x after z, x alone."""
    model = toy.super_model(torch.float64, deterministic=per_sequence)
    x, y, z = toy.sequences(3, seed=4, low=7, high=12)

    def loss_of_x(*before: object) -> float:
        items = [Item(0, 0, at, 0, 1.0, sequence) for at, sequence in enumerate([*before, x])]  # type: ignore[arg-type]
        return model.evaluate(pack(items, device=model.device, per_sequence=per_sequence))[-1].item()

    assert loss_of_x(y) == pytest.approx(loss_of_x(), rel=1e-12)
    assert loss_of_x(z, y) == pytest.approx(loss_of_x(), rel=1e-12)

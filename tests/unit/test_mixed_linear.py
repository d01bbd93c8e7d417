"""Which linears are computed together, and that it changes nothing."""

import pytest
import torch
import toy
from torch import nn
from transformers import AutoModelForCausalLM, OPTConfig, PhiConfig, PreTrainedConfig

from tlora.adapter import AdapterState
from tlora.mixed_linear import Current, replace_linears
from tlora.spec import AdapterSpec

CONFIGS: dict[str, tuple[PreTrainedConfig, list[list[str]]]] = {
    "llama": (toy.config(num_hidden_layers=1), [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"],
                                                ["down_proj"], ["lm_head"]]),
    "opt": (
        OPTConfig(vocab_size=96, hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
                  max_position_embeddings=64, word_embed_proj_dim=32),
        [["q_proj", "k_proj", "v_proj"], ["out_proj"], ["fc1"], ["fc2"], ["lm_head"]],
    ),
    "phi": (  # attention and MLP read one input, but not one after the other
        PhiConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                  max_position_embeddings=64),
        [["q_proj", "k_proj", "v_proj"], ["dense"], ["fc1"], ["fc2"], ["lm_head"]],
    ),
}  # fmt: skip


def model_of(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("family", CONFIGS)
def test_linears_that_read_one_input_are_bundled(family: str) -> None:
    config, want = CONFIGS[family]
    mixed = replace_linears(model_of(config), "lm_head", Current())
    bundles: dict[int, list[tuple[int, str]]] = {}
    for name, linear in mixed.items():
        bundles.setdefault(id(linear.bundle), []).append((linear.index, name.rpartition(".")[2]))
    assert sorted([name for _, name in sorted(names)] for names in bundles.values()) == sorted(want)


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_and_biases_stay_what_they_were(family: str) -> None:
    """Each module keeps a view of the common weight; the model's own forward pass and its names do not change."""
    config, _ = CONFIGS[family]
    plain, model = model_of(config), model_of(config)
    mixed = replace_linears(model, "lm_head", Current())
    ids = torch.arange(20)[None] % 96
    assert torch.equal(plain(input_ids=ids).logits, model(input_ids=ids).logits)
    before, after = plain.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for linear in mixed.values():
        first = sum(linear.bundle.widths[: linear.index])
        part = slice(first, first + linear.out_features)
        assert linear.weight.data_ptr() == linear.bundle.weight[part].data_ptr()
        if linear.bias is not None:
            assert torch.equal(linear.bias, linear.bundle.bias[part])


def test_a_bias_of_one_is_zero_for_the_others() -> None:
    model = model_of(toy.config(num_hidden_layers=1))
    attention = model.model.layers[0].self_attn
    attention.k_proj.bias = nn.Parameter(torch.ones(16), requires_grad=False)
    bundle = replace_linears(model, "lm_head", Current())["model.layers.0.self_attn.q_proj"].bundle
    assert bundle.bias.tolist() == [0.0] * 32 + [1.0] * 16 + [0.0] * 16


def test_every_table_has_room_for_every_resident() -> None:
    """Rows of a job pass through modules that it does not target, and look up their slot there."""
    model = toy.super_model()
    for number in range(70):
        spec = AdapterSpec(rank=2, targets=["q_proj"] if number else "all-linear")
        layout = model.outline.lay_out(spec)
        slot = model.place(AdapterState(layout, spec, seed=number, device=model.device, dtype=model.dtype))
    adapters = [linear.bundle.adapters for linear in model._mixed.values()]
    assert slot == 69
    assert all(part.table.shape[1] > slot for part in adapters)
    assert {part.low for part in adapters} == {64}
    rank = 4  # the field
    queries = model._mixed["model.layers.1.self_attn.q_proj"].bundle.adapters
    assert queries.table[:, :70, rank].tolist() == [[2] * 70, [2] + [0] * 69, [2] + [0] * 69]
    for slot in range(70):
        model.remove(slot)
    assert all(part.is_empty and not part.table.any() for part in adapters)

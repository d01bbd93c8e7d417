"""Packed attention against each sequence alone, written out in float64; and against transformers' own models."""

from dataclasses import replace

import pytest
import torch
import toy
from numeric import BOUNDS, Job, batch_of, compare
from torch import nn
from transformers import Gemma2Config, MistralConfig, PretrainedConfig

from tlora import attention
from tlora.attention import packed_attention
from tlora.errors import ModelError
from tlora.kernels.tiles import RowTable

LENGTHS = (1, 7, 20, 12)
SHAPE = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}  # fmt: skip
OPTIONS = {
    "plain": {},
    "scaled": {"scaling": 0.7},
    "window": {"sliding_window": 4},
    "wide window": {"sliding_window": 20},
    "softcap": {"softcap": 0.5},
    "window and softcap": {"sliding_window": 4, "softcap": 0.5, "scaling": 0.7},
}
Named = dict[str, torch.Tensor]


def rows(per_sequence: bool = False) -> RowTable:
    """Four sequences, and three rows of nobody."""
    return batch_of({0: Job(LENGTHS, rank=None)}, round_to=43, per_sequence=per_sequence).rows


def tensors(heads: int, kv_heads: int, count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value [1, heads, T, D], and the output's gradient [1, T, heads, D]."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, count, 8), (1, kv_heads, count, 8), (1, kv_heads, count, 8), (1, count, heads, 8)]
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


def ours(given: list[torch.Tensor], table: RowTable, spans: list[slice], **options: float) -> Named:
    qkv = [part.clone().requires_grad_() for part in given[:3]]
    out, none = packed_attention(nn.Module(), *qkv, None, tlora_rows=table, **options)
    assert none is None
    out.backward(given[3])
    return named(out, qkv, spans)


def named(out: torch.Tensor, qkv: list[torch.Tensor], spans: list[slice]) -> Named:
    parts = {f"out{at}": out[:, span].detach() for at, span in enumerate(spans)}
    return parts | {
        f"d{name}": torch.cat([part.grad[:, :, span] for span in spans], 2)
        for name, part in zip("qkv", qkv, strict=True)
    }


def alone(
    given: list[torch.Tensor],
    spans: list[slice],
    scaling: float = 8**-0.5,
    sliding_window: int = 99,
    softcap: float = 0.0,
) -> Named:
    """Query by query: softmax over the keys of its own sequence that it may see."""
    qkv = [part.double().requires_grad_() for part in given[:3]]
    q, k, v = (part[0] for part in qkv)
    groups = q.shape[0] // k.shape[0]
    out = torch.zeros(1, q.shape[1], q.shape[0], 8, dtype=torch.float64)
    results = []
    for span in spans:
        for at in range(span.start, span.stop):
            seen = slice(max(span.start, at - sliding_window + 1), at + 1)
            for head in range(q.shape[0]):
                scores = k[head // groups, seen] @ q[head, at] * scaling
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                result = scores.softmax(0) @ v[head // groups, seen]
                out[0, at, head] = result.detach()
                results.append((result * given[3][0, at, head].double()).sum())
    torch.stack(results).sum().backward()
    return named(out, qkv, spans)


def spans_of(table: RowTable) -> list[slice]:
    ends = table.block_ends_S.tolist()
    return [slice(start, start + length) for start, length in zip(ends, LENGTHS, strict=False)]


@pytest.mark.parametrize("per_sequence", [False, True], ids=["whole", "per_sequence"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", OPTIONS)
def test_each_sequence_as_if_alone(kind: str, kv_heads: int, per_sequence: bool) -> None:
    table = rows(per_sequence)
    given, spans = tensors(4, kv_heads, table.num_rows), spans_of(table)
    if per_sequence:  # its filling rows lie after each sequence: causality keeps them out, and their gradient is zero
        own = torch.zeros(table.num_rows, dtype=torch.bool)
        for span in spans:
            own[span] = True
        given[3][:, ~own] = 0.0
    compare(ours(given, table, spans, **OPTIONS[kind]), alone(given, spans, **OPTIONS[kind]), torch.float32)


def test_half_precision_stays_within_its_bounds() -> None:
    given = tensors(4, 2, 43, torch.bfloat16)
    assert torch.bfloat16 in BOUNDS
    compare(ours(given, rows(), spans_of(rows())), alone(given, spans_of(rows())), torch.bfloat16)


def test_garbage_in_rows_of_nobody_stays_there() -> None:
    given, spans = tensors(4, 2, 43), spans_of(rows())
    want = ours(given, rows(), spans)
    for part in given[:3]:
        part[:, :, 40:] = torch.nan
    got = ours(given, rows(), spans)
    assert all(torch.equal(got[name], want[name]) for name in want)


PLANTS = {
    "sequences see each other": (lambda table: replace(table, blocks=(8, 20, 12, 3)), {}, {}),
    "window off by one": (lambda table: table, {"sliding_window": 4}, {"sliding_window": 5}),
    "no softcap": (lambda table: table, {"softcap": 0.5}, {}),
    "another scale": (lambda table: table, {"scaling": 0.7}, {}),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_errors_are_seen(plant: str) -> None:
    change, right, wrong = PLANTS[plant]
    given, spans = tensors(4, 2, 43), spans_of(rows())
    with pytest.raises(AssertionError, match="off by more than"):
        compare(ours(given, change(rows()), spans, **wrong), alone(given, spans, **right), torch.float32)


@pytest.mark.parametrize("asked", [{"attention_mask": torch.ones(1, 1, 43, 43)}, {"s_aux": torch.ones(4)}], ids=str)
def test_what_packed_rows_cannot_have_is_refused(asked: dict) -> None:
    mask = asked.pop("attention_mask", None)
    with pytest.raises(ModelError, match="which packed rows cannot have"):
        packed_attention(nn.Module(), *tensors(4, 2, 43)[:3], mask, tlora_rows=rows(), **asked)


MODELS = {
    "llama": toy.config(),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=4),
    "gemma 2, window and softcap": Gemma2Config(
        **SHAPE, sliding_window=4, attn_logit_softcapping=0.5, final_logit_softcapping=3.0, query_pre_attn_scalar=5,
        pad_token_id=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models_pass_the_check_that_refuses_a_leak(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A super-model checks itself against its model's own attention when it is made."""
    model: PretrainedConfig = MODELS[name]
    toy.super_model(model=model)

    def leaking(*args: torch.Tensor, tlora_rows: RowTable, **others: object) -> tuple[torch.Tensor, None]:
        blocks = (sum(tlora_rows.blocks[:2]), *tlora_rows.blocks[2:])
        return packed_attention(*args, tlora_rows=replace(tlora_rows, blocks=blocks), **others)

    registered = attention.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setattr(attention, "register", lambda: registered.register(attention.NAME, leaking))
    try:
        with pytest.raises(ModelError, match="would disturb each other"):
            toy.super_model(model=model)
    finally:
        monkeypatch.undo()
        attention.register()

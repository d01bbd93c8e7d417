"""Which tokens of a conversation are targets: found by position, whatever the template does to the text."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import CHATML, FAMILIES, Family, Pieces, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from tlora.chat import RowError, mark_targets, read_messages, render_chat, trained_turns

TOKENIZERS = {
    (family.name, trims): family.tokenizer(trims_offsets=trims) for family in FAMILIES for trims in (False, True)
}
CHAT = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2"},
]
PLAIN = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
# The last answer ends otherwise than the others, and an answer names its channel, which a prompt does not.
CHANNELS = (
    "{% for m in messages %}<start>{{ m.role }}{{ '<channel>final' if m.role == 'assistant' else '' }}<message>"
    "{{ m.content }}{{ '<return>' if loop.last and m.role == 'assistant' else '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant{% endif %}"
)
# Counts turns that are no tool calls; refuses a conversation in which they do not alternate.
STRICT = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls[0].function | tojson }}</s>{% else %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}</s>"
    "{% endif %}{% endif %}{% endfor %}"
)


def chatml() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHATML, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def mark(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], only_last: bool = False
) -> tuple[list[int], np.ndarray, bool]:
    """Ids, targets, and whether an EOS is still wanted, as `tlora.data` does it."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    chat = render_chat(tokenizer, messages, answers[-1:] if only_last else answers, None)
    encoded = tokenizer(chat.text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = np.array(encoded["offset_mapping"]).reshape(-1, 2)
    ends = {index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return encoded["input_ids"], *mark_targets(chat, encoded["input_ids"], offsets, ends)


def targets(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], only_last: bool = False) -> list[str]:
    """The text of each run of targets."""
    ids, is_target, _ = mark(tokenizer, messages, only_last)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_target, [False]]).astype(int)))
    return [tokenizer.decode(ids[start:stop]) for start, stop in edges.reshape(-1, 2)]


def expected(tokenizer: PreTrainedTokenizerFast, pieces: Pieces) -> tuple[list[int], list[bool]]:
    """Each piece tokenised by itself: with one token a byte, that is the whole text tokenised."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in pieces]
    return [*chain(*ids)], [own for piece, (_, own) in zip(ids, pieces, strict=True) for _ in piece]


contents = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["assistant", "user", "model", " hi ", "\n\nhi\n", "é\U0001f600\u0301", "\ue000\ue001", "a\u2028"]),
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>assistant\n", "</s>", "x </turn>", "[/INST]", "<|eot|>\n", "<turn>model"]
    ),
    st.sampled_from(["<think>\nwhy\n</think>\n\nso", "<think>\n\n</think>\n\nso", "a</think>b", "<think>"]),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    turns = [[user(draw(contents)), assistant(draw(contents))] for _ in range(draw(st.integers(1, 3)))]
    return [*system, *chain(*turns)]


@pytest.mark.parametrize("trims", [False, True])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=40, deadline=None)
@given(messages=conversations())
def test_targets_are_what_the_model_has_to_write(family: Family, trims: bool, messages: list[dict[str, Any]]) -> None:
    tokenizer = TOKENIZERS[family.name, trims]
    ids, is_target, wants_eos = mark(tokenizer, messages)
    right_ids, right_targets = expected(tokenizer, family.pieces(messages))
    assert ids == right_ids
    assert is_target.tolist() == right_targets
    assert not wants_eos


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_last_marks_only_the_last_answer(family: Family) -> None:
    (text,) = targets(family.tokenizer(), CHAT, only_last=True)
    assert "a2" in text
    assert text.endswith([piece for piece, own in family.pieces(CHAT) if own][-1])


def test_end_of_turn_is_learnt_when_it_is_also_the_padding() -> None:
    tokenizer = chatml()
    tokenizer.pad_token = tokenizer.eos_token
    assert targets(tokenizer, CHAT) == ["a1<|im_end|>", "a2<|im_end|>"]


def test_reasoning_is_learnt_where_the_template_keeps_it() -> None:
    messages = [
        user("q1"),
        assistant("<think>\none\n</think>\n\na1"),
        user("q2"),
        assistant("<think>\ntwo\n</think>\n\na2"),
    ]
    family = next(family for family in FAMILIES if family.name == "qwen")
    assert targets(family.tokenizer(), messages) == ["a1<|im_end|>", "<think>\ntwo\n</think>\n\na2<|im_end|>"]


def test_template_that_ends_the_last_answer_in_its_own_way() -> None:
    tokenizer = byte_tokenizer(CHANNELS, special=("<start>", "<channel>", "<message>", "<end>", "<return>", "</s>"))
    assert targets(tokenizer, CHAT) == ["<channel>final<message>a1<end>", "<channel>final<message>a2<return>"]


def test_template_that_ends_answers_with_the_next_role() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = byte_tokenizer(template, special=("<|user|>", "<|assistant|>", "</s>"))
    assert targets(tokenizer, CHAT) == ["\na1<|user|>", "\na2"]
    assert mark(tokenizer, CHAT)[2]


def test_template_without_end_tokens_wants_an_eos() -> None:
    tokenizer = byte_tokenizer(PLAIN)
    assert targets(tokenizer, CHAT) == ["a1", "a2\n\n"]
    assert mark(tokenizer, CHAT)[2]
    assert not mark(tokenizer, [*CHAT, user("q3")])[2]


def test_end_markers_that_are_no_tokens_are_learnt() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert targets(tokenizer, CHAT) == ["a1<|im_end|>", "a2<|im_end|>\n"]
    assert mark(tokenizer, CHAT)[2]


def test_space_before_the_end_token_is_learnt() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if m.role == 'assistant' %}{{ ' </s>' if loop.last else '  </s>' }}{% endif %}{% endfor %}"
    )
    assert targets(byte_tokenizer(template), CHAT) == ["assistant: a1  </s>", "assistant: a2 </s>"]


def test_conversation_may_begin_with_the_assistant_and_end_with_the_user() -> None:
    for greeting in ("hello", "\ue000hello\ue000"):
        assert targets(chatml(), [assistant(greeting), user("q")]) == [f"{greeting}<|im_end|>"]


def test_answer_that_the_template_leaves_out_is_no_target() -> None:
    tokenizer = chatml()
    tokenizer.chat_template = CHATML.replace("in messages", "in messages[-2:]")
    assert targets(tokenizer, CHAT) == ["a2<|im_end|>"]


def test_token_across_the_start_of_an_answer_is_a_target() -> None:
    tokenizer = chatml()
    tokenizer.add_tokens(["\n\n"])
    assert targets(tokenizer, [user("q"), assistant("\na")]) == ["\n\na<|im_end|>"]


def test_tool_calls_are_learnt_even_if_the_template_refuses_other_text_in_their_place() -> None:
    call = {"type": "function", "id": None, "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    messages = read_messages(
        [
            user("q"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            assistant("a"),
        ]
    )
    tokenizer = byte_tokenizer(STRICT)
    called = '[CALLS]{"name": "add", "arguments": {"a": 1, "b": null}}</s>'
    assert targets(tokenizer, messages) == [called, "a</s>"]


def test_refusals_of_the_template_are_bad_rows() -> None:
    with pytest.raises(RowError, match="template refuses it: must alternate"):
        mark(byte_tokenizer(STRICT), [user("q"), user("q"), assistant("a")])
    tokenizer = chatml()
    tokenizer.chat_template = "{{ raise_exception('no greeting') if messages[0].content != 'hello' }}" + CHATML
    with pytest.raises(RowError, match="no greeting"):
        mark(tokenizer, [assistant("hello"), user("q")])


def test_tools_reach_the_template_without_the_nulls_of_tables() -> None:
    tokenizer = byte_tokenizer("{{ tools | tojson }}" + PLAIN)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}, "b": None}}}]
    text = render_chat(tokenizer, CHAT, [1], tools).text
    assert '"parameters": {"a": {"type": "int"}}}' in text


def test_sharegpt_keys_and_parts_become_messages() -> None:
    turns = [
        {"from": "system", "value": "s", "weight": None},
        {"from": "human", "value": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"from": "gpt", "value": "c"},
    ]
    assert read_messages(turns) == [{"role": "system", "content": "s"}, user("ab"), assistant("c")]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (None, "malformed: messages are null"),
        ("hi", "malformed: messages are str"),
        ([], "empty: no messages"),
        (["hi"], "malformed: a message is str"),
        ([None], "malformed: a message is null"),
        ([{"content": "a"}], "malformed: a message has no role"),
        ([{"role": "narrator", "content": "a"}], "malformed: unknown role 'narrator'"),
        ([{"role": "user", "content": None}], "malformed: a message's content is missing or null"),
        ([{"role": "user"}], "malformed: a message's content is missing or null"),
        (
            [{"role": "assistant", "content": None, "tool_calls": []}],
            "malformed: a message's content is missing or null",
        ),
        ([{"role": "user", "content": 5}], "malformed: a message's content is int"),
        ([{"role": "user", "content": [{"type": "image", "text": None}]}], "malformed: a message's content has parts"),
        ([{"role": "assistant", "content": "", "tool_calls": 5}], "malformed: tool_calls are int"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
            "malformed: a tool call has no function",
        ),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}],
            "malformed: a tool call's arguments are no JSON",
        ),
    ],
)
def test_malformed_messages_are_bad_rows(turns: object, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        read_messages(turns)
    assert str(caught.value).startswith(reason)


def test_which_turns_are_trained() -> None:
    assert trained_turns(CHAT, "assistant") == [1, 3]
    assert trained_turns(CHAT, "assistant", first=2) == [3]
    assert trained_turns(CHAT, "last") == [3]
    assert trained_turns([user("q"), assistant("a", weight=0), user("q"), assistant("a", weight=1)], "assistant") == [3]
    assert trained_turns([user("q")], "assistant") == []
    assert trained_turns([user("q"), assistant(" "), assistant("a")], "assistant") == [1, 2]
    assert trained_turns([user("q"), assistant("", tool_calls=[{}])], "assistant") == [1]
    for blank in (assistant(" \n"), assistant("", tool_calls=[]), assistant("", reasoning="", name="n")):
        with pytest.raises(RowError, match="empty: every assistant turn is blank"):
            trained_turns([user("q"), blank], "assistant")

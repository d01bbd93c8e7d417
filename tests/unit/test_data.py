"""From rows to sequences: formats, targets, limits, held-out rows, and everything that is refused, with its text."""

import json
import pickle
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from toy_tokenizers import CHATML, byte_tokenizer, spaced_tokenizer
from transformers import PreTrainedTokenizerBase

from tlora.data import JobData, TokenSequence, load_data, load_tokenizer
from tlora.errors import DataError, ModelError
from tlora.spec import BaseSpec, DataSpec

CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")
VOCAB = 300
CHAT = byte_tokenizer(CHATML, special=CHATML_TOKENS, eos="<|im_end|>", pad="<|im_end|>")
TEXT = byte_tokenizer(bos="<s>", writes_bos=True)
BARE = byte_tokenizer()
EOS = BARE.eos_token_id


def write(path: Path, rows: list[Any]) -> Path:
    """JSON lines; a row given as text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def load(
    path: Path | str, tokenizer: PreTrainedTokenizerBase = BARE, *, max_positions: int | None = None, **spec: Any
) -> JobData:
    return load_data(
        DataSpec(path=str(path), **spec),
        tokenizer,
        seed=3,
        vocab_size=VOCAB,
        max_positions=max_positions,
        where="job a",
    )


def refusal(path: Path | str, tokenizer: PreTrainedTokenizerBase = BARE, **spec: Any) -> str:
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **spec)
    text = str(caught.value)
    assert text.startswith("job a")
    assert str(pickle.loads(pickle.dumps(caught.value))) == text
    return text


def texts(sequences: list[TokenSequence], tokenizer: PreTrainedTokenizerBase = BARE) -> list[str]:
    return [tokenizer.decode(sequence.ids) for sequence in sequences]


def target_texts(sequences: list[TokenSequence], tokenizer: PreTrainedTokenizerBase = BARE) -> list[str]:
    return [tokenizer.decode(sequence.ids[sequence.is_target]) for sequence in sequences]


def chat(answer: str | None = "a", *, asked: str = "q") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}


def numbered(count: int) -> list[dict[str, str]]:
    return [{"text": f"row {index:03}"} for index in range(count)]


@pytest.mark.parametrize(
    ("row", "name", "decoded", "learnt"),
    [
        (chat(), "messages", "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n", "a<|im_end|>"),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "q"},
                    {"from": "gpt", "value": "a"},
                ]
            },
            "sharegpt",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
            "a<|im_end|>",
        ),
        (
            {"instruction": "do", "input": "it", "output": "done"},
            "alpaca",
            "<|im_start|>user\ndo\n\nit<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>\n",
            "done<|im_end|>",
        ),
        (
            {"instruction": "do", "input": "", "output": "done"},
            "alpaca",
            "<|im_start|>user\ndo<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>\n",
            "done<|im_end|>",
        ),
        (
            chat() | {"system": "s"},
            "messages",
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
            "a<|im_end|>",
        ),
        ({"prompt": "q ", "completion": "a"}, "prompt_completion", "q a<|im_end|>", "a<|im_end|>"),
        ({"question": "q ", "answer": "a<|im_end|>"}, "prompt_completion", "q a<|im_end|>", "a<|im_end|>"),
        (
            {
                "prompt": [*chat("first")["messages"], {"role": "user", "content": "q2"}],
                "completion": [chat()["messages"][1]],
            },
            "prompt_completion",
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nfirst<|im_end|>\n"
            "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n",
            "a<|im_end|>",
        ),
        ({"text": "abc"}, "text", "abc<|im_end|>", "bc<|im_end|>"),
        ({"input_ids": [64, 65, 66]}, "tokens", "abc", "bc"),
        ({"input_ids": [64, 65, 66], "labels": [-100, -100, 66]}, "tokens", "abc", "c"),
        ({"input_ids": [64, 65, 66], "completion_mask": [1, 0, 1]}, "tokens", "abc", "c"),
        ({"input_ids": [64, 65, 66, 66, 0], "attention_mask": [1, 1, 1, 1, 0]}, "tokens", "abcc", "bcc"),
    ],
)
def test_formats_are_found_by_themselves(
    tmp_path: Path, row: dict[str, Any], name: str, decoded: str, learnt: str
) -> None:
    prefix = "<|im_start|>system\nBe good.<|im_end|>\n" if decoded.startswith("<|im_start|>user") else ""
    path = write(tmp_path / "d.jsonl", [row | {"id": 5}])
    for format_name in ("auto", name):
        data = load(path, CHAT, format=format_name)
        assert texts(data.train, CHAT) == [prefix + decoded]
        assert target_texts(data.train, CHAT) == [learnt]
        assert data.report.format == name
        assert (data.train[0].ids.dtype, data.train[0].is_target.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize(
    ("row", "spec", "said"),
    [
        ({"instruction": "a", "output": "b", "text": "c"}, {}, "['instruction', 'output', 'text'] fit alpaca, text"),
        (
            {"body": "a"},
            {},
            "got columns ['body']; want those of a format (messages: messages; sharegpt: conversations or",
        ),
        ({"text": "a"}, {"format": "messages"}, "got columns ['text']; want those of a format (messages: messages)"),
        ({"prompt": "a"}, {}, "got columns ['prompt']; want those of a format"),
    ],
)
def test_columns_that_fit_no_format_or_several_are_refused(
    tmp_path: Path, row: dict[str, str], spec: dict[str, str], said: str
) -> None:
    assert said in refusal(write(tmp_path / "d.jsonl", [row]), **spec)


def test_named_format_decides_between_several(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"instruction": "do", "input": None, "output": "b", "text": "c"}])
    assert texts(load(path, format="text").train) == ["c</s>"]
    prompt = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\ndo\n\n### Response:\n"
    )
    assert texts(load(path, format="alpaca").train) == [f"{prompt}b</s>"]


def test_alpaca_without_a_chat_template_is_the_alpaca_prompt(tmp_path: Path) -> None:
    data = load(write(tmp_path / "d.jsonl", [{"instruction": "do", "input": "it", "output": "done"}]))
    assert texts(data.train) == [
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\ndo\n\n### Input:\nit\n\n"
        "### Response:\ndone</s>"
    ]
    assert target_texts(data.train) == ["done</s>"]


@pytest.mark.parametrize("text", ["ab", "<s>ab", "ab</s>", "<s>ab</s>"])
def test_bos_and_eos_come_once(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": text}])
    assert texts(load(path, TEXT).train) == ["<s>ab</s>"]
    path = write(
        tmp_path / "p.jsonl", [{"prompt": "", "completion": text}, {"prompt": "<s>x", "completion": text[-3:]}]
    )
    first, second = load(path, TEXT).train
    assert TEXT.decode(first.ids) == "<s>ab</s>"
    assert list(second.ids).count(TEXT.bos_token_id) == 1
    assert list(second.ids).count(TEXT.eos_token_id) == 1


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_completion_follows_without_a_space_that_the_row_does_not_have(tmp_path: Path, scheme: str) -> None:
    tokenizer = spaced_tokenizer(scheme, [("▁", "a")])
    pairs = [("un", "happy"), ("q: ", "a"), ("q:\n", "a</s>"), ("", "b")]
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    data = load(write(tmp_path / "d.jsonl", rows), tokenizer)
    assert texts(data.train, tokenizer) == ["unhappy</s>", "q: a</s>", "q:\na</s>", "b</s>"]
    assert [sequence.num_targets for sequence in data.train] == [6, 2, 2, 2]


def test_bos_of_a_template_is_the_only_one(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer = byte_tokenizer(template, bos="<s>", writes_bos=True)
    (sequence,) = load(write(tmp_path / "d.jsonl", [chat()]), tokenizer).train
    assert tokenizer.decode(sequence.ids) == "<s>[user]q</s>[assistant]a</s>"


def test_chat_without_an_end_marker_gets_an_eos_to_learn(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    (sequence,) = load(write(tmp_path / "d.jsonl", [chat()]), tokenizer).train
    assert tokenizer.decode(sequence.ids) == "[user]q[assistant]a</s>"
    assert sequence.is_target[-2:].all()


def test_padding_that_is_also_the_end_is_learnt(tmp_path: Path) -> None:
    (sequence,) = load(write(tmp_path / "d.jsonl", [chat()]), CHAT).train
    assert CHAT.pad_token_id == CHAT.eos_token_id
    ends = sequence.ids == CHAT.eos_token_id
    assert ends.sum() == 3
    assert sequence.is_target[ends].tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("train_on", "learnt"),
    [("assistant", "one<|im_end|>two<|im_end|>"), ("last", "two<|im_end|>"), ("all", None)],
)
def test_train_on(tmp_path: Path, train_on: str, learnt: str | None) -> None:
    row = {"messages": chat("one")["messages"] + chat("two")["messages"]}
    (sequence,) = load(write(tmp_path / "d.jsonl", [row]), CHAT, train_on=train_on).train
    if learnt is None:
        assert sequence.is_target.tolist() == [False] + [True] * (len(sequence) - 1)
    else:
        assert CHAT.decode(sequence.ids[sequence.is_target]) == learnt


def test_train_on_all_needs_no_answer(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "q"}]}
    (sequence,) = load(write(tmp_path / "d.jsonl", [row]), CHAT, train_on="all").train
    assert sequence.num_targets == len(sequence) - 1


def test_tokenizers_that_do_not_suit_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [chat()])
    assert "rows are chats, and the tokenizer has no chat template" in refusal(path, BARE)

    class Slow:
        """What `load_data` may ask of a tokenizer without offsets."""

        chat_template, is_fast, bos_token_id = CHATML, False, None
        all_special_ids = ()

        @property
        def added_tokens_decoder(self) -> dict[int, Any]:
            return {}

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": []}

    assert "tokenizer Slow does not tell which characters a token covers" in refusal(path, Slow())  # type: ignore[arg-type]
    assert "has no EOS token" in refusal(write(tmp_path / "t.jsonl", numbered(1)), byte_tokenizer(eos=None))


def test_token_ids_beyond_the_embedding_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [5, VOCAB - 1]}, {"input_ids": [5, VOCAB]}])
    assert f"row 1 has token id {VOCAB}; want less than {VOCAB}" in refusal(path)
    with pytest.raises(DataError, match=r"row 0 has token id 257; want less than 257.*tokenizer has 258 tokens"):
        load_data(
            DataSpec(path=str(write(tmp_path / "t.jsonl", numbered(1)))),
            BARE, seed=0, vocab_size=257, max_positions=None, where="job a",
        )  # fmt: skip


def test_bad_rows_are_counted_by_reason_with_the_first_of_each(tmp_path: Path) -> None:
    rows = [
        chat(),
        {"messages": None},
        chat(None),
        {"messages": []},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": "hello"},
        {"messages": [{"role": "user", "content": 7}]},
        chat(None),
        {"messages": [{"role": "narrator", "content": "x"}]},
        chat("b"),
        chat(" "),
    ]
    data = load(write(tmp_path / "d.jsonl", rows), CHAT, max_bad_rows=0.9)
    assert target_texts(data.train, CHAT) == ["a<|im_end|>", "b<|im_end|>"]
    report = data.report
    assert (report.num_rows, report.num_sequences) == (11, 2)
    assert {reason: (report.dropped[reason], report.first_row[reason]) for reason in report.dropped} == {
        "malformed: messages are null, not a list": (1, 1),
        "malformed: a message's content is missing or null": (2, 2),
        "empty: no messages": (1, 3),
        "no assistant turn to train on": (1, 4),
        "malformed: messages are str, not a list": (1, 5),
        "malformed: a message's content is int, not text": (1, 6),
        "malformed: unknown role 'narrator'": (1, 8),
        "empty: every assistant turn is blank": (1, 10),
    }
    assert "Dropped: 2 × malformed: a message's content is missing or null (first: row 2); 1 ×" in str(report)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": None}, "malformed: text is null, not text"),
        ({"text": " \n"}, "empty: text is blank"),
        ({"text": {"a": 1}}, "malformed: text is dict, not text"),
        ({"other": "column"}, "malformed: text is null, not text"),
    ],
)
def test_text_that_is_none(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    report = load(write(tmp_path / "d.jsonl", [{"text": "ok"}, row]), max_bad_rows=0.5).report
    assert (report.dropped, report.first_row) == ({reason: 1}, {reason: 1})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": []}, "empty: no input_ids"),
        ({"input_ids": None}, "malformed: input_ids is no list of integers"),
        ({"input_ids": "abc"}, "malformed: input_ids is no list of integers"),
        ({"input_ids": [1, -1]}, "malformed: input_ids has an id that no model has"),
        ({"input_ids": [1, 2**31]}, "malformed: input_ids has an id that no model has"),
        ({"input_ids": [1, 2], "labels": [1]}, "malformed: labels is not as long as input_ids"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, "malformed: labels are neither -100 nor the input_ids"),
        ({"input_ids": [1, 2], "labels": [-100, -100]}, "every label is masked"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "every label is masked"),
        ({"input_ids": [1]}, "every label is masked"),
    ],
)
def test_tokens_that_are_none(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    good = {"input_ids": [1, 2], "labels": [-100, 2]}
    report = load(write(tmp_path / "d.jsonl", [good, row]), max_bad_rows=0.5).report
    assert [dropped.startswith(reason) for dropped in report.dropped] == [True]
    assert list(report.first_row.values()) == [1]


def test_prompts_and_completions_that_are_none(tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "completion": "a"},
        {"prompt": "q", "completion": ""},
        {"prompt": None, "completion": "a"},
        {"prompt": chat()["messages"], "completion": "a"},
        {"instruction": "wrong"},
    ]
    report = load(write(tmp_path / "d.jsonl", rows), CHAT, max_bad_rows=0.9).report
    assert report.first_row == {
        "empty: completion is blank": 1,
        "malformed: prompt is null, not text": 2,
        "malformed: messages are str, not a list": 3,
    }


def test_threshold_of_bad_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [*numbered(18), {"text": None}, {"text": ""}])
    assert load(path, max_bad_rows=0.1).report.num_sequences == 18
    text = refusal(path, max_bad_rows=0.09)
    assert "2 of 20 rows are bad; want at most 9.0% (data.max_bad_rows)" in text
    assert "1 × empty: text is blank (first: row 19); 1 × malformed: text is null, not text (first: row 18)" in text
    assert "tlora preview" in text


def test_rows_the_template_refuses_are_bad(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML)
    row = {"messages": [{"role": "system", "content": "s"}, *chat()["messages"]]}
    path = write(tmp_path / "d.jsonl", [chat(), row])
    assert load(path, tokenizer, max_bad_rows=0.5).report.dropped == {
        "malformed: the chat template refuses it: no system": 1
    }


def test_no_assistant_anywhere_is_refused_with_a_sample(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "only me"}]}
    for most in (0.05, 1.0):
        text = refusal(write(tmp_path / "d.jsonl", [row] * 3), CHAT, max_bad_rows=most)
        assert "3 × no assistant turn to train on (first: row 0)" in text
        assert "Row 0 as the model would see it" in text
        assert "<|im_start|>user\\nonly me<|im_end|>" in text


def test_every_label_masked_is_refused_with_a_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"input_ids": [71, 72], "labels": [-100, -100]}])
    text = refusal(path)
    assert "1 × every label is masked (first: row 0)" in text
    assert "'hi'" in text


def test_long_rows_are_dropped_cut_or_refused(tmp_path: Path) -> None:
    rows = [
        {"prompt": "1234", "completion": "56"},
        {"prompt": "1", "completion": "23456789"},
        {"prompt": "12345678", "completion": "9"},
    ]
    path = write(tmp_path / "d.jsonl", rows)
    data = load(path, max_length=7, max_bad_rows=0.0)
    assert texts(data.train) == ["123456</s>"]
    assert (data.report.dropped, data.report.first_row) == ({"longer than 7 tokens": 2}, {"longer than 7 tokens": 1})
    data = load(path, max_length=100, max_positions=7, on_too_long="truncate", max_bad_rows=0.4)
    assert texts(data.train) == ["123456</s>", "1234567"]
    assert data.report.num_truncated == 1
    assert data.report.dropped == {"no target within the first 7 tokens": 1}
    assert data.report.longest == 7
    assert "1 of 3 rows are bad" in refusal(path, max_length=7, on_too_long="truncate", max_bad_rows=0.3)
    text = refusal(path, max_length=7, on_too_long="error")
    assert "row 1 has 10 tokens; want at most 7" in text
    assert "Set data.on_too_long to drop or truncate" in text


def test_only_long_rows_leave_nothing(tmp_path: Path) -> None:
    text = refusal(write(tmp_path / "d.jsonl", numbered(4)), max_length=5)
    assert "none of 4 rows is left to train on; want at least one. 4 × longer than 5 tokens (first: row 0)" in text


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"), [(10, 0.3, 3), (10, 1e-8, 1), (100, 0.07, 7), (7, 0.5, 4), (2, 0.1, 1)]
)
def test_held_out_share(tmp_path: Path, count: int, fraction: float, held_out: int) -> None:
    path = write(tmp_path / "d.jsonl", numbered(count))
    data = load(path, eval_fraction=fraction)
    assert len(data.eval) == held_out
    train, evaluation = texts(data.train), texts(data.eval)
    assert train == sorted(train)
    assert evaluation == sorted(evaluation)
    assert sorted(train + evaluation) == texts(load(path).train)
    assert texts(load(path, eval_fraction=fraction).eval) == evaluation


def test_held_out_rows_depend_on_the_seed_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", numbered(40))
    spec = DataSpec(path=str(path), eval_fraction=0.2)
    drawn = [
        load_data(spec, BARE, seed=seed, vocab_size=VOCAB, max_positions=None, where="a").eval for seed in (1, 1, 2)
    ]
    assert texts(drawn[0]) == texts(drawn[1]) != texts(drawn[2])


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", numbered(1))
    assert "data.eval_fraction = 0.5 holds out 1 of 1 sequences" in refusal(path, eval_fraction=0.5)


def test_evaluation_file_is_read_in_the_same_format(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"text": "a", "instruction": "i"}])
    evaluation = write(tmp_path / "e.jsonl", [{"text": "b", "prompt": "p", "completion": "c"}, {"text": "x" * 50}])
    data = load(path, eval_path=str(evaluation), max_length=10)
    assert texts(data.eval) == ["b</s>"]
    assert data.eval_report is not None
    assert data.eval_report.dropped == {"longer than 10 tokens": 1}
    other = write(tmp_path / "o.jsonl", [{"prompt": "p", "completion": "c"}])
    assert "job a, evaluation: got columns" in refusal(path, eval_path=str(other))
    text = refusal(path, eval_path=str(write(tmp_path / "l.jsonl", [{"text": "x" * 50}])), max_length=10)
    assert text.startswith("job a, evaluation: none of 1 rows is left")


def test_report_adds_up(tmp_path: Path) -> None:
    report = load(
        write(tmp_path / "d.jsonl", [{"prompt": "abc", "completion": "d"}, {"prompt": "a", "completion": "b"}])
    ).report
    assert (report.num_tokens, report.num_target_tokens, report.longest, report.mean_length) == (8, 4, 5, 4.0)
    assert str(report) == (
        "2 rows (prompt_completion) gave 2 sequences: 8 tokens, 4 of them targets, longest 5, mean 4.0."
    )


def test_many_rows_keep_their_order_and_numbers(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = numbered(2500)
    rows[1024]["text"] = rows[2300]["text"] = None
    data = load(write(tmp_path / "d.jsonl", rows))
    assert texts(data.train) == [f"{row['text']}</s>" for row in rows if row["text"]]
    assert list(data.report.first_row.values()) == [1024]
    assert load(write(tmp_path / "e.jsonl", rows[:1025])).report.num_sequences == 1024


def test_tokenizer_of_a_folder(tmp_path: Path) -> None:
    CHAT.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(BaseSpec(model=str(tmp_path)))
    assert tokenizer.chat_template == CHATML
    assert tokenizer("hi")["input_ids"] == CHAT("hi")["input_ids"]


@pytest.mark.parametrize("model_type", [None, "llama", "qwen2", "gemma"])
def test_folder_without_a_tokenizer_is_refused(tmp_path: Path, model_type: str | None) -> None:
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ModelError, match=r"base\.model = .*tokenizer"):
        load_tokenizer(BaseSpec(model=str(tmp_path)))


def test_unknown_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"base\.model = nobody/nothing: no such folder, and not on the hub \(OSError"):
        load_tokenizer(BaseSpec(model="nobody/nothing"))
    with pytest.raises(ModelError, match="no such folder, and not on the hub"):
        load_tokenizer(BaseSpec(model="./no/such/folder"))

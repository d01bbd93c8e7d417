"""What single rows say: the system column of chats and of Alpaca's rows."""

from typing import Any

import pytest
from toy_tokenizers import CHATML, byte_tokenizer

from tlora.chat import Chat, RowError
from tlora.formats import Plain, RowReader, find_format

ASKED = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
SYSTEM = "<|im_start|>system\ns<|im_end|>\n"
REST = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


def said(row: dict[str, Any], template: str | None = CHATML) -> str:
    """All the text that a row gives, and that only its answer is learnt."""
    tokenizer = byte_tokenizer(template, special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
    name, columns = find_format(row, "auto", "job a")
    says = RowReader(name, columns, tokenizer, "assistant", "job a").read(row)
    if isinstance(says, Plain):
        assert says.completion == "a"
        return says.prompt + says.completion
    assert isinstance(says, Chat)
    (turn,) = says.turns
    assert says.text[turn.start : turn.end] == "a<|im_end|>"
    return says.text


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWER]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "tools": ""},
        {"instruction": "q", "input": "", "output": "a"},
        {"prompt": [ASKED], "completion": [ANSWER]},
    ],
)
def test_system_column_is_the_first_message(row: dict[str, Any]) -> None:
    assert said({**row, "system": "s"}) == SYSTEM + REST
    for none in (None, "", " \n"):
        assert said({**row, "system": none}) == "<|im_start|>system\nBe good.<|im_end|>\n" + REST
    with pytest.raises(RowError, match="malformed: system is dict, not text"):
        said({**row, "system": {"a": 1}})


def test_system_column_is_said_once() -> None:
    row = {"messages": [{"role": "system", "content": "s"}, ASKED, ANSWER]}
    assert said({**row, "system": "s\n"}) == said({**row, "system": None}) == SYSTEM + REST
    with pytest.raises(RowError, match="malformed: the system column differs from the conversation's own"):
        said({**row, "system": "t"})


def test_system_column_takes_the_place_of_alpacas_preamble() -> None:
    row = {"instruction": "q", "output": "a"}
    rest = "\n\n### Instruction:\nq\n\n### Response:\na"
    assert said({**row, "system": "Be terse."}, template=None) == "Be terse." + rest
    preamble = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
    )
    assert said({**row, "system": " "}, template=None) == preamble + rest

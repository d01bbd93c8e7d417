"""Schemas of a row: which one a table has, and what each of its rows says.

Called by `tlora.data`, which turns what is said into tokens. Chat messages are read and rendered by `tlora.chat`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tlora.chat import Chat, RowError, read_messages, render_chat, trained_turns
from tlora.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = Mapping[str, Any]

REQUIRED: dict[str, list[tuple[str, ...]]] = {
    "messages": [("messages",)],
    "sharegpt": [("conversations",), ("conversation",)],
    "alpaca": [("instruction", "output"), ("instruction", "response")],
    "prompt_completion": [("prompt", "completion"), ("prompt", "response"), ("question", "answer")],
    "text": [("text",)],
    "tokens": [("input_ids",)],
}
_MASKS = ("completion_mask", "assistant_masks", "loss_mask", "target_mask")
OPTIONAL = {"system", "tools", "input", "context", "labels", "attention_mask", *_MASKS}

_ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request."
_ALPACA_INPUT = ", paired with an input that provides further context"


@dataclass(frozen=True, slots=True)
class Plain:
    """Text to be completed, and its completion, which is learnt."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids as given, and which of them are targets."""

    ids: np.ndarray
    is_target: np.ndarray


Said = Chat | Plain | Tokens


def find_format(columns: Iterable[str], named: str, where: str) -> tuple[str, tuple[str, ...]]:
    """The format of a table, and the columns that carry it. `named` is `auto` or the one format to try."""
    present = set(columns)
    found = {
        name: next((wanted for wanted in choices if present.issuperset(wanted)), None)
        for name, choices in REQUIRED.items()
        if named in ("auto", name)
    }
    matches = [(name, wanted) for name, wanted in found.items() if wanted is not None]
    if len(matches) == 1:
        return matches[0]
    known = "; ".join(f"{name}: {' or '.join('+'.join(c) for c in REQUIRED[name])}" for name in found)
    if matches:
        names = ", ".join(name for name, _ in matches)
        raise DataError(f"{where}: columns {sorted(present)} fit {names}; want one format. Set data.format to one.")
    raise DataError(
        f"{where}: got columns {sorted(present)}; want those of a format ({known}). Rename the columns"
        + (", or name the right format in data.format." if named != "auto" else ".")
    )


class RowReader:
    """Reads rows of one format for one tokenizer. Raises DataError where the two do not go together."""

    def __init__(
        self, name: str, columns: tuple[str, ...], tokenizer: "PreTrainedTokenizerBase", train_on: str, where: str
    ):
        self._name, self._columns = name, columns
        self._tokenizer, self._train_on, self._where = tokenizer, train_on, where
        self._has_template = bool(getattr(tokenizer, "chat_template", None))

    def read(self, row: Row) -> Said:
        """What one row says. Raises RowError."""
        match self._name:
            case "messages" | "sharegpt":
                return self._chat(read_messages(row[self._columns[0]]), row)
            case "alpaca":
                return self._alpaca(row)
            case "prompt_completion":
                return self._completion(row)
            case "text":
                return Plain("", _text(row, self._columns[0]))
        return _tokens(row)

    def _chat(self, messages: list[dict[str, Any]], row: Row, first: int = 0) -> Chat:
        if not self._has_template:
            raise DataError(
                f"{self._where}: rows are chats, and the tokenizer has no chat template; want one. Take the model's "
                "chat variant as base.model, or give rows as prompt and completion, or as text."
            )
        if not self._tokenizer.is_fast:
            raise DataError(
                f"{self._where}: tokenizer {type(self._tokenizer).__name__} does not tell which characters a token "
                "covers, so turns cannot be found in it; want a fast tokenizer. Save the model with a tokenizer.json."
            )
        if system := _optional_text(row, "system"):
            if messages[0]["role"] not in ("system", "developer"):
                messages, first = [{"role": "system", "content": system}, *messages], first + 1
            elif messages[0].get("content", "").strip() != system.strip():
                raise RowError("malformed: the system column differs from the conversation's own")
        trained = trained_turns(messages, self._train_on, first)
        return render_chat(self._tokenizer, messages, trained, _tools(row.get("tools")))

    def _alpaca(self, row: Row) -> Chat | Plain:
        instruction, output = (_text(row, column) for column in self._columns)
        given = _optional_text(row, "input") or _optional_text(row, "context")
        if self._has_template:
            asked = f"{instruction}\n\n{given}" if given else instruction
            turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
            return self._chat(turns, row)
        lead = _optional_text(row, "system") or _ALPACA.format(_ALPACA_INPUT if given else "")
        prompt = f"{lead}\n\n### Instruction:\n{instruction}\n\n"
        return Plain(prompt + (f"### Input:\n{given}\n\n" if given else "") + "### Response:\n", output)

    def _completion(self, row: Row) -> Chat | Plain:
        prompt, completion = (row[column] for column in self._columns)
        if isinstance(prompt, list):
            turns = read_messages(prompt)
            return self._chat(turns + read_messages(completion), row, first=len(turns))
        return Plain(_text(row, self._columns[0], may_be_blank=True), _text(row, self._columns[1]))


def _text(row: Row, column: str, may_be_blank: bool = False) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise RowError(f"malformed: {column} is {'null' if value is None else type(value).__name__}, not text")
    if not may_be_blank and not value.strip():
        raise RowError(f"empty: {column} is blank")
    return value


def _optional_text(row: Row, column: str) -> str:
    """The column's text, or nothing where there is none or it is blank."""
    value = row.get(column) or ""
    if not isinstance(value, str):
        raise RowError(f"malformed: {column} is {type(value).__name__}, not text")
    return value if value.strip() else ""


def _tools(tools: Any) -> list[Any] | None:
    """Tool schemas, which tables often hold as one JSON text."""
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise RowError("malformed: tools are no JSON") from None
    return tools or None


def _tokens(row: Row) -> Tokens:
    ids = _integers(row, "input_ids")
    if (ids < 0).any() or (ids >= 2**31).any():
        raise RowError("malformed: input_ids has an id that no model has")
    is_target = np.ones(ids.size, bool)
    if row.get("labels") is not None:
        labels = _integers(row, "labels", ids.size)
        is_target = labels != -100
        if (labels[is_target] != ids[is_target]).any():
            raise RowError("malformed: labels are neither -100 nor the input_ids at their place")
    for name in _MASKS:
        if row.get(name) is not None:
            is_target &= _integers(row, name, ids.size) != 0
    if row.get("attention_mask") is not None:
        kept = _integers(row, "attention_mask", ids.size) != 0
        ids, is_target = ids[kept], is_target[kept]
    if ids.size == 0:
        raise RowError("empty: no input_ids")
    return Tokens(ids, is_target)


def _integers(row: Row, column: str, size: int | None = None) -> np.ndarray:
    try:
        values = np.array(row[column])
    except ValueError:
        raise RowError(f"malformed: {column} is no list of integers") from None
    if values.ndim != 1 or (values.size and values.dtype.kind not in "iub"):
        raise RowError(f"malformed: {column} is no list of integers")
    if size is not None and values.size != size:
        raise RowError(f"malformed: {column} is not as long as input_ids")
    return values.astype(np.int64)

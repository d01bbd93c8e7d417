"""Conversations: messages as files write them, rendered by a chat template, and which characters each turn wrote.

Called by `tlora.data`. A turn is what the model itself has to write after the generation prompt, its end token
included. It is found by rendering again, never by searching for markers: first as what one more message adds to the
conversation before it; where a template rewrites earlier text, as what changes when the message is replaced.
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

_ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "bot": "assistant", "function_call": "assistant", "tool": "tool",
    "function": "tool", "function_response": "tool", "observation": "tool",
}  # fmt: skip


class RowError(Exception):
    """A row that cannot become a sequence; its text is the reason under which the row is counted."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The characters [start, end) of one message; `has_tail`: they reach over all that ends the turn."""

    start: int
    end: int
    has_tail: bool


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered conversation, the turns to train on, and whether the last of them ends the conversation."""

    text: str
    turns: tuple[Turn, ...]
    ends_trained: bool


def read_messages(turns: object) -> list[Message]:
    """Messages with the keys `role` and `content`, from OpenAI's or ShareGPT's; nulls that tables add are left out.

    Raises RowError.
    """
    if not isinstance(turns, list):
        raise RowError(f"malformed: messages are {_kind(turns)}, not a list")
    if not turns:
        raise RowError("empty: no messages")
    return [_read_message(turn) for turn in turns]


def trained_turns(messages: Sequence[Message], train_on: str, first: int = 0) -> list[int]:
    """Indices, from `first` on, of the assistant's messages to learn; OpenAI's `weight: 0` excludes one."""
    turns = [
        index
        for index, message in enumerate(messages)
        if index >= first and message["role"] == "assistant" and message.get("weight") != 0
    ]
    if turns and all(not _says_something(messages[index]) for index in turns):
        raise RowError("empty: every assistant turn is blank")
    return turns[-1:] if train_on == "last" else turns


def render_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: list[Message], trained: Sequence[int], tools: list[Any] | None
) -> Chat:
    """Render a conversation and find the turns `trained` in it. Raises RowError where the template refuses."""
    render = partial(_render, tokenizer, _without_nulls(tools))
    text = render(messages)
    turns = tuple(_find_turn(render, messages, index, text) for index in trained)
    return Chat(text, turns, bool(trained) and trained[-1] == len(messages) - 1)


def mark_targets(chat: Chat, ids: list[int], offsets: np.ndarray, end_ids: Collection[int]) -> tuple[np.ndarray, bool]:
    """Mask of the tokens that `chat.turns` wrote, and whether the conversation still wants an EOS after its last one.

    `offsets` int [L, 2] are the tokens' characters in `chat.text`; `end_ids` are tokens that can end a turn.
    """
    is_target = np.zeros(len(ids), bool)
    starts, ends = offsets[:, 0], offsets[:, 1]
    has_ended = True
    for turn in chat.turns:
        first = int(np.searchsorted(ends, turn.start, "right"))
        stop = int(np.searchsorted(starts, turn.end, "left"))
        has_ended = turn.has_tail and stop > first and ids[stop - 1] in end_ids
        if not has_ended:
            end = stop
            while end < len(ids) and not chat.text[starts[end] : ends[end]].strip():
                end += 1
            has_ended = end < len(ids) and ids[end] in end_ids
            stop = end + 1 if has_ended else stop
        is_target[first:stop] = True
    wants_eos = chat.ends_trained and not has_ended
    if wants_eos:
        is_target[first:] = True
    return is_target, wants_eos


def _render(
    tokenizer: "PreTrainedTokenizerBase", tools: list[Any] | None, messages: list[Message], ask: bool = False
) -> str:
    """The template's text; with `ask`, up to where the model has to answer."""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask))
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        raise RowError(f"malformed: the chat template refuses it: {error}") from error


def _find_turn(render: Callable[..., str], messages: list[Message], index: int, text: str) -> Turn:
    before = _prefix(text, render, messages[:index], ask=True)
    through = len(text) if index == len(messages) - 1 else _prefix(text, render, messages[: index + 1])
    if before is not None and through is not None and before <= through:
        return Turn(before, max(before, len(text[:through].rstrip())), has_tail=True)
    # A character found nowhere else: the two texts part where the answer begins, and meet again where it ends.
    mark = next(chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
    other = render([*messages[:index], {"role": "assistant", "content": mark}, *messages[index + 1 :]])
    start = _num_shared(text, other) if before is None else before
    return Turn(start, max(start, len(text) - _num_shared(text[::-1], other[::-1])), has_tail=False)


def _prefix(text: str, render: Callable[..., str], messages: list[Message], ask: bool = False) -> int | None:
    """Length of what `messages` alone render to, if `text` begins with it."""
    try:
        part = render(messages, ask=ask)
    except RowError:  # a template that suits a conversation need not suit a part of it
        return None
    return len(part) if text.startswith(part) else None


def _num_shared(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return bisect_left(range(1, min(len(a), len(b)) + 1), True, key=lambda size: a[:size] != b[:size])


def _read_message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise RowError(f"malformed: a message is {_kind(turn)}, not a mapping")
    message: Message = _without_nulls(turn)
    said = {key: message.pop(key) for key in ("role", "from", "content", "value") if key in message}
    given, content = said.get("role", said.get("from")), said.get("content", said.get("value"))
    if not isinstance(given, str):
        raise RowError("malformed: a message has no role")
    if given not in _ROLES:
        raise RowError(f"malformed: unknown role '{given}'")
    calls = message.get("tool_calls")
    if isinstance(content, list):
        content = _join_parts(content)
    if content is None and not calls:
        raise RowError("malformed: a message's content is missing or null")
    if content is not None and not isinstance(content, str):
        raise RowError(f"malformed: a message's content is {_kind(content)}, not text")
    if calls:
        message["tool_calls"] = _read_calls(calls)
    return {"role": _ROLES[given], **({} if content is None else {"content": content}), **message}


def _join_parts(parts: list[Any]) -> str:
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise RowError("malformed: a message's content has parts that are no text")
    return "".join(part["text"] for part in parts)


def _read_calls(calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowError(f"malformed: tool_calls are {_kind(calls)}, not a list")
    return [_read_call(call) for call in calls]


def _read_call(call: object) -> dict[str, Any]:
    """A tool call whose arguments, a JSON text for OpenAI, are the mapping that templates want."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RowError("malformed: a tool call has no function")
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(arguments)}}
    except json.JSONDecodeError:
        raise RowError("malformed: a tool call's arguments are no JSON") from None


def _says_something(message: Message) -> bool:
    if message.get("content", "").strip():
        return True
    return any(value for key, value in message.items() if key not in ("role", "content", "weight", "name"))


def _without_nulls(value: Any) -> Any:
    """Tables give every mapping of a column the keys of all the others, as null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__

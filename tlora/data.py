"""A job's data: rows become token ids and target masks, or are refused, before anything is trained.

Called by `tlora.local` and `tlora preview`. Rows come from `tlora.sources`, their meaning from
`tlora.formats`, the targets of a chat from `tlora.chat`. What is dropped is counted by reason, and never silently.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tlora.chat import Chat, RowError, mark_targets
from tlora.errors import DataError, ModelError
from tlora.formats import OPTIONAL, Plain, RowReader, Said, Tokens, find_format
from tlora.randomness import permutation
from tlora.sources import read_rows
from tlora.spec import BaseSpec, DataSpec

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_CHUNK_ROWS = 1024
_SHOWN_REASONS = 8
_SHOWN_TOKENS = 200


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One training sample."""

    ids: np.ndarray
    """int32 [L]."""
    is_target: np.ndarray
    """bool [L]: token i is to be predicted from the tokens before it. The first never is."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def num_targets(self) -> int:
        return int(self.is_target.sum())


@dataclass(frozen=True, slots=True)
class DataReport:
    """What became of the rows of one source. Rows count from 0."""

    format: str
    num_rows: int
    num_sequences: int
    num_truncated: int
    num_tokens: int
    num_target_tokens: int
    longest: int
    dropped: dict[str, int]
    """Rows by the reason why they were left out."""
    first_row: dict[str, int]
    """The first row left out for each reason."""

    @property
    def is_whole(self) -> bool:
        """Whether every row is there as it was."""
        return not (self.dropped or self.num_truncated)

    @property
    def mean_length(self) -> float:
        return self.num_tokens / self.num_sequences

    def __str__(self) -> str:
        dropped = f" Dropped: {_count_reasons(self.dropped, self.first_row)}." if self.dropped else ""
        truncated = f", {self.num_truncated} of them truncated" if self.num_truncated else ""
        return (
            f"{self.num_rows} rows ({self.format}) gave {self.num_sequences} sequences{truncated}: "
            f"{self.num_tokens} tokens, {self.num_target_tokens} of them targets, "
            f"longest {self.longest}, mean {self.mean_length:.1f}.{dropped}"
        )


@dataclass(frozen=True, slots=True, weakref_slot=True)
class JobData:
    """All that a job trains and evaluates on, in the order of its rows."""

    train: list[TokenSequence]
    eval: list[TokenSequence]
    report: DataReport
    """Of the training rows, those held out by `eval_fraction` included."""
    eval_report: DataReport | None


def load_tokenizer(base: BaseSpec) -> "PreTrainedTokenizerBase":
    """The base model's own tokenizer. Raises ModelError."""
    from transformers import AutoTokenizer

    folder = Path(base.model).expanduser()
    name = str(folder) if folder.is_dir() else base.model
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=base.revision, trust_remote_code=False)
    except Exception as error:  # hub, network, JSON and each tokenizer class raise their own
        reason = " ".join(str(error).split())
        tried = "the folder has no tokenizer that loads" if folder.is_dir() else "no such folder, and not on the hub"
        raise ModelError(
            f"base.model = {base.model}: {tried} ({type(error).__name__}: {reason}). "
            "Check the name, the revision and the network, or save a tokenizer beside the model."
        ) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.get_added_vocab()):
        raise ModelError(f"base.model = {base.model}: its tokenizer has no words. Save the tokenizer beside the model.")
    return tokenizer


def load_data(
    spec: DataSpec,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    seed: int,
    vocab_size: int,
    max_positions: int | None,
    where: str,
) -> JobData:
    """Read, tokenise and filter a job's rows. `where`, such as `job dates`, begins each text of a DataError.

    `vocab_size` counts the rows of the model's embedding; `max_positions` bounds a sequence beside `spec.max_length`.
    """
    limit = min(spec.max_length, max_positions or spec.max_length)
    collect = partial(_collect, spec=spec, tokenizer=tokenizer, vocab_size=vocab_size, limit=limit)
    train, report = collect(read_rows(spec.path, spec.name, spec.split, where), spec.format, where=where)
    if spec.eval_fraction > 0:
        train, held_out = _hold_out(train, spec.eval_fraction, seed, where)
        return JobData(train, held_out, report, None)
    where = f"{where}, evaluation"
    if spec.eval_path is not None:
        rows = read_rows(spec.eval_path, None, "train", where)
    elif spec.eval_split is not None:
        rows = read_rows(spec.path, spec.name, spec.eval_split, where)
    else:
        return JobData(train, [], report, None)
    evaluation, eval_report = collect(rows, report.format, where=where)
    return JobData(train, evaluation, report, eval_report)


def _hold_out(
    sequences: list[TokenSequence], fraction: float, seed: int, where: str
) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Sequences to train on and to evaluate on, each in their first order."""
    count = max(1, math.ceil(round(len(sequences) * fraction, 6)))  # 100 × 0.07 is more than 7
    if count >= len(sequences):
        raise DataError(
            f"{where}: data.eval_fraction = {fraction} holds out {count} of {len(sequences)} sequences; want at least "
            "one left to train on. Give more rows, a smaller fraction, or data.eval_path."
        )
    chosen = set(permutation(seed, "eval", 0, len(sequences))[:count].tolist())
    train = [sequence for index, sequence in enumerate(sequences) if index not in chosen]
    return train, [sequences[index] for index in sorted(chosen)]


@dataclass(slots=True)
class _Tally:
    """Rows left out, by reason. Those that are bad count against `data.max_bad_rows`."""

    dropped: Counter[str] = field(default_factory=Counter)
    first_row: dict[str, int] = field(default_factory=dict)
    num_bad: int = 0
    masked: tuple[int, TokenSequence] | None = None
    """The first sequence without a target, and its row."""

    def drop(self, row: int, reason: str, is_bad: bool = True) -> None:
        self.dropped[reason] += 1
        self.first_row.setdefault(reason, row)
        self.num_bad += is_bad

    def __str__(self) -> str:
        return _count_reasons(self.dropped, self.first_row)


def _collect(
    rows: "Dataset",
    format_name: str,
    *,
    spec: DataSpec,
    tokenizer: "PreTrainedTokenizerBase",
    vocab_size: int,
    limit: int,
    where: str,
) -> tuple[list[TokenSequence], DataReport]:
    """The sequences of one source that can be trained on, and what became of the other rows."""
    name, columns = find_format(rows.column_names, format_name, where)
    rows = rows.select_columns([column for column in rows.column_names if column in OPTIONAL.union(columns)])
    reader = RowReader(name, columns, tokenizer, spec.train_on, where)
    encoder = _Encoder(tokenizer, spec.train_on == "all", where)
    kept: list[TokenSequence] = []
    tally = _Tally()
    num_truncated = 0
    for row, sequence in _tokenise(rows, reader, encoder, tally):
        if sequence.num_targets == 0:
            tally.masked = tally.masked or (row, sequence)
            tally.drop(row, "every label is masked" if name == "tokens" else "no assistant turn to train on")
            continue
        if len(sequence) > limit:
            if spec.on_too_long == "error":
                raise DataError(
                    f"{where}: row {row} has {len(sequence)} tokens; want at most {limit} (the smaller of "
                    "data.max_length and the model's positions). Set data.on_too_long to drop or truncate."
                )
            if spec.on_too_long == "drop":
                tally.drop(row, f"longer than {limit} tokens", is_bad=False)
                continue
            sequence = TokenSequence(sequence.ids[:limit], sequence.is_target[:limit])
            if sequence.num_targets == 0:
                tally.drop(row, f"no target within the first {limit} tokens")
                continue
            num_truncated += 1
        if sequence.ids.max() >= vocab_size:
            raise DataError(
                f"{where}: row {row} has token id {sequence.ids.max()}; want less than {vocab_size}, the rows of the "
                f"model's embedding. The tokenizer has {len(tokenizer)} tokens: use the one that the model came with."
            )
        kept.append(sequence)
    _refuse_bad(len(rows), len(kept), tally, spec.max_bad_rows, tokenizer, where)
    return kept, DataReport(
        format=name,
        num_rows=len(rows),
        num_sequences=len(kept),
        num_truncated=num_truncated,
        num_tokens=sum(map(len, kept)),
        num_target_tokens=sum(sequence.num_targets for sequence in kept),
        longest=max(map(len, kept)),
        dropped=dict(tally.dropped),
        first_row=tally.first_row,
    )


def _tokenise(
    rows: "Dataset", reader: RowReader, encoder: "_Encoder", tally: _Tally
) -> Iterator[tuple[int, TokenSequence]]:
    """Each row's number and sequence. Rows that give none go to the tally."""
    said: list[tuple[int, Said]] = []
    for number, row in enumerate(rows):
        try:
            said.append((number, reader.read(row)))
        except RowError as reason:
            tally.drop(number, str(reason))
        if len(said) == _CHUNK_ROWS or number == len(rows) - 1:
            sequences = encoder.encode([what for _, what in said])
            yield from zip([row for row, _ in said], sequences, strict=True)
            said.clear()


class _Encoder:
    """Turns what rows say into ids and masks: BOS if it is the tokenizer's habit, EOS once, at the end."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", trains_all: bool, where: str):
        self._tokenizer, self._trains_all, self._where = tokenizer, trains_all, where
        # SentencePiece's way: a space before all text, which a completion would get within its row.
        self._adds_space = tokenizer.is_fast and "".join(tokenizer.tokenize("a")).startswith(("▁", "Ġ"))
        habit = tokenizer("")["input_ids"][:1]
        self._bos = habit if habit == [tokenizer.bos_token_id] else []
        added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self._end_ids = added.union(tokenizer.all_special_ids)

    def encode(self, drafts: Sequence[Said]) -> Iterator[TokenSequence]:
        texts = [draft.text for draft in drafts if isinstance(draft, Chat)]
        chats = zip(*self._tokens(texts, "input_ids", "offset_mapping"), strict=True)
        pairs = self._pairs([draft for draft in drafts if isinstance(draft, Plain)])
        for draft in drafts:
            match draft:
                case Chat():
                    yield self._chat(draft, *next(chats))
                case Plain():
                    yield self._plain(*next(pairs))
                case Tokens():
                    yield self._sequence(draft.ids, draft.is_target)

    def _pairs(self, drafts: Sequence[Plain]) -> Iterator[tuple[list[int], list[int]]]:
        """Ids of each prompt and of its completion, to which a token that covers both belongs."""
        if not self._adds_space:
            texts = [text for draft in drafts for text in (draft.prompt, draft.completion)]
            pieces = iter(self._tokens(texts, "input_ids")[0])
            yield from zip(pieces, pieces, strict=True)
            return
        joined = self._tokens([draft.prompt + draft.completion for draft in drafts], "input_ids", "offset_mapping")
        for draft, ids, offsets in zip(drafts, *joined, strict=True):
            first = bisect_right([end for _, end in offsets], len(draft.prompt))
            yield ids[:first], ids[first:]

    def _tokens(self, texts: list[str], *wanted: str) -> list[list[Any]]:
        """What is `wanted` of each text, tokenised as it stands."""
        if not texts:
            return [[] for _ in wanted]
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping="offset_mapping" in wanted,
            return_attention_mask=False,
            verbose=False,
        )
        return [encoded[key] for key in wanted]

    def _chat(self, chat: Chat, ids: list[int], offsets: list[tuple[int, int]]) -> TokenSequence:
        is_target, wants_eos = mark_targets(chat, ids, np.array(offsets, np.int64).reshape(-1, 2), self._end_ids)
        if wants_eos:
            return self._sequence([*ids, self._eos()], np.append(is_target, True))
        return self._sequence(ids, is_target)

    def _plain(self, prompt: list[int], completion: list[int]) -> TokenSequence:
        if (prompt or completion)[:1] != self._bos:
            prompt = self._bos + prompt
        if completion[-1:] != [self._eos()]:
            completion = [*completion, self._eos()]
        return self._sequence(prompt + completion, np.arange(len(prompt) + len(completion)) >= len(prompt))

    def _sequence(self, ids: Sequence[int] | np.ndarray, is_target: np.ndarray) -> TokenSequence:
        is_target = is_target | self._trains_all
        is_target[:1] = False
        return TokenSequence(np.asarray(ids, np.int32), is_target)

    def _eos(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise DataError(
                f"{self._where}: the tokenizer has no EOS token; want one to end a sequence. Set `eos_token` in its "
                "tokenizer_config.json, or give rows as input_ids."
            )
        return int(self._tokenizer.eos_token_id)


def _refuse_bad(
    num_rows: int, num_kept: int, tally: _Tally, max_bad: float, tokenizer: "PreTrainedTokenizerBase", where: str
) -> None:
    if num_kept and tally.num_bad <= max_bad * num_rows:
        return
    shown = ""
    if tally.masked is not None:
        row, sequence = tally.masked
        text = tokenizer.decode(sequence.ids[:_SHOWN_TOKENS])
        shown = f" Row {row} as the model would see it, none of it a target: {text!r}."
    if tally.num_bad > max_bad * num_rows:
        raise DataError(
            f"{where}: {tally.num_bad} of {num_rows} rows are bad; want at most {max_bad:.1%} (data.max_bad_rows). "
            f"{tally}.{shown} Mend the rows or raise data.max_bad_rows; `tlora preview` shows what the model would see."
        )
    raise DataError(
        f"{where}: none of {num_rows} rows is left to train on; want at least one. {tally}.{shown} "
        "Mend the rows, or see data.max_length and data.train_on; `tlora preview` shows what the model would see."
    )


def _count_reasons(counts: Mapping[str, int], first_row: Mapping[str, int]) -> str:
    ordered = sorted(counts, key=lambda reason: (-counts[reason], reason))
    told = [f"{counts[reason]} × {reason} (first: row {first_row[reason]})" for reason in ordered[:_SHOWN_REASONS]]
    return "; ".join(told) + (f"; {len(ordered) - _SHOWN_REASONS} more reasons" if len(ordered) > len(told) else "")

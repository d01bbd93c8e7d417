"""One job on a worker: its place in its data, its step in flight, what it has measured.

A record that the trainer reads and moves on. Everything here is a function of the job's own seed and step.
"""

import hashlib
import logging
import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from enum import StrEnum
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from tlora import randomness
from tlora.adapter import AdapterState
from tlora.checkpoint import JobFolder
from tlora.data import JobData, TokenSequence
from tlora.job import JobRecord
from tlora.nanobatch import cut
from tlora.optim import learning_rate
from tlora.packing import Item, rows_of
from tlora.spec import JobSpec
from tlora.tracking import Tracker

log = logging.getLogger("tlora")
IN_FLIGHT = 2
"""Files of one job that may wait to be written."""


class Phase(StrEnum):
    TRAINING = "training"
    EVALUATING = "evaluating"


class ResidentJob:
    """A job attached to a trainer."""

    def __init__(
        self,
        spec: JobSpec,
        data: JobData,
        state: AdapterState,
        record: JobRecord,
        tokenizer: Any = None,
        *,
        per_sequence: bool,
    ):
        self.spec, self.data, self.state, self.record = spec, data, state, record
        self.tokenizer, self.per_sequence = tokenizer, per_sequence
        self.share = spec.share
        self.digest = digest(data)
        self.slot = -1
        self.folder = JobFolder(spec.folder)
        self.tracker: Tracker | None = None
        self.files: deque[Future[None]] = deque()
        """What is being written of it."""
        self.save_s = 0.0
        """From when its last save began until it was there."""
        self.steps_per_epoch = math.ceil(len(data.train) / spec.batch_size)
        self.num_steps = self.count_steps(spec, len(data.train))
        self.step = 0
        """Optimizer steps taken."""
        self.tokens = 0
        """Tokens trained on so far."""
        self.best_loss = math.inf
        """Lowest evaluation so far, by the job's objective."""
        self.best_eval_loss = math.inf
        """The loss there, by which the better one of equal shares is told."""
        self.loss = self.eval_loss = math.nan
        self.seconds_per_step = math.nan
        self.tokens_per_s = math.nan
        self.phase = Phase.TRAINING
        self.is_settled = True
        """False from the moment the weights move until `step` counts it: what lies between must not be saved."""
        self.is_held = False
        """Its rows wait: whether it halts here is not known yet."""
        self.credit = 0.0
        self.part = 0, 1
        """Which of how many parts of every step this worker sends; the others are other workers'."""
        self.step_began_s = math.nan
        self.step_tokens = 0
        self._items: list[Item] = []
        self._rows: list[int] = []
        self._next = 0
        self._losses = torch.empty(0)
        self._order = -1, np.empty(0, np.int64)

    @staticmethod
    def count_steps(spec: JobSpec, num_sequences: int) -> int:
        """Optimizer steps of a whole job; each epoch's last batch may be short, none is dropped."""
        return spec.steps or math.ceil(spec.epochs * math.ceil(num_sequences / spec.batch_size))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def rate(self) -> float:
        """Learning rate of the step in flight."""
        return learning_rate(self.spec.optim, self.spec.schedule, self.step, self.num_steps)

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    @property
    def is_done(self) -> bool:
        return self.step >= self.num_steps

    @property
    def pending_rows(self) -> list[int]:
        """Rows of each sequence that this step, or evaluation, has still to send."""
        return self._rows[self._next :]

    @property
    def step_rows(self) -> int:
        return sum(self._rows)

    @property
    def is_through(self) -> bool:
        """Whether every sequence of the step, or evaluation, has been sent."""
        return self._next == len(self._items)

    def begin(self, phase: Phase, now_s: float) -> None:
        """Lay out the next step's sequences, or all evaluation ones; what a step in flight had gathered is dropped."""
        sequences = self.step_sequences(self.step) if phase is Phase.TRAINING else self.data.eval
        weight = 1.0 / sum(sequence.num_targets for sequence in sequences)
        counters = accumulate((len(sequence) for sequence in sequences), initial=0)
        items = [
            Item(self.slot, self.step, position, counter, weight, sequence)
            for position, (sequence, counter) in enumerate(zip(sequences, counters, strict=False))
        ]
        self.step_tokens = sum(len(sequence) for sequence in sequences)
        self._items = self._mine(items)
        self._rows = [rows_of(item.sequence, self.per_sequence) for item in self._items]
        self.phase, self._next, self.step_began_s = phase, 0, now_s
        wide = self.state.master
        shape = (len(items), 2) if self.spec.objective == "exact_match" and phase is Phase.EVALUATING else (len(items),)
        self._losses = torch.zeros(shape, dtype=wide.dtype, device=wide.device)
        self.state.grad.zero_()

    def _mine(self, items: list[Item]) -> list[Item]:
        """This worker's part: of runs of about equal length, one a worker, in order. It may be empty."""
        index, count = self.part
        if count == 1:
            return items
        runs = cut(items, count, lambda item: float(len(item.sequence)))
        return runs[index] if index < len(runs) else []

    def step_sequences(self, step: int) -> Sequence[TokenSequence]:
        """The sequences of optimizer step `step`, from 0: the job's own shuffle of each epoch, its end left short."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, randomness.permutation(self.spec.seed, "order", epoch, len(self.data.train))
        chosen = self._order[1][at * self.spec.batch_size : (at + 1) * self.spec.batch_size]
        return [self.data.train[index] for index in chosen]

    def take(self, count: int) -> list[Item]:
        """The next `count` sequences, which the caller is about to send."""
        self._next += count
        return self._items[self._next - count : self._next]

    def add_losses(self, first: int, losses: torch.Tensor) -> None:
        """Keep the weighted losses of sequences that came back, from the step's `first` on: their sum has one order."""
        mine = losses[:, 0] if losses.dim() > self._losses.dim() else losses
        self._losses[first : first + len(losses)] = mine.to(self._losses.dtype)

    @property
    def losses(self) -> torch.Tensor:
        """Weighted loss of each sequence of the step or evaluation, where the job counts them with its wrong tokens
        beside it; 0 for those that have not come back here."""
        return self._losses

    def summed_loss(self) -> torch.Tensor:
        """Mean loss over the target tokens of the step or evaluation; a scalar on the device."""
        return self._losses.sum() if self._losses.dim() == 1 else self._losses[:, 0].sum()

    def exact_match(self) -> torch.Tensor:
        """Share of the evaluation's sequences without a wrong token, nan if it does not count them; on the device."""
        if self._losses.dim() == 1:
            return torch.full((), math.nan, dtype=torch.float64, device=self._losses.device)
        return (self._losses[:, 1] == 0).double().mean()

    def measure_step(self, loss: float, now_s: float) -> None:
        """Note what the step that has just ended gave and took."""
        seconds = max(now_s - self.step_began_s, 1e-9)
        self.loss, self.tokens_per_s = loss, self.step_tokens / seconds
        before_s = self.seconds_per_step if math.isfinite(self.seconds_per_step) else seconds
        self.seconds_per_step = 0.7 * before_s + 0.3 * seconds

    def settle_files(self, *, most: int | None = None) -> None:
        """Raise what went wrong with files that have been written, once no more than `most` are still to be."""
        while self.files and (self.files[0].done() or (most is not None and len(self.files) > most)):
            self.files.popleft().result()

    def is_behind(self) -> bool:
        """Whether so many of its files wait to be written that a save had better be left out. Raises what went wrong
        with others."""
        self.settle_files()
        if is_behind := len(self.files) >= IN_FLIGHT:
            log.warning("job=%s no save at step %d, since earlier ones are still being written.", self.name, self.step)
        return is_behind

    def is_due(self, every: int) -> bool:
        """Whether a cadence falls on the present step; 0 means the end of each epoch. The last step always is."""
        return self.is_done or self.step % (every or self.steps_per_epoch) == 0


def longest_rows(data: JobData, per_sequence: bool) -> int:
    """Rows that a job's longest sequence takes in a tick."""
    return max(rows_of(sequence, per_sequence) for sequence in chain(data.train, data.eval))


def digest(data: JobData) -> str:
    """A fingerprint of a job's sequences: what a resumed job must find again."""
    total = hashlib.sha256()
    for part in (data.train, data.eval):
        total.update(len(part).to_bytes(8, "little"))
        for sequence in part:
            total.update(sequence.ids.tobytes())
            total.update(sequence.is_target.tobytes())
    return total.hexdigest()[:16]

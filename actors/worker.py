"""One GPU process of a group: a trainer, and a mailbox that is read between ticks.

Run by `tlora.actors.process`. A thread exchanges reports and orders with the scheduler, another
reads the data and the saved state of jobs that are to come, and the trainer's own writes what is saved, so that the
residents' ticks go on meanwhile. A scheduler that is away stops nothing.
"""

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from tlora.actors.messages import JobReport, Order, Orders, Report, WorkerOptions
from tlora.actors.room import NoRoomError, Room
from tlora.data import load_tokenizer
from tlora.errors import JobError, StateError, TloraError
from tlora.halting import Halts
from tlora.job import JobRecord, State
from tlora.local import Library
from tlora.resident import Phase, ResidentJob, longest_rows
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.sweep import Halt
from tlora.trainer import Tick, Trainer, TrainerOptions

log = logging.getLogger("tlora")
_EXCHANGE_S = 0.2
IDLE_S = 0.02
AGAIN_S = 1.0

Exchange = Callable[[Report], Orders | None]
"""Send a report; the newest orders, or None while the scheduler is away."""


class Mailbox:
    """The newest orders and the newest report, between the trainer's thread and the one that exchanges them."""

    def __init__(self, report: Report):
        self._lock = threading.Lock()
        self._orders, self._report = Orders(0), report
        self._acknowledged: Mapping[str, JobReport] = {}
        self.changed = threading.Event()
        """There is news for the scheduler that should not wait."""

    def orders(self) -> Orders:
        with self._lock:
            return self._orders

    def acknowledged(self) -> Mapping[str, JobReport]:
        """What the scheduler has heard of each job last."""
        with self._lock:
            return self._acknowledged

    def put(self, orders: Orders, heard: Report | None = None) -> None:
        """Orders, in answer to a report."""
        with self._lock:
            self._acknowledged = heard.jobs if heard else self._acknowledged
            if orders.number > self._orders.number:
                self._orders = orders

    def report(self) -> Report:
        with self._lock:
            return replace(self._report, heard=self._orders.number)

    def tell(self, report: Report) -> None:
        with self._lock:
            self._report = report


@dataclass(slots=True)
class _Coming:
    """A job whose data and state are being read."""

    order: Order
    spec: JobSpec
    job: "Future[ResidentJob]"
    until_s: float
    """How long what fails to be read may be tried again."""
    again_s: float = 0.0
    """When to look at it again, since its folder was held by another process, or its files were away."""
    reason: str = ""
    """Why it is looked at again."""


class Worker:
    """Carries out orders between the ticks of its trainer."""

    def __init__(self, options: WorkerOptions, rank: int, node: str):
        self.options = options
        report = Report(uuid.uuid4().hex, options.group, rank, node, os.getpid())
        self.mailbox = Mailbox(report)
        self._base = BaseSpec.model_validate(options.base)
        self._trainer: Trainer | None = None
        self._tokenizer: Any = None
        self._room = Room(options, self._base)
        self._attempts: dict[str, int] = {}
        self._coming: dict[str, _Coming] = {}
        self._ended: dict[str, JobReport] = {}
        self._saved_s: dict[str, float] = {}
        self._library = Library()
        self._halts = Halts()
        self._halting: set[str] = set()
        """Of those that leave: candidates that have come as far as they were to."""
        self._loads = self._ticks = 0
        self._busy_s = 0.0
        self._most_rows = math.inf
        """Of a tick that has not run out of memory."""
        self._last: Tick | None = None
        self._stepped_s = time.monotonic()
        self._readers = ThreadPoolExecutor(1, "tlora-data")
        self._has_ended = threading.Event()

    def run(self, exchange: Exchange) -> None:
        """Until told to stop. Residents are saved at the end, whatever ended it."""
        thread = threading.Thread(target=self._exchange, args=(exchange,), daemon=True, name="tlora-exchange")
        thread.start()
        try:
            while not self.step():
                pass
        finally:
            self._has_ended.set()
            for coming in self._coming.values():
                self._give_up(coming)
            self._readers.shutdown(wait=False, cancel_futures=True)
            if self._trainer is not None:
                self._trainer.close()

    def step(self) -> bool:
        """Orders, then a tick; whether this worker's end has come."""
        self._stepped_s = time.monotonic()
        orders = self.mailbox.orders()
        done = self._carry_out(orders)
        self._halt()
        if orders.stop and done:
            return True
        if self._trainer is not None and self._trainer.jobs:
            self._tick(self._trainer)
        else:
            time.sleep(IDLE_S)
        self._tell(orders.number)
        return False

    def _exchange(self, exchange: Exchange) -> None:
        while not self._has_ended.is_set():
            self.mailbox.changed.wait(_EXCHANGE_S)
            self.mailbox.changed.clear()
            if time.monotonic() - self._stepped_s > self.options.stuck_after_s:
                log.critical(
                    "group=%s nothing moved for %g s: ends itself", self.options.group, self.options.stuck_after_s
                )
                os._exit(1)  # a collective or a driver that hangs answers to nothing less
            report = self.mailbox.report()
            orders = exchange(report)
            if orders is not None:
                self.mailbox.put(orders, report)

    def _carry_out(self, orders: Orders) -> bool:
        """Let go of what is not in the orders, take in what is; whether nothing is left to be done."""
        self._forget(orders, self.mailbox.acknowledged())
        self._room.forget(orders)
        for name in [name for name, coming in self._coming.items() if orders.jobs.get(name) != coming.order]:
            self._give_up(self._coming.pop(name))
        residents = list(self._trainer.jobs) if self._trainer else []
        for name in residents:
            if not is_for(orders, name, self._attempts[name]):
                assert self._trainer is not None
                self._trainer.release(name, keep=name not in orders.drop)
        leaving = list(self._trainer.leaving) if self._trainer else []
        for name, order in orders.jobs.items():
            known = any(name in where for where in (self._ended, self._coming, residents, leaving))
            if not known and not self._room.is_crowded(name, self._others(name)):
                self._read(name, order)
        for name, coming in list(self._coming.items()):
            if coming.job.done() and time.monotonic() >= coming.again_s:
                self._attach(name, coming)
        if self._trainer is not None:
            self._note(self._trainer.take_ended())
            self._deal_by(self._trainer, orders)
        return not self._coming and not leaving

    def _watch(self, name: str, order: Order) -> None:
        """Where a job is to halt, if it is; not where an earlier order said."""
        self._halts.drop(name)
        if order.halt:
            self._halts.by_name[name] = Halt.model_validate(order.halt)

    def _halt(self) -> None:
        """Candidates of sweeps that have come as far as they were to leave, saved, before the next tick."""
        if self._trainer is None:
            return
        for name, reason in self._halts.due(self._trainer.jobs).items():
            self._halting.add(name)
            self._trainer.release(name, reason=reason)

    def _forget(self, orders: Orders, heard: Mapping[str, JobReport]) -> None:
        """What has ended is told until the orders leave it out; a failure that they did not ask about, until it is
        heard."""
        for name, ended in list(self._ended.items()):
            if not is_for(orders, name, ended.attempt) and (
                ended.state is not State.FAILED or heard.get(name) == ended
            ):
                del self._ended[name]

    def _deal_by(self, trainer: Trainer, orders: Orders) -> None:
        """Shares, and rows of a tick, as the plan has them; never fewer than a sequence takes, nor more than fitted."""
        for name, job in trainer.jobs.items():
            job.share = job.spec.share * orders.shares.get(name, 1.0)
        if orders.token_budget and not self.options.token_budget and trainer.jobs:
            longest = max(map(longest_of, trainer.jobs.values()))
            trainer.token_budget = int(max(min(orders.token_budget, self._most_rows), longest))

    def _read(self, name: str, order: Order) -> None:
        """Begin to read a job's data and state; the base first, if this is the first job."""
        try:
            spec = parse_job(order.spec)
            if spec.base != self._base:
                raise StateError(f"got a job of base {spec.base.model}; this worker has {self._base.model}.")
            if self._trainer is None:
                if self._room.lacks_for_base(spec):
                    return
                self._trainer = self._load()
            until_s = time.monotonic() + self.options.patience_s
            self._coming[name] = _Coming(order, spec, self._readers.submit(self._prepare, self._trainer, spec), until_s)
        except (TloraError, OSError, RuntimeError) as error:
            self._end(name, order.attempt, error)

    def _prepare(self, trainer: Trainer, spec: JobSpec) -> ResidentJob:
        """In the reader's thread."""
        beside = frozenset(self._others(spec.name))
        try:
            data = self._library.read(spec, trainer.supermodel.outline, self._tokenizer)
            if self.options.token_budget:
                trainer.refuse_longer(spec, data)
            outline, others = trainer.supermodel.outline, self._others(spec.name).values()
            layouts = [*(job.state.layout for job in others), outline.lay_out(spec.adapter)]
            per_sequence = trainer.supermodel.deterministic
            longest = max(longest_rows(each, per_sequence) for each in (data, *(job.data for job in others)))
            self._room.refuse_beside(outline, layouts, longest)
            return trainer.prepare(spec, data, resume=True, record=JobRecord(spec.name), tokenizer=self._tokenizer)
        except (torch.OutOfMemoryError, MemoryError) as error:
            error.__traceback__ = None  # it holds what there was no room for
            raise NoRoomError(error, beside.union(self._others(spec.name))) from None

    def _others(self, name: str) -> dict[str, ResidentJob]:
        """All whose vectors are on the device, as far as one thread knows of another's, but the one of this name."""
        if (trainer := self._trainer) is None:
            return {}
        read = [coming.job for coming in list(self._coming.values()) if coming.job.done()]
        jobs = [future.result() for future in read if not future.cancelled() and future.exception() is None]
        here = {job.name: job for job in (*jobs, *trainer.leaving.copy().values(), *trainer.jobs.copy().values())}
        here.pop(name, None)
        return here

    def _give_up(self, coming: _Coming) -> None:
        """A job that is not to come after all: what was read of it lets its folder go."""
        trainer = self._trainer
        assert trainer is not None

        def let_go(read: "Future[ResidentJob]") -> None:
            if not read.cancelled() and read.exception() is None:
                trainer.give_up(read.result())

        coming.job.cancel()
        coming.job.add_done_callback(let_go)

    def _load(self) -> Trainer:
        options = self.options
        self._tokenizer = load_tokenizer(self._base)
        supermodel = SuperModel.load(
            self._base,
            device=options.device,
            deterministic=options.deterministic,
            checkpointing=options.checkpointing,
        )
        self._loads += 1
        return Trainer(supermodel, self._trainer_options(supermodel))

    def _trainer_options(self, supermodel: SuperModel) -> TrainerOptions:
        given = TrainerOptions(
            token_budget=self.options.token_budget,
            writes_beside=True,
            patience_s=self.options.patience_s,
            mark=self.options.mark,
        )
        return replace(given, token_budget=given.budget_on(supermodel.device))

    def _attach(self, name: str, coming: _Coming) -> None:
        trainer = self._trainer
        assert trainer is not None
        try:
            job = coming.job.result()
            self._attempts[name], self._saved_s[name] = coming.order.attempt, time.monotonic()
            self._watch(name, coming.order)
            trainer.admit(job)
            self._widen(trainer, longest_of(job))
        except NoRoomError as error:
            self._crowd(trainer, name, coming.order.attempt, error.error, error.beside)
        except (torch.OutOfMemoryError, MemoryError) as error:
            self._crowd(trainer, name, coming.order.attempt, error, frozenset(self._others(name)))
        except (TloraError, OSError, RuntimeError) as error:
            now_s = time.monotonic()
            if may_pass(error, now_s < coming.until_s):
                if not coming.again_s:
                    log.warning("job=%s group=%s waits: %s", name, self.options.group, error)
                coming.again_s, coming.reason = now_s + AGAIN_S, f"waits: {error}"
                coming.job = self._readers.submit(self._prepare, trainer, coming.spec)
                return
            self._attempts.pop(name, None)
            self._end(name, coming.order.attempt, error)
        del self._coming[name]
        self.mailbox.changed.set()

    def _widen(self, trainer: Trainer, longest: int) -> None:
        """Ticks hold a sequence of so many rows: twice, where that is not known to be too much."""
        room = longest if self.options.token_budget else int(min(2 * longest, max(self._most_rows, longest)))
        trainer.token_budget = max(trainer.token_budget, room)

    def _crowd(self, trainer: Trainer, name: str, attempt: int, error: Exception, beside: frozenset[str]) -> None:
        """What a job that had no room comes to: it is read again, once, after memory was given back; then it waits."""
        error.__traceback__ = None  # it holds what there was no room for
        self._attempts.pop(name, None)
        if not beside:
            self._end(name, attempt, JobError(f"out of memory, though alone: {error}"))
        elif isinstance(error, MemoryError) or not self._room.may_try_again(name, attempt, beside):
            self._room.crowd(name, self._room.told(name, attempt), beside, error)
        else:
            trainer.supermodel.free_memory()

    def _tick(self, trainer: Trainer) -> None:
        try:
            tick = trainer.tick()
        except torch.OutOfMemoryError as error:
            self._shrink(trainer, error)
            return
        self._ticks += 1
        self._busy_s += tick.seconds
        self._last = tick
        self._note(tick.ended)
        now_s, after_s = time.monotonic(), self.options.next_save_s(job.save_s for job in trainer.jobs.values())
        for name, job in list(trainer.jobs.items()):
            if job.is_settled and now_s - self._saved_s[name] >= after_s:
                self._saved_s[name] = now_s
                trainer.save(name)
        self._note(trainer.take_ended())

    def _note(self, ended: tuple[ResidentJob, ...]) -> None:
        for job in ended:
            attempt = self._attempts.pop(job.name)
            self._halts.drop(job.name)
            if job.record.state.is_terminal or job.name in self._halting:  # others were let go of, as ordered
                self._ended[job.name] = describe(job, attempt)
            self._halting.discard(job.name)
            self.mailbox.changed.set()

    def _shrink(self, trainer: Trainer, error: torch.OutOfMemoryError) -> None:
        """Half the token budget, and the steps in flight once more. Where the longest sequence has a tick to itself
        already, its job waits until a neighbour is gone; without any, it fails."""
        is_halved = self._halve(trainer)
        trainer.replay()
        if is_halved:
            return
        name = max(trainer.jobs, key=lambda name: longest_of(trainer.jobs[name]))
        if others := self._others(name):
            self._room.crowd(name, describe(trainer.jobs[name], self._attempts[name]), frozenset(others), error)
            trainer.release(name)
            return
        trainer.detach(name)
        attempt = self._attempts.pop(name)
        text = f"out of memory in a tick of {trainer.token_budget} rows, the length of its longest sequence"
        self._end(name, attempt, JobError(f"{text}. Lower data.max_length. ({error})"))

    def _halve(self, trainer: Trainer) -> bool:
        """Half the token budget, unless the longest sequence needs it all."""
        trainer.supermodel.free_memory()
        longest = max(map(longest_of, trainer.jobs.values()), default=0)
        before, trainer.token_budget = trainer.token_budget, max(trainer.token_budget // 2, longest)
        self._most_rows = trainer.token_budget
        if trainer.token_budget < before:
            log.warning("group=%s out of memory: ticks hold %d rows now", self.options.group, trainer.token_budget)
        return trainer.token_budget < before

    def _end(self, name: str, attempt: int, error: Exception) -> None:
        reason = str(error).removeprefix(f"job {name}: ")
        log.error("job=%s group=%s failed: %s", name, self.options.group, reason)
        self._ended[name] = JobReport(attempt, State.FAILED, reason)
        self.mailbox.changed.set()

    def _tell(self, applied: int) -> None:
        jobs = {**self._room.reports(), **self._ended}
        for name, coming in self._coming.items():
            jobs[name] = replace(self._room.told(name, coming.order.attempt), reason=coming.reason)
        for name, job in {**self._trainer.jobs, **self._trainer.leaving}.items() if self._trainer else ():
            jobs[name] = describe(job, self._attempts[name])
        needs = self._room.needs
        self.mailbox.tell(
            replace(
                self.mailbox.report(),
                plan=needs if needs and needs.ranks > 1 else None,
                base_loads=self._loads,
                applied=applied,
                jobs=jobs,
                ticks=self._ticks,
                busy_s=self._busy_s,
                **describe_tick(self._last),
            )
        )


def may_pass(error: Exception, has_patience: bool) -> bool:
    """Whether a job may yet be taken in: its folder is still held by a process on its way out, or cut off; or its
    storage is away."""
    return isinstance(error, StateError) or (isinstance(error, OSError) and has_patience)


def longest_of(job: ResidentJob) -> int:
    return longest_rows(job.data, job.per_sequence)


def is_for(orders: Orders, name: str, attempt: int) -> bool:
    return name in orders.jobs and orders.jobs[name].attempt == attempt


def describe(job: ResidentJob, attempt: int, lanes: tuple[int, ...] = ()) -> JobReport:
    return JobReport(
        attempt,
        job.record.state,
        job.record.reason,
        job.step,
        job.num_steps,
        job.tokens,
        _finite(job.tokens_per_s) or 0.0,
        _finite(job.loss),
        _finite(job.eval_loss),
        lanes,
        job.save_s,
    )


def describe_tick(tick: Tick | None) -> dict[str, Any]:
    if tick is None:
        return {}
    trained = tick.phase is Phase.TRAINING
    return {
        "tick_s": tick.seconds,
        "tick_tokens": tick.num_tokens if trained else 0,
        "tick_jobs": len(tick.ranks),
        "tick_ranks": sum(tick.ranks),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

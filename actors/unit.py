"""One rank of a unit: the workers of a group that hold one base together, or split jobs among them.

Each is a worker with a trainer of its own; the first one leads. It alone exchanges messages with the scheduler, to
which a unit is one worker, and chooses the lanes of each job. What ranks have to say to each other is said in *talks*:
behind a tick, once any of them has asked for one. All hear the same words there, and so decide alike, at one place.
"""

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from tlora.actors.messages import JobReport, Order, Orders, Report, WorkerOptions
from tlora.actors.worker import AGAIN_S, IDLE_S, Exchange, Worker, describe, describe_tick, is_for, may_pass
from tlora.base import default_device
from tlora.data import JobData, load_tokenizer
from tlora.errors import GroupError, TloraError
from tlora.group_trainer import ELSEWHERE, GroupTrainer
from tlora.job import JobRecord, State
from tlora.parallel import Mesh
from tlora.planner import place
from tlora.resident import longest_rows
from tlora.spec import JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer

log = logging.getLogger("tlora")
_TALK_S = 0.2
_HEARD_S = 2.0
"""In which the first rank passes on to the scheduler what another has left at their store."""
_BESIDES_S = 60.0
_MEMORY = "tlora-memory"
Lanes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the first rank wants of all."""

    orders: Orders = field(default_factory=lambda: Orders(0))
    lanes: dict[str, Lanes] = field(default_factory=dict)
    """Of each job that has not ended."""
    heard: Mapping[str, JobReport] = field(default_factory=dict)
    """What the scheduler has heard of each job last."""
    saves: frozenset[str] = frozenset()
    """Jobs that are to be saved now."""


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank brings to a talk."""

    jobs: dict[str, JobReport] = field(default_factory=dict)
    """Those that it leads, and those that failed here."""
    ready: frozenset[tuple[str, int, Lanes]] = frozenset()
    """Jobs that it could take in now, by attempt and lanes."""
    leaving: frozenset[str] = frozenset()
    """Jobs whose last files are being written: what became of them will be known here."""
    applied: int = 0
    lost: frozenset[int] = frozenset()
    halts: dict[str, str] = field(default_factory=dict)
    """Of those that it leads, candidates that are to halt, with why."""
    wishes: Wishes | None = None


@dataclass(slots=True)
class _Reading:
    """A job whose data are being read, or wait for the other ranks of its lanes."""

    order: Order
    spec: JobSpec
    lanes: Lanes
    data: "Future[JobData]"
    until_s: float
    """How long what fails to be read may be tried again."""
    again_s: float = 0.0
    reason: str = ""
    """Why it is tried again."""


class Member(Worker):
    """Of unit `number` of its group; `mesh` is its place there."""

    def __init__(self, options: WorkerOptions, number: int, node: str, mesh: Mesh):
        super().__init__(options, number, node)
        mesh.join(range(mesh.plan.ranks))
        self.mesh, self._leads = mesh, mesh.rank == 0
        self._store = dist.distributed_c10d._get_default_store()
        report = self.mailbox.report()
        others = mesh.share((node, report.pid))[1:]
        self.mailbox.tell(replace(report, others=tuple(others)))
        self._reading: dict[str, _Reading] = {}
        self._due: dict[str, str] = {}
        """Candidates of sweeps that this rank leads and that are to halt where they are held, and why."""
        self._led: set[str] = set()
        self._wishes, self._told = Wishes(), Word()
        self._lanes: dict[str, Lanes] = {}
        self._lanes_of: frozenset[tuple[str, int]] = frozenset()
        self._applied = self._talks = 0
        self._talked_s = 0.0

    def run(self, exchange: Exchange) -> None:
        super().run(partial(self._pass_on, exchange) if self._leads else lambda report: None)

    def step(self) -> bool:
        self._stepped_s = time.monotonic()
        trainer = self._group
        try:
            return self._step()
        except BaseException as error:
            self._trainer = None  # without the others nothing can be saved: jobs go on from their last saves
            if trainer is not None and isinstance(error, torch.OutOfMemoryError):
                self._leave_word(trainer, error)
            raise

    def _leave_word(self, trainer: GroupTrainer, error: Exception) -> None:
        """At the store, as the others may hang in this tick: the unit that follows is to send half as many rows. Where
        the longest sequence has a tick to itself already, its job fails."""
        lengths = {name: longest_rows(job.data, job.per_sequence) for name, job in trainer.jobs.items()}
        name = max(lengths, key=lambda name: lengths[name])
        before, rows = trainer.token_budget, max(trainer.token_budget // 2, lengths[name])
        text = f"out of memory in a tick of {before} rows, the length of its longest sequence"
        reason = "" if rows < before else f"{text}. Lower data.max_length. ({error})"
        log.warning("group=%s out of memory: ticks hold %d rows from now on", self.options.group, rows)
        self._store.set(_MEMORY, json.dumps([rows, name, self._attempts[name], reason]))
        time.sleep(_HEARD_S)

    def _pass_on(self, exchange: Exchange, report: Report) -> Orders | None:
        """With the word of a rank that ran out of memory."""
        if self._store.check([_MEMORY]):
            rows, name, attempt, reason = json.loads(self._store.get(_MEMORY))
            failed = {name: JobReport(attempt, State.FAILED, reason)} if reason else {}
            report = replace(report, most_rows=rows, jobs={**report.jobs, **failed})
        return exchange(report)

    def _step(self) -> bool:
        trainer = self._group
        if trainer is None:
            time.sleep(_TALK_S)
            return self._talk()
        holds = self._hold(trainer)
        wants = holds or (time.monotonic() - self._talked_s > _TALK_S and self._word() != self._told)
        tick = trainer.tick(self._talks + wants)
        self._note(tick.ended)
        if trainer.is_idle:
            time.sleep(IDLE_S)
        else:
            self._ticks += 1
            self._busy_s += tick.seconds
            self._last = replace(tick, seconds=trainer.pace[1], num_tokens=trainer.pace[0])
        if trainer.talk == self._talks:
            return False
        self._talks = trainer.talk
        return self._talk()

    def _hold(self, trainer: GroupTrainer) -> bool:
        """Whether candidates stand right after an evaluation: they wait until all their ranks have heard, from the one
        that writes their metrics, whether they halt there."""
        for name in self._halts.fresh(trainer.jobs):
            job = trainer.jobs[name]
            job.is_held = True
            if name in self._led and (reason := self._halts.judge(job)):
                self._due[name] = reason
        return any(job.is_held for job in trainer.jobs.values())

    @property
    def _group(self) -> GroupTrainer | None:
        assert self._trainer is None or isinstance(self._trainer, GroupTrainer)
        return self._trainer

    def _word(self) -> Word:
        trainer = self._group
        here = {**trainer.jobs, **trainer.leaving} if trainer else {}
        jobs = {name: ended for name, ended in self._ended.items() if name in self._led or ended.state is State.FAILED}
        ready = set()
        for name, reading in list(self._reading.items()):
            if not reading.data.done() or time.monotonic() < reading.again_s:
                continue
            error = reading.data.exception()
            if isinstance(error, Exception) and self._may_wait(name, reading, error):
                reading.data = self._read_data(reading.spec)
            elif isinstance(error, Exception):
                del self._reading[name]
                self._end(name, reading.order.attempt, error)
                jobs[name] = self._ended[name]
            elif name not in here:
                ready.add((name, reading.order.attempt, reading.lanes))
        for name, reading in self._reading.items():
            if self._is_lead(reading.lanes):
                jobs[name] = JobReport(reading.order.attempt, State.ATTACHING, reading.reason)
        for name, job in here.items():
            if name in self._led:
                jobs[name] = describe(job, self._attempts[name], self._where(trainer, name))
        leaving = frozenset(trainer.leaving) if trainer else frozenset[str]()
        if not self._reading and not leaving:
            self._applied = self._wishes.orders.number
        lost = trainer.lost if trainer else frozenset[int]()
        wishes = self._wish() if self._leads else None
        return Word(jobs, frozenset(ready), leaving, self._applied, lost, dict(self._due), wishes)

    def _is_lead(self, lanes: Lanes) -> bool:
        return self.mesh.plan.ranks_of(lanes)[0] == self.mesh.rank

    def _wish(self) -> Wishes:
        orders, told = self.mailbox.orders(), self.mailbox.report().jobs
        over = {(n, job.attempt) for n, job in told.items() if job.state.is_terminal or job.state is State.PAUSED}
        live = {name: order for name, order in orders.jobs.items() if (name, order.attempt) not in over}
        keys = frozenset((name, order.attempt) for name, order in live.items())
        if keys != self._lanes_of:
            loads = {
                name: float(order.spec["batch_size"] * order.spec["data"]["max_length"]) for name, order in live.items()
            }
            most = {name: int(order.spec["batch_size"]) for name, order in live.items()}
            self._lanes, self._lanes_of = place(loads, self.mesh.plan.lanes, self._lanes, most=most), keys
        now_s = time.monotonic()
        running = [name for name, job in told.items() if job.state is State.RUNNING]
        after_s = {name: self.options.next_save_s(told[name].save_s) for name in running}
        due = [name for name in running if now_s - self._saved_s.setdefault(name, now_s) >= after_s[name]]
        return Wishes(orders, self._lanes, self.mailbox.acknowledged(), frozenset(due))

    def _talk(self) -> bool:
        """What all say, and what follows from it; whether this unit's end has come."""
        word = self._word()
        words: list[Word] = self.mesh.share(word)
        assert words[0].wishes is not None
        self._told, self._talked_s, self._wishes = word, time.monotonic(), words[0].wishes
        orders = self._wishes.orders
        self._forget(orders, self._wishes.heard)
        if (trainer := self._group) is not None:
            trainer.lose(frozenset[int]().union(*(each.lost for each in words)))
            self._let_go(trainer)
            self._halt_together(trainer, {name: why for each in words for name, why in each.halts.items()})
        self._read_what_comes()
        self._saved_s |= dict.fromkeys(self._wishes.saves, self._talked_s)
        if (trainer := self._group) is not None:
            self._take_in(trainer, words)
            for name in sorted(self._wishes.saves & trainer.jobs.keys()):
                trainer.save(name)
            self._note(trainer.take_ended())
            self._deal_by(trainer, replace(orders, token_budget=-(-orders.token_budget // self.mesh.plan.lanes)))
            if orders.most_rows and trainer.jobs:
                longest = max(longest_rows(job.data, job.per_sequence) for job in trainer.jobs.values())
                trainer.token_budget = max(min(trainer.token_budget, orders.most_rows), longest)
        if self._leads:
            self._report(words)
        return orders.stop and all(each.applied >= orders.number for each in words)

    def _let_go(self, trainer: GroupTrainer) -> None:
        """Of what is not wanted any more, or on other lanes; in one order, for all that hold a job save it together."""
        orders = self._wishes.orders
        for name in sorted(trainer.jobs):
            is_here = self._wishes.lanes.get(name) == self._where(trainer, name)
            if name in trainer.jobs and not (is_here and is_for(orders, name, self._attempts[name])):
                trainer.release(name, keep=name not in orders.drop)

    def _halt_together(self, trainer: GroupTrainer, halts: dict[str, str]) -> None:
        """Candidates that have come as far as they were to leave, saved; the others go on."""
        for name in sorted(halts.keys() & trainer.jobs.keys()):
            self._halting.add(name)
            trainer.release(name, reason=halts[name])
        for job in trainer.jobs.values():
            job.is_held = False
        self._due.clear()

    def _read_what_comes(self) -> None:
        """Data of jobs that are to lie here; the base first, which all ranks load together."""
        orders, lanes = self._wishes.orders, self._wishes.lanes
        for name, reading in list(self._reading.items()):
            if orders.jobs.get(name) != reading.order or self.mesh.lane not in lanes.get(name, ()):
                reading.data.cancel()
                del self._reading[name]
            else:
                reading.lanes = lanes[name]
        if self._trainer is None and any(name not in self._ended for name in lanes):
            try:
                self._trainer = self._load()
            except GroupError:
                raise
            except (TloraError, OSError, RuntimeError) as error:  # on all ranks alike
                for name in lanes:
                    self._end(name, orders.jobs[name].attempt, error)
        trainer = self._group
        if trainer is None:
            return
        here = trainer.jobs.keys() | trainer.leaving.keys()
        for name, where in lanes.items():
            known = name in self._ended or name in self._reading
            if self.mesh.lane in where and not known and name not in here:
                self._begin(name, orders.jobs[name], where)

    @staticmethod
    def _where(trainer: GroupTrainer | None, name: str) -> Lanes:
        return trainer.lanes(name) if trainer and name in trainer.jobs else ()

    def _begin(self, name: str, order: Order, lanes: Lanes) -> None:
        try:
            spec = parse_job(order.spec)
        except TloraError as error:
            self._end(name, order.attempt, error)
            return
        until_s = time.monotonic() + self.options.patience_s
        self._reading[name] = _Reading(order, spec, lanes, self._read_data(spec), until_s)

    def _read_data(self, spec: JobSpec) -> "Future[JobData]":
        assert self._trainer is not None
        return self._readers.submit(self._library.read, spec, self._trainer.supermodel.outline, self._tokenizer)

    def _may_wait(self, name: str, reading: _Reading, error: Exception) -> bool:
        """Whether what failed is tried again, a little later."""
        now_s = time.monotonic()
        if not may_pass(error, now_s < reading.until_s):
            return False
        if not reading.again_s:
            log.warning("job=%s group=%s waits: %s", name, self.options.group, error)
        reading.again_s, reading.reason = now_s + AGAIN_S, f"waits: {error}"
        return True

    def _take_in(self, trainer: GroupTrainer, words: list[Word]) -> None:
        for name, reading in sorted(self._reading.items()):
            key = name, reading.order.attempt, reading.lanes
            if all(key in words[rank].ready for rank in self.mesh.plan.ranks_of(reading.lanes)):
                self._attach_together(trainer, name, reading)

    def _attach_together(self, trainer: GroupTrainer, name: str, reading: _Reading) -> None:
        data = reading.data.result()
        if not self.options.token_budget:
            longest = longest_rows(data, trainer.supermodel.deterministic)
            trainer.token_budget = max(trainer.token_budget, 2 * longest)
        self._attempts[name] = reading.order.attempt
        self._watch(name, reading.order)
        (self._led.add if self._is_lead(reading.lanes) else self._led.discard)(name)
        try:
            trainer.attach(
                reading.spec, data, resume=True, record=JobRecord(name), tokenizer=self._tokenizer, lanes=reading.lanes
            )
        except GroupError:
            raise
        except (TloraError, OSError, RuntimeError) as error:
            if self._may_wait(name, reading, error):
                return
            self._attempts.pop(name, None)
            self._end(name, reading.order.attempt, error)
        del self._reading[name]

    def _load(self) -> Trainer:
        options = self.options
        self._tokenizer = load_tokenizer(self._base)
        supermodel = SuperModel.load(
            self._base, mesh=self.mesh, deterministic=options.deterministic, checkpointing=options.checkpointing
        )
        self._loads += 1
        return GroupTrainer(supermodel, self.mesh, self._trainer_options(supermodel))

    def _report(self, words: list[Word]) -> None:
        """What the unit has, to the scheduler: of what several say of a job, its end, and that with its reason."""
        jobs: dict[str, JobReport] = {}
        for word in words:
            for name, told in word.jobs.items():
                if name not in jobs or _weight(told) > _weight(jobs[name]):
                    jobs[name] = told
        running = [name for name, told in jobs.items() if told.state is State.RUNNING]
        specs = [self._wishes.orders.jobs[name].spec for name in running if name in self._wishes.orders.jobs]
        numbers = describe_tick(self._last)
        if numbers:
            numbers |= {"tick_jobs": len(specs), "tick_ranks": sum(spec["adapter"]["rank"] for spec in specs)}
        self.mailbox.tell(
            replace(
                self.mailbox.report(),
                base_loads=self._loads,
                applied=min(word.applied for word in words),
                jobs=jobs,
                ticks=self._ticks,
                busy_s=self._busy_s,
                **numbers,
            )
        )
        self.mailbox.changed.set()


def _weight(told: JobReport) -> tuple[int, bool, bool, bool]:
    return told.attempt, told.state.is_terminal, told.reason != ELSEWHERE, told.state is State.RUNNING


def collective_s(options: WorkerOptions) -> float:
    """The longest that a collective may take: ranks wait in one while another tries again to read or write a job's
    files, or compiles."""
    return min(options.stuck_after_s, options.patience_s + _BESIDES_S)


def open_mesh(options: WorkerOptions, place: int, store: str) -> Mesh:
    """With the other ranks of a unit, at the store that its first one keeps."""
    host, _, port = store.rpartition(":")
    timeout, torch_dist = timedelta(seconds=options.stuck_after_s), cast(Any, dist)
    try:
        kept = torch_dist.TCPStore(host, int(port), options.plan.ranks, is_master=place == 0, timeout=timeout)
    except RuntimeError as error:
        raise GroupError(f"rank {place}: no store at {store}: {error}. The unit starts anew.") from error
    device = torch.device(options.device) if options.device else default_device()
    times = {"timeout_s": collective_s(options), "loading_s": options.stuck_after_s}
    return Mesh.open(options.plan, place, kept, device, **times)

"""One rank of a unit: the workers of a group that hold one base together, or split jobs among them.

Each is a worker with a trainer of its own; the first one leads. It alone exchanges messages with the scheduler, to
which a unit is one worker, and chooses the lanes of each job. What ranks have to say to each other is said in *talks*:
behind a tick, once any of them has asked for one. All hear the same words there, and so decide alike, at one place.
"""

import gc
import logging
import math
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from tlora.actors.messages import Order, Orders, Report, WorkerOptions
from tlora.actors.talk import Damage, Lanes, Shortage, Wishes, Word, agreed, joined
from tlora.actors.worker import AGAIN_S, IDLE_S, Exchange, Worker, describe, describe_tick, is_for, longest_of, may_pass
from tlora.data import JobData, load_tokenizer
from tlora.errors import GroupError, JobError, TloraError
from tlora.group_trainer import GroupTrainer
from tlora.job import JobRecord, State
from tlora.parallel import Mesh
from tlora.planner import place
from tlora.resident import longest_rows
from tlora.spec import JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.trainer import Trainer

log = logging.getLogger("tlora")
_TALK_S = 0.2


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
        self._store: Any = dist.distributed_c10d._get_default_store()
        self._breaking, self._num_broken = threading.Lock(), 0
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
        super().run(partial(self._pass_on, exchange))

    def step(self) -> bool:
        self._stepped_s = time.monotonic()
        try:
            return self._step()
        except torch.OutOfMemoryError as error:
            damage = self._damage(str(error) or "no memory")
        except GroupError:
            if not self._is_broken(self._broken_at):
                self._trainer = None  # without the others nothing can be saved: jobs go on from their last saves
                raise
            damage = self._damage()
        except BaseException:
            self._trainer = None
            raise
        try:
            self._go_on_after(damage)  # out there, for an error holds what it met on its way
        except BaseException:
            self._trainer = None
            raise
        return False

    def _pass_on(self, exchange: Exchange, report: Report) -> Orders | None:
        """Beside the ticks: once a rank is out of memory, what this one has with others is broken off."""
        number, at = self._num_broken, self._broken_at
        if self._is_broken(at):
            with self._breaking:
                if number == self._num_broken and not self.mesh.is_broken:
                    try:
                        self.mesh.abort()
                    except (RuntimeError, ValueError) as error:  # the exchange goes on
                        log.warning("group=%s what hangs may not be broken off: %s", self.options.group, error)
        return exchange(report) if self._leads else None

    @property
    def _broken_at(self) -> str:
        """Where a rank that is out of memory leaves word at their store: others may hang in this tick."""
        return f"tlora-memory/{self._num_broken}"

    def _is_broken(self, at: str) -> bool:
        with suppress(RuntimeError):  # who keeps the store is gone
            return bool(self._store.check([at]))
        return False

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
        if self._leads:  # those who wait for room are the same on all
            jobs |= {name: told for name, told in self._room.reports().items() if name not in jobs}
        for name, reading in self._reading.items():
            if self._is_lead(reading.lanes):
                told = self._room.told(name, reading.order.attempt)
                jobs[name] = replace(told, reason=reading.reason or told.reason)
        for name, job in here.items():
            if name in self._led:
                jobs[name] = describe(job, self._attempts[name], self._where(trainer, name))
        leaving = frozenset(trainer.leaving) if trainer else frozenset[str]()
        if not self._reading.keys() - self._room.reports().keys() and not leaving:
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
        after_s = self.options.next_save_s(job.save_s for job in told.values())
        due = [name for name in running if now_s - self._saved_s.setdefault(name, now_s) >= after_s]
        return Wishes(orders, self._lanes, self.mailbox.acknowledged(), frozenset(due))

    def _talk(self) -> bool:
        """What all say, and what follows from it; whether this unit's end has come."""
        word = self._word()
        words: list[Word] = self.mesh.share(word)
        assert words[0].wishes is not None
        self._told, self._talked_s, self._wishes = word, time.monotonic(), words[0].wishes
        orders = self._wishes.orders
        self._forget(orders, self._wishes.heard)
        self._room.forget(orders)
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
                trainer.token_budget = max(
                    min(trainer.token_budget, orders.most_rows), *map(longest_of, trainer.jobs.values())
                )
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
            except (GroupError, torch.OutOfMemoryError):
                raise
            except (TloraError, OSError, RuntimeError) as error:  # on all ranks alike
                for name in lanes:
                    self._end(name, orders.jobs[name].attempt, error)
        trainer = self._group
        if trainer is None:
            return
        here = trainer.jobs.keys() | trainer.leaving.keys()
        for name, where in lanes.items():
            known = name in self._ended or name in self._reading or self._room.is_crowded(name, here)
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
        """Jobs whose data all ranks of their lanes have read, if all of those have room for them."""
        orders, plan = self._wishes.orders, self.mesh.plan
        for key in sorted(frozenset().union(*(word.ready for word in words))):
            name, attempt, lanes = key
            if not is_for(orders, name, attempt) or self._wishes.lanes.get(name) != lanes:
                continue
            if all(key in words[rank].ready for rank in plan.ranks_of(lanes)):
                reading = self._reading.get(name)
                lack = self._lack(trainer, reading) if reading else None
                lacks = [each for each in self.mesh.share(lack) if each is not None]
                if not lacks:
                    self._room.admit(name)
                    if reading:
                        self._attach_together(trainer, name, reading)
                    continue
                trainer.drop(name)
                self._reading.pop(name, None)
                self._crowd_together(lacks, lack)

    def _lack(self, trainer: GroupTrainer, reading: _Reading) -> Shortage | None:
        """Of room for a job's vectors, and for a tick with its longest sequence, by the estimate; or what else keeps
        the job out."""
        spec, outline = reading.spec, trainer.supermodel.outline
        others = {**trainer.jobs, **trainer.leaving}
        told, text = self._room.told(spec.name, reading.order.attempt), ""
        for _ in range(2):
            try:
                layouts = [outline.lay_out(each.adapter) for each in (*(job.spec for job in others.values()), spec)]
                datas = [reading.data.result(), *(job.data for job in others.values())]
                longest = max(longest_rows(data, trainer.supermodel.deterministic) for data in datas)
                self._room.refuse_beside(outline, layouts, longest)
                trainer.make(spec)
            except (torch.OutOfMemoryError, MemoryError) as error:
                text = str(error)
            except GroupError:
                raise
            except (TloraError, OSError, RuntimeError) as error:
                return Shortage(spec.name, told, frozenset(), "", "", fault=str(error) or type(error).__name__)
            else:
                return None
            trainer.supermodel.free_memory()
        return Shortage(spec.name, told, frozenset(others), text, f"out of memory, though alone: {text}")

    def _crowd_together(self, lacks: list[Shortage], mine: Shortage | None) -> None:
        """On all ranks alike: a job waits until each that has no room has lost a neighbour; where one has nothing else,
        it fails."""
        lack = min(lacks, key=lambda lack: (not lack.fault, bool(lack.beside)))
        if lack.beside:
            beside = frozenset[str]().union(*(each.beside for each in lacks))
            here = mine.beside if mine and mine.name == lack.name else frozenset[str]()
            self._room.crowd(lack.name, lack.told, beside, lack.text, here)
        else:
            self._end(lack.name, lack.told.attempt, JobError(lack.fault or lack.alone))

    def _attach_together(self, trainer: GroupTrainer, name: str, reading: _Reading) -> None:
        data = reading.data.result()
        self._widen(trainer, longest_rows(data, trainer.supermodel.deterministic))
        self._attempts[name] = reading.order.attempt
        self._watch(name, reading.order)
        (self._led.add if self._is_lead(reading.lanes) else self._led.discard)(name)
        try:
            trainer.attach(
                reading.spec, data, resume=True, record=JobRecord(name), tokenizer=self._tokenizer, lanes=reading.lanes
            )
        except (GroupError, torch.OutOfMemoryError):
            raise
        except (TloraError, OSError, RuntimeError) as error:
            if self._may_wait(name, reading, error):
                return
            self._attempts.pop(name, None)
            self._end(name, reading.order.attempt, error)
        del self._reading[name]

    def _load(self) -> Trainer:
        self._tokenizer = load_tokenizer(self._base)
        supermodel = self._load_base()
        return GroupTrainer(supermodel, self.mesh, self._trainer_options(supermodel))

    def _load_base(self) -> SuperModel:
        self._loads += 1
        options = self.options
        return SuperModel.load(
            self._base, mesh=self.mesh, deterministic=options.deterministic, checkpointing=options.checkpointing
        )

    def _next_rows(self) -> int:
        """Half of what ticks hold; no fewer than the longest sequence takes."""
        trainer = self._group
        return max(trainer.token_budget // 2, *map(longest_of, trainer.jobs.values()), 0) if trainer else 0

    def _damage(self, error: str = "") -> Damage:
        trainer = self._group
        if trainer is None:
            return Damage({}, has_base=False, error=error)
        jobs = {
            name: (self._attempts[name], trainer.lanes(name), job.step, job.phase, job.is_settled)
            for name, job in trainer.jobs.items()
        }
        largest = None
        if error and jobs and (rows := self._next_rows()) == trainer.token_budget:
            name = next(name for name, job in trainer.jobs.items() if longest_of(job) == rows)
            told = describe(trainer.jobs[name], self._attempts[name], trainer.lanes(name))
            text = f"out of memory in a tick of {rows} rows, the length of its longest sequence"
            beside = frozenset(jobs.keys() | trainer.leaving.keys()) - {name}
            largest = Shortage(name, told, beside, error, f"{text}. Lower data.max_length. ({error})")
        return Damage(jobs, True, error, largest)

    def _go_on_after(self, damage: Damage) -> None:
        """All ranks break off what they were at and meet again; ticks hold half as many rows then, and steps in flight
        begin anew. Where ticks cannot be smaller, the job of the longest sequence leaves."""
        self._stepped_s = time.monotonic()
        if damage.error:
            self._store.set(self._broken_at, str(self._next_rows()))
        rows = int(self._store.get(self._broken_at))
        self.mailbox.tell(replace(self.mailbox.report(), most_rows=rows))  # for those to come, should these not meet
        with self._breaking:
            self._num_broken += 1
        trainer, self._trainer, self._talks = self._group, None, 0
        base = None if trainer is None or self.mesh.shard_group is not None else trainer.supermodel
        if trainer is not None:
            del trainer.supermodel
        self.mesh.leave()
        gc.collect()
        on_gpu = self.mesh.device.type == "cuda"
        if on_gpu:
            torch.cuda.synchronize()  # what waits behind an exchange that was broken off is not to land in a new step
        if base is not None:
            base.free_memory()  # before new groups, for which NCCL wants memory beside torch's stock
        elif on_gpu:
            torch.cuda.empty_cache()
        self.mesh.meet_again()
        self._note(trainer.take_ended() if trainer else ())
        ends = {name: told.attempt for name, told in self._ended.items()}
        ends |= {name: self._attempts[name] for name in (trainer.leaving if trainer else ())}
        damages: list[Damage] = self.mesh.share(replace(damage, ended=frozenset(ends.items())))
        first = {name: self.mesh.plan.ranks_of(lanes)[0] for name, lanes in self._wishes.lanes.items()}
        self._ended = agreed(self._ended, {name: damages[rank] for name, rank in first.items()})
        if trainer is None or not all(each.has_base for each in damages):
            error = next(each.error for each in damages if each.error)
            for name in self._wishes.lanes:
                order = self._wishes.orders.jobs[name]
                self._end(name, order.attempt, JobError(f"out of memory as the base was loaded: {error}"))
            return
        self._stepped_s = time.monotonic()
        trainer.go_on_with(base or self._load_base())
        self._trainer = trainer
        self._halting -= trainer.jobs.keys()  # a save that was broken off is none
        for name in sorted(trainer.jobs):  # those that did not come to one place go on from their last saves
            told = [damages[rank].jobs.get(name) for rank in self.mesh.plan.ranks_of(trainer.lanes(name))]
            if told.count(told[0]) < len(told) or not trainer.jobs[name].is_settled:
                trainer.release(name, keep=False)
        self._shrink_together(trainer, damages, damage.largest)
        trainer.supermodel.free_memory()
        trainer.replay()

    def _shrink_together(self, trainer: GroupTrainer, damages: list[Damage], mine: Shortage | None) -> None:
        lacks: dict[str, list[Shortage]] = {}
        for each in damages:
            if each.largest:
                lacks.setdefault(each.largest.name, []).append(each.largest)
        for name, those in sorted(lacks.items()):
            if name in trainer.jobs:
                trainer.release(name)
            self._crowd_together(those, mine)
        if not lacks:
            self._most_rows = trainer.token_budget = self._next_rows()
            log.warning("group=%s out of memory: ticks hold %d rows now", self.options.group, trainer.token_budget)

    def _report(self, words: list[Word]) -> None:
        """What the unit has, to the scheduler: of what several say of a job, its end, and that with its reason."""
        jobs = joined(words)
        running = [name for name, told in jobs.items() if told.state is State.RUNNING]
        specs = [self._wishes.orders.jobs[name].spec for name in running if name in self._wishes.orders.jobs]
        numbers = describe_tick(self._last)
        if numbers:
            numbers |= {"tick_jobs": len(specs), "tick_ranks": sum(spec["adapter"]["rank"] for spec in specs)}
        self.mailbox.tell(
            replace(
                self.mailbox.report(),
                most_rows=int(self._most_rows) if math.isfinite(self._most_rows) else 0,
                base_loads=self._loads,
                applied=min(word.applied for word in words),
                jobs=jobs,
                ticks=self._ticks,
                busy_s=self._busy_s,
                **numbers,
            )
        )
        self.mailbox.changed.set()

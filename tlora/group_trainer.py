"""The trainer of one rank of a group: the main path, where jobs may lie on several lanes and a base on several ranks.

A job lives whole on one lane, or its sequences are split over several, which then reduce its vector once a step. The
first rank of its lanes leads: it alone holds the job's folder and tracker, and the others learn how its actions ended.
Ranks of one circle agree on every tick in one exchange, and those without rows of its kind send a row of nobody's.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from tlora import nanobatch
from tlora.adapter import AdapterState
from tlora.circle import MOST_SHARED, PHASES, Holding, Message, number_of
from tlora.data import JobData
from tlora.errors import GroupError, JobError, StateError, TloraError
from tlora.job import JobRecord, State
from tlora.kernels.tiles import Update
from tlora.packing import Batch, Item, idle
from tlora.parallel import Mesh
from tlora.resident import IN_FLIGHT, Phase, ResidentJob
from tlora.spec import JobSpec
from tlora.supermodel import SuperModel
from tlora.tensor_parallel import SplitState
from tlora.tracking import Silent, Tracker
from tlora.trainer import Bid, Tick, Trainer, TrainerOptions

log = logging.getLogger("tlora")
_T = TypeVar("_T")
ELSEWHERE = "it failed on another rank of its group"


class GroupTrainer(Trainer):
    """One rank: a super-model that was made with `mesh`, and the jobs of this rank's lane."""

    def __init__(self, supermodel: SuperModel, mesh: Mesh, options: TrainerOptions | None = None):
        super().__init__(supermodel, options or TrainerOptions())
        self.mesh = mesh
        self.talk = 0
        """Number of the newest talk that any rank of the circle had asked for at the last tick."""
        self._asked = 0
        self._held: dict[str, Holding] = {}
        self._lost: set[int] = set()
        self._messages: list[Message] = []
        self._norms: dict[str, torch.Tensor] = {}
        self._tick_s = 0.0
        self._tick_rows = 0
        self._ahead_s = 0.0
        self._ahead_rows = 0
        self._controller = nanobatch.Controller()
        self._tried: set[int] = set()
        self._reduced: set[str] = set()
        self._has_waited = True
        on_gpu = mesh.device.type == "cuda"
        self._aside = torch.cuda.Stream(mesh.device) if on_gpu else None
        """Where split jobs' vectors are summed while other slices compute."""
        self.runs_ahead = on_gpu
        """Whether a tick may end before its device has done all of it."""
        self.beside = on_gpu and mesh.plan.tensor > 1 and not supermodel.deterministic
        """Whether slices run at once, so that a job in several of them needs a gradient for each."""
        self._spares: dict[str, list[tuple[int, AdapterState]]] = {}
        self._made: dict[str, AdapterState] = {}
        """Vectors of jobs that are about to be attached."""

    def attach(
        self,
        spec: JobSpec,
        data: JobData,
        *,
        resume: bool = False,
        record: JobRecord | None = None,
        tokenizer: Any = None,
        lanes: Sequence[int] = (),
    ) -> ResidentJob:
        """`Trainer.attach`, on every rank of the job's `lanes` between the same two ticks of their circle; this rank's
        lane alone, if none are given. What the lead raises, all of them raise."""
        plan, lanes = self.mesh.plan, tuple(sorted(lanes)) or (self.mesh.lane,)
        ranks = plan.ranks_of(lanes)
        if self.mesh.lane not in lanes or not set(ranks) <= {*self.mesh.circle, *self.mesh.lane_ranks}:
            raise StateError(f"job {spec.name}: lanes {lanes} want a circle of their ranks; got {self.mesh.circle}.")
        if len(ranks) > 1 and sum(len(held.ranks) > 1 for held in self._held.values()) == MOST_SHARED:
            raise StateError(f"job {spec.name}: a rank takes at most {MOST_SHARED} jobs that others hold too.")
        if spec.name in self.jobs:
            raise StateError(f"job {spec.name} is resident already; want another name.")
        self._held[spec.name] = Holding(lanes, ranks, ranks[self.mesh.part :: plan.tensor])
        try:
            return super().attach(spec, data, resume=resume, record=record, tokenizer=tokenizer)
        finally:
            self._made.pop(spec.name, None)
            held = None if spec.name in self.jobs else self._held.pop(spec.name, None)
            if held is not None and len(held.ranks) > 1:  # another rank may have taken it in
                self._lost.add(number_of(spec.name))

    def join(self, ranks: Sequence[int]) -> None:
        """Agree on ticks with these ranks from now on: whole replicas, each of which calls this between two ticks."""
        if beyond := [name for name, held in self._held.items() if not set(held.ranks) <= {*ranks}]:
            raise StateError(f"circle {tuple(ranks)}: job {beyond[0]} lies on other ranks too. Detach it first.")
        self.mesh.join(ranks)

    def tick(self, asks: int = 0) -> Tick:
        """`Trainer.tick`, together with the ranks of the circle, all of which must call it. `asks`: number of the talk
        for which this rank asks; afterwards `talk` is the newest that any of them had asked for, on all the same.

        Raises GroupError if a rank of it is gone."""
        began_s, self._asked = time.perf_counter(), max(asks, self._asked)
        self._has_waited = not self.runs_ahead
        with self.mesh.surfacing():
            tick = super().tick()
        if not self._has_waited and self._is_measured and not self._controller.is_settled:
            torch.cuda.synchronize()
            self._has_waited = True
        self._ahead_s += time.perf_counter() - began_s
        self._ahead_rows += tick.num_tokens
        self._tick_s, self._tick_rows = 0.0, 0
        if self._has_waited:  # a tick before would seem to take what its launches take, and this one theirs too
            self._tick_s, self._tick_rows, self._ahead_s, self._ahead_rows = self._ahead_s, self._ahead_rows, 0.0, 0
        return tick

    def go_on_with(self, supermodel: SuperModel) -> None:
        """After `Mesh.meet_again`, on every rank alike: the residents on this base, which may be the one before. What
        ranks count of ticks begins anew: they may not all have come to the end of the last one. `replay` comes next."""
        self.supermodel = supermodel
        self._messages, self._controller = [], nanobatch.Controller()
        self._turn = self.talk = self._asked = 0
        for part in (self._tried, self._reduced, self._norms, self._spares, self._made):
            part.clear()
        for slot in list(supermodel.residents):
            supermodel.remove(slot)
        for name in sorted(self.jobs):
            job = self.jobs[name]
            job.slot, job.credit = supermodel.place(job.state), 0.0

    def make(self, spec: JobSpec) -> None:
        """The vectors of a job that `attach` is to take in: what may lack room is had before other ranks wait."""
        self._made[spec.name] = self._new_state(spec)

    def drop(self, name: str) -> None:
        """What was made is not wanted."""
        self._made.pop(name, None)

    def _new_state(self, spec: JobSpec) -> AdapterState:
        if spec.name in self._made:
            return self._made.pop(spec.name)
        if not self.supermodel.cuts:
            return super()._new_state(spec)
        whole = self.supermodel.outline.lay_out(spec.adapter)
        return SplitState(
            whole, spec.adapter, self.supermodel.cuts, self.mesh, seed=spec.seed, dtype=self.supermodel.dtype
        )

    def _open(self, job: ResidentJob, resume: bool) -> str | None:
        held = self._held[job.name]
        if len(held.ranks) == 1:
            return super()._open(job, resume)
        job.part = held.lanes.index(self.mesh.lane), len(held.lanes)
        mine, job.state = job.state, self._whole_state(job, is_drawn=self._leads(held))

        def opened() -> tuple[Any, ...]:
            run_id = super(GroupTrainer, self)._open(job, resume)
            return job.step, job.tokens, (job.best_loss, job.best_eval_loss), job.phase, run_id

        try:
            job.step, job.tokens, best, job.phase, run_id = self._led(job, opened)
            job.best_loss, job.best_eval_loss = best
            for vector in job.state.tensors().values():
                self.mesh.broadcast(vector, held.lead, held.ranks)
            mine.load(job.state.tensors())
        finally:
            job.state = mine
        return run_id  # type: ignore[no-any-return]

    def _new_tracker(self, job: ResidentJob, run_id: str | None) -> Tracker:
        return super()._new_tracker(job, run_id) if self._leads(self._held[job.name]) else Silent(run_id)

    def _leads(self, held: Holding) -> bool:
        return held.lead == self.mesh.rank

    def _led(self, job: ResidentJob, action: Callable[[], _T]) -> _T:
        """What the lead does for a job, and all its ranks learn the end of."""
        held = self._held[job.name]
        if len(held.ranks) == 1:
            return action()
        told: tuple[Exception | None, Any] = None, None
        if self._leads(held):
            try:
                told = None, action()
            except torch.OutOfMemoryError as error:  # told without what its frames hold
                told = torch.OutOfMemoryError(str(error)), None
            except (TloraError, OSError) as error:
                told = error, None
            except (SafetensorError, ArithmeticError, RuntimeError) as error:
                told = JobError(f"{type(error).__name__}: {error}"), None
        failure, result = self.mesh.tell(told, held.lead, held.ranks)
        if failure is not None:
            raise failure
        return result  # type: ignore[no-any-return]

    def _whole_state(self, job: ResidentJob, *, is_drawn: bool) -> AdapterState:
        """A job's vectors, not cut; in host memory where they are cut here."""
        if not isinstance(job.state, SplitState):
            return job.state
        spec, dtype = job.spec, self.supermodel.dtype
        return AdapterState(
            job.state.whole_layout, spec.adapter, seed=spec.seed, device=torch.device("cpu"), dtype=dtype,
            is_drawn=is_drawn,
        )  # fmt: skip

    def _gathered(self, job: ResidentJob) -> AdapterState:
        """A job's whole vectors; right on its lead alone."""
        held, mine = self._held[job.name], job.state
        if not isinstance(mine, SplitState) or self.mesh.lane != held.lanes[0]:
            return mine
        parts = {name: self.mesh.gather(vector, self.mesh.lane_ranks) for name, vector in mine.tensors().items()}
        whole = self._whole_state(job, is_drawn=False)
        for part in range(self.mesh.plan.tensor):
            mine.fill(whole.tensors(), {name: vectors[part] for name, vectors in parts.items()}, part)
        return whole

    def _is_behind(self, job: ResidentJob) -> bool:
        """Of a job on several ranks, its lead alone could say: they wait for it."""
        if len(self._held[job.name].ranks) == 1:
            return super()._is_behind(job)
        self._led(job, partial(job.settle_files, most=IN_FLIGHT))
        return False

    def _save(self, job: ResidentJob) -> None:
        self._led(job, partial(self._save_state, job, self._gathered(job)))

    def _export(self, job: ResidentJob, part: str) -> None:
        self._led(job, partial(self._write_adapter, job, self._gathered(job), part))

    def _guard(self, job: ResidentJob, action: Callable[[], None]) -> None:
        """A rank that is gone is no job's fault, nor is memory that runs out where others wait for this one."""
        failed: list[Exception] = []

        def watched() -> None:
            try:
                self.mesh.refuse_broken()
                action()
            except (GroupError, torch.OutOfMemoryError) as error:
                job.is_settled = False
                failed.append(error)

        super()._guard(job, watched)
        if failed:
            raise failed[0]

    def _leave(self, job: ResidentJob, state: State, reason: str) -> None:
        for slot, _ in self._spares.pop(job.name, ()):
            self.supermodel.remove(slot)
        super()._leave(job, state, reason)
        if len(self._held.pop(job.name).ranks) > 1 and state is State.FAILED:
            self._lost.add(number_of(job.name))

    def _deal(self) -> tuple[Phase, list[Item]]:
        """As a rank alone would, but that a kind which any rank of the circle waits for has its turn."""
        self._turn += 1
        while True:
            bids = {phase: self._bid(phase) for phase in PHASES}
            self._messages = [Message.of(numbers) for numbers in self.mesh.exchange(self._message(bids).numbers())]
            if not self.lose(frozenset[int]().union(*(message.lost for message in self._messages))):
                break
        self.talk = max(message.talk for message in self._messages)
        self._control()
        kinds = self._kinds
        if kinds == 3:
            self._phase = PHASES[1 - self._messages[0].last]
        elif kinds:
            self._phase = PHASES[kinds - 1]
        return self._phase, self._take(bids[self._phase])

    def lanes(self, name: str) -> tuple[int, ...]:
        """On which a resident of this rank lies."""
        return self._held[name].lanes

    @property
    def lost(self) -> frozenset[int]:
        """Numbers of jobs of several ranks that failed here, of which the others have not heard."""
        return frozenset(self._lost)

    def lose(self, lost: frozenset[int]) -> bool:
        """Let go of jobs that failed on any rank of the circle, each of which calls this; whether there are any."""
        for job in [job for job in self.jobs.values() if number_of(job.name) in lost]:
            self._leave(job, State.FAILED, ELSEWHERE)
        self._lost -= lost
        return bool(lost)

    @property
    def is_idle(self) -> bool:
        """Whether no rank of the circle had anything to send in the last tick."""
        return not self._kinds

    @property
    def pace(self) -> tuple[int, float]:
        """Rows of all lanes, and seconds of the slowest rank, in the tick before the last."""
        rows = sum(message.rows for message in self._messages) // self.mesh.plan.tensor
        return rows, max((message.micros for message in self._messages), default=0) / 1e6

    @property
    def _kinds(self) -> int:
        """Bits of the kinds that some rank of the circle has rows of."""
        kinds = 0
        for message in self._messages:
            kinds |= message.kinds
        return kinds

    def _message(self, bids: dict[Phase, list[Bid]]) -> Message:
        through = frozenset(
            number_of(job.name)
            for phase in PHASES
            for job, claim, count in bids[phase]
            if self._held[job.name].is_split and count == len(claim.lengths)
        )
        kinds = sum(1 << at for at, phase in enumerate(PHASES) if any(count for _, _, count in bids[phase]))
        last, micros, mix = PHASES.index(self._phase), int(self._tick_s * 1e6), number_of(" ".join(sorted(self.jobs)))
        return Message(last, kinds, self._asked, micros, self._tick_rows, mix, through, frozenset(self._lost))

    def _control(self) -> None:
        """Let the controller see the last tick, as slow as its slowest rank: the same numbers on every rank. The first
        of each count is left out: it compiles, and its memory grows."""
        rows = max(message.rows for message in self._messages)
        if not self._is_measured or not rows or self._phase is not Phase.TRAINING:
            return
        if self._controller.count not in self._tried:
            self._tried.add(self._controller.count)
            return
        cost = max(message.micros for message in self._messages) / rows
        self._controller.note(cost, tuple(message.mix for message in self._messages))

    @property
    def _is_measured(self) -> bool:
        """Whether slices are not asked for, and one's exchange could run under another's compute. A sharded base's
        gathers do without: each layer is gathered once."""
        has_split = any(held.is_split for held in self._held.values())
        return not self.options.nano_batches and (
            self.mesh.plan.tensor > 1 or (has_split and not self.mesh.plan.is_spread)
        )

    @property
    def num_slices(self) -> int:
        """Slices of the next tick: as asked for, as measured, or one."""
        return self.options.nano_batches or (self._controller.count if self._is_measured else 1)

    def _send_all(self, dealt: list[Item], phase: Phase) -> None:
        due = {job.slot: job for job in self._due(phase)}
        places = {slot: at for at, slot in enumerate(due)}  # their vectors go round while the others compute
        dealt = sorted(dealt, key=lambda item: places.get(item.slot, len(places)))
        slices = nanobatch.cut(dealt, self.num_slices, self._work)
        if not self.mesh.plan.is_spread:
            for at, items in enumerate(slices, 1):
                self._send(items, phase)
                if phase is Phase.TRAINING and at < len(slices):
                    self._reduce_early(list(due.values()), {item.slot for part in slices[at:] for item in part})
        elif self._kinds:
            self._send_together(slices, phase)

    def _send_together(self, slices: list[list[Item]], phase: Phase) -> None:
        training = phase is Phase.TRAINING
        placed = self._spread_out(slices) if training and self.beside else slices
        batches = [self._pack(items, phase) for items in placed] or [self._idle(phase)]
        for _, spare in chain(*self._spares.values()):  # a tick that was broken off may have left something
            spare.grad.zero_()
        if training:
            losses = self.supermodel.train_slices(batches)
        else:
            with_wrong = any(map(self._counts_wrong, slices))
            losses = self.supermodel.evaluate_slices(batches, with_wrong=with_wrong)
        for items, part in zip(slices, losses, strict=False):
            self._note(items, part)
        for name, spares in self._spares.items():
            for _, spare in spares:
                self.jobs[name].state.grad.add_(spare.grad)

    def _spread_out(self, slices: list[list[Item]]) -> list[list[Item]]:
        """Give a job that is in several slices a slot, and so a gradient, for each but the first."""
        names = {job.slot: job.name for job in self.jobs.values()}
        seen: dict[int, int] = {}
        placed = []
        for items in slices:
            slots = dict[int, int]()
            for slot in dict.fromkeys(item.slot for item in items):
                slots[slot] = self._spare_slot(names[slot], seen[slot]) if slot in seen else slot
                seen[slot] = seen.get(slot, -1) + 1
            placed.append([replace(item, slot=slots[item.slot]) for item in items])
        return placed

    def _spare_slot(self, name: str, number: int) -> int:
        spares = self._spares.setdefault(name, [])
        if number == len(spares):
            spare = copy(self.jobs[name].state)
            spare.grad = torch.zeros_like(spare.grad)
            spares.append((self.supermodel.place(spare), spare))
        return spares[number][0]

    def _idle(self, phase: Phase) -> Batch:
        return idle(
            device=self.supermodel.device,
            per_sequence=self.supermodel.deterministic,
            training=phase is Phase.TRAINING,
            num_rows=self.supermodel.row_multiple(1),
        )

    def _due(self, phase: Phase) -> list[ResidentJob]:
        """Split jobs of which nothing will be left anywhere after this tick: those with the most gradient bytes first,
        which all ranks see alike."""
        jobs = [job for job in self.jobs.values() if job.phase is phase and self._held[job.name].is_split]
        due = [job for job in jobs if self._kinds and self._is_through_everywhere(job)]
        return sorted(due, key=lambda job: (-job.state.layout.size, job.name))

    def _through(self, dealt: list[Item], phase: Phase) -> list[ResidentJob]:
        mine = super()._through(dealt, phase)
        return self._due(phase) + [job for job in mine if not self._held[job.name].is_split]

    def _is_through_everywhere(self, job: ResidentJob) -> bool:
        said = dict(zip(self.mesh.circle, self._messages, strict=True))
        return all(number_of(job.name) in said[rank].through for rank in self._held[job.name].ranks)

    def _step(self, jobs: list[ResidentJob]) -> None:
        self._reduce(jobs, with_gradient=True)
        super()._step(jobs)
        self._has_waited |= bool(jobs)

    def _finish_evaluation(self, jobs: list[ResidentJob]) -> None:
        self._reduce(jobs, with_gradient=False)
        super()._finish_evaluation(jobs)
        self._has_waited |= bool(jobs)

    def _reduce_early(self, due: list[ResidentJob], waiting: set[int]) -> None:
        """Sum the vectors of due jobs of which no sequence is waiting any more; in their order, as all ranks do."""
        for job in due:
            if job.slot in waiting:
                return
            if job.name not in self._reduced:
                self._reduced.add(job.name)
                self._reduce_split(job, with_gradient=True)

    def _reduce(self, jobs: list[ResidentJob], *, with_gradient: bool) -> None:
        """Sum what the ranks that hold a job have of its gradient and losses; nothing of a job that one rank holds."""
        for job in jobs:
            if self._held[job.name].is_split and job.name not in self._reduced:
                self._reduce_split(job, with_gradient=with_gradient)
        self._reduced.clear()
        if self._aside is not None:
            torch.cuda.current_stream().wait_stream(self._aside)
        cut = {job.name: job.state for job in jobs if isinstance(job.state, SplitState)}
        if with_gradient and cut:
            for state in cut.values():
                self.mesh.sum_in_order(state.partial_grad, self.mesh.lane_ranks)
            self._measure(cut)

    def _reduce_split(self, job: ResidentJob, *, with_gradient: bool) -> None:
        if self._aside is not None:
            self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside) if self._aside is not None else nullcontext():
            vectors = [job.state.grad, job.losses] if with_gradient else [job.losses]
            joined = torch.cat(vectors)
            self.mesh.sum_in_order(joined.view(-1), self._held[job.name].summed)  # evaluations may have two columns
            for vector, part in zip(vectors, joined.split([len(vector) for vector in vectors]), strict=True):
                vector.copy_(part)

    def _measure(self, states: dict[str, SplitState]) -> None:
        """Norms of whole gradients, of which each rank has a cut part: one number a job goes round."""
        squares = torch.stack([square for state in states.values() for square in state.squares]).view(-1, 2)
        cut, common = squares.unbind(1)
        cut = cut.contiguous()
        self.mesh.sum_in_order(cut, self.mesh.lane_ranks)
        self._norms.update(zip(states, (cut + common).sqrt(), strict=True))

    def _prepare(self, job: ResidentJob, updates: dict[str, Update]) -> None:
        super()._prepare(job, updates)
        norm, update = self._norms.get(job.name), updates[job.name]
        if norm is None:
            return
        if update.max_grad_norm > 0.0:
            update.grad.mul_((update.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        loss = torch.where(torch.isfinite(norm), update.loss, torch.nan)
        updates[job.name] = replace(update, max_grad_norm=0.0, loss=loss)

    def _update(self, updates: dict[str, Update]) -> torch.Tensor:
        norms = super()._update(updates)
        for at, name in enumerate(updates):
            if name in self._norms:
                norms[at] = self._norms.pop(name)
        return norms

"""THE MAIN PATH: attach jobs, tick, step each job on its own clock, save, detach.

A *tick* is one forward and backward of this worker over at most its token budget, filled from all resident jobs. A
*step* is one optimizer step of one job, taken when the sequences of that job's own batch are all through. What a job
computes depends on its own seed and step alone; what is dealt beside it decides only when.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import yaml
from safetensors import SafetensorError

from tlora import nanobatch
from tlora.adapter import AdapterState, export_peft
from tlora.beside import Writer, own_stream
from tlora.checkpoint import BEST, STATE, read_meta, save_state, save_tokenizer
from tlora.data import JobData
from tlora.dealing import Claim, deal
from tlora.errors import JobError, StateError, TloraError
from tlora.files import atomic_path
from tlora.job import JobRecord, State
from tlora.keeping import describe, restore
from tlora.kernels.adamw import adamw
from tlora.kernels.tiles import Update
from tlora.optim import update_of
from tlora.packing import Batch, Item, pack, rows_of
from tlora.resident import IN_FLIGHT, Phase, ResidentJob, longest_rows
from tlora.spec import JobSpec
from tlora.supermodel import SuperModel
from tlora.tracking import Tracker

log = logging.getLogger("tlora")
_FAULTS = (TloraError, OSError, SafetensorError, ArithmeticError, RuntimeError)
Bid = tuple[ResidentJob, Claim, int]
"""A job, what it asked for, and how many sequences it is to send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How a worker ticks. None of it changes what any job computes."""

    token_budget: int = 0
    """Most rows in a tick; 0: 16384 on a GPU, 2048 on a CPU."""
    nano_batches: int = 0
    """Slices of a tick; 0: one, or what a group's ranks measure to be best."""
    round_to: int = 1
    """Each slice is filled to a multiple of this many rows, which belong to nobody."""
    writes_beside: bool = False
    """Files are written by a thread, and ticks go on meanwhile."""
    patience_s: float = 0.0
    """How long that thread tries again what it cannot write, before the job fails."""
    mark: str | None = None
    """File that is there unless the storage is away: without it no job is taken in."""

    def budget_on(self, device: torch.device, longest: int = 0) -> int:
        """The budget on a device; one that was not given holds a sequence of `longest` rows twice."""
        return self.token_budget or max(16384 if device.type == "cuda" else 2048, 2 * longest)


@dataclass(frozen=True, slots=True)
class Tick:
    """What one tick did."""

    phase: Phase
    num_tokens: int
    seconds: float
    ended: tuple[ResidentJob, ...]
    """Jobs that left: finished or failed; their record says why."""
    ranks: tuple[int, ...] = ()
    """Of the jobs whose sequences these were."""


class Trainer:
    """One worker: a super-model and the jobs resident on it."""

    def __init__(self, supermodel: SuperModel, options: TrainerOptions = TrainerOptions()):
        self.supermodel, self.options = supermodel, options
        self.token_budget = options.budget_on(supermodel.device)
        self.jobs: dict[str, ResidentJob] = {}
        self.leaving: dict[str, ResidentJob] = {}
        """Out of the ticks, while the last of their files are written."""
        self._writer = Writer(supermodel.device, is_beside=options.writes_beside, patience_s=options.patience_s)
        self._closings: dict[str, Future[tuple[State, str]]] = {}
        self._ended: list[ResidentJob] = []
        self._turn, self._phase = 0, Phase.EVALUATING

    def attach(
        self,
        spec: JobSpec,
        data: JobData,
        *,
        resume: bool = False,
        record: JobRecord | None = None,
        tokenizer: Any = None,
    ) -> ResidentJob:
        """Take a job in, from its saved state if `resume` and there is one. It joins at the next tick; `tokenizer` is
        saved beside its adapters.

        Raises TloraError, and leaves everything as it was, if it cannot join: its name or folder is taken, its state is
        damaged or another job's, its targets match nothing, its longest sequence is longer than a tick."""
        if spec.name in self.jobs or spec.name in self.leaving:
            raise StateError(f"job {spec.name} is resident already; want another name.")
        self.refuse_longer(spec, data)
        job = self.prepare(spec, data, resume=resume, record=record, tokenizer=tokenizer)
        self.admit(job)
        return job

    def refuse_longer(self, spec: JobSpec, data: JobData) -> None:
        """Raise JobError if one of a job's sequences does not fit into a tick."""
        longest = longest_rows(data, self.supermodel.deterministic)
        if longest > (budget := max(self.token_budget, self.options.token_budget)):  # a halved one grows again
            raise JobError(
                f"job {spec.name}: its longest sequence takes {longest} rows; want at most the token budget, "
                f"{budget}. Lower data.max_length or raise the budget."
            )

    def prepare(
        self,
        spec: JobSpec,
        data: JobData,
        *,
        resume: bool = False,
        record: JobRecord | None = None,
        tokenizer: Any = None,
    ) -> ResidentJob:
        """The part of `attach` that takes time, and may run in another thread beside the ticks: a job with its state,
        which holds its folder until it has been admitted and left, or is given up. By the time that it is admitted a
        tick must have room for its longest sequence."""
        with own_stream(self.supermodel.device):
            state = self._new_state(spec)
            record = record or JobRecord(spec.name)
            job = ResidentJob(spec, data, state, record, tokenizer, per_sequence=self.supermodel.deterministic)
            try:
                run_id = self._open(job, resume)
                job.tracker = self._new_tracker(job, run_id)
            except BaseException:
                job.folder.close()
                raise
        return job

    def give_up(self, job: ResidentJob) -> None:
        """A prepared job that is not to join after all."""
        if job.tracker is not None:
            job.tracker.close()
        job.folder.close()

    def admit(self, job: ResidentJob) -> None:
        """Let a prepared job take part from the next tick on."""
        try:
            job.record.to(State.ATTACHING)
            job.slot = self.supermodel.place(job.state)
        except BaseException:
            self.give_up(job)
            raise
        self.jobs[job.name] = job
        job.record.to(State.RUNNING)
        begin = self._evaluate_or_settle if job.phase is Phase.EVALUATING else self._go_on
        self._guard(job, partial(begin, job))
        self._gather()

    def detach(self, name: str, *, state: State = State.PAUSED, reason: str = "", keep: bool = True) -> ResidentJob:
        """Take a job out between ticks; with `keep`, its exact state is saved first, without the step in flight. After
        a tick that was broken off, a job amid its optimizer step keeps the state that was saved before."""
        self._gather(job := self.release(name, state=state, reason=reason, keep=keep))
        self._ended.remove(job)
        return job

    def release(self, name: str, *, state: State = State.PAUSED, reason: str = "", keep: bool = True) -> ResidentJob:
        """`detach` without waiting for its files: the job is among those that have ended once they are written."""
        job = self.jobs[name]
        if keep and job.is_settled:
            self._guard(job, partial(self._save, job))
        if name in self.jobs:
            self._leave(job, state, reason)
        return job

    def close(self) -> None:
        """Detach everyone, and wait until all files are written."""
        for name in list(self.jobs):
            self.release(name)
        for job in list(self.leaving.values()):
            self._gather(job)
        self._writer.close()

    def tick(self) -> Tick:
        """One forward and backward (or evaluation) over sequences of all residents, then the steps it completes."""
        began_s = time.perf_counter()
        with self.supermodel.threads():
            phase, dealt = self._deal()
            slots = {item.slot for item in dealt}
            ranks = tuple(job.spec.adapter.rank for job in self.jobs.values() if job.slot in slots)
            self._send_all(dealt, phase)
            through = self._through(dealt, phase)
            if phase is Phase.TRAINING:
                self._step(through)
            else:
                self._finish_evaluation(through)
        for job in list(self.jobs.values()):
            self._guard(job, job.settle_files)
        tokens = sum(len(item.sequence) for item in dealt)
        return Tick(phase, tokens, time.perf_counter() - began_s, self.take_ended(), ranks)

    def take_ended(self) -> tuple[ResidentJob, ...]:
        """Jobs that have left since this was last asked: in a tick, or as they came, if nothing was left to be done."""
        self._gather()
        ended, self._ended = tuple(self._ended), []
        return ended

    def _gather(self, awaited: ResidentJob | None = None) -> None:
        """Jobs whose last files are written have ended."""
        for name, closing in list(self._closings.items()):
            job = self.leaving[name]
            if closing.done() or job is awaited:
                state, reason = closing.result()
                del self._closings[name], self.leaving[name]
                job.record.to(state, reason)
                self._ended.append(job)

    def save(self, name: str) -> None:
        """Save a settled resident's exact state, between ticks and beside its own cadence, unless its files are behind:
        nobody waits for a storage that is slow or away."""
        job = self.jobs[name]
        assert job.is_settled
        self._guard(job, partial(self._save_in_turn, job))

    def replay(self) -> None:
        """After a tick that was broken off: every step in flight begins anew, as if nothing of it had been sent. Raises
        StateError if one was broken off amid its update, which only a saved state can mend."""
        for job in self.jobs.values():
            if not job.is_settled:
                raise StateError(f"job {job.name}: its optimizer step was broken off; want it resumed from its save.")
            job.begin(job.phase, time.perf_counter())

    def _deal(self) -> tuple[Phase, list[Item]]:
        """Training and evaluation take turns where both wait; a tick is of one kind."""
        waiting = {job.phase for job in self.jobs.values()}
        if len(waiting) == 2:
            self._phase = Phase.TRAINING if self._phase is Phase.EVALUATING else Phase.EVALUATING
        elif waiting:
            (self._phase,) = waiting
        self._turn += 1
        return self._phase, self._take(self._bid(self._phase))

    def _bid(self, phase: Phase) -> list[Bid]:
        """What a tick of this kind would take of whom; nothing is changed yet."""
        here = (job for job in self.jobs.values() if job.phase is phase and not job.is_held)
        jobs = sorted(here, key=lambda job: job.slot)
        claims = [Claim(job.share, job.pending_rows, job.step_rows, job.credit) for job in jobs]
        return list(zip(jobs, claims, deal(claims, self.token_budget, self._turn), strict=True))

    def _take(self, bids: list[Bid]) -> list[Item]:
        items: list[Item] = []
        for job, claim, count in bids:
            job.credit = claim.credit
            items += job.take(count)
        return items

    def _send_all(self, dealt: list[Item], phase: Phase) -> None:
        for items in nanobatch.cut(dealt, self.options.nano_batches or 1, self._work):
            self._send(items, phase)

    def _through(self, dealt: list[Item], phase: Phase) -> list[ResidentJob]:
        """Jobs whose step, or evaluation, this tick has brought to its end."""
        return [job for job in self.jobs.values() if job.phase is phase and job.is_through and dealt]

    def _work(self, item: Item) -> float:
        """Rank-weighted work of a sequence, for an even cut."""
        layout = self.supermodel.residents[item.slot].layout
        return len(item.sequence) * (self.supermodel.outline.num_parameters + layout.num_parameters)

    def _send(self, items: list[Item], phase: Phase) -> None:
        batch = self._pack(items, phase)
        if phase is Phase.TRAINING:
            losses = self.supermodel.train(batch)
        else:
            losses = self.supermodel.evaluate(batch, with_wrong=self._counts_wrong(items))
        self._note(items, losses)

    def _counts_wrong(self, items: list[Item]) -> bool:
        slots = {item.slot for item in items}
        return any(job.slot in slots and job.spec.objective == "exact_match" for job in self.jobs.values())

    def _pack(self, items: list[Item], phase: Phase) -> Batch:
        num_rows = sum(rows_of(item.sequence, self.supermodel.deterministic) for item in items)
        return pack(
            items,
            device=self.supermodel.device,
            per_sequence=self.supermodel.deterministic,
            training=phase is Phase.TRAINING,
            round_to=math.lcm(self.options.round_to, self.supermodel.row_multiple(num_rows)),
        )

    def _note(self, items: list[Item], losses: torch.Tensor) -> None:
        for job in self.jobs.values():
            at = [index for index, item in enumerate(items) if item.slot == job.slot]
            if at:  # one after the other, in the batch as in the step
                job.add_losses(items[at[0]].position, losses[at[0] : at[-1] + 1])

    def _step(self, jobs: list[ResidentJob]) -> None:
        """Optimizer steps of the jobs whose batch is through, taken at once, then one look at the device for all."""
        updates: dict[str, Update] = {}
        for job in jobs:
            self._guard(job, partial(self._prepare, job, updates))
        stepped = [job for job in jobs if job.name in updates]
        if not stepped:
            return
        for job in stepped:
            job.is_settled = False
        norms = self._update(updates)
        losses = torch.stack([update.loss for update in updates.values()])
        values = torch.stack([losses.double(), norms.double()], dim=1).tolist()
        for job, (loss, norm) in zip(stepped, values, strict=True):
            self._guard(job, partial(self._after_step, job, loss, norm))

    def _update(self, updates: dict[str, Update]) -> torch.Tensor:
        """Take the steps; returns the gradients' norms before clipping."""
        return adamw(list(updates.values()))

    def _prepare(self, job: ResidentJob, updates: dict[str, Update]) -> None:
        loss = job.summed_loss()
        updates[job.name] = update_of(job.state, job.spec.optim, loss=loss, step=job.step, lr=job.rate)

    def _after_step(self, job: ResidentJob, loss: float, norm: float) -> None:
        now_s = time.perf_counter()
        rate = job.rate
        if not (math.isfinite(loss) and math.isfinite(norm)):
            job.is_settled = True  # by selection, nothing was changed
            what = f"loss became {loss}" if not math.isfinite(loss) else f"gradient norm became {norm}"
            raise self._no_longer_finite(job, f"{what} at step {job.step + 1}")
        job.measure_step(loss, now_s)
        job.step += 1
        job.is_settled = True
        job.tokens += job.step_tokens
        assert job.tracker is not None
        job.tracker.write(
            {
                "step": job.step,
                "epoch": job.epoch,
                "loss": loss,
                "lr": rate,
                "grad_norm": norm,
                "tokens": job.tokens,
                "tokens_per_s": job.tokens_per_s,
            }
        )
        self._evaluate_or_settle(job)

    def _evaluate_or_settle(self, job: ResidentJob) -> None:
        if job.data.eval and job.is_due(job.spec.eval_every):
            job.begin(Phase.EVALUATING, time.perf_counter())
        else:
            self._settle(job)

    def _finish_evaluation(self, jobs: list[ResidentJob]) -> None:
        found = [torch.stack([job.summed_loss().double(), job.exact_match()]) for job in jobs]
        for job, (loss, exact_match) in zip(jobs, torch.stack(found).tolist() if found else (), strict=True):
            self._guard(job, partial(self._after_evaluation, job, loss, exact_match))

    def _after_evaluation(self, job: ResidentJob, loss: float, exact_match: float) -> None:
        job.eval_loss = loss
        if not math.isfinite(loss):
            raise self._no_longer_finite(job, f"evaluation loss became {loss} at step {job.step}")
        assert job.tracker is not None
        row, objective = {"step": job.step, "epoch": job.epoch, "eval_loss": loss}, (loss, loss)
        if job.spec.objective == "exact_match":
            row["exact_match"], objective = exact_match, (1.0 - exact_match, loss)
        job.tracker.write(row)
        if objective < (job.best_loss, job.best_eval_loss):
            job.best_loss, job.best_eval_loss = objective
            self._export(job, BEST)
        self._settle(job)

    def _settle(self, job: ResidentJob) -> None:
        """After a step and its evaluation: save when due, end when done, else lay out the next step."""
        job.phase = Phase.TRAINING
        if job.is_due(job.spec.save_every):
            self._save_in_turn(job)
        self._go_on(job)

    def _save_in_turn(self, job: ResidentJob) -> None:
        if job.is_done or not self._is_behind(job):
            self._save(job)

    def _is_behind(self, job: ResidentJob) -> bool:
        return job.is_behind()

    def _go_on(self, job: ResidentJob) -> None:
        if job.is_done:
            self._export(job, "")
            self._leave(job, State.FINISHED, "")
        else:
            job.begin(Phase.TRAINING, time.perf_counter())

    def _no_longer_finite(self, job: ResidentJob, what: str) -> JobError:
        """Save the job while its weights are still good, and say where it stopped."""
        trouble = ""
        try:
            self._save(job)
            job.settle_files(most=0)
        except (TloraError, OSError) as error:
            trouble = f" ({error})"
        kept = f"step {read_meta(job.spec.folder)['step']}" if (job.spec.folder / STATE).exists() else "none"
        return JobError(f"{what}; stopped at its last good checkpoint, {kept}{trouble}")

    def _save(self, job: ResidentJob) -> None:
        self._save_state(job, job.state)

    def _save_state(self, job: ResidentJob, state: AdapterState) -> None:
        if not state.is_finite:
            raise JobError(f"its weights are no longer finite at step {job.step}")
        meta, began_s = describe(job, self.supermodel), time.monotonic()

        def write(state: AdapterState) -> None:
            save_state(job.spec.folder, state.tensors(), meta)
            job.save_s = time.monotonic() - began_s

        self._write(job, state, write)

    def _new_state(self, spec: JobSpec) -> AdapterState:
        model = self.supermodel
        layout = model.outline.lay_out(spec.adapter)
        return AdapterState(layout, spec.adapter, seed=spec.seed, device=model.device, dtype=model.dtype)

    def _open(self, job: ResidentJob, resume: bool) -> str | None:
        """Hold the job's folder and load what it has; returns the tracking run's id."""
        for left in job.folder.open(self.options.mark):
            log.warning("job=%s removed %s, left half-written.", job.name, left)
        run_id = restore(job, self.supermodel, resume=resume)
        with atomic_path(job.spec.folder / "job.yaml") as path:
            path.write_text(yaml.safe_dump(job.spec.model_dump(mode="json"), sort_keys=False))
        return run_id

    def _new_tracker(self, job: ResidentJob, run_id: str | None) -> Tracker:
        evaluating = job.phase is Phase.EVALUATING
        return Tracker(job.spec, job.spec.folder, step=job.step, evaluating=evaluating, run_id=run_id)

    def _write(self, job: ResidentJob, state: AdapterState, write: Callable[[AdapterState], None]) -> None:
        """Have a file written of a state of the job, as it is now."""
        if self._writer.is_beside and state is job.state:
            with suppress(torch.OutOfMemoryError):  # without room for a copy, the write is waited for
                state = state.frozen()
        job.files.append(self._writer.submit(partial(write, state), after=job.files))
        job.settle_files(most=0 if state is job.state else None)

    def _export(self, job: ResidentJob, part: str) -> None:
        self._write_adapter(job, job.state, part)

    def _write_adapter(self, job: ResidentJob, state: AdapterState, part: str) -> None:
        folder, linears = job.spec.folder / part, self.supermodel.outline.linears  # a unit may lose its base meanwhile
        trained = job.spec.optim.lr > 0.0 and job.step > 1
        if part:  # one of many: no copy is made while too many wait
            job.settle_files(most=IN_FLIGHT)

        def write(state: AdapterState) -> None:
            export_peft(state, folder, job.spec.base, linears, trained=trained)
            if job.tokenizer is not None:
                save_tokenizer(job.tokenizer, folder)

        self._write(job, state, write)

    def _guard(self, job: ResidentJob, action: Callable[[], None]) -> None:
        """What goes wrong for one job ends that job, with its reason; the others go on."""
        try:
            action()
        except _FAULTS as error:
            self._log_failure(job, error)
            self._leave(job, State.FAILED, str(error))

    def _log_failure(self, job: ResidentJob, error: Exception) -> None:
        others = sum(other is not job for other in self.jobs.values())
        log.error("job=%s failed: %s. The other %d jobs go on.", job.name, str(error).rstrip("."), others)

    def _leave(self, job: ResidentJob, state: State, reason: str) -> None:
        self.supermodel.remove(job.slot)
        del self.jobs[job.name]
        self.leaving[job.name] = job
        self._closings[job.name] = self._writer.submit(partial(self._close, job, state, reason), after=job.files)

    def _close(self, job: ResidentJob, state: State, reason: str) -> tuple[State, str]:
        """After all else that is written of a job, so that its end is known now."""
        try:
            job.settle_files(most=0)
        except _FAULTS as error:
            if state is not State.FAILED:
                self._log_failure(job, error)
                state, reason = State.FAILED, str(error)
        job.state.park()
        assert job.tracker is not None
        job.tracker.close(failed=state is State.FAILED)
        job.folder.close()
        return state, reason

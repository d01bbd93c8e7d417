"""THE MAIN PATH: attach jobs, tick, step each job on its own clock, save, detach.

A *tick* is one forward and backward of this worker over at most its token budget, filled from all resident jobs. A
*step* is one optimizer step of one job, taken when the sequences of that job's own batch are all through. What a job
computes depends on its own seed and step alone; what is dealt beside it decides only when.
"""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import yaml
from safetensors import SafetensorError

from tlora import environment, nanobatch
from tlora.adapter import AdapterState, export_peft
from tlora.checkpoint import BEST, STATE, JobFolder, load_job_state, read_meta, save_state, save_tokenizer
from tlora.data import JobData
from tlora.dealing import Claim, deal
from tlora.errors import CheckpointError, JobError, StateError, TloraError
from tlora.files import atomic_path
from tlora.job import JobRecord, State
from tlora.kernels.adamw import adamw
from tlora.kernels.tiles import Update
from tlora.optim import update_of
from tlora.packing import Item, pack, rows_of
from tlora.resident import Phase, ResidentJob, longest_rows
from tlora.spec import JobSpec, differences, parse_job
from tlora.supermodel import SuperModel
from tlora.tracking import Tracker

log = logging.getLogger("tlora")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How a worker ticks. None of it changes what any job computes."""

    token_budget: int = 0
    """Most rows in a tick; 0: 16384 on a GPU, 2048 on a CPU."""
    nano_batches: int = 1
    """Slices of a tick."""
    round_to: int = 1
    """Each slice is filled to a multiple of this many rows, which belong to nobody."""

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
        self._folders: dict[str, JobFolder] = {}
        self._trackers: dict[str, Tracker] = {}
        self._ended: list[ResidentJob] = []
        self._turn = 0
        self._phase = Phase.EVALUATING

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
        damaged or another job's, its targets match nothing, its longest sequence is longer than a tick.
        """
        if spec.name in self.jobs:
            raise StateError(f"job {spec.name} is resident already; want another name.")
        state = AdapterState(
            self.supermodel.outline.lay_out(spec.adapter),
            spec.adapter,
            seed=spec.seed,
            device=self.supermodel.device,
            dtype=self.supermodel.dtype,
        )
        record = record or JobRecord(spec.name)
        job = ResidentJob(spec, data, state, record, tokenizer, per_sequence=self.supermodel.deterministic)
        longest = longest_rows(data, self.supermodel.deterministic)
        if longest > self.token_budget:
            raise JobError(
                f"job {spec.name}: its longest sequence takes {longest} rows; want at most the token budget, "
                f"{self.token_budget}. Lower data.max_length or raise the budget."
            )
        folder = JobFolder(spec.folder)
        for left in folder.open():
            log.warning("job %s: removed %s, left half-written.", spec.name, left)
        try:
            run_id = self._restore(job, folder, resume)
            with atomic_path(spec.folder / "job.yaml") as path:
                path.write_text(yaml.safe_dump(spec.model_dump(mode="json"), sort_keys=False))
            record.to(State.ATTACHING)
        except BaseException:
            folder.close()
            raise
        job.slot = self.supermodel.place(state)
        self.jobs[spec.name], self._folders[spec.name] = job, folder
        evaluating = job.phase is Phase.EVALUATING
        self._trackers[spec.name] = Tracker(spec, spec.folder, step=job.step, evaluating=evaluating, run_id=run_id)
        record.to(State.RUNNING)
        begin = self._evaluate_or_settle if evaluating else self._go_on
        self._guard(job, partial(begin, job))
        return job

    def detach(self, name: str, *, state: State = State.PAUSED, reason: str = "", keep: bool = True) -> ResidentJob:
        """Take a job out between ticks; with `keep`, its exact state is saved first, without the step in flight.

        After a tick that was broken off, a job amid its optimizer step keeps the state that was saved before."""
        job = self.jobs[name]
        if keep and job.is_settled:
            self._guard(job, partial(self._save, job))
        if name in self.jobs:
            self._leave(job, state, reason)
        self._ended.remove(job)
        return job

    def tick(self) -> Tick:
        """One forward and backward (or evaluation) over sequences of all residents, then the steps it completes."""
        began_s = time.perf_counter()
        with self.supermodel.threads():
            phase, dealt = self._deal()
            slots = {item.slot for item in dealt}
            ranks = tuple(job.spec.adapter.rank for job in self.jobs.values() if job.slot in slots)
            for items in nanobatch.cut(dealt, self.options.nano_batches, self._work):
                self._send(items, phase)
            through = [job for job in self.jobs.values() if job.phase is phase and job.is_through and dealt]
            if phase is Phase.TRAINING:
                self._step(through)
            else:
                self._finish_evaluation(through)
        tokens = sum(len(item.sequence) for item in dealt)
        return Tick(phase, tokens, time.perf_counter() - began_s, self.take_ended(), ranks)

    def take_ended(self) -> tuple[ResidentJob, ...]:
        """Jobs that have left since this was last asked: in a tick, or as they came, if nothing was left to be done."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def save(self, name: str) -> None:
        """Save a settled resident's exact state, between ticks and beside its own cadence."""
        job = self.jobs[name]
        assert job.is_settled
        self._guard(job, partial(self._save, job))

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
        jobs = sorted((job for job in self.jobs.values() if job.phase is self._phase), key=lambda job: job.slot)
        claims = [Claim(job.share, job.pending_rows, job.step_rows, job.credit) for job in jobs]
        self._turn += 1
        items: list[Item] = []
        for job, claim, count in zip(jobs, claims, deal(claims, self.token_budget, self._turn), strict=True):
            job.credit = claim.credit
            items += job.take(count)
        return self._phase, items

    def _work(self, item: Item) -> float:
        """Rank-weighted work of a sequence, for an even cut."""
        layout = self.supermodel.residents[item.slot].layout
        return len(item.sequence) * (self.supermodel.outline.num_parameters + layout.num_parameters)

    def _send(self, items: list[Item], phase: Phase) -> None:
        training = phase is Phase.TRAINING
        num_rows = sum(rows_of(item.sequence, self.supermodel.deterministic) for item in items)
        batch = pack(
            items,
            device=self.supermodel.device,
            per_sequence=self.supermodel.deterministic,
            training=training,
            round_to=math.lcm(self.options.round_to, self.supermodel.row_multiple(num_rows)),
        )
        losses = self.supermodel.train(batch) if training else self.supermodel.evaluate(batch)
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
        norms = adamw(list(updates.values()))
        losses = torch.stack([update.loss for update in updates.values()])
        values = torch.stack([losses.double(), norms.double()], dim=1).tolist()
        for job, (loss, norm) in zip(stepped, values, strict=True):
            self._guard(job, partial(self._after_step, job, loss, norm))

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
        self._trackers[job.name].write(
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
        losses = torch.stack([job.summed_loss().double() for job in jobs]).tolist() if jobs else []
        for job, loss in zip(jobs, losses, strict=True):
            self._guard(job, partial(self._after_evaluation, job, loss))

    def _after_evaluation(self, job: ResidentJob, loss: float) -> None:
        job.eval_loss = loss
        if not math.isfinite(loss):
            raise self._no_longer_finite(job, f"evaluation loss became {loss} at step {job.step}")
        self._trackers[job.name].write({"step": job.step, "epoch": job.epoch, "eval_loss": loss})
        if loss < job.best_loss:
            job.best_loss = loss
            self._export(job, BEST)
        self._settle(job)

    def _settle(self, job: ResidentJob) -> None:
        """After a step and its evaluation: save when due, end when done, else lay out the next step."""
        job.phase = Phase.TRAINING
        if job.is_due(job.spec.save_every):
            self._save(job)
        self._go_on(job)

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
        except (TloraError, OSError) as error:
            trouble = f" ({error})"
        kept = f"step {read_meta(job.spec.folder)['step']}" if (job.spec.folder / STATE).exists() else "none"
        return JobError(f"{what}; stopped at its last good checkpoint, {kept}{trouble}")

    def _save(self, job: ResidentJob) -> None:
        if not torch.isfinite(job.state.master).all():
            raise JobError(f"its weights are no longer finite at step {job.step}")
        meta = {
            "spec": job.spec.model_dump(mode="json"),
            "step": job.step,
            "num_steps": job.num_steps,
            "tokens": job.tokens,
            "evaluating": job.phase is Phase.EVALUATING,
            "best_loss": job.best_loss,
            "data": job.digest,
            "dtype": str(self.supermodel.dtype),
            "base": self.supermodel.fingerprint,
            "run_id": self._trackers[job.name].run_id,
            "environment": environment.describe(),
        }
        save_state(job.spec.folder, job.state.tensors(), meta)

    def _restore(self, job: ResidentJob, folder: JobFolder, resume: bool) -> str | None:
        """Load what the folder holds; returns its tracking run id."""
        if not folder.has_state:
            if job.spec.adapter.init_from is not None:
                job.state.load_peft(job.spec.adapter.init_from)
            return None
        if not resume:
            raise StateError(f"{folder.path} holds a saved state already. Resume it, or choose another output.")
        tensors, meta = load_job_state(folder.path)
        changed = differences(parse_job(meta["spec"]), job.spec)
        if changed:
            raise CheckpointError(
                f"{folder.path} was saved with other settings: {'; '.join(changed)}. Put them back, or remove the "
                "folder to train anew."
            )
        for what, saved, mine in (
            ("data", meta["data"], job.digest),
            ("base precision", meta["dtype"], str(self.supermodel.dtype)),
            ("base", meta["base"], self.supermodel.fingerprint),
        ):
            if saved != mine:
                raise CheckpointError(f"its {what} changed since it was saved: {saved} was, {mine} is.")
        job.state.load(tensors)
        job.step, job.tokens = meta["step"], meta["tokens"]
        job.best_loss = meta["best_loss"]
        job.phase = Phase.EVALUATING if meta["evaluating"] else Phase.TRAINING
        return str(meta["run_id"])

    def _export(self, job: ResidentJob, part: str) -> None:
        folder, trained = job.spec.folder / part, job.spec.optim.lr > 0.0 and job.step > 1
        export_peft(job.state, folder, job.spec.base, self.supermodel.outline.linears, trained=trained)
        if job.tokenizer is not None:
            save_tokenizer(job.tokenizer, folder)

    def _guard(self, job: ResidentJob, action: Callable[[], None]) -> None:
        """What goes wrong for one job ends that job, with its reason; the others go on."""
        try:
            action()
        except (TloraError, OSError, SafetensorError, ArithmeticError, RuntimeError) as error:
            others = len(self.jobs) - 1
            log.error("job %s: %s. The other %d jobs go on.", job.name, str(error).rstrip("."), others)
            self._leave(job, State.FAILED, str(error))

    def _leave(self, job: ResidentJob, state: State, reason: str) -> None:
        self.supermodel.remove(job.slot)
        job.state.park()
        del self.jobs[job.name]
        self._trackers.pop(job.name).close(failed=state is State.FAILED)
        self._folders.pop(job.name).close()
        job.record.to(state, reason)
        self._ended.append(job)

"""A sweep on this machine: several candidates resident at once in shared ticks, ended early, their places filled.

Called by `tlora sweep`. What ends a candidate is decided by `tlora.sweep`, what is drawn by `tlora.sweep_spec`, what is
reported by `tlora.sweep_report`. Each candidate is an ordinary job in a folder of its own, equal to alone.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tlora.base import Outline
from tlora.checkpoint import BEST, JobFolder
from tlora.data import JobData, load_tokenizer
from tlora.errors import SpecError, TloraError
from tlora.job import JobRecord, State
from tlora.local import Progress, RunOptions, Watch, read_data
from tlora.resident import Phase, ResidentJob, digest, longest_rows
from tlora.spec import DataSpec, JobSpec, override
from tlora.supermodel import SuperModel
from tlora.sweep import Curve, interval, samples_at
from tlora.sweep_report import write_results
from tlora.sweep_spec import SweepSpec, Values, as_number, configure, draw
from tlora.sweep_state import Candidate, Status, SweepState
from tlora.tracking import METRICS, read_metrics
from tlora.trainer import Tick, Trainer

log = logging.getLogger("tlora")
_SAVE_EVERY_S = 30.0
_NEVER = 10**9


def run_sweep(
    spec: SweepSpec,
    options: RunOptions | None = None,
    *,
    revive: Sequence[str] = (),
    fork: Sequence[str] = (),
    watch: Watch = lambda progress, tick: None,
    stopped: Callable[[], bool] = lambda: False,
) -> SweepState:
    """Run a sweep to its end, or until its budget is spent or `stopped` says so; then write what came out.

    With `options.resume` it goes on where it was, also after a kill: with `revive`, exits of these candidates are
    reversed, and no rule ends them again; `fork` gives one more candidate, the leader's configuration with changes
    (`dotted.key=value`), from the leader's best adapter. Raises TloraError for what is refused.
    """
    options = options or RunOptions()
    folder = JobFolder(spec.folder)
    for left in folder.open():
        log.warning("sweep %s: removed %s, left half-written.", spec.name, left)
    try:
        state = SweepState.load(spec.folder)
        if state is not None and not options.resume:
            raise SpecError(
                f"sweep {spec.name}: {spec.folder} holds a sweep already. Add --resume to go on with it, or choose "
                "another output."
            )
        if state is None and (revive or fork):
            raise SpecError(f"sweep {spec.name}: {spec.folder} holds no sweep yet; --revive and --fork need one.")
        sweep = SweepRun(spec, state or SweepState(spec=spec.model_dump(mode="json")), options, watch, stopped)
        if state is not None:
            state.refuse_changes(spec)
        sweep.change(revive, fork)
        sweep.run()
        return sweep.state
    finally:
        folder.close()


class SweepRun:
    """One sweep in this process, which holds its folder."""

    def __init__(
        self, spec: SweepSpec, state: SweepState, options: RunOptions, watch: Watch, stopped: Callable[[], bool]
    ):
        self.spec, self.state, self.options = spec, state, options
        self._watch, self._stopped = watch, stopped
        self._base = spec.candidate(0, configure(spec.space, dict.fromkeys(spec.space, 0.0))).base
        self._outline, self._tokenizer = Outline.load(self._base), load_tokenizer(self._base)
        self._supermodel: SuperModel | None = None
        self._read: dict[tuple[DataSpec, int | None], JobData] = {}
        self._progress: dict[str, Progress] = {}
        self._looked_at: dict[str, int] = {}
        """The step of the last evaluation of a resident that the rules have seen."""
        self._counted_s = self._saved_s = time.monotonic()

    def change(self, revive: Sequence[str], fork: Sequence[str]) -> None:
        """Reverse exits, and fork the leader."""
        for name in revive:
            one = self.state[name]
            if one.status is not Status.EXITED:
                raise SpecError(f"candidate {name} is {one.status}; want one that has exited, to revive it.")
            one.status, one.reason, one.is_exempt, one.exited_at = Status.QUEUED, "", True, None
        if fork:
            leader = self.state.leader
            if leader is None:
                raise SpecError(f"sweep {self.spec.name}: no candidate leads yet, so there is none to fork.")
            start = str(self._spec_of(leader).folder / BEST)
            self._add([{**leader.values, **_changes(fork), "adapter.init_from": start}], is_fork=True)

    def run(self) -> None:
        """Until all candidates have ended, the budget is spent, or it is stopped."""
        self._counted_s = time.monotonic()
        while not self.state.stopped:
            if not any(one.status.is_open for one in self.state.candidates):
                known = [one.values for one in self.state.drawn]
                drawn = draw(self.spec, known, self.state.results)
                if not drawn:
                    break
                self._add(drawn)
            self._train()
        self.state.explain_exits(self.spec.early_exit.halving)
        self._save()
        write_results(self.spec, self.state, {one.name: self._curve(one) for one in self.state.candidates})

    def _add(self, wave: Sequence[Values], *, is_fork: bool = False) -> None:
        """Take candidates in, once all that can be known of them before training is known."""
        first = len(self.state.candidates)
        jobs = [self._prepare(number, values) for number, values in enumerate(wave, first)]
        totals = [
            samples_at(ResidentJob.count_steps(job, len(data.train)), len(data.train), job.batch_size)
            for job, data in jobs
        ]
        if not self.state.every:
            rules = self.spec.early_exit
            self.state.longest = max(totals)
            sizes = [job.batch_size for job, _ in jobs]
            self.state.every = interval(self.state.longest, rules.evaluations, sizes)
            self.state.num_validation = len(jobs[0][1].eval)
            if rules.halving is not None:
                self.state.rungs = rules.halving.rungs(self.state.longest, self.state.every)
        for number, values, (job, _), total in zip(range(first, first + len(wave)), wave, jobs, totals, strict=True):
            self.state.candidates.append(
                Candidate(
                    number=number,
                    name=job.name,
                    values=values,
                    num_siblings=first + len(wave),
                    total=total,
                    eval_every=math.ceil(self.state.every / job.batch_size),
                    is_fork=is_fork,
                )
            )
        self._save()

    def _prepare(self, number: int, values: Values) -> tuple[JobSpec, JobData]:
        """Raises TloraError."""
        spec = self.spec.candidate(number, values)
        self._outline.lay_out(spec.adapter)
        data = self._data(spec)
        first = next(iter(self._read.values()))
        if digest(replace(data, train=[])) != digest(replace(first, train=[])):
            shown = ", ".join(f"{key} = {value}" for key, value in values.items())
            raise SpecError(
                f"candidate {spec.name} ({shown}): its validation rows are not those of the others, so losses do not "
                "compare. Name them by data.eval_path, and leave fields out of the space that change their tokens."
            )
        return spec, data

    def _data(self, spec: JobSpec) -> JobData:
        """A candidate's sequences, read and tokenised once for all that share them."""
        key = spec.data, spec.seed if spec.data.eval_fraction else None
        if key not in self._read:
            self._read[key] = read_data(spec, self._outline, self._tokenizer)
        return self._read[key]

    def _spec_of(self, one: Candidate) -> JobSpec:
        save_every = one.eval_every * self.spec.save_every_evaluations or _NEVER
        return self.spec.candidate(one.number, one.values, eval_every=one.eval_every, save_every=save_every)

    def _curve(self, one: Candidate) -> Curve:
        spec = self._spec_of(one)
        rows = read_metrics(spec.folder) if (spec.folder / METRICS).exists() else []
        data = self._data(spec)
        return Curve.of(rows, len(data.train), spec.batch_size, len(data.eval))

    def _train(self) -> None:
        """Until nobody is resident and nobody can join, all files written."""
        if self._supermodel is None:
            self._supermodel = SuperModel.load(
                self._base,
                device=self.options.device,
                deterministic=self.options.deterministic,
                checkpointing=self.options.checkpointing,
            )
        open_ones = [self._spec_of(one) for one in self.state.candidates if one.status.is_open]
        longest = max(longest_rows(self._data(spec), self.options.deterministic) for spec in open_ones)
        budget = self.options.trainer.budget_on(self._supermodel.device, longest)
        trainer = Trainer(self._supermodel, replace(self.options.trainer, token_budget=budget, writes_beside=True))
        try:
            self._settle(trainer)
            self._show(None)
            while trainer.jobs and not self._is_over(trainer):
                tick = trainer.tick()
                self._note(tick.ended)
                self._settle(trainer)
                self._show(tick)
        finally:  # stopped, or an error that no candidate is to blame for: nothing that was learnt is lost
            residents = list(trainer.jobs.values())
            trainer.close()
            self._note(job for job in trainer.take_ended() if job.record.state is not State.PAUSED)
            for job in residents:
                self._measure(self.state[job.name], job.step)
            self._judge(trainer)
            self._save()

    def _is_over(self, trainer: Trainer) -> bool:
        """Whether the sweep is to stop amid its candidates, and says why."""
        budget, now_s = self.spec.budget, time.monotonic()
        self.state.spent_s, self._counted_s = self.state.spent_s + now_s - self._counted_s, now_s
        if now_s - self._saved_s > _SAVE_EVERY_S:
            self._save()
        on_gpu = trainer.supermodel.device.type == "cuda"
        samples = self.state.samples
        for job in trainer.jobs.values():
            samples += samples_at(job.step, len(job.data.train), job.spec.batch_size) - self.state[job.name].samples
        if self._stopped():
            self.state.stopped = "it was stopped"
        elif budget.samples and samples >= budget.samples:
            self.state.stopped = f"budget.samples = {budget.samples} is spent"
        elif budget.wall_s and self.state.spent_s >= budget.wall_s:
            self.state.stopped = f"budget.wall_s = {budget.wall_s:g} is spent"
        elif budget.gpu_hours and on_gpu and self.state.spent_s >= 3600 * budget.gpu_hours:
            self.state.stopped = f"budget.gpu_hours = {budget.gpu_hours:g} is spent"
        return bool(self.state.stopped)

    def _settle(self, trainer: Trainer) -> None:
        """Between ticks: judge who has been evaluated, take out who is to end or to wait, fill the places."""
        while True:
            changed = self._fill(trainer)
            for job in list(trainer.jobs.values()):
                one = self.state[job.name]
                if self._is_fresh(job, one):
                    self._looked_at[one.name], changed = job.step, True
                    curve = self._measure(one, job.step)
                    if not one.is_exempt and (reason := self.spec.early_exit.judge_alone(curve)):
                        self._exit(trainer, one, reason)
            changed |= self._judge(trainer)
            for job in list(trainer.jobs.values()):
                one = self.state[job.name]
                if one.is_due:
                    self._pause(trainer, one, Status.WAITING, f"waits for its siblings at {one.samples} samples")
                    changed = True
            if not changed:
                return
            self._save()

    def _is_fresh(self, job: ResidentJob, one: Candidate) -> bool:
        """Whether a resident stands right after an evaluation that the rules have not seen."""
        is_evaluated = job.step > 0 and job.step % one.eval_every == 0 and job.phase is Phase.TRAINING
        return is_evaluated and self._looked_at.get(one.name) != job.step

    def _fill(self, trainer: Trainer) -> bool:
        """Attach who is queued, as far as there are places: those first who are at the lowest rung, for others may wait
        for them. Returns whether anybody was."""
        queued = [one for one in self.state.candidates if one.status is Status.QUEUED and one.name not in trainer.jobs]
        queued.sort(key=lambda one: (one.passed, one.number))
        joining = [one for one in queued if one.name not in trainer.leaving][: self.spec.places - len(trainer.jobs)]
        for one in joining:
            seen = self._seen(one)
            try:
                spec = seen.spec
                seen.resident = trainer.attach(
                    spec, self._data(spec), resume=True, record=seen.record, tokenizer=self._tokenizer
                )
            except (TloraError, OSError) as error:
                one.status, one.reason = Status.FAILED, str(error).removeprefix(f"job {one.name}: ")
                seen.record.to(State.FAILED, one.reason)
                log.error("candidate %s: %s", one.name, one.reason)
        return bool(joining)

    def _measure(self, one: Candidate, step: int) -> Curve:
        """Bring a candidate's record up to its metrics."""
        curve, spec = self._curve(one), self._spec_of(one)
        one.step = step
        self.state.measure(one, curve, samples_at(step, len(self._data(spec).train), spec.batch_size))
        return curve

    def _judge(self, trainer: Trainer) -> bool:
        """Give all verdicts that can be given at rungs; returns whether there was one."""
        judged = self.state.judge(self.spec.early_exit.halving)
        for one in judged:
            if one.status is Status.EXITED:
                self._exit(trainer, one, one.reason)
        return bool(judged)

    def _exit(self, trainer: Trainer, one: Candidate, reason: str) -> None:
        log.info("candidate %s exits: %s", one.name, reason)
        self._pause(trainer, one, Status.EXITED, reason)

    def _pause(self, trainer: Trainer, one: Candidate, status: Status, reason: str) -> None:
        """Take a candidate out, its exact state saved, if it is resident."""
        one.status, one.reason = status, reason
        if one.name in trainer.jobs:
            record = trainer.detach(one.name, reason=reason).record
            if record.state is State.FAILED:  # its state could not be saved
                one.status, one.reason = Status.FAILED, record.reason
        else:
            self._seen(one).record.reason = reason

    def _note(self, ended: Iterable[ResidentJob]) -> None:
        """Jobs that have left by themselves."""
        for job in ended:
            one = self.state[job.name]
            self._measure(one, job.step)
            one.status = Status.FINISHED if job.record.state is State.FINISHED else Status.FAILED
            one.reason = job.record.reason
            self._save()

    def _seen(self, one: Candidate) -> Progress:
        if one.name not in self._progress:
            self._progress[one.name] = Progress(self._spec_of(one), JobRecord(one.name))
        return self._progress[one.name]

    def _show(self, tick: Tick | None) -> None:
        self._watch(list(self._progress.values()), tick)

    def _save(self) -> None:
        self.state.save(self.spec.folder)
        self._saved_s = time.monotonic()


def _changes(texts: Sequence[str]) -> Values:
    """Overrides by dotted name. Raises SpecError."""
    changes: Values = {}
    for text in texts:
        nested: Values = {}
        override(nested, text)
        key = text.partition("=")[0].strip()
        value: Any = nested
        for part in key.split("."):
            value = value[part]
        changes[key] = as_number(value)
    return changes

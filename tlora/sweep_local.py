"""A sweep on this machine: several candidates resident at once in shared ticks of one trainer, their places refilled.

Called by `tlora sweep`; what happens to candidates is `tlora.sweep_run`'s to say.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tlora.checkpoint import JobFolder
from tlora.data import JobData, load_tokenizer
from tlora.errors import JobError, SpecError, TloraError
from tlora.halting import Halts, samples_of
from tlora.job import JobRecord, State
from tlora.local import Progress, RunOptions, Watch
from tlora.resident import ResidentJob, longest_rows
from tlora.spec import JobSpec
from tlora.supermodel import SuperModel
from tlora.sweep import Halt
from tlora.sweep_run import News, SweepRun
from tlora.sweep_spec import SweepSpec
from tlora.sweep_state import SweepState
from tlora.trainer import Trainer

log = logging.getLogger("tlora")
_IDLE_S = 0.005


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
        log.warning("sweep=%s removed %s, left half-written.", spec.name, left)
    try:
        state = SweepState.load(spec.folder)
        if state is not None and not options.resume:
            raise SpecError(
                f"sweep {spec.name}: {spec.folder} holds a sweep already. Add --resume to go on with it, or choose "
                "another output."
            )
        if state is None and (revive or fork):
            raise SpecError(f"sweep {spec.name}: {spec.folder} holds no sweep yet; --revive and --fork need one.")
        places = LocalPlaces(options, spec.places, watch)
        sweep = SweepRun(
            spec,
            state or SweepState(spec=spec.model_dump(mode="json")),
            places,
            lambda: "it was stopped" if stopped() else None,
        )
        if state is not None:
            state.take(spec)
        sweep.change(revive, fork)
        sweep.run()
        return sweep.state
    finally:
        folder.close()


class LocalPlaces:
    """One trainer in this process, made when the first candidate joins."""

    def __init__(self, options: RunOptions, most: int, watch: Watch = lambda progress, tick: None):
        self._options, self._most, self._watch = options, most, watch
        self._made: Trainer | None = None
        self._tokenizer: object = None
        self._halts = Halts()
        self._progress: dict[str, Progress] = {}
        self._asked_s = time.monotonic()
        self._lone_s, self._lone_samples = 0.0, 0
        self._most_rows = math.inf
        """Of a tick, since one ran out of memory."""

    def names(self) -> Sequence[str]:
        return [*self._made.jobs, *self._made.leaving] if self._made else []

    def room(self) -> int:
        return self._most - (len(self._made.jobs) if self._made else 0)

    def join(self, spec: JobSpec, data: JobData, halt: Halt | None) -> bool:
        trainer = self._trainer(spec, data)
        if spec.name not in trainer.jobs and not self._attach(trainer, spec, data):
            return False
        if halt is not None:
            self._halts.by_name[spec.name] = halt
        return True

    def _attach(self, trainer: Trainer, spec: JobSpec, data: JobData) -> bool:
        seen = self._progress.setdefault(spec.name, Progress(spec, JobRecord(spec.name)))
        failure: TloraError | OSError
        try:
            seen.resident = trainer.attach(spec, data, resume=True, record=seen.record, tokenizer=self._tokenizer)
            return True
        except torch.OutOfMemoryError as error:
            error.__traceback__ = None  # it holds what there was no room for
            failure = JobError(f"job {spec.name}: out of memory, though alone: {error}")
            if self.names():
                self._crowd(trainer, spec.name)
                return False
        except (TloraError, OSError) as error:
            failure = error
        seen.record.to(State.FAILED, str(failure).removeprefix(f"job {spec.name}: "))
        raise failure

    def _crowd(self, trainer: Trainer, name: str) -> None:
        """There is no room for this one beside the others: no more than these train at once from now on."""
        trainer.supermodel.free_memory()
        self._most = max(1, len(trainer.jobs))
        log.warning("job=%s waits for room: out of memory, so %d train at once from now on.", name, self._most)

    def leave(self, name: str, reason: str) -> News:
        if self._made and name in self._made.jobs:
            self._halts.drop(name)
            return _news(self._made.detach(name, reason=reason))
        if seen := self._progress.get(name):  # one that waited
            seen.record.reason = reason
        return News(name, State.PAUSED, 0, reason)

    def step(self) -> list[News]:
        trainer = self._made
        if trainer is None:
            return []
        if not (news := self._halting(trainer)):
            if trainer.jobs:
                alone, before = list(trainer.jobs), self.samples()
                try:
                    tick = trainer.tick()
                except torch.OutOfMemoryError as error:
                    error.__traceback__ = None
                    return self._shrink(trainer, str(error))
                ended = tick.ended
                if len(alone) == 1 and list(trainer.jobs) == alone and not ended:
                    self._lone_s += tick.seconds
                    self._lone_samples += self.samples() - before
                self._watch(list(self._progress.values()), tick)
            else:  # the last files of those that have ended are being written
                time.sleep(_IDLE_S)
                ended = trainer.take_ended()
            for job in ended:
                self._halts.drop(job.name)
            news = [*map(_news, ended), *self._halting(trainer)]
        return news

    def _shrink(self, trainer: Trainer, why: str) -> list[News]:
        """Half the token budget, and the steps in flight once more. Where the longest sequence has a tick to itself
        already, the largest job leaves until there is room; the last one fails."""
        trainer.supermodel.free_memory()
        for job in [job for job in trainer.jobs.values() if not job.is_settled]:  # amid its step: from its save
            self._halts.drop(trainer.detach(job.name, keep=False).name)
        trainer.replay()
        sizes = {name: (longest_rows(job.data, job.per_sequence), job.state.layout.size)
                 for name, job in trainer.jobs.items()}  # fmt: skip
        if not sizes:
            return []
        before, longest = trainer.token_budget, max(rows for rows, _ in sizes.values())
        self._most_rows = trainer.token_budget = max(before // 2, longest)
        if trainer.token_budget < before:
            log.warning("out of memory: ticks hold %d rows now.", trainer.token_budget)
            return []
        name = max(sizes, key=lambda name: sizes[name])
        self._halts.drop(name)
        job = trainer.detach(name)
        if trainer.jobs or job.record.state is State.FAILED:  # that is, its state could not be saved
            self._crowd(trainer, name)
            return [_news(job)] if job.record.state is State.FAILED else []
        text = f"out of memory in a tick of {before} rows, the length of its longest sequence"
        job.record.to(State.FAILED, f"{text}. Lower data.max_length. ({why})")
        return [_news(job)]

    def _halting(self, trainer: Trainer) -> list[News]:
        due = self._halts.due(trainer.jobs)
        return [News(name, State.PAUSED, trainer.jobs[name].step, reason) for name, reason in due.items()]

    def samples(self) -> int:
        residents = {**self._made.jobs, **self._made.leaving} if self._made else {}
        return sum(map(samples_of, residents.values()))

    def gpu_s(self) -> float:
        now_s = time.monotonic()
        seconds, self._asked_s = now_s - self._asked_s, now_s
        return seconds if self._made and self._made.supermodel.device.type == "cuda" else 0.0

    def lone(self) -> tuple[float, int]:
        found, self._lone_s, self._lone_samples = (self._lone_s, self._lone_samples), 0.0, 0
        return found

    def close(self) -> list[News]:
        if self._made is None:
            return []
        self._made.close()
        news = [_news(job) for job in self._made.take_ended()]
        self._made, self._halts = None, Halts()
        self._watch(list(self._progress.values()), None)
        return news

    def _trainer(self, spec: JobSpec, data: JobData) -> Trainer:
        """With room for this candidate's sequences."""
        options = self._options
        longest = longest_rows(data, options.deterministic)
        if self._made is None:
            supermodel = SuperModel.load(
                spec.base,
                device=options.device,
                deterministic=options.deterministic,
                checkpointing=options.checkpointing,
            )
            self._tokenizer = load_tokenizer(spec.base)
            self._made = Trainer(supermodel, replace(options.trainer, writes_beside=True))
            self._asked_s = time.monotonic()
        budget = options.trainer.budget_on(self._made.supermodel.device, longest)
        if self._most_rows < budget:  # more does not fit
            budget = int(self._most_rows) if options.trainer.token_budget else int(max(self._most_rows, longest))
        self._made.token_budget = max(self._made.token_budget, budget)
        return self._made


def _news(job: ResidentJob) -> News:
    return News(job.name, job.record.state, job.step, job.record.reason)

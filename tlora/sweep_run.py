"""A sweep from its first draw to its report: candidates taken in, ended early, let go on, wherever they are trained.

What ends a candidate is decided by `tlora.sweep`, what is drawn by `tlora.sweep_spec`, what is reported by
`tlora.sweep_report`. Where candidates train is a `Places`: this process (`tlora.sweep_local`) or a cluster
(`tlora.actors.sweeps`). Each candidate is an ordinary job in a folder of its own, equal to alone.
"""

import logging
import math
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tlora.base import Outline
from tlora.checkpoint import BEST, has_written_best
from tlora.data import JobData, load_tokenizer
from tlora.errors import ModelError, SpecError, TloraError
from tlora.files import replace_folder
from tlora.job import State
from tlora.local import data_key, read_data
from tlora.resident import ResidentJob, digest
from tlora.spec import JobSpec
from tlora.sweep import Curve, EarlyExit, Halt, interval, samples_at
from tlora.sweep_report import write_results
from tlora.sweep_spec import SweepSpec, Values, draw, forked
from tlora.sweep_state import Candidate, Status, SweepState
from tlora.tracking import METRICS, read_metrics

log = logging.getLogger("tlora")
_SAVE_EVERY_S = 30.0
_NEVER = 10**9


@dataclass(frozen=True, slots=True)
class News:
    """What became of a candidate that a place has."""

    name: str
    state: State
    """PAUSED: it halts, and waits to hear; RUNNING: its user has let it go on."""
    step: int
    reason: str = ""


class Places(Protocol):
    """Where candidates train."""

    def names(self) -> Sequence[str]:
        """Who trains, or halts and waits to hear."""

    def room(self) -> int:
        """How many more may join now."""

    def join(self, spec: JobSpec, data: JobData, halt: Halt | None) -> bool:
        """Take a candidate in, or let it go on, as far as `halt`, from its saved state if it has one. False: there is
        no room after all, until another has left. Raises ModelError if there is no base to train it on, another
        TloraError or OSError for what is the candidate's own."""

    def leave(self, name: str, reason: str) -> News:
        """Take out one that halts, its exact state saved; of one that is out already, tell the reason."""

    def step(self) -> list[News]:
        """Let them train for a while."""

    def samples(self) -> int:
        """Trained on by those who train, all in all."""

    def gpu_s(self) -> float:
        """Seconds of GPUs used since this was last asked."""

    def lone(self) -> tuple[float, int]:
        """Seconds and samples of candidates that trained with nobody beside them, since this was last asked; 0 where
        that is not known."""

    def close(self) -> list[News]:
        """Take everybody out, saved, all files written."""


class SweepRun:
    """One sweep, whose folder this process holds."""

    def __init__(
        self,
        spec: SweepSpec,
        state: SweepState,
        places: Places,
        stopped: Callable[[], str | None] = lambda: None,
        library: "AbstractContextManager[Any]" = nullcontext(),  # noqa: B008
    ):
        """`stopped`: why it is to stop, once it is. `library`: held while others' code is called that is not made for
        threads (data sets, models' files, drawings), where there are several sweeps in this process."""
        self.spec, self.state, self.places, self._stopped, self._library = spec, state, places, stopped, library
        base = spec.first.base
        with library:
            self._outline, self._tokenizer = Outline.load(base), load_tokenizer(base)
        self._read: dict[Hashable, JobData] = {}
        self._counted_s = self._saved_s = time.monotonic()

    def change(self, revive: Sequence[str], fork: Sequence[str], of: str = "") -> None:
        """Reverse exits and failures, and fork the leader, or who led when that was asked for. The fork starts from a
        copy of that one's best adapter as it is now, for it may yet find a better one."""
        for name in revive:
            if (status := self.state[name].status) not in (Status.EXITED, Status.FAILED):
                raise SpecError(f"candidate {name} is {status}; want one that has exited or failed, to revive it.")
        for name in revive:
            self.state[name].revive()
        if revive:
            self._save()
        if fork:
            leader = self.state[of] if of else self.state.leader
            if leader is None:
                raise SpecError(f"sweep {self.spec.name}: no candidate leads yet, so there is none to fork.")
            values, mine = forked(self.spec, leader.values, fork), self._spec_of(leader)
            self._data(mine)  # whose validation rows the fork's are to be
            start = self.spec.candidate(len(self.state.candidates), values).folder / "start"
            replace_folder(mine.folder / BEST, start)
            self._add([{**values, "adapter.init_from": str(start)}], of=leader)

    def run(self) -> None:
        """Until all candidates have ended, the budget is spent, or it is stopped; then write what came out."""
        self._counted_s = time.monotonic()
        try:
            self._note(self.places.step())  # of those whose user has let them go on meanwhile
            while not self.state.stopped:
                has_open = any(one.status.is_open for one in self.state.candidates)
                drawn = [] if has_open and self.spec.sampler.learns else self._draw()
                if drawn:
                    self._add(drawn)
                elif not has_open:
                    break
                self._train()
        finally:  # stopped, or an error that no candidate is to blame for: nothing that was learnt is lost
            self._note(self.places.close())
            for one in self.state.judge(self.spec.early_exit.halving):
                self._decide(one, is_here=False)
            self._save()
        self.state.explain_exits(self.spec.early_exit.halving)
        self._save()
        curves = {one.name: self._curve(one) for one in self.state.candidates}
        with self._library:
            write_results(self.spec, self.state, curves)

    def _draw(self) -> list[Values]:
        return draw(self.spec, [one.values for one in self.state.drawn], self.state.results)

    def _add(self, wave: Sequence[Values], *, of: Candidate | None = None) -> None:
        """Take candidates in, once all that can be known of them before training is known. `of`: whose fork it is."""
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
                    is_fork=of is not None,
                    start=self._start_of(of) if of else None,
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
        key = data_key(spec)
        if key not in self._read:
            with self._library:
                self._read[key] = read_data(spec, self._outline, self._tokenizer)
        return self._read[key]

    def _spec_of(self, one: Candidate) -> JobSpec:
        save_every = one.eval_every * self.spec.save_every_evaluations or _NEVER
        return self.spec.candidate(one.number, one.values, eval_every=one.eval_every, save_every=save_every)

    def _rules_of(self, one: Candidate) -> tuple[EarlyExit, float | None]:
        """With the start that its loss is not to rise above; none is known of who begins with its user's adapter."""
        rules = self.spec.early_exit
        if one.start is None and self._spec_of(one).adapter.init_from is not None:
            rules = rules.model_copy(update={"divergence": None})
        return rules, one.start

    def _start_of(self, leader: Candidate) -> float | None:
        """The loss of the base, for a fork: that of its leader's first batch, unless that one began with an adapter."""
        if leader.start is not None or self._spec_of(leader).adapter.init_from is not None:
            return leader.start
        return self._curve(leader).train[0][1]

    def _curve(self, one: Candidate) -> Curve:
        spec = self._spec_of(one)
        rows = read_metrics(spec.folder) if (spec.folder / METRICS).exists() else []
        data = self._data(spec)
        return Curve.of(rows, len(data.train), spec.batch_size, len(data.eval), spec.objective)

    def _train(self) -> None:
        """Until nobody trains and nobody can join."""
        if self._is_over():
            return
        self._settle([])
        while self.places.names() and not self._is_over():
            news = self.places.step()
            self._note(news)
            self._settle([self.state[one.name] for one in news if one.state is State.PAUSED])

    def _is_over(self) -> bool:
        """Whether the sweep is to stop amid its candidates, and says why."""
        state, budget, now_s = self.state, self.spec.budget, time.monotonic()
        state.spent_s, self._counted_s = state.spent_s + now_s - self._counted_s, now_s
        state.gpu_s += self.places.gpu_s()
        lone_s, lone_samples = self.places.lone()
        state.lone_s, state.lone_samples = state.lone_s + lone_s, state.lone_samples + lone_samples
        if now_s - self._saved_s > _SAVE_EVERY_S:
            self._save()
        away = state.samples - sum(state[name].samples for name in self.places.names())
        if reason := self._stopped():
            state.stopped = reason
        elif budget.samples and away + self.places.samples() >= budget.samples:
            state.stopped = f"budget.samples = {budget.samples} is spent"
        elif budget.wall_s and state.spent_s >= budget.wall_s:
            state.stopped = f"budget.wall_s = {budget.wall_s:g} is spent"
        elif budget.gpu_hours and state.gpu_s >= 3600 * budget.gpu_hours:
            state.stopped = f"budget.gpu_hours = {budget.gpu_hours:g} is spent"
        return bool(state.stopped)

    def _settle(self, halting: Sequence[Candidate]) -> None:
        """Judge those that halt at an evaluation: each goes on, waits for its siblings, or ends. Then fill places."""
        for one in halting:
            rules, start = self._rules_of(one)
            if not one.is_exempt and (found := rules.judge_alone(self._curve(one), start)):
                one.end(found)
        self._settle_rungs(halting)
        while self._fill():  # one that cannot join may decide for those that wait for it
            self._settle_rungs([])

    def _settle_rungs(self, halting: Sequence[Candidate]) -> None:
        judged = self.state.judge(self.spec.early_exit.halving)
        for one in dict.fromkeys((*(one.name for one in halting), *(one.name for one in judged))):
            self._decide(self.state[one], is_here=any(one == other.name for other in halting))
        if halting or judged:
            self._save()

    def _decide(self, one: Candidate, *, is_here: bool) -> None:
        """Carry out what was found of a candidate; `is_here`: its place waits to hear."""
        if one.is_due:
            one.status, one.reason = Status.WAITING, f"waits for its siblings at {one.samples} samples"
        if one.status is Status.EXITED:
            log.info("job=%s exits: %s", one.name, one.reason)
        if one.status is Status.QUEUED and is_here:
            self._join(one)
        elif is_here or one.status is Status.EXITED:
            left = self.places.leave(one.name, one.reason)
            if left.state is State.FAILED:  # its state could not be saved
                self._fail(one, left.reason)

    def _fail(self, one: Candidate, reason: str) -> None:
        one.status, one.reason = Status.FAILED, reason
        one.has_best = has_written_best(self._spec_of(one).folder, one.best_loss)

    def _fill(self) -> bool:
        """Let in who is queued, as far as there is room: those at the lowest rung first, for others may wait for
        them. Returns whether one has failed to."""
        here = set(self.places.names())
        queued = [one for one in self.state.candidates if one.status is Status.QUEUED and one.name not in here]
        queued.sort(key=lambda one: (one.passed, one.number))
        joined = [self._join(one) for one in queued[: self.places.room()]]
        return not all(joined)

    def _join(self, one: Candidate) -> bool:
        """False: it has failed. What no candidate is to blame for (its base, or data that were read before, are away)
        ends the sweep here, which goes on with its resume."""
        spec, rungs = self._spec_of(one), self.state.rungs
        data = self._data(spec)
        halt = None
        if not one.is_exempt:
            until = rungs[one.passed] if one.is_ranked and one.passed < len(rungs) else 0
            rules, start = self._rules_of(one)
            halt = Halt(until=until, rules=rules, start=start)
        try:
            self.places.join(spec, data, halt)
        except ModelError:
            raise
        except (TloraError, OSError) as error:
            self._fail(one, str(error).removeprefix(f"job {one.name}: "))
            log.error("job=%s failed: %s", one.name, one.reason)
            return False
        return True

    def _note(self, news: Iterable[News]) -> None:
        """What became of candidates, and what they have measured."""
        for told in news:
            one, spec = self.state[told.name], self._spec_of(self.state[told.name])
            one.step = told.step
            samples = samples_at(told.step, len(self._data(spec).train), spec.batch_size)
            self.state.measure(one, self._curve(one), samples)
            if told.state is State.RUNNING:
                one.revive()
            elif told.state is not State.PAUSED:
                one.status, one.reason = Status.FINISHED, told.reason
                if told.state is not State.FINISHED:
                    self._fail(one, told.reason)
                self._save()

    def _save(self) -> None:
        self.state.save(self.spec.folder)
        self._saved_s = time.monotonic()

"""Training on one machine, in one process: check jobs, group them by base, run each group's super-model to its end.

Called by `tlora check`, `preview` and `train`; the trainer knows nothing of files of jobs, models by name or Ctrl-C.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from tlora.adapter import AdapterLayout, AdapterState
from tlora.base import Outline, default_device, dtype_of, refuse_without_weights
from tlora.capacity import Capacity
from tlora.checkpoint import JobFolder, has_finished
from tlora.data import JobData, load_data, load_tokenizer
from tlora.errors import DataError, JobError, ModelError, SpecError, TloraError
from tlora.job import JobRecord, State
from tlora.memory import Estimate, estimate
from tlora.planner import Choice, EstimatedCosts, Machine, choose
from tlora.resident import ResidentJob, longest_rows
from tlora.spec import BaseSpec, DataSpec, JobSpec, refuse_clashes
from tlora.supermodel import SuperModel
from tlora.trainer import Tick, Trainer, TrainerOptions

log = logging.getLogger("tlora")


@dataclass(frozen=True, slots=True)
class ReadyJob:
    """A job of which everything that can be known before training is known, and good."""

    spec: JobSpec
    data: JobData
    layout: AdapterLayout
    matched: dict[str, int]
    """Modules by target pattern."""
    num_steps: int
    estimate: Estimate


@dataclass(slots=True)
class Progress:
    """What a watcher sees between ticks. `resident` is set once the job has been attached."""

    spec: JobSpec
    record: JobRecord
    resident: ResidentJob | None = None


Watch = Callable[[Sequence[Progress], Tick | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How jobs are run on this machine."""

    resume: bool = False
    deterministic: bool = False
    checkpointing: bool = False
    device: str | None = None
    trainer: TrainerOptions = field(default_factory=TrainerOptions)


def prepare(specs: Sequence[JobSpec], options: RunOptions | None = None) -> list[ReadyJob]:
    """Validate every job: model, targets, data, memory. Raises one SpecError that lists the faults of all of them."""
    options = options or RunOptions()
    refuse_clashes(specs)
    ready: list[ReadyJob] = []
    faults: list[str] = []
    for base, members in by_base(specs).items():
        try:
            outline, tokenizer = Outline.load(base), load_tokenizer(base)
            refuse_without_weights(base)
        except TloraError as error:
            faults += [f"job {spec.name}: {error}" for spec in members]
            continue
        for spec in members:
            try:
                ready.append(_prepare(spec, outline, tokenizer, options))
            except DataError as error:
                faults.append(str(error))
            except TloraError as error:
                faults.append(f"job {spec.name}: {error}")
    if faults:
        raise SpecError("\n".join(faults))
    return ready


def read_data(spec: JobSpec, outline: Outline, tokenizer: Any) -> JobData:
    """A job's sequences for its base. Raises DataError."""
    return load_data(
        spec.data,
        tokenizer,
        seed=spec.seed,
        vocab_size=outline.vocab_size,
        max_positions=outline.max_positions,
        where=f"job {spec.name}",
    )


def data_key(spec: JobSpec) -> Hashable:
    """Jobs of one base that agree in it have the same sequences, as long as the files are the same."""
    return spec.data, spec.seed if spec.data.eval_fraction else None


class Library:
    """Sequences of jobs on one base: read and tokenised once for those that share them, as long as one has them."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[Hashable, JobData] = WeakValueDictionary()

    def read(self, spec: JobSpec, outline: Outline, tokenizer: Any) -> JobData:
        """`read_data`, unless a job has them; files that have changed since are read anew."""
        key = data_key(spec), _stamps(spec.data)
        data = self._held.get(key)
        if data is None:
            data = self._held[key] = read_data(spec, outline, tokenizer)
        return data


def _stamps(spec: DataSpec) -> tuple[Hashable, ...]:
    """When the local files that a job's rows come from were last changed."""
    paths = [Path(text) for text in (spec.path, spec.eval_path) if text]
    files = sorted(file for path in paths for file in (path, *(path.rglob("*") if path.is_dir() else ())))
    return tuple((str(file), file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.exists())


def _prepare(spec: JobSpec, outline: Outline, tokenizer: Any, options: RunOptions) -> ReadyJob:
    layout = outline.lay_out(spec.adapter)
    data = read_data(spec, outline, tokenizer)
    longest = longest_rows(data, options.deterministic)
    asked = options.trainer.token_budget
    if asked and longest > asked:
        raise JobError(f"its longest sequence takes {longest} rows; a tick holds {asked}. Raise --tokens.")
    device = torch.device(options.device) if options.device else default_device()
    rows = options.trainer.budget_on(device, longest)
    needs = estimate(outline, layout, rows, dtype_of(spec.base, device), checkpointing=options.checkpointing)
    goes_on = options.resume and JobFolder(spec.folder).has_state
    if spec.adapter.init_from is not None and not goes_on:
        AdapterState(layout, spec.adapter, seed=0, device=torch.device("cpu"), dtype=torch.float32).load_peft(
            spec.adapter.init_from
        )
    num_steps = ResidentJob.count_steps(spec, len(data.train))
    return ReadyJob(spec, data, layout, outline.match(spec.adapter), num_steps, needs)


def plan_groups(
    jobs: Sequence[ReadyJob],
    options: RunOptions,
    gpus: int,
    per_node: int,
    memory_gib: float,
    capacity: Capacity | None = None,
) -> dict[BaseSpec, list[Choice]]:
    """How so many GPUs would hold each base with its jobs, the plan to take first; by measured ticks, where `capacity`
    has the base."""
    device = torch.device(options.device) if options.device else default_device()
    memory = int(memory_gib * 2**30)
    if not memory and device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    machine = Machine(gpus=gpus, per_node=per_node, **({"memory_bytes": memory} if memory else {}))
    groups = {}
    for base, specs in by_base([job.spec for job in jobs]).items():
        members, outline = [job for job in jobs if job.spec in specs], Outline.load(base)
        longest = max(longest_rows(job.data, options.deterministic) for job in members)
        measured = capacity.models.get(base.model) if capacity else None
        costs = EstimatedCosts(
            outline=outline,
            layouts=[job.layout for job in members],
            machine=machine,
            rows=options.trainer.budget_on(torch.device("cuda"), longest),
            dtype=dtype_of(base, torch.device("cuda")),
            checkpointing=options.checkpointing,
            tick_s=partial(measured.tick_s, checkpointing=options.checkpointing) if measured else None,
        )
        groups[base] = choose(costs, machine, divisor=outline.divisor)
    return groups


def by_base(specs: Sequence[JobSpec]) -> dict[BaseSpec, list[JobSpec]]:
    """Jobs that may share a super-model, in the order given."""
    groups: dict[BaseSpec, list[JobSpec]] = {}
    for spec in specs:
        groups.setdefault(spec.base, []).append(spec)
    return groups


def train(
    jobs: Sequence[ReadyJob],
    options: RunOptions | None = None,
    *,
    watch: Watch = lambda progress, tick: None,
    stopped: Callable[[], bool] = lambda: False,
) -> list[Progress]:
    """Train jobs to their ends, those on one base together. A job that fails says why in its record; the others go on.

    `watch` is called after every tick. Once `stopped` says so, each running job is saved and paused at the tick's end.
    With `resume`, jobs that had finished are left alone.
    """
    options = options or RunOptions()
    if not options.resume:
        refuse_saved([job.spec for job in jobs])
    progress = {job.spec.name: Progress(job.spec, JobRecord(job.spec.name)) for job in jobs}
    for job in jobs:
        if options.resume and has_finished(job.spec):
            progress[job.spec.name].record = JobRecord(job.spec.name, State.FINISHED)
    for base, specs in by_base([job.spec for job in jobs]).items():
        names = {spec.name for spec in specs if progress[spec.name].record.state is State.QUEUED}
        waiting = [job for job in jobs if job.spec.name in names]
        if not waiting or stopped():
            continue
        try:
            _train_group(base, waiting, options, progress, watch, stopped)
        except (ModelError, torch.OutOfMemoryError) as error:
            for record in (progress[name].record for name in names):
                if not record.state.is_terminal:
                    _fail(record, error)
    return list(progress.values())


def refuse_saved(specs: Sequence[JobSpec]) -> None:
    """Raise SpecError for jobs whose folder holds a saved state already."""
    taken = [spec for spec in specs if JobFolder(spec.folder).has_state]
    if taken:
        raise SpecError(
            "\n".join(
                f"job {spec.name}: {spec.folder} holds a saved state already. Add --resume to go on with it, "
                "or choose another output."
                for spec in taken
            )
        )


def _train_group(
    base: BaseSpec,
    jobs: Sequence[ReadyJob],
    options: RunOptions,
    progress: dict[str, Progress],
    watch: Watch,
    stopped: Callable[[], bool],
) -> None:
    tokenizer = load_tokenizer(base)
    supermodel = SuperModel.load(
        base, device=options.device, deterministic=options.deterministic, checkpointing=options.checkpointing
    )
    longest = max(longest_rows(job.data, options.deterministic) for job in jobs)
    budget = options.trainer.budget_on(supermodel.device, longest)
    trainer = Trainer(supermodel, replace(options.trainer, token_budget=budget, writes_beside=True))
    for job in jobs:
        seen = progress[job.spec.name]
        try:
            seen.resident = trainer.attach(
                job.spec, job.data, resume=options.resume, record=seen.record, tokenizer=tokenizer
            )
        except (TloraError, OSError) as error:
            _fail(seen.record, error)
        except torch.OutOfMemoryError as error:
            _fail(seen.record, JobError(f"out of memory beside {len(trainer.jobs)} other(s): {error}"))
    try:
        watch(list(progress.values()), None)
        while trainer.jobs and not stopped():
            tick = None
            try:
                tick = trainer.tick()
            except torch.OutOfMemoryError as error:
                error.__traceback__ = None  # it holds what there was no room for
                _shrink(trainer, str(error))
            watch(list(progress.values()), tick)
    finally:  # stopped, or an error that no job is to blame for: nothing that was learnt is lost
        trainer.close()
    watch(list(progress.values()), None)


def _shrink(trainer: Trainer, why: str) -> None:
    """Half the token budget, and the steps in flight once more. Raises ModelError where it cannot be halved."""
    trainer.supermodel.free_memory()
    before = trainer.token_budget
    longest = max(longest_rows(job.data, job.per_sequence) for job in trainer.jobs.values())
    if before <= longest:
        raise ModelError(
            f"out of memory in a tick of {before} rows, the length of the longest sequence. Lower data.max_length, "
            f"train fewer jobs at once, or add --checkpointing. ({why})"
        )
    trainer.token_budget = max(before // 2, longest)
    log.warning("out of memory: ticks hold %d rows now.", trainer.token_budget)
    trainer.replay()


def _fail(record: JobRecord, error: Exception) -> None:
    reason = str(error).removeprefix(f"job {record.name}: ")
    log.error("job=%s failed: %s", record.name, reason)
    record.to(State.FAILED, reason)

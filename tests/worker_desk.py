"""A worker and its mailbox in this process, whose orders a test gives by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import toy
from safetensors.torch import load_file

from tlora.actors.messages import JobReport, Order, Orders, Report, WorkerOptions
from tlora.actors.worker import Worker
from tlora.job import State
from tlora.local import RunOptions, prepare, train
from tlora.spec import JobSpec

Adapter = dict[str, torch.Tensor]


class Desk:
    """Gives orders by hand, and steps the worker until something is seen."""

    def __init__(self, folder: Path, **options: Any):
        toy.write_base(folder)
        self.folder, self.number = folder, 0
        base = toy.named_job(folder, "a").base.model_dump()
        self.worker = Worker(
            WorkerOptions(group="g", base=base, deterministic=True, device="cpu", **{"patience_s": 0.0, **options}),
            0,
            "node",
        )

    def order(
        self,
        *specs: JobSpec,
        attempt: int = 1,
        drop: frozenset[str] = frozenset(),
        stop: bool = False,
        halt: dict[str, Any] | None = None,
        **dealt: Any,
    ) -> None:
        """`dealt`: shares and token budget."""
        self.number += 1
        jobs = {spec.name: Order(spec.model_dump(mode="json"), attempt, halt or {}) for spec in specs}
        self.worker.mailbox.put(Orders(self.number, jobs, drop, stop, **dealt))

    def until(self, seen: Callable[[Report], bool], most: int = 2000) -> Report:
        for _ in range(most):
            self.worker.step()
            if seen(self.worker.mailbox.report()):
                return self.worker.mailbox.report()
        raise AssertionError(f"never seen: {self.worker.mailbox.report()}")

    def ends(self, name: str) -> JobReport:
        return self.until(lambda report: name in report.jobs and report.jobs[name].state.is_terminal).jobs[name]


def adapter(spec: JobSpec) -> Adapter:
    return load_file(spec.folder / "adapter_model.safetensors")


def alone(spec: JobSpec) -> Adapter:
    """The adapter that the job would have had alone."""
    spec = spec.model_copy(update={"output": f"{spec.output}-alone"})
    options = RunOptions(deterministic=True, device="cpu")
    (one,) = train(prepare([spec], options), options)
    assert one.record.state is State.FINISHED
    return adapter(spec)


def same(one: Adapter, other: Adapter) -> bool:
    return one.keys() == other.keys() and all(torch.equal(part, other[name]) for name, part in one.items())

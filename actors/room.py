"""What has room on a worker's device: its base, and a job beside others: by estimates, and by what failed.

Asked by `tlora.actors.worker`. What would be alone is tried, for an estimate may be wrong.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tlora.actors.messages import JobReport, Orders, WorkerOptions
from tlora.adapter import AdapterLayout
from tlora.base import Outline, default_device, dtype_of
from tlora.errors import ModelError
from tlora.job import State
from tlora.plan import Plan
from tlora.planner import SPARE, EstimatedCosts, Machine, fewest
from tlora.spec import BaseSpec, JobSpec

log = logging.getLogger("tlora")


@dataclass(frozen=True, slots=True)
class _Crowded:
    """A job that waits until it has fewer neighbours than this."""

    attempt: int
    neighbours: int
    reason: str


class Room:
    """Of one worker."""

    def __init__(self, options: WorkerOptions, base: BaseSpec):
        self._options, self._base = options, base
        self._device = torch.device(options.device) if options.device else default_device()
        self.needs: Plan | None = None
        """What the base takes, once it has been looked at."""
        self._crowded: dict[str, _Crowded] = {}

    def lacks_for_base(self, spec: JobSpec) -> bool:
        """Whether the base and its first job want more than one worker, however small the ticks; `needs` says which.
        Raises ModelError if all that there may be are too few. Activations are estimates, so that a base whose weights
        have room is tried."""
        options = self._options
        if self.needs is None and options.most_workers and (memory := memory_bytes(self._device)):
            outline = Outline.load(self._base)
            machine = Machine(gpus=options.most_workers, per_node=options.per_node, memory_bytes=memory)
            rows = options.token_budget or spec.data.max_length
            costs = partial(self._costs, outline, [outline.lay_out(spec.adapter)], rows)
            found = fewest(costs, machine, divisor=outline.divisor)
            if found is None and costs(machine).memory(Plan()).base > memory:
                raise ModelError(
                    f"base.model = {self._base.model!r}: no plan for {machine.gpus} workers of {memory / 2**30:.0f} "
                    "GiB has room for it. Raise max_workers, lower the token budget, or set checkpointing."
                )
            self.needs = found or Plan()
        return self.needs is not None and self.needs.ranks > 1

    def refuse_beside(self, outline: Outline, layouts: Sequence[AdapterLayout], rows: int) -> None:
        """Raise MemoryError if these adapters, the last of them to come, have no room together, though ticks be as
        small as their longest sequence, of so many rows."""
        room = SPARE * memory_bytes(self._device)
        if not room or len(layouts) == 1:
            return
        need = self._costs(outline, layouts, rows, Machine(gpus=1)).memory(Plan()).total
        if need > room:
            raise MemoryError(
                f"its adapter beside {len(layouts) - 1} others takes about {need / 2**30:.1f} GiB, the base and the "
                f"smallest tick with it; there are {room / 2**30:.1f}"
            )

    def _costs(self, outline: Outline, layouts: Sequence[AdapterLayout], rows: int, machine: Machine) -> EstimatedCosts:
        return EstimatedCosts(
            outline=outline,
            layouts=layouts,
            machine=machine,
            rows=rows,
            dtype=dtype_of(self._base, self._device),
            checkpointing=self._options.checkpointing,
        )

    def crowd(self, name: str, attempt: int, neighbours: int, error: Exception) -> None:
        """A job is to wait until it has fewer neighbours than those beside which it has no room."""
        reason = f"waits for room beside {neighbours} other jobs: {error}"
        log.warning("job=%s group=%s %s", name, self._options.group, reason)
        self._crowded[name] = _Crowded(attempt, neighbours, reason)

    def is_crowded(self, name: str, neighbours: int) -> bool:
        return name in self._crowded and neighbours >= self._crowded[name].neighbours

    def forget(self, orders: Orders) -> None:
        """Jobs that are not to be here any more, or are placed anew."""
        for name, crowded in list(self._crowded.items()):
            if name not in orders.jobs or orders.jobs[name].attempt != crowded.attempt:
                del self._crowded[name]

    def reports(self) -> dict[str, JobReport]:
        """Of those that wait, or did."""
        return {
            name: JobReport(crowded.attempt, State.ATTACHING, crowded.reason) for name, crowded in self._crowded.items()
        }


def memory_bytes(device: torch.device) -> int:
    """Of a GPU; 0 on a CPU, which is not measured."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0

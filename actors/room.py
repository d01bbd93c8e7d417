"""What has room on a worker's device: its base, and a job beside others: by estimates, and by what failed.

Asked by `tlora.actors.worker`. What would be alone is tried, for an estimate may be wrong.
"""

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
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
    """A job that waits until one of these neighbours is gone; for other ranks of its unit, if there are none."""

    beside: frozenset[str]
    told: JobReport


class NoRoomError(Exception):
    """What a job met for want of memory, and the neighbours that it had then."""

    def __init__(self, error: Exception, beside: frozenset[str]):
        super().__init__(str(error))
        self.error, self.beside = error, beside


class Room:
    """Of one worker."""

    def __init__(self, options: WorkerOptions, base: BaseSpec):
        self._options, self._base = options, base
        self._device = torch.device(options.device) if options.device else default_device()
        self.needs: Plan | None = None
        """What the base takes, once it has been looked at."""
        self._crowded: dict[str, _Crowded] = {}
        self._tried: set[tuple[str, int, frozenset[str]]] = set()
        """Jobs, by attempt and neighbours, for which memory has been given back once."""

    def lacks_for_base(self, spec: JobSpec) -> bool:
        """Whether the base and its first job want more than one worker, however small the ticks; `needs` says which.
        Raises ModelError if all that there may be are too few. Activations are estimates, so that a base whose weights
        have room is tried."""
        options = self._options
        if self.needs is None and options.most_workers and (memory := self._memory_bytes):
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
        room, plan = SPARE * self._memory_bytes, self._options.plan
        if not room or len(layouts) == 1:
            return
        costs = self._costs(outline, layouts, rows, Machine(gpus=plan.ranks))
        part = costs.memory(plan)
        need = part.total - part.adapters + costs.memory(Plan()).adapters  # for all of them lie here
        if need > room:
            raise MemoryError(
                f"its adapter beside {_others(len(layouts) - 1)} takes about {need / 2**30:.1f} GiB, the base and the "
                f"smallest tick with it; there are {room / 2**30:.1f}"
            )

    @property
    def _memory_bytes(self) -> int:
        """As said, and no more than there is; 0 if neither is known."""
        said, there = self._options.memory_bytes, memory_bytes(self._device)
        return min(said or there, there or said)

    def _costs(self, outline: Outline, layouts: Sequence[AdapterLayout], rows: int, machine: Machine) -> EstimatedCosts:
        return EstimatedCosts(
            outline=outline,
            layouts=layouts,
            machine=machine,
            rows=rows,
            dtype=dtype_of(self._base, self._device),
            checkpointing=self._options.checkpointing,
        )

    def may_try_again(self, name: str, attempt: int, beside: frozenset[str]) -> bool:
        """Whether memory has not been given back for a job yet, beside these neighbours; it is to be then."""
        is_first = (name, attempt, beside) not in self._tried
        self._tried.add((name, attempt, beside))
        return is_first

    def crowd(
        self, name: str, told: JobReport, beside: frozenset[str], error: object, here: frozenset[str] | None = None
    ) -> None:
        """A job is to wait until one of those is gone beside which it has no room; `told`: how far it has come. Of a
        unit, each rank waits for its own: those `here`, which may be none."""
        reason = f"waits for room beside {_others(len(beside))}: {error}"
        log.warning("job=%s group=%s %s", name, self._options.group, reason)
        told = replace(told, state=State.ATTACHING, reason=reason, tokens_per_s=0.0)
        self._crowded[name] = _Crowded(beside if here is None else here, told)

    def admit(self, name: str) -> None:
        """It has come in: it does not wait any more."""
        self._crowded.pop(name, None)

    def is_crowded(self, name: str, neighbours: Collection[str]) -> bool:
        beside = self._crowded[name].beside if name in self._crowded else frozenset[str]()
        return bool(beside) and beside.issubset(neighbours)

    def forget(self, orders: Orders) -> None:
        """Jobs that are not to be here any more, or are placed anew."""
        attempts = {name: order.attempt for name, order in orders.jobs.items()}
        self._crowded = {
            name: crowded for name, crowded in self._crowded.items() if attempts.get(name) == crowded.told.attempt
        }
        self._tried = {key for key in self._tried if attempts.get(key[0]) == key[1]}

    def told(self, name: str, attempt: int) -> JobReport:
        """Of a job that is being read, or waits: how far it had come if it was here before."""
        crowded = self._crowded.get(name)
        return crowded.told if crowded else JobReport(attempt, State.ATTACHING)

    def reports(self) -> dict[str, JobReport]:
        """Of those that wait, or did."""
        return {name: crowded.told for name, crowded in self._crowded.items()}


def _others(count: int) -> str:
    return f"{count} other job{'s' * (count != 1)}"


def memory_bytes(device: torch.device) -> int:
    """Of a GPU; 0 on a CPU, which is not measured."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0

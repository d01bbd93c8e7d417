"""Which plan a group takes, and which lanes its jobs lie on: arithmetic over estimates, which measures nothing.

Called by `tlora check --gpus` and by whoever forms a group. What a plan costs is asked through `Costs`, so that a model
fitted to measured ticks can take the place of the one here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tlora.adapter import AdapterLayout
from tlora.base import Outline
from tlora.memory import estimate
from tlora.plan import Plan

GATHERED_LAYERS = 2
"""Layers that a rank under FSDP2 holds whole at the worst moment: one in use, and what the next one comes in."""
SPARE = 0.9
"""Part of a GPU's memory that a plan may fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs of a group. The defaults are an H200's, as measured."""

    gpus: int
    per_node: int = 8
    memory_bytes: int = 139 << 30
    flops_per_s: float = 6.5e14
    node_bytes_per_s: float = 2.5e11
    """What one GPU sends to others of its node."""
    network_bytes_per_s: float = 4e10


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes on the fullest rank."""

    base: int
    gathered: int
    adapters: int
    tick: int

    @property
    def total(self) -> int:
        return self.base + self.gathered + self.adapters + self.tick


class Costs(Protocol):
    """What a plan takes."""

    def memory(self, plan: Plan) -> RankMemory: ...

    def rows_per_s(self, plan: Plan) -> float:
        """Rows that the whole group trains on in a second."""
        ...


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with its figures."""

    plan: Plan
    memory: RankMemory
    rows_per_s: float
    fits: bool


def choose(costs: Costs, machine: Machine, *, divisor: int) -> list[Choice]:
    """Every plan for these GPUs, the one to take first: of those that fit the fastest, of equals the plainest; then
    those that do not, the nearest first. `divisor`: a base's products split only over ranks that divide it."""
    choices = []
    for plan in plans(machine, divisor):
        memory = costs.memory(plan)
        choices.append(Choice(plan, memory, costs.rows_per_s(plan), memory.total <= SPARE * machine.memory_bytes))
    return sorted(choices, key=_order)


def fewest(costs: Callable[[Machine], Costs], machine: Machine, *, divisor: int) -> Plan | None:
    """One replica on the fewest of these GPUs that have room for it, the fastest of such plans; None, if none has."""
    counts = [1 << at for at in range(machine.gpus.bit_length())]
    for part in (replace(machine, gpus=count) for count in counts):
        for choice in choose(costs(part), part, divisor=divisor):
            if choice.fits and choice.plan.replicas == 1:
                return choice.plan
    return None


def _order(choice: Choice) -> tuple[object, ...]:
    plan = choice.plan
    if not choice.fits:
        return True, choice.memory.total, plan.tensor, plan.shards
    return False, -choice.rows_per_s, plan.tensor, plan.shards


def plans(machine: Machine, divisor: int) -> list[Plan]:
    """All ways to use every GPU: tensor-parallel ranks on one node, which they divide."""
    node = math.gcd(machine.per_node, machine.gpus) if machine.gpus > machine.per_node else machine.gpus
    found = []
    for tensor in _divisors(math.gcd(node, divisor)):
        lanes = machine.gpus // tensor
        found += [Plan(replicas=lanes // shards, shards=shards, tensor=tensor) for shards in _divisors(lanes)]
    return found


def _divisors(count: int) -> list[int]:
    return [part for part in range(1, count + 1) if count % part == 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedCosts:
    """From shapes and rates. `rows`: of one lane's tick; `layouts`: of the group's jobs. `tick_s`: seconds of a tick of
    so many rows on one GPU, where these have been measured (`capacity.BaseModel.tick_s`)."""

    outline: Outline
    layouts: Sequence[AdapterLayout]
    machine: Machine
    rows: int
    dtype: torch.dtype
    checkpointing: bool = False
    tick_s: Callable[[float], float] | None = None

    @property
    def _layer_parameters(self) -> int:
        """Of all layers' products, which are what is split; the rest, embedding and head, is on every tensor rank."""
        return sum(shape.numel() for name, shape in self.outline.linears.items() if name != self.outline.head)

    def memory(self, plan: Plan) -> RankMemory:
        size, layers = self.dtype.itemsize, self._layer_parameters
        rest = self.outline.num_parameters - layers
        base = (layers / plan.tensor + rest) / plan.shards
        widest = max(GATHERED_LAYERS * layers / plan.tensor / self.outline.num_layers, rest)
        needs = [
            estimate(self.outline, layout, self.rows, self.dtype, checkpointing=self.checkpointing)
            for layout in self.layouts
        ]
        lanes = [0] * plan.lanes
        for need in sorted((need.adapter_bytes for need in needs), reverse=True):
            lanes[lanes.index(min(lanes))] += need
        return RankMemory(
            base=int(base * size),
            gathered=int(widest * size) if plan.shards > 1 else 0,
            adapters=max(lanes),  # whole A or B on each rank of a lane: at most this
            tick=max((need.tick_bytes for need in needs), default=0),
        )

    def rows_per_s(self, plan: Plan) -> float:
        """Gathers run under compute; reductions of a tensor-parallel base, four a layer, do not."""
        size, machine = self.dtype.itemsize, self.machine
        alone_s = 4.0 * self.outline.num_parameters * self.rows / machine.flops_per_s
        compute_s = (self.tick_s(self.rows) if self.tick_s else alone_s) / plan.tensor
        crosses = plan.shards * plan.tensor > machine.per_node
        shard_rate = machine.network_bytes_per_s if crosses else machine.node_bytes_per_s
        gathered = 2 * self.outline.num_parameters * size / plan.tensor * (plan.shards - 1) / plan.shards
        moved = 4 * self.outline.num_layers * self.rows * self.outline.hidden_size * size
        reduce_s = moved * 2 * (plan.tensor - 1) / plan.tensor / machine.node_bytes_per_s
        tick_s = max(compute_s + reduce_s, gathered / shard_rate)
        return plan.lanes * self.rows / tick_s


def place(
    loads: Mapping[str, float],
    lanes: int,
    current: Mapping[str, tuple[int, ...]] | None = None,
    *,
    most: Mapping[str, int] | None = None,
    margin: float = 0.1,
) -> dict[str, tuple[int, ...]]:
    """Lanes for each job, by predicted load (work per second that it wants).

    A job that wants more than an even part of all work is split over as many lanes as that takes, at `most` so many
    (its sequences a step); the others lie whole on the lane with the least. A job stays where it is (`current`)
    unless moving it lowers the fullest lane's load by more than `margin` of the mean.
    """
    mean = sum(loads.values()) / lanes
    filled = [0.0] * lanes
    placed: dict[str, tuple[int, ...]] = {}
    stays = {name: where for name, where in (current or {}).items() if max(where, default=lanes) < lanes}

    def put(name: str, where: tuple[int, ...]) -> None:
        placed[name] = where
        for lane in where:
            filled[lane] += loads[name] / len(where)

    def emptiest(count: int) -> tuple[int, ...]:
        return tuple(sorted(sorted(range(lanes), key=lambda lane: (filled[lane], lane))[:count]))

    parts = {
        name: min(lanes, (most or {}).get(name, lanes), max(1, round(load / mean))) if mean else 1
        for name, load in loads.items()
    }
    by_load = sorted(loads, key=lambda name: (-loads[name], name))
    for name in [name for name in by_load if len(stays.get(name, ())) == parts[name]]:
        put(name, stays[name])
    for name in [name for name in by_load if name not in placed]:
        put(name, emptiest(parts[name]))
    while True:
        full, empty = max(range(lanes), key=filled.__getitem__), min(range(lanes), key=filled.__getitem__)
        whole = [name for name, where in placed.items() if where == (full,)]
        best = min(whole, key=lambda name: abs(filled[full] - filled[empty] - 2 * loads[name]), default=None)
        if best is None or filled[full] - max(filled[full] - loads[best], filled[empty] + loads[best]) <= margin * mean:
            return placed
        filled[full] -= loads[best]
        put(best, (empty,))

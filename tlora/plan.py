"""How a group's ranks hold one base: arithmetic, no torch.

rank = (replica · shards + shard) · tensor + part. A *lane* is the ranks that split one base's products (one rank, if
none do); it sends one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tlora.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Replicas of a base, each sharded over `shards` lanes (FSDP2) of `tensor` ranks, which lie on one node."""

    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.replicas, self.shards, self.tensor) < 1:
            raise ModelError(f"plan {self}: want at least 1 of each.")

    def __str__(self) -> str:
        return f"{self.replicas} replicas × {self.shards} shards × {self.tensor} tensor-parallel"

    @property
    def ranks(self) -> int:
        return self.replicas * self.shards * self.tensor

    @property
    def lanes(self) -> int:
        return self.replicas * self.shards

    @property
    def is_spread(self) -> bool:
        """Whether no rank holds a whole base."""
        return self.shards * self.tensor > 1

    def lane_of(self, rank: int) -> int:
        return rank // self.tensor

    def ranks_of(self, lanes: Sequence[int]) -> tuple[int, ...]:
        return tuple(lane * self.tensor + part for lane in sorted(lanes) for part in range(self.tensor))

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks that share one copy of the base with this one."""
        size = self.shards * self.tensor
        first = rank // size * size
        return tuple(range(first, first + size))

"""One rank's place in a plan, its process groups, and all that ranks say to each other beside the base's own exchange.

A *circle* is the ranks that agree on every tick: those that share a copy of the base, or a split job. Every collective
ends within the timeout, or raises GroupError. Called by the group's trainer and by what holds a base together.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tlora.errors import GroupError, TloraError
from tlora.plan import Plan

log = logging.getLogger("tlora")
Group = dist.ProcessGroup | None
"""None: this rank alone."""
TIMEOUT_S = 600.0
_T = TypeVar("_T")
_LOOK_S = 0.2
CHANNELS = 2
"""Process groups of a lane, with which slices take turns. What one group is given runs one after the other on a GPU, in
the order of launches: a slice's reduction would wait for another slice's next one, and that for compute. More than two
could fill a GPU with reductions that wait for their peers."""


class Mesh:
    """One rank's place in a plan. torch's default process group must stand, with `plan.ranks` ranks and a backend for
    tensors in host memory."""

    def __init__(
        self, plan: Plan, device: torch.device | str = "cpu", *, timeout_s: float = TIMEOUT_S, loading_s: float = 0.0
    ):
        if dist.get_world_size() != plan.ranks:
            raise GroupError(f"plan {plan}: want {plan.ranks} ranks; got {dist.get_world_size()}.")
        self.plan, self.rank, self.device, self.timeout_s = plan, dist.get_rank(), torch.device(device), timeout_s
        self._loading_s, self._num_loaded, self._num_met = max(loading_s, timeout_s), 0, 0
        self.lane, self.part = plan.lane_of(self.rank), self.rank % plan.tensor
        self.lane_ranks = plan.ranks_of([self.lane])
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        """By channel and ranks."""
        self._circle_group: Group = None
        self._kept_by_torch: list[dict[str, Any]] = []
        """Of groups, in caches that outlive what was built on them."""
        self.is_broken = False
        """Whether this rank has broken off what it had with others: what it computes from then on is worth nothing."""
        self._form(plan.replica_ranks(self.rank))

    def _form(self, circle: Sequence[int]) -> None:
        replica = self.plan.replica_ranks(self.rank)
        self.tensor_groups: tuple[Group, ...] = tuple(
            self.group(self.lane_ranks, channel) for channel in range(CHANNELS)
        )
        self.shard_group: Group = self.group(replica[self.part :: self.plan.tensor])
        self.circle: tuple[int, ...] = ()
        self.join(circle)

    @classmethod
    def open(
        cls,
        plan: Plan,
        rank: int,
        store: Any,
        device: torch.device | str,
        *,
        timeout_s: float = TIMEOUT_S,
        loading_s: float = 0.0,
    ) -> "Mesh":
        """Make the default process group too, over a store of this group's own (a new prefix each time that its plan
        changes)."""
        device = torch.device(device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        _meet(device, store, rank, plan.ranks, timeout_s)
        return cls(plan, device, timeout_s=timeout_s, loading_s=loading_s)

    def close(self) -> None:
        """Leave all groups; the process, and what it has in memory, stays for the next plan."""
        self._groups.clear()
        dist.destroy_process_group()

    def shards(self) -> DeviceMesh:
        """The shard group, as FSDP takes it."""
        assert self.shard_group is not None
        mesh = DeviceMesh.from_group(self.shard_group, self.device.type)
        self._kept_by_torch.append(getattr(mesh, "_pg_registry", {}))
        return mesh

    def abort(self) -> None:
        """Break off all that this rank has with others, in whichever of its threads: there it raises GroupError, if its
        backend can be told to."""
        self.is_broken = True
        for group in (dist.distributed_c10d._get_default_group(), *tuple(self._groups.values())):
            try:
                group.abort()
            except RuntimeError as error:  # the others are to be broken off all the same
                log.warning("rank %d: a process group was not broken off: %s", self.rank, error)

    def refuse_broken(self) -> None:
        """Raise GroupError if it is: before what was computed is taken for good."""
        if self.is_broken:
            raise self._failed("a tick", self.circle, RuntimeError("it was broken off"))

    def leave(self) -> None:
        """Break off, and let go of all groups: those whom this rank keeps waiting raise GroupError, once nothing that
        was built on these groups, such as a base of FSDP's, is left here. `meet_again` comes next."""
        self.abort()
        self._next_store = dist.distributed_c10d._get_default_store()
        for group_by_name in self._kept_by_torch:
            group_by_name.clear()
        self.tensor_groups, self.shard_group, self._circle_group = (), None, None
        self.close()

    def meet_again(self) -> None:
        """Once all ranks have left: form the same groups anew. Raises GroupError if they do not all come in time."""
        self._num_met, self._num_loaded, self.is_broken = self._num_met + 1, 0, False
        store = dist.PrefixStore(f"tlora-again/{self._num_met}", self._next_store)  # type: ignore[attr-defined]
        self._await_all(store, "", self.timeout_s, "meeting again", range(self.plan.ranks))
        _meet(self.device, store, self.rank, self.plan.ranks, self.timeout_s)
        self._form(self.circle)

    def group(self, ranks: Sequence[int], channel: int = 0) -> Group:
        """The process group of these ranks; made at the first call, in which they all must take part."""
        key = channel, *ranks
        if len(ranks) == 1:
            return None
        if key not in self._groups:
            with self._watched("forming a group", ranks):
                self._groups[key] = _new_group(tuple(ranks), channel, timedelta(seconds=self.timeout_s))
        return self._groups[key]

    def join(self, ranks: Sequence[int]) -> None:
        """Agree on ticks with these ranks from now on: whole replicas, each of which calls this between two ticks."""
        circle = tuple(sorted(ranks))
        if any(not set(self.plan.replica_ranks(rank)) <= set(circle) for rank in (self.rank, *circle)):
            raise GroupError(f"circle {circle} of rank {self.rank}: want whole replicas, its own among them.")
        self.circle = circle
        self._circle_group = self.group(circle)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, by place in the circle; as many from each."""
        if self._circle_group is None:
            return [list(numbers)]
        mine = torch.tensor(numbers, dtype=torch.int64)
        parts = [torch.empty_like(mine) for _ in self.circle]
        with self._watched("agreeing on a tick", self.circle):
            dist.all_gather(parts, mine, group=self._circle_group)
        return [part.tolist() for part in parts]

    def sum_in_order(self, vector: torch.Tensor, ranks: Sequence[int]) -> None:
        """Replace a vector by its sum over these ranks, added up in their order: the same bits on each of them, each
        time. Every rank sums one part; as many bytes move as in a ring."""
        group = self.group(ranks)
        if group is None:
            return
        count, size = len(ranks), vector.numel()
        padded = vector.new_zeros(-(-size // count) * count)
        padded[:size] = vector
        parts = torch.empty_like(padded)
        with self._watched("summing gradients", ranks):
            dist.all_to_all_single(parts, padded, group=group)
            total, *others = parts.view(count, -1).unbind()
            for part in others:
                total += part
            dist.all_gather(list(padded.view(count, -1).unbind()), total, group=group)
        vector.copy_(padded[:size])

    def gather(self, vector: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        """Every rank's vector, of one length, on each of them, in host memory."""
        group = self.group(ranks)
        if group is None:
            return [vector.cpu()]
        parts = [torch.empty_like(vector) for _ in ranks]
        with self._watched("gathering a job's state", ranks):
            dist.all_gather(parts, vector, group=group)
        return [part.cpu() for part in parts]

    def broadcast(self, vector: torch.Tensor, source: int, ranks: Sequence[int]) -> None:
        """Rank `source`'s vector, in place."""
        group = self.group(ranks)
        if group is not None:
            with self._watched("handing over a job's state", ranks):
                dist.broadcast(vector, source, group=group)

    def tell(self, message: Any, source: int, ranks: Sequence[int]) -> Any:
        """Rank `source`'s message, any object that pickles."""
        group = self.group(ranks)
        if group is None:
            return message
        box = [message]
        with self._watched("agreeing on an outcome", ranks):
            dist.broadcast_object_list(box, source, group=group, device=torch.device("cpu"))
        return box[0]

    def share(self, message: Any) -> list[Any]:
        """What each rank of the circle brings, by place in it: any objects that pickle."""
        if self._circle_group is None:
            return [message]
        messages = [None] * len(self.circle)
        with self._watched("talking", self.circle):
            dist.all_gather_object(messages, message, group=self._circle_group)
        return messages

    def together(self, action: Callable[[], _T]) -> _T:
        """What every rank of the circle does by itself, such as loading the base, for which one may need longer than a
        collective may take; what one of them raises, all raise."""
        failure: Exception | None = None
        try:
            result = action()
        except (TloraError, OSError, RuntimeError) as error:
            failure = error
        self._num_loaded += 1
        store = dist.distributed_c10d._get_default_store()
        self._await_all(
            store, f"tlora-loaded/{self.circle}/{self._num_loaded}/", self._loading_s, "loading", self.circle
        )
        for failed in self.share(failure):
            if failed is not None:
                raise failed
        return result

    def _await_all(self, store: Any, where: str, limit_s: float, what: str, ranks: Sequence[int]) -> None:
        """Until each of these ranks has come here; a wait of the store's own would keep it from other threads."""
        with self._watched(what, ranks, limit_s):
            store.set(f"{where}{self.rank}", "")
            until_s = time.monotonic() + limit_s
            while not store.check([f"{where}{rank}" for rank in ranks]):
                if self.is_broken:
                    raise RuntimeError("it was broken off")
                if time.monotonic() > until_s:
                    raise RuntimeError("one is not done")
                time.sleep(_LOOK_S)

    @contextmanager
    def surfacing(self) -> Iterator[None]:
        """What fails within between ranks comes out as GroupError."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, GroupError) or not _is_between_ranks(error):
                raise
            raise self._failed("the base's own exchange", self.circle, error) from error

    @contextmanager
    def _watched(self, what: str, ranks: Sequence[int], limit_s: float = 0.0) -> Iterator[None]:
        """`limit_s`: if it is not that of collectives."""
        try:
            yield
        except RuntimeError as error:
            raise self._failed(what, ranks, error, limit_s) from error

    def _failed(self, what: str, ranks: Sequence[int], error: Exception, limit_s: float = 0.0) -> GroupError:
        why = str(error).strip().splitlines()[0]
        return GroupError(
            f"rank {self.rank}: {what} between ranks {tuple(ranks)} failed: {why}. A rank is gone, or did not answer "
            f"within {limit_s or self.timeout_s:g} s. Start the group anew; its jobs go on from their last saves."
        )


def _meet(device: torch.device, store: Any, rank: int, count: int, timeout_s: float) -> None:
    """Make the default process group: NCCL between GPUs, gloo between hosts."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise GroupError(f"rank {rank}: a group of {count} did not come together: {error}.") from error


def _is_between_ranks(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in ("gloo", "nccl"))


def _new_group(ranks: tuple[int, ...], channel: int, timeout: timedelta) -> Any:
    """A group that its own ranks make alone, named after them and its channel. torch's `new_group` would name it after
    the number of groups that this process has made, so that ranks of which one had made others would wait for each
    other in vain."""
    c10d: Any = dist.distributed_c10d
    world, name = c10d._world, f"tlora-{'-'.join(map(str, ranks))}/{channel}"
    for group, its_name in world.pg_names.items():
        if its_name == name:
            return group
    backend, store = world.pg_map[c10d._get_default_group()]
    place = ranks.index(dist.get_rank())
    made, _ = c10d._new_process_group_helper(len(ranks), place, list(ranks), backend, store, name, timeout=timeout)
    world.pg_group_ranks[made] = {rank: at for at, rank in enumerate(ranks)}
    return made

"""What ranks do by themselves before they meet, at a store that they share as a unit's do."""

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from group_work import Run

from tlora.errors import GroupError
from tlora.parallel import Mesh


def loads_slowly(run: Run, rank: int, for_s: float, loading_s: float) -> tuple[str, float]:
    """One rank is at work for long; what that came to, and the longest that another thread waited for the store."""
    mesh = Mesh(run.plan, timeout_s=run.timeout_s, loading_s=loading_s)
    store, failure, longest_s = _tcp_store(mesh), "", 0.0
    has_ended = threading.Event()

    def ask() -> None:
        nonlocal longest_s
        while not has_ended.wait(0.05):
            began_s = time.monotonic()
            with suppress(RuntimeError):  # its keeper is gone
                store.check(["never set"])
            longest_s = max(longest_s, time.monotonic() - began_s)

    asks = threading.Thread(target=ask)
    asks.start()
    with patch.object(dist.distributed_c10d, "_get_default_store", lambda: store):
        try:
            mesh.together(lambda: time.sleep(for_s if mesh.rank == rank else 0.0))
        except GroupError as error:
            failure = str(error)
    has_ended.set()
    asks.join()
    if not failure:
        mesh.share(None)  # the first one keeps the store
    return failure, longest_s


def _tcp_store(mesh: Mesh) -> Any:
    """One client a rank, whose threads share it."""
    size, timeout, store = mesh.plan.ranks, timedelta(seconds=60.0), None
    if mesh.rank == 0:
        store = dist.TCPStore("localhost", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
    port = mesh.tell(store.port if store else 0, 0, range(size))
    return store or dist.TCPStore("localhost", port, size, timeout=timeout, wait_for_workers=False)

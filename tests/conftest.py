"""Triton kernels run in Triton's interpreter where no GPU is asked for; it must be told before they are defined.

Tests of parallel plans share their ranks: starting them takes longer than most of these. Of two processes that share
the tests, file by file, one takes all that start a cluster: two clusters at once would starve each other."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

if os.environ.get("TLORA_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


CLUSTERS = {
    f"test_{part}" for part in ("bare_machine", "chaos", "cluster", "cluster_sweep", "elastic", "front_doors", "nodes")
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in CLUSTERS)  # these take longest, so they begin first


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            stem = Path(nodeid.partition("::")[0]).stem
            return "cluster" if stem in CLUSTERS else stem

    return ByFile(config, log)


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    from ranks import Ranks

    pool = Ranks(4)
    yield pool
    pool.close()

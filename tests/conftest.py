"""Triton kernels run in Triton's interpreter where no GPU is asked for; it must be told before they are defined.

Tests of parallel plans share their ranks: starting them takes longer than most of these."""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ranks import Ranks

if os.environ.get("TLORA_TEST_DEVICE", "cpu") == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    from ranks import Ranks

    pool = Ranks(4)
    yield pool
    pool.close()

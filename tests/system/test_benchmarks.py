"""Benchmarks of GPUs run here too, those of several on two ranks over gloo: the smallest form of each."""

import subprocess
import sys
import time

import group_work
import pytest
from torch.multiprocessing import ProcessRaisedException

from benchmarks import group, overlap

SMALLEST = {
    "overlap": "--shape toy --plans tensor --tokens 64 --rounds 1 --ticks 1",
    "scaling": "--shape toy --parts shards-split ddp --length 8 --rounds 1",
    "rounding": "--layers 1",
}
SAID = {"overlap": "tick/tensor/64/own", "scaling": "PEFT with ddp", "rounding": "effect/PEFT"}


@pytest.mark.parametrize("name", SMALLEST)
def test_its_smallest_form_runs(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *SMALLEST[name].split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert SAID[name] in ended.stdout


def test_spans_of_time() -> None:
    """What ran at once is the sum of both unions less the union of both."""
    one, other = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)], [(2.5, 5.5)]
    assert overlap.merged(one) == [(0.0, 3.0), (5.0, 6.0)]
    assert overlap.merged([*one, *other]) == [(0.0, 6.0)]
    assert overlap.length(overlap.merged(one)) + overlap.length(other) - 6.0 == 1.0


def test_a_rank_that_fails_ends_all() -> None:
    """With its traceback, while the others wait for it."""
    began_s = time.monotonic()
    with pytest.raises(ProcessRaisedException, match="rank 1 of the benchmark"):
        group.run(2, group_work.fail_on_one)
    assert time.monotonic() - began_s < group_work.ASLEEP_S

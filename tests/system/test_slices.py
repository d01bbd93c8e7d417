"""Slices of a tensor-parallel base's ticks, each on a stream of its own where there are GPUs, change no gradient."""

import math

import pytest
import slices
import torch
import toy

from benchmarks import group

ON_GPUS = toy.DEVICE.type == "cuda"


@pytest.mark.skipif(
    torch.cuda.is_available() and not (ON_GPUS and torch.cuda.device_count() > 1),
    reason="takes two GPUs and TLORA_TEST_DEVICE=cuda, or no GPU",
)
def test_slices_change_no_gradient() -> None:
    """In half precision within rounding, step by step; on GPUs long enough to see what goes wrong seldom."""
    whole, *cut = group.run(2, slices.by_count, 40 if ON_GPUS else 4)
    for count, steps in zip(slices.COUNTS[1:], cut, strict=True):
        assert len(steps) == len(whole)
        for at, (mine, right) in enumerate(zip(steps, whole, strict=True)):
            assert mine.keys() == right.keys(), f"{count} slices, step {at}: jobs are gone"
            for name, pair in mine.items():
                assert all(map(math.isfinite, pair)), f"{count} slices, step {at}, job {name}: {pair}"
                assert pair == pytest.approx(right[name], rel=5e-2 if ON_GPUS else 1e-5)

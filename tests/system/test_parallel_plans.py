"""The promise over several ranks: whatever plan holds the base, every job ends as it would have alone."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import group_work
import pytest
import torch
import toy
from group_work import Run, Visit
from ranks import Ranks

from tlora.parallel import Plan
from tlora.supermodel import SuperModel

COUNTS = {
    "alone": (1, 1, 1), "2 replicas": (2, 1, 1), "2 shards": (1, 2, 1), "2 parts": (1, 1, 2),
    "4 replicas": (4, 1, 1), "4 shards": (1, 4, 1), "4 parts": (1, 1, 4),
    "2 replicas of 2 shards": (2, 2, 1), "2 replicas of 2 parts": (2, 1, 2), "2 shards of 2 parts": (1, 2, 2),
}  # fmt: skip
PLANS = {name: Plan(replicas=r, shards=s, tensor=t) for name, (r, s, t) in COUNTS.items()}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@cache
def lone_model(dtype: torch.dtype, deterministic: bool) -> SuperModel:
    return group_work.super_model(Run(plan=PLANS["alone"], dtype=dtype, deterministic=deterministic))


def equal(folder: Path, mix: list[Visit], run: Run, *, to_the_bit: bool = False) -> None:
    """Every job that was not cancelled ended as it does alone."""
    for visit in mix:
        if visit.cancelled >= 0 and not (folder / visit.name / "adapter_config.json").exists():
            continue
        spec = toy.job(folder, visit.name, **visit.changes)
        toy.alone(lone_model(run.dtype, run.deterministic), spec, toy.data(**visit.data))
        (mine, measured), (solo, expected) = (
            group_work.ended(folder, name) for name in (visit.name, f"{visit.name}-alone")
        )
        if to_the_bit:
            assert torch.equal(mine, solo), visit
            assert measured == expected
        else:
            assert toy.off(mine, solo) < 1e-8, visit
            assert measured == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("nano_batches", "seed"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_job_ends_as_alone(plan: Plan, nano_batches: int, seed: int, ranks: Ranks, tmp_path: Path) -> None:
    run = Run(plan=plan, nano_batches=nano_batches, checkpointing=plan.ranks == 4 and nano_batches == 3)
    mix = group_work.mix_of(plan.lanes, seed + 10 * plan.ranks + plan.shards, count=4)
    assert ranks.run(plan.ranks, group_work.train, run, tmp_path, mix) == [[]] * plan.ranks
    equal(tmp_path, mix, run)

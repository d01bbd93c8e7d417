"""The families of models that several ranks hold together: biases, tied heads, windows, norms of heads, odd orders."""

from pathlib import Path

import group_work
import pytest
import toy
from group_work import FAMILIES, Run, Visit
from ranks import RankError, Ranks

from tlora.plan import Plan

PLANS = {"2 shards": Plan(shards=2), "2 shards of 2 parts": Plan(shards=2, tensor=2)}
CHANGES = {"adapter": {"rank": 5, "alpha": 9, "targets": "all-linear", "dropout": 0.2}, "steps": 3, "eval_every": 2}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_ends_as_alone(family: str, plan: Plan, ranks: Ranks, tmp_path: Path) -> None:
    run = Run(plan=plan, family=family, nano_batches=2, checkpointing=plan.ranks == 4)
    mix = [Visit(f"j{lane}", (lane,), CHANGES, {"count": 9, "seed": lane, "held_out": 2}) for lane in range(plan.lanes)]
    if family == "opt" and plan.tensor > 1:
        with pytest.raises(RankError, match="ModelError: opt: transformers' plan for"):
            ranks.run(plan.ranks, group_work.train, run, tmp_path, mix)
        return
    assert ranks.run(plan.ranks, group_work.train, run, tmp_path, mix) == [[]] * plan.ranks
    lone = group_work.super_model(Run(plan=Plan(), family=family))
    for visit in mix:
        toy.alone(lone, toy.job(tmp_path, visit.name, **visit.changes), toy.data(**visit.data))
        (mine, measured), (solo, expected) = (
            group_work.ended(tmp_path, name) for name in (visit.name, f"{visit.name}-alone")
        )
        assert toy.off(mine, solo) < 1e-8
        assert measured == pytest.approx(expected, rel=1e-8)


def test_ranks_that_do_not_divide_a_base_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="ModelError: llama: heads and widths, all multiples of 2"):
        ranks.run(4, group_work.train, Run(plan=Plan(tensor=4), config={}), tmp_path, [])

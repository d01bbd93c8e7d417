"""The promise over several ranks: whatever plan holds the base, every job ends as it would have alone."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import group_work
import pytest
import torch
import toy
from group_work import Run, Visit
from ranks import RankError, Ranks

from tlora.plan import Plan
from tlora.supermodel import SuperModel

COUNTS = {
    "alone": (1, 1, 1), "2 replicas": (2, 1, 1), "2 shards": (1, 2, 1), "2 parts": (1, 1, 2),
    "4 replicas": (4, 1, 1), "4 shards": (1, 4, 1), "4 parts": (1, 1, 4),
    "2 replicas of 2 shards": (2, 2, 1), "2 replicas of 2 parts": (2, 1, 2), "2 shards of 2 parts": (1, 2, 2),
}  # fmt: skip
PLANS = {name: Plan(replicas=r, shards=s, tensor=t) for name, (r, s, t) in COUNTS.items()}
TWO = {name: PLANS[name] for name in ("2 replicas", "2 shards", "2 parts")}
CHANGES = {"adapter": {"rank": 4, "alpha": 8, "targets": "all-linear", "dropout": 0.1}, "steps": 4}


@cache
def lone_model(dtype: torch.dtype, deterministic: bool) -> SuperModel:
    return group_work.super_model(Run(plan=PLANS["alone"], dtype=dtype, deterministic=deterministic))


def equal(folder: Path, mix: list[Visit], run: Run, *, to_the_bit: bool = False) -> None:
    """Every job that was not cancelled ended as it does alone."""
    lone = lone_model(run.dtype, run.deterministic)
    for visit in mix:
        if visit.cancelled >= 0 and not (folder / visit.name / "adapter_config.json").exists():
            continue
        spec = toy.job(folder, visit.name, **visit.changes)
        toy.alone(lone, spec, toy.data(**visit.data))
        mine, measured = group_work.ended(folder, visit.name)
        solo, expected = group_work.ended(folder, f"{visit.name}-alone")
        if to_the_bit:
            assert torch.equal(mine, solo), visit
            assert measured == expected
        else:
            assert toy.off(mine, solo) < 1e-8, visit
            assert measured == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("nano_batches", "seed"), [(1, 1), (3, 2)])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_job_ends_as_alone(plan: Plan, nano_batches: int, seed: int, ranks: Ranks, tmp_path: Path) -> None:
    """Random jobs of ranks 1–256: whole or split, moved, late, cancelled."""
    run = Run(plan=plan, nano_batches=nano_batches, checkpointing=plan.ranks == 4 and nano_batches == 3)
    mix = group_work.mix_of(plan.lanes, seed + 10 * plan.ranks + plan.shards, count=4)
    assert ranks.run(plan.ranks, group_work.train, run, tmp_path, mix) == [[]] * plan.ranks
    equal(tmp_path, mix, run)


@pytest.mark.parametrize("plan", [PLANS["4 replicas"], PLANS["2 replicas of 2 shards"]], ids=str)
@pytest.mark.parametrize("nano_batches", [1, 3])
def test_whole_jobs_keep_their_bits(plan: Plan, nano_batches: int, ranks: Ranks, tmp_path: Path) -> None:
    """Seven jobs on four ranks, moved between them mid-run: no sum's order changes. Replicas keep their own ticks."""
    run = Run(plan=plan, dtype=torch.float32, deterministic=True, nano_batches=nano_batches, together=False, budget=96)
    mix = [
        Visit(
            f"j{number}",
            (number % 4,),
            {
                "adapter": {"rank": 1 + number, "dropout": 0.2, "targets": group_work.TARGETS[number % 5]},
                "steps": 3 + number % 3,
                "eval_every": number % 3,
            },
            {"count": 3 + number, "seed": number, "held_out": 2},
            moves={2: ((number + 1) % 4,)} if number % 2 else {},
        )
        for number in range(7)
    ]
    assert ranks.run(4, group_work.train, run, tmp_path, mix) == [[]] * 4
    equal(tmp_path, mix, run, to_the_bit=True)


@pytest.mark.parametrize("rank", [1, 256])
@pytest.mark.parametrize("plan", ["4 replicas", "4 shards"])
def test_one_job_on_four_ranks(plan: str, rank: int, ranks: Ranks, tmp_path: Path) -> None:
    """Five sequences a step, then two: a rank's part may be empty."""
    changes = {**CHANGES, "adapter": {"rank": rank, "targets": "all-linear"}, "batch_size": 5, "eval_every": 2}
    mix = [Visit("one", (0, 1, 2, 3), changes, {"count": 7, "held_out": 3})]
    assert ranks.run(4, group_work.train, Run(plan=PLANS[plan]), tmp_path, mix) == [[]] * 4
    equal(tmp_path, mix, Run(plan=PLANS[plan]))


@pytest.mark.parametrize("plan", ["4 shards", "2 shards of 2 parts", "4 replicas"])
def test_a_rank_with_no_jobs(plan: str, ranks: Ranks, tmp_path: Path) -> None:
    mix = [Visit("only", (0,), CHANGES, {"count": 6, "held_out": 2})]
    assert ranks.run(4, group_work.train, Run(plan=PLANS[plan]), tmp_path, mix) == [[]] * 4
    equal(tmp_path, mix, Run(plan=PLANS[plan]))


@pytest.mark.parametrize("plan", TWO.values(), ids=TWO)
def test_exact_matches_are_counted_over_all_ranks(plan: Plan, ranks: Ranks, tmp_path: Path) -> None:
    changes = {**CHANGES, "objective": "exact_match", "eval_every": 1, "batch_size": 2, "optim": {"lr": 0.1}}
    mix = [Visit("one", tuple(range(plan.lanes)), changes, {"count": 6, "held_out": 4, "low": 2, "high": 3})]
    assert ranks.run(2, group_work.train, Run(plan=plan), tmp_path, mix) == [[]] * 2
    equal(tmp_path, mix, Run(plan=plan))


@pytest.mark.parametrize("plan", TWO.values(), ids=TWO)
def test_one_divisor_over_all_ranks(plan: Plan, ranks: Ranks, tmp_path: Path) -> None:
    """Fault 2: a step's long sequences on one rank, its short ones on another, then none on that."""
    mix = [
        Visit("uneven", tuple(range(plan.lanes)), {**CHANGES, "batch_size": 2}, {"count": 5, "low": 2, "high": 60}),
        Visit("beside", (plan.lanes - 1,), CHANGES, {"count": 8, "seed": 3}),
    ]
    assert ranks.run(2, group_work.train, Run(plan=plan, budget=64), tmp_path, mix) == [[]] * 2
    equal(tmp_path, mix, Run(plan=plan))


@pytest.mark.parametrize("plan", [TWO["2 replicas"], TWO["2 shards"]], ids=["2 replicas", "2 shards"])
def test_no_rows_of_a_job_on_a_rank(plan: Plan, ranks: Ranks, tmp_path: Path) -> None:
    """Fault 15: A's only sample on rank 0, B's on rank 1; then both split, with one sequence a step."""
    mix = [
        Visit("a", (0,), CHANGES, {"count": 1}),
        Visit("b", (1,), CHANGES, {"count": 1, "seed": 1}),
        Visit("both", (0, 1), {**CHANGES, "batch_size": 1}, {"count": 3, "seed": 2}),
    ]
    assert ranks.run(2, group_work.train, Run(plan=plan), tmp_path, mix) == [[]] * 2
    equal(tmp_path, mix, Run(plan=plan))


HANGS = {
    "unequal tick counts": ({"steps": 1}, {"steps": 8}, {}, {}),
    "adapters that start at a later layer": ({"adapter": {"rank": 4, "targets": ".*layers.1.*_proj"}}, {}, {}, {}),
    "one rank evaluating": ({"eval_every": 1}, {"eval_every": 0}, {"held_out": 9}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGS)
@pytest.mark.parametrize("plan", [(1, 2, 1), (1, 2, 2)], ids=["2 shards", "2 shards of 2 parts"])
def test_ranks_under_fsdp_do_not_wait_in_vain(
    case: str, plan: tuple[int, int, int], ranks: Ranks, tmp_path: Path
) -> None:
    one, other, its_data, others_data = HANGS[case]
    run = Run(plan=Plan(replicas=plan[0], shards=plan[1], tensor=plan[2]), budget=40)
    mix = [
        Visit("one", (0,), {**CHANGES, **one}, {"count": 5, **its_data}),
        Visit("other", (1,), {**CHANGES, **other}, {"count": 11, "seed": 4, **others_data}),
    ]
    assert ranks.run(run.plan.ranks, group_work.train, run, tmp_path, mix) == [[]] * run.plan.ranks
    equal(tmp_path, mix, run)


def test_slices_beside_each_other_have_gradients_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    run = Run(plan=PLANS["2 parts"], nano_batches=4, beside=True, budget=200)
    mix = group_work.mix_of(1, 77, count=3)
    assert ranks.run(2, group_work.train, run, tmp_path, mix) == [[]] * 2
    equal(tmp_path, mix, run)


@pytest.mark.parametrize("plan", ["2 shards", "2 parts", "2 shards of 2 parts"])
def test_gates_are_fused_on_spread_bases_too(plan: str, ranks: Ranks, tmp_path: Path) -> None:
    run = Run(plan=PLANS[plan], nano_batches=2, budget=200)
    mix = [Visit(f"j{lane}", (lane,), CHANGES, {"count": 6, "seed": lane}) for lane in range(run.plan.lanes)]
    assert ranks.run(run.plan.ranks, group_work.train_with_gates, run, tmp_path, mix) == [(2, [])] * run.plan.ranks
    equal(tmp_path, mix, run)


def test_a_group_changes_its_plan(ranks: Ranks, tmp_path: Path) -> None:
    """Grown, sharded, split, shrunk: through the jobs' saved states, each time by processes that keep nothing."""
    changes = {**CHANGES, "steps": 12, "eval_every": 3}
    mix = [
        Visit("a", (0,), changes, {"count": 7, "held_out": 2}),
        Visit("b", (0,), {**changes, "adapter": {"rank": 40, "dropout": 0.5}}, {"count": 9, "seed": 1}),
    ]
    for number, name in enumerate(["alone", "2 replicas", "4 shards", "2 shards of 2 parts", "2 parts", "alone"]):
        plan = PLANS[name]
        lanes = [tuple(range(plan.lanes)), (plan.lanes - 1,)]
        here = [replace(visit, lanes=where) for visit, where in zip(mix, lanes, strict=True)]
        steps = ranks.run(plan.ranks, group_work.go_on, Run(plan=plan), tmp_path, here, 2 if number < 5 else 99)
        assert sorted(steps[0]) == ([] if number == 5 else [2 * number + 2])
    equal(tmp_path, mix, Run(plan=PLANS["alone"]))


@pytest.mark.parametrize("plan", ["2 shards", "2 parts", "2 shards of 2 parts"])
def test_half_precision_with_wide_masters(plan: str, ranks: Ranks, tmp_path: Path) -> None:
    """Kernels read a copy of the master in the base's precision; close to what it gives on one rank."""
    run = Run(plan=PLANS[plan], dtype=torch.bfloat16)
    changes = {**CHANGES, "steps": 8, "schedule": {"name": "constant"}, "optim": {"lr": 1e-2, "max_grad_norm": 0.3}}
    mix = [Visit(f"j{lane}", (lane,), changes, {"count": 16, "seed": lane}) for lane in range(run.plan.lanes)]
    assert ranks.run(run.plan.ranks, group_work.train, run, tmp_path, mix) == [[]] * run.plan.ranks
    for visit in mix:
        spec = toy.job(tmp_path, visit.name, **visit.changes)
        toy.alone(lone_model(torch.bfloat16, False), spec, toy.data(**visit.data))
        mine, measured = group_work.ended(tmp_path, visit.name)
        _, expected = group_work.ended(tmp_path, f"{visit.name}-alone")
        assert mine.dtype is torch.float32
        assert measured == pytest.approx(expected, rel=3e-2)
        assert measured[-1] < measured[0]


def test_a_member_that_other_ranks_do_not_have_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Before anything of it is held: a job over lanes whose ranks do not tick together."""
    mix = [Visit("a", (0, 1), CHANGES, {"count": 4})]
    with pytest.raises(RankError, match=r"StateError: job a: lanes .* want a circle of their ranks"):
        ranks.run(2, group_work.train, Run(plan=PLANS["2 replicas"], together=False), tmp_path, mix)
    assert not (tmp_path / "a").exists()

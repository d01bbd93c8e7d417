"""What ranks say to each other: nothing for adapters that live on one, one vector a step for split ones. A rank that is
gone is found out in time, and a job that fails on several ranks fails alone."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import group_work
import loading
import pytest
import reductions
import torch
import toy
from group_work import CONFIG, Run, Visit
from ranks import Ranks

from tlora.checkpoint import STATE
from tlora.plan import Plan
from tlora.planner import EstimatedCosts, Machine, RankMemory
from tlora.spec import AdapterSpec

CHANGES = {"adapter": {"rank": 8, "targets": "all-linear"}, "steps": 3, "save_every": 99}
DATA = {"count": 4}
MESSAGE = ("allgather_", (6 + 2 * 64) * 8)
LAYERS, HIDDEN, SIZE = 2, 32, 8
Sent = list[tuple[str, int]]


def sent(ranks: Ranks, folder: Path, run: Run, mix: list[Visit], ticks: int = 2) -> list[list[Sent]]:
    """By rank and tick."""
    return ranks.run(run.plan.ranks, group_work.count_bytes, run, folder, mix, ticks)


def whole(rank: int, name: str = "a", lane: int = 0) -> Visit:
    return Visit(name, (lane,), {**CHANGES, "adapter": {"rank": rank, "targets": "all-linear"}}, DATA)


def test_replicas_of_whole_jobs_say_nothing(ranks: Ranks, tmp_path: Path) -> None:
    mix = [whole(8, "a", 0), whole(8, "b", 1)]
    assert sent(ranks, tmp_path, Run(plan=Plan(replicas=2), together=False), mix) == [[[], []]] * 2


def test_shards_of_whole_jobs_say_what_the_base_does(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever the adapters' ranks: one message, and each layer gathered once each way for all slices."""
    said = [
        sent(
            ranks,
            tmp_path / str(rank),
            Run(plan=Plan(shards=2), nano_batches=slices),
            [whole(rank), whole(rank, "b", 1)],
        )
        for rank, slices in ((1, 1), (64, 1), (64, 3))
    ]
    assert said[0] == said[1] == said[2]
    for each in said[0]:
        for tick in each:
            assert tick[0] == MESSAGE
            assert [name for name, _ in tick[1:]] == ["_allgather_base_"] * (2 + 2 * LAYERS)  # embedding, head, layers


@pytest.mark.parametrize(("budget", "ticks"), [(64, 2), (24, 6)], ids=["a tick a step", "several"])
@pytest.mark.parametrize("plan", [Plan(replicas=2), Plan(replicas=4), Plan(shards=2)], ids=str)
def test_a_split_job_is_one_vector_a_step(plan: Plan, budget: int, ticks: int, ranks: Ranks, tmp_path: Path) -> None:
    lanes = tuple(range(plan.lanes))
    visit = Visit("a", lanes, {**CHANGES, "steps": 99}, DATA)
    ((size, _),) = ranks.run(1, group_work.layout_sizes, Run(plan=Plan()), tmp_path / "size", whole(8))
    vector = -(-(size + 4) // plan.ranks) * plan.ranks * SIZE  # with the losses of its four sequences
    for each in sent(ranks, tmp_path, Run(plan=plan, budget=budget), [visit], ticks):
        steps = {tuple(part for part in tick if part != MESSAGE and part[0] != "_allgather_base_") for tick in each}
        step = ("alltoall_base_", vector), ("allgather_", vector // plan.ranks)
        assert steps == ({step} if budget == 64 or plan.replicas == 4 else {step, ()})  # four have a sequence each


def test_vectors_are_summed_in_the_order_of_ranks(ranks: Ranks) -> None:
    """To the bit, on every rank, each time."""
    size = 101
    right, *others = reductions.vectors(4, size)
    for other in others:
        right = right + other
    other_order = sum(reductions.vectors(4, size)[::-1])
    assert not torch.equal(right, other_order)
    for _ in range(2):
        for mine in ranks.run(4, reductions.summed, Run(plan=Plan(replicas=4)), size):
            assert torch.equal(torch.tensor(mine), right)


def test_a_job_that_is_through_is_summed_while_others_compute(ranks: Ranks, tmp_path: Path) -> None:
    """Split ones go first; each is summed as soon as its last slice is sent, in the same order on both ranks."""
    mix = [Visit(name, (0, 1), CHANGES, DATA) for name in "ab"] + [whole(8, "c", 0), whole(8, "d", 1)]
    run = Run(plan=Plan(replicas=2), nano_batches=4, budget=999)
    for seen in ranks.run(2, reductions.order, run, tmp_path, mix):
        assert seen.count("slice") == 4
        first, second = (seen.index(f"sum of {name}") for name in "ab")
        assert first < second < len(seen) - 1
        assert seen[-1] == "slice"


def test_tensor_parallel_says_what_the_base_does_and_sums_whole_factors_once_a_step(
    ranks: Ranks, tmp_path: Path
) -> None:
    """A tick is the base's own four reductions a layer, whatever the adapters. Factors that every rank has whole (A of
    column-split linears, B of row-split ones) have their gradients summed once a step, with one number for the norm."""
    plan = Plan(tensor=2)
    for rank in (1, 64):
        folder = tmp_path / str(rank)
        ((_, partial), _) = ranks.run(2, group_work.layout_sizes, Run(plan=plan), folder / "size", whole(rank))
        run = Run(plan=plan, budget=24)
        rows = [len(sequence) for sequence in toy.data(**DATA).train]
        assert partial >= rank * LAYERS * (5 * HIDDEN + 2 * HIDDEN)
        for each in sent(ranks, folder, run, [whole(rank)], ticks=6):
            steps = []
            for tick in each:
                reductions = [size for name, size in tick if name == "allreduce_"]
                assert len(reductions) == 4 * LAYERS
                assert len(set(reductions)) == 1
                assert reductions[0] in {sum(part) * HIDDEN * SIZE for part in _runs(rows)}
                steps.append([part for part in tick if part[0] != "allreduce_" and part != MESSAGE])
            vector = [("alltoall_base_", partial * SIZE), ("allgather_", partial * SIZE // 2)]
            assert {tuple(step) for step in steps} == {(), (*vector, ("alltoall_base_", 16), ("allgather_", 8))}


def test_neighbouring_slices_exchange_through_groups_of_their_own(ranks: Ranks, tmp_path: Path) -> None:
    """Through one, a slice's reduction would wait for another's next. The same order on both ranks."""
    run = Run(plan=Plan(tensor=2), nano_batches=2)
    one, other = ranks.run(2, group_work.groups_used, run, tmp_path, [whole(8)])
    assert one == other
    names = sorted(set(one))
    assert [one.count(name) for name in names] == [4 * LAYERS] * 2
    assert one[: 2 * LAYERS * 2 : 2] == one[1 : 2 * LAYERS * 2 : 2]  # attention and MLP of a slice: a layer, both ways


def test_the_controller_is_not_told_of_the_first_tick_of_a_count(ranks: Ranks, tmp_path: Path) -> None:
    """It compiles: what it costs is not what the count costs."""
    visit = Visit("a", (0,), {**CHANGES, "batch_size": 8, "steps": 99}, {"count": 8})
    run = Run(plan=Plan(tensor=2), nano_batches=0)
    one, other = ranks.run(2, group_work.judged, run, tmp_path, [visit], 16)
    assert one == other
    counts = [count for count, _ in one]
    assert len(set(counts)) > 2
    assert [is_told for _, is_told in one] == [count in counts[:at] for at, count in enumerate(counts)]


def test_what_ticks_without_a_step_took_is_told_with_the_next_step(ranks: Ranks, tmp_path: Path) -> None:
    """Only there has the host waited for the device."""
    visit = Visit("a", (0,), {**CHANGES, "steps": 99}, {"count": 8})
    run = Run(plan=Plan(tensor=2), nano_batches=0, budget=24)
    for seen in ranks.run(2, group_work.costs_told, run, tmp_path, [visit], 8):
        assert {is_step for _, _, is_step in seen} == {True, False}
        ahead = 0
        for told, took, is_step in seen:
            ahead += took
            assert told == (ahead if is_step else 0)
            ahead *= not is_step


def test_a_tick_that_is_broken_off_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    """A job that is in several slices has a gradient for each, until all are through."""
    visit = whole(8)
    run = Run(plan=Plan(tensor=2), nano_batches=2, beside=True)
    ranks.run(2, group_work.break_off, run, tmp_path, [visit])
    _equal(tmp_path, visit)


def _runs(rows: list[int]) -> list[list[int]]:
    """Any sequences, as any tick may hold."""
    parts: list[list[int]] = [[]]
    for length in rows:
        parts += [[*part, length] for part in parts]
    return parts


@pytest.mark.parametrize(("count", "layers"), [(2, 24), (4, 24)])
def test_a_shard_and_a_layer_are_all_that_a_rank_holds(count: int, layers: int, ranks: Ranks) -> None:
    run = Run(plan=Plan(shards=count), config={**CONFIG, "num_hidden_layers": layers})
    base = sum(
        parameter.numel()
        for parameter in group_work.super_model(Run(plan=Plan(), config=run.config)).model.parameters()
    )
    for peak, kept, layer in ranks.run(count, group_work.peak_bytes, run):
        assert kept == pytest.approx(base * SIZE / count, rel=0.02)
        assert peak == pytest.approx(kept + layer, rel=0.15)
        assert peak == pytest.approx(kept + 2 * layer, rel=0.02)  # one in use, and what the next one comes in
        expected = planned(run)
        assert expected.base == pytest.approx(kept, rel=0.02)
        assert expected.base + expected.gathered == pytest.approx(peak, rel=0.02)


def test_under_shards_each_rank_holds_its_own_jobs_adapters_whole(ranks: Ranks) -> None:
    """Two on the first rank, one on the other: base ÷ ranks + a layer + those."""
    run, jobs = Run(plan=Plan(shards=2), config={**CONFIG, "num_hidden_layers": 24}), (16, 8, 32)
    alone = ranks.run(2, group_work.peak_bytes, run)
    for rank, (peak, kept, layer) in enumerate(ranks.run(2, group_work.peak_bytes, run, jobs)):
        outline = group_work.super_model(Run(plan=Plan(), config=run.config)).outline
        specs = [AdapterSpec(rank=each, alpha=each, targets="all-linear") for each in jobs[rank::2]]
        adapters = sum(4 * SIZE * outline.lay_out(spec).size for spec in specs)  # weights, gradient and two moments
        assert adapters > 2 * layer
        assert kept == pytest.approx(alone[rank][1] + adapters, rel=0.02)
        assert peak == pytest.approx(kept + 2 * layer, rel=0.02)


def test_a_part_of_every_product_is_all_that_a_rank_holds(ranks: Ranks) -> None:
    """What `tlora check --gpus` says, too."""
    run = Run(plan=Plan(tensor=2), config={**CONFIG, "num_hidden_layers": 8})
    for _, kept, _ in ranks.run(2, group_work.peak_bytes, run):
        assert planned(run).base == pytest.approx(kept, rel=0.05)


def planned(run: Run) -> RankMemory:
    """The estimate for a plan."""
    outline = group_work.super_model(Run(plan=Plan(), config=run.config)).outline
    machine = Machine(gpus=run.plan.ranks)
    return EstimatedCosts(outline=outline, layouts=[], machine=machine, rows=1, dtype=run.dtype).memory(run.plan)


@pytest.mark.parametrize(
    ("plan", "work"),
    [
        (Plan(replicas=2), group_work.with_full_disk),
        (Plan(shards=2), group_work.with_full_disk),
        (Plan(tensor=2), group_work.with_full_disk),
        (Plan(replicas=2), group_work.with_late_failures),
    ],
    ids=["replicas", "shards", "tensor", "late"],
)
def test_a_full_disk_ends_a_job_on_all_its_ranks(plan: Plan, work: Any, ranks: Ranks, tmp_path: Path) -> None:
    """Its lead alone could not write; the neighbours' steps go on, and their vectors are those they have alone."""
    lanes = tuple(range(plan.lanes))
    mix = [
        Visit("full", lanes, {**CHANGES, "steps": 9, "save_every": 1}, {"count": 12}),
        Visit("beside", lanes, {**CHANGES, "steps": 6}, {"count": 9, "seed": 1}),
    ]
    failed = ranks.run(2, work, Run(plan=plan), tmp_path, mix, "full", 2)
    assert all("No space left on device" in reason for (reason,) in failed)
    _equal(tmp_path, mix[1])


@pytest.mark.parametrize("plan", [Plan(replicas=2), Plan(shards=2), Plan(tensor=2)], ids=str)
def test_a_job_that_fails_on_one_rank_leaves_the_others_too(plan: Plan, ranks: Ranks, tmp_path: Path) -> None:
    lanes = tuple(range(plan.lanes))
    mix = [
        Visit("bad", lanes, {**CHANGES, "steps": 9}, {"count": 12}),
        Visit("beside", lanes, {**CHANGES, "steps": 6}, {"count": 9, "seed": 1}),
    ]
    failed = ranks.run(2, group_work.only_on_lead, Run(plan=plan), tmp_path, mix, "bad")
    assert failed == [["of itself"], ["it failed on another rank of its group"]]
    _equal(tmp_path, mix[1])


@pytest.mark.parametrize("plan", [Plan(replicas=2), Plan(shards=2), Plan(tensor=2)], ids=str)
def test_a_truncated_state_is_refused_by_all_its_ranks(plan: Plan, ranks: Ranks, tmp_path: Path) -> None:
    """Fault 14: before it joins any reduction."""
    lanes = tuple(range(plan.lanes))
    mix = [Visit("cut", lanes, CHANGES, DATA), Visit("beside", lanes, CHANGES, {"count": 9, "seed": 1})]
    (tmp_path / "cut" / STATE).parent.mkdir(parents=True)
    (tmp_path / "cut" / STATE).write_bytes(b"\0" * 100)
    said = ranks.run(2, group_work.resume_damaged, Run(plan=plan), tmp_path, mix)
    assert [kind for kind, _ in said] == ["CheckpointError"] * 2
    assert said[0] == said[1]
    _equal(tmp_path, mix[1])


def _equal(folder: Path, visit: Visit) -> None:
    spec = toy.job(folder, visit.name, **visit.changes)
    toy.alone(group_work.super_model(Run(plan=Plan())), spec, toy.data(**visit.data))
    mine, solo = (group_work.ended(folder, name)[0] for name in (visit.name, f"{visit.name}-alone"))
    assert toy.off(mine, solo) < 1e-8


@pytest.mark.parametrize("how", ["dies", "sleeps"])
@pytest.mark.parametrize("plan", [Plan(replicas=2), Plan(shards=2), Plan(tensor=2)], ids=str)
def test_a_rank_that_is_gone_is_found_out_in_time(plan: Plan, how: str, tmp_path: Path) -> None:
    """Within the timeout; then the job goes on from its save on the rank that is left, and ends as alone."""
    pool = Ranks(2)
    lanes = tuple(range(plan.lanes))
    changes = {**CHANGES, "steps": 6, "save_every": 1, "batch_size": 2}
    mix = [Visit("a", lanes, changes, {"count": 9, "held_out": 2})]
    try:
        run = Run(plan=plan, timeout_s=2.0)
        ((kind, text, seconds),) = pool.run(2, group_work.hang, run, 1, how, tmp_path, mix, asked=1)
        assert kind == "GroupError"
        assert "go on from their last saves" in text
        assert seconds < 2 * 2.0 + 1.0
    finally:
        pool.close()
    pool = Ranks(1)
    try:
        here = [Visit("a", (0,), changes, {"count": 9, "held_out": 2})]
        assert pool.run(1, group_work.go_on, Run(plan=Plan()), tmp_path, here, 99) == [[]]
    finally:
        pool.close()
    _equal(tmp_path, mix[0])


def test_loading_may_take_longer_than_a_collective(ranks: Ranks) -> None:
    """And meanwhile the ranks that are done answer the scheduler: a thread of theirs asks the same store."""
    run = Run(plan=Plan(shards=2), timeout_s=1.0)
    for failure, longest_s in ranks.run(2, loading.loads_slowly, run, 1, 3.0, 60.0):
        assert not failure
        assert longest_s < 1.0


def test_a_rank_that_loads_for_ever_is_found_out(ranks: Ranks) -> None:
    run = Run(plan=Plan(shards=2), timeout_s=0.5)
    (failure, _), _ = ranks.run(2, loading.loads_slowly, run, 1, 3.0, 1.0)
    assert "loading between ranks (0, 1) failed" in failure
    assert "within 1 s" in failure


def test_a_talk_is_held_behind_a_tick_that_all_agree_on(ranks: Ranks) -> None:
    assert ranks.run(2, group_work.talks, Run(plan=Plan(shards=2)), [7, 9]) == [[7, 9, 9, 9]] * 2


def test_a_lone_process_has_no_ranks() -> None:
    code = (
        "import tlora.trainer, sys; print([name for name in sys.modules if name in ('tlora.parallel', 'tlora.stack')])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"

"""Places of ranks in a plan, parts of a step, and what a message carries."""

import pytest
import torch
import toy
from hypothesis import given
from hypothesis import strategies as st

from tlora.adapter import AdapterState
from tlora.circle import MOST_SHARED, Message, number_of
from tlora.job import JobRecord
from tlora.plan import Plan
from tlora.resident import Phase, ResidentJob

PLANS = st.builds(Plan, replicas=st.integers(1, 4), shards=st.integers(1, 4), tensor=st.integers(1, 4))


@given(PLANS)
def test_every_rank_has_one_place(plan: Plan) -> None:
    lanes = [plan.ranks_of([lane]) for lane in range(plan.lanes)]
    assert [rank for ranks in lanes for rank in ranks] == list(range(plan.ranks))
    assert all(plan.lane_of(rank) == lane for lane, ranks in enumerate(lanes) for rank in ranks)
    replicas = {plan.replica_ranks(rank) for rank in range(plan.ranks)}
    assert len(replicas) == plan.replicas
    assert sorted(rank for replica in replicas for rank in replica) == list(range(plan.ranks))


NUMBERS = st.frozensets(st.integers(1, 2**32), max_size=MOST_SHARED)


@given(st.tuples(*[st.integers(0, 2**40)] * 6), NUMBERS, NUMBERS)
def test_a_message_comes_back(numbers: tuple[int, ...], through: frozenset[int], lost: frozenset[int]) -> None:
    message = Message(*numbers, through, lost)
    sent = message.numbers()
    assert len(sent) == 6 + 2 * MOST_SHARED
    assert Message.of(torch.tensor(sent, dtype=torch.int64).tolist()) == message


def test_more_losses_than_a_message_holds_are_said_in_several() -> None:
    lost = frozenset(range(1, MOST_SHARED + 10))
    numbers = Message(0, 0, 0, 0, 0, 0, lost=lost).numbers()
    assert len(numbers) == 6 + 2 * MOST_SHARED
    assert len(lost - Message.of(numbers).lost) == 9


def test_numbers_of_jobs_are_never_nothing() -> None:
    assert number_of("") > 0
    assert number_of("a") != number_of("b")


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("phase", Phase)
def test_parts_of_a_step_are_all_of_it(count: int, phase: Phase, tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Each sequence on one rank, with the counters, the weight and the place that it has on one alone."""
    model, spec, data = toy.super_model(), toy.job(tmp_path, batch_size=5), toy.data(7, held_out=4)
    state = AdapterState(
        model.outline.lay_out(spec.adapter), spec.adapter, seed=0, device=model.device, dtype=model.dtype
    )

    def items(part: tuple[int, int]) -> list[object]:
        job = ResidentJob(spec, data, state, JobRecord("a"), per_sequence=False)
        job.part = part
        job.begin(phase, 0.0)
        assert len(job.losses) == (5 if phase is Phase.TRAINING else 4)
        assert job.step_tokens == sum(
            len(sequence) for sequence in (job.step_sequences(0) if phase is Phase.TRAINING else data.eval)
        )
        return list(job.take(len(job.pending_rows)))

    assert [item for index in range(count) for item in items((index, count))] == items((0, 1))

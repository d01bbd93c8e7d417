"""A job's place in its data: each epoch a shuffle of its own, the last batch short, nothing twice."""

from pathlib import Path

import pytest
import toy

from tlora.packing import rows_of
from tlora.resident import Phase, ResidentJob, digest
from tlora.trainer import Trainer


@pytest.fixture
def job(tmp_path: Path) -> ResidentJob:
    spec = toy.job(tmp_path, batch_size=4, steps=None, epochs=2.5)
    return Trainer(toy.super_model()).attach(spec, toy.data(9, held_out=3))


def test_each_epoch_is_a_shuffle_of_its_own(job: ResidentJob) -> None:
    assert (job.steps_per_epoch, job.num_steps) == (3, 8)
    epochs = [[row for step in range(3 * epoch, 3 * epoch + 3) for row in job.step_sequences(step)] for epoch in (0, 1)]
    orders = [[next(at for at, one in enumerate(job.data.train) if one is row) for row in epoch] for epoch in epochs]
    assert [sorted(order) for order in orders] == [list(range(9))] * 2
    assert orders[0] != orders[1]
    assert orders[0] != list(range(9))
    assert [len(job.step_sequences(step)) for step in range(8)] == [4, 4, 1, 4, 4, 1, 4, 4]


def test_a_step_is_laid_out_from_its_start(job: ResidentJob) -> None:
    job.take(2)
    job.begin(Phase.TRAINING, 0.0)
    items = job.take(4)
    assert job.is_through
    assert [item.position for item in items] == [0, 1, 2, 3]
    assert [item.counter for item in items] == [sum(len(other.sequence) for other in items[:at]) for at in range(4)]
    targets = sum(item.sequence.num_targets for item in items)
    assert {item.weight for item in items} == {1.0 / targets}
    job.begin(Phase.EVALUATING, 0.0)
    assert job.pending_rows == [rows_of(sequence, False) for sequence in job.data.eval]


def test_a_fingerprint_sees_every_token_and_every_target() -> None:
    assert digest(toy.data(3)) == digest(toy.data(3))
    changed = toy.data(3)
    changed.train[1].ids[0] += 1
    masked = toy.data(3)
    masked.train[1].is_target[-1] ^= True
    moved = toy.data_of(toy.data(3).train[:2], toy.data(3).train[2:])
    assert len({digest(data) for data in (toy.data(3), changed, masked, moved)}) == 4

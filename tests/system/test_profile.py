"""A profile taken on the spot: it foretells the ticks of the trainer that it was taken with, and is taken once."""

import json
from pathlib import Path

import pytest
import toy

from tlora.capacity import Capacity
from tlora.profiling import cached_profile


def test_a_profile_is_taken_once_and_fits_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy.super_model()
    path = cached_profile(model, tmp_path, lengths=(16, 64), counts=(1, 3))
    ticks = json.loads(path.read_text())["ticks"]
    assert [(tick["tokens"], tick["jobs"], tick["rank_sum"]) for tick in ticks] == [
        (16, 1, 16), (64, 1, 16), (48, 3, 48), (192, 3, 48), (64, 1, 2), (64, 1, 64)
    ]  # fmt: skip
    assert all(tick["tick_ms"] > 0.0 for tick in ticks)
    assert not model.residents
    (known,) = Capacity.load(path).models.values()
    assert known.tick_s(192, 3, 48, 64) > known.tick_s(16, 1, 16, 16) > 0.0
    monkeypatch.setattr("tlora.profiling.profile", None)
    assert cached_profile(model, tmp_path) == path

"""Cutting a tick: every sequence once, in order, in about equal parts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.nanobatch import cut


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 8))
def test_cut(lengths: list[int], count: int) -> None:
    items = list(enumerate(lengths))
    slices = cut(items, count, work=lambda item: float(item[1]))  # type: ignore[arg-type]
    assert [item for part in slices for item in part] == items
    assert len(slices) <= count
    assert all(slices)
    heaviest = max((sum(length for _, length in part) for part in slices), default=0)
    assert heaviest <= sum(lengths) / count + max(lengths, default=0)


@pytest.mark.parametrize(
    ("work", "want"),
    [([1, 1, 1, 1], [2, 2]), ([9, 1, 1, 1], [1, 3]), ([1, 1, 1, 9], [3, 1]), ([1], [1]), ([5, 5, 5], [2, 1])],
)
def test_even(work: list[int], want: list[int]) -> None:
    assert [len(part) for part in cut(work, 2, work=float)] == want  # type: ignore[arg-type]

"""The deal of a tick: within budget, nothing left that fits, in proportion to shares."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlora.dealing import Claim, deal

CLAIMS = st.lists(
    st.builds(
        Claim,
        share=st.floats(0.01, 100.0),
        lengths=st.lists(st.integers(1, 40), max_size=12),
        most=st.integers(1, 200),
        credit=st.floats(-200.0, 200.0),
    ),
    max_size=6,
)


@given(CLAIMS, st.integers(1, 200), st.integers(0, 10))
def test_a_tick_is_full_and_no_more(claims: list[Claim], budget: int, first: int) -> None:
    taken = deal(claims, budget, first)
    left = budget - sum(sum(claim.lengths[:count]) for claim, count in zip(claims, taken, strict=True))
    assert left >= 0
    for claim, count in zip(claims, taken, strict=True):
        assert count == len(claim.lengths) or claim.lengths[count] > left
        assert abs(claim.credit) <= claim.most


@given(CLAIMS, st.integers(1, 200))
def test_a_deal_repeats(claims: list[Claim], budget: int) -> None:
    copies = [Claim(claim.share, claim.lengths, claim.most, claim.credit) for claim in claims]
    assert deal(claims, budget) == deal(copies, budget)
    assert claims == copies


def served(shares: list[float], lengths: list[tuple[int, int]], budget: int, ticks: int = 400) -> list[float]:
    """Each job's part of all rows dealt, where every job always has more to send."""
    draw = np.random.default_rng(0)
    credits, rows = [0.0] * len(shares), [0] * len(shares)
    queues: list[list[int]] = [[] for _ in shares]
    for tick in range(ticks):
        for queue, (low, high) in zip(queues, lengths, strict=True):
            queue += draw.integers(low, high + 1, 200 - len(queue)).tolist()
        claims = [Claim(*parts) for parts in zip(shares, queues, map(sum, queues), credits, strict=True)]
        for at, count in enumerate(deal(claims, budget, tick)):
            rows[at] += sum(queues[at][:count])
            del queues[at][:count]
        credits = [claim.credit for claim in claims]
    return [count / sum(rows) for count in rows]


@pytest.mark.parametrize(
    ("shares", "lengths"),
    [
        ([1, 1], [(7, 7), (7, 7)]),
        ([1, 3], [(5, 10), (5, 10)]),
        ([1, 9], [(1, 1), (1, 1)]),
        ([1, 1, 2], [(1, 30), (5, 10), (20, 30)]),
        ([1, 1], [(1, 2), (60, 64)]),
        ([3, 1, 1, 1], [(64, 64), (5, 5), (5, 5), (5, 5)]),
    ],
    ids=str,
)
def test_rows_follow_shares(shares: list[float], lengths: list[tuple[int, int]]) -> None:
    want = [share / sum(shares) for share in shares]
    assert served(shares, lengths, budget=64) == pytest.approx(want, abs=0.01)


def test_one_job_alone_has_it_all() -> None:
    claim = Claim(share=0.001, lengths=[10, 20, 30, 40], most=100)
    assert deal([claim], 60) == [3]
    assert claim.credit == pytest.approx(0.0)


def test_turns_break_ties() -> None:
    assert [deal([Claim(1.0, [8], 8), Claim(1.0, [8], 8)], 8, first) for first in (0, 1, 2)] == [[1, 0], [0, 1], [1, 0]]


def test_what_did_not_fit_goes_first_next_time() -> None:
    long, short = Claim(1.0, [60], 60), Claim(1.0, [10] * 12, 120)
    assert deal([short, long], 64, first=0) == [6, 0]
    assert long.credit > 0
    assert deal([short, long], 64, first=0) == [0, 1]

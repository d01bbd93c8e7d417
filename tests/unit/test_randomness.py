"""Random choices of a job: frozen values, and what they depend on."""

import numpy as np
import pytest

from tlora.randomness import bits64, mix64, permutation, uniform


def test_golden_values() -> None:
    """Frozen: another value would move every held-out row, order and initial weight."""
    assert permutation(42, "order", 0, 12).tolist() == [3, 10, 1, 8, 2, 11, 5, 0, 6, 9, 7, 4]
    assert [int(word) for word in bits64(2**63 - 1, "init:a.b", 7, 2)] == [0x4AF6A5DC6E6E5819, 0xE086B76C02F3EFB2]
    assert (uniform(0, "x", 3) * 2**24).tolist() == [6554375, 6708293, 6127949]


def test_mix64_is_splitmix64() -> None:
    """First outputs of SplitMix64 from state 0, as its authors' code gives them."""
    gamma = 0x9E3779B97F4A7C15
    states = np.array([gamma * count % 2**64 for count in (1, 2, 3)], np.uint64)
    assert [int(word) for word in mix64(states)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_a_word_depends_on_its_index_alone() -> None:
    assert np.array_equal(bits64(1, "s", 0, 10), bits64(1, "s", 0, 1000)[:10])


@pytest.mark.parametrize("key", [(2, "s", 0), (1, "t", 0), (1, "s", 1), (1 + 2**62, "s", 0), (0, "s", 1)], ids=str)
def test_another_key_is_another_stream(key: tuple[int, str, int]) -> None:
    agree = np.unpackbits((bits64(1, "s", 0, 2000) ^ bits64(*key, 2000)).view(np.uint8)).mean()
    assert abs(agree - 0.5) < 5 * 0.5 / (2000 * 64) ** 0.5


@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_permutation_is_one(count: int) -> None:
    assert sorted(permutation(3, "order", 1, count)) == list(range(count))


def test_every_place_is_as_likely() -> None:
    firsts = np.bincount([permutation(seed, "order", 0, 8)[0] for seed in range(4000)], minlength=8)
    assert np.abs(firsts - 500).max() < 5 * 500**0.5


def test_uniform() -> None:
    drawn = uniform(5, "init", 100_000)
    assert drawn.dtype == np.float32
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert np.abs(np.histogram(drawn, 20, (0, 1))[0] - 5000).max() < 5 * 5000**0.5

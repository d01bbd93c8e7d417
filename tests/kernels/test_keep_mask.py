"""The dropout mask: a function of (seed, step, module, row of the job's step, column), the same on every device."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numeric import DEVICE, adapters_of

from tlora.data import TokenSequence
from tlora.kernels import routes
from tlora.kernels.lora_linear import lora_linear
from tlora.kernels.reference import keep_mask
from tlora.kernels.tiles import Site
from tlora.packing import Item, pack

BASE = {"seed": 12, "step": 3, "module": 99, "dropout": 0.5}
ROWS, COLUMNS = 1000, 400


def mask(rows: int = ROWS, columns: int = COLUMNS, **changes: float) -> torch.Tensor:
    return keep_mask(torch.arange(rows, device=DEVICE), columns, **{**BASE, **changes})


def scatter(x: int) -> int:
    x = (x + 0x9E3779B9) % 2**32
    x = (x ^ (x >> 16)) * 0x85EBCA6B % 2**32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 % 2**32
    return x ^ (x >> 16)


def is_kept(row: int, column: int, *, seed: int, step: int, module: int, dropout: float) -> bool:
    """The definition once more, in Python's integers."""
    state = 0
    for word in (seed % 2**32, seed >> 32, step, module):
        state = scatter((state + word) % 2**32)
    first = scatter((state + row) % 2**32)
    column = column * 0x9E3779B9 % 2**32
    column = (column ^ (column >> 16)) * 0x85EBCA6B % 2**32
    return (column * (scatter(first) | 1) + first) % 2**32 >= int(dropout * 2**32)


@pytest.mark.parametrize(
    "key",
    [
        BASE,
        {"seed": 2**63 - 1, "step": 0, "module": 2**32 - 1, "dropout": 0.1},
        {"seed": 2**32, "step": 2**40 + 7, "module": 0, "dropout": 0.999},
        {"seed": 0, "step": 0, "module": 0, "dropout": 1e-9},
    ],
    ids=str,
)
def test_definition(key: dict) -> None:
    rows = [0, 1, 62, 2**20, 2**31 + 5]
    got = keep_mask(torch.tensor(rows, device=DEVICE), 40, **key)
    assert got.tolist() == [[is_kept(row, column, **key) for column in range(40)] for row in rows]


@pytest.mark.parametrize(
    ("key", "bits"),
    [
        (BASE, [1634, 44699, 33858]),
        ({"seed": 2**63 - 1, "step": 812, "module": 0x9ABCDEF0, "dropout": 0.1}, [61422, 57327, 64891]),
    ],
)
def test_golden_values(key: dict, bits: list[int]) -> None:
    """Frozen: a resumed job must draw what it drew before, with any version and on any device."""
    assert [int("".join(map(str, row)), 2) for row in mask(3, 16, **key).int().tolist()] == bits


@pytest.mark.parametrize("dropout", [0.02, 0.1, 0.5, 0.9])
def test_rate(dropout: float) -> None:
    """Kept 1 − p of the whole, of each row and of each column, within five standard deviations, which do spread."""
    kept = mask(dropout=dropout).double()
    for mean, count in ((kept.mean(), ROWS * COLUMNS), (kept.mean(1), COLUMNS), (kept.mean(0), ROWS)):
        deviation = (mean - (1 - dropout)) / (dropout * (1 - dropout) / count) ** 0.5
        assert deviation.abs().max() < 5
        if deviation.dim():
            assert 0.85 < deviation.std() < 1.15
    assert keep_mask(torch.arange(50), 50, **{**BASE, "dropout": 0.0}).all()


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """How much oftener than by chance two masks agree, in standard deviations."""
    return ((a == b).double().mean().item() - 0.5) * 2 * a.numel() ** 0.5


@pytest.mark.parametrize(
    "change",
    [{"seed": 13}, {"seed": 12 + 2**32}, {"seed": 12 + 2**62}, {"step": 4}, {"module": 100}, {"seed": 3, "step": 12}],
    ids=str,
)
def test_another_key_is_another_mask(change: dict) -> None:
    assert abs(agreement(mask(), mask(**change))) < 5


def test_neighbouring_rows_and_columns_are_unrelated() -> None:
    kept = mask()
    for other in (kept.roll(1, 0), kept.roll(1, 1), kept.roll((1, 1), (0, 1)), kept.roll((1, -1), (0, 1))):
        assert abs(agreement(kept, other)) < 5


def test_it_follows_the_row_wherever_it_lies() -> None:
    whole, order = mask(), torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(keep_mask(order, COLUMNS, **BASE), whole[order])
    assert torch.equal(keep_mask(torch.arange(300, 700, device=DEVICE), 17, **BASE), whole[300:700, :17])


KEYS = (
    {"seed": 2**63 - 1, "step": 2**31 - 1, "module": 2**32 - 1, "dropout": 0.3, "first": 300},
    {"seed": 2**32 + 5, "step": 0, "module": 7, "dropout": 0.9, "first": 0},
)
"""`first`: the column that an input which is cut over several ranks begins with."""
SIZE = 136


@pytest.mark.parametrize("module", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["library", "tiled"])
def test_kernels_draw_the_same_mask(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype, module: int
) -> None:
    """Two linears without a base, of which one has B = I: with x and A of ones and dY = I, dX and dA are
    the mask times 1 / (1 − p); with A = I, Y is. SIZE rows, inputs, outputs and ranks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if DEVICE.type != "cuda":
        monkeypatch.setattr(routes, "is_fused", lambda tensor: True)
    key, eye = KEYS[module], torch.eye(SIZE, dtype=dtype, device=DEVICE)
    sites = []
    for index, other in enumerate(KEYS):
        b = eye.clone() if index == module else torch.zeros_like(eye)
        grad_a, grad_b = torch.zeros(2, SIZE, SIZE, device=DEVICE)
        dropout, seed, module_key, first = (other[name] for name in ("dropout", "seed", "module", "first"))
        ones = torch.ones_like(eye)
        sites.append({3: Site(ones, b.T, grad_a, grad_b.T, 1.0, dropout, seed, module_key, first)})
    sequence = TokenSequence(np.zeros(SIZE, np.int32), np.zeros(SIZE, bool))
    batch = pack([Item(3, key["step"], 0, 2**31 - 1 - SIZE, 1.0, sequence)], device=DEVICE)
    x = torch.ones_like(eye).requires_grad_()
    weight = eye.new_zeros(2 * SIZE, SIZE)
    adapters = adapters_of(*sites, widths=(SIZE, SIZE))
    want = keep_mask(batch.rows.tables.counters_T, SIZE, **key)
    assert 0.05 < want.double().mean() < 0.75
    dy = torch.cat([eye if index == module else torch.zeros_like(eye) for index in range(2)], 1)
    lora_linear(x, weight, None, batch.rows, adapters).backward(dy)
    assert torch.equal(x.grad != 0, want)
    assert torch.equal(sites[module][3].grad_a_RK != 0, want)
    sites[module][3].a_RK.copy_(eye)
    y = lora_linear(x, weight, None, batch.rows, adapters)
    assert torch.equal(y.split(SIZE, 1)[module] != 0, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["library", "tiled"])
def test_the_mask_of_a_lone_linear_is_drawn_in_its_product(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: torch.dtype
) -> None:
    """dX of one linear, in tiles that its job fills and in the last, which it does not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if DEVICE.type != "cuda":
        monkeypatch.setattr(routes, "is_fused", lambda tensor: True)
    key, eye = KEYS[0], torch.eye(SIZE, dtype=dtype, device=DEVICE)
    grad_a, grad_b = torch.zeros(2, SIZE, SIZE, device=DEVICE)
    dropout, seed, module, first = (key[name] for name in ("dropout", "seed", "module", "first"))
    site = Site(torch.ones_like(eye), eye.clone().T, grad_a, grad_b.T, 1.0, dropout, seed, module, first)
    sequence = TokenSequence(np.zeros(SIZE, np.int32), np.zeros(SIZE, bool))
    batch = pack([Item(3, key["step"], 0, 2**31 - 1 - SIZE, 1.0, sequence)], device=DEVICE)
    x = torch.ones_like(eye).requires_grad_()
    adapters = adapters_of({3: site}, widths=(SIZE,))
    lora_linear(x, torch.zeros_like(eye), None, batch.rows, adapters).backward(eye)
    assert torch.equal(x.grad != 0, keep_mask(batch.rows.tables.counters_T, SIZE, **key))


def test_columns_of_a_cut_input_are_those_of_the_whole() -> None:
    whole = mask()
    for first, end in ((0, 200), (200, 400), (13, 40)):
        assert torch.equal(mask(columns=end - first, first=first), whole[:, first:end])

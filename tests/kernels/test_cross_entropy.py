"""Loss and gradient of rows of logits, twin and kernel, against PyTorch's cross-entropy in float64."""

import pytest
import torch
import torch.nn.functional as F
from numeric import DEVICE, compare

from tlora.kernels import cross_entropy as op
from tlora.kernels import routes

# NaN is among the inputs, and the interpreter's NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
ROWS = 5
HEADS = {"plain": {}, "multiplied": {"multiplier": 0.25}, "capped": {"multiplier": 3.0, "softcap": 2.0}}
Named = dict[str, torch.Tensor]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(params=["twin", "kernel"], autouse=True)
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "is_fused", lambda tensor: request.param == "kernel")


def inputs(columns: int, dtype: torch.dtype = torch.float32, rows: int = ROWS, stride: int | None = None) -> Given:
    """Raw outputs (NaN between V and the row stride), targets with the first and the last column, weights."""
    draw = torch.Generator().manual_seed(columns)
    raw = torch.full((rows, stride or columns), torch.nan)
    raw[:, :columns] = torch.randn(rows, columns, generator=draw).mul_(3.0)
    targets = torch.randint(columns, (rows,), generator=draw)
    targets[0], targets[-1] = 0, columns - 1
    weights = torch.rand(rows, generator=draw).add_(0.5)
    return raw.to(DEVICE, dtype)[:, :columns], targets.to(DEVICE), weights.to(DEVICE)


def ours(given: Given, **options: float) -> Named:
    raw, targets, weights = given
    raw = raw.clone()
    return {"loss": op.cross_entropy(raw, targets, weights, **options), "d_raw": raw}


def oracle(given: Given, multiplier: float = 1.0, softcap: float | None = None) -> Named:
    raw, targets, weights = given
    raw = raw.double().requires_grad_()
    logits = raw * multiplier
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    losses = F.cross_entropy(logits, targets, reduction="none") * weights.double()
    losses.sum().backward()
    return {"loss": losses.detach(), "d_raw": raw.grad}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("columns", [2, 50, 1000, 33000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_pytorch(dtype: torch.dtype, columns: int, head: str) -> None:
    given = inputs(columns, dtype)
    out, want = ours(given, **HEADS[head]), oracle(given, **HEADS[head])
    compare(out, want, dtype)
    compare({"loss": out["loss"]}, {"loss": want["loss"]}, torch.float32)  # which it is made and returned in


@pytest.mark.parametrize(("columns", "stride"), [(8191, 8192), (8193, 8200), (16391, 16400), (7, 9)])
def test_a_padded_row_is_read_and_written_up_to_its_end(columns: int, stride: int) -> None:
    given = inputs(columns, stride=stride)
    whole = given[0].as_strided((ROWS, stride), (stride, 1))
    want = oracle(given)
    compare({"loss": op.cross_entropy(*given), "d_raw": given[0]}, want, torch.float32)
    assert whole[:, columns:].isnan().all()


def test_the_smallest_probabilities_of_a_wide_row_have_right_gradients() -> None:
    """By rms over the row they would drown in the target's."""
    given = inputs(33000)
    out, want = ours(given)["d_raw"], oracle(given)["d_raw"]
    assert ((out - want) / want).abs().max() < 1e-4


def test_large_logits_do_not_overflow() -> None:
    raw, *rest = inputs(1000)
    for given in ((raw * 1e4, *rest), (raw * 1e-4 - 1e6, *rest)):
        compare(ours(given), oracle(given), torch.float32)
        compare(ours(given, softcap=30.0), oracle(given, softcap=30.0), torch.float32)


def test_without_gradient_the_outputs_stay() -> None:
    given = inputs(1000)
    out = ours(given, with_gradient=False)
    assert torch.equal(out["d_raw"], given[0])
    assert torch.equal(out["loss"], ours(given)["loss"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_weights_come_in_either_precision(dtype: torch.dtype) -> None:
    raw, targets, weights = inputs(50)
    compare(ours((raw, targets, weights.to(dtype))), oracle((raw, targets, weights)), torch.float32)


def test_no_rows() -> None:
    assert op.cross_entropy(*(part[:0] for part in inputs(50))).shape == (0,)


@pytest.mark.parametrize("head", HEADS)
def test_rows_of_weight_zero_are_zero_whatever_they_hold(head: str) -> None:
    raw, targets, weights = inputs(1000)
    sound = ours((raw, targets, weights), **HEADS[head])
    idle = torch.tensor([1, 3], device=DEVICE)
    raw[1], raw[3], targets[idle], weights[idle] = torch.nan, torch.inf, -1, 0.0
    out = ours((raw, targets, weights), **HEADS[head])
    for name, part in out.items():
        assert not part[idle].any()
        assert torch.equal(part[[0, 2, 4]], sound[name][[0, 2, 4]])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("column", [0, 32999])
def test_a_broken_row_says_so_and_breaks_no_other(value: float, column: int) -> None:
    """−∞ is the logit of an impossible token: it breaks the row only where it is the target."""
    raw, targets, weights = inputs(33000)
    targets[2] = column
    sound = ours((raw, targets, weights))
    raw[2, column] = value
    out = ours((raw, targets, weights))
    assert not torch.isfinite(out["loss"][2])
    for name, part in out.items():
        assert torch.equal(part[[0, 1, 3, 4]], sound[name][[0, 1, 3, 4]])
    targets[2] = 17
    assert torch.isfinite(ours((raw, targets, weights))["loss"][2]) == (value == -torch.inf)


def test_bits_of_a_row_do_not_depend_on_the_others() -> None:
    given = inputs(33000, stride=33008)
    among = ours(given)
    for row in range(ROWS):
        alone = ours(tuple(part[row : row + 1] for part in given))
        assert all(torch.equal(alone[name], part[row : row + 1]) for name, part in among.items())


def test_repeats_to_the_bit() -> None:
    given = inputs(33000, torch.float16)
    first = ours(given)
    for _ in range(9):
        assert all(torch.equal(first[name], part) for name, part in ours(given).items())


def _scaled_loss(given: Given) -> Named:
    out = ours(given, **HEADS["capped"])
    return {**out, "loss": out["loss"] * 1.01}


def _scaled_gradient(given: Given) -> Named:
    out = ours(given, **HEADS["capped"])
    return {**out, "d_raw": out["d_raw"] * 1.01}


def _next_target(given: Given) -> Named:
    raw, targets, weights = given
    return ours((raw, (targets + 1) % raw.shape[1], weights), **HEADS["capped"])


def _weight_of_a_neighbour(given: Given) -> Named:
    raw, targets, weights = given
    return ours((raw, targets, weights.roll(1)), **HEADS["capped"])


def _slope_of_the_cap_left_out(given: Given) -> Named:
    out = ours(given, **HEADS["capped"])
    slope = 1.0 - torch.tanh(given[0].double() * 3.0 / 2.0) ** 2
    return {**out, "d_raw": out["d_raw"] / slope}


@pytest.mark.parametrize(
    "plant",
    [_scaled_loss, _scaled_gradient, _next_target, _weight_of_a_neighbour, _slope_of_the_cap_left_out],
    ids=lambda plant: plant.__name__,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_planted_errors_are_seen(dtype: torch.dtype, plant) -> None:
    given = inputs(50, dtype)
    with pytest.raises(AssertionError, match="off by more than"):
        compare(plant(given), oracle(given, **HEADS["capped"]), dtype)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="4 GiB of logits: set TLORA_TEST_DEVICE=cuda")
@pytest.mark.parametrize("_route", ["kernel"], indirect=True)
def test_more_than_two_to_the_31_outputs() -> None:
    columns, rows = 2**17, 2**14 + 1
    last, targets, weights = inputs(columns, torch.bfloat16, rows=1)
    raw = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    raw[-1] = last[0]
    losses = op.cross_entropy(raw, targets.expand(rows).contiguous(), weights.expand(rows).contiguous())
    compare({"loss": losses[-1:], "d_raw": raw[-1:]}, oracle((last, targets, weights)), torch.bfloat16)
    first = oracle((torch.zeros_like(last), targets, weights))
    compare({"loss": losses[:1], "d_raw": raw[:1]}, first, torch.bfloat16)
    assert torch.equal(losses[:-1], losses[:1].expand(rows - 1))

"""The gate of an MLP and its gradients, twin and kernel, against PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F
from numeric import DEVICE, compare

from tlora.kernels import routes
from tlora.kernels.gated import gated, gated_backward, join

ACTS = {"silu": F.silu, "gelu_tanh": lambda gate: F.gelu(gate, approximate="tanh")}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["twin", "kernel"], autouse=True)
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "is_fused", lambda tensor: request.param == "kernel")


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("width", [1, 48, 2048, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_pytorch(dtype: torch.dtype, width: int, act: str) -> None:
    draw = torch.Generator().manual_seed(width)
    y, d = (torch.randn(3, n, generator=draw).mul_(3.0).to(DEVICE, dtype) for n in (2 * width, width))
    y[0, 0], y[1, 0] = 30.0, -30.0  # where an exponential overflows
    leaf = y.double().requires_grad_()
    want = ACTS[act](leaf[:, :width]) * leaf[:, width:]
    want.backward(d.double())
    compare({"out": gated(y, act)}, {"out": want.detach()}, dtype)
    compare({"dy": gated_backward(d, y, act)}, {"dy": leaf.grad}, dtype)


def test_the_operator_differentiates() -> None:
    y = torch.randn(4, 20, device=DEVICE, requires_grad=True)
    gated(y, "silu").sum().backward()
    leaf = y.detach().double().requires_grad_()
    (F.silu(leaf[:, :10]) * leaf[:, 10:]).sum().backward()
    compare({"dy": y.grad}, {"dy": leaf.grad}, torch.float32)
    torch.library.opcheck(gated, (y.detach(), "silu"))
    torch.library.opcheck(gated_backward, (torch.randn(4, 10, device=DEVICE), y.detach(), "silu"))


@pytest.mark.parametrize("stride", [20, 24])
def test_rows_with_gaps_and_poisoned_memory(stride: int) -> None:
    y = torch.full((3, stride), torch.nan, device=DEVICE)[:, :20]
    y.copy_(torch.randn(3, 20))
    poison = torch.full((3, 20), torch.nan, device=DEVICE)
    del poison
    out, dy = gated(y, "silu"), gated_backward(torch.ones(3, 10, device=DEVICE), y, "silu")
    assert out.isfinite().all()
    assert dy.isfinite().all()


def test_join_puts_columns_side_by_side() -> None:
    parts = [torch.randn(2, 3, width, device=DEVICE) for width in (4, 1, 2)]
    assert torch.equal(join(parts), torch.cat(parts, -1))
    torch.library.opcheck(join, (parts,))

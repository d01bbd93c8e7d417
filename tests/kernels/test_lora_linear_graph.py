"""The mixed-job linear as an operator of graphs: its registration, and torch.compile."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from numeric import DEVICE, Job, adapters_of, batch_of, sites_of

from tlora.kernels import lora_linear as op
from tlora.kernels import routes
from tlora.kernels.tiles import Adapters, RowTable, Site

K, MIDDLE, N = 24, 40, 16
Sites = tuple[dict[int, Site], dict[int, Site]]


@pytest.fixture(autouse=True)
def _fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if DEVICE.type != "cuda":
        monkeypatch.setattr(routes, "is_fused", lambda tensor: True)
    torch._dynamo.reset()


def jobs(first: int, second: int, step: int = 0, rank: int = 3) -> dict[int, Job]:
    return {0: Job((first,), rank=rank, scale=0.5, dropout=0.1, step=step), 3: Job((second, 2), rank=20, dropout=0.5)}


def residents() -> tuple[Sites, tuple[Adapters, Adapters]]:
    """Of two linears, one after the other."""
    first = sites_of(jobs(1, 1), K, MIDDLE, torch.float32, module=1234)
    second = sites_of(jobs(1, 1), MIDDLE, N, torch.float32, module=1235)
    return (first, second), (adapters_of(first, widths=(MIDDLE,)), adapters_of(second, widths=(N,)))


def inputs(rows: int) -> tuple[torch.Tensor, ...]:
    """x, two weights, bias, dy."""
    draw = torch.Generator().manual_seed(rows)
    shapes = ((rows, K), (MIDDLE, K), (N, MIDDLE), (N,), (rows, N))
    return tuple(torch.randn(shape, generator=draw).to(DEVICE) for shape in shapes)


def block(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor, rows: RowTable,
    adapters: tuple[Adapters, Adapters],
) -> torch.Tensor:  # fmt: skip
    hidden = torch.nn.functional.silu(op.lora_linear(x, up, None, rows, adapters[0]))
    return op.lora_linear(hidden, down, bias, rows, adapters[1]) + 1.0


def results(run: Callable, rows: RowTable) -> dict[str, torch.Tensor]:
    sites, adapters = residents()
    *given, dy = inputs(rows.num_rows)
    x = given[0].requires_grad_()
    y = run(x, *given[1:], rows, adapters)
    y.backward(dy)
    out = {"y": y.detach(), "dx": x.grad}
    for index, of_linear in enumerate(sites):
        for slot, site in of_linear.items():
            out |= {f"dA{slot}.{index}": site.grad_a_RK, f"dB{slot}.{index}": site.grad_b_NR}
    return out


def test_compiled_is_the_same() -> None:
    rows = batch_of(jobs(30, 9)).rows
    want = results(block, rows)
    out = results(torch.compile(block, fullgraph=True, backend="aot_eager"), rows)
    assert all(want[name].any() for name in want)
    assert want.keys() == out.keys()
    for name, part in want.items():
        torch.testing.assert_close(out[name], part, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_another_batch_of_the_same_size_compiles_nothing() -> None:
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    results(compiled, batch_of(jobs(30, 9)).rows)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in (batch_of(jobs(9, 30, step=4)), batch_of(jobs(25, 14))):
            out, want = results(compiled, batch.rows), results(block, batch.rows)
            for name, part in want.items():
                torch.testing.assert_close(out[name], part, rtol=1e-6, atol=1e-6)


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def arguments(request: pytest.FixtureRequest):
    """Of the forward operator, and what keeps the addresses in the adapters' table alive. The ranks are such that all
    of S is written: what no rank reaches stays as the allocator gave it."""
    dtype = request.param
    batch = batch_of(jobs(30, 9))
    sites = [sites_of(jobs(1, 1, rank=33), K, width, dtype, module=width) for width in (MIDDLE, N)]
    adapters, tables = adapters_of(*sites, widths=(MIDDLE, N)), batch.rows.tables
    x = torch.randn(batch.rows.num_rows, K, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(MIDDLE + N, K, device=DEVICE).to(dtype)
    owners = (tables.segment_T, tables.segments, tables.counters_T)
    sums = (tables.pieces, tables.parts, tables.folds)
    given = (x, weight, None, *owners, *sums, adapters.table, list(adapters.columns), adapters.low, True, False)
    return given, sites


def test_forward_is_a_sound_operator(arguments) -> None:
    torch.library.opcheck(op.forward, arguments[0])


def test_backward_is_a_sound_operator(arguments) -> None:
    given, _ = arguments
    x, weight, _, *tables, columns, _, training, pinned = (
        part.detach() if isinstance(part, torch.Tensor) else part for part in given
    )
    y, low = op.forward(*given)
    torch.library.opcheck(
        op.backward,
        (torch.ones_like(y), x, low.detach(), weight, *tables, columns, training, pinned),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_each_shape_is_measured_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two linears of one width, with other inputs: forward and backward, four choices."""
    keys: list[str] = []
    run = routes.run_fastest

    def note(key: str, *args: object, **options: bool) -> None:
        keys.append(key)
        run(key, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(routes, "run_fastest", note)
    rows, width = batch_of(jobs(5, 9)).rows, 16
    for inputs in (24, 40):
        x, weight = torch.randn(rows.num_rows, inputs, device=DEVICE), torch.randn(width, inputs, device=DEVICE)
        sites = sites_of(jobs(1, 1), inputs, width, torch.float32, module=1234)
        op.lora_linear(x.requires_grad_(), weight, None, rows, adapters_of(sites, widths=(width,))).sum().backward()
    assert len(set(keys)) == len(keys) == 4

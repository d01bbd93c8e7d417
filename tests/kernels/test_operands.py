"""What the mixed linear is given: tables with gaps, factors of the wrong size, weights and biases that are views."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from numeric import DEVICE, Job, adapters_of, batch_of, compare, sites_of

from tlora.kernels import lora_linear as op
from tlora.kernels import low_rank, routes
from tlora.kernels.tiles import Piece, tabulate

# NaN is among the factors, and the interpreter's NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
K, N, T = 24, 40, 70
JOBS = {0: Job((40,), rank=3, dropout=0.1), 2: Job((30,), rank=17)}


@pytest.fixture(params=["twin", "fused"])
def _route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(routes, "is_fused", lambda tensor: request.param == "fused")


def tables(*pieces: Piece, rows: int) -> dict[str, list]:
    made = tabulate(pieces, rows, torch.arange(rows), per_sequence=False)
    return {name: [line for line in table.tolist() if line != [-1] * 4] for name, table in made.items()}


def test_a_piece_without_rows_is_nobodys() -> None:
    with_it = tables(Piece(0, 0, 3, 0), Piece(1, 4, 0, 0), Piece(2, 5, 2, 0), rows=8)
    assert with_it["segments"] == [[0, 0, 3, 0], [-1, 3, 4, 0], [-1, 4, 5, 0], [2, 5, 7, 0], [-1, 7, 8, 0]]
    assert with_it["segment_T"] == [0, 0, 0, 1, 2, 3, 3, 4]
    assert with_it["parts"] == [[0, 0, 1, -1], [2, 1, 1, -1]]
    assert tables(rows=0)["segment_T"] == []


@pytest.mark.parametrize(
    "pieces", [(Piece(0, 0, 5, 0), Piece(1, 3, 4, 0)), (Piece(0, 0, 9, 0),), (Piece(0, 3, 2, 0), Piece(1, 0, 2, 0))]
)
def test_pieces_lie_one_after_the_other_within_the_rows(pieces: tuple[Piece, ...]) -> None:
    with pytest.raises(AssertionError, match="one after the other"):
        tables(*pieces, rows=7)


@pytest.mark.parametrize("per_sequence", [False, True])
def test_rows_of_a_job_lie_together(per_sequence: bool) -> None:
    """Else two programs would add to its gradient at once; the interpreter runs them one after the other."""
    pieces = [Piece(0, 0, 2, 0), Piece(1, 2, 2, 0), Piece(0, 4, 2, 0)]
    with pytest.raises(AssertionError, match="together"):
        tabulate(pieces, 6, torch.arange(6), per_sequence=per_sequence)


def test_a_factor_of_another_module_is_refused() -> None:
    sites = sites_of(JOBS, K, N, torch.float32)
    with pytest.raises(AssertionError):
        adapters_of(sites, widths=(N + 8,))
    with pytest.raises(AssertionError):
        adapters_of({0: replace(sites[0], grad_a_RK=sites[2].grad_a_RK)}, widths=(N,))


@pytest.mark.usefixtures("_route")
def test_a_job_that_was_removed_leaves_nothing_to_who_takes_its_slot() -> None:
    """Beside one that stays: a linear without any adapter is the plain product."""
    batch, sites = batch_of(JOBS), sites_of(JOBS, K, N, torch.float32)
    adapters = adapters_of(sites, widths=(N,))
    adapters.remove(0, 2)
    assert not adapters.table[0, 2].any()
    x = torch.ones(T, K, device=DEVICE, requires_grad=True)
    y = op.lora_linear(x, x.new_zeros(N, K), None, batch.rows, adapters)
    y.sum().backward()
    assert y[:40].any()
    assert not y[40:].any()
    assert not sites[2].grad_b_NR.any()


@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_broken_factor_shows_in_its_own_rows(dtype: torch.dtype, value: float) -> None:
    """In a tile that is shared with others it is selected away, and must not be lost so: a job's loss would stay good.
    A reaches dX by itself, B reaches Y."""
    batch, sites = batch_of(JOBS), sites_of(JOBS, K, N, dtype)
    x = torch.ones(T, K, dtype=dtype, device=DEVICE, requires_grad=True)
    adapters = adapters_of(sites, widths=(N,))
    sites[2].b_NR[7, 1] = value
    y = op.lora_linear(x, x.new_zeros(N, K), None, batch.rows, adapters)
    assert y.isfinite().all(1).tolist() == [True] * 40 + [False] * 30
    sites[2].b_NR[7, 1], sites[2].a_RK[1, 3] = 0.0, value
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert x.grad.isfinite().all(1).tolist() == [True] * 40 + [False] * 30


@pytest.mark.parametrize("slot", [63, 64, 128])
def test_there_is_room_for_every_slot_and_what_lay_there_stays(slot: int) -> None:
    adapters = adapters_of(sites_of(JOBS, K, N, torch.float32), widths=(N,))
    before = adapters.table.clone()
    adapters.reserve(slot)
    assert adapters.table.shape[1] > slot
    assert torch.equal(adapters.table[:, :64], before)
    assert not adapters.table[:, 64:].any()


@pytest.mark.parametrize("per_sequence", [False, True])
def test_deterministic_mode_asks_for_the_one_tile(monkeypatch: pytest.MonkeyPatch, per_sequence: bool) -> None:
    """Not for the fastest: that would be another one on another day."""
    asked = []
    monkeypatch.setattr(routes, "is_fused", lambda tensor: True)
    monkeypatch.setattr(routes, "run_fastest", lambda *given, bulk, pinned: asked.append((bulk, pinned)))
    batch, adapters = batch_of(JOBS, per_sequence=per_sequence), adapters_of({}, {}, widths=(N, N))
    adapters.is_empty = False
    x = torch.ones(batch.rows.num_rows, K, dtype=torch.float16, device=DEVICE, requires_grad=True)
    op.lora_linear(x, x.new_ones(2 * N, K), None, batch.rows, adapters).sum().backward()
    assert asked == [(True, per_sequence)] * 2


@pytest.mark.usefixtures("_route")
def test_other_rows_than_the_tables_have_are_refused() -> None:
    batch, adapters = batch_of(JOBS), adapters_of(sites_of(JOBS, K, N, torch.float32), widths=(N,))
    for rows in (T - 1, T + 1):
        x = torch.ones(rows, K, device=DEVICE)
        with pytest.raises(RuntimeError, match=f"got {rows} rows; want the {T}"):
            op.lora_linear(x, x.new_ones(N, K), None, batch.rows, adapters)


@pytest.mark.parametrize(("rows", "each"), [(1, 8), (8 * 65535, 8), (8 * 65535 + 1, 16), (10**6, 16)])
def test_a_grid_keeps_within_its_bounds(monkeypatch: pytest.MonkeyPatch, rows: int, each: int) -> None:
    launches = []

    class Noted:
        def __getitem__(self, grid: tuple[int, int]) -> object:
            return lambda *given, **options: launches.append((grid, given[-1]))

    monkeypatch.setattr(low_rank, "sum_slabs", Noted())
    low, sites = torch.empty(2, rows, 64, device="meta"), torch.empty(2, 64, 12, device="meta")
    op._sum(low, low, sites, sites, sites, (0, 1, 2), True)
    assert launches == [((2, -(-rows // each)), each)]
    assert launches[0][0][1] <= 65535


VIEWS = {
    "every second row": lambda whole: torch.stack([whole, whole], 1).flatten(0, 1)[::2],
    "starts within 16 bytes": lambda whole: torch.cat([whole.flatten()[:1], whole.flatten()])[1:].view(whole.shape),
    "transposed": lambda whole: whole.t().contiguous().t(),
    "one for all": lambda whole: whole[:1].expand_as(whole),
}


@pytest.mark.usefixtures("_route")
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weights_and_biases_may_be_views(dtype: torch.dtype, view: str) -> None:
    """As wide as bulk copies take them."""
    draw, batch = torch.Generator().manual_seed(0), batch_of(JOBS)
    x, weight, bias = (torch.randn(size, generator=draw).to(DEVICE, dtype) for size in ((T, K), (N, K), (N,)))

    def run(weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        adapters = adapters_of(sites := sites_of(JOBS, K, N, dtype), widths=(N,))
        y = op.lora_linear(leaf, weight, bias, batch.rows, adapters)
        y.backward(torch.ones_like(y))
        grads = {f"d{slot}": site.grad_a_RK for slot, site in sites.items()}
        return {"y": y.detach(), "dx": leaf.grad, **grads}  # type: ignore[dict-item]

    given = VIEWS[view](weight), VIEWS[view](bias)
    compare(run(*given), run(*(part.clone(memory_format=torch.contiguous_format) for part in given)), dtype)

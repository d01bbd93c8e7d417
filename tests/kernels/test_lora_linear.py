"""Mixed-job linear, twin and kernels, against one PEFT-like module a job, in float64."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from numeric import DEVICE, JOBS, Job, PeftLike, adapters_of, batch_of, compare, error, sites_of, spans

from tlora.kernels import lora_linear as op
from tlora.kernels import reference, routes, tiles
from tlora.kernels.tiles import Piece, Site, Tables, tabulate
from tlora.packing import Batch, pack

# NaN is among the inputs, and the interpreter's NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
K = 48
LINEARS = {
    "whole tiles": (256, 40),
    "odd": (36,),
    "one": (40,),
    "three": (40, 24, 72),
    "odd three": (5, 36, 11),
    "odd, even sum": (5, 36, 7),
}
"""Outputs of the linears that read one input. Bulk copies take sums that are multiples of 8."""
FEW = {**JOBS, 4: replace(JOBS[4], lengths=(90,))}
"""As awkward as `JOBS`, in fewer rows."""
FEWER = {slot: job for slot, job in FEW.items() if slot != 6}
FEWEST = {slot: JOBS[slot] for slot in (0, 1, 2)}
WHOLE = {
    0: Job((128,), rank=3, dropout=0.3),
    1: Job((100, 28), rank=None),
    2: Job((128,), rank=64, scale=0.5, dropout=0.1, seed=5, step=3),
    3: Job((128,), rank=80, scale=0.5, dropout=0.1, seed=2**33),
    4: Job((90,), rank=17, scale=2.0),
}
"""Whose rows fill whole tiles, but for the last."""
BESIDE = {(0, 0), (2, 0), (2, 4)}
"""(linear, job) without an adapter where there are three linears; job 0 has one on the middle one alone."""
HALF = (torch.float16, torch.bfloat16)
needs_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="takes a GPU's memory: set TLORA_TEST_DEVICE=cuda")
Named = dict[str, torch.Tensor]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]


@pytest.fixture(params=["twin", "fused"], autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if request.param == "twin" or DEVICE.type != "cuda":
        monkeypatch.setattr(routes, "is_fused", lambda tensor: request.param == "fused")
    return request.param


fused = pytest.mark.parametrize("route", ["fused"], indirect=True)
twin = pytest.mark.parametrize("route", ["twin"], indirect=True)


@pytest.fixture(params=[torch.float32, *HALF], ids=str)
def dtype(request: pytest.FixtureRequest, route: str) -> torch.dtype:
    if route == "fused" and request.param is torch.bfloat16 and DEVICE.type != "cuda":
        pytest.skip("the interpreter's bfloat16 products are wrong: set TLORA_TEST_DEVICE=cuda")
    return request.param


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote holds NaN."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, real=real, **options: _nan(real(*args, **options)))


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@dataclass(frozen=True)
class Case:
    batch: Batch
    sites: tuple[dict[int, Site], ...]
    """Of each linear."""
    widths: tuple[int, ...]
    given: Given
    """x, weight, bias, dy."""

    @property
    def slots(self) -> list[int]:
        return [item.slot for item in self.batch.items]


def case_of(
    batch: Batch,
    jobs: dict[int, Job],
    widths: tuple[int, ...],
    dtype: torch.dtype,
    *,
    inputs: int = K,
    bias: bool = True,
) -> Case:
    sites = []
    for module, width in enumerate(widths):
        absent = {slot for linear, slot in BESIDE if len(widths) == 3 and linear == module}
        present = {slot: job for slot, job in jobs.items() if slot not in absent}
        sites.append(sites_of(present, inputs, width, dtype, module=1234 + module))
    draw = torch.Generator().manual_seed(2)
    T, N = batch.rows.num_rows, sum(widths)
    shapes = ((T, inputs), (N, inputs), (N,), (T, N))
    x, weight, bias_N, dy = (
        torch.randn(shape, generator=draw).div(shape[-1] ** 0.5).to(DEVICE, dtype) for shape in shapes
    )
    return Case(batch, tuple(sites), widths, (x, weight, bias_N if bias else None, dy))


def few(
    dtype: torch.dtype = torch.float32, linears: str = "one", jobs: dict[int, Job] = FEW, **options: int | bool
) -> Case:
    return case_of(batch_of(jobs, **options), jobs, LINEARS[linears], dtype)


def ours(case: Case) -> Named:
    x, weight, bias, dy = case.given
    x = x.clone().requires_grad_()
    adapters = adapters_of(*case.sites, widths=case.widths, last_slot=max(case.slots))
    y = op.lora_linear(x, weight, bias, case.batch.rows, adapters)
    y.backward(dy)
    grads = {
        f"d{part}{slot}.{module}": grad.clone()
        for module, sites in enumerate(case.sites)
        for slot, site in sites.items()
        for part, grad in (("A", site.grad_a_RK), ("B", site.grad_b_NR))
    }
    return {**per_item(case.batch, y=y.detach(), dx=x.grad), **grads}


def oracle(case: Case) -> Named:
    x, weight, bias, dy = (None if part is None else part.double() for part in case.given)
    x.requires_grad_()
    base = torch.nn.functional.linear(x, weight, bias)
    modules = [{slot: PeftLike(site) for slot, site in sites.items()} for sites in case.sites]
    out = {}
    for index, item, span in spans(case.batch):
        y = torch.cat(
            [
                part + of_linear[item.slot](x[span], item, case.batch.rows.training) if item.slot in of_linear else part
                for part, of_linear in zip(base[span].split(case.widths, 1), modules, strict=True)
            ],
            1,
        )
        y.backward(dy[span], retain_graph=True)
        out[f"y{index}"] = y.detach()
    out |= per_item(case.batch, dx=x.grad)
    for module, of_linear in enumerate(modules):
        for slot, peft in of_linear.items():
            out |= {f"{name}.{module}": grad for name, grad in peft.grads(slot).items()}
    return out


def per_item(batch: Batch, **tensors: torch.Tensor) -> Named:
    return {f"{name}{index}": tensor[span] for name, tensor in tensors.items() for index, _, span in spans(batch)}


@pytest.mark.parametrize("linears", ["odd", "three"])
def test_equals_one_module_a_job(dtype: torch.dtype, linears: str) -> None:
    case = case_of(batch_of(JOBS), JOBS, LINEARS[linears], dtype)
    compare(ours(case), oracle(case), dtype)


@pytest.mark.parametrize("biased", [False, True], ids=["no_bias", "bias"])
def test_nothing_is_dropped_in_evaluation(dtype: torch.dtype, biased: bool) -> None:
    """In the oracle, dropout is 0 rather than switched off."""
    case = case_of(batch_of(FEW, training=False), FEW, LINEARS["odd three" if biased else "one"], dtype, bias=biased)
    free = ({slot: replace(site, dropout=0.0) for slot, site in sites.items()} for sites in case.sites)
    compare(ours(case), oracle(replace(case, batch=batch_of(FEW), sites=tuple(free))), dtype)


@pytest.mark.parametrize(("linears", "training"), [("one", False), ("three", True)])
def test_equals_one_module_a_job_per_sequence(dtype: torch.dtype, linears: str, training: bool) -> None:
    case = few(dtype, linears, per_sequence=True, training=training)
    compare(ours(case), oracle(case), dtype)


@fused
@pytest.mark.parametrize("jobs", [FEW, WHOLE], ids=["shared tiles", "tiles of one job"])
@pytest.mark.parametrize("linears", ["odd, even sum", "one", "whole tiles"])
@pytest.mark.parametrize("way", [*routes._TILES, "library"])
def test_every_way_of_a_product(monkeypatch: pytest.MonkeyPatch, way: str, linears: str, jobs: dict[int, Job]) -> None:
    def run(key: str, y: torch.Tensor, tiled: Callable, library: Callable, **options: bool) -> None:
        library() if way == "library" else tiled(routes._TILES[way])

    monkeypatch.setattr(routes, "run_fastest", run)
    case = few(torch.float16, linears, jobs)
    compare(ours(case), oracle(case), torch.float16)


@fused
def test_no_worse_than_torch(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice torch's own error at most, tensor by tensor."""
    case = few(dtype, "three")
    want, out = oracle(case), ours(case)
    monkeypatch.setattr(routes, "is_fused", lambda tensor: False)
    twin = ours(few(dtype, "three"))
    worse = {name: (error(out[name], want[name]), error(twin[name], want[name])) for name in want}
    assert not {name: pair for name, pair in worse.items() if pair[0] > max(2 * pair[1], 1e-6)}


@pytest.mark.parametrize(("inputs", "widths"), [(2056, (44,)), (24, (2100, 44))], ids=["x", "y"])
def test_long_rows(dtype: torch.dtype, inputs: int, widths: tuple[int, ...]) -> None:
    """Inputs beyond one part of S, outputs beyond eight slabs of dS; the last of each is not full."""
    jobs = {0: Job((33,), rank=8, dropout=0.3), 1: Job((5, 22), rank=100, scale=0.5, dropout=0.1)}
    case = case_of(batch_of(jobs), jobs, widths, dtype, inputs=inputs)
    compare(ours(case), oracle(case), dtype)


def test_parts_of_a_job_add_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    for module in (tiles, op):
        monkeypatch.setattr(module, "PART_ROWS", 32)
    case = few(dtype, "three")
    assert case.batch.rows.tables.folds[:, 0].unique().tolist() == [-1, 1, 2, 4, 6]
    compare(ours(case), oracle(case), dtype)


def test_a_long_job() -> None:
    jobs = {0: Job((1500, 1100), rank=3, dropout=0.1), 1: Job((30,), rank=8)}
    case = case_of(batch_of(jobs), jobs, (16,), torch.float32, inputs=16)
    assert case.batch.rows.tables.folds[:2, 0].tolist() == [0, -1]
    compare(ours(case), oracle(case), torch.float32)


def test_without_adapters_it_is_the_plain_linear() -> None:
    for dtype, per_sequence in ((torch.float32, False), (torch.float16, True)):
        case = replace(few(dtype, per_sequence=per_sequence), sites=({},))
        compare(ours(case), oracle(case), dtype)


@fused
@pytest.mark.parametrize(("linears", "dtype"), [("one", torch.float32), ("odd", torch.float16)])
def test_per_sequence_takes_the_twin_where_there_are_no_bulk_copies(
    monkeypatch: pytest.MonkeyPatch, linears: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(op, "forward", None)
    case = few(dtype, linears, per_sequence=True)
    compare(ours(case), oracle(case), dtype)


def _changed(case: Case, change: Callable[[Piece], Piece]) -> Case:
    """Pieces and the tables that follow from them; items, by which results are named, stay."""
    rows = case.batch.rows
    pieces = tuple(change(piece) for piece in rows.pieces)
    tables = tabulate(pieces, rows.num_rows, rows.tables.counters_T.cpu(), per_sequence=rows.per_sequence)
    moved = Tables(**{name: table.to(DEVICE) for name, table in tables.items()})
    return replace(case, batch=replace(case.batch, rows=replace(rows, pieces=pieces, tables=moved)))


def _scaled_result(case: Case) -> Named:
    out = ours(case)
    return {**out, "y0": out["y0"] * 1.01}


def _rank_column_dropped(case: Case) -> Named:
    case.sites[0][4].b_NR[:, -1] = 0.0
    return ours(case)


def _tiles_swapped(case: Case) -> Named:
    return ours(_changed(case, lambda piece: replace(piece, slot={2: 4, 4: 2}.get(piece.slot, piece.slot))))


def _scale_of_a_neighbour(case: Case) -> Named:
    (sites,) = case.sites
    return ours(replace(case, sites=({**sites, 0: replace(sites[0], scale=sites[2].scale)},)))


def _mask_of_another_step(case: Case) -> Named:
    return ours(_changed(case, lambda piece: replace(piece, step=piece.step + 1)))


def _no_mask_on_the_way_back(case: Case) -> Named:
    free = replace(case, sites=({slot: replace(site, dropout=0.0) for slot, site in case.sites[0].items()},))
    return {**ours(case), **{name: part for name, part in ours(free).items() if name in ("dx1", "dx2")}}


@pytest.mark.parametrize(
    "plant",
    [
        _scaled_result,
        _rank_column_dropped,
        _tiles_swapped,
        _scale_of_a_neighbour,
        _mask_of_another_step,
        _no_mask_on_the_way_back,
    ],
    ids=lambda plant: plant.__name__,
)
def test_planted_errors_are_seen(dtype: torch.dtype, plant: Callable[[Case], Named]) -> None:
    case = few(dtype)
    want = oracle(case)
    with pytest.raises(AssertionError, match="off by more than"):
        compare(plant(case), want, dtype)


@fused
def test_a_partial_sum_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiles, op):
        monkeypatch.setattr(module, "PART_ROWS", 32)
    case = few()
    tables = case.batch.rows.tables
    tables.folds[tables.folds[:, 0] == 4, 2] -= 1
    with pytest.raises(AssertionError, match=r"'dA4.0': .*'dB4.0': "):
        compare(ours(case), oracle(case), torch.float32)


@pytest.mark.usefixtures("poisoned")
def test_rows_of_nobody_touch_nothing(dtype: torch.dtype) -> None:
    """100 rows in a buffer of 128 whose end holds NaN, with an allocator that gives NaN."""
    jobs = {0: Job((30, 7), rank=3, dropout=0.2), 2: Job((63,), rank=8)}
    padded = case_of(batch_of(jobs, round_to=128), jobs, (40, 24), dtype)
    assert padded.batch.rows.num_rows == 128
    x, weight, bias, dy = padded.given
    x[100:] = dy[100:] = torch.nan
    bare = replace(padded, batch=batch_of(jobs), given=(x[:100], weight, bias, dy[:100]))
    compare(ours(padded), oracle(bare), dtype)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("linears", "per_sequence", "what"),
    [("three", False, "rows"), ("one", False, "weights"), ("one", True, "rows"), ("one", True, "weights")],
)
def test_a_broken_neighbour_stays_out(dtype: torch.dtype, linears: str, per_sequence: bool, what: str) -> None:
    """NaN in one job's rows or weights, in rows of nobody and from the allocator: the others have the bits that they
    have without."""
    sound, beside = (few(dtype, linears, FEWER, per_sequence=per_sequence, round_to=192) for _ in range(2))
    x, _, _, dy = beside.given
    nobodys = sum(beside.batch.rows.blocks[: len(beside.slots)])
    assert nobodys < beside.batch.rows.num_rows
    x[nobodys:] = dy[nobodys:] = torch.nan
    broken, _, span = next(place for place in spans(beside.batch) if place[1].slot == 4)
    if what == "rows":
        x[span] = dy[span] = torch.nan
    if what == "weights":
        for site in (sites[4] for sites in beside.sites):
            site.a_RK.fill_(torch.nan)
            site.b_NR.fill_(torch.nan)
    out, want = ours(beside), ours(sound)
    theirs = {f"y{broken}", f"dx{broken}"}
    theirs |= {f"d{part}4.{module}" for module, sites in enumerate(beside.sites) if 4 in sites for part in "AB"}
    assert {name for name in want if not torch.equal(out[name], want[name])} == theirs


@pytest.mark.parametrize("view", ["x is a slice of columns", "x starts within 16 bytes", "dy starts within 16 bytes"])
def test_views_are_read_where_they_lie(dtype: torch.dtype, view: str) -> None:
    jobs = {0: Job((21,), rank=3, dropout=0.1)}
    case = case_of(batch_of(jobs), jobs, (17,), dtype, inputs=19)
    want = oracle(case)
    x, weight, bias, dy = case.given
    if view == "x is a slice of columns":
        x = torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, :19]
    elif view == "x starts within 16 bytes":
        x = torch.cat([x[:1], x])[1:]
    else:
        dy = torch.cat([dy[:1], dy])[1:]
    x = x.requires_grad_()
    y = op.lora_linear(x, weight, bias, case.batch.rows, adapters_of(*case.sites, widths=case.widths))
    y.backward(dy)
    site = case.sites[0][0]
    out = {"y0": y.detach(), "dx0": x.grad, "dA0.0": site.grad_a_RK, "dB0.0": site.grad_b_NR}
    compare(out, want, dtype)


def test_gradients_are_added_and_a_job_without_rows_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tiles, op):
        monkeypatch.setattr(module, "PART_ROWS", 64)
    case = few()
    once = ours(case)
    for sites in case.sites:
        for site in sites.values():
            site.grad_a_RK.fill_(0.5)
            site.grad_b_NR.fill_(0.5)
    twice = ours(case)
    for name, grad in twice.items():
        if name[:2] in ("dA", "dB"):
            want = once[name] + 0.5
            assert torch.equal(grad, want) if name[2] == "3" else error(grad, want) < 1e-6


def test_base_path_is_never_dropped() -> None:
    """With B = 0, dropout of 0.9 changes neither Y nor dX, and only dB is not zero."""
    jobs = {0: Job((40,), rank=4, dropout=0.9)}
    case = case_of(batch_of(jobs), jobs, LINEARS["one"], torch.float32)
    case.sites[0][0].b_NR.zero_()
    x, weight, bias, dy = case.given
    out = ours(case)
    assert error(out["y0"], torch.nn.functional.linear(x, weight, bias)) < 1e-6
    assert error(out["dx0"], dy @ weight) < 1e-6
    assert not out["dA0.0"].any()
    assert out["dB0.0"].any()


@pytest.mark.parametrize("per_sequence", [False, True], ids=["whole", "per_sequence"])
def test_repeats_to_the_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, per_sequence: bool) -> None:
    for module in (tiles, op):
        monkeypatch.setattr(module, "PART_ROWS", 64)
    first = ours(few(dtype, "one", FEWEST, per_sequence=per_sequence))
    for _ in range(9):
        again = ours(few(dtype, "one", FEWEST, per_sequence=per_sequence))
        assert all(torch.equal(part, again[name]) for name, part in first.items())


def _part(case: Case, keep: Callable[[int], bool]) -> Case:
    """The case with only those of its items, by index; sites are shared."""
    blocks = zip(
        case.batch.rows.blocks, torch.arange(case.batch.rows.num_rows).split(case.batch.rows.blocks), strict=True
    )
    rows = torch.cat([at for index, (_, at) in enumerate(blocks) if keep(index)]).to(DEVICE)
    items = [item for index, item in enumerate(case.batch.items) if keep(index)]
    x, weight, bias, dy = case.given
    batch = pack(items, device=DEVICE, per_sequence=case.batch.rows.per_sequence)
    return replace(case, batch=batch, given=(x[rows], weight, bias, dy[rows]))


def test_per_sequence_bits_do_not_depend_on_neighbours(dtype: torch.dtype) -> None:
    among, alone = (few(dtype, "three", per_sequence=True) for _ in range(2))
    together = ours(among)
    for slot in (2, 6):
        mine = [index for index, other in enumerate(among.slots) if other == slot]
        apart = ours(_part(alone, mine.__contains__))
        names = {name: name for name in together if name[:3] in (f"dA{slot}", f"dB{slot}")}
        for at, index in enumerate(mine):
            names |= {f"y{at}": f"y{index}", f"dx{at}": f"dx{index}"}
        assert len(names) > 2 * len(mine)
        assert all(torch.equal(apart[own], together[theirs]) for own, theirs in names.items())


def test_per_sequence_gradients_do_not_depend_on_cuts(dtype: torch.dtype) -> None:
    """All sequences of a step in one call, or in calls one after the other."""
    whole, cut = (few(dtype, per_sequence=True) for _ in range(2))
    together = ours(whole)
    sixth = whole.slots.index(6)
    ours(_part(cut, lambda index: index <= sixth))
    apart = ours(_part(cut, lambda index: index > sixth))
    names = [name for name in together if name[:2] in ("dA", "dB")]
    assert len(names) == 2 * len(whole.sites[0])
    assert all(torch.equal(together[name], apart[name]) for name in names)


@twin
def test_per_sequence_products_see_one_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's bits may depend on its number of rows, though not on every machine and for every shape."""
    seen, real = [], reference.add_wide
    case = few(per_sequence=True)
    monkeypatch.setattr(reference, "add_wide", lambda y, x, *others: (seen.append(len(x)), real(y, x, *others)))
    ours(case)
    assert seen == [*case.batch.rows.blocks, *case.batch.rows.blocks]


@twin
def test_low_precision_gradients_are_summed_in_float32() -> None:
    """Many small bfloat16 calls into one float32 gradient: what bfloat16 would round away stays."""
    grad = torch.zeros(1, 1, device=DEVICE)
    grad.fill_(256.0)
    left = right = torch.full((1, 1), 0.25, dtype=torch.bfloat16, device=DEVICE)
    for _ in range(8):
        reference.add_product(grad, left, right)
    assert grad.item() == 256.5


def test_a_resident_of_a_high_slot_without_this_module() -> None:
    """It reads nothing that belongs to another, though the table of this module has no line for it."""
    jobs = {4: Job((40,), rank=3), 68: Job((40,), rank=None)}
    case = case_of(batch_of(jobs), jobs, LINEARS["three"], torch.float32)
    compare(ours(case), oracle(case), torch.float32)


@needs_gpu
@fused
@pytest.mark.parametrize(("inputs", "outputs"), [(14336, 64), (64, 14336)], ids=["x", "dy"])
def test_more_than_two_to_the_31_elements(inputs: int, outputs: int) -> None:
    jobs = {0: Job((150_000,), rank=3, dropout=0.1), 1: Job((1000,), rank=16, dropout=0.1)}
    assert jobs[0].lengths[0] * max(inputs, outputs) > 2**31
    batch, tail = batch_of(jobs), batch_of({1: jobs[1]})
    last = case_of(tail, {1: jobs[1]}, (outputs,), torch.bfloat16, inputs=inputs)
    x, weight, bias, dy = last.given
    wide = [torch.cat([part.new_zeros(150_000, part.shape[1]), part]) for part in (x, dy)]
    whole = Case(
        batch, (sites_of(jobs, inputs, outputs, torch.bfloat16),), last.widths, (wide[0], weight, bias, wide[1])
    )
    out = ours(whole)
    mine = {"y0": out["y1"], "dx0": out["dx1"], "dA1.0": out["dA1.0"], "dB1.0": out["dB1.0"]}
    compare(mine, oracle(last), torch.bfloat16)
    assert not any(out[name].any() for name in ("dx0", "dA0.0", "dB0.0"))
    assert torch.equal(out["y0"], bias.expand_as(out["y0"]))

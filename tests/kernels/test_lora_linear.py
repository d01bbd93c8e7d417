"""Mixed-job linear against one PEFT-like module a job, in float64."""

from dataclasses import replace

import pytest
import torch
from numeric import DEVICE, JOBS, Job, PeftLike, batch_of, compare, error, sites_of, spans

from tlora.kernels import reference
from tlora.kernels.reference import lora_linear
from tlora.kernels.tiles import RowTable, Site
from tlora.packing import Batch

K, N = 48, 36
Named = dict[str, torch.Tensor]


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """x, weight, bias, dy."""
    draw = torch.Generator().manual_seed(1)
    shapes = ((rows, K), (N, K), (N,), (rows, N))
    return tuple(torch.randn(shape, generator=draw).div(shape[-1] ** 0.5).to(DEVICE, dtype) for shape in shapes)


def ours(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...], rows: RowTable | None = None) -> Named:
    x, weight, bias, dy = given
    x = x.clone().requires_grad_()
    y = lora_linear(x, weight, bias, rows or batch.rows, sites)
    y.backward(dy)
    grads = {f"d{part}{slot}": getattr(site, f"grad_{part.lower()}_{shape}")
             for slot, site in sites.items() for part, shape in (("A", "RK"), ("B", "NR"))}  # fmt: skip
    return {**per_item(batch, y=y.detach(), dx=x.grad), **grads}


def oracle(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    x, weight, bias, dy = (None if part is None else part.double() for part in given)
    x.requires_grad_()
    base = torch.nn.functional.linear(x, weight, bias)
    modules = {slot: PeftLike(site) for slot, site in sites.items()}
    out = {}
    for index, item, span in spans(batch):
        y = base[span]
        if item.slot in modules:
            y = y + modules[item.slot](x[span], item, batch.rows.training)
        y.backward(dy[span], retain_graph=True)
        out[f"y{index}"] = y.detach()
    out |= per_item(batch, dx=x.grad)
    for slot, module in modules.items():
        out |= module.grads(slot)
    return out


def per_item(batch: Batch, **tensors: torch.Tensor) -> Named:
    return {f"{name}{index}": tensor[span] for name, tensor in tensors.items() for index, _, span in spans(batch)}


@pytest.mark.parametrize("per_sequence", [False, True], ids=["whole", "per_sequence"])
@pytest.mark.parametrize("biased", [False, True], ids=["no_bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_one_module_a_job(dtype: torch.dtype, biased: bool, per_sequence: bool) -> None:
    batch, sites = batch_of(JOBS, per_sequence=per_sequence), sites_of(JOBS, K, N, dtype)
    x, weight, bias, dy = inputs(batch.rows.num_rows, dtype)
    given = (x, weight, bias if biased else None, dy)
    compare(ours(batch, sites, given), oracle(batch, sites, given), dtype)


def test_planted_errors_are_seen(plant) -> None:
    batch, sites = batch_of(JOBS), sites_of(JOBS, K, N, torch.float32)
    given = inputs(batch.rows.num_rows)
    want = oracle(batch, sites, given)
    with pytest.raises(AssertionError, match="off by more than"):
        compare(plant(batch, sites, given), want, torch.float32)


def _scaled_result(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    out = ours(batch, sites, given)
    return {**out, "y0": out["y0"] * 1.01}


def _rank_column_dropped(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    sites[4].b_NR[:, -1] = 0.0
    return ours(batch, sites, given)


def _tiles_swapped(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    pieces = [replace(piece, slot={2: 4, 4: 2}.get(piece.slot, piece.slot)) for piece in batch.rows.pieces]
    return ours(batch, sites, given, replace(batch.rows, pieces=tuple(pieces)))


def _scale_of_a_neighbour(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    return ours(batch, {**sites, 0: replace(sites[0], scale=sites[2].scale)}, given)


def _mask_of_another_step(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    pieces = [replace(piece, step=piece.step + 1) for piece in batch.rows.pieces]
    return ours(batch, sites, given, replace(batch.rows, pieces=tuple(pieces)))


def _no_mask_on_the_way_back(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    free = {slot: replace(site, dropout=0.0) for slot, site in sites.items()}
    return {**ours(batch, sites, given), "dx1": ours(batch, free, given)["dx1"], "dx2": ours(batch, free, given)["dx2"]}


@pytest.fixture(
    params=[
        _scaled_result,
        _rank_column_dropped,
        _tiles_swapped,
        _scale_of_a_neighbour,
        _mask_of_another_step,
        _no_mask_on_the_way_back,
    ],
    ids=lambda plant: plant.__name__,
)
def plant(request):
    return request.param


def test_rows_of_nobody_touch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 rows in a buffer of 128 whose end holds NaN, with an allocator that gives NaN."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, **options: real(*args, **options).fill_(torch.nan))
    jobs = {0: Job((30, 7), rank=3, dropout=0.2), 2: Job((63,), rank=8)}
    sites, padded = sites_of(jobs, K, N, torch.float32), batch_of(jobs, round_to=128)
    assert padded.rows.num_rows == 128
    x, weight, bias, dy = inputs(128)
    x[100:] = dy[100:] = torch.nan
    compare(
        ours(padded, sites, (x, weight, bias, dy)),
        oracle(batch_of(jobs), sites, (x[:100], weight, bias, dy[:100])),
        torch.float32,
    )


def test_gradients_are_added_and_a_job_without_rows_keeps_its_own() -> None:
    batch, sites = batch_of(JOBS), sites_of(JOBS, K, N, torch.float32)
    given = inputs(batch.rows.num_rows)
    once = {name: part.clone() for name, part in ours(batch, sites, given).items()}
    for site in sites.values():
        site.grad_a_RK.fill_(0.5)
        site.grad_b_NR.fill_(0.5)
    twice = ours(batch, sites, given)
    for slot in sites:
        for name in (f"dA{slot}", f"dB{slot}"):
            want = once[name] + 0.5
            assert torch.equal(twice[name], want) if slot == 3 else error(twice[name], want) < 1e-6


def test_base_path_is_never_dropped() -> None:
    """With B = 0, dropout of 0.9 changes neither Y nor dX, and only dB is not zero."""
    jobs = {0: Job((40,), rank=4, dropout=0.9)}
    batch, sites = batch_of(jobs), sites_of(jobs, K, N, torch.float32)
    sites[0].b_NR.zero_()
    x, weight, bias, dy = inputs(40)
    out = ours(batch, sites, (x, weight, bias, dy))
    assert torch.equal(out["y0"], torch.nn.functional.linear(x, weight, bias))
    assert error(out["dx0"], dy @ weight) < 1e-6
    assert not out["dA0"].any()
    assert out["dB0"].any()


def test_nothing_is_dropped_in_evaluation() -> None:
    batch, sites = batch_of(JOBS, training=False), sites_of(JOBS, K, N, torch.float32)
    given = inputs(batch.rows.num_rows)
    free = {slot: replace(site, dropout=0.0) for slot, site in sites.items()}
    compare(ours(batch, sites, given), oracle(batch, free, given), torch.float32)


def test_repeats_to_the_bit() -> None:
    def once() -> Named:
        batch, sites = batch_of(JOBS), sites_of(JOBS, K, N, torch.float32)
        return ours(batch, sites, inputs(batch.rows.num_rows))

    first = once()
    for _ in range(9):
        assert all(torch.equal(first[name], part) for name, part in once().items())


def test_per_sequence_bits_do_not_depend_on_neighbours() -> None:
    whole = batch_of(JOBS, per_sequence=True)
    x, weight, bias, dy = inputs(whole.rows.num_rows)
    among = ours(whole, sites_of(JOBS, K, N, torch.float32), (x, weight, bias, dy))
    places = [(index, item, span) for index, item, span in spans(whole) if item.slot == 6]
    rows = slice(places[0][2].start, whole.rows.num_rows)
    jobs = {6: JOBS[6]}
    alone = ours(
        batch_of(jobs, per_sequence=True), sites_of(jobs, K, N, torch.float32), (x[rows], weight, bias, dy[rows])
    )
    names = {"dA6": "dA6", "dB6": "dB6"}
    for at, (index, _, _) in enumerate(places):
        names |= {f"y{at}": f"y{index}", f"dx{at}": f"dx{index}"}
    assert all(torch.equal(alone[mine], among[theirs]) for mine, theirs in names.items())


def test_per_sequence_products_see_one_block_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's bits may depend on its number of rows, though not on every machine and for every shape."""
    seen, real = [], torch.nn.functional.linear
    batch = batch_of(JOBS, per_sequence=True)
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, *others: (seen.append(len(x)), real(x, *others))[1])
    ours(batch, sites_of(JOBS, K, N, torch.float32), inputs(batch.rows.num_rows))
    assert seen == [*batch.rows.blocks, *batch.rows.blocks]


def test_without_adapters_it_is_the_plain_linear() -> None:
    batch = batch_of(JOBS)
    given = inputs(batch.rows.num_rows)
    compare(ours(batch, {}, given), oracle(batch, {}, given), torch.float32)


def test_low_precision_gradients_are_summed_in_float32() -> None:
    """Many small bfloat16 calls into one float32 gradient: what bfloat16 would round away stays."""
    grad = torch.zeros(1, 1)
    grad.fill_(256.0)
    left = right = torch.full((1, 1), 0.25, dtype=torch.bfloat16)
    for _ in range(8):
        reference.add_product(grad, left, right)
    assert grad.item() == 256.5

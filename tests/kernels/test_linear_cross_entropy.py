"""Head and loss, in blocks and in chunks, against one job at a time through PyTorch's cross-entropy in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from numeric import DEVICE, JOBS, Job, PeftLike, adapters_of, batch_of, compare, error, items_of, sites_of, spans

from tlora.kernels import linear_cross_entropy as op
from tlora.kernels import reference, routes
from tlora.kernels.linear_cross_entropy import linear_cross_entropy
from tlora.kernels.tiles import Site
from tlora.packing import Batch, pack

# NaN is among the inputs, and the interpreter's NumPy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
H, V = 24, 50
FEW = {**JOBS, 4: replace(JOBS[4], lengths=(90,))}
"""As awkward as `JOBS`, in fewer rows."""
Named = dict[str, torch.Tensor]
HEADS = {"plain": {}, "multiplied": {"multiplier": 0.25}, "capped": {"multiplier": 0.5, "softcap": 2.0}}


@pytest.fixture(params=["twin", "fused"], autouse=True)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fused, jobs without adapters on the head share chunks; here of about 60 rows."""
    monkeypatch.setattr(op, "CHUNK_LOGITS", 60 * V)
    if request.param == "twin" or DEVICE.type != "cuda":
        monkeypatch.setattr(routes, "is_fused", lambda tensor: request.param == "fused")
    return request.param


def inputs(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """hidden, weight, bias."""
    draw = torch.Generator().manual_seed(1)
    return tuple(
        torch.randn(shape, generator=draw).div(shape[-1] ** 0.25).to(DEVICE, dtype)
        for shape in ((rows, H), (V, H), (V,))
    )


def ours(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...], **options: float) -> Named:
    adapters = adapters_of(sites, widths=(V,))
    losses, d_hidden = linear_cross_entropy(*given, batch.rows, batch.loss, adapters, **options)
    assert not torch.isnan(d_hidden[[span.stop - 1 for _, _, span in spans(batch)]]).any()
    out = {f"loss{index}": losses[index] for index in range(len(batch.items))}
    out |= {f"dh{index}": d_hidden[span] for index, _, span in spans(batch)}
    for slot, site in sites.items():
        out |= {f"dA{slot}": site.grad_a_RK.clone(), f"dB{slot}": site.grad_b_NR.clone()}
    return out


def oracle(
    batch: Batch,
    sites: dict[int, Site],
    given: tuple[torch.Tensor, ...],
    multiplier: float = 1.0,
    softcap: float | None = None,
) -> Named:
    hidden, weight, bias = (None if part is None else part.double() for part in given)
    modules, out = {slot: PeftLike(site) for slot, site in sites.items()}, {}
    for index, item, span in spans(batch):
        h = hidden[span].clone().requires_grad_()
        at = torch.from_numpy(item.sequence.is_target).nonzero().squeeze(1).to(DEVICE)
        targets = torch.from_numpy(item.sequence.ids).long().to(DEVICE)[at]
        logits = F.linear(h[at - 1], weight, bias)
        if item.slot in modules:
            logits = logits + modules[item.slot](h[at - 1], item, batch.rows.training, at - 1)
        logits = logits * multiplier
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss = item.weight * F.cross_entropy(logits, targets, reduction="sum")
        loss.backward()
        out |= {f"loss{index}": loss.detach(), f"dh{index}": h.grad}
    for slot, module in modules.items():
        out |= module.grads(slot)
    return out


@pytest.mark.parametrize("route", ["twin"], indirect=True)
@pytest.mark.parametrize("per_sequence", [False, True], ids=["whole", "per_sequence"])
@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_equals_one_job_at_a_time(dtype: torch.dtype, head: str, adapted: bool, per_sequence: bool) -> None:
    _check(JOBS, dtype, head, adapted, per_sequence)


@pytest.mark.parametrize("route", ["fused"], indirect=True)
@pytest.mark.parametrize("per_sequence", [False, True], ids=["whole", "per_sequence"])
@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
@pytest.mark.parametrize(
    ("dtype", "head"), [(torch.float32, "plain"), (torch.float16, "multiplied"), (torch.bfloat16, "capped")], ids=str
)
def test_fused_equals_one_job_at_a_time(dtype: torch.dtype, head: str, adapted: bool, per_sequence: bool) -> None:
    _check(FEW, dtype, head, adapted, per_sequence)


def _check(jobs: dict[int, Job], dtype: torch.dtype, head: str, adapted: bool, per_sequence: bool) -> None:
    batch = batch_of(jobs, per_sequence=per_sequence, head_rows=24)
    sites = sites_of(jobs, H, V, dtype) if adapted else {}
    hidden, weight, bias = inputs(batch.rows.num_rows, dtype)
    given = (hidden, weight, bias if head == "plain" else None)
    compare(ours(batch, sites, given, **HEADS[head]), oracle(batch, sites, given, **HEADS[head]), dtype)


def _scaled_gradient(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    out = ours(batch, sites, given)
    return {**out, "dh2": out["dh2"] * 1.01}


def _rank_column_dropped(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    sites[2].a_RK[-1] = 0.0
    return ours(batch, sites, given)


def _blocks_swapped(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    blocks = tuple(replace(block, slot={2: 4, 4: 2}.get(block.slot, block.slot)) for block in batch.loss.blocks)
    return ours(replace(batch, loss=replace(batch.loss, blocks=blocks)), sites, given)


def _weights_of_a_slice(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    """The mean over each sequence in place of the mean over the step: fault of every trainer that averages averages."""
    items = [replace(item, weight=1.0 / max(1, item.sequence.num_targets)) for item in batch.items]
    return ours(pack(items, device=DEVICE), sites, given)


def _next_token_of_the_row_after(batch: Batch, sites: dict[int, Site], given: tuple[torch.Tensor, ...]) -> Named:
    return ours(replace(batch, loss=replace(batch.loss, rows_M=batch.loss.rows_M + 1)), sites, given)


@pytest.mark.parametrize(
    "plant",
    [_scaled_gradient, _rank_column_dropped, _blocks_swapped, _weights_of_a_slice, _next_token_of_the_row_after],
    ids=lambda plant: plant.__name__,
)
def test_planted_errors_are_seen(plant) -> None:
    batch, sites = batch_of(FEW), sites_of(FEW, H, V, torch.float32)
    given = inputs(batch.rows.num_rows)
    want = oracle(batch, sites, given)
    with pytest.raises(AssertionError, match="off by more than"):
        compare(plant(batch, sites, given), want, torch.float32)


def test_one_and_ninety_nine_targets_weigh_the_same_in_every_layout() -> None:
    """1×2 against 2×1: sum of token losses ÷ 100 both ways, not the mean of two means."""
    one, many = items_of({0: Job((2, 100), rank=None)})
    one.sequence.is_target[1:] = True
    many.sequence.is_target[1:] = True
    items = [replace(item, weight=1.0 / 100) for item in (one, many)]
    together = pack(items, device=DEVICE)
    hidden, weight, bias = inputs(102)
    frozen = adapters_of({}, widths=(V,))
    losses, d_hidden = linear_cross_entropy(hidden, weight, bias, together.rows, together.loss, frozen)
    apart = []
    for item, part in zip(items, hidden.split((2, 100)), strict=True):
        batch = pack([item], device=DEVICE)
        apart.append(linear_cross_entropy(part, weight, bias, batch.rows, batch.loss, frozen))
    log_p = F.linear(hidden.double(), weight.double(), bias.double()).log_softmax(-1)
    ids = torch.cat([torch.from_numpy(item.sequence.ids).long() for item in items]).to(DEVICE)
    token_losses = -log_p[[0, *range(2, 101)], ids[[1, *range(3, 102)]]]
    assert len(token_losses) == 100
    assert error(losses.sum(), token_losses.mean()) < 1e-6
    assert error(sum(loss.sum() for loss, _ in apart), token_losses.mean()) < 1e-6
    assert error(torch.cat([gradient for _, gradient in apart]), d_hidden) < 1e-6


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
def test_a_broken_neighbour_stays_out(monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    """NaN in one job, in rows of nobody and from the allocator: the others have the bits that they have without."""
    for name in ("empty", "empty_like"):
        real = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, real=real, **options: _nan(real(*args, **options)))
    batch = batch_of(FEW, round_to=128)
    given = inputs(batch.rows.num_rows)
    jobs = FEW if adapted else {}
    sound = ours(batch, sites_of(jobs, H, V, torch.float32), given)
    broken = [(index, span) for index, item, span in spans(batch) if item.slot == 4]
    hidden = given[0].clone()
    hidden[broken[0][1]] = torch.nan
    hidden[sum(len(item.sequence) for item in batch.items) :] = torch.nan
    beside = ours(batch, sites_of(jobs, H, V, torch.float32), (hidden, *given[1:]))
    theirs = {f"loss{broken[0][0]}", f"dh{broken[0][0]}", *(("dA4", "dB4") if adapted else ())}
    assert torch.isnan(beside[f"loss{broken[0][0]}"])
    assert {name for name in sound if not torch.equal(sound[name], beside[name])} == theirs


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


def test_evaluation_gives_the_losses_and_touches_no_gradient() -> None:
    batch, sites = batch_of(FEW, training=False), sites_of(FEW, H, V, torch.float32)
    given = inputs(batch.rows.num_rows)
    losses, none = linear_cross_entropy(
        *given, batch.rows, batch.loss, adapters_of(sites, widths=(V,)), with_gradient=False
    )
    assert none is None
    assert not any(site.grad_a_RK.any() or site.grad_b_NR.any() for site in sites.values())
    want = oracle(batch, sites, given)
    compare({f"loss{index}": loss for index, loss in enumerate(losses)},
            {name: loss for name, loss in want.items() if name.startswith("loss")}, torch.float32)  # fmt: skip


def test_repeats_to_the_bit() -> None:
    jobs = {slot: FEW[slot] for slot in (0, 1, 2)}

    def once() -> Named:
        batch, sites = batch_of(jobs), sites_of(jobs, H, V, torch.float32)
        return ours(batch, sites, inputs(batch.rows.num_rows))

    first = once()
    for _ in range(9):
        assert all(torch.equal(first[name], part) for name, part in once().items())


@pytest.mark.parametrize(("rows", "vocab"), [(0, 50), (1, 50), (60, 50), (61, 50), (1000, 50), (7, 10_000)])
def test_chunks_hold_every_row_once_and_no_more_than_they_may(rows: int, vocab: int) -> None:
    chunks = op.chunks(rows, vocab)
    assert [row for chunk in chunks for row in range(chunk.first, chunk.first + chunk.rows)] == list(range(rows))
    assert all(chunk.rows * vocab <= op.CHUNK_LOGITS or chunk.rows == 1 for chunk in chunks)


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
def test_per_sequence_products_see_one_sequence_each(monkeypatch: pytest.MonkeyPatch, adapted: bool) -> None:
    """A product's bits may depend on its number of rows, though not on every machine and for every shape."""
    seen, real = [], reference.by_blocks
    monkeypatch.setattr(reference, "by_blocks", lambda *given: (seen.append(given[6]), real(*given))[1])
    batch = batch_of(FEW, per_sequence=True)
    adapters = adapters_of(sites_of(FEW, H, V, torch.float32) if adapted else {}, widths=(V,))
    given = (*inputs(batch.rows.num_rows), batch.rows, batch.loss, adapters)
    linear_cross_entropy(*given)
    op.wrong_tokens(*given)
    assert seen == [batch.loss.blocks] * 2
    assert [block.rows for block in batch.loss.blocks] == [count for count in batch.loss.counts_S.tolist() if count]


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
def test_wrong_tokens_are_those_that_are_not_likeliest(adapted: bool) -> None:
    batch, sites = batch_of(FEW, training=False), sites_of(FEW, H, V, torch.float32) if adapted else {}
    hidden, weight, bias = inputs(batch.rows.num_rows)
    wrong = op.wrong_tokens(hidden, weight, bias, batch.rows, batch.loss, adapters_of(sites, widths=(V,)))
    want = []
    for _, item, span in spans(batch):
        at = torch.from_numpy(item.sequence.is_target).nonzero().squeeze(1).to(DEVICE)
        logits = F.linear(hidden[span][at - 1], weight, bias)
        if item.slot in sites:
            site = sites[item.slot]
            logits += site.scale * (hidden[span][at - 1] @ site.a_RK.T @ site.b_NR.T)
        want.append((logits.argmax(-1).cpu() != torch.from_numpy(item.sequence.ids).long()[at.cpu()]).sum().item())
    assert wrong.tolist() == want
    assert 0 < sum(want) < len(batch.loss.rows_M)


@pytest.mark.parametrize("adapted", [False, True], ids=["frozen", "adapted"])
def test_a_batch_without_targets(adapted: bool) -> None:
    jobs = {0: Job((1,), rank=3 if adapted else None), 2: Job((1, 1), rank=None)}
    batch, sites = batch_of(jobs), sites_of(jobs, H, V, torch.float32)
    assert not len(batch.loss.rows_M)
    out = ours(batch, sites, inputs(3))
    assert not any(part.any() for part in out.values())

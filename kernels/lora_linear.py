"""The mixed-job linear: Y = X Wᵀ + b, plus each job's own low-rank product on its own rows.

Forward launches `low_rank.project`, `sum_slabs` where K is cut, and the wide product; backward `gradient_b`,
`sum_slabs`, the wide product, `gradient_a` and `fold_sums`. Two custom operators with fakes make it whole for
torch.compile and CUDA graphs. Factors and gradients are reached by the addresses in `Adapters.table`: backward adds to
the gradients as a side effect that no graph sees, which is safe because its result dX is always needed (the embeddings'
output requires grad).
"""

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tlora.kernels import low_rank, product, reference, routes
from tlora.kernels.tiles import PART_ROWS, Adapters, RowTable

_Owners = tuple[Tensor, Tensor, Tensor]
_EXPANDED = 8
"""Column tiles of a program of `expand`."""
_FOLDED = 256
"""Columns of a program of `fold_sums`."""
_MOST_PROGRAMS = 65535
"""CUDA's bound on the second and third number of a grid."""


def lora_linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, rows: RowTable, adapters: Adapters) -> Tensor:
    """`reference.lora_linear`, fused where it can be. In deterministic mode a row's bits come from one tile shape."""
    if not routes.is_fused(x_TK) or (rows.per_sequence and not routes.has_descriptors(x_TK, weight_NK)):
        return reference.lora_linear(x_TK, weight_NK, bias_N, rows, adapters)
    if adapters.is_empty and not rows.per_sequence:
        return F.linear(x_TK, weight_NK, bias_N)
    tables = rows.tables
    owners = (tables.segment_T, tables.segments, tables.counters_T)
    reductions = (tables.pieces, tables.parts, tables.folds)
    columns, low = list(adapters.columns), adapters.low
    y_TN, _ = forward(
        x_TK, weight_NK, bias_N, *owners, *reductions, adapters.table, columns, low, rows.training, rows.per_sequence
    )
    return y_TN  # type: ignore[no-any-return]


@torch.library.custom_op("tlora::lora_linear", mutates_args=())
def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segment_T: Tensor,
    segments: Tensor,
    counters_T: Tensor,
    pieces: Tensor,
    parts: Tensor,
    folds: Tensor,
    sites: Tensor,
    columns: list[int],
    low: int,
    training: bool,
    pinned: bool,
) -> tuple[Tensor, Tensor]:
    """Y [T, N] and S [modules, T, low]."""
    if len(x) != len(segment_T):
        raise RuntimeError(f"a mixed linear got {len(x)} rows; want the {len(segment_T)} of the batch's tables.")
    x, bias = _aligned(x), None if bias is None else bias.contiguous()
    T, K = x.shape
    modules, slots, _ = sites.shape
    s, y = x.new_empty(modules, T, low), x.new_empty(T, weight.shape[0])
    owners = (segment_T, segments, counters_T)
    tile = routes.thin(x).project
    parts_k = 1 if pinned else max(1, min(8, K // 1024))
    part_k = _ceil(_ceil(K, parts_k), tile.columns) * tile.columns
    slabs = s if parts_k == 1 else x.new_empty(modules, parts_k, T, low, dtype=torch.float32)
    with torch.cuda.device_of(x):
        low_rank.project[modules, parts_k, _ceil(T, tile.rows)](
            *_bulk(x, tile), slabs, *owners, sites, T, slots, K, part_k, low, training, parts_k == 1,
            routes.is_bulky(x), tile.rows, tile.columns, routes.precision(x),
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        if parts_k > 1:
            ends = tuple(parts_k * module for module in range(modules + 1))
            _sum(slabs, s, segment_T, segments, sites, ends, training)
        _wide(x, weight, bias, y, s, owners, sites, tuple(columns), training, pinned, backward=False)
    return y, s


@forward.register_fake
def _(x, weight, bias, segment_T, segments, counters_T, pieces, parts, folds, sites, columns, low, training, pinned):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(sites.shape[0], x.shape[0], low)


@torch.library.custom_op("tlora::lora_linear_backward", mutates_args=())
def backward(
    dy: Tensor,
    x: Tensor,
    s: Tensor,
    weight: Tensor,
    segment_T: Tensor,
    segments: Tensor,
    counters_T: Tensor,
    pieces: Tensor,
    parts: Tensor,
    folds: Tensor,
    sites: Tensor,
    columns: list[int],
    training: bool,
    pinned: bool,
) -> Tensor:
    """dX [T, K]; adds dA and dB to the gradients whose addresses `sites` holds."""
    x, dy = _aligned(x), _aligned(dy)
    T, K = x.shape
    N = weight.shape[0]
    modules, slots, _ = sites.shape
    low, spans = s.shape[-1], tuple(columns)
    owners = (segment_T, segments, counters_T)
    precision, tiles = routes.precision(x), routes.thin(x)
    wide = tiles.gradient_b.columns
    ends = tuple(accumulate((_ceil(end - start, wide) for start, end in pairwise(spans)), initial=0))
    slabs, ds, dx = x.new_empty(ends[-1], T, low), torch.empty_like(s), torch.empty_like(x)
    # A job is cut from one and a half times PART_ROWS rows on, into parts of more than two thirds of it.
    partials = 0 if pinned or 2 * T < 3 * PART_ROWS else 3 * T // (2 * PART_ROWS) + 1
    sums_a, sums_b = (x.new_empty(partials, low, n, dtype=torch.float32) for n in (modules * K, N))
    with torch.cuda.device_of(x):
        tile = tiles.gradient_b
        low_rank.gradient_b[ends[-1], len(parts)](
            *_bulk(dy, tile, spans), s, slabs, sums_b, pieces, parts, sites, T, slots, N, spans, low,
            routes.is_bulky(dy, spans), tile.rows, wide, precision,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        _sum(slabs, ds, segment_T, segments, sites, ends, training)
        _wide(dy, weight, None, dx, ds, owners, sites, spans, training, pinned, backward=True)
        tile = tiles.gradient_a
        low_rank.gradient_a[modules, _ceil(K, tile.columns), len(parts)](
            *_bulk(x, tile), ds, sums_a, *owners, pieces, parts, sites, T, slots, K, low, training,
            routes.is_bulky(x), tile.rows, tile.columns, precision,
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip
        if partials:
            spread = modules * _ceil(K, _FOLDED) + _count_tiles(spans, _FOLDED)
            low_rank.fold_sums[spread, len(folds)](
                sums_a, sums_b, folds, sites, slots, K, N, spans, low, _FOLDED, num_warps=4
            )
    return dx


@backward.register_fake
def _(dy, x, s, weight, segment_T, segments, counters_T, pieces, parts, folds, sites, columns, training, pinned):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, weight, _, *tables, columns, _, training, pinned = inputs
    ctx.save_for_backward(x, output[1], weight, *tables)
    ctx.settings = columns, training, pinned
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, dy, _):  # type: ignore[no-untyped-def]
    return backward(dy, *ctx.saved_tensors, *ctx.settings), *[None] * 13


forward.register_autograd(_differentiate, setup_context=_save)


def _aligned(tensor: Tensor) -> Tensor:
    """Rows one after the other from a multiple of 16 bytes, as the kernels read them."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def _ceil(size: int, width: int) -> int:
    """Tiles of so many rows or columns. Triton's own function serves kernels too, and takes long for that."""
    return -(-size // width)


def _power(number: int) -> int:
    """Of two, and not below it."""
    return 1 << max(number - 1, 0).bit_length()


def _count_tiles(spans: tuple[int, ...], width: int) -> int:
    """Of so many columns; none spans two modules."""
    return sum(_ceil(end - start, width) for start, end in pairwise(spans))


def _sum(
    slabs: Tensor,
    low: Tensor,
    segment_T: Tensor,
    segments: Tensor,
    sites: Tensor,
    ends: tuple[int, ...],
    training: bool,
) -> None:
    modules, T, stride = low.shape
    rows = max(8, _power(_ceil(T, _MOST_PROGRAMS)))
    low_rank.sum_slabs[modules, _ceil(T, rows)](
        slabs, low, segment_T, segments, sites, T, sites.shape[1], ends, stride, training, rows, num_warps=2
    )


def _bulk(x: Tensor, tile: routes.Thin, spans: tuple[int, ...] = ()) -> tuple[TensorDescriptor | Tensor, Tensor]:
    """What a thin product reads its wide operand by."""
    return (TensorDescriptor.from_tensor(x, [tile.rows, tile.columns]) if routes.is_bulky(x, spans) else x), x


def _wide(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    low: Tensor,
    owners: _Owners,
    sites: Tensor,
    spans: tuple[int, ...],
    training: bool,
    pinned: bool,
    *,
    backward: bool,
) -> None:
    """y = x Wᵀ + b + S Bᵀ, or x W + D ⊙ (S A): by the way that is fastest for this shape."""
    modules, slots, _ = sites.shape
    (T, N), columns = y.shape, (0, y.shape[1]) if backward else spans
    adds = backward and modules > 1  # no tile need hold two masked products: `expand` writes their sum

    def expand() -> None:
        tile = routes.thin(x).expand
        tiles = _count_tiles(columns, tile.columns)
        product.expand[_ceil(T, tile.rows), _ceil(tiles, _EXPANDED)](
            y, low, *owners, sites, T, slots, N, columns, tiles, _EXPANDED, modules, low.shape[-1], backward,
            training, tile.rows, tile.columns, routes.precision(x),
            num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers,
        )  # fmt: skip

    def tiled(shape: routes.Tile) -> None:
        if adds:
            expand()
        block = [shape.BK, shape.BN] if backward else [shape.BN, shape.BK]
        tiles = _count_tiles(columns, shape.BN)
        programs = min(_ceil(T, shape.BM) * tiles, routes.num_programs(x))
        product.fused[(programs,)](
            TensorDescriptor.from_tensor(x, [shape.BM, shape.BK]), TensorDescriptor.from_tensor(weight, block),
            TensorDescriptor.from_tensor(y, [shape.BM, shape.BN]), y, bias, low, *owners, sites, 1.0, T, slots,
            x.shape[1], N, columns, tiles, adds, low.shape[-1], backward, training, shape.BM,
            shape.BN, shape.BK, shape.GROUP, any(end % shape.BN for end in columns[1:-1]), routes.precision(x),
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip

    def library() -> None:
        expand()
        reference.add_wide(y, x, weight if backward else weight.T, bias)

    size = min(8192, max(256, _power(T)))
    key = f"{'backward' if backward else 'forward'} {x.dtype} {size}x{x.shape[1]}->{N} {spans}"
    routes.run_fastest(key, y, tiled, library, bulk=routes.has_descriptors(x, weight), pinned=pinned)

"""What every kernel shares: where a site's and a segment's numbers lie, which module a column belongs to, and dropout.

A row has two 32-bit keys, hashed from (job seed, job step, module, row within the job's own step), a column has one; an
element is a multiply-add of the three (a pairwise independent hash) and a comparison. Nothing else enters, so a mask is
the same in every kernel, tile and recomputation; its twin is `reference.keep_mask`.
"""

import triton
import triton.language as tl

from tlora.kernels.tiles import Adapters


class _Number(tl.constexpr):  # type: ignore[misc]
    """Triton asks at each launch whether any global differs from what it was: here without making three objects."""

    def __ne__(self, other: object) -> bool:
        return self.value != getattr(other, "value", other)  # type: ignore[no-any-return]


# Fields of a site (`tiles.Adapters`) and of a segment (`tiles.Tables`).
A, B, GRAD_A, GRAD_B, RANK = (_Number(number) for number in range(5))
FACTOR, SCALE, THRESHOLD, SEED_LOW, SEED_HIGH, MODULE, COLUMN = (_Number(number) for number in range(5, 12))
FIELDS = _Number(Adapters.FIELDS)
SLOT, FIRST, END, STEP = (_Number(number) for number in range(4))


@triton.jit
def pointer(field, anchor):
    """The vector whose address a field holds, as an offset from another of its type: only so does the compiler see that
    it begins at a multiple of 16 bytes, and may be read in pieces as wide."""
    SIZE: tl.constexpr = anchor.dtype.element_ty.primitive_bitwidth // 8
    return anchor + (tl.load(field) - anchor.to(tl.int64)) // 16 * (16 // SIZE)


@triton.jit
def scatter(x):
    """murmur3's finaliser, modulo 2³²."""
    x += 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def row_keys(site, step, counters):
    """Two keys a row, from the site(s) and step(s) that the rows belong to; the second is odd."""
    state = scatter(tl.load(site + SEED_LOW).to(tl.uint32))
    state = scatter(state + tl.load(site + SEED_HIGH).to(tl.uint32))
    state = scatter(state + step.to(tl.uint32))
    state = scatter(state + tl.load(site + MODULE).to(tl.uint32))
    first = scatter(state + counters.to(tl.uint32))
    return first, scatter(first) | 1


@triton.jit
def first_column(site):
    """Column of the module's whole input that A's first one stands for."""
    return tl.load(site + COLUMN).to(tl.int32)


@triton.jit
def keep(first, second, columns, threshold):
    """Bool [rows, columns of the whole input]: which ones dropout keeps. `threshold` is a scalar or [rows, 1]."""
    x = columns.to(tl.uint32) * 0x9E3779B9
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    return x[None, :] * second[:, None] + first[:, None] >= threshold


@triton.jit
def factor(site, TRAINING: tl.constexpr):
    """What the low-rank product is multiplied by: scale / (1 − p) while training, else the scale."""
    return tl.load(site + (FACTOR if TRAINING else SCALE)).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def column_tile(tile, COLUMNS, BN: tl.constexpr):
    """Module of a column tile, the module's first and end column, and the tile's first; no tile spans two modules."""
    module, first, end, start, tiles = 0, COLUMNS[0], COLUMNS[1], tile * BN, tl.cdiv(COLUMNS[1], BN)
    for i in tl.static_range(1, len(COLUMNS) - 1):
        beyond = tile >= tiles
        module = tl.where(beyond, i, module)
        first = tl.where(beyond, COLUMNS[i], first)
        end = tl.where(beyond, COLUMNS[i + 1], end)
        start = tl.where(beyond, COLUMNS[i] + (tile - tiles) * BN, start)
        tiles += tl.cdiv(COLUMNS[i + 1] - COLUMNS[i], BN)
    return module, first, end, start

"""The wide products of the mixed-job linear: Y = X Wᵀ + b + S Bᵀ, and dX = dY W + D ⊙ (dS A).

`fused` does both parts in one persistent kernel: each program walks over tiles, starts the accumulator with the tile's
low-rank product and adds the base's. `expand` adds the low-rank part to what a library product has written.
Rows of several jobs may share a tile: each job's rows of S are selected, the others are zero.
"""
# fmt: off

import triton
import triton.language as tl

from tlora.kernels.mask import (
    A, B, END, FIELDS, FIRST, RANK, SLOT, STEP, THRESHOLD, column_tile, keep, pointer, row_keys,
)


@triton.jit
def _add(acc, low, p_factor, rows, mine, shared, rank, at, i_n, m_n, W, LOW: tl.constexpr, BR: tl.constexpr,
         PRECISION: tl.constexpr):
    """acc + S F, ranks `at` to `at + BR`; F is A or B, kept as [R, W]. In a `shared` tile an F that is not finite must
    not reach the rows of other jobs, where S is 0: it is selected away, and this job's own S made NaN instead."""
    i_r = at + tl.arange(0, BR)
    m_r = i_r < rank
    # Past the first cache, which has little room beside the tiles and should keep the tables.
    b_s = tl.load(low + rows[:, None].to(tl.int64) * LOW + i_r[None, :], mask=mine[:, None], other=0.0,
                  cache_modifier=".cg")
    b_f = tl.load(p_factor + i_r[:, None].to(tl.int64) * W + i_n[None, :], mask=m_r[:, None] & m_n[None, :], other=0.0,
                  cache_modifier=".cg")
    if shared:
        sound = b_f - b_f == 0.0
        broken = tl.max(tl.max(tl.where(sound, 0, 1), 1), 0) > 0
        b_f = tl.where(sound, b_f, 0.0)
        b_s = tl.where(mine[:, None] & broken, float("nan"), b_s)
    return tl.dot(b_s, b_f, acc, input_precision=PRECISION)


@triton.jit
def _low_rank(acc, low, segments, sites, segment_0, segment_1, rows, i_n, m_n, W, FIELD: tl.constexpr,
              LOW: tl.constexpr, PRECISION: tl.constexpr):
    """acc + every job's own low-rank product on its own rows of the tile."""
    for index in tl.range(segment_0, segment_1 + 1, num_stages=1):
        segment = segments + index * 4
        slot = tl.load(segment + SLOT)
        if slot >= 0:
            site = sites + slot * FIELDS
            rank = tl.load(site + RANK).to(tl.int32)
            mine = (rows >= tl.load(segment + FIRST)) & (rows < tl.load(segment + END))
            p_factor = pointer(site + FIELD, low)
            if rank > 16:
                for at in tl.range(0, rank, 64, num_stages=1):
                    acc = _add(acc, low, p_factor, rows, mine, segment_0 < segment_1, rank, at, i_n, m_n, W, LOW, 64,
                               PRECISION)
            elif rank > 0:
                acc = _add(acc, low, p_factor, rows, mine, segment_0 < segment_1, rank, 0, i_n, m_n, W, LOW, 16,
                           PRECISION)
    return acc


@triton.jit
def _masked_low_rank(low, segments, sites, segment_0, segment_1, slot, step, counters, rows, i_n, T, SLOTS,
                     N, MODULES: tl.constexpr, LOW: tl.constexpr, TRAINING: tl.constexpr,
                     BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """Σ over modules of D ⊙ (dS A) on one tile, each with its own mask."""
    total = tl.zeros((BM, BN), tl.float32)
    for module in tl.range(0, MODULES, num_stages=1):
        acc = tl.zeros((BM, BN), tl.float32)
        acc = _low_rank(acc, low + tl.cast(module, tl.int64) * T * LOW, segments, sites + module * SLOTS * FIELDS,
                        segment_0, segment_1, rows, i_n, i_n < N, N, A, LOW, PRECISION)
        if TRAINING:
            site = sites + (module * SLOTS + tl.maximum(slot, 0)) * FIELDS
            threshold = tl.where(slot >= 0, tl.load(site + THRESHOLD), 0)
            if tl.max(threshold, 0) > 0:
                one, two = row_keys(site, step, counters)
                acc = tl.where(keep(one, two, i_n, threshold.to(tl.uint32)[:, None]), acc, 0.0)
        total += acc
    return total


@triton.jit
def _tile(acc, low, segment_T, segments, counters_T, sites, tile_m, i_n, module, first_n, end_n, T, SLOTS,
          N, MODULES: tl.constexpr, LOW: tl.constexpr, BACKWARD: tl.constexpr, TRAINING: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr):
    """The low-rank part of one tile [BM, BN]; `acc` is all zero."""
    rows = tile_m * BM + tl.arange(0, BM)
    segment_0 = tl.load(segment_T + tile_m * BM)
    segment_1 = tl.load(segment_T + tl.minimum(tile_m * BM + BM, T) - 1)
    if BACKWARD:
        m_m = rows < T
        segment = segments + tl.load(segment_T + rows, mask=m_m, other=0) * 4
        slot = tl.load(segment + SLOT)
        step = tl.load(segment + STEP)
        counters = tl.load(counters_T + rows, mask=m_m, other=0)
        if MODULES == 1:
            acc = _masked_low_rank(low, segments, sites, segment_0, segment_1, slot, step, counters, rows, i_n, T,
                                   SLOTS, N, MODULES, LOW, TRAINING, BM, BN, PRECISION)
        else:  # by halves: a sum and a product of the whole tile would not fit the registers
            HALF: tl.constexpr = BN // 2
            start = tl.min(i_n, 0)
            left = _masked_low_rank(low, segments, sites, segment_0, segment_1, slot, step, counters, rows,
                                    start + tl.arange(0, HALF), T, SLOTS, N, MODULES, LOW, TRAINING, BM, HALF,
                                    PRECISION)
            right = _masked_low_rank(low, segments, sites, segment_0, segment_1, slot, step, counters, rows,
                                     start + HALF + tl.arange(0, HALF), T, SLOTS, N, MODULES, LOW, TRAINING, BM, HALF,
                                     PRECISION)
            acc = tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (BM, BN))
    else:
        acc = _low_rank(acc, low + tl.cast(module, tl.int64) * T * LOW, segments, sites + module * SLOTS * FIELDS,
                        segment_0, segment_1, rows, i_n - first_n, i_n < end_n, end_n - first_n, B, LOW, PRECISION)
    return acc


@triton.jit
def fused(x, w, y, p_y, bias, low, segment_T, segments, counters_T, sites, T, SLOTS, K, N, COLUMNS,
          MODULES: tl.constexpr, LOW: tl.constexpr, BACKWARD: tl.constexpr, TRAINING: tl.constexpr, BM: tl.constexpr,
          BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TILES_N, RAGGED: tl.constexpr,
          PRECISION: tl.constexpr):
    """x [T, K] times w ([N, K] forward, [K, N] backward) into y [T, N], through tensor descriptors; COLUMNS are the
    output's (one span backward). RAGGED: a tile may end within another module's columns, and is stored by pointers."""
    tiles_m = tl.cdiv(T, BM)
    for tile in tl.range(tl.program_id(0), tiles_m * TILES_N, tl.num_programs(0)):
        first_m = tile // (GROUP * TILES_N) * GROUP
        size = tl.minimum(tiles_m - first_m, GROUP)
        tile_m = first_m + tile % (GROUP * TILES_N) % size
        module, first_n, end_n, start_n = column_tile(tile % (GROUP * TILES_N) // size, COLUMNS, BN)
        i_n = start_n + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        acc = _tile(acc, low, segment_T, segments, counters_T, sites, tile_m, i_n, module, first_n, end_n, T, SLOTS,
                    N, MODULES, LOW, BACKWARD, TRAINING, BM, BN, PRECISION)
        for k in range(0, K, BK):
            if BACKWARD:
                acc = tl.dot(x.load([tile_m * BM, k]), w.load([k, start_n]), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x.load([tile_m * BM, k]), w.load([start_n, k]).T, acc, input_precision=PRECISION)
        if bias is not None:
            acc += tl.load(bias + i_n, mask=i_n < end_n, other=0.0).to(tl.float32)[None, :]
        if RAGGED:
            rows = tile_m * BM + tl.arange(0, BM)
            p_tile = p_y + rows[:, None].to(tl.int64) * N + i_n[None, :]
            tl.store(p_tile, acc.to(p_y.dtype.element_ty), mask=(rows < T)[:, None] & (i_n < end_n)[None, :])
        else:
            y.store([tile_m * BM, start_n], acc.to(p_y.dtype.element_ty))


@triton.jit
def expand(y, low, segment_T, segments, counters_T, sites, T, SLOTS, N, COLUMNS,
           MODULES: tl.constexpr, LOW: tl.constexpr, BACKWARD: tl.constexpr, TRAINING: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr, PRECISION: tl.constexpr):
    """y [T, N] += its low-rank part; grid (row tiles, column tiles)."""
    tile_m = tl.program_id(0)
    module, first_n, end_n, start_n = column_tile(tl.program_id(1), COLUMNS, BN)
    rows, i_n = tile_m * BM + tl.arange(0, BM), start_n + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    acc = _tile(acc, low, segment_T, segments, counters_T, sites, tile_m, i_n, module, first_n, end_n, T, SLOTS, N,
                MODULES, LOW, BACKWARD, TRAINING, BM, BN, PRECISION)
    p_y = y + rows[:, None].to(tl.int64) * N + i_n[None, :]
    mask = (rows < T)[:, None] & (i_n < end_n)[None, :]
    tl.store(p_y, (tl.load(p_y, mask=mask, other=0.0).to(tl.float32) + acc).to(y.dtype.element_ty), mask=mask)

"""The wide products of the mixed-job linear: Y = X Wᵀ + b + S Bᵀ, and dX = dY W + D ⊙ (dS A).

`fused` does both parts in one persistent kernel: each program walks over tiles, starts the accumulator with the tile's
low-rank product and adds the base's. `expand` writes the low-rank part alone, for a product that adds to it.
Rows of several jobs may share a tile: each job's rows of S are selected, the others are zero.
"""
# fmt: off

import triton
import triton.language as tl

from tlora.kernels.mask import (
    A, B, END, FIELDS, FIRST, RANK, SLOT, STEP, THRESHOLD, column_tile, first_column, keep, pointer, row_keys,
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
def _drop(acc, segment, site, counters_T, rows, mine, i_n):
    """D ⊙ acc on one job's own rows."""
    threshold = tl.load(site + THRESHOLD)
    if threshold > 0:
        first, second = row_keys(site, tl.load(segment + STEP), tl.load(counters_T + rows, mask=mine, other=0))
        columns = i_n + first_column(site)
        acc = tl.where(keep(first, second, columns, threshold.to(tl.uint32)) | ~mine[:, None], acc, 0.0)
    return acc


@triton.jit
def _low_rank(acc, low, segment_0, segment_1, segments, sites, counters_T, rows, i_n, first_n, end_n,
              FIELD: tl.constexpr, LOW: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + every job's own low-rank product on its own rows of the tile; `acc` is all zero where DROPS."""
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
                    acc = _add(acc, low, p_factor, rows, mine, segment_0 < segment_1, rank, at, i_n - first_n,
                               i_n < end_n, end_n - first_n, LOW, 64, PRECISION)
            elif rank > 0:
                acc = _add(acc, low, p_factor, rows, mine, segment_0 < segment_1, rank, 0, i_n - first_n, i_n < end_n,
                           end_n - first_n, LOW, 16, PRECISION)
            if DROPS:
                acc = _drop(acc, segment, site, counters_T, rows, mine, i_n)
    return acc


@triton.jit
def _owners(segment_T, tile_m, T, BM: tl.constexpr):
    """The first and the last segment that have rows in a tile."""
    return tl.load(segment_T + tile_m * BM), tl.load(segment_T + tl.minimum(tile_m * BM + BM, T) - 1)


@triton.jit
def _place(tile, tiles_m, TILES_N, COLUMNS, GROUP: tl.constexpr, BN: tl.constexpr):
    """Row tile, module, the module's first and end column, and the tile's first; tiles that follow one another share
    their rows or columns in the cache."""
    first_m = tile // (GROUP * TILES_N) * GROUP
    size = tl.minimum(tiles_m - first_m, GROUP)
    module, first_n, end_n, start_n = column_tile(tile % (GROUP * TILES_N) // size, COLUMNS, BN)
    return first_m + tile % (GROUP * TILES_N) % size, module, first_n, end_n, start_n


@triton.jit
def _fetch(tile, tiles, tiles_m, TILES_N, COLUMNS, low, segment_T, segments, sites, T, SLOTS, GROUP: tl.constexpr,
           FIELD: tl.constexpr, LOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr):
    """Up to BR ranks of S and the factor, of the job that alone owns a tile: on their way while another tile is worked
    on. Its rank, 0 where nobody does; the tile's segments."""
    tile_m, module, first_n, end_n, start_n = _place(tl.minimum(tile, tiles - 1), tiles_m, TILES_N, COLUMNS, GROUP, BN)
    segment_0, segment_1 = _owners(segment_T, tile_m, T, BM)
    slot = tl.load(segments + segment_0 * 4 + SLOT)
    site = sites + (module * SLOTS + tl.maximum(slot, 0)) * FIELDS
    alone = (tile < tiles) & (segment_0 == segment_1) & (slot >= 0)
    rank = tl.where(alone, tl.load(site + RANK), 0).to(tl.int32)
    i_r, rows = tl.arange(0, BR), tile_m * BM + tl.arange(0, BM)
    i_n, W = start_n - first_n + tl.arange(0, BN), end_n - first_n
    p_s = low + tl.cast(module, tl.int64) * T * LOW + rows[:, None].to(tl.int64) * LOW + i_r[None, :]
    b_s = tl.load(p_s, mask=(rows < T)[:, None] & (i_r < tl.cdiv(rank, 16) * 16)[None, :], other=0.0,
                  cache_modifier=".cg")
    b_f = tl.load(pointer(site + FIELD, low) + i_r[:, None].to(tl.int64) * W + i_n[None, :],
                  mask=(i_r < rank)[:, None] & (i_n < W)[None, :], other=0.0, cache_modifier=".cg")
    return segment_0, segment_1, slot, rank, b_s, b_f


@triton.jit
def fused(x, w, y, p_y, bias, low, segment_T, segments, counters_T, sites, unit, T, SLOTS, K, N, COLUMNS, TILES_N,
          ADDS: tl.constexpr, LOW: tl.constexpr, BACKWARD: tl.constexpr, TRAINING: tl.constexpr,
          BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, RAGGED: tl.constexpr,
          PRECISION: tl.constexpr):
    """x [T, K] times w ([N, K] forward, [K, N] backward) into y [T, N], through tensor descriptors; COLUMNS are the
    output's (one span backward). ADDS: y holds its low-rank part. RAGGED: a tile may end within another module's
    columns, and is stored by pointers. `unit` is 1, which the compiler is not to know: a product with it gives the
    accumulator registers anew. Else those of the low-rank product are moved within the pipeline, and ptxas has each
    wgmma wait for the one before (its note C7515)."""
    FIELD: tl.constexpr = A if BACKWARD else B
    DROPS: tl.constexpr = BACKWARD and TRAINING
    BR: tl.constexpr = 64
    tiles_m = tl.cdiv(T, BM)
    tiles = tiles_m * TILES_N
    if not ADDS:
        segment_0, segment_1, slot, rank, b_s, b_f = _fetch(
            tl.program_id(0), tiles, tiles_m, TILES_N, COLUMNS, low, segment_T, segments, sites, T, SLOTS, GROUP, FIELD,
            LOW, BM, BN, BR)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, module, first_n, end_n, start_n = _place(tile, tiles_m, TILES_N, COLUMNS, GROUP, BN)
        i_n, rows = start_n + tl.arange(0, BN), tile_m * BM + tl.arange(0, BM)
        if ADDS:
            acc = y.load([tile_m * BM, start_n]).to(tl.float32)
        else:
            acc = tl.zeros((BM, BN), tl.float32)
            s, of_module = low + tl.cast(module, tl.int64) * T * LOW, sites + module * SLOTS * FIELDS
            if (segment_0 < segment_1) | (rank > BR):
                acc = _low_rank(acc, s, segment_0, segment_1, segments, of_module, counters_T, rows, i_n, first_n,
                                end_n, FIELD, LOW, DROPS, PRECISION)
            elif rank > 0:
                acc = tl.dot(b_s, b_f, acc, input_precision=PRECISION)
                if DROPS:
                    acc = _drop(acc, segments + segment_0 * 4, of_module + slot * FIELDS, counters_T, rows, rows < T,
                                i_n)
            acc *= unit
            segment_0, segment_1, slot, rank, b_s, b_f = _fetch(
                tile + tl.num_programs(0), tiles, tiles_m, TILES_N, COLUMNS, low, segment_T, segments, sites, T, SLOTS,
                GROUP, FIELD, LOW, BM, BN, BR)
        for k in range(0, K, BK):
            if BACKWARD:
                acc = tl.dot(x.load([tile_m * BM, k]), w.load([k, start_n]), acc, input_precision=PRECISION)
            else:
                acc = tl.dot(x.load([tile_m * BM, k]), w.load([start_n, k]).T, acc, input_precision=PRECISION)
        if RAGGED:
            _store(p_y, bias, acc, rows, i_n, end_n, T, N)
        else:
            y.store([tile_m * BM, start_n], _biased(acc, bias, i_n, end_n).to(p_y.dtype.element_ty))


@triton.jit
def _biased(total, bias, i_n, end_n):
    if bias is not None:
        total += tl.load(bias + i_n, mask=i_n < end_n, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit
def _store(y, bias, total, rows, i_n, end_n, T, N):
    """One tile, rounded, with the bias."""
    total = _biased(total, bias, i_n, end_n)
    p_y = y + rows[:, None].to(tl.int64) * N + i_n[None, :]
    tl.store(p_y, total.to(y.dtype.element_ty), mask=(rows < T)[:, None] & (i_n < end_n)[None, :])


@triton.jit
def _expand_alone(y, low, segment, sites, slot, counters_T, rows, tile_0, tile_1, T, SLOTS, N, COLUMNS,
                  SUMMED: tl.constexpr, LOW: tl.constexpr, BACKWARD: tl.constexpr, TRAINING: tl.constexpr,
                  BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr):
    """Column tiles of a row tile that one job owns, of ranks up to BR: one loop over tiles and modules, so that what
    the next product needs is on its way during this one."""
    FIELD: tl.constexpr = A if BACKWARD else B
    i_r = tl.arange(0, BR)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tile_0 * SUMMED, tile_1 * SUMMED):
        module, first_n, end_n, start_n = column_tile(step // SUMMED, COLUMNS, BN)
        if BACKWARD:
            module = step % SUMMED
        site = sites + (module * SLOTS + slot) * FIELDS
        rank = tl.load(site + RANK).to(tl.int32)
        i_n, W = start_n + tl.arange(0, BN), end_n - first_n
        p_s = low + tl.cast(module, tl.int64) * T * LOW + rows[:, None].to(tl.int64) * LOW + i_r[None, :]
        b_s = tl.load(p_s, mask=(rows < T)[:, None] & (i_r < tl.cdiv(rank, 16) * 16)[None, :], other=0.0)
        b_f = tl.load(pointer(site + FIELD, low) + i_r[:, None].to(tl.int64) * W + (i_n - first_n)[None, :],
                      mask=(i_r < rank)[:, None] & (i_n < end_n)[None, :], other=0.0)
        acc = tl.dot(b_s, b_f, input_precision=PRECISION)
        if BACKWARD and TRAINING:
            acc = _drop(acc, segment, site, counters_T, rows, rows < T, i_n)
        total += acc
        if step % SUMMED == SUMMED - 1:
            _store(y, None, total, rows, i_n, end_n, T, N)
            total = tl.zeros((BM, BN), tl.float32)


@triton.jit
def expand(y, low, segment_T, segments, counters_T, sites, T, SLOTS, N, COLUMNS, TILES_N, COUNT,
           MODULES: tl.constexpr, LOW: tl.constexpr, BACKWARD: tl.constexpr, TRAINING: tl.constexpr, BM: tl.constexpr,
           BN: tl.constexpr, PRECISION: tl.constexpr):
    """y [T, N] = its low-rank part; backward the sum over MODULES, each with its own mask. Grid (row tiles,
    column tiles by COUNT)."""
    SUMMED: tl.constexpr = MODULES if BACKWARD else 1
    tile_m, tile_0 = tl.program_id(0), tl.program_id(1) * COUNT
    tile_1 = tl.minimum(tile_0 + COUNT, TILES_N)
    rows = tile_m * BM + tl.arange(0, BM)
    segment_0, segment_1 = _owners(segment_T, tile_m, T, BM)
    segment = segments + segment_0 * 4
    slot = tl.load(segment + SLOT)
    rank = 0
    for i in tl.static_range(MODULES):
        rank = tl.maximum(rank, tl.load(sites + (i * SLOTS + tl.maximum(slot, 0)) * FIELDS + RANK).to(tl.int32))
    if (segment_0 < segment_1) | (slot < 0) | (rank > 64):
        for tile in tl.range(tile_0, tile_1, num_stages=1):
            module, first_n, end_n, start_n = column_tile(tile, COLUMNS, BN)
            i_n = start_n + tl.arange(0, BN)
            total = tl.zeros((BM, BN), tl.float32)
            for index in tl.range(0, SUMMED, num_stages=1):
                at = index if BACKWARD else module
                total += _low_rank(tl.zeros((BM, BN), tl.float32), low + tl.cast(at, tl.int64) * T * LOW, segment_0,
                                   segment_1, segments, sites + at * SLOTS * FIELDS, counters_T, rows, i_n, first_n,
                                   end_n, A if BACKWARD else B, LOW, BACKWARD and TRAINING, PRECISION)
            _store(y, None, total, rows, i_n, end_n, T, N)
    elif rank > 16:
        _expand_alone(y, low, segment, sites, slot, counters_T, rows, tile_0, tile_1, T, SLOTS, N, COLUMNS,
                      SUMMED, LOW, BACKWARD, TRAINING, BM, BN, 64, PRECISION)
    else:
        _expand_alone(y, low, segment, sites, slot, counters_T, rows, tile_0, tile_1, T, SLOTS, N, COLUMNS,
                      SUMMED, LOW, BACKWARD, TRAINING, BM, BN, 16, PRECISION)

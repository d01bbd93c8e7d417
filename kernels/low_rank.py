"""The thin products of the mixed-job linear: S = f X̂ Aᵀ, dS = f dY B, dB += dYᵀ S, dA += dSᵀ X̂, f = s / (1 − p).

Each reads its wide operand once for every 64 ranks, in bulk copies where BULK (`x` and `dy` are tensor descriptors
then); modules that share X find it in the cache. Sums over rows follow the job's own pieces in the job's own order, so
a gradient does not depend on who is packed beside it. Ranks are padded to 16, or to 64 at a time, in registers only; S
and dS are zero where a rank was padded.
Tables and shape letters: `tiles.py`. A lies as [R, K], B as [R, N]; LOW is the row stride of S and dS.
"""
# fmt: off

import triton
import triton.language as tl

from tlora.kernels.mask import (
    A, B, END, FIELDS, FIRST, GRAD_A, GRAD_B, RANK, SLOT, STEP, THRESHOLD, column_tile, factor, first_column,
    keep, pointer, row_keys,
)


@triton.jit
def _slab(rows, i_r, T):
    """Offsets within a slab, [LOW / 16, T, 16]: rows of few ranks lie side by side, and fill the lines of the cache."""
    return (i_r // 16)[None, :].to(tl.int64) * T * 16 + (rows[:, None] * 16 + (i_r % 16)[None, :])


@triton.jit
def _done(acc, m_r, MASKED: tl.constexpr):
    """A sum that is used at once, and so waited for. A product whose left operand is computed reads it from registers,
    and Triton, which lets products run on through a loop, does not wait before the next round writes them anew: where
    other kernels held the tensor cores up, sums came out wrong, or NaN."""
    return tl.where(m_r[None, :], acc, 0.0) if MASKED else acc


@triton.jit
def _project(x, p_x, low, site, segment, counters_T, tile, rows, rank, at, start_k, T, K, PART_K,
             LOW: tl.constexpr, TRAINING: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr, BULK: tl.constexpr,
             BM: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, PRECISION: tl.constexpr):
    """One segment's rows of a row tile, ranks `at` to `at + BR`."""
    mine = (rows >= tl.load(segment + FIRST)) & (rows < tl.load(segment + END))
    i_r = at + tl.arange(0, BR)
    m_r = i_r < rank
    p_a = pointer(site + A, p_x) + i_r[None, :].to(tl.int64) * K
    p_x += rows[:, None].to(tl.int64) * K
    if MASKED:
        first, second = row_keys(site, tl.load(segment + STEP), tl.load(counters_T + rows, mask=mine, other=0))
        threshold = tl.load(site + THRESHOLD).to(tl.uint32)
        shift = first_column(site)
    acc = tl.zeros((BM, BR), tl.float32)
    for k in range(0, PART_K, BK):
        i_k = start_k + k + tl.arange(0, BK)
        m_k = i_k < K
        if BULK:  # others' rows too: no row of a product sees another
            b_x = x.load([tile * BM, start_k + k])
        else:
            b_x = tl.load(p_x + i_k[None, :], mask=mine[:, None] & m_k[None, :], other=0.0)
        if MASKED:
            b_x = tl.where(keep(first, second, i_k + shift, threshold), b_x, 0.0)
        b_a = tl.load(p_a + i_k[:, None], mask=m_r[None, :] & m_k[:, None], other=0.0)
        acc = _done(tl.dot(b_x, b_a, acc, input_precision=PRECISION), m_r, MASKED)
    if WHOLE:
        acc *= factor(site, TRAINING)
    o_low = rows[:, None].to(tl.int64) * LOW + i_r[None, :] if WHOLE else _slab(rows.to(tl.int64), i_r, T)
    tl.store(low + o_low, acc.to(low.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _project_job(x, p_x, low, site, segment, counters_T, tile, rows, rank, start_k, T, K, PART_K, LOW: tl.constexpr,
                 TRAINING: tl.constexpr, WHOLE: tl.constexpr, MASKED: tl.constexpr, BULK: tl.constexpr,
                 BM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """All ranks of one segment's job."""
    if rank > 16:
        for at in tl.range(0, rank, 64, num_stages=1):
            _project(x, p_x, low, site, segment, counters_T, tile, rows, rank, at, start_k, T, K, PART_K, LOW, TRAINING,
                     WHOLE, MASKED, BULK, BM, BK, 64, PRECISION)
    elif rank > 0:
        _project(x, p_x, low, site, segment, counters_T, tile, rows, rank, 0, start_k, T, K, PART_K, LOW, TRAINING,
                 WHOLE, MASKED, BULK, BM, BK, 16, PRECISION)


@triton.jit
def project(x, p_x, low, segment_T, segments, counters_T, sites, T, SLOTS, K, PART_K, LOW: tl.constexpr,
            TRAINING: tl.constexpr, WHOLE: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr,
            BK: tl.constexpr, PRECISION: tl.constexpr):
    """S before its sum over parts of K, slabs [module, part of K]; the whole S where there is one part. Grid
    (modules, parts of K, row tiles), so that the modules of a tile find its X in the cache."""
    module, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * BM + tl.arange(0, BM)
    low += (module * tl.num_programs(1) + part).to(tl.int64) * T * LOW
    last = tl.load(segment_T + tl.minimum(tile * BM + BM, T) - 1)
    for index in tl.range(tl.load(segment_T + tile * BM), last + 1, num_stages=1):
        segment = segments + index * 4
        slot = tl.load(segment + SLOT)
        if slot >= 0:
            site = sites + (module * SLOTS + slot) * FIELDS
            rank = tl.load(site + RANK).to(tl.int32)
            if TRAINING & (tl.load(site + THRESHOLD) > 0):
                _project_job(x, p_x, low, site, segment, counters_T, tile, rows, rank, part * PART_K, T, K, PART_K, LOW,
                             TRAINING, WHOLE, True, BULK, BM, BK, PRECISION)
            else:
                _project_job(x, p_x, low, site, segment, counters_T, tile, rows, rank, part * PART_K, T, K, PART_K, LOW,
                             TRAINING, WHOLE, False, BULK, BM, BK, PRECISION)


@triton.jit
def _store(p_grad, p_sum, acc, partial, mask):
    """Add one piece's sum to the gradient, or leave it as a partial sum."""
    if partial < 0:
        tl.store(p_grad, tl.load(p_grad, mask=mask, other=0.0) + acc, mask=mask)
    else:
        tl.store(p_sum, acc, mask=mask)


@triton.jit
def _rows_b(acc, b_dy, b_b, p_s, p_slab, m_m, PRECISION: tl.constexpr):
    """Some rows' part of dB, added; their part of dS, stored. That is first: the other product then runs meanwhile."""
    b_s = tl.load(p_s, mask=m_m[:, None], other=0.0)
    b_ds = tl.dot(b_dy, b_b, input_precision=PRECISION)
    acc = tl.dot(tl.trans(b_dy), b_s, acc, input_precision=PRECISION)
    tl.store(p_slab, b_ds.to(p_slab.dtype.element_ty), mask=m_m[:, None])
    return acc


@triton.jit
def _gradient_b(dy, p_dy, low, slab, site, grad, sums, pieces, part, rank, at, i_n, m_n, start_n, first_n, W, T,
                N, LOW: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
                PRECISION: tl.constexpr):
    """One part's rows over BN columns of one module of width W, ranks `at` to `at + BR`."""
    i_r = at + tl.arange(0, BR)
    m_r = i_r < rank
    m_rn = m_n[:, None] & m_r[None, :]
    o_rn = i_r[None, :] * W + (i_n - first_n)[:, None]  # no factor has 2³¹ elements
    b_b = tl.load(pointer(site + B, p_dy) + o_rn, mask=m_rn, other=0.0)
    i_m = tl.arange(0, BM)
    o_mr = i_m[:, None] * LOW + i_r[None, :]
    slab += _slab(i_m, i_r, T)
    piece_0 = tl.load(part + 1)
    for piece in tl.range(piece_0, piece_0 + tl.load(part + 2), num_stages=1):
        first, rows = tl.load(pieces + piece * 2), tl.load(pieces + piece * 2 + 1)
        acc = tl.zeros((BN, BR), tl.float32)
        whole = rows // BM * BM if BULK else 0
        if BULK:
            for m in range(0, whole, BM):
                o_m = (first + m).to(tl.int64)
                acc = _rows_b(acc, dy.load([first + m, start_n]), b_b, low + o_m * LOW + o_mr, slab + o_m * 16,
                              i_m < BM, PRECISION)
        for m in tl.range(whole, rows, BM, num_stages=1 if BULK else None):
            m_m = i_m < rows - m
            b_dy = tl.load(p_dy + (first + m + i_m).to(tl.int64)[:, None] * N + i_n[None, :],
                           mask=m_m[:, None] & m_n[None, :], other=0.0)
            o_m = (first + m).to(tl.int64)
            acc = _rows_b(acc, b_dy, b_b, low + o_m * LOW + o_mr, slab + o_m * 16, m_m, PRECISION)
        _store(grad + o_rn, sums + o_rn, acc, tl.load(part + 3), m_rn)


@triton.jit
def gradient_b(dy, p_dy, low, slabs, sums, pieces, parts, sites, T, SLOTS, N, COLUMNS,
               LOW: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
               PRECISION: tl.constexpr):
    """dB, and dS before its sum over column tiles, a slab for each; grid (column tiles, parts)."""
    tile, part = tl.program_id(0), parts + tl.program_id(1) * 4
    slot = tl.load(part)
    if slot < 0:
        return
    module, first_n, end_n, start = column_tile(tile, COLUMNS, BN)
    i_n = start + tl.arange(0, BN)
    site = sites + (module * SLOTS + slot) * FIELDS
    rank = tl.load(site + RANK).to(tl.int32)
    grad = pointer(site + GRAD_B, sums)
    low += tl.cast(module, tl.int64) * T * LOW
    slabs += tile.to(tl.int64) * T * LOW
    sums += (tl.load(part + 3).to(tl.int64) * N + first_n) * LOW
    W = end_n - first_n
    if rank > 16:
        for at in tl.range(0, rank, 64, num_stages=1):
            _gradient_b(dy, p_dy, low, slabs, site, grad, sums, pieces, part, rank, at, i_n, i_n < end_n, start,
                        first_n, W, T, N, LOW, BULK, BM, BN, 64, PRECISION)
    elif rank > 0:
        _gradient_b(dy, p_dy, low, slabs, site, grad, sums, pieces, part, rank, 0, i_n, i_n < end_n, start, first_n, W,
                    T, N, LOW, BULK, BM, BN, 16, PRECISION)


@triton.jit
def sum_slabs(slabs, low, segment_T, segments, sites, T, SLOTS, ENDS, LOW: tl.constexpr,
              TRAINING: tl.constexpr, BM: tl.constexpr):
    """S or dS [module, T, LOW] = f Σ slabs, each module's from ENDS to ENDS, in their order; some are
    on their way while others are added. Grid (modules, row tiles)."""
    module = tl.program_id(0)
    rows = tl.program_id(1) * BM + tl.arange(0, BM)
    m_m = rows < T
    slot = tl.load(segments + tl.load(segment_T + rows, mask=m_m, other=0) * 4 + SLOT, mask=m_m, other=-1)
    site = sites + (module * SLOTS + tl.maximum(slot, 0)) * FIELDS
    rank = tl.where(slot >= 0, tl.load(site + RANK), 0).to(tl.int32)
    padded = tl.where(rank > 16, tl.cdiv(rank, 64) * 4, tl.minimum(rank, 1)) * 16
    first, end = 0, 0
    for i in tl.static_range(len(ENDS) - 1):
        first = tl.where(module == i, ENDS[i], first)
        end = tl.where(module == i, ENDS[i + 1], end)
    i_r = tl.arange(0, LOW)
    mask = i_r[None, :] < padded[:, None]
    slabs += _slab(rows.to(tl.int64), i_r, T)
    total = tl.zeros((BM, LOW), tl.float32)
    for slab in tl.range(first, end, num_stages=8):
        p_slab = slabs + tl.cast(slab, tl.int64) * T * LOW
        total += tl.load(p_slab, mask=mask, other=0.0).to(tl.float32)
    total *= factor(site, TRAINING)[:, None]
    p_low = low + (module.to(tl.int64) * T + rows[:, None]) * LOW + i_r[None, :]
    tl.store(p_low, total.to(low.dtype.element_ty), mask=mask)


@triton.jit
def _rows_a(acc, b_x, p_ds, counters, site, step, i_k, m_m, m_r, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """Some rows' part of dA, added."""
    b_ds = tl.load(p_ds, mask=m_m[:, None], other=0.0)
    if MASKED:
        first, second = row_keys(site, step, tl.load(counters, mask=m_m, other=0))
        threshold = tl.load(site + THRESHOLD).to(tl.uint32)
        b_x = tl.where(keep(first, second, i_k + first_column(site), threshold), b_x, 0.0)
    return _done(tl.dot(tl.trans(b_x), b_ds, acc, input_precision=PRECISION), m_r, MASKED)


@triton.jit
def _gradient_a(x, p_x, d_low, site, grad, sums, counters_T, pieces, part, step, rank, at, start_k, K,
                LOW: tl.constexpr, MASKED: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
                BR: tl.constexpr, PRECISION: tl.constexpr):
    """One part's rows over BK columns, ranks `at` to `at + BR`."""
    i_r, i_k = at + tl.arange(0, BR), start_k + tl.arange(0, BK)
    m_r, m_k = i_r < rank, i_k < K
    m_rk = m_k[:, None] & m_r[None, :]
    i_m = tl.arange(0, BM)
    o_mr = i_m[:, None] * LOW + i_r[None, :]
    o_rk = i_r[None, :] * K + i_k[:, None]
    piece_0 = tl.load(part + 1)
    for piece in tl.range(piece_0, piece_0 + tl.load(part + 2), num_stages=1):
        first, rows = tl.load(pieces + piece * 2), tl.load(pieces + piece * 2 + 1)
        acc = tl.zeros((BK, BR), tl.float32)
        whole = rows // BM * BM if BULK else 0
        if BULK:
            for m in range(0, whole, BM):
                acc = _rows_a(acc, x.load([first + m, start_k]), d_low + (first + m).to(tl.int64) * LOW + o_mr,
                              counters_T + first + m + i_m, site, step, i_k, i_m < BM, m_r, MASKED, PRECISION)
        for m in tl.range(whole, rows, BM, num_stages=1 if BULK else None):
            m_m = i_m < rows - m
            b_x = tl.load(p_x + (first + m + i_m).to(tl.int64)[:, None] * K + i_k[None, :],
                          mask=m_m[:, None] & m_k[None, :], other=0.0)
            acc = _rows_a(acc, b_x, d_low + (first + m).to(tl.int64) * LOW + o_mr, counters_T + first + m + i_m, site,
                          step, i_k, m_m, m_r, MASKED, PRECISION)
        _store(grad + o_rk, sums + o_rk, acc, tl.load(part + 3), m_rk)


@triton.jit
def _gradient_a_job(x, p_x, d_low, site, grad, sums, counters_T, pieces, part, step, rank, start_k, K,
                    LOW: tl.constexpr, MASKED: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
                    PRECISION: tl.constexpr):
    """All ranks of one part's job."""
    if rank > 16:
        for at in tl.range(0, rank, 64, num_stages=1):
            _gradient_a(x, p_x, d_low, site, grad, sums, counters_T, pieces, part, step, rank, at, start_k, K, LOW,
                        MASKED, BULK, BM, BK, 64, PRECISION)
    elif rank > 0:
        _gradient_a(x, p_x, d_low, site, grad, sums, counters_T, pieces, part, step, rank, 0, start_k, K, LOW, MASKED,
                    BULK, BM, BK, 16, PRECISION)


@triton.jit
def gradient_a(x, p_x, d_low, sums, segment_T, segments, counters_T, pieces, parts, sites, T, SLOTS, K,
               LOW: tl.constexpr, TRAINING: tl.constexpr, BULK: tl.constexpr, BM: tl.constexpr,
               BK: tl.constexpr, PRECISION: tl.constexpr):
    """dA; grid (modules, column tiles, parts), so that the modules of a tile find its X in the cache."""
    module, tile, part = tl.program_id(0), tl.program_id(1), parts + tl.program_id(2) * 4
    slot = tl.load(part)
    if slot < 0:
        return
    site = sites + (module * SLOTS + slot) * FIELDS
    rank = tl.load(site + RANK).to(tl.int32)
    grad = pointer(site + GRAD_A, sums)
    d_low += module.to(tl.int64) * T * LOW
    sums += (tl.load(part + 3).to(tl.int64) * tl.num_programs(0) + module) * K * LOW
    step = tl.load(segments + tl.load(segment_T + tl.load(pieces + tl.load(part + 1) * 2)) * 4 + STEP)
    if TRAINING & (tl.load(site + THRESHOLD) > 0):
        _gradient_a_job(x, p_x, d_low, site, grad, sums, counters_T, pieces, part, step, rank, tile * BK, K, LOW, True,
                        BULK, BM, BK, PRECISION)
    else:
        _gradient_a_job(x, p_x, d_low, site, grad, sums, counters_T, pieces, part, step, rank, tile * BK, K, LOW, False,
                        BULK, BM, BK, PRECISION)


@triton.jit
def _fold(sums, grad, fold, stride, rank, i_n, m_n, W, LOW: tl.constexpr, BN: tl.constexpr):
    """All ranks of one job's gradient, of some columns."""
    partial, count = tl.load(fold + 1), tl.load(fold + 2)
    for r in tl.range(rank):
        o_n = tl.cast(r, tl.int64) * W + i_n
        total = tl.load(grad + o_n, mask=m_n, other=0.0)
        for i in tl.range(count):
            total += tl.load(sums + tl.cast(partial + i, tl.int64) * stride + o_n, mask=m_n, other=0.0)
        tl.store(grad + o_n, total, mask=m_n)


@triton.jit
def fold_sums(sums_a, sums_b, folds, sites, SLOTS, K, N, COLUMNS,
              LOW: tl.constexpr, BN: tl.constexpr):
    """Add the partial sums of jobs that were cut into several parts to their gradients, in order; grid (column tiles of
    every module's A, then of every module's B; jobs that were cut)."""
    tile, fold = tl.program_id(0), folds + tl.program_id(1) * 4
    slot = tl.load(fold)
    if slot < 0:
        return
    MODULES: tl.constexpr = len(COLUMNS) - 1
    TILES = tl.cdiv(K, BN)
    if tile < MODULES * TILES:
        module = tile // TILES
        site = sites + (module * SLOTS + slot) * FIELDS
        i_n = tile % TILES * BN + tl.arange(0, BN)
        grad = pointer(site + GRAD_A, sums_a)
        _fold(sums_a + module.to(tl.int64) * K * LOW, grad, fold, MODULES * K * LOW, tl.load(site + RANK).to(tl.int32),
              i_n, i_n < K, K, LOW, BN)
    else:
        module, first_n, end_n, start = column_tile(tile - MODULES * TILES, COLUMNS, BN)
        site = sites + (module * SLOTS + slot) * FIELDS
        i_n = start - first_n + tl.arange(0, BN)
        grad = pointer(site + GRAD_B, sums_b)
        _fold(sums_b + tl.cast(first_n, tl.int64) * LOW, grad, fold, N * LOW, tl.load(site + RANK).to(tl.int32),
              i_n, i_n < end_n - first_n, end_n - first_n, LOW, BN)

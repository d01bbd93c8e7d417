"""Clipping and AdamW for all jobs that step in a tick, in two launches however many jobs there are.

Every job's vectors are cut into blocks; the blocks of all jobs, end to end, are the programs of both launches. The
first sums each block's squared gradient. The second adds up a job's sums, in one order in all of the job's programs:
they come to the same norm, and it depends on no other job. Called by the trainer.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl

from tlora.kernels import reference, routes
from tlora.kernels.tiles import Update

_BLOCK = tl.constexpr(32768)  # elements of a program: 100M parameters make 3000 sums, which every program reads
_CHUNK = tl.constexpr(2048)  # elements of a program in flight
_FIELDS = tl.constexpr(10)  # first block and the one after the last; then as in `_fields`
_FACTORS = tl.constexpr(10)  # as in `_factors`
_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _job_of_program(p_fields):  # type: ignore[no-untyped-def]
    """By a loop, not in one block as long as the table: one binary serves, with equal bits, any number of jobs."""
    i_job = 0
    while tl.load(p_fields + i_job * _FIELDS + 1) <= tl.program_id(0):
        i_job += 1
    return i_job


@triton.jit
def _sum_squares(p_fields, p_sums):  # type: ignore[no-untyped-def]
    p_job = p_fields + _job_of_program(p_fields) * _FIELDS
    o_first = (tl.program_id(0) - tl.load(p_job)) * _BLOCK
    size = tl.load(p_job + 2)
    p_grad = tl.load(p_job + 5).to(tl.pointer_type(tl.float32))
    b_sum = tl.zeros([_CHUNK], tl.float32)
    for o_chunk in range(o_first, tl.minimum(o_first + _BLOCK, size), _CHUNK):
        o = o_chunk + tl.arange(0, _CHUNK)
        b_grad = tl.load(p_grad + o, mask=o < size, other=0.0)
        b_sum += b_grad * b_grad
    tl.store(p_sums + tl.program_id(0), tl.sum(b_sum))


@triton.jit  # type: ignore[untyped-decorator]
def _step(p_fields, p_factors, p_sums, p_norms, COMPUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    i_job = _job_of_program(p_fields)
    p_job = p_fields + i_job * _FIELDS
    i_first, i_end = tl.load(p_job), tl.load(p_job + 1)
    size, b_start = tl.load(p_job + 2), tl.load(p_job + 3)
    loss = tl.load(tl.load(p_job + 4).to(tl.pointer_type(tl.float32)))
    p_grad = tl.load(p_job + 5).to(tl.pointer_type(tl.float32))
    p_master = tl.load(p_job + 6).to(tl.pointer_type(tl.float32))
    p_m = tl.load(p_job + 7).to(tl.pointer_type(tl.float32))
    p_v = tl.load(p_job + 8).to(tl.pointer_type(tl.float32))
    p_compute = tl.load(p_job + 9).to(tl.pointer_type(COMPUTE))
    p_factor = p_factors + i_job * _FACTORS
    decay_a, decay_b = tl.load(p_factor), tl.load(p_factor + 1)
    rate_a, rate_b = tl.load(p_factor + 2), tl.load(p_factor + 3)
    fresh_m, kept_v, fresh_v = tl.load(p_factor + 4), tl.load(p_factor + 5), tl.load(p_factor + 6)
    unbias, eps, max_norm = tl.load(p_factor + 7), tl.load(p_factor + 8), tl.load(p_factor + 9)

    b_sum = tl.zeros([_CHUNK], tl.float32)
    for i_chunk in range(i_first, i_end, _CHUNK):
        i = i_chunk + tl.arange(0, _CHUNK)
        b_sum += tl.load(p_sums + i, mask=i < i_end, other=0.0)
    norm = tl.sqrt_rn(tl.sum(b_sum))
    tl.store(p_norms + i_job, norm, mask=tl.program_id(0) == i_first)
    healthy = (norm < float("inf")) & (tl.abs(loss) < float("inf"))
    clip = tl.where(max_norm > 0.0, tl.minimum(tl.div_rn(max_norm, norm + 1e-6), 1.0), 1.0)

    o_first = (tl.program_id(0) - i_first) * _BLOCK
    for o_chunk in range(o_first, tl.minimum(o_first + _BLOCK, size), _CHUNK):
        o = o_chunk + tl.arange(0, _CHUNK)
        m_in = o < size
        b_grad = tl.load(p_grad + o, mask=m_in) * clip
        b_master = tl.load(p_master + o, mask=m_in)
        b_m, b_v = tl.load(p_m + o, mask=m_in), tl.load(p_v + o, mask=m_in)
        b_new_m = b_m + fresh_m * (b_grad - b_m)
        b_new_v = kept_v * b_v + fresh_v * (b_grad * b_grad)
        b_move = tl.div_rn(b_new_m, tl.sqrt_rn(b_new_v) * unbias + eps)
        m_b = o >= b_start
        b_new = tl.where(m_b, decay_b, decay_a) * b_master - tl.where(m_b, rate_b, rate_a) * b_move
        b_new = tl.where(healthy, b_new, b_master)
        tl.store(p_master + o, b_new, mask=m_in)
        tl.store(p_m + o, tl.where(healthy, b_new_m, b_m), mask=m_in)
        tl.store(p_v + o, tl.where(healthy, b_new_v, b_v), mask=m_in)
        tl.store(p_compute + o, b_new.to(COMPUTE), mask=m_in)
        tl.store(p_grad + o, tl.zeros([_CHUNK], tl.float32), mask=m_in)


def adamw(updates: Sequence[Update]) -> torch.Tensor:
    """`reference.adamw`, fused where the vectors are on a GPU; the norms are float32 then."""
    master = updates[0].master
    if not routes.is_fused(master):
        return reference.adamw(updates)
    (compute,) = {_TYPES[update.compute.dtype] for update in updates}
    blocks = (-(-update.master.numel() // _BLOCK.value) for update in updates)
    ends = list(accumulate(blocks, initial=0))
    grid = (ends[-1],)
    fields = [[*pair, *_fields(update)] for pair, update in zip(pairwise(ends), updates, strict=True)]
    p_fields = _table(fields, torch.int64, master.device)
    p_factors = _table([_factors(update) for update in updates], torch.float32, master.device)
    sums, norms = (torch.empty(count, dtype=torch.float32, device=master.device) for count in (*grid, len(updates)))
    with torch.cuda.device_of(master):
        _sum_squares[grid](p_fields, sums, num_warps=_WARPS)
        _step[grid](p_fields, p_factors, sums, norms, compute, num_warps=_WARPS)
    return norms


def _fields(update: Update) -> list[int]:
    """Size, start of B, and addresses: what the kernels read of a job behind its blocks."""
    wide = (update.loss, update.grad, update.master, update.exp_avg, update.exp_avg_sq)
    assert all(tensor.dtype is torch.float32 for tensor in wide)
    vectors = (*wide[1:], update.compute)
    assert all(vector.is_contiguous() and vector.shape == update.master.shape for vector in vectors)
    return [update.master.numel(), update.b_start, *(tensor.data_ptr() for tensor in (update.loss, *vectors))]


def _factors(update: Update) -> list[float]:
    """What `_step` multiplies by, worked out in float64."""
    beta1, beta2 = update.betas
    rates = (update.lr, update.lr_b)
    return [
        *(1.0 - lr * update.weight_decay for lr in rates),
        *(lr / (1.0 - beta1**update.step) for lr in rates),
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        (1.0 - beta2**update.step) ** -0.5,
        update.eps,
        update.max_grad_norm,
    ]


def _table(rows: list[list[int]] | list[list[float]], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """From pinned memory, so that the copy waits for nothing on the device."""
    return torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)

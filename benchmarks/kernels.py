"""Each kernel's time beside its floor and its peers, after it was checked against float64.

    python -m benchmarks.kernels [--quick] [--tensor 2 4 8]

Needs a GPU and, of this package, only the kernels. --quick: only the linears. --tensor: only one rank's parts of the
linears of an 8B Llama that so many ranks split. Rows go to results/<gpu>/kernels.json. An
op that is wrong is not timed, and the exit status is 1. Shape letters: kernels/tiles.py.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.results import Row, medians_ms, row, write
from tlora.kernels import lora_linear, reference
from tlora.kernels.adamw import adamw
from tlora.kernels.linear_cross_entropy import linear_cross_entropy
from tlora.kernels.tiles import (
    Adapters,
    LossBlock,
    LossTable,
    Piece,
    RowTable,
    Site,
    Tables,
    Update,
    stride_of,
    tabulate,
)

DEVICE, DTYPE = torch.device("cuda"), torch.bfloat16
RANKS = (2, 4, 8, 16, 16, 32, 64, 64)
ROWS = 8192
EVEN = (ROWS // 8,) * 8
DROPOUT = 0.1
"""Of every other job."""
RESULT, GRADIENT, WIDE = 6e-3, 8e-3, 1e-5
"""Most rms(out − ref) / rms(ref): of results and gradients in bfloat16, and of what is float32 throughout."""


def ragged(jobs: int) -> tuple[int, ...]:
    cuts = torch.randperm(ROWS - 1, generator=torch.Generator().manual_seed(0))[: jobs - 1] + 1
    return tuple(end - first for first, end in pairwise([0, *sorted(cuts.tolist()), ROWS]))


@dataclass(frozen=True)
class Case:
    """A mixed-job linear: inputs, outputs of the linears that read them, each job's rank and rows."""

    K: int
    widths: tuple[int, ...]
    ranks: tuple[int, ...] = RANKS
    lengths: tuple[int, ...] = EVEN
    first_column: int = 0
    """Of the whole input, where A is cut."""

    @property
    def shape(self) -> str:
        ranks = str(self.ranks[0]) if len(set(self.ranks)) == 1 else f"{min(self.ranks)}–{max(self.ranks)}"
        return f"{sum(self.lengths)} rows, {len(self.ranks)} jobs, r {ranks}"


LINEARS = {
    "linear/4096x14336": (Case(4096, (14336,)), 1.10),
    "linear/14336x4096": (Case(14336, (4096,)), 1.10),
    "linear/4096x28672": (Case(4096, (14336, 14336)), 1.10),
    "linear/4096x4096": (Case(4096, (4096,)), 1.20),
    "linear/4096x6144": (Case(4096, (4096, 1024, 1024)), 1.20),
    "linear-ragged/4096x14336": (Case(4096, (14336,), lengths=ragged(8)), 1.12),
    "linear-many/4096x14336": (Case(4096, (14336,), RANKS * 8, (ROWS // 64,) * 64), 1.12),
}
WHOLE = {"o": (4096, 4096), "qkv": (4096, 4096, 1024, 1024), "gate-up": (4096, 14336, 14336), "down": (14336, 4096)}
"""Inputs and outputs; o and down are split by inputs, the others by outputs."""
ODD_RANKS = {"linear-rank40/4096x14336": (40, 64), "linear-rank3/4096x14336": (3, 4)}
"""A rank that is no power of two, and the next power of two; all eight jobs have it."""
FORWARD = {"project": "project", "sum_slabs": "project"}
BACKWARD = {"gradient_b": "gradient_b", "sum_slabs": "gradient_b", "gradient_a": "gradient_a", "fold_sums": "fold_sums"}
"""Parts of a pass by the kernel's name; every other kernel belongs to the wide product."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the linears")
    parser.add_argument("--tensor", nargs="+", type=int, default=[], help="ranks that split the linears")
    given = parser.parse_args()
    began_s = time.perf_counter()
    linears = {name: part for ranks in given.tensor for name, part in split_linears(ranks).items()} or LINEARS
    odd_ranks = {} if given.tensor else ODD_RANKS
    compile_linears(linears, odd_ranks)
    print(f"compiled in {time.perf_counter() - began_s:.0f} s", flush=True)
    right = [time_linear(name, case, target) for name, (case, target) in linears.items()]
    right += [time_odd_rank(name, *ranks) for name, ranks in odd_ranks.items()]
    if not (given.quick or given.tensor):
        right += [time_adamw(), time_cross_entropy(128256, 1.10), time_cross_entropy(256000, None)]
    print(f"done in {time.perf_counter() - began_s:.0f} s")
    sys.exit(not all(right))


def split_linears(ranks: int) -> dict[str, tuple[Case, float | None]]:
    """The last rank's part of each."""
    linears = {}
    for name, (K, *widths) in WHOLE.items():
        case = Case(K, tuple(width // ranks for width in widths))
        if name in ("o", "down"):
            case = Case(K // ranks, tuple(widths), first_column=K - K // ranks)
        linears[f"linear-tensor{ranks}/{name}"] = case, None
    return linears


def compile_linears(linears: Mapping[str, tuple[Case, float | None]], odd_ranks: Mapping[str, tuple[int, int]]) -> None:
    """Into Triton's cache, side by side: one after the other, their binaries would take a minute."""
    cases = [case for case, _ in linears.values()]
    cases += [Case(4096, (14336,), (rank,) * 8) for ranks in odd_ranks.values() for rank in ranks]
    # A binary depends on no more of a case than this.
    distinct = {(case.K, case.widths, stride_of(max(case.ranks))): case for case in cases}
    context, count = multiprocessing.get_context("spawn"), min(2 * len(distinct), os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(count, context) as pool:
        works = [pool.submit(compile_one, case, back, folder) for case in distinct.values() for back in (True, False)]
        for work in works:
            work.result()


def compile_one(case: Case, back: bool, folder: str) -> None:
    """By one call, of as many rows as will be timed."""
    os.environ["XDG_CACHE_HOME"] = folder  # what is fastest beside other processes is not what to remember
    linear = Linear(case)
    if back:
        linear.backward(linear.x.new_zeros(len(case.widths), len(linear.x), linear.adapters.low))
    else:
        linear.forward()


def row_table(lengths: tuple[int, ...]) -> RowTable:
    """One sequence a job."""
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    pieces = tuple(
        Piece(slot, int(first), rows, 0) for slot, (first, rows) in enumerate(zip(ends, lengths, strict=False))
    )
    counters_T = torch.cat([torch.arange(rows) for rows in lengths])
    tables = tabulate(pieces, sum(lengths), counters_T, per_sequence=False)
    return RowTable(
        num_rows=sum(lengths),
        pieces=pieces,
        blocks=lengths,
        block_ends_S=ends.to(DEVICE),
        longest=max(lengths),
        per_sequence=False,
        training=True,
        tables=Tables(**{name: table.to(DEVICE) for name, table in tables.items()}),
    )


def normal(*shape: int, size: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype or DTYPE).mul_(size)


class Linear:
    """A case's operands on the device, and the ways to pass through it, forward and backward."""

    def __init__(self, case: Case):
        torch.manual_seed(0)
        N = sum(case.widths)
        self.rows = row_table(case.lengths)
        self.x, self.dy = normal(self.rows.num_rows, case.K), normal(self.rows.num_rows, N)
        self.weight = normal(N, case.K, size=case.K**-0.5)
        self.adapters = Adapters(case.widths, DEVICE)
        for module, width in enumerate(case.widths):
            for slot, rank in enumerate(case.ranks):
                # As large as the base's, so that an error in either is seen.
                a_RK, b_RN = normal(rank, case.K, size=case.K**-0.5), normal(rank, width, size=rank**-0.5)
                grad_a, grad_b = (torch.zeros_like(part, dtype=torch.float32) for part in (a_RK, b_RN))
                dropout = DROPOUT * (slot % 2)
                grads = grad_a, grad_b.T
                site = Site(a_RK, b_RN.T, *grads, 1.0, dropout, slot, module, case.first_column)
                self.adapters.place(module, slot, site)
        self.adapters.low = stride_of(max(case.ranks))
        tables = self.rows.tables
        self.owners = (tables.segment_T, tables.segments, tables.counters_T, tables.pieces, tables.parts, tables.folds)

    def forward(self) -> tuple[Tensor, Tensor]:
        columns, low = list(self.adapters.columns), self.adapters.low
        return lora_linear.forward(  # type: ignore[no-any-return]
            self.x, self.weight, None, *self.owners, self.adapters.table, columns, low, True, False
        )

    def backward(self, s: Tensor) -> Tensor:
        columns = list(self.adapters.columns)
        return lora_linear.backward(  # type: ignore[no-any-return]
            self.dy, self.x, s, self.weight, *self.owners, self.adapters.table, columns, True, False
        )

    def both(self) -> None:
        self.backward(self.forward()[1])

    def plain_forward(self) -> Tensor:
        return torch.mm(self.x, self.weight.T)

    def plain_backward(self) -> Tensor:
        return torch.mm(self.dy, self.weight)

    def plain(self) -> None:
        self.plain_forward()
        self.plain_backward()

    def torch_loop(self) -> None:
        """The library's products, one job after the other, with the two ops of torch.nn.functional.dropout."""
        y_TN, dx_TK = self.plain_forward(), self.plain_backward()
        for module, sites in enumerate(self.adapters.sites):
            span = self.adapters.span(module)
            for piece in self.rows.pieces:
                site, x, dy = sites[piece.slot], self.x[piece.span], self.dy[piece.span, span]
                if site.dropout:
                    x, kept = torch.native_dropout(x, site.dropout, True)
                s = x @ site.a_RK.T
                y_TN[piece.span, span].addmm_(s, site.b_NR.T, alpha=site.scale)
                ds = (dy @ site.b_NR).mul_(site.scale)
                reference.add_product(site.grad_b_NR, dy, s, site.scale)
                reference.add_product(site.grad_a_RK, ds, x)
                if site.dropout:
                    dx = torch.ops.aten.native_dropout_backward(ds @ site.a_RK, kept, 1.0 / (1.0 - site.dropout))
                    dx_TK[piece.span] += dx
                else:
                    dx_TK[piece.span].addmm_(ds, site.a_RK)

    def is_right(self, name: str) -> bool:
        """All of it, on the rows and by the way that is timed. Call it first: the gradients are added to."""
        y, s = self.forward()
        dx = self.backward(s)
        twin = Adapters([end - first for first, end in pairwise(self.adapters.columns)], DEVICE)
        for module, sites in enumerate(self.adapters.sites):
            for slot, site in sites.items():
                a, b = site.a_RK.double(), site.b_NR.double()
                grads = (torch.zeros_like(a), torch.zeros_like(b))
                twin.place(module, slot, replace(site, a_RK=a, b_NR=b, grad_a_RK=grads[0], grad_b_NR=grads[1]))
        x = self.x.double().requires_grad_()
        want = reference.lora_linear(x, self.weight.double(), None, self.rows, twin)
        want.backward(self.dy.double())
        assert x.grad is not None
        checks = {}
        for piece in self.rows.pieces:
            checks[f"Y of job {piece.slot}"] = (y[piece.span], want[piece.span].detach(), RESULT)
            checks[f"dX of job {piece.slot}"] = (dx[piece.span], x.grad[piece.span], GRADIENT)
            for module, (ours, theirs) in enumerate(zip(self.adapters.sites, twin.sites, strict=True)):
                site, other = ours[piece.slot], theirs[piece.slot]
                checks[f"dA of job {piece.slot}, linear {module}"] = (site.grad_a_RK, other.grad_a_RK, GRADIENT)
                checks[f"dB of job {piece.slot}, linear {module}"] = (site.grad_b_NR, other.grad_b_NR, GRADIENT)
        return is_near(name, checks)


def is_near(name: str, checks: Mapping[str, tuple[Tensor, Tensor, float]]) -> bool:
    """Whether each tensor is as near its float64 twin as its bound says. Prints those that are not."""
    wrong = []
    for what, (out, want, bound) in checks.items():
        error = (torch.linalg.vector_norm(out.double() - want) / torch.linalg.vector_norm(want)).item()
        if not error <= bound:
            wrong.append(f"{what} by {error:.2g} (at most {bound:g})")
    if wrong:
        print(f"{name}: off, so not timed: {'; '.join(wrong)}", flush=True)
    return not wrong


def time_linear(name: str, case: Case, target: float | None) -> bool:
    linear = Linear(case)
    if not linear.is_right(name):
        return False
    closures: dict[str, Callable[[], object]] = {
        "ours": linear.both,
        "plain": linear.plain,
        "torch-loop": linear.torch_loop,
    }
    if len(case.widths) == 1 and find_spec("peft"):
        closures["peft"] = peft_pass(linear)
    times = medians_ms(closures, calls=4)
    ours = times["ours"]
    rows = [row(name, case.shape, ours, "plain forward + dX", times["plain"], target)]
    rows += [
        row(f"{name}/{peer}", case.shape, ours, text, times[peer])
        for peer, text in (("torch-loop", "torch, job by job"), ("peft", "PEFT, one job of rank 16"))
        if peer in times
    ]
    write("kernels", rows + parts(name, case, linear))
    return True


def parts(name: str, case: Case, linear: Linear) -> list[Row]:
    """Each part beside its floor: the plain product, or its wide operand read once at the speed of a copy. All from the
    profiler, few calls each: the card is cooler, and its clock higher, than in the loop that times the whole."""
    one, other = (torch.empty(2**28, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    s = linear.forward()[1]
    backward = kernels_ms(lambda: linear.backward(s), BACKWARD)
    found = {"forward": kernels_ms(linear.forward, FORWARD), "backward": backward}
    plain = {"forward": kernels_ms(linear.plain_forward, {}), "backward": kernels_ms(linear.plain_backward, {})}
    copy = sum(kernels_ms(lambda: one.copy_(other), {}).values())
    wide = {"project": linear.x, "gradient_b": linear.dy, "gradient_a": linear.x}
    rows = []
    for way, of_parts in found.items():
        for part, ours_ms in of_parts.items():
            floor = "the plain product", plain[way]["product"]
            if part in wide:  # a copy of 2²⁸ bytes reads and writes them
                floor = "reading its wide operand once", copy * wide[part].nbytes / 2**29
            if part != "fold_sums":
                rows.append(row(f"{name}/{way}/{part}", case.shape, ours_ms, *floor))
    return rows


def kernels_ms(run: Callable[[], object], names: Mapping[str, str]) -> dict[str, float]:
    """Milliseconds of a call that the device spends in each part, from the profiler."""
    calls = 5
    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in traced.key_averages():
        if event.device_type.name == "CUDA":
            part = names.get(event.key, "product")
            times[part] = times.get(part, 0.0) + event.self_device_time_total / 1000 / calls
    return times


def peft_pass(linear: Linear) -> Callable[[], object]:
    """One job over all rows, in PEFT's own layer: forward and backward by autograd, the adapter in bfloat16."""
    from peft import LoraConfig, get_peft_model

    N, K = linear.weight.shape
    base = nn.Linear(K, N, bias=False, device=DEVICE, dtype=DTYPE)
    config = LoraConfig(r=16, lora_alpha=16, lora_dropout=DROPOUT, target_modules=["0"])
    layer = get_peft_model(nn.Sequential(base), config, autocast_adapter_dtype=False).train()
    x = linear.x.detach().requires_grad_()
    inputs = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    return lambda: torch.autograd.grad(layer(x), inputs, linear.dy)


def time_odd_rank(name: str, rank: int, power: int) -> bool:
    case = Case(4096, (14336,), (rank,) * 8)
    odd, even = Linear(case), Linear(replace(case, ranks=(power,) * 8))
    if not (odd.is_right(name) and even.is_right(f"{name}, rank {power}")):
        return False
    times = medians_ms({"odd": odd.both, "even": even.both}, calls=4)
    write("kernels", [row(name, case.shape, times["odd"], f"ours, rank {power}", times["even"], 1.02)])
    return True


def time_adamw(size: int = 41_943_040, jobs: int = 8) -> bool:
    """Of all linears of Llama 3.1 8B at rank 16. Each call copies tables from the host, which no graph can hold."""
    torch.manual_seed(0)
    updates = [fresh_update(size) for _ in range(jobs)]
    if not is_adamw_right("adamw/8x8b", updates):
        return False
    # The gradient for its norm; then it and three vectors are read and written, and the 16-bit copy is written.
    moved = jobs * size * (4 + 4 * 8 + 2)
    one, other = (torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    times = medians_ms({"ours": lambda: adamw(updates), "copy": lambda: one.copy_(other)}, calls=4, graphed=False)
    print("adamw/8x8b:", *(f"{name} {moved / time_ms / 1e6:.0f} GB/s" for name, time_ms in times.items()))
    shape = f"{jobs} × {size / 1e6:.1f}M, {moved / 1e9:.1f} GB"
    write("kernels", [row("adamw/8x8b", shape, times["ours"], "a copy that moves as much", times["copy"], 1.15)])
    return True


def fresh_update(size: int) -> Update:
    master, grad, exp_avg, root = (normal(size, size=part, dtype=torch.float32) for part in (2e-2, 1e-3, 1e-3, 1e-3))
    return Update(
        master=master,
        grad=grad,
        exp_avg=exp_avg,
        exp_avg_sq=root.square_(),
        compute=master.to(DTYPE),
        loss=torch.ones((), device=DEVICE),
        step=10,
        lr=1e-3,
        lr_b=2e-3,
        b_start=size // 2,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        max_grad_norm=1.0,
    )


def is_adamw_right(name: str, updates: Sequence[Update]) -> bool:
    wide = ("master", "grad", "exp_avg", "exp_avg_sq", "compute", "loss")
    twins = [replace(update, **{part: getattr(update, part).double() for part in wide}) for update in updates]
    checks = {"norms": (adamw(updates), reference.adamw(twins), WIDE)}
    for job, pair in enumerate(zip(updates, twins, strict=True)):
        for part in ("master", "exp_avg", "exp_avg_sq", "compute"):
            out, want = (getattr(update, part) for update in pair)
            checks[f"{part} of job {job}"] = (out, want, RESULT if part == "compute" else WIDE)
    return is_near(name, checks)


@dataclass(frozen=True)
class Head:
    """A frozen head, and hidden states of which every row has a target."""

    hidden: Tensor
    weight: Tensor
    rows: RowTable
    loss: LossTable
    adapters: Adapters

    @classmethod
    def of(cls, lengths: tuple[int, ...], vocab: int, H: int) -> "Head":
        torch.manual_seed(0)
        rows = row_table(lengths)
        # Logits of size 2: of larger ones bfloat16 would hide errors in rounding, of smaller ones only targets count.
        hidden, weight = normal(rows.num_rows, H), normal(vocab, H, size=2.0 * H**-0.5)
        loss = LossTable(
            rows_M=torch.arange(rows.num_rows, device=DEVICE),
            targets_M=torch.randint(vocab, (rows.num_rows,), device=DEVICE),
            weights_M=torch.cat([torch.full((n,), 1.0 / n, dtype=torch.float64) for n in lengths]).to(DEVICE),
            counts_S=torch.tensor(lengths, device=DEVICE),
            blocks=tuple(LossBlock(piece.slot, 0, piece.first, piece.rows) for piece in rows.pieces),
        )
        return cls(hidden, weight, rows, loss, Adapters([vocab], DEVICE))

    def ours(self) -> tuple[Tensor, Tensor | None]:
        return linear_cross_entropy(self.hidden, self.weight, None, self.rows, self.loss, self.adapters)

    def is_right(self, name: str) -> bool:
        wide = self.hidden.double(), self.weight.double()
        losses, dh = self.ours()
        want, want_dh = reference.linear_cross_entropy(*wide, None, self.rows, self.loss, self.adapters)
        assert dh is not None
        assert want_dh is not None
        checks = {
            f"dH of job {piece.slot}": (dh[piece.span], want_dh[piece.span], GRADIENT) for piece in self.rows.pieces
        }
        return is_near(name, {"losses": (losses, want, RESULT), **checks})


def time_cross_entropy(vocab: int, target: float | None) -> bool:
    """Each call is long beside its launches: no graph holds it."""
    head = Head.of(EVEN, vocab, 4096)
    name, shape = f"cross-entropy/{ROWS}x{vocab}", f"{ROWS} rows, H 4096"
    if not head.is_right(name):
        return False
    d_logits = normal(ROWS, vocab)
    closures: dict[str, Callable[[], object]] = {
        "ours": head.ours,
        "plain": lambda: (torch.mm(head.hidden, head.weight.T), torch.mm(d_logits, head.weight)),
    }
    if find_spec("liger_kernel"):
        closures["liger"] = liger_pass(head.hidden, head.weight, head.loss.targets_M)
    times = medians_ms(closures, calls=1, rounds=10, graphed=False)
    rows = [row(name, shape, times["ours"], "its two plain products", times["plain"], target)]
    if "liger" in times:
        rows.append(row(f"{name}/liger", shape, times["ours"], "liger-kernel", times["liger"]))
    write("kernels", rows)
    return True


def liger_pass(hidden: Tensor, weight: Tensor, targets: Tensor) -> Callable[[], object]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # type: ignore[import-not-found]

    op, x = LigerFusedLinearCrossEntropyLoss(), hidden.detach().requires_grad_()
    return lambda: torch.autograd.grad(op(weight, x, targets), x)


if __name__ == "__main__":
    main()

"""Which tile is fastest for each kernel of the mixed-job linear: what `kernels/routes.py` holds is chosen by this.

    python -m benchmarks.tiles [LINEAR ...] [--kernels project gradient_b gradient_a expand product]

LINEARs are named as in benchmarks/kernels.py. Needs a GPU. Every candidate's results are compared with those of the
tiles in use; one that differs, or does not run, is listed last, as inf. Times are the device's, from the profiler.
"""

import argparse
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import product

import torch

from benchmarks.kernels import BACKWARD, FORWARD, LINEARS, Linear, kernels_ms
from tlora.kernels import routes
from tlora.kernels.routes import PINNED, Thin, Tile

Candidate = Thin | Tile
CANDIDATES: dict[str, list[Candidate]] = {
    "project": [
        *(Thin(64, 64, 4, stages, registers) for stages, registers in product((3, 4), (96, 128, 168))),
        *(Thin(64, 128, 4, 3, registers) for registers in (128, 168, 255)),
        *(Thin(rows, 64, 4, stages, 128) for rows, stages in ((32, 4), (128, 3))),
        *(Thin(64, columns, 8, 3, 128) for columns in (64, 128)),
        *(Thin(128, columns, 8, 3, 128) for columns in (64, 128)),
    ],
    "gradient_b": [
        *(Thin(64, 256, 8, stages) for stages in (3, 4)),
        *(Thin(64, 128, warps, stages, 128) for warps, stages in product((4, 8), (2, 3))),
        *(Thin(128, columns, 8, 2, registers) for columns, registers in ((128, 128), (256, 255))),
        Thin(64, 256, 8, 3, 168),
    ],
    "gradient_a": [
        *(
            Thin(rows, 64, 4, stages, registers)
            for rows, stages, registers in product((32, 64), (3, 5), (96, 128, 168))
        ),
        *(Thin(128, 64, 4, stages, 128) for stages in (2, 3)),
        *(Thin(64, 128, warps, 3, registers) for warps, registers in ((4, 168), (8, 96), (8, 128))),
        *(Thin(128, 128, 8, 3, registers) for registers in (96, 128)),
    ],
    "expand": [
        *(Thin(64, 64, 4, stages, 128) for stages in (2, 3, 4)),
        *(Thin(64, 128, 4, 3, registers) for registers in (128, 168, 255)),
        *(Thin(rows, 128, 8, 3, registers) for rows, registers in product((64, 128), (128, 255))),
    ],
    "product": [
        *(PINNED._replace(GROUP=group) for group in (4, 8, 16)),
        *(PINNED._replace(BK=deep, stages=stages) for deep, stages in ((32, 6), (128, 2))),
        PINNED._replace(BM=256, BN=128),
        *(Tile(128, 128, 64, 8, warps, stages) for warps, stages in ((4, 4), (8, 4), (8, 5))),
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("linears", nargs="*", default=["linear/4096x14336", "linear/4096x6144"], metavar="LINEAR")
    parser.add_argument("--kernels", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    arguments = parser.parse_args()
    works = [
        (name, kernel, candidate)
        for name in arguments.linears
        for kernel in arguments.kernels
        for candidate in CANDIDATES[kernel]
    ]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for work in [pool.submit(compile_one, *work, folder) for work in works]:
            work.result()
    for name in arguments.linears:
        linear = Linear(LINEARS[name][0])
        for kernel in arguments.kernels:
            print(f"{name} {kernel}: {'; '.join(sort(linear, kernel))}", flush=True)


def compile_one(name: str, kernel: str, candidate: Candidate, folder: str) -> None:
    """Into Triton's cache, beside the others."""
    os.environ["XDG_CACHE_HOME"] = folder
    linear = Linear(LINEARS[name][0])
    with using(kernel, candidate):
        try:
            linear.both()
        except Exception as error:  # whatever the compiler or the driver raises: said again when it is timed
            print(f"{name} {kernel} {tuple(candidate)}: {type(error).__name__}", flush=True)


def sort(linear: Linear, kernel: str) -> Iterator[str]:
    """Each candidate's microseconds, forward and backward, fastest first."""
    want = outputs(linear)
    times = []
    for candidate in CANDIDATES[kernel]:
        with using(kernel, candidate):
            try:
                found = outputs(linear)
                is_right = all(  # NaN is not
                    torch.linalg.vector_norm(out - ref) <= 1e-2 * torch.linalg.vector_norm(ref)
                    for out, ref in zip(found, want, strict=True)
                )
                times.append((time_ms(linear, kernel) if is_right else float("inf"), candidate))
            except Exception as error:
                times.append((float("inf"), candidate))
                print(f"{kernel} {tuple(candidate)}: {type(error).__name__}", flush=True)
    for time, candidate in sorted(times, key=lambda timed: timed[0]):
        yield f"{time * 1000:.0f} µs {tuple(candidate)}"


def outputs(linear: Linear) -> list[torch.Tensor]:
    """Y, dX and every gradient, from zero."""
    sites = [site for part in linear.adapters.sites for site in part.values()]
    grads = [grad for site in sites for grad in (site.grad_a_RK, site.grad_b_NR)]
    for grad in grads:
        grad.zero_()
    y, s = linear.forward()
    dx = linear.backward(s)
    return [y.float(), dx.float(), *(grad.clone() for grad in grads)]


def time_ms(linear: Linear, kernel: str) -> float:
    s = linear.forward()[1]
    forward = kernels_ms(linear.forward, {**FORWARD, "expand": "expand"})
    backward = kernels_ms(lambda: linear.backward(s), {**BACKWARD, "expand": "expand"})
    return forward.get(kernel, 0.0) + backward.get(kernel, 0.0)


@contextmanager
def using(kernel: str, candidate: Candidate) -> Iterator[None]:
    """The candidate in the place of the tile in use."""
    thin, run_fastest = routes.thin, routes.run_fastest
    if isinstance(candidate, Tile):
        routes.run_fastest = lambda key, y, tiled, library, **how: tiled(candidate)
    else:  # what is fastest with one candidate might not be with another
        routes.run_fastest = lambda key, y, tiled, library, **how: library()
        routes.thin = lambda x: thin(x)._replace(**{kernel: candidate})
    try:
        yield
    finally:
        routes.thin, routes.run_fastest = thin, run_fastest


if __name__ == "__main__":
    main()

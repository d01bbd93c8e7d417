"""Compiles the mixed linear's kernels for a Hopper GPU, without one, as a script; `test_waits` reads what it prints.

Of each product that reads its left operand from registers: the linear's inputs, the kernel, the columns of the sum, and
how many such products it lets run on. With `planted`, `low_rank._done` has nobody wait.
"""

import itertools
import json
import re
import sys
from contextlib import nullcontext, suppress
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tlora.kernels import lora_linear, low_rank, reference, routes
from tlora.kernels.tiles import Adapters, Piece, tabulate

BY_REGISTERS = re.compile(
    r"ttng\.warp_group_dot .*isAsync = true.* : tensor<[^>]*dot_op<\{opIdx = 0.* -> tensor<\d+x(\d+)x"
)
WAITS = re.compile(r"warp_group_dot_wait .*pendings = (\d+)")


class Hopper:
    """What the launcher asks a driver."""

    class utils:  # noqa: N801  # triton's name
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class DoneError(Exception):
    """Enough is compiled."""


@triton.jit
def not_done(acc, m_r, MASKED):  # type: ignore[no-untyped-def]
    return acc


def main() -> None:
    found: list[tuple[int, str, int, int]] = []
    inputs, name = 0, ""

    def stop(self: object, module: Any, *rest: object) -> None:
        lines = str(module).splitlines()
        for at, line in enumerate(lines):
            if product := BY_REGISTERS.search(line):
                waits = (WAITS.search(after) for after in lines[at + 1 :])
                runs_on = next((int(wait[1]) for wait in waits if wait), 99)
                found.append((inputs, name, int(product[1]), runs_on))
        raise DoneError

    run = JITFunction.run

    def compile_only(self: Any, *args: object, grid: object, warmup: bool, **options: object) -> None:
        nonlocal name
        name = self.__name__
        with suppress(DoneError):
            run(self, *args, grid=grid, warmup=True, **options)

    driver.set_active(Hopper())
    JITFunction.run = compile_only
    CUDABackend.make_llir = stop
    routes.is_fused = lambda tensor: True
    reference.add_wide = lambda *args: None
    torch.cuda.device_of = lambda tensor: nullcontext()
    if "planted" in sys.argv:
        low_rank._done = not_done
    for (inputs, widths), training in itertools.product(((4096, (2048, 512, 512)), (960, (1000,))), (True, False)):
        compile_linear(inputs, widths, training)
    print(json.dumps(found))


def compile_linear(inputs: int, widths: tuple[int, ...], training: bool) -> None:
    """Forward and backward; by the library's product where widths are no multiples of 16 bytes, too."""
    rows, outputs = 192, sum(widths)
    tables = tabulate([Piece(0, 0, 100, 0), Piece(1, 100, 92, 0)], rows, torch.arange(rows), per_sequence=False)
    given = [tables[name] for name in ("segment_T", "segments", "counters_T", "pieces", "parts", "folds")]
    x, weight = torch.empty(rows, inputs).bfloat16(), torch.empty(outputs, inputs).bfloat16()
    adapters = Adapters(widths, x.device)
    ends = list(adapters.columns)
    forward, backward = lora_linear.forward._init_fn, lora_linear.backward._init_fn
    y, s = forward(x, weight, None, *given, adapters.table, ends, adapters.low, training, False)
    backward(y, x, s, weight, *given, adapters.table, ends, training, False)


if __name__ == "__main__":
    main()

"""How much memory a base, its adapters and one tick take: an estimate, before anything is loaded; and what says that
there was not enough.

Called by `tlora.local` for `tlora check`, and by the trainer. Measures nothing and refuses nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from traceback import clear_frames

import torch

from tlora.adapter import AdapterLayout
from tlora.base import Outline
from tlora.errors import TloraError
from tlora.kernels.linear_cross_entropy import CHUNK_LOGITS
from tlora.packing import HEAD_ROWS


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. All jobs of a super-model share the base and a tick's activations; the adapter is one job's own."""

    base_bytes: int
    adapter_bytes: int
    tick_bytes: int


def estimate(
    outline: Outline, layout: AdapterLayout, num_rows: int, dtype: torch.dtype, *, checkpointing: bool
) -> Estimate:
    """Bytes on the device for one job in ticks of `num_rows` rows.

    The low-rank products of the fused kernels are left out: some percent of the activations at ranks up to 64.

    Activations: what each linear reads and writes is kept for the backward pass, and about as much again in between
    (norms, rotary products, attention); with checkpointing each layer's input, and one layer's worth of the rest. At a
    time exist `CHUNK_LOGITS` of the head's logits in half precision; else those of `HEAD_ROWS` rows, three times over,
    in float32 or wider.
    """
    size, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    vectors = 4 * wide + (size if size != wide else 0)
    per_row = (
        sum(outputs + inputs for name, (outputs, inputs) in outline.linears.items() if name != outline.head) * size
    )
    if checkpointing:
        per_row = outline.num_layers * outline.hidden_size * size + 2 * per_row // outline.num_layers
    else:
        per_row = per_row * 3 // 2
    if size == 2:
        head = min(num_rows * outline.vocab_size, CHUNK_LOGITS) * size
    else:
        head = HEAD_ROWS * outline.vocab_size * (size + 3 * wide)
    return Estimate(outline.num_parameters * size, layout.size * vectors, num_rows * per_row + head)


@contextmanager
def driver_memory() -> Iterator[None]:
    """What the driver or a library has no memory for is raised as PyTorch's own OutOfMemoryError, though it comes as
    another: also one that follows from that, as when a captured graph is ended that is not whole."""
    try:
        yield
    except (torch.OutOfMemoryError, TloraError):
        raise
    except RuntimeError as error:
        signs = ("out of memory", "ALLOC_FAILED")  # of CUDA's runtime and NCCL; of cuBLAS and its like
        if any(sign in str(error) for sign in signs) or isinstance(error.__context__, torch.OutOfMemoryError):
            clear_frames(error.__traceback__)  # they hold what there was no room for
            raise torch.OutOfMemoryError(str(error)) from error
        raise

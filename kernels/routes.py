"""Which way an op goes: fused kernels or their twins, and for a wide product the tile shape, or the library's product.

The choice for a shape is measured once on the GPU at hand, and kept in the user's cache folder under that GPU's name.
"""

import hashlib
import json
import logging
import os
import statistics
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

log = logging.getLogger("tlora")


class Tile(NamedTuple):
    """Tile of a wide product: BM rows, BN columns, BK deep; GROUP row tiles share their columns in the cache."""

    BM: int
    BN: int
    BK: int
    GROUP: int
    warps: int
    stages: int


class Thin(NamedTuple):
    """Tile of a thin product: rows, and columns of the wide operand. `registers`: of a thread, at most; fewer let more
    programs run side by side on a multiprocessor."""

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int = 255


class ThinTiles(NamedTuple):
    project: Thin
    gradient_b: Thin
    gradient_a: Thin
    expand: Thin


PINNED = Tile(128, 256, 64, 8, 8, 3)
"""The one shape of deterministic mode."""
_TILES = {"128x256": PINNED, "128x128": Tile(128, 128, 64, 8, 4, 4), "64x128": Tile(64, 128, 64, 8, 4, 4)}
_LIBRARY = "library"
_MEASURED = ("product.py", "mask.py", "routes.py", "lora_linear.py", "reference.py")
"""Files that what was measured depends on."""


def is_fused(tensor: Tensor) -> bool:
    """Whether work on this tensor goes through the Triton kernels: on a GPU, in every precision but float64."""
    return tensor.is_cuda and tensor.dtype is not torch.float64


def is_roomy(x: Tensor) -> bool:
    """Whether the large tiles fit: half precision, and the shared memory of a data-centre GPU (Hopper's 227 KiB)."""
    return x.itemsize == 2 and (not x.is_cuda or _shared_bytes(x.get_device()) >= 216 * 1024)


def has_descriptors(x: Tensor, weight: Tensor) -> bool:
    """Whether bulk copies can read these: large tiles fit, rows start on 16 bytes."""
    lies_well = weight.is_contiguous() and not weight.data_ptr() % 16
    return is_roomy(x) and lies_well and not any(width % 8 for width in weight.shape)


def is_bulky(x: Tensor, starts: tuple[int, ...] = ()) -> bool:
    """Whether bulk copies can read this one, from these columns on."""
    return is_roomy(x) and not any(column % 8 for column in (x.shape[-1], *starts))


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


@cache
def _shared_bytes(device: int) -> int:
    """Most that one program may have."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def thin(x: Tensor) -> ThinTiles:
    """The fastest that fit on this GPU; `benchmarks/tiles.py` finds them."""
    if is_roomy(x):
        return ThinTiles(
            Thin(64, 64, 4, 3, 128), Thin(64, 256, 8, 3), Thin(64, 64, 4, 3, 128), Thin(64, 128, 4, 1, 168)
        )
    return ThinTiles(Thin(64, 128, 4, 2), Thin(64, 64, 8, 2), Thin(32, 64, 4, 2), Thin(64, 64, 8, 1))


def num_programs(x: Tensor) -> int:
    """Programs of a persistent kernel: one for each multiprocessor."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3


def run_fastest(
    key: str, y: Tensor, tiled: Callable[[Tile], None], library: Callable[[], None], *, bulk: bool, pinned: bool
) -> None:
    """Compute `y` by the way that is fastest for `key` (kind and shape), which is measured when it is new here.

    `bulk`: bulk copies can read the operands. A way that fails on this GPU, or is wrong, is never chosen.
    """
    if not bulk:
        library()
    elif pinned or not y.is_cuda:
        tiled(PINNED)
    else:
        choices = _choices(torch.cuda.get_device_name(y.device))
        if key not in choices and not torch.cuda.is_current_stream_capturing():
            choice = _measure(y, tiled, library)
            if choice is not None:
                choices[key] = choice
                _keep(torch.cuda.get_device_name(y.device), choices)
        choice = choices.get(key, "128x256")
        if choice == _LIBRARY:
            library()
        else:
            tiled(_TILES[choice])


def _measure(y: Tensor, tiled: Callable[[Tile], None], library: Callable[[], None]) -> str | None:
    """The fastest way that is right; None where a job's values are not finite, so that right cannot be told."""
    library()
    right = y.clone()
    if not torch.isfinite(torch.linalg.vector_norm(right)):
        return None
    ways = {_LIBRARY: library}
    for name, tile in _TILES.items():
        way = partial(tiled, tile)
        y.fill_(torch.nan)
        try:
            way()
            if torch.linalg.vector_norm(y - right) <= 2e-2 * torch.linalg.vector_norm(right):
                ways[name] = way
        except (RuntimeError, triton.errors.TritonError) as error:
            log.info("a product of %s tiles does not run on this GPU: %s", name, error)
    times = _medians_ms(ways)
    return min(times, key=lambda name: times[name])


def _medians_ms(ways: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Of seven turns after one, each way twice a turn and nobody waiting: the clock falls under load, for all alike."""
    samples: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in ways}
    for _ in range(8):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            way()
            way()
            end.record()
            samples[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(start.elapsed_time(end) for start, end in pairs[1:]) for name, pairs in samples.items()
    }


def _file(gpu: str) -> Path:
    """What was measured with other kernels is not read again."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tlora" / "products"
    code = b"".join(Path(__file__).with_name(name).read_bytes() for name in _MEASURED)
    made_by = f"torch-{torch.__version__}_triton-{triton.__version__}_{hashlib.sha256(code).hexdigest()[:8]}"
    return folder / f"{gpu.replace(' ', '-')}_{made_by}.json"


@cache
def _choices(gpu: str) -> dict[str, str]:
    try:
        return {key: name for key, name in json.loads(_file(gpu).read_text()).items() if name in (*_TILES, _LIBRARY)}
    except (OSError, ValueError, AttributeError, RuntimeError):  # the last where nobody's home is known
        return {}


def _keep(gpu: str, choices: dict[str, str]) -> None:
    try:
        path = _file(gpu)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(choices, indent=1, sort_keys=True))
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        log.warning("the choice of kernels is measured again at each start: %s", error)

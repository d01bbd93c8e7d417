"""Versions and devices that a result was made with.

Called by the trainer, which writes them beside every checkpoint. Nothing is computed from them.
"""

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

_PACKAGES = ("tlora", "torch", "triton", "transformers", "peft", "datasets")


@cache
def describe() -> dict[str, str]:
    """Package versions, Python's, and the GPUs' names."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"python": platform.python_version(), **versions, "gpu": ", ".join(gpus) or "none"}

"""tLoRA trains many LoRA jobs at once over one frozen model, each exactly as it would train alone.

Public names load on first use, so that `import tlora` and `tlora --help` wait for neither torch nor Ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlora.client import Client
    from tlora.cluster import ClusterSpec, load_cluster
    from tlora.spec import JobSpec, load_job, parse_job
    from tlora.supermodel import SuperModel
    from tlora.sweep_local import run_sweep
    from tlora.sweep_spec import SweepSpec, load_sweep
    from tlora.trainer import Trainer

__all__ = [
    "Client", "ClusterSpec", "JobSpec", "SuperModel", "SweepSpec", "Trainer", "load_cluster", "load_job", "load_sweep",
    "parse_job", "run_sweep",
]  # fmt: skip
__version__ = "0.1.0"

_HOMES = {
    "Client": "tlora.client",
    "ClusterSpec": "tlora.cluster",
    "JobSpec": "tlora.spec",
    "SuperModel": "tlora.supermodel",
    "SweepSpec": "tlora.sweep_spec",
    "Trainer": "tlora.trainer",
    "load_cluster": "tlora.cluster",
    "load_job": "tlora.spec",
    "load_sweep": "tlora.sweep_spec",
    "parse_job": "tlora.spec",
    "run_sweep": "tlora.sweep_local",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tlora' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)

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
    from tlora.trainer import Trainer

__all__ = ["Client", "ClusterSpec", "JobSpec", "SuperModel", "Trainer", "load_cluster", "load_job", "parse_job"]
__version__ = "0.1.0"

_HOMES = {
    "Client": "tlora.client",
    "ClusterSpec": "tlora.cluster",
    "JobSpec": "tlora.spec",
    "SuperModel": "tlora.supermodel",
    "Trainer": "tlora.trainer",
    "load_cluster": "tlora.cluster",
    "load_job": "tlora.spec",
    "parse_job": "tlora.spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tlora' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)

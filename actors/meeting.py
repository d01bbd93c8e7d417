"""How the ranks of a unit come together: at the store of the first one, each by the network through which it reaches
that. Called by `tlora.actors.process`."""

import os
import socket
from datetime import timedelta
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist

from tlora.actors.messages import WorkerOptions
from tlora.base import default_device
from tlora.errors import GroupError
from tlora.parallel import Mesh

_BESIDES_S = 60.0
_INTERFACE = "GLOO_SOCKET_IFNAME"


def collective_s(options: WorkerOptions) -> float:
    """The longest that a collective may take: ranks wait in one while another tries again to read or write a job's
    files, or compiles."""
    return min(options.stuck_after_s, options.patience_s + _BESIDES_S)


def open_mesh(options: WorkerOptions, place: int, store: str) -> Mesh:
    """With the other ranks of a unit, at the store that its first one keeps."""
    host, _, port = store.rpartition(":")
    timeout, torch_dist = timedelta(seconds=options.stuck_after_s), cast(Any, dist)
    if interface := interface_to(host, int(port)):  # else gloo takes what the host's own name means: often its loopback
        os.environ.setdefault(_INTERFACE, interface)
    try:
        kept = torch_dist.TCPStore(host, int(port), options.plan.ranks, is_master=place == 0, timeout=timeout)
    except RuntimeError as error:
        raise GroupError(f"rank {place}: no store at {store}: {error}. The unit starts anew.") from error
    device = torch.device(options.device) if options.device else default_device()
    times = {"timeout_s": collective_s(options), "loading_s": options.stuck_after_s}
    return Mesh.open(options.plan, place, kept, device, **times)


def interface_to(host: str, port: int) -> str:
    """This node's network interface on the way to a host; empty if there is no way, or none of this address."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as way:
            way.connect(where)  # sends nothing
            mine = way.getsockname()[0].partition("%")[0]
        interfaces = psutil.net_if_addrs()
    except (OSError, psutil.Error):
        return ""
    for name, addresses in interfaces.items():
        if mine in [each.address.partition("%")[0] for each in addresses]:
            return str(name)
    return ""

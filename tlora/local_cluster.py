"""A Ray cluster of this machine alone, for those who have no other: started by `tlora up`, ended by `tlora down`.

It is one process (`ray start --block`) in a session of its own, known by a file in the user's folder. Another file is
locked as long as it lives: after a restart of the machine its number may be that of any other process.
"""

import fcntl
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tlora.errors import ClusterError

_START_S = 60.0
_CODE = """
import json, os, sys
path, address = sys.argv.pop(1), sys.argv.pop(1)
with open(path + ".new", "w") as file:
    json.dump({"pid": os.getpid(), "address": address}, file)
os.replace(path + ".new", path)
from ray.scripts.scripts import main; main()
"""
"""Ray's process says itself which it is, before it is ready: whenever the command that started it is killed, the next
finds it."""


def _file() -> Path:
    return Path(os.environ.get("TLORA_HOME") or Path.home() / ".tlora") / "local_cluster.json"


def address() -> str:
    """Of the cluster to talk to: RAY_ADDRESS, else the local one. Raises ClusterError if there is neither: a Ray that
    just runs on this machine may be somebody else's."""
    if given := os.environ.get("RAY_ADDRESS"):
        return given
    known = _read()
    if known is None:
        raise ClusterError("no cluster of yours runs here, and RAY_ADDRESS names none. Run `tlora up`.")
    return str(known["address"])


def authenticate() -> None:
    """Before Ray is imported: the local cluster wants the token that it was started with."""
    if "RAY_ADDRESS" not in os.environ and _read():
        _use_token()


def _use_token() -> None:
    """Token authentication, unless its mode is set, with a token of this user's own."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    token = Path.home() / ".ray" / "auth_token"
    if not token.exists():
        token.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    os.environ["RAY_AUTH_MODE"] = "token"


def start() -> str:
    """Start it, unless it runs; returns its address."""
    _use_token()
    if known := _read():
        return str(known["address"])
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError("another `tlora up` starts Ray on this machine just now. Wait for it.") from None
        for _ in range(2):
            port = _free_port()
            if _launch(path, port, lock.fileno()):
                return f"127.0.0.1:{port}"
            if _free_port(port):  # nobody has taken it meanwhile
                break
    raise ClusterError(f"Ray did not start on this machine; its last words are in {path.with_suffix('.log')}.")


def _free_port(port: int = 0) -> int:
    """This, or any, for other users of this machine have theirs; 0: it is taken."""
    with socket.socket() as free, suppress(OSError):
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what has ended holds it no more
        free.bind(("127.0.0.1", port))
        return int(free.getsockname()[1])
    return 0


def _launch(path: Path, port: int, lock: int) -> bool:
    """Whether it starts there."""
    log = path.with_suffix(".log")
    command = [sys.executable, "-c", _CODE, str(path), f"127.0.0.1:{port}", "start", "--head", "--block",
               f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false",
               "--dashboard-agent-listen-port=0", "--disable-usage-stats",
               f"--temp-dir={path.parent / 'ray'}"]  # fmt: skip
    environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, start_new_session=True, env=environment, pass_fds=[lock]
        )
    deadline_s = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            path.unlink(missing_ok=True)
            return False
        time.sleep(0.2)
    return True


def stop() -> None:
    """End it, if it runs."""
    known = _read()
    if known is None:
        return
    with suppress(ProcessLookupError):
        os.kill(known["pid"], signal.SIGTERM)
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and _is_alive(known["pid"]):
            time.sleep(0.2)
    _file().unlink(missing_ok=True)


def _read() -> dict[str, Any] | None:
    """What the file says, if its process lives."""
    with suppress(OSError, ValueError, KeyError):
        known: dict[str, Any] = json.loads(_file().read_text())
        if _is_alive(known["pid"]) and _is_locked():
            return known
    return None


def _is_locked() -> bool:
    with _file().with_suffix(".lock").open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _is_alive(pid: int) -> bool:
    try:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

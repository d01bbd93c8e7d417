"""The sweeps of a cluster: one detached actor, a thread for each sweep that is open.

All truth is in files (`register`, the sweeps' folders) and with the scheduler: an actor that is killed is started again
by Ray, and goes on. What a thread does is `tlora.actors.drive`'s.
"""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import ray

from tlora.actors.names import MARK, NAMESPACE, SWEEPS
from tlora.actors.register import Register

log = logging.getLogger("tlora")
_LOOK_S, _AGAIN_S = 0.5, 5.0


class Sweeps:
    """Looks for open sweeps, and drives each in a thread."""

    def __init__(self, outputs: str, counts_gpus: bool):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._register, self._counts_gpus = Register(Path(outputs)), counts_gpus
        self._mark = str(Path(outputs) / MARK)
        self._library = threading.Lock()
        """Held by the thread that reads data or draws."""
        self._threads: dict[str, threading.Thread] = {}
        threading.Thread(target=self._look, daemon=True, name="tlora-sweeps").start()

    def process_id(self) -> int:
        return os.getpid()

    def _look(self) -> None:
        while True:
            try:
                for name in self._register.names():
                    is_driven = name in self._threads and self._threads[name].is_alive()
                    if not is_driven and self._register.is_open(name):
                        thread = threading.Thread(target=self._drive, args=(name,), daemon=True, name=f"tlora-{name}")
                        self._threads[name] = thread
                        thread.start()
            except OSError as error:  # their files are away
                log.warning("the register of sweeps cannot be read: %s", error)
                time.sleep(_AGAIN_S)
            time.sleep(_LOOK_S)

    def _drive(self, name: str) -> None:
        from tlora.actors.drive import Drive, call  # here, for a scheduler that starts this needs no torch

        try:
            drive = Drive(self._register, name, call, self._library, counts_gpus=self._counts_gpus, mark=self._mark)
            drive.run()
        except Exception:  # of one sweep: it is begun again where its files say
            log.exception("sweep=%s could not be driven", name)
            time.sleep(_AGAIN_S)


def start(outputs: Path, *, counts_gpus: bool) -> Any:
    """The actor, started if it is not there."""
    return (
        ray.remote(Sweeps)
        .options(
            name=SWEEPS,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            scheduling_strategy="DEFAULT",
            runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}},
        )
        .remote(str(outputs), counts_gpus)
    )


def stop() -> None:
    """End the actor, whatever it does."""
    try:
        ray.kill(ray.get_actor(SWEEPS, namespace=NAMESPACE))
    except ValueError:  # there is none
        return

"""The scheduler: one named, detached actor that admits jobs, plans, and tells groups and workers what to be.

Its truth is the roster, whose journal outlives it: an actor that is started again reads it, finds its groups by name,
and hears from their workers within a second. Calls are short and idempotent; what takes long (a group's start) has a
thread.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

import tlora
from tlora.actors import group
from tlora.actors.journal import Journal
from tlora.actors.messages import Orders, Report, WorkerOptions
from tlora.actors.metrics import Metrics
from tlora.actors.names import NAMESPACE, SCHEDULER
from tlora.actors.roster import GroupRecord, Roster, base_key
from tlora.cluster import ClusterSpec
from tlora.errors import ClusterError, StateError
from tlora.scheduling import Plan, schedule
from tlora.spec import BaseSpec, parse_job

log = logging.getLogger("tlora")
_PLAN_S = 0.2
_PUBLISH_S = 2.0
_FLUSH_S = 5.0


class Scheduler:
    """Methods are called from many threads; each holds the lock while it reads or changes the roster."""

    def __init__(self, spec: dict[str, Any]):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._spec = ClusterSpec.model_validate(spec)
        self._lock = threading.RLock()
        journal = Journal(Path(self._spec.state).expanduser() / "journal.db", self._spec.storage)
        self._roster = Roster(self._spec, journal, time.time())
        self._is_closed = False
        self._metrics, self._published_s, self._flushed_s = Metrics(), 0.0, 0.0
        threading.Thread(target=self._run, daemon=True, name="tlora-plan").start()

    # --- front doors

    def version(self) -> str:
        return tlora.__version__

    def process_id(self) -> int:
        return os.getpid()

    def submit(self, specs: Sequence[dict[str, Any]]) -> list[str]:
        with self._lock:
            return self._roster.submit([parse_job(spec) for spec in specs], time.time())

    def pause(self, names: Sequence[str]) -> None:
        with self._lock:
            self._roster.pause(names, time.time())

    def resume(self, names: Sequence[str]) -> None:
        with self._lock:
            self._roster.resume(names, time.time())

    def cancel(self, names: Sequence[str], keep: bool) -> None:
        with self._lock:
            self._roster.cancel(names, time.time(), keep=keep)

    def status(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        with self._lock:
            return self._roster.status(names)

    def spec(self, name: str) -> dict[str, Any]:
        """A job's own, as it was submitted."""
        with self._lock:
            return dict(self._roster.entry(name).spec)

    def newest_adapter(self, name: str) -> str:
        """Folder of what a job has exported last: its end, else its best so far. Raises StateError if there is none."""
        with self._lock:
            folder = Path(self._roster.entry(name).spec["output"])
        for part in (folder, folder / "best"):
            if (part / "adapter_model.safetensors").exists():
                return str(part)
        raise StateError(f"job {name} has written no adapter yet: nothing to fork from.")

    def workers(self) -> list[dict[str, Any]]:
        """One mapping a worker, for those who watch."""
        with self._lock:
            return self._roster.describe_workers()

    def events(self, after: int, name: str | None = None) -> list[dict[str, Any]]:
        with self._lock:
            return [
                {"number": event.number, "name": event.name, "state": str(event.state), "reason": event.reason,
                 "time_s": event.time_s}
                for event in self._roster.journal.events(after, name)
            ]  # fmt: skip

    def exchange(self, report: Report) -> Orders:
        with self._lock:
            return self._roster.exchange(report, time.time())

    def close(self) -> None:
        """End every group, each worker's jobs saved, and the scheduler. Jobs that have not ended are there at the next
        `tlora up`."""
        with self._lock:
            self._is_closed = True
            self._roster.let_go_of_all(time.time())
            names = list(self._roster.groups)
        deadline_s = time.monotonic() + 30.0
        while time.monotonic() < deadline_s and self._has_residents():
            time.sleep(_PLAN_S)
        for name in names:
            group.end(name)
        with self._lock:
            self._roster.journal.close()

    def _has_residents(self) -> bool:
        with self._lock:
            return any(entry.place for entry in self._roster.jobs.values())

    # --- the plan

    def _run(self) -> None:
        for name, known in group.running():
            with self._lock:
                base = base_key(known["base"])
                self._roster.groups[name] = GroupRecord(name, base, known["size"], None)
        while not self._is_closed:
            try:
                self._round()
            except Exception:  # of one round: the next sees the same state again
                log.exception("a round of planning failed")
            time.sleep(_PLAN_S)

    def _round(self) -> None:
        draining = group.draining_nodes()
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self._roster.journal.flush()  # a storage that is away keeps nobody waiting
            self._flushed_s = time.monotonic()
        with self._lock:
            now_s = time.time()
            roster = self._roster
            roster.lose_silent(now_s)
            plan = schedule(roster.cluster_state(now_s, draining), now_s)
            roster.take_places(plan, now_s)
            resizes = self._resizes(plan)
            if now_s - self._published_s > _PUBLISH_S:
                self._published_s = now_s
                self._metrics.publish(roster.status(), roster.describe_workers())
        for name, size, leaving in resizes:
            group.resize(name, size, leaving)
        for name in plan.stops:
            self._stop(name)
        for base, size in plan.starts.items():
            self._start(base, size)

    def _resizes(self, plan: Plan) -> list[tuple[str, int, list[tuple[str, int]]]]:
        resizes = []
        for name in plan.sizes.keys() | plan.leaves.keys():
            record = self._roster.groups[name]
            record.size = plan.sizes.get(name, record.size)
            leaving = [self._roster.dismiss(worker) for worker in sorted(plan.leaves.get(name, ()))]
            resizes.append((name, record.size, [(report.node, report.pid) for report in leaving]))
            log.info("group=%s size=%d: %s", name, record.size, plan.reasons.get(name, "workers leave"))
        return resizes

    def _start(self, base: str, size: int) -> None:
        with self._lock:
            name = f"{len(self._roster.groups)}-{int(time.time() * 1000):x}"
            self._roster.groups[name] = GroupRecord(name, base, size, time.time())
        log.info("group=%s starts with %d worker(s) for base %s", name, size, base)
        options = WorkerOptions(
            group=name,
            base=BaseSpec.model_validate_json(base).model_dump(),
            token_budget=self._spec.token_budget,
            deterministic=self._spec.deterministic,
            checkpointing=self._spec.checkpointing,
            save_every_s=self._spec.save_every_s,
            stuck_after_s=self._spec.stuck_after_s,
            device=None if self._spec.gpus_per_worker else "cpu",
        )

        def run() -> None:
            try:
                group.start(self._spec, options, size)
            except Exception:
                log.exception("group=%s did not start", name)
                with self._lock:
                    self._roster.groups.pop(name, None)

        threading.Thread(target=run, daemon=True, name=f"tlora-start-{name}").start()

    def _stop(self, name: str) -> None:
        log.info("group=%s ends: idle for %g s", name, self._spec.idle_s)
        group.end(name)
        with self._lock:
            self._roster.groups.pop(name, None)
            self._roster.forget_group(name)


def connect(spec: ClusterSpec | None = None) -> Any:
    """The scheduler of the cluster that Ray is connected to; with `spec`, started if it is not there. Raises
    ClusterError if it cannot start, ValueError if it is not there and is not to be started."""
    if spec is None:
        return ray.get_actor(SCHEDULER, namespace=NAMESPACE)
    actor: Any = (
        ray.remote(Scheduler)
        .options(
            name=SCHEDULER,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=64,
            num_cpus=0,
            resources={"node:__internal_head__": 0.001},
            scheduling_strategy="DEFAULT",
            # So that it sees no GPU, and its children see theirs.
            runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}},
        )
        .remote(spec.model_dump())
    )
    try:
        ray.get(actor.version.remote())
    except ray.exceptions.RayActorError as error:
        raise ClusterError(f"the scheduler did not start: {str(error).strip().splitlines()[-1]}") from None
    return actor

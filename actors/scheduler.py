"""The scheduler: one named, detached actor that admits jobs, plans, and tells groups and workers what to be.

Its truth is the roster, whose journal outlives it: an actor that is started again reads it, finds its groups by name,
and hears from their workers within a second. Calls are short and idempotent; what takes long (a group's start) has a
thread.
"""

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray

import tlora
from tlora.actors import group, sweeps
from tlora.actors.journal import Journal
from tlora.actors.messages import Orders, Report, WorkerOptions
from tlora.actors.metrics import Metrics
from tlora.actors.names import MARK, NAMESPACE, SCHEDULER
from tlora.actors.records import GroupRecord
from tlora.actors.register import Foretold, Register
from tlora.actors.roster import BY_USER, Roster, base_key
from tlora.cluster import ClusterSpec
from tlora.errors import ClusterError, StateError
from tlora.job import State
from tlora.plan import Plan
from tlora.scheduling import Plan as Changes
from tlora.spec import BaseSpec, parse_job
from tlora.sweep_spec import parse_sweep

log = logging.getLogger("tlora")
_PLAN_S = 0.2
_PUBLISH_S = 2.0
_FORETELL_S = 1.0
_FLUSH_S = 5.0
_AGAIN_S = 10.0
_ASK_S = 5.0
_CLOSE_S = 600.0
_SWEEP_S, _QUIET_S, _NEVER = 60.0, 2.0, 1 << 30
_LEAVE_S = 2.0
"""In which a client hears that all is closed."""


class Scheduler:
    """Methods are called from many threads; each holds the lock while it reads or changes the roster, and not while it
    waits for the folder of outputs."""

    def __init__(self, spec: dict[str, Any]):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._spec = ClusterSpec.model_validate(spec)
        self._lock = threading.RLock()
        journal = Journal(self._spec.state_folder / "journal.db", self._spec.storage)
        self._mark = mark_outputs(self._spec.output_root, journal)
        self._roster = Roster(self._spec, journal, time.time())
        self._sweeps, self._wishing = Register(self._spec.output_root), threading.Lock()
        self._starting: set[str] = set()
        self._not_before_s: dict[str, float] = {}
        """Bases whose group did not start, and when to try again."""
        self._untold: dict[str, tuple[int, list[tuple[str, int]]]] = {}
        """Sizes and leaving workers of groups that have not heard of them yet."""
        self._unadopted: set[str] | None = None
        self._is_closed = False
        self._metrics = Metrics()
        self._published_s = self._flushed_s = self._asked_s = self._foretold_s = 0.0
        self._submitted_s = self._swept_s = time.monotonic()
        go_first()
        sys.setswitchinterval(2e-4)  # beside a plan for thousands, an admission waits so long at each of its writes
        gc.freeze()  # what is there by now stays, and is not walked through again
        gc.set_threshold(*gc.get_threshold()[:2], _NEVER)  # but see `_sweep`
        self._begin()

    def _begin(self) -> None:
        for name, loop in (("plan", self._run), ("watch", self._watch)):
            threading.Thread(target=loop, daemon=True, name=f"tlora-{name}").start()

    # --- front doors

    def version(self) -> str:
        return tlora.__version__

    def settings(self) -> dict[str, Any]:
        return self._spec.model_dump()

    def process_id(self) -> int:
        return os.getpid()

    def submit(self, specs: Sequence[dict[str, Any]]) -> list[str]:
        jobs = [parse_job(spec) for spec in specs]
        self._submitted_s = time.monotonic()
        if taken := {job.name for job in jobs} & set(self._sweeps.names()):
            raise StateError(f"job {min(taken)}: a sweep has this name. Choose another.")
        with self._lock:
            return self._roster.submit(jobs, time.time())

    def sweep(self, spec: dict[str, Any]) -> bool:
        """Take a sweep in; whether there was anything to do."""
        sweep = parse_sweep(spec)
        with self._lock:
            self._roster.refuse_sweep(sweep.name, self._sweeps.placed(sweep).folder)
        with self._wishing:
            is_new = self._sweeps.submit(sweep, time.time())
        self._drive()
        return is_new

    def fork_leader(self, name: str, key: str, changes: Sequence[str]) -> str:
        """One more candidate of a sweep, its leader with changes, once for each key; the leader's name."""
        with self._wishing:
            if name not in self._sweeps.names():
                raise StateError(f"{name} is no sweep. Give the new job's name too, to fork a job.")
            leader = self._sweeps.fork(name, key, changes)
        self._drive()
        return leader

    def train(self, spec: dict[str, Any], halt: dict[str, Any]) -> None:
        with self._lock:
            self._roster.train(parse_job(spec), halt, time.time())

    def explain(self, name: str, reason: str) -> None:
        with self._lock:
            self._roster.explain(name, reason, time.time())

    def pause(self, names: Sequence[str], reason: str = BY_USER) -> None:
        jobs = self._want(names, State.PAUSED)
        with self._lock:
            self._roster.pause(jobs, time.time(), reason)

    def resume(self, names: Sequence[str]) -> None:
        jobs = self._want(names, State.RUNNING)
        with self._lock:
            self._roster.resume(jobs, time.time())

    def cancel(self, names: Sequence[str], keep: bool) -> None:
        jobs = self._want(names, State.CANCELLED)
        with self._lock:
            self._roster.cancel(jobs, time.time(), keep=keep)

    def _want(self, names: Sequence[str], state: State) -> list[str]:
        """Write down what is asked of sweeps; returns the names of jobs."""
        known = set(self._sweeps.names())
        jobs = [name for name in names if name not in known]
        with self._lock:
            for name in jobs:
                self._roster.entry(name)
        if len(jobs) < len(names):
            with self._wishing:
                for name in known.intersection(names):
                    self._sweeps.want(name, state)
                    log.info("sweep=%s is to be %s: its user says so", name, state)
            self._drive()
        return jobs

    def _drive(self) -> None:
        sweeps.start(self._spec.output_root, counts_gpus=bool(self._spec.gpus_per_worker))

    def status(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """One mapping a job or sweep: all sweeps first, or in the order of the names."""
        found = {name: self._sweeps.status(name) for name in self._sweeps.names() if names is None or name in names}
        wanted = [*found, *list(self._roster.jobs)] if names is None else names
        return [found[name] if name in found else self._row(name) for name in wanted]

    def _row(self, name: str) -> dict[str, Any]:
        """Of a job. Each by itself: nobody waits for a long list."""
        with self._lock:
            return self._roster.status([name])[0]

    def spec(self, name: str) -> dict[str, Any]:
        """A job's own, as it was submitted."""
        if name in self._sweeps.names():
            raise StateError(
                f"{name} is a sweep: its leader is forked within it. Give no other name, or fork a candidate."
            )
        with self._lock:
            return dict(self._roster.entry(name).spec)

    def newest_adapter(self, name: str) -> str:
        """Folder of what a job has exported last: its end, else its best so far. Raises StateError if there is none."""
        with self._lock:
            folder = Path(self._roster.entry(name).spec["output"])
        for part in (folder, folder / "best"):
            if (part / "adapter_model.safetensors").exists():
                return str(part)
        raise StateError(f"job {name} has written no adapter yet: it does so at its end and its best evaluation.")

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

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        """End every group, each worker's jobs saved, and the scheduler, even if the client that asks is gone meanwhile.
        Jobs that have not ended are there at the next `tlora up`."""
        with self._lock:
            self._is_closed = True
            self._roster.let_go_of_all(time.time())
        try:
            sweeps.stop()
            deadline_s = time.monotonic() + _CLOSE_S
            while time.monotonic() < deadline_s and self._is_busy():
                time.sleep(_PLAN_S)
            for name in group.names():
                group.end(name)
            with self._lock:
                self._roster.journal.close()
        finally:
            threading.Timer(_LEAVE_S, ray.kill, [ray.get_runtime_context().current_actor]).start()

    def _is_busy(self) -> bool:
        with self._lock:
            self._roster.lose_silent(time.time())
            return bool(self._starting) or bool(self._roster.placed())

    # --- the plan

    def _run(self) -> None:
        are_driven = False
        while not self._is_closed:
            try:
                self._adopt()
                self._round()
                self._sweep()
                if not are_driven and any(map(self._sweeps.is_open, self._sweeps.names())):
                    self._drive()  # sweeps of a cluster before this one
                are_driven = True
            except Exception:  # of one round: the next sees the same state again
                log.exception("a round of planning failed")
            time.sleep(_PLAN_S)

    def _watch(self) -> None:
        """Look for lost workers beside the rounds, which wait for controllers and storages."""
        while not self._is_closed:
            try:
                with self._lock:
                    self._roster.lose_silent(time.time())
            except Exception:  # as of a round
                log.exception("lost workers were not written down")
            time.sleep(_PLAN_S)

    def _sweep(self) -> None:
        """Collect garbage among thousands of jobs, which holds every thread up for 60 ms: when nobody is admitted, or
        at last in spite of that."""
        now_s = time.monotonic()
        if now_s - self._swept_s > (_SWEEP_S if now_s - self._submitted_s > _QUIET_S else 10 * _SWEEP_S):
            gc.collect()
            self._swept_s = time.monotonic()

    def _adopt(self) -> None:
        """Groups that a scheduler before this one had started; one that is busy is asked again."""
        if self._unadopted is None:
            self._unadopted = set(group.names())
        for name in list(self._unadopted):
            try:
                known = group.describe(name)
            except (ray.exceptions.RayError, ValueError):
                known = {"ended": True}
            if known is None:
                continue
            self._unadopted.discard(name)
            if known["ended"]:
                group.end(name)
            else:
                with self._lock:
                    base, plan = base_key(known["base"]), Plan(**known["plan"])
                    self._roster.groups[name] = GroupRecord(name, base, known["size"], None, plan)
                    if plan.ranks > 1:
                        self._roster.plans[base] = plan
                log.info("group=%s goes on: it was found with %d unit(s)", name, known["size"])

    def _round(self) -> None:
        draining = group.draining_nodes()
        if time.monotonic() - self._flushed_s > _FLUSH_S:
            self._roster.journal.flush()
            self._flushed_s = time.monotonic()
        foretold = self._foretell()
        if is_due := time.monotonic() - self._asked_s > _ASK_S:
            self._asked_s = time.monotonic()
            self._roster.room = self._room()
        self._roster.renew(self._lock, time.time(), draining)
        with self._lock:
            if self._is_closed:
                return
            now_s = time.time()
            roster = self._roster
            misfits = roster.misfits()
            roster.foretold = foretold
            plan = roster.plan(now_s, draining)
            self._resize(plan)
            if now_s - self._published_s > _PUBLISH_S:
                self._published_s = now_s
                placed, workers = roster.status(roster.placed()), roster.describe_workers()
                self._metrics.publish(roster.counts, placed, workers, roster.gains, now_s)
                roster.gains.clear()
        for name in group.resize({name: told for name, told in self._untold.items() if name not in self._starting}):
            del self._untold[name]
        for name in (plan.stops | misfits.keys()) - self._starting:  # whose controllers are yet to come
            self._stop(name, misfits.get(name) or plan.reasons[name])
        for name in group.ended(self._silent_groups() if is_due else ()):
            self._stop(name, "its controller is gone")
        for base, size in plan.starts.items():
            if not self._unadopted and time.monotonic() >= self._not_before_s.get(base, 0.0):
                self._start(base, size, plan.reasons[f"base {base}"])

    def _room(self) -> list[int]:
        """Workers for which each machine has room."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        cpus, gpus = self._spec.cpus_per_worker, self._spec.gpus_per_worker
        return [
            min([int(has.get("CPU", 0) / cpus), *([int(has.get("GPU", 0) // gpus)] if gpus else [])]) for has in nodes
        ]

    def _foretell(self) -> Mapping[str, Foretold]:
        """What sweeps expect of their candidates; what they said last, while their files are away."""
        if time.monotonic() - self._foretold_s > _FORETELL_S:
            self._foretold_s = time.monotonic()
            try:
                return self._sweeps.ahead()
            except OSError as error:
                log.warning("what sweeps expect cannot be read: %s", error)
        return self._roster.foretold

    def _silent_groups(self) -> list[str]:
        """Groups of which no worker has been heard, and which are not being started: their controllers are asked."""
        with self._lock:
            heard = {seen.report.group for seen in self._roster.workers.values()}
            return [name for name in self._roster.groups if name not in heard and name not in self._starting]

    def _resize(self, plan: Changes) -> None:
        """Write down what groups are to be told; it is said again until they have heard."""
        for name in plan.sizes.keys() | plan.leaves.keys():
            record = self._roster.groups[name]
            record.size = plan.sizes.get(name, record.size)
            leaving = [self._roster.dismiss(worker) for worker in sorted(plan.leaves.get(name, ()))]
            before = self._untold[name][1] if name in self._untold else []
            self._untold[name] = record.size, [*before, *((report.node, report.pid) for report in leaving)]
            log.info("group=%s size=%d: %s", name, record.size, plan.reasons[name])

    def _start(self, base: str, size: int, reason: str) -> None:
        with self._lock:
            if self._is_closed:
                return
            name = f"{len(self._roster.groups)}-{int(time.time() * 1000):x}"
            plan = self._roster.plan_of(base)
            self._roster.groups[name] = GroupRecord(name, base, size, time.time(), plan)
            self._starting.add(name)
        log.info("group=%s starts, %d unit(s) of %d worker(s), base %s: %s", name, size, plan.ranks, base, reason)
        is_open = self._spec.plan == "auto" and plan.ranks == 1
        options = WorkerOptions(
            group=name,
            base=BaseSpec.model_validate_json(base).model_dump(),
            plan=plan,
            most_workers=self._spec.max_workers if is_open else 0,
            memory_bytes=int(self._spec.memory_gib * 2**30),
            token_budget=self._spec.token_budget,
            deterministic=self._spec.deterministic,
            checkpointing=self._spec.checkpointing,
            save_every_s=self._spec.save_every_s,
            stuck_after_s=self._spec.stuck_after_s,
            mark=str(self._mark),
            device=None if self._spec.gpus_per_worker else "cpu",
        )

        def run() -> None:
            try:
                group.start(self._spec, options, size)
                self._roster.troubles.pop(base, None)
            except Exception as error:  # whatever Ray Train raises: it is tried again
                log.exception("group=%s did not start", name)
                with self._lock:
                    self._roster.troubles[base] = str(error).strip().rpartition("\n")[2] or type(error).__name__
                    self._roster.groups.pop(name, None)
                    self._not_before_s[base] = time.monotonic() + _AGAIN_S
            finally:
                with self._lock:
                    self._starting.discard(name)

        threading.Thread(target=run, daemon=True, name=f"tlora-start-{name}").start()

    def _stop(self, name: str, reason: str) -> None:
        log.info("group=%s ends: %s", name, reason)
        group.end(name)
        with self._lock:
            self._untold.pop(name, None)
            self._roster.forget_group(name, time.time(), reason)


def mark_outputs(outputs: Path, journal: Journal) -> Path:
    """The mark of a folder of outputs. Made when that is first used: later its mount may be away, and jobs would begin
    anew on the disk beneath."""
    mark = outputs / MARK
    if journal.outputs != str(outputs):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
        journal.keep_outputs(str(outputs))
    return mark


def go_first() -> None:
    """Before what trains on the same cores: Ray starts its actors at a niceness of 15, this one like all others."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # not everybody may; and a thread may have ended
            os.setpriority(os.PRIO_PROCESS, int(thread), 0)


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
            # So that it sees no GPU and its children see theirs, and workers stay where relative paths begin.
            runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1", "RAY_CHDIR_TO_TRIAL_DIR": "0"}},
        )
        .remote(spec.model_dump())
    )
    try:
        ray.get(actor.version.remote())
        is_closed = ray.get(actor.is_closed.remote())
    except ray.exceptions.RayTaskError:  # another version, which does not know of it
        is_closed = False
    except ray.exceptions.RayActorError as error:
        raise ClusterError(f"the scheduler did not start: {str(error).strip().splitlines()[-1]}") from None
    if is_closed:
        raise ClusterError("the scheduler is on its way out, its jobs being saved. `tlora down` waits for it.")
    return actor

"""A group on all GPUs of this machine, under load: what changes cost those that stay, and whether all ends as alone.

    python -m benchmarks.cluster_group [--ranks 2] [--shape llama-8b] [--save-every-s 10] [--compared 4]

Starts Ray, a scheduler and a group that grows from one worker to all, lets jobs come, pause, move and go, shrinks it,
lets it grow again, and kills a worker amid a tick. Then all jobs are taken out with their states, and some trained
alone for as many steps. Without GPUs the shape is `toy`, and nothing is written. Rows go to
results/<gpu>x<ranks>/cluster.json after each change; one that does not come within --patience-s is said to be missing.
"""

import argparse
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import ray
import torch

from benchmarks import group
from benchmarks.cluster import say, step, timed, until
from benchmarks.cluster_load import TOY, job, seconds, state, write_base
from benchmarks.results import commit, row
from benchmarks.step import BASES
from tlora import environment
from tlora.actors.names import NAMESPACE
from tlora.actors.scheduler import connect
from tlora.checkpoint import STATE, load_state, read_meta
from tlora.client import Client
from tlora.cluster import ClusterSpec
from tlora.data import load_tokenizer
from tlora.local import read_data
from tlora.spec import JobSpec
from tlora.supermodel import SuperModel
from tlora.tracking import read_metrics
from tlora.trainer import Trainer, TrainerOptions

JOB_RANKS = (8, 16, 32, 64)
"""Of the jobs that fill a worker, and again of those that fill the next."""
SETTLED_STEPS = 8
AFTER_STEPS = 3
"""Of each job that stays, more, before a change counts as over."""
BATCH, TARGETS = 1, "all-linear" if torch.cuda.is_available() else r".*q_proj"
"""Steps that are short, and on a CPU adapters that are small beside the base: a worker with three such jobs is not
full, and takes a fourth in whenever one is to come."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=["toy", *BASES], default="llama-8b" if on_gpu else "toy")
    parser.add_argument("--save-every-s", type=float, default=10.0)
    parser.add_argument("--patience-s", type=float, default=90.0)
    parser.add_argument("--compared", type=int, default=4, help="jobs that are trained alone too")
    given = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        length = 128 if on_gpu else 46
        say("base", timed(lambda: write_base(Path(folder), {"toy": TOY, **BASES}[given.shape], length)))
        variables = {"PYTHONPATH": os.environ.get("PYTHONPATH") or os.getcwd(), "RAY_AUTH_MODE": "disabled"}
        variables |= {} if on_gpu else {"OMP_NUM_THREADS": "1"}
        ray.init(address="local", num_cpus=None if on_gpu else 2 * given.ranks, include_dashboard=False,
                 namespace=NAMESPACE, log_to_driver=False, _temp_dir=folder,
                 runtime_env={"env_vars": variables})  # fmt: skip
        load = Load(Path(folder), given.ranks, given.shape, given.patience_s)
        try:
            load.run(given.save_every_s)
            load.client.down()
        finally:
            ray.shutdown()
        load.compare(given.compared)
    print(f"{environment.describe()} commit={commit()}")


class MissingError(RuntimeError):
    """A change that did not come in time."""


class Load:
    """A group's jobs, and what is seen of them."""

    def __init__(self, folder: Path, ranks: int, shape: str, patience_s: float):
        self.folder, self.ranks, self.shape, self.patience_s = folder, ranks, shape, patience_s
        specs = [job(folder, f"job{at}", rank, BATCH, TARGETS) for at, rank in enumerate(JOB_RANKS * ranks)]
        self.first, self.others = specs[: len(JOB_RANKS)], specs[len(JOB_RANKS) :]
        self.steps: dict[str, int] = {}
        """Of each job, at its end."""

    @property
    def specs(self) -> list[JobSpec]:
        return [*self.first, *self.others]

    def run(self, save_every_s: float) -> None:
        gpus = int(torch.cuda.is_available())
        settings = {"gpus_per_worker": gpus, "max_workers": self.ranks, "jobs_per_worker": len(JOB_RANKS)}
        settings |= {"idle_s": 5.0, "save_every_s": save_every_s, "deterministic": not gpus}
        where = {"storage": str(self.folder), "state": str(self.folder / "state")}
        connect(ClusterSpec.model_validate({**settings, **where}))
        self.client = Client()
        self.client.submit(self.first, check=False)
        say("cold start: every job's first step", timed(lambda: until(lambda: self.all_step(self.first))))
        self.until(lambda: all(len(seconds(spec)) > SETTLED_STEPS for spec in self.first))
        self.during("grow", 2.5, self.first, lambda: self.client.submit(self.others, check=False),
                    lambda: self.workers() == self.ranks and self.all_step(self.others))  # fmt: skip
        self.move()
        names = [spec.name for spec in self.specs[1:]]
        self.during("shrink", 2.5, self.first[:1], lambda: self.client.pause(names), lambda: self.workers() == 1)
        self.during("grow-again", 2.5, self.first[:1], lambda: self.client.resume(names),
                    lambda: self.workers() == self.ranks and self.goes_on(self.specs[1:]))  # fmt: skip
        self.kill(save_every_s)
        self.client.cancel([spec.name for spec in self.specs], keep=True)
        self.client.wait([spec.name for spec in self.specs])
        self.steps = {spec.name: int(read_meta(spec.folder)["step"]) for spec in self.specs}

    def move(self) -> None:
        """A job that is paused, and whose place another takes, goes on at the only free one, on another worker."""
        where = self.places(self.specs)
        moved = self.first[0]
        other = next(spec for spec in self.others if where[spec.name] != where[moved.name])
        stay = [spec for spec in self.specs if spec not in (moved, other)]
        filler = job(self.folder, "filler", JOB_RANKS[0], BATCH, TARGETS)
        self.during("detach", 0.2, [*stay, other], lambda: self.client.pause([moved.name]),
                    lambda: state(self.client, moved.name) == "paused")  # fmt: skip
        self.during("attach", 0.2, [*stay, other], lambda: self.client.submit([filler], check=False),
                    lambda: self.all_step([filler]))  # fmt: skip
        self.client.pause([other.name])
        self.until(lambda: state(self.client, other.name) == "paused")
        self.during("move", 0.2, stay, lambda: self.client.resume([moved.name]),
                    lambda: self.places([moved])[moved.name] not in ("", where[moved.name])
                    and self.goes_on([moved]))  # fmt: skip
        self.client.cancel([filler.name])
        self.client.resume([other.name])
        self.until(lambda: self.goes_on([other]))

    def during(
        self, what: str, goal_s: float, stay: Sequence[JobSpec], change: Callable[[], object], seen: Callable[[], bool]
    ) -> None:
        """How much longer the longest step of those that stay is, from a change until it is seen, than their steps are
        before or, with other neighbours, after it."""
        usual_s = {spec.name: statistics.median(seconds(spec)[-SETTLED_STEPS:]) for spec in stay}
        before, places = {spec.name: len(seconds(spec)) for spec in stay}, self.places(stay)
        change()
        try:
            say(what, timed(lambda: self.until(seen)))
        except MissingError as error:
            print(f"{what}: {error}", flush=True)
            return
        still = [spec for spec in stay if self.places([spec])[spec.name] == places[spec.name]]
        at = {spec.name: len(seconds(spec)) for spec in still}
        self.until(lambda: all(len(seconds(spec)) > at[spec.name] + AFTER_STEPS for spec in still))
        pauses = [0.0]
        for spec in still:
            meanwhile = seconds(spec)[before[spec.name] :]
            pauses.append(max(meanwhile) - max(usual_s[spec.name], statistics.median(meanwhile[-AFTER_STEPS:])))
        if len(still) < len(stay):
            print(f"{what}: {len(stay) - len(still)} of those that were to stay moved", flush=True)
        self.keep(f"pause/{what}", max(pauses), goal_s)

    def kill(self, save_every_s: float) -> None:
        """The fullest worker, while it ticks: it does little else."""
        self.until(lambda: all(len(seconds(spec)) > SETTLED_STEPS for spec in self.specs))
        worker = max(self.client.workers(), key=lambda worker: len(worker["jobs"]))
        hit = [spec for spec in self.specs if spec.name in worker["jobs"]]
        attempts = {row["name"]: row["attempt"] for row in self.client.status()}
        usual_s = {spec.name: statistics.median(seconds(spec)) for spec in hit}
        os.kill(worker["pid"], signal.SIGKILL)
        killed_s = time.time()
        saved = {
            spec.name: int(read_meta(spec.folder)["step"]) if (spec.folder / STATE).exists() else 0 for spec in hit
        }
        reached = {spec.name: int(read_metrics(spec.folder)[-1]["step"]) for spec in hit}
        lost_s = [(reached[name] - saved[name]) * usual_s[name] for name in saved]
        print(f"killed: steps {reached}, saved {saved}", flush=True)

        def recovered() -> bool:
            rows = {row["name"]: row for row in self.client.status([spec.name for spec in hit])}
            return all(
                rows[spec.name]["attempt"] > attempts[spec.name]
                and (spec.folder / "metrics.jsonl").stat().st_mtime > killed_s
                and read_metrics(spec.folder)[-1]["step"] > saved[spec.name]
                for spec in hit
            )

        try:
            taken_s = timed(lambda: self.until(recovered))
        except MissingError as error:
            print(f"recovery: {error}", flush=True)
            return
        self.keep("recovery/killed worker", taken_s, 60.0)
        self.keep("recovery/lost work", max(lost_s), save_every_s + max(usual_s.values()))

    def compare(self, most: int) -> None:
        """So many of the jobs, alone, for as many steps: how far a vector is from what it became here."""
        base = self.first[0].base
        model, tokenizer = SuperModel.load(base, deterministic=not torch.cuda.is_available()), load_tokenizer(base)
        for spec in self.specs[:: max(1, len(self.specs) // max(1, most))]:
            count = self.steps[spec.name]
            lone = spec.model_copy(update={"steps": count, "save_every": count, "output": f"{spec.output}-alone"})
            trainer = Trainer(model, TrainerOptions())
            trainer.attach(lone, read_data(lone, model.outline, tokenizer))
            while trainer.jobs:
                trainer.tick()
            trainer.close()
            mine, solo = (load_state(each.folder)[0]["master"] for each in (spec, lone))
            off = float((mine - solo).norm() / solo.norm())
            print(
                f"{spec.name}: {count} steps, {off:.2g} from alone{' (to the bit)' * torch.equal(mine, solo)}",
                flush=True,
            )
            self.keep(f"from alone/{spec.name}", off, 1e-2, unit="of its norm")

    def keep(self, name: str, ours: float, goal: float, unit: str = "s") -> None:
        shape = f"{self.shape}, {len(self.specs)} jobs"
        group.keep("cluster", self.ranks, [row(name, shape, ours, "goal", goal, 1.0, unit=unit)])

    def until(self, seen: Callable[[], object]) -> None:
        deadline_s = time.monotonic() + self.patience_s

        def seen_or_late() -> object:
            if time.monotonic() > deadline_s:
                raise MissingError(f"not seen within {self.patience_s:g} s")
            return seen()

        until(seen_or_late)

    def all_step(self, specs: Sequence[JobSpec]) -> bool:
        return all(step(self.client, spec.name) > 0 for spec in specs)

    def goes_on(self, specs: Sequence[JobSpec]) -> bool:
        """Whether jobs that were paused have gone beyond what was saved then."""
        return all(step(self.client, spec.name) > int(read_meta(spec.folder)["step"]) for spec in specs)

    def places(self, specs: Sequence[JobSpec]) -> dict[str, str]:
        return {row["name"]: row["worker"] for row in self.client.status([spec.name for spec in specs])}

    def workers(self) -> int:
        """Those that are there: one that was let go of is known for some seconds more."""
        return sum(Path(f"/proc/{worker['pid']}").exists() for worker in self.client.workers())


if __name__ == "__main__":
    main()

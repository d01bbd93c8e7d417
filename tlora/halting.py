"""Residents that stop at evaluations: which of a trainer's jobs a sweep watches, and which are to halt now.

Asked between ticks by whoever owns the trainer (`tlora.sweep_local`, a cluster's worker), which then takes them out.
What halts a job depends on its own curve alone, so it halts at the same step wherever and however often it is trained.
"""

from collections.abc import Mapping

from tlora.resident import Phase, ResidentJob
from tlora.sweep import Curve, Halt, samples_at
from tlora.tracking import METRICS, read_metrics


def samples_of(job: ResidentJob) -> int:
    """Sequences that it has trained on."""
    return samples_at(job.step, len(job.data.train), job.spec.batch_size)


def curve_of(job: ResidentJob) -> Curve:
    """What it has measured so far."""
    folder = job.spec.folder
    rows = read_metrics(folder) if (folder / METRICS).exists() else []
    spec = job.spec
    return Curve.of(rows, len(job.data.train), spec.batch_size, len(job.data.eval), spec.objective)


class Halts:
    """Of the residents of one trainer."""

    def __init__(self) -> None:
        self.by_name: dict[str, Halt] = {}
        self._looked_at: dict[str, int] = {}

    def due(self, jobs: Mapping[str, ResidentJob]) -> dict[str, str]:
        """Residents that are to halt right after an evaluation which nobody has looked at, with why."""
        found = {name: self.judge(jobs[name]) for name in self.fresh(jobs)}
        return {name: reason for name, reason in found.items() if reason}

    def fresh(self, jobs: Mapping[str, ResidentJob]) -> list[str]:
        """Those that stand right after an evaluation which nobody has looked at; from now on somebody has."""
        found = [name for name in self.by_name if name in jobs and self._is_fresh(jobs[name])]
        self._looked_at.update({name: jobs[name].step for name in found})
        return found

    def judge(self, job: ResidentJob) -> str | None:
        """Why it halts where it is, or None. Whoever writes its metrics can say."""
        return self.by_name[job.name].judge(curve_of(job), samples_of(job))

    def drop(self, name: str) -> None:
        """It is gone: when it comes again, it is looked at again."""
        self.by_name.pop(name, None)
        self._looked_at.pop(name, None)

    def _is_fresh(self, job: ResidentJob) -> bool:
        is_evaluated = job.step > 0 and job.step % job.spec.eval_every == 0 and job.phase is Phase.TRAINING
        return is_evaluated and self._looked_at.get(job.name) != job.step

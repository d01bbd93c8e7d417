"""What users see of a roster, which calls it for `tlora status` and metrics: one mapping a job or worker, ready for
JSON. No Ray, no torch."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tlora.actors.entries import Entry
from tlora.job import State

if TYPE_CHECKING:
    from tlora.actors.records import Seen
    from tlora.actors.roster import Roster


def of_job(roster: "Roster", entry: Entry) -> dict[str, Any]:
    """A job as it last was: what its worker said goes before what the journal knows."""
    told = roster.progress.get(entry.name)
    seen = roster.workers.get(entry.place)
    waits = roster.waits.get(entry.name) if entry.state is State.QUEUED else None
    if waits and (trouble := roster.troubles.get(roster.base_of(entry))):
        waits += f"; its group did not start: {trouble}"
    if told and entry.place and told.attempt == entry.attempt:
        waits = told.reason
    return {
        "name": entry.name,
        "state": entry.state.value,
        "reason": waits or entry.reason,
        "group": seen.report.group if seen else "",
        "plan": _plan(roster, seen),
        "worker": entry.place[:8],
        "attempt": entry.attempt,
        "halts": bool(entry.halt),
        "restarts": entry.restarts,
        "share": roster.share(entry.name),
        "step": told.step if told else 0,
        "num_steps": told.num_steps if told else 0,
        "lanes": list(told.lanes) if told and entry.place else [],
        "loss": told.loss if told else None,
        "eval_loss": told.eval_loss if told else None,
        "tokens": told.tokens if told else 0,
        "tokens_per_s": told.tokens_per_s if told and entry.place else 0.0,
        "output": entry.spec["output"],
        "submitted_s": entry.submitted_s,
        "changed_s": entry.changed_s,
    }


def of_workers(roster: "Roster") -> list[dict[str, Any]]:
    """Workers that have been heard of."""
    return [
        {
            "group": seen.report.group,
            "plan": _plan(roster, seen),
            "worker": name[:8],
            "rank": seen.report.rank,
            "node": seen.report.node,
            "nodes": [node for node, _ in seen.report.processes],
            "pid": seen.report.pid,
            "pids": [pid for _, pid in seen.report.processes],
            "base_loads": seen.report.base_loads,
            "jobs": sorted(seen.report.jobs),
            "ticks": seen.report.ticks,
            "tick_s": seen.report.tick_s,
            "busy_s": seen.report.busy_s,
            "tick_error": _tick_error(roster, seen.report.group),
            "lost": roster.lost_workers[seen.report.group],
        }
        for name, seen in roster.workers.items()
    ]


def _tick_error(roster: "Roster", group: str) -> float | None:
    """How far off the base's ticks are foretold, on the mean: of |predicted / measured − 1|. None: nothing was."""
    learner = roster.learners.get(roster.groups[group].base) if group in roster.groups else None
    return None if learner is None or math.isnan(learner.error) else round(learner.error, 4)


def _plan(roster: "Roster", seen: "Seen | None") -> dict[str, int]:
    """How the workers of a unit hold their base."""
    group = roster.groups.get(seen.report.group) if seen else None
    return asdict(group.plan) if group else {}

"""A resident's exact state, as its folder holds it: what describes it, and how a job takes it up again.

Called by the trainer; the file itself is `tlora.checkpoint`'s.
"""

from typing import Any

from tlora import environment
from tlora.checkpoint import load_job_state
from tlora.errors import CheckpointError, StateError
from tlora.resident import Phase, ResidentJob
from tlora.spec import FILES, differences, parse_job
from tlora.supermodel import SuperModel


def describe(job: ResidentJob, supermodel: SuperModel) -> dict[str, Any]:
    """What a saved state says of itself, beside the job's vectors."""
    assert job.tracker is not None
    return {
        "spec": job.spec.model_dump(mode="json"),
        "step": job.step,
        "num_steps": job.num_steps,
        "tokens": job.tokens,
        "evaluating": job.phase is Phase.EVALUATING,
        "best_loss": job.best_loss,
        "best_eval_loss": job.best_eval_loss,
        "data": job.digest,
        "dtype": str(supermodel.dtype),
        "base": supermodel.fingerprint,
        "run_id": job.tracker.run_id,
        "environment": environment.describe(),
    }


def restore(job: ResidentJob, supermodel: SuperModel, *, resume: bool) -> str | None:
    """Load what the job's folder holds, if anything; returns its tracking run id. Raises StateError if it holds a state
    that is not to be resumed, CheckpointError if that is not this job's on this base."""
    folder = job.folder
    if not folder.has_state:
        if job.spec.adapter.init_from is not None:
            job.state.load_peft(job.spec.adapter.init_from)
        return None
    if not resume:
        raise StateError(f"{folder.path} holds a saved state already. Resume it, or choose another output.")
    tensors, meta = load_job_state(folder.path)
    # Files may be named otherwise, or lie elsewhere by now: what was read of them is compared below.
    changed = differences(parse_job(meta["spec"]), job.spec, but=FILES)
    if changed:
        raise CheckpointError(
            f"{folder.path} was saved with other settings: {'; '.join(changed)}. Put them back, or remove the folder "
            "to train anew."
        )
    for what, saved, mine in (
        ("data", meta["data"], job.digest),
        ("base precision", meta["dtype"], str(supermodel.dtype)),
        ("base", meta["base"], supermodel.fingerprint),
    ):
        if saved != mine:
            raise CheckpointError(f"its {what} changed since it was saved: {saved} was, {mine} is.")
    job.state.load(tensors)
    job.step, job.tokens = meta["step"], meta["tokens"]
    job.best_loss = meta["best_loss"]
    job.best_eval_loss = float(meta.get("best_eval_loss", job.best_loss))
    job.phase = Phase.EVALUATING if meta["evaluating"] else Phase.TRAINING
    return str(meta["run_id"])

"""Our jobs against plain PEFT + torch loops: same order, same numbers."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import toy
from transformers import AutoModelForCausalLM, get_scheduler

from tlora.layers import Float64
from tlora.resident import ResidentJob
from tlora.spec import JobSpec
from tlora.tracking import read_metrics
from tlora.trainer import Trainer

JOBS = {
    "plain": {},
    "rslora": {"adapter": {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"], "rslora": True}},
    "patterns": {
        "adapter": {
            "rank": 3, "alpha": 6, "targets": ".*mlp.*_proj", "rank_pattern": {"down_proj": 7},
            "alpha_pattern": {"layers.1.mlp.up_proj": 5},
        }
    },
    "decay": {"optim": {"lr": 5e-3, "weight_decay": 0.1, "betas": [0.8, 0.95], "max_grad_norm": 0.5}},
    "epochs": {"batch_size": 5, "steps": None, "epochs": 2.5, "schedule": {"name": "linear", "warmup_ratio": 0.2}},
    "loraplus": {"optim": {"lr": 2e-3, "loraplus_ratio": 8.0}, "schedule": {"name": "constant"}, "seed": 3},
}  # fmt: skip


def peft_loop(spec: JobSpec, job: ResidentJob, folder: Path, dtype: torch.dtype) -> tuple[list[float], dict, dict]:
    """Train `folder`'s untrained adapter as its users would by hand; losses, first gradients, final weights."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(toy.config(), dtype=torch.float32).to(dtype)
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    model.to(dtype).train()
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    ratio = spec.optim.loraplus_ratio
    groups = [
        {
            "params": [weight for name, weight in trained.items() if ("lora_B" in name) == is_b],
            "lr": spec.optim.lr * (ratio if is_b else 1),
        }
        for is_b in (False, True)
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=spec.optim.betas, eps=spec.optim.eps, weight_decay=spec.optim.weight_decay
    )
    warmup = spec.schedule.warmup_steps or -int(-job.num_steps * spec.schedule.warmup_ratio // 1)
    name = "constant_with_warmup" if spec.schedule.name == "constant" else spec.schedule.name
    scheduler = get_scheduler(name, optimizer, warmup, job.num_steps)
    losses, first = [], {}
    for step in range(job.num_steps):
        rows = job.step_sequences(step)
        targets = sum(row.num_targets for row in rows)
        total = 0.0
        for row in rows:
            ids = torch.from_numpy(row.ids).long()
            labels = torch.where(torch.from_numpy(row.is_target), ids, -100)
            with Float64():
                logits = model(input_ids=ids[None]).logits[0, :-1]
            loss = F.cross_entropy(logits, labels[1:], reduction="sum") / targets
            loss.backward()
            total += loss.item()
        losses.append(total)
        first = first or {name: weight.grad.clone() for name, weight in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), spec.optim.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, first, {name: weight.detach() for name, weight in trained.items()}


def named(vector: torch.Tensor, job: ResidentJob) -> dict[str, torch.Tensor]:
    """Our vector under the names of PEFT's parameters."""
    parts = {}
    for site in job.state.layout.sites:
        for letter, part in zip("AB", site.views(vector), strict=True):
            parts[f"base_model.model.{site.name}.lora_{letter}.default.weight"] = part
    return parts


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(toy.off(a[key], b[key]) for key in a)


@pytest.mark.parametrize("kind", JOBS)
def test_peft_loop_gives_the_same_job(kind: str, tmp_path: Path) -> None:
    spec, rows = toy.job(tmp_path, kind, **JOBS[kind]), toy.data(12, seed=5)
    trainer = Trainer(toy.super_model(torch.float64))
    job = trainer.attach(spec, rows)
    neighbour = trainer.attach(
        toy.job(tmp_path, "neighbour", adapter={"rank": 9, "targets": ["o_proj"], "dropout": 0.4}), toy.data(9, seed=6)
    )
    untrained = tmp_path / "untrained"
    trainer._export(job, "../untrained")
    gradients: dict[str, torch.Tensor] = {}
    step = trainer._step

    def spy(jobs: list[ResidentJob]) -> None:
        if job in jobs and not gradients:
            gradients.update({key: part.clone() for key, part in named(job.state.grad, job).items()})
        step(jobs)

    trainer._step = spy  # type: ignore[method-assign]
    toy.finish(trainer)
    assert job.record.state == neighbour.record.state == "finished"

    losses, first, final = peft_loop(spec, job, untrained, torch.float64)

    mine = [row["loss"] for row in read_metrics(spec.folder)]
    assert mine == pytest.approx(losses, rel=1e-8)
    assert distance(gradients, first) < 1e-8
    assert distance(named(job.state.master, job), final) < 1e-8

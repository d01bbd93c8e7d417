"""A real model: one job trained here, beside another, and by a plain PEFT loop; then its adapter loaded by PEFT."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
import toy
from transformers import AutoModelForCausalLM, get_scheduler

from examples import demo
from tlora.adapter import AdapterState
from tlora.local import by_base, prepare
from tlora.packing import Item, pack
from tlora.spec import parse_job
from tlora.supermodel import SuperModel

STEPS = 4


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The demo's model and data, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    folder = demo.prepare_base()
    for name in demo.SKILLS:
        demo.write_rows(name)
    return folder


def test_peft_trains_the_same_real_job(base: Path, tmp_path: Path) -> None:
    common = {"base": {"model": str(base)}, "steps": STEPS, "schedule": {"name": "cosine", "warmup_steps": 1}}
    specs = [
        parse_job(
            {
                **common,
                "name": name,
                "data": {"path": str(demo.OUTPUTS / f"data/{name}.jsonl")},
                "adapter": {"rank": rank, "alpha": 2 * rank, "targets": targets},
                "optim": {"lr": 1e-3},
                "batch_size": batch,
                "output": str(tmp_path / name),
            }
        )
        for name, rank, targets, batch in (("dates", 8, "all-linear", 4), ("slugs", 16, ["q_proj", "v_proj"], 3))
    ]
    mine, beside = prepare(specs)
    (shared,) = by_base(specs)
    model = SuperModel.load(shared, device="cpu")
    trainer = toy.Recorder(model)
    job = trainer.attach(mine.spec, mine.data)
    trainer._export(job, "untrained")
    trainer.attach(beside.spec, beside.data)
    toy.finish(trainer)
    result = toy.Result.of(trainer, job)

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, mine.spec.folder / "untrained", is_trainable=True).train()
    trained = [weight for weight in theirs.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    scheduler = get_scheduler("cosine", optimizer, 1, STEPS)
    for step, want in enumerate(result.losses):
        rows = job.step_sequences(step)
        total = 0.0
        for row in rows:
            ids = torch.from_numpy(row.ids).long()
            labels = torch.where(torch.from_numpy(row.is_target), ids, -100)[1:]
            loss = F.cross_entropy(theirs(input_ids=ids[None]).logits[0, :-1], labels, reduction="sum")
            (loss / sum(row.num_targets for row in rows)).backward()
            total += loss.item()
        assert want == pytest.approx(total / sum(row.num_targets for row in rows), rel=1e-5)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert result.losses[-1] < 0.8 * result.losses[0]

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    exported = peft.PeftModel.from_pretrained(plain, mine.spec.folder).eval()
    sequence = mine.data.train[0]
    state = AdapterState(job.state.layout, job.spec.adapter, seed=0, device=model.device, dtype=model.dtype)
    state.load(job.state.tensors())
    slot = model.place(state)
    batch = pack([Item(slot, 0, 0, 0, 1.0, sequence)], device=model.device, training=False)
    with torch.no_grad(), model._passing(batch.rows):
        logits = model._mixed[model.outline.head](model._hidden(batch))
        want_logits = exported(input_ids=batch.ids_T[None]).logits[0]
    assert ((logits - want_logits).norm() / want_logits.norm()).item() < 1e-5

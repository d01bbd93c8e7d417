"""Exact match of an evaluation: what transformers' greedy decoding with PEFT answers, row by row."""

import json
from pathlib import Path

import pytest
import torch
import toy
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tlora import supermodel
from tlora.base import Outline
from tlora.data import load_tokenizer
from tlora.local import RunOptions, prepare, read_data, train
from tlora.spec import JobSpec, load_job
from tlora.sweep_local import run_sweep
from tlora.tracking import read_metrics
from tlora.trainer import Trainer, TrainerOptions


def job(folder: Path) -> JobSpec:
    toy.write_base(folder)
    rows = [json.dumps({"prompt": f"{n % 3}", "completion": "yes" if n % 3 else f"no {n}"}) + "\n" for n in range(48)]
    (folder / "rows.jsonl").write_text("".join(rows[:36]))
    (folder / "held_out.jsonl").write_text("".join(rows[36:]))
    data = {"path": str(folder / "rows.jsonl"), "eval_path": str(folder / "held_out.jsonl")}
    changes = {"data": data, "objective": "exact_match", "optim": {"lr": 2e-2}, "steps": 24, "eval_every": 8}
    return toy.named_job(folder, "a", **changes)


def answered(spec: JobSpec, folder: Path) -> float:
    """Share of the evaluation rows that generate() answers as they are, by one adapter."""
    tokenizer = load_tokenizer(spec.base)
    rows = read_data(spec, Outline.load(spec.base), tokenizer).eval
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(spec.base.model), folder)
    right = 0
    for row in rows:
        start = int(row.is_target.argmax())
        asked = torch.tensor(row.ids[:start].astype(int))[None]
        count = len(row) - start
        whole = model.generate(asked, max_new_tokens=count, do_sample=False, attention_mask=torch.ones_like(asked))
        right += whole[0, start:].tolist() == row.ids[start:].tolist()
    return right / len(rows)


def rates(spec: JobSpec) -> list[float]:
    return [row["exact_match"] for row in read_metrics(spec.folder) if "exact_match" in row]


@pytest.mark.parametrize("deterministic", [False, True])
def test_it_is_what_greedy_decoding_answers(tmp_path: Path, deterministic: bool) -> None:
    spec = job(tmp_path)
    neighbour = toy.named_job(tmp_path, "b", data=spec.data.model_dump(), batch_size=8, eval_every=8, steps=24)
    options = RunOptions(device="cpu", deterministic=deterministic)
    train(prepare([spec, neighbour], options), options)
    found = rates(spec)
    assert len(found) == 3
    assert found[-1] == answered(spec, spec.folder)
    assert max(found) == answered(spec, spec.folder / "best")
    assert 0.0 < max(found) < 1.0
    assert all("exact_match" not in row for row in read_metrics(neighbour.folder))


def test_a_wrong_count_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the token before the target instead of its own."""
    spec, count = job(tmp_path), supermodel.wrong_tokens
    monkeypatch.setattr(supermodel, "wrong_tokens", lambda hidden, *rest: count(hidden.roll(1, 0), *rest))
    options = RunOptions(device="cpu")
    train(prepare([spec], options), options)
    assert rates(spec)[-1] != answered(spec, spec.folder)


def test_it_may_be_a_sweep_s_objective(tmp_path: Path) -> None:
    values = job(tmp_path).model_dump()
    kept = {key: values[key] for key in ("base", "data", "adapter")}
    spec = toy.sweep(
        tmp_path,
        job={**kept, "epochs": 6},
        space={"optim.lr": [1e-4, 2e-2], "batch_size": [2, 4]},
        sampler={"name": "grid"},
        budget={},
        objective="exact_match",
    )
    state = run_sweep(spec, RunOptions(device="cpu"))
    leader = load_job(spec.folder / "candidates" / state.leader.name / "job.yaml")
    assert leader.optim.lr == 2e-2
    assert state.leader.best_loss == 1.0 - max(rates(leader))
    assert state.leader.best_loss == pytest.approx(1.0 - answered(leader, spec.folder / "best"))
    assert "not answered exactly" in (spec.folder / "report.html").read_text()


def test_of_equal_shares_the_lower_loss_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers a row at first: best/ is then that of the lowest loss, also over a resume."""
    trainer = Trainer(toy.super_model(), TrainerOptions())
    one = trainer.attach(toy.job(tmp_path, objective="exact_match", eval_every=4), toy.data(held_out=4))
    written: list[float] = []
    monkeypatch.setattr(trainer, "_export", lambda job, part: written.append(job.eval_loss))
    for loss, share in ((2.0, 0.0), (2.5, 0.0), (1.5, 0.0)):
        trainer._after_evaluation(one, loss, share)
    assert written == [2.0, 1.5]
    trainer.detach("a")
    again = trainer.attach(one.spec, one.data, resume=True)
    for loss, share in ((1.8, 0.0), (1.4, 0.0), (3.0, 0.25), (1.0, 0.0)):
        trainer._after_evaluation(again, loss, share)
    assert written == [2.0, 1.5, 1.4, 3.0]

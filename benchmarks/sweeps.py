"""What early exits save and what they cost: the adapter a sweep picks, beside all configurations trained to the end.

    python -m benchmarks.sweeps outputs/demo/base dates=dates.jsonl codes=codes.jsonl
    python -m benchmarks.sweeps outputs/demo/base dates=dates.jsonl --small     (two CPU cores, within 10 minutes)

Rows of the files are {"messages": [...]}. For each task and seed: rows are drawn for training, validation and test, all
disjoint; the configurations are drawn by seed before anything is trained; all are trained to the end, together (the
reference); then the sweep runs live, and sees validation rows only. Beside it, at as many samples as it took: plain
asynchronous successive halving (Li et al., MLSys 2020) and the first configurations as they were drawn, both replayed
on the reference's curves, and both credited with the test loss of their pick trained to the end. Of the first task and
seed, the sweep's time beside that of all configurations one after the other with PEFT, of which `--peft-steps` steps
each are measured and the rest extrapolated. The sweep is timed warm: the reference has compiled in the same process.
PEFT keeps adapters in float32 on a base in half precision. Writes results/sweeps/<device>.json, and the reference's
curves to `--curves`, if that is given: `tlora.sweep_replay` then tries other rules without training.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.peft_in_turn import seconds_in_turn
from benchmarks.results import ROOT, Row, commit
from tlora.base import default_device
from tlora.checkpoint import BEST
from tlora.data import JobData, TokenSequence, load_tokenizer
from tlora.local import RunOptions
from tlora.spec import BaseSpec, JobSpec, parse_job
from tlora.supermodel import SuperModel
from tlora.sweep import Curve
from tlora.sweep_local import LocalPlaces
from tlora.sweep_report import cost
from tlora.sweep_run import SweepRun
from tlora.sweep_spec import SweepSpec, parse_sweep
from tlora.sweep_state import SweepState
from tlora.trainer import Trainer, TrainerOptions

SPACE = {
    "optim.lr": {"log_uniform": [1e-5, 1e-2]},
    "adapter.rank": [2, 4, 8, 16, 32, 64],
    "adapter.alpha": {"times": [1, 2], "of": "adapter.rank"},
    "batch_size": [4, 8, 16],
    "adapter.dropout": [0, 0.1],
}
OFF = {"divergence": None, "overfitting": None, "halving": None}


class KnownData(SweepRun):
    """A sweep whose sequences are at hand."""

    data: JobData

    def _data(self, spec: JobSpec) -> JobData:
        self._read[None] = self.data
        return self.data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("tasks", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--configurations", type=int, default=24)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=600, help="training rows")
    parser.add_argument("--held-out", type=int, default=0, help="validation rows, and as many test rows; 0: all")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--max-length", type=int, default=384)
    parser.add_argument("--peft-steps", type=int, default=40, help="of each configuration; 0: no PEFT")
    parser.add_argument("--curves", type=Path, help="folder for the reference's curves, as JSON")
    parser.add_argument("--small", action="store_true", help="8 configurations, one seed, 64 rows, one epoch")
    parser.add_argument("--device", default=str(default_device()))
    args = parser.parse_args()
    if args.small:
        args.configurations, args.seeds, args.rows, args.held_out, args.epochs = 8, 1, 64, 16, 1
    tokenizer = load_tokenizer(BaseSpec(model=args.base))
    with tempfile.TemporaryDirectory() as folder:
        for task in args.tasks:
            name, _, file = task.partition("=")
            sequences = read(Path(file), tokenizer, args.max_length)
            cases = []
            for seed in range(args.seeds):
                cases.append(measure(args, name, sequences, seed, Path(folder) / name))
                report(args, name, cases)


def read(file: Path, tokenizer: Any, max_length: int) -> list[TokenSequence]:
    """Each row's last answer is the target."""
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines():
        turns = json.loads(line)["messages"]
        whole = tokenizer.apply_chat_template(turns, tokenize=False)
        asked = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        assert whole.startswith(asked), f"{file}: the template rewrites what was asked"
        start, ids = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (asked, whole))
        if len(start) < len(ids) <= max_length:
            at = torch.arange(len(ids)).numpy()
            kept.append(TokenSequence(torch.tensor(ids, dtype=torch.int32).numpy(), at >= len(start)))
    return kept


def measure(
    args: argparse.Namespace, task: str, sequences: Sequence[TokenSequence], seed: int, folder: Path
) -> dict[str, Any]:
    """One task and seed: the reference, the sweep, and what others would have picked."""
    rows = list(sequences)
    random.Random(f"{task} {seed}").shuffle(rows)
    held_out = args.held_out or (len(rows) - args.rows) // 2
    assert len(rows) >= args.rows + 2 * max(held_out, 1), f"{task} has {len(rows)} rows that fit; want more"
    test, rest = rows[:held_out], rows[held_out:]
    data = JobData(rest[held_out:][: args.rows], rest[:held_out], None, None)  # type: ignore[arg-type]
    job = {
        "base": {"model": args.base},
        "data": {"path": task, "eval_path": "validation", "max_length": args.max_length},
        "adapter": {"targets": "all-linear"},
        "epochs": args.epochs,
        "seed": seed,
    }
    common = {
        "job": job,
        "space": SPACE,
        "sampler": {"seed": sum(task.encode())},
        "budget": {"configurations": args.configurations},
        "save_every_evaluations": 0,
    }
    rules = {"evaluations": 16, "halving": {"warmup": 1 / 8}} if args.small else {}
    whole, curves = sweep(
        args,
        {**common, "name": "whole", "places": args.configurations, "early_exit": {**rules, **OFF}},
        data,
        folder,
        seed,
    )
    if args.curves:
        keep_curves(args.curves / f"{task}-{seed}.json", curves)
    ours, _ = sweep(args, {**common, "name": "ours", "places": 24, "early_exit": rules}, data, folder, seed)
    in_turn_s = peft_s(args, whole, data) if args.peft_steps else None
    args.peft_steps = 0  # of the first task and seed alone
    losses = losses_on(args, whole, folder / f"{seed}-whole", test)
    name = ours.leader.name.replace("ours", "whole")
    (picked,) = losses_on(args, ours, folder / f"{seed}-ours", test, only=ours.leader.name).values()
    best = min(losses.values())
    winner = whole.leader.name
    by_asha, taken_by_asha = asha(curves, ours.samples)
    return {
        "task": task,
        "seed": seed,
        "regret": picked / best - 1,
        "regret_of_the_whole": losses[winner] / best - 1,
        "regret_of_asha": losses[by_asha] / best - 1,
        "regret_of_random": statistics.fmean(losses[one] for one in firsts(curves, ours.samples)) / best - 1,
        "samples": ours.samples / whole.samples,
        "seconds": ours.spent_s / whole.spent_s,
        "ours_s": ours.spent_s,
        "peft_in_turn_s": in_turn_s,
        "samples_of_asha": taken_by_asha / whole.samples,
        "evaluated": cost(ours)["evaluated_sequences"] / cost(whole)["evaluated_sequences"],
        "near_the_best": sum(loss <= 1.01 * best for loss in losses.values()),
        "ended_the_winner": ours[winner.replace("whole", "ours")].status != "finished" and name != winner,
    }


def keep_curves(path: Path, curves: Mapping[str, Curve]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({name: asdict(curve) for name, curve in curves.items()}))


def sweep(
    args: argparse.Namespace, values: Mapping[str, Any], data: JobData, folder: Path, seed: int
) -> tuple[SweepState, dict[str, Curve]]:
    spec: SweepSpec = parse_sweep({**values, "output": str(folder / f"{seed}-{values['name']}")})
    spec.folder.mkdir(parents=True)
    began_s = time.perf_counter()
    options = RunOptions(device=args.device)
    state = SweepState(spec=spec.model_dump(mode="json"))
    run = KnownData(spec, state, LocalPlaces(options, spec.places))
    run.data = data
    run.run()
    print(
        f"{folder.name} seed {seed} {spec.name}: {state.samples} samples, {time.perf_counter() - began_s:.0f} s, best "
        f"validation loss {state.leader.best_loss:.4f} ({state.leader.name})",
        flush=True,
    )
    return state, {one.name: run._curve(one) for one in state.candidates}


def peft_s(args: argparse.Namespace, whole: SweepState, data: JobData) -> float:
    spec = parse_sweep(whole.spec)
    specs = [spec.candidate(one.number, one.values) for one in whole.candidates]
    seconds = seconds_in_turn(specs, data, torch.device(args.device), args.peft_steps)
    print(f"{len(specs)} configurations one after the other with PEFT: {seconds:.0f} s, extrapolated from "
          f"{args.peft_steps} steps of each", flush=True)  # fmt: skip
    return seconds


def losses_on(
    args: argparse.Namespace, state: SweepState, folder: Path, test: list[TokenSequence], only: str = ""
) -> dict[str, float]:
    """Of each candidate's best adapter: one step at rate 0, then an evaluation, all in shared ticks."""
    trainer = Trainer(SuperModel.load(BaseSpec(model=args.base), device=args.device), TrainerOptions())
    residents = []
    for one in state.candidates:
        best = folder / "candidates" / one.name / BEST
        if not best.exists() or (only and one.name != only):
            continue
        rank, alpha = one.values["adapter.rank"], one.values["adapter.alpha"]
        spec = parse_job(
            {
                "name": one.name,
                "base": {"model": args.base},
                "data": {"path": "test", "eval_path": "test"},
                "adapter": {"rank": rank, "alpha": alpha, "targets": "all-linear", "init_from": str(best)},
                "optim": {"lr": 0.0},
                "batch_size": 1,
                "steps": 1,
                "output": str(folder / "test" / one.name),
            }
        )
        residents.append(trainer.attach(spec, JobData(test[:1], test, None, None)))  # type: ignore[arg-type]
    while trainer.jobs:
        trainer.tick()
    trainer.close()
    return {job.name: job.eval_loss for job in residents}


def asha(curves: Mapping[str, Curve], most: int, eta: int = 3, warmup: float = 1 / 16) -> tuple[str, int]:
    """Who is best on validation when plain asynchronous successive halving has taken `most` samples, or has ended all
    before; and how many it took. At a rung who is not among the best 1 / eta of those that have arrived so far ends."""
    seen: dict[int, list[float]] = {}
    found: dict[str, float] = {}
    curves = {name: curve for name, curve in curves.items() if curve.train}  # one may have failed before any step
    ends = {name: curve.train[-1][0] for name, curve in curves.items()}
    rungs, longest = [], max(ends.values())
    while (at := warmup * longest * eta ** len(rungs)) < longest:
        rungs.append(at)
    at_of, passed, alive = dict.fromkeys(curves, 0), dict.fromkeys(curves, 0), list(curves)
    while alive and sum(at_of.values()) < most:
        name = min(alive, key=lambda one: at_of[one])
        later = [point for point in curves[name].evaluated if point[0] > at_of[name]]
        at_of[name], loss = later[0] if later else (ends[name], float("inf"))
        found[name] = min(loss, found.get(name, loss))
        while passed[name] < len(rungs) and at_of[name] >= rungs[passed[name]] and name in alive:
            arrived = seen.setdefault(passed[name], [])
            arrived.append(loss)
            if loss > sorted(arrived)[max(1, len(arrived) // eta) - 1]:
                alive.remove(name)
            passed[name] += 1
        if at_of[name] >= ends[name] and name in alive:
            alive.remove(name)
    return min(found, key=lambda one: found[one]), sum(at_of.values())


def firsts(curves: Mapping[str, Curve], most: int) -> list[str]:
    """Random picks: of as many configurations as `most` samples train to the end, who is best on validation; one pick
    for each configuration that may be drawn first, the others in their order."""
    names = [name for name, curve in curves.items() if curve.train]
    return [first(curves, names[at:] + names[:at], most) for at in range(len(names))]


def first(curves: Mapping[str, Curve], names: Sequence[str], most: int) -> str:
    found, left = {}, most
    for name in names:
        curve = curves[name]
        so_far = curve.until(min(left, curve.train[-1][0]))
        left -= curve.train[-1][0]
        if so_far.best is not None:
            found[name] = so_far.best[1]
        if left <= 0:
            break
    return min(found or names[:1], key=lambda one: found.get(one, 0.0))


def made(name: str, shape: str, value: float, target: float | None, stamp: Sequence[str], unit: str = "ratio") -> Row:
    """Ratios are to the reference, or the best of it; counts stand alone."""
    return Row(name, shape, float(value), "reference", 1.0, float(value), target, "lower", *stamp, unit)


def report(args: argparse.Namespace, task: str, cases: Sequence[Mapping[str, Any]]) -> None:
    """Print the last case and keep a task's rows so far; ratios of test losses are picked / best."""
    shown = {key: f"{value:.4f}" if isinstance(value, float) else value for key, value in cases[-1].items()}
    print("  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)
    is_gpu = torch.device(args.device).type == "cuda"
    gpu = torch.cuda.get_device_name() if is_gpu else "cpu"
    shape = f"{args.configurations} configurations, {len(cases)} seeds, {args.rows} rows"
    stamp = (gpu, str(torch.__version__), triton.__version__, commit(), datetime.now(UTC).date().isoformat())
    rows = []
    for measure_name, target in (
        ("regret", 1.01),
        ("regret_of_the_whole", None),
        ("regret_of_asha", None),
        ("regret_of_random", None),
        ("samples", 0.28),
        ("seconds", None),
        ("samples_of_asha", None),
        ("evaluated", None),
        ("near_the_best", 6.0),
    ):
        values = [float(case[measure_name]) + measure_name.startswith("regret") for case in cases]
        value = max(values) if measure_name == "near_the_best" else statistics.fmean(values)
        rows.append(made(f"{task}/{measure_name}", shape, value, target, stamp))
    rows += [made(f"{task}/regret/seed-{case['seed']}", shape, 1.0 + case["regret"], None, stamp) for case in cases]
    ended = sum(bool(case["ended_the_winner"]) for case in cases)
    rows.append(made(f"{task}/ended_the_winner", shape, ended, None, stamp, "cases"))
    if in_turn_s := cases[0]["peft_in_turn_s"]:
        ours_s, against = cases[0]["ours_s"], "PEFT, one after the other: a prefix, extrapolated"
        rows.append(
            Row(
                f"{task}/wall-time",
                shape,
                ours_s,
                against,
                in_turn_s,
                ours_s / in_turn_s,
                1 / 4.7,
                "lower",
                *stamp,
                "s",
            )
        )
    for row in rows:
        print(f"{row.name:<40} {shape} {row.ratio:.4f} {row.verdict}", flush=True)
    path = ROOT / "benchmarks" / "results" / "sweeps" / f"{gpu.lower().replace(' ', '-')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = {row["name"]: row for row in json.loads(path.read_text())} if path.exists() else {}
    kept |= {row.name: asdict(row) for row in rows}
    in_all = sum(row["ours_ms"] for name, row in kept.items() if name.endswith("/ended_the_winner"))
    total = made("all/ended_the_winner_of_all_cases", "all tasks and seeds", in_all, 1.0, stamp, "cases")
    print(f"{total.name:<40} {total.shape} {total.ratio:.0f} {total.verdict}", flush=True)
    kept[total.name] = asdict(total)
    path.write_text(json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

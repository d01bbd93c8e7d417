"""Six jobs on one group of one worker: what comings and goings cost those that stay, seconds printed.

    python -m benchmarks.cluster_load [--shape llama-8b]

Makes a base of that shape with random weights (`benchmarks/step.py`; `toy` for a CPU), starts Ray on this machine, a
scheduler and one worker, and lets jobs of ranks 8 to 64 run; then jobs are attached, paused and resumed. A neighbour's
longest step meanwhile is printed beside its median before.
"""

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.cluster import say, step, timed, until
from benchmarks.results import commit
from benchmarks.step import BASES
from tlora import environment
from tlora.actors.names import NAMESPACE
from tlora.actors.scheduler import connect
from tlora.client import Client
from tlora.cluster import ClusterSpec
from tlora.spec import JobSpec, parse_job
from tlora.tracking import read_metrics

TOY = LlamaConfig(
    vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=1024,
)  # fmt: skip
RANKS = (8, 16, 32, 64)
SETTLED_STEPS = 12
LENGTH, BATCH = 512, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["toy", *BASES], default="toy")
    arguments = parser.parse_args()
    os.environ["RAY_AUTH_MODE"] = "disabled"
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        say("base made and written", timed(lambda: write_base(Path(folder), {"toy": TOY, **BASES}[arguments.shape])))
        environment_of_workers = {
            "PYTHONPATH": os.environ.get("PYTHONPATH") or os.getcwd(),
            "RAY_AUTH_MODE": "disabled",
        }
        ray.init(address="local", include_dashboard=False, namespace=NAMESPACE, log_to_driver=False, _temp_dir=folder,
                 runtime_env={"env_vars": environment_of_workers})  # fmt: skip
        try:
            measure(Path(folder))
        finally:
            ray.shutdown()
    print(f"{environment.describe()} commit={commit()}")


def write_base(folder: Path, config: Any, length: int = LENGTH) -> None:
    """With a tokenizer of bytes, and rows of text of about so many tokens for the jobs."""
    bytewise = Tokenizer(models.BPE(vocab={char: at for at, char in enumerate(alphabet())}, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "base")
    del model
    torch.cuda.empty_cache()
    text = "the quick brown fox jumps over the lazy dog. " * (length // 46)
    rows = [json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(64)]
    (folder / "rows.jsonl").write_text("".join(rows))


def alphabet() -> Sequence[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def measure(folder: Path) -> None:
    gpus = int(torch.cuda.is_available())
    connect(ClusterSpec(storage=str(folder), state=str(folder / "state"), gpus_per_worker=gpus, max_workers=1))
    client = Client()
    specs = [job(folder, f"job{number}", rank) for number, rank in enumerate((*RANKS, 64, 16))]
    stay, come = specs[: len(RANKS)], specs[len(RANKS) :]
    client.submit(stay, check=False)
    say("cold start: first step of the first job", timed(lambda: until(lambda: step(client, "job0") > 0)))
    until(lambda: all(step(client, spec.name) > SETTLED_STEPS for spec in stay))
    before = {spec.name: statistics.median(seconds(spec)[SETTLED_STEPS // 2 :]) for spec in stay}
    say("a neighbour's step, median", max(before.values()))

    def meanwhile(what: str, change: Callable[[], object], seen: Callable[[], bool]) -> None:
        """Until `seen`, and some steps more; the longest step of those that stay."""
        at = {spec.name: len(seconds(spec)) for spec in stay}
        change()
        say(what, timed(lambda: until(seen)))
        until(lambda: all(len(seconds(spec)) > at[spec.name] + 3 for spec in stay))
        say("… a neighbour's longest step meanwhile", max(max(seconds(spec)[at[spec.name] :]) for spec in stay))

    last = come[0].name
    meanwhile("two jobs attached: first steps", lambda: client.submit(come, check=False),
              lambda: all(step(client, spec.name) > 0 for spec in come))  # fmt: skip
    meanwhile("a job of rank 64 paused: saved", lambda: client.pause([last]), lambda: state(client, last) == "paused")
    taken = step(client, last)
    meanwhile("… and resumed: next step", lambda: client.resume([last]), lambda: step(client, last) > taken)
    say("down: six jobs saved", timed(client.down))


def job(folder: Path, name: str, rank: int, batch: int = BATCH, targets: str = "all-linear") -> JobSpec:
    return parse_job(
        {
            "name": name,
            "base": {"model": str(folder / "base")},
            "data": {"path": str(folder / "rows.jsonl"), "max_length": LENGTH},
            "adapter": {"rank": rank, "targets": targets, "dropout": 0.1},
            "batch_size": batch,
            "schedule": {"name": "constant"},  # so that any step may be the last
            "steps": 100_000,
            "save_every": 100_000,
            "output": str(folder / "out" / name),
        }
    )


def seconds(spec: JobSpec) -> list[float]:
    """Of each step so far."""
    rows = [row for row in read_metrics(spec.folder) if row.get("tokens_per_s")]
    taken = zip(rows, [{"tokens": 0}, *rows], strict=False)
    return [(row["tokens"] - last["tokens"]) / row["tokens_per_s"] for row, last in taken]


def state(client: Client, name: str) -> str:
    return str(client.status([name])[0]["state"])


if __name__ == "__main__":
    main()

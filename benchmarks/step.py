"""The whole step of eight mixed jobs beside its floor, the frozen backbone and PEFT; tick times for the scheduler.

    python -m benchmarks.step [--base BASE ...] [--parts PART ...]

BASEs and PARTs are the keys of `BASES` and `PARTS` below; by default all parts of llama-8b. Weights and tokens are
random: speed does not depend on them. Bases have real shapes. Rows go to results/<gpu>/step.json, tick times and memory
to profile.json beside it.
"""

import argparse
import copy
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.modeling_layers import GradientCheckpointingLayer

from benchmarks import results
from tlora.adapter import AdapterState
from tlora.data import TokenSequence
from tlora.kernels.adamw import adamw
from tlora.optim import update_of
from tlora.packing import Item, pack
from tlora.spec import AdapterSpec, BaseSpec, OptimSpec
from tlora.supermodel import SuperModel

RANKS = (2, 4, 8, 16, 16, 32, 64, 64)
DROPOUT = 0.1
BASES: dict[str, PretrainedConfig] = {
    "llama-8b": LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0,
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=8192,
    ),
    "llama-1b": LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    ),
}  # fmt: skip


class Bench:
    """One base on this GPU."""

    def __init__(self, name: str, **options: bool):
        self.name, self.config = name, BASES[name]
        self.model = SuperModel(fresh(self.config), BaseSpec(model=name), **options)
        self.states: list[AdapterState] = []

    def label(self, name: str) -> str:
        return name if self.name == "llama-8b" else f"{name}/{self.name}"

    def place(self, ranks: Sequence[int]) -> None:
        """Make just these jobs resident, every other one with dropout."""
        for slot in list(self.model.residents):
            self.model.remove(slot)
        self.states = []
        for number, rank in enumerate(ranks):
            spec = AdapterSpec(rank=rank, alpha=rank, targets="all-linear", dropout=DROPOUT * (number % 2))
            layout = self.model.outline.lay_out(spec)
            state = AdapterState(layout, spec, seed=number, device=self.model.device, dtype=self.model.dtype)
            state.master[layout.b_start :].normal_(std=0.02)
            state.publish()
            self.states.append(state)
            self.model.place(state)

    def step(self, jobs: Sequence[int], length: int) -> None:
        """One step of the given residents, one sequence of `length` tokens each: pack, forward, backward, optimizer."""
        items = [Item(slot, 0, 0, 0, 1.0 / (length - 1), sequence(length, slot)) for slot in jobs]
        batch = pack(
            items,
            device=self.model.device,
            per_sequence=self.model.deterministic,
            round_to=self.model.row_multiple(len(items) * length),
        )
        losses = self.model.train(batch)
        if self.states:
            adamw([
                update_of(self.states[slot], OptimSpec(lr=1e-5), loss=losses[at], step=0, lr=1e-5)
                for at, slot in enumerate(jobs)
            ])  # fmt: skip

    def floor(self, num_rows: int) -> Callable[[], None]:
        """Every plain product of a step: forward and input gradient of each linear of one layer, and of the head."""
        layer = next(module for module in self.model.model.modules() if isinstance(module, GradientCheckpointingLayer))
        bundles = {id(linear.bundle): linear.bundle.weight for linear in layer.modules() if hasattr(linear, "bundle")}
        head = self.model.model.get_output_embeddings().weight
        times = [(weight, self.model.outline.num_layers) for weight in bundles.values()] + [(head, 1)]
        products = [
            (weight, count, *(weight.new_empty(num_rows, width).normal_() for width in weight.shape))
            for weight, count in times
        ]

        def run() -> None:
            for weight, count, dy, x in products:
                for _ in range(count):
                    torch.mm(x, weight.T)
                    torch.mm(dy, weight)

        return run


def fresh(config: PretrainedConfig, device: torch.device | str = "cuda") -> nn.Module:
    """With a config of its own: a super-model names its attention there."""
    torch.manual_seed(0)
    config, device = copy.deepcopy(config), torch.device(device)
    with device:
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )


def sequence(length: int, seed: int, vocab: int = 30000) -> TokenSequence:
    ids = np.random.default_rng(seed).integers(0, vocab, length).astype(np.int32)
    return TokenSequence(ids, np.arange(length) >= 1)


def in_turn(runs: dict[str, Callable[[], None]], rounds: int = 4, *, warm: int = 3) -> dict[str, float]:
    """Median milliseconds of each, after what compiles, captures and measures itself has done so in `warm` calls."""
    for run in [*runs.values()] * warm:
        run()
    return results.medians_ms(runs, calls=1, rounds=rounds, graphed=False)


KINDS = {
    "attention": ("flash", "fmha", "sdpa"),
    "element-wise": ("triton_", "_forward", "_backward", "CatArray"),
    "thin products": ("project", "gradient_a", "gradient_b", "sum_slabs", "fold_sums"),
    "mixed products": ("fused", "expand"),
    "plain products": ("nvjet", "gemm", "cutlass", "splitK"),
    "loss": ("_cross_entropy",),
    "optimizer": ("_sum_squares", "_step"),
}
"""What kernels are, by the first part of a name that they have."""


def breakdown(bench: Bench) -> None:
    """Where a step's time goes: its kernels by kind, of the full step, without adapters, and of the floor."""
    for length in (1024, 2048):
        bench.place(())
        floor = spent(bench.floor(8 * length))
        frozen = spent(partial(bench.step, range(8), length))
        bench.place(RANKS)
        full = spent(partial(bench.step, range(8), length))
        print(f"{bench.label(f'breakdown/8x{length}')}: ms of the step, frozen, floor")
        for kind in sorted({*full, *frozen, *floor}, key=lambda kind: -full.get(kind, 0)):
            print(f"  {kind:<16}" + "".join(f"{times.get(kind, 0):10.2f}" for times in (full, frozen, floor)))
        free()


def spent(run: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a call, by kind; `idle` is what the device waited between the first kernel and the last."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    times: dict[str, float] = defaultdict(float)
    for event in events:
        kind = next((kind for kind, names in KINDS.items() if any(name in event.name for name in names)), "other")
        times[kind] += event.time_range.elapsed_us() / 1e3
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return {**times, "idle": span / 1e3 - sum(times.values())}


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def steps(bench: Bench) -> None:
    """Eight jobs against the floor, and against the same tick without adapters. The two cannot be interleaved, since
    what is resident differs; each is timed beside the floor, and their quotients are divided."""
    for length in (1024, 2048):
        num_rows, shape = 8 * length, f"8x{length}"
        floor = bench.floor(num_rows)
        bench.place(())
        frozen = in_turn({"floor": floor, "step": lambda length=length: bench.step(range(8), length)})
        bench.place(RANKS)
        full = in_turn({"floor": floor, "step": lambda length=length: bench.step(range(8), length)})
        target, over = (1.35, 1.08) if bench.name == "llama-8b" else (None, None)
        add(bench, f"step/{shape}", full["step"], "plain products", full["floor"], target)
        scaled = frozen["step"] * full["floor"] / frozen["floor"]
        add(bench, f"step-over-frozen/{shape}", full["step"], "frozen backbone and head", scaled, over)
        free()


def add(
    bench: Bench, name: str, ours: float, against: str, theirs: float, target: float | None, *, faster: bool = False
) -> None:
    """`faster`: the ratio says how many times as fast we are."""
    row = results.row(bench.label(name), bench.name, ours, against, theirs, target, "higher" if faster else "lower")
    results.write("step", [row])


class Peft:
    """One PEFT job on a base of its own, in a plain training loop."""

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        compiled: bool = False,
        device: torch.device | str = "cuda",
        around: Callable[[nn.Module], nn.Module] = lambda model: model,
    ):
        """`around`: what spreads the model over ranks."""
        lora = LoraConfig(r=16, lora_alpha=16, lora_dropout=DROPOUT, target_modules="all-linear")
        self.device, self.vocab = device, min(30000, config.vocab_size)
        self.model = around(get_peft_model(fresh(config, device), lora).train())
        if compiled:
            for layer in self.model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.compile()
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-5)

    def step(self, length: int, dropout: float = DROPOUT, batch: int = 1) -> None:
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        ids = torch.from_numpy(sequence(length, 0, self.vocab).ids).long().to(self.device)[None].repeat(batch, 1)
        self.model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # else each layer compiles for itself
        torch.nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def own_solo(bench: Bench) -> None:
    """Tokens/s of eight jobs together over the same jobs one after the other."""
    bench.place(RANKS)
    for length in (512, 2048):
        runs = {str(slot): partial(bench.step, [slot], length) for slot in range(8)}
        times = in_turn({"ours": partial(bench.step, range(8), length), **runs}, warm=8)
        alone = sum(time for name, time in times.items() if name != "ours")
        name, theirs = f"throughput/8x{length}/own-solo", "ours, one job after the other"
        add(bench, name, times["ours"], theirs, alone, None, faster=True)


def against_peft(bench: Bench, *, compiled: bool = False) -> None:
    """Tokens/s of eight jobs together over PEFT's, one after the other: half of them with dropout."""
    bench.place(RANKS)
    peft = Peft(bench.config, compiled=compiled)
    how = "compiled" if compiled else "eager"
    for length in (512, 2048):
        runs = {rate: partial(peft.step, length, rate) for rate in (0.0, DROPOUT)}
        # Not in turn: a compiled step of another rate is compiled anew.
        times = [in_turn({"ours": partial(bench.step, range(8), length), "peft": run}) for run in runs.values()]
        ours, theirs = (statistics.mean(time["ours"] for time in times), sum(4 * time["peft"] for time in times))
        target = {512: 6.0, 2048: 1.9}[length] if bench.name == "llama-8b" and not compiled else None
        name, text = f"throughput/8x{length}/peft-{how}", f"PEFT {how}, one job after the other"
        add(bench, name, ours, text, theirs, target, faster=True)
    del peft, runs
    torch._dynamo.reset()
    free()


def deterministic(bench: Bench) -> None:
    """The price of bits that do not depend on neighbours: eight jobs in that mode, over the same in production."""
    length = 1024
    runs = {}
    for name, one in {"ours": Bench(bench.name, deterministic=True), "production": bench}.items():
        one.place(RANKS)
        runs[name] = partial(one.step, range(8), length)
    times = in_turn(runs, rounds=3)
    add(bench, f"deterministic/8x{length}", times["ours"], "ours in production", times["production"], None)
    del runs, one
    free()


def captured(bench: Bench) -> None:
    """The largest tick that is captured as CUDA graphs, over the same launched kernel by kernel."""
    length = bench.model.small_rows // 8 // 64 * 64
    runs = {}
    for name, one in {"ours": bench, "launched": Bench(bench.name, captured=False)}.items():
        one.place(RANKS)
        assert one.model.is_small(8 * length) == (name == "ours")
        runs[name] = partial(one.step, range(8), length)
    times = in_turn(runs, warm=64)
    add(bench, f"captured/8x{length}", times["ours"], "ours, kernel by kernel", times["launched"], None)
    del runs, one
    free()


def memory(bench: Bench) -> None:
    """Peak of a tick of eight jobs over one base, and eight times the peak of one PEFT job."""
    length = 1024
    bench.place(RANKS)
    free()
    ours = peak(lambda: bench.step(range(8), length))
    others = torch.cuda.memory_allocated()
    theirs = 8 * (peak(partial(Peft(bench.config).step, length)) - others)
    target = 0.3 if bench.name == "llama-8b" else None
    add(bench, "memory/8-jobs", ours / 2**30, "8 × one PEFT job of 1024 tokens", theirs / 2**30, target)
    free()


def peak(run: Callable[[], None]) -> int:
    for _ in range(2):
        run()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def profile(bench: Bench, measured: Callable[[Bench], Iterator[dict[str, object]]]) -> None:
    """Part of what the capacity model starts from, in the place of what is there of this base."""
    made_by = {"torch": str(torch.__version__), "commit": results.commit()}
    new = [{**it, **made_by} for it in measured(bench)]
    path, part = results.folder() / "profile.json", {ticks: "ticks", peft: "peft"}[measured]
    kept = json.loads(path.read_text()) if path.exists() else {"gpu": torch.cuda.get_device_name()}
    kept[part] = [it for it in kept.get(part, []) if it["base"] != bench.name] + new
    path.write_text(json.dumps(kept, indent=1) + "\n")


def ticks(bench: Bench) -> Iterator[dict[str, object]]:
    """Their time and memory over tokens and rank sums: of one job, of eight alike, and of mixed ones."""
    for ranks in ((16,), (16,) * 8, RANKS):
        bench.place(ranks)
        for length in (64, 128, 256, 512, 1024, 2048):
            jobs = range(len(ranks))
            times = in_turn({"tick": lambda length=length, jobs=jobs: bench.step(jobs, length)}, rounds=3, warm=8)
            yield {
                "base": bench.name,
                "parameters": bench.model.outline.num_parameters,
                "layers": bench.model.outline.num_layers,
                "jobs": len(ranks),
                "rank_sum": sum(ranks),
                "tokens": len(ranks) * length,
                "longest": length,
                "tick_ms": round(times["tick"], 3),
                "peak_bytes": peak(lambda length=length, jobs=jobs: bench.step(jobs, length)),
            }
    free()


def peft(bench: Bench) -> Iterator[dict[str, object]]:
    """Eager steps of one PEFT job of rank 16; `peak_bytes` with its own base, but not ours. Few tokens, for more do not
    fit."""
    ours = torch.cuda.memory_allocated()
    one = Peft(bench.config)
    for batch, length in ((1, 512), (1, 1024), (1, 2048), (4, 512), (2, 2048), (4, 1024), (8, 512)):
        step = partial(one.step, length, batch=batch)
        yield {
            "base": bench.name,
            "batch": batch,
            "length": length,
            "tokens": batch * length,
            "step_ms": round(in_turn({"step": step}, rounds=3)["step"], 3),
            "peak_bytes": peak(step) - ours,
        }
    del one, step
    free()


PARTS: dict[str, Callable[[Bench], None]] = {
    "step": steps,
    "breakdown": breakdown,
    "own-solo": own_solo,
    "peft-eager": against_peft,
    "memory": memory,
    "profile": partial(profile, measured=ticks),
    "profile-peft": partial(profile, measured=peft),
    "deterministic": deterministic,
    "captured": captured,
    "peft-compiled": partial(against_peft, compiled=True),
}
"""The last drops what was compiled."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", nargs="+", choices=list(BASES), default=["llama-8b"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    for base in arguments.base:
        bench = Bench(base)
        for part in arguments.parts:
            began_s = time.perf_counter()
            PARTS[part](bench)
            print(f"{base} {part}: {time.perf_counter() - began_s:.0f} s", flush=True)
        del bench
        torch._dynamo.reset()
        free()


if __name__ == "__main__":
    main()

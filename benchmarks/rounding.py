"""What a young adapter does to the loss in half precision: by each way of the wide product, and with PEFT.

    python -m benchmarks.rounding [--base llama-8b] [--layers 2]

One job of rank 64 on every linear, whose B is as far from 0 as some steps at a rate of 1e-5 take it, each element
against its gradient's sign. What it changes in the loss, over what it changes in float64: less than 1 is training that
rounding undoes. A base is named as in `benchmarks.step`; without a GPU it is a small one, and its twin's way the only
one. Rows go to results/<gpu>/rounding.json.
"""

import argparse
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks import results
from benchmarks.group import TOY
from benchmarks.step import BASES, fresh, sequence
from tlora.adapter import AdapterState
from tlora.base import default_device
from tlora.kernels import routes
from tlora.packing import Item, pack
from tlora.spec import AdapterSpec, BaseSpec
from tlora.supermodel import SuperModel

RANK, SIZE, GOAL, LEAST = 64, 1e-4, 0.9, 1e-3
SPEC = AdapterSpec(rank=RANK, alpha=RANK, targets="all-linear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--base", choices=["toy", *BASES], default="llama-8b" if on_gpu else "toy")
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    bench = Bench(given.base, given.layers)
    rows = []
    for way, share in bench.shares():
        shape = f"{given.base}, {given.layers} layers"
        goal = None if way == "PEFT" else GOAL
        row = results.row(f"effect/{way}", shape, share, "in float64", 1.0, goal, "higher", unit="of the effect")
        rows.append(replace(row, ratio=share))
    if on_gpu:
        results.write("rounding", rows)
    else:
        results.show(rows)


class Bench:
    """A base in bfloat16, the same weights in float64, and one adapter for both."""

    def __init__(self, base: str, layers: int):
        self.config = copy.deepcopy(TOY if base == "toy" else BASES[base])
        self.config.num_hidden_layers = layers
        self.device = default_device()
        self.length = 256 if base == "toy" else 2048
        self.model = SuperModel(self.weights(), BaseSpec(model=base), captured=False)
        exact = SuperModel(self.weights().double(), BaseSpec(model=base))
        self.state, self.right = self.place(self.model), self.place(exact)
        self.right.master.copy_(self.state.compute)
        self.right.publish()
        before = self.loss(exact)
        trained = slice(self.state.layout.b_start, None)
        self.trained = (-SIZE * torch.sign(self.right.grad[trained])).to(self.state.compute.dtype)
        self.right.master[trained] = self.trained
        self.right.publish()
        self.effect = self.loss(exact) - before

    def weights(self) -> Any:
        return fresh(self.config, self.device).bfloat16()

    def place(self, model: SuperModel) -> AdapterState:
        state = AdapterState(model.outline.lay_out(SPEC), SPEC, seed=0, device=model.device, dtype=model.dtype)
        state.publish()
        model.place(state)
        return state

    def loss(self, model: SuperModel) -> float:
        tokens = sequence(self.length, 0, self.config.vocab_size)
        batch = pack([Item(0, 0, 0, 0, 1.0 / (self.length - 1), tokens)], device=self.device)
        return float(model.train(batch)[0])

    def shares(self) -> Iterator[tuple[str, float]]:
        for way in [*routes._TILES, routes._LIBRARY] if self.device.type == "cuda" else ["twin"]:
            with taking(way):
                yield way, self.share()
        yield "PEFT", self.share_with_peft()

    def share(self) -> float:
        b = self.state.master[self.state.layout.b_start :]
        losses = []
        for value in (torch.zeros_like(self.trained), self.trained):
            b.copy_(value)
            self.state.publish()
            losses.append(self.loss(self.model))
        return max((losses[1] - losses[0]) / self.effect, LEAST)

    @torch.no_grad()
    def share_with_peft(self) -> float:
        lora = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
        model = get_peft_model(self.weights(), lora)
        ids = torch.from_numpy(sequence(self.length, 0, self.config.vocab_size).ids).long().to(self.device)[None]
        losses = [float(model(input_ids=ids, labels=ids).loss)]
        for name, site in self.state.sites():
            linear = model.get_submodule(f"base_model.model.{name}")
            linear.lora_A["default"].weight.copy_(site.a_RK)
            linear.lora_B["default"].weight.copy_(site.b_NR)
        losses.append(float(model(input_ids=ids, labels=ids).loss))
        return max((losses[1] - losses[0]) / self.effect, LEAST)


@contextmanager
def taking(way: str) -> Iterator[None]:
    """This way for every wide product that has a choice."""
    real = routes.run_fastest
    routes.run_fastest = lambda key, y, tiled, library, **how: (
        library() if way == routes._LIBRARY else tiled(routes._TILES[way])
    )
    try:
        yield
    finally:
        routes.run_fastest = real


if __name__ == "__main__":
    main()

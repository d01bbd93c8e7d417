"""The element-wise ops between a layer's products, as torch.compile makes them and as liger-kernel does.

    python -m benchmarks.backbone

Needs a GPU, and liger-kernel (`pip install liger-kernel`). Forward and gradients of the inputs; weights are frozen. An
op of ours that is slower than liger's is a reason to take liger's. Rows go to results/<gpu>/backbone.json.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import (
    LlamaConfig,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from benchmarks.results import medians_ms, row, write

ROWS, H, WIDE, HEADS, KV_HEADS, D = 8192, 4096, 14336, 32, 8, 128
"""One layer of Llama-3.1-8B."""


def main() -> None:
    from liger_kernel.transformers import LigerRMSNorm  # type: ignore[import-not-found]
    from liger_kernel.transformers.functional import liger_rope, liger_swiglu  # type: ignore[import-not-found]

    torch.manual_seed(0)
    with torch.device("cuda"):
        norm = LlamaRMSNorm(H).to(torch.bfloat16).requires_grad_(False)
        liger_norm = LigerRMSNorm(H, in_place=False).to(torch.bfloat16).requires_grad_(False)
        rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=H, num_attention_heads=HEADS))
    states = [normal(1, ROWS, heads, D).transpose(1, 2) for heads in (HEADS, KV_HEADS)]  # as projections leave them
    angles = rotary(states[0], torch.arange(ROWS, device="cuda")[None])
    compare("rms-norm", f"{ROWS} × {H}", [normal(1, ROWS, H)], norm, liger_norm)
    compare("swiglu", f"{ROWS} × {WIDE}", [normal(ROWS, WIDE), normal(ROWS, WIDE)], swiglu, liger_swiglu)
    compare("rope", f"{ROWS} × {HEADS} and {KV_HEADS} heads", states, apply_rotary_pos_emb, liger_rope, *angles)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


Op = nn.Module | Callable[..., Tensor | tuple[Tensor, ...]]


def compare(name: str, shape: str, inputs: Sequence[Tensor], ours: Op, liger: Op, *constants: Tensor) -> None:
    """Each side has inputs of its own: some of liger's write their gradients over them, so they are right once."""
    runs = {"ours": Pass(torch.compile(ours, dynamic=True), inputs, constants), "liger": Pass(liger, inputs, constants)}
    found, want = (run() for run in runs.values())
    for out, ref in zip(found, want, strict=True):
        error = (torch.linalg.vector_norm(out.float() - ref.float()) / torch.linalg.vector_norm(ref.float())).item()
        assert error < 1e-2, f"{name}: liger-kernel and torch differ by {error:.2g}"
    times = medians_ms(runs, calls=4)
    write("backbone", [row(f"op/{name}", shape, times["ours"], "liger-kernel", times["liger"])])


class Pass:
    """Forward and the gradients of the inputs."""

    def __init__(self, op: Op, inputs: Sequence[Tensor], constants: Sequence[Tensor]):
        self.op, self.constants = op, constants
        self.inputs = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in inputs]
        with torch.random.fork_rng(devices=["cuda"]):
            torch.manual_seed(1)
            outs = self.outputs([each.detach().clone() for each in self.inputs])  # liger's rope writes over its inputs
            self.grads = [torch.randn_like(out) for out in outs]

    def outputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        out = self.op(*inputs, *self.constants)
        return out if isinstance(out, tuple) else (out,)

    def __call__(self) -> list[Tensor]:
        outs = self.outputs(self.inputs)
        results = [out.detach().clone() for out in outs]
        return results + list(torch.autograd.grad(outs, self.inputs, self.grads))


if __name__ == "__main__":
    main()

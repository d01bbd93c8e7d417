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
    states = [normal(1, heads, ROWS, D) for heads in (HEADS, KV_HEADS)]
    angles = rotary(states[0], torch.arange(ROWS, device="cuda")[None])
    compare("rms-norm", f"{ROWS} × {H}", [normal(1, ROWS, H)], norm, liger_norm)
    compare("swiglu", f"{ROWS} × {WIDE}", [normal(ROWS, WIDE), normal(ROWS, WIDE)], swiglu, liger_swiglu)
    compare("rope", f"{ROWS} × {HEADS} and {KV_HEADS} heads", states, apply_rotary_pos_emb, liger_rope, *angles)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


Op = nn.Module | Callable[..., Tensor | tuple[Tensor, ...]]


def compare(name: str, shape: str, inputs: Sequence[Tensor], ours: Op, liger: Op, *constants: Tensor) -> None:
    def both(op: Op) -> Callable[[], Sequence[Tensor]]:
        out = op(*inputs, *constants)
        outs = out if isinstance(out, tuple) else (out,)
        grads = [torch.randn_like(each) for each in outs]

        def run() -> Sequence[Tensor]:
            out = op(*inputs, *constants)
            return torch.autograd.grad(out, inputs, grads if isinstance(out, tuple) else grads[0])

        return run

    closures = {"ours": both(torch.compile(ours, dynamic=True)), "liger": both(liger)}
    times = medians_ms(closures, calls=4)
    write("backbone", [row(f"op/{name}", shape, times["ours"], "liger-kernel", times["liger"])])


if __name__ == "__main__":
    main()

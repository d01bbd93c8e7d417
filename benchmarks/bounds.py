"""Where the mixed-job linears lose what they lose: from results that `benchmarks.kernels` has written, without a GPU.

    python -m benchmarks.bounds [--gpu h200]

Of each linear over its plain products: as measured; its parts one by one, summed; the same if the thin products took
the time of reading their wide operand once; the same if the wide products took that of the plain ones. And of linears
that read one input, the same if they dropped the same elements of it: then X is projected, and its gradient dropped, as
for one linear. They do not, for PEFT's do not.
"""

import argparse
import json

from benchmarks.results import ROOT

THIN = ("project", "gradient_b", "gradient_a")
TOGETHER, ONE = ("linear/4096x6144", "linear/4096x28672"), "linear/4096x14336"
"""q, k, v and gate, up; and a linear that reads as wide an input."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200", help="folder of results")
    path = ROOT / "benchmarks" / "results" / parser.parse_args().gpu / "kernels.json"
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    print(f"{'':<28}{'goal':>8}{'measured':>10}{'parts':>8}{'thin at floor':>15}{'wide as plain':>15}{'one mask':>10}")
    for name, row in rows.items():
        parts = [other for key, other in rows.items() if key.startswith((f"{name}/forward/", f"{name}/backward/"))]
        if not parts:
            continue
        thin, wide = ([part for part in parts if part["name"].endswith(THIN) is is_thin] for is_thin in (True, False))
        thin_ms, floor_ms = (sum(part[side] for part in thin) for side in ("ours_ms", "against_ms"))
        wide_ms, plain_ms = (sum(part[side] for part in wide) for side in ("ours_ms", "against_ms"))
        ratios = (thin_ms + wide_ms, floor_ms + wide_ms, thin_ms + plain_ms)
        numbers = "".join(f"{ms / plain_ms:>{width}.2f}" for ms, width in zip(ratios, (8, 15, 15), strict=True))
        if name in TOGETHER:
            numbers += f"{one_mask_ms(rows, name) / plain_ms:>10.2f}"
        print(f"{name:<28}{row['target'] or '':>8}{row['ratio']:>10.2f}{numbers}")


def one_mask_ms(rows: dict[str, dict[str, float]], name: str) -> float:
    """Of its parts: with the thin products of X, and what dX costs beyond the plain product, of one linear."""
    one = {part: rows[f"{ONE}/{part}"] for part in ("forward/project", "backward/gradient_a", "backward/product")}
    thin_ms = one["forward/project"]["ours_ms"] + one["backward/gradient_a"]["ours_ms"]
    beyond_ms = one["backward/product"]["ours_ms"] - one["backward/product"]["against_ms"]
    others_ms = rows[f"{name}/forward/product"]["ours_ms"] + rows[f"{name}/backward/gradient_b"]["ours_ms"]
    return thin_ms + others_ms + rows[f"{name}/backward/product"]["against_ms"] + beyond_ms


if __name__ == "__main__":
    main()

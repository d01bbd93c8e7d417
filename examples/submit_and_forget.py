"""Submit jobs to a cluster of this machine, and forget them: they go on when this program has ended.

    .venv/bin/python examples/submit_and_forget.py

Starts a Ray and a scheduler here with one CPU worker, sends two variants of one tiny job, ends, and is not waited for;
`tlora status` and `tlora logs -f` show how they do, `tlora down` ends it all. A second run finds both jobs known.
"""

import json
from pathlib import Path

import tlora

FOLDER = Path("outputs/submit_and_forget")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = "".join(json.dumps({"prompt": f"{n} + {n} =", "completion": f" {2 * n}"}) + "\n" for n in range(200))
    (FOLDER / "sums.jsonl").write_text(rows)
    base = str(Path("outputs/demo/base").absolute())  # `make demo` puts a small model there
    jobs = [
        tlora.parse_job(
            {
                "name": f"sums-rank{rank}",
                "base": {"model": base},
                "data": {"path": str((FOLDER / "sums.jsonl").absolute())},
                "adapter": {"rank": rank, "targets": "all-linear"},
                "optim": {"lr": 1e-3},
                "steps": 20,
                "output": str((FOLDER / f"rank{rank}").absolute()),
            }
        )
        for rank in (4, 16)
    ]
    client, _ = tlora.Client.up(tlora.load_cluster(None, ["gpus_per_worker=0", "max_workers=1"]))
    new = client.submit(jobs)
    print(f"{len(new)} new job(s). `tlora status` shows them, `tlora logs -f {jobs[0].name}` follows one.")


if __name__ == "__main__":
    main()

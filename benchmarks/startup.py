"""Seconds until `tlora --help` answers, and until a bad job file is refused; medians of several starts.

python -m benchmarks.startup
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

STARTS = 7


def main() -> None:
    with TemporaryDirectory() as folder:
        job = Path(folder) / "bad.yaml"
        job.write_text("base: {model: nowhere}\ndata: {path: nowhere.jsonl}\nadapter: {rnak: 8}\n")
        for what, arguments, code in (("--help", ["--help"], 0), ("a bad YAML", ["check", str(job)], 2)):
            seconds = [start(arguments, code) for _ in range(STARTS)]
            print(f"{what}: {statistics.median(seconds):.2f} s (worst {max(seconds):.2f} s of {STARTS} starts)")


def start(arguments: list[str], code: int) -> float:
    began_s = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "tlora", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()

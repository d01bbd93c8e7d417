"""No product runs on while registers that it reads are written anew (`low_rank._done`): seen in the code for Hopper."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "compiled_kernels.py"


@pytest.mark.parametrize("planted", [False, True])
def test_products_from_registers_are_waited_for(planted: bool, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *(["planted"] if planted else [])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    running = {tuple(each) for each in json.loads(done.stdout)}
    assert {name for _, name, *_ in running} == {"project", "gradient_a", "fused", "expand"}
    masked = set(itertools.product((4096, 960), ("project", "gradient_a"), (16, 64)))
    assert masked <= {(inputs, name, columns) for inputs, name, columns, _ in running}
    assert {tuple(which) for *which, count in running if count} == (masked if planted else set())

"""A few of the mutated files of `benchmarks/mutations.py`, which runs 5,000: one clear answer to each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="its processes are limited as Linux does")
def test_a_few_mutated_files_get_an_answer() -> None:
    words = [sys.executable, str(ROOT / "benchmarks/mutations.py"), "--count", "36", "--first", "20000"]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "."))
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "36 mutations" in done.stdout and done.stdout.endswith("found: 0\n")

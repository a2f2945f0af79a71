"""Triton kernels against eager, in Triton's interpreter: no GPU is needed, and one process runs all cases."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_give_what_eager_gives(tmp_path: Path) -> None:
    script = Path(__file__).with_name("triton_cases.py")
    paths = os.pathsep.join([str(script.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "GNOMON_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=900)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(lines) >= 20 and all(line.startswith("as eager: ") for line in lines), done.stdout

"""A sample of the random programs; 1,000 of them: `python benchmarks/compiler/programs.py`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
PATH = Path(__file__).parents[2] / "benchmarks/compiler/programs.py"
SEEDS = (3, 40)
"""Float32 with special numbers, and double."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.usefixtures("fresh")
def test_a_random_program_is_eagers(seed: int) -> None:
    spec = importlib.util.spec_from_file_location("programs", PATH)
    assert spec is not None and spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(programs)
    assert programs.tried(programs.Program(seed)) == ("equal", "")

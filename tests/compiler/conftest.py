"""Kernels of the tests live in one temporary cache, and none is given back for being slow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def untimed(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from gnomon.compiler import build
    from gnomon.compiler.tune import gate

    monkeypatch.setenv("GNOMON_CACHE", str(kernels))
    if not build.has_compiler():
        pytest.skip("no C++ compiler here")
    monkeypatch.setattr(gate, "SLOWER", math.inf)
    monkeypatch.setattr(gate, "REPEATS", 1)
    torch.manual_seed(0)
    yield


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing compiled before, and as many threads afterwards."""
    torch._dynamo.reset()
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)

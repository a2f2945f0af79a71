"""One cache of kernels, used by several processes at the same time, one of which is killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from gnomon.compiler import build  # noqa: E402

pytestmark = pytest.mark.torch


def source(number: int) -> str:
    return f'extern "C" int gnomon_kernel() {{ return {number}; }}'


def build_all(numbers: Sequence[int], folder: str) -> None:
    """In a process of its own, which ends with 1 where a kernel is not what its source says."""
    os.environ["GNOMON_CACHE"] = folder
    build._loaded.clear()
    functions = build.libraries([source(number) for number in numbers])
    os._exit(int([function and function() for function in functions] != list(numbers)))


def test_processes_share_a_cache_and_one_is_killed(tmp_path: Path) -> None:
    context = get_context("fork")  # they compile and load, and use no threads of torch
    killed = context.Process(target=build_all, args=((1, 2, *range(100, 160)), str(tmp_path)))
    killed.start()
    while not list(tmp_path.glob("making-*/kernel.cpp")):
        time.sleep(0.001)
    others = [context.Process(target=build_all, args=(numbers, str(tmp_path))) for numbers in ((1, 2, 5), (5, 2, 1))]
    for process in others:
        process.start()
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    for process in (killed, *others):
        process.join()
    assert [process.exitcode for process in (killed, *others)] == [-signal.SIGKILL, 0, 0]
    kept = list(tmp_path.glob("*.so"))
    assert kept and all(build.digest(path) == path.stem.rpartition("-")[2] for path in kept)
    assert {build.key_of(source(number)) for number in (1, 2, 5)} <= {path.stem.partition("-")[0] for path in kept}


def test_what_a_killed_process_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    build._loaded.clear()
    left, under_way = tmp_path / "making-left", tmp_path / "making-now"
    for folder in (left, under_way):
        folder.mkdir()
    long_ago = time.time() - 2 * build.ABANDONED_S
    os.utime(left, (long_ago, long_ago))
    assert build.libraries([source(7)]) != [None]
    assert not left.exists() and under_way.exists()


def test_flags_that_no_compiler_takes_leave_the_operations_to_aten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    monkeypatch.setenv("GNOMON_CXXFLAGS", '-Dname="unended')
    build._loaded.clear()
    assert build.libraries(["#include NAME\n" + source(8)]) == [None]
    assert "does not compile, its operations stay PyTorch's" in caplog.text

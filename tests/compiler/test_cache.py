"""One cache of kernels, used by several processes at the same time, one of which is killed."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path

import pytest

from gnomon import trust

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


def test_processes_share_a_cache_and_one_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    kept = list(tmp_path.glob("*.so"))
    assert kept and all(build.seal().fits(path.read_bytes(), path.stem.rpartition("-")[2]) for path in kept)
    assert {build.key_of(source(number)) for number in (1, 2, 5)} <= {path.stem.partition("-")[0] for path in kept}


def under_seals(homes: Sequence[str], folder: str, rounds: int) -> None:
    """In a process of its own: the same kernel again and again, each time under the next seal."""
    os.environ["GNOMON_CACHE"] = folder
    made = []
    for at in range(rounds):
        os.environ["GNOMON_HOME"] = homes[at % len(homes)]
        build._loaded.clear()
        [function] = build.libraries([source(7)])
        made.append(function is not None and function() == 7)
    os._exit(int(not all(made)))


def test_processes_of_several_seals_take_files_from_each_other_and_lose_no_kernel(tmp_path: Path) -> None:
    """A kernel of another seal is removed as it is looked at: it may be gone before it is read, or loaded."""
    context = get_context("fork")
    homes = [str(tmp_path / name) for name in ("one", "other")]
    for home in homes:
        Path(home).mkdir(mode=0o700)
    (tmp_path / "kernels").mkdir(mode=0o700)
    processes = [
        context.Process(target=under_seals, args=(homes[at:] + homes[:at], str(tmp_path / "kernels"), 4))
        for at in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]


def test_a_file_that_is_gone_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    path = tmp_path / f"{build.key_of(source(8))}-0.so"
    path.write_bytes(b"x")

    def taken(path: Path) -> None:
        path.unlink()
        path.stat()

    monkeypatch.setattr(build, "others_may_write", taken)
    assert build._on_disk(build.key_of(source(8))) is None


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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is not there yet, as a process that has loaded nothing sees it."""
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path / "cache"


def planted(folder: Path, number: int, says: int) -> Path:
    """What somebody who can write to the folder leaves there for a source: another library, its name as ours was."""
    key, work = build.key_of(source(number)), folder / "work"
    work.mkdir()
    (work / "kernel.cpp").write_text(source(says), encoding="utf-8")
    subprocess.run(
        build.command(work / "kernel.cpp", work / "kernel.so", build.this_machine().isa), check=True, timeout=60
    )
    data = (work / "kernel.so").read_bytes()
    path = folder / f"{key}-{hashlib.sha256(data).hexdigest()[:32]}.so"
    path.write_bytes(data)
    return path


def test_the_cache_is_the_user_s_alone_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert build.libraries([source(20)]) != [None]
    finally:
        os.umask(before)
    [kept] = cache.glob("*.so")
    assert (cache.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)


def test_a_library_that_somebody_else_made_is_not_loaded(cache: Path) -> None:
    cache.mkdir(mode=0o700)
    theirs = planted(cache, 21, says=666)
    [function] = build.libraries([source(21)])
    assert function is not None and function() == 21 and not theirs.exists()


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_that_others_may_write_to_is_not_used(
    cache: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """Not even for a library that this user signed: it may have been put in the place of another."""
    cache.mkdir(mode=0o700)
    assert build.libraries([source(22)]) != [None]
    build._loaded.clear()
    build._kept.cache_clear()
    cache.chmod(mode)
    [function] = build.libraries([source(22)])
    assert function is not None and function() == 22
    [record] = caplog.records
    assert f"{cache} can be written by others (mode {mode:o})" in record.getMessage()
    assert f"chmod -R go-w {cache}" in record.getMessage() and "\n" not in record.getMessage()
    assert build.cache_folder() != cache


def test_a_file_that_others_may_write_to_or_a_link_is_built_anew(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert build.libraries([source(23)]) != [None]
    [kept] = cache.glob("*.so")
    kept.chmod(0o666)
    build._loaded.clear()
    assert build.libraries([source(23)]) != [None] and "can be written by others (mode 666)" in caplog.text
    kept.rename(tmp_path / "elsewhere.so")
    kept.symlink_to(tmp_path / "elsewhere.so")
    build._loaded.clear()
    assert build.libraries([source(23)]) != [None] and "is a link" in caplog.text and not kept.is_symlink()


def test_a_key_that_others_can_read_signs_nothing(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GNOMON_HOME", str(tmp_path / "home"))
    assert build.libraries([source(24)]) != [None]
    (tmp_path / "home" / "seal.key").chmod(0o644)
    build._loaded.clear()
    build._kept.cache_clear()
    trust.seal_in.cache_clear()
    assert build.libraries([source(24)]) != [None]
    assert "seal.key, the key that signs compiled kernels, is not a file that only you can read" in caplog.text

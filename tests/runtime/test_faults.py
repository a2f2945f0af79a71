"""Processes that are killed or stopped, and signals at every moment: one clear message, soon, and no process left."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from multiprocessing import active_children
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import faulty, training  # noqa: E402

from gnomon.errors import PeerError, RunError  # noqa: E402
from gnomon.runtime import Outcome, TrainingJob  # noqa: E402
from gnomon.runtime.checkpoint.files import problems_of  # noqa: E402
from gnomon.runtime.checkpoint.record import newest  # noqa: E402
from gnomon.runtime.launch.run import run  # noqa: E402
from gnomon.runtime.processes.faults import plain  # noqa: E402
from gnomon.runtime.processes.launch import launch  # noqa: E402
from gnomon.runtime.processes.local import FailedError, Failure, Processes  # noqa: E402

pytestmark = pytest.mark.torch

PATIENCE_S = 300.0
STEPS = 150
"""Many more than pass before a checkpoint is seen and a rank killed."""


def until(happened: Callable[[], object]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Or dead, and not yet waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_rank_that_dies_while_the_others_wait_for_it_ends_them() -> None:
    began = time.monotonic()
    with pytest.raises(FailedError, match="rank 1 of 2 was killed by SIGKILL"):
        Processes(faulty.dies_in_start_up, 2, (), start_method="forkserver").results()
    assert time.monotonic() - began < 200, "it waited for the store, which takes 300 s"
    assert not active_children()


class AskedWhileStarting(Processes):
    """A signal comes to a thread that does not block it, when no process is there yet."""

    def _start(self, folder: Path, port: int) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        assert callable(handler)
        handler(signal.SIGTERM, None)
        super()._start(folder, port)


def test_a_signal_that_comes_before_the_processes_reaches_them() -> None:
    """Spawned: a fork server that another test started has the mask of signals of then, not the one set here."""
    asked = AskedWhileStarting(faulty.ends_when_asked, 2, (), start_method="spawn")
    assert asked.results() == {0: signal.SIGTERM, 1: signal.SIGTERM}


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_processes_end_with_the_one_that_started_them_even_by_kill_9(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match="rank 0 of 1 was killed by SIGKILL"):
        Processes(faulty.launches, 1, (tmp_path,), start_method="forkserver").results()
    pids = [int(path.read_text()) for path in tmp_path.glob("*.pid")]
    assert len(pids) == 2
    until(lambda: all(gone(pid) for pid in pids))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="looks at sockets in /proc")
def test_a_signal_passes_over_a_process_that_has_just_ended() -> None:
    """It was there when it was asked, and is not when the signal is sent."""
    started = Processes(print, 1, (), start_method="forkserver")
    gone = Popen(["true"])
    gone.wait()
    there = SimpleNamespace(pid=gone.pid, is_alive=lambda: True)
    started.ranks.append(SimpleNamespace(process=there))  # type: ignore[arg-type]
    started._send_signal(signal.SIGTERM)


def test_nothing_listens_but_on_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STARTER", str(os.getpid()))
    actual = [address for addresses in launch(faulty.listening, 2).values() for address in addresses]
    assert len(actual) >= 4  # the store, as both see it, and a gloo listener of each
    assert set(actual) <= {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"the loss goes down, line {i % 7} of the text. " * 40)
    return folder


def beside(job: TrainingJob, act: Callable[[], None]) -> Outcome:
    """Runs the job, and `act` in a thread once it has a checkpoint."""
    assert job.checkpoints is not None
    folder = job.checkpoints

    def wait_and_act() -> None:
        until(lambda: newest(folder) is not None)
        act()

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    try:
        return run(job)
    finally:
        thread.join()


def rank(number: int) -> int:
    """Its process."""
    return next(child.pid for child in active_children() if child.name == f"gnomon rank {number}" and child.pid)


def signalled(number: int, sent: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(rank(number), sent)


def test_a_run_that_lost_a_rank_starts_again_and_ends_as_if_nothing_had_happened(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher of the first run says who died and where the other rank waited."""
    for name in ("zero 3",):
        asked = training.job(
            data,
            training.PLANS[name],
            STEPS,
            checkpoints=tmp_path / name,
            checkpoint_every=2,
            max_restarts=1,
            resume_with="gnomon run",
        )
        undisturbed = launch(training.train, 2, replace(asked, checkpoints=None))[0].records
        outcome = beside(asked, signalled(1, signal.SIGKILL))
        output = capfd.readouterr().err
        assert "gnomon: rank 1 of 2 was killed by SIGKILL, so the run ended; rank 0 waited " in output
        assert "is whole: gnomon run; starting again from " in output
        assert outcome.resumed_from >= 2
        resumed = undisturbed[outcome.resumed_from :]
        assert [r.loss for r in outcome.records] == [r.loss for r in resumed]


def test_without_restarts_it_is_one_error_and_the_checkpoint_is_whole(data: Path, tmp_path: Path) -> None:
    asked = training.job(data, training.PLANS["pp"], 10**6, checkpoints=tmp_path / "kept", checkpoint_every=2)
    with pytest.raises(PeerError, match=r"rank 0 of 2 was killed by SIGKILL, so the run ended; .*is whole: resume"):
        beside(asked, signalled(0, signal.SIGKILL))
    left = newest(tmp_path / "kept")
    assert left is not None and not problems_of(left)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            "memory",
            r"(?s)rank 1 ran out of memory at row \d+, \w+ \(.*take a smaller micro batch.*, so the run ended.*; the "
            r"checkpoint .*step-00000[46] is whole: resume from it$",
        ),
        ("nan", r"the loss of step \d is nan: training diverged, so the run ended"),
    ],
)
def test_what_befalls_one_rank_is_one_message_and_leaves_a_checkpoint(
    fault: str, says: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allocation that fails, and a parameter that is no number. A mistake that would come again is not started
    again."""
    monkeypatch.setenv(faulty.FAULT, fault)
    monkeypatch.setattr(import_module("gnomon.runtime.launch.run"), "train", faulty.trains)
    more = {"checkpoints": tmp_path / "kept", "checkpoint_every": 2, "max_restarts": 3}
    with pytest.raises(RunError, match=says):
        run(training.job(data, training.PLANS["zero 1"], STEPS, **more))
    left = newest(tmp_path / "kept")
    assert left is not None and left.name in ("step-000004", "step-000006") and not problems_of(left)


def test_control_c_wakes_a_stopped_rank_and_ends_the_run_with_a_checkpoint(data: Path, tmp_path: Path) -> None:
    asked = training.job(data, training.PLANS["zero 1"], 10**6, checkpoints=tmp_path / "kept", checkpoint_every=2)

    def stop_and_interrupt() -> None:
        signalled(1, signal.SIGSTOP)()
        os.kill(os.getpid(), signal.SIGINT)

    outcome = beside(asked, stop_and_interrupt)
    assert outcome.signal == signal.SIGINT
    assert outcome.checkpoint == newest(tmp_path / "kept")
    assert outcome.checkpoint is not None and outcome.checkpoint.name == f"step-{outcome.records[-1].step:06}"


def test_torch_s_words_become_ours() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3811")
    result = plain(lost, 0, "at row 14, AR of stage 0 over dp")
    assert isinstance(result, PeerError)
    assert str(result) == "rank 0 waited at row 14, AR of stage 0 over dp for another process, which is gone"
    memory = RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes.")
    result = plain(memory, 3, "at row 2, 0F1")
    assert isinstance(result, RunError) and str(result).startswith("rank 3 ran out of memory at row 2, 0F1 (")
    other = TypeError("a mistake")
    assert plain(other, 0, "") is other


def test_a_full_disk_is_said_with_the_file_if_it_is_known() -> None:
    for error, says in (
        (OSError(errno.ENOSPC, "No space left on device"), "rank 1 cannot write a file in a step: No space left"),
        (OSError(errno.EROFS, "Read-only file system", "kept"), "rank 1 cannot write 'kept' in a step: Read-only file"),
    ):
        assert str(plain(error, 1, "in a step")).startswith(says)


def test_the_cause_is_told_before_what_follows_from_it() -> None:
    follows = Failure(rank=0, exitcode=1, kind="PeerError", message="rank 0 waited", at=1.0)
    error = Failure(rank=1, exitcode=1, kind="RunError", message="the loss is nan", at=2.0)
    killed = Failure(rank=2, exitcode=-9, at=3.0)
    assert [failure.rank for failure in FailedError([follows, error, killed], 3).failures] == [2, 1, 0]
    assert str(FailedError([error], 3)) == "rank 1 of 3 the loss is nan"

"""Time without a core, as the scheduler counts it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from gnomon.runtime.calibrate.calibrate import repeated  # noqa: E402
from gnomon.runtime.watch import waiting  # noqa: E402
from gnomon.timeline import queued  # noqa: E402

pytestmark = pytest.mark.torch
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Work for as long as whoever asked for it lives."""


@pytest.mark.skipif(not waiting.ACCOUNT.exists(), reason="needs Linux's account of the scheduler")
def test_two_who_share_a_core_wait_for_each_other() -> None:
    """This thread and another process, both at work on one core, for half a second of the former's time."""
    cores = os.sched_getaffinity(0)
    one = min(cores)
    os.sched_setaffinity(0, {one})
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        while not Path(f"/proc/{other.pid}/schedstat").read_text().split()[2].strip("0"):
            pass
        before, began = waiting.waited_s(), perf_counter()
        while perf_counter() - began < 0.5:
            pass
        share = waiting.waited_since(before) / (perf_counter() - began)
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    assert 0.15 < share < 1.0


@pytest.mark.skipif(not waiting.ACCOUNT.exists(), reason="needs Linux's account of the scheduler")
def test_a_repeat_is_as_long_as_its_own_work() -> None:
    """The same count to a million, beside another process on one core, with and without its share. Both
    take turns, and middles are compared: what another virtual machine takes of the core is in no account."""

    def run(given: object) -> None:
        for _ in range(1_000_000):
            pass

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        actual = [[repeated((lambda: None, run), 0.1, 4, own=own) for own in (False, True)] for _ in range(6)]
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
    whole, own = (median(seconds for turn in turns for seconds in turn) for turns in zip(*actual, strict=True))
    assert own < 0.8 * whole


def test_nothing_is_made_up_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(waiting, "ACCOUNT", tmp_path / "none")
    assert waiting.waited_s() is None
    assert math.isnan(waiting.waited_since(None)) and math.isnan(waiting.waited_since(1.0))
    assert queued.without_a_core(0, math.nan) == [] == queued.without_a_core(0, 0.01)
    assert queued.without_a_core(1, 0.4) == [
        "rank 1 was ready without a core for 40% of this step: other processes had them"
    ]


@pytest.mark.parametrize(("beside", "left"), [(0.0, 3.0), (1.0, 2.0), (5.0, 0.0)])
def test_what_the_process_s_own_threads_compute_is_not_others_work(
    beside: float, left: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three seconds without a core, in which threads of its own had one for so long."""
    account = tmp_path / "schedstat"
    monkeypatch.setattr(waiting, "ACCOUNT", account)
    monkeypatch.setattr(waiting, "thread_time", lambda: 10.0)
    monkeypatch.setattr(waiting, "process_time", lambda: 11.0)
    account.write_text("10000000000 1000000000 5\n")
    before = waiting.waited_s()
    account.write_text("10000000000 4000000000 9\n")
    monkeypatch.setattr(waiting, "process_time", lambda: 11.0 + beside)
    assert waiting.waited_since(before) == pytest.approx(left)

"""What the watchdog says of ranks that stand still, and when it says nothing."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure  # noqa: E402

from gnomon.lowering import lower  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Plan  # noqa: E402
from gnomon.runtime.watch import watchdog  # noqa: E402
from gnomon.runtime.watch.watchdog import STATUS, Heard, Watchdog, _tell, message, unanswered, where  # noqa: E402

pytestmark = pytest.mark.torch

PROGRAM = lower(llama(parity.CONFIG), Plan(mesh=Mesh(pp=2, dp_replicate=2), schedule=parity.schedule("one_f_one_b")))
ROWS = {where(PROGRAM, row).partition(", ")[2]: row for row in range(len(PROGRAM.kind))}
LIMITS = {"silent_s": 15.0, "stuck_s": 300.0}


def heard(rank: int, row: int, since_s: float = 20.0) -> Heard:
    return Heard(rank, "here", 1000 + rank, since_s, row)


def test_a_silent_rank_is_named_with_its_row_and_those_that_wait_with_theirs() -> None:
    computes, reduces = ROWS["1B0"], ROWS["AR of stage 0 over dp"]
    ranks = [(heard(0, reduces), 0.5), (heard(1, reduces), 0.9), (heard(2, computes), 16.0), (heard(3, -1), 0.1)]
    result = message(PROGRAM, ranks, **LIMITS)
    assert result is not None
    text, stopped = result
    assert text == (
        f"rank 2 (row {computes}, 1B0) has not been heard of for 15 s: stopped, or lost; ranks 0, 1 wait at row "
        f"{reduces}, AR of stage 0 over dp; rank 3 waits between steps"
    )
    assert [one.rank for one in stopped] == [2]


def test_ranks_that_are_heard_of_are_left_alone() -> None:
    assert message(PROGRAM, [(heard(0, 3), 0.5), (heard(1, 9), 14.0)], **LIMITS) is None


def test_ranks_that_all_stand_still_are_reported_and_none_is_stopped() -> None:
    result = message(PROGRAM, [(heard(0, 3, 400.0), 0.5), (heard(1, 9, 301.0), 0.5)], **LIMITS)
    assert result is not None
    assert result[0].startswith("no rank has gone on for 300 s: rank 0 waits at row 3, ")
    assert not result[1]


class Store:
    """Answers once; later calls wait, as over a cut link."""

    def __init__(self) -> None:
        self.calls = 0
        self.mended = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.calls += 1
        if self.calls > 1:
            self.mended.wait()


def test_a_store_that_does_not_answer_is_named_by_the_rank_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    store, said, heard_of = Store(), list[str](), threading.Event()
    monkeypatch.setattr(watchdog, "_store", lambda: None)
    monkeypatch.setattr(watchdog, "PrefixStore", lambda prefix, inner: store)
    monkeypatch.setattr(watchdog, "EVERY_S", 0.01)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")

    def say(text: str) -> None:
        said.append(text)
        heard_of.set()

    dog = Watchdog(PROGRAM, 3, 4, unanswered_s=0.2, say=say)
    assert heard_of.wait(60)
    store.mended.set()
    dog.close()
    assert said == [unanswered(PROGRAM, 3, -1, 0.2)]
    assert unanswered(PROGRAM, 3, ROWS["1B0"], 30) == (
        "the job's store on 10.0.0.1 has not answered rank 3 for 30 s: the machine that keeps it is lost, or the link "
        f"to it; rank 3 waits at row {ROWS['1B0']}, 1B0"
    )


def test_what_it_tells_is_the_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's elastic agent reads the file of the process that ended first."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    _tell("rank 1 has stopped", ends=True)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=STATUS, error_file=str(tmp_path / "error.json"))
    assert isinstance(failure.message, dict)
    assert failure.message["message"] == "PeerError: rank 1 has stopped"


class Kept:
    """A store that answers."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self.values

    def add(self, key: str, amount: int) -> int:
        return amount


def test_silence_counts_before_this_rank_has_stood_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 says nothing from the beginning on; rank 0 stands from second 0, and looks each second of its clock."""
    store, said, clock = Kept(), list[str](), [0.0]
    store.set("1", json.dumps([1, "here", 1001, 0.0, 5, 0.0]))
    monkeypatch.setattr(watchdog, "_store", lambda: None)
    monkeypatch.setattr(watchdog, "PrefixStore", lambda prefix, inner: store)
    monkeypatch.setattr(watchdog, "EVERY_S", 600.0)  # its own thread never comes to look
    monkeypatch.setattr(watchdog, "monotonic", lambda: clock[0])
    dog = Watchdog(PROGRAM, 0, 2, say=said.append)
    told = 0.0
    while not said and clock[0] < 40:
        clock[0] += 1.0
        dog._look()
        told = clock[0]
    dog.close()
    assert said[0].startswith("rank 1 (row 5, ")
    assert told == 18.0  # a fifth of 15 s, and 15 s

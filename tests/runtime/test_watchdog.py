"""What the watchdog says of ranks that stand still, and when it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure  # noqa: E402

from gnomon.lowering import lower  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Plan  # noqa: E402
from gnomon.runtime.watchdog import STATUS, Heard, _tell, message, where  # noqa: E402

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
        f"{reduces}, AR of stage 0 over dp; rank 3 waits at between steps"
    )
    assert [one.rank for one in stopped] == [2]


def test_ranks_that_are_heard_of_are_left_alone() -> None:
    assert message(PROGRAM, [(heard(0, 3), 0.5), (heard(1, 9), 14.0)], **LIMITS) is None


def test_ranks_that_all_stand_still_are_reported_and_none_is_stopped() -> None:
    result = message(PROGRAM, [(heard(0, 3, 400.0), 0.5), (heard(1, 9, 301.0), 0.5)], **LIMITS)
    assert result is not None
    assert result[0].startswith("no rank has gone on for 300 s: rank 0 waits at row 3, ")
    assert not result[1]


def test_what_it_tells_is_the_error_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's elastic agent reads the file of the process that ended first."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    _tell("rank 1 has stopped", ends=True)
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=STATUS, error_file=str(tmp_path / "error.json"))
    assert isinstance(failure.message, dict)
    assert failure.message["message"] == "PeerError: rank 1 has stopped"

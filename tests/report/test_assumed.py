"""What of `assumed` is printed: what may change the answer, and how many lines cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.cli import main
from gnomon.plans import Mesh, Offload, Optimizer, Plan, Schedule

ASKED = ["predict", "llama-3.2-1b", "--on", "1x8xh100-sxm", "--global-batch", "32", "--seq-len", "2048"]
SLOWER = """
import json, sys
from gnomon.prices import kernels
as_they_are = kernels.stream_seconds
def ten_times(*given, kind="plain", **named):
    return as_they_are(*given, kind=kind, **named) * (10 if kind in ("gather", "scatter") else 1)
kernels.stream_seconds = ten_times
from gnomon.cli import main
sys.exit(main(sys.argv[1:]))
"""


def assumed(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main([*ASKED, *more]) in (0, 1)
    return " ".join(capsys.readouterr().out.partition("\nassumed\n")[2].split())


def test_what_cannot_change_the_answer_is_counted_and_listed_when_it_is_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    brief, whole = assumed(capsys), assumed(capsys, "--assumptions")
    assert "4 more that cannot change this by a tenth of its band (--assumptions)" in brief
    assert "GEMM data" not in brief and "streaming" not in brief and "not checked" not in brief
    for hidden in ("no GEMM data in tf32, int8", "gather streaming", "scatter streaming", "host_memory_bytes_per_s"):
        assert hidden in whole
    assert "micro batch not given" in brief and "attention runs as FlashAttention-2" in brief


def test_a_figure_that_the_plan_reads_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no GEMM data in tf32" in assumed(capsys, "--precision", "fp32")
    plan = tmp_path / "offload.toml"
    offloaded = Plan(
        mesh=Mesh(dp_shard=8),
        optimizer=Optimizer(zero=2, clip=False, offload=Offload()),
        schedule=Schedule(micro_batch_size=1),
    )
    plan.write_text(schema.dump(offloaded))
    assert "host_memory_bytes_per_s" in assumed(capsys, "--plan", str(plan))


def test_a_line_that_is_left_out_changes_less_than_a_tenth_of_the_band(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json"]) in (0, 1)
    usual = json.loads(capsys.readouterr().out)
    source = str(Path(__file__).parents[2] / "src")
    slower = subprocess.run(
        [sys.executable, "-c", SLOWER, *ASKED, "--json"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    step_s = json.loads(slower.stdout)["step_s"]
    assert 0 < step_s - usual["step_s"] < 0.1 * (usual["band"]["high_s"] - usual["band"]["low_s"])

"""Accounts of recorded steps: parts to the bit, known faults by name, ranks, snapshots, files that are broken.

The device's traces are played by hand (`device.py`): no GPU is here. One trace is really recorded, of a small model.
"""

from __future__ import annotations

import json
import pickle
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.cli import main
from gnomon.errors import InputError
from gnomon.formats.kineto import is_nsight, is_trace, read_nsight, read_snapshot, read_trace, read_traces
from gnomon.profile import account, find_steps
from gnomon.profile.intervals import common, complement, join, length, minus, union
from gnomon.report.profile import profile_of
from tests.profile.device import Device
from tests.profile.nsys import TABLES, export

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepseek-v3" / "plan.toml"
GEMM = ("aten::mm", "nvjet_tst_128x256")
NCCL = ("c10d::allreduce_", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)")


def play(fault: str, tmp_path: Path, ranks: int = 1) -> Path:
    """Kineto's traces of `played`, a file a rank."""
    for device in played(fault, ranks):
        device.write(tmp_path)
    return tmp_path


def played(fault: str, ranks: int = 1) -> list[Device]:
    """Four steps of eight matmuls, an all-reduce that overlaps the next matmul, and a fused update; with a fault."""
    devices = [Device(rank, ranks) for rank in range(ranks)]
    for step in range(4):
        arrive, plans = [], []
        for device in devices:
            start = device.host
            if fault == "data loading":
                device.busy("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 8000)
            for i in range(8):
                if fault == "tiny kernels":
                    for _ in range(200):
                        device.kernel("aten::mul", "void at::native::vectorized_elementwise_kernel<4>", 1.5)
                slow = 2.0 if fault == "slow rank" and device.rank == 1 else 1.0
                name = "ampere_sgemm_128x64_tn" if fault.startswith("fp32") else GEMM[1]
                device.kernel(GEMM[0], name, 500 * slow)
                if fault.startswith("synchronisation"):
                    device.busy("cpu_op", "aten::_local_scalar_dense", 2)
                    device.kernel("aten::copy_", "Memcpy DtoH (Device -> Pageable)", 2)
                    device.wait("cudaStreamSynchronize")
                    device.host += 300
                if fault == "allocator retries" and i % 2:
                    device.wait()
                    device.busy("cuda_runtime", "cudaFree", 200)
                    device.busy("cuda_runtime", "cudaMalloc", 200)
                if fault == "host too slow":
                    device.host += 2000
                if fault.startswith("copies"):
                    device.kernel("aten::copy_", "Memcpy HtoD (Pageable -> Device)", 200)
            arrive.append(max(device.free.values()))
            plans.append(start)
        for device, start, ready in zip(devices, plans, arrive, strict=True):
            # All ranks leave a collective at once; each rank's kernel begins when that rank arrives.
            us = (max(arrive) - ready) + (3000 if fault == "exposed communication" else 100)
            done = device.kernel(
                *NCCL, us, stream=20, after=ready, **{"In msg nelems": 2**20, "dtype": "BFloat16", "Group size": ranks}
            )
            device.kernel(*GEMM, 150, after=ready)
            if fault == "optimizer not fused":
                mark = device.host
                for _ in range(60):
                    device.kernel("aten::addcdiv_", "void at::native::vectorized_elementwise_kernel<4>", 12, after=done)
                device.event("user_annotation", "Optimizer.step#AdamW.step", mark - 1, device.host - mark + 2, 42)
            else:
                device.kernel("aten::_fused_adamw_", "multi_tensor_apply_kernel", 50, after=done)
            if fault.startswith("compilation"):
                device.wait()
                device.busy("cpu_op", "entire_frame_compile", 5000)
            device.step(step, start)
    return devices


FAULTS = (
    "data loading",
    "tiny kernels",
    "synchronisation of host and device",
    "allocator retries",
    "host too slow",
    "copies between host and device",
    "exposed communication",
    "optimizer not fused",
    "fp32 matmuls without tensor cores",
    "compilation within the step",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_injected_fault_comes_first(fault: str, tmp_path: Path) -> None:
    profile = profile_of(read_traces(str(play(fault, tmp_path))))
    assert profile.findings[0].name == fault
    assert profile.findings[0].share > 0.1


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "compilation within the step"])
def test_an_export_of_nsight_says_what_kineto_says(fault: str, tmp_path: Path) -> None:
    """The same step in both: its seconds, its parts and its fault. Of the compiler's work nsys records nothing."""
    path = export(played(fault), tmp_path / "report.sqlite")
    assert is_nsight(str(path)) and not is_trace(str(path))
    mine, kineto = profile_of(read_nsight(str(path))), profile_of(read_traces(str(play(fault, tmp_path / "kineto"))))
    assert mine.findings[0].name == kineto.findings[0].name == fault
    (one,), (other,) = mine.accounts, kineto.accounts
    assert one.step.seconds == pytest.approx(other.step.seconds, abs=1e-6)
    for part, seconds in other.parts.items():
        assert one.parts[part] == pytest.approx(seconds, abs=2e-6), part
    assert [kind.kind for kind in one.kinds] == [kind.kind for kind in other.kinds]


def test_ranks_of_one_export_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = export(played("slow rank", 4), tmp_path / "report.sqlite")
    traces = read_nsight(str(path))
    assert [(trace.rank, trace.world_size, trace.device) for trace in traces] == [
        (rank, 4, "NVIDIA H100 80GB HBM3") for rank in range(4)
    ]
    assert (profile_of(traces).findings[0].name, profile_of(traces).slowest.rank) == ("slow rank", 1)
    assert main(["compare", str(path)]) == 0
    assert "slow rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("CREATE TABLE other (id INT)", "is no export of Nsight Systems"),
        (TABLES, "has no kernels; record them: nsys profile"),
        ("CREATE TABLE NVTX_EVENTS (start INT)", "has no kernels"),
    ],
)
def test_an_export_without_work_is_one_line(
    script: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.executescript(script)
    assert main(["compare", str(path)]) == 2
    error = capsys.readouterr().err
    assert said in error and len(error.strip().splitlines()) == 1
    path.write_bytes(path.read_bytes()[:300])
    assert main(["compare", str(path)]) == 2
    report = tmp_path / "report.nsys-rep"
    report.write_bytes(b"x")
    assert main(["compare", str(report)]) == 2
    assert "nsys export --type sqlite -o report.sqlite report.nsys-rep" in capsys.readouterr().err


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    profile = profile_of(read_traces(str(play("slow rank", tmp_path, ranks=4))))
    first = profile.findings[0]
    assert (first.name, first.rank) == ("slow rank", 1)
    assert first.seconds == pytest.approx(8 * 500e-6, rel=0.1), "what the others wait for"
    assert "exposed communication" not in [finding.name for finding in profile.findings]
    assert profile.slowest.rank == 1


def test_a_clean_step_has_no_finding_and_adds_up(tmp_path: Path) -> None:
    traces = read_traces(str(play("", tmp_path)))
    profile = profile_of(traces)
    assert profile.findings == ()
    rank = profile.accounts[0]
    total = 0.0
    for seconds in rank.parts.values():
        total += seconds
    assert total == rank.step.seconds
    # 8 matmuls, an all-reduce of 100 us under one of 150 us, the update of 50 us.
    assert rank.step.seconds == pytest.approx(8 * 500e-6 + 150e-6 + 50e-6, rel=1e-3)
    (reduced,) = rank.collectives
    assert (reduced.kind, reduced.nbytes, reduced.count) == ("all-reduce", 2 * 2**20, 1)
    assert reduced.exposed_s < 5e-6
    assert {kind.kind: kind.count for kind in rank.kinds} == {"matmul": 9, "all-reduce": 1, "optimizer": 1}


def test_a_trace_without_marks_is_cut_where_it_repeats(tmp_path: Path) -> None:
    path = play("", tmp_path) / "rank0.json"
    whole = json.loads(path.read_text())
    whole["traceEvents"] = [e for e in whole["traceEvents"] if e["cat"] != "user_annotation"]
    path.write_text(json.dumps(whole["traceEvents"]))
    trace = read_trace(str(path))
    steps = find_steps(trace)
    assert len(steps.windows) == 3 and not steps.marked
    assert account(trace, steps.typical).step.seconds == pytest.approx(4200e-6, rel=0.01)


def test_a_really_recorded_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as recording:
        for i in range(3):
            with torch.profiler.record_function(f"ProfilerStep#{i}"):
                model(torch.randn(128, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    path = tmp_path / "cpu.json"
    recording.export_chrome_trace(str(path))
    assert main(["compare", str(path), "--json"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    assert sum(rank["parts_s"].values()) == rank["step_s"]
    kinds = {kind["kind"] for kind in rank["kinds"]}
    assert {"matmul", "elementwise", "optimizer"} <= kinds and rank["phases_s"]["backward"] > 0
    assert main(["compare", str(path)]) == 0
    assert "where the step goes" in capsys.readouterr().out


def test_a_prediction_lies_next_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline, plan = str(tmp_path / "step.timeline"), str(EXAMPLE)
    job = ["predict", "llama-tiny", "--on", "1x2xh100-sxm", "--dp-shard", "2", "--timeline", timeline]
    assert main(job) == 0
    traces = str(play("data loading", tmp_path / "traces"))
    capsys.readouterr()
    script = tmp_path / "job.json"
    script.write_text('{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    of_job = (str(script), "--on", "1x2xh100-sxm", "--model", "llama-tiny")
    for predicted in ((timeline,), (plan,), of_job):
        assert main(["compare", traces, *predicted, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        measured, expected = told["ranks"][0]["step_s"], told["predicted"]["step_s"]
        gaps = {gap["part"]: gap for gap in told["gaps"]}
        assert sum(m - p for p, m in (gap["s"] for gap in gaps.values())) == pytest.approx(measured - expected)
        assert "DataLoader" in gaps["data loading"]["likely_cause"]
    assert main(["compare", timeline, traces]) == 0
    assert "likely cause of waiting for data" in capsys.readouterr().out
    assert main(["compare", str(script), traces, "--model", "llama-tiny"]) == 2
    assert "no machines; give --on CLUSTER" in capsys.readouterr().err
    assert main(["compare", timeline, traces, "--on", "1x2xh100-sxm"]) == 2
    assert "--on is for a job file, and none of" in capsys.readouterr().err
    assert main(["compare", timeline, timeline, "--on", "1x2xh100-sxm"]) == 2
    assert "--on is for a job file" in capsys.readouterr().err


intervals = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


@given(intervals, intervals)
def test_intervals_are_sets_of_time(one: list[tuple[int, int]], two: list[tuple[int, int]]) -> None:
    """Against sets of whole seconds."""

    def both(rows: list[tuple[int, int]]) -> tuple[np.ndarray, set[int]]:
        start = np.array([a for a, _ in rows], float)
        end = np.array([a + n for a, n in rows], float)
        return union(start, end), {t for a, n in rows for t in range(a, a + n)}

    (a, in_a), (b, in_b) = both(one), both(two)
    for found, wanted in (
        (a, in_a),
        (join(a, b), in_a | in_b),
        (minus(a, b), in_a - in_b),
        (common(a, b), in_a & in_b),
        (complement(a, 5, 50), set(range(5, 50)) - in_a),
    ):
        assert {t for start, end in found.tolist() for t in range(int(start), int(end))} == wanted
        assert length(found) == len(wanted)
        assert (found[1:, 0] > found[:-1, 1]).all(), "sorted, and apart"


BROKEN = {
    "cut.json": b'{"traceEvents": [{"ph": "X", "name": "aten::mm"',
    "empty.json": b"",
    "other.json": b'{"a": 1}',
    "list.json": b'{"traceEvents": [1, 2]}',
    "nothing.json": b'{"traceEvents": []}',
    "nan.json": b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": NaN, "dur": 1}]}',
    "cut.json.gz": b"\x1f\x8b\x08\x00\x00\x00",
    "deep.json": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_trace_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / name
    path.write_bytes(BROKEN[name])
    assert main(["compare", str(path)]) == 2
    error = capsys.readouterr().err
    assert name in error and error.count("\n") == 1


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    path = play("", tmp_path) / "rank0.json"
    (tmp_path / "again.json").write_bytes(path.read_bytes())
    with pytest.raises(InputError, match="both of rank 0"):
        read_traces(str(tmp_path))


def frame(file: str, name: str) -> dict[str, object]:
    return {"filename": file, "line": 7, "name": name}


def snapshot() -> dict[str, object]:
    """100 bytes of parameters from before; then an activation of 40, a gradient of 60, the activation freed."""
    forward, backward = [frame("model.py", "forward")], [frame("torch/autograd/__init__.py", "backward")]
    return {
        "segments": [
            {
                "device": 0,
                "address": 1000,
                "total_size": 512,
                "blocks": [
                    {"size": 100, "state": "active_allocated", "frames": [frame("module.py", "_apply")]},
                    {"size": 60, "state": "active_allocated", "frames": backward},
                    {"size": 352, "state": "inactive", "frames": []},
                ],
            }
        ],
        "device_traces": [
            [
                {"action": "alloc", "addr": 1200, "size": 40, "frames": forward},
                {"action": "alloc", "addr": 1100, "size": 60, "frames": backward},
                {"action": "free_requested", "addr": 1200, "size": 40, "frames": []},
                {"action": "free_completed", "addr": 1200, "size": 40, "frames": []},
            ]
        ],
    }


def test_a_snapshots_peak_by_class(tmp_path: Path) -> None:
    path = tmp_path / "memory.pickle"
    path.write_bytes(pickle.dumps(snapshot()))
    seen = read_snapshot(str(path))
    assert seen.peak_bytes == 200 and seen.reserved_bytes == 512
    held = {row.name: row.nbytes for row in seen.classes}
    assert held == {"parameters": 100, "gradients": 60, "activations": 40}


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("/tmp/gnomon-was-run"),)  # type: ignore[return-value]


@pytest.mark.parametrize("data", [pickle.dumps(Hostile()), b"\x80\x04", b"", pickle.dumps([1]), pickle.dumps({"a": 1})])
def test_a_snapshot_runs_nothing(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "memory.pickle"
    path.write_bytes(data)
    assert main(["compare", str(path)]) == 2
    assert "memory.pickle" in capsys.readouterr().err
    assert not Path("/tmp/gnomon-was-run").exists()

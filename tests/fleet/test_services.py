"""Inference services of a cluster: the fewest units over the day, and slices for batches, against brute force."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.cli import main
from gnomon.fleet.mig import Geometry
from gnomon.fleet.services import buckets, slice_of
from gnomon.hardware import parse_cluster


def padded(lengths: Sequence[int], ends: Sequence[int]) -> int:
    return sum(min(end for end in ends if end >= length) for length in lengths)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 4))
def test_buckets_pad_least(lengths: list[int], count: int) -> None:
    found = buckets(lengths, count)
    every = sorted(set(lengths))
    cuts = ((*rest, every[-1]) for size in range(min(count, len(every))) for rest in combinations(every[:-1], size))
    assert len(found) <= count and found[-1] == max(lengths)
    assert padded(lengths, found) == min(padded(lengths, cut) for cut in cuts)


def test_a_slice_has_its_part_of_a_device() -> None:
    device = parse_cluster("1xa100-sxm-80gb").devices[0]
    part, whole = slice_of(device, "3g"), slice_of(device, "7g")
    assert part.memory_bytes == device.memory_bytes // 2 and whole.memory_bytes == device.memory_bytes
    assert part.dense_peak.bf16 is not None and device.dense_peak.bf16 is not None
    assert part.dense_peak.bf16 == pytest.approx(device.dense_peak.bf16 * 3 / 7)


@pytest.fixture
def day(tmp_path: Path) -> Path:
    """Forty minutes: quiet, then busy."""
    rng, at, rows = random.Random(0), 0.0, ["arrival_s,input_len,output_len"]
    while at < 2400:
        at += rng.expovariate(1 if at < 1200 else 12)
        rows.append(f"{at:.3f},{rng.randint(50, 1500)},{rng.randint(20, 200)}")
    path = tmp_path / "day.csv"
    path.write_text("\n".join(rows) + "\n")
    return path


SERVICE = ["fleet", "service", "llama-3.1-8b", "--on", "1xa100-sxm-80gb", "--ttft", "1s", "--tpot", "30ms"]


def test_fewer_units_are_too_few_and_the_rest_is_lent(
    day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demand = tmp_path / "demand.csv"
    asked = [*SERVICE, "--requests", str(day), "--bin", "10min", "-o", str(demand), "--json"]
    assert main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    bins = found["bins"]
    assert len(bins) in (4, 5) and found["units"] == 2  # times count from the first request
    assert [one["units"] for one in bins[:2]] == [1, 1] and bins[3]["units"] == 2
    assert all(one["goodput"] >= 0.95 for one in bins)
    assert sum(one["requests"] for one in bins) == len(day.read_text().splitlines()) - 1
    busy = tmp_path / "busy.csv"  # the busy bin alone, on one unit: too few
    header, *rows = day.read_text().splitlines()
    busy.write_text("\n".join([header, *(row for row in rows if 1800 <= float(row.split(",")[0]) < 2400), ""]))
    alone = ["predict", *SERVICE[2:], "--serve", "--requests", str(busy), "--json", "--replicas", "1"]
    assert main(alone) == 0
    assert json.loads(capsys.readouterr().out)["goodput"] < 0.95
    jobs = tmp_path / "jobs.csv"
    jobs.write_text("job_id,submit_s,num_gpus,duration_s\n" + "".join(f"j{i},{60 * i},1,1200\n" for i in range(12)))
    replay = ["fleet", "replay", str(jobs), "--on", "1xa100-sxm-80gb", "--inference", "2x1xa100-sxm-80gb"]
    assert main([*replay, "--demand", str(demand), "--policy", "lyra"]) == 0
    assert "inference" in capsys.readouterr().out


def test_slices_are_legal_and_keep_up(day: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["fleet", "slices", "llama-3.2-1b", "--on", "a100-sxm-80gb", "--requests", str(day), "--rate", "60"]
    assert main([*asked, "--slo", "300ms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    served: dict[str, float] = {}
    for device in found["devices"]:
        geometry = Geometry()
        for index, one in enumerate(device):
            geometry.add(str(index), one["profile"])  # raises where it is not legal
            served[one["bucket"]] = served.get(one["bucket"], 0.0) + one["per_s"]
            assert one["latency_s"] <= 0.3
    for bucket in found["buckets"]:
        assert served[f"to {bucket['to']}"] >= bucket["rate_per_s"]
    assert len(found["devices"]) == min(found["cut_devices"], found["whole_devices"])
    assert main([*asked, "--slo", "300ms"]) == 0
    assert "devices cut into slices" in " ".join(capsys.readouterr().out.split())
    assert main([*asked, "--slo", "300ms", "--tp", "2"]) == 2
    assert "--tp has no meaning for this question" in capsys.readouterr().err
    assert main([*asked, "--slo", "1ms"]) == 2
    assert "no slice serves" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no trace of the day; give --requests FILE"),
        (["--requests", "DAY", "--bin", "0s"], "a bin of 0 s is none"),
        (["--requests", "DAY", "--zero", "3"], "--zero has no meaning for this question"),
        (["--requests", "DAY", "--page", "x.html"], "--page has no meaning for this question"),
        (["--requests", "DAY", "--concurrency", "4"], "a closed loop has no day"),
        (["--requests", "DAY", "--tp", "2"], "tp"),
        (["--requests", "DAY", "--ttft", "1ms"], "meet the targets on"),
        (["--requests", "DAY", "--bin", "2h", "-o", "x.csv"], "a load needs two bins or more"),
    ],
)
def test_what_cannot_be_asked(
    words: list[str],
    said: str,
    day: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(day.parent)
    base = SERVICE[:5] if "--ttft" in words else SERVICE
    more = ["--most", "2"] if "--ttft" in words else []
    assert main([*base, *(str(day) if word == "DAY" else word for word in words), *more]) == 2
    assert said in capsys.readouterr().err

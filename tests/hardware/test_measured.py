"""What a calibration says of itself: spread, noise, the machine alone, several merged; its file, and broken ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.errors import CatalogueError, InputError
from gnomon.hardware import Axis, Cluster, Measured, Table, measured_cluster, merged, parse_cluster
from gnomon.hardware.local import best_flops_per_s, with_processes

GIB = 1 << 30


def table(
    what: str, sizes: tuple[int, ...], seconds: tuple[float, ...], axis: str = "elements", **other: object
) -> Table:
    given = {"dtype": "fp32", "direction": "forward", "alone_s": (), "spread": (0.1,) * len(seconds)} | other
    return Table(what=what, axes=(Axis(name=axis, sizes=sizes),), seconds=seconds, **given)  # type: ignore[arg-type]


def matmul(seconds: tuple[float, float], alone_s: tuple[float, ...] = ()) -> Table:
    axes = (Axis(name="m", sizes=(100, 1000)), Axis(name="n", sizes=(100,)), Axis(name="k", sizes=(100,)))
    return Table(
        what="matmul", dtype="fp32", direction="forward", axes=axes, seconds=seconds, alone_s=alone_s, spread=(0.1, 0.3)
    )


MEASURED = Measured(
    host="Big.Box",
    date="2026-11-21T07:00:00Z",
    software="torch 2.13.0, gloo",
    processes=2,
    threads=1,
    tables=(
        matmul((2e-5, 1e-4), alone_s=(1e-5, 5e-5)),
        table("add", (1000, 1000000), (1e-6, 1e-3)),
        table("send_recv", (8, 1000000), (5e-5, 1e-3), "bytes", dtype="", direction=""),
    ),
)


def test_a_machine_is_noisy_from_a_spread_of_15_per_cent_at_the_median_figure() -> None:
    quiet = replace(MEASURED, tables=(table("add", (1, 2, 3), (1.0, 2.0, 3.0), spread=(0.01, 0.15, 9.0)),))
    noisy = replace(MEASURED, tables=(table("add", (1, 2, 3), (1.0, 2.0, 3.0), spread=(0.01, 0.16, 9.0)),))
    assert (quiet.spread, quiet.noisy) == (0.15, False)
    assert (noisy.spread, noisy.noisy) == (0.16, True)
    assert quiet.note == "measured on Big.Box, 2026-11-21T07:00:00Z, torch 2.13.0, gloo, spread 15 %"
    assert noisy.note.endswith("spread 16 %; the machine was noisy")


def test_the_cluster_has_the_best_that_was_seen_as_its_peaks() -> None:
    cluster = measured_cluster(MEASURED, 16 * GIB)
    node = cluster.groups[0].node
    assert (cluster.num_devices, node.device.name, node.device.memory_bytes) == (2, "cpu-big-box", 8 * GIB)
    # 2 · 1000 · 100 · 100 FLOPs in 50 us alone; 3 · 4 · 10^6 bytes in 1 ms; 10^6 bytes in 1 ms
    assert best_flops_per_s(MEASURED, "fp32") == node.device.dense_peak.fp32 == pytest.approx(4e11)
    assert node.device.memory_bytes_per_s == pytest.approx(12e9)
    assert (node.intra.bytes_per_s, node.intra.latency_s) == (pytest.approx(1e9), 5e-5)


def test_one_process_has_the_machine_to_itself() -> None:
    one = with_processes(measured_cluster(MEASURED, 16 * GIB), 1)
    device = one.devices[0]
    assert (one.num_devices, device.memory_bytes) == (1, 16 * GIB)
    assert device.measured is not None
    assert device.measured.tables[0].seconds == (1e-5, 5e-5)
    assert device.measured.tables[1].seconds == (1e-6, 1e-3)  # alone was not measured: as it is


def test_more_processes_than_were_measured_are_said_to_be_a_guess() -> None:
    four = with_processes(measured_cluster(MEASURED, 16 * GIB), 4)
    assert four.num_devices == 4
    assert four.assumptions == ("4 processes where 2 were measured: as fast as those, which they cannot be",)


def test_the_file_reads_back_equal() -> None:
    cluster = measured_cluster(MEASURED, 16 * GIB)
    assert schema.load(Cluster, schema.dump(cluster)) == cluster


def test_local_is_the_file_if_there_is_one_and_else_a_guess_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GNOMON_HOME", str(tmp_path))
    assert "this machine was not measured" in parse_cluster("local").assumptions[0]
    assert parse_cluster("local:3").num_devices == 3
    (tmp_path / "local.toml").write_text(schema.dump(measured_cluster(MEASURED, 16 * GIB)), encoding="utf-8")
    assert parse_cluster("local").devices[0].measured == MEASURED
    assert parse_cluster("local").num_devices == 2
    assert parse_cluster("local:1").devices[0].measured == MEASURED.alone


@pytest.mark.parametrize("spec", ["local:", "local:0", "local:x", "local:-1", "local:257", "local:²"])
def test_a_number_of_processes_is_a_whole_number(spec: str) -> None:
    with pytest.raises(CatalogueError, match="local:N"):
        parse_cluster(spec)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seconds = [1e-06, 0.001]", "seconds = [1e-06]", "a grid of 2 points has 1 seconds"),
        ("seconds = [1e-06, 0.001]", "seconds = [1e-06, -1.0]", "positive and finite"),
        ("seconds = [1e-06, 0.001]", "seconds = [1e-06, nan]", "nan"),
        ("sizes = [8, 1000000]", "sizes = [1000000, 8]", "must ascend"),
        ("processes = 2", "processes = 0", "1 process"),
        ('what = "add"', 'what = "matmul"', "two tables of matmul fp32 forward"),
        ("threads = 1\n", "threads = 1\nspeed = 3\n", "speed"),
    ],
)
def test_broken_files_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    text = schema.dump(measured_cluster(MEASURED, 16 * GIB))
    assert old in text
    path = tmp_path / "broken.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        parse_cluster(str(path))


def test_several_calibrations_have_the_median_of_each_figure() -> None:
    runs = tuple(replace(MEASURED, tables=(table("add", (1, 2), (s, 2 * s), spread=(s, s)),)) for s in (1.0, 5.0, 2.0))
    assert merged(runs).tables == (table("add", (1, 2), (2.0, 4.0), spread=(2.0, 2.0)),)
    other = replace(MEASURED, tables=(table("add", (1, 3), (1.0, 2.0)),))
    with pytest.raises(InputError, match="cannot be merged"):
        merged((runs[0], other))
    with pytest.raises(InputError, match="no calibration"):
        merged(())

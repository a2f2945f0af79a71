"""`gnomon calibrate` without a machine to measure: what it refuses, prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hardware.test_measured import MEASURED

from gnomon import schema
from gnomon.cli import calibrate, main
from gnomon.hardware import Cluster, Measured


class Asked:
    """Stands for the runtime: remembers what was asked."""

    def __init__(self, measured: Measured) -> None:
        self.measured, self.processes, self.seconds = measured, 0, 0.0

    def calibrate(self, processes: int, budget: dict[str, float]) -> Measured:
        self.processes, self.seconds = processes, budget["seconds"]
        return self.measured


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    result = Asked(MEASURED)
    monkeypatch.setattr(calibrate, "_runtime", lambda: (result.calibrate, dict, lambda: 2, lambda: 16 << 30))
    return result


def test_it_writes_the_cluster_file_and_says_what_it_found(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GNOMON_HOME", str(tmp_path / "home"))
    assert main(["calibrate"]) == 0
    out, err = capsys.readouterr()
    assert "matmul fp32 forward" in out and "0.1 ms" in out and "0.05 ms" in out
    assert "--on local reads it" in out and err == ""
    written = tmp_path / "home" / "local.toml"
    assert schema.load_file(Cluster, written).devices[0].measured == MEASURED
    assert [path.name for path in written.parent.iterdir()] == ["local.toml"]
    assert (asked.processes, asked.seconds) == (2, 40.0)


def test_a_noisy_machine_is_called_noisy_and_is_no_failure(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = tuple(
        type(t)(**{f: getattr(t, f) for f in t.__slots__ if f != "spread"}, spread=(0.5,) * len(t.spread))
        for t in MEASURED.tables
    )
    asked.measured = Measured(host="box", date="2026-11-21", software="torch", processes=1, threads=1, tables=loud)
    assert main(["calibrate", "-o", str(tmp_path / "me.toml"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["noisy"] is True
    assert "this machine was noisy: repeats spread by 50 %, over 15 %" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "figures.json"], "ends with .toml"),
        (["--processes", "0"], "not between 1 and"),
        (["--seconds", "soon"], "not a whole number"),
    ],
)
def test_wrong_requests(asked: Asked, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert asked.processes == 0


def test_a_place_that_cannot_be_written_is_refused_before_measuring(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert main(["calibrate", "-o", str(tmp_path / "file" / "local.toml")]) == 2
    assert "cannot write" in capsys.readouterr().err
    (tmp_path / "folder.toml").mkdir()
    assert main(["calibrate", "-o", str(tmp_path / "folder.toml")]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert asked.processes == 0

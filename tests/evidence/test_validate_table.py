"""`python -m evidence validate` on a small table: the summary, one run in full, the rows, and the processes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from evidence import validate as module
from evidence.__main__ import main

TABLE = """\
id,family,model,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,device,num_devices,devices_per_node,precision,framework,\
tp,pp,dp,micro_batch,global_batch,recompute,metric,value,mem_gib,notes
r1,left,gpt-tiny,4,512,8,8,2048,50304,1024,a100-sxm-80gb,8,8,bf16,Somebody's,1,1,8,2,16,none,s_per_step,0.1,10,
r2,left,gpt-tiny,4,512,8,8,2048,50304,1024,a100-sxm-80gb,8,8,bf16,Somebody's,2,1,4,2,16,none,s_per_step,0.1,,
r3,right,gpt-tiny,4,512,8,8,2048,50304,1024,a100-sxm-80gb,8,8,bf16,Somebody's,1,1,8,,16,none,s_per_step,0.1,,
"""


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "runs.csv"
    path.write_text(TABLE)
    return str(path)


def test_summary(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", table]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert [line.split()[:3] for line in lines[1:4]] == [["left", "2", "2"], ["right", "1", "0"], ["all", "3", "2"]]
    assert "refused: 1 row\n" in out
    assert "   1  micro_batch not given" in out


def test_family_and_json(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", table, "--family", "left", "--json"]) == 0
    (family,) = json.loads(capsys.readouterr().out)["families"]
    assert (family["family"], family["rows"], family["predicted"], family["refused"]) == ("left", 2, 2, [])
    assert family["time"]["count"] == 2
    assert family["memory"]["count"] == 1
    assert main(["validate", table, "--family", "lift"]) == 2
    assert "no row of family 'lift' (did you mean 'left'?)" in capsys.readouterr().err


def test_columns_of_ones_own_are_passed_over_and_said_but_slips_are_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = TABLE.splitlines()
    (tmp_path / "own.csv").write_text("\n".join([f"{lines[0]},owner,ticket", *(f"{line},me,7" for line in lines[1:])]))
    assert main(["validate", str(tmp_path / "own.csv"), "--json"]) == 0
    output = capsys.readouterr()
    assert json.loads(output.out)["families"][0]["predicted"] == 2
    assert output.err.count("not read: columns 'owner', 'ticket'") == 1
    (tmp_path / "slip.csv").write_text(TABLE.replace("seq_len", "seqlen"))
    assert main(["validate", str(tmp_path / "slip.csv")]) == 2
    assert "a column 'seqlen' that is not known (did you mean 'seq_len'" in capsys.readouterr().err


def test_rows(table: str, tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    assert main(["validate", table, "--rows", str(out)]) == 0
    rows = {row["id"]: row for row in csv.DictReader(out.read_text().splitlines())}
    assert set(rows) == {"r1", "r2", "r3"}
    assert rows["r3"]["reason"] == "micro_batch not given"
    first = rows["r1"]
    assert float(first["error"]) == pytest.approx(float(first["predicted_s"]) / 0.1 - 1, abs=1e-3)
    assert int(first["measured_bytes"]) == 10 * 2**30
    assert main(["validate", table, "--rows", str(tmp_path / "none" / "out.csv")]) == 2


def test_explain(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", table, "--explain", "r1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("r1: gpt-tiny, Somebody's on 8 a100-sxm-80gb\n")
    assert "memory GiB" in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert main(["validate", table, "--explain", "r1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measured"]["step_s"] == [0.1]
    assert document["error"] == pytest.approx(document["prediction"]["step_s"] / 0.1 - 1)
    assert main(["validate", table, "--explain", "r3"]) == 0
    assert capsys.readouterr().out == "refused: micro_batch not given\n"
    assert main(["validate", table, "--explain", "r9"]) == 2


def test_processes_change_nothing(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ALONE", 1)
    runs, _ = module.read_runs(TABLE)
    assert module.score_all(runs, 2) == module.score_all(runs, 1)

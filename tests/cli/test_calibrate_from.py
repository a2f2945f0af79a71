"""`gnomon calibrate --from`: a table in, a stack file out that `gnomon predict --stack` takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.cli import main
from gnomon.cli.calibrate_from import run
from gnomon.cli.options.tools import CalibrateOptions
from gnomon.errors import InputError
from gnomon.software import Stack

TABLE = """\
id,model,on,seq_len,global_batch,micro_batch_size,tp,pp,step_s
a,pythia-1.4b,1x8xa100-sxm-80gb,2048,64,2,2,,4.0
b,llama-2-7b,1x8xa100-sxm-80gb,2048,64,4,4,,8.0
c,gpt2,1x8xa100-sxm-80gb,1024,64,4,1,,1.0
d,gpt2,1x8xa100-sxm-80gb,1024,64,3,1,,1.0
"""


def asked(folder: Path, text: str = TABLE, *, as_json: bool = False) -> CalibrateOptions:
    table = folder / "runs.csv"
    table.write_text(text)
    return CalibrateOptions(runs=str(table), output=str(folder / "mine.toml"), json=as_json)


def test_it_writes_a_stack_that_predict_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked(tmp_path)) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if "wrote" not in line) <= 80
    assert "not used: 1 rows" in out and "d: " in out
    target = tmp_path / "mine.toml"
    result = schema.load_file(Stack, target)
    assert result.own is not None and result.own.runs == 3 and "runs.csv: a, b, c" in result.own.data
    assert main(["predict", "gpt2", "--on", "1x8xa100-sxm-80gb", "--stack", str(target), "--seq-len", "1024"]) == 0
    assert "3 own runs" in " ".join(capsys.readouterr().out.split())
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_the_command_leads_here(tmp_path: Path) -> None:
    options = asked(tmp_path)
    assert main(["calibrate", "--from", options.runs, "-o", options.output, "--json"]) == 0
    assert Path(options.output).is_file()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked(tmp_path, as_json=True)) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in document["runs"]] == ["a", "b", "c"]
    assert (
        set(document["factors"]) == {"kernels", "attention", "host", "collectives"} and len(document["left_out"]) == 3
    )


def test_nothing_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run of runs.csv can be predicted: "):
        run(asked(tmp_path, "\n".join([TABLE.splitlines()[0], TABLE.splitlines()[-1]])))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    options = replace(asked(tmp_path), output=str(tmp_path / "none" / "mine.toml"))
    with pytest.raises(InputError, match="none"):
        run(options)

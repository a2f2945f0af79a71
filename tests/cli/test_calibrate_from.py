"""`gnomon calibrate --from`: a table in, a stack file out that `gnomon predict --stack` takes."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.cli import main
from gnomon.cli.calibrate_from import run
from gnomon.errors import InputError
from gnomon.plans import Stack

TABLE = """\
id,family,model,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,device,num_devices,devices_per_node,precision,framework,\
tp,pp,dp,micro_batch,global_batch,recompute,metric,value
a,mine,gpt,24,2048,16,16,8192,50304,2048,a100-sxm-80gb,8,8,bf16,Somebody's,2,1,4,2,64,none,s_per_step,4.0
b,mine,gpt,16,4096,32,32,16384,50304,2048,a100-sxm-80gb,8,8,bf16,Somebody's,4,1,2,4,64,none,s_per_step,8.0
c,mine,gpt,24,1024,16,16,4096,50304,2048,a100-sxm-80gb,8,8,bf16,Somebody's,1,1,8,4,64,none,s_per_step,1.0
d,mine,gpt,24,1024,16,16,4096,50304,2048,a100-sxm-80gb,8,8,bf16,Somebody's,1,1,8,,64,none,s_per_step,1.0
"""


def asked(folder: Path, text: str = TABLE, *, as_json: bool = False) -> Namespace:
    table = folder / "runs.csv"
    table.write_text(text)
    return Namespace(runs=str(table), output=str(folder / "mine.toml"), json=as_json)


def test_it_writes_a_stack_that_predict_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked(tmp_path)) == 0
    out = capsys.readouterr().out
    assert max(len(line) for line in out.splitlines() if "wrote" not in line) <= 80
    assert "not used: 1 rows" in out and "micro_batch not given" in out
    target = tmp_path / "mine.toml"
    found = schema.load_file(Stack, target)
    assert found.own is not None and found.own.runs == 3 and "runs.csv: a, b, c" in found.own.data
    assert main(["predict", "gpt2", "--on", "1x8xa100-sxm-80gb", "--stack", str(target), "--seq-len", "1024"]) == 0
    assert "3 own runs" in " ".join(capsys.readouterr().out.split())
    assert [path.name for path in tmp_path.iterdir() if "part" in path.name] == []


def test_the_command_leads_here(tmp_path: Path) -> None:
    options = asked(tmp_path)
    assert main(["calibrate", "--from", options.runs, "-o", options.output, "--json"]) == 0
    assert Path(options.output).is_file()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(asked(tmp_path, as_json=True)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in found["runs"]] == ["a", "b", "c"]
    assert set(found["factors"]) == {"kernels", "attention", "host", "collectives"} and len(found["left_out"]) == 3


def test_nothing_to_fit(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing in .* can be read as a run: d: micro_batch not given"):
        run(asked(tmp_path, "\n".join([TABLE.splitlines()[0], TABLE.splitlines()[-1]])))


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    options = asked(tmp_path)
    options.output = str(tmp_path / "none" / "mine.toml")
    with pytest.raises(InputError, match="none"):
        run(options)

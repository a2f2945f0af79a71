"""`gnomon validate` on a table of one's own runs: what it says of each, and what it says of a table that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.cli.runs_table import columns, read_runs
from gnomon.errors import InputError

TABLE = """\
id,model,on,seq_len,global_batch,micro_batch_size,tp,zero,recompute,sequence_parallel,step_s,peak_gib
a,gpt2,1x8xa100-sxm-80gb,1024,64,8,1,1,none,,0.25,20
b,gpt2,1x8xa100-sxm-80gb,1k,64,8,2,,,yes,0.25,

c,gpt2,1x8xa100-sxm-80gb,1024,64,,,3,full,no,0.5,
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "runs.csv"
    path.write_text(TABLE)
    return path


def test_rows_are_what_predict_would_be_asked(table: Path) -> None:
    a, b, c = read_runs(table)
    assert (a.id, a.plan.mesh.tp, a.plan.optimizer.zero, a.plan.schedule.micro_batch_size) == ("a", 1, 1, 8)
    assert (a.step_s, a.peak_bytes, b.peak_bytes) == (0.25, 20 * 2**30, None)
    assert (b.plan.mesh.tp, b.plan.layout.sequence_parallel, b.workload.seq_len) == (2, True, 1024)
    assert c.plan.optimizer.zero == 3 and c.plan.saved.preset == "full" and not c.plan.layout.sequence_parallel
    assert not a.assumed and any("micro" in note for note in c.assumed)


def test_summary(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(table)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:4]] == ["a", "b", "c"]
    assert "3 runs: step time off by" in " ".join(lines) and "peak memory of 1 off by" in " ".join(lines)


def test_json(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(table), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first = document["runs"][0]
    assert first["error"] == pytest.approx(first["predicted_s"] / 0.25 - 1)
    assert first["memory_error"] == pytest.approx(first["predicted_bytes"] / (20 * 2**30) - 1)
    assert len(document["runs"]) == 3 and document["refused"] == []


def test_a_plan_file_stands_for_all_other_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.toml").write_text(
        'schema = "gnomon.planfile/1"\nmodel = "llama-tiny"\non = "1x2xa100-sxm-80gb"\n'
        "[workload]\nglobal_batch_size = 4\nseq_len = 64\n[plan]\nmesh = {dp_shard = 2}\n"
    )
    (tmp_path / "runs.csv").write_text("plan,zero,step_s\np.toml,,0.01\np.toml,1,0.02\n")
    first, second = read_runs(tmp_path / "runs.csv")
    assert (first.id, second.id) == ("line 2", "line 3")
    assert (first.plan.optimizer.zero, second.plan.optimizer.zero) == (0, 1)
    assert first.workload.global_batch_size == 4 and first.cluster.num_devices == 2


def test_a_run_that_cannot_be_predicted_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text(
        TABLE.replace("a,gpt2,", "a,llama-3.1-8b,").replace("64,8,1,1,none", "64,3,1,1,none")
    )
    assert main(["validate", str(tmp_path / "t.csv")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "a cannot be predicted: " in out and "2 runs: " in out


WRONG = [
    ("step_s", "steps_s", "'steps_s' that is not known (did you mean 'step_s'"),
    (",tp,", ",step_s,", "two columns 'step_s'"),
    ("0.25,20", "0,20", "step_s is 0; give a finite number above 0 - at `line 2`"),
    ("0.25,20", "fast,20", "step_s is 'fast', which is not a number - at `line 2`"),
    ("0.25,20", ",20", "step_s is empty: every row has a measured step - at `line 2`"),
    ("0.25,20", "0.25,20,1", "has 13 values for 12 columns - at `line 2`"),
    ("b,gpt2", "a,gpt2", "two runs with id 'a' - at `line 3`"),
    ("b,gpt2", "b,gpt9", "unknown model 'gpt9'"),
    ("1k,64,8,2", "1k,64,8,two", "column tp: 'two' is not a whole number - at `line 3`"),
    ("1k,64,8,2", ",64,8,2", "seq_len not given; fill it, or name a plan file in column plan - at `line 3`"),
    ("1k,64,8,2", "1k,,8,2", "global_batch and tokens_per_batch not given"),
    (",yes,", ",maybe,", "sequence_parallel is 'maybe'; give yes or no - at `line 3`"),
    ("64,8,2", "64,8,3", "does not divide"),
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG, ids=[message for _, _, message in WRONG])
def test_what_is_wrong_is_said_with_its_place(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in TABLE
    (tmp_path / "t.csv").write_text(TABLE.replace(old, new, 1))
    with pytest.raises(InputError, match="t.csv") as error:
        read_runs(tmp_path / "t.csv")
    assert message in str(error.value) and "line " in str(error.value)


def test_every_option_that_says_how_a_job_runs_is_a_column() -> None:
    assert {"id", "model", "on", "stack", "plan", "vpp", "schedule", "layers_per_stage", "step_s"} <= set(columns())


def test_the_table_of_the_docs_is_read_by_both_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs/calibrate.md").read_text(encoding="utf-8")
    shown = text[text.index("    id,model,on,stack") :].split("\n\n")[0]
    table, own = tmp_path / "runs.csv", tmp_path / "mine.toml"
    table.write_text("\n".join(line.strip() for line in shown.splitlines()))
    assert len(read_runs(table)) == 9 and len(shown.splitlines()) == 10
    for command in (["validate", str(table)], ["calibrate", "--from", str(table), "-o", str(own)]):
        assert main(command) == 0
        printed = capsys.readouterr().out.splitlines()
        assert f"    {printed[0]}" in text.splitlines() and sum(line[:2] in text for line in printed[1:10]) == 9
    assert own.is_file()

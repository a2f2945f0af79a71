"""Plan files: what is written is read, paths go with the file, and broken files say where."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.errors import FormatError, GnomonError, InputError
from gnomon.plans import Mesh, Plan, PlanFile, Predicted, Workload, is_plan_file, load_plan_file, save_plan_file

FILE = PlanFile(
    model="llama-tiny",
    on="local",
    stack="gnomon",
    workload=Workload(global_batch_size=16, seq_len=128),
    plan=Plan(mesh=Mesh(pp=2)),
)
PREDICTED = Predicted(
    step_s=0.1, peak_memory_bytes=123_456_789, tokens_per_s=20_480.0, made="gnomon 0, 2026-11-21", assumptions=("a",)
)
TEXT = """\
schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "local"
[workload]
global_batch_size = 16
seq_len = 128
[plan]
mesh = { pp = 2 }
"""


@pytest.mark.parametrize("value", [FILE, replace(FILE, predicted=PREDICTED), replace(FILE, stack="")])
def test_what_is_written_is_read(value: PlanFile, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    save_plan_file(value, path)
    assert load_plan_file(path) == value
    assert is_plan_file(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]


def test_a_person_can_write_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(TEXT)
    assert load_plan_file(path) == replace(FILE, stack="")


def test_paths_go_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the file's folder they are relative to it, so the folder may move; elsewhere they are whole."""
    below, other = tmp_path / "job", tmp_path / "machines"
    below.mkdir()
    other.mkdir()
    monkeypatch.chdir(below)
    value = replace(FILE, model="my-model/config.json", on="../machines/two.toml")
    save_plan_file(value, "plan.toml")
    assert schema.load_file(PlanFile, "plan.toml").model == "./my-model/config.json"
    below.rename(tmp_path / "moved")
    os.chdir(tmp_path)
    result = load_plan_file("moved/plan.toml")
    assert Path(result.model).resolve() == tmp_path / "moved" / "my-model" / "config.json"
    assert Path(result.on) == other / "two.toml"


def test_a_folder_without_a_slash_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    save_plan_file(replace(FILE, model="my-model"), "plan.toml")
    assert schema.load_file(PlanFile, "plan.toml").model == "./my-model"


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("", 'model = "llama-tiny"\n', "model"),
        ('on = ""', 'on = "local"', "must say `on`"),
        ("mesh = { pipe = 2 }", "mesh = { pp = 2 }", "pipe"),
        ("seq_len = 0", "seq_len = 128", "exactly one of seq_len"),
        ('schema = "gnomon.plan/1"', 'schema = "gnomon.planfile/1"', "Expected a gnomon.planfile file"),
    ],
)
def test_a_broken_file_says_what_is_wrong(wrong: str, right: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(TEXT.replace(right, wrong))
    with pytest.raises(GnomonError, match=message):
        load_plan_file(path)


def test_what_cannot_be_written_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").mkdir()
    with pytest.raises(InputError, match="cannot write"):
        save_plan_file(FILE, tmp_path / "plan.toml")
    with pytest.raises(InputError, match="cannot write"):
        save_plan_file(FILE, tmp_path / "nowhere" / "plan.toml")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.toml"]


def test_a_bare_plan_is_no_plan_file(tmp_path: Path) -> None:
    schema.save_file(Plan(), tmp_path / "plan.toml")
    assert not is_plan_file(tmp_path / "plan.toml")
    (tmp_path / "none.toml").write_text("a = 1")
    assert not is_plan_file(tmp_path / "none.toml")


def test_a_file_that_is_no_toml_is_no_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text('{"a": 1}')
    for read in (load_plan_file, is_plan_file):
        with pytest.raises(FormatError, match=r"job.json is no plan file: .*plan files are TOML, as `gnomon plan"):
            read(path)


def test_a_file_with_adapters_behind_it_moves_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved").mkdir()
    save_plan_file(replace(FILE, model="config.json+lora8"), "moved/plan.toml")
    assert Path(load_plan_file("moved/plan.toml").model).resolve() == tmp_path / "config.json+lora8"

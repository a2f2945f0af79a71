"""`gnomon diff`: two jobs, commits of a repository, limits and their exit status, annotations."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from gnomon.cli import main

PLAN = """\
schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "1x4xa100-sxm-40gb"
[workload]
global_batch_size = 8
seq_len = 128
[plan]
mesh = {{ dp_shard = {dp}, tp = {tp} }}
schedule = {{ micro_batch_size = {micro} }}
"""


def write(path: Path, dp: int = 4, tp: int = 1, micro: int = 1) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(PLAN.format(dp=dp, tp=tp, micro=micro))
    return str(path)


def test_the_change_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write(tmp_path / "one.toml"), write(tmp_path / "two.toml", dp=2, tp=2)
    assert main(["diff", one, two, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    sides = {}
    for name, path in (("before", one), ("after", two)):
        assert main(["predict", path, "--json"]) == 0
        sides[name] = json.loads(capsys.readouterr().out)
        assert told[name]["step_s"] == sides[name]["step_s"]
    fields = {field["name"]: (field["before"], field["after"]) for field in told["fields"]}
    assert fields == {"plan.mesh.dp_shard": ("4", "2"), "plan.mesh.tp": ("1", "2")}
    speeds = [sides[name]["tokens_per_s_per_device"] for name in ("before", "after")]
    assert told["speed"] == pytest.approx(speeds[1] / speeds[0] - 1)
    assert main(["diff", one, one]) == 0
    assert "the two are the same job" in capsys.readouterr().out


def test_limits_decide_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, slow = write(tmp_path / "one.toml"), write(tmp_path / "100%,slow.toml", dp=2, tp=2)
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert main(["diff", one, slow, "--max-slower", "99.9%", "--max-memory", "1TiB", "--github"]) == 0
    assert "::notice " in capsys.readouterr().out
    assert main(["diff", one, slow, "--max-slower", "0%", "--github"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::error")]
    assert "100%25%2Cslow.toml" in line and "% " not in line
    assert summary.read_text().count("###") == 2
    large = write(tmp_path / "large.toml", micro=2)
    assert main(["diff", one, large, "--max-memory", "0GiB"]) == 1
    assert "over the limit" in capsys.readouterr().out


def test_a_job_that_no_longer_fits_fails_without_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--on", "1x8xa100-sxm-40gb", "--seq-len", "1024", "--global-batch", "8"]
    assert main(["diff", "gpt2", "llama-3.1-8b", *job]) == 1
    assert "no longer fits" in capsys.readouterr().out


def test_a_file_of_a_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    write(tmp_path / "jobs" / "train.toml")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    write(tmp_path / "jobs" / "train.toml", dp=2, tp=2)
    monkeypatch.chdir(tmp_path / "jobs")
    assert main(["diff", "HEAD:train.toml", "train.toml", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["fields"]) == 2
    assert main(["diff", "HEAD:missing.toml", "train.toml"]) == 2
    assert "git has no file 'missing.toml' in 'HEAD'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["one.toml"], "AFTER"),
        (["one.toml", "missing.toml"], "missing.toml"),
        (["one.toml", "one.toml", "--max-slower", "fast"], "no per cent"),
        (["one.toml", "one.toml", "--max-memory", "much"], "--max-memory"),
        (["one.toml", "one.toml", "--plan", "one.toml"], "leave --plan"),
        (["one.toml", "no-such-model"], "no-such-model"),
        (["no-such-branch:one.toml", "one.toml"], "'no-such-branch' is no commit of a git repository here"),
        (["--", "--output=x:one.toml", "one.toml"], "--output"),
    ],
)
def test_wrong_requests_are_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "one.toml")
    monkeypatch.chdir(tmp_path)
    assert main(["diff", *words]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error

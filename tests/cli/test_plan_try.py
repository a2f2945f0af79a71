"""`gnomon plan --try` with processes that stand for runs: what is kept, and what becomes of those that crash or hang.

Real runs are in tests/runtime/test_try.py.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hardware.test_measured import MEASURED
from in_place import in_place

from gnomon import schema
from gnomon.cli import main, plan_try
from gnomon.cli.options.job import LocalOption, TrainingOptions
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.own import machine_of, runs_folder, stack_file, with_own
from gnomon.cli.plan_try import ProcessEnd, attempt, check_try
from gnomon.errors import InputError, PlanError
from gnomon.hardware import Cluster, measured_cluster, parse_cluster
from gnomon.plans import load_plan_file
from gnomon.software import OwnNumber, OwnRuns, Stack, stack

PRINTS = """
import json, os, signal, sys, time
from pathlib import Path
path, steps = Path(sys.argv[2]), int(sys.argv[4])
plan = path.read_text()
story = json.loads(Path(os.environ["STORY"]).read_text())
number = len(list(path.parent.glob("*.log"))) - 1
what = story[number]
if what == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if what == "refused":
    print("gnomon: the runtime does not carry it out", file=sys.stderr)
    sys.exit(2)
if what == "crashed":
    print("step 1/8  loss 5.6", file=sys.stderr)
    print("gnomon: rank 1 of 2 was killed by SIGKILL, so the run ended; no checkpoint", file=sys.stderr)
    sys.exit(2)
if what == "hangs":
    time.sleep(600)
if what == "says nonsense":
    print("{")
    sys.exit(0)
seconds = [9.0] * 3 + [what] * (steps - 3)
print(json.dumps({
    "warm_up_steps": 3,
    "predicted": {"step_s": 1.0, "step_s_as_it_was_before_training": 2.0},
    "measured": {"step_s": what, "process_peak_bytes": 1000},
    "steps": [{"step": i + 1, "step_s": s} for i, s in enumerate(seconds)],
}))
"""

WORDS = ("plan", "llama-tiny", "--on", "1x2xcpu-process", "--global-batch", "4", "--seq-len", "64")
FP32 = ("--precision", "fp32")


@pytest.fixture
def tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of tries; runs are told by `story.json`, one entry each: seconds of a step, or how it ends. What does
    not hang may take its time: the limit is on the clock, and the machine may be busy."""

    def patient(plan: Path, *, steps: int, limit_s: float) -> ProcessEnd:
        number = len({*plan.parent.glob("*.log"), plan.with_suffix(".log")}) - 1  # as PRINTS counts
        entry = json.loads((tmp_path / "story.json").read_text())[number]
        return attempt(plan, steps=steps, limit_s=limit_s if entry == "hangs" else 600.0)

    monkeypatch.setattr(plan_try, "attempt", patient)
    monkeypatch.setattr(plan_try, "RUN", PRINTS)
    monkeypatch.setattr(plan_try, "find_spec", lambda name: find_spec("json"))
    monkeypatch.setenv("GNOMON_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("STORY", str(tmp_path / "story.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tries"


def story(*entries: float | str) -> None:
    Path(os.environ["STORY"]).write_text(json.dumps(entries))


def test_the_measured_best_is_kept_whatever_becomes_of_the_others(
    tells: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    story(0.5, "killed", "refused", 0.25, "crashed", "says nonsense", "hangs")
    more = ("--try", "7", "--try-dir", str(tells), "--try-timeout", "3s", "-o", "best.toml")
    assert main([*WORDS, *FP32, *more]) == 0
    out, err = capsys.readouterr()
    table = out.split("\ntried ")[1].split("\n\n")[0].splitlines()
    assert [row.split()[-1] for row in table[1:8]] == [
        "slower", "failed", "refused", "kept", "failed", "failed", "out",
    ]  # fmt: skip
    text = " ".join(out.split())
    assert "was killed by SIGKILL" in text and "the runtime does not carry it out" in text
    assert "rank 1 of 2 was killed by SIGKILL" in text and "ended after the limit of 3.00 s (--try-timeout)" in text
    assert "The predicted best is number 2 of 2 as measured, 100.0 % slower." in text
    assert "trying 1 of 7: " in err and "  measured 500 ms" in err
    assert max(len(line) for line in out.splitlines() if str(tells) not in line) <= 80
    best = load_plan_file("best.toml")
    assert best.measured is not None and best.predicted is not None
    assert (best.measured.step_s, best.measured.steps, best.measured.warm_up) == (0.25, 5, 3)
    assert best.measured.slowdown == 2.0 and best.measured.spread == 0.0
    files = [load_plan_file(path) for path in tells.glob("*llama*.toml")]
    assert len(files) == 7 and sum(file.measured is not None for file in files) == 2


def test_json(tells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story(0.5, "killed")
    assert main([*WORDS, *FP32, "--try", "2", "--try-steps", "2", "--try-dir", str(tells), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    tried = document["tried"]
    assert (tried["schema"], tried["kept"], tried["folder"]) == ("gnomon.tried/1", 0, str(tells))
    assert [trial["ended"] for trial in tried["attempts"]] == ["ran", "failed"]
    assert tried["attempts"][0]["measured_step_s"] == 0.5
    assert schema.load_file(Stack, tried["stack"]).own is not None


def test_nothing_ran(tells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    story("killed", "refused")
    assert main([*WORDS, *FP32, "--try", "2", "--try-dir", str(tells), "-o", "best.toml"]) == 2
    out, err = capsys.readouterr()
    assert "none of the 2 plans tried ran; the first: was killed by SIGKILL" in err and str(tells) in err
    assert "\ntried " in out and not Path("best.toml").exists()


def test_what_was_measured_corrects_the_next_plan(tells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three runs of twice what is predicted: with the numbers that they give, the next prediction is nearer."""
    assert main([*WORDS, *FP32, "--top", "3", "--json"]) == 0
    before = [load["prediction"]["step_s"] for load in json.loads(capsys.readouterr().out)["best"]]
    measured = [2 * seconds for seconds in before]
    story(*measured)
    assert main([*WORDS, *FP32, "--try", "3", "--try-dir", str(tells)]) == 0
    own = tells / "gnomon-own.toml"
    assert f"for --stack: {own}" in " ".join(capsys.readouterr().out.split())
    assert main([*WORDS, *FP32, "--top", "1", "--stack", str(own), "--json", "-o", "next.toml"]) == 0
    after = json.loads(capsys.readouterr().out)["best"][0]["prediction"]["step_s"]
    assert abs(after / measured[0] - 1) < 0.6 * abs(before[0] / measured[0] - 1)
    assert Path(load_plan_file("next.toml").stack).resolve() == own.resolve()
    # the same from the folder, by hand
    assert main(["calibrate", "--from", str(tells), "-o", "again.toml"]) == 0
    assert schema.load_file(Stack, "again.toml").own == schema.load_file(Stack, own).own


@pytest.fixture
def home(tells: Path) -> Path:
    """Where this machine's calibration is kept, empty."""
    return Path(os.environ["GNOMON_HOME"])


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[float, str]:
    """(seconds of the best plan's step, what it rests on) of another plan request."""
    assert main(in_place([*WORDS, *FP32, "--stack", "gnomon", "--top", "1", "--json"], *words)) == 0
    document = json.loads(capsys.readouterr().out)
    return document["best"][0]["prediction"]["step_s"], " ".join(document["assumptions"])


def test_what_was_measured_is_taken_by_the_next_command(
    tells: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of twice what is predicted: kept, fitted, ranked again in the same command, and found by plan, predict and
    explain after it, unless they are told to leave them."""
    before, _ = predicted(capsys)
    story(*[2 * before] * 4)
    assert main([*WORDS, *FP32, "--try", "4", "--try-dir", str(tells), "-o", "best.toml"]) == 0
    out = capsys.readouterr().out
    table = out.split("\nranked again, with what was measured")[1].split("\n\n")[0].splitlines()[1:]
    assert any(row.endswith("not tried") for row in table) and any(row.endswith(" ms") for row in table)
    first = table[0].split("  ")[0]
    assert (f"{first} was not tried, and is now" in " ".join(table)) == table[0].endswith("not tried")
    assert "from now on predictions for this machine take what 4 runs say" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines() if str(tells) not in line) <= 80
    assert (home / "local-gnomon.toml").is_file() and len(list((home / "runs").glob("*.toml"))) == 4
    after, message = predicted(capsys)
    assert abs(after / before / 2 - 1) < 0.3
    assert "calibrated from 4 runs of " in message and "--no-local-calibration ignores them" in message
    plain, message = predicted(capsys, "--no-local-calibration")
    assert plain == before and "calibrated from" not in message
    assert predicted(capsys, "--stack", "megatron-lm")[1].count("calibrated from") == 0
    assert predicted(capsys, "--on", "1x2xa100-sxm-80gb")[1].count("calibrated from") == 0
    steps = {}
    for more in ((), ("--no-local-calibration",)):
        assert main(["predict", "--plan", "best.toml", "--json", *more]) == 0
        steps[more] = json.loads(capsys.readouterr().out)["step_s"]
    assert steps[()] > 1.4 * steps["--no-local-calibration",]
    assert main(["explain", "best.toml"]) == 0
    assert "calibrated from 4 runs" in " ".join(capsys.readouterr().out.split())
    assert main(["predict", "--plan", "best.toml", "--timeline", "step.timeline"]) == 0
    assert main(["report", "step.timeline", "--plan", "best.toml", "-o", "page.html"]) == 0
    page = Path("page.html").read_text()
    assert page.count("run kept of this machine, ") in (4, 8)  # beside the page's data
    capsys.readouterr()
    # the same plans once more: newer runs take the place of the older ones
    story(*[before] * 4)
    assert main([*WORDS, *FP32, "--try", "4", "--try-dir", str(tells), "--no-local-calibration"]) == 0
    assert "ranked again" not in capsys.readouterr().out and predicted(capsys)[0] == after


def test_runs_that_say_little_or_nothing_good_change_nothing(
    tells: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, _ = predicted(capsys)
    story(2 * before, 2 * before)
    assert main([*WORDS, *FP32, "--try", "2", "--try-dir", str(tells)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "predictions stay as they are: 2 of the 3 runs that it takes" in out and "ranked again" not in out
    story(*[before * factor for factor in (0.25, 4.0, 1.0, 1.0, 1.0)])
    assert main([*WORDS, *FP32, "--try", "5", "--try-dir", str(tells)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "predictions stay as they are: each of 5 runs is predicted" in out
    assert not (home / "local-gnomon.toml").exists() and predicted(capsys)[0] == before


def test_numbers_hold_for_one_machine_as_it_was_calibrated(home: Path) -> None:
    home.mkdir()
    machine = measured_cluster(MEASURED, 16 << 30)
    own = OwnRuns(
        numbers=(OwnNumber(name="compute", value=0.5, arch="measured"),),
        runs=3,
        data="runs",
        date="2026-11-22",
        error="-",
        range="-",
        machine=machine_of(machine),
    )
    schema.save_file(replace(stack("gnomon"), own=own), stack_file())

    def taken(
        machines: Cluster,
        of: Stack = stack("gnomon"),  # noqa: B008
        options: LocalOption = TrainingOptions(),  # noqa: B008
    ) -> tuple[bool, str]:
        message: list[str] = []
        return with_own(of, machines, options, message).own == own, " ".join(message)

    assert taken(machine)[0] and "calibrated from 3 runs of 2026-11-22 on this machine" in taken(machine)[1]
    later = measured_cluster(replace(MEASURED, date="2027-01-01T00:00:00Z"), 16 << 30)
    assert not taken(later)[0] and "before this machine was calibrated again, and are left out" in taken(later)[1]
    assert f"(gnomon calibrate --from {runs_folder()} -o {stack_file()} fits them again)" in taken(later)[1]
    elsewhere = measured_cluster(replace(MEASURED, host="elsewhere"), 16 << 30)
    specs = ("1x2xa100-sxm-80gb", "2x8xa100-sxm-80gb", "1x2xcpu-process")
    for other in (elsewhere, *map(parse_cluster, specs)):
        assert taken(other) == (False, "")
    assert taken(machine, stack("megatron-lm")) == (False, "")
    assert taken(machine, options=TrainingOptions(no_local_calibration=True)) == (False, "")


def test_a_plan_file_without_a_measurement_is_no_run(tells: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, *FP32, "-o", "plan.toml"]) == 0
    capsys.readouterr()
    assert main(["calibrate", "--from", "plan.toml", "-o", "own.toml"]) == 2
    assert "does not say what was measured" in capsys.readouterr().err
    tells.mkdir()
    assert main(["calibrate", "--from", str(tells), "-o", "own.toml"]) == 2
    assert "no plan file in" in capsys.readouterr().err


def test_what_a_run_started_is_gone_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that hangs, with a process of its own that ignores signals."""
    ignores = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); time.sleep(600)"
    )
    run = (
        f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {ignores!r}]); "
        "open('child', 'w').write(str(p.pid)); time.sleep(600)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan_try, "RUN", run)
    child = tmp_path / "child"
    for limit_s in (2.0, 10.0, 50.0, 250.0):  # a busy machine may take longer to start them
        done = attempt(tmp_path / "plan.toml", steps=8, limit_s=limit_s)
        assert (done.outcome, done.measurement) == ("timed out", None) and limit_s <= done.wall_s
        if child.exists() and child.read_text():
            break
    number = int(child.read_text())
    until = time.monotonic() + 300
    while _lives(number) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _lives(number)


def _lives(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def refused(on: str, program: str = "gnomon") -> str:
    with pytest.raises((InputError, PlanError)) as caught:
        check_try(PlanOptions(model="gpt2", on=on), parse_cluster(on), stack(program))
    return str(caught.value)


def test_machines_that_are_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_try, "find_spec", lambda name: find_spec("json"))
    monkeypatch.setattr(plan_try, "_gpus", lambda: 0)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert "4x8xh100-sxm has 32 GPUs where torch sees 0; plan for it with --on local" in refused("4x8xh100-sxm")
    assert "tpu devices, which it does not drive" in refused("2xtpu-v5p")
    assert "has 8 processes where this has 4 cores" in refused("1x8xcpu-process")
    assert "not with megatron-lm; leave --stack out" in refused("1x2xcpu-process", "megatron-lm")
    other = tmp_path / "other.toml"
    schema.save_file(measured_cluster(replace(MEASURED, host="elsewhere"), 16 << 30), other)
    assert "was measured on elsewhere" in refused(str(other))
    monkeypatch.setattr(plan_try, "_gpus", lambda: 8)
    check_try(PlanOptions(model="gpt2", on="8xh100-sxm"), parse_cluster("1x8xh100-sxm"), stack("gnomon"))
    assert "has 16 GPUs where torch sees 8" in refused("2x8xh100-sxm")


def test_mistakes(tells: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in (
        (("--try", "0"), "is not between 1 and 50"),
        (("--try", "2", "--try-steps", "-1"), "is not between 1 and 1000"),
        (("--try", "2", "--try-timeout", "10"), "bare '10'"),
        (("--try", "2", "--try-timeout", "0s"), "no plan runs in no time"),
        (("--try", "2", "--on", "1x1xh100-sxm+1x1xa100-sxm-80gb"), "--try is for equal devices"),
        (("--try", "2", "--pareto"), "--try runs the best plans of one search"),
        (("--try", "2", "--try-dir", "story.json"), "cannot write to 'story.json': 'story.json' is no folder"),
        (("--try", "2", "--stack", "nanotron"), "not with nanotron"),
    ):
        story(0.5, 0.5)
        assert main(in_place([*WORDS, *FP32], *words)) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and err.count("\n") == 1
    monkeypatch.setattr(plan_try, "find_spec", lambda name: None)
    assert main([*WORDS, *FP32, "--try", "2"]) == 2
    assert "pip install gnomon[torch]" in capsys.readouterr().err

"""What every command refuses before it works: numbers out of range, and files that cannot be read or written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import process_time
from unittest.mock import patch

import pytest

from gnomon.cli import main
from gnomon.cli.values import no_folder, not_writable

ON = ("--on", "1x2xa100-sxm-80gb")
PREDICT = ("predict", "llama-tiny", *ON)
PLAN = ("plan", "llama-tiny", *ON, "--global-batch", "8", "--seq-len", "64")
NO_COUNTS = ("-1", "0", "nan", "1e400", "inf", "1000000000000000000000", "", "x", "1.5")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what is no input: nothing, noise, a folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "empty.toml", "empty.json", "empty.csv"):
        (tmp_path / name).touch()
    for name in ("noise", "noise.toml", "noise.json", "noise.csv"):
        (tmp_path / name).write_bytes(bytes(range(256)) * 20)
    (tmp_path / "folder").mkdir()
    yield tmp_path
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "something was left behind"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one message of a command that ends with status 2 and prints nothing else."""
    status = main(words)
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), (words, status, out[:200], err)
    assert err.startswith("gnomon") and "mistake in Gnomon" not in err and "Traceback" not in err
    return err


COUNTS = [
    *(
        (PREDICT, name)
        for name in ("--global-batch", "--micro-batch-size", "--seq-len", "--tp", "--pp", "--cp", "--ep")
    ),
    *((PREDICT, name) for name in ("--dp-shard", "--dp-replicate", "--vpp")),
    *((PLAN, name) for name in ("--top", "--longest", "--tp", "--vpp", "--max-devices")),
    *((("run", "plan.toml"), name) for name in ("--steps", "--checkpoint-every")),
    *((("calibrate",), name) for name in ("--processes", "--seconds")),
]


@pytest.mark.parametrize(("words", "option"), COUNTS)
def test_counts(words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in NO_COUNTS:
        err = refused(capsys, *words, f"{option}={value}")
        assert f"argument {option}: " in err and err.count("\n") == 1 and f"see gnomon {words[0]} --help" in err


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-inf", "1e400", "", "x"])
def test_a_learning_rate_is_a_finite_number_above_0(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --lr: " in refused(capsys, "run", "plan.toml", f"--lr={value}")


@pytest.mark.parametrize("value", ["-1", "nan", "1e400", "4294967296", "x"])
def test_a_seed_is_of_32_bits(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "argument --seed: " in refused(capsys, "run", "plan.toml", f"--seed={value}")


@pytest.mark.parametrize("value", ["-1", "nan", "1e400", "1GiB ", "0", "", "1e400GiB", "1e30GiB", "-1GiB", "x"])
def test_quantities(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    if value.strip() != "1GiB":
        assert "--memory" in refused(capsys, *PLAN, f"--memory={value}")
    assert "--max-step" in refused(capsys, *PLAN, f"--max-step={value}")


@pytest.mark.parametrize("option", ["--global-batch", "--micro-batch-size"])
def test_batches_beyond_any_machine(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "over the limit of 10,000,000" in refused(capsys, *PREDICT, f"{option}=999999999")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--global-batch 1048576 --seq-len 8192", "if 1,048,576 are tokens, write --tokens-per-batch 1048576"),
        ("--global-batch 1048576", "4,294,967,296 tokens a step (1,048,576 sequences of 4,096), over the limit of"),
        ("--tokens-per-batch 1T", "over the limit of 268,435,456 tokens; give those of one optimizer step, not of the"),
        ("--global-batch 1048576 --seq-len 256 --zero 3", "layer by layer (ZeRO 3, or an update on the host) are"),
    ],
)
def test_steps_whose_prediction_would_take_minutes(more: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before the work: tokens where sequences are asked for, and more rows than are played."""
    began = process_time()
    asked = ("predict", "llama-3.1-8b", "--on", "4x8xh100-sxm")
    assert message in refused(capsys, *asked, *more.split())
    if "--zero" not in more:
        for command in ("plan", "fit"):
            assert message in refused(capsys, command, *asked[1:], *more.split())
    assert process_time() - began < 5


def test_more_processes_than_cores_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not between 1 and 256" in refused(capsys, "calibrate", "--processes=9999")
    with patch("os.cpu_count", return_value=2), patch("gnomon.cli.calibrate._runtime", return_value=(None,) * 4):
        err = refused(capsys, "calibrate", "--processes=3", "-o", "local.toml")
    assert "this machine has 2 cores; measure 2 processes or fewer" in err


WRITES = [
    *((PREDICT, name) for name in ("--html", "--trace", "--timeline")),
    (PLAN, "-o"),
    ((*PLAN, "--pareto"), "--html"),
    (("run", "plan.toml"), "--timeline"),
    (("report", "a.timeline"), "-o"),
    (("report", "a.timeline"), "--trace"),
    (("export", "plan.toml", "--to", "megatron"), "-o"),
    (("calibrate", "--from", "runs.csv"), "-o"),
]


@pytest.mark.parametrize(("words", "option"), WRITES)
def test_what_cannot_be_written_is_said_first(
    words: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that these commands read is there: that the place to write is looked at first is what the error shows."""
    for place in ("folder", "nowhere/x", "/proc/x", "empty/x", "/"):
        assert "cannot write" in refused(capsys, *words, option, place)
    if words[0] != "calibrate":
        assert "the name is empty" in refused(capsys, *words, option, "")


def test_a_check_leaves_what_is_there_and_makes_nothing(folder: Path) -> None:
    (folder / "mine").write_text("kept")
    assert not_writable(folder / "mine") == "" == not_writable(folder / "new") == not_writable(Path(os.devnull))
    assert (folder / "mine").read_text() == "kept" and not (folder / "new").exists()
    assert no_folder(folder / "new" / "deep") == "" and not (folder / "new").exists()
    assert "is no folder" in no_folder(folder / "mine" / "deep")


def test_a_device_is_written_to_and_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PREDICT, "--timeline", os.devnull]) == 0
    assert not Path(os.devnull).is_file()
    capsys.readouterr()


READS = [
    ("predict", "FILE", *ON),
    ("predict", "--plan", "FILE"),
    (*PREDICT, "--stack", "FILE"),
    ("predict", "llama-tiny", "--on", "FILE"),
    *(("predict", "--from", name, "FILE", *ON, "--micro-batch-size=1") for name in ("megatron", "torchtitan")),
    *(("predict", "--from", name, "FILE", *ON, "--micro-batch-size=1") for name in ("deepspeed", "nanotron")),
    ("plan", "FILE", *ON, "--global-batch=8"),
    ("explain", "FILE", *ON),
    ("run", "FILE"),
    ("export", "FILE", "--to", "megatron"),
    ("compare", "FILE", "FILE"),
    ("report", "FILE", "-o", "report.html"),
    ("validate", "FILE"),
    ("calibrate", "--from", "FILE", "-o", "own.toml"),
]


@pytest.mark.parametrize("words", READS, ids=" ".join)
def test_what_cannot_be_read(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    for file in ("folder", "empty.toml", "empty.json", "empty.csv", "noise.toml", "noise.json", "noise.csv", "nothing"):
        err = refused(capsys, *(file if word == "FILE" else word for word in words))
        assert Path(file).stem in err or (file == "empty.toml" and "give --on" in err)  # an empty plan is a plan


@pytest.mark.parametrize("words", [(*PREDICT, "--stack="), (*PLAN, "--stack="), (*PLAN, "--memory=")])
def test_an_empty_value_is_not_taken_for_none(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert words[-1].rstrip("=") in refused(capsys, *words)


PLAN_FILE = """schema = "gnomon.planfile/1"
model = "llama-tiny"
on = "1x2xa100-sxm-80gb"
[workload]
global_batch_size = 4
seq_len = 64
[plan]
mesh = {dp_shard = 2}
"""

ASKED = [
    ("plan p.toml --on 1x2xa100-sxm-80gb --global-batch 4", "is no model: give a name"),
    ("plan llama-tiny --on 1x2xv100-sxm-32gb --global-batch 4 --precision bf16", "use --precision fp16 or fp32"),
    ("plan llama-tiny --on 1x2xh101 --global-batch 4", "did you mean 'h100-sxm-80gb'"),
    (
        "plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --stack megatron-lm --schedule v_half",
        "runs only one_f_one_b, interleaved_one_f_one_b; ask",
    ),
    ("plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --stack megatron-lm --zero 2", "runs only ZeRO 0, 1; ask for"),
    ("plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --allow fp8 --no-refine", "--no-refine leaves out"),
    (
        "plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --refine --no-refine",
        "--refine/--no-refine: it is given twice",
    ),
    ("plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --try 2", "--try"),
    ("plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --fix order=tp,pp", "must name each of pp, dp_replicate"),
    ("explain spoilt.toml", "cluster '1x4xa100-sxm-80gb' has 4"),
    ("explain plan-of-gpt2.toml", "the longest legal seq_len is 1024"),
    ("validate header.csv", "has no rows below its header"),
    ("report step.timeline --plan stack.toml", "is no plan file: its header is 'gnomon.stack/2'"),
    ("compare step.timeline p.toml", "expected 'gnomon.timeline/1' in the first line"),
    ("calibrate --from p.toml", "the plan file does not say what was measured"),
    ("export p.toml --to slurm", "no export to 'slurm'; known: accelerate"),
    ("predict llama-tiny --on 1x2xh100-sxm --schedule 1F1B", "'1F1B' (here it is 'one_f_one_b'); known: dualpipe_v"),
    ("predict llama-tiny --on 1x2xh100-sxm --schedule zb-h1", "(here it is 'zero_bubble_h1')"),
    ("predict llama-tiny --on 1x2xh100-sxm --seq-len 0.5k", "'0.5k' is not a whole number, as in 8192 or 8k"),
    ("predict llama-tiny --on 1x2xh100-sxm --seq-len 0k", "0 is not between 1 and"),
    ("plan llama-tiny --on 1x2xh100-sxm --global-batch 4 --fix foo=3", "--fix 'foo=3' names no field; there are"),
    ("predict llama-tiny --on 1x2xh100-sxm --router zipf:1", "--router says how tokens spread over experts, and llama"),
    ("plan gpt2 --on 1x2xh100-sxm --global-batch 4 --pad-experts", "--pad-experts says how tokens spread over experts"),
    ("predict mixtral-8x7b --on 4x8xh100-sxm --capacity 0", "--capacity 0 must be at least 1"),
    ("run p.toml --steps 0", "argument --steps: 0 is not between 1"),
]
"""What a careless or hostile user asks, and what the one message says."""


@pytest.mark.parametrize(("words", "message"), ASKED)
def test_one_clear_answer(words: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "p.toml").write_text(PLAN_FILE)
    (folder / "spoilt.toml").write_text(PLAN_FILE.replace("1x2x", "1x4x"))
    (folder / "plan-of-gpt2.toml").write_text(PLAN_FILE.replace("llama-tiny", "gpt2").replace("64", "2048"))
    (folder / "header.csv").write_text("id,model,on,seq_len,global_batch,step_s\n")
    (folder / "stack.toml").write_text('schema = "gnomon.stack/2"\nname = "mine"\nversion = "1"\n')
    assert main(["predict", "--plan", "p.toml", "--timeline", "step.timeline"]) == 0
    capsys.readouterr()
    assert message in refused(capsys, *words.split())

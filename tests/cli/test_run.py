"""What `gnomon run` refuses before a process is started, with torch or without. Running is in tests/runtime."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from shlex import split

import pytest

from gnomon import schema
from gnomon.cli import main
from gnomon.cli.checkpoint import plain
from gnomon.cli.options.flags import changed_options, flags, parse_options
from gnomon.cli.options.run import RunOptions
from gnomon.cli.run import _lengths, _resume_command, _schedule, uncalibrated
from gnomon.cli.values import new_file, some
from gnomon.errors import InputError
from gnomon.hardware import parse_cluster
from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Precision, Schedule, Workload, save_plan_file

FILE = PlanFile(
    model="llama-tiny",
    on="2xcpu-process",
    workload=Workload(global_batch_size=4, seq_len=64),
    plan=Plan(
        mesh=Mesh(dp_replicate=2),
        schedule=Schedule(micro_batch_size=1),
        precision=Precision(param="fp32", compute="fp32", master="none"),
    ),
)


def refused(file: PlanFile | Plan, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = folder / "plan.toml"
    schema.save_file(file, path)
    status = main(["run", str(path), "--steps", "1"])
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    return err


def test_without_torch_it_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gnomon.cli.missing.find_spec", lambda name: None)
    err = refused(FILE, tmp_path, capsys)
    assert err == "gnomon: running a plan needs torch, which is not installed: pip install gnomon[torch]\n"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (FILE.plan, "does not say which model, machines and batch it is for"),
        (replace(FILE, model="nemotron-h-8b"), "the runtime does not run 'nemotron-h-8b'"),
        (replace(FILE, model="llama-teeny"), "unknown model 'llama-teeny' (did you mean 'llama-tiny'"),
        (replace(FILE, on="2xtpu-v5p"), "the runtime does not drive"),
        (replace(FILE, model="llama-3.1-405b"), "and this machine has"),
        (replace(FILE, plan=Plan(mesh=Mesh(tp=3))), "3"),
    ],
)
def test_what_cannot_run_is_said(
    file: PlanFile | Plan,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gnomon.cli.missing.find_spec", lambda name: find_spec("json"))
    assert message in refused(file, tmp_path, capsys)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (FILE.plan, "the plan has 2 ranks, which are no use to 3 processes"),
        (
            replace(FILE.plan, mesh=Mesh(dp_replicate=2, tp=2)),
            "easyscale cannot be used in this plan: its ranks do not",
        ),
        (
            replace(FILE.plan, mesh=Mesh(dp_shard=4), optimizer=Optimizer(zero=2)),
            "easyscale cannot be used in this plan: ZeRO divides state among ranks",
        ),
    ],
)
def test_processes_that_a_plan_cannot_have_are_said(
    plan: Plan, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan_file(replace(FILE, plan=plan), tmp_path / "plan.toml")
    assert main(["run", str(tmp_path / "plan.toml"), "--processes", "3"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--determinism", "D2"), ("--follow-speed",), ("--decisions", "new")])
def test_what_is_for_logical_workers_is_refused_without_them(
    option: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_plan_file(FILE, tmp_path / "plan.toml")
    assert main(["run", str(tmp_path / "plan.toml"), *option]) == 2
    assert f"{option[0]} " in (said := capsys.readouterr().err) and "needs --processes N" in said


@pytest.mark.parametrize("option", ["--data", "--tokenizer"])
def test_a_file_that_is_not_there_is_said_before_torch_is_asked_for(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gnomon.cli.run.need_torch", lambda _: pytest.fail("torch is asked for"))
    save_plan_file(FILE, tmp_path / "plan.toml")
    assert main(["run", str(tmp_path / "plan.toml"), option, "nosuch"]) == 2
    assert "gnomon: 'nosuch' does not exist; name a folder or file " in capsys.readouterr().err


def test_a_config_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt3", "n_embd": 64}))
    save_plan_file(replace(FILE, model=str(tmp_path / "config.json")), tmp_path / "plan.toml")
    assert main(["run", str(tmp_path / "plan.toml"), "--steps", "1"]) == 2
    assert "gpt3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "rates"),
    [
        ("--steps 10", {0: 1.0, 9: 1.0}),
        ("--steps 10 --warmup-steps 4", {0: 0.25, 3: 1.0, 9: 1.0}),
        (
            "--steps 10 --lr 0.01 --min-lr 0.001 --lr-schedule cosine --warmup-steps 2",
            {0: 0.5, 2: 1.0, 6: 0.55, 10: 0.1},
        ),
        ("--steps 20 --lr-schedule wsd", {0: 1.0, 18: 1.0, 19: 0.5, 20: 0.0}),
        ("--steps 4 --lr-schedule linear", {1: 0.75, 3: 0.25}),
    ],
)
def test_a_schedule_of_the_learning_rate(words: str, rates: dict[int, float]) -> None:
    """The factor of a step by hand."""
    pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
    options = parse_options(RunOptions, ["plan.toml", *words.split()])
    result = _schedule(options)
    assert {step: pytest.approx(result.factor(step)) for step in rates} == rates


def test_the_command_that_resumes_has_every_option_of_the_run(tmp_path: Path) -> None:
    """Every option of `gnomon run` is given a value that is not its default: none is left out of what is printed."""
    texts = {
        "grace": "7.5",
        "lr": "2e-05",
        "min_lr": "1e-06",
        "meet_within": "3.5",
        "data": "-a b",
        "plan": "a plan.toml",
    }
    for name, flag in flags(RunOptions).items():
        if flag.settings.get("choices"):
            default = flag.settings.get("default")
            texts[name] = next(choice for choice in flag.settings["choices"] if choice != default)
        texts.setdefault(name, str(tmp_path / name) if flag.settings.get("type") in (str, some, new_file) else "3")
    words = [texts["plan"]]
    for name, flag in flags(RunOptions).items():
        words += [f"{flag.names[0]}={texts[name]}"] if flag.names and not flag.is_switch else list(flag.names)
    options = parse_options(RunOptions, words)
    assert set(changed_options(options)) == set(flags(RunOptions)), "the test gives each option"
    program, command, *printed = split(_resume_command(options))
    assert (program, command) == ("gnomon", "run")
    assert changed_options(parse_options(RunOptions, printed)) == changed_options(options)
    assert changed_options(
        parse_options(RunOptions, split(_resume_command(parse_options(RunOptions, ["p.toml"])))[2:])
    ) == {
        "plan": "p.toml",
        "resume": True,
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--min-lr 0.0001", "is what the learning rate"),
        ("--lr-schedule cosine --min-lr 0.1", "a rate below --lr"),
        ("--steps 10 --lr-schedule wsd --warmup-steps 10", "leave none of 10 steps"),
    ],
)
def test_schedules_that_cannot_be(words: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        _schedule(parse_options(RunOptions, ["plan.toml", *words.split()]))


def test_a_machine_that_nobody_measured_is_said_to_be_a_guess(tmp_path: Path) -> None:
    guessed = parse_cluster("local:2")
    [note] = uncalibrated(guessed, "local:2")
    assert "`gnomon calibrate` measures it" in note
    assert uncalibrated(parse_cluster("1x8xh100-sxm"), "1x8xh100-sxm") == ()


def test_an_identity_is_written_for_people() -> None:
    """What a checkpoint goes on from is kept as Python writes it, and shown otherwise."""
    text = repr(Precision(param="fp32", master="none"))
    assert plain(text).startswith("param fp32, compute bf16, ") and plain(text).endswith("fp8 none")
    assert plain("X(lr=0.1, rate=Y(shape='wsd', on=True), betas=(0.9, 0.95))") == (
        "lr 0.1, rate (shape wsd, on yes), betas 0.9 and 0.95"
    )
    assert plain("small bb13abbb") == "small bb13abbb" and plain("4 sequences of 32") == "4 sequences of 32"


def test_sequences_beyond_the_models_positions_are_said_before_training(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 128}))
    for lengths, said in (((500, 8), 1), ((128, 8), 0)):
        file = PlanFile(model=str(config), on="local", plan=Plan(), workload=Workload(lengths=lengths))
        lines = _lengths(file, None, None)  # type: ignore[arg-type]
        assert len(lines) == said and all("longer than the 128 positions" in line for line in lines)

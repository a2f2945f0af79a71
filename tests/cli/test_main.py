"""The command line: statuses, text and JSON, files, and what happens to mistakes."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gnomon import __version__, schema
from gnomon.cli import main, terminal
from gnomon.cli.options import COMMANDS
from gnomon.errors import PlanError
from gnomon.plans import Mesh, Optimizer, Plan, PlanFile, Schedule, Workload, save_plan_file
from gnomon.prediction import predict

LLAMA = ["predict", "llama-3.1-8b", "--on", "4x8xh100-sxm", "--global-batch", "128", "--seq-len", "4096"]
HF_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(words)
    out, err = capsys.readouterr()
    return status, out, err


def fresh(words: Sequence[str], *, code: str = "") -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    program = f"import sys; from gnomon.cli import main; status = main({list(words)!r}); {code}; sys.exit(status)"
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "PYTHONPATH": source}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=600)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "--version") == (0, f"gnomon {__version__}\n", "")
    for words in (("--help",), *((name, "--help") for name in COMMANDS)):
        status, out, _ = ask(capsys, *words)
        assert status == 0
        assert "gnomon" in out
        assert max(len(line) for line in out.splitlines()) <= 80


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["predict", "x", "--tp", "y"]])
def test_help_and_usage_load_nothing_heavy(words: list[str]) -> None:
    done = fresh(words, code="print(sorted({'numpy', 'gnomon.models', 'gnomon.plans'} & set(sys.modules)))")
    assert done.stdout.splitlines()[-1] == "[]"


def test_examples_of_the_help_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, "--help")
    examples = [line.split()[1:] for line in out.splitlines() if line.startswith("  gnomon ")]
    assert len(examples) == 3
    for words in examples:
        status, _, err = ask(capsys, *words)
        assert (status, err) == (0, ""), words


def test_a_sequence_is_no_longer_than_learned_positions_unless_asked(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "predict", "gpt2", "--on", "a100-sxm-40gb")
    assert status == 0 and "sequence length not given: 1024 tokens" in out
    status, _, err = ask(capsys, "predict", "gpt2", "--on", "a100-sxm-40gb", "--seq-len", "4096")
    assert status == 2 and "the longest legal seq_len is 1024" in err


def test_tokens_of_an_image_follow_from_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    one = "vit-b-16", "--on", "a100-sxm-40gb", "--global-batch", "4"
    status, out, _ = ask(capsys, "predict", *one)
    assert status == 0 and "1 microbatch of 4 x 197 tokens" in out and "samples/s/device" in out
    status, out, _ = ask(capsys, "predict", "vit-b-16", "--on", "1x8xh100-sxm", "--global-batch", "2048", "--json")
    document = json.loads(out)  # of one sample each, the device waits for the host: 0.2 % MFU
    assert document["plan"]["schedule"]["micro_batch_size"] == 64 and document["mfu"] > 0.1
    status, out, _ = ask(capsys, "plan", *one)
    assert status == 0 and "x 197 tokens" in out and "a sample of the model has 197 tokens" in out
    for more in (["--longest", "64"], ["--vary", "seq_len=64,128"]):
        status, _, err = ask(capsys, "plan", *one, *more)
        assert status == 2 and "is for models of sequences, and vit-b-16 has 197 tokens a sample" in err


def test_the_package_is_a_program() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    words = [sys.executable, "-m", "gnomon", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"gnomon {__version__}\n")


def test_prediction_fits_80_columns_without_colour(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = ask(capsys, *LLAMA, "--zero", "3")
    assert (status, err) == (0, "")
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\x1b" not in out
    assert out.startswith("llama-3.1-8b on 4x8xh100-sxm\n")
    assert "\nfits: " in out
    assert "dp_shard=32; ZeRO 3" in out


@pytest.mark.parametrize(("columns", "least", "most"), [(60, 70, 80), (100, 85, 100), (300, 100, 120)])
def test_a_wide_terminal_is_used_up_to_120_columns(
    columns: int, least: int, most: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    status, out, _ = ask(capsys, *LLAMA, "--zero", "3")
    assert status == 0 and least < max(len(line) for line in out.splitlines()) <= most


def test_many_sources_of_a_fit_are_counted_and_few_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    every = ask(capsys, *LLAMA, "--zero", "3", "--stack", "torchtitan")[1]
    few = ask(capsys, *LLAMA, "--zero", "1", "--stack", "megatron-lm")[1]
    assert re.search(r"\d+ runs\s+of \d+ sources", every) and "mosaic-llmfoundry" not in every
    assert re.search(r"\d+ runs of\s+korthikanti-2022, ", few)


def test_a_long_message_breaks_between_words_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "gnomon: unknown device 'h100' (did you mean 'h100-sxm-80gb', 'h100-sxm-96gb', 'h100-pcie-80gb'?)"
    out = io.StringIO()
    assert terminal.broken(message, out) == message
    monkeypatch.setattr(out, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")
    lines = terminal.broken(message, out).split("\n")
    assert len(lines) == 3 and all(len(line) <= 50 for line in lines) and " ".join(lines) == message


def test_gpus_without_bf16_are_predicted_and_planned_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    """What runs on V100 and T4 is mixed precision in fp16."""
    small = ("llama-tiny", "--on", "1x2xv100-sxm-16gb", "--seq-len", "128", "--global-batch", "4")
    for command in ("predict", "plan"):
        status, out, _ = ask(capsys, command, *small)
        assert status == 0 and "precision not given: fp16, as the devices have no bf16 (--precision)" in out
    asked = ["predict", *small, "--json"]
    assumed, stated = (json.loads(ask(capsys, *asked, *more)[1]) for more in ((), ("--precision", "fp16")))
    assert assumed["step_s"] == stated["step_s"]


def test_devices_without_bf16_are_predicted_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "predict", "llama-tiny", "--on", "1xcpu-process", "--seq-len", "128")
    assert status == 0 and "precision not given: fp32, as the devices have no bf16 (--precision)" in out
    status, _, err = ask(capsys, "predict", "llama-tiny", "--on", "1xcpu-process", "--precision", "bf16")
    assert status == 2 and "no peak for 'bf16'" in err


def test_not_fitting_is_status_1_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "predict", "llama-3.1-8b", "--on", "8xh100-sxm", "--seq-len", "4096")
    assert status == 1
    assert "\ndoes not fit: " in out
    assert "what would fit, fastest first" in out
    assert "global batch not given: 8" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--stack megatron-lm --zero 3", "megatron-lm does not run this plan: ZeRO 3 (it has 0, 1)"),
        ("--stack megatron-lm --pp 2 --schedule zero_bubble_h1", "megatron-lm does not run this plan: schedule zero_"),
        ("--stack deepspeed --pp 2 --vpp 2", "deepspeed does not run this plan: schedule interleaved_one_f_one_b"),
        ("--stack nanotron --recompute selective", "nanotron does not run this plan: recompute selective"),
    ],
)
def test_what_a_program_cannot_run_is_said_above_the_numbers(
    words: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = f"predict llama-tiny --on 1x8xh100-sxm --global-batch 32 --seq-len 64 {words}".split()
    main(asked)
    text = capsys.readouterr().out
    above, _, below = text.partition("\nstep ")
    assert message in " ".join(above.split()) and "by its record" not in below
    main([*asked, "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["beyond_stack"] and all(
        any(entry in line for line in document["assumptions"]) for entry in document["beyond_stack"]
    )


def test_a_plan_beyond_its_program_is_advised_back_and_no_further(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of what a program does not run nothing more is proposed, by `predict` and by `explain`."""
    plan = Plan(
        mesh=Mesh(pp=2, dp_shard=8),
        schedule=Schedule(name="interleaved_one_f_one_b", virtual_stages=2, micro_batch_size=1),
    )
    work = Workload(global_batch_size=64, seq_len=4096)
    file = PlanFile(model="llama-3.1-8b", on="2x8xh100-sxm", stack="deepspeed", workload=work, plan=plan)
    path = tmp_path / "plan.toml"
    path.write_text(schema.dump(file), encoding="utf-8")
    assert main(["predict", "--plan", str(path), "--json"]) == 1
    advised = [load["change"] for load in json.loads(capsys.readouterr().out)["advice"]]
    assert "ZeRO stage 1" in advised and not any("ZeRO stage 2" in entry or "3" in entry for entry in advised)
    assert main(["explain", str(path), "--json"]) == 1
    reasons = json.loads(capsys.readouterr().out)
    changes = [reason["change"] for reason in reasons["changes"]]
    assert reasons["beyond_stack"] and "ZeRO 0 -> 1" in changes and "schedule one_f_one_b" in changes
    assert not {"ZeRO 0 -> 2", "ZeRO 0 -> 3", "cp 1 -> 2", "schedule zero_bubble_v"} & {*changes}


def test_json_is_the_same_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, *LLAMA, "--zero", "3", "--json")
    document = json.loads(out)
    assert status == 0
    assert document["schema"] == "gnomon.prediction/1"
    assert document["fits"] is True
    assert document["tokens_per_s_per_device"] == pytest.approx(128 * 4096 / 32 / document["step_s"])
    assert sum(document["breakdown_s"].values()) == pytest.approx(document["step_s"])
    assert any("micro batch not given" in line for line in document["assumptions"])


def test_plan_file_and_options_that_change_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    plan = Plan(mesh=Mesh(dp_shard=16, tp=2), optimizer=Optimizer(zero=1), schedule=Schedule(micro_batch_size=2))
    path.write_text(schema.dump(plan))
    status, out, _ = ask(capsys, *LLAMA, "--plan", str(path))
    assert status == 0
    assert "dp_shard=16 x tp=2; ZeRO 1; one_f_one_b, 4 microbatches of 2 x 4096" in out
    status, out, _ = ask(capsys, *LLAMA, "--plan", str(path), "--tp", "4", "--zero", "3")
    assert "dp_shard=8 x tp=4; ZeRO 3" in out


def test_a_plan_file_says_model_machines_and_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    plan = Plan(mesh=Mesh(dp_shard=16, tp=2), optimizer=Optimizer(zero=1), schedule=Schedule(micro_batch_size=2))
    work = Workload(global_batch_size=128, seq_len=4096)
    save_plan_file(
        PlanFile(model="llama-3.1-8b", on="4x8xh100-sxm", stack="torchtitan", workload=work, plan=plan), path
    )
    status, out, _ = ask(capsys, "predict", "--plan", str(path), "--json")
    words = ["--zero", "1", "--tp", "2", "--micro-batch-size", "2", "--stack", "torchtitan", "--json"]
    assert (status, out) == ask(capsys, *LLAMA, *words)[:2]
    assert (status, out) == ask(capsys, "predict", str(path), "--json")[:2]
    _, out, _ = ask(capsys, "predict", "--plan", str(path), "--global-batch", "64", "--on", "2x8xh100-sxm", "--tp", "1")
    assert out.startswith("llama-3.1-8b on 2x8xh100-sxm\n")
    assert "dp_shard=16; ZeRO 1; one_f_one_b, 2 microbatches of 2 x 4096" in out


def test_a_length_may_be_given_in_k(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("predict", "llama-tiny", "--on", "1x2xa100-sxm-80gb", "--json", "--seq-len")
    assert ask(capsys, *asked, "2k") == ask(capsys, *asked, "2048")


def test_virtual_stages_interleave(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, *LLAMA, "--pp", "4", "--vpp", "2", "--zero", "1")
    assert "interleaved_one_f_one_b, 2 virtual stages, 16 microbatches" in " ".join(out.split())


def test_hugging_face_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    for name in (folder, folder / "config.json"):
        status, out, err = ask(capsys, "predict", str(name), "--on", "1xa100-sxm-80gb", "--seq-len", "1024")
        assert (status, err) == (0, "")
        assert out.startswith("my-model on 1xa100-sxm-80gb\n")


@pytest.mark.parametrize(
    ("config", "seq_len", "said"),
    [
        ({}, 2048, 0),
        ({}, 4096, 2048),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 8192, 0),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 16384, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}, 4096, 2048),
    ],
)
def test_sequences_beyond_the_models_positions_are_said(
    config: dict[str, object], seq_len: int, said: int, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**HF_CONFIG, **config}))
    for command in (("predict", str(path)), ("plan", str(path), "--global-batch", "2")):
        status, out, err = ask(capsys, *command, "--on", "1x2xa100-sxm-80gb", "--seq-len", str(seq_len), "--json")
        assert (status, err) == (0, "")
        lines = [line for line in json.loads(out)["assumptions"] if "are longer than the" in line]
        wanted = f"sequences of {seq_len:,} tokens are longer than the {said:,} positions that "
        assert [line.startswith(wanted) for line in lines] == [True] * bool(said)


def test_positions_of_models_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--on", "1x8xh100-sxm", "--zero", "3", "--recompute", "full", "--seq-len", "32k", "--json")
    for name, said in (("meta-llama/Llama-2-7b-hf", True), ("llama-2-7b+lora8", True), ("llama-3.1-8b", False)):
        out = json.loads(ask(capsys, "predict", name, *asked)[1])
        assert any("are longer than the 4,096 positions" in line for line in out["assumptions"]) == said


BRIDGE = str(Path(__file__).parents[1] / "formats" / "fixtures" / "megatron-bridge" / "llama3_70b.txt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict", "lama-3.1-8b", "--on", "8xh100-sxm"], "unknown model 'lama-3.1-8b' (did you mean 'llama-3.1-8b'"),
        (["predict", "missing.toml"], "cannot read 'missing.toml': there is no such file"),
        (["predict", "missing.yaml", "--on", "8xh100"], "cannot read 'missing.yaml': there is no such file"),
        (["plan", "a/b/c", "--on", "8xh100", "--global-batch", "8"], "'a/b/c': there is no such file or folder"),
        (["fit", "none/x.json", "--on", "8xh100"], "there is no such file (nor a folder 'none')"),
        (["predict", "Qwen/Qwen9-7B", "--on", "8xh100"], "download its config.json: hf download Qwen/Qwen9-7B"),
        (["run", "Qwen/Qwen9-7B"], "Qwen/Qwen9-7B"),
        (["predict", "gpt2", "--on", "8xh10"], "did you mean 'h100-sxm-80gb'"),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--tp", "3"], "the nearest product that does is 2"),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--schedule", "gpip"], "did you mean 'gpipe'"),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--stack", "megatron-ml"], "did you mean"),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--from", "jax", "x"], "unknown format 'jax'"),
        (
            ["predict", "--on", "8xh100-sxm", "--from", "megatron-bridge", BRIDGE],
            "do not say the model; give --model NAME",
        ),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--plan", "none.toml"], "none.toml"),
        (["predict", "--on", "8xh100-sxm"], "no model; give a name"),
        (["predict", "/none/config.json", "--on", "8xh100-sxm"], "cannot read"),
        (["catalogue", "devices", "h101"], "unknown device 'h101'"),
        (["validate", "none.csv"], "cannot read 'none.csv'"),
        (["predict", "gpt2"], "no machines; give --on CLUSTER"),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--tp", "0"], "0 is not between 1 and"),
        (["predict", "gpt2", "--on", "8xh100-sxm", "--zero", "4"], "is none of 0, 1, 2, 3"),
        (["predikt"], "is none of predict, plan"),
    ],
)
def test_a_users_mistake_is_status_2_without_traceback(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = ask(capsys, *words)
    assert status == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_our_mistake_is_status_3(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> object:
        raise RuntimeError("a bug")

    monkeypatch.setattr("gnomon.cli.load_late", broken)
    status, _, err = ask(capsys, "catalogue", "devices")
    assert status == 3
    assert "RuntimeError: a bug" in err
    assert "Please report it with this line: gnomon catalogue devices" in err
    assert "Traceback" not in err
    monkeypatch.setenv("GNOMON_DEBUG", "1")
    assert "Traceback" in ask(capsys, "catalogue", "devices")[2]


def test_interrupted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(name: str) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("gnomon.cli.load_late", stopped)
    assert ask(capsys, "catalogue") == (130, "", "gnomon: interrupted\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    code = f'{sys.executable} -c \'import sys; from gnomon.cli import main; sys.exit(main(["catalogue", "devices"]))\''
    source = str(Path(__file__).parents[2] / "src")
    line = f"set -o pipefail; {code} | true"
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": source}, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_for_a_terminal_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen, pipe = Terminal(), io.StringIO()
    terminal.print_lines(["fits: 1 of 2 GiB", "other"], screen)
    terminal.print_lines(["fits: 1 of 2 GiB"], pipe)
    assert screen.getvalue() == "\x1b[32mfits:\x1b[0m 1 of 2 GiB\nother\n"
    assert pipe.getvalue() == "fits: 1 of 2 GiB\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.coloured(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.coloured(Terminal())


def test_progress_waits_two_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = iter([0.0, 1.0, 2.5, 12.0])
    monkeypatch.setattr("gnomon.cli.terminal.time.monotonic", lambda: next(clock))
    progress = terminal.Progress("predicted", 1000)
    for done in (1, 2, 300):  # at 1 s too early, at 2.5 s and not on a terminal too soon, at 12 s said
        progress.show(done)
    progress.end()
    assert capsys.readouterr().err == "predicted 300 of 1,000\n"


def test_what_to_do_with_a_plan_file_is_said() -> None:
    assert terminal.next_steps("my plan.toml", "run") == (
        "written to my plan.toml",
        "next: gnomon explain 'my plan.toml', gnomon run 'my plan.toml'",
    )
    assert (
        terminal.next_steps("p.toml", "export")[1] == "next: gnomon explain p.toml, gnomon export p.toml --to PROGRAM"
    )
    assert terminal.next_steps("p.toml")[1] == "next: gnomon explain p.toml"


def test_a_device_stands_for_its_usual_node(capsys: pytest.CaptureFixture[str]) -> None:
    """As in `--on 32x8xh800`."""
    _, node, _ = ask(capsys, "catalogue", "clusters", "hgx-h800", "--json")
    assert json.loads(node)["device"]["name"] == "h800-sxm-80gb"
    assert ask(capsys, "catalogue", "clusters", "h800", "--json") == (0, node, "")


@pytest.mark.parametrize("whole", [True, False])
def test_a_plan_comes_through_a_pipe(whole: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, workload = Plan(mesh=Mesh(dp_shard=2)), Workload(global_batch_size=4, seq_len=64)
    text = schema.dump(PlanFile(model="llama-tiny", on="1x2xh100-sxm", workload=workload, plan=plan) if whole else plan)
    words = ("predict",) if whole else ("predict", "llama-tiny", "--on", "1x2xh100-sxm", "--seq-len", "64")
    (tmp_path / "plan.toml").write_text(text)
    status, message, _ = ask(capsys, *words, "--plan", str(tmp_path / "plan.toml"))
    assert status == 0
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    assert ask(capsys, *words, "--plan", f"/dev/fd/{read}") == (0, message, "")
    os.close(read)


@pytest.mark.parametrize("kind", ["devices", "clusters", "models", "stacks", "methods", "schedules"])
def test_catalogue(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = ask(capsys, "catalogue", kind)
    assert status == 0
    assert max(len(line) for line in out.splitlines()) <= 80
    status, everything, _ = ask(capsys, "catalogue", kind, "--json")
    entries = json.loads(everything)
    name = entries[0]["name"]
    status, shown, _ = ask(capsys, "catalogue", kind, name)
    assert status == 0 and max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"\{'|\['", shown), "values as Python writes them are for nobody"
    status, one, _ = ask(capsys, "catalogue", kind, name, "--json")
    assert json.loads(one) == entries[0]
    status, text, _ = ask(capsys, "catalogue", kind, name)
    assert status == 0
    assert name in text


def test_catalogue_counts_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = ask(capsys, "catalogue", "models")
    line = next(line for line in out.splitlines() if line.startswith("llama-3.1-8b "))
    assert line.split()[1:] == ["8,030,261,248", "8,030,261,248", "32"]
    line = next(line for line in out.splitlines() if line.startswith("qwen3-30b-a3b "))
    assert line.split()[1:] == ["30,532,122,624", "3,353,032,704", "48"]  # the 3.3B of its name
    names = [line.split()[0] for line in out.splitlines() if line.startswith("qwen3-")]
    assert names.index("qwen3-8b") < names.index("qwen3-14b")
    _, out, _ = ask(capsys, "catalogue")
    assert "models" in out and "stacks" in out


FIXTURES = Path(__file__).parents[1] / "formats" / "fixtures"


@pytest.mark.parametrize(
    ("program", "file", "words"),
    [
        ("megatron", "gpt3_175b.sh", ["--on", "128x8xa100-sxm-80gb"]),
        ("megatron-bridge", "llama3_70b.txt", ["llama-3.1-70b", "--on", "8x8xh100-sxm"]),
        ("torchtitan", "llama3_405b.toml", ["--on", "64x8xh100-sxm"]),
        ("nanotron", "tiny_llama.yaml", ["--on", "8xh100-sxm"]),
        ("deepspeed", "zero2_offload.json", ["llama-3.2-1b", "--on", "8xh100-sxm", "--seq-len", "2048"]),
        ("accelerate", "fsdp1.yaml", ["llama-3.2-1b", "--on", "8xh100-sxm", "--global-batch", "16"]),
    ],
)
def test_job_files_of_other_programs(
    program: str,
    file: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is read and predicted; the Megatron script takes its batch from the environment."""
    monkeypatch.setenv("BATCH", "1536")
    if program in ("nanotron", "accelerate"):
        pytest.importorskip("yaml")
    status, out, err = ask(capsys, "predict", *words, "--from", program, str(FIXTURES / program / file))
    assert status in (0, 1), err
    assert "assumed" in out


def test_the_precision_option_fills_what_a_file_leaves_to_its_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the dtypes only that: DeepSpeed's gradients stay in bf16, which Gnomon's own default has in fp32."""
    file = str(FIXTURES / "deepspeed" / "zero3_auto.json")
    words = ("predict", "llama-tiny", "--on", "8xh100-sxm", "--from", "deepspeed", file, "--micro-batch-size", "1")
    status, out, _ = ask(capsys, *words)
    assert status == 0 and "is left to the trainer: bf16 (--precision)" in " ".join(out.split())
    status, out, _ = ask(capsys, *words, "--precision", "bf16", "--json")
    assert status == 0 and json.loads(out)["plan"]["precision"]["grad"] == "bf16"
    status, out, _ = ask(capsys, *words, "--precision", "fp32", "--json")
    assert status == 0 and json.loads(out)["plan"]["precision"]["param"] == "fp32"


def test_a_job_file_is_recognised_and_what_it_leaves_open_is_given_as_its_message_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Types what each refusal says to type, until there is a prediction; notes, other devices and what is not known
    are in the output."""
    script = tmp_path / "pretrain.sh"
    network = "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --max-position-embeddings 512"
    script.write_text(
        f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {network} --seq-length $SEQ --micro-batch-size 1 \\\n"
        "  --tokenizer-type HuggingFaceTokenizer --bf16 --lr 1e-4 --rampup-batch-size 8 8 100 --magic-option 3 "
        "2>&1 | tee x"
    )
    words = ["predict", str(script), "--on", "8xh100-sxm"]
    typed = {"--set SEQ=": "--set SEQ=512", "--vocab-size": "--vocab-size 1000"}
    for message, advice in typed.items():
        status, _, err = ask(capsys, *words)
        assert status == 2 and message in err
        words += advice.split()
    status, out, _ = ask(capsys, *words, "--json")
    document = json.loads(out)
    assert status == 0 and "the file is for 16 devices, predicted here on 8 (--on)" in document["assumptions"]
    notes = "\n".join(document["notes"])
    assert "not predicted: magic_option = 3" in notes and "final global batch" in notes
    assert "no effect on time or memory: lr" in notes
    status, _, err = ask(capsys, *words, "--strict")
    assert status == 2 and "unknown field 'magic_option'" in err
    status, _, err = ask(capsys, "plan", str(script), "--on", "8xh100-sxm", "--global-batch", "8")
    assert status == 2 and "--global-batch does not go with a job file" in err and "(--set NAME=VALUE)" in err
    other = ("predict", str(script), "--on", "8xh100-sxm", "--set", "SEQ=512", "--model", "gpt2", "--json")
    assert json.loads(ask(capsys, *other)[1])["model"] == "gpt2"
    assert ask(capsys, "predict", "gpt2", "--on", "8xh100-sxm", "--set", "a=1")[0] == 2


def test_adapters_are_asked_for_by_options_or_by_the_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ("--on", "1x2xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "256", "--json")
    actual = [
        json.loads(ask(capsys, "predict", *words, *job)[1])
        for words in (("llama-tiny", "--lora-rank", "8", "--lora-base", "nf4"), ("llama-tiny+qlora8",))
    ]
    assert actual[0]["step_s"] == actual[1]["step_s"] and "parameters of adapters are trained" in actual[0]["notes"][0]
    path = tmp_path / "plan.toml"
    status, _, _ = ask(capsys, "plan", "llama-tiny", "--lora-rank", "8", *job[:-1], "-o", str(path))
    assert status == 0 and schema.load_file(PlanFile, path).model == "llama-tiny+lora8"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("llama-tiny", "--lora-targets", "q_proj"), "give --lora-rank"),
        (("llama-tiny+lora8", "--lora-rank", "8"), "a MODEL that has none"),
        (("llama-tiny", "--lora-rank", "8", "--lora-targets", "qproj"), "did you mean 'q_proj'"),
        (("llama-tiny+lora",), "MODEL+lora16"),
    ],
)
def test_adapters_that_cannot_be(words: Sequence[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = ask(capsys, "predict", *words, "--on", "1x2xa100-sxm-80gb", "--global-batch", "8")
    assert status == 2 and why in " ".join(err.split())


def test_an_encoder_takes_a_size_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["predict", "t5-base", "--on", "1x8xh100-sxm", "--json"]
    status, out, _ = ask(capsys, *asked)
    assert status == 0
    message = next(word for word in json.loads(out)["assumptions"] if "tokens of the encoder" in word)
    typed = re.findall(r"\((--size) (\S+)\)", message)[0]
    again = json.loads(ask(capsys, *asked, *typed)[1])
    assert again["step_s"] == json.loads(out)["step_s"]
    assert not any("tokens of the encoder" in word for word in again["assumptions"])
    short = json.loads(ask(capsys, *asked, "--size", "enc_seq=512")[1])
    assert short["workload"]["sizes"] == [["enc_seq", 512]]
    assert short["model_flops"] < again["model_flops"]


def test_the_advice_about_an_open_size_works_as_typed(capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=1))
    with pytest.raises(PlanError, match="leaves the size of 'enc_seq' open") as refused:
        predict("t5-base", "1x8xh100-sxm", plan, Workload(global_batch_size=8, seq_len=512))
    option, typed = re.findall(r"give (--size) (\S+),", str(refused.value))[0]
    assert ask(capsys, "predict", "t5-base", "--on", "1x8xh100-sxm", "--seq-len", "512", option, typed)[0] == 0
    spelled = re.findall(r"Workload\(sizes=(.*), \.\.\.\)", str(refused.value))[0]
    workload = Workload(global_batch_size=8, seq_len=512, sizes=ast.literal_eval(spelled))
    assert predict("t5-base", "1x8xh100-sxm", plan, workload).step_s > 0
    assert "no open size 'enc_seq'" in ask(capsys, *LLAMA, "--size", "enc_seq=512")[2]


@pytest.mark.parametrize(
    ("model", "total", "active", "text"),
    [
        ("gpt2", 124_439_808, 124_439_808, "124.4 million parameters"),
        ("mixtral-8x7b", 46_702_792_704, 12_879_925_248, "46.7 billion parameters, 12.88 billion active"),
    ],
)
def test_parameters_are_printed(
    model: str, total: int, active: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["predict", model, "--on", "4x8xh100-sxm", "--zero", "3"]
    document = json.loads(ask(capsys, *asked, "--json")[1])
    assert (document["parameters"], document["active_parameters"]) == (total, active)
    assert f"\n  {text}\n" in ask(capsys, *asked)[1]

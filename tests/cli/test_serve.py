"""`--serve` from the command line: one clear line for what is wrong, a forecast or a refusal for what is right."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from gnomon import schema
from gnomon.cli import main
from gnomon.cli.bench_serve import _server
from gnomon.cli.options.flags import parse_options
from gnomon.cli.options.server import BenchOptions, ServerOptions
from gnomon.cli.serve import settings_of
from gnomon.errors import InputError
from gnomon.request.released import context_of, stored_of
from gnomon.serving.file import ServeFile

ALWAYS = ["predict", "llama-3.1-8b", "--serve", "--on", "h100-sxm"]
LENGTHS = ["--input-len", "200", "--output-len", "20"]


def test_a_forecast_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALWAYS, *LENGTHS, "--concurrency", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ttft"]["p50_s"] >= found["queue"]["p50_s"]
    assert found["engine"] == "vllm" and any("engine not given" in note for note in found["assumptions"])


def test_a_refusal_says_what_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "llama-3.1-70b", "--serve", "--on", "h100-sxm", *LENGTHS, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["starts"] and [way["change"] for way in found["helps"]] == ["int4-wo weights", "fp8 weights"]


def test_a_trace_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_len,output_len\n0,100,5\n1,50,3\n")
    assert main([*ALWAYS, "--requests", str(trace), "--ttft", "500ms"]) == 0
    assert "goodput       100.0%" in capsys.readouterr().out
    trace.write_text("arrival_s,input_len,output_len\n0,100,many\n")
    assert main([*ALWAYS, "--requests", str(trace)]) == 2
    assert "line 2: output_len is 'many'" in capsys.readouterr().err


def test_what_a_server_took_stands_beside_what_is_predicted_for_the_same_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that takes exactly twice as long to the first token, and as long for each further one."""
    trace, page = tmp_path / "trace.csv", tmp_path / "both.html"
    trace.write_text("arrival_s,input_len,output_len\n0,100,5\n3,50,9\n6,80,1\n")
    assert main([*ALWAYS, "--requests", str(trace), "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    columns = {"arrival_s": [0.0, 3.0, 6.0], "input_len": [100, 50, 80], "output_len": [5, 9, 1]}
    first = [at + 2 * alone["ttft"]["p99_s"] for at in columns["arrival_s"]]
    end = [f + (n - 1) * alone["tpot"]["p50_s"] for f, n in zip(first, columns["output_len"], strict=True)]
    measured = tmp_path / "measured.json"
    columns |= {"first_s": first, "end_s": end}
    measured.write_text(json.dumps({"schema": "gnomon.serving-measured/1", "concurrency": None, "requests": columns}))
    assert main([*ALWAYS, "--requests", str(measured), "--json", "--page", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ttft"] == alone["ttft"] and found["tpot"] == alone["tpot"]
    beside = found["measured"]
    assert beside["ttft_p99_s"]["ratio"] == pytest.approx(0.5) and beside["tpot_p50_s"]["ratio"] == pytest.approx(1.0)
    drawn = page.read_text()
    assert drawn.count('class="measured"') == drawn.count('class="predicted"') == 2 and "NaN" not in drawn
    assert main([*ALWAYS, "--requests", str(measured)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("TTFT p99") and line.endswith("-50%") for line in lines)
    assert main([*ALWAYS, "--requests", str(measured), "--rate", "2"]) == 2
    assert "played as they were; leave --rate out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], "give --input-len and --output-len"),
        ([*LENGTHS, "--concurrency", "0"], "0 serves nobody"),
        ([*LENGTHS, "--concurrency", "2", "--rate", "3"], "--concurrency and --rate"),
        ([*LENGTHS, "--zero", "1"], "--zero is of training"),
        ([*LENGTHS, "--engine", "vlm"], "no engine 'vlm' is on record"),
        ([*LENGTHS, "--weights", "fp9"], "weights in 'fp9' are not known"),
        ([*LENGTHS, "--tp", "2"], "needs 2 devices"),
        ([*LENGTHS, "--max-model-len", "100"], "longer than max_model_len 100"),
        ([*LENGTHS, "--max-model-len", "131073"], "longer than the 131072 tokens that llama-3.1-8b was made for"),
        (["--input-len", "131072", "--output-len", "1"], "a request of 131073 tokens (prompt and answer) is longer"),
        ([*LENGTHS, "--engine", "gnomon"], "gnomon does not run on a gpu"),
    ],
)
def test_wrong_inputs_are_one_line(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ALWAYS, *more]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "longest"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16_384),
        ({"max_position_embeddings": 32_768, "rope_scaling": {
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}}, 131_072),
        ({"max_position_embeddings": 131_072, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}}, 131_072),
        ({"text_config": {"max_position_embeddings": 512}, "seq_length": 1024}, 512),
        ({"hidden_size": 8}, None),
    ],
)  # fmt: skip
def test_how_long_a_text_a_model_was_made_for(values: dict[str, Any], longest: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert context_of(str(tmp_path)) == context_of(str(tmp_path / "config.json")) == longest
    assert context_of("llama-2-7b") == 4096 and context_of("mamba2-2.7b") is None
    assert context_of("meta-llama/Meta-Llama-3.1-8B-Instruct") == 131_072


def test_weights_are_those_that_a_model_was_released_in(capsys: pytest.CaptureFixture[str]) -> None:
    names = {
        "gpt-oss-20b": "mxfp4", "deepseek-ai/DeepSeek-V3": "fp8-block", "Qwen/Qwen3-30B-A3B-FP8": "fp8",
        "qwen3-8b": None,
        "TheBloke/Llama-2-13B-chat-AWQ": "int4-wo", "models/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf": "q4_k",
        "nvidia/DeepSeek-R1-FP4": "nvfp4", "x/Qwen2.5-7B-GPTQ-Int8": "int8-wo", "meta-llama/Llama-3.1-8B": None,
    }  # fmt: skip
    assert {name: stored_of(name) for name in names} == names
    asked = ["predict", "gpt-oss-20b", "--serve", "--on", "h100-sxm", *LENGTHS, "--json"]
    for engine, weights in (("vllm", "mxfp4"), ("llama.cpp", "mxfp4-gguf")):
        assert main([*asked, "--engine", engine]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["weights"] == weights and any("as gpt-oss-20b is released" in one for one in found["assumptions"])


def test_options_of_serving_want_serve(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "llama-3.1-8b", "--on", "h100-sxm", "--input-len", "5"]) == 2
    assert "--input-len is of serving; add --serve" in capsys.readouterr().err


def test_a_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serve.toml"
    asked = ["plan", "llama-3.1-8b", "--serve", "--on", "2xh100-sxm", *LENGTHS, "--concurrency", "8"]
    assert main([*asked, "--tpot", "30ms", "-o", str(out)]) == 0
    assert "candidates" in capsys.readouterr().out and 'engine = "vllm"' in out.read_text()
    assert main([*asked, "--tpot", "1us"]) == 1


def test_a_plan_of_this_engine_is_how_it_serves(tmp_path: Path) -> None:
    """Layout, limits and weights; options win, and what the engine does not do is said."""
    pytest.importorskip("torch")
    out = tmp_path / "serve.toml"
    asked = ["plan", "llama-3.2-1b", "--serve", "--on", "2xcpu-process", *LENGTHS, "--engine", "gnomon"]
    assert main([*asked, "--num-requests", "8", "--weights", "int8-wo", "--concurrency", "2", "-o", str(out)]) == 0
    plan = schema.load_file(ServeFile, out)

    def settings(file: ServeFile, *words: str) -> Any:
        schema.save_file(file, out)
        return settings_of(parse_options(ServerOptions, [str(tmp_path), "--plan", str(out), *words]))

    made = settings(plan)
    assert made.workers * made.ways.ranks == 2 and (made.dtype, made.weights) == ("bf16", "int8")
    assert (made.rules.max_seqs, made.max_model_len) == (plan.max_seqs, plan.serving.max_model_len)
    divided = replace(plan, serving=replace(plan.serving, tp=2, pp=2, replicas=1, weights="bf16"))
    made = settings(divided, "-pp", "1", "--weights", "int4-g64")
    assert (made.ways.tp, made.ways.pp, made.weights) == (2, 1, "int4-g64")
    for change, says in (
        ({"serving": replace(plan.serving, dp=2)}, "has dp = 2"),
        ({"serving": replace(plan.serving, weights="fp8")}, "weights in fp8"),
        ({"serving": replace(plan.serving, kv="fp8")}, "keys in fp8"),
        ({"engine": "vllm"}, "is of vllm"),
        ({"prefill_count": 1, "decode_count": 1}, "without --pools"),
    ):
        with pytest.raises(InputError, match=says):
            settings(replace(plan, **change))


PROGRAMS = {
    "vllm": (),
    "sglang": (),
    "dynamo": ("--engine", "vllm"),
    "tensorrt-llm": ("--weights", "bf16", "--kv-dtype", "bf16"),  # others are in its checkpoint, and in a YAML
    "llama.cpp": ("--weights", "bf16"),  # others are the file's own
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_plan_is_the_same_as_a_command_line_of_each_program(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, line = tmp_path / "serve.toml", tmp_path / "serve.sh"
    asked = ["--on", "2xh100-sxm", *LENGTHS, "--concurrency", "8", "--json"]
    engine = [] if "--engine" in PROGRAMS[program] else ["--engine", program]
    assert main(["plan", "llama-3.1-8b", "--serve", *asked, *engine, *PROGRAMS[program], "-o", str(out)]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert main(["export", str(out), "--to", program, "-o", str(line)]) == 0
    said = capsys.readouterr()
    assert "prompts and" not in said.out + said.err, "engines that cannot disaggregate are not planned so"
    assert main(["predict", "--from", program, str(line), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("output_tokens_per_s", "devices", "layout", "weights", "kv"):
        assert found[name] == (pytest.approx(best[name], rel=1e-3) if isinstance(best[name], float) else best[name])


def test_a_command_line_predicts_what_its_options_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan exported and read back predicts the same; what is not read is named."""
    out, line = tmp_path / "serve.toml", tmp_path / "serve.sh"
    asked = ["--on", "2xh100-sxm", *LENGTHS, "--concurrency", "4", "--json"]
    assert main(["plan", "llama-3.1-8b", "--serve", *asked, "--tpot", "30ms", "-o", str(out)]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert main(["export", str(out), "--to", "vllm", "-o", str(line)]) == 0
    line.write_text(line.read_text().strip() + " --enforce-eager")
    capsys.readouterr()
    assert main(["predict", "--from", "vllm", str(line), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tpot"]["p50_s"] == pytest.approx(best["tpot"]["p50_s"], rel=1e-3)
    assert any("--enforce-eager" in note for note in found["assumptions"])


def test_guesses_and_adapters_of_a_command_line_predict_as_options_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = tmp_path / "serve.sh"
    line.write_text(
        "vllm serve llama-3.1-8b --max_model_len 4k --spec-method ngram --spec-tokens 3 --enable-lora --max-loras 2\n"
    )
    asked = ["--on", "1xh100-sxm", *LENGTHS, "--json", "--acceptance", "0.6"]
    assert main(["predict", "--from", "vllm", str(line), *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    said = [
        "--max-model-len",
        "4000",
        "--draft",
        "ngram",
        "--draft-tokens",
        "3",
        "--lora-rank",
        "16",
        "--lora-slots",
        "2",
    ]
    assert main(["predict", "llama-3.1-8b", "--serve", *said, *asked]) == 0
    beside = json.loads(capsys.readouterr().out)
    assert (found["tpot"], found["ttft"]) == (beside["tpot"], beside["ttft"])


def test_the_command_of_a_server_is_no_job_and_says_how_it_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = tmp_path / "up.sh"
    line.write_text("vllm serve meta-llama/Llama-3.1-8B --max-model-len 4096\n")
    assert main(["predict", str(line), "--on", "1xh100-sxm"]) == 2
    assert f"starts a server: gnomon predict --from vllm {line}" in capsys.readouterr().err
    assert main(["predict", "--from", "vllm", str(line), "--on", "1xh100-sxm", *LENGTHS, "--zero", "3"]) == 2
    assert "--zero is of training" in capsys.readouterr().err


def test_a_command_of_a_server_is_pasted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", StringIO("vllm serve meta-llama/Llama-3.1-8B -tp 1 --kv-cache-dtype fp8"))
    assert main(["predict", "--from", "vllm", "-", "--on", "1xh100-sxm", *LENGTHS]) == 0
    assert "served by vllm" in capsys.readouterr().out


def test_an_address_without_its_beginning_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["bench-serve", "localhost:8000", "--num-requests", "2"]) == 2
    assert "a server's address begins with http://: http://localhost:8000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantised", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4-wo"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized",
             "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": 64}}}},
            "int8-wo",
        ),
    ],
)  # fmt: skip
def test_a_folder_is_served_as_it_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], quantised: dict[str, object], weights: str
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096,
        "quantization_config": quantised,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ["predict", str(tmp_path), "--serve", "--engine", "vllm", "--on", "1xh100-sxm", *LENGTHS]
    assert main(asked) == 0
    assert f"{weights} weights" in capsys.readouterr().out
    assert main([*asked, "--weights", "bf16"]) == 0
    assert "bf16 weights" in capsys.readouterr().out


def test_a_server_that_says_much_is_not_held_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds, after it is up: it goes on, as it did not while nobody read the pipe."""
    done, script = tmp_path / "done", tmp_path / "server"
    lines = ["#!/bin/sh", 'echo "gnomon: serving m on http://127.0.0.1:9 (8 tokens a request)" >&2']
    lines += ["head -c 200000 /dev/zero | tr '\\0' x >&2", f"touch {done}", "exec sleep 30"]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with _server(parse_options(BenchOptions, [str(tmp_path)])) as url:
        assert url == "http://127.0.0.1:9"
        end = time.monotonic() + 10
        while not done.exists() and time.monotonic() < end:
            time.sleep(0.01)
    assert done.exists()

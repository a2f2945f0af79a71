"""Command lines of engines are read as they stand, and what is written reads back the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files

import pytest

from gnomon.errors import FormatError, InputError
from gnomon.formats.engines import ENGINE_OF, OPTIONS, command_line, read_command
from gnomon.serving.file import ServeFile
from gnomon.serving.layout import Serving
from gnomon.software.engine import engine
from gnomon.software.engine_options import TYPES, options_of
from gnomon.units import Bytes

EXPRESSES: Mapping[str, tuple[dict[str, object], dict[str, object], int]] = {
    # what a file may differ in (axes and formats; limits), and how many lines say what is lost
    "vllm": ({"tp": 4, "pp": 2, "weights": "fp8", "kv": "fp8"}, {"memory_fraction": 0.85}, 0),
    "sglang": ({"tp": 4, "pp": 2, "weights": "fp8", "kv": "fp8"}, {"memory_fraction": 0.85}, 0),
    "tensorrt-llm": ({"tp": 4, "pp": 2}, {"memory_fraction": 0.85}, 0),
    "llama.cpp": ({"kv": "q8_0"}, {"memory_fraction": 1.0}, 1),
    "openvino": ({"kv": "int8", "max_model_len": 4096}, {"memory_fraction": 0.9}, 2),
    "dynamo": ({"tp": 2, "weights": "fp8"}, {"memory_fraction": 0.85, "prefill_count": 1, "decode_count": 3}, 0),
}


@pytest.mark.parametrize("program", OPTIONS)
def test_what_is_written_reads_back(program: str) -> None:
    axes, limits, lines = EXPRESSES[program]
    file = ServeFile(
        model="llama-3.1-70b", on="8xh100-sxm", engine=ENGINE_OF.get(program, program), max_seqs=64,
        max_batched_tokens=4096, serving=Serving(**{"max_model_len": 8192, **axes}), **limits,  # type: ignore[arg-type]
    )  # fmt: skip
    line, lost = command_line(file, program)
    made = read_command(line, program, "8xh100-sxm")
    back, unread = made.file, made.unread
    assert (back, len(lost)) == (file, lines)
    assert unread == ()


COMPOSE = """
services:
  proxy:
    image: nginx
    command: nginx -g "daemon off;"
  llm:
    image: vllm/vllm-openai:v0.19.0
    environment: {MODEL: meta/M}
    deploy: {replicas: 2}
    command: --model $MODEL -tp 4 --max-model-len 16k --gpu-memory-utilization 0.92 --port 8000
"""

MANIFEST = """
apiVersion: v1
kind: Service
metadata: {name: llm}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: llm}
spec:
  replicas: 3
  template:
    spec:
      containers:
        - name: server
          image: lmsysorg/sglang:v0.5.14
          command: [python3, -m, sglang.launch_server]
          args: [--model-path, $(MODEL), --tp, "2", --mem-fraction-static, "0.8", --scheduler-recv-interval, "10"]
          env: [{name: MODEL, value: meta/M}]
"""


def test_containers_are_read_as_they_stand() -> None:
    made = read_command(COMPOSE, "vllm", "8xh100-sxm")
    file, unread = made.file, made.unread
    assert (file.model, file.serving.tp, file.serving.replicas, file.memory_fraction) == ("meta/M", 4, 2, 0.92)
    assert (file.serving.max_model_len, unread) == (16_000, ())
    made = read_command(MANIFEST, "sglang", "8xh100-sxm")
    file, unread = made.file, made.unread
    assert (file.model, file.serving.tp, file.serving.replicas, file.memory_fraction) == ("meta/M", 2, 3, 0.8)
    assert unread[0] == "--scheduler-recv-interval 10"
    with pytest.raises(FormatError, match="none of its 2 containers starts `llama-server`"):
        read_command(COMPOSE, "llama.cpp", "h100-sxm")


def test_options_are_those_of_the_program_itself() -> None:
    made = read_command("vllm serve M --tensor-paralel-size 2 --max-model-len 10", "vllm", "h100-sxm")
    unread = made.unread
    assert len(unread) == 1 and unread[0].startswith("vllm 0.32.0 has no option --tensor-paralel-size (did you mean")
    for line, said in (
        ("vllm serve M --mamba-cache-dtype fp99", "is none of"),
        ("vllm serve M --max-loras many", "is no whole number"),
    ):
        with pytest.raises(FormatError, match=said):
            read_command(line, "vllm", "h100-sxm")
    for program, rows in OPTIONS.items():
        options = options_of(ENGINE_OF.get(program, program))
        assert [name for name in rows if options.says(name)] == [] and options.release


def test_slots_of_llama_cpp_share_the_context() -> None:
    file = read_command("llama-server -m m.gguf -c 32768 -np 4 -ngl 99 -ub 512", "llama.cpp", "rtx-4090").file
    assert (file.serving.max_model_len, file.max_seqs) == (8192, 4)


def test_a_line_as_it_stands_names_what_is_not_read() -> None:
    text = (
        "export X=1\nvllm serve meta/M \\\n  -tp 4 --port 8000 --kv-cache-dtype=fp8 --enforce-eager --max-num-seqs 32\n"
    )
    made = read_command(text, "vllm", "4xh100-sxm")
    file, unread = made.file, made.unread
    assert (file.model, file.serving.tp, file.serving.kv, file.max_seqs) == ("meta/M", 4, "fp8", 32)
    assert unread == ("--enforce-eager",) and "max_model_len" not in made.fields_set


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve M --max-num-seqs many", "--max-num-seqs 'many' is no number"),
        ("vllm serve M --kv-cache-dtype fp7", "fp7' is none of auto"),
        ("vllm serve M --kv-cache-dtype turboquant_3bit_nc", "no format of keys"),
        ("vllm serve --max-num-seqs 3", "names no model"),
        ("sglang M", "no `vllm serve` in it"),
        ("vllm serve M -tp 2 --tensor-parallel-size 4", "given twice"),
    ],
)
def test_wrong_lines_are_said(text: str, said: str) -> None:
    with pytest.raises(FormatError, match=said):
        read_command(text, "vllm", "h100-sxm")


def test_other_names_suffixes_and_groups_of_attention() -> None:
    """sglang's tp counts the groups of attention dp; without the flag, dp is replicas."""
    text = "python -m sglang.launch_server --model M --tensor-parallel-size 8 --dp-size 2 --context-length 8K"
    apart = read_command(text, "sglang", "8xh100-sxm").file
    assert (apart.serving.tp, apart.serving.dp, apart.serving.replicas) == (8, 1, 2)
    groups = read_command(f"{text} --enable-dp-attention", "sglang", "8xh100-sxm").file
    assert (groups.serving.tp, groups.serving.dp, groups.serving.max_model_len) == (4, 2, 8192)
    line, _ = command_line(groups, "sglang")
    assert read_command(line, "sglang", "8xh100-sxm").file == groups


def test_unknown_programs_are_said() -> None:
    with pytest.raises(InputError, match="no reader of 'tgi'"):
        read_command("", "tgi", "h100-sxm")


def test_copies_of_experts_and_padded_lengths_are_told_where_no_option_has_them() -> None:
    laid = Serving(tp=8, ep=8, redundant_experts=8, max_model_len=64)
    _, lost = command_line(replace(ServeFile.of("m", "8xh100-sxm", laid, engine("vllm")), buckets=(16, 64)), "vllm")
    assert any("8 copies of experts" in line for line in lost) and any("16, 64 tokens" in line for line in lost)


@pytest.mark.parametrize(
    ("program", "text", "wanted"),
    [
        ("vllm", "M=org/a\nTP=${TP:-4}\nvllm serve $M -tp ${TP} --max-model-len 8192", {"tp": 4}),
        ("vllm", "python3 -m vllm.entrypoints.openai.api_server --model=org/a -tp=2 --max-model-len=8192", {"tp": 2}),
        ("vllm", "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.19 --model org/a -tp 2 --max-model-len 8192",
         {"tp": 2}),
        ("sglang", "sglang serve --model-path org/a --tp 2 --context-length 8192", {"tp": 2}),
        ("tensorrt-llm", "mpirun -n 1 trtllm-serve serve org/a --tp_size 2 --max_seq_len 8192", {"tp": 2}),
        ("llama.cpp", "llama-server -hf org/a -c 8192 -np 1", {"tp": 1}),
        ("dynamo", "python3 -m dynamo.vllm --model org/a --is-prefill-worker --max-model-len 8192 &\n"
         "python3 -m dynamo.vllm --model org/a --is-decode-worker --max-model-len 8192", {"tp": 1}),
    ],
)  # fmt: skip
def test_servers_are_started_in_many_ways(program: str, text: str, wanted: dict[str, int]) -> None:
    """As programs' own documents start them: variables of the script, images, older entrypoints, launchers."""
    made = read_command(text, program, "8xh100-sxm")
    assert made.file.model == "org/a" and made.unread == () and {"model", "max_model_len"} <= made.fields_set
    assert made.file.serving.max_model_len == 8192
    assert {name: getattr(made.file.serving, name) for name in wanted} == wanted
    if program == "dynamo":
        assert (made.file.prefill_count, made.file.decode_count) == (1, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("vllm serve $MODEL -tp 2", "a variable that is not set there; put its name in"),
        ("vllm serve org/a -tp $TP", "--tensor-parallel-size is '\\$TP', a variable that is not set"),
        ("vllm serve --config server.yaml", "--config server.yaml is a file that is not read"),
        ("docker run ghcr.io/me/other:1 --model org/a", "no `vllm serve` in it"),
    ],
)
def test_what_a_script_leaves_open_is_said(text: str, says: str) -> None:
    with pytest.raises(FormatError, match=says):
        read_command(text, "vllm", "8xh100-sxm")


@pytest.mark.parametrize("path", sorted(p.name for p in files("gnomon.software").joinpath("options").iterdir()))
def test_lists_hold_types_and_choices_and_no_source_text(path: str) -> None:
    """Choices read out of source once kept `Literal['none`, and no value of such an option was taken."""
    options = options_of(path.removesuffix(".txt"))
    for name, kind in options.takes.items():
        assert re.fullmatch(r"--?\w[\w.-]*", name), name
        plain = kind.rstrip("*+?")
        assert plain in TYPES or all(re.fullmatch(r"[\w.-]+", one) for one in plain.split("|")), (name, kind)


VERDICTS: Mapping[str, str | None] = {
    # what vLLM 0.32.0's own parser says of them (benchmarks/serving/vllm_parser.py): None, or it refuses
    "--tensor_parallel_size 4 --max_model_len=16k": None,
    "--max-model-len -1": None,
    "--max-model-len 25.6K": "only k, m, g and t take fractions",
    "--max-num-seqs 1k": "is no number",
    "--device-memory-utilization 0.8": None,
    "--max-num-s 9": "has no option --max-num-s",  # ambiguous
    "--enable-expert-parallel=false": "takes no value",
    "--trust-remote-code=true": "takes no value",
    "--no-headless": "has no option --no-headless",
    "--no-long-prefill-token-threshold": None,  # begins --no-long-prefill-token-threshold-adaptive
    "--served-model-name a b c -tp 2": None,
    "--served-model-name -tp 2": "is given no value",
    "--language-model-only -tp 2": None,
    "--scheduling-policy priority": None,
    "--mm-encoder-attn-dtype fp4": "is none of fp8",
    "--convert embed": None,
    "-O3 -cc.mode 3": None,
    "--compilation-config {mode:3}": "is no JSON",
    "--limit-mm-per-prompt.image 2": None,
    "--port x": "is no whole number",
    "--block-size 32.0": "is no whole number",
    "--calculate-kv-scales": "any more \\(0.19.0 had it\\)",
    "--quantization compressed-tensors": None,
    "--dtype float64": "is none of",
}


@pytest.mark.parametrize(("words", "says"), VERDICTS.items())
def test_lines_are_taken_and_refused_as_by_vllm_itself(words: str, says: str | None) -> None:
    try:
        unread = read_command(f"vllm serve M {words}", "vllm", "8xh100-sxm").unread
    except FormatError as error:
        unread = (str(error),)
        assert says is not None, error
    told = [one for one in unread if one.startswith("vllm 0.32.0 has") or not one.startswith("-") or says]
    assert len(told) == (says is not None) and all(re.search(str(says), one) for one in told), unread
    if "-tp 2" in words and says is None:
        assert read_command(f"vllm serve M {words}", "vllm", "8xh100-sxm").file.serving.tp == 2


def test_guesses_and_adapters_are_written_for_vllm_and_read() -> None:
    for of in (
        {"draft": "ngram", "draft_tokens": 4, "acceptance": 0.6},
        {"draft": "mtp", "draft_tokens": 1, "acceptance": 0.8},
        {"lora_rank": 64, "lora_slots": 4},
        {"weights": "fp32", "kv": "fp16"},
    ):
        file = ServeFile.of("m", "8xh100-sxm", Serving(max_model_len=8192, **of), engine("vllm"))  # type: ignore[arg-type]
        line, lost = command_line(file, "vllm")
        assert read_command(line, "vllm", "8xh100-sxm", file.serving.acceptance).file == file
        assert len(lost) == ("draft" in of)
    made = read_command("vllm serve M --spec-method ngram --spec-tokens 3", "vllm", "h100-sxm")
    assert made.file.serving.draft == "none" and "give --acceptance" in made.unread[0]
    made = read_command("vllm serve M -sc.method eagle3 -sc.num_speculative_tokens 3", "vllm", "h100-sxm", 0.5)
    assert made.file.serving.draft == "none" and "not predicted" in made.unread[0]
    text = "vllm serve M --speculative-config.method draft_model -sc.model small -sc.num_speculative_tokens 3"
    made = read_command(text, "vllm", "h100-sxm", 0.5)
    assert (made.draft, made.file.serving.draft, made.file.serving.draft_tokens) == ("small", "model", 3)


@pytest.mark.parametrize(
    ("of", "says"),
    [
        ({"kv": "int8"}, "kv int8"),  # was written as fp8
        ({"tp": 4, "ep": 2}, "deals experts over all 4"),  # read back as ep 4
        ({"resident_bytes": Bytes(1 << 30)}, "read from disk"),
        ({"lora_rank": 24, "lora_slots": 1}, "written as 32"),
        ({"lora_rank": 1024, "lora_slots": 1}, "at most 512"),
        ({"draft": "model", "draft_tokens": 2, "acceptance": 0.5}, "its name is not in the file"),
    ],
)
def test_what_vllm_has_no_option_for_is_told(of: dict[str, object], says: str) -> None:
    file = ServeFile.of("m", "8xh100-sxm", Serving(max_model_len=64, **of), engine("vllm"))  # type: ignore[arg-type]
    _, lost = command_line(file, "vllm")
    assert [one for one in lost if says in one]

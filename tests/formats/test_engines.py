"""Command lines of engines are read as they stand, and what is written reads back the same."""

from __future__ import annotations

import pytest

from gnomon.errors import FormatError, InputError
from gnomon.formats.engines import OPTIONS, command_line, read_command
from gnomon.serving.file import ServeFile
from gnomon.serving.layout import Serving


@pytest.mark.parametrize("program", OPTIONS)
def test_what_is_written_reads_back(program: str) -> None:
    narrow = {} if program == "tensorrt-llm" else {"weights": "fp8", "kv": "fp8"}
    file = ServeFile(
        model="llama-3.1-70b", on="8xh100-sxm", engine=program, max_seqs=64, max_batched_tokens=4096,
        memory_fraction=0.85, serving=Serving(tp=4, pp=2, max_model_len=8192, **narrow),
    )  # fmt: skip
    line, lost = command_line(file, program)
    back, unread = read_command(line, program, "8xh100-sxm")
    assert (back, unread, lost) == (file, (), ())


def test_a_line_as_it_stands_names_what_is_not_read() -> None:
    text = (
        "export X=1\nvllm serve meta/M \\\n  -tp 4 --port 8000 --kv-cache-dtype=fp8 --enforce-eager --max-num-seqs 32\n"
    )
    file, unread = read_command(text, "vllm", "4xh100-sxm")
    assert (file.model, file.serving.tp, file.serving.kv, file.max_seqs) == ("meta/M", 4, "fp8", 32)
    assert unread == ("--enforce-eager", "max_model_len is not said: 4096 is taken")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve M --max-num-seqs many", "--max-num-seqs 'many' is no number"),
        ("vllm serve M --kv-cache-dtype fp7", "no format of keys"),
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
    apart, _ = read_command(text, "sglang", "8xh100-sxm")
    assert (apart.serving.tp, apart.serving.dp, apart.serving.replicas) == (8, 1, 2)
    groups, _ = read_command(f"{text} --enable-dp-attention", "sglang", "8xh100-sxm")
    assert (groups.serving.tp, groups.serving.dp, groups.serving.max_model_len) == (4, 2, 8192)
    line, _ = command_line(groups, "sglang")
    assert read_command(line, "sglang", "8xh100-sxm")[0] == groups


def test_unknown_programs_are_said() -> None:
    with pytest.raises(InputError, match="no reader of 'tgi'"):
        read_command("", "tgi", "h100-sxm")

"""Servers as the command lines of inference engines: written from a `ServeFile`, and read back.

`command_line(file, program)` returns the line; `read_command(text, program, on)` the file that it says, with every
option that is not read named. The text may be a command line, a script, a compose file or a Kubernetes manifest. An
option's name and what it sets are one row of `OPTIONS`; options that change no prediction are in `IGNORED`; names and
values are held against the program's own list (`software.engine_options`). Only the programs in `OPTIONS` are known.
Source: options of the sdist of vllm 0.19.0 (engine/arg_utils.py), the wheel of sglang 0.5.14 (srt/server_args.py) and
NVIDIA/TensorRT-LLM at 00209af (tensorrt_llm/commands/serve.py), read there; the parsers themselves were not run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gnomon.errors import FormatError, InputError, nearest
from gnomon.formats.containers import image_starts, words_of
from gnomon.serving.file import ServeFile
from gnomon.serving.layout import FORMATS, KV_BITS, Serving
from gnomon.software.engine import engine
from gnomon.software.engine_options import known

BEGINS: Mapping[str, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python", "-m", "sglang.launch_server"),
    "tensorrt-llm": ("trtllm-serve",),
    "llama.cpp": ("llama-server",),
    "openvino": ("ovms",),
    "dynamo": ("python", "-m", "dynamo.vllm"),
}
"""Program -> the words before its options; the model follows, or is an option."""

SUBCOMMANDS: Mapping[str, tuple[str, ...]] = {"tensorrt-llm": ("serve",)}
"""Words after these that name no model."""

ALSO_BEGINS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "vllm": (("python", "-m", "vllm.entrypoints.openai.api_server"), ("python", "-m", "vllm.entrypoints.api_server")),
    "sglang": (("sglang", "serve"),),
    "llama.cpp": (("python", "-m", "llama_cpp.server"),),
}
"""Other words that start the same server."""

OPTIONS: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        "--tensor-parallel-size": "tp",
        "--pipeline-parallel-size": "pp",
        "--data-parallel-size": "dp",
        "--max-model-len": "max_model_len",
        "--max-num-seqs": "max_seqs",
        "--max-num-batched-tokens": "max_batched_tokens",
        "--gpu-memory-utilization": "memory_fraction",
        "--kv-cache-dtype": "kv",
        "--quantization": "weights",
    },
    "sglang": {
        "--model-path": "model",
        "--tp-size": "tp",
        "--pp-size": "pp",
        "--dp-size": "dp",
        "--ep-size": "ep",
        "--context-length": "max_model_len",
        "--max-running-requests": "max_seqs",
        "--chunked-prefill-size": "max_batched_tokens",
        "--mem-fraction-static": "memory_fraction",
        "--kv-cache-dtype": "kv",
        "--quantization": "weights",
    },
    "tensorrt-llm": {
        "--tp_size": "tp",
        "--pp_size": "pp",
        "--ep_size": "ep",
        "--max_seq_len": "max_model_len",
        "--max_batch_size": "max_seqs",
        "--max_num_tokens": "max_batched_tokens",
        "--kv_cache_free_gpu_memory_fraction": "memory_fraction",
    },
    "llama.cpp": {
        "--model": "model",
        "--parallel": "max_seqs",
        "--ctx-size": "max_model_len",
        "--batch-size": "max_batched_tokens",
        "--cache-type-k": "kv",
    },
    "openvino": {
        "--source_model": "model",
        "--max_num_seqs": "max_seqs",
        "--max_num_batched_tokens": "max_batched_tokens",
        "--kv_cache_precision": "kv",
    },
}
"""Program -> option -> field of `ServeFile` or `Serving`."""

OPTIONS = {**OPTIONS, "dynamo": {"--model": "model", **OPTIONS["vllm"]}}

ENGINE_OF = {"dynamo": "vllm"}
"""Program -> the engine that it runs, where that is another."""

SPELLED: dict[str, Mapping[str, str]] = {
    "vllm": {
        "-tp": "--tensor-parallel-size",
        "-pp": "--pipeline-parallel-size",
        "-dp": "--data-parallel-size",
        "-q": "--quantization",
        "-ep": "--enable-expert-parallel",
    },
    "sglang": {
        "--model": "--model-path",
        "--tensor-parallel-size": "--tp-size",
        "--pipeline-parallel-size": "--pp-size",
        "--data-parallel-size": "--dp-size",
        "--expert-parallel-size": "--ep-size",
        "--ep": "--ep-size",
    },
    "tensorrt-llm": {
        "--tensor_parallel_size": "--tp_size",
        "--pipeline_parallel_size": "--pp_size",
        "--moe_expert_parallel_size": "--ep_size",
        "--free_gpu_memory_fraction": "--kv_cache_free_gpu_memory_fraction",
    },
    "llama.cpp": {
        "-m": "--model",
        "-hf": "--model",
        "-hfr": "--model",
        "--hf-repo": "--model",
        "-np": "--parallel",
        "-c": "--ctx-size",
        "-b": "--batch-size",
        "-ctk": "--cache-type-k",
    },
    "openvino": {},
}
SPELLED = {**SPELLED, "dynamo": SPELLED["vllm"]}
"""Program -> other names of its options."""

IGNORED = (
    "--host",
    "--port",
    "--served-model-name",
    "--api-key",
    "--seed",
    "--tokenizer",
    "--trust-remote-code",
    "--model-id",
    "--alias",
    "-a",
    "--jinja",
    "-ngl",
    "--n-gpu-layers",
    "--rest_port",
    "--model_name",
    "--model_repository_path",
    "--task",
    "--tool-call-parser",
    "--reasoning-parser",
    "--chat-template",
    "--download-dir",
    "--disable-log-requests",
)
"""Options that change no prediction."""

FLAGS = ("--enable-expert-parallel", "--enable-dp-attention", "--is-prefill-worker", "--is-decode-worker")
"""Options without a value that are read."""

SUFFIXED = ("--max-model-len", "--max-num-batched-tokens", "--context-length")
"""Options of vllm and sglang that take 8k for 8000 and 8K for 8192."""

NARROW: Mapping[str, str] = {"fp8": "fp8", "nvfp4": "modelopt_fp4", "int4-wo": "awq", "mxfp4": "mxfp4"}
"""Format -> `--quantization`; the checkpoint itself says the rest."""


def command_line(file: ServeFile, program: str) -> tuple[str, tuple[str, ...]]:
    """(command line, what it does not say). InputError for a program without options on record."""
    if program not in OPTIONS:
        raise InputError(f"no export to {program[:40]!r}{nearest(program, OPTIONS)}; known: {', '.join(OPTIONS)}")
    said: dict[str, Any] = {f.name: getattr(file, f.name) for f in fields(ServeFile) if f.name != "serving"}
    said |= {f.name: getattr(file.serving, f.name) for f in fields(Serving)}
    own = ENGINE_OF.get(program, program)
    if program == "llama.cpp":  # slots share the context
        said["max_model_len"] *= said["max_seqs"]
    if program == "sglang":  # its tp counts the groups of attention dp
        said["tp"] *= said["dp"]
    words = [*BEGINS[program]]
    rows = OPTIONS[program]
    if "model" not in rows.values():
        words.append(file.model)
    lost = [f"engine {file.engine}: written for {own}"] if file.engine != own else []
    for option, name in rows.items():
        value = said[name]
        if name == "kv":
            if value in ("fp8", "int8", "q8_0"):
                spelled = {"sglang": "fp8_e4m3", "llama.cpp": "q8_0", "openvino": "u8"}.get(program, "fp8")
                words += [option, spelled]
        elif name == "weights":
            if value in NARROW:
                words += [option, NARROW[value]]
            elif value != "bf16":
                lost.append(f"weights {value}: a checkpoint stored so")
        elif name not in ("pp", "dp", "ep") or value > 1:
            words += [option, str(value)]
    if own == "vllm" and file.serving.ep > 1:
        words.append("--enable-expert-parallel")
    if program == "sglang" and file.serving.dp > 1:
        words.append("--enable-dp-attention")
    for name in ("dp", "ep", "kv", "weights"):
        if name not in rows.values() and said[name] not in (1, "bf16") and (own, name) != ("vllm", "ep"):
            lost.append(f"{name} {said[name]}: no option of {program}")
    for name in ("tp", "pp"):
        if name not in rows.values() and said[name] > 1:
            lost.append(f"{name} {said[name]}: no option of {program}")
    for name in ("max_model_len", "memory_fraction"):
        if name not in rows.values():
            lost.append(f"{name} {said[name]}: {program} has no such option")
    if file.serving.draft != "none" or file.serving.lora_rank:
        lost.append("guesses and adapters: their options name files that are not known here")
    if program == "dynamo":
        return _workers(shlex.join(words), file), tuple(lost)
    if file.serving.redundant_experts:
        lost.append(
            f"{file.serving.redundant_experts} copies of experts: ask the engine for them, as its balancing has them"
        )
    if file.buckets:
        lost.append(f"texts padded to {', '.join(map(str, file.buckets))} tokens: gnomon serve alone deals them out so")
    if file.prefill_count:
        lost.append(
            f"{file.prefill_count} engines for prompts and {file.decode_count} for answers: start as many, with a "
            f"router that sends keys between them"
        )
    if file.serving.replicas > 1:
        lost.append(f"{file.serving.replicas} replicas: start as many, behind a router")
    return shlex.join(words), tuple(lost)


def _workers(line: str, file: ServeFile) -> str:
    """The script that starts a frontend and all engines of dynamo."""
    first = [f"{line} --is-prefill-worker &"] * file.prefill_count
    last = [f"{line} &"] * (file.decode_count or file.serving.replicas)
    return "\n".join(("python -m dynamo.frontend &", *first, *last, "wait"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line that was read."""

    file: ServeFile
    """The server. What the line does not say is the engine's own default, 16 bits, and 4096 tokens."""
    unread: tuple[str, ...]
    """Options that were not read."""
    said: frozenset[str]
    """Names of fields of `ServeFile` and `Serving` that it says."""


def read_command(text: str, program: str, on: str) -> Command:
    """A command line as it stands, `\\` at line ends included, with variables that a script sets, or of the container
    of a compose file, a manifest or `docker run` that starts the program.

    FormatError for a line that is not the program's, a value that is no number where one belongs, a variable that the
    script does not set, or an option given twice.
    """
    if program not in OPTIONS:
        raise InputError(f"no reader of {program[:40]!r}{nearest(program, OPTIONS)}; known: {', '.join(OPTIONS)}")
    begins, options = list(BEGINS[program]), known(ENGINE_OF.get(program, program))
    container = words_of(text, begins)
    try:
        words = container.words if container else _expanded(shlex.split(text.replace("\\\n", " "), comments=True))
    except ValueError as error:
        raise FormatError(f"the command line of {program} cannot be read: {error}") from None
    starts = (begins, *map(list, ALSO_BEGINS.get(program, ())))
    found = ((i + len(one)) for i in range(len(words)) for one in starts if _is_begin(words[i : i + len(one)], one))
    at = next(found, None)
    if at is None:  # `docker run IMAGE OPTIONS` starts what is the image's own
        at = next((i + 1 for i, w in enumerate(words) if image_starts(w) == tuple(begins)), None)
    if at is None:
        raise FormatError(f"no `{' '.join(begins)}` in it; give the command line that starts {program}")
    rest, values, unread = words[at:], dict[str, Any](), list[str]()
    flags: set[str] = set()
    if program == "dynamo" and "&" in rest:
        rest = rest[: rest.index("&")]
    while rest:
        word, equals, given = rest.pop(0).partition("=")
        word = SPELLED[program].get(word, word)
        word = SPELLED[program].get(options.resolved(word), options.resolved(word))
        if not word.startswith("-"):
            if word in SUBCOMMANDS.get(program, ()) and not values:
                continue
            if "model" in values:
                unread.append(word)
            values.setdefault("model", word)
            continue
        if word in FLAGS:
            flags.add(word)
            continue
        if not equals and not options.is_flag(word) and rest and not rest[0].startswith("--"):
            given = rest.pop(0)
        if "$" in given:
            raise FormatError(f"{word} is {given[:40]!r}, a variable that is not set there; put its value in")
        name = "model" if word == "--model" else OPTIONS[program].get(word)
        if name is None:
            if (problem := options.says(word)) is not None:
                unread.append(problem)
            elif word not in IGNORED:
                options.check(word, given)
                unread.append(f"{word}{f' {given}' if given else ''}")
            continue
        if name in values:
            raise FormatError(f"{word} is given twice")
        if program == "llama.cpp" and name == "max_model_len" and given == "0":
            continue  # as the model's file says
        values[name] = _value(word, name, given)
    if "model" not in values:
        other = next((one for one in unread if one.startswith(("--config", "--preset"))), None)
        more = f"; {other} is a file that is not read: put what it says on the command line" if other else ""
        raise FormatError(f"the command line of {program} names no model{more}")
    if "$" in values["model"]:
        raise FormatError(f"the model is {values['model'][:40]!r}, a variable that is not set there; put its name in")
    record = engine(ENGINE_OF.get(program, program))
    axes: dict[str, Any] = {name: values[name] for name in ("tp", "pp", "dp", "ep") if name in values}
    if "--enable-expert-parallel" in flags:
        axes["ep"] = axes.get("tp", 1) * axes.get("dp", 1)
    if program == "sglang" and axes.get("dp", 1) > 1:
        if "--enable-dp-attention" in flags:
            if axes.get("tp", 1) % axes["dp"]:
                raise FormatError(f"--tp-size {axes.get('tp', 1)} is no multiple of --dp-size {axes['dp']}")
            axes["tp"] = axes["tp"] // axes["dp"]
        else:
            axes["replicas"] = axes.pop("dp")
    if program == "llama.cpp" and "max_model_len" in values:  # slots share the context
        values["max_model_len"] //= values.get("max_seqs", record.max_seqs)
    if container is not None and container.replicas > 1:
        axes["replicas"] = axes.get("replicas", 1) * container.replicas
    counts = [_is_begin(words[i : i + 3], begins) for i in range(len(words))] if program == "dynamo" else []
    first = words.count("--is-prefill-worker") if program == "dynamo" else 0
    if sum(counts) > 1 and not first:
        axes["replicas"] = sum(counts)
    serving = Serving(
        **axes, weights=values.get("weights", "bf16"), kv=values.get("kv", "bf16"),
        max_model_len=values.get("max_model_len", 4096),
    )  # fmt: skip
    file = ServeFile.of(values["model"], on, serving, record)
    limits = {n: values[n] for n in ("max_seqs", "max_batched_tokens", "memory_fraction") if n in values}
    file = replace(file, **limits)
    if first:
        file = replace(file, prefill_count=first, decode_count=sum(counts) - first)
    return Command(file=file, unread=tuple(unread), said=frozenset(values))


def _expanded(words: list[str]) -> list[str]:
    """Words of a script with the variables that it sets before, as `NAME=value`, put in; `${NAME:-value}` is the value
    where it sets none."""
    known: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name, other = match[1] or match[3], match[2]
        return known.get(name, match[0] if other is None else other)

    made = []
    for word in words:
        word = re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, word)
        if (sets := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)) is not None:
            known[sets[1]] = sets[2]
        made.append(word)
    return made


def started_by(text: str) -> str | None:
    """The program whose server a script starts, as --from names it; None where it starts none."""
    starts = [(name, words) for name, words in BEGINS.items()]
    starts += [(name, words) for name, others in ALSO_BEGINS.items() for words in others]
    return next((name for name, words in starts if " ".join(words[-2:]) in text), None)


def _is_begin(words: list[str], begins: list[str]) -> bool:
    names = [word.rpartition("/")[2] for word in words]
    return names == begins or names == [begins[0].replace("python", "python3"), *begins[1:]]


def _value(word: str, name: str, text: str) -> Any:
    if name in ("model",):
        return text
    if name == "kv":
        kept = {
            "auto": "bf16",
            "bfloat16": "bf16",
            "float16": "fp16",
            "f16": "fp16",
            "f32": "fp32",
            "fp8_e4m3": "fp8",
            "fp8_e5m2": "fp8",
            "u8": "int8",
        }.get(text, text)
        if kept not in KV_BITS:
            raise FormatError(f"{word} {text[:40]!r} is no format of keys that is known")
        return kept
    if name == "weights":
        kept = {"modelopt_fp4": "nvfp4", "awq": "int4-wo", "gptq": "int4-wo", "awq_marlin": "int4-wo"}.get(text, text)
        if kept not in FORMATS:
            raise FormatError(f"{word} {text[:40]!r} is no format of weights that is known")
        return kept
    shown = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", text) if word in SUFFIXED else None
    if shown:
        return int(float(shown[1]) * {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20}[shown[2]])
    try:
        return float(text) if name == "memory_fraction" else int(text)
    except ValueError:
        raise FormatError(f"{word} {text[:40]!r} is no number") from None

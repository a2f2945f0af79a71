"""Servers as the command lines of inference engines: written from a `ServeFile`, and read back.

`command_line(file, program)` returns the line; `read_command(text, program, on)` the file that it says, with every
option that is not read named. The text may be a command line, a script, a compose file or a Kubernetes manifest. An
option's name and what it sets are one row of `OPTIONS`; options that change no prediction are in `IGNORED`; names and
values are held against the program's own list (`software.engine_options`). Only the programs in `OPTIONS` are known.
Source: vllm 0.32.0's parser itself (`benchmarks/serving/vllm_parser.py` runs it); options of the wheel of sglang 0.5.14
(srt/server_args.py) and NVIDIA/TensorRT-LLM at 00209af (tensorrt_llm/commands/serve.py), read there.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from gnomon.errors import FormatError, InputError, nearest
from gnomon.formats.containers import image_starts, words_of
from gnomon.serving.file import ServeFile
from gnomon.serving.layout import FORMATS, KV_BITS, Draft, Serving
from gnomon.software.engine import engine
from gnomon.software.engine_options import AUTO, EngineOptions, options_of, size_of

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

# Dynamo's worker hands what it does not know on to vLLM's own parser.
OPTIONS = {**OPTIONS, "dynamo": {"--model": "model", **OPTIONS["vllm"]}}

ENGINE_OF = {"dynamo": "vllm"}
"""Program -> the engine that it runs, where that is another."""

SPELLED: dict[str, Mapping[str, str]] = {
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
"""Program -> other names of its options, where `OPTIONS` has another than the list of the program puts first."""

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

FLAGS = (
    "--enable-expert-parallel",
    "--enable-dp-attention",
    "--enable-lora",
    "--is-prefill-worker",
    "--is-decode-worker",
)
"""Options without a value that are read."""

NARROW: Mapping[str, str] = {"fp8": "fp8", "nvfp4": "modelopt_fp4", "int4-wo": "awq", "mxfp4": "mxfp4"}
"""Format -> `--quantization`; the checkpoint itself says the rest."""

WEIGHTS: Mapping[str, str] = {
    **{word: name for name, word in NARROW.items()},
    **dict.fromkeys(("gptq", "gptq_marlin", "awq_marlin", "auto_awq", "auto_gptq"), "int4-wo"),
    **dict.fromkeys(("modelopt", "fbgemm_fp8", "fp8_per_tensor", "fp8_per_channel"), "fp8"),
    "fp8_per_block": "fp8-block",
    "int8_per_channel_weight_only": "int8-wo",
    "gpt_oss_mxfp4": "mxfp4",
    "bitsandbytes": "nf4",
}
"""`--quantization` -> format."""

IN_CHECKPOINT = ("compressed-tensors", "torchao", "quark", "moe_wna16", "inc", "modelopt_mixed", "auto-round")
"""Values of `--quantization` that name a program, whose checkpoint says in which format the weights are."""

KEYS: Mapping[str, Mapping[str, str]] = {
    "vllm": {"fp8": "fp8", "fp16": "float16"},
    "sglang": {"fp8": "fp8_e4m3"},
    "llama.cpp": {"q8_0": "q8_0", "fp32": "f32", "fp16": "f16"},
    "openvino": {"int8": "u8"},
}
"""Engine -> format of keys -> how it is spelled; 16 bits are what each has where nothing is said."""

GUESSES: Mapping[str, str] = {
    "--spec-method": "method",
    "--spec-model": "model",
    "--spec-tokens": "num_speculative_tokens",
}
"""vllm's options of their own for keys of `--speculative-config`."""

LORA = {"--max-loras": "lora_slots", "--max-lora-rank": "lora_rank"}
"""vllm's options of adapters, which are read beside `--enable-lora`."""

LORA_DEFAULTS = {"lora_slots": 1, "lora_rank": 16}
"""vllm 0.32.0's own."""


def command_line(file: ServeFile, program: str) -> tuple[str, tuple[str, ...]]:
    """(command line, what it does not say). InputError for a program without options on record."""
    if program not in OPTIONS:
        raise InputError(f"no export to {program[:40]!r}{nearest(program, OPTIONS)}; known: {', '.join(OPTIONS)}")
    values: dict[str, Any] = {f.name: getattr(file, f.name) for f in fields(ServeFile) if f.name != "serving"}
    values |= {f.name: getattr(file.serving, f.name) for f in fields(Serving)}
    own = ENGINE_OF.get(program, program)
    # --ctx-size is of all slots together, each of which gets its share.
    if program == "llama.cpp":  # slots share the context
        values["max_model_len"] *= values["max_seqs"]
    if program == "sglang":  # its tp counts the groups of attention dp
        values["tp"] *= values["dp"]
    words = [*BEGINS[program]]
    rows = OPTIONS[program]
    if "model" not in rows.values():
        words.append(file.model)
    lost = [f"engine {file.engine}: written for {own}"] if file.engine != own else []
    for option, name in rows.items():
        value = values[name]
        if name == "kv":
            if value in KEYS[own]:
                words += [option, KEYS[own][value]]
            # 16-bit keys of either kind are the engine's default for such a model, so nothing is lost.
            elif KV_BITS[value] != KV_BITS["bf16"]:
                lost.append(f"kv {value}: {program} stores no keys so that are read back as the same")
        elif name == "weights":
            if value in NARROW:
                words += [option, NARROW[value]]
            # Not a quantisation: the dtype that weights are loaded in.
            elif own == "vllm" and value in ("fp16", "fp32"):
                words += ["--dtype", {"fp16": "float16", "fp32": "float32"}[value]]
            elif value != "bf16":
                lost.append(f"weights {value}: a checkpoint stored so")
        # An axis of one is every engine's default; the other fields are written even so, since defaults of engines
        # move.
        elif name not in ("pp", "dp", "ep") or value > 1:
            words += [option, str(value)]
    if own == "vllm":
        engine_words, untold = _of_vllm(file.serving)
        words += engine_words
        lost += untold
    # Without the flag SGLang's dp are whole replicas.
    if program == "sglang" and file.serving.dp > 1:
        words.append("--enable-dp-attention")
    for name in ("dp", "ep", "kv", "weights"):
        if name not in rows.values() and values[name] not in (1, "bf16") and (own, name) != ("vllm", "ep"):
            lost.append(f"{name} {values[name]}: no option of {program}")
    for name in ("tp", "pp"):
        if name not in rows.values() and values[name] > 1:
            lost.append(f"{name} {values[name]}: no option of {program}")
    for name in ("max_model_len", "memory_fraction"):
        if name not in rows.values():
            lost.append(f"{name} {values[name]}: {program} has no such option")
    if own != "vllm" and (file.serving.draft != "none" or file.serving.lora_rank):
        lost.append("guesses and adapters: their options name files that are not known here")
    if program == "dynamo":
        return _workers(shlex.join(words), file), tuple(lost)
    if file.serving.resident_bytes is not None:
        lost.append("layers that are read from disk: gnomon serve alone does so")
    if file.serving.redundant_experts:
        lost.append(
            f"{file.serving.redundant_experts} copies of experts: ask the engine for them, as its balancing has them"
        )
    if file.serving.expert_copies:
        lost.append(f"{file.serving.expert_copies} copies of foreseen experts a device: gnomon serve alone has them")
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


def _of_vllm(serving: Serving) -> tuple[list[str], list[str]]:
    """(words, what they do not say) of experts, guesses and adapters."""
    words, lost = list[str](), list[str]()
    if serving.ep > 1:
        words.append("--enable-expert-parallel")
        if serving.ep != serving.tp * serving.dp:
            lost.append(f"ep {serving.ep}: vllm deals experts over all {serving.tp * serving.dp} devices of tp x dp")
    if serving.draft == "model":
        lost.append("the model that guesses: its name is not in the file; add --speculative-config with it")
    elif serving.draft != "none":
        settings = {"method": serving.draft, "num_speculative_tokens": serving.draft_tokens}
        words += ["--speculative-config", json.dumps(settings)]
        lost.append(
            f"acceptance {serving.acceptance:g}: what the text makes it; give --acceptance where the line is predicted"
        )
    if serving.lora_rank:
        ranks = [int(rank) for rank in options_of("vllm").takes["--max-lora-rank"].split("|")]
        rank = min((one for one in ranks if one >= serving.lora_rank), default=None)
        # vLLM has a short list of ranks; an adapter runs in the next larger.
        if rank is None:
            return words, [*lost, f"lora_rank {serving.lora_rank}: vllm takes at most {max(ranks)}"]
        if rank != serving.lora_rank:
            lost.append(f"lora_rank {serving.lora_rank}: written as {rank}, the next that vllm takes")
        words += ["--enable-lora", "--max-loras", str(serving.lora_slots), "--max-lora-rank", str(rank)]
    return words, lost


def _workers(line: str, file: ServeFile) -> str:
    """The script that starts a frontend and all engines of dynamo."""
    first = [f"{line} --is-prefill-worker &"] * file.prefill_count
    # Each worker registers itself with the frontend, so replicas are just more of them.
    last = [f"{line} &"] * (file.decode_count or file.serving.replicas)
    return "\n".join(("python -m dynamo.frontend &", *first, *last, "wait"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line that was read."""

    file: ServeFile
    """The server. What the line does not say is the engine's own default, 16 bits, and 4096 tokens."""
    unread: tuple[str, ...]
    """Options that were not read."""
    fields_set: frozenset[str]
    """Names of fields of `ServeFile` and `Serving` that it says."""
    draft: str | None = None
    """The model that guesses, where it names one."""


def read_command(text: str, program: str, on: str, acceptance: float = 0.0) -> Command:
    """A command line as it stands, `\\` at line ends included, with variables that a script sets, or of the container
    of a compose file, a manifest or `docker run` that starts the program. acceptance: as of `Serving`, which no line
    says; 0: guesses are told as not read.

    FormatError for a line that is not the program's, a value that is no number where one belongs, a variable that the
    script does not set, or an option given twice.
    """
    if program not in OPTIONS:
        raise InputError(f"no reader of {program[:40]!r}{nearest(program, OPTIONS)}; known: {', '.join(OPTIONS)}")
    begins, options = list(BEGINS[program]), options_of(ENGINE_OF.get(program, program))
    # Of YAML the words of a list are final; a shell line still has variables to fill in.
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
    rest, values, unread, own = words[at:], dict[str, Any](), list[str](), ENGINE_OF.get(program, program)
    flags, guesses, adapters = set[str](), dict[str, Any](), dict[str, int]()
    if program == "dynamo" and "&" in rest:
        rest = rest[: rest.index("&")]
    while rest:
        word, inside = options.parted(rest.pop(0))
        word = SPELLED.get(program, {}).get(word, word)
        # argparse takes any unambiguous beginning of a long option; the full name may have another spelling again.
        word = options.resolved(word)
        word = SPELLED.get(program, {}).get(word, word)
        if not word.startswith("-"):
            # A subcommand stands before the model; the same word later would be a model of that name.
            if word in SUBCOMMANDS.get(program, ()) and not values:
                continue
            if "model" in values:
                unread.append(word)
            # vLLM takes the first positional word, and warns of others.
            values.setdefault("model", word)
            continue
        if word in FLAGS:
            if inside is not None:
                raise FormatError(f"{word} takes no value, and is given {inside[:40]!r}; leave it out for off")
            flags.add(word)
            continue
        word_value = _option_value(word, inside, rest, options)
        # Left as it is it would be read as a path or a number, and the mistake met far from here.
        if "$" in word_value:
            raise FormatError(f"{word} is {word_value[:40]!r}, a variable that is not set there; put its value in")
        name = "model" if word == "--model" else OPTIONS[program].get(word)
        if own == "vllm" and (word in GUESSES or word.partition(".")[0] == "--speculative-config"):
            options.check(word, word_value)
            guesses |= _guess(word, word_value)
            continue
        if own == "vllm" and word in LORA:
            options.check(word, word_value)
            adapters[LORA[word]] = int(word_value)
            continue
        if own == "vllm" and word == "--dtype":
            options.check(word, word_value)
            if word_value in ("float", "float32"):
                values.setdefault("weights", "fp32")
            continue
        if name is None:
            if (problem := options.says(word)) is not None:
                unread.append(problem)
                continue
            options.check(word, word_value)
            if word not in IGNORED:
                unread.append(f"{word}{f' {word_value}' if word_value else ''}")
            continue
        if name in values and not (name == "weights" and values[name] == "fp32"):
            raise FormatError(f"{word} is given twice")
        # --ctx-size 0.
        if program == "llama.cpp" and name == "max_model_len" and word_value == "0":
            continue  # as the model's file says
        if name == "max_model_len" and own == "vllm" and word_value.lower() in AUTO:
            unread.append(
                f"{word} {word_value}: the longest that fits in memory; give --max-model-len to have it predicted"
            )
            continue
        if name == "weights" and word_value in IN_CHECKPOINT:
            unread.append(
                f"{word} {word_value}: the checkpoint says in which format; give --weights where it is not at hand"
            )
            continue
        values[name] = _value(word, name, word_value, options)
    if "model" not in values:
        other = next((one for one in unread if one.startswith(("--config", "--preset"))), None)
        hint = f"; {other} is a file that is not read: put what it says on the command line" if other else ""
        raise FormatError(f"the command line of {program} names no model{hint}")
    if "$" in values["model"]:
        raise FormatError(f"the model is {values['model'][:40]!r}, a variable that is not set there; put its name in")
    record = engine(own)
    axes: dict[str, Any] = {name: values[name] for name in ("tp", "pp", "dp", "ep") if name in values}
    # vLLM has no number for it: experts lie over all ranks of tp and dp.
    if "--enable-expert-parallel" in flags:
        axes["ep"] = axes.get("tp", 1) * axes.get("dp", 1)
    if "--enable-lora" in flags and own == "vllm":
        axes |= LORA_DEFAULTS | adapters
    elif adapters:
        unread.append(f"{' and '.join(n for n, f in LORA.items() if f in adapters)}, without --enable-lora")
    if guesses:
        drafted = _draft(guesses)
        if drafted is None or not acceptance:
            how = "guesses so are not predicted" if drafted is None else "give --acceptance, which depends on the text"
            unread.append(f"--speculative-config {json.dumps(guesses)}: {how}")
            guesses = {}
        else:
            axes |= {"draft": drafted[0], "draft_tokens": drafted[1], "acceptance": acceptance}
    # Under attention dp SGLang's tp counts all devices; ours counts those of one group.
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
    # A script starts each worker by a line of its own.
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
    draft = str(guesses["model"]) if file.serving.draft == "model" else None
    return Command(file=file, unread=tuple(unread), fields_set=frozenset(values), draft=draft)


def _option_value(word: str, inside: str | None, rest: list[str], options: EngineOptions) -> str:
    """The value of an option, taken from the words behind it where it is not in its own; all of an option that takes
    several. FormatError where one must stand there and none does."""
    if inside is not None:
        return inside
    word_values = list[str]()
    while not options.is_flag(word) and rest and _is_value(rest[0]):
        word_values.append(rest.pop(0))
        if not options.takes_several(word):
            break
    if not word_values and options.has_value(word):
        raise FormatError(f"{word} is given no value, and {options.release} takes one")
    return " ".join(word_values)


def _is_value(word: str) -> bool:
    """Whether a word is no option, as argparse has it: negative numbers are values."""
    return not word.startswith("-") or word == "-" or re.fullmatch(r"-\d+|-\d*\.\d+", word) is not None


def _guess(word: str, text: str) -> dict[str, Any]:
    """Keys of `--speculative-config` that an option says."""
    if word == "--speculative-config":
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):
            raise FormatError(f"{word} {text[:40]!r} is no table of JSON")
        return parsed
    # `--speculative-config.method ngram`: vLLM's parser takes a key of a JSON option behind a dot.
    key = GUESSES.get(word) or word.partition(".")[2]
    try:
        return {key: json.loads(text)}
    except ValueError:
        return {key: text}


def _draft(draft_fields: Mapping[str, Any]) -> tuple[Draft, int] | None:
    """(who guesses, how many tokens) of vllm's `--speculative-config`; None for a kind of guess that is not predicted,
    or no number."""
    method, tokens = draft_fields.get("method"), draft_fields.get("num_speculative_tokens")
    kinds: dict[str, Draft] = {"ngram": "ngram", "ngram_gpu": "ngram", "suffix": "ngram", "draft_model": "model"}
    # deepseek_mtp, qwen3_next_mtp, …: one method a model type.
    kind: Draft | None = "mtp" if str(method).endswith("mtp") else kinds.get(str(method))
    if kind is None or not isinstance(tokens, int) or (kind == "model" and "model" not in draft_fields):
        return None
    return kind, tokens


def _expanded(words: list[str]) -> list[str]:
    """Words of a script with the variables that it sets before, as `NAME=value`, put in; `${NAME:-value}` is the value
    where it sets none."""
    known: dict[str, str] = {}

    def value(match: re.Match[str]) -> str:
        name, other = match[1] or match[3], match[2]
        return known.get(name, match[0] if other is None else other)

    expanded = []
    for word in words:
        word = re.sub(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)", value, word)
        if (sets := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", word, re.DOTALL)) is not None:
            known[sets[1]] = sets[2]
        expanded.append(word)
    return expanded


def started_by(text: str) -> str | None:
    """The program whose server a script starts, as --from names it; None where it starts none."""
    starts = [(name, words) for name, words in BEGINS.items()]
    starts += [(name, words) for name, others in ALSO_BEGINS.items() for words in others]
    return next((name for name, words in starts if " ".join(words[-2:]) in text), None)


def _is_begin(words: list[str], begins: list[str]) -> bool:
    names = [word.rpartition("/")[2] for word in words]
    # Paths in front (`/opt/venv/bin/vllm`) do not matter.
    return names == begins or names == [begins[0].replace("python", "python3"), *begins[1:]]


def _value(word: str, name: str, text: str, options: EngineOptions) -> Any:
    if name in ("model",):
        return text
    if name == "kv":
        bits_name = {
            "auto": "bf16",
            "bfloat16": "bf16",
            "float16": "fp16",
            "f16": "fp16",
            "f32": "fp32",
            "fp8_e4m3": "fp8",
            "fp8_e5m2": "fp8",
            "fp8_inc": "fp8",
            "u8": "int8",
        }.get(text, text)
        if bits_name not in KV_BITS:
            options.check(word, text)
            raise FormatError(
                f"{word} {text[:40]!r} is no format of keys that is known; those are {', '.join(KV_BITS)}"
            )
        return bits_name
    if name == "weights":
        bits_name = WEIGHTS.get(text, text)
        if bits_name not in FORMATS:
            raise FormatError(f"{word} {text[:40]!r} is no format of weights that is known")
        return bits_name
    if options.takes.get(word, "").startswith("size"):
        return size_of(word, text)
    try:
        return float(text) if name == "memory_fraction" else int(text)
    except ValueError:
        raise FormatError(f"{word} {text[:40]!r} is no number") from None

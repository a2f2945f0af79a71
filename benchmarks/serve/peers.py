"""Gnomon's server beside other programs' on this machine: `python benchmarks/serve/peers.py [--sizes 135M 0.5B] …`.

Each peer is installed into an environment of its own in --folder (uv where it is there, else pip; npm for llama.cpp),
and models of the shapes of SmolLM2-135M and Qwen2.5-0.5B with random weights are converted to its format. All engines
run as processes that wait, one thread each, and are asked in turn: decode (24 tokens after a prompt of 32), prefill of
256 and 2,048 tokens, eight at once (12 requests of mixed lengths, prompts included); tokens a CPU-second of the whole
process. What does not install or convert is told and left out. Writes benchmarks/results/serve_peers.md. Leaves out
HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from speed import MIXED, SHAPES

from gnomon.compiler.machine import this_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[0] / "results" / "serve_peers.md"
INSTALLS = {
    "openvino": ["openvino-genai", "openvino", "openvino-tokenizers"],
    "openvino-export": ["torch==2.13.0", "optimum-intel", "nncf", "openvino-tokenizers"],
    "ctranslate2": ["ctranslate2", "torch==2.13.0", "transformers"],
    "gguf": ["gguf", "numpy"],
}
"""Environment -> packages."""
TO_OPENVINO = """
import os, shutil, sys
from optimum.exporters.openvino import main_export
import nncf, openvino as ov
from openvino_tokenizers import convert_tokenizer
from transformers import AutoTokenizer
source, out = sys.argv[1:3]
main_export(source, out + "/bf16", task="text-generation-with-past", framework="pt", convert_tokenizer=False)
both = convert_tokenizer(AutoTokenizer.from_pretrained(source), with_detokenizer=True)
for model, name in zip(both, ("tokenizer", "detokenizer")):
    ov.save_model(model, f"{out}/bf16/openvino_{name}.xml")
ways = {"int8": dict(mode=nncf.CompressWeightsMode.INT8_ASYM),
        "int4": dict(mode=nncf.CompressWeightsMode.INT4_SYM, group_size=64, ratio=1.0)}
for name, way in ways.items():
    model = nncf.compress_weights(ov.Core().read_model(out + "/bf16/openvino_model.xml"), **way)
    shutil.copytree(out + "/bf16", f"{out}/{name}", ignore=shutil.ignore_patterns("openvino_model*"))
    ov.save_model(model, f"{out}/{name}/openvino_model.xml")
"""
TO_GGUF = """
import json, struct, sys
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, MODEL_ARCH, get_tensor_name_map, quants
source, out = sys.argv[1:3]
c = json.load(open(source + "/config.json"))
kind, heads = c["model_type"], c["num_attention_heads"]
kv_heads, layers = c["num_key_value_heads"], c["num_hidden_layers"]
raw = np.memmap(source + "/model.safetensors", np.uint8, "r")
length = struct.unpack("<Q", raw[:8].tobytes())[0]
header = json.loads(raw[8 : 8 + length].tobytes())
names = get_tensor_name_map(MODEL_ARCH.QWEN2 if kind == "qwen2" else MODEL_ARCH.LLAMA, layers)
words = json.load(open(source + "/tokenizer.json"))["model"]["vocab"]
for form in ("bf16", "q8_0", "q4_0"):
    w = GGUFWriter(f"{out}/{form}.gguf", kind)
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"]); w.add_block_count(layers)
    w.add_feed_forward_length(c["intermediate_size"]); w.add_head_count(heads); w.add_head_count_kv(kv_heads)
    w.add_layer_norm_rms_eps(c["rms_norm_eps"]); w.add_rope_dimension_count(c["hidden_size"] // heads)
    w.add_rope_freq_base(c.get("rope_theta") or c["rope_parameters"]["rope_theta"]); w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("gpt2"); w.add_tokenizer_pre("qwen2" if kind == "qwen2" else "smollm")
    w.add_token_list(sorted(words, key=words.get)); w.add_token_types([1] * (len(words) - 1) + [3])
    w.add_token_merges(["a b"])
    w.add_eos_token_id(len(words) - 1); w.add_bos_token_id(len(words) - 1); w.add_add_bos_token(False)
    w.add_file_type(getattr(LlamaFileType, f"MOSTLY_{form.upper()}"))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in entry["data_offsets"])
        value = (raw[begin:end].view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):  # llama.cpp turns neighbours
            n = heads if "q_proj" in name else kv_heads
            value = value.reshape(n, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if value.ndim == 1:
            w.add_tensor(stored, np.ascontiguousarray(value))
            continue
        own = "q8_0" if form == "q4_0" and "embed" in name else form
        as_ = GGMLQuantizationType[own.upper()]
        w.add_tensor(stored, quants.quantize(np.ascontiguousarray(value), as_), raw_dtype=as_)
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process that answers."""

    name: str
    command: Sequence[str]


def environment(folder: Path, name: str) -> Path:
    """The Python of a peer's environment, made once."""
    where = folder / name
    python = where / "bin" / "python"
    if (where / "done").exists():
        return python
    uv = shutil.which("uv")
    make = [sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), str(where)]
    subprocess.run(make, check=True)
    pip = [uv, "pip"] if uv else [str(python), "-m", "pip"]
    here = ["--python", str(python)] if uv else []
    subprocess.run([*pip, "install", "-q", *here, *INSTALLS[name]], check=True)
    if name == "openvino-export":  # its torchvision is another torch's, and breaks the import
        subprocess.run([*pip, "uninstall", *(here or ["-y"]), "torchvision"], check=False)
    (where / "done").touch()
    return python


def llama(folder: Path) -> Path:
    """The folder of node-llama-cpp, with its build for Linux."""
    where = folder / "llama.cpp"
    if not (where / "done").exists():
        where.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "node-llama-cpp", "--omit=optional", "--ignore-scripts"]
        subprocess.run(install, cwd=where, check=True)
        pack = ["npm", "pack", "--silent", "@node-llama-cpp/linux-x64"]
        packed = subprocess.run(pack, cwd=where, check=True, capture_output=True, text=True)
        into = where / "node_modules" / "@node-llama-cpp" / "linux-x64"
        into.mkdir(parents=True, exist_ok=True)
        shutil.unpack_archive(where / packed.stdout.split()[-1], where / "unpacked", "gztar")
        shutil.copytree(where / "unpacked" / "package", into, dirs_exist_ok=True)
        (where / "done").touch()
    shutil.copy(HERE / "peer_llama.mjs", where / "peer_llama.mjs")
    return where


def write_model(folder: Path, size: str) -> None:
    """Random weights, and a tokenizer whose first tokens are bytes, filled up to the vocabulary."""
    import tokenizers
    import torch
    import transformers

    kind, shape = SHAPES[size]
    last = shape["vocab_size"] - 1
    config = getattr(transformers, kind)(
        **shape, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=last, eos_token_id=last
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = {word: at for at, word in enumerate([*letters, *(f"<{at}>" for at in range(len(letters), last)), "<end>"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", bos_token="<end>", pad_token="<end>"
    ).save_pretrained(folder)


def peers_of(folder: Path, model: Path, only: Sequence[str]) -> Iterator[Peer | str]:
    """Those that can be asked; a line for one that cannot."""
    worker = str(HERE / "peer_worker.py")
    for form in ("stored", "int8", "int4-g64"):
        yield Peer(name=f"gnomon {'bf16' if form == 'stored' else form}",
                   command=[sys.executable, worker, "gnomon", str(model), form])  # fmt: skip
    yield Peer(name="transformers bf16", command=[sys.executable, worker, "transformers", str(model), "bfloat16"])
    makers: dict[str, Callable[[], list[Peer]]] = {
        "OpenVINO GenAI": lambda: _openvino(folder, model, worker),
        "CTranslate2": lambda: _ctranslate2(folder, model, worker),
        "llama.cpp": lambda: _llama(folder, model),
    }
    for name, make in makers.items():
        if only and name not in only:
            continue
        try:
            yield from make()
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"{name} is not here: {error}"


def _openvino(folder: Path, model: Path, worker: str) -> list[Peer]:
    python, out = environment(folder, "openvino"), model.parent / "openvino"
    if not (out / "int4").exists():
        exporter = environment(folder, "openvino-export")
        subprocess.run([exporter, "-c", TO_OPENVINO, str(model), str(out)], check=True)
    return [
        Peer(name=f"OpenVINO GenAI {form}", command=[str(python), worker, "openvino", str(out / form), "bf16"])
        for form in ("bf16", "int8", "int4")
    ]


def _ctranslate2(folder: Path, model: Path, worker: str) -> list[Peer]:
    python, out = environment(folder, "ctranslate2"), model.parent / "ctranslate2"
    if not out.exists():
        convert = str(python.parent / "ct2-transformers-converter")
        subprocess.run([convert, "--model", str(model), "--output_dir", str(out), "--quantization", "int8"], check=True)
    return [Peer(name="CTranslate2 int8", command=[str(python), worker, "ctranslate2", str(out), "int8"])]


def _llama(folder: Path, model: Path) -> list[Peer]:
    where, out = llama(folder), model.parent / "gguf"
    if not out.exists():
        out.mkdir()
        subprocess.run([environment(folder, "gguf"), "-c", TO_GGUF, str(model), str(out)], check=True)
    return [
        Peer(name=f"llama.cpp {form}", command=["node", str(where / "peer_llama.mjs"), str(out / f"{form}.gguf")])
        for form in ("bf16", "q8_0", "q4_0")
    ]


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, stack: ExitStack) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.name = peer.name
        self.process = stack.enter_context(
            subprocess.Popen(peer.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
                             stderr=subprocess.DEVNULL)
        )  # fmt: skip
        stack.callback(self.process.kill)
        self.heard()

    def heard(self) -> str:
        """What it says next. RuntimeError where it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return line[1:].strip()
        raise RuntimeError(f"{self.name} ended with {self.process.wait()}")

    def seconds(self, lengths: Sequence[tuple[int, int]], rng: random.Random) -> float:
        """CPU time of requests of these lengths (prompt, tokens)."""
        asked = [([rng.randrange(10, 7000) for _ in range(length)], count) for length, count in lengths]
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        made, spent = json.loads(self.heard())
        assert made >= sum(count for _, count in lengths), (self.name, made)
        return float(spent)


TASKS: dict[str, Callable[[Running, random.Random], float]] = {
    "decode, batch 1": lambda p, rng: 24 / (p.seconds([(32, 25)], rng) - p.seconds([(32, 1)], rng)),
    "prefill of 256": lambda p, rng: 256 / p.seconds([(256, 1)], rng),
    "of 2,048": lambda p, rng: 2048 / p.seconds([(2047, 1)], rng),
    "eight at once": lambda p, rng: sum(count for _, count in MIXED) / p.seconds(MIXED, rng),
}


def table(folder: Path, model: Path, rounds: int, only: Sequence[str]) -> list[str]:
    """Rows of one model, and what was left out."""
    found: dict[str, dict[str, list[float]]] = {}
    said: list[str] = []
    with ExitStack() as stack:
        running = []
        for peer in peers_of(folder, model, only):
            try:
                if isinstance(peer, str):
                    raise RuntimeError(peer)
                running.append(Running(peer, stack))
            except RuntimeError as error:
                said.append(f"{str(error)[:300]}")
                print(said[-1], flush=True)
        for number in range(rounds):
            for task, run in TASKS.items():
                for peer_ in list(running):
                    try:
                        value = run(peer_, random.Random(number))
                    except (RuntimeError, OSError) as error:
                        said.append(f"{peer_.name}, {task}: {error}")
                        running.remove(peer_)
                        continue
                    found.setdefault(peer_.name, {}).setdefault(task, []).append(value)
                    print(f"{number} {task}: {peer_.name} {value:.0f}", flush=True)
    lines = [f"| engine | {' | '.join(TASKS)} |", "|---|" + "---|" * len(TASKS)]
    for name, by_task in found.items():
        cells: list[Any] = []
        for task in TASKS:
            values = sorted(by_task.get(task, []))
            cells.append(f"{statistics.median(values):.0f} [{values[0]:.0f}, {values[-1]:.0f}]" if values else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, *(f"\nLeft out: {one}." for one in said)]


def main() -> int:
    """The tables, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = Path(tempfile.gettempdir()) / "gnomon-peers"
    parser.add_argument("--folder", type=Path, default=folder, help="of environments and models")
    parser.add_argument("--rounds", type=int, default=3, help="of all engines in turn; 3")
    parser.add_argument("--sizes", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--only", nargs="*", default=[], help="peers, by name")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    lines: list[str] = []
    for size in options.sizes:
        model = options.folder / "models" / size / "hf"
        if not (model / "tokenizer.json").exists():
            write_model(model, size)
        lines += [f"## {size}", "", *table(options.folder, model, options.rounds, options.only), ""]
    print("\n".join(lines))
    if not options.no_file:
        head = [
            "# Beside other programs",
            "",
            f"`python benchmarks/serve/peers.py --rounds {options.rounds}`, {datetime.now(UTC):%Y-%m-%d}, "
            f"{this_machine().model}, one thread, random weights: tokens a CPU-second of the whole process, median "
            f"[least, most] of {options.rounds} rounds, engines in turn, on a machine that others used too. Peers as "
            "their packages install on that day. `eight at once` counts output tokens, prompts included; that of "
            "llama.cpp is of its Node wrapper.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]).rstrip() + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

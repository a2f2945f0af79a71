"""Mutated checkpoints, plans, configs and timelines, in one process: refused by one of our errors, or harmless.

    python benchmarks/faults/mutated_checkpoints.py                 # 12,000 mutations; results/faults.md
    python benchmarks/faults/mutated_checkpoints.py --count 600     # fewer
    python benchmarks/faults/mutated_checkpoints.py --only 1234     # one again, with its traceback

A mutation is drawn from its number alone. Of a checkpoint: bytes of any of its files are turned over, cut off, doubled
or swapped; files are emptied, removed or exchanged; and, as an attacker would, values of `gnomon.json` or of a header
are changed and all checksums over them made to fit again. A checkpoint that is accepted must hold the same tensors, bit
by bit, unless a header was forged: then bytes may stand under another name, which no checksum tells. Of a text (plan
file, config.json, Timeline) what is accepted must be read the same when it is written again. What counts as found: any
other exception, a tensor that differs, a file outside of the folder, more than 20 s.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.mutations import change
from gnomon import schema
from gnomon.errors import GnomonError
from gnomon.formats.huggingface.runnable import read_runnable
from gnomon.hardware import parse_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.plans import Mesh, Plan, PlanFile, Schedule, Workload
from gnomon.prediction import predict
from gnomon.runtime import Executor
from gnomon.runtime.checkpoint.convert import convert
from gnomon.runtime.checkpoint.files import Reader, problems_of
from gnomon.runtime.checkpoint.record import RECORD, read_record
from gnomon.runtime.checkpoint.save import save
from gnomon.software import stack
from gnomon.timeline.text import parse_timeline, print_timeline

LIMIT_S = 20.0
CONFIG = LlamaConfig(
    name="bytes", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn_size=16, vocab_size=16
)
WORK = Workload(global_batch_size=4, seq_len=8)


def checkpoint(folder: Path) -> Path:
    """One of two ranks, with small tensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    graph, plan = llama(CONFIG), Plan(schedule=Schedule(num_microbatches=1))
    executor = Executor(graph, plan, WORK, seed=1)
    done = save(folder / "one", executor, 3, identity={"seed": "1", "data": "books"})
    executor.leave()
    dist.destroy_process_group()
    two = Plan(mesh=Mesh(dp_shard=2), schedule=Schedule(num_microbatches=1))
    return convert(done, folder / "two", graph, two, WORK)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path, read_record(path))
    return {name: reader.whole(name) for name in reader.by_name}


def hit_bytes(path: Path, draw: random.Random) -> str:
    """Changes bytes of one file, or files of one checkpoint."""
    files = sorted(path.iterdir())
    victim = draw.choice(files)
    raw = bytearray(victim.read_bytes())
    at = draw.randrange(len(raw)) if draw.random() < 0.5 else draw.randrange(min(600, len(raw)))
    match draw.randrange(8):
        case 0 | 1:
            for _ in range(draw.choice((1, 1, 2, 64))):
                raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
            raw[at] ^= 0xFF
        case 2:
            del raw[at:]
        case 3:
            raw[at:at] = raw[at : at + draw.randrange(1, 64)]
        case 4:
            raw[at : at + 8] = bytes(draw.randrange(256) for _ in range(8))
        case 5:
            raw = bytearray(draw.choice((b"", b"\x80\x04.", b"{}", b"[" * 5000, bytes(64))))
        case 6:
            victim.unlink()
            return "removed"
        case _:
            other = draw.choice(files)
            victim.write_bytes(other.read_bytes())
            return "the same" if other == victim else "exchanged"
    victim.write_bytes(raw)
    return "bytes"


VALUES: tuple[Any, ...] = (
    None, -1, 0, 2**70, 1.5, True, "", "../x", "/etc/passwd", ".", "\0", [], {}, [[]], "9" * 30, "NaN",
)  # fmt: skip


def put_somewhere(value: Any, draw: random.Random) -> Any:
    """The same JSON with a value in another's place, or a key lost or new."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        collected = dict(value)
        if draw.random() < 0.1:
            del collected[key]
        elif draw.random() < 0.1:
            collected[f"{key}x"] = collected.pop(key)
        else:
            collected[key] = put_somewhere(value[key], draw)
        return collected
    if isinstance(value, list) and value and draw.random() < 0.8:
        collected, at = list(value), draw.randrange(len(value))
        if draw.random() < 0.2:
            collected.append(collected[at])
        else:
            collected[at] = put_somewhere(value[at], draw)
        return collected
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.6:
        return value + draw.choice((-8, -1, 1, 2, 8))
    if isinstance(value, str) and "@" in value and draw.random() < 0.5:
        return value.replace("@", "@1,")
    return draw.choice(VALUES)


def forged(path: Path, draw: random.Random) -> str:
    """Changes what a checkpoint says of itself, and makes the checksums over it fit."""
    record = json.loads((path / RECORD).read_text())
    record.pop("checksum")
    what = "record"
    if draw.random() < 0.6:
        what = "header"
        victim = draw.choice(sorted(path.glob("*.safetensors")))
        raw = victim.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        if draw.random() < 0.5:
            message = json.loads(header["__metadata__"]["pieces"])
            header["__metadata__"]["pieces"] = json.dumps(put_somewhere(message, draw))
        else:
            header = put_somewhere(header, draw)
        text = json.dumps(header).encode()
        first = len(text).to_bytes(8, "little") + text
        victim.write_bytes(first + raw[8 + length :])
        for file in record["files"]:
            if file["name"] == victim.name:
                file["header"], file["bytes"] = sha256(first).hexdigest(), victim.stat().st_size
    else:
        record = put_somewhere(record, draw)
    if isinstance(record, dict):
        record["checksum"] = sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (path / RECORD).write_text(json.dumps(record))
    return what


def of_checkpoint(whole: Path, folder: Path, draw: random.Random) -> str:
    """Outcome of one mutation; AssertionError where it is accepted and holds other tensors."""
    path = folder / "step-000003"
    shutil.copytree(whole, path)
    what = forged(path, draw) if draw.random() < 0.4 else hit_bytes(path, draw)
    try:
        if problems_of(path):
            return "refused"
        after = tensors(path)
    except GnomonError:
        return "refused"
    before = tensors(whole)
    if what == "record" or what == "the same":
        assert before.keys() == after.keys()
    if what == "header":  # its own checksums still hold: the bytes are those that were written, under another name
        return "accepted, forged"
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before), what
    return "accepted, the same"


def texts() -> dict[str, tuple[str, Callable[[str], object]]]:
    """Name -> (a valid text, what must hold of one that is accepted)."""
    plan = Plan(mesh=Mesh(pp=2, dp_shard=2), schedule=Schedule(name="one_f_one_b", num_microbatches=4))
    file = PlanFile(model="llama-tiny", on="4xh100-sxm", workload=Workload(global_batch_size=16, seq_len=64), plan=plan)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    graph = llama(CONFIG)
    small = Plan(mesh=Mesh(pp=2), schedule=Schedule(name="one_f_one_b", num_microbatches=2))
    prediction = predict(graph, parse_cluster("2xh100-sxm"), small, WORK, stack("gnomon"))

    def plan_again(text: str) -> None:
        read = schema.load(PlanFile, text)
        assert schema.load(PlanFile, schema.dump(read)) == read

    def timeline_again(text: str) -> None:
        read = parse_timeline(text)
        assert print_timeline(parse_timeline(print_timeline(read))) == print_timeline(read)

    return {
        "plan": (schema.dump(file), plan_again),
        "config": (json.dumps(config, indent=1), lambda text: read_runnable(text, "model")),
        "timeline": (print_timeline(prediction.timeline()), timeline_again),
    }


def one(
    number: int, whole: Path, folder: Path, known: dict[str, tuple[str, Callable[[str], object]]]
) -> tuple[str, str]:
    """(kind, outcome) of a mutation; anything but one of our errors is raised."""
    draw = random.Random(number)
    kind = "checkpoint" if number % 6 < 3 else list(known)[number % 3]
    if kind == "checkpoint":
        return kind, of_checkpoint(whole, folder, draw)
    text, read = known[kind]
    try:
        read(change(text, draw))
    except GnomonError:
        return kind, "refused"
    return kind, "accepted, read the same again"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=12_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    numbers = range(options.first, options.first + options.count) if options.only is None else [options.only]
    tally, failures, began = Counter[tuple[str, str]](), list[str](), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        whole, known = checkpoint(Path(place)), texts()
        for number in numbers:
            at, folder = time.monotonic(), Path(place) / "inside/inner"
            folder.mkdir(parents=True)
            try:
                tally[one(number, whole, folder, known)] += 1
            except Exception as error:
                failures.append(f"{number}: {type(error).__name__}: {str(error)[:120]}")
                if options.only is not None:
                    traceback.print_exc()
            if time.monotonic() - at > LIMIT_S:
                failures.append(f"{number}: took {time.monotonic() - at:.0f} s")
            if sorted(path.name for path in folder.parent.iterdir()) != ["inner"]:
                failures.append(f"{number}: wrote outside of its folder")
            shutil.rmtree(folder.parent)
            if sys.stderr.isatty() and number % 100 == 0:
                print(f"\r{number}  found {len(failures)}", end="", file=sys.stderr, flush=True)
    for (kind, outcome), count in sorted(tally.items()):
        print(f"{kind:11} {outcome:30} {count:6,}")
    print("\n".join(failures[:40]))
    print(f"{len(numbers):,} mutations in {time.monotonic() - began:.0f} s; found: {len(failures)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

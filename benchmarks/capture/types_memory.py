"""Kept bytes and memory of a step alone, of the small types of transformers that earlier rows could train.

`python benchmarks/capture/types_memory.py --rows types.jsonl … --out memory.jsonl` writes a line a type, those furthest
off first, and goes on where it was stopped. `transformers_types.py --join types.jsonl … memory.jsonl` lays these
columns over the rows and prints the table; the other columns stay as they were. A process a type, as there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.capture import trained as training
from benchmarks.capture import transformers_types as types
from gnomon.frontend.capture import captured

WAIT_S = 600
"""Wall seconds of a type."""
MEMORY = ("predicted_bytes", "counted_bytes", "memory_error")


def one(kind: str) -> dict[str, Any]:
    """The columns of one type, as `trained` has them."""
    row: dict[str, Any] = {"type": kind, "part": True}
    model = types.build(kind, types.SMALL, False)
    for given in types.inputs(model):
        try:
            captured(model, given, name=kind)
        except Exception:
            continue
        break
    torch.manual_seed(0)
    rows = next(x.shape[0] for x in given.values())
    headed = training.Headed(model, given).eval()
    given = {**given, "answers": torch.randint(0, training.CLASSES, (rows,))}
    found = captured(headed, given, training=False)
    row["kept_error"] = training.kept_error(headed, given, found.graph)
    ways = training.ROWS // rows if "batch" in found.symbols and not training.ROWS % rows else 1
    step = training.step(headed, found, training.wider(given, ways), rounds=1)
    return row | {"step": {name: step[name] for name in MEMORY}}


def _child(kind: str, pipe: Any) -> None:
    sys.stderr = open(os.devnull, "w")
    torch.set_num_threads(1)
    try:
        pipe.send(one(kind))
    except Exception as error:
        pipe.send({"type": kind, "part": True, "memory": f"failed: {type(error).__name__}: {str(error)[:160]}"})


def off(row: dict[str, Any]) -> float:
    """How far a row is outside 1% of kept bytes, or 5% of memory."""
    kept, step = row.get("kept_error"), row.get("step")
    shares = [abs(kept) / 0.01] if isinstance(kept, float) else []
    shares += [abs(step["memory_error"]) / 0.05] if isinstance(step, dict) else []
    return max(shares, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    known = {row["type"]: row for file in given.rows for row in map(json.loads, file.read_text().splitlines())}
    wanted = sorted((kind for kind, row in known.items() if row.get("ran")), key=lambda kind: -off(known[kind]))
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    done = {json.loads(line)["type"] for line in lines}
    transformers.logging.set_verbosity_error()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    context = get_context("fork")
    for kind in wanted:
        if kind in done:
            continue
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(kind, theirs))
        process.start()
        theirs.close()
        try:
            row = mine.recv() if mine.poll(WAIT_S) else {"type": kind, "part": True, "memory": "failed: no answer"}
        except EOFError:
            row = {"type": kind, "part": True, "memory": "failed: the process ended"}
        process.kill()
        process.join()
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

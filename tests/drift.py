"""Thirty predictions that may not change unsaid: `drift.toml` has them, `test_drift` compares.

    python tests/drift.py --because changelog.d/FRAGMENT.md      (or: make drift BECAUSE=changelog.d/FRAGMENT.md)

writes the file anew, with the fragment that says why. A fragment is good for one change: write a new one, or say more
in it. Leaves out whether the predictions are right (`evidence`).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from gnomon.cli.options.flags import parse_options
from gnomon.cli.options.predict import PredictOptions
from gnomon.cli.request import read_request
from gnomon.prediction import predict

HERE = Path(__file__).parent
FILE = HERE / "drift.toml"

H100, A100 = "h100-sxm", "a100-sxm-80gb"
COMMANDS = (
    f"gpt2 --on 1x8x{A100} --micro-batch-size 8 --global-batch 64 --seq-len 1024",
    f"gpt2 --on 1x1x{A100} --micro-batch-size 8 --global-batch 8 --seq-len 1024 --precision fp32",
    "gpt2 --on 1x8xv100-sxm-32gb --micro-batch-size 4 --global-batch 32 --seq-len 1024 --precision fp16",
    f"llama-3.1-8b --on 1x8x{H100} --zero 3 --micro-batch-size 1 --global-batch 16 --seq-len 8192",
    f"llama-3.1-8b --on 4x8x{H100} --stack megatron-lm --tp 2 --sequence-parallel --zero 1 --micro-batch-size 2 "
    "--global-batch 128 --seq-len 8192",
    f"llama-3.1-8b --on 4x8x{H100} --stack megatron-bridge --tp 2 --sequence-parallel --zero 1 --global-batch 128 "
    "--seq-len 8192 --precision fp8",
    f"llama-3.1-8b --on 8x8x{H100} --stack torchtitan --zero 3 --micro-batch-size 1 --global-batch 64 --seq-len 8192 "
    "--recompute selective",
    f"llama-3.1-8b --on 2x8x{H100} --stack nanotron --tp 4 --pp 2 --zero 1 --micro-batch-size 2 --global-batch 64 "
    "--seq-len 4096",
    f"llama-3.1-8b --on 8x8x{A100} --stack llm-foundry --zero 3 --micro-batch-size 2 --global-batch 256 "
    "--seq-len 2048 --recompute full",
    f"llama-3.1-8b --on 2x8x{A100} --stack megatron-deepspeed --tp 8 --pp 2 --micro-batch-size 1 --global-batch 32 "
    "--seq-len 2048 --recompute full --precision fp16",
    f"llama-3.1-8b --on 4x8x{H100} --cp 4 --zero 1 --micro-batch-size 1 --global-batch 8 --seq-len 131072 "
    "--recompute full",
    "llama-3.1-8b --on 1x8xh200-sxm --zero 3 --micro-batch-size 2 --global-batch 32 --seq-len 8192",
    "llama-3.1-8b --on 1x8xb200-sxm --stack megatron-bridge --zero 1 --global-batch 32 --seq-len 8192",
    "llama-3.1-8b --on 1x8xmi300x --zero 3 --micro-batch-size 2 --global-batch 32 --seq-len 8192",
    f"llama-3.1-70b --on 8x8x{H100} --stack megatron-lm --tp 4 --pp 4 --vpp 5 --sequence-parallel --zero 1 "
    "--micro-batch-size 1 --global-batch 128 --seq-len 8192",
    f"llama-3.1-70b --on 8x8x{H100} --tp 8 --pp 4 --schedule zero_bubble_h1 --micro-batch-size 1 --global-batch 64 "
    "--seq-len 4096",
    f"llama-3.1-70b --on 8x8x{H100} --tp 8 --pp 4 --schedule gpipe --micro-batch-size 1 --global-batch 64 "
    "--seq-len 4096 --recompute selective",
    f"llama-3.1-70b --on 32x8x{A100} --stack torchtitan --zero 3 --dp-replicate 4 --micro-batch-size 1 "
    "--global-batch 256 --seq-len 4096 --recompute full",
    f"llama-3.1-70b --on 8x8x{H100} --tp 4 --pp 4 --schedule v_half --micro-batch-size 1 --global-batch 64 "
    "--seq-len 4096",
    f"llama-3.1-405b --on 128x8x{H100} --stack megatron-lm --tp 8 --pp 16 --sequence-parallel --zero 1 "
    "--micro-batch-size 1 --global-batch 512 --seq-len 8192",
    f"mixtral-8x7b --on 8x8x{H100} --stack megatron-bridge --ep 8 --zero 1 --micro-batch-size 1 --global-batch 128 "
    "--seq-len 4096",
    f"mixtral-8x7b --on 2x8x{A100} --ep 8 --tp 2 --sequence-parallel --zero 1 --global-batch 32 --seq-len 4096",
    f"deepseek-v3 --on 64x8x{H100} --stack megatron-bridge --ep 64 --pp 8 --zero 1 --micro-batch-size 1 "
    "--global-batch 1024 --seq-len 4096 --recompute selective",
    f"qwen3-30b-a3b --on 4x8x{H100} --ep 8 --zero 1 --micro-batch-size 1 --global-batch 64 --seq-len 4096",
    f"gpt3-175b --on 16x8x{A100} --stack megatron-lm --tp 8 --pp 16 --vpp 6 --sequence-parallel "
    "--micro-batch-size 1 --global-batch 64 --seq-len 2048 --recompute selective --precision fp16",
    f"bert-large --on 1x8x{A100} --micro-batch-size 16 --global-batch 128 --seq-len 512",
    f"gemma-2-9b --on 1x8x{H100} --zero 3 --micro-batch-size 1 --global-batch 16 --seq-len 4096",
    f"vit-l-16 --on 1x8x{H100} --micro-batch-size 32 --global-batch 256",
    f"dit-xl-2 --on 1x8x{H100} --micro-batch-size 16 --global-batch 128",
    "llama-3.1-8b --on 4x4xtpu-v5p --zero 3 --micro-batch-size 1 --global-batch 16 --seq-len 8192 --recompute full",
)


@dataclass(frozen=True)
class Fixed:
    """One prediction."""

    command: str
    step_s: float
    peak_bytes: int


def predicted(command: str) -> Fixed:
    """A command's prediction now."""
    asked = read_request(parse_options(PredictOptions, shlex.split(command)))
    prediction = predict(asked.graph, asked.cluster, asked.plan, asked.workload, asked.stack)
    return Fixed(command, prediction.step_s, prediction.tightest.peak_bytes)


def kept() -> tuple[dict[str, Any], tuple[Fixed, ...]]:
    """(why they were last changed, the predictions) of the file."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return table["changed"], tuple(Fixed(**entry) for entry in table["predictions"])


def digest(path: Path) -> str:
    """Of a fragment's text."""
    return sha256(path.read_bytes()).hexdigest()[:16]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--because", type=Path, required=True, help="the changelog fragment that says why")
    fragment = options.parse_args().because
    if fragment.parent.name != "changelog.d" or not fragment.is_file():
        print(f"{fragment} is no fragment in changelog.d", file=sys.stderr)
        return 2
    actual = [predicted(command) for command in COMMANDS]
    if FILE.exists():
        changed, before = kept()
        if list(before) != actual and changed["text"] == digest(fragment):
            print(f"{fragment} says why of an earlier change; write a new fragment or say more", file=sys.stderr)
            return 2
    lines = ["# Written by tests/drift.py, with the fragment that says why.", "[changed]"]
    lines += [f'because = "changelog.d/{fragment.name}"', f'text = "{digest(fragment)}"']
    for entry in actual:
        lines += ["", "[[predictions]]", f'command = "{entry.command}"']
        lines += [f"step_s = {entry.step_s!r}", f"peak_bytes = {entry.peak_bytes}"]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

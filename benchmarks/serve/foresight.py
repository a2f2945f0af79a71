"""Copies of experts that the next layer is foreseen to want: `python benchmarks/serve/foresight.py [--no-file] …`.

A mixture of experts of random weights, whose routers are bent so that most tokens want the experts of one of two
processes. It is served with as many copies as `--copies` lists, in turn, and driven by `gnomon bench-serve`, prompts
mostly: tokens a second by the wall; CPU-seconds of the busier process, for which the other waits, and of both; and what
it says of its copies at the end. A record
of its routers (`--record-experts`) is what `gnomon predict --expert-copies` says its gain by. Writes
benchmarks/results/serve_foresight.md. Leaves out GPUs, where a copy hides behind the layer before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from gnomon.compiler.machine import this_machine
from gnomon.serving.measured import MeasuredLoad

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_foresight.md"
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024,
    "max_position_embeddings": 1024, "tie_word_embeddings": False,
}  # fmt: skip
LAYOUT = ("--tensor-parallel-size", "2", "--expert-parallel-size", "2", "--threads", "1", "--dtype", "bf16")
ASKED = ("--concurrency", "8", "--input-len", "256", "--output-len", "4")
BENT = 1.5
"""What all tokens' states add to the logits of the first two experts, in their spread, about."""
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
GNOMON = (sys.executable, "-m", "gnomon")


def write_model(folder: Path) -> None:
    """All tokens have one channel of their state in common, by which routers are bent."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SHAPE)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(0, 1.0)
        model.get_input_embeddings().weight[:, 0] = 4.0
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight") and weight.shape[0] == SHAPE["num_local_experts"]:
                weight.normal_(0, 1 / weight.shape[1] ** 0.5)
                weight[:, 0] = 0.0
                weight[:2, 0] = BENT / 4.0
    model.to(torch.bfloat16).save_pretrained(folder)


@dataclass(slots=True)
class Served:
    """What was seen of a server."""

    tokens_per_s: list[float] = field(default_factory=list)
    busiest_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    said: str = ""


def seconds(pid: int) -> dict[int, float]:
    """CPU time of each process that a process has begun."""
    made: dict[int, float] = {}
    for child in children(pid):
        ticks = sum(map(int, Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2].split()[11:13]))
        made |= {child: ticks / os.sysconf("SC_CLK_TCK"), **seconds(child)}
    return made


def children(pid: int) -> list[int]:
    """Lists the process ids of the children that all threads of a process have started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@contextlib.contextmanager
def serving(folder: Path, out: Served, *more: str) -> Iterator[tuple[str, int]]:
    """(address, process) of a server; what it says at its end."""
    command = [*GNOMON, "serve", str(folder), "--port", "0", "--kv-memory", "128 MiB", *LAYOUT, *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENV) as process:
        assert process.stderr is not None
        url = next(line.split(" on ")[1].split()[0] for line in process.stderr if " on http" in line)
        try:
            yield url, process.pid
        finally:
            process.terminate()
            out.said = next((line for line in process.stderr if "copies of experts" in line), "").partition(": ")[2]


def driven(url: str, pid: int, count: int, out: Served, beside: Path) -> None:
    """A load, and what it took."""
    before = seconds(pid)
    command = [*GNOMON, "bench-serve", url, *ASKED, "--num-requests", str(count), "-o", str(beside / "measured.json")]
    subprocess.run(command, check=True, env=ENV, stdout=subprocess.DEVNULL)
    rows = MeasuredLoad.read((beside / "measured.json").read_text(), "measured.json").rows
    end, tokens = max(row[2] for row in rows), sum(row[3] + row[4] for row in rows)
    out.tokens_per_s.append(tokens / end)
    took = [after - before[pid] for pid, after in seconds(pid).items()]
    out.busiest_s.append(max(took))
    out.cpu_s.append(sum(took))


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="of a round")
    parser.add_argument("--on", default="cpu-process", help="what predictions are for, one process of it; cpu-process")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found = {copies: Served() for copies in options.copies}
    with tempfile.TemporaryDirectory() as name:
        folder, record = Path(name) / "model", Path(name) / "paths.npz"
        write_model(folder)
        with serving(folder, Served(), "--record-experts", str(record)) as (url, pid):
            driven(url, pid, options.requests, Served(), Path(name))
        for _ in range(options.rounds):
            for copies, own in found.items():
                more = ("--expert-copies", str(copies)) if copies else ()
                with serving(folder, own, *more) as (url, pid):
                    driven(url, pid, 8, Served(), Path(name))  # paths are learnt
                    driven(url, pid, options.requests, own, Path(name))
        predicted = {}
        for copies in options.copies:
            command = [*GNOMON, "predict", str(folder), "--serve", "--engine", "gnomon", "--on", f"2x{options.on}"]
            command += ["--tp", "2", "--ep", "2", "--router", str(record), *ASKED, "--num-requests", "16", "--json"]
            command += ["--expert-copies", str(copies)] if copies else []
            told = json.loads(subprocess.run(command, check=True, env=ENV, capture_output=True, text=True).stdout)
            lines = [one for one in told["assumptions"] if "foreseen" in one]
            predicted[copies] = re.sub(r"\S*paths.npz", "the record", lines[0]) if lines else ""
    lines = ["| copies a process | tokens a second | CPU-seconds of the busier process | of both | it says |",
             "|---|---|---|---|---|"]  # fmt: skip
    for copies, own in found.items():
        cells = [f"{statistics.median(v):{form}} [{min(v):{form}}, {max(v):{form}}]"
                 for v, form in ((own.tokens_per_s, ".0f"), (own.busiest_s, ".2f"), (own.cpu_s, ".2f"))]  # fmt: skip
        lines.append(f"| {copies} | {' | '.join(cells)} | {own.said.strip()} |")
    lines += ["", "Predicted:", "", *(f"- {one}." for one in predicted.values() if one)]
    print("\n".join(lines))
    if not options.no_file:
        head = [
            "# Copies of foreseen experts (Lina)",
            "",
            f"`python benchmarks/serve/foresight.py {' '.join(sys.argv[1:])}`, {datetime.now(UTC):%Y-%m-%d %H:%M}, "
            f"{this_machine().model}, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; two processes "
            f"of one thread, bf16, Mixtral's layers of 512 with 8 experts of 1,024, bent so that most tokens want "
            f"those of the first process; prompts of 256, answers of 4, 8 at once; median [least, most] of "
            f"{options.rounds} rounds in turn.",
            "",
        ]
        RESULTS.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

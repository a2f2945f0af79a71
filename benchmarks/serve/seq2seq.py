"""What `gnomon predict --serve` says of an encoder with a decoder on this machine, against what `gnomon serve` does.

`python benchmarks/serve/seq2seq.py [--on FILE] [--no-file]`

A T5 of t5-small's shape with random weights in bfloat16, one thread, under three traces, on the clock of the engine's
own CPU time as `predicted.py` has it: each iteration's CPU-seconds are held against the price of its batch, and times
to first and further tokens against the replay. The machine is measured first (`gnomon calibrate --processes 1`; --on
takes a file of one). Writes benchmarks/results/serve_seq2seq.md. Leaves out HTTP.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from predicted import on_cpu_clock

from gnomon.compiler.machine import this_machine
from gnomon.hardware import parse_cluster
from gnomon.runtime.checkpoint.pretrained import model_of
from gnomon.serve.load import open_model
from gnomon.serving.forecast import serve
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.measured import MeasuredLoad
from gnomon.serving.requests import Request
from gnomon.software.engine import engine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_seq2seq.md"
LONGEST = 1024


def traces() -> dict[str, list[Request]]:
    """The requests of each trace, by its name; the seed makes them the same in every run."""
    rng = random.Random(3)
    steady, at = [], 0.0
    for _ in range(40):
        steady.append(Request(arrival_s=at, input_len=rng.choice((48, 96, 160)), output_len=rng.choice((16, 32, 48))))
        at += rng.expovariate(5.0)
    bursty = [
        Request(arrival_s=3.0 * burst, input_len=rng.choice((40, 80, 200)), output_len=rng.choice((12, 24)))
        for burst in range(5)
        for _ in range(8)
    ]
    long = [Request(arrival_s=1.0 * n, input_len=rng.choice((500, 700, 900)), output_len=24) for n in range(12)]
    return {"steady": steady, "bursty": bursty, "long prompts": long}


def main() -> int:
    """The table, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", help="a machine that gnomon calibrate has measured")
    parser.add_argument("--no-file", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rules = replace(engine("gnomon"), max_seqs=8, max_batched_tokens=1024)
    alone = replace(rules, request_s=0.0, request_token_s=0.0)
    table = [
        "| trace | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | CPU-seconds of an iteration with a text | without |"
    ]
    table.append("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder, machine = Path(name) / "model", options.on or f"{name}/local.toml"
        if not options.on:
            command = [sys.executable, "-m", "gnomon", "calibrate", "--processes", "1", "-o", machine]
            subprocess.run(command, check=True)
        cluster = parse_cluster(machine)
        config = transformers.T5Config(
            d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, decoder_start_token_id=0
        )
        transformers.T5ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)
        graph = model_of(folder).graph
        model = open_model(folder, rules, dtype="bf16", kv_bytes=1 << 28, max_model_len=LONGEST)
        price = IterationPrice(graph, cluster, Serving(max_model_len=LONGEST), rules)
        on_cpu_clock(model, traces()["bursty"][:8])
        for trace, requests in traces().items():
            model.record = []
            seen, steps = on_cpu_clock(model, requests)
            batches = [one.batch for one in model.record if one.batch.pieces or one.batch.decodes]
            ours = [price.batch_ticks(batch) / TICKS_PER_S for batch in batches]
            measured = MeasuredLoad.of(seen, concurrency=None)
            found = serve(graph, cluster, Serving(max_model_len=LONGEST), alone, measured.load())
            cells = []
            for what in ("ttft", "tpot"):
                for at in ("p50", "p99"):
                    told, took = (getattr(getattr(one, what), at) for one in (found, measured))
                    cells.append(f"{1e3 * told:.1f} / {1e3 * took:.1f} ms {told / took - 1:+.0%}")
            for with_text in (True, False):
                kind = [at for at, batch in enumerate(batches) if bool(batch.pieces) == with_text]
                told, took = (statistics.fmean(times[at] for at in kind) for times in (ours, steps))
                cells.append(f"{1e3 * told:.2f} / {1e3 * took:.2f} ms {told / took - 1:+.0%}")
            table.append(f"| {trace} | {' | '.join(cells)} |")
            print(table[-1], flush=True)
    if not options.no_file:
        lines = [
            "# Predicted and measured: an encoder with a decoder on this machine's own server",
            "",
            f"`python benchmarks/serve/seq2seq.py`, {datetime.now(UTC):%Y-%m-%d}, {this_machine().model}, one thread, "
            "t5-small's shape with random weights in bfloat16, after `gnomon calibrate --processes 1`; cells are "
            "predicted / measured and how far predicted is off, on the clock of the engine's own CPU time.",
            "",
            *table,
        ]
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

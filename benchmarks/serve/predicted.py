"""What `gnomon predict --serve` says of this machine's own server, against what it does.

`python benchmarks/serve/predicted.py [--on FILE] [--no-file] [--no-http] [--no-cpu]`

A model of SmolLM2-135M's shape with random weights, one thread, under three traces: steady, bursty, long prompts. The
machine is measured first (`gnomon calibrate --processes 1`; --on takes a file of one). Twice: the engine on the clock
of its own CPU time, so that nothing else on the machine counts, each step's CPU-seconds held against the price of its
batch; and `gnomon serve` over HTTP by the wall's clock, driven by `gnomon bench-serve` from a process beside it, after
some requests that warm it: that wants a machine whose other core is free. Writes
benchmarks/results/serve_predicted.md, with how many of the figures are within the goals. Leaves out other models and
devices.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from speed import SHAPES

from gnomon.compiler.machine import this_machine
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.runtime.checkpoint.pretrained import model_of
from gnomon.serve.engine import Engine
from gnomon.serve.load import open_model
from gnomon.serve.sampling import Sampling
from gnomon.serving.forecast import Forecast, serve
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.measured import MeasuredLoad
from gnomon.serving.requests import Load, Request
from gnomon.serving.scheduler import Batch
from gnomon.software.engine import Engine as Rules
from gnomon.software.engine import engine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "serve_predicted.md"
LONGEST = 2048
FORMS = {"bf16": ("stored", "bf16"), "int8": ("int8", "int8-wo")}
"""Name -> (--weights of the server, --weights of the prediction)."""


def traces() -> dict[str, list[Request]]:
    """By name."""
    rng = random.Random(5)
    steady, at = [], 0.0
    for _ in range(32):
        steady.append(Request(arrival_s=at, input_len=rng.choice((64, 128, 192)), output_len=rng.choice((16, 32, 48))))
        at += rng.expovariate(1.2)
    bursty = [
        Request(arrival_s=8.0 * burst + 0.01 * n, input_len=rng.choice((48, 96, 160)), output_len=rng.choice((12, 24)))
        for burst in range(4)
        for n in range(8)
    ]
    long = [
        Request(arrival_s=7.0 * n, input_len=rng.choice((900, 1200, 1500)), output_len=rng.choice((12, 20)))
        for n in range(8)
    ]
    return {"steady": steady, "bursty": bursty, "long prompts": long}


@dataclass(frozen=True, slots=True)
class Seen:
    """A request, in seconds."""

    arrival_s: float
    first_s: float
    end_s: float
    input_len: int
    output_len: int


def on_cpu_clock(model: Engine, requests: list[Request], seed: int) -> tuple[list[Seen], list[float]]:
    """(requests, CPU-seconds of each iteration), where time goes on only as the engine computes or waits. seed: of the
    prompts, another each time, or the prefix cache knows them."""
    rng, clock, left = random.Random(seed), 0.0, list(requests)
    of: dict[int, Request] = {}
    first: dict[int, float] = {}
    seen, steps = [], []
    while left or model.has_work:
        if not model.has_work:
            clock = max(clock, left[0].arrival_s)
        before = time.process_time()
        while left and left[0].arrival_s <= clock:
            one = left.pop(0)
            prompt = [rng.randrange(5, 4000) for _ in range(one.input_len)]
            of[model.add(prompt, Sampling(max_tokens=one.output_len, temperature=0))[0]] = one
        done = model.iterations
        made = model.step()
        spent = time.process_time() - before
        clock += spent
        if model.iterations > done:
            steps.append(spent)
        for token in made:
            first.setdefault(token.key, clock)
            if token.reason is not None:
                r = of[token.key]
                seen.append(Seen(r.arrival_s, first[token.key], clock, r.input_len, r.output_len))
    return seen, steps


def by_kind(batches: Sequence[Batch], ours: Sequence[float], steps: Sequence[float]) -> str:
    """Predicted / measured milliseconds of a step of each kind, and how often there was one: the mean of all does not
    show prices that are off for one kind. ours, steps: seconds of each batch."""
    kinds = defaultdict[str, list[tuple[float, float]]](list)
    for batch, price, spent in zip(batches, ours, steps, strict=True):
        both = "prompts and decodes" if batch.decodes else "prompts"
        kinds[both if batch.pieces else f"decodes of {batch.decodes}"].append((price, spent))
    told = []
    for kind, pairs in sorted(kinds.items()):
        price, spent = (sum(column) for column in zip(*pairs, strict=True))
        each = f"{1e3 * price / len(pairs):.1f} / {1e3 * spent / len(pairs):.1f} ms"
        told.append(f"{kind} {each} {price / spent - 1:+.0%} ({len(pairs)})")
    return "; ".join(told)


@dataclass(slots=True)
class Table:
    """Rows of one of the two ways to measure, and how far predictions are off."""

    title: str
    more: str = ""
    """A further column."""
    lines: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    """Predicted over measured, less 1."""
    steps: list[float] = field(default_factory=list)

    def add(self, name: str, form: str, found: Forecast, measured: MeasuredLoad, more: str = "") -> None:
        """A trace's row, which is printed."""
        cells = []
        for what in ("ttft", "tpot"):
            for at in ("p50", "p99"):
                ours, theirs = (getattr(getattr(one, what), at) for one in (found, measured))
                self.latencies.append(ours / theirs - 1)
                cells.append(f"{1e3 * ours:.0f} / {1e3 * theirs:.0f} ms {self.latencies[-1]:+.0%}")
        self.lines.append(f"| {form} | {name} | {' | '.join([*cells, *([more] if more else [])])} |")
        print(self.lines[-1], flush=True)

    def page(self) -> list[str]:
        """Returns the lines of the results page; none where nothing was measured."""
        if not self.lines:
            return []
        head = f"| weights | trace | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 |{self.more}"
        within = [sum(abs(off) <= most for off in offs) for offs, most in ((self.latencies, 0.2), (self.steps, 0.1))]
        said = f"{within[0]} of {len(self.latencies)} latencies are within 20 %"
        said += f", {within[1]} of {len(self.steps)} steps within 10 %" if self.steps else ""
        return ["", f"## {self.title}", "", head, "|---" * (head.count("|") - 1) + "|", *self.lines, "", f"{said}."]


@contextlib.contextmanager
def serving(folder: Path, weights: str, env: dict[str, str]) -> Iterator[str]:
    """The address of `gnomon serve`, with the limits of what is predicted."""
    command = [
        sys.executable, "-m", "gnomon", "serve", str(folder), "--port", "0", "--dtype", "bf16", "--weights", weights,
        "--kv-memory", "512 MiB", "--max-model-len", str(LONGEST), "--max-num-seqs", "8",
        "--max-num-batched-tokens", "512", "--threads", "1",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            yield next(line.split(" on ")[1].split()[0] for line in process.stderr if " on http" in line)
        finally:
            process.terminate()


def over_http(url: str, requests: list[Request], beside: Path, env: dict[str, str], seed: int) -> MeasuredLoad:
    """What `gnomon bench-serve` measures of a trace. beside: a folder for its files. seed: of the prompts, another each
    time, or the server's prefix cache knows them."""
    asked, out = beside / "trace.csv", beside / "measured.json"
    lines = [f"{r.arrival_s},{r.input_len},{r.output_len}" for r in requests]
    asked.write_text("\n".join(["arrival_s,input_len,output_len", *lines]) + "\n")
    command = [sys.executable, "-m", "gnomon", "bench-serve", url, "--requests", str(asked), "-o", str(out)]
    command += ["--seed", str(seed)]
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
    return MeasuredLoad.read(out.read_text(), str(out))


def predicted(graph: Graph, cluster: Cluster, rules: Rules, weights: str, load: Load) -> Forecast:
    """Of one process."""
    return serve(graph, cluster, Serving(weights=weights, max_model_len=LONGEST), rules, load)


def main() -> int:
    """The tables, and the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", help="a machine that gnomon calibrate has measured")
    parser.add_argument("--no-file", action="store_true", help="print only")
    parser.add_argument("--no-http", action="store_true", help="the CPU's clock alone")
    parser.add_argument("--no-cpu", action="store_true", help="over HTTP alone")
    parser.add_argument("--forms", nargs="*", default=[*FORMS], choices=[*FORMS], help="of weights")
    parser.add_argument("--traces", nargs="*", default=[*traces()], choices=[*traces()])
    options = parser.parse_args()
    asked_for = {name: requests for name, requests in traces().items() if name in options.traces}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rules = replace(engine("gnomon"), max_seqs=8, max_batched_tokens=512)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    on_cpu = Table("On the clock of the engine's own CPU time", " CPU-seconds a step |")
    http = Table(f"Over HTTP, by the wall (load average before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores)")
    with tempfile.TemporaryDirectory() as name:
        folder, machine = Path(name) / "model", options.on or f"{name}/local.toml"
        if not options.on:
            command = [sys.executable, "-m", "gnomon", "calibrate", "--processes", "1", "-o", machine]
            subprocess.run(command, check=True, env=env)
        cluster = parse_cluster(machine)
        kind, shape = SHAPES["135M"]
        config = getattr(transformers, kind)(**shape, max_position_embeddings=8192, tie_word_embeddings=True)
        transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
        graph = model_of(folder).graph
        for form, (weights, told) in ((form, FORMS[form]) for form in options.forms):
            if not options.no_http:
                with serving(folder, weights, env) as url:
                    over_http(url, [replace(r, arrival_s=0.0) for r in traces()["bursty"][:8]], Path(name), env, 0)
                    for seed, (trace, requests) in enumerate(asked_for.items(), 1):
                        measured = over_http(url, requests, Path(name), env, seed)
                        http.add(trace, form, predicted(graph, cluster, rules, told, measured.load()), measured)
            if options.no_cpu:
                continue
            model = open_model(folder, rules, dtype="bf16", weights=weights, kv_bytes=1 << 29, max_model_len=LONGEST)
            price = IterationPrice(graph, cluster, Serving(weights=told, max_model_len=LONGEST), rules)
            alone = replace(rules, request_s=0.0, request_token_s=0.0)
            on_cpu_clock(model, traces()["bursty"][:8], 0)
            for seed, (trace, requests) in enumerate(asked_for.items(), 1):
                model.record = []
                seen, steps = on_cpu_clock(model, requests, seed)
                batches = [one.batch for one in model.record if one.batch.pieces or one.batch.decodes]
                ours = [price.batch_ticks(batch) / TICKS_PER_S for batch in batches]
                on_cpu.steps.append(sum(ours) / sum(steps) - 1)
                print(f"{form}, {trace}, steps by kind: {by_kind(batches, ours, steps)}", flush=True)
                each = f"{1e3 * sum(ours) / len(ours):.1f} / {1e3 * statistics.fmean(steps):.1f} ms"
                measured = MeasuredLoad.of(seen, concurrency=None)
                found = predicted(graph, cluster, alone, told, measured.load())
                on_cpu.add(trace, form, found, measured, f"{each} {on_cpu.steps[-1]:+.0%}")
            del model
    if not options.no_file:
        flags = " --no-http" * options.no_http + " --no-cpu" * options.no_cpu
        lines = [
            "# Predicted and measured: this machine's own server",
            "",
            f"`python benchmarks/serve/predicted.py{flags}`, {datetime.now(UTC):%Y-%m-%d %H:%M}, "
            f"{this_machine().model}, one thread, SmolLM2-135M's shape with random weights, after `gnomon calibrate "
            "--processes 1`; cells are predicted / measured and how far predicted is off. Goals are 20 % of latencies "
            "and 10 % of a step.",
            *on_cpu.page(),
            *http.page(),
        ]
        RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""How long replaying 100,000 requests and planning take, and whether the search's best is that of playing all.

`python benchmarks/serving/replay.py [speed] [plans] [brute]` prints CPU-seconds of this process and needs no GPU.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.serving.capacity import capacity
from gnomon.serving.forecast import Target
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.replay import replay
from gnomon.serving.requests import closed, poisson
from gnomon.serving.space import best, exhaustive, space
from gnomon.software.engine import engine


def speed() -> None:
    """100,000 requests, open and closed loop, three engines."""
    graph, cluster = model("llama-3.1-70b"), parse_cluster("4xh100-sxm")
    serving = Serving(max_model_len=4096, tp=4)
    loads = {
        "open, 8 requests/s": poisson(1000, 200, 8, 100_000, spread=0.5),
        "closed, 128 clients": closed(1000, 200, 128, 100_000, spread=0.5),
    }
    print("| engine | load | CPU-s | iterations |\n|---|---|---|---|")
    for name in ("vllm", "sglang", "tensorrt-llm"):
        rules = engine(name)
        price = IterationPrice(graph, cluster, serving, rules)
        blocks = capacity(graph, cluster, serving, rules).blocks
        for said, load in loads.items():
            begun = time.process_time()
            played = replay(load, price, blocks)
            print(f"| {name} | {said} | {time.process_time() - begun:.1f} | {played.iterations:,} |")


PLANS = (("llama-3.3-70b", "8xh100-sxm"), ("llama-3.3-70b", "8x8xh100-sxm"), ("qwen3-30b-a3b", "8xh100-sxm"),
         ("deepseek-v3", "2x8xh200-sxm"), ("deepseek-v3", "8x8xh200-sxm"))  # fmt: skip
"""Models on 8 to 64 devices."""


def plans() -> None:
    """`gnomon plan --serve` whole, from the start of the process, as a user has it."""
    print("\n| model, devices | candidates | CPU-s |\n|---|---|---|")
    for of, on in PLANS:
        command = [
            sys.executable, "-m", "gnomon", "plan", of, "--serve", "--on", on, "--input-len", "1000", "--output-len",
            "500", "--concurrency", "128", "--ttft", "2s", "--tpot", "50ms",
        ]  # fmt: skip
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        first = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[0]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"| {of}, {on} | {first.partition(': ')[2]} | {spent:.1f} |", flush=True)


def brute() -> None:
    """Spaces searched and played whole."""
    print(
        "\n| model, devices | candidates | played | bounded | CPU-s | CPU-s of all | equal |"
        "\n|---|---|---|---|---|---|---|"
    )
    for of, on in (("llama-3.1-8b", "8xh100-sxm"), ("qwen3-30b-a3b", "8xh100-sxm")):  # over 5,000 points each
        graph, cluster = model(of), parse_cluster(on)
        candidates = space(
            cluster,
            [engine("vllm"), engine("sglang"), engine("tensorrt-llm")],
            1024,
            weights=("bf16", "fp8", "int4-wo"),
            kv=("bf16", "fp8"),
            max_seqs=(8, 32, 128, 512),
            budgets=(1024, 2048, 8192),
            experts="qwen3" in of,
            fewer=True,
            pools=True,
        )
        load, target = closed(500, 12, 32, 48), Target(ttft_s=1.0, tpot_s=0.02)
        times, found = [], []
        for search in (best, exhaustive):
            begun = time.process_time()
            found.append(search(graph, cluster, candidates, load, target))
            times.append(time.process_time() - begun)
        one, whole = found
        equal = (one.best and one.best.value) == (whole.best and whole.best.value)
        print(
            f"| {of}, {on} | {one.size} | {one.played} | {one.bounded} | {times[0]:.1f} | {times[1]:.1f} | {equal} |",
            flush=True,
        )


if __name__ == "__main__":
    for name in sys.argv[1:] or ("speed", "plans", "brute"):
        {"speed": speed, "plans": plans, "brute": brute}[name]()

"""Kernels of backend "gnomon" beside eager and Inductor, in one process and in turn.

    python benchmarks/compiler/table.py [--peers eager,gnomon,inductor] [--only softmax,rms] [--threads 1] [--rounds 40]

Prints a row a case: CPU milliseconds of each (median, quartiles), the ratio to eager, seconds of the first
call, and the bound: bytes that must move at the bandwidth that adding a number to 64 MiB reaches here in the
same rounds. CPU time, so that other work on the machine counts less; inputs and outputs are float32.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

import torch
from torch.nn import functional as F

from gnomon.compiler import backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    call: Callable[..., Any]
    inputs: tuple[torch.Tensor, ...]
    train: bool = False
    moved: int
    """Arrays of the first input's size that must be read or written."""


def cases() -> list[Case]:
    torch.manual_seed(0)
    rows, columns = 2048, 1024
    x, y, w, b = torch.randn(rows, columns), torch.randn(rows, columns), torch.randn(columns), torch.randn(columns)
    target = torch.randint(0, columns, (rows,))
    table = [
        ("softmax", lambda a: F.softmax(a, -1), (x,), 2, 3),
        ("log-softmax", lambda a: F.log_softmax(a, -1), (x,), 2, 3),
        ("layer norm", lambda a, p, q: F.layer_norm(a, (columns,), p, q), (x, w, b), 2, 3),
        ("add, layer norm, GELU", lambda a, c, p, q: F.gelu(F.layer_norm(a + c, (columns,), p, q)), (x, y, w, b), 3, 5),
        ("RMS norm", lambda a, p: F.rms_norm(a, (columns,), p), (x, w), 2, 3),
        ("GELU", lambda a: F.gelu(a), (x,), 2, 3),
        ("SwiGLU", lambda a, c: F.silu(a) * c, (x, y), 3, 5),
        ("cross-entropy", lambda a: F.cross_entropy(a, target), (x,), 1, 2),
    ]
    out = []
    for name, call, inputs, forward, backward in table:
        out.append(Case(name=name, call=call, inputs=inputs, moved=forward))
        out.append(Case(name=f"{name}, training", call=call, inputs=inputs, train=True, moved=forward + backward))
    return out


def caller(case: Case, peer: str) -> Callable[[], Any]:
    torch._dynamo.reset()
    leaves = tuple(t.clone().requires_grad_(case.train) for t in case.inputs)
    call = case.call
    if peer == "gnomon":
        call = torch.compile(case.call, backend=backend.gnomon)
    elif peer == "inductor":
        call = torch.compile(case.call)

    def once() -> Any:
        with torch.set_grad_enabled(case.train):
            out = call(*leaves)
        return torch.autograd.grad(out.sum(), leaves) if case.train else out

    return once


def measured(case: Case, peers: list[str], rounds: int) -> dict[str, tuple[float, float, float, float]]:
    """Peer -> (quartiles of CPU milliseconds, seconds of the first call); `add` reads and writes one array."""
    calls, first = {}, {}
    for peer in peers:
        calls[peer] = caller(case, peer)
        start = time.perf_counter()
        calls[peer]()
        first[peer] = time.perf_counter() - start
        calls[peer]()
    a = torch.zeros_like(case.inputs[0])
    out = torch.empty_like(a)
    calls["add"], first["add"] = (lambda: torch.add(a, 1.0, out=out)), 0.0
    times: dict[str, list[float]] = {peer: [] for peer in calls}
    for _ in range(rounds):
        for peer, call in calls.items():
            start = time.process_time()
            call()
            times[peer].append((time.process_time() - start) * 1e3)
    return {peer: (*quantiles(t, n=4), first[peer]) for peer, t in times.items()}  # type: ignore[return-value, arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="eager,gnomon,inductor")
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    peers = options.peers.split(",")
    print(
        "| case | " + " | ".join(f"{p} ms (quartiles)" for p in peers) + " | eager / gnomon | bound ms | first call s |"
    )
    print("|---" * (len(peers) + 4) + "|")
    for case in cases():
        if options.only and not any(word in case.name for word in options.only.split(",")):
            continue
        result = measured(case, peers, options.rounds)
        shown = " | ".join(f"{result[p][1]:.2f} ({result[p][0]:.2f}-{result[p][2]:.2f})" for p in peers)
        ratio = f"{result['eager'][1] / result['gnomon'][1]:.2f}" if {"eager", "gnomon"} <= set(peers) else ""
        bound = result["add"][1] / 2 * case.moved
        first = ", ".join(f"{p} {result[p][3]:.1f}" for p in peers)
        print(f"| {case.name} | {shown} | {ratio} | {bound:.2f} | {first} |", flush=True)


if __name__ == "__main__":
    main()

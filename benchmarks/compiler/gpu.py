"""Groups and a model on the GPU of this machine: eager, `backend="gnomon"` (Triton) and Inductor, in turn.

`python benchmarks/compiler/gpu.py`: for each case the median milliseconds of each over rounds in which they alternate,
the share of what copying as many bytes as the group must move would take (measured in the same run), and seconds to
compile cold. Results are compared with eager's. Writes results/compiler_gpu.md. Left out: several GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from gnomon.compiler.backend import gnomon, reports

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "compiler_gpu.md"
BF16, FP32 = torch.bfloat16, torch.float32
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...], bool]
"""A function, its inputs, whether its backward runs too."""


def made(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> torch.Tensor:
    """Random numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype).requires_grad_(grad)


def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """RMS norm as Llama's code has it."""
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding as transformers has it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def cases() -> dict[str, Case]:
    """What is timed."""
    ids = torch.randint(0, 32000, (8192,), device="cuda")
    long = torch.randint(0, 128256, (2048,), device="cuda")
    return {
        "softmax, 8192 x 4096, bf16": (lambda x: F.softmax(x, -1), (made(8192, 4096),), False),
        "softmax, 8192 x 4096, fp32": (lambda x: F.softmax(x, -1), (made(8192, 4096, dtype=FP32),), False),
        "layer norm, 8192 x 4096, bf16": (
            lambda x, w, b: F.layer_norm(x, (4096,), w, b), (made(8192, 4096), made(4096), made(4096)), False,
        ),
        "layer norm, forward and backward": (
            lambda x, w, b: F.layer_norm(x, (4096,), w, b),
            (made(8192, 4096, grad=True), made(4096, grad=True), made(4096, grad=True)), True,
        ),
        "RMS norm by hand, 8192 x 4096, bf16": (rms, (made(8192, 4096), made(4096)), False),
        "RMS norm by hand, forward and backward": (rms, (made(8192, 4096, grad=True), made(4096, grad=True)), True),
        "residual, RMS norm, 8192 x 4096": (
            lambda x, y, w: (x + y, rms(x + y, w)), (made(8192, 4096), made(8192, 4096), made(4096)), False,
        ),
        "SwiGLU, 8192 x 14336, bf16": (lambda x, y: F.silu(x) * y, (made(8192, 14336), made(8192, 14336)), False),
        "SwiGLU, forward and backward": (
            lambda x, y: F.silu(x) * y, (made(8192, 14336, grad=True), made(8192, 14336, grad=True)), True,
        ),
        "bias, GELU, forward and backward": (
            lambda x, b: F.gelu(x + b), (made(8192, 16384, grad=True), made(16384, grad=True)), True,
        ),
        "rotary embedding, 4 x 32 x 2048 x 128": (
            rope, (made(4, 32, 2048, 128), made(2048, 128), made(2048, 128)), False,
        ),
        "cross-entropy of 8192 x 32000, fp32": (
            lambda x: F.cross_entropy(x.float(), ids), (made(8192, 32000),), False,
        ),
        "cross-entropy, forward and backward": (
            lambda x: F.cross_entropy(x.float(), ids), (made(8192, 32000, grad=True),), True,
        ),
        "cross-entropy of 2048 x 128256, forward and backward": (
            lambda x: F.cross_entropy(x.float(), long), (made(2048, 128256, grad=True),), True,
        ),
    }  # fmt: skip


def call_of(function: Callable[..., Any], inputs: Sequence[torch.Tensor], backward: bool) -> Callable[[], Any]:
    """One step: the outputs, and the gradients after them."""
    wanted = [x for x in inputs if x.requires_grad]

    def call() -> Any:
        out = function(*inputs)
        outs = out if isinstance(out, tuple) else (out,)
        return (*outs, *torch.autograd.grad(outs[0].float().sum(), wanted)) if backward else outs

    return call


def timed(call: Callable[[], Any], repeat: int) -> float:
    """Milliseconds of one among several in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def bandwidth() -> float:
    """Bytes a second, read and written, of a copy of 1 GiB."""
    a = torch.empty(2**28, device="cuda")
    b = torch.empty_like(a)
    took = min(timed(lambda: b.copy_(a), 5) for _ in range(5))
    return 2 * a.nbytes / (took / 1e3)


def apart(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> float:
    """Largest difference, of the largest element."""
    a, b = ([x.detach() for x in entry] for entry in (a, b))
    return max(
        float((x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(1e-30))
        for x, y in zip(a, b, strict=True)
    )


def one(name: str, case: Case, speed: float, rounds: int) -> dict[str, Any]:
    """A row."""
    function, inputs, backward = case
    torch._dynamo.reset()
    reports.clear()
    ways: dict[str, Callable[..., Any]] = {"eager": function}
    row: dict[str, Any] = {"name": name}
    for way, backend in (("gnomon", gnomon), ("inductor", "inductor")):
        ways[way] = torch.compile(function, backend=backend)
        began = time.perf_counter()
        call_of(ways[way], inputs, backward)()
        torch.cuda.synchronize()
        row[f"{way}_compile_s"] = time.perf_counter() - began
    exact = call_of(function, inputs, backward)()
    for way in ("gnomon", "inductor"):  # the first call of ours was ATen's beside each kernel
        row[f"{way}_apart"] = apart(call_of(ways[way], inputs, backward)(), exact)
    calls = {way: call_of(compiled, inputs, backward) for way, compiled in ways.items()}
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, call in calls.items():
            times[way].append(timed(call, 10))
    row |= {way: statistics.median(time) for way, time in times.items()}
    outs = calls["eager"]()
    least = sum(x.nbytes for x in (*inputs, *outs))
    row["share"] = least / speed * 1e3 / row["gnomon"]
    row["groups"] = sum(len(made.program.groups) for made in reports)
    row["kept"] = sum(made.kept(p) for made in reports for p in made.program.groups)
    return row


def llama(rounds: int) -> dict[str, Any]:
    """A training step of a Llama of transformers, 4 layers of the 8B's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(BF16)
    ids = torch.randint(0, 32000, (4, 2048), device="cuda")

    def step(run: Any) -> tuple[torch.Tensor, ...]:
        loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        model.zero_grad()
        loss.backward()
        return (loss.detach(),)

    torch._dynamo.reset()
    reports.clear()
    ways = {"eager": model, "gnomon": torch.compile(model, backend=gnomon), "inductor": torch.compile(model)}
    row: dict[str, Any] = {
        "name": "Llama, 4 layers of 8B's size, 4 x 2048, forward and backward",
        "share": float("nan"),
    }
    wanted = step(model)
    for way in ("gnomon", "inductor"):
        began = time.perf_counter()
        row[f"{way}_apart"] = apart(step(ways[way]), wanted)
        torch.cuda.synchronize()
        row[f"{way}_compile_s"] = time.perf_counter() - began
    times: dict[str, list[float]] = {way: [] for way in ways}
    for way in ways:
        step(ways[way])
        step(ways[way])
    for _ in range(rounds):
        for way, run in ways.items():
            times[way].append(timed(lambda run=run: step(run), 2))
    row |= {way: statistics.median(time) for way, time in times.items()}
    row["groups"] = sum(len(made.program.groups) for made in reports)
    row["kept"] = sum(made.kept(p) for made in reports for p in made.program.groups)
    return row


def main() -> int:
    """Times, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=200, help="start no case after this")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    speed = bandwidth()
    todo = [
        (name, lambda name=name, case=case: one(name, case, speed, options.rounds)) for name, case in cases().items()
    ]
    todo.insert(6, ("llama", lambda: llama(options.rounds)))
    for name, run in todo:
        if time.perf_counter() - began > options.seconds:
            break
        try:
            rows.append(run())
        except Exception as error:  # a case that fails is a line that says so
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:1500]}", flush=True)
            continue
        print(f"{time.perf_counter() - began:6.1f} s", rows[-1], flush=True)
        torch.cuda.empty_cache()
    lines = [
        "# The compiler on a GPU",
        "",
        f"`python benchmarks/compiler/gpu.py`, {datetime.now(UTC):%Y-%m-%d}, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}. Medians of {options.rounds} rounds in which the three alternate; copying moves "
        f"{speed / 1e12:.2f} TB/s here. Bound: the time of a copy of inputs and results, of gnomon's time; "
        "a backward's own reads are not in it. Apart: the largest difference from eager, of the largest element.",
        "",
        "| case | eager ms | gnomon ms | Inductor ms | eager / gnomon | Inductor / gnomon | bound | "
        "compile s, gnomon | Inductor | groups kept | apart, gnomon | Inductor |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['eager']:.3f} | {row['gnomon']:.3f} | {row['inductor']:.3f} | "
            f"{row['eager'] / row['gnomon']:.2f} | {row['inductor'] / row['gnomon']:.2f} | "
            f"{row['share']:.0%} | {row['gnomon_compile_s']:.1f} | {row['inductor_compile_s']:.1f} | "
            f"{row['kept']} of {row['groups']} | {row['gnomon_apart']:.1e} | {row['inductor_apart']:.1e} |".replace(
                "nan%", ""
            )
        )
    print("\n".join(lines))
    options.output.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        import os

        os.environ.setdefault("GNOMON_CACHE", folder)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        sys.exit(main())

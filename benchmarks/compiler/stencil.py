"""Stencils of 4096 x 4096 through backend "gnomon" beside eager, and beside the memory that they must move.

    THP_MEM_ALLOC_ENABLE=1 python benchmarks/compiler/stencil.py [--random 100] [--write]

One thread, CPU time, the least of a few calls. `memory` is what the same machine takes to copy as many bytes as the
stencil must read and write once, into memory that was written before; `kernel` is the kernel's time into such memory,
`call` with results that are new. With --random, as many random stencils are held against eager, by C++ and by loops
that are played for the many-core.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from compiler.stencils import gray_scott, jacobi, random_case, rolled, seen, sobel  # noqa: E402

from gnomon.compiler.stencil import scratchpad  # noqa: E402
from gnomon.compiler.stencil.call import StencilCall  # noqa: E402
from gnomon.compiler.tiles.body import UnfitError  # noqa: E402
from gnomon.compiler.tiles.device import described  # noqa: E402

RESULT = Path(__file__).parents[1] / "results" / "compiler_stencil.md"
SIZE = 4096


def step(u: torch.Tensor) -> torch.Tensor:
    new = u.clone()
    new[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
    return new


def twelve(u: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        u = step(u)
    return u


def heat(u: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        here, new = u[1:-1, 1:-1, 1:-1], u.clone()
        around = u[2:, 1:-1, 1:-1] + u[:-2, 1:-1, 1:-1] + u[1:-1, 2:, 1:-1] + u[1:-1, :-2, 1:-1]
        new[1:-1, 1:-1, 1:-1] = here + 0.1 * (around + u[1:-1, 1:-1, 2:] + u[1:-1, 1:-1, :-2] - 6 * here)
        u = new
    return u


def least(call: Callable[[], Any], times: int) -> float:
    found = []
    for _ in range(times + 1):
        began = time.thread_time()
        call()
        found.append(time.thread_time() - began)
    return min(found[1:])


def cases() -> dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]]:
    u, image = torch.randn(SIZE, SIZE), torch.randn(1, 1, SIZE, SIZE)
    return {
        "Jacobi, 1 step": (step, (u,)),
        "Jacobi, 3 steps": (jacobi, (u,)),
        "Jacobi, 12 steps": (twelve, (u,)),
        "around the edges, 3 steps": (rolled, (u,)),
        "convolution 3 x 3": (lambda x, w: F.conv2d(x, w, padding=1), (image, torch.randn(1, 1, 3, 3))),
        "convolution 3 x 3, valid": (F.conv2d, (image, torch.randn(1, 1, 3, 3))),
        "convolution 7 x 7": (lambda x, w: F.conv2d(x, w, padding=3), (image, torch.randn(1, 1, 7, 7))),
        "Gray-Scott, 2 steps": (gray_scott, (u, u + 1)),
        "edges of an image": (sobel, (u,)),
        "heat, 256 x 256 x 256, 2 steps": (heat, (torch.randn(256, 256, 256),)),
    }


def row(name: str, function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> str:
    [one] = seen(function, inputs)
    call = StencilCall(one.made, one.plain)
    made = call.run(*one.inputs)
    for a, b in zip(made if call.several else [made], one.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    held = dict(zip(call.made.inputs, one.inputs, strict=True))
    for part in call.parts:
        for node in part.of.stencil.outputs:
            held[node] = torch.zeros(node.meta["val"].shape)

    def kernels() -> None:
        for part in call.parts:
            part.run(held)

    many = [held[node] for node in (*call.made.inputs, *call.made.outputs)]
    half = torch.zeros(sum(tensor.nbytes for tensor in many) // 8)
    target = torch.zeros_like(half)
    memory_s = least(lambda: target.copy_(half), 5)
    kernel_s, call_s = least(kernels, 3), least(lambda: call.run(*one.inputs), 3)
    with torch.no_grad():
        eager_s = least(lambda: function(*inputs), 2)
    tile = call.tile
    return (
        f"| {name} | {eager_s * 1e3:.1f} | {call_s * 1e3:.1f} | {eager_s / call_s:.1f} | {kernel_s * 1e3:.1f} | "
        f"{kernel_s / memory_s:.2f} | {kernel_s / memory_s / one.made.steps:.2f} | {tile.seconds / kernel_s:.2f} | "
        f"{tile.depth} of {len(one.made.stages)}, {' x '.join(map(str, call.parts[0].tile.size))} |"
    )


def randoms(count: int) -> str:
    found, played = 0, 0
    for seed in range(count):
        for one in seen(*random_case(seed)):
            found += 1
            call = StencilCall(one.made, one.plain)
            made = call.run(*one.inputs)
            for a, b in zip(made if call.several else [made], one.outputs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"seed {seed} in C++")
            try:
                program = scratchpad.program(one.made, described("sw26010"))
            except UnfitError:
                continue
            played += 1
            for a, b in zip(scratchpad.play(program, one.made, one.inputs).outputs, one.outputs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=f"seed {seed} played")
    return f"{count} random programs: {found} stencils as eager by C++, {played} of them played for the many-core too."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=0, help="as many random stencils against eager")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    command = " ".join(["THP_MEM_ALLOC_ENABLE=1 python benchmarks/compiler/stencil.py", *sys.argv[1:]])
    text = [
        "# Stencils",
        "",
        f"{date.today()}, `{command}`, torch {torch.__version__}, one thread of an AMD EPYC with AVX-512, other work",
        "on the machine; CPU time, the least of 3 calls. `kernel` writes into memory that was written before,",
        "`/ memory` is beside a copy of as many bytes as must be read and written once, `a step` that for one step.",
        "`foretold` is the tile model's time over the kernel's. `call` has new memory: most is its first writing.",
        "",
        "| 4096 x 4096 | eager ms | call ms | eager / call | kernel ms | / memory | a step | foretold | tiles |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, (function, inputs) in cases().items():
        text.append(row(name, function, inputs))
        print(text[-1], flush=True)
    if options.random:
        text += ["", randoms(options.random)]
        print(text[-1], flush=True)
    if options.write:
        RESULT.write_text("\n".join(text) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

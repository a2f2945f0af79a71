"""Random shapes through functions that are compiled once: `python benchmarks/compiler/shapes.py`.

Each function of `CASES` goes through `torch.compile(dynamic=True, backend="gnomon")` and is fed with random sizes (0,
1, odd, even, up to 300), its result and, where the case trains, its gradients compared with eager at every shape.
Prints shapes, graphs that Dynamo compiled (it compiles sizes of 0 and 1, and equal sizes, on their own),
kernels kept, the largest difference, and results unlike eager. Exits with 1 at any of those, where a function has no
kernel, or where Dynamo gives up compiling. Kernels are used however slow they are. Left out: time.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from gnomon.compiler import backend
from gnomon.compiler.tune import gate

HIDDEN = 24
NEAR = 2e-4
"""Of the largest element: sums are in another order than eager's."""
LARGEST = 300
GRAPHS = 200
"""More than a function can have: 0, 1 or more for each dim, and which of them are equal."""


def norm_and_gelu(a: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.layer_norm(a, (HIDDEN,))) + a.mean(-1, keepdim=True)


def rms_norm(a: torch.Tensor) -> torch.Tensor:
    return a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(a)


def masked_softmax(a: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a * 0.5 + mask, -1)


def losses(a: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(a, -1) - F.log_softmax(a, -1)[..., 0]


def columns_and_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.tanh(a - b) * a.sum(0) + b.abs().sum() * 0.01


def turned(a: torch.Tensor) -> torch.Tensor:
    return a.transpose(-1, -2).contiguous() * 2 + torch.relu(a).transpose(-1, -2)


def broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where(a > b, a, -b).sum(-1) + (a * b).sum(-1)


def cut(a: torch.Tensor) -> torch.Tensor:
    return F.silu(a[..., : HIDDEN // 2]) * a[..., HIDDEN // 2 :]


def case(
    function: Callable[..., Any], shapes: Callable[[int, int, int], Sequence[tuple[int, ...]]], train: bool
) -> Any:
    return function, shapes, train


CASES = (
    case(norm_and_gelu, lambda i, j, k: [(i, j, HIDDEN)], True),
    case(rms_norm, lambda i, j, k: [(i, j)], True),
    case(masked_softmax, lambda i, j, k: [(i % 9, j, k), (j, k)], False),
    case(losses, lambda i, j, k: [(i, j + 1)], True),
    case(columns_and_rows, lambda i, j, k: [(i, j), (i, j)], True),
    case(turned, lambda i, j, k: [(i % 9, j, k)], True),
    case(broadcast, lambda i, j, k: [(i, 1, k), (j, k)], False),
    case(cut, lambda i, j, k: [(i, j, HIDDEN)], True),
)


def size(chance: random.Random) -> int:
    """0 and 1 as often as one in eight each, small ones, and any up to `LARGEST`."""
    kind = chance.randrange(8)
    return kind if kind < 2 else chance.randint(2, 17) if kind < 5 else chance.randint(2, LARGEST)


def results(function: Callable[..., Any], inputs: Sequence[torch.Tensor], train: bool) -> list[torch.Tensor]:
    """What the function gives, and the gradients of its inputs."""
    inputs = [x.clone().requires_grad_(train) for x in inputs]
    made = function(*inputs)
    return [made.detach(), *torch.autograd.grad(made, inputs, torch.cos(made.detach()))] if train else [made]


def difference(made: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    """The largest, over the largest element or 1; infinite where shapes, dtypes or NaNs differ."""
    largest = 0.0
    for a, b in zip(made, wanted, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not torch.equal(a.isnan(), b.isnan()):
            return math.inf
        if b.numel():
            a, b = a.nan_to_num(), b.nan_to_num()
            largest = max(largest, float((a - b).abs().max()) / max(1.0, float(b.abs().max())))
    return largest


def compared(one: Any, count: int, chance: random.Random) -> tuple[int, int, int, float, list[str]]:
    """(graphs, kernels, kernels kept, largest difference, shapes whose result is wrong)."""
    function, shapes_of, train = one
    torch._dynamo.reset()
    backend.reports.clear()
    graphs = 0

    def counted(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return backend.gnomon(module, inputs)

    compiled = torch.compile(function, backend=counted, dynamic=True, fullgraph=True)
    largest, wrong = 0.0, list[str]()
    for _ in range(count):
        shapes = shapes_of(size(chance), size(chance), size(chance))
        inputs = [torch.randn(shape) for shape in shapes]
        apart = difference(results(compiled, inputs, train), results(function, inputs, train))
        largest = max(largest, apart)
        if apart > NEAR:
            wrong.append(f"{function.__name__}{shapes}: {apart:.1e}")
    planned = [(made, p) for made in backend.reports for p in made.program.groups]
    return graphs, len(planned), sum(made.kept(p) for made, p in planned), largest, wrong


def main() -> int:
    """A line for each function, and one for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=1000, help="of all functions together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    gate.SLOWER, gate.REPEATS = math.inf, 1
    torch._dynamo.config.recompile_limit = GRAPHS
    torch._dynamo.config.accumulated_recompile_limit = GRAPHS
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    backend.KEPT = 2 * GRAPHS
    torch.manual_seed(options.seed)
    chance, bad, count = random.Random(options.seed), list[str](), -(-options.shapes // len(CASES))
    print("| function | gradients | shapes | graphs | kernels | kept | largest difference | wrong |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["GNOMON_CACHE"] = cache
        for one in CASES:
            graphs, kernels, kept, largest, wrong = compared(one, count, chance)
            trains = "yes" if one[2] else ""
            print(
                f"| {one[0].__name__} | {trains} | {count} | {graphs} | {kernels} | {kept} | {largest:.1e} | "
                f"{len(wrong)} |",
                flush=True,
            )
            bad += wrong if kept else [*wrong, f"{one[0].__name__}: no kernel"]
        print(f"{count * len(CASES)} shapes, {len(list(os.scandir(cache)))} files in the cache, {len(bad)} wrong")
    print("\n".join(bad))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

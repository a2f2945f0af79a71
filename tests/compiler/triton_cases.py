"""Kernels' Triton text in Triton's interpreter, on the CPU, against eager: run by `test_triton.py` in a process of its
own, since Triton asks for TRITON_INTERPRET when it is first imported. Prints a line for each case."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import gate, program, triton_launch  # noqa: E402
from gnomon.compiler.triton_text import TritonKernel, triton_kernel  # noqa: E402


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers around 0."""
    return torch.randn(shape, dtype=dtype)


def layer_norm_training(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[Any, ...]:
    """Forward and backward of a layer norm, with the gradients of its vectors."""
    out, mean, rstd = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], w, b, 1e-5)
    back = torch.ops.aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, w, b, [True, True, True])
    return out, *back


def cross_entropy(x: torch.Tensor, target: torch.Tensor) -> tuple[Any, ...]:
    """The mean loss, with rows that count for nothing."""
    loss, count = torch.ops.aten.nll_loss_forward(F.log_softmax(x, -1), target, None, 1, -100)
    return loss, count


def lookup(ids: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Tokens and places looked up, and normed."""
    x = F.embedding(ids, table) + places
    return F.layer_norm(x, x.shape[-1:])


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers has it."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "softmax": (lambda x: F.softmax(x, -1), (rows(5, 37),)),
    "softmax of a long row": (lambda x: F.softmax(x, -1), (rows(3, 300),)),
    "log-softmax of bf16": (lambda x: F.log_softmax(x, -1), (rows(4, 65, dtype=torch.bfloat16),)),
    "layer norm, residual, GELU": (
        lambda x, y, w, b: F.gelu(F.layer_norm(x + y, (33,), w, b)),
        (rows(2, 6, 33), rows(2, 6, 33), rows(33), rows(33)),
    ),
    "layer norm, training": (layer_norm_training, (rows(70, 24), rows(24), rows(24), rows(70, 24))),
    "RMS norm": (lambda x, w: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w, (rows(9, 40), rows(40))),
    "SwiGLU": (lambda x, y: F.silu(x) * y, (rows(7, 130), rows(7, 130))),
    "tanh, expm1, log1p": (
        lambda x: (torch.tanh(x), torch.expm1(x), torch.log1p(x.abs()), torch.erf(x)),
        (rows(4, 50) * torch.tensor([1e-4, 0.1, 1.0, 6.0])[:, None],),
    ),
    "transposed operand": (lambda x, y: x.t() * 2 + y, (rows(11, 6), rows(6, 11))),
    "rotary embedding": (rotary, (rows(2, 3, 7, 10), rows(7, 10), rows(7, 10))),
    "broadcasts": (lambda x, y, z: x * y + z.sigmoid(), (rows(4, 1, 9), rows(3, 1), rows(4, 3, 1))),
    "a bias's gradient": (lambda g, x: (g * (x > 0), (g * (x > 0)).sum(0)), (rows(130, 20), rows(130, 20))),
    "mean squared error": (lambda x, y: F.mse_loss(x, y) * 2, (rows(40, 30), rows(40, 30))),
    "cross-entropy": (cross_entropy, (rows(12, 90), torch.tensor([3, 89, -100, 0, 5, 6, 7, 8, 9, 10, 11, 12]))),
    "lookup": (lookup, (torch.randint(0, 50, (2, 7)), rows(50, 18), rows(7, 18))),
    "extremes see NaN": (
        lambda x: (x.amax(-1), x.amin(-1), (x - x.amax(-1, keepdim=True))),
        (torch.tensor([[1.0, float("nan"), 2.0], [3.0, 1.0, 2.0]]),),
    ),
    "integers and bools": (
        lambda a, b: (torch.where(a > 3, a, b) * 2, (a > b) | (b == 1)),
        (torch.arange(24).view(4, 6) % 7, torch.arange(24).view(4, 6) % 5),
    ),
    "double": (lambda x: F.softmax(x, -1), (rows(3, 20, dtype=torch.float64),)),
}


def main() -> int:
    """Every case with rows in one block, then walked."""
    from compiler.traced import compiled, run

    gate.SLOWER, gate.REPEATS = float("inf"), 1
    # The interpreter stands for a GPU, whose trial has no made inputs: what a layer norm of 1e20 is differs between
    # ATen's own kernels of the two (NaN on a CPU).
    gate.wrong_on_made = lambda *_: ""
    program.PRINTERS["cpu"] = triton_kernel
    torch.manual_seed(0)
    bad = 0
    for longest, walked in ((triton_launch.LONGEST, triton_launch.WALKED), (16, 16)):
        triton_launch.LONGEST, triton_launch.WALKED = longest, walked
        for name, (function, inputs) in CASES.items():
            made = compiled(function, *inputs)
            planned = made.program.planned
            if longest == 16 and not any(isinstance(p.kernel, TritonKernel) and p.kernel.walks for p in planned):
                continue
            problem = "" if planned else "no group"
            problem += "" if all(isinstance(p.kernel, TritonKernel) for p in planned) else "another printer; "
            wanted = function(*inputs)
            for _ in range(2):
                for a, b in zip(run(made, *inputs), wanted if isinstance(wanted, tuple) else (wanted,), strict=True):
                    near = {torch.bfloat16: 2e-2, torch.float64: 1e-12}.get(b.dtype, 2e-5)
                    apart = torch.isclose(a, b, rtol=near, atol=near * 0.1, equal_nan=True).logical_not().sum()
                    problem += f"{int(apart)} of {b.numel()} elements differ; " if apart else ""
            problem += "" if all(made.kept(p) for p in planned) else "not kept; "
            bad += bool(problem)
            print(f"{'FAILED ' + problem if problem else 'as eager'}: {name}, blocks of at most {longest}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

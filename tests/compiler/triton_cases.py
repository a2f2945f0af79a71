"""Kernels' Triton text in Triton's interpreter, on the CPU, against eager: run by `test_triton.py` in a process of its
own, since Triton asks for TRITON_INTERPRET when it is first imported. Prints a line for each case."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from compiler.stencils import cases, seen  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import program  # noqa: E402
from gnomon.compiler.kernels import stored_triton  # noqa: E402
from gnomon.compiler.stencil import call, triton_rows  # noqa: E402
from gnomon.compiler.text import triton_launch  # noqa: E402
from gnomon.compiler.text.triton_text import TritonKernel, triton_kernel  # noqa: E402
from gnomon.compiler.tiles.device import described  # noqa: E402
from gnomon.compiler.tune import gate  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.storage.names import storage_of  # noqa: E402


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


STORED = (
    "fp32 bf16 int8 int8-g32 int4-g64 int4-g32-zeros int4 ternary-g64 nf4 mxfp4 2:4 4:16-bf16 2:4-int8 0.7 0.9-bf16 "
    "0.9-int8 block:16x16:0.5 block:32x16:0.6-bf16"
).split()
"""Storages, each multiplied by their Triton text against what they say their numbers are, in double."""


def stored() -> int:
    """Products with odd numbers of rows and, where the storage has them, of outputs and inputs."""
    bad = 0
    for name in STORED:
        storage = storage_of(name)
        shape = (96, 128) if not storage.refused((96, 128)) and storage.refused((70, 100)) else (70, 100)
        weight = rows(*shape).numpy()
        arrays = storage.narrow(weight)
        wide = torch.from_numpy(storage.widen(arrays, shape)).double()
        packed = stored_triton.repack(arrays, storage, shape, "cpu")
        problem = ""
        for count, dtype, bias in ((3, torch.float32, None), (17, torch.bfloat16, rows(shape[0]))):
            x = rows(2, count, shape[1], dtype=dtype)
            got = stored_triton.linear(x, packed, bias).double()
            exact = wide if dtype == torch.float32 else wide.bfloat16().double()
            wanted = x.double() @ exact.t() + (0 if bias is None else bias.double())
            near = 1e-5 if dtype == torch.float32 else 3e-2  # the interpreter cuts off what bfloat16 has not
            if not (got - wanted).abs().max() <= near * wanted.abs().max():
                problem += f"{count} rows {float((got - wanted).abs().max()):.3g} apart; "
        bad += bool(problem)
        print(f"{'FAILED ' + problem if problem else 'as eager'}: stored as {name}", flush=True)
    for name, why in (("csr:0.9", "no GPU kernel multiplies by csr:0.9"), ("block:8x8:0.5", "sides of 16")):
        try:
            stored_triton.repack(storage_of(name).narrow(rows(32, 32).numpy()), storage_of(name), (32, 32), "cpu")
            said = "nothing"
        except InputError as error:
            said = str(error)
        bad += why not in said
        print(f"{'as eager' if why in said else 'FAILED ' + said}: {name} is refused", flush=True)
    return bad


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
            planned = made.program.groups
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
    return 1 if bad + stored() + stencils() else 0


def stencils() -> int:
    """Those of `stencils.py`, a wide box as a product too; how many are wrong."""
    h200, bad, call.FEWEST = described("h200"), 0, 1
    assert h200.matrices is not None
    wide = replace(h200, matrices=replace(h200.matrices, dtype="fp32"))  # the interpreter multiplies no bfloat16
    every = {**cases(), "a wide box": (F.conv2d, (rows(1, 1, 20, 37), rows(1, 1, 7, 7)))}
    for name, (function, inputs) in every.items():
        [one] = seen(function, inputs)
        source, launches = triton_rows.text(one.made, wide)
        made = triton_rows.run(one.made, source, launches, one.inputs)
        near = 2e-2 if one.outputs[0].dtype == torch.bfloat16 else 1e-4
        wrong = any(not torch.allclose(a, b, near, near) for a, b in zip(made, one.outputs, strict=True))
        wrong |= (name == "a wide box") != any(launch.as_matmul for launch in launches)
        bad += wrong
        print(f"{'FAILED' if wrong else 'as eager'}: stencil, {name}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main())

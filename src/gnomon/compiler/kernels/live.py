"""Products of what a ReLU made, by the columns that are not zero in a call.

A product sums over k in any order and what is zero adds nothing, so columns of x that are zero in all rows need no
weights read: with few rows, that is nearly all that a product costs. `fuse(graph, …)` has such products take the list
of columns that are not zero, or be whole, as is predicted for the count of the call (`forms`). Weights must have the
outputs of each k beside each other: `x @ w` has, `nn.Linear` has not, and is turned once where somebody says that
weights are not written any more (`options={"frozen": True}`). A weight that is infinite or no number counts only where
x is not zero. Inference on a CPU, up to 8 rows.
Source: Zheng et al., PIT (2023), activations of ReLU; the axis that is summed over.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.kernels.products import TriedMatmul
from gnomon.compiler.tune.forms import WHOLE, Forms
from gnomon.compiler.tune.tried import text_of

aten = torch.ops.aten
FORMULA = CPP / "live.cpp"
MOST = 8
"""Rows: the columns that are zero in all of more are few."""
FEWEST = 1 << 22
"""Weights from which on it is worth to count."""
PAUSE = 64
"""Calls at most that are whole without counting, where counting before only ever found too much."""
PARALLEL = 1 << 20
"""Multiplications from which on threads share a product."""
THROUGH = (
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._to_copy.default, aten.clone.default,
    aten.pow.Tensor_Scalar, aten.square.default, aten.squeeze.dim, aten.unsqueeze.default,
)  # fmt: skip
"""What leaves zeros where they are (a power: of a positive exponent)."""


class LiveCall(ctypes.Structure):
    """The struct `Call` of cpp/live.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("rows", "n", "k", "live", "relu", "threads")],
        ("list", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        ("w_k", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """Compiles the kernel for a dtype; None where it does not compile."""
    return kernel_of(text_of(FORMULA, dtype), ctypes.c_void_p)


def live_matmul(x: Tensor, w: Tensor, bias: Tensor | None, columns: Tensor, relu: bool) -> Tensor | None:
    """x (rows, k), w (k, n) with the outputs of a k beside each other, columns: int64, those that are not zero. None
    where it does not run."""
    function, (rows, k), n = kernel(x.dtype), x.shape, w.shape[1]
    if function is None or w.stride(1) != 1 or not 0 < rows <= MOST:
        return None
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, n), dtype=x.dtype)
    threads = torch.get_num_threads() if rows * len(columns) * n >= PARALLEL else 1
    call = LiveCall(
        rows=rows, n=n, k=k, live=len(columns), relu=relu, threads=threads, list=columns.data_ptr(), x=x.data_ptr(),
        x_row=x.stride(0), w=w.data_ptr(), w_k=w.stride(0), bias=None if bias is None else bias.data_ptr(),
        out=out.data_ptr(), out_row=n,
    )  # fmt: skip
    return None if function(ctypes.addressof(call)) else out


class LiveMatmul:
    """A product of what a ReLU made, as a function of its tensors."""

    def __init__(self, matmul: TriedMatmul, frozen: bool) -> None:
        self.__name__, self.__module__ = f"live_{matmul.__name__}", __name__
        self.product, self.frozen = matmul, frozen
        self.forms: dict[int, Forms] = {}
        """By rows."""
        self.pause = self.left = 0
        """Counting costs a pass over x, so it backs off: after a call in which too few columns were zero the next
        `pause` calls do not count (doubled each time, up to PAUSE); `left`: how many of these are still to come."""
        self.turned: dict[tuple[int, int], Tensor] = {}
        """Weights with the outputs of each k beside each other, by where theirs lie and how often they were written."""

    def __call__(self, *args: Tensor) -> Tensor:
        *bias, x, w = args
        self.left -= self.left > 0
        weight = self._weight(w) if 0 < len(x) <= MOST and not self.left else None
        if weight is None:
            return self.product(*args)
        # NaN is not equal to 0, so its column is read.
        columns = (x != 0).any(0).nonzero().view(-1)
        ways: dict[str, Callable[[], Tensor | None]] = {
            WHOLE: lambda: self.product(*args),
            "columns": lambda: live_matmul(x, weight, bias[0] if bias else None, columns, self.product.after == "relu"),
        }
        forms = self.forms.setdefault(len(x), Forms())
        if not forms.unit_s and 2 * len(columns) > x.shape[1]:  # to measure a way by what it is not for tells little
            out = self.product(*args)
        else:
            out = forms.run(ways, len(columns), len(columns), x.shape[1], lambda out: out)
        few = bool(forms.unit_s) and forms.way != WHOLE
        self.pause = 0 if few else min(max(2 * self.pause, 1), PAUSE)
        self.left = self.pause + 1 if self.pause else 0
        return out

    def _weight(self, w: Tensor) -> Tensor | None:
        """(k, n), as the kernel reads it."""
        w = w.t() if self.product.name.startswith("linear") else w
        if w.stride(1) == 1 or not self.frozen:
            return w if w.stride(1) == 1 else None
        # Tensors of inference mode count no writes.
        key = w.data_ptr(), 0 if w.is_inference() else w._version
        if key not in self.turned:
            self.turned = {key: w.contiguous()}
        return self.turned[key]


def fuse(graph: fx.Graph, frozen: bool) -> list[LiveMatmul]:
    """Has products of what a ReLU made take the columns that are not zero. frozen: whether weights may be turned once.
    Returns them."""
    targets = []
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, TriedMatmul) or "convolution" in node.target.name:
            continue
        x, w = (one.meta["val"] for one in node.args[-2:])
        rows, k = x.shape
        n = node.meta["val"].shape[1]
        sizes = (k, n)
        if (
            not all(isinstance(size, int) for size in sizes)
            or k * n < FEWEST
            or (isinstance(rows, int) and rows > MOST)
        ):
            continue
        # A linear layer has its weight as (n, k), a product as (k, n): the outputs are dim 0 or dim 1.
        outputs_beside = w.stride(0 if node.target.name.startswith("linear") else 1) == 1
        if not (frozen or outputs_beside) or not _often_zero(node.args[-2]):
            continue
        node.target = LiveMatmul(node.target, frozen)
        targets.append(node.target)
    return targets


def _often_zero(node: Any) -> bool:
    """Whether a ReLU's zeros are a node's."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    if node.target is aten.relu.default or (isinstance(node.target, TriedMatmul) and node.target.after == "relu"):
        return True
    if node.target is aten.mul.Tensor:  # a gate, or a square
        return any(_often_zero(one) for one in node.args)
    if node.target is aten.pow.Tensor_Scalar and not (isinstance(node.args[1], int | float) and node.args[1] > 0):
        return False
    return node.target in THROUGH and _often_zero(node.args[0])

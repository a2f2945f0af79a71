"""A linear recurrence over time as one operation and one kernel: h[t] = a[t] * h[t-1] + b[t], and its backward.

The first state is b[0]: nothing is before it, and a[0] counts nowhere.
This is the scan of Mamba and its relatives. `gnomon::scan(rates, drives, weight, exp)` is put in a graph by
`scan_tracing`. a is the product of the rates, or with `exp` its exponential, and b the product of the drives; factors
are broadcast to each other, and their first dim is time. With a weight the result is the sum over the last dim of h
times it. So of all that is as large as the states of all steps only h lies in memory, and with a weight not even that.
`fuse(graph)` puts a `Scan` in place of each such operation, which is compared with PyTorch's like any group (`gate`).
Float32 on a CPU. Leaves out first states other than zero.
Shapes: (steps, batch, width, n) in the kernel, n the size of a channel's state; a row is one channel of one sequence.
Source: Gu and Dao, Mamba (2023), whose kernel also keeps states out of memory and makes them again in the backward.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.kernels.recurrent import library
from gnomon.compiler.tune.tried import TriedKernel

MOST = 4
"""The most factors of a product that the kernel reads; of a longer one some are multiplied before."""
RANK = 4
"""Dims in the kernel; tensors of fewer get dims of size 1 after the steps (`_lifted`)."""
CHUNKS = 16
"""Parts into which rows are divided. Each part has a sum of its own of a gradient to which several rows add, so that
results are the same with any number of threads."""
PARALLEL = 1 << 14
"""Numbers of h (steps x batch x width x n) from which on threads share the rows."""
FORMULA = CPP / "scan.cpp"
"""The kernels' source, forward and backward."""


@dataclass(frozen=True, slots=True)
class ScanForm:
    """What a kernel is compiled for. Tuples have an entry for each rate, then each drive, then the weight."""

    rates: int
    """The number of factors of a."""
    drives: int
    """The number of factors of b."""
    dot: bool
    """Whether the result is summed over the last dim, times a weight."""
    exp: bool
    """Whether a is the exponential of the product of rates."""
    varies: tuple[bool, ...]
    """Whether each tensor has more than one number along the last dim."""
    timed: tuple[bool, ...]
    """Whether each tensor has more than one number along time."""


def form_of(rates: Sequence[Tensor], drives: Sequence[Tensor], weight: Tensor | None, exp: bool) -> ScanForm:
    """The form of a scan of these tensors, which may be fake. A symbolic size counts as more than 1."""
    every = [*rates, *drives, *([] if weight is None else [weight])]
    rank = max(one.dim() for one in every)
    varies = tuple(not _is_one(one.shape[-1]) for one in every)
    timed = tuple(one.dim() == rank and not _is_one(one.shape[0]) for one in every)
    return ScanForm(len(rates), len(drives), weight is not None, exp, varies, timed)


@cache
def source_of(form: ScanForm, backward: bool) -> str:
    """The C++ source of a kernel: the form as macros and tables, then cpp/scan.cpp."""
    flags = {"RATES": form.rates, "DRIVES": form.drives, "EXP": form.exp, "DOT": form.dot, "BACKWARD": backward}
    lines = [f"#define {name} {int(value)}" for name, value in flags.items()]
    for name, each in (("VARIES", form.varies), ("TIMED", form.timed)):
        lines.append(f"constexpr bool {name}[] = {{{', '.join(str(one).lower() for one in each)}}};")
    return "\n".join([*lines, FORMULA.read_text(encoding="utf-8")])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


# ---- by PyTorch
def plain(rates: Sequence[Tensor], drives: Sequence[Tensor], weight: Tensor | None, exp: bool) -> Tensor:
    """Scans step by step, the reference: h[t] = a[t] h[t-1] + b[t]. Returns (steps, ..., n), with a weight (steps,
    ...)."""
    a, b = _product(rates), _product(drives)
    a = a.exp() if exp else a
    a, b = torch.broadcast_tensors(a, b)
    # Not a[0] * 0 + b[0], which is NaN where a[0] is infinite or NaN.
    states = [b[0]]
    for t in range(1, b.shape[0]):
        states.append(a[t] * states[-1] + b[t])
    h = torch.stack(states)
    return h if weight is None else (h * weight).sum(-1)


def _product(factors: Sequence[Tensor]) -> Tensor:
    """The product of tensors that are broadcast to each other."""
    out = factors[0]
    for one in factors[1:]:
        out = out * one
    return out


def plain_grad(
    g: Tensor, rates: Sequence[Tensor], drives: Sequence[Tensor], weight: Tensor | None, exp: bool
) -> list[Tensor]:
    """Gradients of the rates, the drives and the weight by autograd through `plain`, each laid as its tensor."""
    with torch.enable_grad():
        every = [one.detach().requires_grad_() for one in (*rates, *drives, *([] if weight is None else [weight]))]
        first, last = len(rates), len(rates) + len(drives)
        out = plain(every[:first], every[first:last], every[last] if weight is not None else None, exp)
        gradients = torch.autograd.grad(out, every, g)
    return [torch.zeros_like(one).copy_(d) for one, d in zip(every, gradients, strict=True)]


# ---- by the kernel
class _Factor(ctypes.Structure):
    """A tensor that is read: its address, and strides along time, batch and width (the last dim is dense)."""

    _fields_ = [("p", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("t", "b", "d")]]


class _Gradient(ctypes.Structure):
    """A tensor that is written, and the stride from one chunk's partial sum to the next; 0: there is one sum."""

    _fields_ = [("p", ctypes.c_void_p), *[(name, ctypes.c_int64) for name in ("t", "b", "d", "chunk")]]


class _ScanCall(ctypes.Structure):
    """The struct `Call` of cpp/scan.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("steps", "batch", "width", "n", "chunks", "parallel")],
        ("of", _Factor * (2 * MOST + 1)),
        ("out", _Gradient),
        ("grad", _Gradient * (2 * MOST + 1)),
    ]


@cache
def kernel(form: ScanForm, backward: bool) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source_of(form, backward), ctypes.POINTER(_ScanCall))


def _lifted(x: Tensor, rank: int) -> Tensor:
    """Views a tensor of a scan of `rank` dims as (steps, batch, width, n): missing dims lead, as in broadcasting, and
    those that RANK has besides come after the steps."""
    if x.dim() < rank:
        x = x[(None,) * (rank - x.dim())]
    return x if rank == RANK else x[(slice(None), *(None,) * (RANK - rank))]


def _strides(x: Tensor) -> list[int]:
    """Strides along time, batch and width; 0 along dims of size 1, which are broadcast."""
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride()[:3], strict=True)]


def _read(x: Tensor) -> Tensor:
    """The tensor, copied unless its last dim is dense or of size 1."""
    return x if x.shape[-1] == 1 or x.stride(-1) == 1 else x.contiguous()


def run(form: ScanForm, tensors: Sequence[Tensor]) -> Tensor | None:
    """Computes `plain` by the kernel. tensors: rates, drives and the weight, if any. None where the kernel does not
    compile or there is nothing to compute."""
    function = kernel(form, False)
    shape = torch.broadcast_shapes(*[one.shape for one in tensors[: form.rates + form.drives]])
    if function is None or not all(shape):
        return None
    keep_alive, call, (steps, batch, width, n) = _call(form, tensors, shape)
    if form.dot:
        # The kernel goes through one row's steps after another, so steps are innermost; `_scan_fake` says the same to
        # the rest of the graph.
        out = torch.empty((batch, width, steps)).permute(2, 0, 1)
    else:
        out = torch.empty((steps, batch, width, n))
    call.out = _Gradient(out.data_ptr(), *out.stride()[:3], 0)
    if function(call):
        return None
    del keep_alive
    return out.reshape(shape[:-1] if form.dot else shape)


def _call(
    form: ScanForm, tensors: Sequence[Tensor], shape: Sequence[int]
) -> tuple[list[Tensor], _ScanCall, tuple[int, ...]]:
    """(operands, the kernel's argument, (steps, batch, width, n)). The argument holds addresses of the operands, which
    must outlive the kernel's run. shape: of rates and drives broadcast to each other."""
    rank = len(shape)
    steps, *middle, n = shape if rank > 1 else (*shape, 1)
    # Missing dims are of size 1 and lead, as `_lifted` has them.
    batch, width = [*[1] * (2 - len(middle)), *middle]
    operands = [_read(_lifted(one, rank)) for one in tensors]
    rows = batch * width
    call = _ScanCall(
        steps=steps, batch=batch, width=width, n=n, chunks=min(rows, CHUNKS),
        parallel=int(torch.get_num_threads() > 1 and steps * rows * n >= PARALLEL),
    )  # fmt: skip
    for i, one in enumerate(operands):
        call.of[i] = _Factor(one.data_ptr(), *_strides(one))
    return operands, call, (steps, batch, width, n)


def run_grad(form: ScanForm, g: Tensor, tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Computes `plain_grad` by the kernel; None where it does not compile or there is nothing to compute. g: the
    gradient of the result."""
    function = kernel(form, True)
    shape = torch.broadcast_shapes(*[one.shape for one in tensors[: form.rates + form.drives]])
    if function is None or not all(shape):
        return None
    keep_alive, call, (_, batch, width, _) = _call(form, tensors, shape)
    if not form.dot:
        g = _read(g)
    from_g = _lifted(g[..., None] if form.dot else g, len(shape))
    call.out = _Gradient(from_g.data_ptr(), *from_g.stride()[:3], 0)
    gradients, parts = [], []
    for i, one in enumerate(tensors):
        grad = torch.zeros_like(one)
        inside = _lifted(grad, len(shape))
        # Several rows add to one number, or the kernel cannot write into the gradient's layout: each chunk adds to an
        # array of its own, and these are summed in order.
        shares = (batch > 1 and inside.shape[1] == 1) or (width > 1 and inside.shape[2] == 1)
        if shares or (inside.shape[-1] > 1 and inside.stride(-1) != 1):
            part = torch.zeros((call.chunks, *inside.shape))
            call.grad[i] = _Gradient(part.data_ptr(), *_strides(part[0]), part.stride(0))
            parts.append((grad, inside, part))
        else:
            call.grad[i] = _Gradient(grad.data_ptr(), *_strides(inside), 0)
        gradients.append(grad)
    if function(call):
        return None
    for _, inside, part in parts:
        inside.copy_(part.sum(0))
    del keep_alive
    return gradients


# ---- operations
library.define("scan(Tensor[] rates, Tensor[] drives, Tensor? weight, bool exp) -> Tensor")
library.define("scan_grad(Tensor g, Tensor[] rates, Tensor[] drives, Tensor? weight, bool exp) -> Tensor[]")


def _scan_fake(rates: Sequence[Tensor], drives: Sequence[Tensor], weight: Tensor | None, exp: bool) -> Tensor:
    """The result without values, in the layout that the kernel writes, for which the rest of a graph is compiled: with
    a weight the steps are innermost in memory, since the kernel writes one row after the other."""
    # Of rates and drives alone: a weight is taken to have no dims beyond theirs, and goes with the sum.
    shape = torch.broadcast_shapes(*[one.shape for one in (*rates, *drives)])
    if weight is None:
        return rates[0].new_empty(shape)
    steps, *middle, _ = shape
    out = rates[0].new_empty((*middle, steps))
    return out.permute(out.dim() - 1, *range(out.dim() - 1))


def _grad_fake(g: Tensor, rates: Any, drives: Any, weight: Tensor | None, exp: bool) -> list[Tensor]:
    return [torch.zeros_like(one) for one in (*rates, *drives, *([] if weight is None else [weight]))]


def _like_kernels(out: Tensor, weight: Any) -> Tensor:
    """Copies a result of `plain` to the layout that the kernel writes."""
    if weight is None:
        return out.contiguous()
    last = out.dim() - 1
    return out.permute(*range(1, out.dim()), 0).contiguous().permute(last, *range(last))


def _scan(rates: Any, drives: Any, weight: Any, exp: bool) -> Tensor:
    return _like_kernels(plain(rates, drives, weight, exp), weight)


library.impl("scan", _scan, "CPU")
library.impl("scan_grad", plain_grad, "CPU")
torch.library.register_fake("gnomon::scan", _scan_fake, lib=library)
torch.library.register_fake("gnomon::scan_grad", _grad_fake, lib=library)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    rates, drives, weight, exp = inputs
    ctx.form = (len(rates), len(drives), exp)
    ctx.save_for_backward(*rates, *drives, *([] if weight is None else [weight]))


def _backward(ctx: Any, g: Tensor) -> Any:
    rates, drives, exp = ctx.form
    every = ctx.saved_tensors
    last = rates + drives
    weight = every[last] if len(every) > last else None
    gradients = torch.ops.gnomon.scan_grad(g, list(every[:rates]), list(every[rates:last]), weight, exp)
    return gradients[:rates], gradients[rates:last], gradients[last] if weight is not None else None, None


torch.library.register_autograd("gnomon::scan", _backward, setup_context=_setup, lib=library)


# ---- in a graph of ATen's
class Scan(TriedKernel):
    """One scan, or its backward, as a function of its tensors: the states, their sums with the weight, or the
    gradients of all factors."""

    def __init__(self, form: ScanForm, backward: bool, fixed: bool) -> None:
        super().__init__(f"scan{'_grad' if backward else ''}", source_of(form, backward), fixed)
        self.form, self.backward, self.several = form, backward, backward

    def run(self, *args: Tensor) -> Any:
        """Runs the kernel on these tensors, or PyTorch's operations where it cannot."""
        result: Any = run_grad(self.form, args[0], args[1:]) if self.backward else run(self.form, args)
        return self.aten(*args) if result is None else result

    def aten(self, *args: Tensor) -> Any:
        """Runs PyTorch's operations on the same tensors."""
        g, every = (args[0], args[1:]) if self.backward else (None, args)
        last = self.form.rates + self.form.drives
        call_args = (every[: self.form.rates], every[self.form.rates : last], every[last] if self.form.dot else None)
        return plain_grad(g, *call_args, self.form.exp) if g is not None else _scan(*call_args, self.form.exp)


def fuse(graph: fx.Graph) -> list[Scan]:
    """Puts a `Scan` in place of each `gnomon::scan` and `gnomon::scan_grad` of a graph; returns them."""
    calls = []
    for node in list(graph.nodes):
        backward = node.target is torch.ops.gnomon.scan_grad.default
        if not backward and node.target is not torch.ops.gnomon.scan.default:
            continue
        *first, rates, drives, weight, exp = node.args
        every = [*rates, *drives, *([] if weight is None else [weight])]
        metas = [[one.meta["val"] for one in part] for part in (rates, drives)]
        form = form_of(metas[0], metas[1], None if weight is None else weight.meta["val"], exp)
        fixed = all(isinstance(size, int) for one in every for size in one.meta["val"].shape)
        call = Scan(form, backward, fixed)
        with graph.inserting_before(node):
            new = graph.call_function(call, (*first, *every))
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        calls.append(call)
    return calls

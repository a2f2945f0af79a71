"""A linear layer by a kernel of ours, with what follows it: batch norm, a sum, ReLU; also a convolution of one pixel.

BLAS and oneDNN are made for products whose sides are packed beforehand or are large. This kernel (cpp/linear.cpp)
turns weights in cache, a panel at a time, as it goes, so they are read as they lie in every call: what somebody writes
is seen, and nothing is kept. It is tried beside them (`products`, `convolutions`). Float32 on a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.machine import this_machine
from gnomon.compiler.tiles.matmul_tile import MatmulTile

FORMULA = CPP / "linear.cpp"
PARALLEL = 1 << 20
"""Multiplications from which on threads share a product."""
MOST_OTHERS = 4
"""Tensors that what follows a product reads beside it, as OTHERS of cpp/linear.h."""


def other_fields(end: str = "") -> list[tuple[str, Any]]:
    """Fields of the tensors that what follows a product reads; end: of their names."""
    pointers = [(f"other{i}{end}", ctypes.c_void_p) for i in range(MOST_OTHERS)]
    return [*pointers, *((f"other_row{i}{end}", ctypes.c_int64) for i in range(MOST_OTHERS))]


class LinearCall(ctypes.Structure):
    """The struct `Call` of cpp/linear.h, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("m", "n", "k", "relu", "threads")],
        ("x", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("across", "x_row", "x_down", "x_k")],
        ("w", ctypes.c_void_p),
        *[(name, ctypes.c_int64) for name in ("w_n", "w_k")],
        *[(name, ctypes.c_void_p) for name in ("bias", "gamma", "beta", "mean", "variance")],
        ("eps", ctypes.c_double),
        *[(name, ctypes.c_void_p) for name in ("added", "out", "norm_gamma", "norm_beta")],
        ("norm_eps", ctypes.c_double),
        ("refused", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        ("first", ctypes.c_int64),
        *other_fields(),
    ]


PIXEL_TILES = (MatmulTile(7, 4), MatmulTile(9, 3), MatmulTile(14, 2), MatmulTile(14, 1))
"""Of convolutions of single pixels with 32 registers; the second last is that of most sizes."""

Ended: TypeAlias = tuple[str, ...]
"""Lines of C++ that make of `x`, a vector of a product's results, what is written; none where that is x itself. They
are the body of `Ended<Stage>::of` in cpp/linear.h."""


@dataclass(frozen=True, slots=True)
class LinearForm:
    """What a kernel is compiled for: its tile (None: the one of most sizes), and what surrounds the product."""

    tile: MatmulTile | None = None
    epilogue: Ended = ()
    """What follows the product."""
    normed: bool = False
    """Whether rows of x are normed as they are read."""
    relus: bool = False
    """Whether a ReLU is in front."""
    least: int = 1
    """Rows of a block at least: tiles of fewer are not compiled, and x with smaller blocks is refused."""


PLAIN = LinearForm()


def least_of(m: int | torch.SymInt, tile: MatmulTile | None = None) -> int:
    """The `least` of a form for m rows. Rows are dealt evenly to as few blocks as there must be, so that tiles of two
    counts of rows are used of all that there are, and g++ takes half of its time. One of three numbers, so that
    products share a kernel."""
    if not isinstance(m, int) or m < 1:
        return 1
    rows = tile.rows if tile else {16: 14, 8: 6}.get(this_machine().isa.lanes, 4)
    least = m // -(-m // rows)
    return next((some for some in (rows - 2, rows // 2) if 1 < some <= least), 1)


@cache
def source(form: LinearForm = PLAIN) -> str:
    """The C++ text of a form."""
    lies = ["#define LIES"] if form.normed or form.epilogue else []
    lies += ["#define RELUS"] * form.relus + [f"#define LEAST {form.least}"] * (form.least > 1)
    return "\n".join([*tile_text(form.tile, form.normed, (form.epilogue,), lies), FORMULA.read_text(encoding="utf-8")])


def tile_text(tile: MatmulTile | None, normed: bool, ended: Sequence[Ended], defined: Sequence[str] = ()) -> list[str]:
    """What stands before the text of a kernel of cpp/linear.h's tile. ended: what follows the product of each stage;
    defined: what the text needs defined beside."""
    lines = [f"#define TILE {tile.rows}", f"#define VECTORS {tile.vectors}"] if tile else []
    lines += [*(["#define NORMED"] if normed else []), *defined]
    if not any(ended):
        return lines
    text = [*lines, '#include "linear.h"', '#include "math.h"', "namespace {"]
    for stage, body in enumerate(ended):
        if body:
            text.append(f"template <> struct Ended<{stage}> {{")
            text.append("    ALWAYS F of(F x, const Call& c, int64_t m, int64_t at, int64_t left) {")
            text += [*(f"        {line}" for line in body), "    }", "};"]
    return [*text, "}  // namespace"]


def ended_text(body: Ended) -> list[str]:
    """What stands before the text of a kernel that has a function `ended` of its own: that function, where work follows
    it."""
    if not body:
        return []
    text = ['#include "vector.h"', '#include "math.h"', "#define ENDED", "namespace {", "template <class C>"]
    text.append("ALWAYS F ended(F x, const C& c, int64_t m, int64_t at, int64_t left) {")
    return [*text, *(f"    {line}" for line in body), "}", "}  // namespace"]


@cache
def kernel(form: LinearForm = PLAIN) -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source(form), ctypes.POINTER(LinearCall))


def linear(
    *args: Tensor,
    after: str = "none",
    form: LinearForm = PLAIN,
    norm: tuple[Tensor | None, Tensor | None, float] | None = None,
    others: Sequence[Tensor] = (),
) -> Tensor | None:
    """(bias,) x (m, k), weight (n, k), each may lie turned; after: `relu` or `none`; norm: gamma, beta and eps of a
    form that is normed, of x whose numbers of a row lie beside each other; others: what the form's work reads beside
    the product, (m, n) or (n,), contiguous. With either x lies as it is normed. (m, n), None where it does not run."""
    *bias, x, w = args
    x, w = (one if 1 in one.stride() else one.contiguous() for one in (x, w))
    bias = [one.contiguous() for one in bias]
    (m, k), n = x.shape, w.shape[0]
    out = torch.empty((m, n))
    call = LinearCall(
        m=m, n=n, k=k, relu=after == "relu", x=x.data_ptr(), across=max(1, m), x_row=x.stride(0), x_k=x.stride(1),
        w=w.data_ptr(), w_n=w.stride(0), w_k=w.stride(1), bias=bias[0].data_ptr() if bias else None, out=out.data_ptr(),
    )  # fmt: skip
    if norm is not None:
        gamma, beta, call.norm_eps = norm
        call.norm_gamma = None if gamma is None else gamma.data_ptr()
        call.norm_beta = None if beta is None else beta.data_ptr()
    for i, one in enumerate(others):
        setattr(call, f"other{i}", one.data_ptr())
        # One row for all, or a matrix of a single row, which is the same.
        setattr(call, f"other_row{i}", 0 if one.numel() == n else n)
    return out if _run(call, form) else None


def of_rows(x: Tensor, w: Tensor, relu: bool) -> LinearCall | None:
    """A layer's sizes without its memory: x (m, k), weight (n, k); None where one is to be laid anew first."""
    if not (1 in x.stride() and 1 in w.stride()):
        return None
    (m, k), n = x.shape, w.shape[0]
    threads = 0 if m * n * k >= PARALLEL else 1
    return LinearCall(
        m=m, n=n, k=k, relu=relu, threads=threads, across=max(1, m), x_row=x.stride(0), x_k=x.stride(1),
        w_n=w.stride(0), w_k=w.stride(1),
    )  # fmt: skip


def pixels(
    x: Tensor, w: Tensor, bias: Tensor | None, norm: Sequence[Tensor], eps: float, step: int, added: Tensor | None,
    relu: bool, into: bool, form: LinearForm = PLAIN,
) -> Tensor | None:  # fmt: skip
    """A convolution of one pixel, of images that lie channels last; of a single image x may lie as PyTorch has it
    otherwise, where `step` is 1. x (images, k, height, width), w (n, k, 1, 1); norm:
    the batch norm's gamma, beta, mean and variance, or nothing; added (images, n, ...) or None, into: whether the
    result takes its memory. None where it does not run, and nothing is written."""
    (images, _, high, wide), n, last = x.shape, w.shape[0], torch.channels_last
    if added is not None and into:
        out = added
    else:
        out = torch.empty((images, n, (high - 1) // step + 1, (wide - 1) // step + 1), memory_format=last)
    call = of_pixels(x.shape, n, step, relu, eps, not x.is_contiguous(memory_format=last))
    call.x, call.w, call.out = x.data_ptr(), w.data_ptr(), out.data_ptr()
    call.bias = None if bias is None else bias.data_ptr()
    call.added = None if added is None else added.data_ptr()
    if norm:
        call.gamma, call.beta, call.mean, call.variance = (one.data_ptr() for one in norm)
    return out if _run(call, form) else None


def tile_of_pixels(n: int) -> MatmulTile | None:
    """The tile for so many outputs of a pixel. With 32 registers 7 rows by 4 vectors have as many sums as 14 by 2 for
    11 loads in place of 16, and 7 rows that are a power of two apart stay beside each other in a first cache of 8 ways,
    so that they are read where they lie: 4 to 9 % faster (ResNet-50's sizes), where panels are full. It takes all
    registers, x being an operand in memory of the products, as AVX-512 has it.
    Other tiles where their panels are fuller: 44 outputs are three vectors, and take four in panels of two."""
    lanes = this_machine().isa.lanes
    if lanes < 16:
        return None
    vectors = -(-n // lanes)
    tile = min(PIXEL_TILES, key=lambda tile: -(-vectors // tile.vectors) * tile.vectors)
    return None if tile.vectors == 2 else tile


FEWEST_ROWS = 64
"""Of x from which on a tile has few of them and wide panels."""


def form_of(x: Tensor, w: Tensor) -> LinearForm:
    """The kernel of x (m, k) and weight (n, k) by how they lie: that of `tile_of_pixels` where numbers of a row of x
    lie beside each other and rows are many. On Zen 4, of weights (n, k) 14 rows by 2 vectors are as fast with 128 rows
    from memory, and 2 to 14 % slower with more rows, from cache, or where they would be copied; of weights (k, n), of
    which a panel is a piece of each k, 3 to 25 % slower."""
    m, n = x.shape[0], w.shape[0]
    many = not (isinstance(m, int) and m < FEWEST_ROWS)
    tile = tile_of_pixels(n) if many and x.stride(1) == 1 and isinstance(n, int) else None
    tile = tile if tile is not None and tile.vectors == 4 else None
    return LinearForm(tile, least=least_of(m, tile))


def of_pixels(sizes: Sequence[int], n: int, step: int, relu: bool, eps: float, turned: bool = False) -> LinearCall:
    """A convolution of one pixel without its memory. sizes: (images, k, height, width) that lie channels last; turned:
    those of one image that lies channels first, of step 1."""
    images, k, high, wide = sizes
    # Of `step` 1 all pixels of all images follow each other at one distance, so they are one line of `rows` pixels
    # (`across`). Else a line has `across` of them, and lines lie `x_down` apart.
    across = (wide - 1) // step + 1
    rows = images * ((high - 1) // step + 1) * across
    return LinearCall(
        m=rows, n=n, k=k, relu=relu, threads=0 if rows * n * k >= PARALLEL else 1, x_row=1 if turned else k * step,
        x_down=wide * k * step, x_k=high * wide if turned else 1, across=rows if step == 1 else across,
        w_n=k, w_k=1, eps=eps,
    )  # fmt: skip


def _run(call: Any, form: LinearForm = PLAIN) -> bool:
    function = kernel(form)
    call.threads = torch.get_num_threads() if call.m * call.n * call.k >= PARALLEL else 1
    return function is not None and (not (call.m and call.n) or not function(call))

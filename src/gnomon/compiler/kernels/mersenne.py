"""Random numbers of PyTorch's default generator on CPUs by a kernel: the same numbers, and the same generator after.

`fuse(graph)` puts a `Draw` in place of `bernoulli` with one probability, `rand`, `rand_like` and `uniform` from 0 to 1.
ATen makes these one after another. cpp/mersenne.cpp makes a vector of them at a time, and a mask as bytes. A draw
reads the generator's state once and writes it back once. As in ATen one thread makes it, because a number follows from
those before it. What ATen computes depends on its build and the processor (on Intel's, with MKL, `bernoulli` is another
generator's), so numbers and state are compared with ATen's on a small draw, once in a process, and again in the trial.
Where they differ, ATen draws, and also where another thread keeps drawing meanwhile. Between the last look at the state
and the writing lies a microsecond of Python: what another thread draws then, outside these graphs, would be repeated.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from gnomon.compiler.build import CPP, kernel_of
from gnomon.compiler.node import Node
from gnomon.compiler.tune.gate import Trial
from gnomon.compiler.tune.tried import TriedKernel

aten = torch.ops.aten
FORMULA = CPP / "mersenne.cpp"
MASK = 0
FRACTIONS = {torch.float32: 1, torch.bfloat16: 2}
"""Kinds of numbers, as cpp/mersenne.cpp has them: true or false, and fractions by their dtype."""
WHOLE = {torch.bool: torch.uint8, torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""What results are compared as, bit by bit."""
BITS = 53
"""Of a number that is compared with a probability."""
LOOKS = 3
"""Draws that are thrown away because another thread drew meanwhile, before ATen draws."""
# MT19937 makes 624 words at a time: 700 and 1501 numbers go over the end of the first and of later ones.
SIZES = (0, 1, 700, 1501)
"""Numbers drawn beside ATen's before a kind of draw is taken."""

_lock = threading.RLock()
"""Of reading a state, drawing, and writing it back."""


class _DrawCall(ctypes.Structure):
    """The struct `Call` of cpp/mersenne.cpp, field by field."""

    _fields_ = [
        ("count", ctypes.c_int64), ("kind", ctypes.c_int64), ("below", ctypes.c_uint64), ("bytes", ctypes.c_int64),
        ("before", ctypes.c_void_p), ("after", ctypes.c_void_p), ("out", ctypes.c_void_p),
    ]  # fmt: skip


@cache
def source() -> str:
    """Reads the kernel's C++."""
    return FORMULA.read_text(encoding="utf-8")


@cache
def kernel() -> Callable[[Any], int] | None:
    """The compiled kernel, None where it does not compile."""
    return kernel_of(source(), ctypes.POINTER(_DrawCall))


def fill_random(out: Tensor, kind: int, below: int, generator: torch.Generator) -> bool:
    """Fills a dense tensor as it lies in memory. False where ATen must, and then the generator is as it was.

    below: a mask is true where a number of `BITS` bits is below it.
    """
    function = kernel()
    if function is None:
        return False
    with _lock:
        for _ in range(LOOKS):
            before = generator.get_state()
            after = torch.empty_like(before)
            call = _DrawCall(
                count=out.numel(), kind=kind, below=below, bytes=before.numel(),
                before=before.data_ptr(), after=after.data_ptr(), out=out.data_ptr(),
            )  # fmt: skip
            if function(call):
                return False
            # Nobody else has drawn meanwhile, else this draw began with numbers that another has, too.
            if torch.equal(generator.get_state(), before):
                generator.set_state(after)
                return True
    return False


class Draw(TriedKernel):
    """Random numbers of a fixed shape, or of the shape of a tensor."""

    effects = True

    def __init__(self, p: float | None, like: Tensor) -> None:
        """Is not tried yet. p: the probability of a mask's numbers; None for fractions in [0, 1). like: the result of
        ATen's draw, real or without values; where a size of it changes, calls are given a tensor of its size."""
        self.p, self.dtype = p, like.dtype
        places = (*like.shape, *like.stride())
        fixed = all(isinstance(one, int) for one in places)
        self.place: tuple[Sequence[int], Sequence[int]] | None = (like.shape, like.stride()) if fixed else None
        # A number r of 53 bits stands for r / 2^53, which is below p exactly where r < ceil(p 2^53).
        self.kind, self.below = (FRACTIONS[like.dtype], 0) if p is None else (MASK, math.ceil(math.ldexp(p, BITS)))
        self.made = like.dtype if p is None else torch.bool
        size = like.numel().bit_length() if fixed else 0
        super().__init__("draw", f"{source()}// {p} {self.dtype} {size}", fixed)

    def run(self, *args: Tensor) -> Tensor:
        """Draws by the kernel; by PyTorch where it cannot."""
        out = self._empty(args, self.made)
        return out if fill_random(out, self.kind, self.below, torch.default_generator) else self.aten(*args)

    def aten(self, *args: Tensor) -> Tensor:
        """Draws the same numbers by PyTorch's generator."""
        return self._aten(self._empty(args, self.dtype), torch.default_generator)

    def _aten(self, out: Tensor, generator: torch.Generator) -> Tensor:
        if self.p is None:
            return out.uniform_(generator=generator)
        return out.bernoulli_(self.p, generator=generator) != 0

    def _empty(self, args: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if self.place is None:
            return torch.empty_like(args[0], dtype=dtype)
        return torch.empty_strided(*self.place, dtype=dtype, device="cpu")

    def trial(self) -> Trial:
        return _Replayed(self)

    def agrees(self) -> bool:
        """Whether kernel and ATen give the same on small draws of this kind, and leave the same state."""
        return _agrees(self.p, self.dtype)


@cache
def _agrees(p: float | None, dtype: torch.dtype) -> bool:
    with _disable_current_modes():
        generator = torch.Generator().manual_seed(2026)
        try:
            return all(_same(p, dtype, size, generator) for size in SIZES)
        except RuntimeError:  # a dtype that ATen does not draw
            return False


def _same(p: float | None, dtype: torch.dtype, size: int, generator: torch.Generator) -> bool:
    torch.rand(3, generator=generator)  # so that numbers begin at odd places too
    call, before = Draw(p, torch.empty(size, dtype=dtype)), generator.get_state()
    expected = call._aten(torch.empty(size, dtype=dtype), generator)
    state_after = generator.get_state()
    drawn = torch.empty(size, dtype=call.made)
    generator.set_state(before)
    drew = fill_random(drawn, call.kind, call.below, generator)
    return drew and torch.equal(drawn, expected) and torch.equal(generator.get_state(), state_after)


class _Replayed(Trial):
    """A trial in which all draws begin with the same state, and the states they leave and every bit are compared."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw.source, self._replayed(draw.run), self._replayed(draw.aten))
        self.began = torch.empty(0)

    def __call__(self, *args: Any) -> Any:
        with _lock:
            self.began = torch.default_generator.get_state()
            out = super().__call__(*args)
            # The trial drew several times from one state. The results are ATen's, so the generator goes on as after its
            # one draw.
            torch.default_generator.set_state(out[2])
        return out

    def _replayed(self, function: Callable[..., Tensor]) -> Callable[..., Any]:
        def replayed(*args: Tensor) -> tuple[Tensor, ...]:
            torch.default_generator.set_state(self.began)
            out = function(*args)
            return out, out.view(WHOLE[out.dtype]), torch.default_generator.get_state()

        return replayed


def fuse(graph: fx.Graph) -> list[Draw]:
    """Puts a `Draw` in place of each draw that it makes as ATen does; returns them."""
    draws = []
    for node in list(graph.nodes):
        draw = _draw(node)
        if draw is None or not draw.agrees():
            continue
        with graph.inserting_before(node):
            new = graph.call_function(draw, () if draw.fixed else (node.args[0],))
            new.meta["val"] = node.meta["val"] if draw.p is None else node.meta["val"] != 0
        if draw.p is not None:
            _as_mask(graph, node, new)
        else:
            node.replace_all_uses_with(new)
        graph.erase_node(node)
        draws.append(draw)
    return draws


def _as_mask(graph: fx.Graph, node: Node, mask: Node) -> None:
    """Has a mask in the place of zeros and ones of any dtype."""
    for user in list(node.users):
        if user.target is aten.ne.Scalar and user.args[1] == 0:
            user.replace_all_uses_with(mask)
            graph.erase_node(user)
    if node.users:
        with graph.inserting_before(node):
            wide = graph.call_function(aten._to_copy.default, (mask,), {"dtype": node.meta["val"].dtype})
            wide.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(wide)


def _draw(node: Node) -> Draw | None:
    """The draw of a node, None for other nodes and for draws that stay ATen's."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return None
    if node.target is aten.bernoulli.p:
        p = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        return Draw(p, value) if isinstance(p, float) and 0 <= p <= 1 else None
    if value.dtype not in FRACTIONS or node.kwargs.get("pin_memory"):
        return None
    draw = Draw(None, value)
    if node.target is aten.uniform.default:
        return draw if len(node.args) == 1 and not node.kwargs else None
    if node.target is aten.rand_like.default:
        relaid = node.kwargs.get("memory_format") not in (None, torch.preserve_format)
        return draw if draw.fixed or not relaid else None
    return draw if node.target is aten.rand.default and draw.fixed else None

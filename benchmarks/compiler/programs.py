"""Random programs, forward and backward, against eager and `aot_eager`: `python benchmarks/compiler/programs.py`.

A program is a chain of 2 to 7 operations on up to three inputs of one dtype (float32, bfloat16, float16, float64, the
integers, bool), dense, transposed, strided, expanded or behind an offset, with sizes 0, 1 and odd ones, static or
dynamic. It is compiled and called twice with ordinary numbers or zeros, and then with other numbers: random, special
(NaN, infinity, the ends of the type, 1e20, 1e-3, denormals), rows of unequal size. Where the results are floats, the
gradients of a weighted sum follow. A result is **wrong** where it differs from eager's, `aot_eager`'s does not, and
eager's own is right: it is that of the program in double, and stands when inputs are moved by four units in the last
place (what cancels
on the way is neither; nor is its sign). Equal means NaN and infinities at the same places and a difference of at most
ULPS units in the last place of the dtype, of the number or a twentieth of the largest finite one of its last dim, or
ROUNDED times what eager's is away from the program in double anywhere in that row; of a program in double, ROUNDED
times what eager's moves there when each operation within it rounds otherwise. Kernels are kept however slow they
are, unless `--timed`. Prints what is wrong, what hung or raised
where eager does not, and counts; exits with 1 at any.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from gnomon.compiler import backend
from gnomon.compiler.tune import gate

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from compiler.made import INTEGERS, LAYOUTS, drawn  # noqa: E402

ULPS = {torch.float32: 400.0, torch.float64: 4e6, torch.bfloat16: 4.0, torch.float16: 6.0}
"""Differences that are rounding: a chain of float32 functions, each within 4 units, whose slopes are steep; bfloat16
and float16 are rounded at each step by all three, and flip to a neighbour. Of double our functions are libm's."""
HANG_S, NUDGES = 120, 3
ROUNDED = 8
"""Times eager's own error: a sum of 130 numbers in another order was 7 times as far off after a cumulative sum."""
SHAPES = ((17, 64), (5, 3, 33), (64, 7), (1, 40), (33, 1), (4, 6, 2, 9), (130,), (0, 9), (1,), (2, 300), (3, 16, 16))
Step = tuple[str, Callable[..., torch.Tensor]]


def last(x: torch.Tensor) -> torch.Tensor:
    """At least one dim, so that there is a last."""
    return x if x.dim() else x.reshape(1)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log1p abs": lambda x: torch.log1p(x.abs()),
    "sqrt abs": lambda x: torch.sqrt(x.abs()),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 1e-6),
    "neg": lambda x: -x,
    "abs": torch.abs,
    "square": lambda x: x * x,
    "clamp": lambda x: torch.clamp(x, -1, 2),
    "elu": F.elu,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "times": lambda x: x * 0.3,
    "plus": lambda x: x + 0.7,
    "minus": lambda x: 1.5 - x,
    "over": lambda x: x / 3,
    "floor": torch.floor,
    "round": torch.round,
    "sign": torch.sign,
    "erf": torch.erf,
    "expm1": torch.expm1,
    "sin": torch.sin,
    "reciprocal": torch.reciprocal,
    "to bf16": lambda x: x.bfloat16().to(x.dtype),
    "to float": lambda x: x.float().to(x.dtype),
    "nan_to_num": torch.nan_to_num,
    "isnan": lambda x: torch.where(x.isnan(), 0.5, x),
    "where": lambda x: torch.where(x > 0.1, x, x * 2),
    "masked_fill": lambda x: x.masked_fill(x < -0.5, -3.0),
}
ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: F.softmax(last(x), -1),
    "log_softmax": lambda x: F.log_softmax(last(x), -1),
    "softmax 0": lambda x: F.softmax(last(x), 0),
    "layer_norm": lambda x: F.layer_norm(last(x), last(x).shape[-1:]),
    "rms": lambda x: x * torch.rsqrt((last(x) * last(x)).mean(-1, keepdim=True) + 1e-6),
    "less mean": lambda x: x - last(x).mean(-1, keepdim=True),
    "less max": lambda x: x - last(x).amax(-1, keepdim=True),
    "sum 0": lambda x: x + last(x).sum(0, keepdim=True),
    "sum": lambda x: x + last(x).sum(-1, keepdim=True),
    "std": lambda x: x + last(x).std(-1, keepdim=True),
    "var 0": lambda x: x - last(x).var(0, keepdim=True, correction=0),
    "logsumexp": lambda x: x - torch.logsumexp(last(x), -1, keepdim=True),
    "norm": lambda x: x + last(x).norm(dim=-1, keepdim=True),
    "min": lambda x: x * last(x).amin(0, keepdim=True),
    "total": lambda x: x + x.sum(),
    "prod": lambda x: x + last(x).prod(-1, keepdim=True),
    "cumsum": lambda x: last(x).cumsum(-1),
}
MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda x: x.transpose(0, -1) if x.dim() else x,
    "flat": lambda x: x.reshape(-1),
    "dense": lambda x: x.contiguous(),
    "cat": lambda x: torch.cat([last(x), last(x) * 2], -1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "repeat": lambda x: torch.repeat_interleave(last(x), 2, 0),
    "half": lambda x: last(x)[..., : max(1, last(x).shape[-1] // 2)],
    "flip": lambda x: last(x).flip(-1),
    "roll": lambda x: last(x).roll(1, 0),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "div": lambda a, b: a / (b.abs() + 1),
    "where2": lambda a, b: torch.where(a > b, a, b * 0.5),
    "gate": lambda a, b: a * torch.sigmoid(b),
    "cross": lambda a, b: a * b - b * a,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "mse": lambda a, b: a + F.mse_loss(a, b),
}
WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "neg": lambda x: -x,
    "abs": torch.abs,
    "square": lambda x: x * x,
    "plus": lambda x: x + 3,
    "times": lambda x: x * 31 + 7,
    "clamp": lambda x: torch.clamp(x, 1, 50),
    "not": torch.bitwise_not,
    "and": lambda x: x & 31,
    "xor": lambda x: x ^ 85,
    "to int8": lambda x: x.to(torch.int8).to(x.dtype),
    "to uint8": lambda x: x.to(torch.uint8).to(x.dtype),
    "to int16": lambda x: x.to(torch.int16).to(x.dtype),
    "to int32": lambda x: x.to(torch.int32).to(x.dtype),
    "by float": lambda x: (x.float() * 1.5).to(x.dtype),
    "sum": lambda x: x + last(x).sum(-1, keepdim=True, dtype=x.dtype),
    "max": lambda x: x - last(x).amax(-1, keepdim=True),
    "where": lambda x: torch.where(x > 3, x, 7 - x),
    "masked_fill": lambda x: x.masked_fill(x == 5, 9),
    "sign": torch.sign,
}
WHOLE2: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "sub": torch.sub,
    "maximum": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "where": lambda a, b: torch.where(a > b, a, b),
    "alpha": lambda a, b: torch.add(a, b, alpha=3),
}
TRUTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "not": torch.logical_not,
    "and any": lambda x: x & last(x).any(-1, keepdim=True),
    "twice": lambda x: x | ~x,
    "or all": lambda x: x | last(x).all(-1, keepdim=True),
    "as int": lambda x: (x.long() * 3 - 1) > 0,
}
TRUTH2: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "and": torch.logical_and,
    "xor": torch.logical_xor,
    "or": torch.logical_or,
    "eq": torch.eq,
}

# What `--wide` adds to each of these: a program of a seed is another one with it.
MORE_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mish": F.mish,
    "selu": F.selu,
    "softsign": F.softsign,
    "exp2": torch.exp2,
    "log2": lambda x: torch.log2(x.abs() + 1),
    "atan": torch.atan,
    "asinh": torch.asinh,
    "pow 1.5": lambda x: x.abs() ** 1.5,
    "pow 3": lambda x: x**3,
    "pow -2": lambda x: (x.abs() + 1) ** -2,
    "2 **": lambda x: 2 ** x.clamp(-9, 9),
    "tanhshrink": F.tanhshrink,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "threshold": lambda x: F.threshold(x, 0.1, 2.0),
    "frac": torch.frac,
    "erfc": torch.erfc,
    "logit": lambda x: torch.logit(torch.sigmoid(x), 1e-6),
    "xlogy": lambda x: torch.xlogy(x.abs(), x.abs()),
    "mod": lambda x: x % 3,
    "floor div": lambda x: x // 0.7,
    "mask": lambda x: x * (x > 0),
    "double": lambda x: x.double().sin().to(x.dtype),
    "in place": lambda x: x.clone().add_(1),
    "softplus 2": lambda x: F.softplus(x, 2, 5.0),
    "elu half": lambda x: F.elu(x, 0.5),
}
MORE_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "max dim": lambda x: x - last(x).max(-1, keepdim=True).values,
    "normalize": lambda x: F.normalize(last(x), dim=-1),
    "median": lambda x: x - last(x).median(-1, keepdim=True).values,
    "group": lambda x: F.group_norm(x[None], 1)[0] if x.dim() > 1 else x,
    "std 0": lambda x: x + last(x).std(0, keepdim=True),
    "norm 1": lambda x: x / (last(x).norm(1, dim=-1, keepdim=True) + 1),
    "norm inf": lambda x: x / (last(x).norm(math.inf, dim=-1, keepdim=True) + 1),
    "top": lambda x: torch.where(last(x) >= last(x).topk(min(3, last(x).shape[-1]), -1).values[..., -1:], last(x), 0.0),
    "sort": lambda x: last(x).sort(-1).values,
    "logsumexp 0": lambda x: x - torch.logsumexp(last(x), 0, True),
    "cummax": lambda x: last(x).cummax(-1).values,
    "less amax": lambda x: x - x.amax() if x.numel() else x,
    "logcumsumexp": lambda x: torch.logcumsumexp(last(x), -1),
    "mm": lambda x: x @ x.transpose(0, -1) @ x if x.dim() == 2 else x,
    "cross entropy": lambda x: x + F.cross_entropy(x, x.argmin(-1)) if x.dim() == 2 else x,
    "less mean 0 1": lambda x: x - x.mean((0, -1), keepdim=True) if x.dim() > 1 else x,
}
MORE_MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pad": lambda x: F.pad(last(x), (1, 2)),
    "stack": lambda x: torch.stack([x, x * 0.5], -1),
    "chunk": lambda x: last(x).chunk(2, -1)[0],
    "unfold": lambda x: last(x).unfold(-1, 2, 1).sum(-1) if last(x).shape[-1] > 1 else x,
    "index": lambda x: last(x)[torch.arange(last(x).shape[0]).flip(0)],
    "gather": lambda x: torch.gather(last(x), -1, last(x).argsort(-1, stable=True)),
    "tril": lambda x: torch.tril(x) if x.dim() > 1 else x,
    "every second": lambda x: last(x)[..., ::2],
    "diagonal": lambda x: x.diagonal(0, 0, -1) if x.dim() > 1 else x,
    "rest": lambda x: last(x)[1:] if last(x).shape[0] > 1 else x,
    "movedim": lambda x: x.movedim(0, -1) if x.dim() > 1 else x,
    "twice": lambda x: last(x).repeat(2, *[1] * (last(x).dim() - 1)),
    "split cat": lambda x: torch.cat(last(x).split(2, -1)[::-1], -1),
}
MORE_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b.abs() + 1, value=0.3),
    "alpha": lambda a, b: torch.add(a, b, alpha=0.7),
    "rsub": lambda a, b: torch.rsub(a, b, alpha=0.3),
    "lerp by": lambda a, b: torch.lerp(a, b, torch.sigmoid(b)),
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "logaddexp": torch.logaddexp,
    "fmax": torch.fmax,
    "fmod": lambda a, b: torch.fmod(a, b.abs() + 0.5),
    "copysign": torch.copysign,
    "pow": lambda a, b: (a.abs() + 0.1) ** b.clamp(-3, 3),
    "smooth l1": lambda a, b: F.smooth_l1_loss(a, b, reduction="none"),
    "huber": lambda a, b: a + F.huber_loss(a, b),
    "kl": lambda a, b: F.kl_div(F.log_softmax(last(a), -1), F.softmax(last(b), -1), reduction="none"),
    "bce": lambda a, b: F.binary_cross_entropy_with_logits(a, torch.sigmoid(b), reduction="none"),
    "equal": lambda a, b: torch.where(a == b, a * 2, b),
    "dot": lambda a, b: a * (last(a) * last(b)).sum(-1, keepdim=True),
    "cosine": lambda a, b: a * F.cosine_similarity(last(a), last(b), -1).unsqueeze(-1),
    "swiglu": lambda a, b: F.silu(a) * b,
    "clamp by": lambda a, b: torch.clamp(a, torch.minimum(a, b) - 0.1, b.abs()),
    "mask": lambda a, b: a * (b > 0) + (a > b),
}
MORE_WHOLE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "floor div": lambda x: x // 3,
    "mod": lambda x: x % 7,
    "right": lambda x: x >> 1,
    "left": lambda x: x << 1,
    "div": lambda x: torch.div(x, 3, rounding_mode="trunc"),
    "cumsum": lambda x: last(x).cumsum(-1).to(x.dtype),
    "amin": lambda x: x + last(x).amin(0, keepdim=True),
    "prod": lambda x: x + last(x).prod(-1, keepdim=True, dtype=x.dtype),
    "argmax": lambda x: x + last(x).argmax(-1, keepdim=True).to(x.dtype),
    "bool": lambda x: x + x.bool(),
    "pow": lambda x: x**2,
}


class Program:
    """One random program: `function`, its `inputs` by kind of numbers, and `text` that says what it is."""

    def __init__(self, seed: int, wide: bool = False) -> None:
        """Draws it. wide: of the operations of MORE_UNARY and its like too."""
        chance = random.Random(seed)
        self.wide = wide
        self.dtype = chance.choice(
            [torch.float32] * 4 + [torch.bfloat16] * 3 + [torch.float64, torch.float16, torch.bool, *INTEGERS]
        )
        self.shape, self.dynamic = chance.choice(SHAPES), chance.random() < 0.3
        self.layouts = [chance.choice(list(LAYOUTS)) for _ in range(3)]
        self.first = chance.choice(["random", "zeros"])
        self.kinds = ["random", chance.choice(["special", "mixed", "mixed"])]
        self.seed = seed
        one, two = self._operations()
        self.steps: list[tuple[str, Callable[..., torch.Tensor], int, int]] = []
        for n in range(chance.randint(2, 7)):
            binary = chance.random() < 0.35
            name = chance.choice(list(two if binary else one))
            recent = chance.choice([n, n, n, chance.randint(-3, n)])
            self.steps.append(
                (name, two[name] if binary else one[name], recent, chance.randint(-3, n) if binary else -9)
            )

    def _operations(self) -> tuple[dict[str, Any], dict[str, Any]]:
        moves = MOVES | (MORE_MOVES if self.wide and self.dtype != torch.bool else {})
        if self.dtype.is_floating_point:
            more = MORE_UNARY | MORE_ROWS if self.wide else {}
            return {**UNARY, **ROWS, **moves, **more}, BINARY | (MORE_BINARY if self.wide else {})
        return (
            ({**TRUTH, **moves, "cat": MOVES["flat"]}, TRUTH2)
            if self.dtype == torch.bool
            else ({**WHOLE, **moves, **(MORE_WHOLE if self.wide else {})}, WHOLE2)
        )

    @property
    def text(self) -> str:
        steps = " ".join(f"{name}({i}{f',{j}' if j > -9 else ''})" for name, _, i, j in self.steps)
        of = str(self.dtype).removeprefix("torch.")
        how = f"{'dynamic ' if self.dynamic else ''}{'/'.join(self.layouts)} {self.first} then {self.kinds}"
        return f"{self.seed}: {of} {self.shape} {how}: {steps}"

    def function(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The last step's result; shapes that do not go together take the other operand's mean."""
        made = list(inputs)
        for _, operation, i, j in self.steps:
            a = made[i + 2 if i >= -2 else 0] if i + 2 < len(made) else made[-1]
            if j <= -9:
                made.append(operation(a))
                continue
            b = made[j + 2 if j >= -2 else 0] if j + 2 < len(made) else made[-1]
            if a.shape != b.shape:
                b = a.flip(0) if a.dim() else a
            made.append(operation(a, b))
        return made[-1]

    def inputs(self, kind: str) -> list[torch.Tensor]:
        """Three tensors; the same for the same kind."""
        chance = torch.Generator().manual_seed(self.seed)
        out = []
        for layout in self.layouts:
            x = (
                torch.zeros(self.shape, dtype=self.dtype)
                if kind == "zeros"
                else drawn(self.shape, self.dtype, kind, chance)
            )
            out.append(LAYOUTS[layout](x))
        return out


def outcome(function: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Result, and gradients of a weighted sum of it."""
    train = inputs[0].is_floating_point()
    given = [x.detach().requires_grad_(train) for x in inputs]
    made = function(*given)
    out = [made.detach()]
    if train and made.requires_grad and made.numel():
        weights = (torch.arange(made.numel()) % 7 * 0.25 - 0.4).to(made.dtype).view(made.shape)
        out += [g for g in torch.autograd.grad(made, given, weights, allow_unused=True) if g is not None]
    return out


def unlike(made: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Where they differ."""
    if not wanted.is_floating_point():
        return made != wanted
    a, b, ends = made.double(), wanted.double(), torch.finfo(wanted.dtype)
    size = b.abs()
    if b.dim() and b.numel():
        top = torch.where(b.isfinite(), size, 0.0).amax(-1, keepdim=True)
        size = torch.maximum(size, top / 20)
    near = (a - b).abs() <= ULPS[wanted.dtype] * ends.eps * size + 100 * ends.tiny
    return ~((a == b) | near & a.isfinite() & b.isfinite() | a.isnan() & b.isnan())


def verdict(
    program: Program, made: list[torch.Tensor], eager: list[torch.Tensor], other: list[torch.Tensor], kind: str
) -> str:
    """What is wrong, or nothing."""
    if len(made) != len(eager):
        return f"{len(made)} results in place of {len(eager)}"
    exact = None
    for n, (a, b, c) in enumerate(zip(made, eager, other, strict=True)):
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"result {n}: {a.dtype} {tuple(a.shape)} in place of {b.dtype} {tuple(b.shape)}"
        bad = unlike(a, b) & ~unlike(c, b)
        if bool(bad.any()) and b.is_floating_point():
            if exact is None:
                exact = outcome(program.function, [x.double() for x in program.inputs(kind)])
            bad &= ~unlike(b, exact[n].to(b.dtype)) & ~near(a, b, exact[n])
            moved = [
                outcome(program.function, nudged(program.inputs(kind), seed))[n]
                for seed in range(NUDGES if bool(bad.any()) else 0)
            ]
            for one in moved:
                bad &= ~unlike(one, b)
            if b.dtype == torch.float64 and bool(bad.any()):  # `exact` is no more so than eager
                bad &= ~within(a, b, [moved_within(program, kind, seed)[n] for seed in range(NUDGES)])
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            return (
                f"result {n} {int(bad.sum())} of {bad.numel()}, at {at} {a[at].item()!r} in place of {b[at].item()!r}"
            )
    return ""


def near(made: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Where a result is no farther from the exact one than ROUNDED times what eager's is anywhere in its row."""
    ours, theirs = ((one.double() - exact).abs() for one in (made, eager))
    theirs = theirs.nan_to_num(0.0, 0.0, 0.0)
    return ours <= ROUNDED * (theirs.amax(-1, keepdim=True) if theirs.dim() else theirs)


def within(made: torch.Tensor, eager: torch.Tensor, moved: Sequence[torch.Tensor]) -> torch.Tensor:
    """Where a result is no farther from eager's than roundings within eager move that."""
    apart = torch.stack([(one - eager).abs() for one in moved]).nan_to_num(0.0, 0.0, 0.0).amax(0)
    return (made - eager).abs() <= ROUNDED * apart


class Moved(TorchDispatchMode):
    """Moves each operation's float results by up to two units in the last place, those of composite operations within
    them too (Monte Carlo arithmetic; Parker 1997)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSITE:
            with self:
                return COMPOSITE[func](*args, **kwargs)
        out = func(*args, **kwargs)
        if func._schema.is_mutable or any(one.alias_info is not None for one in func._schema.returns):
            return out
        return tree_map_only(torch.Tensor, self.moved, out)

    def moved(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        by = torch.rand(x.shape, generator=self.chance, dtype=x.dtype) - 0.5
        return x * (1 + by * 4 * torch.finfo(x.dtype).eps)


COMPOSITE = core_aten_decompositions()


def moved_within(program: Program, kind: str, seed: int) -> list[torch.Tensor]:
    """What a program gives where each of its roundings is another."""
    inputs = program.inputs(kind)
    with Moved(seed):
        return outcome(program.function, inputs)


def nudged(inputs: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Inputs moved by up to four units in the last place, in the layout that they have."""
    chance = torch.Generator().manual_seed(seed)
    out = []
    for x in inputs:
        memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).clone()
        memory *= 1 + (torch.rand(memory.shape, generator=chance) - 0.5).to(x.dtype) * 8 * torch.finfo(x.dtype).eps
        out.append(memory.as_strided(x.shape, x.stride(), x.storage_offset()))
    return out


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """TimeoutError after so long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def tried(program: Program) -> tuple[str, str]:
    """(`equal`, `wrong`, `raised`, `hung` or `left out`, why)."""
    torch._dynamo.reset()
    backend.reports.clear()
    wanted: dict[str, list[torch.Tensor]] = {}
    try:
        for kind in (program.first, *program.kinds):
            wanted[kind] = outcome(program.function, program.inputs(kind))
    except (RuntimeError, TypeError, IndexError):  # no program in eager
        return "left out", ""
    try:
        with limited(HANG_S):
            function = torch.compile(program.function, backend="gnomon", dynamic=program.dynamic or None)
            for kind in (program.first, program.first, *program.kinds):
                made = outcome(function, program.inputs(kind))
                if any(
                    bool(unlike(a, b).any()) if a.shape == b.shape else True
                    for a, b in zip(made, wanted[kind], strict=True)
                ):
                    again = torch.compile(program.function, backend="aot_eager", dynamic=program.dynamic or None)
                    if why := verdict(program, made, wanted[kind], outcome(again, program.inputs(kind)), kind):
                        return "wrong", f"{kind} {why}"
    except TimeoutError as error:
        return "hung", str(error)
    except Exception as error:
        try:
            again = torch.compile(program.function, backend="aot_eager", dynamic=program.dynamic or None)
            outcome(again, program.inputs(program.first))
        except Exception:  # before any backend is asked
            return "left out", ""
        return "raised", f"{type(error).__name__}: {str(error)[:300]}"
    return "equal", ""


def main() -> int:
    """A line for each program that is not equal, and counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first; the next follow")
    parser.add_argument(
        "--timed", action="store_true", help="kernels that are slower than ATen are given back, as in use"
    )
    parser.add_argument(
        "--mixed",
        action="store_true",
        help="kernels are kept or given back by chance, as their times in use may choose",
    )
    parser.add_argument("--wide", action="store_true", help="of twice as many operations")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if not options.timed:
        gate.SLOWER, gate.REPEATS = math.inf, 1
    if options.mixed:
        chance = random.Random(options.seed)
        gate.SLOWER = 1.0
        gate._times = lambda *_, **__: (chance.choice([0.5, 2.0]), 1.0)
    torch.manual_seed(0)
    counts, kernels, kept, began = Counter[str](), 0, 0, time.process_time()
    with tempfile.TemporaryDirectory() as cache:
        os.environ.setdefault("GNOMON_CACHE", cache)
        for seed in range(options.seed, options.seed + options.programs):
            program = Program(seed, options.wide)
            result, why = tried(program)
            counts[result] += 1
            for made in backend.reports:
                kernels += len(made.program.groups)
                kept += sum(made.kept(p) for p in made.program.groups)
                for trial in made.trials.values():
                    if trial.verdict.get("wrong"):
                        counts["kernels that the trial refused"] += 1
                        print(f"refused {program.text}\n    {trial.verdict['wrong']}", flush=True)
            if why:
                print(f"{result} {program.text}\n    {why}", flush=True)
    print(f"{dict(counts)}, {kernels} kernels, {kept} kept, {time.process_time() - began:.0f} s of CPU without g++")
    return bool(counts["wrong"] + counts["raised"] + counts["hung"])


if __name__ == "__main__":
    sys.exit(main())

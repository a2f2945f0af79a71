"""Inputs that a checker makes: random, signed, large, tiny, denormal, both zeros, infinities, NaN, the ends of integer
types, constant; in layouts that are dense, transposed, strided and expanded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def special(dtype: torch.dtype) -> torch.Tensor:
    """Numbers at which functions and conversions go wrong."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        some = [
            0,
            1,
            2,
            3,
            5,
            44,
            100,
            127,
            ends.max,
            ends.max - 1,
            ends.min,
            ends.min + 1,
            ends.max // 2,
            ends.max // 3,
        ]
        some += [-n for n in some[1:8]] if ends.min else [200, 255]
        some += [n for n in (128, 255, 256, 300, 2**24 + 1, 2**31, 2**32 + 5, 2654435761) if n <= ends.max]
        return torch.tensor(some, dtype=dtype)
    ends = torch.finfo(dtype)
    some = [
        0.0,
        1.0,
        0.1,
        0.3,
        0.5,
        1.5,
        2.5,
        3.0,
        5.5,
        6.0,
        9.5,
        20.0,
        20.5,
        30.0,
        88.0,
        89.5,
        104.0,
        128.0,
        255.0,
        300.0,
    ]
    some += [1000.0, 1e4, 65504.0, 32768.0, 2.0**24, 2.0**31, 3e9, 1e20, 1e30, ends.max, 1e-3, 1e-7, 1e-20, ends.tiny]
    some += [ends.tiny / 2, ends.tiny / 64, float("inf")]
    return torch.tensor([*some, *(-n for n in some), float("nan")], dtype=dtype)


def drawn(shape: Sequence[int], dtype: torch.dtype, kind: str, chance: torch.Generator) -> torch.Tensor:
    """kind: `random` (normal, or any integer), `special` (each from `special`), `mixed` (rows of unequal size, one
    special number among a few), `constant`."""
    pool = special(dtype)
    picked = pool[torch.randint(len(pool), tuple(shape), generator=chance)]
    if kind == "special":
        return picked
    if kind == "constant":
        return pool[torch.randint(len(pool), (), generator=chance)].expand(tuple(shape)).clone()
    if not dtype.is_floating_point:
        small = torch.randint(-5, 6, tuple(shape), generator=chance)
        return picked if kind == "random" else small.to(dtype)
    plain = torch.randn(tuple(shape), dtype=torch.float64, generator=chance)
    if kind == "random":
        return plain.to(dtype)
    if plain.dim():
        sizes = torch.tensor([1.0, 1.0, 1e-3, 30.0, 1e4, 1e20, 1e-20, 1e-40, 0.0], dtype=torch.float64)
        rows = sizes[torch.randint(len(sizes), (shape[0],), generator=chance)]
        plain = plain * rows.view(-1, *[1] * (plain.dim() - 1))
    rare = torch.rand(tuple(shape), generator=chance) < 0.02
    return torch.where(rare, picked, plain.to(dtype))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() > 1 else x,
    "every second": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and x.shape[0] else x,
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape),
}


def apart(made: torch.Tensor, wanted: torch.Tensor, ulps: float, absolute: float = 0.0) -> str:
    """What differs: NaN, infinities, or more than so many units in the last place; nothing where it does not.

    absolute: difference that is allowed besides."""
    if made.dtype != wanted.dtype or made.shape != wanted.shape:
        return f"{made.dtype} {tuple(made.shape)} in place of {wanted.dtype} {tuple(wanted.shape)}"
    if not wanted.dtype.is_floating_point:
        unlike = made != wanted
    else:
        ends = torch.finfo(wanted.dtype)
        a, b = made.double(), wanted.double()
        near = (a - b).abs() <= ulps * (ends.eps * b.abs()).clamp(min=ends.smallest_normal * ends.eps) + absolute
        unlike = ~((a == b) | near & a.isfinite() & b.isfinite() | a.isnan() & b.isnan())
    if not bool(unlike.any()):
        return ""
    at = tuple(unlike.nonzero()[0].tolist())
    return (
        f"{int(unlike.sum())} of {unlike.numel()} differ, at {at} {made[at].item()!r} in place of {wanted[at].item()!r}"
    )

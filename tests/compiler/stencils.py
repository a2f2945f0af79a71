"""Stencils as people write them, with small inputs, and random ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.nn import functional as F

from gnomon.compiler.stencil.call import replaced
from gnomon.compiler.stencil.elsewhere import RunElsewhere

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]


def jacobi(u: Tensor) -> Tensor:
    for _ in range(3):
        new = u.clone()
        new[1:-1, 1:-1] = 0.25 * (u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:])
        u = new
    return u


def rolled(u: Tensor) -> Tensor:
    for _ in range(3):
        u = u + 0.1 * (torch.roll(u, 1, 0) + torch.roll(u, -1, 1) + torch.roll(u, (-2, 1), (0, 1)) - 3 * u)
    return u


def shrinking(u: Tensor) -> Tensor:
    for _ in range(3):
        u = (u[1:-1, 1:-1] * 0.5 + u[2:, 1:-1] * 0.1 + u[:-2, 2:] * 0.2).tanh()
    return u


def gray_scott(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Two fields that react, of which both are read beyond their edges."""
    for _ in range(2):
        a, b = F.pad(u, (1, 1, 1, 1)), F.pad(v, (1, 1, 1, 1), value=0.5)
        spread = [p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4 * q for p, q in ((a, u), (b, v))]
        react = u * v * v
        u, v = u + 0.16 * spread[0] - react + 0.06 * (1 - u), v + 0.08 * spread[1] + react - 0.12 * v
    return u, v


def heat(u: Tensor) -> Tensor:
    """Along three dims."""
    new = u.clone()
    here = u[1:-1, 1:-1, 1:-1]
    around = u[2:, 1:-1, 1:-1] + u[:-2, 1:-1, 1:-1] + u[1:-1, 2:, 1:-1] + u[1:-1, :-2, 1:-1]
    new[1:-1, 1:-1, 1:-1] = here + 0.1 * (around + u[1:-1, 1:-1, 2:] + u[1:-1, 1:-1, :-2] - 6 * here)
    return F.relu(new[2:] - new[:-2])


def sobel(u: Tensor) -> Tensor:
    """Edges, then the largest of three neighbours."""
    x = u[:-2, :-2] + 2 * u[1:-1, :-2] + u[2:, :-2] - u[:-2, 2:] - 2 * u[1:-1, 2:] - u[2:, 2:]
    y = u[:-2, :-2] + 2 * u[:-2, 1:-1] + u[:-2, 2:] - u[2:, :-2] - 2 * u[2:, 1:-1] - u[2:, 2:]
    g = (x * x + y * y).sqrt()
    return torch.maximum(g[1:-1, 1:-1], torch.maximum(g[:-2, 1:-1], g[2:, 1:-1]))


def cases() -> dict[str, Case]:
    chance = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance)

    return {
        "written into the interior": (jacobi, (r(37, 53),)),
        "in double": (jacobi, (r(21, 19).double(),)),
        "around the edges": (rolled, (r(37, 53),)),
        "ever smaller": (shrinking, (r(37, 53),)),
        "two fields": (gray_scott, (r(30, 50), r(30, 50))),
        "three dims": (heat, (r(9, 11, 40),)),
        "edges of an image": (sobel, (r(24, 70),)),
        "convolutions in a row": (
            lambda x, w: F.conv2d(F.conv2d(x, w, padding=1), w, padding=1).relu(),
            (r(2, 1, 33, 41), r(1, 1, 3, 3)),
        ),
        "few channels, a bias": (
            lambda x, w, b: F.conv2d(x, w, b, padding=(2, 1), dilation=(2, 1)),
            (r(2, 3, 17, 41), r(2, 3, 3, 3), r(2)),
        ),
        "channels of their own": (
            lambda x, w: F.conv2d(x, w, padding=1, groups=8),
            (r(2, 8, 9, 21), r(8, 1, 3, 3)),
        ),
        "along one dim": (lambda x, w: F.conv1d(F.conv1d(x, w, padding=2), w), (r(4, 1, 90), r(1, 1, 5))),
        "bfloat16": (lambda x, w: F.conv2d(x, w), (r(1, 1, 20, 37).bfloat16(), r(1, 1, 3, 3).bfloat16())),
        "smaller than a vector": (lambda x, w: F.conv2d(x, w, padding=1) + x, (r(1, 1, 5, 6), r(1, 1, 3, 3))),
    }


def seen(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> list[RunElsewhere]:
    """The stencils of a function, with what they were given and what ATen made of it."""
    found: list[RunElsewhere] = []

    def compiled(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(one for _, one in replaced(graph.graph, RunElsewhere))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(function, backend=aot_autograd(fw_compiler=compiled, inference_compiler=compiled))(*inputs)
    wanted = function(*inputs)
    for a, b in zip(made if isinstance(made, tuple) else (made,), wanted if isinstance(wanted, tuple) else (wanted,),
                    strict=True):  # fmt: skip
        torch.testing.assert_close(a, b, equal_nan=True)
    return found


def random_case(seed: int) -> Case:
    """A chain of two to five random steps over one or two fields."""
    rng = random.Random(seed)
    rank = rng.choice([1, 2, 2, 2, 3])
    shape = [rng.randint(12, 14 if rank == 3 else 40) for _ in range(rank)]
    steps = []
    for kind in [rng.choice(["slice", "pad", "roll", "write", "point"]) for _ in range(rng.randint(1, 4))] + ["write"]:
        reach = rng.choice([1, 1, 2]) if rank < 3 else 1
        moves = [tuple(rng.randint(-reach, reach) for _ in range(rank)) for _ in range(rng.randint(2, 5))]
        steps.append((kind, rng.random(), reach, moves, rng.random() < 0.3, rng.choice([0.0, 1.5])))
    dims = tuple(range(rank))

    def shifted(u: Tensor, by: tuple[int, ...], reach: int) -> Tensor:
        return u[tuple(slice(reach + b, size - reach + b) for b, size in zip(by, u.shape, strict=True))]

    def function(u: Tensor, v: Tensor) -> Tensor:
        for kind, number, reach, moves, both, fill in steps:
            if kind == "point":
                u = (u * number).tanh() - u.abs() * 0.1
                continue
            field = torch.maximum(u, v) if u.shape == v.shape and both else u
            if kind == "roll":
                rolls = [torch.roll(field, by, dims) * number for by in moves]
                u = u * 0.5 + sum(rolls[1:], rolls[0])
                continue
            if kind == "pad":
                field = F.pad(field, (reach, reach) * u.dim(), value=fill)
            parts = [shifted(field, by, reach) * (number + n) for n, by in enumerate(moves)]
            total = sum(parts[1:], parts[0]) * 0.2
            if kind == "write":
                new = u.clone()
                new[(slice(reach, -reach),) * u.dim()] = total
                u = new
            else:
                u = total
        return u * 2

    chance = torch.Generator().manual_seed(seed)
    return function, (torch.randn(shape, generator=chance), torch.randn(shape, generator=chance))

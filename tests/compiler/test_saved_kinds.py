"""What is saved holds kernels of every kind: stencils, chains, loops, scans, attention, products of pairs, one call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch._higher_order_ops.associative_scan import associative_scan  # noqa: E402
from torch._higher_order_ops.scan import scan  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import gnomon  # noqa: E402
from gnomon.compiler import build  # noqa: E402
from gnomon.compiler.kernels import attention, chains, convolutions, linear, taps, thin, winograd  # noqa: E402
from gnomon.compiler.tasks import steps  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh")]


class Heat(nn.Module):
    """Two steps of an explicit stencil."""

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            p = F.pad(u, (1, 1, 1, 1))
            u = u + 0.1 * (p[:-2, 1:-1] + p[2:, 1:-1] + p[1:-1, :-2] + p[1:-1, 2:] - 4.0 * u)
        return u


class Block(nn.Module):
    """A norm, a linear layer and what follows, and attention as two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one.view(1, -1, 2, 16).transpose(1, 2) for one in F.gelu(self.up(self.norm(x))).chunk(3, -1))
        mixed = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
        return x + mixed.transpose(1, 2).reshape(-1, 32)


class Cell(nn.Module):
    """A recurrent cell over the rows of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 8)

    def step(self, h: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.tanh(self.inner(torch.cat([h, row], -1)))
        return new, new * 2.0

    def forward(self, x: torch.Tensor) -> Any:
        return scan(self.step, torch.zeros(3, 8), x)

    def one_by_one(self, x: torch.Tensor) -> Any:
        h, rows = torch.zeros(3, 8), []
        for row in x:
            h, out = self.step(h, row)
            rows.append(out)
        return h, torch.stack(rows)


class Pairs(nn.Module):
    """Dot products of all pairs of a sample's vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("below", torch.tril_indices(9, 9, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dots = x @ x.transpose(1, 2)
        return torch.cat([x[:, 0], dots[:, self.below[0], self.below[1]]], -1)


class Recurrence(nn.Module):
    """h[t] = a[t] h[t - 1] + b[t]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.sigmoid(), x * 2.0
        made = associative_scan(lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1]), (a, b), 0, combine_mode="generic")
        return made[1]


class Images(nn.Module):
    """Convolutions of each kind that has a kernel, with a batch norm and what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.each = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm, self.pixels = nn.BatchNorm2d(16), nn.Conv2d(16, 24, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        return F.silu(self.pixels((self.norm(self.each(y)) + y).relu()))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "stencil": (Heat, (40, 50)),
    "chain and attention": (Block, (48, 32)),
    "scan": (Cell, (9, 3, 4)),
    "pairs": (Pairs, (32, 9, 16)),
    "recurrence": (Recurrence, (40, 3, 16)),
    "convolutions": (Images, (1, 3, 30, 33)),
}
CACHED = (attention.kernel, convolutions._digest, linear.kernel, thin.kernel, steps._library, taps._kernel,
          winograd._kernel)  # fmt: skip
"""What holds kernels in a process."""


@pytest.mark.parametrize("kind", CASES)
def test_a_process_without_a_compiler_has_its_kernels(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_module, shape = CASES[kind]
    module, x = build_module().eval(), torch.randn(shape)
    monkeypatch.setattr(chains, "SHARE", 1e9)
    monkeypatch.setattr(chains, "GAIN", 0.0)
    folder = gnomon.save(module, (x,), tmp_path / "model")
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "has_compiler", lambda: False)
    for one in CACHED:
        one.cache_clear()
    try:
        loaded = gnomon.load(folder)
        with torch.no_grad():
            wanted = module.one_by_one(x) if isinstance(module, Cell) else module(x)
        for _ in range(3):
            torch.testing.assert_close(loaded(x), wanted, rtol=2e-4, atol=1e-5)
        made = loaded.compiled
        if kind == "stencil":
            assert made.stencils and all(one.kept for one in made.stencils)
        elif kind == "pairs":
            assert made.pairs and all(one.kept for one in made.pairs)
        elif kind == "recurrence":  # torch.export writes it as padded and shifted parts
            assert all(planned.function for planned in made.program.groups)
        elif kind == "scan":
            assert [run for run in made.runs if run.kept]
        elif kind == "convolutions":
            assert [getattr(one, "added", None) for one in made.convolutions] == [False, True, False]
            assert all(build.libraries([str(one.text)])[0] for one in made.convolutions)
        else:
            assert made.chains and made.attention and all(one.kept for one in (*made.chains, *made.attention))
        assert not list((tmp_path / "empty").glob("*.so"))
    finally:
        for one in CACHED:
            one.cache_clear()

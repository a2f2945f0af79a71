"""Linear layers with a norm before and pointwise work after as one kernel; tiles of products from hardware units."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.kernels import chains, linear, linears  # noqa: E402
from gnomon.compiler.tiles.device import described  # noqa: E402
from gnomon.compiler.tiles.matmul_tile import MatmulTile, candidates, constructed, fits, grown, predicted_s  # noqa: E402

pytestmark = pytest.mark.torch


class Layer(nn.Module):
    """A layer norm, a linear layer and x * sigmoid(1.7 x), whose product is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(37), nn.Linear(37, 50)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Any) -> Any:
        h = self.linear(self.norm(x))
        return h * torch.sigmoid(1.7 * h)


def test_a_chain_is_eagers_and_sees_what_is_written(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chains, "SHARE", float("inf"))
    model, x = Layer(), torch.randn(3, 11, 37)
    with torch.no_grad():
        fast = torch.compile(model, backend="gnomon")
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5)
        [chain] = backend.reports[-1].chains
        assert chain.names == ["layer norm", "linear", "mul", "sigmoid", "mul"] and chain.kept, chain.verdict
        [told] = [one for one in lines(explained(backend.reports[-1]), "") if "chain" in one]
        assert told == "  chain layer norm + linear + mul + sigmoid + mul of 33x50x37 (kept)"
        model.linear.weight.mul_(2)
        model.norm.bias.add_(1)
        torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=2e-5)
        far = x * 1e20  # whose variance has no float: ATen's answer, as ATen gives it
        torch.testing.assert_close(fast(far), model(far), equal_nan=True, rtol=2e-4, atol=2e-5)


class Adapter(nn.Module):
    """A norm, few features between two linear layers with a GELU, and what came before added, times a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.down, self.up = nn.LayerNorm(37), nn.Linear(37, 6), nn.Linear(6, 37, bias=False)
        self.scale = nn.Parameter(torch.randn(37))

    def forward(self, x: Any) -> Any:
        return x + self.up(nn.functional.gelu(self.down(self.norm(x)))) * self.scale


def _layers(*widths: int) -> nn.Module:
    made = [part for a, b in zip(widths, widths[1:], strict=False) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*made[:-1])


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Adapter(), ["layer norm", "linear", "gelu", "linear", "mul", "add"]),
        (_layers(37, 20, 45, 3), ["linear", "relu", "linear", "relu", "linear"]),
    ],
    ids=["adapter", "layers"],
)
def test_layers_behind_each_other_are_one_kernel(
    model: nn.Module, names: list[str], fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in double, in a call of C++ and by itself; what is written, NaN and infinities are seen."""
    monkeypatch.setattr(chains, "SHARE", float("inf"))
    x = torch.randn(3, 11, 37)
    with torch.no_grad():
        fast = torch.compile(lambda x: model(x.sin() + 1).softmax(-1), backend="gnomon")
        for _ in range(3):
            made, right = fast(x), copy.deepcopy(model).double()(x.double().sin() + 1).softmax(-1)
            torch.testing.assert_close(made.double(), right, rtol=1e-4, atol=1e-5)
        [chain] = backend.reports[-1].chains
        assert chain.names == names and chain.kept, chain.verdict
        assert any("chain (kernel)" in run.names for run in backend.reports[-1].runs)
        next(one for one in model.parameters() if one.dim() == 2).data.mul_(2)
        torch.testing.assert_close(fast(x), model(x.sin() + 1).softmax(-1), rtol=1e-4, atol=1e-5)
        x[0, 3, 5], x[1, 2] = float("nan"), float("inf")
        torch.testing.assert_close(fast(x), model(x.sin() + 1).softmax(-1), equal_nan=True, rtol=1e-4, atol=1e-5)


def test_weights_that_leave_the_cache_and_gates_of_a_group_are_no_chain(fresh: None) -> None:
    """What lies between is saved only where weights stay in the second cache. A SwiGLU's gate and product are one
    group, whose half would have to be written for a chain."""
    device = described("avx512")
    assert linears.fit([(64, 256, 256), (64, 256, 256)], device)
    assert not linears.fit([(64, 512, 512), (64, 512, 512)], device)
    one, gate, two = (nn.Linear(16, 24, bias=False) for _ in range(3))
    with torch.no_grad():
        torch.compile(lambda x: (one(x) * nn.functional.silu(gate(x)), two(x)), backend="gnomon")(torch.randn(40, 16))
    assert all("mul" not in chain.names or "silu" in chain.names for chain in backend.reports[-1].chains)


def test_what_others_read_stays_in_memory(fresh: None) -> None:
    """A norm that two layers read is no part of either; a product that somebody else reads ends its chain."""
    norm, one, two = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(16, 24)

    def both(x: Any) -> Any:
        n = norm(x)
        h = one(n)
        return torch.tanh(h), h, two(n)

    with torch.no_grad():
        made = torch.compile(both, backend="gnomon")(torch.randn(5, 16))
    assert len(made) == 3 and backend.reports[-1].chains == []


def test_tiles_fill_the_registers_of_each_device() -> None:
    """By hand: 14 rows of 2 vectors, 9 of 3 and 6 of 4 are the fullest of 32 registers; 16 registers hold 6 of 2."""
    wide, narrow = described("avx512"), described("avx2")
    assert {MatmulTile(14, 2), MatmulTile(9, 3), MatmulTile(6, 4)} <= set(candidates(1000, wide))
    assert MatmulTile(6, 2) in candidates(1000, narrow) and not fits(MatmulTile(7, 2), narrow)
    for device in (wide, narrow, described("neon")):
        way = grown(device)
        assert way[0] == MatmulTile(1, 1) and all(fits(one, device) for one in way)
        assert all(b.sums > a.sums for a, b in zip(way, way[1:], strict=False))


def test_a_tile_fits_the_size() -> None:
    """48 outputs are three vectors: a tile of two or four would leave a third of its last panel empty. Where no
    product reads one number for all lanes from memory, one vector would load for each product."""
    device = described("avx512")
    assert constructed(1000, 48, 384, device)[0].vectors in (1, 3)
    assert constructed(1000, 48, 384, described("avx2"))[0].vectors > 1
    first, *others = constructed(16, 512, 256, device)
    assert all(predicted_s(first, 16, 512, 256, device) <= predicted_s(one, 16, 512, 256, device) for one in others)


@pytest.mark.parametrize("tile", [MatmulTile(9, 3)])
def test_any_tile_gives_the_product(tile: MatmulTile) -> None:
    x, w, b = torch.randn(31, 45), torch.randn(77, 45), torch.randn(77)
    for left, right in ((x, w), (x.t().contiguous().t(), w.t().contiguous().t())):
        made = linear.linear(b, left, right, form=linear.LinearForm(tile))
        assert made is not None
        torch.testing.assert_close(made, torch.addmm(b, x, w.t()), rtol=1e-4, atol=1e-4)

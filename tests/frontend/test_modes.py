"""Modules that stop autograd, write over a product, norm a parameter, cache a table or add a product of a width with
itself run as they were written, divided too."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.graph import Dtypes  # noqa: E402
from gnomon.plans import Layout, Mesh  # noqa: E402
from gnomon.runtime.checks.prove import CapturedRun, prove  # noqa: E402
from gnomon.runtime.launch.captured_job import values_of  # noqa: E402
from gnomon.runtime.module import blocks  # noqa: E402
from gnomon.runtime.parameters.parameters import Slot  # noqa: E402
from gnomon.sharding import shard_graph  # noqa: E402

pytestmark = pytest.mark.torch


class Still(nn.Module):
    """A frozen front, as of an audio codec."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.front(x).relu()
        return self.back(x)


class WrittenOver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.view(-1, 8)[:, :2].mul_(0.5)
        return self.second(y.relu_())


class NormedTable(nn.Module):
    """Of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.norm(self.table.weight).T


@pytest.mark.parametrize("module", [Still(), WrittenOver(), NormedTable()], ids=lambda m: type(m).__name__)
def test_outputs_and_gradients_are_the_modules(module: nn.Module) -> None:
    assert prove(module, {"x": torch.randn(2, 3, 8)}).holds


def test_a_product_without_autograd_has_no_backward() -> None:
    graph = captured(Still(), {"x": torch.randn(2, 3, 8)}).graph
    still = {op.path for block in graph.blocks for op in block.ops if op.kind == "linear" and op.attr("no_grad", False)}
    assert still == {"front"}


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @staticmethod
    @lru_cache(maxsize=4)
    def table(length: int, device: torch.device) -> Tensor:
        return torch.arange(length, device=device).float()[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.table(x.shape[1], x.device))


def test_a_table_that_is_cached_is_not_one_of_the_recording() -> None:
    module, x = Tabled(), torch.randn(2, 3, 4)
    eager = module(x)
    found = captured(module, {"x": x})
    assert Tabled.table.cache_info().currsize == 0
    assert not found.trace.constants  # the table is made in the graph, at any length
    assert torch.equal(module(x), eager)


class Squared(nn.Module):
    """A product from a width to the same width, which the graph gives two names, and the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.mix, self.leave = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.enter(x).relu()
        return self.leave(self.mix(y) + y)


def test_what_is_renamed_is_divided_before_and_after_or_neither() -> None:
    graph = captured(Squared(), {"x": torch.randn(2, 3, 8)}).graph
    sizes = {"batch": 2} | {dim.name: 4 for block in graph.blocks for dim in block.dims if dim.size is None}
    divided = shard_graph(graph, Layout(), Mesh(tp=2), sizes, Dtypes(param="fp32", compute="fp32"))
    renames = [op.strategy for block in divided.values() for op in block.ops if op.op.kind == "rename"]
    assert renames
    for strategy in renames:
        before, after = strategy.inputs[0].dim_of("tp"), strategy.outputs[0].dim_of("tp")
        assert (before is None) == (after is None)


def test_an_op_that_does_not_run_divided_is_named() -> None:
    graph = captured(Squared(), {"x": torch.randn(2, 3, 8)}).graph
    op = next(op for block in graph.blocks for op in block.ops if op.kind == "linear")
    owner = SimpleNamespace(axes={"tp": SimpleNamespace(ranks=2)}, captured=True, block=SimpleNamespace(name="layer"))
    frame = SimpleNamespace(owner=owner)
    said = blocks.Frame._not_divided(frame, SimpleNamespace(op=op), RuntimeError("The size of tensor a (4) …"))
    assert isinstance(said, PlanError)
    assert f"layer: {op.path} does not run divided by tp = 2 (The size of tensor a (4) …); use tp = 1" in str(said)


def test_a_parameter_without_elements_has_no_part() -> None:
    slot = Slot(
        name="empty", shape=(1, 1, 4), whole=(1, 1, 4), offset=(0, 0, 0), start=0, holders=1, sums="", decays=False
    )
    assert values_of({"empty": torch.empty(1, 0, 4)})(slot) is None


class Drawing(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = torch.Generator().manual_seed(1)
        return self.linear(x) * torch.randn(4, generator=own, dtype=x.dtype)


def test_numbers_of_a_generator_of_its_own_are_drawn() -> None:
    module = Drawing().double()
    x = torch.randn(2, 4, dtype=torch.float64)
    run = CapturedRun(module, captured(module, {"x": x}, training=False), torch.float64)
    (out,) = run.run({"x": x}, None)
    assert out.shape == (2, 4)
    assert bool(torch.isfinite(out).all())


class Wide(nn.Module):
    """Sets a default dtype while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self.linear(x) + torch.ones(4) / 3 + torch.full((), 1 / 3)
        finally:
            torch.set_default_dtype(before)


def test_numbers_of_a_default_dtype_are_of_that_of_the_recording() -> None:
    proof = prove(Wide(), {"x": torch.randn(2, 4)})
    assert proof.holds
    assert proof.outputs < 1e-15  # a third in float32 is 1e-8 off

"""What of a captured module depends on values: numbers that Python read are the same in a run, or it is said."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from gnomon.errors import RunError  # noqa: E402
from gnomon.frontend.capture import captured  # noqa: E402
from gnomon.runtime.checks.prove import CapturedRun, prove  # noqa: E402
from gnomon.runtime.launch.captured_job import states_of  # noqa: E402

pytestmark = pytest.mark.torch


class Experts(nn.Module):
    """Rows go to one of two experts by what they are, and each expert's rows are cut out by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0).long()
        order = chosen.argsort(stable=True)
        parts = x[order].split(torch.bincount(chosen, minlength=2).tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])[order.argsort()]


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if (x > 0).any() else x


def rows(*first: float) -> Tensor:
    return torch.tensor([[a, 1.0, 2.0, 3.0] for a in first], dtype=torch.float64)


def test_what_python_reads_of_values_is_the_same_in_a_run_or_said() -> None:
    module = Experts().double()
    result = captured(module, {"x": rows(1, -1, -2, 3)})
    run = CapturedRun(module, result, torch.float64)
    again = rows(-4, 5, 6, -7)  # two rows each, as in the example
    assert torch.equal(run.run({"x": again})[0], module(again))
    with pytest.raises(RunError, match=r"test_values.py:\d+: Python reads \[1, 3\] here, and read \[2, 2\] of the ex"):
        run.run({"x": rows(-4, 5, 6, 7)})
    asks = Asks().double()
    answered = CapturedRun(asks, captured(asks, {"x": rows(1, -1)}), torch.float64)
    with pytest.warns(UserWarning, match="Python reads False here, and read True of the example; the Graph goes on"):
        answered.run({"x": -rows(1, 1).abs()})


def test_a_parameter_without_elements_is_not_trained() -> None:
    """As register tokens of which a config has none."""

    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none = nn.Parameter(torch.empty(1, 0, 4))
            self.up = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(torch.cat([self.none.expand(len(x), -1, -1), x], 1))

    module = Registers()
    assert prove(module, {"x": torch.randn(2, 3, 4)}).holds
    result = captured(module, {"x": torch.randn(2, 3, 4)})
    assert set(result.graph.parameters()) == {"up.weight", "up.bias"}
    assert not states_of(module, result)["none"].numel()


def test_what_every_layer_returns_is_an_output() -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)])

        def forward(self, x: Tensor) -> list[Tensor]:
            states = [x]
            for layer in self.layers:
                states.append(layer(states[-1]))
            return states[1:]

    result = captured(States(), {"x": torch.randn(2, 4)})
    assert len(set(result.graph.outputs)) == 3 and len(result.graph.blocks) == 1
    assert prove(States(), {"x": torch.randn(2, 4)}).holds


def test_a_run_makes_no_gradient_of_the_batch_and_holds_no_buffer_that_it_does_not_read() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
            self.register_buffer("scale", torch.ones(4))
            self.register_buffer("table", torch.ones(100))

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x).mean((2, 3)) * self.scale)

    module, x = Image().double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    run = CapturedRun(module, captured(module, {"x": x}), torch.float64)
    counts = []
    for forward in (lambda: module(x), lambda: run.run({"x": x})[0]):
        with FlopCounterMode(display=False) as counted:
            forward().sum().backward()
        counts.append(counted.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert run.stage.state_names == {"scale"}

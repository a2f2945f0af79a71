"""A block's ops as one function compute what they compute one by one, to the bit."""

from __future__ import annotations

import linecache

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402

from gnomon.frontend.capture import CapturedModule, captured  # noqa: E402
from gnomon.runtime.checks.prove import CapturedRun  # noqa: E402

pytestmark = pytest.mark.torch


class Kinds(nn.Module):
    """Ops with one result and several, lists, keywords, tensors written out, buffers, writes, and parts without
    autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.register_buffer("shift", torch.linspace(-1, 1, 8))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        a, b, c = self.first(x * weights).chunk(3, dim=-1)
        h = torch.cat([b, a.sin(), c + 1], dim=-1) * self.scale
        with torch.no_grad():
            size = h.abs().amax(-1, keepdim=True)
        top, _ = h.topk(3, dim=-1)
        h = h / (1 + size) + 0.1 * top.sum(-1, keepdim=True) * torch.tensor([2.0, -1.0, 0.5]).sum()
        out = self.second(torch.clamp(h, min=-2.0, max=2.0))
        out = out + self.shift.to(out.dtype)
        out[:, 0] = out[:, 0] * 3
        return torch.where(out > 0, out, 0.1 * out)


Step = tuple[CapturedRun, list[Tensor], list[Tensor]]
"""A run, its outputs, its gradients."""


@pytest.fixture(scope="module")
def recorded() -> tuple[nn.Module, CapturedModule, dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Kinds().double().eval()
    batch = {"x": torch.randn(4, 8, dtype=torch.float64), "weights": torch.rand(4, 8, dtype=torch.float64)}
    return module, captured(module, batch, training=False), batch


def _step(recorded: tuple[nn.Module, CapturedModule, dict[str, Tensor]], rows: int, *, one_by_one: bool) -> Step:
    module, found, batch = recorded
    run = CapturedRun(module, found, torch.float64)
    (out,) = run.run(
        {name: x.repeat(2, 1)[:rows] for name, x in batch.items()}, (lambda *_: None) if one_by_one else None
    )
    out.sin().sum().backward()
    return run, [out.detach()], [grad for _, grad in run.gradients()]


@pytest.mark.parametrize("rows", [4, 7])
def test_results_and_gradients_are_those_of_one_op_after_the_other(
    recorded: tuple[nn.Module, CapturedModule, dict[str, Tensor]], rows: int
) -> None:
    _, *want = _step(recorded, rows, one_by_one=True)
    _, *got = _step(recorded, rows, one_by_one=False)
    assert len(want[1]) == 5 and all(grad.abs().sum() > 0 for grad in want[1])
    assert all(torch.equal(a, b) for a, b in zip((*want[0], *want[1]), (*got[0], *got[1]), strict=True))


def test_most_ops_are_lines_and_a_traceback_shows_them(
    recorded: tuple[nn.Module, CapturedModule, dict[str, Tensor]],
) -> None:
    run, *_ = _step(recorded, 4, one_by_one=False)
    (block,) = run.runs.values()
    lines = linecache.getlines(f"<ops of {block.block.name}>")
    left = [op.site.op.path for op in block.ops if op.site.op.kind == "linear"]
    called = sum("frame.do(" in line for line in lines)
    assert len(left) <= called <= len(block.ops) / 3, "".join(lines)
    assert any("[v['" in line for line in lines), "a list of tensors"

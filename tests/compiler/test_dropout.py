"""Dropout: with one seed a compiled function drops what eager drops, forward and backward."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.kernels import mersenne  # noqa: E402

pytestmark = pytest.mark.torch
F = torch.nn.functional


def twice(a: object, b: object, p: float) -> object:
    return F.dropout(F.dropout(a, p) * b + b, 0.5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_drops_what_eager_drops_however_its_input_lies(dynamic: bool) -> None:
    """ATen fills memory that lies as the input does: turned (attention of a batch that comes first), channels last,
    spread, in parts."""
    torch._dynamo.reset()

    def drops(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.sin(), 0.3) + F.dropout(x, 0.5)

    compiled = torch.compile(drops, backend=backend.gnomon, dynamic=dynamic)
    base = torch.randn(4, 6, 5, 8)
    last = base.contiguous(memory_format=torch.channels_last)
    for x in (
        base.transpose(0, 1),
        last,
        base[:, :, :, :1].expand(-1, -1, -1, 3),
        base[..., ::2],
        base.permute(3, 1, 0, 2),
    ):
        for seed in range(2):
            made = []
            for call in (drops, compiled):
                torch.manual_seed(seed)
                made.append(call(x))
            torch.testing.assert_close(made[1], made[0])
            assert made[1].stride() == made[0].stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dynamic", [False, True])
def test_drops_what_eager_drops(dtype: torch.dtype, dynamic: bool) -> None:
    torch._dynamo.reset()
    backend.reports.clear()  # bounded: its length marks no place
    compiled = torch.compile(twice, backend=backend.gnomon, dynamic=dynamic)
    a, b = (torch.randn(64, 48, dtype=dtype, requires_grad=True) for _ in range(2))
    for seed in range(3):  # the first call is on trial and gives PyTorch's own results
        made = []
        for call in (twice, compiled):
            torch.manual_seed(seed)
            out = call(a, b, 0.25)
            made.append((out, *torch.autograd.grad(out.float().square().sum(), (a, b))))
        for eager, ours in zip(*made, strict=True):
            assert torch.equal(eager == 0, ours == 0)
            near = 1e-5 if dtype == torch.float32 else 0.02  # eager rounds to bf16 after each operation
            assert (ours - eager).norm().item() <= near * eager.norm().item()
    called = [str(node.target) for one in backend.reports for node in one.program.graph.nodes]
    assert not [name for name in called if "native_dropout" in name]
    drawn = [draw for one in backend.reports for draw in one.draws]
    taken = mersenne.Draw(0.75, torch.empty(0, dtype=dtype)).agrees()  # not on every processor
    assert len(drawn) == 2 * taken and all(draw.kept for draw in drawn)


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_drops_nothing_or_all(p: float) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: F.dropout(a, p) + 1, backend=backend.gnomon)
    a = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        out = compiled(a)
        assert torch.equal(out, F.dropout(a, p) + 1)
        (grad,) = torch.autograd.grad(out.sum(), a)
        assert torch.equal(grad, torch.full_like(a, 1 - p))


def test_evaluation_draws_nothing() -> None:
    torch._dynamo.reset()
    layer = torch.nn.Dropout(0.5).eval()
    compiled = torch.compile(lambda a: layer(a) * 2 + 1, backend=backend.gnomon)
    a = torch.randn(8, 8)
    state = torch.get_rng_state()
    assert torch.equal(compiled(a), a * 2 + 1)
    assert torch.equal(state, torch.get_rng_state())

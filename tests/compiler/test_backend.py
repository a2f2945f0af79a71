"""`torch.compile(model, backend="gnomon")`: training, one compilation for lengths, threads, a damaged cache, no
compiler."""

from __future__ import annotations

import logging
import threading
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from compiler.traced import compiled, run  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend, build  # noqa: E402

pytestmark = pytest.mark.torch


class Block(torch.nn.Module):
    """A transformer block, post-norm, with its own attention mask."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.out = torch.nn.Linear(hidden, hidden)
        self.up = torch.nn.Linear(hidden, 4 * hidden)
        self.down = torch.nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = F.softmax(q @ k.transpose(-1, -2) / (h // self.heads) ** 0.5, -1)
        mixed = (weights @ v).transpose(1, 2).reshape(b, s, h)
        x = self.norm1(x + self.out(mixed))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def test_the_entry_point_names_the_backend() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'gnomon = "gnomon.compiler.backend:gnomon"' in text
    for point in entry_points(group="torch_dynamo_backends"):
        if point.name == "gnomon":
            assert point.value == "gnomon.compiler.backend:gnomon"


def test_a_block_trains_as_in_eager_and_one_compilation_serves_lengths() -> None:
    torch._dynamo.reset()
    model, plain = Block(), Block()
    plain.load_state_dict(model.state_dict())
    backend.reports.clear()  # it keeps the newest only
    fast = torch.compile(model, backend=backend.gnomon, dynamic=True, fullgraph=True)
    for b, s in ((2, 8), (3, 11), (2, 19)):
        x = torch.randn(b, s, 32)
        for module, call in ((plain, plain), (model, fast)):
            module.zero_grad()
            call(x).pow(2).mean().backward()
        torch.testing.assert_close(fast(x), plain(x), rtol=1e-4, atol=1e-5)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5)
    made = list(backend.reports)
    assert len(made) == 2, "one forward and one backward for all lengths"
    assert all(graph.program.groups and all(graph.kept(p) for p in graph.program.groups) for graph in made)


def test_calls_from_many_threads_give_the_same() -> None:
    made = compiled(lambda a: F.softmax(a * 2, -1) + a.sum(0), torch.randn(40, 30))
    call, inputs = made.boxed(), [torch.randn(40, 30) for _ in range(8)]
    out: dict[int, Any] = {}

    def work(n: int) -> None:
        for _ in range(5):
            out[n] = call([inputs[n]])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for n, a in enumerate(inputs):
        torch.testing.assert_close(out[n], F.softmax(a * 2, -1) + a.sum(0))


def test_a_damaged_file_of_the_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    made = compiled(lambda a: torch.tanh(a) * 3 + 1, torch.randn(9))
    source = made.program.groups[0].kernel.source
    [kept] = tmp_path.glob("*.so")
    damaged = kept.read_bytes()[:-100]
    kept.unlink()  # what is loaded stays mapped: only a new file may differ
    kept.write_bytes(damaged)
    assert build._on_disk(build.key_of(source)) is None and not kept.exists()
    build._loaded.clear()
    assert build.libraries([source]) != [None] and [p.name for p in tmp_path.glob("*.so")] == [kept.name]


def test_without_a_compiler_one_message_and_aten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(backend, "has_compiler", lambda: False)
    monkeypatch.setattr(backend, "_said", set())
    caplog.set_level(logging.WARNING, "gnomon.compiler")
    for scale in (2, 3):
        fast = torch.compile(lambda a, by=scale: torch.tanh(a) * by, backend=backend.gnomon)
        torch.testing.assert_close(fast(torch.ones(3)), torch.tanh(torch.ones(3)) * scale)
    assert [r.message for r in caplog.records if "compiler" in r.message] == [
        "no C++ compiler was found (g++ or CXX): backend 'gnomon' runs PyTorch's own operations"
    ]


def test_what_is_wrong_is_given_back(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made = compiled(lambda a: torch.tanh(a) * 5 - 1, torch.randn(9))
    [trial] = made.trials.values()
    trial.run = lambda a: (a + 1e-2,)
    a = torch.randn(9)
    for _ in range(2):
        torch.testing.assert_close(run(made, a)[0], torch.tanh(a) * 5 - 1)
    assert trial.verdict["kept"] is False and "differs from eager" in caplog.text


def test_groups_between_random_numbers_do_not_wait_for_each_other() -> None:
    """One draw's probabilities and what is made of a later draw are one group by their sizes; it would have to run both
    before and after the draws between."""

    def several(x: Any) -> Any:
        first = torch.rand_like(x) + x
        second = torch.bernoulli(x.sigmoid()) + 1
        return first.exp(), second * first, torch.empty_like(x).uniform_() + x.sigmoid(), torch.rand_like(x) * first

    torch._dynamo.reset()
    x, fast = torch.randn(5, 7), torch.compile(several, backend=backend.gnomon)
    for seed in range(2):
        made = []
        for call in (several, fast):
            torch.manual_seed(seed)
            made.append(call(x))
        torch.testing.assert_close(made[1], made[0])
    assert backend.reports[-1].program.groups, "kernels, in place of PyTorch's operations for the whole graph"


def test_a_layer_norm_of_mixed_dtypes_is_a_kernel() -> None:
    """Under autocast it has bfloat16 inputs and float32 weights, and a CPU keeps its mean and deviation in float32."""
    torch._dynamo.reset()
    norm, x, weights = torch.nn.LayerNorm(24), torch.randn(40, 24).bfloat16(), torch.randn(40, 24)

    def gradients(model: Any, x: Any, weights: Any) -> Any:
        model.zero_grad()
        x = x.detach().requires_grad_()
        (model(x).to(weights.dtype) * weights).sum().backward()
        return x.grad, norm.weight.grad.clone(), norm.bias.grad.clone()

    fast, wanted = torch.compile(norm, backend=backend.gnomon), gradients(norm, x, weights)
    for _ in range(2):
        made = gradients(fast, x, weights)
    for one, other in zip(made, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)
    verdicts = [trial.verdict for report in backend.reports for trial in report.trials.values()]
    assert verdicts and not any(verdict.get("wrong") for verdict in verdicts[-2:])


@pytest.mark.parametrize("name", ["sum", "mean"])
def test_one_negative_zero_alone_sums_to_zero(name: str) -> None:
    """ATen's sum begins at 0; the sign decides what the reciprocal is."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return getattr(x * 1.5, name)(1).reciprocal()

    backend.reports.clear()
    fast = torch.compile(function, backend=backend.gnomon)
    x = torch.full((33, 1), -0.0)
    for _ in range(2):
        assert torch.equal(fast(x), function(x))
    assert backend.reports


def test_negative_zeros_stay_so() -> None:
    """The largest and the least of rows, columns and all, of what is read once a row and of a constant."""

    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        scaled = x * 1.5
        made = [scaled.amax(1), scaled.amin(1), scaled.amax(0), scaled.amin(0), scaled.amax(), scaled.amin()]
        return [one.reciprocal() for one in (*made, y * x.abs().add(1), torch.full_like(x, -0.0) * (x * x + 1))]

    for dtype in (torch.float32, torch.float64):
        backend.reports.clear()
        fast = torch.compile(function, backend=backend.gnomon)
        for columns in (1, 40):
            x, y = torch.full((33, columns), -0.0, dtype=dtype), torch.full((33, 1), -0.0, dtype=dtype)
            for _ in range(3):
                for a, b in zip(fast(x, y), function(x, y), strict=True):
                    assert torch.equal(a, b), (dtype, columns)
        assert not any(trial.verdict.get("wrong") for graph in backend.reports for trial in graph.trials.values())


def test_writes_and_random_numbers_keep_their_order() -> None:
    torch._dynamo.reset()

    def step(p: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        before = torch.tanh(p) + 1
        p.mul_(0.9).add_(g, alpha=-0.1)
        return F.dropout(before, 0.5) + torch.rand_like(p) + p

    fast = torch.compile(step, backend=backend.gnomon)
    g = torch.randn(50)
    for _ in range(2):
        p, q = torch.ones(50), torch.ones(50)
        torch.manual_seed(3)
        wanted = step(p, g)
        torch.manual_seed(3)
        torch.testing.assert_close(fast(q, g), wanted)
        torch.testing.assert_close(p, q)

"""What is said of a graph at its first call: once, in a line, and nothing unless it is asked for."""

from __future__ import annotations

import logging

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.tune import gate  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh")]


def test_one_line_at_the_first_call(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 4)).eval()
    x = torch.randn(3, 6)
    for level, count in ((logging.WARNING, 0), (logging.INFO, 1)):
        torch._dynamo.reset()
        caplog.clear()
        fast = torch.compile(model, backend="gnomon")
        with caplog.at_level(level, logger="gnomon.compiler"), torch.no_grad():
            for _ in range(3):
                fast(x)
        said = [record.getMessage() for record in caplog.records if record.name == "gnomon.compiler"]
        assert len(said) == count
    assert said[0].startswith("a graph: 1 group") and "compiled in" in said[0]


def test_what_is_given_back_is_named_with_the_reason(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_times", lambda *_, **__: (3.0, 2.0))
    monkeypatch.setattr(gate, "SLOWER", 1.0)
    monkeypatch.setattr(gate, "_verdicts", {})
    monkeypatch.setattr(gate, "_read", lambda key: None)
    monkeypatch.setattr(gate, "_write", lambda key, verdict: None)
    backend.reports.clear()
    fast = torch.compile(lambda x: torch.softmax(x * 3.0, -1).sin(), backend="gnomon")
    with caplog.at_level(logging.INFO, logger="gnomon.compiler"):
        fast(torch.randn(3, 6))
    [said] = [record.getMessage() for record in caplog.records if record.name == "gnomon.compiler"]
    assert "0 groups as kernels; given back to ATen: mul.Tensor + _softmax + sin (1.50 of ATen's time)" in said


def test_operations_that_no_kernel_knows_are_named(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(lambda x: torch.sort(x.view(3, 6) * 2.0)[0].exp() + 1.0, backend="gnomon")
    with caplog.at_level(logging.INFO, logger="gnomon.compiler"), torch.no_grad():
        fast(torch.randn(18))
    [said] = [record.getMessage() for record in caplog.records if record.name == "gnomon.compiler"]
    assert "; ATen's as before: sort;" in said and "view" not in said and "getitem" not in said


def test_a_graph_without_a_kernel_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    fast = torch.compile(lambda x: torch.sort(x)[0], backend="gnomon")
    with caplog.at_level(logging.INFO, logger="gnomon.compiler"), torch.no_grad():
        for _ in range(3):
            fast(torch.randn(18))
    [said] = [record.getMessage() for record in caplog.records if record.name == "gnomon.compiler"]
    assert said.startswith("a graph: 0 groups") and "ATen's as before: sort;" in said

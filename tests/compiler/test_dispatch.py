"""What Dynamo does around a call of this backend, and of others."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch._dynamo import utils  # noqa: E402

from gnomon.compiler import backend, dispatch  # noqa: E402

pytestmark = pytest.mark.torch


def test_calls_are_marked_for_the_profiler_by_other_backends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a graph break, with options, and where our backend is given by name; guards are what they were."""
    marks: list[str] = []
    for name in ("record_pregraph_bytecode_enter", "record_pregraph_bytecode_exit"):
        monkeypatch.setattr(utils, name, lambda *_: marks.append("mark"))

    def function(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()
        return y + 1

    x = torch.randn(3, 5)
    ways: tuple[tuple[dict[str, Any], bool], ...] = (
        ({"backend": "gnomon"}, False), ({"backend": backend.gnomon, "options": {"frozen": True}}, False),
        ({"backend": "eager"}, True),
    )  # fmt: skip
    for way, marked in ways:
        torch._dynamo.reset()
        marks.clear()
        fast = torch.compile(function, **way)
        torch.testing.assert_close(fast(x), function(x))
        torch.testing.assert_close(fast(torch.randn(2, 5).fill_(2)), function(torch.full((2, 5), 2.0)))
        assert bool(marks) == marked
    assert torch._dynamo.config.record_runtime_overhead
    dispatch.allow(backend.gnomon)  # a second time changes nothing

"""Whether a kernel is kept follows from its time beside ATen's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from gnomon.compiler.tune import gate  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("seconds", "share", "kept"), [(1.02, 1.0, True), (1.05, 1.0, False), (0.92, 0.9, True), (0.95, 0.9, False)]
)
def test_a_kernel_is_kept_within_its_share_of_atens_time(
    seconds: float, share: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "SLOWER", 1.03)
    monkeypatch.setattr(gate, "_times", lambda *_, **__: (seconds, 1.0))
    trial = gate.Trial(f"// {seconds} {share}", lambda x: (x + 1,), lambda x: (x + 1,), share=share)
    assert torch.equal(trial(torch.ones(3))[0], torch.full((3,), 2.0))
    assert trial.kept is kept


def test_a_mode_that_looks_at_every_operation_does_not_see_the_trial() -> None:
    """AOTAutograd has one in each first call; a kernel that makes several results would pay for it, ATen would not."""
    seen = []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    trial = gate.Trial("// looked at", lambda x: (x + 1,), lambda x: (x + 1,))
    x = torch.ones(3)
    with Looks():
        trial(x)
    assert trial.kept is not None and [str(func) for func in seen] == ["aten.add.Tensor"]


def test_arrays_that_no_cache_holds_are_out_of_it_before_each_call_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read for that costs neither of the two anything; small arrays stay where they are."""
    seconds = [0.0]
    monkeypatch.setattr(gate.time, "thread_time", lambda: seconds[0])
    monkeypatch.setattr(gate.time, "perf_counter", lambda: seconds[0])
    order: list[str] = []

    def call(name: str, takes: float) -> Any:
        def made(*_: Any) -> None:
            order.append(name)
            seconds[0] += takes

        return made

    found = gate._times(call("kernel", 2.0), call("aten", 3.0), (), call("other", 5.0))
    assert found == pytest.approx((2.0, 3.0))
    assert order == ["kernel", "other", "aten", "other", "other"]
    assert gate._times(call("kernel", 2.0), call("aten", 3.0), (), None) == pytest.approx((2.0, 3.0))
    order.clear()
    before = call("before", 5.0)
    assert gate._times(call("kernel", 2.0), call("aten", 3.0), (), None, before) == pytest.approx((2.0, 3.0))
    assert order[:4] == ["before", "kernel", "before", "aten"]
    assert gate._forget([torch.ones(2), 3], [False, False]) is None and gate._forget([torch.ones(2)], ()) is None
    assert gate._forget([torch.ones(2), torch.ones(2)], [True, False]) is not None
    half = gate.this_machine().l3_bytes // 2
    large = torch.empty(half // 4)
    assert gate._other_memory([large[: half // 4 - 1], 3]) is None
    assert gate._other_memory([large]) is not None


@pytest.mark.parametrize("layout", ["flat", "turned", "channels last", "broadcast", "apart"])
def test_large_results_are_compared_in_blocks_as_they_are_whole(layout: str) -> None:
    """torch.allclose of whole tensors is the oracle; what is wrong lies in the first, a middle or the last block."""
    rows = gate.BLOCK // 64 + 3

    def made() -> torch.Tensor:
        x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0))
        return {
            "flat": x,
            "turned": x.t(),
            "channels last": x[:1024].view(8, 16, 16, 64).permute(0, 3, 1, 2),
            "broadcast": x[:, None, :1].expand(rows, 2, 128),
            "apart": x[:, ::2],
        }[layout]

    inf, nan = float("inf"), float("nan")
    pairs = [(1.0, 1.0), (1.0, 1.01), (nan, nan), (nan, 1.0), (1.0, nan), (inf, inf), (inf, -inf), (inf, 1.0)]
    for place in (0, -1):
        for ours, theirs in pairs:
            a, b = made(), made()
            for x, value in ((a, ours), (b, theirs)):
                x[(place,) * x.dim()] = value
            near = torch.allclose(a, b, rtol=gate.TOLERANCE[torch.float32][0], atol=1e-4, equal_nan=True)
            assert bool(gate.different([a], [b])) is not near, (place, ours, theirs)
            assert gate._top(a) == float(a[a.isfinite()].abs().max())
    assert gate._top(torch.full((2 * gate.BLOCK,), nan)) == 1.0

"""Whether a kernel is kept follows from its time beside ATen's."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from gnomon.compiler import gate  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("seconds", "share", "kept"), [(1.02, 1.0, True), (1.05, 1.0, False), (0.92, 0.9, True), (0.95, 0.9, False)]
)
def test_a_kernel_is_kept_within_its_share_of_atens_time(
    seconds: float, share: float, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "SLOWER", 1.03)
    monkeypatch.setattr(gate, "_times", lambda run, aten, args: (seconds, 1.0))
    trial = gate.Trial(f"// {seconds} {share}", lambda x: (x + 1,), lambda x: (x + 1,), share=share)
    assert torch.equal(trial(torch.ones(3))[0], torch.full((3,), 2.0))
    assert trial.kept is kept

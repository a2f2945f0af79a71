"""Measured tilings: the best of the candidates, the same numbers, kept for the next process and a family of shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.tiles.tiling import Tiling  # noqa: E402
from gnomon.compiler.tune import tuned, tuner  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("fresh")]


def tile(chunk: int) -> Tiling:
    return Tiling(rows=64, points=64, chunk=chunk, tile=64, parallel=False, past=False)


def subject(name: str, seconds: dict[int, float], count: int, log: list[str]) -> tuner.Subject:
    """A kernel that takes this long with tasks of so many rows; the first is the usual one."""

    def run(one: Tiling) -> float:
        log.append(name)
        return seconds[one.chunk]

    every = [tile(chunk) for chunk in seconds]
    return tuner.Subject(
        source=name, sizes=(64, 64), usual=every[0], run=run, results=list, candidates=every, count=count
    )


def test_time_goes_to_the_kernel_with_most_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    kept: dict[str, tuple[int, int]] = {}
    made = [
        subject("small", {8: 1.0, 4: 0.5, 16: 2.0}, 1, log),
        subject("often", {8: 1.0, 4: 0.9, 2: 0.999}, 5, log),
        subject("settled", {8: 1.0, 4: 0.999}, 1, log),
    ]
    monkeypatch.setattr(tuner, "subject_of", lambda one: one)
    monkeypatch.setattr(tuner, "timed", lambda call, best_s: call())
    monkeypatch.setattr(tuned, "keep", lambda source, sizes, choice: kept.update({source: choice}))
    tuner.tune(made, 10.0)
    assert log[:5] == ["small", "often", "settled", "often", "often"]
    assert kept == {"small": (4, 64), "often": (4, 64)}  # a gain of a thousandth is noise


def compiled(function: Any, inputs: Sequence[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    backend.reports.clear()
    fast = torch.compile(function, backend="gnomon", options=options)
    for _ in range(2):
        out = fast(*inputs)
    return [out] if isinstance(out, torch.Tensor) else list(out)


def normed(x: torch.Tensor, y: torch.Tensor) -> Any:
    return F.gelu(F.layer_norm(x + y, (96,))), (x * y).sigmoid()


def test_results_are_the_same_bit_by_bit_and_a_family_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "GAIN", 1e9)  # whatever was the fastest is kept
    chosen = []
    for rows in (256, 200):
        inputs = [torch.randn(rows, 96) for _ in range(2)]
        usual = compiled(normed, inputs)
        made = compiled(normed, inputs, tune_s=5)
        assert all(torch.equal(a, b) for a, b in zip(made, usual, strict=True))
        [report] = backend.reports
        assert report.tuned and all(one.sizes[0] == rows for one in report.tuned)
        chosen.append([one.num_measured for one in report.tuned])
        for one in report.tuned:
            found = tuned.choices_of(one.source).get(one.sizes)
            assert found is None or one.best is not None and found == (one.best.chunk, one.best.tile)
    assert min(chosen[0]) > 2 >= max(chosen[1])


def test_sums_down_the_rows_keep_their_order() -> None:
    inputs = [torch.randn(512, 96)]
    compiled(lambda x: (x.sin() * 2.0).sum(0), inputs, tune_s=1)
    assert backend.reports[-1].program.groups and not backend.reports[-1].tuned


@pytest.mark.parametrize("asked", [-1, float("nan"), "30s", True])
def test_what_is_no_time_is_refused(asked: Any) -> None:
    with pytest.raises(Exception, match="tune_s.*a number of seconds, 0 or more"):
        compiled(torch.sin, [torch.randn(3)], tune_s=asked)

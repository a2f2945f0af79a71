"""What tilings cost at given rates: the order that hardware imposes, whatever the machine of the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from gnomon.compiler.machine import SETS, Machine  # noqa: E402
from gnomon.compiler.program import program  # noqa: E402
from gnomon.compiler.tiles.tile_cost import Cost, Rates, cost  # noqa: E402
from gnomon.compiler.tiles.tiling import Nest, Tiling, by_memory, bytes_of_point, moved_of_point, tiling  # noqa: E402

pytestmark = pytest.mark.torch

KIB = 1 << 10
AVX512, AVX2 = (next(isa for isa in SETS if isa.name == name) for name in ("avx512", "avx2"))
MACHINE = Machine(
    isa=AVX2, l1_bytes=32 * KIB, l2_bytes=512 * KIB, l3_bytes=32 << 20, line_bytes=64, cores=2, model="test"
)
AT = Rates(
    memory_bytes_per_s=1e10, l3_bytes_per_s=4e10, l2_bytes_per_s=1e11, instructions_per_s=4e9, addition_s=1.2e-9,
    peak_s=1.2e-9, walk_s=2e-9, task_s=8e-9, gather_s=2e-8,
)  # fmt: skip
SMALL = 1 << 20


def nest_of(function: Callable[..., Any], *shapes: tuple[int, ...]) -> Nest:
    traced = make_fx(function, tracing_mode="fake")(*(torch.empty(shape) for shape in shapes))
    (planned,) = program(traced.graph, None).groups
    return planned.kernel.nest


def of(
    nest: Nest, *, rows: int, points: int, chunk: int, tile: int, moved: int = SMALL, threads: int = 1, at: Rates = AT
) -> Cost:
    made = Tiling(rows=rows, points=points, chunk=chunk, tile=tile, parallel=threads > 1, past=False)
    return cost(nest, made, 1, moved, threads, at, MACHINE)


Function = tuple[Callable[..., Any], tuple[int, ...], *tuple[tuple[int, ...], ...]]
SOFTMAX: Function = (lambda a: torch.softmax(a, -1), (512, 1024))
SUMS: Function = (lambda a: (a * a).sum(0), (512, 1024))
BIAS: Function = (lambda a, b: torch.nn.functional.gelu(a + b), (512, 1024), (1024,))


def test_small_tiles_cost_their_starts() -> None:
    nest = nest_of(*BIAS)
    wide, narrow = (of(nest, rows=512, points=1024, chunk=16, tile=tile) for tile in (1024, 16))
    walks = 512 * (64 - 1)
    assert narrow.compute_s - wide.compute_s >= walks * AT.walk_s
    one, many = (of(nest_of(*SOFTMAX), rows=512, points=1024, chunk=chunk, tile=1024) for chunk in (512, 1))
    assert many.compute_s - one.compute_s == pytest.approx(511 * AT.task_s)


def test_each_task_of_column_sums_leaves_a_partial_row() -> None:
    nest = nest_of(*SUMS)
    found = [of(nest, rows=512, points=1024, chunk=chunk, tile=1024).compute_s for chunk in (512, 64, 8, 1)]
    assert found == sorted(found)
    assert found[-1] - found[0] > 511 * 1024 / AT.instructions_per_s


def test_a_chain_of_additions_is_hidden_by_sums_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    nest = nest_of(lambda a: (a * a).sum(-1), (512, 1024))
    monkeypatch.setattr("gnomon.compiler.tiles.tiling.unroll", lambda nest, step: 1)
    chained = of(nest, rows=512, points=1024, chunk=16, tile=1024).compute_s
    monkeypatch.setattr("gnomon.compiler.tiles.tiling.unroll", lambda nest, step: 4)
    hidden = of(nest, rows=512, points=1024, chunk=16, tile=1024).compute_s
    assert 512 * 128 * AT.addition_s <= chained
    assert hidden < 0.7 * chained


def test_a_running_maximum_waits_as_long_as_a_maximum_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    nest = nest_of(*SOFTMAX)
    slow, fast = replace(AT, peak_s=4e-9), replace(AT, peak_s=1e-10)
    for beside in (1, 2):
        monkeypatch.setattr("gnomon.compiler.tiles.tiling.unroll", lambda nest, step, beside=beside: beside)
        costs = [of(nest, rows=512, points=1024, chunk=16, tile=1024, at=at).compute_s for at in (slow, fast)]
        assert 512 * 128 * (4e-9 / beside - 1e-9) < costs[0] - costs[1] <= 512 * 128 * 4e-9 / beside


def test_workers_share_whole_tasks() -> None:
    nest = nest_of(*BIAS)
    one = of(nest, rows=512, points=1024, chunk=128, tile=1024).compute_s
    assert of(nest, rows=512, points=1024, chunk=128, tile=1024, threads=2).compute_s == pytest.approx(one / 2)
    assert of(nest, rows=512, points=1024, chunk=128, tile=1024, threads=3).compute_s == pytest.approx(one / 2)


def test_bytes_come_from_the_level_that_holds_them() -> None:
    nest = nest_of(*BIAS)
    moved = (100 * KIB, 8 << 20, 64 << 20)
    bound = [of(nest, rows=512, points=1024, chunk=16, tile=1024, moved=many) for many in moved]
    rates = [many / one.memory_s for many, one in zip(moved, bound, strict=True)]
    assert rates == pytest.approx([AT.l2_bytes_per_s, AT.l3_bytes_per_s, AT.memory_bytes_per_s])
    assert (bound[0].bound, bound[2].bound) == ("compute", "memory")
    assert bound[2].seconds == bound[2].memory_s


def test_a_row_beyond_the_first_cache_is_read_again_from_the_next() -> None:
    nest = nest_of(*SOFTMAX)
    small = replace(MACHINE, l1_bytes=4 * KIB)
    made = Tiling(rows=512, points=1024, chunk=16, tile=1024, parallel=False, past=False)
    here, there = (cost(nest, made, 1, SMALL, 1, AT, machine).compute_s for machine in (MACHINE, small))
    assert there - here >= 512 * 1024 * 4 / AT.l2_bytes_per_s


@pytest.mark.parametrize(("name", "kept"), [("add, RMS norm", True), ("layer norm", False), ("softmax", True)])
def test_a_value_is_kept_where_a_store_is_less_than_computing_it_again(
    name: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rms(a: torch.Tensor, b: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        both = a + b
        return both * torch.rsqrt(both.pow(2).mean(-1, keepdim=True) + 1e-5) * w

    def norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(a, (1024,), w, b)

    functions: dict[str, Function] = {
        "add, RMS norm": (rms, (512, 1024), (512, 1024), (1024,)),
        "layer norm": (norm, (512, 1024), (1024,), (1024,)),
        "softmax": SOFTMAX,
    }
    found = []
    for again in (0, 100):
        monkeypatch.setattr("gnomon.compiler.tiles.tiling.RECOMPUTE", again)
        found.append(of(nest_of(*functions[name]), rows=512, points=1024, chunk=16, tile=1024).compute_s)
    assert (found[0] < found[1]) is kept


def test_all_arrays_of_a_row_lie_in_the_first_cache_between_passes() -> None:
    nest = nest_of(lambda a, w, b: torch.nn.functional.layer_norm(a, (1024,), w, b), (512, 1024), (1024,), (1024,))
    made = Tiling(rows=512, points=1024, chunk=16, tile=1024, parallel=False, past=False)
    assert len(nest.scratch) == 1
    five_arrays = replace(MACHINE, l1_bytes=20 * KIB)  # the input, weight, bias and output, and a row of scratch
    fits = cost(nest, made, 1, SMALL, 1, AT, five_arrays).compute_s
    assert cost(nest, made, 1, SMALL, 1, AT, replace(five_arrays, l1_bytes=20 * KIB - 1)).compute_s > fits


@pytest.mark.parametrize(
    ("function", "rows", "past"),
    [
        (lambda a, b: a * b + a, 1365, False),  # a little below half of the last cache
        (lambda a, b: a * b + a, 1366, True),
        (lambda a, b: torch.nn.functional.gelu(a) * torch.tanh(b), 1366, False),  # arithmetic takes longer
        (lambda a, b: torch.nn.functional.gelu(a) * torch.tanh(b), 2731, True),  # none of it stays in the last cache
    ],
)
def test_outputs_go_past_the_caches_where_nothing_of_them_would_be_there(
    function: Callable[..., Any], rows: int, past: bool
) -> None:
    nest = nest_of(function, (rows, 1024), (rows, 1024))
    assert moved_of_point(nest) == 3 * 4
    assert tiling(nest, 1, rows * 1024, replace(MACHINE, isa=AVX512, l3_bytes=32 << 20)).past is past


def test_what_rows_share_comes_from_memory_once() -> None:
    nest = nest_of(lambda a, w, b: torch.nn.functional.layer_norm(a, (1024,), w, b), (512, 1024), (1024,), (1024,))
    assert (moved_of_point(nest), bytes_of_point(nest)) == (2 * 4, 4 * 4)
    angles = nest_of(lambda a, c: a * c + 1, (512, 16, 64), (512, 1, 64))  # a token's heads share its angles
    assert (moved_of_point(angles), bytes_of_point(angles)) == (2 * 4, 3 * 4)


def test_starts_of_short_rows_take_longer_than_their_memory() -> None:
    nest = nest_of(lambda a, c: a * c + 1, (4096, 16, 64), (4096, 1, 64))
    assert [by_memory(nest, points, 16) for points in (32, 1024)] == [False, True]

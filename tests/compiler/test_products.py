"""Products and convolutions that a trial gives to oneDNN or to a kernel of ours are eager's, and a weight that somebody
writes is seen."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.kernels import linear, products  # noqa: E402
from gnomon.compiler.machine import this_machine  # noqa: E402
from gnomon.compiler.tiles.matmul_tile import MatmulTile  # noqa: E402
from gnomon.compiler.tune import gate  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not (has_compiler() and torch.backends.mkldnn.is_available()), reason="needs a C++ compiler and oneDNN"
    ),
]


@pytest.fixture(params=["oneDNN", "own", "ATen"])
def faster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What every trial says is the fastest."""

    def seconds(run: Any, *_: Any, **__: Any) -> tuple[float, float]:
        own = "own" in run.__code__.co_freevars  # the second kernel of a trial
        return (1.0, 2.0) if request.param == ("own" if own else "oneDNN") else (2.0, 1.0)

    monkeypatch.setattr(gate, "_times", seconds)
    monkeypatch.setattr(gate, "SLOWER", 1.03)
    monkeypatch.setattr(gate, "_verdicts", {})
    monkeypatch.setattr(gate, "_read", lambda key: None)
    monkeypatch.setattr(gate, "_write", lambda key, verdict: None)
    monkeypatch.setattr(products, "FEWEST", 1)
    return str(request.param)


@pytest.fixture
def kept(faster: str) -> bool:
    """Whether oneDNN is the fastest."""
    return faster == "oneDNN"


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Any:
    torch._dynamo.reset()
    backend.reports.clear()
    return torch.compile(function, backend=backend.gnomon, dynamic=dynamic)


def test_products_of_a_training_step_are_eagers(faster: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 6, bias=False))
    x = torch.randn(9, 12, requires_grad=True)
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    fast = compiled(model)
    for _ in range(2):
        made = torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()])
        for a, b in zip(made, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-4)
    each = [one for report in backend.reports for one in report.products]
    assert len(each) == 6
    chosen = [{"own": one.own, "oneDNN": one.run, "ATen": one.aten}[faster] for one in each]
    assert [one.settled() for one in each] == chosen
    assert [one.own_kept for one in each] == [faster == "own"] * 6
    called = [value for report in backend.reports for value in report.function.__globals__.values()]
    assert not any(isinstance(value, products.TriedMatmul) for value in called)


@pytest.mark.skipif(torch.bfloat16 not in products.dtypes(), reason="oneDNN has no bfloat16 here")
def test_products_of_bfloat16(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(40, 24).bfloat16()
    x = torch.randn(9, 40).bfloat16().requires_grad_()
    wanted = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    fast = compiled(model)
    for _ in range(2):
        made = torch.autograd.grad(fast(x).square().sum(), [x, *model.parameters()])
        for a, b in zip(made, wanted, strict=True):
            assert a.dtype == torch.bfloat16 and (a - b).norm() <= 0.01 * b.norm()
    each = [one for report in backend.reports for one in report.products]
    assert [one.kept for one in each] == [kept] * 3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 0)])
def test_convolutions_are_eagers(kept: bool, bias: bool, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Conv2d(3, 8, 3, stride=stride, padding=padding, bias=bias).eval()
    x = torch.randn(1, 3, 11, 9)
    fast = compiled(model)
    with torch.no_grad():
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.testing.assert_close(fast(x.to(memory_format=layout)), model(x), rtol=2e-4, atol=1e-5)
    assert [one.kept for report in backend.reports for one in report.products][0] == kept


def test_a_relu_that_alone_reads_a_product_is_part_of_it(kept: bool) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(12, 20), torch.nn.Conv2d(2, 4, 3)

    def both(x: Any, y: Any) -> Any:
        once = second(y)
        return first(x).relu(), once.relu() + once

    x, y = torch.randn(5, 12), torch.randn(1, 2, 7, 7)
    fast = compiled(both)
    with torch.no_grad():
        for _ in range(3):
            for a, b in zip(fast(x, y), both(x, y), strict=True):
                torch.testing.assert_close(a, b, rtol=2e-4, atol=1e-5, equal_nan=True)
            x[1, 3], x[2, 4] = float("nan"), -float("inf")  # oneDNN's own ReLU would say 0
    names = sorted(one.name.split()[0] for one in backend.reports[0].products)
    assert names == ["convolution", "linear+relu"]  # what others read too stays as it is


def test_a_written_weight_is_seen(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 24).eval()
    x = torch.randn(5, 16)
    fast = compiled(model)
    with torch.no_grad():
        fast(x), fast(x)
        model.weight.data[3, 7] += 1.0  # past autograd's count of writes
        torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=1e-5)


def test_sizes_that_change_are_tried_each(kept: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 24).eval()
    fast = compiled(model, dynamic=True)
    with torch.no_grad():
        for rows in (3, 4, 9, 3, 70):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=1e-5)
    [one] = [one for report in backend.reports for one in report.products]
    assert sorted(rows for rows, *_ in (key[-4:] for key in one.trials)) == [2, 4, 7]
    assert one.settled() is None


def test_sums_of_other_lengths_are_tried_each(kept: bool) -> None:
    """m and n stay and k changes: the winner of a sum over 8 must not be taken for one over 1,000."""
    torch.manual_seed(0)
    fast = compiled(torch.mm)
    with torch.no_grad():
        for k in (8, 1000, 7, 900):
            x, w = torch.randn(16, k), torch.randn(k, 24)
            for one in (x, w):
                torch._dynamo.mark_dynamic(one, 1 if one is x else 0)
            torch.testing.assert_close(fast(x, w), x @ w, rtol=2e-4, atol=1e-3)
    [one] = [one for report in backend.reports for one in report.products]
    assert sorted(one.trials) == [(4, 3, 3, 5), (4, 10, 10, 5)]


def test_a_library_that_does_not_take_the_tensors_is_given_back(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr(products, "_linear", fails)
    model = torch.nn.Linear(16, 24).eval()
    x = torch.randn(5, 16)
    fast = compiled(model)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(fast(x), model(x))
    assert not backend.reports[0].products[0].kept


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(0, 40), st.integers(1, 70), st.integers(1, 90)),
    wide=st.sampled_from([0, 512]),
    strided=st.booleans(),
    turned=st.tuples(st.booleans(), st.booleans()),
    bias=st.booleans(),
    after=st.sampled_from(["none", "relu"]),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_any_linear_layer_of_ours_is_pytorchs(
    sizes: tuple[int, int, int],
    wide: int,
    strided: bool,
    turned: tuple[bool, bool],
    bias: bool,
    after: str,
    threads: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    (m, n, k), before = sizes, torch.get_num_threads()
    k = wide or k  # rows of 512 numbers are copied
    x = torch.randn(m, k + 3)[:, 3:] if strided else torch.randn(m, k)
    sides = [one.t().contiguous().t() if way else one for one, way in zip((x, torch.randn(n, k)), turned, strict=True)]
    given_ = (*([torch.randn(n)] if bias else []), *sides)
    wanted = products._aten_linear(*given_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "PARALLEL", 1)
        torch.set_num_threads(threads)
        try:
            made = linear.linear(*given_, after=after)
        finally:
            torch.set_num_threads(before)
    assert made is not None
    torch.testing.assert_close(made, wanted.relu() if after == "relu" else wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [33, 700, 704])  # panels of weights that are turned all at once, and one after another
@pytest.mark.parametrize("lies", [False, True])  # panels that the first block of rows makes on its way
def test_a_linear_layer_is_the_same_with_any_number_of_threads(
    n: int, lies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "PARALLEL", 1)
    b, before = torch.randn(n), torch.get_num_threads()
    w = torch.randn(512, n).t() if lies else torch.randn(n, 512)
    special = torch.randn(29, 512)
    special[1, 2], special[3, 4], special[5], special[28, 7] = float("inf"), float("nan"), -0.0, 1e-41
    for x in (torch.randn(37, 512), torch.randn(512, 37).t(), special):
        made = []
        rows, wide = torch.empty(linear.FEWEST_ROWS, 512), linear.tile_of_pixels(n)
        assert linear.form_of(x, w).tile is None and linear.form_of(rows[:, ::2], w).tile is None
        assert linear.form_of(rows, w).tile == (wide if wide and wide.vectors == 4 else None)
        form = linear.LinearForm(wide) if x.stride(1) == 1 else linear.PLAIN
        try:
            for threads in (1, 2):
                torch.set_num_threads(threads)
                made.append(linear.linear(b, x, w, form=form))
        finally:
            torch.set_num_threads(before)
        wanted = torch.nn.functional.linear(x, w, b)
        torch.testing.assert_close(made[0], wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(*made, rtol=0, atol=0, equal_nan=True)


def test_weights_that_no_cache_holds_are_tried_from_memory(faster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, as each is read once a call; the bias too, but what a layer makes for the next is in cache."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 24), torch.nn.Softmax(-1), torch.nn.Linear(24, 20)).eval()
    x, many = torch.randn(30, 20), 4 * (30 * 20 + 2 * 20 * 24 + 24 + 20)
    small = dataclasses.replace(products.this_machine(), l3_bytes=many - 1)
    for machine, cold in ((small, True), (dataclasses.replace(small, l3_bytes=many), False)):
        monkeypatch.setattr(products, "this_machine", lambda machine=machine: machine)
        fast = compiled(model)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=2e-4, atol=1e-5)
        first, second = backend.reports[0].products
        assert first.cold == (cold,) * 3 and second.cold == (cold, False, cold)


def test_a_kernel_has_the_tiles_of_all_blocks() -> None:
    tiles = [None, MatmulTile(7, 4), MatmulTile(2, 2), MatmulTile(1, 1)]
    default = {16: 14, 8: 6}.get(this_machine().isa.lanes, 4)
    for tile, m in itertools.product(tiles, range(1, 400)):
        rows, least = tile.rows if tile else default, linear.least_of(m, tile)
        blocks = -(-m // rows)
        dealt = {m * (i + 1) // blocks - m * i // blocks for i in range(blocks)}
        assert 1 <= least <= min(dealt) and max(dealt) <= rows


def test_a_kernel_refuses_smaller_blocks_than_it_has_tiles_for() -> None:
    least = linear.least_of(128)
    assert least > 1
    form = linear.LinearForm(least=least)
    for m in (0, 1, least - 1, least, least + 1, 29, 128):
        x, w = torch.randn(m, 70), torch.randn(33, 70)
        out = linear.linear(x, w, form=form)
        rows = {16: 14, 8: 6}.get(this_machine().isa.lanes, 4)
        assert (out is None) == (0 < m < -(-m // rows) * least)
        if out is not None:
            torch.testing.assert_close(out, x @ w.t(), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize(("lost_s", "used"), [(5e-6, True), (5e-5, False)])
def test_a_kernel_that_lost_to_its_call_by_python_is_called_by_cpp(
    monkeypatch: pytest.MonkeyPatch, lost_s: float, used: bool
) -> None:
    def seconds(run: Any, *_: Any, **__: Any) -> tuple[float, float]:
        return (1e-3 + lost_s, 1e-3) if "own" in run.__code__.co_freevars else (1e-3, 2e-3)

    monkeypatch.setattr(gate, "_times", seconds)
    monkeypatch.setattr(gate, "SLOWER", 1.0)
    monkeypatch.setattr(gate, "_verdicts", {})
    monkeypatch.setattr(gate, "_read", lambda key: None)
    monkeypatch.setattr(gate, "_write", lambda key, verdict: None)
    monkeypatch.setattr(products, "FEWEST", 1)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.ReLU(), torch.nn.Linear(20, 6)).eval()
    fast, x = compiled(model), torch.tensor([[float("nan")] * 12, *torch.randn(8, 12).tolist()])
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), equal_nan=True, rtol=2e-4, atol=1e-5)
    [report] = backend.reports
    assert [(one.own_kept, one.kept) for one in report.products] == [(used, not used)] * 2

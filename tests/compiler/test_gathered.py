"""Products of what is there in a call (rows of experts, positions of a padded batch, columns that are not zero) are
eager's, and what is not there changes nothing."""

from __future__ import annotations

import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.explain import explained, lines  # noqa: E402
from gnomon.compiler.kernels import gathered, live, products  # noqa: E402
from gnomon.compiler.tune import forms  # noqa: E402
from gnomon.errors import InputError  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]
EXACT = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@settings(max_examples=15, deadline=None)
@example(rows=7, groups=1, n=70, k=37, turned=False, dtype=torch.float32, seed=0)  # squares, and what is over
@example(rows=5, groups=1, n=33, k=37, turned=False, dtype=gathered.dtypes()[-1], seed=0)
@given(
    rows=st.integers(0, 40), groups=st.integers(1, 5), n=st.integers(1, 70), k=st.integers(1, 40),
    turned=st.booleans(), dtype=st.sampled_from(gathered.dtypes()), seed=st.integers(0, 99),
)  # fmt: skip
def test_rows_of_groups_by_their_places_against_one_by_one(
    rows: int, groups: int, n: int, k: int, turned: bool, dtype: Any, seed: int
) -> None:
    torch.manual_seed(seed)
    k = 2 * k if dtype == torch.bfloat16 else k
    x, w, bias = torch.randn(9, k).to(dtype), torch.randn(groups, n, k).to(dtype), torch.randn(groups, n).to(dtype)
    if turned and dtype == torch.float32:
        w = w.mT.contiguous().mT
    ends = torch.randint(0, rows + 1, (groups,)).sort()[0].to(torch.int32)
    ends[-1] = rows
    places, order = torch.randint(-9, 9, (rows,)), torch.randperm(rows + 3)
    to, spare = order[:rows], order[rows:]
    made = gathered.gathered_matmul(x, w, bias, ends=ends, rows=places, to=to, spare=spare, relu=True, into=rows + 3)
    wanted = torch.zeros(rows + 3, n, dtype=torch.float64)
    for row in range(rows):
        group = int((ends <= row).sum())
        wanted[to[row]] = torch.relu(w[group].double() @ x[places[row]].double() + bias[group].double())
    assert made is not None
    assert (made.double() - wanted).abs().max() <= EXACT[dtype] * max(float(wanted.max()), 1.0)


def test_places_and_ends_that_are_not_there_are_refused() -> None:
    x, w = torch.randn(4, 8), torch.randn(2, 3, 8)
    for ends, rows in (([2, 1], [0, 1]), ([1, 3], [0, 1]), ([1, 2], [0, 4]), ([1, 2], [0, -5])):
        given_ = {"ends": torch.tensor(ends, dtype=torch.int32), "rows": torch.tensor(rows)}
        assert gathered.gathered_matmul(x, w, **given_) is None


@pytest.mark.skipif(torch.bfloat16 not in gathered.dtypes(), reason="needs AVX-512 BF16")
def test_experts_take_their_rows_where_they_lie() -> None:
    torch.manual_seed(0)
    weights = torch.randn(4, 24, 16).bfloat16()

    def moe(x: Any, chosen: Any) -> Any:
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=4).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x[order // 2], weights.mT, offs=ends).relu()

    fast = torch.compile(moe, backend="gnomon", fullgraph=True, dynamic=False)
    x = torch.randn(6, 16).bfloat16()
    with torch.no_grad():
        for chosen in (torch.tensor([[0, 3]] * 6), torch.randint(0, 4, (6, 2)), torch.tensor([[1, 1]] * 6)):
            torch.testing.assert_close(fast(x, chosen), moe(x, chosen), rtol=1e-2, atol=1e-2)
    [call] = backend.reports[-1].experts
    assert call.gathers
    assert call.kept


class Encoder(nn.Module):
    def __init__(self, pooled: str) -> None:
        super().__init__()
        self.table, self.pooled = nn.Embedding(20, 32), pooled
        self.qkv, self.out, self.up, self.down = (nn.Linear(*s) for s in ((32, 96), (32, 32), (32, 64), (64, 32)))
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: Any, there: Any) -> Any:
        x = self.table(ids)
        q, k, v = (one.unflatten(-1, (2, 16)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        mask = there[:, None, None, :].bool().expand(-1, -1, ids.shape[1], -1)
        x = self.norm(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)))
        x = self.norm(x + self.down(F.relu(self.up(x))))
        if self.pooled == "mean of all":
            return x.mean(1)
        return (x * there[..., None]).sum(1) / there.sum(1, keepdim=True)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products are tried too, and another way is taken wherever it can be."""
    monkeypatch.setattr(products, "FEWEST", 1)
    monkeypatch.setattr(live, "FEWEST", 1)
    monkeypatch.setattr(forms, "GAIN", float("inf"))
    monkeypatch.setattr(forms.Forms, "_measured", _never_the_whole)


def _never_the_whole(self: Any, ways: Any, units: int, of: int, compared: Any) -> Any:
    self.unit_s = {way: 1.0 if way == forms.WHOLE else 1e-3 * n for n, way in enumerate(ways)}
    return ways[forms.WHOLE]()


@pytest.mark.parametrize("pooled", ["mean", "mean of all"])
def test_a_padded_batch_by_the_positions_that_are_there(
    small: None, pooled: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, ids = Encoder(pooled).eval(), torch.randint(0, 20, (3, 8))
    fast = torch.compile(model, backend="gnomon", options={"ragged": "there"})
    with torch.no_grad():
        for lengths in ([8, 8, 8], [8, 8, 8], [3, 8, 1], [2, 5, 8], [8, 8, 8]):
            there = (torch.arange(8) < torch.tensor(lengths)[:, None]).long()
            torch.testing.assert_close(fast(ids, there), model(ids, there), rtol=1e-4, atol=1e-5)
    ragged = backend.reports[-1].ragged
    assert ragged is not None
    assert len(ragged.products) == 4
    leaks = pooled == "mean of all"  # what is not there is part of the result
    assert ragged.proved is not leaks
    assert ("pool by the mask" in caplog.text) is leaks
    said = "\n".join(lines(explained(backend.reports[-1]), "graph"))
    assert ("matmul by the rows that are there: linear 24x96x32 (by place in" in said) is not leaks


def test_a_mask_that_is_not_there_leaves_products_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 8)
    assert backend.mask_of({"ragged": "nowhere"}, torch.fx.symbolic_trace(model)) is None
    assert "no input of a graph is named nowhere" in caplog.text  # a name of this test's own: it is said once a process
    for wrong in ({"ragged": 3}, {"ragged": "a mask"}, {"frozen": "yes"}):
        with pytest.raises(InputError, match="options="):
            backend.gnomon(torch.fx.symbolic_trace(model), [], options=wrong)


@pytest.mark.parametrize(("linear", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_columns_that_a_relu_left_zero_are_not_read(small: None, linear: bool, dtype: Any) -> None:
    torch.manual_seed(0)
    first, second, bias = nn.Linear(24, 200).to(dtype), nn.Linear(200, 83).to(dtype), torch.randn(83).to(dtype)
    turned = second.weight.detach().t().contiguous()

    def gated(x: Any) -> Any:
        hidden = F.relu(first(x)) ** 2
        return second(hidden) if linear else hidden @ turned + bias

    fast = torch.compile(gated, backend="gnomon", options={"frozen": True}, dynamic=False)
    with torch.no_grad():
        for rows in (1, 1, 1, 5, 5, 5):
            x = torch.randn(rows, 24).to(dtype)
            torch.testing.assert_close(fast(x), gated(x), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    said = "\n".join(line for one in backend.reports[-2:] for line in lines(explained(one), "graph"))
    assert "matmul by the columns that are there" in said
    assert "columns in" in said


def test_what_is_never_zero_is_seldom_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, called = list[int](), list[Any]()
    monkeypatch.setattr(live.LiveMatmul, "_weight", lambda self, w: counted.append(len(called)) or w.t())
    product = products.TriedMatmul("linear 4x4", lambda *a: F.linear(*a), lambda *a: F.linear(*a), True)
    product.trials[()] = types.SimpleNamespace(kept=False, second_kept=False)  # type: ignore[assignment]
    one, x, w = live.LiveMatmul(product, frozen=True), torch.ones(1, 4), torch.randn(4, 4)
    while len(called) < 200:
        called.append(one(x, w))
        assert torch.equal(called[-1], called[0])
    assert counted == [0, 2, 5, 10, 19, 36, 69, 134, 199]


def test_the_fastest_way_is_chosen_by_what_is_there() -> None:
    one, taken = forms.Forms(), []
    one.unit_s = {forms.WHOLE: 1.0, "some": 3.0}

    def way(name: str) -> Any:
        return lambda: taken.append(name) or torch.zeros(1)

    for there in (10, 29, 30, 31, 33, 34, 90):
        one.run({forms.WHOLE: way(forms.WHOLE), "some": way("some")}, there, there, 100, lambda out: out)
    assert taken == ["some"] * 3 + [forms.WHOLE] * 4  # 3 x 30 is within 0.9 of 100
    assert one.why()["taken"] == {"some": 3, forms.WHOLE: 4}


def test_a_way_that_is_wrong_is_never_taken(caplog: pytest.LogCaptureFixture) -> None:
    one = forms.Forms()
    ways = {forms.WHOLE: lambda: torch.ones(3), "wrong": lambda: torch.zeros(3), "none": lambda: None}
    for _ in range(2):
        assert torch.equal(one.run(ways, 1, 1, 100, lambda out: out), torch.ones(3))
    assert set(one.unit_s) == {forms.WHOLE}
    assert "differs from the whole one" in caplog.text
    assert one.why()["wrong"]["none"] == "it does not run"

"""Attention by kernels of our own: forward and gradients against doubles, of any sizes and masks."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the compiler's tests need it")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from gnomon.compiler import backend  # noqa: E402
from gnomon.compiler.build import has_compiler  # noqa: E402
from gnomon.compiler.kernels import attention  # noqa: E402
from gnomon.compiler.tune.gate import alike, wrong_on_made  # noqa: E402

FURTHER = 1.5
"""Times ATen's own distance from doubles that a result may be away from them, and a rounding beside it."""
ROUNDING = {torch.bfloat16: 4e-3, torch.float32: 5e-6}
DTYPES = attention.dtypes()
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler"),
    pytest.mark.usefixtures("fresh"),
]
needs = pytest.mark.skipif(torch.bfloat16 not in DTYPES, reason="needs AVX-512 BF16")


def drawn(shape: tuple[int, ...], layout: str, dtype: Any) -> Any:
    batch, heads, length, depth = shape
    if layout == "plain":
        return torch.randn(shape).to(dtype)
    if layout == "heads inside":
        return torch.randn(batch, length, heads, depth).to(dtype).transpose(1, 2)
    return torch.randn(batch, length, heads, 3 * depth).to(dtype).transpose(1, 2)[..., depth : 2 * depth]


def mask_of(kind: str, shape: tuple[int, int, int, int], dtype: Any) -> Any:
    batch, heads, queries, keys = shape
    if kind == "padding":  # which of a sample's keys are there, at least the first
        there = torch.rand(batch, 1, 1, keys) < 0.7
        there[..., 0] = True
        return torch.zeros(there.shape).masked_fill_(~there, -torch.inf).expand(shape)
    if kind == "rows":  # some of them whole
        gone = torch.rand(queries, 1) < 0.3
        return torch.randn(queries, keys).masked_fill_(gone, -torch.inf)
    return {"none": None, "each": torch.randn(shape).to(dtype), "turned": torch.randn(1, heads, keys, queries).mT}[kind]


def near(made: Any, aten: Any, exact: Any) -> None:
    """Each result about as near to doubles as ATen's, in all and at the worst place, laid out as ATen's."""
    for ours, theirs, wanted in zip(made, aten, exact, strict=True):
        assert alike(ours, theirs)
        for size in (torch.linalg.vector_norm, lambda x: x.abs().max()):
            apart, limit = (float(size(one.double() - wanted)) for one in (ours, theirs))
            assert apart <= FURTHER * limit + ROUNDING[ours.dtype] * float(size(wanted)) + 1e-5


@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 150), st.integers(1, 150)),
    depth=st.sampled_from(attention.DEPTHS),
    causal=st.booleans(),
    mask=st.sampled_from(("none", "padding", "rows", "each", "turned")),
    layouts=st.tuples(*[st.sampled_from(("plain", "heads inside", "part"))] * 4),
    scale=st.sampled_from((None, 0.3)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_attention_and_its_gradients_are_as_near_to_doubles_as_atens(
    sizes: tuple[int, int, int, int],
    depth: int,
    causal: bool,
    mask: str,
    layouts: tuple[str, ...],
    scale: float | None,
    dtype: Any,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    batch, heads, queries, keys = sizes
    lengths = (queries, keys, keys, queries)
    q, k, v, g = (drawn((batch, heads, n, depth), layout, dtype) for n, layout in zip(lengths, layouts, strict=True))
    added = [] if causal or mask == "none" else [mask_of(mask, sizes, dtype)]
    given_ = (q, k, v, *added)
    forward, backward = (
        kind(causal, scale, True, dtype) for kind in (attention.Attention, attention.AttentionBackward)
    )
    exact, plain, made = forward.aten(*[one.double() for one in given_]), forward.aten(*given_), forward.run(*given_)
    near(made, plain, exact)
    wide = [one.double() for one in (g, q, k, v)]
    wanted = backward.aten(*wide, *exact, *[one.double() for one in added])
    near(backward.run(g, q, k, v, *made, *added), backward.aten(g, q, k, v, *plain, *added), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_are_the_same_with_any_number_of_threads(dtype: Any) -> None:
    q, k, v, g = (drawn((2, 3, 130, 64), "heads inside", dtype) for _ in range(4))
    forward, backward = (
        attention.Attention(True, None, True, dtype),
        attention.AttentionBackward(True, None, True, dtype),
    )
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = forward.run(q, k, v)
        results.append([*out, *backward.run(g, q, k, v, *out)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_number_stays_none(dtype: Any) -> None:
    q, k, v, g = (drawn((1, 2, 40, 16), "plain", dtype) for _ in range(4))
    q[0, 0, 7, 3] = torch.nan
    forward, backward = (
        attention.Attention(False, None, True, dtype),
        attention.AttentionBackward(False, None, True, dtype),
    )
    made, wanted = forward.run(q, k, v), forward.aten(q, k, v)
    made, wanted = ([*out, *call(g, q, k, v, *out)] for out, call in ((made, backward.run), (wanted, backward.aten)))
    assert wanted[0].isnan().any()
    for ours, theirs in zip(made, wanted, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_special_numbers_are_atens(dtype: Any, causal: bool) -> None:
    """Infinities and NaN among any of the inputs, of keys too that a causal row does not see; sums that overflow."""
    q, k, v, g = (torch.randn(2, 70, 3, 32).to(dtype).transpose(1, 2) for _ in range(4))
    out, sums = attention.FORWARD(q, k, v, 0.0, causal)
    call = attention.AttentionBackward(causal, None, True, dtype)
    assert wrong_on_made(call.run, call.aten, (g, q, k, v, out, sums), False) == ""
    for which in (0, 2, 3):
        for number in (math.inf, math.nan, 1e20):
            given = [one.clone() for one in (g, q, k, v, out, sums)]
            given[which][0, 1, 69, 5] = number
            for ours, theirs in zip(call.run(*given), call.aten(*given), strict=True):
                assert torch.equal(ours.isfinite(), theirs.isfinite())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_however_large_have_a_largest(dtype: Any) -> None:
    """Its probability is 1, not what rounding leaves of a difference of numbers of 1e20."""
    q, k, v, g = (drawn((1, 2, 40, 16), "plain", dtype) for _ in range(4))
    q[0, 0, 7, 3], q[0, 1] = 1e20, q[0, 1] * 1e8
    forward, backward = (
        attention.Attention(False, None, True, dtype),
        attention.AttentionBackward(False, None, True, dtype),
    )
    made, wanted = forward.run(q, k, v), forward.aten(q, k, v)
    torch.testing.assert_close(made[0], wanted[0])
    for ours, theirs in zip(backward.run(g, q, k, v, *made), backward.aten(g, q, k, v, *wanted), strict=True):
        assert torch.equal(ours.isfinite(), theirs.isfinite())


class Layer(nn.Module):
    """A layer as BERT has it, with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out, self.norm = nn.Linear(64, 192), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Any, there: Any) -> Any:
        q, k, v = (one.unflatten(-1, (4, 16)).transpose(1, 2) for one in self.into(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None])
        return self.norm(x + self.out(mixed.transpose(1, 2).flatten(2)))


def trained(layer: Any, lengths: tuple[int, ...], dtype: Any) -> list[Any]:
    """Outputs and gradients of some batches, and a layer that learned from them."""
    found = []
    for length in lengths:
        torch.manual_seed(length)
        x = torch.randn(3, length, 64).to(dtype).requires_grad_()
        out = layer(x, torch.arange(length) < torch.tensor([length, 5, 9])[:, None])
        (out * torch.randn(out.shape)).sum().backward()
        found += [out.detach(), x.grad]
    return [*found, *[p.grad for p in layer.parameters()]]


@pytest.mark.parametrize("dtype", DTYPES[-1:])
def test_a_layer_learns_as_in_eager_whatever_the_length(dtype: Any) -> None:
    layers = [Layer().to(dtype) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    backend.reports.clear()
    fast = torch.compile(layers[1], backend=backend.gnomon, dynamic=True)
    lengths = (12, 12, 33, 70)
    for ours, wanted in zip(trained(fast, lengths, dtype), trained(layers[0], lengths, dtype), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=5e-2, atol=3e-2 * float(wanted.abs().max()))
    made = [call for graph in backend.reports for call in graph.attention]
    assert [type(call) for call in made] == [attention.Attention, attention.AttentionBackward]
    assert all(call.kept and "wrong" not in call.verdict for call in made)


def attended(q: Any, p: float) -> Any:
    return F.scaled_dot_product_attention(q, q, q, dropout_p=p)


@pytest.mark.parametrize(
    ("known", "dtype", "depth", "p", "taken"),
    [
        (DTYPES, torch.float32, 16, 0.0, 1),
        pytest.param(DTYPES, torch.bfloat16, 16, 0.0, 1, marks=needs),
        (DTYPES, torch.float16, 16, 0.0, 0),
        (DTYPES, torch.float32, 24, 0.0, 0),
        (DTYPES, torch.float32, 16, 0.5, 0),
        ((torch.float32,), torch.bfloat16, 16, 0.0, 0),  # another processor
    ],
)
def test_what_the_kernels_do_not_know_stays_atens(
    known: Any, dtype: Any, depth: int, p: float, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "dtypes", lambda: known)
    backend.reports.clear()
    q, fast = torch.randn(2, 2, 8, depth).to(dtype), torch.compile(attended, backend=backend.gnomon)
    with torch.no_grad():
        made = fast(q, p)
    assert [len(graph.attention) for graph in backend.reports] == [taken]
    if not p:
        torch.testing.assert_close(made, attended(q, p), rtol=2e-2, atol=2e-2)


class Eager(nn.Module):
    """Attention as eager models write it."""

    def __init__(self, scale: str) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        turned = k.transpose(-1, -2)
        scores = {
            "after": lambda: q @ turned * 0.25,
            "divided": lambda: (q @ turned) / 4.0,
            "before": lambda: (q * 0.25) @ turned,
        }[self.scale]()
        scores = scores if mask is None else scores + mask
        return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize(
    ("scale", "masks"),
    [("after", "none"), ("divided", "(B, 1, S, T)"), ("before", "(T,)"), ("after", "rows of -inf")],
)
def test_two_products_and_a_softmax_are_one_kernel(scale: str, masks: str) -> None:
    q, k, v = (torch.randn(2, size, 3, 16).transpose(1, 2) for size in (5, 70, 70))
    mask = {"none": None, "(B, 1, S, T)": torch.randn(2, 1, 5, 70), "(T,)": torch.randn(70)}.get(masks)
    if masks == "rows of -inf":
        mask = torch.zeros(1, 1, 5, 70).masked_fill(torch.rand(1, 1, 5, 70) < 0.5, -math.inf)
        mask[:, :, 2] = -math.inf  # softmax of nothing is not a number
    model = Eager(scale)
    backend.reports.clear()
    fast = torch.compile(model, backend="gnomon")
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(fast(q, k, v, mask), model(q, k, v, mask), rtol=1e-4, atol=1e-5, equal_nan=True)
    [made] = [one for report in backend.reports for one in report.attention]
    assert made.kept


def test_heads_that_are_folded_into_rows_stay_apart() -> None:
    """Multi-query attention by one product: (batch, heads x S, T) scores, of which a view is (batch, heads, S, T)."""

    def folded(q: Any, k: Any, v: Any) -> Any:
        p = torch.softmax(torch.bmm(q, k).view(2, 4, 8, 9), -1)
        return torch.bmm(p.view(2, 32, 9), v)

    q, k, v = torch.randn(2, 32, 16), torch.randn(2, 16, 9), torch.randn(2, 9, 16)
    backend.reports.clear()
    fast = torch.compile(folded, backend="gnomon")
    with torch.no_grad():
        torch.testing.assert_close(fast(q, k, v), folded(q, k, v), rtol=1e-4, atol=1e-5)
    assert not [one for report in backend.reports for one in report.attention]


def test_probabilities_that_somebody_reads_stay_apart() -> None:
    def both(q: Any, k: Any, v: Any) -> Any:
        p = torch.softmax(q @ k.transpose(-1, -2), -1)
        return p, p @ v

    q, k, v = (torch.randn(2, 3, 9, 16, requires_grad=True) for _ in range(3))
    for function, grad in ((both, False), (lambda q, k, v: both(q, k, v)[1], True)):
        backend.reports.clear()
        torch._dynamo.reset()
        fast = torch.compile(function, backend="gnomon")
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                torch.testing.assert_close(fast(q, k, v), function(q, k, v), rtol=1e-4, atol=1e-5)
        assert not [one for report in backend.reports for one in report.attention]

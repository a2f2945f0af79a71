"""The kernel of latent attention against attention over keys and values of every head in float64, made of the same
numbers: odd pages and ranks, decodes beside pieces of prompts, sequences of no tokens and of one, huge scores."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the engine's tests need it")

from gnomon.runtime.ops.paged import Visibility  # noqa: E402
from gnomon.serve.latent import LatentPages, kernel  # noqa: E402
from gnomon.serve.rows import Part, TokenRows  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [
    # (heads, N, P, R, V, tokens of a block), (new tokens, tokens before them) of each sequence
    ((3, 5, 3, 7, 9, 4), [(1, 0), (1, 17), (0, 0), (40, 3)]),
    ((16, 16, 8, 40, 16, 16), [(1, 300), (1, 127), (1, 128)]),
    ((1, 33, 2, 21, 1, 5), [(70, 100), (1, 1), (0, 9)]),
    ((5, 8, 4, 100, 12, 16), [(13, 129), (150, 0), (1, 31)]),
    ((210, 4, 2, 6, 4, 16), [(2, 5), (1, 40)]),  # more heads than rows that meet a span at once
]


def whole_attention(q, kept, weight, nope, scale):  # type: ignore[no-untyped-def]
    """(tokens, H, V) of a sequence's last queries, in float64, with keys and values of every head."""
    rank = weight.shape[2]
    both = torch.einsum("lr,hwr->lhw", kept[:, :rank], weight)
    keys = torch.cat([both[..., :nope], kept[:, None, rank:].expand(-1, len(weight), -1)], dim=-1)
    score = torch.einsum("qhd,lhd->hql", q, keys) * scale
    hidden = torch.ones(score.shape[1:], dtype=torch.bool).triu(len(kept) - len(q) + 1)
    return torch.einsum("hql,lhv->qhv", score.masked_fill(hidden, -torch.inf).softmax(-1), both[..., nope:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("large", [1.0, 3e4])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernel_is_attention_over_all_heads(dtype: torch.dtype, large: float, threads: int) -> None:
    """large: what queries are multiplied by, so that a softmax has one share of 1 and scores of millions. What no token
    has written is NaN. bfloat16 rounds what lies between matmuls, so that its error is of the largest value's size."""
    assert kernel(dtype) is not None
    for seed, ((heads, nope, rope, rank, v_dim, size), sequences) in enumerate(SHAPES):
        rng = torch.Generator().manual_seed(seed)

        def drawn(*shape: int, by: float = 1.0, rng: torch.Generator = rng) -> torch.Tensor:
            return (torch.randn(shape, generator=rng) * by).to(dtype)

        weight = drawn(heads, nope + v_dim, rank, by=rank**-0.5)
        pages = LatentPages(200, size, weight, (nope, rope), Visibility(scale=(nope + rope) ** -0.5))
        assert pages.call is not None
        pages.pool.fill_(torch.nan)
        order = random.Random(seed).sample(range(200), 200)
        kept = [drawn(new + before, rank + rope) for new, before in sequences]
        tables = [[order.pop() for _ in range(-(-len(one) // size))] for one in kept]
        for one, table, (_, before) in zip(kept, tables, sequences, strict=True):
            for at in range(before):
                pages.pool[table[at // size], at % size] = one[at]
        parts = [Part(n, before, [0] * new, True, 1) for n, (new, before) in enumerate(sequences)]
        rows = TokenRows.of(parts, [tables], [-1] * len(parts))
        rows.threads = threads
        q = drawn(sum(new for new, _ in sequences), heads, nope + rope, by=large)
        new = torch.cat([one[before:] for one, (_, before) in zip(kept, sequences, strict=True)])
        made = pages.attend(rows, q, new[:, :rank], new[:, rank:])
        begin = 0
        for one, (count, _) in zip(kept, sequences, strict=True):
            if count:
                own = q[begin : begin + count].double()
                wanted = whole_attention(own, one.double(), weight.double(), nope, pages.seen.scale)
                error = (made[begin : begin + count].double() - wanted).abs()
                if dtype == torch.float32:
                    assert error.max() < (1e-5 if large == 1.0 else 2e-2), (seed, float(error.max()))
                elif large == 1.0:
                    assert error.max() < 4e-2, (seed, float(error.max()))
                else:  # a rounded score may choose another key: what comes out is a mean of the sequence's values still
                    most = torch.einsum("lr,hvr->lhv", one[:, :rank].double(), weight[:, nope:].double()).abs().amax()
                    assert made[begin : begin + count].abs().max() <= 1.02 * most
            begin += count


@pytest.mark.parametrize("queries", [1, 200])
def test_torchs_form_gives_the_same(queries: int) -> None:
    """Absorbed and made again, in float32: what runs where no kernel compiles."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn((4, 8 + 8, 24), generator=rng)
    both = [LatentPages(40, 16, weight, (8, 4), Visibility(scale=0.3)) for _ in range(2)]
    assert (queries > both[0].most_absorbed) == (queries == 200)
    both[1].call = None
    rows = TokenRows.of([Part(0, 0, [0] * queries, True, 1)], [[list(range(1, 20))]], [-1])
    q, latent, rotated = (torch.randn((queries, *shape), generator=rng) for shape in ((4, 12), (24,), (4,)))
    one, other = (pages.attend(rows, q, latent, rotated) for pages in both)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both[0].pool, both[1].pool, rtol=0, atol=0)

"""Shardings and redistribution by hand, and as invariants: arriving where asked, and what an all-reduce is made of.

Tensors are (batch 2, seq 8, hidden 16) in bf16: 512 bytes whole.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import PlanError
from gnomon.graph import BF16, Dim, Tensor
from gnomon.sharding import Collective, Scene, Sharding, local_size, redistribute

BATCH, SEQ, HIDDEN = Dim(name="batch", size=2), Dim(name="seq", size=8), Dim(name="hidden", size=16)
X = Tensor(name="x", dims=(BATCH, SEQ, HIDDEN))
SCENE = Scene(axis_sizes={"tp": 4, "cp": 2}, sizes={}, dtypes=BF16)
WHOLE = Sharding()
BY_SEQ = Sharding(shards=(("tp", "seq"),))
BY_HIDDEN = Sharding(shards=(("tp", "hidden"),))
PARTIAL = Sharding(partial=("tp",))


def moves(source: Sharding, target: Sharding) -> list[tuple[str, str, object]]:
    result = redistribute(X, source, target, SCENE, path="op")
    return [(collective.kind, collective.axis, collective.bytes) for collective in result]


@pytest.mark.parametrize(
    ("source", "target", "wanted"),
    [
        (WHOLE, WHOLE, []),
        (PARTIAL, WHOLE, [("all_reduce", "tp", 512)]),
        (PARTIAL, BY_SEQ, [("reduce_scatter", "tp", 512)]),
        (BY_SEQ, WHOLE, [("all_gather", "tp", 512)]),
        (BY_SEQ, BY_HIDDEN, [("all_to_all", "tp", 128)]),
        (WHOLE, BY_SEQ, []),
        (WHOLE, PARTIAL, []),
    ],
)
def test_redistribution_on_one_axis(source: Sharding, target: Sharding, wanted: list[object]) -> None:
    assert moves(source, target) == wanted


def test_nested_axes_gather_the_inner_one_first() -> None:
    nested = Sharding(shards=(("cp", "seq"), ("tp", "seq")))
    # 512 bytes over 8 ranks are 64; tp gathers to 256, then cp to 512.
    assert SCENE.bytes(X, nested) == 64
    assert moves(nested, WHOLE) == [("all_gather", "tp", 256), ("all_gather", "cp", 512)]
    assert moves(nested, Sharding(shards=(("cp", "seq"),))) == [("all_gather", "tp", 256)]


def test_sums_come_before_gathers() -> None:
    source = Sharding(shards=(("cp", "seq"),), partial=("tp",))
    assert moves(source, WHOLE) == [("all_reduce", "tp", 256), ("all_gather", "cp", 512)]


def test_divided_tensors_do_not_become_terms_of_a_sum() -> None:
    with pytest.raises(PlanError, match="x is divided over tp and cannot become partial sums"):
        moves(BY_SEQ, PARTIAL)
    with pytest.raises(PlanError, match="uses an axis twice"):
        Sharding(shards=(("tp", "seq"), ("tp", "hidden")))


def test_local_sizes() -> None:
    heads = Dim(name="kv_heads", size=2)
    assert local_size(heads, Sharding(shards=(("tp", "kv_heads"),)), {"tp": 4}, {}) == 1
    assert local_size(Dim(name="vocab", size=50257), Sharding(shards=(("tp", "vocab"),)), {"tp": 4}, {}) == 12565
    many = local_size(Dim(name="seq"), BY_SEQ, {"tp": 4}, {"seq": np.array([1024, 4096])})
    assert isinstance(many, np.ndarray)
    assert many.tolist() == [256, 1024]


def test_text() -> None:
    assert str(Sharding(shards=(("cp", "seq"),), partial=("tp",))) == "seq/cp, partial(tp)"
    assert str(WHOLE) == "replicated"


def sent(kind: str, size: int, ranks: int) -> object:
    return Collective(  # type: ignore[arg-type]
        kind=kind, axis="tp", ranks=ranks, bytes=size, phase="forward", path="op", tensor="x"
    ).sent_bytes


def test_bytes_sent() -> None:
    assert sent("all_reduce", 512, 4) == 768  # 2 · 3/4
    assert sent("all_gather", 512, 4) == 384
    assert sent("all_to_all", 128, 4) == 96


@given(st.integers(1, 1 << 20), st.integers(2, 64))
def test_an_all_reduce_is_a_scatter_and_a_gather(units: int, ranks: int) -> None:
    size = units * ranks
    assert sent("all_reduce", size, ranks) == 2 * sent("all_gather", size, ranks)  # type: ignore[operator]
    assert sent("reduce_scatter", size, ranks) == sent("all_gather", size, ranks)


DIMS = st.sampled_from((None, "batch", "seq", "hidden"))


@st.composite
def shardings(draw: st.DrawFn, partial: bool) -> Sharding:
    shards, sums = [], []
    for axis in draw(st.permutations(("tp", "cp"))):
        dim = draw(DIMS)
        if dim is not None:
            shards.append((axis, dim))
        elif partial and draw(st.booleans()):
            sums.append(axis)
    return Sharding(shards=tuple(shards), partial=tuple(sums))


@given(shardings(partial=True), shardings(partial=False))
def test_nothing_larger_than_the_whole_travels_and_staying_is_free(source: Sharding, target: Sharding) -> None:
    assert moves(source, source) == []
    for kind, axis, size in moves(source, target):
        assert isinstance(size, int)
        assert 0 < size <= 512
        assert (axis in source.partial) == (kind in ("all_reduce", "reduce_scatter"))

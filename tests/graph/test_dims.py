"""Dims and sizes: products, symbolic sizes, overrides, arrays of shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import GraphError
from gnomon.graph import BF16, Dim, Dtypes, Tensor, nbytes, numel, product, size_of

HEADS = Dim(name="heads", size=8)
HEAD_DIM = Dim(name="head_dim", size=64)
SEQ = Dim(name="seq")


def test_a_product_dim_follows_its_factors() -> None:
    hidden = product("hidden", HEADS, HEAD_DIM)
    assert size_of(hidden, {}) == 512
    assert size_of(hidden, {"heads": 2}) == 128  # splitting the heads four ways splits the product
    assert size_of(hidden, {"hidden": 100}) == 100
    assert hidden.atoms == (HEADS, HEAD_DIM)
    assert str(hidden) == "hidden=(heads=8×head_dim=64)"


def test_nested_products_and_repeated_factors() -> None:
    outer = product("all", product("hidden", HEADS, HEAD_DIM), SEQ)
    assert outer.atoms == (HEADS, HEAD_DIM, SEQ)
    with pytest.raises(GraphError, match="has a factor twice"):
        product("square", HEADS, HEADS)


def test_the_workload_gives_symbolic_sizes() -> None:
    with pytest.raises(GraphError, match=r"dim 'seq' has no size: give sizes\['seq'\]"):
        size_of(SEQ, {})
    assert size_of(SEQ, {"seq": 4096}) == 4096


def test_a_second_run_over_an_axis_takes_its_size_unless_given() -> None:
    kv = Dim(name="kv_seq", same_as="seq")
    assert size_of(kv, {"seq": 10}) == 10
    assert size_of(kv, {"seq": 10, "kv_seq": 30}) == 30
    with pytest.raises(GraphError, match="kv_seq"):
        size_of(kv, {})


@pytest.mark.parametrize("bad", [0, -1, True, 1.5])
def test_a_size_is_a_positive_integer(bad: int) -> None:
    with pytest.raises(GraphError, match="size of dim 'seq'"):
        size_of(SEQ, {"seq": bad})


def test_arrays_of_sizes_give_arrays() -> None:
    x = numel((SEQ, HEADS), {"seq": np.array([1, 2, 3])})
    assert isinstance(x, np.ndarray) and x.tolist() == [8, 16, 24]
    with pytest.raises(GraphError, match="under 1"):
        size_of(SEQ, {"seq": np.array([4, 0])})


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=5))
def test_arrays_agree_with_integers(sizes: list[int]) -> None:
    dims = (SEQ, HEADS, HEAD_DIM)
    many = numel(dims, {"seq": np.array(sizes)})
    assert isinstance(many, np.ndarray)
    assert many.tolist() == [numel(dims, {"seq": s}) for s in sizes]


def test_bytes_by_dtype() -> None:
    def size(dtype: str, dtypes: Dtypes = BF16) -> object:
        return nbytes(Tensor(name="t", dims=(Dim(name="n", size=3),), dtype=dtype), {}, dtypes)

    assert [size(d) for d in ("compute", "fp32", "int64", "bool", "fp8_e4m3")] == [6, 12, 24, 3, 3]
    assert size("fp4_e2m1") == 2  # 12 bits fill two bytes
    assert size("compute", Dtypes(compute="fp32", param="bf16")) == 12


def test_unknown_dtypes_are_named() -> None:
    with pytest.raises(GraphError, match="did you mean 'bf16'"):
        Dtypes(compute="bf15", param="bf16")
    with pytest.raises(GraphError, match="unknown dtype 'half'"):
        Tensor(name="t", dims=(), dtype="half")


def test_a_tensor_has_no_dim_twice() -> None:
    with pytest.raises(GraphError, match="has a dim twice"):
        Tensor(name="w", dims=(product("hidden", HEADS, HEAD_DIM), HEADS))

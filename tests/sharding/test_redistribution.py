"""Redistribution carried out on numbers: every rank's array, moved by the collectives, ends as the target sharding
says.

Four ranks (tp 2 × cp 2) hold parts, copies or terms of one array; collectives are done literally, and their bytes are
compared with the arrays that they touch.
"""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gnomon.graph import BF16, Dim, Tensor
from gnomon.sharding import Collective, Scene, Sharding, redistribute

NAMES = ("batch", "seq", "hidden")
X = Tensor(name="x", dims=tuple(Dim(name=name, size=4) for name in NAMES))
AXES = ("tp", "cp")
SCENE = Scene(axis_sizes={"tp": 2, "cp": 2}, sizes={}, dtypes=BF16)
RANKS = tuple(product(range(2), range(2)))
Arrays = dict[tuple[int, ...], NDArray[np.float64]]
WHOLE = np.arange(64, dtype=np.float64).reshape(4, 4, 4)


def part(array: NDArray[np.float64], dim: str, index: int) -> NDArray[np.float64]:
    return np.split(array, 2, axis=NAMES.index(dim))[index]


def laid_out(sharding: Sharding) -> Arrays:
    """Each rank's array; terms of a sum are different on each rank and add up."""
    arrays = {}
    for rank in RANKS:
        array = WHOLE
        for axis, dim in sharding.shards:
            array = part(array, dim, rank[AXES.index(axis)])
        for axis in sharding.partial:
            array = array * (0.25 if rank[AXES.index(axis)] == 0 else 0.75)
        arrays[rank] = array
    return arrays


def peers(rank: tuple[int, ...], axis: str) -> list[tuple[int, ...]]:
    place = AXES.index(axis)
    return [(*rank[:place], i, *rank[place + 1 :]) for i in range(2)]


def carried_out(arrays: Arrays, now: Sharding, target: Sharding, move: Collective) -> tuple[Arrays, Sharding]:
    """The arrays after one collective, done literally."""
    axis, old, new = move.axis, now.dim_of(move.axis), target.dim_of(move.axis)
    result = {}
    for rank in RANKS:
        group = [arrays[peer] for peer in peers(rank, axis)]
        mine = rank[AXES.index(axis)]
        if move.kind in ("all_reduce", "reduce_scatter"):
            result[rank] = group[0] + group[1]
            assert move.bytes == 2 * group[0].size
        elif move.kind == "all_gather":
            assert old is not None
            result[rank] = np.concatenate(group, axis=NAMES.index(old))
            assert move.bytes == 2 * result[rank].size
        else:
            assert old is not None and new is not None
            result[rank] = np.concatenate([part(array, new, mine) for array in group], axis=NAMES.index(old))
            assert move.bytes == 2 * arrays[rank].size
        if move.kind == "reduce_scatter":
            assert new is not None
            result[rank] = part(result[rank], new, mine)
    stays = move.kind in ("all_reduce", "all_gather")
    return result, now.without(axis) if stays or new is None else now.with_shard(axis, new)


@st.composite
def shardings(draw: st.DrawFn, partial: bool) -> Sharding:
    shards, sums = [], []
    for axis in draw(st.permutations(AXES)):
        where = draw(st.sampled_from((*NAMES, "whole", "partial") if partial else (*NAMES, "whole")))
        if where in NAMES:
            shards.append((axis, where))
        elif where == "partial":
            sums.append(axis)
    return Sharding(shards=tuple(shards), partial=tuple(sums))


@given(shardings(partial=True), shardings(partial=False))
def test_collectives_bring_the_numbers_where_they_belong(source: Sharding, target: Sharding) -> None:
    moves = redistribute(X, source, target, SCENE, path="op")
    arrays, now = laid_out(source), source
    for move in moves:
        arrays, now = carried_out(arrays, now, target, move)
    assert now.partial == ()
    for axis, dim in target.shards:
        if now.dim_of(axis) is None:
            now = now.with_shard(axis, dim)
            arrays = {rank: part(array, dim, rank[AXES.index(axis)]) for rank, array in arrays.items()}
    for rank, array in laid_out(target).items():
        np.testing.assert_allclose(arrays[rank], array)


def test_an_outer_axis_leaves_after_the_inner_one() -> None:
    # (cp, tp) on seq: without cp, rank tp must end with a contiguous half, so tp's parts are gathered too.
    nested = Sharding(shards=(("cp", "seq"), ("tp", "seq")))
    moves = redistribute(X, nested, Sharding(shards=(("tp", "seq"),)), SCENE, path="op")
    assert [(move.kind, move.axis, move.bytes) for move in moves] == [
        ("all_gather", "tp", 64),
        ("all_gather", "cp", 128),
    ]

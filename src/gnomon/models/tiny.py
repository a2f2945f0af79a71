"""A model in small: the same blocks, ops and attributes with few layers and short dims, for checks that must be quick.

`tiny(graph, tp, ep, layers, positions)` returns the Graph; dims that axes divide stay divisible by them. Widths that
are sums of others (of latent attention) shrink by one factor, so that they stay sums. Leaves out images, whose dims it
does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import gcd

from gnomon.graph import Block, Call, Dim, Graph, Op, Tensor, attrs

HIDDEN, FFN, VOCAB, WINDOW, CHUNK = 16, 12, 48, 5, 8
"""Sizes of a tiny model; those that tp divides are multiples of it."""
_WIDTHS = ("head_dim", "v_head_dim", "rope_dim", "qk_nope_dim", "qk_head_dim", "nope_and_v", "q_rank", "kv_rank")
_SUMMED = (*_WIDTHS, "kv_rank_and_rope")
"""Dims that shrink by one factor: some of them are sums of others."""


def tiny(graph: Graph, *, tp: int = 1, ep: int = 1, layers: int = 2, positions: int = 32) -> Graph:
    """The model with small dims. tp, ep: ranks that divide heads, widths and vocabulary, and experts. layers: most
    repeats of a call. positions: least rows of a table of positions."""
    sizes = {dim.name: dim.size for block in graph.blocks for dim in block.dims if dim.size is not None}
    small = _sizes(sizes, tp, ep, positions)
    blocks = tuple(_block(block, small) for block in graph.blocks)
    inputs = tuple(_tensor(tensor, small) for tensor in graph.inputs)
    calls = tuple(_call(call, layers) for call in graph.calls)
    return replace(graph, name=f"{graph.name} in small", inputs=inputs, blocks=blocks, calls=calls)


def _sizes(sizes: Mapping[str, int], tp: int, ep: int, positions: int) -> dict[str, int]:
    """New size of each dim."""
    reduced = dict[str, int]()
    factor = _factor([sizes[name] for name in _SUMMED if name in sizes])
    hidden = sizes.get("hidden", 0)
    heads, keys = sizes.get("heads", 1), sizes.get("kv_heads", sizes.get("heads", 1))
    # Ranks of tp have whole key heads, and one alone would not show how queries share them.
    few = min(keys, max(tp, 2))
    for name, size in sizes.items():
        kind = name.split(".")[-1]
        if kind in _SUMMED:
            reduced[name] = size // factor
        elif kind == "kv_heads":
            reduced[name] = few
        elif kind == "heads":
            reduced[name] = few if heads == keys else _multiple(2 * few, tp)
        elif kind in ("ffn", "expert_ffn", "shared_ffn"):
            reduced[name] = FFN * tp
        elif kind == "vocab":
            reduced[name] = VOCAB * tp
        elif kind == "experts":
            reduced[name] = min(size, _multiple(4, ep))
        elif kind == "topk":
            reduced[name] = min(size, 2)
        elif kind.startswith("ssm_"):
            reduced[name] = _scanned(kind, size, sizes)
        elif kind == "positions":
            reduced[name] = min(size, max(positions, 32))
        # Widths that follow from the hidden size, as a joined projection's, stay the same multiple of it.
        elif hidden and size % hidden == 0 and size // hidden <= 8:
            reduced[name] = HIDDEN * tp * (size // hidden)
    return reduced


def _scanned(kind: str, size: int, sizes: Mapping[str, int]) -> int:
    """The small size of a dim of a Mamba-2 mixer: two heads of 8 in each of at most two groups; what its projection
    writes is their sum."""
    groups, state = min(sizes["ssm_groups"], 2), 8
    return {
        "ssm_groups": groups,
        "ssm_heads": 2 * groups,
        "ssm_width": 16,
        "ssm_state": state,
        "ssm_proj": 2 * 16 * groups + 2 * state * groups + 2 * groups,
    }.get(kind, size)


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _factor(sizes: list[int]) -> int:
    """What all of these are divided by: the largest that leaves even numbers, and 8 or more of the smallest."""
    common = gcd(*sizes) if sizes else 1
    ways = (k for k in range(1, common + 1) if common % k == 0)
    return max(k for k in ways if k == 1 or all(size // k % 2 == 0 and size // k >= 8 for size in sizes))


def _block(block: Block, small: Mapping[str, int]) -> Block:
    tensors = tuple(_tensor(tensor, small) for tensor in block.tensors)
    return replace(block, tensors=tensors, ops=tuple(_op(op) for op in block.ops))


def _tensor(tensor: Tensor, small: Mapping[str, int]) -> Tensor:
    return replace(tensor, dims=tuple(_dim(dim, small) for dim in tensor.dims))


def _dim(dim: Dim, small: Mapping[str, int]) -> Dim:
    if dim.factors:
        return replace(dim, factors=tuple(_dim(factor, small) for factor in dim.factors))
    return replace(dim, size=small.get(dim.name, dim.size))


def _op(op: Op) -> Op:
    """Attributes that are about sizes, in small: a window that cuts something off, groups that divide experts."""
    values = dict(op.attrs)
    if values.get("window"):
        values["window"] = WINDOW
    if op.does == "scans":
        values["chunk"] = CHUNK
    groups = values.get("groups", 1)
    if op.does == "routes" and isinstance(groups, int) and groups > 1:
        values |= {"groups": 2, "groups_per_token": 1}
    return replace(op, attrs=attrs(**values))


def _call(call: Call, layers: int) -> Call:
    return replace(call, repeat=min(call.repeat, layers))

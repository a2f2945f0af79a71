"""Prices of many contexts at once: layers that differ only in sizes are priced together, as arrays.

`layer_prices(contexts)` groups contexts that agree in all but the sizes that the workload gives (micro-batch, sequence
length), prices each group once with an array in place of every size that varies, and takes the result apart. Same
numbers as `layer_price` one by one, up to the last rounding of float64. Leaves out memory of what was priced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from gnomon.prediction.layer import layer_price, price_layer
from gnomon.prediction.layer_types import LayerPrice, LocalContext, Phase, SavedBytes
from gnomon.prices.kernels import OpPrice
from gnomon.sharding import Collective, ShardedBlock, ShardedOp, Strategy

_TAKEN_APART = (LayerPrice, Phase, SavedBytes, OpPrice, ShardedBlock, ShardedOp, Strategy, Collective)
"""What may hold arrays; everything else in a price is the graph's or the plan's."""


def layer_prices(contexts: Sequence[LocalContext]) -> tuple[LayerPrice, ...]:
    """The price of each context, in order."""
    groups: dict[LocalContext, list[int]] = {}
    for index, context in enumerate(contexts):
        groups.setdefault(_alike(context), []).append(index)
    prices: dict[int, LayerPrice] = {}
    for members in groups.values():
        distinct = list(dict.fromkeys(contexts[i].sizes for i in members))
        if len(distinct) == 1:
            prices.update((i, layer_price(contexts[i])) for i in members)
            continue
        together = price_layer(contexts[members[0]], _arrays(distinct))
        apart = {sizes: _at(together, k) for k, sizes in enumerate(distinct)}
        prices.update((i, apart[contexts[i].sizes]) for i in members)
    return tuple(prices[i] for i in range(len(contexts)))


def _alike(context: LocalContext) -> LocalContext:
    """The context without the sizes that may vary within a group; a sequence that is divided over cp may not."""
    sizes = tuple((name, value if context.mesh.cp > 1 and name == "seq" else 0) for name, value in context.sizes)
    return replace(context, sizes=sizes)


def _arrays(distinct: Sequence[tuple[tuple[str, int], ...]]) -> dict[str, Any]:
    """Size name -> the one value, or an array of the values of each context."""
    columns = {name: [dict(sizes)[name] for sizes in distinct] for name, _ in distinct[0]}
    return {name: v[0] if len(set(v)) == 1 else np.array(v, np.int64) for name, v in columns.items()}


def _at(value: Any, index: int) -> Any:
    """One context's part of a value that holds arrays."""
    if isinstance(value, np.ndarray):
        number = value[index].item()
        return int(number) if isinstance(number, float) and number.is_integer() else number
    if isinstance(value, tuple):
        return tuple(_at(v, index) for v in value)
    if isinstance(value, Mapping):
        return {name: _at(v, index) for name, v in value.items()}
    if isinstance(value, _TAKEN_APART):
        return replace(value, **{f.name: _at(getattr(value, f.name), index) for f in fields(value)})
    return value

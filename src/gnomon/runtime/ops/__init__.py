"""One torch function for each op kind that the runtime runs, on local tensors: `FUNCTIONS`.

A kind is one function in the file of its family. The engine (`runtime.blocks`) calls those of `linear` and of experts
itself, since they want more than their operands. `check_runnable(graph)` refuses the rest by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.runtime.ops.alibi import alibi
from gnomon.runtime.ops.attention import attention, rotary
from gnomon.runtime.ops.elementwise import activation, add, dropped, glu, modulate, mul, scale, softcap, unchanged
from gnomon.runtime.ops.image import conv2d, mse, timestep, upsample
from gnomon.runtime.ops.lookup import cross_entropy, embedding
from gnomon.runtime.ops.norm import norm
from gnomon.runtime.ops.routing import router
from gnomon.runtime.ops.site import Function
from gnomon.runtime.ops.state_space import state_space
from gnomon.runtime.ops.views import concat, patchify, pool, rename, reshape, split
from gnomon.software import own

FUNCTIONS: Mapping[str, Function] = {
    "attention": attention,
    "alibi": alibi,
    "rotary": rotary,
    "norm": norm,
    "activation": activation,
    "glu": glu,
    "add": add,
    "mul": mul,
    "scale": scale,
    "softcap": softcap,
    "modulate": modulate,
    "dropout": dropped,
    "cast": unchanged,
    "embedding": embedding,
    "cross_entropy": cross_entropy,
    "router": router,
    "state_space": state_space,
    "rename": rename,
    "reshape": reshape,
    "split": split,
    "concat": concat,
    "pool": pool,
    "patchify": patchify,
    "conv2d": conv2d,
    "upsample": upsample,
    "timestep": timestep,
    "mse": mse,
}
"""Kind -> (site, *operands) -> outputs."""

POSITIONED = ("attention", "rotary")
"""Kinds that read where documents begin in a row (`packing`)."""

ENGINE = ("linear", "grouped_linear", "dispatch", "combine")
"""Kinds that the engine calls with more than their operands."""


def check_runnable(graph: Graph) -> None:
    """PlanError for a model whose Graph leaves some of its mathematics out, or has a kind without a function."""
    if reason := own.model_reason(graph):
        raise PlanError(reason)

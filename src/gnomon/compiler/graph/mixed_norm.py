"""The dtype of a layer norm's mean and deviation, which PyTorch's fake tensors say otherwise than a CPU gives it.

Of inputs in bfloat16 or float16 and weights in float32 (a model under autocast) a CPU keeps both in float32; the fake
tensors of torch 2.13 have the input's dtype. `say_statistics(graph)` corrects them, before a partitioner hands them to
the backward, so that kernels of forward and backward write and read what ATen does.
"""

from __future__ import annotations

import operator
from functools import cache

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten


def say_statistics(graph: fx.Graph) -> None:
    """Gives each layer norm of mixed dtypes, and who takes its results apart, the dtypes that they have."""
    for node in graph.nodes:
        if node.target is not aten.native_layer_norm.default or node.meta["val"][0].device.type != "cpu":
            continue
        x, _, weight, bias = node.args[:4]
        weight_dtype = next((one.meta["val"].dtype for one in (weight, bias) if one is not None), None)
        if weight_dtype is None or weight_dtype == x.meta["val"].dtype:
            continue
        out, *statistics = node.meta["val"]
        # Asked of ATen itself, on a norm of four numbers, as it is ATen's kernel that decides.
        statistics_dtype = _kept_in(x.meta["val"].dtype, weight_dtype)
        node.meta["val"] = (out, *(one.to(statistics_dtype) for one in statistics))
        for user in node.users:
            if user.target is operator.getitem:
                user.meta["val"] = node.meta["val"][user.args[1]]


@cache
def _kept_in(x: torch.dtype, weight: torch.dtype) -> torch.dtype:
    """What a CPU keeps the mean of such a layer norm in."""
    with _disable_current_modes(), torch.no_grad():
        outputs = torch.native_layer_norm(torch.ones(2, 2, dtype=x), [2], torch.ones(2, dtype=weight), None, 1e-5)
        return outputs[1].dtype

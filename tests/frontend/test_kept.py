"""Bytes that the Graph says are kept for backward, against the tensors that autograd keeps of the module."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gnomon.frontend.capture import captured
from gnomon.graph import Dtypes, Setting, graph_saved_bytes
from gnomon.prediction.software_kernels import kernels_of
from gnomon.runtime.stage import bound
from gnomon.software import stack

WIDTH, HEADS = 16, 4


class Held:
    """A tensor that autograd keeps."""

    def __init__(self, x: Tensor) -> None:
        self.x = x.detach()


def kept_by_torch(module: nn.Module, example: Mapping[str, Tensor]) -> int:
    """Storages, each once, without the module's own."""
    own = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers())}
    held = WeakSet[Held]()

    def pack(x: Tensor) -> Held:
        made = Held(x)
        held.add(made)
        return made

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.x):
        out = module(**example)
    gc.collect()
    storages = {one.x.untyped_storage().data_ptr(): one.x.untyped_storage().nbytes() for one in held}
    del out
    return sum(size for at, size in storages.items() if at not in own)


def kept_by_graph(module: nn.Module, example: Mapping[str, Tensor]) -> int:
    graph = captured(module, example, training=False).graph
    setting = Setting(
        sizes=bound(graph.inputs, example), dtypes=Dtypes(param="fp32", compute="fp32"), causal_flops="full"
    )
    return int(graph_saved_bytes(graph, kernels_of(stack("gnomon"))[0], setting, {}))


class Turned(nn.Module):
    """Linears that read rows which do not lie one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).transpose(0, 1)
        return (self.q(x) * self.k(x)).sum()


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(shape).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).contiguous().flatten(2)).sum()


@pytest.mark.parametrize("made", [Turned, Attending])
def test_kept_bytes_are_those_that_autograd_keeps(made: Any) -> None:
    torch.manual_seed(0)
    module, example = made().eval(), {"x": torch.randn(2, 8, WIDTH)}
    assert kept_by_graph(module, example) == pytest.approx(kept_by_torch(module, example), rel=0.01)


@pytest.mark.parametrize("made", [Turned, Attending])
def test_a_module_without_weights_keeps_as_many(made: Any) -> None:
    with torch.device("meta"):
        shapes = made().eval()
    example = {"x": torch.randn(2, 8, WIDTH)}
    assert kept_by_graph(shapes, example) == kept_by_graph(made().eval(), example)

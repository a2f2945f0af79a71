"""Bytes that the Graph says are kept for backward against what autograd keeps of the module, and the predicted peak
of a step against tensors that live while it runs."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import gnomon
from gnomon.frontend.capture import captured
from gnomon.graph import Dtypes, Setting, graph_saved_bytes
from gnomon.plans import Plan, Precision, Schedule, Workload
from gnomon.prediction.software_kernels import kernels_of
from gnomon.runtime.launch.captured_job import executor
from gnomon.runtime.module.stage import bound
from gnomon.runtime.watch.layer_bytes import LiveBytes
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
    return int(graph_saved_bytes(graph, kernels_of(stack("gnomon"), cpu=True)[0], setting, {}))


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


class InSteps(nn.Module):
    """Attention in steps: its scores are there several times on the way back, and what is wider before that."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.wide = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 8 * WIDTH)
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, answers: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) * WIDTH**-0.5
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
        x = scores.softmax(-1) @ v
        x = x + functional.gelu(self.wide(x)).pow(2).unflatten(-1, (8, WIDTH)).mean(-2)
        return functional.cross_entropy(self.head(x.mean(1)), answers)


class Convolving(nn.Module):
    """A convolution whose weight is larger than all that is kept when its gradient is made."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.head = nn.Conv2d(3, 128, 8, 8), nn.LayerNorm(128), nn.Linear(128, 8)
        self.register_buffer("places", torch.arange(4096))

    def forward(self, x: Tensor, answers: Tensor) -> Tensor:
        x = self.norm(self.patches(x.flip(-1)).flatten(2).transpose(1, 2))
        x = x * (self.places[: x.shape[1], None] > 0)
        return functional.cross_entropy(self.head(x.mean(1)), answers)


class Passing(nn.Module):
    """What nobody keeps is larger in the forward than all that is there in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, answers: Tensor) -> Tensor:
        wide = x.unsqueeze(-1) + torch.arange(64)
        return functional.cross_entropy(self.head((wide + 1).amax(-1).mean(1)), answers)


IMAGES = {"x": torch.randn(2, 3, 32, 32), "answers": torch.tensor([1, 2])}
ROWS = {"x": torch.randn(2, 32, WIDTH), "answers": torch.tensor([1, 2])}


@pytest.mark.parametrize(("made", "batch"), [(InSteps, ROWS), (Convolving, IMAGES), (Passing, ROWS)])
def test_the_peak_of_a_step_is_predicted(made: Any, batch: dict[str, Tensor]) -> None:
    module = made()
    found = captured(module, batch, training=False)
    fp32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", states="fp32", master="none")
    plan, work = Plan(schedule=Schedule(micro_batch_size=2), precision=fp32), Workload(global_batch_size=2, seq_len=1)
    by_class = gnomon.predict(found.graph, "local:1", plan, work, "gnomon").memory[0].by_class
    said = sum(size for name, size in by_class.items() if name not in ("workspace", "overhead"))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        job = executor(module, found, plan, work)
        for _ in range(2):
            job.step(batch)
        live, before = LiveBytes(torch.device("cpu")), job.resident_bytes()
        with live:
            job.step(batch)
    finally:
        dist.destroy_process_group()
    assert said == pytest.approx(before + live.most, rel=0.02)


class Biased(nn.Module):
    """Attention with a bias that is trained, and values of another width than keys, which a CPU has no kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.bias, self.out = nn.Parameter(torch.zeros(1, HEADS, 8, 8)), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qk(x).chunk(2, -1))
        v = self.v(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        x = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias * 2)
        return self.out(x.transpose(1, 2).flatten(2)).sum()


@pytest.mark.parametrize("made", [Turned, Attending, Biased])
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

"""RMSNorms that multiply by their weight in fp32 (Gemma, OLMo 2) keep what torch keeps of them, as Llama's do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gnomon.formats.huggingface.read import from_hf_config
from gnomon.formats.trainers import BF16, Modules
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.plans import Plan, Schedule, Workload
from gnomon.prediction import predict
from gnomon.software import stack

ROWS, WIDTH, LAYERS = 2048, 512, 3
GEMMA = {
    "model_type": "gemma", "hidden_size": WIDTH, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip


def narrow(x: Tensor, weight: Tensor) -> Tensor:
    """Llama's."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def wide(x: Tensor, weight: Tensor) -> Tensor:
    """Gemma's."""
    out = x.float()
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (out * (1.0 + weight.float())).type_as(x)


def kept(norm: object) -> int:
    """Bytes as large as the rows that autograd keeps of a norm, each storage once."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() == ROWS * WIDTH:
            seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = norm(x, weight)  # type: ignore[operator]
    assert out.requires_grad
    return sum(seen.values())


def activations(graph: Graph) -> int:
    record = Modules(fused=False, loss="unfused", compiled=False, experts="eager").of(stack("pytorch-fsdp"))
    plan = Plan(schedule=Schedule(micro_batch_size=1), precision=BF16)
    work = Workload(global_batch_size=1, seq_len=ROWS)
    made = predict(graph, parse_cluster("1x1xa100-sxm-80gb"), plan, work, record)
    return made.tightest.by_class["activations"]


def test_what_a_norm_keeps_is_what_torch_keeps_of_it() -> None:
    graph = from_hf_config(GEMMA, "gemma").graph
    plain = tuple(
        replace(block, ops=tuple(replace(op, attrs=tuple(a for a in op.attrs if a[0] != "wide")) for op in block.ops))
        for block in graph.blocks
    )
    norms = 2 * LAYERS + 1
    more = activations(graph) - activations(replace(graph, blocks=plain))
    assert kept(wide) > kept(narrow)
    assert more == pytest.approx(norms * (kept(wide) - kept(narrow)), rel=0.01)

"""Modules of transformers that run in ways of their own keep what torch keeps of them.

Products of norms in fp32 (Gemma, OLMo 2), LayerNorms over wide rows (OLMo) or op by op (Cohere), GELU by hand (GPT-2),
attention of types without PyTorch's kernels (GPT-J).
"""

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


def over_wide_rows(x: Tensor, weight: Tensor) -> Tensor:
    """OLMo's."""
    return torch.nn.functional.layer_norm(x.to(torch.float32), (WIDTH,), None, None, eps=1e-5).to(x.dtype) * weight


def op_by_op(x: Tensor, weight: Tensor) -> Tensor:
    """Cohere's."""
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    return (weight.to(torch.float32) * ((wide - mean) * torch.rsqrt(variance + 1e-5))).to(x.dtype)


def one_kernel(x: Tensor, weight: Tensor) -> Tensor:
    """torch's LayerNorm."""
    return torch.nn.functional.layer_norm(x, (WIDTH,), weight, None, eps=1e-5)


def gelu_by_hand(x: Tensor, weight: Tensor) -> Tensor:
    """GPT-2's."""
    return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu(x: Tensor, weight: Tensor) -> Tensor:
    """One kernel."""
    return torch.nn.functional.gelu(x, approximate="tanh")


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
    record = Modules(fused=False, loss="unfused", compiled=False, experts="eager").of(stack("pytorch-fsdp"), graph)
    plan = Plan(schedule=Schedule(micro_batch_size=1), precision=BF16)
    work = Workload(global_batch_size=1, seq_len=ROWS)
    made = predict(graph, parse_cluster("1x1xa100-sxm-80gb"), plan, work, record)
    return made.tightest.by_class["activations"]


def without(graph: Graph, attribute: str) -> Graph:
    """The same with what says how a type's own modules run left out."""
    plain = (
        replace(
            block, ops=tuple(replace(op, attrs=tuple(a for a in op.attrs if a[0] != attribute)) for op in block.ops)
        )
        for block in graph.blocks
    )
    return replace(graph, blocks=tuple(plain))


def test_what_a_norm_keeps_is_what_torch_keeps_of_it() -> None:
    graph = from_hf_config(GEMMA, "gemma").graph
    norms = 2 * LAYERS + 1
    more = activations(graph) - activations(without(graph, "wide"))
    assert kept(wide) > kept(narrow)
    assert more == pytest.approx(norms * (kept(wide) - kept(narrow)), rel=0.01)


DECODER = {
    "hidden_size": WIDTH, "intermediate_size": 1024, "num_hidden_layers": LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 512, "max_position_embeddings": ROWS,
}  # fmt: skip


def test_layer_norms_in_fp32() -> None:
    """OLMo's has no weight: what its product with one would keep is not counted here."""
    olmo = from_hf_config({**DECODER, "model_type": "olmo"}, "olmo").graph
    more = activations(olmo) - activations(without(olmo, "fp32"))
    narrowed = ROWS * WIDTH * 2  # the product with the weight above
    assert more == pytest.approx((2 * LAYERS + 1) * (kept(over_wide_rows) - narrowed - kept(one_kernel)), rel=0.01)
    cohere = from_hf_config({**DECODER, "model_type": "cohere", "logit_scale": 1.0}, "cohere").graph
    more = activations(cohere) - activations(without(cohere, "fp32"))
    assert more == pytest.approx((LAYERS + 1) * (kept(op_by_op) - kept(one_kernel)), rel=0.01)


GPT = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": 8, "n_positions": ROWS, "vocab_size": 512}
DROPS = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)


def test_gelu_by_hand_and_attention_of_its_own() -> None:
    """GPT-J: a feed-forward four times as wide as the rows; softmax in fp32 and in bf16 of 8 heads."""
    config = {**GPT, **DROPS, "model_type": "gptj", "rotary_dim": 32}
    own = from_hf_config({**config, "activation_function": "gelu_new"}, "gptj").graph
    kernel = from_hf_config({**config, "activation_function": "gelu_pytorch_tanh"}, "gptj").graph
    assert activations(own) - activations(kernel) == LAYERS * 4 * (kept(gelu_by_hand) - kept(gelu))
    more = activations(own) - activations(without(own, "eager"))
    scores = 8 * ROWS * ROWS
    assert LAYERS * scores * (4 + 2) * 0.95 < more <= LAYERS * scores * (4 + 2)

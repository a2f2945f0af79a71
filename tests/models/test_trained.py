"""Models of which a part is trained: the FLOPs and gradients of transformers' own modules with the others frozen."""

from __future__ import annotations

import re

import pytest

from gnomon.errors import GraphError
from gnomon.graph import Setting, graph_work, no_grad_inputs
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.presets import model
from gnomon.models.trained import Trained, parameter_names, parse_trained, with_trained
from gnomon.ops.kernels import UNFUSED
from gnomon.tensors.dims import BF16

CONFIG = LlamaConfig(
    name="small", num_layers=5, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=160, vocab_size=512
)
CASES = (
    (r"\.(3|4)\.",),  # the last layers: nothing before them has a backward
    (r"\.(0|1)\.",),  # the first ones: gradients flow from the head to them
    (r"\.2\.mlp",),
    (r"^lm_head",),
    (r"^model\.embed_tokens", r"\.4\."),
    (r"layers",),
)


def ours(patterns: tuple[str, ...]) -> float:
    graph = with_trained(llama(CONFIG), Trained(patterns=patterns))
    setting = Setting(sizes={"batch": 2, "seq": 8}, dtypes=BF16, causal_flops="full")
    return float(graph_work(graph, UNFUSED, setting).total.matmul_flops)


def counted(patterns: tuple[str, ...]) -> tuple[float, set[str]]:
    """(FLOPs, names that get a gradient) of transformers' Llama with every other parameter frozen."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=512, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    module = transformers.LlamaForCausalLM(config)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(any(re.search(pattern, name) for pattern in patterns))
    ids = torch.zeros(2, 8, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        module(input_ids=ids, labels=ids).loss.backward()
    return counter.get_total_flops(), {n for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("patterns", CASES)
def test_flops_and_gradients_are_transformers_own(patterns: tuple[str, ...]) -> None:
    flops, graded = counted(patterns)
    assert ours(patterns) == pytest.approx(flops, rel=0.005)
    assert set(parameter_names(with_trained(llama(CONFIG), Trained(patterns=patterns)))) == graded


def test_what_lies_before_the_first_trained_layer_has_no_gradient() -> None:
    graph = with_trained(llama(CONFIG), Trained(patterns=(r"\.[34]\.",)))
    assert [(c.name, c.repeat, no_grad_inputs(graph, c)) for c in graph.calls] == [
        ("embed", 1, ("input_ids",)),
        ("layers", 3, ("x",)),
        ("layers_3", 1, ("x",)),
        ("layers_4", 1, ()),
        ("head", 1, ("labels",)),
    ]


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        (r"a+only:x\.[12]+,y", Trained(patterns=(r"x\.[12]+", "y"))),
        ("a+frozen:embed", Trained(frozen=("embed",))),
        ("a+frozen:^model+only:norm", Trained(frozen=("^model",), patterns=("norm",))),
    ],
)
def test_names_say_what_is_trained(name: str, trained: Trained) -> None:
    assert parse_trained(name) == ("a", trained)
    assert f"a{trained}" == name


def test_by_name() -> None:
    graph = model(r"llama-3.1-8b+frozen:embed_tokens")
    assert (graph.num_parameters(), graph.num_frozen()) == (8030261248 - 128256 * 4096, 128256 * 4096)
    with pytest.raises(GraphError, match="left to train.*model.embed_tokens.weight"):
        model("llama-3.1-8b+only:nothing")
    with pytest.raises(GraphError, match="no regular expression"):
        model("llama-3.1-8b+only:(")

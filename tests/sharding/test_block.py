"""Collectives of whole blocks against what the papers count, byte for byte.

s = 4096 tokens, b = 1, bf16. Llama 3.1 8B: h = 4096, 32 heads, 8 key-value heads of 128; one residual is s·b·h·2 = 32
MiB. Sources: Megatron-LM (Shoeybi et al. 2019), sequence parallelism (Korthikanti et al. 2022), Ring Attention (Liu
et al. 2023), DeepSpeed-Ulysses (Jacobs et al. 2023).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from gnomon.errors import PlanError
from gnomon.graph import BF16
from gnomon.models.deepseek import deepseek_v3, deepseek_v3_671b
from gnomon.models.gpt import gpt, gpt2
from gnomon.models.llama import llama, llama3_1_8b
from gnomon.models.mixtral import mixtral, mixtral_8x7b
from gnomon.models.t5 import t5, t5_base
from gnomon.models.unet import unet, unet_tiny
from gnomon.plans import Layout, LayoutRule, Mesh
from gnomon.sharding import Collective, Scene, ShardedBlock, setting_of, shard_graph, strategies

MIB = 2**20
RESIDUAL = 4096 * 4096 * 2
PLAIN = Layout()
SEQUENCE = Layout(sequence_parallel=True)
KEPT = Layout(sequence_parallel=True, keep_gathered=True)
LLAMA = llama(llama3_1_8b())
MIXTRAL = mixtral(mixtral_8x7b())


def layer(
    mesh: Mesh, layout: Layout = PLAIN, graph: object = LLAMA, name: str = "layers", seq: int = 4096
) -> ShardedBlock:
    sizes = {"batch": 1, "seq": seq, "enc_seq": 512}
    return shard_graph(graph, layout, mesh, sizes, BF16)[name]  # type: ignore[arg-type]


def counts(collectives: tuple[Collective, ...]) -> Counter[str]:
    return Counter(f"{c.axis} {c.kind}" for c in collectives)


def total_sent(collectives: tuple[Collective, ...]) -> int:
    total = sum(c.sent_bytes for c in collectives)
    assert isinstance(total, int)
    return total


def test_one_rank_communicates_nothing() -> None:
    for graph in (LLAMA, MIXTRAL):
        for sharded in shard_graph(graph, SEQUENCE, Mesh(dp_shard=8), {"batch": 1, "seq": 4096}, BF16).values():
            assert sharded.collectives == ()


def test_megatron_has_two_all_reduces_each_way() -> None:
    sharded = layer(Mesh(tp=8))
    assert [(c.path, c.kind, c.bytes) for c in sharded.forward] == [
        ("self_attn.o_proj", "all_reduce", RESIDUAL),
        ("mlp.down_proj", "all_reduce", RESIDUAL),
    ]
    # Backward: once for q, k, v together and once for gate and up, each after the last of them.
    assert [(c.path, c.kind, c.bytes) for c in sharded.backward] == [
        ("mlp.gate_proj", "all_reduce", RESIDUAL),
        ("self_attn.q_proj", "all_reduce", RESIDUAL),
    ]


def test_sequence_parallelism_moves_the_same_bytes() -> None:
    plain, sequence = layer(Mesh(tp=8)), layer(Mesh(tp=8), KEPT)
    for mine, theirs in ((sequence.forward, plain.forward), (sequence.backward, plain.backward)):
        assert counts(mine) == {"tp all_gather": 2, "tp reduce_scatter": 2}
        assert {c.bytes for c in mine} == {RESIDUAL}
        assert total_sent(mine) == total_sent(theirs) == 2 * 2 * RESIDUAL * 7 // 8
    # A gather is at the start of a region and a scatter at its end, both ways.
    assert [c.kind for c in sequence.forward] == ["all_gather", "reduce_scatter"] * 2
    assert [c.kind for c in sequence.backward] == ["all_gather", "reduce_scatter"] * 2


def test_what_is_not_kept_is_gathered_again_for_the_weight_gradient() -> None:
    again = [c for c in layer(Mesh(tp=8), SEQUENCE).backward if c.weight_grad]
    assert [(c.kind, c.tensor) for c in again] == [
        ("all_gather", "post_attention_layernorm"),
        ("all_gather", "input_layernorm"),
    ]
    kept = layer(Mesh(tp=8), KEPT)
    assert [c for c in kept.backward if c.weight_grad] == []
    norm = kept.block.tensor("input_layernorm")
    assert (kept.kept_bytes_of(norm), kept.bytes_of(norm)) == (RESIDUAL, RESIDUAL // 8)
    assert layer(Mesh(tp=8), SEQUENCE).kept_bytes_of(norm) == RESIDUAL // 8


def test_local_sizes_of_ops() -> None:
    sharded = layer(Mesh(tp=8), SEQUENCE)
    assert sharded.sizes("self_attn.q_proj") == {"batch": 1, "seq": 4096, "hidden": 4096, "heads": 4, "head_dim": 128}
    assert sharded.sizes("mlp.down_proj")["ffn"] == 14336 // 8
    assert sharded.sizes("input_layernorm")["seq"] == 512
    assert sharded.sizes("self_attn.core:scores") == sharded.sizes("self_attn.core")
    assert sharded.local_bytes["input_layernorm"] == RESIDUAL // 8
    with pytest.raises(PlanError, match="did you mean 'self_attn.q_proj'"):
        sharded.sizes("self_attn.q_prj")


def test_norms_are_summed_over_tp_only_under_sequence_parallelism() -> None:
    assert layer(Mesh(tp=8)).partial_grads == {}
    partial = layer(Mesh(tp=8), SEQUENCE).partial_grads
    assert partial == {"input_layernorm.weight": ("tp",), "post_attention_layernorm.weight": ("tp",)}


def test_two_key_value_heads_under_tp_4() -> None:
    # 8 key-value heads over 16 ranks: query heads 2 to a rank, each key-value head on a pair of ranks.
    sharded = layer(Mesh(tp=16))
    assert sharded.sizes("self_attn.core")["heads"] == 2
    assert sharded.sizes("self_attn.core")["kv_heads"] == 1
    assert sharded.copies == {"self_attn.k_proj.weight": 2, "self_attn.v_proj.weight": 2}
    assert sharded.local_elements["self_attn.k_proj.weight"] == 128 * 4096
    assert sharded.local_elements["self_attn.q_proj.weight"] == 2 * 128 * 4096
    assert layer(Mesh(tp=8)).copies == {}
    with pytest.raises(PlanError, match="tp = 3 does not divide heads = 32"):
        layer(Mesh(tp=3))


def test_vocabulary_parallel_embedding_and_loss() -> None:
    embed, head = layer(Mesh(tp=8), name="embed"), layer(Mesh(tp=8), name="head")
    # A masked lookup is summed; nothing returns, since token ids have no gradient.
    assert [(c.kind, c.bytes) for c in embed.collectives] == [("all_reduce", RESIDUAL)]
    # Maximum, target logit and sum of exponentials of 4096 tokens in fp32.
    assert [(c.kind, c.bytes, c.inside) for c in head.forward] == [("all_reduce", 4096 * 4, True)] * 3
    assert [(c.kind, c.bytes) for c in head.backward] == [("all_reduce", RESIDUAL)]
    scattered = layer(Mesh(tp=8), SEQUENCE, name="embed")
    assert [(c.phase, c.kind) for c in scattered.collectives] == [
        ("forward", "reduce_scatter"),
        ("backward", "all_gather"),
    ]


def test_without_loss_parallelism_the_logits_are_gathered() -> None:
    head = layer(Mesh(tp=8), Layout(loss_parallel=False), name="head")
    assert [(c.kind, c.bytes, c.inside) for c in head.forward] == [("all_gather", 4096 * 128256 * 2, False)]
    whole = layer(Mesh(tp=8), Layout(vocab_parallel=False), name="head")
    assert whole.collectives == ()
    assert whole.local_elements["lm_head.weight"] == 128256 * 4096


def test_ring_attention_passes_keys_and_values_around() -> None:
    sharded = layer(Mesh(cp=4))
    keys_and_values = 2 * (4096 // 4) * 8 * 128 * 2
    (ring,) = sharded.forward
    assert (ring.kind, ring.steps, ring.bytes) == ("send_recv", 3, keys_and_values)
    assert [(c.steps, c.bytes) for c in sharded.backward] == [(3, keys_and_values), (4, keys_and_values)]
    core = sharded.sizes("self_attn.core")
    assert (core["seq"], core["kv_seq"]) == (1024, 4096)


def test_gathered_keys_move_as_much_as_the_ring() -> None:
    gathered = layer(Mesh(cp=4), Layout(context="all_gather", keep_gathered=True))
    assert counts(gathered.forward) == {"cp all_gather": 2}
    assert counts(gathered.backward) == {"cp reduce_scatter": 2}
    assert total_sent(gathered.forward) == total_sent(layer(Mesh(cp=4)).forward)


def test_ulysses_exchanges_sequence_for_heads() -> None:
    sharded = layer(Mesh(tp=2, cp=4), Layout(context="ulysses", sequence_parallel=True))
    exchanges = [c for c in sharded.forward if c.axis == "cp"]
    query, key = 1024 * 16 * 128 * 2, 1024 * 4 * 128 * 2
    assert [(c.kind, c.bytes) for c in exchanges] == [("all_to_all", size) for size in (query, key, key, query)]
    core = sharded.sizes("self_attn.core")
    assert (core["seq"], core["heads"], core["kv_heads"]) == (4096, 4, 1)
    assert total_sent(tuple(c for c in sharded.backward if c.axis == "cp")) == total_sent(tuple(exchanges))


def test_attention_has_three_strategies_over_cp() -> None:
    block = LLAMA.block("layers")
    scene = Scene(axis_sizes={"cp": 4}, sizes={"batch": 1, "seq": 4096}, dtypes=BF16)
    for chosen in ("ring", "all_gather", "ulysses"):
        setting = setting_of(block, Layout(context=chosen), scene)  # type: ignore[arg-type]
        ways = strategies(block.op("self_attn.core"), setting)
        assert ways[0].name == chosen
        assert {way.name for way in ways} == {"ring", "all_gather", "ulysses"}
    many = Scene(axis_sizes={"cp": 64}, sizes=scene.sizes, dtypes=BF16)
    ways = strategies(block.op("self_attn.core"), setting_of(block, PLAIN, many))
    assert "ulysses" not in {way.name for way in ways}  # 64 ranks, 32 heads


def test_experts_send_tokens_times_topk_times_hidden() -> None:
    # ep 8 over dp_shard 4 x tp 2; a rank has s/tp = 2048 tokens, each for 2 of 8 experts.
    mesh = Mesh(dp_shard=4, tp=2, ep=8)
    exchanges = [c for c in layer(mesh, SEQUENCE, MIXTRAL).collectives if c.kind == "all_to_all"]
    assert [(c.phase, c.path.rpartition(".")[2]) for c in exchanges] == [
        ("forward", "dispatch"),
        ("forward", "combine"),
        ("backward", "combine"),
        ("backward", "dispatch"),
    ]
    assert {c.sent_bytes for c in exchanges} == {2048 * 2 * 4096 * 2 * 7 // 8}
    assert {c.ranks for c in exchanges} == {8}


def test_sliced_experts_gather_rows() -> None:
    sharded = layer(Mesh(dp_shard=4, tp=2, ep=4, etp=2), SEQUENCE, MIXTRAL)
    rows = 2048 * 2 * 4096 * 2
    inside = [(c.kind, c.axis, c.bytes) for c in sharded.forward if c.axis in ("ep", "etp")]
    assert inside == [
        ("all_to_all", "ep", rows),
        ("all_gather", "etp", 2 * rows),
        ("reduce_scatter", "etp", 2 * rows),
        ("all_to_all", "ep", rows),
    ]
    up = sharded.sizes("block_sparse_moe.experts.w1")
    # Twice the rows, half the width: the same work as unsliced.
    assert (up["seq"], up["topk"], up["experts"], up["expert_ffn"]) == (2048, 4, 2, 7168)


def test_experts_with_tp_need_sequence_parallelism() -> None:
    with pytest.raises(PlanError, match="need sequence_parallel"):
        layer(Mesh(tp=2), Layout(), MIXTRAL)


def test_deepseek_shared_experts_are_tensor_parallel_and_latents_are_not() -> None:
    graph = deepseek_v3(deepseek_v3_671b())
    sharded = layer(Mesh(dp_shard=32, tp=2, ep=64), SEQUENCE, graph, "moe_layers")
    assert sharded.sizes("mlp.experts.gate_proj")["experts"] == 4
    assert sharded.sizes("mlp.shared_experts.down_proj")["shared_ffn"] == 1024
    # Queries' and keys' latents and the shared rotary key are gathered over tp, not 7168-wide states.
    attention = [c for c in sharded.forward if c.path.startswith("self_attn")]
    assert [(c.tensor.rpartition(".")[2], c.kind, c.bytes) for c in attention] == [
        ("q_a_layernorm", "all_gather", 4096 * 1536 * 2),
        ("kv_a_layernorm", "all_gather", 4096 * 512 * 2),
        ("k_rotary", "all_gather", 4096 * 64 * 2),
        ("o_proj", "reduce_scatter", 4096 * 7168 * 2),
    ]


def test_gpt2_fused_projection_and_biases() -> None:
    sharded = layer(Mesh(tp=4), Layout(), gpt(gpt2()))
    assert counts(sharded.forward) == {"tp all_reduce": 2}
    assert counts(sharded.backward) == {"tp all_reduce": 2}
    assert sharded.partial_grads == {}
    assert sharded.local_elements["mlp.c_fc.bias"] == 3072 // 4
    assert sharded.local_elements["mlp.c_proj.bias"] == 768


def test_cross_attention_returns_a_gradient_to_the_encoder() -> None:
    sharded = layer(Mesh(tp=2), Layout(), t5(t5_base()), "decoder_layers")
    assert counts(sharded.forward) == {"tp all_reduce": 3}
    to_encoder = [c for c in sharded.backward if c.tensor == "memory"]
    assert [(c.kind, c.bytes) for c in to_encoder] == [("all_reduce", 512 * 768 * 2)]


def test_images_in_bands_exchange_their_edges() -> None:
    graph = unet(unet_tiny())
    blocks = shard_graph(graph, Layout(), Mesh(cp=2), {"batch": 2}, BF16)
    halos = [c for sharded in blocks.values() for c in sharded.forward if c.kind == "send_recv" and "conv" in c.path]
    assert halos
    for halo in halos:
        block = next(s.block for s in blocks.values() if halo in s.forward)
        batch, channels, _, width = block.tensor(halo.tensor).dims
        assert halo.bytes == 2 * (channels.size or 0) * (width.size or 0) * 2  # one row of 2 images for a 3 x 3 kernel
        assert halo.steps == 2


def test_a_rule_keeps_a_dim_whole() -> None:
    rules = tuple(LayoutRule(dim=name) for name in ("heads", "kv_heads"))
    sharded = layer(Mesh(tp=8), Layout(rules=rules))
    assert sharded.sizes("self_attn.core")["heads"] == 32
    assert counts(sharded.forward) == {"tp all_reduce": 1}  # of the feed-forward
    elsewhere = layer(Mesh(tp=8), Layout(rules=tuple(replace(rule, region="head") for rule in rules)))
    assert elsewhere.sizes("self_attn.core")["heads"] == 4


def test_many_shapes_at_once() -> None:
    sizes = {"batch": 1, "seq": np.array([1024, 4096])}
    sharded = shard_graph(LLAMA, SEQUENCE, Mesh(tp=8, cp=2), sizes, BF16)["layers"]
    for index, seq in enumerate((1024, 4096)):
        alone = layer(Mesh(tp=8, cp=2), SEQUENCE, seq=seq)
        for many, one in zip(sharded.collectives, alone.collectives, strict=True):
            assert many.path == one.path
            assert np.broadcast_to(np.asarray(many.sent_bytes), 2)[index] == one.sent_bytes

"""Activation bytes of a GPT layer on one tensor-parallel rank against Korthikanti et al. 2022, table 2.

Per rank: s·b·h·(10 + 24/t + 5·a·s/(h·t)) with tensor parallelism, everything over t with sequence parallelism too.
"""

from __future__ import annotations

import pytest

from gnomon.graph import BF16, UNFUSED, backward, saved
from gnomon.models.gpt import GptConfig, gpt
from gnomon.plans import Layout, Mesh
from gnomon.sharding import ShardedBlock, shard_graph

S, B, H, A = 64, 2, 128, 8
GPT = gpt(
    GptConfig(
        name="small",
        num_layers=2,
        hidden_size=H,
        num_heads=A,
        vocab_size=512,
        max_positions=S,
        dropout=0.1,
        attention_dropout=0.1,
        activation="gelu",
    )
)


def sharded(tp: int, layout: Layout) -> ShardedBlock:
    return shard_graph(GPT, layout, Mesh(tp=tp), {"batch": B, "seq": S}, BF16)["layers"]


def kept_bytes(block: ShardedBlock) -> int:
    kept = saved(backward(block.block, UNFUSED, BF16), {}, BF16).on_device
    # Norm statistics (two fp32 numbers a row) are not in the paper's count.
    return sum(int(block.kept_bytes_of(k.tensor)) for k in kept if k.tensor.name[-4:] not in ("mean", "rstd"))  # type: ignore[arg-type]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallelism_leaves_ten_whole(tp: int) -> None:
    assert kept_bytes(sharded(tp, Layout())) == S * B * H * (10 * tp + 24) // tp + 5 * A * S * S * B // tp


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_sequence_parallelism_divides_everything(tp: int) -> None:
    assert kept_bytes(sharded(tp, Layout(sequence_parallel=True))) == (34 * S * B * H + 5 * A * S * S * B) // tp


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_keeping_gathered_inputs_keeps_two_of_them_whole(tp: int) -> None:
    # The inputs of the two regions, 2·s·b·h each, are whole instead of divided.
    kept, again = (kept_bytes(sharded(tp, Layout(sequence_parallel=True, keep_gathered=k))) for k in (True, False))
    assert kept - again == 2 * 2 * S * B * H * (tp - 1) // tp

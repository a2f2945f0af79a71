"""Communication under ZeRO against the papers' multiples of Ψ, for one Llama 3.1 8B layer and a Mixtral layer.

Ψ is the number of parameters on a rank before ZeRO; bytes are bf16 unless said. Source: Rajbhandari et al. 2020 (ZeRO).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.graph import BF16
from gnomon.models.llama import llama, llama3_1_8b
from gnomon.models.mixtral import mixtral, mixtral_8x7b
from gnomon.plans import Fp8, Layout, Mesh, Optimizer, Precision
from gnomon.sharding import ParameterCollective, ShardedBlock, parameter_collectives, shard_graph
from gnomon.sharding.parameters import local_elements

SIZES = {"batch": 1, "seq": 4096}
ZERO_PAPER = Precision(grad="bf16", reduce="bf16")  # 2Ψ + 2Ψ + 12Ψ
LLAMA = llama(llama3_1_8b())
PSI = 218_112_000
"""One layer: 2·4096² (q, o) + 2·4096·1024 (k, v) + 3·4096·14336 + 2·4096."""


def layer(mesh: Mesh, graph: object = LLAMA) -> ShardedBlock:
    layout = Layout(sequence_parallel=mesh.tp > 1)
    return shard_graph(graph, layout, mesh, SIZES, BF16)["layers"]  # type: ignore[arg-type]


def result(mesh: Mesh, zero: int, **options: bool) -> list[tuple[str, tuple[str, ...], int, str]]:
    optimizer = Optimizer(zero=zero, **options)  # type: ignore[arg-type]
    collectives = parameter_collectives(layer(mesh), mesh, optimizer, ZERO_PAPER)
    return [(c.kind, c.axes, c.bytes, c.when) for c in collectives]


def sent(mesh: Mesh, zero: int) -> int:
    collectives = parameter_collectives(layer(mesh), mesh, Optimizer(zero=zero), ZERO_PAPER)  # type: ignore[arg-type]
    total = sum(collective.sent_bytes for collective in collectives)
    assert isinstance(total, int)
    return total


def test_psi_of_a_layer() -> None:
    by_hand = 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    assert local_elements(layer(Mesh()), experts=False) == by_hand == PSI


@pytest.mark.parametrize(("zero", "multiple"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_zero_communication(zero: int, multiple: int) -> None:
    # In elements: 2Ψ for all-reduce or scatter and gather, 3Ψ when parameters are gathered twice; (n-1)/n of it sent.
    assert sent(Mesh(dp_shard=8), zero) == multiple * 2 * PSI * 7 // 8


def test_what_each_stage_does_and_when() -> None:
    mesh, size = Mesh(dp_shard=8), 2 * PSI
    shard = ("dp_shard", "cp")
    assert result(mesh, 0) == [("all_reduce", ("dp_replicate", *shard), size, "after_backward")]
    assert result(mesh, 1) == [
        ("reduce_scatter", shard, size, "after_backward"),
        ("all_gather", shard, size, "after_step"),
    ]
    assert result(mesh, 3) == [
        ("all_gather", shard, size, "before_forward"),
        ("all_gather", shard, size, "before_backward"),
        ("reduce_scatter", shard, size, "after_backward"),
    ]
    assert len(result(mesh, 3, reshard_after_forward=False)) == 2
    assert result(Mesh(), 3) == []


def test_hybrid_reduces_the_shards_over_replicas() -> None:
    mesh = Mesh(dp_replicate=4, dp_shard=8)
    assert ("all_reduce", ("dp_replicate",), 2 * PSI // 8, "after_backward") in result(mesh, 3)


def test_context_ranks_share_parameters_and_so_shard_them() -> None:
    mesh = Mesh(dp_shard=4, cp=2)
    collectives = parameter_collectives(layer(mesh), mesh, Optimizer(zero=3), ZERO_PAPER)
    assert {collective.ranks for collective in collectives} == {8}


def test_tensor_parallel_sums() -> None:
    def sums(tp: int) -> list[ParameterCollective]:
        mesh = Mesh(tp=tp)
        return [c for c in parameter_collectives(layer(mesh), mesh, Optimizer(), ZERO_PAPER) if c.axes == ("tp",)]

    (norms,) = sums(8)
    assert (norms.bytes, norms.ranks, norms.when) == (2 * 4096 * 2, 8, "before_step")
    # tp 16 over 8 key-value heads: k and v weights of one head are on two ranks.
    _, heads = sums(16)
    assert (heads.bytes, heads.ranks) == (2 * 128 * 4096 * 2, 2)


def test_experts_reduce_over_their_own_replicas() -> None:
    graph, mesh = mixtral(mixtral_8x7b()), Mesh(dp_replicate=2, dp_shard=8, tp=2, ep=4)
    collectives = parameter_collectives(layer(mesh, graph), mesh, Optimizer(zero=1), ZERO_PAPER)
    routed = [c for c in collectives if c.experts]
    # 8 experts of 3·4096·14336 over ep 4; edp = 8·2/4 = 4.
    size = 2 * 3 * 4096 * 14336 * 2
    assert [(c.kind, c.axes, c.ranks, c.bytes) for c in routed] == [
        ("reduce_scatter", ("edp",), 4, size),
        ("all_reduce", ("dp_replicate",), 2, size // 4),
        ("all_gather", ("edp",), 4, size),
    ]
    assert local_elements(layer(mesh, graph), experts=True) * 2 == size


def test_eight_bit_gathers_halve_the_bytes() -> None:
    mesh, sharded = Mesh(dp_shard=8), layer(Mesh(dp_shard=8))
    narrow = replace(ZERO_PAPER, fp8=Fp8(recipe="tensorwise", gather=True))
    gathered = parameter_collectives(sharded, mesh, Optimizer(zero=3), narrow)[0]
    assert (gathered.kind, gathered.bytes) == ("all_gather", PSI)

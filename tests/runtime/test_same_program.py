"""What really ran is the Program: the same actions in the same order, and the bytes that room sharding says.

Seen from outside (`traced`): torch's own functions are watched while a step runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import jobs, parity, traced  # noqa: E402

import gnomon  # noqa: E402
from gnomon.graph import Dtypes, Layer  # noqa: E402
from gnomon.lowering import lower  # noqa: E402
from gnomon.lowering.gradient_buckets import gradient_buckets  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Plan, stage_layers  # noqa: E402
from gnomon.prediction import Prediction  # noqa: E402
from gnomon.program import Key, parse_program  # noqa: E402
from gnomon.runtime.mesh.arrivals import channels, out_of_order  # noqa: E402
from gnomon.runtime.mesh.groups import coordinates  # noqa: E402
from gnomon.runtime.step.rows import program_of  # noqa: E402
from gnomon.sharding import parameter_collectives, shard_graph  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH = llama(parity.CONFIG)
BYTES = [
    "tp", "tp and sp", "tp and sp, whole vocabulary", "tp, whole vocabulary", "tp and sp, gathered logits",
    "tp and sp, cut", "dp",
    "zero 1", "zero 2", "zero 3", "tp 4: two ranks a key head", "dp 2, shard 2",
    "dp, buckets", "pp and dp, buckets", "zero 1, buckets", "zero 2, buckets", "dp 2, shard 2, zero 1, buckets",
    "pp and zero 2, buckets",
    "tp, sp and zero 3", "pp and tp", "pp, tp and sp, v", "interleaved zero bubble, tp and sp", "pp and dp",
    "pp and zero 1", "v min and zero 2", "pp and zero 3", "cp, gathered", "cp, ulysses",
]  # fmt: skip
MESSAGES = ["1f1b", "interleaved", "zero bubble v", "pp and dp", "pp and tp", "pp, tp and sp, v"]


@pytest.mark.parametrize("name", traced.ORDERS)
def test_actions_run_in_the_order_of_the_rows(name: str) -> None:
    for results in jobs.results(parity.PLANS[name].world_size).values():
        ran, rows, *_ = results.traced[name]
        assert ran == rows
        assert len(ran) > 4


@pytest.mark.parametrize("name", traced.ORDERS)
def test_as_many_activations_are_held_as_the_program_says(name: str) -> None:
    for results in jobs.results(parity.PLANS[name].world_size).values():
        held, foreseen = results.traced[name][3]
        assert held == foreseen > 0


@pytest.mark.parametrize("name", BYTES)
def test_collectives_have_the_bytes_that_sharding_says(name: str) -> None:
    """Of every rank. Sums over tp of what ZeRO divides are of a rank's own shard, wherever its norms begin and end:
    they are compared over all shards together."""
    plan = parity.PLANS[name]
    summed: Counter[int] = Counter()
    for rank, results in jobs.results(plan.world_size).items():
        layers = rank_parts(plan, rank)
        want = activation_collectives(plan, layers) + gradient_collectives(plan, layers, rank)
        want["all_reduce", "all", plan.world_size, 8] += 1  # the global norm, a float64
        ran = Counter(call for call in results.traced[name][2] if call[0] not in ("isend", "irecv"))
        if plan.optimizer.zero:
            rest = ran - want
            assert {call[:3] for call in rest} <= {("all_reduce", "tp", plan.mesh.tp)}
            shared = tensor_sums(plan, layers) / plan.mesh.dp_shard
            summed[replica(plan, rank)] += sum(call[3] * times for call, times in rest.items()) - round(shared)
            ran -= rest
        assert ran == want
    assert not any(summed.values())


@pytest.mark.parametrize("name", traced.WHOLE_MATRICES)
def test_updates_of_whole_matrices_communicate_and_keep_what_is_predicted(name: str) -> None:
    """The bytes of `OPT` beside all others of the step, and states. Of ZeRO's shards the states of all together: a
    matrix that is cut has its rows and columns on both sides."""
    plan = replace(traced.WHOLE_MATRICES[name], precision=parity.FP32)
    made = gnomon.predict(GRAPH, "1x2xa100-sxm-80gb", plan, parity.WORKLOAD, stack("gnomon"))
    priced = sum(made.pricing.amounts(key)[0] for key in updates(made))
    states = 0
    for rank, results in jobs.results(plan.world_size).items():
        calls, held = results.updates[name]
        layers = rank_parts(plan, rank)
        usual = activation_collectives(plan, layers) + gradient_collectives(plan, layers, rank)
        usual["all_reduce", "all", plan.world_size, 8] += 1
        ran = Counter(calls)
        assert not usual - ran
        rest = ran - usual
        assert {call[:2] for call in rest} == {
            ("all_gather" if "muon" in name else "all_reduce", "tp" if "tp" in name else "dp_shard")
        }
        assert sum(call[3] * times for call, times in rest.items()) == priced > 0
        states += held
    (memory,) = made.memory
    whole = memory.by_class["states"] * plan.world_size
    assert whole <= states <= whole * (1.25 if name.startswith("adafactor, zero") else 1.0)


def updates(made: Prediction) -> list[Key]:
    """The price key of each update of the Program."""
    program = made.structure.program
    keys = [program.keys[program.key[row]] for row in range(program.num_rows)]
    return [key for key in keys if key.kind == "OPT"]


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_have_the_bytes_of_a_microbatch(name: str) -> None:
    """(sequences of a rank, seq, hidden) in float32, or this rank's tokens of them under sequence parallelism."""
    plan = parity.PLANS[name]
    rows = parity.WORKLOAD.global_batch_size // (plan.schedule.num_microbatches or 1) // plan.mesh.data_ranks
    tokens = parity.WORKLOAD.seq_len // (plan.mesh.tp if plan.layout.sequence_parallel else 1)
    want = rows * tokens * parity.CONFIG.hidden_size * 4
    for results in jobs.results(plan.world_size).values():
        sent = [call for call in results.traced[name][2] if call[0] in ("isend", "irecv")]
        assert len(sent) == sum(action.startswith(("SEND", "RECV")) for action in results.traced[name][1])
        assert {call[1:] for call in sent} == {("pp", 2, want)}


@pytest.mark.parametrize("name", [name for name, plan in parity.PLANS.items() if plan.num_stages > 1])
def test_channels_keep_the_order_of_their_messages(name: str) -> None:
    """So that NCCL, which matches by order, gives each receive the message that it is for."""
    program = program_of(GRAPH, parity.PLANS[name], parity.WORKLOAD)
    assert out_of_order(program) is None
    assert all(source != destination for source, destination, _ in channels(program))


def test_a_message_out_of_order_is_found() -> None:
    """Two forwards whose sends are swapped."""
    text = "gnomon.program/1\nstages 2\nunits 2\nclass 0\n  0F0 0F1 0SEND_F{} 0SEND_F{} 0RECV_B0 0B0 0RECV_B1 0B1\n"
    text += "class 1\n  1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1\n"
    assert out_of_order(parse_program(text.format(0, 1))) is None
    assert out_of_order(parse_program(text.format(1, 0))) == ("X", 1, 0)


def sharded(plan: Plan) -> dict:  # type: ignore[type-arg]
    units = plan.schedule.num_microbatches or 1
    sizes = {
        "batch": parity.WORKLOAD.global_batch_size // units // plan.mesh.data_ranks,
        "seq": parity.WORKLOAD.seq_len,
    }
    return shard_graph(GRAPH, plan.layout, plan.mesh, sizes, Dtypes(param="fp32", compute="fp32"))


Parts = list[tuple[int, list[Layer]]]
"""(stage of the Program, its layers)."""


def rank_parts(plan: Plan, rank: int) -> Parts:
    """What a rank has: stages, layers under ZeRO 3, or buckets."""
    actual, number = Parts(), 0
    if plan.overlap.bucket_bytes is not None:
        layers = [(stage, layer) for stage, part in enumerate(stage_layers(plan, GRAPH)) for layer in part]
        buckets = gradient_buckets(GRAPH, replace(plan, precision=parity.FP32), stage_layers(plan, GRAPH))
        mine = [one for one in buckets if rank in plan.stage_ranks[layers[one[0]][0]]]
        assert len(mine) < sum(map(len, mine))
        return [(one[-1], [layers[i][1] for i in one]) for one in mine]
    for stage, layers in enumerate(stage_layers(plan, GRAPH)):
        for part in [[layer] for layer in layers] if plan.optimizer.zero == 3 else [list(layers)]:
            if rank in plan.stage_ranks[stage]:
                actual.append((number, part))
            number += 1
    return actual


def rank_layers(plan: Plan, rank: int) -> Parts:
    """What a rank has, layer by layer."""
    layers = [(stage, layer) for stage, part in enumerate(stage_layers(plan, GRAPH)) for layer in part]
    return [(number, [layer]) for number, (stage, layer) in enumerate(layers) if rank in plan.stage_ranks[stage]]


def replica(plan: Plan, rank: int) -> int:
    """The first of the ranks that hold the other shards of what `rank` holds."""
    here = coordinates(plan, rank)
    return rank - here.shard * plan.mesh.tp


def activation_collectives(plan: Plan, parts: Parts) -> Counter[traced.Call]:
    """Of a rank's layers and units."""
    result: Counter[traced.Call] = Counter()
    blocks = sharded(plan)
    for layer in (layer for _, layers in parts for layer in layers):
        for collective in blocks[layer.call.block].collectives:
            axes, times = traced.named((collective.axis,), plan.mesh), plan.schedule.num_microbatches or 1
            kind, size = collective.kind, collective.bytes
            op = GRAPH.block(layer.call.block).op(collective.path)
            if plan.overlap.splits and op.kind == "linear" and kind in ("all_gather", "reduce_scatter"):
                kind, size, times = "send_recv", size / collective.ranks, times * (collective.ranks - 1)
            result[kind, axes, collective.ranks, size] += times
    return result


def gradient_collectives(plan: Plan, parts: Parts, rank: int) -> Counter[traced.Call]:
    """Of parameters and gradients: those of a row's layers together, as often as the Program has the row. Without sums
    over tp of what ZeRO divides. Its buckets are of reduce-scatters alone."""
    result: Counter[traced.Call] = Counter()
    bucketed = plan.overlap.bucket_bytes is not None
    fp32 = replace(plan, precision=parity.FP32)
    program = lower(GRAPH, fp32, None, parity.WORKLOAD, by_layer=bucketed)
    rows = Counter(
        (program.kinds[kind].name, stage)
        for kind, stage in zip(program.kind.tolist(), program.stage.tolist(), strict=True)
    )
    apart = bucketed and plan.optimizer.zero > 0
    chosen = [(part, True) for part in parts] + [(part, False) for part in (rank_layers(plan, rank) if apart else ())]
    for (stage, layers), together in chosen:
        for (kind, ranks, axes), size in _sizes(plan, layers).items():
            if (axes == ("tp",) and plan.optimizer.zero) or (apart and together != (kind == "reduce_scatter")):
                continue
            often = rows[ROWS[kind], stage] if plan.optimizer.zero and kind != "all_reduce" else 1
            result[kind, traced.named(axes, plan.mesh), ranks, size] += often
    return result


ROWS = {"all_gather": "UNSHARD", "reduce_scatter": "REDUCE_GRAD"}
"""Collective -> the row that runs it."""


def tensor_sums(plan: Plan, parts: Parts) -> int:
    """Bytes that are added up over tp before the update, of all shards together."""
    return sum(size for _, layers in parts for (*_, axes), size in _sizes(plan, layers).items() if axes == ("tp",))


def _sizes(plan: Plan, layers: list[Layer]) -> Counter[tuple[str, int, tuple[str, ...]]]:
    """(collective, ranks, axes) -> bytes of the layers together."""
    blocks, sizes = sharded(plan), Counter[tuple[str, int, tuple[str, ...]]]()
    for layer in layers:
        once: set[tuple[str, int, tuple[str, ...]]] = set()
        for c in parameter_collectives(blocks[layer.call.block], plan.mesh, plan.optimizer, parity.FP32):
            key = c.kind, c.ranks, c.axes
            if key not in once:  # the gathers before forward and backward are two rows
                sizes[key] += int(c.bytes)
            once.add(key)
    return sizes

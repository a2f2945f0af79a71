"""Batches of several lengths, and ChunkFlow over them: units are priced by their tokens and what lies before them.

The bubbles of the paper's example (42, 44 and 46 seconds, by K and warm-up) are in tests/cases/chunkflow.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.errors import PlanError, UnpricedError
from gnomon.lowering.units import worker_units
from gnomon.models.presets import graph_of
from gnomon.plans import Layout, Mesh, Optimizer, Pass, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict

K = 1024
PLAN = Plan(
    mesh=Mesh(pp=2, tp=2),
    layout=Layout(sequence_parallel=True),
    schedule=Schedule(micro_batch_size=1),
    optimizer=Optimizer(clip=False),
)


def chunked(plan: Plan = PLAN, **params: int) -> Plan:
    passes = (Pass(name="chunkflow", params=tuple(params.items())),)
    return replace(plan, schedule=replace(plan.schedule, passes=passes))


def predicted(plan: Plan, *lengths: int, model: str = "llama-3.2-1b") -> Prediction:
    return predict(model, f"{plan.mesh.world_size}xh100-sxm", plan, Workload(lengths=lengths))


def compute_s(prediction: Prediction, kinds: str = "FBCR") -> float:
    """Seconds of computing on the first rank, each action for itself."""
    keys, counts = prediction.structure.program.keys, Counter(prediction.structure.program.key.tolist())
    return sum(
        float(prediction.durations.busy[at]) * times
        for at, times in counts.items()
        if keys[at].rank_class == 0 and keys[at].kind in kinds
    )


def test_chunks_as_long_as_every_sequence_are_the_plain_plan() -> None:
    """Then nothing is cut or packed, and ChunkFlow is 1F1B."""
    plain = predicted(PLAN, *[2 * K] * 6)
    flow = predicted(chunked(chunk_size=2 * K), *[2 * K] * 6)
    assert flow.step_s == plain.step_s
    assert [rank.peak_bytes for rank in flow.memory] == [rank.peak_bytes for rank in plain.memory]


def test_a_batch_of_two_lengths_costs_the_sum_of_its_sequences() -> None:
    """On one rank without a pipeline: the forwards and backwards of each batch of one length, added."""
    alone = replace(PLAN, mesh=Mesh(), layout=Layout())
    both = compute_s(predicted(alone, 8 * K, 2 * K, 8 * K, 2 * K))
    apart = sum(compute_s(predicted(alone, length, length)) for length in (8 * K, 2 * K))
    assert both == pytest.approx(apart, rel=1e-6)


def test_attention_of_chunks_is_that_of_the_whole_sequence() -> None:
    """A chunk attends to all before it: 32K in chunks of 8K costs what 32K at once costs, within what kernels of
    another shape differ by; packed as four sequences of 8K it costs much less."""
    alone = replace(PLAN, mesh=Mesh(), layout=Layout())
    whole = compute_s(predicted(alone, 32 * K, 32 * K))
    cut = compute_s(predicted(chunked(alone, chunk_size=8 * K, keep=0), 32 * K, 32 * K))
    packed = compute_s(predicted(alone, *[8 * K] * 8))
    assert cut == pytest.approx(whole, rel=0.05)
    assert packed < 0.8 * whole


def test_memory_is_nearly_flat_in_the_longest_sequence() -> None:
    """Its oracle: K chunks of activations, and what is there of the whole sequence: on the second rank, of 8 layers, a
    chunk of 4K more is keys and values (2 x 512 x 2 bytes a token and layer, half of them under tp 2), as much of
    their gradients, and the input that is run again (2048 x 2 bytes a token, half under sequence parallelism)."""
    flow, short = chunked(chunk_size=4 * K, keep=1), [K] * 8
    small, large = (predicted(flow, length, *short).memory[1].allocated_bytes for length in (16 * K, 64 * K))
    keys, again = 2 * 512 * 2 * 4 * K * 8 // 2, 2048 * 2 * 4 * K // 2
    assert large - small == 12 * (2 * keys + again)
    plain = [predicted(PLAN, length, *short).memory[1].allocated_bytes for length in (16 * K, 64 * K)]
    assert large - small < 0.05 * (plain[1] - plain[0])


def test_all_chunks_but_the_last_k_run_forward_twice() -> None:
    """(n - K) / n of the paper: 16 chunks, of which 4 stay."""
    flow = predicted(chunked(chunk_size=2 * K, keep=4), 32 * K)
    kinds = Counter(flow.structure.program.kinds[kind].name for kind in flow.structure.program.kind.tolist())
    assert (kinds["C"], kinds["F"], kinds["R"], kinds["B"]) == (24, 8, 24, 32)
    assert flow.hfu > flow.mfu
    assert sum(flow.breakdown.values()) == flow.step_s


def test_workers_get_sequences_by_tokens_and_the_slowest_decides() -> None:
    two = replace(PLAN, mesh=Mesh(pp=2, dp_shard=2))
    lengths = (16 * K, *[K] * 15)
    own = worker_units(graph_of("llama-3.2-1b"), chunked(two, chunk_size=4 * K), Workload(lengths=lengths))
    assert [sum(unit.tokens for unit in units) for units in own] == [16 * K, 15 * K]
    assert {sequence for units in own for unit in units for sequence, _, _ in unit.pieces} == set(range(16))
    flow = predicted(chunked(two, chunk_size=4 * K), *lengths)
    lone = predicted(chunked(replace(PLAN, mesh=Mesh(pp=2)), chunk_size=4 * K), 16 * K)
    assert flow.step_s > lone.step_s
    assert flow.step_s == pytest.approx(lone.step_s, rel=0.1)


def test_what_has_no_price_is_refused() -> None:
    with pytest.raises(PlanError, match="chunkflow cannot be used in this plan: cp = 2"):
        predicted(chunked(replace(PLAN, mesh=Mesh(cp=2))), K, 2 * K)
    with pytest.raises(UnpricedError, match="carry a state along a sequence"):
        predicted(Plan(schedule=Schedule(micro_batch_size=1)), K, 2 * K, model="nemotron-h-8b")
    with pytest.raises(UnpricedError, match="sees tokens after its own"):
        predicted(chunked(chunk_size=256), 512, 256, model="bert-large")


def test_lengths_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'schema = "gnomon.plan/1"\n[mesh]\npp = 2\n[schedule]\nmicro_batch_size = 1\n'
        'passes = [{name = "chunkflow", params = [["chunk_size", 4096], ["keep", 2]]}]\n'
    )
    listed = tmp_path / "lengths.txt"
    listed.write_text("\n".join(["16384", *["1024"] * 7]))
    texts = []
    for words in ("16k,1024x7", str(listed)):
        asked = ["predict", "llama-3.2-1b", "--on", "2xh100-sxm", "--plan", str(plan), "--lengths", words]
        assert main(asked) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert "one_f_one_b + chunkflow, 8 sequences of 1024 to 16384 tokens" in texts[0]
    assert main([*asked, "--seq-len", "1024"]) == 2
    assert "--lengths gives every sequence" in capsys.readouterr().err

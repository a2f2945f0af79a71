"""Sequences of several lengths, cut, packed and divided, train as transformers does on each by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime import lengths  # noqa: E402
from runtime.lengths import Case, chunkflow, planned, skrull  # noqa: E402
from runtime.one_process import alone  # noqa: E402
from runtime.parity import FP64  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.gpt import GptConfig, gpt  # noqa: E402
from gnomon.plans import Layout, Lengths, Mesh, Pass, Plan, Schedule, Workload  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402

pytestmark = pytest.mark.torch

LIMIT = 1e-9
SP, RING, GATHER = Layout(sequence_parallel=True), Layout(context="ring"), Layout(context="all_gather")
IN_ORDER = Layout(context="ring", context_order="contiguous")


def llama(plan: Plan) -> Case:
    return Case(kind="llama", plan=plan)


ONE = {
    "packed": llama(planned(size=8)),
    **{f"chunks, K {keep}": llama(planned(Mesh(), *chunkflow(keep))) for keep in (1, 2, 4)},
    "packing": llama(planned(Mesh(), Pass(name="packing", params=(("tokens", 40),)))),
    "sorted and padded": llama(planned(Mesh(), Pass(name="group_by_length"), Pass(name="padding"))),
    "packing, ZeRO 3": llama(planned(Mesh(), Pass(name="packing"), zero=3)),
    "chunks, ZeRO 3": llama(planned(Mesh(), *chunkflow(2), zero=3)),
    "chunks, recomputed": llama(planned(Mesh(), *chunkflow(2), preset="selective")),
    "chunks, capped scores": Case(kind="gemma2", plan=planned(Mesh(), *chunkflow(1))),
    "chunks, sinks and windows": Case(kind="gpt_oss", plan=planned(Mesh(), *chunkflow(1), preset="full")),
    "chunks, narrow values": Case(kind="deepseek_v3", plan=planned(Mesh(), *chunkflow(2))),
    "chunks, learned positions": Case(kind="gpt2", plan=planned(Mesh(), *chunkflow(0))),
}
TWO = {
    "dp, chunks, ZeRO 1": llama(planned(Mesh(dp_shard=2), *chunkflow(1), zero=1)),
    "dp, ZeRO 2": llama(planned(Mesh(dp_shard=2), zero=2)),
    "pp, chunks": llama(planned(Mesh(pp=2), *chunkflow(1))),
    "pp, packed": llama(planned(Mesh(pp=2))),
    "tp, chunks": llama(planned(Mesh(tp=2), *chunkflow(1), layout=SP)),
    "dp, packing": llama(planned(Mesh(dp_shard=2), Pass(name="packing"))),
    "ep": Case(kind="mixtral", plan=planned(Mesh(dp_shard=2, ep=2))),
    "cp, ulysses": llama(planned(Mesh(cp=2), layout=Layout(context="ulysses"))),
    "cp, ring": llama(planned(Mesh(cp=2), layout=IN_ORDER)),
    "cp, packing, ZeRO 3": llama(planned(Mesh(cp=2), Pass(name="packing"), layout=RING, zero=3)),
    "cp, skrull, ZeRO 3": llama(planned(Mesh(cp=2), *skrull(20), layout=RING, zero=3)),
    "cp, skrull": llama(planned(Mesh(cp=2), *skrull(20), layout=RING)),
    "cp, padded": llama(planned(Mesh(cp=2), Pass(name="padding"), layout=GATHER)),
    "cp, skrull, ulysses": llama(planned(Mesh(cp=2), *skrull(20), layout=Layout(context="ulysses"))),
    "cp, skrull, three styles": llama(
        planned(
            Mesh(cp=2),
            Pass(name="skrull", params=(("capacity", 15), ("gather_up_to", 12), ("ulysses_up_to", 16))),
            layout=RING,
        )
    ),
    "cp, skrull, narrow values": Case(kind="deepseek_v3", plan=planned(Mesh(cp=2), *skrull(20), layout=GATHER)),
}
FOUR = {
    "cp 4, skrull": llama(planned(Mesh(cp=4), *skrull(12), layout=RING)),
    "dp and cp, skrull, ZeRO 1": llama(planned(Mesh(dp_shard=2, cp=2), *skrull(20), layout=GATHER, zero=1)),
    "a mixture, sorted, pp, ep, ZeRO 1, recomputed": Case(
        kind="qwen3_moe",
        plan=planned(Mesh(pp=2, dp_shard=2, ep=2), Pass(name="group_by_length"), zero=1, preset="full"),
    ),
    "a mixture in chunks, pp, tp and ep": Case(
        kind="qwen3_moe", plan=planned(Mesh(pp=2, tp=2, ep=2), *chunkflow(1), layout=SP, zero=1)
    ),
    "pp and tp, chunks": llama(planned(Mesh(pp=2, tp=2), *chunkflow(1), layout=SP)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    """Weights and gradients of each model, and the losses."""
    folder = tmp_path_factory.mktemp("lengths")
    kinds = sorted({case.kind for cases in (ONE, TWO, FOUR) for case in cases.values()})
    return folder, {kind: lengths.prepared(kind, folder) for kind in kinds}


@pytest.mark.parametrize("cases", [ONE, TWO, FOUR], ids=["one process", "two", "four"])
def test_gradients_are_those_of_each_sequence_by_itself(
    cases: dict[str, Case], models: tuple[Path, dict[str, float]]
) -> None:
    (size,) = {case.plan.world_size for case in cases.values()}
    for rank, found in launch(lengths.all_of, size, cases, *models).items():
        for name, (loss, gradient) in found.items():
            assert loss < LIMIT and gradient < LIMIT, (rank, name, loss, gradient)


def test_what_lengths_cannot_be_run_with_is_said() -> None:
    config = GptConfig(name="g", num_layers=2, hidden_size=16, num_heads=4, vocab_size=96, max_positions=64)
    graph, work = gpt(config), Workload(lengths=(8, 3))
    with alone():
        executor = Executor(graph, planned(size=1), work)
        with pytest.raises(PlanError, match="a step takes 2 sequences, not 3"):
            executor.step(lengths.batch((3, 3, 2)))
        with pytest.raises(PlanError, match="a sequence has 9 tokens, and the plan is for at most 8"):
            executor.step(lengths.batch((9, 2)))
        with pytest.raises(PlanError, match="add up to them"):
            executor.step({**lengths.batch((8, 3)), "lengths": torch.tensor([8, 4])})
        rows = {name: torch.zeros(2, 8, dtype=torch.int64) for name in ("input_ids", "labels")}
        for odd in ((8, 0), (8, -1), (9, 3), (8,)):
            with pytest.raises(PlanError, match="a row for each, and lengths of at most a row"):
                executor.step({**rows, "lengths": torch.tensor(odd)})
        for flat in ({}, {"lengths": torch.tensor([8, 3])}, {**rows, "labels": rows["labels"][:1]}):
            with pytest.raises(PlanError, match="lengths of 1 or more that add up to them"):
                executor.step(flat)
        executor.leave()
        drawn = replace(work, lengths=(), global_batch_size=2, distribution=Lengths(values=(8, 4), weights=(1.0, 1.0)))
        with pytest.raises(PlanError, match="learned positions|64"):
            Executor(graph, planned(size=1), replace(work, lengths=(65, 3)))
        executor = Executor(graph, Plan(schedule=Schedule(num_microbatches=1), precision=FP64), drawn)
        executor.step(lengths.batch((4, 8)))
        executor.leave()

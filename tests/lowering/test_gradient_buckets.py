"""Gradient buckets: which layers share one, where its row stands, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import gnomon
from gnomon.errors import PlanError
from gnomon.lowering import lower
from gnomon.lowering.gradient_buckets import gradient_buckets
from gnomon.models.presets import model
from gnomon.plans import Mesh, Offload, Optimizer, Overlap, Plan, Schedule, Workload, stage_layers
from gnomon.program import Program, validate
from gnomon.software import own, stack

GRAPH, WORKLOAD = model("llama-tiny"), Workload(global_batch_size=8, seq_len=64)
LAYERS = len(GRAPH.layers())


def plan(size: int | None, mesh: Mesh = Mesh(dp_replicate=2), name: str = "one_f_one_b") -> Plan:  # noqa: B008
    return Plan(mesh=mesh, schedule=Schedule(name=name, num_microbatches=4), overlap=Overlap(bucket_bytes=size))


def rows(program: Program) -> list[str]:
    return [program.token(row) for row in range(program.num_rows)]


@pytest.mark.parametrize(("size", "count"), [(1, LAYERS), (1 << 40, 1)])
def test_the_smallest_buckets_are_layers_and_the_largest_is_the_stage(size: int, count: int) -> None:
    program = lower(GRAPH, plan(size), None, WORKLOAD, by_layer=True)
    assert sum("AR" in token for token in rows(program)) == count


def test_a_bucket_comes_right_after_the_last_backward_of_its_layers() -> None:
    """And after no other layer's: what is left of backward runs beside it."""
    for mesh in (Mesh(dp_replicate=2), Mesh(pp=2, dp_replicate=2)):
        program = lower(GRAPH, plan(4_000_000, mesh), None, WORKLOAD, by_layer=True)
        kinds = [kind.name for kind in program.kinds]
        seen = set[int]()
        for row in [row for row in range(program.num_rows) if kinds[program.kind[row]] == "AR"]:
            override = program.overrides.get(row)
            of = {int(program.stage[row])}
            if override is not None and override.effects is not None:
                of = {effect.ref.stage for effect in override.effects}
            assert kinds[program.kind[row - 1]] == "B"
            assert int(program.stage[row - 1]) == min(of)
            assert not seen & of
            seen |= of
        assert seen == set(range(LAYERS))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_go_to_the_host_once_their_bucket_is_reduced(zero: int, overlap: bool) -> None:
    """And once the norm is known that scales them; each layer's once, in so many tiles."""
    mesh = Mesh(pp=2, dp_shard=2) if zero else Mesh(pp=2, dp_replicate=2)
    buckets = Overlap(bucket_bytes=4_000_000, grad_reduce=overlap or zero == 3)
    moved = Optimizer(zero=zero, offload=Offload(tiles=2))  # type: ignore[arg-type]
    program = lower(GRAPH, replace(plan(1, mesh), overlap=buckets, optimizer=moved), None, WORKLOAD, by_layer=True)
    validate(program)
    kinds = [program.kinds[kind].name for kind in program.kind]
    down, reduced, several = Counter[int](), set[int](), 0
    for cls in range(program.num_classes):
        measured = False
        for row in range(int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])):
            override, of = program.overrides.get(row), {int(program.stage[row])}
            if override is not None and override.effects is not None:
                of = {effect.ref.stage for effect in override.effects}
            if kinds[row] in ("AR", "REDUCE_GRAD"):
                reduced |= of
                several += len(of) > 1
            elif kinds[row] == "D2H":
                assert of <= reduced and measured
                down.update(of)
            measured = measured or kinds[row] == "NORM"
    assert several and down == dict.fromkeys(range(LAYERS), 1)
    assert kinds.count("D2H") == 4 and "OPT" not in kinds


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_reduces_buckets_as_often_as_it_does_layers_and_gathers_layer_by_layer(zero: int) -> None:
    """ZeRO 1 once a step, others after each of four microbatches; right after the last backward of its layers."""
    for mesh in (Mesh(dp_shard=2), Mesh(pp=2, dp_shard=2), Mesh(dp_replicate=2, dp_shard=2)):
        whole = replace(plan(4_000_000, mesh), optimizer=Optimizer(zero=zero))  # type: ignore[arg-type]
        program = lower(GRAPH, whole, None, replace(WORKLOAD, global_batch_size=16), by_layer=True)
        validate(program)
        kinds = [program.kinds[kind].name for kind in program.kind]
        reduced = Counter[int]()
        for row in [row for row, kind in enumerate(kinds) if kind == "REDUCE_GRAD"]:
            override, of = program.overrides.get(row), {int(program.stage[row])}
            if override is not None and override.effects is not None:
                of = {effect.ref.stage for effect in override.effects}
            before = next(i for i in range(row - 1, -1, -1) if kinds[i] not in ("UNSHARD", "RESHARD"))
            assert kinds[before] == "B" and int(program.stage[before]) == min(of)
            reduced.update(of)
        assert reduced == dict.fromkeys(range(LAYERS), 1 if zero == 1 else 4)
        assert kinds.count("REDUCE_GRAD") < sum(reduced.values())
        assert zero == 3 or kinds.count("UNSHARD") == LAYERS
        assert kinds.count("AR") == (LAYERS if mesh.dp_replicate > 1 else 0)


def test_without_bucket_bytes_no_row_changes() -> None:
    assert rows(lower(GRAPH, plan(200_000), None, WORKLOAD)) == rows(lower(GRAPH, plan(None), None, WORKLOAD))


def test_a_bucket_is_priced_as_one_all_reduce_and_the_clock_shows_what_overlaps() -> None:
    """Fewer, larger messages take less time together; one for everything has no backward beside it."""
    slow = "1x2xa100-sxm-80gb"
    fine, coarse = (gnomon.predict(GRAPH, slow, plan(size), WORKLOAD, stack(own.NAME)) for size in (1, 1 << 40))

    def reduced(prediction: gnomon.Prediction) -> float:
        keys = prediction.structure.program.keys
        return sum(prediction.pricing.seconds(key) for key in keys if key.kind == "AR")

    assert len(fine.structure.program.keys) > len(coarse.structure.program.keys)
    assert reduced(fine) > reduced(coarse)


def test_schedules_without_rows_of_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="want a row for each layer"):
        two = Plan(
            mesh=Mesh(pp=2, dp_replicate=2),
            schedule=Schedule(name="dualpipe_v", num_microbatches=4, virtual_stages=2, placement="v"),
            overlap=Overlap(bucket_bytes=1),
        )
        lower(GRAPH, two, None, WORKLOAD, by_layer=True)


def test_a_search_for_the_runtime_says_that_it_takes_gradients_at_once() -> None:
    assert "leave overlap.bucket_bytes and overlap.buckets out" in (own.search_reason(plan(1)) or "")
    assert own.search_reason(plan(None)) is None


def test_buckets_of_so_many_layers_each() -> None:
    counts = (LAYERS - 3, 1, 2)
    given = replace(plan(None), overlap=Overlap(buckets=counts))
    found = gradient_buckets(GRAPH, given, stage_layers(given, GRAPH))
    assert [len(one) for one in found] == [2, 1, LAYERS - 3] and found[0] == (LAYERS - 1, LAYERS - 2)
    piped = replace(given, mesh=Mesh(pp=2, dp_replicate=2))
    (first, _) = map(len, stage_layers(piped, GRAPH))
    whole = replace(piped, overlap=Overlap(buckets=(first, LAYERS - first)))
    assert len(gradient_buckets(GRAPH, whole, stage_layers(whole, GRAPH))) == 2
    for wrong in ((LAYERS,), (LAYERS - 1,), (first, LAYERS - first, 1)):
        with pytest.raises(PlanError, match="let a number end where a stage does"):
            lower(GRAPH, replace(piped, overlap=Overlap(buckets=wrong)), None, WORKLOAD, by_layer=True)
    fused = replace(piped, overlap=Overlap(buckets=(first, LAYERS - first), fused=(1, *(LAYERS - 2) * (1,), 1)))
    assert gradient_buckets(GRAPH, fused, stage_layers(fused, GRAPH)) == gradient_buckets(
        GRAPH, whole, stage_layers(whole, GRAPH)
    )
    cut = replace(given, overlap=Overlap(buckets=(1, LAYERS - 1), fused=(2, LAYERS - 2)))
    with pytest.raises(PlanError, match="let buckets end where groups do"):
        gradient_buckets(GRAPH, cut, stage_layers(cut, GRAPH))
    with pytest.raises(PlanError, match="without bucket_bytes"):
        Overlap(buckets=(1, 2), bucket_bytes=1)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_actions_of_several_layers_have_the_price_of_a_layer_or_of_a_stage_at_the_ends(zero: int) -> None:
    """Groups of one layer are a row for each layer; in between there is a forward and a backward a group."""
    mesh = Mesh(dp_shard=2) if zero else Mesh(dp_replicate=2)
    base = replace(plan(None, mesh), optimizer=Optimizer(zero=zero))  # type: ignore[arg-type]

    def predicted(overlap: Overlap) -> gnomon.Prediction:
        return gnomon.predict(GRAPH, "1x2xa100-sxm-80gb", replace(base, overlap=overlap), WORKLOAD, stack(own.NAME))

    singles, layers = predicted(Overlap(fused=(1,) * LAYERS)), predicted(Overlap(bucket_bytes=1))
    assert (singles.step_s, singles.tightest.by_class) == (layers.step_s, layers.tightest.by_class)
    groups = (2, LAYERS - 3, 1)
    fused = predicted(Overlap(fused=groups))
    tokens = rows(fused.structure.program)
    assert sum(token.endswith("F0") for token in tokens) == len(groups)
    reduced = "REDUCE_GRAD" if zero else "AR"
    assert sum(reduced in token for token in tokens) == len(groups) * (4 if zero == 2 else 1)

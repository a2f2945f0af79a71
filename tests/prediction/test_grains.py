"""A row for each layer and a row for each stage are two grains of one plan: where nothing acts inside a stage, they
have the same period and the same peak."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Layout, Mesh, Plan, Saved, Schedule, Workload
from gnomon.plans.parts import Preset
from gnomon.prediction.predict import TimedPlan
from gnomon.software import Stack, stack

STACKS = (Stack(name="unstated", version=""), stack("gnomon"), stack("megatron-lm"), stack("torchtitan"))


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["llama-3.1-8b", "mixtral-8x7b"]),
    mesh=st.builds(Mesh, pp=st.sampled_from([1, 2, 4]), tp=st.sampled_from([1, 2, 4])),
    schedule=st.sampled_from(
        ["gpipe", "one_f_one_b", "interleaved_one_f_one_b", "zero_bubble_h1", "looped_bfs", "zero_bubble_v", "v_half"]
    ),
    preset=st.sampled_from(["none", "selective", "full"]),
    microbatches=st.sampled_from([1, 4, 8]),
    seq_len=st.sampled_from([256, 1024, 8192]),
    software=st.sampled_from(STACKS),
)
def test_both_grains_agree_where_nothing_acts_inside_a_stage(
    name: str, mesh: Mesh, schedule: str, preset: Preset, microbatches: int, seq_len: int, software: Stack
) -> None:
    """Without data parallelism (of experts either), whose gradients are reduced layer by layer, and without weights
    tied over stages, which meet when the layers that hold them are done; whether the device or the host's launches
    bound a layer, and whether a backward is whole or in halves."""
    if name == "mixtral-8x7b":
        mesh = replace(mesh, tp=1)
    v_shaped, virtual = schedule in ("zero_bubble_v", "v_half"), 1
    if v_shaped or schedule in ("interleaved_one_f_one_b", "looped_bfs"):
        mesh, microbatches, virtual = replace(mesh, pp=max(mesh.pp, 2)), max(microbatches, 8), 2
    nodes = max(1, mesh.world_size // 8)
    cluster = parse_cluster(f"{nodes}x{mesh.world_size // nodes}xh100-sxm")
    order = Schedule(name=schedule, micro_batch_size=1, virtual_stages=virtual, placement="v" if v_shaped else "loop")
    layout = Layout(sequence_parallel=mesh.tp > 1)
    plan = Plan(mesh=mesh, schedule=order, saved=Saved(preset=preset), layout=layout)
    work = Workload(global_batch_size=microbatches, seq_len=seq_len)
    stages, layers = (
        TimedPlan.of(model(name), cluster, plan, work, software, by_layer=by_layer).prediction()
        for by_layer in (False, True)
    )
    assert layers.structure.program.num_stages > stages.structure.program.num_stages
    assert layers.step_s == pytest.approx(stages.step_s, rel=1e-6)
    for one, other in zip(stages.memory, layers.memory, strict=True):
        assert other.peak_bytes == pytest.approx(one.peak_bytes, rel=1e-6)

"""What Gnomon's own runtime can run is one list: the search, predictions and `--refine` say what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gnomon.models.presets import model
from gnomon.plans import Mesh, Offload, Optimizer, Overlap, Pass, Plan, Precision, Saved, Schedule
from gnomon.search.refinement.choices import CHOICES, runs
from gnomon.search.space.points import stack_limits
from gnomon.software import own, stack, unsupported

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")


@pytest.mark.parametrize(
    ("plan", "lacks"),
    [
        (Plan(), ()),
        (Plan(mesh=Mesh(cp=2, ep=2)), ()),
        (Plan(overlap=Overlap(bucket_bytes=1 << 20)), ()),
        (
            Plan(overlap=Overlap(bucket_bytes=1 << 20), schedule=Schedule(passes=(Pass(name="mario"),))),
            (
                "overlap.bucket_bytes, buckets or fused with schedule.passes other than dapple_warmup, or a schedule "
                "whose rows hold several actions",
            ),
        ),
        (Plan(optimizer=Optimizer(offload=Offload(), delay=1, zero=2)), ()),
        (
            Plan(optimizer=Optimizer(offload=Offload(fraction=0.5), delay=1)),
            ("optimizer.delay without optimizer.offload, or with that of some layers beside clipping or fp16",),
        ),
    ],
)
def test_a_prediction_names_what_a_run_would_refuse(plan: Plan, lacks: tuple[str, ...]) -> None:
    assert own.lacking(plan) == lacks == unsupported(stack(own.NAME), plan)
    assert bool(own.plan_reason(plan)) == bool(lacks)


def test_refine_tries_what_is_run_and_no_more() -> None:
    """Each choice that is refused is one of the search's, and sets a field that a run refuses."""
    names = {choice.name for choice in CHOICES}
    assert names > own.REFUSED_CHOICES
    assert {name for name in names if runs(stack(own.NAME), name)} == names - own.REFUSED_CHOICES


def test_axes_that_no_plan_may_have_follow_from_the_same_list() -> None:
    graph = model("llama-tiny")
    limits = list(own.limits(graph, Plan(), (1, 2, 3)))
    assert [(axis, value) for axis, value, _ in limits] == [("tp", 3)]  # a vocabulary of 512
    muon = Plan(optimizer=Optimizer(kind="muon"))
    assert not list(own.limits(graph, muon, (1, 2)))
    on_host = Plan(optimizer=Optimizer(kind="muon", offload=Offload(), delay=1))
    refused = {(axis, value) for axis, value, _ in own.limits(graph, on_host, (1, 2))}
    assert refused == {("tp", 2), ("zero", 1), ("zero", 2), ("zero", 3)}
    every = Plan(saved=Saved(preset="full", every=2))
    assert {(axis, value) for axis, value, _ in own.limits(graph, every)} == {("zero", 3)}
    adapters = model("llama-tiny+lora8")
    assert [value for axis, value, _ in own.limits(adapters, Plan()) if axis == "zero"] == []
    assert not [limit for limit in stack_limits(stack(own.NAME), graph, Plan(), (1, 2)) if limit.field == "cp"]


def test_dtypes_that_are_mixed_or_missing() -> None:
    assert own.precision_reason(FP32) is own.precision_reason(Precision()) is None
    assert "make each pair alike" in str(own.precision_reason(replace(FP32, reduce="bf16")))
    for name in own.DTYPES:
        wide = replace(FP32, param=name, compute=name, grad=name, reduce=name, states=name)
        assert own.precision_reason(wide) is None

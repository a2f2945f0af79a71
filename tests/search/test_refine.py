"""Refinement: gains are the simulator's, what is fixed or forbidden holds, and only what a stack runs is taken."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from search.spaces import case, with_disks

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import parse_cluster
from gnomon.methods import methods_named
from gnomon.models.presets import model
from gnomon.plans import Goal, Optimizer, Plan, RouterLoad, Workload
from gnomon.prediction import predict
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.report.prediction import has_choices
from gnomon.search import Result, plan, solve
from gnomon.search.refinement.choices import (
    CHOICES,
    NAMES,
    Value,
    allowed,
    choice,
    described,
    fixed_base,
    of_method,
    parse_choice_limit,
    read_value,
    runs_value,
    with_load,
)
from gnomon.search.refinement.refine import QUICK, THOROUGH, refine
from gnomon.software import Stack, own, stack, stacks

CLUSTER = parse_cluster("2x4xa100-sxm-80gb")
WORK = Workload(global_batch_size=16, seq_len=2048)
FIXED = {
    "pp": 1,
    "schedule": "one_f_one_b",
    "recompute": "none",
    "keep_gathered": False,
    "overlap": True,
    "cp": 1,
    "tp": 1,
    "dp_replicate": 1,
}


@cache
def searched(zero: int = 3, memory: int | None = None, clip: bool = True) -> Result:
    base = Plan(optimizer=Optimizer(clip=clip))
    return plan("llama-3.2-1b", CLUSTER, WORK, goal=Goal(memory_bytes=memory), base=base, fixed={**FIXED, "zero": zero})


def every(of: Stack = PLAIN_STACK, **given: object) -> tuple[object, ...]:
    return allowed(of, allow=given.get("allow", ()), forbid=given.get("forbid", ()), fixed=given.get("fixed", ()))  # type: ignore[arg-type]


def test_each_step_gains_and_is_a_prediction_of_its_plan() -> None:
    result = searched()
    refined = refine(result, choices=every())  # type: ignore[arg-type]
    before = (
        refined.start.step_s if refined.start.prediction.tightest.peak_bytes <= result.limit_bytes else float("inf")
    )
    for step in refined.steps:
        assert step.prediction.step_s < before and step.choice.of(step.prediction.plan) == step.after
        before = step.prediction.step_s
    again = predict(result.graph, CLUSTER, refined.best.plan, WORK)
    assert again.step_s == refined.best.step_s <= result.best[0].step_s
    assert again.tightest.peak_bytes <= result.limit_bytes and refined.complete


def test_the_quick_way_tries_each_choice_once_and_keeps_what_is_worth_it() -> None:
    result = searched()
    refined = refine(result, choices=every(), effort=QUICK)  # type: ignore[arg-type]
    names = [step.choice.name for step in refined.steps]
    assert len(names) == len(set(names)) and refined.tried <= QUICK.tries and refined.starts <= 1 + QUICK.large
    before = refined.start.step_s
    for step in refined.steps:
        assert step.prediction.step_s < before * (1 - QUICK.gain)
        before = step.prediction.step_s
    none = refine(result, choices=every(), effort=replace(QUICK, gain=0.9))  # type: ignore[arg-type]
    assert none.steps == () and none.best is none.start
    few = refine(result, choices=every(), effort=replace(QUICK, tries=2))  # type: ignore[arg-type]
    assert few.tried == 2 and not few.complete


def test_no_single_change_gains_in_the_end() -> None:
    result = searched()
    refined = refine(result, choices=every(), effort=replace(THOROUGH, starts=1, large=1))  # type: ignore[arg-type]
    looked = 0
    for option in CHOICES:
        for value in () if option.on_request else option.values(refined.best.plan, result.graph, CLUSTER):
            try:
                other = predict(result.graph, CLUSTER, option.make(refined.best.plan, result.graph, value), WORK)
            except GnomonError:
                continue
            if other.tightest.peak_bytes <= result.limit_bytes:
                looked += 1
                assert other.step_s > refined.best.step_s * (1 - 2e-4), (option.name, value)
    assert looked > 5


def test_a_plan_that_was_too_large_may_fit_with_a_choice() -> None:
    """Under a limit just below what one of the best takes, what is found fits, and is as fast as the search's best."""
    free = searched(zero=1, clip=False)
    most = max(candidate.prediction.tightest.peak_bytes for candidate in free.best)
    result = searched(zero=1, memory=most - 2**20, clip=False)
    refined = refine(result, choices=every())  # type: ignore[arg-type]
    assert refined.best.prediction.tightest.peak_bytes <= result.limit_bytes
    assert refined.best.step_s <= result.best[0].step_s


def test_what_is_fixed_or_forbidden_holds() -> None:
    result = searched()
    held = refine(result, choices=every(fixed=("prefetch",)), fixed={"prefetch": 0})  # type: ignore[arg-type]
    assert held.best.plan.overlap.prefetch == 0
    shut = parse_choice_limit("reshard_after_forward")
    assert shut is not None
    assert "reshard_after_forward" not in {entry.name for entry in every(forbid=(shut,))}  # type: ignore[attr-defined]
    most = parse_choice_limit("prefetch>1")
    assert most is not None and most.forbids(2) and not most.forbids(1)
    limited = refine(result, choices=every(), forbid=(most,))  # type: ignore[arg-type]
    assert limited.best.plan.overlap.prefetch <= 1
    assert parse_choice_limit("pp>1") is None
    with pytest.raises(PlanError, match="has no order"):
        parse_choice_limit("order>pp")


def test_what_is_fixed_and_means_nothing_is_said() -> None:
    result = searched(zero=1)
    alone = refine(result, choices=(), fixed={"async_tp": True})
    assert (alone.idle == ("async_tp",)) == (alone.best.plan.mesh.tp == 1)
    held = refine(result, choices=(), fixed={"activation_offload": 3})
    assert held.idle == () and held.best.plan.saved.rules[0].first_per_stage == 3
    assert held.best.prediction.tightest.peak_bytes < result.best[0].prediction.tightest.peak_bytes


def test_only_what_a_stack_runs_and_the_user_allows_is_tried() -> None:
    assert {entry.name for entry in every()} == {*NAMES} - {"fp8"}  # type: ignore[attr-defined]
    assert "fp8" in {entry.name for entry in every(allow=("fp8",))}  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="did you mean"):
        every(allow=("fp9",))
    for name in stacks():
        program = stack(name)
        assert set(program.runs.choices) <= {*NAMES, "cpu_offload"}, name  # `fit` asks that of both offloads
        tried = {entry.name for entry in every(program, allow=NAMES)}  # type: ignore[attr-defined]
        if name == own.NAME:
            assert tried == {*NAMES} - own.REFUSED_CHOICES
        else:
            routed = {"dispatch"} if program.runs.dispatches else set()
            assert tried <= {*program.runs.choices, *program.runs.overlaps, *routed}
    assert "reshard_after_forward" in {entry.name for entry in every(stack("torchtitan"))}  # type: ignore[attr-defined]
    assert "optimizer_offload" not in {entry.name for entry in every(stack("torchtitan"))}  # type: ignore[attr-defined]


BY_BLOCK = ("reshard_after_forward", "prefetch", "parameter_offload", "parameter_disk")
"""Choices of ZeRO 3."""


OF_EXPERTS = ("dispatch", "experts", "expert_replicas", "expert_placement")


@pytest.mark.parametrize("name", NAMES)
def test_every_value_makes_a_plan_that_has_it(name: str) -> None:
    of, graph = choice(name), model("qwen3-30b-a3b" if name in OF_EXPERTS else "llama-3.2-1b")
    (of,) = with_load((of,), RouterLoad(kind="zipf", s=0.4))
    hopper = with_disks(parse_cluster("2x4xh100-sxm"), 1e9)
    base = Plan(optimizer=Optimizer(zero=3 if name in BY_BLOCK else 1, clip=False))
    ep = 4 if name in OF_EXPERTS else 1
    base = replace(base, mesh=replace(base.mesh, tp=2, dp_shard=4, ep=ep))
    base = replace(base, layout=replace(base.layout, sequence_parallel=True))
    base = replace(base, schedule=replace(base.schedule, micro_batch_size=1))
    values = of.values(base, graph, hopper)
    assert len(values) > 1 and of.of(base) in values
    for value in values:
        made = of.make(base, graph, value)
        assert has_choices(made) or not described(made)  # without it, a heading does not load the choices
        assert of.of(made) == value
        assert predict(graph, hopper, made, Workload(global_batch_size=16, seq_len=1024)).step_s > 0


BASES: dict[str, dict[str, Value]] = {
    "offload": {"optimizer_offload": True, "prefetch": 2},
    "kept": {"reshard_after_forward": False, "prefetch": 0},
    "order": {"order": "pp,tp,cp,dp_shard,dp_replicate"},
    "fp8": {"fp8": "tensorwise"},
}


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("seed", [10, 13, 19, 24])
def test_choices_in_the_base_are_searched_exactly(name: str, seed: int) -> None:
    """The search over a base with choices fixed finds what predicting every plan of its space finds."""
    given = case(seed)
    if name == "fp8" and "h100" not in given.cluster.name:
        given = replace(given, cluster=parse_cluster("1x8xh100-sxm"))
        given = replace(given, space=replace(given.space, devices=8))
    base = replace(given.space.base, optimizer=replace(given.space.base.optimizer, clip=name != "offload"))
    space = replace(given.space, base=fixed_base(base, given.graph, BASES[name]), tp=(1, 2), pp=(1, 2))
    predictions = []
    for point in space.points():
        try:
            predictions.append(predict(given.graph, given.cluster, space.plan(point), given.workload, given.stack))
        except GnomonError:
            continue
    best = solve(given.graph, given.cluster, given.workload, space, given.stack, given.goal, top=1).best
    assert [candidate.step_s for candidate in best] == sorted(entry.step_s for entry in predictions if entry.fits)[:1]
    assert predictions


def test_orders_of_a_stack_are_those_that_it_has() -> None:
    order, plan = choice("order"), Plan()
    plan = replace(plan, mesh=replace(plan.mesh, pp=2, dp_shard=2, dp_replicate=2, tp=2))
    values = order.values(plan, model("llama-tiny"), CLUSTER)
    assert len(set(values)) == len(values) == 1 + 6 + 1
    able = [value for value in values if runs_value(stack("megatron-lm"), order, value)]
    assert able == ["pp,dp_replicate,dp_shard,cp,tp", "dp_replicate,dp_shard,pp,cp,tp"]
    assert all(runs_value(PLAIN_STACK, order, value) for value in values)


def test_a_model_that_fits_only_with_an_offload_is_told_so() -> None:
    cluster, work = parse_cluster("1x2xh100-sxm"), Workload(global_batch_size=16, seq_len=4096)
    fixed = {"tp": 1, "pp": 1, "cp": 1, "micro_batch_size": 1}
    with pytest.raises(PlanError, match="--no-clip --fix optimizer_offload=yes"):
        plan("llama-3.1-8b", cluster, work, fixed=fixed)
    with pytest.raises(PlanError) as told:  # which torchtitan does not run
        plan("llama-3.1-8b", cluster, work, stack("torchtitan"), fixed=fixed)
    assert "optimizer_offload" not in str(told.value)
    base = fixed_base(Plan(optimizer=Optimizer(clip=False)), model("llama-3.1-8b"), {"optimizer_offload": True})
    assert plan("llama-3.1-8b", cluster, work, base=base, fixed=fixed, top=1).best[0].plan.optimizer.offload is not None


def test_offload_is_tried_without_clipping_and_may_be_fixed_with_it() -> None:
    base = fixed_base(Plan(), model("llama-tiny"), {"optimizer_offload": True})
    assert base.optimizer.offload is not None and base.optimizer.clip
    assert not choice("optimizer_offload").values(Plan(), model("llama-tiny"), CLUSTER)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("prefetch", "two", "a whole number"), ("async_tp", "maybe", "yes or no"), ("bucket_bytes", "x", "bytes")],
)
def test_values_that_cannot_be_read(name: str, text: str, message: str) -> None:
    with pytest.raises(GnomonError, match=message):
        read_value(choice(name), text)


def test_more_memory_never_gives_a_slower_plan() -> None:
    """Mario takes plans that are among the best, or too large, under some limits only."""
    choices = (choice("activation_offload"), *(of_method(entry) for entry in methods_named("mario")))
    work, fixed = Workload(global_batch_size=8, seq_len=16384), {"pp": 4, "micro_batch_size": 1, "overlap": True}
    steps, methods = [], set()
    for limit in (42, 44, 52):
        goal = Goal(memory_bytes=limit * 2**30)
        result = plan("llama-3.2-1b", "1x4xa100-sxm-80gb", work, goal=goal, fixed=fixed, diverse=True)
        refined = refine(result, choices=choices, effort=QUICK)
        assert refined.best.prediction.tightest.peak_bytes <= goal.memory_bytes  # type: ignore[operator]
        steps.append(refined.best.step_s)
        methods |= {step.choice.name for step in refined.steps}
    assert steps == sorted(steps, reverse=True) and "mario" in methods

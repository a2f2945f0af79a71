"""Recomputation chosen tensor by tensor: the programmes equal brute force, and their plans are never slower than those
of presets that take as much memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, permutations, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError, PlanError
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.models.llama import LlamaConfig, llama
from gnomon.models.mixtral import MixtralConfig, mixtral
from gnomon.plans import Goal, Layout, Mesh, Optimizer, Plan, Saved, SavedRule, Schedule, Workload
from gnomon.prediction import Prediction, host_memory, predict
from gnomon.prediction.compute_time import ComputeTime
from gnomon.prediction.layer_types import LocalContext
from gnomon.prediction.predict import stages_of
from gnomon.search import plan as search
from gnomon.search.checkpointing import layer, least_recompute, milp
from gnomon.search.checkpointing.improve import by_tensor, check_stack
from gnomon.search.checkpointing.layer import layer_ways
from gnomon.search.checkpointing.milp import Programme
from gnomon.software import stack

pytest.importorskip("scipy", reason="scipy is not installed: its solver is what is tested")

SIZES = dict(hidden_size=2048, num_heads=16, num_kv_heads=4, head_dim=128, vocab_size=32000)
LLAMA = llama(LlamaConfig(name="llama-3-layers", num_layers=3, ffn_size=5632, **SIZES))
DEEP = llama(LlamaConfig(name="llama-16-layers", num_layers=16, ffn_size=5632, **SIZES))
SHALLOW = llama(LlamaConfig(name="llama-6-layers", num_layers=6, ffn_size=5632, **SIZES))
EXPERTS = mixtral(
    MixtralConfig(
        name="mixtral-4-layers", num_layers=4, expert_ffn_size=2816, num_experts=8, experts_per_token=2, **SIZES
    )
)
CLUSTER = parse_cluster("4xa100-sxm-40gb")
WORK = Workload(global_batch_size=16, seq_len=4096)
ONE = Plan(mesh=Mesh(dp_shard=4), schedule=Schedule(micro_batch_size=1))


def predicted(graph: Graph, plan: Plan) -> Prediction:
    return predict(graph, CLUSTER, plan, WORK)


def peak(prediction: Prediction) -> int:
    return max(rank.peak_bytes for rank in prediction.memory)


@pytest.mark.parametrize("graph", [LLAMA, EXPERTS], ids=lambda graph: graph.name)
def test_each_way_of_a_layer_is_the_best_of_all_subsets(graph: Graph) -> None:
    """Every subset of the tensors that could be kept, by an evaluation of its own: walking backwards, an op runs again
    if something that it makes is read by backward or by an op that runs again, and is not kept."""
    (price,) = (price for price, layers in stages_of(graph, CLUSTER, ONE, WORK)[0].layers if len(layers) > 1)
    problem = layer._LayerProgramme(price.context)
    names = [name for name in problem.sizes if problem.sizes[name] * 200 > problem.most or name in problem.needed]
    names = [*(n for n in names if n in problem.needed), *(n for n in names if n not in problem.needed)][:18]
    kept = np.arange(2 ** len(names))[:, None] >> np.arange(len(names)) & 1 == 1
    column = {name: kept[:, at] for at, name in enumerate(names)}
    none = np.zeros(len(kept), bool)
    again = {op.path: none.copy() for op in problem.block.ops}
    for op in reversed(problem.block.ops):
        for name in op.outputs:
            if name in problem.needed:
                again[op.path] |= ~column.get(name, none)
        for reader in problem.block.ops:
            for name in {problem.roots[name] for name in reader.inputs} & set(op.outputs):
                again[op.path] |= again[reader.path] & ~column.get(name, none)
    seconds = sum(np.where(rerun, problem.seconds[path], 0.0) for path, rerun in again.items())
    size = kept @ np.array([problem.sizes[name] for name in names])
    ways = layer_ways(price.context)
    assert len(ways) > 8
    for way in ways[1:]:
        inside = sum(problem.sizes[name] for name in way.saved_names)
        assert way.seconds == pytest.approx(seconds[size <= inside].min(), abs=2 * layer.TIE * seconds.max())
        assert way.bytes == inside + sum(k.bytes for k in way.price.saved if k.is_input)
    assert all(a.bytes > b.bytes and a.seconds < b.seconds for a, b in zip(ways, ways[1:], strict=False))


def test_a_plan_is_the_best_of_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers with a few ways each, every combination predicted."""
    coarse = {key: layer_ways(key, 0.22) for key in [stages_of(LLAMA, CLUSTER, ONE, WORK)[0].layers[1][0].context]}
    (ways,) = coarse.values()
    monkeypatch.setattr("gnomon.search.checkpointing.plan.layer_ways", lambda context: layer_ways(context, 0.22))
    assert 3 <= len(ways) <= 6
    every = []
    for chosen in product(ways, repeat=3):
        rules = tuple(
            rule
            for index, way in enumerate(chosen)
            if not way.everything
            for rule in (
                SavedRule(calls=f"layers[{index}:{index + 1}]", action="recompute"),
                SavedRule(calls=f"layers[{index}:{index + 1}]", tensors=way.saved_names or ("input",)),
            )
        )
        every.append(predicted(LLAMA, replace(ONE, saved=Saved(rules=rules))))
    base = predicted(LLAMA, ONE)
    low = min(map(peak, every))
    for share in (0.1, 0.4, 0.7):
        limit = int(low + share * (peak(base) - low))
        best = min(made.step_s for made in every if peak(made) <= limit)
        least = least_recompute(base, limit)
        assert least is not None
        assert peak(least.prediction) <= limit
        assert least.prediction.step_s <= best * 1.002


@st.composite
def programmes(draw: st.DrawFn) -> tuple[Programme, int]:
    """A few choices with costs and limits, and an amount that is what some of them take beyond a limit."""
    programme, number = Programme(), st.integers(0, 9)
    count = draw(st.integers(1, 6))
    for _ in range(count):
        programme.variable(draw(number))
    over = programme.amount(draw(st.integers(1, 9)))
    taken = {at: float(draw(number)) for at in range(count)}
    programme.at_most({**taken, over: -1.0}, draw(number))
    programme.at_most({at: -float(draw(number)) for at in range(count)}, -draw(number))
    return programme, count


@settings(max_examples=60, deadline=None)
@given(programmes())
def test_a_programme_with_an_amount_is_solved(case: tuple[Programme, int]) -> None:
    programme, count = case
    (beyond, room), (limited, limit) = programme.rows

    def cost(chosen: tuple[int, ...]) -> float:
        over = max(sum(beyond[at] * chosen[at] for at in range(count)) - room, 0.0)
        return sum(programme.costs[at] * chosen[at] for at in range(count)) + programme.costs[count] * over

    able = [c for c in product((0, 1), repeat=count) if sum(limited[at] * c[at] for at in range(count)) <= limit]
    found = programme.solve()
    if found is None:
        assert not able
    else:
        assert cost(tuple(map(int, found[:count]))) == pytest.approx(min(map(cost, able)), abs=1e-6)


@st.composite
def layers(draw: st.DrawFn) -> layer._LayerProgramme:
    """Ops with an output each, that read some made before or the input; some outputs are read by backward."""
    count, made = draw(st.integers(2, 5)), object.__new__(layer._LayerProgramme)
    ops = [
        SimpleNamespace(
            path=f"op{at}",
            outputs=(f"t{at}",),
            inputs=tuple(draw(st.sets(st.sampled_from(["x", *(f"t{i}" for i in range(at))]), min_size=1))),
        )
        for at in range(count)
    ]
    names = [f"t{at}" for at in range(count)]
    made.block = SimpleNamespace(
        ops=ops, inputs=("x",), tensor=lambda _: SimpleNamespace(kind="activation", is_activation=True)
    )  # type: ignore[assignment]
    made.roots = {name: name for name in ("x", *names)}
    made.maker = {name: op for name, op in zip(names, ops, strict=True)}  # type: ignore[misc]
    made.seconds = {op.path: float(draw(st.integers(1, 9))) for op in ops}
    made.inputs_kept = {"x"}
    made.sizes = {name: draw(st.integers(1, 9)) for name in names}
    made.needed = tuple(name for name in names if name == names[-1] or draw(st.booleans()))
    made.most = sum(made.sizes[name] for name in made.needed)
    return made


@settings(max_examples=60, deadline=None)
@given(layers(), st.integers(0, 20), st.integers(0, 20))
def test_what_is_kept_and_what_goes_to_the_host_is_the_best_of_all(
    problem: layer._LayerProgramme, budget: int, away: int
) -> None:
    """Every assignment of keep, host and neither, judged by walking backwards."""

    def again(there: set[str]) -> float:
        rerun: set[str] = set()
        for op in reversed(problem.block.ops):
            (name,) = op.outputs
            readers = any(reader.path in rerun and name in reader.inputs for reader in problem.block.ops)
            if name not in there and (name in problem.needed or readers):
                rerun.add(op.path)
        return sum(problem.seconds[path] for path in rerun)

    names, best = list(problem.sizes), float("inf")
    for fate in product((0, 1, 2), repeat=len(names)):
        sizes = [sum(problem.sizes[n] for n, f in zip(names, fate, strict=True) if f == which) for which in (1, 2)]
        if sizes[0] <= budget and sizes[1] <= away:
            best = min(best, again({n for n, f in zip(names, fate, strict=True) if f}))
    found = problem.fastest(budget, away)
    assert found is not None
    kept, gone = found
    assert sum(problem.sizes[n] for n in kept) <= budget and sum(problem.sizes[n] for n in gone) <= away
    assert again({*kept, *gone}) == best


@pytest.mark.parametrize("beside", [True, False])
def test_a_plan_that_offloads_is_the_best_of_all_choices(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three layers with a few ways each, every combination predicted: where copies run beside computing, and over a
    faster link where they do not."""
    if not beside:
        monkeypatch.setattr(ComputeTime, "copies_overlap", lambda *_: False)
    cluster, resolution, shares = parse_cluster("4xgh200-96gb" if not beside else "4xa100-sxm-40gb"), 0.35, (0.4, 1.0)
    base = predict(LLAMA, cluster, ONE, WORK)
    few = {False: (), True: shares}

    def coarse(context: LocalContext, offload: tuple[float, ...] = ()) -> tuple[layer.Way, ...]:
        return layer_ways(context, resolution, few[bool(offload)])

    monkeypatch.setattr("gnomon.search.checkpointing.plan.layer_ways", coarse)
    ways = coarse(base.pricing.stages[0].layers[1][0].context, shares)
    assert 4 <= len(ways) <= 9 and any(way.away for way in ways)
    every = []
    for chosen in combinations_with_replacement(range(len(ways)), 3):
        for order in set(permutations(chosen)):
            rules = [rule for at, way in enumerate(order) for rule in rules_of(at, ways[way])]
            every.append(predict(LLAMA, cluster, replace(ONE, saved=Saved(rules=tuple(rules))), WORK))
    low = min(map(peak, every))
    for share in (0.1, 0.5):
        limit = int(low + share * (peak(base) - low))
        best = min(made.step_s for made in every if peak(made) <= limit)
        least = least_recompute(base, limit, offload=True)
        without = least_recompute(base, limit)
        assert least is not None and without is not None
        assert peak(least.prediction) <= limit
        assert least.prediction.step_s <= best * 1.002
        assert least.prediction.step_s <= without.prediction.step_s * (0.999 if share == 0.1 or beside else 1)


def rules_of(at: int, way: layer.Way) -> list[SavedRule]:
    """Those of one layer."""
    if way.everything:
        return []
    calls, rules = f"layers[{at}:{at + 1}]", []
    rules.append(SavedRule(calls=calls, action="recompute"))
    if way.saved_names:
        rules.append(SavedRule(calls=calls, tensors=way.saved_names))
    if way.away:
        rules.append(SavedRule(calls=calls, tensors=way.away, action="offload"))
    return rules


def test_the_host_s_memory_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for nothing there, nothing goes there."""
    (group,) = CLUSTER.groups
    base, full = predicted(LLAMA, ONE), predicted(LLAMA, replace(ONE, saved=Saved(preset="full")))
    limit, ways = (peak(base) + peak(full)) // 2, lambda context, offload=(): layer_ways(context, 0.35, offload)
    monkeypatch.setattr("gnomon.search.checkpointing.plan.layer_ways", ways)
    for room, goes in ((1, False), (2**40, True)):
        node = replace(group.node, host_memory_bytes=room)
        there = predict(LLAMA, replace(CLUSTER, groups=(replace(group, node=node),)), ONE, WORK)
        least = least_recompute(there, limit, offload=True)
        assert least is not None and host_memory(least.prediction).fits
        assert any(rule.action == "offload" for rule in least.prediction.plan.saved.rules) == goes


PLANS = {
    "dp": ONE,
    "dp, tp": replace(ONE, mesh=Mesh(dp_shard=2, tp=2), layout=Layout(sequence_parallel=True)),
    "zero 3": replace(ONE, optimizer=Optimizer(zero=3)),
    "pp": replace(ONE, mesh=Mesh(pp=4), schedule=Schedule(name="one_f_one_b", micro_batch_size=1)),
    "interleaved": replace(
        ONE,
        mesh=Mesh(pp=2, dp_shard=2),
        schedule=Schedule(name="interleaved_one_f_one_b", micro_batch_size=1, virtual_stages=2),
    ),
    "zero bubble": replace(ONE, mesh=Mesh(pp=4), schedule=Schedule(name="zero_bubble_h1", micro_batch_size=1)),
}


@pytest.mark.parametrize("preset", ["selective", "full"])
@pytest.mark.parametrize("name", PLANS)
def test_never_slower_than_a_preset_in_its_memory(name: str, preset: str) -> None:
    with_preset = predicted(DEEP, replace(PLANS[name], saved=Saved(preset=preset)))  # type: ignore[arg-type]
    least = least_recompute(with_preset, peak(with_preset))
    assert least is not None
    assert peak(least.prediction) <= peak(with_preset)
    assert least.prediction.step_s <= with_preset.step_s
    if preset == "full" and name != "zero 3":
        assert least.prediction.step_s < 0.99 * with_preset.step_s


def test_experts_too() -> None:
    experts = replace(ONE, mesh=Mesh(dp_shard=4, ep=4))
    base, full = predicted(EXPERTS, experts), predicted(EXPERTS, replace(experts, saved=Saved(preset="full")))
    limit = (peak(base) + peak(full)) // 2
    least = least_recompute(base, limit)
    assert least is not None
    assert peak(least.prediction) <= limit
    assert base.step_s < least.prediction.step_s < full.step_s


def test_what_fits_anyway_keeps_everything_and_what_never_fits_is_none() -> None:
    base = predicted(LLAMA, ONE)
    least = least_recompute(base, peak(base))
    assert least is not None
    assert least.prediction.plan == ONE
    assert least_recompute(base, 2**30) is None


def test_the_search_takes_it_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device, in memory in which presets must recompute; of each layer every third way."""
    coarse = partial(layer_ways, resolution=3 / 128)
    monkeypatch.setattr("gnomon.search.checkpointing.plan.layer_ways", coarse)
    one, fixed = parse_cluster("1xa100-sxm-40gb"), {"zero": 0, "micro_batch_size": 1, "schedule": "one_f_one_b"}
    plan = Plan(schedule=Schedule(micro_batch_size=1))
    peaks = [
        peak(predict(SHALLOW, one, replace(plan, saved=Saved(preset=preset)), WORK))  # type: ignore[arg-type]
        for preset in ("none", "full")
    ]
    result = search(SHALLOW, one, WORK, goal=Goal(memory_bytes=sum(peaks) // 2), fixed=fixed)
    made = by_tensor(result)
    assert made.best is not None
    assert made.gain > 0.02
    assert peak(made.best.prediction) <= result.limit_bytes
    assert made.merged(result).best[0] is made.best


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="megatron-lm cannot be told"):
        check_stack(stack("megatron-lm"))
    away = predicted(LLAMA, replace(ONE, saved=Saved(rules=(SavedRule(action="offload"),))))
    with pytest.raises(PlanError, match="not combined"):
        least_recompute(away, 2**34)

    def absent() -> None:
        raise InputError("needs scipy")

    monkeypatch.setattr(milp, "_scipy", absent)
    layer_ways.cache_clear()
    base = predicted(LLAMA, ONE)
    with pytest.raises(InputError, match="needs scipy"):
        least_recompute(base, int(peak(base) * 0.9))

"""Other questions against asking every plan of a small space."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gnomon.errors import GnomonError, PlanError
from gnomon.hardware import Cluster, local_cluster, parse_cluster, scaled
from gnomon.models.presets import CONFIGS, build, model
from gnomon.plans import Goal, Offload, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.plans.workload import whole_sequences
from gnomon.prediction import fits_within, host_memory, predict, together
from gnomon.prediction.predict import PLAIN_STACK
from gnomon.search import make_space, parse_limit
from gnomon.search.questions.goals import (
    Question,
    among,
    best_case,
    fewest_devices,
    longest,
    of_nodes,
    pareto,
    peak_step_s,
    up_to,
)
from gnomon.search.questions.largest import grown, largest, largest_of, unit
from gnomon.search.questions.sweep import Variation, sweep, vary
from gnomon.search.results import FoundPlan, Result

CLUSTER = parse_cluster("1x2xa100-sxm-80gb")
WORK = Workload(global_batch_size=4, seq_len=128)
ASKED = Question(
    graph=model("llama-tiny"),
    stack=PLAIN_STACK,
    base=Plan(),
    fixed={"schedule": "one_f_one_b", "sequence_parallel": False, "keep_gathered": False, "overlap": True},
    limits=(parse_limit("zero>1"), parse_limit("recompute=selective")),
)


def everything(cluster: Cluster, work: Workload) -> list[tuple[float, int]]:
    """(seconds, peak bytes) of every plan of the space that runs."""
    space = make_space(ASKED.graph, cluster, work, base=ASKED.base, fixed=ASKED.fixed, limits=ASKED.limits)
    costs = []
    for point in space.points():
        try:
            prediction = predict(ASKED.graph, cluster, space.plan(point), work, PLAIN_STACK)
        except GnomonError:
            continue
        costs.append((prediction.step_s, prediction.tightest.peak_bytes))
    return costs


def test_the_front_is_that_of_every_plan() -> None:
    every = everything(CLUSTER, WORK)
    front = {(s, b) for s, b in every if not any(t <= s and c <= b and (t, c) != (s, b) for t, c in every)}
    cases = pareto(ASKED, CLUSTER, WORK)
    shown = [(c.best.step_s, c.best.prediction.tightest.peak_bytes) for c in cases if c.best is not None]
    assert len(front) > 1 and set(shown) == front and shown == sorted(shown)


def test_the_longest_sequence_is_that_of_trying_all() -> None:
    limit = sorted(peak for _, peak in everything(CLUSTER, replace(WORK, seq_len=448)))[0]
    asked = replace(ASKED, goal=Goal(memory_bytes=limit))
    fits = [n for n in range(64, 1025, 64) if min(b for _, b in everything(CLUSTER, replace(WORK, seq_len=n))) <= limit]
    cases = longest(asked, CLUSTER, WORK, multiple=64)
    assert cases[-1].workload.seq_len == max(fits) and cases[-1].best is not None


def test_no_sequence_fits() -> None:
    with pytest.raises(PlanError, match="no plan fits with 64 tokens"):
        longest(replace(ASKED, goal=Goal(memory_bytes=2**20)), CLUSTER, WORK, multiple=64)


def test_fewest_devices_are_the_first_that_are_fast_enough() -> None:
    clusters = [of_nodes(CLUSTER, nodes) for nodes in (1, 2)]
    work = Workload(global_batch_size=64, seq_len=512)
    steps = [min(s for s, _ in everything(cluster, work)) for cluster in clusters]
    for limit in (max(steps), min(steps)):
        cases = fewest_devices(ASKED, clusters, work, limit)
        wanted = next(c.num_devices for c, step in zip(clusters, steps, strict=True) if step <= limit)
        assert cases[-1].cluster.num_devices == wanted
    assert len(fewest_devices(ASKED, clusters, work, 1e-9)) == 2


def test_each_value_has_its_best_plan() -> None:
    cases = vary(ASKED, CLUSTER, WORK, "seq_len", (64, 256))
    for case, length in zip(cases, (64, 256), strict=True):
        best = min(s for s, _ in everything(CLUSTER, replace(WORK, seq_len=length)))
        assert case.best is not None and case.best.step_s == best
    with pytest.raises(PlanError, match="cannot vary"):
        vary(ASKED, CLUSTER, WORK, "heads", (1,))


def test_a_case_takes_a_faster_plan_of_another_that_fits_it() -> None:
    """What comes after the exact search begins from few plans: one case may find what others miss."""
    own = {case.label: case for case in vary(ASKED, CLUSTER, WORK, "links", (0.5, 1.0, 2.0))}
    worse = pareto(ASKED, CLUSTER, WORK)[-1].best
    assert isinstance(worse, FoundPlan) and worse.step_s > max(c.best.step_s for c in own.values() if c.best)

    def lucky_on_slow_links(result: Result) -> FoundPlan:
        return result.best[0] if result.cluster == own["links=0.5x"].cluster else worse

    cases = vary(replace(ASKED, improve=lucky_on_slow_links), CLUSTER, WORK, "links", (0.5, 1.0, 2.0))
    steps = [case.best.step_s for case in cases if case.best is not None]
    assert steps == sorted(steps, reverse=True) and len(steps) == 3
    first, middle, last = (case.best.plan for case in cases if isinstance(case.best, FoundPlan))
    assert first == middle == last != worse.plan
    longer = vary(replace(ASKED, improve=lucky_on_slow_links), CLUSTER, WORK, "seq_len", (128, 256))
    assert all(case.best is worse for case in longer)  # other work is another case's


def test_a_goal_below_the_machines_memory_counts_what_is_on_the_host_where_that_is_one_memory() -> None:
    """On a CPU an update on the host frees nothing: each memory alone is within the goal, both together are not."""
    laptop = parse_cluster("1xcpu-process")
    fp32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
    schedule, optimizer = Schedule(micro_batch_size=1), Optimizer(offload=Offload(), clip=False)
    plan = Plan(schedule=schedule, optimizer=optimizer, precision=fp32)
    prediction = predict(ASKED.graph, laptop, plan, WORK)
    both, device = together(prediction)[0], max(rank.peak_bytes for rank in prediction.memory)
    goal = (both + device) // 2
    assert device < goal < both and host_memory(prediction).fits
    assert fits_within(prediction, both) and not fits_within(prediction, goal)


def test_two_things_vary_together() -> None:
    other = parse_cluster("1x2xh100-sxm")
    varied = (Variation(name="seq_len", values=(64, 128)), Variation(name="on", values=(CLUSTER, other)))
    cases = sweep(ASKED, CLUSTER, WORK, varied)
    labels = [f"{on} seq_len={n}" for n in (64, 128) for on in (CLUSTER.name, other.name)]
    assert [case.label for case in cases] == labels
    for case in cases:
        assert case.best is not None
        assert case.best.step_s == min(s for s, _ in everything(case.cluster, case.workload))
    with pytest.raises(PlanError, match="together"):
        sweep(ASKED, CLUSTER, WORK, (varied[0], varied[0]))


def test_slower_links_and_less_memory_are_those_of_other_machines() -> None:
    work = Workload(global_batch_size=8, seq_len=512)
    asked = replace(ASKED, fixed={**ASKED.fixed, "tp": 2})
    slow, same, fast = vary(asked, CLUSTER, work, "links", (0.01, 1.0, 4.0))
    assert slow.best and same.best and fast.best
    assert slow.best.step_s > same.best.step_s >= fast.best.step_s
    assert same.best.step_s == asked.best(CLUSTER, work).best.step_s  # type: ignore[union-attr]
    small, large = vary(ASKED, CLUSTER, work, "memory", (2**20, 80 * 2**30))
    assert small.best is None and small.why == "nothing fits in memory" and large.best is not None
    with pytest.raises(GnomonError, match="no network"):
        scaled(local_cluster(2), network=2.0)


def test_tokens_of_a_batch_are_whole_sequences() -> None:
    varied = (Variation(name="seq_len", values=(64, 128)),)
    cases = sweep(ASKED, CLUSTER, WORK, varied, tokens_per_batch=1024)
    assert [case.workload.global_batch_size for case in cases] == [16, 8]
    assert whole_sequences(4 * 2**20, 4096) == 1024
    with pytest.raises(PlanError, match=r"the nearest are 3,997,696 \(976\) or 4,001,792 \(977 sequences\)"):
        whole_sequences(4_000_000, 4096)


def test_the_cheapest_is_not_the_fastest() -> None:
    """Sums by hand: dollars of an hour over tokens of an hour."""
    asked = replace(ASKED, prices={"a100-sxm-80gb": 1.0, "h100-sxm-80gb": 1000.0})
    cases = among(asked, (CLUSTER, parse_cluster("1x2xh100-sxm")), WORK)
    cheap, fast = best_case(cases, "cost"), best_case(cases, "step")
    assert cheap is cases[0] and fast is cases[1]
    assert cheap.best is not None and cheap.dollars_per_token is not None
    tokens_an_hour = 4 * 128 / cheap.best.step_s * 3600
    assert cheap.dollars_per_token == pytest.approx(2 * 1.0 / tokens_an_hour)
    (lacking,) = among(ASKED, (parse_cluster("1x2xv100-sxm-32gb"),), WORK)
    assert lacking.best is None and "v100-sxm-32gb has none" in lacking.why
    unpriced = among(ASKED, (parse_cluster("1x2xa100-pcie-80gb"),), WORK)
    with pytest.raises(PlanError, match="--price"):
        best_case(unpriced, "cost")


def test_no_step_is_shorter_than_at_the_peak_of_every_device() -> None:
    for cluster in (CLUSTER, parse_cluster("1x2xh100-sxm")):
        for work in (WORK, Workload(global_batch_size=64, seq_len=2048)):
            assert peak_step_s(ASKED, cluster, work) < min(s for s, _ in everything(cluster, work))
    (case,) = fewest_devices(ASKED, (CLUSTER,), WORK, peak_step_s(ASKED, CLUSTER, WORK) / 2)
    assert case.best is None and "even at the peak" in case.why


def test_whole_nodes_up_to_a_number_of_devices() -> None:
    cluster = parse_cluster("4x8xh100-sxm")
    assert [entry.num_devices for entry in up_to(cluster, 20)] == [8, 16]
    with pytest.raises(PlanError, match="at most 4 devices, but a node"):
        up_to(cluster, 4)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "gpt2", "deepseek-v3"])
def test_a_grown_model_follows_its_rule(name: str) -> None:
    config = CONFIGS[name]()
    same = build(replace(config, name="x"))  # type: ignore[arg-type]
    deeper = grown(config, "layers", config.num_layers + 1)
    assert deeper.config.hidden_size == config.hidden_size
    assert deeper.graph.num_parameters() > same.num_parameters()
    wide = unit(config, "hidden") * 6
    wider = grown(config, "hidden", wide).config
    assert wider.num_heads == wide and wider.hidden_size * config.num_heads == config.hidden_size * wide
    both = grown(config, "both", config.num_layers * 2).config
    assert both.hidden_size / both.num_layers == pytest.approx(config.hidden_size / config.num_layers, rel=0.5)


def test_the_largest_depth_is_that_of_trying_all() -> None:
    config, work = CONFIGS["llama-tiny"](), Workload(global_batch_size=4, seq_len=64)
    asked = replace(ASKED, limits=(), fixed={**ASKED.fixed, "recompute": "none", "zero": 0, "pp": 1, "tp": 1})
    eleven = replace(asked, graph=grown(config, "layers", 11).graph).best(CLUSTER, work)
    assert eleven.best is not None
    asked = replace(asked, goal=Goal(memory_bytes=eleven.best.prediction.tightest.peak_bytes))
    cases = largest(asked, CLUSTER, work, config, "layers")
    last = cases[-1]
    assert last.best is not None

    def fits(layers: int) -> bool:
        share = replace(asked, graph=grown(config, "layers", layers).graph)
        return share.best(CLUSTER, work).best is not None

    layers = max(int(case.label.split("=")[1].split()[0]) for case in cases if case.best is not None)
    assert last.label.startswith(f"layers={layers} ")
    assert fits(layers) and not fits(layers + 1)
    with pytest.raises(PlanError, match="not even layers=1"):
        largest(replace(asked, goal=Goal(memory_bytes=2**20)), CLUSTER, work, config, "layers")


def until(calls: int) -> Callable[[], bool]:
    """Whether to go on: so often yes, then no."""
    left = iter(range(calls))
    return lambda: next(left, None) is not None


@pytest.mark.parametrize("calls", range(0, 16, 3))
def test_a_question_that_is_stopped_says_what_it_did_not_look_at(calls: int) -> None:
    """The answer fits and is no larger than the whole one; without one it says that time was too short."""
    config, work = CONFIGS["llama-tiny"](), Workload(global_batch_size=4, seq_len=64)
    asked = replace(ASKED, limits=(), fixed={**ASKED.fixed, "recompute": "none", "zero": 0, "pp": 1, "tp": 1})
    eleven = replace(asked, graph=grown(config, "layers", 11).graph).best(CLUSTER, work).best
    assert eleven is not None
    asked = replace(asked, goal=Goal(memory_bytes=eleven.prediction.tightest.peak_bytes))
    whole = largest(asked, CLUSTER, work, config, "layers")
    assert not any("not looked at" in case.why for case in whole)
    try:
        cases = largest(replace(asked, keep_going=until(calls)), CLUSTER, work, config, "layers")
    except PlanError as error:
        assert not calls and "the time allowed is spent" in str(error)
        return
    last, best = cases[-1].best, whole[-1].best
    assert isinstance(last, FoundPlan) and isinstance(best, FoundPlan)
    assert last.prediction.pricing.graph.num_parameters() <= best.prediction.pricing.graph.num_parameters()
    stopped = any("not looked at: the time allowed is spent" in case.why for case in cases)
    assert stopped or cases[-1].label == whole[-1].label
    assert stopped or calls > 3


def test_the_largest_of_models() -> None:
    graphs = [model(name) for name in ("llama-tiny", "llama-3.1-405b", "llama-3.2-1b")]
    cases = largest_of(ASKED, CLUSTER, WORK, graphs)
    assert [case.label.split()[0] for case in cases] == ["llama-3.1-405b", "llama-3.2-1b"]
    assert cases[-1].best is not None

"""Cuts of layers into stages: trials against `predict`, the balanced cut and the best one against all cuts, bounds."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from search import cuts

from gnomon.errors import PlanError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.plans import Mesh, Optimizer, Plan, Saved, Schedule, Workload, layer_presets
from gnomon.plans.parts import Preset
from gnomon.prediction import Prediction, predict
from gnomon.search.stages.cut import BestCut, Cut, Cuts, Search, balanced, best_split, equal, neighbours, plainest
from gnomon.search.stages.recompute import Least
from gnomon.search.stages.recut import Presets
from gnomon.search.stages.repredict import Trials

UNLIMITED = 10**18
ORDER: tuple[Preset, ...] = ("full", "selective", "none")


def some(draw: random.Random, cut: Cut) -> Presets:
    """A preset for each layer; of half the stages each preset's layers stand together, as rules write them best."""
    drawn = []
    for count in cut:
        mine = [draw.choice(ORDER) for _ in range(count)]
        drawn.append(tuple(sorted(mine, key=ORDER.index) if draw.random() < 0.5 else mine))
    return tuple(drawn)


@pytest.mark.parametrize("seed", range(12))
def test_a_trial_is_what_predict_says(seed: int) -> None:
    draw, case = random.Random(seed), cuts.pipeline(seed)
    trials = Trials(case.prediction)
    every = list(cuts.every_cut(len(trials.counted), trials.num_stages))
    for cut in draw.sample(every, min(3, len(every))):
        presets = some(draw, cut)
        trial = trials.of(cut, presets)
        pricing = case.prediction.pricing
        prediction = predict(case.graph, pricing.cluster, trial.plan, case.prediction.workload, pricing.stack)
        assert trial.step_s == prediction.step_s
        assert trial.peaks == tuple(rank.peak_bytes for rank in prediction.memory)
        message = layer_presets(trial.plan, case.graph)
        flat = [preset for stage in presets for preset in stage]
        assert [message[trials.layers[i].label] for i in trials.counted] == flat


def test_trials_of_zero_3_are_what_predict_says() -> None:
    plan = Plan(mesh=Mesh(dp_shard=8), schedule=Schedule(micro_batch_size=2), optimizer=Optimizer(zero=3))
    work, graph, machines = Workload(global_batch_size=32, seq_len=1024), model("gpt2"), parse_cluster("1x8xh100-sxm")
    trials = Trials(predict(graph, machines, plan, work))
    trial = trials.of((12,), (("full",) * 5 + ("none",) * 7,))
    prediction = predict(graph, machines, trial.plan, work)
    assert (trial.step_s, trial.peaks) == (prediction.step_s, tuple(rank.peak_bytes for rank in prediction.memory))
    assert trials.predicted == 1  # for the prices under full recompute


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=9), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2))
def test_the_balanced_cut_has_the_shortest_longest_stage(
    weights: list[float], stages: int, before: int, after: int
) -> None:
    """Among all cuts, and of those the least sum of squares. Layers before and after are an embedding and a head."""
    layers = len(weights)
    if stages > layers:
        with pytest.raises(PlanError, match="use fewer stages"):
            balanced(weights, [(i, i + 1) for i in range(layers)], stages)
        return
    whole = [3.0] * before + weights + [5.0] * after
    result = balanced(whole, [(before + i, before + i + 1) for i in range(layers)], stages)

    def work(cut: Cut) -> list[float]:
        ends = [0, *(before + end for end in np.cumsum(cut[:-1]).tolist()), len(whole)]
        return [sum(whole[a:b]) for a, b in pairwise(ends)]

    every = {cut: work(cut) for cut in cuts.every_cut(layers, stages)}
    least = min(max(entry) for entry in every.values())
    assert max(every[result]) == pytest.approx(least, rel=1e-9)
    squares = min(sum(w * w for w in entry) for entry in every.values() if max(entry) <= least * (1 + 1e-9))
    assert sum(w * w for w in every[result]) == pytest.approx(squares, rel=1e-6)


@pytest.mark.parametrize("seed", range(50))
def test_the_best_cut_is_the_best_of_all(seed: int) -> None:
    """Against predicting every cut; and no bound is above what it bounds."""
    case = cuts.pipeline(seed)
    trials = Trials(case.prediction)
    search = Search(trials, Least(trials, UNLIMITED, "none"), budget=60)
    outcome = search.run()
    assert outcome is not None
    every = {cut: cuts.by_hand(case.prediction, cut).step_s for cut in
             cuts.every_cut(len(trials.counted), trials.num_stages)}  # fmt: skip
    assert outcome.trial.step_s == min(every.values())
    assert all(search.bounds.of(cut) <= step for cut, step in every.items())
    assert outcome.cuts.every == len(every)
    if outcome.cuts.proven:
        assert outcome.cuts.predicted + outcome.cuts.too_large + outcome.cuts.too_slow == outcome.cuts.every


def test_the_bounds_exclude_something() -> None:
    predicted = total = 0
    for seed in range(10):
        trials = Trials(cuts.pipeline(seed).prediction)
        result = best_split(trials, Least(trials, UNLIMITED, "none"), budget=60)
        assert result is not None
        predicted, total = predicted + result.cuts.predicted, total + result.cuts.every
    assert predicted < total / 2


def plan_of_four(model_name: str = "llama-3.2-1b", micro: int = 1) -> Prediction:
    plan = Plan(mesh=Mesh(pp=4, dp_shard=2), schedule=Schedule(micro_batch_size=micro), optimizer=Optimizer(zero=1))
    work = Workload(global_batch_size=64, seq_len=2048)
    return predict(model(model_name), parse_cluster("1x8xh100-sxm"), plan, work)


def test_a_heavy_head_takes_layers_from_its_stage() -> None:
    """Llama 3.2 1B's head is worth some four of its sixteen layers."""
    before = plan_of_four()
    trials = Trials(before)
    result = best_split(trials, Least(trials, UNLIMITED, "none"))
    assert result is not None and result.counts == (5, 5, 5, 1) and result.cuts.proven
    assert result.trial.step_s < 0.8 * before.step_s


def test_neighbours_and_equal_cuts() -> None:
    assert equal(7, 3) == (3, 2, 2)
    assert sorted(neighbours((1, 2))) == [(2, 1)]
    assert len(set(neighbours((2, 2, 2)))) == 6 and all(sum(cut) == 6 for cut in neighbours((2, 2, 2)))


@pytest.mark.parametrize("seed", range(3))
def test_of_cuts_as_fast_the_one_nearest_to_equal_is_taken(seed: int) -> None:
    """Two virtual stages on each rank: many cuts give the ranks as much work, as (12, 1, 19, 8) and (10, 10, 10,
    10)."""
    plan = Plan(
        mesh=Mesh(pp=2, dp_shard=4), optimizer=Optimizer(zero=1),
        schedule=Schedule(name="interleaved_one_f_one_b", micro_batch_size=1, virtual_stages=2),
    )  # fmt: skip
    work = Workload(global_batch_size=32, seq_len=2048)
    trials = Trials(predict(model("llama-3.2-1b"), parse_cluster("1x8xh100-sxm"), plan, work))
    least = Least(trials, UNLIMITED, "none")
    best = min(
        (least.least_s(cut), cut)
        for cut in random.Random(seed).sample(sorted(cuts.every_cut(len(trials.counted), 4)), 40)
    )
    trial = least.fit(best[1])
    assert trial is not None
    split = BestCut(counts=best[1], trial=trial, cuts=Cuts(), fits=(best,))
    result = plainest(split, least, 0.05).plan.schedule.layers_per_stage
    mean = len(trials.counted) / 4
    assert sum((n - mean) ** 2 for n in result) <= sum((n - mean) ** 2 for n in best[1])
    assert least.least_s(result) <= best[0] * 1.05
    assert plainest(split, least, 0.05).step_s == least.least_s(result)


def test_one_stage_is_refused() -> None:
    work = Workload(global_batch_size=2, seq_len=128)
    trials = Trials(predict("gpt2", "h100-sxm", Plan(schedule=Schedule(micro_batch_size=1)), work))
    with pytest.raises(PlanError, match="one stage"):
        best_split(trials, Least(trials, UNLIMITED, "none"))


@pytest.mark.parametrize("share", [0.55, 0.7, 0.85])
def test_the_least_recompute_that_fits(share: float) -> None:
    """On every rank one layer fewer recomputed does not fit, and what has room recomputes nothing."""
    before = plan_of_four("llama-2-7b", micro=4)
    peaks = [rank.peak_bytes for rank in before.memory]
    limit = int(share * max(peaks))
    trials, cut = Trials(before), (8, 8, 8, 8)
    trial = Least(trials, limit, "stage").fit(cut)
    assert trial is not None and max(trial.peaks) <= limit
    presets = layer_presets(trial.plan, trials.graph)
    for stage in range(4):
        mine = [presets[f"layers[{8 * stage + i}]"] for i in range(8)]
        full = mine.count("full")
        assert (full == 0) == (peaks[stage] <= limit)
        if full:
            fewer = trials.recut.plain(cut)
            fewer = tuple(("full",) * (full - 1) + ("none",) * (9 - full) if s == stage else p
                          for s, p in enumerate(fewer))  # fmt: skip
            assert trials.peaks(cut, fewer)[stage] > limit
    # more on the first stages of 1F1B, which hold more microbatches
    counts = [sum(presets[f"layers[{8 * stage + i}]"] == "full" for i in range(8)) for stage in range(3)]
    assert counts == sorted(counts, reverse=True)


def test_what_does_not_fit_at_all_is_none() -> None:
    trials = Trials(plan_of_four("llama-2-7b", micro=4))
    assert Least(trials, 2**30, "stage").fit((8, 8, 8, 8)) is None


def test_a_stack_with_one_number_for_all_stages() -> None:
    """Megatron-LM's block recompute: as many layers in every stage."""
    before = plan_of_four("llama-2-7b", micro=4)
    limit = int(0.7 * max(rank.peak_bytes for rank in before.memory))
    by_stage = Least(Trials(before), limit, "stage").fit((8, 8, 8, 8))
    alike = Least(Trials(before), limit, "block").fit((8, 8, 8, 8))
    assert by_stage is not None and alike is not None
    (rule,) = alike.plan.saved.rules
    assert rule.preset == "full" and rule.stages in ((), (0, 1, 2, 3)) and max(alike.peaks) <= limit
    assert by_stage.step_s <= alike.step_s
    none = Least(Trials(before), limit, "none").fit((8, 8, 8, 8))
    assert none is None and before.plan.saved == Saved()

"""Tensors that rules keep, compute again or send to the host: no bit changes, and memory is as predicted."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import gnomon  # noqa: E402
from gnomon.graph import Graph  # noqa: E402
from gnomon.models.llama import LlamaConfig, llama  # noqa: E402
from gnomon.models.mixtral import MixtralConfig, mixtral  # noqa: E402
from gnomon.plans import Plan, Precision, Saved, SavedRule, Schedule, Workload  # noqa: E402
from gnomon.runtime.watch.layer_bytes import LiveBytes  # noqa: E402
from gnomon.runtime.watch.measure import CLASSES, Levels, Recorder  # noqa: E402
from gnomon.search.checkpointing import least_recompute  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = dict(num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, vocab_size=128)
MODELS: dict[str, Graph] = {
    "llama": llama(LlamaConfig(name="narrow", ffn_size=96, **SIZES)),
    "mixtral": mixtral(
        MixtralConfig(name="narrow-moe", expert_ffn_size=32, num_experts=4, experts_per_token=2, **SIZES)
    ),
}
WORK = Workload(global_batch_size=4, seq_len=32)
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
IDS = torch.arange(4 * 33).view(4, 33) * 7 % 64
AGAIN, AWAY = SavedRule(action="recompute"), SavedRule(action="offload")
RULES: dict[str, tuple[SavedRule, ...]] = {
    "all again": (AGAIN,),
    "all on the host": (AWAY,),
    "the input too": (SavedRule(tensors=("*", "input"), action="offload"),),
    "feed-forward again": (SavedRule(tensors=("mlp.*", "block_sparse_moe.*"), action="recompute"),),
    "attention away, the rest again": (AGAIN, SavedRule(tensors=("self_attn.*",), action="offload")),
    "one layer": (SavedRule(calls="layers[0:1]", action="recompute"),),
    "input away, the rest again": (AGAIN, SavedRule(tensors=("input",), action="offload")),
    "all but some": (AGAIN, SavedRule(tensors=("self_attn.*",), action="keep")),
}


def plan_of(rules: tuple[SavedRule, ...], name: str = "one_f_one_b") -> Plan:
    return Plan(schedule=Schedule(name=name, num_microbatches=2), precision=FP32, saved=Saved(rules=rules))


def planned(model: str, rule: str, schedule: str = "one_f_one_b") -> Plan:
    """Without patterns of the other model, which a plan must not have."""
    names = {name for block in MODELS[model].blocks for name in (*block.inputs, *(op.path for op in block.ops))}
    rules = tuple(
        replace(r, tensors=tuple(t for t in r.tensors if t in ("*", "input") or any(fnmatchcase(n, t) for n in names)))
        for r in RULES.get(rule, ())
    )
    return plan_of(rules, schedule)


@cache
def trained(model: str, rule: str, schedule: str = "one_f_one_b") -> tuple[dict[str, torch.Tensor], list[Levels]]:
    """Parameters after three steps, and what was held after each row of the last; a step leaves nothing behind."""
    live = LiveBytes(torch.device("cpu"))
    with gnomon.prepare(MODELS[model], planned(model, rule, schedule), workload=WORK, seed=3) as job:
        job.step(IDS)
        recorder = Recorder(memory=True)
        with live:
            job.step(IDS)
            left = live.now
            job.executor.step(IDS, recorder)
        assert not job.executor.compute.saved
        assert live.now <= left
        return job.state_dict(), [levels for _, levels in recorder.levels]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
def test_no_bit_changes(model: str, rule: str) -> None:
    plain, actual = trained(model, "")[0], trained(model, rule)[0]
    assert all(torch.equal(value, actual[name]) for name, value in plain.items())


def test_nor_where_weight_gradients_wait() -> None:
    plain, actual = trained("llama", "")[0], trained("llama", "all again", "zero_bubble_h1")[0]
    assert all(torch.equal(value, actual[name]) for name, value in plain.items())


@pytest.mark.parametrize("rule", RULES)
def test_what_stays_on_the_device_is_as_predicted(rule: str) -> None:
    """Activations at their peak; with inputs of layers on the host, those of the head and the last layer are too, which
    the prediction leaves on the device."""
    held = max(levels[CLASSES.index("activations")] for levels in trained("llama", rule)[1])
    prediction = gnomon.predict(MODELS["llama"], "local", planned("llama", rule), WORK, stack("gnomon"))
    predicted = prediction.memory[0].by_class["activations"]
    assert held == pytest.approx(predicted, rel=0.05) or ("input" in rule and held < predicted)


def test_what_the_integer_programme_chose_runs_as_predicted() -> None:
    """In memory half way between keeping and recomputing everything."""
    pytest.importorskip("scipy", reason="scipy is not installed: its solver chooses")
    graph = llama(LlamaConfig(name="deeper", ffn_size=96, **{**SIZES, "num_layers": 8}))
    work, ids = Workload(global_batch_size=4, seq_len=1024), torch.arange(4 * 1025).view(4, 1025) * 7 % 64
    none, full = (gnomon.predict(graph, "local:1", plan_of(rules), work, stack("gnomon")) for rules in ((), (AGAIN,)))
    least = least_recompute(none, (none.memory[0].peak_bytes + full.memory[0].peak_bytes) // 2)
    assert least is not None
    assert none.step_s < least.prediction.step_s < full.step_s
    states, held = [], 0
    for plan in (plan_of(()), least.prediction.plan):
        with gnomon.prepare(graph, plan, workload=work, seed=3) as job:
            job.step(ids)
            recorder = Recorder(memory=True)
            job.executor.step(ids, recorder)
            states.append(job.state_dict())
            held = max(levels[CLASSES.index("activations")] for _, levels in recorder.levels)
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert held == pytest.approx(least.prediction.memory[0].by_class["activations"], rel=0.05)


def test_what_it_sends_to_the_host_changes_no_bit() -> None:
    """The choice for long rows, run with short ones."""
    pytest.importorskip("scipy", reason="scipy is not installed: its solver chooses")
    long = replace(WORK, seq_len=1 << 15)
    made = [gnomon.predict(MODELS["llama"], "1xa100-sxm-80gb", plan_of(rules), long) for rules in ((), (AGAIN,))]
    least = least_recompute(made[0], sum(one.memory[0].peak_bytes for one in made) // 2, offload=True)
    assert least is not None
    assert {rule.action for rule in least.prediction.plan.saved.rules} >= {"recompute", "offload"}
    plain = trained("llama", "")[0]
    with gnomon.prepare(MODELS["llama"], least.prediction.plan, workload=WORK, seed=3) as job:
        for _ in range(3):
            job.step(IDS)
        actual = job.state_dict()
    assert all(torch.equal(value, actual[name]) for name, value in plain.items())


def test_selective_beside_tensors_changes_no_bit_and_keeps_what_is_predicted() -> None:
    """One layer by both, the other by the preset."""
    rules = (SavedRule(calls="layers[1:2]", tensors=("mlp.*",), action="recompute"),)
    plan = replace(plan_of(rules), saved=Saved(preset="selective", rules=rules))
    with gnomon.prepare(MODELS["llama"], plan, workload=WORK, seed=3) as job:
        for _ in range(2):
            job.step(IDS)
        recorder = Recorder(memory=True)
        job.executor.step(IDS, recorder)
        states, held = job.state_dict(), max(levels[CLASSES.index("activations")] for _, levels in recorder.levels)
    assert all(torch.equal(value, states[name]) for name, value in trained("llama", "")[0].items())
    predicted = gnomon.predict(MODELS["llama"], "local", plan, WORK, stack("gnomon")).memory[0]
    assert held == pytest.approx(predicted.by_class["activations"], rel=0.05)

"""Times that a simulator puts together: layers one behind the other, collectives that no host issues, messages at one
rate."""

from __future__ import annotations

import pytest

from gnomon.errors import PlanError
from gnomon.plans import Mesh, Overlap, Plan, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.search.space.points import stack_limits
from gnomon.software import Fact, Stack, stack

WORK = Workload(global_batch_size=16, seq_len=1024)


def stack_with(**values: object) -> Stack:
    facts = tuple(Fact(field=name, source="a test", date="2026-11-23") for name in values)
    return Stack(name="test", version="0").with_values(facts, **values)


def run(program: Stack, batch: int = 1, **axes: int) -> Prediction:
    schedule = Schedule(name="one_f_one_b", micro_batch_size=batch)
    copies = 8 // (axes.get("tp", 1) * axes.get("pp", 1))
    plan = Plan(mesh=Mesh(dp_replicate=copies, **axes), schedule=schedule, overlap=Overlap(pipeline_sends=False))
    return predict("gpt2", "1x8xa100-sxm-80gb", plan, WORK, program)


def parts(result: Prediction, kind: str) -> dict[str, float]:
    return result.pricing.compute.parts(kind, 0)


def test_vtrains_messages_are_twice_as_large_over_a_quarter_of_800_gigabits() -> None:
    outcome = run(stack("vtrain"), batch=2, pp=4)
    sent = next(key for key in outcome.structure.program.keys if key.kind == "SEND_F")
    activation = 2 * 1024 * 768 * 2  # sequences, tokens, hidden, bytes
    assert outcome.pricing.seconds(sent) == pytest.approx(2 * activation / (800 * 2**30 / 8 / 4))


def test_no_host_runs_ahead_beside_a_collective() -> None:
    """The second of four stages has three layers and nothing else. gpt2's are shorter than their launches."""
    outcome = run(stack_with(composed=True), tp=2, pp=4).pricing
    ((layer, alike),) = outcome.stages[1].layers
    host = layer.forward.launches * outcome.launch_s[1]
    assert len(alike) == 3 and host > layer.forward.compute_s / outcome.rates[1].compute
    waited = layer.forward.comm_s["tp"] * outcome.rates[1].exposed
    assert sum(outcome.compute.parts("F", 1).values()) == pytest.approx(3 * (host + waited))


def test_embedding_and_head_have_no_collective() -> None:
    """Twelve layers' alone, of the fourteen blocks that sum over ranks forward."""
    outcome = run(stack_with(composed=True), tp=4).pricing
    (layers,) = [price for price, alike in outcome.stages[0].layers if len(alike) == 12]
    waited = 12 * layers.forward.comm_s["tp"] * outcome.rates[0].exposed
    assert outcome.compute.parts("F", 0)["tp"] == pytest.approx(waited)
    assert run(stack_with(), tp=4).pricing.compute.parts("F", 0)["tp"] > waited


def test_a_profiled_layer_turns_its_input_and_its_output() -> None:
    """Two kernels, which read and write the hidden states once each; of one sequence there is nothing to turn."""
    for sequences, turned in ((1, 0), (2, 2)):
        plain, profiled = (run(stack_with(composed=how), batch=sequences).pricing for how in (False, True))
        (mine,), (other,) = ([p for p, alike in of.stages[0].layers if len(alike) == 12] for of in (profiled, plain))
        assert mine.forward.kernels - other.forward.kernels == turned
        assert mine.input_grad == other.input_grad and mine.weight_grad == other.weight_grad
        least = turned * 2 * sequences * 1024 * 768 * 2 / 2.039e12  # bytes over the peak of HBM
        assert least <= mine.forward.compute_s - other.forward.compute_s <= 2 * least


def test_the_gradient_of_the_loss_and_the_last_norm_are_not_profiled() -> None:
    """Of the head's backward two products are left; its loss walks the logits four times."""
    head = run(stack("vtrain")).pricing.stages[0].layers[-1][0]
    assert (head.forward.kernels, head.input_grad.kernels, head.weight_grad.kernels) == (4, 1, 1)
    logits = 1024 * 50_257 * 2
    assert head.forward.compute_s - head.input_grad.compute_s > 4 * logits / 2.039e12 * 0.9


def test_launches_forward_are_dearer_and_those_of_a_layer_as_dear_together() -> None:
    even, uneven = run(stack_with(composed=True), tp=4), run(stack_with(composed=True, forward_launches=2.0), tp=4)
    host = [{kind: parts(entry, kind)["launch"] for kind in "FB"} for entry in (even, uneven)]
    layer = even.pricing.stages[0].layers[0][0]
    assert layer.forward.launches < layer.forward.kernels  # collectives are no launches here
    assert host[1]["F"] > host[0]["F"] and host[1]["B"] < host[0]["B"]
    assert host[1]["F"] - host[0]["F"] == pytest.approx(host[0]["B"] - host[1]["B"], rel=0.1)


def test_nobody_plans_for_a_simulator() -> None:
    outcome = run(stack("vtrain"))
    with pytest.raises(PlanError, match="is a simulator, which runs nothing"):
        stack_limits(stack("vtrain"), outcome.pricing.graph, Plan())

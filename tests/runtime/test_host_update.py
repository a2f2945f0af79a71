"""Updates on the host: the plain model's training, the bytes that go down and back, and what the device holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import CONFIG, FP32, FP64, SETTINGS, WORKLOAD, token_ids  # noqa: E402

import gnomon  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Optimizer, Plan, Precision, Schedule  # noqa: E402
from gnomon.plans.parts import Offload  # noqa: E402
from gnomon.runtime.step.host_update import HostPart  # noqa: E402
from gnomon.runtime.watch.measure import CLASSES, Recorder  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH = llama(CONFIG)
UNITS, STEPS = 4, 3
MIXED = Precision()
OFFLOADS = {
    "as they are made": Offload(),
    "after the last microbatch": Offload(accumulate="device"),
    "in two tiles": Offload(tiles=2),
    "half on the device": Offload(fraction=0.5),
}


def plan_of(offload: Offload | None, clip: bool, precision: Precision = FP64) -> Plan:
    return Plan(
        schedule=Schedule(num_microbatches=UNITS),
        precision=precision,
        optimizer=Optimizer(offload=offload, clip=clip),
    )


@cache
def trained(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor], dict[str, int], dict[str, int]]:
    """(losses and norms, parameters, bytes copied in all, peak of each class in the last step)."""
    with gnomon.prepare(GRAPH, plan, workload=WORKLOAD, seed=3, settings=SETTINGS) as job:
        numbers = []
        for step in range(STEPS):
            recorder = Recorder(memory=True)
            result = job.executor.step(token_ids(step, CONFIG, WORKLOAD), recorder)
            numbers += [float(result.loss), float(result.grad_norm)] if plan.optimizer.clip else [float(result.loss)]
        peaks = {name: max(row[1][i] for row in recorder.levels) for i, name in enumerate(CLASSES)}
        return numbers, job.state_dict(), dict(job.executor.host.nbytes), peaks


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", OFFLOADS)
def test_it_trains_as_an_update_on_the_device_does(name: str, clip: bool) -> None:
    device, host = trained(plan_of(None, clip)), trained(plan_of(OFFLOADS[name], clip))
    assert host[0] == pytest.approx(device[0], rel=1e-9)
    for parameter, value in device[1].items():
        torch.testing.assert_close(host[1][parameter], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("name", OFFLOADS)
def test_a_thread_that_lags_changes_no_bit(name: str, clip: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where rows go on while the host adds, updates and sends back."""
    plan = plan_of(OFFLOADS[name], clip)

    def late(done: Callable[..., object]) -> Callable[..., object]:
        def wrapped(part: HostPart, *args: object) -> object:
            time.sleep(0.002)
            return done(part, *args)

        return wrapped

    for what in ("add", "go_back"):
        monkeypatch.setattr(HostPart, what, late(getattr(HostPart, what)))
    with gnomon.prepare(GRAPH, plan, workload=WORKLOAD, seed=3, settings=SETTINGS) as job:
        job.executor.host.threaded = True
        losses = [float(job.executor.step(token_ids(step, CONFIG, WORKLOAD)).loss) for step in range(STEPS)]
        parameters = job.state_dict()
    losses_before, parameters_before, _, _ = trained(plan)
    assert losses == losses_before[:: 2 if clip else 1]
    assert all(torch.equal(value, parameters_before[name]) for name, value in parameters.items())


def test_mixed_precision_has_its_master_copy_on_the_host() -> None:
    device = trained(plan_of(None, True, MIXED))
    host = trained(plan_of(Offload(accumulate="device"), True, MIXED))
    assert host[0] == pytest.approx(device[0], rel=1e-3)
    assert device[3]["master"] > 0 and host[3]["master"] == host[3]["states"] == 0


@pytest.mark.parametrize("name", ["as they are made", "after the last microbatch"])
def test_bytes_of_a_step(name: str) -> None:
    """Every gradient goes down once a microbatch, or once, and every parameter comes back once."""
    size = sum(value.nbytes for value in trained(plan_of(None, True))[1].values())
    times = UNITS if name == "as they are made" else 1
    assert trained(plan_of(OFFLOADS[name], True))[2] == {"D2H": STEPS * times * size, "H2D": STEPS * size}


@pytest.mark.parametrize("name", OFFLOADS)
def test_the_device_holds_what_is_predicted(name: str) -> None:
    plan = plan_of(OFFLOADS[name], True, FP32)
    held = trained(plan)[3]
    predicted = gnomon.predict(GRAPH, "local", plan, WORKLOAD, stack("gnomon")).memory[0].by_class
    whole = trained(replace(plan, optimizer=Optimizer()))[3]
    for cls in ("parameters", "states"):
        assert held[cls] == predicted.get(cls, 0)
    assert held["gradients"] <= predicted["gradients"] <= whole["gradients"]

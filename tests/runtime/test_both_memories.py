"""Where host and device are one memory: what a plan that offloads takes of it, predicted and counted in a real step."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.accounted import CONFIG, WORKLOAD  # noqa: E402
from runtime.parity import FP32, schedule  # noqa: E402

import gnomon  # noqa: E402
from gnomon.hardware import parse_cluster  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Offload, Optimizer, Plan  # noqa: E402
from gnomon.prediction import host_memory, together  # noqa: E402
from gnomon.prediction.loading import host_short  # noqa: E402
from gnomon.runtime.watch.layer_bytes import LiveBytes  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH = llama(replace(CONFIG, num_layers=6, ffn_size=512, vocab_size=1024))
TIED = llama(replace(CONFIG, num_layers=6, ffn_size=512, vocab_size=1024, tied=True))
HOST = Optimizer(offload=Offload(), clip=False)
OPTIMIZERS = {
    "nothing on the host": Optimizer(),
    "update": HOST,
    "update, gradients added on the device": replace(HOST, offload=Offload(accumulate="device")),
    "half of the update": replace(HOST, offload=Offload(fraction=0.5)),
    "parameters": Optimizer(zero=3, offload_parameters=True),
    "parameters and update": replace(HOST, zero=3, offload_parameters=True),
    "parameters and update, tied": replace(HOST, zero=3, offload_parameters=True),
}
CPU = parse_cluster("local:1")


def plan_of(name: str) -> Plan:
    return Plan(schedule=schedule("one_f_one_b"), precision=FP32, optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_is_what_tensors_take(name: str) -> None:
    """Within 2 %, in the third step; the two peaks added are up to a third more."""
    graph, live = TIED if name.endswith("tied") else GRAPH, LiveBytes(torch.device("cpu"))
    guess = gnomon.predict(graph, CPU, plan_of(name), WORKLOAD, "gnomon")
    ids = torch.randint(0, 256, (WORKLOAD.global_batch_size, (WORKLOAD.seq_len or 0) + 1))
    with live, gnomon.prepare(graph, plan_of(name), workload=WORKLOAD, device="cpu") as job:
        job.step(ids)
        job.step(ids)
        live.again()
        job.step(ids)
        counted = live.most
    (predicted,) = together(guess)
    assert predicted == pytest.approx(counted, rel=0.02)


def test_on_a_cpu_an_update_on_the_host_frees_nothing() -> None:
    """A plan fits only where there is room for both."""
    (group,) = CPU.groups
    here, away = (gnomon.predict(GRAPH, CPU, plan_of(name), WORKLOAD, "gnomon") for name in list(OPTIMIZERS)[:2])
    assert host_memory(here).bytes == 0 and host_memory(here).fits
    (both,) = together(away)
    assert both > together(here)[0] and away.tightest.peak_bytes < here.tightest.peak_bytes
    for room, fits in ((both, True), (both - 1, False)):
        device = replace(group.node.device, memory_bytes=room, marketed_memory_bytes=room)
        machine = replace(CPU, groups=(replace(group, node=replace(group.node, device=device)),))
        found = gnomon.predict(GRAPH, machine, plan_of("update"), WORKLOAD, "gnomon")
        assert host_memory(found).fits == fits == (not host_short(found)) == (not host_short(away, room))

"""Parameters on a disk: the same training to the bit, files that are read ahead and leave nothing, and a full disk."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import CONFIG, FP32, SETTINGS, WORKLOAD, token_ids  # noqa: E402
from runtime.ranks import launch  # noqa: E402
from search.spaces import with_disks  # noqa: E402

import gnomon  # noqa: E402
from gnomon import hardware  # noqa: E402
from gnomon.errors import PlanError, RunError, UnpricedError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Goal, Mesh, Optimizer, Plan, Precision, Saved, SavedRule, Schedule  # noqa: E402
from gnomon.plans.parts import Offload  # noqa: E402
from gnomon.prediction import host_memory  # noqa: E402
from gnomon.runtime.parameters.files import ParameterFile, ReadAhead  # noqa: E402
from gnomon.search import plan  # noqa: E402
from gnomon.software import stack  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH, STEPS = llama(CONFIG), 2
HOST = Optimizer(zero=3, offload_parameters=True)
DISK = replace(HOST, parameter_tier="disk")
ONE = Plan(schedule=Schedule(num_microbatches=2), precision=FP32, optimizer=HOST)
PLANS = {
    "one rank": ONE,
    "masters in fp32, half of the update on the host": replace(
        ONE, precision=Precision(), optimizer=replace(HOST, offload=Offload(fraction=0.5))
    ),
    "update on the host, activations too": replace(
        ONE, optimizer=replace(HOST, offload=Offload(), clip=False), saved=Saved(rules=(SavedRule(action="offload"),))
    ),
}
SMALL = {"micro_batch_size": 4, "recompute": "none"}
Numbers = tuple[list[float], dict[str, torch.Tensor]]


def on_disk(plan: Plan) -> Plan:
    return replace(plan, optimizer=replace(plan.optimizer, parameter_tier="disk"))


@cache
def trained(plan: Plan) -> Numbers:
    with gnomon.prepare(GRAPH, plan, workload=WORKLOAD, seed=3, settings=SETTINGS) as job:
        losses = [float(job.executor.step(token_ids(step, CONFIG, WORKLOAD)).loss) for step in range(STEPS)]
        return losses, job.state_dict()


def same(one: Numbers, other: Numbers) -> None:
    assert one[0] == other[0] and one[1].keys() == other[1].keys()
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize("name", PLANS)
def test_no_bit_of_training_changes(name: str) -> None:
    same(trained(on_disk(PLANS[name])), trained(PLANS[name]))


def test_a_plan_that_was_chosen_for_its_memory_runs() -> None:
    """The best of `gnomon plan` where parameters have no room."""
    graph = llama(replace(CONFIG, num_layers=10, hidden_size=128, ffn_size=512))
    machine = with_disks(hardware.parse_cluster("local:1"), 1e9)
    held = Goal(memory_bytes=gnomon.predict(graph, machine, on_disk(ONE), WORKLOAD, "gnomon").tightest.peak_bytes)
    result = plan(graph, machine, WORKLOAD, stack("gnomon"), held, base=Plan(precision=FP32), fixed=SMALL, top=1)
    found = result.best[0].plan
    assert found.optimizer.parameter_tier == "disk"
    ids, losses = token_ids(0, CONFIG, WORKLOAD), []
    for optimizer in (found.optimizer, Optimizer()):
        with gnomon.prepare(graph, replace(found, optimizer=optimizer), workload=WORKLOAD, settings=SETTINGS) as job:
            losses.append([float(job.executor.step(ids).loss) for _ in range(STEPS)])
    assert losses[0] == losses[1]


def all_three() -> list[Numbers]:
    """On two ranks, which divide each layer: on the device, on the host and on a disk."""
    torch.set_num_threads(1)
    plan = replace(ONE, mesh=Mesh(dp_shard=2))
    return [trained(replace(plan, optimizer=Optimizer(zero=3))), trained(plan), trained(on_disk(plan))]


def test_ranks_that_divide_them_train_alike() -> None:
    for here, host, disk in launch(all_three, 2).values():
        same(here, host)
        same(host, disk)


def test_what_was_written_is_read_and_nothing_has_a_name(tmp_path: Path) -> None:
    files = [ParameterFile(torch.arange(5000.0) + i, tmp_path, pinned=False) for i in range(4)]
    assert not list(tmp_path.iterdir())
    ahead = ReadAhead([*files, files[3]])
    for factor in (1, 2):
        for i, file in enumerate(files):
            assert torch.equal(file.take(), factor * (torch.arange(5000.0) + i))
        for file in files:  # the last was read ahead again: what was read is old now
            file.tensor.mul_(2)
            file.updated()
        ahead.finish()
    assert torch.equal(files[2].take(), 4 * (torch.arange(5000.0) + 2))  # out of order
    ahead.close()


def test_a_full_disk_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GNOMON_DISK", str(tmp_path))
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, before[1]))
    try:
        with (
            pytest.raises(RunError, match="parameters into a file in .*: File too large; make room there, or set GNOM"),
            gnomon.prepare(GRAPH, replace(ONE, optimizer=DISK), workload=WORKLOAD),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("GNOMON_DISK", str(tmp_path / "none"))
    with (
        pytest.raises(RunError, match="No such file or directory"),
        gnomon.prepare(GRAPH, replace(ONE, optimizer=DISK), workload=WORKLOAD),
    ):
        pass


def test_a_disk_is_priced_and_frees_the_host() -> None:
    """All ranks of a node share its disk; a plan needs the rates of one."""
    cluster = hardware.parse_cluster("1x4xa100-sxm-80gb")
    (group,) = cluster.groups
    plan = Plan(
        mesh=Mesh(dp_shard=4), schedule=Schedule(num_microbatches=1), optimizer=replace(HOST, keep_last_block=False)
    )

    def step(plan: Plan, rate: float | None) -> gnomon.Prediction:
        node = replace(group.node, disk_read_bytes_per_s=rate, disk_write_bytes_per_s=rate)
        return gnomon.predict(GRAPH, replace(cluster, groups=(replace(group, node=node),)), plan, WORKLOAD, "gnomon")

    host, slow, fast = step(plan, 1e3), step(on_disk(plan), 1e3), step(on_disk(plan), 1e12)
    whole = 2 * sum(host.pricing.stages[0].elements)
    # read for forward and backward, and by the update, which writes; the next step may begin beside the last updates
    assert 3 < slow.step_s * 1e3 / whole < 4.01
    assert host.step_s <= fast.step_s < 1.01 * host.step_s
    assert host_memory(slow).bytes < host_memory(host).bytes
    assert slow.tightest.peak_bytes == host.tightest.peak_bytes
    with pytest.raises(UnpricedError, match="does not say how fast its disk is"):
        step(on_disk(plan), None)


def test_refusals() -> None:
    for optimizer, message in (
        (Optimizer(parameter_tier="disk"), "offload_parameters = true only"),
        (replace(DISK, offload=Offload(), delay=1), "delay with optimizer.offload_parameters"),
    ):
        with (
            pytest.raises(PlanError, match=message),
            gnomon.prepare(GRAPH, replace(ONE, optimizer=optimizer), workload=WORKLOAD),
        ):
            pass

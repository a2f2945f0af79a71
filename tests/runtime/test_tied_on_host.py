"""Tied weights with their update on the host: one shard, or one parameter on two stages, whose gradient comes from two
layers."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import FP64, SETTINGS, WORKLOAD, config_of, token_ids  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Offload, Optimizer, Plan, Schedule  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG, STEPS = config_of(", tied"), 3
GRAPH = llama(CONFIG)
HOST = Optimizer(zero=3, offload=Offload())
OPTIMIZERS = {
    "update on the host": HOST,
    "without clipping": replace(HOST, clip=False),
    "parameters there too": replace(HOST, offload_parameters=True),
    "parameters on a disk": replace(HOST, offload_parameters=True, parameter_tier="disk"),
}
USUAL = Schedule(num_microbatches=2)
V = Schedule(name="v_half", virtual_stages=2, placement="v", num_microbatches=2)
"""Embedding and head on one rank, where no message adds up their gradients."""
Numbers = tuple[list[float], dict[str, torch.Tensor]]


def trained(mesh: Mesh, optimizer: Optimizer, schedule: Schedule = USUAL) -> Numbers:
    plan = Plan(mesh=mesh, schedule=schedule, precision=FP64, optimizer=optimizer)
    with gnomon.prepare(GRAPH, plan, workload=WORKLOAD, seed=3, settings=SETTINGS) as job:
        losses = [job.step(token_ids(step, CONFIG, WORKLOAD)) for step in range(STEPS)]
        return losses, job.state_dict()


def same(one: Numbers, other: Numbers) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-9) and one[1].keys() == other[1].keys()
    for name, value in other[1].items():
        torch.testing.assert_close(one[1][name], value, rtol=1e-9, atol=1e-12)


def of_two() -> dict[str, Numbers]:
    torch.set_num_threads(1)
    return {name: trained(Mesh(dp_shard=2), one) for name, one in OPTIMIZERS.items()}


def test_two_ranks_train_as_one_that_keeps_everything() -> None:
    want = {clip: trained(Mesh(), Optimizer(clip=clip)) for clip in (False, True)}
    for found in launch(of_two, 2).values():
        for name, numbers in found.items():
            same(numbers, want[OPTIMIZERS[name].clip])


def test_one_rank_with_everything_on_the_host() -> None:
    same(trained(Mesh(), OPTIMIZERS["parameters there too"]), trained(Mesh(), Optimizer()))


OVER_STAGES = {
    "update on the host": (Mesh(pp=2), Optimizer(offload=Offload())),
    "without clipping": (Mesh(pp=2), Optimizer(clip=False, offload=Offload())),
    "zero 1, without clipping": (Mesh(pp=2, dp_shard=2), Optimizer(zero=1, clip=False, offload=Offload())),
    "zero 3": (Mesh(pp=2, dp_shard=2), HOST),
    "a V": (Mesh(pp=2), Optimizer(offload=Offload())),
    "a V, without clipping": (Mesh(pp=2), Optimizer(clip=False, offload=Offload())),
    "a V, without clipping, zero 1, two tiles": (
        Mesh(pp=2, dp_shard=2),
        Optimizer(zero=1, clip=False, offload=Offload(tiles=2)),
    ),
    "zero 3, parameters there too": (Mesh(pp=2, dp_shard=2), replace(HOST, offload_parameters=True)),
}


def over_stages(ranks: int) -> dict[str, Numbers]:
    torch.set_num_threads(1)
    return {
        name: trained(*given, V if name.startswith("a V") else USUAL)
        for name, given in OVER_STAGES.items()
        if given[0].world_size == ranks
    }


def test_pipeline_stages_that_hold_them_add_up_their_gradients_before_these_go_down() -> None:
    want = {clip: trained(Mesh(), Optimizer(clip=clip)) for clip in (False, True)}
    for ranks in (2, 4):
        for found in launch(over_stages, ranks, ranks).values():
            for name, numbers in found.items():
                same(numbers, want[OVER_STAGES[name][1].clip])

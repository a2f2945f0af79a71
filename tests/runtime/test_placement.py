"""Ranks on other devices than those of their own numbers: each process is the rank that the plan puts on its device."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

import torch.distributed as dist  # noqa: E402
from runtime.parity import CONFIG, FP64, schedule  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.errors import PlanError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Plan, Workload  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.checks.parity import ParityResult, Small, compare  # noqa: E402
from gnomon.runtime.processes.launch import rank_at  # noqa: E402

pytestmark = pytest.mark.torch

PLAN = Plan(mesh=Mesh(pp=2), schedule=schedule("one_f_one_b", 2), precision=FP64, placement=(1, 0))
SMALL = Small(graph=llama(CONFIG), plan=PLAN, workload=Workload(global_batch_size=4, seq_len=6))


def placed() -> tuple[int, int, list[int], ParityResult]:
    """(number of the process, its rank, stages that it holds, what differs from the plain model)."""
    executor = Executor(SMALL.graph, SMALL.plan, SMALL.workload)
    stages = list(executor.stages)
    executor.leave()
    return int(os.environ["LOCAL_RANK"]), dist.get_rank(), stages, compare(SMALL)


def misplaced() -> str:
    try:
        Executor(SMALL.graph, SMALL.plan, SMALL.workload)
    except PlanError as error:
        return str(error)
    return ""


def test_each_process_is_the_rank_of_its_device() -> None:
    """And trains as the plain model does, to 1e-9."""
    results = launch(placed, 2, places=PLAN.device_of)
    for number, rank, stages, compared in results.values():
        assert PLAN.device_of[rank] == number and rank == 1 - number and stages == [rank]
        assert not compared.first and compared.largest <= 1e-9
    assert [rank_at(number, (2, 0, 1)) for number in range(3)] == [1, 2, 0]


def test_a_process_at_another_place_is_refused_before_it_holds_anything() -> None:
    for rank, message in launch(misplaced, 2).items():
        assert f"placement gives rank {rank} device {1 - rank}, and its process is number {rank}" in message

"""Mario on real plans, run: whatever the schedule, what is computed again in idle time changes no bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime.parity import CONFIG, FP32, SETTINGS, WORKLOAD, schedule, token_ids, v  # noqa: E402
from runtime.ranks import launch  # noqa: E402

import gnomon  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Pass, Plan, PlanFile, Schedule  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH, STEPS = llama(CONFIG), 2
SCHEDULES: dict[str, Schedule] = {
    "1f1b": schedule("one_f_one_b"),
    "interleaved": schedule("interleaved_one_f_one_b", virtual_stages=2),
    "zero bubble h1": schedule("zero_bubble_h1"),
    "zero bubble v": v("zero_bubble_v"),
    "v half": v("v_half"),
}


def trained(plan: Plan) -> tuple[list[float], dict[str, torch.Tensor], list[str]]:
    """(losses, parameters at the end, kinds of the rows)."""
    file = PlanFile(model="small", on="local:2", stack="gnomon", workload=WORKLOAD, plan=plan)
    with gnomon.prepare(GRAPH, file, seed=3, settings=SETTINGS) as job:
        losses = [float(job.executor.step(token_ids(step, CONFIG, WORKLOAD)).loss) for step in range(STEPS)]
        program = job.executor.program
        return losses, job.state_dict(), [program.kinds[kind].name for kind in program.kind.tolist()]


def each_with_and_without() -> dict[str, tuple[bool, int]]:
    """Schedule -> (the same bits with Mario, rows that compute again)."""
    torch.set_num_threads(1)
    out = {}
    for name, one in SCHEDULES.items():
        plan = Plan(mesh=Mesh(pp=2), schedule=one, precision=FP32)
        losses, values, _ = trained(plan)
        again, others, rows = trained(replace(plan, schedule=replace(one, passes=(Pass(name="mario"),))))
        same = losses == again and all(torch.equal(value, others[key]) for key, value in values.items())
        out[name] = same, rows.count("R")
    return out


def test_no_bit_changes_on_any_schedule() -> None:
    for found in launch(each_with_and_without, 2).values():
        assert found.keys() == SCHEDULES.keys()
        assert all(same and again > 0 for same, again in found.values()), found

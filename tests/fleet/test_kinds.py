"""Forecasts from points that were measured on several kinds of devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon.errors import InputError
from gnomon.fleet.costs import Costs
from gnomon.fleet.goodput import Profiled
from gnomon.fleet.job import Job, Trace
from gnomon.fleet.kinds import ByKind, read_kind
from gnomon.fleet.machines import Machines, Pool
from gnomon.fleet.policies import policy
from gnomon.fleet.replay import replay
from gnomon.fleet.rules import Rules

POOLS = (Pool(name="slow", device="slow", nodes=1, per_node=4), Pool(name="fast", device="fast", nodes=1, per_node=2))


def write(folder: Path, name: str, step_s: dict[str, float]) -> None:
    """An application of two epochs whose steps take so long on one device of a kind, less on more."""
    inner = folder / name
    inner.mkdir()
    for batch in (32, 64):
        rows = [f"{320 * (epoch + 1)},{10 * (epoch + 1)},0.5,1.0,1.0" for epoch in range(2)]
        (inner / f"validation-{batch}.csv").write_text(
            "\n".join(("progress,iteration,metric,grad_sqr,grad_var", *rows)) + "\n"
        )
    for kind, seconds in step_s.items():
        rows = [
            f"{local},{seconds * (0.5 + local / 64)},{0.0 if shape == '1' else 0.05},{shape}"
            for shape in ("1", "2", "4")
            for local in (8, 16, 32)
        ]
        (inner / f"placements-{kind}.csv").write_text("\n".join(("local_bsz,step_time,sync_time,placement", *rows)))
        (inner / f"scalability-{kind}.csv").write_text(
            "local_bsz,step_time,sync_time,num_nodes,num_replicas\n" + f"8,{seconds},0.1,2,2\n32,{seconds},0.1,2,2\n"
        )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, "cnn", {"slow": 1.0, "fast": 0.25})
    write(tmp_path, "lstm", {"slow": 0.5, "fast": 0.4})
    return tmp_path


def forecasts(folder: Path, **slowdown: float) -> ByKind:
    kinds = {kind: Profiled(read_kind(folder, kind, slowdown=slowdown), adaptive=True) for kind in ("slow", "fast")}
    return ByKind(Machines(POOLS), kinds)


def job(number: int, model: str, submit_s: float = 0.0) -> Job:
    return Job(id=f"{model}-{number}", submit_s=submit_s, work_s=4000.0, devices=1, model=model, batch_size=32)


def test_an_allocation_is_as_fast_as_its_kind_was_measured(folder: Path) -> None:
    told = forecasts(folder)
    slow, fast = (told.phase(job(0, "cnn"), 0.0, ((node, 1),))[0] for node in (0, 1))
    assert fast == pytest.approx(4 * slow)
    assert told.packed(job(0, "cnn"), 0.0, 1, 2, 2)[0] == fast


def test_a_slowdown_makes_steps_longer(folder: Path) -> None:
    plain, slower = forecasts(folder), forecasts(folder, cnn=1.6)
    at = ((0, 1),)
    assert slower.phase(job(0, "cnn"), 0.0, at)[0] == pytest.approx(plain.phase(job(0, "cnn"), 0.0, at)[0] / 1.6)
    assert slower.phase(job(0, "lstm"), 0.0, at) == plain.phase(job(0, "lstm"), 0.0, at)


def test_sia_gives_the_fast_kind_to_the_job_that_gains_by_it(folder: Path) -> None:
    """Two of each: one device more is worth less than the faster kind for the CNN."""
    told, jobs = forecasts(folder), tuple(job(i, model) for i in range(2) for model in ("cnn", "lstm"))
    rules = Rules(costs=Costs(first_start_s=0, restart_s=30, resize_s=30, by_model={"lstm": 7.0}), record=True)
    trace = Trace(name="two of each", format="none", jobs=jobs)
    result = replay(trace, Machines(POOLS), policy("sia"), rules=rules, forecasts=told)
    nodes = {run.index: {node for node, _ in run.allocation} for run in result.runs}  # the last
    assert [nodes[number] for number in range(4)] == [{1}, {0}, {1}, {0}]


def test_what_it_costs_to_start_is_by_model() -> None:
    costs = Costs(first_start_s=1, restart_s=2, resize_s=3, by_model={"bert": 120.0})
    plain, bert = job(0, "cnn"), job(0, "bert")
    assert [costs.pause_s(plain, first=f, resize=r) for f, r in ((True, False), (False, False), (False, True))] == [
        1,
        2,
        3,
    ]
    assert costs.pause_s(bert, first=True, resize=False) == costs.pause_s(bert, first=False, resize=True) == 120


def test_clear_errors(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="placements-tpu.csv"):
        read_kind(folder, "tpu")
    with pytest.raises(InputError, match="no measured points on fast; there are some on slow"):
        ByKind(Machines(POOLS), {"slow": Profiled(read_kind(folder, "slow"), adaptive=True)})
    (folder / "cnn" / "placements-slow.csv").write_text("local_bsz,step_time,sync_time,placement\n8,often,0,1\n")
    with pytest.raises(InputError, match="step_time is 'often', not a number"):
        read_kind(folder, "slow")
    (folder / "cnn" / "placements-slow.csv").write_text("local_bsz,step_time,sync_time,placement\n8,1,0,x\n")
    with pytest.raises(InputError, match="placement is 'x', not a number"):
        read_kind(folder, "slow")
    with pytest.raises(InputError, match="seconds to start jobs of 'bert' must be 0 or more, got -1"):
        Costs(by_model={"bert": -1})

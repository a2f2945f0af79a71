"""A schedule in one file of a folder outside the package is planned, predicted, run by two processes, and listed.

The file holds the order alone: no list of the package knows its name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gnomon
from gnomon import orders
from gnomon.cli import main
from gnomon.plans import Mesh, Plan, Schedule, Workload, check
from gnomon.search.bounds.in_flight import under_way

FILE = '''
"""GPipe whose backwards come last microbatch first, as its paper draws them."""

from gnomon.orders import Order
from gnomon.program.rows import of_lists


def last_first(p, m, v):
    forwards, backwards = [[[(kind, r, u) for u in range(m)] for r in range(p)] for kind in ("F", "B")]
    rows = [f + b[::-1] for f, b in zip(forwards, backwards)]
    return of_lists(rows, num_stages=p, num_units=m)


ORDER = Order(
    name="last_first",
    title="GPipe, last first",
    paper="Huang et al. 2019",
    build=last_first,
    microbatches=lambda p, m, v: "" if m >= p else f"needs at least {p} microbatches, not {m}",
    in_flight=lambda rank, p, m, v: m,
    held="m",
)
'''
JOB = ("llama-tiny", "--on", "1x2xcpu-process", "--precision", "fp32", "--global-batch", "4", "--seq-len", "32")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the schedule; what is added is forgotten after the test."""
    monkeypatch.setattr(orders, "_loaded", dict(orders._loaded))
    monkeypatch.setattr(orders, "_added", {})
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "folder" / "last_first.py"
    path.parent.mkdir()
    path.write_text(FILE, encoding="utf-8")
    return path


def test_in_python(file: Path) -> None:
    assert orders.add(file) is orders.add(str(file)) is orders.find("last_first")
    plan = Plan(mesh=Mesh(pp=2), schedule=Schedule(name="last_first", micro_batch_size=1))
    work = Workload(global_batch_size=4, seq_len=32)
    other = Plan(mesh=Mesh(pp=2), schedule=Schedule(name="gpipe", micro_batch_size=1))
    own, same = (gnomon.predict("llama-tiny", "1x2xh100-sxm", entry, work) for entry in (plan, other))
    assert own.step_s == pytest.approx(same.step_s, rel=0.05)
    assert under_way("last_first", 2, 1, 4) == 4
    with pytest.raises(gnomon.errors.PlanError, match="schedule last_first needs at least 2 microbatches, not 1"):
        check(plan, own.pricing.graph, None, Workload(global_batch_size=1, seq_len=32))
    result = gnomon.plan("llama-tiny", "1x2xh100-sxm", work, fixed={"pp": 2, "schedule": "last_first"})
    assert result.best[0].plan.schedule.name == "last_first"
    space = gnomon.plan("llama-tiny", "1x2xh100-sxm", work, fixed={"pp": 2}).space
    assert "last_first" in space.schedule


@pytest.mark.torch
def test_on_the_command_line(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    monkeypatch.setenv("GNOMON_ORDERS", str(file))
    assert main(["plan", *JOB, "--fix", "pp=2", "--fix", "schedule=last_first", "-o", "plan.toml"]) == 0
    assert 'name = "last_first"' in Path("plan.toml").read_text()
    capsys.readouterr()
    assert main(["predict", "--plan", "plan.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] > 0
    assert main(["run", "plan.toml", "--steps", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["steps"]) == 4
    assert main(["catalogue", "schedules"]) == 0
    assert "last_first" in capsys.readouterr().out
    assert main(["plan", "--help"]) == 0
    assert "last_first" in capsys.readouterr().out


def test_a_variable_that_names_no_file(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GNOMON_ORDERS", "missing.py")
    assert main(["catalogue"]) == 2
    assert capsys.readouterr().err.startswith("gnomon: GNOMON_ORDERS: missing.py is no Python file with an order")

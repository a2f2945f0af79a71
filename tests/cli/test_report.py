"""`gnomon report`, and the files that `gnomon predict` writes on the side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gnomon.cli import main
from gnomon.plans import Mesh, Plan, PlanFile, Schedule, Workload, save_plan_file
from gnomon.schema import dump
from gnomon.timeline.text import parse_timeline

TINY = ["predict", "llama-tiny", "--on", "1x2xh100-sxm", "--pp", "2", "--global-batch", "4", "--seq-len", "64"]
PLAN = Plan(mesh=Mesh(pp=2), schedule=Schedule(micro_batch_size=1))


def embedded(page: Path) -> dict[str, object]:
    """The data that a page carries."""
    text = page.read_text(encoding="utf-8")
    document: dict[str, object] = json.loads(text.split('id="data">')[1].split("</script>")[0])
    return document


def test_predict_writes_page_trace_and_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("html", "trace", "timeline")}
    assert main([*TINY, "--json", *(word for n, f in files.items() for word in (f"--{n}", str(f)))]) == 0
    document = json.loads(capsys.readouterr().out)
    timeline = parse_timeline(files["timeline"].read_text())
    assert timeline.makespan_s == document["makespan_s"] and timeline.period_s == document["step_s"]
    trace = json.loads(files["trace"].read_text())
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == timeline.spans.size
    data = embedded(files["html"])
    assert data["title"] == "llama-tiny on 1x2xh100-sxm"
    assert data["answer"][0]["value"] == document["step_s"]  # type: ignore[index]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.html", "out.timeline", "out.trace"]


def test_report_of_a_timeline_and_its_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, plan, page, trace = (tmp_path / n for n in ("step.timeline", "plan.toml", "page.html", "trace.json"))
    assert main([*TINY, "--timeline", str(step)]) == 0
    work = Workload(global_batch_size=4, seq_len=64)
    save_plan_file(PlanFile(model="llama-tiny", on="1x2xh100-sxm", workload=work, plan=PLAN), plan)
    capsys.readouterr()
    assert main(["report", str(step), "--plan", str(plan), "-o", str(page), "--trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "A step is predicted to take" in out and f"wrote {page}" in out and f"wrote {trace}" in out
    data = embedded(page)
    assert data["notes"] == [] and "gnomon.planfile/1" in str(data["plan"])


def test_report_says_when_the_plan_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, plan, page = (tmp_path / n for n in ("step.timeline", "plan.toml", "page.html"))
    main([*TINY, "--timeline", str(step)])
    work = Workload(global_batch_size=8, seq_len=64)
    save_plan_file(PlanFile(model="llama-tiny", on="1x2xh100-sxm", workload=work, plan=PLAN), plan)
    assert main(["report", str(step), "--plan", str(plan), "-o", str(page)]) == 0
    assert "not of this plan" in str(embedded(page)["notes"]) and "not of this plan" in capsys.readouterr().out


def test_a_timeline_of_other_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, plan, page = (tmp_path / n for n in ("step.timeline", "plan.toml", "page.html"))
    main([*TINY, "--timeline", str(step)])
    work, other = Workload(global_batch_size=4, seq_len=64), Plan(mesh=Mesh(dp_shard=2), schedule=PLAN.schedule)
    save_plan_file(PlanFile(model="llama-tiny", on="1x2xh100-sxm", workload=work, plan=other), plan)
    capsys.readouterr()
    assert main(["report", str(step), "--plan", str(plan), "-o", str(page)]) == 2
    err = capsys.readouterr().err
    assert "it has workers class 0 (1), class 1 (1), the plan class 0 (2)" in err and not page.exists()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, plan, page = (str(tmp_path / n) for n in ("step.timeline", "plan.toml", "page.html"))
    main([*TINY, "--timeline", step])
    Path(plan).write_text(dump(PLAN))
    (tmp_path / "bad.timeline").write_text("nothing\n")
    for words, message in (
        ([str(tmp_path / "none.timeline")], "cannot read"),
        ([str(tmp_path / "bad.timeline")], "expected 'gnomon.timeline/1' in the first line"),
        ([step, "--plan", plan], "a plan without its model and machines"),
        ([step, step, step], "unrecognized arguments"),
    ):
        capsys.readouterr()
        assert main(["report", *words, "-o", page]) == 2
        assert message in capsys.readouterr().err
    assert main(["report", step, "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not Path(page).exists()

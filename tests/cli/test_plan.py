"""`gnomon plan`: what it prints and writes, and what it says to requests that cannot be met."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from in_place import in_place

from gnomon.cli import main
from gnomon.cli.budget import Budget
from gnomon.plans import load_plan_file

SMALL = ["plan", "llama-tiny", "--on", "1x2xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "128"]


def test_the_best_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert main([*SMALL, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    assert (
        "best and alternatives" in out
        and "predicted +" in out
        and all(len(line) <= 80 for line in out.splitlines()[:-2])
    )
    step = next(line for line in out.splitlines() if line.startswith("step "))
    assert " to " in step and step.endswith("80 %)") and "up to" in out
    file = load_plan_file(path)
    assert file.model == "llama-tiny" and file.predicted is not None
    assert main(["predict", "--plan", str(path), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["step_s"] == pytest.approx(file.predicted.step_s, rel=1e-9)
    assert again["memory"][0]["peak_bytes"] <= file.predicted.peak_memory_bytes


def test_recomputation_by_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("scipy", reason="scipy is not installed: its solver chooses")
    path = tmp_path / "plan.toml"
    one = ["plan", "llama-3.2-1b", "--on", "1xa100-sxm-40gb", "--global-batch", "16", "--seq-len", "8192"]
    assert main([*one, "--micro-batch-size", "1", "--no-refine", "--sac-ilp", "--json", "-o", str(path)]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["by_tensor"]["gain"] > 0.05
    assert made["by_tensor"]["kept"][0].endswith("the rest is recomputed")
    assert made["best"][0]["prediction"]["step_s"] == made["by_tensor"]["step_s"]
    assert main(["predict", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == pytest.approx(made["by_tensor"]["step_s"], rel=1e-9)
    assert main([*SMALL, "--stack", "megatron-lm", "--sac-ilp"]) == 2
    assert "--sac-ilp chooses tensor by tensor" in capsys.readouterr().err
    assert main([*SMALL, "--pareto", "--sac-ilp"]) == 2
    assert "--sac-ilp is for the fastest plan" in capsys.readouterr().err


def test_json_has_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--top", "2"]) == 0
    document = json.loads(capsys.readouterr().out)
    points = document["points"]
    assert points.pop("space") == sum(points.values())
    assert len(document["best"]) == 2 and document["best"][0]["loses_s"] == 0.0
    assert document["safest"] in (None, 1) and document["best"][0]["prediction"]["band"]["high_s"] > 0


def test_options_fix_and_forbid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--tp", "2", "--forbid", "zero>0", "--forbid", "recompute!=full"]) == 0
    points = [load["point"] for load in json.loads(capsys.readouterr().out)["best"]]
    assert {(p["tp"], p["zero"], p["recompute"]) for p in points} == {(2, 0, "full")}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--memory", "1GiB"], "no plan of llama-tiny on 1x2xa100-sxm-80gb fits in 1.00 GiB"),
        (["--tp", "4"], "tp=4 is 4 ranks, but 1x2xa100-sxm-80gb has 2"),
        (["--forbid", "pq>1"], "did you mean"),
        (["--forbid", "tp"], "has no comparison"),
        (["--forbid", "schedule>gpipe"], "has no order"),
        (["--zero", "3", "--forbid", "zero>2"], "zero = 3 is asked for, but forbidden are zero>2; drop one of them"),
    ],
)
def test_what_cannot_be_met_is_said(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_batch_is_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-tiny", "--on", "1x2xa100-sxm-80gb"]) == 2
    assert "--global-batch" in capsys.readouterr().err


def test_a_plan_file_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "plan.toml")
    assert main([*SMALL, "-o", path]) == 0
    capsys.readouterr()
    assert main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert "bounded by" in out and "one change" in out and "is the network the problem?" in out
    assert main(["explain", path, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["changes"] and all(entry["step_s"] or entry["why_not"] for entry in document["changes"])


FEW = [*SMALL, "--schedule", "one_f_one_b", "--recompute", "none"]


def test_other_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main([*FEW, "--vary", "seq_len=64,1k", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "seq_len=64" in out and "seq_len=1024" in out
    html = page.read_text()
    assert html.count('class="bar-row"') == 2 and "seq_len=1024" in html
    assert "://" not in html and "<script" not in html
    bare = [*FEW[:4], "--schedule", "one_f_one_b"]
    assert main([*bare, "--seq-len", "64", "--vary", "global_batch=2,4", "--json"]) == 0
    assert [case["label"] for case in json.loads(capsys.readouterr().out)["cases"]] == [
        "global_batch=2",
        "global_batch=4",
    ]
    assert main([*FEW, "--pareto", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    steps = [case["step_s"] for case in document["cases"]]
    assert document["schema"] == "gnomon.sweep/1" and steps == sorted(steps)
    assert main([*FEW, "--max-step", "1s"]) == 0
    assert "fewest devices for 1.00 s: 2, in whole nodes" in capsys.readouterr().out
    assert main([*FEW, "--max-step", "1us"]) == 1
    assert "no number of nodes up to 2 devices" in capsys.readouterr().out


BARE = ["plan", "llama-tiny", "--on", "2x2xa100-sxm-80gb", "--seq-len", "128", "--schedule", "one_f_one_b"]


def test_costs_are_shown_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FEW, "--price", "3.6"]) == 0
    out = capsys.readouterr().out
    assert "1M tokens cost" in out and "rent: $3.60 a device-hour of a100-sxm-80gb, as given" in out
    assert main([*FEW, "--price", "3.6", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    step = document["best"][0]["prediction"]["step_s"]
    assert document["dollars_per_step"] == pytest.approx(2 * 3.6 / 3600 * step)
    assert document["dollars_per_million_tokens"] == pytest.approx(document["dollars_per_step"] / (8 * 128) * 1e6)


def test_a_batch_in_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BARE, "--tokens-per-batch", "2k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"][0]["prediction"]["workload"]["global_batch_size"] == 16
    assert main(["predict", *BARE[1:], "--tokens-per-batch", "2k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["global_batch_size"] == 16


def test_cheapest_fewest_and_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--tokens-per-batch", "8k"]
    assert main([*BARE, *batch, "--vary", "nodes=1..2", "--best", "cost", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    costs = {case["label"]: case["dollars_per_million_tokens"] for case in document["cases"]}
    assert document["answer"].startswith(f"cheapest: {min(costs, key=lambda label: costs[label])}")
    assert main([*BARE, *batch, "--deadline", "100d", "--tokens", "1G"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "fewest devices for 1G tokens in 100d (122,071 steps): 2, in whole nodes" in out and "the training takes" in out
    )
    assert main([*BARE, *batch, "--deadline", "1s", "--tokens", "1T"]) == 1
    assert main([*BARE, *batch, "--max-devices", "3"]) == 0
    assert "fastest on at most 3 devices, in whole nodes: 2" in capsys.readouterr().out
    kinds = "on=1x2xa100-sxm-80gb,1x2xh100-sxm"
    assert (
        main([*BARE, *batch, "--max-step", "1s", "--best", "cost", "--vary", kinds, "--price", "a100-sxm-80gb=1,2"])
        == 0
    )
    assert "cheapest machines for 1.00 s: 2, in whole nodes" in capsys.readouterr().out


def test_the_largest_model_by_choices_beyond_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    few = in_place(FEW, "--tp", "1", "--pp", "1", "--zero", "0", "--recompute", "full")
    few += ["--no-clip", "--memory", "1700MiB"]
    assert main([*few, "--largest", "layers", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    last, others = document["cases"][-1], [case for case in document["cases"][:-1] if "step_s" in case]
    assert last["fits_by"]["choices"] == {"optimizer_offload": True} and last["choices"]["optimizer_offload"] is True
    assert last["fits_by"]["peak_bytes_without"] > 1700 * 2**20 >= last["peak_bytes"]
    assert last["fits_by"]["longer_step"] == pytest.approx(last["step_s"] / last["fits_by"]["step_s_without"] - 1)
    assert "it fits by optimizer_offload yes, +" in document["answer"]
    plain = [case["label"] for case in others if "fits_by" not in case]
    assert f"without such choices {plain[-1]} does" in document["answer"]
    assert main([*few, "--largest", "layers", "--json", "--no-refine"]) == 0
    exact = json.loads(capsys.readouterr().out)["cases"][-1]
    assert exact["label"] == plain[-1] and exact["choices"] == {} and "fits_by" not in exact


def test_a_spent_budget_is_said_with_what_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3.1-8b", "--on", "2x8xh100-sxm", "--global-batch", "64", "--seq-len", "4096"]
    assert main([*asked, "--budget", "1us", "--equal-stages", "--no-refine"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "plans were not looked at (--budget): some of them have no bound yet" in output and "fits:" in output
    assert main([*asked, "--budget", "1us", "--equal-stages", "--no-refine", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (
        document["points"]["not_looked_at"] > 0 and document["others_take_s_or_more"] == 0
    )  # no time to work out bounds


def test_interrupt_ends_a_search_with_its_best_so_far() -> None:
    with Budget(None, "60s") as budget:
        assert budget() and budget.first()
        signal.raise_signal(signal.SIGINT)
        assert not budget() and not budget.first() and budget.status == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_budget_over_kinds_is_kept_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    """None at all: nothing is found, and the answer says why. Enough: the answer says nothing of it."""
    asked = ["plan", "llama-tiny", "--on", "1x2xh100-sxm+1x2xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "64"]
    asked += ["--largest", "llama-tiny", "--tp", "1", "--pp", "1", "--zero", "0", "--recompute", "none"]
    assert main([*asked, "--budget", "1us"]) != 0
    assert "the time allowed is spent" in capsys.readouterr().err
    assert main([*asked, "--budget", "10min"]) == 0
    assert "allowed" not in capsys.readouterr().out


def test_the_largest_model(capsys: pytest.CaptureFixture[str]) -> None:
    few = [*BARE[:3], "1x2xa100-sxm-80gb", *BARE[4:], "--global-batch", "2", "--recompute", "full"]
    assert main([*few, "--largest", "llama-3.1-405b,llama-3.2-1b,llama-tiny"]) == 0
    assert "largest that fits: llama-3.2-1b" in " ".join(capsys.readouterr().out.split())


def test_choices_are_fixed_refined_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    asked = [
        *FEW,
        "--zero",
        "3",
        "--tp",
        "1",
        "--fix",
        "reshard_after_forward=no",
        "--refine",
        "--stack",
        "torchtitan",
        "-o",
        str(path),
    ]
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["refined"]["exact"] is False
    file = load_plan_file(path)
    assert not file.plan.optimizer.reshard_after_forward and file.predicted is not None
    assert (
        file.predicted.step_s
        == document["refined"]["prediction"]["step_s"]
        <= document["best"][0]["prediction"]["step_s"]
    )
    assert main([*FEW, "--refine", "--fix", "dp_shard=2", "--fix", "keep_gathered=no"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "tried on " in out and "A better combination may exist" in out and "taken to run every choice" in out
    assert (
        main([*FEW, "--forbid", "order", "--fix", "tp=2", "--fix", "async_tp=yes", "--fix", "sequence_parallel=yes"])
        == 0
    )
    assert "async_tp no -> yes" in capsys.readouterr().out


def test_plans_that_a_table_cuts_stand_below_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3.2-1b", "--on", "1x8xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "2048"]
    asked += ["--tp", "2", "--cp", "2", "--context", "ulysses", "--pp", "2", "--zero", "1", "--recompute", "full"]
    assert main([*asked, "--vary", "memory=40GiB,60GiB"]) == 0
    out = capsys.readouterr().out
    rows, full = out.split("\nplans in full\n")
    full = " ".join(full.split())
    assert "…" in rows and full.count("tp2 cp2 pp2 ulysses z1 ") == 2 and full.count("; full") == 2
    assert max(map(len, out.splitlines())) <= 80


def test_what_has_no_effect_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--fix", "prefetch=3", "--zero", "1", "--memory", "900GiB", "--top", "1", "--json"]) == 0
    output = " ".join(json.loads(capsys.readouterr().out)["assumptions"])
    assert "prefetch is fixed, and means nothing in this plan" in output
    assert "--memory 900GiB is more than a device has: 79.2 GiB are allowed" in output
    assert main([*SMALL, "--fix", "prefetch=3", "--zero", "3", "--fix", "dp_shard=2", "--top", "1", "--json"]) == 0
    assert "means nothing" not in capsys.readouterr().out
    assert main([*SMALL, "--sequence-parallel", "--tp", "1", "--top", "1"]) == 0
    assert "sequence_parallel has no effect at tp = 1" in capsys.readouterr().out


def test_choices_are_tried_unless_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a word products are cut, and the best plan is refined a little, in a sweep too; --no-refine leaves both
    out."""
    asked = ["plan", "llama-3.2-1b", "--on", "1x4xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "2048"]
    asked += ["--tp", "4", "--fix", "sequence_parallel=yes"]
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    refined = document["refined"]["prediction"]["step_s"]
    assert document["best"][0]["prediction"]["step_s"] == refined and not document["refined"]["steps"]
    assert document["refined"]["starts"] == 5 and document["refined"]["predictions"] <= 40
    assert main([*asked, "--vary", "memory=40GiB,60GiB", "--json"]) == 0
    assert {case["step_s"] for case in json.loads(capsys.readouterr().out)["cases"]} == {refined}
    path = tmp_path / "plan.toml"
    assert main([*asked, "--no-refine", "-o", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "left as they are: " in out and "tp inside a node (nvlink3)" in out
    file = load_plan_file(path)
    exact = file.predicted.step_s if file.predicted is not None else 0.0
    assert refined < 0.995 * exact and not file.plan.overlap.splits
    assert main([*asked, "--no-refine", "--vary", "memory=60GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0]["step_s"] == exact


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--allow", "fp8", "--no-refine"], "--allow fp8 is for what --no-refine leaves out"),
        (["--refine", "--no-refine"], "it is given twice"),
        (["--on", "1x2xv100-sxm-32gb", "--precision", "bf16"], "use --precision fp16 or fp32, or devices with bf16"),
        (["--fix", "prefetch"], "has no value"),
        (["--fix", "prefetsh=1"], "did you mean 'prefetch'"),
        (["--fix", "zero=4"], "is one of 0, 1, 2, 3"),
        (["--fix", "schedule=gpip"], "did you mean 'gpipe'"),
        (["--fix", "optimizer_offload=yes", "--no-clip", "--stack", "torchtitan"], "is not known to run it"),
        (["--refine", "--pareto"], "--refine is for the fastest plan"),
    ],
)
def test_choices_that_cannot_be(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(in_place(SMALL, *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vary", "seqlen=1"], "did you mean"),
        (["--vary", "seq_len="], "has no values"),
        (["--pareto", "--longest", "64"], "ask one at a time"),
        (["--pareto", "-o", "plan.toml"], "-o writes one plan"),
        (["--html", "page.html"], "--html draws several cases"),
        (["--vary", "nodes=1..16", "--pareto"], "are different questions"),
        (["--vary", "links=fast"], "takes factors"),
        (["--vary", "nodes=4..2"], "a range goes up"),
        (["--vary", "seq_len=64", "--vary", "seq_len=128"], "vary one thing, or two different ones"),
        (["--deadline", "7d"], "belong together"),
        (["--max-devices", "1"], "at most 1 devices, but a node"),
        (["--largest", "layer"], "did you mean"),
        (["--budget", "soon"], "--budget"),
        (["--budget", "soon", "--largest", "layers"], "--budget"),
        (["--tokens-per-batch", "4k"], "both give the batch"),
        (["--price", "cheap"], "is no price"),
    ],
)
def test_questions_that_do_not_go_together(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *more]) == 2
    assert message in capsys.readouterr().err


def test_uneven_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-3.2-1b", "--on", "1x4xh100-sxm", "--global-batch", "32", "--seq-len", "1024", "--pp", "4"]
    asked += ["--schedule", "one_f_one_b"]
    path = tmp_path / "plan.toml"
    assert main([*asked, "-o", str(path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "stage 3 holds head: " in out and "uneven; one_f_one_b" in out and "best of equal stages" in out
    made = load_plan_file(path).plan
    assert len(made.schedule.layers_per_stage) == 4 and sum(made.schedule.layers_per_stage) == 16
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["uneven"]["gain"] > 0.1 and document["best"][1]["loses_s"] > 0
    assert main([*asked, "--equal-stages"]) == 0
    assert "uneven" not in capsys.readouterr().out
    assert main([*asked, "--layers-per-stage", "4,4,5,3"]) == 0
    assert "layers 4 4 5 3" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers-per-stage", "4,4", "--equal-stages"], "contradict"),
        (["--layers-per-stage", "4,4", "--pp", "4"], "one number for each stage"),
        (["--layers-per-stage", "4,4", "--pareto"], "for one plan on devices"),
    ],
)
def test_layers_that_contradict(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *more]) == 2
    assert message in capsys.readouterr().err


def test_stages_with_other_numbers_of_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "llama-tiny", "--on", "1x3xa100-sxm-80gb", "--global-batch", "12", "--seq-len", "128"]
    assert main([*asked, "--uneven-replicas"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "other numbers of replicas (DAPPLE): " in out and "layers x replicas" in out
    assert main([*asked, "--uneven-replicas", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["uneven_replicas"]
    assert sum(stage["replicas"] for stage in document["stages"]) == 3 and document["prediction"]["fits"]
    assert main([*asked, "--uneven-replicas", "--stack", "megatron-lm"]) == 2
    assert "not run by megatron-lm" in capsys.readouterr().err
    assert main([*asked, "--uneven-replicas", "--stack", "gnomon"]) == 0
    assert main([*asked, "--uneven-replicas", "--pp", "3"]) == 2
    assert "pp is fixed, and --uneven-replicas looks for data-parallel stages" in capsys.readouterr().err
    assert main([*asked, "--uneven-replicas", "--recompute", "full", "--zero", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["uneven_replicas"]["prediction"]["plan"]["saved"]["preset"] == "full"


def test_programs_that_can_run_the_plan_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--cp", "1", "--micro-batch-size", "1", "--recompute", "none", "--no-refine"]
    one = ["plan", "llama-3.1-8b", "--on", "2x8xh100-sxm", "--global-batch", "64", *few]
    asked = [*one, "--pp", "2", "--schedule", "zero_bubble_v", "--tp", "4", "--zero", "1"]
    assert main([*asked, "--json"]) == 0
    programs = {one["program"]: one for one in json.loads(capsys.readouterr().out)["programs"]}
    assert programs["torchtitan"]["step_s"] > 0 and not programs["torchtitan"]["why_not"]
    assert programs["deepspeed"]["step_s"] is None and "pp = 2" in programs["deepspeed"]["why_not"]
    assert main(asked) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "the best plan as a file of" in text and "deepspeed cannot run it" in text
    assert main([*one, "--tp", "2", "--stack", "torchtitan"]) == 0
    assert "the best plan as a file of" not in capsys.readouterr().out

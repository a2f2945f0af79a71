"""Every registered method does what its marks claim, and what it cannot do is one error that names it.

One plan a method is priced with it and without; what is not claimed is refused with the reason on record. That `run`
holds is shown where processes run (tests/runtime).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from gnomon.cli import main
from gnomon.errors import PlanError
from gnomon.methods import check_methods, method, methods_named
from gnomon.methods import every as every_method
from gnomon.plans import Layout, Mesh, Optimizer, Overlap, Pass, Plan, RouterLoad, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict

WORK = Workload(global_batch_size=8, seq_len=2048)
PIPELINE = Plan(
    mesh=Mesh(pp=2, dp_shard=2, tp=2),
    schedule=Schedule(micro_batch_size=1),
    layout=Layout(sequence_parallel=True),
    optimizer=Optimizer(clip=False),
)
"""A plan in which every method that can be planned means something."""
ALONE = replace(PIPELINE, mesh=Mesh(dp_replicate=8), layout=Layout(), optimizer=Optimizer(clip=False))
"""For methods that change weights while a model trains, which every rank has whole."""
WHOLE = ("ad2", "iss", "mos", "nxm_admm", "xtc")
GIVEN: Mapping[str, Pass] = {
    "bamboo": Pass(name="bamboo", params=(("rank", 1),)),
    "ad2": Pass(name="ad2", params=(("teacher", "somewhere"),)),
    "mos": Pass(name="mos", params=(("teacher", "somewhere"),)),
    "xtc": Pass(name="xtc", params=(("teacher", "somewhere"),)),
    "mimose": Pass(name="mimose", params=(("budget", "1 GiB"),)),
    "dapple_warmup": Pass(name="dapple_warmup", params=(("policy", "2p"),)),
}


MIXED = Plan(mesh=Mesh(dp_shard=8, ep=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1))
"""The same for those about experts."""
EXCHANGED = replace(MIXED, mesh=Mesh(dp_shard=8, ep=2), optimizer=Optimizer(), overlap=Overlap(experts=True))
"""And about their exchanges."""
REPLICAS = replace(ALONE, mesh=Mesh(dp_replicate=8), optimizer=Optimizer())
ABOUT: Mapping[str, Plan] = {
    **{"adaptive_gating": MIXED, "flexmoe": MIXED, "lina": EXCHANGED},
    **dict.fromkeys(("galore", "apollo"), REPLICAS),  # about whole gradients
}
GATED = replace(WORK, router=RouterLoad(alone=0.8))
BY_LOAD = ("brainstorm",)
"""Those whose plans follow from a workload's load of routers: tests/search/test_expert_placement.py."""


PLANNED = [m for m in every_method() if "planned" in m.marks and m.stand_ins is None and m.name not in BY_LOAD]


def predicted(plan: Plan) -> Prediction:
    mixed = plan.mesh.ep > 1
    return predict("mixtral-8x7b" if mixed else "llama-3.1-8b", "8xh100-sxm", plan, GATED if mixed else WORK)


def named(name: str, plan: Plan = PIPELINE) -> Plan:
    """The plan with a pass of this name; one with context parallelism for a method that is about it."""
    if name == "skrull" and plan is PIPELINE:
        plan = replace(plan, mesh=Mesh(dp_shard=2, cp=4), layout=Layout())
    if name in WHOLE and plan is PIPELINE:
        plan = ALONE
    if name == "lina" and plan is PIPELINE:
        plan = EXCHANGED
    given = GIVEN.get(name, Pass(name=name))
    return replace(plan, schedule=replace(plan.schedule, passes=(given,)))


@pytest.fixture(scope="module")
def plain() -> Prediction:
    return predicted(PIPELINE)


@pytest.mark.parametrize("name", [m.name for m in PLANNED])
def test_what_can_be_planned_is_predicted_and_differs(name: str, plain: Prediction) -> None:
    """Those for batches of several lengths: tests/search/test_lengths.py."""
    result, base = method(name), ABOUT.get(name, PIPELINE)
    plain = plain if base is PIPELINE else predicted(base)
    variants = list(result.variants(base))
    assert variants and not result.used(base)
    for plan in variants:
        assert result.used(plan)
        other = predicted(plan)
        peaks = [rank.peak_bytes for rank in other.memory]
        assert (other.step_s, peaks) != (plain.step_s, [rank.peak_bytes for rank in plain.memory])
    assert list(result.variants(variants[0])) == [], "a plan that has it is offered it again"


@pytest.mark.parametrize("name", [method.name for method in every_method() if method.switch == "schedule.passes"])
def test_a_pass_is_predicted_or_refused_by_name(name: str) -> None:
    result = method(name)
    if name == "iss":  # of modules with an LSTM: tests/runtime/test_iss.py
        with pytest.raises(PlanError, match="llama-3.1-8b has no LSTM"):
            predicted(named(name))
        return
    if "predicted" in result.marks:
        assert predicted(named(name)).step_s > 0
        return
    with pytest.raises(PlanError, match=f"{name} .* is not predicted yet: {result.missing['predicted'][:20]}"):
        predicted(named(name))


@pytest.mark.parametrize("entry", every_method(), ids=lambda entry: entry.name)
def test_a_missing_mark_has_a_reason_and_is_refused(entry: object) -> None:
    result = method(entry.name)  # type: ignore[attr-defined]
    assert set(result.marks) | set(result.missing) == {"rewritten", "planned", "predicted", "run"}
    assert all(len(reason) > 10 for reason in result.missing.values())
    base = ABOUT.get(result.name, PIPELINE)
    variant = next(result.variants(base), named(result.name)) if result.switch != "placement" else None
    if "run" in result.missing and variant is not None:
        with pytest.raises(PlanError, match="is not run yet"):
            check_methods(variant, "run")


def test_mario_spares_what_recompute_spares_and_takes_less_time(plain: Prediction) -> None:
    full = predicted(replace(PIPELINE, saved=Saved(preset="full")))
    mario = predicted(named("mario"))
    kinds = Counter(mario.structure.program.kinds[kind].name for kind in mario.structure.program.kind.tolist())
    assert kinds["C"] == kinds["R"] > 0
    assert plain.step_s <= mario.step_s < full.step_s
    assert mario.memory[0].peak_bytes < plain.memory[0].peak_bytes
    assert mario.mfu == pytest.approx(plain.mfu * plain.step_s / mario.step_s)
    assert plain.hfu < mario.hfu * mario.step_s / plain.step_s
    assert sum(mario.breakdown.values()) == mario.step_s
    assert mario.breakdown["R"] > 0


def test_a_failed_rank_costs_the_work_of_its_neighbour(plain: Prediction) -> None:
    """Two pipeline ranks, of which one does all: twice the work of a rank, without the bubble."""
    failed = predicted(named("bamboo"))
    assert failed.structure.program.num_classes == 1
    assert 1.5 * plain.step_s < failed.step_s < 2.5 * plain.step_s
    wrong = Pass(name="bamboo", params=(("rank", 7),))
    with pytest.raises(PlanError, match="rank = 7, but pipeline ranks are 0 to 1"):
        predicted(replace(PIPELINE, schedule=replace(PIPELINE.schedule, passes=(wrong,))))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (named("marion"), r"unknown method 'marion' \(did you mean 'mario'"),
        (named("zero"), "zero is turned on by optimizer.zero, not by schedule.passes"),
        (replace(named("mario"), saved=Saved(preset="full")), "mario cannot be used in this plan: .* saved.preset"),
        (replace(named("mario"), optimizer=Optimizer(zero=3)), "mario cannot be used .* use zero <= 2"),
        (named("lina", MIXED), "lina cannot be used .* overlap.experts = true with ep of 2 or more"),
        (named("lina", replace(EXCHANGED, mesh=Mesh(dp_shard=8))), "lina cannot be used .* overlap.experts = true"),
        (named("lina", replace(EXCHANGED, mesh=Mesh(dp_shard=8, ep=2, etp=2))), "lina cannot be used .* use etp = 1"),
        (named("lina", replace(EXCHANGED, optimizer=Optimizer(zero=1))), "lina cannot be used .* optimizer.zero = 0"),
        (
            named("lina", replace(EXCHANGED, overlap=Overlap(experts=True, bucket_bytes=1))),
            "lina cannot be used .* leave overlap.bucket_bytes out",
        ),
        (named("dapple_warmup", replace(PIPELINE, schedule=Schedule(name="gpipe", micro_batch_size=1))), "one_f_one_b"),
        (replace(PIPELINE, schedule=Schedule(passes=(Pass(name="mario", params=(("turns", 1),)),))), "no parameter"),
        (replace(PIPELINE, schedule=Schedule(passes=(Pass(name="mario", params=(("tries", "x"),)),))), "given as int"),
        (replace(PIPELINE, schedule=Schedule(passes=(Pass(name="dapple_warmup"),))), "needs policy"),
        (replace(PIPELINE, optimizer=Optimizer(clip=False, delay=1)), "set optimizer.offload too"),
    ],
)
def test_what_cannot_be_is_one_error(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_methods(plan)


def test_all_methods_are_those_that_keep_the_mathematics() -> None:
    names = [entry.name for entry in methods_named("all")]
    assert "mario" in names
    assert "delayed_update" not in names
    assert [entry.name for entry in methods_named("delayed-update, mario,mario")] == ["delayed_update", "mario"]
    with pytest.raises(PlanError, match="mimose .* cannot be planned yet"):
        methods_named("mimose")


def test_a_plan_is_searched_with_methods_and_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        return status, *capsys.readouterr()

    words = ("plan", "llama-3.2-1b", "--on", "4xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "16384")
    words += ("--fix", "pp=4", "--fix", "recompute=full", "--equal-stages")
    plain = (*words, "--fix", "schedule=one_f_one_b")
    in_a_v = (*words, "--fix", "schedule=zero_bubble_v")
    for asked, said in ((plain, "one_f_one_b + mario"), (in_a_v, "zero_bubble_v, 2 virtual stages + mario")):
        status, out, _ = answer(*asked, "--methods", "mario")
        assert status == 0
        assert said in out
        assert "mario no -> yes" in out
    words = plain
    status, _, err = answer(*words, "--methods", "mario", "--stack", "megatron-lm")
    assert status == 2
    assert "stack megatron-lm is not known to run it" in err
    status, out, _ = answer("catalogue", "methods")
    assert [line.split()[0] for line in out.splitlines()[1 : 1 + len(every_method())]] == [
        method.name for method in every_method()
    ]


def test_the_plan_in_the_documentation_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    example = page[page.index('    schema = "gnomon.plan/1"') :].partition("\n\n`")[0]
    path = tmp_path / "plan.toml"
    path.write_text(dedent(example) + "\n")
    asked = ["--on", "4xa100-sxm-80gb", "--global-batch", "8", "--seq-len", "2048"]
    assert main(["predict", "llama-3.2-1b", "--plan", str(path), *asked]) == 0
    assert "one_f_one_b + mario" in capsys.readouterr().out


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_of_a_model_with_a_tied_table_can_fail(rank: int) -> None:
    """The first and the last stage add up its gradient; where one rank has both, nothing is left to send for it."""
    schedule = Schedule(micro_batch_size=1, passes=(Pass(name="bamboo", params=(("rank", rank),)),))
    plan = Plan(mesh=Mesh(pp=4), schedule=replace(schedule, passes=()))
    whole = predict("llama-3.2-1b", "4xa100-sxm-80gb", plan, WORK)
    failed = predict("llama-3.2-1b", "4xa100-sxm-80gb", replace(plan, schedule=schedule), WORK)
    assert whole.step_s < failed.step_s <= 2 * whole.step_s
    sums = [key for key in failed.structure.program.keys if key.kind == "AR"]
    assert len(sums) == (0 if rank == 0 else 2)

"""`--router FILE.npz`: what a recorded router does to a prediction, and files that are wrong."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnomon.cli import main
from gnomon.cli.models import read_model
from gnomon.cli.request import named_router
from gnomon.errors import InputError, PlanError
from gnomon.formats.router import Router, RouterRecord, read_router, routers_of, save_router
from gnomon.plans import (
    Experts,
    Mesh,
    Optimizer,
    Plan,
    PlanFile,
    RouterLoad,
    Saved,
    Schedule,
    Workload,
    load_plan,
    save_plan_file,
)
from gnomon.prediction import predict
from gnomon.schema import dump, load

MIXTRAL = read_model("mixtral-8x7b")[0]
PREDICT = "predict mixtral-8x7b --on 1x8xh200 --ep 8 --zero 1 --seq-len 1024 --micro-batch-size 1 --json"
SKEWED = (400, 300, 250, 250, 200, 200, 200, 248)


def record(rows: list[list[int]], steps: int = 1) -> RouterRecord:
    """Of Mixtral, whose layers have these counts in turn in every step."""
    routers = routers_of(MIXTRAL)
    counts = np.array([rows[i % len(rows)] for i in range(len(routers))], np.int64)
    return RouterRecord(
        model="mixtral-8x7b", routers=routers, steps=tuple(range(1, steps + 1)), counts=np.stack([counts] * steps)
    )


def predicted(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*PREDICT.split(), *words]) == 0, capsys.readouterr().err
    read: dict[str, Any] = json.loads(capsys.readouterr().out)
    return read


def test_a_record_moves_the_prediction_as_its_load_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of layers that are alike it is that of the histogram; of layers with other busy experts, whose sum over layers is
    even, each layer still waits for its own busiest rank."""
    alike, rolled, even = (tmp_path / f"{name}.npz" for name in ("alike", "rolled", "even"))
    save_router(record([list(SKEWED)], steps=3), alike)
    save_router(record([np.roll(SKEWED, by).tolist() for by in range(8)]), rolled)
    save_router(record([[256] * 8]), even)
    (tmp_path / "counts.json").write_text(json.dumps(SKEWED))
    step = {
        name: predicted(capsys, "--router", str(name))["step_s"]
        for name in ("balanced", alike, rolled, even, tmp_path / "counts.json")
    }
    assert step[alike] == pytest.approx(step[tmp_path / "counts.json"], rel=1e-12)
    assert step[rolled] == pytest.approx(step[alike], rel=1e-12)
    assert step[even] == pytest.approx(step["balanced"], rel=1e-12)
    assert step[alike] > 1.1 * step["balanced"]


def test_what_is_assumed_of_a_record_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [[256] * 8] * 32
    rows[5] = [800, 512, 256, 160, 80, 80, 80, 80]
    save_router(record(rows), tmp_path / "router.npz")
    assert main([*PREDICT.removesuffix(" --json").split(), "--router", str(tmp_path / "router.npz")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "router load recorded: the busiest of ep = 8 ranks computes and holds 1.07 times the mean rows" in said
    assert "most uneven is layers[5], whose busiest expert gets 3.12 times the mean" in said


def test_plan_takes_a_record_and_its_file_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_router(record([list(SKEWED)]), tmp_path / "router.npz")
    asked = "plan mixtral-8x7b --on 1x8xh200 --global-batch 8 --seq-len 1024 --ep 8 --pp 1 --tp 1 --zero 1"
    found = tmp_path / "plan.toml"
    assert main([*asked.split(), "--router", str(tmp_path / "router.npz"), "-o", str(found)]) == 0
    file = load_plan(str(found))
    assert isinstance(file, PlanFile)
    assert file.workload.router == read_router(tmp_path / "router.npz").load
    capsys.readouterr()
    assert main(["predict", str(found), "--json"]) == 0
    skewed = json.loads(capsys.readouterr().out)["step_s"]
    save_plan_file(replace(file, workload=replace(file.workload, router=RouterLoad())), found)
    assert main(["predict", str(found), "--json"]) == 0
    assert skewed > json.loads(capsys.readouterr().out)["step_s"]


def test_a_search_under_a_skewed_load_finds_copies_of_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FlexMoE, as far as there is memory for copies; its plan is predicted and written like any other."""
    (tmp_path / "counts.json").write_text(json.dumps([round(1e5 / (i + 1) ** 0.6) for i in range(128)]))
    found, asked = (
        tmp_path / "plan.toml",
        (
            "plan qwen3-30b-a3b --on 1x8xh200 --global-batch 16 --seq-len 4096 --ep 8 --pp 1 --tp 1 --cp 1 --zero 1 "
            "--micro-batch-size 2"
        ),
    )
    assert main([*asked.split(), "--router", str(tmp_path / "counts.json"), "-o", str(found)]) == 0
    assert "expert_replicas 0 -> 8" in " ".join(capsys.readouterr().out.split())
    file = load_plan(str(found))
    assert isinstance(file, PlanFile) and file.plan.experts.replicas == 8
    static = replace(file.plan, experts=replace(file.plan.experts, replicas=0, placement=()))
    times = [predict(file.model, file.on, plan, file.workload).step_s for plan in (file.plan, static)]
    assert times[0] < 0.75 * times[1]


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        (Experts(replicas=128), "= 128 take 60.8 GiB of each rank, which is 6.7 GiB over its memory: about 112 fit"),
        (Experts(placement=(tuple(range(1, 129)),)), "names expert 128, and a layer has 128, counted from 0 to 127"),
        (Experts(replicas=12), "replicas = 12 give ep = 8 ranks unlike numbers of experts; the nearest are 8 and 16"),
    ],
)  # fmt: skip
def test_experts_that_cannot_lie_so_are_one_line(
    experts: Experts, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What memory has no room for is still predicted, and said beside."""
    plan = Plan(
        mesh=Mesh(dp_shard=8, ep=8), schedule=Schedule(micro_batch_size=1), optimizer=Optimizer(zero=1),
        saved=Saved(preset="full"), experts=experts,
    )  # fmt: skip
    work = Workload(global_batch_size=8, seq_len=4096, router=RouterLoad(kind="zipf", s=0.6))
    save_plan_file(PlanFile(model="qwen3-30b-a3b", on="1x8xh200", workload=work, plan=plan), tmp_path / "plan.toml")
    status, told = main(["predict", str(tmp_path / "plan.toml")]), capsys.readouterr()
    if experts.replicas == 128:
        assert said in " ".join(told.out.split())
        return
    assert status == 2 and said in told.err and told.err.count("\n") == 1


def test_an_ep_that_divides_nothing_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PREDICT.replace("--ep 8", "--ep 3").split()) == 2
    told = capsys.readouterr().err
    assert "which 3 does not divide; the nearest legal ep is 2" in told and told.count("\n") == 1


def test_a_recorded_load_by_hand() -> None:
    """Two layers, four experts on two ranks: the busiest ranks have 6/10 and 7/10 of the rows, though their sum over
    layers is nearer to even; a capacity of 1.2 takes 0.3 of them from an expert."""
    given = RouterLoad(kind="recorded", layers=((4.0, 2.0, 2.0, 2.0), (1.0, 2.0, 3.0, 4.0)))
    assert given.busiest(4, 2) == pytest.approx((0.6 + 0.7) / 2 * 2)
    assert given.rank_fractions(4, 2).tolist() == pytest.approx([0.45, 0.55])
    assert given.fractions(4).tolist() == pytest.approx([0.25, 0.2, 0.25, 0.3])
    capped = replace(given, capacity=1.2)
    assert capped.dropped(4) == pytest.approx(0.1)
    assert capped.busiest(4, 2) == pytest.approx((0.5 + 0.6) / 2 * 2)
    work = Workload(global_batch_size=1, seq_len=8, router=given)
    assert load(Workload, dump(work)).router == given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "recorded"}, "needs layers"),
        ({"layers": ((1.0,),)}, "needs layers"),
        ({"kind": "recorded", "layers": ((1.0, 2.0), (1.0,))}, "as many counts in every layer"),
        ({"kind": "recorded", "layers": ((1.0, 2.0), (0.0, 0.0))}, "positive sum"),
        ({"kind": "recorded", "layers": ((1.0, float("nan")),)}, "finite counts"),
    ],
)
def test_loads_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        RouterLoad(**given)


def test_a_plan_file_with_the_record_of_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Workload(global_batch_size=8, seq_len=64, router=RouterLoad(kind="recorded", layers=((1.0,) * 8,) * 3))
    plan = Plan(mesh=Mesh(dp_shard=8, ep=8))
    save_plan_file(PlanFile(model="mixtral-8x7b", on="1x8xh100-sxm", workload=work, plan=plan), tmp_path / "plan.toml")
    assert main(["predict", str(tmp_path / "plan.toml")]) == 2
    assert "router record has 3 layers, but graph 'mixtral-8x7b' has 32 with experts" in capsys.readouterr().err


def _changed(path: Path, **arrays: Any) -> None:
    """The file with other arrays; None leaves one out."""
    with np.load(path) as file:
        kept = {**file, **arrays}
    np.savez(path, **{name: value for name, value in kept.items() if value is not None})


def _array(value: Any) -> bytes:
    """As a .npy file."""
    file = BytesIO()
    np.save(file, value)
    return file.getvalue()


WRONG = {
    "empty": (lambda path: path.write_bytes(b""), "is no .npz file, or is cut off"),
    "text": (lambda path: path.write_text("counts"), "is no .npz file, or is cut off"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:900]), "is no .npz file, or is cut off"),
    "flipped": (lambda path: path.write_bytes(path.read_bytes().replace(b"\x00\x00", b"\x00\x07")), "{path}"),
    "one array": (lambda path: path.write_bytes(_array(np.ones(3))), "is no .npz file, or is cut off"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps([1])), "is no .npz file, or is cut off"),
    "pickled": (lambda path: _changed(path, model=np.array({"a": 1}, object)), "it holds pickled objects"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot read"),
    "not there": (lambda path: path.unlink(), "cannot read"),
    "of others": (lambda path: np.savez(path, weights=np.ones(3)), "is no router file: it has no array 'schema'"),
    "without counts": (lambda path: _changed(path, counts=None), "it has no array 'counts'"),
    "floats": (lambda path: _changed(path, counts=np.ones((1, 32, 8))), "counts is float64, not whole numbers"),
    "later": (lambda path: _changed(path, schema=np.array("gnomon.router/9")), "has schema 'gnomon.router/9'"),
    "no steps": (lambda path: _changed(path, counts=np.ones((0, 32, 8), np.int64)), "records nothing"),
    "flat": (lambda path: _changed(path, counts=np.ones(8, np.int64)), "records nothing"),
    "fewer": (lambda path: _changed(path, topk=np.ones(3, np.int64)), "damaged: topk has shape (3,)"),
    "sums": (lambda path: _changed(path, tokens=np.array([7])), "do not add up to tokens x topk"),
    "below 0": (lambda path: _changed(path, tokens=np.array([-1024])), "do not add up to tokens x topk"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_wrong_are_one_clear_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "router.npz"
    save_router(record([list(SKEWED)]), path)
    named_router(str(path), MIXTRAL)
    make, message = WRONG[name]
    make(path)
    with pytest.raises(InputError) as raised:
        named_router(str(path), MIXTRAL)
    said = str(raised.value)
    assert message.format(path=path) in said and str(path) in said and "\n" not in said


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen3-30b-a3b", "recorded of mixtral-8x7b, which has 32 layers with experts, and qwen3-30b-a3b has 48"),
        ("llama-tiny", "llama-tiny has no routers"),
    ],
)
def test_the_record_of_another_model_says_what_differs(model: str, message: str, tmp_path: Path) -> None:
    save_router(record([list(SKEWED)]), tmp_path / "router.npz")
    with pytest.raises(InputError, match=message):
        named_router(str(tmp_path / "router.npz"), read_model(model)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 16}, "16 experts in a layer, and mixtral-8x7b has 8"),
        ({"topk": 4}, "to 4 experts in layers.0., and mixtral-8x7b to 2"),
        ({"layer": "blocks[0]"}, "experts in blocks.0., and mixtral-8x7b in layers.0."),
    ],
)
def test_a_record_of_as_many_layers_that_are_others(changes: dict[str, Any], message: str) -> None:
    given = record([list(SKEWED)])
    routers = tuple(replace(router, **changes) for router in given.routers)
    with pytest.raises(InputError, match=message):
        replace(given, routers=routers).check(MIXTRAL, "router.npz")


def test_names_of_a_file_stay_on_one_line(tmp_path: Path) -> None:
    given = replace(record([list(SKEWED)]), model="mine\n\x1b[2Jgnomon: fine " + "x" * 500)
    save_router(given, tmp_path / "router.npz")
    with pytest.raises(InputError) as raised:
        named_router(str(tmp_path / "router.npz"), read_model("qwen3-30b-a3b")[0])
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


def test_the_file_has_what_it_says(tmp_path: Path) -> None:
    """Read by numpy alone."""
    save_router(record([list(SKEWED)], steps=2), tmp_path / "router.npz")
    with np.load(tmp_path / "router.npz", allow_pickle=False) as file:
        assert str(file["model"]) == "mixtral-8x7b" and file["layers"][31] == "layers[31]"
        assert file["counts"].shape == (2, 32, 8) and file["steps"].tolist() == [1, 2]
        assert file["tokens"].tolist() == [1024, 1024] and file["topk"].tolist() == [2] * 32
    assert read_router(tmp_path / "router.npz").routers[3] == Router(layer="layers[3]", experts=8, topk=2)


RUN = Workload(global_batch_size=2, seq_len=32)


@pytest.mark.parametrize(
    ("model", "words", "message"),
    [
        ("llama-tiny", "--record-router router.npz", "has no routers: no layer of it sends tokens to experts"),
        ("mixtral-8x7b", "--record-router router.json", "writes a .npz file; name it router.npz"),
        ("mixtral-8x7b", "--record-router router.npz --processes 1", "and --processes runs them otherwise"),
        ("mixtral-8x7b", "--router nowhere.npz", "cannot read 'nowhere.npz'"),
    ],
)
def test_runs_that_cannot_record_or_replay(
    model: str,
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_plan_file(PlanFile(model=model, on="2xcpu-process", workload=RUN, plan=Plan(mesh=Mesh(dp_shard=2))), "p.toml")
    assert main(["run", "p.toml", *words.split()]) == 2
    err = capsys.readouterr().err
    assert message in " ".join(err.split()) and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["p.toml"]

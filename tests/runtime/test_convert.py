"""A checkpoint is the same, bit by bit, under every plan; its tools look at it, check it, convert it and export it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")

from runtime import parity  # noqa: E402
from runtime.one_process import alone  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.models.llama import llama  # noqa: E402
from gnomon.plans import Mesh, Plan, PlanFile, save_plan_file  # noqa: E402
from gnomon.request.runnable import read_runnable_model  # noqa: E402
from gnomon.runtime import Executor  # noqa: E402
from gnomon.runtime.checkpoint.convert import convert, preview, shares  # noqa: E402
from gnomon.runtime.checkpoint.files import Reader, problems_of  # noqa: E402
from gnomon.runtime.checkpoint.load import load  # noqa: E402
from gnomon.runtime.checkpoint.record import read_record  # noqa: E402
from gnomon.runtime.checkpoint.save import save  # noqa: E402

pytestmark = pytest.mark.torch

GRAPH = llama(parity.CONFIG)
STEPS = (1, 12, 130)


def plan(name: str) -> Plan:
    return replace(parity.PLANS[name], precision=parity.FP64)


NAMES = sorted(parity.PLANS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of one rank with random numbers in all that it holds."""
    folder = tmp_path_factory.mktemp("written")
    with alone():
        executor = Executor(GRAPH, plan("one device"), parity.WORKLOAD, seed=7, settings=parity.SETTINGS)
        for step in STEPS:
            for held, adam in executor.parameters():
                for state in (held.shard, adam.first, adam.second):
                    assert state is not None
                    state.normal_(generator=torch.Generator().manual_seed(step))
                adam.steps = step
            save(folder, executor, step, identity={"seed": "7", "data": "books"}, keep=len(STEPS))
        executor.leave()
    return folder


def tensors(path: Path) -> dict[str, torch.Tensor]:
    reader = Reader(path, read_record(path))
    return {name: reader.whole(name) for name in reader.by_name}


@settings(max_examples=12)
@given(first=st.sampled_from(NAMES), second=st.sampled_from(NAMES), step=st.sampled_from(STEPS))
def test_from_any_plan_to_any_other_bit_by_bit(
    first: str, second: str, step: int, written: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """(plan A, plan B, step): one device to A, A to B; every file whole, and the record that of the same run."""
    folder = tmp_path_factory.mktemp("converted")
    source = written / f"step-{step:06}"
    under_a = convert(source, folder / "a", GRAPH, plan(first), parity.WORKLOAD)
    under_b = convert(under_a, folder / "b", GRAPH, plan(second), parity.WORKLOAD)
    assert not problems_of(under_b)
    before, after = tensors(source), tensors(under_b)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    message, same = read_record(under_b), read_record(source)
    assert (message.step, message.updates, message.identity) == (same.step, same.updates, same.identity)
    assert len(message.files) == plan(second).world_size


@pytest.mark.parametrize("kind", ["adafactor", "muon"])
def test_states_of_whole_matrices_are_the_same_under_every_plan(kind: str, tmp_path: Path) -> None:
    """Means by rows and columns, and the second moments that some parameters have: from one device through plans that
    divide matrices, and back into a run."""

    def ruled(name: str) -> Plan:
        plain = plan(name)
        return replace(plain, optimizer=replace(plain.optimizer, kind=kind))  # type: ignore[arg-type]

    def states(executor: Executor) -> list[torch.Tensor]:
        ((held, adam),) = executor.parameters()
        assert adam.factored
        moments = [moment for pair in adam.factored.values() for moment in pair]
        return [held.shard, *moments, *(() if adam.first is None else (adam.first,))]

    def alone_with() -> Executor:
        return Executor(GRAPH, ruled("one device"), parity.WORKLOAD, seed=7, settings=parity.SETTINGS)

    with alone():
        executor, other = alone_with(), alone_with()
        for number, state in enumerate(states(executor)):
            state.normal_(generator=torch.Generator().manual_seed(number))
        save(tmp_path / "saved", executor, 1)
        at = tmp_path / "saved/step-000001"
        for name in ("tp 4: two ranks a key head", "zero 2", "tp, sp and zero 3", "pp and zero 3", "one device"):
            at = convert(at, tmp_path / name.replace(" ", "-"), GRAPH, ruled(name), parity.WORKLOAD)
        assert load(at.parent, other) == 1
        assert all(torch.equal(a, b) for a, b in zip(states(executor), states(other), strict=True))
        executor.leave()


def test_what_it_costs_is_said_before(written: Path) -> None:
    """Bytes are those of the tensors, however ranks share them out; memory is that of the largest file."""
    whole = sum(value.nbytes for value in tensors(written / "step-000001").values())
    for name in ("one device", "zero 3", "1f1b"):
        cost = preview(GRAPH, plan(name))
        assert cost.nbytes == whole and cost.memory_bytes == max(cost.files) and cost.seconds > 0
    assert sum(len(mine) for mine in shares(GRAPH, plan("zero 3"))) >= len(tensors(written / "step-000001"))


def test_another_model_or_precision_is_refused(written: Path, tmp_path: Path) -> None:
    other = llama(replace(parity.CONFIG, ffn_size=2 * parity.CONFIG.ffn_size))
    for graph, asked in ((other, plan("dp")), (GRAPH, replace(parity.PLANS["dp"], precision=parity.FP32))):
        with pytest.raises(InputError, match="another model, precision or batch"):
            convert(written / "step-000001", tmp_path / "new", graph, asked, parity.WORKLOAD)
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config.json, a plan for it, and checkpoints of the model."""
    result = tmp_path_factory.mktemp("tools")
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "hidden_act": "silu",
    }  # fmt: skip
    (result / "model").mkdir()
    (result / "model/config.json").write_text(json.dumps(config))
    one = replace(parity.PLANS["one device"], precision=parity.FP32)
    file = PlanFile(model=str(result / "model"), on="1xcpu-process", workload=parity.WORKLOAD, plan=one)
    two = replace(file, on="2xcpu-process", plan=replace(one, mesh=Mesh(tp=2)))
    save_plan_file(two, result / "two.toml")
    with alone():
        executor = Executor(read_runnable_model(file.model)[0], one, parity.WORKLOAD, seed=3)
        save(result / "saved", executor, 4, source=result / "model")
        executor.leave()
    return result


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["checkpoint", *words])
    output = capsys.readouterr()
    return status, output.out, output.err


def test_inspect_verify_convert_and_export(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(folder / "saved")
    status, out, _ = asked(capsys, "inspect", saved)
    assert status == 0 and "step 4, 0 updates" in out and "parameters" in out and "- model: model " in out
    status, out, _ = asked(capsys, "inspect", saved, "--json")
    values = json.loads(out)
    assert (values["step"], values["contents"]["first"]) == (4, values["contents"]["parameters"])
    assert asked(capsys, "verify", saved)[0] == 0
    convert_ = ("convert", saved, "--plan", str(folder / "two.toml"), "-o", str(folder / "new"))
    status, out, _ = asked(capsys, *convert_, "--dry-run")
    assert status == 0 and "2 files; about " in out and not (folder / "new").exists()
    status, out, _ = asked(capsys, *convert_)
    assert status == 0 and f"wrote {folder}/new/step-000004 in " in out
    assert len(list((folder / "new/step-000004").glob("*.safetensors"))) == 2
    assert asked(capsys, *convert_)[0] == 2
    export = ("export-hf", str(folder / "new"), "-o", str(folder / "weights"))  # of the model that the run named
    (folder / "model").rename(folder / "moved")
    status, _, err = asked(capsys, *export)
    assert status == 2 and f"{folder}/model, which is gone; give it with --model" in err
    (folder / "moved").rename(folder / "model")
    status, out, err = asked(capsys, *export, "--json")
    assert status == 0, err
    exported = json.loads(out)
    assert exported["parameters"] == read_runnable_model(str(folder / "weights"))[0].num_parameters()
    assert (folder / "weights/model.safetensors").exists()
    victim = folder / "new/step-000004/rank-00001.safetensors"
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    status, out, _ = asked(capsys, "verify", str(folder / "new"), "--json")
    assert status == 1 and "has another checksum" in json.loads(out)["checkpoints"][0]["problems"][0]
    status, _, err = asked(
        capsys, "export-hf", str(folder / "new"), "--model", str(folder / "model"), "-o", "elsewhere"
    )
    assert status == 2 and "it is not exported" in err
    status, _, err = asked(capsys, "inspect", str(folder))
    assert status == 2 and "there is no checkpoint in it" in err

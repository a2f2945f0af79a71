"""Folders of weights: read by every rank of a plan in parts, written back to the bit, and refused when damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the runtime's tests need it")
pytest.importorskip("transformers", reason="transformers, the oracle, is not installed")

from runtime.hf_models import build, quiet  # noqa: E402
from runtime.ranks import launch  # noqa: E402

from gnomon.cli import main  # noqa: E402
from gnomon.cli.run import begins  # noqa: E402
from gnomon.errors import InputError  # noqa: E402
from gnomon.formats.huggingface.safetensors import header_of, read_header  # noqa: E402
from gnomon.plans import (  # noqa: E402
    Layout,
    Mesh,
    Optimizer,
    Plan,
    PlanFile,
    Precision,
    Schedule,
    Workload,
    save_plan_file,
)
from gnomon.runtime.checkpoint.pretrained import companion_files, export, load, model_of, values_of  # noqa: E402
from gnomon.runtime.parameters.weights import Folder  # noqa: E402
from gnomon.runtime.step.execute import Executor  # noqa: E402

pytestmark = pytest.mark.torch

FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
TWO = Schedule(name="one_f_one_b", num_microbatches=2)
PLANS = {
    "tp": Plan(mesh=Mesh(tp=2), schedule=TWO, layout=Layout(sequence_parallel=True), precision=FP32),
    "pp": Plan(mesh=Mesh(pp=2), schedule=TWO, precision=FP32),
    "divided vocabulary": Plan(mesh=Mesh(pp=2), schedule=replace(TWO, vocabulary="interlaced"), precision=FP32),
    "zero 3": Plan(mesh=Mesh(dp_shard=2), schedule=TWO, optimizer=Optimizer(zero=3), precision=FP32),
}
WORKLOAD = Workload(global_batch_size=4, seq_len=8)
KINDS = ("llama (linear rotary, tied)", "gpt2", "phi3", "mixtral")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In bf16, as most weights are; Mixtral's in shards with an index."""
    made = {}
    with quiet():
        for kind in KINDS:
            made[kind] = tmp_path_factory.mktemp("weights") / kind.partition(" ")[0]
            build(kind).to(torch.bfloat16).save_pretrained(
                made[kind], max_shard_size="40KB" if kind == "mixtral" else "1GB"
            )
    return made


def digests(folder: Path) -> dict[str, str]:
    return {file.name: sha256(file.read_bytes()).hexdigest() for file in sorted(folder.glob("*.safetensors"))}


def _round_trips(given: dict[str, Path], target: Path) -> list[tuple[str, str, int]]:
    """(plan, kind, bytes of parameters on this rank) of each, exported to target/plan/kind."""
    sizes = []
    for plan_name, plan in PLANS.items():
        for kind, source in given.items():
            graph = model_of(source).graph
            executor = Executor(graph, plan, WORKLOAD, values=values_of(source, graph))
            sizes.append((plan_name, kind, sum(held.shard.numel() for held, _ in executor.parameters())))
            export(executor, target / plan_name / source.name, model=source)
            executor.leave()
    return sizes


def test_weights_come_back_to_the_bit_under_every_plan(folders: dict[str, Path], tmp_path: Path) -> None:
    launch(_round_trips, 2, folders, tmp_path)
    for plan in PLANS:
        for kind, source in folders.items():
            assert digests(tmp_path / plan / source.name) == digests(source), (plan, kind)
            assert (tmp_path / plan / source.name / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_a_file_that_transformers_wrote_has_the_header_that_we_write(folders: dict[str, Path]) -> None:
    path = folders["gpt2"] / "model.safetensors"
    header = read_header(path)
    first, again = header_of({n: (e.dtype, e.shape) for n, e in header.entries.items()}, header.metadata)
    assert path.read_bytes().startswith(first) and again == header


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def _garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x02}q\x00.")


def _rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _missing(folder: Path) -> None:
    _rewritten(folder, lambda t: t.pop("model.norm.weight"))


def _misshapen(folder: Path) -> None:
    _rewritten(folder, lambda t: t.update({"model.norm.weight": torch.zeros(33)}))


def _unexpected(folder: Path) -> None:
    _rewritten(folder, lambda t: t.update({"model.layers.0.adapter.weight": torch.zeros(3)}))


def _pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _other_config(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"rms_norm_eps": 0.1}))


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, "is cut short: .* ends at byte"),
        (_garbage, "is no safetensors file"),
        (_missing, "1 missing: model.norm.weight"),
        (_misshapen, r"another shape .*: model.norm.weight is \[33\], not \[32\]"),
        (_unexpected, "that the model does not have: model.layers.0.adapter.weight"),
        (_pickle, "a pickle, which can run any program and is not read"),
        (_other_config, "whose config.json says another model"),
        (_no_config, "has no config.json"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_clear_error(
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    graph = model_of(folders["llama (linear rotary, tied)"]).graph
    folder = tmp_path / "damaged"
    shutil.copytree(folders["llama (linear rotary, tied)"], folder)
    damage(folder)
    with pytest.raises(InputError, match=message):
        values_of(folder, graph)


def test_a_missing_shard_is_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(folders["mixtral"], folder)
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(InputError, match=f"names {gone.name}, which is not in the folder"):
        Folder.of(folder)


def test_names_without_the_model_s_prefix_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    shutil.copytree(folders["gpt2"], folder)

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    _rewritten(folder, rename)
    mine, theirs = load(folder).parameters.flat, load(folders["gpt2"]).parameters.flat
    assert mine is not None and theirs is not None and torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama of bytes, and a plan for its config.json."""
    import transformers

    path = tmp_path_factory.mktemp("planned")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    with quiet():
        config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=64, **sizes)
        transformers.LlamaForCausalLM(config).to(torch.float32).save_pretrained(path / "model")
    plan = PlanFile(
        model=str(path / "model"),
        on="local",
        stack="gnomon",
        plan=Plan(schedule=TWO, precision=FP32),
        workload=Workload(global_batch_size=4, seq_len=16),
    )
    save_plan_file(plan, path / "plan.toml")
    (path / "text").mkdir()
    (path / "text" / "a.txt").write_text("the loss goes down, line by line of this text. " * 200)
    return path


def test_gnomon_run_begins_with_weights_and_exports_them(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, new = planned / "model", planned / "new"
    words = ["run", str(planned / "plan.toml"), "--data", str(planned / "text"), "--steps", "2"]
    assert main([*words, "--weights", str(model), "--export", str(new)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"parameters begin as the weights in {model}" in out and f"wrote {new}: the weights" in out
    before, after = load(model).parameters.flat, load(new).parameters.flat
    assert before is not None and after is not None and 0 < (before - after).abs().max() < 0.1
    assert main([*words, "--weights", str(model), "--export", str(model)]) == 2
    assert "is the folder that the model came from" in " ".join(capsys.readouterr().err.split())


def test_gnomon_run_says_that_parameters_are_random_and_what_it_does_not_read(planned: Path) -> None:
    (message,) = begins(str(planned / "model"), None, 7)
    assert "random numbers of seed 7" in message and "model.safetensors next to its config.json is not read" in message
    (message,) = begins("llama-tiny", None, 0)
    assert message == "parameters begin as random numbers of seed 0"


def test_a_link_out_of_the_model_s_folder_is_not_written_with_the_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """Its contents would be in the new folder, which people publish; what the model's folder itself holds is."""
    model = shutil.copytree(folders["gpt2"], tmp_path / "model")
    (tmp_path / "private.txt").write_text("a password")
    (model / "notes.txt").symlink_to(tmp_path / "private.txt")
    with pytest.raises(InputError, match="notes.txt is a link out of the model's folder, to .*private.txt"):
        companion_files(model)
    (model / "notes.txt").unlink()
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "generation_config.json").symlink_to("config.json")
    assert {"config.json", "generation_config.json"} <= {file.name for file in companion_files(model)}

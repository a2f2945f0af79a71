"""Folders of weights: read by every rank of a plan in parts, written back to the bit, and refused when damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from runtime.hf_models import build, quiet

from gnomon.errors import InputError
from gnomon.formats.huggingface.safetensors import header_of, read_header
from gnomon.plans import Layout, Mesh, Optimizer, Plan, Precision, Schedule, Workload
from gnomon.runtime.execute import Executor
from gnomon.runtime.launch import launch
from gnomon.runtime.pretrained import export, load, model_of, values_of
from gnomon.runtime.weights import Folder

pytest.importorskip("transformers")
FP32 = Precision(param="fp32", compute="fp32", grad="fp32", reduce="fp32", master="none", states="fp32")
TWO = Schedule(name="one_f_one_b", num_microbatches=2)
PLANS = {
    "tp": Plan(mesh=Mesh(tp=2), schedule=TWO, layout=Layout(sequence_parallel=True), precision=FP32),
    "pp": Plan(mesh=Mesh(pp=2), schedule=TWO, precision=FP32),
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
    ("damage", "said"),
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
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    graph = model_of(folders["llama (linear rotary, tied)"]).graph
    folder = tmp_path / "damaged"
    shutil.copytree(folders["llama (linear rotary, tied)"], folder)
    damage(folder)
    with pytest.raises(InputError, match=said):
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

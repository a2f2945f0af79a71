"""A folder in Hugging Face's layout as a model: config.json and safetensors become a Graph and its weights, and back.

`values_of(path, graph)` is what `apply` and `Executor` fill a rank's stages with; `export(executor, path)` writes the
weights of a running plan; `load(path)` is the model on one process. Leaves out tokenizers, whose files are copied.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gnomon.errors import InputError
from gnomon.formats.huggingface.four_bits import check_same
from gnomon.formats.huggingface.known import layout
from gnomon.formats.huggingface.runnable import Runnable, read_runnable
from gnomon.formats.huggingface.weights import Layout
from gnomon.graph import Graph
from gnomon.graph.outputs import without_loss
from gnomon.late import load_late
from gnomon.models.lora import with_adapters
from gnomon.plans import Plan
from gnomon.runtime.checkpoint.adapters import adapters_of
from gnomon.runtime.checkpoint.adapters import export as export_adapters
from gnomon.runtime.checkpoint.files import Reader
from gnomon.runtime.checkpoint.record import read_record
from gnomon.runtime.mesh.collectives import all_gather
from gnomon.runtime.module.one_process import OneProcess
from gnomon.runtime.parameters.frozen import in_four_bits
from gnomon.runtime.parameters.packed import PackedFolder, open_folder
from gnomon.runtime.parameters.parameters import CPU, Parameters, Slot, Values
from gnomon.runtime.parameters.weights import (
    DTYPES,
    INDEX,
    Folder,
    FolderWriter,
    WeightReader,
    copy_rest,
    settled,
    start_folder,
)
from gnomon.trust import leads_out

if TYPE_CHECKING:
    from gnomon.methods.learnt.teaching import Teaching
    from gnomon.runtime.step.execute import Executor

CONFIG = "config.json"
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja", "*.md")
"""Files that go with weights: config, tokenizer, generation settings, chat template, the model's card."""


def model_of(path: Path, *, classifier: bool = False) -> Runnable:
    """The model that a folder's config.json describes, or the classifier that it is. InputError without one."""
    if not path.exists():
        raise InputError(f"{path} does not exist; give a folder with {CONFIG} and *.safetensors")
    refuse_gguf(path)
    config = (path if path.is_dir() else path.parent) / CONFIG
    if not config.is_file():
        raise InputError(f"{config.parent} has no {CONFIG}, which says what its weights are of; put it beside them")
    return read_runnable(config.read_text(encoding="utf-8"), config.parent.resolve().name, classifier=classifier)


def refuse_gguf(path: Path) -> None:
    """InputError for a GGUF file where a folder is wanted."""
    if path.suffix == ".gguf" and path.is_file():
        raise InputError(
            f"{path} is a GGUF file, which gnomon serve and generate take as it is; for all else write it as a folder: "
            f"gnomon checkpoint convert {path} --to fp32 -o FOLDER"
        )


def values_of(path: Path, graph: Graph) -> Values:
    """Reads each rank's parts of the weights in `path` for `graph`. InputError where its config.json is of another
    model, or its files are not all there, whole and of the right shapes."""
    model = model_of(path)
    adapters = adapters_of(graph)
    described = model.graph if adapters is None else with_adapters(model.graph, adapters)
    if replace(described, name=graph.name) != graph:
        raise InputError(
            f"the weights in {path} are of {model.graph.name} ({_size(model.graph)}), whose config.json says another "
            f"model than the plan's {graph.name} ({_size(graph)}); make the plan for that config.json"
        )
    folder = open_folder(path)
    where = settled(folder, layout(model.graph, model.model_type))
    check_same(where, in_four_bits(graph), str(path))
    return WeightReader(folder, where)


def _size(graph: Graph) -> str:
    return f"{graph.num_parameters():,} parameters"


def load(
    path: Path, *, logits: bool = False, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> OneProcess:
    """The model in `path` with its weights on this process. logits: without its loss, to generate with."""
    graph = model_of(path).graph
    values = values_of(path, graph)
    return OneProcess(without_loss(graph) if logits else graph, values=values, dtype=dtype, device=device)


def taught_by(teaching: Teaching, graph: Graph, dtype: torch.dtype, device: torch.device) -> tuple[OneProcess, Values]:
    """(the teacher, what the model begins as: the teacher's layers that its own stand for, and what both have once).
    PlanError for a teacher of other tokens or layers; values of other shapes are refused when they are read."""
    folder = Path(teaching.folder).expanduser()
    known = model_of(folder)
    names = load_late("gnomon.methods.learnt.teacher:teachers_names")(teaching, graph, known.graph)
    reader = values_of(folder, known.graph)

    def begin(slot: Slot) -> torch.Tensor | None:
        theirs = names.get(slot.name)
        return None if theirs is None else reader(replace(slot, name=theirs))

    return OneProcess(known.graph, values=reader, dtype=dtype, device=device), begin


def check_export(target: Path, model: Path) -> None:
    """InputError for a folder that weights cannot be written to, or a model whose layout is not known."""
    source = model if model.is_dir() else model.parent
    if not model.exists():
        raise InputError(
            f"weights are exported in the layout of a config.json, and the plan's model {str(model)!r} is a name; make "
            f"the plan for a config.json"
        )
    model_of(model)
    if any(source.glob("*.safetensors")) and isinstance(open_folder(source), PackedFolder):
        raise InputError(
            f"{source} has its weights packed, which trained ones are not written as; train from the folder that it "
            f"was made from, and compress what comes out"
        )
    if target.exists() and target.resolve() == source.resolve():
        raise InputError(f"{target} is the folder that the model came from; give another one to write to")
    check_target(target)


def check_target(target: Path) -> None:
    """InputError for a folder that weights cannot be written to."""
    if target.exists() and any(target.glob("*.safetensors")):
        raise InputError(f"{target} has weights already; give another folder, or remove them")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write weights to {str(target)!r}: {error.strerror}") from error


def export(executor: Executor, target: Path, *, model: Path) -> Path:
    """Writes the parameters, as forward reads them, as a folder in Hugging Face's layout; every rank must call it.

    model: the folder whose config.json the plan was made for. Where it has weights, the new folder has the same files
    and dtypes, so that what was not trained comes out with the same bytes; its tokenizer and other small files are
    copied. Otherwise tensors have the plan's dtype. Of a model with adapters these alone are written, in PEFT's
    layout. Ranks write into the same files, each the parts that it holds.
    """
    known = model_of(model)
    source = model if model.is_dir() else model.parent
    where = layout(known.graph, known.model_type)
    like = Folder.of(model) if any(source.glob("*.safetensors")) else None
    if like is not None:
        where = settled(like, where)
    if adapters_of(executor.graph) is not None:
        return export_adapters(executor, target, known, source)
    executor.synchronise()
    first = dist.get_rank() == 0
    dtype = next(parameters.dtypes.param for parameters, _ in executor.parameters())
    if first:
        writer = _begun(target, model, where, dtype, like)
    dist.barrier()
    if not first:
        writer = start_folder(target, where, dtype, like, join=True)
    for number in sorted(executor.stages):
        for parameters in executor.stages[number].own_parameters:
            was_apart = gathered(executor, parameters)
            if is_first(executor, parameters):
                for slot in parameters.slots:
                    for one, value in slot.experts_of(parameters.value(slot.name)):
                        writer.write_part(where, one, value)
            if was_apart:
                parameters.flat = None
    dist.barrier()
    return target


def _begun(target: Path, model: Path, where: Layout, dtype: torch.dtype, like: Folder | None) -> FolderWriter:
    """A folder with all that goes with weights, into which they are put."""
    check_export(target, model)
    if where.four_bits:
        raise InputError(f"{model} has weights in four bits, which whole ones are not written as; export adapters")
    companions = companion_files(model if model.is_dir() else model.parent)
    writer = start_folder(target, where, dtype, like)
    for file in companions:
        shutil.copyfile(file, target / file.name)
    if like is not None:
        copy_rest(target, like, {*where.tensors(), *(where.copies or {})})
    return writer


def companion_files(folder: Path) -> list[Path]:
    """Files that are copied with weights. InputError for a link to what is not the model's: it would come out with the
    contents of that file."""
    found = sorted({file for pattern in BESIDE for file in folder.glob(pattern) if file.name != INDEX})
    for file in found:
        if (other := leads_out(file, folder, hub=True)) is not None:
            raise InputError(
                f"{file} is a link out of the model's folder, to {other}, whose contents would be written with the "
                f"weights; put a copy in its place, or remove it"
            )
    return [file for file in found if file.is_file()]


def export_checkpoint(path: Path, target: Path, *, model: Path) -> int:
    """Writes the parameters of the checkpoint `path` as `export` does and returns how many there are. InputError where
    it is of another model than the one whose config.json is in `model`, or of adapters."""
    known, record = model_of(model), read_record(path)
    stored = Reader(path, record)
    where = layout(known.graph, known.model_type)
    like = Folder.of(model) if any((model if model.is_dir() else model.parent).glob("*.safetensors")) else None
    where = where if like is None else settled(like, where)
    holdings = load_late("gnomon.runtime.checkpoint.convert:holdings")
    slots = [slot for parameters, _ in holdings(known.graph, Plan(), 0) for slot in parameters.slots]
    missing = [slot.name for slot in slots if f"parameters/{slot.name}" not in stored.by_name]
    if missing or len(slots) < sum(name.startswith("parameters/") for name in stored.by_name):
        what = f"has no {missing[0]}" if missing else "has more tensors than it"
        raise InputError(f"{path} {what}: it is of {record.identity.get('model', 'another model')}, not of {model}")
    dtypes = {DTYPES[stored.by_name[f"parameters/{slot.name}"][0].entry.dtype] for slot in slots}
    writer = _begun(target, model, where, dtypes.pop(), like)
    for slot in slots:
        value = stored.whole(f"parameters/{slot.name}")
        if tuple(value.shape) != slot.whole:
            raise InputError(f"{path} has {slot.name} of shape {tuple(value.shape)}, and {model} {slot.whole}")
        writer.write_part(where, slot, value)
    return sum(torch.Size(slot.whole).numel() for slot in slots)


def is_first(executor: Executor, parameters: Parameters) -> bool:
    """Whether this rank writes these parameters, of all that hold the same ones."""
    here, mesh = executor.groups.here, executor.groups.mesh
    if parameters.experts:
        return here.along["edp"] == 0 and here.data < mesh.dp_shard
    return here.data == 0 and here.along["cp"] == 0


def gathered(executor: Executor, parameters: Parameters) -> bool:
    """Gathers a fully sharded stage; whether it was one."""
    if parameters.flat is not None:
        return False
    (flat, part), group = parameters.make_room(), executor.groups.by_comm[parameters.comm("dp_shard")]
    assert group is not None or parameters.away, "a fully sharded stage has a group"
    if group is not None:
        all_gather(flat, part, group)
    return True

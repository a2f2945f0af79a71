"""Knowledge distillation from a teacher: how its layers and parameters correspond to the model's.

`read_teaching` makes a `Teaching` of a method's parameters (`methods.teaching_of`: of a plan's). The loss of a token is
    (1 - share) · cross-entropy + share · T² · KL(teacher ‖ model) + hidden · mean (h_model - h_teacher)²
with logits divided by the temperature T, and h the outputs of a layer of the model and of the teacher's layer that it
stands for. Leaves out reading the teacher (`runtime.checkpoint.pretrained`) and running it
(`runtime.step.distillation`).

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network" (T^2); the squares between layers are those
of Jiao et al. 2020 (TinyBERT) without its projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from gnomon.errors import PlanError
from gnomon.graph import Graph, Layer, Tensor
from gnomon.methods.learnt.teaching import Teaching
from gnomon.methods.method import Param, Params

PARAMS = (
    Param(name="teacher", about="a folder of the teacher's weights and config.json"),
    Param(name="share", about="of the loss, that compares logits with the teacher's", default=0.7),
    Param(name="temperature", about="at which logits are compared", default=1.0),
)
"""The parameters that every method with a teacher has."""


def read_teaching(name: str, read: Params) -> Teaching:
    """Reads a method's parameters. PlanError for numbers out of range, and layers that are not rising indices."""
    share, temperature = float(read["share"]), float(read["temperature"])
    hidden, layers = float(read.get("hidden", 0.0)), str(read.get("layers", "")).replace(" ", "")
    if not 0 <= share <= 1 or not 0 < temperature < float("inf") or hidden < 0 or not isfinite(hidden):
        raise PlanError(
            f"pass {name}: share = {share} is of the loss, from 0 to 1; temperature = {temperature} is above 0; hidden "
            f"= {hidden} is at least 0"
        )
    parts = layers.split(",") if layers else []
    if not all(part.isdigit() for part in parts) or sorted(set(map(int, parts))) != list(map(int, parts)):
        raise PlanError(f"pass {name}: layers = {layers!r} are numbers of the teacher's, from 0, rising; as '1,3,5'")
    return Teaching(
        folder=str(read["teacher"]),
        share=share,
        temperature=temperature,
        hidden=hidden,
        layers=tuple(map(int, parts)),
    )


def repeated(graph: Graph) -> list[Layer]:
    """The layers of a model's repeated part, which are numbered from 0; embedding and head are not among them."""
    return [layer for layer in graph.layers() if layer.call.first is not None]


def stands_for(teaching: Teaching, graph: Graph, teacher: Graph) -> dict[int, int]:
    """Layer of the model -> layer of the teacher that it stands for, both numbered as in `repeated`.

    All layers in order where none are named; empty where none are named or needed and the teacher has more or fewer.
    PlanError for another number of named layers than the model has, for one that the teacher has not, and for a teacher
    with another vocabulary or other inputs.
    """
    sizes = [_vocabulary(one) for one in (graph, teacher)]
    if sizes[0] != sizes[1]:
        raise PlanError(
            f"the teacher in {teaching.folder} has a vocabulary of {sizes[1]:,} and {graph.name} one of {sizes[0]:,}, "
            f"whose logits cannot be compared; give a teacher with the same tokenizer"
        )
    if {x.name for x in graph.inputs} != {x.name for x in teacher.inputs}:
        raise PlanError(
            f"the teacher in {teaching.folder} reads {', '.join(x.name for x in teacher.inputs)} and {graph.name} "
            f"{', '.join(x.name for x in graph.inputs)}; give a teacher of the same task"
        )
    own, theirs = len(repeated(graph)), len(repeated(teacher))
    layers = teaching.layers or tuple(range(theirs))
    needed = bool(teaching.layers) or teaching.hidden > 0
    if len(layers) != own or any(layer >= theirs for layer in layers):
        if not needed:
            return {}
        raise PlanError(
            f"{graph.name} has {own} layers and the teacher in {teaching.folder} {theirs} (0 to {theirs - 1}); give "
            f"layers, one of the teacher's for each of the model's, as '{_spread(own, theirs)}'"
        )
    return dict(enumerate(layers))


def teachers_names(teaching: Teaching, graph: Graph, teacher: Graph) -> Mapping[str, str]:
    """Parameter of the model -> the teacher's parameter whose values it begins with: of layers that stand for one, and
    of layers outside the repeated part with the same label. Empty where no layers stand for the teacher's, or shapes
    differ; PlanError for shapes that differ in layers that were named."""
    own, theirs, names = repeated(graph), repeated(teacher), dict[str, str]()
    stand = stands_for(teaching, graph, teacher)
    once = {layer.label: layer for layer in teacher.layers() if layer.call.first is None}
    pairs = [(own[a], theirs[b]) for a, b in stand.items()]
    pairs += [(layer, once[layer.label]) for layer in graph.layers() if layer.label in once] if stand else []
    for mine, other in pairs:
        has = {tensor.name: _shape(tensor) for tensor in teacher.block(other.call.block).parameters}
        for tensor in graph.block(mine.call.block).parameters:
            # None, for a parameter that the teacher has not, differs from every shape.
            if has.get(tensor.name) != _shape(tensor):
                if teaching.layers:
                    raise PlanError(
                        f"{mine.label} of {graph.name} has {tensor.name} of {_shape(tensor)}, and the teacher's "
                        f"{other.label} of {has.get(tensor.name, 'none')}: it cannot begin as that; leave layers out"
                    )
                return {}
            full = mine.call.parameter_name(tensor.name, mine.index)
            names[full] = other.call.parameter_name(tensor.name, other.index)
    return names


def begins(teaching: Teaching, graph: Graph, teacher: Graph) -> tuple[str, ...]:
    """One sentence that says what the model's parameters begin as."""
    if not teachers_names(teaching, graph, teacher):
        return (f"parameters begin as random numbers: the teacher in {teaching.folder} has other layers",)
    layers = ", ".join(map(str, stands_for(teaching, graph, teacher).values()))
    return (f"parameters begin as layers {layers} of the teacher in {teaching.folder}, and its embedding and head",)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(dim.size or 0 for dim in tensor.atoms)


def _vocabulary(graph: Graph) -> int:
    return next((dim.size or 0 for block in graph.blocks for dim in block.dims if dim.name == "vocab"), 0)


def _spread(own: int, theirs: int) -> str:
    """An example of `layers`: as many of the teacher's as the model has, evenly spread, its last among them."""
    # own = 3 and theirs = 12 give 3, 7, 11.
    return ",".join(str((i + 1) * theirs // own - 1) for i in range(min(own, theirs)))

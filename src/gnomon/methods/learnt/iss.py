"""ISS: hidden units of LSTMs that training makes unneeded, removed, so that a smaller dense LSTM is left.

A component is all that goes with a hidden unit: its row in each of the four gates, its column in the recurrent matrix,
and its column in whatever reads the layer's output (the next layer, another LSTM, a linear). Training minimises the
loss and `decay` times the sum of the components' norms (group lasso): after each update every component is shrunk by
learning rate times `decay` over its norm, the proximal step of that sum, so that unneeded ones become 0. After
`freeze_at` of the run's steps those under `threshold` are 0 for good and the rest is trained without it.

`lstms(graph)` finds LSTMs of a captured model and what reads them. Source: Wen et al., "Learning Intrinsic Sparse
Structures within Long Short-Term Memory", ICLR 2018; the proximal step in place of the sum's subgradient is ours.
Leaves out the arithmetic (`runtime.optim.iss`) and the smaller module (`runtime.checkpoint.smaller_lstm`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, prod

from gnomon.errors import PlanError
from gnomon.graph import DTYPE_BITS, Block, Graph, Layer, Op
from gnomon.methods.learnt.costs import MethodCosts
from gnomon.methods.learnt.trained_weights import divided_reason
from gnomon.methods.method import Method, Param
from gnomon.plans import Plan

NAME = "iss"
RECURRENT = re.compile(r"(.*\.|)weight_hh_l(\d+)$")
GATES = 4
HANDS_ON = frozenset({"reshape", "dropout", "activation", "cast", "scale", "softcap"})
"""Kinds of op that hand each unit on by itself, where the last dim stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssSettings:
    """What the plan asks for."""

    decay: float = 0.5
    """Of the sum of the components' norms."""
    threshold: float = 1e-4
    """Norm from which on a component stays."""
    freeze_at: float = 0.7
    """Share of the steps after which they are settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LstmLayer:
    """One layer of an LSTM, by full names of parameters."""

    hidden: int
    """Units of the layer."""
    input_weights: str
    """Weights of what it reads, (4 hidden, inputs)."""
    recurrent: str
    """(4 hidden, hidden)."""
    biases: tuple[str, ...]
    """Biases of its gates, (4 hidden,) each; empty: it has none."""
    readers: tuple[str, ...]
    """Matrices with a column for each of its units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lstm:
    """One LSTM module of the model."""

    path: str
    """As the user's module names it."""
    layers: tuple[LstmLayer, ...]
    """Its layers, the one that reads its input first."""


def settings_of(plan: Plan) -> IssSettings:
    """What a plan that names the method asks for. PlanError for parameters that mean nothing."""
    read = METHOD.read_from(plan)
    decay, threshold, freeze_at = (float(read[name]) for name in ("decay", "threshold", "freeze_at"))
    if not 0 <= decay < float("inf") or threshold < 0 or not isfinite(threshold) or not 0 < freeze_at < 1:
        raise PlanError(
            f"pass {NAME}: decay = {decay} and threshold = {threshold} must be at least 0, and freeze_at = {freeze_at} "
            f"a share of the steps between 0 and 1"
        )
    return IssSettings(decay=decay, threshold=threshold, freeze_at=freeze_at)


def lstms(graph: Graph) -> tuple[Lstm, ...]:
    """Those of a captured model. PlanError for one that runs both ways, projects, begins with a state that is given,
    or whose units are read by what is no column of a matrix."""
    layers = []
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for op in block.ops:
            if (own := _own(block, op)) is not None:
                layers.append(_lstm(layer, block, op, *own))
    return tuple(layers)


def _lstm(at: Layer, block: Block, op: Op, prefix: str, count: int) -> Lstm:
    def full(name: str) -> str:
        return at.call.parameter_name(name, at.index)

    outside = tuple(full(name) for name in _readers(block, op))
    layers = []
    for n in range(count):
        biases = (f"{prefix}bias_ih_l{n}", f"{prefix}bias_hh_l{n}")
        layers.append(
            LstmLayer(
                hidden=_last(block, f"{prefix}weight_hh_l{n}"),
                input_weights=full(f"{prefix}weight_ih_l{n}"),
                recurrent=full(f"{prefix}weight_hh_l{n}"),
                biases=tuple(full(name) for name in biases if name in op.inputs),
                readers=(full(f"{prefix}weight_ih_l{n + 1}"),) if n + 1 < count else outside,
            )
        )
    return Lstm(path=layers[0].recurrent.removesuffix("weight_hh_l0").rstrip("."), layers=tuple(layers))


def _own(block: Block, op: Op) -> tuple[str, int] | None:
    """(prefix of its parameters, layers) of an LSTM; None for another op."""
    if op.captured is None:
        return None
    found = [match for name in op.inputs if (match := RECURRENT.match(name))]
    # Four rows of the recurrent matrix for each unit: a GRU has three, a plain RNN one.
    if not found or _first(block, found[0][0]) != GATES * _last(block, found[0][0]):
        return None
    prefix = found[0][1]
    if any(name.endswith("_reverse") or ".weight_hr_" in f".{name}" for name in op.inputs):
        raise PlanError(f"{op.path} runs both ways or projects its units, whose components are others; ISS leaves it")
    weights = {name for name in op.inputs if block.tensor(name).kind == "parameter"}
    # The first tensor that is no weight is the sequence; what follows are states to begin with.
    givens = [name for name in op.inputs if name not in weights and block.tensor(name).is_float][1:]
    zeros = {name for other in block.ops if not other.inputs for name in other.outputs}
    if any(name not in zeros for name in givens):
        raise PlanError(f"{op.path} begins with a state that is given, which would have to lose units too")
    return prefix, len(found)


def _readers(block: Block, lstm: Op) -> list[str]:
    """Matrices with a column for each unit of the last layer. PlanError where something else reads them."""
    hidden = max(_last(block, name) for name in lstm.inputs if RECURRENT.match(name))
    waiting, found = [lstm.outputs[0]], list[str]()
    for name in lstm.outputs[1:]:
        if any(name in op.inputs for op in block.ops) or name in block.outputs:
            raise PlanError(f"{lstm.path}'s last state is read, which would have fewer units; ISS leaves it")
    # Ends, as ops of a block come after what they read.
    while waiting:
        name = waiting.pop()
        if name in block.outputs:
            raise PlanError(f"{lstm.path}'s output leaves the block {block.name}; ISS takes one that linears read")
        for op in block.ops:
            if name not in op.inputs:
                continue
            if op.does == "multiplies" and op.inputs[0] == name:
                found.append(op.inputs[1])
            elif (own := _own(block, op)) is not None and op.inputs[0] == name:
                found.append(f"{own[0]}weight_ih_l0")
            elif _hands_on(block, op, hidden):
                waiting += op.outputs
            else:
                raise PlanError(f"{op.path} reads {lstm.path}, and removing units would change more than its columns")
    return found


def _hands_on(block: Block, op: Op, hidden: int) -> bool:
    """Whether an op hands each unit on by itself."""
    wide = all(block.tensor(name).dims and _last(block, name) == hidden for name in op.outputs)
    single_input = sum(block.tensor(name).is_float for name in op.inputs) == 1
    if op.captured is not None:
        moves = all(node.target.split(".")[1] in MOVES for node in op.captured.nodes)
        return wide and single_input and moves
    return wide and single_input and op.kind in HANDS_ON


MOVES = frozenset({
    "clone", "contiguous", "detach", "view", "_unsafe_view", "reshape", "alias", "dropout", "native_dropout", "tanh",
    "relu", "sigmoid", "_to_copy",
})  # fmt: skip
"""ATen ops that hand each unit on by itself, where the last dim stays."""


def _last(block: Block, name: str) -> int:
    dim = block.tensor(name).dims[-1]
    return prod(atom.size or 0 for atom in dim.atoms)


def _first(block: Block, name: str) -> int:
    dim = block.tensor(name).dims[0]
    return prod(atom.size or 0 for atom in dim.atoms)


def parameters_of_components(graph: Graph) -> Iterator[str]:
    """Every matrix that has a part of one, once."""
    yield from dict.fromkeys(
        name
        for lstm in lstms(graph)
        for layer in lstm.layers
        for name in (layer.input_weights, layer.recurrent, *layer.readers)
    )


def _refusal(plan: Plan) -> str | None:
    settings_of(plan)
    if plan.num_stages > 1:
        return "a component has parts in several layers, which pipeline ranks do not all have; use pp = 1"
    if others := [
        method_used.name for method_used in plan.schedule.passes if method_used.name in ("nxm_admm", "xtc", "ad2")
    ]:
        return f"{others[0]} changes the same weights; leave one out"
    return divided_reason(plan)


def _unfit(plan: Plan, graph: Graph) -> str | None:
    try:
        found = lstms(graph)
    except PlanError as error:
        return str(error)
    return None if found else f"{graph.name} has no LSTM, whose hidden units it removes; give a module with nn.LSTM"


def _costs(plan: Plan, graph: Graph) -> MethodCosts:
    """Each number is read for its norms and scaled, by row and by column."""
    width = DTYPE_BITS[plan.precision.param if plan.precision.master == "none" else plan.precision.master] // 8
    names, sizes = set(parameters_of_components(graph)), dict[str, int]()
    for layer in graph.layers():
        block = graph.block(layer.call.block)
        for tensor in block.parameters:
            if (full := layer.call.parameter_name(tensor.name, layer.index)) in names:
                sizes[full] = prod(atom.size or 0 for atom in tensor.atoms)
    # Read for a norm, read and written to be scaled: three times by row and three times by column.
    return MethodCosts(update_bytes=6.0 * width * sum(sizes.values()))


_DEFAULT = IssSettings()

METHOD = Method(
    name=NAME,
    paper="ISS, Wen et al., ICLR 2018",
    about="hidden units of LSTMs that a group lasso makes 0 are removed, and a smaller dense LSTM is left",
    switch="schedule.passes",
    exactness="statistical",
    missing={
        "rewritten": "rows of a Program stay as they are; an update does more",
        "planned": "it changes what is learnt, so that a plan has it where its user says so",
    },
    params=(
        Param(name="decay", about="weight of the sum of components' norms", default=_DEFAULT.decay),
        Param(name="threshold", about="norm from which on a component stays", default=_DEFAULT.threshold),
        Param(name="freeze_at", about="share of the steps after which they are settled", default=_DEFAULT.freeze_at),
    ),
    refusal=_refusal,
    unfit=_unfit,
    resumes=False,
    costs=_costs,
)

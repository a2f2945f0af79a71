"""Low-rank adapters on a frozen model: LoRA (Hu et al. 2021), QLoRA (Dettmers et al. 2023) and DoRA (Liu et al. 2024).

`with_adapters(graph, adapters)` returns the same model whose weights are read and not trained: states of the job in
place of parameters, so they have no gradient and no optimizer state, and no matmul makes one. Next to each linear of a
target stand two small ones, `lora_A` and `lora_B`, whose matmul is scaled and added. `parse_adapters` reads the end of
a model's name: `llama-3.1-70b+lora16`, `+qlora16` (in NF4), `+q8lora16`, `+lora16:q_proj,v_proj`, `+dora16`, and
`+lora16+whole:embed_tokens,lm_head` where modules are trained whole beside them. Leaves out adapters on experts and
embeddings, the frozen copies that PEFT keeps of modules that are trained whole, dropout before them, that the first
layer's input needs no gradient, and the norms of DoRA's weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from gnomon.errors import GraphError, nearest
from gnomon.graph import Block, Dim, Graph, Op, Tensor
from gnomon.models.parts import positive
from gnomon.ops.op import AttrValue, attrs

NF4 = "fp4_e2m1"
"""dtype that stands for NF4 in a graph: four bits."""
INT8 = "fp8_e5m2"
"""dtype that stands for LLM.int8 in a graph: eight bits; scales of rows, 4 bytes each, are not counted."""

Base = Literal["compute", "nf4", "int8"]
"""How the frozen linears of layers are stored."""

PREFIXES: dict[Base, str] = {"compute": "", "nf4": "q", "int8": "q8"}
"""What stands before `lora` in a model's name, by how its frozen linears are stored."""

_NAME = re.compile(
    r"(?P<model>.+)\+(?P<kind>(?:q8?)?[ld]ora)(?P<rank>\d+)(?::(?P<targets>[\w.*,]+))?"
    r"(?:\+whole:(?P<whole>[\w.,]+))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """What is trained besides frozen weights."""

    rank: int = 16
    """Width between the two linears of an adapter."""
    targets: tuple[str, ...] = ()
    """Last parts of the paths of linears that get one, or patterns of them (`q_proj`, `*_proj`); (): all linears of
    layers but routers."""
    joined: bool = False
    """Linears that read one tensor have one adapter, as a joined projection does (Megatron's `linear_qkv`): they share
    `lora_A`, and `lora_B`, its scale and the sum are one kernel each for all of them (`joined` of an op)."""
    scaled: Literal["output", "inner"] = "output"
    """What the factor multiplies: what `lora_B` writes, or what `lora_A` does, which is narrow."""
    dropout: float = 0.0
    """Of what `lora_B` writes."""
    magnitudes: bool = False
    """DoRA: a trained vector scales what the linear and its adapter write. It is divided by the norm of each row of the
    weight with its adapter, which is no part of the graph: a forward computes it without gradients."""
    whole: tuple[str, ...] = ()
    """Last parts of the paths of modules whose own weights are trained beside adapters (PEFT's `modules_to_save`)."""
    base: Base = "compute"
    """How frozen linears of layers are stored: in the compute dtype, in NF4, or in eight bits (LLM.int8), widened
    before each matmul."""

    def __post_init__(self) -> None:
        positive(rank=self.rank)
        if not 0 <= self.dropout < 1:
            raise GraphError(f"dropout of adapters is {self.dropout}; give at least 0 and under 1")

    def __str__(self) -> str:
        targets = f":{','.join(self.targets)}" if self.targets else ""
        kind = f"{PREFIXES[self.base]}{'dora' if self.magnitudes else 'lora'}"
        return f"+{kind}{self.rank}{targets}" + (f"+whole:{','.join(self.whole)}" if self.whole else "")


def parse_adapters(name: str) -> tuple[str, Adapters | None]:
    """(name of the model, its adapters) of `llama-3.1-70b+lora16`; None where the name has no such end."""
    match = _NAME.fullmatch(name)
    if match is None:
        if re.search(r"\+(q8?)?[ld]ora", name):
            raise GraphError(
                f"{name!r}: adapters are written MODEL+lora16, +qlora16, +q8lora16, +dora16, or "
                f"MODEL+lora16:q_proj,v_proj"
            )
        return name, None
    targets, whole = (tuple(one for one in (match[part] or "").split(",") if one) for part in ("targets", "whole"))
    stored = match["kind"].removesuffix("lora").removesuffix("dora")
    base = next(base for base, prefix in PREFIXES.items() if prefix == stored)
    rank, magnitudes = int(match["rank"]), match["kind"].endswith("dora")
    return match["model"], Adapters(rank=rank, targets=targets, whole=whole, base=base, magnitudes=magnitudes)


def with_adapters(graph: Graph, adapters: Adapters) -> Graph:
    """`graph` frozen, with adapters on its layers. GraphError for a target that no layer has, a module that is trained
    whole and not there, or a model without linears in layers."""
    layers = {call.block for call in graph.calls if call.first is not None}
    linears = {name: _linears(graph.block(name)) for name in layers}
    known = sorted({_last(op) for ops in linears.values() for op in ops})
    for target in adapters.targets:
        if not any(fnmatchcase(name, target) for name in known):
            raise GraphError(
                f"no linear of {graph.name}'s layers is called {target!r}{nearest(target, known)}; {known}"
            )
    if not known:
        raise GraphError(f"{graph.name} has no layers with linears for adapters")
    kept = whole_parameters(graph, adapters.whole)
    blocks = (
        _frozen(block, linears.get(block.name, ()), adapters, kept.get(block.name, set())) for block in graph.blocks
    )
    return replace(graph, name=f"{graph.name}{adapters}", blocks=tuple(blocks))


def whole_parameters(graph: Graph, modules: Iterable[str]) -> dict[str, set[str]]:
    """Block -> its parameters that belong to modules of these names, in a block's own words or in full; weights that
    are shared with them too. GraphError for a module that has none."""
    own = [
        (layer.call.block, tensor.name, layer.call.parameter_name(tensor.name, layer.index))
        for layer in graph.layers()
        for tensor in graph.block(layer.call.block).parameters
    ]
    chosen = set[str]()
    for module in modules:
        found = {full for _, name, full in own if any(_of_module(path, module) for path in (name, full))}
        if not found:
            known = {path.rpartition(".")[0].rpartition(".")[2] for _, name, full in own for path in (name, full)}
            raise GraphError(f"no module of {graph.name} is called {module!r}{nearest(module, known)}")
        chosen |= found
    kept: dict[str, set[str]] = {}
    for block, name, full in own:
        if full in chosen:
            kept.setdefault(block, set()).add(name)
    return kept


def _of_module(path: str, module: str) -> bool:
    """Whether a parameter's path is that of the module or of one inside it."""
    return f".{module}." in f".{path}"


def _last(op: Op) -> str:
    return op.path.rpartition(".")[2]


def _linears(block: Block) -> tuple[Op, ...]:
    """Linears of a layer but those that routers read."""
    routed = {op.inputs[0] for op in block.ops if op.does == "routes"}
    return tuple(op for op in block.ops if op.does == "multiplies" and op.outputs[0] not in routed)


def _frozen(block: Block, linears: tuple[Op, ...], adapters: Adapters, whole: Set[str]) -> Block:
    """The block with its parameters but `whole` as states of the job, and adapters besides `linears` that are
    targets."""
    stored = {"nf4": NF4, "int8": INT8}.get(adapters.base, "compute")
    narrow = {op.inputs[1] for op in linears} if adapters.base != "compute" else set[str]()
    tensors = [
        replace(t, kind="state", lifetime="job", dtype=stored if t.name in narrow else "compute")
        if t.kind == "parameter" and t.name not in whole
        else t
        for t in block.tensors
    ]
    adapted_paths = {
        op.path for op in linears if not adapters.targets or any(fnmatchcase(_last(op), t) for t in adapters.targets)
    }
    ops: list[Op] = []
    shared: dict[str, str] = {}
    for op in block.ops:
        if op.path not in adapted_paths:
            ops.append(op)
            continue
        adapted, added = _adapter(block, op, adapters, shared.get(op.inputs[0], ""))
        if adapters.joined:
            low = next(step for step in adapted if step.path == f"{op.path}.lora_B")
            shared.setdefault(op.inputs[0], low.inputs[0])
        ops += adapted
        tensors += added
    return replace(block, tensors=tuple(tensors), ops=tuple(ops))


def _after(adapters: Adapters) -> tuple[tuple[str, str, tuple[tuple[str, AttrValue], ...]], ...]:
    """(kind, name, attributes) of what follows `lora_B`, one after the other; the sum with the linear is last."""
    scale = ("scale", "lora", attrs(factor=1.0))
    dropout = ("dropout", "dropped", attrs(p=adapters.dropout))
    return (
        *((scale,) if adapters.scaled == "output" else ()),
        *((dropout,) if adapters.dropout else ()),
        ("add", "sum", ()),
    )


def _adapter(block: Block, op: Op, adapters: Adapters, before: str) -> tuple[tuple[Op, ...], tuple[Tensor, ...]]:
    """The linear, writing under another name, the two small ones, their scale and the sum; and the tensors of these.
    before: what `lora_B` of another reads, in place of a `lora_A` of its own."""
    x, weight, y = (block.tensor(name) for name in (op.inputs[0], op.inputs[1], op.outputs[0]))
    inner = Dim(name="lora_rank", size=adapters.rank)
    summed = set(op.contracts)
    outer_dims = tuple(dim for dim in x.dims if not summed.issuperset(atom.name for atom in dim.atoms))
    contracted = tuple(dim for dim in weight.dims if summed.issuperset(atom.name for atom in dim.atoms))
    out = tuple(dim for dim in weight.dims if dim not in contracted)
    ops, tensors = (
        [replace(op, outputs=(f"{op.path}.base",))],
        [Tensor(name=f"{op.path}.base", dims=y.dims, dtype=y.dtype)],
    )

    def step(what: str, kind: str, inputs: tuple[str, ...], dims: tuple[Dim, ...], **rest: Any) -> str:
        """One op, whose output has its path as name."""
        path = f"{op.path}.{what}"
        tensors.append(Tensor(name=path, dims=dims, dtype=y.dtype))
        ops.append(Op(kind=kind, path=path, inputs=inputs, outputs=(path,), **rest))
        return path

    def trained(what: str, dims: tuple[Dim, ...]) -> str:
        tensors.append(Tensor(name=f"{op.path}.{what}.weight", dims=dims, dtype="param", kind="parameter"))
        return tensors[-1].name

    mate = attrs(joined=True) if before else ()
    if not before:
        a = trained("lora_A", (inner, *contracted))
        before = step("lora_A", "linear", (x.name, a), (*outer_dims, inner), contracts=op.contracts)
        if adapters.scaled == "inner":
            before = step("lora", "scale", (before,), (*outer_dims, inner), attrs=attrs(factor=1.0))
    b = trained("lora_B", (*out, inner))
    last = step("lora_B", "linear", (before, b), y.dims, contracts=(inner.name,), attrs=mate)
    for kind, what, step_attrs in _after(adapters)[:-1]:
        last = step(what, kind, (last,), y.dims, attrs=tuple(sorted((*step_attrs, *mate))))
    plain = f"{op.path}.base"
    if adapters.magnitudes:  # peft scales either by itself, and keeps both for the vector's gradient
        vector = trained("lora_magnitude_vector", out)
        plain, last = (
            step("base_scaled", "scale", (plain, vector), y.dims),
            step("scaled", "scale", (last, vector), y.dims),
        )
    add = Op(kind="add", path=f"{op.path}.sum", inputs=(plain, last), outputs=(y.name,), attrs=mate)
    return (*ops, add), tuple(tensors)

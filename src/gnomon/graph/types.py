"""The types of a model: Tensor, Op, Block, Call; `Graph` is in `graph.py`.

A Block is a list of ops over named tensors with typed inputs and outputs: one transformer layer, an embedding, a head.
A Call places a block in a model, `repeat` times in a chain. All values are frozen and check themselves: what is wrong
raises GraphError with the path `block/op`. Leaves out: numbers (`ops.py`), the backward (`backward.py`), layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias
from zlib import crc32

from gnomon.errors import GraphError, nearest
from gnomon.graph.captured import Node
from gnomon.graph.dims import DTYPE_BITS, SYMBOLIC_DTYPES, Dim, check_name

TensorKind: TypeAlias = Literal["parameter", "activation", "state"]
Lifetime: TypeAlias = Literal["step", "sequence", "job"]
AttrValue: TypeAlias = "bool | int | float | str | tuple[int, ...]"

MAX_REPEAT = 100_000
"""Repeats of a call; more is a mistake, and would only be found after minutes of expanding."""

CONTRACTIONS = ("linear", "grouped_linear", "matmul", "conv2d")
"""Kinds that multiply and add over `contracts`; the second input is the weight (or the right operand)."""

VIEWS = ("reshape", "split", "rename")
"""Kinds whose outputs are views: no bytes move, and what keeps an output keeps the whole input storage."""

OP_KINDS = (
    *CONTRACTIONS,
    *VIEWS,
    "attention",  # q, k, v[, bias] -> out: softmax(q kᵀ · scale) v; attrs causal, window, softcap, dropout
    "state_space",  # z x B C dt, conv weights and biases, dt bias, decay, skip -> y: Mamba-2; see state_space.py
    "softmax",
    "norm",  # attrs fn: rms | layer | group
    "activation",  # attrs fn: gelu | gelu_tanh | gelu_new | quick_gelu | relu | relu2 | silu | tanh | sigmoid
    "glu",  # gate, up -> fn(gate) * up; attrs fn: silu (SwiGLU) | gelu | gelu_tanh (GeGLU) | relu
    "add",
    "mul",
    "rotary",
    "embedding",  # ids, table -> rows
    "cross_entropy",  # logits, labels -> loss
    "mse",  # prediction, target -> loss
    "dropout",
    "router",  # logits[, bias] -> weights, indices; attrs fn: softmax | sigmoid
    "dispatch",  # x, indices -> one row for each (token, chosen expert)
    "combine",  # rows, weights, indices -> tokens
    "patchify",
    "pool",  # attrs fn: max | mean | first
    "upsample",
    "concat",
    "repeat",  # copies along a dim (kv_heads -> heads)
    "scale",  # by a constant or a learned vector
    "modulate",  # x, shift, scale -> x·(1+scale)+shift
    "softcap",  # cap · tanh(x / cap)
    "cast",
    "row_stats",  # one number a row (mean of squares, then rsqrt); only in lowered blocks
    "alibi",  # positions -> bias of (positions, positions, heads): linear biases in place of positions
    "timestep",  # sinusoidal features of a diffusion time
    "opaque",  # what no other kind says: the ATen ops of one call, in `captured`
)
"""Every op kind that has a rule in `ops.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A named, typed array. Identity is the name, within its block (or graph, for a graph input)."""

    name: str
    """Within a block: the path of the op that makes it, or of the parameter (`self_attn.q_proj.weight`)."""
    dims: tuple[Dim, ...]
    """Outermost first; a weight is (out …, in …) as in torch. No name twice."""
    dtype: str = "compute"
    """As in torch (`bf16 fp32 fp8_e4m3 int64 bool`), or `compute` or `param`, which the plan's precision resolves."""
    kind: TensorKind = "activation"
    """parameter (trained or not), activation, or state (KV cache, rotary tables, SSM state)."""
    lifetime: Lifetime = "step"
    """Of a state: a step, a sequence, or the job."""

    def __post_init__(self) -> None:
        check_name(self.name.replace(":", "."), "tensor")
        names = [atom.name for dim in self.dims for atom in dim.atoms]
        if len(set(names)) != len(names):
            raise GraphError(f"tensor {self.name!r} has a dim twice: {', '.join(names)}; give one of them another name")
        known = (*DTYPE_BITS, *SYMBOLIC_DTYPES)
        if self.dtype not in known:
            raise GraphError(
                f"tensor {self.name!r} has unknown dtype {self.dtype!r}{nearest(self.dtype, known)}; known: {known}"
            )

    @property
    def atoms(self) -> tuple[Dim, ...]:
        """The dims with products taken apart, outermost first."""
        return tuple(atom for dim in self.dims for atom in dim.atoms)

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through it."""
        return not self.dtype.startswith(("int", "uint", "bool"))

    def renamed(self, name: str) -> Tensor:
        """The same array under another name."""
        return replace(self, name=name)

    def __str__(self) -> str:
        return f"{self.name}[{', '.join(map(str, self.dims))}]:{self.dtype}"


def attrs(**values: AttrValue) -> tuple[tuple[str, AttrValue], ...]:
    """Attributes of an op as a hashable, sorted tuple of pairs."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What an op computes, as PyTorch ran it: for `opaque` ops, and for views of a captured model (`reshape`)."""

    nodes: tuple[Node, ...]
    """ATen ops in order."""
    tensors: tuple[Tensor, ...] = ()
    """What the nodes write beside the op's outputs, named `path:0` and on."""
    keeps: tuple[str, ...] = ()
    """Of inputs, outputs and `tensors`, what autograd keeps for backward."""
    whole: tuple[str, ...] = ()
    """Names of dims along which it cannot be divided; `*` for all but the batch."""
    summed: tuple[str, ...] = ()
    """Names of dims that it sums over, so that ranks with parts of them have partial sums; of custom ops."""
    where: str = ""
    """`file.py:12` of the code that called it."""

    @property
    def is_priced(self) -> bool:
        """Whether authors say what every op in it costs."""
        return all(node.cost is not None or node.view for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation of a block, by kind; its rules (FLOPs, bytes, what backward needs) are in `ops.py`."""

    kind: str
    """One of OP_KINDS."""
    path: str
    """Unique within the block; like the module path of the public implementation (`self_attn.q_proj`)."""
    inputs: tuple[str, ...]
    """Tensor names; the order is the kind's (activation first, then weight, then bias)."""
    outputs: tuple[str, ...]
    """Tensor names; each tensor is written by one op."""
    contracts: tuple[str, ...] = ()
    """Names of the dims summed over, for the kinds in CONTRACTIONS; each is in both of the first two inputs."""
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    """Sorted pairs, made by `attrs(...)`; what each kind reads is said beside its rule."""
    captured: Captured | None = None
    """The ATen ops, of an op that was captured and has no rule of its own."""

    @property
    def is_opaque(self) -> bool:
        """Whether it has no rule of its own, and nobody says what it costs."""
        return self.kind == "opaque" and self.captured is not None and not self.captured.is_priced

    def __post_init__(self) -> None:
        if self.kind not in OP_KINDS:
            raise GraphError(f"op {self.path!r} has unknown kind {self.kind!r}{nearest(self.kind, OP_KINDS)}")
        if not self.outputs:
            raise GraphError(f"op {self.path!r} has no outputs")
        if (self.kind in CONTRACTIONS) != bool(self.contracts):
            rule = "name the contracted dims" if self.kind in CONTRACTIONS else "leave contracts empty"
            raise GraphError(f"op {self.path!r} ({self.kind}) has contracts={self.contracts}: {rule}")
        if self.kind == "opaque" and self.captured is None:
            raise GraphError(f"op {self.path!r} is opaque: give its ATen ops, as `captured`")
        if self.attrs != tuple(sorted(self.attrs)):
            raise GraphError(f"op {self.path!r} has unsorted attrs: make them with attrs(...)")

    def attr(self, name: str, default: AttrValue) -> AttrValue:
        """The attribute `name`, or `default` when the op does not carry it."""
        return next((value for key, value in self.attrs if key == name), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Ops over named tensors, in an order in which they can run."""

    name: str
    """Unique in its graph."""
    inputs: tuple[str, ...]
    """Activations that a call must supply."""
    outputs: tuple[str, ...]
    """Activations that later calls may read."""
    tensors: tuple[Tensor, ...]
    """Every tensor that an op or the interface names."""
    ops: tuple[Op, ...]
    """In issue order: an op reads only inputs, parameters, states and outputs of earlier ops."""
    _index: Mapping[str, Tensor] = field(init=False, repr=False, compare=False)
    _parameters: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    _dims: tuple[Dim, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name, "block")
        object.__setattr__(self, "_index", {t.name: t for t in self.tensors})
        object.__setattr__(self, "_parameters", tuple(t for t in self.tensors if t.kind == "parameter"))
        object.__setattr__(self, "_dims", tuple(dict.fromkeys(atom for t in self.tensors for atom in t.atoms)))
        # the same in every process, because blocks are sent between them
        told = f"{self.name} {len(self.ops)} {' '.join(map(str, self.tensors))}"
        object.__setattr__(self, "_hash", crc32(told.encode()))
        if len(self._index) != len(self.tensors):
            names = [t.name for t in self.tensors]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise GraphError(f"block {self.name!r} declares tensors twice: {', '.join(twice)}")
        self._check_dims()
        self._check_flow()
        for op in self.ops:
            _check_op(self, op)

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; GraphError with the nearest names otherwise."""
        tensor = self._index.get(name)
        if tensor is None:
            raise GraphError(f"block {self.name!r} has no tensor {name!r}{nearest(name, self._index)}")
        return tensor

    def op(self, path: str) -> Op:
        """The op at that path; GraphError with the nearest paths otherwise."""
        for op in self.ops:
            if op.path == path:
                return op
        raise GraphError(f"block {self.name!r} has no op {path!r}{nearest(path, [o.path for o in self.ops])}")

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The parameters, in order of declaration."""
        return self._parameters

    @property
    def frozen(self) -> tuple[Tensor, ...]:
        """Weights that are read and not trained: states of the job that are no integers (positions are)."""
        states = (t for t in self.tensors if t.kind == "state" and t.lifetime == "job")
        return tuple(t for t in states if t.is_float)

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """Buffers of integers and truth values that a captured module reads. Other graphs' positions are no buffers."""
        if not any(op.captured is not None for op in self.ops):
            return ()
        states = (t for t in self.tensors if t.kind == "state" and t.lifetime == "job")
        return tuple(t for t in states if not t.is_float)

    @property
    def dims(self) -> tuple[Dim, ...]:
        """Every dim that is not a product, once, in order of first use."""
        return self._dims

    def __hash__(self) -> int:  # blocks are part of every key of a memo
        return self._hash

    def _check_dims(self) -> None:
        seen: dict[str, tuple[Dim, str]] = {}
        for tensor in self.tensors:
            for dim in (*tensor.dims, *tensor.atoms):
                first, where = seen.setdefault(dim.name, (dim, tensor.name))
                if first != dim:
                    raise GraphError(
                        f"{self.name}: dim {dim.name!r} is {dim} in tensor {tensor.name!r} but {first} in {where!r}; "
                        f"give one of them another name"
                    )

    def _check_flow(self) -> None:
        for name in (*self.inputs, *self.outputs):
            if self.tensor(name).kind == "parameter":
                raise GraphError(f"{self.name}: parameter {name!r} is listed as an input or output")
        ready = set(self.inputs) | {t.name for t in self.tensors if t.kind != "activation"}
        paths: set[str] = set()
        for op in self.ops:
            where = f"{self.name}/{op.path}"
            if op.path in paths:
                raise GraphError(f"{where}: two ops have this path")
            paths.add(op.path)
            for name in op.inputs:
                if self.tensor(name).name not in ready:
                    raise GraphError(f"{where}: reads {name!r} before an op writes it (or in a cycle)")
            for name in op.outputs:
                if name in ready:
                    raise GraphError(f"{where}: writes {name!r}, which is an input or already written")
                if self.tensor(name).kind == "parameter":
                    raise GraphError(f"{where}: writes parameter {name!r}")
                ready.add(name)
        for name in self.outputs:
            if name not in ready:
                raise GraphError(f"{self.name}: output {name!r} is written by no op")


def _check_op(block: Block, op: Op) -> None:
    """Dims of one op: contractions to the letter; elementwise kinds broadcast into the first input."""
    where = f"{block.name}/{op.path}"
    if op.kind in ("linear", "grouped_linear", "matmul"):
        _check_contraction(block, op, where)
    elif op.kind == "attention":
        _check_attention(block, op, where)
    elif op.kind in ("embedding", "cross_entropy", "dispatch", "conv2d"):
        _check_lookup(block, op, where)
    elif op.kind in ("add", "mul", "glu", "activation", "norm", "softmax", "dropout", "softcap", "cast"):
        left, out = block.tensor(op.inputs[0]), block.tensor(op.outputs[0])
        if left.dims != out.dims:
            raise GraphError(f"{where}: {op.kind} reads {left} but writes {out}; their dims must agree")
        for name in op.inputs[1:]:
            extra = [d.name for d in block.tensor(name).atoms if d not in left.atoms]
            if extra:
                raise GraphError(f"{where}: {block.tensor(name)} has dims {extra} that {left} has not")


def _check_lookup(block: Block, op: Op, where: str) -> None:
    left, right = block.tensor(op.inputs[0]), block.tensor(op.inputs[1])
    out = block.tensor(op.outputs[0])
    match op.kind:
        case "embedding":
            fits = not left.is_float and out.dims == (*left.dims, *right.dims[1:])
        case "cross_entropy":
            fits = not right.is_float and left.dims[:-1] == right.dims
        case "dispatch":
            fits = out.dims == (*right.dims, left.dims[-1])
        case _:
            names = [d.name for d in left.dims]
            fits = op.contracts[0] in names and set(op.contracts) <= {d.name for d in right.dims}
    if not fits:
        raise GraphError(f"{where}: {op.kind} of {left} and {right} cannot write {out}")


def _check_attention(block: Block, op: Op, where: str) -> None:
    q, k, v = (block.tensor(n) for n in op.inputs[:3])
    out = block.tensor(op.outputs[0])
    if min(len(t.dims) for t in (q, k, v)) < 3 or q.dims[-1] != k.dims[-1] or k.dims[:-1] != v.dims[:-1]:
        raise GraphError(
            f"{where}: attention of {q}, {k}, {v}: dims are (…, seq, heads, dim); k and v share the first two"
        )
    if q.dims[:-3] != k.dims[:-3] or out.dims != (*q.dims[:-1], v.dims[-1]):
        raise GraphError(f"{where}: attention of {q}, {k}, {v} cannot write {out}")
    heads, kv_heads = q.dims[-2].size, k.dims[-2].size
    if heads and kv_heads and heads % kv_heads:
        raise GraphError(f"{where}: {heads} query heads are not a multiple of {kv_heads} key heads")


def _check_contraction(block: Block, op: Op, where: str) -> None:
    left, right, out = (block.tensor(n) for n in (op.inputs[0], op.inputs[1], op.outputs[0]))
    for name in op.contracts:
        for side in (left, right):
            if name not in [d.name for d in side.atoms]:
                raise GraphError(f"{where}: contracts {name!r}, which is not a dim of {side}")
    rest = {d.name for d in (*left.atoms, *right.atoms)} - set(op.contracts)
    if op.kind == "grouped_linear":
        rest -= {str(op.attr("groups", "experts"))}  # a row meets the weight of its own expert only
    got = {d.name for d in out.atoms}
    if got != rest:
        raise GraphError(f"{where}: writes {out}, but {left} × {right} over {op.contracts} gives dims {sorted(rest)}")
    if op.kind == "linear" and right.kind == "activation":
        raise GraphError(f"{where}: linear needs a weight, {right.name!r} is {right.kind}; use matmul")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A block placed in the model, `repeat` times in a chain."""

    block: str
    """Name of the block."""
    name: str
    """Unique in the graph, without a dot: `embed`, `layers`, `head`."""
    inputs: tuple[tuple[str, str], ...] = ()
    """(block input, source): a graph input, or `call.tensor`, an output of an earlier call (its last repeat)."""
    repeat: int = 1
    """How many times, each with its own parameters."""
    chain: tuple[tuple[str, str], ...] = ()
    """(block output, block input): what repeat i gives to repeat i+1. Inputs not in it are the same for all repeats."""
    first: int | None = None
    """Index of the first repeat in its family (`layers[3]`); None: not indexed, and then repeat is 1."""
    family: str | None = None
    """Name of the indexed family, for labels (`layers[3]`). None: the call's name."""
    prefix: str | None = None
    """Prefix of parameter names, before the index (`model.layers`). None: the family. Empty: no prefix."""
    params: tuple[tuple[str, str], ...] = ()
    """(block parameter, full parameter name): overrides the default name, for tied weights and shared blocks."""

    def __post_init__(self) -> None:
        check_name(self.name, "call")
        if "." in self.name:
            raise GraphError(f"call {self.name!r} has a dot in its name; sources are written `call.tensor`")
        if not 1 <= self.repeat <= MAX_REPEAT:
            raise GraphError(f"call {self.name!r} repeats {self.repeat} times: at least 1, at most {MAX_REPEAT}")
        if self.repeat > 1 and (self.first is None or not self.chain):
            raise GraphError(f"call {self.name!r} repeats {self.repeat} times: give `first` (its index) and `chain`")

    @property
    def group(self) -> str:
        """The family name: `layers` for every run of `layers[i]`."""
        return self.name if self.family is None else self.family

    def label(self, index: int = 0) -> str:
        """How repeat `index` (from 0) of this call is named for people: `layers[17]`, or `embed`."""
        return self.name if self.first is None else f"{self.group}[{self.first + index}]"

    def parameter_name(self, parameter: str, index: int = 0) -> str:
        """Full name of a block parameter in repeat `index`: `model.layers.17.self_attn.q_proj.weight`."""
        for own, full in self.params:
            if own == parameter:
                return full
        prefix = self.group if self.prefix is None else self.prefix
        parts = [prefix] if prefix else []
        if self.first is not None:
            parts.append(str(self.first + index))
        return ".".join([*parts, parameter])


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One repeat of one call: what a pipeline stage is made of."""

    call: Call
    """The call."""
    index: int
    """Which repeat, from 0."""

    @property
    def label(self) -> str:
        """`layers[17]`, or the call's name."""
        return self.call.label(self.index)


def layers_of(calls: tuple[Call, ...]) -> Iterator[Layer]:
    """The calls with repeats expanded, in order."""
    for call in calls:
        for index in range(call.repeat):
            yield Layer(call=call, index=index)

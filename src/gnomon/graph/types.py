"""The types of a model: Block, Call; `Tensor` and `Op` are in the rooms above, `Graph` in `graph.py`.

A Block is a list of ops over named tensors with typed inputs and outputs: one transformer layer, an embedding, a head.
A Call places a block in a model, `repeat` times in a chain. All values are frozen and check themselves: what is wrong
raises GraphError with the path `block/op`. Leaves out: numbers (`ops.py`), the backward (`backward.py`), layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from zlib import crc32

from gnomon.errors import GraphError, nearest
from gnomon.ops.op import Does, Op
from gnomon.tensors.dims import Dim, check_name
from gnomon.tensors.tensor import Tensor

MAX_REPEAT = 100_000
"""Repeats of a call; more is a mistake, and would only be found after minutes of expanding."""


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
    part_of: Block | None = None
    """The block that it was cut out of, whose other ops say how its tensors lie and what its ops cost."""
    _index: Mapping[str, Tensor] = field(init=False, repr=False, compare=False)
    """Name -> tensor."""
    _parameters: tuple[Tensor, ...] = field(init=False, repr=False, compare=False)
    _dims: tuple[Dim, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name(self.name, "block")
        # The dataclass is frozen, and these follow from its fields: set once here, and left out of comparisons.
        object.__setattr__(self, "_index", {t.name: t for t in self.tensors})
        object.__setattr__(self, "_parameters", tuple(t for t in self.tensors if t.kind == "parameter"))
        object.__setattr__(self, "_dims", tuple(dict.fromkeys(atom for t in self.tensors for atom in t.atoms)))
        # the same in every process, because blocks are sent between them
        signature = f"{self.name} {len(self.ops)} {' '.join(map(str, self.tensors))}"
        object.__setattr__(self, "_hash", crc32(signature.encode()))
        if len(self._index) != len(self.tensors):
            names = [t.name for t in self.tensors]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise GraphError(f"block {self.name!r} declares tensors twice: {', '.join(twice)}")
        self._check_dims()
        self._check_flow()
        for op in self.ops:
            if problem := op.rules.problem(op, self):
                raise GraphError(f"{self.name}/{op.path}: {problem}")

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

    def does(self, what: Does) -> bool:
        """Whether an op of it has this part in a model."""
        return any(op.does == what for op in self.ops)

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
            # A name is one dim within a block: layouts and prices say dims by name.
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
        # Parameters and states are there before the first op.
        ready = set(self.inputs) | {t.name for t in self.tensors if not t.is_activation}
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
        """Returns the family name: `layers` for every run of `layers[i]`."""
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
    label: str = field(init=False, repr=False, compare=False)
    """`layers[17]`, or the call's name: made once, since a search looks layers up by it a million times."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.call.label(self.index))


def layers_of(calls: tuple[Call, ...]) -> Iterator[Layer]:
    """The calls with repeats expanded, in order."""
    for call in calls:
        for index in range(call.repeat):
            yield Layer(call=call, index=index)

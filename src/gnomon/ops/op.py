"""`Op`, one operation of a block, and `OpKind`, all that is known of a kind of them; the folder is the registry.

A file of this folder is a family and holds its `OpKind` values under `KINDS`; `find` gives one by name, `every` all. No
field has a default: it is a rule, or the word that says that there is nothing. Rules are pure functions of an op and of
the tensors around it. Leaves out seconds (`prices`, which reads the curve that a kind names) and torch (functions are
found by name where torch is).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from gnomon.errors import GraphError, nearest
from gnomon.late import load_late
from gnomon.ops.curve import Curve
from gnomon.ops.kernels import Kernels
from gnomon.ops.strategy import Division, Strategy
from gnomon.ops.work import GradOp, Setting, Work
from gnomon.tensors.captured import Node
from gnomon.tensors.tensor import Tensor
from gnomon.tensors.tensor import Tensors as Tensors

AttrValue: TypeAlias = "bool | int | float | str | tuple[int, ...]"


def attrs(**values: AttrValue) -> tuple[tuple[str, AttrValue], ...]:
    """Attributes of an op as a hashable, sorted tuple of pairs."""
    return tuple(sorted(values.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What an op computes, as PyTorch ran it: for `opaque` ops, and for views of a captured model (`reshape`)."""

    nodes: tuple[Node, ...]
    """ATen ops in order."""
    tensors: tuple[Tensor, ...] = ()
    """What the nodes write besides the op's outputs, named `path:0` and on."""
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
    """One operation of a block, by kind; `rules` is what its kind says of dims, FLOPs, bytes, backward, sharding …"""

    kind: str
    """The name of an `OpKind` of this folder."""
    path: str
    """Unique within the block; like the module path of the public implementation (`self_attn.q_proj`)."""
    inputs: tuple[str, ...]
    """Tensor names; the order is the kind's (activation first, then weight, then bias)."""
    outputs: tuple[str, ...]
    """Tensor names; each tensor is written by one op."""
    contracts: tuple[str, ...] = ()
    """Names of the dims summed over, for kinds that multiply and add; each is in both of the first two inputs."""
    attrs: tuple[tuple[str, AttrValue], ...] = ()
    """Sorted pairs, made by `attrs(...)`; what each kind reads is said in its `signature`."""
    captured: Captured | None = None
    """The ATen ops, of an op that was captured and has no rule of its own."""

    @property
    def is_opaque(self) -> bool:
        """Whether it has no rule of its own, and nobody says what it costs."""
        return self.rules.runs == "captured" and self.captured is not None and not self.captured.is_priced

    def __post_init__(self) -> None:
        rules = find(self.kind, f"op {self.path!r} has")
        if not self.outputs:
            raise GraphError(f"op {self.path!r} has no outputs")
        if rules.contracts != bool(self.contracts):
            rule = "name the contracted dims" if rules.contracts else "leave contracts empty"
            raise GraphError(f"op {self.path!r} ({self.kind}) has contracts={self.contracts}: {rule}")
        if rules.runs == "captured" and self.captured is None:
            raise GraphError(f"op {self.path!r} is {self.kind}: give its ATen ops, as `captured`")
        if self.attrs != tuple(sorted(self.attrs)):
            raise GraphError(f"op {self.path!r} has unsorted attrs: make them with attrs(...)")

    @property
    def rules(self) -> OpKind:
        """What its kind says."""
        return find(self.kind)

    @property
    def does(self) -> Does:
        """Its part in a model."""
        return find(self.kind).does

    @property
    def is_dense_linear(self) -> bool:
        """Whether it multiplies tokens by a whole matrix, which the engine does itself, so that what replaces the
        matrix (a kernel of few bits, an adapter, several side by side) can replace the op."""
        return self.does == "multiplies" and self.rules.torch == "engine"

    @property
    def stops_gradients(self) -> bool:
        """Whether nothing that it writes gets a gradient."""
        return bool(self.attr("no_grad", False)) or self.rules.gradient == "none"

    def attr(self, name: str, default: AttrValue) -> AttrValue:
        """The attribute `name`, or `default` when the op does not carry it."""
        return next((value for key, value in self.attrs if key == name), default)


Problem: TypeAlias = str | None
"""What is wrong with the tensors of an op, in words; None for nothing."""

Decay: TypeAlias = "tuple[int, ...] | Literal['none', 'matrices']"
"""Places among an op's inputs. `none`: no parameter that it reads; `matrices`: those of two dims and more."""


class Steps:
    """A block that grows as its ops are written in the ops that kernels run. A kind's `steps` rule adds to it: the op
    itself with what its kernel writes aside (masks, statistics), named `path:what`, or several ops."""

    def __init__(self, name: str, block: Tensors, tensors: Collection[Tensor], weighted: Collection[str]) -> None:
        """name: of the block. weighted: paths of the activations whose rows get their experts' weights."""
        self.name, self.block, self.weighted = name, block, weighted
        self.tensors = list(tensors)
        self.ops: list[Op] = []

    def emit(self, op: Op, *side: Tensor) -> None:
        """The op itself, with side outputs."""
        self.tensors += side
        self.ops.append(replace(op, outputs=(*op.outputs, *(t.name for t in side))))

    def step(self, parent: Op, what: str, kind: str, inputs: tuple[str, ...], like: Tensor, **rest: object) -> str:
        """One op of an expansion; writes a new tensor `path:what` with the dims and dtype of `like`."""
        out = Tensor(name=f"{parent.path}:{what}", dims=like.dims, dtype=like.dtype)
        self.tensors.append(out)
        self.ops.append(Op(kind=kind, path=out.name, inputs=inputs, outputs=(out.name,), **rest))  # type: ignore[arg-type]
        return out.name


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCall:
    """A call of the torch API that is one op of a kind."""

    function: str
    """Its name in the API (`clamp`), or `namespace::name` of a custom op."""
    operands: tuple[str, ...]
    """Names of the arguments that are tensors, which come first, in the order of the kind's inputs."""
    numbers: tuple[str, ...]
    """Names of the arguments after them, which become attributes; one that is None becomes none."""
    axes: tuple[str, ...] | Literal["alike", "a linear's"]
    """Names of the dims of each operand and of the result, `batch queries heads head_dim`: what has one name is one
    axis. alike: all have those of the result. a linear's: x (…, in), weight (out, in), result (…, out)."""


class RuledCall(NamedTuple):
    """A call of the torch API that is one op of a kind if a rule says so, which looks at more than names."""

    function: str
    """Its name in the API (`addmm`)."""
    rule: str
    """The function of `frontend.call_rules` that reads it, loaded when it is first asked."""


Does: TypeAlias = Literal[
    "multiplies",  # tokens by a weight
    "multiplies rows",  # of experts, by the weights of these
    "multiplies activations",
    "convolves",
    "attends",
    "attends blocks",  # of cached keys
    "weighs",  # a softmax
    "scans",  # carries a state along a sequence
    "rotates",  # by positions
    "measures distance",  # of positions
    "normalises",
    "looks up",  # rows of a table by ids
    "compares labels",  # a loss of classes
    "compares",  # a loss of numbers
    "balances",  # a loss of how experts are loaded
    "counts the step",  # choices of experts, of all ranks and the microbatches so far
    "routes",  # chooses experts
    "dispatches",  # makes a row of each token for each of its experts
    "combines",  # adds these rows up
    "gates",
    "adds",
    "scales",  # by a constant or a learned vector
    "caps",  # softly
    "drops",  # elements, at random
    "computes",  # anything else
]


Zeros: TypeAlias = Literal[
    "in place",  # where its operand is: the same numbers in the same order, or fewer of them
    "by names",  # the same numbers, laid by the names of their dims
    "cut",  # the same numbers, in parts
    "joined",  # the same numbers, one part after the other
    "all",  # where all operands are at that place
    "either",  # where either operand is at that place
    "of the matrix",  # where it meets zeros of the second operand alone, if there is no bias
    "of the weight",  # where the second operand is, or without a mean the first
    "of the table",  # where a column of the second operand is
    "of the values",  # where the third operand is, for each head of it
    "unknown",  # nothing is said, so that everything counts
]


UNSAID: Any = "unsaid"
"""What a field of a base value is that each kind must say for itself (`bases`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """All that is known of one kind of op."""

    name: str
    """As `Op.kind` says it."""
    signature: str
    """Inputs, outputs and attributes, for people."""
    contracts: bool
    """Whether it multiplies and adds over `Op.contracts`; the second input is then the weight (or right operand)."""
    dims: Callable[[Op, Tensors], Problem] | Literal["open"]
    """What is wrong with an op's tensors. `open`: its dims are those that were captured, whatever they are."""
    memory: Literal["own", "view", "part", "cast"]
    """Of what it writes. own: its own. view: that of its first input, so that no bytes move, and what keeps an output
    keeps the whole input. part: a part of that. cast: that of its first input where both dtypes resolve to the same."""
    saves: Callable[[Op, Tensors, Collection[str]], tuple[str, ...]] | Literal["nothing"]
    """Names of the tensors that its backward reads, parameters included, given the tensors that want a gradient; as
    PyTorch's own formulas keep them."""
    forward: Callable[[Op, Tensors, Setting], Work]
    """FLOPs and bytes of running a lowered op once."""
    backward: Callable[[Op, Tensors, Setting, GradOp], Work] | Literal["no gradient"]
    """The same of a step of its backward; `no gradient`: it has none, as `gradient` says."""
    steps: Callable[[Op, Steps, Kernels], None] | Literal["one kernel"]
    """The ops that kernels run in its place, for a program's choices."""
    fused_by: Literal["every stack", "attention", "norm", "glu", "cross_entropy", "expert_weights", "scan_recomputed"]
    """The choice of `Kernels`, made by a stack's record, which says whether it runs as one kernel and what that writes
    aside."""
    weight_grad: Literal["apart", "together"]
    """apart: the gradient of its parameters is a step of its own, which a schedule can delay."""
    ungraded: tuple[int, ...]
    """Places of inputs that get no gradient although they are parameters."""
    decay: Decay
    """Inputs whose parameters take weight decay, as recipes of the field have it: matrices and tables do, biases and
    weights of norms do not."""
    price: Callable[[Op], Curve] | Curve
    """What its forward is priced by."""
    grad_price: Callable[[Op, GradOp], Curve] | Curve
    """What a step of its backward is priced by."""
    calibrated: Literal["rows read", "rows written", "elements", "elements, forward", "no"]
    """What `gnomon calibrate` measures of it by itself: over rows and width of what it reads or writes, or over all
    elements, of which `forward` has no table for the backward. no: it is priced by the bytes it moves."""
    begins: Literal["random", "ones", "zeros"]
    """What its second input, where that is a parameter, holds before training."""
    weight_sum: Literal["in place", "apart"]
    """Whether the runtime adds gradients of its parameters up where they stay, or makes each first."""
    gradient: Literal["computed", "passed on", "none"]
    """passed on: the gradients of its operands are that of its result, or views of it. none: nothing that it writes
    gets a gradient."""
    strategies: Callable[[Op, Division, Strategy], tuple[Strategy, ...]] | Literal["plain"]
    """The ways to run it on divided tensors, the layout's own choice first, given the plain one (`divided`). PlanError
    where none is known."""
    sums: bool
    """Whether its outputs are sums over a dim of its inputs, partial ones where an axis divides that (a masked lookup
    is a sum over the vocabulary)."""
    together: tuple[str, ...]
    """Base names of dims that are divided together (query and key heads); empty: each by itself."""
    does: Does
    """Its part in a model, which others ask for in place of its name."""
    served: Literal["apart", "kernel", "kernel a block", "bytes", "free"]
    """What it costs in an inference engine's passes over activations. apart: it has a price of its own (matmuls,
    attention, scans, lookups, heads). kernel: a kernel that reads its inputs and writes its outputs. kernel a block:
    all of a block are one kernel (rotary of q and k). bytes: its bytes move in the kernel of a neighbour (a sum with
    the residual in the norm that follows). free: nothing runs (views, what only training has)."""
    calls: tuple[TorchCall | RuledCall, ...] | Literal["none"]
    """Calls of the torch API that are captured as this kind; none: no call is."""
    documents: bool
    """Whether its torch function is told where documents begin in a packed row."""
    zeros: Callable[[Op], Zeros] | Zeros
    """Where its result is zero, of where its operands are."""
    torch: str
    """How the runtime runs it: `file:function` of `runtime.ops`, loaded when it is first used. `engine`: a method of
    the engine, which wants more than the operands. `lowered`: it does not, such ops are steps of others as kernels
    run them. `captured`: as ATen ops."""

    @property
    def runs(self) -> str:
        """`function`, or `engine`, `lowered`, `captured` as `torch` says."""
        return "function" if ":" in self.torch else self.torch

    def problem(self, op: Op, block: Tensors) -> Problem:
        """What is wrong with the tensors of an op of this kind."""
        return None if self.dims == "open" else self.dims(op, block)

    def saved(self, op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
        """Names of the tensors that the backward of a lowered op reads."""
        return () if self.saves == "nothing" else self.saves(op, block, needs_grad)

    def backward_work(self, op: Op, block: Tensors, setting: Setting, grad: GradOp) -> Work:
        """FLOPs and bytes of a step of its backward."""
        assert self.backward != "no gradient", f"nothing asks for a gradient through {op.path!r}, a {self.name}"
        return self.backward(op, block, setting, grad)

    def lower(self, op: Op, low: Steps, kernels: Kernels) -> None:
        """Add an op of this kind as kernels run it."""
        if self.steps == "one kernel":
            low.ops.append(op)
        else:
            self.steps(op, low, kernels)

    def curve(self, op: Op) -> Curve:
        """What the forward of an op is priced by."""
        return self.price(op) if callable(self.price) else self.price

    def grad_curve(self, op: Op, grad: GradOp) -> Curve:
        """What a step of its backward is priced by."""
        return self.grad_price(op, grad) if callable(self.grad_price) else self.grad_price

    def zeros_of(self, op: Op) -> Zeros:
        """Says where the result of an op is zero."""
        return self.zeros(op) if callable(self.zeros) else self.zeros

    @property
    def is_view(self) -> bool:
        """Whether no bytes move."""
        return self.memory in ("view", "part")


_NO_FAMILY = frozenset({"__init__", "op", "rules", "work", "kernels", "curve", "strategy", "divided", "bases"})
"""Files of the folder that hold no kinds."""


@cache
def _kinds() -> MappingProxyType[str, OpKind]:
    """Name -> kind, of all files of the folder."""
    # Sorted: a folder lists its files in an order of its own, and what follows from the registry must not depend on it.
    stems = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    found: dict[str, OpKind] = {}
    for stem in stems:
        if stem in _NO_FAMILY:
            continue
        family: tuple[OpKind, ...] = load_late(f"gnomon.ops.{stem}:KINDS")
        for kind in family:
            assert kind.name not in found, f"two files of ops/ hold a kind {kind.name!r}"
            unsaid = [field.name for field in fields(kind) if getattr(kind, field.name) is UNSAID]
            assert not unsaid, f"op kind {kind.name!r} of ops/{stem}.py does not say its {', '.join(unsaid)}"
            found[kind.name] = kind
    return MappingProxyType(found)


def find(name: str, where: str = "there is an") -> OpKind:
    """The kind of a name. GraphError with the nearest names for one that there is not, opened by `asked`."""
    kind = _kinds().get(name)
    if kind is None:
        raise GraphError(f"{where} unknown kind {name!r}{nearest(name, _kinds())}")
    return kind


def every() -> tuple[OpKind, ...]:
    """All kinds, by family."""
    return tuple(_kinds().values())

"""What a captured layer holds from moment to moment: its ATen ops one after the other, and then their gradients.

`forward(...)` and `backward(...)` follow storages as autograd and the runtime do: a tensor that nobody keeps goes after
the op that reads it last, what backward has read for the last time goes then, and a gradient is there from the op that
makes it to the one that takes it. Two gradients of a tensor are added into a third. Leaves out what kernels allocate
inside, and layers of kinds alone, whose memory is `layer_memory`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from gnomon.graph import BackwardBlock, Block, Op, Tensor
from gnomon.prediction.numbers import larger
from gnomon.tensors.captured import mutates, reads

PASSED_ON = frozenset(
    "view _unsafe_view reshape t transpose permute unsqueeze squeeze alias clone add sum lift_fresh".split()
)
"""ATen ops whose operands' gradients are the result's, or views of it."""
PADDED = frozenset("slice select unbind split split_with_sizes as_strided unfold diagonal".split())
"""Views whose operand's gradient is a tensor of its size, mostly zeros."""
ON_THE_WAY = {"pow": 2, "rsqrt": 2, "logsumexp": 2, "cos": 2, "sin": 1, "abs": 1, "sqrt": 1, "var": 1, "std": 1,
              "index": 1, "gather": 1}  # fmt: skip
"""ATen op -> tensors of the operand's size that its backward makes and lets go, as torch's formulas are written (tools/
autograd/derivatives.yaml, FunctionsManual.cpp): grad * (2 * x.pow(1)) has two."""
SPREAD = frozenset("mul div add sub where maximum minimum pow".split())
"""ATen ops that broadcast: a gradient is of the result's size before it is added up to the operand's."""


@dataclass(frozen=True, slots=True)
class MomentOp:
    """One ATen op of a captured op, or an op of a kind."""

    name: str
    """Name of the ATen op, without its overload, or of the op's kind."""
    inputs: tuple[str, ...]
    """Names of the tensors that it reads."""
    outputs: tuple[str, ...]
    """Names of the tensors that it writes."""
    view: bool
    """Whether its results look into the memory of its first input."""
    passes: bool
    """Whether the gradients of its operands are that of its result, or views of it."""
    place: int
    """The index of its op in the block."""
    op: Op
    """The op of the block that it is a part of."""


def pieces_of(block: Block) -> list[MomentOp]:
    """Lists the pieces of a lowered block, in order."""
    found = []
    for place, op in enumerate(block.ops):
        if op.captured is None:
            view = op.rules.is_view
            found.append(MomentOp(op.kind, op.inputs, op.outputs, view, op.rules.gradient == "passed on", place, op))
            continue
        for node in op.captured.nodes:
            name, outputs = node.target.split(".")[1], tuple(filter(None, node.outputs))
            # In-place ops of ATen end in an underscore (`add_`); their gradients are those of the plain op.
            name = name if name.startswith("_") else name.rstrip("_")
            # The gradient of a view's operand is a view of the result's, unless the two differ in size.
            passes = name in PASSED_ON or (node.view and name not in PADDED | {"expand"})
            found.append(MomentOp(name, reads(node), outputs, node.view or mutates(node), passes, place, op))
    return found


class Moments:
    """What one layer holds from moment to moment."""

    def __init__(self, back: BackwardBlock, roots: Mapping[str, str], bytes_of: Callable[[Tensor, Op], Any]) -> None:
        """Takes bytes_of, the bytes of a tensor of the block or inside one of its ops, and roots, tensor -> whose
        storage it looks into, of the block's own views."""
        self.back, self.block, self.pieces = back, back.forward, pieces_of(back.forward)
        self.tensors = {t.name: t for t in self.block.tensors}
        self.sizes: dict[str, Any] = {}
        self.roots = dict(roots)
        for piece in self.pieces:
            inner = {} if piece.op.captured is None else {t.name: t for t in piece.op.captured.tensors}
            for name in (*piece.inputs, *piece.outputs):
                if name not in self.sizes:
                    tensor = self.tensors.setdefault(name, inner.get(name))  # type: ignore[arg-type]
                    self.sizes[name] = bytes_of(tensor, piece.op)
            if piece.view and piece.inputs:
                self.roots.update((out, self.root(piece.inputs[0])) for out in piece.outputs)

    def root(self, name: str) -> str:
        return self.roots.get(name, name)

    def forward(self, saved_names: Collection[str]) -> Any:
        """Most bytes during the forward, its inputs counted. saved_names: what stays for backward."""
        stay = {self.root(name) for name in (*saved_names, *self.block.inputs, *self.block.outputs)}
        # last: place of the op that touches a storage for the last time.
        last = {self.root(name): p.place for p in self.pieces for name in (*p.inputs, *p.outputs)}
        goes: dict[int, list[str]] = {}
        alive = {self.root(n): self._size(n) for n in self.block.inputs if n in self.sizes}
        now: Any = sum(alive.values())
        most = now
        for i, piece in enumerate(self.pieces):
            for name in piece.outputs:
                root = self.root(name)
                if root == name and root not in alive:
                    alive[root] = self.sizes[root]
                    now = now + alive[root]
                    if root not in stay:
                        goes.setdefault(last[root], []).append(root)
            most = larger(most, now)
            # Storages go when the whole op (all its ATen nodes) is done.
            if i + 1 == len(self.pieces) or self.pieces[i + 1].place != piece.place:
                for root in goes.pop(piece.place, ()):
                    now = now - alive[root]
        return most

    def _size(self, name: str) -> Any:
        return self.sizes.get(self.root(name), self.sizes.get(name, 0))

    # --- backward

    def backward(self) -> tuple[Any, Any]:
        """Returns (most bytes of gradients until the first of a parameter is made, from then on), less what the
        backward has let go of the tensors that the layer keeps."""
        run = _Backward(self)
        for i in reversed(range(len(self.pieces))):
            run.piece(i)
        return run.early, run.late

    def with_gradient(self) -> set[str]:
        """Tensors that have a gradient, inside captured ops too."""
        found = {name for grad in self.back.ops for name in (*grad.grads_in, *grad.grads_out)}
        for piece in self.pieces:
            if piece.op.captured is None or piece.op.attr("no_grad", False) or piece.name == "detach":
                continue
            if any(name in found for name in piece.inputs):
                found |= {n for n in piece.outputs if self.tensors[n].is_float and n not in piece.op.outputs}
        return found

    def read_last(self, need_grad: Collection[str]) -> dict[int, list[str]]:
        """Maps the place of a piece to the kept storages that the backward reads there for the last time. A layer's
        input goes with the layer that made it."""
        inputs = {self.root(name) for name in self.block.inputs}
        saved_roots = {self.root(entry.tensor.name) for entry in self.back.saved} - inputs
        first: dict[str, int] = {}
        for i, piece in enumerate(self.pieces):
            if piece.op.captured is None:
                near: tuple[str, ...] = piece.op.rules.saved(piece.op, self.block, need_grad)
            else:
                keeps = {self.root(name) for name in piece.op.captured.keeps}
                near = tuple(n for n in (*piece.inputs, *piece.outputs) if self.root(n) in keeps)
            for name in near:
                if (root := self.root(name)) in saved_roots:
                    # Pieces are walked forward, so the first that saves a storage is the last to read it in backward.
                    first.setdefault(root, i)
        goes: dict[int, list[str]] = {}
        for root, i in first.items():
            goes.setdefault(i, []).append(root)
        return goes


class _Backward:
    """The state of a backward: gradients that are there, by tensor; several tensors may share one."""

    def __init__(self, of: Moments) -> None:
        self.of, self.need_grad = of, of.with_gradient()
        self.goes = of.read_last(self.need_grad)
        self.grads: dict[str, int] = {}
        self.size: dict[int, Any] = {}
        self.readers: dict[int, int] = {}
        self.count = 0
        self.now: Any = 0
        self.early: Any = 0
        self.late: Any = 0
        # begun: a gradient of a parameter has been made, so its buffer is there.
        self.begun = False
        for name in of.block.outputs:
            if name in self.need_grad:
                self._give(name, self._new(of.sizes.get(name, 0)))
        self._seen(0)

    def _seen(self, extra_bytes: Any) -> None:
        if self.begun:
            self.late = larger(self.late, self.now + extra_bytes)
        else:
            self.early = larger(self.early, self.now + extra_bytes)

    def _new(self, size: Any) -> int:
        self.count += 1
        self.size[self.count], self.readers[self.count] = size, 0
        self.now = self.now + size
        return self.count

    def _give(self, name: str, grad: int) -> None:
        self.grads[name] = grad
        self.readers[grad] += 1

    def _drop(self, name: str) -> None:
        grad = self.grads.pop(name)
        self.readers[grad] -= 1
        if not self.readers[grad]:
            self.now = self.now - self.size[grad]

    def piece(self, i: int) -> None:
        """Goes back through one of the layer's pieces."""
        piece = self.of.pieces[i]
        came = [name for name in piece.outputs if name in self.grads]
        targets = [n for n in dict.fromkeys(piece.inputs) if n in self.need_grad and n not in piece.outputs]
        gradients: list[tuple[str, int]] = []
        if came and targets:
            gradients = self._gradients(piece, came, targets)
        for name in came:
            self._drop(name)
        # What the piece kept is read until its gradients are made; only then does it go.
        for root in self.goes.get(i, ()):
            self.now = self.now - self.of.sizes[root]
        for name, grad in gradients:
            self._arrives(piece, name, grad)

    def _gradients(self, piece: MomentOp, came: list[str], targets: list[str]) -> list[tuple[str, int]]:
        """A gradient for each target, with what is there on the way."""
        sizes, first = self.of.sizes, self.grads[came[0]]
        if any(self._is_parameter(n) for n in targets):
            self.begun = True
        cast = piece.op.rules.memory == "cast" and self.of.root(came[0]) == self.of.root(piece.inputs[0])
        # The result's gradient is passed on, whole, or as a new tensor where sizes differ.
        if len(came) == 1 and (piece.passes or cast):
            gradients = []
            for name in targets:
                whole = piece.name == "sum" or self._same(sizes[name], sizes[came[0]])
                gradients.append((name, first if whole else self._new(sizes[name])))
            self._seen(0)
            return self._hold(gradients)
        spread = 0
        result = sum(sizes[name] for name in came)
        gradients = []
        for name in targets:
            if self._is_parameter(name) and piece.op.rules.weight_sum == "in place":
                continue
            gradients.append((name, self._new(sizes[name])))
            # A broadcast operand's gradient is of the result's size before it is summed.
            if piece.name in SPREAD and not self._same(sizes[name], result):
                spread = spread + result
            spread = spread + ON_THE_WAY.get(piece.name, 0) * sizes[name]
        self._seen(spread)
        return self._hold(gradients)

    def _hold(self, gradients: list[tuple[str, int]]) -> list[tuple[str, int]]:
        """Holds gradients while they are handed on."""
        # The result's gradient is dropped before its operands have theirs (`piece`); one that is passed on must outlive
        # that.
        for _, grad in gradients:
            self.readers[grad] += 1
        return gradients

    @staticmethod
    def _same(a: Any, b: Any) -> bool:
        same = a == b
        return bool(same.all()) if hasattr(same, "all") else bool(same)

    def _is_parameter(self, name: str) -> bool:
        return self.of.tensors[name].kind == "parameter"

    def _arrives(self, piece: MomentOp, name: str, grad: int) -> None:
        """A gradient arrives at a tensor, which may have one already, or be a parameter, where it is added up and
        goes."""
        if not self._is_parameter(name):
            if name in self.grads:
                # Autograd adds two gradients into a third: for a moment all three are there.
                total = self._new(self.of.sizes[name])
                self._seen(0)
                self._drop(name)
                self._give(name, total)
            else:
                self._give(name, grad)
        self.readers[grad] -= 1
        if not self.readers[grad]:
            self.now = self.now - self.size[grad]

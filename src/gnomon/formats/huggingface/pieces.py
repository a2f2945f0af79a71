"""Parts of tensors of a folder in Hugging Face's layout that fill a parameter of the Graph, and rules that list them.

A `Rule` takes the name that a file has and a `Parameter`, and returns its `TensorPiece`s: the whole tensor, a
transposed one, rows of a joined one, one tensor for each expert, groups of a Mamba-2 mixer. Leaves out which rule is
for which model (`weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gnomon.errors import FormatError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPiece:
    """Part of a file's tensor that fills a range of a parameter's first dim, and all of its others."""

    tensor: str
    """In the folder."""
    shape: Shape
    """That the whole tensor has there."""
    view: Shape
    """The same elements with dims taken apart, so that the parameter's are among them."""
    pick: tuple[tuple[int, int], ...] = ()
    """Range of each dim of the view; (): all of it. A range of one is dropped where `order` leaves it out."""
    order: tuple[int, ...] = ()
    """Dims of the view in the order of the parameter's; (): as they are."""
    first: int = 0
    """Where in the parameter's first dim it begins."""

    @property
    def dims(self) -> Shape:
        """Sizes of the part, in the parameter's order."""
        picked = self.pick or tuple((0, n) for n in self.view)
        return tuple(picked[i][1] - picked[i][0] for i in (self.order or range(len(self.view))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """What is known of one parameter before its model type is asked."""

    name: str
    """In the Graph."""
    atoms: Shape
    """Its dims with products taken apart, as the runtime stores it."""
    shape: Shape
    """That a PyTorch module would give it: out dims joined, in dims joined."""
    rows: int
    """How many of `atoms` are out dims of a matrix; 0 for others."""


Rule = Callable[[str, Parameter], Sequence[TensorPiece]]
"""(name that the file has for it, parameter) -> its pieces."""


def whole(name: str, p: Parameter) -> list[TensorPiece]:
    """Takes the tensor itself, whole."""
    return [TensorPiece(tensor=name, shape=p.shape, view=p.atoms)]


def transposed(name: str, p: Parameter) -> list[TensorPiece]:
    """(in, out), as GPT-2's Conv1D has it."""
    if not p.rows:
        return whole(name, p)
    # The parameter is (out, in), the file's tensor (in, out), each of several dims: the view has the file's order, and
    # `order` brings the out dims to the front.
    out, inner = p.atoms[: p.rows], p.atoms[p.rows :]
    order = (*range(len(inner), len(p.atoms)), *range(len(inner)))
    return [TensorPiece(tensor=name, shape=p.shape[::-1], view=(*inner, *out), order=order)]


def expert_each(name: str, p: Parameter) -> list[TensorPiece]:
    """A tensor for each expert, whose number stands after `experts`."""
    head, _, tail = name.partition(".experts.")
    return [
        TensorPiece(tensor=f"{head}.experts.{e}.{tail}", shape=p.shape[1:], view=(1, *p.atoms[1:]), first=e)
        for e in range(p.atoms[0])
    ]


def part(begin: int, rows: int) -> Rule:
    """Rows from `begin` on of a tensor that has `rows` of them (out elements)."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        # Rows of a matrix count out elements, the first dim of `atoms` heads or the like: one of them is `step` rows.
        step = prod(p.atoms[1 : p.rows or len(p.atoms)])
        view = (rows // step, *p.atoms[1:])
        pick = ((begin // step, begin // step + p.atoms[0]), *((0, n) for n in view[1:]))
        return [TensorPiece(tensor=name, shape=(rows, *p.shape[1:]), view=view, pick=pick)]

    return make


def alternating(index: int) -> Rule:
    """Takes a part of experts (experts, in, 2 × out) in one tensor, gate and up in turns: 0 is the gate (GPT-OSS)."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        if len(p.atoms) == 2:  # a bias
            experts, out = p.atoms
            pick = ((0, experts), (0, out), (index, index + 1))
            return [TensorPiece(tensor=name, shape=(experts, 2 * out), view=(experts, out, 2), pick=pick, order=(0, 1))]
        # Columns of the file are gate 0, up 0, gate 1, up 1 …: as (out, 2) the last dim says which, and a range of one
        # picks it.
        experts, out, inner = p.atoms
        shape, view = (experts, inner, 2 * out), (experts, inner, out, 2)
        ranges = ((0, experts), (0, inner), (0, out), (index, index + 1))
        return [TensorPiece(tensor=name, shape=shape, view=view, pick=ranges, order=(0, 2, 1))]

    return make


def experts_transposed(name: str, p: Parameter) -> list[TensorPiece]:
    """(experts, in, out) in one tensor."""
    experts, out, inner = p.atoms
    return [TensorPiece(tensor=name, shape=(experts, inner, out), view=(experts, inner, out), order=(0, 2, 1))]


def exactly(name: str, p: Parameter) -> list[TensorPiece]:
    """Takes the tensor with every dim of its own, as a convolution's kernel."""
    return [TensorPiece(tensor=name, shape=p.atoms, view=p.atoms)]


def led(*ones: int) -> Rule:
    """Takes the tensor with dims of 1 before its own, as parameters that are added to a batch."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        return [TensorPiece(tensor=name, shape=(*ones, *p.shape), view=p.atoms)]

    return make


def of_each_head(index: int) -> Rule:
    """Takes a part of q, k and v that stand side by side in every head (BLOOM)."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        # Rows of the file are (head, q k v, width): each head has its three side by side.
        heads, width, *inner = p.atoms
        view = (heads, 3, width, *inner)
        pick = ((0, heads), (index, index + 1), *((0, n) for n in view[2:]))
        order = (0, *range(2, len(view)))
        return [TensorPiece(tensor=name, shape=(3 * p.shape[0], *p.shape[1:]), view=view, pick=pick, order=order)]

    return make


def of_each_group(names: str, theirs: str) -> Callable[[Mapping[str, Parameter]], dict[str, tuple[str, Rule]]]:
    """q, k and v in one tensor by groups of queries that share a key: the group's queries, its key, its value (Falcon,
    GPT-BigCode). One key for all, and one for each query, are groups too. names: of ours, q k v."""

    def rules(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
        piece_rules: dict[str, tuple[str, Rule]] = {}
        q, k, v = names.split()
        for name in parameters:
            head, found, tail = name.rpartition(f".{k}.")
            if found:
                # Query heads that share a key. In the file a group has so many heads of q, then one of k and one of v:
                # group + 2 heads.
                group = parameters[f"{head}.{q}.{tail}"].atoms[0] // parameters[name].atoms[0]
                for part, begin, count in ((q, 0, group), (k, group, 1), (v, group + 1, 1)):
                    piece_rules[f"{head}.{part}.{tail}"] = f"{head}.{theirs}.{tail}", _in_group(begin, count, group + 2)
        return piece_rules

    return rules


def _in_group(begin: int, count: int, heads: int) -> Rule:
    """Heads from `begin` on of every group of so many heads."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        # A piece fills a range of the parameter's first dim, so each group is a piece of its own.
        groups, (width, *inner) = p.atoms[0] // count, p.atoms[1:]
        view = (groups * heads, width, *inner)
        return [
            TensorPiece(
                tensor=name,
                shape=(groups * heads * width, *p.shape[1:]),
                view=view,
                pick=((g * heads + begin, g * heads + begin + count), *((0, n) for n in view[1:])),
                first=g * count,
            )
            for g in range(groups)
        ]

    return make


def two_norms(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
    """Norms of Falcon's newer layers, which have one before attention and one before the feed-forward."""
    rules: dict[str, tuple[str, Rule]] = {}
    for name in parameters:
        head, found, tail = name.rpartition(".mlp_layernorm.")
        if found:
            rules[name] = f"{head}.ln_mlp.{tail}", whole
            rules[f"{head}.input_layernorm.{tail}"] = f"{head}.ln_attn.{tail}", whole
    return rules


def flat(name: str, p: Parameter) -> list[TensorPiece]:
    """One dim in the file."""
    return [TensorPiece(tensor=name, shape=(prod(p.atoms),), view=p.atoms)]


def channels(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
    """Maps parameters of Mamba-2's convolution: a file has x, B and C one after the other, and a dim of one for the
    input channel."""
    rules: dict[str, tuple[str, Rule]] = {}
    for name in parameters:
        for what in ("weight", "bias"):
            head, middle, _ = name.rpartition(f".conv1d.{what}_x")
            if middle:
                x, bc = parameters[name], parameters[f"{head}.conv1d.{what}_bc"]
                # Channels of the file are x, then B, then C. Ours has two parameters, x and B with C, each with a dim
                # of groups.
                theirs = f"{head}.conv1d.{what}"
                rules[name] = theirs, _of_x(prod(bc.atoms[:3]))
                rules[bc.name] = theirs, _of_bc(prod(x.atoms[:2]))
    return rules


def _of_x(others: int) -> Rule:
    """Takes the channels of x. others: channels of B and C."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        groups, width, *taps = p.atoms
        rows = groups * width + others
        shape = (rows, *([1] if taps else []), *taps)
        ranges = [((0, 1), (g * width, (g + 1) * width), *((0, n) for n in taps)) for g in range(groups)]
        return [
            TensorPiece(tensor=name, shape=shape, view=(1, rows, *taps), pick=r, first=g) for g, r in enumerate(ranges)
        ]

    return make


def _of_bc(before: int) -> Rule:
    """Takes the channels of B or C. before: channels of x."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        two, groups, state, *taps = p.atoms
        rows = before + two * groups * state
        if before % state:  # a piece is a range of rows of so many
            raise FormatError(f"{name}: {before} channels of x are no whole number of states of {state}; not read yet")
        shape, view = (rows, *([1] if taps else []), *taps), (1, rows // state, state, *taps)
        starts = [before // state + index * groups for index in range(two)]
        ranges = [((0, 1), (a, a + groups), (0, state), *((0, n) for n in taps)) for a in starts]
        return [TensorPiece(tensor=name, shape=shape, view=view, pick=r, first=i) for i, r in enumerate(ranges)]

    return make


def half(index: int) -> Rule:
    """Takes half of a tensor (2 × out, in), for each expert where there are several: the gate's rows before those of
    up."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        *experts, out, inner = p.atoms
        pick = (*((0, n) for n in experts), (index, index + 1), (0, out), (0, inner))
        view, order = (*experts, 2, out, inner), (*range(len(experts)), len(experts) + 1, len(experts) + 2)
        return [TensorPiece(tensor=name, shape=(*experts, 2 * out, inner), view=view, pick=pick, order=order)]

    return make


def projections(parameters: Mapping[str, Parameter]) -> dict[str, tuple[str, Rule]]:
    """A Mamba-2 mixer's projection: a file has z of all groups of heads, then x, B, C and dt of all; ours has all of
    the first group, then of the second."""
    rules: dict[str, tuple[str, Rule]] = {}
    for name in parameters:
        head, found, _ = name.rpartition(".in_proj.weight")
        if found and f"{head}.conv1d.weight_x" in parameters:
            groups, width = parameters[f"{head}.conv1d.weight_x"].atoms[:2]
            state, heads = parameters[f"{head}.conv1d.weight_bc"].atoms[2], parameters[f"{head}.D"].atoms[0]
            if groups > 1:
                rules[name] = name, _by_group(groups, (width, width, state, state, heads // groups))
    return rules


def _by_group(groups: int, widths: Sequence[int]) -> Rule:
    """Takes a part of each group. widths: rows of one group in each part of the file's tensor."""

    def make(name: str, p: Parameter) -> list[TensorPiece]:
        pieces = []
        for group in range(groups):
            for index, width in enumerate(widths):
                before = sum(widths[:index])
                # In the file part `index` has all groups one after the other, behind the parts before it. In ours a
                # group has all its parts one after the other.
                start = groups * before + group * width
                pieces.append(
                    TensorPiece(
                        tensor=name,
                        shape=p.shape,
                        view=p.atoms,
                        pick=((start, start + width), *((0, n) for n in p.atoms[1:])),
                        first=group * sum(widths) + before,
                    )
                )
        return pieces

    return make

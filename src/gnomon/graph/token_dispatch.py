"""Experts of a captured model as ops that tokens are sent to: `with_dispatch(graph)`, for ranks that divide experts.

A module whose experts are stacked in one parameter (experts, out, in) makes a row of each (token, chosen expert), and
multiplies it by the weight of its expert: the weights gathered row by row (`bmm`), or the rows sorted by expert
(`_grouped_mm`). Both are what `dispatch`, `grouped_linear` and `combine` say, which ranks of ep divide; ops on rows in
between stay. A block in which something else happens to the rows or to the weights is left as it is, with the reason.
Leaves out loops over experts, and matmuls of all experts with all tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from gnomon.errors import GraphError
from gnomon.graph.expert_rows import VIEWED, Fact, RowFacts, alike, base, names, same_extent, work
from gnomon.graph.graph import Graph
from gnomon.graph.types import Block
from gnomon.ops.op import Op, attrs
from gnomon.tensors.captured import Node, Size, Use
from gnomon.tensors.dims import Dim
from gnomon.tensors.tensor import Tensor

PRODUCTS = ("_grouped_mm", "grouped_mm_fallback")
"""Of rows sorted by expert with their experts' weights."""


class _UnmatchedError(Exception):
    """A block that does something else, said."""


def with_dispatch(graph: Graph) -> Graph:
    """The graph with experts that ranks can divide, where it is captured and computes them by rows; else itself."""
    dispatched = {block.name: new for block in graph.blocks if (new := _dispatched(block)[0]) is not None}
    return _with_blocks(graph, tuple(dispatched.items())) if dispatched else graph


def why_whole(graph: Graph) -> str:
    """Why the experts of a captured graph cannot be divided, of the first block that says so; empty otherwise."""
    return next((reason for block in graph.blocks if (reason := _dispatched(block)[1])), "")


@lru_cache(maxsize=64)
def _with_blocks(graph: Graph, new_blocks: tuple[tuple[str, Block], ...]) -> Graph:
    named = dict(new_blocks)
    return replace(graph, blocks=tuple(named.get(block.name, block) for block in graph.blocks))


@lru_cache(maxsize=256)
def _dispatched(block: Block) -> tuple[Block | None, str]:
    """The block with experts that ranks can divide; without it, why, where it has such experts."""
    if not _stacks(block):
        return None, ""
    try:
        return _Rewriting(block).finish(), ""
    except _UnmatchedError as error:
        return None, str(error)


def _stacks(block: Block) -> frozenset[str]:
    """Parameters that a captured op takes matrices of single experts out of, by rows."""
    return frozenset(name for op in block.ops for name in _stack_read(block, op))


def _stack_read(block: Block, op: Op) -> Iterator[str]:
    for node in work(op):
        name = base(node)
        if name == "index" and names(node) and len(node.args) == 2:
            stack = block.tensor(names(node)[0]) if names(node)[0] in op.inputs else None
            if stack is not None and stack.kind == "parameter" and len(stack.dims) == 3:
                yield stack.name
        elif name in PRODUCTS and len(op.inputs) == 3:
            yield op.inputs[1]


def _experts(block: Block) -> int | None:
    """How many experts its stacks have."""
    sizes = {block.tensor(stack).dims[0].size for op in block.ops for stack in _stack_read(block, op)}
    if len(sizes) != 1:
        raise _UnmatchedError(
            f"block {block.name!r} has stacks of several numbers of experts, {sorted(map(str, sizes))}"
        )
    return sizes.pop()


class _Rewriting:
    """One block, op by op."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.rows = RowFacts(block)
        self.facts = self.rows.facts
        self.tensors = {tensor.name: tensor for tensor in block.tensors}
        self.ops: list[Op] = []
        self.places: dict[str, int] = {}
        """Path -> where the op stands in the block as it was."""
        self.now = 0
        self.dropped: dict[str, Op] = {}
        """By what they made, ops that are left out."""
        self.routed: dict[str, tuple[str, Dim]] = {}
        """Indices -> (their new name, the dim of experts of a token)."""
        self.weights: dict[str, str] = {}

    # --- what is looked for

    def finish(self) -> Block:
        """Returns the block. _UnmatchedError where it does something else."""
        for place, op in enumerate(self.block.ops):
            self.now = place
            self._take(op)
        if not any(op.does == "combines" for op in self.ops):
            raise _UnmatchedError(
                self._place_text(
                    self._first(), "takes weights of experts, and no sum over the experts of a token follows"
                )
            )
        ops = self._needed()
        named = {name for op in ops for name in (*op.inputs, *op.outputs)} | {*self.block.inputs, *self.block.outputs}
        try:
            return replace(
                self.block, ops=tuple(ops), tensors=tuple(t for name, t in self.tensors.items() if name in named)
            )
        except GraphError as error:
            raise _UnmatchedError(f"block {self.block.name!r}: {error}") from None

    def _needed(self) -> list[Op]:
        """The ops whose results are read. _UnmatchedError where one reads what no op makes now."""
        produced = {name for op in self.ops for name in op.outputs}
        before = {name for op in self.block.ops for name in op.inputs}
        ops, needed = list[Op](), set(self.block.outputs)
        for op in reversed(self.ops):  # without what only read the order of rows
            if needed & set(op.outputs) or not before & set(op.outputs):
                ops.append(op)
                needed |= set(op.inputs)
        # What stays may read something that only a dropped op made: that op comes back.
        restored = self._restored(needed - produced)
        places = self.places | {op.path: place for place, op in enumerate(self.block.ops) if op.path in restored}
        ops += [op for op in self.block.ops if op.path in restored]
        return sorted(ops[::-1], key=lambda op: places[op.path])

    def _restored(self, to_find: set[str]) -> set[str]:
        """Paths of ops that were left out, whose results others read too. _UnmatchedError where they are of rows."""
        to_restore, paths = list(to_find), set[str]()
        used = {name for op in self.ops if op.does == "multiplies rows" for name in op.inputs[1:]}
        while to_restore:
            op = self.dropped.get(to_restore.pop())
            if op is None or op.path in paths:
                continue
            if used & set(op.inputs) or any(self.rows.fact(name, "rows", "weighted") for name in op.inputs):
                raise _UnmatchedError(
                    self._place_text(op, "is read by others too, and is of rows or weights that ranks divide")
                )
            paths.add(op.path)
            to_restore += op.inputs
        return paths

    def _put(self, op: Op) -> None:
        self.ops.append(op)
        self.places[op.path] = self.now

    def _first(self) -> Op:
        """The first op that reads a stack of experts."""
        return next(op for op in self.block.ops if any(_stack_read(self.block, op)))

    def _place_text(self, op: Op, what: str) -> str:
        where = f" ({op.captured.where})" if op.captured is not None and op.captured.where else ""
        return f"{op.path}{where} {what}"

    # --- op by op

    def _take(self, op: Op) -> None:
        nodes = work(op)
        single = len(op.outputs) == 1
        if self.rows.take(op) or (single and any(r(op, nodes) for r in (self._rows, self._expert_matmuls, self._sums))):
            self.dropped.update(dict.fromkeys(op.outputs, op))
            return
        if any(self.rows.fact(name, "rows", "weighted") for name in op.inputs):
            self._by_row(op)
        else:
            self._put(op)

    def _rows(self, op: Op, nodes: list[Node]) -> bool:
        """A row for each token and each of its experts."""
        if not nodes or not op.inputs or not self.block.tensor(op.inputs[0]).is_float:
            return False
        source, output = op.inputs[0], op.outputs[0]
        before, after = self.block.tensor(source), self.block.tensor(output)
        if len(before.dims) != 2 or len(after.dims) != 2 or source in self.facts:
            return False
        if base(nodes[-1]) == "index" and len(op.inputs) == 2 and (by := self.rows.fact(op.inputs[1], "tokens")):
            self._dispatch(op, by.of, order=by.of)
            return True
        if [base(node) for node in nodes if base(node) not in VIEWED] != ["unsqueeze", "expand"]:
            return False
        flat = self.rows.multiplied_by(output)
        if flat is None or self.block.tensor(flat).dims[0] != after.dims[0]:
            return False
        self._dispatch(op, self.rows.chosen[flat], order="")
        return True

    def _dispatch(self, op: Op, indices: str, *, order: str) -> None:
        source, output = self.block.tensor(op.inputs[0]), op.outputs[0]
        name, topk = self._renamed(indices, op)
        dims = (*self.block.tensor(indices).dims[:-1], topk, source.dims[-1])
        if self.block.tensor(indices).dims[:-1] != source.dims[:-1]:
            raise _UnmatchedError(self._place_text(op, f"sends {source} by indices of other tokens"))
        self.tensors[output] = Tensor(name=output, dims=dims, dtype=source.dtype)
        self._put(
            Op(
                kind="dispatch",
                path=op.path,
                inputs=(source.name, name),
                outputs=(output,),
                attrs=attrs(experts=self._dim("experts", _experts(self.block)).name),
            )
        )
        self.facts[output] = Fact("rows", output, indices, order)

    def _renamed(self, indices: str, op: Op) -> tuple[str, Dim]:
        """Indices, whose last dim is called what it is."""
        if indices not in self.routed:
            before = self.block.tensor(indices)
            topk = self._dim("topk", before.dims[-1].size)
            self.routed[indices] = self._rename(before, (*before.dims[:-1], topk), f"{op.path}.chosen"), topk
        return self.routed[indices]

    def _rename(self, before: Tensor, dims: tuple[Dim, ...], path: str) -> str:
        if before.dims == dims:
            return before.name
        self.tensors[path] = Tensor(name=path, dims=dims, dtype=before.dtype)
        self._put(Op(kind="rename", path=path, inputs=(before.name,), outputs=(path,)))
        return path

    def _dim(self, name: str, size: int | None) -> Dim:
        """A dim of that name, or of that name with a number."""
        dims_used = {dim.name: dim for tensor in self.tensors.values() for dim in tensor.atoms}
        dim, count = Dim(name=name, size=size), 1
        while dims_used.get(dim.name, dim) != dim:
            count += 1
            dim = Dim(name=f"{name}.{count}", size=size)
        return dim

    def _expert_matmuls(self, op: Op, nodes: list[Node]) -> bool:
        """Recognises the matmuls of rows with their experts' weights."""
        if op.does == "adds" and op.captured is None:
            return self._biased(op)
        if len(nodes) != 1:
            return False
        name = base(nodes[0])
        if name in ("unsqueeze", "squeeze") and (rows := self.rows.fact(op.inputs[0], "rows")):
            self.facts[op.outputs[0]] = rows
            return True
        if name in ("add", "add_") and len(op.inputs) == 2 and self._biased(op):
            return True
        if name == "bmm" and len(op.inputs) == 2:
            pairs = [op.inputs, op.inputs[::-1]]
            for lhs, right in pairs:
                rows, weight = self.rows.fact(lhs, "rows"), self.rows.fact(right, "gathered")
                if rows is not None and weight is not None and alike(rows, weight):
                    # rows are on the right of a matrix (out, in), and on the left of one (in, out)
                    self._grouped(op, rows, weight, inner_first=(lhs == op.inputs[0]) != weight.turned)
                    return True
            return False
        if name in PRODUCTS and len(op.inputs) == 3:
            rows, weight = self.rows.fact(op.inputs[0], "rows"), self.rows.fact(op.inputs[1], "stack")
            if weight is None and self.block.tensor(op.inputs[1]).kind == "parameter":
                weight = Fact("stack", op.inputs[1])
            counts = self.rows.fact(op.inputs[2], "counts")
            if rows is not None and weight is not None and counts is not None and rows.order == counts.of:
                self._grouped(op, rows, weight, inner_first=not weight.turned)
                return True
        return False

    def _grouped(self, op: Op, rows: Fact, weight: Fact, *, inner_first: bool) -> None:
        output, rows_tensor, stack = op.outputs[0], self.tensors[rows.of], self.tensors[weight.of]
        # A bmm leaves a dim of size 1 next to the outputs of a row: (rows, 1, out), or (rows, out, 1).
        wide = next(dim for dim in reversed(self.block.tensor(output).dims) if dim.size != 1 or dim.factors)
        inner, experts = rows_tensor.dims[-1], self._dim("experts", stack.dims[0].size)
        # (out, in) of a matrix, whichever of the two lies first.
        sizes = [dim.size for dim in (stack.dims[:0:-1] if inner_first else stack.dims[1:])]
        if sizes != [_extent(wide), _extent(inner)] or set(wide.atoms) & {*inner.atoms, *rows_tensor.dims[:-1]}:
            raise _UnmatchedError(
                self._place_text(op, f"multiplies {rows_tensor} and {stack} in a way that is not known")
            )
        order = (inner, wide) if inner_first else (wide, inner)
        # The stack's dims are renamed for this op: a second reader would read dims that it does not know.
        if any(stack.name in known.inputs for known in self.ops):
            raise _UnmatchedError(self._place_text(op, f"reads {stack.name}, which another op reads too"))
        self.tensors[stack.name] = replace(stack, dims=(experts, *order))
        self.tensors[output] = Tensor(name=output, dims=(*rows_tensor.dims[:-1], wide), dtype=rows_tensor.dtype)
        self._put(
            Op(
                kind="grouped_linear",
                path=op.path,
                inputs=(rows.of, stack.name),
                outputs=(output,),
                contracts=tuple(atom.name for atom in inner.atoms),
                attrs=attrs(groups=experts.name),
            )
        )
        self.facts[output] = replace(rows, of=output)

    def _biased(self, op: Op) -> bool:
        """Rows plus their experts' biases: part of the matmul."""
        rows, bias = self.rows.fact(op.inputs[0], "rows"), self.rows.fact(op.inputs[1], "gathered")
        last = self.ops[-1] if self.ops else None
        if rows is None or bias is None or not alike(rows, bias) or last is None or last.does != "multiplies rows":
            return False
        bias_tensor = self.tensors[bias.of]
        # Directly after the matmul: between them something may have changed the rows.
        if last.outputs != (rows.of,) or len(bias_tensor.dims) != 2 or len(last.inputs) != 2:
            return False
        wide, experts = self.tensors[rows.of].dims[-1], self._dim("experts", bias_tensor.dims[0].size)
        self.tensors[bias.of] = replace(bias_tensor, dims=(experts, wide))
        self.ops[-1] = replace(last, inputs=(*last.inputs, bias.of))
        self.facts[op.outputs[0]] = rows
        return True

    def _sums(self, op: Op, nodes: list[Node]) -> bool:
        """Rows times their weights, back in the order of tokens, added up."""
        if len(nodes) != 1 or not op.inputs:
            return False
        name, output = base(nodes[0]), op.outputs[0]
        if name == "mul" and len(op.inputs) == 2:
            rows, weight = self.rows.fact(op.inputs[0], "rows"), self.rows.fact(op.inputs[1], "weights")
            # Rows and weights in different orders belong to different tokens.
            if rows is not None and weight is not None and rows.order == weight.order:
                self.weights[output] = weight.of
                self.facts[output] = replace(rows, what="weighted")
                return True
        fact = self.rows.fact(op.inputs[0], "weighted")
        if fact is None:
            return False
        before, after = self.block.tensor(op.inputs[0]), self.block.tensor(output)
        back = self.rows.fact(op.inputs[1], "inverse") if len(op.inputs) == 2 else None
        if name == "index" and back is not None and back.of == fact.order:
            self.facts[output] = replace(fact, order="")
        elif name in VIEWED and not fact.order and len(after.dims) == 3:
            if not same_extent(before.dims[0].atoms, (*after.dims[0].atoms, *after.dims[1].atoms)):
                return False
            self.facts[output] = fact
        elif name == "_to_copy":
            self.facts[output] = fact
        # Over the experts of a token, which is dim 1 of (tokens, topk, width).
        elif name == "sum" and len(before.dims) == 3 and nodes[0].args[1:2] in (((1,),), (1,), ((-2,),)):
            if len(after.dims) != 2 or fact.order:
                return False
            self._combine(op, fact, self.weights[op.inputs[0]])
            return True
        else:
            return False
        self.weights[output] = self.weights[op.inputs[0]]
        return True

    def _combine(self, op: Op, fact: Fact, weights: str) -> None:
        rows, weights_tensor, output = self.tensors[fact.of], self.block.tensor(weights), op.outputs[0]
        indices = fact.chosen
        if weights_tensor.dims != self.block.tensor(indices).dims:
            raise _UnmatchedError(self._place_text(op, f"adds up {rows} by {weights_tensor}"))
        name, topk = self.routed[indices]
        by = self._rename(weights_tensor, (*weights_tensor.dims[:-1], topk), f"{op.path}.weights")
        self.tensors[output] = replace(self.block.tensor(output), dims=(*weights_tensor.dims[:-1], rows.dims[-1]))
        if self.tensors[output].dims != self.block.tensor(output).dims:
            raise _UnmatchedError(self._place_text(op, f"makes {self.block.tensor(output)} of {rows}"))
        self._put(Op(kind="combine", path=op.path, inputs=(rows.name, by, name), outputs=(output,)))

    def _by_row(self, op: Op) -> None:
        """An op that stays, on rows."""
        reads = [self.facts.get(name) for name in op.inputs]
        if len({(fact.chosen, fact.order) for fact in reads if fact is not None}) > 1:
            raise _UnmatchedError(self._place_text(op, "reads rows of several experts at once"))
        if any(fact is not None and fact.what != "rows" for fact in reads):
            raise _UnmatchedError(
                self._place_text(op, "does something else to rows of experts than to add them up by their weights")
            )
        rows = next(fact for fact in reads if fact is not None)
        first = next(name for name, fact in zip(op.inputs, reads, strict=True) if fact is not None)
        # The captured program has rows in one flat dim of tokens x topk. Here they have the dims of tokens and topk,
        # which take its place in every tensor that begins with it.
        plain, dims = self.block.tensor(first).dims[0], self.tensors[rows.of].dims[:-1]
        if op.captured is not None and any(_sized(node) for node in op.captured.nodes):
            raise _UnmatchedError(self._place_text(op, "gives rows of experts another shape"))
        named = {name: fact.of for name, fact in zip(op.inputs, reads, strict=True) if fact is not None}
        inner = {t.name: t for t in op.captured.tensors} if op.captured is not None else {}
        for name in op.outputs:
            before = self.block.tensor(name)
            if not before.dims or before.dims[0] != plain:
                raise _UnmatchedError(self._place_text(op, f"makes {before} of rows of experts"))
            self.tensors[name] = replace(before, dims=(*dims, *before.dims[1:]))
            self.facts[name] = replace(rows, of=name)
        captured_node = op.captured
        if captured_node is not None:
            sides = tuple(
                replace(t, dims=(*dims, *t.dims[1:])) if t.dims and t.dims[0] == plain else t for t in inner.values()
            )
            nodes = tuple(_withnames(node, named) for node in captured_node.nodes)
            captured_node = replace(
                captured_node, nodes=nodes, tensors=sides, keeps=tuple(named.get(n, n) for n in captured_node.keeps)
            )
        self._put(replace(op, inputs=tuple(named.get(n, n) for n in op.inputs), captured=captured_node))


def _sized(node: Node) -> bool:
    """Whether it names sizes that follow from the batch."""

    def within(x: object) -> bool:
        return isinstance(x, Size) or (isinstance(x, tuple) and any(within(inner) for inner in x))

    return within(node.args) or within(tuple(value for _, value in node.kwargs))


def _withnames(node: Node, named: Mapping[str, str]) -> Node:
    """The node with other names of what it reads."""

    def other(x: object) -> object:
        if isinstance(x, Use):
            return Use(named.get(x.name, x.name))
        return tuple(other(inner) for inner in x) if isinstance(x, tuple) else x

    args, kwargs = other(node.args), tuple((key, other(value)) for key, value in node.kwargs)
    assert isinstance(args, tuple), "operands are a tuple"
    return replace(node, args=args, kwargs=kwargs)


def _extent(dim: Dim) -> int | None:
    """Returns the size of a dim of known size, or of a product of such; None for another."""
    total = 1
    for atom in dim.atoms:
        if atom.size is None:
            return None
        total *= atom.size
    return total

"""All layers of a plain decoder in one call of a kernel: `ForwardProgram.of(graph, …)` writes them as its instructions.

Between two tokens there is nothing for Python to do but to say which rows there are. Matrices are packed once, as the
kernel reads them (cpp/forward.cpp), those that read the same rows side by side; a table that is also the head's matrix
is packed once. Where ranks divide matrices, the call stops where terms are added up. None for models with anything else
in them (experts, scans, latent attention, learned positions …): these run op by op (`decoder`). Float32 and bfloat16.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gnomon.compiler.build import kernel_of
from gnomon.compiler.kernels.stored import AnyPacked, PackedStored, function_of, stored_matmul
from gnomon.compiler.tune.tried import text_of
from gnomon.graph import Block, Layer, Op
from gnomon.runtime.mesh.collectives import all_reduce
from gnomon.runtime.module.crossings import reads, writes
from gnomon.runtime.ops.attention import shared_tables
from gnomon.runtime.ops.paged import KERNELS
from gnomon.serve.adapters import Adapter, kernel_args
from gnomon.serve.division import ModelShare
from gnomon.serve.matrices import Matrices, Part
from gnomon.serve.paged import Pages, untouched
from gnomon.serve.rows import TokenRows
from gnomon.serve.sizes import Sizes

CPP = Path(__file__).with_name("cpp") / "forward.cpp"
TABLES = "numbers rows codes".split()
"""How a table of embeddings lies: packed as a head's matrix, as it is, or packed in codes of eight bits."""
ALIGNED = 64
"""Bytes at multiples of which rows of the workspace begin."""
TOGETHER = 252
"""Tokens for which all is computed that stands between two ops that look beyond one. A multiple of the rows of the
widest tile of products (cpp/stored.cpp)."""
BRIEF = "in_ with_ out".split()
"""Operands in the order of cpp/forward.cpp's bits."""
KINDS = "embed norm linear rotary attend glu add scale gather logits cap adapt".split()
GATES: Mapping[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "gelu_new": 2, "relu": 3}
_NUMBERS = "kind in_ in_row with_ with_row out out_row width out_width heads flags after brief".split()


class _Op(ctypes.Structure):
    """The struct `Op` of cpp/forward.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in _NUMBERS],
        *[(name, ctypes.c_void_p) for name in ("weight", "bias", "more")],
        *[(name, ctypes.c_double) for name in ("first", "second")],
    ]


class _Run(ctypes.Structure):
    """The struct `Run` of cpp/forward.cpp."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in ("count", "tokens", "wanted", "threads", "sequences", "together")],
        ("ops", ctypes.c_void_p),
        ("room", ctypes.c_void_p),
        *[(name, ctypes.c_void_p) for name in ("ids", "positions", "begins", "lengths", "rows")],
        *[(name, ctypes.c_void_p) for name in ("tables", "table_rows", "logits", "narrowed", "adapters")],
    ]


@cache
def kernel(dtype: torch.dtype) -> Callable[[Any], int] | None:
    """Returns the compiled kernel; None where it does not compile."""
    return kernel_of(text_of(CPP, dtype), ctypes.c_void_p) if dtype in KERNELS else None


@dataclass(frozen=True, slots=True)
class _Place:
    """Rows in the workspace."""

    at: int
    """Bytes from its beginning to their first element."""
    row: int
    """Elements from one to the next."""
    brief: bool = False
    """Whether rows are of the tokens that are computed together, and of others afterwards; else of all tokens."""

    def part(self, element: int, itemsize: int) -> _Place:
        """The same rows from an element on."""
        return replace(self, at=self.at + element * itemsize)


NOWHERE: Mapping[str, _Place] = MappingProxyType({})
"""Operands of an instruction that has none of its own."""


class _NotPlain(Exception):
    """A model with an op that is no instruction."""


class ForwardProgram:
    """The instructions, and what they read."""

    def __init__(self, share: ModelShare, sizes: Sizes, dtype: torch.dtype, vocab_size: int) -> None:
        """Takes the vocab_size of this rank's logits."""
        self.share = share
        self.ops: list[_Op] = []
        self.stops: list[tuple[int, Callable[[int], None]]] = []
        """(instructions before it, what is done then, of so many tokens)."""
        self.enters = self.leaves = _Place(0, 0)
        """Where what stages before it hand over comes to, and what it hands on lies."""
        self.keep_alive: list[object] = []
        """Tensors and calls that instructions point to."""
        self.weights: list[AnyPacked] = []
        self.tokens, self.dtype, self.vocab_size = sizes.max_batched_tokens, dtype, vocab_size
        self.end = self.most = self.narrowed = 0
        """Bytes of the workspace, so far and at most, and of rows as products' kernels read them."""
        self.gathered = False
        """Whether instructions are by now about tokens that are wanted, all at a time."""

    @staticmethod
    def of(
        share: ModelShare,
        matrices: Matrices,
        pages: Callable[[Layer, Block, Op], Pages],
        sizes: Sizes,
        adapters: Sequence[Adapter] = (),
    ) -> ForwardProgram | None:
        """Makes the instructions. pages: makes those of an attention op. None where the model is not plain, or there is
        no kernel."""
        dtype = matrices.forms.dtype
        if kernel(dtype) is None or not matrices.have_kernels():
            return None
        vocabulary = int(share.graph.source(share.graph.outputs[0])[1].dims[-1].size or 0) if share.is_last else 0
        writer = _Writer(ForwardProgram(share, sizes, dtype, vocabulary), matrices, pages, sizes, adapters)
        try:
            writer.check()
        except _NotPlain:
            return None
        return writer.finish()

    def room(self, width: int, *, brief: bool = False) -> _Place:
        """Rows of so many elements, of all tokens, or of those that are computed together."""
        at, tokens = self.end, min(TOGETHER, self.tokens) if brief else self.tokens
        self.end += -(-tokens * width * self.dtype.itemsize // ALIGNED) * ALIGNED
        self.most = max(self.most, self.end)
        return _Place(at, width, brief)

    def add(
        self,
        kind: str,
        *,
        tensors: tuple[Tensor | None, Tensor | None] = (None, None),
        places: Mapping[str, _Place] = NOWHERE,
        **values: Any,
    ) -> None:
        """Adds an instruction. tensors: weight and bias. places: of its operands, by the names in `BRIEF`."""
        self.gathered = self.gathered or kind == "gather"
        op = _Op(kind=KINDS.index(kind), **{"heads": 1, "with_": -1, **values})
        for name, place in places.items():
            setattr(op, name, place.at)
            setattr(op, f"{name.removesuffix('_')}_row", place.row)
            # A bit for each operand, by its place in BRIEF: its rows begin anew with every TOGETHER tokens.
            op.brief |= place.brief << BRIEF.index(name)
        op.weight, op.bias = (None if one is None else one.data_ptr() for one in tensors)
        self.keep_alive += [one for one in tensors if one is not None]
        self.ops.append(op)

    def stop(self, between: Callable[[int], None]) -> None:
        """Something is done between the instructions so far and those to come. between: is told how many tokens."""
        self.stops.append((len(self.ops), between))

    def multiply(self, kind: str, packed: AnyPacked, bias: Tensor | None, **values: Any) -> None:
        """Adds a matmul. bias: float32."""
        call, function = stored_matmul(packed, bias), function_of(packed)
        assert function is not None, "Matrices.have_kernels was asked"
        rows = self.tokens if kind == "logits" or self.gathered else min(TOGETHER, self.tokens)
        self.narrowed = max(self.narrowed, packed.form.room(rows, packed.shape[1]))
        self.keep_alive += [call, bias, function]
        self.weights.append(packed)
        self.add(kind, **values, more=ctypes.addressof(call))
        if isinstance(packed, PackedStored):
            self.ops[-1].after = packed.codes[0].numel()
        # After `add`, which sets this field to a tensor's address: of a matmul it is the kernel's function, and `more`
        # points to what that is called with.
        self.ops[-1].weight = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]

    def close(self) -> None:
        """Nothing is added any more."""
        self.array = (_Op * len(self.ops))(*self.ops)
        self.workspace = untouched((self.most + ALIGNED,), torch.uint8)
        self.call = _Run(count=len(self.ops), ops=ctypes.addressof(self.array), together=TOGETHER)
        # The allocation begins at any address and has ALIGNED bytes more than are needed, so that the rows can begin at
        # a multiple of ALIGNED.
        self.call.room = -(-self.workspace.data_ptr() // ALIGNED) * ALIGNED
        self.rows_narrowed = untouched((self.narrowed + ALIGNED,), torch.uint8)
        self.call.narrowed = -(-self.rows_narrowed.data_ptr() // ALIGNED) * ALIGNED

    def run(self, rows: TokenRows, entering: Tensor | None = None) -> Tensor:
        """Returns (wanted, vocabulary), float32: logits of this rank's part of the vocabulary; or (1, tokens, width)
        that the next stage reads, which the next call writes over. entering: the same of the stage before."""
        call, tokens = self.call, len(rows.ids)
        assert tokens <= self.tokens
        if entering is not None:
            self._rows(self.enters, tokens).copy_(entering[0])
        logits = torch.empty((len(rows.logit_rows) if self.share.is_last else 0, self.vocab_size))
        call.tokens, call.wanted, call.threads, call.sequences = tokens, len(logits), rows.threads, rows.count
        call.ids, call.positions, call.begins = rows.ids.data_ptr(), rows.positions.data_ptr(), rows.begins.data_ptr()
        call.adapters = rows.adapters.data_ptr()
        call.lengths, call.rows, call.logits = rows.lengths.data_ptr(), rows.logit_rows.data_ptr(), logits.data_ptr()
        # These arrays must live until the kernel has returned: the struct holds their addresses alone.
        tables = (ctypes.c_void_p * len(rows.tables))(*[table.data_ptr() for table in rows.tables])
        lengths = (ctypes.c_int64 * len(rows.tables))(*[table.shape[1] for table in rows.tables])
        call.tables, call.table_rows = ctypes.addressof(tables), ctypes.addressof(lengths)
        done = 0
        for until, between in self.stops:
            self._call(done, until)
            between(tokens)
            done = until
        self._call(done, len(self.ops))
        return logits if self.share.is_last else self._rows(self.leaves, tokens).unsqueeze(0)

    def _call(self, begin: int, end: int) -> None:
        """Runs the instructions [begin, end)."""
        if begin == end:
            return
        function, call = kernel(self.dtype), self.call
        assert function is not None
        call.ops, call.count = ctypes.addressof(self.array) + begin * ctypes.sizeof(_Op), end - begin
        function(ctypes.addressof(call))

    def sum(self, place: _Place, tokens: int) -> None:
        """Ranks add up what they have terms of."""
        assert self.share.tp.group is not None
        all_reduce(self._rows(place, tokens), self.share.tp.group)

    def _rows(self, place: _Place, tokens: int) -> Tensor:
        """(tokens, width) of the workspace."""
        # Places count from the aligned address, slices of the tensor from its own beginning.
        begin = self.call.room - self.workspace.data_ptr() + place.at
        end = begin + tokens * place.row * self.dtype.itemsize
        return self.workspace[begin:end].view(self.dtype).view(tokens, place.row)


class _Writer:
    """The state of writing: from a Graph to instructions."""

    def __init__(
        self,
        program: ForwardProgram,
        matrices: Matrices,
        pages: Callable[[Layer, Block, Op], Pages],
        sizes: Sizes,
        adapters: Sequence[Adapter],
    ) -> None:
        self.program, self.matrices, self.pages, self.sizes = program, matrices, pages, sizes
        self.share, self.graph = program.share, program.share.graph
        self.adapters = adapters
        self.weights = matrices.weights
        self.angles: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
        last = self.share.is_last
        self.ends = {source.partition(".")[0] for source in self.graph.outputs} if last else set[str]()

    def check(self) -> None:
        """_NotPlain for a model that is not."""
        layers = self.graph.layers()
        if len(self.graph.inputs) != 1 or len(self.graph.outputs) != 1:
            raise _NotPlain
        for layer in layers:
            block = self.graph.block(layer.call.block)
            if len(block.outputs) != 1 or len(block.inputs) != 1:
                raise _NotPlain
            for op in block.ops:
                self._check_op(block, op)
        # Each layer reads exactly what the one before it wrote. Nothing passes a layer by, so that `finish` can do with
        # two buffers for what goes from layer to layer.
        chain = [*writes(self.graph, layers[0]).values()]
        for layer in layers[1:]:
            if [*reads(layer).values()] != chain:
                raise _NotPlain
            chain = [*writes(self.graph, layer).values()]

    def _check_op(self, block: Block, op: Op) -> None:
        widths = [math.prod(a.size or 1 for a in block.tensor(name).atoms) for name in (*op.inputs[:1], *op.outputs)]
        fine = all(width % 2 == 0 for width in widths) or op.does == "looks up"
        if (moves := self.share.around(block, op)) is not None:
            sums = not moves.there and all(map(moves.sums, op.outputs))
            fine = fine and sums and (op.does == "looks up" or op.is_dense_linear) and not op.attr("factor", 0)
        match op.does:
            case "looks up":
                fine = fine and op.inputs[0] in block.inputs
            case "multiplies":
                fine = fine and op.is_dense_linear and _inner(block, op) % 2 == 0
            case "normalises":
                weight = [block.tensor(name) for name in op.inputs[1:]]
                fine = fine and op.attr("fn", "rms") in ("rms", "layer") and all(len(w.dims) == 1 for w in weight)
            case "rotates":
                fine = fine and op.attr("scaling", "") not in ("dynamic", "longrope")
            case "attends":
                fine = fine and not op.attr("masked", False) and self.sizes.block_tokens in (16, 32, 64)
            case "gates":
                fine = fine and op.attr("fn", "silu") in GATES and not op.attr("limit", 0.0)
            case "adds":
                fine = fine and block.tensor(op.inputs[0]).dims == block.tensor(op.inputs[1]).dims
                fine = fine and all(block.tensor(name).is_activation for name in op.inputs)
            case "scales":
                fine = fine and len(op.inputs) == 1
            case "caps":  # only a head's result: the kernel caps logits as it writes them
                fine = op.outputs[0] in block.outputs
            case "drops" | "measures distance":  # serving drops nothing; slopes are read with attention's pages
                fine = True
            case _ if op.rules.memory == "view":
                names = [[a.name for a in block.tensor(n).atoms] for n in (op.inputs[0], op.outputs[0])]
                in_order = op.rules.zeros_of(op) == "in place"
                fine = in_order or (fine and names[0] == names[1])
            case _:
                fine = False
        if not fine:
            raise _NotPlain

    def finish(self) -> ForwardProgram:
        """The whole of it."""
        program = self.program
        hidden = max(
            math.prod(a.size or 1 for a in self.graph.block(layer.call.block).tensor(name).atoms)
            for layer in self.graph.layers()
            if layer.call.name not in self.ends
            for name in self.graph.block(layer.call.block).outputs
        )
        # Layers write to the two in turns, so that none writes where its input lies. What comes after them in the
        # workspace is each layer's own and is written over by the next: `program.end` goes back to `begin`.
        streams, x = [program.room(hidden), program.room(hidden)], _Place(0, 0)
        begin = program.end
        if self.share.stage:
            token_input = self.graph.inputs[0]
            # The first layer writes to streams[0], so what enters a later stage lies in streams[1].
            x = program.enters = _Place(streams[1].at, math.prod(atom.size or 1 for atom in token_input.atoms))
        streams_room = self.matrices.streams
        for number, layer in enumerate(self.graph.layers()):
            program.end = begin
            if streams_room is not None:
                streams_room.layer(number)
                program.stop(lambda _, own=number: streams_room.take(own))  # type: ignore[misc]
            x = program.leaves = self._layer(layer, x, streams[number % 2])
            if streams_room is not None:
                program.stop(lambda _, own=number: streams_room.release(own))  # type: ignore[misc]
                self.weights.let_go()
        program.close()
        return program

    def _layer(self, layer: Layer, x: _Place, target: _Place) -> _Place:
        """Instructions of a layer that reads x; its result goes to `target`, unless it is logits."""
        block, program = self.graph.block(layer.call.block), self.program
        last = layer.call.name in self.ends
        at: dict[str, _Place] = {block.inputs[0]: x}
        if last:
            width = self._width(block, block.inputs[0])
            rows = program.room(width)
            program.add("gather", places={"in_": x, "out": rows}, width=width)
            at[block.inputs[0]] = rows
        readers: dict[str, list[Op]] = {}
        for op in block.ops:
            for name in op.inputs:
                readers.setdefault(name, []).append(op)

        brief = frozenset[str]() if last else self._brief(block)

        def room(name: str) -> _Place:
            if name in block.outputs and not last:
                return _Place(target.at, self._width(block, name))
            return program.room(self._width(block, name), brief=name in brief)

        done = set[str]()
        for index, op in enumerate(block.ops):
            if op.path in done:
                continue
            source, out = at.get(op.inputs[0]) if op.inputs else None, op.outputs[0]
            if _hands_rows_on(op):
                assert source is not None
                at[out] = source
            elif op.does == "looks up":
                at[out] = room(out)
                self._embed(layer, block, op, at[out])
                self._sum(block, op, at[out])
            elif op.is_dense_linear:
                done |= self._linear(layer, block, index, at, readers, room, brief, last)
            elif op.does == "measures distance":
                continue
            elif op.does == "caps":
                program.add("cap", width=self._width(block, out), first=float(_value(op, "cap", 1.0)))
            else:
                assert source is not None
                self._other(layer, block, op, source, at, readers, room)
        if last:
            return x
        output_place = at[block.outputs[0]]
        if output_place.at != target.at:  # it is what another op wrote, or the layer's input
            width = self._width(block, block.outputs[0])
            own = {"in_": output_place, "with_": output_place, "out": _Place(target.at, width)}
            program.add("scale", places=own, width=width, first=1.0)
        return _Place(target.at, self._width(block, block.outputs[0]))

    def _other(
        self,
        layer: Layer,
        block: Block,
        op: Op,
        source: _Place,
        at: dict[str, _Place],
        readers: Mapping[str, list[Op]],
        room: Callable[[str], _Place],
    ) -> None:
        program, out = self.program, op.outputs[0]
        width = self._width(block, out)
        head = int(block.tensor(op.inputs[0]).dims[-1].size or _size(block, op.inputs[0]))
        # In place only where nothing else reads the rows as they were.
        in_place = op.does == "rotates" and len(readers[op.inputs[0]]) == 1 and op.inputs[0] not in block.inputs
        at[out] = source if in_place else room(out)
        places = {"in_": source, "out": at[out]}
        match op.does:
            case "normalises":
                named = {name.rpartition(".")[2]: self._weight(layer, block, name) for name in op.inputs[1:]}
                program.add(
                    "norm", tensors=(named.get("weight"), named.get("bias")), places=places, width=head,
                    heads=width // head, flags=int(op.attr("fn", "rms") == "layer"),
                    first=float(_value(op, "eps", 1e-5)), second=float(_value(op, "offset", 0.0)),
                )  # fmt: skip
            case "rotates":
                turned = int(head * _value(op, "fraction", 1.0))
                program.add(
                    "rotary", tensors=self._angles(op, turned), places=places, width=head, out_width=turned,
                    heads=width // head, flags=int(bool(op.attr("interleaved", False))),
                )  # fmt: skip
            case "attends":
                k, v = (at[name] for name in op.inputs[1:3])
                heads = math.prod(a.size or 1 for a in block.tensor(op.inputs[0]).dims[-2].atoms)
                pages = self.pages(layer, block, op)
                program.keep_alive.append(pages)
                program.add(
                    # The struct has three operands, and attention four: `after` and `width` say where the values begin
                    # and how far their rows lie apart.
                    "attend", places={**places, "with_": k}, after=v.at, width=v.row, heads=heads,
                    flags=pages.group, more=pages.address,
                )  # fmt: skip
            case "gates" | "adds":
                gates = op.does == "gates"
                program.add(
                    "glu" if gates else "add", places={**places, "with_": at[op.inputs[1]]}, width=width,
                    flags=GATES[str(op.attr("fn", "silu"))] if gates else 0,
                    first=float(_value(op, "factor", 1.0)),
                )  # fmt: skip
            case "scales":
                factor = torch.tensor(_value(op, "factor", 1.0), dtype=program.dtype).item()
                program.add("scale", places={**places, "with_": source}, width=width, first=factor)

    def _linear(
        self,
        layer: Layer,
        block: Block,
        index: int,
        at: dict[str, _Place],
        readers: Mapping[str, list[Op]],
        room: Callable[[str], _Place],
        brief: frozenset[str],
        last: bool,
    ) -> set[str]:
        """A product, with what reads the same rows beside it, or with the sum that alone reads it; paths that are
        done."""
        program, op = self.program, block.ops[index]
        source = at[op.inputs[0]]
        factor = float(_value(op, "factor", 1.0))
        both: dict[str, Any] = {"width": _inner(block, op), "first": factor}
        out = op.outputs[0]
        if last and (out in block.outputs or [o.does for o in readers[out]] == ["caps"]):
            weight, bias = self._packed(layer, block, [op], head=True)
            program.multiply("logits", weight, bias, **both, places={"in_": source}, out_width=self._width(block, out))
            return {op.path}
        plain = [
            o
            for o in block.ops[index:]
            if o.is_dense_linear
            and o.inputs[0] == op.inputs[0]
            and not o.attr("factor", 0)
            and not self.share.sums(block, o)
        ]
        if len(plain) > 1 and op in plain:
            widths = [self._width(block, o.outputs[0]) for o in plain]
            rows = program.room(sum(widths), brief=brief.issuperset(one.outputs[0] for one in plain))
            weight, bias = self._packed(layer, block, plain)
            program.multiply("linear", weight, bias, **both, places={"in_": source, "out": rows}, out_width=sum(widths))
            begins = accumulate(widths, initial=0)
            for one, begin in zip(plain, begins, strict=False):
                at[one.outputs[0]] = rows.part(begin, program.dtype.itemsize)
                self._adapt(layer, block, one, source, at[one.outputs[0]])
            return {o.path for o in plain}
        weight, bias = self._packed(layer, block, [op])
        following = readers.get(out, [])
        if len(following) == 1 and following[0].does == "adds" and factor == 1.0 and out not in block.outputs:
            added = following[0]
            other = next(name for name in added.inputs if name != out) if added.inputs[0] != added.inputs[1] else ""
            # The sum is a + factor * b: only as b is the product what `factor` multiplies.
            if other in at and out == added.inputs[1]:
                place = at[added.outputs[0]] = room(added.outputs[0])
                by = float(_value(added, "factor", 1.0))
                # of ranks that have terms of the sum, one adds what was there before
                second_place = {} if self._leaves_to_others(block, op) else {"with_": at[other]}
                program.multiply(
                    "linear", weight, bias, **{**both, "first": by}, out_width=self._width(block, out),
                    places={"in_": source, "out": place, **second_place},
                )  # fmt: skip
                self._adapt(layer, block, op, source, place, by)
                self._sum(block, op, place)
                return {op.path, added.path}
        at[out] = room(out)
        program.multiply(
            "linear", weight, bias, **both, places={"in_": source, "out": at[out]}, out_width=self._width(block, out)
        )
        self._adapt(layer, block, op, source, at[out])
        self._sum(block, op, at[out])
        return {op.path}

    def _brief(self, block: Block) -> frozenset[str]:
        """Tensors that are made and read between the same two ops that look beyond a token, or that ranks add up: they
        are there for some tokens at a time."""
        between, where, linears, needed = (
            0,
            dict[str, set[int]](),
            dict[str, set[int]](),
            {*block.inputs, *block.outputs},
        )
        for op in block.ops:
            between += op.does == "attends"
            runs = {between}
            if op.is_dense_linear:  # beside the first that reads the same rows
                runs |= linears.setdefault(op.inputs[0], runs)
                linears[op.outputs[0]] = runs
            if op.does == "adds":  # with the linear whose rows it alone reads
                runs |= {one for name in op.inputs for one in linears.get(name, ())}
            for name in (*op.inputs, *op.outputs):
                where.setdefault(name, set()).update(runs)
            if _hands_rows_on(op) or op.does == "rotates":  # in the same rows
                needed |= {*op.inputs, *op.outputs}
            # Attention is a run of its own, counted before it and after it: what it reads is made in the run before and
            # read here, so it is in two runs and has rows of all tokens. After a sum over ranks a run begins too, but
            # what the linear before it reads is still of the tokens at hand.
            between += op.does == "attends" or self.share.sums(block, op)
        return frozenset(name for op in block.ops for name in op.outputs if len(where[name]) == 1) - needed

    def _sum(self, block: Block, op: Op, place: _Place) -> None:
        """Ranks add up what they have terms of."""
        if self.share.sums(block, op):
            self.program.stop(partial(self.program.sum, place))

    def _leaves_to_others(self, block: Block, op: Op) -> bool:
        return bool(self.share.tp.index) and self.share.sums(block, op)

    def _adapt(self, layer: Layer, block: Block, op: Op, source: _Place, place: _Place, by: float = 1.0) -> None:
        """What adapters add to a linear that is written. by: what it was multiplied by."""
        rows = kernel_args(self.adapters, layer.call.parameter_name(op.inputs[1], layer.index))
        if rows is None:
            return
        self.program.keep_alive += [rows, *self.adapters]
        self.program.add(
            "adapt", places={"in_": source, "out": place}, width=_inner(block, op),
            out_width=self._width(block, op.outputs[0]), more=ctypes.addressof(rows), first=by,
        )  # fmt: skip

    def _packed(
        self, layer: Layer, block: Block, ops: list[Op], *, head: bool = False
    ) -> tuple[AnyPacked, Tensor | None]:
        name = " ".join(layer.call.parameter_name(op.inputs[1], layer.index) for op in ops)

        def parts() -> list[Part]:
            return [part for op in ops for part in self._parts(layer, block, op)]

        weight = self.matrices.packed(name, parts, head=head)
        has = [len(op.inputs) > 2 and not self._leaves_to_others(block, op) for op in ops]
        if not any(has):
            return weight, None
        biases = [
            self._weight(layer, block, op.inputs[2]).flatten().float()
            if own
            else torch.zeros(self._width(block, op.outputs[0]))
            for op, own in zip(ops, has, strict=True)
        ]
        return weight, torch.cat(biases)

    def _parts(self, layer: Layer, block: Block, op: Op) -> list[Part]:
        """Lists the parts of a linear's matrix (outputs, inputs)."""
        if codes := self.weights.codes(layer.call.parameter_name(op.inputs[1], layer.index)):
            return [*codes]
        name = layer.call.parameter_name(op.inputs[1], layer.index)
        weight, inner = self.weights.mapped(name), _inner(block, op)
        first = block.tensor(op.inputs[1]).dims[0].atoms[0].name in op.contracts
        return [weight.reshape(inner, -1).T if first else weight.reshape(-1, inner)]

    def _embed(self, layer: Layer, block: Block, op: Op, place: _Place) -> None:
        name = layer.call.parameter_name(op.inputs[1], layer.index)
        width, program = self._width(block, op.outputs[0]), self.program
        values: dict[str, Any] = {"places": {"out": place}, "width": width}
        if self.share.sums(block, op):  # zeros for rows that others have
            rows = block.tensor(op.inputs[1]).dims[0].size or 0
            values |= {"with_": rows * self.share.tp.index, "with_row": rows}
        multiplied = any(
            other.is_dense_linear and later.call.parameter_name(other.inputs[1], later.index) == name
            for later in self.graph.layers()
            for other in self.graph.block(later.call.block).ops
        )
        if not multiplied:
            table = self.weights[name].view(-1, width).to(program.dtype)
            program.add("embed", tensors=(table, None), **values, flags=TABLES.index("rows"))
            return
        packed = self.matrices.packed(name, lambda: [self.weights.mapped(name).view(-1, width)], head=True)
        assert isinstance(packed, PackedStored), "a head is laid whole"
        self.program.weights.append(packed)
        scales = None if packed.scales is None else packed.scales.flatten().float()
        kind = "numbers" if scales is None else "codes"
        program.add("embed", tensors=(packed.codes, scales), **values, heads=packed.form.side, flags=TABLES.index(kind))

    def _angles(self, op: Op, width: int) -> tuple[Tensor, Tensor]:
        key = (op.attrs, width)
        if key not in self.angles:
            positions = self.sizes.max_len
            cos, sin = shared_tables(op.attrs, positions, width, torch.float32, torch.device("cpu"))
            # Rounded to the model's dtype, as the tables are where ops run one by one, then widened: the kernel reads
            # float32.
            self.angles[key] = cos.to(self.program.dtype).float(), sin.to(self.program.dtype).float()
        return self.angles[key]

    def _weight(self, layer: Layer, block: Block, name: str) -> Tensor:
        """Returns a weight as it is computed with."""
        return self._raw_weight(layer, block, name).to(self.program.dtype)

    def _raw_weight(self, layer: Layer, block: Block, name: str) -> Tensor:
        """Returns a weight in its file's dtype."""
        return self.weights[layer.call.parameter_name(name, layer.index)].view(
            [math.prod(atom.size or 1 for atom in dim.atoms) for dim in block.tensor(name).dims]
        )

    def _width(self, block: Block, name: str) -> int:
        return _size(block, name)


def _hands_rows_on(op: Op) -> bool:
    """Whether its result lies where its operand does: a view of whole rows, or dropout, which serving leaves out."""
    return op.rules.memory == "view" or op.does == "drops"


def _size(block: Block, name: str) -> int:
    """Elements of a token: dims without a size are its place."""
    return math.prod(atom.size or 1 for atom in block.tensor(name).atoms)


def _inner(block: Block, op: Op) -> int:
    """Elements that a product sums over."""
    return math.prod(a.size or 1 for a in block.tensor(op.inputs[1]).atoms if a.name in op.contracts)


def _value(op: Op, name: str, default: float) -> float:
    value = op.attr(name, default)
    assert isinstance(value, int | float)
    return value

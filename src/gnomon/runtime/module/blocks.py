"""A block of the Graph as it runs on one rank: its ops one by one, with the collectives that `sharding` says between.

`BlockRun(sharded, axes)` works out once which layouts change where; `run(inputs, weights)` is a forward that autograd
can go back through. A tensor that several ops want in another layout is brought there once, and its gradient comes home
once; a linear keeps its input as it lies between ops and gathers it again for its weight gradient. Leaves out which
blocks a stage has, and in which order stages run (`execute`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gnomon.errors import PlanError
from gnomon.graph import Block
from gnomon.plans import Split
from gnomon.plans.replicas import Placement
from gnomon.runtime.data.packing import Packing
from gnomon.runtime.module.block_ops import BlockOp, Need, OpInput
from gnomon.runtime.module.moves import Move, move_through, run, steps
from gnomon.runtime.module.straight import Straight, straight
from gnomon.runtime.ops import check_block, function_of
from gnomon.runtime.ops.captured import AtenCall, calls, captured, random_draws, written_linears
from gnomon.runtime.ops.collective_matmul import TokenCut, TokenWeight, gathered_linears, scattered_linear
from gnomon.runtime.ops.gathered import gathered_combine, gathered_dispatch, gathered_routing
from gnomon.runtime.ops.linear import linear, operand_of, result_of
from gnomon.runtime.ops.routing import Routing, combine, dispatch, grouped_linear, routing_of
from gnomon.runtime.ops.site import ALONE, Axis, Operand, Site, is_given
from gnomon.runtime.ops.speculation import Guess, speculated
from gnomon.runtime.parameters.parameters import Weight
from gnomon.sharding import ShardedBlock
from gnomon.sharding.block import ShardedOp
from gnomon.tensors.layout import Sharding
from gnomon.tensors.names import TOKEN_DIMS, base, is_sequence

Weights = Callable[[str, int], Weight]
"""(name of a parameter in its block, how many of its leading dims a matrix has as rows) -> this rank's part of it."""

ROUTED = ("dispatches", "multiplies rows", "combines", "counts the step")
"""What ops do that read where tokens went."""

SIZES = 64
"""Batches of other sizes whose captured ops are kept ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How many rows an expert takes of a rank's tokens."""

    over_mean: float = 0.0
    """Times the mean; 0 for all there are."""
    padded: bool = False
    """Whether it always computes so many."""
    by_weight: bool = False
    """Whether tokens of least weight are dropped first, and not the last ones."""


UNLIMITED = Capacity()
"""All rows."""


class BlockRun:
    """One block on one rank."""

    def __init__(
        self,
        sharded: ShardedBlock,
        axes: Mapping[str, Axis],
        *,
        keep_gathered: bool = False,
        capacity: Capacity = UNLIMITED,
        splits: Sequence[Split] = (),
        gathers: bool = False,
    ) -> None:
        """Takes capacity, rows that an expert takes of a rank's tokens, splits, linears that are cut along their tokens
        (`cut_linears`), and gathers, whether tokens go to their experts by a gather over ep and not an all-to-all."""
        check_block(sharded.block)
        self.capacity = capacity
        self.gathers = gathers and axes.get("ep", ALONE).ranks > 1
        self.block, self.axes, self.keep_gathered = sharded.block, axes, keep_gathered
        self.homes = sharded.homes
        tp = axes.get("tp", ALONE).ranks
        outputs = [pair for op in sharded.ops for pair in zip(op.op.outputs, op.strategy.outputs, strict=True)]
        self.copies = {name: 1 if "tp" in sharding.partial else tp for name, sharding in outputs}
        """Output -> ranks of tp that compute the same of it, where it is a loss: others have a term of it each."""
        self.captured = any(op.captured is not None for op in sharded.block.ops)
        self._check_kv_heads()
        self.drawing = frozenset(op.path for op in sharded.block.ops if random_draws(op))
        """Ops that draw random numbers."""
        self.whole = whole = {dim.name: dim.size for dim in self.block.dims if dim.size is not None}
        self.extents = {
            o.op.path: {
                **whole,
                **{d.name: d.size for t in o.op.captured.tensors for d in t.atoms if d.size is not None},
                **{name: int(size) for name, size in o.sizes.items()},
            }
            for o in sharded.ops
            if o.op.captured is not None
        }
        self.ways = {o.op.path: _ways(o, axes) for o in sharded.ops if o.op.captured is not None}
        """Of a captured op: into how many parts ranks divide the dims that it works on parts of."""
        self.dims = {t.name: tuple(tuple(a.name for a in dim.atoms) for dim in t.dims) for t in self.block.tensors}
        block_inputs = self.block.inputs if self.block.part_of is None else self.block.part_of.inputs
        self.free = {
            name
            for name in self.block.inputs
            if name in block_inputs and not self.block.tensor(name).is_float and not self.captured
        }
        """Integers that every rank has as each op wants them."""
        reads: dict[str, str] = {}
        for op in self.block.ops:
            # The last reader wins: after it the tensor may go.
            reads.update(dict.fromkeys(op.inputs, op.path))
        block_outputs = set(self.block.outputs)
        self.ops = [
            self._compiled(op, tuple(n for n, path in reads.items() if path == op.op.path and n not in block_outputs))
            for op in sharded.ops
        ]
        self.by_path = {op.site.op.path: op for op in self.ops}
        self.aten_calls = dict[tuple[Hashable, ...], list[AtenCall]]()
        """Of captured ops, at the sizes that were seen: what runs."""
        self.lines = dict[tuple[Hashable, ...], Straight]()
        """The whole of it, where nothing looks at each op."""
        self.plain = self.axes.get("tp", ALONE).ranks == 1 and all(op.does not in ROUTED for op in self.block.ops)
        self.written = written_linears(self.block)
        self.cuts = cut_linears(self.ops, splits)

    def _check_kv_heads(self) -> None:
        """PlanError for a captured model with fewer key-value heads than ranks of tp: its code's views would need to
        add up gradients of a head that several ranks hold."""
        tp = self.axes.get("tp", ALONE).ranks
        few = [d for d in self.block.dims if base(d.name) == "kv_heads" and d.size is not None and d.size < tp]
        if self.captured and few:
            raise PlanError(
                f"{self.block.name}: tp = {tp} is above {few[0].name} = {few[0].size}, and the runtime does not hold a "
                f"captured model's key-value head on several ranks; use tp = {few[0].size}"
            )

    def _compiled(self, sharded: ShardedOp, last: tuple[str, ...]) -> BlockOp:
        op, strategy = sharded.op, sharded.strategy
        inputs: list[OpInput | str] = []
        parts: dict[str, tuple[Move, ...]] = {}
        for name, input_layout, terms in zip(op.inputs, strategy.inputs, strategy.grad_partial, strict=True):
            tensor = self.block.tensor(name)
            if tensor.kind == "state" and self.captured:  # every rank has all of it
                parts[name] = steps(Sharding(), input_layout, self.dims[name], self.axes)
            elif tensor.kind == "state" and len(tensor.dims) == 1:  # positions: a rank has those of its cp part
                parts[name] = self._steps(_over_cp(input_layout), input_layout, name)
            if tensor.kind == "parameter" and op.captured is not None and input_layout != self.homes[name]:
                raise PlanError(
                    f"{op.path} ({op.captured.where}) wants all of {name}, which ranks have parts of "
                    f"({self.homes[name]}); say how it divides with gnomon.op_sharding, or use "
                    f"{_axes_of(self.homes[name])} = 1"
                )
            if not tensor.is_activation:
                inputs.append(name)
                continue
            home = self.homes[name]
            if name in self.free:  # as the batch has it, but that of a captured model, which is brought before
                home = input_layout if self.captured else _over_cp(input_layout)
            there = self._steps(home, input_layout, name)
            # Gradients come as the op leaves them, with terms of sums where the op makes only such, and go home.
            back = self._steps(input_layout.with_partial(*terms), home, name) if tensor.is_float else ()
            inputs.append(OpInput((name, input_layout, terms), there, back))
        leave, enter = list[tuple[Move, ...]](), list[tuple[Move, ...]]()
        for name, output_layout in zip(op.outputs, strategy.outputs, strict=True):
            if not self.block.tensor(name).dims:  # a loss is added up with the reported ones
                leave.append(())
                enter.append(())
                continue
            home = self.homes[name]
            leave.append(self._steps(output_layout, home, name))
            # The gradient of a partial sum is needed whole by every rank that has a term.
            enter.append(self._steps(home, Sharding(shards=output_layout.shards), name))
        over = str(op.attr("over", "")) if op.does == "normalises" and op.attr("fn", "") != "group" else ""
        if over and any(axis in self.axes and self.axes[axis].ranks > 1 for axis in strategy.inputs[0].axes_of(over)):
            raise PlanError(f"{op.path}: the runtime does not norm over {over}, which ranks divide; use tp = 1")
        if op.does == "attends":
            _check_attention(sharded)
        first = strategy.inputs[0].dim_of("etp") if strategy.inputs else None  # what makes positions reads nothing
        sums = first is not None and strategy.outputs[0].dim_of("etp") is None
        if op.does == "multiplies rows" and len(op.inputs) > 2 and sums:
            raise PlanError(f"{op.path}: the runtime does not divide the width of experts with biases; use etp = 1")
        site = Site(
            op=op,
            block=self.block,
            strategy=strategy.name,
            axes=self.axes,
            divided=_dividing_positions(op.inputs[:1], strategy.inputs[:1], self.block),
            keep_gathered=self.keep_gathered,
            ways=_ways(sharded, self.axes),
        )
        no_grad = site.attr("no_grad", False)
        return BlockOp(site, tuple(inputs), tuple(leave), tuple(enter), last, any(leave) or any(enter), parts, no_grad)

    def entry(self, name: str) -> tuple[Move, ...]:
        """An input of a captured model, as the batch has it, to where the block reads it."""
        home = self.homes[name]
        return self._steps(_over_cp(home), home, name)

    def _steps(self, source: Sharding, target: Sharding, name: str) -> tuple[Move, ...]:
        return steps(source, target, self.dims[name], self.axes, sized=self.captured)

    def run(
        self,
        inputs: Mapping[str, Tensor],
        weights: Weights,
        state: Callable[[str], Tensor],
        *,
        again: frozenset[str] = frozenset(),
        packing: Packing | None = None,
        sizes: Mapping[str, int] | None = None,
        compute: torch.dtype = torch.float32,
        seen: Callable[[str, Tensor], None] | None = None,
        keeper: Watcher | None = None,
        routed: Callable[[Tensor], None] | None = None,
        placement: Placement | None = None,
        routings: dict[str, Routing] | None = None,
        guess: Guess | None = None,
        counted: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Computes the block and returns its outputs by name. state: of position ids and the like. again: paths of ops
        whose inside is computed again in backward. packing: of rows that hold several documents. sizes: of dims on this
        rank that captured ops ask for. compute: what they compute in. seen: is told what each op makes. keeper: decides
        what is kept for backward. routed: is told which experts tokens choose, (…, topk). placement: of experts on
        ranks of ep. routings: by name, of rows that another part of the layer has sent; those of rows that this one
        sends or makes are added. guess: of the rows of its dispatch. counted: what routers' load (rows, 2 or 3,
        experts) makes of the choices of the step so far; None: this microbatch is all there is."""
        frame = Frame(self, dict(inputs), weights, state, packing, dict(sizes or {}), compute)
        frame.routed, frame.placement, frame.guess = routed, placement, guess
        frame.counted = counted
        if routings is not None:
            frame.routings = routings
        # Nobody looks at single ops: all of them run as one function without the interpreter in between.
        if keeper is None and seen is None and not again and self.plain:
            self._straight(frame)(frame, frame.values)
            return {name: frame.values[name] for name in self.block.outputs}
        if keeper is None:
            for op in self.ops:
                frame.do(op, again=op.site.op.path in again, seen=seen)
            return {name: frame.values[name] for name in self.block.outputs}
        with keeper.watching(frame):
            for index, op in enumerate(self.ops):
                keeper.begin(index)
                outputs = frame.do(op, again=False, seen=seen)
                keeper.end(outputs)
            return {name: frame.values[name] for name in self.block.outputs}

    def _straight(self, frame: Frame) -> Straight:
        """Its ops as one function, at the sizes of the frame."""
        given_names = frozenset(name for name in self.block.inputs if is_given(frame.values[name]))
        key = (given_names, *frame.sizes.items(), frame.compute, frame.device)
        if (line := self.lines.get(key)) is None:
            # All at once: sizes that still come are written again, those that do not are let go.
            if len(self.lines) >= SIZES:
                self.lines.clear()
            of = {op.site.op.path: frame.calls(op) for op in self.ops if op.site.op.captured is not None}
            line = self.lines[key] = straight(self.block.name, self.ops, of, given_names)
        return line


@dataclass(frozen=True, slots=True)
class CutLinear:
    """A linear that is cut along its tokens."""

    token_cut: TokenCut
    together: tuple[str, ...]
    """Paths of the linears that read the same gathered tokens, in their order; none where its result is scattered."""


def cut_linears(ops: Sequence[BlockOp], splits: Sequence[Split]) -> dict[str, CutLinear]:
    """Finds the linears of a block, by path, whose collective over tp is cut as the plan says. Inputs are cut where
    linears alone read them."""
    chosen = [op for op in ops if any(fnmatchcase(op.site.op.path, split.op) for split in splits)]
    linears = [op for op in chosen if op.site.op.is_dense_linear]
    readers: dict[Need, list[BlockOp]] = {}
    for op in ops:
        for op_input in op.inputs:
            if isinstance(op_input, OpInput):
                readers.setdefault(op_input.need, []).append(op)
    found = {}
    for op in linears:
        first, path = op.inputs[0], op.site.op.path
        assert isinstance(first, OpInput)
        if (cut := _cut_of(op.leave[0], op.enter[0], "reduce_scatter")) is not None:
            found[path] = CutLinear(cut, ())
        elif (cut := _cut_of(first.there, first.back, "all_gather")) is not None:
            together = readers[first.need]
            if all(any(one is other for other in linears) and not one.moves for one in together):
                found[path] = CutLinear(cut, tuple(one.site.op.path for one in together))
    return found


def _cut_of(there: tuple[Move, ...], back: tuple[Move, ...], kind: str) -> TokenCut | None:
    """The cut of a linear whose tokens are exchanged by `kind`, and their gradient by its opposite; None for others."""
    other = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[kind]
    # One exchange each way, and nothing besides.
    if [step.kind for step in there] != [kind] or [step.kind for step in back] != [other]:
        return None
    step = there[0]
    # Other orders would cut tokens that do not lie next to each other.
    plain = not step.outer and step.axis.order == "contiguous" and (step.axis, step.dim) == (back[0].axis, back[0].dim)
    return TokenCut(step.axis, step.dim) if plain else None


class Watcher(Protocol):
    """What sees a block's forward op by op (`saving`)."""

    def watching(self, frame: Frame) -> AbstractContextManager[None]:
        """The whole of it."""

    def begin(self, index: int) -> None:
        """Is called before an op."""

    def end(self, outputs: Mapping[str, Tensor]) -> None:
        """Is called after it, with the tensors that it wrote."""


class Frame:
    """Tensors of one run of a block."""

    def __init__(
        self,
        owner: BlockRun,
        values: dict[str, Tensor],
        weights: Weights,
        state: Callable[[str], Tensor],
        packing: Packing | None,
        sizes: dict[str, int],
        compute: torch.dtype,
    ) -> None:
        self.owner, self.values, self.weights, self.state = owner, values, weights, state
        self.packing, self.sizes, self.compute = packing, sizes, compute
        self.device = next((x.device for x in values.values()), torch.device("cpu"))
        self.brought: dict[Need, Tensor] = {}
        self.regathered: dict[Need, list[Any]] = {}
        self.routings: dict[str, Routing] = {}
        self.routed: Callable[[Tensor], None] | None = None
        """Is told which experts tokens choose."""
        self.placement: Placement | None = None
        """The expert in each slot of ranks of ep; None for their usual order."""
        self.guess: Guess | None = None
        """How many rows go where, for the dispatch to send ahead by; None where it waits for the numbers."""
        self.counted: Callable[[Tensor], Tensor] | None = None
        """Of a router's load, how many tokens chose each expert in the step so far; None: those of the load are all."""
        self.only: frozenset[str] | None = None
        """Paths of the ops that are run, where others are left out."""
        self.ready: dict[str, Tensor] = {}
        """Of linears that read the same gathered tokens: what the first of them made for the others."""
        self.extents = {**owner.whole, **sizes}

    def anew(self, values: dict[str, Tensor]) -> Frame:
        """Another run with the same parameters, from other tensors."""
        frame = Frame(self.owner, values, self.weights, self.state, self.packing, self.sizes, self.compute)
        frame.device, frame.placement, frame.guess = self.device, self.placement, self.guess
        frame.counted = self.counted
        frame.routings = dict(self.routings)
        return frame

    def do(
        self, op: BlockOp, *, again: bool, seen: Callable[[str, Tensor], None] | None = None
    ) -> Mapping[str, Tensor]:
        """Runs an op and returns what it makes."""
        if op.no_grad and torch.is_grad_enabled():
            with torch.no_grad():
                return self.do(op, again=False, seen=seen)
        site = op.site
        if site.op.is_dense_linear:
            result = self._linear(op)
            out: Tensor | tuple[Tensor, ...] = result.clone() if site.op.outputs[0] in self.owner.written else result
        elif site.op.does == "counts the step" and self.counted is not None:
            load = self.operand(op, op.inputs[0])
            assert isinstance(load, Tensor)
            out = self.counted(load)
        elif site.op.rules.runs == "engine":
            out = self._experts(op)
        else:
            operands = [self.operand(op, op_input) for op_input in op.inputs]
            function = function_of(site.op.kind) if site.op.captured is None else self._captured(op)
            if site.op.rules.documents and self.packing is not None:
                function = partial(function, packing=self.packing)
            try:
                if again:
                    out = checkpoint(function, site, *operands, use_reentrant=False, preserve_rng_state=False)
                else:
                    out = function(site, *operands)
            except RuntimeError as error:
                raise self._not_divided(site, error) from error
            if of := next(
                (name for name in site.op.inputs if name in self.routings), None
            ):  # between experts' products
                self.routings.update(dict.fromkeys(site.op.outputs, self.routings[of]))
            if op.moves:
                outs = out if isinstance(out, tuple) else (out,)
                ways = zip(outs, op.leave, op.enter, strict=True)
                out = tuple(move_through(x, there, back, self.extents) for x, there, back in ways)
        named = dict(zip(site.op.outputs, out if isinstance(out, tuple) else (out,), strict=True))
        self.values.update(named)
        if seen is not None:
            for name, x in named.items():
                seen(name, x)
        for name in op.last:
            self.values.pop(name, None)
            if self.brought:
                # Copies in other layouts go with the tensor itself.
                for need in [need for need in self.brought if need[0] == name]:
                    del self.brought[need]
        return named

    def _not_divided(self, site: Site, error: RuntimeError) -> Exception:
        """What to say where an op of a captured model does not take the parts that ranks of tp have."""
        tp = self.owner.axes.get("tp", ALONE).ranks
        if not self.owner.captured or tp == 1:
            return error
        reason = str(error).splitlines()[0]
        where = f" ({site.op.captured.where})" if site.op.captured is not None and site.op.captured.where else ""
        return PlanError(
            f"{self.owner.block.name}: {site.op.path}{where} does not run divided by tp = {tp} ({reason}); use tp = 1"
        )

    def _captured(self, op: BlockOp) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        return partial(captured, self.calls(op), self.device)

    def calls(self, op: BlockOp) -> list[AtenCall]:
        """The ATen ops of a captured op, at the sizes of this rank."""
        owner, path = self.owner, op.site.op.path
        key = (path, *self.sizes.items(), self.compute, self.device)
        if (aten_calls := owner.aten_calls.get(key)) is None:
            ways, cp = owner.ways[path], owner.axes.get("cp", ALONE).ranks
            whole = {name: size * (cp if is_sequence(name) else 1) for name, size in self.sizes.items()}
            parts = {name: size // ways.get(name, 1) for name, size in whole.items()}
            here, there = {**owner.extents[path], **parts}, {**owner.whole, **whole}
            if len(owner.aten_calls) >= SIZES * len(owner.ops):
                owner.aten_calls.clear()
            aten_calls = owner.aten_calls[key] = calls(op.site.op, here, there, self.compute, self.device)
        return aten_calls

    def operand(self, op: BlockOp, op_input: OpInput | str) -> Operand:
        """What an op reads: an activation, a buffer, or a parameter."""
        if isinstance(op_input, OpInput):
            return self._brought(op_input)
        tensor = self.owner.block.tensor(op_input)
        if tensor.kind == "state" and (not tensor.is_float or self.owner.captured):
            value, parts = self.state(op_input), op.parts.get(op_input)
            if parts and value.ndim > len(tensor.dims):  # within packed documents: a row for each of the batch
                parts = tuple(replace(step, dim=step.dim + 1) for step in parts)
            return run(value, parts) if parts else value
        rows = op.site.weight_rows if op.site.op.contracts and op_input == op.site.op.inputs[1] else 0
        return self.weights(op_input, rows if op.site.op.contracts else max(0, len(tensor.dims) - 1))

    def _brought(self, op_input: OpInput) -> Tensor:
        """The activation in the layout that the op wants; brought there once."""
        if not op_input.there and not op_input.back:
            return self.values[op_input.need[0]]
        value = self.brought.get(op_input.need)
        if value is None:
            value = move_through(self.values[op_input.need[0]], op_input.there, op_input.back, self.extents)
            self.brought[op_input.need] = value
        return value

    def _linear(self, op: BlockOp) -> Tensor:
        first, *names = op.inputs
        assert isinstance(first, OpInput)
        if (cut := self.owner.cuts.get(op.site.op.path)) is not None:
            return self._cut(op, cut)
        weight, *bias = (self._weight(op, name) for name in names)
        x = self._brought(first)
        # Nobody wants the gradient of the batch: a matmul less in backward.
        x = x.detach() if is_given(x) else x
        gathers = any(step.kind == "all_gather" for step in first.there)
        options: dict[str, Any] = {}
        # Kept for backward is the tensor as it lies between ops, a part; the weight gradient gathers it once more.
        if gathers and not self.owner.keep_gathered:
            options |= {"home": self.values[first.need[0]], "gather": self._gather(first)}
        exchanged = any(step.kind == "all_to_all" for step in op.leave[0])  # no sums: each part has its bias
        if not exchanged and (op.leave[0] or op.enter[0]):
            leave, enter, sizes = op.leave[0], op.enter[0], self.extents  # not the frame, whose tensors hold these
            options |= {
                "leave": lambda out: run(out, leave, own=True, sizes=sizes),
                "enter": lambda grad: run(grad, enter, sizes=sizes),
            }
        out = linear(op.site, x, weight, bias[0] if bias else None, **options)
        return move_through(out, op.leave[0], op.enter[0], self.extents) if exchanged else out

    def _cut(self, op: BlockOp, cut: CutLinear) -> Tensor:
        path = op.site.op.path
        if path in self.ready:
            return self.ready.pop(path)
        together = [other for other in cut.together if self.only is None or other in self.only]
        first = op.inputs[0]
        assert isinstance(first, OpInput)
        if not together:
            x = operand_of(op.site, self._brought(first))
            weight = self._token_weight(op)
            return result_of(op.site, scattered_linear(x, cut.token_cut, weight), weight.weight)
        ops = [self.owner.by_path[other] for other in together]
        home = operand_of(op.site, self.values[first.need[0]])
        weights = [self._token_weight(one) for one in ops]
        gathered = gathered_linears(home, cut.token_cut, weights, keep=self.owner.keep_gathered)
        outs = [result_of(one.site, x, p.weight) for one, x, p in zip(ops, gathered, weights, strict=True)]
        self.ready |= dict(zip(together[1:], outs[1:], strict=True))
        return outs[0]

    def _token_weight(self, op: BlockOp) -> TokenWeight:
        weight, *bias = (self._weight(op, name) for name in op.inputs[1:])
        return TokenWeight(weight, bias[0] if bias else None, op.site.inner_first)

    def _gather(self, op_input: OpInput) -> Callable[[Tensor], Tensor]:
        """Gathers an input again, once for all linears that read it: the last of them lets it go."""
        gathered_of_home = self.regathered.setdefault(op_input.need, [None, 0])
        gathered_of_home[1] += 1
        sizes = self.extents  # not the frame, whose tensors hold this function

        def gather(home: Tensor) -> Tensor:
            if gathered_of_home[0] is None:
                gathered_of_home[0] = run(home, op_input.there, sizes=sizes)
            gathered_of_home[1] -= 1
            gathered = gathered_of_home[0]
            if not gathered_of_home[1]:
                gathered_of_home[0] = None
            return gathered

        return gather

    def _weight(self, op: BlockOp, name: OpInput | str) -> Weight:
        weight = self.operand(op, name)
        assert isinstance(weight, Weight)
        return weight

    def _experts(self, op: BlockOp) -> Tensor:
        site, names = op.site, op.site.op.inputs
        first, *others = (self.operand(op, op_input) for op_input in op.inputs)
        assert isinstance(first, Tensor)
        ep, etp = site.axis("ep"), site.axis("etp")
        if site.op.does == "dispatches":
            (indices,) = others
            assert isinstance(indices, Tensor)
            came = None
            if self.owner.gathers:
                experts, how = self._sent_how(op, indices)
                routing = gathered_routing(indices, experts, **{k: v for k, v in how.items() if k != "placement"})
                self.routings[names[1]] = self.routings[site.op.outputs[0]] = routing
                return gathered_dispatch(first, routing, ep=ep, etp=etp)
            if self.guess is None:
                routing = self.route(op, indices)
            else:
                experts, how = self._sent_how(op, indices)
                routing, came = speculated(first, indices, experts, self.guess, **how)
            self.routings[names[1]] = self.routings[site.op.outputs[0]] = routing
            return dispatch(first, routing, ep=ep, etp=etp, came=came)
        routing = self.routings[names[0]]
        if site.op.does == "multiplies rows":
            weight, bias = (*others, None)[:2]
            assert isinstance(weight, Weight) and not isinstance(bias, Tensor)
            self.routings[site.op.outputs[0]] = routing
            inner_first = self.owner.block.tensor(names[1]).dims[1].atoms[0].name in site.op.contracts
            return grouped_linear(first, weight, routing, bias, inner_first=inner_first)
        weights, _ = others
        assert isinstance(weights, Tensor)
        if routing.gathered:
            return gathered_combine(first, weights, routing, ep=ep, etp=etp)
        return combine(first, weights, routing, ep=ep, etp=etp)

    def route(self, op: BlockOp, indices: Tensor) -> Routing:
        """The routing of a dispatch: which rows go to which experts on which ranks."""
        experts, how = self._sent_how(op, indices)
        return routing_of(indices, experts, **how)

    def _sent_how(self, op: BlockOp, indices: Tensor) -> tuple[int, dict[str, Any]]:
        """(experts of the layer, how rows are sent to them: the arguments of `routing_of`)."""
        site, block = op.site, self.owner.block.part_of or self.owner.block
        dims = {dim.name: dim.size for tensor in block.tensors for dim in tensor.atoms}
        experts = dims[site.attr("experts", "")] or 0
        if self.routed is not None:
            self.routed(indices[indices < experts])
        capacity = self.owner.capacity
        by = self.values[self._weights_of(site.op.inputs[1])] if capacity.by_weight and capacity.over_mean else None
        how = {
            "ep": site.axis("ep"),
            "etp": site.axis("etp"),
            "capacity": capacity.over_mean,
            "padded": capacity.padded,
        }
        return experts, {**how, "weights": by, "placement": self.placement}

    def _weights_of(self, indices: str) -> str:
        """The name of the weights by which the rows of the experts with these indices are added up."""
        ops = (op.site.op for op in self.owner.ops if op.site.op.does == "combines")
        return next(op.inputs[1] for op in ops if op.inputs[2] == indices)


def _check_attention(sharded: ShardedOp) -> None:
    """PlanError where layout rules divide positions over tp, or queries otherwise than keys and values."""
    dims = [sharding.dim_of("tp") for sharding in sharded.strategy.inputs[:3]]
    if positions := [dim for dim in dims if dim is not None and base(dim) in TOKEN_DIMS]:
        raise PlanError(
            f"{sharded.op.path}: layout.rules leave heads whole, so that tp divides {positions[0]}, which the "
            f"runtime's attention does not do; use layout.sequence_parallel = false"
        )
    if len({dim is None for dim in dims}) > 1:
        raise PlanError(
            f"{sharded.op.path}: layout.rules have tp divide queries and not keys and values, or the other way round; "
            f"give heads and kv_heads the same rule"
        )


def _over_cp(sharding: Sharding) -> Sharding:
    """What only context parallelism divides of it, as batches are handed out."""
    return Sharding(shards=tuple(pair for pair in sharding.shards if pair[0] == "cp"))


def _dividing_positions(names: tuple[str, ...], layouts: tuple[Sharding, ...], block: Block) -> tuple[str, ...]:
    """Axes that divide the positions of the first input of an op, outermost first; none where it has no positions."""
    for name, layout in zip(names, layouts, strict=True):
        for dim in block.tensor(name).atoms:
            if base(dim.name) in TOKEN_DIMS:
                return layout.axes_of(dim.name)
    return ()


def _ways(op: ShardedOp, axes: Mapping[str, Axis]) -> dict[str, int]:
    """Parts of each dim that an op works on parts of."""
    shardings = (*op.strategy.inputs, *op.strategy.outputs)
    divided = {name: sharding for sharding in shardings for _, name in sharding.shards}
    return {
        name: prod(axes[axis].ranks for axis in sharding.axes_of(name) if axis in axes)
        for name, sharding in divided.items()
    }


def _axes_of(sharding: Sharding) -> str:
    return " and ".join(axis for axis, _ in sharding.shards)

"""Exchanges of experts in parts, each of some of every rank's experts: the rows of `methods.lina`.

A layer of experts is three stages of the Program: dispatch, experts, combine. `Parts` has a function for each of their
actions; the parts of one come in order. Rows of one part are at their experts while the next part's travel. All rows of
an expert are in one part, in the order of the whole, and gradients of weights are added once all are there, so results
are those of whole exchanges to the bit. Leaves out whole exchanges (`compute`), and how rows travel (`ops.routing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.lowering.exchanges import BACKWARD, FORWARD, TRAVEL
from gnomon.plans.expert_rows import COMBINE, DISPATCH, part_of
from gnomon.runtime.module.block_ops import BlockOp, OpInput
from gnomon.runtime.module.blocks import Frame
from gnomon.runtime.ops.routing import Routing, rows_of, shared_out, to_experts, to_tokens
from gnomon.runtime.parameters.parameters import Weight
from gnomon.runtime.step.buffers import Name
from gnomon.runtime.step.compute import Compute, SavedForBackward
from gnomon.runtime.step.rows import Action

SENT, MADE, DMADE, DSENT = TRAVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """A layer of experts: its three stages, and what its rows are called."""

    dispatch: int
    """Number of its stage; that of the experts, and of the combine, are the next two."""
    op: BlockOp
    """The dispatch."""
    tokens: str
    """Full name of what is sent."""
    indices: str
    """Of the experts that tokens choose."""
    rows: str
    """Of the rows that experts get."""
    results: str
    """Of what they make."""
    group: ProcessGroup
    """The ranks that exchange."""


@dataclass(slots=True, kw_only=True)
class _UnderWay:
    """One microbatch in one layer."""

    entered: Mapping[str, Tensor]
    """What the dispatch reads, and what later stages read that passes by, as leaves."""
    routing: Routing | None = None
    shares: tuple[Routing, ...] = ()
    sent: Tensor | None = None
    """All rows, where they leave."""
    edge: GradientEdge | None = None
    """Of them."""
    leaves: dict[int, Tensor] = field(default_factory=dict)
    """By part: rows that experts got."""
    results: dict[int, tuple[GradientEdge, Tensor]] = field(default_factory=dict)
    """By part: results, and where autograd goes back from."""
    home: Tensor | None = None
    """All results, back where their tokens are."""
    grads: dict[int, Tensor] = field(default_factory=dict)
    """By part: gradients of results, where the experts are."""
    back: Tensor | None = None
    """Gradients of all rows that left."""


class Parts:
    """Exchanges of one rank."""

    def __init__(self, graph: Graph, compute: Compute, parts: int) -> None:
        """Takes the graph of parts of layers. PlanError for what is not exchanged in parts."""
        self.compute, self.parts, self.stages = compute, parts, compute.stages
        self.layers: dict[int, _Layer] = {}
        """By each of their three stages."""
        for number, stage in self.stages.items():
            if part_of(graph, stage.layers[0]) == DISPATCH:
                layer = self._layer(number)
                self.layers |= dict.fromkeys((number, number + 1, number + 2), layer)
        self.under_way: dict[tuple[int, int], _UnderWay] = {}
        self.done: dict[tuple[str, int, int], int] = {}
        """(kind, stage, unit) -> parts of it that were begun."""

    def _layer(self, number: int) -> _Layer:
        stage = self.stages[number]
        run, names = stage.runs[stage.layers[0].call.block], stage.reads[0]
        (op,) = (op for op in run.ops if op.site.op.does == "dispatches")
        group = op.site.axis("ep").group
        moves = any(isinstance(op_input, OpInput) and (op_input.there or op_input.back) for op_input in op.inputs)
        if group is None or op.site.axis("etp").group is not None or moves or op.moves:
            raise PlanError(
                f"exchanges of {stage.layers[0].label} are not cut into parts under this layout; use all_to_all = 1"
            )
        back = self.stages[number + 2]
        into = back.runs[back.layers[0].call.block]
        (combine,) = (op for op in into.ops if op.site.op.does == "combines")
        tokens, indices = op.site.op.inputs
        return _Layer(
            dispatch=number,
            op=op,
            tokens=names[tokens],
            indices=names[indices],
            rows=stage.writes[0][op.site.op.outputs[0]],
            results=back.reads[0][combine.site.op.inputs[0]],
            group=group,
        )

    def actions(self) -> Mapping[str, Action]:
        """Maps each kind of row to what does it; forwards and backwards are those of `compute` but for experts."""
        usual = self.compute.actions()
        return {
            FORWARD[DISPATCH]: self._dispatch,
            FORWARD[COMBINE]: self._combine,
            BACKWARD[COMBINE]: self._combine_back,
            BACKWARD[DISPATCH]: self._dispatch_back,
            "F": self._or(usual["F"], self._experts),
            "B": self._or(usual["B"], self._experts_back),
            "I": self._or(usual["I"], self._experts_input_back),
        }

    def new_step(self) -> None:
        """Forgets the step before."""
        self.under_way.clear()
        self.done.clear()

    def _or(self, usual: Action, experts: Action) -> Action:
        def action(stage: int, unit: int) -> None:
            layer = self.layers.get(stage)
            (experts if layer is not None and stage == layer.dispatch + 1 else usual)(stage, unit)

        return action

    def _next(self, kind: str, stage: int, unit: int) -> int:
        """Counts the parts of one kind of row; returns the number of the one that runs."""
        part = self.done.get((kind, stage, unit), 0)
        self.done[kind, stage, unit] = part + 1
        return part

    def _on_lane(
        self,
        name: Name,
        work: Callable[[], None],
        nbytes: int,
        finish: Callable[[], None] | None = None,
        also: Sequence[Name] = (),
    ) -> None:
        lane = self.compute.lane
        assert lane is not None, "a Program with exchanges has a lane"
        self.compute.buffers.start(name, lane.start(work), nbytes, finish, also=also)

    # --- forward

    def _dispatch(self, stage: int, unit: int) -> None:
        layer, part = self.layers[stage], self._next(FORWARD[DISPATCH], stage, unit)
        if part == 0:
            self.under_way[stage, unit] = _UnderWay(entered=self.compute.entering(stage, unit))
        here = self.under_way[stage, unit]

        def send() -> None:
            if part == 0:
                # On the lane, too: ranks tell each other numbers of rows by the group that rows go through, and both
                # need one order on all ranks.
                self._route(layer, here, unit)
            assert here.sent is not None
            share = here.shares[part]
            assert share.share is not None
            here.leaves[part] = to_experts(here.sent[share.share.rows], share, layer.group)

        nbytes = here.entered[layer.tokens].nbytes // self.parts
        self._on_lane((f"{SENT}.{part}", stage + 1, unit), send, nbytes)

    def _route(self, layer: _Layer, here: _UnderWay, unit: int) -> None:
        """Finds out where rows go, and makes them."""
        module, tokens, indices = self.stages[layer.dispatch], here.entered[layer.tokens], here.entered[layer.indices]
        run = module.runs[module.layers[0].call.block]
        frame = Frame(run, {}, _no_weight, _no_state, None, {}, tokens.dtype)
        label = module.whole[module.layers[0].label]
        hook = self.compute.listeners()
        frame.routed = None if hook is None else lambda chosen: hook(label, chosen)
        here.routing = frame.route(layer.op, indices)
        here.shares = shared_out(here.routing, self.parts)
        rows = rows_of(tokens, here.routing.order, here.routing.topk, here.routing.real)
        # Autograd is cut at the exchanges: this is where the dispatch's backward enters again, once all parts are back.
        here.edge = get_gradient_edge(rows) if rows.requires_grad else None
        here.sent = rows.detach()

    def _experts(self, stage: int, unit: int) -> None:
        layer, part = self.layers[stage], self._next("F", stage, unit)
        here, module = self.under_way[layer.dispatch, unit], self.stages[stage]
        self.compute.buffers.wait((f"{SENT}.{part}", stage, unit))
        here.leaves[part].requires_grad_()
        module.unit, module.routings = unit, {layer.rows: here.shares[part]}
        self.compute.state.gathered(stage)
        inputs = {**here.entered, layer.rows: here.leaves[part]}
        outputs = module(inputs, self.compute.feed.of_unit(unit), self.compute.feed.packing_of(unit))[layer.results]
        here.results[part] = get_gradient_edge(outputs), outputs.detach()

    def _combine(self, stage: int, unit: int) -> None:
        layer, part = self.layers[stage], self._next(FORWARD[COMBINE], stage, unit)
        here, module = self.under_way[layer.dispatch, unit], self.stages[stage]
        rows = here.results[part][1]

        def bring() -> None:
            share, whole = here.shares[part], here.routing
            assert share.share is not None and whole is not None
            back = to_tokens(rows, share, layer.group)
            if here.home is None:
                here.home = torch.empty((len(whole.order), *back.shape[1:]), dtype=back.dtype, device=back.device)
            here.home[share.share.rows] = back

        if part < self.parts - 1:
            self._on_lane((f"{MADE}.{part}", stage, unit), bring, rows.nbytes)
            return

        def finish() -> None:
            for earlier in range(self.parts - 1):
                self.compute.buffers.wait((f"{MADE}.{earlier}", stage, unit))
            assert here.home is not None and here.routing is not None
            # A leaf: backward of the combine ends here, and `_combine_back` sends its gradient on part by part.
            entered = {**here.entered, layer.results: here.home.requires_grad_()}
            module.unit, module.routings = unit, {layer.results: replace(here.routing, home=True)}
            outputs = module(entered, self.compute.feed.of_unit(unit), self.compute.feed.packing_of(unit))
            self.compute.saved[stage, unit] = SavedForBackward.of(entered, outputs)
            self.compute.hand_on(stage, unit, outputs)

        first, *others = ((hop.buffer, hop.target, unit) for hop in module.leaves)
        self._on_lane(first, bring, rows.nbytes, finish, others)

    # --- backward

    def _combine_back(self, stage: int, unit: int) -> None:
        layer, part = self.layers[stage], self._next(BACKWARD[COMBINE], stage, unit)
        here = self.under_way[layer.dispatch, unit]
        # The first part goes back through the whole combine; later ones find its gradient, as the lane keeps their
        # order.
        begins = self.compute.begins(stage, unit) if part == 0 else []

        def send() -> None:
            if part == 0:
                torch.autograd.backward([edge for edge, _ in begins], [grad for _, grad in begins])
                self.compute.saved.pop((stage, unit))
            assert here.home is not None and here.home.grad is not None
            share = here.shares[part]
            assert share.share is not None
            here.grads[part] = to_experts(here.home.grad[share.share.rows], share, layer.group)

        assert here.home is not None
        self._on_lane((f"{DMADE}.{part}", stage - 1, unit), send, here.home.nbytes // self.parts)

    def _experts_back(self, stage: int, unit: int) -> None:
        self._back_through(self.layers[stage], self._next("B", stage, unit), stage, unit)

    def _experts_input_back(self, stage: int, unit: int) -> None:
        """Runs I: weight gradients are put aside for W."""
        part, tape = self._next("I", stage, unit), self.stages[stage].tape
        tape.aside = []
        self._back_through(self.layers[stage], part, stage, unit)
        self.compute.aside.setdefault((stage, unit), []).extend(tape.aside)
        tape.aside = None

    def _back_through(self, layer: _Layer, part: int, stage: int, unit: int) -> None:
        here, module = self.under_way[layer.dispatch, unit], self.stages[stage]
        self.compute.buffers.wait((f"{DMADE}.{part}", stage, unit))
        edge, _ = here.results.pop(part)
        module.routings = {layer.rows: here.shares[part]}
        torch.autograd.backward([edge], [here.grads.pop(part)])

    def _dispatch_back(self, stage: int, unit: int) -> None:
        layer, part = self.layers[stage], self._next(BACKWARD[DISPATCH], stage, unit)
        here, module = self.under_way[stage, unit], self.stages[stage]
        grad = here.leaves.pop(part).grad
        assert grad is not None

        def bring() -> None:
            share = here.shares[part]
            assert share.share is not None and here.sent is not None
            back = to_tokens(grad, share, layer.group)
            if here.back is None:
                here.back = torch.empty_like(here.sent)
            here.back[share.share.rows] = back
            if part == self.parts - 1 and here.edge is not None:
                torch.autograd.backward([here.edge], [here.back])

        if part < self.parts - 1:
            self._on_lane((f"{DSENT}.{part}", stage, unit), bring, grad.nbytes)
            return

        def finish() -> None:
            for earlier in range(self.parts - 1):
                self.compute.buffers.wait((f"{DSENT}.{earlier}", stage, unit))
            del self.under_way[stage, unit]
            ends = self.compute.ends(stage, unit, SavedForBackward(entered=here.entered, edges={}))
            self.compute.buffers.tensors.update(ends)

        first, *others = ((hop.gradient, hop.source, unit) for hop in module.enters)
        self._on_lane(first, bring, grad.nbytes, finish, others)


def _no_weight(name: str, rows: int) -> Weight:
    raise AssertionError(f"a dispatch reads the weight {name}")


def _no_state(name: str) -> Tensor:
    raise AssertionError(f"a dispatch reads {name}")

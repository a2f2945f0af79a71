"""Mixtures of experts: `router`, `dispatch`, `grouped_linear`, `combine`.

Tokens choose experts; each (token, chosen expert) is a row, rows meet the weight of their own expert, and the results
of a token are added up. Leaves out losses that balance the load.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from gnomon.errors import PlanError
from gnomon.ops.bases import CONTRACTION, MOVES_BYTES
from gnomon.ops.curve import Curve, Matmul, once, passes
from gnomon.ops.divided import BOTH, own_collective, with_inside
from gnomon.ops.kernels import Kernels
from gnomon.ops.op import Op, Problem, Steps, Tensors, attrs
from gnomon.ops.rules import (
    cannot_write,
    contracted_dims,
    per_element,
    per_element_back,
)
from gnomon.ops.strategy import Division, Strategy
from gnomon.tensors.dims import Number
from gnomon.tensors.layout import Collective, CollectiveKind


def _grouped_dims(op: Op, block: Tensors) -> Problem:
    """A row meets the weight of its own expert only."""
    return contracted_dims(op, block, without=(str(op.attr("groups", "experts")),))


def _dispatch_dims(op: Op, block: Tensors) -> Problem:
    x, indices, out = block.tensor(op.inputs[0]), block.tensor(op.inputs[1]), block.tensor(op.outputs[0])
    return None if out.dims == (*indices.dims, x.dims[-1]) else cannot_write(op, block)


def _router_dims(op: Op, block: Tensors) -> Problem:
    """(…, experts) gives two of (…, topk); a bias is of the experts."""
    logits, (weights, indices) = block.tensor(op.inputs[0]), (block.tensor(name) for name in op.outputs[:2])
    biases = [block.tensor(name).dims for name in op.inputs[1:]]
    fits = weights.dims == indices.dims and weights.dims[:-1] == logits.dims[:-1] and not indices.is_float
    return None if fits and all(dims == logits.dims[-1:] for dims in biases) else cannot_write(op, block)


def _combine_dims(op: Op, block: Tensors) -> Problem:
    """(…, topk, width) by two of (…, topk) gives (…, width)."""
    rows, weights, indices = (block.tensor(name) for name in op.inputs)
    out = block.tensor(op.outputs[0]).dims
    fits = rows.dims[:-1] == weights.dims == indices.dims and out == (*weights.dims[:-1], rows.dims[-1])
    return None if fits else cannot_write(op, block)


def _saves_router(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return (op.inputs[0], *op.outputs)


def _saves_indices(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    return op.inputs[1:]


def _saves_combine(op: Op, block: Tensors, needs_grad: Collection[str]) -> tuple[str, ...]:
    """`weighted`: its rows have their weights, which only their order undoes."""
    return op.inputs[1:] if op.attr("weighted", False) else op.inputs


def _combine_steps(op: Op, low: Steps, kernels: Kernels) -> None:
    weighted = bool(low.weighted) and kernels.expert_weights == "activation"
    low.ops.append(replace(op, attrs=attrs(**dict(op.attrs), weighted=True)) if weighted else op)


def _experts(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Dispatch: rows go to the ranks of their experts (all-to-all over ep), then to all slices of them (gather over
    etp); combine is the reverse (scatter, all-to-all). Bytes are those of balanced routing. Where the layout gathers,
    tokens go to all ranks and sums come back, whatever the routing. Leaves out the counts and probabilities that go
    along; gathered weights, which combine reads, are in it."""
    scene, is_dispatch = setting.scene, op.does == "dispatches"
    if scene.ranks("tp") > 1 and not setting.layout.sequence_parallel:
        raise PlanError(
            f"{op.path}: experts with tp = {scene.ranks('tp')} need sequence_parallel: otherwise every tp "
            f"rank would send "
            f"the same tokens; set layout.sequence_parallel = true (--sequence-parallel)"
        )
    if setting.layout.dispatch == "all_gather" and scene.ranks("ep") > 1:
        return (with_inside(plain, op.kind, tuple(_of_all_tokens(op, setting, plain))),)
    rows, sharding = (op.outputs[0], plain.outputs[0]) if is_dispatch else (op.inputs[0], plain.inputs[0])
    size, etp = setting.bytes(rows, sharding), scene.ranks("etp")
    inside: list[Collective] = []
    gather: CollectiveKind
    for phase, outward in zip(BOTH, (is_dispatch, not is_dispatch), strict=True):
        # Outward in forward of a dispatch and in backward of a combine: each is the other's conjugate.
        gather = "all_gather" if outward else "reduce_scatter"
        steps: list[tuple[CollectiveKind, str, Number]] = [("all_to_all", "ep", size), (gather, "etp", size * etp)]
        # Out: first to the rank of the expert, then to its slices, whose gather has etp times the rows. Back in
        # reverse.
        for kind, axis, amount in steps if outward else steps[::-1]:
            if scene.ranks(axis) > 1:
                inside.append(own_collective(op, setting, kind, axis, amount, phase, rows))
    return (with_inside(plain, op.kind, tuple(inside)),)


def _of_all_tokens(op: Op, setting: Division, plain: Strategy) -> Iterator[Collective]:
    """What is gathered of all ranks' tokens, over ep and then over etp, and the scatters of its conjugates: of a
    dispatch its tokens, of a combine its weights, before its sums are scattered."""
    scene, is_dispatch = setting.scene, op.does == "dispatches"
    ways = scene.ranks("ep"), scene.ranks("etp")
    read = (op.inputs[0], plain.inputs[0]) if is_dispatch else (op.inputs[1], plain.inputs[1])
    sums = () if is_dispatch else ((op.outputs[0], plain.outputs[0]),)
    for phase in BOTH:
        for (name, sharding), out in ((read, True), *((one, False) for one in sums)):
            # What is gathered in forward is scattered in backward, and the other way round.
            kind: CollectiveKind = "all_gather" if out == (phase == "forward") else "reduce_scatter"
            size = setting.bytes(name, sharding)
            for axis, amount in (("ep", size * ways[0]), ("etp", size * ways[0] * ways[1])):
                if scene.ranks(axis) > 1:
                    yield own_collective(op, setting, kind, axis, amount, phase, name)


def _router(op: Op, setting: Division, plain: Strategy) -> tuple[Strategy, ...]:
    """Each rank routes its own tokens; Sinkhorn's sums are over all of a microbatch, so there every rank has the logits
    of all, a few numbers a token, and takes its own part of what they give."""
    if op.attr("assignment", "top_k") == "top_k":
        return (plain,)
    # Sums over tokens need all of them on each rank.
    whole = [tuple(one.without("cp").without("tp") for one in side) for side in (plain.inputs, plain.outputs)]
    return (Strategy(name=plain.name, inputs=whole[0], outputs=whole[1], grad_partial=tuple(() for _ in op.inputs)),)


SINKHORN_ROUNDS = 6
"""Of Sinkhorn's iterations until sums move by under 1e-4 in the mean: 2 to 6 on logits of a deviation of 0.1 to 1, with
8 and 64 experts (measured, 1024 tokens). Wider ones take more: 19 at a deviation of 3 with 8, and with 64 tens of
thousands at 2, since sums under 1e-8 are held up by what is added to them, in Megatron-LM as here; not priced."""


def _router_price(op: Op) -> Curve:
    """Scores, top-k, gather, normalise; under Sinkhorn two sums over the exponentials, a round, beside them."""
    if op.attr("assignment", "top_k") == "top_k":
        return passes(4, 3.0, "reduce")
    return passes(4 + 8 * SINKHORN_ROUNDS, 3.0 + 2.0 * SINKHORN_ROUNDS, "reduce")


ROUTER = replace(
    MOVES_BYTES,
    name="router",
    signature="logits[, bias] -> weights, indices; fn: softmax | sigmoid; groups, normalised; assignment: top_k | "
    "sinkhorn",
    dims=_router_dims,
    saves=_saves_router,
    forward=per_element(6),
    backward=per_element_back(5),
    ungraded=(1,),  # a bias only shifts which experts are chosen, and moves by its own rule (DeepSeek-V3, 2.1.2)
    price=_router_price,
    grad_price=passes(4, 3.0, "reduce"),
    strategies=_router,
    begins="zeros",
    does="routes",
    zeros="unknown",
    torch="routing:router",
)

DISPATCH = replace(
    MOVES_BYTES,
    name="dispatch",
    signature="x, indices -> one row for each (token, chosen expert); experts",
    dims=_dispatch_dims,
    saves=_saves_indices,
    forward=per_element(0),
    backward=per_element_back(0),
    price=once("reduce", kernels=4),  # sort by expert, counts, offsets, gather
    grad_price=once("reduce", kernels=2),
    strategies=_experts,
    does="dispatches",
    served="bytes",
    zeros="unknown",
    torch="engine",
)

GROUPED_LINEAR = replace(
    CONTRACTION,
    name="grouped_linear",
    signature="rows, weight (experts, out, in)[, bias] -> each row times the weight of its own expert; groups",
    dims=_grouped_dims,
    price=Matmul("experts", narrow=True),
    grad_price=Matmul("experts", narrow=True),
    weight_sum="in place",
    does="multiplies rows",
    torch="engine",
)

COMBINE = replace(
    MOVES_BYTES,
    name="combine",
    signature="rows, weights, indices -> tokens; weighted",
    dims=_combine_dims,
    saves=_saves_combine,
    forward=per_element(2),
    backward=per_element_back(4),
    steps=_combine_steps,
    fused_by="expert_weights",
    price=once("reduce", kernels=2),
    grad_price=once("reduce", kernels=3),
    strategies=_experts,
    does="combines",
    served="bytes",
    zeros="unknown",
    torch="engine",
)

KINDS = (ROUTER, DISPATCH, GROUPED_LINEAR, COMBINE)

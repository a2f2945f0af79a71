"""Batches whose sequences differ in length, or that a method cuts and packs: each data-parallel worker with its units.

`priced_units` prices every shape of unit that a worker has (its tokens in one row, its attention over each piece and
what lies before it), so that each worker's Program is played by itself; the slowest sets the step, since workers meet
in the reduction of gradients only. Assumes attention kernels that know where sequences begin (variable-length flash
attention) and a row of tokens without padding, but for what sequence parallelism divides by. Leaves out models with
other inputs than one sequence, and layers that carry a state from token to token across chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

from gnomon.errors import UnpricedError
from gnomon.graph import Graph, Kernels
from gnomon.lowering.packed import skrull_pass
from gnomon.plans import Plan, Unit, Workload
from gnomon.plans.check import sample_tokens, sequence_parts
from gnomon.plans.parts import Context
from gnomon.prediction.layer_types import LayerPrice, Phase
from gnomon.prediction.stage import StagePrice
from gnomon.prices.attention import Pieces
from gnomon.program import unit_shapes
from gnomon.program.units import Piece

NOTE = (
    "sequences of several lengths: tokens of a microbatch lie in one row without padding, under attention that keeps "
    "sequences apart; the slowest data-parallel worker sets the step"
)

PriceUnit = Callable[[dict[str, int], Pieces], tuple[StagePrice, ...]]
"""Prices of every stage from the sizes of a unit and its pieces."""


def check_varied(graph: Graph, plan: Plan, workload: Workload, kernels: Kernels) -> None:
    """UnpricedError for models and programs whose batches of several lengths have no price."""
    lengths = sorted(set(workload.sequence_lengths()))
    what = f"this workload has {len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens"
    if workload.sizes or sample_tokens(graph) is not None:
        raise UnpricedError(f"{what}, but {graph.name} has other inputs than one sequence; give seq_len")
    done = {op.does for block in graph.blocks for op in block.ops}
    if "scans" in done:
        raise UnpricedError(f"{what}, but layers of {graph.name} carry a state along a sequence; give seq_len")
    if "attends" in done and kernels.attention != "flash":
        raise UnpricedError(f"{what}, and unfused attention over packed sequences has no price; give seq_len")
    if plan.optimizer.zero == 3 and plan.mesh.data_ranks > 1:
        raise UnpricedError(
            f"{what}, and under ZeRO 3 workers gather parameters in step with each other; use zero <= 2"
        )
    if any(rule.action == "offload" for rule in plan.saved.rules):
        raise UnpricedError(f"{what}, and offloaded activations of unlike microbatches have no price; keep them")


def priced_units(
    plan: Plan, units: Sequence[Unit], priced: PriceUnit, whole: PriceUnit
) -> tuple[tuple[StagePrice, ...], dict[str, tuple[StagePrice, ...]]]:
    """(prices of the stages for the largest unit, shape of unit -> prices); no shapes where units are alike.

    priced: on the plan's mesh. whole: on one rank of cp alone, for sequences that are not divided.
    """
    shapes, shape_of = unit_shapes(units)
    first = {shape: units[shape_of.tolist().index(index)] for index, shape in enumerate(shapes)}
    prices = {shape: _priced(plan, unit, priced, whole) for shape, unit in first.items()}
    largest = max(first, key=lambda shape: (max(first[shape].rank_tokens(plan.mesh.cp)), first[shape].tokens))
    return prices[largest], prices if len(shapes) > 1 else {}


def _priced(plan: Plan, unit: Unit, priced: PriceUnit, whole: PriceUnit) -> tuple[StagePrice, ...]:
    """Prices of a unit. Where ranks of cp have sequences of their own (Skrull), the one with most of them: what the
    divided sequences exchange runs alongside its own sequences, and their computing after."""
    parts, _ = sequence_parts(plan, plan.stage_mesh(0))
    if not unit.local:
        return priced(*_sizes(unit.pieces, parts))
    where = dict(unit.local)
    divided = tuple(piece for piece in unit.pieces if piece[0] not in where)
    # Without divided sequences the shortest row stands in, so that there is a stage to fill; nothing of it counts then.
    shared = priced(*_sizes(divided or ((0, 0, parts),), parts))
    own = [tuple(piece for piece in unit.pieces if where.get(piece[0]) == rank) for rank in range(plan.mesh.cp)]
    each = [whole(*_sizes(pieces, parts)) for pieces in own if pieces]
    # the slowest rank sets the time, and the fullest the memory: one rank of both is priced
    longest = max(each, key=lambda stages: sum(stage.phase("forward").device_s for stage in stages))
    fullest = max(each, key=lambda stages: sum(sum(stage.kept_bytes) for stage in stages))
    return tuple(_together(*stages, divided=bool(divided)) for stages in zip(shared, longest, fullest, strict=True))


def in_styles(plan: Plan, price: Callable[[Plan, dict[str, int], Pieces], tuple[StagePrice, ...]]) -> PriceUnit:
    """Prices on the plan's mesh. Where ranks attend to sequences in several styles (`gather_up_to`, `ulysses_up_to`),
    those of each style by themselves, one after another. price: of a plan, sizes and pieces."""
    skrull, usual = skrull_pass(plan.schedule), plan.layout.context
    parts, _ = sequence_parts(plan, plan.stage_mesh(0))
    # one value for each, so that prices by plan are found again
    plans = {style: replace(plan, layout=replace(plan.layout, context=style)) for style in get_args(Context)}
    plans[usual] = plan

    def priced(sizes: dict[str, int], pieces: Pieces) -> tuple[StagePrice, ...]:
        styles: dict[Context, list[tuple[int, int]]] = {}
        for length, start in pieces:
            style = usual if skrull is None or plan.mesh.cp == 1 else skrull.style(start + length, usual)
            styles.setdefault(style, []).append((length, start))
        if set(styles) <= {usual}:
            return price(plan, sizes, pieces)
        found = []
        for style, some in styles.items():
            tokens = -(-sum(length for length, _ in some) // parts) * parts
            found.append(price(plans[style], {**sizes, "seq": tokens}, tuple(some)))
        return one_after_another(found)

    return priced


def one_after_another(stages: Sequence[tuple[StagePrice, ...]]) -> tuple[StagePrice, ...]:
    """Prices of all stages over parts of a unit that are computed in turn, nothing beside anything."""
    total = stages[0]
    for next_stages in stages[1:]:
        total = tuple(
            _together(one, other, other, divided=True, overlaps=False)
            for one, other in zip(total, next_stages, strict=True)
        )
    return total


def _together(
    shared: StagePrice, longest: StagePrice, fullest: StagePrice, *, divided: bool, overlaps: bool = True
) -> StagePrice:
    """A stage over divided sequences and the whole ones of a rank. divided: whether there are any. overlaps: whether
    what the first exchange runs alongside the others."""
    priced = zip(shared.layers, longest.layers, fullest.layers, strict=True)
    layers = [
        (_layer(price, slow, full, divided=divided, overlaps=overlaps), labels)
        for (price, labels), (slow, _), (full, _) in priced
    ]
    return replace(shared, layers=tuple(layers))


def _layer(price: LayerPrice, slow: LayerPrice, full: LayerPrice, *, divided: bool, overlaps: bool) -> LayerPrice:
    def phase(one: Phase, own: Phase) -> Phase:
        if not divided:
            return own
        return _exchange_hidden(one, own) if overlaps else one + own

    return replace(
        price,
        forward=phase(price.forward, slow.forward),
        input_grad=phase(price.input_grad, slow.input_grad),
        weight_grad=phase(price.weight_grad, slow.weight_grad),
        recompute=phase(price.recompute, slow.recompute),
        # `divided` is 0 or 1: without divided sequences the first price has no bytes here.
        saved=tuple(
            replace(one, bytes=one.bytes * divided + own.bytes)
            for one, own in zip(price.saved, full.saved, strict=True)
        ),
        remade_bytes=price.remade_bytes * divided + full.remade_bytes,
        transient_bytes=price.transient_bytes * divided + full.transient_bytes,
        early_bytes=price.early_bytes * divided + full.early_bytes,
        late_bytes=price.late_bytes * divided + full.late_bytes,
        forward_bytes=price.forward_bytes * divided + full.forward_bytes,
        deferred_bytes=price.deferred_bytes * divided + full.deferred_bytes,
        input_bytes=price.input_bytes * divided + full.input_bytes,
        output_bytes=price.output_bytes * divided + full.output_bytes,
    )


def _exchange_hidden(shared: Phase, own: Phase) -> Phase:
    """Both, with what the first exchanges over cp hidden behind the computing of the second (DACP's objective:
    the longer of exchange and whole sequences, then the divided ones)."""
    total = shared + own
    exchanged = shared.comm_s.get("cp", 0.0)
    if not exchanged:
        return total
    return replace(total, comm_s={**total.comm_s, "cp": max(exchanged - own.compute_s, 0.0)})


def _sizes(unit: Sequence[Piece], parts: int) -> tuple[dict[str, int], Pieces]:
    """(sizes of the graph's open dims for pieces of sequences, those pieces). parts: that their tokens divide into."""
    tokens = sum(stop - start for _, start, stop in unit)
    pieces = tuple(sorted(((stop - start, start) for _, start, stop in unit), reverse=True))
    return {"batch": 1, "seq": -(-tokens // parts) * parts}, pieces

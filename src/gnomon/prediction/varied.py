"""Batches whose sequences differ in length, or that a method cuts and packs: each data-parallel worker with its units.

`priced_units` prices every shape of unit that a worker has (its tokens in one row, its attention over each piece and
what lies before it), so that each worker's Program is played by itself; the slowest sets the step, since workers meet
in the reduction of gradients only. Assumes attention kernels that know where sequences begin (variable-length flash
attention) and a row of tokens without padding, but for what sequence parallelism divides by. Leaves out models with
other inputs than one sequence, and layers that carry a state from token to token across chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gnomon.errors import UnpricedError
from gnomon.graph import Graph, Kernels
from gnomon.plans import Plan, Unit, Workload
from gnomon.plans.check import sample_tokens, sequence_parts
from gnomon.prediction.stage import StagePrice
from gnomon.prices.attention import Pieces
from gnomon.program import unit_shapes

NOTE = (
    "sequences of several lengths: tokens of a microbatch lie in one row without padding, under attention that keeps "
    "sequences apart; the slowest data-parallel worker sets the step"
)

Priced = Callable[[dict[str, int], Pieces], tuple[StagePrice, ...]]
"""Prices of every stage from the sizes of a unit and its pieces."""


def check_varied(graph: Graph, plan: Plan, workload: Workload, kernels: Kernels) -> None:
    """UnpricedError for models and programs whose batches of several lengths have no price."""
    lengths = sorted(set(workload.sequence_lengths()))
    what = f"this workload has {len(lengths)} lengths from {lengths[0]} to {lengths[-1]} tokens"
    if workload.sizes or sample_tokens(graph) is not None:
        raise UnpricedError(f"{what}, but {graph.name} has other inputs than one sequence; give seq_len")
    kinds = {op.kind for block in graph.blocks for op in block.ops}
    if "state_space" in kinds:
        raise UnpricedError(f"{what}, but layers of {graph.name} carry a state along a sequence; give seq_len")
    if "attention" in kinds and kernels.attention != "flash":
        raise UnpricedError(f"{what}, and unfused attention over packed sequences has no price; give seq_len")
    if plan.optimizer.zero == 3 and plan.mesh.data_ranks > 1:
        raise UnpricedError(
            f"{what}, and under ZeRO 3 workers gather parameters in step with each other; use zero <= 2"
        )
    if any(rule.action == "offload" for rule in plan.saved.rules):
        raise UnpricedError(f"{what}, and offloaded activations of unlike microbatches have no price; keep them")


def priced_units(
    plan: Plan, units: Sequence[Unit], priced: Priced
) -> tuple[tuple[StagePrice, ...], dict[str, tuple[StagePrice, ...]]]:
    """(prices of the stages for the largest unit, shape of unit -> prices); no shapes where units are alike."""
    shapes, shape_of = unit_shapes(units)
    first = {shape: units[shape_of.tolist().index(index)] for index, shape in enumerate(shapes)}
    prices = {shape: priced(*_sizes(plan, unit)) for shape, unit in first.items()}
    largest = max(first, key=lambda shape: (first[shape].tokens, first[shape].attention_pairs()))
    return prices[largest], prices if len(shapes) > 1 else {}


def _sizes(plan: Plan, unit: Unit) -> tuple[dict[str, int], Pieces]:
    """(sizes of the graph's open dims for a unit, its pieces)."""
    parts, _ = sequence_parts(plan, plan.stage_mesh(0))
    tokens = -(-unit.tokens // parts) * parts
    pieces = tuple(sorted(((stop - start, start) for _, start, stop in unit.pieces), reverse=True))
    return {"batch": 1, "seq": tokens}, pieces

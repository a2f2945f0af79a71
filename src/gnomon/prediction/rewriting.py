"""A plan's Program after the methods that rewrite it, with prices and the simulator given to those that ask.

`with_methods(structure, every)` is the validated Program that is then played like any other. Leaves out the methods
themselves (`gnomon.methods`) and what they are allowed in (`check_methods`).
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.errors import PlanError, ProgramError
from gnomon.methods import Context, rewrites, rewritten
from gnomon.prediction.memory import rank_memory
from gnomon.prediction.step import Pricing
from gnomon.program import Structure, issue_order_peak, validate
from gnomon.simulate import Clock, play


def with_methods(structure: Structure, every: Sequence[Pricing]) -> Structure:
    """Applies the plan's methods to the Program. every: prices of each kind of replica. PlanError where replicas
    differ: the rewritten order is one for all; or where a method cannot rewrite this Program."""
    plan = every[0].plan
    if not rewrites(plan):
        return structure
    names = ", ".join(method.name for method in plan.schedule.passes)
    if len(every) > 1:
        raise PlanError(f"{names} makes one order of rows, but data-parallel replicas differ in devices or shares")
    try:
        return validate(rewritten(structure.program, plan, _context(structure, every[0])))
    except ProgramError as error:
        raise PlanError(f"{names} cannot rewrite this plan's Program: {error}") from error


def _context(structure: Structure, pricing: Pricing) -> Context:
    memory, sizes = rank_memory(structure, pricing)
    buffers = issue_order_peak(structure.program, structure.deps, sizes)
    room = min(rank.limit_bytes - rank.peak_bytes + buffers[rank.rank_class].bytes for rank in memory)
    return Context(
        simulate=lambda changed: play(Clock.of(changed, pricing.durations(changed.program))), sizes=sizes, limit=room
    )

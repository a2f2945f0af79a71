"""Asynchronous tensor parallelism: gathers and reduce-scatters as rings whose hops hide behind parts of the matmul.

`async_tensor_parallel(program, parts=n)` takes a Program with the borders of its regions as actions
(`tensor_parallel_regions`) and cuts each gather and the matmul that reads it, each matmul and the reduce-scatter that
follows, into one part for each rank: the own shard is multiplied while the next one arrives, and partial sums travel on
while the next are computed. The rank's own part comes first in a gather and last in a reduce-scatter, without a hop.
Left out: the cost of smaller matmuls, which prices know. Bytes are those of the whole collective, (n-1)/n.
Source: Wang et al. 2023 (decomposition with collective matmul); PyTorch's symmetric-memory implementation.
"""

from __future__ import annotations

from gnomon.errors import PlanError
from gnomon.lowering.splits import split
from gnomon.program import Program

_OWN = {"AG_F": "first", "RS_F": "last", "AG_B": "first", "RS_B": "last", "F": "", "B": ""}


def async_tensor_parallel(program: Program, *, parts: int) -> Program:
    """The Program with each gather and reduce-scatter cut into `parts`, as many as tensor-parallel ranks.

    PlanError when there is nothing to cut, and for a stage that is both gathered for and scattered: its gather wants
    the own part first and its scatter wants it last, so give the two matmuls a stage each.
    """
    names = [kind.name for kind in program.kinds]
    bordered = {
        side: {s for k, s in zip(program.kind.tolist(), program.stage.tolist(), strict=True) if names[k] == side}
        for side in ("AG_F", "RS_F")
    }
    both = bordered["AG_F"] & bordered["RS_F"]
    if both:
        raise PlanError(
            f"stage {min(both)} has a gather before and a reduce-scatter after; give the two products a stage each"
        )
    stages = bordered["AG_F"] | bordered["RS_F"]
    if not stages:
        raise PlanError("no gathers or reduce-scatters (AG_F, RS_F) to cut; put in the borders of regions first")
    return split(program, _OWN, parts, stages=stages)

"""Which ZeRO stage a plan really has, where its groups may be of one rank: `effective_zero(plan)`.

Apart from the rows that follow from it, which it leaves out (`lowering.optimizer`).
"""

from __future__ import annotations

from gnomon.errors import PlanError
from gnomon.plans.plan import Plan


def effective_zero(plan: Plan) -> int:
    """The plan's ZeRO stage; 0 when every group that it would divide over has one rank, unless parameters come from the
    host block by block.

    PlanError when only some stages have several shards or several replicas.
    """
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    divided = [mesh.dp_shard * mesh.cp > 1 for mesh in meshes]
    zero = plan.optimizer.zero
    if not zero or not any(divided):
        return 3 if zero == 3 and plan.optimizer.offload_parameters else 0
    if not all(divided):
        raise PlanError(
            f"ZeRO stage {zero} divides over dp_shard x cp, which is 1 in stage {divided.index(False)} and more in "
            f"others; give every stage several, or use optimizer.zero = 0"
        )
    if len({mesh.dp_replicate > 1 for mesh in meshes}) > 1:
        raise PlanError("ZeRO with dp_replicate > 1 in some stages only has no rows yet; make the stages alike")
    return zero

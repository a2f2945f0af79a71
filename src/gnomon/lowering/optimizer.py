"""What `plan.optimizer` asks of a Program: ZeRO, updates on the host, tied parameters, clipping.

`apply_optimizer` divides and moves state for all stages (`data_parallel`); `with_meetings` adds what ranks do together
before the update: the sum of tied gradients, and the global norm, for which every rank waits. Both expect an update
(OPT) for each stage. What cannot be expressed is a PlanError. Left out: sizes of shards, and the state that an update
rule keeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from gnomon.lowering.blocks import with_blocks
from gnomon.lowering.data_parallel import shard_state
from gnomon.lowering.gradients import with_tied_all_reduce
from gnomon.lowering.norm import NORM as NORM
from gnomon.lowering.norm import with_norm as with_norm
from gnomon.plans import Optimizer, Overlap
from gnomon.program import Program
from gnomon.program.rows import Rows


def apply_optimizer(
    program: Program,
    optimizer: Optimizer,
    overlap: Overlap,
    zero: int,
    *,
    replicated: bool,
    blocks: Sequence[int],
    stream: bool,
) -> Program:
    """The Program with states, gradients and parameters divided, and updates moved, as the optimizer says.

    zero: the ZeRO stage in effect (`effective_zero`). replicated: whether shards have copies. blocks: layers of each
    stage, where it is taken apart into them: under ZeRO 3, because each is gathered by itself, and where gradients
    stream to the host (stream), because each one's goes by itself. Empty: stages stay whole.
    PlanError for a combination that the passes do not express.
    """
    return shard_state(
        with_blocks(program, blocks) if blocks else program,
        optimizer,
        overlap,
        shards=2 if zero else 1,  # more are the same rows
        replicas=2 if replicated else 1,
        stream=stream,
        meets=bool(zero) and optimizer.clip,
    )


def with_meetings(rows: Rows, tied: Sequence[Sequence[int]], *, clip: bool, buffer: str = "G") -> Rows:
    """The rows with what ranks do together between their gradients and their updates: tied parameters, then the norm.

    tied: sets of stages that hold the same parameters. buffer: what an update consumes, G or its shard GS.
    """
    for stages in tied:
        rows = with_tied_all_reduce(rows, stages, buffer=buffer)
    return with_norm(rows, buffer=buffer) if clip else rows

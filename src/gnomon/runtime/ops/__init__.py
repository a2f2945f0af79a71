"""One torch function for each op kind that the runtime runs, on local tensors: `function_of(kind)`.

A kind names its function and the file here that has it. The engine (`runtime.module.blocks`) calls those of `linear`
and of experts itself, since they want more than their operands. `check_runnable(graph)` refuses the rest by name.
"""

from __future__ import annotations

from functools import cache

from gnomon import ops
from gnomon.errors import PlanError
from gnomon.graph import Block, Graph
from gnomon.late import load_late
from gnomon.runtime.ops.site import Function
from gnomon.software import own


@cache
def function_of(kind: str) -> Function:
    """(site, *operands) -> outputs, of a kind by name. PlanError for a kind that has none."""
    rules = ops.find(kind)
    if rules.runs != "function":
        raise PlanError(f"op kind {kind!r} has no torch function of its own: it is {rules.torch}")
    function: Function = load_late(f"gnomon.runtime.ops.{rules.torch}")
    return function


def check_runnable(graph: Graph) -> None:
    """PlanError for a model whose Graph leaves some of its mathematics out, or has a kind that the runtime does not
    run."""
    if reason := own.model_reason(graph):
        raise PlanError(reason)


def check_block(block: Block) -> None:
    """PlanError for a block with a kind that the runtime does not run."""
    if reason := own.block_reason(block):
        raise PlanError(f"the runtime cannot run a block: {reason}")

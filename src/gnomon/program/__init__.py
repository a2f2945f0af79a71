"""Programs: what every rank does in a step, as data that the simulator plays and the runtime executes.

Holds the rows (`Program`), their text form, what follows from their effects (`validate` and its `Structure`), and
memory in issue order. Durations, prices and clocks are elsewhere.
"""

from gnomon.program.dependencies import Dependencies, Edges, dependencies, lanes
from gnomon.program.effects import EffectTable, effect_table, row_effects
from gnomon.program.kinds import (
    EFFECT_OPS,
    STANDARD_BUFFERS,
    STANDARD_KINDS,
    BufferClass,
    Effect,
    EffectOp,
    Kind,
    effects,
    effects_text,
    with_buffers,
    with_kinds,
)
from gnomon.program.memory import BufferMoves, IssuePeak, Moves, buffer_bytes, buffer_moves, issue_order_peak, moves
from gnomon.program.order import Deadlock, Order, order
from gnomon.program.problems import PROBLEMS, Problem
from gnomon.program.program import (
    NO_UNIT,
    BufferRef,
    Communicator,
    Key,
    Override,
    Pool,
    Program,
    ProgramBuilder,
    RowEffect,
    from_columns,
    plain_units,
    unit_shapes,
)
from gnomon.program.text import parse_program, print_program
from gnomon.program.validate import Structure, problems, structure_of, validate

__all__ = [
    "EFFECT_OPS",
    "NO_UNIT",
    "PROBLEMS",
    "STANDARD_BUFFERS",
    "STANDARD_KINDS",
    "BufferClass",
    "BufferMoves",
    "BufferRef",
    "Communicator",
    "Deadlock",
    "Dependencies",
    "Edges",
    "Effect",
    "EffectOp",
    "EffectTable",
    "IssuePeak",
    "Key",
    "Kind",
    "Moves",
    "Order",
    "Override",
    "Pool",
    "Problem",
    "Program",
    "ProgramBuilder",
    "RowEffect",
    "Structure",
    "buffer_bytes",
    "buffer_moves",
    "dependencies",
    "effect_table",
    "effects",
    "effects_text",
    "from_columns",
    "issue_order_peak",
    "lanes",
    "moves",
    "order",
    "parse_program",
    "plain_units",
    "print_program",
    "problems",
    "row_effects",
    "structure_of",
    "unit_shapes",
    "validate",
    "with_buffers",
    "with_kinds",
]

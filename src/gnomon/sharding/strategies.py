"""The ways in which an op runs on divided tensors, as its kind says: `strategies(op, setting)`.

`setting_of` is what they depend on: a block, a plan's layout, and how tensors lie between ops. Which collectives follow
between ops is in `block`. Leaves out time, and layouts that are legal but that nobody runs.
"""

from __future__ import annotations

from gnomon.graph import Block, Op
from gnomon.ops.divided import plain_strategy
from gnomon.ops.strategy import Division, Strategy
from gnomon.plans import Layout
from gnomon.sharding.homes import homes
from gnomon.tensors.layout import Scene


def setting_of(block: Block, layout: Layout, scene: Scene) -> Division:
    """A division with the homes that follow."""
    return Division(block=block, layout=layout, scene=scene, homes=homes(block, layout, scene))


def strategies(op: Op, setting: Division) -> tuple[Strategy, ...]:
    """The ways to run `op`. Attention over cp has three, the layout's choice first; other ops have one. PlanError if
    none is known."""
    plain, rule = plain_strategy(op, setting), op.rules.strategies
    return (plain,) if rule == "plain" else rule(op, setting, plain)

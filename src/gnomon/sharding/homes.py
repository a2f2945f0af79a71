"""Where a tensor lies between ops: its home sharding, by the names of its dims and the plan's layout.

A tensor is at home the same way in every block, so blocks fit together without looking at each other. Returns
shardings without partial sums. Leaves out what an op needs in the meantime (`strategies`).
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache

from gnomon.graph import Block, Tensor
from gnomon.plans import Layout
from gnomon.tensors.layout import Scene, Sharding
from gnomon.tensors.names import SEQUENCE_DIMS, TENSOR_DIMS, TOKEN_DIMS, base


def homes(block: Block, layout: Layout, scene: Scene) -> dict[str, Sharding]:
    """How each tensor lies between ops of `block`: tensor-parallel dims over tp, positions over cp, experts over ep
    and etp.

    An activation with positions and nothing else over tp is divided along them over tp too if the layout is sequence
    parallel. Rules of the layout come first. Axes of one rank divide nothing.
    """
    name = (block.part_of or block).name
    ruled = {rule.dim: rule.axes for rule in layout.rules if fnmatchcase(name, rule.region)}
    routed = routed_tensors(block)
    return {tensor.name: _home(tensor, tensor.name in routed, ruled, layout, scene) for tensor in block.tensors}


def _home(
    tensor: Tensor, is_routed: bool, ruled: Mapping[str, tuple[str, ...]], layout: Layout, scene: Scene
) -> Sharding:
    is_parameter = tensor.kind == "parameter"
    shards: dict[str, str] = {}
    names = [dim.name for dim in tensor.atoms]
    for name in names:
        usual = _usual_axes(base(name), layout, is_parameter=is_parameter, routed=is_routed)
        for axis in ruled.get(name, usual):
            if scene.ranks(axis) > 1:
                # An axis divides one dim of a tensor: the first that asks for it.
                shards.setdefault(axis, name)
    # Only what nothing else divides over tp is divided along positions (Korthikanti et al. 2022).
    if layout.sequence_parallel and not is_parameter and scene.ranks("tp") > 1:
        along = next((name for name in names if base(name) in TOKEN_DIMS and name not in ruled), None)
        if along is not None:
            shards.setdefault("tp", along)
    return Sharding(shards=tuple(shards.items()))


def _usual_axes(name: str, layout: Layout, *, is_parameter: bool, routed: bool) -> tuple[str, ...]:
    if routed and name in ("experts", "expert_ffn", "ffn"):
        # Within an expert its inner width is divided over etp, not tp.
        return {"experts": ("ep",)}.get(name, ("etp",))
    if name in TENSOR_DIMS or (name == "vocab" and layout.vocab_parallel):
        return ("tp",)
    return ("cp",) if name in SEQUENCE_DIMS and not is_parameter else ()


@lru_cache(maxsize=256)
def routed_tensors(block: Block) -> frozenset[str]:
    """Tensors inside routed experts: their weights, and the rows from dispatch to combine."""
    if block.part_of is not None:
        return routed_tensors(block.part_of) & {tensor.name for tensor in block.tensors}
    names = {name for op in block.ops if op.does == "multiplies rows" for name in op.inputs[1:]}
    for op in block.ops:
        if op.does == "dispatches" or (op.does != "combines" and any(name in names for name in op.inputs)):
            names.update(op.outputs)
    return frozenset(names)

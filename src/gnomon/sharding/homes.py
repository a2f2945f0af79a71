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
from gnomon.sharding.layout import Scene, Sharding

TOKEN_DIMS = ("seq", "enc_seq", "patches", "kv_seq")
"""Dims over tokens (base names): cp divides them, and tp between its regions under sequence parallelism."""

SEQUENCE_DIMS = (*TOKEN_DIMS, "image_h")
"""Dims over positions (base names), which cp divides; images into bands of rows."""


HEAD_DIMS = ("heads", "kv_heads")
"""Dims of attention heads (base names); tp divides both alike."""

STATE_DIMS = ("ssm_groups", "ssm_heads", "ssm_proj")
"""Dims of a Mamba-2 mixer (base names): groups of heads, heads, and all that its input projection writes."""

TENSOR_DIMS = (*HEAD_DIMS, *STATE_DIMS, "ffn", "shared_ffn")
"""Dims that tp divides wherever they are (base names)."""


_KNOWN_DIMS = frozenset((*SEQUENCE_DIMS, *TENSOR_DIMS, "vocab", "experts", "expert_ffn", "topk", "kernel_h"))


def base(name: str) -> str:
    """What a dim is, whatever its scope or number: `vision.heads` is `heads`, `image_h.2` is `image_h`."""
    return next((part for part in name.split(".") if part in _KNOWN_DIMS), name)


def is_sequence(name: str) -> bool:
    """Whether a dim runs over positions of the input."""
    return base(name) in SEQUENCE_DIMS


def homes(block: Block, layout: Layout, scene: Scene) -> dict[str, Sharding]:
    """How each tensor lies between ops of `block`: tensor-parallel dims over tp, positions over cp, experts over ep
    and etp.

    An activation with positions and nothing else over tp is divided along them over tp too if the layout is sequence
    parallel. Rules of the layout come first. Axes of one rank divide nothing.
    """
    ruled = {rule.dim: rule.axes for rule in layout.rules if fnmatchcase(block.name, rule.region)}
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
                shards.setdefault(axis, name)
    if layout.sequence_parallel and not is_parameter and scene.ranks("tp") > 1:
        along = next((name for name in names if base(name) in TOKEN_DIMS and name not in ruled), None)
        if along is not None:
            shards.setdefault("tp", along)
    return Sharding(shards=tuple(shards.items()))


def _usual_axes(name: str, layout: Layout, *, is_parameter: bool, routed: bool) -> tuple[str, ...]:
    if routed and name in ("experts", "expert_ffn", "ffn"):
        return {"experts": ("ep",)}.get(name, ("etp",))
    if name in TENSOR_DIMS or (name == "vocab" and layout.vocab_parallel):
        return ("tp",)
    return ("cp",) if name in SEQUENCE_DIMS and not is_parameter else ()


@lru_cache(maxsize=256)
def routed_tensors(block: Block) -> frozenset[str]:
    """Tensors inside routed experts: their weights, and the rows from dispatch to combine."""
    names = {name for op in block.ops if op.does == "multiplies rows" for name in op.inputs[1:]}
    for op in block.ops:
        if op.does == "dispatches" or (op.does != "combines" and any(name in names for name in op.inputs)):
            names.update(op.outputs)
    return frozenset(names)

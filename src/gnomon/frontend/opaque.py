"""How much of a captured model no rule knows: its opaque ops, by their share of bytes and FLOPs.

`shares(graph)` adds up the work of each ATen op that only its bytes price; `share_lines` says it in a few lines. Leaves
out seconds, which depend on a device (`prediction.evidence`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gnomon.graph import BF16, EAGER, Graph, Op, Setting, forward_work, lower

MOST = 5
"""ATen ops that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpaqueShare:
    """Part of a forward."""

    bytes: float
    """Share of the forward's bytes, from 0 to 1."""
    flops: float
    """Share of its FLOPs, from 0 to 1."""


def target_of(op: Op) -> str:
    """The ATen op that an opaque op is mostly: the last that moves something."""
    assert op.captured is not None, "of captured ops only"
    moving = [node.target for node in op.captured.nodes if not node.view]
    return ".".join((moving or [op.captured.nodes[-1].target])[-1].split(".")[:2])


def shares(graph: Graph, sizes: Mapping[str, int] | None = None) -> dict[str, OpaqueShare]:
    """ATen op -> its part of the forward's bytes and FLOPs, the largest first."""
    known = {a.name: 1 if a.name == "batch" else 2048 for t in graph.inputs for a in t.atoms if a.size is None}
    setting = Setting(sizes={**known, **(sizes or {})}, dtypes=BF16, causal_flops="full")
    total_bytes, total_flops = 0.0, 0.0
    by_target: dict[str, list[float]] = {}
    for call in graph.calls:
        block = lower(graph.block(call.block), EAGER)
        for op in block.ops:
            work = forward_work(op, block, setting)
            moved, flops = (
                float(work.read_bytes + work.write_bytes) * call.repeat,
                float(work.matmul_flops) * call.repeat,
            )
            total_bytes, total_flops = total_bytes + moved, total_flops + flops
            if op.is_opaque:
                entry = by_target.setdefault(target_of(op), [0.0, 0.0])
                entry[0], entry[1] = entry[0] + moved, entry[1] + flops
    parts = {
        name: OpaqueShare(bytes=moved / max(total_bytes, 1.0), flops=flops / max(total_flops, 1.0))
        for name, (moved, flops) in by_target.items()
    }
    return dict(sorted(parts.items(), key=lambda item: -(item[1].bytes + item[1].flops)))


def share_lines(graph: Graph) -> tuple[str, ...]:
    """What no rule knows, for a reader."""
    parts = shares(graph)
    if not parts:
        return ()
    moved, flops = sum(s.bytes for s in parts.values()), sum(s.flops for s in parts.values())
    names = ", ".join(f"{name} {share.bytes:.0%}" for name, share in list(parts.items())[:MOST])
    return (
        f"{moved:.0%} of a forward's bytes and {flops:.0%} of its FLOPs are ops without a rule of their own, priced by "
        f"their bytes and products: {names}",
    )

"""The kernels that a program runs a model with, where its record leaves some open, by the usual choice.

`kernels_of(stack)` returns them, what had to be assumed, and the record with the assumptions filled in where prices
need them. Leaves out what the kernels cost (`prices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gnomon.graph import Graph, Kernels
from gnomon.hardware import Cluster
from gnomon.ops.moe import SINKHORN_ROUNDS
from gnomon.plans import Plan
from gnomon.software import Stack, with_facts

_USUAL: Mapping[str, tuple[object, str]] = {
    "attention": ("flash", "flash attention"),
    "norm": ("fused", "fused norms"),
    "activation": ("fused", "fused activations"),
    "cross_entropy": ("unfused", "cross-entropy in fp32, op by op"),
    "launch_mode": ("eager", "kernels launched one by one"),
    "optimizer_step": ("fused", "a fused optimizer"),
    "grad_accumulation_fused": (False, "gradients added up by kernels of their own"),
}
"""Field of a record -> what it is taken as where the record leaves it open, and how that is said."""


def expert_lines(stack: Stack, graph: Graph, plan: Plan) -> tuple[str, ...]:
    """How experts run, where that is a loop in Python: it often is most of the step."""
    how = stack.experts.moe_experts
    if not any(op.does == "multiplies rows" for block in graph.blocks for op in block.ops):
        return ()
    dispatch = plan.layout.dispatch or stack.experts.moe_dispatch
    ep = max(plan.stage_mesh(stage).ep for stage in range(plan.num_stages))
    lines: tuple[str, ...] = ()
    if plan.experts.router_dtype == "fp64":
        lines += (
            "products of routers in fp64 reach the share of its peak that bf16 reaches, where none were measured",
        )
    if plan.experts.assignment == "sinkhorn":
        lines += (f"Sinkhorn's iterations of a router are taken to be {SINKHORN_ROUNDS} a microbatch",)
    if ep > 1 and dispatch in ("fused", "hybrid_ep") and stack.is_unstated:
        lines += ("the program is taken to have DeepEP's kernels (--fix dispatch=all_to_all plans without)",)
    if how == "sequential":
        lines += (
            "experts run one after another from Python, each product and activation by itself (SequentialMLP): as many "
            "launches as a rank has experts; --moe-grouped-gemm runs them together",
        )
    if how not in ("eager", "stacked"):
        return lines
    what = "each a module of its own" if how == "eager" else "each a slice of one tensor, whose gradient it makes whole"
    line = f"experts run one after another from Python, {what}: a chain of launches for each expert and layer"
    if how == "eager" and plan.optimizer.zero == 3 and stack.experts.expert_gather_s is not None:
        line += "; ZeRO 3 gathers each of their weights by itself"
    return (
        *lines,
        f"{line} (transformers before release 5; experts_implementation = grouped_mm from then on)",
    )


def on_cpu(cluster: Cluster) -> bool:
    """Whether all its devices are CPUs."""
    return all(group.node.device.kind == "cpu" for group in cluster.groups)


def kernels_of(stack: Stack, *, cpu: bool = False) -> tuple[Kernels, tuple[str, ...], Stack]:
    """Kernels of a program; what had to be assumed; its record with the assumptions filled in. cpu: where it runs."""
    known = stack.settings()
    missing = [name for name in _USUAL if name not in known]
    chosen: dict[str, Any] = {name: known.get(name, usual) for name, (usual, _) in _USUAL.items()}
    assumed_text = ", ".join(_USUAL[name][1] for name in missing)
    assumed: tuple[str, ...] = (f"stack {stack.name!r} does not say: taken as {assumed_text}",) if assumed_text else ()
    if stack.loss.cross_entropy == "chunked":
        assumed += (
            "chunked cross-entropy: priced as a fused one; a part of the logits as large as what the head reads",
        )
    kernels = Kernels(
        attention="flash" if chosen["attention"] in ("flash", "memory_efficient") else chosen["attention"],
        norm="unfused" if chosen["norm"] == "unfused" else "fused",
        glu="unfused" if chosen["activation"] == "unfused" else "fused",
        cross_entropy="fused" if chosen["cross_entropy"] == "chunked" else chosen["cross_entropy"],
        full_recompute="needed" if stack.layers.recompute_stops else "whole",
        ruled_recompute="needed" if stack.layers.recompute_by_tensor else "whole",
        attention_in_steps=cpu,
        scan_recomputed=stack.layers.scan_recomputed is True,
        expert_weights=stack.experts.moe_weights or "output",
    )
    taken_facts = {name: chosen[name] for name in missing}
    return kernels, assumed, with_facts(stack, "assumed by predict", "2026-11-21", **taken_facts)

"""Small jobs that several tests predict."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from gnomon.graph import Graph
from gnomon.hardware import Cluster, NodeGroup, parse_cluster
from gnomon.models import gpt
from gnomon.plans import Layout, Mesh, Plan, Precision, Saved, Schedule, Workload
from gnomon.prediction import Prediction, predict
from gnomon.software import Stack, with_facts

FP16 = Precision(param="fp16", compute="fp16")
_FACTS: dict[str, Any] = {
    "attention": "unfused",
    "norm": "fused",
    "activation": "fused",
    "cross_entropy": "unfused",
    "launch_mode": "eager",
    "optimizer_step": "fused",
    "grad_buffers": "contiguous",
    "grad_accumulation_fused": True,
}
MEGATRON_2022 = with_facts(Stack(name="megatron-lm", version="2022"), "Korthikanti et al. 2022", "2022-05", **_FACTS)
"""The software of the paper on activation memory: attention op by op, other kernels fused."""


@cache
def gpt_model(layers: int, hidden: int, heads: int, *, vocab: int = 51200, dropout: float = 0.1) -> Graph:
    """A GPT with dropout, sequences of up to 2048."""
    config = gpt.GptConfig(
        name=f"gpt-{layers}x{hidden}",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        vocab_size=vocab,
        max_positions=2048,
        dropout=dropout,
        attention_dropout=dropout,
    )
    return gpt.gpt(config)


def small(plan: Plan, cluster: Cluster | str, *, batch: int = 16, seq_len: int = 1024) -> Prediction:
    """A model of 8 layers and width 1024 under a plan."""
    workload = Workload(global_batch_size=batch, seq_len=seq_len)
    return predict(gpt_model(8, 1024, 16, dropout=0.0), cluster, plan, workload)


def plan(preset: str = "none", *, micro: int = 1, sequence_parallel: bool = False, **axes: int) -> Plan:
    """A plan of mesh axes with 1F1B, recompute as said, fp16."""
    return Plan(
        mesh=Mesh(**axes),
        schedule=Schedule(micro_batch_size=micro),
        saved=Saved(preset=preset),  # type: ignore[arg-type]
        layout=Layout(sequence_parallel=sequence_parallel),
        precision=FP16,
    )


def scaled(spec: str, *, flops: float = 1.0, memory: float = 1.0, link: float = 1.0, network: float = 1.0) -> Cluster:
    """The cluster with faster devices, with power to match, and links."""
    cluster = parse_cluster(spec)
    groups = []
    for group in cluster.groups:
        node, device = group.node, group.node.device
        peak = {name: rate * flops for name, rate in _rates(device.dense_peak)}
        faster = replace(
            device,
            dense_peak=replace(device.dense_peak, **peak),
            memory_bytes_per_s=device.memory_bytes_per_s * memory,
            power_w=None if device.power_w is None else device.power_w * flops,
        )
        nic = replace(node.nic, bytes_per_s=node.nic.bytes_per_s * network) if node.nic else None
        intra = replace(node.intra, bytes_per_s=node.intra.bytes_per_s * link)
        groups.append(NodeGroup(node=replace(node, device=faster, intra=intra, nic=nic), count=group.count))
    return replace(cluster, groups=tuple(groups))


def _rates(peak: Any) -> list[tuple[str, float]]:
    return [(name, getattr(peak, name)) for name in type(peak).__dataclass_fields__ if getattr(peak, name) is not None]

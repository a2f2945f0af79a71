"""Precisions by the words that people say, and the one that machines are usually given.

`PRECISIONS` are those of a command line, `default_precision(cluster)` is what nobody needs to say. Leaves out the parts
of one (`plans.parts.Precision`).
"""

from __future__ import annotations

from collections.abc import Mapping

from gnomon.hardware.types import Cluster
from gnomon.plans.parts import Fp8, Precision

PRECISIONS: Mapping[str, Precision] = {
    "bf16": Precision(),
    "fp16": Precision(param="fp16", compute="fp16"),
    "fp32": Precision(param="fp32", compute="fp32", master="none"),
    "fp8": Precision(fp8=Fp8(recipe="tensorwise")),
}
"""Word -> precision: mixed where it has fewer bits than 32."""


def default_precision(cluster: Cluster) -> Precision:
    """Mixed precision in bf16 where every device has it; else in fp16 where all are GPUs that have that, which is what
    runs on V100 and T4; else fp32."""
    devices = {group.node.device for group in cluster.groups}
    if all(device.dense_peak.bf16 is not None for device in devices):
        return PRECISIONS["bf16"]
    if all(device.kind == "gpu" and device.dense_peak.fp16 is not None for device in devices):
        return PRECISIONS["fp16"]
    return PRECISIONS["fp32"]

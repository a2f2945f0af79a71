"""Which assumptions of a prediction can change its answer, and which are only for the record.

`material(prediction, line)` is false for a line whose subject this plan does not read, or whose whole effect is bounded
by less than a tenth of the prediction's band. Such a line is not printed, only counted (`--assumptions` and `--json`
have all). A line whose effect is not bounded here is always printed. Leaves out making assumptions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gnomon.graph import Block, Op, size_of
from gnomon.ops.curve import Stream
from gnomon.prediction import Prediction

SHARE = 0.1
"""Share of the band's width, in seconds or bytes: an assumption that can change less is not printed."""

SLOWEST = 10.0
"""How many times slower than the memory's peak a gather or scatter is taken to be at most: no measured curve is
slower at sizes of a step."""

BYTES_OF_ROW = 32
"""Bytes of memory traffic of an element that is looked up, at most: in fp32 read and written, its gradient read, its
sum read and written."""

HOST_FIELDS = ("host_memory_bytes", "host_memory_bytes_per_s", "host_cores", "devices_per_host_link", "disk_")
"""Fields of a node, by their beginning, that are read only where something lies on the host or its disk."""

_GEMM = re.compile(r"no GEMM data in ([\w, ]+) for ")
_WALK = re.compile(r"no data on (gather|scatter) streaming for ")
_UNCHECKED = re.compile(r"\S+: not checked against its source: (.+)")


def material(prediction: Prediction, line: str) -> bool:
    """Whether what a line of `assumed` says can change the step or the memory by `SHARE` of the band."""
    if found := _GEMM.match(line):
        return bool(set(found[1].split(", ")) & _dtypes(prediction))
    if found := _UNCHECKED.match(line):
        return any(_read(prediction, name) for name in found[1].split(", "))
    if _WALK.match(line):
        band = prediction.band
        return _indexed_seconds(prediction) > SHARE * (band.high_s - band.low_s)
    return True


def lines_to_print(prediction: Prediction, lines: Sequence[str], *, every: bool) -> tuple[str, ...]:
    """The lines to print: those that are material, and how many are not; all of them for `every`."""
    printed = tuple(line for line in lines if every or material(prediction, line))
    num_omitted = len(lines) - len(printed)
    if not num_omitted:
        return printed
    return (*printed, f"{num_omitted} more that cannot change this by a tenth of its band (--assumptions)")


def _dtypes(prediction: Prediction) -> set[str]:
    """Those that matmuls of the plan may run in."""
    precision = prediction.plan.precision
    narrow = {"fp8", "int8", "fp4"} if precision.fp8 is not None else set()
    return {precision.compute, precision.param, *narrow, *({"tf32"} if precision.compute == "fp32" else ())}


def _read(prediction: Prediction, name: str) -> bool:
    """Whether a figure of a device or node is read for this plan."""
    plan = prediction.plan
    if name.startswith(HOST_FIELDS):
        away = any(rule.action == "offload" for rule in plan.saved.rules) or plan.optimizer.offload_parameters
        return away or plan.optimizer.offload is not None
    if name.startswith("dense_peak.") or name.startswith("sparse_peak."):
        return name.partition(".")[2] in _dtypes(prediction)
    # The base clock is for the record: prices follow the boost clock and what kernels sustain.
    return name != "clock_base_hz"


def _indexed_seconds(prediction: Prediction) -> float:
    """An upper bound on the seconds of a step that go to looking rows up and to adding up their gradients, for a rank
    that holds whole tables."""
    graph, plan = prediction.pricing.graph, prediction.plan
    device = min(prediction.pricing.cluster.devices, key=lambda device: device.memory_bytes_per_s)
    tokens = sum(prediction.workload.sequence_lengths()) / plan.stage_mesh(0).data_ranks
    widths = {block.name: sum(_row(block, op) for op in block.ops) for block in graph.blocks}
    elements = tokens * sum(call.repeat * widths[call.block] for call in graph.calls)
    return elements * BYTES_OF_ROW * SLOWEST / device.memory_bytes_per_s


def _row(block: Block, op: Op) -> int:
    """Elements of a row that an op looks up; 0 for an op that walks memory otherwise."""
    curve = op.rules.curve(op)
    if not (isinstance(curve, Stream) and curve.walk in ("gather", "scatter")):
        return 0
    dims = block.tensor(op.outputs[0]).dims
    return int(size_of(dims[-1], {"batch": 1, "seq": 1})) if dims else 1

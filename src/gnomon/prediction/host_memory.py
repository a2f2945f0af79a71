"""What a plan that offloads holds in a node's host memory, against what the node has.

`host_memory(prediction)` counts optimizer states, master copies and gradients of an update on the host, the updated
parameters that go back, and parameters and activations that wait there; of parameters on a disk those on their way.
`together(prediction)` is the most that device and host hold at the same time.
Leaves out the pages of the program itself, data loading, and copies that libraries pin on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.memory import gradients_made, held_moves
from gnomon.prediction.predict import Prediction
from gnomon.prediction.stage import StagePrice, width
from gnomon.prediction.step import Pricing
from gnomon.prediction.temporary_memory import layers_behind, temporaries
from gnomon.program import Program
from gnomon.sharding.parameters import waiting_bytes

ON_THE_WAY = 3
"""Layers whose parameters are in host memory between a disk and the device: as they are updated, one under way and two
that are being written (`runtime.parameters.files`); in forward and backward fewer."""

READ_AHEAD = 2
"""Layers whose parameters are read from a disk before their gather."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """The host memory of the node that holds most."""

    bytes: int
    """Held, at most: activations of as many microbatches as there are stages."""
    limit_bytes: int | None
    """What the node has; None where nobody says."""
    both_bytes: int = 0
    """On a CPU, where host and device are one memory: of a rank's tensors on both, at most; 0 elsewhere."""
    both_limit_bytes: int = 0
    """What a rank has there."""

    @property
    def fits(self) -> bool:
        """Whether it is known not to be too much."""
        return self.fits_in(self.both_limit_bytes)

    def fits_in(self, device_bytes: int) -> bool:
        """The same where so much of a device may be filled, which matters where host and device are one memory."""
        within = self.both_bytes <= min(device_bytes, self.both_limit_bytes)
        return within and (self.limit_bytes is None or self.bytes <= self.limit_bytes)


def host_memory(prediction: Prediction) -> HostMemory:
    """Host memory of a prediction's plan; 0 bytes where nothing is offloaded."""
    pricing = prediction.pricing
    most = max((_rank_bytes(prediction, stage) for stage in pricing.stages), default=0)
    nodes = pricing.cluster.node_kinds
    known = [node.host_memory_bytes for node in nodes if node.host_memory_bytes is not None]
    limit = min(known) if len(known) == len(nodes) else None
    # On a CPU device and host are one memory, so their peaks must fit together, at the time at which their sum is
    # largest.
    one = most > 0 and all(node.device.kind == "cpu" for node in nodes)
    return HostMemory(
        bytes=most * max(node.count for node in nodes),
        limit_bytes=limit,
        both_bytes=max(together(prediction)) if one else 0,
        both_limit_bytes=min(node.device.memory_bytes for node in nodes) if one else 0,
    )


def fits_within(prediction: Prediction, device_bytes: int) -> bool:
    """Whether every rank's peak is at most `device_bytes`, and hosts hold what waits there.

    What a goal asks, whose limit may be lower than what devices have (`Prediction.fits`).
    """
    ranks = all(rank.peak_bytes <= device_bytes for rank in prediction.memory)
    return ranks and host_memory(prediction).fits_in(device_bytes)


def together(prediction: Prediction) -> tuple[int, ...]:
    """Returns for each rank class, as in `Prediction.memory`, bytes of tensors on the device and the host in one, at
    most, in order of issue. What a rank takes where the two are one memory, as on a CPU: their peaks come at different
    times.

    Without what the device's allocator rounds, and workspaces.
    """
    structure, pricing = prediction.structure, prediction.pricing
    program = structure.program
    sizes = dict(prediction.sizes)
    before = held_moves(structure, pricing, sizes)
    extra = temporaries(program, pricing, gradients_made(program, pricing, before))
    # Played twice: with what stays on the host at size 0, and at its true size. The difference of the peaks is what the
    # host adds at the worst time.
    device = before.during(program.num_rows) + extra
    for block in range(program.num_stages):
        gradient = _gradient_bytes(pricing, block)
        sizes |= {f"{block}GH": gradient, f"{block}GT": gradient}
        sizes[f"{block}S"] += sum(layer.offloaded_bytes for layer, _ in layers_behind(pricing, block))
    both = held_moves(structure, pricing, sizes).during(program.num_rows) + extra
    both += _carried_bytes(program, sizes) + _read_ahead_bytes(program, pricing)
    totals = []
    for memory in prediction.memory:
        low, high = int(program.class_ptr[memory.rank_class]), int(program.class_ptr[memory.rank_class + 1])
        tensors = sum(size for name, size in memory.by_class.items() if name not in ("workspace", "overhead"))
        stages = {pricing.blocks[block][0] for block in program.stage[low:high].tolist()}
        stays = sum(_stays_bytes(pricing.stages[number]) for number in stages)
        totals.append(int(tensors + stays + both[low:high].max() - device[low:high].max()))
    return tuple(totals)


def _carried_bytes(program: Program, sizes: Mapping[str, float]) -> NDArray[np.float64]:
    """[rows] gradients on the host that the next step's update reads (a delayed update), from when they come down."""
    carried = np.zeros(program.num_rows)
    if not any(buffer.name == "GH" and buffer.lifetime == "carried" for buffer in program.buffers):
        return carried
    down = np.isin(program.kind, [i for i, kind in enumerate(program.kinds) if kind.name == "D2H"])
    for low, high in pairwise(program.class_ptr.tolist()):
        came = set[int]()
        for row in (low + np.flatnonzero(down[low:high])).tolist():
            blocks = _blocks_of(program, row) - came
            carried[row:high] += sum(sizes[f"{block}GH"] for block in blocks)
            came |= blocks
    return carried


def _blocks_of(program: Program, row: int) -> set[int]:
    """The Program's stages that a row is about: one row may send several."""
    override = program.overrides.get(row)
    if override is None or override.effects is None:
        return {int(program.stage[row])}
    return {effect.ref.stage for effect in override.effects}


def _read_ahead_bytes(program: Program, pricing: Pricing) -> NDArray[np.float64]:
    """[rows] parameters that were read from a disk before they are gathered: of the next two gathers of the step, and
    while one begins its own."""
    read_ahead = np.zeros(program.num_rows)
    if pricing.plan.optimizer.parameter_tier != "disk":
        return read_ahead
    gathers = np.isin(program.kind, [i for i, kind in enumerate(program.kinds) if kind.name == "UNSHARD"])
    for low, high in pairwise(program.class_ptr.tolist()):
        rows = (low + np.flatnonzero(gathers[low:high])).tolist()
        parts = [_waiting_bytes(pricing, block) for block in program.stage[rows].tolist()]
        for at, (row, until) in enumerate(zip(rows, [*rows[1:], high], strict=True)):
            read_ahead[row:until] = sum(parts[at + 1 : at + 1 + READ_AHEAD])
            read_ahead[row] += parts[at]
    return read_ahead


def _waiting_bytes(pricing: Pricing, block: int) -> int:
    """A rank's part of the parameters behind one of the Program's stages."""
    stage = pricing.stages[pricing.blocks[block][0]]
    layers = layers_behind(pricing, block)
    return sum(waiting_bytes(layer.sharded, stage.mesh, stage.plan.precision) for layer, _ in layers)


def _rank_bytes(prediction: Prediction, stage: StagePrice) -> int:
    pricing, plan = prediction.pricing, stage.plan
    # No stage holds activations of more microbatches than there are stages (1F1B's first one), nor than there are.
    alive = min(pricing.count, plan.num_stages)
    total = alive * sum(layer.offloaded_bytes * len(labels) for layer, labels in stage.layers)
    if plan.optimizer.offload is not None:
        total += int(stage.updated_elements() * plan.optimizer.offload.fraction * width(plan.precision.grad))
    if plan.optimizer.offload_parameters and plan.optimizer.parameter_tier == "disk":
        sizes = (waiting_bytes(layer.sharded, stage.mesh, plan.precision) for layer, _ in stage.layers)
        total += ON_THE_WAY * max(sizes)
    return total + pricing.paged_bytes + _stays_bytes(stage)


def _stays_bytes(stage: StagePrice) -> int:
    """What a rank has on the host from step to step: states, master copies and parameters."""
    plan, total = stage.plan, 0
    if plan.optimizer.offload is not None:
        # What the device would have without offloading, less what it has: the host's part by the same rules.
        here = replace(plan, optimizer=replace(plan.optimizer, offload=None))
        own, whole = stage.static_bytes(), replace(stage, plan=here).static_bytes()
        total += sum(whole[name] - own[name] for name in ("master", "states"))
        updated = stage.updated_elements() * plan.optimizer.offload.fraction
        total += 0 if plan.optimizer.offload_parameters else int(updated * width(plan.precision.param))
    if plan.optimizer.offload_parameters and plan.optimizer.parameter_tier == "host":
        here = replace(plan, optimizer=replace(plan.optimizer, offload_parameters=False))
        total += replace(stage, plan=here).static_bytes()["parameters"]
    return total


def _gradient_bytes(pricing: Pricing, block: int) -> float:
    """Counts the bytes of a rank's part of the gradients behind one of the Program's stages."""
    stage = pricing.stages[pricing.blocks[block][0]]
    # ZeRO divides elements, not layers: every layer's part is the stage's share of it.
    share = stage.updated_elements() / max(sum(stage.elements), 1)
    elements = sum(parameter_elements(layer) for layer, _ in layers_behind(pricing, block))
    return elements * share * width(stage.plan.precision.grad)

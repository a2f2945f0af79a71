"""The tensors of a predicted step and the rows that use them, for tiers of memory (`simulate.two_tiers`).

`trace_of(made)` reads the Program row by row: parameters, gradients, optimizer states, and what a forward keeps for its
backward, each of one layer. Tensors of a layer that the same rows use are one, as Sentinel puts them on the same pages.
What lives inside a row (gradients of activations, the allocator's rest) is a pool. Leaves out several ranks.
"""

from __future__ import annotations

import numpy as np

from gnomon.errors import PlanError
from gnomon.prediction.predict import Prediction
from gnomon.prediction.step import Pricing
from gnomon.prediction.temporary_memory import temporaries
from gnomon.program import buffer_bytes
from gnomon.program.kinds import EFFECT_OPS
from gnomon.simulate.two_tiers import TierTensor, TierTrace

READS = frozenset({"read", "consume"})
"""Effects after which a tensor is as it was."""
RESIDENT = {"P": ("parameters",), "G": ("gradients",)}
STATES = ("master", "states")


def trace_of(prediction: Prediction) -> TierTrace:
    """Makes the trace of a prediction with a row for each layer (`TimedPlan.of(…, by_layer=True)`), on one rank.
    PlanError for several."""
    program, table = prediction.structure.program, prediction.structure.deps.table
    if prediction.plan.world_size > 1 or program.num_classes > 1:
        raise PlanError(
            f"tensors move between the tiers of one rank, and the plan has {prediction.plan.world_size}; use one"
        )
    sizes, elements, by_class = (
        buffer_bytes(program, prediction.structure.deps, prediction.sizes),
        *_elements(prediction),
    )
    tensors: list[TierTensor] = []
    numbers: dict[object, int] = {}

    def number(key: object, name: str, nbytes: float, *, carried: bool) -> int:
        if key not in numbers:
            numbers[key] = len(tensors)
            tensors.append(TierTensor(name=name, nbytes=nbytes, carried=carried))
        return numbers[key]

    entries: list[list[int]] = [[] for _ in range(program.num_rows)]
    for entry, row in enumerate(table.row.tolist()):
        entries[row].append(entry)
    seconds, uses, writes = list[float](), list[tuple[int, ...]](), list[frozenset[int]]()
    for row in range(program.num_rows):
        used: dict[int, bool] = {}
        for entry in entries[row]:
            buffer = int(table.buffer[entry])
            ref, changes = table.ref(program, buffer), EFFECT_OPS[table.op[entry]] not in READS
            lifetime = next(b.lifetime for b in program.buffers if b.name == ref.buffer)
            nbytes = sizes[buffer]
            if ref.buffer in RESIDENT:
                nbytes = elements[ref.stage] * sum(by_class[name] for name in RESIDENT[ref.buffer])
            tensor = number(buffer, table.name(program, buffer), float(nbytes), carried=lifetime == "carried")
            used[tensor] = used.get(tensor, False) or changes
        stage = int(program.stage[row])
        if program.kinds[program.kind[row]].name == "OPT":
            nbytes = elements[stage] * sum(by_class[name] for name in STATES)
            used[number(("states", stage), f"states of stage {stage}", nbytes, carried=True)] = True
        seconds.append(float(prediction.durations.busy[program.key[row]]))
        uses.append(tuple(used))
        writes.append(frozenset(tensor for tensor, changes in used.items() if changes))
    inside = float(np.max(temporaries(program, prediction.pricing), initial=0.0))
    return TierTrace(
        tensors=tuple(tensors), seconds=tuple(seconds), uses=tuple(uses), writes=tuple(writes), inside=inside
    )


def _elements(prediction: Prediction) -> tuple[list[int], dict[str, float]]:
    """(parameters of each of the Program's stages, bytes a parameter by class of memory). PlanError for weights that
    two layers share."""
    pricing: Pricing = prediction.pricing
    names: set[str] = set()
    counts = []
    for number, index in pricing.blocks:
        stage = pricing.stages[number]
        if index < 0:
            raise PlanError("a row is a whole stage here; predict with a row for each layer")
        layer, price = stage.in_order[index], stage.order[index]
        count = 0
        for tensor in price.sharded.block.parameters:
            if (name := layer.call.parameter_name(tensor.name, layer.index)) in names:
                raise PlanError(f"{name} belongs to two layers, which tiers of memory do not know; untie it")
            names.add(name)
            count += int(price.sharded.local_elements[tensor.name])
        counts.append(count)
    memory, total = prediction.memory[0].by_class, sum(counts)
    return counts, {name: memory.get(name, 0) / total for name in ("parameters", "gradients", *STATES)}

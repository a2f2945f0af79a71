"""Memory of every rank class: by class of what is held, the peak's moment, and whether it fits.

What stays between steps comes from the stage's parameters and ZeRO; what comes and goes from the Program in issue
order, which is what a caching allocator sees. Peak bytes are reserved bytes (blocks and segments rounded as the
allocator does) plus what lies outside it. Leaves out host memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.graph import Layer
from gnomon.late import load_late
from gnomon.lowering.chunked import chunk_pass
from gnomon.lowering.exchanges import FORWARD, TRAVEL
from gnomon.plans.expert_rows import exchange_parts, part_of
from gnomon.prediction.communicators import communicators, flat_bytes
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.reduced_memory import (
    copies,
    gradient_bytes,
    largest_bucket,
    made_each_step,
    step_gradients,
    waited_for,
)
from gnomon.prediction.run_ahead import held_by_streams, split_by_microbatches
from gnomon.prediction.stage import StagePrice, width
from gnomon.prediction.step import Pricing
from gnomon.prediction.streamed import blocks_on_device, gradient_sizes, in_flight, is_streamed, on_device
from gnomon.prediction.temporary_memory import layers_behind, temporaries, unmade_gradients
from gnomon.prices.allocator import PlacedMemory, place_memory, workspace_bytes
from gnomon.program import Program, Structure, buffer_moves
from gnomon.sharding.parameters import undivided_bytes
from gnomon.units import distinct, show_bytes

Verdict = Literal["fits", "may not fit", "does not fit"]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Memory of the ranks of one class."""

    rank_class: int
    """Index of the Program's rank class."""
    ranks: tuple[int, ...]
    """Ranks of the job in this class."""
    device: str
    """Name of the kind of device."""
    by_class: Mapping[str, int]
    """Bytes at the peak by class: parameters, gradients, master, states, activations, logits, temporary, communication,
    workspace and overhead -> bytes at the peak."""
    allocated_bytes: int
    """Bytes of tensors at their peak."""
    reserved_bytes: int
    """Bytes that the allocator holds at the peak."""
    peak_bytes: int
    """Bytes at the peak, inside the allocator and outside it."""
    usual_bytes: int
    """The same on a device with room to spare. Where that is more than the device has, the job fits only as long as the
    allocator finds free segments to give back and communicators take less than they usually do."""
    least_bytes: int
    """The same with the fewest gaps, if the prediction leaves nothing out: of a job that is known to have run, all that
    its memory says."""
    limit_bytes: int
    """Bytes of memory that the device has."""
    peak_at: str
    """The moment of the peak, as `backward of unit 2`."""
    paged_bytes: int = 0
    """Of the optimizer's states, what has no room here at the peak and waits on the host (`Optimizer.paged`)."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def verdict(self) -> Verdict:
        """Judges whether the plan fits. `may not fit`: the peak is within the device's memory, what such a job usually
        takes is not."""
        if not self.fits:
            return "does not fit"
        return "fits" if self.usual_bytes <= self.limit_bytes else "may not fit"

    @property
    def sentence(self) -> str:
        """`fits: 61.4 of 79.25 GiB (rank 3, backward of unit 2, logits 9.8)`; or `70.0 MiB of 11.8 GiB (…)`; or
        `may not fit: 79.1 of 79.25 GiB, usually 82.0 (…)`."""
        named = {n: size for n, size in self.by_class.items() if n not in ("parameters", "workspace", "overhead")}
        largest = max(named, key=lambda n: named[n])
        unit, scale = ("GiB", 2**30) if self.peak_bytes >= 2**30 else ("MiB", 2**20)
        part = f"{largest} {self.by_class[largest] / scale:.1f}"
        if self.paged_bytes:
            part += f", states on the host {self.paged_bytes / scale:.1f}"
        peak, limit = f"{self.peak_bytes / scale:.1f}", show_bytes(self.limit_bytes, 4 if unit == "GiB" else 3)
        size = f"{peak} of {limit}" if limit.endswith(unit) else f"{peak} {unit} of {limit}"
        if self.verdict == "may not fit":
            size += f", usually {self.usual_bytes / scale:.1f}"
        return f"{self.verdict}: {size} (rank {self.ranks[0]}, {self.peak_at}, {part})"

    def to_mapping(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rank_class": self.rank_class,
            "ranks": list(self.ranks),
            "device": self.device,
            "by_class_bytes": dict(self.by_class),
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "peak_bytes": self.peak_bytes,
            "usual_bytes": self.usual_bytes,
            "least_bytes": self.least_bytes,
            "limit_bytes": self.limit_bytes,
            "fits": self.fits,
            "verdict": self.verdict,
            "peak_at": self.peak_at,
            "paged_bytes": self.paged_bytes,
        }


_ON_THEIR_WAY = ("SKIP", "DSKIP", *TRAVEL)
"""How the names of buffers begin that are communicated and of which there are several."""

_NO_BYTES = (
    "X",
    "S",
    "Y",
    "DY",
    "DX",
    "P",
    "G",
    "PS",
    "GS",
    "M",
    "GH",
    "GT",
    "PH",
    "KV",
    "DKV",
    "SC",
    "KX",
    "KD",
    "GC",
)
"""Names of buffers that have nothing in them unless a stage says so."""

_WORDS = {
    "F": "forward",
    "C": "forward",
    "R": "recompute",
    "FRC": "redundant forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "OPT": "optimizer step",
    "DISPATCH": "dispatch to experts",
    "COMBINE": "combine of experts' results",
    "DISPATCH_B": "backward of a dispatch",
    "COMBINE_B": "backward of a combine",
    "UNSHARD": "gather of parameters",
    "REDUCE_GRAD": "reduction of gradients",
    "SWITCH": "switch of workers",
    "S": "head",
    "T": "gradients of the head",
}


def rank_memory(structure: Structure, pricing: Pricing) -> tuple[tuple[RankMemory, ...], dict[str, float]]:
    """Memory of every rank class, and the sizes of the Program's buffers that it follows from."""
    program = structure.program
    offload = pricing.plan.optimizer.offload
    # Gradients that stream to the host, or an optimizer of which a part stays, differ from block to block.
    parted = is_streamed(pricing) or (offload is not None and offload.fraction < 1)
    device_blocks = blocks_on_device(program) if parted else frozenset[int]()
    sizes = buffer_sizes(pricing, device_blocks)
    changes = held_moves(structure, pricing, sizes)
    extra = temporaries(program, pricing, gradients_made(program, pricing, changes))
    during = changes.during(program.num_rows) + extra
    on_tpu = any(stage.device.kind == "tpu" for stage in pricing.stages)
    # XLA schedules for memory: what it can do later or without does not count where room is short.
    needed = during - _at_leisure(program, pricing, changes, sizes, extra) if on_tpu else during
    unmade = unmade_gradients(program, pricing)
    is_copy = np.isin(program.kind, [i for i, kind in enumerate(program.kinds) if kind.name == "FRC"])
    memory = []
    for cls in range(program.num_classes):
        low, high = int(program.class_ptr[cls]), int(program.class_ptr[cls + 1])
        # The fullest row of the class is the peak; everything reported is of that row.
        row = low + int(np.argmax(during[low:high]))
        stages = tuple(dict.fromkeys(pricing.blocks[b][0] for b in distinct(program.stage[low:high]).tolist()))
        classes = _bytes_during(program, changes, low, row)
        kind, unit = program.kinds[program.kind[row]].name, int(program.unit[row])
        moment = _WORDS.get(kind, kind.lower()) + (f" of unit {unit}" if unit >= 0 else "")
        # The fullest row of what is needed may be another one than `row`.
        early = int(during[row] - needed[low:high].max())
        copies = {pricing.blocks[b][0] for b in program.stage[low:high][is_copy[low:high]].tolist()}
        absent = unmade.get(row, 0.0)
        if absent:
            key = next(key for key in classes if key[0] == "G")
            classes[key] -= absent
        inside = int(extra[row] + absent)
        memory.append(_rank(pricing, cls, stages, classes, sizes, inside, early, moment, device_blocks, copies))
    return tuple(memory), sizes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldMoves:
    """What comes and goes of the Program's buffers as the stack holds them, one entry a move."""

    row: NDArray[np.int64]
    """The row that moves something."""
    buffer: NDArray[np.int64]
    """Indices into the Program's buffer classes."""
    bytes: NDArray[np.float64]
    """Bytes: positive where more is held, negative where less."""
    at_start: NDArray[np.bool_]
    """Whether the move is at the start of the row; otherwise at its end."""

    def during(self, rows: int) -> NDArray[np.float64]:
        """[rows] bytes held while each row runs, in order of issue."""
        # total: bytes that a row adds in all. ends: what of it happens at its end only, mostly frees (negative).
        total = np.bincount(self.row, self.bytes, rows).astype(float)
        # A running sum over rows in order of issue. What is freed at a row's end is still held during it.
        ends = np.bincount(self.row, np.where(self.at_start, 0.0, self.bytes), rows)
        open_bytes: NDArray[np.float64] = np.cumsum(total) - ends
        return open_bytes


def held_moves(structure: Structure, pricing: Pricing, sizes: Mapping[str, float]) -> HeldMoves:
    """The Program's allocations and frees, but for four things.

    The input of a stage that keeps it becomes part of what it keeps when its forward begins. Gradients that are reduced
    at once are held until the next reduction waits (ZeRO 2: until the next gradient is made). Where a stack frees
    between the parts of a backward, the rest is what weight gradients read. Gradients that a stack frees after each
    step come in its first backward.
    """
    program = structure.program
    moves = buffer_moves(program, structure.deps, sizes)
    row, size = moves.row, moves.bytes.copy()

    def kinds(*names: str) -> list[int]:
        return [i for i, kind in enumerate(program.kinds) if kind.name in names]

    def moved(buffer: str, *names: str) -> NDArray[np.bool_]:
        """Whether it is this buffer that comes or goes, in an action of these kinds."""
        buffers = [i for i, entry in enumerate(program.buffers) if entry.name == buffer]
        return np.isin(moves.buffer, buffers) & np.isin(program.kind[moves.row], kinds(*names))

    keeps_input = np.array([_keeps_input(pricing, block) for block in range(program.num_stages)])
    # Allocations are at the start of a row, frees at its end, except a stage's input, which then counts as kept.
    at_start = (size > 0) | (moved("X", "F", "R", *FORWARD.values()) & keeps_input[program.stage[row]])
    if pricing.stack.gradients.bucketed is False and pricing.plan.optimizer.zero >= 2:
        # the shard is there once it has arrived
        waits = moved("G", "REDUCE_GRAD") | moved("GS", "REDUCE_GRAD")
        row, at_start = np.where(waits, waited_for(program, pricing)[row], row), at_start | waits
    buffer = moves.buffer
    first = np.flatnonzero(np.isin(program.kind, kinds("I")))
    # Input gradients free what weight gradients do not read; the rest (`deferred`) goes with W.
    if pricing.stack.gradients.split_backward_frees and len(first):
        deferred = np.array([_deferred(pricing, block) for block in range(program.num_stages)])
        # The W frees only what was deferred; the rest is freed at the end of the I, as one move more.
        late = moved("S", "W")
        size[late] = -deferred[program.stage[row[late]]]
        whole = np.array([sizes[f"{block}S"] for block in range(program.num_stages)])
        row = np.concatenate([row, first])
        buffer = np.concatenate([buffer, np.full(len(first), moves.buffer[late][0])])
        size = np.concatenate([size, (deferred - whole)[program.stage[first]]])
        at_start = np.concatenate([at_start, np.zeros(len(first), bool)])
    if copied := [*copies(program, pricing), *step_gradients(program, pricing)]:
        row = np.concatenate([row, [copy.row for copy in copied]])
        buffer = np.concatenate([buffer, np.full(len(copied), [b.name for b in program.buffers].index("G"))])
        size = np.concatenate([size, [copy.bytes for copy in copied]])
        at_start = np.concatenate([at_start, [copy.at_start for copy in copied]])
    return HeldMoves(row=row, buffer=buffer, bytes=size, at_start=at_start)


def _at_leisure(
    program: Program, pricing: Pricing, changes: HeldMoves, sizes: Mapping[str, float], extra: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[rows] bytes that XLA does without where room is short.

    A collective is an op for each weight, so parameters need not be gathered before, nor whole gradients kept after,
    the one matmul that they are of. A gradient of logits takes the place of the logits it is computed from, as an
    elementwise op may write over what it reads last.
    Source: XLA, hlo/analysis/hlo_dataflow_analysis.cc CanShareOperandBufferWithUser.
    """
    spared = np.zeros(program.num_rows)
    share = [_largest_share(pricing, block) for block in range(program.num_stages)]
    for name in ("P", "G"):
        of = np.array([buffer.name == name for buffer in program.buffers])[changes.buffer]
        row, buffer, size, at_start = (
            getattr(changes, column)[of] for column in ("row", "buffer", "bytes", "at_start")
        )
        open_now = HeldMoves(row=row, buffer=buffer, bytes=size, at_start=at_start).during(program.num_rows)
        # One collective per weight: at most the largest parameter's share is needed at once.
        one = np.array([share[block] * sizes.get(f"{block}{name}", 0.0) for block in range(program.num_stages)])
        spared += np.maximum(open_now - one[program.stage], 0.0)
    backward = np.isin(program.kind, [i for i, kind in enumerate(program.kinds) if kind.name in ("B", "I")])
    logits = np.array([logits_bytes(pricing, block) for block in range(program.num_stages)], float)
    spared += np.where(backward, np.minimum(logits[program.stage], extra), 0.0)
    return spared


def gradients_made(program: Program, pricing: Pricing, moves: HeldMoves) -> dict[int, float]:
    """Rows of backwards -> bytes of whole gradients that come in them, where the runtime has them for as long as they
    are reduced or sent to the host and makes room when it has the first (ZeRO 2 and 3 without buckets, and where
    gradients stream)."""
    if pricing.stack.gradients.bucketed is not False:
        return {}
    if pricing.plan.optimizer.zero < 2 and not is_streamed(pricing):
        return {}
    whole = [i for i, buffer in enumerate(program.buffers) if buffer.name == "G"]
    backward = [i for i, kind in enumerate(program.kinds) if kind.name == "B"]
    comes = np.isin(moves.buffer, whole) & moves.at_start & (moves.bytes > 0)
    comes &= np.isin(program.kind[moves.row], backward)
    share = in_flight(pricing.stages[0]) if is_streamed(pricing) else 1
    return {int(row): float(size) / share for row, size in zip(moves.row[comes], moves.bytes[comes], strict=True)}


def _largest_share(pricing: Pricing, block: int) -> float:
    """The share that the largest parameter has of those behind one of the Program's stages."""
    elements = [
        int(layer.sharded.local_elements[tensor.name])
        for layer, _ in layers_behind(pricing, block)
        for tensor in layer.sharded.block.parameters
    ]
    return max(elements) / sum(elements) if any(elements) else 0.0


def _keeps_input(pricing: Pricing, block: int) -> bool:
    """Whether what a stage of the Program keeps has its input in it."""
    first, size = layers_behind(pricing, block)[0]
    return 0 < first.input_bytes <= min(size, sum(tensor.bytes for tensor in first.saved if tensor.is_input))


def _deferred(pricing: Pricing, block: int) -> float:
    return float(sum(layer.deferred_bytes for layer, _ in layers_behind(pricing, block)))


def _bytes_during(program: Program, changes: HeldMoves, first: int, row: int) -> dict[tuple[str, int], float]:
    """Bytes of each (class of buffer, stage) during `row`, of the rank class whose rows begin at `first`."""
    # The same moment as `HeldMoves.during`: all of earlier rows of the class, and of `row` only what is at its start.
    mine = (changes.row >= first) & ((changes.row < row) | ((changes.row == row) & changes.at_start))
    # One number for (class of buffer, stage), so that one bincount sums them all.
    key = changes.buffer[mine] * program.num_stages + program.stage[changes.row[mine]]
    total = np.bincount(key, changes.bytes[mine], len(program.buffers) * program.num_stages)
    names = [buffer.name for buffer in program.buffers]
    return {
        (names[at // program.num_stages], at % program.num_stages): float(total[at])
        for at in np.flatnonzero(total).tolist()
    }


def _rank(
    pricing: Pricing,
    cls: int,
    stages: tuple[int, ...],
    by_buffer: Mapping[tuple[str, int], float],
    sizes: Mapping[str, float],
    temporary: int,
    early: int,
    moment: str,
    device_blocks: frozenset[int],
    copies: Collection[int],
) -> RankMemory:
    """Memory of one rank class at its fullest row. copies: those of `stages` that are another rank's."""
    here = [pricing.stages[s] for s in stages]
    own = [pricing.stages[s] for s in stages if s not in copies]
    by_class = {"parameters": 0, "gradients": 0, "master": 0, "states": 0}
    for stage in here:
        for name, size in _static_bytes(pricing, stage, device_blocks).items():
            by_class[name] += size

    def total(*names: str) -> int:
        return int(sum(size for (name, _), size in by_buffer.items() if name in names))

    # Gradients made anew each step come and go, so they are in `held`, not in what stays.
    if made_each_step(pricing):  # they are among what is held
        by_class["gradients"] = 0
    by_class["gradients"] += sum(_second_gradients(pricing, stage) for stage in here)
    by_class["gradients"] += _unreduced(pricing, own) if copies else 0
    if pricing.turns is not None:
        by_class["gradients"] += sum(pricing.turns.parked_bytes(stage) for stage in here)
    by_class["parameters"] += total("P")
    # These gradients come and go as buffers G and GS, so that what stays between steps is none of them.
    if is_streamed(pricing) or (pricing.stack.gradients.bucketed is False and pricing.plan.optimizer.zero >= 2):
        by_class["gradients"] = 0
    by_class["gradients"] += total("G", "GS")
    # Logits are kept with activations but reported apart: their share of what each stage keeps.
    logits = int(
        sum(
            # size / S: microbatches that are kept at the moment, each with its logits.
            size / sizes[f"{block}S"] * logits_bytes(pricing, block)
            for (name, block), size in by_buffer.items()
            if name in ("S", "SC") and sizes[f"{block}S"]
        )
    )
    by_class["activations"] = total("S", "X", "HX", "EX", "KV", "DKV", "SC", "KX") - logits
    by_class["activations"] += sum(_resident_batch_bytes(pricing, stage) for stage in own)
    extra_copies = 0.0 if pricing.costs is None else pricing.costs.logits
    by_class["logits"] = round(logits * (1 + extra_copies)) + total("VS")
    by_class["communication"] = total(
        "Y", "DY", "DX", "VL", "HG", "EG", "KD", *(name for name, _ in by_buffer if name.startswith(_ON_THEIR_WAY))
    )
    by_class["temporary"] = temporary
    device = here[0].device
    by_class["workspace"] = workspace_bytes(device, pricing.stack)
    allocated = sum(by_class.values())
    groups, peers = communicators(pricing, here)
    blocks = [block for block, (number, _) in enumerate(pricing.blocks) if number in stages]
    waiting = max(held_by_streams(pricing, block) for block in blocks)
    # Streams hold freed blocks until they have passed them: memory that cannot be reused at the peak.
    waiting += split_by_microbatches(pricing, by_class["activations"])

    def place(size: int) -> PlacedMemory:
        return place_memory(
            device,
            pricing.stack,
            size,
            groups,
            exchange_peers=peers,
            largest=max(temporary, 1),
            flat=sum(flat_bytes(pricing, stage) for stage in here) + waiting,
            early=early,
        )

    # Placed anew below if pages leave: what the allocator reserves follows from what is allocated.
    placement, paged = place(allocated), 0
    if pricing.plan.optimizer.paged:  # pages go to the host where a kernel or the allocator asks for room
        paged = min(by_class["states"], max(0, placement.usual_bytes - device.memory_bytes))
        by_class["states"] -= paged
        allocated -= paged
        placement = place(allocated)
    # What XLA need not hold yet is taken from the classes in turn, until the total is what is reserved.
    for name, size in (("parameters", total("P")), ("gradients", total("G")), ("temporary", temporary)):
        late = min(max(allocated - placement.reserved_bytes, 0), size)  # what XLA has there no longer than it must
        by_class[name] -= late
        allocated -= late
    by_class["overhead"] = placement.peak_bytes - allocated
    return RankMemory(
        rank_class=cls,
        ranks=_ranks_of(own),
        device=device.name,
        by_class=by_class,
        allocated_bytes=allocated,
        reserved_bytes=placement.reserved_bytes,
        peak_bytes=placement.peak_bytes,
        usual_bytes=placement.usual_bytes,
        least_bytes=placement.least_bytes,
        limit_bytes=device.memory_bytes,
        peak_at=moment,
        paged_bytes=paged,
    )


def _ranks_of(stages: Sequence[StagePrice]) -> tuple[int, ...]:
    """Lists every rank once; stages on the same ranks, of which there may be thousands, share their numbers."""
    members = [stage.members for stage in stages]
    apart = [ranks for i, ranks in enumerate(members) if ranks not in members[:i]]
    return apart[0] if len(apart) == 1 else tuple(dict.fromkeys(rank for ranks in apart for rank in ranks))


def _resident_batch_bytes(pricing: Pricing, stage: StagePrice) -> int:
    """Bytes of inputs of a captured model that no layer keeps; the batch of a step is there all the time."""
    sizes, sources_saved = dict[str, int](), set[str]()
    for layer, price in zip(stage.in_order, stage.order, strict=True):
        if not price.forward_bytes:
            continue
        sources, saved_names = dict(layer.call.inputs), {one.tensor for one in price.saved}
        for name in price.context.no_grad:
            source = sources.get(name, name)
            sources_saved |= {source} if name in saved_names else set()
            sizes[source] = int(price.sharded.bytes_of(price.sharded.block.tensor(name)))
    return pricing.count * sum(size for source, size in sizes.items() if source not in sources_saved)


def _static_bytes(pricing: Pricing, stage: StagePrice, device_blocks: frozenset[int]) -> dict[str, int]:
    """Bytes that stay between steps, by class. device_blocks: blocks whose optimizer stays on the device."""
    sizes = stage.static_bytes()
    if pricing.costs is not None:
        sizes["states"] += load_late("gnomon.prediction.method_costs:kept_bytes")(pricing.costs, stage)
        sizes["parameters"] += pricing.teacher_bytes
    if device_blocks:
        number = next(i for i, other in enumerate(pricing.stages) if other is stage)
        # Sizes as if nothing were offloaded; `share` of them belongs to blocks whose update is on the device.
        here = replace(stage.plan, optimizer=replace(stage.plan.optimizer, offload=None))
        whole, share = replace(stage, plan=here).static_bytes(), on_device(pricing, number, device_blocks)
        sizes |= {name: round(whole[name] * share) for name in ("master", "states")}
    return sizes


def _second_gradients(pricing: Pricing, stage: StagePrice) -> int:
    """Bytes of a second gradient of every parameter, in the parameters' dtype, besides the accumulated ones: the
    buckets of torch's DistributedDataParallel (or, where gradients are summed whole, what the last backward left), or
    gradients that an optimizer with wider ones of its own does not free. Under ZeRO 3, gradients that stay whole
    between microbatches."""
    stack, precision = pricing.stack, stage.plan.precision
    if pricing.plan.optimizer.zero == 3:
        summed = stack.gradients.unsharded_accumulation and pricing.count > 1
        return sum(stage.elements) * width(precision.compute) if summed else 0
    reduced = stack.gradients.reducer_buckets and stage.mesh.dp_replicate * stage.mesh.dp_shard * stage.mesh.cp > 1
    second_copy = stack.gradients.kept_gradients and width(precision.grad) > width(precision.param)
    return sum(stage.elements) * width(precision.param) if reduced or second_copy else 0


def _unreduced(pricing: Pricing, own: Sequence[StagePrice]) -> int:
    """Bytes of gradients before they are added up over replicas, which stay next to the sum so that it can be done
    again."""
    return sum(stage.static_bytes()["gradients"] for stage in own) if pricing.plan.mesh.data_ranks > 1 else 0


def _keys_bytes(layer: LayerPrice) -> int:
    """Bytes of keys and values of a layer's attention on one rank."""
    sharded = layer.sharded
    return sum(
        int(sharded.local_bytes[name]) for op in sharded.block.ops if op.does == "attends" for name in op.inputs[1:3]
    )


def logits_bytes(pricing: Pricing, block: int) -> int:
    """The bytes of logits in what a stage of the Program keeps of a microbatch."""
    own = pricing.stages[pricing.blocks[block][0]].order[slice(*pricing.span(block))]
    return sum(tensor.bytes for layer in own for tensor in layer.saved if tensor.is_logits)


def _last_layer(pricing: Pricing, block: int) -> Layer:
    """The last layer behind one of the Program's stages."""
    return pricing.stages[pricing.blocks[block][0]].in_order[pricing.span(block)[1] - 1]


def _several(pricing: Pricing, block: int, number: int, index: int, layers: int) -> dict[str, float]:
    """Bytes of buffers of messages of several tensors, which neither the first layer reads nor the last writes
    alone."""
    sent, sizes = pricing.messages.sent, dict[str, float]()
    last = pricing.span(block)[1]
    ends = (("X", (number - 1, number), index in (-1, 0)), ("Y", (number, number + 1), last == layers))
    for name, pair, is_end in ends:
        if is_end and len(sent.get(pair, ())) > 1:
            sizes[f"{block}{name}"] = sizes[f"{block}D{name}"] = float(pricing.messages.bytes_of(pair))
    return sizes


def buffer_sizes(pricing: Pricing, device_blocks: frozenset[int] = frozenset()) -> dict[str, float]:
    """Bytes of the Program's buffers by label.

    S is what the layers behind a stage keep; X, Y, DX, DY and skips (SKIP_0_2) what stages send each other. P and G
    are what comes and goes under ZeRO: the gathered parameters and whole gradients of a block at stage 3, two
    buckets of gradients at stage 2; without buckets all gradients of a stage, and GS the shards of stages 2 and 3.
    What stays between steps is counted apart (0 here), and so is the host's memory (GH, GT, PH).
    device_blocks: where gradients stream to the host, the blocks whose update is on the device.
    """
    # Names: S kept, X input, Y output, DX and DY their gradients, P gathered parameters, G whole gradients, GS shards.
    sizes: dict[str, float] = {name: 0.0 for name in _NO_BYTES}
    zero, parts_of = pricing.plan.optimizer.zero, exchange_parts(pricing.plan)
    travelling = [(name, part) for name in TRAVEL for part in range(parts_of)] if parts_of > 1 else []
    sizes |= {f"{name}.{part}": 0.0 for name, part in travelling}
    for source, target in pricing.messages.sent:
        # Messages to the next stage are its X and the sender's Y; only those that skip stages are buffers of their own.
        if target != source + 1:
            size = float(pricing.messages.bytes_of((source, target)))
            sizes |= {f"SKIP_{source}_{target}": size, f"DSKIP_{source}_{target}": size}
    for shape, priced in pricing.shapes.items():  # of one unit, under labels that say which
        own = buffer_sizes(priced, device_blocks)
        sizes |= {f"{label}~{shape}": size for label, size in own.items() if label not in _NO_BYTES}
    for block, (number, index) in enumerate(pricing.blocks):
        stage = pricing.stages[number]
        if stage.share is not None:
            sizes |= {f"{block}{name}": float(size) for name, size in stage.share.buffer_bytes().items()}
        parts = layers_behind(pricing, block)
        sizes[f"{block}S"] = float(sum(device_blocks for _, device_blocks in parts))
        first, last = parts[0][0], parts[-1][0]
        sizes[f"{block}X"] = sizes[f"{block}DX"] = float(first.input_bytes)
        sizes[f"{block}Y"] = sizes[f"{block}DY"] = float(last.output_bytes)
        part_bytes = {"SENT": first.input_bytes, "MADE": last.output_bytes}
        sizes |= {
            f"{block}{name}.{part}": part_bytes[name] / parts_of
            for name, part in travelling
            if name in part_bytes and part_of(pricing.graph, _last_layer(pricing, block)) == "experts"
        }
        if pricing.rows_divide_stages:  # gradients that layers of a stage hand each other are inside theirs
            if index > 0:
                sizes[f"{block}DX"] = 0.0
            if pricing.span(block)[1] < len(stage.order):
                sizes[f"{block}DY"] = 0.0
        sizes[f"{block}SC"], sizes[f"{block}KX"] = sizes[f"{block}S"], sizes[f"{block}X"]
        sizes[f"{block}KD"] = sizes.get(f"{block - 1}DX", 0.0)
        if chunk_pass(pricing.plan.schedule) is not None:
            sizes[f"{block}KV"] = sizes[f"{block}DKV"] = float(sum(_keys_bytes(layer) for layer, _ in parts))
        sizes |= _several(pricing, block, number, index, len(stage.order))
        collectives = [stage.collectives(layer) for layer, _ in parts]
        reduced = [sum(c.bytes for c in of_layer if c.kind == "reduce_scatter") for of_layer in collectives]
        whole = pricing.stack.gradients.bucketed is False
        if zero == 3 and index >= 0:
            sizes[f"{block}P"] = float(sum(c.bytes for one in collectives for c in one if c.when == "before_forward"))
            if pricing.plan.optimizer.offload_parameters:
                sizes[f"{block}P"] += sum(
                    undivided_bytes(layer.sharded, stage.mesh, stage.plan.precision) for layer, _ in parts
                )
        by_layer = index >= 0 and (zero == 3 or (zero == 2 and whole))
        if by_layer:
            of_layers = (
                [gradient_bytes(stage, at) for at in range(*pricing.span(block))]
                if whole
                else [(size, 0) for size in reduced]
            )
            sizes |= {f"{block}{name}": float(sum(x[i] for x in of_layers)) for i, name in enumerate(("G", "GS"))}
        if index >= 0 and is_streamed(pricing):
            sizes[f"{block}G"], sizes[f"{block}GS"] = gradient_sizes(
                pricing, stage, first, int(reduced[0]), is_saved=block in device_blocks
            )
        elif by_layer:
            continue
        elif whole and zero == 2:
            sizes[f"{block}G"] = float(sum(stage.elements) * width(pricing.plan.precision.grad))
            sizes[f"{block}GS"] = float(stage.static_bytes()["gradients"])
        elif zero == 2:
            sizes[f"{block}G"] = float(
                2 * (pricing.plan.overlap.bucket_bytes or largest_bucket(pricing, number, reduced))
            )
    return sizes

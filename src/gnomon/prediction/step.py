"""Seconds of every action of one step of a plan.

`Pricing` gives them for each price key of a Program, from which the simulator plays it: of computing (`compute_time`),
collectives of parameters and gradients (`reduction_time`), messages between stages (`messages`) and the update
(`update`). Leaves out the clock (room `simulate`), and what a person reads (`predict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gnomon.errors import UnpricedError
from gnomon.late import load_late
from gnomon.lowering.exchanges import COMPUTES
from gnomon.lowering.gradients import TIED
from gnomon.lowering.tensor_sums import COPIES, REPLICAS, TERMS
from gnomon.plans import Workload, transfers
from gnomon.prediction.compute_time import PHASES, ComputeTime
from gnomon.prediction.layer import parameter_elements
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.messages import Messages
from gnomon.prediction.priced import PricedStages
from gnomon.prediction.reduction_time import WANTED, ReductionTime
from gnomon.prediction.stage import StagePrice
from gnomon.prediction.turns import SWITCH, Turns
from gnomon.prediction.update import (
    exchanged_s,
    host_copy_s,
    in_update,
    norm_s,
    on_host_s,
    parameters_back_s,
    parameters_s,
    update_parts,
)
from gnomon.prediction.vocabulary import KINDS as VOCABULARY
from gnomon.prices.collectives import collective_seconds
from gnomon.prices.fitted import FittedRates
from gnomon.prices.links import AxisLink
from gnomon.program import Key, Program
from gnomon.simulate import Durations
from gnomon.software import Stack
from gnomon.units import quantise

IN_UPDATE = frozenset((TERMS, COPIES, REPLICAS))
"""The price names of sums over ranks of tp and ep right before the update, in whose price they are."""

BY_LAYER = frozenset({*PHASES, *COMPUTES, *WANTED, "OPT"})
"""The kinds of action whose price follows from their layers alone."""

POLLS = frozenset({"RECV_F", "RECV_B", "POLL"})
"""The kinds of action in which a host that polls sleeps until it sees the two descriptions of a tensor gone or come."""

FREE_KINDS = frozenset({*POLLS, "RECV_SKIP", "RECV_SKIP_GRAD", "RESHARD", "LOAD", "FORGET", "RECV_COPY"})
"""The kinds of action that only mark a moment: a receive ends when its send does."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pricing(PricedStages):
    """A plan's stages priced, and from them the seconds of every action of a Program: one value from the prices of
    layers to the clock. What is derived is computed once, when it is first asked for."""

    shapes: Mapping[str, Pricing] = field(default_factory=dict)
    """The price of each shape of units that are not alike; the stages are then those of the largest."""
    turns: Turns | None = None
    """The turns of workers that share the device; None without."""
    paged_bytes: int = 0
    """Of the states of the rank that has least room, what waits on the host between updates (`Optimizer.paged`)."""

    @cached_property
    def messages(self) -> Messages:
        """Prices messages between stages."""
        sent = {(t.source, t.target): t.tensors for t in transfers(self.plan, self.graph)}
        return Messages(plan=self.plan, cluster=self.cluster, stack=self.stack, stages=self.stages, sent=sent)

    @cached_property
    def compute(self) -> ComputeTime:
        """Prices what stages compute."""
        return ComputeTime(self)

    @cached_property
    def reductions(self) -> ReductionTime:
        """Prices collectives of parameters and gradients."""
        return ReductionTime(self, self.compute, {})

    @cached_property
    def alike(self) -> list[int]:
        """Finds for each of the Program's stages the first that costs the same, so that it is priced once."""
        like, first = _like_stages(self.stages), dict[tuple[int, tuple[LayerPrice, ...]], int]()
        # Blocks are alike if their stages are and they span the same layers.
        spans = [slice(*self.span(block)) if index >= 0 else slice(0) for block, (_, index) in enumerate(self.blocks)]
        return [
            first.setdefault((like[stage], self.stages[stage].order[span]), block)
            for block, ((stage, _), span) in enumerate(zip(self.blocks, spans, strict=True))
        ]

    @cached_property
    def _updates(self) -> dict[int, tuple[float, int, float]]:
        return {}

    @cached_property
    def _memo(self) -> dict[tuple[str, int, str], float]:
        return {}

    def of(self, shape: str) -> Pricing:
        """The prices for units of a shape (`Key.shape`)."""
        return self.shapes.get(shape, self)

    def with_numbers(self, numbers: FittedRates | None = None, stack: Stack | None = None) -> Pricing:
        """The same plan under other fitted numbers, or with a stack that differs in its own numbers alone; what does
        not depend on them is not computed again."""
        shapes = {shape: priced.with_numbers(numbers, stack) for shape, priced in self.shapes.items()}
        other = replace(self, numbers=numbers or self.numbers, stack=stack or self.stack, shapes=shapes)
        # `replace` leaves every cached value behind; these are the ones that no fitted number is in.
        vars(other).update(
            messages=self.messages,
            alike=self.alike,
            reductions=ReductionTime(other, other.compute, self.reductions.prices),
            _phases=self._phases,
            _extras=self._extras,
            _other_host=self._other_host,
            _updates=self._updates,
            _memo={at: seconds for at, seconds in self._memo.items() if at[0] == "NORM" or at[2] == TIED},
        )
        return other

    def with_stage(self, number: int, stage: StagePrice) -> Pricing:
        """The same plan with other layers on one stage, on the same devices: for what follows from that stage's layers
        alone (`BY_LAYER`), not for messages between stages."""
        other = replace(self, stages=(*self.stages[:number], stage, *self.stages[number + 1 :]))
        # the stage may cost what no other does now
        vars(other).update(messages=self.messages, alike=list(range(len(self.blocks))))
        return other

    def durations(self, program: Program) -> Durations:
        """Seconds of each price key, on the grid."""
        return Durations(busy=quantise(np.array([self.seconds(key) for key in program.keys], float)))

    def seconds(self, key: Key) -> float:
        """Seconds that an action holds its stream."""
        if key.shape in self.shapes:
            return self.shapes[key.shape].seconds(key._replace(shape=""))
        # Actions that follow from layers alone are priced once for all stages that cost the same.
        stage = self.alike[key.stage] if key.kind in BY_LAYER and not key.name else key.stage
        # Without the rank class: replicas on other devices, or with other shares, have a `Pricing` of their own.
        at = (key.kind, stage, key.name)
        if at not in self._memo:
            self._memo[at] = self._seconds(key._replace(stage=stage))
        return self._memo[at]

    def _seconds(self, key: Key) -> float:
        # Names tell rows apart: `2AR.4` is one of four parts, `F&B` a composite, `2..3.AR` spans blocks 2 to 3.
        if (parts := _parts_of(key)) > 1:
            return self._part_s(key._replace(name=""), parts)
        kind, stage = COMPUTES.get(key.kind, key.kind), key.stage
        if "&" in key.name:
            return sum(self.seconds(key._replace(kind=part, name="")) for part in key.name.split("&"))
        if ".." in key.name and kind in ("AR", "REDUCE_GRAD"):
            return self.reductions.together(kind, self._bucket(key))
        if ".." in key.name:  # one row for neighbouring blocks: `2..3.D2H`
            return sum(self.seconds(key._replace(stage=other, name="")) for other in self._bucket(key))
        if kind in FREE_KINDS:
            return 2 * (self.stack.messages.p2p_poll_s or 0.0) if kind in POLLS else 0.0
        if kind in PHASES:
            return sum(self.compute.parts(kind, stage).values())
        if kind in ("SEND_F", "SEND_B"):
            here = self.blocks[stage][0]
            # A forward goes to the next stage, a gradient back to the one before; the pair is named by its lower stage.
            other = here + (1 if kind == "SEND_F" else -1)
            return self._send(min(here, other), max(here, other))
        if kind in ("SEND_SKIP", "SEND_SKIP_GRAD"):
            return self._skip(self.blocks[stage][0], forward=kind == "SEND_SKIP")
        if key.name == TIED:
            return self.reductions.tied(self.blocks[stage][0])
        if key.name in IN_UPDATE:
            return 0.0
        if kind == "UNSHARD":
            return self.fetched_s(stage) + self.reductions.parameters(kind, stage)
        if kind == SWITCH and self.turns is not None:
            return self.turns.switch_s(self.stages[self.blocks[stage][0]])
        if kind == "AR" and self.turns is not None:
            return self.reductions.parameters(kind, stage) * self.turns.exchange
        if kind in ("AR", "REDUCE_GRAD"):
            return self.reductions.parameters(kind, stage)
        if kind in VOCABULARY:
            return self.compute.vocabulary(kind, stage)
        if kind == "SEND_COPY":
            return self._copied(stage)
        if kind in ("OPT", "OPT_COPY"):
            own = self._update(stage) + parameters_back_s(*self.layers(stage), self.cluster)
            if self.costs is None:
                return own
            method_passes_s = load_late("gnomon.prediction.method_costs:weight_passes_s")(
                self.costs, *self.layers(stage)
            )
            return own + float(method_passes_s)
        if kind == "NORM":
            return norm_s(self.stages[self.blocks[stage][0]], self.cluster, self.stack)
        if kind in ("D2H", "H2D", "HOST_OPT", "HOST_ADD"):
            streamed = self.blocks[stage][1] >= 0
            inside = exchanged_s(*self.layers(stage)) if kind == "HOST_OPT" else 0.0
            return inside + on_host_s(kind, *self.layers(stage), self.cluster, streamed=streamed)
        raise UnpricedError(f"action {key.label} has no price; add a rule for {kind} to gnomon.prediction.step")

    def fetched_s(self, block: int, *, copies: bool = True) -> float:
        """Seconds in which parameters that wait on the host or a disk come in, before they are gathered. copies: not
        from the disk alone."""
        return parameters_s(*self.layers(block), self.cluster, copies=copies)

    def amounts(self, key: Key) -> tuple[float, float]:
        """(bytes that an action sends or reduces, FLOPs of its matmuls) on one rank; 0 where it has none or where
        nobody counts them (the optimizer, copies to the host)."""
        if key.shape in self.shapes:
            return self.shapes[key.shape].amounts(key._replace(shape=""))
        kind, stage = key.kind, key.stage
        if (count := _parts_of(key)) > 1:
            size, flops = self.amounts(key._replace(name=""))
            return size / count, flops / count
        if kind in COMPUTES:
            return self._exchanged_bytes(kind, stage), 0.0
        if "&" in key.name:
            parts = [self.amounts(key._replace(kind=part, name="")) for part in key.name.split("&")]
            return sum(size for size, _ in parts), sum(flops for _, flops in parts)
        if kind in PHASES:
            return 0.0, sum(self.compute.phase(name, stage).flops for name in PHASES[kind])
        if kind in VOCABULARY and (share := self.stages[stage].share) is not None:
            return float(sum(size for _, size in share.exchanged(kind))), sum(p.flops for p in share.phases(kind))
        if kind in ("SEND_F", "SEND_B"):
            here = self.blocks[stage][0]
            other = here + (1 if kind == "SEND_F" else -1)
            return float(self.messages.bytes_of((min(here, other), max(here, other)))), 0.0
        if kind in ("AR", "REDUCE_GRAD") and ".." in key.name:
            return sum(self.amounts(key._replace(stage=block, name=""))[0] for block in self._bucket(key)), 0.0
        if kind == "HOST_OPT" and ".." in key.name:
            return sum(self.amounts(key._replace(stage=block, name=""))[0] for block in self._bucket(key)), 0.0
        if kind in ("OPT", "HOST_OPT"):
            return float(sum(c.bytes * n for c, n in in_update(*self.with_parts(stage)))), 0.0
        if kind in WANTED and key.name not in (TIED, *IN_UPDATE) and ".." not in key.name:
            name, moments = WANTED[kind]
            price, layers = self.with_parts(stage)
            of = [(c, n) for layer, n in layers for c in price.collectives(layer)]
            return float(sum(c.bytes * n for c, n in of if c.kind == name and c.when in moments)), 0.0
        return 0.0, 0.0

    def _part_s(self, whole: Key, parts: int) -> float:
        """One of the parts of an exchange, of a reduction, or of the experts between two exchanges: its share of what
        is computed and of bytes, and a collective's start by itself."""
        starts, stage = 0.0, self.stages[self.blocks[whole.stage][0]]
        if whole.kind in COMPUTES:
            phase = "forward" if COMPUTES[whole.kind] == "F" else "backward"
            sent = (c for price, _ in self.layers(whole.stage)[1] for c in getattr(price.sharded, phase))
            alike = [(c.kind, c.axis) for c in sent if c.axis in ("ep", "etp")]
            starts = sum(float(collective_seconds(kind, 0, stage.links[axis])) for kind, axis in alike)
        elif whole.kind == "AR":
            starts = sum(float(collective_seconds("all_reduce", 0, link)) for _, link in self.carried(whole))
        seconds = self.seconds(whole)
        # What is divided shrinks with the number of parts; the start of a collective does not.
        return max(seconds - starts, 0.0) / parts + min(starts, seconds)

    def _exchanged_bytes(self, kind: str, block: int) -> float:
        """What a dispatch, a combine or the backward of one sends over ep and etp."""
        phase = "forward" if COMPUTES[kind] == "F" else "backward"
        stage, layers = self.layers(block)
        sent = ((c, n) for price, n in layers for c in getattr(price.sharded, phase))
        return float(sum(c.bytes * c.steps * n for c, n in sent if c.axis in ("ep", "etp")))

    def carried(self, key: Key) -> list[tuple[float, AxisLink]]:
        """(price, link) of a whole collective of parameters or gradients, or of parts of the vocabulary, on each group
        of ranks that it runs on."""
        if key.kind in VOCABULARY and (share := self.stages[key.stage].share) is not None:
            return [(self.compute.vocabulary(key.kind, key.stage), share.link)]
        if key.kind not in WANTED or key.name in (TIED, *IN_UPDATE):
            return []
        if ".." in key.name and key.kind in ("AR", "REDUCE_GRAD"):
            return self.reductions.wired_together(key.kind, self._bucket(key))
        blocks = self._bucket(key) if ".." in key.name else [self.alike[key.stage]]
        return [group for block in blocks for group in self.reductions.wired(key.kind, block)]

    def spanned(self, key: Key) -> list[int]:
        """The Program's stages that a row is about."""
        return self._bucket(key) if ".." in key.name else [key.stage]

    def _bucket(self, key: Key) -> list[int]:
        """The Program's stages on the row's ranks that its name spans."""
        first, last = key.name.partition(f".{key.kind}")[0].split("..")
        ranks = self.stages[self.blocks[key.stage][0]].ranks
        return [b for b in range(int(first), int(last) + 1) if self.stages[self.blocks[b][0]].ranks == ranks]

    def _send(self, source: int, target: int) -> float:
        """Wire time of what one stage sends another for a microbatch (its gradient takes as long)."""
        seconds, link = self.messages.wire(source, target)
        if link is None:
            return seconds
        return seconds * self.slower(link)

    def _copied(self, block: int) -> float:
        """Wire time of a stage's gradient to the rank before it, which has a copy of the stage."""
        stage = self.blocks[block][0]
        size = self.stages[stage].static_bytes()["gradients"]
        seconds, link = self.messages.carried(float(size), stage, (stage - 1) % len(self.stages))
        return seconds if link is None else seconds * self.slower(link)

    def _skip(self, stage: int, *, forward: bool) -> float:
        """The longest message of a stage to (or its gradient from) one that is not its neighbour."""
        mine = [pair for pair in self.messages.sent if pair[0 if forward else 1] == stage and pair[1] != pair[0] + 1]
        return max(self._send(*pair) for pair in mine)

    @property
    def rows_divide_stages(self) -> bool:
        """Whether the rows of a stage's layers divide what one row of the stage would do, and do nothing else: they
        gather no parameters (ZeRO 3) and send no gradients to the host."""
        return self.blocks[0][1] >= 0 and not (self.waits_by_layer or self.plan.optimizer.offload)

    def _update(self, block: int) -> float:
        number, index = self.blocks[block]
        # Rows of layers share the price of the whole stage's update by elements, so that the rows add up to it.
        divided = index >= 0 and self.rows_divide_stages
        # ~number is below 0, so a stage's entry never meets that of a block.
        at = ~number if divided else block
        if at not in self._updates:
            priced = self.compute.of_stages.priced.with_parts(number) if divided else self.with_parts(block)
            self._updates[at] = update_parts(*priced, self.stack, whole=divided or index < 0)
            if self.paged_bytes:  # in for the update, and out for the next forward
                share = 1.0 if divided or index < 0 else self._elements_share(block)
                stage = self.stages[number]
                device_s, kernels, before = self._updates[at]
                before += 2 * host_copy_s(stage, self.cluster, self.paged_bytes * share)
                self._updates[at] = device_s, kernels, before
        # A device or its launches, whichever is slower, and what comes before.
        device_s, kernels, before = self._updates[at]
        seconds = max(device_s, kernels * self.launch_s[number]) + before
        return seconds * self._elements_share(block) if divided else seconds

    def _elements_share(self, block: int) -> float:
        """The share that the layers behind one of the Program's stages have of its stage's parameters."""
        number = self.blocks[block][0]
        of = {
            other: sum(parameter_elements(layer) * times for layer, times in self.layers(other)[1])
            for other, (stage, _) in enumerate(self.blocks)
            if stage == number
        }
        total = sum(of.values())
        return of[block] / total if total else 1 / len(of)


def _parts_of(key: Key) -> int:
    """The number of parts of an action of which a row is one, by its name (`2AR.4`)."""
    whole, dot, parts = key.name.partition(".")
    return int(parts) if dot and whole == f"{key.stage}{key.kind}" and parts.isdigit() else 1


def _like_stages(stages: tuple[StagePrice, ...]) -> list[int]:
    """Finds for each stage the first one with the same layers on ranks of the same devices, mesh and links: what its
    layers cost, together and one by one, is the same. (What they share with other layers decides how many elements are
    updated.)"""
    known: dict[object, list[int]] = {}
    firsts = []
    for index, stage in enumerate(stages):
        layers = tuple((price, len(layers)) for price, layers in stage.layers)
        same = known.setdefault((stage.device, stage.mesh, stage.elements, layers), [])
        match = next((other for other in same if stages[other].links == stage.links), index)
        if match == index:
            same.append(index)
        firsts.append(match)
    return firsts


def local_sizes(workload: Workload, microbatch: int, data_ranks: int) -> dict[str, int]:
    """Sizes of the graph's open dims on one data-parallel rank, for sequences of one length."""
    lengths = set(workload.sequence_lengths())
    if len(lengths) > 1:
        raise UnpricedError(
            f"prediction prices batches of one sequence length, but this workload has {len(lengths)} lengths from "
            f"{min(lengths)} to {max(lengths)}; give seq_len"
        )
    # ceil: the rank with the most sequences of a microbatch.
    return {"batch": -(-microbatch // data_ranks), "seq": lengths.pop(), **dict(workload.sizes)}

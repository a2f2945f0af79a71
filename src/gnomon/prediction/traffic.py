"""What a rank sends in a step, by the groups it sends in: bytes, ranks of a group, and the link behind it.

`traffic(prediction)` returns it for the rank class that sends most. Bytes are what leaves the rank in a ring: (n-1)/n
of a gathered, scattered or exchanged buffer, twice that of a reduced one. Leaves out time, and the few bytes of norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gnomon.orders.patterns.vocabulary import SHARED
from gnomon.prediction.compute_time import PHASES
from gnomon.prediction.layer_types import LayerPrice
from gnomon.prediction.predict import Prediction
from gnomon.prediction.reduction_time import WANTED
from gnomon.prediction.step import Pricing
from gnomon.prediction.update import in_update

PIPELINE = "pp"
"""Messages between stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What goes over one group of axes."""

    axes: str
    """`tp`, `dp_shard+cp`, `ep` …, or `pp` for messages between stages."""
    ranks: int
    """In a group."""
    link: str
    """The slowest it runs over; empty for messages between stages."""
    sent_bytes: float
    """Of one rank, a step."""


def traffic(prediction: Prediction) -> tuple[Traffic, ...]:
    """Bytes that each group of ranks exchanges, the most first; empty for one rank alone."""
    pricing, program = prediction.pricing, prediction.structure.program
    best: dict[str, float] = {}
    ptr = program.class_ptr.tolist()
    for low, high in zip(ptr, ptr[1:], strict=False):
        sent: dict[str, float] = {}
        for key in program.key[low:high].tolist():
            for block in pricing.spanned(program.keys[key]):
                for axes, size in _sent(pricing, program.keys[key].kind, block):
                    sent[axes] = sent.get(axes, 0.0) + size
        if sum(sent.values()) > sum(best.values()):
            best = sent
    links = {name: link for stage in pricing.stages for name, link in stage.links.items()}
    exchanged = []
    for axes, size in sorted(best.items(), key=lambda item: -item[1]):
        link = links.get(axes)
        ranks = prediction.plan.num_pipeline_ranks if axes == PIPELINE or link is None else link.ranks
        name = "" if link is None else link.across_name or link.inside_name
        exchanged.append(Traffic(axes=axes, ranks=ranks, link=name, sent_bytes=size))
    return tuple(exchanged)


def _sent(pricing: Pricing, kind: str, block: int) -> Iterator[tuple[str, float]]:
    """(axes, bytes) of one action."""
    stage, layers = pricing.layers(block)
    if kind in ("SEND_F", "SEND_B"):
        here = pricing.blocks[block][0]
        # Forwards send to the next stage, backwards to the one before; messages are known by both stages in order.
        other = here + (1 if kind == "SEND_F" else -1)
        yield PIPELINE, float(pricing.messages.bytes_of((min(here, other), max(here, other))))
    if stage.share is not None and kind in SHARED:
        yield PIPELINE, float(sum(size for _, size in stage.share.exchanged(kind)))
    for phase in PHASES.get(kind, ()):
        for layer, times in layers:
            for axis, size in _inside(layer, phase).items():
                yield axis, size * times
    if kind == "OPT":
        for one, times in in_update(*pricing.with_parts(block)):
            yield "+".join(one.axes), one.sent_bytes * times
    if kind in WANTED:
        name, moments = WANTED[kind]
        for layer, times in layers:
            for collective in stage.collectives(layer):
                if collective.kind == name and collective.when in moments:
                    yield "+".join(collective.axes), float(collective.sent_bytes) * times


def _inside(layer: LayerPrice, phase: str) -> Mapping[str, float]:
    """Axis -> bytes of a layer's own collectives; what is computed again sends in proportion to its collectives."""
    sharded = layer.sharded
    sent: dict[str, float] = {}
    if phase in ("input_grad", "weight_grad"):
        for exchange in sharded.backward:
            if exchange.weight_grad == (phase == "weight_grad"):
                sent[exchange.axis] = sent.get(exchange.axis, 0.0) + float(exchange.sent_bytes)
        return sent
    for collective in sharded.forward:
        sent[collective.axis] = sent.get(collective.axis, 0.0) + float(collective.sent_bytes)
    if phase == "recompute":
        again, once = layer.recompute.collectives, layer.forward.collectives
        return {axis: size * again.get(axis, 0) / once[axis] for axis, size in sent.items() if once.get(axis)}
    return sent

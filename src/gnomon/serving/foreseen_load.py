"""What copies of foreseen experts gain on a cluster, by what a server recorded: `foreseen(record, …)`.

The costs of `foresight` follow from the device: reading an expert's weights and copying them, in rows that take as
long. A device of its own memory gets copies over the host's link while the layer before computes, and pays for what is
longer than that; a process on a CPU copies with the core that it computes with, and pays for all of it. Returns the
replayed record, and words. Leaves out what a server measures itself at its start (`serve.copies`).
Source: Li et al. 2023 (Lina, ATC), section 5.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gnomon.graph import Graph
from gnomon.hardware import Cluster
from gnomon.prices.collectives import copy_seconds
from gnomon.serving.foresight import Costs, Foreseen, PathRecord, replay
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.layout import Serving
from gnomon.software.engine import Engine

LEARNT = 0.25
"""Share of a record's iterations that the paths are learnt from before any is counted."""

MOST = 300
"""Iterations of a record that are replayed."""


def costs_of(graph: Graph, cluster: Cluster, serving: Serving, rules: Engine, tokens: float) -> Costs:
    """Prices copies of experts on a device of a cluster. tokens: of an iteration, whose experts hide a copy's way
    over the host's link."""
    price = IterationPrice(graph, cluster, replace(serving, expert_load=1.0), rules)
    experts = next(block.experts for block in price.shape.blocks if block.experts is not None)
    nbytes = experts.elements * experts.stored * experts.bits / 8
    # The slope between two batches so large that every expert's weights are read anyway: what rows alone take.
    one, two = (float(price.experts_s(experts, np.array(many))) for many in (4096.0, 8192.0))
    row_s = (two - one) / (4096 * experts.topk * experts.local_share)
    read_s = nbytes / price.device.memory_bytes_per_s
    if price.device.kind == "cpu":
        return Costs(touch=read_s / row_s, fetch=2 * read_s / row_s)  # read there and written here
    hidden_s = float(price.experts_s(experts, np.array(tokens)))
    fetch_s = float(copy_seconds(nbytes, cluster.nodes[0])) - hidden_s
    return Costs(touch=read_s / row_s, fetch=max(0.0, fetch_s) / row_s)


def foreseen(record: PathRecord, graph: Graph, cluster: Cluster, serving: Serving, rules: Engine) -> Foreseen:
    """Replays a record, at most its first `MOST` iterations, with the copies that `serving` has room for."""
    iterations = min(MOST, len(record.begins) - 1)
    end = record.begins[iterations]
    record = replace(record, begins=record.begins[: iterations + 1], chosen=record.chosen[:, :end])
    costs = costs_of(graph, cluster, serving, rules, record.begins[-1] / iterations)
    return replay(record, serving.ep, serving.expert_copies, costs, learnt=int(LEARNT * iterations))


def words(found: Foreseen, name: str, serving: Serving) -> str:
    """What the copies of a layout gain, in a line. name: of the record."""
    gain = found.in_order / found.foreseen - 1
    said = f"gain {gain:.1%} of the experts' time" if gain >= 0 else f"cost {-gain:.1%} more of the experts' time"
    hits = ""
    if found.tokens:
        hits = (
            f"; a token's first choice is the likeliest expert after its path {found.first / found.tokens:.0%} of the "
            f"time, one of the two likeliest {found.second / found.tokens:.0%}"
        )
    count = len(found.by_iteration)
    return (
        f"{serving.expert_copies} copies a device of experts that are foreseen, by {count} iterations of {name} on ep "
        f"{serving.ep} in {serving.weights}, {said}: the busiest device takes {found.load:.2f} of the mean, "
        f"{found.fetched / max(1, found.layers):.1f} fetched a layer among it, {found.in_order / found.mean:.2f} "
        f"without, {found.known / found.mean:.2f} were routers known before{hits}"
    )

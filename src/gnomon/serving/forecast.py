"""What serving a load comes to: percentiles of latencies, throughput, memory, and what was assumed.

`serve(graph, cluster, serving, engine, load)` checks, prices, replays one group of devices with its part of the load,
and returns a `Forecast`. Definitions: TTFT is arrival to first token, of which queue is arrival to the first iteration
with some of its prompt, prefill from there to the first token; TPOT is (last - first token) / (tokens - 1) of a
request; ITL is each time between two tokens of a request; e2e is arrival to last token. A percentile p is the least
value that p % of requests (of pairs of tokens, for ITL) do not exceed. Leaves out text (room `report`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware.types import Cluster
from gnomon.serving.capacity import Capacity, capacity, refusal, side_model_bytes
from gnomon.serving.iteration import IterationPrice, SideModels
from gnomon.serving.layout import Serving
from gnomon.serving.pools import EnginePool, decoding, replay_pools
from gnomon.serving.replay import PlayedLoad, replay
from gnomon.serving.requests import Load
from gnomon.serving.weights import places_of
from gnomon.software.engine import Engine
from gnomon.units import Seconds

PERCENTILES = (50, 90, 99)

Situation = Literal["several", "pools", "alone", "alone in ggml"]
"""several requests at a time on engines that do both; on pools of their own for prompts and answers; one at a time, by
the maker's kernels or by ggml's."""

BANDS: Mapping[Situation, Mapping[str, tuple[float, float]]] = {
    "several": {"ttft": (0.86, 3.87), "tpot": (0.78, 1.27), "e2e": (0.86, 1.47)},
    "pools": {"ttft": (1.12, 29.95), "tpot": (0.26, 1.23), "e2e": (0.53, 1.32)},
    "alone": {"ttft": (0.84, 1.47), "tpot": (0.88, 1.33), "e2e": (0.88, 1.33)},
    "alone in ggml": {"ttft": (0.76, 2.56), "tpot": (0.91, 1.46), "e2e": (0.94, 4.52)},
}
"""Of four measurements in five, between which multiples of the prediction they lie: 10th and 90th percentile of
measured over predicted on every fifth of the published runs of docs/accuracy.md, 2026-11-29, those of each situation.
several: closed loops of InferenceX (352 runs, and 172 for e2e, from tokens a second). pools: the same (154, 71). alone:
prompts of TensorRT-LLM's documentation (18), latencies of LLM-Inference-Bench on engines other than llama.cpp (52).
alone in ggml: llama-bench's prompts and decodes of four sources (247, 245) and LLM-Inference-Bench's latencies (184).
Taken from one half of the runs they hold 75 to 81 % of the other; of alone's prompts, 56 %: there are too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Percentiles of one quantity, in seconds."""

    p50: Seconds
    """Half are not above it."""
    p90: Seconds
    """Nine of ten are not above it."""
    p99: Seconds
    """99 of 100 are not above it."""
    mean: Seconds
    """Their mean."""

    @classmethod
    def of(cls, values: NDArray[np.float64], counts: NDArray[np.int64] | None = None) -> Spread:
        """Summarizes values, each as often as `counts` says."""
        if values.size == 0:
            return cls(p50=0.0, p90=0.0, p99=0.0, mean=0.0)
        weights = np.ones(len(values), dtype=np.int64) if counts is None else counts
        order = np.argsort(values, kind="stable")
        total = np.cumsum(weights[order])
        # The first value up to which at least p % are counted.
        at = [values[order][np.searchsorted(total, total[-1] * p / 100)] for p in PERCENTILES]
        return cls(
            p50=float(at[0]),
            p90=float(at[1]),
            p99=float(at[2]),
            mean=float((values * weights).sum() / total[-1]),
        )

    def to_mapping(self) -> dict[str, float]:
        """Writes the percentiles for programs to read."""
        return {"p50_s": self.p50, "p90_s": self.p90, "p99_s": self.p99, "mean_s": self.mean}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Limits that a request meets or misses."""

    ttft_s: Seconds | None
    """Longest time to the first token; None: no limit."""
    tpot_s: Seconds | None
    """Longest time for each further token; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A prediction of serving."""

    serving: Serving
    """Layout of the engines; of those that answer, where prompts have engines of their own."""
    engine: Engine
    """The program that serves."""
    capacity: Capacity
    """Memory of a device, and the KV blocks that it has room for."""
    played: PlayedLoad
    """Of one group of devices."""
    groups: int
    """Groups with requests of their own: replicas, attention groups, and one for each pipeline stage's batch."""
    devices: int
    """Devices in all: of every replica, or of both pools."""
    ttft: Spread
    """Seconds from arrival to the first token."""
    queue: Spread
    """Seconds from arrival until some of the prompt is computed."""
    prefill: Spread
    """Seconds from then to the first token."""
    first_decode: Spread
    """From the first token to the second."""
    tpot: Spread
    """Seconds for each token after the first, averaged within a request; of requests of several tokens."""
    itl: Spread
    """Seconds between two tokens of one request, over all pairs of all requests."""
    e2e: Spread
    """Seconds from arrival to the last token."""
    output_tokens_per_s: float
    """Of all devices, from the first arrival to the last token."""
    input_tokens_per_s: float
    """Prompt tokens of all devices, over the same span."""
    requests_per_s: float
    """Finished requests of all devices, over the same span."""
    goodput: float | None
    """Share of requests that meet the target; None without one."""
    stable: bool
    """Whether the queue keeps up: the last quarter of requests waits no longer than the second quarter does, by a half
    and 100 ms."""
    situation: Situation
    """Whose band its figures have."""
    assumed: tuple[str, ...]
    """What was taken for granted, a sentence each."""

    def to_mapping(self) -> dict[str, object]:
        """Writes seconds, bytes and tokens for programs to read."""
        spreads = ("ttft", "queue", "prefill", "first_decode", "tpot", "itl", "e2e")
        kv_capacity = self.capacity
        return {
            "schema": "gnomon.serving-forecast/1",
            "engine": self.engine.name,
            "engine_version": self.engine.version,
            "devices": self.devices,
            "layout": {name: getattr(self.serving, name) for name in ("tp", "pp", "dp", "ep", "replicas")},
            "weights": self.serving.weights,
            "kv": self.serving.kv,
            "max_model_len": self.serving.max_model_len,
            **{name: getattr(self, name).to_mapping() for name in spreads},
            "bands": {name: {"low": low, "high": high} for name, (low, high) in BANDS[self.situation].items()},
            "output_tokens_per_s": self.output_tokens_per_s,
            "input_tokens_per_s": self.input_tokens_per_s,
            "output_tokens_per_s_per_device": self.output_tokens_per_s / self.devices,
            "requests_per_s": self.requests_per_s,
            "goodput": self.goodput,
            "stable": self.stable,
            "mean_running": self.played.mean_running * self.groups,
            "preemptions": self.played.preemptions * self.groups,
            "memory": {
                name: getattr(kv_capacity, name)
                for name in (
                    "memory_bytes usable_bytes weights_bytes activation_bytes own_bytes kv_bytes block_bytes blocks "
                    "kv_tokens concurrency"
                ).split()
            },
            "over_time": [list(sample) for sample in self.played.samples],
            "assumptions": list(self.assumed),
        }


def check_load(graph: Graph, serving: Serving, load: Load, context: int | None) -> None:
    """InputError for a request longer than `max_model_len`, or than the model's positions."""
    if load.longest > serving.max_model_len:
        raise InputError(
            f"a request of {load.longest} tokens (prompt and answer) is longer than max_model_len "
            f"{serving.max_model_len}; raise it or cut the request"
        )
    longest, what = load.longest, "a request"
    if places_of(graph) is not None:  # prompt and answer are counted apart
        longest, what = max(max(r.input_len, r.output_len) for r in load.requests), "a prompt or an answer"
    if context is not None and longest > context:
        raise InputError(f"{what} of {longest} tokens is longer than the {context} positions of {graph.name}")


def serve(
    graph: Graph,
    cluster: Cluster,
    serving: Serving,
    engine: Engine,
    load: Load,
    target: Target | None = None,
    side_models: SideModels | None = None,
    price: IterationPrice | None = None,
    alike: Alike | None = None,
) -> Forecast:
    """Predicts how a load is served. price: of these very arguments, where it is known. alike: replays of other limits,
    which are added to. InputError where it cannot be served, with what would."""
    price, kv_capacity = _started(graph, cluster, serving, engine, load, side_models, price)
    groups = serving.replicas * serving.dp * serving.pp
    # batches of a pipeline follow each other through its stages: each has its part of requests and of the memory
    own, blocks = load.share(groups), max(1, kv_capacity.blocks // serving.pp)
    if alike is None or (key := _limits(engine, own, blocks)) is None:
        played = replay(own, price, blocks)
    else:
        key = (replace(serving, replicas=1), serving.replicas, *key)
        if key not in alike:
            alike[key] = replay(own, price, blocks), blocks
        first, its = alike[key]
        # Where blocks are never short the replay is the same; only the share of them that is used differs.
        played = replace(first, samples=tuple((t, w, r, used * its / blocks) for t, w, r, used in first.samples))
    return summary(serving, engine, kv_capacity, played, groups, target, price.assumed)


Alike = dict[tuple[object, ...], tuple[PlayedLoad, int]]
"""Replays of one load and model that nothing in their key's limits held back, with the blocks that they had."""


def _limits(engine: Engine, load: Load, blocks: int) -> tuple[object, ...] | None:
    """What a replay depends on beside its prices, where blocks are never short: the engine's rules, and its limit of
    sequences as far as the load reaches it. None where blocks may be short."""
    present = len(load.requests) if load.concurrency is None else min(load.concurrency, len(load.requests))
    running = min(present, engine.max_seqs)
    one = max(-(-r.input_len // engine.block_tokens) - (-r.output_len // engine.block_tokens) for r in load.requests)
    if running * (one + 1) + int(engine.watermark * blocks) >= blocks:
        return None
    return (replace(engine, max_seqs=running),)


def _started(
    graph: Graph,
    cluster: Cluster,
    serving: Serving,
    engine: Engine,
    load: Load,
    side_models: SideModels | None,
    price: IterationPrice | None = None,
) -> tuple[IterationPrice, Capacity]:
    """Its price and memory. InputError where the engine would not start, or a request is too long."""
    price = price or IterationPrice(graph, cluster, serving, engine, side_models)
    check_load(graph, serving, load, price.shape.context)
    others = 0.0
    if side_models is not None:
        others = side_model_bytes(side_models.draft, serving) + side_model_bytes(side_models.vision, serving)
    problem = refusal(graph, cluster, serving, engine, others)
    if problem is not None:
        raise InputError(problem)
    return price, capacity(graph, cluster, serving, engine, others)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disaggregated:
    """Engines that compute prompts, beside those that answer."""

    prefill: Serving
    """Layout of one that computes prompts; `replicas` 1."""
    prefill_count: int
    """Engines that compute prompts, each of `prefill.devices`."""
    decode_count: int
    """Engines that answer."""


TRANSFER_START_S = 5e-3
"""Of one request's keys from engine to engine, however few: an estimate (mooncake's documentation has 2 to 5 ms)."""


def serve_pools(
    graph: Graph,
    cluster: Cluster,
    serving: Serving,
    engine: Engine,
    pools: Disaggregated,
    load: Load,
    target: Target | None = None,
    price: IterationPrice | None = None,
    alike: Alike | None = None,
) -> Forecast:
    """Predict prefill and decode in pools of their own; `serving` is the layout of an engine that answers. price: of
    that engine, where it is known. alike: as in `serve`.

    Keys go over the network between nodes, or over the node's own links where all engines are in one.
    """
    if places_of(graph) is not None:
        raise InputError(
            f"{graph.name} has an encoder beside its decoder, which are served together; leave --pools out"
        )
    devices = pools.prefill.devices * pools.prefill_count + serving.devices * pools.decode_count
    if devices > cluster.num_devices:
        raise InputError(
            f"{pools.prefill_count} engines of {pools.prefill.devices} devices for prompts and {pools.decode_count} of "
            f"{serving.devices} for answers need {devices} devices, and {cluster.name} has {cluster.num_devices}"
        )
    before = None if price is None or pools.prefill != serving else price.limited(serving, engine)
    after = None if price is None else price.limited(serving, decoding(engine))
    first, first_held = _started(graph, cluster, pools.prefill, engine, load, None, before)
    last, last_held = _started(graph, cluster, serving, decoding(engine), load, None, after)
    kv_bytes = sum(a.kv_elements * n for a, n in last.shape.attentions) * last.kv_bits / 8
    # `kv_elements` are those of one rank: tp ranks hold different heads, but latent keys are the same on each.
    heads = serving.tp if not any(a.latent for a, _ in last.shape.attentions) else 1
    node = cluster.groups[0].node
    inside = len(cluster.groups) == 1 and cluster.groups[0].count == 1
    if inside or node.nic is None:
        rate, way = node.intra.bytes_per_s, node.intra.name
    else:
        rate, way = node.nic.bytes_per_s * node.nics / node.count, node.nic.name
    rate *= min(serving.devices, pools.prefill.devices)  # every rank sends its part

    def transfer(tokens: int) -> float:
        return TRANSFER_START_S + tokens * kv_bytes * heads / rate

    prefill = EnginePool(price=first, blocks=first_held.blocks, count=pools.prefill_count * pools.prefill.dp)
    decode = EnginePool(price=last, blocks=last_held.blocks, count=pools.decode_count * serving.dp)
    limits = [_limits(pool.price.engine, load, pool.blocks) for pool in (prefill, decode)]
    if alike is None or None in limits:
        played = replay_pools(load, prefill, decode, transfer)
    else:
        key = (pools.prefill, pools.prefill_count, serving, pools.decode_count, *limits)
        if key not in alike:
            alike[key] = replay_pools(load, prefill, decode, transfer), decode.blocks
        one, its = alike[key]
        share = its / decode.blocks
        played = replace(one, samples=tuple((t, w, r, used * share) for t, w, r, used in one.samples))
    whole = replace(serving, replicas=pools.decode_count)
    found = summary(whole, engine, last_held, played, 1, target, last.assumed)
    transfer_note = f"keys of {1024} tokens take {transfer(1024) * 1e3:.3g} ms over {way} to an engine that answers"
    return replace(found, devices=devices, situation="pools", assumed=(*found.assumed, transfer_note))


def _situation(engine: Engine, played: PlayedLoad) -> Situation:
    # one request at a time decodes alone, whatever the load was called
    if played.mean_running > 1.05:
        return "several"
    return "alone in ggml" if engine.kernels.startswith("ggml") else "alone"


def summary(
    serving: Serving,
    engine: Engine,
    kv_capacity: Capacity,
    played: PlayedLoad,
    groups: int,
    target: Target | None,
    assumed: tuple[str, ...],
) -> Forecast:
    """The figures of a replay."""
    ttft, e2e = played.first_s - played.arrival_s, played.end_s - played.arrival_s
    decodes_any = played.output_len > 1
    tpot = (played.end_s - played.first_s)[decodes_any] / (played.output_len[decodes_any] - 1)
    queue = played.begun_s - played.arrival_s
    met = None
    if target is not None:
        good = np.ones(len(ttft), dtype=bool)
        if target.ttft_s is not None:
            good &= ttft <= target.ttft_s
        if target.tpot_s is not None:
            # A request of one token has no time between tokens, and so keeps to any target of it.
            each = np.zeros(len(ttft))
            each[decodes_any] = tpot
            good &= each <= target.tpot_s
        met = float(good.mean())
    span = played.span_s
    quarter = len(queue) // 4
    late, early = queue[-quarter:], queue[quarter : 2 * quarter]
    # A queue that grows never ends growing: the last quarter is held against the second, as the first only fills up.
    # Too few requests show nothing; 0.1 s lets queues near nothing vary, whose ratio means little.
    stable = quarter < 8 or float(np.median(late)) <= 1.5 * float(np.median(early)) + 0.1
    # NaN: requests of one token have no second.
    seconds = played.second_s[~np.isnan(played.second_s)]
    firsts = played.first_s[~np.isnan(played.second_s)]
    return Forecast(
        serving=serving,
        engine=engine,
        capacity=kv_capacity,
        played=played,
        groups=groups,
        devices=serving.devices,
        ttft=Spread.of(ttft),
        queue=Spread.of(queue),
        prefill=Spread.of(played.first_s - played.begun_s),
        first_decode=Spread.of(seconds - firsts),
        tpot=Spread.of(tpot),
        itl=Spread.of(played.itl_s, played.itl_count),
        e2e=Spread.of(e2e),
        output_tokens_per_s=float(played.output_len.sum() / span) * groups,
        input_tokens_per_s=float(played.input_len.sum() / span) * groups,
        requests_per_s=len(ttft) / span * groups,
        goodput=met,
        stable=stable,
        situation=_situation(engine, played),
        assumed=assumed,
    )

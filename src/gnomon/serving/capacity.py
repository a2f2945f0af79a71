"""Memory as an engine reserves it: weights, the peak of its profiling run, its own, and KV blocks with the rest.

`capacity(...)` returns the bytes of each and the KV tokens; `kv_tokens(...)` is exact arithmetic from given bytes.
`Refusal` is what an engine would say when it cannot start, with the largest limits that do start and what helps.
Leaves out fragmentation, and memory that other programs on the device take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware.types import Cluster, Device
from gnomon.prices.allocator import communicator_bytes
from gnomon.serving.layout import FORMATS, Serving, is_sparse, kv_bits, weight_format
from gnomon.serving.streaming import streamed
from gnomon.serving.weights import BlockShape, RankModel, adapter_bytes, encoder_blocks, places_of, shape_of
from gnomon.software.engine import Engine, engines
from gnomon.software.engine import engine as engine_of
from gnomon.units import Bytes, show_bytes

SCAN_STATE_BITS = {"ssd": 16, "gated_delta": 32}
"""Bits of an element of a scan's state by its rule (vllm: mamba_ssm_cache_dtype auto takes the model's; configs of
gated DeltaNet say float32). What its convolution keeps is in 16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayers:
    """Layers of a pipeline stage that cache alike."""

    count: int
    """How many layers."""
    bytes_per_token: float
    """Bytes of a token in one layer on one rank; 0 for scans."""
    window: int
    """Tokens kept; 0: all."""
    state_bytes: int
    """Bytes of one layer for each request, whatever its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the memory of one device holds."""

    memory_bytes: Bytes
    """Bytes of memory of the device."""
    usable_bytes: float
    """Bytes that the engine takes at most."""
    weights_bytes: float
    """Bytes of weights on the rank with most."""
    activation_bytes: float
    """Bytes at the peak of the profiling run: the largest batch and the logits of all rows."""
    own_bytes: float
    """Bytes of context, libraries, communicators and graphs."""
    kv_bytes: float
    """Bytes left for keys and states; negative if there is nothing."""
    block_bytes: float
    """Bytes of one KV block of all layers on the device."""
    blocks: int
    """KV blocks that requests of `max_model_len` can use."""
    kv_tokens: int
    """Tokens that the engine reports."""
    concurrency: float
    """Requests of `max_model_len` at the same time."""

    @property
    def fits(self) -> bool:
        """Whether the engine starts: one request of the longest length has its blocks."""
        return self.concurrency >= 1


def caching(shape: RankModel, serving: Serving) -> tuple[CachedLayers, ...]:
    """Kinds of layers of the fullest pipeline stage by what they cache."""
    bits = kv_bits(serving.kv)
    found = [
        CachedLayers(
            count=ceil(layers / serving.pp),
            bytes_per_token=attention.kv_elements * bits / 8,
            window=attention.window,
            state_bytes=0,
        )
        for attention, layers in shape.attentions
    ]
    scans = [block for block in shape.blocks if block.scan_elements]
    for block in scans:
        found.append(
            CachedLayers(
                count=ceil(block.count / serving.pp),
                bytes_per_token=0.0,
                window=0,
                state_bytes=block.scan_elements * SCAN_STATE_BITS[_rule(block)] // 8 + block.taps_elements * 2,
            )
        )
    return tuple(found)


def _rule(block: BlockShape) -> str:
    assert block.scan is not None
    return str(block.scan[0].attr("rule", "ssd"))


def _grouped(
    layers: tuple[CachedLayers, ...], kv_bytes: float, engine: Engine, longest: int
) -> tuple[float, int, int, int]:
    """(bytes of a block, blocks, blocks of the longest request, tokens dealt to a group) of pools of equal pages.

    Layers are dealt into groups of one kind and equal size, the last of a kind filled up; a page of every group is as
    large as the largest kind's (a state's pages are made as large by blocks of more tokens). Source: the sdist of vllm
    0.19.0, v1/core/kv_cache_utils.py _get_kv_cache_groups_uniform_page_size, unify_kv_cache_spec_page_size,
    get_max_concurrency_for_kv_cache_config, and max_memory_usage_bytes of v1/kv_cache_interface.py. A state that makes
    attention's blocks larger is from memory; a log of
    Qwen3.6-35B-A3B agrees with it to a block.
    """
    counts = [kind.count for kind in layers]
    least, most = min(counts), max(counts)
    # vLLM: groups are as large as the smallest kind, unless the largest kind has less than half as many layers more;
    # then that one.
    size = most if most < least * 1.5 else least
    tokens = engine.block_tokens
    page = max(kind.bytes_per_token for kind in layers) * tokens
    state = max(kind.state_bytes for kind in layers)
    if state > page:  # attention's blocks hold as many tokens as a state takes, in whole blocks
        tokens = ceil(state / max(kind.bytes_per_token for kind in layers) / tokens) * tokens
        page = max(kind.bytes_per_token for kind in layers) * tokens
    block = page * size
    need = 0
    for kind in layers:
        groups = ceil(kind.count / size)
        if kind.state_bytes:
            need += groups
        elif kind.window:
            # A window keeps its own tokens and those of one batch, and a block more since it starts inside one.
            seen = min(kind.window - 1 + engine.max_batched_tokens, longest)
            need += groups * (ceil(seen / tokens) + 1)
        else:
            need += groups * ceil(longest / tokens)
    blocks = int(max(kv_bytes, 0) // block)
    return block, blocks, need, blocks // sum(ceil(kind.count / size) for kind in layers) * tokens


def kv_tokens(
    layers: tuple[CachedLayers, ...], kv_bytes: float, engine: Engine, longest: int
) -> tuple[float, int, int, float]:
    """(bytes of a block, blocks, tokens reported, requests of `longest` tokens) from bytes for keys, exact to a block.

    Where all layers cache alike, a block is `block_tokens` tokens of every layer. Where they differ the engine's record
    says how it shares them out; `blocks` are then those of `block_tokens` tokens that requests of `longest` can use,
    and tokens what `Engine.hybrid_tokens` says that it prints.
    """
    uniform = len(layers) == 1 and not layers[0].state_bytes and not layers[0].window
    tokens = engine.block_tokens
    if uniform or engine.hybrid_cache == "full":
        block = sum(kind.bytes_per_token * kind.count for kind in layers) * tokens
        states = sum(kind.state_bytes * kind.count for kind in layers)
        free = max(kv_bytes, 0.0)
        if states and not block:
            # Only states: a slot a request, whatever its length.
            return float(states), int(free // states), int(free // states) * longest, free // states
        if states:
            per_request = states + block * ceil(longest / tokens)
            blocks = int(free // per_request) * ceil(longest / tokens)
        else:
            blocks = int(free // block)
        return block, blocks, blocks * tokens, blocks / ceil(longest / tokens)
    if engine.hybrid_cache == "grouped" and any(kind.bytes_per_token for kind in layers):
        block, pages, need, dealt = _grouped(layers, kv_bytes, engine, longest)
        concurrency = pages / need
        printed = dealt if engine.hybrid_tokens == "groups" else int(concurrency * longest)
        return block, int(concurrency * ceil(longest / tokens)), printed, concurrency
    each = 0.0
    for kind in layers:
        window_tokens = min(longest, kind.window + engine.block_tokens) if kind.window else longest
        each += kind.count * (kind.state_bytes + kind.bytes_per_token * ceil(window_tokens / tokens) * tokens)
    concurrency = max(kv_bytes, 0.0) / each
    return (
        each / ceil(longest / tokens),
        int(concurrency * ceil(longest / tokens)),
        int(concurrency * longest),
        concurrency,
    )


def activation_bytes(shape: RankModel, serving: Serving, engine: Engine) -> float:
    """Peak of the profiling run on one device: the largest layer's tensors of a full batch, or the sampler's logits.

    A batch of `max_batched_tokens` has its residual, the input of the layer, its widest product and what follows it;
    experts have a row for each choice. Logits of `max_seqs` rows are fp32 copies of the whole vocabulary.
    """
    tokens = min(engine.max_batched_tokens, max(serving.max_model_len, engine.max_seqs))
    if shape.encoder:  # its texts are not cut
        tokens = max(tokens, serving.max_model_len)
    widest = 1.5 * shape.ffn
    for block in shape.blocks:
        if block.experts is not None:
            chosen = block.experts.topk * block.experts.local_share * serving.dp
            widest = max(widest, chosen * block.experts.row_elements)
    layer = tokens * (3 * shape.hidden + widest) * 2
    rows = min(engine.max_seqs, engine.max_batched_tokens)
    # fp32 copies of whole rows of the vocabulary on the sampling rank.
    logits = rows * shape.vocab * serving.tp * 4 * engine.logits_copies
    return max(layer, logits)


def capacity(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine, beside_bytes: float = 0.0) -> Capacity:
    """What one device holds under an engine's rules. beside_bytes: weights of other models on it."""
    shape, device = shape_of(graph, serving, engine.expert_multiples), cluster.devices[0]
    weights = _stage_weights(shape, serving) + adapter_bytes(shape, serving) / serving.pp + beside_bytes
    if serving.draft == "mtp":  # a layer of its own, as large as the model's largest
        weights += max(b.weight_bytes for b in shape.blocks if not b.is_head and not b.has_table)
    activations = activation_bytes(shape, serving, engine)
    ranks = serving.tp * serving.dp
    own = engine.reserved_bytes + (communicator_bytes(device, ranks) if ranks > 1 and device.kind == "gpu" else 0)
    memory = _memory(device)
    # Three rules of engines: a share of all memory; of all but its own (static); or of what is free after weights and
    # the profiling run.
    if engine.memory_of == "total":
        usable = memory * engine.memory_fraction
        kv_room = usable - weights - activations - own
    elif engine.memory_of == "static":
        kv_room = (memory - own) * engine.memory_fraction - weights
        usable = kv_room + weights + activations + own
    else:
        free = memory - weights - activations - own
        kv_room = free * engine.memory_fraction
        usable = memory - free * (1 - engine.memory_fraction)
    layers = caching(shape, serving)
    block, blocks, tokens, concurrency = kv_tokens(layers, kv_room, engine, serving.max_model_len)
    return Capacity(
        memory_bytes=memory,
        usable_bytes=usable,
        weights_bytes=weights,
        activation_bytes=activations,
        own_bytes=own,
        kv_bytes=kv_room,
        block_bytes=block,
        blocks=blocks,
        kv_tokens=tokens,
        concurrency=concurrency,
    )


def side_model_bytes(graph: Graph | None, serving: Serving) -> float:
    """Bytes of a model that runs beside on one rank, in 16 bits."""
    if graph is None:
        return 0.0
    return sum(b.weight_bytes * b.count for b in encoder_blocks(graph, replace(serving, dp=1, ep=1, pp=1)))


def _memory(device: Device) -> int:
    return int(device.memory_bytes)


def _stage_weights(shape: RankModel, serving: Serving) -> float:
    """Bytes of the fullest pipeline stage: its layers, and the table or the head."""
    if shape.encoder:
        return shape.weight_bytes
    layers = sum(b.weight_bytes * b.count for b in shape.blocks if not b.is_head and not b.has_table)
    ends = [b.weight_bytes * b.count for b in shape.blocks if b.is_head or b.has_table]
    # Layers stream from the disk: only the resident ones and the ends are in memory.
    if serving.resident_bytes is not None:
        return streamed(shape, serving)[1] + (sum(ends) if serving.pp == 1 else max(ends))
    return layers + sum(ends) if serving.pp == 1 else layers / serving.pp + max(ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """A change with which the engine starts, or holds more."""

    change: str
    """What to set."""
    kv_tokens: int
    """Tokens that it holds then."""
    concurrency: float
    """Requests of the longest length at the same time."""
    serving: Serving
    """The layout with it."""
    engine: Engine
    """The engine with it."""


def most_model_len(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine, context: int | None = None) -> int:
    """The largest `max_model_len` of which one request fits; 0 if none does."""

    def fits(longest: int) -> bool:
        return capacity(graph, cluster, replace(serving, max_model_len=longest), engine).fits

    if context is not None and fits(context):
        return context
    low, high = 0, 1
    while high < (context or 2**24) and fits(high):
        # Doubling, then bisection: fitting falls with the length.
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def most_of(
    graph: Graph, cluster: Cluster, serving: Serving, engine: Engine, name: Literal["max_seqs", "max_batched_tokens"]
) -> int:
    """The largest `max_seqs` or `max_batched_tokens` (name) up to the engine's own with which it starts as it is
    otherwise; 0 if none does."""

    def starts(value: int) -> bool:
        tried = replace(engine, max_seqs=value) if name == "max_seqs" else replace(engine, max_batched_tokens=value)
        return capacity(graph, cluster, serving, tried).fits

    low, high = 0, int(getattr(engine, name))
    if starts(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if starts(middle) else (low, middle)
    return low


def changes(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine) -> tuple[Help, ...]:
    """What would help, each alone, the most tokens first: only what makes the engine start, or hold more."""
    now = capacity(graph, cluster, serving, engine)
    found: list[Help] = []
    for text, other, record in _ways(cluster, serving, engine):
        try:
            then = capacity(graph, cluster, other, record)
        except InputError:
            continue
        if then.fits and then.concurrency > now.concurrency * 1.02:
            found.append(
                Help(
                    change=text,
                    kv_tokens=then.kv_tokens,
                    concurrency=then.concurrency,
                    serving=other,
                    engine=record,
                )
            )
    return tuple(sorted(found, key=lambda way: -way.concurrency))


def _ways(cluster: Cluster, serving: Serving, engine: Engine) -> Iterator[tuple[str, Serving, Engine]]:
    if engine.memory_fraction < 0.95:
        yield "memory fraction 0.95", serving, replace(engine, memory_fraction=0.95)
    if engine.max_seqs > 64:
        yield "at most 64 sequences", serving, replace(engine, max_seqs=64)
    if engine.max_batched_tokens > 2048:
        yield "token budget 2048", serving, replace(engine, max_batched_tokens=2048)
    if kv_bits(serving.kv) > 8:
        yield "fp8 keys", replace(serving, kv="fp8"), engine
    bits = weight_format(serving.weights).bits
    for name in ("fp8", "int4-wo"):
        if FORMATS[name].bits < bits * 0.8:
            yield f"{name} weights", replace(serving, weights=name), engine
    room = cluster.num_devices // serving.devices
    for factor in (2, 4, 8):
        if factor <= room:
            yield f"tp {serving.tp * factor}", replace(serving, tp=serving.tp * factor), engine


def unable(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine) -> str | None:
    """What an engine does not do at all, whatever its limits and memory; None if there is no such thing."""
    first = cluster.devices[0]
    if first.kind not in engine.devices:
        return f"{engine.name} does not run on a {first.kind} ({first.name}); it runs on: {', '.join(engine.devices)}"
    if serving.resident_bytes is not None and not engine.streams_weights:
        return f"{engine.name} does not read layers from a disk as they run; of engines on record gnomon does"
    if (places := places_of(graph)) is not None and places not in engine.encoder_decoders:
        able = [name for name in engines() if places in engine_of(name).encoder_decoders]
        return (
            f"{engine.name} {engine.version} serves no encoder with a decoder whose places are {places}, as "
            f"{graph.name} is one; of engines on record: {', '.join(able) or 'none does'}"
        )
    if is_sparse(serving.weights) and not engine.sparse_weights:
        return f"{engine.name} does not multiply by weights in {serving.weights}; of engines on record gnomon does"
    return None


def refusal(graph: Graph, cluster: Cluster, serving: Serving, engine: Engine, beside_bytes: float = 0.0) -> str | None:
    """The one line that an engine's refusal to start comes down to; None if it starts."""
    if (why := unable(graph, cluster, serving, engine)) is not None:
        return why
    if not engine.chunked_prefill and serving.max_model_len > engine.max_batched_tokens:
        return (
            f"{engine.name} would not start: without chunked prefill max_num_batched_tokens "
            f"{engine.max_batched_tokens} must not be smaller than max_model_len {serving.max_model_len}"
        )
    now = capacity(graph, cluster, serving, engine, beside_bytes)
    if now.fits:
        return None
    device = cluster.devices[0].name
    if now.kv_bytes <= 0:
        return (
            f"{engine.name} would not start: {show_bytes(now.weights_bytes)} of weights, "
            f"{show_bytes(now.activation_bytes)} of activations and {show_bytes(now.own_bytes)} of its own leave no "
            f"memory for keys in {show_bytes(now.usable_bytes)} of a {device}"
        )
    most = most_model_len(graph, cluster, serving, engine)
    return (
        f"{engine.name} would not start: a request of max_model_len {serving.max_model_len} needs more than the "
        f"{show_bytes(now.kv_bytes)} left for keys on a {device}; the largest max_model_len that starts is {most}"
    )

"""What people ask about a server, each question with a name and an answer in lines: `ANSWERS[name](question)`.

The names and questions are in `QUESTIONS`. Every number is a prediction (`forecast`, `capacity`, `space`). Leaves out
how options are spelled by engines (room `formats`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from gnomon.graph import Graph
from gnomon.hardware import rent
from gnomon.hardware.types import Cluster
from gnomon.serving.capacity import caching, capacity, changes, most_model_len, most_of, refusal
from gnomon.serving.forecast import BANDS, Disaggregated, Forecast, Target, serve, serve_pools
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.requests import Load
from gnomon.serving.space import best, fewest, meets, space
from gnomon.serving.weights import shape_of
from gnomon.software.engine import Engine
from gnomon.units import show_bytes, show_seconds

MOST_CLIENTS = 4096
"""The largest number of concurrent clients that is tried."""

QUESTIONS: Mapping[str, str] = {
    "fits": "will it start, and what is the largest length and batch that does?",
    "memory": "what takes the memory, and which flag moves it?",
    "users": "how many requests at the same time?",
    "tokens": "how many KV tokens, layer by layer?",
    "layout": "tp, pp, attention dp or replicas?",
    "limits": "which max_num_seqs and max_num_batched_tokens?",
    "ttft": "why does the first token take so long: queue or prefill?",
    "disaggregation": "do separate pools for prefill and decode pay?",
    "light": "how far is it from the roofline: what the device's memory could do?",
    "trust": "how far can this be trusted?",
    "fewest": "how few devices meet the targets?",
    "slots": "what do slots that split a context do?",
}
"""Name -> question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A server and its load."""

    graph: Graph
    """The model that is served."""
    cluster: Cluster
    """The machines."""
    serving: Serving
    """Layout of the engine that is asked about."""
    engine: Engine
    """The program that serves."""
    load: Load
    """The requests."""
    target: Target
    """Limits on the p50 times of requests; a limit that is None is not asked for."""
    context: int | None
    """Tokens of a prompt and its answer that the model was made for; None: nobody says."""

    def forecast(self, serving: Serving | None = None, engine: Engine | None = None) -> Forecast:
        """The prediction, of another layout or other limits where they are given."""
        return serve(self.graph, self.cluster, serving or self.serving, engine or self.engine, self.load, self.target)


def _fits(q: Question) -> Iterator[str]:
    problem = refusal(q.graph, q.cluster, q.serving, q.engine)
    yield problem or "it starts"
    longest = most_model_len(q.graph, q.cluster, q.serving, q.engine, q.context)
    what = ", which the model was made for" if longest == q.context else ""
    yield f"largest max_model_len: {longest or 'none'}{what}"
    yield f"largest max_num_seqs: {most_of(q.graph, q.cluster, q.serving, q.engine, 'max_seqs') or 'none'}"
    budget = most_of(q.graph, q.cluster, q.serving, q.engine, "max_batched_tokens")
    yield f"largest max_num_batched_tokens: {budget or 'none'}"
    for way in changes(q.graph, q.cluster, q.serving, q.engine):
        yield f"{way.change}: {way.kv_tokens:,} KV tokens, {way.concurrency:.2f} requests of the longest length"


def _memory(q: Question) -> Iterator[str]:
    memory = capacity(q.graph, q.cluster, q.serving, q.engine)
    share = memory.usable_bytes / memory.memory_bytes
    whole = show_bytes(memory.memory_bytes)
    yield f"usable {show_bytes(memory.usable_bytes)}: {share:.2f} of {whole} (memory fraction)"
    yield f"- weights {show_bytes(memory.weights_bytes)}: --weights, --tp, --pp"
    yield f"- activations {show_bytes(memory.activation_bytes)}: --max-num-batched-tokens, --max-num-seqs"
    yield f"- context {show_bytes(memory.own_bytes)}: of the runtime, libraries and graphs; communicators of tp and dp"
    yield f"= KV cache {show_bytes(memory.kv_bytes)}: {memory.kv_tokens:,} tokens; --kv-dtype"
    half = capacity(
        q.graph, q.cluster, q.serving, replace(q.engine, max_batched_tokens=max(q.engine.max_batched_tokens // 2, 1))
    )
    freed_bytes = half.kv_bytes - memory.kv_bytes
    yield f"half the token budget leaves {show_bytes(max(freed_bytes, 0.0))} more for the KV cache"


def _users(q: Question) -> Iterator[str]:
    found = q.forecast()
    memory = found.capacity
    yield f"memory holds {memory.concurrency * q.serving.replicas * q.serving.dp:.1f} requests of the longest length"
    yield f"of this load {found.played.mean_running * found.groups:.1f} decode at a time on average"
    share = found.queue.p50 / found.ttft.p50 if found.ttft.p50 else 0.0
    yield f"{found.requests_per_s:.3g} requests/s; the queue is {share:.0%} of the median TTFT"
    if q.target.ttft_s is None and q.target.tpot_s is None:
        yield "how many meet targets is said where they are given: --ttft, --tpot"
        return
    most, at = _most_clients(q)
    if at is None:
        yield "not even one client at a time meets the targets"
        return
    and_more = "" if most < MOST_CLIENTS else " and more"
    yield f"{most}{and_more} clients at a time meet the targets: {at.requests_per_s:.3g} requests/s, {_row(at)}"


def _most_clients(q: Question) -> tuple[int, Forecast | None]:
    """The most clients of a closed loop of these requests with which the p50s are within the targets, up to
    `MOST_CLIENTS`, and their forecast; None where one alone is not."""

    def tried(clients: int) -> Forecast | None:
        count = max(len(q.load.requests), 4 * clients)  # so that most requests come while all clients are busy
        # The requests one after another, as often as needed, and cut to `count`.
        again = -(-count // len(q.load.requests))
        load = Load(requests=(q.load.requests * again)[:count], concurrency=clients)
        found = replace(q, load=load).forecast()
        return found if meets(found, q.target) else None

    low, high, at = 0, 1, None
    while high <= MOST_CLIENTS and (found := tried(high)) is not None:
        low, high, at = high, 2 * high, found
    # One past the most that may be said: the bisection then ends at MOST_CLIENTS or below.
    high = min(high, MOST_CLIENTS + 1)
    while high - low > max(1, low // 32):  # to 3 %, as the answer is off by more than that
        middle = (low + high) // 2
        if (found := tried(middle)) is not None:
            low, at = middle, found
        else:
            high = middle
    return low, at


def _tokens(q: Question) -> Iterator[str]:
    kinds = caching(shape_of(q.graph, q.serving, q.engine.expert_multiples), q.serving)
    for kind in kinds:
        window = f", {kind.window} tokens at most" if kind.window else ""
        if kind.state_bytes:
            yield f"{kind.count} layers keep a state of {show_bytes(kind.state_bytes)} for each request"
        else:
            yield f"{kind.count} layers keep {kind.bytes_per_token:,.0f} bytes a token{window}"
    memory = capacity(q.graph, q.cluster, q.serving, q.engine)
    engine = f"{q.engine.name} {q.engine.version}"
    yield f"{memory.kv_tokens:,} tokens in {show_bytes(memory.kv_bytes)}, as {engine} prints them"
    plain = sum(k.count * (k.bytes_per_token * q.serving.max_model_len + k.state_bytes) for k in kinds)
    if memory.concurrency and plain:
        filled = memory.kv_bytes / memory.concurrency / plain
        yield f"a request of the longest length takes {filled:.2f} times what it needs"


def _layout(q: Question) -> Iterator[str]:
    experts = any(block.does("multiplies rows") for block in q.graph.blocks)
    candidates = space(
        q.cluster,
        [q.engine],
        q.serving.max_model_len,
        weights=(q.serving.weights,),
        kv=(q.serving.kv,),
        experts=experts,
        resident_bytes=q.serving.resident_bytes,
    )
    found = best(q.graph, q.cluster, candidates, q.load, q.target)
    if found.best is None:
        yield "no layout meets the targets"
    for choice in found.front:
        s = choice.candidate.serving
        axes = " ".join(f"{n}={getattr(s, n)}" for n in ("tp", "pp", "dp", "ep", "replicas") if getattr(s, n) > 1)
        mark = "best: " if found.best is not None and choice.value == found.best.value else "      "
        each = _s(choice.forecast.tpot.p50)
        yield f"{mark}{axes or 'one device'}: {choice.value:,.0f} tokens/s a device, {each} a token"
    price = IterationPrice(q.graph, q.cluster, q.serving, q.engine)
    if price.tp_link is not None:
        sums = sum(b.sums * b.count for b in price.shape.blocks)
        # One token's hidden state in 16 bits.
        one = float(price._sum_s(np.array([price.shape.hidden * 2.0]))[0])
        yield f"tp={q.serving.tp} adds {sums} all-reduces to a step, {_s(sums * one)} at batch 1"


def _limits(q: Question) -> Iterator[str]:
    for seqs in sorted({16, 64, 256, q.engine.max_seqs}):
        for budget in sorted({2048, q.engine.max_batched_tokens}):
            record = replace(q.engine, max_seqs=seqs, max_batched_tokens=budget)
            if refusal(q.graph, q.cluster, q.serving, record) is not None:
                yield f"{seqs} sequences, budget {budget}: would not start"
                continue
            f = q.forecast(engine=record)
            yield (
                f"{seqs} sequences, budget {budget}: {f.output_tokens_per_s:,.0f} tokens/s, TTFT {_s(f.ttft.p50)}, "
                f"TPOT {_s(f.tpot.p50)}, {f.played.preemptions * f.groups} preemptions"
            )


def _ttft(q: Question) -> Iterator[str]:
    f = q.forecast()
    played = f.played
    order = np.argsort(played.first_s - played.arrival_s, kind="stable")
    for percent in (50, 99):  # queue and prefill of the one request at that percentile, so that they add up to its TTFT
        one = order[-(-len(order) * percent // 100) - 1]
        arrived, begun, first = (float(x[one]) for x in (played.arrival_s, played.begun_s, played.first_s))
        yield f"p{percent} {_s(first - arrived)}: {_s(begun - arrived)} in the queue, {_s(first - begun)} in prefill"
    yield f"before the scheduler {_s(q.engine.request_s)} and {_s(q.engine.request_token_s)} a token of the prompt"
    if not f.stable:
        yield "requests come faster than they are served: the queue grows for as long as they do"
    elif f.queue.p50 > f.ttft.p50 / 2:
        yield "the queue is most of it: more replicas, a larger budget or more sequences shorten it"
    else:
        yield "prefill is most of it: more tp, fp8 weights or cached beginnings shorten it"


def _disaggregation(q: Question) -> Iterator[str]:
    one = replace(q.serving, replicas=1)
    engines = q.cluster.num_devices // one.devices
    if engines < 2:
        yield f"one engine of {one.devices} devices takes all {q.cluster.num_devices}: there is nothing to set apart"
        return
    whole = q.forecast(replace(one, replicas=engines))
    yield f"together: {_row(whole)}"
    found = []
    # Neither pool may be empty.
    for first in sorted({1, engines // 4, engines // 2} - {0, engines}):
        pools = Disaggregated(prefill=one, prefill_count=first, decode_count=engines - first)
        forecast = serve_pools(q.graph, q.cluster, one, q.engine, pools, q.load, q.target)
        found.append(forecast)
        yield f"{first} for prefill, {engines - first} for decode: {_row(forecast)}"
    pays = [f for f in found if f.output_tokens_per_s > whole.output_tokens_per_s]
    yield "it pays in tokens a second" if pays else "it does not pay in tokens a second; compare its ITL p99"


def _roofline(q: Question) -> Iterator[str]:
    price = IterationPrice(q.graph, q.cluster, q.serving, q.engine)
    f = q.forecast()
    running = max(1, round(f.played.mean_running))
    # In the mean over its answer a request has its prompt and half of the answer in the cache.
    keys = running * round(float(np.mean(f.played.input_len + f.played.output_len / 2)))
    kv_bytes = sum(a.kv_elements * price.kv_bits / 8 * n for a, n in price.shape.attentions)
    weights = sum(b.weight_bytes * b.count for b in price.shape.blocks)
    roofline_s = (weights + kv_bytes * keys) / price.device.memory_bytes_per_s
    if price.shape.encoder:  # its own keys are those that it made, and as large ones are those that were read
        sources = running * round(float(np.mean(f.played.input_len)))
        step = price.decode_ticks(running, keys - sources, 1, sources) / TICKS_PER_S
    else:
        step = price.decode_ticks(running, keys) / TICKS_PER_S
    host = q.engine.host_step_s + q.engine.host_sequence_s * running
    at_peak = f"reading weights and KV cache once takes {_s(roofline_s)} at the peak"
    yield f"a step of {running} decodes takes {_s(step)}; {at_peak}"
    yield f"{roofline_s / step:.0%} of the memory's peak; the host needs {_s(host)} a step"
    extra = f.tpot.p50 - step
    if extra > 0:
        yield f"TPOT {_s(f.tpot.p50)} is {_s(extra)} longer: prompts of others in the same iterations"


def _trust(q: Question) -> Iterator[str]:
    for name, (low, high) in BANDS[q.forecast().situation].items():
        yield f"{name}: four of five measured medians lie in {low:g} to {high:g} times the prediction"
    yield "TPOT is (last token - first) / (tokens - 1) of a request; its p50 is over requests"
    price = IterationPrice(q.graph, q.cluster, q.serving, q.engine)
    yield from price.assumed
    for fact in q.engine.facts:
        if fact.confidence == "unchecked":
            yield f"{q.engine.name}: {', '.join(fact.fields)}: {fact.source}"


def _fewest(q: Question) -> Iterator[str]:
    if q.target.ttft_s is None and q.target.tpot_s is None:
        yield "no target is given: --ttft, --tpot"
        return
    experts = any(block.does("multiplies rows") for block in q.graph.blocks)
    candidates = space(
        q.cluster, [q.engine], q.serving.max_model_len, weights=(q.serving.weights,), kv=(q.serving.kv,),
        experts=experts, fewer=True, resident_bytes=q.serving.resident_bytes,
    )  # fmt: skip
    found = fewest(q.graph, q.cluster, candidates, q.load, q.target)
    if found.best is None:
        yield f"not with {q.cluster.num_devices} devices"
        return
    s = found.best.candidate.serving
    axes = " ".join(f"{n}={getattr(s, n)}" for n in ("tp", "pp", "dp", "ep", "replicas") if getattr(s, n) > 1)
    yield f"{s.devices} devices ({axes or 'one device'}): {_row(found.best.forecast)}"
    if (paid := rent(q.cluster)) is not None:
        hour = paid.dollars_per_hour * s.devices / q.cluster.num_devices
        tokens = found.best.forecast.output_tokens_per_s * 3600
        yield f"${hour:.2f} an hour, ${hour / tokens * 1e6:.2f} a million output tokens ({'; '.join(paid.sources)})"


def _slots(q: Question) -> Iterator[str]:
    longest = q.serving.max_model_len
    for slots in (1, 2, 4, 8):
        yield f"{slots} slots of a context of {longest} hold {longest // slots} tokens each"
    one, four = (q.forecast(engine=replace(q.engine, max_seqs=n)) for n in (1, 4))
    gain = four.output_tokens_per_s / one.output_tokens_per_s
    slower = four.tpot.p50 / one.tpot.p50
    yield f"4 at a time give {gain:.2f} times the tokens of 1; each takes {slower:.2f} times as long"


def _s(seconds: float) -> str:
    return show_seconds(seconds)


def _row(f: Forecast) -> str:
    return (
        f"{f.output_tokens_per_s:,.0f} tokens/s, TTFT {_s(f.ttft.p50)}, TPOT {_s(f.tpot.p50)}, ITL p99 {_s(f.itl.p99)}"
    )


ANSWERS: Mapping[str, Callable[[Question], Iterator[str]]] = {
    "fits": _fits,
    "memory": _memory,
    "users": _users,
    "tokens": _tokens,
    "layout": _layout,
    "limits": _limits,
    "ttft": _ttft,
    "disaggregation": _disaggregation,
    "light": _roofline,
    "trust": _trust,
    "fewest": _fewest,
    "slots": _slots,
}
"""Name -> lines that answer."""

"""Every way of serving a model on some devices, and the best of them under targets.

`space` lists the candidates: tp x pp x dp x ep x replicas that use at most the devices, formats, limits of the engine.
`best` plays each candidate's load, the most promising first by a bound on its output tokens a second that no replay can
exceed, and stops where the bound is under the best found: exact over the space. `exhaustive` plays all of them and is
what it is held against. Leaves out disaggregated pools and engines that a user did not name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware.types import Cluster
from gnomon.serving.capacity import refusal
from gnomon.serving.forecast import Forecast, Target, serve
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.requests import Load
from gnomon.software.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way."""

    serving: Serving
    engine: Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A candidate that was played."""

    candidate: Candidate
    forecast: Forecast
    meets: bool
    """Whether its p50s are within the targets."""

    @property
    def value(self) -> float:
        """Output tokens a second and device."""
        return self.forecast.output_tokens_per_s / self.forecast.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The answer."""

    best: Choice | None
    """Most output tokens a second and device among those that meet the targets; None if none does."""
    front: tuple[Choice, ...]
    """Of those played: no other has both more tokens a device and a lower TPOT."""
    size: int
    """Candidates in the space."""
    played: int
    bounded: int
    """Not played: their bound was under the best."""
    refused: tuple[tuple[str, int], ...]
    """Why candidates were not played, with how many."""


def space(
    cluster: Cluster,
    engines: Sequence[Engine],
    longest: int,
    *,
    weights: Sequence[str],
    kv: Sequence[str] = ("bf16",),
    max_seqs: Sequence[int] = (),
    budgets: Sequence[int] = (),
    experts: bool = False,
) -> tuple[Candidate, ...]:
    """Candidates: axes are powers of two whose product is at most the devices; attention dp only with experts."""
    count = cluster.num_devices
    powers = [2**i for i in range(count.bit_length()) if 2**i <= count]
    found = []
    for tp, pp, dp in product(powers, powers, powers if experts else [1]):
        group = tp * pp * dp
        if group > count:
            continue
        for ep in [e for e in powers if experts and e <= tp * dp] or [1]:
            if dp > 1 and ep != tp * dp:
                continue
            for w, k, rules in product(weights, kv, engines):
                for seqs, budget in product(max_seqs or (rules.max_seqs,), budgets or (rules.max_batched_tokens,)):
                    serving = Serving(
                        tp=tp, pp=pp, dp=dp, ep=ep, replicas=count // group, weights=w, kv=k, max_model_len=longest
                    )
                    record = replace(rules, max_seqs=seqs, max_batched_tokens=budget)
                    found.append(Candidate(serving=serving, engine=record))
    return tuple(found)


def bound(price: IterationPrice, load: Load) -> float:
    """Output tokens a second and device that no replay of the load exceeds.

    Each output token but a request's first is one row of a decode iteration. With r requests running, an iteration of
    decodes takes at least what r rows without a key take, and there are at most r = min(clients, max_seqs) of them. So
    tokens a second are at most the largest of n / seconds(n) over n up to r, counted with the first tokens, which come
    from prompts.
    """
    groups = price.serving.replicas * price.serving.dp * price.serving.pp
    clients = len(load.requests) if load.concurrency is None else load.concurrency
    most = max(1, min(price.engine.max_seqs, -(-clients // groups)))
    rates = [n * TICKS_PER_S / price.least_decode_ticks(n) for n in range(1, most + 1)]
    outputs = sum(r.output_len for r in load.requests)
    later = outputs - len(load.requests)
    if later <= 0:
        return float("inf")
    return max(rates) * groups / price.serving.devices * outputs / later


def _meets(found: Forecast, target: Target) -> bool:
    ttft = target.ttft_s is None or found.ttft.p50 <= target.ttft_s
    return ttft and (target.tpot_s is None or found.tpot.p50 <= target.tpot_s)


def best(graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target) -> Found:
    """The best candidate, exactly: none that was left out could have been better."""
    return _search(graph, cluster, candidates, load, target, prune=True)


def exhaustive(graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target) -> Found:
    """The same by playing every candidate."""
    return _search(graph, cluster, candidates, load, target, prune=False)


def _search(
    graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target, *, prune: bool
) -> Found:
    refused: dict[str, int] = {}
    order: list[tuple[float, int, IterationPrice]] = []
    for index, candidate in enumerate(candidates):
        try:
            price = IterationPrice(graph, cluster, candidate.serving, candidate.engine)
            problem = refusal(graph, cluster, candidate.serving, candidate.engine)
            if problem is not None:
                raise InputError(problem.partition(":")[0])
        except InputError as error:
            reason = str(error)
            refused[reason] = refused.get(reason, 0) + 1
            continue
        order.append((bound(price, load), index, price))
    order.sort(key=lambda entry: (-entry[0], entry[1]))
    chosen: Choice | None = None
    played: list[Choice] = []
    bounded = 0
    for limit, index, price in order:
        if prune and chosen is not None and limit < chosen.value:
            bounded += 1
            continue
        candidate = candidates[index]
        if prune and target.tpot_s is not None and price.least_decode_ticks(1) / TICKS_PER_S > target.tpot_s:
            bounded += 1  # a decode alone, without keys, is slower than the target
            continue
        try:
            forecast = serve(graph, cluster, candidate.serving, candidate.engine, load, target)
        except InputError as error:
            reason = str(error)
            refused[reason] = refused.get(reason, 0) + 1
            continue
        choice = Choice(candidate=candidate, forecast=forecast, meets=_meets(forecast, target))
        played.append(choice)
        if choice.meets and (chosen is None or choice.value > chosen.value):
            chosen = choice
    return Found(
        best=chosen,
        front=front(played),
        size=len(candidates),
        played=len(played),
        bounded=bounded,
        refused=tuple(sorted(refused.items(), key=lambda pair: -pair[1])),
    )


def front(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Those that no other beats in both tokens a device and TPOT, by TPOT."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.forecast.tpot.p50, -c.value)):
        if not kept or choice.value > kept[-1].value:
            kept.append(choice)
    return tuple(kept)

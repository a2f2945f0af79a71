"""Every way of serving a model on some devices, and the best of them under targets.

`space` lists the candidates: tp x pp x dp x ep x replicas that use at most the devices, formats, limits of the engine.
`best` plays each candidate's load, the most promising first by a bound on its output tokens a second that no replay can
exceed, and stops where the bound is under the best found: exact over the space. `exhaustive` plays all of them and is
what it is held against; `fewest` is the best of those with fewest devices. Leaves out engines that a user did not name,
and pools whose engines are laid out differently.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware.types import Cluster
from gnomon.serving.capacity import refusal
from gnomon.serving.forecast import Alike, Disaggregated, Forecast, Target, serve, serve_pools
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice, pieces_of
from gnomon.serving.layout import Serving
from gnomon.serving.requests import Load
from gnomon.serving.scheduler import Batch
from gnomon.software.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to serve: a layout, or pools."""

    serving: Serving
    """Layout of its engines; with `pools`, of one that answers."""
    engine: Engine
    """The program that serves, with its limits."""
    pools: Disaggregated | None = None
    """Engines that compute prompts and that answer; None: each does both."""

    @property
    def devices(self) -> int:
        """Counts the devices that it takes."""
        if self.pools is None:
            return self.serving.devices
        return self.serving.devices * (self.pools.prefill_count + self.pools.decode_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedCandidate:
    """A candidate that was played."""

    candidate: Candidate
    """What was played."""
    forecast: Forecast
    """Its times and rates, of all its devices."""
    meets: bool
    """Whether its p50s are within the targets."""

    @property
    def value(self) -> float:
        """Output tokens a second and device."""
        return self.forecast.output_tokens_per_s / self.forecast.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class BestServing:
    """The answer of a search for the best way to serve."""

    best: PlayedCandidate | None
    """Most output tokens a second and device among those that meet the targets; None if none does."""
    front: tuple[PlayedCandidate, ...]
    """No other has both more tokens a device and a lower TPOT; of the whole space where `unknown` is 0."""
    size: int
    """Candidates in the space."""
    played: int
    """Candidates that were played; with `bounded` and `refused`, all of them."""
    bounded: int
    """Not played."""
    unknown: int
    """Of those: candidates that are not the best, and of which it is not known that they are not on the front."""
    refused: tuple[tuple[str, int], ...]
    """Why candidates were not played, with how many."""


def space(
    cluster: Cluster,
    engines: Sequence[Engine],
    longest: int,
    *,
    weights: Sequence[str],
    kv: Sequence[str] = ("bf16",),
    others: Container[Literal["weights", "kv"]] = (),
    max_seqs: Sequence[int] = (),
    budgets: Sequence[int] = (),
    experts: bool = False,
    fewer: bool = False,
    pools: bool = False,
    redundant_experts: int = 0,
    expert_load: Callable[[int, Engine], float] = lambda ep, rules: 1.0,
    copied: Callable[[Serving, Engine], Sequence[Serving]] = lambda serving, rules: (),
    resident_bytes: int | None = None,
) -> tuple[Candidate, ...]:
    """Lists candidates: axes are powers of two whose product is at most the devices; attention dp only with experts.

    others: of these also the formats that each engine's record lists. fewer: also layouts that leave devices idle (1,
    2, 4 … replicas). pools: also engines of one device group each that compute prompts, 1, a quarter or half of them,
    beside engines that answer. resident_bytes: as of `Serving`. expert_load: of ep and an engine, as
    `Serving` has it. copied: the same layout with copies of foreseen experts, where an engine has them.
    """
    count = cluster.num_devices
    powers = [2**i for i in range(count.bit_length()) if 2**i <= count]
    found = []
    for tp, pp, dp in product(powers, powers, powers if experts else [1]):
        group = tp * pp * dp
        if group > count:
            continue
        most = count // group
        copies = sorted({r for r in powers if r < most} | {most}) if fewer else [most]
        firsts = sorted({1, most // 4, most // 2} - {0, most}) if pools and pp == 1 else []
        for ep in [e for e in powers if experts and e <= tp * dp] or [1]:
            # Groups of attention dp share the experts, so these are dealt over all of their devices.
            if dp > 1 and ep != tp * dp:
                continue
            divided = {name for name, size in zip(("tp", "pp", "dp", "ep"), (tp, pp, dp, ep), strict=True) if size > 1}
            able = [
                rules
                for rules in engines
                if divided <= set(rules.plans_axes) and (rules.partial_experts or ep in (1, tp * dp))
            ]
            for w, k, rules in _formats(weights, kv, able, others):
                one = Serving(
                    tp=tp, pp=pp, dp=dp, ep=ep, weights=w, kv=k, max_model_len=longest, resident_bytes=resident_bytes,
                    redundant_experts=redundant_experts if ep > 1 else 0, expert_load=expert_load(ep, rules),
                )  # fmt: skip
                limits = product(max_seqs or (rules.max_seqs,), budgets or (rules.max_batched_tokens,))
                for (seqs, budget), laid in product(limits, (one, *copied(one, rules))):
                    record = replace(rules, max_seqs=seqs, max_batched_tokens=budget)
                    for replicas in copies:
                        found.append(Candidate(serving=replace(laid, replicas=replicas), engine=record))
                    for first in firsts if rules.disaggregates and laid is one else ():
                        both = Disaggregated(prefill=one, prefill_count=first, decode_count=most - first)
                        found.append(Candidate(serving=one, engine=record, pools=both))
    return tuple(found)


def _formats(
    weights: Sequence[str], kv: Sequence[str], engines: Sequence[Engine], others: Container[str]
) -> Iterator[tuple[str, str, Engine]]:
    """(weights, keys, engine) of every way that an engine has."""
    for rules in engines:
        widths = dict.fromkeys((*weights, *rules.plans_weights)) if "weights" in others else weights
        keys = dict.fromkeys((*kv, *rules.plans_kv)) if "kv" in others else kv
        for w, k in product(widths, keys):
            yield w, k, rules


def bound(price: IterationPrice, load: Load, *, apart: int = 0) -> float:
    """Output tokens a second and device that no replay of the load exceeds. apart: 1 where prompts are computed by
    other engines (a request's second token is then made of a prompt's last one).

    The work of all engines that share a load, in seconds, is at least the largest of three sums over all requests:
    - decodes: an iteration with n of them takes the device what n rows take and, for each key that one of them sees,
      its price. n is at most r = min(clients, max_seqs), so a decode takes at least the least share, over n up to r, of
      n rows; and which keys it sees depends on its request alone.
    - the host's part of that, which the device does not wait for where they overlap, else both together.
    - rows: each new token of a prompt and each decode takes at least the least share of a row among any number of rows.
    """
    groups = price.serving.replicas * price.serving.dp * price.serving.pp
    clients = len(load.requests) if load.concurrency is None else load.concurrency
    most = max(1, min(price.engine.max_seqs, -(-clients // groups)))
    device, host = price.least_decode_ticks(most)
    keys = num_tokens = 0
    for (inputs, outputs), many in Counter((r.input_len, r.output_len) for r in load.requests).items():
        if (count := outputs - 1 - apart) > 0:
            own = price.keys_ticks(count, 1 if price.shape.encoder else inputs, outputs - 1)
            keys += many * (own + price.source_key_ticks * count * inputs)
            num_tokens += many * count
    work = max(num_tokens * device + keys + (0 if price.engine.host_overlap else num_tokens * host), num_tokens * host)
    if not apart:
        rows = prompt_tokens(load) + (num_tokens if price.checked == 1 else 0)
        work = max(work, price.least_token_ticks() * rows + keys)
    outputs = sum(r.output_len for r in load.requests)
    return float("inf") if not work else outputs * groups * TICKS_PER_S / work / price.serving.devices


def prompt_tokens(load: Load) -> int:
    """Tokens of prompts that are computed, whatever is cached."""
    return sum(r.input_len - min(r.prefix_len, r.input_len - 1) for r in load.requests)


def prompt_bound(price: IterationPrice, load: Load, groups: int) -> float:
    """Output tokens a second that engines which compute prompts alone allow: each token of a prompt is computed in an
    iteration, which takes at least the least share of a row for it."""
    work = prompt_tokens(load) * price.least_token_ticks()
    return float("inf") if not work else groups * sum(r.output_len for r in load.requests) * TICKS_PER_S / work


def meets(found: Forecast, target: Target) -> bool:
    """Whether its p50s are within the targets."""
    ttft = target.ttft_s is None or found.ttft.p50 <= target.ttft_s
    return ttft and (target.tpot_s is None or found.tpot.p50 <= target.tpot_s)


def best(graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target) -> BestServing:
    """The best candidate, exactly: none that was left out could have been better."""
    return _search(graph, cluster, candidates, load, target, prune=True)


def exhaustive(
    graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target
) -> BestServing:
    """The same by playing every candidate."""
    return _search(graph, cluster, candidates, load, target, prune=False)


def fewest(graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target) -> BestServing:
    """The best of those that meet the targets with fewest devices, exactly: smaller sets are searched first."""
    size = played = bounded = unknown = 0
    refused: dict[str, int] = {}
    shown: list[PlayedCandidate] = []
    for devices in sorted({candidate.devices for candidate in candidates}):
        found = best(graph, cluster, [c for c in candidates if c.devices == devices], load, target)
        size, played, bounded = size + found.size, played + found.played, bounded + found.bounded
        unknown += found.unknown
        for reason, count in found.refused:
            refused[reason] = refused.get(reason, 0) + count
        shown += found.front
        if found.best is not None:
            break
    return BestServing(
        best=found.best,
        front=front(shown),
        size=len(candidates),
        played=played,
        bounded=bounded + len(candidates) - size,
        unknown=unknown + len(candidates) - size,
        refused=tuple(sorted(refused.items(), key=lambda pair: -pair[1])),
    )


MOST_FOR_FRONT = 48
"""Candidates that are played for the front alone: as many as take a second or so."""


class _Prices:
    """Prices and answers to whether an engine starts, kept by all that they depend on."""

    def __init__(self, graph: Graph, cluster: Cluster, candidates: Sequence[Candidate]) -> None:
        self.graph, self.cluster = graph, cluster
        self.seqs = max((c.engine.max_seqs for c in candidates), default=1)
        self.budget = max((c.engine.max_batched_tokens for c in candidates), default=1)
        self.whole: dict[tuple[Serving, Engine], IterationPrice | InputError] = {}
        self.starts: dict[tuple[Serving, Engine], str | None] = {}
        self.bounds: dict[tuple[Serving, Engine, int, bool], float] = {}

    def of(self, serving: Serving, rules: Engine) -> IterationPrice:
        """InputError where it cannot be, or the engine would not start."""
        one_replica = replace(serving, replicas=1)
        # Priced once under the largest limits of all candidates; `limited` narrows that to a candidate's own.
        key = one_replica, replace(rules, max_seqs=self.seqs, max_batched_tokens=self.budget)
        if key not in self.whole:
            try:
                self.whole[key] = IterationPrice(self.graph, self.cluster, *key)
            except InputError as error:
                self.whole[key] = error
        price = self.whole[key]
        if isinstance(price, InputError):
            raise price
        if (one_replica, rules) not in self.starts:
            problem = refusal(self.graph, self.cluster, one_replica, rules)
            self.starts[one_replica, rules] = None if problem is None else problem.partition(":")[0]
        if (problem := self.starts[one_replica, rules]) is not None:
            raise InputError(problem)
        return price.limited(serving, rules)


def _bound(price: IterationPrice, candidate: Candidate, load: Load, known: _Prices) -> float:
    """`bound` of a candidate; of pools that of their engines that answer, spread over all devices."""
    answering = candidate.pools.decode_count if candidate.pools is not None else candidate.serving.replicas
    key = replace(candidate.serving, replicas=1), candidate.engine, answering, candidate.pools is not None
    if key not in known.bounds:
        apart = int(candidate.pools is not None)
        whole = price.limited(replace(key[0], replicas=answering), candidate.engine)
        known.bounds[key] = bound(whole, load, apart=apart)
    if candidate.pools is None:
        return known.bounds[key]
    # From a rate for each answering device to one for each device of both pools.
    answers = known.bounds[key] * candidate.serving.devices * answering / candidate.devices
    first = candidate.pools.prefill_count * candidate.pools.prefill.dp
    return min(answers, prompt_bound(price, load, first) / candidate.devices)


def _search(
    graph: Graph, cluster: Cluster, candidates: Sequence[Candidate], load: Load, target: Target, *, prune: bool
) -> BestServing:
    refused: dict[str, int] = {}
    order: list[tuple[float, int, IterationPrice]] = []
    known = _Prices(graph, cluster, candidates)
    for index, candidate in enumerate(candidates):
        try:
            price = known.of(candidate.serving, candidate.engine)
        except InputError as error:
            reason = str(error)
            refused[reason] = refused.get(reason, 0) + 1
            continue
        order.append((_bound(price, candidate, load, known), index, price))
    # The best bound first: what is played early leaves out most of the rest.
    order.sort(key=lambda entry: (-entry[0], entry[1]))
    shortest = min(r.input_len for r in load.requests)
    alike: Alike = {}
    chosen: PlayedCandidate | None = None
    edge: tuple[PlayedCandidate, ...] = ()
    played, later = 0, []

    def play(index: int, price: IterationPrice) -> PlayedCandidate | None:
        """None for one that is refused."""
        candidate = candidates[index]
        try:
            if candidate.pools is not None:
                forecast = serve_pools(
                    graph, cluster, candidate.serving, candidate.engine, candidate.pools, load, target, price, alike
                )
            else:
                forecast = serve(
                    graph, cluster, candidate.serving, candidate.engine, load, target, price=price, alike=alike
                )  # fmt: skip
        except InputError as error:
            reason = str(error)
            refused[reason] = refused.get(reason, 0) + 1
            return None
        return PlayedCandidate(candidate=candidate, forecast=forecast, meets=meets(forecast, target))

    for limit, index, price in order:
        least_tpot = least_tpot_s(price, shortest)
        if prune and (
            (chosen is not None and limit < chosen.value)
            # a decode alone or the shortest prompt alone is slower than the target
            or (target.tpot_s is not None and least_tpot > target.tpot_s)
            or (target.ttft_s is not None and least_ttft_s(price, shortest) > target.ttft_s)
        ):
            later.append((limit, least_tpot, index, price))
            continue
        choice = play(index, price)
        if choice is not None:
            played, edge = played + 1, front([*edge, choice])
            if choice.meets and (chosen is None or choice.value > chosen.value):
                chosen = choice
    # What cannot be the best may still lie on the front: unless one that was played is beyond its corner, the tokens a
    # device and the time a token that its own replay cannot pass.
    bounded = unknown = 0
    tries_left = MOST_FOR_FRONT
    for limit, least_tpot, index, price in sorted(later, key=lambda entry: (entry[1], -entry[0], entry[2])):
        if any(one.value >= limit and one.forecast.tpot.p50 <= least_tpot for one in edge):
            bounded += 1
            continue
        tries_left -= 1
        if tries_left < 0:
            unknown += 1
            continue
        choice = play(index, price)
        if choice is not None:
            played, edge = played + 1, front([*edge, choice])
    return BestServing(
        best=chosen,
        front=edge,
        size=len(candidates),
        played=played,
        bounded=bounded + unknown,
        unknown=unknown,
        refused=tuple(sorted(refused.items(), key=lambda pair: -pair[1])),
    )


def least_tpot_s(price: IterationPrice, shortest: int) -> float:
    """Seconds for a further token that no request falls under: a decode alone, after the shortest prompt."""
    if price.shape.encoder:
        return price.decode_ticks(1, 1, 1, shortest) / TICKS_PER_S
    return price.decode_ticks(1, shortest) / TICKS_PER_S


def least_ttft_s(price: IterationPrice, shortest: int) -> float:
    """Seconds to a first token that no request of the load falls under: the shortest prompt alone, in whole pieces."""
    rules = price.engine
    budget = rules.max_batched_tokens if rules.chunked_prefill else shortest
    pieces = pieces_of(shortest, budget, is_read=bool(price.shape.encoder))
    prefill_ticks = sum(price.batch_ticks(Batch((piece,), 0, 0, ())) for piece in pieces) / TICKS_PER_S
    return rules.request_s + rules.request_token_s * shortest + prefill_ticks


def front(choices: Sequence[PlayedCandidate]) -> tuple[PlayedCandidate, ...]:
    """Those that no other beats in both tokens a device and TPOT, by TPOT."""
    front_candidates: list[PlayedCandidate] = []
    # In order of TPOT, so that each must have more tokens a device than all before it.
    for choice in sorted(choices, key=lambda c: (c.forecast.tpot.p50, -c.value)):
        if not front_candidates or choice.value > front_candidates[-1].value:
            front_candidates.append(choice)
    return tuple(front_candidates)

"""The largest model that fits: a decoder made deeper, wider or both by a stated rule, or one of several models.

`grown(config, rule, size)` is the model of a size, `largest` searches for the greatest size with a plan that fits, and
`largest_of` for the largest of given models. Leaves out how well such a model learns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

from gnomon.errors import PlanError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, rent
from gnomon.hardware.kinds import is_mixed
from gnomon.models.presets import Config, build
from gnomon.plans import Workload
from gnomon.search.mixed.devices import Large
from gnomon.search.mixed.plan_mixed import NOT_TRIED, SPENT
from gnomon.search.questions.goals import Case, Question, further, large_of, like_of, others

Rule = Literal["layers", "hidden", "both"]
"""`layers`: more layers of the same width. `hidden`: more heads of the same width, with their share of key-value heads,
of the hidden size and of the feed-forward. `both`: layers and heads in proportion, so that hidden size over layers
stays as it is."""

HEADS = 8
"""Numbers of heads are multiples of this, so that tensor parallelism inside a node can divide them."""

FFN = 64
"""Widths of a feed-forward are multiples of this."""

MOST = 1 << 16
"""Largest size tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A model of a size."""

    size: int
    """Layers under `layers` and `both`, heads under `hidden`."""
    graph: Graph
    """The model at that size."""
    config: Config
    """Its sizes."""


def unit(config: Config, rule: Rule) -> int:
    """Sizes are multiples of this: heads in whole groups of a key-value head and of `HEADS`."""
    if rule != "hidden":
        return 1
    group = _group(config)
    # The least common multiple of the two.
    return group * HEADS // gcd(group, HEADS)


def grown(config: Config, rule: Rule, size: int) -> Grown:
    """The model with `size` layers or heads. PlanError for a size that the rule cannot make."""
    layers, heads = config.num_layers, config.num_heads
    if rule == "hidden":
        heads = size
    else:
        layers = size
        if rule == "both":
            step = unit(config, "hidden")
            heads = max(step, round(config.num_heads * size / config.num_layers / step) * step)
    dense = getattr(config, "num_dense_layers", 0)
    if layers <= dense:
        raise PlanError(f"{config.name} has {dense} dense layers; use more than {dense} layers in all")
    changes: dict[str, Any] = {"num_layers": layers, "name": f"{config.name}, {layers} layers, {heads} heads"}
    if heads != config.num_heads:
        changes |= _wider(config, heads)
    grown_config: Config = replace(config, **changes)
    return Grown(size=size, graph=build(grown_config), config=grown_config)


def _wider(config: Config, heads: int) -> dict[str, Any]:
    # A head keeps its width, hidden_size / num_heads.
    hidden, rest = divmod(config.hidden_size * heads, config.num_heads)
    if rest:
        raise PlanError(f"{config.name} has hidden size {config.hidden_size}, which {heads} heads would not divide")
    changes: dict[str, Any] = {"num_heads": heads, "hidden_size": hidden}
    if hasattr(config, "num_kv_heads"):
        changes["num_kv_heads"] = max(1, heads // _group(config))
    for name in ("ffn_size", "expert_ffn_size"):
        if width := getattr(config, name, 0):
            changes[name] = max(FFN, round(width * heads / config.num_heads / FFN) * FFN)
    return changes


def _group(config: Config) -> int:
    """Query heads of a key-value head."""
    return config.num_heads // getattr(config, "num_kv_heads", config.num_heads)


def largest(question: Question, cluster: Cluster, workload: Workload, config: Config, rule: Rule) -> tuple[Case, ...]:
    """Sizes tried, the last case the largest with a plan that fits.

    From the model's own size it is doubled until nothing fits, or halved until something does, then halved in to the
    unit of the rule, or until `Question.keep_going` says no: then a case says so of the sizes between. Taken for
    granted: where a size fits, so does a smaller one. Beyond that size, the same is done with plans that fit by choices
    beyond the exact search (`Question.squeezed`). PlanError if not even the smallest fits.
    """
    step = unit(config, rule)
    tried: dict[int, Case] = {}
    graphs: dict[int, Graph] = {}
    large: dict[int, Large] = {}

    def fits(count: int) -> bool:
        grown_model = grown(config, rule, count * step)
        name = f"layers={grown_model.config.num_layers} heads={grown_model.config.num_heads}"
        tried[count] = _case(question, cluster, workload, grown_model.graph, name, large_of(large, count))
        graphs[count] = grown_model.graph
        return tried[count].best is not None

    def squeezes(count: int) -> bool:
        if count > MOST:
            return False
        grown_model = grown(config, rule, count * step)
        name = f"layers={grown_model.config.num_layers} heads={grown_model.config.num_heads}"
        case = tried.get(count) or _without(question, cluster, workload, grown_model.graph, name)
        tried[count] = replace(question, graph=grown_model.graph).squeezed(case, like_of(tried))
        graphs[count] = grown_model.graph
        return tried[count].best is not None

    least = getattr(config, "num_dense_layers", 0) + 1 if rule != "hidden" else 1
    own = config.num_heads if rule == "hidden" else config.num_layers
    low, high = _bracket(fits, max(least, own // step), least)
    while low and high - low > 1 and question.keep_going():
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low and high - low > 1 and not (high in tried and tried[high].why.startswith(NOT_TRIED)):  # stopped
        name = f"between {tried[low].label} and {tried[high].label}" if high in tried else "more"
        case = _without(question, cluster, workload, grown(config, rule, (low + 1) * step).graph, name)
        tried[low + 1] = replace(case, label=name, why=NOT_TRIED)
    if question.spares and not is_mixed(cluster):
        low = further(squeezes, low or least - 1)
    if low < least:
        first = next(iter(tried.values()))
        if any(SPENT in case.why for case in tried.values()):
            raise PlanError(
                f"no size of {config.name} that fits on {cluster.name} was found: {SPENT}, after {len(tried)} "
                f"sizes from {first.label} on; allow more (--budget), or start from a smaller model"
            )
        if "memory" not in first.why:  # what is asked for cannot be of any size
            raise PlanError(f"no size of {config.name} runs on {cluster.name}: {first.label}: {first.why}")
        raise PlanError(
            f"not even {tried[least].label} fits on {cluster.name}: {tried[least].why}; use more devices, or a smaller "
            f"model to start from"
        )
    best = replace(question, graph=graphs[low]).fastest(tried[low])
    return (*others(tried, low), best)


def _bracket(fits: Callable[[int], bool], start: int, least: int) -> tuple[int, int]:
    """(a count that fits or 0, one above it that does not)."""
    if fits(start):
        low = start
        while low * 2 <= MOST and fits(low * 2):
            low *= 2
        # Beyond MOST nothing is tried: low + 1 leaves no size in between.
        return low, low * 2 if low * 2 <= MOST else low + 1
    high = start
    while high > least:
        half = max(least, high // 2)
        if fits(half):
            return half, high
        high = half
    return 0, high


def largest_of(question: Question, cluster: Cluster, workload: Workload, graphs: Iterable[Graph]) -> tuple[Case, ...]:
    """Models tried, the largest first; the last is the largest that fits. PlanError if none does."""
    cases = []
    for graph in sorted(graphs, key=lambda graph: graph.num_parameters(), reverse=True):
        cases.append(replace(question, graph=graph).squeezed(_case(question, cluster, workload, graph, graph.name), ()))
        if cases[-1].best is not None:
            cases[-1] = replace(question, graph=graph).fastest(cases[-1])
            return tuple(cases)
    named = ", ".join(f"{case.label}: {case.why}" for case in cases)
    raise PlanError(f"none of the models fits on {cluster.name} ({named}); name smaller ones, or use more devices")


def _case(
    question: Question, cluster: Cluster, workload: Workload, graph: Graph, label: str, large: Large | None = None
) -> Case:
    return replace(question, graph=graph).fitting(cluster, workload, label=_label(graph, label), large=large)


def _without(question: Question, cluster: Cluster, workload: Workload, graph: Graph, label: str) -> Case:
    """A size of which the exact search is known to have no plan."""
    why, cost = "nothing fits in memory", rent(cluster, question.prices)
    return Case(label=_label(graph, label), cluster=cluster, workload=workload, best=None, why=why, rent=cost)


def _label(graph: Graph, label: str) -> str:
    return f"{label} ({graph.num_parameters() / 1e9:.3g}B)"

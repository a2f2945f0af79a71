"""The search of a mixed cluster as text for people and as values for JSON.

`mixed_text` shows the best plan and which kind of device does what, what it gains over equal shares and over each kind
alone, the next plans, and how many points were covered. Leaves out the full prediction (`report.prediction`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gnomon.hardware.kinds import DeviceKind
from gnomon.plans import batch
from gnomon.plans.plan import pipeline_rank
from gnomon.report.planning import short_plan
from gnomon.report.prediction import between, describe
from gnomon.report.tables import Column, gib, number, percent, table, table_of_plans, wrapped
from gnomon.search.mixed.plan_mixed import MixedResult
from gnomon.search.mixed.results import MixedFound
from gnomon.search.mixed.space import MixedPoint, deal_out
from gnomon.units import show_seconds

ENDED = {
    "tries": ("the predictions were used up", "--tries allows more"),
    "nodes": ("as many partial pipelines as one search may open were opened", "--fix or --forbid narrows the search"),
    "budget": ("the budget was spent", "--budget allows more"),
}
"""What ended a search (`best_first.Ended`): in words, and what the user can do."""


def mixed_text(result: MixedResult, *, assumed: Sequence[str] = (), notes: Sequence[str] = ()) -> tuple[str, ...]:
    """Lines of at most 80 columns."""
    best = result.best[0]
    prediction = best.prediction
    lines = [f"{result.graph.name} on {result.cluster.name}", *wrapped(describe(best.plan, result.workload))]
    lines += ["", *_who(result), ""]
    band = prediction.band
    step = f"{show_seconds(prediction.step_s):>12}  ({between(band.low_s, band.high_s)}, {percent(band.coverage, 0)} %)"
    pairs = (
        (f"{prediction.counted}/s/device", number(prediction.tokens_per_s_per_device, 4)),
        ("MFU", f"{percent(prediction.mfu)} %"),
    )
    lines += [
        f"{'step':<16}{step}",
        *(f"{name:<16}{value:>12}" for name, value in pairs),
        "",
        *wrapped(prediction.verdict, indent=""),
    ]
    lines += ["", *_gains(result), "", *_runners(result), "", *_covered(result)]
    shown_assumed = tuple(dict.fromkeys((*assumed, *prediction.assumptions)))
    for title, entries in (("assumed", shown_assumed), ("notes", (*prediction.notes, *notes))):
        if entries:
            lines += ["", title, *(line for entry in entries for line in wrapped(entry, bullet="- "))]
    return tuple(lines)


def _who(result: MixedResult) -> tuple[str, ...]:
    """Lines that say which kind of device computes which stages and how many sequences."""
    best = result.best[0]
    plan, prediction = best.plan, best.prediction
    name_of = {device: kind.name for kind in result.space.kinds for device in kind.devices}
    _, size = batch(plan, result.workload)
    columns = (
        Column(name="stage"),
        Column(name="devices", align="left"),
        Column(name="workers"),
        Column(name="tp"),
        Column(name="layers", align="left"),
        Column(name="sequences of a microbatch", align="left"),
    )
    rows = []
    for stage, price in enumerate(prediction.stages):
        mesh, ranks = plan.stage_mesh(stage), plan.stage_ranks[stage]
        shares = (plan.stages[stage].shares if plan.stages else ()) or deal_out(size, mesh.data_ranks)
        groups: dict[str, list[int]] = {}
        for worker in range(mesh.data_ranks):
            first = next(i for i in range(len(ranks)) if mesh.dense.coordinate(i, "dp") == worker)
            groups.setdefault(name_of[plan.device_of[ranks[first]]], []).append(shares[worker])
        # Embedding and head are no numbered layers, and are not counted where there are such.
        layers = sum(1 for layer in price.in_order if layer.call.first is not None) or len(price.in_order)
        for name, mine in groups.items():
            counts_text = f"{mine[0]} each" if len(set(mine)) == 1 else " ".join(map(str, mine[:12]))
            rows.append(
                (
                    str(stage),
                    f"{len(mine) * mesh.tp * mesh.cp} x {name}",
                    str(len(mine)),
                    str(mesh.tp),
                    str(layers),
                    counts_text,
                )
            )
    return table(columns, rows)


def _gains(result: MixedResult) -> tuple[str, ...]:
    """What the best plan gains."""
    best = result.best[0].step_s
    columns = (Column(name="compared with", align="left"), Column(name="step"), Column(name="faster by %"))
    rows = []
    for name, words, other in (
        ("equal", "equal shares and equal layers on all kinds", result.equal),
        *((kind.name, f"{kind.name} alone, the others left out", other) for kind, other in result.best_of_kinds),
    ):
        cut = name in result.unfinished
        if other is None:
            rows.append((words, "none found in time" if cut else "none fits", ""))
        else:
            words = f"{words.partition(',')[0]}, as far as the budget went" if cut else words
            rows.append((words, show_seconds(other.step_s), percent(other.step_s / best - 1)))
    return table(columns, rows)


def short_mixed(candidate: MixedFound, kinds: Sequence[DeviceKind]) -> str:
    """A plan in a few words: `side by side, h100 6 : a100 2; tp1 z1 m8`, or `h100-sxm-80gb alone: tp2 z1 mb4`."""
    if candidate.point is not None:
        return "; ".join((_work(candidate.point, kinds), _how(candidate.point)))
    return f"{'+'.join(kinds[k].name for k in candidate.kinds)} alone: {short_plan(candidate.plan)}"


def _work(point: MixedPoint, kinds: Sequence[DeviceKind]) -> str:
    names = [kinds[k].name.partition("-")[0] for k in point.kinds]
    if point.form == "replicas":
        return "side by side, " + " : ".join(f"{n} {s}" for n, s in zip(names, point.shares, strict=True))
    of_ranks = [""] * point.pp
    for stage, layers in enumerate(point.layers):
        rank = pipeline_rank(stage, point.pp, point.placement)
        # A rank with several virtual stages: the layers of each, joined by +.
        of_ranks[rank] += f"+{layers}" if of_ranks[rank] else str(layers)
    return "stages " + " ".join(f"{n}:{layers}" for n, layers in zip(names, of_ranks, strict=True))


def _how(point: MixedPoint) -> str:
    tps = "/".join(map(str, dict.fromkeys(point.tp)))
    words = [
        f"tp{tps}",
        *([f"cp{point.cp} {point.context}"] if point.cp > 1 else []),
        *([f"ep{'/'.join(map(str, dict.fromkeys(point.ep)))}"] if max(point.ep, default=1) > 1 else []),
        f"pp{point.pp}",
        *([f"vpp{point.virtual}"] if point.virtual > 1 else []),
        f"z{point.zero}",
        f"m{point.microbatches}",
    ]
    words += ["sp"] if point.sequence_parallel else []
    words += [point.schedule] if point.pp > 1 else []
    return " ".join(words + ([point.recompute] if point.recompute != "none" else []))


def _runners(result: MixedResult) -> tuple[str, ...]:
    best = result.best[0]
    columns = (
        Column(name="the best of those predicted", align="left"),
        Column(name="step"),
        Column(name="up to"),
        Column(name="loses %"),
        Column(name="GiB"),
    )
    rows = [
        (
            short_mixed(candidate, result.space.kinds),
            show_seconds(candidate.step_s),
            show_seconds(candidate.prediction.band.high_s),
            percent(candidate.step_s / best.step_s - 1) if candidate is not best else "",
            gib(candidate.prediction.tightest.peak_bytes),
        )
        for candidate in result.best
    ]
    return table_of_plans(columns, rows)


def _covered(result: MixedResult) -> tuple[str, ...]:
    counts = result.counts
    parts = [
        f"{counts.num_predicted:,} predicted",
        f"{counts.too_slow:,} shown too slow",
        f"{counts.too_large:,} shown too large",
        f"{counts.illegal:,} that cannot run",
        *([f"{counts.num_unseen:,} not looked at"] if counts.num_unseen else []),
    ]
    spent, option = ENDED[result.end_reason] if result.end_reason else ("", "")
    if result.proved:
        sure = "none of them is faster than the best"
    elif result.bound_s > 0:
        gap = percent(result.best[0].step_s / result.bound_s - 1)
        sure = f"{spent}: none is more than {gap} % faster than the best ({option})"
    else:
        sure = f"{spent} before every plan had a bound: how much faster one may be is not known ({option})"
    return wrapped(
        f"{counts.space:,} plans over several kinds = {' + '.join(parts)}; {sure}. With equal shares and each kind "
        f"alone, {result.predicted:,} were predicted in all",
        indent="",
    )


def mixed_mapping(result: MixedResult) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.search-mixed/1`."""
    counts = result.counts

    def shown(candidate: MixedFound | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {
            "point": candidate.point._asdict() if candidate.point is not None else None,
            "kinds": [result.space.kinds[k].name for k in candidate.kinds],
            "prediction": candidate.prediction.to_mapping(),
        }

    return {
        "schema": "gnomon.search-mixed/1",
        "best": [shown(candidate) for candidate in result.best],
        "equal": shown(result.equal),
        "alone": {kind.name: shown(candidate) for kind, candidate in result.best_of_kinds},
        "proved": result.proved,
        "ended": result.end_reason,
        "bound_s": result.bound_s,
        "points": {
            "space": counts.space,
            "priced": counts.num_predicted,
            "too_slow": counts.too_slow,
            "too_large": counts.too_large,
            "illegal": counts.illegal,
            "not_looked_at": counts.num_unseen,
        },
    }

"""A search's result as text for people and as values for JSON.

`plan_text` shows the best plan, the next ones with what they lose and where, what was faster and does not fit, and how
many points were covered. Leaves out the full prediction (`report.prediction`), and reasons in depth (`gnomon explain`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gnomon import schema
from gnomon.hardware import Cluster, Rent
from gnomon.plans import Plan
from gnomon.prediction import Prediction
from gnomon.prices.links import axis_link
from gnomon.report.checkpointing import by_tensor_mapping, by_tensor_text
from gnomon.report.prediction import WORDS, between, describe, run_lengths
from gnomon.report.tables import Column, dollars, gib, memory_unit, number, percent, table, table_of_plans, wrapped
from gnomon.report.uneven import uneven_mapping, uneven_text
from gnomon.search import FoundPlan, Result, loss
from gnomon.search.checkpointing.improve import ByTensor
from gnomon.search.questions.goals import tokens_of
from gnomon.search.refinement.choices import NAMES, show_value
from gnomon.search.refinement.neighbours import ClimbReport
from gnomon.search.refinement.refine import RefinedPlans
from gnomon.search.results import safest
from gnomon.search.stages.uneven import Uneven
from gnomon.units import show_bytes, show_seconds

_WORDS = {**WORDS, "bubble": "bubble", "ahead": "waiting", "launch": "launches", "offload": "host copies"}
"""Part of the step -> what it is called where there is little room."""

PLAN_WORDS = (
    "Plans in short: tp, cp, ep, pp, dp: ranks of each kind of parallelism (dp2x4: 2 replicas over 4 shards); z: ZeRO "
    "stage; v: virtual pipeline stages; mb: micro batch size; sp: sequence parallel; kept: what sp gathers is kept for "
    "the backward; late: gradients are reduced after the backward; then the pipeline schedule and the recompute."
)
"""What `short_plan` abbreviates."""


def plan_text(
    result: Result,
    *,
    assumed: Sequence[str] = (),
    notes: Sequence[str] = (),
    rent: Rent | None = None,
    refined: RefinedPlans | None = None,
    stages: Uneven | None = None,
    tensors: ByTensor | None = None,
    climbed: ClimbReport | None = None,
) -> tuple[str, ...]:
    """Lines of at most 80 columns. rent: of the cluster, if it has a price. refined: of the best plans, if asked.
    stages: what uneven ones gain. tensors: what recomputation tensor by tensor gains. climbed: what neighbours gain."""
    before = result.best[0] if refined is None else refined.best
    best = before if climbed is None else climbed.best
    changed = (refined is not None and bool(refined.steps)) or best is not before
    lines = [f"{result.graph.name} on {result.cluster.name}", *wrapped(describe(best.plan, result.workload))]
    lines += wrapped(_choices(best))
    lines += wrapped(links_text(best.plan, result.cluster))
    lines += ["", *_speed(best, rent), "", *wrapped(best.prediction.verdict, indent="")]
    lines += wrapped(_limit(result), indent="")
    lines += ["", *_runners(result, refined=changed), *_safer(best, result)]
    lines += ["", *(refined_text(refined) if refined else wrapped(_LEFT, indent=""))]
    if climbed is not None:
        lines += ["", *climbed_text(climbed, before)]
    if faster := _too_large(result):
        lines += ["", *faster]
    lines += ["", *_covered(result)]
    if stages is not None:
        lines += uneven_text(stages)
    if tensors is not None:
        lines += by_tensor_text(tensors)
    priced = rent.sources if rent else ()
    shown_assumed = tuple(dict.fromkeys((*assumed, *priced, *best.prediction.assumptions)))
    for title, entries in (("assumed", shown_assumed), ("notes", (*best.prediction.notes, *notes))):
        if entries:
            lines += ["", title, *(line for entry in entries for line in wrapped(entry, bullet="- "))]
    return tuple(lines)


def _choices(best: FoundPlan) -> str:
    """What `describe` does not say."""
    point = best.point
    words = []
    if point.tp > 1:
        words.append("sequence parallel" if point.sequence_parallel else "no sequence parallelism")
    if point.cp > 1:
        words.append(f"context by {point.context}")
    if point.keep_gathered:
        words.append("gathered activations kept")
    if not point.overlap:
        words.append("reductions after the backwards, not overlapped with them")
    return "; ".join(words)


def links_text(plan: Plan, cluster: Cluster) -> str:
    """Says which network each axis of several ranks runs over, of a plan with one mesh: `tp inside a node (nvlink4);
    dp_shard between nodes (infiniband-ndr, 4 ranks on each)`."""
    where: dict[str, list[str]] = {}
    devices = np.array(plan.device_of)
    # Experts have a mesh of their own over the same ranks; ep alone is no axis of the dense one too.
    views = [(plan.mesh.dense, axis) for axis in plan.mesh.dense.axes]
    for view, axis in (*views, *([(plan.mesh.experts, "ep")] if plan.mesh.ep > 1 else [])):
        groups = view.groups(axis)
        if groups.shape[1] > 1:
            link = axis_link(cluster, devices[groups])
            ranks = "1 rank" if link.ranks_per_node == 1 else f"{link.ranks_per_node} ranks"
            inside = f"inside a node ({link.inside_name})"
            place = inside if link.nodes == 1 else f"between nodes ({link.across_name}, {ranks} on each)"
            where.setdefault(place, []).append(axis)
    return "; ".join(f"{' and '.join(axes)} {place}" for place, axes in where.items())


def short(candidate: FoundPlan) -> str:
    """A plan in a few words: `tp2 pp4 dp8 z1 v2 mb2 sp; one_f_one_b; full`; axes of one rank and ZeRO 0 left out."""
    return short_plan(candidate.plan)


def short_plan(plan: Plan) -> str:
    """The same of a plan; of one that lists its stages what they have, as in `3 stages dp8/4/4 tp1/2/2 z1 m16`."""
    if plan.stages:
        return _short_stages(plan)
    mesh, schedule, zero = plan.mesh, plan.schedule, plan.optimizer.zero
    axes = [f"{name}{size}" for name in ("tp", "cp", "ep", "pp") if (size := getattr(mesh, name)) > 1]
    data = f"dp{mesh.dp_replicate}x{mesh.dp_shard}" if mesh.dp_replicate > 1 else f"dp{mesh.dp_shard}"
    axes += [data] if mesh.data_ranks > 1 else []
    virtual = [f"v{schedule.virtual_stages}"] if schedule.virtual_stages > 1 else []
    layout, late = plan.layout, not plan.overlap.grad_reduce
    flags = (("sp", layout.sequence_parallel), ("kept", layout.keep_gathered), ("late", late))
    micro = f"mb{schedule.micro_batch_size}"
    axes += [layout.context] if mesh.cp > 1 and layout.context != "ring" else []
    words = [*axes, *([f"z{zero}"] if zero else []), *virtual, micro, *(word for word, is_so in flags if is_so)]
    words += ["uneven"] if schedule.layers_per_stage else []
    saved: str = plan.saved.preset
    # Offloading moves what is kept anyway and is named by itself, so it is left out of the word for recomputation.
    if any(rule.action != "offload" for rule in plan.saved.rules):
        saved = "by stage" if any(rule.preset is not None for rule in plan.saved.rules) else "by tensor"
    again = [saved] if saved != "none" else []
    again += ["offload"] if any(rule.action == "offload" for rule in plan.saved.rules) else []
    order = "+".join([schedule.name, *(method.name for method in schedule.passes)])
    return "; ".join([" ".join(words), *([order] if mesh.pp > 1 else []), *again])


def short_plans(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Short form of each plan; where two that differ would read alike, with what tells them apart behind it."""
    names = [short_plan(plan) for plan in plans]
    return tuple(
        name + _apart(plan, [p for p, n in zip(plans, names, strict=True) if n == name and p != plan])
        for plan, name in zip(plans, names, strict=True)
    )


def _apart(plan: Plan, alike: Sequence[Plan]) -> str:
    """Tells a plan from those alike: `; layers 9 8 8 7`, or the fields that it sets otherwise than others of the same
    name."""
    if not alike:
        return ""
    counts = plan.schedule.layers_per_stage
    if counts and any(other.schedule.layers_per_stage != counts for other in alike):
        return f"; layers {run_lengths(counts)}"
    own, others = _flat(schema.to_mapping(plan)), [_flat(schema.to_mapping(other)) for other in alike]
    # Of all alike at once: a field that tells two of three apart is shown on all three.
    names = sorted({name for other in others for name in {*own, *other} if own.get(name) != other.get(name)})
    return "".join(f"; {name.rpartition('.')[2]} {own[name]}" for name in names if name in own)


def _flat(value: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Values by their whole names, `overlap.async_tp`."""
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flat(inner, f"{before}{name}.") if isinstance(inner, Mapping) else {f"{before}{name}": inner}
    return flat


def _short_stages(plan: Plan) -> str:
    meshes = [plan.stage_mesh(stage) for stage in range(plan.num_stages)]
    words = [f"{len(meshes)} stage{'s' * (len(meshes) > 1)}"]
    for name, sizes in (("dp", [mesh.data_ranks for mesh in meshes]), ("tp", [mesh.tp for mesh in meshes])):
        if max(sizes) > 1:
            words.append(name + "/".join(map(str, sizes if len(set(sizes)) > 1 else sizes[:1])))
    words += ["shares " + ":".join(map(str, plan.stages[0].shares[:8]))] if plan.stages[0].shares else []
    words += [f"z{plan.optimizer.zero}"] if plan.optimizer.zero else []
    words += [f"m{plan.schedule.num_microbatches}", *(["sp"] if plan.layout.sequence_parallel else [])]
    again = [plan.saved.preset] if plan.saved.preset != "none" else []
    return "; ".join([" ".join(words), *([plan.schedule.name] if len(meshes) > 1 else []), *again])


def _speed(best: FoundPlan, rent: Rent | None) -> tuple[str, ...]:
    prediction = best.prediction
    band = prediction.band
    pairs = [
        (f"{prediction.counted}/s/device", number(prediction.tokens_per_s_per_device, 4)),
        ("MFU", f"{percent(prediction.mfu)} %"),
    ]
    if rent is not None:
        step = rent.dollars_per_hour / 3600 * prediction.step_s
        pairs += [
            ("a step costs", dollars(step)),
            (f"1M {prediction.counted} cost", dollars(step / tokens_of(best) * 1e6)),
        ]
    step_text = (
        f"{show_seconds(prediction.step_s):>12}  ({between(band.low_s, band.high_s)}, {percent(band.coverage, 0)} %)"
    )
    return (f"{'step':<16}{step_text}", *(f"{name:<16}{value:>12}" for name, value in pairs))


def _safer(best: FoundPlan, result: Result) -> tuple[str, ...]:
    """The plan that ties with the best and whose band reaches less far up, if there is one."""
    # Compared by the upper end of the band: among plans that tie within it the one that can go less wrong.
    safer = safest(best, result.best)
    if safer is None:
        return ()
    number, slower_by = result.best.index(safer) + 1, safer.step_s / best.step_s - 1
    times = show_seconds(safer.prediction.band.high_s), show_seconds(best.prediction.band.high_s)
    slower = f"is {percent(slower_by)} % slower" if slower_by > 0 else "is as fast"
    sentence = f"safer: plan {number} {slower} and takes up to {times[0]}, where the best takes up to {times[1]}"
    return wrapped(sentence, indent="")


_LEFT = f"left as they are: {', '.join(NAMES)} (--refine tries what the stack runs, --fix sets one)"


def refined_text(refined: RefinedPlans) -> tuple[str, ...]:
    """What the choices beyond the exact search gain, a line each."""
    open_ = ", ".join(choice.name for choice in refined.choices) or "none that the stack is known to run"
    plans = "the best plan" if refined.starts == 1 else f"{refined.starts} plans, of which some may not fit yet,"
    summary = f"tried on {plans} by the simulator, one at a time, {refined.tried} predictions: {open_}. "
    # One round tries each choice by itself; more go on from what was taken, so that pairs of choices are seen.
    if refined.effort.rounds == 1:
        summary += f"What gains less than {percent(refined.effort.gain)} % is left as it is. --refine tries more."
    else:
        summary += "A better combination may exist."
    if refined.idle:
        summary += f" Fixed, and without a meaning in this plan: {', '.join(refined.idle)}."
    if not refined.complete:
        summary += " Stopped at the most predictions."
    if not refined.steps:
        return (*wrapped("refined: nothing gains", indent=""), *wrapped(summary))
    columns = (Column(name="refined", align="left"), Column(name="step"), Column(name="gains %"), Column(name="GiB"))
    rows = [(f"from {short(refined.start)}", show_seconds(refined.start.step_s), "", _peak(refined.start.prediction))]
    before = refined.start.step_s
    for step in refined.steps:
        after = step.prediction.step_s
        gains = percent(1 - after / before)
        old, new = (show_value(step.choice, value, step.prediction.plan) for value in (step.before, step.after))
        words = f"{step.choice.name} {old} -> {new}"
        rows.append((words, show_seconds(after), gains, _peak(step.prediction)))
        before = after
    return (*table(columns, rows), *wrapped(summary))


def climbed_text(climbed: ClimbReport, before: FoundPlan) -> tuple[str, ...]:
    """What plans one change away from the best gain, a line each. before: where the climb began."""
    if not climbed.steps:
        return wrapped(f"neighbours of the best plan: {climbed.tried} predicted, none is faster", indent="")
    columns = (Column(name="neighbours", align="left"), Column(name="step"), Column(name="gains %"), Column(name="GiB"))
    rows, step_s = list[tuple[str, ...]](), before.step_s
    for what, prediction in climbed.steps:
        gains = percent(1 - prediction.step_s / step_s)
        rows.append((what, show_seconds(prediction.step_s), gains, _peak(prediction)))
        step_s = prediction.step_s
    return (*table(columns, rows), *wrapped(f"{climbed.tried} plans one change away were predicted"))


def climbed_mapping(climbed: ClimbReport) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "steps": [{"change": what, "step_s": step_made.step_s} for what, step_made in climbed.steps],
        "predictions": climbed.tried,
        "prediction": climbed.best.prediction.to_mapping(),
    }


def _peak(prediction: Prediction) -> str:
    return gib(prediction.tightest.peak_bytes)


def _limit(result: Result) -> str:
    # The same limit holds on all devices, so it is a share of the smallest.
    device = min((group.node.device for group in result.cluster.groups), key=lambda device: device.memory_bytes)
    share = result.limit_bytes / device.memory_bytes
    return f"allowed: {show_bytes(result.limit_bytes)}, {percent(share, 0)} % of {device.name} (--memory changes it)"


def _runners(result: Result, *, refined: bool) -> tuple[str, ...]:
    """The plans of the search, numbered, with how long each may take and what it gives up. refined: whether the best
    plan is one made of these."""
    best = result.best[0]
    unit, size = memory_unit(best.prediction.tightest.peak_bytes)
    title = "best and alternatives" if result.diverse else "the best plans"
    columns = (
        Column(name="before refining" if refined else title, align="left"),
        Column(name="step"),
        Column(name="up to"),
        Column(name="loses %"),
        Column(name="most in", align="left"),
        Column(name=unit),
        Column(name="more"),
    )
    rows = []
    for candidate in result.best:
        lost = loss(best, candidate)
        # A plan may lose nothing: those that are given as alternatives tie with the best.
        where = _WORDS.get(lost.part, lost.part.lower()) if lost.seconds > 0 else ""
        share = percent(lost.seconds / best.step_s) if candidate is not best else ""
        peak = candidate.prediction.tightest.peak_bytes
        change_text = "" if candidate is best else f"{(peak - best.prediction.tightest.peak_bytes) / size:+.1f}"
        high = show_seconds(candidate.prediction.band.high_s)
        rows.append((show_seconds(candidate.step_s), high, share, where, f"{peak / size:.1f}", change_text))
    names = [f"{i} {name}" for i, name in enumerate(short_plans([candidate.plan for candidate in result.best]), 1)]
    return table_of_plans(columns, [(name, *row) for name, row in zip(names, rows, strict=True)])


def _too_large(result: Result) -> tuple[str, ...]:
    """Plans over what a search may fill, which may be less than the device holds."""
    over = f"faster, but over {show_bytes(result.limit_bytes)}"
    columns = (Column(name=over, align="left"), Column(name="step"), Column(name="GiB"))
    # What is slower and does not fit helps nobody.
    faster = [candidate for candidate in result.near if candidate.step_s < result.best[0].step_s]
    if not faster:
        return ()
    names = short_plans([candidate.plan for candidate in faster[:3]])
    rows = [
        (name, show_seconds(f.step_s), gib(f.prediction.tightest.peak_bytes))
        for name, f in zip(names, faster[:3], strict=True)
    ]
    return table(columns, rows)


def _covered(result: Result) -> tuple[str, ...]:
    counts = result.counts
    # Bounds of plans that were not looked at: the least of them proves how far from the fastest the best can be.
    if result.open_s is not None:
        near = f"; {result.neighbours} plans one change away from the best were predicted" if result.neighbours else ""
        gain = 1 - result.open_s / result.best[0].step_s
        # 0 is the bound of what was not priced at all yet.
        if not result.open_s:
            proved = "some of them have no bound yet, so a faster one may be among them"
        elif gain > 0:
            least = show_seconds(result.open_s)
            proved = f"each takes {least} a step or more, so the best is within {gain:.1%} of the fastest"
        else:
            proved = "none is faster than the best, but alternatives may be missing"
        return wrapped(
            f"budget spent: {counts.num_unseen:,} of {counts.space:,} plans were not looked at (--budget): "
            f"{proved}{near}",
            indent="",
        )
    return wrapped(
        f"{counts.space:,} plans = {counts.num_predicted:,} predicted + {counts.too_slow:,} shown too slow + "
        f"{counts.too_large:,} shown too large + {counts.duplicates:,} the same as another + {counts.illegal:,} that "
        f"cannot run",
        indent="",
    )


def refined_mapping(refined: RefinedPlans) -> dict[str, Any]:
    """Plain values for JSON."""
    return {
        "start": refined.start.point._asdict(),
        "steps": [
            {
                "choice": step.choice.name,
                "before": step.before,
                "after": step.after,
                "step_s": step.prediction.step_s,
                "peak_bytes": step.prediction.tightest.peak_bytes,
            }
            for step in refined.steps
        ],
        "predictions": refined.tried,
        "starts": refined.starts,
        "choices": [choice.name for choice in refined.choices],
        "exact": False,
        "prediction": refined.best.prediction.to_mapping(),
    }


def result_mapping(
    result: Result,
    *,
    rent: Rent | None = None,
    stages: Uneven | None = None,
    refined: RefinedPlans | None = None,
    tensors: ByTensor | None = None,
    climbed: ClimbReport | None = None,
) -> dict[str, Any]:
    """Plain values for JSON, as `gnomon.search/1`. rent: of the cluster, if it has a price. stages: what uneven ones
    gain. refined: of the best plans, if asked. climbed: what neighbours gained. `safest` is an index into `best`."""
    counts = result.counts
    # The plan that is written is that of the last pass, and what is safer is said beside that one.
    last = climbed or refined
    safer = safest(result.best[0] if last is None else last.best, result.best)
    step = None if rent is None else rent.dollars_per_hour / 3600 * result.best[0].step_s
    return {
        "schema": "gnomon.search/1",
        "limit_bytes": result.limit_bytes,
        "diverse": result.diverse,
        "dollars_per_step": step,
        "dollars_per_million_tokens": None if step is None else step / tokens_of(result.best[0]) * 1e6,
        "best": [
            {
                "point": candidate.point._asdict(),
                "loses_s": candidate.step_s - result.best[0].step_s,
                "more_bytes": candidate.prediction.tightest.peak_bytes - result.best[0].prediction.tightest.peak_bytes,
                "prediction": candidate.prediction.to_mapping(),
            }
            for candidate in result.best
        ],
        "faster_but_too_large": [
            {
                "point": candidate.point._asdict(),
                "step_s": candidate.step_s,
                "peak_bytes": candidate.prediction.tightest.peak_bytes,
            }
            for candidate in result.near
        ],
        "points": {
            "space": counts.space,
            "priced": counts.num_predicted,
            "too_slow": counts.too_slow,
            "too_large": counts.too_large,
            "duplicates": counts.duplicates,
            "illegal": counts.illegal,
            "not_looked_at": counts.num_unseen,
        },
        "others_take_s_or_more": result.open_s,
        "uneven": None if stages is None else uneven_mapping(stages),
        "safest": None if safer is None else result.best.index(safer),
        **({} if tensors is None else {"by_tensor": by_tensor_mapping(tensors)}),
        **({} if refined is None else {"refined": refined_mapping(refined)}),
        **({} if climbed is None else {"neighbours": climbed_mapping(climbed)}),
    }

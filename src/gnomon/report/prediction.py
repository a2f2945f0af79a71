"""A prediction as text for people: speed, where the step goes, memory by rank class, the verdict, what was assumed.

`prediction_text` returns lines of at most 80 columns. The same content as `Prediction.to_mapping`, shortened where it
repeats. Leaves out the timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gnomon.graph import Graph
from gnomon.late import load_late
from gnomon.plans import Plan, SavedRule, Workload, batch
from gnomon.prediction import Prediction, RankMemory, host_memory
from gnomon.prediction.loading import host_limit, host_short, loading
from gnomon.report.assumed import lines_to_print
from gnomon.report.tables import Column, gib, memory_unit, number, percent, ranges, table, wrapped
from gnomon.software import beyond_lines
from gnomon.units import show_seconds

if TYPE_CHECKING:
    from gnomon.search.fit.advice import FitAdvice

ROWS = 8
"""Rank classes shown; the tightest are."""

TENSORS = 3
"""Tensors of a rule that are named in a heading."""

WORDS = {
    "F": "forward",
    "C": "forward, keeping only its input",
    "R": "recompute",
    "launch": "kernels waiting for the host",
    "offload": "copies to and from the host",
    "bubble": "waiting for other stages (bubble)",
    "ahead": "waiting: another rank sets the pace",
    "B": "backward",
    "I": "input gradients",
    "W": "weight gradients",
    "OPT": "optimizer",
    "NORM": "gradient norm",
    "RESHARD": "freeing of parameters",
    "S": "head: logits",
    "T": "head: gradients",
    "EMBED": "embedding",
    "EGRAD": "embedding: gradient",
    "CAST_H": "hidden states to all ranks",
    "SUM_V": "softmax over all ranks",
    "SUM_H": "their gradient to the last stage",
    "SUM_E": "embedded tokens to the first stage",
    "CAST_E": "their gradient to all ranks",
    "SEND_F": "sending to the next stage",
    "SEND_B": "sending to the stage before",
    "RECV_F": "receiving from the stage before",
    "RECV_B": "receiving from the next stage",
}
"""Part of the step, or kind of action -> what people call it."""


def prediction_text(
    prediction: Prediction,
    *,
    assumed: Sequence[str] = (),
    advice: FitAdvice | None = None,
    every_assumption: bool = False,
) -> tuple[str, ...]:
    """A prediction as lines of text. `assumed` stands before what the prediction itself assumed; `advice` under a
    verdict of not fitting, or maybe not, None when nothing was tried. every_assumption: also those that cannot change
    the answer."""
    lines = [
        *_heading(prediction),
        *beyond_stack(prediction),
        "",
        *_speed(prediction),
        "",
        *_breakdown(prediction),
        "",
        *_memory(prediction),
    ]
    lines += ["", *_verdict(prediction, advice)]
    # What a stack is not known to run stands at the top as a warning; below it would be said twice.
    above = beyond_lines(prediction.pricing.stack, prediction.plan)
    assumption_lines = tuple(
        assumption for assumption in dict.fromkeys((*assumed, *prediction.assumptions)) if assumption not in above
    )
    printed = lines_to_print(prediction, assumption_lines, every=every_assumption)
    for title, entries in (("assumed", printed), ("notes", prediction.notes)):
        if entries:
            lines += ["", title, *(line for entry in entries for line in wrapped(entry, bullet="- "))]
    return tuple(lines)


def beyond_stack(prediction: Prediction) -> tuple[str, ...]:
    """What the program does not run of the plan, and what to do; nothing where it runs all of it."""
    if not prediction.unsupported:
        return ()
    name = prediction.pricing.stack.name
    warning = (
        f"{name} does not run this plan: {'; '.join(prediction.unsupported)}. The numbers are of a {name} that did. "
        f"What it does run is found by `gnomon plan --stack {name}`; a program of your own is --stack FILE.toml"
    )
    return ("", *wrapped(warning, indent=""))


def describe(plan: Plan, workload: Workload) -> str:
    """A plan in one line: axes, schedule, ZeRO, recompute, precision, batch, and choices that are not the defaults."""
    count, size = batch(plan, workload)
    data_ranks = plan.stage_mesh(0).data_ranks
    micro = size // data_ranks if size % data_ranks == 0 else size / data_ranks
    stages = f", {plan.schedule.virtual_stages} virtual stages" if plan.schedule.virtual_stages > 1 else ""
    if counts := plan.schedule.layers_per_stage:
        stages += f", layers {run_lengths(counts)}"
    if plan.schedule.vocabulary != "ends":
        stages += f", vocabulary {plan.schedule.vocabulary}"
    stages += "".join(f" + {method.name}" for method in plan.schedule.passes)
    precision = plan.precision.fp8.recipe + " fp8" if plan.precision.fp8 else plan.precision.compute
    axes = plan.mesh.describe() if not plan.stages else f"{len(plan.stages)} stages, {plan.world_size} ranks"
    axes += f", ep={plan.mesh.ep}" if plan.mesh.ep > 1 else ""
    lengths = workload.sequence_lengths()
    longest, shortest = max(lengths), min(lengths)
    microbatch = f"{micro:g} samples" if longest == 1 else f"{micro:g} x {longest} tokens"
    tokens = f"{count} microbatch{'es' if count > 1 else ''} of {microbatch}"
    if shortest < longest:
        tokens = f"{len(lengths)} sequences of {shortest} to {longest} tokens"
    # Describing choices imports the search, and most plans have none to describe.
    words = load_late("gnomon.search.refinement.choices:described")(plan) if has_choices(plan) else ()
    return (
        f"{axes}; ZeRO {plan.optimizer.zero}; {plan.schedule.name}{stages}, {tokens}; {precision}; "
        f"recompute {_recompute(plan)}{''.join(f'; {word}' for word in words)}"
    )


def has_choices(plan: Plan) -> bool:
    """Whether values of `search.refinement.CHOICES` may differ from the defaults: only then is the search loaded."""
    usual = Plan()
    return (
        plan.overlap != usual.overlap
        or replace(plan.optimizer, zero=0, clip=True) != replace(usual.optimizer, zero=0, clip=True)
        or plan.mesh.order != usual.mesh.order
        or plan.layout.dispatch != usual.layout.dispatch
        or bool(plan.saved.rules or plan.schedule.passes or plan.experts.replicas or plan.experts.placement)
    )


def run_lengths(counts: Sequence[int]) -> str:
    """Layers of each stage: `9 8 8 7`; of many stages those that follow each other at once, `2 3 37x2 1`."""
    if len(counts) <= 8:
        return " ".join(map(str, counts))
    # Neighbours only: the order of stages is the information.
    runs = [(value, len(list(same))) for value, same in groupby(counts)]
    return " ".join(str(value) if times == 1 else f"{times}x{value}" for value, times in runs)


def _recompute(plan: Plan) -> str:
    """The preset, those of layers and stages that have another, and the tensors that are kept or computed again
    otherwise: `full but core, q_proj, v_proj, …`."""
    rules = plan.saved.rules
    words = [f"{rule.preset} in {_where(rule)}" for rule in rules if rule.preset is not None]
    first: str = plan.saved.preset
    for action, joined in (("keep", "but"), ("recompute", "and")):
        names = [name for rule in rules if rule.preset is None and rule.action == action for name in rule.tensors]
        # `none but core` would say nothing: without recomputation all is kept already.
        if names and (action == "recompute" or first != "none"):
            short = dict.fromkeys(name.rstrip("*.").rpartition(".")[2] for name in names)
            first += f" {joined} {', '.join([*short][:TENSORS])}{', …' if len(short) > TENSORS else ''}"
    return ", ".join([first, *words])


def _where(rule: SavedRule) -> str:
    """`the first 4 layers of stages 0, 1`."""
    layers = "layers" if rule.calls == "*" else rule.calls
    first = "" if rule.first_per_stage is None else f"the first {rule.first_per_stage} "
    if rule.first_per_stage == 1 and rule.calls == "*":
        first, layers = "the first ", "layer"
    stages = f" of stage{'s' * (len(rule.stages) > 1)} {', '.join(map(str, rule.stages))}" if rule.stages else ""
    return f"{first}{layers}{stages or ' of each stage' * bool(first)}"


def parameters(graph: Graph) -> str:
    """`671.0 billion parameters, 37.6 billion active`, and those of adapters alone that are trained."""
    trained, frozen, active = graph.num_parameters(), graph.num_frozen(), graph.num_active_parameters()
    text = f"{_people(trained + frozen)} parameters"
    text += f", {_people(active + frozen)} active" if active < trained else ""
    return text + (f", {_people(trained)} trained" if frozen else "")


def _people(count: int) -> str:
    """A count as it is said: `124.4 million`."""
    for size, word in ((1e9, "billion"), (1e6, "million")):
        if count >= size:
            return f"{count / size:.4g} {word}"
    return f"{count:,}"


def _heading(prediction: Prediction) -> tuple[str, ...]:
    first = f"{prediction.model} on {prediction.cluster}"
    size, plan = parameters(prediction.pricing.graph), describe(prediction.plan, prediction.workload)
    return (*wrapped(first, indent=""), *wrapped(size), *wrapped(plan))


def _speed(prediction: Prediction) -> tuple[str, ...]:
    band = prediction.band
    share = f"{percent(band.coverage, 0)} %"
    unit, size = memory_unit(prediction.tightest.peak_bytes)
    peak, low, high = (
        f"{nbytes / size:.1f}" for nbytes in (prediction.tightest.peak_bytes, band.low_bytes, band.high_bytes)
    )
    pairs = (
        ("step", show_seconds(prediction.step_s), f"  ({between(band.low_s, band.high_s)}, {share})"),
        (f"{prediction.counted}/s/device", number(prediction.tokens_per_s_per_device, 4), ""),
        ("MFU", f"{percent(prediction.mfu)} %", _causal(prediction)),
        ("HFU", f"{percent(prediction.hfu)} %", ""),
        ("peak memory", f"{peak} {unit}", f"  ({low} to {high}, {share})"),
    )
    return tuple(f"{name:<16}{value:>12}{note}" for name, value, note in pairs)


CAUSAL = 0.02
"""Share of the MFU from which it is said how attention is counted."""


def _causal(prediction: Prediction) -> str:
    """What MFU is where attention is counted as its causal mask leaves it."""
    # The PaLM paper's MFU counts attention in full although half of it is masked, and torchtitan does so too. Where
    # both agree within 2 % one number is enough.
    if prediction.mfu - prediction.causal_mfu < CAUSAL * prediction.mfu:
        return ""
    return f"  (attention in full; {percent(prediction.causal_mfu)} % by its causal half)"


def between(low: float, high: float) -> str:
    """Two durations, the unit once where it is one."""
    first, second = show_seconds(low), show_seconds(high)
    alike = first.split()[-1] == second.split()[-1]
    return f"{first.split()[0] if alike else first} to {second}"


def _breakdown(prediction: Prediction) -> tuple[str, ...]:
    columns = (Column(name="step of the busiest rank", align="left"), Column(name="s"), Column(name="%"))
    parts = [(_named(kind), seconds) for kind, seconds in prediction.breakdown.items() if seconds]
    parts.sort(key=lambda part: -part[1])
    rows = [(name, number(seconds), percent(seconds / prediction.step_s)) for name, seconds in parts]
    return table(columns, rows)


def _named(kind: str) -> str:
    """The name of a part of the step for people. A collective is called exposed: the breakdown holds only what the rank
    waits for, nothing of what overlaps."""
    return f"exposed {kind}" if kind.endswith(" communication") else WORDS.get(kind, kind.lower())


def _memory(prediction: Prediction) -> tuple[str, ...]:
    unit, size = memory_unit(prediction.tightest.peak_bytes)
    columns = (
        Column(name=f"{unit} on ranks", align="left"),
        *(Column(name=n) for n in ("param", "grad", "optim", "activ", "logits", "temp", "other", "peak", "limit")),
    )
    # By share of the limit and not by bytes: devices may differ.
    ordered = sorted(prediction.memory, key=lambda rank: -rank.peak_bytes / rank.limit_bytes)
    shown = sorted(ordered[:ROWS], key=lambda rank: rank.rank_class)
    lines = table(columns, [_memory_row(rank, size) for rank in shown])
    if len(ordered) > ROWS:
        lines += (f"… and {len(ordered) - ROWS} classes of ranks with more room; --json lists all",)
    return lines


def _memory_row(rank: RankMemory, unit: int) -> tuple[str, ...]:
    class_bytes = dict(rank.by_class)
    named = [class_bytes.pop("parameters", 0), class_bytes.pop("gradients", 0)]
    named += [class_bytes.pop("master", 0) + class_bytes.pop("states", 0)]
    named += [class_bytes.pop(name, 0) for name in ("activations", "logits", "temporary")]
    # The allocator rounds up and what lies outside it is not a tensor: the row adds up to the peak.
    other = rank.peak_bytes - sum(named)
    return (ranges(rank.ranks), *(f"{size / unit:.1f}" for size in (*named, other, rank.peak_bytes, rank.limit_bytes)))


MUCH = 0.1
"""Share of a node's host memory from which it is said what loading takes of it."""


def host_mapping(prediction: Prediction) -> dict[str, Any]:
    """A node's host memory as plain values: what training holds, what loading takes, what there is."""
    before = loading(prediction)
    return {
        "bytes": host_memory(prediction).bytes,
        "loading_bytes": before.host_bytes,
        "loading_device_bytes": before.device_bytes,
        "limit_bytes": host_limit(prediction),
        "fits": not host_short(prediction),
    }


def _host(prediction: Prediction) -> tuple[str, ...]:
    """Lines on host memory and on loading, where either is more than nothing."""
    host_bytes, before, limit = host_memory(prediction).bytes, loading(prediction), host_limit(prediction)
    of = "" if limit is None else f" of {gib(limit)}"
    lines: list[str] = []
    if host_bytes:
        there = "" if limit is not None else ": nobody says how much there is (--host-memory 512GiB)"
        lines += wrapped(f"host memory a node: {gib(host_bytes)}{of} GiB while it trains{there}", indent="")
    # Loading matters where it needs more than training does: then it is what does not fit.
    device = before.device_bytes > prediction.tightest.peak_bytes
    much = before.host_bytes > host_bytes and (limit is None or before.host_bytes > MUCH * limit)
    if much or device:
        parts = [f"{gib(before.device_bytes)} GiB of a device"] * device
        parts += [f"{gib(before.host_bytes)}{of} GiB of a node's host memory ({before.how})"] * much
        lines += wrapped(f"while it loads: {', '.join(parts)}", indent="")
    return tuple(lines)


def _verdict(prediction: Prediction, advice: FitAdvice | None) -> tuple[str, ...]:
    lines = [*_host(prediction), *wrapped(prediction.verdict, indent="")]
    if short := host_short(prediction):
        lines += wrapped(f"all the same it does not fit: {short} (--host-memory says what a node has)", indent="")
    if advice is not None and advice.ways:
        room = " with room" if prediction.fits else ""
        lines += ["", f"what would fit{room}, fastest first"]
        columns = (Column(name="  change", align="left"), Column(name="step"), Column(name="peak GiB"))
        rows = [(f"  {c.what}", show_seconds(c.step_s), gib(c.peak_bytes)) for c in advice.ways]
        lines += table(columns, rows)
        if any(change.lines for change in advice.ways):
            lines += ["", "in the job's own terms"]
            lines += [
                line
                for change in advice.ways
                for line in wrapped(f"{change.what}: {'; '.join(change.lines)}", bullet="  ")
            ]
    # Advice may be asked of what fits, to have more room; then that nothing helps is no news.
    elif advice is not None and not (prediction.fits and not short):
        lines += wrapped(_nothing(advice), indent="")
        for other in advice.others:
            summary = f"{other.what}: {gib(other.peak_bytes)} GiB, {show_seconds(other.step_s)} a step"
            lines += wrapped(f"{summary}: {'; '.join(other.lines)}", bullet="  ")
    return tuple(lines)


def _nothing(advice: FitAdvice) -> str:
    """The sentence for advice without a change that fits: that there is none, or that not all were tried."""
    if advice.others:
        return "no combination of the changes of gnomon fit makes it fit; another job does:"
    if advice.complete:
        return "no combination of the changes of gnomon fit makes it fit: use more devices, or a smaller model"
    return f"none of the {advice.tried} changes that were tried makes it fit; gnomon fit, given the same, tries all"

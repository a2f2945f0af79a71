"""`gnomon fleet service` and `gnomon fleet slices`: machines that inference needs over the day, MIG slices for batches.

`run(options)` and `run_slices(options)` print and return 0. Leaves out playing (`gnomon.fleet.services`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from gnomon.cli.options.flags import changed_options, flags
from gnomon.cli.options.fleet import ServiceOptions, SlicesOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.predict_serve import ServingQuestion, read
from gnomon.cli.serving import SHARED
from gnomon.cli.terminal import Progress, print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import InputError
from gnomon.fleet.policies.elastic_batch import BatchPoint, cover
from gnomon.fleet.services import Bin, buckets, needs, slice_points
from gnomon.report.tables import Column, number, percent, table, wrapped
from gnomon.schema import save_text
from gnomon.serving.capacity import refusal
from gnomon.serving.forecast import Forecast, serve
from gnomon.serving.iteration import IterationPrice
from gnomon.serving.requests import Load
from gnomon.units import parse_seconds, show_seconds

ALONE = (
    "page", "fewest", "serve", "pools", "tp", "pp", "ep", "dp", "replicas", "ttft", "tpot", "concurrency", "draft",
    "draft_tokens", "acceptance", "vision", "image_tokens", "output_len",
)  # fmt: skip
"""Options of serving that mean nothing for batches of prompts on a slice."""


def _refuse(options: ServiceOptions | SlicesOptions, own: Sequence[str], without: Sequence[str]) -> None:
    """InputError for an option of training, and for one of serving that is not looked at here."""
    every, serving = flags(type(options)), flags(ServeOptions)
    for name in changed_options(options):
        is_used = name in own or name in ("model", "on", "json") or name in serving or name in SHARED
        # An option that is accepted and not looked at would look as if it had an effect.
        if not is_used or name in without:
            raise InputError(f"{every[name].names[-1]} has no meaning for this question; leave it out")


def run(options: ServiceOptions) -> int:
    """Play the day, print what it needs, write the load."""
    _refuse(options, ("bin", "share", "most", "output"), ("page", "fewest", "serve", "pools"))
    if options.requests is None:
        raise InputError("no trace of the day; give --requests FILE (arrival_s,input_len,output_len)")
    if options.ttft is None and options.tpot is None:
        raise InputError("no targets, so one unit is always enough; give --ttft TIME, --tpot TIME or both")
    question = read(options)
    problem = refusal(question.graph, question.cluster, question.serving, question.engine)
    if problem is not None:
        raise InputError(problem)
    # One price for all bins: what an iteration takes is no matter of who asks for it.
    price = IterationPrice(question.graph, question.cluster, question.serving, question.engine, question.side_models)

    def play(load: Load) -> Forecast:
        return serve(
            question.graph,
            question.cluster,
            question.serving,
            question.engine,
            load,
            question.target,
            question.side_models,
            price=price,
        )

    bin_s = quantity("--bin", parse_seconds, options.bin)
    if bin_s <= 0:
        raise InputError(f"--bin {options.bin}: a bin of {bin_s:g} s is none; give a time, as in 10min")
    last = question.load.requests[-1].arrival_s
    progress = Progress("bins played:", max(1, int(last / bin_s) + 1))
    bins: list[Bin] = []
    for one in needs(question.load, play, bin_s=bin_s, share=options.share, most=options.most):
        bins.append(one)
        progress.show(len(bins))
    progress.end()
    most = max(one.units for one in bins)
    if options.output is not None:
        # A load is read as shares over time, of which one is no curve.
        if len(bins) < 2:
            raise InputError(
                f"the trace is of {show_seconds(last)} and a bin of {show_seconds(bin_s)}: a load needs two bins or "
                f"more; give a shorter --bin"
            )
        rows = "".join(f"{one.start_s:g},{one.units / most:.6g}\n" for one in bins)
        save_text(f"bin_start_s,relative_load\n{rows}", options.output)
    if options.json:
        print_json(_mapping(question, bins))
        return 0
    print_lines(_text(question, bins, options))
    return 0


def _text(question: ServingQuestion, bins: list[Bin], options: ServiceOptions) -> list[str]:
    devices = question.serving.devices
    most, mean = max(one.units for one in bins), sum(one.units for one in bins) / len(bins)
    shown = (
        bins if len(bins) <= SHOWN else sorted(sorted(bins, key=lambda b: -b.units)[:SHOWN], key=lambda b: b.start_s)
    )
    rows = [
        (
            show_seconds(one.start_s),
            f"{one.requests:,}",
            f"{one.units:,}",
            "-" if one.forecast is None else show_seconds(one.forecast.ttft.p99),
            "-" if one.forecast is None else show_seconds(one.forecast.tpot.p99),
            "-" if one.forecast is None or one.forecast.goodput is None else f"{percent(one.forecast.goodput)} %",
        )
        for one in shown
    ]
    names = ("from", "requests", "units", "TTFT p99", "TPOT p99", "within targets")
    lines = [
        f"{question.graph.name} by {question.engine.name}, units of {devices} device{'s' * (devices > 1)} "
        f"({options.on})",
        "",
    ]
    lines += table(tuple(Column(name=name) for name in names), rows)
    if len(bins) > SHOWN:
        lines += wrapped(f"of {len(bins):,} bins those with the most units; --json has all", indent="")
    lines += ["", *wrapped(
        f"{most:,} units at most, {number(mean)} on average: {percent(1 - mean / most)} % of {most * devices:,} "
        f"devices can be lent to training",
        indent="",
    )]  # fmt: skip
    if options.output is not None:
        lines += [
            "",
            f"written to {options.output}: gnomon fleet replay JOBS --inference CLUSTER --demand {options.output}",
        ]
    shown_lines = (*question.assumed, "what waits at the end of a bin is not carried into the next")
    return [*lines, "", "assumed", *(line for text in shown_lines for line in wrapped(text, bullet="- "))]


SHOWN = 24
"""Bins that are printed."""


def _mapping(question: ServingQuestion, bins: list[Bin]) -> dict[str, object]:
    return {
        "schema": "gnomon.fleet-service/1",
        "devices_per_unit": question.serving.devices,
        "bins": [
            {
                "start_s": one.start_s,
                "requests": one.requests,
                "units": one.units,
                "ttft_s": None if one.forecast is None else one.forecast.ttft.to_mapping(),
                "tpot_s": None if one.forecast is None else one.forecast.tpot.to_mapping(),
                "goodput": None if one.forecast is None else one.forecast.goodput,
            }
            for one in bins
        ],
        "units": max(one.units for one in bins),
        "assumptions": list(question.assumed),
    }


def run_slices(options: SlicesOptions) -> int:
    """Cut lengths and devices, print."""
    _refuse(options, ("slo", "buckets"), ALONE)
    if options.requests is None:
        raise InputError("no prompts; give a trace with --requests FILE (arrival_s,input_len,output_len)")
    slo = quantity("--slo", parse_seconds, options.slo)
    question = read(replace(options, tp=1, replicas=1))
    lengths = [request.input_len for request in question.load.requests]
    span = question.load.requests[-1].arrival_s
    if question.load.concurrency is not None or span <= 0:
        raise InputError("the trace has no times, so no rate; give one with times of arrival, or --rate")
    # So many arrivals have one gap less between them.
    rate = (len(lengths) - 1) / span
    ends = buckets(lengths, options.buckets)
    names = {end: f"to {end}" for end in ends}
    counts = Counter(next(end for end in ends if length <= end) for length in lengths)
    demand = {names[end]: rate * counts[end] / len(lengths) for end in ends}
    points: dict[str, list[BatchPoint]] = {}
    progress = Progress("buckets priced:", len(ends))
    for done, end in enumerate(ends):
        progress.show(done)
        points[names[end]] = list(
            slice_points(question.graph, question.cluster, question.serving, question.engine, end)
        )
    progress.end()
    cut = cover(demand, points, slo)
    # The profile 7g is a device that is not cut.
    whole = cover(demand, {name: [p for p in of if p.profile == "7g"] for name, of in points.items()}, slo)
    cuts = len(cut)
    if len(whole) < len(cut):
        cut = whole
    padded = sum(end * counts[end] for end in ends) / sum(lengths) - 1
    if options.json:
        print_json(
            {
                "schema": "gnomon.fleet-slices/1",
                "buckets": [{"to": end, "rate_per_s": demand[names[end]]} for end in ends],
                "padding": padded,
                "devices": [[_slice(bucket, point) for bucket, point in device] for device in cut],
                "cut_devices": cuts,
                "whole_devices": len(whole),
                "assumptions": list(question.assumed),
            }
        )  # fmt: skip
        return 0
    rows = []
    for end in ends:
        chosen = Counter(f"{p.profile} x {p.batch}" for device in cut for bucket, p in device if bucket == names[end])
        slowest = max(p.latency_s for device in cut for bucket, p in device if bucket == names[end])
        count_text = ", ".join(f"{count} of {what}" for what, count in sorted(chosen.items()))
        rows.append((names[end], number(demand[names[end]]), count_text, show_seconds(slowest)))
    columns = (
        Column(name="prompts", align="left"),
        Column(name="a second"),
        Column(name="slices x batch", align="left"),
        Column(name="latency"),
    )
    lines = [
        f"{question.graph.name} on slices of {options.on}, {number(rate)} prompts a second within {options.slo}",
        "",
    ]
    lines += table(columns, rows)
    lines += ["", *wrapped(
        f"{cuts} devices cut into slices, {len(whole)} as they are: the fewer are shown. {percent(padded)} % of the "
        f"tokens are padding",
        indent="",
    )]  # fmt: skip
    for index, device in enumerate(cut[:8]):
        lines += wrapped(f"device {index}: {', '.join(p.profile for _, p in device)}", indent="")
    shown = (
        *question.assumed,
        "a slice has its share of compute, bandwidth and memory, and the efficiencies of the whole device",
        "a prompt waits while its batch fills: twice the time of a batch at most",
    )
    print_lines([*lines, "", "assumed", *(line for text in shown for line in wrapped(text, bullet="- "))])
    return 0


def _slice(bucket: str, point: BatchPoint) -> dict[str, object]:
    return {
        "bucket": bucket,
        "profile": point.profile,
        "batch": point.batch,
        "per_s": point.per_s,
        "latency_s": point.latency_s,
    }

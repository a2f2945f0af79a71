"""`gnomon predict --serve` and `gnomon plan --serve` of an encoder: latencies of texts of several lengths, by policy.

`predict(options, graph, notes)` prints one policy's, `plan(options, graph, notes)` compares all and writes `-o FILE`
for `gnomon serve --plan`; each returns 0. Leaves out decoders (`predict_serve`, `plan_serve`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gnomon import schema
from gnomon.cli.options.flags import changed_options, flags
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.options.predict import PredictOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster
from gnomon.report.tables import wrapped
from gnomon.serving.dispatch import Policy
from gnomon.serving.encoders import PERCENTILE, EncoderForecast, EncoderPrice, best_policy, forecast
from gnomon.serving.file import ServeFile
from gnomon.serving.layout import Serving
from gnomon.serving.requests import Load
from gnomon.software.engine import Engine, engine
from gnomon.units import show_seconds

LOOKED_AT = frozenset(
    "serve engine input_len rate requests num_requests burst spread concurrency max_model_len weights replicas pad_to "
    "every_bucket".split()
)
"""Options of serving that a question about an encoder looks at."""
SHOWN = 8
"""Policies of a plan's table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _EncoderRequest:
    graph: Graph
    cluster: Cluster
    engine: Engine
    load: Load
    price: EncoderPrice
    workers: int
    longest: int
    weights: str
    assumed: tuple[str, ...]


def _read(options: PredictOptions | PlanOptions, graph: Graph, load: Load, notes: Sequence[str]) -> _EncoderRequest:
    """Reads the question from the options. load: the texts that come in, whose answers are of one token."""
    for name in changed_options(options):
        if name in flags(ServeOptions) and name not in LOOKED_AT:
            raise InputError(
                f"--{name.replace('_', '-')} is of decoders, and {graph.name} is an encoder, whose texts are answered "
                "whole; leave it out"
            )
    if options.on is None:
        raise InputError("no machines; give --on CLUSTER, as in 1xh100-sxm")
    cluster, assumed = parse_cluster(options.on), list(notes)
    record = engine(options.engine or "gnomon")
    if options.engine is None:
        assumed.append("engine not given: gnomon (--engine)")
    workers = options.replicas or cluster.num_devices
    if workers > cluster.num_devices and "cpu" not in record.devices:
        raise InputError(
            f"{workers} replicas are more than the {cluster.num_devices} devices of {cluster.name}; lower --replicas"
        )
    if options.replicas is None:
        assumed.append(f"replicas not given: {workers}, one a device (--replicas)")
    weights = options.weights
    if weights is None:
        weights = "bf16" if cluster.devices[0].dense_peak.bf16 is not None else "fp32"
    table = [
        a.size
        for block in graph.blocks
        for tensor in block.parameters
        for a in tensor.atoms
        if a.name in ("positions", "max_positions") and a.size
    ]
    longest = options.max_model_len or min(table, default=max(one.input_len for one in load.requests))
    if table and longest > min(table):
        raise InputError(f"--max-model-len {longest} is above the {min(table)} places of {graph.name}; lower it")
    price = EncoderPrice(graph, cluster, record, weights)
    return _EncoderRequest(
        graph=graph, cluster=cluster, engine=record, load=load, price=price, workers=workers, longest=longest,
        weights=weights, assumed=(*assumed, *price.assumed),
    )  # fmt: skip


def _title(request: _EncoderRequest) -> str:
    how = f"{len(request.load.requests):,} texts" + (
        f", {request.load.concurrency} at a time" if request.load.concurrency else ""
    )
    return (
        f"{request.graph.name} served by {request.engine.name} {request.engine.version} on {request.cluster.name} "
        f"({request.workers} workers, {request.weights} weights): {how}"
    )


def predict(options: PredictOptions, graph: Graph, load: Load, notes: Sequence[str]) -> int:
    """Predicts and prints the latencies of one policy."""
    request = _read(options, graph, load, notes)
    policy = Policy(
        workers=request.workers, longest=request.longest, lengths=options.pad_to, every=options.every_bucket
    )  # fmt: skip
    found = forecast(request.load, policy, request.price.seconds)
    if options.json:
        print_json({**found.to_mapping(), "assumptions": list(request.assumed)})
    else:
        print_lines(_text(request, found))
    return 0


def _text(request: _EncoderRequest, found: EncoderForecast) -> Iterator[str]:
    texts = found.texts
    yield _title(request)
    yield ""
    yield f"  lengths    {found.policy.name}"
    if len(found.policy.lengths) > 1 and not found.policy.every:
        yield f"  workers    {', '.join(map(str, texts.runtimes))} at the end"
    at = "  ".join(f"p{p} {show_seconds(texts.percentile(p))}" for p in (50, 90, 98, 99))
    yield f"  latency    {at}  mean {show_seconds(float(texts.latency_s.mean()))}"
    rate, tokens = len(texts.length) / found.span_s, texts.length.sum() / found.span_s
    yield f"  throughput {rate:,.1f} texts/s, {tokens:,.0f} tokens/s"
    yield f"  busy       {found.utilisation:.0%} of the workers' time, {texts.padding:.0%} of the tokens padding"
    if texts.demoted:
        yield f"  demoted    {texts.demoted:,} texts to a longer runtime than their own"
    yield ""
    yield "assumed"
    for note in request.assumed:
        yield from wrapped(note, bullet="- ")


def plan(options: PlanOptions, graph: Graph, load: Load, notes: Sequence[str]) -> int:
    """All policies, the best first."""
    if options.pad_to or options.every_bucket:
        raise InputError("--pad-to is what gnomon plan --serve chooses; leave it out, or use gnomon predict --serve")
    request = _read(options, graph, load, notes)
    found = best_policy(request.load, request.workers, request.longest, request.price.seconds)
    if options.json:
        print_json({"best": found[0].to_mapping(), "tried": [one.to_mapping() for one in found]})
    else:
        print_lines(_table(request, found))
    if options.output is not None:
        serving = Serving(
            tp=1, pp=1, dp=1, ep=1, replicas=request.workers, weights=request.weights, kv="bf16",
            max_model_len=request.longest,
        )  # fmt: skip
        file = ServeFile.of(options.model or "", request.cluster.name, serving, request.engine)
        chosen = found[0].policy
        schema.save_file(
            replace(file, buckets=chosen.lengths, every_bucket=chosen.every, patience=chosen.patience), options.output
        )
        if not options.json:
            print_lines(["", f"written: {options.output}"])
    return 0


def _table(request: _EncoderRequest, found: Sequence[EncoderForecast]) -> Iterator[str]:
    yield _title(request)
    yield ""
    yield f"  {'p50':>9}{'p98':>10}{'mean':>10}{'busy':>6}{'padding':>9}{'patience':>10}  lengths"
    shown = [*found[:SHOWN], *(one for one in found[SHOWN:] if len(one.policy.lengths) < 2)]
    for one in shown:
        texts, several = one.texts, len(one.policy.lengths) > 1 and not one.policy.every
        yield (
            f"  {show_seconds(texts.percentile(50)):>9}{show_seconds(texts.percentile(PERCENTILE)):>10}"
            f"{show_seconds(float(texts.latency_s.mean())):>10}{one.utilisation:>6.0%}{texts.padding:>9.0%}"
            f"{one.policy.patience if several else '':>10}  {one.policy.name}"
        )
    yield f"  {len(found)} policies played, the least p{PERCENTILE} first"
    yield ""
    yield "assumed"
    for note in request.assumed:
        yield from wrapped(note, bullet="- ")

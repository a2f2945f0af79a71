"""`gnomon predict MODEL --serve`: an inference server's latencies, throughput and memory, before it is rented.

`run(options)` prints and returns 0; 1 if the engine would refuse to start, with what would. Options of training beside
`--serve` are errors. Leaves out training (`predict`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from gnomon import schema
from gnomon.cli import serve_encoders
from gnomon.cli.jobs import pasted
from gnomon.cli.models import read_model
from gnomon.cli.options.flags import changed_options
from gnomon.cli.options.fleet import ServiceOptions, SlicesOptions
from gnomon.cli.options.job import PASTED
from gnomon.cli.options.plan import ExplainOptions, PlanOptions
from gnomon.cli.options.predict import PredictOptions
from gnomon.cli.request import named_router
from gnomon.cli.terminal import print_json, print_lines
from gnomon.cli.values import quantity
from gnomon.errors import InputError
from gnomon.formats.engines import read_command
from gnomon.formats.expert_paths import is_paths, paths_of
from gnomon.formats.given import parse_settings
from gnomon.formats.huggingface.quantised import served_format
from gnomon.formats.job import read_source
from gnomon.formats.keys import read_json
from gnomon.graph import Graph
from gnomon.hardware import Cluster, parse_cluster, rent
from gnomon.report.replay_page import replay_page
from gnomon.report.serving import compared_text, forecast_text, rows_beside_measured
from gnomon.report.tables import wrapped
from gnomon.request.released import context_of, stored_of
from gnomon.serving.capacity import capacity, changes, most_model_len, most_of, refusal, unable
from gnomon.serving.encoders import reads_whole_texts
from gnomon.serving.forecast import Disaggregated, Forecast, Target, serve, serve_pools
from gnomon.serving.foreseen_load import foreseen, words
from gnomon.serving.iteration import SideModels
from gnomon.serving.layout import Draft, Serving
from gnomon.serving.measured import MeasuredLoad
from gnomon.serving.placement import ExpertLoads, loads
from gnomon.serving.requests import Load, at_rate, closed, from_csv, poisson
from gnomon.software.engine import Engine, engine
from gnomon.units import parse_bytes, parse_seconds, show_bytes

ServedOptions = PredictOptions | PlanOptions | ExplainOptions | ServiceOptions | SlicesOptions

REQUESTS_A_CLIENT, MOST_REQUESTS, LEAST_REQUESTS = 10, 4000, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingQuestion:
    """What the options ask for."""

    graph: Graph
    """The model that is served."""
    cluster: Cluster
    """The machines."""
    serving: Serving
    """Layout of the engines."""
    engine: Engine
    """The program that serves, with the limits that were given."""
    load: Load
    """The requests."""
    target: Target | None
    """Limits of times that requests are to meet; None where none was given."""
    side_models: SideModels | None
    """Draft model and encoder of images."""
    pools: Disaggregated | None
    """Engines that compute prompts and that answer; None: each does both."""
    context: int | None
    """Tokens of a prompt and its answer that the model was made for; None: nobody says."""
    measured_load: MeasuredLoad | None
    """What a server took for the same requests, where somebody drove one."""
    assumed: tuple[str, ...]
    """What was not said, and how it was filled in."""


def run(options: PredictOptions) -> int:
    """Predicts the serving figures and prints them."""
    if (encoder := encoder_of(options)) is not None:
        return serve_encoders.predict(options, *encoder)
    question = read(options)
    if (why := unable(question.graph, question.cluster, question.serving, question.engine)) is not None:
        raise InputError(why)  # no limit and no flag would make it start
    problem = refusal(question.graph, question.cluster, question.serving, question.engine)
    if problem is not None:
        return _refused(question, problem, as_json=options.json)
    found = forecast(question)
    if options.page is not None:
        schema.save_text(replay_page(found, titled(question), question.measured_load), options.page)
    if options.json:
        mapping = found.to_mapping()
        mapping["assumptions"] = [*question.assumed, *found.assumed]
        if question.measured_load is not None:
            mapping["measured"] = {
                name: {"measured": measured, "predicted": predicted, "ratio": predicted / measured}
                for name, predicted, measured in rows_beside_measured(found, question.measured_load)
            }
        print_json(mapping)
        return 0
    helps = changes(question.graph, question.cluster, question.serving, question.engine)
    paid = rent(question.cluster)
    # Rent is of the devices that serve, which may be fewer than the cluster has.
    share = found.devices / question.cluster.num_devices
    if question.measured_load is not None:
        print_lines([*compared_text(found, question.measured_load, str(options.requests)), ""])
    print_lines(
        forecast_text(
            found,
            titled(question),
            assumed=(*question.assumed, *question.cluster.assumptions),
            helps=helps,
            rent=None if paid is None else paid.dollars_per_hour * share,
        )
    )
    return 0


def forecast(question: ServingQuestion) -> Forecast:
    """The load replayed on one pool of engines, or on two."""
    if question.pools is None:
        return serve(
            question.graph,
            question.cluster,
            question.serving,
            question.engine,
            question.load,
            question.target,
            question.side_models,
        )
    return serve_pools(
        question.graph,
        question.cluster,
        question.serving,
        question.engine,
        question.pools,
        question.load,
        question.target,
    )


def titled(question: ServingQuestion) -> str:
    """Model, engine, machines, layout and load in a line."""
    s = question.serving
    axes = " ".join(f"{n}={getattr(s, n)}" for n in ("tp", "pp", "dp", "ep", "replicas") if getattr(s, n) > 1)
    how = f"{len(question.load.requests):,} requests"
    how += f", {question.load.concurrency} at a time" if question.load.concurrency else ""
    if question.pools is not None:
        pools = question.pools
        each = axes or "one device"
        axes = f"{pools.prefill_count} engines for prompts, {pools.decode_count} for answers, each {each}"
    return (
        f"{question.graph.name} served by {question.engine.name} {question.engine.version} on {question.cluster.name} "
        f"({axes or 'one device'}, {s.weights} weights, {s.kv} keys): {how}"
    )


def _refused(question: ServingQuestion, problem: str, *, as_json: bool) -> int:
    helps = changes(question.graph, question.cluster, question.serving, question.engine)
    # The three limits are searched one at a time with the others as asked: a way to start that changes one flag.
    most = most_model_len(question.graph, question.cluster, question.serving, question.engine, question.context)
    kv_capacity = capacity(question.graph, question.cluster, question.serving, question.engine)
    seqs = most_of(question.graph, question.cluster, question.serving, question.engine, "max_seqs")
    budget = most_of(question.graph, question.cluster, question.serving, question.engine, "max_batched_tokens")
    if as_json:
        print_json(
            {
                "starts": False,
                "reason": problem,
                "largest_max_model_len": most,
                "largest_max_num_seqs": seqs,
                "largest_max_num_batched_tokens": budget,
                "weights_bytes": kv_capacity.weights_bytes,
                "activation_bytes": kv_capacity.activation_bytes,
                "own_bytes": kv_capacity.own_bytes,
                "kv_bytes": kv_capacity.kv_bytes,
                "helps": [{"change": h.change, "kv_tokens": h.kv_tokens, "concurrency": h.concurrency} for h in helps],
            }
        )
        return 1
    lines = [*wrapped(problem, indent=""), ""]
    lines.append(f"largest max_model_len that starts as it is: {most or 'none'}")
    lines.append(f"largest max_num_seqs that starts as it is: {seqs or 'none'}")
    lines.append(f"largest max_num_batched_tokens that starts as it is: {budget or 'none'}")
    for way in helps:
        lines.append(
            f"  {way.change}: starts, {way.kv_tokens:,} KV tokens, {way.concurrency:.2f} such requests at a time"
        )
    if not helps:
        lines.append(
            f"  no single change helps: {show_bytes(kv_capacity.weights_bytes)} of weights a device; use more devices"
        )
    print_lines(lines)
    return 1


def encoder_of(options: PredictOptions | PlanOptions) -> tuple[Graph, Load, list[str]] | None:
    """(graph, load, notes) of an encoder of texts; None for another model."""
    if options.model is None or isinstance(options, PredictOptions) and options.source is not None:
        return None
    settings = parse_settings(options.settings) if isinstance(options, PredictOptions) else None
    graph, notes = read_model(options.model, settings=settings)
    if not reads_whole_texts(graph):
        if options.pad_to or options.every_bucket:
            raise InputError(f"--pad-to are lengths of an encoder's texts, and {graph.name} is none; leave it out")
        return None
    assumed = list(notes)
    # An encoder answers with one vector. Loads of decoders have lengths of answers, so 1 stands for it.
    whole = options if options.requests is not None else replace(options, output_len=options.output_len or 1)
    load, _ = read_load(whole, assumed)
    return graph, load, assumed


def read(options: ServedOptions) -> ServingQuestion:
    """Reads the question from the options. What nobody gave is assumed, and said."""
    assumed: list[str] = []
    if options.beside is not None:
        raise InputError("--beside is a second kind of device for branches, which gnomon plan --serve alone looks at")
    if options.pad_to or options.every_bucket:
        raise InputError("--pad-to are lengths of an encoder's texts, which gnomon predict --serve alone looks at")
    # Before all else is read: from here on a serve script is the same as options typed by hand.
    options = _from_command(options, assumed)
    if options.model is None:
        raise InputError("no model; give a name (`gnomon catalogue models`) or a config.json")
    if isinstance(options, PredictOptions):
        graph, notes = read_model(options.model, settings=parse_settings(options.settings), strict=options.strict)
    else:
        graph, notes = read_model(options.model)
    assumed += notes
    if options.on is None:
        raise InputError("no machines; give --on CLUSTER, as in 4xh100-sxm")
    cluster = parse_cluster(options.on)
    name = options.engine
    if name is None:
        name = "vllm"
        assumed.append("engine not given: vllm (--engine)")
    record = _engine(engine(name), options, cluster, assumed)
    load, measured = read_load(options, assumed)
    serving = _serving(options, graph, cluster, record, load, assumed)
    context = context_of(options.model)
    _check_context(graph.name, context, serving.max_model_len, is_given=options.max_model_len is not None)
    target = None
    if options.ttft is not None or options.tpot is not None:
        target = Target(
            ttft_s=None if options.ttft is None else quantity("--ttft", parse_seconds, _spaced(options.ttft)),
            tpot_s=None if options.tpot is None else quantity("--tpot", parse_seconds, _spaced(options.tpot)),
        )
    # The tokens of a check come at once, and the time to the next check is shared among them.
    if serving.draft != "none":
        assumed.append(
            f"a check of {serving.draft_tokens} guesses makes {serving.tokens_a_check:.3g} tokens on average; ITL is "
            f"their mean share, and tokens really come in groups"
        )
    side_models = _side_models(options)
    # A picture's patches enter the decoder as tokens of the prompt: KV and prefill are longer by them.
    if side_models is not None and side_models.vision is not None:
        load = replace(
            load,
            requests=tuple(replace(r, input_len=r.input_len + side_models.image_tokens) for r in load.requests),
        )
        # It was taken from the longest request before pictures were counted.
        if options.max_model_len is None:
            serving = replace(serving, max_model_len=load.longest)
    return ServingQuestion(
        graph=graph,
        cluster=cluster,
        serving=serving,
        engine=record,
        load=load,
        target=target,
        side_models=side_models,
        pools=_pools(options, serving),
        measured_load=measured,
        context=context,
        assumed=tuple(assumed),
    )


def _check_context(model: str, context: int | None, longest: int, *, is_given: bool) -> None:
    """InputError for more tokens than a model was made for."""
    # vLLM and SGLang both refuse a max_model_len above the one that a config derives, unless an environment variable
    # allows it.
    if context is not None and longest > context:
        what = f"--max-model-len {longest}" if is_given else f"a request of {longest} tokens (prompt and answer)"
        raise InputError(
            f"{what} is longer than the {context} tokens that {model} was made for (max_position_embeddings), where "
            f"engines refuse to start; shorten it, or give a config.json with rope_scaling"
        )


def _side_models(options: ServedOptions) -> SideModels | None:
    """The draft model and the encoder that options name."""
    if (options.vision is None) != (options.image_tokens is None):
        raise InputError("--vision names the encoder and --image-tokens its patches: give both or neither")
    # Heads of the model itself, and guesses from the prompt, need no second model.
    named = options.draft if options.draft not in (None, "mtp", "ngram") else None
    if named is None and options.vision is None:
        return None
    if options.pools is not None:
        raise InputError("--pools with --vision or a draft model is not predicted; leave one out")
    return SideModels(
        draft=None if named is None else read_model(named)[0],
        vision=None if options.vision is None else read_model(options.vision)[0],
        image_tokens=options.image_tokens or 0,
    )


def _pools(options: ServedOptions, serving: Serving) -> Disaggregated | None:
    """Reads the pools of `--pools 1:3`; None without it."""
    if options.pools is None:
        return None
    first, colon, last = options.pools.partition(":")
    if not colon or not first.isdigit() or not last.isdigit() or "0" in (first, last):
        raise InputError(
            f"--pools {options.pools[:40]!r}: write how many engines compute prompts and how many answer, as in 1:3"
        )
    return Disaggregated(
        # A pool that computes prompts makes one token of each: there is nothing to guess ahead.
        prefill=replace(serving, draft="none", draft_tokens=0, acceptance=0.0),
        prefill_count=int(first),
        decode_count=int(last),
    )


def _from_command(options: ServedOptions, assumed: list[str]) -> ServedOptions:
    """The options with those of `--from vllm serve.sh`; what is given with it goes before."""
    if not isinstance(options, PredictOptions) or options.source is None:
        return options
    program, path = options.source
    source = pasted() if path == PASTED else Path(path)
    command = read_command(read_source(source)[0], program, options.on or "", options.acceptance or 0.0)
    file = command.file
    fields: dict[str, Any] = {
        "model": file.model,
        "engine": file.engine,
        "replicas": file.serving.replicas if file.serving.replicas > 1 else None,
        "pools": f"{file.prefill_count}:{file.decode_count}" if file.prefill_count else None,
        "tp": file.serving.tp,
        "pp": file.serving.pp,
        "dp": file.serving.dp,
        "ep": file.serving.ep,
        "kv": file.serving.kv,
        "weights": file.serving.weights if "weights" in command.fields_set else None,
        "draft": None if file.serving.draft == "none" else command.draft or file.serving.draft,
        "draft_tokens": file.serving.draft_tokens or None,
        "lora_rank": file.serving.lora_rank or None,
        "lora_slots": file.serving.lora_slots or None,
        "max_model_len": file.serving.max_model_len
        if "max_model_len" in command.fields_set
        else context_of(file.model),
        "max_num_seqs": file.max_seqs,
        "max_num_batched_tokens": file.max_batched_tokens,
        "memory_fraction": file.memory_fraction,
    }
    # What was typed beside the file wins, even where it was typed as the default.
    changed = changed_options(options)
    assumed += [f"{path}: not read: {what}" for what in command.unread]
    if "max_model_len" not in command.fields_set and fields["max_model_len"] is not None:
        assumed.append(f"{path} does not say max_model_len: {fields['max_model_len']}, as {file.model} was made for")
    return replace(options, **{name: value for name, value in fields.items() if name not in changed})


def _spaced(text: str) -> str:
    """`500ms` as `500 ms`, as quantities are written."""
    # Durations of servers' flags are written without a space; `parse_seconds` is strict about one.
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    return f"{digits} {text[len(digits) :].strip()}"


def _engine(record: Engine, options: ServedOptions, cluster: Cluster, assumed: list[str]) -> Engine:
    """The record with the user's limits; on smaller devices with the engine's smaller defaults."""
    # Engines choose other defaults by device: vLLM's server takes 8,192 batched tokens and 1,024 sequences on GPUs of
    # 70 GiB and more, but 2,048 and 256 on others and on A100s (arg_utils.py, get_batch_defaults).
    if (own := record.smaller(cluster.devices)) is not None:
        if options.max_num_seqs is None and own.max_seqs < record.max_seqs:
            record = replace(record, max_seqs=own.max_seqs)
            assumed.append(f"max_num_seqs {own.max_seqs}: as {record.name} on {own.words}")
        if options.max_num_batched_tokens is None and own.max_batched_tokens < record.max_batched_tokens:
            record = replace(record, max_batched_tokens=own.max_batched_tokens)
            assumed.append(f"max_num_batched_tokens {own.max_batched_tokens}: as {record.name} on {own.words}")
    fraction = options.memory_fraction
    if options.chunked_prefill is not None:
        record = replace(record, chunked_prefill=options.chunked_prefill == "on")
    return replace(
        record,
        max_seqs=options.max_num_seqs or record.max_seqs,
        max_batched_tokens=options.max_num_batched_tokens or record.max_batched_tokens,
        memory_fraction=record.memory_fraction if fraction is None else fraction,
    )


def read_load(options: ServedOptions, assumed: list[str]) -> tuple[Load, MeasuredLoad | None]:
    """Requests from a trace, or from lengths with a concurrency or a rate; and what a server took for them, where the
    trace is of `gnomon bench-serve -o`."""
    if options.requests is not None and (text := read_source(Path(options.requests))[0]).lstrip().startswith("{"):
        changed = ("input_len", "output_len", "burst", "spread", "concurrency", "rate", "num_requests")
        if extra := [name for name in changed if getattr(options, name) is not None]:
            raise InputError(
                f"{options.requests} has requests that were measured, which are played as they were; leave "
                f"--{extra[0].replace('_', '-')} out"
            )
        measured = MeasuredLoad.read(text, options.requests)
        return measured.load(), measured
    return _load(options, assumed), None


def _load(options: ServedOptions, assumed: list[str]) -> Load:
    """Requests that nobody measured."""
    if options.concurrency is not None and options.rate is not None:
        raise InputError("--concurrency and --rate both say how requests come; use one of them")
    if options.requests is not None:
        extra = [n for n in ("input_len", "output_len", "burst", "spread") if getattr(options, n) is not None]
        if extra:
            raise InputError(f"--{extra[0].replace('_', '-')} and --requests both say what comes in; use one of them")
        text, _ = read_source(Path(options.requests))
        # The trace keeps its own times of arrival unless a rate or a concurrency is asked, which replace them.
        load = from_csv(text, source=str(options.requests), concurrency=options.concurrency)
        if options.num_requests is not None:
            load = replace(load, requests=load.requests[: options.num_requests])
        return load if options.rate is None else at_rate(load, options.rate)
    if options.input_len is None or options.output_len is None:
        raise InputError("what is served is not said; give --input-len and --output-len, or a trace with --requests")
    spread = options.spread or 0.0
    if options.rate is not None:
        count = options.num_requests or 1000
        if options.num_requests is None:
            assumed.append("1000 requests, times between them exponential (--num-requests)")
        return poisson(
            options.input_len, options.output_len, options.rate, count, spread=spread, burst=options.burst or 1
        )
    if options.burst is not None:
        raise InputError("--burst says how many requests come at once; give --rate too")
    # A closed loop has exactly that many requests in flight, as vLLM's --max-concurrency with an infinite rate.
    clients = options.concurrency
    if clients is None:
        clients = 1
        assumed.append("concurrency not given: 1, each request after the one before (--concurrency, --rate)")
    if options.num_requests is not None:
        count = options.num_requests
    else:
        # Enough per client that the start, when all prompts come at once, does not set the mean.
        count = max(LEAST_REQUESTS, clients, min(MOST_REQUESTS, REQUESTS_A_CLIENT * clients))
        who = f"by {clients} clients that all begin at once" if clients > 1 else "one after another"
        assumed.append(f"{count} requests {who} (--num-requests)")
    return closed(options.input_len, options.output_len, clients, count, spread=spread)


def _guesser(options: ServedOptions) -> Draft:
    if options.draft is None:
        return "none"
    return "mtp" if options.draft == "mtp" else "ngram" if options.draft == "ngram" else "model"


def _stored(model: str | None) -> str | None:
    """How the weights of a folder or a config.json are stored; None for a model that says nothing of it."""
    path = Path(model or "")
    # A name of the catalogue is no path: how it is released is looked up by name, in `stored_of`.
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" or not path.is_file():
        return None
    return served_format(read_json(read_source(path)[0], str(path), infinite=True))


def expert_loads(options: ServedOptions, graph: Graph) -> Callable[[int, Engine, list[str]], float]:
    """(ep, engine, notes) -> rows of the busiest of ep devices over the mean by the load of --router, experts where the
    engine has them; which is noted. Even without a load. InputError where there is nothing to place."""
    name = options.router if isinstance(options, (PredictOptions, PlanOptions)) else None
    copies = options.redundant_experts or 0
    experts = next(
        (d.size for b in graph.blocks for op in b.ops if op.does == "multiplies rows"
         for d in b.tensor(op.inputs[1]).dims[:1]), None
    )  # fmt: skip
    if name is None and copies:
        raise InputError("--redundant-experts are placed by a load; give it, as in --router router.npz")
    if name is not None and experts is None:
        raise InputError(f"--router is how tokens spread over experts, and {graph.name} has none; leave it out")
    if name is None or experts is None:
        return lambda ep, rules, assumed: 1.0
    router, many = named_router(name, graph), experts

    @cache
    # A plan asks for every ep that it tries, and placing the experts of all layers is what costs.
    def found(ep: int) -> ExpertLoads:
        return loads(router, many, copies, ep)

    def load(ep: int, rules: Engine, assumed: list[str]) -> float:
        # Said, as --router then changes nothing, which a user would not expect.
        if ep == 1:
            assumed.append(f"--router {name}: with ep 1 every device has all experts, and none is busier")
            return 1.0
        if rules.name == "gnomon" and not copies:
            # `gnomon serve` deals experts out in order (`serve.division`), so that is what it is held against.
            assumed.append(
                f"experts in order, as gnomon serve has them, by {name} on ep {ep}: the busiest device computes "
                f"{found(ep).in_order:.2f} of the mean, and {found(ep).placed:.2f} if they were placed by that load"
            )
            return found(ep).in_order
        with_copies = f"with {copies} copies " if copies else ""
        assumed.append(
            f"experts placed by {name} {with_copies}on ep {ep}: the busiest device computes {found(ep).placed:.2f} of "
            f"the mean, and {found(ep).in_order:.2f} where they are dealt out in order"
        )
        return found(ep).placed

    return load


def with_copies(
    options: ServedOptions, graph: Graph, cluster: Cluster, rules: Engine, serving: Serving, notes: list[str]
) -> Serving:
    """A layout with the copies of foreseen experts that are asked for, and what they make of its load. InputError where
    nothing says what tokens choose, or the engine has none."""
    copies, name = options.expert_copies, getattr(options, "router", None)
    if not copies:
        return serving
    if rules.name != "gnomon":
        raise InputError(f"--expert-copies are gnomon's own, and {rules.name} has none; give --engine gnomon")
    path = Path(name or "").expanduser()
    if path.suffix != ".npz" or not is_paths(path):
        raise InputError(
            "--expert-copies are foreseen from what tokens chose in the layers before: give a record of gnomon serve "
            "--record-experts, as in --router paths.npz"
        )
    laid = replace(serving, expert_copies=copies)
    found = foreseen(paths_of(path, graph), graph, cluster, laid, rules)
    notes.append(words(found, str(name), laid))
    return replace(laid, expert_load=found.load)


def _serving(
    options: ServedOptions, graph: Graph, cluster: Cluster, record: Engine, load: Load, assumed: list[str]
) -> Serving:
    pp, dp = options.pp or 1, options.dp or 1
    tp, replicas = options.tp, options.replicas
    devices = cluster.num_devices
    if options.pools is not None and replicas is None:
        replicas = 1
    if tp is None and options.pools is not None:
        raise InputError("--pools says how many engines there are; give --tp too, the devices of one")
    # Engines default to one device. All of them is what a user who names a cluster means; that it was assumed is
    # printed.
    if tp is None:
        tp = max(1, devices // (pp * dp * (replicas or 1)))
        if tp > 1:
            assumed.append(f"tp not given: {tp}, all devices in one replica (--tp, --replicas)")
    if replicas is None:
        replicas = max(1, devices // (tp * pp * dp))
        if replicas > 1:
            assumed.append(f"replicas not given: {replicas}, as many as there are devices for (--replicas)")
    weights = options.weights
    if weights is None and (weights := _stored(options.model)) is not None:
        assumed.append(f"weights are {weights}, as the model's quantization_config says (--weights)")
    if weights is None and (released := stored_of(options.model)) is not None:
        # GGUF stores MXFP4 in blocks of its own, with the scale in front: the same bits, another kernel.
        weights = "mxfp4-gguf" if released == "mxfp4" and record.kernels.startswith("ggml") else released
        assumed.append(f"weights are {weights}, as {options.model} is released (--weights)")
    if weights is None:
        peak = cluster.devices[0].dense_peak
        weights = "bf16" if peak.bf16 is not None else "fp16" if peak.fp16 is not None else "fp32"
    longest = options.max_model_len
    if longest is None:
        longest = load.longest
        assumed.append(f"max_model_len not given: {longest}, the longest request (--max-model-len)")
    # With data-parallel attention, engines shard experts over all ranks of both, as vLLM's --enable-expert-parallel
    # does.
    ep = options.ep or (tp * dp if dp > 1 else 1)
    expert_load = 1.0
    if not isinstance(options, PlanOptions) and not options.expert_copies:  # a plan chooses ep
        expert_load = expert_loads(options, graph)(ep, record, assumed)
    made = Serving(
        tp=tp,
        pp=pp,
        dp=dp,
        ep=ep,
        redundant_experts=(options.redundant_experts or 0) if ep > 1 else 0,
        expert_load=expert_load,
        replicas=replicas,
        weights=weights,
        kv=options.kv or "bf16",
        max_model_len=longest,
        resident_bytes=(
            None
            if options.stream_weights is None
            else quantity("--stream-weights", parse_bytes, options.stream_weights)
        ),
        draft=_guesser(options),
        draft_tokens=options.draft_tokens or 0,
        acceptance=options.acceptance or 0.0,
        lora_rank=options.lora_rank or 0,
        lora_slots=options.lora_slots or 0,
    )
    if isinstance(options, PlanOptions):  # a plan is made with and without
        return made
    return with_copies(options, graph, cluster, record, made, assumed)

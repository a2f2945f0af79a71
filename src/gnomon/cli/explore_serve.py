"""What the page of `gnomon explore` is told of a server: its replay, changes with which it starts, the best layouts.

`answered`, `helped` and `best` take the form's options and return what the page shows. Leaves out the server of the
page and jobs that train (`cli.explore`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from gnomon.cli.options.explore import FormOptions
from gnomon.cli.options.flags import Options, flags
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.options.predict import PredictOptions
from gnomon.cli.options.serve import ServeOptions
from gnomon.cli.plan_serve import searched
from gnomon.cli.predict_serve import ServingQuestion, forecast, read, titled
from gnomon.hardware import rent
from gnomon.report.replay_page import replay_page
from gnomon.schema import dump
from gnomon.serving.capacity import changes, most_model_len, refusal
from gnomon.serving.file import ServeFile
from gnomon.serving.forecast import Disaggregated, Forecast
from gnomon.serving.layout import Serving
from gnomon.serving.space import PlayedCandidate
from gnomon.software.engine import Engine
from gnomon.units import show_seconds

WAYS = 5
"""Of each that are offered."""
LAYOUT = {"tp": "tp", "pp": "pp", "ep": "ep", "dp": "dp", "replicas": "replicas", "weights": "weights", "kv": "kv"}
"""Field of a `Serving` -> the option that gives it."""
LIMITS = {
    "max_seqs": "max_num_seqs",
    "max_batched_tokens": "max_num_batched_tokens",
    "memory_fraction": "memory_fraction",
}
"""Field of an `Engine` -> the option that gives it."""


def answered(options: FormOptions) -> dict[str, Any]:
    """The form as it is, for the page: what is said first, figures, the replay, the file."""
    question = read(_as(PredictOptions, options))
    file = dump(_file(options, question.serving, question.engine, question.pools))
    problem = refusal(question.graph, question.cluster, question.serving, question.engine)
    if problem is not None:
        longest = most_model_len(question.graph, question.cluster, question.serving, question.engine)
        cards = [["largest max_model_len", f"{longest:,}" if longest else "none", "that starts as it is"]]
        return _shown(question, problem, cards, fits=False, verdict="does not start", page="", file=file)
    found = forecast(question)
    sentence = (
        f"first token after {show_seconds(found.ttft.p50)} (p99 {show_seconds(found.ttft.p99)}), then one each "
        f"{show_seconds(found.tpot.p50)}; {found.output_tokens_per_s:,.0f} output tokens/s"
    )
    verdict, fits = "starts", True
    if found.goodput is not None:
        verdict, fits = f"{found.goodput:.1%} of requests meet the targets", found.goodput > 0.5
    if not found.stable:
        verdict, fits = "the queue grows: requests come faster than they are served", False
    page = replay_page(found, titled(question), question.measured_load)
    return _shown(question, sentence, _cards(question, found), fits=fits, verdict=verdict, page=page, file=file)


def _shown(
    question: ServingQuestion, sentence: str, cards: list[list[str]], *, fits: bool, verdict: str, page: str, file: str
) -> dict[str, Any]:
    title, _, plan_line = titled(question).partition(" served by ")
    return {
        "sentence": sentence,
        "title": title,
        "plan_line": f"served by {plan_line}",
        "cards": cards,
        "fits": fits,
        "verdict": verdict,
        "page": page,
        "plan": file,
        "file": "serve.toml",
    }


def _cards(question: ServingQuestion, found: Forecast) -> list[list[str]]:
    kv_capacity, each = found.capacity, found.output_tokens_per_s / found.devices
    cards = [
        ["TTFT p50", show_seconds(found.ttft.p50), f"p99 {show_seconds(found.ttft.p99)}"],
        ["TPOT p50", show_seconds(found.tpot.p50), f"p99 {show_seconds(found.tpot.p99)}"],
        ["end to end p50", show_seconds(found.e2e.p50), f"p99 {show_seconds(found.e2e.p99)}"],
        ["output tokens/s", f"{found.output_tokens_per_s:,.0f}", f"{each:,.0f} a device"],
        [
            "KV cache",
            f"{kv_capacity.kv_tokens:,} tokens",
            f"{kv_capacity.concurrency:.2f} requests of the longest length",
        ],
    ]
    if found.goodput is not None:
        cards.append(["goodput", f"{found.goodput:.1%}", "of requests meet the targets"])
    paid = rent(question.cluster)
    if paid is not None and found.output_tokens_per_s:
        dollars = paid.dollars_per_hour * found.devices / question.cluster.num_devices
        million = dollars / 3600 / found.output_tokens_per_s * 1e6
        cards.append(["a million output tokens", f"${million:.2f}", f"at ${dollars:.2f} an hour"])
    return cards


def helped(options: FormOptions) -> dict[str, Any]:
    """Changes with which the engine starts or holds more, the most first."""
    question = read(_as(PredictOptions, options))
    ways = []
    for way in changes(question.graph, question.cluster, question.serving, question.engine)[:WAYS]:
        text = f"{way.change}: {way.kv_tokens:,} KV tokens, {way.concurrency:.2f} requests of the longest length"
        ways.append({"text": text, "set": _set(question, way.serving, way.engine)})
    return {"ways": ways}


def best(options: FormOptions) -> dict[str, Any]:
    """The best layouts for the load under the form's targets: most tokens a device, then those of less time a token."""
    free = {name: None for name in ("tp", "pp", "ep", "dp", "replicas", "pools")}
    question, found = searched(_as(PlanOptions, options, free))
    chosen = [] if found.best is None else [found.best]
    ways = []
    for choice in [*chosen, *(one for one in found.front if one not in chosen)][:WAYS]:
        played, candidate = choice.forecast, choice.candidate
        ttft, tpot = show_seconds(played.ttft.p50), show_seconds(played.tpot.p50)
        text = (
            f"{_named(choice)}: {choice.value:,.0f} output tokens/s per device, TTFT {ttft}, TPOT {tpot}"
            f"{'' if choice.meets else ', misses the targets'}"
        )
        pools = candidate.pools
        split = {"--pools": "" if pools is None else f"{pools.prefill_count}:{pools.decode_count}"}
        ways.append({"text": text, "set": {**_set(question, candidate.serving, candidate.engine, whole=True), **split}})
    return {"ways": ways}


def _named(choice: PlayedCandidate) -> str:
    serving, pools = choice.candidate.serving, choice.candidate.pools
    axes = [f"{name}={getattr(serving, name)}" for name in ("tp", "pp", "dp", "ep", "replicas")]
    axes = [axis for axis in axes if not axis.endswith("=1")]
    axes += [] if pools is None else [f"{pools.prefill_count} engines for prompts, {pools.decode_count} for answers"]
    return f"{' '.join(axes) or 'one device'}, {serving.weights} weights, {serving.kv} keys"


def _set(question: ServingQuestion, serving: Serving, engine: Engine, *, whole: bool = False) -> dict[str, str]:
    """Flag -> value, of what differs from what is asked; whole: of every axis and limit."""
    every, out = flags(ServeOptions) | flags(PredictOptions), {}
    for mapping, before, after in ((LAYOUT, question.serving, serving), (LIMITS, question.engine, engine)):
        for name, option in mapping.items():
            value = getattr(after, name)
            if whole or value != getattr(before, name):
                out[every[option].names[0]] = str(value)
    return out


def _as(kind: type[Any], options: Options, instead: Mapping[str, Any] | None = None) -> Any:
    """The same options as those of another command."""
    names: Sequence[str] = [field.name for field in fields(kind)]
    own = {field.name: getattr(options, field.name) for field in fields(options) if field.name in names}
    return kind(**{**own, **(instead or {})})


def _file(options: FormOptions, serving: Serving, engine: Engine, pools: Disaggregated | None) -> ServeFile:
    """What `gnomon serve --plan`, `export` and `predict --plan` read."""
    counts = {} if pools is None else {"prefill_count": pools.prefill_count, "decode_count": pools.decode_count}
    serve_file = ServeFile.of(options.model or "", options.on or "", serving, engine)
    return (
        serve_file
        if not counts
        else ServeFile(**{f.name: getattr(serve_file, f.name) for f in fields(serve_file)} | counts)
    )

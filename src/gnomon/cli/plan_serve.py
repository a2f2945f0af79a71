"""`gnomon plan MODEL --serve`: the layout of an inference server that makes the most tokens under targets.

`run(options)` prints the best, the front of throughput against TPOT and why others are out, writes `-o FILE` and
returns 0; 1 if no candidate meets the targets. Leaves out training (`plan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Literal

from gnomon import schema
from gnomon.cli import plan_duet, serve_encoders
from gnomon.cli.options.plan import PlanOptions
from gnomon.cli.predict_serve import ServingQuestion, encoder_of, expert_loads, read, with_copies
from gnomon.cli.terminal import print_json, print_lines
from gnomon.errors import InputError
from gnomon.hardware import rent
from gnomon.report.tables import wrapped
from gnomon.serving.file import ServeFile
from gnomon.serving.forecast import Target
from gnomon.serving.layout import Serving
from gnomon.serving.space import BestServing, PlayedCandidate, best, fewest, space
from gnomon.software.engine import Engine
from gnomon.units import show_seconds

FORMATS: tuple[Literal["weights", "kv"], ...] = ("weights", "kv")
"""What is open unless it is given."""


def run(options: PlanOptions) -> int:
    """Searches for serving plans and prints them."""
    if options.beside is not None:
        return plan_duet.run(options)
    if (encoder := encoder_of(options)) is not None:
        return serve_encoders.plan(options, *encoder)
    question, found = searched(options)
    if options.json:
        print_json(_mapping(found))
    else:
        print_lines(_text(question, found, options))
    if found.best is not None and options.output is not None:
        chosen = found.best.candidate
        file = ServeFile.of(options.model, question.cluster.name, chosen.serving, chosen.engine)
        if (pools := chosen.pools) is not None:
            file = replace(file, prefill_count=pools.prefill_count, decode_count=pools.decode_count)
        schema.save_file(file, options.output)
    return 0 if found.best is not None else 1


def searched(options: PlanOptions) -> tuple[ServingQuestion, BestServing]:
    """What was asked, and the space searched. InputError for what the search itself chooses."""
    axes = [name for name in ("tp", "pp", "ep", "dp", "replicas") if getattr(options, name) is not None]
    if axes:
        raise InputError(
            f"--{axes[0]} is what gnomon plan --serve chooses; leave it out, or use gnomon predict --serve"
        )
    names = (options.engine or "vllm").split(",")
    question = read(replace(options, engine=names[0]))
    if options.fewest and question.target is None:
        raise InputError("--fewest asks for the fewest devices that meet targets: give --ttft, --tpot or both")
    engines = [question.engine, *(read(replace(options, engine=name)).engine for name in names[1:])]
    experts = any(op.does == "multiplies rows" for block in question.graph.blocks for op in block.ops)
    load_of, notes = expert_loads(options, question.graph), list[str]()

    @cache
    # Cached, so that its note on an ep and an engine is printed once, however many candidates have them. Engines place
    # experts differently.
    def expert_load(ep: int, rules: Engine) -> float:
        try:
            return load_of(ep, rules, notes if ep > 1 else [])
        except InputError as error:  # so many devices cannot have equal numbers of copies
            notes.append(f"ep {ep} is not planned: {error}")
            return float("inf")

    @cache
    def copied(serving: Serving, rules: Engine) -> tuple[Serving, ...]:
        if not options.expert_copies or serving.ep == 1 or serving.dp > 1:
            return ()
        return (with_copies(options, question.graph, question.cluster, rules, serving, notes),)

    candidates = space(
        question.cluster,
        engines,
        question.serving.max_model_len,
        weights=(question.serving.weights,),
        kv=(question.serving.kv,),
        others=[name for name in FORMATS if getattr(options, name) is None],
        max_seqs=(question.engine.max_seqs,) if options.max_num_seqs else (64, 256, question.engine.max_seqs),
        budgets=(question.engine.max_batched_tokens,) if options.max_num_batched_tokens else (2048, 8192),
        experts=experts,
        fewer=options.fewest,
        pools=True,
        resident_bytes=question.serving.resident_bytes,
        redundant_experts=options.redundant_experts or 0,
        expert_load=expert_load,
        copied=copied,
    )
    candidates = tuple(one for one in candidates if one.serving.expert_load < float("inf"))
    question = replace(question, assumed=(*question.assumed, *notes))
    target = question.target or Target(ttft_s=None, tpot_s=None)
    search = fewest if options.fewest else best
    return question, search(question.graph, question.cluster, candidates, question.load, target)


def _row(choice: PlayedCandidate) -> str:
    s, e, f = choice.candidate.serving, choice.candidate.engine, choice.forecast
    axes = " ".join(f"{n}={getattr(s, n)}" for n in ("tp", "pp", "dp", "ep", "replicas") if getattr(s, n) > 1)
    pools = choice.candidate.pools
    if pools is not None:
        axes += f" {pools.prefill_count}P:{pools.decode_count}D"
    formats = f"{s.weights}/{s.kv}"
    return (
        f"  {axes.strip() or '1':22}{e.name:13}{formats:12}{e.max_seqs:>5}{e.max_batched_tokens:>7}"
        f"{show_seconds(f.ttft.p50):>10}{show_seconds(f.tpot.p50):>10}{choice.value:>13,.0f}"
    )


def _text(question: ServingQuestion, found: BestServing, options: PlanOptions) -> Iterator[str]:
    yield (
        f"{question.graph.name} served on {question.cluster.name}: {found.size} candidates, "
        f"{found.played} played, {found.bounded} bounded, {sum(n for _, n in found.refused)} refused"
    )
    yield ""
    yield (
        f"  {'axes':22}{'engine':13}{'weights/kv':12}{'seqs':>5}{'budget':>7}{'TTFT p50':>10}{'TPOT p50':>10}"
        f"{'tokens/s/dev':>13}"
    )
    if found.best is None:
        yield "  no candidate meets the targets; the fastest of each kind are below"
    else:
        yield _row(found.best)
        paid = rent(question.cluster)
        if paid is not None:
            rate = found.best.forecast.output_tokens_per_s
            share = found.best.forecast.devices / question.cluster.num_devices
            # Dollars a second of the devices in use, over tokens a second, for a million tokens.
            cost = paid.dollars_per_hour * share / 3600 / rate * 1e6
            yield f"  {found.best.forecast.devices} devices, ${cost:.2f} a million output tokens"
        yield from _pools_or_not(found)
    yield ""
    of = "front" if not found.unknown else f"front of those played ({found.unknown} others may lie beyond it)"
    yield f"{of}: more tokens a device, or less time a token"
    for choice in found.front:
        yield _row(choice)
    if found.refused:
        yield ""
        yield "not served"
        for reason, count in found.refused[:6]:
            yield from wrapped(f"{count}: {reason}", bullet="- ")
    yield ""
    yield "assumed"
    for note in question.assumed:
        if not note.startswith(("tp not", "replicas not")):
            yield from wrapped(note, bullet="- ")
    if options.output is not None and found.best is not None:
        yield ""
        yield f"written: {options.output}"


def _pools_or_not(found: BestServing) -> Iterator[str]:
    """Whether disaggregation pays here, by the best of either kind that was played."""
    assert found.best is not None
    if not found.best.candidate.engine.disaggregates:
        yield f"  disaggregation: {found.best.candidate.engine.name} does not hand keys from engine to engine"
        return
    split = [c for c in found.front if c.candidate.pools is not None]
    if found.best.candidate.pools is not None:
        yield "  disaggregation pays: prompts would slow decodes down by more than the devices set apart for them"
    elif split:
        best = max(split, key=lambda choice: choice.value)
        longer = best.forecast.ttft.p50 / found.best.forecast.ttft.p50
        yield (
            f"  disaggregation gives {show_seconds(best.forecast.tpot.p50)} a token, "
            f"{best.value / found.best.value:.0%} of the tokens and {longer:.2g} times the TTFT"
        )
    else:
        yield "  disaggregation does not pay: none that was played gives more tokens or less time a token"


def _mapping(found: BestServing) -> dict[str, object]:
    def one(choice: PlayedCandidate) -> dict[str, object]:
        forecast_mapping = choice.forecast.to_mapping()
        del forecast_mapping["over_time"]
        record = choice.candidate.engine
        return {
            "max_num_seqs": record.max_seqs,
            "max_num_batched_tokens": record.max_batched_tokens,
            "meets": choice.meets,
            **forecast_mapping,
        }

    return {
        "candidates": found.size,
        "played": found.played,
        "bounded": found.bounded,
        "front_unknown": found.unknown,
        "refused": dict(found.refused),
        "best": None if found.best is None else one(found.best),
        "front": [one(choice) for choice in found.front],
    }

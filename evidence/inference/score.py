"""Published runs of inference predicted and scored by family.

`scores(row)` yields the figures of a row, `tallied(rows)` those of a table by family. A row is
read by `rows`; what its tables do not know is counted as not answered, with the reason. Beside a prediction stands a
derated roofline: 0.75 of the bandwidth, half of the FLOP/s, 0.8 ms a step.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from evidence.inference.rows import Asked, read
from gnomon.errors import GnomonError, InputError
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.prices.decoding import Ggml, touched_experts
from gnomon.serving.capacity import capacity
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.pools import EnginePool, decoding, replay_pools
from gnomon.serving.replay import PlayedLoad, replay
from gnomon.serving.requests import closed
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.software.engine import Engine

Array = NDArray[np.float64]

Without = Callable[[str], Callable[[Asked], Asked]]
"""Source -> what its rows are asked with."""

SPREAD = 0.2
"""Lengths of a closed loop's requests lie from 0.8 of the nominal ones, as the benchmark of most rows draws them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One figure of one row, in seconds (of a token where it is a rate)."""

    family: str
    figure: str
    predicted: float
    roofline: float
    measured: float
    row: str


@cache
def _price(graph: Graph, on: str, serving: Serving, rules: Engine, ggml: Ggml | None) -> tuple[IterationPrice, int]:
    cluster = parse_cluster(on)
    held = capacity(graph, cluster, serving, rules)
    # the run did start: where the memory that is predicted holds less than two requests, it held those
    least = 2 * -(-serving.max_model_len // rules.block_tokens)
    return IterationPrice(graph, cluster, serving, rules, ggml=ggml), max(held.blocks, least * serving.pp)


def _price_of(asked: Asked) -> tuple[IterationPrice, int]:
    return _price(asked.graph, asked.on, asked.serving, asked.engine, asked.ggml)


def _roofline_step(price: IterationPrice, decodes: float, keys: float) -> float:
    """Seconds of an iteration of decodes by a derated roofline."""
    shape, device = price.shape, price.device
    weights = shape.weight_bytes
    for block in shape.blocks:
        if block.experts is not None:
            e = block.experts
            idle = 1 - float(touched_experts(decodes, e.experts, e.topk)) / e.experts
            weights -= idle * e.elements * e.bits / 8 * e.experts * e.local_share * block.count
    kept = sum(a.kv_elements * price.kv_bits / 8 * n for a, n in shape.attentions)
    return (weights + kept * keys) / (0.75 * device.memory_bytes_per_s) + 8e-4


def _alone(asked: Asked) -> tuple[float, float, float, float]:
    """Seconds of prompts and of decodes of one batch from start to end, with the roofline's."""
    price, _ = _price_of(asked)
    batch, inputs, prefix = max(1, round(asked.load)), asked.inputs, asked.prefix
    stages = asked.serving.pp
    budget = asked.ubatch or price.engine.max_batched_tokens
    at_once = max(1, budget // inputs)
    pieces = []
    for first in range(0, batch, at_once):
        group = min(at_once, batch - first)
        for start in range(0, inputs, budget):
            new = min(budget, inputs - start)
            pieces.append(tuple(PromptPiece(i, prefix + start, new, start + new == inputs) for i in range(group)))
    each = [price.batch_ticks(Batch(p, 0, 0, ())) / TICKS_PER_S for p in pieces]
    # pieces follow each other through the stages of a pipeline
    prompt = sum(each) / stages + max(each) * (stages - 1) / stages
    steps = max(asked.outputs - 1, 1)
    decode = price.decode_ticks(batch, batch * (prefix + inputs + 1), steps) / TICKS_PER_S
    flops = 2 * sum(p.n * p.k * p.batch * b.count for b in price.shape.blocks for p in b.matmuls) * batch * inputs
    peak = price.device.dense_peak.bf16 or price.device.dense_peak.fp16 or 1e12
    step = _roofline_step(price, batch, batch * (prefix + inputs + asked.outputs / 2))
    return prompt, decode, flops / (0.5 * peak), step * steps


def _loop(asked: Asked) -> tuple[PlayedLoad, float]:
    """A closed loop played by one group of engines, and the groups that play the like."""
    price, blocks = _price_of(asked)
    dp, pp = asked.serving.dp, asked.serving.pp
    clients = max(1, round(asked.load))
    if asked.pools is None:
        own = max(1, round(clients / dp))
        load = closed(asked.inputs, asked.outputs, own, max(5 * own, 24), spread=SPREAD)
        return replay(load, price, max(1, blocks // pp)), dp
    pools = asked.pools
    rules = decoding(asked.engine)
    decode, decode_blocks = _price(asked.graph, asked.on, asked.serving, rules, asked.ggml)
    prefill, prefill_blocks = _price(asked.graph, asked.on, pools.prefill, asked.engine, asked.ggml)
    bits = sum(a.kv_elements * n for a, n in price.shape.attentions) * price.kv_bits
    link = parse_cluster(asked.on).groups[0].node
    rate = (link.nic.bytes_per_s * link.nics / link.count) if link.nic is not None else 25e9

    def transfer(tokens: int) -> float:
        return 5e-3 + tokens * bits / 8 / rate

    load = closed(asked.inputs, asked.outputs, clients, max(3 * clients, 24), spread=SPREAD)
    played = replay_pools(
        load,
        EnginePool(price=prefill, blocks=max(prefill_blocks, 1), count=pools.prefill_count * pools.prefill.dp),
        EnginePool(price=decode, blocks=max(decode_blocks, 1), count=pools.decode_count * asked.serving.dp),
        transfer,
    )
    return played, 1


def scores(row: Mapping[str, str], told: Callable[[Asked], Asked] = lambda asked: asked) -> Iterator[Score]:
    """Figures of a row. told: other constants than those on record. InputError where it is not known how to ask."""
    asked = told(read(row))

    def score(figure: str, predicted: float, roofline: float, measured: str | float) -> Iterator[Score]:
        if measured and float(measured) > 0:
            yield Score(
                family=row["family"],
                figure=figure,
                predicted=predicted,
                roofline=roofline,
                measured=float(measured),
                row=row["id"],
            )

    metric, value = row["metric"], row["value"]
    second = {row["second_metric"]: row["second_value"], row["third_metric"]: row["third_value"]}
    if asked.mode == "alone":
        batch = max(1, round(asked.load))
        prompt, decode, rough_p, rough_d = _alone(asked)
        steps = max(asked.outputs - 1, 1)
        kind = "batch 1" if batch == 1 else "static batch"
        rate = 1 / float(value) if value and float(value) else 0.0
        if metric == "latency_ms":
            yield from score(f"latency, {kind}", prompt + decode, rough_p + rough_d, float(value) / 1e3)
        elif metric == "tokens_per_s_decode" or (metric == "tokens_per_s_total_output" and asked.inputs == 1):
            yield from score(f"decode, {kind}", decode / (batch * steps), rough_d / (batch * steps), rate)
            prefill = float(second.get("tokens_per_s_prefill") or 0)
            if prefill:
                each = prompt / (batch * asked.inputs)
                yield from score("prefill", each, rough_p / (batch * asked.inputs), 1 / prefill)
        elif metric == "tokens_per_s_total_output":
            made = batch * asked.outputs
            figure = "decode, batch 1" if batch == 1 else "throughput, static batch"
            yield from score(figure, (prompt + decode) / made, (rough_p + rough_d) / made, rate)
        elif metric == "tokens_per_s_prefill":
            made = batch * asked.inputs
            yield from score("prefill", prompt / made, rough_p / made, rate)
        elif metric == "tpot_ms":
            yield from score(f"decode, {kind}", decode / steps, rough_d / steps, float(value) / 1e3)
            if second.get("ttft_ms"):
                yield from score("prefill", prompt, rough_p, float(second["ttft_ms"]) / 1e3)
        elif metric == "ttft_ms":
            yield from score("prefill", prompt, rough_p, float(value) / 1e3)
        else:
            raise InputError(f"metric {metric}")
        return
    price, blocks = _price_of(asked)
    if asked.mode == "loop":
        played, groups = _loop(asked)
        more = played.output_len > 1
        tpot = float(np.median((played.end_s - played.first_s)[more] / (played.output_len[more] - 1)))
        ttft = float(np.median(played.first_s - played.arrival_s))
        clients = max(1.0, asked.load / asked.serving.dp)
        step = _roofline_step(price, clients, clients * (0.9 * asked.inputs + 0.45 * asked.outputs))
        if metric == "tpot_ms":
            yield from score("TPOT", tpot, step, float(value) / 1e3)
        elif metric == "ttft_ms":
            yield from score("TTFT", ttft, step, float(value) / 1e3)
        if second.get("ttft_ms"):
            yield from score("TTFT", ttft, step, float(second["ttft_ms"]) / 1e3)
        rated = second.get("tokens_per_s_per_gpu_total")
        if rated and row["num_devices"]:
            tokens = float((played.input_len + played.output_len).sum())
            rate_each = tokens * groups / played.span_s / asked.devices
            rough = clients * asked.serving.dp * (asked.inputs + asked.outputs) / (asked.outputs * step) / asked.devices
            yield from score("throughput", 1 / rate_each, 1 / rough, 1 / float(rated))
        return
    if asked.mode == "saturated":
        running = max(1, round(asked.load / asked.serving.dp))
        keys = running * (asked.inputs + asked.outputs / 2)
        step = price.decode_ticks(running, round(keys)) / TICKS_PER_S
        yield from score("ITL", step, _roofline_step(price, running, keys), float(value) / 1e3)
        return
    running = max(1, min(price.engine.max_seqs, blocks * price.engine.block_tokens // (asked.inputs + asked.outputs)))
    played = replay(closed(asked.inputs, asked.outputs, 4 * running, 4 * running), price, blocks)
    made = played.output_len.sum() / played.span_s
    step = _roofline_step(price, running, running * (asked.inputs + asked.outputs / 2))
    yield from score("throughput", 1 / made, step / running, 1 / float(value))


def is_table(path: str | Path) -> bool:
    """Whether a file is a table of inference runs, by the columns that only such have."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            return "load_kind" in next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError):
        return False


def _held(ratio: Array, rows: Sequence[str]) -> float:
    """Share of measurements in the 80 % interval of measured over predicted that the other half of the rows gives;
    halves by the digits of their names, so that neighbours are apart."""
    odd = np.array([sum(map(ord, row)) % 2 == 1 for row in rows])
    if min(odd.sum(), (~odd).sum()) < 10:
        return float("nan")
    inside = 0
    for mine, other in ((odd, ~odd), (~odd, odd)):
        low, high = np.quantile(1 / ratio[other], (0.1, 0.9))
        inside += int(((1 / ratio[mine] >= low) & (1 / ratio[mine] <= high)).sum())
    return inside / len(ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Scores of the rows of a table, by family and figure, and what was not answered."""

    found: Mapping[tuple[str, str], Sequence[Score]]
    """(family, figure) -> its scores."""
    asked: Mapping[str, int]
    """Rows of a family, but those flagged."""
    answered: Mapping[str, int]
    """Of those, with a prediction."""
    why: Mapping[str, int]
    """Reasons why the others have none."""


def read_rows(path: str | Path, family: str | None = None, every: int = 1) -> list[dict[str, str]]:
    """Rows of a table. every: of equal-minded rows only each n-th, for a quick look."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = [row for index, row in enumerate(csv.DictReader(file)) if index % every == 0]
    return [row for row in rows if family is None or row["family"] == family]


def tallied(rows: Sequence[Mapping[str, str]], without: Without) -> Tally:
    """Scores of rows. without: source -> constants that rows of it are predicted with."""
    found: dict[tuple[str, str], list[Score]] = defaultdict(list)
    asked, answered, why = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        try:
            made = list(scores(row, without(row["family"])))
        except (GnomonError, ValueError, KeyError) as error:
            reason = str(error)[:60]
            if reason != "flagged":
                asked[row["family"]] += 1
                why[f"{row['family']}: {reason}"] += 1
            continue
        asked[row["family"]] += 1
        answered[row["family"]] += bool(made)
        for score in made:
            found[row["family"], score.figure].append(score)
    return Tally(found=found, asked=asked, answered=answered, why=why)


def _ratios(rows: Sequence[Score]) -> Array:
    """Predicted over measured."""
    return np.array([s.predicted / s.measured for s in rows])


def figure_lines(tally: Tally, held_out: Tally | None) -> Iterator[str]:
    """For each family and figure: median, p90 and bias of errors with the constants on record; with those that its
    source is no part of, the same, and what share of it lies in the interval of the other sources; the roofline."""
    apart = "" if held_out is None else f"{'| left out':>11}{'p90':>9}{'bias':>9}{'in others':>11}"
    yield (
        f"{'family':20}{'figure':24}{'n':>6}{'median':>9}{'p90':>9}{'bias':>9}"
        f"{'p10':>7}{'p90 of m/p':>11}{'in 80 %':>9}{apart}{'roofline':>10}"
    )
    for (name, figure), rows in sorted(tally.found.items()):
        ratio, rough = _ratios(rows), np.array([s.roofline / s.measured for s in rows])
        errors = np.abs(ratio - 1)
        low, high = np.quantile(1 / ratio, (0.1, 0.9))
        line = (
            f"{name:20}{figure:24}{len(rows):6}{np.median(errors):9.1%}{np.quantile(errors, 0.9):9.1%}"
            f"{np.median(ratio) - 1:+9.1%}{low:7.2f}{high:11.2f}{_held(ratio, [s.row for s in rows]):9.0%}"
        )
        if held_out is not None:
            other = _ratios(held_out.found[name, figure])
            off = np.abs(other - 1)
            line += f"{np.median(off):11.1%}{np.quantile(off, 0.9):9.1%}{np.median(other) - 1:+9.1%}"
            line += f"{_in_others(held_out, name, figure):11.0%}"
        yield f"{line}{np.median(np.abs(rough - 1)):10.1%}"


def _in_others(tally: Tally, name: str, figure: str) -> float:
    """Share of a source's measurements in the 80 % interval that those of all other sources give for the figure, each
    source counting alike."""
    others = [1 / _ratios(rows) for (other, what), rows in tally.found.items() if other != name and what == figure]
    if not others:
        return float("nan")
    drawn = np.concatenate([np.quantile(one, np.linspace(0.025, 0.975, 39)) for one in others])
    low, high = np.quantile(drawn, (0.1, 0.9))
    own = 1 / _ratios(tally.found[name, figure])
    return float(((own >= low) & (own <= high)).mean())


def answered_lines(tally: Tally) -> Iterator[str]:
    """What share of rows is answered, and why others are not."""
    yield ""
    for name in sorted(tally.asked):
        yield f"{name:20} answered {tally.answered[name]} of {tally.asked[name]}"
    yield f"{'all':20} answered {sum(tally.answered.values())} of {sum(tally.asked.values())}"
    yield ""
    for reason, count in Counter(tally.why).most_common(25):
        yield f"{count:6} {reason}"

"""`python -m evidence inference RUNS.csv`: published runs of inference, predicted and scored by family.

A row is read into a model, devices, an engine and a load by the tables here; what they do not know is counted as not
answered, with the reason. No fit is run on these rows; engines' host times are estimates made with such runs in view.
Beside it stands a derated roofline: 0.75 of the bandwidth, half of the FLOP/s, 0.8 ms a step.
Leaves out speculative decoding and disaggregated pools, which are not predicted yet.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from gnomon.errors import GnomonError, InputError
from gnomon.hardware import parse_cluster
from gnomon.models.presets import model
from gnomon.prices.decoding import touched_experts
from gnomon.serving.capacity import capacity
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.replay import replay
from gnomon.serving.requests import closed
from gnomon.serving.scheduler import Batch, Piece
from gnomon.software.engine import engine

MODELS: Mapping[str, str] = {
    "llama3-8b": "llama-3.1-8b",
    "llama-7b": "llama-2-7b",
    "llama2-13b": "llama-2-13b",
    "llama2-70b": "llama-2-70b",
    "llama3-70b": "llama-3.1-70b",
    "llama3.1-405b": "llama-3.1-405b",
    "llama3.2-3b": "llama-3.2-3b",
    "mistral-7b": "mistral-7b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "qwen2-7b": "qwen2.5-7b",
    "qwen2-72b": "qwen2.5-72b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-14b": "qwen3-14b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "deepseek-v3": "deepseek-v3",
    "gemma3-4b": "gemma-3-4b",
    "gemma3-12b": "gemma-3-12b",
    "gemma3-27b": "gemma-3-27b",
    "gpt-175b": "gpt3-175b",
}
"""Key of a table of published runs -> preset of the same dims."""

DEVICES: Mapping[str, str] = {
    "a100-sxm-40gb": "a100-sxm-40gb",
    "a100-sxm-80gb": "a100-sxm-80gb",
    "a100-pcie-80gb": "a100-pcie-80gb",
    "h100-sxm-80gb": "h100-sxm-80gb",
    "h100-pcie-80gb": "h100-pcie-80gb",
    "h200-sxm-141gb": "h200-sxm-141gb",
    "gh200-96gb": "gh200-96gb",
    "b200-sxm-180gb": "b200",
    "b300-sxm-288gb": "b300",
    "gb200": "gb200",
    "l40s": "l40s",
    "rtx4090": "rtx4090",
    "rtx3090": "rtx3090",
    "a6000": "a6000",
    "a40": "a40",
    "mi300x": "mi300x",
    "mi250": "mi250",
}
"""Device of the table -> what `--on` takes."""

ENGINES: Mapping[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "tensorrt-llm",
    "trt": "tensorrt-llm",
    "tensorrt-llm": "tensorrt-llm",
    "nvidia tensorrt-llm": "tensorrt-llm",
    "llama.cpp": "llama.cpp",
    "fastertransformer": "tensorrt-llm",
    "gpt-fast": "llama.cpp",
}
"""Engine of the table, lower case -> record that stands for it."""

WEIGHTS: Mapping[str, str] = {
    "fp16": "bf16",
    "float16": "bf16",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f16": "bf16",
    "fp8": "fp8",
    "fp4": "nvfp4",
    "mxfp4": "mxfp4",
    "int8": "int8",
    "int8-wo": "int8-wo",
    "int4-wo": "int4-wo",
    "int4": "int4-wo",
    "q4_k - medium": "q4_k",
    "q8_0": "q8_0",
}
"""Precision of the table, lower case -> format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One figure of one row."""

    family: str
    figure: str
    predicted: float
    roofline: float
    measured: float
    row: str


def _known(table: Mapping[str, str], key: str, what: str) -> str:
    if key.lower() not in table:
        raise InputError(f"{what} not in the tables")
    return table[key.lower()]


@cache
def _price(of: str, on: str, serving: Serving, name: str, cap: int) -> tuple[IterationPrice, int]:
    rules = engine(name)
    if cap:
        rules = replace(rules, max_seqs=cap)
    if name == "llama.cpp":
        rules = replace(rules, max_seqs=max(cap, 64))
    cluster = parse_cluster(on)
    graph = model(of)
    held = capacity(graph, cluster, serving, rules)
    return IterationPrice(graph, cluster, serving, rules), held.blocks


def _number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = row[name].strip()
    if not text:
        if default is None:
            raise InputError(f"no {name}")
        return default
    return round(float(text))


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


def scores(row: Mapping[str, str]) -> Iterator[Score]:
    """Figures of a row. InputError where it is not known how to ask for it."""
    if row["flag"] or row["spec_decode"] not in ("", "none", "none?"):
        raise InputError("flagged or speculative")
    if row["mode"] == "disagg":
        raise InputError("disaggregated")
    of = _known(MODELS, row["model_key"], "model")
    device = _known(DEVICES, row["device"], "device")
    name = _known(ENGINES, row["engine"].strip(), "engine")
    weights = _known(WEIGHTS, row["precision"], "precision")
    if of.startswith("gpt-oss"):
        weights = "mxfp4"
    tp, pp = _number(row, "tp", 1), _number(row, "pp", 1)
    dp, ep = _number(row, "dp", 1), _number(row, "ep", 1)
    count = _number(row, "num_devices", tp * pp * dp)
    if row["family"] == "ml-energy-v3" and ep == count and tp == 1:
        dp = ep
    if name == "llama.cpp" and count > 1:
        raise InputError("layers split over devices")
    if dp > 1 and tp == dp:
        tp = 1
    inputs, outputs = max(1, _number(row, "input_len", 512)), max(1, _number(row, "output_len", 128))
    serving = Serving(
        tp=tp, pp=pp, dp=dp, ep=ep if ep > 1 and tp * dp % ep == 0 else 1, weights=weights,
        kv="fp8" if row["kv_precision"].startswith("fp8") else "bf16", max_model_len=inputs + outputs + 16,
    )  # fmt: skip
    on = f"{max(count, tp * pp * dp)}x{device}"
    kind, load = row["load_kind"], row["load"]
    cap = _number(row, "load", 0) if kind == "max_num_seqs" else 0
    price, blocks = _price(of, on, serving, name, cap)

    def score(figure: str, predicted: float, roofline: float, measured: str) -> Iterator[Score]:
        if measured and float(measured) > 0:
            yield Score(
                family=row["family"],
                figure=figure,
                predicted=predicted,
                roofline=roofline,
                measured=float(measured),
                row=row["id"],
            )

    def static(batch: int) -> tuple[float, float, float, float]:
        """Seconds of prompts and of decodes of one batch from start to end, with the roofline's."""
        budget = price.engine.max_batched_tokens
        at_once = max(1, budget // inputs)
        prompt = 0.0
        for first in range(0, batch, at_once):
            group = min(at_once, batch - first)
            for start in range(0, inputs, budget):
                new = min(budget, inputs - start)
                pieces = tuple(Piece(i, start, new, start + new == inputs) for i in range(group))
                prompt += price.batch_ticks(Batch(pieces, 0, 0, ())) / TICKS_PER_S
        steps = max(outputs - 1, 1)
        decode = price.decode_ticks(batch, batch * (inputs + 1), steps) / TICKS_PER_S
        flops = 2 * sum(p.n * p.k * p.batch * b.count for b in price.shape.blocks for p in b.products) * batch * inputs
        peak = price.device.dense_peak.bf16 or price.device.dense_peak.fp16 or 1e12
        rough = flops / (0.5 * peak)
        each = _roofline_step(price, batch, batch * (inputs + outputs / 2))
        return prompt, decode, rough, each * steps

    metric = row["metric"]
    if row["mode"] in ("single-stream", "static-batch"):
        batch = _number(row, "load", 1)
        prompt, decode, rough_p, rough_d = static(batch)
        steps = max(outputs - 1, 1)
        if metric == "latency_ms":
            yield from score("latency", (prompt + decode) * 1e3, (rough_p + rough_d) * 1e3, row["value"])
        elif metric in ("tokens_per_s_total_output", "tokens_per_s_decode") and row["value"]:
            alone = row["family"] in ("xdai-llamacpp", "gpt-fast", "autoawq")
            spent = decode if alone else prompt + decode
            rough = rough_d if alone else rough_p + rough_d
            made = batch * (steps if alone else outputs)
            figure = "decode, batch 1" if batch == 1 else "batch throughput"
            measured = made / float(row["value"])
            yield from score(figure, spent, rough, str(measured))
        elif metric == "tokens_per_s_prefill" and row["value"]:
            yield from score("prefill", prompt, rough_p, str(batch * inputs / float(row["value"])))
        else:
            raise InputError(f"metric {metric}")
        return
    if kind == "concurrency":
        clients = max(1, round(_number(row, "load") / dp))
        requests = closed(inputs, outputs, clients, max(3 * clients, 24), spread=0.2)
        played = replay(requests, price, max(1, blocks // pp))
        more = played.output_len > 1
        tpot = float(np.median((played.end_s - played.first_s)[more] / (played.output_len[more] - 1)))
        ttft = float(np.median(played.first_s - played.arrival_s))
        step = _roofline_step(price, clients, clients * (0.9 * inputs + 0.45 * outputs))
        if metric == "tpot_ms":
            yield from score("TPOT", tpot * 1e3, step * 1e3, row["value"])
            if row["second_metric"] == "ttft_ms":
                yield from score("TTFT", ttft * 1e3, step * 1e3, row["second_value"])
        if row["third_metric"] == "tokens_per_s_per_gpu_total" and row["third_value"]:
            tokens = float((played.input_len + played.output_len).sum())
            each = tokens * dp / played.span_s / count
            rough = clients * dp * (inputs + outputs) / (outputs * step) / count
            yield from score("seconds a token", 1 / each, 1 / rough, str(1 / float(row["third_value"])))
        return
    if kind == "max_num_seqs" and metric == "itl_ms":
        running = max(1, round(float(row["third_value"]) / dp))
        keys = running * (inputs + outputs / 2)
        step = price.decode_ticks(running, round(keys)) / TICKS_PER_S
        yield from score("ITL", step * 1e3, _roofline_step(price, running, keys) * 1e3, row["value"])
        return
    if kind == "max" and metric == "tokens_per_s_total_output":
        running = max(1, min(price.engine.max_seqs, blocks * price.engine.block_tokens // (inputs + outputs)))
        played = replay(closed(inputs, outputs, 4 * running, 4 * running), price, blocks)
        each = played.output_len.sum() / played.span_s
        step = _roofline_step(price, running, running * (inputs + outputs / 2))
        yield from score("seconds a token", 1 / each, step / running, str(1 / float(row["value"])))
        return
    raise InputError(f"load {kind} {load}, metric {metric}")


def table(path: str | Path, family: str | None = None, every: int = 1) -> tuple[str, ...]:
    """Lines: for each family and figure the number, median and p90 of errors, bias, those of the roofline, and what
    share of rows is answered. every: of equal-minded rows only each n-th, for a quick look."""
    found: dict[tuple[str, str], list[Score]] = defaultdict(list)
    asked, answered, why = Counter[str](), Counter[str](), Counter[str]()
    with Path(path).open(encoding="utf-8", newline="") as file:
        for index, row in enumerate(csv.DictReader(file)):
            if index % every or (family is not None and row["family"] != family):
                continue
            try:
                made = list(scores(row))
            except (GnomonError, ValueError, KeyError) as error:
                reason = str(error)[:60]
                if reason != "flagged or speculative":
                    asked[row["family"]] += 1
                    why[f"{row['family']}: {reason}"] += 1
                continue
            asked[row["family"]] += 1
            answered[row["family"]] += bool(made)
            for score in made:
                found[row["family"], score.figure].append(score)
    lines = [
        f"{'family':20}{'figure':18}{'n':>6}{'median':>9}{'p90':>9}{'bias':>9}{'roofline':>10}"
        f"{'p10':>7}{'p90 of m/p':>11}"
    ]
    for (name, figure), rows in sorted(found.items()):
        ratio = np.array([s.predicted / s.measured for s in rows])
        rough = np.array([s.roofline / s.measured for s in rows])
        errors = np.abs(ratio - 1)
        low, high = np.quantile(1 / ratio, (0.1, 0.9))
        lines.append(
            f"{name:20}{figure:18}{len(rows):6}{np.median(errors):9.1%}{np.quantile(errors, 0.9):9.1%}"
            f"{np.median(ratio) - 1:+9.1%}{np.median(np.abs(rough - 1)):10.1%}{low:7.2f}{high:11.2f}"
        )
    lines.append("")
    for name in sorted(asked):
        lines.append(f"{name:20} answered {answered[name]} of {asked[name]}")
    lines.append("")
    lines += [f"{count:6} {reason}" for reason, count in why.most_common(25)]
    return tuple(lines)

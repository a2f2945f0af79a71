"""A row of a table of published inference runs, read into what a person would have asked.

`read(row)` returns an `Asked` or raises InputError with the reason why it is not known how to ask for it. Leaves out
what is predicted from it (`score`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from evidence.inference import tables
from evidence.inference.models import graph_of
from gnomon.errors import InputError
from gnomon.graph import Graph
from gnomon.hardware import parse_cluster
from gnomon.hardware.catalogue import default_row
from gnomon.prices.decoding import Ggml
from gnomon.serving.layout import Serving
from gnomon.software.engine import Engine

ACCEPTANCE = 0.75
"""Of guesses of an MTP layer, whose rate no table of runs gives; estimated, alike for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Engines of a disaggregated run."""

    prefill: Serving
    prefill_count: int
    decode_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to predict."""

    graph: Graph
    on: str
    serving: Serving
    """Of the decode engines where there are pools."""
    engine: Engine
    pools: Pools | None
    devices: int
    inputs: int
    outputs: int
    prefix: int
    """Tokens that are in the cache before the run."""
    ubatch: int
    """Tokens of a prompt at a time, where the run says so; 0: the engine's."""
    mode: Literal["alone", "loop", "saturated", "queued"]
    """alone: one batch from start to end. loop: clients that wait for their answers. saturated: as many as the server
    runs, the mean batch known. queued: all at once."""
    load: float
    """Batch, clients, or mean batch."""
    ggml: Ggml | None = None
    """Rates of ggml's matmuls in place of those on record."""


def number(row: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A whole number of a row."""
    text = row.get(name, "").strip()
    if not text:
        if default is None:
            raise InputError(f"no {name}")
        return default
    return round(float(text))


def read(row: Mapping[str, str]) -> Asked:
    """What the row asks. InputError with the reason where it cannot be known."""
    if row["flag"]:
        raise InputError("flagged")
    graph = graph_of(row["model_key"], row["model"], row["notes"])
    device, engine, form = (
        tables.device(row["device"]),
        tables.rules(row["engine"], row["family"]),
        _weights(row, graph),
    )
    tp, pp, dp, ep = (number(row, name, 1) for name in ("tp", "pp", "dp", "ep"))
    count = number(row, "num_devices", tp * pp * dp)
    if row["mode"] == "agg" and tp > 16:  # published as the devices of a rack
        tp, dp, ep = 1, 8, 8
    if row["family"] == "ml-energy-v3" and ep == count and tp == 1:
        tp, ep = count, 1  # published as spread over n devices; how attention is split is not said
    if dp > 1 and tp == dp:
        tp = 1
    if engine.kernels == "ggml":  # layers on one device after another
        tp, pp = 1, tp * pp
    experts = any(op.kind == "grouped_linear" for block in graph.blocks for op in block.ops)
    if dp > 1 and not experts:
        tp, dp, ep = tp * dp, 1, 1
    inputs, outputs = number(row, "input_len", 512), number(row, "output_len", 128)
    prefix, ubatch = _depth(row)
    if prefix and inputs > prefix:
        inputs -= prefix  # published as all that is in the cache after
    if engine.kernels == "ggml" and "ulkan" in row["notes"]:
        engine = replace(engine, kernels="ggml-vulkan")
    if row["metric"] == "tokens_per_s_total_output" and row["mode"] == "single-stream" and "llama" in engine.name:
        prefix, inputs = max(prefix, inputs if "@ d" in row["notes"] else 0), 1
    elif row["metric"] == "tokens_per_s_prefill":
        outputs = 1
    serving = Serving(
        tp=tp, pp=pp, dp=dp, ep=ep if experts and ep > 1 and tp * dp % ep == 0 else 1, weights=form,
        kv="fp8" if row["kv_precision"].startswith(("fp8", "int8")) else "bf16",
        max_model_len=max(inputs, 1) + max(outputs, 1) + prefix + 16,
    )  # fmt: skip
    pools = None
    if row["mode"] == "disagg" and (tp > 32 or tp & (tp - 1)):  # published as the devices of both pools
        each = replace(serving, tp=8, pp=1, dp=1, ep=8 if experts else 1)
        serving, pools = each, Pools(prefill=replace(each, tp=4, ep=4 if experts else 1), prefill_count=1,
                                     decode_count=max(1, (tp - 4) // 8))  # fmt: skip
        count = 4 + 8 * pools.decode_count
    elif row["mode"] == "disagg":
        serving, pools = _pools(row, serving, experts)
        count = max(count, pools.prefill.devices * pools.prefill_count + serving.devices * pools.decode_count)
    if "mtp" in row["spec_decode"]:
        guesses = 1 if engine.name == "tensorrt-llm" else 3
        serving = replace(serving, draft="mtp", draft_tokens=guesses, acceptance=ACCEPTANCE)
    elif said := re.search(r"accept ([\d.]+)%", row["spec_decode"]):
        serving = replace(serving, draft="ngram", draft_tokens=4, acceptance=float(said[1]) / 100)
    elif row["spec_decode"] not in ("", "none", "none?"):
        raise InputError(f"drafts by {row['spec_decode'][:30]}")
    mode, load = _load(row)
    engine = _launched(row, engine, load)
    if mode == "saturated":
        engine = replace(engine, max_seqs=max(number(row, "load", 1), 1))
    return Asked(
        graph=graph,
        on=_machines(max(count, serving.devices), device),
        serving=serving,
        engine=engine,
        pools=pools,
        devices=max(count, 1),
        inputs=max(inputs, 1),
        outputs=max(outputs, 1),
        prefix=prefix,
        ubatch=ubatch,
        mode=mode,
        load=load,
    )


def _machines(count: int, device: str) -> str:
    """So many devices in whole nodes as they are usual."""
    node = parse_cluster(device).groups[0].node
    per = default_row(node.device).count
    return f"{count}x{device}" if count <= per else f"{-(-count // per)}x{per}x{device}"


def _weights(row: Mapping[str, str], graph: Graph) -> str:
    form = tables.weights(row["precision"])
    if graph.name.startswith("gpt-oss"):
        return "mxfp4-gguf" if "llama" in row["engine"].lower() and "F16" not in row["precision"] else "mxfp4"
    if row["second_metric"] == "weights_gib" and row["second_value"] and form not in ("bf16",):
        params = float(row["params_b"] or 0) * 1e9
        if params:
            return f"{form}:{float(row['second_value']) * 2**30 * 8 / params:.3f}"
    return form


def _depth(row: Mapping[str, str]) -> tuple[int, int]:
    """(tokens cached before, tokens of a prompt at a time) as notes of llama-bench have them."""
    depth = re.search(r"(?:depth |@ d)(\d+)", row["notes"])
    ubatch = re.search(r"ubatch (\d+)", row["notes"])
    return (int(depth[1]) if depth else 0), (int(ubatch[1]) if ubatch else 0)


def _pools(row: Mapping[str, str], serving: Serving, experts: bool) -> tuple[Serving, Pools]:
    """Engines of both pools as notes have them: `P:1x(tp4,dp1,ep4) D:5x(tp8,dp1,ep8)`, `?x` where it is not said."""
    found = {}
    pattern = r"([PD]):(\d+|\?)x\(tp(\d+),(?:dp(\d+),)?ep(\d+)(?:,dpattn=(\w+))?\)"
    for which, count, tp, dp, ep, attention in re.findall(pattern, row["notes"]):
        ways, groups, experts_ways = int(tp), int(dp or 1), int(ep)
        if attention == "True":
            ways, groups = 1, max(int(tp), experts_ways)
        if not experts:
            ways, groups, experts_ways = ways * groups, 1, 1
        experts_ways = experts_ways if experts_ways > 1 and ways * groups % experts_ways == 0 else 1
        if groups > 1:
            experts_ways = ways * groups
        own = replace(serving, tp=ways, pp=1, dp=groups, ep=experts_ways)
        found[which] = (own, 0 if count == "?" else int(count))
    gpus = re.search(r"gpus P(\d+)\+D(\d+)", row["notes"])
    found = _counted(found, row)
    if set(found) != {"P", "D"}:
        return serving, Pools(prefill=serving, prefill_count=1, decode_count=1)
    (prefill, p), (decode, d) = found["P"], found["D"]
    if gpus:
        for one, have, letter in ((prefill, p, 1), (decode, d, 2)):
            each = int(gpus[letter]) // have
            if one.devices == 1 and each > 1:  # published with axes of one
                if letter == 1:
                    prefill = replace(one, tp=1, dp=each, ep=each) if experts else replace(one, tp=each)
                else:
                    decode = replace(one, tp=1, dp=each, ep=each) if experts else replace(one, tp=each)
    return decode, Pools(prefill=prefill, prefill_count=p, decode_count=d)


def _counted(found: dict[str, tuple[Serving, int]], row: Mapping[str, str]) -> dict[str, tuple[Serving, int]]:
    """Pools whose number of engines is not said get that of runs that say it: the median at so many clients."""
    clients, long = number(row, "load", 1), number(row, "input_len", 1024) >= 4096
    usual = {"P": 5 if long and clients >= 512 else 1, "D": 4 if clients < 256 else 3 if clients < 512 else 1}
    return {which: (own, count or usual[which]) for which, (own, count) in found.items()}


def _launched(row: Mapping[str, str], engine: Engine, load: float) -> Engine:
    """How InferenceX starts its servers where that is not the engine's default (public launch scripts
    show the poll interval; 16 clients and 60 iterations are from memory and fit what is visible):
    SGLang on Blackwell looks for requests every 10 iterations, every 30 from 16 clients on; TensorRT-LLM balances
    attention groups for up to 60 iterations."""
    if row["family"] != "inferencex":
        return engine
    if engine.name == "sglang" and row["device"].startswith(("b200", "b300")) and row["mode"] == "agg":
        return replace(engine, poll_steps=30 if load >= 16 else 10, max_batched_tokens=16384)
    if engine.name == "tensorrt-llm":
        return replace(engine, group_wait_steps=60)
    return engine


def _load(row: Mapping[str, str]) -> tuple[Literal["alone", "loop", "saturated", "queued"], float]:
    kind = row["load_kind"]
    if row["mode"] in ("single-stream", "static-batch"):
        return "alone", number(row, "load", 1)
    if kind == "concurrency":
        return "loop", number(row, "load")
    if kind == "max_num_seqs" and row["third_value"]:
        return "saturated", float(row["third_value"])
    if kind == "max":
        return "queued", 0
    if kind == "" and row["mode"] == "agg":
        raise InputError("load not said")
    raise InputError(f"load {kind}")

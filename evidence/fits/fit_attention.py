"""Fits of fused attention: forwards from tables and charts together, backwards from charts.

`fit_every_attention(DATA_DIR)` returns the rows; `fit_kernels.py` beside it prints and writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from evidence.fits.fitting import (
    BLANK,
    DATE,
    DEVICES,
    NONE,
    Error,
    Range,
    Result,
    Row,
    assumed,
    column,
    fit,
    kept_out,
    provenance,
    read,
    rounded,
)
from gnomon.hardware import catalogue
from gnomon.hardware.types import Device
from gnomon.prices.attention import Heads, attention_model
from gnomon.prices.curves import BEND_WAVES, Array, AttentionCurve, AttentionKernel, Provenance

MEMORY = 0.8
"""Share of bandwidth at which dense attention moves its operands: assumed, because tables of serving kernels add the
paging of keys to it and charts are too coarse to tell."""

WAVES = {"wave_overlap": Range(0.0, 1.0, 0.3)}
"""Where attention without a mask was measured in a table."""
ATTENTION_RANGES = {
    "t0_s": Range(2e-6, 30e-6, 8e-6, log=True),
    "efficiency": Range(0.1, 1.0, 0.6),
    "prologue_s": Range(0.02e-6, 30e-6, 1e-6, log=True),
    "lone_block": Range(0.05, 1.5, 0.8),
    "tail_power": Range(1.0, 20.0, 2.0, log=True),
}

PAGED = {
    "query_passes": Range(0.0, 6.0, 0.5),
    "key_passes": Range(0.0, 10.0, 0.5),
    "token_s": Range(0.01e-9, 10e-9, 1e-9, log=True),
}
"""What serving kernels add: passes over q and out, passes over k and v, and seconds for each token, whatever its heads
(the cache is written by a block of threads for each: vLLM's reshape_and_cache_flash). Fitted along, and left out of the
row."""
UNMASKED = {"lone_block": 0.7, "tail_power": 1.5}
"""Taken for what only charts tell, or tables without a mask."""


@dataclass(frozen=True)
class Part:
    """Measured attentions that are alike."""

    shape: Heads
    seconds: Array
    out: Any
    weight: Array
    paged: bool = False

    def predict(self, row: AttentionCurve, machine: Device, values: dict[str, float]) -> Array:
        seconds = attention_model(self.shape, machine.flops_per_s("bf16"), machine, row)
        if not self.paged:
            return seconds
        a = self.shape
        queries = values["query_passes"] * a.q_len * a.heads
        keys = values["key_passes"] * a.kv_len * a.kv_heads
        passes = 4 * a.batch * a.width * (queries + keys) / machine.memory_bytes_per_s
        return np.asarray(seconds + passes + a.batch * a.q_len * values["token_s"])

    def fitted(self) -> Part:
        """Without the shapes that are kept out."""
        kept = ~self.out
        arrays = {
            f.name: getattr(self.shape, f.name)[kept] for f in fields(Heads) if np.ndim(getattr(self.shape, f.name))
        }
        return replace(
            self,
            shape=replace(self.shape, **arrays),
            seconds=self.seconds[kept],
            out=self.out[kept],
            weight=self.weight[kept],
        )


@dataclass(frozen=True)
class AttentionTable:
    """Measured attention of one device, kernel and class of head sizes."""

    device: str
    """As the tables name it."""
    kernel: AttentionKernel
    """Kind of the row."""
    head_dim: int
    """Class of the row."""
    sizes: tuple[str, ...]
    """Head sizes measured."""
    prefill: str = ""
    """Kernel in the table of causal attention over a paged cache."""
    encoder: str = ""
    """Kernel in the table of attention without a mask."""
    chart: str = ""
    """Implementation in the table of published charts."""
    charted: str = ""
    """Device as the charts name it."""
    block: int = 128
    """Queries of a block: FlashAttention's hopper/tile_size.h; two tiles of 128 side by side in FlashAttention-4
    (flash_attn/cute/flash_fwd_sm100.py)."""


_H100, _A100 = "H100-80GB-SXM5", "A100-80GB-SXM4"
_FA3, _VIT3, _VIT4 = "vllm_flash_attn_fa3", "vllm_vit_flash_attn_fa3", "vllm_vit_flash_attn_fa4"

ATTENTIONS = (
    AttentionTable("h100_sxm", "flash3", 64, ("64",), _FA3, _VIT3, "FA3", _H100, 192),
    AttentionTable("h100_sxm", "flash3", 96, ("72", "80"), "", _VIT3, block=192),
    AttentionTable("h100_sxm", "flash3", 128, ("128",), _FA3, "", "FA3", _H100),
    AttentionTable("h100_sxm", "flash3", 192, ("192",), _FA3),
    AttentionTable("h100_sxm", "flash3", 256, ("256",), _FA3, "", "FA3", _H100),
    *(AttentionTable("h100_sxm", "flash2", d, (str(d),), chart="FA2", charted=_H100) for d in (64, 128, 256)),
    *(AttentionTable("h100_sxm", "cudnn", d, (str(d),), chart="cuDNN", charted=_H100) for d in (64, 128, 256)),
    AttentionTable("a100_sxm", "flash2", 128, ("128",), "vllm_flash_attn", "", "FA2", _A100),
    AttentionTable("l40s", "flash2", 128, ("128",), "vllm_flash_attn"),
    AttentionTable("b200_sxm", "flash3", 64, ("64",), "", _VIT4, block=256),
    AttentionTable("b200_sxm", "flash3", 96, ("72", "80"), "", _VIT4, block=256),
    AttentionTable("b200_sxm", "flash3", 128, ("128",), chart="FA4", charted="B200", block=256),
    *(AttentionTable("b200_sxm", "cudnn", d, (str(d),), "torch_flow") for d in (64, 256)),
)


BAR_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
Bars = dict[bool, tuple[int, ...]]
"""Whether with a causal mask -> TFLOP/s of forward and backward together at BAR_LENGTHS, 16k tokens of 2048 wide."""
TRITON: dict[int, Bars] = {64: {False: (90, 102, 98, 98, 100, 100)}, 128: {False: (78, 85, 90, 93, 95, 95)}}
"""Head size -> bars of "FlashAttention Triton" in assets/flash2_a100_fwd_bwd_benchmark.png of Dao-AILab/flash-attention
4f285b3 (2023-07-17). Those with a mask are of a kernel that works on blocks which the mask empties; llm-foundry's skips
them both ways (flash_attn_triton.py: end_n, begin_m)."""
TRITON_FORWARD = 0.37 / 0.25
"""FLOP/s of its forward over its backward's, on A100 (triton-lang/triton 00693c1, python/test/regression/
test_performance.py, 48 heads of 64, 4096 long)."""
FLASH1: dict[str, dict[int, Bars]] = {
    "a100-sxm-80gb": {
        64: {False: (91, 92, 104, 108, 110, 110), True: (58, 70, 77, 87, 92, 97)},
        128: {False: (76, 72, 76, 80, 82, 83), True: (55, 62, 69, 76, 80, 83)},
    },
    "h100-sxm-80gb": {
        64: {False: (157, 159, 161, 161, 166, 168), True: (104, 123, 136, 138, 149, 156)},
        128: {False: (127, 127, 128, 131, 137, 139), True: (98, 109, 108, 126, 135, 137)},
    },
}
"""Device -> head size -> bars of "FlashAttention" in assets/flash2_{a100,h100}_fwd_bwd_benchmark.png of the same
commit."""
FLASH1_FORWARD = 0.40 / 0.30
"""FLOP/s of its forward over its backward's: 30 to 50 and 25 to 35% of the peak of an A100 (Dao 2023, section 1)."""


def heads(rows: list[Row], causal: bool, width: int) -> Heads:
    batch, length, count = (column(rows, name) for name in ("batch", "seqlen", "heads"))
    keys = column(rows, "kv_heads") if "kv_heads" in rows[0] else count
    pairs = length * length / (2 if causal else 1)
    return Heads(
        batch=batch,
        q_len=length,
        kv_len=length,
        heads=count,
        kv_heads=keys,
        pairs=pairs,
        width=width,
        width_v=width,
        causal=causal,
    )


def table_parts(data: Path, of: AttentionTable) -> list[Part]:
    parts = []
    for causal, table, kernel in (
        (True, "attention_prefill_aiconfigurator", of.prefill),
        (False, "attention_encoder_noncausal_aiconfigurator", of.encoder),
    ):
        for size in of.sizes if kernel else ():
            rows = read(data, table, device=of.device, kernel=kernel, head_dim=size)
            if causal:
                rows = [r for r in rows if r["attn_dtype"] == r["kv_dtype"] == "bf16" and r["window"] == "0"]
            if rows:
                # training's lengths count; short ones are many and mostly floor
                weight = np.where(column(rows, "seqlen") >= 1024, 1.0, 0.3)
                out = kept_out(rows, "batch", "seqlen")
                parts.append(Part(heads(rows, causal, int(size)), column(rows, "time_us") * 1e-6, out, weight, causal))
    return parts


def chart_parts(data: Path, of: AttentionTable, mode: str) -> list[Part]:
    """Points read off charts: none is kept out, and each counts as forty."""
    parts = []
    for causal in ("False", "True"):
        rows = _charted(data, of, mode, causal)
        if rows:
            seconds = column(rows, "time_us") * 1e-6
            none = np.zeros(len(rows), dtype=bool)
            parts.append(Part(heads(rows, causal == "True", of.head_dim), seconds, none, np.full(len(rows), 40.0)))
    return parts


def _charted(data: Path, of: AttentionTable, mode: str, causal: str) -> list[Row]:
    if not of.chart:
        return []
    table = "flash_attention_fwd_bwd_published"
    rows = read(data, table, device=of.charted, mode=mode, causal=causal, head_dim=of.sizes[0])
    return [row for row in rows if row["impl"].startswith(of.chart)]


def attention_row(
    of: AttentionTable, direction: str, values: dict[str, float], message: Provenance = BLANK
) -> AttentionCurve:
    kept: dict[str, Any] = {name: value for name, value in values.items() if name not in PAGED}
    return AttentionCurve(
        kernel=of.kernel,
        direction=direction,  # type: ignore[arg-type]
        head_dim=of.head_dim,
        memory_efficiency=MEMORY,
        provenance=message,
        block=of.block if direction == "forward" else 128,
        **kept,
    )


def fit_parts(
    of: AttentionTable, direction: str, parts: list[Part], ranges: dict[str, Range], fixed: dict[str, float]
) -> tuple[dict[str, float], Callable[[int, bool], Error]]:
    """Constants, and the error on what was kept out (or on all if nothing was) by least and most length."""
    machine = catalogue.device(DEVICES[of.device])

    def predict(values: dict[str, float]) -> list[Array]:
        row = attention_row(of, direction, fixed | values)
        return [part.predict(row, machine, values) for part in parts]

    weight = np.concatenate([part.weight[~part.out] for part in parts])
    measured = np.concatenate([part.seconds[~part.out] for part in parts])

    def weighted(values: dict[str, float]) -> Array:
        made = np.concatenate([p[~part.out] for p, part in zip(predict(values), parts, strict=True)])
        return np.asarray(np.exp(weight / weight.mean() * np.log(made / measured)))

    ranges = ranges | (PAGED if any(part.paged for part in parts) else {})
    values = fixed | rounded(fit(ranges, weighted, np.array(1.0), 500))
    return values, errors_of(of, direction, parts, values)


def errors_of(
    of: AttentionTable, direction: str, parts: list[Part], values: dict[str, float], bend: tuple[float, ...] = ()
) -> Callable[[int, bool], Error]:
    """By least and most length, on what was kept out, or on all if nothing was."""
    machine = catalogue.device(DEVICES[of.device])
    whole = not any(part.out.any() for part in parts)
    row = replace(attention_row(of, direction, values), bend=bend)

    def error(least: int, short: bool) -> Error:
        made, truth = [], []
        for part in parts:
            length = (part.shape.q_len < least) if short else (part.shape.q_len >= least)
            which = length & (part.out if not whole else ~part.out)
            made.append(part.predict(row, machine, values)[which])
            truth.append(part.seconds[which])
        return Error.of(np.concatenate(made), np.concatenate(truth))

    return error


FOLDS = 4
"""Of the fitted lengths and batches, each left out once to see whether a bend pays."""

PAYS = 0.96
"""A bend is kept where it leaves this much of the mean error, at most, on shapes from 1024 on that it was not fitted
to."""


def bend_of(of: AttentionTable, tables: list[Part], values: dict[str, float]) -> tuple[float, ...]:
    """Factors of a row by waves of blocks, from fitted shapes; empty where they do not pay."""
    parts = [part.fitted() for part in tables]
    folds = [np.floor(np.log2(p.shape.q_len) + 3 * np.log2(p.shape.batch)).astype(int) % FOLDS for p in parts]

    long, fold_of = (np.concatenate(fold) for fold in ([p.shape.q_len >= 1024 for p in parts], folds))
    plain, bent = _left(of, parts, values, np.zeros(len(BEND_WAVES)))[0], np.zeros(len(long))
    for fold in range(FOLDS):
        mine = fold_of == fold
        bent[mine] = _left(of, parts, values, _bend(of, parts, values, [which != fold for which in folds]))[0][mine]
    if np.abs(bent[long]).mean() > PAYS * np.abs(plain[long]).mean():
        return ()
    result = _bend(of, parts, values, [np.ones(len(which), bool) for which in folds])
    return tuple(round(float(np.exp(value)), 3) for value in result)


def _bend(of: AttentionTable, parts: list[Part], values: dict[str, float], which: list[Any]) -> Array:
    """Logs of factors, by least squares with one shape more of 0 at each; far shapes count as those at a tenth."""
    bend, chosen = np.zeros(len(BEND_WAVES)), np.concatenate(which)
    for _ in range(8):
        logs, waves, weight = (part[chosen] for part in _left(of, parts, values, bend))
        hats = np.array([np.interp(waves, np.log(BEND_WAVES), hat) for hat in np.eye(len(BEND_WAVES))])
        scaled = hats * weight * np.minimum(1, 0.1 / np.maximum(np.abs(logs), 1e-9))
        bend = bend + np.linalg.solve(scaled @ hats.T + np.eye(len(bend)), scaled @ logs - bend)
    return bend


def _left(of: AttentionTable, parts: list[Part], values: dict[str, float], bend: Array) -> tuple[Array, Array, Array]:
    """(logs of measured over predicted, logs of waves, weights)."""
    machine = catalogue.device(DEVICES[of.device])
    row = replace(attention_row(of, "forward", values), bend=tuple(np.exp(bend)))
    logs = [np.log(part.seconds / part.predict(row, machine, values)) for part in parts]
    waves = [
        np.log(p.shape.batch * p.shape.heads * np.ceil(p.shape.q_len / row.block) / machine.num_sms) for p in parts
    ]
    return np.concatenate(logs), np.concatenate(waves), np.concatenate([part.weight for part in parts])


def fit_attention(data: Path, of: AttentionTable) -> tuple[Result, dict[str, float]]:
    """The row of a forward, from tables and charts together."""
    machine = catalogue.device(DEVICES[of.device])
    tables, charts = table_parts(data, of), chart_parts(data, of, "fwd")
    ranges: dict[str, Range] = ATTENTION_RANGES
    fixed: dict[str, float] = {}
    if not tables:  # a dozen points bear two constants
        fixed = {"t0_s": 8e-6, **UNMASKED}
        ranges = _two(charts, fixed)
    if of.encoder:
        ranges = ranges | WAVES
        if not of.prefill:
            fixed = dict(UNMASKED)
            ranges = {name: where for name, where in ranges.items() if name not in UNMASKED}
    values, error = fit_parts(of, "forward", tables + charts, ranges, fixed)
    bend = bend_of(of, tables, values) if tables else ()
    if bend:
        straight = f"; without a bend {error(1024, False)}"
        error = errors_of(of, "forward", tables + charts, values, bend)
    held, short = error(1024, False), error(1024, True)
    count = sum(len(part.seconds) for part in tables)
    points = sum(len(part.seconds) for part in charts)
    names = " and ".join(name for name in (of.prefill, of.encoder) if name)
    text = f"attention_*_aiconfigurator.csv: {of.device}, {names}, head size {', '.join(of.sizes)}, {count} shapes; "
    text = (text if tables else "") + (f"{of.chart} charts: {points} points" if charts else "")
    source = provenance(text.removesuffix("; "), held, f"length >= 1024; shorter {short.median:.0%} / {short.p90:.0%}")
    if not tables:
        source = replace(source, error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out")
    row = replace(attention_row(of, "forward", values, source), bend=bend)
    name = f"{of.kernel} forward {of.head_dim} {machine.name}" + ("" if tables else " (charts, all fitted)")
    also = f"shorter: {short}" + (straight if bend else "")
    return Result(machine.arch, row, name, "length >= 1024", held, also), values


def _two(parts: list[Part], fixed: dict[str, float]) -> dict[str, Range]:
    """A dozen points bear two constants, two points one."""
    if sum(len(part.seconds) for part in parts) > 3:
        return {name: ATTENTION_RANGES[name] for name in ("efficiency", "prologue_s")}
    fixed["prologue_s"] = 3e-6
    return {"efficiency": ATTENTION_RANGES["efficiency"]}


def fit_backward(data: Path, of: AttentionTable, forward: dict[str, float]) -> Result | None:
    """The row of a backward, from charts: measured alone, or forward and backward together less the forward."""
    machine = catalogue.device(DEVICES[of.device])
    parts = chart_parts(data, of, "bwd")
    both = chart_parts(data, of, "fwd+bwd")
    row = attention_row(of, "forward", forward)
    parts += [
        replace(part, seconds=part.seconds - part.predict(row, machine, forward))
        for part in both
        if part.shape.causal or not parts
    ]
    if not parts:
        return None
    fixed = {"t0_s": 2 * forward["t0_s"], "lone_block": forward["lone_block"], "tail_power": forward["tail_power"]}
    values, error = fit_parts(of, "backward", parts, _two(parts, fixed), fixed)
    held = error(512, False)
    points = sum(len(part.seconds) for part in parts)
    less = ", of both directions less the forward" if both else ""
    source = Provenance(
        data=f"{of.chart} charts on {of.charted}: {points} points of 16k tokens{less}",
        date=DATE,
        error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out",
        range="length 512 to 16k",
    )
    name = f"{of.kernel} backward {of.head_dim} {machine.name} (charts, all fitted)"
    return Result(machine.arch, attention_row(of, "backward", values, source), name, "length 512 to 16k", held)


def fit_every_attention(data: Path) -> list[Result]:
    """Forwards and backwards. A class without a backward borrows the ratio of a neighbour's; A100's 64, measured only
    with both directions together, borrows H100's ratio of 64 to 128 for the forward."""
    collected: list[Result] = []
    for of in ATTENTIONS:
        result, values = fit_attention(data, of)
        collected += [result, *filter(None, [fit_backward(data, of, values)])]
        if of.device == "a100_sxm":
            rows = {(r.row.kernel, r.row.direction, r.row.head_dim): r.row for r in collected if r.arch == "hopper"}  # type: ignore[union-attr]
            ratio = rows["flash2", "forward", 64].efficiency / rows["flash2", "forward", 128].efficiency  # type: ignore[union-attr]
            small = replace(of, head_dim=64, sizes=("64",), prefill="")
            values = rounded(values | {"efficiency": values["efficiency"] * ratio})
            source = assumed(f"the row of 128 times H100's ratio of 64 to 128, {ratio:.2f}")
            row = attention_row(small, "forward", values, source)
            collected.append(Result(result.arch, row, "flash2 forward 64 a100 (assumed)", "-", NONE))
            collected += filter(None, [fit_backward(data, small, values)])
    collected += [_borrowed_backward(r, collected) for r in collected if _lacks_backward(r, collected)]
    return collected + [*_triton(collected), *_flash1(collected)]


def _by_bars(
    result: list[Result], kernel: AttentionKernel, device: str, width: int, bars: Bars, forward: float
) -> list[Result]:
    """Forward and backward of an older kernel: FlashAttention-2's constants at the speed that bars of both directions
    together show. forward: its FLOP/s over the backward's."""
    machine, known = catalogue.device(device), {_key(r): r.row for r in result}
    base = {way: known[machine.arch, "flash2", way, width] for way in ("forward", "backward")}
    lengths = np.array(BAR_LENGTHS, dtype=np.float64)
    count = np.full_like(lengths, 2048 / width)
    shapes = [
        Heads(
            batch=16384 / lengths, q_len=lengths, kv_len=lengths, heads=count, kv_heads=count,
            pairs=lengths**2 / (2 if causal else 1), width=width, width_v=width, causal=causal,
        )
        for causal in bars
    ]  # fmt: skip
    flops = [14 * 2048 * shape.batch * shape.pairs for shape in shapes]
    seconds = np.concatenate(flops) / (np.concatenate([bars[shape.causal] for shape in shapes]) * 1e12)

    def rows(values: dict[str, float]) -> dict[str, AttentionCurve]:
        speed = {"forward": values["efficiency"] * forward, "backward": values["efficiency"]}
        return {
            way: replace(row, kernel=kernel, efficiency=speed[way])
            for way, row in base.items()
            if isinstance(row, AttentionCurve)
        }

    def both(values: dict[str, float]) -> Array:
        peak = machine.flops_per_s("bf16")
        return np.concatenate(
            [sum(attention_model(shape, peak, machine, row) for row in rows(values).values()) for shape in shapes]
        )

    values = rounded(fit({"efficiency": Range(0.1, 1.0, 0.3)}, both, seconds, 500))
    held = Error.of(both(values), seconds)
    masks = "" if len(bars) > 1 else " without a mask"
    source = Provenance(
        data=f"{_BAR_NAMES[kernel]} charts on {machine.name.split('-')[0].upper()}: {len(seconds)} points{masks}, "
        f"forward {forward:.2f} times as fast as backward; else as flash2",
        date=DATE,
        error=f"fit {held.median:.1%} / {held.p90:.1%} (median / p90), nothing held out",
        range="length 512 to 16k",
    )
    made = []
    for way, row in rows(values).items():
        row = replace(row, efficiency=float(f"{row.efficiency:.3g}"), provenance=source)
        name = f"{kernel} {way} {width} {machine.name.split('-')[0]} (charts, all fitted)"
        made.append(Result(machine.arch, row, name, "-", held))
    return made


_BAR_NAMES = {"triton": "FlashAttention Triton", "flash1": "FlashAttention"}


def _flash1(made: list[Result]) -> list[Result]:
    """The first FlashAttention, on A100 and H100."""
    return [
        result
        for device, widths in FLASH1.items()
        for width, bars in widths.items()
        for result in _by_bars(made, "flash1", device, width, bars, FLASH1_FORWARD)
    ]


def _triton(outcome: list[Result]) -> list[Result]:
    """Triton's kernel of 2023: on A100 by its bars; on H100 its share of FlashAttention-2 on A100, as the first
    FlashAttention has (83 of 203 TFLOP/s at 16k, 139 of 338)."""
    known, made = {_key(r): r.row for r in outcome}, []
    for width, bars in TRITON.items():
        for result in _by_bars(outcome, "triton", "a100-sxm-80gb", width, bars, TRITON_FORWARD):
            made.append(result)
            way = _key(result)[2]
            row, near, here = result.row, known["ampere", "flash2", way, width], known["hopper", "flash2", way, width]
            assert isinstance(row, AttentionCurve)
            assert isinstance(near, AttentionCurve) and isinstance(here, AttentionCurve)
            ratio = row.efficiency / near.efficiency
            source = assumed(f"flash2 times A100's ratio of triton to flash2, {ratio:.2f}")
            speed = float(f"{here.efficiency * ratio:.3g}")
            there = replace(here, kernel="triton", efficiency=speed, provenance=source)
            made.append(Result("hopper", there, f"triton {way} {width} hopper (assumed)", "-", NONE))
    return made


def _key(result: Result) -> tuple[str, str, str, int]:
    row = result.row
    assert isinstance(row, AttentionCurve)
    return result.arch, row.kernel, row.direction, row.head_dim


def _lacks_backward(result: Result, made: list[Result]) -> bool:
    arch, kernel, direction, size = _key(result)
    return direction == "forward" and (arch, kernel, "backward", size) not in map(_key, made)


def _borrowed_backward(result: Result, outcome: list[Result]) -> Result:
    """Backward over forward as in the nearest class of the kernel, else of the generation, else FlashAttention-2's on
    A100."""
    arch, kernel, _, size = _key(result)
    known = {_key(r): r.row for r in outcome}
    pairs = [(key, known[*key[:2], "forward", key[3]]) for key in known if key[2] == "backward"]
    pairs = [(key, forward) for key, forward in pairs if (*key[:2], "forward", key[3]) in known]
    near = min(pairs, key=lambda p: (p[0][0] != arch, p[0][1] != kernel, p[0][1] != "flash2", abs(p[0][3] - size)))
    back, row = known[near[0]], result.row
    assert isinstance(back, AttentionCurve) and isinstance(row, AttentionCurve) and isinstance(near[1], AttentionCurve)
    ratio = back.efficiency / near[1].efficiency
    source = assumed(f"{ratio:.2f} of the forward's efficiency, as {near[0][1]} {near[0][3]} on {near[0][0]}")
    made = replace(
        row, direction="backward", block=128, wave_overlap=None, bend=(), t0_s=float(f"{2 * row.t0_s:.3g}"),
        prologue_s=back.prologue_s, efficiency=float(f"{row.efficiency * ratio:.3g}"), provenance=source,
    )  # fmt: skip
    return Result(result.arch, made, f"{kernel} backward {size} {arch} (assumed)", "-", NONE)

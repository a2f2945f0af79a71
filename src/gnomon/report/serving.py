"""A forecast of serving, as text: latencies with their bands, throughput, running batch, memory by what reserves it.

`forecast_text(forecast)` returns lines, `measured_text(measured)` those of a server that was driven. Leaves out pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gnomon.report.tables import wrapped
from gnomon.serving.capacity import Help
from gnomon.serving.forecast import BANDS, Forecast, Situation, Spread
from gnomon.serving.measured import MeasuredLoad
from gnomon.units import show_bytes, show_seconds

BAND_OF: Mapping[Situation, str] = {
    "several": "several at a time",
    "pools": "pools of their own",
    "alone": "one at a time",
    "alone in ggml": "one at a time in ggml",
}
"""What runs a band is of, in words."""


def forecast_text(
    found: Forecast, title: str, *, assumed: Sequence[str] = (), helps: Sequence[Help] = (), rent: float | None = None
) -> Iterator[str]:
    """A forecast of serving as lines of text. rent: dollars an hour of all devices."""
    yield title
    yield ""
    yield f"{'':14}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}   4 of 5 measured p50 lie in"
    rows: tuple[tuple[str, Spread, str], ...] = (
        ("TTFT", found.ttft, "ttft"),
        ("  queue", found.queue, ""),
        ("  prefill", found.prefill, ""),
        ("first decode", found.first_decode, ""),
        ("TPOT", found.tpot, "tpot"),
        ("ITL", found.itl, ""),
        ("end to end", found.e2e, "e2e"),
    )
    for name, spread, band in rows:
        cells = "".join(f"{show_seconds(value):>10}" for value in (spread.p50, spread.p90, spread.p99, spread.mean))
        spread_text = ""
        if band:
            low, high = BANDS[found.situation][band]
            spread_text = f"   {show_seconds(spread.p50 * low)} to {show_seconds(spread.p50 * high)}"
        yield f"{name:14}{cells}{spread_text}"
    yield f"(measured over predicted, 10th to 90th percentile of published runs, {BAND_OF[found.situation]})"
    yield ""
    each = found.output_tokens_per_s / found.devices
    yield f"throughput    {found.output_tokens_per_s:,.0f} output tokens/s, {each:,.0f} a device"
    yield f"              {found.input_tokens_per_s:,.0f} input tokens/s"
    yield f"              {found.requests_per_s:.3g} requests/s"
    if rent is not None and found.output_tokens_per_s:
        million = rent / 3600 / found.output_tokens_per_s * 1e6
        yield f"cost          ${million:.2f} a million output tokens at ${rent:.2f} an hour"
    running, preempted = found.played.mean_running * found.groups, found.played.preemptions * found.groups
    yield f"running       {running:.1f} requests decode on average, {preempted} preemptions"
    if found.goodput is not None:
        yield f"goodput       {found.goodput:.1%} of requests meet the targets"
    if not found.stable:
        yield "queue         grows: requests come faster than they are served, so waiting depends on how long it lasts"
    memory = found.capacity
    yield ""
    usable_text = show_bytes(memory.usable_bytes)
    yield f"memory of one device ({show_bytes(memory.memory_bytes)}, of which the engine takes {usable_text})"
    yield f"  weights     {show_bytes(memory.weights_bytes)}"
    yield f"  activations {show_bytes(memory.activation_bytes)} (peak of the profiling run; --max-num-batched-tokens,"
    yield "              --max-num-seqs)"
    yield f"  its own     {show_bytes(memory.own_bytes)} (context, libraries, graphs)"
    size, longest = found.engine.block_tokens, found.serving.max_model_len
    tokens = f"{memory.kv_tokens:,} tokens in {memory.blocks:,} blocks of {size}"
    yield f"  KV cache    {show_bytes(memory.kv_bytes)}: {tokens}"
    yield f"              {memory.concurrency:.2f} requests of max_model_len {longest} at the same time"
    for index, way in enumerate(helps[:4]):
        yield f"  {'more with' if index == 0 else '':12}{way.change}: {way.kv_tokens:,} tokens"
    notes = [*assumed, *found.assumed]
    if notes:
        yield ""
        yield "assumed"
        for note in notes:
            yield from wrapped(note, bullet="- ")


def measured_text(found: MeasuredLoad, title: str) -> Iterator[str]:
    """A measured load as lines of text. title: the server that was driven."""
    clients = f", {found.concurrency} at a time" if found.concurrency else ""
    yield f"{title}: {len(found.rows):,} requests{clients}, measured"
    yield ""
    yield f"{'':14}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}"
    for name, spread in (("TTFT", found.ttft), ("TPOT", found.tpot), ("end to end", found.e2e)):
        cells = "".join(f"{show_seconds(value):>10}" for value in (spread.p50, spread.p90, spread.p99, spread.mean))
        yield f"{name:14}{cells}"
    yield ""
    yield f"throughput    {found.output_tokens_per_s:,.1f} output tokens/s over {show_seconds(found.span_s)}"


def rows_beside_measured(found: Forecast, measured: MeasuredLoad) -> Iterator[tuple[str, float, float]]:
    """(what, predicted, measured) of the same requests: seconds, and output tokens a second."""
    for name in ("ttft", "tpot", "e2e"):
        for at in ("p50", "p99"):
            yield f"{name}_{at}_s", getattr(getattr(found, name), at), getattr(getattr(measured, name), at)
    yield "output_tokens_per_s", found.output_tokens_per_s, measured.output_tokens_per_s


def compared_text(found: Forecast, measured: MeasuredLoad, source: str) -> Iterator[str]:
    """Predicted and measured latencies side by side, as lines of text. source: the file with the measurement."""
    yield f"{source}: {len(measured.rows):,} requests, played at the times that they came"
    yield ""
    yield f"{'':22}{'predicted':>12}{'measured':>12}{'off':>8}"
    words = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "output": "output tokens/s"}
    for name, ours, theirs in rows_beside_measured(found, measured):
        what, at = words[name.partition("_")[0]], name.split("_")[1]
        seconds = name.endswith("_s") and at in ("p50", "p99")
        cells = [show_seconds(value) if seconds else f"{value:,.1f}" for value in (ours, theirs)]
        off = f"{ours / theirs - 1:+.0%}" if theirs else "none"
        yield f"{f'{what} {at}' if seconds else what:22}{cells[0]:>12}{cells[1]:>12}{off:>8}"

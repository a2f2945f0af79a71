"""Prices of the serving engine's own kernels, by tables that are written here: what is between their points, and what
scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gnomon.hardware import Axis, Measured, Table, measured_cluster, served
from gnomon.models.presets import model
from gnomon.prices.stored import StoredPrices
from gnomon.serving.iteration import TICKS_PER_S, IterationPrice
from gnomon.serving.layout import Serving
from gnomon.serving.scheduler import Batch, PromptPiece
from gnomon.software.engine import engine

ELEMENTS, KEY_S, QUERY_S, PAIR_S = served.SIDE**2, 2e-9, 3e-6, 1e-8


def table(what: str, dtype: str, seconds: list[float], direction: str = "", **axes: tuple[int, ...]) -> Table:
    made = tuple(Axis(name=name, sizes=sizes) for name, sizes in axes.items())
    flat = (0.0,) * len(seconds)
    return Table(
        what=what, dtype=dtype, direction=direction, axes=made, seconds=tuple(seconds), alone_s=(), spread=flat
    )


@pytest.fixture(scope="module")
def measured() -> Measured:
    """A row of a product takes 1 ns an element more; a query QUERY_S and KEY_S a key; passes 1 ns a byte."""
    heads = served.SEQUENCES * served.KV_HEADS
    return Measured(
        host="here", date="2026-11-29T00:00:00Z", software="by hand", processes=1, threads=1,
        tables=(
            table("stored_linear", "bf16", [1e-3 * rows for rows in served.ROWS], rows=served.ROWS),
            table("stored_linear", "int8", [0.5e-3 * rows for rows in served.ROWS], rows=served.ROWS),
            table(
                "paged_decode", "bf16",
                [heads * (QUERY_S + KEY_S * keys) for keys in served.KEYS for _ in served.GROUPS],
                keys=served.KEYS, group=served.GROUPS,
            ),
            table(
                "paged_prompt", "bf16",
                [PAIR_S * new * (before + new) for new in served.NEW for before in served.BEFORE],
                new=served.NEW, before=served.BEFORE,
            ),
            table("add", "fp32", [12 * (1 << 18) * 1e-9] * 2, "forward", elements=(1 << 18, 1 << 19)),
            table("fill", "fp32", [1e-3] * 2, elements=(1 << 18, 1 << 19)),
            table("copy", "fp32", [1e-3] * 2, elements=(1 << 18, 1 << 19)),
            table("matmul", "fp32", [1e-3], "forward", m=(512,), n=(512,), k=(512,)),
        ),
    )  # fmt: skip


def test_a_product_goes_with_elements_and_rows_and_its_form(measured: Measured) -> None:
    prices = StoredPrices(measured)
    rows = np.array([1.0, 2.0, 8.0, 1024.0])
    assert np.allclose(prices.linear_s(2 * ELEMENTS, 16, rows), 2e-3 * rows)  # type: ignore[arg-type]
    assert np.allclose(prices.linear_s(ELEMENTS, 8.125, rows), 0.5e-3 * rows)  # type: ignore[arg-type]
    assert prices.linear_s(ELEMENTS, 4.25, rows) is None  # was not measured


def test_attention_is_a_query_and_its_keys(measured: Measured) -> None:
    query_s, key_s = StoredPrices(measured).decode_s(group=3, width=2 * served.HEAD, kv_heads=5)
    assert query_s == pytest.approx(10 * QUERY_S, rel=1e-6) and key_s == pytest.approx(10 * KEY_S, rel=1e-6)
    one = StoredPrices(measured).prompt_s(128, 512, heads=4, width=served.HEAD)
    assert one == pytest.approx(PAIR_S * 128 * (128 + 512) / 2)


def test_an_iteration_of_the_engine_is_the_sum_of_its_kernels(measured: Measured) -> None:
    """Decodes of a small Llama: each matrix once a row, its keys in every layer; a prompt's piece its attention."""
    graph = model("llama-3.2-1b")
    cluster = measured_cluster(measured, 1 << 34)
    rules = replace(engine("gnomon"), max_seqs=8, max_batched_tokens=64, host_step_s=0.0, host_sequence_s=0.0)
    price = IterationPrice(graph, cluster, Serving(max_model_len=512), replace(rules, launch_s=0.0))
    matrices = graph.num_parameters() - 33 * 2048  # norms
    decodes = Batch(pieces=(), decodes=2, kv_tokens=600, preempted=())
    seconds = price.batch_ticks(decodes) / TICKS_PER_S
    layers, kv_heads = 16, 8
    keys = layers * kv_heads * (2 * QUERY_S + 600 * KEY_S)
    products = 2e-3 * matrices / ELEMENTS
    assert seconds == pytest.approx(products + keys, rel=0.02)
    prompt = Batch(pieces=(PromptPiece(1, 0, 32, True),), decodes=0, kv_tokens=0, preempted=())
    assert price.batch_ticks(prompt) / TICKS_PER_S > 32e-3 * (matrices - 128256 * 2048) / ELEMENTS

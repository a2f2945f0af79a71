"""Rows of published runs that tests change one field of, and the run or the refusal that a row makes."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping

from evidence.published import Row, Run, read_runs

GPT3 = {
    "id": "a-1",
    "family": "korthikanti-2022",
    "model": "gpt3-175B",
    "device": "a100-sxm-80gb",
    "framework": "Megatron-LM",
    "metric": "s_per_step",
    "value": "13.75",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "kv_heads": "96",
    "ffn": "49152",
    "seq_len": "2048",
    "num_devices": "64",
    "devices_per_node": "8",
    "precision": "fp16",
    "tp": "8",
    "pp": "8",
    "vpp": "3",
    "dp": "1",
    "cp": "1",
    "sequence_parallel": "yes",
    "zero_or_fsdp": "none",
    "micro_batch": "1",
    "global_batch": "64",
    "recompute": "selective",
    "flash_attention": "no",
    "offload": "none",
}
"""Korthikanti et al. 2022, table 5: 175B with sequence parallelism and selective recomputation, 13.75 s."""

LLAMA = GPT3 | {
    "id": "b-1",
    "family": "nanotron-ultrascale",
    "model": "llama-1.34B",
    "device": "h100-sxm-80gb",
    "framework": "nanotron",
    "metric": "tokens_per_s_per_device",
    "value": "38839.82",
    "layers": "16",
    "hidden": "2048",
    "heads": "32",
    "kv_heads": "32",
    "ffn": "8192",
    "vocab": "131072",
    "seq_len": "4096",
    "num_devices": "16",
    "precision": "bf16",
    "tp": "1",
    "pp": "1",
    "vpp": "1",
    "dp": "16",
    "sequence_parallel": "",
    "zero_or_fsdp": "zero1",
    "micro_batch": "2",
    "global_batch": "256",
    "recompute": "none",
    "flash_attention": "yes",
    "notes": "tied emb for 1.34B/3.57B; PP engine 1f1b",
}

NOBODY = Row(
    id="w-1",
    family="nobody-2026",
    model="Llama 3 8B",
    device="H200",
    framework="SomeTrainer",
    metric="tokens_per_s_per_device",
    value=10_000.0,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads="8",
    ffn="14336",
    vocab=128_256,
    seq_len=8192,
    num_devices=8,
    precision="bf16",
    tp=1,
    pp=1,
    dp=8,
    zero_or_fsdp="zero1",
    micro_batch=1,
    global_batch=64,
    recompute="none",
)
"""A program, a family and a spelling of a device that nothing here has heard of."""


def text(*rows: Mapping[str, str]) -> str:
    """A table of rows."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def run(row: Mapping[str, str]) -> Run:
    runs, refused = read_runs(text(row))
    assert not refused, refused
    return runs[0]


def reason(row: Mapping[str, str]) -> str:
    runs, refused = read_runs(text(row))
    assert not runs
    return refused[0].reason

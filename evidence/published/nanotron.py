"""Runs of nanotron's benchmark: how its script started them, which rows do not say.

`as_benchmarked(stack, row)` returns the stack with checked collectives and polled messages where the run had them.
"""

from __future__ import annotations

import re

from evidence.published.notes import NANOTRON_BENCHMARK
from evidence.published.row import Row
from gnomon.formats.job import chosen
from gnomon.plans import Stack

NANOTRON_CUDA = (
    "huggingface/nanotron 77f54c10 (2025-03-10) run_multinode.sh: module load cuda/12.1, conda activate 2-1-cu121"
)

NANOTRON_CHECKS = (
    "huggingface/nanotron 77f54c10 (2025-03-10) run_multinode.sh: TORCH_DISTRIBUTED_DEBUG=DETAIL; scripts/"
    "scaling_benchmarks.py starts each run with that script, and runs those with stages again"
)
NANOTRON_POLLS = (
    "huggingface/nanotron 67c5ebb6 (2024-12-27, branch nouamane/bench2) src/nanotron/parallel/pipeline_parallel/p2p.py "
    "_send_meta, _recv_meta: time.sleep(0.1) until work.is_completed(); 6ac7d733 (2024-12-13) and main do not sleep"
)
NANOTRON_POLL_S = 0.1
LATE_NODES, LATE_TP = 64, 32
"""Jobs of so many nodes, and jobs with stages of so many tensor-parallel ranks, are taken as run with the checks, and
with the messages of late December 2024. Rows do not say it; their times do (docs/accuracy.md)."""
AGAIN_NODES, AGAIN_DP, AGAIN_PARAMS_B = 32, 32, 4.0
"""The script of February 2025 (e24d2483), which runs jobs with stages again, without the sleep, has ZeRO 0 from so many
data-parallel ranks ("0 if dp>=32"): what ran as ZeRO 1 with them is of December. So are the times on 32 nodes and more;
on fewer both stages ran again. On 32 nodes, models of so many billion parameters ran again with one sequence a
microbatch alone: in each of the two, all with more whose times tell are of December (40 and 9) and all with one are not
(21 and 16); of the smaller model, 6 of 34 with more are."""


def as_benchmarked(base: Stack, row: Row) -> Stack:
    """nanotron as its benchmark ran it: jobs with stages on several nodes with checked collectives, and with polled
    messages where they did not run again; jobs without stages with checks on many nodes."""
    if re.search(NANOTRON_BENCHMARK, row.notes):
        base = chosen(base, NANOTRON_CUDA, cublas="12.1")
    nodes, tp, stages = (row.num_devices or 1) // (row.devices_per_node or 8), row.tp or 1, (row.pp or 1) > 1
    if not re.search(NANOTRON_BENCHMARK, row.notes) or nodes < 2:
        return base
    if not stages:
        return chosen(base, NANOTRON_CHECKS, checked_collectives=True) if nodes >= LATE_NODES and tp < LATE_TP else base
    base = chosen(base, NANOTRON_CHECKS, checked_collectives=True)
    zero_1 = (row.zero_or_fsdp or "").lower() == "zero1" and (row.dp or 1) >= AGAIN_DP
    large = (row.params_b or 0.0) >= AGAIN_PARAMS_B and (row.micro_batch or 1) > 1
    once = nodes >= LATE_NODES or tp >= LATE_TP or (nodes >= AGAIN_NODES and (zero_1 or large))
    return chosen(base, NANOTRON_POLLS, p2p_poll_s=NANOTRON_POLL_S if once else None)

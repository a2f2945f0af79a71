"""Runs of nanotron's benchmark: how its script started them, which rows do not say.

`as_started(stack, row)` returns the stack with what the script sets for every job: its CUDA, and collectives that are
checked. That some jobs ran without these checks, and some with polled messages, shows in their times alone:
`as_timed(stack, row, thresholds)` returns the stack with both as thresholds have them that were fitted to the runs
(`evidence.readings`). Leaves out how stages are cut (`plan`).
"""

from __future__ import annotations

import re

from evidence.published.notes import NANOTRON_BENCHMARK
from evidence.published.row import Row
from evidence.readings import JobThresholds
from gnomon.formats.job import with_job_fields
from gnomon.software import Stack

NANOTRON_SCRIPT = (
    "huggingface/nanotron 77f54c10 (2025-03-10) examples/mamba/run_multinode.sh, by whose name scripts/"
    "scaling_benchmarks.py starts every job: module load cuda/12.1, conda activate 2-1-cu121, "
    "TORCH_DISTRIBUTED_DEBUG=DETAIL"
)
NANOTRON_POLLS = (
    "huggingface/nanotron 67c5ebb6 (2024-12-27, branch nouamane/bench2) src/nanotron/parallel/pipeline_parallel/p2p.py "
    "_send_meta, _recv_meta: time.sleep(0.1) until work.is_completed(); 6ac7d733 (2024-12-13) and main do not sleep; "
    "which jobs ran it: by their step times (evidence.readings)"
)
NANOTRON_POLL_S = 0.1
"""Seconds between two looks at a message: the code's."""

ZERO_0_FROM_DP = 32
"""The script of February 2025 (e24d2483), which runs jobs with stages again, has ZeRO 0 from so many data-parallel
ranks on ("0 if dp>=32"): a job that has ZeRO 1 with them is older, which is an early setting."""


def as_started(base: Stack, row: Row) -> Stack:
    """nanotron as the script of its benchmark starts every job."""
    return (
        with_job_fields(base, NANOTRON_SCRIPT, cublas="12.1", checked_collectives=True) if of_benchmark(row) else base
    )


def of_benchmark(row: Row) -> bool:
    """Whether it is a run of nanotron's benchmark."""
    return re.search(NANOTRON_BENCHMARK, row.notes) is not None


def environment(row: Row, known: JobThresholds) -> tuple[bool, bool]:
    """(collectives are checked, messages are polled) of a job of the benchmark, by thresholds."""
    nodes, tp = (row.num_devices or 1) // (row.devices_per_node or 8), row.tp or 1
    if nodes < 2:
        return False, False
    if (row.pp or 1) == 1:
        return nodes >= known.polled_nodes and tp < known.polled_tp, False
    zero_1 = (row.zero_or_fsdp or "").lower() == "zero1" and (row.dp or 1) >= ZERO_0_FROM_DP
    large = (row.params_b or 0.0) >= known.early_params_b and (row.micro_batch or 1) >= known.early_micro_batch
    early = nodes >= known.early_nodes and (zero_1 or large)
    return True, nodes >= known.polled_nodes or tp >= known.polled_tp or early


def as_timed(base: Stack, row: Row, known: JobThresholds) -> Stack:
    """nanotron as the thresholds read a job: with checked collectives and polled messages where they say so."""
    if not of_benchmark(row):
        return base
    checked, polled = environment(row, known)
    base = base if checked else unchecked(base)
    return with_job_fields(base, NANOTRON_POLLS, p2p_poll_s=NANOTRON_POLL_S) if polled else base


def unchecked(base: Stack) -> Stack:
    """The stack without checks of collectives."""
    facts = tuple(fact for fact in base.facts if fact.field != "checked_collectives")
    return base.with_values(facts, checked_collectives=None)

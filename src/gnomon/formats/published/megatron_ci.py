"""Rows of Megatron-LM's own functional tests: what the names of tests and their fixed options say beyond the columns.

`with_test_facts(row)` returns the row with the columns that its test settles filled in, and notes; other rows come
back as they are. Facts were read from NVIDIA/Megatron-LM d98e8a6 (2026-08-22), tests/functional_tests/test_cases.
Leaves out options that no name tells (widths of experts, shared experts, multi-token prediction).
"""

from __future__ import annotations

import re
from dataclasses import replace

from gnomon.formats.job import chosen
from gnomon.formats.published.row import Row
from gnomon.plans import Stack

PROGRAM = r"^megatron-lm ci$"
"""Framework of these rows."""

GPT_ROWS = 50_257
"""GPT-2's tokenizer (bpe/vocab.json): every GPT and mixture test."""
SPEED_ROWS = 131_072
"""--vocab-size of the tests of memory and speed (gpt3_7b_*_memory_speed)."""
BERT_ROWS = 30_522
"""BERT's uncased tokenizer."""


def is_test(row: Row) -> bool:
    """Whether the row is of a functional test."""
    return bool(re.search(PROGRAM, row.framework.lower()))


def with_test_facts(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its test settles, and what that was."""
    if not is_test(row):
        return row, ()
    test = (row.section or row.model).lower()
    notes: list[str] = []
    kernel = attention_kernel(row, test)
    if row.vocab is None:
        notes.append("vocab not in the row: the tokenizer of Megatron-LM's functional tests")
        known = BERT_ROWS if re.search("bert|t5", row.model.lower()) else GPT_ROWS
        row = replace(row, vocab=SPEED_ROWS if "memory_speed" in test else known)
    if row.flash_attention is None or kernel == "no":
        notes.append(f"attention {'unfused' if kernel == 'no' else 'fused'}: as this functional test gives it")
    return replace(row, flash_attention=kernel), tuple(notes)


def attention_kernel(row: Row, test: str) -> str:
    """`yes` for a fused kernel, `no` for attention op by op.

    The column says `yes` where --attention-backend is given; tests with context parallelism give `flash`, the others
    `unfused`. Where it is not given, Transformer Engine (`_te_` in the test's name, and the tests of memory and speed)
    takes a fused kernel, and the local implementation has none.
    """
    if (row.cp or 1) > 1:
        return "yes"
    if row.flash_attention is not None:
        return "no"
    return "yes" if re.search("_te_|weekly|memory_speed", test) else "no"


def expert_slices(row: Row, tp: int) -> int:
    """Tensor-parallel ranks of an expert: Megatron-LM's default is tp, and names of its tests say when it is not."""
    if row.experts is None or not is_test(row):
        return 1
    found = re.search(r"_etp(\d+)", row.section or "")
    return int(found[1]) if found else tp


def optimizer_instances(row: Row) -> int:
    """Groups of ranks that each divide the optimizer among them (--num-distributed-optimizer-instances)."""
    return 2 if is_test(row) and "multi_dist_optimizer" in (row.section or "") else 1


def with_test_options(stack: Stack, row: Row) -> Stack:
    """The stack as the test runs it: deterministic tests set CUBLAS_WORKSPACE_CONFIG=:4096:8, only tests with
    Transformer Engine have its workspace, and the loss that torch.compile fuses is not written in place."""
    if not is_test(row):
        return stack
    test = row.section or ""
    size = None if "nondeterministic" in test else 8 * 4096 * 1024
    source = "NVIDIA/Megatron-LM d98e8a6 tests/functional_tests/test_cases"
    return chosen(
        stack,
        source,
        cublas_workspace_bytes=size,
        transformer_engine=bool(re.search("_te_|memory_speed", test)),
        cross_entropy="unfused" if "cross_entropy_loss_fusion" in test else None,
    )

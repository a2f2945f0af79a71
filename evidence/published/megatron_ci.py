"""Rows of Megatron-LM's own functional tests: what the names of tests and their fixed options say beyond the columns.

`with_test_facts(row)` returns the row with the columns that its test settles filled in, and notes; other rows come
back as they are. InputError for tests of another model or program than the columns describe. Facts were read from
NVIDIA/Megatron-LM d98e8a6 (2026-08-22), tests/functional_tests/test_cases and its history.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.published.row import Row
from evidence.published.rules import first
from gnomon.errors import InputError
from gnomon.formats.job import with_job_fields
from gnomon.plans import Plan
from gnomon.software import Stack

PROGRAM = r"^megatron-lm ci$"
"""Framework of these rows."""

GPT_ROWS = 50_257
"""GPT-2's tokenizer (bpe/vocab.json): every GPT and mixture test."""
SPEED_ROWS = 131_072
"""--vocab-size of the tests of memory and speed (gpt3_7b_*_memory_speed)."""
BERT_ROWS = 30_522
"""BERT's uncased tokenizer."""

NARROW_EXPERTS = 1024
"""--moe-ffn-hidden-size of the tests on eight experts (gpt3_moe_mcore_te_ep8_*), whose column has the dense width."""

GB200_NODE = 4
"""Devices of a node of tests on GB200, which run on two nodes but for those with `1node` or `1N4G` in their names
(tests/test_utils/recipes/gb200/*.yaml `nodes`, `gpus`). Of the tests of releases there is no recipe."""

OLDER_CONTAINER = frozenset(
    """
    gpt3_mcore_te_tp1_pp1_frozen_resume_torch_dist_dist_optimizer
    gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer_no_mmap_bin_files
    gpt3_mcore_te_tp1_pp4_frozen_resume_torch_dist_swiglu
    gpt3_mcore_te_tp1_pp4_resume_torch_dist_disable_bias_linear
    gpt3_mcore_te_tp1_pp4_resume_torch_dist_sequence_parallel
    gpt3_mcore_te_tp1_pp4_resume_torch_dist_swiglu
    gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist
    gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer
    gpt3_mcore_te_tp2_pp1_frozen_resume_torch_dist_te_8experts2parallel_groupedgemm
    gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_dist_optimizer
    gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_groupedgemm
    gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances
    gpt3_mcore_te_tp2_pp1_resume_torch_dist_te_8experts2parallel_top2router
    gpt3_mcore_te_tp2_pp2_resume_torch_dist_no_mmap_bin_files
    gpt3_mcore_te_tp2_zp_z3_resume_torch_dist_te_8experts2parallel_top2router
    gpt3_mcore_tp2_pp2_ep2_resume_torch_dist_te_4experts2parallel
    gpt3_mcore_tp2_pp2_resume_torch_dist_te_2experts
    """.split()
)
"""Deterministic tests without --attention-backend whose `lts` values were recorded before the container of that name
changed (23a1dca, 2025-11-06) and never since, by the history of their files. So were all on the machine dracooci."""

BLACKWELL = r"g?b[23]00"
"""Devices where cuDNN's attention cannot both drop out and add in one order, so that FlashAttention-2 runs."""
NOT_IN_ORDER = (
    "NVIDIA/TransformerEngine d0067d0 transformer_engine/common/fused_attn/fused_attn.cpp: in order on Blackwell only "
    "without dropout, of which these tests have 0.1"
)


def is_test(row: Row) -> bool:
    """Whether the row is of a functional test."""
    return bool(re.search(PROGRAM, row.framework.lower()))


def with_test_facts(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its test settles, and what that was."""
    if not is_test(row):
        return row, ()
    test = (row.section or row.model).lower()
    if why := first(replace(row, section=test), "not_described"):
        raise InputError(f"the functional test {test} {why}, which the row's columns do not describe")
    notes: list[str] = []
    if row.num_devices is None and "gb200" in row.device and "release" not in test:
        count = GB200_NODE if re.search("1node|1n4g", test) else 2 * GB200_NODE
        row = replace(row, num_devices=count)
        notes.append(f"{count} devices: what this functional test's recipe asks for (tests/test_utils/recipes)")
    if test.startswith("gpt3_moe_mcore_te_ep8") and row.ffn != str(NARROW_EXPERTS):
        notes.append(f"experts of {NARROW_EXPERTS} channels, not {row.ffn}: as this functional test gives them")
        row = replace(row, ffn=str(NARROW_EXPERTS))
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
    takes a fused kernel, unless the test is deterministic and ran in the older container, whose release had no such
    kernel; the local implementation has none.
    """
    if (row.cp or 1) > 1:
        return "yes"
    if row.flash_attention is not None:
        return "no"
    older = "lts_dgxa100_dracooci" in (row.source or "") or test in OLDER_CONTAINER and "lts" in (row.source or "")
    if older and not re.search("nondeterministic|reshard", test):
        return "no"
    return "yes" if re.search("_te_|weekly|memory_speed", test) else "no"


def expert_slices(row: Row, tp: int) -> int:
    """Tensor-parallel ranks of an expert: Megatron-LM's default is tp, and names of its tests say when it is not."""
    if row.experts is None or not is_test(row):
        return 1
    match = re.search(r"_etp(\d+)", row.section or "")
    return int(match[1]) if match else tp


def optimizer_instances(row: Row) -> int:
    """Groups of ranks that each divide the optimizer among them (--num-distributed-optimizer-instances)."""
    return 2 if is_test(row) and "multi_dist_optimizer" in (row.section or "") else 1


def with_test_plan(plan: Plan, row: Row) -> Plan:
    """The plan with what names of tests say of it: layers by stage, and Muon's one state."""
    test = row.section or ""
    if not is_test(row):
        return plan
    if "uneven_pipeline" in test:  # --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2
        plan = replace(plan, schedule=replace(plan.schedule, layers_per_stage=(2, 4, 4, 2)))
    if "account_for_embedding_loss" in test:
        looped = replace(plan.schedule, name="interleaved_one_f_one_b", virtual_stages=2)
        plan = replace(plan, schedule=replace(looped, layers_per_stage=(0, 1, 1, 1, 1, 1, 1, 0)))
    if "muon" in test:  # whose update has no price: momentum has the same one state
        plan = replace(plan, optimizer=replace(plan.optimizer, kind="momentum"))
    return plan


def with_test_options(stack: Stack, row: Row) -> Stack:
    """The stack as the test runs it: deterministic tests add in order and set CUBLAS_WORKSPACE_CONFIG=:4096:8, only
    tests with Transformer Engine have its workspace, and the loss that torch.compile fuses is not written in place."""
    if not is_test(row):
        return stack
    test = row.section or ""
    source = "NVIDIA/Megatron-LM d98e8a6 tests/functional_tests/test_cases"
    ordered = "nondeterministic" not in test
    if ordered and re.search(BLACKWELL, row.device.lower()):
        stack = with_job_fields(stack, NOT_IN_ORDER, attention_kernel="flash2")
    return with_job_fields(
        stack,
        source,
        cublas_workspace_bytes=8 * 4096 * 1024 if ordered else None,
        deterministic=ordered,  # --deterministic-mode
        grad_accumulation_fused=False if "memory_speed" in test else None,  # --no-gradient-accumulation-fusion
        transformer_engine=bool(re.search("_te_|memory_speed", test)),
        cross_entropy="unfused" if "cross_entropy_loss_fusion" in test else None,
        attention="unfused_fp32_softmax" if "uninstall_te" in test else None,  # --no-masked-softmax-fusion
    )

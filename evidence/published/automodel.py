"""What NeMo AutoModel's recipes, of LoRA above all, set that no column of a row holds, release by release.

Its table names a commit, and recipes and program are public at each: 507bfb751 (December 2025), c0e4fe1bc (March 2026),
and 2013a4dd6 (April 2026), whose figures the newest table still has. `kernels(row)` returns what layers are made of,
`with_recipe(row)` the row with what the recipe recomputes and divides, `precision` its dtypes, `layout(row, plan)` the
plan with what the recipe overlaps, and the local batches that go through a pipeline one after the other. Leaves out
what DTensor's dispatch costs on the host where layers are not compiled, gradients that are reduced once a step, and
what mixtures run between products of experts.
Source: NVIDIA-NeMo/Automodel at these commits and 36044ad3d (runs that train all weights),
examples/llm_finetune/*/*_peft_benchmark*.yaml, examples/llm_benchmark and nemo_automodel
(_transformers/kernel_patches.py, components/_peft/lora.py, components/models/llama, components/loss/masked_ce.py,
components/distributed/parallelizer.py). Read 2026-11-23.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from evidence.published.row import Row
from evidence.published.rules import first, says
from gnomon.models.lora import Adapters
from gnomon.plans import DType, Plan, Precision, Split

SOURCE = "NVIDIA-NeMo/Automodel 507bfb751, c0e4fe1bc, 2013a4dd6 (evidence.published.automodel)"


def _release(row: Row) -> str:
    """Commit of a LoRA run's program; empty for other runs."""
    if not re.search(r"automodel.*lora", f"{row.framework} {row.model}".lower()):
        return ""
    match = re.search(r"@(507bfb751|c0e4fe1bc)", row.source or "")
    return match[1] if match else "2013a4dd6"


def adapters(row: Row) -> Adapters | None:
    """Rank 16 on all linears of layers, the factor before `lora_B`. Until April 2026 the program's own Llama and Qwen
    have joined projections; the 8B recipe has dropout."""
    if not (release := _release(row)):
        return None
    dropout = 0.1 if re.search(r"\b8b", row.model.lower()) else 0.0
    return Adapters(rank=16, scaled="inner", joined=release != "2013a4dd6", dropout=dropout)


def kernels(row: Row) -> Mapping[str, str | bool]:
    """Fields of the stack: FlashAttention-2 of transformers (`DEFAULT_ATTN_IMPLEMENTATION`); Liger's norm, rotary
    embedding and activation on one device; layers compiled with tensor parallelism in April 2026; before that, of the
    program's own models, the norm alone in March. Loss and logits are fp32 in all. Of mixtures: Transformer Engine's
    norm and rotary embedding (`rms_norm: te`, `rope_fusion: true` of examples/llm_benchmark/*/*_te_deepep.yaml);
    activations of experts compiled, with the router's weights in them (components/moe/experts.py `relu2_deepep`,
    `quick_geglu_deepep`; megatron/moe_utils.py `weighted_swiglu`); and checkpoints without reentry around whole layers,
    which stop early. Compiled layers have their checkpoints inside:
    only what the backward reads is run again. Of LoRA without compilation all is: a frozen product comes before what
    its adapter keeps."""
    release = _release(row)
    if not release and says(row, "compiled_layers"):
        fused = {"norm": "fused", "activation": "fused"}
        return {**fused, "launch_mode": "compiled", "recompute_stops": True}
    if not release:
        if "automodel" not in row.framework.lower() or not row.experts:
            return {}
        mixture: dict[str, str | bool] = {"norm": "fused", "recompute_stops": True}
        mixture |= {"activation": "fused", "moe_weights": "activation"}
        return mixture | ({"attention_kernel": "flash2"} if re.search(TORCH_ATTENTION, row.notes.lower()) else {})
    collected: dict[str, str | bool] = {"attention_kernel": "flash2"}
    if release == "2013a4dd6":
        collected |= {"norm": "fused", "activation": "fused"}
        collected |= {"launch_mode": "compiled", "recompute_stops": True} if (row.tp or 1) > 1 else {}
    return collected | ({"norm": "fused"} if release == "c0e4fe1bc" else {})


TORCH_ATTENTION = r"flexattn|torchsdpa"
"""Notes of mixtures whose attention is not Transformer Engine's: PyTorch's own, of which FlexAttention reaches 0.9 of
FlashAttention-2 forward and 0.85 backward by its authors (pytorch.org/blog/flexattention); taken as the latter."""


def with_recipe(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with full recompute and the ranks of experts that its recipe sets, where the table does not say."""
    if "automodel" not in row.framework.lower():
        return row, ()
    notes: list[str] = []
    if not row.recompute and says(row, "checkpointed"):
        row = replace(row, recompute="full")
        notes.append("activation_checkpointing: the recipe's")
    ranks: int = first(row, "expert_ranks", 0)
    if ranks and not row.ep:
        row = replace(row, ep=ranks)
        notes.append(f"ep_size {ranks}: the recipe's")
    return row, tuple(notes)


def precision(row: Row, result: Precision) -> Precision:
    """Parameters as they are published, in bf16, and so their gradients and Adam's states (`torch_dtype: bf16`, or that
    of the model's own config; `torch.optim.Adam`). FSDP2 reduces dense models' gradients in bf16 (FSDP2Config's
    `mp_policy`), mixtures' in fp32 (components/moe/parallelizer.py)."""
    if "automodel" not in row.framework.lower() or result.compute != "bf16" or result.fp8 is not None:
        return result
    reduce: DType = "fp32" if row.experts or row.ep else "bf16"
    return Precision(param="bf16", compute="bf16", grad="bf16", reduce=reduce, master="none", states="bf16")


def rounds(row: Row, data_ranks: int) -> int:
    """Local batches of a step, each a whole pass through the pipeline (`_forward_backward_step`: `schedule.step`)."""
    if "automodel" not in row.framework.lower() or (row.pp or 1) == 1 or not row.global_batch:
        return 1
    share = row.global_batch // data_ranks
    match = re.search(r"LBS=(\d+) GA=(\d+)", row.notes)
    local = int(match[1]) if match and int(match[1]) * int(match[2]) == share else 0
    if not local and _release(row):
        local = first(row, "local_batch", 0)
    return share // local if local and share % local == 0 else 1


def layout(row: Row, plan: Plan) -> Plan:
    """In pipelines a local batch at a time. Of LoRA with tensor parallelism: logits are gathered before the loss
    (`full_tensor`); of 70B in April 2026, sequence parallelism, and products cut to overlap with what tensor-parallel
    ranks exchange (`enable_async_tensor_parallel`)."""
    release, tp = _release(row), plan.mesh.tp
    plan = replace(plan, schedule=replace(plan.schedule, rounds=rounds(row, plan.mesh.data_ranks)))
    if not release or tp == 1:
        return plan
    plan = replace(plan, layout=replace(plan.layout, loss_parallel=False))
    if release != "2013a4dd6" or "70b" not in row.model.lower():
        return plan
    cut = (Split(op="*", dim="seq", parts=tp),)
    return replace(plan, layout=replace(plan.layout, sequence_parallel=True), overlap=replace(plan.overlap, splits=cut))

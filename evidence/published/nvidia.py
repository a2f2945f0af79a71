"""What NVIDIA's scripts of NeMo, MaxText and Paxml set that no column of a row holds, release by release.

NVIDIA/dgxc-benchmarking has the scripts of its runs beside their tables, by tag, and NVIDIA/NeMo-Framework-Launcher
those of NeMo up to 24.12. Leaves out Megatron-Bridge's recipes and second predictions (`bridge`).
Source: tags v24.11.1, v25.02.02, v25.04.02, v25.05 and v25.05.02 of the former, 24.07 of the latter, read 2026-11-22.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.published.row import Row
from evidence.published.rules import first, matching, says


def without_cudnn(row: Row) -> bool:
    """Whether the scripts of the run switch cuDNN's attention off (NVTE_FUSED_ATTN=0), so that Transformer Engine is
    left with FlashAttention-2."""
    return says(row, "without_cudnn")


def cudnn(row: Row, release: str) -> str | None:
    """The release of cuDNN that a run's container has, where it is known: the last that is not newer than it."""
    known = [rule.set["cudnn"] for rule in matching(row, "cudnn", release)]
    return known[-1] if known else None


def expert_slices(row: Row) -> int:
    """Ranks that an expert of NeMo's mixtures is divided over."""
    ranks: int = first(row, "expert_slices", 1)
    return ranks if row.experts else 1


def narrow_gradients(row: Row) -> bool:
    """Whether gradients are held and reduced in bf16."""
    return says(row, "narrow_gradients")


def tokenizer(row: Row) -> tuple[int, str] | None:
    """(rows, why) of the tokenizer that the scripts of a run set, where it is not the model's: NeMo makes embedding and
    head by the tokenizer."""
    known = first(row, "tokenizer")
    return None if known is None else (known[0], known[1])


def eager_activation(row: Row) -> bool:
    """Whether the activation runs op by op: squared ReLU of NeMo 2 is not compiled, that of NeMo 1 is."""
    return says(row, "eager_activation")


def packed(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with the sequences that attention stays within, where a sequence is a pack of them."""
    length: int = first(row, "packed", 0)
    times = (row.seq_len or 0) // length if length else 0
    if times < 2 or not row.global_batch:
        return row, ()
    note = f"each sequence a pack of {times} of {length} tokens, as SQuAD's are"
    micro = None if row.micro_batch is None else row.micro_batch * times
    return replace(row, seq_len=length, global_batch=row.global_batch * times, micro_batch=micro), (note,)


def _adapted(row: Row) -> bool:
    return row.framework.lower() == "nemo" and "lora" in row.model.lower()


LOCAL_ATTENTION = (
    "NVIDIA/NeMo 8cfedd7 (2025-09-20) nemo/collections/llm/gpt/model/gpt_oss.py: attention_backend = "
    "AttnBackend.local, currently only local is supported; read 2026-11-23"
)


def local_attention(row: Row) -> bool:
    """Whether attention runs op by op whatever is asked for: GPT-OSS in NeMo, for the sinks in its softmax."""
    return row.framework.lower() == "nemo" and bool(re.search(r"gpt.?oss", row.model.lower()))


UNFUSED_LOSS = (
    "NVIDIA/NeMo v2.1.0 nemo/collections/llm/recipes/llama3_8b.py, llama3_70b.py finetune_recipe: "
    "cross_entropy_loss_fusion = False for LoRA; NVIDIA/NeMo-Framework-Launcher 24.07 launcher_scripts/conf: only "
    "Llama 3's and Nemotron's set it; read 2026-11-23"
)


def unfused_loss(row: Row) -> bool:
    """Whether the loss is not the fused one: LoRA of NeMo 2, and NeMo 24.07 but for Llama 3 and Nemotron."""
    named = row.model.lower()
    return (_adapted(row) and "dgxc" in row.family) or (
        "24.07" in (row.section or "") and not re.search(r"llama.?3|nemotron", named)
    )


def with_script(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row of a LoRA run of NeMo with what its script sets where the table assumes defaults: an optimizer that is
    not distributed (v2.1.0 finetune_recipe `use_distributed_optimizer = False`; 24.07 examples/peft/llama/h100/
    *_lora.sh `optim.name=fused_adam`), and in 24.07 no sequence parallelism (launcher_scripts/conf/peft/llama/sft.yaml,
    which 70b_1node_lora.sh leaves as it is)."""
    if not _adapted(row):
        return row, ()
    row = replace(row, zero_or_fsdp="none")
    if "24.07" not in (row.section or ""):
        return row, ("optimizer not distributed: the recipe's",)
    row = replace(row, sequence_parallel="no")
    return row, ("optimizer not distributed, no sequence parallelism: the script's",)


def sharding_ranks(row: Row) -> int:
    """Ranks that parameters are divided over under MaxText and Paxml; 0 for what the row says."""
    known = (rule.set["sharding_ranks"] for rule in matching(row, "sharding_ranks"))
    return next((ranks for least, ranks in known if (row.num_devices or 0) >= least), 0)

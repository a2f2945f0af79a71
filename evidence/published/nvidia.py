"""What NVIDIA's scripts of NeMo, MaxText and Paxml set that no column of a row holds, release by release.

NVIDIA/dgxc-benchmarking has the scripts of its runs beside their tables, by tag, and NVIDIA/NeMo-Framework-Launcher
those of NeMo up to 24.12. Leaves out Megatron-Bridge's recipes and second predictions (`bridge`).
Source: tags v24.11.1, v25.02.02, v25.04.02, v25.05 and v25.05.02 of the former, 24.07 of the latter, read 2026-11-22.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evidence.published.row import Row

NO_CUDNN = (
    r"dgxc-benchmarking/grok1/.*@v(24|25\.0[1-4])",
    r"dgxc-benchmarking/nemo_megatron/.*@v24",
    r"dgxc-benchmarking/nemotron/readme_340b.*@v(24|25\.0[1-3])",
    r"nemo/docs/source/performance/performance_summary.* 24\.07",
)
"""Sources and sections whose scripts have `NVTE_FUSED_ATTN=0`, so that Transformer Engine is left with
FlashAttention-2."""

NO_CUDNN_SOURCE = (
    "NVTE_FUSED_ATTN=0: NVIDIA/dgxc-benchmarking grok1/configure.sh (v24.11.1 to v25.04.02), nemo_megatron/launch.sh "
    "and nemotron/configure.sh (v24.11.1; of 340B); NVIDIA/NeMo-Framework-Launcher 24.07 launcher_scripts/conf/"
    "config.yaml; read 2026-11-22"
)


def without_cudnn(row: Row) -> bool:
    """Whether the scripts of the run switch cuDNN's attention off."""
    source = f"{row.source or ''} {row.section or ''}".lower()
    return row.framework.lower() == "nemo" and any(re.search(pattern, source) for pattern in NO_CUDNN)


CUDNN = (
    (r"^nemo.*performance_long_sequence.*h100", "", "9.1"),
    (r"^megatron-bridge", "25.09", "9.11"),
    (r"^megatron-bridge", "25.11", "9.13"),
    (r"^megatron-bridge", "26.02", "9.18"),
    (r"^megatron-bridge", "26.04", "9.20"),
    (r"^megatron-bridge", "26.06", "9.21"),
)
"""(pattern of program, source and section, release of the container from which on it holds, cuDNN in it)."""

CUDNN_SOURCE = (
    "NVIDIA-NeMo/Megatron-Bridge v0.6.0 docs/releases/software-versions.md (25.09: 9.11.0; 25.11: 9.13.1; 26.02: "
    "9.18.0; 26.04: 9.20.0; 26.06: 9.21.1); NVIDIA/NeMo docs/source/performance/performance_long_sequence.md: H100 on "
    "container 24.03.01, older than PyTorch's 24.05, which has 9.1.0; read 2026-11-23"
)


def cudnn(row: Row, release: str) -> str | None:
    """The release of cuDNN that a run's container has, where it is known."""
    key = f"{row.framework} {row.source or ''} {row.section or ''}".lower()
    known = (number for pattern, first, number in CUDNN if re.match(pattern, key) and first <= release)
    return next(reversed(tuple(known)), None)


EXPERT_SLICES = (
    (r"dgxc-benchmarking/grok1/.*@v(24|25\.0[1-4])", 4),
    (r"dgxc-benchmarking/grok1/.*@v25\.05.*gb200", 4),
)
"""(pattern of source and device, tensor-parallel ranks of an expert). Scripts before v25.05 do not set it, and Megatron
Core before 0.10 divides experts over tp; grok1/launch.sh has `ET` since."""


def expert_slices(row: Row) -> int:
    """Ranks that an expert of NeMo's mixtures is divided over."""
    if row.framework.lower() != "nemo" or not row.experts:
        return 1
    key = f"{row.source or ''} {row.device}".lower()
    return next((ranks for pattern, ranks in EXPERT_SLICES if re.search(pattern, key)), 1)


NARROW_GRADIENTS = r"dgxc-benchmarking|nemo/docs/source/performance/performance_summary"
"""Sources whose scripts accumulate and reduce gradients in bf16: `grad_sync_dtype: bf16` with a contiguous buffer (each
yaml of v24.11.1 and v25.02.02; examples/training of the launcher), `grad_reduce_in_fp32 = False` in NeMo 2."""


def narrow_gradients(row: Row) -> bool:
    """Whether gradients are held and reduced in bf16."""
    return row.framework.lower() == "nemo" and bool(re.search(NARROW_GRADIENTS, (row.source or "").lower()))


TOKENIZERS = (
    (
        r"dgxc-benchmarking/llama3\.1/readme_405b.*@v(24|25\.0[1-3])",
        50_257,
        "GPT-2's tokenizer: llama3.1_405b.yaml of v24.11.1 (megatron, GPT2BPETokenizer), llama3.1/configure.sh of "
        "v25.02.02 (huggingface, /megatron-gpt2-345m)",
    ),
    (
        r"dgxc-benchmarking/grok1",
        128_256,
        "Llama 3's tokenizer: grok1_314b.yaml of v24.11.1 to v25.04.02, NVIDIA/NeMo 7a8f1cc "
        "scripts/performance/llm/pretrain_grok1_314b.py",
    ),
)
"""(pattern of sources, rows, why) where a run on made-up data has another tokenizer, and with it another vocabulary,
than the model it is named after: NeMo makes embedding and head by the tokenizer. Read 2026-11-23."""


def tokenizer(row: Row) -> tuple[int, str] | None:
    """(rows, why) of the tokenizer that the scripts of a run set, where it is not the model's."""
    source = (row.source or "").lower()
    if row.framework.lower() != "nemo":
        return None
    return next(((rows, why) for pattern, rows, why in TOKENIZERS if re.search(pattern, source)), None)


EAGER_ACTIVATION = r"dgxc-benchmarking/nemotron/.*@v25\.(0[4-9]|1)"
"""Sources on NeMo 2, whose squared ReLU is not compiled; NeMo 1 compiles it."""

EAGER_ACTIVATION_SOURCE = (
    "NVIDIA/NeMo v2.2.0 nemo/collections/llm/fn/activation.py squared_relu (its decorator is commented out), "
    "nlp/modules/common/megatron/utils.py (torch.compile); read 2026-11-22"
)


def eager_activation(row: Row) -> bool:
    """Whether the activation of a Nemotron runs op by op."""
    return row.framework.lower() == "nemo" and bool(re.search(EAGER_ACTIVATION, (row.source or "").lower()))


PACKED = r"dgxc-benchmarking/llama3/finetuning|performance_summary.* finetuning 24\.07"
"""Sources of fine-tuning on packed sequences: of SQuAD (NVIDIA/NeMo v2.1.0 nemo/collections/llm/recipes/llama3_8b.py
finetune_recipe in performance mode, SquadDataModule); and NeMo 24.07's (NVIDIA/NeMo-Framework-Launcher 24.07 examples/
peft/llama/h100: packed_sequence=true), whose data are not named, but whose own count of FLOPs a token leaves 0.2 of the
39.8 GFLOP of Llama 2 7B to attention, as sequences of 100 to 250 tokens do and those of 4096 (3 to 6) do not. Read
2026-11-22 and -23."""

PACKED_LENGTH = 256
"""Tokens of a sequence in a pack: SQuAD's paragraphs have some 120 words and questions 10 (Rajpurkar et al. 2016).
Attention over 128 or 512 tokens changes the step by under 1 %."""


def packed(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with the sequences that attention stays within, where a sequence is a pack of them."""
    source = f"{row.source or ''} {row.section or ''}".lower()
    times = (row.seq_len or 0) // PACKED_LENGTH
    if row.framework.lower() != "nemo" or not re.search(PACKED, source) or times < 2 or not row.global_batch:
        return row, ()
    note = f"each sequence a pack of {times} of {PACKED_LENGTH} tokens, as SQuAD's are"
    micro = None if row.micro_batch is None else row.micro_batch * times
    return replace(row, seq_len=PACKED_LENGTH, global_batch=row.global_batch * times, micro_batch=micro), (note,)


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


SHARDING = (
    (r"dgxc-benchmarking/paxml/readme_5b", 0, 8),
    (r"dgxc-benchmarking/paxml/readme_175b", 0, 128),
    (r"dgxc-benchmarking/maxtext", 512, 128),
)
"""(pattern of source, devices from which on it holds, ranks that share parameters; the rest are copies): dcn_FSDP of
maxtext/configure.sh, which is 16 nodes from 64 nodes on; FSDP of paxml/configure.sh."""


def sharding_ranks(row: Row) -> int:
    """Ranks that parameters are divided over under MaxText and Paxml; 0 for what the row says."""
    source, devices = (row.source or "").lower(), row.num_devices or 0
    return next((n for pattern, least, n in SHARDING if re.search(pattern, source) and devices >= least), 0)

"""What the scripts that a source ran say where its page, and so the row, does not: sizes, lengths and batches.

`with_script_facts(row)` returns the row with the columns filled in that the script, recipe or paper named beside each
entry settles, and notes. A column that the row gives is kept, but for the few that an entry corrects. Leaves out
what has a file of its own: Megatron-LM's tests, NVIDIA's scripts, NeMo AutoModel's recipes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from evidence.published.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What is known of the rows that a pattern finds."""

    rows: str
    """Pattern of source, section and model, in lower case, with a bar between."""
    gives: Mapping[str, Any]
    """Columns that the rows leave out."""
    corrects: Mapping[str, Any] | None = None
    """Columns that hold another value than what ran."""
    program: str = ""
    """What to read beside the framework's name: whose model it runs."""
    source: str
    """Where it was read."""


JEAN_ZAY = (
    "bigscience-workshop/bigscience 9e64ede experiments/gpt2-meg/*.slurm, gpt2-meg-ds-3d, gpt2-hf-ds: sizes by MSIZE, "
    "32 heads; read 2026-11-23"
)
_BY_MSIZE = {
    r"7|7\.5": (4096, 36), "14": (6144, 32), "18": (6144, 40), "25": (7168, 40), "30": (7168, 48), "39": (8192, 48),
    "50|52": (8192, 64), "65": (9216, 64), "81": (10240, 64), "97": (11264, 64), "116": (12288, 64),
    "136": (13312, 64), "158": (14336, 64), "181": (15360, 64), "206": (16384, 64),
}  # fmt: skip
"""Billions of parameters in a row's name -> width and layers; 50 is what its pages call 52 elsewhere."""

MAXTEXT_V4 = (
    "AI-Hypercomputer/maxtext 281e04bf3 (2023-04-27, whose page first has these figures) MaxText/configs/1xv4-128.sh, "
    "1xv4-384.sh, base.yml, layers.py: sequences of 1024, attention by products; FlashAttention is of 5b0e28e04 "
    "(2023-09-11); read 2026-11-23"
)
MAXTEXT_FIRST = (
    "AI-Hypercomputer/maxtext 76bd53b0f (2023-12-15, with the page of these figures) MaxText/configs/v5*/*.sh, which "
    "later commits changed; read 2026-11-23"
)

SCRIPTS = (
    *(
        Script(
            rows=rf"bigscience/experiments/gpt2\.md\|.*\|gpt2-(?:{size})b$",
            gives={"hidden": hidden, "layers": layers, "heads": 32, "kv_heads": "32", "vocab": 50_257,
                   "interconnect": "4 Omni-Path 100 Gb/s"},
            source=JEAN_ZAY,
        )
        for size, (hidden, layers) in _BY_MSIZE.items()
    ),
    Script(
        rows=r"bigscience/experiments/gpt2\.md\|.*(?:full|optim) offload",
        gives={"offload": "optimizer"},
        source="bigscience-workshop/bigscience 9e64ede experiments/gpt2-hf-ds/*_offl.slurm: offload_optimizer (and, in "
        "full, offload_param, which is left out); read 2026-11-23",
    ),
    Script(
        rows=r"tr11-176b-ml/chronicles-prequel\.md\|choosing the fastest",
        gives={"heads": 96},
        source="bigscience-workshop/bigscience 0b536e8 to 217dc6c (2022-02-06 to 02-17) train/tr11-200B-ml/"
        "tr11-200B-ml.slurm: NHEADS=96 beside NHIDDEN=14400; read 2026-11-23",
    ),
    Script(
        rows=r"tr11-176b-ml/chronicles-prequel\.md\|tile and wave.*187b",
        gives={"heads": 64},
        source="the page's next table, which has this model with 64 heads",
    ),
    *(
        Script(
            rows=rf"megatron-lm-v1\.md\|.*\|gpt2-{size}b$",
            gives={"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": str(heads), "vocab": 51_200,
                   "seq_len": 1024, "micro_batch": 8, "recompute": "full"},
            source="Shoeybi et al. 2019 (arXiv 1909.08053), sections 4 and 5.1: configurations for scaling, a batch of "
            "8 in one pass, each layer checkpointed",
        )
        for size, (layers, hidden, heads) in {
            r"1\.2": (40, 1536, 16), r"2\.5": (54, 1920, 20), r"4\.2": (64, 2304, 24), r"8\.3": (72, 3072, 32)
        }.items()
    ),
    Script(
        rows=r"nemo/docs/source/performance/performance_long_sequence\.md",
        gives={"micro_batch": 1, "zero_or_fsdp": "zero1(distributed optimizer)"},
        source="NVIDIA/NeMo-Framework-Launcher 24.07 launcher_scripts/conf/training/llama/llama2_7b.yaml and "
        "llama3_1_8b.yaml: micro_batch_size 1, mcore_distributed_optim; read 2026-11-23",
    ),
    Script(
        rows=r"colossalai-pytorch-lightning/benchmark/gpt",
        gives={"seq_len": 1024, "vocab": 50_257, "recompute": "full", "flash_attention": "no"},
        program="transformers",
        source="hpcaitech/ColossalAI-Pytorch-lightning afbfdaf benchmark/gpt: --seq_len 1024, checkpoints unless "
        "--no_activation_ckpt, GPT2LMHeadModel; read 2026-11-23",
    ),
    Script(
        rows=r"gpu-recipes/training/a4/llama3-1-405b/maxtext",
        gives={"seq_len": 8192, "global_batch": 512, "precision": "fp8", "recompute": "full",
               "zero_or_fsdp": "fsdp=128", "flash_attention": "yes"},
        source="AI-Hypercomputer/gpu-recipes 2850f84 (2025-03-20, in eight bits alone) src/frameworks/a4/"
        "maxtext-configs/llama3-1-405b-256gpus-a4-fp8.yaml; read 2026-11-23",
    ),
    Script(
        rows=r"primus_pipeline\.md\|llama2 7b",
        gives={"seq_len": 4096, "tp": 1, "micro_batch": 1, "global_batch": 32, "recompute": "none"},
        corrects={"layers": 16},
        source="AMD-AGI/Primus fd1eeab tests/trainer/test_megatron_trainer_zero_bubble.yaml: 16 layers, which the "
        "page's FLOPs a token confirm; read 2026-11-23",
    ),
    *(
        Script(
            rows=rf"configs/tpu/v4/readme\.md\|.*\|maxtext-{size}b$",
            gives={"seq_len": 1024, "vocab": 32_768},
            corrects={"micro_batch": each, "flash_attention": "no"},
            source=MAXTEXT_V4,
        )
        for size, each in ((22, 16), (52, 10))
    ),
    *(
        Script(
            rows=rf"configs/tpu/{tpu}/readme\.md\|.*\|maxtext-{size}b$", gives={}, corrects=ran, source=MAXTEXT_FIRST
        )
        for tpu, size, ran in (
            ("v5e", 128, {"recompute": "full"}),
            ("v5p", 32, {"micro_batch": 8}),
            ("v5p", 64, {"micro_batch": 4}),
            ("v5p", 128, {"micro_batch": 2}),
            ("v5p", 256, {"micro_batch": 2}),
            ("v5p", 512, {"tp": 16}),
            ("v5p", 1024, {"micro_batch": 2, "tp": 16}),
        )
    ),
    *(
        Script(
            rows=rf"projection\.md\|{device}.*\|llama 3\.1 70b",
            gives={"recompute": f"full block num_layers={layers}"},
            source=f"AMD-AGI/Primus fd1eeab examples/megatron/configs/{device.upper()}/llama3.1_70B-*.yaml; read "
            "2026-11-23",
        )
        for device, layers in (("mi300x", 80), ("mi325x", 72), ("mi355x", 80))
    ),
    Script(
        rows=r"projection\.md\|mi355x.*8-node.*\|mixtral 8.22b",
        gives={"global_batch": 256},
        source="AMD-AGI/Primus fd1eeab examples/megatron/configs/MI355X/mixtral_8x22B_v0.1-BF16-pretrain.yaml: 8 "
        "microbatches a rank on the fewest devices that pp 4 and ep 8 allow; read 2026-11-23",
    ),
)  # fmt: skip
"""What scripts and papers say of published rows."""


def with_script_facts(row: Row) -> tuple[Row, tuple[str, ...]]:
    """The row with what its script settles, and what that was."""
    notes: list[str] = []
    key = "|".join((row.source or "", row.section or "", row.model)).lower()
    for script in SCRIPTS:
        if not re.search(script.rows, key):
            continue
        fill = {name: value for name, value in script.gives.items() if getattr(row, name) is None}
        fill |= script.corrects or {}
        fill |= {"framework": f"{row.framework}, {script.program}"} if script.program else {}
        if fill:
            row = replace(row, **fill)
            notes.append(f"{', '.join(sorted(fill))}: {script.source}")
    return _whole_stages(row, notes), tuple(notes)


VOCABULARY_OF_BLOOM = 250_880
BY_STAGE = r"tr11-176b-ml/chronicles-prequel\.md"
"""Page that names models by parameters alone, with as many layers on each stage as on every other."""


def _whole_stages(row: Row, notes: list[str]) -> Row:
    """Layers by the parameters that a model is named by: 12 h² each beside the embedding, as many on each stage."""
    known = re.search(BY_STAGE, (row.source or "").lower()) and row.hidden and row.params_b and row.pp
    if not known or row.layers is not None:
        return row
    embedding, each = VOCABULARY_OF_BLOOM * (row.hidden or 0), 12 * (row.hidden or 0) ** 2
    stages = row.pp or 1
    layers = round((1e9 * (row.params_b or 0.0) - embedding) / each / stages) * stages
    notes.append(f"{layers} layers: what {row.params_b:g} billion parameters leave, as many on each stage")
    return replace(row, layers=layers)

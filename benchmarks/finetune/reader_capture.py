"""A model's config.json as its reader has it, against the same model captured from transformers' code.

    python benchmarks/finetune/reader_capture.py           # 34 types; writes results/reader_capture.md
    python benchmarks/finetune/reader_capture.py --only llama,qwen3_moe

Each type of transformers is made from a config of middle size, without weights. Its reader's Graph is priced as
transformers' own modules run it (norms, activations and loss op by op), the captured one as it was recorded, its loss
alone returned, as Trainer keeps it; both with one plan on one A100, in bf16. A row is right where matmul FLOPs of a
step are within 5 %, and bytes of tensors at the peak within 3 %. Nothing is measured: the two ways to read one model
must agree, whatever a device does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results" / "reader_capture.md"
BATCH, LENGTH, VOCAB = 4, 1024, 16384
TYPES = (
    "arcee bloom codegen cohere cohere2 exaone4 gemma gemma2 gemma3_text glm gpt2 gpt_neo gpt_neox gptj granite "
    "helium llama mistral olmo olmo2 opt phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2 "
    "mixtral qwen2_moe qwen3_moe olmoe"
).split()
SIZES = {
    "hidden_size": 1024, "n_embd": 1024, "d_model": 1024, "word_embed_proj_dim": 1024, "intermediate_size": 2816,
    "n_inner": 4096, "ffn_dim": 4096, "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4,
    "num_attention_heads": 16, "n_head": 16, "num_heads": 16, "attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 64, "rotary_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 2048, "n_positions": 2048,
    "moe_intermediate_size": 704, "shared_expert_intermediate_size": 704, "num_experts": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
MEMORY, FLOPS = 0.03, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One type."""

    kind: str
    read: tuple[float, float]
    """(bytes of tensors at the peak, matmul FLOPs of a step) by the reader."""
    captured: tuple[float, float]
    """The same of the captured module."""
    note: str = ""

    @property
    def off(self) -> tuple[float, float]:
        return self.read[0] / self.captured[0] - 1, self.read[1] / self.captured[1] - 1

    @property
    def right(self) -> bool:
        return abs(self.off[0]) <= MEMORY and abs(self.off[1]) <= FLOPS


def config_of(kind: str) -> Any:
    """A config of middle size."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(kind)
    for name, size in SIZES.items():
        if isinstance(vars(config).get(name), int):
            setattr(config, name, size)
    for name in list(vars(config)):
        if name.endswith(("_dropout", "_pdrop", "dropout")) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
        if name.endswith("token_id") and isinstance(getattr(config, name), int):
            setattr(config, name, 1)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: SIZES["num_hidden_layers"]]
    if kind == "gpt_neo":
        config.attention_types = [[["global", "local"], 2]]
        config.attention_layers = ["global", "local"] * 2
    config.use_cache = False
    return config


def compared(kind: str) -> Row:
    """Both ways to read a type."""
    import torch
    from transformers import AutoModelForCausalLM

    from gnomon.formats.given import network_graph
    from gnomon.formats.huggingface.read import read_hf_config
    from gnomon.formats.trainers import BF16, Modules
    from gnomon.frontend.capture import captured
    from gnomon.hardware import parse_cluster
    from gnomon.plans import Plan, Schedule, Workload
    from gnomon.prediction import predict
    from gnomon.software import stack

    config = config_of(kind)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros((BATCH, LENGTH), dtype=torch.int64)

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
            return loss

    example = {"input_ids": ids, "labels": ids.clone()}
    graph = captured(Loss(), example, name=kind, dtype=torch.bfloat16).graph
    values = {k: v for k, v in config.to_dict().items() if v is not None}
    read = read_hf_config(json.dumps({**values, "architectures": [type(model).__name__]}), kind)
    how = getattr(config, "_experts_implementation", None)
    experts = {"grouped_mm": "grouped"}.get(str(how), "stacked")
    modules = Modules(fused=False, loss="unfused", compiled=False, experts=experts)  # type: ignore[arg-type]
    record = stack("pytorch-fsdp")
    plan = Plan(schedule=Schedule(micro_batch_size=BATCH), precision=BF16)
    work = Workload(global_batch_size=BATCH, seq_len=LENGTH)
    found = []
    by_reader = network_graph(read.graph if read.config is None else read.config)
    for one, software in ((by_reader, modules.of(record, by_reader)), (graph, record)):
        made = predict(one, parse_cluster("1x1xa100-sxm-80gb"), plan, work, software)
        by_class = made.tightest.by_class
        tensors = sum(size for name, size in by_class.items() if name not in ("workspace", "overhead"))
        found.append((float(tensors), float(made.model_flops)))
    return Row(kind=kind, read=found[0], captured=found[1])


def rows(kinds: list[str]) -> Iterator[Row | str]:
    from gnomon.errors import GnomonError

    for kind in kinds:
        try:
            yield compared(kind)
        except GnomonError as error:
            yield f"{kind}: {error}"


def line(row: Row) -> str:
    memory, flops = row.off
    sign = "" if row.right else "  <- off"
    return (
        f"{row.kind:<14} {row.read[0] / 2**20:9.1f} {row.captured[0] / 2**20:9.1f} MiB {memory:+7.1%}"
        f" {row.read[1] / 1e12:8.3f} {row.captured[1] / 1e12:8.3f} TFLOP {flops:+7.1%}{sign}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="types, by commas")
    asked = parser.parse_args()
    began, made, failed = time.process_time(), list[Row](), list[str]()
    for row in rows(asked.only.split(",") if asked.only else TYPES):
        print(line(row) if isinstance(row, Row) else row, flush=True)
        made += [row] if isinstance(row, Row) else []
        failed += [row] if isinstance(row, str) else []
    right = sum(row.right for row in made)
    summary = f"{right} of {len(made)} types agree (memory {MEMORY:.0%}, FLOPs {FLOPS:.0%})"
    print(summary)
    if not asked.only:
        import transformers

        text = [
            "# Readers against captured modules",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}. `python benchmarks/finetune/reader_capture.py`, "
            f"{time.process_time() - began:.0f} CPU seconds; Python {python_version()}, "
            f"transformers {transformers.__version__}.",
            f"{BATCH} sequences of {LENGTH} tokens, bf16, AdamW; bytes of tensors at the peak and matmul FLOPs of a",
            "step: as the reader of config.json has them, as captured.",
            "",
            *(f"    {line(row)}" for row in made),
            *(f"    {one}" for one in failed),
            "",
            f"{summary}.",
            "",
        ]
        RESULTS.write_text("\n".join(text), encoding="utf-8")
    return 0 if right == len(made) else 1


if __name__ == "__main__":
    sys.exit(main())

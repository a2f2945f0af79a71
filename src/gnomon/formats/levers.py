"""What people change to make a fine-tuning job fit or run faster, and how each trainer's file says it: one table.

`LEVERS` has a row for each: the setting of every program that has it, as its file or command says it, whether it is
priced, and the option of `gnomon fit` that offers it. `table()` prints it (docs/levers.md); a test reads each setting
with its program's reader. Leaves out what the settings mean (`trainers`, `trainer_optimizers`, the programs' folders).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gnomon.errors import InputError

PROGRAMS = ("llama-factory", "axolotl", "trl", "transformers", "swift", "torchtune", "deepspeed", "accelerate")
"""Of which settings are listed, by the names of their formats; Unsloth's are those of the trainers that call it."""

Priced = Literal["yes", "in part"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One change, and how programs are told of it."""

    name: str
    settings: Mapping[str, str]
    """Program -> its settings between semicolons, as `key: value` of its file, dots for tables within tables."""
    option: str = ""
    """The option of `gnomon fit` that offers it, where the job's program has it; empty for what only files ask for."""
    priced: Priced = "yes"
    without: str = ""
    """What of it has no price, where it is priced in part."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Programs that are not trainers around transformers -> their setting."""

    def __post_init__(self) -> None:
        if unknown := [program for program in self.settings if program not in PROGRAMS]:
            raise InputError(f"lever {self.name!r} names {unknown[0]!r}, which is none of {', '.join(PROGRAMS)}")
        if (self.priced == "in part") != bool(self.without):
            raise InputError(f"lever {self.name!r}: say what has no price where it is priced in part, and only there")


def _hugging(text: str, **settings: str) -> dict[str, str]:
    """A setting of TrainingArguments, which these four have alike."""
    shared = {"llama-factory": text, "trl": text, "transformers": text, "swift": text}
    return {**shared, **{name.replace("_", "-"): value for name, value in settings.items()}}


def _deepspeed(named: str, llama_factory: str, axolotl: str) -> dict[str, str]:
    """A DeepSpeed configuration: the files that LLaMA-Factory and axolotl ship, ms-swift's own name for one of its
    files. transformers and TRL ship none: the path of a JSON of one's own (transformers' HfDeepSpeedConfig takes a path
    that exists, or a table)."""
    return {
        "llama-factory": f"deepspeed: examples/deepspeed/{llama_factory}",
        "trl": f"deepspeed: my_{named}.json",
        "transformers": f"deepspeed: my_{named}.json",
        "swift": f"deepspeed: {named}",
        "axolotl": f"deepspeed: deepspeed_configs/{axolotl}",
    }


LIGER = "use_liger_kernel: true"
PLUGIN = "plugins: [axolotl.integrations.liger.LigerPlugin]"
ATTENTION = "model.lora_attn_modules: [q_proj]"
SHARDED = {"deepspeed": "zero_optimization.stage: 3", "accelerate": "fsdp_config.fsdp_sharding_strategy: FULL_SHARD"}

# One row a lever that people know by name: what docs, `gnomon fit` and tests of readers all go through.
LEVERS = (
    Lever(
        name="fused linear cross-entropy (Liger, CCE)",
        option="chunked_loss",
        settings={
            **_hugging(LIGER, axolotl=f"{PLUGIN}; liger_fused_linear_cross_entropy: true"),
            "llama-factory": "enable_liger_kernel: true",
            "trl": "loss_type: chunked_nll",
            "torchtune": "loss._component_: torchtune.modules.loss.LinearCrossEntropyLoss",
        },
    ),
    Lever(
        name="cross-entropy of whole logits as one kernel",
        settings={"axolotl": f"{PLUGIN}; liger_cross_entropy: true"},
        others={"megatron": "--cross-entropy-loss-fusion"},
    ),
    Lever(
        name="cross-entropy over whole logits, chunk by chunk",
        settings={"torchtune": "loss._component_: torchtune.modules.loss.CEWithChunkedOutputLoss"},
    ),
    Lever(
        name="norms and activations as one kernel each (Liger)",
        settings={
            **_hugging(LIGER, axolotl=f"{PLUGIN}; liger_rms_norm: true"),
            "llama-factory": "enable_liger_kernel: true",
        },
    ),
    Lever(
        name="torch.compile",
        settings=_hugging("torch_compile: true", axolotl="torch_compile: true", torchtune="compile: true"),
    ),
    Lever(name="Unsloth's kernels", settings={"llama-factory": "use_unsloth: true"}),
    Lever(
        name="8-bit optimizer states",
        option="eight_bit_states",
        settings=_hugging(
            "optim: adamw_bnb_8bit",
            axolotl="optimizer: adamw_bnb_8bit",
            torchtune="optimizer._component_: bitsandbytes.optim.AdamW8bit",
        ),
    ),
    Lever(
        name="4-bit optimizer states",
        option="four_bit_states",
        settings=_hugging("optim: adamw_torch_4bit", axolotl="optimizer: ao_adamw_4bit"),
    ),
    Lever(
        name="paged optimizer states",
        option="paged_states",
        settings=_hugging(
            "optim: paged_adamw_32bit",
            axolotl="optimizer: paged_adamw_8bit",
            torchtune="optimizer._component_: bitsandbytes.optim.PagedAdamW8bit",
        ),
    ),
    Lever(
        name="Adafactor",
        settings=_hugging("optim: adafactor", axolotl="optimizer: adafactor"),
    ),
    Lever(
        name="GaLore",
        option="low_rank",
        settings={
            "llama-factory": "use_galore: true; galore_rank: 64",
            "axolotl": "optimizer: galore_adamw; optim_target_modules: [attn, mlp]",
            "trl": "optim: galore_adamw; optim_target_modules: [attn, mlp]; optim_args: rank=64",
            "transformers": "optim: galore_adamw; optim_target_modules: all-linear",
            "swift": "use_galore: true; galore_rank: 64",
        },
    ),
    Lever(
        name="APOLLO",
        option="low_rank",
        settings={
            "llama-factory": "use_apollo: true; apollo_rank: 64",
            "axolotl": "optimizer: apollo_adamw; optim_target_modules: [attn, mlp]",
            "trl": "optim: apollo_adamw; optim_target_modules: [attn, mlp]",
            "transformers": "optim: apollo_adamw; optim_target_modules: all-linear",
        },
    ),
    Lever(
        name="updates within the backward",
        settings={
            "llama-factory": "use_galore: true; galore_layerwise: true",
            "trl": "optim: galore_adamw_layerwise; optim_target_modules: [attn, mlp]",
            "transformers": "optim: galore_adamw_layerwise; optim_target_modules: [attn, mlp]",
            "torchtune": "optimizer_in_bwd: true",
        },
    ),
    Lever(
        name="LoRA",
        option="adapters",
        settings={
            "llama-factory": "finetuning_type: lora; lora_rank: 8",
            "axolotl": "adapter: lora; lora_r: 8; lora_target_linear: true",
            "trl": "use_peft: true; lora_r: 8",
            "transformers": "use_lora: true; lora_r: 8",
            "swift": "tuner_type: lora; lora_rank: 8",
            "torchtune": "model._component_: torchtune.models.llama3_2.lora_llama3_2_1b; " + ATTENTION,
        },
    ),
    Lever(
        name="QLoRA",
        option="adapters_nf4",
        settings={
            "llama-factory": "finetuning_type: lora; quantization_bit: 4",
            "axolotl": "adapter: qlora; load_in_4bit: true; lora_target_linear: true",
            "trl": "use_peft: true; load_in_4bit: true",
            "transformers": "use_lora: true; bits: 4",
            "swift": "tuner_type: lora; quant_bits: 4",
            "torchtune": "model._component_: torchtune.models.llama3_2.qlora_llama3_2_1b; " + ATTENTION,
        },
    ),
    Lever(
        name="LoRA on eight bits",
        settings={
            "llama-factory": "finetuning_type: lora; quantization_bit: 8",
            "axolotl": "adapter: lora; load_in_8bit: true; lora_target_linear: true",
            "trl": "use_peft: true; load_in_8bit: true",
            "transformers": "use_lora: true; bits: 8",
            "swift": "tuner_type: lora; quant_bits: 8",
        },
    ),
    Lever(
        name="DoRA",
        priced="in part",
        without="the norms of adapted weights in each forward",
        settings={
            "llama-factory": "finetuning_type: lora; use_dora: true",
            "axolotl": "adapter: lora; peft_use_dora: true; lora_target_linear: true",
            "trl": "use_peft: true; use_dora: true",
            "swift": "tuner_type: lora; use_dora: true",
            "torchtune": "model._component_: torchtune.models.llama3_2.dora_llama3_2_1b; " + ATTENTION,
        },
    ),
    Lever(
        name="frozen layers",
        option="some_layers",
        settings={
            "llama-factory": "finetuning_type: freeze; freeze_trainable_layers: 2",
            "axolotl": "unfrozen_parameters: ['^model.layers.1[0-9]+']",
            "swift": "freeze_parameters_ratio: 0.5",
        },
    ),
    Lever(
        name="frozen embeddings",
        settings={
            "axolotl": "unfrozen_parameters: ['^model.layers', '^model.norm']",
            "swift": "freeze_parameters: [model.embed_tokens]",
        },
    ),
    Lever(
        name="activation checkpointing",
        option="recompute",
        settings={
            "llama-factory": "disable_gradient_checkpointing: false",
            "axolotl": "gradient_checkpointing: true",
            "trl": "gradient_checkpointing: true",
            "transformers": "gradient_checkpointing: true",
            "swift": "gradient_checkpointing: true",
            "torchtune": "enable_activation_checkpointing: true",
            "accelerate": "fsdp_config.fsdp_activation_checkpointing: true",
        },
        others={"megatron": "--recompute-granularity full", "torchtitan": "activation_checkpoint.mode"},
    ),
    Lever(
        name="checkpoints on the host",
        option="input_offload",
        settings={
            "llama-factory": "use_unsloth_gc: true; disable_gradient_checkpointing: false",
            "axolotl": "gradient_checkpointing: offload",
            "trl": "activation_offloading: true; gradient_checkpointing: true",
            "torchtune": "enable_activation_offloading: true; enable_activation_checkpointing: true",
        },
    ),
    Lever(
        name="ZeRO and FSDP",
        option="zero",
        settings={
            **_deepspeed("zero3", "ds_z3_config.json", "zero3_bf16.json"),
            **SHARDED,
        },
    ),
    Lever(
        name="optimizer on the host (DeepSpeed)",
        option="optimizer_offload",
        settings={
            **_deepspeed("zero2_offload", "ds_z2_offload_config.json", "zero2.json"),
            "deepspeed": "zero_optimization.stage: 2; zero_optimization.offload_optimizer.device: cpu",
        },
    ),
    Lever(
        name="parameters on the host",
        option="parameter_offload",
        settings={
            "deepspeed": "zero_optimization.stage: 3; zero_optimization.offload_param.device: cpu",
            "axolotl": "deepspeed: deepspeed_configs/zero3_bf16_cpuoffload_params.json",
        },
    ),
    Lever(
        name="all of it on the host (FSDP)",
        option="cpu_offload",
        settings={
            "axolotl": "fsdp: [full_shard, auto_wrap]; fsdp_config.offload_params: true",
            "trl": "fsdp: full_shard auto_wrap offload",
            "transformers": "fsdp: full_shard auto_wrap offload",
            "llama-factory": "fsdp: full_shard auto_wrap offload",
            "swift": "fsdp: full_shard auto_wrap offload",
            "torchtune": "fsdp_cpu_offload: true",
            "accelerate": "fsdp_config.fsdp_offload_params: true",
        },
    ),
    Lever(
        name="sequences over ranks (Ulysses)",
        settings={"swift": "sequence_parallel_size: 2", "trl": "parallelism_config.sp_size: 2"},
        option="cp",
    ),
    Lever(
        name="sequences over ranks (ring, gathered keys)",
        option="cp",
        settings={
            "axolotl": "context_parallel_size: 2",
            "trl": "parallelism_config.cp_size: 2",
            "torchtune": "context_parallel_dim: 2",
        },
    ),
    Lever(
        name="sample packing",
        priced="in part",
        without="attention between packed samples where the program leaves it out",
        settings={
            "llama-factory": "packing: true",
            "axolotl": "sample_packing: true",
            "trl": "packing: true",
            "swift": "packing: true",
            "torchtune": "dataset.packed: true",
        },
    ),
    Lever(
        name="padding-free batches",
        priced="in part",
        without="shorter batches, whose lengths --lengths gives",
        settings={"swift": "padding_free: true", "trl": "padding_free: true"},
    ),
    Lever(
        name="TF32",
        option="tf32",
        settings={
            "trl": "tf32: true",
            "transformers": "tf32: true",
            "swift": "torch_dtype: float32; tf32: true",
            "axolotl": "bf16: false; tf32: true",
        },
    ),
    Lever(
        name="experts as one grouped product",
        settings={**_hugging("experts_implementation: grouped_mm"), "axolotl": "experts_implementation: grouped_mm"},
        others={"megatron": "--moe-grouped-gemm"},
    ),
)


def table() -> str:
    """The table as text: a lever, what of it is priced, `gnomon fit`'s option, and each program's setting below."""
    lines = [f"{'lever':52} {'priced':8} fit"]
    for lever in LEVERS:
        lines.append(f"{lever.name:52} {lever.priced:8} {lever.option or '-'}")
        lines += [
            f"    {program:14} {written}" for program, written in (*lever.settings.items(), *lever.others.items())
        ]
        lines += [f"    without {lever.without}"] if lever.without else []
    return "\n".join(lines)

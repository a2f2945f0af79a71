"""TRL's YAML files, and those of alignment-handbook, open-r1 and other scripts around transformers' Trainer.

What a key means was read from huggingface/trl (2026-08) trl/trainer/{model,sft,dpo,grpo}_config.py,
huggingface/alignment-handbook and huggingface/open-r1 src/. Sharding is the launcher's (`accelerate launch`) and so not
in the file. Leaves out generation, rewards and reference models, which are listed.
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Given, Network
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.trainers import (
    Training,
    adapted,
    by_deepspeed,
    flag,
    job_of,
    model_of,
    names_of,
    optimizer_of,
)
from gnomon.formats.training_arguments import INEXPRESSIBLE as TRAINER
from gnomon.formats.training_arguments import IRRELEVANT, precision_of, sharded
from gnomon.formats.yaml_file import read_yaml

NEUTRAL = IRRELEVANT | frozenset(
    """
    torch_dtype dtype lora_alpha lora_dropout lora_task_type lora_modules_to_save max_grad_norm beta loss_type reward_*
    num_train_epochs temperature top_* code_* benchmarks callbacks system_prompt hub* format_reward* wandb* cosine_*
    repetition_* parallel_code_* e2b_* morph_* dataset_* dataset_mixer* dataset_splits* padding_free_* eos_token
    bnb_4bit_* use_bnb_nested_quant unsloth_tiled_mlp log_completions log_unique_prompts num_completions_to_print
    max_prompt_length mask_truncated_completions scale_rewards prompt_column epsilon* min_p repetition_penalty vllm_*
    truncation_mode precompute_ref_* sync_ref_model ref_model_* model_adapter_name ref_adapter_name
    """.split()
)

INEXPRESSIBLE = {
    **TRAINER,
    "padding_free": "no padding: less work than full sequences",
    "use_vllm": "generation, which is not priced",
    "num_generations": "generation is not priced; its answers are sequences of the batch",
    "activation_offloading": "saved activations wait on the host",
    "load_in_8bit": "frozen weights in eight bits; read in the compute dtype, so memory is too large",
}

ROLLOUT = "reinforcement learning: generation, rewards and the reference model are not priced, only the update"
PAIRS = "preference learning: two answers a sample and a reference model run forward are not priced"


def _looks(sample: Sample) -> bool:
    trainer = any(sample.has(key) for key in ("per_device_train_batch_size", "max_seq_length", "max_length"))
    factory = sample.has("finetuning_type") or sample.has("stage")
    return sample.has("model_name_or_path") and trainer and not factory


def _model(f: Fields, given: Given, folder: Path, assumed: list[str]) -> Network | str:
    model = model_of(f, "model_name_or_path", given, folder, assumed)
    four = flag(f, "load_in_4bit")
    rank, targets = f.integer("lora_r", 16), names_of(f.raw("lora_target_modules"))
    if not flag(f, "use_peft"):
        return model
    everything = () if "all-linear" in targets else targets or ("q_proj", "v_proj")
    return adapted(f, model, rank, everything, four_bits=four, named="lora_target_modules")


def _length(f: Fields, given: Given, assumed: list[str]) -> int:
    """max_length or max_seq_length; prompt and answer of a rollout."""
    for key in ("max_seq_length", "max_length"):
        if f.has(key):
            f.ignore("max_seq_length", "max_length")
            return f.integer(key)
    if f.has("max_completion_length") or f.has("num_generations"):
        return f.integer("max_prompt_length", 512) + f.integer("max_completion_length", 256)
    if given.seq_len is None:
        assumed.append("the file does not say the sequence length: 1024 tokens, TRL's default (--seq-len)")
    return 1024


def _read(path: Path, given: Given) -> Job:
    text, file = read_source(path)
    f = Fields(flatten(read_yaml(text, file)), file, given)
    folder, assumed = path.resolve().parent, list[str]()
    seq_len = _length(f, given, assumed)
    loaded = f.raw("torch_dtype") or f.raw("dtype")
    if f.has("num_generations") or f.has("reward_funcs") or f.has("max_completion_length"):
        f.note_default("reward_funcs", str(f.peek("reward_funcs")), ROLLOUT)
    elif f.has("beta") or f.has("loss_type") or "dpo" in str(path).lower():
        f.note_default("beta", str(f.peek("beta")), PAIRS)
    elif not flag(f, "packing"):
        f.note_default("packing", "false", f"samples are as long as they are; priced as all of {seq_len} tokens")
    f.ignore("packing", "max_completion_length")
    asked = Training(
        model=_model(f, given, folder, assumed),
        micro=f.integer("per_device_train_batch_size", 8),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=seq_len,
        recompute=flag(f, "gradient_checkpointing"),
        precision=precision_of(f, loaded=None if loaded is None else str(loaded)),
        optimizer=optimizer_of(f, "optim", "adamw_torch"),
    )
    asked = sharded(f, asked)
    by_file = f.peek("deepspeed") or None
    f.ignore("deepspeed")
    f.account(NEUTRAL, INEXPRESSIBLE, ())
    if by_file is not None:
        return by_deepspeed(f, given, asked, "deepspeed", folder, assumed)
    if not asked.zero:
        assumed.append("sharding is its launcher's: replicas (--set deepspeed=zero3, or --set fsdp=full_shard)")
    return job_of(f, given, asked, assumed)


FORMAT = Format(
    name="trl",
    program="huggingface/trl, alignment-handbook, open-r1 (2026-08)",
    files="YAML of TRL's scripts",
    looks=_looks,
    read=_read,
)

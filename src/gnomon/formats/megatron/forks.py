"""Options of Megatron-LM's forks: which change nothing of a step, which have no place in a plan, how stages are cut.

Read from bigscience-workshop/Megatron-DeepSpeed 8387ae17c4 (megatron/arguments.py, model/gpt_model.py), deepspeedai/
Megatron-DeepSpeed 4efb479d53 (megatron/arguments.py), deepspeedai/DeepSpeed (runtime/pipe/module.py _partition_layers,
runtime/utils.py partition_balanced), alibaba/Pai-Megatron-Patch a098ca5acb (megatron_patch/arguments.py,
megatron_patch/tokenizer/__init__.py), THUDM/slime 624b824a89 (slime/utils/arguments.py), ROCm/Megatron-LM 2b855bafe2.
Leaves out: what rollouts of reinforcement learning cost, and what a fork's own modules compute.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

IRRELEVANT = frozenset(
    """
    kill_switch_path abort_on_unmet_fused_kernel_constraints *_weighted_split_paths* codecarbon_dir
    tokenizer_name_or_path
    patch_tokenizer_type train_data valid_data dataset dataset_ratios_path epochs keep_last
    train_mode task reset_progress norm_target_loss gt_path override_opt_param_scheduler override_lr_scheduler
    universal_checkpoint output_meg_ds_ratio_file skip_train_iteration_range inference log_level log_level_replica
    use_distributed_checkpoint gradient_accumulation_steps deepspeed_checkpoint use_legacy_models
    rollout_* num_rollout* actor_num_* critic_num_* ref_* hf_checkpoint hf_token sglang_* prompt_data input_key
    label_key
    apply_chat_template* n_samples_per_* num_steps_per_rollout use_wandb wandb* advantage_estimator use_kl_loss kl_*
    entropy_coef eps_clip* rm_* reward_* colocate balance_data over_sampling_* dynamic_sampling_* partial_rollout
    eval_prompt_data use_tis tis_* opd_* dump_details custom_* megatron_to_hf_mode multimodal_keys loss_mask_type
    debug_* global_dataset_shuffle metadata_key
    """.split()
)
"""Patterns of options about data, logs, tokenizers, checkpoints, rewards and rollouts."""

INEXPRESSIBLE = {
    "max_padding_length": "shorter samples are padded to it, not to seq_length: a prediction may be too slow",
    "use_dynamic_batch_size": "samples are packed up to max_tokens_per_gpu; read as one sequence of so many tokens, "
    "whose attention costs more",
    "sync_tp_duplicated_parameters": "an all-reduce of norms among tensor-parallel ranks; a little too fast",
    "optimizer_offload_policy": "how the offloaded optimizer moves its data",
    "distribute_checkpointed_activations": "divides kept layer inputs over tp; without it there is too much memory",
    "reshape_*": "how sequences are cut",
    "use_tutel": "Tutel's kernels of experts",
    "random_ltd": "tokens are left out of some layers: less work than computed here",
    "data_efficiency_*": "shorter sequences at first",
    "compression_training": "compression during training",
    "pretrain_causal_attention": "attention without the bidirectional prefix",
    "attention_head_type": "how heads share keys",
}
"""Pattern -> what it does, for options that change a step and have no place in a plan."""

RENAMED = {
    "pad_vocab_size_to": "padded_vocab_size",
    "sequence_length": "seq_length",
    "flash_attention": "use_flash_attn",
    "use_flash_attn_2": "use_flash_attn",
}
"""Names in forks and older versions -> Megatron-LM's."""


def layers_by_type(method: str, layers: int, stages: int, *, tied: bool) -> tuple[int, ...]:
    """Transformer layers of each pipeline stage under DeepSpeed's `type:PATTERN`, which weighs the modules whose class
    matches as one each and cuts them into stages whose weights differ least.

    tied: whether the head is the embedding (a second EmbeddingPipe). ValueError for a method of another kind, or stages
    without a layer.
    """
    kind, _, pattern = method.strip().lower().partition(":")
    if kind != "type":
        raise ValueError(f"{method!r} is not type:PATTERN")
    # Modules in the order of Megatron-DeepSpeed's GPTModelPipe. Plain functions among them have no class and weigh
    # nothing.
    names = ["", "embeddingpipe", "", *["paralleltransformerlayerpipe"] * layers, "", "layernorm"]
    names += ["embeddingpipe" if tied else "lmheadpipe", ""]
    ends = _cuts([int(bool(name) and re.search(pattern, name) is not None) for name in names], stages)
    counts = tuple(
        sum(name.startswith("paralleltransformer") for name in names[a:b])
        for a, b in zip((0, *ends), ends, strict=False)
    )
    if not all(counts):
        raise ValueError(f"{method!r} leaves a stage without a layer")
    return counts


def _cuts(weights: Sequence[int], parts: int) -> tuple[int, ...]:
    """Ends of `parts` runs of weights with the least difference of the heaviest and the lightest; of equals the one
    with later cuts."""
    total = [0]
    for weight in weights:
        total.append(total[-1] + weight)
    # (end, runs) -> (difference, heaviest, lightest, start of the last run). One cut of each prefix is kept, which may
    # miss the least difference; DeepSpeed's partition_balanced does the same, and its cuts are what is wanted.
    best: dict[tuple[int, int], tuple[float, float, float, int]] = {(0, 0): (0.0, 0.0, float("inf"), 0)}
    for end in range(1, len(weights) + 1):
        for part in range(1, min(end, parts) + 1):
            for start in range(part - 1, end):
                before = best.get((start, part - 1))
                if before is None:
                    continue
                weight = total[end] - total[start]
                heaviest, lightest = max(before[1], weight), min(before[2], weight)
                # >= and rising starts: of equals the last one stays.
                if (end, part) not in best or best[end, part][0] >= heaviest - lightest:
                    best[end, part] = (heaviest - lightest, heaviest, lightest, start)
    ends = [len(weights)]
    for part in range(parts, 1, -1):
        ends.append(best[ends[-1], part][3])
    return tuple(reversed(ends))

"""Megatron-LM's options: how a list of words becomes named values, and which of them do not change a step.

`parse_options(words)` returns name -> value, named as in Megatron's `args` (`tensor_model_parallel_size`). Names were
read from NVIDIA/Megatron-LM at commit d98e8a6 (2026-08-22, version 0.20.0), megatron/training/arguments.py. A name that
is not among them stays as it is. Leaves out what the options mean (`megatron`, `megatron_model`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

from gnomon.errors import FormatError
from gnomon.formats.megatron.forks import RENAMED
from gnomon.formats.shell import unknown

IRRELEVANT = frozenset(
    """
    lr lr_* min_lr decoupled_* weight_decay weight_decay_* start_weight_decay end_weight_decay wd_incr_steps
    wsd_decay_steps adam_* sgd_momentum lion_beta* init_method_* embedding_init_method_std seed
    data_parallel_random_init train_iters train_samples exit_* skip_train iterations_to_skip
    save save_* load load_* no_save_* no_load_* ckpt_* no_ckpt_* dist_ckpt_* async_* non_persistent_* finetune
    use_checkpoint_args use_dist_ckpt pretrained_checkpoint override_* use_checkpoint_opt* use_persistent_ckpt_worker
    auto_detect_ckpt_format use_mp_args_from_checkpoint_args most_recent_k persistent_save_interval
    eval_* start_eval_at_iter full_validation multiple_validation_sets log_* no_log_* logging_level tensorboard_*
    wandb_* timing_* profile profile_* use_pytorch_profiler record_* memory_snapshot_path nvtx_ranges no_one_logger
    one_logger_* app_tag_* otel_* straggler_* config_logger_dir no_barrier_with_level_1_timing
    data_path data_* train_data_path valid_data_path test_data_path per_split_data_args_path mock_data split
    tokenizer_* no_tokenizer_* vocab_file merge_file vocab_extra_ids tiktoken_* null_tokenizer_* trust_remote_code
    num_workers no_mmap_bin_files dataloader_type dataloader_fast_cache_load dataloader_defer_*
    num_dataset_builder_threads
    no_create_attention_mask_in_dataloader eod_mask_loss reset_position_ids no_data_sharding mid_level_dataset_surplus
    distributed_backend distributed_timeout_* local_rank lazy_mpu_init use_cpu_initialization no_initialization
    norm_epsilon rotary_base rotary_percent rotary_scaling_factor rotary_interleaved rotary_seq_len_interpolation_factor
    use_rope_scaling rope_scaling_factor rope_type mscale mscale_all_dim yarn_* no_yarn_* no_position_embedding
    apply_layernorm_1p apply_query_key_layer_scaling attention_softmax_in_fp32 loss_scale loss_scale_window
    initial_loss_scale min_loss_scale hysteresis use_mcore_models spec enable_msc disable_msc ict_load
    moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type moe_router_bias_update_rate
    moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias moe_router_dtype
    moe_router_num_groups moe_router_group_topk moe_router_pre_softmax moe_per_layer_logging
    fp8_amax_history_len fp8_amax_compute_algo fp8_margin fp8_interval te_rng_tracker mtp_loss_scaling_factor
    no_check_for_nan_in_loss_and_grad check_for_* no_weight_decay_cond_type calculate_per_token_loss rerun_mode
    error_injection_* enable_experimental high_priority_stream_groups exit_signal* object_storage_cache_path
    variable_seq_lengths no_masked_softmax_fusion use_flash_attn adlr_* distributed_init_*
    no_persist_layer_norm manual_gc manual_gc_interval manual_gc_eval empty_unused_memory_level
    no_align_param_gather ddp_pad_buckets_for_high_nccl_busbw ddp_average_in_collective nccl_communicator_config_path
    disable_gloo_process_groups no_gradient_reduce_div_fusion use_precision_aware_optimizer
    deepspeed_activation_checkpointing no_async_tensor_model_parallel_allreduce DDP_impl data_impl
    no_query_key_layer_scaling lr_decay_tokens lr_warmup_tokens train_tokens deepspeed_mpi log_optimizer_states_to_*
    layernorm_epsilon rotary_position_embeddings_theta universal_checkpoint moe_loss_coeff kill_switch_file
    make_vocab_size_divisible_by pipeline_dtype persist_layer_norm masked_softmax_fusion openai_gelu onnx_safe
    gradient_accumulation_fusion apply_rope_fusion moe_use_legacy_grouped_gemm moe_router_force_load_balancing
    moe_use_fused_router_with_aux_score no_fp8_weight_transpose_cache cuda_graph_scope cuda_graph_warmup_steps
    use_te_rng_tracker load_weights create_moe_param_group dataloader_save use_te layernorm_zero_centered_gamma
    """.split()
)
"""Patterns of options that change no step's work, memory or order: schedules of rates, checkpoints, logs, data, seeds,
angles, router balance (the load itself is the workload's)."""

INEXPRESSIBLE = {
    "deepspeed_config": "DeepSpeed's own file may set more; read it with read_deepspeed",
    "cpu_optimizer": "the update is on the host",
    "curriculum_learning*": "shorter sequences at first",
    "tp_comm_overlap*": "overlaps tensor-parallel transfers with the products beside them; without it a prediction is "
    "too slow where tp > 1",
    "no_tp_comm_*": "switches part of the overlap of tensor-parallel transfers off",
    "delay_wgrad_compute": "moves weight gradients behind communication; a prediction without it is too slow",
    "moe_shared_expert_overlap": "overlaps the shared expert with all-to-all; a prediction without it is too slow",
    "overlap_param_gather_with_optimizer_step": "gathers the first bucket during the update; a little faster",
    "defer_embedding_wgrad_compute": "moves the head's weight gradient to the end of the step",
    "distribute_saved_activations": "divides kept layer inputs over tp; a prediction without it has too much memory",
    "cpu_offloading*": "moves kept activations to the host, layer by layer",
    "fine_grained_activation_offloading": "moves kept activations to the host, part by part",
    "offload_modules": "names what fine-grained offloading moves",
    "fp4_*": "four-bit products are not described",
    "fp8_param_gather": "parameters are gathered in eight bits under the distributed optimizer; half the bytes",
    "first_last_layers_bf16": "some layers stay in bf16 under fp8",
    "num_layers_at_*_in_bf16": "how many layers stay in bf16 under fp8",
    "fp8_multi_head_attention": "attention in eight bits",
    "no_fp8_wgrad": "weight gradients stay in bf16 under fp8",
    "fp32_residual_connection": "the residual stream is kept in fp32: twice its bytes",
    "fp16_lm_cross_entropy": "the loss is computed in fp16",
    "ddp_num_buckets": "how many buckets gradients are reduced in",
    "ddp_reduce_scatter_with_fp32_accumulation": "gradients travel by all-to-all and are added in fp32",
    "use_nccl_ub": "registered buffers: fewer SMs for communication",
    "use_sharp": "reductions within the switches; a prediction without it is too slow",
    "sharp_enabled_group": "which group reduces within the switches",
    "hierarchical_context_parallel_sizes": "context parallelism in two levels",
    "hybrid_context_parallel": "context parallelism by sequence",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatches that a stage takes in a row",
    "step_batch_size_schedule": "the global batch changes during training",
    "decrease_batch_size_if_needed": "the global batch may be lowered to fit",
    "moe_latent_size": "experts work in a narrower space",
    "moe_expert_rank_capacity_factor": "a limit on the tokens of a rank",
    "moe_router_padding_for_fp8": "tokens of an expert are padded to a multiple of 16 or 32",
    "moe_router_padding_for_quantization": "tokens of an expert are padded to a multiple of 16 or 32",
    "moe_layer_recompute": "the mixture is recomputed; read as kept, so too large (--recompute-modules moe)",
    "moe_input_jitter_eps": "noise on the router's input",
    "moe_deepep_num_sms": "SMs that the dispatch takes from computing",
    "qk_layernorm": "norms on queries and keys where this model has none",
    "no_rope_freq": "layers without rotary embedding",
    "qk_l2_norm": "a norm without weights on queries and keys",
    "context_parallel_ulysses_degree": "two-level context parallelism",
    "expert_tensor_parallel_num_weight_shards": "weight shards beyond tp",
    "tensor_parallel_num_weight_shards": "weight shards beyond tp",
    "outer_dp_sharding_strategy": "optimizer states divided over the outer replicas too",
    "fsdp_double_buffer": "two fixed buffers for gathered parameters",
    "suggested_communication_unit_size": "elements gathered together",
    "overlap_cpu_optimizer_d2h_h2d": "transfers of the offloaded optimizer overlap with its update",
    "heterogeneous_layers_config_*": "layers that differ from each other",
    "hybrid_layer_pattern": "Mamba layers",
    "linear_attention_freq": "linear attention",
    "experimental_attention_variant": "another attention",
    "reset_attention_mask": "attention does not cross documents: less work than a full sequence",
    "dataloader_inter_document_masking": "attention does not cross documents: less work than a full sequence",
    "reuse_grad_buf_for_mxfp8_param_ag": "gathered parameters share the gradients' buffer; a little less memory",
    "train_sync_interval": "the host waits for the device now and then",
    "no_bias_gelu_fusion": "bias and activation in kernels of their own",
}
"""Pattern -> what it does, for options that change a step and have no place in a plan, a model or a stack."""

LEGACY = frozenset(
    """
    DDP_impl data_impl no_async_tensor_model_parallel_allreduce no_query_key_layer_scaling deepspeed deepspeed_config
    zero_stage deepspeed_activation_checkpointing no_pipeline_parallel use_flash_attn_v2 use_cpu_optimizer
    checkpoint_activations activations_checkpoint_method activations_checkpoint_num_layers num_layers_in_first_stage
    context_parallel_ulysses_degree fp8_hybrid fp8_e4m3 distribute_checkpointed_activations checkpoint_num_layers
    embed_layernorm pp_partition_method extra_vocab_size max_tokens_per_gpu use_dynamic_batch_size glu_activation
    use_llama2_rotary_position_embeddings disable_mem_efficient_ln ds_sequence_parallel_size num_key_value_heads
    """.split()
)
"""Options of older versions and of forks, which are still found in scripts."""

LEGACY_SWITCHES = frozenset(
    """
    no_async_tensor_model_parallel_allreduce no_query_key_layer_scaling deepspeed deepspeed_activation_checkpointing
    no_pipeline_parallel use_flash_attn_v2 use_cpu_optimizer checkpoint_activations fp8_hybrid fp8_e4m3
    distribute_checkpointed_activations embed_layernorm use_dynamic_batch_size
    """.split()
)
"""Those of them that take no value."""


@cache
def _listed() -> tuple[frozenset[str], frozenset[str]]:
    """(every option's name as in `args`, those that take no value)."""
    text = files("gnomon.formats.megatron").joinpath("options.txt").read_text(encoding="utf-8")
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    named = [(words[0].replace("-", "_"), len(words) > 1) for words in lines]
    return frozenset(name for name, _ in named) | LEGACY, frozenset(
        n for n, switch in named if switch
    ) | LEGACY_SWITCHES


def known_options() -> frozenset[str]:
    """Every option's name, as in `args`."""
    return _listed()[0]


def option_name(word: str) -> str:
    """`--tensor-model-parallel-size`, with or without its dashes, as in `args`; a fork's name is Megatron-LM's."""
    name = word.lstrip("-").replace("-", "_")
    return RENAMED.get(name, name)


def parse_options(words: Sequence[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """(options by name, variables that stand where options may be and are not known).

    True for a switch, int, float or str for one value, a tuple for several; the last one holds. An abbreviation is
    completed as argparse does it, if only one option begins so. FormatError for a word that belongs to no option.
    """
    options: dict[str, object] = {}
    unset: list[str] = []
    for option, values in _grouped(words, unset):
        name = option_name(option)
        known = known_options()
        if name not in known and len(longer := [other for other in known if other.startswith(name)]) == 1:
            name = longer[0]
        options[name] = True if not values else _value(values[0]) if len(values) == 1 else tuple(map(_value, values))
    return options, tuple(dict.fromkeys(unset))


def _grouped(words: Sequence[str], unset: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields (option, its values); `--name=value` too. A word that is all a variable which is not known goes to `unset`
    where no value is missing."""
    option: str | None = None
    values: list[str] = []
    switches = _listed()[1]
    for word in words:
        if re.match(r"--[A-Za-z]", word):
            if option is not None:
                yield option, values
            option, equals, value = word.partition("=")
            values = [value] if equals else []
        elif (name := whole_variable(word)) is not None and (
            option is None or values or option_name(option) in switches
        ):
            unset.append(name)
        elif option is not None:
            values.append(word)
        elif word.startswith("-") or word.isspace() or not word:
            continue
        else:
            raise FormatError(f"{word!r} stands before the first option", "options")
    if option is not None:
        yield option, values


def whole_variable(word: str) -> str | None:
    """The variable that a word is and whose value is not known."""
    name = unknown(word)
    return name if name is not None and len(word) == len(name) + 2 else None


def _value(text: str) -> object:
    if re.fullmatch(r"[+-]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text) and len(text) < 40:
        return float(text)
    return text

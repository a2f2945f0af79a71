"""Megatron-Bridge (NeMo) overrides, `model.tensor_model_parallel_size=4 train.global_batch_size=512 …`, to a Job.

`read_megatron_bridge(overrides, model=…, devices=…)` lays them over what its pretraining recipes have in common, and
reads the result as Megatron-LM's arguments. Names and defaults were read from NVIDIA-NeMo/Megatron-Bridge at commit
067f987df03b8355b03192d88d70f1709fedf51a (2026-08-22), src/megatron/bridge/recipes/common.py (_pretrain_common),
src/megatron/bridge/training/{config,mixed_precision,comm_overlap}.py. Leaves out: what single recipes set beyond that;
the model, its parallel sizes and its sequence length are therefore asked for.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gnomon.errors import FormatError, InputError, nearest
from gnomon.formats.given import NOTHING, Network, ReadContext
from gnomon.formats.job import Fields, Job, read_source
from gnomon.formats.megatron.options import known_options
from gnomon.formats.megatron.read import job_of
from gnomon.software import Stack, stack

COMMON: Mapping[str, object] = {
    "train.micro_batch_size": 2,
    "train.global_batch_size": 32,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.use_distributed_optimizer": True,
    "mixed_precision": "bf16_mixed",
}
"""What _pretrain_common sets and a step depends on."""

PRECISIONS: Mapping[str, Mapping[str, object]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True},
    "bf16_with_fp8_delayed_scaling_mixed": {
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_param_gather": True,
    },
    "bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        "fp8_format": "hybrid",
        "fp8_recipe": "tensorwise",
        "first_last_layers_bf16": True,
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True},
}
"""`mixed_precision` -> Megatron-LM's arguments; the fp8 ones gather parameters in eight bits as well where it says."""

RENAMED = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "bucket_size": "ddp_bucket_size",
    "sequence_length": "seq_length",
    "fp8_param": "fp8_param_gather",
    "fp8": "fp8_format",
}
"""Their names -> those of Megatron-LM's arguments."""

INVERTED = {
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
    "bias_dropout_fusion": "no_bias_dropout_fusion",
    "bias_activation_fusion": "no_bias_swiglu_fusion",
    "apply_rope_fusion": "no_rope_fusion",
}
"""Switches that Megatron-LM's arguments spell the other way round."""

SECTIONS = ("model", "train", "ddp", "optimizer", "dataset", "comm_overlap")
"""Sections whose fields are Megatron-LM's arguments by the same names."""

NEUTRAL = frozenset(
    """
    pipeline_dtype params_dtype autocast_dtype train_iters manual_gc manual_gc_interval manual_gc_eval eval_interval
    eval_iters lr min_lr weight_decay adam_beta1 adam_beta2 adam_eps check_for_nan_in_grad average_in_collective
    gradient_as_bucket_view pad_buckets_for_high_nccl_busbw blend blend_per_split num_workers split dataloader_type
    random_seed reset_attention_mask reset_position_ids eod_mask_loss data_sharding path_to_cache dataset_kwargs
    num_dataset_builder_threads skip_getting_attention_mask_from_dataset init_method_std layernorm_epsilon rotary_base
    cuda_graph_warmup_steps cuda_graph_scope moe_aux_loss_coeff moe_router_bias_update_rate hf_model_id seed
    generation_config use_te_rng_tracker perform_initialization use_cpu_initialization vocab_size_divisible_by
    should_pad_vocab make_vocab_size_divisible_by scale_lr clip_grad_norm pack_sequence_in_batch persistent_workers
    offload_modules moe_token_dropping mtp_loss_scaling_factor moe_z_loss_coeff moe_router_score_function do_test
    do_validation pin_memory seq_len_interpolation_factor params_load_dtype memmap_workers attention_dropout
    """.split()
)
"""Fields of those sections on which neither time nor memory of a step depends."""

OTHER_SECTIONS = frozenset(
    """
    env_vars rng rerun_state_machine validation scheduler logger tokenizer checkpoint dist ft straggler
    nvrx_straggler profiling tensor_inspect inprocess_restart optimizer_config_override_provider
    """.split()
)


def _words(text: str, file: str) -> list[str]:
    """The words of a shell's command line. FormatError for a quote that is not closed, or a final `\\`."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        causes = {"No closing quotation": "a quote that is not closed", "No escaped character": "a \\ at its very end"}
        raise FormatError(
            f"{file} has {causes.get(str(error), str(error))}; it may have been cut off",
            f"line {text.count(chr(10)) + 1}",
        ) from None


def read_megatron_bridge(
    overrides: str | Path | Sequence[str],
    *,
    model: Network | str,
    devices: int,
    env: Mapping[str, str] | None = None,
    context: ReadContext = NOTHING,
) -> Job:
    """The job of `section.field=value` words (a list, text, or a file of them) for a model.

    The model's own sizes are its recipe's, so they are given. Raises InputError for a field that Megatron does not have
    (with the nearest) where it is given beside the file or strict, a size that a recipe decides and the words do not
    give, or a combination that Megatron refuses.
    """
    if isinstance(overrides, (str, Path)):
        text, file = read_source(overrides)
        words = _words(text, file)
    else:
        file, words = "<overrides>", list(overrides)
    overrides_read = dict(_assignment(word, env or {}) for word in words)
    return job_of_overrides(overrides_read, file, replace(context, devices=devices, model=model))


def job_of_overrides(
    overrides: Mapping[str, object], file: str, context: ReadContext, *, whole: bool = False, base: Stack | None = None
) -> Job:
    """The job of settings by `section.field`, with a network that is given. whole: they are all of a recipe, so that
    what they leave out is Megatron's default. base: the software; Megatron-Bridge."""
    known = {name: _assignment(f"{name}={text}", {})[1] for name, text in context.settings.items()}
    overrides = {**overrides, **known}
    if context.seq_len is not None:
        overrides["model.seq_length"] = context.seq_len
    for needed in () if whole else ("model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"):
        if needed not in overrides:
            raise InputError(f"{needed} is not among the overrides, and recipes differ in it; --set {needed}=1", needed)
    if not {"model.seq_length", "dataset.seq_length", "dataset.sequence_length"} & set(overrides):
        raise InputError(
            "the sequence length is not among the overrides; --set model.seq_length=4096", "model.seq_length"
        )
    values: dict[str, object] = {}
    unexpressed: dict[str, object] = {}
    for key, value in {**COMMON, **overrides}.items():
        _translate(key, value, values, unexpressed, strict=context.strict or key in known)
    values.setdefault("max_position_embeddings", values["seq_length"])
    no_sequence_parallel = not values.get("sequence_parallel") or values.get("tensor_model_parallel_size", 1) == 1
    if off := no_sequence_parallel and bool(values.pop("tp_comm_overlap", False)):  # as CommOverlapConfig has it
        values.pop("tp_comm_overlap_cfg", None)
    fields = Fields(values, file)
    if off:
        fields.notes.append("tp_comm_overlap: switched off by Megatron-Bridge without sequence parallelism")
    for key in overrides:
        if key.partition(".")[0] in OTHER_SECTIONS:
            fields.notes.append(f"{key}: no effect on a step's time or memory")
    for key, value in unexpressed.items():
        near = nearest(key.rpartition(".")[2], known_options())
        fields.note_default(key, str(value), f"not described here: not accounted for{near}")
    return job_of(
        fields, context=replace(context, settings={}), name="bridge-job", base=base or stack("megatron-bridge")
    )


def _assignment(word: str, env: Mapping[str, str]) -> tuple[str, object]:
    """`++a.b=value` as (`a.b`, value)."""
    match = re.fullmatch(r"(?:--|\+{0,2})([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL)
    if not match:
        raise FormatError(f"{word[:60]!r} is not section.field=value", "overrides")
    text = re.sub(r"\$\{?(\w+)\}?", lambda m: env.get(m[1], m[0]), match[2])
    plain: dict[str, object] = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in plain:
        return match[1], plain[text.lower()]
    if text.startswith("[") and text.endswith("]"):
        return match[1], tuple(part.strip(" '\"") for part in text[1:-1].split(",") if part.strip())
    # int first: `8` is a whole number and `8.0` is not.
    kinds: tuple[Callable[[str], object], ...] = (int, float)
    for kind in kinds:
        try:
            return match[1], kind(text)
        except ValueError:
            continue
    return match[1], text


def _translate(
    key: str, value: object, values: dict[str, object], unexpressed: dict[str, object], *, strict: bool
) -> None:
    """Put one override among Megatron-LM's arguments; what is none of them, and does not matter, is left out."""
    section, _, field = key.partition(".")
    if key == "mixed_precision":
        if value not in PRECISIONS:
            raise InputError(f"mixed_precision {value!r} is not described{nearest(str(value), PRECISIONS)}", key)
        values.update(PRECISIONS[str(value)])
    elif section == "mixed_precision" and field == "grad_reduce_in_fp32" or key == "ddp.grad_reduce_in_fp32":
        # Bridge says whether gradients are reduced in fp32, and Megatron-LM's argument whether in bf16.
        values["grad_reduce_in_bf16"] = value is False
    elif section in OTHER_SECTIONS:
        return
    elif not strict and field and section not in (*SECTIONS, "mixed_precision"):
        unexpressed[key] = value
    elif section not in (*SECTIONS, "mixed_precision") or not field:
        raise InputError(f"{key!r} is in no section that is known{nearest(section, [*SECTIONS, *OTHER_SECTIONS])}", key)
    elif field in INVERTED:
        values[INVERTED[field]] = value is False
    elif field in NEUTRAL:
        return
    elif (name := RENAMED.get(field, field)) in known_options():
        values[name] = value
    elif strict and section in ("model", "ddp", "comm_overlap"):
        raise InputError(f"unknown field {key!r}{nearest(name, known_options())}", key)
    else:
        unexpressed[key] = value

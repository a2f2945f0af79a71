"""NeMo's YAML files (1.x), those of NeMo-Framework-Launcher, and commands with Hydra's overrides: Megatron-Core's
options by NeMo's names.

What a key means was read from NVIDIA/NeMo at commit 8cfedd720346 (2025): nemo/collections/nlp/parts/nlp_overrides.py,
nemo/collections/nlp/models/language_modeling/megatron_{base,gpt}_model.py, nemo/collections/nlp/modules/common/
megatron/utils.py; the rest as Megatron-LM's reader has it. Leaves out BERT, T5 and multimodal files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.launched import launched, overrides
from gnomon.formats.megatron.options import known_options
from gnomon.formats.megatron.read import job_of
from gnomon.formats.megatron.terms import renamed
from gnomon.formats.references import resolved
from gnomon.formats.shell import Launch
from gnomon.formats.tokenizers import rows_of
from gnomon.formats.trainer_source import commands_of, program_name
from gnomon.formats.yaml_file import read_yaml
from gnomon.software import stack

RENAMED = {
    "encoder_seq_length": "seq_length",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_moe_experts": "num_experts",
    "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "ub_tp_comm_overlap": "tp_comm_overlap",
    "optim.overlap_grad_sync": "overlap_grad_reduce",
    "optim.overlap_param_sync": "overlap_param_gather",
    "tokenizer.type": "tokenizer_model",
    "rotary_base": "rotary_base",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
"""NeMo's names -> those of Megatron-LM's arguments."""

IRRELEVANT = frozenset(
    """
    run* exp_manager* trainer* name restore_from_path hydra* defaults model.data* model.tokenizer* model.optim*
    model.nsys_profile* model.native_amp* model.hysteresis model.seed model.resume_from_checkpoint model.init_method_std
    model.use_scaled_init_method model.layernorm_epsilon model.do_layer_norm_weight_decay model.pre_process
    model.post_process model.persist_layer_norm model.headscale model.use_cpu_initialization model.onnx_safe
    model.apex_* model.gradient_as_bucket_view model.sync_batch_comm model.mcore_* model.megatron_amp_O2
    model.grad_allreduce_chunk_size_mb model.gc_* model.fp8_margin model.fp8_interval model.fp8_amax_* model.reduce_amax
    model.apply_query_key_layer_scaling model.normalize_attention_scores model.openai_gelu model.transformer_engine
    model.attention_type model.use_emha model.peft* model.answer_only_loss model.restore_* model.name model.precision
    model.rotary_percentage model.rotary_base model.ub_tp_comm_overlap_cfg* model.get_attention_mask_from_fusion
    model.masked_softmax_fusion model.batch_p2p_comm model.dist_ckpt* model.target model.inference* inference*
    cluster_type model.fp16_lm_cross_entropy model.fp8_params model.transformer_block_type model.bias
    model.use_flash_attention model.grad_div_ar_fusion model.bias_dropout_add_fusion model.embedding_init_method_std
    model.hidden_size_per_head quantization* export* model.embedding_dropout model.version model.hf_* model.decoder_*
    model.seq_len_interpolation* model.layernorm_zero_centered_gamma model.fsdp_* model.fp8_wgrad
    """.split()
)

INEXPRESSIBLE = {
    "model.num_micro_batches_with_partial_activation_checkpoints": "recomputation of some microbatches only",
    "model.activations_checkpoint_layers_per_pipeline": "recomputation that differs from stage to stage",
    "model.fp32_residual_connection": "residuals in fp32",
    "model.fsdp": "FSDP in place of the distributed optimizer",
    "model.*": "known to NeMo, but what it does is not described here",
}

ACTIVATIONS = {
    "swiglu": "swiglu",
    "fast-swiglu": "swiglu",
    "squared-relu": "squared_relu",
    "fast-geglu": "gated_linear_unit",
    "geglu": "gated_linear_unit",
    "reglu": "gated_linear_unit",
}
FUSIONS = {"bias_activation_fusion": "no_bias_swiglu_fusion", "bias_dropout_add_fusion": "no_bias_dropout_fusion"} | {
    "apply_rope_fusion": "no_rope_fusion",
    "overlap_p2p_comm": "no_overlap_p2p_communication",
}
"""NeMo's switches of fusions -> Megatron-LM's, which switch them off."""


SCRIPT_DEFAULTS: Mapping[str, object] = {
    "model.encoder_seq_length": 4096,
    "model.max_position_embeddings": 4096,
    "model.tokenizer.library": "sentencepiece",
    "model.normalization": "rmsnorm",
    "model.activation": "fast-swiglu",
    "model.bias": False,
    "model.share_embeddings_and_output_weights": False,
    "model.position_embedding_type": "rope",
    "model.activations_checkpoint_granularity": None,
    "model.gradient_accumulation_fusion": False,
    "trainer.num_nodes": 1,
    "trainer.precision": "bf16",
}
"""conf/megatron_llama_config.yaml, which megatron_llama_pretraining.py takes its other fields from."""

GPT_DEFAULTS: Mapping[str, object] = {
    "model.encoder_seq_length": 512,
    "model.max_position_embeddings": 512,
    "model.tokenizer.library": "megatron",
    "model.tokenizer.type": "GPT2BPETokenizer",
    "trainer.num_nodes": 1,
    "trainer.precision": 16,
}
"""conf/megatron_gpt_config.yaml, of megatron_gpt_pretraining.py."""


def _accepts(launch: Launch) -> bool:
    name = program_name(launch.program)
    named = name.startswith("megatron_") and any(part in name for part in ("pretrain", "finetun", "sft", "peft"))
    return named and any(re.match(r"\+{0,2}(model|trainer)\.\w", word) for word in launch.options)


def _tree(path: Path, context: ReadContext) -> tuple[dict[str, object], str, tuple[str, ...]]:
    """(fields, name for messages, what was assumed) of a YAML file, or of a command whose configuration file is read
    where it lies beside the script."""
    if path.suffix.lower() in (".yaml", ".yml"):
        text, file = read_source(path)
        tree = resolved(read_yaml(text.replace("${training.", "${"), file), context.env)
        return {**flatten(tree), **context.values()}, file, ()
    command = launched(path, context, _accepts, "model.micro_batch_size=… and other overrides of NeMo")
    words = command.launch.options
    values, folder = overrides(words), path.resolve().parent
    options = dict(pairwise(word for part in words for word in part.split("=", 1)))
    name = options.get("--config-name", "")
    where = folder / options.get("--config-path", ".") / (name if name.endswith(".yaml") else f"{name}.yaml")
    if name and where.is_file():
        text, _ = read_source(where)
        return (
            {**flatten(resolved(read_yaml(text, str(where)), context.env)), **values, **context.values()},
            str(path),
            (),
        )
    llama = "llama" in program_name(command.launch.program)
    base = SCRIPT_DEFAULTS if llama else GPT_DEFAULTS
    note = "fields that no override gives are those of NeMo's own configuration of this script"
    return {**base, **values, **context.values()}, command.file, (note,)


def _spelled(key: str, value: object) -> tuple[str, object]:
    """NeMo's name of one of Megatron-LM's options."""
    if key == "use-distributed-optimizer":
        return "model.optim.name", "distributed_fused_adam"
    return "model." + key.replace("-", "_").replace("recompute_", "activations_checkpoint_"), value


TERMS = renamed(_spelled, "hydra")


def _looks(sample: Sample) -> bool:
    if not sample.values:
        return any(_accepts(command) for command in commands_of(sample))
    sized = sample.has("model.micro_batch_size") or sample.has("model.num_layers")
    return sized and (sample.has("trainer.devices") or sample.has("trainer.num_nodes"))


def _switches(model: Mapping[str, object], trainer: Mapping[str, object]) -> dict[str, object]:
    """What NeMo says by a value and Megatron-LM by a switch."""
    switches: dict[str, object] = {}
    if name := ACTIVATIONS.get(str(model.get("activation", "gelu"))):
        switches[name] = True
    if model.get("bias") is False:
        switches["disable_bias_linear"] = True
    if model.get("share_embeddings_and_output_weights") is False:
        switches["untie_embeddings_and_output_weights"] = True
    if model.get("num_query_groups") is not None:
        switches["group_query_attention"] = True
    kind = str(model.get("normalization") or "layernorm").lower()
    switches["normalization"] = "RMSNorm" if kind == "rmsnorm" else "LayerNorm"
    precision = str(trainer.get("precision", model.get("precision", "bf16")))
    if precision.startswith("bf16"):
        switches["bf16"] = True
    elif precision.startswith("16"):
        switches["fp16"] = True
    if model.get("gradient_accumulation_fusion") is not True:
        switches["no_gradient_accumulation_fusion"] = True
    for theirs, ours in FUSIONS.items():
        if model.get(theirs) is False:
            switches[ours] = True
    if model.get("fp8"):
        switches["fp8_format"] = "e4m3" if model.get("fp8_e4m3") else "hybrid"
    if "distributed" in str(model.get("optim.name")):
        switches["use_distributed_optimizer"] = True
    return switches


def _tokenizer(model: Mapping[str, object]) -> dict[str, object]:
    library, kind, file = (str(model.get(f"tokenizer.{key}") or "") for key in ("library", "type", "model"))
    if library == "huggingface":
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": kind}
    if library == "megatron" or kind == "GPT2BPETokenizer":
        return {"tokenizer_type": "GPT2BPETokenizer"}
    rows = rows_of(file)
    return {"tokenizer_type": library, **({"vocab_size": rows} if rows else {})}


def _read(path: Path, context: ReadContext) -> Job:
    flat, file, assumed = _tree(path, context)
    whole = Fields(flat, file, replace(context, settings={}))
    model = {key.removeprefix("model."): value for key, value in flat.items() if key.startswith("model.")}
    trainer = {key.removeprefix("trainer."): value for key, value in flat.items() if key.startswith("trainer.")}
    for key, value in model.items():
        elsewhere = key.startswith(("tokenizer", "data", "restore", "peft", "answer"))
        if isinstance(value, str) and value.startswith("???") and not elsewhere:
            whole.fail(f"model.{key}", f"{value}: to be filled in; --set model.{key}=…")
    values: dict[str, object] = {**_switches(model, trainer), **_tokenizer(model)}
    for key, value in model.items():
        name = RENAMED.get(key, key)
        if key in (*FUSIONS, "fp8_e4m3", "fp8_hybrid", "gradient_accumulation_fusion"):
            whole.ignore(f"model.{key}")
        elif name in known_options() and name not in values and not (value is None or value is False and name != key):
            values[name] = value
            whole.ignore(f"model.{key}")
    for key in ("activation", "bias", "share_embeddings_and_output_weights", "fp8", "fp8_e4m3", "fp8_hybrid", "gated"):
        whole.ignore(f"model.{key}")
    for key in ("gradient_accumulation_fusion", "bias_activation_fusion", "normalization"):
        whole.ignore(f"model.{key}")
    if values.get("recompute_granularity") is None:
        values = {key: value for key, value in values.items() if not key.startswith("recompute_")}
    if values.get("recompute_granularity") == "selective":  # NeMo passes them on, and selective does not look at them
        values = {k: v for k, v in values.items() if k not in ("recompute_method", "recompute_num_layers")}
    nodes, per_node = trainer.get("num_nodes", 1), trainer.get("devices")
    stated = nodes * per_node if isinstance(nodes, int) and isinstance(per_node, int) else None
    if "hidden_size" not in values and context.model is None:
        whole.fail("model.hidden_size", f"the file restores a network from elsewhere; {GIVE_MODEL}")
    fields = Fields(values, file, replace(context, settings={}))
    whole.account(IRRELEVANT, INEXPRESSIBLE, ())
    devices = context.devices or stated
    job = job_of(
        fields, context=replace(context, devices=devices, settings={}), name="nemo-job", base=stack("megatron-lm")
    )
    return replace(
        job,
        notes=(*whole.notes, *job.notes),
        unexpressed=(*whole.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
        stated_devices=stated,
        terms=TERMS,
    )


FORMAT = Format(
    name="nemo",
    program="NVIDIA/NeMo 8cfedd7 (1.x)",
    files="YAML of examples and launcher, and commands with overrides",
    looks=_looks,
    read=_read,
)

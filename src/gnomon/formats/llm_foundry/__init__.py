"""llm-foundry's YAML files, and MosaicML's launch files around them.

What a key means was read from mosaicml/llm-foundry at commit 8c8dd48f7216 (2025-07-21): llmfoundry/utils/config_utils,
llmfoundry/models/mpt/configuration_mpt.py, scripts/train/; and Composer's trainer. Leaves out evaluation and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.references import resolved
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_words import flag
from gnomon.formats.trainers import AUTOCAST, BF16, FP16, FP32, Training, adapted, job_of, model_of
from gnomon.formats.training_arguments import SHARDS
from gnomon.formats.yaml_file import read_yaml
from gnomon.models.decoder import DecoderConfig
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    variables* run_name tokenizer* train_loader* eval_loader* scheduler* optimizer.lr optimizer.betas optimizer.eps
    optimizer.weight_decay max_duration eval_* seed device_eval_* progress_bar log_to_console console_log_interval
    callbacks* loggers* save_* load_* icl_* dist_timeout autoresume max_split_size_mb python_log_level
    expandable_segments model.init_device model.pretrained model.use_auth_token model.use_train_metrics
    model.trust_remote_code fsdp_config.limit_all_gathers fsdp_config.activation_checkpointing_reentrant
    fsdp_config.state_dict_type fsdp_config.verbose fsdp_config.sync_module_states fsdp_config.use_orig_params
    fsdp_config.backward_prefetch fsdp_config.load_* integrations command image name compute* profiler* metadata*
    tokenizer_name global_seed model.max_seq_len model.tokenizer* model.peft_config.lora_alpha
    model.peft_config.lora_dropout model.peft_config.task_type model.peft_config.peft_type data_local data_remote
    accumulate_train_batch_on_tokens
    """.split()
)

INEXPRESSIBLE = {
    "fsdp_config.activation_cpu_offload": "saved activations wait on the host",
    "fsdp_config.forward_prefetch": "gathers one block further ahead in forward",
    "model.config_overrides*": "sizes of the network that are changed; read as they were",
    "algorithms.*": "algorithms of Composer",
    "model.use_flash_attention_2": "which attention kernel",
    "compile_config*": "torch.compile: a prediction without is too slow",
    "tp_config*": "tensor parallelism by code",
}


def _values(values: Mapping[str, object], env: Mapping[str, str]) -> Mapping[str, object]:
    """A launch file has the job under `parameters`."""
    inner = values.get("parameters")
    return resolved(inner if isinstance(inner, Mapping) else values, env)


def _looks(sample: Sample) -> bool:
    return any(sample.has(f"{top}global_train_batch_size", f"{top}model.name") for top in ("", "parameters."))


def _mpt(f: Fields) -> DecoderConfig:
    """Fills in MPTConfig's defaults: learned positions unless ALiBi or rotary ones are switched on, biases, a tied
    head."""
    attention = "model.attn_config."
    hidden, heads = f.integer("model.d_model", 2048), f.integer("model.n_heads", 16)
    kind = str(f.raw(f"{attention}attn_type") or "multihead_attention")
    kv_heads = {"multihead_attention": heads, "multiquery_attention": 1}.get(kind, heads)
    alibi, rope = f.flag(f"{attention}alibi", False), f.flag(f"{attention}rope", False)
    bias = not f.flag("model.no_bias", False)
    learned = f.flag("model.learned_pos_emb", True) and not alibi and not rope
    f.report("model.ffn_config.ffn_type", "its feed-forward; read as up, GELU and down")
    for key in (
        f"{attention}attn_impl",
        f"{attention}clip_qkv",
        f"{attention}kv_n_heads",
        f"{attention}alibi_bias_max",
    ):
        f.ignore(key)
    f.ignore(*(key for key in f.names() if key.startswith(("model.init_config", f"{attention}rope_"))))
    return DecoderConfig(
        name="mpt",
        num_layers=f.integer("model.n_layers", 24),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=f.integer(f"{attention}kv_n_heads", kv_heads),
        head_dim=hidden // heads,
        ffn_size=f.integer("model.expansion_ratio", 4) * hidden,
        vocab_size=f.integer("model.vocab_size", 50368),
        tied=f.flag("model.tie_word_embeddings", True),
        norm="layer",
        norm_bias=bias,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        gated=False,
        activation="gelu",
        rotary=rope,
        position_rows=f.integer("model.max_seq_len", 2048) if learned else 0,
        qk_norm=f.flag(f"{attention}qk_ln", False),
    )


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> Network | str:
    name = f.raw("model.name")
    if context.model is None and name == "mpt_causal_lm":
        return _mpt(f)
    for key in [key for key in f.names() if name == "mpt_causal_lm" and key.startswith("model.")]:
        f.raw(key)
    model = model_of(f, "model.pretrained_model_name_or_path", context, folder, assumed)
    if not f.has("model.peft_config.r"):
        return model
    targets = f.raw("model.peft_config.target_modules")
    named = [str(t) for t in targets] if isinstance(targets, list) else ["q_proj", "v_proj"]
    where = "model.peft_config.target_modules"
    return adapted(f, model, f.integer("model.peft_config.r"), named, four_bits=False, named=where)


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    whole = read_yaml(text, file)
    f = Fields(flatten(_values(whole, context.env)), file, context)
    folder, assumed = path.resolve().parent, list[str]()
    gpus = flatten(whole).get("compute.gpus")
    micro = f.raw("device_train_microbatch_size")
    if not isinstance(micro, int) and context.micro_batch_size is None:
        assumed.append("device_train_microbatch_size is auto: 1 sequence on each rank (--micro-batch-size)")
    precision = {"amp_bf16": AUTOCAST, "amp_fp16": FP16, "fp32": FP32, "bf16": BF16, "amp_fp8": AUTOCAST}
    training = Training(
        model=_model(f, context, folder, assumed),
        micro=micro if isinstance(micro, int) else 1,
        total=f.integer("global_train_batch_size"),
        seq_len=f.integer("max_seq_len"),
        precision=precision.get(str(f.raw("precision") or "amp_bf16"), AUTOCAST),
        update=update_of(f, "optimizer.name", "decoupled_adamw"),
        clip=f.has("algorithms.gradient_clipping.clipping_threshold"),
        stack=stack("llm-foundry"),
    )
    if f.raw("precision") == "amp_fp8":
        f.report("precision", "eight-bit products; read as bf16, so too slow")
    f.ignore("algorithms.gradient_clipping.clipping_type")
    strategy = str(f.raw("fsdp_config.sharding_strategy") or "").lower()
    if strategy in SHARDS:
        kind = str(f.raw("fsdp_config.mixed_precision") or "DEFAULT").upper()
        pure = training.precision.compute if kind == "PURE" else "fp32"
        training = replace(
            training,
            zero=SHARDS[strategy],  # type: ignore[arg-type]
            recompute=flag(f, "fsdp_config.activation_checkpointing"),
            offload=flag(f, "fsdp_config.cpu_offload"),
            precision=replace(training.precision, reduce=pure),
        )
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return job_of(f, context, training, assumed, gpus if isinstance(gpus, int) else None)


FORMAT = Format(
    name="llm-foundry", program="mosaicml/llm-foundry 8c8dd48", files="YAML of its scripts", looks=_looks, read=_read
)

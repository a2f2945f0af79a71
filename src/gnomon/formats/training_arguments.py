"""Fields of transformers' TrainingArguments, which TRL, LLaMA-Factory and axolotl share: sharding, batch, precision.

`sharded(f)` reads `fsdp` and `fsdp_config` by either spelling of their keys, and what `accelerate launch` says under
the names of `accelerate.launch`; `finished(source, …)` makes the job. `IRRELEVANT` and `INEXPRESSIBLE` are the rest of
the class. Read from huggingface/transformers v5.23 src/transformers/training_args.py and huggingface/accelerate
16cb6eb src/accelerate/utils/dataclasses.py. Leaves out what the programs add (their folders).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from gnomon.errors import nearest
from gnomon.formats.given import Network, ReadContext, network_graph
from gnomon.formats.job import Fields, Job
from gnomon.formats.trainer_source import Source
from gnomon.formats.trainer_terms import HUGGING_FACE, TrainerTerms, trainer_terms
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainers import (
    AUTOCAST,
    BESIDE_SWITCH,
    BF16,
    FP16,
    FP32,
    SWITCHED,
    Training,
    by_deepspeed,
    either_half,
    inline,
    job_of,
    modules_of,
    own_engine,
)
from gnomon.plans import Layout, Precision
from gnomon.search.fit.terms import Style

IRRELEVANT = frozenset(
    """
    learning_rate lr_scheduler_type lr_scheduler_kwargs* warmup_ratio warmup_steps weight_decay adam_* adam_beta* seed
    data_seed max_steps num_train_epochs num_epochs output_dir overwrite_output_dir logging* log_level* log_on_each_node
    report_to run_name save* eval* do_train do_eval do_predict push_to_hub hub_* resume_from_checkpoint disable_tqdm
    load_best_model_at_end metric_for_best_model greater_is_better dataloader* remove_unused_columns label_names ddp_*
    per_device_eval_batch_size include_* prediction_loss_only past_index jit_mode_eval group_by_length
    length_column_name full_determinism label_smoothing_factor neftune_noise_alpha gradient_checkpointing_kwargs* wandb*
    trackio* mlflow* dataset* trust_remote_code chat_template model_revision tokenizer* eos_token bf16_full_eval
    fp16_full_eval preprocessing_* system_prompt average_tokens_across_devices ignore_data_skip use_reentrant_gc
    strict skip_memory_metrics attn_implementation use_cache fsdp_transformer_layer_cls_to_wrap early_stopping*
    half_precision_backend local_rank no_cuda use_cpu config_name cache_dir use_fast_tokenizer use_auth_token token
    low_cpu_mem_usage train_file validation_file test_file keep_linebreaks max_train_samples max_eval_samples
    max_predict_samples overwrite_cache validation_split_percentage streaming num_machines fp16_opt_level
    evaluation_strategy max_grad_norm lazy_preprocess data_path eval_data_path
    """.split()
)

INEXPRESSIBLE = {
    "torch_compile_*": "which backend and mode of torch.compile: read as the default",
    "optim_args*": "settings of an optimizer that change no sizes",
    "optim_target_modules*": "of an optimizer that does not look at them",
}

MIXED = ("bf16", "fp16", "accelerate_bf16", "accelerate_fp16")
"""Switches of mixed precision; the last two are the launcher's."""

SHARDS = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}
"""FSDP1's strategies, in small letters."""

LAYERS = {
    "llama-": "LlamaDecoderLayer",
    "smollm2-": "LlamaDecoderLayer",
    "mistral-7b": "MistralDecoderLayer",
    "mixtral-": "MixtralDecoderLayer",
    "qwen2.5-": "Qwen2DecoderLayer",
    "qwen3-30b-a3b": "Qwen3MoeDecoderLayer",
    "qwen3-235b-a22b": "Qwen3MoeDecoderLayer",
    "qwen3-": "Qwen3DecoderLayer",
    "gemma-2-": "Gemma2DecoderLayer",
    "gemma-3-": "Gemma3DecoderLayer",
    "phi-3": "Phi3DecoderLayer",
    "phi-4": "Phi3DecoderLayer",
    "pythia-": "GPTNeoXLayer",
    "gpt2": "GPT2Block",
    "opt-": "OPTDecoderLayer",
    "bloom": "BloomBlock",
    "falcon-": "FalconDecoderLayer",
    "starcoder2-": "Starcoder2DecoderLayer",
}
"""Beginning of a network's name -> the class of its layers in transformers."""


def layer_class(model: Network | str) -> str | None:
    """Class of a network's layers in transformers; None where its name does not say it."""
    name = network_graph(model).name
    return next((layer for start, layer in LAYERS.items() if name.startswith(start)), None)


POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
"""How FSDP chooses what it gathers together (accelerate's FSDP_AUTO_WRAP_POLICY)."""

WRAPS = ("offload", "auto_wrap")
"""Other words of `fsdp`."""


def sharded(f: Fields, training: Training, *, machines: int = 1) -> Training:
    """`training` with what `fsdp` and `fsdp_config` say."""
    words = f.raw("fsdp")
    listed = words.split() if isinstance(words, str) else words if isinstance(words, list) else ()
    named = {str(word).lower() for word in listed}
    if unknown := sorted(named - {*SHARDS, *WRAPS}):
        hint = nearest(unknown[0], [*SHARDS, *WRAPS])
        f.fail("fsdp", f"{unknown[0]!r} is none of FSDP's words{hint}: {', '.join((*SHARDS, *WRAPS))}")
    keys = [name for name in f.names() if name.startswith("fsdp_config.")]
    names = {name.removeprefix("fsdp_config.").removeprefix("fsdp_"): name for name in keys}
    version = f.raw("fsdp_version") or f.raw(names.get("version", "fsdp_version")) or 1
    if str(version) not in ("1", "2"):
        f.fail(names.get("version", "fsdp_version"), f"{version!r}: FSDP has versions 1 and 2")
    if not named and words is not True and not names:
        return training
    if named and not named & set(SHARDS):
        return training
    mixed = any(flag(f, key) for key in MIXED)
    strategy = next((word for word in SHARDS if word in named), None)
    spelled = f.raw(names.get("sharding_strategy", "fsdp_config.fsdp_sharding_strategy"))
    again = f.raw(names.get("reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"))
    strategy = strategy or str(spelled if isinstance(spelled, str) else "full_shard").lower()
    if strategy not in SHARDS:
        key = names.get("sharding_strategy", "fsdp_config.fsdp_sharding_strategy")
        f.fail(key, f"{spelled!r} is no strategy of FSDP{nearest(strategy, SHARDS)}: {', '.join(SHARDS)}")
    zero = SHARDS.get(strategy, 3)
    if again is False or str(again).lower() in ("false", "shard_grad_op"):
        zero = 2
    policy = names.get("auto_wrap_policy", "fsdp_config.auto_wrap_policy")
    if (wrap := f.raw(policy)) is not None and str(wrap).upper() not in POLICIES:
        f.fail(policy, f"{wrap!r} is no policy{nearest(str(wrap), POLICIES)}: {', '.join(POLICIES)}")
    wraps = names.get("transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap")
    own = layer_class(training.model)
    for wrapped in names_of(f.raw(wraps)) if own else ():
        if wrapped != own and (wrapped in LAYERS.values() or nearest(wrapped, [str(own)])):
            f.fail(wraps, f"no layer of {network_graph(training.model).name} is a {wrapped}; it has {own}")
    for key in ("activation_checkpointing", "offload_params"):
        f.raw(names.get(key, f"fsdp_config.{key}"))
    recompute = flag(f, names.get("activation_checkpointing", "fsdp_config.activation_checkpointing"))
    offload = flag(f, names.get("offload_params", "fsdp_config.offload_params")) or "offload" in named
    first = flag(f, names.get("cpu_ram_efficient_loading", "fsdp_config.cpu_ram_efficient_loading"))
    f.ignore(*names.values(), "fsdp", "fsdp_version", "fsdp_config")
    f.notes.append(f"fsdp: version {version}, read as {strategy}")
    return replace(
        training,
        zero=zero,  # type: ignore[arg-type]
        replicas=machines if strategy.startswith("hybrid") else training.replicas,
        recompute=training.recompute or recompute,
        offload=offload,
        precision=under_fsdp(training.precision) if zero and mixed else training.precision,
        loads="first_rank" if first else "each_rank",
    )


def under_fsdp(precision: Precision) -> Precision:
    """accelerate widens trainable parameters to fp32 before it shards them under mixed precision; gradients are
    reduced in the compute dtype."""
    if precision.compute == "fp32":
        return precision
    return replace(AUTOCAST, compute=precision.compute, reduce=precision.compute)


LOADED = ("auto", "bfloat16", "float16", "float32", "bf16", "fp16", "fp32", "half", "float", "none", "None")
"""Dtypes in which a model may be loaded."""


def precision_of(f: Fields, *, loaded: str | None, default: str = "no") -> Precision:
    """bf16, fp16 and the dtype that the model is loaded in: `bfloat16`, `float32`, or None for fp32."""
    if loaded is not None and loaded.removeprefix("torch.") not in LOADED:
        f.fail("torch_dtype" if f.has("torch_dtype") else "dtype", f"{loaded!r}; understood are {', '.join(LOADED)}")
    bf16, fp16 = flag(f, "bf16", default == "bf16"), flag(f, "fp16", default == "fp16")
    either_half(f, bf16, fp16)
    pure = flag(f, "pure_bf16")
    if not bf16 and not fp16:
        bf16, fp16 = flag(f, "accelerate_bf16"), flag(f, "accelerate_fp16")
    f.ignore("float16", "bfloat16", *MIXED)
    if pure or (loaded or "").removeprefix("torch.") in ("bfloat16", "bf16", "auto"):
        return BF16
    if bf16:
        return AUTOCAST
    return FP16 if fp16 else in_tf32(f, FP32)


def in_tf32(f: Fields, precision: Precision) -> Precision:
    """Returns the precision with matmuls in TF32 where they would be in fp32 and the file switches it on."""
    return replace(precision, compute="tf32") if flag(f, "tf32") and precision.compute == "fp32" else precision


def finished(
    source: Source,
    context: ReadContext,
    training: Training,
    neutral: Collection[str],
    inexpressible: Mapping[str, str],
    assumed: list[str],
    spelled: TrainerTerms = HUGGING_FACE,
) -> Job:
    """The job, sharded as fields and launcher say, every field accounted for. assumed: begins with the source's.
    spelled: the program's words for changes."""
    f = source.fields
    f.ignore("tf32")  # means nothing to products in bf16 and fp16
    machines = f.peek("num_machines")
    training = sharded(f, training, machines=machines if isinstance(machines, int) else 1)
    tp, cp, ulysses = (f.integer(f"parallelism_config.{axis}_size", 1) for axis in ("tp", "cp", "sp"))
    if cp > 1 and ulysses > 1:
        f.fail("parallelism_config.sp_size", "cp_size and sp_size both divide sequences, of which one is taken")
    f.ignore("parallelism_config.sp_backend", "parallelism_config.sp_seq_length*", "parallelism_config.sp_attn*")
    replicas = f.integer("parallelism_config.dp_replicate_size", 1)
    training = replace(
        training,
        tp=tp,
        cp=max(cp, ulysses, training.cp),
        replicas=max(replicas, training.replicas),
        layout=Layout(context="all_gather" if cp > 1 else "ulysses") if cp * ulysses > 1 else training.layout,
        modules=modules_of(f),
        loads=training.loads or "each_rank",
    )
    by_file = inline(f, "deepspeed")
    if by_file is not None and f.peek("fsdp"):
        f.fail("fsdp", "fsdp and deepspeed both shard the model, of which transformers takes one; leave one out")
    f.ignore("deepspeed")
    if by_file in SWITCHED:
        f.ignore(*BESIDE_SWITCH)
    f.account(neutral, inexpressible, (), closed=True)
    devices = context.devices or source.num_devices
    context = replace(context, devices=devices)
    style: Style = "flags" if source.program else "yaml"
    if by_file is not None:
        job = by_deepspeed(f, context, training, "deepspeed", source.folder, assumed)
        own, table = own_engine("deepspeed", by_file, source.folder), isinstance(by_file, Mapping)
        engine, named = None if own is None else own[0], "" if own is not None else str(by_file)
        terms = trainer_terms(spelled, by="deepspeed", style=style, engine=engine, table=table, named=named)
        return replace(job, stated_devices=source.num_devices, terms=terms)
    if not training.zero:
        assumed.append("no deepspeed and no fsdp in the file: replicas (--set deepspeed=zero3, --set fsdp=full_shard)")
    job = job_of(f, context, training, assumed, stated=source.num_devices)
    return replace(job, terms=trainer_terms(spelled, by="fsdp" if training.zero else "", style=style))

"""GPT-NeoX's YAML files: a network by Megatron's sizes, run by DeepSpeed.

What a key means was read from EleutherAI/gpt-neox at commit ea7aefd8f8e1 (2025): megatron/neox_arguments/neox_args.py,
megatron/model/transformer.py. Keys are read with - or _ between words. Leaves out Mamba, RWKV, gMLP and experts, which
are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon.formats.deepspeed import read as deepspeed
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, Network, ReadContext
from gnomon.formats.job import Fields, Job, divides, flatten, layers_of, read_source
from gnomon.formats.megatron.forks import layers_by_type
from gnomon.formats.tokenizers import rows_of
from gnomon.formats.yaml_file import read_yaml
from gnomon.models.decoder import DecoderConfig
from gnomon.models.gpt import GptConfig, GptNeoxConfig
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Mesh, Saved
from gnomon.software import stack

DEEPSPEED = (
    "zero_optimization fp16 bf16 gradient_clipping train_batch_size train_micro_batch_size_per_gpu optimizer "
    "gradient_accumulation_steps data_types communication_data_type".split()
)
"""Sections that DeepSpeed reads."""

IRRELEVANT = frozenset(
    """
    init_method output_layer_init_method min_lr data_impl partition_activations synchronize_each_layer weight_decay
    train_iters lr_decay_* distributed_backend warmup checkpoint_factor extra_save_iters eval_* log_* steps_per_print
    keep_last_n_checkpoints wall_clock_breakdown hostfile num_workers tokenizer_type *data_path* vocab_file merge_file
    save load finetune launcher deepspeed_* use_wandb wandb_* tensorboard_dir split include comment do_train do_valid
    do_test layernorm_epsilon rms_norm_epsilon rotary_emb_base output_layer_parallelism deepspeed slurm* master_*
    no_ssh* detect_nvlink_pairs num_nodes seed *_data_weights checkpoint_scale checkpoint_validation*
    attention_precision pack_impl print_* user_script no_load_* override_lr_scheduler use_checkpoint_lr_scheduler
    precision fp32_allreduce scaled_upper_triang_masked_softmax_fusion bias_gelu_fusion rope_fusion layernorm_fusion
    rmsnorm_fusion attention_config attention_config.* lr_* clip_grad adlr_autoresume dataset_impl rope_scaling* s3_*
    save_iters checkpoint gas hidden_act sparsity_config* train_label_* allow_chopping jsonl_* shuffle* mmap_warmup
    config_files global_num_gpus make_vocab_size_divisible_by use_qk_layernorm
    """.split()
)

INEXPRESSIBLE = {
    "te_*": "kernels of Transformer Engine, with eight-bit products; read as bf16",
    "mup*": "another initialisation and learning rate",
    "use_bnb_optimizer": "states in eight bits; memory is too large here",
    "lora": "adapters",
    "sliding_window_width": "a window of the scores",
    "use_flashattn_swiglu": "a fused activation",
}

TOKENIZERS = {"HFTokenizer": 50277, "GPT2BPETokenizer": 50257, "SPMTokenizer": 32000}
"""Tokenizer -> rows, of the files that its documentation names: 20B_tokenizer.json, GPT-2's, Llama's."""


def _looks(sample: Sample) -> bool:
    keys = {key.replace("-", "_") for key in sample.values}
    return "pipe_parallel_size" in keys and bool({"model_parallel_size", "num_layers"} & keys)


def _network(f: Fields, context: ReadContext, tp: int) -> Network | str:
    hidden, heads = f.integer("hidden_size"), f.integer("num_attention_heads")
    layers, positions = f.integer("num_layers"), f.integer("max_position_embeddings", 2048)
    norm, act = str(f.raw("norm") or "layernorm"), str(f.raw("activation") or "gelu")
    position = str(f.raw("pos_emb") or "learned")
    tied, parallel = not f.flag("no_weight_tying", False), f.flag("gpt_j_residual", False)
    kv_heads, rotary_part = f.integer("num_kv_heads", heads), f.number("rotary_pct", 1.0)
    dropout, attention_dropout = f.number("hidden_dropout", 0.0), f.number("attention_dropout", 0.0)
    bias = f.flag("use_bias_in_attn_linear", True)
    ffn_bias, norm_bias = f.flag("use_bias_in_mlp", True), f.flag("use_bias_in_norms", True)
    ffn, multiple = f.integer("intermediate_size", 4 * hidden), f.integer("mlp_multiple_of", 1)
    vocab = _vocabulary(f, context, tp)
    f.ignore("gpt_j_tied")
    if context.model is not None:
        return context.model
    mixers = str(f.peek("attention_config"))
    for name, what in (("mamba", "Mamba's first version"), ("rwkv", "RWKV"), ("gmlp", "gMLP"), ("amlp", "aMLP")):
        if name in mixers:
            f.fail("attention_config", f"its layers are {what}, which has no price; {GIVE_MODEL}")
    if f.integer("moe_num_experts", 1) > 1:
        f.fail("moe_num_experts", f"its experts are megablocks', which no network here says; {GIVE_MODEL}")
    gated = act in ("swiglu", "geglu", "reglu", "bilinear")
    if gated:  # both halves together have 2/3 of the width that is given
        ffn = int(ffn * 2 / 3) // 2
    ffn = -(-ffn // multiple) * multiple
    rms = norm in ("rmsnorm", "te_rmsnorm")
    sizes: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab}
    plain = not rms and not gated and bias and ffn_bias and norm_bias and kv_heads == heads
    if plain and position == "rotary":
        return GptNeoxConfig(
            name="gpt-neox-job",
            **sizes,
            ffn_size=ffn,
            rotary_fraction=rotary_part,
            parallel_residual=parallel,
            tied=tied,
        )
    if plain and position == "learned" and not parallel:
        return GptConfig(
            name="gpt-neox-job",
            **sizes,
            max_positions=positions,
            ffn_size=ffn,
            dropout=dropout,
            attention_dropout=attention_dropout,
            tied=tied,
        )
    extra: dict[str, Any] = {"num_kv_heads": kv_heads, "head_dim": hidden // heads, "ffn_size": ffn, "tied": tied}
    if rms and act == "swiglu" and position == "rotary" and not parallel:
        return LlamaConfig(name="gpt-neox-job", **sizes, **extra, qkv_bias=bias, out_bias=bias, ffn_bias=ffn_bias)
    return DecoderConfig(
        name="gpt-neox-job",
        **sizes,
        **extra,
        order="parallel_two" if parallel else "pre",
        norm="rms" if rms else "layer",
        norm_bias=norm_bias and not rms,
        gated=gated,
        activation="silu" if act in ("swiglu", "silu") else "gelu",
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=ffn_bias,
        rotary=position == "rotary",
        position_rows=positions if position == "learned" else 0,
        dropout=dropout,
    )


def _vocabulary(f: Fields, context: ReadContext, tp: int) -> int:
    """Rows of the embedding: the tokenizer's, padded as Megatron pads them."""
    tokenizer = str(f.peek("tokenizer_type") or "GPT2BPETokenizer")
    named = rows_of(str(f.peek("vocab_file") or ""))
    rows = context.vocab_size or named or TOKENIZERS.get(tokenizer, 50257)
    if context.vocab_size is None and named is None and tokenizer != "GPT2BPETokenizer":
        f.note_default("vocab_size", str(rows), f"its tokenizer's file is not read; {tokenizer}'s usual (--vocab-size)")
    multiple = f.integer("make_vocab_size_divisible_by", 128) * tp
    return -(-rows // multiple) * multiple


def _deepspeed(flat: Mapping[str, object]) -> dict[str, object]:
    """The keys that DeepSpeed reads; `precision` is a short form of them, and fp16 may say bfloat16."""
    engine_values = {key: value for key, value in flat.items() if key.partition(".")[0] in DEEPSPEED}
    engine_values.pop("fp16.fp16", None)
    kind = str(engine_values.pop("fp16.type", flat.get("precision", "")))
    if kind == "bfloat16" or flat.get("precision") == "bfloat16":
        engine_values = {key: value for key, value in engine_values.items() if not key.startswith("fp16")} | {
            "bf16.enabled": True
        }
    elif flat.get("precision") == "fp16":
        engine_values["fp16.enabled"] = True
    return engine_values


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    flat = {key.replace("-", "_"): value for key, value in flatten(read_yaml(text, file)).items()}
    sections = {key for key in flat if key.partition(".")[0] in DEEPSPEED}
    engine = _deepspeed({**flat, **{key: value for key, value in context.values().items() if key in flat}})
    mine = {key: text for key, text in context.settings.items() if key not in sections}
    f = Fields(
        {key: value for key, value in flat.items() if key not in sections}, file, replace(context, settings=mine)
    )
    pp, tp = max(1, f.integer("pipe_parallel_size", 0, least=0)), f.integer("model_parallel_size", 1)
    model = _network(f, context, tp)
    devices = context.devices or pp * tp
    divides("devices", devices, "pipe_parallel_size x model_parallel_size", pp * tp)
    recompute = f.flag("checkpoint_activations", False)
    every = f.integer("checkpoint_num_layers", 1)
    seq_len = f.integer("seq_length", 2048)
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    job = deepspeed.job_of(
        engine,
        file,
        context=replace(
            context,
            devices=devices // (pp * tp),
            model=model,
            seq_len=context.seq_len or seq_len,
            settings={},
        ),
        mixed_precision=None,
        saved=Saved(preset="full", every=every) if recompute else Saved(),
    )
    schedule, layers = job.plan.schedule, layers_of(model)
    if pp > 1 and layers % pp:
        tied = not f.flag("no_weight_tying", False)
        schedule = replace(schedule, layers_per_stage=layers_by_type("type:transformer", layers, pp, tied=tied))
    mesh = Mesh(pp=pp, dp_shard=devices // (pp * tp), tp=tp)
    return replace(
        job,
        plan=replace(job.plan, mesh=mesh, schedule=schedule),
        stack=stack("megatron-deepspeed"),
        devices=devices,
        notes=(*f.notes, *job.notes),
        unexpressed=(*f.unexpressed, *job.unexpressed),
    )


FORMAT = Format(
    name="gpt-neox", program="EleutherAI/gpt-neox ea7aefd", files="YAML of `deepy.py`", looks=_looks, read=_read
)

"""nanotron's YAML configuration to a Job.

`read_nanotron(source)` takes a file or its text. What a field means was read from huggingface/nanotron at commit
2411b022a75fb7f7561a1bb4166706da5e1b76de (2026-04-07): src/nanotron/config/{config,parallelism_config,models_config}.py,
src/nanotron/{helpers,trainer}.py, src/nanotron/parallel/context.py. Leaves out: Starcoder2, Mamba, mixed data stages.
"""

from __future__ import annotations

from pathlib import Path

from gnomon import orders
from gnomon.formats.given import GIVE_MODEL, NOTHING, ReadContext
from gnomon.formats.job import Fields, Job, ModelConfig, divides, flatten, read_source, with_job_fields
from gnomon.formats.yaml_file import read_yaml
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig
from gnomon.plans import DType, Layout, Mesh, Optimizer, Overlap, Plan, Precision, Saved, Schedule, Workload
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    checkpoints checkpoints.* data_stages general.* lighteval lighteval.* logging logging.* metrics_logging
    metrics_logging.* profiler profiler.* tokenizer tokenizer.* s3_upload s3_upload.* model.init_method.*
    optimizer.learning_rate_scheduler.* optimizer.weight_decay optimizer.weight_decay_exclude_named_params
    optimizer.optimizer_factory.adam_* optimizer.adam_* tokens.train_steps tokens.val_check_interval tokens.limit_*
    model.model_config.bos_token_id model.model_config.eos_token_id model.model_config.pad_token_id
    model.model_config.initializer_range model.model_config.max_position_embeddings model.model_config.pretraining_tp
    model.model_config.rms_norm_eps model.model_config.rope_* model.model_config.use_cache
    model.model_config.interleaved_rotary doremi.*
    model.model_config.z_loss_* model.model_config.log_attn_probs model.model_config.router_aux_loss_coef
    model.model_config.moe_config.router_aux_loss_coef model.model_config.ring_attn_heads_k_stride
    """.split()
)

INEXPRESSIBLE = {
    "parallelism.tp_linear_async_communication": "transfers overlap with products; a prediction without is too slow",
    "model.model_config._use_doc_masking": "attention does not cross documents: less work than a full sequence",
    "model.model_config._fused_*": "kernels of parts, switched",
    "model.model_config._use_qkv_packed": "one product for q, k and v",
    "model.model_config._attn_implementation": "the attention kernel",
    "model.model_config.flex_attention_mask": "another mask",
    "model.model_config.no_rope_layer": "layers without rotary embedding",
    "model.model_config.sliding_window_size": "a window on some layers",
    "model.model_config.rope_seq_len_interpolation_factor": "interpolated positions",
}


def read_nanotron(source: str | Path, *, name: str = "nanotron-job", context: ReadContext = NOTHING) -> Job:
    """The job of a configuration file (a Path, or its text). InputError for what is missing, unknown or refused."""
    text, file = read_source(source)
    f = Fields(flatten(read_yaml(text, file)), file, context)
    mesh = mesh_of(f)
    model = context.model or model_of(f, mesh.tp, name)
    if context.model is not None:
        f.ignore(
            *(key for key in f.names() if key.startswith("model.model_config")), "model.make_vocab_size_divisible_by"
        )
    micro = f.integer("tokens.micro_batch_size")
    steps = f.integer("tokens.batch_accumulation_per_replica")
    seq_len = f.integer("tokens.sequence_length")
    divides("tokens.sequence_length", seq_len, "tp x cp", mesh.tp * mesh.cp)
    engines = {spelled: order.name for spelled, order in orders.spelled("nanotron").items()}
    engine = f.choice("parallelism.pp_engine", engines, "afab")
    modes = {name: name.lower() for name in ("ALL_REDUCE", "all_reduce", "REDUCE_SCATTER", "reduce_scatter")}
    mode = f.choice("parallelism.tp_mode", modes, "ALL_REDUCE")
    overlap = f.flag("parallelism.tp_linear_async_communication", False)
    if overlap and mesh.tp > 1:
        f.report(
            "parallelism.tp_linear_async_communication", INEXPRESSIBLE["parallelism.tp_linear_async_communication"]
        )
    plan = Plan(
        mesh=mesh,
        schedule=Schedule(
            name=engine if mesh.pp > 1 else orders.DEFAULT,
            micro_batch_size=micro,
            layers_per_stage=stages_of(model, mesh.pp) if isinstance(model, LlamaConfig) else (),
        ),
        saved=Saved(preset="full" if f.flag("parallelism.recompute_layer", False) else "none"),
        layout=Layout(
            sequence_parallel=mode == "reduce_scatter" and mesh.tp > 1,
            keep_gathered=not f.flag("parallelism.tp_recompute_allgather", True),
        ),
        overlap=Overlap(bucket_bytes=f.integer("model.ddp_bucket_cap_mb", 25) * 2**20, pipeline_sends=False),
        optimizer=optimizer_of(f),
        precision=precision_of(f),
    )
    record = stack("nanotron")
    fused = f.flag("optimizer.torch_adam_is_fused", True)  # where older files have it
    if not f.flag("optimizer.optimizer_factory.torch_adam_is_fused", fused):
        record = with_job_fields(record, "torch_adam_is_fused = false", optimizer_step="foreach")
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return Job(
        model=model,
        plan=plan,
        workload=Workload(global_batch_size=micro * steps * mesh.data_ranks, seq_len=seq_len),
        stack=record,
        devices=mesh.world_size,
        stated_devices=mesh.world_size,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
    )


def mesh_of(f: Fields) -> Mesh:
    """Reads the axes. nanotron's experts have ranks of their own beyond dp; only ep = 1 is the same here."""
    ep = f.integer("parallelism.expert_parallel_size", 1)
    if ep > 1:
        f.fail(
            "parallelism.expert_parallel_size",
            f"{ep}: nanotron adds ranks for experts (dp x pp x tp x cp x ep in all), which a plan cannot say; use 1",
        )
    dp, pp, tp = (f.integer(f"parallelism.{axis}") for axis in ("dp", "pp", "tp"))
    return Mesh(dp_shard=dp, pp=pp, tp=tp, cp=f.integer("parallelism.context_parallel_size", 1))


def stages_of(model: LlamaConfig, pp: int, *, tie_ends_stage: bool = True) -> tuple[int, ...]:
    """Decoder layers of each of nanotron's stages; empty for one stage.

    Blocks cost their weights (4 h² and the feed-forward of a layer, h·vocab of the head, others nothing). Each goes to
    the stage under way, which ends when the sum so far has reached its share of the whole. tie_ends_stage: also where
    the share is met exactly, as by a head that weighs four layers; nanotron's `>` would take one layer more, but time
    and memory of its runs say that it did not (5 of 16 layers on the first of four stages, 10 on the first of two).
    Where layers run out early, the head is not on the last stage, which has only the loss; here it is, and stages
    between them take a layer each from the ones before: the longest stage stays as long. Source: huggingface/nanotron
    2411b02 src/nanotron/models/base.py build_model, models/llama.py get_block_compute_costs.
    """
    if pp == 1:
        return ()
    hidden = model.hidden_size
    layer = 4 * model.num_heads * model.head_dim * hidden + 3 * model.ffn_size * hidden
    whole = model.num_layers * layer + model.vocab_size * hidden
    counts, stage = [0] * pp, 0
    for done in range(1, model.num_layers + 1):
        counts[stage] += 1
        met, share = done * layer * pp, whole * (stage + 1)
        stage += met > share or (tie_ends_stage and met == share)
    for empty in [s for s in range(pp - 1) if not counts[s]]:
        giver = max((s for s in range(empty) if counts[s] > 1), default=-1)
        if giver < 0:
            return ()
        counts[giver] -= 1
        counts[empty] += 1
    return tuple(counts)


def model_of(f: Fields, tp: int, name: str) -> ModelConfig:
    """Llama or Qwen2, dense or with experts; the vocabulary is padded to make_vocab_size_divisible_by × tp."""
    c = "model.model_config."
    qwen = f.flag(c + "is_qwen2_config", False)
    if not qwen and not f.flag(c + "is_llama_config", False):
        f.fail(
            c + "is_llama_config", f"only models with is_llama_config or is_qwen2_config are described; {GIVE_MODEL}"
        )
    hidden, heads = f.integer(c + "hidden_size"), f.integer(c + "num_attention_heads")
    kv_heads = f.integer(c + "num_key_value_heads", heads)
    divides("hidden_size", hidden, "num_attention_heads", heads)
    divides("num_attention_heads", heads, "parallelism.tp", tp)
    divides("num_key_value_heads", kv_heads, "parallelism.tp", tp)
    acts = {"silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
    activation = f.choice(c + "hidden_act", acts, "silu")  # of GLUActivation: gated, whichever it is
    multiple = f.integer("model.make_vocab_size_divisible_by", 1) * tp
    vocab = -(-f.integer(c + "vocab_size") // multiple) * multiple
    bias = f.flag(c + "attention_bias", False)
    experts = c + "moe_config."
    if any(f.has(experts + key) for key in ("num_experts", "top_k", "moe_intermediate_size")):
        if f.flag(experts + "enable_shared_expert", False):
            f.report(experts + "enable_shared_expert", "a shared expert: left out, so too small")
        f.ignore(
            experts + "shared_expert_intermediate_size", experts + "token_dispatcher_type", c + "intermediate_size"
        )
        f.report(experts + "layers", "which layers are mixtures: read as all of them")
        f.report_unless(c + "hidden_act", (None, "silu"), "the experts' activation: read as SiLU, which costs the same")
        return MixtralConfig(
            name=name,
            num_layers=f.integer(c + "num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=hidden // heads,
            num_experts=f.integer(experts + "num_experts", 8),
            experts_per_token=f.integer(experts + "top_k", 2),
            expert_ffn_size=f.integer(experts + "moe_intermediate_size", 1408),
            vocab_size=vocab,
            qkv_bias=bias,
            tied=f.flag(c + "tie_word_embeddings", False),
        )
    f.ignore(c + "moe_config")
    ffn = f.integer(c + "intermediate_size")
    divides("intermediate_size", ffn, "parallelism.tp", tp)
    return LlamaConfig(
        name=name,
        num_layers=f.integer(c + "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        ffn_size=ffn,
        vocab_size=vocab,
        tied=f.flag(c + "tie_word_embeddings", False),
        qkv_bias=bias,
        activation=activation,
    )


def optimizer_of(f: Fields) -> Optimizer:
    """AdamW or SGD, states divided at ZeRO stage 1."""
    kind = f.choice("optimizer.optimizer_factory.name", {"adamW": "adamw", "sgd": "sgd"}, "adamW")
    stage = f.integer("optimizer.zero_stage", least=0)
    if stage > 1:
        f.fail("optimizer.zero_stage", f"{stage}: nanotron has stages 0 and 1; use 1")
    clip = f.raw("optimizer.clip_grad")
    return Optimizer(kind=kind, zero=stage, clip=clip is not None)  # type: ignore[arg-type]


def precision_of(f: Fields) -> Precision:
    """fp32 accumulation comes with an fp32 copy of the parameters; without it the update is on the parameters."""
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    param: DType = f.choice("model.dtype", names, "bfloat16")  # type: ignore[assignment]
    if not f.has("model.dtype"):
        f.notes.append("model.dtype: not given; nanotron takes bfloat16")
    if f.flag("optimizer.accumulate_grad_in_fp32", False) and param != "fp32":
        return Precision(param=param, compute=param, grad="fp32", reduce="fp32", master="fp32", states="fp32")
    return Precision(param=param, compute=param, grad=param, reduce=param, master="none", states=param)

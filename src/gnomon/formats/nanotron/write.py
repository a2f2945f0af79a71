"""A plan as the YAML configuration of nanotron (huggingface/nanotron 2411b02, 2026-04-07), read back by `nanotron`.

`draft(asked)` returns the file for run_train.py: a Llama or Qwen2, dense or with experts. Leaves out data (nanotron's
own dummy batches are taken), tokenizer, learning rate and number of steps, which are placeholders.
"""

from __future__ import annotations

from gnomon import orders
from gnomon.errors import InputError
from gnomon.formats.export import Draft, ExportRequest, half_of, need_axes, need_model
from gnomon.formats.job import ModelConfig
from gnomon.formats.nanotron.read import read_nanotron
from gnomon.formats.yaml_file import emit_yaml
from gnomon.models.llama import LlamaConfig
from gnomon.models.mixtral import MixtralConfig
from gnomon.plans import Plan, Precision, Saved

PROGRAM = "nanotron 2411b02"

NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

REASONS = (
    ("mesh.dp_replicate", "nanotron has one data-parallel axis"),
    ("mesh.etp", "nanotron slices experts by its own rule"),
    ("schedule.name", "nanotron has 1F1B and all-forward-all-backward"),
    ("schedule.layers_per_stage", "nanotron divides layers by their weights, the head counted"),
    ("saved.*", "nanotron recomputes whole layers, all of them"),
    ("layout.keep_gathered", "tp_recompute_allgather is the only choice here"),
    ("overlap.bucket_bytes", "ddp_bucket_cap_mb counts whole MiB, and has a default (25)"),
    ("overlap.*", "nanotron reduces during backward by DDP; its pipeline waits for each send"),
    ("optimizer.kind", "nanotron has AdamW and SGD"),
    ("optimizer.zero", "nanotron has ZeRO 0 and 1"),
    ("optimizer.*", "the update is on the device, at once"),
    ("precision.*", "one dtype, with gradients, copy and states in fp32 or without a copy"),
)


def draft(request: ExportRequest) -> Draft:
    """Drafts the file. InputError for a model or combination that nanotron refuses, with the fix."""
    model = need_model(request, PROGRAM)
    need_axes(request, PROGRAM, "ep")
    plan = request.plan
    values: dict[str, object] = {
        "general": {"project": "gnomon", "run": request.label, "seed": 42},
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 100000},
        "model": {
            "ddp_bucket_cap_mb": max(1, (plan.overlap.bucket_bytes or 25 * 2**20) // 2**20),
            "dtype": NAMES[half_of(plan.precision) or "fp32"],
            "init_method": {"std": 0.02},
            "make_vocab_size_divisible_by": 1,
            "model_config": _model(model, request.workload.seq_len),
        },
        "optimizer": _optimizer(plan),
        "parallelism": _parallelism(plan),
        "tokens": {
            "sequence_length": request.workload.seq_len,
            "micro_batch_size": request.micro,
            "batch_accumulation_per_replica": request.microbatches,
            "train_steps": 50,
        },
    }
    text = emit_yaml(values)
    return Draft(
        program=PROGRAM,
        text=text,
        job=read_nanotron(text, name=request.label),
        elsewhere=(
            "data_stages and tokenizer: yours; without them nanotron trains on made-up batches",
            "learning rate and train_steps are placeholders",
            "rope_theta, rms_norm_eps and init_method change results and no time: give your model's",
        ),
        reasons=REASONS,
    )


def _model(model: ModelConfig, seq_len: int) -> dict[str, object]:
    """Sizes of a Llama or Qwen2, with experts for a mixture."""
    if not isinstance(model, (LlamaConfig, MixtralConfig)):
        raise InputError(f"{PROGRAM} has Llama and Qwen2, dense or with experts; {model.name} is neither")
    config: dict[str, object] = {
        "is_qwen2_config": True,
        "attention_bias": model.qkv_bias,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "max_position_embeddings": seq_len,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": model.tied,
        "vocab_size": model.vocab_size,
    }
    if isinstance(model, LlamaConfig):
        return config | {"intermediate_size": model.ffn_size}
    return config | {
        "intermediate_size": model.expert_ffn_size,
        "moe_config": {
            "num_experts": model.num_experts,
            "top_k": model.experts_per_token,
            "moe_intermediate_size": model.expert_ffn_size,
        },
    }


def _optimizer(plan: Plan) -> dict[str, object]:
    optimizer = plan.optimizer
    adam = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True, "name": "adamW"}
    return {
        "accumulate_grad_in_fp32": _accumulates_in_fp32(plan.precision),
        "clip_grad": 1.0 if optimizer.clip else None,
        "learning_rate_scheduler": {"learning_rate": 3e-4, "lr_warmup_steps": 1, "lr_warmup_style": "linear"},
        "optimizer_factory": {"name": "sgd"} if optimizer.kind == "sgd" else adam,
        "weight_decay": 0.01,
        "zero_stage": min(1, optimizer.zero),
    }


def _accumulates_in_fp32(precision: Precision) -> bool:
    return half_of(precision) is not None and "fp32" in (precision.grad, precision.master, precision.param)


def _engine(schedule: str) -> str:
    """What nanotron calls an order; 1F1B for those that it has not."""
    known = {order.name: spelled for spelled, order in orders.spelled("nanotron").items()}
    return known.get(schedule, known[orders.DEFAULT])


def _parallelism(plan: Plan) -> dict[str, object]:
    mesh = plan.mesh
    return {
        "dp": mesh.data_ranks,
        "pp": mesh.pp,
        "tp": mesh.tp,
        "context_parallel_size": mesh.cp,
        "expert_parallel_size": 1,
        "pp_engine": _engine(plan.schedule.name),
        "recompute_layer": plan.saved != Saved(),
        "tp_linear_async_communication": False,
        "tp_mode": "REDUCE_SCATTER" if plan.layout.sequence_parallel else "ALL_REDUCE",
        "tp_recompute_allgather": not plan.layout.keep_gathered,
    }

"""A plan as the TOML file of torchtitan v0.2.2 (73a0e69, 2026-02-20), read back by `torchtitan`.

`draft(asked)` returns the file. A model is named by a flavor of torchtitan's; for a Llama that it has not, the file
names one of its own and says which sizes to register under that name. Leaves out data, learning rate and number of
steps, which are placeholders, and everything that only later versions have.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from gnomon import orders
from gnomon.errors import InputError
from gnomon.formats.export import Draft, ExportRequest, need_axes, need_model
from gnomon.formats.job import ModelConfig
from gnomon.formats.torchtitan.models import FLAVORS
from gnomon.formats.torchtitan.read import read_torchtitan, stage_split
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Fp8, Optimizer, Plan, Precision, Saved
from gnomon.schema.toml import emit_toml

PROGRAM = "torchtitan v0.2.2"

REASONS = (
    ("schedule.name", "torchtitan has 1F1B, GPipe, interleaved 1F1B, looped BFS and the zero-bubble schedules of a V"),
    ("layout.sequence_parallel", "torchtitan divides the sequence wherever tp > 1"),
    ("layout.context", "torchtitan has the ring (alltoall) and the gather (allgather)"),
    ("overlap.optimizer", "updates during backward, which torchtitan has, are in no prediction"),
    ("overlap.bucket_bytes", "FSDP2 reduces block by block, DDP by its own default"),
    ("overlap.*", "FSDP2 gathers one block ahead, reduces during backward, and sends while computing"),
    ("optimizer.kind", "torchtitan v0.2.2 has Adam and AdamW"),
    ("optimizer.keep_last_block", "in a pipeline fsdp_reshard_after_forward is always or never, for every block"),
    ("optimizer.zero", "torchtitan divides parameters (ZeRO 3, FSDP2) or, with replicas alone, nothing"),
    ("optimizer.clip", "the update on the host is clipped too, which is not described here"),
    ("optimizer.offload*", "enable_cpu_offload moves everything, in one piece"),
    ("precision.fp8.gather", "torchao gathers in eight bits with a scale a tensor only"),
    ("precision.param", "FSDP2 keeps one copy of the parameters, divided, and casts as it gathers"),
    ("precision.*", "FSDP2 keeps parameters, gradients and states in training.dtype, and reduces in fp32"),
    ("saved.*", "torchtitan recomputes whole layers, all or every n-th, or every other product of a Llama's"),
)

KEPT = ("self_attn.core*", "self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj")
"""What `selective_ac_option = "op"` keeps of a Llama's layer, as the reader has it."""


def draft(request: ExportRequest) -> Draft:
    """Drafts the file. InputError for a model or combination that torchtitan refuses, with the fix."""
    model = need_model(request, PROGRAM)
    plan = request.plan
    if not any(hasattr(one, "num_experts") for one in (model,)):
        need_axes(request, PROGRAM, "ep", "etp")
    name, flavor, elsewhere = _flavor(model)
    values: dict[str, object] = {
        "job": {"description": f"{request.label}, written by gnomon"},
        "model": {"name": name, "flavor": flavor},
        "training": _training(request),
        "parallelism": _parallelism(request, model),
        "activation_checkpoint": _saved(plan.saved, model),
        "optimizer": _optimizer(plan),
    }
    if (fp8 := plan.precision.fp8) is not None:
        section, table = _fp8(fp8)
        values["model"] = {"name": name, "flavor": flavor, "converters": [section]}
        values["quantize"] = {"linear": {section: table}}
    if plan.overlap.splits and plan.mesh.tp > 1:
        values["compile"] = {"enable": True}  # which torchtitan asks for with async tensor parallelism
    text = emit_toml(values)
    return Draft(
        program=PROGRAM,
        text=text,
        job=read_torchtitan(text, devices=plan.mesh.world_size, model=model if elsewhere else None),
        elsewhere=(*elsewhere, "data, tokenizer, learning rate and number of steps are torchtitan's defaults"),
        reasons=REASONS,
    )


def _flavor(model: ModelConfig) -> tuple[str, str, tuple[str, ...]]:
    """(model.name, model.flavor, what to register); InputError for a family that torchtitan has not."""
    for key, known in FLAVORS.items():
        if replace(known, name=model.name) == model:
            family, _, size = key.partition(" ")
            return family, size, ()
    if not isinstance(model, LlamaConfig) or model.qkv_bias or model.window or model.tied or model.qk_norm:
        raise InputError(
            f"{PROGRAM} has no model like {model.name}; it has {', '.join(FLAVORS)}, and Llamas of other sizes"
        )
    sizes = (
        f"register llama3 flavor {model.name!r} in torchtitan/models/llama3/__init__.py: dim={model.hidden_size}, "
        f"n_layers={model.num_layers}, n_heads={model.num_heads}, n_kv_heads={model.num_kv_heads}, "
        f"vocab_size={model.vocab_size}, and a feed-forward of {model.ffn_size}"
    )
    return "llama3", model.name, (sizes,)


def _training(request: ExportRequest) -> dict[str, object]:
    """Writes batch and dtypes. A pipeline takes a round of the step at once; without one microbatches are
    accumulated."""
    plan, precision = request.plan, request.plan.precision
    local = request.micro * (request.microbatches // plan.schedule.rounds if plan.mesh.pp > 1 else 1)
    half = _half(precision)
    return {
        "local_batch_size": local,
        "global_batch_size": request.workload.batch_size,
        "seq_len": request.workload.seq_len,
        "dtype": "bfloat16" if half else "float32",
        "mixed_precision_param": "bfloat16" if precision.compute in ("bf16", "fp16") else "float32",
        "mixed_precision_reduce": "float32",
        "enable_cpu_offload": plan.optimizer.offload is not None or plan.optimizer.offload_parameters,
    }


def _half(precision: Precision) -> bool:
    """Whether parameters are kept in bf16 with no copy beside them."""
    return (precision.param, precision.master) == ("bf16", "none")


def _parallelism(request: ExportRequest, model: ModelConfig) -> dict[str, object]:
    plan = request.plan
    mesh, layout = plan.mesh, plan.layout
    plain = plan.optimizer.zero == 0 and mesh.world_size == mesh.data_ranks  # DDP: replicas alone
    reshard = plan.optimizer.reshard_after_forward
    policy = "never" if not reshard else "default" if plan.optimizer.keep_last_block and mesh.pp == 1 else "always"
    table: dict[str, object] = {
        "data_parallel_replicate_degree": mesh.data_ranks if plain else mesh.dp_replicate,
        "data_parallel_shard_degree": 1 if plain else mesh.dp_shard,
        "fsdp_reshard_after_forward": policy,
        "tensor_parallel_degree": mesh.tp,
        "enable_async_tensor_parallel": bool(plan.overlap.splits) and mesh.tp > 1,
        "disable_loss_parallel": not layout.loss_parallel,
        "context_parallel_degree": mesh.cp,
    }
    if mesh.cp > 1:
        table["context_parallel_rotate_method"] = "allgather" if layout.context == "all_gather" else "alltoall"
        table["context_parallel_load_balancer"] = "headtail"
    if mesh.ep > 1 or mesh.etp > 1:
        table |= {"expert_parallel_degree": mesh.ep, "expert_tensor_parallel_degree": mesh.etp}
    return table | (_pipeline(request, model) if mesh.pp > 1 else {})


def _pipeline(request: ExportRequest, model: ModelConfig) -> dict[str, object]:
    """The schedule, and torchtitan's own split of layers where it gives the plan's, else the modules of each stage."""
    schedule, pp = request.plan.schedule, request.plan.mesh.pp
    order = orders.find(schedule.name)
    counts = schedule.layers_per_stage
    if "torchtitan" not in order.names:  # nearest: 1F1B with one stage a rank
        order = orders.find(orders.DEFAULT)
        counts = tuple(model.num_layers // pp + (stage < model.num_layers % pp) for stage in range(pp))
    name, usual = order.names["torchtitan"], order.stages[0]
    table: dict[str, object] = {
        "pipeline_parallel_degree": pp,
        "pipeline_parallel_schedule": name,
        "pipeline_parallel_microbatch_size": request.micro,
    }
    for first, last in product(range(3), repeat=2):
        if len(counts) == pp * usual and counts == _own_split(model.num_layers, len(counts), first, last):
            keys = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
            return table | dict(zip(keys, (first, last), strict=True))
    return table | {"module_fqns_per_model_part": _modules(counts)}


def _own_split(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    try:
        return stage_split(layers, stages, first, last)
    except InputError:
        return ()


def _modules(counts: tuple[int, ...]) -> list[list[str]]:
    """Names of the modules of each stage."""
    parts, done = [], 0
    for count in counts:
        parts.append([f"layers.{layer}" for layer in range(done, done + count)])
        done += count
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]


def _saved(saved: Saved, model: ModelConfig) -> dict[str, object]:
    if not saved.rules and saved.preset == "none":
        return {"mode": "none"}
    if isinstance(model, LlamaConfig) and saved.preset == "full" and [r.tensors for r in saved.rules] == [KEPT]:
        return {"mode": "selective", "selective_ac_option": "op"}
    whole = all(rule.action == "recompute" and rule.tensors == ("*",) for rule in saved.rules)
    if saved.preset == "none" and whole and all((r.first_per_stage, r.stages) == (None, ()) for r in saved.rules):
        calls = [rule.calls for rule in saved.rules]
        for every in range(2, model.num_layers + 1):
            if calls == [f"layers[{i}]" for i in range(every - 1, model.num_layers, every)]:
                return {"mode": "selective", "selective_ac_option": str(every)}
    return {"mode": "full"}


def _optimizer(plan: Plan) -> dict[str, object]:
    optimizer: Optimizer = plan.optimizer
    return {"name": "Adam" if optimizer.kind == "adam" else "AdamW"}


def _fp8(fp8: Fp8) -> tuple[str, dict[str, object]]:
    """Writes (converter, its table): mx for mxfp8, otherwise float8 with the nearest recipe."""
    names = [pattern.strip("*") for pattern in fp8.except_ops]
    skipped = ["output" if name == "lm_head" else name for name in names]
    if fp8.recipe == "mxfp8":
        return "mx", {"filter_fqns": skipped}
    recipe = fp8.recipe if fp8.recipe in ("tensorwise", "rowwise") else "rowwise"
    table: dict[str, object] = {"recipe_name": recipe, "filter_fqns": skipped}
    return "float8", table | ({"enable_fsdp_float8_all_gather": True} if fp8.gather and recipe == "tensorwise" else {})

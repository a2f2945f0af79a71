"""A plan as a launch script of Megatron-LM 0.20.0 (NVIDIA/Megatron-LM d98e8a6, 2026-08-22), read back by `megatron`.

`draft(asked)` returns the script: torchrun, pretrain_gpt.py, and every option that the plan, the model and the batch
decide. Constraints are those of megatron/training/arguments.py (validate_args). Leaves out data, learning rate and
number of steps, which are placeholders.
"""

from __future__ import annotations

from collections.abc import Iterator
from shlex import quote

from gnomon import orders
from gnomon.formats.export import Draft, ExportRequest, half_of, need_model
from gnomon.formats.megatron.model_write import model_options
from gnomon.formats.megatron.read import (
    BALANCES,
    DISPATCHERS,
    DTYPE_BYTES,
    INTERLEAVED,
    PLAIN,
    global_factor,
    read_megatron,
)
from gnomon.formats.megatron.recompute import modules_of
from gnomon.plans import Optimizer, Overlap, Precision, Saved
from gnomon.plans.experts import router_biases

PROGRAM = "Megatron-LM 0.20.0"

Options = list[tuple[str, object]]
"""(name as in `args`, value); True is a switch, False and None are left out, a tuple has several values."""

REASONS = (
    ("schedule.name", "Megatron-LM has 1F1B, and interleaved 1F1B"),
    ("layout.context_order", "Megatron-LM always gives a rank two parts, from both ends"),
    ("layout.keep_gathered", "Megatron-LM gathers again in backward"),
    ("experts.threshold", "routers send every token to as many experts"),
    ("experts.replicas", "an expert lies on one rank of ep alone"),
    ("experts.placement", "experts lie on ranks in their order"),
    ("experts.rebalance_every", "experts stay where they are"),
    ("experts.speculate", "rows are sent once their numbers are known"),
    ("experts.drop", "tokens are dropped where --moe-expert-capacity-factor says how many an expert takes"),
    ("overlap.bucket_bytes", "buckets are --ddp-bucket-size elements; blocks are not told apart"),
    (
        "overlap.splits",
        "under sequence parallelism --tp-comm-overlap, whose products Transformer Engine cuts as it sees fit",
    ),
    ("overlap.param_gather", "--overlap-param-gather needs --overlap-grad-reduce and ZeRO 1 or more"),
    ("overlap.pipeline_sends", "only the interleaved schedule overlaps its messages"),
    ("optimizer.kind", "Adam there is AdamW; also SGD with momentum, Muon and Lion"),
    ("optimizer.offload_parameters", "parameters stay on the devices"),
    ("optimizer.parameter_tier", "parameters stay on the devices"),
    ("optimizer.offload*", "gradients are added up on the device; else --optimizer-offload-fraction says all"),
    ("precision.*", "parameters are bf16 or fp16 with copies of the optimizer, or fp32 throughout"),
    ("saved.*", "a layer is recomputed whole, or its core attention, norms or feed-forward"),
)

PLACEHOLDERS: Options = [
    ("mock_data", True),
    ("tokenizer_type", "NullTokenizer"),
    ("train_iters", 50),
    ("lr", "3e-4"),
]


def draft(request: ExportRequest) -> Draft:
    """Drafts the script. InputError for a model or combination that Megatron-LM refuses, with the fix."""
    model = need_model(request, PROGRAM)
    options = [
        *model_options(model, request.workload.seq_len),
        *_mesh(request),
        *_schedule(request),
        *_saved(request),
        *_layout(request),
        *_overlap(request),
        *_optimizer(request.plan.optimizer, request.plan.precision),
        *_precision(request.plan.precision),
        *PLACEHOLDERS,
    ]
    text = _script(request, options)
    return Draft(
        program=PROGRAM,
        text=text,
        # What was written is read back: an option that says less than the plan shows as a difference, not as a hope.
        job=read_megatron(text, name=request.label),
        elsewhere=(
            "--mock-data, NullTokenizer, --train-iters and --lr are placeholders: give your data, tokenizer and rates",
            UNTIMED,
            *_config_loss(request),
            *(("HEAD is host:port of the first machine, for all of them",) if request.num_nodes > 1 else ()),
        ),
        reasons=REASONS,
    )


UNTIMED = (
    "what changes results and no time is at Megatron-LM's defaults: --norm-epsilon, --init-method-std, the base and "
    "scaling of rotary embeddings, how a router's weights are normalised and scaled"
)


def _config_loss(request: ExportRequest) -> Iterator[str]:
    """The loss of a model's config, which goes by all layers together."""
    for op in (op for block in request.graph.blocks for op in block.ops if op.does == "balances"):
        if not op.attr("layers", False):
            yield (
                f"the config's loss that balances experts, {op.attr('coefficient', 0.0)} over all layers together, is "
                f"not written: Megatron-LM's losses are each layer's by itself (--moe-router-load-balancing-type "
                f"aux_loss --moe-aux-loss-coeff); a plan says them as experts.balance and coefficient"
            )


def _script(request: ExportRequest, options: Options) -> str:
    """Writes the launch script."""
    words = ["torchrun", f"--nnodes {request.num_nodes}", f"--nproc-per-node {request.processes_per_node}"]
    if request.num_nodes > 1:
        words += ["--rdzv-backend c10d", '--rdzv-endpoint "$HEAD"']
    lines = [" ".join([*words, "pretrain_gpt.py"])]
    for name, value in options:
        if value is None or value is False:
            continue
        flag = "--" + name.replace("_", "-")
        values = () if value is True else value if isinstance(value, tuple) else (value,)
        lines.append("    " + " ".join([flag, *(quote(str(one)) for one in values)]))
    # Fewer connections keep collectives ahead of products; FSDP needs several.
    fsdp = any(name == "use_megatron_fsdp" and value for name, value in options)
    connections = "" if fsdp else "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    head = 'HEAD="${HEAD:-localhost:29500}"\n' if request.num_nodes > 1 else ""
    return f"#!/bin/bash\n{connections}{head}" + " \\\n".join(lines) + "\n"


def _mesh(request: ExportRequest) -> Options:
    mesh, model = request.plan.mesh, request.model
    experts = hasattr(model, "num_experts")
    # Without sharded states replicas and shards are the same plain data parallelism.
    replicas = mesh.dp_replicate > 1 and request.plan.optimizer.zero > 0
    return [
        ("tensor_model_parallel_size", mesh.tp),
        ("pipeline_model_parallel_size", mesh.pp),
        ("context_parallel_size", mesh.cp if mesh.cp > 1 else None),
        ("expert_model_parallel_size", mesh.ep if mesh.ep > 1 else None),
        # Always written: its default is tp, and the plan's may be 1.
        ("expert_tensor_parallel_size", mesh.etp if experts else None),
        ("num_distributed_optimizer_instances", mesh.dp_replicate if replicas else None),
        ("use_tp_pp_dp_mapping", mesh.order == ("dp_replicate", "dp_shard", "pp", "cp", "tp")),
        ("micro_batch_size", request.micro),
        ("global_batch_size", request.workload.batch_size),
        ("seq_length", request.workload.seq_len),
    ]


def _schedule(request: ExportRequest) -> Options:
    """1F1B, or interleaved when the plan is; other schedules become 1F1B with one stage a rank."""
    schedule, pp = request.plan.schedule, request.plan.mesh.pp
    if pp == 1:
        return []
    counts = schedule.layers_per_stage
    virtual = schedule.virtual_stages
    # The stages of such an order may not be the ranks in turn; their layers are dealt out anew, the first ranks one
    # more.
    if orders.find(schedule.name).names.get("megatron-lm") not in (PLAIN, INTERLEAVED):
        layers, virtual = sum(counts), 1
        counts = tuple(layers // pp + (stage < layers % pp) for stage in range(pp))
    sends = request.plan.overlap.pipeline_sends
    options: Options = [("no_overlap_p2p_communication", virtual > 1 and not sends)]
    # A layout says every stage, virtual ones too, so that no other option is needed for their number.
    if len(set(counts)) > 1:
        stages = ["t" * count for count in counts]
        # MTP modules lie with the last stage, as they do here.
        last = "m" * getattr(request.model, "mtp_modules", 0) + "L"
        return [*options, ("pipeline_model_parallel_layout", "E" + "|".join(stages) + last)]
    return [*options, ("num_virtual_stages_per_pipeline_rank", virtual if virtual > 1 else None)]


def _saved(request: ExportRequest) -> Options:
    saved = request.plan.saved
    named = modules_of(saved.rules, request.model)
    if named is not None and saved.preset != "full":
        # core_attn is the default and left out where it is alone, as people write it.
        modules = [*(["core_attn"] if saved.preset == "selective" else []), *named]
        if not modules:
            return []
        listed = None if modules == ["core_attn"] else tuple(modules)
        return [("recompute_granularity", "selective"), ("recompute_modules", listed)]
    if (first := _block(saved)) is not None:
        return _full("block", first)
    return _full("uniform", saved.every)


def _block(saved: Saved) -> int | None:
    """Layers of each stage under Megatron-LM's `block` recompute, which has one number for all: of rules for single
    stages the largest, so that no stage keeps more than was asked."""
    firsts = [rule.first_per_stage for rule in saved.rules]
    if saved.preset != "none" or not all(rule.preset == "full" and rule.calls == "*" for rule in saved.rules):
        return None
    return max((first for first in firsts if first is not None), default=None) if None not in firsts else None


def _full(method: str, number: int) -> Options:
    return [("recompute_granularity", "full"), ("recompute_method", method), ("recompute_num_layers", number)]


def _layout(request: ExportRequest) -> Options:
    kinds = {"ring": "p2p", "ulysses": "a2a", "all_gather": "allgather"}
    layout = request.plan.layout
    routed = any(block.does("routes") for block in request.graph.blocks)
    dispatch = (*DISPATCHERS[layout.dispatch or "all_to_all"],) if routed else (None, None)
    return [
        ("sequence_parallel", layout.sequence_parallel),
        ("cp_comm_type", kinds[layout.context] if request.plan.mesh.cp > 1 else None),
        ("moe_token_dispatcher_type", dispatch[0]),
        ("moe_flex_dispatcher_backend", dispatch[1]),
        ("moe_expert_capacity_factor", request.workload.router.capacity or None),
        ("moe_pad_expert_input_to_capacity", request.workload.router.padded),
        *(_balance(request) if routed else []),
    ]


def _balance(request: ExportRequest) -> Options:
    """What keeps experts evenly loaded, as `with_balance` reads it."""
    experts = request.plan.experts
    written: dict[str, str] = {ours: name for name, ours in BALANCES.items()}
    kind = "sinkhorn" if experts.assignment == "sinkhorn" else written.get(experts.balance)
    coefficient = experts.coefficient
    if experts.balance == "global":
        coefficient = float(f"{coefficient * global_factor(request.plan):.15g}")
    biased = bool(router_biases(request.graph))
    return [
        ("moe_router_load_balancing_type", kind),
        ("moe_aux_loss_coeff", coefficient or None),
        ("moe_z_loss_coeff", experts.z_loss or None),
        ("moe_router_enable_expert_bias", biased),
        ("moe_router_bias_update_rate", experts.bias_rate if biased else None),
        ("moe_router_dtype", experts.router_dtype if experts.router_dtype != "model" else None),
        ("moe_token_drop_policy", experts.drop if request.workload.router.capacity else None),
    ]


def _overlap(request: ExportRequest) -> Options:
    overlap, precision, zero = request.plan.overlap, request.plan.precision, request.plan.optimizer.zero
    reduces = request.plan.mesh.data_ranks * request.plan.mesh.cp > 1
    size = DTYPE_BYTES["bf16" if _reduces_in_bf16(precision) else "fp32"]
    # Megatron-LM counts elements of the gradient's dtype.
    bucket = max(1, overlap.bucket_bytes // size) if overlap.bucket_bytes and zero < 2 else None
    return [
        ("overlap_grad_reduce", overlap.grad_reduce and reduces),
        ("overlap_param_gather", _gathers_early(overlap, zero) and reduces),
        ("overlap_moe_expert_parallel_comm", overlap.experts),
        (
            "tp_comm_overlap",
            bool(overlap.splits) and request.plan.mesh.tp > 1 and request.plan.layout.sequence_parallel,
        ),
        ("ddp_bucket_size", bucket),
    ]


def _gathers_early(overlap: Overlap, zero: int) -> bool:
    return overlap.param_gather and overlap.grad_reduce and zero > 0


def _reduces_in_bf16(precision: Precision) -> bool:
    return half_of(precision) == "bf16" and precision.reduce == "bf16"


def _optimizer(optimizer: Optimizer, precision: Precision) -> Options:
    kinds = {"adamw": "adam", "adam": "adam", "momentum": "sgd", "sgd": "sgd", "muon": "muon", "lion": "lion"}
    offload, stage = optimizer.offload, optimizer.zero
    strategies = {2: "optim_grads", 3: "optim_grads_params"}
    # HybridDeviceOptimizer and lower dtypes both exist in the precision-aware optimizer alone.
    precise = offload is not None or _low(precision)
    return [
        ("optimizer", kinds.get(optimizer.kind, "adam")),
        ("use_distributed_optimizer", stage > 0),
        ("use_megatron_fsdp", stage > 1),
        ("data_parallel_sharding_strategy", strategies.get(stage)),
        # Megatron-FSDP asserts that format, and refuses fused accumulation.
        ("ckpt_format", "fsdp_dtensor" if stage > 1 else None),
        ("no_gradient_accumulation_fusion", stage > 1),
        ("use_precision_aware_optimizer", precise),
        ("optimizer_cpu_offload", offload is not None),
        ("optimizer_offload_fraction", offload.fraction if offload else None),
        ("clip_grad", 1.0 if optimizer.clip else 0.0),
    ]


def _low(precision: Precision) -> bool:
    """Whether the optimizer keeps anything below fp32."""
    master_and_grads = (precision.master if precision.master != "none" else "fp32", precision.states)
    return half_of(precision) is not None and master_and_grads != ("fp32", "fp32")


def _precision(precision: Precision) -> Options:
    param = half_of(precision)
    names = ("fp32", "bf16", "fp16")
    states = precision.states if precision.states in names else "fp32"
    master = precision.master if precision.master in ("fp32", "fp16") else "fp32"
    options: Options = [
        ("bf16", param == "bf16"),
        ("fp16", param == "fp16"),
        ("grad_reduce_in_bf16", _reduces_in_bf16(precision)),
        ("accumulate_allreduce_grads_in_fp32", param == "fp16" and precision.grad == "fp32"),
    ]
    if param is not None and _low(precision):
        options += [("main_params_dtype", master), ("exp_avg_dtype", states), ("exp_avg_sq_dtype", states)]
    if precision.fp8 is not None:
        recipe = precision.fp8.recipe
        known = ("delayed", "tensorwise", "mxfp8", "blockwise")
        # E4M3 forward and E5M2 backward, as Transformer Engine's default.
        options += [("fp8_format", "hybrid"), ("fp8_recipe", recipe if recipe in known else "tensorwise")]
        options += [("fp8_dot_product_attention", precision.fp8.attention)]
    return options

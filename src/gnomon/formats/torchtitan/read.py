"""torchtitan's configuration to a Job: the TOML file of versions up to 0.2, or the flags of the newer form.

`read_torchtitan(source)` takes a TOML file or its text, or command-line words (`--module llama3 --config llama3_8b
--parallelism.tensor_parallel_degree 4`). What a field means was read from pytorch/torchtitan: v0.2.2 (73a0e69,
2026-02-20) config/job_config.py, distributed/{parallel_dims,pipeline_parallel,activation_checkpoint}.py, train.py,
models/llama3/infra/parallelize.py; and b5bcd76 (2026-08-21) config/configs.py, models/llama3/config_registry.py.
Leaves out: experiments, the models that `torchtitan_models` has not.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from gnomon import orders
from gnomon.errors import FormatError, InputError
from gnomon.formats.given import NOTHING, Network, ReadContext, network_graph
from gnomon.formats.job import (
    Fields,
    Job,
    divides,
    flatten,
    layers_of,
    microbatches,
    read_source,
    shorten,
    with_job_fields,
)
from gnomon.formats.torchtitan.models import by_dims, flavor
from gnomon.formats.torchtitan.terms import TERMS
from gnomon.graph import Graph
from gnomon.plans import (
    DType,
    Fp8,
    Layout,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    Saved,
    SavedRule,
    Schedule,
    Split,
    Workload,
)
from gnomon.schema.toml import parse_toml
from gnomon.software import Stack, stack

IRRELEVANT = frozenset(
    """
    job.* profiling.* profiler.* metrics.* checkpoint.* lr_scheduler.* validation.* validator.* comm.* tokenizer.*
    dataloader.* memory_estimation.* hf_assets_path dump_folder model.hf_assets_path model.tokenizer_path
    model.print_after_conversion optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay
    training.dataset training.dataset_path training.steps training.gc_freq training.gc_debug training.seed
    training.deterministic training.dataloader.* training.max_norm debug.seed debug.print_config debug.save_config_file
    debug.moe_force_load_balance debug.enable_structured_logging debug.spmd_typechecking
    activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check activation_checkpoint.debug
    activation_checkpoint.early_stop activation_checkpoint.visualize_memory_budget_pareto experimental.custom_*
    quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp float8.precompute_float8_dynamic_scale_for_fsdp
    quantize.linear.float8.emulate quantize.linear.mx.mxfp8_dim1_cast_kernel_choice parallelism.spmd_backend
    compile.backend fault_tolerance.process_group* fault_tolerance.replica_id
    """.split()
)

INEXPRESSIBLE = {
    "debug.deterministic*": "slower kernels that always add in the same order",
    "debug.batch_invariant": "slower kernels whose results do not depend on the batch",
    "debug.detect_anomaly": "checks after every op; much slower",
    "quantize.grouped_mm.*": "eight-bit products of experts; a prediction without them is too slow",
    "fault_tolerance.*": "replicas that come and go (torchft)",
    "parallelism.pipeline_parallel_schedule_csv": "a schedule of one's own",
    "parallelism.expert_parallel_comm_backend": "the kernels of the experts' all-to-all",
    "parallelism.enable_fsdp_symm_mem": "symmetric memory for parameter gathers",
    "parallelism.context_parallel_ptrr_mask_key": "balances attention by mask",
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": "products that are recomputed all the same",
    "training.disable_cuda_graphs": "kernels are launched one by one",
}

REGISTRY: Mapping[str, Mapping[str, object]] = {
    "llama3_8b": {
        "model.name": "llama3",
        "model.flavor": "8B",
        "training.num_tokens_per_microbatch_per_dp_rank": 8192,
        "training.max_context_length": 8192,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    },
    "llama3_70b": {
        "model.name": "llama3",
        "model.flavor": "70B",
        "training.num_tokens_per_microbatch_per_dp_rank": 65536,
        "training.max_context_length": 8192,
        "parallelism.tensor_parallel_degree": 8,
        "activation_checkpoint.mode": "full",
    },
    "llama3_405b": {
        "model.name": "llama3",
        "model.flavor": "405B",
        "model.converters": ["float8"],
        "training.num_tokens_per_microbatch_per_dp_rank": 16384,
        "training.max_context_length": 8192,
        "parallelism.tensor_parallel_degree": 8,
        "activation_checkpoint.mode": "full",
        "compile.enable": True,
        "quantize.linear.float8.enable_fsdp_float8_all_gather": True,
        "quantize.linear.float8.filter_fqns": ["output"],
    },
}
"""`--config` -> what that function of models/llama3/config_registry.py sets."""

OLD_NAMES = {
    "training.batch_size": "training.local_batch_size",
    "training.compile": "compile.enable",
    "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
    "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
    "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
    "training.enable_loss_parallel": "",
    "float8.enable_fsdp_float8_all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8.filter_fqns": "quantize.linear.float8.filter_fqns",
    "float8.recipe_name": "quantize.linear.float8.recipe_name",
    "experimental.pipeline_parallel_degree": "parallelism.pipeline_parallel_degree",
    "experimental.context_parallel_degree": "parallelism.context_parallel_degree",
    "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Names of earlier versions (v0.1, 2024-25) and of the newest -> those of v0.2.2."""


@cache
def known_fields() -> frozenset[str]:
    """Every field's name, section first."""
    text = files("gnomon.formats.torchtitan").joinpath("fields.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


def read_torchtitan(
    source: str | Path | Sequence[str] | Mapping[str, object],
    *,
    devices: int | None = None,
    model: Network | str | None = None,
    context: ReadContext = NOTHING,
) -> Job:
    """The job of a TOML file (a Path, or its text), of command-line words, or of fields by their names.

    devices: of the whole job; needed when data_parallel_shard_degree is -1. model: in place of the flavor. Raises
    FormatError for text that is not TOML, CatalogueError for a flavor that is not described, InputError for an unknown
    field or a combination that torchtitan refuses, with the fix.
    """
    if isinstance(source, (str, Path)):
        text, file = read_source(source)
        # Words of a launch line, pasted: torchtitan's flags are the same fields.
        if text.lstrip().startswith("--"):
            values, file = flag_values(shlex.split(text, comments=True)), "<arguments>"
        else:
            values = flatten(parse_toml(text, file))
    elif isinstance(source, Mapping):
        values, file = dict(source), "<fields>"
    else:
        values, file = flag_values(source), "<arguments>"
    if not values:
        raise InputError(f"{file} is empty; a torchtitan job sets at least [model] name and flavor", path="$")
    # --set may name a field as the user's version does.
    settings = {OLD_NAMES.get(key) or key: text for key, text in context.settings.items()}
    context = replace(context, settings=settings)
    f = Fields({OLD_NAMES.get(key) or key: value for key, value in values.items()}, file, context)
    mesh = mesh_of(f, devices or context.devices)
    named = f.text("model.name", "llama3"), f.text("model.flavor", "debugmodel")
    # A file of the newer kind gives dims beside the flavor, which then only names where they began.
    config = model or context.model or by_dims(f, " ".join(named)) or flavor(*named)
    workload, micro, rounds = batch_of(f, mesh)
    plan = Plan(
        mesh=mesh,
        schedule=replace(schedule_of(f, mesh, config, micro), rounds=rounds),
        saved=saved_of(f, config, mesh),
        layout=layout_of(f, mesh, workload.seq_len),
        overlap=Overlap(splits=splits_of(f, mesh)),
        optimizer=optimizer_of(f, mesh),
        precision=precision_of(f),
    )
    # parallelize() shards both, and DTensor would pad what does not divide in silence.
    for what, name in (("attention heads", "num_heads"), ("hidden size", "hidden_size")):
        if isinstance(size := getattr(config, name, None), int):
            divides(what, size, "tensor_parallel_degree", mesh.tp)
    record = stack_of(f)
    if f.flag("optimizer.early_step_in_backward", False):
        f.report(
            "optimizer.early_step_in_backward", "each gradient is used and freed within backward: memory is too large"
        )
    f.account(IRRELEVANT, INEXPRESSIBLE, known_fields())
    return Job(
        model=config,
        plan=plan,
        workload=workload,
        stack=record,
        devices=mesh.world_size,
        # -1 is the default: such a file runs on any number of devices that the other degrees divide.
        stated_devices=mesh.world_size if f.peek("parallelism.data_parallel_shard_degree") not in (None, -1) else None,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
        terms=TERMS,
    )


def flag_values(words: Sequence[str]) -> dict[str, object]:
    """Fields from `--section.field value`, over what `--config` sets."""
    fields: dict[str, object] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            raise FormatError(f"{word!r} belongs to no flag; flags are --section.field value", "arguments")
        name, equals, value = word[2:].replace("-", "_").partition("=") if "=" not in word else _split_flag(word)
        # Lists take several words: `--model.converters float8 mx`.
        values = [value] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        # tyro, which torchtitan parses with, spells a false flag `--section.no-field`.
        if not values and name.rpartition(".")[2].startswith("no_"):
            section, _, field = name.rpartition(".")
            name, values = f"{section}.{field.removeprefix('no_')}", ["false"]
        fields[name] = _plain(values, name)
    # A config is a function of torchtitan's package since it froze its flags; running it would need torchtitan.
    if "module" in fields or "config" in fields:
        config = fields.pop("config", None)
        fields.pop("module", None)
        if config not in REGISTRY:
            raise InputError(
                f"torchtitan's --config {config!r} is a function of its own code that is not described here; known: "
                f"{', '.join(REGISTRY)}; give the fields instead",
                "--config",
            )
        fields = {**REGISTRY[str(config)], **fields}
    return fields


def _split_flag(word: str) -> tuple[str, str, str]:
    name, _, value = word[2:].partition("=")
    return name.replace("-", "_"), "=", value


def _plain(values: list[str], name: str) -> object:
    """Words of a flag as the value they spell; lists for the fields that are lists."""
    # Also as one word with commas, as older versions took it.
    if name.endswith(("converters", "components", "fqns")):
        return [part for value in values for part in value.split(",")]
    if not values:
        return True
    text = values[0]
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return None if text == "None" else text


def mesh_of(f: Fields, devices: int | None) -> Mesh:
    """Reads the axes; a shard degree of -1 takes the devices that are left."""

    def degree(name: str) -> int:
        return f.integer(f"parallelism.{name}_degree", 1)

    replicate, cp, tp = degree("data_parallel_replicate"), degree("context_parallel"), degree("tensor_parallel")
    pp, ep, etp = degree("pipeline_parallel"), degree("expert_parallel"), degree("expert_tensor_parallel")
    shard = f.integer("parallelism.data_parallel_shard_degree", -1, least=-1)
    # ep is missing on purpose: experts borrow ranks of dp_shard and cp (and of tp, with etp 1).
    rest = replicate * cp * tp * pp
    if shard == -1:
        if devices is None:
            f.fail("parallelism.data_parallel_shard_degree", "-1 takes the devices that are left; give --on CLUSTER")
        if devices % rest:
            nearby = max(1, round(devices / rest)) * rest
            raise InputError(
                f"{devices} devices are not a multiple of dp_replicate x cp x tp x pp = {replicate} x {cp} x {tp} x "
                f"{pp} = {rest}; the nearest number of devices is {nearby}"
            )
        shard = devices // rest
    if devices is not None and shard * rest != devices:
        raise InputError(
            f"the degrees multiply to {shard * rest} (dp_replicate {replicate}, dp_shard {shard}, cp {cp}, tp {tp}, pp "
            f"{pp}), but there are {devices} devices; set data_parallel_shard_degree to -1 or change the devices"
        )
    # Any other refolding has no mesh in ParallelDims.
    if ep > 1 and etp not in (1, tp):
        f.fail("parallelism.expert_tensor_parallel_degree", f"{etp}: torchtitan takes 1 or tensor_parallel_degree {tp}")
    return Mesh(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp if ep > 1 else 1)


def batch_of(f: Fields, mesh: Mesh) -> tuple[Workload, int, int]:
    """(workload, sequences of a microbatch, rounds). Gradient accumulation runs the whole pipeline again (train.py
    train_step: `forward_backward_step` for each local batch, in which `pp_schedule.step`); without stages it is one
    microbatch after another, as any."""
    if f.has("training.num_tokens_per_microbatch_per_dp_rank") or f.has("training.max_context_length"):
        return _batch_in_tokens(f, mesh)
    seq_len = f.integer("training.seq_len", 2048)
    local = f.integer("training.local_batch_size", 8)
    total = f.integer("training.global_batch_size", -1, least=-1)
    # -1: no accumulation.
    total = local * mesh.data_ranks if total == -1 else total
    steps = microbatches(total, local, mesh.data_ranks, ("global_batch_size", "local_batch_size"))
    micro = local
    if mesh.pp > 1:
        # With stages the local batch is cut once more; without, it is the microbatch.
        micro = f.integer("parallelism.pipeline_parallel_microbatch_size", 1)
        divides("local_batch_size", local, "pipeline_parallel_microbatch_size", micro)
    f.ignore("parallelism.pipeline_parallel_microbatch_size")
    return Workload(global_batch_size=total, seq_len=seq_len), micro, steps if mesh.pp > 1 else 1


def _batch_in_tokens(f: Fields, mesh: Mesh) -> tuple[Workload, int, int]:
    """The newer fields count tokens."""
    seq_len = f.integer("training.max_context_length", 2048)
    tokens = f.integer("training.num_tokens_per_microbatch_per_dp_rank", 16384)
    divides("num_tokens_per_microbatch_per_dp_rank", tokens, "max_context_length", seq_len)
    micro, runs = tokens // seq_len, f.integer("parallelism.num_pp_microbatches", 1)
    total = f.integer("training.num_tokens_per_train_step", -1, least=-1)
    total = tokens * runs * mesh.data_ranks if total == -1 else total
    if total % (tokens * runs * mesh.data_ranks):
        f.fail("training.num_tokens_per_train_step", f"{total} is not a multiple of {tokens * runs * mesh.data_ranks}")
    rounds = total // (tokens * runs * mesh.data_ranks) if mesh.pp > 1 else 1
    return Workload(global_batch_size=total // seq_len, seq_len=seq_len), micro, rounds


def schedule_of(f: Fields, mesh: Mesh, config: Network | str, micro: int) -> Schedule:
    """The schedule, with torchtitan's own split of layers: embedding and head count as layers of their stages."""
    spelled = f.text("parallelism.pipeline_parallel_schedule", "1F1B")
    first = f.integer("parallelism.pipeline_parallel_first_stage_less_layers", 1, least=0)
    last = f.integer("parallelism.pipeline_parallel_last_stage_less_layers", 1, least=0)
    per_stage = f.integer("parallelism.pipeline_parallel_layers_per_stage", 0, least=0)
    f.ignore("parallelism.pipeline_parallel_expert_parallel_overlap")
    if mesh.pp == 1:
        f.ignore("parallelism.module_fqns_per_model_part")
        return Schedule(micro_batch_size=micro)
    known = {name.lower(): order for name, order in orders.spelled("torchtitan").items()}
    if spelled.lower() not in known:
        f.fail(
            "parallelism.pipeline_parallel_schedule",
            f"schedule {spelled!r} is not one of {', '.join(known)} (case does not matter)",
        )
    order = known[spelled.lower()]
    # torchtitan has 1 or 2 stages a rank by the schedule's class (ScheduleMulti).
    virtual = order.stages[0]  # unless layers_per_stage says otherwise
    layers = layers_of(config)
    if f.has("parallelism.module_fqns_per_model_part"):
        split = split_by_hand(f, layers, mesh.pp)
        if not order.takes(len(split) // mesh.pp):
            f.fail(
                "parallelism.module_fqns_per_model_part",
                f"{len(split)} stages on {mesh.pp} ranks, but {spelled} takes {order.stages_text} a rank; change it",
            )
        return Schedule(
            name=order.name,
            micro_batch_size=micro,
            virtual_stages=len(split) // mesh.pp,
            placement=order.placement,
            layers_per_stage=split,
        )
    # In virtual layers, of which embedding and head are some: (layers + first + last) / per_stage, rounded up, as
    # there.
    if per_stage:
        stages = math.ceil((layers + first + last) / per_stage)
        divides("pipeline stages", stages, "pipeline_parallel_degree", mesh.pp)
        if not order.takes(stages // mesh.pp):
            f.fail(
                "parallelism.pipeline_parallel_layers_per_stage",
                f"{per_stage} layers a stage make {stages // mesh.pp} stages a rank, but {spelled} takes "
                f"{order.stages_text}; change it",
            )
        virtual = stages // mesh.pp
    split = stage_split(layers, mesh.pp * virtual, first, last)
    return Schedule(
        name=order.name,
        micro_batch_size=micro,
        virtual_stages=virtual,
        placement=order.placement,
        layers_per_stage=split,
    )


def split_by_hand(f: Fields, layers: int, pp: int) -> tuple[int, ...]:
    """Layers of each stage by module_fqns_per_model_part, whose stages must hold each layer once, in order."""
    key = "parallelism.module_fqns_per_model_part"
    parts = f.raw(key)
    if not isinstance(parts, list) or not all(
        isinstance(p, list) and all(isinstance(n, str) for n in p) for p in parts
    ):
        f.fail(key, f"expected lists of module names, got {shorten(parts)}")
    stages = [[name for name in part if name.startswith("layers.")] for part in parts]
    # A stage with layers out of order would be another model.
    if [name for part in stages for name in part] != [f"layers.{i}" for i in range(layers)]:
        f.fail(key, f"the stages do not hold layers.0 to layers.{layers - 1} once each, in order")
    divides("stages of module_fqns_per_model_part", len(stages), "pipeline_parallel_degree", pp)
    return tuple(map(len, stages))


def stage_split(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage when embedding counts as `first` layers and the head as `last`."""
    # The first stages take one more, as in generate_llm_fqn_per_model_part.
    per_stage, extra = divmod(layers + first + last, stages)
    if per_stage == 0 or max(first, last) > per_stage:
        raise InputError(
            f"{layers} layers (with {first} for the embedding and {last} for the head) do not fill {stages} stages; "
            f"lower pipeline_parallel_degree or the layers counted for embedding and head"
        )
    split = [per_stage + (stage < extra) for stage in range(stages)]
    # Embedding and head took the place of so many layers in the division.
    split[0] -= first
    split[-1] -= last
    return tuple(split)


def saved_of(f: Fields, config: Network | str, mesh: Mesh) -> Saved:
    """Reads activation checkpointing."""
    section = "activation_checkpoint"
    mode = f.choice(f"{section}.mode", {m: m for m in ("none", "full", "selective", "memory_budget")}, "selective")
    option = f.raw(f"{section}.selective_ac_option")
    f.ignore(f"{section}.memory_budget")
    if mode in ("none", "full"):
        return Saved(preset=mode)  # type: ignore[arg-type]
    # Inductor's partitioner solves a knapsack with its own costs, which a plan cannot repeat.
    if mode == "memory_budget":
        f.report(f"{section}.mode", "torch.compile chooses what to recompute; read as nothing, so memory is too large")
        return Saved()
    # The default of v0.2: every second layer.
    option = str(option if option is not None else "2")
    if option.isdigit() and int(option) > 0:
        # Every n-th layer, counted from 1.
        every = range(int(option) - 1, layers_of(config), int(option))
        return Saved(rules=tuple(SavedRule(calls=f"layers[{i}]", action="recompute") for i in every))
    if option != "op":
        f.fail(f"{section}.selective_ac_option", f"{option!r} is neither 'op' nor a number of layers from 1 on")
    return Saved(preset="full", rules=(SavedRule(tensors=kept_ops(network_graph(config), mesh.ep > 1)),))


def kept_ops(graph: Graph, exchanged: bool) -> tuple[str, ...]:
    """What `selective_ac_option = "op"` keeps: attention, every other product in the order of a layer (those of experts
    are grouped and recomputed), and what experts' ranks have exchanged."""
    saved_ops = ["self_attn.core*"]
    for block in graph.blocks:
        if not block.does("attends"):
            continue
        # A counter in _get_custom_policy: of mm calls each second one is recomputed, whatever it is.
        saved_ops += [op.path for op in block.ops if op.does == "multiplies"][::2]
        grouped = [op.path for op in block.ops if op.does == "multiplies rows"]
        if exchanged and grouped:  # back from the experts' ranks there is as much as their last product
            saved_ops += [*(op.path for op in block.ops if op.does == "dispatches"), grouped[-1]]
    return tuple(dict.fromkeys(saved_ops))


def splits_of(f: Fields, mesh: Mesh) -> tuple[Split, ...]:
    """Reads async tensor parallelism: inductor puts symmetric memory's fused matmuls in place of a gather and a matmul,
    and of a matmul and a scatter (torch/_inductor/fx_passes/micro_pipeline_tp.py)."""
    is_async = f.flag("parallelism.enable_async_tensor_parallel", False)
    if not is_async or mesh.tp == 1:
        return ()
    if not f.flag("compile.enable", False):
        f.fail("parallelism.enable_async_tensor_parallel", "torchtitan asks for compile.enable with it; set it")
    # Fused matmuls send a piece to each peer while they multiply the next.
    return (Split(op="*", dim="seq", parts=mesh.tp),)


def layout_of(f: Fields, mesh: Mesh, seq_len: int) -> Layout:
    """Tensor parallelism always divides the sequence between its regions, unless the newer switch says otherwise."""
    # Ring attention's head-to-tail order cuts a sequence into 2 x cp chunks.
    divisor = mesh.tp * (2 * mesh.cp if mesh.cp > 1 else 1)
    divides("seq_len", seq_len, "tensor_parallel_degree x 2 x context_parallel_degree", divisor)
    rotate = f.choice(
        "parallelism.context_parallel_rotate_method", {"allgather": "all_gather", "alltoall": "ring"}, "allgather"
    )
    balancer = f.raw("parallelism.context_parallel_load_balancer")
    balanced = not f.is_given("parallelism.context_parallel_load_balancer") or balancer is not None
    if mesh.cp > 1 and balancer == "ptrr":
        f.report("parallelism.context_parallel_load_balancer", "balances by mask; read as head and tail")
    return Layout(
        sequence_parallel=mesh.tp > 1 and f.flag("parallelism.enable_sequence_parallel", True),
        context=rotate,  # type: ignore[arg-type]
        context_order="zigzag" if balanced else "contiguous",
        loss_parallel=not f.flag("parallelism.disable_loss_parallel", False),
    )


def optimizer_of(f: Fields, mesh: Mesh) -> Optimizer:
    """FSDP2 whenever parameters are sharded; replicas alone are DDP."""
    kind = f.choice("optimizer.name", {"AdamW": "adamw", "Adam": "adam", "Muon": "muon"}, "AdamW")
    policy = f.choice(
        "parallelism.fsdp_reshard_after_forward", {p: p for p in ("default", "always", "never")}, "default"
    )
    # cp ranks hold the same parameters, so FSDP shards over both together.
    sharded = mesh.dp_shard * mesh.cp > 1
    if not sharded and mesh.dp_replicate > 1 and mesh.world_size != mesh.dp_replicate:
        raise InputError(
            "torchtitan replicates without sharding (DDP) only when no other axis is above 1; set "
            "data_parallel_shard_degree above 1, or the other degrees to 1"
        )
    offload = None
    if f.flag("training.enable_cpu_offload", False):
        offload = Offload()
        if not sharded:
            f.report("training.enable_cpu_offload", "FSDP2 moves what it divides, and here it divides nothing")
    return Optimizer(
        kind=kind,  # type: ignore[arg-type]
        zero=3 if sharded else 0,
        # With a pipeline `default` keeps parameters gathered, which saves gathers for each microbatch.
        reshard_after_forward=policy == "always" or (policy == "default" and mesh.pp == 1),
        # By default norm and output stay gathered after forward, since FSDP would gather them again at once
        # (apply_fsdp).
        keep_last_block=policy != "always",
        offload=offload,
        offload_parameters=sharded and offload is not None,
        # training.max_norm is 1.0 and has no off.
        clip=True,
    )


def precision_of(f: Fields) -> Precision:
    """Reads FSDP2's mixed precision: parameters and states in training.dtype, without a master copy."""
    names = {"bfloat16": "bf16", "float32": "fp32"}
    stored: DType = f.choice("training.dtype", names, "float32")  # type: ignore[assignment]
    compute: DType = f.choice("training.mixed_precision_param", names, "bfloat16")  # type: ignore[assignment]
    reduce: DType = f.choice("training.mixed_precision_reduce", names, "float32")  # type: ignore[assignment]
    return Precision(
        param=stored,
        compute=compute,
        grad=stored,
        reduce=reduce,
        master="none",
        states=stored,
        # Autocast is no part of it: FSDP2 casts parameters as it gathers them.
        fp8=fp8_of(f),
    )


def fp8_of(f: Fields) -> Fp8 | None:
    """Eight-bit linear layers, switched on by model.converters."""
    converters = f.raw("model.converters") or []
    if not isinstance(converters, list) or not all(isinstance(c, str) for c in converters):
        f.fail("model.converters", f"expected a list of names, got {converters!r}")
    for prefix in ("quantize.linear.float8", "quantize.linear.mx"):
        f.ignore(*(f"{prefix}.{key}" for key in ("filter_fqns", "recipe_name", "enable_fsdp_float8_all_gather")))
    kinds = {name.removeprefix("quantize.linear.") for name in converters}
    if unknown := sorted(kinds - {"float8", "mx", "quantize.grouped_mm.float8", "quantize.grouped_mm.mx"}):
        f.report("model.converters", f"{', '.join(unknown)}: not described")
    if not kinds & {"float8", "mx"}:
        return None
    section = "quantize.linear.float8" if "float8" in kinds else "quantize.linear.mx"
    recipe = "mxfp8"
    if "float8" in kinds:
        recipes = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise"}
        recipe = f.choice(f"{section}.recipe_name", recipes, "tensorwise")
        f.report_unless(f"{section}.recipe_name", (None, *list(recipes)[:2]), "weight gradients stay in bf16")
    skipped = f.raw(f"{section}.filter_fqns") or []
    # torchtitan skips a module whose name contains the word; its output is our lm_head.
    excepted = tuple("lm_head" if name == "output" else f"*{name}*" for name in skipped if name)  # type: ignore[attr-defined]
    gather = f.flag(f"{section}.enable_fsdp_float8_all_gather", False)
    if gather and recipe == "rowwise":  # torchao gathers in eight bits with a scale a tensor only
        f.report(f"{section}.enable_fsdp_float8_all_gather", "not with scales by row: parameters are gathered in bf16")
        gather = False
    return Fp8(recipe=recipe, except_ops=excepted, gather=gather)  # type: ignore[arg-type]


def stack_of(f: Fields) -> Stack:
    """What compilation and the optimizer's implementation change."""
    record = stack("torchtitan")
    parts = f.raw("compile.components") or ["model", "loss"]
    if not isinstance(parts, list):
        f.fail("compile.components", f"expected a list, got {parts!r}")
    if f.flag("compile.enable", False):
        # Each block is compiled by itself, which fuses norms and activations in it and launches it whole.
        if "model" in parts:
            fused = "fused"
            record = with_job_fields(record, "compile", launch_mode="compiled", norm=fused, activation=fused)
            # a compiled layer has its checkpoint inside, of which only what the backward reads is run again
            record = with_job_fields(record, "torch/_functorch/partitioners.py of torch 2.8", recompute_stops=True)
        if "loss" in parts:
            record = with_job_fields(record, "compile.components", cross_entropy="fused")
    kinds = {"fused": "fused", "foreach": "foreach", "for-loop": "single"}
    if f.has("optimizer.implementation"):
        kind = f.choice("optimizer.implementation", kinds)
        record = with_job_fields(record, "optimizer.implementation", optimizer_step=kind)
    return record

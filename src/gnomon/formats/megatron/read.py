"""Megatron-LM's launch scripts and arguments to a Job.

`read_megatron(source)` takes a shell script (read, never run) or the arguments themselves. What an argument means, its
default, and what is refused were read from NVIDIA/Megatron-LM at commit d98e8a64ddf34856e74b24714e3bedb2f5a39553
(2026-08-22, version 0.20.0): megatron/training/arguments.py (validate_args), megatron/core/model_parallel_config.py,
megatron/core/transformer/transformer_config.py, megatron/core/pipeline_parallel/schedules.py,
megatron/core/distributed/distributed_data_parallel.py. Leaves out: BERT, T5, Mamba, inference, reinforcement learning.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gnomon import orders
from gnomon.errors import FormatError, InputError, PlanError, nearest
from gnomon.formats.given import GIVE_MODEL, NOTHING, Network, ReadContext, network_graph
from gnomon.formats.job import (
    Fields,
    Job,
    divides,
    give_variable,
    layers_of,
    microbatches,
    read_source,
    with_job_fields,
)
from gnomon.formats.launched import launched_devices, with_written
from gnomon.formats.megatron import families, forks
from gnomon.formats.megatron.dump import dumped
from gnomon.formats.megatron.forks import layers_by_type
from gnomon.formats.megatron.model import layers_stated, model_of
from gnomon.formats.megatron.options import INEXPRESSIBLE, IRRELEVANT, known_options, option_name, parse_options
from gnomon.formats.megatron.recompute import module_rules
from gnomon.formats.megatron.terms import TERMS
from gnomon.formats.shell import Launch, Script, launches
from gnomon.graph import Graph
from gnomon.plans import (
    Dispatch,
    DType,
    Experts,
    Fp8,
    Layout,
    Mesh,
    Offload,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    RouterLoad,
    Saved,
    SavedRule,
    Schedule,
    Workload,
)
from gnomon.plans.experts import routers, under
from gnomon.software import Stack, stack

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def read_megatron(
    source: str | Path | Sequence[str],
    *,
    devices: int | None = None,
    env: Mapping[str, str] | None = None,
    vocab_size: int | None = None,
    name: str = "megatron-job",
    context: ReadContext = NOTHING,
) -> Job:
    """The job that a script (a Path, or its text) or a list of arguments starts.

    devices: of the whole job; else what the script says (nnodes × nproc_per_node). env: values of variables that the
    script takes from outside, `{"1": …}` for its arguments. vocab_size: rows of the embedding before padding, if the
    tokenizer's file decides. given: settings by option or by variable of the script, a model, strict. Raises
    FormatError for a script that cannot be followed, InputError for a combination that Megatron-LM refuses, with the
    fix.
    """
    context = replace(
        context,
        devices=devices or context.devices,
        vocab_size=vocab_size or context.vocab_size,
        env={**context.env, **(env or {})},
    )
    script: Script | None = None
    stated: int | None = None
    arguments_place = ""
    family: families.Family = "decoder"
    options = {option_name(key): text for key, text in context.settings.items() if option_name(key) in known_options()}
    if isinstance(source, (str, Path)):
        text, file = read_source(source)
        # A log of a run prints its arguments, which are then as good as the script.
        if (log := dumped(text)) is not None:
            words, stated = log
            options = {option_name(key): value for key, value in context.settings.items()}
        elif text.lstrip().startswith("--"):
            words = words_of(text, file)
            options = {option_name(key): value for key, value in context.settings.items()}
        else:
            path = source if isinstance(source, Path) else None
            # Settings may be options or variables of the script. Options go to the fields; the rest is put into the
            # shell.
            given_too, arguments_place = with_written(text, path, context)
            variables = {key: value for key, value in given_too.items() if option_name(key) not in options}
            folder = source.resolve().parent if isinstance(source, Path) else None
            script = launches(text, context.env, variables, folder)
            launch = training_launch(script, file)
            # A variable that nobody reads is a slip of the person's, and must not pass in silence.
            words = list(launch.options)
            if wrong := [key for key in variables if key not in script.read and f"--{key.lstrip('-')}" not in words]:
                unknown = wrong[0]
                hint = nearest(unknown, [*script.read, *known_options()])
                raise InputError(
                    f"{file} uses no variable {unknown!r}, and Megatron-LM has no such option{hint}", "--set"
                )
            # A model that is given makes the program's own network meaningless.
            family = "decoder" if context.model is not None else families.family_of(launch.program, words)
            stated = launched_devices(launch.launcher, text)
    else:
        file, words = "<arguments>", list(source)
        options = {option_name(key): value for key, value in context.settings.items()}
    values, unset = parse_options(words)
    fields = Fields(values, file, replace(context, settings=options))
    fields.notes += [arguments_place] if arguments_place else []
    # slime and others start Megatron-LM under Ray, which takes the size of the job as options in place of torchrun's.
    if isinstance(nodes := fields.peek("actor_num_nodes"), int) and isinstance(
        per_node := fields.peek("actor_num_gpus_per_node"), int
    ):
        stated = nodes * per_node
    # An empty $EXTRA_ARGS may hold the one option that decides: said, in place of a number that looks certain.
    for key in unset:
        why = f"not set in the script, and may hold options: not accounted for; {give_variable(key)}"
        fields.note_default(f"${key}", "unknown", why)
    if script is not None:
        for phrase in script.skipped:
            fields.note_default("script", phrase, "was not followed; check that it sets nothing of the job")
    try:
        job = job_of(fields, context=replace(context, devices=context.devices or stated), name=name, family=family)
    except InputError as error:
        if "missing key 'hidden_size'" in str(error) or "without --num-experts" in str(error):
            elsewhere = f"; it may be in ${unset[0]}, which the script does not set" if unset else ""
            raise InputError(f"{error}: the script does not say its network{elsewhere}; {GIVE_MODEL}") from None
        if unset and "missing key" in str(error):
            raise InputError(
                f"{error}; or it is in ${unset[0]}, which the script does not set: --set {unset[0]}=…"
            ) from None
        raise
    return replace(job, stated_devices=stated)


def words_of(text: str, file: str) -> list[str]:
    """Words of a command line over several lines. FormatError for a quote that is not closed."""
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise FormatError(f"{file} is no command line: {error}; close the quote", file) from None


def training_launch(script: Script, file: str) -> Launch:
    """The one training command of a script. FormatError when there is none, or several that differ."""
    started = [one for one in script.launches if families.trains(one.program)]
    if script.launches and not started:
        words = script.launches[-1].options
        tp, pp = (_after(words, f"--{axis}-model-parallel-size") for axis in ("tensor", "pipeline"))
        families.refuse_other(script.launches[-1].program, words, tp, pp)
    # Scripts also start Python to convert or to check: training says its batch or its depth.
    commands = [one for one in started if {"--micro-batch-size", "--num-layers"} & set(one.options)]
    commands = commands or [one for one in started if len(one.options) > 3]
    if not commands:
        skipped = f"; not followed: {', '.join(script.skipped)}" if script.skipped else ""
        raise FormatError(
            f"{file} starts no Python program with training options{skipped}; give the arguments themselves", file
        )
    # The same command in both branches of an `if` is one training.
    if len({one.options for one in commands}) > 1:
        lines = ", ".join(str(one.line) for one in commands)
        raise FormatError(f"{file} starts {len(commands)} different trainings, on lines {lines}; keep one", file)
    return commands[-1]


def _after(words: Sequence[str], option: str) -> str:
    """The word behind an option; nothing where there is none."""
    return next((value for word, value in zip(words, words[1:], strict=False) if word == option), "")


def job_of(
    f: Fields, *, context: ReadContext, name: str, base: Stack | None = None, family: families.Family = "decoder"
) -> Job:
    """A job from named arguments, those of Megatron-LM's `args`; a model that is given is in place of its network
    options."""
    if f.has("num_layers_per_virtual_pipeline_stage") and f.has("num_virtual_stages_per_pipeline_rank"):
        f.fail("num_virtual_stages_per_pipeline_rank", "give virtual stages or layers per virtual stage, not both")
    model = context.model
    known = None if model is None else network_graph(model)
    # Before the network: it needs tp, by which the vocabulary is padded.
    mesh = mesh_of(f, context.devices, 0 if known is None else experts_of(known))
    assumed: list[str] = []
    sizes: tuple[tuple[str, int], ...] = ()
    if model is None and family in ("bert", "t5", "hybrid"):
        seq_len = seq_len_of(f, context)
        if family == "t5":  # the workload's sequence is the decoder's
            sizes, seq_len = (("enc_seq", seq_len),), context.seq_len or f.integer("decoder_seq_length", seq_len)
        model = families.network_of(f, family, mesh.tp, context.vocab_size, name)
        layers = layers_of(model)
    elif model is None:
        seq_len = seq_len_of(f, context)
        if family == "images":
            seq_len = _with_images(f, context, seq_len, assumed)
        model, layers = model_of(f, mesh.tp, context.vocab_size, name), layers_stated(f)
    else:
        if isinstance(heads := getattr(model, "num_heads", None), int):
            divides("num_attention_heads", heads, "tensor_model_parallel_size", mesh.tp)
        layers = layers_of(model)
        seq_len = seq_len_of(f, context)
        f.ignore(*NETWORK)
    micro = context.micro_batch_size or f.integer(
        "micro_batch_size", 1 if f.flag("use_dynamic_batch_size", False) else None
    )
    # validate_args: without --global-batch-size there is one microbatch a rank.
    total = context.global_batch or f.integer("global_batch_size", micro * mesh.data_ranks)
    f.ignore("micro_batch_size", "global_batch_size")
    if f.has("step_batch_size_schedule") and f.has("global_batch_size"):
        f.fail("step_batch_size_schedule", "Megatron-LM refuses it together with --global-batch-size; keep one of them")
    # The ramp is over after a few percent of the samples, so the final batch is what a step costs.
    if f.has("rampup_batch_size"):
        f.report("rampup_batch_size", f"the first steps are smaller; priced at the final global batch, {total}")
    count = microbatches(total, micro, mesh.data_ranks, ("global_batch_size", "micro_batch_size"))
    check_lengths(f, mesh, seq_len, grows=family == "images")
    schedule = schedule_of(f, mesh, layers, micro, count)
    plan = Plan(
        mesh=mesh,
        schedule=schedule,
        saved=saved_of(f, model),
        layout=layout_of(f, mesh),
        overlap=overlap_of(f, mesh, schedule.virtual_stages),
        optimizer=optimizer_of(f),
        precision=precision_of(f),
    )
    plan = with_balance(f, plan, model)
    record = stack_of(f, base or stack("megatron-deepspeed" if f.flag("deepspeed", False) else "megatron-lm"), plan)
    load = load_of(f)
    # Last: whatever nobody has asked for by now is either known to be no matter, or reported.
    f.account(IRRELEVANT | forks.IRRELEVANT, {**INEXPRESSIBLE, **forks.INEXPRESSIBLE}, known_options())
    return Job(
        model=model,
        plan=plan,
        workload=Workload(global_batch_size=total, seq_len=seq_len, router=load, sizes=sizes),
        stack=record,
        devices=mesh.world_size,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
        assumed=tuple(assumed),
        terms=TERMS,
    )


def _with_images(f: Fields, context: ReadContext, text: int, assumed: list[str]) -> int:
    """Tokens of a sample with those of its image: what the decoder is given, by its own option or text and image
    together."""
    stated = f.peek("decoder_seq_length")
    text = f.integer("dataloader_seq_length", text)
    images = families.images_in(f)
    if context.seq_len is not None:
        return context.seq_len
    # pretrain_vlm.py pads text and image up to it, so it is what a step computes.
    if isinstance(stated, int):
        return stated
    assumed.append(f"a sample is {text} tokens of text and {images} of an image (--seq-len)")
    return text + images


def load_of(f: Fields) -> RouterLoad:
    """What experts take of the tokens that are sent to them: all, or up to a factor of the mean."""
    factor = f.number("moe_expert_capacity_factor", 0.0)
    padded = f.flag("moe_pad_expert_input_to_capacity", False)
    # Without a factor nothing is dropped: every token reaches its experts, whatever their load.
    if not f.has("num_experts") or factor <= 0:
        return RouterLoad()
    if factor < 1:
        f.report("moe_expert_capacity_factor", "under the mean: tokens are dropped of every expert; priced as 1")
    return RouterLoad(capacity=max(1.0, factor), padded=padded)


Balance = Literal["layer", "sequence", "global"]
BALANCES: dict[str, Balance] = {"aux_loss": "layer", "seq_aux_loss": "sequence", "global_aux_loss": "global"}
"""--moe-router-load-balancing-type -> `experts.balance`."""


ROUTER_DTYPES: dict[str, Literal["model", "fp32", "fp64"]] = {"none": "model", "fp32": "fp32", "fp64": "fp64"}
"""--moe-router-dtype -> `experts.router_dtype`."""


def global_factor(plan: Plan) -> int:
    """Computes Megatron-LM's coefficient over ours where balance is global: its loss has means over the tokens of all
    data-parallel ranks on each of them, and its average of gradients over them divides once more."""
    return max(plan.stage_mesh(stage).data_ranks for stage in range(plan.num_stages))


def with_balance(f: Fields, plan: Plan, model: Network | str) -> Plan:
    """The plan with what keeps experts evenly loaded: losses of routers, moved biases, how experts are assigned and
    which tokens are dropped. What this model cannot have is reported, and so is balance by several losses at once."""
    policy = f.choice("moe_token_drop_policy", {"probs": "probs", "position": "position"}, "probs")
    drop: Literal["position", "probs"] = "probs" if policy == "probs" and load_of(f).capacity else "position"
    if not f.has("num_experts") and not routers(network_graph(model)):
        return plan
    kinds = f.raw("moe_router_load_balancing_type")
    # It takes several losses now, so one may come as a list of one.
    kinds = kinds[0] if isinstance(kinds, list | tuple) and len(kinds) == 1 else kinds
    kind = kinds if isinstance(kinds, str) else "aux_loss" if kinds is None else ""
    loss_balance = f.raw("moe_aux_loss_coeff")
    if isinstance(loss_balance, list | tuple) and len(loss_balance) == 1:
        (loss_balance,) = loss_balance
    coefficient = 0.0
    if isinstance(loss_balance, int | float) and not isinstance(loss_balance, bool):
        coefficient = float(loss_balance)
    if kind == "sinkhorn" and coefficient:
        f.fail("moe_aux_loss_coeff", f"{coefficient:g}: sinkhorn balances by itself; give 0, as Megatron-LM asserts")
    if kind not in (*BALANCES, "none", "sinkhorn") or isinstance(loss_balance, list | tuple):
        why = "balance by several losses at once or by quantiles is not"
        f.report("moe_router_load_balancing_type", f"{why} computed; the model trains without this loss")
    # A loss times 0 is computed by nobody: its coefficient is what switches it.
    balance = BALANCES.get(kind) if coefficient else None
    if balance == "global" and global_factor(plan) > 1:
        f.notes.append(
            f"moe_aux_loss_coeff {coefficient:g} of global_aux_loss is experts.coefficient = {coefficient:g} / "
            f"{global_factor(plan)}: Megatron-LM's mean over all ranks' tokens is averaged over these ranks once more"
        )
        coefficient = float(f"{coefficient / global_factor(plan):.15g}")  # as the writer has it
    # Tokens of a sequence are divided there, and Megatron-LM balances what a rank has.
    if kind == "sinkhorn" and plan.mesh.tp * plan.mesh.cp > 1:
        why = "sums are over a microbatch's tokens; Megatron-LM's are over those of one rank of tp and cp"
        f.report("moe_router_load_balancing_type", why)
    experts = Experts(
        balance="none" if balance is None else balance,
        coefficient=0.0 if balance is None else coefficient,
        assignment="sinkhorn" if kind == "sinkhorn" else "top_k",
        router_dtype=ROUTER_DTYPES[f.choice("moe_router_dtype", {n: n for n in ROUTER_DTYPES}, "none")],
        z_loss=f.number("moe_z_loss_coeff", 0.0),
        # 1e-3 is Megatron-LM's default, and DeepSeek-V3's rate for most of its training.
        bias_rate=f.number("moe_router_bias_update_rate", 1e-3)
        if f.flag("moe_router_enable_expert_bias", False)
        else 0,
        drop=drop,
    )
    try:
        under(network_graph(model), replace(plan, experts=experts))
    except PlanError as error:
        for key in (
            "moe_aux_loss_coeff",
            "moe_z_loss_coeff",
            "moe_router_bias_update_rate",
            "moe_router_enable_expert_bias",
            "moe_router_load_balancing_type",
            "moe_router_dtype",
        ):
            f.report(key, f"left out: {error}")
        return replace(plan, experts=Experts(drop=drop))
    return replace(plan, experts=experts)


NETWORK = """
    num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
    max_position_embeddings position_embedding_type use_rotary_position_embeddings normalization swiglu squared_relu
    disable_bias_linear add_qkv_bias untie_embeddings_and_output_weights qk_layernorm attention_dropout
    hidden_dropout multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    num_experts moe_ffn_hidden_size moe_router_topk moe_layer_freq moe_shared_expert_intermediate_size vocab_size
    mtp_num_layers num_key_value_heads encoder_num_layers decoder_num_layers embed_layernorm window_size
    extra_vocab_size
""".split()
"""Options that say the network; a model that is given stands for them."""


def experts_of(graph: Graph) -> int:
    """Experts of a layer; 0 for a model without any."""
    sizes = [d.size for block in graph.blocks for d in block.dims if d.name.split(".")[-1] == "experts"]
    return max((size for size in sizes if size is not None), default=0)


def seq_len_of(f: Fields, context: ReadContext) -> int:
    """Tokens of a sequence; packs of up to max_tokens_per_gpu count as one sequence of so many."""
    if context.seq_len is not None:
        f.ignore("seq_length", "encoder_seq_length", "max_tokens_per_gpu")
        return context.seq_len
    # validate_args makes --seq-length its alias and refuses both.
    if f.has("encoder_seq_length"):
        return f.integer("encoder_seq_length")
    if not f.has("seq_length") and f.flag("use_dynamic_batch_size", False) and f.has("max_tokens_per_gpu"):
        f.report("use_dynamic_batch_size", forks.INEXPRESSIBLE["use_dynamic_batch_size"])
        # slime fills each rank of cp up to that many tokens, so a pack is cp times as long.
        return f.integer("max_tokens_per_gpu") * f.integer("context_parallel_size", 1)
    f.ignore("max_tokens_per_gpu")
    return f.integer("seq_length")


def mesh_of(f: Fields, devices: int | None, num_experts: int) -> Mesh:
    """Reads the axes; data parallelism is what is left of the devices."""
    tp, pp = f.integer("tensor_model_parallel_size", 1), f.integer("pipeline_model_parallel_size", 1)
    # DeepSpeed-Ulysses divides the sequence as context parallelism does; layout_of says how attention sees it whole.
    cp = f.integer("ds_sequence_parallel_size", 1) * f.integer("context_parallel_size", 1)
    ep = f.integer("expert_model_parallel_size", 1)
    if devices is None:
        f.fail(
            "world_size", "the job does not say how many devices it takes (nnodes x nproc_per_node); give --on CLUSTER"
        )
    # ep is no factor here: experts refold data-parallel and context ranks.
    model_ranks = tp * pp * cp
    if devices % model_ranks:
        raise InputError(
            f"{devices} devices are not a multiple of tensor x pipeline x context = {tp} x {pp} x {cp} = "
            f"{model_ranks}; "
            f"the nearest number of devices is {max(1, round(devices / model_ranks)) * model_ranks}"
        )
    data = devices // model_ranks
    replicas = f.integer("num_distributed_optimizer_instances", 1)
    divides("data-parallel ranks", data, "num_distributed_optimizer_instances", replicas)
    ep = f.integer("moe_expert_parallel_size", ep)  # Megatron-DeepSpeed's name
    experts_value = f.raw("num_experts")
    experts = (
        f.integer("num_experts", num_experts, least=0) if not isinstance(experts_value, tuple) else max(experts_value)
    )
    # Megatron-LM's default is tp, so that who sets nothing divides each expert too.
    etp = f.integer("expert_tensor_parallel_size", tp) if experts else 1
    # Experts refold the ranks of a stage: ep x etp need not divide tp x cp, but both must divide the devices.
    if ep > 1 and experts and devices % (pp * ep * etp):
        least = pp * math.lcm(ep * etp, tp * cp)
        raise InputError(
            f"{devices} devices are not a multiple of pipeline x experts x their tensor ranks = {pp} x {ep} x {etp}; "
            f"the nearest number of devices is {max(1, round(devices / least)) * least}"
        )
    if ep > 1:
        if not experts:
            f.fail("expert_model_parallel_size", f"{ep} expert ranks without --num-experts; give it, or use 1")
        divides("num_experts", experts, "expert_model_parallel_size", ep)
    last = f.flag("use_tp_pp_dp_mapping", False)
    # Outermost first; --use-tp-pp-dp-mapping has pipeline ranks next to each other in place of data-parallel ones.
    order = ("dp_replicate", "dp_shard", "pp", "cp", "tp") if last else Mesh().order
    axes = {"pp": pp, "dp_replicate": replicas, "dp_shard": data // replicas, "cp": cp, "tp": tp}
    return Mesh(**axes, ep=ep, etp=etp, order=order)


def check_lengths(f: Fields, mesh: Mesh, seq_len: int, *, grows: bool) -> None:
    """Refusals about the sequence: context and sequence parallelism, positions. grows: the program makes positions for
    as many tokens as its decoder is given (pretrain_vlm.py)."""
    if mesh.cp > 1:
        # Each rank takes a piece from the front and its mirror from the end, so that a causal mask loads all alike.
        divides("seq_length", seq_len, "2 x context_parallel_size", 2 * mesh.cp)
    if f.flag("sequence_parallel", False):
        divides("seq_length", seq_len, "tensor_model_parallel_size x context_parallel_size", mesh.tp * mesh.cp)
    positions = f.integer("max_position_embeddings", seq_len)
    rotary = f.raw("position_embedding_type") not in (None, "learned_absolute", "absolute")
    if positions < seq_len and not grows and not rotary and not f.flag("use_rotary_position_embeddings", False):
        f.fail("max_position_embeddings", f"{positions} positions for seq_length = {seq_len}; give at least {seq_len}")


PLAIN, INTERLEAVED = (f"forward_backward_pipelining_{way}_interleaving" for way in ("without", "with"))
"""Functions of core/pipeline_parallel/schedules.py that run a pipeline, as `Order.names` has them."""
ZBH1 = "enable_zbh1_pipeline"
"""Option of the fork with zero-bubble schedules."""


def schedule_of(f: Fields, mesh: Mesh, layers: int, micro: int, count: int) -> Schedule:
    """1F1B, interleaved when a rank holds several stages."""
    pp = mesh.pp
    virtual, split = stages_of(f, pp, layers)
    if virtual > 1 and pp == 1:
        f.fail("pipeline_model_parallel_size", "interleaved stages need at least 2 pipeline ranks; raise it")
    # How many microbatches a stage takes before its next chunk has a turn; pp is the classic interleaving.
    group = f.integer("microbatch_group_size_per_virtual_pipeline_stage", pp)
    if virtual > 1 and group != pp:
        # As Megatron-LM's assertions have it.
        if not pp <= group <= count or 0 < count % group < pp:
            f.fail(
                "microbatch_group_size_per_virtual_pipeline_stage",
                f"{group} microbatches in a row: Megatron-LM takes {pp} (pipeline ranks) to {count} (microbatches), "
                f"and a last group of at least {pp}",
            )
        f.report(
            "microbatch_group_size_per_virtual_pipeline_stage",
            f"microbatches that a stage takes in a row; read as {pp}, of which fewer are in flight",
        )
    elif virtual > 1 and count % pp:
        nearby = max(1, round(count / pp)) * pp
        raise InputError(
            f"the interleaved schedule needs a multiple of pipeline_model_parallel_size = {pp} microbatches, but the "
            f"global batch gives {count}; a global_batch_size of {nearby * micro * mesh.data_ranks} gives {nearby}"
        )
    # Options of sail-sg's zero-bubble fork, which Megatron-LM itself does not know.
    bubble = f.flag("enable_zbh1_pipeline", False) or f.flag("enable_zbh1_exact_semantics", False)
    runs = INTERLEAVED if virtual > 1 else ZBH1 if bubble and pp > 1 else PLAIN
    return Schedule(
        name=orders.spelled("megatron-lm")[runs].name,
        micro_batch_size=micro,
        virtual_stages=virtual,
        layers_per_stage=split,
    )


def stages_of(f: Fields, pp: int, layers: int) -> tuple[int, tuple[int, ...]]:
    """(virtual stages of a rank, layers of each stage or () when equal)."""
    # DeepSpeed's PipelineModule deals layers out by itself and has no virtual stages.
    if f.flag("deepspeed", False) and pp > 1 and not f.flag("no_pipeline_parallel", False):
        method = f.text("pp_partition_method", "type:transformer")
        try:
            split = layers_by_type(method, layers, pp, tied=not f.flag("untie_embeddings_and_output_weights", False))
        except (ValueError, re.error) as error:
            f.fail("pp_partition_method", f"{error}; give type:transformer or type:transformer|embedding")
        return 1, () if len(set(split)) == 1 else split
    if f.has("pipeline_model_parallel_layout"):
        split = parse_layout(f, f.text("pipeline_model_parallel_layout"), layers)
        divides("stages of the layout", len(split), "pipeline_model_parallel_size", pp)
        return len(split) // pp, split
    ends = [int(f.flag(f"account_for_{end}_in_pipeline_split", False)) for end in ("embedding", "loss")]
    first, last = (f.integer(f"decoder_{end}_pipeline_num_layers", 0, least=0) for end in ("first", "last"))
    # Embedding and loss may count as a layer each, so that the first and the last rank get one layer less.
    counted = layers + sum(ends)
    if first or last:
        stated_ends, middle = sum(1 for n in (first, last) if n), layers - first - last
        if pp <= stated_ends and middle:
            f.fail("decoder_first_pipeline_num_layers", f"{middle} layers are left for no stage; change the numbers")
        divides("layers between the first and last stage", middle, "stages between", max(1, pp - stated_ends))
        virtual = f.integer("num_virtual_stages_per_pipeline_rank", 1)
        per_stage = middle // max(1, pp - stated_ends)
        # Uneven ends are by rank, all of whose virtual stages share them.
        by_rank = [first or per_stage, *[per_stage] * (pp - 2), last or per_stage]
        for rank_layers in by_rank:
            divides("layers of a pipeline rank", rank_layers, "num_virtual_stages_per_pipeline_rank", virtual)
        # Stages in order: first chunk of every rank, then the second chunk of every rank.
        return virtual, tuple(n // virtual for _ in range(virtual) for n in by_rank)
    divides("num_layers (with embedding and loss, where they count)", counted, "pipeline_model_parallel_size", pp)
    per_rank = counted // pp
    if f.has("num_layers_per_virtual_pipeline_stage"):
        part = f.integer("num_layers_per_virtual_pipeline_stage")
        divides("layers of a pipeline rank", per_rank, "num_layers_per_virtual_pipeline_stage", part)
        virtual = per_rank // part
    else:
        virtual = f.integer("num_virtual_stages_per_pipeline_rank", 1)
        divides("layers of a pipeline rank", per_rank, "num_virtual_stages_per_pipeline_rank", virtual)
    if not any(ends):
        return virtual, ()
    split_list = [per_rank // virtual] * (pp * virtual)
    # Embedding and loss stand for a layer each on the first and the last stage.
    split_list[0] -= ends[0]
    split_list[-1] -= ends[1]
    return virtual, tuple(split_list)


def parse_layout(f: Fields, text: str, layers: int) -> tuple[int, ...]:
    """Layers of each stage in `Et*3|(tt|)*29,m|L`: E embedding, t layer, m MTP, L loss, | between stages."""
    plain = text.replace(",", "").replace(" ", "").strip("'\"")
    if re.search(r"[^EtmL|()*\d]", plain) or len(plain) > 10_000:
        f.fail("pipeline_model_parallel_layout", f"{text!r} has signs other than E t m L | ( ) * and digits")
    try:
        while match := re.search(r"\(([^()]*)\)\*(\d{1,4})|([EtmL|])\*(\d{1,4})", plain):
            part = (match[1] if match[3] is None else match[3]) * int(match[2] or match[4])
            plain = plain[: match.start()] + part + plain[match.end() :]
            # Repeats nest, so a short text may expand without bound.
            if len(plain) > 100_000:
                raise ValueError
    except ValueError:
        f.fail("pipeline_model_parallel_layout", f"{text!r} expands to over 100000 signs")
    stages = plain.split("|")
    split = tuple(stage.count("t") for stage in stages)
    # Megatron-LM asserts the embedding first and the loss last, in whatever stage.
    if sum(split) != layers or not plain.startswith("E") or not plain.endswith("L"):
        f.fail(
            "pipeline_model_parallel_layout", f"{text!r} has {sum(split)} of {layers} layers, or E or L is misplaced"
        )
    if "m" in plain:
        f.report(
            "pipeline_model_parallel_layout", "places multi-token prediction; it is read as part of the last stage"
        )
    return split


def saved_of(f: Fields, model: object) -> Saved:
    """Reads what is recomputed."""
    granularity = f.raw("recompute_granularity")
    # An alias from before granularities had names: validate_args sets selective.
    if f.flag("recompute_activations", False):
        granularity = "selective"
    method, count, modules = f.raw("recompute_method"), f.raw("recompute_num_layers"), f.raw("recompute_modules")
    if f.flag("checkpoint_activations", False):  # until 2.5, and in Megatron-DeepSpeed
        return Saved(preset="full", every=f.integer("checkpoint_num_layers", 1))
    if granularity is None and f.has("activations_checkpoint_method"):  # 2.6 to 2.7
        granularity, method = "full", f.raw("activations_checkpoint_method")
        count = f.integer("activations_checkpoint_num_layers", 1)
    f.ignore("activations_checkpoint_num_layers", "checkpoint_num_layers")
    if granularity is None:
        return Saved()
    if granularity == "selective":
        if method is not None or count is not None:
            f.fail(
                "recompute_method", "selective recomputation takes no method and no number of layers; leave them out"
            )
        # --recompute-modules defaults to core_attn, Korthikanti et al.'s selective recomputation.
        names = modules if isinstance(modules, tuple) else (modules or "core_attn",)
        rules, rest = module_rules([str(n) for n in names if n != "core_attn"], model)
        if rest:
            f.note_default(
                "recompute_modules", " ".join(rest), "these parts are recomputed; read as kept, so too large"
            )
        return Saved(preset="selective" if "core_attn" in names else "none", rules=rules)
    if granularity != "full":
        f.fail("recompute_granularity", f"recompute_granularity is {granularity!r}; understood are full, selective")
    if method not in ("uniform", "block"):
        f.fail("recompute_method", f"full recomputation needs --recompute-method uniform or block, not {method!r}")
    number = f.integer("recompute_num_layers") if count is None or f.has("recompute_num_layers") else int(str(count))
    # `uniform` keeps the input of every n-th layer of all; `block` recomputes the first n of each stage, by layer.
    if method == "uniform":
        return Saved(preset="full", every=number)
    return Saved(rules=(SavedRule(preset="full", first_per_stage=number),))


def layout_of(f: Fields, mesh: Mesh) -> Layout:
    """Sequence and context parallelism."""
    sequence = f.flag("sequence_parallel", False)
    # As validate_args does, with a warning that nobody reads.
    if sequence and mesh.tp == 1:
        f.notes.append("sequence_parallel: switched off by Megatron-LM because tensor_model_parallel_size is 1")
        sequence = False
    if f.flag("tp_comm_overlap", False) and not sequence:
        f.fail("tp_comm_overlap", "overlap of tensor-parallel transfers needs --sequence-parallel and tp > 1; add it")
    if mesh.tp > 1:
        f.report("tp_comm_overlap", INEXPRESSIBLE["tp_comm_overlap*"])
    # Two all-to-alls exchange sequence for heads; the rest of the model sees it as context parallelism.
    ulysses = f.integer("ds_sequence_parallel_size", 1) > 1
    kind = f.raw("cp_comm_type") or ("a2a" if ulysses else "p2p")
    kinds = {"p2p": "ring", "a2a": "ulysses", "allgather": "all_gather"}
    kind = kind if isinstance(kind, tuple) else (kind,)
    if mesh.cp > 1 and (len(set(kind)) > 1 or kind[0] not in kinds):
        f.report("cp_comm_type", "differs by layer, or works in two levels: read as a ring")
    return Layout(
        sequence_parallel=sequence,
        context=kinds.get(str(kind[0]), "ring"),  # type: ignore[arg-type]
        dispatch=_dispatch(f),
    )


DISPATCHERS: dict[Dispatch, tuple[str, str | None]] = {
    "all_gather": ("allgather", None),
    "all_to_all": ("alltoall", None),
    "fused": ("flex", "deepep"),
    "hybrid_ep": ("flex", "hybridep"),
}
"""How tokens get to their experts: --moe-token-dispatcher-type and --moe-flex-dispatcher-backend."""


def _dispatch(f: Fields) -> Dispatch | None:
    """How tokens get to their experts; None for a model without any. `flex` is DeepEP unless its backend is said."""
    backend = f.text("moe_flex_dispatcher_backend", "deepep")
    f.ignore("moe_enable_deepep")
    if not (f.has("num_experts") or f.has("moe_token_dispatcher_type")):
        return None
    # allgather is Megatron-LM's default, whatever the number of experts.
    kinds = {"allgather": "allgather", "alltoall": "alltoall", "flex": "flex"}
    kind = f.choice("moe_token_dispatcher_type", kinds, "allgather")
    if kind == "flex" and backend not in ("deepep", "hybridep"):
        f.fail("moe_flex_dispatcher_backend", f"{backend}: Megatron-LM has deepep and hybridep")
    dispatcher = kind, backend if kind == "flex" else None
    return next(name for name, written in DISPATCHERS.items() if written == dispatcher)


def overlap_of(f: Fields, mesh: Mesh, virtual: int) -> Overlap:
    """What is issued early; both kinds of data-parallel overlap are off unless asked for."""
    reduce, gather = f.flag("overlap_grad_reduce", False), f.flag("overlap_param_gather", False)
    # FSDP has no DDP buckets: it reduces by its own units.
    sharded = f.flag("use_megatron_fsdp", False) or f.flag("use_torch_fsdp2", False)
    if gather and not (f.flag("use_distributed_optimizer", False) or sharded):
        f.fail("overlap_param_gather", "it needs --use-distributed-optimizer; add it")
    if gather and not reduce:
        f.fail("overlap_param_gather", "it needs --overlap-grad-reduce; add it")
    # Main gradients are fp32 unless asked otherwise; a bucket is counted in elements, so its bytes follow.
    grad = "bf16" if f.flag("grad_reduce_in_bf16", False) else "fp32"
    # The default of distributed_data_parallel.py: buckets grow with ranks, so that a ring's pieces stay large.
    elements = f.integer("ddp_bucket_size", max(40_000_000, 1_000_000 * mesh.data_ranks * mesh.cp))
    # validate_args switches the overlap off for schedules that are not interleaved.
    waits = f.flag("no_overlap_p2p_communication", False) or virtual == 1
    return Overlap(
        grad_reduce=reduce,
        param_gather=gather,
        bucket_bytes=elements * DTYPE_BYTES[grad] if reduce and not sharded else None,
        pipeline_sends=not waits,
        experts=f.flag("overlap_moe_expert_parallel_comm", False),
    )


def optimizer_of(f: Fields) -> Optimizer:
    """The update and how it is divided."""
    kinds = {"adam": "adamw", "sgd": "momentum", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
    kind = f.choice("optimizer", kinds, "adam")
    # The distributed optimizer divides states and main parameters; gradients are reduce-scattered but kept whole: ZeRO
    # 1.
    zero = 1 if f.flag("use_distributed_optimizer", False) else 0
    if f.flag("deepspeed", False):
        zero = f.integer("zero_stage", 0, least=0)
        if zero > 3:
            f.fail("zero_stage", f"{zero}: ZeRO has stages 0 to 3")
    if f.flag("use_torch_fsdp2", False):
        if zero or f.integer("pipeline_model_parallel_size", 1) > 1 or f.integer("expert_model_parallel_size", 1) > 1:
            f.fail(
                "use_torch_fsdp2", "refused with the distributed optimizer, pipeline or expert parallelism; drop those"
            )
        zero = 3
    if f.flag("use_megatron_fsdp", False):
        strategies = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}
        zero = int(f.choice("data_parallel_sharding_strategy", strategies, "optim_grads_params"))
    f.ignore("data_parallel_sharding_strategy")
    offload = None
    if f.flag("optimizer_cpu_offload", False):
        # HybridDeviceOptimizer adds gradients up on the device and copies them out at the end.
        offload = Offload(fraction=f.number("optimizer_offload_fraction", 1.0), accumulate="device")
    f.ignore("optimizer_offload_fraction")
    return Optimizer(
        kind=kind,  # type: ignore[arg-type]
        zero=zero,  # type: ignore[arg-type]
        reshard_after_forward=not f.flag("torch_fsdp2_no_reshard_after_forward", False),
        offload=offload,
        # On by default, which costs a wait of all ranks for the norm.
        clip=f.number("clip_grad", 1.0) > 0,
    )


def precision_of(f: Fields) -> Precision:
    """Reads dtypes; fp32 unless --bf16 or --fp16."""
    if f.flag("bf16", False) and f.flag("fp16", False):
        f.fail("fp16", "--bf16 and --fp16 are both given; keep one")
    param: DType = "bf16" if f.flag("bf16", False) else "fp16" if f.flag("fp16", False) else "fp32"
    grad: DType = param
    # bf16 turns fp32 gradients on by itself; with fp16 they are asked for.
    if f.flag("accumulate_allreduce_grads_in_fp32", False) or (
        param == "bf16" and not f.flag("grad_reduce_in_bf16", False)
    ):
        grad = "fp32"
    f.ignore("grad_reduce_in_bf16")
    names = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"}
    master = f.choice("main_params_dtype", names, "fp32")
    states = f.text("exp_avg_dtype", "fp32")
    # The plan has one dtype for both moments.
    if states not in names or f.text("exp_avg_sq_dtype", "fp32") != states:
        f.note_default("exp_avg_dtype", states, "the two moments differ, or are in eight bits: read as fp32, too large")
        states = "fp32"
    if f.text("main_grads_dtype", "fp32") == "bf16":
        grad = "bf16"
    fp8 = None
    if f.raw("fp8_format") is not None:
        recipes = {"delayed": "delayed", "tensorwise": "tensorwise", "mxfp8": "mxfp8", "blockwise": "blockwise"}
        recipe = f.choice("fp8_recipe", recipes, "delayed")
        attention = f.flag("fp8_dot_product_attention", False)
        # Only linears of transformer layers are Transformer Engine's modules under its autocast; the output layer is
        # not.
        fp8 = Fp8(recipe=recipe, except_ops=("lm_head", "head.*"), attention=attention)  # type: ignore[arg-type]
    return Precision(
        param=param,
        compute=param,
        grad=grad,
        reduce=grad,
        # In fp32 the parameters are their own master copy.
        master="none" if param == "fp32" else master,  # type: ignore[arg-type]
        states=states,  # type: ignore[arg-type]
        fp8=fp8,
    )


def stack_of(f: Fields, base: Stack, plan: Plan) -> Stack:
    """What the arguments switch in the program."""
    backend = f.text("attention_backend", "auto")
    # Megatron-LM's own modules: attention as two matmuls with a fused softmax between.
    local = f.text("transformer_impl", "transformer_engine") == "local"
    flash = any(f.flag(f"use_flash_attn{kind}", False) for kind in ("", "_v1", "_v2", "_triton", "_builder"))
    if flash:
        base = with_job_fields(base, "--use-flash-attn", attention="flash")
    # Megatron-DeepSpeed has neither option: its record says how attention runs.
    elif f.flag("deepspeed", False):
        pass
    elif backend in ("unfused", "local") or local:
        base = with_job_fields(base, f"--attention-backend {backend}", attention="unfused")
    if f.flag("cross_entropy_loss_fusion", False):
        base = with_job_fields(base, "--cross-entropy-loss-fusion", cross_entropy="fused")
    f.ignore("cross_entropy_fusion_impl")
    graphs = f.raw("cuda_graph_impl") not in (None, "none")
    if graphs or f.flag("enable_cuda_graph", False) or f.flag("external_cuda_graph", False):
        base = with_job_fields(base, "--cuda-graph-impl", launch_mode="cuda_graph")
    if f.flag("no_gradient_accumulation_fusion", False):
        base = with_job_fields(base, "--no-gradient-accumulation-fusion", grad_accumulation_fused=False)
    if f.flag("deterministic_mode", False):
        base = with_job_fields(base, "--deterministic-mode", deterministic=True)
    for key, field in (
        ("no_bias_dropout_fusion", "dropout_add"),
        ("no_bias_swiglu_fusion", "activation"),
        ("no_bias_gelu_fusion", "activation"),
    ):
        if f.flag(key, False):
            base = with_job_fields(base, f"--{key.replace('_', '-')}", **{field: "unfused"})
    f.report_unless("no_rope_fusion", (False,), "rotary embeddings are priced as one kernel")
    if f.has("num_experts"):
        if f.flag("moe_grouped_gemm", False):
            f.notes.append("moe_grouped_gemm: products of a rank's experts are launched together")
        # SequentialMLP: a loop over the experts of a rank.
        elif not f.flag("deepspeed", False):
            base = with_job_fields(base, "no --moe-grouped-gemm", moe_experts="sequential")
        if f.flag("use_transformer_engine_op_fuser", False):
            base = with_job_fields(base, "--use-transformer-engine-op-fuser", moe_experts="fused")
    f.ignore("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")
    return base

"""ColossalAI: commands of `colossalai run` around a Booster's plugin, as its examples and ColossalChat take them.

What flags mean was read from hpcaitech/ColossalAI: examples/language/llama/benchmark.py (0094bc0),
applications/ColossalChat/examples/training_scripts/train_sft.py (0b4a335), colossalai/booster/plugin:
LowLevelZeroPlugin (ZeRO 1 and 2, fp32 copies in the optimizer), GeminiPlugin (parameters in chunks, ZeRO 3),
HybridParallelPlugin (tensor, pipeline and sequence parallelism with ZeRO). Leaves out: chunks that Gemini's automatic
placement moves, other examples' own flags, scripts that build a plugin in Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gnomon.errors import InputError, nearest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, divides, microbatches
from gnomon.formats.launched import TrainCommand, dashed, launched
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_source import commands_of, program_name
from gnomon.formats.trainer_words import flag
from gnomon.formats.trainers import Modules, adapted, model_of
from gnomon.models.llama import LlamaConfig
from gnomon.orders.interleaved_one_f_one_b import ORDER as INTERLEAVED
from gnomon.orders.one_f_one_b import ORDER as ONE_F_ONE_B
from gnomon.plans import Layout, Mesh, Offload, Optimizer, Overlap, Plan, Precision, Saved, Schedule, Workload
from gnomon.software import Stack, stack

SHORT = dict(c="config", p="plugin", b="batch_size", l="max_length", g="grad_checkpoint", x="xformers", s="num_steps")
SHORT |= dict(i="ignore_steps", w="warmup_ratio", m="memory_limit")
"""Letters of the benchmark's flags -> their names."""

RENAMED = {"max_len": "max_length", "use_flash_attn": "xformers", "pretrain": "config", "zero_stage": "zero"}
RENAMED |= {"zero_cpu_offload": "cpu_offload", "mixed_precision": "precision", "accumulation_steps": "accumulation"}
RENAMED |= {"microbatch_size": "mbs", "tp_size": "tp", "pp_size": "pp", "sp_size": "sp", "model_path": "config"}
RENAMED |= {"gradient_accumulation_steps": "accumulation", "model_name_or_path": "config", "model": "config"}
RENAMED |= {"train_micro_batch_size_per_gpu": "batch_size", "tp_degree": "tp"}
RENAMED |= {"checkpoint_activations": "grad_checkpoint", "gradient_checkpointing": "grad_checkpoint"}
"""ColossalChat's and other examples' names -> the benchmark's."""

NETWORKS = {"7b": "llama-2-7b", "13b": "llama-2-13b", "70b": "llama-2-70b"}
"""The benchmark's names for Llama's sizes -> the catalogue's."""

PLUGINS = ("gemini", "gemini_auto", "fsdp", "fsdp_cpu", "3d", "3d_cpu", "zero2", "zero2_cpu", "ddp")

LEARNING = {
    "train_dpo": "pairs of answers, and a reference model that is run forward: neither is priced",
    "train_kto": "a reference model is run forward, which is not priced",
    "train_orpo": "pairs of answers: priced as one sequence",
    "train_rm": "pairs of answers, scored: priced as one sequence with a language model's loss",
    "train_ppo": "generation, reward and value models are not priced, only the update",
    "train_grpo": "generation and rewards are not priced, only the update",
}
"""Scripts of ColossalChat -> what of them is not priced."""

IRRELEVANT = frozenset(
    """
    num_steps ignore_steps profile nsys no_cache save_* dataset* tokenizer_dir lr weight_decay warmup_* max_epochs
    num_epochs config_file log_dir use_wandb checkpoint_path load_checkpoint tensorboard_dir lora_train_bias
    merge_lora_weights data_path dtype_* seed initial_scale
    """.split()
)

INEXPRESSIBLE = {
    "memory_limit": "Gemini's limit of device memory, by which chunks move to the host",
    "prefetch_num": "chunks that Gemini gathers ahead; read as one block ahead",
    "overlap_allgather": "parameters of ZeRO are gathered beside the next forward; without it a prediction is too slow",
    "custom_ckpt": "some layers of each stage are recomputed; read as all of them",
    "disable_async_reduce": "gradients wait for the backward; a prediction is somewhat too fast",
    "enable_sequence_parallelism": "",
}

MASTER = Precision(param="bf16", compute="bf16", grad="bf16", reduce="bf16", master="fp32", states="fp32")
"""A plugin's mixed precision: parameters in the half dtype, copies and states of HybridAdam in fp32."""


def _accepts(launch: Launch) -> bool:
    return "colossalai" in launch.launcher and "run" in launch.launcher


def _looks(sample: Sample) -> bool:
    return "colossalai" in sample.text and any(map(_accepts, commands_of(sample)))


def _read(path: Path, context: ReadContext) -> Job:
    command = launched(path, context, _accepts, "colossalai run")
    f, assumed = _fields(command, context), list[str]()
    plugin = str(f.raw("plugin") or "gemini")
    if plugin not in PLUGINS:
        f.fail("plugin", f"{plugin!r} is no plugin of ColossalAI{nearest(plugin, PLUGINS)}: {', '.join(PLUGINS)}")
    devices = context.devices or command.devices
    if devices is None:
        raise InputError("the command does not say how many devices it runs on; give --on CLUSTER")
    program = program_name(command.launch.program)
    own = program == "benchmark"  # the only one whose flags all have defaults that are known
    chat = program.startswith("train_")  # ColossalChat's defaults differ from the benchmark's
    if (why := LEARNING.get(program)) is not None:
        f.note_default("script", program, why)
    network = _network(f, context, path.resolve().parent, assumed, program)
    seq_len = context.seq_len or f.integer("max_length", 512 if chat else 4096)
    mesh = _mesh(f, plugin, devices)
    if not (own or chat or f.has("batch_size") or context.micro_batch_size):
        f.fail("batch_size", f"{program}.py is not known here and no flag says its batch; give --micro-batch-size N")
    batch = f.integer("batch_size", 4 if chat else 2)
    micro = context.micro_batch_size or (f.integer("mbs", 1) if mesh.pp > 1 else batch)
    f.ignore("mbs")
    if mesh.pp > 1 and context.micro_batch_size is None:
        divides("batch_size", batch, "mbs", micro)
    total = context.global_batch or batch * f.integer("accumulation", 8 if chat else 1) * mesh.data_ranks
    microbatches(total, micro, mesh.data_ranks, ("the step's batch", "the microbatch"))
    virtual = f.integer("n_chunks", 1) if f.raw("pp_style") == "interleaved" else 1
    f.ignore("n_chunks")
    plan = Plan(
        mesh=mesh,
        schedule=Schedule(
            name=(INTERLEAVED if virtual > 1 else ONE_F_ONE_B).name,
            micro_batch_size=micro,
            virtual_stages=virtual,
        ),
        saved=Saved(preset="full") if flag(f, "grad_checkpoint") else Saved(),
        layout=_layout(f, mesh),
        overlap=Overlap(),
        optimizer=_optimizer(f, plugin),
        precision=_precision(f, plugin),
    )
    record = _record(f, plugin, network)
    f.account(IRRELEVANT, {key: why for key, why in INEXPRESSIBLE.items() if why}, ())
    return Job(
        model=network,
        plan=plan,
        workload=Workload(global_batch_size=total, seq_len=seq_len),
        stack=record,
        devices=devices,
        notes=tuple(f.notes),
        unexpressed=tuple(f.unexpressed),
        assumed=tuple(assumed),
        stated_devices=command.devices,
    )


def _fields(command: TrainCommand, context: ReadContext) -> Fields:
    """The flags by the benchmark's names, letters among them."""
    words = [
        f"--{SHORT[word[1:]]}" if re.fullmatch(r"-[A-Za-z]", word) and word[1:] in SHORT else word
        for word in command.launch.options
    ]
    dashed_words = dashed(words)
    if context.model is not None:
        dashed_words = {
            name: value for name, value in dashed_words.items() if RENAMED.get(name) != "config" or value is not True
        }
    elif empty := [name for name, value in dashed_words.items() if value is True and RENAMED.get(name) == "config"]:
        raise InputError(f"{command.file}: --{empty[0]} has no name after it; give --model NAME", f"$.{empty[0]}")
    values = {RENAMED.get(name, name): value for name, value in dashed_words.items()}
    named = {name.lstrip("-").replace("-", "_"): text for name, text in command.options.items()}
    options = {RENAMED.get(name, name): text for name, text in named.items()}
    return command.fields(values, replace(context, settings=options))


def _network(f: Fields, context: ReadContext, folder: Path, assumed: list[str], program: str) -> Network | str:
    """The network that a flag names, or the benchmark's default."""
    name = f.peek("config")
    if name is None and context.model is None and program != "benchmark":
        f.fail("config", f"{program}.py is not known here and no flag says its network; give --model NAME")
    small: Mapping[str, LlamaConfig] = {
        "5b": _llama("5b", 32, 4096, 11008, 8),
        "100m": _llama("100m", 4, 1024, 2048, 32),
    }
    if context.model is None and (name is None or name in NETWORKS or name in small):
        f.ignore("config")
        network: Network | str = small[str(name)] if name in small else NETWORKS[str(name or "7b")]
    else:
        network = model_of(f, "config", context, folder, assumed)
    if rank := f.integer("lora_rank", 0, least=0):
        network = adapted(f, network, rank, (), four_bits=False, named="lora_rank")
    return network


def _llama(name: str, layers: int, hidden: int, ffn: int, kv_heads: int) -> LlamaConfig:
    """Describes a model of the benchmark's MODEL_CONFIGS that the catalogue has not."""
    return LlamaConfig(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=hidden // 32,
        ffn_size=ffn,
        vocab_size=32000,
    )


def _mesh(f: Fields, plugin: str, devices: int) -> Mesh:
    """tp, pp and a sequence over ranks are HybridParallelPlugin's; Gemini has tp and replicas."""
    hybrid = plugin.startswith("3d")
    tp = f.integer("tp", 1)
    pp = f.integer("pp", 1)
    mode = str(f.raw("sp_mode") or "all_to_all")
    sp = f.integer("sp", 1) if mode in ("all_to_all", "ring_attn") else 1
    f.ignore("sp", "enable_sequence_parallelism")
    if not hybrid and not plugin.startswith("gemini") and max(tp, pp, sp) > 1:
        f.fail("plugin", f"{plugin} has no tensor, pipeline or sequence parallelism; give --plugin 3d")
    if plugin.startswith("gemini") and max(pp, sp) > 1:
        f.fail("plugin", f"{plugin} has no pipeline or sequence parallelism; give --plugin 3d")
    divides("devices", devices, "tp x pp x sp", tp * pp * sp)
    data = devices // (tp * pp * sp)
    replicas = f.integer("extra_dp", 1)
    divides("data-parallel ranks", data, "extra_dp", replicas)
    return Mesh(pp=pp, dp_replicate=replicas, dp_shard=data // replicas, cp=sp, tp=tp)


def _layout(f: Fields, mesh: Mesh) -> Layout:
    """`split_gather` and `ring` divide the sequence over tp between layers, the others are context parallelism."""
    mode = str(f.raw("sp_mode") or "all_to_all")
    sharded_sequence = mode in ("split_gather", "ring") and (
        f.integer("sp", 1) > 1 or flag(f, "enable_sequence_parallelism")
    )
    return Layout(
        sequence_parallel=sharded_sequence and mesh.tp > 1, context="ring" if mode == "ring_attn" else "ulysses"
    )


def _optimizer(f: Fields, plugin: str) -> Optimizer:
    zero: Literal[0, 1, 2, 3] = 0
    parameters, fraction = False, 0.0
    if plugin.startswith("gemini"):
        share = f.number("shard_param_frac", 1.0)
        zero = 3 if share > 0 else 2
        if 0 < share < 1:
            f.report("shard_param_frac", "parameters are sharded in part; read as all, so somewhat too slow")
        fraction, parameters = f.number("offload_optim_frac", 0.0), f.number("offload_param_frac", 0.0) >= 1
        if 0 < f.number("offload_param_frac", 0.0) < 1:
            f.report("offload_param_frac", "parameters are on the host in part; read as none")
        if plugin == "gemini_auto":
            f.note_default(
                "plugin", plugin, "chunks move to the host while device memory is short: memory is too large"
            )
    elif plugin.startswith("fsdp"):
        zero, fraction, parameters = 3, float(plugin == "fsdp_cpu"), plugin == "fsdp_cpu"
    elif plugin.startswith("zero2"):
        zero, fraction = 2, float(plugin == "zero2_cpu")
    elif plugin.startswith("3d"):
        stage = f.integer("zero", 0, least=0)
        if stage > 2:
            f.fail("zero", f"HybridParallelPlugin has ZeRO 0, 1 and 2, not {stage}; --plugin gemini divides parameters")
        zero = stage  # type: ignore[assignment]
        fraction = float(plugin == "3d_cpu" or flag(f, "cpu_offload"))
    f.ignore("zero", "cpu_offload", "shard_param_frac", "offload_*_frac")
    return Optimizer(
        kind="adamw",
        zero=zero,
        offload=Offload(fraction=min(1.0, fraction)) if fraction > 0 and zero else None,
        offload_parameters=parameters,
        clip=f.number("grad_clip", 1.0) > 0,
    )


def _precision(f: Fields, plugin: str) -> Precision:
    kind = str(f.raw("precision") or ("fp16" if plugin.startswith("fsdp") else "bf16"))
    if kind not in ("bf16", "fp16", "fp32"):
        f.fail("precision", f"{kind!r}; understood are bf16, fp16 and fp32")
    plain = replace(MASTER, param=kind, compute=kind, grad=kind, reduce=kind)  # type: ignore[arg-type]
    copies = plugin not in ("ddp", "fsdp", "fsdp_cpu") and kind != "fp32"
    return plain if copies else replace(plain, master="none", states=kind)  # type: ignore[arg-type]


def _record(f: Fields, plugin: str, network: Network | str) -> Stack:
    """The stack of a job: transformers' modules; Shardformer puts apex' norms in their place under the plugins that
    know the network."""
    fused = plugin.startswith(("gemini", "3d"))
    modules = Modules(fused=fused, loss="unfused", compiled=False, experts="eager", flash=flag(f, "xformers"))
    f.ignore("xformers")
    return modules.of(stack("pytorch-fsdp"), network)


FORMAT = Format(
    name="colossalai",
    program="hpcaitech/ColossalAI 0094bc0",
    files="commands of `colossalai run`",
    looks=_looks,
    read=_read,
)

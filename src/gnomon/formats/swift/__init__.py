"""ms-swift: `swift sft | pt | rlhf` around transformers' Trainer, `megatron sft | pt | rlhf` on Megatron-Core.

What a flag means and its default was read from modelscope/ms-swift 3602360 (2026-08): swift/arguments/sft_args.py,
tuner_args.py and base_args/, swift/trainers/arguments.py, swift/megatron/arguments/megatron_args.py. `megatron sft`
takes Megatron-LM's options with underscores and a value for each switch, and its network from the hub's config. Leaves
out rollouts, rewards and reference models, which are listed, and towers of multimodal models.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import InputError, nearest
from gnomon.formats.export import Draft, ExportRequest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext, network_graph
from gnomon.formats.job import Fields, Job
from gnomon.formats.launched import dashed
from gnomon.formats.learnt import Learnt
from gnomon.formats.megatron.options import known_options
from gnomon.formats.megatron.read import job_of as megatron_job
from gnomon.formats.megatron.terms import renamed
from gnomon.formats.shell import Launch, launches
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_source import Source, commands_of, plain, program_name, trainer_source
from gnomon.formats.trainer_terms import TrainerTerms, fsdp_host
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainer_write import drafted, tuning
from gnomon.formats.trainers import AUTOCAST, BF16, FP16, FP32, Training, adapted, in_part, layers_in_part, model_of
from gnomon.formats.training_arguments import INEXPRESSIBLE as TRAINER
from gnomon.formats.training_arguments import IRRELEVANT, finished, in_tf32
from gnomon.graph import Graph, numel
from gnomon.models.presets import CONFIGS
from gnomon.models.trained import Trained
from gnomon.plans import Layout, Precision
from gnomon.software import stack

NEUTRAL = IRRELEVANT | frozenset(
    """
    template* model_type model_kwargs model_name model_author use_hf hub_token split_dataset_ratio val_dataset* columns
    custom_* system lazy_tokenize truncation_strategy tuner_backend lora_alpha lora_dropout lora_bias lora_dtype
    swanlab* freeze_vit freeze_aligner freeze_llm vit_* aligner_lr loss_scale attn_impl max_new_tokens
    temperature add_version create_checkpoint_symlink check_model external_plugins load_from_cache_file response_prefix
    norm_bbox max_pixels agent_template enable_thinking padding_side acc_strategy router_aux_loss_coef packing_num_proc
    packing_strategy bnb_4bit_* use_chat_template ignore_args_error load_args quant_method device_map interleave_prob
    streaming shuffle_buffer_size max_epochs metric* callbacks loss_type torch_empty_cache_steps reward_* vllm_* beta
    rlhf_type max_completion_length top_* log_completions sleep_level use_vllm lorap_lr_ratio ref_model* rpo_alpha
    deepspeed_autotp_size use_logits_to_keep
    """.split()
)

INEXPRESSIBLE = {
    **TRAINER,
    "use_rslora": "another scale",
    "lisa_*": "some layers are trained at a time; read as all",
    "padding_free": "no padding: less work than full sequences (--lengths gives those of a step)",
    "num_generations": "generation is not priced; its answers are sequences of the batch",
    "zero_hpz_partition_size": "ZeRO++: a second copy of the parameters within the node",
    "experts_impl": "how experts are computed; read as the model's default",
}

DTYPES: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16"}
ROLLOUT = "reinforcement learning: generation, rewards and the reference model are not priced, only the update"
PAIRS = "two answers a sample and a reference model run forward are not priced: one sequence a sample"

MEGATRON_DEFAULTS: Mapping[str, object] = {
    "micro_batch_size": 1,
    "global_batch_size": 16,
    "use_distributed_optimizer": True,
    "recompute_granularity": "selective",
    "no_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "attention_backend": "flash",
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
    "expert_tensor_parallel_size": 1,
}
"""Where ms-swift's defaults differ from Megatron-LM's, by Megatron-LM's names."""

MEGATRON_SWITCHED_OFF: Mapping[str, str] = {
    "bias_activation_fusion": "no_bias_swiglu_fusion",
    "bias_dropout_fusion": "no_bias_dropout_fusion",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion",
    "masked_softmax_fusion": "no_masked_softmax_fusion",
    "apply_rope_fusion": "no_rope_fusion",
}
"""Switches of ms-swift that are on unless said otherwise -> Megatron-LM's option that switches them off."""

MEGATRON_RENAMED: Mapping[str, str] = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "max_length": "seq_length",
}
"""ms-swift's name -> Megatron-LM's."""

MEGATRON_NEUTRAL = NEUTRAL | frozenset(
    """
    model load mcore_model adapters mcore_adapter save* no_save* no_load* finetune lr* min_lr train_iters
    num_train_epochs max_epochs dataloader* num_workers dataset* packing* padding_free bf16 fp16 torch_dtype tuner_type
    train_type merge_lora use_flash_attn sft_type task_type
    """.split()
)


def _task(launch: Launch) -> tuple[str, str]:
    """(`swift` or `megatron`, its word) of a command; empty texts where it is another's."""
    name = program_name(launch.program)
    word = launch.options[0] if launch.options else ""
    if name in ("swift", "megatron"):
        return name, word
    parts = launch.program.replace("/", ".").removesuffix(".py").split(".")
    # Under torchrun the command's own module is named.
    if "swift" in parts and parts[-1] in ("sft", "pt", "rlhf"):  # swift/cli/sft.py, swift.cli._megatron.sft
        return ("megatron" if any("megatron" in part for part in parts) else "swift"), parts[-1]
    return "", ""


def _accepts(launch: Launch) -> bool:
    return _task(launch)[0] != ""


def _looks(sample: Sample) -> bool:
    return any(_accepts(command) for command in commands_of(sample))


def _read(path: Path, context: ReadContext) -> Job:
    found: list[Launch] = []

    def accepts(launch: Launch) -> bool:
        if _accepts(launch):
            found.append(launch)
        return _accepts(launch)

    source = trainer_source(path, context, accepts, "swift sft, swift rlhf or megatron sft")
    # A script may convert weights before it trains; the last command is the training.
    program, word = _task(found[-1])
    return _by_megatron(source, context, word) if program == "megatron" else _by_trainer(source, context, word)


def _by_trainer(source: Source, context: ReadContext, word: str) -> Job:
    """`swift sft | pt | rlhf`."""
    f, assumed = source.fields, list(source.assumed)
    if (named := str(f.raw("rlhf_type") or "")) or word == "rlhf":
        kind = named or "dpo"
        f.note_default("rlhf_type", kind, ROLLOUT if kind in ("grpo", "ppo", "gkd") else PAIRS)
    seq_len = _length(f, context, assumed)
    if not flag(f, "packing"):
        f.note_unpacked("packing", "false", seq_len)
    micro = context.micro_batch_size or f.integer("per_device_train_batch_size", 1)
    devices = context.devices or source.num_devices
    ways = f.integer("sequence_parallel_size", 1)
    steps = f.integer("gradient_accumulation_steps") if f.has("gradient_accumulation_steps") else None
    if steps is None:
        # ms-swift rounds 16 / (batch x ranks) up where it is left out.
        steps = max(1, math.ceil(16 / micro / max(1, (devices or 1) // ways)))
        assumed.append(f"gradient_accumulation_steps: {steps}, with which ms-swift brings a step to 16 sequences")
    model = _network(f, context, source.folder, assumed, word)
    training = Training(
        model=model,
        micro=micro,
        steps=steps,
        seq_len=seq_len,
        recompute=flag(f, "gradient_checkpointing", True),
        cp=ways,
        # sequence_parallel_size exchanges heads there, as Ulysses does.
        layout=Layout(context="ulysses"),
        precision=_precision(f, assumed),
        update=update_of(f, "optim", "adamw_torch", model),
        clip=f.number("max_grad_norm", 1.0) > 0,
    )
    return finished(source, context, training, NEUTRAL, INEXPRESSIBLE, assumed, SPELLED)


def _finetune_draft(request: ExportRequest) -> Draft:
    """A plan as a command of `swift sft`."""
    t = tuning(request, PROGRAM, axes=("pp", "ep", "etp", "tp"))
    values: dict[str, object] = {
        "model": t.model_id,
        "dataset": "your/dataset",
        "tuner_type": "full" if t.adapters is None else "lora",
        "torch_dtype": t.dtype,
        "bf16": t.half == "bf16",
        "fp16": t.half == "fp16",
        "max_length": t.seq_len,
        "packing": True,
        "gradient_checkpointing": t.recompute,
        **({"sequence_parallel_size": request.plan.mesh.cp} if request.plan.mesh.cp > 1 else {}),
    }
    if t.adapters is not None:
        values |= {"lora_rank": t.adapters.rank, "target_modules": t.targets or "all-linear"}
        values |= {"use_dora": True} if t.adapters.magnitudes else {}
        values |= {"quant_method": "bnb", "quant_bits": t.bits} if t.bits else {}
    values |= t.trainer()
    words = "".join(f" \\\n  --{key} {_word(value)}" for key, value in values.items())
    text = f"NNODES={request.num_nodes} NPROC_PER_NODE={request.processes_per_node} swift sft{words}\n"

    def read(context: ReadContext) -> Job:
        launch = next(one for one in launches(text, {}).launches if _accepts(one))
        fields = {name: plain(value) for name, value in dashed(launch.options[1:]).items()}
        source = Source(fields=Fields(fields, "<export>", context), folder=Path(), program="swift", num_devices=None)
        return _by_trainer(source, context, "sft")

    return drafted(request, t, text, read, program=PROGRAM, start="bash FILE")


def _word(value: object) -> str:
    """Writes a value as a shell takes it."""
    if isinstance(value, list):
        return " ".join(shlex.quote(str(one)) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    return shlex.quote(json.dumps(value) if isinstance(value, Mapping) else str(value))


PROGRAM = "ms-swift 3602360"


SPELLED = TrainerTerms(
    adapters=(("tuner_type", "lora"), ("lora_rank", 16), ("target_modules", "all-linear")),
    quantised=(("quant_method", "bnb"), ("quant_bits", 4)),
    deepspeed={
        (0, False, False): "zero0",
        (1, False, False): "zero1",
        (2, False, False): "zero2",
        (2, True, False): "zero2_offload",
        (3, False, False): "zero3",
        (3, True, True): "zero3_offload",
    },
    fsdp_host=fsdp_host,
    fsdp=(),
)
"""Its words for changes of `swift sft | pt | rlhf`."""


def _as_value(key: str, value: object) -> tuple[str, object]:
    """Megatron-LM's option as `megatron sft` takes it."""
    return key.replace("-", "_"), "true" if value is True else value


MEGATRON = renamed(_as_value, "flags")
"""Its words for changes of `megatron sft | pt | rlhf`."""


def _length(f: Fields, context: ReadContext, assumed: list[str]) -> int:
    """Tokens of a sequence by the file alone; `--seq-len` takes its place where the job is made (`trainers.job_of`)."""
    if f.has("max_length"):
        return f.integer("max_length")
    if context.seq_len is None:
        assumed.append("max_length is not given, so nothing cuts samples: priced as 2048 tokens (--seq-len)")
    return 2048


def _network(f: Fields, context: ReadContext, folder: Path, assumed: list[str], word: str) -> Network | str:
    key = next((key for key in ("model", "model_id_or_path", "model_type") if f.has(key)), "model")
    network = model_of(f, key, context, folder, assumed)
    # Names of three releases. `pt` is pretraining, where nobody wants adapters by default.
    tuner = str(f.raw("tuner_type") or f.raw("train_type") or f.raw("sft_type") or ("full" if word == "pt" else "lora"))
    f.ignore("tuner_type", "train_type", "sft_type", "lora_rank", "target_modules", "quant_bits", "lora_target_modules")
    if tuner not in TUNERS:
        f.fail("tuner_type", f"{tuner!r} is no way to train{nearest(tuner, TUNERS)}: {', '.join(TUNERS)}")
    if tuner == "full":
        return _in_part(f, network)
    bits = f.raw("quant_bits")
    if tuner not in ("lora", "longlora", "adalora", "qlora"):
        f.report("tuner_type", "adapters of another form; read as LoRA of the same rank")
    if bits not in (None, 0, 4, 8):
        f.report("quant_bits", "frozen weights are stored so; read in the compute dtype, so memory is too large")
    targets = names_of(f.raw("target_modules") or f.raw("lora_target_modules"))
    everything = tuple(target for target in targets if target not in ("all-linear", "ALL", "DEFAULT"))
    rank, four, eight = f.integer("lora_rank", 8), bits == 4, bits == 8
    return adapted(f, network, rank, everything, four_bits=four, eight_bits=eight, named="target_modules")


def _in_part(f: Fields, model: Network | str) -> Network | str:
    """The network but for what is frozen: names that begin so, that an expression is found in, or the first share of
    all parameters; names of `trainable_parameters` are trained whatever else says (swift/tuners/utils.py
    freeze_parameters, activate_parameters)."""
    frozen = [f"^{re.escape(name)}" for name in names_of(f.raw("freeze_parameters"))]
    trained = [f"^{re.escape(name)}" for name in names_of(f.raw("trainable_parameters"))]
    for key, patterns in (("freeze_parameters_regex", frozen), ("trainable_parameters_regex", trained)):
        patterns += [str(found)] if (found := f.raw(key)) else []
    if not 0 <= (ratio := f.number("freeze_parameters_ratio", 0.0)) <= 1:
        f.fail("freeze_parameters_ratio", f"{ratio} is no share of the parameters, from 0 to 1")
    if ratio:
        frozen += _first_share(network_graph(model), ratio)
    if not frozen:
        return model
    key = "freeze_parameters_ratio" if ratio else "freeze_parameters"
    return in_part(f, key, model, Trained(frozen=tuple(frozen), patterns=tuple(trained)))


def _first_share(graph: Graph, ratio: float) -> tuple[str, ...]:
    """Expressions of the first parameters, up to that share of all."""
    sizes = {
        layer.call.parameter_name(t.name, layer.index): int(numel(t.dims, {}))
        for layer in graph.layers()
        for t in graph.block(layer.call.block).parameters
    }
    names, chosen, count = [*sizes], set[str](), 0
    for name, size in sizes.items():
        count += size
        # As the program cuts: a parameter that crosses the share is trained.
        if count > ratio * sum(sizes.values()):
            break
        chosen.add(name)
    return layers_in_part(names, chosen)


TUNERS = """full lora qlora longlora adalora llamapro adapter vera boft fourierft reft bone lora_llm ia3 prompt
    freeze""".split()


def _precision(f: Fields, assumed: list[str]) -> Precision:
    """The model is loaded in torch_dtype (the config's own where it is left out) and computes in it; one in fp32 under
    bf16 or fp16 is cast by autocast."""
    named = f.raw("torch_dtype")
    if named is not None and named not in DTYPES:
        f.fail("torch_dtype", f"{named!r}; understood are {', '.join(DTYPES)}")
    if named is None:
        assumed.append("torch_dtype is the model's own: bfloat16 (--set torch_dtype=float16)")
    kind = DTYPES[str(named or "bfloat16")]
    bf16, fp16 = flag(f, "bf16"), flag(f, "fp16")
    if kind == "bf16":
        return BF16
    if kind == "fp16":
        return FP16
    return AUTOCAST if bf16 else replace(AUTOCAST, compute="fp16") if fp16 else in_tf32(f, FP32)


def _by_megatron(source: Source, context: ReadContext, word: str) -> Job:
    """`megatron sft | pt | rlhf`: the network is the hub's, the rest are Megatron-LM's options."""
    f, assumed = source.fields, list(source.assumed)
    if word == "rlhf":
        kind = str(f.raw("rlhf_type") or "dpo")
        f.note_default("rlhf_type", kind, ROLLOUT if kind in ("grpo", "gkd") else PAIRS)
    network = _megatron_network(f, context, source.folder, assumed)
    values = _megatron_values(f)
    length = context.seq_len
    if length is None and "seq_length" not in values:
        length = 2048
        assumed.append("max_length is not given, so nothing cuts samples: priced as 2048 tokens (--seq-len)")
    if not flag(f, "packing"):
        f.note_unpacked("packing", "false", length or int(str(values["seq_length"])))
    f.account(MEGATRON_NEUTRAL, INEXPRESSIBLE, ())
    fields = Fields(values, f.source, replace(context, settings={}))
    devices = context.devices or source.num_devices
    job_context = replace(context, devices=devices, model=network, seq_len=length, settings={})
    job = megatron_job(fields, context=job_context, name="swift-job", base=stack("megatron-lm"))
    return replace(
        job,
        notes=(*f.notes, *job.notes),
        unexpressed=(*f.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
        stated_devices=source.num_devices,
        terms=MEGATRON,
    )


def _megatron_network(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> Network:
    key = next((key for key in ("model", "load", "mcore_model", "ref_load") if f.has(key)), "model")
    name = f.peek(key)
    if context.model is None and isinstance(name, str):  # `Qwen3-30B-A3B-mcore` is the converted folder of a model
        values = Fields({key: name.rstrip("/").removesuffix("-mcore").removesuffix("-megatron")}, f.source, context)
        network = model_of(values, key, context, folder, assumed)
        f.ignore(key)
    else:
        network = model_of(f, key, context, folder, assumed)
    tuner = str(f.raw("tuner_type") or f.raw("train_type") or "full")
    if tuner.startswith("lora"):
        targets = tuple(t for t in names_of(f.raw("target_modules")) if t not in ("all-linear",))
        network = adapted(f, network, f.integer("lora_rank", 8), targets, four_bits=False, named="target_modules")
    f.ignore("tuner_type", "train_type", "lora_rank", "target_modules")
    if isinstance(network, str):
        return CONFIGS[network]() if network in CONFIGS else network_graph(network)
    return network


def _megatron_values(f: Fields) -> dict[str, object]:
    """Reads Megatron-LM's options: ms-swift's words for switches are `true` and `false`."""
    values = dict(MEGATRON_DEFAULTS)
    known = known_options()
    for key in f.names():
        name, value = MEGATRON_RENAMED.get(key, key), f.peek(key)
        if key in MEGATRON_SWITCHED_OFF:
            f.raw(key)
            values.pop(MEGATRON_SWITCHED_OFF[key], None)
            if value is False:
                values[MEGATRON_SWITCHED_OFF[key]] = True
        elif name in known and name not in ("model", "load", "lora_rank"):
            f.raw(key)
            if value is False or value == "none":
                values.pop(name, None)
            else:
                values[name] = value
    # Method and number go with full recomputation alone, and Megatron-LM refuses them beside selective.
    if values.get("recompute_granularity") != "full":
        values = {key: v for key, v in values.items() if key not in ("recompute_method", "recompute_num_layers")}
    # ms-swift takes the dtype of the checkpoint, which is bf16 for nearly all that are on the Hub.
    if "fp16" not in values:
        values["bf16"] = True
    if str(f.peek("torch_dtype")) == "float16":
        values = {key: v for key, v in values.items() if key != "bf16"} | {"fp16": True}
    if str(f.peek("torch_dtype")) == "float32":
        raise InputError(f"{f.source}: torch_dtype float32 under megatron sft is not read; leave it out, or bfloat16")
    return values


def _learnt(values: Mapping[str, object]) -> Learnt:
    """What the assistant says, unless loss_scale is `all`; by templates of its own, which write as models' own do."""
    return Learnt(learn="all" if values.get("loss_scale") == "all" else "answers")


FORMAT = Format(
    name="swift",
    program="modelscope/ms-swift 3602360",
    files="commands of `swift sft`, `swift rlhf` and `megatron sft`",
    looks=_looks,
    read=_read,
    finetune_draft=_finetune_draft,
    learnt=_learnt,
)

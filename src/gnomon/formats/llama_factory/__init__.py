"""LLaMA-Factory's YAML files, and its commands: `llamafactory-cli train`, and `train_bash.py` under any launcher.

What a key means was read from hiyouga/LLaMA-Factory (2026-08): src/llamafactory/hparams/{model,data,finetuning,
training}_args.py, src/llamafactory/model/{adapter,loader}.py. Leaves out the reward model, rollouts and reference model
of its later stages, which are listed, and mcore_adapter's models.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import nearest
from gnomon.formats.export import Draft, ExportRequest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext, network_graph
from gnomon.formats.job import Fields, Job, Unexpressed
from gnomon.formats.learnt import Learn, Learnt
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_source import Source, commands_of, given_flags, program_name, trainer_source
from gnomon.formats.trainer_terms import TrainerTerms
from gnomon.formats.trainer_words import flag, names_of, switched
from gnomon.formats.trainer_write import as_yaml, drafted, source_of, tuning
from gnomon.formats.trainers import AUTOCAST, BF16, FP16, Training, adapted, either_half, in_part, model_of
from gnomon.formats.training_arguments import INEXPRESSIBLE as TRAINER
from gnomon.formats.training_arguments import IRRELEVANT, finished
from gnomon.models.trained import Trained, parameter_names
from gnomon.plans import Precision
from gnomon.search.fit.ladder import LAST
from gnomon.search.fit.terms import Change, Setting
from gnomon.search.space.points import repeated_layers

NEUTRAL = IRRELEVANT | frozenset(
    """
    template overwrite_cache plot_loss max_samples ddp_timeout preprocessing_num_workers lora_alpha lora_dropout
    loraplus_lr_ratio pissa_* badam_* image_* video_* media_dir mix_strategy interleave_probs tokenized_path
    train_on_prompt mask_history buffer_size streaming max_new_tokens top_* temperature do_sample infer_* flash_attn
    rope_scaling resize_vocab create_new_adapter double_quantization quantization_method pref_beta
    pref_loss kto_* ref_model* reward_model* use_swanlab swanlab* ray_* resources_per_worker placement_strategy
    cache_dir use_fast_tokenizer new_special_tokens compute_accuracy enable_thinking neat_packing_* audio_*
    max_grad_norm quantization_type adapter_name_or_path export_* val_size freeze_vision_tower
    freeze_multi_modal_projector
    """.split()
)

INEXPRESSIBLE = {
    **TRAINER,
    "use_kt": "KTransformers: experts are computed on the host, which no plan says; far too fast here",
    "kt_*": "KTransformers: experts on the host",
    "use_badam": "one block is updated at a time; read as all, so memory is too large",
    "use_adam_mini": "fewer second moments; memory is too large here",
    "use_muon": "another update; priced as AdamW",
    "use_llama_pro": "layers are added",
    "mixture_of_depths": "layers skip tokens",
    "use_rslora": "another scale",
    "shift_attn": "shifted sparse attention",
    "fp8*": "eight-bit products; read as bf16, so too slow",
    "neat_packing": "no attention between packed samples: less work than a full sequence",
    "oft_*": "orthogonal adapters; read as LoRA of rank 8",
    "use_v1_kernels": "kernels of its own",
}

STAGES = {
    "dpo": "pairs of answers, and a reference model that is run forward: neither is priced",
    "kto": "a reference model is run forward, which is not priced",
    "ppo": "generation, reward and value models are not priced",
    "rm": "pairs of answers, scored: priced as one sequence with a language model's loss",
}

BITS = {"bnb": (4, 8), "bitsandbytes": (4, 8), "hqq": (1, 2, 3, 4, 5, 6, 8), "eetq": (8,)}
"""quantization_method -> its quantization_bit (src/llamafactory/model/model_utils/quantization.py)."""

TYPES = ("lora", "oft", "freeze", "full")

# mcore_adapter's axes: with one above 1 Megatron-Core builds the job, and `read_fields` refuses it with what to do.
CORE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")


PROGRAMS = frozenset("llamafactory-cli lmf train_bash llamafactory".split())
"""Programs of LLaMA-Factory; `train.py` is one where its flags are."""

OWN_FLAGS = ("finetuning_type", "cutoff_len", "stage", "dataset_dir")


def _accepts(launch: Launch) -> bool:
    name = program_name(launch.program)
    own = name in PROGRAMS or "llamafactory" in launch.program or "LLaMA-Factory" in launch.program
    return own or name in ("train", "launcher") and given_flags(launch, OWN_FLAGS)


def _looks(sample: Sample) -> bool:
    if not sample.values:
        return any(_accepts(command) for command in commands_of(sample))
    return "model_name_or_path" in sample.values and (
        sample.has("finetuning_type") or sample.has("template", "stage") or sample.has("cutoff_len", "stage")
    )


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> tuple[Network | str, bool]:
    """(network, whether it is trained whole)."""
    model = model_of(f, "model_name_or_path", context, folder, assumed)
    kind = str(f.raw("finetuning_type") or "lora")
    if kind not in TYPES:
        f.fail("finetuning_type", f"{kind!r} is no way to fine-tune{nearest(kind, TYPES)}: {', '.join(TYPES)}")
    bits = f.raw("quantization_bit")
    f.ignore("quantization_bit", "lora_rank", "lora_target")
    if kind in ("full", "freeze"):
        for key in ("lora_rank", "lora_target", "additional_target"):
            f.report(key, f"finetuning_type: {kind} trains no adapters")
    if bits is not None and bits not in BITS.get(str(f.raw("quantization_method") or "bnb"), BITS["hqq"]):
        f.fail("quantization_bit", f"{bits!r}: bitsandbytes stores 4 or 8 bits, hqq 1 to 8, eetq 8")
    if bits is not None and kind in ("full", "freeze"):
        f.fail("quantization_bit", f"a quantised network is trained by adapters only, not with finetuning_type: {kind}")
    if kind == "full":
        return model, True
    if kind == "freeze":
        return _some_layers(f, model), True
    if bits not in (None, 4, 8):
        f.report("quantization_bit", "frozen weights are stored so; read in the compute dtype, so memory is too large")
    targets = names_of(f.raw("lora_target") or "all")
    rank = f.integer("lora_rank", 8)
    everything = () if "all" in targets else targets
    four, eight = bits == 4, bits == 8
    return adapted(f, model, rank, everything, four_bits=four, eight_bits=eight, named="lora_target"), False


def _some_layers(f: Fields, model: Network | str) -> Network | str:
    """The network of which its last layers (its first ones, by a negative number) are trained, whole or in some
    modules, and what `freeze_extra_modules` names beside them (src/llamafactory/model/adapter.py
    _setup_freeze_tuning)."""
    graph = network_graph(model)
    last, count = f.integer("freeze_trainable_layers", 2), repeated_layers(graph)[1]
    names = parameter_names(graph)
    numbers = range(max(0, count - last), count) if last > 0 else range(min(-last, count))
    if not numbers:
        f.fail(
            "freeze_trainable_layers",
            "no layer is trained; give how many last ones are, or below 0 how many first ones",
        )
    modules = names_of(f.raw("freeze_trainable_modules") or "all")
    inside = {found[1] for name in names if (found := re.search(r"\.\d+\.(\w+)", name))}
    outside = {name.split(".")[-2] for name in names if not re.search(r"\.\d+\.", name)}
    extra = names_of(f.raw("freeze_extra_modules"))
    for key, layer_names, known in (
        ("freeze_trainable_modules", modules, {*inside, "all"}),
        ("freeze_extra_modules", extra, outside),
    ):
        if wrong := [name for name in layer_names if name not in known]:
            f.fail(key, f"no module has the name {wrong[0]!r}{nearest(wrong[0], known)}: {', '.join(sorted(known))}")
    which = "" if "all" in modules else f"({'|'.join(modules)})"
    chosen = rf"\.({'|'.join(map(str, numbers))})\.{which}"
    return in_part(f, "finetuning_type", model, Trained(patterns=(chosen, *extra)))


def _precision(f: Fields, whole: bool) -> Precision:
    """The model is loaded in bf16 or fp16; whole models widen their parameters to fp32 unless pure_bf16."""
    bf16 = flag(f, "bf16") or flag(f, "accelerate_bf16")
    fp16 = flag(f, "fp16") or flag(f, "accelerate_fp16")
    either_half(f, bf16, fp16)
    pure = flag(f, "pure_bf16")
    if not whole or pure:
        return BF16
    return FP16 if fp16 and not bf16 else AUTOCAST


def _read(path: Path, context: ReadContext) -> Job:
    # OmegaConf reads it, which refuses a key that is given twice
    return read_fields(trainer_source(path, context, _accepts, "--model_name_or_path", by_pyyaml=False), context)


def read_fields(source: Source, context: ReadContext) -> Job:
    """The job of fields that are read."""
    f, assumed = source.fields, list(source.assumed)
    if core := [key for key in CORE if isinstance(f.peek(key), int) and f.peek(key) != 1]:
        f.fail(
            core[0],
            "mcore_adapter builds this job with Megatron-Core; give its options to Megatron-LM's reader: --from "
            "megatron FILE, with --tensor-model-parallel-size and so on in it",
        )
    model, whole = _model(f, context, source.folder, assumed)
    if (stage := str(f.raw("stage") or "sft")) not in (*STAGES, "sft", "pt"):
        f.fail("stage", f"{stage!r} is no stage{nearest(stage, (*STAGES, 'sft', 'pt'))}: pt, sft, {', '.join(STAGES)}")
    if stage in STAGES:
        f.report("stage", STAGES[stage])
    seq_len = f.integer("cutoff_len", 2048)
    if not flag(f, "packing", stage == "pt"):
        f.note_unpacked("packing", "false", seq_len)
    off = flag(f, "disable_gradient_checkpointing")
    f.ignore("gradient_checkpointing")
    training = Training(
        model=model,
        micro=f.integer("per_device_train_batch_size", 8),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=seq_len,
        recompute=not off,
        activations_away=flag(f, "use_unsloth_gc") and not off,
        precision=_precision(f, whole),
        update=update_of(f, "optim", "adamw_torch", model),
        clip=f.number("max_grad_norm", 1.0) > 0,
    )
    f.ignore(*CORE)
    pure = flag(f, "pure_bf16")
    spelled = replace(SPELLED, beside_zero_3=(("pure_bf16", False),)) if pure else SPELLED
    job = finished(source, context, training, NEUTRAL, INEXPRESSIBLE, assumed, spelled)
    if f.peek("deepspeed") is None and not any(key.startswith("deepspeed.") for key in f.names()):
        return job
    if job.plan.optimizer.zero == 3 and flag(f, "use_unsloth"):
        f.fail("use_unsloth", "it is refused under DeepSpeed's ZeRO 3; take ds_z2_config.json, or leave it out")
    if job.plan.optimizer.zero == 3 and pure:
        why = "LLaMA-Factory refuses it under DeepSpeed's ZeRO 3; read as with bf16: true"
        return replace(job, unexpressed=(*job.unexpressed, Unexpressed(field="pure_bf16", value="true", why=why)))
    return job


def _low_rank_terms(change: Change) -> list[Setting] | None:
    """Settings that write `optimizer.low_rank`: LLaMA-Factory's own switches; None for what it has no switch for."""
    low, narrow = change.after.optimizer.low_rank, change.after.precision.states == "int8"
    if low is None or (narrow and low.method == "apollo"):
        return None
    return [
        *([("optim", "adamw_bnb_8bit")] if narrow else []),
        (f"use_{low.method}", True),
        (f"{low.method}_target", "all"),
        (f"{low.method}_rank", low.rank),
        (f"{low.method}_update_interval", low.every),
    ]


SPELLED = TrainerTerms(
    adapters=(("finetuning_type", "lora"), ("lora_rank", 16), ("lora_target", "all")),
    quantised=(("quantization_bit", 4),),
    recompute=("disable_gradient_checkpointing", False),
    chunked_loss=(("enable_liger_kernel", True),),
    low_rank=_low_rank_terms,
    further={"some_layers": lambda change: [("finetuning_type", "freeze"), ("freeze_trainable_layers", LAST)]},
    deepspeed={
        (0, False, False): "examples/deepspeed/ds_z0_config.json",
        (2, False, False): "examples/deepspeed/ds_z2_config.json",
        (2, True, False): "examples/deepspeed/ds_z2_offload_config.json",
        (3, False, False): "examples/deepspeed/ds_z3_config.json",
        (3, True, True): "examples/deepspeed/ds_z3_offload_config.json",
    },
    away=(("use_unsloth_gc", True),),
    fsdp_host=lambda change: (("", "in the accelerate config: fsdp_offload_params: true"),),
    fsdp=(),
)
"""Its words for changes."""


def _finetune_draft(request: ExportRequest) -> Draft:
    """A plan as its YAML."""
    t = tuning(request, PROGRAM)
    values: dict[str, object] = {
        "model_name_or_path": t.model_id,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full" if t.adapters is None else "lora",
        "template": "default",
        "dataset": "your_dataset",
        "cutoff_len": t.seq_len,
        "packing": True,
        "disable_gradient_checkpointing": not t.recompute,
        **({"use_unsloth_gc": True} if t.away and t.recompute else {}),
        "bf16": t.half == "bf16",
        "fp16": t.half == "fp16",
    }
    if t.adapters is not None:
        values |= {"lora_rank": t.adapters.rank, "lora_target": ",".join(t.targets) or "all"}
        values |= {"use_dora": True} if t.adapters.magnitudes else {}
        values |= {"quantization_bit": t.bits, "quantization_method": "bnb"} if t.bits else {}
    elif t.pure and (t.deepspeed is None or request.plan.optimizer.zero < 3):  # refused under ZeRO 3
        values["pure_bf16"] = True
    trainer = t.trainer()
    if trainer.pop("use_liger_kernel", False):
        values["enable_liger_kernel"] = True
    text = as_yaml(values | trainer)
    start = f"FORCE_TORCHRUN=1 NPROC_PER_NODE={request.processes_per_node} llamafactory-cli train FILE"

    def read(context: ReadContext) -> Job:
        return read_fields(source_of(text, context), context)

    return drafted(request, t, text, read, program=PROGRAM, start=start)


PROGRAM = "LLaMA-Factory (2026-08)"


TEMPLATES = {"qwen3_nothink": "chatml", "qwen3_vl_nothink": "chatml", "yi": "chatml", "qwen2": "qwen"}
"""Names of templates that write as another's do."""


def _learnt(values: Mapping[str, object]) -> Learnt:
    """What the assistant says with the end of its turn, of every turn, written by a template of its own."""
    learn: Learn = "all" if switched(values, "train_on_prompt") else "answers"
    lines = ["mask_history: all answers are learnt, not the last alone"] if switched(values, "mask_history") else []
    name = str(values.get("template") or "")
    file = Path(__file__).parent / "templates" / f"{TEMPLATES.get(name, name)}.jinja"
    there = bool(re.fullmatch(r"\w+", name)) and file.is_file()
    if name and not there:
        lines.append(f"template = {name}: conversations are written by the tokenizer's chat template (--chat-template)")
    return Learnt(learn=learn, template=file if there else None, differences=tuple(lines))


FORMAT = Format(
    name="llama-factory",
    program="hiyouga/LLaMA-Factory 2026-08",
    files="YAML of `llamafactory-cli train`, or the command itself",
    looks=_looks,
    read=_read,
    finetune_draft=_finetune_draft,
    learnt=_learnt,
)

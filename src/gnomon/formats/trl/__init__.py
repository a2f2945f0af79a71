"""TRL's YAML files and commands, and those of alignment-handbook and open-r1.

What a key means was read from huggingface/trl (2026-08) trl/trainer/{base,model,sft,dpo,grpo}_config.py,
huggingface/alignment-handbook and huggingface/open-r1 src/. Sharding is the launcher's (`accelerate launch`): a YAML
file does not say it, a command does. Leaves out generation, rewards and reference models, which are listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import nearest
from gnomon.formats.export import Draft, ExportRequest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job
from gnomon.formats.learnt import Learnt
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_source import Source, commands_of, program_name, trainer_source
from gnomon.formats.trainer_terms import HUGGING_FACE
from gnomon.formats.trainer_words import flag, names_of, switched
from gnomon.formats.trainer_write import as_yaml, drafted, source_of, tuning
from gnomon.formats.trainers import LIGER, Training, adapted, model_of, usual_targets, whole_in_bits
from gnomon.formats.training_arguments import INEXPRESSIBLE as TRAINER
from gnomon.formats.training_arguments import IRRELEVANT, finished, precision_of

NEUTRAL = IRRELEVANT | frozenset(
    """
    torch_dtype dtype lora_alpha lora_dropout lora_task_type max_grad_norm beta loss_type reward_*
    num_train_epochs temperature top_* code_* benchmarks callbacks system_prompt hub* format_reward* wandb* cosine_*
    repetition_* parallel_code_* e2b_* morph_* dataset_* dataset_mixer* dataset_splits* padding_free_* eos_token
    bnb_4bit_* use_bnb_nested_quant unsloth_tiled_mlp log_completions log_unique_prompts num_completions_to_print
    max_prompt_length mask_truncated_completions scale_rewards prompt_column epsilon* min_p repetition_penalty vllm_*
    truncation_mode precompute_ref_* sync_ref_model ref_model_* model_adapter_name ref_adapter_name
    """.split()
)

INEXPRESSIBLE = {
    **TRAINER,
    "padding_free": "no padding: less work than full sequences (--lengths gives those of a step)",
    "use_vllm": "generation, which is not priced",
    "num_generations": "generation is not priced; its answers are sequences of the batch",
}

ROLLOUT = "reinforcement learning: generation, rewards and the reference model are not priced, only the update"
PAIRS = "preference learning: two answers a sample and a reference model run forward are not priced"


REWARD = "two answers a sample, scored by a head of one output: priced as one sequence with a language model's loss"

WHOLE_LOGITS = (
    "logits are taken to be whole, as before release 1.7, from which on SFTTrainer computes loss and metrics with the "
    "head part by part on a GPU: memory is too large then (--set loss_type=chunked_nll, or use_liger_kernel=true)"
)

TILED = ("chunked_nll",)
"""Kinds of SFT's loss that are computed with the head, so that logits are never whole."""
SFT_LOSSES = ("nll", "dft", *TILED)
OTHER_LOSSES = """
    sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_unpaired aot_pair apo_zero apo_down discopop
    sft sigmoid_norm kto apo_zero_unpaired simpo alphapo bco grpo dr_grpo dapo bnpo cispo sapo luspo vespo orpo kto_pair
    """.split()
"""Those of preference and reinforcement learning."""

PROGRAMS = frozenset(
    """
    sft sft_gpt_oss sft_vlm sft_trl run_sft dpo dpo_vlm run_dpo grpo grpo_vlm run_grpo kto run_kto orpo run_orpo cpo
    reward reward_modeling rloo gkd online_dpo nash_md xpo prm ppo run_cpt bco
    """.split()
)
"""Names of scripts of TRL, alignment-handbook and open-r1, and of `trl`'s own words."""

LEARNING = ("grpo", "rloo", "online_dpo", "ppo", "xpo", "nash_md", "gkd")
PREFERENCE = ("dpo", "kto", "orpo", "cpo", "bco")


def _accepts(launch: Launch) -> bool:
    return bool(_task(launch)) and any(word.startswith("--") for word in launch.options)


def _task(launch: Launch) -> str:
    """Name of TRL's script that a command starts; empty where it starts another."""
    name = program_name(launch.program)
    if launch.program.startswith(("swift.", "verl.", "openrlhf.")) or "swift/" in launch.program:
        return ""  # scripts of the same names
    if name == "trl":
        return launch.options[0] if launch.options else ""
    return name if name in PROGRAMS else ""


def _looks(sample: Sample) -> bool:
    trainer = any(sample.has(key) for key in ("per_device_train_batch_size", "max_seq_length", "max_length"))
    others = any(sample.has(key) for key in ("finetuning_type", "stage", "lora_rank", "train_file"))
    if sample.values:
        return sample.has("model_name_or_path") and trainer and not others
    return any(_accepts(command) for command in commands_of(sample))


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> Network | str:
    model = model_of(f, "model_name_or_path", context, folder, assumed)
    four, eight = flag(f, "load_in_4bit"), flag(f, "load_in_8bit")
    rank, targets = f.integer("lora_r", 16), names_of(f.raw("lora_target_modules"))
    if not flag(f, "use_peft"):
        for key in ("lora_r", "lora_target_modules", "lora_modules_to_save"):
            f.report(key, "without use_peft: true no adapters are trained")
        whole_in_bits(f, "load_in_4bit", "load_in_8bit")
        return model
    everything = () if "all-linear" in targets else targets or usual_targets(model)
    return adapted(f, model, rank, everything, four_bits=four, eight_bits=eight, named="lora_target_modules")


def _length(f: Fields, context: ReadContext, assumed: list[str]) -> int:
    """Reads max_length or max_seq_length; prompt and answer of a rollout."""
    both = [f.peek(key) for key in ("max_seq_length", "max_length")]
    if None not in both and both[0] != both[1]:
        f.fail("max_length", f"it says {both[1]} tokens and max_seq_length {both[0]}; keep one of both")
    for key in ("max_seq_length", "max_length"):
        if f.has(key):
            f.ignore("max_seq_length", "max_length")
            return f.integer(key)
    if f.has("max_completion_length") or f.has("num_generations"):
        return f.integer("max_prompt_length", 512) + f.integer("max_completion_length", 256)
    if context.seq_len is None:
        assumed.append("the file does not say the sequence length: 1024 tokens, TRL's default (--seq-len)")
    return 1024


def _read(path: Path, context: ReadContext) -> Job:
    source = trainer_source(path, context, _accepts, "--model_name_or_path")
    return read_fields(source, program_name(source.program) if source.program else path.stem.lower(), context)


def read_fields(source: Source, name: str, context: ReadContext) -> Job:
    """The job of fields that are read. name: of the script, which says what is learned."""
    f, assumed = source.fields, list(source.assumed)
    seq_len = _length(f, context, assumed)
    loaded = f.raw("torch_dtype") or f.raw("dtype")
    asked_loss = f.peek("loss_type")
    if isinstance(asked_loss, str) and asked_loss not in (*SFT_LOSSES, *OTHER_LOSSES):
        f.fail("loss_type", f"{asked_loss!r} is no loss of TRL{nearest(asked_loss, (*SFT_LOSSES, *OTHER_LOSSES))}")
    if f.has("num_generations") or f.has("reward_funcs") or f.has("max_completion_length") or name in LEARNING:
        f.note_default("reward_funcs", str(f.peek("reward_funcs")), ROLLOUT)
    elif "reward" in name or name == "prm":
        f.note_default("script", name, REWARD)
    elif f.has("beta") or f.peek("loss_type") not in (None, *SFT_LOSSES) or any(kind in name for kind in PREFERENCE):
        f.note_default("beta", str(f.peek("beta")), PAIRS)
    else:
        if not flag(f, "packing"):
            f.note_unpacked("packing", "false", seq_len)
        if not any(flag(f, key) for key in LIGER) and f.peek("loss_type") not in TILED:
            f.note_default("loss_type", str(f.peek("loss_type") or "nll"), WHOLE_LOGITS)
    f.ignore("packing", "max_completion_length")
    started = bool(source.program)  # a YAML file may be an older version's, whose defaults were transformers'
    recompute = flag(f, "gradient_checkpointing", started)
    if started and f.peek("gradient_checkpointing") is None:
        assumed.append("gradient_checkpointing is on, TRL's default (--set gradient_checkpointing=false)")
    half = started and not flag(f, "fp16") and f.peek("bf16") is None
    model = _model(f, context, source.folder, assumed)
    training = Training(
        model=model,
        micro=f.integer("per_device_train_batch_size", 8),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=seq_len,
        recompute=recompute,
        activations_away=flag(f, "activation_offloading"),
        precision=precision_of(f, loaded=None if loaded is None else str(loaded), default="bf16" if half else "no"),
        update=update_of(f, "optim", "adamw_torch", model),
        clip=f.number("max_grad_norm", 1.0) > 0,
    )
    job = finished(source, context, training, NEUTRAL, INEXPRESSIBLE, assumed, SPELLED)
    if f.has("num_generations") and (total := job.workload.batch_size) % (asks := f.integer("num_generations", 8)):
        f.fail("num_generations", f"a step's {total} answers are no whole number of prompts with {asks} answers each")
    return job


SPELLED = replace(
    HUGGING_FACE,
    away=(("activation_offloading", True),),
    all_away=True,
    adapters=(("use_peft", True), ("lora_r", 16), ("lora_target_modules", "all-linear")),
    quantised=(("load_in_4bit", True),),
)
"""Its words for changes."""


def _finetune_draft(request: ExportRequest) -> Draft:
    """A plan as the YAML of `trl sft --config`, with PEFT's adapters."""
    t = tuning(request, PROGRAM)
    values: dict[str, object] = {
        "model_name_or_path": t.model_id,
        "dataset_name": "your/dataset",
        "torch_dtype": t.dtype,
        "bf16": t.half == "bf16",
        "fp16": t.half == "fp16",
        "max_length": t.seq_len,
        "packing": True,
        "gradient_checkpointing": t.recompute,
        **({"activation_offloading": True} if t.away else {}),
    }
    if t.adapters is not None:
        values |= {"use_peft": True, "lora_r": t.adapters.rank, "lora_target_modules": t.targets or "all-linear"}
        values |= {f"load_in_{t.bits}bit": True} if t.bits else {}
        values |= {"use_dora": True} if t.adapters.magnitudes else {}
    trainer = t.trainer()
    if t.loss == "chunked" and not t.fused:
        trainer = {name: value for name, value in trainer.items() if "liger" not in name} | {"loss_type": TILED[0]}
    text = as_yaml(values | trainer)
    start = f"accelerate launch --num_processes {request.plan.mesh.world_size} -m trl sft --config FILE"

    def read(context: ReadContext) -> Job:
        return read_fields(source_of(text, context), "sft", context)

    return drafted(request, t, text, read, program=PROGRAM, start=start)


PROGRAM = "TRL (2026-08)"


def _learnt(values: Mapping[str, object]) -> Learnt:
    """All of a conversation, unless told otherwise, and of a prompt with a completion the latter (trl 1.16
    trainer/sft_trainer.py)."""
    if switched(values, "assistant_only_loss"):
        return Learnt(learn="answers")
    return Learnt(learn="all" if values.get("completion_only_loss") in (False, "false") else "completions")


FORMAT = Format(
    name="trl",
    program="huggingface/trl, alignment-handbook, open-r1 (2026-08)",
    files="YAML of TRL's scripts, and the commands that start them",
    looks=_looks,
    read=_read,
    finetune_draft=_finetune_draft,
    learnt=_learnt,
)

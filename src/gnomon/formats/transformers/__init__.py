"""Commands of scripts that parse transformers' TrainingArguments: run_clm.py, run_mlm.py, FastChat's, own ones.

What a flag means was read from huggingface/transformers v5.23 src/transformers/training_args.py and
examples/pytorch/language-modeling/run_clm.py; sequence lengths by the names that such scripts give them. Sharding is
the launcher's or that of `--fsdp` and `--deepspeed`. Leaves out what a script does beside Trainer, and programs with
readers of their own (TRL, LLaMA-Factory, ms-swift).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.diffusion import diffusion_script
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job
from gnomon.formats.llama_factory import FORMAT as LLAMA_FACTORY
from gnomon.formats.shell import Launch
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_source import Source, commands_of, given_flags, program_name, trainer_source
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainers import Training, adapted, model_of, usual_targets
from gnomon.formats.training_arguments import INEXPRESSIBLE as TRAINER
from gnomon.formats.training_arguments import IRRELEVANT, finished, precision_of
from gnomon.formats.trl import FORMAT as TRL

NEUTRAL = IRRELEVANT | frozenset(
    """
    torch_dtype dtype lora_alpha lora_dropout lora_bias prompt_template* validation* source_prefix ignore_pad*
    num_beams predict_with_generate pad_to_max_length text_column* summary_column* lang forced_bos_token
    mlm_probability conv* version vision_tower mm_* image_* freeze_backbone tune_mm* lr warmup model_type
    config_overrides instruction_template report group_by_modality_length double_quant quant_type
    """.split()
)

INEXPRESSIBLE = {
    **TRAINER,
    "freeze_backbone": "part of the network is frozen; read as all trained, so too slow and too large",
}

FLAGS = ("per_device_train_batch_size", "gradient_accumulation_steps", "output_dir")
"""Flags of TrainingArguments; a command with two of them is such a script's."""

LENGTHS = ("block_size", "model_max_length", "max_seq_length", "max_seq_len", "max_length", "cutoff_len")
"""Names of a sequence's length, in the order in which one is taken for it."""

PARTS = (("max_source_length", 1024), ("max_target_length", 128))
"""Lengths of run_summarization.py and run_translation.py, with their defaults."""

OTHERS = ("openrlhf", "verl", "swift", "megatron", "axolotl")
"""Programs with flags of this kind that have readers of their own."""


def _accepts(launch: Launch) -> bool:
    if any(name in launch.program.lower() for name in OTHERS) or given_flags(launch, ("tensor_model_parallel_size",)):
        return False
    if diffusion_script(launch):
        return False
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in launch.options if word.startswith("--")}
    return len(named & set(FLAGS)) >= 2 or "per_device_train_batch_size" in named


def _looks(sample: Sample) -> bool:
    """A command with its flags, or the mapping that HfArgumentParser takes in their place, of no program with a reader
    of its own."""
    file = sample.has("model_name_or_path", "per_device_train_batch_size")
    if not file and not any(_accepts(command) for command in commands_of(sample)):
        return False
    return not (LLAMA_FACTORY.looks(sample) or TRL.looks(sample))


def _length(f: Fields, context: ReadContext, program: str, assumed: list[str]) -> int:
    for key in LENGTHS:
        if f.has(key):
            f.ignore(*LENGTHS)
            return f.integer(key)
    if any(f.has(key) for key, _ in PARTS):
        return sum(f.integer(key, default) for key, default in PARTS)
    if context.seq_len is None:
        assumed.append(f"the command does not say the sequence length: 1024 tokens, as {program} takes (--seq-len)")
    return 1024


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> Network | str:
    key = "model_name_or_path" if f.has("model_name_or_path") or not f.has("config_name") else "config_name"
    network = model_of(f, key, context, folder, assumed)
    rank = f.integer("lora_r", f.integer("lora_rank", 0, least=0), least=0)
    bits = f.integer("bits", 16)
    if bits not in (4, 8, 16, 32):
        f.fail("bits", f"{bits} bits: a frozen network is stored in 4 or 8, one that is not quantised in 16 or 32")
    four = flag(f, "load_in_4bit") or flag(f, "q_lora") or flag(f, "use_qlora") or bits == 4
    on = flag(f, "use_lora") or flag(f, "use_peft") or flag(f, "use_peft_lora") or flag(f, "lora_enable")
    targets = names_of(f.raw("lora_target_modules"))
    eight = flag(f, "load_in_8bit") or bits == 8
    if not (on or rank or four or eight):
        return network
    everything = () if "all-linear" in targets else targets or usual_targets(network)
    return adapted(f, network, rank or 8, everything, four_bits=four, eight_bits=eight, named="lora_target_modules")


def _read(path: Path, context: ReadContext) -> Job:
    return read_fields(trainer_source(path, context, _accepts, "--per_device_train_batch_size"), context)


def read_fields(source: Source, context: ReadContext) -> Job:
    """The job of fields that are read."""
    f, assumed = source.fields, list(source.assumed)
    program = program_name(source.program)
    seq_len = _length(f, context, program, assumed)
    if program != "run_clm" and not flag(f, "packing"):  # run_clm.py cuts the joined text into blocks
        f.note_unpacked("packing", "false", seq_len)
    f.ignore("packing")
    loaded = f.raw("torch_dtype") or f.raw("dtype")
    model = _model(f, context, source.folder, assumed)
    training = Training(
        model=model,
        micro=f.integer("per_device_train_batch_size", 8),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=seq_len,
        recompute=flag(f, "gradient_checkpointing"),
        precision=precision_of(f, loaded=None if loaded is None else str(loaded)),
        update=update_of(f, "optim", "adamw_torch", model),
        clip=f.number("max_grad_norm", 1.0) > 0,
    )
    return finished(source, context, training, NEUTRAL, INEXPRESSIBLE, assumed)


FORMAT = Format(
    name="transformers",
    program="huggingface/transformers v5.23 (Trainer)",
    files="commands of run_clm.py and other scripts that parse TrainingArguments",
    looks=_looks,
    read=_read,
)

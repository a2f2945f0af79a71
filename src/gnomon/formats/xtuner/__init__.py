"""xtuner's Python files (its 0.1 series), read and never run.

What a name means was read from InternLM/xtuner (2026-08): xtuner/configs/, xtuner/model/sft.py, xtuner/tools/train.py.
DeepSpeed is an option of its command line (`--deepspeed deepspeed_zero2`), so not in the file. Leaves out multimodal
training and preference learning, which are listed.
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.python_values import module_values
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainers import AUTOCAST, BF16, FP16, Training, adapted, by_deepspeed, job_of, model_of

IRRELEVANT = frozenset(
    """
    alpaca* *_path *dataset* data_* lr betas weight_decay max_epochs warmup_ratio save_* evaluation_* SYSTEM tokenizer*
    train_cfg* param_scheduler* custom_hooks* default_hooks* env_cfg* visualizer* log_* load_from resume randomness*
    prompt_template dataloader_num_workers train_dataloader* optim_wrapper* model.type model.use_varlen_attn sampler*
    model.llm.type model.llm.trust_remote_code model.llm.pretrained_model_name_or_path model.lora.type
    model.lora.lora_alpha model.lora.lora_dropout model.lora.bias model.lora.task_type default_scope launcher
    model.llm.quantization_config.bnb_4bit_* model.llm.quantization_config.llm_int8_* model.llm.quantization_config.type
    call() arguments() *.call() *.arguments() pack_to_max_length val_* test_* train_image* image_* loss_* oasst* openai*
    reward_* num_workers seed alpaca_en* tot_* prefetch cpu_count
    """.split()
)

INEXPRESSIBLE = {
    "visual_encoder*": "images are encoded, which is left out",
    "model.visual_encoder*": "images are encoded, which is left out",
    "model.ref_llm*": "a reference model is run forward, which is not priced",
    "dpo_*": "pairs of answers and a reference model are not priced",
    "use_varlen_attn": "no attention between packed samples: less work than a full sequence",
    "sequence_parallel_size": "the sequence is divided between ranks",
    "strategy*": "another strategy of MMEngine",
}


def _looks(sample: Sample) -> bool:
    return sample.path.suffix == ".py" and "xtuner" in sample.text and "accumulative_counts" in sample.text


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> tuple[Network | str, bool]:
    """(network, whether it has adapters)."""
    named = next(
        (k for k in ("pretrained_model_name_or_path", "llm_name_or_path", "path") if f.has(k)), "llm_name_or_path"
    )
    model = model_of(f, named, context, folder, assumed)
    if not any(key.startswith("model.lora.") for key in f.names()):
        return model, False
    targets = names_of(f.raw("model.lora.target_modules"))
    four = flag(f, "model.llm.quantization_config.load_in_4bit")
    f.ignore("model.llm.quantization_config.load_in_8bit")
    rank = f.integer("model.lora.r", 8)
    return adapted(f, model, rank, targets, four_bits=four, named="model.lora.target_modules"), True


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    values = {key: value for key, value in flatten(module_values(text, file)).items() if value is not None}
    f = Fields(values, file, context)
    folder, assumed = path.resolve().parent, list[str]()
    model, tuned = _model(f, context, folder, assumed)
    loaded = str(f.raw("model.llm.torch_dtype") or "")
    half = str(f.raw("optim_wrapper.dtype") or "float16")
    precision = BF16 if "bfloat16" in loaded or tuned else FP16 if half == "float16" else AUTOCAST
    seq_len = f.integer("max_length", 2048)
    if not flag(f, "pack_to_max_length"):
        f.note_unpacked("pack_to_max_length", "False", seq_len)
    parallel = f.integer("sequence_parallel_size", 1)
    training = Training(
        model=model,
        micro=f.integer("batch_size", 1) * parallel,
        steps=max(1, f.integer("accumulative_counts", 1) // parallel),
        seq_len=seq_len,
        cp=parallel,
        recompute=True,  # SupervisedFinetune(use_activation_checkpointing=True)
        precision=precision,
        update=update_of(f, "optim_type", "AdamW"),
        clip=f.raw("max_norm") is not None,
    )
    by_file = f.peek("deepspeed") or None
    f.ignore("deepspeed")
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    if by_file is not None:
        return by_deepspeed(f, context, training, "deepspeed", folder, assumed)
    assumed.append("DeepSpeed is an option of its command line: replicas (--set deepspeed=zero2)")
    return job_of(f, context, training, assumed)


FORMAT = Format(
    name="xtuner", program="InternLM/xtuner 0.1", files="Python of `xtuner train`", looks=_looks, read=_read
)

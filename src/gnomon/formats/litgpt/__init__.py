"""litgpt's YAML files (config_hub) for pretraining and fine-tuning.

What a key means was read from Lightning-AI/litgpt at commit 26857050fe3f (2026-08): litgpt/{pretrain,config}.py,
litgpt/finetune/{full,lora}.py, litgpt/args.py. Leaves out adapters of other forms (adapter, adapter_v2).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.trainer_optimizers import update_of
from gnomon.formats.trainer_words import flag
from gnomon.formats.trainers import AUTOCAST, BF16, FP16, FP32, Training, adapted, job_of, model_of
from gnomon.formats.yaml_file import read_yaml

IRRELEVANT = frozenset(
    """
    out_dir data data.* eval.* logger_name seed optimizer.init_args* lora_alpha lora_dropout train.save_interval
    train.log_interval train.lr_warmup* train.epochs train.max_tokens train.max_steps train.min_lr resume tokenizer_dir
    initial_checkpoint_dir access_token log.* train.max_time export_only
    """.split()
)

PRECISIONS = {"bf16-true": BF16, "bf16-mixed": AUTOCAST, "32-true": FP32, "16-mixed": FP16, "16-true": BF16}
TARGETS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj", "dense"),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj", "fc1", "fc2"),
}
LISTED = ("lora_query", "lora_value")
"""On where a file does not say."""


def _looks(sample: Sample) -> bool:
    train = sample.has("train.global_batch_size") or sample.has("train.micro_batch_size")
    return train and (sample.has("checkpoint_dir") or sample.has("out_dir") or sample.has("model_name"))


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> Network | str:
    f.ignore("model_config")
    key = "checkpoint_dir" if f.has("checkpoint_dir") else "model_name"
    for name in [name for name in f.names() if name.startswith("model_config.")]:
        f.report(name, "the network's own sizes; read by its name")
    model = model_of(f, key, context, folder, assumed)
    if not f.has("lora_r"):
        return model
    target_keys = [key for key in TARGETS if flag(f, key, key in LISTED)]
    named = [name for key in target_keys for name in TARGETS[key][:3]]
    if flag(f, "lora_head"):
        f.report("lora_head", "an adapter on the head, which is left out")
    four = str(f.raw("quantize") or "").removeprefix("bnb.")
    if four and not four.startswith(("nf4", "fp4")):
        f.report("quantize", "frozen weights are stored so; read in the compute dtype, so memory is too large")
    return adapted(f, model, f.integer("lora_r"), named, four_bits=four.startswith(("nf4", "fp4")), named="lora_*")


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    f = Fields(flatten(read_yaml(text, file)), file, context)
    folder, assumed = path.resolve().parent, list[str]()
    per_node, nodes = f.raw("devices"), f.integer("num_nodes", 1)
    stated = per_node * nodes if isinstance(per_node, int) else None
    precision = str(f.raw("precision") or "bf16-true")
    if precision not in PRECISIONS:
        f.report("precision", f"read as bf16-true; known are {', '.join(PRECISIONS)}")
    f.ignore("quantize", "train.tie_embeddings", "model_config")
    tuned = f.has("checkpoint_dir")
    total = context.global_batch or f.integer("train.global_batch_size", 512)
    micro = context.micro_batch_size or f.integer("train.micro_batch_size", 4)
    f.ignore("train.global_batch_size", "train.micro_batch_size")
    devices = context.devices or stated or 1
    if total < devices:
        raise InputError(f"train.global_batch_size = {total}: the nearest number of devices is {total}, one for each")
    # TrainArgs.gradient_accumulation_iters: each device takes global // devices sequences, in one microbatch at least
    micro = min(micro, total // devices)
    optimizer = "optimizer.class_path" if f.has("optimizer.class_path") else "optimizer"
    if not f.has("train.max_seq_length") and context.seq_len is None:
        assumed.append("train.max_seq_length is not given: 4096 tokens (--seq-len)")
    length = f.raw("train.max_seq_length")
    if tuned:
        f.note_unpacked("samples", "padded", length if isinstance(length, int) else 4096)
    training = Training(
        model=_model(f, context, folder, assumed),
        micro=micro,
        total=total // (micro * devices) * micro * devices,
        seq_len=length if isinstance(length, int) else 4096,
        zero=3 if devices > 1 else 0,
        recompute=tuned and devices > 1,
        precision=PRECISIONS.get(precision, BF16),
        update=update_of(f, optimizer, "AdamW"),
        clip=f.raw("train.max_norm") is not None,
    )
    f.account(IRRELEVANT, {}, ())
    return job_of(f, context, training, assumed, stated)


FORMAT = Format(
    name="litgpt", program="Lightning-AI/litgpt 2685705", files="YAML of `litgpt`", looks=_looks, read=_read
)

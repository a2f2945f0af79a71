"""levanter's YAML files.

What a key means was read from stanford-crfm/levanter at commit 9263f81e8b45 (2025): src/levanter/trainer.py,
src/levanter/models/{gpt2,llama,mistral}.py. Leaves out data, and networks that are neither GPT-2 nor Llama.
"""

from __future__ import annotations

import re
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, Network, ReadContext
from gnomon.formats.job import Fields, Job, flatten, read_source, with_job_fields
from gnomon.formats.tokenizers import rows_of
from gnomon.formats.trainer_words import flag
from gnomon.formats.trainers import AUTOCAST, BF16, FP32, Training, job_of
from gnomon.formats.yaml_file import read_yaml
from gnomon.models.gpt import GptConfig
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Precision
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    data* optimizer.* trainer.tracker* trainer.wandb* trainer.checkpointer* trainer.num_train_steps trainer.seed hf_*
    trainer.steps_per_eval trainer.max_eval_batches trainer.per_device_eval_parallelism trainer.batch_axis trainer.id
    initialize_from* use_hf_model_config epoch supervised_data* chat_* dataset_type tokenizer max_seq_len
    model_name_or_path trainer.ray* trainer.load* trainer.profiler* trainer.log* eval_harness* model.initializer_range
    model.rope* model.scale_attn_by_inverse_layer_idx model.flash_attention_block_size model.use_flash_attention
    trainer.allow_* trainer.distributed* trainer.shutdown_at_exit messages_field input_role output_role merge_loras
    """.split()
)

INEXPRESSIBLE = {
    "trainer.quantization*": "eight-bit products; read as bf16, so too slow",
    "trainer.tensor_parallel_axes": "axes that tensor parallelism divides; in effect with model_axis_size above 1",
    "model.upcast_attn": "attention in fp32",
}


def _looks(sample: Sample) -> bool:
    if not sample.values and "!include " in sample.text:
        return re.search(r"^trainer:$", sample.text, re.MULTILINE) is not None
    return sample.has("trainer.train_batch_size", "model") or sample.has("trainer.mp", "model.type")


def _network(f: Fields, context: ReadContext) -> Network | str:
    if context.model is not None:
        f.ignore(*(key for key in f.names() if key.startswith("model.")))
        return context.model
    kind = str(f.raw("model.type"))
    tokenizer = str(f.peek("data.tokenizer") or f.peek("tokenizer") or "gpt2")
    if kind not in ("gpt2", "llama", "mistral"):
        f.fail("model.type", f"{kind}: of levanter's networks gpt2, llama and mistral are read; {GIVE_MODEL}")
    hidden, heads = f.integer("model.hidden_dim", 768 if kind == "gpt2" else 4096), f.integer("model.num_heads", 12)
    layers = f.integer("model.num_layers", 12 if kind == "gpt2" else 32)
    f.ignore(
        "model.resid_pdrop", "model.embed_pdrop", "model.attn_pdrop", "model.use_bias", "model.activation_function"
    )
    f.ignore("model.use_layer_norm_weight")
    if kind == "gpt2":
        length = context.seq_len or f.integer("model.seq_len", 512)
        return GptConfig(
            name="levanter",
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            vocab_size=context.vocab_size or _vocabulary(f, tokenizer, 50257),
            max_positions=length,
            ffn_size=4 * hidden,
            dropout=0.0,
            attention_dropout=0.0,
        )
    return LlamaConfig(
        name="levanter",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=f.integer("model.num_kv_heads", heads),
        head_dim=hidden // heads,
        ffn_size=f.integer("model.intermediate_dim", 11008),
        vocab_size=context.vocab_size or _vocabulary(f, tokenizer, 0),
    )


def _vocabulary(f: Fields, tokenizer: str, absent: int) -> int:
    """Rows of the embedding, by the tokenizer that everybody knows; --vocab-size otherwise."""
    if (rows := rows_of(tokenizer)) is not None:
        return rows
    if not absent:
        f.fail("vocab_size", f"the rows of the embedding are in the tokenizer's file ({tokenizer}); give --vocab-size")
    return absent


def _precision(f: Fields) -> Precision:
    """Reads `p=f32,c=bfloat16` as dtypes of parameters and compute."""
    spelled = str(f.raw("trainer.mp") or "f32")
    parts = dict(part.partition("=")[::2] for part in spelled.split(",")) if "=" in spelled else {}
    compute, stored = parts.get("c", parts.get("compute", spelled)), parts.get("p", parts.get("params", spelled))
    if compute.startswith("b"):
        return BF16 if stored.startswith("b") else AUTOCAST
    return FP32


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    f = Fields(flatten(read_yaml(re.sub(r"!include \S+", "included", text), file)), file, context)
    tp = f.integer("trainer.model_axis_size", 1)
    if tp == 1:
        f.ignore("trainer.tensor_parallel_axes")
    total = context.global_batch or f.integer("trainer.train_batch_size", 512)
    per_device = f.raw("trainer.per_device_parallelism")
    data = max(1, (context.devices or 1) // tp)
    micro = per_device if isinstance(per_device, int) and per_device > 0 else max(1, total // data)
    sharded = f.raw("trainer.fsdp_axis") is not None or not f.is_given("trainer.fsdp_axis")  # "embed" where not given
    training = Training(
        model=_network(f, context),
        micro=micro * tp if isinstance(per_device, int) and per_device > 0 else micro,
        total=f.integer("trainer.train_batch_size", 512),
        seq_len=f.integer("model.seq_len", f.integer("max_seq_len", 512 if f.peek("model.type") == "gpt2" else 2048)),
        zero=3 if sharded else 0,
        tp=tp,
        recompute=flag(f, "model.gradient_checkpointing", True),
        precision=_precision(f),
        stack=with_job_fields(stack("pytorch-fsdp"), "XLA compiles the step", launch_mode="compiled"),
    )
    f.note_default("compiler", "XLA", "a JAX program: overlap and fusion are the compiler's; read as torch.compile's")
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return job_of(f, context, training)


FORMAT = Format(
    name="levanter", program="stanford-crfm/levanter 9263f81", files="YAML of its mains", looks=_looks, read=_read
)

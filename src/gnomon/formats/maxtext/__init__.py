"""MaxText's YAML files for GPUs.

What a key means was read from AI-Hypercomputer/maxtext at commit e591f30cbbf2 (2026-08): src/maxtext/configs/base.yml,
pyconfig. The names of the two kinds of its axes (ici within a slice, dcn between) are multiplied. Leaves out XLA's own
choices, which are listed.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, Network, ReadContext
from gnomon.formats.hub import network_called
from gnomon.formats.job import Fields, Job, flatten, read_source, with_job_fields
from gnomon.formats.trainers import AUTOCAST, BF16, FP32, Training, job_of
from gnomon.formats.yaml_file import read_yaml
from gnomon.models.llama import LlamaConfig
from gnomon.plans import Precision
from gnomon.software import stack

IRRELEVANT = frozenset(
    """
    base_config run_name steps hardware enable_checkpointing async_checkpointing dataset_* reuse_example_batch
    use_iota_embed logits_dot_in_fp32 base_output_directory tokenizer_* profiler* log_* checkpoint_* learning_rate*
    warmup_* eval_* gcs_* jax_* compile_* enable_goodput* monitor_* max_segments_per_seq packing per_device_batch_size
    attention scan_layers hf_* grain_* train_split adam_* opt_type xprof* skip_first_n_steps_for_profiler
    """.split()
)

INEXPRESSIBLE = {
    "remat_policy": "what XLA keeps; read as the nearest of none and full",
    "megablox": "grouped kernels of experts",
    "sparse_matmul": "grouped kernels of experts",
    "capacity_factor": "tokens over an expert's room are dropped",
    "quantization": "eight-bit products; read as bf16, so too slow",
    "optimizer_memory_host_offload": "states wait on the host",
}

KEEPS_ALL = {"none", "minimal", "minimal_flash", "minimal_with_context", "minimal_offloaded"}
"""Policies that keep the outputs of matmuls."""

SIZES = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers")


def _looks(sample: Sample) -> bool:
    return sample.has("max_target_length") and (sample.has("per_device_batch_size") or sample.has("base_config"))


def _model(f: Fields, context: ReadContext, assumed: list[str]) -> Network | str:
    """Finds the model by model_name, or by the sizes of a Llama, which base.yml fills in."""
    if context.model is not None:
        f.ignore("model_name", "head_dim", "vocab_size", *SIZES)
        return context.model
    name = f.raw("model_name")
    if isinstance(name, str) and name != "default":
        network, note = network_called(re.sub(r"^(llama)(\d)", r"\1-\2", name))
        assumed += [note] if note else []
        for size in (*SIZES, "head_dim", "vocab_size"):
            f.report(size, "a size that is changed; read as the network's own")
        return network
    if not f.has("base_emb_dim"):
        f.fail("model_name", f"no model_name, and no sizes; {GIVE_MODEL}")
    return LlamaConfig(
        name="maxtext",
        num_layers=f.integer("base_num_decoder_layers", 16),
        hidden_size=f.integer("base_emb_dim", 2048),
        num_heads=f.integer("base_num_query_heads", 16),
        num_kv_heads=f.integer("base_num_kv_heads", 16),
        head_dim=f.integer("head_dim", 128),
        ffn_size=f.integer("base_mlp_dim", 7168),
        vocab_size=context.vocab_size or f.integer("vocab_size", 32000),
    )


def _axis(f: Fields, name: str, default: int = 1) -> int:
    """ici × dcn of an axis; -1 is what is left."""
    sizes = [f.raw(f"{kind}_{name}_parallelism") for kind in ("ici", "dcn")]
    known = [size for size in sizes if isinstance(size, int)]
    return -1 if -1 in known else math.prod(known) if known else default


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    f = Fields(flatten(read_yaml(text, file)), file, context)
    assumed: list[str] = []
    replicas, tp, cp = _axis(f, "data"), _axis(f, "tensor"), _axis(f, "context")
    shard = _axis(f, "fsdp", -1)
    for axis in ("pipeline", "expert", "sequence", "tensor_sequence", "autoregressive"):
        if _axis(f, axis) != 1:
            f.fail(f"ici_{axis}_parallelism", "a prediction has no such axis of MaxText; set it to 1")
    policy = str(f.raw("remat_policy") or "full")
    if policy not in KEEPS_ALL | {"full"}:
        f.report("remat_policy", INEXPRESSIBLE["remat_policy"])
    stored, compute = str(f.raw("weight_dtype") or "float32"), str(f.raw("dtype") or "bfloat16")
    precision: Precision = FP32 if compute == "float32" else BF16 if stored == "bfloat16" else AUTOCAST
    per_device = f.number("per_device_batch_size", 12.0)
    if per_device != int(per_device):
        f.report("per_device_batch_size", "a part of a sequence on each device; read as one")
    data = (context.devices or 1) // max(1, abs(tp) * abs(cp))
    groups = replicas if shard == -1 and replicas > 0 else data if replicas == -1 and shard in (-1, 1) else 1
    training = Training(
        model=_model(f, context, assumed),
        # MaxText counts sequences of every device, also of those that share them over tp and cp; here a data rank has
        # them.
        micro=max(1, int(per_device)) * max(1, abs(tp) * abs(cp)),
        steps=f.integer("gradient_accumulation_steps", 1),
        seq_len=f.integer("max_target_length", 2048),
        zero=0 if shard == 1 else 3,
        replicas=groups,
        tp=max(1, tp),
        cp=max(1, cp),
        recompute=policy not in KEEPS_ALL,
        precision=precision,
        clip=f.number("gradient_clipping_threshold", 1.0) > 0,
        stack=with_job_fields(stack("pytorch-fsdp"), "XLA compiles the step", launch_mode="compiled"),
    )
    f.note_default("compiler", "XLA", "a JAX program: overlap and fusion are the compiler's; read as torch.compile's")
    f.account(IRRELEVANT, INEXPRESSIBLE, ())
    return job_of(f, context, training, assumed)


FORMAT = Format(
    name="maxtext", program="AI-Hypercomputer/maxtext e591f30", files="YAML over base.yml", looks=_looks, read=_read
)

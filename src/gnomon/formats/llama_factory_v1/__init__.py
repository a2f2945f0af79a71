"""LLaMA-Factory's YAML files of its next version, whose keys have other names (`USE_V1=1 llamafactory-cli sft`).

What a key means was read from hiyouga/LLaMA-Factory (2026-09): src/llamafactory/v1/config/{model,training}_args.py,
core/model_engine.py (whole models are widened to fp32), plugins/model_plugins/peft.py, plugins/trainer_plugins/
distributed/{fsdp2,deepspeed}.py. Leaves out its kernels for other devices than GPUs, and batches by tokens, which are
listed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gnomon.errors import nearest
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Network, ReadContext, network_graph
from gnomon.formats.job import Fields, Job
from gnomon.formats.trainer_source import trainer_source
from gnomon.formats.trainer_words import flag, names_of
from gnomon.formats.trainers import (
    AUTOCAST,
    BF16,
    FP32,
    Modules,
    Training,
    adapted,
    by_deepspeed,
    in_part,
    job_of,
    model_of,
)
from gnomon.models.trained import Trained
from gnomon.plans import Layout, Precision
from gnomon.search.space.points import repeated_layers

NEUTRAL = frozenset(
    """
    model_class trust_remote_code custom_chat_template train_dataset eval_dataset output_dir learning_rate max_steps
    num_train_epochs sample_backend max_new_tokens batching_workers dist_timeout lr_scheduler_config.* seed save_*
    full_determinism resume_from_checkpoint logging_* report_to run_name peft_config.lora_alpha flash_attn
    peft_config.lora_dropout peft_config.adapter_name_or_path peft_config.export_* peft_config.infer_dtype
    peft_config.cast_trainable_params_to_fp32 init_config.* dist_config.dcp_path dist_config.pin_memory dp_size
    mp_shard_size max_grad_norm quant_config.double_quantization quant_config.quantization_type kernel_config.name
    """.split()
)

INEXPRESSIBLE = {
    "peft_config.use_rslora": "another scale",
    "optim_config.*": "another update; priced as AdamW",
    "kernel_config.include_kernels": "kernels of its own",
    "dist_config.ep_*": "experts over ranks, which this reader does not place: read as sharded like the rest",
}

BATCHING = ("normal", "padding_free", "dynamic_batching", "dynamic_padding_free")
SHARDING = ("fsdp2", "fsdpturbo", "deepspeed")
ADAPTING = ("lora", "freeze")


def _looks(sample: Sample) -> bool:
    own = any(sample.has(key) for key in ("model_class", "dist_config", "peft_config", "kernel_config", "quant_config"))
    return sample.has("model", "train_dataset") and own and not sample.has("model_name_or_path")


def _named(f: Fields, key: str, known: tuple[str, ...]) -> str | None:
    """The `name` of a plugin, one of those that are known."""
    name = f.raw(f"{key}.name")
    f.ignore(key)
    if name is not None and name not in known:
        f.fail(f"{key}.name", f"{name!r} is none of its plugins{nearest(str(name), known)}: {', '.join(known)}")
    return None if name is None else str(name)


def _model(f: Fields, context: ReadContext, folder: Path, assumed: list[str]) -> tuple[Network | str, bool]:
    """(network, whether it is widened to fp32: all of it is trained)."""
    model = model_of(f, "model", context, folder, assumed)
    kind = _named(f, "peft_config", ADAPTING)
    bits = f.raw("quant_config.quantization_bit")
    f.ignore("quant_config", "quant_config.name")
    if bits not in (None, 4, 8):
        f.fail("quant_config.quantization_bit", f"{bits!r}: bitsandbytes stores 4 or 8 bits")
    if kind == "lora":
        targets = names_of(f.raw("peft_config.target_modules") or "all")
        everything = () if "all" in targets else targets
        rank, key = f.integer("peft_config.r", 8), "peft_config.target_modules"
        norms = flag(f, "peft_config.use_dora")
        four, eight = bits == 4, bits == 8
        return adapted(f, model, rank, everything, four_bits=four, eight_bits=eight, named=key, magnitudes=norms), False
    if bits is not None:
        f.fail(
            "quant_config.quantization_bit", "a quantised network is trained by adapters only: peft_config.name: lora"
        )
    if kind == "freeze":
        last, (_, count) = f.integer("peft_config.freeze_trainable_layers", 2), repeated_layers(network_graph(model))
        f.report("peft_config.freeze_extra_modules", "read as the last layers alone")
        f.ignore("peft_config.freeze_trainable_modules")
        chosen = "|".join(map(str, range(max(0, count - last), count)))
        return in_part(f, "peft_config.name", model, Trained(patterns=(rf"\.({chosen})\.",))), False
    return model, True


def _read(path: Path, context: ReadContext) -> Job:
    source = trainer_source(path, context, lambda launch: False, "model_class", by_pyyaml=False)
    f, assumed = source.fields, list(source.assumed)
    model, whole = _model(f, context, source.folder, assumed)
    bf16 = flag(f, "bf16", True)
    precision: Precision = (AUTOCAST if bf16 else FP32) if whole else BF16
    total, cp = f.raw("global_batch_size"), f.integer("cp_size", 1)
    strategy = str(f.raw("batching_strategy") or "normal")
    if strategy not in BATCHING:
        f.fail("batching_strategy", f"{strategy!r}{nearest(strategy, BATCHING)}; understood are {', '.join(BATCHING)}")
    seq_len = f.integer("cutoff_len", 2048)
    f.note_unpacked("batching_strategy", strategy, seq_len)
    kernels = str(f.raw("kernel_config.name") or "")
    liger = "liger_kernel" in kernels
    f.ignore("kernel_config", "lr_scheduler_config", "init_config", "optim_config")
    how = _named(f, "dist_config", SHARDING)
    training = Training(
        model=model,
        micro=f.integer("micro_batch_size", 1),
        total=None if total is None else f.integer("global_batch_size"),
        steps=1,
        seq_len=seq_len,
        recompute=flag(f, "enable_activation_checkpointing", True),
        precision=precision,
        clip=f.number("max_grad_norm", 1.0) > 0,
        cp=cp,
        layout=Layout(context="ulysses"),
        replicas=f.integer("mp_replicate_size", 1),
        modules=Modules(
            fused=liger, loss="chunked" if liger else "unfused", compiled=False, experts="grouped", flash=True
        ),
        loads="each_rank",
    )
    f.ignore("cp_mode")
    if how in ("fsdp2", "fsdpturbo"):
        again = flag(f, "dist_config.reshard_after_forward", True)
        training = replace(training, zero=3 if again else 2, offload=flag(f, "dist_config.offload_params"))
    if how == "deepspeed":
        f.ignore("dist_config.config_file")
        f.account(NEUTRAL, INEXPRESSIBLE, ())
        return by_deepspeed(f, context, training, "dist_config.config_file", source.folder, assumed)
    if how is None:
        assumed.append("no dist_config in the file: replicas (--set dist_config.name=fsdp2)")
    f.account(NEUTRAL, INEXPRESSIBLE, ())
    return job_of(f, context, training, assumed)


FORMAT = Format(
    name="llama-factory-v1",
    program="hiyouga/LLaMA-Factory 2026-09 (USE_V1)",
    files="YAML of its next version (`USE_V1=1`)",
    looks=_looks,
    read=_read,
)

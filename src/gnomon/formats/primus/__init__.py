"""Primus' experiment files: overrides of Megatron-LM's or torchtitan's options around a named network.

What a key means was read from AMD-AGI/Primus at commit fd1eeabbad15 (2026-08): primus/configs/modules/{megatron,
torchtitan}/pre_trainer.yaml, primus/configs/models/. The network's file lies in Primus, so it is taken by its name.
Leaves out Primus' other backends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, Network, ReadContext
from gnomon.formats.hub import network_called
from gnomon.formats.job import Fields, Job, flatten, read_source
from gnomon.formats.megatron.options import known_options
from gnomon.formats.megatron.read import NETWORK, job_of
from gnomon.formats.references import resolved
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.formats.yaml_file import read_yaml

DEFAULTS: dict[str, object] = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "clip_grad": 1.0,
}
"""What Primus' own file for Megatron-LM sets and a step depends on."""

RENAMED = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8": "fp8_format",
    "optimizer": "optimizer",
}

IRRELEVANT = frozenset(
    """
    wandb_* *_sink_level sink_level log_* *_data_path mock_data auto_continue_train disable_last_saving disable_wandb
    disable_tensorboard tensorboard* eval* no_save* no_load* save* load* ckpt_* finetune train_iters exp_name profile*
    use_pytorch_profiler* disable_profiler* check_for_nan* manual_gc* num_workers seed create_attention_mask* lr* min_lr
    data_path* mlflow* disable_mlflow dump_pp_data pp_warmup torch_profiler* enable_experimental moe_router_force*
    train_samples
    """.split()
)

INEXPRESSIBLE = {
    "enable_primus_turbo": "Primus-Turbo's kernels: a prediction without is too slow",
    "use_turbo_*": "Primus-Turbo's kernels: a prediction without is too slow",
    "turbo_*": "Primus-Turbo's kernels",
    "primus_turbo*": "Primus-Turbo's kernels: a prediction without is too slow",
    "fp4*": "four-bit products; read as bf16, so too slow",
    "cross_entropy_*": "which kernel of the loss",
    "use_torch_fsdp2": "FSDP2 in place of Megatron's data parallelism",
    "patch_*": "patches of Primus",
}


def _looks(sample: Sample) -> bool:
    return sample.has("modules.pre_trainer.framework") or sample.has("modules.post_trainer.framework")


def _network(f: Fields, name: str, context: ReadContext, assumed: list[str]) -> Network | str:
    if context.model is not None:
        return context.model
    plain = name.removesuffix(".yaml").rpartition("/")[2]
    spelled = re.sub(r"^(llama|gemma)-?(\d)", r"\1-\2", plain.replace("_", "-"), flags=re.IGNORECASE)
    spelled = re.sub(r"-(fp8|bf16|v0\.1)$", "", spelled)
    network, note = network_called(spelled)
    assumed += [note] if note else []
    sizes = {"max_position_embeddings", "multi_latent_attention", "position_embedding_type"}
    for key in sorted(set(NETWORK) - sizes):
        f.report(key, f"changes the network, which is read as {plain} has it; {GIVE_MODEL}")
    return network


def _section(
    inside: Mapping[str, object], name: str, file: str, absent: Mapping[str, object] | None = None
) -> Mapping[str, object]:
    """A part of the file. InputError where there is none, or it has no keys; absent: what stands for none."""
    section = absent if inside.get(name) is None else inside[name]
    if not isinstance(section, Mapping):
        raise InputError(f"{file}: {name!r} is no section with keys, as Primus' files have it")
    return section


def _read(path: Path, context: ReadContext) -> Job:
    text, file = read_source(path)
    tree = read_yaml(text, file)
    modules = _section(resolved(tree, context.env), "modules", file)
    module = _section(modules, "pre_trainer" if modules.get("pre_trainer") else "post_trainer", file)
    overrides = _section(module, "overrides", file, absent={})
    f = Fields(flatten(overrides), file, context)
    assumed: list[str] = []
    if not isinstance(module.get("model"), str) and context.model is None:
        f.fail("model", f"the file does not say the network; {GIVE_MODEL}")
    if module.get("framework") not in ("megatron", "torchtitan"):
        f.fail("framework", f"{module.get('framework')!r}: of Primus' backends megatron and torchtitan are read")
    model = _network(f, str(module.get("model")), context, assumed)
    if module["framework"] == "torchtitan":
        f = Fields(flatten(overrides), file, context)
        own = {key for key in f.names() if key.startswith(("primus_turbo", "sink_level", "file_sink", "stderr_sink"))}
        remaining = {key: f.peek(key) for key in f.names() if key not in own and f.peek(key) is not None}
        for key in own:
            f.report(key, INEXPRESSIBLE["primus_turbo*"]) if f.peek(key) is True else f.ignore(key)
        job = read_torchtitan(remaining, model=model, context=replace(context, settings={}))
    else:
        values: dict[str, object] = dict(DEFAULTS)
        for key in f.names():
            name, value = RENAMED.get(key, key), f.peek(key)
            if name in known_options():
                f.ignore(key)
                values[name] = value
        if values.get("num_virtual_stages_per_pipeline_rank") == 1:
            values.pop("num_virtual_stages_per_pipeline_rank")
        if values.get("gradient_accumulation_fusion") is False:
            values["no_gradient_accumulation_fusion"] = True
        if values.get("sequence_parallel") == 1:
            values["sequence_parallel"] = True
        values = {key: value for key, value in values.items() if value is not None and value is not False}
        f.account(IRRELEVANT, INEXPRESSIBLE, ())
        fields = Fields(values, file, replace(context, settings={}))
        job = job_of(fields, context=replace(context, model=model, settings={}), name="primus-job")
    return replace(
        job,
        notes=(*f.notes, *job.notes),
        unexpressed=(*f.unexpressed, *job.unexpressed),
        assumed=(*assumed, *job.assumed),
    )


FORMAT = Format(name="primus", program="AMD-AGI/Primus fd1eeab", files="YAML of experiments", looks=_looks, read=_read)

"""What was found of a script, as JSON: fields of its Trainer, or its loop; its model as a config.json or as a Graph.

`answer()` is called when the script has been stopped, outside of the contexts that it ran in. A model whose config.json
has a reader is that reader's, if it has as many parameters as the script's own; any other is captured. Leaves out what
the fields mean (`cli.script`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.errors import CaptureError, GnomonError
from gnomon.formats.given import network_graph
from gnomon.formats.huggingface.read import read_hf_config
from gnomon.frontend.capture import captured
from gnomon.frontend.named import notes_of
from gnomon.frontend.script.hub import is_stand_in
from gnomon.frontend.script.seen import SEEN
from gnomon.frontend.script.step import FirstStep, first_step
from gnomon.graph.plain import to_plain

AGREE = 1e-3
"""Part by which the parameters of a config's reader and of the script's model may differ."""

ALWAYS = (
    "per_device_train_batch_size", "gradient_accumulation_steps", "bf16", "fp16", "gradient_checkpointing", "optim",
    "max_grad_norm", "max_length", "packing", "padding_free", "max_prompt_length", "max_completion_length",
    "num_generations", "beta",
)  # fmt: skip
"""Fields that are written even where they are the defaults of their class, which may be another than the reader's."""

OURS = (
    "use_cpu", "no_cuda", "report_to", "output_dir", "do_train", "accelerator_config", "activation_checkpointing",
    "disable_tqdm", "dataloader_pin_memory", "disable_nan_inf_filter", "model_init_kwargs",
)  # fmt: skip
"""Fields that are set for the process in which the script runs, that transformers itself fills in, or of which the
model was made that is looked at."""

BATCHES = 8
"""Of the script's own data that are looked at for their length."""


def answer() -> dict[str, Any]:
    """The job that the script described, as plain values. CaptureError where the model cannot be captured, or nothing
    was found."""
    found: dict[str, Any] = {"stopped": SEEN.stopped_at, "notes": SEEN.notes}
    if SEEN.trainer is not None:
        return found | of_trainer(SEEN.trainer)
    step = first_step()
    if step is None:
        raise CaptureError(
            "the script's optimizer steps, and backward was not called on what a module of its parameters computed"
        )
    return found | of_loop(step)


def of_trainer(trainer: Any) -> dict[str, Any]:
    """The job of a script with transformers' Trainer or a class made of it."""
    withheld = SEEN.withheld
    fields = {name: withheld.get(name, value) for name, value in _fields(trainer.args).items()}
    if type(trainer.args).__name__ != "TrainingArguments" or "optim" in fields:
        fields.setdefault("optim", "adamw_torch")
    for name in ("deepspeed", "fsdp", "fsdp_config", "use_liger_kernel", "torch_compile", "tf32"):
        if withheld.get(name) not in (None, False, "", [], {}):
            fields[name] = withheld[name]
    if "sft" in type(trainer).__name__.lower():  # of TRL from 1.16 on, every kind but dft is computed with the head
        tiled = hasattr(sys.modules.get("trl.trainer.utils"), "add_fused_lm_head")
        tiled = tiled or getattr(trainer.args, "loss_type", None) == "chunked_nll"
        fields["loss_type"] = "chunked_nll" if tiled else "nll"
    if SEEN.unsloth is not None:
        how = SEEN.unsloth.get("checkpointing")
        fields |= {"use_unsloth": True, "gradient_checkpointing": bool(how), "activation_offloading": how == "unsloth"}
    lengths = batch_lengths(trainer)
    model = trainer.model
    if (how := _experts(model)) is not None:
        fields["experts_implementation"] = how
    base, adapters = unadapted(model)
    fields |= adapters
    out: dict[str, Any] = {
        "kind": "trainer",
        "trainer": type(trainer).__name__,
        "fields": {name: plain(value) for name, value in fields.items() if value is not None},
        "lengths": lengths,
        "dtype": str(next(p.dtype for p in base.parameters())).removeprefix("torch."),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    return out | network(base, _example(trainer), bool(adapters), loss_alone=True)


class LossAlone(nn.Module):
    """A model as Trainer uses it: of what it returns the loss alone is kept."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """Calls the model; returns its loss, or all that it returns where it has none."""
        out = self.model(**inputs)
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if loss is None and isinstance(out, tuple) and isinstance(out[0], Tensor) and out[0].dim() == 0:
            loss = out[0]
        return out if loss is None else loss


def _fields(args: Any) -> dict[str, Any]:
    """Fields of a dataclass of arguments that are not its defaults, and those of ALWAYS."""
    out = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        default = field.default if field.default is not dataclasses.MISSING else None
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if (field.name in ALWAYS or value != default) and not field.name.startswith("_"):
            out[field.name] = value
    return {name: value for name, value in out.items() if name not in OURS and value not in ([], {}, ())}


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def unadapted(model: Any) -> tuple[nn.Module, dict[str, Any]]:
    """(the model without PEFT's adapters around it, fields that say them)."""
    four = {"load_in_4bit": True} if SEEN.quantised == "nf4" else {}
    four |= {"load_in_8bit": True} if SEEN.quantised == "int8" else {}
    configs = getattr(model, "peft_config", None)
    if not configs or not hasattr(model, "get_base_model"):
        return model, four
    config = next(iter(configs.values()))
    if not hasattr(config, "r"):
        raise CaptureError(f"adapters of {type(config).__name__} are not read; LoRA's and those made of it are")
    targets = config.target_modules
    fields: dict[str, Any] = {
        "use_peft": True,
        "lora_r": config.r,
        "lora_target_modules": sorted(targets) if isinstance(targets, (set, list, tuple)) else targets,
        "use_dora": getattr(config, "use_dora", False),
        "lora_modules_to_save": list(config.modules_to_save or ()),
    }
    return model.get_base_model(), {**four, **{k: v for k, v in fields.items() if v not in (None, False, [])}}


def own_parameters(model: nn.Module) -> tuple[int, int]:
    """(elements of all parameters, of the trained ones), adapters aside."""
    own = [(n, p) for n, p in model.named_parameters() if "lora_" not in n and ".modules_to_save." not in n]
    return sum(p.numel() for _, p in own), sum(p.numel() for _, p in own if p.requires_grad)


def network(model: nn.Module, example: Mapping[str, Any], adapted: bool, *, loss_alone: bool = False) -> dict[str, Any]:
    """Its config.json where a reader has as many parameters, else its Graph. loss_alone: as Trainer keeps outputs."""
    total, trained = own_parameters(model)
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict") and (adapted or trained == total):
        values = plain(config.to_dict())
        values.pop("quantization_config", None)
        values = {"architectures": [type(model).__name__], **{k: v for k, v in values.items() if v is not None}}
        # The class that runs, whatever the config names.
        values["architectures"] = [type(model).__name__]
        try:
            read = read_hf_config(json.dumps(values), type(model).__name__)
            known = network_graph(read.graph if read.config is None else read.config).num_parameters()
        except (GnomonError, ValueError):
            known = 0
        if math.isclose(known, total, rel_tol=AGREE):
            return {"config": values, "name": _name(config) or type(model).__name__, "parameters": total}
    if adapted:
        raise CaptureError(
            f"{type(model).__name__} has no reader of its config.json, and adapters are put beside linears that one "
            f"names; train it whole, or name the model by --model"
        )
    name = type(model).__name__
    return {**graph_of(LossAlone(model) if loss_alone else model, example, name), "name": name, "parameters": total}


def graph_of(module: nn.Module, example: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Captures the module in bfloat16, or in its own dtypes where that fails."""
    try:
        capture = captured(module, dict(example), name=name, dtype=torch.bfloat16)
    except CaptureError:
        capture = captured(module, dict(example), name=name)
    return {"graph": to_plain(capture.graph), "said": list(notes_of(capture))}


def _name(config: Any) -> str:
    return (
        str(getattr(config, "_name_or_path", "") or getattr(config, "name_or_path", "")).rstrip("/").rpartition("/")[2]
    )


def _experts(model: Any) -> str | None:
    """How transformers 5 runs experts, where the model has some."""
    config = getattr(model, "config", None)
    if config is None or not any("expert" in key for key in config.to_dict()):
        return None
    how = getattr(config, "_experts_implementation", None)
    return how if isinstance(how, str) else None


def batch_lengths(trainer: Any) -> list[list[int]]:
    """Shapes of the first batches of the script's own data; none where these are stood in for."""
    shapes = []
    for batch in _batches(trainer):
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor) and ids.dim() == 2:
            shapes.append(list(ids.shape))
    return shapes


def _batches(trainer: Any) -> list[Any]:
    data = getattr(trainer, "train_dataset", None)
    if data is None or is_stand_in(data):
        return []
    try:
        return [batch for batch, _ in zip(trainer.get_train_dataloader(), range(BATCHES), strict=False)]
    except Exception as error:
        SEEN.note(f"a batch of the script's data cannot be made here ({type(error).__name__}: {str(error)[:100]})")
        return []


def _example(trainer: Any) -> dict[str, Any]:
    """Inputs of the model: a batch of the script's data, else token ids and labels."""
    for batch in _batches(trainer)[:1]:
        if isinstance(batch, Mapping) and all(isinstance(x, Tensor) for x in batch.values()):
            return dict(batch)
    ids = torch.zeros((2, 64), dtype=torch.int64)
    labels = torch.zeros(2, dtype=torch.int64) if "Classification" in type(trainer.model).__name__ else ids.clone()
    return {"input_ids": ids, "labels": labels}


def of_loop(step: FirstStep) -> dict[str, Any]:
    """The job of a script with a training loop of its own."""
    whole = step.modules[0]
    inputs = {name: value for name, value in step.inputs.items() if value is not None}
    shapes = [tuple(x.shape) for x in inputs.values() if isinstance(x, Tensor) and x.dim()]
    tokens = next((s for n, x in inputs.items() if isinstance(x, Tensor) and (s := tuple(x.shape)) and _ids(x)), None)
    base, adapters = unadapted(whole) if len(step.modules) == 1 else (step.module, {})
    out: dict[str, Any] = {
        "kind": "loop",
        "batch": shapes[0][0] if shapes else 1,
        "seq": tokens[1] if tokens is not None else None,
        "microbatches": SEEN.backwards,
        "optimizer": type(SEEN.optimizers[0]).__name__,
        "dtype": str(next(p.dtype for p in whole.parameters())).removeprefix("torch."),
        "autocast": SEEN.autocast,
        "sharding": SEEN.sharding,
        "shards": SEEN.shards,
        "launcher": plain(SEEN.launcher),
        "deepspeed": plain(SEEN.deepspeed),
        "compiled": SEEN.compiled,
        "checkpointed": SEEN.checkpointed or bool(getattr(base, "is_gradient_checkpointing", False)),
        "clipped": SEEN.clipped,
        "adapters": plain(adapters),
        "trained": sum(p.numel() for m in step.modules for p in m.parameters() if p.requires_grad),
        "experts": _experts(base),
    }
    if hasattr(base, "config") and len(step.modules) == 1:
        return out | network(base, inputs, bool(adapters))
    name = type(whole).__name__
    parameters = sum(own_parameters(m)[0] for m in step.modules)
    return {**out, **graph_of(step.module, inputs, name), "name": name, "parameters": parameters}


def _ids(x: Tensor) -> bool:
    return x.dim() == 2 and not x.is_floating_point()

"""Unsloth's names for a script that imports it: models, adapters and helpers, of transformers and PEFT in their place.

Unsloth needs a GPU to be imported, and its models are those of transformers with kernels of its own: a script gets the
module of the same config, which `SEEN.unsloth` says. Keyword arguments of older releases of TRL, which it takes, become
those of the installed one. Leaves out its kernels (`formats.trainers`), and vision, speech and generation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from gnomon.frontend.script.seen import SEEN

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What adapters are beside where a script does not say."""

LORA = ("r", "target_modules", "lora_alpha", "lora_dropout", "bias", "modules_to_save", "use_rslora", "use_dora")
"""Arguments of get_peft_model that are those of PEFT's LoraConfig."""


class FastModel:
    """Stands in for Unsloth's FastLanguageModel."""

    @staticmethod
    def from_pretrained(
        model_name: str = "unsloth/Llama-3.2-1B-Instruct",
        max_seq_length: int = 2048,
        dtype: Any = None,
        load_in_4bit: bool = True,
        load_in_8bit: bool = False,
        full_finetuning: bool = False,
        use_gradient_checkpointing: Any = "unsloth",
        **_: Any,
    ) -> tuple[Any, Any]:
        """Loads as Unsloth does; returns (model, tokenizer)."""
        transformers = import_module("transformers")
        four = load_in_4bit and not full_finetuning and not load_in_8bit
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_name, torch_dtype=dtype or torch.bfloat16, load_in_4bit=four, load_in_8bit=load_in_8bit
        )
        SEEN.unsloth = {"checkpointing": use_gradient_checkpointing, "length": max_seq_length}
        return model, transformers.AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(model: Any, r: int = 16, use_gradient_checkpointing: Any = "unsloth", **options: Any) -> Any:
        """The model with PEFT's adapters."""
        peft = import_module("peft")
        lora_options = {name: value for name, value in options.items() if name in LORA and value is not None}
        lora_options.setdefault("target_modules", list(TARGETS))
        SEEN.unsloth = {**(SEEN.unsloth or {}), "checkpointing": use_gradient_checkpointing}
        return peft.get_peft_model(model, peft.LoraConfig(r=r, task_type="CAUSAL_LM", **lora_options))

    for_training = for_inference = staticmethod(lambda model, *args, **kwargs: model)


def _first(*args: Any, **kwargs: Any) -> Any:
    """What a helper is given first: a tokenizer, a trainer, data."""
    return args[0] if args else next(iter(kwargs.values()), None)


def _yes(*args: Any, **kwargs: Any) -> bool:
    return True


NAMES: Mapping[str, Callable[..., Any]] = {
    "FastLanguageModel": FastModel,
    "FastModel": FastModel,
    "FastVisionModel": FastModel,
    "is_bfloat16_supported": _yes,
    "is_bf16_supported": _yes,
    "PatchDPOTrainer": _yes,
    "PatchFastRL": _yes,
    "PatchKTOTrainer": _yes,
    "get_chat_template": _first,
    "train_on_responses_only": _first,
    "standardize_sharegpt": _first,
    "standardize_data_formats": _first,
}


def stand_in(module: Any) -> None:
    """Give a module of Unsloth's name what scripts take from it."""
    for name, value in NAMES.items():
        setattr(module, name, value)
    SEEN.note("unsloth is not run: transformers' modules of the same config, its kernels priced")
    if module.__name__ == "unsloth":
        trl = import_module("trl") if find_spec("trl") is not None else None
        for ours, theirs in (("UnslothTrainer", "SFTTrainer"), ("UnslothTrainingArguments", "SFTConfig")):
            if trl is not None:
                setattr(module, ours, getattr(trl, theirs))


OLDER = {"max_seq_length": "max_length"}
"""TRL's older names of fields of SFTConfig."""


def older_config(module: Any) -> None:
    """SFTConfig takes older names; fields that are gone are left out, and said."""
    cls = module.SFTConfig
    begin = cls.__init__
    known = {field.name for field in dataclasses.fields(cls)}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        named = {OLDER.get(name, name): value for name, value in kwargs.items()}
        if gone := sorted(set(named) - known):
            SEEN.note(f"SFTConfig: {', '.join(gone)} is not of the TRL that is installed; left out")
        begin(self, *args, **{name: value for name, value in named.items() if name in known})

    cls.__init__ = init


def older_trainer(module: Any) -> None:
    """SFTTrainer takes the arguments of older releases, which are fields of SFTConfig now."""
    cls = module.SFTTrainer
    begin = cls.__init__
    config = import_module("trl.trainer.sft_config").SFTConfig
    known = {field.name for field in dataclasses.fields(config)}

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if "tokenizer" in kwargs:
            kwargs.setdefault("processing_class", kwargs.pop("tokenizer"))
        moved = {OLDER.get(name, name): kwargs[name] for name in list(kwargs) if OLDER.get(name, name) in known}
        kwargs = {name: value for name, value in kwargs.items() if OLDER.get(name, name) not in known}
        stated_args = kwargs.get("args")
        if moved or (stated_args is not None and not isinstance(stated_args, config)):
            kwargs["args"] = config(**{**_changed(stated_args), **moved})
        begin(self, *args, **kwargs)

    cls.__init__ = init


def _changed(args: Any) -> dict[str, Any]:
    """Fields of arguments that are not their class' defaults, as the script gave them."""
    if args is None:
        return {}
    values = {}
    for field in dataclasses.fields(args):
        value = SEEN.withheld.get(field.name, getattr(args, field.name))
        if field.init and not field.name.startswith("_") and value != field.default:
            values[field.name] = value
    return {name: value for name, value in values.items() if value not in ([], {}, None)}

"""Megatron-Bridge's overrides, `model.tensor_model_parallel_size=4 train.global_batch_size=512`, around a recipe.

Leaves out what an override means (`read`).
"""

from __future__ import annotations

import re
from pathlib import Path

from gnomon.errors import InputError
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import GIVE_MODEL, Given
from gnomon.formats.job import Job
from gnomon.formats.megatron_bridge.read import read_megatron_bridge
from gnomon.graph import Graph
from gnomon.models.decoder import DecoderConfig
from gnomon.models.presets import CONFIGS


def _looks(sample: Sample) -> bool:
    """Words of `section.field=value`, among them the model's."""
    return not sample.values and re.search(r"^\s*\+{0,2}(model|train)\.\w+=", sample.text, re.MULTILINE) is not None


def _read(path: Path, given: Given) -> Job:
    if given.model is None:
        raise InputError(f"overrides of Megatron-Bridge do not say the model; {GIVE_MODEL}")
    if isinstance(given.model, str | Graph | DecoderConfig):
        known = ", ".join(sorted(CONFIGS))
        raise InputError(f"the model given has no config that Megatron's arguments can say; known: {known}")
    return read_megatron_bridge(path, model=given.model, devices=given.devices or 8, env=given.env, given=given)


FORMAT = Format(
    name="megatron-bridge",
    program="NVIDIA-NeMo/Megatron-Bridge 067f987",
    files="overrides `section.field=value` around a recipe",
    looks=_looks,
    read=_read,
)

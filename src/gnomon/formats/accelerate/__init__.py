"""accelerate's YAML files, which leave the model and the batch to the script that they launch.

Leaves out what a field means (`read`).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.accelerate.read import read_accelerate
from gnomon.formats.accelerate.write import draft
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job


def _looks(sample: Sample) -> bool:
    return sample.has("distributed_type")


def _read(path: Path, context: ReadContext) -> Job:
    return read_accelerate(path, context=context)


FORMAT = Format(
    name="accelerate",
    program="huggingface/accelerate 1.15.0.dev0",
    files="YAML of `accelerate config`, or with a `deepspeed_config`",
    looks=_looks,
    read=_read,
    write=draft,
    stack="pytorch-fsdp",
)

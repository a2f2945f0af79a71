"""accelerate's YAML files, which leave the model and the batch to the script that they launch.

Leaves out what a field means (`formats.accelerate`).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.accelerate import read_accelerate
from gnomon.formats.given import Given
from gnomon.formats.job import Job
from gnomon.formats.programs.format import Format, Sample


def _looks(sample: Sample) -> bool:
    return sample.has("distributed_type")


def _read(path: Path, given: Given) -> Job:
    return read_accelerate(path, given=given)


FORMAT = Format(name="accelerate", program="huggingface/accelerate 1.15.0.dev0", looks=_looks, read=_read)

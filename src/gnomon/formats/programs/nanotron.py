"""nanotron's YAML files.

Leaves out what a field means (`formats.nanotron`).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.given import Given
from gnomon.formats.job import Job
from gnomon.formats.nanotron import read_nanotron
from gnomon.formats.programs.format import Format, Sample


def _looks(sample: Sample) -> bool:
    return sample.has("parallelism", "model.model_config")


def _read(path: Path, given: Given) -> Job:
    return read_nanotron(path, given=given)


FORMAT = Format(name="nanotron", program="huggingface/nanotron 2411b02", looks=_looks, read=_read)

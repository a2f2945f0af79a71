"""nanotron's YAML files.

Leaves out what a field means (`read`).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.nanotron.read import read_nanotron
from gnomon.formats.nanotron.write import draft


def _looks(sample: Sample) -> bool:
    return sample.has("parallelism", "model.model_config")


def _read(path: Path, context: ReadContext) -> Job:
    return read_nanotron(path, context=context)


FORMAT = Format(
    name="nanotron",
    program="huggingface/nanotron 2411b02",
    files="YAML",
    looks=_looks,
    read=_read,
    write=draft,
    stack="nanotron",
)

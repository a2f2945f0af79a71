"""torchtitan's TOML files, or the flags of its newer form.

Leaves out what a field means (`read`).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Given
from gnomon.formats.job import Job
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.formats.torchtitan.write import draft


def _looks(sample: Sample) -> bool:
    return (sample.path.suffix == ".toml" and sample.has("model", "training")) or sample.text.lstrip().startswith(
        ("--module", "--config")
    )


def _read(path: Path, given: Given) -> Job:
    return read_torchtitan(path, devices=given.devices, given=given)


FORMAT = Format(
    name="torchtitan",
    program="pytorch/torchtitan v0.2.2 and b5bcd76",
    files="TOML, or flags of the newer form",
    looks=_looks,
    read=_read,
    write=draft,
)

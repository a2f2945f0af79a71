"""Megatron-LM's launch scripts and those of its forks, or the arguments themselves.

Leaves out what an argument means (`read`).
"""

from __future__ import annotations

import re
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import Given
from gnomon.formats.job import Job
from gnomon.formats.megatron.read import read_megatron
from gnomon.formats.megatron.write import draft


def _looks(sample: Sample) -> bool:
    """Options that Megatron-LM alone has, in a shell script or a list of arguments."""
    if sample.values or sample.path.suffix == ".py":
        return False
    return (
        re.search(r"--(tensor-model-parallel-size|num-layers|micro-batch-size|num-attention-heads)\b", sample.text)
        is not None
    )


def _read(path: Path, given: Given) -> Job:
    return read_megatron(path, given=given)


FORMAT = Format(
    name="megatron",
    program="NVIDIA/Megatron-LM 0.20.0 and forks",
    files="launch scripts (read, never run), or the arguments",
    looks=_looks,
    read=_read,
    write=draft,
    stack="megatron-lm",
)

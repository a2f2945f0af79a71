"""Megatron-LM's launch scripts and those of its forks, or the arguments themselves, a log's among them.

Leaves out what an argument means (`read`).
"""

from __future__ import annotations

import re
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job
from gnomon.formats.megatron.read import read_megatron
from gnomon.formats.megatron.write import draft

PRINTED = r"\bmicro_batch_size( \.{3,} |=)\d+.*\btensor_model_parallel_size( \.{3,} |=)\d+"
"""Of a log that begins with its arguments, in the order of the alphabet or of their definition."""


def _looks(sample: Sample) -> bool:
    """Options that Megatron-LM alone has, in a shell script or a list of arguments."""
    if sample.values or sample.path.suffix == ".py":
        return False
    if re.search(PRINTED, sample.text, re.DOTALL) is not None:
        return True
    return (
        re.search(r"--(tensor-model-parallel-size|num-layers|micro-batch-size|num-attention-heads)\b", sample.text)
        is not None
    )


def _read(path: Path, context: ReadContext) -> Job:
    return read_megatron(path, context=context)


FORMAT = Format(
    name="megatron",
    program="NVIDIA/Megatron-LM 0.20.0 and forks",
    files="launch scripts (read, never run), arguments, or a log that prints them",
    looks=_looks,
    read=_read,
    write=draft,
    stack="megatron-lm",
)

"""DeepSpeed's JSON files, which leave the model and the sequences to the code around them.

Leaves out what a field means (`read`).
"""

from __future__ import annotations

from pathlib import Path

from gnomon.formats.deepspeed.read import read_deepspeed
from gnomon.formats.deepspeed.write import draft
from gnomon.formats.format import Format, Sample
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job

KEYS = ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu")


def _looks(sample: Sample) -> bool:
    return sample.path.suffix == ".json" and any(key in sample.values for key in KEYS)


def _read(path: Path, context: ReadContext) -> Job:
    return read_deepspeed(path, context=context)


FORMAT = Format(
    name="deepspeed",
    program="deepspeedai/DeepSpeed 0.19.6",
    files="JSON of `--deepspeed_config`",
    looks=_looks,
    read=_read,
    write=draft,
    stack="deepspeed",
)

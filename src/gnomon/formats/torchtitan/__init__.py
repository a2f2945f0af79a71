"""torchtitan's TOML files, the flags of its newer form, and its `config_registry.py`.

Leaves out what a field means (`read`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gnomon.formats.format import Format, Sample
from gnomon.formats.given import ReadContext
from gnomon.formats.job import Job, read_source
from gnomon.formats.torchtitan.read import read_torchtitan
from gnomon.formats.torchtitan.registry import is_registry, registry_fields
from gnomon.formats.torchtitan.write import draft


def _looks(sample: Sample) -> bool:
    if sample.path.suffix == ".py":
        return is_registry(sample.text)
    return (sample.path.suffix == ".toml" and sample.has("model", "training")) or sample.text.lstrip().startswith(
        ("--module", "--config")
    )


def _read(path: Path, context: ReadContext) -> Job:
    if path.suffix != ".py":
        return read_torchtitan(path, devices=context.devices, context=context)
    text, file = read_source(path)
    settings = dict(context.settings)
    registry_name = settings.pop("config", None)
    family = settings.pop("model.name", path.resolve().parent.name)
    fields = registry_fields(text, file, registry_name, family)
    return read_torchtitan(fields, devices=context.devices, context=replace(context, settings=settings))


FORMAT = Format(
    name="torchtitan",
    program="pytorch/torchtitan v0.2.2 and b5bcd76",
    files="TOML, flags of the newer form, config_registry.py",
    looks=_looks,
    read=_read,
    write=draft,
    stack="torchtitan",
)

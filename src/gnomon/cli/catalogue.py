"""`gnomon catalogue`: devices, clusters (nodes that can be named), models, stacks, schedules and methods; one in full,
or all in a table.

`run(options)` prints and returns 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gnomon import orders, schema
from gnomon.cli.options.tools import CatalogueOptions
from gnomon.cli.terminal import print_json, print_lines
from gnomon.formats.huggingface.known import READERS
from gnomon.hardware import Device, Node, catalogue
from gnomon.methods import MARKS, method
from gnomon.methods import every as every_method
from gnomon.models.presets import PRESETS
from gnomon.models.presets import model as preset
from gnomon.report.tables import Column, number, table, wrapped
from gnomon.software import GROUPS, stack, stacks

_KINDS = ("devices", "clusters", "models", "stacks", "schedules", "methods")


def run(options: CatalogueOptions) -> int:
    """Print what is asked for."""
    if options.what is None:
        counts = {kind: len(_names(kind)) for kind in _KINDS}
        if options.json:
            print_json({kind: list(_names(kind)) for kind in _KINDS})
        else:
            rows = [(kind, str(count), f"gnomon catalogue {kind}") for kind, count in counts.items()]
            print_lines(table((_left_column("kind"), Column(name="known"), _left_column("list")), rows))
    elif options.name is not None:
        _one(options.what, options.name, as_json=options.json)
    elif options.json:
        print_json([_mapping(options.what, name) for name in _names(options.what)])
    else:
        print_lines(_TABLES[options.what]())
    return 0


def _left_column(name: str) -> Column:
    return Column(name=name, align="left")


def _names(kind: str) -> Sequence[str]:
    match kind:
        case "devices":
            return catalogue.device_names()
        case "clusters":
            return catalogue.node_names()
        case "models":
            return tuple(sorted(PRESETS, key=_by_size))
        case "schedules":
            return tuple(order.name for order in orders.every())
        case "methods":
            return tuple(entry.name for entry in every_method())
        case _:
            return stacks()


def _by_size(name: str) -> tuple[str | float, ...]:
    """Sorts `qwen3-8b` before `qwen3-14b`: numbers in a name count as such. Words and numbers alternate."""
    return tuple(float(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+(?:\.[0-9]+)?)", name)))


def _mapping(kind: str, name: str) -> Mapping[str, Any]:
    """One entry, as JSON has it; its own fields in the units of the catalogue's files."""
    match kind:
        case "devices":
            return schema.to_mapping(catalogue.device(name))
        case "clusters":
            return schema.to_mapping(_cluster(name))
        case "models":
            return _model(name)
        case "schedules":
            return _order(name)
        case "methods":
            return _method(name)
        case _:
            return schema.to_mapping(stack(name))


def _cluster(name: str) -> Node:
    """A node, or the one in which a device that is named alone stands (`--on`)."""
    device = None if name in catalogue.node_names(aliases=True) else catalogue.find_device(name)
    if device is None:
        return catalogue.node(name)
    row = catalogue.default_row(device)
    return catalogue.build_node(row, device, row.count)


def _method(name: str) -> Mapping[str, Any]:
    entry = method(name)
    return {
        "name": entry.name,
        "paper": entry.paper,
        "about": entry.about,
        "switch": entry.switch,
        "exactness": entry.exactness,
        "marks": list(entry.marks),
        "missing": dict(entry.missing),
        "params": [{"name": p.name, "about": p.about, "default": p.default} for p in entry.params],
    }


def _model(name: str) -> Mapping[str, Any]:
    graph = preset(name)
    return {
        "name": name,
        "parameters": graph.num_parameters(),
        "active_parameters": graph.num_active_parameters(),
        "layers": sum(call.repeat for call in graph.calls if call.first is not None),
        "blocks": [block.name for block in graph.blocks],
    }


def _one(kind: str, name: str, *, as_json: bool) -> None:
    mapping = _mapping(kind, name)
    if as_json:
        print_json(mapping)
        return
    print_lines(_shown(mapping, ""))


def _shown(mapping: Mapping[str, Any], indent: str) -> Iterator[str]:
    """A line for each field, values in a column; what a field holds itself, and rows of several fields, below it."""
    width = max((len(key) for key, value in mapping.items() if not _is_nested(value)), default=0)
    for key, value in mapping.items():
        if not _is_nested(value):
            yield from wrapped(_text(value) or "-", indent="", bullet=f"{indent}{key:<{width}}  ")
            continue
        yield f"{indent}{key}"
        if isinstance(value, Mapping):
            yield from _shown(value, indent + "  ")
            continue
        for row in value:
            # The first field of a row is its name, and needs no word before it.
            (_, first), *rest = ((name, _text(one)) for name, one in row.items() if one not in (None, ""))
            facts = "; ".join(text if name == "about" else f"{name} {text}" for name, text in rest)
            yield from wrapped(f"{first}: {facts}" if facts else first, indent=indent + "  ", bullet="- ")


def _is_nested(value: object) -> bool:
    """Whether it takes lines of its own."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value)


def _text(value: object) -> str:
    """A value in a line: lists by commas, yes and no, `-` for none."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_text(one)}" for key, one in value.items())
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return "-" if value is None else str(value)


def _order(name: str) -> Mapping[str, Any]:
    order = orders.find(name)
    return {
        "name": order.name,
        "title": order.title,
        "paper": order.paper,
        "stages": order.stages_text,
        "placement": order.placement,
        "backward": order.backward,
        "bubble": order.bubble,
        "activations": order.held,
        "microbatches": order.asks,
        "vocabulary": list(order.vocabulary),
        "names": dict(order.names),
    }


def _devices() -> Sequence[str]:
    columns = (
        _left_column("device"),
        Column(name="TFLOP/s"),
        _left_column("in"),
        *(Column(name=n) for n in ("GiB", "TB/s", "W")),
        _left_column("per"),
        _left_column("figures"),
    )
    return table(columns, [_device(catalogue.device(name)) for name in catalogue.device_names()])


def _device(device: Device) -> Sequence[str]:
    dtype = "bf16" if device.dense_peak.bf16 else "fp16" if device.dense_peak.fp16 else "fp32"
    return (
        device.name,
        number(device.flops_per_s(dtype) / 1e12, 4),
        dtype,
        f"{device.memory_bytes / 2**30:.1f}",
        number(device.memory_bytes_per_s / 1e12),
        "-" if device.power_w is None else f"{device.power_w:.0f}",
        device.per,
        device.confidence,
    )


def _clusters() -> Sequence[str]:
    columns = (
        _left_column("node"),
        Column(name="devices"),
        _left_column("device"),
        _left_column("inside"),
        _left_column("network"),
    )
    nodes = [catalogue.node(name) for name in catalogue.node_names()]
    return (
        *table(columns, [_node(node) for node in nodes]),
        "",
        *wrapped("Write 2xNODE, 4x8xDEVICE or parts joined by +; a device alone stands in its usual node.", indent=""),
    )


def _node(node: Node) -> Sequence[str]:
    network = f"{node.nics} x {node.nic.name}" if node.nic else "-"
    return (node.name, str(node.count), node.device.name, node.intra.name, network)


def _models() -> Sequence[str]:
    columns = (_left_column("model"), *(Column(name=n) for n in ("parameters", "for a token", "layers")))
    keys = ("parameters", "active_parameters", "layers")
    models = [_model(name) for name in _names("models")]
    rows = [(model["name"], *(f"{model[key]:,}" if model[key] else "-" for key in keys)) for model in models]
    known = table(columns, rows)
    read = wrapped(
        f"Or a Hugging Face config.json, or its folder, of model_type {', '.join(sorted(READERS))}.", indent=""
    )
    return (*known, "", *read)


def _stacks() -> Sequence[str]:
    columns = (_left_column("stack"), _left_column("version"), Column(name="facts"), Column(name="of"))
    records = [stack(name) for name in stacks()]
    known = {record.name: len({fact.field for fact in record.facts}) for record in records}
    return table(columns, [(r.name, r.version, str(known[r.name]), str(len(GROUPS))) for r in records])


def _schedules() -> Sequence[str]:
    names = ("schedule", "stages", "backward", "activations")
    rows = [
        (
            order.name,
            f"{order.stages_text}, in a V" if order.placement == "v" else order.stages_text,
            order.backward,
            order.held or "-",
        )
        for order in orders.every()
    ]
    explanation = (
        "stages: of a rank; activations: microbatches of a rank's layers that it keeps at once; p ranks, v stages on "
        "each, m microbatches. gnomon catalogue schedules NAME says its bubble, what it asks for, and its paper."
    )
    return (*table(tuple(_left_column(name) for name in names), rows), "", *wrapped(explanation, indent=""))


def _methods() -> Sequence[str]:
    columns = [_left_column(name) for name in ("method", "turned on by", *MARKS)]
    rows = [(m.name, m.switch, *("yes" if mark in m.marks else "-" for mark in MARKS)) for m in every_method()]
    return (
        *table(columns, rows),
        "",
        *wrapped("gnomon catalogue methods NAME says what one does, and why what is missing is.", indent=""),
    )


_TABLES = {
    "devices": _devices, "clusters": _clusters, "models": _models, "stacks": _stacks, "schedules": _schedules,
    "methods": _methods,
}  # fmt: skip

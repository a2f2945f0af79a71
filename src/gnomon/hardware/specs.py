"""Clusters from what people write: `4x8xh100-sxm`, `8xa100-sxm-80gb`, `2xaws-p5`, a mix of those, or a file.

`parse_cluster(spec)` returns a Cluster whose `assumptions` say what the spec left open and the catalogue filled in.
Files are `gnomon.cluster/1` in TOML; there, devices, links and nodes may be catalogue names, and a node may start from
another with `base`. Leaves out measuring: `calibrate` writes such files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gnomon import schema
from gnomon.errors import CatalogueError, InputError
from gnomon.hardware import catalogue
from gnomon.hardware.local import local_file, processes_of, with_processes
from gnomon.hardware.types import Cluster, Device, Node, NodeGroup
from gnomon.hardware.usual import plain, usual
from gnomon.schema.toml import parse_toml
from gnomon.units import MAX_DEVICES

# (a x)(b x)name: a is a number of nodes where b is there too.
_PART = re.compile(r"(?:(?P<a>[0-9]{1,18})x)?(?:(?P<b>[0-9]{1,18})x)?(?P<name>[a-z0-9][a-z0-9._-]*)")

_NO_NAME = re.compile(r"[0-9][0-9.e]*x|[0-9]{1,2}$")
"""A name that begins with a third count, or is a count alone: such a part is refused as unreadable."""


def parse_cluster(spec: str) -> Cluster:
    """The cluster that a spec names.

    spec: parts joined by `+`, each `NODESxDEVICESxDEVICE`, `DEVICESxDEVICE` (one node), `NODESxNODE` or a bare name;
        or the path of a file (it ends with `.toml` or holds a `/`). A device may be named as people type it, as in
        `8xA100-80G` or `h100:8` (`hardware.usual`); an assumption then names the device taken. `local` is this machine
        as `gnomon calibrate` measured it, `local:2` two processes of it; without a calibration it is guessed, one
        process or as many as asked.
    Raises CatalogueError for a name, a count or a form that cannot be; InputError for a file that cannot be read.
    """
    text = spec.strip()
    if text.endswith(".toml") or "/" in text or "\\" in text:
        return load_cluster_file(text)
    if text.lower() == "local" or text.lower().startswith("local:"):
        return _local(processes_of(text.lower()))
    groups: list[NodeGroup] = []
    assumptions: list[str] = []
    for part in text.lower().split("+"):
        added, assumed = _part(plain(part.strip()), spec)
        groups += added
        assumptions += [line for line in assumed if line not in assumptions]
    total = sum(group.count * group.node.count for group in groups)
    if total > MAX_DEVICES:
        raise CatalogueError(f"{spec[:64]!r} has {total} devices; the limit is {MAX_DEVICES}")
    return Cluster(name=text.lower(), groups=tuple(groups), assumptions=tuple(assumptions))


def local_cluster(num_processes: int) -> Cluster:
    """This machine as `num_processes` ranks joined by loopback; what one process gets of it is a guess."""
    device = catalogue.device("cpu-process")
    node = catalogue.build_node(catalogue.node_row("local"), device, num_processes)
    return Cluster(
        name=f"{num_processes}x{device.name}",
        groups=(NodeGroup(node=node),),
        assumptions=_unchecked(device) + _unchecked(node),
    )


def _local(count: int | None) -> Cluster:
    """This machine as so many processes (None: as measured, or one): from its calibration, or guessed where there is
    none, which an assumption says."""
    path = local_file()
    if path.is_file():
        return with_processes(load_cluster_file(path), count)
    guess = local_cluster(count or 1)
    note = f"this machine was not measured: round guesses; run `gnomon calibrate` (it would be read from {path})"
    return replace(guess, assumptions=(note, *guess.assumptions))


def load_cluster_file(path: str | Path) -> Cluster:
    """`load_cluster` of a file. InputError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(schema.MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise InputError(f"cannot read cluster file {str(path)!r}: {error.strerror}") from error
    return load_cluster(text, source=str(path))


def load_cluster(text: str | bytes, *, source: str = "cluster.toml") -> Cluster:
    """A Cluster from TOML, catalogue names allowed wherever a device, a link or a node is wanted.

    `schema.dump(cluster)` writes all figures out, and reads back equal. Raises what `schema.load` does, and
    CatalogueError for unknown names.
    """
    mapping = parse_toml(text, source)
    if "schema" not in mapping:
        missing = "Missing header" if mapping else "It is empty"
        raise InputError(f'{source}: {missing}; the first line must be `schema = "{Cluster.SCHEMA}"`', "$")
    groups = mapping.get("groups")
    if isinstance(groups, list):
        mapping["groups"] = [_filled_group(group) for group in groups]
    return schema.from_mapping(Cluster, mapping)


def _filled_group(group: Any) -> Any:
    """A table of `groups` with catalogue names replaced by their full tables: the node's, and inside the node those of
    its device and links. What is not such a table stays, for the reader to refuse with its path."""
    if not isinstance(group, dict) or "node" not in group:
        return group
    node = _filled(group["node"], catalogue.node)
    if isinstance(node, dict):
        for key, look_up in (
            ("device", catalogue.device),
            ("intra", catalogue.link),
            ("host", catalogue.link),
            ("nic", catalogue.link),
        ):
            if key in node:
                node[key] = _filled(node[key], look_up)
    return group | {"node": node}


def _filled(value: Any, look_up: Any) -> Any:
    """A name, or a table with `base`, as the full table; anything else as it is, for the reader to judge."""
    if isinstance(value, str):
        return schema.to_mapping(look_up(value))
    if isinstance(value, Mapping) and isinstance(value.get("base"), str):
        return schema.to_mapping(look_up(value["base"])) | {k: v for k, v in value.items() if k != "base"}
    return value


def _part(part: str, spec: str) -> tuple[list[NodeGroup], list[str]]:
    """(groups, assumptions) of one part of a spec. A name is looked up as a device, as a node, then as people type
    devices. spec: the whole, for errors. CatalogueError for what cannot be read, a count of 0, and an unknown name."""
    match = _PART.fullmatch(part)
    if match is None or _NO_NAME.match(match["name"]):
        raise CatalogueError(
            f"cannot read {part[:64]!r} in cluster {spec[:64]!r}; write NODESxDEVICESxDEVICE such as 4x8xh100-sxm, "
            "DEVICESxDEVICE, NODESxNODE such as 2xaws-p5, or the path of a .toml file"
        )
    numbers = [int(match[key]) for key in ("a", "b") if match[key] is not None]
    if 0 in numbers:
        raise CatalogueError(f"{part!r} in cluster {spec[:64]!r} has a count of 0; counts are 1 or more")
    name = match["name"]
    if (device := catalogue.find_device(name)) is not None:
        return _of_device(device, numbers)
    if name in catalogue.node_names(aliases=True):
        # `2xNODE` counts nodes, `2x4xNODE` nodes of 4 of its devices, `NODE` is one.
        count, devices = (*numbers, None, None)[:2] if numbers else (1, None)
        node = catalogue.node(name, devices)
        return [NodeGroup(node=node, count=count or 1)], list(_unchecked(node.device) + _unchecked(node))
    if (device_meant := usual(name)) is not None:
        groups, assumed = _of_device(device_meant.device, numbers)
        return groups, [device_meant.sentence(name), *assumed]
    known = catalogue.device_names(aliases=True) + catalogue.node_names(aliases=True)
    raise CatalogueError(
        f"unknown device or node {name[:64]!r} in cluster {spec[:64]!r}{catalogue.suggest(name, known)}; "
        "`gnomon catalogue devices` and `gnomon catalogue clusters` list all, and a .toml file may describe others"
    )


def _of_device(device: Device, numbers: list[int]) -> tuple[list[NodeGroup], list[str]]:
    """(groups, assumptions) of `NODESxDEVICESxDEVICE`, `DEVICESxDEVICE` or `DEVICE`, in nodes like the catalogue's
    usual one for the device. numbers: the counts that were written."""
    row = catalogue.default_row(device)
    nodes, per_node = (numbers[0], numbers[1]) if len(numbers) == 2 else (1, numbers[0] if numbers else 1)
    groups = []
    assumptions = []
    # `64xh100-sxm` names no node of 64: no such machine is sold, and whole nodes of the usual size make it.
    if len(numbers) == 1 and per_node > row.count and per_node % row.count == 0:
        nodes, per_node = per_node // row.count, row.count
        assumptions.append(f"{numbers[0]} x {device.name}: taken as {nodes} nodes of {per_node}")
    # Nodes of a tray's size are trays of a rack that share an NVLink domain (or a slice of TPUs): each domain is a
    # node.
    if row.tray == per_node and nodes > 1:
        groups = _racks(row, device, nodes)
        sizes = ", ".join(f"{group.count} x {group.node.count}" for group in groups)
        assumptions.append(f"{nodes} trays of {per_node} {device.name} in {_domain(device)}: {sizes} devices")
    else:
        groups = [NodeGroup(node=catalogue.build_node(row, device, per_node), count=nodes)]
    node = groups[0].node
    network = f", {node.nics} x {node.nic.name} a node" if node.nic else ""
    assumptions.append(f"{device.name} in nodes like {row.name}: {node.intra.name} inside{network}")
    return groups, [*assumptions, *_unchecked(device), *_unchecked(node)]


def _domain(device: Device) -> str:
    return "slices" if device.kind == "tpu" else "NVLink domains"


def _racks(row: catalogue.NodeRow, device: Device, trays: int) -> list[NodeGroup]:
    """Trays spread evenly over as few racks as hold them, as schedulers give blocks of alike segments (64 trays are 4
    racks of 16, not 3 of 18 and one of 10); where that leaves a rest, racks are filled one after the other."""
    tray = row.tray or row.count  # devices
    whole = row.count // tray  # trays of a full rack
    racks = -(-trays // whole)
    if trays % racks == 0:
        return [NodeGroup(node=catalogue.build_node(row, device, trays // racks * tray), count=racks)]
    full, rest = divmod(trays, whole)
    groups = [NodeGroup(node=catalogue.build_node(row, device, row.count), count=full)]
    return [*groups, NodeGroup(node=catalogue.build_node(row, device, rest * tray))]


def _unchecked(what: Device | Node) -> tuple[str, ...]:
    """An assumption that names the figures of a catalogue entry that were not checked against its source, if any."""
    if what.confidence == "checked":
        return ()
    figures = ", ".join(what.unchecked) or "all figures"
    return (f"{what.name}: not checked against its source: {figures}",)

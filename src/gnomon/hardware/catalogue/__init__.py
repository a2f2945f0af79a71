"""The catalogue: devices, links, nodes and prices that exist, read from the TOML files beside this module.

Looks names up (`device`, `link`, `node`, `prices`), and lists them; each returns the frozen types of
`gnomon.hardware.types`. A file is read when first needed and kept. Leaves out any measured efficiency: only what
vendors state, each row with its source, date and what of it nobody has checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from gnomon import schema
from gnomon.errors import CatalogueError
from gnomon.hardware.types import Confidence, Device, Link, Node, Price
from gnomon.units import Bytes, BytesPerS

_DEVICE_FILES = ("nvidia", "amd", "tpu", "cpu", "workstations")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A Node as its file has it: other rows by name. The fields that are not described here are those of Node."""

    name: str
    """As in Node."""
    device: str
    """What it holds when it is asked for by its own name."""
    count: int
    """Most devices in it."""
    intra: str
    """As in Node, a link's name."""
    topology: Literal["switch", "mesh", "ring", "torus2d", "torus3d", "bus"]
    """As in Node."""
    host: str
    """As in Node, a link's name."""
    source: str
    """As in Node."""
    date: str
    """As in Node."""
    default_for: tuple[str, ...] = ()
    """Devices that are put into this node when a spec names only the device."""
    tray: int | None = None
    """Devices of one server, where a node is a rack of several: `16x4x...` then means 16 trays, not 16 nodes."""
    pair_bytes_per_s: BytesPerS | None = None
    """As in Node."""
    mesh_peers: int = 7
    """As in Node."""
    devices_per_host_link: int = 1
    """As in Node."""
    nic: str | None = None
    """As in Node, a link's name."""
    nics: int = 0
    """As in Node."""
    host_memory_bytes: Bytes | None = None
    """As in Node."""
    host_memory_bytes_per_s: BytesPerS | None = None
    """As in Node."""
    host_cores: int | None = None
    """As in Node."""
    disk_read_bytes_per_s: BytesPerS | None = None
    """As in Node."""
    disk_write_bytes_per_s: BytesPerS | None = None
    """As in Node."""
    confidence: Confidence = "checked"
    """As in Node."""
    unchecked: tuple[str, ...] = ()
    """As in Node."""
    note: str = ""
    """As in Node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFile:
    """One file of the catalogue."""

    SCHEMA: ClassVar[str] = "gnomon.catalogue/1"

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names -> names in this file."""
    usual: Mapping[str, str] = field(default_factory=dict)
    """Product that is built in several forms -> the device that is meant where nobody says which."""
    devices: tuple[Device, ...] = ()
    """Rows."""
    links: tuple[Link, ...] = ()
    """Rows."""
    nodes: tuple[NodeRow, ...] = ()
    """Rows."""
    prices: tuple[Price, ...] = ()
    """Rows."""


def device(name: str) -> Device:
    """The device of that name or alias. CatalogueError with the nearest names if there is none."""
    entry = find_device(name)
    if entry is None:
        raise _unknown("device", name, device_names(aliases=True))
    return entry


def find_device(name: str) -> Device | None:
    """The device of that name or alias, if there is one; reads no more files than it takes to find it."""
    for stem in _DEVICE_FILES:
        entry = _by_name(stem).get(name)
        if isinstance(entry, Device):
            return entry
    return None


def link(name: str) -> Link:
    """The link of that name. CatalogueError with the nearest names if there is none."""
    entry = _by_name("links").get(name)
    if not isinstance(entry, Link):
        raise _unknown("link", name, link_names())
    return entry


def node(name: str, count: int | None = None) -> Node:
    """The node of that name or alias, with `count` of its devices (default all).

    Fewer devices keep their share of network ports (rounded up) and of the host. CatalogueError if there is no such
    node, or if it holds fewer devices.
    """
    row = node_row(name)
    return build_node(row, device(row.device), row.count if count is None else count)


def node_row(name: str) -> NodeRow:
    """The row behind `node`."""
    row = _by_name("nodes").get(name)
    if not isinstance(row, NodeRow):
        raise _unknown("node", name, node_names(aliases=True))
    return row


def default_row(of: Device) -> NodeRow:
    """The node that a spec which names only this device is filled in with. CatalogueError if there is none."""
    for row in _file("nodes").nodes:
        if of.name in row.default_for:
            return row
    raise CatalogueError(f"no usual node is known for {of.name!r}; name a node, or write a cluster file")


def build_node(row: NodeRow, of: Device, count: int) -> Node:
    """The Node of a row, holding `count` devices `of`. CatalogueError if it does not hold so many."""
    if not 1 <= count <= row.count:
        nodes = -(-count // row.count)
        hint = f"; write {nodes}x{row.count}x{of.name}" if count > row.count else ""
        raise CatalogueError(f"{count} devices in a node {row.name!r}, which holds 1 to {row.count}{hint}")
    share = count / row.count
    memory, bandwidth, cores = row.host_memory_bytes, row.host_memory_bytes_per_s, row.host_cores
    return Node(
        **{name: getattr(row, name) for name in _COMMON},
        device=of,
        count=count,
        intra=link(row.intra),
        host=link(row.host),
        nic=None if row.nic is None else link(row.nic),
        nics=math.ceil(row.nics * share),
        host_memory_bytes=None if memory is None else round(memory * share),
        host_memory_bytes_per_s=None if bandwidth is None else bandwidth * share,
        host_cores=None if cores is None else max(1, round(cores * share)),
    )


def prices(of: str | None = None) -> tuple[Price, ...]:
    """Public prices, of all devices or of one (name or alias). CatalogueError if there is no such device."""
    device_name = None if of is None else device(of).name
    return tuple(price for price in _file("prices").prices if device_name in (None, price.device))


def device_names(*, aliases: bool = False) -> tuple[str, ...]:
    """Names of all devices, in the order of the files."""
    names = [row.name for stem in _DEVICE_FILES for row in _file(stem).devices]
    return (*names, *(alias for stem in _DEVICE_FILES for alias in _file(stem).aliases if aliases))


def link_names() -> tuple[str, ...]:
    """Names of all links."""
    return tuple(row.name for row in _file("links").links)


def node_names(*, aliases: bool = False) -> tuple[str, ...]:
    """Names of all nodes."""
    return (*(row.name for row in _file("nodes").nodes), *(_file("nodes").aliases if aliases else ()))


def usual_devices() -> Mapping[str, str]:
    """Product that is built in several forms (`h100`) -> the device that most machines have."""
    return {product_name: name for stem in _DEVICE_FILES for product_name, name in _file(stem).usual.items()}


# What `build_node` makes of a row itself: looked up by name, or scaled to the count. All other fields are copied.
_OWN = {"device", "count", "intra", "host", "nic", "nics", "host_memory_bytes", "host_memory_bytes_per_s", "host_cores"}
_COMMON = tuple(f.name for f in fields(Node) if f.name not in _OWN)


LISTED = {"device": "`gnomon catalogue devices` lists all", "node": "`gnomon catalogue clusters` lists all"}
"""What is looked for -> where all are listed."""


def _unknown(what: str, name: str, known: tuple[str, ...]) -> CatalogueError:
    return CatalogueError(
        f"unknown {what} {name[:64]!r}{suggest(name, known)}; {LISTED.get(what, 'known are ' + ', '.join(known))}"
    )


def suggest(name: str, known: tuple[str, ...]) -> str:
    """` (did you mean …?)`: what the name may be short for (`h100`), else what is fewest edits away from it, in full or
    without what follows the first `-` (`h101` is one edit from `h100-sxm`), else nothing."""
    lowered = name[:64].lower()
    close = [other for other in known if len(lowered) >= 2 and other.startswith(lowered)]
    if not close:
        away = {other: min(_edits(lowered, other), _edits(lowered, other.partition("-")[0])) for other in known}
        least = min(away.values(), default=0)
        close = [other for other in known if away[other] == least] if 3 * least <= max(len(lowered), 3) else []
    words = set(lowered.split("-"))
    close = close or [other for other in known if other.partition("-")[0] in words]
    return f" (did you mean {', '.join(repr(other) for other in close[:6])}?)" if close else ""


def _edits(a: str, b: str) -> int:
    """Letters put in, left out or replaced to make one of the other (Levenshtein's distance)."""
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (letter != other))
    return row[-1]


@cache
def _file(stem: str) -> CatalogueFile:
    return schema.load_packaged(CatalogueFile, Path(__file__).with_name(f"{stem}.toml"))


@cache
def _by_name(stem: str) -> Mapping[str, Device | Link | NodeRow]:
    read = _file(stem)
    rows: dict[str, Device | Link | NodeRow] = {}
    rows |= {row.name: row for row in read.devices}
    rows |= {row.name: row for row in read.links}
    rows |= {row.name: row for row in read.nodes}
    return rows | {alias: rows[name] for alias, name in read.aliases.items()}

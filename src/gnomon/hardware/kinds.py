"""Kinds of device in a cluster: which ranks stand on devices and networks that are alike.

`kinds_of(cluster)` returns them in order of their first device, `is_mixed` whether there are several. Leaves out how
fast they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gnomon.hardware.types import Cluster, Device, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Devices that are alike, with alike networks."""

    name: str
    """As in `h100-sxm-80gb`; with its network where kinds differ in that."""
    node: Node
    """One of its nodes."""
    devices: tuple[int, ...]
    """In the cluster."""


def kinds_of(cluster: Cluster) -> tuple[DeviceKind, ...]:
    """The kinds of a cluster, in order of their first device."""
    kinds: dict[tuple[object, ...], tuple[Node, list[int]]] = {}
    first = 0
    for group in cluster.groups:
        node, count = group.node, group.count * group.node.count
        # By its share of the network a device is the same in a whole node and in half of one.
        key = (node.device, node.intra, node.nic, node.nics / node.count)
        kinds.setdefault(key, (node, []))[1].extend(range(first, first + count))
        first += count
    names = [node.device.name for node, _ in kinds.values()]
    twins = {name for name in names if names.count(name) > 1}
    return tuple(
        DeviceKind(
            name=_full_name(node) if node.device.name in twins else node.device.name, node=node, devices=tuple(devices)
        )
        for node, devices in kinds.values()
    )


def _full_name(node: Node) -> str:
    network = f"{node.nics} x {node.nic.name}" if node.nic else "no network"
    return f"{node.device.name} ({node.count} a node, {network})"


def apart(devices: Iterable[Device]) -> tuple[str, ...]:
    """A line where devices of one job have different collectives libraries, which do not talk to each other."""
    libraries: dict[str, list[str]] = {}
    for device in devices:
        libraries.setdefault(device.collectives_library, []).append(device.name)
    if len(libraries) < 2:
        return ()
    who = " and ".join(f"{', '.join(dict.fromkeys(names))} ({library})" for library, names in libraries.items())
    return (
        f"one job over {who}: no program on record runs it, since these libraries do not talk to each other; priced as "
        f"if one library spanned both",
    )


def is_mixed(cluster: Cluster) -> bool:
    """Whether devices or their networks differ."""
    return len(kinds_of(cluster)) > 1

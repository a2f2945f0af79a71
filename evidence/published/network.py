"""The network between nodes in the words of a table's interconnect column: which port, how many to a node.

`ports_of(words, per_node, usual)` returns (link of the catalogue, its rate in Gb/s, ports a node), or None where the
words name no network, or no other than the device's usual one. Leaves out what lies within a node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

GENERATIONS = {"xdr": 800, "ndr": 400, "hdr": 200, "edr": 100, "fdr": 56, "qdr": 40}
"""Gb/s of a port of InfiniBand, four lanes (InfiniBand Trade Association, roadmap)."""

KINDS: tuple[tuple[str, Mapping[int, str]], ...] = (
    (r"slingshot", {200: "slingshot-200"}),
    (r"omni-?path|\bopa\b", {100: "omnipath-100"}),
    (r"\befa\b", {100: "efa-100", 400: "efa-400"}),
    (
        r"infiniband|\bib\b|[xnhefq]dr\b",
        {100: "infiniband-edr", 200: "infiniband-hdr", 400: "infiniband-ndr", 800: "infiniband-xdr"},
    ),
    (r"\beth|gbe\b|\btcp\b", {25: "ethernet-25", 100: "ethernet-100"}),
    (r"roce|rdma|connectx|\bcx-?\d|gbps|gb/s|gbit|tbps|tb/s", {100: "roce-100", 200: "roce-200", 400: "roce-400",
                                                                800: "roce-800"}),
)  # fmt: skip
"""(pattern of words, Gb/s of a port -> link); the last is what a bare rate is taken as."""

WITHIN = r"nvlink|nvswitch|pcie|xgmi|intra|ici\b|infinity fabric|within"
"""Of what lies within a node."""

RATE = r"(\d+(?:\.\d+)?) ?(t|g)(?:b(?:ps|it(?:/s|ps)?|/s|e)?)?(?![a-z])"
COUNTED = rf"(\d+) ?[x×*] ?(?:[a-z][\w-]* ){{0,3}}{RATE}"
OF_GENERATION = r"(\d+) ?[x×*] ?(?:[a-z][\w-]* ){0,3}(?:\d+ ?g\w*[/\w]* )?([xnhefq]dr)\b"
EACH = r"(?:per|/|each) ?(?:gpu|device|card|accelerator)"
ALL = r"(?:per|/|each) ?(?:node|server|host|machine)|total|aggregate|node-node|inter-?node"


def ports_of(words: str, per_node: int, usual: tuple[int, int]) -> tuple[str, int, int] | None:
    """(link, Gb/s, ports of a node of so many devices). usual: Gb/s of a port of the device's usual node, and ports."""
    parts = [part for part in re.split(r"[;,+]| and | with ", words) if not re.search(WITHIN, part.lower())]
    bytes_a_second = r"(\d+(?:\.\d+)?) ?GB(?:/s|ps)"
    text = " ".join(parts)
    text = re.sub(bytes_a_second, lambda m: f"{float(m[1]) * 8:g} Gb/s", text).lower()
    links = next((links for pattern, links in KINDS if re.search(pattern, text)), None)
    if links is None:
        return None
    gbps, ports = _ports(text, per_node, usual)
    if not gbps or not ports:
        return None
    nearest = min(links, key=lambda rate: (abs(rate - gbps), rate))
    return links[nearest], gbps, ports


def _ports(message: str, per_node: int, usual: tuple[int, int]) -> tuple[int, int]:
    """(Gb/s of a port, ports); zeros where only the usual network is named, or none."""
    if match := re.search(OF_GENERATION, message):
        return GENERATIONS[match[2]], int(match[1])
    if match := re.search(COUNTED, message):
        return _gbps(match[2], match[3]), int(match[1])
    named = next((rate for name, rate in GENERATIONS.items() if re.search(rf"{name}(?:[ -]?\d+)?\b", message)), 0)
    stated = re.search(RATE, message)
    gbps = _gbps(stated[1], stated[2]) if stated else named or (200 if "slingshot" in message else 0)
    if not gbps:
        return 0, 0
    if re.search(EACH, message):
        return gbps, per_node
    if re.search(ALL, message) or gbps > 800:
        return _divided(gbps, per_node)
    if gbps == usual[0] or not stated and not named:
        return 0, 0
    return gbps, usual[1] if named >= 200 else 1  # what is named by its generation alone is one of a usual number


def _gbps(number: str, unit: str) -> int:
    return round(float(number) * (1000 if unit == "t" else 1))


def _divided(total: int, per_node: int) -> tuple[int, int]:
    """A node's rate as ports: one for each device if such ports are made, else four, two or one."""
    for ports in (per_node, 8, 4, 2):
        if total % ports == 0 and total // ports in (25, 100, 200, 400, 800):
            return total // ports, ports
    return total, 1

"""The machines of a published run: its devices by the catalogue's names, in nodes, and the network that its row names.

`cluster(row)` returns the Cluster with notes on what the row leaves open; the catalogue refuses what is no device.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from math import gcd

from evidence.published.network import ports_of
from evidence.published.row import Row
from gnomon.errors import InputError
from gnomon.hardware import Cluster, NodeGroup, catalogue, parse_cluster

DEVICES = {
    "unstated (V100-class by magnitude)": ("v100-sxm-32gb", "device not stated: a V100 32 GB by its speed"),
    "a100": ("a100-sxm-80gb", "memory of the A100 not stated: taken as 80 GB"),
    "a100-sxm-80gb?": ("a100-sxm-80gb", "device not in the source that was read: taken as A100 80 GB"),
    "a100-40gb": ("a100-sxm-40gb", "form of the A100 not stated: taken as SXM"),
    "v100-sxm3-32gb(DGX-2H)": ("v100-sxm3-32gb", ""),
    "tpu7x-ironwood(chip)": ("tpu-7x", ""),
}
"""Names of the table -> (name in the catalogue, what was assumed)."""

DEVICE_WORDS = (
    (r"h100.*(96|hbm2e|500 ?w)", "h100-sxm-96gb"),
    (r"h100.*nvl", "h100-nvl-94gb"),
    (r"h100.*pcie", "h100-pcie-80gb"),
    (r"h100|p5\.\d*xlarge|a3-(?:high|mega)", "h100-sxm-80gb"),
    (r"gb300", "gb300-nvl72"),
    (r"gb200", "gb200-nvl72"),
    (r"h200|p5en?\.\d*[a-z]+|a3-ultra", "h200-sxm-141gb"),
    (r"b200|p6-b200|a4-high", "b200-sxm-180gb"),
    (r"b300", "b300-sxm-288gb"),
    (r"a[18]00.*pcie.*(?<!\d)40|a[18]00.*(?<!\d)40.*pcie", "a100-pcie-40gb"),
    (r"a800.*pcie", "a100-pcie-80gb"),
    (r"gh200", "gh200-96gb"),
    (r"h800", "h800-sxm-80gb"),
    (r"h20", "h20-sxm-96gb"),
    (r"a800", "a800-sxm-80gb"),
    (r"a?6000.?ada|ada.?6000", "rtx-6000-ada-48gb"),
    (r"(?:rtx.?)?a6000", "rtx-a6000-48gb"),
    (r"(?:rtx.?)?3090", "rtx-3090-24gb"),
    (r"(?:rtx.?)?4090(?!.?d\b)", "rtx-4090-24gb"),
    (r"(?:rtx.?)?5090(?!.?d\b)", "rtx-5090-32gb"),
    (r"titan.?rtx|rtx.?titan", "titan-rtx-24gb"),
    (r"(?:rtx.?)?2080.?ti", "rtx-2080-ti-11gb"),
    (r"l40s|g6e\.\d*[a-z]+", "l40s-48gb"),
    (r"l40", "l40-48gb"),
    (r"l4|g6\.\d*[a-z]+|g2-standard", "l4-24gb"),
    (r"a40", "a40-48gb"),
    (r"a30", "a30-24gb"),
    (r"a10g|g5\.\d*[a-z]+", "a10g-24gb"),
    (r"a10", "a10-24gb"),
    (r"(?:tesla.?)?t4|g4dn\.\d*[a-z]+", "t4-16gb"),
    (r"(?:tesla.?)?p100", "p100-sxm-16gb"),
    (r"v100.*dgx-?2|dgx-?2.*v100", "v100-sxm3-32gb"),
    (r"a100.*pcie", "a100-pcie-80gb"),
    (r"a100.*(?<!\d)(?:40|320 ?gb)|p4d\.\d*[a-z]+|a2-highgpu", "a100-sxm-40gb"),
    (r"a100|p4de\.\d*[a-z]+|a2-ultragpu", "a100-sxm-80gb"),
    (r"v100s?.*pcie.*(?<!\d)16|v100.*(?<!\d)16.*pcie", "v100-pcie-16gb"),
    (r"v100s?.*pcie", "v100-pcie-32gb"),
    (r"v100.*(?<!\d)16|p3\.\d*xlarge", "v100-sxm-16gb"),
    (r"v100|p3dn\.\d*[a-z]+", "v100-sxm-32gb"),
    (r"mi355", "mi355x-288gb"),
    (r"mi325", "mi325x-256gb"),
    (r"mi350", "mi350x-288gb"),
    (r"mi300x?(?!a)", "mi300x-192gb"),
    (r"mi100", "mi100-32gb"),
    (r"mi210", "mi210-64gb"),
    (r"mi250x", "mi250x-gcd"),
    (r"mi250", "mi250-gcd"),
    (r"tpu.*(7x|v7)|.*ironwood", "tpu-7x"),
    (r"(?:.*tpu.*)?v6e(?!\d)|trillium", "tpu-v6e"),
    (r"(?:.*tpu.*)?v5p(?!\d)", "tpu-v5p"),
    (r"(?:.*tpu.*)?(v5e|v5 ?lite(?:pod)?)(?!\d)", "tpu-v5e"),
    (r"tpu.*v4|v4(?=-\d+\b)", "tpu-v4"),
    (r"tpu.*v3|v3(?=-\d+\b)", "tpu-v3"),
)
"""(pattern of a device that the catalogue does not list by that name, the device it is). Instances of clouds are named
by their families' pages (aws.amazon.com/ec2/instance-types, cloud.google.com/compute/docs/gpus; read 2026-11-23). An
A800 on a card is an A100 on a card but for its bridge."""

COUNTED = r"^(\d+) ?[x×*] ?(?:(\d+) ?[x×*] ?)?"
"""What stands before a device whose number is in the name: `8xH100`, `4x8xA100`."""

TITAN_H100 = r"torchtitan"
"""Its benchmarks' H100 have 96 GB of HBM2e at 2.4 TB/s and 500 W (torchtitan benchmarks/llama3_h100_202412)."""

NETWORKS = (
    (r"Omni-Path", "jean-zay-a100", "omnipath-100", 4),
    (r"1600 Gbps", None, "roce-200", 8),
    (r"800 Gbps total/node", None, "infiniband-hdr", 4),
    (r"EDR", None, "infiniband-edr", 1),
    (r"RoCE 400 Gbps per GPU", None, "roce-400", 8),
    (r"^400 Gbps$", None, "roce-100", 4),
    (r"^800 Gbps$", None, "roce-100", 8),
)
"""(pattern of the interconnect column, node, port, ports a node). What matches none keeps the device's usual node.
Nodes of four V100 in Jean Zay have four Omni-Path links too (www.idris.fr, its page of the hardware)."""


AWS_NODES = {
    "a100-sxm-40gb": "aws-p4d",
    "a100-sxm-80gb": "aws-p4de",
    "h100-sxm-80gb": "aws-p5",
    "h200-sxm-141gb": "aws-p5e",
    "b200-sxm-180gb": "aws-p6-b200",
}
"""Device -> node of Amazon's, where the column names its network."""


@lru_cache(maxsize=64)
def cluster(row: Row) -> tuple[Cluster, tuple[str, ...]]:
    """The machines, with the network that the row names."""
    device, note = _device(row)
    if row.num_devices is None:
        raise InputError("num_devices not given")
    devices = row.num_devices
    if device == "v100-sxm-32gb" and row.devices_per_node == 16:
        device = "v100-sxm3-32gb"  # only a DGX-2 has sixteen
    per_node, most = row.devices_per_node or _usual_tray(device), _largest_node(device)
    if per_node > most:
        note = f"{note}; " * bool(note) + f"nodes of {per_node} taken as nodes of {most}, the most on record"
        per_node = most
    if devices > per_node and devices % per_node:
        fitting = gcd(devices, per_node)
        note = f"{note}; " * bool(note) + f"{devices} devices do not fill nodes of {per_node}: nodes of {fitting}"
        per_node = fitting
    shape = (devices // per_node, per_node) if devices > per_node else (1, devices)
    match = next((rest for p, *rest in NETWORKS if re.search(p, row.interconnect or "", re.IGNORECASE)), None)
    node, port, ports, gbps = (*match, 0) if match else _network(row.interconnect or "", device, shape[1])
    if not match and port and shape[0] > 1:
        note = f"{note}; " * bool(note) + f"{ports} x {gbps} Gb/s between nodes ({port}): {row.interconnect}"
    return _cluster(device, shape, node, port, ports, gbps), (note,) if note else ()


def _network(words: str, device: str, per_node: int) -> tuple[str | None, str | None, int, int]:
    """(node, link, ports, Gb/s of one) that the words of a column name."""
    if not words or device not in catalogue.device_names(aliases=True) or device.startswith("tpu"):
        return None, None, 0, 0
    aws = AWS_NODES.get(catalogue.device(device).name)
    if aws and re.search(r"\befa\b|\baws\b", words.lower()):
        return aws, None, 0, 0
    node = parse_cluster(f"2x{per_node}x{device}").groups[0].node
    gbps = round(node.nic.bytes_per_s * 8 / 1e9) if node.nic else 0
    if (ports := ports_of(words, per_node, (gbps, node.nics))) is None:
        return None, None, 0, 0
    return None, ports[0], ports[2], ports[1]


def _usual_tray(device: str) -> int:
    """Devices of a host where the source does not say: trays and TPU hosts are packed into domains and slices."""
    if device not in catalogue.device_names(aliases=True):
        return 8
    usual = catalogue.default_row(catalogue.device(device))
    return usual.tray or min(usual.count, 8)


def _largest_node(device: str) -> int:
    known = device in catalogue.device_names(aliases=True)
    return catalogue.default_row(catalogue.device(device)).count if known else 1 << 20


def _device(row: Row) -> tuple[str, str]:
    """(name in the catalogue, what was assumed). A name of no device is returned as it is: the catalogue refuses it,
    with the nearest that it has. InputError for one that it cannot be asked for."""
    name = re.sub(COUNTED, "", row.device, flags=re.IGNORECASE)
    text = name.lower()
    if name in DEVICES:
        return DEVICES[name]
    if re.search(TITAN_H100, row.framework.lower()) and name in ("h100", "h100-sxm-80gb"):
        return "h100-sxm-96gb", "torchtitan's H100: the 96 GB part of its benchmark pages"
    if name in catalogue.device_names(aliases=True):
        return name, ""
    match = next((to for pattern, to in DEVICE_WORDS if re.search(rf"(?<![a-z])(?:{pattern})(?!\d)", text)), None)
    if match is None and re.search(r"[^a-z0-9.-]|^\d+x", text):  # what a cluster's text cannot hold
        raise InputError(f"unknown device {row.device[:60]!r}; `gnomon catalogue devices` lists those on record")
    return (name, "") if match is None else (match, f"device {name!r} taken as {match}")


@lru_cache(maxsize=512)
def _cluster(
    device: str, shape: tuple[int, int], node: str | None, port: str | None, ports: int, gbps: int = 0
) -> Cluster:
    nodes, per_node = shape
    if node is not None and catalogue.node(node).device.name == catalogue.device(device).name:
        return parse_cluster(f"{nodes}x{per_node}x{node}")
    made = parse_cluster(f"{nodes}x{per_node}x{device}")
    if port is None or nodes == 1:
        return made
    nic = catalogue.link(port)
    if gbps:
        nic = replace(nic, bytes_per_s=gbps * 1e9 / 8)
    groups = tuple(NodeGroup(node=replace(group.node, nic=nic, nics=ports), count=group.count) for group in made.groups)
    return replace(made, groups=groups)

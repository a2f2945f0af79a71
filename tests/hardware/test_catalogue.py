"""The catalogue: every row says per what, from where and when; figures that can be checked against each other agree."""

import re
import time
import tomllib
from collections.abc import Callable
from importlib.resources import files

import pytest

from gnomon import hardware
from gnomon.errors import CatalogueError
from gnomon.hardware import catalogue

DEVICES = [hardware.device(name) for name in hardware.device_names()]
LINKS = [hardware.link(name) for name in hardware.link_names()]
NODES = [hardware.node(name) for name in hardware.node_names()]
PRICES = list(hardware.prices())

WANTED = """v100-sxm-16gb v100-sxm-32gb v100-pcie-16gb v100-pcie-32gb a100-sxm-40gb a100-sxm-80gb a100-pcie-40gb
a100-pcie-80gb h100-sxm-80gb h100-sxm h100-pcie h100-nvl h100-sxm-96gb h200 b200 b300 gb200 gb300 gb200-nvl72
gb300-nvl72 l40s a10 rtx-4090 mi250x mi250 mi210 mi300x mi325x mi355x tpu-v4 tpu-v5e tpu-v5p tpu-v6e tpu-7x
cpu-process""".split()


@pytest.mark.parametrize("name", WANTED)
def test_devices_people_name_are_there_and_form_clusters(name: str) -> None:
    assert hardware.parse_cluster(f"2x{name}").num_devices == 2
    assert hardware.parse_cluster(name).devices == (hardware.device(name),)


def test_names_are_given_once() -> None:
    devices = hardware.device_names(aliases=True)
    nodes = hardware.node_names(aliases=True)
    every = [*devices, *nodes, *hardware.link_names(), *(price.name for price in PRICES)]
    assert sorted(set(devices) | set(nodes)) == sorted([*devices, *nodes])
    assert len(set(every)) == len(every)
    assert all(re.fullmatch(r"[a-z][a-z0-9._-]*", name) for name in every)


def test_every_row_of_the_files_says_from_where_when_and_per_what() -> None:
    rows = 0
    for path in sorted(files(catalogue).iterdir(), key=lambda p: p.name):
        if not path.name.endswith(".toml"):
            continue
        read = tomllib.loads(path.read_text(encoding="utf-8"))
        for kind in ("devices", "links", "nodes", "prices"):
            for row in read.get(kind, []):
                rows += 1
                assert len(row["source"]) > 10, row["name"]
                assert "2009" < row["date"] < "2027", row["name"]
                if kind == "devices":
                    assert row["per"] in ("package", "gcd", "chip", "process"), row["name"]
                    assert "dense_peak" in row, row["name"]
    assert rows == len(DEVICES) + len(LINKS) + len(NODES) + len(PRICES) > 100


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_peaks_are_dense_and_keep_the_ratios_of_the_hardware(device: hardware.Device) -> None:
    peak = device.dense_peak
    if peak.bf16 and peak.fp16:
        # MI100 alone multiplies bf16 at half the rate of fp16.
        assert peak.bf16 == peak.fp16 / (2 if device.arch == "cdna1" else 1)
    if peak.tf32 and peak.bf16:
        # 2 exactly but for rounding, and for 1100 where a B200 sheet rounds 1125.
        assert peak.bf16 / peak.tf32 == pytest.approx(2, rel=0.03)
    if peak.fp8 and peak.bf16:
        # A factor of four would be a figure with sparsity.
        assert peak.fp8 / peak.bf16 == pytest.approx(2, rel=0.02)
    if peak.fp4 and peak.fp8:
        assert 1.9 < peak.fp4 / peak.fp8 < 3.1
    if peak.fp32 and peak.bf16:
        assert peak.fp32 < peak.bf16


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_what_software_sees_is_a_little_less_than_what_is_sold_or_that_many_gib(device: hardware.Device) -> None:
    sold = device.marketed_memory_bytes
    sold_in_gib = sold / 10**9 * 2**30
    # XLA gives programs 95.74 GiB of a v5p, which is sold with 95 GB
    assert 0.88 * sold_in_gib < device.memory_bytes <= 1.01 * sold_in_gib
    assert 5e9 < device.memory_bytes_per_s < 1e13


@pytest.mark.parametrize(
    ("name", "sms", "flops_per_clock"),
    [
        # Dense FLOP per SM and clock at 16 bits, from the white papers: V100 8 tensor cores x 64 FMA, A100 4 x 256,
        # H100 4 x 512; CDNA3 2048 and CDNA4 4096 per CU.
        ("v100-sxm-32gb", 80, 1024),
        ("a100-sxm-80gb", 108, 2048),
        ("h100-sxm-80gb", 132, 4096),
        ("h200-sxm-141gb", 132, 4096),
        ("mi250x-gcd", 110, 1024),
        ("mi300x-192gb", 304, 2048),
        ("mi355x-288gb", 256, 4096),
    ],
)
def test_peaks_are_units_times_clock(name: str, sms: int, flops_per_clock: int) -> None:
    device = hardware.device(name)
    assert device.num_sms == sms
    assert device.clock_boost_hz is not None
    assert device.flops_per_s("fp16") == pytest.approx(sms * flops_per_clock * device.clock_boost_hz, rel=3e-3)


def test_published_figures() -> None:
    h100 = hardware.device("h100-sxm")
    assert (h100.flops_per_s("bf16"), h100.memory_bytes_per_s, h100.power_w) == (989.4e12, 3.35e12, 700.0)
    assert h100.fabric_bytes_per_s == 450e9
    custom = hardware.device("h100-sxm-96gb")
    assert (custom.memory_bytes_per_s, custom.power_w, custom.memory_bytes) == (2.4e12, 500.0, 95 * 2**30)
    # The factor of two that hides in MI250X: per GCD here, and the package is two of them.
    gcd = hardware.device("mi250x")
    assert (gcd.per, 2 * gcd.flops_per_s("bf16"), 2 * gcd.num_sms) == ("gcd", 383e12, 220)
    assert hardware.device("tpu-v5p").flops_per_s("bf16") == 459e12


def test_a_node_gives_a_device_the_fabric_that_the_device_has() -> None:
    for node in NODES:
        if node.intra.kind in ("nvlink", "xgmi", "ici"):
            if node.name == "jean-zay-a100":  # its source counts 4 links where the device has 12
                assert node.device.fabric_bytes_per_s == 3 * node.intra.bytes_per_s
                continue
            assert node.device.fabric_bytes_per_s == node.intra.bytes_per_s, node.name
        if node.topology == "mesh":
            assert node.count <= node.mesh_peers + 1, node.name
        if node.pair_bytes_per_s is not None:
            assert node.pair_bytes_per_s < node.intra.bytes_per_s, node.name


@pytest.mark.parametrize(
    ("name", "bytes_per_s"),
    [
        ("dgx-a100", 200e9),
        ("dgx-h100", 400e9),
        ("aws-p4d", 50e9),
        ("aws-p5", 400e9),
        ("jean-zay-a100", 50e9),
        ("dgx-b300", 800e9),
    ],
)
def test_network_of_a_node(name: str, bytes_per_s: float) -> None:
    assert hardware.node(name).nic_bytes_per_s == bytes_per_s


def test_part_of_a_node_keeps_its_share() -> None:
    whole, half = hardware.node("dgx-h100"), hardware.node("dgx-h100", 4)
    assert (half.count, half.nics, half.host_cores) == (4, 4, 56)
    assert half.host_memory_bytes == 2**40
    assert half.intra == whole.intra
    assert hardware.node("aws-p4d", 1).nics == 1  # half a port rounds up


def test_prices_are_of_known_devices() -> None:
    assert all(price.device in hardware.device_names() for price in PRICES)
    assert {price.device for price in hardware.prices("h100-sxm")} == {"h100-sxm-80gb"}
    assert all(0.1 < price.dollars_per_device_hour < 20 for price in PRICES)


@pytest.mark.parametrize(
    ("look_up", "name", "says"),
    [
        (hardware.device, "h100-smx", "did you mean 'h100-sxm'"),
        (hardware.device, "h100", "'h100-sxm-80gb', 'h100-sxm-96gb'"),
        (hardware.device, "h101", "did you mean 'h100-sxm-80gb', 'h100-sxm-96gb'"),
        (hardware.device, "nvidia-h100", "did you mean 'h100-sxm-80gb'"),
        (hardware.device, "H20O", "did you mean 'h200-"),
        (hardware.link, "nvlink", "'nvlink2'"),
        (hardware.node, "dgx-h1000", "'dgx-h100'"),
        (hardware.prices, "zzz", "unknown device 'zzz'"),
        (hardware.device, "dgx-h100", "unknown device"),
    ],
)
def test_unknown_names_bring_the_nearest(look_up, name: str, says: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        look_up(name)
    assert says in str(caught.value)


def test_reading_all_of_it_is_quick() -> None:
    """About three times what tomllib takes to parse the files: however slow or busy the machine is."""

    def seconds(read: Callable[[], object]) -> float:
        start = time.process_time()
        assert read()
        return time.process_time() - start

    def read_all() -> object:
        catalogue._file.cache_clear()
        catalogue._by_name.cache_clear()
        return hardware.device_names(), hardware.node_names(), hardware.link_names(), hardware.prices()

    def parse() -> object:
        listed = files("gnomon.hardware.catalogue").iterdir()
        return [tomllib.loads(file.read_text()) for file in listed if file.name.endswith(".toml")]

    turns = [(seconds(read_all), seconds(parse)) for _ in range(5)]
    assert min(ours for ours, _ in turns) < 8 * min(theirs for _, theirs in turns)

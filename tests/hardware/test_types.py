"""Devices, links, nodes and clusters check themselves, and a cluster's file reads back exactly."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon import hardware, schema
from gnomon.errors import InputError, UnpricedError
from gnomon.hardware import Cluster, Device, Link, Node, NodeGroup, PeakFlops, Price, parse_cluster
from gnomon.hardware.kinds import apart

LAPTOP_CORE = Device(
    name="my-laptop",
    kind="cpu",
    arch="x86-64",
    per="process",
    dense_peak=PeakFlops(fp32=50e9),
    memory_bytes=4 * 2**30,
    marketed_memory_bytes=4 * 2**30,
    memory_bytes_per_s=8e9,
    num_sms=1,
    form_factor="one core",
    source="measured here",
    date="2026-11-21",
)
CABLE = Link(
    name="cable", kind="ethernet", bytes_per_s=1.25e9, latency_s=30e-6, source="measured here", date="2026-11-21"
)
BOX = Node(
    name="box",
    device=LAPTOP_CORE,
    count=4,
    intra=replace(CABLE, name="loopback", kind="loopback", bytes_per_s=2e9),
    topology="bus",
    host=replace(CABLE, name="dram", kind="loopback", bytes_per_s=10e9),
    nic=CABLE,
    nics=1,
    source="this desk",
    date="2026-11",
)


@pytest.mark.parametrize("what", [LAPTOP_CORE, CABLE, BOX])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"source": " "}, "no source"),
        ({"date": "2026"}, "YYYY-MM"),
        ({"date": "2026-13"}, "YYYY-MM"),
        ({"confidence": "partly"}, "exactly when"),
        ({"unchecked": ("source",)}, "exactly when"),
        ({"confidence": "partly", "unchecked": ("latency",)}, "is no field"),
    ],
)
def test_a_row_without_provenance_is_refused(what: Device | Link | Node, change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        replace(what, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", ["source", "date", "per", "dense_peak"])
def test_a_device_file_without_source_date_or_per_what_is_refused(missing: str) -> None:
    mapping = schema.to_mapping(LAPTOP_CORE)
    del mapping[missing]
    with pytest.raises(InputError, match=missing):
        schema.from_mapping(Device, mapping)


@pytest.mark.parametrize(
    "change",
    [{"memory_bytes": 0}, {"memory_bytes_per_s": -1.0}, {"num_sms": 0}, {"power_w": float("nan")}, {"l2_bytes": 0}],
)
def test_figures_must_be_positive(change: dict[str, float]) -> None:
    with pytest.raises(InputError, match="must be positive"):
        replace(LAPTOP_CORE, **change)  # type: ignore[arg-type]


def test_no_rate_at_all_and_impossible_links_are_refused() -> None:
    with pytest.raises(InputError, match="no rate at all"):
        PeakFlops()
    with pytest.raises(InputError, match="bytes_per_s must be positive"):
        replace(CABLE, bytes_per_s=0.0)
    with pytest.raises(InputError, match="latency_s"):
        replace(CABLE, latency_s=2.0)
    with pytest.raises(InputError, match="both `nic` and `nics`"):
        replace(BOX, nics=0)
    with pytest.raises(InputError, match="must be at least 1"):
        replace(BOX, count=0)
    with pytest.raises(InputError, match="at least 1 node"):
        NodeGroup(node=BOX, count=0)


def test_a_rate_the_device_has_not_is_never_guessed() -> None:
    v100 = hardware.device("v100-sxm")
    assert v100.flops_per_s("fp16") == 125e12
    with pytest.raises(UnpricedError, match="v100-sxm-32gb has no peak for 'bf16'; it has fp16, fp32"):
        v100.flops_per_s("bf16")
    assert hardware.device("h100-sxm").flops_per_s("fp8_e4m3") == hardware.device("h100-sxm").flops_per_s("fp8")
    with pytest.raises(UnpricedError, match="has no peak for 'fp4_e2m1'"):
        hardware.device("h100-sxm").flops_per_s("fp4_e2m1")
    assert hardware.device("mi250x").flops_per_s("fp32_matrix") == 47.9e12
    assert v100.flops_per_s("fp32_matrix") == v100.flops_per_s("fp32")


def test_a_cluster_counts_its_devices_in_rank_order() -> None:
    small = replace(BOX, name="small", count=2)
    cluster = Cluster(name="two kinds", groups=(NodeGroup(node=BOX, count=2), NodeGroup(node=small, count=3)))
    assert (cluster.num_nodes, cluster.num_devices) == (5, 14)
    assert [node.name for node in cluster.nodes] == ["box", "box", "small", "small", "small"]
    assert cluster.devices == (LAPTOP_CORE,) * 14


def test_a_cluster_that_cannot_be_is_refused() -> None:
    alone = replace(BOX, nic=None, nics=0)
    assert Cluster(name="desk", groups=(NodeGroup(node=alone),)).num_devices == 4
    with pytest.raises(InputError, match="no network port"):
        Cluster(name="desks", groups=(NodeGroup(node=alone, count=2),))
    with pytest.raises(InputError, match="no nodes"):
        Cluster(name="empty", groups=())
    with pytest.raises(InputError, match="oversubscription"):
        Cluster(name="desk", groups=(NodeGroup(node=BOX),), oversubscription=0.5)


LINKS = st.builds(
    Link,
    name=st.text("abc-", min_size=1),
    kind=st.sampled_from(["nvlink", "pcie", "ethernet"]),
    bytes_per_s=st.floats(1e-3, 1e15),
    latency_s=st.floats(0, 0.5),
    source=st.just("generated"),
    date=st.just("2026-11"),
    duplex=st.booleans(),
)
NODES = st.builds(
    Node,
    name=st.text("xyz", min_size=1),
    device=st.builds(replace, st.just(LAPTOP_CORE), memory_bytes=st.integers(1, 2**50), num_sms=st.integers(1, 500)),
    count=st.integers(1, 10**6),
    intra=LINKS,
    topology=st.sampled_from(["switch", "mesh", "ring", "torus2d", "bus"]),
    host=LINKS,
    nic=LINKS,
    nics=st.integers(1, 100),
    host_memory_bytes_per_s=st.none() | st.floats(1, 1e15),
    disk_read_bytes_per_s=st.none() | st.floats(1, 1e15),
    source=st.just("generated"),
    date=st.just("2026-11-21"),
    note=st.text(max_size=10).filter(lambda text: text.isprintable()),
)


@given(st.lists(st.builds(NodeGroup, node=NODES, count=st.integers(1, 100)), min_size=1, max_size=3), st.floats(1, 50))
def test_any_cluster_reads_back_exactly(groups: list[NodeGroup], oversubscription: float) -> None:
    cluster = Cluster(name="generated", groups=tuple(groups), oversubscription=oversubscription, assumptions=("a",))
    text = schema.dump(cluster)
    assert text.startswith('schema = "gnomon.cluster/1"\n')
    assert schema.load(Cluster, text) == cluster
    assert hardware.load_cluster(text) == cluster
    assert hash(cluster) == hash(hardware.load_cluster(text))


def test_a_price_is_of_one_device_hour() -> None:
    price = Price(
        name="x",
        device="h100-sxm-80gb",
        num_devices=8,
        dollars_per_hour=40.0,
        region="r",
        source="s",
        date="2026-11",
    )
    assert price.dollars_per_device_hour == 5.0


def test_collectives_libraries_that_do_not_talk_to_each_other_are_named() -> None:
    """NVIDIA's and AMD's in one job; two kinds of NVIDIA's share theirs."""
    mixed, alike = parse_cluster("1x4xh100-sxm+1x4xmi300x"), parse_cluster("1x4xh100-sxm+1x4xa100-sxm-80gb")
    [line] = apart(mixed.devices)
    assert "h100-sxm-80gb (NCCL) and mi300x-192gb (RCCL): no program on record runs it" in line
    assert apart(alike.devices) == apart(parse_cluster("4xmi300x").devices) == ()

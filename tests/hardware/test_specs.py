"""Clusters from what people write: specs, names, mixes and files."""

from pathlib import Path

import pytest

from gnomon import hardware, schema
from gnomon.errors import CatalogueError, InputError
from gnomon.hardware import Cluster, parse_cluster
from gnomon.hardware.kinds import apart
from gnomon.hardware.usual import usual


@pytest.mark.parametrize(
    ("spec", "nodes", "counts"),
    [
        ("4x8xh100-sxm", ["dgx-h100"] * 4, [8] * 4),
        ("8xa100-sxm-80gb", ["dgx-a100-80gb"], [8]),
        ("h100-sxm", ["dgx-h100"], [1]),
        ("2xaws-p5", ["aws-p5"] * 2, [8] * 2),
        ("dgx-h100", ["dgx-h100"], [8]),
        ("2x4xaws-p5", ["aws-p5"] * 2, [4] * 2),
        ("2x8xa100-sxm-80gb+1x8xv100-sxm-32gb", ["dgx-a100-80gb"] * 2 + ["dgx-1-v100-32gb"], [8] * 3),
        (" 2x8xA100-SXM-80GB + 1x8xv100-sxm-32gb ", ["dgx-a100-80gb"] * 2 + ["dgx-1-v100-32gb"], [8] * 3),
        ("16x4xgb200", ["gb200-nvl72-rack"], [64]),  # sixteen trays are one NVLink domain
        ("20x4xgb200", ["gb200-nvl72-rack"] * 2, [40, 40]),
        ("64x4xgb200", ["gb200-nvl72-rack"] * 4, [64] * 4),  # blocks of 16 trays, not three racks and a rest
        ("19x4xgb200", ["gb200-nvl72-rack"] * 2, [72, 4]),
        ("2x72xgb300", ["gb300-nvl72-rack"] * 2, [72] * 2),
        ("4xgb200", ["gb200-nvl72-rack"], [4]),
        ("2x8xgb200", ["gb200-nvl72-rack"] * 2, [8] * 2),  # not trays: two domains of eight
        ("2x128xtpu-v5e", ["tpu-v5e-slice"] * 2, [128] * 2),
        ("4xcpu", ["local"], [4]),
    ],
)
def test_specs(spec: str, nodes: list[str], counts: list[int]) -> None:
    cluster = parse_cluster(spec)
    assert [node.name for node in cluster.nodes] == nodes
    assert [node.count for node in cluster.nodes] == counts
    assert cluster.num_devices == sum(counts)


def test_what_the_spec_left_open_is_said() -> None:
    assert parse_cluster("4x8xh100-sxm").assumptions[0] == (
        "h100-sxm-80gb in nodes like dgx-h100: nvlink4 inside, 8 x infiniband-ndr a node"
    )
    assert parse_cluster("16x4xgb200").assumptions[0] == "16 trays of 4 gb200-nvl72 in NVLink domains: 1 x 64 devices"
    assert any("a10-24gb: not checked" in line for line in parse_cluster("a10").assumptions)
    doubled = parse_cluster("1x8xh100-sxm+1x8xh100-sxm").assumptions
    assert len(set(doubled)) == len(doubled)


@pytest.mark.parametrize(
    ("spec", "plain"),
    [
        ("8xh100", "1x8xh100-sxm-80gb"),
        ("8xA100-80G", "1x8xa100-sxm-80gb"),
        ("8xA100-SXM4-40GB", "1x8xa100-sxm-40gb"),
        ("8xa100-40", "1x8xa100-sxm-40gb"),
        ("2x8 H100 PCIe", "2x8xh100-pcie-80gb"),
        ("8 x NVIDIA H100 80GB", "1x8xh100-sxm-80gb"),
        ("h100:8", "1x8xh100-sxm-80gb"),
        ("2xh100x8", "2x8xh100-sxm-80gb"),
        ("gpu:a100:4", "1x4xa100-sxm-80gb"),
        ("8xh100sxm5", "1x8xh100-sxm-80gb"),
        ("v100-16g", "1x1xv100-sxm-16gb"),
        ("8x4090", "1x8xrtx-4090-24gb"),
        ("4xRTX4090", "1x4xrtx-4090-24gb"),
        ("2080ti", "1x1xrtx-2080-ti-11gb"),
        ("8xv5e", "1x8xtpu-v5e"),
        ("8xmi300x", "1x8xmi300x-192gb"),
        ("64xh100", "8x8xh100-sxm-80gb"),
        ("2x8h100+8xA100", "2x8xh100-sxm-80gb+1x8xa100-sxm-80gb"),
        ("p5.48xlarge", "1xaws-p5"),
    ],
)
def test_what_people_type_is_the_usual_device(spec: str, plain: str) -> None:
    typed, full = parse_cluster(spec), parse_cluster(plain)
    assert typed.groups == full.groups
    assert set(full.assumptions) <= set(typed.assumptions)


def test_the_usual_device_and_nodes_are_said() -> None:
    assert parse_cluster("16xh100").assumptions[:2] == (
        "'h100' taken as h100-sxm-80gb, the usual one (others: h100-sxm-96gb, h100-pcie-80gb, h100-nvl-94gb)",
        "16 x h100-sxm-80gb: taken as 2 nodes of 8",
    )
    assert parse_cluster("8xa100-sxm4-40gb").assumptions[0] == "'a100-sxm4-40gb' taken as a100-sxm-40gb"
    assert not any("taken as" in line for line in parse_cluster("8xh100-sxm").assumptions)


def test_every_device_is_found_by_its_product_form_and_memory() -> None:
    """No two devices share all three, so that the whole name in other letters is always that device."""
    for name in hardware.device_names():
        found = usual(name.upper().replace("-", " "))
        assert found is not None and found.device.name == name and not found.others


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("4x8xh100-smx", "did you mean 'h100-sxm'"),
        ("4x8xh100-40gb", "'h100-sxm-80gb'"),
        ("12xh100-sxm", "write 2x8xh100-sxm-80gb"),
        ("4x8", "cannot read"),
        ("16x16xh100-sxm", "holds 1 to 8"),
        ("0x8xh100-sxm", "count of 0"),
        ("4x0xh100-sxm", "count of 0"),
        ("", "cannot read ''"),
        ("4x", "NODESxDEVICESxDEVICE"),
        ("4x8xh100-sxm+", "cannot read ''"),
        ("4x8x2xh100-sxm", "cannot read"),
        ("-4x8xh100-sxm", "cannot read"),
        ("4.5x8xh100-sxm", "cannot read"),
        ("999999999x8xh100-sxm", "the limit is 4000000"),
        ("9" * 5000 + "xh100-sxm", "cannot read"),
        ("a" * 5000, "unknown"),
    ],
)
def test_specs_that_cannot_be(spec: str, says: str) -> None:
    with pytest.raises(CatalogueError) as caught:
        parse_cluster(spec)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "spec", ["4x8xh100-sxm", "2xaws-p5+1xaws-p4d", "20x4xgb200", "8xmi300x", "16xtpu-v5p", "4xcpu"]
)
def test_every_cluster_reads_back_exactly(spec: str, tmp_path: Path) -> None:
    cluster = parse_cluster(spec)
    path = tmp_path / "cluster.toml"
    path.write_text(schema.dump(cluster), encoding="utf-8")
    assert parse_cluster(str(path)) == cluster
    assert schema.load(Cluster, schema.dump(cluster)) == cluster


def test_a_file_may_name_what_the_catalogue_has(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        """
        schema = "gnomon.cluster/1"
        name = "ours"
        oversubscription = 2.0

        [[groups]]
        count = 4
        node = "dgx-h100"

        [[groups]]
        [groups.node]
        base = "dgx-a100"
        name = "old"
        nics = 2
        nic = "roce-100"
        device = {base = "a100-sxm", power_w = "300 W"}
        """
    )
    cluster = parse_cluster(str(path))
    new, old = cluster.groups
    assert (cluster.num_devices, new.count, new.node) == (40, 4, hardware.node("dgx-h100"))
    assert (old.node.name, old.node.nic_bytes_per_s, old.node.count) == ("old", 25e9, 8)
    assert (old.node.device.power_w, old.node.device.name) == (300.0, "a100-sxm-80gb")
    assert old.node.intra == hardware.link("nvlink3")


@pytest.mark.parametrize(
    ("body", "kind", "says"),
    [
        ('groups = [{node = "dgx-h1000"}]', CatalogueError, "'dgx-h100'"),
        ('groups = [{node = {base = "dgx-h100", intra = "nvlink9"}}]', CatalogueError, "'nvlink"),
        ('groups = [{node = {base = "dgx-h100", nicks = 3}}]', InputError, 'Unknown key "nicks"'),
        ("groups = [{node = 3}]", InputError, "$.groups[0].node"),
        ("groups = [3]", InputError, "$.groups[0]"),
        ("groups = 3", InputError, "$.groups"),
        ("groups = []", InputError, "has no nodes"),
        ('groups = [{node = "dgx-h100", count = 0}]', InputError, "at least 1 node"),
    ],
)
def test_files_that_cannot_be(body: str, kind: type, says: str) -> None:
    with pytest.raises(kind) as caught:
        hardware.load_cluster(f'schema = "gnomon.cluster/1"\nname = "x"\n{body}')
    assert says in str(caught.value)


def test_a_file_that_is_not_there_or_has_no_header(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        parse_cluster(str(tmp_path / "no.toml"))
    (tmp_path / "bare.toml").write_text('name = "x"')
    with pytest.raises(InputError, match='schema = "gnomon.cluster/1"'):
        parse_cluster(str(tmp_path / "bare.toml"))


def test_this_machine() -> None:
    laptop = hardware.local_cluster(4)
    assert (laptop.num_nodes, laptop.num_devices, laptop.devices[0].kind) == (1, 4, "cpu")
    assert any("not checked" in line for line in laptop.assumptions)
    with pytest.raises(CatalogueError, match="holds 1 to 256"):
        hardware.local_cluster(0)


def test_local_is_one_process_of_this_machine() -> None:
    cluster = parse_cluster("local")
    assert (cluster.num_devices, cluster.devices[0].kind) == (1, "cpu")


def test_devices_that_cannot_talk_to_each_other_are_named() -> None:
    nvidia, amd = hardware.device("h100-sxm"), hardware.device("mi300x")
    (line,) = apart([nvidia, amd, nvidia])
    assert line.startswith("one job over h100-sxm-80gb (NCCL) and mi300x") and "do not talk to each other" in line
    assert apart([nvidia, hardware.device("a100-sxm-80gb")]) == ()

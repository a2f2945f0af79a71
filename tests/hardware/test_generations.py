"""Every device of the catalogue is of a generation that is written down, and what a generation borrows is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gnomon.prices
from gnomon import hardware
from gnomon.hardware.generations import GENERIC, generation, generations
from gnomon.prices.allocator import workspace_bytes
from gnomon.software import stack

CURVES = Path(gnomon.prices.__file__).parent / "curves"


def test_every_device_of_the_catalogue_has_its_generation() -> None:
    for name in hardware.device_names():
        device = hardware.device(name)
        assert device.arch in generations(), name
        assert (device.generation.matrix_unit is not None) == (device.kind == "tpu"), name


def test_what_is_borrowed_is_there() -> None:
    for row in generations().values():
        assert row.curves == GENERIC or (CURVES / f"{row.curves}.toml").is_file(), row.name
        assert {row.numbers_of, row.decoding_of} <= set(generations()), row.name


def test_every_file_of_curves_is_somebodys() -> None:
    used = {row.curves for row in generations().values()}
    assert {path.stem for path in CURVES.glob("*.toml") if not path.stem.startswith(GENERIC)} == used - {GENERIC}


def test_a_generation_that_nobody_wrote_down_is_as_others_of_its_kind() -> None:
    device = replace(hardware.device("h100-sxm-80gb"), arch="rubin")
    assert device.generation == generation("rubin", "gpu")
    assert device.generation.curves == GENERIC
    assert not device.generation.switch_sums


def test_consumer_amperes_workspace_is_amperes() -> None:
    """An RTX 3090 had Hopper's 32 MiB a handle: its generation was missing from a list of older ones."""
    torchtitan = stack("torchtitan")
    assert workspace_bytes(hardware.device("rtx-3090-24gb"), torchtitan) == workspace_bytes(
        hardware.device("a100-sxm-80gb"), torchtitan
    )

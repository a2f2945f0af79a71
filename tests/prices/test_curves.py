"""Efficiency curves: every device has them, each row says where it is from, and what is assumed is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gnomon import schema
from gnomon.errors import InputError, UnpricedError
from gnomon.hardware import catalogue
from gnomon.prices import Provenance, attention_seconds, curves_for, gemm_seconds
from gnomon.prices.curves import CurveFile, curves_with, gemm_dtype

FOLDER = Path(__file__).parents[2] / "src/gnomon/prices/curves"
FILES = sorted(FOLDER.glob("*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_says_what_it_is_from(path: Path) -> None:
    """Measured: shapes and errors. Assumed: said so, and not given an error that nobody measured."""
    file = schema.load_file(CurveFile, path)
    assert file.arch == path.stem
    for row in (*file.gemm, *file.attention, *file.stream):
        source = row.provenance
        assert source.date >= "2026-11-21"
        assert ("assumed" in source.data) == (source.error == "unchecked"), source
        assert "assumed" in source.data or source.error.startswith(("held out ", "fit ")), source


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_as_the_writer_makes_them(path: Path) -> None:
    text = path.read_text()
    assert schema.dump(schema.load(CurveFile, text)) == text


def test_a_row_needs_its_provenance() -> None:
    with pytest.raises(InputError, match="must all be said"):
        Provenance(data="H100", date="2026-11-21", error="", range="all")


def test_measured_devices_are_in_the_catalogue() -> None:
    for path in FILES:
        for name in schema.load_file(CurveFile, path).measured:
            assert catalogue.device(name).arch == path.stem


@pytest.mark.parametrize("name", catalogue.device_names())
def test_every_device_has_curves_for_every_format_it_has_a_peak_for(name: str) -> None:
    device = catalogue.device(name)
    curves = curves_for(device)
    for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8", "fp4", "int8"):
        if getattr(device.dense_peak, dtype) is not None:
            assert curves.gemm_for(dtype).dtype == gemm_dtype(dtype)
    for direction in ("forward", "backward"):
        for head_dim in (64, 80, 128, 256):
            assert curves.attention_for(direction, head_dim).efficiency > 0


def test_what_was_not_measured_is_said() -> None:
    h100 = curves_for(catalogue.device("h100-sxm-80gb"), attention="flash3").assumptions
    assert not any("no kernel data" in text for text in h100)
    pcie = curves_for(catalogue.device("h100-pcie-80gb"), attention="flash3").assumptions
    assert any("no kernel data for h100-pcie-80gb: efficiencies of h100-sxm-80gb" in text for text in pcie)
    tpu = curves_for(catalogue.device("tpu-v5p")).assumptions
    assert any("no kernel data for tpu-v5p: assumed" in text for text in tpu)
    assert any("FlashAttention-2" in text for text in tpu)


def test_a_device_of_its_own_beats_its_generation() -> None:
    h100, h200 = (curves_for(catalogue.device(name)) for name in ("h100-sxm-80gb", "h200-sxm-141gb"))
    assert h200.gemm_for("bf16").device == "h200-sxm-141gb"
    assert h100.gemm_for("bf16").device == ""
    assert h200.gemm_for("fp8") == h100.gemm_for("fp8")


def test_a_head_size_takes_the_smallest_class_that_holds_it() -> None:
    curves = curves_for(catalogue.device("h100-sxm-80gb"), attention="flash3")
    assert [curves.attention_for("forward", size).head_dim for size in (40, 64, 80, 128, 160, 512)] == [
        64, 64, 96, 128, 192, 256,
    ]  # fmt: skip


def test_what_a_device_has_not_is_refused() -> None:
    curves = curves_for(catalogue.device("a100-sxm-80gb"))
    with pytest.raises(UnpricedError, match="no GEMM curve for 'fp8'"):
        curves.gemm_for("fp8")
    with pytest.raises(UnpricedError, match="no flash3 forward"):
        curves_for(catalogue.device("a100-sxm-80gb"), attention="flash3")


def test_limits_of_a_row() -> None:
    row = curves_for(catalogue.device("h100-sxm-80gb")).gemm_for("bf16")
    with pytest.raises(InputError, match="memory_efficiency must be from 0.01 to 1"):
        replace(row, memory_efficiency=1.2)


def test_amd_rows_say_which_published_product_they_are_from() -> None:
    for name, text in (
        ("mi300x-192gb", "MI300X, 668"),
        ("mi325x-256gb", "MI325X, 785"),
        ("mi355x-288gb", "MI355X, 1565"),
    ):
        assert any(text in message for message in curves_for(catalogue.device(name)).assumptions), name


@pytest.mark.parametrize(
    ("name", "most"),
    [("l4-24gb", 12e12), ("t4-16gb", 5e12), ("mi100-32gb", 36e12)],
)
def test_cards_reach_what_was_measured_on_them_in_fp32(name: str, most: float) -> None:
    """Large products of NeuSight's table: 7 to 9, 4 and 20 to 35 TFLOP/s; peaks are 30, 8 and 46."""
    device = catalogue.device(name)
    seconds = gemm_seconds(4096, 4096, 4096, dtype="fp32", device=device, curves=curves_for(device, attention="flash2"))
    assert most / 2 < 2 * 4096**3 / seconds < most


def test_an_older_library_slows_large_products_where_it_was_measured() -> None:
    h100, a100 = (catalogue.device(name) for name in ("h100-sxm-80gb", "a100-sxm-80gb"))
    size = (8192, 8192, 8192)
    new, old = (
        gemm_seconds(*size, dtype="bf16", device=h100, curves=curves_with(h100, "flash2", cublas))
        for cublas in (None, "12.1")
    )
    assert new / old == pytest.approx(0.91, abs=0.01)
    assert curves_with(a100, "flash2", "12.1") == curves_with(a100, "flash2")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_older_kernels_are_about_half_as_fast_as_flash_attention_2(head_dim: int) -> None:
    """Triton's reaches 100 and 95 of 176 and 203 TFLOP/s on A100, the first FlashAttention 110 and 83 (bars of the
    FlashAttention-2 release, 16k tokens, no mask)."""
    a100, heads = catalogue.device("a100-sxm-80gb"), 2048 // head_dim
    flops = 3.5 * 4 * 16384**2 * 2048
    rate = {
        kernel: flops
        / sum(
            attention_seconds(
                1, 16384, 16384, heads, heads, head_dim, causal=False, backward=backward, device=a100,
                curves=curves_with(a100, kernel),
            )
            for backward in (False, True)
        )
        for kernel in ("flash1", "triton", "flash2")
    }  # fmt: skip
    assert rate["flash1"] == pytest.approx({64: 110e12, 128: 83e12}[head_dim], rel=0.15)
    assert rate["triton"] == pytest.approx({64: 100e12, 128: 95e12}[head_dim], rel=0.05)
    assert 0.4 < rate["triton"] / rate["flash2"] < 0.65


def test_a_stack_s_attention_kernel_is_used_where_the_device_has_it() -> None:
    """cuDNN's fused attention has curves on Hopper; on Ampere libraries take FlashAttention-2 instead."""
    assert curves_with(catalogue.device("h100-sxm-80gb"), "cudnn").attention_kernel == "cudnn"
    result = curves_with(catalogue.device("a100-sxm-80gb"), "cudnn")
    assert result.attention_kernel == "flash2"
    assert not any("does not say which kernel" in line for line in result.assumptions)
    assert any(
        "does not say which kernel" in line for line in curves_with(catalogue.device("a100-sxm-80gb"), None).assumptions
    )


def test_cudnns_attention_by_release() -> None:
    """Four sequences of 4096 under a causal mask: NVIDIA's benchmark has 542 and 444 TFLOP/s under 9.1, 591 and 474 (of
    one, with eight key heads) under 9.19; releases between are between."""
    h100 = catalogue.device("h100-sxm-80gb")

    def tflops(cudnn: str | None, batch: int, heads: int, kv_heads: int, *, backward: bool) -> float:
        curves = curves_with(h100, "cudnn", cudnn=cudnn)
        sizes = (batch, 4096, 4096, heads, kv_heads, 128)
        seconds = attention_seconds(*sizes, causal=True, backward=backward, device=h100, curves=curves)
        return float(2 * batch * heads * 4096**2 * 128 * (2.5 if backward else 1) / seconds / 1e12)

    assert tflops("9.1", 4, 16, 16, backward=False) == pytest.approx(542, rel=0.04)
    assert tflops("9.1", 4, 16, 16, backward=True) == pytest.approx(444, rel=0.04)
    assert tflops("9.19", 1, 64, 8, backward=False) == pytest.approx(591, rel=0.08)
    assert tflops("9.19.1", 1, 64, 8, backward=True) == pytest.approx(474, rel=0.08)
    speeds = [tflops(release, 4, 16, 16, backward=True) for release in ("9.0", "9.1", "9.4", "9.13", "9.19", "9.22")]
    assert speeds[0] == speeds[1] and speeds[2] < speeds[3] < speeds[4] == speeds[5]


def test_a_release_of_cudnn_is_of_account_where_it_was_measured() -> None:
    """Not on Blackwell, whose rows are of 9.22 alone; not for other kernels and head sizes."""
    gb200, h100 = catalogue.device("gb200-nvl72"), catalogue.device("h100-sxm-80gb")
    assert curves_with(gb200, "cudnn", cudnn="9.1") == curves_with(gb200, "cudnn")
    old, new = curves_with(h100, "cudnn", cudnn="9.1"), curves_with(h100, "cudnn")
    changed = {(a.kernel, a.head_dim) for a, b in zip(old.attention, new.attention, strict=True) if a != b}
    assert changed == {("cudnn", 128)}


def test_without_a_stack_attention_is_what_programs_run_on_that_generation() -> None:
    """FlashAttention-2 has no kernels of Blackwell's own: at 0.6 of cuDNN's speed, no program takes it there."""
    result = curves_with(catalogue.device("b200-sxm-180gb"), None)
    assert result.attention_kernel == "cudnn"
    assert "attention runs as cuDNN's attention on blackwell: the stack does not say which kernel" in result.assumptions
    assert curves_with(catalogue.device("a100-sxm-80gb"), None).attention_kernel == "flash2"

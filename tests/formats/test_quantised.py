"""Layers that GPTQ, AWQ, compressed-tensors and fp8 folders hold mean what their own formulas say, code by code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gnomon.errors import InputError
from gnomon.formats.huggingface.quantised import gptq, method_of, served_format, shape_of, stored
from gnomon.storage.dense import bfloat16_of, wide_bfloat16

N, K, G = 16, 64, 32
CHANCE = np.random.default_rng(0)
CODES = CHANCE.integers(0, 16, (N, K)).astype(np.int64)
ZEROS = CHANCE.integers(1, 16, (N, K // G)).astype(np.int64)
SCALES = CHANCE.uniform(0.01, 0.1, (N, K // G)).astype(np.float16)


def wanted(codes: Any, zeros: Any, scales: Any) -> Any:
    """(code - zero) * scale, number by number."""
    out = np.zeros((N, K), np.float32)
    for n in range(N):
        for k in range(K):
            zero = zeros[n, k // G] if zeros is not None else 8
            out[n, k] = np.float32(codes[n, k] - zero) * np.float32(scales[n, k // G])
    return out


def in_words(codes: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Eight columns of four bits in a word; order: which column each four bits are."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i, column in enumerate(order):
        out |= codes[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def config(**given: Any) -> dict[str, Any]:
    return {"quantization_config": given}


def widened(config: Any, tensors: Any) -> Any:
    method = method_of(config)
    assert method is not None
    storage, arrays, shape = stored(method, tensors)
    return storage.widen(arrays, shape)


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq(form: str) -> None:
    """Codes packed along inputs, zeros along outputs, in the first form less one."""
    zeros = ZEROS - 1 if form == "gptq" else ZEROS
    tensors = {
        "qweight": in_words(CODES).T.copy(), "qzeros": in_words(zeros.T.copy()), "scales": SCALES.T.copy(),
        "g_idx": np.arange(K, dtype=np.int32) // G,
    }  # fmt: skip
    of = config(quant_method="gptq", bits=4, group_size=G, checkpoint_format=form)
    np.testing.assert_array_equal(widened(of, tensors), wanted(CODES, ZEROS, SCALES))


def test_awq() -> None:
    """Codes and zeros packed along outputs, in AutoAWQ's order."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": in_words(CODES.T.copy(), order), "qzeros": in_words(ZEROS.T.copy(), order),
        "scales": SCALES.T.copy(),
    }  # fmt: skip
    of = config(quant_method="awq", bits=4, group_size=G, version="gemm", zero_point=True)
    np.testing.assert_array_equal(widened(of, tensors), wanted(CODES, ZEROS, SCALES))


@pytest.mark.parametrize("asymmetric", [False, True])
def test_compressed_tensors(asymmetric: bool) -> None:
    """Codes packed along inputs, zeros along outputs; scales in bfloat16."""
    scales = bfloat16_of(SCALES.astype(np.float32))
    tensors = {"weight_packed": in_words(CODES), "weight_scale": scales, "weight_shape": np.array([N, K])}
    if asymmetric:
        tensors["weight_zero_point"] = in_words(ZEROS.T.copy()).T.copy()
    group = {"weights": {"num_bits": 4, "group_size": G, "symmetric": not asymmetric}}
    of = config(quant_method="compressed-tensors", format="pack-quantized", config_groups={"group_0": group})
    wide = (scales.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(widened(of, tensors), wanted(CODES, ZEROS if asymmetric else None, wide))


def test_eight_bits() -> None:
    codes = CHANCE.integers(-128, 128, (N, K)).astype(np.int8)
    scales = CHANCE.uniform(0.01, 0.1, (N, 1)).astype(np.float32)
    of = config(
        quant_method="compressed-tensors", format="int-quantized", config_groups={"g": {"weights": {"num_bits": 8}}}
    )
    np.testing.assert_array_equal(
        widened(of, {"weight": codes, "weight_scale": scales}), codes.astype(np.float32) * scales
    )
    of = config(quant_method="bitsandbytes", load_in_8bit=True)
    got = widened(of, {"weight": codes, "SCB": scales[:, 0] * 127})
    np.testing.assert_allclose(got, codes.astype(np.float32) * scales, rtol=3e-7)


def test_fp8_blocks_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.randn(N, K).to(torch.float8_e4m3fn)
    codes, scales = weight.view(torch.uint8).numpy(), CHANCE.uniform(0.5, 2, (2, 3)).astype(np.float32)
    of = config(quant_method="fp8", weight_block_size=[8, 24])  # the last block of columns is smaller
    spread = np.repeat(np.repeat(scales, 8, 0), 24, 1)[:, :K]
    got = widened(of, {"weight": codes, "weight_scale_inv": scales})
    np.testing.assert_array_equal(got, weight.float().numpy() * spread)
    got = widened(config(quant_method="fp8"), {"weight": codes, "weight_scale": np.float32(0.5)})
    np.testing.assert_array_equal(got, weight.float().numpy() * np.float32(0.5))


@pytest.mark.parametrize("name", ["int8", "int4", "int4_zeros", "fp8"])
def test_torchao_means_what_torchao_says(name: str) -> None:
    """`torchao.json`: layers that torchao 0.18 made and its own `dequantize()` of them, which rounds to bfloat16."""
    made = json.loads((Path(__file__).parent / "torchao.json").read_text())[name]
    given = made["tensors"]
    scales = np.array(given["_weight_scale"], np.float32)
    tensors = {
        "_weight_qdata": np.array(given["_weight_qdata"], np.uint8 if name == "fp8" else np.int8),
        "_weight_scale": bfloat16_of(scales) if "bfloat16" in made["scale_dtype"] else scales,
    }
    if "_weight_zero_point" in given:
        tensors["_weight_zero_point"] = np.array(given["_weight_zero_point"], np.int8)
    dtype = {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}} if made["bits"] == 4 else {}
    of = config(quant_method="torchao", quant_type={"default": {"_type": "…Config", "_data": dtype}})
    wide = widened(of, tensors)
    np.testing.assert_array_equal(wide_bfloat16(bfloat16_of(wide)), np.array(made["dequantised"], np.float32))
    method = method_of(of)
    assert method is not None
    storage, _, shape = stored(method, tensors)
    assert shape == (3, 32)
    kind = {"_type": "Float8WeightOnlyConfig" if name == "fp8" else "IntxWeightOnlyConfig", "_data": dtype}
    called = served_format(config(quant_method="torchao", quant_type={"default": kind}))
    assert called == ("fp8" if name == "fp8" else f"int{made['bits']}-wo")
    assert storage.name == {"int8": "int8", "int4": "int4-g16", "int4_zeros": "int4-g16-zeros", "fp8": "fp8-row"}[name]
    with pytest.raises(InputError, match="codes of 3 dims are in a packing that is not read"):
        shape_of(method, {"_weight_qdata": (2, 4, 8)})


def int4_config(packing: str) -> dict[str, Any]:
    """As transformers writes torchao's `Int4WeightOnlyConfig`."""
    data = {"group_size": G, "int4_packing_format": {"_type": "Int4PackingFormat", "_data": packing}}
    return config(quant_method="torchao", quant_type={"default": {"_type": "Int4WeightOnlyConfig", "_data": data}})


@pytest.mark.parametrize("name", ["tiles", "plain", "plain_int32"])
def test_packed_int4_of_torchao_means_what_torchao_says(name: str) -> None:
    """`torchao_int4.json`; tiles are filled up to 8 x 1,024, and what is beyond the matrix is dropped."""
    made = json.loads((Path(__file__).parent / "torchao_int4.json").read_text())[name]
    tensors = {}
    for part, given in made["tensors"].items():
        x = np.array(given["values"], np.float32 if "float" in given["dtype"] else given["dtype"])
        tensors[part] = bfloat16_of(x) if given["dtype"] == "bfloat16" else x
    shape = tuple(made["metadata"]["_data"]["shape"])
    of = int4_config({"tiles": "TILE_PACKED_TO_4D"}.get(name, name.upper()))
    wide = widened(of, {**tensors, "weight_shape": np.array(shape)})
    np.testing.assert_array_equal(wide, np.array(made["dequantised"], np.float32))
    method = method_of(of)
    assert method is not None and served_format(of) == "int4-wo"
    coded = {"_weight_qdata": tensors["_weight_qdata"].shape}
    assert shape_of(method, coded, shape) == shape
    assert shape_of(method, coded) == ((8, 1024) if name == "tiles" else shape)  # without the file's word
    with pytest.raises(InputError, match="the file says"):
        shape_of(method, coded, (9, 2048))
    with pytest.raises(InputError, match="are not in the packing"):
        shape_of(method, {"_weight_qdata": (2, 4, 8)})
    with pytest.raises(InputError, match="PRESHUFFLED; PLAIN, PLAIN_INT32, TILE_PACKED_TO_4D are read"):
        method_of(int4_config("PRESHUFFLED"))


def test_groups_in_the_order_of_activations() -> None:
    """GPTQ's `desc_act` and compressed-tensors' `actorder`: each column has the scale and the zero of the group that
    g_idx says; what points past the groups is no such file."""
    order = CHANCE.permutation(np.arange(K) // G).astype(np.int32)
    by, zeros = SCALES.astype(np.float32)[:, order], ZEROS[:, order]
    tensors = {
        "qweight": in_words(CODES).T.copy(), "qzeros": in_words((ZEROS - 1).T.copy()), "scales": SCALES.T.copy(),
        "g_idx": order,
    }  # fmt: skip
    of = config(quant_method="gptq", bits=4, group_size=G, desc_act=True)
    np.testing.assert_array_equal(widened(of, tensors), (CODES - zeros).astype(np.float32) * by)
    weights = {"num_bits": 4, "group_size": G, "actorder": "group", "symmetric": True}
    of = config(
        quant_method="compressed-tensors", format="pack-quantized", config_groups={"group_0": {"weights": weights}}
    )
    packed = {"weight_packed": in_words(CODES), "weight_scale": SCALES, "weight_shape": np.array([N, K])}
    np.testing.assert_array_equal(widened(of, {**packed, "weight_g_idx": order}), (CODES - 8).astype(np.float32) * by)
    static = widened(of, {**packed, "weight_g_idx": np.full(K, -1, np.int32)})
    np.testing.assert_array_equal(static, wanted(CODES, None, SCALES))
    for wrong in (order + 1, order[:-1], order - 1):
        with pytest.raises(InputError, match=r"groups of columns \(g_idx\)"):
            widened(of, {**packed, "weight_g_idx": wrong})


def test_gptq_of_three_bits() -> None:
    """Written as AutoGPTQ's loop writes them: ten codes, one over the border of two words, ten, one, ten."""
    n, k = 32, 64
    codes, zeros = CHANCE.integers(0, 8, (n, k)), CHANCE.integers(1, 8, (n, k // G))
    scales = CHANCE.uniform(0.01, 0.1, (n, k // G)).astype(np.float16)

    def words(rows: Any) -> Any:
        """(codes, across) -> (words, across)."""
        out = []
        for first in range(0, len(rows), 32):
            c = [row.astype(np.uint64) for row in rows[first : first + 32]]
            low = sum(c[j] << np.uint64(3 * j) for j in range(10)) | c[10] << np.uint64(30)
            middle = (
                c[10] >> np.uint64(2)
                | sum(c[11 + j] << np.uint64(3 * j + 1) for j in range(10))
                | c[21] << np.uint64(31)
            )
            high = c[21] >> np.uint64(1) | sum(c[22 + j] << np.uint64(3 * j + 2) for j in range(10))
            out += [(one & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32) for one in (low, middle, high)]
        return np.stack(out)

    tensors = {"qweight": words(codes.T), "qzeros": words(zeros - 1).T.copy(), "scales": scales.T.copy()}
    method = method_of(config(quant_method="gptq", bits=3, group_size=G))
    assert method is not None and shape_of(method, {name: one.shape for name, one in tensors.items()}) == (n, k)
    storage, arrays, shape = stored(method, tensors)
    by = np.repeat(scales.astype(np.float32), G, 1)
    np.testing.assert_array_equal(
        storage.widen(arrays, shape), (codes - np.repeat(zeros, G, 1)).astype(np.float32) * by
    )
    again = gptq(storage, arrays, shape)  # type: ignore[arg-type]
    assert all(np.array_equal(again[name], one) for name, one in tensors.items())


def test_awq_gemv() -> None:
    """Rows of outputs, codes in their order; groups are filled up to whole words, for 32 columns four of them."""
    filled = np.zeros((N, 32), np.int64)
    filled[:, : K // G] = ZEROS
    scales = np.zeros((N, 32), np.float16)
    scales[:, : K // G] = SCALES
    tensors = {"qweight": in_words(CODES), "qzeros": in_words(filled), "scales": scales}
    of = config(quant_method="awq", bits=4, group_size=G, version="gemv")
    method = method_of(of)
    assert method is not None and shape_of(method, {name: one.shape for name, one in tensors.items()}) == (N, K)
    np.testing.assert_array_equal(widened(of, tensors), wanted(CODES, ZEROS, SCALES))


def test_what_is_not_read_is_refused_by_name() -> None:
    assert method_of({"hidden_size": 64}) is None
    for given in (
        {"quant_method": "aqlm"},
        {"quant_method": "torchao", "quant_type": "int4_weight_only"},
        {"quant_method": "gptq", "bits": 5, "group_size": 128}, {"quant_method": "awq", "bits": 4, "version": "marlin"},
        {"quant_method": "gptq", "bits": "4"},
        {"quant_method": "compressed-tensors", "config_groups": {}}, {"quant_method": "awq", "bits": 8},
    ):  # fmt: skip
        with pytest.raises(InputError, match="quantization_config"):
            method_of({"quantization_config": given})
    method = method_of(config(quant_method="gptq", bits=4, group_size=G))
    assert method is not None
    with pytest.raises(InputError, match="has no qweight"):
        stored(method, {"weight": CODES})
    tensors = {"qweight": in_words(CODES).T.copy(), "qzeros": in_words((ZEROS - 1).T.copy()), "scales": SCALES.T.copy()}
    tensors["scales"][1, 3] = np.inf
    with pytest.raises(InputError, match="scales that are not finite"):
        stored(method, tensors)

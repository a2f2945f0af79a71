"""Weights that other programs have quantised, as values of `gnomon.storage`: one linear layer's tensors at a time.

`method_of(config)` reads a config.json's `quantization_config`; `stored(method, tensors)` gives (storage, arrays,
shape) of a layer whose tensors come under the endings that its program writes (`qweight`, `weight_packed`, …). No
number changes: `widen` gives what the program's own dequantisation gives. What the forms cannot hold (other bits,
several groups of layers) is refused by name. Pure: arrays of numpy, bfloat16 as uint16 and fp8 as
uint8. `layers_of` says which tensors of a folder are of which layer; `packed`, `gptq` and `awq` with their `…_config`
are the way back. Leaves out which layers a config leaves as they are, and NF4 (`four_bits`).
Source: AutoGPTQ 0.7 and GPTQModel (`qlinear`), AutoAWQ 0.2 (`WQLinear_GEMM`, `WQLinear_GEMV`), compressed-tensors 0.10
(`pack_quantized`, `naive_quantized`), transformers 5.23 (`finegrained_fp8`), bitsandbytes 0.50 (`Int8Params`),
torchao 0.18 (`Int8Tensor`, `IntxUnpackedToInt8Tensor`, `Float8Tensor`, `Int4Tensor`, `Int4PlainInt32Tensor`,
`Int4TilePackedTo4dTensor`, as its safetensors name their parts), ATen's int4mm.cu for the words of the last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnomon.errors import InputError
from gnomon.storage.dense import wide_bfloat16
from gnomon.storage.float8 import Float8
from gnomon.storage.form import Arrays, Shape, Storage
from gnomon.storage.integers import Integers
from gnomon.storage.ordered import Ordered
from gnomon.storage.shifted import MIDDLE, Shifted

CODED = ("qweight", "weight_packed", "_weight_qdata")
"""Endings of tensors that are codes in any dtype; a plain `weight` is codes only where its dtype says so."""
ENDINGS = (
    "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
    "weight", "weight_scale", "weight_scale_inv", "input_scale", "SCB", "weight_format",
    "_weight_qdata", "_weight_scale", "_weight_zero_point", "_weight_scale_and_zero",
)  # fmt: skip
"""Endings of the tensors that can belong to one quantised layer."""
Tensors = Mapping[str, NDArray[Any]]
"""Tensors of one layer, by the end of their names."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which output each four bits of a word are, from the lowest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What a config says of all its quantised layers."""

    program: str
    """gptq, awq, awq-gemv, compressed-tensors, fp8, torchao or bitsandbytes-int8."""
    bits: int = 8
    group: int = 0
    """Columns that share a scale; 0: all."""
    zeros_are_less_one: bool = False
    """Whether GPTQ's zeros are stored less one, as its first format has them."""
    block: Shape | None = None
    packing: str = "BYTES"
    """How torchao's codes lie: one in a byte, or of PACKINGS."""


PACKINGS: Mapping[str, str] = {
    "PLAIN": "two codes in a byte, with offsets", "PLAIN_INT32": "eight codes in a word, with zeros",
    "TILE_PACKED_TO_4D": "tiles of tinygemm's, with offsets",
}  # fmt: skip
"""Those of torchao's `Int4WeightOnlyConfig` that are read."""
TILE_ROWS, TILE_COLUMNS = 8, 128
"""Outputs and inputs of one tile of tinygemm's packing (eight tiles of 16 columns side by side)."""


def method_of(config: Mapping[str, Any]) -> Method | None:
    """None where nothing is quantised. InputError for a way that is not read."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    program = quantization.get("quant_method")
    match program:
        case "gptq":
            bits, group = _whole(quantization, "bits"), _whole(quantization, "group_size")
            # AutoGPTQ stored zeros less one; GPTQModel's v2 stores them as they are, and says so.
            first = quantization.get("checkpoint_format", "gptq") != "gptq_v2"
            return Method(program="gptq", bits=_bits(bits, "gptq"), group=max(0, group), zeros_are_less_one=first)
        case "awq":
            version = str(quantization.get("version", "gemm")).lower()
            if version not in ("gemm", "gemv"):
                raise InputError(
                    f"quantization_config: awq in version {quantization['version']!r}; gemm and gemv are read"
                )
            bits, group = (
                quantization.get("bits", quantization.get("w_bit", 4)),
                quantization.get("group_size", quantization.get("q_group_size", 128)),
            )
            if bits != 4:
                raise InputError(f"quantization_config: awq of {bits} bits; only 4 are read")
            return Method(program="awq" if version == "gemm" else "awq-gemv", bits=4, group=max(0, int(group)))
        case "fp8":
            block = quantization.get("weight_block_size")
            return Method(program="fp8", block=None if block is None else (int(block[0]), int(block[1])))
        case "compressed-tensors":
            return _compressed(quantization)
        case "torchao":
            return Method(program="torchao", bits=_torchao_bits(quantization), packing=_torchao_packing(quantization))
        case "bitsandbytes" if quantization.get("load_in_8bit"):
            return Method(program="bitsandbytes-int8")
    raise InputError(
        f"quantization_config: {program!r} is not read; gptq, awq, fp8, compressed-tensors, torchao, bitsandbytes "
        "(8 bits) are"
    )


def is_packed(config: Mapping[str, Any]) -> bool:
    """Whether linears are stored in a way that `stored` reads."""
    try:
        return method_of(config) is not None
    except InputError:
        return False


def served_format(config: Mapping[str, Any]) -> str | None:
    """What engines call weights that are stored so (`serving.layout.FORMATS`); None for whole ones. InputError for a
    way that has no name there."""
    method = method_of(config)
    if method is None:
        return None
    if method.program == "fp8":
        return "fp8" if method.block is None else "fp8-block"
    if method.program == "compressed-tensors" and _form(config["quantization_config"]) == "float-quantized":
        return "fp8"
    if method.program == "torchao" and "Float8" in str(config["quantization_config"]["quant_type"]["default"]):
        return "fp8"
    if method.bits not in (4, 8):
        raise InputError(f"quantization_config: no engine on record multiplies by {method.bits} bits; give --weights")
    return f"int{method.bits}-wo"


def layers_of(method: Method, dtypes: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Quantised weights (`layer.weight`) among a folder's tensors, and what stands for each, by endings. dtypes:
    tensor -> its dtype in the file."""
    out: dict[str, dict[str, str]] = {}
    for name, dtype in dtypes.items():
        layer, _, end = name.rpartition(".")
        # A plain `weight` is codes only in a dtype that no plain weight has.
        if end in CODED or (end == "weight" and dtype in ("F8_E4M3", "I8")):
            there = {end: f"{layer}.{end}" for end in ENDINGS if f"{layer}.{end}" in dtypes}
            out[f"{layer}.weight"] = there
    return out


def shape_of(method: Method, shapes: Mapping[str, tuple[int, ...]], shape_stored: Sequence[int] = ()) -> Shape:
    """(outputs, inputs) of a layer, by the shapes of its tensors. shape_stored: what `weight_shape` holds, where there
    are words of compressed-tensors, or the file says of a layer of torchao's, whose tiles may be filled up."""
    if "weight_packed" in shapes:
        if len(shape_stored) != 2:
            raise InputError("a layer has weight_packed and no weight_shape beside it; fetch the folder again")
        return int(shape_stored[0]), int(shape_stored[1])
    # GPTQ stores (inputs / codes of a word, outputs), AWQ (inputs, outputs / 8): a word has inputs of one output, or
    # outputs of one input.
    if "qweight" in shapes:
        down, across = shapes["qweight"]
        if method.program == "awq-gemv":
            return down, across * 8
        # AWQ's gemm packs eight outputs in a word, GPTQ 32 / bits inputs.
        return (across * 8, down) if method.program == "awq" else (across, down * 32 // method.bits)
    coded = shapes["_weight_qdata" if method.program == "torchao" else "weight"]
    if method.packing != "BYTES":
        return _torchao_shape(method, coded, shape_stored)
    if len(coded) != 2:
        raise InputError(f"codes of {len(coded)} dims are in a packing that is not read; matrices of int8 and fp8 are")
    return coded[0], coded[1]


def _compressed(quantization: Mapping[str, Any]) -> Method:
    groups = quantization.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise InputError("quantization_config: compressed-tensors with several groups of layers; one is read")
    [group] = groups.values()
    weights, form = group.get("weights") or {}, _form(quantization)
    if form == "float-quantized":
        return Method(program="compressed-tensors", bits=8)
    if form not in ("pack-quantized", "int-quantized"):
        raise InputError(
            f"quantization_config: compressed-tensors in {form!r}; pack-, int- and float-quantized are read"
        )
    size = weights.get("group_size") or 0
    return Method(program="compressed-tensors", bits=_bits(weights.get("num_bits"), form), group=max(0, int(size)))


def _torchao_bits(quantization: Mapping[str, Any]) -> int:
    """Counts the bits of the codes, which lie in int8 each: 4 where the config says so of all layers."""
    kinds = quantization.get("quant_type")
    default = kinds.get("default") if isinstance(kinds, Mapping) else None
    if not isinstance(default, Mapping) or len(kinds or {}) != 1:
        raise InputError("quantization_config: torchao without one config for all layers (quant_type.default)")
    dtype = (default.get("_data") or {}).get("weight_dtype")
    name = dtype.get("_data") if isinstance(dtype, Mapping) else None
    return 4 if name == "int4" or default.get("_type") == INT4 else 8


INT4 = "Int4WeightOnlyConfig"


def _torchao_packing(quantization: Mapping[str, Any]) -> str:
    default = quantization["quant_type"]["default"]
    if default.get("_type") != INT4:
        return "BYTES"
    packing = (default.get("_data") or {}).get("int4_packing_format")
    name = str(packing.get("_data") if isinstance(packing, Mapping) else packing or "PLAIN").upper()
    if name not in PACKINGS:
        raise InputError(
            f"quantization_config: torchao's int4 in the packing {name}; {', '.join(PACKINGS)} are read, take one of "
            f"them (int4_packing_format)"
        )
    return name


def _torchao_shape(method: Method, coded: Sequence[int], shape_stored: Sequence[int]) -> Shape:
    """InputError for codes that are of another packing than the config says, or hold less than the file says."""
    dims = 4 if method.packing == "TILE_PACKED_TO_4D" else 2
    if len(coded) != dims or (dims == 4 and tuple(coded[2:]) != (32, TILE_COLUMNS // 32)):
        raise InputError(f"torchao's codes of shape {list(coded)} are not in the packing {method.packing}")
    if dims == 4:
        whole = coded[0] * TILE_ROWS, coded[1] * TILE_COLUMNS
    else:
        whole = coded[0], coded[1] * (2 if method.packing == "PLAIN" else 8)
    shape = (int(shape_stored[0]), int(shape_stored[1])) if len(shape_stored) == 2 else whole
    # Tiles are filled up, so they may hold more than the layer; other packings hold exactly it.
    if (shape[0] > whole[0] or shape[1] > whole[1]) if dims == 4 else shape != whole:
        raise InputError(
            f"torchao's codes of shape {list(coded)} hold {whole[0]} x {whole[1]}, and the file says {shape}"
        )
    return shape


def _form(quantization: Mapping[str, Any]) -> object:
    """Reads the format of compressed-tensors with one group of layers."""
    [group] = quantization["config_groups"].values()
    return group.get("format") or quantization.get("format")


def _whole(quantization: Mapping[str, Any], key: str) -> int:
    value = quantization.get(key)
    if not isinstance(value, int):
        raise InputError(f"quantization_config: {key} is {value!r}, not a number")
    return value


def _bits(bits: object, of: str) -> int:
    read = (2, 3, 4, 8) if of == "gptq" else (2, 4, 8)
    if bits not in read:
        raise InputError(f"quantization_config: {of} of {bits} bits; {', '.join(map(str, read))} are read")
    assert isinstance(bits, int)
    return bits


def stored(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """(storage, its arrays, (outputs, inputs)) of a layer. InputError for tensors that contradict each other, and
    scales that are not finite."""
    storage, arrays, shape = _read(method, tensors)
    for name in ("scales", "offsets"):
        if name in arrays and not np.isfinite(arrays[name]).all():
            raise InputError(f"a quantised layer has {name} that are not finite; fetch the folder again")
    return storage, arrays, shape


def _read(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    match method.program:
        case "gptq":
            return _gptq(method, tensors)
        case "awq":
            return _awq(method, tensors)
        case "awq-gemv":
            return _awq_gemv(method, tensors)
        case "fp8":
            return _fp8(_one(tensors, "weight"), _scale_of(tensors), method.block)
        case "bitsandbytes-int8":
            codes, sizes = _one(tensors, "weight"), _one(tensors, "SCB").astype(np.float32)
            # SCB is the largest size of a row, which code 127 stands for.
            return _eight(codes, (sizes / np.float32(127))[:, None])
        case "torchao":
            return _torchao(method, tensors)
    if "weight_packed" in tensors:
        return _packed(method, tensors)
    weight = _one(tensors, "weight")
    if weight.dtype == np.int8:
        return _eight(weight, _number(_one(tensors, "weight_scale")).reshape(weight.shape[0], -1))
    return _fp8(weight, _scale_of(tensors), None)


def _one(tensors: Tensors, name: str) -> NDArray[Any]:
    if name not in tensors:
        raise InputError(f"a quantised layer has no {name}; it has {', '.join(sorted(tensors))}")
    return tensors[name]


def _number(x: NDArray[Any]) -> NDArray[np.float32]:
    """Reads scales as float32: bfloat16 comes as uint16."""
    return wide_bfloat16(x) if x.dtype == np.uint16 else x.astype(np.float32)


def _words(packed: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """(rows, words) of 32 bits -> (rows, words * codes), the first in the lowest bits. Codes of three bits run on from
    one word to the next, 32 of them in three."""
    if bits == 3:
        if packed.shape[1] % 3:
            raise InputError(f"codes of three bits fill three words at a time, and rows have {packed.shape[1]}")
        # Little-endian bits of little-endian bytes: bit i of the stream is bit i of the words in order.
        ones = np.unpackbits(np.ascontiguousarray(packed).view(np.uint8), axis=1, bitorder="little")
        return np.asarray(ones.reshape(packed.shape[0], -1, 3) @ np.array([1, 2, 4], np.uint8), np.uint8)
    # [rows, words, codes of a word]; unsigned, or the shift would draw the sign in.
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = packed.view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return codes.reshape(packed.shape[0], -1).astype(np.uint8)


def _integers(
    codes: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8] | None, bits: int, group: int
) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """codes (outputs, inputs), scales and zeros (outputs, groups)."""
    shape = (codes.shape[0], codes.shape[1])
    half = scales.dtype == np.float16
    storage = Integers(
        bits=bits,
        # A group as wide as the row is one scale a row.
        group=0 if group >= shape[1] else group,
        zeros=zeros is not None,
        scale="float16" if half else "float32",
    )
    if why := storage.refused(shape):
        raise InputError(why)
    numbers = scales if half else _number(scales)
    expected = storage.arrays(shape)["scales"].shape
    if numbers.shape != expected:
        raise InputError(
            f"a layer of {shape[0]} x {shape[1]} in groups of {group} has scales of {numbers.shape}, not {expected}"
        )
    return storage, storage.of_codes(codes, numbers, zeros), shape


def _torchao(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """_weight_qdata (outputs, inputs) in int8 or e4m3, _weight_scale (outputs, groups), _weight_zero_point alike."""
    if method.packing != "BYTES":
        return _torchao_int4(method, tensors)
    codes, scales = _one(tensors, "_weight_qdata"), _one(tensors, "_weight_scale")
    if codes.dtype == np.uint8:
        if scales.shape not in ((codes.shape[0], 1), (1, 1), ()):
            raise InputError(f"torchao's fp8 with scales of {scales.shape} is not read; those by row or by tensor are")
        by_row = scales.shape == (codes.shape[0], 1)
        return _fp8(codes, _number(scales if by_row else scales.reshape(())), (1, 0) if by_row else None)
    if codes.dtype != np.int8:
        raise InputError(f"torchao's codes in {codes.dtype} are in a packing that is not read; int8 and fp8 are")
    middle = 2 ** (method.bits - 1)
    groups = scales.reshape(codes.shape[0], -1)
    zeros = tensors.get("_weight_zero_point")
    # int16: offsets and codes are of -128 to 127, and with the middle added of up to 255.
    wide = None if zeros is None or not zeros.any() else zeros.reshape(groups.shape).astype(np.int16) + middle
    numbers = codes.astype(np.int16) + middle
    for x in (numbers, wide):
        if x is not None and (x.min() < 0 or x.max() >= 2 * middle):
            raise InputError(f"torchao's codes are out of {method.bits} bits")
    zero_codes = None if wide is None else wide.astype(np.uint8)
    return _integers(numbers.astype(np.uint8), groups, zero_codes, method.bits, codes.shape[1] // groups.shape[1])


def _torchao_int4(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """_weight_qdata as `PACKINGS` says; scales and offsets or zeros (groups, outputs), or (groups, outputs, 2) of both.
    What tiles are filled up with is dropped."""
    codes = _one(tensors, "_weight_qdata")
    rows, columns = _torchao_shape(method, codes.shape, [int(one) for one in tensors.get("weight_shape", ())])
    if method.packing == "TILE_PACKED_TO_4D":
        both = _number(_one(tensors, "_weight_scale_and_zero"))
        scales, others, plain = both[..., 0].T, both[..., 1].T, _of_tiles(codes)
    else:
        scales, others = _number(_one(tensors, "_weight_scale")).T, _one(tensors, "_weight_zero_point").T
        plain = (
            (np.stack([codes & 15, codes >> 4 & 15], -1).reshape(rows, columns) + MIDDLE & 15).astype(np.uint8)
            if method.packing == "PLAIN"
            else _words(np.ascontiguousarray(codes), 4)
        )
    groups = scales.shape[-1]
    if scales.shape != others.shape or len(scales) != len(plain) or not groups or plain.shape[1] % groups:
        raise InputError(f"torchao's codes of {plain.shape} have scales of {scales.shape} and zeros of {others.shape}")
    group = plain.shape[1] // groups
    if columns % group:
        raise InputError(f"torchao's groups of {group} end within a row of {columns}")
    plain, scales, others = plain[:rows, :columns], scales[:rows, : columns // group], others[:rows, : columns // group]
    if method.packing == "PLAIN_INT32":
        if others.min() < 0 or others.max() > 15:
            raise InputError("torchao's zeros are out of 4 bits")
        return _integers(plain, np.ascontiguousarray(scales), others.astype(np.uint8), 4, group)
    storage = Shifted(group=0 if group >= columns else group)
    return storage, storage.of_codes(plain, scales, _number(others)), (rows, columns)


def _of_tiles(words: NDArray[Any]) -> NDArray[np.uint8]:
    """(rows / 8, columns / 128, 32, 4) words -> (rows, columns) codes. Of a word's lane its row is the quotient by 4,
    its columns are 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of both tiles that the word is of, c being the remainder; even
    columns lie in its lower half."""
    tiles, tiles_across, _, pairs = words.shape
    codes = words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)
    lanes = codes.reshape(
        tiles, tiles_across, TILE_ROWS, 4, pairs, 2, 2, 2
    )  # row, c, pair of tiles, odd, tile, upper half
    order = lanes.transpose(0, 2, 1, 4, 6, 7, 3, 5)  # rows; then columns: beside, pair, tile, upper half, c, odd
    return order.reshape(tiles * TILE_ROWS, tiles_across * TILE_COLUMNS).astype(np.uint8)


def _gptq(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """qweight (inputs / codes of a word, outputs), qzeros (groups, outputs / codes), scales (groups, outputs)."""
    # Words run down the inputs, so the matrix is turned before its words are taken apart along rows. Zeros run along
    # the outputs and are turned after.
    codes = _words(np.ascontiguousarray(_one(tensors, "qweight").T), method.bits)
    zeros = _words(_one(tensors, "qzeros"), method.bits).T
    if method.zeros_are_less_one:  # in the bits of a code: 15 + 1 is 0, as AutoGPTQ computes it
        zeros = (zeros + np.uint8(1)) & np.uint8(2**method.bits - 1)
    return _grouped(method, codes, _one(tensors, "scales").T, np.ascontiguousarray(zeros), tensors.get("g_idx"))


def _grouped(
    method: Method,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    zeros: NDArray[np.uint8] | None,
    order: NDArray[Any] | None,
) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """Groups side by side, or as `order` says of each column: those that GPTQ made in the order of activations."""
    rows, columns = codes.shape
    group = method.group or columns
    if order is None or (order < 0).all() or np.array_equal(order, np.arange(columns) // group):
        return _integers(codes, scales, zeros, method.bits, method.group)
    if order.shape != (columns,) or order.min() < 0 or order.max() >= scales.shape[1]:
        raise InputError(
            f"the groups of columns (g_idx) are {order.shape} of {order.min()} to {order.max()}, and there are "
            f"{columns} columns and {scales.shape[1]} groups; fetch the folder again"
        )
    half = scales.dtype == np.float16
    storage = Ordered(bits=method.bits, group=group, scale="float16" if half else "float32")
    if why := storage.refused((rows, columns)):
        raise InputError(why)
    numbers = scales if half else _number(scales)
    # Without zeros codes are symmetric around the middle of their range.
    filled = np.full(scales.shape, 2 ** (method.bits - 1), np.uint8) if zeros is None else zeros
    if numbers.shape != (rows, columns // group) or filled.shape != numbers.shape:
        raise InputError(
            f"a layer of {rows} x {columns} in groups of {group} has scales of {numbers.shape} and zeros of "
            f"{filled.shape}"
        )
    return storage, storage.of_codes(codes, numbers, filled, order), (rows, columns)


def _awq_gemv(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """qweight (outputs, inputs / 8) in their order, qzeros (outputs, groups / 8) and scales (outputs, groups), both
    filled up to whole words for several groups beside each other."""
    codes = _words(_one(tensors, "qweight"), 4)
    groups = -(-codes.shape[1] // (method.group or codes.shape[1]))
    zeros = np.ascontiguousarray(_words(_one(tensors, "qzeros"), 4)[:, :groups])
    return _integers(codes, _one(tensors, "scales")[:, :groups], zeros, 4, method.group)


def _awq(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """qweight (inputs, outputs / 8), qzeros (groups, outputs / 8), scales (groups, outputs)."""

    def outputs(packed: NDArray[Any]) -> NDArray[np.uint8]:
        parts = _words(packed, 4).reshape(packed.shape[0], -1, 8)
        out = np.empty_like(parts)
        # Place k of a word is output AWQ_ORDER[k]: assigned through the order here, read through it on the way back
        # (`awq`).
        out[..., list(AWQ_ORDER)] = parts
        return np.ascontiguousarray(out.reshape(packed.shape[0], -1).T)

    codes, zeros = outputs(_one(tensors, "qweight")), outputs(_one(tensors, "qzeros"))
    return _integers(codes, _one(tensors, "scales").T, zeros, 4, method.group)


def _packed(method: Method, tensors: Tensors) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """weight_packed (outputs, inputs / codes of a word), weight_scale (outputs, groups), weight_shape and
    weight_zero_point (outputs / codes, groups)."""
    rows, columns = (int(one) for one in _one(tensors, "weight_shape"))
    # Rows are filled up to whole words: what is beyond the columns says nothing.
    codes = _words(_one(tensors, "weight_packed"), method.bits)[:, :columns]
    zeros = None
    if "weight_zero_point" in tensors:
        packed = tensors["weight_zero_point"]
        zeros = np.ascontiguousarray(_words(np.ascontiguousarray(packed.T), method.bits)[:, :rows].T)
    if codes.shape != (rows, columns):
        raise InputError(f"weight_packed has codes of {codes.shape}, and weight_shape says {rows} x {columns}")
    return _grouped(method, codes, _one(tensors, "weight_scale"), zeros, tensors.get("weight_g_idx"))


def packed(storage: Integers, arrays: Arrays, shape: Shape) -> dict[str, NDArray[Any]]:
    """What compressed-tensors' `pack_quantized` writes of a layer, by the end of the names. `stored` reads the same
    arrays back. InputError where it cannot hold it."""
    if storage.bits == 3:
        raise InputError("compressed-tensors' words hold codes of 2, 4 and 8 bits, and these have 3; take gptq")
    out = {
        "weight_packed": _in_words(storage.codes_of(arrays, shape), storage.bits),
        "weight_scale": arrays["scales"],
        "weight_shape": np.array(shape, np.int64),
    }
    if storage.zeros:
        out["weight_zero_point"] = np.ascontiguousarray(_in_words(arrays["zeros"].T, storage.bits).T)
    return out


def gptq(storage: Integers, arrays: Arrays, shape: Shape) -> dict[str, NDArray[Any]]:
    """What GPTQ's first format has of a layer. InputError where it cannot hold it."""
    each = 32 if storage.bits == 3 else 32 // storage.bits
    _check_words(storage, shape, each, each, "gptq")
    # The first format's readers add 1 to what is stored: wraps in the bits of a code, as theirs does.
    zeros = (_zeros(storage, arrays) - np.uint8(1)) & np.uint8(2**storage.bits - 1)
    columns, group = shape[1], storage.group or shape[1]
    return {
        "qweight": np.ascontiguousarray(_in_words(storage.codes_of(arrays, shape), storage.bits).T),
        "qzeros": _in_words(np.ascontiguousarray(zeros.T), storage.bits),
        "scales": np.ascontiguousarray(_halves(arrays["scales"], "gptq").T),
        "g_idx": (np.arange(columns) // group).astype(np.int32),
    }


def awq(storage: Integers, arrays: Arrays, shape: Shape) -> dict[str, NDArray[Any]]:
    """What AutoAWQ's `gemm` has of a layer. InputError where it cannot hold it."""
    if storage.bits != 4:
        raise InputError(f"awq has codes of 4 bits, and these have {storage.bits}; take gptq or compressed-tensors")
    _check_words(storage, shape, 8, 1, "awq")

    def outputs(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
        parts = codes.T.reshape(codes.shape[1], -1, 8)[..., list(AWQ_ORDER)]
        return _in_words(np.ascontiguousarray(parts.reshape(codes.shape[1], -1)), 4)

    return {
        "qweight": outputs(storage.codes_of(arrays, shape)),
        "qzeros": outputs(_zeros(storage, arrays)),
        "scales": np.ascontiguousarray(_halves(arrays["scales"], "awq").T),
    }


def _zeros(storage: Integers, arrays: Arrays) -> NDArray[np.uint8]:
    """Returns the zero points (outputs, groups)."""
    if storage.zeros:
        return np.asarray(arrays["zeros"], np.uint8)
    return np.full(arrays["scales"].shape, storage.zero, np.uint8)


def _halves(scales: NDArray[Any], program: str) -> NDArray[np.float16]:
    half = scales.astype(np.float16)
    if not np.array_equal(half.astype(np.float32), scales.astype(np.float32)):
        raise InputError(f"{program} has scales in float16, in which some of these are other numbers")
    return np.asarray(half)


def _check_words(storage: Integers, shape: Shape, rows: int, columns: int, program: str) -> None:
    if storage.ternary:
        raise InputError(f"{program} has no ternary weights")
    if shape[0] % rows or shape[1] % columns:
        raise InputError(
            f"{program} has whole words of codes: {shape[0]} x {shape[1]} is no multiple of {rows} x {columns}"
        )


def _in_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """(rows, columns) -> (rows, words) of 32 bits, the first in the lowest bits; filled up with zeros. As `_words`."""
    if bits == 3:
        ones = np.unpackbits(codes[..., None], axis=2, count=3, bitorder="little").reshape(codes.shape[0], -1)
        return np.packbits(ones, axis=1, bitorder="little").view(np.int32)
    each = 32 // bits
    padded = np.zeros((codes.shape[0], -(-codes.shape[1] // each) * each), np.uint32)
    padded[:, : codes.shape[1]] = codes
    words = np.zeros((codes.shape[0], padded.shape[1] // each), np.uint32)
    for i in range(each):
        words |= padded[:, i::each] << np.uint32(bits * i)
    return words.view(np.int32)


def packed_config(storage: Integers, unquantized: Sequence[str]) -> dict[str, Any]:
    """`quantization_config` of a folder whose linears but `left` are `packed` so."""
    weights = {
        "num_bits": storage.bits,
        "type": "int",
        "symmetric": not storage.zeros,
        "strategy": "group" if storage.group else "channel",
        "group_size": storage.group or None,
        "dynamic": False,
        "actorder": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def eight_config(unquantized: Sequence[str]) -> dict[str, Any]:
    """The same of eight-bit floats with a scale for each output."""
    weights = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "group_size": None, "dynamic": False,
        "actorder": None,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "ignore": list(unquantized), "kv_cache_scheme": None, "config_groups": {"group_0": group},
    }  # fmt: skip


def gptq_config(storage: Integers, unquantized: Sequence[str]) -> dict[str, Any]:
    """The same of GPTQ's first format."""
    return {
        "quant_method": "gptq", "bits": storage.bits, "group_size": storage.group or -1, "desc_act": False,
        "sym": not storage.zeros, "checkpoint_format": "gptq", "lm_head": False,
        "modules_to_not_convert": list(unquantized),
    }  # fmt: skip


def awq_config(storage: Integers, unquantized: Sequence[str]) -> dict[str, Any]:
    """The same of AutoAWQ's `gemm`."""
    return {
        "quant_method": "awq", "bits": storage.bits, "group_size": storage.group or -1, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": list(unquantized),
    }  # fmt: skip


def _eight(codes: NDArray[Any], scales: NDArray[np.float32]) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """Signed codes with a scale a row, or one for all."""
    every = np.broadcast_to(scales, (codes.shape[0], scales.shape[1] if scales.size > 1 else 1)).copy()
    offset = (codes.astype(np.int16) + 128).astype(np.uint8)
    group = 0 if every.shape[1] == 1 else codes.shape[1] // every.shape[1]
    return _integers(offset, every, None, 8, group)


def _scale_of(tensors: Tensors) -> NDArray[np.float32]:
    name = "weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"
    return _number(_one(tensors, name))


def _fp8(
    codes: NDArray[Any], scales: NDArray[np.float32], block: Shape | None
) -> tuple[Storage, dict[str, NDArray[Any]], Shape]:
    """Both of DeepSeek's `weight_scale_inv` and others' `weight_scale` multiply."""
    shape = (codes.shape[0], codes.shape[1])
    if block is None and scales.size > 1:
        block = (1, 0)
    storage = Float8(block=block)
    expected = storage.arrays(shape)["scales"].shape
    if scales.size != expected[0] * expected[1]:
        raise InputError(
            f"fp8 of {shape[0]} x {shape[1]} in {storage.name} has {scales.size} scales, not {expected[0]} x "
            f"{expected[1]}"
        )
    return storage, {"codes": codes.view(np.uint8), "scales": scales.reshape(expected)}, shape

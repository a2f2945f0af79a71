"""Headers of safetensors files, good and malformed, against the library that wrote the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gnomon.errors import InputError
from gnomon.formats.huggingface.safetensors import DTYPE_BYTES, read_header

safetensors = pytest.importorskip("safetensors")


def file_of(header: str | bytes, data: int, length: int | None = None) -> bytes:
    """A file with this header, as long as it is or said to be, and so many bytes of tensors."""
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(data)


def by_library(data: bytes) -> set[str] | None:
    """Names of its tensors; None where it refuses."""
    try:
        return {name for name, _ in safetensors.deserialize(data)}
    except safetensors.SafetensorError:
        return None


def by_us(path: Path, data: bytes) -> set[str] | None:
    path.write_bytes(data)
    try:
        header = read_header(path)
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)
        return None
    assert header.nbytes == len(data)
    return set(header.entries)


NUMBERS = st.sampled_from([0, 1, 2, 3, 4, 8, 12, -1, 1 << 63, (1 << 64) - 1, 1 << 64, True, 1.0, "4", None])
SMALL = st.integers(0, 4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """(tensors that lie one after another, or nearly so; bytes of them)."""
    at, values = 0, {}
    for name in draw(st.permutations("abc"))[: draw(SMALL)]:
        dtype, shape = draw(st.sampled_from(["F32", "BF16", "U8", "BOOL", "F64"])), draw(st.lists(SMALL, max_size=3))
        size = DTYPE_BYTES[dtype]
        for n in shape:
            size *= n
        values[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    if values and draw(st.booleans()):
        one = values[draw(st.sampled_from(sorted(values)))]
        match draw(st.integers(0, 5)):
            case 0:
                one["data_offsets"][draw(st.integers(0, 1))] = draw(NUMBERS)
            case 1:
                one["shape"] = [*one["shape"], draw(NUMBERS)]
            case 2:
                shift = draw(st.sampled_from([-4, -1, 1, 4]))
                one["data_offsets"] = [place + shift for place in one["data_offsets"]]
            case 3:
                del one[draw(st.sampled_from(sorted(one)))]
            case 4:
                one["more"] = draw(NUMBERS)
            case 5:
                one["dtype"] = draw(st.sampled_from(["f32", "", "F128", 4, None]))
    if draw(st.booleans()):
        values["__metadata__"] = draw(st.sampled_from([{}, {"a": "b"}, {"a": 1}, {"a": None}, "text", None, [], 3]))
    return values, at


@given(made=headers(), more=st.sampled_from([0, 0, 0, -1, 1, 4, 8]), pad=st.sampled_from(["", "  ", "\n", "\0"]))
@example(made=({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}, 6), more=0, pad="")  # fmt: skip
@example(made=({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, 4), more=9, pad="")
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_the_library_refuses_is_refused(
    tmp_path: Path, made: tuple[dict[str, Any], int], more: int, pad: str
) -> None:
    values, size = made
    data = file_of(json.dumps(values) + pad, max(0, size + more))
    assert by_us(tmp_path / "one.safetensors", data) == by_library(data)


ONE = '"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'


@pytest.mark.parametrize(
    "header",
    [
        "{}", "", "[]", "{", "null", "4", f"{{{ONE}}}", f" {{{ONE}}}", f"{{{ONE}}}\t ", f"{{{ONE},}}",
        f"\ufeff{{{ONE}}}",
        f"{{{ONE}}}{{}}", b'{"\xff":1}', ONE.join("{}").encode("utf-16"), ONE.replace("[0,4]", "[-0,4]").join("{}"),
        ONE.replace("[0,4]", "[0,4.0]").join("{}"), ONE.replace("[0,4]", "[0,4e0]").join("{}"),
        ONE.replace("[4]", "[4,NaN]").join("{}"), ONE.replace('"a"', r'"\ud800"').join("{}"),
        ONE.replace('"a"', '"\ta"').join("{}"), ONE.replace("[4]", f"[{'9' * 5000}]").join("{}"),
        ONE.replace('"U8"', '"U8","dtype":"I8"').join("{}"), ONE.replace("[0,4]", "[0,4,8]").join("{}"),
        ONE.replace("[0,4]", "[0]").join("{}"), ONE.replace("[4]", "{}").join("{}"), "[" * 100_000,
        '{"__metadata__":{"a":"b"},"__metadata__":{}}', f'{{"__metadata__":"text",{ONE}}}',
        ONE.replace("[4]", f"[{2**33},{2**33}]").join("{}"),
    ],
)  # fmt: skip
def test_text_that_is_nearly_a_header(tmp_path: Path, header: str | bytes) -> None:
    data = file_of(header, 4)
    assert by_us(tmp_path / "one.safetensors", data) == by_library(data)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 1 << 20, 100_000_001, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_that_is_longer_or_shorter_than_it_says(tmp_path: Path, length: int) -> None:
    data = file_of(ONE.join("{}"), 4, length)
    assert by_us(tmp_path / "one.safetensors", data) is None and by_library(data) is None


def test_a_tensor_that_is_there_twice_is_refused_where_the_library_takes_one(tmp_path: Path) -> None:
    """Of the two, nobody could say which was meant."""
    (path := tmp_path / "one.safetensors").write_bytes(file_of(f"{{{ONE},{ONE}}}", 4))
    with pytest.raises(InputError, match="'a' is there twice"):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (f'{{{ONE},"b":{{"dtype":"U8","shape":[3],"data_offsets":[2,5]}}}}', 5, "contradicts itself: a and b overlap"),
        (ONE.replace("0,4", "1,5").join("{}"), 5, "bytes before a belong to no tensor"),
        (ONE.join("{}"), 9, "has 5 bytes after its last tensor"),
        (ONE.join("{}"), 3, "is cut short: a ends at byte 6"),
        (f'{{"__metadata__":"text",{ONE}}}', 4, "its __metadata__ is no object of texts"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, header: str, data: int, said: str) -> None:
    (path := tmp_path / "one.safetensors").write_bytes(file_of(header, data))
    with pytest.raises(InputError, match=said):
        read_header(path)

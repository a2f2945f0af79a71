"""YAML: plain values come back; what is hostile, ambiguous or not plain is refused, with its place."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnomon.errors import FormatError, GnomonError, InputError
from gnomon.formats.yaml_file import emit_yaml, read_yaml


def test_plain_values() -> None:
    text = "a: 1\nb: [1.5, null, yes, '07', 1e-4]\nc:\n  d: &x text\n  e: *x\nf: 2020-01-01\n"
    assert read_yaml(text, "t") == {
        "a": 1,
        "b": [1.5, None, True, "07", "1e-4"],  # YAML 1.1: an exponent needs a point and a sign
        "c": {"d": "text", "e": "text"},
        "f": "2020-01-01",
    }


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "once its aliases are written out"),
        ("a: &a [*a]", "alias within what it repeats"),
        ("a: " + "[" * 100, "levels"),
        ("a: " + "[" * 100_000, "levels"),
        ("a: [" + "1," * 200_001 + "]", "values"),
        ("a: 1\na: 2", "t:1: 'a' is given twice"),
        ("a: .nan", "must be finite"),
        ("a: -.inf", "must be finite"),
        ("a: !!python/object/apply:os.system ['x']", "python"),
        ("a: !!python/name:os.system", "which is not read"),
        ("a: !mine 3", "which is not read"),
        ("<<: {a: 1}", "merge keys"),
        ("? [a]\n: 1", "not a word"),
        ("- 1", "holds a list"),
        ("", "is empty"),
        ("a: 2020-99-99", "is no timestamp"),
    ],
)
def test_what_is_no_job_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_yaml(text, "t")


@pytest.mark.parametrize("text", ["a: [1", "a: b: c", "\tx: 1", "a: *none", "a: 1\n--- \nb: 2", "a: \x01"])
def test_what_is_not_yaml_is_an_error(text: str) -> None:
    with pytest.raises(FormatError, match="not YAML"):
        read_yaml(text, "t")


def test_without_the_package_there_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def refuse(name: str, *rest: Any, **more: Any) -> Any:
        if name == "yaml":
            raise ImportError(name)
        return plain(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"pip install 'gnomon\[formats\]'"):
        read_yaml("a: 1", "t")


@given(st.text(alphabet="ab:-[]{}&*!'\"\n #?|>%1.", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    """What is read is read again from what is written of it."""
    try:
        result = read_yaml(text, "t")
    except GnomonError as error:
        assert str(error)
    else:
        assert read_yaml(emit_yaml(result), "t") == result


scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    ["no", "1e-5", "07", "a: b", ""]
)
keys = texts.filter(lambda key: key != "<<")


@given(
    st.dictionaries(
        keys, st.recursive(scalars | texts, lambda inner: st.dictionaries(keys, inner, max_size=3)), min_size=1
    )
)
def test_what_is_written_is_read(values: dict[str, Any]) -> None:
    assert read_yaml(emit_yaml(values), "t") == values
